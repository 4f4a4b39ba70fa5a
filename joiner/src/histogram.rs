//! Distributions of more values than are to be kept: exact count, sum, least and most, and percentiles within a
//! stated relative error. What is kept of two samples adds up to what is kept of both.
//!
//! Values are counted in buckets that are even on a logarithmic scale but for small ones: each power of two has 512
//! of them, so that no value is further than a thousandth from the middle of its bucket; below 1 024 every value has
//! a bucket of its own.

use crate::stats::{Distribution, needed};

/// A percentile is off by at most this share of itself.
pub(crate) const RELATIVE_ERROR: f64 = 0.001;
/// Buckets of a power of two, as bits.
const BITS: u32 = 9;
/// Values that are kept as they are before buckets are made: a class of few commands needs no more memory than
/// they take, and its percentiles are exact.
const PLAIN: usize = 1_024;

/// The sample of one figure.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    count: u64,
    sum: i128,
    least: i64,
    most: i64,
    /// All values, until there are too many.
    plain: Vec<i64>,
    /// Values in each bucket from the bucket `first` on.
    counts: Vec<u64>,
    first: i32,
}

/// The bucket of a value: those of negative values mirror the others.
fn bucket(value: i64) -> i32 {
    let size = value.unsigned_abs();
    let place = if size < 2 << BITS {
        size as i32
    } else {
        let octave = size.ilog2() - BITS;
        (octave << BITS) as i32 + (size >> octave) as i32
    };
    if value < 0 { -place } else { place }
}

/// The middle of a bucket.
pub(crate) fn middle(bucket: i32) -> i64 {
    let place = bucket.unsigned_abs();
    let size = if place < 2 << BITS {
        u64::from(place)
    } else {
        let octave = (place >> BITS) - 1;
        let from = u64::from(place - (octave << BITS)) << octave;
        from + ((1u64 << octave) - 1) / 2
    };
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    if bucket < 0 { -size } else { size }
}

impl Histogram {
    /// Of a sample.
    pub(crate) fn of(values: &[i64]) -> Histogram {
        let mut histogram = Histogram::default();
        histogram.add_all(values);
        histogram
    }

    /// Adds a value; without what [`Histogram::add_all`] does once for many.
    pub(crate) fn add(&mut self, value: i64) {
        self.note(1, i128::from(value), value, value);
        if self.counts.is_empty() && self.plain.len() < PLAIN {
            self.plain.push(value);
        } else {
            self.spread();
            self.count_in(bucket(value), 1);
        }
    }

    /// Adds values.
    pub(crate) fn add_all(&mut self, values: &[i64]) {
        /// Sums of so many values that are not larger fit into 64 bits.
        const MANY: usize = 1 << 12;
        const SMALL: u64 = 1 << 50;
        for values in values.chunks(MANY) {
            let bounds = values.iter().fold((i64::MAX, i64::MIN), |b, &v| (b.0.min(v), b.1.max(v)));
            let sum = match bounds.0.unsigned_abs().max(bounds.1.unsigned_abs()) {
                0..SMALL => i128::from(values.iter().sum::<i64>()),
                _ => values.iter().map(|&v| i128::from(v)).sum(),
            };
            self.note(values.len() as u64, sum, bounds.0, bounds.1);
            if self.counts.is_empty() && self.plain.len() + values.len() <= PLAIN {
                self.plain.extend_from_slice(values);
                continue;
            }
            self.spread();
            // So that there is room for all between them.
            self.count_in(bucket(bounds.0), 0);
            self.count_in(bucket(bounds.1), 0);
            let first = self.first;
            for &value in values {
                if let Some(count) = self.counts.get_mut((bucket(value) - first) as usize) {
                    *count += 1;
                }
            }
        }
    }

    /// Adds what another was given.
    pub(crate) fn merge(&mut self, other: &Histogram) {
        if other.count == 0 {
            return;
        }
        self.note(other.count, other.sum, other.least, other.most);
        if self.counts.is_empty() && other.counts.is_empty() && self.plain.len() + other.plain.len() <= PLAIN
        {
            self.plain.extend_from_slice(&other.plain);
            return;
        }
        self.spread();
        other.plain.iter().for_each(|&value| self.count_in(bucket(value), 1));
        let counted = (other.first..).zip(&other.counts).filter(|(_, n)| **n > 0);
        counted.for_each(|(bucket, &n)| self.count_in(bucket, n));
    }

    fn note(&mut self, count: u64, sum: i128, least: i64, most: i64) {
        self.least = if self.count == 0 { least } else { self.least.min(least) };
        self.most = if self.count == 0 { most } else { self.most.max(most) };
        self.count += count;
        self.sum += sum;
    }

    /// Puts the values that are kept as they are into buckets.
    fn spread(&mut self) {
        for value in std::mem::take(&mut self.plain) {
            self.count_in(bucket(value), 1);
        }
    }

    fn count_in(&mut self, bucket: i32, n: u64) {
        let place = i64::from(bucket) - i64::from(self.first);
        if let Some(count) = usize::try_from(place).ok().and_then(|p| self.counts.get_mut(p)) {
            *count += n;
            return;
        }
        self.grow(bucket);
        let place = (bucket - self.first) as usize;
        self.counts[place] += n;
    }

    /// Makes room for a bucket, and some beyond it.
    #[cold]
    fn grow(&mut self, bucket: i32) {
        const ROOM: i32 = 1 << BITS;
        if self.counts.is_empty() {
            self.first = bucket - ROOM / 2;
            self.counts = vec![0; ROOM as usize];
        } else if bucket < self.first {
            let more = (self.first - bucket + ROOM / 2) as usize;
            self.counts.splice(0..0, std::iter::repeat_n(0, more));
            self.first -= more as i32;
        } else {
            self.counts.resize((bucket - self.first + ROOM / 2) as usize, 0);
        }
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Histogram>() + self.plain.capacity() * 8 + self.counts.capacity() * 8
    }

    /// How many values it was given.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The sum of the values.
    pub(crate) fn sum(&self) -> i128 {
        self.sum
    }

    /// The least value and the most; 0 where there is none.
    pub(crate) fn range(&self) -> (i64, i64) {
        (self.least, self.most)
    }

    /// The buckets that have values, in order, with how many.
    pub(crate) fn buckets(&self) -> Vec<(i32, u64)> {
        if !self.plain.is_empty() {
            let mut places: Vec<i32> = self.plain.iter().map(|&value| bucket(value)).collect();
            places.sort_unstable();
            return places.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u64)).collect();
        }
        (self.first..).zip(&self.counts).filter(|(_, n)| **n > 0).map(|(bucket, &n)| (bucket, n)).collect()
    }

    /// Adds what another told of itself: its buckets, and how many values with what sum and range they are.
    pub(crate) fn merge_buckets(
        &mut self,
        buckets: impl Iterator<Item = (i32, u64)>,
        count: u64,
        sum: i128,
        (least, most): (i64, i64),
    ) {
        self.note(count, sum, least, most);
        self.spread();
        buckets.for_each(|(bucket, n)| self.count_in(bucket, n));
    }

    /// How many values lie in (bound before, bound], for each of some bounds that grow; those beyond the last are not
    /// among them. A value whose bucket's middle is beyond a bound counts as beyond it: bounds are met to within
    /// [`RELATIVE_ERROR`].
    pub(crate) fn within(&self, bounds: &[i64]) -> Vec<u64> {
        let mut within = vec![0; bounds.len()];
        let mut count = |value: i64, n: u64| {
            if let Some(bin) = within.get_mut(bounds.partition_point(|&bound| bound < value)) {
                *bin += n;
            }
        };
        self.plain.iter().for_each(|&value| count(value, 1));
        let counted = (self.first..).zip(&self.counts).filter(|(_, n)| **n > 0);
        counted.for_each(|(bucket, &n)| count(middle(bucket).clamp(self.least, self.most), n));
        within
    }

    /// Arithmetic mean.
    pub(crate) fn mean(&self) -> f64 {
        self.sum as f64 / self.count.max(1) as f64
    }

    /// A percentile by nearest rank; `None` where fewer than ten values lie above it.
    pub(crate) fn percentile(&self, p: f64) -> Option<i64> {
        if self.count < needed(p) {
            return None;
        }
        let rank = ((p * self.count as f64).ceil() as u64).clamp(1, self.count);
        if self.counts.is_empty() {
            let mut values = self.plain.clone();
            let at = usize::try_from(rank - 1).ok().filter(|at| *at < values.len())?;
            return Some(*values.select_nth_unstable(at).1);
        }
        let mut below = 0;
        let at = self.counts.iter().position(|&n| {
            below += n;
            below >= rank
        })?;
        Some(middle(self.first + at as i32).clamp(self.least, self.most))
    }

    /// Mean and percentiles, by nearest rank as [`Distribution`] has them.
    pub(crate) fn distribution(&self) -> Distribution {
        if self.counts.is_empty() {
            return match &self.plain[..] {
                [] => Distribution::default(),
                values => Distribution::of(&mut values.to_vec()),
            };
        }
        let percentile = |p: f64| self.percentile(p);
        Distribution {
            mean_ns: self.mean(),
            p50_ns: percentile(0.5),
            p90_ns: percentile(0.9),
            p99_ns: percentile(0.99),
            p999_ns: percentile(0.999),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Histogram, RELATIVE_ERROR, bucket, middle};
    use crate::stats::Distribution;
    use proptest::prelude::*;

    fn one_by_one(values: &[i64]) -> Histogram {
        let mut histogram = Histogram::default();
        values.iter().for_each(|&v| histogram.add(v));
        histogram
    }

    fn value() -> impl Strategy<Value = i64> {
        prop_oneof![
            -2_000i64..2_000,
            0i64..10_000_000,
            -(1i64 << 60)..1 << 60,
            Just(i64::MAX),
            Just(i64::MIN + 1)
        ]
    }

    fn close(found: Option<i64>, exact: Option<i64>) -> bool {
        match (found, exact) {
            (Some(f), Some(e)) => (f as f64 - e as f64).abs() <= (e as f64 * RELATIVE_ERROR).abs() + 0.5,
            (None, None) => true,
            _ => false,
        }
    }

    fn check(found: Distribution, values: &[i64]) {
        let exact = Distribution::of(&mut values.to_vec());
        assert_eq!(found.mean_ns, exact.mean_ns);
        for (f, e) in [
            (found.p50_ns, exact.p50_ns),
            (found.p90_ns, exact.p90_ns),
            (found.p99_ns, exact.p99_ns),
            (found.p999_ns, exact.p999_ns),
        ] {
            assert!(close(f, e), "{f:?} for {e:?}");
        }
    }

    proptest! {
        #[test]
        fn the_middle_of_a_bucket_is_in_it_and_near_its_values(v in value()) {
            let m = middle(bucket(v));
            prop_assert_eq!(bucket(m), bucket(v));
            prop_assert!(close(Some(m), Some(v)), "{} for {}", m, v);
        }

        #[test]
        fn buckets_tell_all_that_percentiles_need(values in proptest::collection::vec(value(), 0..3_000)) {
            let all = Histogram::of(&values);
            let mut again = Histogram::default();
            if !values.is_empty() {
                again.merge_buckets(all.buckets().into_iter(), all.count(), all.sum(), all.range());
            }
            prop_assert_eq!(again.count(), all.count());
            prop_assert_eq!(again.buckets(), all.buckets());
            if !values.is_empty() {
                check(again.distribution(), &values);
            }
        }

        #[test]
        fn buckets_are_in_the_order_of_values(a in value(), b in value()) {
            prop_assert!(a > b || bucket(a) <= bucket(b));
        }

        #[test]
        fn parts_add_up_to_the_whole(
            values in proptest::collection::vec(value(), 1..4_000),
            cuts in proptest::collection::vec(0usize..4_000, 0..5),
        ) {
            check(Histogram::of(&values).distribution(), &values);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(values.len())).collect();
            cuts.extend([0, values.len()]);
            cuts.sort_unstable();
            let mut merged = Histogram::default();
            cuts.windows(2).for_each(|c| merged.merge(&Histogram::of(&values[c[0]..c[1]])));
            check(merged.distribution(), &values);
            let mut at_once = Histogram::default();
            cuts.windows(2).for_each(|c| at_once.add_all(&values[c[0]..c[1]]));
            prop_assert_eq!(at_once.distribution(), one_by_one(&values).distribution());
        }
    }

    proptest! {
        #[test]
        fn values_lie_between_their_bounds(
            values in proptest::collection::vec(0i64..10_000_000, 0..3_000),
            mut bounds in proptest::collection::vec(1i64..11_000_000, 0..20),
        ) {
            bounds.sort_unstable();
            bounds.dedup();
            let within = Histogram::of(&values).within(&bounds);
            let mut sum = 0;
            for (bound, n) in bounds.iter().zip(within) {
                sum += n;
                let below = |share: f64| values.iter().filter(|v| **v as f64 <= *bound as f64 * share).count() as u64;
                let (least, most) = (below(1.0 - 2.0 * RELATIVE_ERROR), below(1.0 + 2.0 * RELATIVE_ERROR));
                prop_assert!((least..=most).contains(&sum), "{sum} up to {bound}: {least} to {most}");
            }
            prop_assert_eq!(Histogram::of(&values).sum(), values.iter().map(|&v| i128::from(v)).sum::<i128>());
            prop_assert_eq!(Histogram::of(&values).count(), values.len() as u64);
            let all = Histogram::of(&values).distribution();
            let each = [0.5, 0.9, 0.99, 0.999].map(|p| Histogram::of(&values).percentile(p));
            prop_assert_eq!(each, [all.p50_ns, all.p90_ns, all.p99_ns, all.p999_ns]);
        }
    }

    #[test]
    fn many_values_take_little_memory() {
        let mut histogram = Histogram::default();
        (0..1_000_000i64).for_each(|v| histogram.add(1_000 + v * 37 % 1_000_000));
        assert!(histogram.bytes() < 100_000, "{}", histogram.bytes());
    }
}
