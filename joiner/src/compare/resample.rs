//! Figures and their errors. Commands of one run are not independent: a disturbance lasts for many of them. So
//! the error comes from resampling whole blocks of time (circular block bootstrap): a run is put together anew
//! from blocks of itself, drawn at random, and what its figures then vary by is their error.
//!
//! A block is at least 50 ms long where the run allows it, and longer where the figures hang together for longer
//! (the rule of Politis and White, 2004, with the correction of Patton, Politis and White, 2009); a run has
//! 12 to 32 blocks. As what hangs together beyond a block is missed, the variance is extrapolated from blocks of
//! half the length where it still grows with it. Where a figure drifts over the run, another run would have met
//! another part of the drift: what it drifted by beyond what chance alone gives adds to the error, as if the run's
//! place in the drift were chance. The numbers are seeded: the same runs give the same figures.

use super::Statistic;
use super::slices::{Ladder, MIDDLE, Slices};
use crate::random::Random;
use rayon::prelude::*;

/// How often a run is put together anew.
const REPLICATES: usize = 400;
/// Blocks that a run has at most, and at least.
const BLOCKS: (usize, usize) = (32, 12);
/// The least length of a block, where the run allows it, ns.
const SHORTEST_NS: f64 = 50e6;
/// By how much runs of one system are taken to differ where there is only one on each side and so nothing shows
/// it: the standard deviation as a share of the figure. Repeated runs put what they show in its place.
pub(crate) const BETWEEN_RUNS: f64 = 0.005;
/// The seed, for every run the same, so that nothing depends on the order in which runs are given.
const SEED: u64 = 0x6661_6273_636f_7065;

/// A figure of one or more runs, ns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) value: f64,
    /// Its standard error.
    pub(crate) error: f64,
    /// The degrees of freedom that the error is known with.
    pub(crate) freedom: f64,
}

/// The figures of every row of a class, by [`Statistic`].
pub(crate) type Estimates = Vec<[Option<Estimate>; Statistic::ALL.len()]>;

/// One run's figures.
#[derive(Debug)]
pub(crate) struct OfRun {
    pub(crate) estimates: Estimates,
    /// Length of a block, ns.
    pub(crate) block_ns: f64,
    /// Whether blocks of the least length were too long for the run.
    pub(crate) too_short: bool,
}

/// Estimates every figure of every row that the sample carries.
pub(crate) fn estimate(slices: &Slices) -> OfRun {
    let (block, too_short) = block_length(slices);
    let n = slices.commands[slices.count()];
    let whole = Draws::new(slices, block, SEED);
    let half = Draws::new(slices, (block / 2).max(1), SEED ^ 1);
    let freedom = effective_blocks(slices, block) - 1.0;
    let estimates = (0..slices.figures.len())
        .into_par_iter()
        .map(|row| {
            let (typical, d) = slices.figures[row];
            let drift = drift(slices, row, whole.variance(slices, row, Statistic::Typical));
            let drift = if typical > 0.0 { drift / (typical * typical) } else { 0.0 };
            Statistic::ALL.map(|statistic| {
                if u64::from(n) < statistic.needs() {
                    return None;
                }
                let value = match statistic {
                    Statistic::Typical => typical,
                    Statistic::Mean => d.mean_ns,
                    Statistic::P50 => d.p50_ns? as f64,
                    Statistic::P90 => d.p90_ns? as f64,
                    Statistic::P99 => d.p99_ns? as f64,
                    Statistic::P999 => d.p999_ns? as f64,
                };
                let long = whole.variance(slices, row, statistic);
                let short = half.variance(slices, row, statistic);
                // Evenly spread over what it drifted by.
                let by_drift = drift * value * value / 12.0;
                let variance = long.max(2.0 * long - short) + by_drift;
                Some(Estimate { value, error: variance.sqrt(), freedom })
            })
        })
        .collect();
    OfRun { estimates, block_ns: block as f64 * slices.length, too_short }
}

/// By how much a row's typical value changed from the run's beginning to its end, by the straight line through
/// it: squared, less what chance gives on average. `variance` is that of the typical value.
fn drift(slices: &Slices, row: usize, variance: f64) -> f64 {
    let m = slices.count();
    let (mut weighted, mut squares, mut typical) = (0.0, 0.0, 0.0);
    for (slice, deviation) in slices.deviations[row].iter().enumerate() {
        let commands = f64::from(slices.commands[slice + 1] - slices.commands[slice]);
        // From -1/2 to 1/2 over the run.
        let time = (slice as f64 + 0.5) / m as f64 - 0.5;
        weighted += time * deviation;
        squares += time * time * commands * (MIDDLE.1 - MIDDLE.0);
        typical += commands * (MIDDLE.1 - MIDDLE.0);
    }
    if squares <= 0.0 {
        return 0.0;
    }
    let slope = weighted / squares;
    // The slope's variance by the mean's: both are sums over the same commands.
    (slope * slope - variance * typical / squares).max(0.0)
}

/// As many blocks of equal size would be worth as much as these, of which some may hold few commands.
fn effective_blocks(slices: &Slices, block: usize) -> f64 {
    let (mut sum, mut squares) = (0.0, 0.0);
    let m = slices.count();
    for from in (0..m).step_by(block) {
        let n = f64::from(slices.commands[(from + block).min(m)] - slices.commands[from]);
        sum += n;
        squares += n * n;
    }
    if squares > 0.0 { (sum * sum / squares).max(2.0) } else { 2.0 }
}

/// The length of a block in slices, and whether the run is too short for blocks of the least length.
fn block_length(slices: &Slices) -> (usize, bool) {
    let m = slices.count();
    let (shortest, longest) = ((m / BLOCKS.0).max(1), (m / BLOCKS.1).max(1));
    let least = (SHORTEST_NS / slices.length).ceil() as usize;
    let hang_together = slices.deviations.iter().map(|row| politis_white(row)).fold(0.0, f64::max);
    let wanted = least.max(hang_together.ceil() as usize);
    (wanted.clamp(shortest, longest), least > longest)
}

/// The length of blocks that suits a series best for the variance of its mean, by its autocorrelation.
fn politis_white(series: &[f64]) -> f64 {
    let n = series.len();
    let mean = series.iter().sum::<f64>() / n as f64;
    let covariance = |lag: usize| {
        let terms = series.iter().zip(&series[lag..]).map(|(a, b)| (a - mean) * (b - mean));
        terms.sum::<f64>() / n as f64
    };
    let variance = covariance(0);
    if variance <= 0.0 || !variance.is_finite() {
        return 0.0;
    }
    // The last lag that counts is followed by some that do not.
    let negligible = 2.0 * ((n as f64).log10() / n as f64).sqrt();
    let quiet = ((n as f64).log10().sqrt().ceil() as usize).max(5);
    let most = ((n as f64).sqrt().ceil() as usize + quiet).min(n / 2);
    let correlations: Vec<f64> = (1..=most).map(|lag| covariance(lag) / variance).collect();
    let counts = |r: &f64| r.abs() >= negligible;
    let last = (0..correlations.len())
        .find(|&from| correlations[from..].iter().take(quiet).all(|r| !counts(r)))
        .unwrap_or(correlations.len());
    if last == 0 {
        return 1.0;
    }
    let window = (2 * last).min(n - 1);
    let (mut weighted, mut whole) = (0.0, variance);
    for lag in 1..=window {
        let share = lag as f64 / window as f64;
        let weight = if share <= 0.5 { 1.0 } else { 2.0 * (1.0 - share) };
        let r = covariance(lag);
        weighted += 2.0 * weight * lag as f64 * r;
        whole += 2.0 * weight * r;
    }
    let spread = 4.0 / 3.0 * whole * whole;
    if spread <= 0.0 {
        return 1.0;
    }
    (2.0 * weighted * weighted / spread).cbrt() * (n as f64).cbrt()
}

/// Runs put together anew: for each, the stretches of slices that it is made of.
struct Draws {
    stretches: Vec<Vec<(u16, u16)>>,
}

impl Draws {
    fn new(slices: &Slices, block: usize, seed: u64) -> Draws {
        let m = slices.count();
        let blocks = (m as f64 / block as f64).round().max(1.0) as usize;
        let mut random = Random::new(seed);
        let stretches = (0..REPLICATES)
            .map(|_| {
                let mut stretches = Vec::with_capacity(blocks + 4);
                for _ in 0..blocks {
                    let from = random.below(m as u32) as usize;
                    let to = from + block;
                    stretches.push((from as u16, to.min(m) as u16));
                    // The end of the run goes on with its beginning.
                    if to > m {
                        stretches.push((0, (to - m) as u16));
                    }
                }
                stretches
            })
            .collect();
        Draws { stretches }
    }

    /// The variance of a figure over the runs put together anew.
    fn variance(&self, slices: &Slices, row: usize, statistic: Statistic) -> f64 {
        let (mut n, mut mean, mut squares) = (0.0, 0.0, 0.0);
        for stretches in &self.stretches {
            let Some(value) = figure(slices, row, statistic, stretches) else { continue };
            n += 1.0;
            let off: f64 = value - mean;
            mean += off / n;
            squares += off * (value - mean);
        }
        if n > 1.0 { squares / (n - 1.0) } else { 0.0 }
    }
}

fn over<T: Copy + Into<f64>>(running: &[T], stretches: &[(u16, u16)]) -> f64 {
    stretches
        .iter()
        .map(|&(from, to)| running[usize::from(to)].into() - running[usize::from(from)].into())
        .sum()
}

/// A figure of a run that is made of these stretches; none where they hold no command.
fn figure(slices: &Slices, row: usize, statistic: Statistic, stretches: &[(u16, u16)]) -> Option<f64> {
    let n = over(&slices.commands, stretches);
    if n <= 0.0 {
        return None;
    }
    Some(match statistic.share() {
        Some(share) => {
            let ladder = &slices.ladders[row];
            let (cut, part) = ladder.search(share * n, stretches);
            match cut.checked_sub(1) {
                None => ladder.cuts[0] as f64,
                Some(before) => {
                    let (low, high) = (ladder.cuts[before] as f64, ladder.cuts[cut] as f64);
                    low + part * (high - low)
                }
            }
        }
        None if statistic == Statistic::Mean => over(&slices.sums[row], stretches) / n,
        None => {
            let below = |share: f64| {
                let (cut, part) = slices.latencies.search(share * n, stretches);
                let at = |cut: usize| over(&slices.below[row][cut], stretches);
                let before = cut.checked_sub(1).map_or(0.0, at);
                before + part * (at(cut) - before)
            };
            (below(MIDDLE.1) - below(MIDDLE.0)) / ((MIDDLE.1 - MIDDLE.0) * n)
        }
    })
}

impl Ladder {
    /// The first cut at or below which so many commands lie, and which part of those between it and the cut
    /// before is needed.
    fn search(&self, rank: f64, stretches: &[(u16, u16)]) -> (usize, f64) {
        let count = |cut: usize| over(&self.counts[cut], stretches);
        let (mut from, mut to) = (0, self.cuts.len() - 1);
        while from < to {
            let middle = (from + to) / 2;
            if count(middle) >= rank {
                to = middle;
            } else {
                from = middle + 1;
            }
        }
        let before = from.checked_sub(1).map_or(0.0, count);
        let between = count(from) - before;
        (from, if between > 0.0 { ((rank - before) / between).clamp(0.0, 1.0) } else { 1.0 })
    }
}

/// A figure of a side from that of each of its runs. Several runs say by themselves how much runs differ. Where
/// there is one, and `spread` of the other side's runs is known, that is taken for it too.
pub(crate) fn combine(runs: &[Estimate], spread: Option<Spread>) -> Option<Estimate> {
    let n = runs.len() as f64;
    let first = runs.first()?;
    let value = runs.iter().map(|r| r.value).sum::<f64>() / n;
    let within = runs.iter().map(|r| r.error * r.error).sum::<f64>() / (n * n);
    let Some(spread) = Spread::of(runs).or(spread) else {
        let error = first.error.hypot(BETWEEN_RUNS * value);
        return Some(Estimate { error, ..*first });
    };
    // Few runs may lie close together by chance, but not closer than each is known.
    let variance = (spread.variance / n).max(within);
    Some(Estimate { value, error: variance.sqrt(), freedom: spread.freedom })
}

/// By how much the runs of one side differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    variance: f64,
    freedom: f64,
}

impl Spread {
    /// Of two runs or more.
    pub(crate) fn of(runs: &[Estimate]) -> Option<Spread> {
        let freedom = runs.len().checked_sub(1).filter(|&f| f > 0)? as f64;
        let mean = runs.iter().map(|r| r.value).sum::<f64>() / (freedom + 1.0);
        let squares: f64 = runs.iter().map(|r| (r.value - mean) * (r.value - mean)).sum();
        Some(Spread { variance: squares / freedom, freedom })
    }
}

#[cfg(test)]
mod tests {
    use super::politis_white;
    use crate::random::Random;

    fn series(correlation: f64, seed: u64) -> Vec<f64> {
        let mut random = Random::new(seed);
        let mut value = 0.0;
        (0..256)
            .map(|_| {
                let noise: f64 = (0..12).map(|_| random.unit()).sum::<f64>() - 6.0;
                value = correlation * value + (1.0 - correlation * correlation).sqrt() * noise;
                value
            })
            .collect()
    }

    #[test]
    fn blocks_are_as_long_as_a_series_hangs_together() {
        let mean =
            |correlation: f64| (0..40).map(|s| politis_white(&series(correlation, s))).sum::<f64>() / 40.0;
        let (none, some, much) = (mean(0.0), mean(0.5), mean(0.9));
        // For an autoregression the best length is known: (n / (2/3))^(1/3) (2 r / (1 - r^2))^(2/3) ...
        assert!(none < 4.0, "{none}");
        assert!((4.0..16.0).contains(&some), "{some}");
        assert!(much > 1.5 * some, "{some} {much}");
        assert_eq!(politis_white(&[3.0; 64]), 0.0);
    }
}
