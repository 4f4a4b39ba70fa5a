//! Decodes the values of a Parquet page as [`crate::RunWriter`] encodes them, straight into a vector: differences
//! (`DELTA_BINARY_PACKED`), places in a dictionary (`RLE_DICTIONARY`), and levels. It knows neither files nor columns.
//!
//! Every function gives `None` for bytes that it does not understand, be they damaged or only unusual: another reader
//! is asked then, which says what is wrong with them.

/// Takes an unsigned LEB128 number from the front of `bytes`.
fn unsigned(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for (n, &byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * n);
        if byte < 0x80 {
            *bytes = &bytes[n + 1..];
            return Some(value);
        }
    }
    None
}

/// Takes a zigzag LEB128 number.
fn signed(bytes: &mut &[u8]) -> Option<i64> {
    let value = unsigned(bytes)?;
    Some((value >> 1) as i64 ^ -((value & 1) as i64))
}

/// Takes so many bytes.
fn take<'a>(bytes: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(n)?;
    *bytes = rest;
    Some(taken)
}

/// Bytes that a number of so many bits each takes at most, beginning anywhere in a byte.
const REACH: usize = 16;

/// Calls `each` with every place of `into` and its number of `width` bits, packed from the lowest bit on. Others may
/// follow in `bytes`.
fn unpack<T>(bytes: &[u8], width: usize, into: &mut [T], mut each: impl FnMut(&mut T, u64)) -> Option<()> {
    if width > 64 || bytes.len() < (into.len() * width).div_ceil(8) {
        return None;
    }
    let mask = if width == 64 { u64::MAX } else { (1 << width) - 1 };
    // Those whose bytes can be read as one word; the last ones are read from a copy with room behind it.
    let words = match width {
        0 => into.len(),
        _ => (bytes.len().saturating_sub(REACH - 1) * 8 / width).min(into.len()),
    };
    let (front, back) = into.split_at_mut(words);
    let mut bit = 0;
    if width <= 57 {
        for value in front {
            let word =
                bytes.get(bit / 8..bit / 8 + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
            each(value, word >> (bit % 8) & mask);
            bit += width;
        }
    } else {
        for value in front {
            each(value, wide(bytes, bit) & mask);
            bit += width;
        }
    }
    // No more than a word's and a value's bytes are left.
    let rest = bytes.get(bit / 8..).unwrap_or_default();
    let mut padded = [0; 4 * REACH];
    let left = rest.len().min(padded.len());
    padded[..left].copy_from_slice(&rest[..left]);
    let mut bit = bit % 8;
    for value in back {
        each(value, wide(&padded, bit) & mask);
        bit += width;
    }
    Some(())
}

/// The 64 bits from a bit on; 0 where there are not [`REACH`] bytes.
fn wide(bytes: &[u8], bit: usize) -> u64 {
    let word =
        bytes.get(bit / 8..bit / 8 + REACH).and_then(|b| b.try_into().ok()).map_or(0, u128::from_le_bytes);
    (word >> (bit % 8)) as u64
}

/// Fills `values` with differences summed up, each put through `of`.
pub(crate) fn differences<T>(mut bytes: &[u8], values: &mut [T], of: impl Fn(i64) -> T) -> Option<()> {
    let Some((first, mut rest)) = values.split_first_mut() else { return Some(()) };
    let block = usize::try_from(unsigned(&mut bytes)?).ok()?;
    let parts = usize::try_from(unsigned(&mut bytes)?).ok()?;
    let all = usize::try_from(unsigned(&mut bytes)?).ok()?;
    let mut value = signed(&mut bytes)?;
    if all != rest.len() + 1 || parts == 0 || parts > 1 << 10 || block > 1 << 20 || block % parts != 0 {
        return None;
    }
    let of_part = block / parts;
    if of_part == 0 || of_part % 8 != 0 {
        return None;
    }
    *first = of(value);
    while !rest.is_empty() {
        let least = signed(&mut bytes)?;
        let widths = take(&mut bytes, parts)?;
        for &width in widths {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at_mut(of_part.min(rest.len()));
            rest = later;
            unpack(bytes, width.into(), now, |place, more| {
                value = value.wrapping_add(least).wrapping_add(more as i64);
                *place = of(value);
            })?;
            take(&mut bytes, of_part / 8 * usize::from(width))?;
        }
    }
    Some(())
}

/// Fills `values` with runs and packed numbers of `width` bits, each put through `of`: the hybrid of levels and of
/// places in a dictionary.
fn hybrid<T: Copy>(
    mut bytes: &[u8],
    width: usize,
    mut values: &mut [T],
    of: impl Fn(u64) -> Option<T>,
) -> Option<()> {
    if width > 32 {
        return None;
    }
    // What `of` has no value for is told at the end, so that no packed value needs a branch of its own.
    let mut all = true;
    while !values.is_empty() {
        let header = unsigned(&mut bytes)?;
        let n = usize::try_from(header >> 1).ok()?;
        if header & 1 == 0 {
            let mut word = [0; 8];
            let packed = take(&mut bytes, width.div_ceil(8))?;
            word[..packed.len()].copy_from_slice(packed);
            let (now, later) = values.split_at_mut(n.min(values.len()));
            now.fill(of(u64::from_le_bytes(word))?);
            values = later;
            // A run of nothing would go on for ever only where there are bytes for ever.
        } else {
            let n = n.checked_mul(8)?;
            let (now, later) = values.split_at_mut(n.min(values.len()));
            values = later;
            // The last group may be cut where its values are.
            unpack(bytes, width, now, |place, v| match of(v) {
                Some(value) => *place = value,
                None => all = false,
            })?;
            let length = (n / 8).checked_mul(width)?.min(bytes.len());
            take(&mut bytes, length)?;
        }
    }
    all.then_some(())
}

/// Fills `values` with the values of a dictionary at the places that a page tells.
pub(crate) fn places<T: Copy>(bytes: &[u8], dictionary: &[T], values: &mut [T]) -> Option<()> {
    let Some((&width, bytes)) = bytes.split_first() else {
        return values.is_empty().then_some(());
    };
    hybrid(bytes, width.into(), values, |place| dictionary.get(usize::try_from(place).ok()?).copied())
}

/// Which of `n` values are there, by their levels; an empty list where all are.
pub(crate) fn present(bytes: &[u8], n: usize) -> Option<Vec<bool>> {
    let mut front = bytes;
    // Mostly one run of ones.
    if let Some(header) = unsigned(&mut front)
        && header & 1 == 0
        && header >> 1 >= n as u64
        && front.first() == Some(&1)
    {
        return Some(Vec::new());
    }
    let mut there = vec![false; n];
    hybrid(bytes, 1, &mut there, |level| Some(level == 1))?;
    Some(there)
}

#[cfg(test)]
mod tests {
    use super::{differences, hybrid, present, unpack};
    use proptest::prelude::*;

    fn pack(values: &[u64], width: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; (values.len() * width).div_ceil(8)];
        for (n, value) in values.iter().enumerate() {
            for bit in (0..width).filter(|bit| value >> bit & 1 == 1) {
                bytes[(n * width + bit) / 8] |= 1 << ((n * width + bit) % 8);
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn packed_numbers_come_back(
            values in proptest::collection::vec(any::<u64>(), 0..80),
            width in 0usize..=64,
            more in 0usize..40,
        ) {
            let mask = if width == 64 { u64::MAX } else { (1 << width) - 1 };
            let values: Vec<u64> = values.into_iter().map(|v| v & mask).collect();
            let mut bytes = pack(&values, width);
            bytes.resize(bytes.len() + more, 0xff);
            let mut back = vec![0; values.len()];
            unpack(&bytes, width, &mut back, |place, v| *place = v).unwrap();
            prop_assert_eq!(back, values);
        }

        #[test]
        fn whatever_the_bytes_nothing_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), n in 0usize..300, width in 0usize..40) {
            let _ = differences(&bytes, &mut vec![0; n], |v| v);
            let _ = hybrid(&bytes, width, &mut vec![0; n], Some);
            let _ = present(&bytes, n);
        }
    }

    #[test]
    fn runs_of_nothing_end_with_their_bytes() {
        assert_eq!(hybrid(&[0; 64], 1, &mut [0; 3], Some), None);
        assert_eq!(hybrid(&[0; 64], 0, &mut [0; 3], Some), None);
    }

    #[test]
    fn differences_of_another_number_are_not_taken() {
        // Blocks of 128 in 4 parts, 2 values, 7 and no difference.
        let bytes = [0x80, 1, 4, 2, 14, 0, 0, 0, 0, 0];
        let mut values = [0; 2];
        assert_eq!(differences(&bytes, &mut values, |v| v), Some(()));
        assert_eq!(values, [7, 7]);
        assert_eq!(differences(&bytes, &mut [0; 3], |v| v), None);
    }
}
