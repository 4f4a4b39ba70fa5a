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
use standin::{Summary, Workload};

use admin::Connection;

/// What an initiator is started with.
#[derive(Clone, Debug)]
pub(crate) struct InitiatorConfig {
    /// The target's address.
    pub(crate) connect: SocketAddr,
    /// NQN of the subsystem.
    pub(crate) nqn: String,
    /// The host's own NQN.
    pub(crate) hostnqn: String,
    /// Namespace identifier.
    pub(crate) nsid: u32,
    /// What to do.
    pub(crate) workload: Workload,
    /// Bytes of each command: a multiple of the namespace's block size.
    pub(crate) block_size: u32,
    /// Commands outstanding on each queue, 1 to 1023.
    pub(crate) queue_depth: u16,
    /// I/O queues, 1 to 128.
    pub(crate) queues: u16,
    /// End after this time; none runs until `count`.
    pub(crate) duration: Option<Duration>,
    /// End after so many commands; none runs until `duration`.
    pub(crate) count: Option<u64>,
    /// Share of reads in a mixed workload, 0 to 100.
    pub(crate) read_percent: u8,
    /// Where random places and data come from.
    pub(crate) seed: u64,
    /// Bytes at the start of the namespace that the load keeps to.
    pub(crate) region: u64,
    /// Check every byte that is read, and read back what was written when the load is over.
    pub(crate) verify: bool,
    /// How long to poll after the last completion before sleeping, in nanoseconds.
    pub(crate) spin_ns: u64,
    /// Commands outstanding on the first queue, where it is to carry more than the others.
    pub(crate) hot_queue: Option<u16>,
    /// Each of so many commands of a queue reads this much instead.
    pub(crate) large_reads: Option<(u32, u32)>,
    /// Submit all at once, and the next when all are done.
    pub(crate) bursts: bool,
    /// Size of each I/O queue's socket buffers; none leaves them to the kernel.
    pub(crate) socket_buffer: Option<u32>,
    /// Connect, say so in one line on standard output, and begin when a line comes on standard
    /// input.
    pub(crate) hold: bool,
}

impl Default for InitiatorConfig {
    fn default() -> Self {
        Self {
            connect: SocketAddr::from(([127, 0, 0, 1], 4420)),
            nqn: standin::DEFAULT_NQN.to_owned(),
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
            spin_ns: 1_000_000,
            hot_queue: None,
            large_reads: None,
            bursts: false,
            socket_buffer: None,
            hold: false,
        }
    }
}

impl InitiatorConfig {
    /// Commands outstanding on this I/O queue.
    pub(crate) fn depth_of(&self, qid: u16) -> u16 {
        if qid == 1 { self.hot_queue.unwrap_or(self.queue_depth) } else { self.queue_depth }
    }

    fn check(&self) -> Result<()> {
        if self.hot_queue.is_some_and(|depth| !(1..=1023).contains(&depth)) {
            bail!("--hot-queue: 1 to 1023");
        }
        if self.large_reads.is_some() && (self.verify || self.workload != Workload::Randread) {
            bail!("--large-reads: only with --rw randread, and without --verify");
        }
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

/// Connects, runs the load and disconnects.
///
/// # Errors
/// The configuration makes no sense, the target cannot be reached or refuses, or the connection
/// breaks. Commands that fail and data that is wrong are counted in the summary instead.
pub(crate) fn run_initiator(config: &InitiatorConfig) -> Result<Summary> {
    config.check()?;
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
