//! Finds where a figure changed from one run to the next and stayed so. What is looked at is the order of the runs' values,
//! so that no single run decides.
//!
//! The statistic of a cut is the rank sum of the runs before it, standardised, within windows of many lengths (seeded binary
//! segmentation), so that a figure which went up and down again is found too; that of a series is the largest of all cuts in
//! all windows. How large it may be by chance is told by permutation: the runs are put into random orders, and of each order
//! the largest statistic of *all* series is kept (Westfall and Young), so that [`CHANCE`] is the chance of even one false
//! change in all figures of all classes together, and figures that move together cost nothing. What lies before and after a
//! change is searched again.

use super::series::{LEAST, Series, median};
use crate::compare::Floor;
use crate::random::Random;
use rayon::prelude::*;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// The chance of a false change, trend or outlier in a batch of which all runs are alike: of each of the three.
pub(crate) const CHANCE: f64 = 0.005;
/// Random orders: of so few, one may be as strong as what is no chance.
const ORDERS: u64 = 399;
/// The least number of runs on either side of a change.
const EDGE: usize = 4;
/// How often what a change leaves is searched again.
const DEPTH: usize = 8;

/// A figure that changed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shift {
    pub(crate) series: usize,
    /// Place in the series of the first run after the change.
    pub(crate) at: usize,
    /// Places of the runs before and after between which it is the only change.
    pub(crate) between: Range<usize>,
    /// Places at which it may as well be.
    pub(crate) near: Range<usize>,
    /// The standardised rank sum.
    pub(crate) strength: f64,
    /// The chance of as strong a change, or a stronger one, anywhere in the batch if nothing changed.
    pub(crate) chance: f64,
    /// Medians of the runs before and after, ns.
    pub(crate) before: f64,
    pub(crate) after: f64,
}

/// By how much the square of a cut's strength may be less than the strongest's for the change to lie there as well.
const AS_WELL: f64 = 9.0;
/// Windows of a length are so much shorter than those of the one before, and overlap by half.
const SHORTER: f64 = 0.7;

/// A stretch of a series that is searched.
struct Stretch {
    series: usize,
    range: Range<usize>,
    /// Ranks less their mean.
    ranks: Vec<f64>,
    /// Whether a change may be before the run at each place.
    may: Vec<bool>,
    /// Where windows of each length begin, and what makes their sums of ranks statistics.
    windows: Vec<Windows>,
}

/// All windows of one length.
struct Windows {
    length: usize,
    starts: Vec<usize>,
    /// For each number of runs before the cut: `n (n - 1) / (k (n - k))`.
    weights: Vec<f64>,
}

/// The strongest cut of an order of runs.
#[derive(Clone, Copy, Debug, Default)]
struct Cut {
    /// The square of its strength.
    square: f64,
    before: usize,
    /// The window that it is in.
    from: usize,
    length: usize,
}

impl Windows {
    /// Of all lengths for so many runs.
    fn all(runs: usize) -> Vec<Windows> {
        let mut all = Vec::new();
        let mut length = runs as f64;
        while length >= LEAST as f64 {
            let n = length as usize;
            let many = (2 * (runs - n)).div_ceil(n);
            let start = |i: usize| (i * (runs - n)).checked_div(many).unwrap_or(0);
            let weight = |k: usize| n as f64 * (n as f64 - 1.0) / (k as f64 * (n - k) as f64);
            all.push(Windows {
                length: n,
                starts: (0..=many).map(start).collect(),
                weights: (0..n).map(|k| if k == 0 { 0.0 } else { weight(k) }).collect(),
            });
            length *= SHORTER;
        }
        all
    }
}

impl Stretch {
    fn of(series: usize, of: &Series, range: Range<usize>, cuts: &dyn Fn(usize, usize) -> bool) -> Stretch {
        let values = &of.values[range.clone()];
        let n = values.len();
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
        let mut ranks = vec![0.0; n];
        let mut place = 0.0;
        for same in order.chunk_by(|&a, &b| values[a] == values[b]) {
            let size = same.len() as f64;
            same.iter().for_each(|&run| ranks[run] = place + (size - n as f64) / 2.0);
            place += size;
        }
        let runs = &of.runs[range.clone()];
        let may = (0..n).map(|at| at > 0 && cuts(runs[at - 1], runs[at])).collect();
        Stretch { series, range, ranks, may, windows: Windows::all(n) }
    }

    /// Whether any change could be found.
    fn is_of_use(&self) -> bool {
        self.may.contains(&true) && self.ranks.iter().any(|&rank| rank != 0.0)
    }

    /// Sums of the ranks, and of their squares, of the runs before each place.
    fn sums(&self, order: impl Iterator<Item = usize>) -> Vec<(f64, f64)> {
        let mut sums = Vec::with_capacity(self.ranks.len() + 1);
        let mut sum = (0.0, 0.0);
        sums.push(sum);
        for run in order {
            let rank = self.ranks[run];
            sum = (sum.0 + rank, sum.1 + rank * rank);
            sums.push(sum);
        }
        sums
    }

    /// The squares of the strengths of the cuts in one window, by how many runs are before them in it.
    fn cuts<'a>(
        &'a self,
        sums: &'a [(f64, f64)],
        windows: &'a Windows,
        from: usize,
    ) -> impl Iterator<Item = (usize, f64)> + 'a {
        let n = windows.length;
        let (first, last) = (sums[from], sums[from + n]);
        let mean = (last.0 - first.0) / n as f64;
        let squares = last.1 - first.1 - mean * (last.0 - first.0);
        let scale = if squares > 1e-9 { squares.recip() } else { 0.0 };
        (EDGE..=n.saturating_sub(EDGE)).filter(move |k| self.may[from + k]).map(move |k| {
            let off = sums[from + k].0 - first.0 - k as f64 * mean;
            (k, off * off * windows.weights[k] * scale)
        })
    }

    /// The strongest cut with the runs in this order.
    fn strongest(&self, order: impl Iterator<Item = usize>) -> Cut {
        let sums = self.sums(order);
        let mut best = Cut::default();
        for windows in &self.windows {
            for &from in &windows.starts {
                for (k, square) in self.cuts(&sums, windows, from) {
                    if square > best.square {
                        best = Cut { square, before: from + k, from, length: windows.length };
                    }
                }
            }
        }
        best
    }

    /// The places around a cut at which it may as well be.
    fn near(&self, cut: &Cut) -> Range<usize> {
        let sums = self.sums(0..self.ranks.len());
        let Some(windows) = self.windows.iter().find(|w| w.length == cut.length) else {
            return cut.before..cut.before + 1;
        };
        let as_well = self
            .cuts(&sums, windows, cut.from)
            .filter(|(_, square)| *square >= cut.square - AS_WELL)
            .map(|(k, _)| cut.from + k);
        let places: Vec<usize> = as_well.collect();
        let first = places.first().copied().unwrap_or(cut.before).min(cut.before);
        first..places.last().copied().unwrap_or(cut.before).max(cut.before) + 1
    }
}

/// For each random order, the strongest change in any stretch.
fn by_chance(all: &[Series], stretches: &[Stretch]) -> Vec<f64> {
    // Figures of the same runs are put into the same orders.
    let mut alike: HashMap<&[usize], Vec<&Stretch>> = HashMap::new();
    for stretch in stretches {
        alike.entry(&all[stretch.series].runs[stretch.range.clone()]).or_default().push(stretch);
    }
    let mut groups: Vec<(&[usize], Vec<&Stretch>)> = alike.into_iter().collect();
    groups.sort_by_key(|group| group.0);
    let strongest = |number: u64| {
        let mut random = Random::new(number.wrapping_mul(0xd134_2543_de82_ef95));
        groups.iter().fold(0.0f64, |most, (runs, stretches)| {
            let mut order: Vec<usize> = (0..runs.len()).collect();
            for n in (1..order.len()).rev() {
                order.swap(n, random.below(n as u32 + 1) as usize);
            }
            let of = |stretch: &&Stretch| stretch.strongest(order.iter().copied()).square;
            stretches.iter().map(of).fold(most, f64::max)
        })
    };
    (1..=ORDERS).into_par_iter().map(strongest).collect()
}

/// All changes that are no chance and larger than the floor. `cuts` tells between which runs one may be.
pub(crate) fn shifts(all: &[Series], cuts: &dyn Fn(usize, usize) -> bool, floor: &Floor) -> Vec<Shift> {
    let stretch = |series: usize, range: Range<usize>| {
        (range.len() >= LEAST).then(|| Stretch::of(series, &all[series], range, cuts))
    };
    let mut found: Vec<Shift> = Vec::new();
    let mut left: Vec<Stretch> =
        all.iter().enumerate().filter_map(|(n, s)| stretch(n, 0..s.runs.len())).collect();
    for _ in 0..DEPTH {
        left.retain(Stretch::is_of_use);
        if left.is_empty() {
            break;
        }
        let chances = by_chance(all, &left);
        let mut next = Vec::new();
        for searched in &left {
            let cut = searched.strongest(0..searched.range.len());
            let stronger = chances.iter().filter(|&&by_chance| by_chance >= cut.square).count();
            let chance = (1 + stronger) as f64 / (1 + ORDERS) as f64;
            if chance > CHANCE {
                continue;
            }
            let values = &all[searched.series].values;
            let start = searched.range.start;
            let at = start + cut.before;
            let (first, second) = (searched.range.start..at, at..searched.range.end);
            // Of its window: beyond it there may be other changes.
            let window = start + cut.from..start + cut.from + cut.length;
            let (from, to) = (median(&values[window.start..at]), median(&values[at..window.end]));
            if (to - from).abs() < floor.at(from) {
                continue;
            }
            let near = searched.near(&cut);
            found.push(Shift {
                series: searched.series,
                at,
                between: searched.range.clone(),
                near: start + near.start..start + near.end,
                strength: cut.square.sqrt(),
                chance,
                before: from,
                after: to,
            });
            next.extend([first, second].into_iter().filter_map(|range| stretch(searched.series, range)));
        }
        left = next;
    }
    found.sort_by_key(|shift| (shift.series, shift.at));
    settle(all, found, cuts, floor)
}

/// Puts each change of a figure to where it parts the runs best, between its neighbours, and takes the medians of what
/// lies between; what is below the floor then was none.
fn settle(
    all: &[Series],
    mut found: Vec<Shift>,
    cuts: &dyn Fn(usize, usize) -> bool,
    floor: &Floor,
) -> Vec<Shift> {
    for series in found.iter().map(|s| s.series).collect::<BTreeSet<_>>() {
        let (values, runs) = (&all[series].values, &all[series].runs);
        loop {
            let places: Vec<usize> = (0..found.len()).filter(|&n| found[n].series == series).collect();
            for (n, &place) in places.iter().enumerate() {
                let from = n.checked_sub(1).map_or(0, |n| found[places[n]].at);
                let to = places.get(n + 1).map_or(values.len(), |&next| found[next].at);
                let shift = &mut found[place];
                let may = |at: &usize| at - from >= EDGE && to - at >= EDGE && cuts(runs[at - 1], runs[*at]);
                let candidates = shift.near.clone().filter(|at| (from..to).contains(at)).filter(may);
                let rest = |at: usize| off_median(&values[from..at]) + off_median(&values[at..to]);
                shift.at = candidates.min_by(|&a, &b| rest(a).total_cmp(&rest(b))).unwrap_or(shift.at);
                shift.between = from..to;
                shift.before = median(&values[from..shift.at]);
                shift.after = median(&values[shift.at..to]);
            }
            let is_small =
                |n: &usize| (found[*n].after - found[*n].before).abs() < floor.at(found[*n].before);
            let Some(small) = places.into_iter().find(is_small) else { break };
            found.remove(small);
        }
    }
    found
}

/// By how much values are off their median, together.
fn off_median(values: &[f64]) -> f64 {
    let middle = median(values);
    values.iter().map(|v| (v - middle).abs()).sum()
}

#[cfg(test)]
mod tests {
    use super::{Shift, shifts};
    use crate::batch::series::{Quantile, Series};
    use crate::compare::{ClassName, Floor};
    use crate::random::Random;
    use proptest::prelude::*;
    use run_format::Operation;

    fn series(values: Vec<f64>) -> Series {
        let class = ClassName { operation: Operation::Read, bytes: 4096, error: false };
        let runs = (0..values.len()).collect();
        Series { stratum: 0, class, stage: "storage".into(), quantile: Quantile::P50, runs, values }
    }

    fn found(values: Vec<f64>) -> Vec<Shift> {
        shifts(&[series(values)], &|_, _| true, &Floor::default())
    }

    /// Values around these levels, each for so many runs.
    fn steps(seed: u64, levels: &[(f64, usize)]) -> Vec<f64> {
        let mut random = Random::new(seed);
        let levels = levels.iter().flat_map(|&(level, runs)| std::iter::repeat_n(level, runs));
        levels.map(|level| level * (0.995 + f64::from(random.below(10_000)) * 1e-6)).collect()
    }

    #[test]
    fn a_step_is_found_where_it_is() {
        let all = found(steps(1, &[(10_000.0, 20), (10_600.0, 20)]));
        let [shift] = &all[..] else { panic!("{all:?}") };
        assert_eq!(shift.at, 20);
        assert!((shift.after / shift.before - 1.06).abs() < 0.01, "{shift:?}");
    }

    #[test]
    fn several_steps_are_found_and_a_bump_too() {
        let all = found(steps(2, &[(10_000.0, 20), (12_000.0, 20), (10_000.0, 20), (9_000.0, 20)]));
        assert_eq!(all.iter().map(|s| s.at).collect::<Vec<_>>(), [20, 40, 60], "{all:?}");
        assert!(all[0].after > all[0].before && all[1].after < all[1].before);
    }

    #[test]
    fn what_is_small_or_rests_on_few_runs_is_none() {
        assert_eq!(found(steps(3, &[(10_000.0, 20), (10_150.0, 20)])), []);
        assert_eq!(found(steps(4, &[(10_000.0, 4), (20_000.0, 4)])), []);
        assert_eq!(found(vec![10_000.0; 50]), []);
        // One run, however far off.
        let mut one = steps(5, &[(10_000.0, 40)]);
        one[20] = 1e9;
        assert_eq!(found(one), []);
    }

    #[test]
    fn only_where_it_may_be() {
        let values = steps(6, &[(10_000.0, 20), (10_600.0, 20)]);
        let at_15 = shifts(&[series(values.clone())], &|_, after| after == 15, &Floor::default());
        assert!(at_15.iter().all(|s| s.at == 15));
        assert_eq!(shifts(&[series(values)], &|_, _| false, &Floor::default()), []);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn any_values_are_searched_without_harm(values in proptest::collection::vec(prop_oneof![Just(0.0), -1e18..1e18f64], 0..40)) {
            for shift in found(values.clone()) {
                prop_assert!(shift.at > 0 && shift.at < values.len() && shift.chance > 0.0);
            }
        }
    }
}
