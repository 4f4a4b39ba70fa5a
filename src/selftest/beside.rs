//! What goes on beside a load that is recorded: a network that loses packets, threads that keep its CPU busy, a neighbour.
//! It knows neither the load nor what is to be found.

use anyhow::{Result, bail};
use standin::cpus::{self, Hogs};
use standin::network::{Loss, in_own_network};
use standin::spawn::Initiator;

/// What goes on beside a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Beside {
    /// Nothing.
    Nothing,
    /// The network is one of its own and loses this share of its packets.
    Loss(f64),
    /// So many threads keep the load's CPU busy.
    Hogs(usize),
    /// An initiator of the stand-in's with these options, besides where it connects to and for how long.
    Neighbour(&'static [&'static str]),
}

impl Beside {
    /// What there is of it in a recording with or without the fault: without it the network is the same, and loses nothing.
    pub fn when(self, fault: bool) -> Beside {
        match self {
            _ if fault => self,
            Beside::Loss(_) => Beside::Loss(0.0),
            Beside::Nothing | Beside::Hogs(_) | Beside::Neighbour(_) => Beside::Nothing,
        }
    }

    /// Why it can not be had here, if it can not.
    pub fn lacking(self) -> Option<String> {
        match self {
            Beside::Loss(share) => {
                let tried = in_own_network(|| Loss::on_loopback(share).map(drop));
                tried.err().map(|error| format!("no network that loses packets: {error:#}"))
            }
            Beside::Hogs(_) => two_cpus().err().map(|error| format!("{error:#}")),
            Beside::Nothing | Beside::Neighbour(_) => None,
        }
    }

    /// Runs the recording in the network that it needs.
    ///
    /// # Errors
    /// What `record` says, or that there is no such network.
    pub fn around(self, record: impl FnOnce() -> Result<()> + Send) -> Result<()> {
        match self {
            Beside::Loss(_) => in_own_network(record),
            Beside::Nothing | Beside::Hogs(_) | Beside::Neighbour(_) => record(),
        }
    }

    /// Begins with it, in the network that the load is in. A neighbour begins with the load at the latest; `connected` says
    /// where it connects to and for how long, which has to outlast the load.
    ///
    /// # Errors
    /// It can not be had, or does not start.
    pub fn begin(self, connected: impl FnOnce(&[&str]) -> Vec<String>) -> Result<Around> {
        let mut around = Around::default();
        match self {
            Beside::Loss(share) if share > 0.0 => around.loss = Some(Loss::on_loopback(share)?),
            Beside::Hogs(count) => around.hogs = Some(Hogs::on(two_cpus()?[1], count)?),
            Beside::Neighbour(options) => {
                let mut neighbour = Initiator::spawn(connected(options))?;
                neighbour.start()?;
                around.neighbour = Some(neighbour);
            }
            Beside::Loss(_) | Beside::Nothing => {}
        }
        Ok(around)
    }
}

/// What goes on beside a load; it ends with this.
#[derive(Debug, Default)]
pub struct Around {
    hogs: Option<Hogs>,
    neighbour: Option<Initiator>,
    loss: Option<Loss>,
}

impl Around {
    /// Lets a neighbour go before others too: beside programs that poll it gets no CPU otherwise, as it would on a machine
    /// of its own.
    ///
    /// # Errors
    /// It has ended.
    pub fn before_others(&self) -> Result<()> {
        self.neighbour.as_ref().map_or(Ok(()), |neighbour| cpus::prefer(neighbour.pid()))
    }
}

/// The first two CPUs: the target's and the load's.
///
/// # Errors
/// There is one.
pub fn two_cpus() -> Result<[usize; 2]> {
    match cpus::usable()?[..] {
        [first, second, ..] => Ok([first, second]),
        _ => bail!("there is one CPU, and the target needs another than the initiator"),
    }
}
