//! The figures that are judged across runs: of each class and stage, one value a run, of runs that are alike. A run counts
//! once, however many commands it has. It judges nothing.

use super::labels::OWN;
use super::step::PairRows;
use crate::compare::ClassName;
use crate::student;
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The least number of runs that are alike for anything to be said of changes, trends and outliers.
pub(crate) const LEAST: usize = 10;
/// A user's label parts runs only where its values have so many runs each, on average.
const PER_VALUE: usize = 8;

/// Which figure of a stage's times is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantile {
    /// The median: where most commands are.
    P50,
    /// The tail.
    P99,
}

/// Runs that are alike but for what may have moved a stage.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stratum {
    /// What they share.
    pub(crate) labels: BTreeMap<String, String>,
    /// Their numbers, in the order in which they are judged.
    pub(crate) runs: Vec<usize>,
}

/// One figure over runs that are alike.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) stratum: usize,
    pub(crate) class: ClassName,
    pub(crate) stage: String,
    pub(crate) quantile: Quantile,
    /// The runs that have it, in order.
    pub(crate) runs: Vec<usize>,
    /// Its value in each, ns.
    pub(crate) values: Vec<f64>,
}

/// What runs are put in order by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Along<'a> {
    /// When they began.
    Time,
    /// The values of a label.
    Label(&'a str),
}

/// Values of a label in their order: numbers in them count as numbers, so that 24.9 is before 24.10.
pub(crate) fn natural(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        let number = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (n, m) = (number(a), number(b));
        if n > 0 && m > 0 {
            let (x, y) = (a[..n].trim_start_matches('0'), b[..m].trim_start_matches('0'));
            let order = x.len().cmp(&y.len()).then_with(|| x.cmp(y));
            if order.is_ne() {
                return order;
            }
            (a, b) = (&a[n..], &b[m..]);
            continue;
        }
        let (mut x, mut y) = (a.chars(), b.chars());
        match (x.next(), y.next()) {
            (None, None) => return Ordering::Equal,
            (None, _) => return Ordering::Less,
            (_, None) => return Ordering::Greater,
            (Some(c), Some(d)) if c != d => return c.cmp(&d),
            _ => (a, b) = (x.as_str(), y.as_str()),
        }
    }
}

/// Labels of the system and the load, which part runs that are not alike. What may be the cause of a change (versions,
/// kernels, builds) is none of them.
const SYSTEM: [&str; 5] = ["host.machine", "target.machine", "transport", "sampling", "detail"];

/// Runs that are alike, each in order. Runs without a time or the label are left out.
pub(crate) fn strata(pairs: &[PairRows], along: Along<'_>) -> Vec<Stratum> {
    let usable = |n: &usize| match along {
        Along::Time => pairs[*n].start_ns.is_some(),
        Along::Label(label) => pairs[*n].labels.contains_key(label),
    };
    let own: BTreeSet<&str> = pairs
        .iter()
        .flat_map(|p| p.labels.keys())
        .map(String::as_str)
        .filter(|l| l.starts_with(OWN))
        .collect();
    let own = own.into_iter().filter(|label| {
        let values: BTreeSet<_> = pairs.iter().map(|p| p.labels.get(*label)).collect();
        values.len() * PER_VALUE <= pairs.len()
    });
    let asked = |label: &&str| match along {
        Along::Time => false,
        Along::Label(by) => *label == by || (by == "machine" && label.ends_with(".machine")),
    };
    let names: Vec<&str> = SYSTEM.into_iter().chain(own).filter(|label| !asked(label)).collect();
    let mut found: HashMap<(&str, Vec<Option<&String>>), Stratum> = HashMap::new();
    for n in (0..pairs.len()).filter(usable) {
        let pair = &pairs[n];
        let values: Vec<Option<&String>> = names.iter().map(|name| pair.labels.get(*name)).collect();
        let labels = || {
            let both = names.iter().zip(&values);
            both.filter_map(|(name, value)| Some(((*name).to_owned(), (*value)?.clone()))).collect()
        };
        let stratum = found
            .entry((pair.sides(), values.clone()))
            .or_insert_with(|| Stratum { labels: labels(), runs: Vec::new() });
        stratum.runs.push(n);
    }
    let mut strata: Vec<Stratum> = found.into_values().collect();
    for stratum in &mut strata {
        stratum.runs.sort_by(|&a, &b| {
            let (a, b) = (&pairs[a], &pairs[b]);
            let by_label = match along {
                Along::Time => Ordering::Equal,
                Along::Label(label) => natural(&a.labels[label], &b.labels[label]),
            };
            by_label.then_with(|| a.start_ns.cmp(&b.start_ns)).then_with(|| a.name().cmp(&b.name()))
        });
    }
    strata.sort_by(|a, b| a.runs.first().cmp(&b.runs.first()));
    strata
}

/// The series of all strata, those of too few runs too.
pub(crate) fn series(pairs: &[PairRows], strata: &[Stratum]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for (number, stratum) in strata.iter().enumerate() {
        let mut places: BTreeMap<(ClassName, &str, Quantile), Series> = BTreeMap::new();
        for &run in &stratum.runs {
            for class in &pairs[run].classes {
                let name = class.name();
                for figure in &class.figures {
                    for (quantile, value) in
                        [(Quantile::P50, figure.times.p50_ns), (Quantile::P99, figure.times.p99_ns)]
                    {
                        let Some(value) = value else { continue };
                        let series =
                            places.entry((name, &figure.stage, quantile)).or_insert_with(|| Series {
                                stratum: number,
                                class: name,
                                stage: figure.stage.clone(),
                                quantile,
                                runs: Vec::new(),
                                values: Vec::new(),
                            });
                        series.runs.push(run);
                        series.values.push(value as f64);
                    }
                }
            }
        }
        all.extend(places.into_values());
    }
    all
}

/// The median of values, which are not empty.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    let middle = values.len() / 2;
    let (below, &mut high, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    if below.is_empty() || values.len() % 2 == 1 {
        return high;
    }
    let low = values[..middle].iter().copied().fold(f64::NEG_INFINITY, f64::max);
    f64::midpoint(low, high)
}

/// How many standard deviations a normal value is off with probability `both`, in either direction together.
pub(crate) fn normal(both: f64) -> f64 {
    student::quantile(both, 1e7)
}

#[cfg(test)]
mod tests {
    use super::{median, natural};
    use std::cmp::Ordering::{Equal, Greater, Less};

    #[test]
    fn numbers_in_versions_count_as_numbers() {
        for (a, b, order) in [
            ("24.09", "26.05", Less),
            ("6.9.1", "6.12.0", Less),
            ("24.9", "24.09", Equal),
            ("v2", "v10-rc1", Less),
            ("10", "9", Greater),
            ("a", "a1", Less),
            ("", "x", Less),
            ("é2", "é10", Less),
        ] {
            assert_eq!(natural(a, b), order, "{a} {b}");
            assert_eq!(natural(b, a), order.reverse(), "{b} {a}");
        }
    }

    #[test]
    fn medians_are_those_of_the_sorted_values() {
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
        assert_eq!(median(&[9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&[9.0, 1.0, 5.0, 7.0]), 6.0);
    }
}
