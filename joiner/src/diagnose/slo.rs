//! `--slo`: service levels that have to hold, in the language of compare's gates with a bound that is a time.

use super::levels::ServiceLevel;
use crate::compare::{Gate, Outcome, Statistic};
use crate::table::{bytes, time};
use run_format::Stage;
use serde::Serialize;

/// A service level that has to hold: `latency.p99<=500us`, `read/4096:storage.p50<=80us`.
#[derive(Clone, Debug, PartialEq)]
pub struct Slo(Gate);

/// What came of one on one class.
#[derive(Clone, Debug, Serialize)]
pub struct SloResult {
    /// As it was given.
    pub slo: String,
    /// The class; null where the runs have none that is meant.
    pub class: Option<String>,
    /// What came of it.
    pub outcome: Outcome,
    /// The figure, ns; null where the sample does not carry it.
    pub value_ns: Option<f64>,
    /// The bound, ns.
    pub bound_ns: f64,
    /// In words.
    pub text: String,
}

impl Slo {
    /// Reads one.
    ///
    /// # Errors
    /// Says what is not understood and what there is.
    pub fn parse(text: &str) -> Result<Slo, String> {
        let gate = Gate::parse(text)?;
        let Some(_) = gate.limit_ns() else {
            return Err(format!("{text:?} has no time as its bound: write latency.p99<=500us"));
        };
        if gate.statistic() == Statistic::Typical {
            return Err(format!("{text:?}: a service level is of mean, p50, p90, p99 or p999"));
        }
        if gate.row() != "latency" && !Stage::ALL.iter().any(|s| s.name() == gate.row()) {
            return Err(format!("{text:?}: {} is known of one side alone, and both are here", gate.row()));
        }
        Ok(Slo(gate))
    }
}

/// What each says of each class.
pub(super) fn judge(slos: &[Slo], levels: &[ServiceLevel]) -> Vec<SloResult> {
    slos.iter().flat_map(|slo| one(slo, levels)).collect()
}

fn one(Slo(gate): &Slo, levels: &[ServiceLevel]) -> Vec<SloResult> {
    let bound_ns = gate.limit_ns().unwrap_or(f64::INFINITY);
    let result = |class: Option<String>, outcome, value_ns, text| SloResult {
        slo: gate.to_string(),
        class,
        outcome,
        value_ns,
        bound_ns,
        text,
    };
    let meant: Vec<&ServiceLevel> =
        levels.iter().filter(|level| gate.means(level.operation, level.bytes)).collect();
    if meant.is_empty() {
        return vec![result(None, Outcome::CannotTell, None, "the runs have no such class of I/O".into())];
    }
    let value = |level: &ServiceLevel| value(gate, level);
    // A few commands of another kind beside the load do not make it undecided.
    let carried = meant.iter().any(|level| value(level).is_some());
    meant
        .into_iter()
        .filter(|level| !carried || gate.is_of_one_operation() || value(level).is_some())
        .map(|level| {
            let size = if level.bytes > 0 { format!(" {}", bytes(level.bytes)) } else { String::new() };
            let class = Some(format!("{}{size}", level.operation));
            match value(level) {
                Some(ns) if ns <= bound_ns => {
                    let text = format!("{} is within {}", time(ns), time(bound_ns));
                    result(class, Outcome::Holds, Some(ns), text)
                }
                Some(ns) => {
                    let text = format!("{} is beyond {}", time(ns), time(bound_ns));
                    result(class, Outcome::DoesNotHold, Some(ns), text)
                }
                None => {
                    let needs = crate::table::count(gate.statistic().needs());
                    let text = format!("it needs {needs} commands; {} were joined", level.commands);
                    result(class, Outcome::CannotTell, None, text)
                }
            }
        })
        .collect()
}

fn value(gate: &Gate, level: &ServiceLevel) -> Option<f64> {
    if level.commands < gate.statistic().needs() {
        return None;
    }
    let figures = match Stage::ALL.into_iter().find(|s| s.name() == gate.row()) {
        None => &level.latency,
        Some(stage) => &level.stages.iter().find(|s| s.stage == stage)?.times,
    };
    match gate.statistic() {
        Statistic::Typical => None,
        Statistic::Mean => Some(figures.mean_ns),
        Statistic::P50 => figures.p50_ns.map(|v| v as f64),
        Statistic::P90 => figures.p90_ns.map(|v| v as f64),
        Statistic::P99 => figures.p99_ns.map(|v| v as f64),
        Statistic::P999 => figures.p999_ns.map(|v| v as f64),
    }
}
