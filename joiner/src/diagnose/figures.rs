//! Small statistics that the rules share: medians, how one thing goes with another, two speeds. They know nothing of
//! commands.

/// A sorted sample of times.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times(Vec<i64>);

impl Times {
    pub(crate) fn of(values: impl Iterator<Item = i64>) -> Times {
        let mut values: Vec<i64> = values.collect();
        values.sort_unstable();
        Times(values)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn median(&self) -> i64 {
        percentile(&self.0, 0.5)
    }

    pub(crate) fn mean(&self) -> f64 {
        mean(self.0.iter().map(|&v| v as f64)).unwrap_or(0.0)
    }
}

/// By nearest rank, of a sorted sample; 0 of none.
pub(crate) fn percentile(sorted: &[i64], share: f64) -> i64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0)
}

/// The mean; `None` of none.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut n, mut sum) = (0u64, 0.0);
    for value in values {
        n += 1;
        sum += value;
    }
    (n > 0).then(|| sum / n as f64)
}

/// How one thing goes with another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trend {
    /// By how much `y` grows for each 1 of `x`.
    pub(crate) slope: f64,
    /// The share of the variance of `y` that this explains.
    pub(crate) r2: f64,
    /// The variance of `x`.
    pub(crate) variance: f64,
}

/// A straight line through points (least squares). `None` of fewer than three, or where `x` is always the same.
pub(crate) fn trend(points: impl Iterator<Item = (f64, f64)> + Clone) -> Option<Trend> {
    let n = points.clone().count() as f64;
    if n < 3.0 {
        return None;
    }
    let x = points.clone().map(|p| p.0).sum::<f64>() / n;
    let y = points.clone().map(|p| p.1).sum::<f64>() / n;
    let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
    for (a, b) in points {
        xx += (a - x) * (a - x);
        xy += (a - x) * (b - y);
        yy += (b - y) * (b - y);
    }
    if xx <= 0.0 {
        return None;
    }
    let r2 = if yy > 0.0 { xy * xy / (xx * yy) } else { 0.0 };
    Some(Trend { slope: xy / xx, r2, variance: xx / n })
}

/// Two speeds in one sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Modes {
    /// Values above this are slow.
    pub(crate) cut: f64,
    /// The share of slow ones.
    pub(crate) slow: f64,
    /// The median of the slow by that of the fast.
    pub(crate) apart: f64,
    /// How many lie between the two, as a share of the slow.
    pub(crate) between: f64,
}

/// Buckets to each factor of 2.
const BUCKETS: f64 = 8.0;

/// The widest gap between slow and fast values, as far as there is one: the cut for which the two medians are far apart
/// and the fewest values lie between them. Values are ratios above 0; `None` of fewer than 100, or without two speeds.
pub(crate) fn modes(values: &mut [f64], least_slow: f64, most_slow: f64) -> Option<Modes> {
    let n = values.len();
    if n < 100 {
        return None;
    }
    values.sort_unstable_by(f64::total_cmp);
    let bucket = |v: f64| (v.max(1e-9).log2() * BUCKETS).floor();
    let (lowest, highest) = (bucket(values[0]), bucket(values[n - 1]));
    let mut best: Option<Modes> = None;
    let mut at = lowest + 1.0;
    while at <= highest {
        let cut = (at / BUCKETS).exp2();
        let fast = values.partition_point(|&v| v < cut);
        let slow = n - fast;
        let share = slow as f64 / n as f64;
        if share < least_slow {
            break;
        }
        if share <= most_slow && fast > 0 {
            let (of_fast, of_slow) = (values[fast / 2], values[fast + slow / 2]);
            let apart = of_slow / of_fast.max(1e-9);
            // The middle half of the way between the medians, in powers of 2.
            let (a, b) = (of_fast.max(1e-9).log2(), of_slow.max(1e-9).log2());
            let (from, to) = ((a + (b - a) * 0.3).exp2(), (a + (b - a) * 0.7).exp2());
            let within = values.partition_point(|&v| v < to) - values.partition_point(|&v| v < from);
            let found = Modes { cut, slow: share, apart, between: within as f64 / slow as f64 };
            let better = best.is_none_or(|b| score(&found) > score(&b));
            if better {
                best = Some(found);
            }
        }
        at += 1.0;
    }
    best
}

/// Far apart and little between.
fn score(modes: &Modes) -> f64 {
    modes.apart.max(1.0).log2() / (0.1 + modes.between)
}
