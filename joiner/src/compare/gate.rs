//! The language of `--gate`, and what each gate says of a comparison.
//!
//! ```text
//! [CLASS:]STAGE.STATISTIC<=BOUND
//! ```
//!
//! `read/4096:storage.p99<=1.05x`, `latency.mean<=+3us`, `network.typical<=+5%`, `latency.p50<=80us`. CLASS is an
//! operation, with or without its size; without it, every class of commands that succeeded and are enough.

use super::verdict::{Both, Judged, JudgedClass, MOST, factor, ratio, reach};
use super::{ClassName, Floor, Statistic};
use crate::student;
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
    /// The figure lies within the bound, and the data would have shown one of twice what the bound allows.
    Holds,
    /// The figure surely lies beyond the bound.
    DoesNotHold,
    /// The sample does not carry the figure or hardly tells it, or it lies beyond the bound and may not really.
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

    /// What several say together: `DoesNotHold` if one does not, else `CannotTell` if one can not be told.
    #[must_use]
    pub fn of_all(outcomes: impl IntoIterator<Item = Outcome>) -> Outcome {
        outcomes.into_iter().fold(Outcome::Holds, |all, one| match (all, one) {
            (Outcome::DoesNotHold, _) | (_, Outcome::DoesNotHold) => Outcome::DoesNotHold,
            (Outcome::CannotTell, _) | (_, Outcome::CannotTell) => Outcome::CannotTell,
            (Outcome::Holds, Outcome::Holds) => Outcome::Holds,
        })
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
        if text.is_empty() {
            return Err("a gate is empty: is there a comma too many? Write STAGE.STATISTIC<=BOUND, such as storage.p99<=1.05x".into());
        }
        let (what, bound) = text.split_once("<=").ok_or_else(|| {
            format!("{text:?} is no gate: write STAGE.STATISTIC<=BOUND, such as storage.p99<=1.05x")
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
        !class.error && self.means(class.operation, class.bytes)
    }

    /// Whether commands of an operation and size are meant.
    pub(crate) fn means(&self, operation: Operation, bytes: u32) -> bool {
        self.operation.is_none_or(|o| o == operation) && self.bytes.is_none_or(|b| b == bytes)
    }

    /// Whether it names an operation.
    pub(crate) fn is_of_one_operation(&self) -> bool {
        self.operation.is_some()
    }

    /// The name of what it is about: `latency` or a stage's.
    pub(crate) fn row(&self) -> &str {
        &self.row
    }

    /// The figure of it.
    pub(crate) fn statistic(&self) -> Statistic {
        self.statistic
    }

    /// The bound, ns, where it is a time and no change.
    pub(crate) fn limit_ns(&self) -> Option<f64> {
        match self.bound {
            Bound::Absolute(ns) => Some(ns),
            Bound::Ratio(_) | Bound::Difference(_) => None,
        }
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
pub(crate) fn selector(text: &str) -> Result<(Operation, Option<u32>), String> {
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
    let never = || format!("{text:?} is a bound that no figure can keep: a time is more than 0");
    let is_signed = text.starts_with(['+', '-']);
    if let Some(number) = text.strip_suffix('x') {
        let ratio = number_of(number).filter(|r| *r >= 0.0 && !is_signed).ok_or_else(no)?;
        return if ratio > 0.0 { Ok(Bound::Ratio(ratio)) } else { Err(never()) };
    }
    if let Some(number) = text.strip_suffix('%') {
        let share = number_of(number).filter(|_| is_signed).ok_or_else(no)?;
        return if share > -100.0 { Ok(Bound::Ratio(1.0 + share / 100.0)) } else { Err(never()) };
    }
    let ns = time_of(text).ok_or_else(no)?;
    if ns.abs() > LONGEST_NS {
        return Err(format!("{text:?} is a bound of more than an hour: is it the unit?"));
    }
    match is_signed {
        true => Ok(Bound::Difference(ns)),
        false if ns > 0.0 => Ok(Bound::Absolute(ns)),
        false => Err(never()),
    }
}

/// The longest time that a bound may be, and that is told: an hour.
const LONGEST_NS: f64 = 3_600e9;

/// A plain decimal number, perhaps with space before its unit: no `inf`, no `nan`, no exponent.
pub(crate) fn number_of(text: &str) -> Option<f64> {
    let text = text.trim_end();
    let plain = |c: char| c.is_ascii_digit() || matches!(c, '.' | '+' | '-');
    text.parse().ok().filter(|n: &f64| n.is_finite() && n.abs() < 1e15 && text.chars().all(plain))
}

/// A number and its unit, in ns.
fn time_of(text: &str) -> Option<f64> {
    let unit = text.find(|c: char| c.is_alphabetic())?;
    let (number, unit) = text.split_at(unit);
    let ns = match unit {
        "ns" => 1.0,
        // The micro sign, and the Greek letter.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        _ => return None,
    };
    Some(number_of(number)? * ns)
}

/// Reads [`Floor::parse`]'s text.
pub(super) fn floor(text: &str) -> Result<Floor, String> {
    let (mut share, mut ns) = (None, None);
    for part in text.split(',').map(str::trim) {
        let no = || format!("{part:?} is no least change: write 2%, 0.25us, or both with a comma");
        if part.starts_with(['+', '-']) {
            return Err(no());
        }
        let earlier = match part.strip_suffix('%') {
            Some(number) => share.replace(number_of(number).ok_or_else(no)? / 100.0),
            None => ns.replace(time_of(part).ok_or_else(no)?),
        };
        if earlier.is_some() {
            return Err(format!(
                "{text:?} has two of one kind: write 2%, 0.25us, or one of each with a comma"
            ));
        }
    }
    Ok(Floor { share: share.unwrap_or(0.0), ns: ns.unwrap_or(0.0) })
}

/// What every gate says, class by class. What is given twice is one gate.
pub(crate) fn judge(gates: &[Gate], judged: &Judged) -> Vec<GateResult> {
    let first = |n: usize| !gates[..n].iter().any(|other| other.asks_as(&gates[n]));
    let meant: Vec<(&Gate, Vec<&JudgedClass>)> = (0..gates.len())
        .filter(|&n| first(n))
        .map(|n| &gates[n])
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

/// The figure that a gate is about and how much of its change the hooks may be, or why there is none.
fn carried(gate: &Gate, class: &JudgedClass) -> Result<(Both, f64), String> {
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
    let both = class.estimates[place][gate.statistic as usize].ok_or_else(|| {
        format!("{} needs {} commands in every run", gate.statistic.title(), count(gate.statistic.needs()))
    })?;
    Ok((both, shown.rows[place].hooks_ns))
}

impl Gate {
    /// Whether both ask the same, however they are written.
    fn asks_as(&self, other: &Gate) -> bool {
        let asked = |g: &Gate| (g.operation, g.bytes, g.row.clone(), g.statistic, g.bound);
        asked(self) == asked(other)
    }

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
        let ((base, new), hooks) = match carried(self, class) {
            Ok(both) => both,
            Err(why) => return self.cannot_tell(Some(name), why),
        };
        let (value, low, high) = match self.bound {
            Bound::Ratio(_) => match ratio(&base, &new, Some(chance), hooks) {
                Some((ratio, around)) => {
                    // A new figure of 0 has no logarithm, but an error.
                    let up_to = || (new.value + reach(&base, &new, chance) + hooks).max(0.0) / base.value;
                    let (low, high) = around.unwrap_or_else(|| (0.0, up_to()));
                    (ratio, low, high)
                }
                None => {
                    return self.cannot_tell(Some(name), "the base's figure is 0: there is no ratio".into());
                }
            },
            Bound::Difference(_) => {
                let (difference, reach) = (new.value - base.value, reach(&base, &new, chance) + hooks);
                (difference, difference - reach, difference + reach)
            }
            Bound::Absolute(_) => {
                let reach = student::quantile(chance, new.freedom) * new.error;
                (new.value, (new.value - reach).max(0.0), new.value + reach)
            }
        };
        let bound = self.bound();
        // Twice the largest new figure that the bound allows, in what is compared with the bound.
        let twice = match self.bound {
            Bound::Ratio(_) | Bound::Absolute(_) => 2.0 * bound,
            Bound::Difference(_) => 2.0 * (base.value + bound) - base.value,
        };
        let (outcome, why) = if value <= bound && high <= twice {
            (Outcome::Holds, "")
        } else if value <= bound {
            (
                Outcome::CannotTell,
                "; within the bound, but the data would not have shown twice what it allows",
            )
        } else if low > bound {
            (Outcome::DoesNotHold, "")
        } else {
            (Outcome::CannotTell, "; beyond the bound, but it may be chance")
        };
        let price = match self.bound {
            Bound::Ratio(_) | Bound::Difference(_) if hooks > 0.0 => {
                format!("; up to {} may be what the hooks cost", time(hooks))
            }
            _ => String::new(),
        };
        let text = format!(
            "{} to {}: {} ({}), bound {}{why}{price}",
            time(base.value),
            time(new.value),
            self.show(value),
            self.between(low, high),
            self.show(bound),
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

    /// A figure as it is compared with the bound, as far as its size says anything.
    fn show(&self, v: f64) -> String {
        match self.bound {
            Bound::Ratio(_) => factor(v),
            _ if v > LONGEST_NS => "more than 1 h".into(),
            _ if v < -LONGEST_NS => "less than -1 h".into(),
            Bound::Difference(_) => super::verdict::signed(v),
            Bound::Absolute(_) => time(v),
        }
    }

    fn between(&self, low: f64, high: f64) -> String {
        let anything = match self.bound {
            Bound::Ratio(_) => low < 1.0 / MOST && high > MOST,
            Bound::Difference(_) => low < -LONGEST_NS && high > LONGEST_NS,
            Bound::Absolute(_) => low <= 0.0 && high > LONGEST_NS,
        };
        if anything {
            "it may be anything".into()
        } else {
            format!("between {} and {}", self.show(low), self.show(high))
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
            ("latency.mean<=3 us", Bound::Absolute(3_000.0)),
            ("latency.mean<=+3\u{b5}s", Bound::Difference(3_000.0)),
            ("latency.mean<=+3 \u{3bc}s", Bound::Difference(3_000.0)),
            ("latency.mean<=1.05 x", Bound::Ratio(1.05)),
            ("latency.mean<=+25 %", Bound::Ratio(1.25)),
            ("latency.mean<=-1s", Bound::Difference(-1e9)),
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
            ("", "a comma too many"),
            ("storage.p99", "STAGE.STATISTIC<=BOUND"),
            ("storage.p99<=0x", "no figure can keep"),
            ("storage.p99<=0us", "no figure can keep"),
            ("storage.p99<=-100%", "no figure can keep"),
            ("storage.p99<=-2000000s", "more than an hour"),
            ("storage.p99<=3601s", "more than an hour"),
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
            ("storage.p99<=-101%", "no figure can keep"),
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
        assert_eq!(floor("3 %, 1 us"), Ok(Floor { share: 0.03, ns: 1_000.0 }));
        assert!(floor("1%,2%").unwrap_err().contains("two of one kind"));
        for bad in ["", "3", "+3%", "-1us", "3%,", "x%", "1us,2ns"] {
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
