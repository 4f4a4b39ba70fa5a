//! One class of one run cut into slices of time, with running sums over them: what the resampling draws from.
//! How many commands lie below a value within a stretch of slices takes two look-ups, whatever the run's length.

use super::input::Sample;
use super::moments::Plan;
use crate::random::Random;
use crate::stats::Distribution;
use rayon::prelude::*;

/// Slices that a run is cut into at most. A block of the resampling is a whole number of them.
const SLICES: usize = 256;
/// Commands that places of cuts are found among.
const PILOT: usize = 1 << 17;
/// Cuts on either side of a percentile.
const CUTS: usize = 20;
/// Shares of the commands, by latency, between which the typical ones lie.
pub(crate) const MIDDLE: (f64, f64) = (0.05, 0.95);
/// The percentiles that rows are compared by.
const PERCENTILES: [f64; 4] = [0.5, 0.9, 0.99, 0.999];

/// Values in order, and how many commands up to each slice lie at or below each: `counts[cut][slice]`.
#[derive(Debug)]
pub(crate) struct Ladder {
    pub(crate) cuts: Vec<i64>,
    pub(crate) counts: Vec<Vec<u32>>,
}

/// One class of one run.
#[derive(Debug)]
pub(crate) struct Slices {
    /// Length of a slice, ns.
    pub(crate) length: f64,
    /// Commands up to each slice.
    pub(crate) commands: Vec<u32>,
    /// Each row's sum up to each slice.
    pub(crate) sums: Vec<Vec<f64>>,
    /// Each row's values.
    pub(crate) ladders: Vec<Ladder>,
    /// Latencies near the ends of the middle.
    pub(crate) latencies: Ladder,
    /// Each row's sum, up to each slice, of the commands whose latency lies at or below a cut of `latencies`:
    /// `below[row][cut][slice]`.
    pub(crate) below: Vec<Vec<Vec<f64>>>,
    /// Each row's deviations from its typical value, added up over the typical commands of each slice: what the
    /// length of the blocks is found from.
    pub(crate) deviations: Vec<Vec<f64>>,
    /// Each row's typical value, mean and percentiles.
    pub(crate) figures: Vec<(f64, Distribution)>,
}

/// A row's value of every command.
fn values(sample: &Sample, plan: &Plan) -> Vec<i64> {
    let mut values = sample.columns[plan.columns[0]].clone();
    for &column in &plan.columns[1..] {
        for (value, more) in values.iter_mut().zip(&sample.columns[column]) {
            *value += more;
        }
    }
    values
}

impl Slices {
    pub(crate) fn of(sample: &Sample, rows: &[Plan]) -> Slices {
        let n = sample.len();
        let slices = (n / 8).clamp(24, SLICES);
        let first = sample.start.iter().copied().min().unwrap_or(0);
        let last = sample.start.iter().copied().max().unwrap_or(0);
        let span = (last - first + 1).max(1) as f64;
        let scale = slices as f64 / span;
        let slice: Vec<u16> = sample
            .start
            .iter()
            .map(|s| ((((s - first) as f64) * scale) as usize).min(slices - 1) as u16)
            .collect();
        let mut commands = vec![0u32; slices + 1];
        for &s in &slice {
            commands[usize::from(s) + 1] += 1;
        }
        accumulate(&mut commands);

        let latency = &sample.columns[0];
        let (low, high) = middle(latency);
        let mut cut_latencies = pilot(latency);
        let latencies =
            Ladder::of(latency, &slice, slices, cuts(&mut cut_latencies, latency, &[MIDDLE.0, MIDDLE.1]));
        let parts: Vec<_> = rows
            .par_iter()
            .map(|row| {
                let mut values = values(sample, row);
                let mut sums = vec![0.0; slices + 1];
                let mut below = vec![vec![0.0; slices + 1]; latencies.cuts.len()];
                let (mut typical, mut typical_commands) = (0.0, 0u64);
                for ((&value, &latency), &s) in values.iter().zip(latency).zip(&slice) {
                    let (value, s) = (value as f64, usize::from(s) + 1);
                    sums[s] += value;
                    below[latencies.place(latency)][s] += value;
                    if latency > low && latency <= high {
                        typical += value;
                        typical_commands += 1;
                    }
                }
                accumulate(&mut sums);
                cumulate(&mut below);
                let typical = typical / typical_commands.max(1) as f64;
                let mut deviations = vec![0.0; slices];
                for ((&value, &latency), &s) in values.iter().zip(latency).zip(&slice) {
                    if latency > low && latency <= high {
                        deviations[usize::from(s)] += value as f64 - typical;
                    }
                }
                let mut pilot = pilot(&values);
                let ladder = Ladder::of(&values, &slice, slices, cuts(&mut pilot, &values, &PERCENTILES));
                let distribution = Distribution::of(&mut values);
                (sums, below, deviations, ladder, (typical, distribution))
            })
            .collect();
        let mut made = Slices {
            length: span / slices as f64,
            commands,
            sums: Vec::new(),
            ladders: Vec::new(),
            latencies,
            below: Vec::new(),
            deviations: Vec::new(),
            figures: Vec::new(),
        };
        for (sums, below, deviations, ladder, figures) in parts {
            made.sums.push(sums);
            made.below.push(below);
            made.deviations.push(deviations);
            made.ladders.push(ladder);
            made.figures.push(figures);
        }
        made
    }

    /// Number of slices.
    pub(crate) fn count(&self) -> usize {
        self.commands.len() - 1
    }
}

impl Ladder {
    fn of(values: &[i64], slice: &[u16], slices: usize, cuts: Vec<i64>) -> Ladder {
        let counts = vec![vec![0; slices + 1]; cuts.len()];
        let mut ladder = Ladder { cuts, counts };
        for (&value, &s) in values.iter().zip(slice) {
            let place = ladder.place(value);
            ladder.counts[place][usize::from(s) + 1] += 1;
        }
        cumulate(&mut ladder.counts);
        ladder
    }

    /// The first cut that a value does not exceed; the last cut is the largest value.
    fn place(&self, value: i64) -> usize {
        self.cuts.partition_point(|&cut| cut < value).min(self.cuts.len() - 1)
    }
}

/// Running sums.
fn accumulate<T: Copy + std::ops::AddAssign>(values: &mut [T]) {
    for n in 1..values.len() {
        let before = values[n - 1];
        values[n] += before;
    }
}

/// Running sums over the slices of each cut, and over the cuts.
fn cumulate<T: Copy + std::ops::AddAssign>(by_cut: &mut [Vec<T>]) {
    for n in 0..by_cut.len() {
        accumulate(&mut by_cut[n]);
        if n > 0 {
            let (before, from) = by_cut.split_at_mut(n);
            for (value, less) in from[0].iter_mut().zip(&before[n - 1]) {
                *value += *less;
            }
        }
    }
}

/// Some of the values, sorted: enough to find places among all of them.
fn pilot(values: &[i64]) -> Vec<i64> {
    let mut some: Vec<i64> = if values.len() <= PILOT {
        values.to_vec()
    } else {
        // Not every n-th: loads have rhythms.
        let mut random = Random::new(values.len() as u64);
        (0..PILOT).map(|_| values[random.below(values.len() as u32) as usize]).collect()
    };
    some.sort_unstable();
    some
}

/// Values at and around some percentiles, close together near them, and the smallest and largest of all.
fn cuts(pilot: &mut [i64], all: &[i64], percentiles: &[f64]) -> Vec<i64> {
    let n = pilot.len();
    let at = |share: f64| pilot[((share * n as f64) as usize).min(n - 1)];
    let mut cuts = Vec::with_capacity(percentiles.len() * (2 * CUTS + 1) + 2);
    cuts.extend([all.iter().copied().min(), all.iter().copied().max()].into_iter().flatten());
    for &p in percentiles {
        cuts.push(at(p));
        let nearest = 0.25 * (p * (1.0 - p) / all.len() as f64).sqrt();
        for room in [-p, 1.0 - p] {
            let farthest = room.abs().min(0.25);
            let step = (farthest / nearest).max(1.0).powf(1.0 / CUTS as f64);
            let mut distance = nearest;
            for _ in 0..CUTS {
                cuts.push(at(p + distance.copysign(room)));
                distance *= step;
            }
        }
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// The latencies between which the typical commands lie: above the first, up to the second.
fn middle(latency: &[i64]) -> (i64, i64) {
    let mut sorted = latency.to_vec();
    let n = sorted.len();
    let rank = |share: f64| ((share * n as f64).ceil() as usize).clamp(1, n) - 1;
    let high = *sorted.select_nth_unstable(rank(MIDDLE.1)).1;
    let low = *sorted.select_nth_unstable(rank(MIDDLE.0)).1;
    // Where one value is most of the commands, it is the typical one.
    (if low == high { low - 1 } else { low }, high)
}
