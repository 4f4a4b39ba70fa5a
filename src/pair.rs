//! Records a load of the stand-in's on both sides: what the demonstration and the self-test share. It judges nothing.

use crate::destination::Destination;
use crate::recorder::{self, Open, Plan};
use crate::signals::Signals;
use crate::telemetry;
use crate::window::Wanted;
use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use run_format::{Manifest, RunWriter, Side};
use spdk_probes::{Choice, Options};
use standin::Summary;
use standin::spawn::Initiator;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What to record of a load.
#[derive(Debug)]
pub struct Wish<'a> {
    /// Where the two runs go, as `host.run` and `target.run`.
    pub home: &'a Path,
    /// What is sampled beside the commands.
    pub telemetry: telemetry::Asked,
    /// The runs' labels.
    pub labels: BTreeMap<String, String>,
}

/// The two runs in a folder: the host's and the target's.
pub fn runs(home: &Path) -> (PathBuf, PathBuf) {
    (home.join("host.run"), home.join("target.run"))
}

/// Records the initiator's load on both sides, from before it begins until it has ended. The target is the process
/// with this number.
///
/// # Errors
/// When something can not be recorded, a signal came, or commands failed.
pub fn record(target: u32, initiator: Initiator, wish: &Wish<'_>, signals: &Signals) -> Result<Summary> {
    std::fs::create_dir_all(wish.home).with_context(|| format!("create {}", wish.home.display()))?;
    let how = Options::default();
    let on_target =
        spdk_probes::Target::attach(&spdk_probes::find(Side::Target, &Choice::Pid(target))?, &how)?;
    let on_host =
        spdk_probes::Host::attach(&spdk_probes::find(Side::Host, &Choice::Pid(initiator.pid()))?, &how)?;

    // The host's recording ends with the initiator; the target's is then told to end.
    let enough = signals.another();
    let (host_run, target_run) = runs(wish.home);
    let load = i32::try_from(initiator.pid()).map(Pid::from_raw).context("a process number")?;
    let over = AtomicBool::new(false);
    let summary = std::thread::scope(|threads| {
        // A signal ends the load too.
        threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                if signals.came().is_some() {
                    let _ = kill(load, Signal::SIGTERM);
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let recorded_target =
            threads.spawn(|| recorder::record(on_target, &plan(&into(&target_run), wish), &enough));
        let recorded_host =
            threads.spawn(|| recorder::record(on_host, &plan(&into(&host_run), wish), signals));
        let summary = initiator.finish();
        over.store(true, Ordering::Relaxed);
        let host = recorded_host.join();
        enough.raise();
        let target = recorded_target.join();
        for recorded in [host, target] {
            recorded.map_err(|_| anyhow::anyhow!("a recording panicked"))??;
        }
        summary
    });
    if signals.came().is_some() {
        bail!("ended by a signal");
    }
    let summary = summary?;
    if summary.errors > 0 {
        bail!("{} of the initiator's commands failed", summary.errors);
    }
    Ok(summary)
}

/// Makes a run in this directory, in place of one that is there.
fn into(output: &Path) -> impl Fn(Manifest) -> Result<Box<dyn Destination>> {
    move |manifest| Ok(Box::new(RunWriter::create(output, manifest, true)?))
}

fn plan<'a>(open: &'a Open<'a>, wish: &Wish<'_>) -> Plan<'a> {
    Plan {
        open,
        duration: None,
        one_in: 1,
        windows: Wanted::default(),
        price: None,
        telemetry: wish.telemetry.clone(),
        labels: wish.labels.clone(),
        command: &[],
        quiet: true,
        has_own_progress: false,
    }
}
