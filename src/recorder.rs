//! The recording loop: an attached source into a run or a view, until something ends it.

use crate::destination::Destination;
use crate::exit;
use crate::progress::{Progress, summary};
use crate::signals::Signals;
use crate::telemetry::{self, Telemetry};
use crate::window::{Wanted, Windowing, ends};
use crate::workload::Running;
use anyhow::{Context, Result};
use run_format::{Counters, Manifest, Price, Source, Window, clock_pair, monotonic_now};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How often the counters are read and the progress line moves.
const REFRESH: Duration = Duration::from_millis(250);
/// Longest wait for the ring before signals and limits are looked at again.
const POLL: Duration = Duration::from_millis(50);

/// Makes what a recording goes into, from what is known of it before it begins.
pub type Open<'a> = dyn Fn(Manifest) -> Result<Box<dyn Destination>> + Sync + 'a;

/// What a recording is, besides its source.
pub struct Plan<'a> {
    /// Where it goes.
    pub open: &'a Open<'a>,
    /// Ends it.
    pub duration: Option<Duration>,
    /// One command in this many is kept.
    pub one_in: u32,
    /// The windows in which the probes are armed, where they are not throughout.
    pub windows: Wanted,
    /// What it was estimated to cost.
    pub price: Option<Price>,
    /// What is sampled beside the commands.
    pub telemetry: telemetry::Asked,
    /// The user's labels.
    pub labels: BTreeMap<String, String>,
    /// Runs while it lasts, and its end ends it.
    pub command: &'a [OsString],
    /// Neither a progress line nor what came of it.
    pub quiet: bool,
    /// No progress line, but all else.
    pub has_own_progress: bool,
}

/// Records until the duration is over, a signal comes, the command or the recorded process ends. Returns the
/// command's exit code, or success.
///
/// # Errors
/// When the run can not be written or the source can not go on. What was recorded before is kept.
pub fn record<S: Source>(mut source: S, plan: &Plan<'_>, signals: &Signals) -> Result<ExitCode> {
    // Attaching takes its time, and there is nothing to be kept yet.
    signals.none_yet()?;
    let start = monotonic_now();
    // What they are in the end, `begin` tells.
    let windows = plan.windows.describe();
    let software = source.software();
    let manifest = Manifest {
        software: software.clone(),
        hooks: source.hooks(),
        one_in: plan.one_in,
        window: Window { start_ns: start, end_ns: start },
        windows,
        price: plan.price.clone(),
        labels: plan.labels.clone(),
        ..Manifest::begun(source.side(), source.kind(), env!("CARGO_PKG_VERSION"))
    };
    let mut writer = (plan.open)(manifest)?;
    let telemetry = Telemetry::start(&mut *writer, &plan.telemetry, source.kind(), &software);
    let begun = match windows {
        None => Ok(None),
        Some(_) => {
            Windowing::begin(&plan.windows, plan.duration, &mut source, &mut *writer, signals).map(Some)
        }
    };
    let begun = begun.and_then(|windowing| {
        if windowing.is_some() {
            signals.none_yet()?;
        }
        let running = match (plan.command, writer.directory()) {
            ([], _) | (_, None) => None,
            (argv, Some(directory)) => Some(Running::start(argv, directory)?),
        };
        Ok((windowing, running))
    });
    let (mut windowing, mut running) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            // There is nothing in the run, and the next try wants its name.
            drop(telemetry);
            writer.discard();
            return Err(error);
        }
    };
    let began = if windowing.is_some() { monotonic_now() } else { start };
    writer.manifest().window = Window { start_ns: began, end_ns: began };
    if let Some(kept) = windowing.as_ref().and_then(Windowing::kept) {
        if !plan.quiet {
            exit::say(&format!("--max-overhead is {kept}"));
        }
        if let Some(budget) = writer.manifest().price.as_mut().and_then(|price| price.budget.as_mut()) {
            *budget = format!("{budget}; {kept}");
        }
    }
    writer.manifest().workload = running.as_ref().map(Running::describe);

    let mut beside = Beside {
        signals,
        progress: Progress::new(plan.duration, plan.quiet || plan.has_own_progress),
        telemetry,
    };
    let reason = run_loop(&mut source, &mut windowing, &mut *writer, running.as_mut(), plan, &mut beside);
    let Beside { progress, mut telemetry, .. } = beside;
    progress.finish();

    // Whatever ended it: stop the probes, take what is in the ring, close the run. The first error is told.
    // The window ends where it stops seeing new commands; taking the probes away takes longer.
    let ended = windowing.as_mut().map_or(Ok(()), |windowing| windowing.end(&mut source, &mut *writer));
    let end = monotonic_now();
    let stopped = match &mut windowing {
        None => source.stop(&mut *writer),
        Some(windowing) => source.stop(&mut windowing.sink(&mut *writer)),
    }
    .context("stop the probes");
    if let Some(telemetry) = &mut telemetry {
        telemetry.stop();
    }
    let counters = counters(&source, windowing.as_ref());
    let mut code = ExitCode::SUCCESS;
    writer.manifest().counters = counters.as_ref().copied().unwrap_or_default();
    writer.manifest().window.end_ns = end;
    let overhead = windowing.as_ref().and_then(Windowing::overhead);
    writer.manifest().overhead.clone_from(&overhead);
    let mut late = Ok(());
    let workload = running
        .map(|mut running| {
            if running.ended()?.is_none() && (reason.is_err() || !plan.quiet) {
                let why = reason.as_ref().map_or_else(exit::text, |why| (*why).to_owned());
                exit::say(&format!("the recording has ended ({why}); waiting for the command to end"));
            }
            end_command(running, signals, || {
                // What is left in memory does not wait for the command.
                if late.is_ok() && reason.is_ok() {
                    late = writer.tick();
                }
            })
        })
        .transpose();
    if let Ok(Some((workload, exit))) = &workload {
        writer.manifest().workload = Some(workload.clone());
        code = ExitCode::from(*exit);
    }
    writer.manifest().clocks.push(clock_pair());
    if let Some(telemetry) = telemetry {
        let (clocks, window) = (writer.manifest().clocks.clone(), writer.manifest().window);
        let within = (window.start_ns, window.end_ns);
        let summary = telemetry.close(plan.telemetry.series.as_deref(), &clocks, within);
        writer.manifest().telemetry = Some(summary);
    }
    let last = counters.as_ref().copied().unwrap_or_default();
    let windows_came = writer.manifest().windows.map(|windows| windows.slices);
    let name = writer.name();
    let closed = writer.close(last, end);
    let reason = reason?;
    ended?;
    stopped?;
    let counters = counters?;
    late?;
    closed?;
    workload?;
    if !plan.quiet {
        let recorded = Duration::from_nanos(end.0.saturating_sub(began.0));
        // The recording is whole whether or not somebody reads this.
        let text = format!("{name}: {} ({reason})", summary(&counters));
        let _ = writeln!(std::io::stderr(), "{text}");
        if let Some(used) = windowing.as_ref().and_then(|windowing| windowing.used(recorded)) {
            exit::say(&used);
        }
        if let Some(overhead) = &overhead {
            exit::say(&crate::overhead::summary(overhead));
        }
        if counters.seen == 0 && windows_came == Some(0) {
            exit::say(
                "no window fell into the recording: give it more time (-d), or windows that come more often (--window)",
            );
        } else if counters.seen == 0 {
            exit::say(
                "no command began while it recorded: was there I/O, and is this the side and the process that does it?",
            );
        }
    }
    Ok(code)
}

/// What goes on beside the commands.
struct Beside<'a> {
    signals: &'a Signals,
    progress: Progress,
    telemetry: Option<Telemetry>,
}

/// The counters now, as the run has them.
fn counters<S: Source>(source: &S, windowing: Option<&Windowing>) -> Result<Counters> {
    let counters = source.counters().context("read the counters")?;
    Ok(windowing.map_or(counters, |windowing| windowing.counters(counters)))
}

/// Runs until something ends it, and says what did.
fn run_loop<S: Source>(
    source: &mut S,
    windowing: &mut Option<Windowing>,
    writer: &mut dyn Destination,
    mut running: Option<&mut Running>,
    plan: &Plan<'_>,
    beside: &mut Beside<'_>,
) -> Result<&'static str> {
    let started = Instant::now();
    let mut refreshed = started;
    loop {
        match take(source, windowing, writer) {
            // A process that ends takes with it what its probes need.
            Err(_) if ends(source) => return Ok(ENDED),
            taken => taken?,
        }
        if refreshed.elapsed() >= REFRESH || writer.is_due() {
            refreshed = Instant::now();
            let counters = counters(source, windowing.as_ref())?;
            let manifest = writer.manifest();
            manifest.counters = counters;
            manifest.window.end_ns = monotonic_now();
            manifest.telemetry = beside.telemetry.as_mut().map(Telemetry::summary);
            beside.progress.update(started.elapsed(), &counters);
        }
        writer.tick()?;
        if let Some(why) = writer.enough() {
            return Ok(why);
        }
        if beside.signals.came().is_some() {
            return Ok("ended by a signal");
        }
        if plan.duration.is_some_and(|d| started.elapsed() >= d) {
            return Ok("ended after its time");
        }
        if let Some(running) = running.as_deref_mut()
            && running.ended()?.is_some()
        {
            return Ok("the command ended");
        }
        if source.ended() {
            return Ok(ENDED);
        }
    }
}

const ENDED: &str = "the recorded process ended";

/// Does what is due and takes what has come.
fn take<S: Source>(
    source: &mut S,
    windowing: &mut Option<Windowing>,
    writer: &mut dyn Destination,
) -> Result<()> {
    match windowing {
        None => source.poll(POLL, writer),
        Some(windowing) => {
            let rest = windowing.step(source, writer)?;
            source.poll(rest.min(POLL), &mut windowing.sink(writer))
        }
    }
    .context("take what the probes saw")
    .map(drop)
}

/// Waits for the command to end, passing signals on to it, and does `meanwhile` again and again.
fn end_command(
    mut running: Running,
    signals: &Signals,
    mut meanwhile: impl FnMut(),
) -> Result<(run_format::Workload, u8)> {
    loop {
        if let Some(status) = running.ended()? {
            return running.finish(status, signals);
        }
        if let Some(signal) = signals.next() {
            running.forward(signal);
        }
        meanwhile();
        std::thread::sleep(Duration::from_millis(20));
    }
}
