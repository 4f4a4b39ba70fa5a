//! Means and percentiles of times, with percentiles only where the sample carries them.

use serde::Serialize;

/// How many commands must lie above a percentile for it to be shown.
const ABOVE: f64 = 10.0;

/// The least number of commands that carries a percentile: ten must lie above it, so p99.9 needs 10 000.
#[must_use]
pub(crate) fn needed(percentile: f64) -> u64 {
    // Rounded first: 1 - 0.999 is a little more than a thousandth in binary.
    (ABOVE / ((1.0 - percentile) * 1e9).round() * 1e9).ceil() as u64
}

/// Mean and percentiles of a time, ns. A percentile is the smallest value that at least that share of the
/// sample does not exceed (nearest rank), and null where fewer than ten commands lie above it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// Arithmetic mean.
    pub mean_ns: f64,
    /// Median; needs 20 commands.
    pub p50_ns: Option<i64>,
    /// 90th percentile; needs 100 commands.
    pub p90_ns: Option<i64>,
    /// 99th percentile; needs 1 000 commands.
    pub p99_ns: Option<i64>,
    /// 99.9th percentile; needs 10 000 commands.
    pub p999_ns: Option<i64>,
}

impl Distribution {
    /// Of a sample that is not empty; puts the sample into another order.
    pub(crate) fn of(sample: &mut [i64]) -> Distribution {
        let sum: i128 = sample.iter().map(|&v| i128::from(v)).sum();
        let mean_ns = sum as f64 / sample.len().max(1) as f64;
        let n = sample.len();
        // From the highest down: what is above one percentile need not be looked at for the next.
        let mut below = sample;
        let mut percentile = |p: f64| {
            if (n as u64) < needed(p) {
                return None;
            }
            let rank = ((p * n as f64).ceil() as usize).clamp(1, n) - 1;
            let whole = std::mem::take(&mut below);
            let value =
                if rank < whole.len() { *whole.select_nth_unstable(rank).1 } else { *whole.last()? };
            below = &mut whole[..=rank];
            Some(value)
        };
        let p999_ns = percentile(0.999);
        let p99_ns = percentile(0.99);
        let p90_ns = percentile(0.9);
        let p50_ns = percentile(0.5);
        Distribution { mean_ns, p50_ns, p90_ns, p99_ns, p999_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::{Distribution, needed};
    use proptest::prelude::*;

    #[test]
    fn ten_commands_must_lie_above_a_percentile() {
        assert_eq!([0.5, 0.9, 0.99, 0.999].map(needed), [20, 100, 1_000, 10_000]);
        let mut few: Vec<i64> = (0..9_999).collect();
        let d = Distribution::of(&mut few);
        assert_eq!((d.p99_ns, d.p999_ns), (Some(9_899), None));
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut v: Vec<i64> = (1..=10_000).rev().collect();
        let d = Distribution::of(&mut v);
        assert_eq!(d.mean_ns, 5_000.5);
        assert_eq!([d.p50_ns, d.p90_ns, d.p99_ns, d.p999_ns], [5_000, 9_000, 9_900, 9_990].map(Some));
    }

    proptest! {
        #[test]
        fn percentiles_are_those_of_the_sorted_sample(mut v in proptest::collection::vec(-1_000i64..1_000, 1..3_000)) {
            let mut sorted = v.clone();
            sorted.sort_unstable();
            let d = Distribution::of(&mut v);
            let n = sorted.len();
            for (p, value) in [(0.5, d.p50_ns), (0.9, d.p90_ns), (0.99, d.p99_ns), (0.999, d.p999_ns)] {
                let expected = (n as u64 >= needed(p)).then(|| sorted[(p * n as f64).ceil() as usize - 1]);
                prop_assert_eq!(value, expected);
            }
            prop_assert!(d.mean_ns >= sorted[0] as f64 && d.mean_ns <= sorted[n - 1] as f64);
        }
    }
}
