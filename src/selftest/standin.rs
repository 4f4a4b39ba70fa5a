//! Faults injected into the stand-in: starts it with and without one, and has it recorded. What the faults are,
//! `cases` says.

use super::beside::{Beside, two_cpus};
use super::cases::{CASES, Case};
use super::{Expected, Inject, Recorded};
use crate::pair;
use anyhow::{Context, Result};
use standin::cpus;
use standin::spawn::{Initiator, Target};
use std::time::Duration;

/// All faults of the stand-in.
pub fn all() -> Vec<Box<dyn Inject>> {
    CASES.iter().map(|case| Box::new(OnStandin(case)) as Box<dyn Inject>).collect()
}

/// A fault of the stand-in.
#[derive(Debug)]
struct OnStandin(&'static Case);

impl Inject for OnStandin {
    fn expected(&self) -> Expected {
        let Case { cause, injected, stages, size, least, .. } = *self.0;
        Expected {
            name: cause.name(),
            cause: Some(cause),
            injected,
            stages,
            size,
            every: false,
            least,
            polls: false,
        }
    }

    fn lacking(&self) -> Option<String> {
        self.0.beside.lacking()
    }

    fn record(&self, what: &Recorded<'_>) -> Result<()> {
        let beside = self.0.beside.when(what.fault);
        beside.around(|| record(self.0, beside, what))
    }
}

fn record(case: &Case, beside: Beside, what: &Recorded<'_>) -> Result<()> {
    let rpc = tempfile::tempdir().context("make a folder for a socket")?;
    let mut options = words(case.target);
    options.extend(["--rpc".to_owned(), rpc.path().join("rpc.sock").display().to_string()]);
    if what.fault {
        options.extend(words(case.fault_target));
    }
    let target = Target::spawn(options)?;
    let load = |how: &[&str], duration: Duration| {
        let mut options = words(&["--connect"]);
        options.push(target.address().to_string());
        // It sleeps when it waits: what records it needs a CPU too.
        options.extend(words(&["--spin", "0us"]));
        options.extend(words(how));
        options.extend(["--duration".to_owned(), format!("{}ms", duration.as_millis())]);
        options
    };
    let mut how = case.load.to_vec();
    if what.fault {
        how.extend(case.fault_load);
    }
    let initiator = Initiator::spawn(load(&how, what.duration))?;
    // Each has a CPU of its own, as on two machines, and has it before what records it.
    if let Ok([first, second]) = two_cpus() {
        for (pid, cpu) in [(target.pid(), first), (initiator.pid(), second)] {
            cpus::bind(pid, cpu)?;
            cpus::prefer(pid)?;
        }
    }
    let around = beside.begin(|options| load(options, what.duration + Duration::from_secs(60)))?;
    pair::record(target.pid(), initiator, &what.wish(case.cause.name()), what.signals)?;
    drop(around);
    target.stop()
}

pub fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}
