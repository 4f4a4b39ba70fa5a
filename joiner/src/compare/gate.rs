//! The language of `--gate`, and what each gate says of a comparison.
//!
//!     [CLASS:]ROW.STATISTIC<=BOUND
//!
//! `read/4096:storage.p99<=1.05x`, `latency.mean<=+3us`, `network.typical<=+5%`, `latency.p50<=80us`. CLASS is an
//! operation, with or without its size; without it, every class of commands that succeeded and are enough.

use super::verdict::{Both, Judged, JudgedClass, ratio, reach};
use super::{ClassName, Floor, Statistic, student};
use crate::table::{count, time};
use run_format::{Operation, Stage};
use serde::Serialize;

/// What has to hold of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Gate {
    text: String,
    operation: Option<Operation>,
    bytes: Option<u32>,
    row: String,
    statistic: Statistic,
    bound: Bound,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    /// New by base.
    Ratio(f64),
    /// New less base, ns.
    Difference(f64),
    /// New, ns.
    Absolute(f64),
}

/// What came of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The figure lies within the bound.
    Holds,
    /// The figure surely lies beyond the bound.
    DoesNotHold,
    /// The sample does not carry the figure, or it lies beyond the bound and may not really.
    CannotTell,
}

impl Outcome {
    /// For a person.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Outcome::Holds => "holds",
            Outcome::DoesNotHold => "DOES NOT HOLD",
            Outcome::CannotTell => "cannot tell",
        }
    }
}

/// One gate on one class.
#[derive(Clone, Debug, Serialize)]
pub struct GateResult {
    /// The gate as it was given.
    pub gate: String,
    /// The class; null where no class that both sides have is meant.
    pub class: Option<ClassName>,
    /// What came of it.
    pub outcome: Outcome,
    /// The base's figure, ns.
    pub base_ns: Option<f64>,
    /// The new's figure, ns.
    pub new_ns: Option<f64>,
    /// What is compared with the bound: a ratio, or ns.
    pub value: Option<f64>,
    /// From where it may really be.
    pub low: Option<f64>,
    /// To where.
    pub high: Option<f64>,
    /// The bound: a ratio, or ns.
    pub bound: f64,
    /// In words.
    pub text: String,
}

/// Rows that gates may name.
fn row_names() -> Vec<&'static str> {
    let stages = Stage::ALL.iter().map(|s| s.name());
    std::iter::once("latency").chain(stages).chain(["beyond_host", "data_wait"]).collect()
}

impl Gate {
    /// Reads a gate.
    ///
    /// # Errors
    /// Says what is not understood and what there is.
    pub fn parse(text: &str) -> Result<Gate, String> {
        let text = text.trim();
        let (what, bound) = text.split_once("<=").ok_or_else(|| {
            format!("{text:?} is no gate: write ROW.STATISTIC<=BOUND, such as storage.p99<=1.05x")
        })?;
        let (class, what) = match what.rsplit_once(':') {
            Some((class, what)) => (Some(class.trim()), what.trim()),
            None => (None, what.trim()),
        };
        // The row's name has no dot, p99.9 has one.
        let (row, statistic) = what.split_once('.').ok_or_else(|| {
            format!("{what:?} names no statistic: write {what}.typical, or another of {}", statistics())
        })?;
        if !row_names().contains(&row) {
            return Err(format!("{row:?} is no stage: there are {}", row_names().join(", ")));
        }
        let statistic = Statistic::ALL
            .into_iter()
            .find(|s| s.name() == statistic || s.title() == statistic)
            .ok_or_else(|| format!("{statistic:?} is no statistic: there are {}", statistics()))?;
        let (operation, bytes) = match class {
            None => (None, None),
            Some(class) => {
                let (operation, bytes) = selector(class)?;
                (Some(operation), bytes)
            }
        };
        let bound = parse_bound(bound.trim())?;
        Ok(Gate { text: text.to_owned(), operation, bytes, row: row.to_owned(), statistic, bound })
    }

    fn is_for(&self, class: &ClassName) -> bool {
        !class.error
            && self.operation.is_none_or(|o| o == class.operation)
            && self.bytes.is_none_or(|b| b == class.bytes)
    }
}

impl std::fmt::Display for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

fn statistics() -> String {
    Statistic::ALL.map(Statistic::name).join(", ")
}

/// `read`, `read/4096`, `write-zeroes/64KiB`.
fn selector(text: &str) -> Result<(Operation, Option<u32>), String> {
    let (name, size) = match text.split_once('/') {
        Some((name, size)) => (name, Some(size)),
        None => (text, None),
    };
    let spaced = name.trim().replace(['-', '_'], " ");
    let known: Vec<Operation> =
        (0..=u8::MAX).map(Operation::of).filter(|o| !matches!(o, Operation::Other(_))).collect();
    let operation = known.iter().copied().find(|o| o.to_string() == spaced).or_else(|| {
        let parsed = Operation::from(spaced.clone());
        (parsed.to_string() == spaced).then_some(parsed)
    });
    let operation = operation.ok_or_else(|| {
        let names: Vec<String> = known.iter().map(ToString::to_string).collect();
        format!("{name:?} is no operation: there are {}", names.join(", "))
    })?;
    let bytes = size.map(|size| {
        let unit = size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len());
        let (number, unit) = size.split_at(unit);
        let shift = match unit.trim() {
            "" | "B" => 0,
            "K" | "k" | "KiB" => 10,
            "M" | "m" | "MiB" => 20,
            _ => return None,
        };
        number.parse::<u32>().ok()?.checked_mul(1 << shift)
    });
    match bytes {
        Some(None) => Err(format!("{:?} is no size: write 4096 or 4KiB", size.unwrap_or_default())),
        Some(Some(bytes)) => Ok((operation, Some(bytes))),
        None => Ok((operation, None)),
    }
}

fn parse_bound(text: &str) -> Result<Bound, String> {
    let no = || {
        format!("{text:?} is no bound: write a ratio (1.05x), a change (+5%, +3us, -3us) or a time (80us)")
    };
    let is_signed = text.starts_with(['+', '-']);
    if let Some(number) = text.strip_suffix('x') {
        let ratio = number_of(number).filter(|r| *r >= 0.0 && !is_signed).ok_or_else(no)?;
        return Ok(Bound::Ratio(ratio));
    }
    if let Some(number) = text.strip_suffix('%') {
        let share = number_of(number).filter(|p| is_signed && *p >= -100.0).ok_or_else(no)?;
        return Ok(Bound::Ratio(1.0 + share / 100.0));
    }
    let ns = time_of(text).ok_or_else(no)?;
    Ok(if is_signed { Bound::Difference(ns) } else { Bound::Absolute(ns) })
}

/// A plain decimal number: no `inf`, no `nan`, no exponent.
fn number_of(text: &str) -> Option<f64> {
    let plain = |c: char| c.is_ascii_digit() || matches!(c, '.' | '+' | '-');
    text.parse().ok().filter(|n: &f64| n.is_finite() && n.abs() < 1e15 && text.chars().all(plain))
}

/// A number and its unit, in ns.
fn time_of(text: &str) -> Option<f64> {
    let unit = text.find(|c: char| c.is_alphabetic())?;
    let (number, unit) = text.split_at(unit);
    let ns = match unit {
        "ns" => 1.0,
        "us" | "µs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        _ => return None,
    };
    Some(number_of(number)? * ns)
}

/// Reads [`Floor::parse`]'s text.
pub(super) fn floor(text: &str) -> Result<Floor, String> {
    let mut floor = Floor { share: 0.0, ns: 0.0 };
    for part in text.split(',').map(str::trim) {
        let no = || format!("{part:?} is no least change: write 2%, 0.25us, or both with a comma");
        if part.starts_with(['+', '-']) {
            return Err(no());
        }
        match part.strip_suffix('%') {
            Some(number) => floor.share = number_of(number).ok_or_else(no)? / 100.0,
            None => floor.ns = time_of(part).ok_or_else(no)?,
        }
    }
    Ok(floor)
}

/// What every gate says, class by class.
pub(crate) fn judge(gates: &[Gate], judged: &Judged) -> Vec<GateResult> {
    let meant: Vec<(&Gate, Vec<&JudgedClass>)> = gates
        .iter()
        .map(|gate| {
            let mut classes: Vec<&JudgedClass> =
                judged.classes.iter().filter(|c| gate.is_for(&c.shown.class)).collect();
            // A few commands of another kind beside the load do not make a gate undecided.
            if gate.operation.is_none() && classes.iter().any(|c| carried(gate, c).is_ok()) {
                classes.retain(|c| carried(gate, c).is_ok());
            }
            (gate, classes)
        })
        .collect();
    let checks = meant.iter().map(|(_, classes)| classes.len()).sum::<usize>().max(1);
    let chance = (1.0 - judged.confidence) / checks as f64;
    meant
        .into_iter()
        .flat_map(|(gate, classes)| {
            if classes.is_empty() {
                let why = "both sides have no such class of I/O".to_owned();
                return vec![gate.cannot_tell(None, why)];
            }
            classes.into_iter().map(|class| gate.check(class, chance)).collect()
        })
        .collect()
}

/// The figure that a gate is about, or why there is none.
fn carried(gate: &Gate, class: &JudgedClass) -> Result<Both, String> {
    let shown = &class.shown;
    let Some(place) = shown.rows.iter().position(|r| r.row == gate.row) else {
        let together = shown.rows.iter().find(|r| r.row.split('+').any(|part| part == gate.row));
        return Err(match together {
            Some(row) => format!(
                "{} is only known as part of {}: {}",
                gate.row,
                row.row,
                row.why.as_deref().unwrap_or("its bounds differ")
            ),
            None => format!("{} is not known from these runs", gate.row),
        });
    };
    if shown.rows[place].verdict.is_none() {
        let why = shown.rows[place].why.clone();
        return Err(why.unwrap_or_else(|| "it can not be compared".into()));
    }
    if !class.enough {
        return Err(format!("every run needs {} commands of the class", super::LEAST));
    }
    class.estimates[place][gate.statistic as usize].ok_or_else(|| {
        format!("{} needs {} commands in every run", gate.statistic.title(), count(gate.statistic.needs()))
    })
}

impl Gate {
    fn bound(&self) -> f64 {
        match self.bound {
            Bound::Ratio(b) | Bound::Difference(b) | Bound::Absolute(b) => b,
        }
    }

    fn cannot_tell(&self, class: Option<ClassName>, text: String) -> GateResult {
        GateResult {
            gate: self.text.clone(),
            class,
            outcome: Outcome::CannotTell,
            base_ns: None,
            new_ns: None,
            value: None,
            low: None,
            high: None,
            bound: self.bound(),
            text,
        }
    }

    fn check(&self, class: &JudgedClass, chance: f64) -> GateResult {
        let name = class.shown.class;
        let (base, new) = match carried(self, class) {
            Ok(both) => both,
            Err(why) => return self.cannot_tell(Some(name), why),
        };
        let (value, low, high) = match self.bound {
            Bound::Ratio(_) => match ratio(&base, &new, Some(chance)) {
                Some((ratio, around)) => {
                    let (low, high) = around.unwrap_or((ratio, ratio));
                    (ratio, low, high)
                }
                None => {
                    return self.cannot_tell(Some(name), "the base's figure is 0: there is no ratio".into());
                }
            },
            Bound::Difference(_) => {
                let (difference, reach) = (new.value - base.value, reach(&base, &new, chance));
                (difference, difference - reach, difference + reach)
            }
            Bound::Absolute(_) => {
                let reach = student::quantile(chance, new.freedom) * new.error;
                (new.value, new.value - reach, new.value + reach)
            }
        };
        let bound = self.bound();
        let outcome = if value <= bound {
            Outcome::Holds
        } else if low > bound {
            Outcome::DoesNotHold
        } else {
            Outcome::CannotTell
        };
        let show = |v: f64| match self.bound {
            Bound::Ratio(_) => format!("{v:.3}x"),
            Bound::Difference(_) => super::verdict::signed(v),
            Bound::Absolute(_) => time(v),
        };
        let text = format!(
            "{} to {}: {} (between {} and {}), bound {}{}",
            time(base.value),
            time(new.value),
            show(value),
            show(low),
            show(high),
            show(bound),
            if outcome == Outcome::CannotTell { "; beyond the bound, but it may be chance" } else { "" }
        );
        GateResult {
            gate: self.text.clone(),
            class: Some(name),
            outcome,
            base_ns: Some(base.value),
            new_ns: Some(new.value),
            value: Some(value),
            low: Some(low),
            high: Some(high),
            bound,
            text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Bound, Gate, floor};
    use crate::compare::{Floor, Statistic};
    use proptest::prelude::*;
    use run_format::Operation;

    #[test]
    fn gates_read_as_they_are_written() {
        let gate = Gate::parse("read/4KiB:storage.p99<=1.05x").unwrap();
        assert_eq!((gate.operation, gate.bytes), (Some(Operation::Read), Some(4096)));
        assert_eq!(
            (gate.row.as_str(), gate.statistic, gate.bound),
            ("storage", Statistic::P99, Bound::Ratio(1.05))
        );
        assert_eq!(gate.to_string(), "read/4KiB:storage.p99<=1.05x");
        for (text, bound) in [
            ("latency.mean<=+3us", Bound::Difference(3_000.0)),
            ("latency.mean<=-3us", Bound::Difference(-3_000.0)),
            ("latency.mean<=80us", Bound::Absolute(80_000.0)),
            ("latency.mean<=+25%", Bound::Ratio(1.25)),
            ("latency.mean<=-25%", Bound::Ratio(0.75)),
            (" latency.mean <= 1.5ms ", Bound::Absolute(1_500_000.0)),
        ] {
            assert_eq!(Gate::parse(text).unwrap().bound, bound, "{text}");
        }
        assert_eq!(Gate::parse("network.p99.9<=2x").unwrap().statistic, Statistic::P999);
        assert_eq!(
            Gate::parse("write-zeroes:network.p999<=2x").unwrap().operation,
            Some(Operation::WriteZeroes)
        );
    }

    #[test]
    fn what_is_no_gate_is_told_with_what_there_is() {
        for (text, told) in [
            ("", "ROW.STATISTIC<=BOUND"),
            ("storage.p99", "ROW.STATISTIC<=BOUND"),
            (
                "drive.p99<=1.05x",
                "there are latency, host_block, host_driver, network, target_driver, storage",
            ),
            (".p99<=1.05x", "is no stage"),
            ("storage<=1.05x", "names no statistic"),
            ("storage.p95<=1.05x", "there are typical, mean, p50, p90, p99, p999"),
            ("storage.p99<=1.05", "is no bound"),
            ("storage.p99<=5%", "is no bound"),
            ("storage.p99<=+1.05x", "is no bound"),
            ("storage.p99<=-101%", "is no bound"),
            ("storage.p99<=infx", "is no bound"),
            ("storage.p99<=NaNus", "is no bound"),
            ("storage.p99<=1e3us", "is no bound"),
            ("storage.p99<=3 parsecs", "is no bound"),
            ("erase/4096:storage.p99<=1x", "is no operation"),
            ("read/4q:storage.p99<=1x", "is no size"),
            ("read/99999999999:storage.p99<=1x", "is no size"),
            ("read/4194304M:storage.p99<=1x", "is no size"),
        ] {
            let error = Gate::parse(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }

    #[test]
    fn floors_have_a_share_a_time_or_both() {
        assert_eq!(floor("3%,1us"), Ok(Floor { share: 0.03, ns: 1_000.0 }));
        assert_eq!(floor("5%"), Ok(Floor { share: 0.05, ns: 0.0 }));
        assert_eq!(floor("250ns"), Ok(Floor { share: 0.0, ns: 250.0 }));
        for bad in ["", "3", "+3%", "-1us", "3%,", "x%"] {
            assert!(floor(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC*", row in "[a-z_.:/<=]*", bound in "[-+0-9.xµusmn%]*") {
            let _ = Gate::parse(&text);
            let _ = Gate::parse(&format!("{row}<={bound}"));
            let _ = Gate::parse(&format!("storage.p99<={bound}"));
            let _ = Gate::parse(&format!("{text}:storage.p99<=1x"));
            let _ = floor(&text);
            let _ = floor(&bound);
        }

        #[test]
        fn a_gate_reads_back(row in 0usize..8, statistic in 0usize..6, bound in 1u32..1_000_000, kind in 0usize..4) {
            let bound = match kind {
                0 => format!("{bound}x"),
                1 => format!("+{bound}us"),
                2 => format!("{bound}ns"),
                _ => format!("+{bound}%"),
            };
            let text = format!("{}.{}<={bound}", super::row_names()[row], Statistic::ALL[statistic].name());
            let gate = Gate::parse(&text).unwrap();
            prop_assert_eq!(gate.to_string(), text.clone());
            prop_assert_eq!(gate, Gate::parse(&text).unwrap());
        }
    }
}
