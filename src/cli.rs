//! The command line: each flag is defined here, once.

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Shows where every NVMe-over-Fabrics command spends its time, stage by stage, from the host's block layer
/// to the target's drive.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, max_term_width = 100, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Subcommand,
}

const EXIT_CODES: &str = "Exit codes: 0 good; 1 an error; 2 wrong usage; 3 a gate that did not hold; 4 too little data to say. `record -- CMD` ends with CMD's own code.";

#[derive(Debug, clap::Subcommand)]
pub enum Subcommand {
    /// Show the whole thing on this machine, with the stand-in target and initiator: no hardware, no SPDK,
    /// no NVMe driver.
    Demo(Demo),
    /// Show which hook each boundary gets here, and why; nothing is attached.
    #[command(subcommand)]
    Probe(Probe),
    /// Record one side into a run directory while its I/O goes on.
    #[command(subcommand)]
    Record(Record),
    /// Show one side's stages, rates, tails and telemetry as they come; no run is written.
    #[command(subcommand)]
    Watch(Watch),
    /// Give the same to Prometheus and others: OpenMetrics over HTTP.
    #[command(subcommand)]
    Serve(Serve),
    /// Join a host's run and a target's, and show the five stages; or show one side alone.
    Report(Report),
    /// Say which stage moved between runs, by how much and how surely.
    Compare(Compare),
    /// Name the cause of what is slow in a host's and a target's run, with its evidence; or say what it is not.
    Diagnose(Diagnose),
    /// Inject known faults, and check that their stage, size and cause are found, and no cause where there is none.
    Selftest(Selftest),
    /// Join all runs beneath directories into one table, and show trends, outliers and changes across runs.
    Batch(Batch),
    /// Print the JSON schema of what a subcommand prints with --format json.
    Schema(Schema),
}

#[derive(Debug, clap::Subcommand)]
pub enum Record {
    /// The host: the kernel's nvme-tcp and nvme-rdma, or a process that uses SPDK's NVMe/TCP initiator.
    Host(RecordSide),
    /// The target: the kernel's nvmet over TCP and RDMA, or a running SPDK nvmf_tgt (or an application with
    /// its NVMe/TCP target).
    Target(RecordTarget),
}

#[derive(Debug, Args)]
pub struct RecordTarget {
    #[command(flatten)]
    pub side: RecordSide,
    #[command(flatten)]
    pub from: TargetSource,
}

/// What a target's commands are taken from.
#[derive(Debug, Args)]
pub struct TargetSource {
    /// What an SPDK target's commands are taken from [default: uprobe, or what --max-overhead asks for].
    #[arg(long, value_enum, conflicts_with = "kernel")]
    pub source: Option<SourceKind>,
    /// RPC socket of the SPDK target, for its tracepoints [default: found].
    #[arg(long, value_name = "SOCKET", conflicts_with = "kernel")]
    pub rpc: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SourceKind {
    /// Uprobes: every boundary, exactly; each hit costs a trap.
    Uprobe,
    /// SPDK's own trace ring, switched on by RPC meanwhile: a fraction of the cost, and no symbols or debug
    /// information needed. It tells no cid, so the join matches by order.
    Trace,
    /// The trace ring for all times, and one uprobe a command for who it is: an exact key and one trap.
    Hybrid,
}

/// What is looked at, and how: the same for a run and for a live view.
#[derive(Debug, Args)]
pub struct Observe {
    /// Record the kernel's driver.
    #[arg(long, conflicts_with = "spdk")]
    pub kernel: bool,
    /// Record the SPDK process with this PID or program path; without a value, the only one there is.
    #[arg(long, value_name = "PID|PATH", num_args = 0..=1, default_missing_value = "")]
    pub spdk: Option<OsString>,
    /// How long to record, such as 30s, 500ms or 5m [default: until Ctrl-C, or until what is run with it ends].
    #[arg(short, long, value_name = "TIME", value_parser = signed(duration), allow_hyphen_values = true)]
    pub duration: Option<Duration>,
    /// Arm the probes only in windows, such as 50ms/1s for 50 ms of each second; outside of them recording costs
    /// nothing. The two sides' windows are in step by their wall clocks.
    #[arg(long, value_name = "LENGTH/EVERY", value_parser = signed(crate::window::Spec::parse), allow_hyphen_values = true)]
    pub window: Option<crate::window::Spec>,
    /// Keep one command in N, the same ones on both sides.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub sample: u32,
    /// Layout file for a stripped SPDK program, made from its matching build.
    #[arg(long, value_name = "FILE", requires = "spdk")]
    pub layout: Option<PathBuf>,
    /// Separate debug file of the SPDK program.
    #[arg(long, value_name = "FILE")]
    pub debug_file: Option<PathBuf>,
    /// What recording may add to each command on average: a share of the time that a command takes at present, such
    /// as 2%, or a time, such as 1us. It is kept by the source, else by --window, else the recording is refused.
    #[arg(long, value_name = "P%|TIME", value_parser = signed(crate::price::Budget::parse), allow_hyphen_values = true)]
    pub max_overhead: Option<crate::price::Budget>,
    /// How often to sample what the machine counts anyway (TCP, interfaces, CPUs, interrupts, drives, SPDK, GPUs) beside
    /// the commands, or off.
    #[arg(long, value_name = "TIME|off", default_value = "100ms", value_parser = crate::telemetry::every)]
    pub telemetry: crate::telemetry::Every,
    /// Size of the kernel's ring buffer.
    #[arg(long, value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024), allow_negative_numbers = true)]
    pub ring_mib: u32,
}

#[derive(Debug, Args)]
pub struct RecordSide {
    #[command(flatten)]
    pub observe: Observe,
    /// Where the run goes [default: host.run or target.run].
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Replace the run that is there.
    #[arg(long)]
    pub force: bool,
    /// Measure what recording costs: arm the probes in one of every two windows, drawn at random, and compare. The
    /// report shows the cost beside the stages. Windows are 200 ms long where --window does not say.
    #[arg(long)]
    pub measure_overhead: bool,
    /// A label for the run, such as workload=fio-4k; may be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = label)]
    pub label: Vec<(String, String)>,
    /// A CSV file of your own series, such as tokens a second, to put on the run's timeline; it is read when the
    /// recording ends. The first line names the columns; times are RFC 3339 with a zone, or UNIX time.
    #[arg(long, value_name = "FILE")]
    pub series: Option<PathBuf>,
    /// Show no progress.
    #[arg(short, long)]
    pub quiet: bool,
    /// Record while this command runs; its output is kept in the run and its exit code is passed on.
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

#[derive(Debug, clap::Subcommand)]
pub enum Watch {
    /// The host: the kernel's nvme-tcp and nvme-rdma, or a process that uses SPDK's NVMe/TCP initiator.
    Host(WatchSide),
    /// The target: the kernel's nvmet over TCP and RDMA, or a running SPDK nvmf_tgt (or an application with
    /// its NVMe/TCP target).
    Target(WatchTarget),
}

#[derive(Debug, Args)]
pub struct WatchTarget {
    #[command(flatten)]
    pub side: WatchSide,
    #[command(flatten)]
    pub from: TargetSource,
}

#[derive(Debug, Args)]
pub struct WatchSide {
    #[command(flatten)]
    pub observe: Observe,
    /// How often to show news. The screen's longer stretches are 10 and 60 times this.
    #[arg(short, long, value_name = "TIME", default_value = "1s", value_parser = signed(interval), allow_hyphen_values = true)]
    pub interval: Duration,
    /// End after this many intervals.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), allow_negative_numbers = true)]
    pub count: Option<u64>,
    /// Print a block of text each interval, as where the output is no terminal.
    #[arg(long)]
    pub plain: bool,
    #[command(flatten)]
    pub format: FormatOption,
}

#[derive(Debug, clap::Subcommand)]
pub enum Serve {
    /// The host: the kernel's nvme-tcp and nvme-rdma, or a process that uses SPDK's NVMe/TCP initiator.
    Host(ServeSide),
    /// The target: the kernel's nvmet over TCP and RDMA, or a running SPDK nvmf_tgt (or an application with
    /// its NVMe/TCP target).
    Target(ServeTarget),
}

#[derive(Debug, Args)]
pub struct ServeTarget {
    #[command(flatten)]
    pub side: ServeSide,
    #[command(flatten)]
    pub from: TargetSource,
}

#[derive(Debug, Args)]
pub struct ServeSide {
    #[command(flatten)]
    pub observe: Observe,
    /// Where to answer scrapes. Whoever reaches the address reads what this machine's storage does: any but a loopback
    /// address is for a network that you trust.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9966", value_parser = listen)]
    pub listen: std::net::SocketAddr,
    /// Give figures of each queue too.
    #[arg(long)]
    pub queues: bool,
    /// How many series of telemetry to give at most; the most telling ones come first.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(0..=100_000), allow_negative_numbers = true)]
    pub telemetry_series: u32,
}

#[derive(Debug, clap::Subcommand)]
pub enum Probe {
    /// The host: the kernel's nvme-tcp and nvme-rdma, or a program that uses SPDK's NVMe/TCP initiator.
    Host(ProbeSide),
    /// The target: the kernel's nvmet over TCP and RDMA, or an SPDK nvmf_tgt, running or as a file.
    Target(ProbeSide),
}

#[derive(Debug, Args)]
pub struct ProbeSide {
    /// The kernel's driver.
    #[arg(long, conflicts_with_all = ["spdk", "baseline"])]
    pub kernel: bool,
    #[command(flatten)]
    pub common: ProbeCommon,
}

#[derive(Debug, Args)]
pub struct ProbeCommon {
    /// The SPDK process with this PID, or a program file (which needs no rights); without a value, the only
    /// process there is.
    #[arg(long, value_name = "PID|PATH", num_args = 0..=1, default_missing_value = "")]
    pub spdk: Option<OsString>,
    /// Layout file for a stripped program.
    #[arg(long, value_name = "FILE")]
    pub layout: Option<PathBuf>,
    /// Separate debug file of the program.
    #[arg(long, value_name = "FILE")]
    pub debug_file: Option<PathBuf>,
    /// Write the layout file that serves a stripped program of the same build-id. Needs --spdk PATH.
    #[arg(long, value_name = "FILE", requires = "spdk")]
    pub save_layout: Option<PathBuf>,
    /// Compare with what another build of SPDK offered, as `probe --format json` printed it; exit with 3 where
    /// a boundary is no longer taken at its own moment.
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,
    /// Show every rung of every ladder, and every change.
    #[arg(long)]
    pub detail: bool,
    #[command(flatten)]
    pub format: FormatOption,
}

#[derive(Debug, Args)]
pub struct Report {
    /// A host's run (or the run of one side alone, or a directory that holds a host's and a target's).
    #[arg(value_name = "HOST.run")]
    pub first: PathBuf,
    /// The target's run.
    #[arg(value_name = "TARGET.run")]
    pub second: Option<PathBuf>,
    /// What the rows are.
    #[arg(long, value_enum, default_value_t = By::Class)]
    pub by: By,
    /// Show the parts of each stage too.
    #[arg(long)]
    pub detail: bool,
    /// List so many of the slowest commands, each with its stages and their parts.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = slowest, hide_default_value = true, allow_negative_numbers = true)]
    pub slowest: usize,
    /// How much memory to take at most, about. Runs that do not fit are read part after part, and their percentiles
    /// are then within 0.1 %.
    #[arg(long, value_name = "SIZE", default_value = "2GiB", value_parser = signed(memory), allow_hyphen_values = true)]
    pub memory: u64,
    #[command(flatten)]
    pub format: FormatOption,
}

#[derive(Debug, Args)]
pub struct FormatOption {
    /// A table for a person or JSON for a program.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Operation and size.
    Class,
    /// Queue.
    Queue,
    /// Device and namespace.
    Device,
    /// CPU of the host.
    Cpu,
}

/// Each BASE and NEW is a directory that holds a host's and a target's run of the same load, or HOST.run,TARGET.run
/// with a comma, or one run of one side. One run a side tells these two runs apart; several of each, recorded in
/// turn, tell the systems apart. Exit codes: 3 where a gate does not hold, 4 where one can not be told or there
/// is nothing to compare.
#[derive(Debug, Args)]
#[command(after_help = GATES)]
pub struct Compare {
    /// BASE and NEW; or BASE... --against NEW...
    #[arg(value_name = "RUN", required = true, num_args = 1..)]
    pub runs: Vec<PathBuf>,
    /// Repeated runs to compare with: all others are the base's.
    #[arg(long, value_name = "NEW", num_args = 1..)]
    pub against: Vec<PathBuf>,
    /// What has to hold, such as storage.p99<=1.05x,latency.mean<=+3us; may be given several times.
    #[arg(long, value_name = "GATE", value_delimiter = ',', value_parser = joiner::Gate::parse)]
    pub gate: Vec<joiner::Gate>,
    /// The least change that counts: a share of the base, a time, or the larger of both.
    #[arg(long, value_name = "P%,TIME", default_value = "2%,0.25us", value_parser = signed(joiner::Floor::parse), allow_hyphen_values = true)]
    pub floor: joiner::Floor,
    /// How surely all intervals of the comparison hold together.
    #[arg(long, value_name = "P%", default_value = "99%", value_parser = signed(confidence), allow_hyphen_values = true)]
    pub confidence: f64,
    /// Show every figure of every stage in the table.
    #[arg(long)]
    pub detail: bool,
    /// A table for a person, JSON for a program, Markdown for a pull request, or JUnit XML for a CI.
    #[arg(long, value_enum, default_value_t = CompareFormat::Table)]
    pub format: CompareFormat,
}

const GATES: &str = "Gates: [CLASS:]STAGE.STATISTIC<=BOUND. CLASS: read, write/4096, ... STAGE: latency, host_block, host_driver, network, target_driver, storage (beyond_host, data_wait with one side alone). STATISTIC: typical, mean, p50, p90, p99, p999. BOUND: 1.05x, +5%, +3us, -3us, or 80us. A gate holds while the figure is within the bound and the data would have shown twice what the bound allows, and does not hold where the figure is surely beyond.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompareFormat {
    Table,
    Json,
    Markdown,
    Junit,
}

/// Names a cause only where its own evidence holds and explains a good part of what is slow; what is not found is ruled
/// out with the figure that does it, or can not be told for want of something that is named. No cause found is an
/// answer: exit code 0. 3 where a service level does not hold, 4 where there is too little data.
#[derive(Debug, Args)]
pub struct Diagnose {
    /// The host's run, or a directory that holds a host's and a target's.
    #[arg(value_name = "HOST.run")]
    pub first: PathBuf,
    /// The target's run.
    #[arg(value_name = "TARGET.run")]
    pub second: Option<PathBuf>,
    /// Runs of the same load when all was well, to measure against: HOST.run,TARGET.run or a directory with both.
    #[arg(long, value_name = "HOST.run,TARGET.run|DIR")]
    pub baseline: Option<PathBuf>,
    /// What has to hold, such as latency.p99<=500us,read/4096:storage.p50<=80us,read.iops>=90k,bandwidth>=1GB/s; may be
    /// given several times.
    #[arg(long, value_name = "SLO", value_delimiter = ',', value_parser = joiner::Slo::parse)]
    pub slo: Vec<joiner::Slo>,
    /// How much memory to take at most, about. Of runs that do not fit, the first part that does is diagnosed.
    #[arg(long, value_name = "SIZE", default_value = "2GiB", value_parser = signed(memory), allow_hyphen_values = true)]
    pub memory: u64,
    /// A table for a person, JSON for a program, or Markdown for an issue.
    #[arg(long, value_enum, default_value_t = DiagnoseFormat::Table)]
    pub format: DiagnoseFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiagnoseFormat {
    Table,
    Json,
    Markdown,
}

/// Runs are directories with a run.json, at any depth. A host's and a target's run of one parent directory are a pair;
/// else those that were recorded at one time and share a queue. What was joined by an earlier call is not joined again.
#[derive(Debug, Args)]
pub struct Batch {
    /// Directories with runs beneath them.
    #[arg(value_name = "DIR", required = true, num_args = 1..)]
    pub directories: Vec<PathBuf>,
    /// Where the table goes (batch.parquet), with what the next call goes on from.
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// Group and order the runs by this label, such as spdk.version, kernel, machine, day or one of your own.
    #[arg(long, value_name = "LABEL")]
    pub by: Option<String>,
    /// The least change that counts: a share, a time, or the larger of both.
    #[arg(long, value_name = "P%,TIME", default_value = "2%,0.25us", value_parser = signed(joiner::Floor::parse), allow_hyphen_values = true)]
    pub floor: joiner::Floor,
    /// How many pairs to join at once [default: one for each core].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), allow_negative_numbers = true)]
    pub jobs: Option<u16>,
    /// How much memory joining may take at most, about, all pairs together.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = signed(memory), allow_hyphen_values = true)]
    pub memory: u64,
    /// Show no progress.
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub format: FormatOption,
}

#[derive(Debug, Args)]
pub struct Demo {
    /// Keep the recorded runs in this directory, in place of an earlier demo's.
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// How much slower storage is made, such as 500us.
    #[arg(long, value_name = "TIME", default_value = "500us", value_parser = signed(duration), allow_hyphen_values = true)]
    pub delay: Duration,
    /// How long each of the two recordings lasts.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = signed(duration), allow_hyphen_values = true)]
    pub duration: Duration,
}

/// Each fault is injected on the stand-in target and initiator, on this machine; with the directory of an SPDK build in
/// SPDK_BUILD also on its nvmf_tgt. Exit codes: 3 where something was not found as it should have been, 4 where other
/// work on the machine kept it from being told.
#[derive(Debug, Args)]
pub struct Selftest {
    /// Record each load for a shorter time.
    #[arg(long)]
    pub quick: bool,
    /// Inject them into a real SPDK: the nvmf_tgt and bdevperf of this build, the directory `build` of its source.
    #[arg(long, value_name = "BUILD")]
    pub spdk: Option<PathBuf>,
    /// Only these causes, such as fabric_loss,iops_limit.
    #[arg(long, value_name = "CAUSE", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Keep the recorded runs in this directory, one folder for each cause.
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    #[command(flatten)]
    pub format: FormatOption,
}

#[derive(Debug, Args)]
pub struct Schema {
    /// Whose output.
    #[arg(value_enum, default_value_t = SchemaOf::Report)]
    pub of: SchemaOf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SchemaOf {
    /// `report --format json`.
    Report,
    /// `probe --format json`, which `probe --baseline` reads.
    Probe,
    /// `probe --baseline FILE --format json`.
    ProbeBaseline,
    /// `compare --format json`.
    Compare,
    /// `diagnose --format json`.
    Diagnose,
    /// `selftest --format json`.
    Selftest,
    /// `batch --format json`.
    Batch,
    /// A line of `watch --format json`.
    Watch,
}

/// What a value is whose first character is a hyphen: another option, where one was left out. Only numbers below
/// nothing are for the values' own readers to refuse.
fn is_option(text: &str) -> bool {
    text.starts_with('-') && !text.contains(|c: char| c.is_ascii_digit())
}

/// A reader of values that may begin with a hyphen, so that `-1s` is refused for what it is.
fn signed<T, E: std::fmt::Display>(
    read: impl Fn(&str) -> Result<T, E> + Clone,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        if is_option(text) {
            return Err(format!("a value is missing: {text} is an option"));
        }
        read(text).map_err(|error| error.to_string())
    }
}

/// Whether it would make no sense with a unit either.
pub(crate) fn is_nothing(number: &str) -> bool {
    number.trim().is_empty() || number.trim().parse::<f64>().is_ok_and(|number| number == 0.0)
}

/// Ends as clap does where the options that were given do not go together.
pub(crate) fn conflict(what: &str) -> ! {
    Cli::command().error(ErrorKind::ArgumentConflict, what).exit()
}

/// An amount of memory with its unit, as bytes. Units are those of 1024 and of 1000, in any case.
fn memory(text: &str) -> Result<u64, String> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && !"-.".contains(c)).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let bytes = match unit.trim_start().to_ascii_lowercase().as_str() {
        "kib" | "k" => 1u64 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "" if is_nothing(number) => return Err("write an amount with its unit, such as 2GiB".into()),
        "" => return Err(format!("{text:?} has no unit: write {text}GiB, or KiB, MiB, TiB, KB, MB, GB, TB")),
        _ => {
            return Err(format!(
                "{unit:?} is not a unit of memory here: use KiB, MiB, GiB, TiB, KB, MB, GB or TB"
            ));
        }
    };
    let number: f64 = number.parse().map_err(|_| format!("{number:?} is not a number"))?;
    let bytes = number * bytes as f64;
    if bytes > 1e18 {
        return Err("more than any machine has: write 2GiB, or how much memory there is to take".into());
    }
    if !bytes.ge(&(joiner::Bounds::LEAST as f64)) {
        return Err(format!("must be at least {} MiB", joiner::Bounds::LEAST >> 20));
    }
    Ok(bytes as u64)
}

/// How often a live view has news.
fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&interval) {
        return Ok(interval);
    }
    Err("must be from 100ms to 1h".to_owned())
}

/// A duration: a number and one of us, ms, s, m, h.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && !"-.".contains(c)).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let nanos = match unit {
        "us" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        "m" => 60e9,
        "h" => 3600e9,
        "" if is_nothing(number) => return Err("write a time with its unit, such as 30s or 500ms".into()),
        "" => return Err(format!("{text:?} has no unit: write {text}s, or ms, us, m, h")),
        _ => return Err(format!("{unit:?} is not a unit of time: use us, ms, s, m or h")),
    };
    let number: f64 = number.parse().map_err(|_| format!("{number:?} is not a number"))?;
    let nanos = number * nanos;
    if !(1.0..=1e18).contains(&nanos) {
        return Err("must be more than nothing and less than 30 years".into());
    }
    Ok(Duration::from_nanos(nanos as u64))
}

/// Where to listen: no name, which could be several addresses.
fn listen(text: &str) -> Result<std::net::SocketAddr, String> {
    text.parse().map_err(|_| "write an IP address and a port, such as 127.0.0.1:9966 or [::1]:9966".into())
}

/// How many commands to list one by one.
fn slowest(text: &str) -> Result<usize, String> {
    const MOST: usize = 100_000;
    let number = text.parse().map_err(|_| format!("{text:?} is not a number of commands"))?;
    if number > MOST {
        return Err(format!(
            "at most {MOST}: the runs' commands are Parquet files, which take more questions"
        ));
    }
    Ok(number)
}

/// A probability in per cent, as a share.
fn confidence(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>();
    number
        .ok()
        .filter(|p| (50.0..=99.9999).contains(p))
        .map(|p| p / 100.0)
        .ok_or_else(|| format!("{text:?} is no confidence: write 95%, or another from 50% to 99.9999%"))
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("a label is NAME=VALUE".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Cli, duration};
    use clap::{CommandFactory, Parser};
    use std::time::Duration;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn amounts_of_memory_need_a_unit() {
        assert_eq!(super::memory("2GiB"), Ok(2 << 30));
        assert_eq!(super::memory("1.5 GiB"), Ok(3 << 29));
        assert_eq!(super::memory("128M"), Ok(128 << 20));
        for (text, bytes) in [
            ("2gib", 2u64 << 30),
            ("2GB", 2_000_000_000),
            ("1TiB", 1 << 40),
            ("1tb", 1_000_000_000_000),
            ("200000 kib", 200_000 << 10),
            ("200000KB", 200_000_000),
            ("512Mb", 512_000_000),
            ("2g", 2 << 30),
        ] {
            assert_eq!(super::memory(text), Ok(bytes), "{text}");
        }
        assert!(super::memory("99999999TiB").unwrap_err().contains("more than any"));
        assert!(
            !super::memory("0").unwrap_err().contains("0GiB")
                && super::memory("2").unwrap_err().contains("2GiB")
        );
        for bad in [
            "2",
            "0",
            "",
            "GiB",
            "0GiB",
            "127MiB",
            "-1GiB",
            "1.2.3GiB",
            "5 acres",
            "NaNGiB",
            "9999999999999GiB",
        ] {
            assert!(super::memory(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn values_below_nothing_are_refused_for_what_they_are() {
        let said = |arguments: &str| {
            let arguments = arguments.split(' ');
            Cli::try_parse_from(["fabscope"].into_iter().chain(arguments)).unwrap_err().to_string()
        };
        for (arguments, why) in [
            ("record target --max-overhead -1", "less than nothing"),
            ("record target --max-overhead -1us", "less than nothing"),
            ("record target --max-overhead -2%", "more than 0%"),
            ("record target --window -50ms/1s", "more than nothing"),
            ("record target -d -5s", "more than nothing"),
            ("record target -d -5", "has no unit"),
            ("record host --sample -1", "-1 is not in 1.."),
            ("record host --ring-mib -1", "-1 is not in 1..=1024"),
            ("report a.run --memory -1GiB", "at least"),
            ("compare a b --floor -1%", "-1%"),
            ("compare a b --confidence -1%", "is no confidence"),
            ("demo --delay -1us", "more than nothing"),
            // An option that has no value does not take the next option for it.
            ("record target --max-overhead --quiet", "a value is missing"),
            ("record target --window -q", "a value is missing"),
            ("record target -d --force", "a value is missing"),
        ] {
            let said = said(arguments);
            assert!(said.contains(why) && !said.contains("tip:"), "{arguments}: {said}");
        }
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(duration("1.5ms"), Ok(Duration::from_micros(1500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert!(!duration("0").unwrap_err().contains("0s,") && !duration("").unwrap_err().contains("\"\""));
        for bad in ["5", "0", "", "s", "0s", "-1s", "1.2.3s", "5 parsecs", "1e30s", "NaNs", "99999999999h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
