//! Faults injected into the stand-in: starts it with and without one, and has it recorded. What the faults are,
//! `cases` says.

use super::Inject;
use super::cases::{Beside, CASES, Case};
use super::{Expected, Recorded};
use crate::pair;
use anyhow::{Context, Result, bail};
use standin::cpus::{self, Hogs};
use standin::network::{Loss, in_own_network};
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
        match self.0.beside {
            Beside::Hogs(_) => two_cpus().err().map(|error| format!("{error:#}")),
            Beside::Loss(share) => lossless(share),
            Beside::Nothing | Beside::Neighbour(_) => None,
        }
    }

    fn record(&self, what: &Recorded<'_>) -> Result<()> {
        match self.0.beside {
            Beside::Loss(share) => in_own_network(|| record(self.0, what, what.fault.then_some(share))),
            _ => record(self.0, what, None),
        }
    }
}

/// Why no network can lose packets here, if none can.
pub fn lossless(share: f64) -> Option<String> {
    in_own_network(|| Loss::on_loopback(share).map(drop))
        .err()
        .map(|error| format!("no network that loses packets: {error:#}"))
}

/// The first two CPUs: the target's and the load's.
pub fn two_cpus() -> Result<[usize; 2]> {
    match cpus::usable()?[..] {
        [first, second, ..] => Ok([first, second]),
        _ => bail!("there is one CPU, and the target needs another than the initiator"),
    }
}

fn record(case: &Case, what: &Recorded<'_>, loss: Option<f64>) -> Result<()> {
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
    let mut beside = Around::default();
    match case.beside {
        Beside::Hogs(count) if what.fault => {
            beside.hogs = Some(Hogs::on(two_cpus()?[1], count)?);
        }
        Beside::Neighbour(options) if what.fault => {
            // It begins with the load, at the latest, and outlasts it.
            let mut neighbour = Initiator::spawn(load(options, what.duration + Duration::from_secs(60)))?;
            neighbour.start()?;
            beside.neighbour = Some(neighbour);
        }
        Beside::Loss(_) | Beside::Hogs(_) | Beside::Neighbour(_) | Beside::Nothing => {}
    }
    if let Some(share) = loss {
        beside.loss = Some(Loss::on_loopback(share)?);
    }
    pair::record(target.pid(), initiator, &what.wish(case.cause.name()), what.signals)?;
    drop(beside);
    target.stop()
}

/// What goes on beside the load; it ends with this.
#[derive(Debug, Default)]
pub struct Around {
    pub hogs: Option<Hogs>,
    pub neighbour: Option<Initiator>,
    pub loss: Option<Loss>,
}

pub fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}
