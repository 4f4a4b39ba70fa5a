//! The initiator: connects to a subsystem, runs a load and says what it measured.
//!
//! `tcp` is the host side of the transport, `admin` the commands that connect a controller, `load`
//! the workload with its data check and its latencies.

mod admin;
mod load;
mod tcp;
mod types;

use std::io::{self, BufRead, Write};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use admin::Connection;

/// What the commands of a load are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// Reads, one after the other.
    Read,
    /// Writes, one after the other.
    Write,
    /// Reads at random places.
    Randread,
    /// Writes at random places.
    Randwrite,
    /// Reads and writes, one after the other.
    Mixed,
    /// Reads and writes at random places.
    Randrw,
    /// Flushes.
    Flush,
    /// Compares, at random places, with what was written there before the load.
    Compare,
    /// Writes of zeroes at random places.
    WriteZeroes,
    /// Deallocations at random places.
    Dsm,
}

impl Workload {
    /// The workloads and their names.
    pub const ALL: [(&'static str, Self); 10] = [
        ("read", Self::Read),
        ("write", Self::Write),
        ("randread", Self::Randread),
        ("randwrite", Self::Randwrite),
        ("mixed", Self::Mixed),
        ("randrw", Self::Randrw),
        ("flush", Self::Flush),
        ("compare", Self::Compare),
        ("write-zeroes", Self::WriteZeroes),
        ("dsm", Self::Dsm),
    ];

    /// The workload of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(n, _)| *n == name).map(|(_, w)| *w)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, w)| *w == self).map_or("", |(n, _)| n)
    }
}

/// What an initiator is started with.
#[derive(Clone, Debug)]
pub struct InitiatorConfig {
    /// The target's address.
    pub connect: SocketAddr,
    /// NQN of the subsystem.
    pub nqn: String,
    /// The host's own NQN.
    pub hostnqn: String,
    /// Namespace identifier.
    pub nsid: u32,
    /// What to do.
    pub workload: Workload,
    /// Bytes of each command: a multiple of the namespace's block size.
    pub block_size: u32,
    /// Commands outstanding on each queue, 1 to 1023.
    pub queue_depth: u16,
    /// I/O queues, 1 to 128.
    pub queues: u16,
    /// End after this time; none runs until `count`.
    pub duration: Option<Duration>,
    /// End after so many commands; none runs until `duration`.
    pub count: Option<u64>,
    /// Share of reads in a mixed workload, 0 to 100.
    pub read_percent: u8,
    /// Where random places and data come from.
    pub seed: u64,
    /// Bytes at the start of the namespace that the load keeps to.
    pub region: u64,
    /// Check every byte that is read, and read back what was written when the load is over.
    pub verify: bool,
    /// How long to poll after the last completion before sleeping, in nanoseconds.
    pub spin_ns: u64,
    /// Connect, say so in one line on standard output, and begin when a line comes on standard
    /// input.
    pub hold: bool,
}

impl Default for InitiatorConfig {
    fn default() -> Self {
        Self {
            connect: SocketAddr::from(([127, 0, 0, 1], 4420)),
            nqn: crate::DEFAULT_NQN.to_owned(),
            hostnqn: "nqn.2024-01.io.fabscope:standin-host".to_owned(),
            nsid: 1,
            workload: Workload::Randread,
            block_size: 4096,
            queue_depth: 1,
            queues: 1,
            duration: None,
            count: None,
            read_percent: 50,
            seed: 1,
            region: 64 << 20,
            verify: false,
            spin_ns: 30_000,
            hold: false,
        }
    }
}

impl InitiatorConfig {
    fn check(&self) -> Result<()> {
        for (flag, nqn) in [("--nqn", &self.nqn), ("--hostnqn", &self.hostnqn)] {
            if nqn.len() > 223 {
                bail!("{flag}: an NQN has at most 223 bytes, this one {}", nqn.len());
            }
        }
        if !(1..=1023).contains(&self.queue_depth) {
            bail!("--queue-depth: 1 to 1023, not {}", self.queue_depth);
        }
        if !(1..=128).contains(&self.queues) {
            bail!("--queues: 1 to 128, not {}", self.queues);
        }
        if self.read_percent > 100 {
            bail!("--read-percent: 0 to 100, not {}", self.read_percent);
        }
        if self.duration.is_none() && self.count.is_none() {
            bail!("a load needs an end: give --duration or --count");
        }
        Ok(())
    }
}

/// Latency of a load's commands, submit to completion, in nanoseconds. Percentiles are exact to
/// within 1 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Shortest.
    pub min_ns: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Median.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

/// What a load did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Says that this is the stand-in, and which version.
    pub standin: String,
    /// What the commands were.
    pub workload: Workload,
    /// Bytes of each command.
    pub block_size: u32,
    /// Commands outstanding on each queue.
    pub queue_depth: u16,
    /// I/O queues.
    pub queues: u16,
    /// The controller's identifier.
    pub cntlid: u16,
    /// Completed commands of the load; preparing and reading back are not counted.
    pub commands: u64,
    /// Of these, reads.
    pub reads: u64,
    /// Of these, writes.
    pub writes: u64,
    /// Commands completed with an error status.
    pub errors: u64,
    /// Blocks whose data was not what it had to be.
    pub verify_errors: u64,
    /// Blocks that were checked.
    pub verified: u64,
    /// How long the load ran.
    pub seconds: f64,
    /// Commands per second.
    pub iops: f64,
    /// None where no command was completed.
    pub latency: Option<Latency>,
}

/// Connects, runs the load and disconnects.
///
/// # Errors
/// The configuration makes no sense, the target cannot be reached or refuses, or the connection
/// breaks. Commands that fail and data that is wrong are counted in the summary instead.
pub fn run_initiator(config: &InitiatorConfig) -> Result<Summary> {
    config.check()?;
    crate::keep_version();
    let connection = Connection::open(config)
        .with_context(|| format!("connecting to {} at {}", config.nqn, config.connect))?;
    if config.hold {
        let mut out = io::stdout().lock();
        writeln!(
            out,
            "connected {} nqn={} cntlid={} pid={} standin={}",
            config.connect,
            config.nqn,
            connection.cntlid(),
            std::process::id(),
            env!("CARGO_PKG_VERSION"),
        )
        .and_then(|()| out.flush())
        .context("writing the line that says that the initiator is connected")?;
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line).context("waiting for a line on standard input")?;
    }
    load::run(config, &connection)
}
