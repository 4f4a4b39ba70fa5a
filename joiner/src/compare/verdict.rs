//! Judges: from each figure's estimate on both sides, its interval and its verdict; from the figures, what a row and
//! a class did, and the sentence that says so.
//!
//! All intervals of a comparison hold together with the asked confidence (Bonferroni). Half of the error is spent
//! on the typical values and medians, which answer "did it move?", half on all other figures, which are more and
//! noisier. There are two of the first kind because each fails the other way: the typical value moves when more
//! than a twentieth of the commands is disturbed, the median stands still when less than half of them is slower.
//! `moved` is said where the interval leaves out 0 and the change is larger than the floor, `same` where the whole
//! interval lies within the floor, and `cannot tell` otherwise: so neither noise nor a change too small to matter
//! makes a `moved`, and a lack of data never makes a `same`. Where the two sides' hooks cost differently, every
//! interval is wider by what that may be.

use super::input::{ClassKey, Reading, Sample};
use super::moments::{BoundaryPair, Plan, price_note, rows};
use super::resample::{Estimate, Estimates, OfRun, Spread, combine, estimate};
use super::slices::Slices;
use super::{Cell, ClassComparison, CompareOptions, Floor, LEAST, Row, Statistic};
use crate::student;
use crate::table::time;
use rayon::prelude::*;
use serde::Serialize;

/// What is known of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It surely changed, and by more than the floor.
    Moved,
    /// If it changed, then surely by less than the floor.
    Same,
    /// The data says neither.
    CannotTell,
}

impl Verdict {
    /// For a person.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Verdict::Moved => "moved",
            Verdict::Same => "same",
            Verdict::CannotTell => "cannot tell",
        }
    }
}

/// The base's and the new's estimate of a figure.
pub(crate) type Both = (Estimate, Estimate);

/// A class with what gates need of it.
#[derive(Debug)]
pub(crate) struct JudgedClass {
    pub(crate) shown: ClassComparison,
    /// By row and statistic.
    pub(crate) estimates: Vec<[Option<Both>; Statistic::ALL.len()]>,
    /// Whether every run has enough commands of it for verdicts.
    pub(crate) enough: bool,
}

/// All classes.
#[derive(Debug)]
pub(crate) struct Judged {
    pub(crate) classes: Vec<JudgedClass>,
    pub(crate) confidence: f64,
    pub(crate) notes: Vec<String>,
}

/// Estimates and judges every class that all runs have.
pub(crate) fn judge(
    base: &[Reading],
    new: &[Reading],
    common: &[ClassKey],
    boundaries: &[BoundaryPair],
    options: &CompareOptions,
) -> Judged {
    let mut estimated: Vec<Estimated> =
        common.iter().map(|key| Estimated::new(*key, base, new, boundaries)).collect();
    let cells = |location: bool| {
        let of = |e: &Estimated| {
            let all = e.estimates.iter().flat_map(|row| Statistic::ALL.iter().zip(row));
            all.filter(|(s, cell)| cell.is_some() && is_location(**s) == location).count()
        };
        estimated.iter().filter(|e| e.enough).map(of).sum::<usize>().max(1) as f64
    };
    let error = 1.0 - options.confidence;
    let chances = Chances { location: error / 2.0 / cells(true), other: error / 2.0 / cells(false) };
    let mut notes = Vec::new();
    if let Some(sides) = base.first().map(|r| r.sides) {
        let r2t = base.iter().chain(new).flat_map(|r| r.classes.values()).any(|s| s.r2t);
        notes.extend(price_note(sides, boundaries, r2t));
    }
    if let Some(short) = estimated.iter().filter(|e| e.enough).find(|e| e.too_short) {
        notes.push(format!(
            "{}: a run lasts too short for blocks of 50 ms: disturbances of more than {} can look like a change",
            short.key.name(),
            time(short.block_ns)
        ));
    }
    estimated.sort_by_key(|e| e.key);
    let classes = estimated.into_iter().map(|e| e.judged(&chances, &options.floor)).collect();
    Judged { classes, confidence: options.confidence, notes }
}

/// Whether a figure says where the most commands lie.
const fn is_location(statistic: Statistic) -> bool {
    matches!(statistic, Statistic::Typical | Statistic::P50)
}

/// The chance of an interval to miss, in both directions together.
struct Chances {
    location: f64,
    other: f64,
}

struct Estimated {
    key: ClassKey,
    plans: Vec<Plan>,
    estimates: Vec<[Option<Both>; Statistic::ALL.len()]>,
    commands: (u64, u64),
    enough: bool,
    too_short: bool,
    block_ns: f64,
}

impl Estimated {
    fn new(key: ClassKey, base: &[Reading], new: &[Reading], boundaries: &[BoundaryPair]) -> Estimated {
        let samples = |readings: &'_ [Reading]| -> Vec<usize> {
            (0..readings.len()).filter(|&n| readings[n].classes.contains_key(&key)).collect()
        };
        // A common class is in every run.
        let base: Vec<&Sample> = samples(base).into_iter().map(|n| &base[n].classes[&key]).collect();
        let sides = new.first().map(|r| r.sides);
        let new: Vec<&Sample> = samples(new).into_iter().map(|n| &new[n].classes[&key]).collect();
        let all: Vec<&Sample> = base.iter().chain(&new).copied().collect();
        let r2t = all.iter().any(|s| s.r2t);
        let plans = sides.map_or_else(Vec::new, |sides| rows(sides, boundaries, r2t, &all));
        let of = |samples: &[&Sample]| -> Vec<OfRun> {
            samples.par_iter().map(|sample| estimate(&Slices::of(sample, &plans))).collect()
        };
        let (base_runs, new_runs) = (of(&base), of(&new));
        let estimates = (0..plans.len())
            .map(|row| {
                std::array::from_fn(|statistic| {
                    if !plans[row].comparable {
                        return None;
                    }
                    sides_of(&base_runs, &new_runs, row, statistic)
                })
            })
            .collect();
        let runs = || base_runs.iter().chain(&new_runs);
        Estimated {
            key,
            estimates,
            plans,
            commands: (total(&base), total(&new)),
            enough: all.iter().all(|s| s.len() >= LEAST),
            too_short: runs().any(|r| r.too_short),
            block_ns: runs().map(|r| r.block_ns).fold(f64::INFINITY, f64::min),
        }
    }

    fn judged(self, chances: &Chances, floor: &Floor) -> JudgedClass {
        let enough = self.enough;
        let mut rows: Vec<Row> = self
            .plans
            .into_iter()
            .zip(&self.estimates)
            .map(|(plan, estimates)| {
                let statistics = std::array::from_fn(|n| {
                    let chance =
                        if is_location(Statistic::ALL[n]) { chances.location } else { chances.other };
                    estimates[n].map(|both| cell(both, enough.then_some(chance), floor, plan.allowance_ns))
                });
                Row {
                    verdict: plan.comparable.then(|| verdict(&statistics)),
                    row: plan.name,
                    title: plan.title,
                    why: plan.why,
                    hooks_ns: plan.allowance_ns,
                    explains: None,
                    statistics,
                }
            })
            .collect();
        explain(&mut rows);
        let moved = moved_most(&rows).map(|r| r.row.clone());
        let verdicts: Vec<Verdict> = rows.iter().filter_map(|r| r.verdict).collect();
        let all_same = verdicts.iter().all(|v| *v == Verdict::Same);
        let shown = ClassComparison {
            class: self.key.name(),
            base_commands: self.commands.0,
            new_commands: self.commands.1,
            verdict: match verdicts.contains(&Verdict::Moved) {
                true => Verdict::Moved,
                false if all_same && !verdicts.is_empty() => Verdict::Same,
                false => Verdict::CannotTell,
            },
            moved,
            sentence: sentence(&rows, enough, floor),
            rows,
        };
        JudgedClass { shown, estimates: self.estimates, enough }
    }
}

fn total(samples: &[&Sample]) -> u64 {
    samples.iter().map(|s| s.len() as u64).sum()
}

/// A figure on both sides; none where a run does not carry it.
fn sides_of(base: &[OfRun], new: &[OfRun], row: usize, statistic: usize) -> Option<Both> {
    let of = |runs: &[OfRun]| -> Option<Vec<Estimate>> {
        runs.iter().map(|run| (&run.estimates as &Estimates)[row][statistic]).collect()
    };
    let (base, new) = (of(base)?, of(new)?);
    let (of_base, of_new) = (Spread::of(&base), Spread::of(&new));
    Some((combine(&base, of_new)?, combine(&new, of_base)?))
}

/// The interval of the difference of two estimates: how far it reaches to either side.
pub(crate) fn reach(base: &Estimate, new: &Estimate, chance: f64) -> f64 {
    let (b, n) = (base.error * base.error, new.error * new.error);
    if b + n <= 0.0 {
        return 0.0;
    }
    // Welch and Satterthwaite.
    let freedom = (b + n) * (b + n) / (b * b / base.freedom + n * n / new.freedom);
    student::quantile(chance, freedom) * (b + n).sqrt()
}

/// The ratio and its interval, by the error of its logarithm, and with an allowance in ns on the new's figure; none
/// where a figure is not positive.
pub(crate) fn ratio(
    base: &Estimate,
    new: &Estimate,
    chance: Option<f64>,
    allowance: f64,
) -> Option<(f64, Option<(f64, f64)>)> {
    if base.value <= 0.0 {
        return None;
    }
    let ratio = new.value / base.value;
    if new.value <= 0.0 {
        return Some((ratio, None));
    }
    let logarithm = |e: &Estimate| Estimate { error: e.error / e.value, ..*e };
    let around = chance.map(|chance| {
        let reach = reach(&logarithm(base), &logarithm(new), chance).exp();
        let more = allowance / base.value;
        ((ratio - more).max(0.0) / reach, (ratio + more) * reach)
    });
    Some((ratio, around))
}

fn cell((base, new): Both, chance: Option<f64>, floor: &Floor, allowance: f64) -> Cell {
    let difference = new.value - base.value;
    // What the hooks cost may be in the difference, or hide as much of one.
    let reach = chance.map(|chance| reach(&base, &new, chance) + allowance);
    let least = floor.at(base.value);
    let verdict = match reach {
        None => Verdict::CannotTell,
        Some(reach) if difference.abs() > reach.max(least + allowance) => Verdict::Moved,
        Some(reach) if difference.abs() + reach <= least => Verdict::Same,
        Some(_) => Verdict::CannotTell,
    };
    let ratio = ratio(&base, &new, chance, allowance);
    let around = ratio.and_then(|r| r.1);
    Cell {
        base_ns: base.value,
        new_ns: new.value,
        difference_ns: difference,
        low_ns: reach.map(|r| difference - r),
        high_ns: reach.map(|r| difference + r),
        ratio: ratio.map(|r| r.0),
        ratio_low: around.map(|a| a.0),
        ratio_high: around.map(|a| a.1),
        detectable_ns: reach.map(|r| r.max(least + allowance)),
        verdict,
    }
}

fn verdict(statistics: &[Option<Cell>; Statistic::ALL.len()]) -> Verdict {
    if statistics.iter().flatten().any(|c| c.verdict == Verdict::Moved) {
        return Verdict::Moved;
    }
    statistics[Statistic::Typical as usize].map_or(Verdict::CannotTell, |c| c.verdict)
}

/// What each row's change is of the latency's, where that surely moved.
fn explain(rows: &mut [Row]) {
    let latency = rows.first().and_then(|r| r.of(Statistic::Typical)).copied();
    let Some(whole) = latency.filter(|c| c.verdict == Verdict::Moved) else { return };
    for row in rows.iter_mut().skip(1) {
        row.explains = row.of(Statistic::Typical).map(|c| c.difference_ns / whole.difference_ns);
    }
}

/// The typical value, or else the median, where it moved.
fn located(row: &Row) -> Option<&Cell> {
    let moved = |statistic| row.of(statistic).filter(|c| c.verdict == Verdict::Moved);
    moved(Statistic::Typical).or_else(|| moved(Statistic::P50))
}

/// The rows besides latency whose typical value or median moved, most first.
fn moved_rows(rows: &[Row]) -> Vec<(&Row, &Cell)> {
    let mut moved: Vec<(&Row, &Cell)> =
        rows.iter().skip(1).filter_map(|row| Some((row, located(row)?))).collect();
    moved.sort_by(|a, b| b.1.difference_ns.abs().total_cmp(&a.1.difference_ns.abs()));
    moved
}

fn moved_most(rows: &[Row]) -> Option<&Row> {
    moved_rows(rows).into_iter().next().map(|m| m.0)
}

/// Rows that a sentence names of those that can not be told.
const NAMED: usize = 2;

/// What happened to a class.
fn sentence(rows: &[Row], enough: bool, floor: &Floor) -> String {
    if !enough {
        return format!("too few commands to say anything: every run needs {LEAST} of the class");
    }
    let change = |c: &Cell| {
        let ratio = c.ratio.map_or(String::new(), |r| format!(" ({})", percent(r)));
        format!("{}{ratio}", signed(c.difference_ns))
    };
    let Some(latency) = rows.first() else { return "there is nothing to compare".into() };
    let of_latency = located(latency);
    let moved = moved_rows(rows);
    let mut text = String::new();
    for (n, (row, cell)) in moved.iter().enumerate() {
        let start = if n == 0 { "" } else { "; also " };
        text += &format!("{start}{} moved by {}", row.title, change(cell));
        if let (Some(share), Some(whole), 0) = (row.explains, of_latency, n) {
            text += &format!(", {:.0} % of the latency's change of {}", share * 100.0, change(whole));
        }
    }
    if !moved.is_empty() && of_latency.is_none() {
        text += match latency.of(Statistic::Typical).map(|c| c.verdict) {
            Some(Verdict::Same) => "; the latency as a whole is the same",
            Some(_) => "; of the latency as a whole it can not be told",
            None => "",
        };
    }
    if let (Some(whole), true) = (of_latency, moved.is_empty()) {
        text = format!("latency moved by {}, and no stage is shown to have moved by itself", change(whole));
    }
    let elsewhere = elsewhere(rows);
    if !elsewhere.is_empty() {
        let start = if text.is_empty() { "nothing moved for most commands; but " } else { "; " };
        text = format!("{text}{start}{elsewhere}");
    }
    if !text.is_empty() {
        return text;
    }
    let unsure: Vec<String> = rows
        .iter()
        .filter(|r| r.verdict == Some(Verdict::CannotTell))
        .filter_map(|r| {
            let least = r.of(Statistic::Typical)?.detectable_ns?;
            Some(format!("{} (shows {} or more)", r.title, time(least)))
        })
        .collect();
    let within = format!("within {:.3} % or {}, whichever is larger", floor.share * 100.0, time(floor.ns))
        .replace(".000 %", " %");
    if unsure.is_empty() {
        format!("nothing moved: the latency and every stage that can be compared are the same {within}")
    } else {
        let more = unsure.len().saturating_sub(NAMED);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let named = &unsure[..unsure.len().min(NAMED)];
        format!("nothing is shown to have moved; cannot tell for {}{more}", named.join(", "))
    }
}

/// Rows that moved only in their mean or tail.
fn elsewhere(rows: &[Row]) -> String {
    let parts: Vec<String> = rows
        .iter()
        .filter(|row| located(row).is_none())
        .filter_map(|row| {
            let moved: Vec<String> = Statistic::ALL
                .iter()
                .filter_map(|s| Some((s, row.of(*s)?)))
                .filter(|(_, c)| c.verdict == Verdict::Moved)
                .map(|(s, c)| {
                    let ratio = c.ratio.map_or(String::new(), |r| format!(" ({})", percent(r)));
                    format!("{} {}{ratio}", s.title(), signed(c.difference_ns))
                })
                .collect();
            (!moved.is_empty()).then(|| format!("{} moved in its {}", row.title, moved.join(" and ")))
        })
        .collect();
    parts.join("; ")
}

/// A time with its sign.
pub(crate) fn signed(ns: f64) -> String {
    format!("{}{}", if ns < 0.0 { "-" } else { "+" }, time(ns.abs()))
}

/// A ratio as a change in per cent, or as a factor where it is large.
pub(crate) fn percent(ratio: f64) -> String {
    if (0.5..2.0).contains(&ratio) {
        format!("{:+.1} %", (ratio - 1.0) * 100.0)
    } else {
        format!("{ratio:.2}x")
    }
}

/// A ratio in its own form, to three decimals, as far as these say anything.
pub(crate) fn factor(ratio: f64) -> String {
    if ratio > MOST { format!("more than {MOST:.0}x") } else { format!("{ratio:.3}x") }
}

/// A ratio beyond which its size says nothing more.
pub(crate) const MOST: f64 = 1_000.0;
