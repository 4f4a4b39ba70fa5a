//! From what the user names to an attached source that records: chooses software and source, says the price, attaches,
//! and records into what it is given, a run or a view.

use crate::cli::{Observe, SourceKind, TargetSource, conflict};
use crate::price::{self, Agreed, Asked, Choice};
use crate::recorder::{self, Open, Plan};
use crate::signals::Signals;
use crate::software::{self, Software};
use crate::telemetry;
use crate::window::Wanted;
use anyhow::Result;
use run_format::Side;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What is to be recorded.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The side.
    pub side: Side,
    /// The software, and how it is looked at.
    pub observe: &'a Observe,
    /// What a target's commands are taken from; `None` for a host.
    pub from: Option<&'a TargetSource>,
}

/// Where it goes, and what goes on beside it.
pub struct Going<'a> {
    /// Makes what it goes into.
    pub open: &'a Open<'a>,
    /// Measures what recording costs.
    pub measure_overhead: bool,
    /// The user's series.
    pub series: Option<PathBuf>,
    /// The user's labels.
    pub labels: BTreeMap<String, String>,
    /// Runs while it lasts, and its end ends it.
    pub command: &'a [OsString],
    /// Neither price nor progress is shown, nor what came of it.
    pub quiet: bool,
    /// No progress line, but all else.
    pub has_own_progress: bool,
}

impl<'a> Going<'a> {
    /// Into a view, which shows its own progress and keeps nothing that needs a run.
    pub fn into_view(open: &'a Open<'a>) -> Going<'a> {
        Going {
            open,
            measure_overhead: false,
            series: None,
            labels: BTreeMap::new(),
            command: &[],
            quiet: false,
            has_own_progress: true,
        }
    }
}

impl Subject<'_> {
    /// Refuses what the source can not do, before anything is touched.
    pub fn check(&self) {
        let Some(from) = self.from else { return };
        let observe = self.observe;
        match from.source {
            None | Some(SourceKind::Uprobe) if from.rpc.is_some() && observe.max_overhead.is_none() => {
                conflict(
                    "--rpc is for SPDK's tracepoints, and uprobes need none: give --source trace or hybrid with it, or leave it out",
                )
            }
            Some(SourceKind::Trace) if observe.sample > 1 => conflict(
                "--sample chooses by the cid, and SPDK's trace ring has none: leave --sample out, or record with --source hybrid or uprobe",
            ),
            Some(SourceKind::Trace) if observe.layout.is_some() || observe.debug_file.is_some() => conflict(
                "--layout and --debug-file are for uprobes; SPDK's trace ring needs neither: leave them out",
            ),
            _ => {}
        }
    }

    /// Records it until something ends it. `signals` are not counted yet.
    ///
    /// # Errors
    /// When nothing can be recorded, with what is missing and what to do; or when the recording can not go on.
    pub fn record(&self, going: &Going<'_>, signals: &Signals) -> Result<ExitCode> {
        let observe = self.observe;
        let source = self.from.and_then(|from| from.source);
        let rpc = self.from.and_then(|from| from.rpc.as_deref());
        let software = software::find(self.side, observe.kernel, observe.spdk.as_deref())?;
        if let (Software::Kernel, Some(SourceKind::Trace | SourceKind::Hybrid)) = (&software, source) {
            conflict(
                "--source is for SPDK's target, and the kernel's would be recorded: name the program with --spdk",
            )
        }
        let options = spdk_options(observe);
        let asked = Asked {
            side: self.side,
            options: &options,
            source: source.map(|kind| match kind {
                SourceKind::Uprobe => Choice::Hooks,
                SourceKind::Hybrid => Choice::Hybrid,
                SourceKind::Trace => Choice::Trace,
            }),
            rpc,
            window: observe.window,
            budget: observe.max_overhead,
        };
        let agreed = match price::agree(&asked, &software) {
            Ok(agreed) => Some(agreed),
            Err(error) if observe.max_overhead.is_some() => return Err(error),
            // What keeps the price from being told keeps the recording from starting, and that says it better.
            Err(_) => None,
        };
        if let Some(agreed) = &agreed
            && !going.quiet
        {
            // The recording begins whether or not somebody reads this.
            let _ = write!(std::io::stderr(), "{}", agreed.text);
        }
        // From before anything is attached, so that Ctrl-C ends in order; what is until then ends at once.
        signals.count();
        self.attach(going, &software, &asked, agreed, signals)
    }

    /// Attaches what is there and records it. Six sources, one way.
    fn attach(
        &self,
        going: &Going<'_>,
        software: &Software,
        asked: &Asked<'_>,
        agreed: Option<Agreed>,
        signals: &Signals,
    ) -> Result<ExitCode> {
        let observe = self.observe;
        let choice = agreed.as_ref().map_or(asked.source.unwrap_or(Choice::Hooks), |agreed| agreed.source);
        let prices = agreed.as_ref().map(|agreed| agreed.prices.clone());
        let plan = Plan {
            open: going.open,
            duration: observe.duration,
            one_in: observe.sample,
            windows: Wanted {
                spec: observe.window,
                share: agreed.as_ref().and_then(|agreed| agreed.share),
                measure: going.measure_overhead,
            },
            price: agreed.map(|agreed| agreed.price),
            telemetry: telemetry::Asked {
                every: observe.telemetry.0,
                series: going.series.clone(),
                rpc: asked.rpc.map(Path::to_owned),
            },
            labels: going.labels.clone(),
            command: going.command,
            quiet: going.quiet,
            has_own_progress: going.has_own_progress,
        };
        let options = spdk_probes::Options { prices, ..asked.options.clone() };
        match (software, self.side, choice) {
            (Software::Spdk(process), Side::Host, _) => {
                recorder::record(spdk_probes::Host::attach(process, &options)?, &plan, signals)
            }
            (Software::Spdk(process), Side::Target, Choice::Hooks) => {
                recorder::record(spdk_probes::Target::attach(process, &options)?, &plan, signals)
            }
            (Software::Spdk(process), Side::Target, Choice::Hybrid | Choice::Trace) => {
                let identities = (choice == Choice::Hybrid).then_some(options);
                let options = spdk_probes::TraceOptions { rpc: asked.rpc.map(Path::to_owned), identities };
                recorder::record(spdk_probes::TraceTarget::attach(process, &options)?, &plan, signals)
            }
            (Software::Kernel, ..) if observe.debug_file.is_some() => conflict(
                "--debug-file is for an SPDK program, and the kernel's driver would be recorded: name the program with --spdk, or leave --debug-file out",
            ),
            (Software::Kernel, Side::Host, _) => {
                recorder::record(kernel_probes::Host::attach(&kernel_options(observe))?, &plan, signals)
            }
            (Software::Kernel, Side::Target, _) => {
                recorder::record(kernel_probes::Target::attach(&kernel_options(observe))?, &plan, signals)
            }
        }
    }
}

fn kernel_options(observe: &Observe) -> kernel_probes::Options {
    kernel_probes::Options {
        one_in: observe.sample,
        ring_bytes: ring_bytes(observe),
        ..kernel_probes::Options::default()
    }
}

fn spdk_options(observe: &Observe) -> spdk_probes::Options {
    spdk_probes::Options {
        one_in: observe.sample,
        ring_bytes: ring_bytes(observe),
        layout: observe.layout.clone(),
        debug_file: observe.debug_file.clone(),
        ..spdk_probes::Options::default()
    }
}

fn ring_bytes(observe: &Observe) -> u32 {
    // The kernel takes a power of two.
    observe.ring_mib.next_power_of_two() << 20
}
