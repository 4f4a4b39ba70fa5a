//! `--slo`: service levels that have to hold, in the language of compare's gates: times that are not exceeded, and rates
//! that are reached.

use super::levels::ServiceLevel;
use super::rules::number;
use crate::compare::{Gate, Outcome, Statistic, number_of, selector};
use crate::table::{bytes, time};
use run_format::{Operation, Stage};
use serde::Serialize;

/// A service level that has to hold: `latency.p99<=500us`, `read/4096:storage.p50<=80us`, `read.iops>=90k`,
/// `bandwidth>=1GB/s`.
#[derive(Clone, Debug, PartialEq)]
pub struct Slo(Asks);

#[derive(Clone, Debug, PartialEq)]
enum Asks {
    /// A time that is not exceeded.
    Time(Gate),
    /// A rate that is reached.
    Rate(Least),
}

/// A rate that commands of a class, of an operation or all of them have to reach together.
#[derive(Clone, Debug, PartialEq)]
struct Least {
    text: String,
    operation: Option<Operation>,
    bytes: Option<u32>,
    rate: Rate,
    /// Commands or bytes a second.
    bound: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rate {
    Iops,
    Bandwidth,
}

/// What came of one on one class.
#[derive(Clone, Debug, Serialize)]
pub struct SloResult {
    /// As it was given.
    pub slo: String,
    /// The class; null where the runs have none that is meant.
    pub class: Option<String>,
    /// What came of it.
    pub outcome: Outcome,
    /// The figure where it is a time, ns; null where the sample does not carry it.
    pub value_ns: Option<f64>,
    /// The bound where it is a time, ns.
    pub bound_ns: Option<f64>,
    /// The figure where it is a rate: commands or bytes a second.
    pub value_rate: Option<f64>,
    /// The bound where it is a rate.
    pub bound_rate: Option<f64>,
    /// In words.
    pub text: String,
}

impl Slo {
    /// Reads one.
    ///
    /// # Errors
    /// Says what is not understood and what there is.
    pub fn parse(text: &str) -> Result<Slo, String> {
        if let Some(least) = Least::parse(text.trim())? {
            return Ok(Slo(Asks::Rate(least)));
        }
        let gate = Gate::parse(text)?;
        let Some(_) = gate.limit_ns() else {
            return Err(format!(
                "{text:?} has no time as its bound: write latency.p99<=500us, or read.iops>=90k"
            ));
        };
        if gate.statistic() == Statistic::Typical {
            return Err(format!("{text:?}: a service level is of mean, p50, p90, p99 or p999"));
        }
        if gate.row() != "latency" && !Stage::ALL.iter().any(|s| s.name() == gate.row()) {
            return Err(format!("{text:?}: {} is known of one side alone, and both are here", gate.row()));
        }
        Ok(Slo(Asks::Time(gate)))
    }
}

impl Least {
    /// Reads one; nothing where the text is of something else.
    fn parse(text: &str) -> Result<Option<Least>, String> {
        let Some((what, bound)) = text.split_once(">=") else {
            let named = text.split_once("<=").map(|(what, _)| what.trim()).and_then(rate_of);
            return match named {
                Some((_, rate)) => {
                    Err(format!("{text:?}: {} is better the more there is: write >=", rate.name()))
                }
                None => Ok(None),
            };
        };
        let what = what.trim();
        let Some((class, rate)) = rate_of(what) else {
            return Err(format!(
                "{what:?} is no rate: at least (>=) goes with iops and bandwidth, as in read.iops>=90k; times are at most (<=)"
            ));
        };
        let (operation, bytes) = match class {
            None => (None, None),
            Some(class) => selector(class).map(|(operation, bytes)| (Some(operation), bytes))?,
        };
        let bound = rate.parse(bound.trim())?;
        Ok(Some(Least { text: text.to_owned(), operation, bytes, rate, bound }))
    }

    fn judge(&self, levels: &[ServiceLevel]) -> SloResult {
        let is_meant = |level: &&ServiceLevel| {
            self.operation.is_none_or(|o| o == level.operation) && self.bytes.is_none_or(|b| b == level.bytes)
        };
        let meant: Vec<&ServiceLevel> = levels.iter().filter(is_meant).collect();
        let size = self.bytes.map_or(String::new(), |b| format!(" {}", bytes(b)));
        let class = self.operation.map(|operation| format!("{operation}{size}"));
        let reached: f64 = meant
            .iter()
            .map(|level| match self.rate {
                Rate::Iops => level.iops,
                Rate::Bandwidth => level.bandwidth,
            })
            .sum();
        let show = |rate: f64| self.rate.show(rate);
        let (outcome, text) = if meant.is_empty() {
            (Outcome::CannotTell, "the runs have no such class of I/O".to_owned())
        } else if reached >= self.bound {
            (Outcome::Holds, format!("{} is {} or more", show(reached), show(self.bound)))
        } else {
            (Outcome::DoesNotHold, format!("{} is less than {}", show(reached), show(self.bound)))
        };
        SloResult {
            slo: self.text.clone(),
            class,
            outcome,
            value_ns: None,
            bound_ns: None,
            value_rate: (!meant.is_empty()).then_some(reached),
            bound_rate: Some(self.bound),
            text,
        }
    }
}

/// `iops`, `read.iops`, `read/4096:bandwidth`: the class and which rate.
fn rate_of(what: &str) -> Option<(Option<&str>, Rate)> {
    let (class, name) = match what.rsplit_once([':', '.']) {
        Some((class, name)) => (Some(class.trim()), name.trim()),
        None => (None, what),
    };
    let rate = [Rate::Iops, Rate::Bandwidth].into_iter().find(|rate| rate.name() == name)?;
    Some((class, rate))
}

impl Rate {
    const fn name(self) -> &'static str {
        match self {
            Rate::Iops => "iops",
            Rate::Bandwidth => "bandwidth",
        }
    }

    /// Reads a bound.
    fn parse(self, text: &str) -> Result<f64, String> {
        let unit = text.find(|c: char| c.is_alphabetic()).unwrap_or(text.len());
        let (number, unit) = text.split_at(unit);
        let factor = match self {
            Rate::Iops => match unit {
                "" => Some(1.0),
                "k" | "K" => Some(1e3),
                "M" => Some(1e6),
                _ => None,
            },
            Rate::Bandwidth => match unit.strip_suffix("/s").unwrap_or_default() {
                "B" => Some(1.0),
                "kB" | "KB" => Some(1e3),
                "MB" => Some(1e6),
                "GB" => Some(1e9),
                "KiB" => Some(1024.0),
                "MiB" => Some(1024.0 * 1024.0),
                "GiB" => Some(1024.0 * 1024.0 * 1024.0),
                _ => None,
            },
        };
        let bound = number_of(number).zip(factor).map(|(number, factor)| number * factor);
        match bound {
            Some(bound) if bound > 0.0 && !text.starts_with('+') => Ok(bound),
            Some(_) => Err(format!("{text:?} is a bound that is always kept: a rate is more than 0")),
            None => Err(match self {
                Rate::Iops => format!("{text:?} is no number of commands a second: write 90000 or 90k"),
                Rate::Bandwidth => format!("{text:?} is no bandwidth: write 1GB/s or 900MiB/s"),
            }),
        }
    }

    fn show(self, rate: f64) -> String {
        match self {
            Rate::Iops => format!("{} IOPS", number(rate)),
            Rate::Bandwidth => format!("{} MB/s", number(rate / 1e6)),
        }
    }
}

/// What each says of each class.
pub(super) fn judge(slos: &[Slo], levels: &[ServiceLevel]) -> Vec<SloResult> {
    let each = |slo: &Slo| match &slo.0 {
        Asks::Time(gate) => times(gate, levels),
        Asks::Rate(least) => vec![least.judge(levels)],
    };
    slos.iter().flat_map(each).collect()
}

fn times(gate: &Gate, levels: &[ServiceLevel]) -> Vec<SloResult> {
    let bound_ns = gate.limit_ns().unwrap_or(f64::INFINITY);
    let result = |class: Option<String>, outcome, value_ns, text| SloResult {
        slo: gate.to_string(),
        class,
        outcome,
        value_ns,
        bound_ns: Some(bound_ns),
        value_rate: None,
        bound_rate: None,
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

#[cfg(test)]
mod tests {
    use super::{Asks, Rate, Slo};
    use proptest::prelude::*;

    #[test]
    fn rates_are_read_with_their_units_and_classes() {
        for (text, bound) in [
            ("iops>=90k", 90e3),
            ("read.iops >= 1.5M", 1.5e6),
            ("read/4KiB:iops>=500", 500.0),
            ("write.bandwidth>=1GB/s", 1e9),
            ("write/128K.bandwidth>=2GiB/s", 2.0 * 1024.0 * 1024.0 * 1024.0),
        ] {
            let Ok(Slo(Asks::Rate(least))) = Slo::parse(text) else { panic!("{text}") };
            assert_eq!(least.bound, bound, "{text}");
            assert_eq!(least.rate == Rate::Iops, text.contains("iops"));
            assert_eq!(least.operation.is_some(), text.starts_with(['r', 'w']));
        }
        for text in
            ["iops>=", "iops>=0", "iops>=1e9", "iops>=inf", "bandwidth>=1GB", "x>=1", ">=1", "iops>90"]
        {
            assert!(Slo::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,40}", rate in "(read|write/4K|)[.:]?(iops|bandwidth)>=[-+0-9.kMGBi/s]{0,8}") {
            let _ = Slo::parse(&text);
            let _ = Slo::parse(&rate);
        }
    }
}
