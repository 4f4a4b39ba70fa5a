//! `run.json`: what a run is, where and how it was recorded, and what was lost.

use crate::{Boundary, Kind, Nanos, Side, Transport, clock_pair, machine, monotonic_now};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The manifest of one run. Rewritten whole (aside, then renamed) each second while recording.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`Manifest::FORMAT`].
    pub format: String,
    /// Which end was recorded.
    pub side: Side,
    /// What software took part.
    pub kind: Kind,
    /// Version of the fabscope that recorded it.
    pub tool: String,
    /// `open` while recording, `closed` when it ended in order.
    pub state: State,
    /// The machine.
    pub machine: Machine,
    /// The software that was recorded.
    pub software: Software,
    /// How each boundary of this side was taken.
    pub hooks: Vec<Hook>,
    /// How much was asked for: `stages` or `full`.
    pub detail: String,
    /// One command in this many is kept, chosen by the shared hash.
    pub one_in: u32,
    /// When hooks were all in place, and when recording ended (last known while open). Where [`Manifest::windows`]
    /// is set, they were in place only within the slices of [`crate::Run::slices`].
    pub window: Window,
    /// How a run in time windows was armed; `None` where the hooks were in place throughout. Then every command of
    /// the run lies whole within one of its slices, from its first boundary to its last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<Windows>,
    /// What recording cost the recorded, measured by `--measure-overhead`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<crate::Overhead>,
    /// Pairs of this machine's clocks, at least one at start and one at end.
    pub clocks: Vec<ClockPair>,
    /// What was seen, recorded and lost.
    pub counters: Counters,
    /// What `record -- CMD` ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Workload>,
    /// What the recording was estimated to cost the recorded system, before it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
    /// What was sampled beside the commands; `None` where nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub telemetry: Option<crate::TelemetrySummary>,
    /// What happened besides commands: resets, disconnects, pauses.
    #[serde(default)]
    pub events: Vec<Event>,
    /// The user's own labels, for `batch`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

impl Manifest {
    /// That of a recording by this version of `tool` which begins now on this machine, with nothing in it yet.
    #[must_use]
    pub fn begun(side: Side, kind: Kind, tool: &str) -> Manifest {
        let now = monotonic_now();
        Manifest {
            format: Manifest::FORMAT.into(),
            side,
            kind,
            tool: tool.into(),
            state: State::Open,
            machine: machine(),
            software: Software::default(),
            hooks: Vec::new(),
            detail: "stages".into(),
            one_in: 1,
            window: Window { start_ns: now, end_ns: now },
            windows: None,
            overhead: None,
            clocks: vec![clock_pair()],
            counters: Counters::default(),
            workload: None,
            price: None,
            telemetry: None,
            events: Vec::new(),
            labels: BTreeMap::new(),
        }
    }

    /// Name and version of the format. A reader takes this version and older ones.
    pub const FORMAT: &str = "fabscope-run/1";
    /// The format's name without its version.
    pub const FORMAT_NAME: &str = "fabscope-run";
    /// The format's version.
    pub const FORMAT_VERSION: u32 = 1;
}

/// Whether a recording ended in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Being recorded, or cut short.
    Open,
    /// Ended in order.
    Closed,
}

/// The machine a run was recorded on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its host name.
    pub hostname: String,
    /// Kernel release, as `uname -r` has it.
    pub kernel: String,
    /// Kernel build, as `uname -v` has it.
    pub kernel_build: String,
    /// Architecture, as `uname -m` has it.
    pub architecture: String,
    /// CPUs online.
    pub cpus: u32,
    /// `/proc/sys/kernel/random/boot_id`: two runs of one boot share their clocks.
    pub boot_id: String,
}

/// The software that was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Software {
    /// `nvme-tcp`, `nvmet-tcp`, `SPDK`, `fabscope stand-in`.
    pub name: String,
    /// Its version (for a kernel driver the kernel's).
    pub version: String,
    /// GNU build-id of the program, lower-case hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
    /// Path of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Process that was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// How one boundary was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// The boundary.
    pub boundary: Boundary,
    /// The transport whose commands it takes; `None` where it takes every transport's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// What it is taken with, such as `fentry nvme_tcp_queue_rq` or `uprobe bdev_io_submit+1`; `None` where
    /// nothing fits here.
    pub hook: Option<String>,
    /// Position on the boundary's ladder: 0 is the best one.
    pub rung: u32,
    /// Whether this is the boundary's own moment, as opposed to a near one that stands for it.
    pub measured: bool,
    /// The instruction a uprobe sits on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instruction: Option<String>,
    /// Estimated price of one hit, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimated_ns: Option<u32>,
    /// Why not the better rungs, or what is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// From when to when a run recorded, `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// All hooks were in place.
    pub start_ns: Nanos,
    /// The first hook was taken away; while a run is open, the time of its last segment.
    pub end_ns: Nanos,
}

/// How a run in time windows was armed. Windows begin at the multiples of `every_ns` of `CLOCK_REALTIME`, so that two
/// recorders whose wall clocks agree are in step with no contact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Windows {
    /// How long each was to be.
    pub length_ns: u64,
    /// From the beginning of one to that of the next.
    pub every_ns: u64,
    /// How many there were so far.
    pub slices: u64,
    /// How long they were together.
    pub armed_ns: u64,
    /// How long probes were in place altogether: also before a slice, while the last of them came, and after it.
    #[serde(default)]
    pub in_place_ns: u64,
    /// Windows that came while it recorded and were left out: the probes could not be in place in time, or a budget
    /// did not allow it.
    pub skipped: u64,
    /// While a run is open, the slice that was under way when this was written, as far as it was to go. What of it was
    /// recorded ends with the run's window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub under_way: Option<Window>,
}

/// The same instant on two clocks of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockPair {
    /// `CLOCK_MONOTONIC`.
    pub monotonic_ns: Nanos,
    /// `CLOCK_REALTIME`.
    pub realtime_ns: Nanos,
}

/// What was seen, recorded and lost: `seen = recorded + unsampled + lost`, exactly, when all in flight at
/// the end is in `in_flight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Commands that reached the first hook.
    pub seen: u64,
    /// Commands whose record reached the run.
    pub recorded: u64,
    /// Commands left out by sampling.
    pub unsampled: u64,
    /// Commands seen and lost, by reason.
    pub lost: Lost,
    /// Commands seen and not over when recording ended.
    pub in_flight: u64,
    /// Completions of commands that had begun before recording did: not among the seen.
    pub no_start: u64,
    /// Commands of a run in time windows that were not whole within one slice, as far as they were met: not among
    /// the seen.
    #[serde(default)]
    pub cut: u64,
}

/// Commands that were seen and lost, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// The ring buffer was full.
    pub ring_full: u64,
    /// The in-flight map was full.
    pub map_full: u64,
    /// Started, then dropped or replaced without a completion (reset, disconnect).
    pub unfinished: u64,
    /// Identity could not be read from memory.
    pub unreadable: u64,
    /// The kernel could not run a probe (recursion, or its own limits).
    pub probe_missed: u64,
    /// SPDK's trace ring was overwritten before it was read.
    #[serde(default)]
    pub overwritten: u64,
}

impl Lost {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        [self.ring_full, self.map_full, self.unfinished, self.unreadable, self.probe_missed, self.overwritten]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

/// What a recording was estimated to cost the recorded system, told before it began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Price {
    /// Of a command while the hooks are in place.
    pub per_command: PerKindNs,
    /// The same with the functions of all boundaries probed at their entries, whatever stands there; `None` where
    /// nothing of the recording has such a way, as with a trace ring.
    #[serde(default)]
    pub naive: Option<PerKindNs>,
    /// Why figures of another machine stand for those of this one; `None` where they were measured here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_measured: Option<String>,
    /// What `--max-overhead` asked for, and what was decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<String>,
}

/// A time for each kind of command, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PerKindNs {
    /// A read.
    pub read_ns: u32,
    /// A write whose data is in its capsule.
    pub write_ns: u32,
    /// A write whose data is asked for by one R2T.
    pub r2t_write_ns: u32,
}

/// What `record -- CMD` ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// The command line.
    pub argv: Vec<String>,
    /// How it ended; `None` while it runs or when a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// File with its standard output, inside the run.
    pub stdout: String,
    /// File with its standard error, inside the run.
    pub stderr: String,
    /// What fio said of itself, where it was fio.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fio: Vec<FioJob>,
}

/// fio's own figures for one direction of one job, from its JSON output.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FioJob {
    /// Job name.
    pub job: String,
    /// `read`, `write` or `trim`.
    pub direction: String,
    /// Commands.
    pub ios: u64,
    /// Mean submission latency, ns.
    pub slat_mean_ns: f64,
    /// Mean completion latency, ns.
    pub clat_mean_ns: f64,
    /// Mean total latency, ns.
    pub lat_mean_ns: f64,
    /// fio's version.
    pub version: String,
}

/// Something besides a command that explains a gap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, `CLOCK_MONOTONIC`.
    pub at_ns: Nanos,
    /// What: `controller reset`, `qpair disconnect`, `subsystem pause`, ...
    pub what: String,
    /// On what.
    pub on: String,
}
