//! `fabscope record host|target`: chooses the source, attaches it, and records.

use crate::cli::{Record, RecordCommon, RecordSide, RecordTarget, SourceKind, conflict};
use crate::price::{self, Agreed, Asked, Choice};
use crate::recorder::{self, Plan};
use crate::signals::Signals;
use crate::software::{self, Software};
use crate::window::Wanted;
use crate::{telemetry, workload};
use anyhow::Result;
use run_format::{RunWriter, Side};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Runs `record`.
///
/// # Errors
/// When nothing can be recorded, with what is missing and what to do; or when the recording could not be
/// written.
pub fn run(what: &Record) -> Result<ExitCode> {
    let signals = Signals::until_counted()?;
    let (side, RecordSide { kernel, common }) = match what {
        Record::Host(options) => (Side::Host, options),
        Record::Target(options) => (Side::Target, &options.side),
    };
    if let Record::Target(options) = what {
        check_source(options);
    }
    check_labels(&common.label);
    // What the recording would fail at later is refused before the system under test is touched, and before
    // --force removes anything.
    RunWriter::may_create(output(common, side), common.force)?;
    workload::check(&common.command)?;
    telemetry::check(common.series.as_deref(), !common.command.is_empty())?;
    let (asked, rpc) = match what {
        Record::Host(_) => (None, None),
        Record::Target(RecordTarget { source, rpc, .. }) => (*source, rpc.as_deref()),
    };
    let software = software::find(side, *kernel, common.spdk.as_deref())?;
    if let (Software::Kernel, Some(SourceKind::Trace | SourceKind::Hybrid)) = (&software, asked) {
        conflict(
            "--source is for SPDK's target, and the kernel's would be recorded: name the program with --spdk",
        )
    }
    let options = spdk_options(common);
    let asked = Asked {
        side,
        options: &options,
        source: asked.map(|kind| match kind {
            SourceKind::Uprobe => Choice::Hooks,
            SourceKind::Hybrid => Choice::Hybrid,
            SourceKind::Trace => Choice::Trace,
        }),
        rpc,
        window: common.window,
        budget: common.max_overhead,
    };
    let agreed = match price::agree(&asked, &software) {
        Ok(agreed) => Some(agreed),
        Err(error) if common.max_overhead.is_some() => return Err(error),
        // What keeps the price from being told keeps the recording from starting, and that says it better.
        Err(_) => None,
    };
    if let Some(agreed) = &agreed
        && !common.quiet
    {
        // The recording begins whether or not somebody reads this.
        let _ = write!(std::io::stderr(), "{}", agreed.text);
    }
    // From before anything is attached, so that Ctrl-C ends in order; what is until then ends at once.
    signals.count();
    source(side, common, &software, &asked, agreed, &signals)
}

/// A label that is given twice would silently lose a value.
fn check_labels(labels: &[(String, String)]) {
    let again = labels.iter().enumerate().find(|(n, (name, _))| labels[..*n].iter().any(|l| l.0 == *name));
    if let Some((_, (name, _))) = again {
        conflict(&format!("the label {name} is given twice"))
    }
}

/// Refuses what a source can not do.
fn check_source(options: &RecordTarget) {
    let common = &options.side.common;
    match options.source {
        None | Some(SourceKind::Uprobe) if options.rpc.is_some() && common.max_overhead.is_none() => {
            conflict(
                "--rpc is for SPDK's tracepoints, and uprobes need none: give --source trace or hybrid with it, or leave it out",
            )
        }
        Some(SourceKind::Trace) if common.sample > 1 => conflict(
            "--sample chooses by the cid, and SPDK's trace ring has none: leave --sample out, or record with --source hybrid or uprobe",
        ),
        Some(SourceKind::Trace) if common.layout.is_some() || common.debug_file.is_some() => conflict(
            "--layout and --debug-file are for uprobes; SPDK's trace ring needs neither: leave them out",
        ),
        _ => {}
    }
}

/// Attaches what is there and records it. Six sources, one way.
fn source(
    side: Side,
    common: &RecordCommon,
    software: &Software,
    asked: &Asked<'_>,
    agreed: Option<Agreed>,
    signals: &Signals,
) -> Result<ExitCode> {
    let choice = agreed.as_ref().map_or(asked.source.unwrap_or(Choice::Hooks), |agreed| agreed.source);
    let prices = agreed.as_ref().map(|agreed| agreed.prices.clone());
    let plan = Plan {
        windows: Wanted { share: agreed.as_ref().and_then(|agreed| agreed.share), ..windows(common) },
        price: agreed.map(|agreed| agreed.price),
        ..plan(common, side, asked.rpc)
    };
    let options = spdk_probes::Options { prices, ..asked.options.clone() };
    match (software, side, choice) {
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
        (Software::Kernel, ..) if common.debug_file.is_some() => conflict(
            "--debug-file is for an SPDK program, and the kernel's driver would be recorded: name the program with --spdk, or leave --debug-file out",
        ),
        (Software::Kernel, Side::Host, _) => {
            recorder::record(kernel_probes::Host::attach(&kernel_options(common))?, &plan, signals)
        }
        (Software::Kernel, Side::Target, _) => {
            recorder::record(kernel_probes::Target::attach(&kernel_options(common))?, &plan, signals)
        }
    }
}

fn kernel_options(common: &RecordCommon) -> kernel_probes::Options {
    kernel_probes::Options {
        one_in: common.sample,
        ring_bytes: ring_bytes(common),
        ..kernel_probes::Options::default()
    }
}

fn spdk_options(common: &RecordCommon) -> spdk_probes::Options {
    spdk_probes::Options {
        one_in: common.sample,
        ring_bytes: ring_bytes(common),
        layout: common.layout.clone(),
        debug_file: common.debug_file.clone(),
        ..spdk_probes::Options::default()
    }
}

fn ring_bytes(common: &RecordCommon) -> u32 {
    // The kernel takes a power of two.
    common.ring_mib.next_power_of_two() << 20
}

fn output(common: &RecordCommon, side: Side) -> &Path {
    match (&common.output, side) {
        (Some(output), _) => output,
        (None, Side::Host) => Path::new("host.run"),
        (None, Side::Target) => Path::new("target.run"),
    }
}

fn windows(common: &RecordCommon) -> Wanted {
    Wanted { spec: common.window, share: None, measure: common.measure_overhead }
}

fn plan<'a>(common: &'a RecordCommon, side: Side, rpc: Option<&Path>) -> Plan<'a> {
    Plan {
        output: output(common, side),
        force: common.force,
        duration: common.duration,
        one_in: common.sample,
        windows: windows(common),
        price: None,
        telemetry: telemetry::Asked {
            every: common.telemetry.0,
            series: common.series.clone(),
            rpc: rpc.map(Path::to_owned),
        },
        labels: common.label.iter().cloned().collect(),
        command: &common.command,
        quiet: common.quiet,
    }
}
