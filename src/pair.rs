//! Records a load on both sides: what the demonstration and the self-test share. It judges nothing.

use crate::destination::Destination;
use crate::recorder::{self, Open, Plan};
use crate::signals::Signals;
use crate::telemetry;
use crate::window::Wanted;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use run_format::{Manifest, RunWriter, Side};
use spdk_probes::{Choice, Options};
use standin::spawn::Initiator;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A process whose commands are recorded as the host's.
pub trait Load {
    /// Its number.
    fn pid(&self) -> u32;

    /// Lets its commands begin, where they have not, and waits until they are over.
    ///
    /// # Errors
    /// There were none, or they failed.
    fn finish(self) -> Result<()>;
}

impl Load for Initiator {
    fn pid(&self) -> u32 {
        Initiator::pid(self)
    }

    fn finish(self) -> Result<()> {
        let summary = Initiator::finish(self)?;
        ensure!(summary.commands > 0, "the load had no commands");
        ensure!(summary.errors == 0, "{} of the initiator's commands failed", summary.errors);
        Ok(())
    }
}

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

/// Records the load on both sides, from before it begins (where it waits to begin) until it has ended. The target is the
/// process with this number.
///
/// # Errors
/// When something can not be recorded, a signal came, or commands failed.
pub fn record(target: u32, load: impl Load, wish: &Wish<'_>, signals: &Signals) -> Result<()> {
    std::fs::create_dir_all(wish.home).with_context(|| format!("create {}", wish.home.display()))?;
    let how = Options::default();
    let on_target =
        spdk_probes::Target::attach(&spdk_probes::find(Side::Target, &Choice::Pid(target))?, &how)?;
    let on_host = spdk_probes::Host::attach(&spdk_probes::find(Side::Host, &Choice::Pid(load.pid()))?, &how)?;

    // The host's recording ends with the load; the target's is then told to end.
    let enough = signals.another();
    let (host_run, target_run) = runs(wish.home);
    let process = i32::try_from(load.pid()).map(Pid::from_raw).context("a process number")?;
    let over = AtomicBool::new(false);
    let ended = std::thread::scope(|threads| {
        // A signal ends the load too.
        threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                if signals.came().is_some() {
                    let _ = kill(process, Signal::SIGTERM);
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let recorded_target =
            threads.spawn(|| recorder::record(on_target, &plan(&into(&target_run), wish), &enough));
        let recorded_host =
            threads.spawn(|| recorder::record(on_host, &plan(&into(&host_run), wish), signals));
        let ended = load.finish();
        over.store(true, Ordering::Relaxed);
        let host = recorded_host.join();
        enough.raise();
        let target = recorded_target.join();
        for recorded in [host, target] {
            recorded.map_err(|_| anyhow::anyhow!("a recording panicked"))??;
        }
        ended
    });
    if signals.came().is_some() {
        bail!("ended by a signal");
    }
    ended
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
