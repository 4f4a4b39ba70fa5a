//! What is said of many runs: changes, trends and outliers, each with the stage that moved. How they are told from chance is
//! `shifts`' and `trends`'; this gathers the figures of one class that moved together into one finding.

use super::labels::Labels;
use super::series::{Along, LEAST, Quantile, Series, Stratum, median, series, strata};
use super::shifts::{Shift, shifts};
use super::step::PairRows;
use super::trends::{Slope, far, is_rather_a_step, slope};
use crate::compare::{ClassName, Floor};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Runs on either side of a change that have to agree in a label for it to have changed with it.
const AROUND: usize = 5;
/// Where a change lies is known to about so many runs, so these say nothing of what changed with it.
const NEAR: usize = 2;
/// Commands that each run needs for outliers in its p99: a hundred lie above it.
const FOR_TAILS: u64 = 10_000;
const NS_PER_DAY: f64 = 86_400e9;

/// A run, to be looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunName {
    /// Its directories.
    pub run: String,
    /// When it began, ns since 1970.
    pub start_ns: Option<i64>,
}

/// A figure before and after, ns.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moved {
    /// `latency` or a stage.
    pub stage: String,
    /// Which figure of it.
    pub quantile: Quantile,
    /// The median of the runs before.
    pub before_ns: f64,
    /// The median of the runs after.
    pub after_ns: f64,
    /// After less before.
    pub difference_ns: f64,
    /// After by before; null where that is nothing.
    pub ratio: Option<f64>,
    /// The chance that runs which are all alike show anything like it anywhere in the batch.
    pub chance: f64,
}

/// A label that has one value in the runs before a change and another in those after.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChangedLabel {
    /// Its name.
    pub label: String,
    /// Its value before; null where there was none.
    pub before: Option<String>,
    /// Its value after.
    pub after: Option<String>,
}

/// Where figures of one class changed from one run to the next.
#[derive(Clone, Debug, Serialize)]
pub struct Change {
    /// The class.
    #[serde(flatten)]
    pub class: ClassName,
    /// What the runs are in order of: `time`, or a label.
    pub along: String,
    /// What the runs share.
    pub within: BTreeMap<String, String>,
    /// The stage that moved most; `latency` where no stage is shown to have moved.
    pub stage: String,
    /// The figures that moved, that of this stage first.
    pub moved: Vec<Moved>,
    /// The last run before.
    pub last_before: RunName,
    /// The first run after.
    pub first_after: RunName,
    /// Runs before, back to the change before this one.
    pub runs_before: usize,
    /// Runs after, up to the next change.
    pub runs_after: usize,
    /// Labels that changed with it.
    pub labels: Vec<ChangedLabel>,
}

/// How a figure goes along time, ns a day.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slopes {
    /// `latency` or a stage.
    pub stage: String,
    /// Which figure of it.
    pub quantile: Quantile,
    /// The slope.
    pub per_day_ns: f64,
    /// The 95 % interval's end below.
    pub low_ns: f64,
    /// The 95 % interval's end above.
    pub high_ns: f64,
    /// What that makes over all the runs, ns.
    pub over_all_ns: f64,
}

/// Figures of one class that go up or down along time.
#[derive(Clone, Debug, Serialize)]
pub struct Trend {
    /// The class.
    #[serde(flatten)]
    pub class: ClassName,
    /// What the runs share.
    pub within: BTreeMap<String, String>,
    /// The stage that goes most; `latency` where no stage is shown to.
    pub stage: String,
    /// The figures that go, that of this stage first.
    pub slopes: Vec<Slopes>,
    /// Runs.
    pub runs: usize,
    /// From the first to the last, days.
    pub days: f64,
    /// The first run.
    pub first: RunName,
    /// The last run.
    pub last: RunName,
}

/// A figure that is far from the other runs', ns.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FarOff {
    /// `latency` or a stage.
    pub stage: String,
    /// Which figure of it.
    pub quantile: Quantile,
    /// Its value in this run.
    pub value_ns: f64,
    /// What the other runs' are around.
    pub others_ns: f64,
    /// How many standard deviations it is off, by the median deviation.
    pub deviations: f64,
}

/// A run of which figures of one class are far from those of the other runs.
#[derive(Clone, Debug, Serialize)]
pub struct Outlier {
    /// The run.
    #[serde(flatten)]
    pub run: RunName,
    /// The class.
    #[serde(flatten)]
    pub class: ClassName,
    /// What the runs share.
    pub within: BTreeMap<String, String>,
    /// The stage that is furthest off; `latency` where no stage is.
    pub stage: String,
    /// The figures that are far off, that of this stage first.
    pub far: Vec<FarOff>,
    /// Runs that it is held against.
    pub runs: usize,
}

/// Runs that are alike and too few for anything to be said.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TooFew {
    /// The class.
    #[serde(flatten)]
    pub class: ClassName,
    /// What the runs share.
    pub within: BTreeMap<String, String>,
    /// How many they are.
    pub runs: usize,
    /// How many are needed.
    pub needed: usize,
}

/// All that is said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Judged {
    pub(crate) changes: Vec<Change>,
    pub(crate) trends: Vec<Trend>,
    pub(crate) outliers: Vec<Outlier>,
    pub(crate) too_few: Vec<TooFew>,
}

/// Judges runs along time and, where one is given, along a label.
pub(crate) fn judge(pairs: &[PairRows], label: Option<&str>, floor: &Floor) -> Judged {
    let strata_ = strata(pairs, Along::Time);
    let all = series(pairs, &strata_);
    let (all, too_few) = enough(all, &strata_);
    // From the first run on: a slope's level is that of it.
    let began = |run: usize| pairs[run].start_ns.unwrap_or(0);
    let day = |series: &Series, run: usize| (began(run) - began(series.runs[0])) as f64 / NS_PER_DAY;
    let days: Vec<Vec<f64>> = all.iter().map(|s| s.runs.iter().map(|&run| day(s, run)).collect()).collect();
    let found = shifts(&all, &|_, _| true, floor);
    let slopes: Vec<Option<Slope>> = all.iter().zip(&days).map(|(s, d)| slope(d, &s.values)).collect();
    // What a line fits as well as steps is a trend.
    let found: Vec<Shift> = {
        let of = |n: usize| found.iter().filter(|s| s.series == n).collect::<Vec<_>>();
        let steady = |n: usize| -> bool {
            let Some(slope) = slopes[n].filter(|s| s.is_shown(all.len(), floor)) else { return false };
            rest(&all[n].values, &line(&slope, &days[n])) <= rest(&all[n].values, &levels(&all[n], &of(n)))
        };
        let lines: BTreeSet<usize> = (0..all.len()).filter(|&n| !of(n).is_empty() && steady(n)).collect();
        found.iter().filter(|s| !lines.contains(&s.series)).cloned().collect()
    };
    let of_series = |n: usize| found.iter().filter(move |s| s.series == n).collect::<Vec<&Shift>>();
    let values: usize = all.iter().map(|s| s.values.len()).sum();
    let (mut going, mut far_off) = (Vec::new(), Vec::new());
    for (n, series) in all.iter().enumerate() {
        let steps = of_series(n);
        let trend = slopes[n]
            .filter(|s| steps.is_empty() && s.is_shown(all.len(), floor))
            .filter(|s| !is_rather_a_step(&series.values, rest(&series.values, &line(s, &days[n]))));
        let centre = match &trend {
            Some(slope) => line(slope, &days[n]),
            None => levels(series, &steps),
        };
        going.extend(trend.map(|slope| (n, slope)));
        // Of few commands the tail itself is what differs from run to run.
        let carried = |run: &usize| {
            let class = pairs[*run].classes.iter().find(|c| c.name() == series.class);
            class.is_some_and(|class| class.commands >= FOR_TAILS)
        };
        if series.quantile == Quantile::P50 || series.runs.iter().all(carried) {
            far_off.extend(far(series, &centre, values, floor).into_iter().map(|far| (n, far)));
        }
    }
    let changes = grouped(pairs, &strata_, &all, &found, "time");
    let mut judged = Judged {
        trends: trends(pairs, &strata_, &all, &going),
        outliers: outliers(pairs, &strata_, &all, &far_off),
        changes,
        too_few,
    };
    if let Some(label) = label {
        let strata_ = strata(pairs, Along::Label(label));
        let (all, too_few) = enough(series(pairs, &strata_), &strata_);
        let value = |run: usize| pairs[run].labels.get(label);
        let found = shifts(&all, &|before, after| value(before) != value(after), floor);
        judged.changes.extend(grouped(pairs, &strata_, &all, &found, label));
        judged.too_few.extend(too_few);
        judged.too_few.sort_by(|a, b| (a.class, &a.within).cmp(&(b.class, &b.within)));
        judged.too_few.dedup();
    }
    judged
}

/// Series of enough runs, and what is said of the others.
fn enough(all: Vec<Series>, strata: &[Stratum]) -> (Vec<Series>, Vec<TooFew>) {
    let mut few: BTreeMap<(usize, ClassName), usize> = BTreeMap::new();
    let mut judged = BTreeSet::new();
    for series in &all {
        let key = (series.stratum, series.class);
        if series.runs.len() >= LEAST {
            judged.insert(key);
        } else {
            let runs = few.entry(key).or_default();
            *runs = (*runs).max(series.runs.len());
        }
    }
    let few = few.into_iter().filter(|(key, _)| !judged.contains(key));
    let too_few = few.map(|((stratum, class), runs)| TooFew {
        class,
        within: strata[stratum].labels.clone(),
        runs,
        needed: LEAST,
    });
    let too_few = too_few.collect();
    (all.into_iter().filter(|s| s.runs.len() >= LEAST).collect(), too_few)
}

fn line(slope: &Slope, days: &[f64]) -> Vec<f64> {
    days.iter().map(|d| slope.level + slope.per_day * d).collect()
}

/// The medians between changes, for each run.
fn levels(series: &Series, steps: &[&Shift]) -> Vec<f64> {
    let n = series.values.len();
    let ends = steps.iter().map(|s| s.at).chain([n]);
    let mut from = 0;
    let mut levels = Vec::with_capacity(n);
    for to in ends {
        if to > from {
            levels.resize(to, median(&series.values[from..to]));
            from = to;
        }
    }
    levels
}

/// What a centre leaves of values.
fn rest(values: &[f64], centre: &[f64]) -> f64 {
    values.iter().zip(centre).map(|(v, c)| (v - c).abs()).sum()
}

fn named(pairs: &[PairRows], run: usize) -> RunName {
    RunName { run: pairs[run].name(), start_ns: pairs[run].start_ns }
}

/// The stage that a finding names: medians before tails, stages before the latency that they make, then the largest.
fn first<T>(figures: &mut [T], of: impl Fn(&T) -> (&str, Quantile, f64)) -> String {
    figures.sort_by(|a, b| {
        let ((a, p, x), (b, q, y)) = (of(a), of(b));
        let rank = |stage: &str, quantile| (stage == "latency", quantile);
        rank(a, p).cmp(&rank(b, q)).then_with(|| y.abs().total_cmp(&x.abs()))
    });
    figures.first().map_or_else(String::new, |f| of(f).0.to_owned())
}

/// One change for what changed of a class at one place.
fn grouped(
    pairs: &[PairRows],
    strata: &[Stratum],
    all: &[Series],
    found: &[Shift],
    along: &str,
) -> Vec<Change> {
    let mut strongest: Vec<&Shift> = found.iter().collect();
    strongest.sort_by(|a, b| b.strength.total_cmp(&a.strength));
    // The place of a run among all that are alike, some of which may not have the class.
    let place = |shift: &Shift, at: usize| {
        let series = &all[shift.series];
        let runs = &strata[series.stratum].runs;
        let run = series.runs[at.min(series.runs.len() - 1)];
        runs.iter().position(|&other| other == run).unwrap_or(at)
    };
    let mut groups: Vec<(usize, Vec<&Shift>)> = Vec::new();
    for shift in strongest {
        let series = &all[shift.series];
        let (first, last) = (place(shift, shift.near.start), place(shift, shift.near.end - 1));
        let same = groups.iter_mut().find(|(at, shifts)| {
            let other = &all[shifts[0].series];
            (other.stratum, other.class) == (series.stratum, series.class)
                && (first..=last).contains(at)
                && shifts.iter().all(|s| s.series != shift.series)
        });
        match same {
            Some((_, shifts)) => shifts.push(shift),
            None => groups.push((place(shift, shift.at), vec![shift])),
        }
    }
    groups.sort_by_key(|(at, shifts)| (all[shifts[0].series].stratum, all[shifts[0].series].class, *at));
    let change = |(_, shifts): (usize, Vec<&Shift>)| {
        let main = shifts[0];
        let series = &all[main.series];
        let mut moved: Vec<Moved> = shifts
            .iter()
            .map(|shift| Moved {
                stage: all[shift.series].stage.clone(),
                quantile: all[shift.series].quantile,
                before_ns: shift.before,
                after_ns: shift.after,
                difference_ns: shift.after - shift.before,
                ratio: (shift.before != 0.0).then(|| shift.after / shift.before),
                chance: shift.chance,
            })
            .collect();
        let stage = first(&mut moved, |m| (&m.stage, m.quantile, m.difference_ns));
        let (before, after) = series.runs.split_at(main.at);
        let before = &before[main.between.start..];
        let after = &after[..main.between.end - main.at];
        Change {
            class: series.class,
            along: along.to_owned(),
            within: strata[series.stratum].labels.clone(),
            stage,
            moved,
            last_before: named(pairs, series.runs[main.at - 1]),
            first_after: named(pairs, series.runs[main.at]),
            runs_before: before.len(),
            runs_after: after.len(),
            labels: changed_labels(pairs, before, after),
        }
    };
    groups.into_iter().map(change).collect()
}

/// Labels that have one value in the runs before a change and another in those after it, near to where it lies.
fn changed_labels(pairs: &[PairRows], before: &[usize], after: &[usize]) -> Vec<ChangedLabel> {
    let before = &before[..before.len() - NEAR.min(before.len().saturating_sub(1))];
    let before = &before[before.len().saturating_sub(AROUND)..];
    let after = &after[NEAR.min(after.len().saturating_sub(1))..];
    let after = &after[..after.len().min(AROUND)];
    let labels = |run: usize| -> &Labels { &pairs[run].labels };
    let names: BTreeSet<&String> = before.iter().chain(after).flat_map(|&run| labels(run).keys()).collect();
    let one = |runs: &[usize], name: &str| {
        let values: BTreeSet<Option<&String>> = runs.iter().map(|&run| labels(run).get(name)).collect();
        (values.len() == 1).then(|| values.into_iter().next().flatten().cloned())
    };
    names
        .into_iter()
        .filter_map(|name| {
            let (before, after) = (one(before, name)?, one(after, name)?);
            // A day changes with every change.
            (before != after && name != "day").then(|| ChangedLabel { label: name.clone(), before, after })
        })
        .collect()
}

fn trends(pairs: &[PairRows], strata: &[Stratum], all: &[Series], going: &[(usize, Slope)]) -> Vec<Trend> {
    let mut classes: BTreeMap<(usize, ClassName), Vec<&(usize, Slope)>> = BTreeMap::new();
    for one in going {
        classes.entry((all[one.0].stratum, all[one.0].class)).or_default().push(one);
    }
    let trend = |((stratum, class), going): ((usize, ClassName), Vec<&(usize, Slope)>)| {
        let mut slopes: Vec<Slopes> = going
            .iter()
            .map(|(n, slope)| Slopes {
                stage: all[*n].stage.clone(),
                quantile: all[*n].quantile,
                per_day_ns: slope.per_day,
                low_ns: slope.low,
                high_ns: slope.high,
                over_all_ns: slope.per_day * slope.days,
            })
            .collect();
        let stage = first(&mut slopes, |s| (&s.stage, s.quantile, s.over_all_ns));
        let (n, slope) = going[0];
        let runs = &all[*n].runs;
        Trend {
            class,
            within: strata[stratum].labels.clone(),
            stage,
            slopes,
            runs: runs.len(),
            days: slope.days,
            first: named(pairs, runs[0]),
            last: named(pairs, runs[runs.len() - 1]),
        }
    };
    classes.into_iter().map(trend).collect()
}

fn outliers(
    pairs: &[PairRows],
    strata: &[Stratum],
    all: &[Series],
    far_off: &[(usize, super::trends::Far)],
) -> Vec<Outlier> {
    let mut runs: BTreeMap<(usize, ClassName), Vec<&(usize, super::trends::Far)>> = BTreeMap::new();
    for one in far_off {
        runs.entry((all[one.0].runs[one.1.at], all[one.0].class)).or_default().push(one);
    }
    let outlier = |((run, class), off): ((usize, ClassName), Vec<&(usize, super::trends::Far)>)| {
        let mut far: Vec<FarOff> = off
            .iter()
            .map(|(n, f)| FarOff {
                stage: all[*n].stage.clone(),
                quantile: all[*n].quantile,
                value_ns: all[*n].values[f.at],
                others_ns: f.centre,
                deviations: f.strength,
            })
            .collect();
        let stage = first(&mut far, |f| (&f.stage, f.quantile, f.value_ns - f.others_ns));
        let series = &all[off[0].0];
        Outlier {
            run: named(pairs, run),
            class,
            within: strata[series.stratum].labels.clone(),
            stage,
            far,
            runs: series.runs.len(),
        }
    };
    runs.into_iter().map(outlier).collect()
}
