//! The report: what its JSON holds, and how it is computed from a joined run or from one side's run. How it
//! looks to a person is in `table`.

use crate::describe::describe;
use crate::error::Error;
use crate::histogram::Histogram;
use crate::join::{Accounting, Aside, BoundaryFigures, ClockFigures, Joined, Pair, SetAside, figures_of};
use crate::listed::{Listed, SlowCommand};
use crate::model::{self, Stages, SubStage, Terms, fallbacks, filled, is_of_r2t};
use crate::recording::{NONE, Recording};
use crate::stats::Distribution;
use crate::tails::{PARTS, Slowest, Tail, Timed, tails};
use rayon::prelude::*;
use run_format::{Boundary, Kind, Manifest, Operation, Overhead, Run, Side, Stage, State};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use std::collections::{BTreeMap, HashMap};

/// The JSON schema (draft 2020-12) of a report.
pub const SCHEMA: &str = include_str!("schema/report.json");

/// Name and version of the report's format.
pub(crate) const FORMAT: &str = "fabscope-report/1";

/// What the classes are split by, besides operation, size and outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupBy {
    /// Nothing else.
    #[default]
    Class,
    /// The queue.
    Queue,
    /// The device and namespace.
    Device,
    /// The CPU that the host handed the command to its driver on (the target's own, without a host).
    Cpu,
}

/// What to put into a report.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReportOptions {
    /// What to split the classes by.
    pub group_by: GroupBy,
    /// Also the parts of the stages.
    pub detail: bool,
    /// How many of the slowest commands to list.
    pub slowest: usize,
    /// Also the histograms of latency and stages, which add up across runs: for batch.
    pub histograms: bool,
}

/// A report, as `fabscope report --format json` prints it: times in nanoseconds, null where not known or
/// not carried by the sample.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name and version of the format.
    pub format: &'static str,
    /// The host's run; null where there is none.
    pub host: Option<RunFigures>,
    /// The target's run; null where there is none.
    pub target: Option<RunFigures>,
    /// How the two were joined; null in a report of one side.
    pub join: Option<JoinFigures>,
    /// How the two clocks relate; null in a report of one side.
    pub clock: Option<ClockFigures>,
    /// How every boundary was taken.
    #[serde(serialize_with = "boundaries")]
    pub boundaries: Vec<BoundaryFigures>,
    /// What the classes are split by, besides operation, size and outcome.
    pub group_by: GroupBy,
    /// The percentiles are off by at most this share of themselves: 0 where the runs were held in memory.
    pub percentile_error: f64,
    /// The classes of commands.
    pub classes: Vec<Class>,
    /// The slowest commands, the slowest first, where they were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slowest: Vec<SlowCommand>,
    /// What fio said of itself beside what was recorded of the same commands.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fio: Vec<FioFigures>,
    /// What a reader should know besides the figures.
    pub notes: Vec<String>,
}

/// What a run is.
#[derive(Clone, Debug, Serialize)]
pub struct RunFigures {
    /// Its directory.
    pub run: String,
    /// Kernel or SPDK.
    pub kind: Kind,
    /// Name of the recorded software.
    pub software: String,
    /// Its version.
    pub version: String,
    /// Its build-id, where it is a program.
    pub build_id: Option<String>,
    /// The machine's name.
    pub machine: String,
    /// The machine's kernel.
    pub kernel: String,
    /// Whether the recording ended in order.
    pub state: State,
    /// How long was recorded, seconds.
    pub seconds: f64,
    /// One command in this many was kept.
    pub one_in: u32,
    /// Commands in the run.
    pub commands: u64,
    /// Commands that the recorder saw and lost.
    pub lost: u64,
    /// The time windows in which it recorded; absent where it recorded throughout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub windows: Option<WindowFigures>,
    /// What recording cost the recorded, where it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Overhead>,
}

/// The time windows of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WindowFigures {
    /// How long each was to be.
    pub length_ns: u64,
    /// From the beginning of one to that of the next.
    pub every_ns: u64,
    /// How many there were.
    pub slices: u64,
    /// How many were left out: the probes were not in place in time, or a budget did not allow it.
    pub skipped: u64,
    /// How long the probes were armed, seconds: rates of this side's commands are those of this time.
    pub armed_seconds: f64,
    /// That as a share of the recording.
    pub share: f64,
    /// How long probes were in place altogether, also before and after the slices, seconds; absent where the run does not
    /// tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_place_seconds: Option<f64>,
}

impl WindowFigures {
    fn of(manifest: &Manifest) -> Option<WindowFigures> {
        let windows = manifest.windows?;
        let whole = manifest.window.end_ns.0.saturating_sub(manifest.window.start_ns.0).max(1);
        Some(WindowFigures {
            length_ns: windows.length_ns,
            every_ns: windows.every_ns,
            slices: windows.slices,
            skipped: windows.skipped,
            armed_seconds: windows.armed_ns as f64 / 1e9,
            share: windows.armed_ns as f64 / whole as f64,
            in_place_seconds: (windows.in_place_ns > 0).then_some(windows.in_place_ns as f64 / 1e9),
        })
    }
}

/// How many commands were joined, and why the others were not. On each side the commands are the joined ones
/// and those set aside, exactly.
#[derive(Clone, Debug, Serialize)]
pub struct JoinFigures {
    /// Commands of the host's run.
    pub host_commands: u64,
    /// Commands of the target's run.
    pub target_commands: u64,
    /// Pairs.
    pub joined: u64,
    /// Queues (or groups of epochs of one) that are in both runs.
    pub queues: usize,
    /// How long both sides were armed at once, seconds, where either was recorded in time windows: the rate of the
    /// joined commands is that of this time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub armed_seconds: Option<f64>,
    /// Commands set aside on either side, by reason.
    #[serde(serialize_with = "aside")]
    pub set_aside: Aside,
    /// Those of the host.
    #[serde(serialize_with = "aside")]
    pub host_set_aside: Aside,
    /// Those of the target.
    #[serde(serialize_with = "aside")]
    pub target_set_aside: Aside,
}

/// A class of commands: same operation, size and outcome (and group).
#[derive(Clone, Debug, Serialize)]
pub struct Class {
    /// What the commands do.
    pub operation: Operation,
    /// Bytes of data that each carries.
    pub bytes: u32,
    /// Whether they ended with an error status; such commands are a class of their own.
    pub error: bool,
    /// The queue, device or CPU, where the report is split by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How many they are.
    pub commands: u64,
    /// The whole time: `h_end - h_queued`, or `t_sent - t_recv` without a host.
    pub latency: Distribution,
    /// The five stages; null where this report can not know it.
    pub stages: StageTable,
    /// Without a target: network, target and storage together (`h_recv - h_sent` less the host's answers to
    /// R2Ts).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beyond_host: Option<Figures>,
    /// Without a host: the wait for the data of R2Ts, which is the network's and the host's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_wait: Option<Figures>,
    /// The parts of the stages, in the order of a command's way, where detail was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// What makes the commands above p99 and p99.9 slow; without those that the sample does not carry.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tails: Vec<Tail>,
    /// The stage with the largest mean among those known; null where `beyond_host` or `data_wait` is
    /// larger, since then it is not known.
    pub largest_stage: Option<Stage>,
    /// Of latency, the stages and `beyond_host` or `data_wait`, in this order: what the report has of them. They may be
    /// empty where they were not asked for.
    #[serde(skip)]
    pub(crate) histograms: Vec<Histogram>,
}

/// The five stages of a class, in the order of [`Stage::ALL`].
#[derive(Clone, Debug, Default)]
pub struct StageTable(pub [Option<Figures>; 5]);

impl StageTable {
    /// One stage's figures.
    #[must_use]
    pub fn of(&self, stage: Stage) -> Option<&Figures> {
        self.0[stage as usize].as_ref()
    }
}

impl Serialize for StageTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(Stage::ALL.iter().zip(&self.0).map(|(s, f)| (s.name(), f)))
    }
}

/// The figures of a stage or of a part of one.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Figures {
    /// Its mean as a share of the mean latency.
    pub share: f64,
    /// Its times.
    #[serde(flatten)]
    pub times: Distribution,
}

/// The figures of a part of a stage.
#[derive(Clone, Debug, Serialize)]
pub struct Part {
    /// Which.
    pub part: SubStage,
    /// The stage that it is a part of.
    pub stage: Stage,
    /// For the network's two ways, the mean uncertainty of the clock offset: what one is too long the other
    /// is too short.
    pub uncertainty_ns: Option<f64>,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

/// fio's own mean latency beside the recorded one, for one direction. fio's holds its own submission and
/// completion besides the command's time from the block layer on.
#[derive(Clone, Debug, Serialize)]
pub struct FioFigures {
    /// `read`, `write` or `trim`.
    pub direction: String,
    /// I/Os by fio's count, over all its jobs.
    pub ios: u64,
    /// fio's mean total latency.
    pub fio_mean_ns: f64,
    /// Host commands recorded of this direction.
    pub commands: u64,
    /// Their mean latency, `h_end - h_queued`.
    pub recorded_mean_ns: f64,
    /// fio's less the recorded one.
    pub difference_ns: f64,
}

fn boundaries<S: Serializer>(figures: &[BoundaryFigures], serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Entry<'a> {
        hook: Option<&'a str>,
        measured: bool,
        fell_back: u64,
    }
    let mut map = serializer.serialize_map(Some(figures.len()))?;
    for f in figures {
        let entry = Entry { hook: f.hook.as_deref(), measured: f.measured, fell_back: f.fell_back };
        map.serialize_entry(f.boundary.name(), &entry)?;
    }
    map.end()
}

fn aside<S: Serializer>(aside: &Aside, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(SetAside::ALL.iter().map(|r| (r.name(), aside.of(*r))))
}

/// Reports a joined run.
///
/// # Errors
/// [`Error::TooLittle`] when no commands were joined; its text says why.
pub fn report(joined: &Joined, options: &ReportOptions) -> Result<Report, Error> {
    let (host, target) = (&joined.host, &joined.target);
    if joined.pairs().is_empty() {
        return Err(Error::TooLittle {
            why: why_nothing(joined),
            runs: format!("{}\n  {}", describe(host), describe(target)),
        });
    }
    let groups = Groups::new(options.group_by, host);
    let rows = Rows {
        key: |pair: &Pair| groups.key(host, pair.host_row as usize),
        metrics: |pair: &Pair, row: &mut [i64]| {
            // A pair of this join has its terms.
            if let Some(terms) = joined.terms(*pair) {
                fill(row, &terms, &terms.stages(), || joined.offset_of(*pair));
            }
        },
        at: |pair: &Pair| began(host, pair.host_row as usize),
        width: width(options),
        histograms: options.histograms,
    };
    let classes =
        rows.classes(joined.pairs(), |key, n, columns| pair_class(key, &groups, n, columns, options.detail));
    let mut listed = Listed::of(options.slowest);
    if options.slowest > 0 {
        for pair in joined.pairs() {
            if let Some(terms) = joined.terms(*pair) {
                let offset = || joined.offset_of(*pair);
                listed.add_pair(host, pair.host_row as usize, &terms, &terms.stages(), offset);
            }
        }
    }
    let accounting = joined.accounting();
    Ok(Report {
        format: FORMAT,
        host: Some(run_figures(host)),
        target: Some(run_figures(target)),
        join: Some(join_figures(accounting, joined.links().len(), joined.in_both())),
        clock: joined.clock(),
        boundaries: joined.boundaries().to_vec(),
        group_by: options.group_by,
        percentile_error: 0.0,
        classes,
        slowest: listed.commands(host, &groups),
        fio: fio(host),
        notes: joined.notes().to_vec(),
    })
}

/// How many figures a report needs of each pair.
pub(crate) fn width(options: &ReportOptions) -> usize {
    6 + if options.detail { 2 + SubStage::COUNT } else { 0 }
}

/// The figures of a pair: latency, stages and, where there is room for them, what detail needs.
pub(crate) fn fill(row: &mut [i64], terms: &Terms, stages: &Stages, offset: impl Fn() -> (i64, i64)) {
    row[0] = stages.latency;
    row[1..6].copy_from_slice(&stages.stages);
    if let [uncertainty, split, parts @ ..] = &mut row[6..] {
        let (offset, known_to) = offset();
        *uncertainty = known_to;
        *split = i64::from(terms.drive.is_some());
        parts.copy_from_slice(&terms.sub_stages(offset));
    }
}

/// A class of pairs, from the distributions of what [`fill`] gives.
pub(crate) fn pair_class(key: Key, groups: &Groups, n: u64, mut columns: Columns, detail: bool) -> Class {
    let latency = columns.next();
    let stages: [Figures; 5] = std::array::from_fn(|_| columns.figures(latency.mean_ns));
    let medians = std::array::from_fn(|n| (Some(Stage::ALL[n].name()), stages[n].times.p50_ns));
    let tails = tails(n, &columns.slowest, &latency, &medians);
    let uncertainty = detail.then(|| columns.next().mean_ns);
    // Storage is split where it is for every command of the class.
    let split = detail && columns.next().mean_ns >= 1.0;
    let parts: &[SubStage] = if detail { SubStage::ALL } else { &[] };
    let parts = parts
        .iter()
        .filter(|part| split || part.stage() != Stage::Storage)
        .map(|&part| Part {
            part,
            stage: part.stage(),
            uncertainty_ns: uncertainty
                .filter(|_| matches!(part, SubStage::NetworkOut | SubStage::NetworkBack)),
            figures: columns.figures(latency.mean_ns),
        })
        .collect();
    let histograms = columns.histograms;
    Class { tails, histograms, ..class(key, groups, n, latency, StageTable(stages.map(Some)), parts) }
}

/// Reports a host's run alone: its own two stages, and all beyond the host as one figure.
///
/// # Errors
/// [`Error::WrongSide`], [`Error::TooLittle`] when it has no whole command, or what reading it ended with.
pub fn host_report(run: &Run, options: &ReportOptions) -> Result<Report, Error> {
    let host = side(run, Side::Host)?;
    one_side(&host, options, |row| host_alone(&host, row))
}

/// [`model::host_alone`] of a row.
pub(crate) fn host_alone(host: &Recording, row: usize) -> Option<[i64; 4]> {
    model::host_alone(&host.times(row), host.r2t_turnaround(row), host.flags[row])
}

/// Reports a target's run alone: its own two stages, and the wait for the data of R2Ts.
///
/// # Errors
/// [`Error::WrongSide`], [`Error::TooLittle`] when it has no whole command, or what reading it ended with.
pub fn target_report(run: &Run, options: &ReportOptions) -> Result<Report, Error> {
    let target = side(run, Side::Target)?;
    one_side(&target, options, |row| target_alone(&target, row))
}

/// [`model::target_alone`] of a row.
pub(crate) fn target_alone(target: &Recording, row: usize) -> Option<[i64; 4]> {
    model::target_alone(&target.times(row))
}

fn side(run: &Run, wanted: Side) -> Result<Recording, Error> {
    let recording = Recording::read(run)?;
    if recording.manifest.side == wanted {
        Ok(recording)
    } else {
        Err(Error::WrongSide { wanted, run: describe(&recording) })
    }
}

/// When a command came to the side that has recorded it.
pub(crate) fn began(run: &Recording, row: usize) -> i64 {
    let first = match run.manifest.side {
        Side::Host => Boundary::HDriver,
        Side::Target => Boundary::TRecv,
    };
    match run.time(first, row) {
        NONE => fallbacks(first).iter().map(|&b| run.time(b, row)).find(|&t| t != NONE).unwrap_or(NONE),
        time => time,
    }
}

/// A report of one side, from each usable row's whole time, its two stages and the rest.
fn one_side(
    run: &Recording,
    options: &ReportOptions,
    metrics: impl Fn(usize) -> Option<[i64; 4]> + Sync,
) -> Result<Report, Error> {
    let (mut rows, mut against, mut unfinished) = (Vec::with_capacity(run.len()), 0usize, 0usize);
    for row in 0..run.len() {
        match metrics(row) {
            None => unfinished += 1,
            Some(figures) if figures.iter().any(|&f| f < 0) => against += 1,
            Some(_) => rows.push(row),
        }
    }
    if rows.is_empty() {
        return Err(Error::TooLittle {
            why: match run.len() {
                0 => "the run has no commands: was there load on this side while it was recorded?".into(),
                n => format!("none of its {n} commands has the times that a report needs"),
            },
            runs: describe(run),
        });
    }
    let groups = Groups::new(options.group_by, run);
    let is_host = run.manifest.side == Side::Host;
    let classes = Rows {
        key: |row: &usize| groups.key(run, *row),
        // Only rows with figures are among the rows.
        metrics: |row: &usize, figures: &mut [i64]| {
            figures.copy_from_slice(&metrics(*row).unwrap_or_default());
        },
        at: |row: &usize| began(run, *row),
        width: 4,
        histograms: options.histograms,
    }
    .classes(&rows, |key, n, columns| one_class(key, &groups, n, columns, is_host));
    let mut listed = Listed::of(options.slowest);
    if options.slowest > 0 {
        // Only rows with figures are among the rows.
        rows.iter().filter_map(|&row| Some((row, metrics(row)?))).for_each(|(row, figures)| {
            listed.add_alone(run, row, &figures);
        });
    }
    let notes = one_sides_notes(run, unfinished as u64, against as u64);
    let figures = run_figures(run);
    let (host, target) = if is_host { (Some(figures), None) } else { (None, Some(figures)) };
    Ok(Report {
        format: FORMAT,
        host,
        target,
        join: None,
        clock: None,
        boundaries: one_sides_boundaries(run, &rows),
        group_by: options.group_by,
        percentile_error: 0.0,
        classes,
        slowest: listed.commands(run, &groups),
        fio: if is_host { fio(run) } else { Vec::new() },
        notes,
    })
}

/// What is to be noted of a report of one side.
pub(crate) fn one_sides_notes(run: &Recording, unfinished: u64, against: u64) -> Vec<String> {
    let mut notes = vec![match run.manifest.side {
        Side::Host => "without the target's run, network, target driver and storage can not be told apart: they are one figure, beyond the host",
        Side::Target => "without the host's run, the host's stages and the network are not known; latency is the target's own, from capsule to response",
    }
    .to_owned()];
    if unfinished > 0 {
        notes.push(format!(
            "{unfinished} commands were cancelled, failed over or lack times, and are left out"
        ));
    }
    if against > 0 {
        notes.push(format!("{against} commands have times that run backwards, and are left out"));
    }
    if run.broken > 0 {
        notes.push(format!("{} command segments are cut or no Parquet files and were left out", run.broken));
    }
    notes
}

/// A class of one side's commands, from the distributions of latency, two stages and the rest.
pub(crate) fn one_class(key: Key, groups: &Groups, n: u64, mut columns: Columns, is_host: bool) -> Class {
    let latency = columns.next();
    let [first, second, rest] = std::array::from_fn(|_| columns.figures(latency.mean_ns));
    let names = model::own_stages(if is_host { Side::Host } else { Side::Target });
    let parts = [first, second, rest];
    let medians = std::array::from_fn(|n| (names.get(n).copied(), parts.get(n).and_then(|p| p.times.p50_ns)));
    let tails = tails(n, &columns.slowest, &latency, &medians);
    let (first, second) = (Some(first), Some(second));
    let stages = if is_host { [first, second, None, None, None] } else { [None, None, None, first, second] };
    let mut class = class(key, groups, n, latency, StageTable(stages), Vec::new());
    if class.stages.0.iter().flatten().all(|s| s.times.mean_ns < rest.times.mean_ns) {
        class.largest_stage = None;
    }
    class.tails = tails;
    class.histograms = columns.histograms;
    if is_host {
        class.beyond_host = Some(rest);
    } else {
        class.data_wait = Some(rest);
    }
    class
}

pub(crate) fn one_sides_boundaries(run: &Recording, rows: &[usize]) -> Vec<BoundaryFigures> {
    Boundary::of(run.manifest.side)
        .map(|b| {
            let passed = |row: &&usize| !is_of_r2t(b) || run.r2ts[**row] > 0 || run.time(b, **row) != NONE;
            let (mut all, mut without) = (0, 0);
            for row in rows.iter().filter(passed) {
                all += 1;
                without += u64::from(run.time(b, *row) == NONE);
            }
            figures_of(run, b, all, without)
        })
        .collect()
}

pub(crate) fn why_nothing(joined: &Joined) -> String {
    why_nothing_of(joined.accounting(), joined.notes())
}

/// Why nothing was joined.
pub(crate) fn why_nothing_of(a: &Accounting, notes: &[String]) -> String {
    if a.host_commands == 0 || a.target_commands == 0 {
        let which = match (a.host_commands, a.target_commands) {
            (0, 0) => "both runs have no commands",
            (0, _) => "the host's run has no commands",
            _ => "the target's run has no commands",
        };
        return format!("{which}: was there load on these queues while it was recorded?");
    }
    let notes = notes.join("; ");
    let reasons = a.host.with(&a.target);
    let counted: Vec<String> = SetAside::ALL
        .iter()
        .filter(|r| reasons.of(**r) > 0)
        .map(|r| format!("{} {}", reasons.of(*r), r.meaning()))
        .collect();
    let colon = if notes.is_empty() { "" } else { ": " };
    format!("no commands could be joined{colon}{notes} (set aside: {})", counted.join(", "))
}

pub(crate) fn run_figures(run: &Recording) -> RunFigures {
    run_figures_of(run, run.len() as u64)
}

/// The figures of a run of which not all commands are in memory.
pub(crate) fn run_figures_of(run: &Recording, commands: u64) -> RunFigures {
    let m = &run.manifest;
    RunFigures {
        run: run.directory.display().to_string(),
        kind: m.kind,
        software: m.software.name.clone(),
        version: m.software.version.clone(),
        build_id: m.software.build_id.clone(),
        machine: m.machine.hostname.clone(),
        kernel: m.machine.kernel.clone(),
        state: m.state,
        seconds: m.window.end_ns.0.saturating_sub(m.window.start_ns.0) as f64 / 1e9,
        one_in: m.one_in.max(1),
        commands,
        lost: m.counters.lost.total(),
        windows: WindowFigures::of(m),
        overhead: m.overhead.clone(),
    }
}

/// Nanoseconds of some stretches together.
pub(crate) fn length(stretches: &[(i64, i64)]) -> i64 {
    stretches.iter().map(|(from, to)| to - from).sum()
}

pub(crate) fn join_figures(a: &Accounting, queues: usize, in_both: Option<Vec<(i64, i64)>>) -> JoinFigures {
    JoinFigures {
        armed_seconds: in_both.map(|stretches| length(&stretches) as f64 / 1e9),
        host_commands: a.host_commands,
        target_commands: a.target_commands,
        joined: a.joined,
        queues,
        set_aside: a.host.with(&a.target),
        host_set_aside: a.host,
        target_set_aside: a.target,
    }
}

/// fio's figures by direction, beside those of the host commands that the direction submits.
fn fio(host: &Recording) -> Vec<FioFigures> {
    let mut seen = SeenByHost::default();
    seen.add(host, 0..host.len());
    seen.beside_fio(host)
}

/// Host commands and the sum of their latencies, by the operations that fio's directions submit.
#[derive(Debug, Default)]
pub(crate) struct SeenByHost([(u64, i128); DIRECTIONS.len()]);

const DIRECTIONS: [(&str, Operation); 3] =
    [("read", Operation::Read), ("write", Operation::Write), ("trim", Operation::DatasetManagement)];

impl SeenByHost {
    /// Counts rows, where the run's load was fio's.
    pub(crate) fn add(&mut self, host: &Recording, rows: std::ops::Range<usize>) {
        if host.manifest.workload.as_ref().is_none_or(|w| w.fio.is_empty()) {
            return;
        }
        for row in rows {
            let direction = DIRECTIONS.iter().position(|d| d.1.opcode() == host.opcode[row]);
            let Some(seen) = direction.map(|d| &mut self.0[d]) else { continue };
            let h = filled(host.times::<8>(row), Side::Host);
            let (queued, end) = (h[Boundary::HQueued.slot()], h[Boundary::HEnd.slot()]);
            if queued != NONE && end != NONE {
                seen.0 += 1;
                seen.1 += i128::from(end - queued);
            }
        }
    }

    /// Adds what another counted.
    pub(crate) fn merge(&mut self, other: &SeenByHost) {
        for (ours, theirs) in self.0.iter_mut().zip(other.0) {
            ours.0 += theirs.0;
            ours.1 += theirs.1;
        }
    }

    /// What was counted beside what fio said.
    pub(crate) fn beside_fio(&self, host: &Recording) -> Vec<FioFigures> {
        let jobs = host.manifest.workload.iter().flat_map(|w| &w.fio).filter(|j| j.ios > 0);
        let mut directions: BTreeMap<&str, (u64, f64)> = BTreeMap::new();
        for job in jobs {
            let d = directions.entry(&job.direction).or_default();
            d.0 += job.ios;
            d.1 += job.lat_mean_ns * job.ios as f64;
        }
        let figures = directions.into_iter().filter_map(|(direction, (ios, sum))| {
            let (commands, ours) = self.0[DIRECTIONS.iter().position(|d| d.0 == direction)?];
            let fio_mean_ns = sum / ios as f64;
            let recorded_mean_ns = ours as f64 / commands as f64;
            (commands > 0).then(|| FioFigures {
                direction: direction.to_owned(),
                ios,
                fio_mean_ns,
                commands,
                recorded_mean_ns,
                difference_ns: fio_mean_ns - recorded_mean_ns,
            })
        });
        figures.collect()
    }
}

/// What a class is told by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    group: u64,
    error: bool,
    opcode: u8,
    bytes: u32,
}

/// The groups that a report's classes are split into.
#[derive(Debug)]
pub(crate) struct Groups {
    by: GroupBy,
    queues: BTreeMap<run_format::QueueId, run_format::Queue>,
    /// Devices by number, in the order of their names.
    devices: Vec<String>,
    /// The device of each queue.
    device_of: HashMap<u32, u32>,
}

impl Groups {
    pub(crate) fn new(by: GroupBy, run: &Recording) -> Groups {
        let name = |q: &run_format::Queue| {
            q.device.clone().unwrap_or_else(|| format!("{} cntlid {}", q.subsystem_nqn, q.cntlid))
        };
        let mut devices: Vec<String> = run.queues.values().map(name).collect();
        devices.sort();
        devices.dedup();
        let device_of = run
            .queues
            .iter()
            .filter_map(|(id, q)| Some((id.0, devices.binary_search(&name(q)).ok()? as u32)))
            .collect();
        Groups { by, queues: run.queues.clone(), devices, device_of }
    }

    pub(crate) fn key(&self, run: &Recording, row: usize) -> Key {
        let group = match self.by {
            GroupBy::Class => 0,
            GroupBy::Queue => u64::from(run.queue[row]),
            GroupBy::Cpu => u64::from(run.cpu[row]),
            GroupBy::Device => {
                let device = self.device_of.get(&run.queue[row]).copied().unwrap_or(u32::MAX);
                u64::from(device) << 32 | u64::from(run.nsid[row])
            }
        };
        Key { group, error: run.status[row] != 0, opcode: run.opcode[row], bytes: run.bytes[row] }
    }

    /// A queue as a person knows it.
    pub(crate) fn queue(&self, id: u32) -> String {
        match self.queues.get(&run_format::QueueId(id)) {
            None => format!("queue {id}"),
            Some(q) => {
                let device = q.device.as_ref().map_or(String::new(), |d| format!("{d} "));
                let port = q.host.as_ref().map_or(String::new(), |h| format!(", host port {}", h.port));
                format!("{device}cntlid {} qid {}{port}", q.cntlid, q.qid)
            }
        }
    }

    fn label(&self, key: Key) -> Option<String> {
        match self.by {
            GroupBy::Class => None,
            GroupBy::Cpu => Some(format!("CPU {}", key.group)),
            GroupBy::Queue => Some(self.queue(key.group as u32)),
            GroupBy::Device => {
                let device = self.devices.get((key.group >> 32) as usize);
                let device = device.map_or("unknown device", String::as_str);
                Some(format!("{device} nsid {}", key.group & 0xffff_ffff))
            }
        }
    }
}

fn class(
    key: Key,
    groups: &Groups,
    commands: u64,
    latency: Distribution,
    stages: StageTable,
    parts: Vec<Part>,
) -> Class {
    let mean = |s: Stage| stages.of(s).map(|f| f.times.mean_ns);
    let largest_stage = Stage::ALL
        .into_iter()
        .filter_map(|s| Some((s, mean(s)?)))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map(|l| l.0);
    Class {
        operation: Operation::of(key.opcode),
        bytes: key.bytes,
        error: key.error,
        group: groups.label(key),
        commands,
        latency,
        stages,
        beyond_host: None,
        data_wait: None,
        parts,
        tails: Vec::new(),
        largest_stage,
        histograms: Vec::new(),
    }
}

/// Rows to be split into classes: each one's key, and its figures.
struct Rows<K, M, A> {
    key: K,
    /// Fills in the row's figures.
    metrics: M,
    /// When the row's command came.
    at: A,
    /// Number of figures.
    width: usize,
    /// Whether histograms are wanted too.
    histograms: bool,
}

/// Rows that are worked on at a time.
const CHUNK: usize = 1 << 14;

impl<K, M, A> Rows<K, M, A> {
    /// The classes, each made by `make` from its key, its number of rows and its figures' distributions.
    fn classes<T: Sync>(&self, rows: &[T], mut make: impl FnMut(Key, u64, Columns) -> Class) -> Vec<Class>
    where
        K: Fn(&T) -> Key + Sync,
        M: Fn(&T, &mut [i64]) + Sync,
        A: Fn(&T) -> i64 + Sync,
    {
        let keys: Vec<Key> = rows.par_iter().with_min_len(CHUNK).map(&self.key).collect();
        let mut numbers: HashMap<Key, u32> = HashMap::new();
        // Most loads have few classes: finding one of the first few takes no hashing.
        let mut first: Vec<(Key, u32)> = Vec::with_capacity(8);
        let of_row: Vec<u32> = keys
            .iter()
            .map(|&key| {
                if let Some(known) = first.iter().find(|f| f.0 == key) {
                    return known.1;
                }
                let next = numbers.len() as u32;
                let number = *numbers.entry(key).or_insert(next);
                if number == next && first.len() < 8 {
                    first.push((key, number));
                }
                number
            })
            .collect();
        drop(keys);
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); numbers.len()];
        for (row, &number) in of_row.iter().enumerate() {
            members[number as usize].push(row as u32);
        }
        drop(of_row);
        let mut keys: Vec<(Key, u32)> = numbers.into_iter().collect();
        keys.sort_unstable();
        keys.into_iter()
            .map(|(key, number)| {
                let members = std::mem::take(&mut members[number as usize]);
                make(key, members.len() as u64, self.columns(rows, &members))
            })
            .collect()
    }

    fn columns<T: Sync>(&self, rows: &[T], members: &[u32]) -> Columns
    where
        M: Fn(&T, &mut [i64]) + Sync,
        A: Fn(&T) -> i64 + Sync,
    {
        let (metrics, width) = (&self.metrics, self.width);
        let n = members.len();
        let mut buffer = vec![0i64; n * width];
        // Each task has some of the members and their places in every column.
        let mut tasks: Vec<(&[u32], Vec<&mut [i64]>)> =
            members.chunks(CHUNK).map(|c| (c, Vec::with_capacity(width))).collect();
        for column in buffer.chunks_mut(n.max(1)) {
            for (task, part) in tasks.iter_mut().zip(column.chunks_mut(CHUNK)) {
                task.1.push(part);
            }
        }
        tasks.into_par_iter().for_each(|(members, mut places)| {
            let mut row = vec![0; width];
            for (n, &member) in members.iter().enumerate() {
                metrics(&rows[member as usize], &mut row);
                for (place, &value) in places.iter_mut().zip(&row) {
                    place[n] = value;
                }
            }
        });
        // Before the distributions put the columns into another order.
        let mut slowest = Slowest::of(n as u64);
        for (place, &latency) in buffer[..n].iter().enumerate().filter(|_| width > 1) {
            if slowest.takes(latency) {
                let at = (self.at)(&rows[members[place] as usize]);
                let figures: [i64; 1 + PARTS] =
                    std::array::from_fn(|f| if f < width { buffer[f * n + place] } else { 0 });
                slowest.add(Timed::of(at, &figures));
            }
        }
        let wanted = if self.histograms { width.min(1 + PARTS) } else { 0 };
        let histograms = buffer.par_chunks(n.max(1)).take(wanted).map(Histogram::of).collect();
        Columns::of(buffer.par_chunks_mut(n.max(1)).map(Distribution::of).collect(), slowest).with(histograms)
    }
}

/// The distributions of one class, one after the other, and its slowest commands.
pub(crate) struct Columns {
    distributions: std::vec::IntoIter<Distribution>,
    slowest: Slowest,
    histograms: Vec<Histogram>,
}

impl Columns {
    pub(crate) fn of(distributions: Vec<Distribution>, slowest: Slowest) -> Columns {
        Columns { distributions: distributions.into_iter(), slowest, histograms: Vec::new() }
    }

    /// With the histograms of latency and stages.
    pub(crate) fn with(self, histograms: Vec<Histogram>) -> Columns {
        Columns { histograms, ..self }
    }

    fn next(&mut self) -> Distribution {
        self.distributions.next().unwrap_or_default()
    }

    fn figures(&mut self, whole: f64) -> Figures {
        let times = self.next();
        Figures { share: if whole > 0.0 { times.mean_ns / whole } else { 0.0 }, times }
    }
}
