//! Compares runs: which stage moved, by how much, and how surely. It lists what differs between the runs
//! themselves, takes only those boundaries for the same that are the same moment, and says "cannot tell" where
//! the data can not.
//!
//! `input` finds and reads runs, `moments` decides what may be compared, `slices` and `resample` estimate each
//! figure and its error, `verdict` judges, `gate` is the language of `--gate`, `differs` says what differs, and
//! `render`, `junit` show the result.

mod differs;
mod gate;
mod input;
mod junit;
mod moments;
mod render;
mod resample;
mod slices;
#[cfg(test)]
mod tests;
mod verdict;

pub use differs::{Difference, LoadFigures};
pub use gate::{Gate, GateResult, Outcome};
pub(crate) use gate::{number_of, selector};
pub use input::Input;
pub(crate) use input::{has_run, is_same_recording};
pub use junit::Failure;
pub use moments::BoundaryPair;
pub use verdict::Verdict;
pub(crate) use verdict::{percent, signed};

use crate::error::Error;
use crate::report::RunFigures;
use crate::stats::needed;
use input::{ClassKey, Reading};
use run_format::Operation;
use serde::Serialize;
use serde::ser::Serializer;
use std::collections::{BTreeMap, BTreeSet};

/// The JSON schema (draft 2020-12) of a comparison.
pub const COMPARE_SCHEMA: &str = include_str!("../schema/compare.json");

/// Name and version of the comparison's format.
const FORMAT: &str = "fabscope-compare/1";

/// The least number of commands of a class, in each run, that verdicts are given on.
pub(crate) const LEAST: usize = 200;

/// What is compared of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Statistic {
    /// The mean over the commands whose latency lies between its 5th and 95th percentile. Unlike percentiles
    /// it adds up over the stages, and unlike the mean a few slow commands do not rule it.
    Typical,
    /// The arithmetic mean.
    Mean,
    /// The median.
    P50,
    /// The 90th percentile.
    P90,
    /// The 99th percentile.
    P99,
    /// The 99.9th percentile.
    P999,
}

impl Statistic {
    /// All of them.
    pub const ALL: [Statistic; 6] = [
        Statistic::Typical,
        Statistic::Mean,
        Statistic::P50,
        Statistic::P90,
        Statistic::P99,
        Statistic::P999,
    ];

    /// The JSON name, also in gates.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Statistic::Typical => "typical",
            Statistic::Mean => "mean",
            Statistic::P50 => "p50",
            Statistic::P90 => "p90",
            Statistic::P99 => "p99",
            Statistic::P999 => "p999",
        }
    }

    /// The name for a person.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Statistic::P999 => "p99.9",
            other => other.name(),
        }
    }

    /// The percentile as a share, for those that are one.
    pub(crate) const fn share(self) -> Option<f64> {
        match self {
            Statistic::Typical | Statistic::Mean => None,
            Statistic::P50 => Some(0.5),
            Statistic::P90 => Some(0.9),
            Statistic::P99 => Some(0.99),
            Statistic::P999 => Some(0.999),
        }
    }

    /// The least number of commands that carries it.
    #[must_use]
    pub fn needs(self) -> u64 {
        match self.share() {
            Some(share) => needed(share),
            None => 20,
        }
    }
}

/// The least change that counts as one: the larger of a share of the base and a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Floor {
    /// Share of the base's figure.
    pub share: f64,
    /// Nanoseconds.
    pub ns: f64,
}

impl Default for Floor {
    fn default() -> Floor {
        Floor { share: 0.02, ns: 250.0 }
    }
}

impl Floor {
    /// The floor for a figure of the base, ns.
    #[must_use]
    pub fn at(&self, base_ns: f64) -> f64 {
        (self.share * base_ns.abs()).max(self.ns)
    }

    /// Reads `3%,1us`, `3%` or `1us`; what is not given is 0.
    ///
    /// # Errors
    /// Says what is not understood.
    pub fn parse(text: &str) -> Result<Floor, String> {
        gate::floor(text)
    }
}

/// How to compare.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompareOptions {
    /// The least change that counts.
    pub floor: Floor,
    /// How surely all intervals of the comparison hold together.
    pub confidence: f64,
    /// What has to hold.
    pub gates: Vec<Gate>,
}

impl Default for CompareOptions {
    fn default() -> CompareOptions {
        CompareOptions { floor: Floor::default(), confidence: 0.99, gates: Vec::new() }
    }
}

/// How many runs a side has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// One on each side: the error is found from how the figures vary within a run.
    Single,
    /// Several on a side: the error is found from how they vary between its runs.
    Repeated,
}

/// A comparison, as `fabscope compare --format json` prints it: times in nanoseconds, null where not known.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Name and version of the format.
    pub format: &'static str,
    /// How many runs a side has.
    pub form: Form,
    /// How surely all intervals hold together.
    pub confidence: f64,
    /// The least change that counts.
    pub floor: Floor,
    /// The base.
    pub base: SideOf,
    /// What is compared with it.
    pub new: SideOf,
    /// What differs between the runs themselves.
    pub differences: Vec<Difference>,
    /// What may differ and is not recorded.
    pub not_recorded: Vec<&'static str>,
    /// How each boundary was taken, where the two sides took it by different hooks or it is not the same moment.
    pub boundaries: Vec<BoundaryPair>,
    /// The classes that every run has.
    pub classes: Vec<ClassComparison>,
    /// Classes of the base that not every run of the new has.
    pub only_in_base: Vec<ClassName>,
    /// Classes of the new that not every run of the base has.
    pub only_in_new: Vec<ClassName>,
    /// The gates.
    pub gates: Vec<GateResult>,
    /// What a reader should know besides.
    pub notes: Vec<String>,
}

/// The runs of one side of a comparison and their load.
#[derive(Clone, Debug, Serialize)]
pub struct SideOf {
    /// Each repetition's runs.
    pub runs: Vec<Repetition>,
    /// Their load, over all repetitions.
    pub load: LoadFigures,
}

/// One repetition: a host's run, a target's run, or both joined.
#[derive(Clone, Debug, Serialize)]
pub struct Repetition {
    /// The host's run.
    pub host: Option<RunFigures>,
    /// The target's run.
    pub target: Option<RunFigures>,
    /// Commands that are compared: joined, or of the one side.
    pub commands: u64,
}

/// A class of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ClassName {
    /// What the commands do.
    pub operation: Operation,
    /// Bytes of data that each carries.
    pub bytes: u32,
    /// Whether they ended with an error status.
    pub error: bool,
}

impl std::fmt::Display for ClassName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.operation)?;
        if self.bytes > 0 {
            write!(f, " {}", crate::table::bytes(self.bytes))?;
        }
        if self.error {
            write!(f, ", ended with an error")?;
        }
        Ok(())
    }
}

/// A class that both sides have.
#[derive(Clone, Debug, Serialize)]
pub struct ClassComparison {
    /// Which.
    #[serde(flatten)]
    pub class: ClassName,
    /// Commands of the base, over all its runs.
    pub base_commands: u64,
    /// Commands of the new.
    pub new_commands: u64,
    /// Whether anything moved; see [`Row::verdict`].
    pub verdict: Verdict,
    /// The row, other than latency, whose typical value or median moved most; null where none is shown to have moved.
    pub moved: Option<String>,
    /// What happened, in a sentence.
    pub sentence: String,
    /// Latency, then the stages.
    pub rows: Vec<Row>,
}

/// Latency, a stage, or several that can only be compared together.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `latency`, a stage's name, `beyond_host`, `data_wait`, or several joined by `+`.
    pub row: String,
    /// Its name for a person.
    #[serde(skip)]
    pub title: String,
    /// `moved` where any of its figures moved, `same` where none did and the typical one is the same; null
    /// where it can not be compared at all.
    pub verdict: Option<Verdict>,
    /// Why it can not be compared, or only together with others.
    pub why: Option<String>,
    /// How much of a difference may be what the two sides' hooks cost, ns: every interval is wider by it.
    pub hooks_ns: f64,
    /// The change of its typical value as a share of the change of the latency's, where that moved.
    pub explains: Option<f64>,
    /// Its figures, by [`Statistic`]; those that the sample does not carry are null.
    #[serde(serialize_with = "by_statistic")]
    pub statistics: [Option<Cell>; Statistic::ALL.len()],
}

impl Row {
    /// One figure.
    #[must_use]
    pub fn of(&self, statistic: Statistic) -> Option<&Cell> {
        self.statistics[statistic as usize].as_ref()
    }
}

/// One figure of a row on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The base's, ns.
    pub base_ns: f64,
    /// The new's, ns.
    pub new_ns: f64,
    /// New less base, ns.
    pub difference_ns: f64,
    /// From where the difference may really be, ns; null where the data has no error to go by.
    pub low_ns: Option<f64>,
    /// To where, ns.
    pub high_ns: Option<f64>,
    /// New by base; null where the base is 0.
    pub ratio: Option<f64>,
    /// From where the ratio may really be.
    pub ratio_low: Option<f64>,
    /// To where.
    pub ratio_high: Option<f64>,
    /// The least change that this data would have shown, ns.
    pub detectable_ns: Option<f64>,
    /// Whether it moved.
    pub verdict: Verdict,
}

fn by_statistic<S: Serializer>(
    cells: &[Option<Cell>; Statistic::ALL.len()],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(Statistic::ALL.iter().zip(cells).map(|(s, c)| (s.name(), c)))
}

/// Compares runs: each side one or several, all of the same sides (pairs, hosts or targets).
///
/// # Errors
/// [`Error::MixedInputs`], [`Error::Input`] where a run is given twice, [`Error::TooLittle`] for a run without commands, [`Error::NoCommonClass`], or what
/// reading and joining ended with.
pub fn compare(base: &[Input], new: &[Input], options: &CompareOptions) -> Result<Comparison, Error> {
    input::same_kind(base, new)?;
    let itself = input::given_twice(base, new)?;
    let read = |inputs: &[Input]| inputs.iter().map(Input::read).collect::<Result<Vec<_>, _>>();
    let mut comparison = compare_readings(&read(base)?, &read(new)?, options)?;
    comparison.notes.extend(itself);
    Ok(comparison)
}

fn compare_readings(
    base: &[Reading],
    new: &[Reading],
    options: &CompareOptions,
) -> Result<Comparison, Error> {
    let common = common_classes(base, new)?;
    let boundaries = moments::compare(base, new);
    let judged = verdict::judge(base, new, &common, &boundaries, options);
    let only_in = |here: &[Reading]| -> Vec<ClassName> {
        let all: BTreeSet<ClassKey> = here.iter().flat_map(|r| r.classes.keys().copied()).collect();
        all.into_iter().filter(|key| !common.contains(key)).map(ClassKey::name).collect()
    };
    let form = if base.len() > 1 || new.len() > 1 { Form::Repeated } else { Form::Single };
    let gates = gate::judge(&options.gates, &judged);
    let mut notes = differs::notes(base, new, form);
    notes.extend(judged.notes.iter().cloned());
    Ok(Comparison {
        format: FORMAT,
        form,
        confidence: options.confidence,
        floor: options.floor,
        base: side_of(base),
        new: side_of(new),
        differences: differs::between(base, new),
        not_recorded: differs::NOT_RECORDED.to_vec(),
        boundaries: boundaries.into_iter().filter(BoundaryPair::is_worth_showing).collect(),
        classes: judged.classes.into_iter().map(|c| c.shown).collect(),
        only_in_base: only_in(base),
        only_in_new: only_in(new),
        gates,
        notes,
    })
}

fn side_of(readings: &[Reading]) -> SideOf {
    SideOf {
        runs: readings
            .iter()
            .map(|r| Repetition { host: r.host.clone(), target: r.target.clone(), commands: r.commands() })
            .collect(),
        load: differs::load(readings),
    }
}

/// The classes that every run has.
fn common_classes(base: &[Reading], new: &[Reading]) -> Result<Vec<ClassKey>, Error> {
    let mut times: BTreeMap<ClassKey, usize> = BTreeMap::new();
    for reading in base.iter().chain(new) {
        for key in reading.classes.keys() {
            *times.entry(*key).or_default() += 1;
        }
    }
    let all = base.len() + new.len();
    let common: Vec<ClassKey> = times.into_iter().filter(|(_, n)| *n == all).map(|(key, _)| key).collect();
    if !common.is_empty() {
        return Ok(common);
    }
    let list = |readings: &[Reading]| {
        let each = readings.iter().map(|reading| {
            let classes: Vec<String> = reading
                .classes
                .iter()
                .map(|(key, sample)| format!("{} ({} commands)", key.name(), sample.len()))
                .collect();
            format!("{}: {}", reading.name, classes.join(", "))
        });
        each.collect::<Vec<_>>().join("\n  ")
    };
    Err(Error::NoCommonClass { base: list(base), new: list(new) })
}

impl Comparison {
    /// What the gates say together: `DoesNotHold` if one does not, else `CannotTell` if one can not be told.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        Outcome::of_all(self.gates.iter().map(|gate| gate.outcome))
    }

    /// Whether any row of any class moved.
    #[must_use]
    pub fn moved(&self) -> bool {
        self.classes.iter().any(|c| c.verdict == Verdict::Moved)
    }
}
