//! `standin-initiator`: the command line of the stand-in's initiator. No logic of its own.

#[macro_use]
#[path = "../entry.rs"]
mod entry;
#[path = "../initiator/mod.rs"]
mod initiator;
#[path = "../pdu.rs"]
mod pdu;
#[path = "../sock.rs"]
mod sock;
#[path = "../trid.rs"]
mod trid;
#[path = "../wire.rs"]
mod wire;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use standin::{Workload, parse_duration, parse_size, parse_size_u32};

use initiator::{InitiatorConfig, run_initiator};

/// A small NVMe/TCP initiator in user space with SPDK's probe points, for demonstration and tests.
///
/// It is a stand-in, never SPDK. It connects, runs a load and prints a summary as JSON. Writing
/// workloads overwrite the namespace's first bytes. It exits with 3 when commands failed or data
/// was wrong.
#[derive(Debug, Parser)]
#[command(name = "standin-initiator", version = standin::version())]
struct Args {
    /// The target's address
    #[arg(long)]
    connect: SocketAddr,
    /// NQN of the subsystem
    #[arg(long, default_value = standin::DEFAULT_NQN)]
    nqn: String,
    /// The host's own NQN
    #[arg(long, default_value = "nqn.2024-01.io.fabscope:standin-host")]
    hostnqn: String,
    /// Namespace identifier
    #[arg(long, default_value_t = 1)]
    nsid: u32,
    /// read, write, randread, randwrite, mixed, randrw, flush, compare, write-zeroes or dsm
    #[arg(long, default_value = "randread", value_parser = parse_workload)]
    rw: Workload,
    /// Bytes of each command
    #[arg(long, default_value = "4K", value_parser = parse_size_u32)]
    block_size: u32,
    /// Commands outstanding on each queue
    #[arg(long, default_value_t = 1)]
    queue_depth: u16,
    /// I/O queues
    #[arg(long, default_value_t = 1)]
    queues: u16,
    /// End after this time
    #[arg(long, value_parser = parse_duration, required_unless_present = "count")]
    duration: Option<Duration>,
    /// End after so many commands
    #[arg(long)]
    count: Option<u64>,
    /// Share of reads in a mixed workload
    #[arg(long, default_value_t = 50)]
    read_percent: u8,
    /// Where random places and data come from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Bytes at the start of the namespace that the load keeps to
    #[arg(long, default_value = "64M", value_parser = parse_size)]
    region: u64,
    /// Check every byte that is read, and read back what was written
    #[arg(long)]
    verify: bool,
    /// How long to poll after the last completion before sleeping
    #[arg(long, default_value = "1ms", value_parser = parse_duration)]
    spin: Duration,
    /// Commands outstanding on the first queue, where it is to carry more than the others
    #[arg(long, value_name = "DEPTH")]
    hot_queue: Option<u16>,
    /// One read in EVERY of each place in a queue is of SIZE instead
    #[arg(long, value_name = "EVERY:SIZE", value_parser = parse_large)]
    large_reads: Option<(u32, u32)>,
    /// Submit all commands at once, and the next when all are done
    #[arg(long)]
    bursts: bool,
    /// Size of each I/O queue's socket buffers [default: the kernel's]
    #[arg(long, value_parser = parse_size_u32)]
    socket_buffer: Option<u32>,
    /// Connect, say so in one line, and begin when a line comes on standard input
    #[arg(long)]
    hold: bool,
}

fn parse_large(text: &str) -> Result<(u32, u32), String> {
    let wrong = || format!("{text:?}: write EVERY:SIZE, for example 50:1M");
    let (every, size) = text.split_once(':').ok_or_else(wrong)?;
    let every: u32 = every.parse().ok().filter(|every| *every > 0).ok_or_else(wrong)?;
    Ok((every, parse_size_u32(size)?))
}

fn parse_workload(text: &str) -> Result<Workload, String> {
    Workload::from_name(text).ok_or_else(|| {
        let names: Vec<_> = Workload::ALL.iter().map(|(n, _)| *n).collect();
        format!("there are {}", names.join(", "))
    })
}

fn main() -> ExitCode {
    let args = Args::parse();
    eprintln!("standin-initiator (not SPDK): {}", standin::version());
    let config = InitiatorConfig {
        connect: args.connect,
        nqn: args.nqn,
        hostnqn: args.hostnqn,
        nsid: args.nsid,
        workload: args.rw,
        block_size: args.block_size,
        queue_depth: args.queue_depth,
        queues: args.queues,
        duration: args.duration,
        count: args.count,
        read_percent: args.read_percent,
        seed: args.seed,
        region: args.region,
        verify: args.verify,
        spin_ns: u64::try_from(args.spin.as_nanos()).unwrap_or(u64::MAX),
        hot_queue: args.hot_queue,
        large_reads: args.large_reads,
        bursts: args.bursts,
        socket_buffer: args.socket_buffer,
        hold: args.hold,
    };
    let summary = match run_initiator(&config) {
        Ok(summary) => summary,
        Err(e) => {
            eprintln!("standin-initiator: {e:#}");
            return ExitCode::FAILURE;
        }
    };
    match serde_json::to_string(&summary) {
        Ok(json) => println!("{json}"),
        Err(e) => {
            eprintln!("standin-initiator: the summary cannot be written as JSON: {e}");
            return ExitCode::FAILURE;
        }
    }
    if summary.errors > 0 || summary.verify_errors > 0 {
        return ExitCode::from(3);
    }
    ExitCode::SUCCESS
}
