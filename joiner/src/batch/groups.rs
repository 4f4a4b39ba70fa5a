//! Many runs as one: merged histograms of all runs, or of those that have one value of a label, and their percentiles. A
//! percentile of several runs is always that of their merged histograms, never made of their percentiles.

use super::buckets::Buckets;
use super::judge::Change;
use super::series::{Quantile, median, natural};
use super::step::{PairRows, Times};
use crate::compare::ClassName;
use crate::error::Error;
use crate::histogram::Histogram;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Runs that have one value of a label.
#[derive(Clone, Debug, Serialize)]
pub struct Group {
    /// The value; null for the runs that do not have the label.
    pub value: Option<String>,
    /// How many runs (pairs, or single ones) they are.
    pub runs: usize,
    /// When the first began, ns since 1970.
    pub first_ns: Option<i64>,
    /// When the last began.
    pub last_ns: Option<i64>,
    /// Their classes.
    pub classes: Vec<Merged>,
}

/// One class of several runs.
#[derive(Clone, Debug, Serialize)]
pub struct Merged {
    /// The class.
    #[serde(flatten)]
    pub class: ClassName,
    /// Runs that have it.
    pub runs: usize,
    /// Commands of all of them.
    pub commands: u64,
    /// Latency first, that of targets alone next, then the stages.
    pub stages: Vec<MergedStage>,
}

/// Latency or one stage of several runs.
#[derive(Clone, Debug, Serialize)]
pub struct MergedStage {
    /// `latency`, [`OF_TARGETS`] or the stage.
    pub stage: String,
    /// Runs that have it.
    pub runs: usize,
    /// Commands of all of them.
    pub commands: u64,
    /// Mean and percentiles over all their commands, ns.
    #[serde(flatten)]
    pub times: Times,
    /// The median of the runs' medians, in which each run counts once, ns.
    pub typical_ns: Option<f64>,
}

/// Of one class, the stage that differs most between two groups.
#[derive(Clone, Debug, Serialize)]
pub struct Differs {
    /// The class.
    #[serde(flatten)]
    pub class: ClassName,
    /// The stage.
    pub stage: String,
    /// The group that comes first.
    pub from: Option<String>,
    /// The other.
    pub to: Option<String>,
    /// By how much the typical medians differ, ns.
    pub difference_ns: f64,
    /// The second by the first.
    pub ratio: Option<f64>,
    /// Whether a change of this stage along the label is no chance: see the changes.
    pub shown: bool,
}

/// The runs by the values of a label.
#[derive(Clone, Debug, Serialize)]
pub struct By {
    /// The label.
    pub label: String,
    /// In the order of its values.
    pub groups: Vec<Group>,
    /// What differs most, class by class.
    pub differs_most: Vec<Differs>,
}

/// What the latency of targets alone is among merged figures: from capsule to response, a part of the host's latency and so
/// never merged with it.
pub(crate) const OF_TARGETS: &str = "target_latency";

/// The classes of some runs, their histograms merged.
pub(crate) fn merged(pairs: &[&PairRows]) -> Vec<Merged> {
    type Parts<'a> = Vec<(&'a Buckets, Option<i64>)>;
    type Stages<'a> = BTreeMap<(usize, &'a str), Parts<'a>>;
    let mut classes: BTreeMap<ClassName, (usize, u64, Stages<'_>)> = BTreeMap::new();
    for (pair, class) in pairs.iter().flat_map(|pair| pair.classes.iter().map(move |class| (pair, class))) {
        let (runs, commands, stages) = classes.entry(class.name()).or_default();
        *runs += 1;
        *commands += class.commands;
        for figure in &class.figures {
            let name = match figure.stage.as_str() {
                "latency" if pair.sides() == "target" => OF_TARGETS,
                stage => stage,
            };
            let key = (order(name), name);
            stages.entry(key).or_default().push((&figure.buckets, figure.times.p50_ns));
        }
    }
    let stage = |((_, stage), parts): (&(usize, &str), &Parts<'_>)| {
        let mut histogram = Histogram::default();
        parts.iter().for_each(|(buckets, _)| buckets.add_to(&mut histogram));
        let medians: Vec<f64> = parts.iter().filter_map(|(_, p50)| p50.map(|p| p as f64)).collect();
        MergedStage {
            stage: (*stage).to_owned(),
            runs: parts.len(),
            commands: histogram.count(),
            times: histogram.distribution().into(),
            typical_ns: (!medians.is_empty()).then(|| median(&medians)),
        }
    };
    let merged = |(class, (runs, commands, stages)): (ClassName, (usize, u64, BTreeMap<_, _>))| Merged {
        class,
        runs,
        commands,
        // One histogram for each thread at a time.
        stages: stages.par_iter().map(stage).collect(),
    };
    classes.into_iter().map(merged).collect()
}

/// The place of a figure among those of a class.
fn order(stage: &str) -> usize {
    let stages = run_format::Stage::ALL.iter().map(|s| s.name());
    let names = ["latency", OF_TARGETS].into_iter().chain(stages).chain(["beyond_host", "data_wait"]);
    names.into_iter().position(|name| name == stage).unwrap_or(usize::MAX)
}

/// The label that is meant: one by its name, or the user's own without its prefix.
///
/// # Errors
/// [`Error::Input`] where no run has it; it names those that there are.
pub(crate) fn label<'a>(pairs: &'a [PairRows], asked: &str) -> Result<&'a str, Error> {
    let names: BTreeSet<&str> = pairs.iter().flat_map(|p| p.labels.keys()).map(String::as_str).collect();
    let own = format!("{}{asked}", super::labels::OWN);
    let found = names.get(asked).or_else(|| names.get(own.as_str()));
    found.copied().ok_or_else(|| Error::Input {
        given: asked.to_owned(),
        why: format!("no run has this label; there are {}", names.into_iter().collect::<Vec<_>>().join(", ")),
    })
}

/// The runs by the values of a label, in their order; runs without it last.
pub(crate) fn by(pairs: &[PairRows], label: &str, changes: &[Change]) -> By {
    let mut values: BTreeMap<Option<&String>, Vec<&PairRows>> = BTreeMap::new();
    for pair in pairs {
        values.entry(pair.labels.get(label)).or_default().push(pair);
    }
    let mut values: Vec<(Option<&String>, Vec<&PairRows>)> = values.into_iter().collect();
    values.sort_by(|(a, _), (b, _)| match (a, b) {
        (Some(a), Some(b)) => natural(a, b).then_with(|| a.cmp(b)),
        _ => a.is_none().cmp(&b.is_none()),
    });
    let groups: Vec<Group> = values
        .into_iter()
        .map(|(value, pairs)| Group {
            value: value.cloned(),
            runs: pairs.len(),
            first_ns: pairs.iter().filter_map(|p| p.start_ns).min(),
            last_ns: pairs.iter().filter_map(|p| p.start_ns).max(),
            classes: merged(&pairs),
        })
        .collect();
    let differs_most = differs_most(&groups, label, changes);
    By { label: label.to_owned(), groups, differs_most }
}

fn differs_most(groups: &[Group], label: &str, changes: &[Change]) -> Vec<Differs> {
    let classes: BTreeSet<ClassName> = groups.iter().flat_map(|g| &g.classes).map(|c| c.class).collect();
    let of = |class: ClassName| -> Option<Differs> {
        // Of each stage, what is typical of each group that has it.
        let mut stages: BTreeMap<&str, Vec<(&Option<String>, f64)>> = BTreeMap::new();
        for group in groups {
            let merged = group.classes.iter().find(|c| c.class == class);
            for stage in merged
                .iter()
                .flat_map(|c| &c.stages)
                .filter(|s| !["latency", OF_TARGETS].contains(&s.stage.as_str()))
            {
                if let Some(typical) = stage.typical_ns {
                    stages.entry(&stage.stage).or_default().push((&group.value, typical));
                }
            }
        }
        let mut most: Option<Differs> = None;
        for (stage, values) in stages {
            for (n, (from, a)) in values.iter().enumerate() {
                for (to, b) in &values[n + 1..] {
                    if most.as_ref().is_none_or(|m| (b - a).abs() > m.difference_ns.abs()) {
                        let moved = |c: &Change| {
                            let p50 =
                                |m: &super::judge::Moved| m.stage == stage && m.quantile == Quantile::P50;
                            c.along == label && c.class == class && c.moved.iter().any(p50)
                        };
                        most = Some(Differs {
                            class,
                            stage: stage.to_owned(),
                            from: (*from).clone(),
                            to: (*to).clone(),
                            difference_ns: b - a,
                            ratio: (*a != 0.0).then(|| b / a),
                            shown: changes.iter().any(moved),
                        });
                    }
                }
            }
        }
        most
    };
    classes.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::{OF_TARGETS, merged};
    use crate::batch::step::PairRows;
    use crate::batch::step::tests::pair;
    use crate::stats::Distribution;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn percentiles_of_many_runs_are_those_of_all_their_commands(
            runs in proptest::collection::vec(proptest::collection::vec(1_000i64..900_000, 1..600), 1..6),
        ) {
            let pairs: Vec<_> = (0..).zip(&runs).map(|(n, values)| pair(n, values)).collect();
            let all = merged(&pairs.iter().collect::<Vec<_>>());
            let exact = Distribution::of(&mut runs.concat());
            let found = all[0].stages[0].times;
            prop_assert_eq!((all[0].runs, all[0].commands), (runs.len(), runs.concat().len() as u64));
            prop_assert!((found.mean_ns - exact.mean_ns).abs() < 1e-6 * exact.mean_ns);
            for (f, e) in [(found.p50_ns, exact.p50_ns), (found.p90_ns, exact.p90_ns), (found.p99_ns, exact.p99_ns)] {
                prop_assert_eq!(f.is_some(), e.is_some());
                let (f, e) = (f.unwrap_or(0) as f64, e.unwrap_or(0) as f64);
                prop_assert!((f - e).abs() <= 0.001 * e + 0.5, "{} for {}", f, e);
            }
        }
    }

    #[test]
    fn the_latency_of_a_target_alone_is_not_merged_with_that_of_commands() {
        let alone = PairRows { host: None, ..pair(1, &[10_000; 30]) };
        let all = merged(&[&pair(0, &[50_000; 30]), &alone]);
        let stages: Vec<(&str, usize, f64)> =
            all[0].stages.iter().map(|s| (s.stage.as_str(), s.runs, s.times.mean_ns)).collect();
        assert_eq!(stages, [("latency", 1, 50_000.0), (OF_TARGETS, 1, 10_000.0)]);
        assert_eq!((all[0].runs, all[0].commands), (2, 60));
    }
}
