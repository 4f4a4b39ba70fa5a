//! How a figure goes along time, and which runs lie far from the others: both by medians, so that a few runs decide neither.
//! Changes from one run to the next are `shifts`'.

use super::series::{Series, median, normal};
use super::shifts::CHANCE;
use crate::compare::Floor;
use crate::student;

/// Runs of a series that its trend is taken of, at most: more are thinned out evenly.
const MOST: usize = 1_500;
/// How surely the interval of a slope holds it.
const CONFIDENCE: f64 = 0.95;

/// How a figure goes along time (Theil and Sen; the interval is Sen's).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slope {
    /// ns a day.
    pub(crate) per_day: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// From the first run to the last, days.
    pub(crate) days: f64,
    /// What the values are on day 0.
    pub(crate) level: f64,
    /// Kendall's statistic, standardised.
    pub(crate) strength: f64,
}

/// The slope of values over days, which begin with the first run; none of fewer than three, or where all are of one time.
pub(crate) fn slope(days: &[f64], values: &[f64]) -> Option<Slope> {
    let step = days.len().div_ceil(MOST).max(1);
    let thin = |of: &[f64]| of.iter().step_by(step).copied().collect::<Vec<f64>>();
    let (t, v) = (thin(days), thin(values));
    let n = t.len();
    let mut slopes = Vec::with_capacity(n * n.saturating_sub(1) / 2);
    let mut balance = 0i64;
    for a in 0..n {
        for b in a + 1..n {
            let (dt, dv) = (t[b] - t[a], v[b] - v[a]);
            if dt != 0.0 {
                slopes.push(dv / dt);
                balance += i64::from(dv * dt.signum() > 0.0) - i64::from(dv * dt.signum() < 0.0);
            }
        }
    }
    if n < 3 || slopes.is_empty() {
        return None;
    }
    let deviation = (n as f64 * (n as f64 - 1.0) * (2.0 * n as f64 + 5.0) / 18.0).sqrt();
    let last = slopes.len() - 1;
    let reach = normal(1.0 - CONFIDENCE) * deviation / 2.0;
    let centre = slopes.len() as f64 / 2.0;
    let at = |slopes: &mut Vec<f64>, place: f64| {
        let place = (place.max(0.0) as usize).min(last);
        *slopes.select_nth_unstable_by(place, f64::total_cmp).1
    };
    let per_day = median(&slopes);
    let (low, high) = (at(&mut slopes, (centre - reach).floor()), at(&mut slopes, (centre + reach).ceil()));
    let rest: Vec<f64> = t.iter().zip(&v).map(|(t, v)| v - per_day * t).collect();
    let span = days.iter().copied().fold(f64::NEG_INFINITY, f64::max)
        - days.iter().copied().fold(f64::INFINITY, f64::min);
    let strength = ((balance.abs() - 1).max(0)) as f64 / deviation;
    Some(Slope { per_day, low, high, days: span, level: median(&rest), strength })
}

impl Slope {
    /// Whether it is no chance, of so many series, and moves the figure by more than the floor over all.
    pub(crate) fn is_shown(&self, series: usize, floor: &Floor) -> bool {
        self.strength >= normal(CHANCE / series.max(1) as f64)
            && (self.per_day * self.days).abs() >= floor.at(self.level)
            && self.low * self.high > 0.0
    }
}

/// Places at which a step is looked for, at most, and the least number of runs on either side of it.
const PLACES: usize = 200;
const EDGE: usize = 4;

/// Whether one step fits values better than a line that leaves `rest` of them (the sum of what they are off), by more than
/// its place, which is free, makes likely (BIC, errors of Laplace's distribution). A small step would else be told as a
/// trend that is larger than it.
pub(crate) fn is_rather_a_step(values: &[f64], rest: f64) -> bool {
    let n = values.len();
    let off = |values: &[f64]| {
        let middle = median(values);
        values.iter().map(|v| (v - middle).abs()).sum::<f64>()
    };
    let places = (EDGE..n.saturating_sub(EDGE - 1)).step_by(n.div_ceil(PLACES).max(1));
    let least = places.map(|at| off(&values[..at]) + off(&values[at..])).fold(f64::INFINITY, f64::min);
    let n = n as f64;
    least * (n.ln() / n).exp() < rest
}

/// A run that lies far from the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Far {
    /// Its place in the series.
    pub(crate) at: usize,
    /// What the others' values are around, ns.
    pub(crate) centre: f64,
    /// How many standard deviations it is off, as the median deviation tells them.
    pub(crate) strength: f64,
}

/// What makes the median deviation of normal values their standard deviation.
const NORMAL: f64 = 1.4826;
/// Of the values of so many runs, the share that tells the spread as surely as that many do where the median deviation is
/// taken for it (its asymptotic efficiency).
const EFFICIENCY: f64 = 0.37;
/// The floor of an outlier, in floors of a change: one run is less than many.
const FLOORS: f64 = 2.0;

/// Runs that are far from what `centre` says of each, of a batch with `all` values: further than the spread of the others
/// makes likely, and than twice the floor.
pub(crate) fn far(series: &Series, centre: &[f64], all: usize, floor: &Floor) -> Vec<Far> {
    let off: Vec<f64> = series.values.iter().zip(centre).map(|(v, c)| v - c).collect();
    let sizes: Vec<f64> = off.iter().map(|o| o.abs()).collect();
    let spread = NORMAL * median(&sizes);
    let most = student::quantile(CHANCE / all.max(1) as f64, EFFICIENCY * off.len() as f64);
    off.iter()
        .zip(centre)
        .enumerate()
        .filter(|(_, (off, centre))| off.abs() > (most * spread).max(FLOORS * floor.at(**centre)))
        .map(|(at, (off, &centre))| Far { at, centre, strength: off / spread.max(floor.at(centre) / most) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{far, is_rather_a_step, slope};
    use crate::batch::series::{Quantile, Series};
    use crate::compare::{ClassName, Floor};
    use crate::random::Random;
    use proptest::prelude::*;
    use run_format::Operation;

    fn noise(seed: u64, n: usize) -> Vec<f64> {
        let mut random = Random::new(seed);
        (0..n).map(|_| 10_000.0 + f64::from(random.below(200))).collect()
    }

    #[test]
    fn a_slope_is_found_within_its_interval() {
        let days: Vec<f64> = (0..30).map(f64::from).collect();
        let mut values: Vec<f64> = noise(1, 30).iter().zip(&days).map(|(v, d)| v + 25.0 * d).collect();
        // A third of the runs may say anything.
        values[3] = 0.0;
        values[20] = 1e9;
        let found = slope(&days, &values).unwrap();
        assert!(found.low < 25.0 && 25.0 < found.high, "{found:?}");
        assert!((20.0..30.0).contains(&found.per_day) && found.is_shown(36, &Floor::default()), "{found:?}");
        let flat = slope(&days, &noise(2, 30)).unwrap();
        assert!(flat.low < 0.0 && 0.0 < flat.high && !flat.is_shown(36, &Floor::default()), "{flat:?}");
        assert_eq!(slope(&[1.0; 5], &[1.0, 2.0, 3.0, 4.0, 5.0]), None);
        assert_eq!(slope(&days[..2], &values[..2]), None);
    }

    #[test]
    fn a_small_step_is_no_trend_and_a_line_is_no_step() {
        let floor = Floor::default();
        let rest = |found: &super::Slope, days: &[f64], values: &[f64]| -> f64 {
            let line = days.iter().map(|d| found.level + found.per_day * d);
            values.iter().zip(line).map(|(v, c)| (v - c).abs()).sum()
        };
        for runs in [40usize, 400, 2_000] {
            let days: Vec<f64> = (0..runs).map(|n| n as f64).collect();
            // Of 1.9 %, which is below the floor, as its slope over all the runs is not.
            let level = |n: usize| if n < runs / 2 { 0.0 } else { 190.0 };
            let step: Vec<f64> = noise(4, runs).iter().enumerate().map(|(n, v)| v + level(n)).collect();
            let found = slope(&days, &step).unwrap();
            assert!(
                found.is_shown(36, &floor) && is_rather_a_step(&step, rest(&found, &days, &step)),
                "{runs}"
            );
            let line: Vec<f64> =
                noise(5, runs).iter().zip(&days).map(|(v, d)| v + 400.0 * d / runs as f64).collect();
            let found = slope(&days, &line).unwrap();
            assert!(
                found.is_shown(36, &floor) && !is_rather_a_step(&line, rest(&found, &days, &line)),
                "{runs}"
            );
        }
        assert!(!is_rather_a_step(&[1.0; 5], 0.0) && !is_rather_a_step(&[], 0.0));
    }

    #[test]
    fn a_run_that_is_far_off_is_told_and_tiny_spreads_tell_none() {
        let class = ClassName { operation: Operation::Read, bytes: 4096, error: false };
        let of = |values: Vec<f64>| {
            let runs = (0..values.len()).collect();
            Series { stratum: 0, class, stage: "storage".into(), quantile: Quantile::P50, runs, values }
        };
        let mut values = noise(3, 40);
        values[7] = 12_000.0;
        let found = far(&of(values), &[10_100.0; 40], 40 * 36, &Floor::default());
        assert_eq!(found.iter().map(|f| f.at).collect::<Vec<_>>(), [7]);
        assert!(found[0].strength > 10.0);
        let mut same = vec![10_000.0; 40];
        same[7] = 10_300.0;
        assert_eq!(far(&of(same), &[10_000.0; 40], 40 * 36, &Floor::default()), []);
    }

    proptest! {
        #[test]
        fn any_values_have_a_slope_in_its_interval(values in proptest::collection::vec((0.0..100.0f64, -1e12..1e12f64), 3..60)) {
            let (days, values): (Vec<f64>, Vec<f64>) = values.into_iter().unzip();
            if let Some(found) = slope(&days, &values) {
                prop_assert!(found.low <= found.per_day && found.per_day <= found.high, "{:?}", found);
            }
        }
    }
}
