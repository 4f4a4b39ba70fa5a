//! From numbers to a cause with its evidence: what the service levels are, which stage makes commands slow, which of
//! the known causes the evidence fits, what refutes the others, and what to do. The rules are data
//! (`rules`); what they look at is `facts`; how it looks to a person is `render`. It changes nothing anywhere.
//!
//! A cause is named only where its own evidence holds and explains a good part of what is slow. Nothing is named for
//! want of something better: what is not ruled out and can not be told is listed with what would tell it.

mod cause;
mod facts;
mod figures;
mod flight;
mod guide;
#[cfg(test)]
mod hostile;
mod levels;
#[cfg(test)]
mod lookalikes;
mod part;
mod render;
mod rules;
#[cfg(test)]
mod simulate;
mod slo;
#[cfg(test)]
mod tests;

use crate::compare::Input;
use crate::describe::describe;
use crate::error::Error;
use crate::join::{ClockFigures, JoinOptions, Joined};
use crate::parts::Bounds;
use crate::report::{JoinFigures, RunFigures, join_figures, run_figures, why_nothing};
use crate::timeline::Timeline;
use facts::{Baseline, Facts};
use rules::{RULES, Verdict};
use run_format::{Run, Side, Stage};
use serde::Serialize;

pub use cause::Cause;
pub use flight::Stall;
pub use guide::diagnose_guide;
pub use levels::{QueueLevel, ServiceLevel, StageLevel};
pub use slo::{Slo, SloResult};

/// The JSON schema (draft 2020-12) of a diagnosis.
pub const DIAGNOSE_SCHEMA: &str = include_str!("../schema/diagnose.json");
/// Name and version of the format of a diagnosis.
pub const DIAGNOSE_FORMAT: &str = "fabscope-diagnose/1";
/// Fewer joined commands than this are too few to say anything of causes.
pub(crate) const FEWEST: usize = 200;

/// What to diagnose by.
#[derive(Clone, Debug)]
pub struct DiagnoseOptions {
    /// What the join may assume.
    pub joining: JoinOptions,
    /// A pair of runs of the same load when all was well.
    pub baseline: Option<Input>,
    /// Service levels that have to hold.
    pub slo: Vec<Slo>,
    /// About as much memory as is taken at most, bytes. Of runs that do not fit a part is diagnosed.
    pub memory: u64,
}

impl Default for DiagnoseOptions {
    fn default() -> DiagnoseOptions {
        DiagnoseOptions {
            joining: JoinOptions::default(),
            baseline: None,
            slo: Vec::new(),
            memory: Bounds::MEMORY,
        }
    }
}

/// A diagnosis, as `fabscope diagnose --format json` prints it: times in nanoseconds, on the host's clock; null where
/// not known.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// Name and version of the format.
    pub format: &'static str,
    /// The host's run.
    pub host: RunFigures,
    /// The target's run.
    pub target: RunFigures,
    /// How the two were joined.
    pub join: JoinFigures,
    /// How the two clocks relate.
    pub clock: Option<ClockFigures>,
    /// What the runs are measured against, where it was given.
    pub baseline: Option<String>,
    /// Which part of the runs was diagnosed, where they do not fit into memory whole.
    pub part: Option<String>,
    /// The service levels, class by class.
    pub service: Vec<ServiceLevel>,
    /// The queues, by Little's law.
    pub queues: Vec<QueueLevel>,
    /// What was found, what explains most first. Empty: no cause was found.
    pub causes: Vec<Finding>,
    /// Causes that are ruled out, each with the figure that does it.
    pub ruled_out: Vec<Judged>,
    /// Causes of which nothing can be said, each with what is missing.
    pub cannot_tell: Vec<Judged>,
    /// Retransmissions and the commands that were in flight on their queue.
    pub stalls: Vec<Stall>,
    /// What came of the service levels that were asked for.
    pub slo: Vec<SloResult>,
    /// What a reader should know besides.
    pub notes: Vec<String>,
}

/// A cause that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Which.
    pub cause: Cause,
    /// The stage that it makes slow, most of all.
    pub stage: Option<Stage>,
    /// Whose: a queue, a connection, a namespace, a device.
    pub subject: Option<String>,
    /// The share of what makes commands slow that it explains: of all commands or of the slowest, whichever is more.
    pub explains: f64,
    /// The share of the excess of all commands over what they take when nothing is in the way.
    pub of_all: f64,
    /// The same of the slowest commands: those above p99, or p90 of a few.
    pub of_slowest: f64,
    /// Commands that it makes slower.
    pub commands: u64,
    /// By how much it makes each of them slower, on average, ns.
    pub excess_ns: f64,
    /// What shows it.
    pub evidence: Vec<Evidence>,
    /// What would have refuted it and does not.
    pub not_refuted: Vec<String>,
    /// What to change.
    pub mitigation: &'static str,
    /// What that costs.
    pub trade_off: &'static str,
    /// The command that shows whether it helped.
    pub verify: String,
    /// By how much it makes each row slower, ns.
    #[serde(skip)]
    pub(crate) claim: Vec<i64>,
}

/// One piece of evidence.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Evidence {
    /// In words, with its figures.
    pub text: String,
    /// Whose telemetry it is; null of what the commands themselves show.
    pub side: Option<Side>,
    /// `COLLECTOR.METRIC`, or the stage or part.
    pub metric: Option<String>,
    /// Of what.
    pub object: Option<String>,
    /// From when, host's clock, ns.
    pub from_ns: Option<i64>,
    /// To when.
    pub to_ns: Option<i64>,
    /// The value.
    pub value: Option<f64>,
    /// What is normal.
    pub normal: Option<f64>,
    /// The unit of both.
    pub unit: Option<&'static str>,
}

impl Evidence {
    /// What the commands show.
    pub(crate) fn said(text: impl Into<String>) -> Evidence {
        Evidence { text: text.into(), ..Evidence::default() }
    }

    /// Of a metric of the telemetry, or a stage or part.
    pub(crate) fn of(mut self, side: Option<Side>, metric: &str, object: &str) -> Evidence {
        self.side = side;
        self.metric = Some(metric.to_owned());
        self.object = (!object.is_empty()).then(|| object.to_owned());
        self
    }

    pub(crate) fn between(mut self, (from, to): (i64, i64)) -> Evidence {
        (self.from_ns, self.to_ns) = (Some(from), Some(to));
        self
    }

    pub(crate) fn figures(mut self, value: f64, normal: Option<f64>, unit: &'static str) -> Evidence {
        let finite = |v: f64| v.is_finite();
        self.value = Some(value).filter(|&v| finite(v));
        self.normal = normal.filter(|&v| finite(v));
        self.unit = Some(unit);
        self
    }
}

/// A cause that was not found, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Judged {
    /// Which.
    pub cause: Cause,
    /// The figure that rules it out, or what is missing.
    pub why: String,
}

/// Names the cause of what is slow in two runs, with its evidence; or says what it is not.
///
/// # Errors
/// [`Error::TooLittle`] where too few commands were joined, those of [`crate::join()`], and what reading the runs ended
/// with. Telemetry that is missing or broken is no error.
pub fn diagnose(host: &Run, target: &Run, options: &DiagnoseOptions) -> Result<Diagnosis, Error> {
    let (joined, part) = part::joined(host, target, options)?;
    let baseline = match &options.baseline {
        Some(input) => Some(baseline(input, options)?),
        None => None,
    };
    if joined.pairs().is_empty() {
        return Err(too_little(&joined, why_nothing(&joined)));
    }
    let mut facts = Facts::of(&joined, baseline.as_ref());
    if facts.rows.len() < FEWEST {
        let why = format!(
            "{} commands were joined and succeeded, and a diagnosis needs {FEWEST}: record longer",
            facts.rows.len()
        );
        return Err(too_little(&joined, why));
    }
    let (from, to) = facts.span();
    facts.timeline = Timeline::read(&joined, host, target, from, to);
    Ok(of_facts(&facts, baseline.as_ref(), part, options))
}

fn too_little(joined: &Joined, why: String) -> Error {
    Error::TooLittle { why, runs: format!("{}\n  {}", describe(&joined.host), describe(&joined.target)) }
}

fn baseline(input: &Input, options: &DiagnoseOptions) -> Result<Baseline, Error> {
    let (Some(host), Some(target)) = (input.host(), input.target()) else {
        return Err(Error::Input {
            given: input.given().to_owned(),
            why: "a baseline is a pair: give HOST.run,TARGET.run, or a directory that holds both".into(),
        });
    };
    let (joined, _) = part::joined(host, target, options)?;
    if joined.pairs().is_empty() {
        return Err(too_little(&joined, format!("of the baseline, {}", why_nothing(&joined))));
    }
    Ok(Baseline::of(&joined, input.given().to_owned()))
}

/// Judges all rules.
fn of_facts(
    facts: &Facts<'_>,
    baseline: Option<&Baseline>,
    part: Option<String>,
    options: &DiagnoseOptions,
) -> Diagnosis {
    let joined = facts.joined;
    let (mut causes, mut ruled_out, mut cannot_tell) = (Vec::new(), Vec::new(), Vec::new());
    for rule in RULES {
        match (rule.judge)(facts) {
            Verdict::Holds(found) => match found.finding(rule, facts) {
                Ok(finding) => causes.push(finding),
                Err(why) => ruled_out.push(Judged { cause: rule.cause, why }),
            },
            Verdict::RuledOut(why) => ruled_out.push(Judged { cause: rule.cause, why }),
            Verdict::CannotTell(why) => cannot_tell.push(Judged { cause: rule.cause, why }),
        }
    }
    let causes = rules::without_lookalikes(causes, &mut ruled_out);
    let mut causes = rules::without_shared(facts, causes, &mut ruled_out);
    causes.sort_by(|a, b| b.explains.total_cmp(&a.explains));
    let (mut notes, levels) = (joined.notes().to_vec(), levels::levels(facts));
    notes.extend(facts.timeline.notes.iter().cloned());
    if facts.errors > 0 {
        notes.push(format!("{} commands ended with an error status and are left out", facts.errors));
    }
    for side in facts::sides() {
        if !rules::has_telemetry(facts, side) {
            notes.push(format!(
                "the {side}'s run has no telemetry of this time: what needs it can not be told"
            ));
        }
    }
    if facts.one_in > 1 {
        notes.push(format!(
            "1 command in {} was recorded: what is in flight is counted among those, and rates are scaled up",
            facts.one_in
        ));
    }
    if let Some(baseline) = baseline {
        notes.extend(levels::unlike(facts, baseline));
    }
    Diagnosis {
        format: DIAGNOSE_FORMAT,
        host: run_figures(&joined.host),
        target: run_figures(&joined.target),
        join: join_figures(joined.accounting(), joined.links().len(), joined.in_both()),
        clock: joined.clock(),
        baseline: baseline.map(|b| b.name.clone()),
        part,
        slo: slo::judge(&options.slo, &levels),
        service: levels,
        queues: levels::queues(facts),
        causes,
        ruled_out,
        cannot_tell,
        stalls: flight::stalls(facts),
        notes,
    }
}
