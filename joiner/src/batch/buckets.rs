//! Histograms as they are kept on disk: which buckets have how many values, in a few bytes each. What a bucket is, is
//! `histogram`'s.

use crate::histogram::Histogram;
use serde::{Deserialize, Serialize};

/// The buckets of one figure of one run, and what is known of it exactly.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Buckets {
    /// Their values' number.
    pub count: u64,
    /// Their sum, ns.
    pub sum_ns: f64,
    /// The least, ns.
    pub min_ns: i64,
    /// The largest, ns.
    pub max_ns: i64,
    /// For each bucket with values, its distance from the one before and its number of values, both as LEB128.
    #[serde(skip)]
    pub(crate) bytes: Vec<u8>,
}

/// No bucket's number is larger.
const MOST: i32 = 1 << 16;

impl Buckets {
    pub(crate) fn of(histogram: &Histogram) -> Buckets {
        let (min_ns, max_ns) = histogram.range();
        let mut bytes = Vec::new();
        let mut last = 0;
        for (bucket, n) in histogram.buckets() {
            let step = i64::from(bucket) - last;
            last = i64::from(bucket);
            put(&mut bytes, ((step << 1) ^ (step >> 63)) as u64);
            put(&mut bytes, n);
        }
        Buckets { count: histogram.count(), sum_ns: histogram.sum() as f64, min_ns, max_ns, bytes }
    }

    /// Bucket by bucket in order: its number and how many values it has. Ends where the bytes make no sense.
    pub(crate) fn each(&self) -> impl Iterator<Item = (i32, u64)> + '_ {
        let mut bytes = &self.bytes[..];
        let mut last = 0i64;
        std::iter::from_fn(move || {
            let step = take(&mut bytes)?;
            let n = take(&mut bytes)?;
            last = last.checked_add((step >> 1) as i64 ^ -((step & 1) as i64))?;
            let bucket = i32::try_from(last).ok().filter(|b| b.abs() <= MOST)?;
            Some((bucket, n))
        })
    }

    /// Adds it to a histogram.
    pub(crate) fn add_to(&self, histogram: &mut Histogram) {
        if self.count > 0 {
            histogram.merge_buckets(self.each(), self.count, self.sum_ns as i128, (self.min_ns, self.max_ns));
        }
    }
}

fn put(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::Buckets;
    use crate::histogram::Histogram;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_kept_is_what_was_there(values in proptest::collection::vec(-(1i64 << 50)..1 << 50, 0..2_000)) {
            let whole = Histogram::of(&values);
            let kept = Buckets::of(&whole);
            prop_assert_eq!(kept.each().collect::<Vec<_>>(), whole.buckets());
        }

        #[test]
        fn merged_runs_are_the_run_of_all(
            a in proptest::collection::vec(0i64..5_000_000, 0..2_000),
            b in proptest::collection::vec(0i64..5_000_000, 1..2_000),
        ) {
            let mut merged = Histogram::default();
            Buckets::of(&Histogram::of(&a)).add_to(&mut merged);
            Buckets::of(&Histogram::of(&b)).add_to(&mut merged);
            let whole = Histogram::of(&[a, b].concat());
            prop_assert_eq!(merged.buckets(), whole.buckets());
            prop_assert_eq!((merged.count(), merged.sum(), merged.range()), (whole.count(), whole.sum(), whole.range()));
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes: Vec<u8>) {
            let kept = Buckets { count: 3, bytes, ..Buckets::default() };
            let mut histogram = Histogram::default();
            kept.add_to(&mut histogram);
            prop_assert!(kept.each().all(|(bucket, _)| bucket.abs() <= super::MOST));
        }
    }
}
