//! Sorts whole numbers by their digits instead of comparing them: on a million commands several times
//! faster, and as fast without optimisation of what is called. It knows nothing of commands.

/// Bits that one pass sorts by.
const DIGIT: u32 = 11;

/// Puts `from` into `to` by a digit; equals keep their order. Returns whether there was anything to do.
fn pass<T: Copy>(from: &[T], to: &mut [T], digit: impl Fn(T) -> usize) -> bool {
    let mut places = [0usize; 1 << DIGIT];
    for &value in from {
        places[digit(value)] += 1;
    }
    if places.contains(&from.len()) {
        return false;
    }
    let mut before = 0;
    for place in &mut places {
        before += std::mem::replace(place, before);
    }
    for &value in from {
        let place = &mut places[digit(value)];
        to[*place] = value;
        *place += 1;
    }
    true
}

/// Sorts by the lowest `bits` of `key`; equals keep their order. `other` is scratch.
fn by_bits<T: Copy + Default>(values: &mut Vec<T>, other: &mut Vec<T>, bits: u32, key: impl Fn(T) -> u64) {
    other.resize(values.len(), T::default());
    for low in (0..bits).step_by(DIGIT as usize) {
        let mask = (1 << DIGIT.min(bits - low)) - 1;
        if pass(values, other, |v| (key(v) >> low & mask) as usize) {
            std::mem::swap(values, other);
        }
    }
}

fn bits_of(value: u64) -> u32 {
    u64::BITS - value.leading_zeros()
}

/// How far to shift a value of up to `span` so that `n` values, spread evenly, have few equals.
fn coarse(span: u64, n: usize) -> u32 {
    bits_of(span).saturating_sub((bits_of(n as u64) + 2).min(32))
}

/// Sorts words by their upper half, of which `most` is the largest; equals keep their order.
pub(crate) fn by_upper_half(words: &mut Vec<u64>, most: u32) {
    by_bits(words, &mut Vec::new(), bits_of(most.into()), |w| w >> 32);
}

/// The places of values in ascending order. `exactly` puts places whose values are close to each other in
/// order.
pub(crate) fn order(
    values: impl ExactSizeIterator<Item = i64> + Clone,
    exactly: impl Fn(&u32, &u32) -> std::cmp::Ordering,
) -> Vec<u32> {
    let (least, most) = values.clone().fold((i64::MAX, i64::MIN), |m, v| (m.0.min(v), m.1.max(v)));
    let span = if least <= most { most.wrapping_sub(least) as u64 } else { 0 };
    let shift = coarse(span, values.len());
    let mut words: Vec<u64> =
        values.enumerate().map(|(n, v)| v.wrapping_sub(least) as u64 >> shift << 32 | n as u64).collect();
    by_upper_half(&mut words, (span >> shift) as u32);
    let mut order: Vec<u32> = words.iter().map(|&w| w as u32).collect();
    let mut from = 0;
    while from < words.len() {
        let mut to = from + 1;
        while to < words.len() && words[to] >> 32 == words[from] >> 32 {
            to += 1;
        }
        if to - from > 1 {
            order[from..to].sort_unstable_by(&exactly);
        }
        from = to;
    }
    order
}

/// Sorts numbers. `other` is scratch.
pub(crate) fn sort(values: &mut Vec<i64>, other: &mut Vec<i64>) {
    if values.len() < 1 << DIGIT {
        values.sort_unstable();
        return;
    }
    let (least, most) = values.iter().fold((i64::MAX, i64::MIN), |m, &v| (m.0.min(v), m.1.max(v)));
    let span = most.wrapping_sub(least) as u64;
    let shift = coarse(span, values.len());
    by_bits(values, other, bits_of(span >> shift), |v| v.wrapping_sub(least) as u64 >> shift);
    let bucket = |v: i64| v.wrapping_sub(least) as u64 >> shift;
    let mut from = 0;
    for to in 1..=values.len() {
        if to < values.len() && bucket(values[to]) == bucket(values[from]) {
            continue;
        }
        if to - from == 2 {
            if values[from] > values[from + 1] {
                values.swap(from, from + 1);
            }
        } else if to - from > 2 {
            values[from..to].sort_unstable();
        }
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use super::{by_upper_half, order, sort};
    use proptest::prelude::*;

    fn values() -> impl Strategy<Value = Vec<i64>> {
        prop_oneof![
            proptest::collection::vec(any::<i64>(), 0..5_000),
            proptest::collection::vec(0i64..300, 0..5_000),
            proptest::collection::vec(prop_oneof![0i64..300, Just(1 << 50)], 0..5_000),
        ]
    }

    proptest! {
        #[test]
        fn numbers_are_sorted(mut v in values()) {
            let mut expected = v.clone();
            expected.sort_unstable();
            sort(&mut v, &mut Vec::new());
            prop_assert_eq!(v, expected);
        }

        #[test]
        fn places_are_ordered_by_value(v in values()) {
            let exactly = |&a: &u32, &b: &u32| (v[a as usize], a).cmp(&(v[b as usize], b));
            let mut expected: Vec<u32> = (0..v.len() as u32).collect();
            expected.sort_unstable_by(exactly);
            prop_assert_eq!(order(v.iter().copied(), exactly), expected);
        }

        #[test]
        fn equal_upper_halves_keep_their_order(mut v in proptest::collection::vec(0u32..5_000, 0..5_000)) {
            let mut words: Vec<u64> = v.iter().zip(0..).map(|(&v, n)| u64::from(v) << 32 | n).collect();
            let mut expected = words.clone();
            expected.sort_unstable();
            v.sort_unstable();
            by_upper_half(&mut words, v.last().copied().unwrap_or(0));
            prop_assert_eq!(words, expected);
        }
    }
}
