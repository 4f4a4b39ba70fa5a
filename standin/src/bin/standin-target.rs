//! `standin-target`: the command line of the stand-in's target. No logic of its own.

#[macro_use]
#[path = "../entry.rs"]
mod entry;
#[path = "../pdu.rs"]
mod pdu;
#[path = "../sock.rs"]
mod sock;
#[path = "../target/mod.rs"]
mod target;
#[path = "../trid.rs"]
mod trid;
#[path = "../wire.rs"]
mod wire;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use standin::{Stage, parse_duration, parse_size, parse_size_u32};

use target::faults::Drive;
use target::{Backend, TargetConfig, run_target, set_delay};

/// A small NVMe/TCP target with SPDK's probe points, for demonstration and tests.
///
/// It is a stand-in, never SPDK. It keeps its data in memory and asks nobody who they are, so it
/// listens on the loopback interface unless told otherwise.
#[derive(Debug, Parser)]
#[command(name = "standin-target", version = standin::version())]
struct Args {
    /// Where to listen; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// NQN of a subsystem to serve; may be given several times
    #[arg(long, default_value = standin::DEFAULT_NQN)]
    nqn: Vec<String>,
    /// Namespaces of each subsystem
    #[arg(long, default_value_t = 1)]
    namespaces: u32,
    /// Size of each namespace
    #[arg(long, default_value = "256M", value_parser = parse_size)]
    namespace_size: u64,
    /// Logical block size: 512 or 4096
    #[arg(long, default_value = "512", value_parser = parse_size_u32)]
    block_size: u32,
    /// Where data goes: memory, or null (reads give zeroes)
    #[arg(long, value_enum, default_value_t = BackendArg::Memory)]
    backend: BackendArg,
    /// Reactors, each a thread with its own connections
    #[arg(long, default_value_t = 1)]
    reactors: usize,
    /// How long a reactor polls after its last work before it sleeps
    #[arg(long, default_value = "1ms", value_parser = parse_duration)]
    spin: Duration,
    /// Queue entries
    #[arg(long, default_value_t = 128)]
    max_queue_depth: u16,
    /// Most I/O queues of a controller
    #[arg(long, default_value_t = 64)]
    max_io_queues: u16,
    /// Most data of one command
    #[arg(long, default_value = "128K", value_parser = parse_size_u32)]
    max_io_size: u32,
    /// Most data inside a command capsule; larger writes are asked for with an R2T
    #[arg(long, default_value = "8K", value_parser = parse_size_u32)]
    in_capsule: u32,
    /// Most data in one H2CData PDU
    #[arg(long, default_value = "128K", value_parser = parse_size_u32)]
    max_h2c_data: u32,
    /// Most data that one R2T asks for; larger writes get several R2Ts [default: no limit]
    #[arg(long, value_parser = parse_size_u32)]
    r2t_bytes: Option<u32>,
    /// Always send a response capsule, even where the last C2HData could stand for it
    #[arg(long)]
    no_c2h_success: bool,
    /// Announce Asymmetric Namespace Access, with one optimized group
    #[arg(long)]
    ana: bool,
    /// Make a stage slower: storage=TIME or target-driver=TIME; may be given for both
    #[arg(long, value_name = "STAGE=TIME", value_parser = parse_delay)]
    delay: Vec<(Stage, Duration)>,
    /// UNIX socket for commands while it runs: delay, pause, resume, stats, version, quit
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// UNIX socket that tells by SPDK's JSON-RPC how busy reactors are and who waited for a buffer
    #[arg(long, value_name = "PATH")]
    rpc: Option<PathBuf>,
    /// What is wrong with the drive behind all namespaces: serial=TIME (one command at a time), iops=N, or
    /// stalls=SHARE:TIME
    #[arg(long, value_name = "FAULT", value_parser = Drive::parse)]
    drive: Option<Drive>,
    /// Data buffers of each reactor; commands wait for a free one [default: no limit]
    #[arg(long)]
    buffers: Option<usize>,
    /// Other work that each turn of a reactor has to do
    #[arg(long, default_value = "0", value_parser = parse_duration)]
    other_work: Duration,
    /// Size of each connection's socket buffers [default: the kernel's]
    #[arg(long, value_parser = parse_size_u32)]
    socket_buffer: Option<u32>,
    /// What each connection sends at most in a second, as over a slower link [default: no limit]
    #[arg(long, value_parser = parse_size_u32)]
    pace: Option<u32>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum BackendArg {
    Memory,
    Null,
}

fn parse_delay(text: &str) -> Result<(Stage, Duration), String> {
    let (name, time) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?}: write STAGE=TIME, for example storage=500us"))?;
    let stage = Stage::from_name(name)
        .ok_or_else(|| format!("no stage {name:?}; there are storage and target-driver"))?;
    Ok((stage, parse_duration(time)?))
}

fn main() -> ExitCode {
    let args = Args::parse();
    for (stage, delay) in &args.delay {
        set_delay(*stage, *delay);
    }
    let config = TargetConfig {
        listen: args.listen,
        subsystems: args.nqn,
        namespaces: args.namespaces,
        namespace_bytes: args.namespace_size,
        block_bytes: args.block_size,
        backend: match args.backend {
            BackendArg::Memory => Backend::Memory,
            BackendArg::Null => Backend::Null,
        },
        reactors: args.reactors,
        spin_ns: u64::try_from(args.spin.as_nanos()).unwrap_or(u64::MAX),
        max_queue_depth: args.max_queue_depth,
        max_io_queues: args.max_io_queues,
        max_io_bytes: args.max_io_size,
        in_capsule_bytes: args.in_capsule,
        max_h2c_data: args.max_h2c_data,
        r2t_bytes: args.r2t_bytes.unwrap_or(u32::MAX),
        c2h_success: !args.no_c2h_success,
        ana: args.ana,
        control: args.control,
        rpc: args.rpc,
        drive: args.drive,
        buffers: args.buffers.unwrap_or(usize::MAX),
        other_work: args.other_work,
        socket_buffer: args.socket_buffer,
        pace: args.pace,
    };
    match run_target(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("standin-target: {e:#}");
            ExitCode::FAILURE
        }
    }
}
