//! Reads columns of a command segment straight into vectors that grow from segment to segment: several times quicker
//! than by way of a frame. What it does not understand it leaves to polars, and says only that it did not: what is
//! wrong with a file is not for it to tell.

use crate::packed;
use polars_parquet::parquet::encoding::Encoding;
use polars_parquet::parquet::metadata::{ColumnChunkMetadata, FileMetadata};
use polars_parquet::parquet::page::{DataPage, DataPageHeader, split_buffer_v1};
use polars_parquet::parquet::read::{BasicDecompressor, PageMetaData, PageReader, read_metadata};
use polars_parquet::read::PhysicalType;
use std::fs::File;
use std::io::Cursor;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// An open segment.
#[derive(Debug)]
pub struct Segment {
    file: File,
    length: u64,
    metadata: FileMetadata,
}

/// The types of a run's numbers, as they are in its columns.
pub trait Number: Copy {
    /// Its bits, and whether it has a sign.
    const BITS: (usize, bool);
    /// The number that is kept as this one, which may have more bits.
    fn of(kept: i64) -> Self;
}

macro_rules! numbers {
    ($($type:ty, $signed:literal;)+) => {
        $(impl Number for $type {
            const BITS: (usize, bool) = (size_of::<$type>() * 8, $signed);
            fn of(kept: i64) -> Self {
                kept as Self
            }
        })+
    };
}

numbers! { u8, false; u16, false; u32, false; u64, false; i64, true; }

impl Segment {
    /// Opens a segment; `None` where polars has to say what is wrong with it.
    #[must_use]
    pub fn open(path: &Path) -> Option<Segment> {
        let mut file = File::open(path).ok()?;
        let length = file.metadata().ok()?.len();
        let metadata = read_metadata(&mut file).ok()?;
        Some(Segment { file, length, metadata })
    }

    /// The rows of each of its row groups.
    #[must_use]
    pub fn heights(&self) -> Vec<usize> {
        self.metadata.row_groups.iter().map(|group| group.num_rows()).collect()
    }

    /// The row groups that are exactly these rows; `None` where there are none such.
    #[must_use]
    pub fn groups(&self, rows: Range<usize>) -> Option<Range<usize>> {
        let mut starts = vec![0];
        for rows in self.heights() {
            starts.push(starts.last().copied().unwrap_or(0) + rows);
        }
        Some(starts.binary_search(&rows.start).ok()?..starts.binary_search(&rows.end).ok()?)
    }

    /// Appends the numbers of a column in some row groups, each put through `of`, and `null` where there is none.
    /// Returns how many there are; where there is none, or no such column, `values` is left as it was. `None` where the
    /// column is of another type, damaged, or encoded in a way that only polars knows: what of it is in `values` then is
    /// to be thrown away.
    pub fn read<N: Number, T: Copy + Default>(
        &self,
        column: &str,
        groups: Range<usize>,
        null: T,
        of: impl Fn(N) -> T,
        values: &mut Vec<T>,
    ) -> Option<usize> {
        let before = values.len();
        let mut present = 0;
        for group in self.metadata.row_groups.get(groups)? {
            let Some(chunk) = group.columns_under_root_iter(column).and_then(|mut of| of.next()) else {
                return (present == 0).then_some(0);
            };
            let expected = values.len() + group.num_rows();
            if self.is_null(chunk, group.num_rows()) {
                values.resize(expected, null);
                continue;
            }
            present += self.chunk(chunk, expected, null, &of, values)?;
            if values.len() != expected {
                return None;
            }
        }
        if present == 0 {
            values.truncate(before);
        }
        Some(present)
    }

    /// Whether the statistics say that a column is null throughout.
    fn is_null(&self, chunk: &ColumnChunkMetadata, rows: usize) -> bool {
        use polars_parquet::parquet::statistics::Statistics;
        let nulls = match chunk.statistics(&self.metadata.footer_buf) {
            Some(Ok(Statistics::Int32(s))) => s.null_count,
            Some(Ok(Statistics::Int64(s))) => s.null_count,
            _ => None,
        };
        nulls == i64::try_from(rows).ok()
    }

    fn chunk<N: Number, T: Copy + Default>(
        &self,
        chunk: &ColumnChunkMetadata,
        expected: usize,
        null: T,
        of: &impl Fn(N) -> T,
        values: &mut Vec<T>,
    ) -> Option<usize> {
        let kind = &chunk.descriptor().descriptor;
        if !is_of::<N>(chunk) || kind.max_rep_level > 0 || kind.max_def_level > 1 {
            return None;
        }
        let range = chunk.byte_range();
        if range.end > self.length {
            return None;
        }
        let mut bytes = vec![0; usize::try_from(range.end.checked_sub(range.start)?).ok()?];
        self.file.read_exact_at(&mut bytes, range.start).ok()?;
        let reader = PageReader::new_with_page_meta(
            Cursor::new(bytes.into()),
            PageMetaData::from(chunk),
            Vec::new(),
            usize::MAX,
        );
        let mut pages = BasicDecompressor::new(reader, Vec::new());
        let dictionary = match pages.read_dict_page().ok()? {
            None => Vec::new(),
            Some(page) => plain(&page.buffer, page.num_values, of)?,
        };
        let mut present = 0;
        let mut dense = Vec::new();
        while let Some(page) = pages.next() {
            let page = page.ok()?;
            if page.num_values() > expected - values.len() {
                return None;
            }
            let page = page.decompress(&mut pages).ok()?;
            present += one_page(&page, kind.max_def_level > 0, &dictionary, null, of, &mut dense, values)?;
            pages.reuse_page_buffer(page);
        }
        Some(present)
    }
}

/// Whether a column is of a type, as [`crate::RunWriter`] writes it.
fn is_of<N: Number>(chunk: &ColumnChunkMetadata) -> bool {
    use polars_parquet::parquet::schema::types::{IntegerType, PrimitiveLogicalType};
    let kind = &chunk.descriptor().descriptor.primitive_type;
    let bits = match kind.logical_type {
        Some(PrimitiveLogicalType::Integer(kind)) => match kind {
            IntegerType::UInt8 => (8, false),
            IntegerType::UInt16 => (16, false),
            IntegerType::UInt32 => (32, false),
            IntegerType::UInt64 => (64, false),
            IntegerType::Int64 => (64, true),
            _ => return false,
        },
        None if kind.converted_type.is_none() => match kind.physical_type {
            PhysicalType::Int64 => (64, true),
            _ => return false,
        },
        _ => return false,
    };
    let physical = match kind.physical_type {
        PhysicalType::Int32 => 32,
        PhysicalType::Int64 => 64,
        _ => return false,
    };
    bits == N::BITS && physical == bits.0.max(32)
}

/// Bytes that a number takes where it is written plainly.
const fn width<N: Number>() -> usize {
    if N::BITS.0 == 64 { 8 } else { 4 }
}

/// So many numbers that are written plainly.
fn plain<N: Number, T>(bytes: &[u8], n: usize, of: &impl Fn(N) -> T) -> Option<Vec<T>> {
    let bytes = bytes.get(..n.checked_mul(width::<N>())?)?;
    let number = |b: &[u8]| match b {
        [a, b, c, d] => N::of(i32::from_le_bytes([*a, *b, *c, *d]).into()),
        b => N::of(b.try_into().map_or(0, i64::from_le_bytes)),
    };
    Some(bytes.chunks_exact(width::<N>()).map(|b| of(number(b))).collect())
}

/// Appends the values of a page; returns how many are there. `dense` is scratch.
fn one_page<N: Number, T: Copy + Default>(
    page: &DataPage,
    nullable: bool,
    dictionary: &[T],
    null: T,
    of: &impl Fn(N) -> T,
    dense: &mut Vec<T>,
    values: &mut Vec<T>,
) -> Option<usize> {
    // Of the other kind of page nothing is compressed but the values.
    let DataPageHeader::V1(header) = page.header() else { return None };
    // A damaged header may name an encoding that there is not.
    let encoding: Encoding = header.encoding.try_into().ok()?;
    let n = page.num_values();
    if nullable && page.buffer().len() < 4 {
        return None;
    }
    let parts = split_buffer_v1(page.buffer(), false, nullable).ok()?;
    let there = if nullable { packed::present(parts.def, n)? } else { Vec::new() };
    let decode = |into: &mut [T]| match encoding {
        Encoding::DeltaBinaryPacked => packed::differences(parts.values, into, |v| of(N::of(v))),
        Encoding::RleDictionary | Encoding::PlainDictionary => packed::places(parts.values, dictionary, into),
        Encoding::Plain => {
            into.copy_from_slice(&plain(parts.values, into.len(), of)?);
            Some(())
        }
        _ => None,
    };
    let from = values.len();
    values.resize(from.checked_add(n)?, null);
    let into = &mut values[from..];
    if there.is_empty() {
        decode(into)?;
        return Some(n);
    }
    let present = there.iter().filter(|there| **there).count();
    dense.clear();
    dense.resize(present, null);
    decode(dense)?;
    let mut next = dense.iter();
    for (place, there) in into.iter_mut().zip(there) {
        if there && let Some(value) = next.next() {
            *place = *value;
        }
    }
    Some(present)
}

#[cfg(test)]
mod tests {
    use super::Segment;
    use crate::writer::write_parquet;
    use polars::prelude::{Column, DataFrame, IntoColumn, NamedFrom, Series};
    use proptest::prelude::*;
    use std::path::PathBuf;
    use tempfile::TempDir;

    fn written(columns: Vec<Column>) -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0.parquet");
        write_parquet(&path, DataFrame::new(columns[0].len(), columns).unwrap()).unwrap();
        (folder, path)
    }

    fn column<'a, T: ?Sized>(name: &str, values: &'a T) -> Column
    where
        Series: NamedFrom<&'a T, T>,
    {
        Series::new(name.into(), values).into_column()
    }

    /// What is read of a column, after a number that was there before.
    fn read(segment: &Segment, name: &str, rows: usize) -> Option<(usize, Vec<i64>)> {
        let groups = segment.groups(0..rows).unwrap();
        let mut values = vec![-1];
        let present = segment.read::<i64, i64>(name, groups, i64::MIN, |v| v, &mut values)?;
        assert_eq!(values.remove(0), -1);
        Some((present, values))
    }

    fn time() -> impl Strategy<Value = Option<i64>> {
        prop_oneof![
            4 => (0i64..1 << 20).prop_map(|t| Some((1 << 45) + t)),
            1 => any::<i64>().prop_map(Some),
            2 => Just(None),
        ]
    }

    fn few() -> impl Strategy<Value = (u8, u16, u32, u64)> {
        prop_oneof![
            Just((1, 2, 3, 4)),
            (any::<u8>(), any::<u16>(), any::<u32>(), any::<u64>()),
            (0u8..3, 0u16..300, 0u32..5, 0u64..1 << 40),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_was_written_is_read(
            rows in proptest::collection::vec((few(), time(), 0i64..1 << 30), 1..2_000),
        ) {
            let (mut a, mut b, mut c, mut d) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            rows.iter().for_each(|((u8, u16, u32, u64), ..)| {
                a.push(*u8);
                b.push(*u16);
                c.push(*u32);
                d.push(*u64);
            });
            let times: Vec<Option<i64>> = rows.iter().map(|r| r.1).collect();
            let whole: Vec<i64> = rows.iter().map(|r| r.2).collect();
            let (_folder, path) = written(vec![
                column("a", &a[..]),
                column("b", &b[..]),
                column("c", &c[..]),
                column("d", &d[..]),
                column("times", &times[..]),
                column("whole", &whole[..]),
            ]);
            let segment = Segment::open(&path).unwrap();
            let groups = segment.groups(0..rows.len()).unwrap();
            let (mut aa, mut bb, mut cc, mut dd) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            let all = Some(rows.len());
            prop_assert_eq!(segment.read("a", groups.clone(), 0, |v: u8| v, &mut aa), all);
            prop_assert_eq!(segment.read("b", groups.clone(), 0, |v: u16| v, &mut bb), all);
            prop_assert_eq!(segment.read("c", groups.clone(), 0, |v: u32| v, &mut cc), all);
            prop_assert_eq!(segment.read("d", groups, 0, |v: u64| v, &mut dd), all);
            prop_assert_eq!((aa, bb, cc, dd), (a, b, c, d));
            let present = times.iter().flatten().count();
            let expected = if present == 0 { Vec::new() } else { times.iter().map(|t| t.unwrap_or(i64::MIN)).collect() };
            prop_assert_eq!(read(&segment, "times", rows.len()), Some((present, expected)));
            prop_assert_eq!(read(&segment, "whole", rows.len()), Some((rows.len(), whole)));
        }

        #[test]
        fn a_damaged_segment_is_left_to_polars_or_read(at in 4usize..2_000, byte: u8) {
            let times: Vec<Option<i64>> = (0..500).map(|n| (n % 7 != 0).then_some(n * 1_000)).collect();
            let (_folder, path) = written(vec![column("times", &times[..])]);
            let mut bytes = std::fs::read(&path).unwrap();
            // The footer is read by polars alone.
            let data = bytes.len() - 8 - u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().unwrap()) as usize;
            bytes[4 + (at - 4) % (data - 4)] = byte;
            std::fs::write(&path, bytes).unwrap();
            if let Some((_, values)) = Segment::open(&path).and_then(|segment| read(&segment, "times", 500)) {
                prop_assert!(values.is_empty() || values.len() == 500);
            }
        }
    }

    #[test]
    fn row_groups_are_read_apart_and_together() {
        let rows: i64 = (1 << 18) + 1_000;
        let times: Vec<Option<i64>> = (0..rows).map(|n| (n < 1 << 18).then_some(n * 3)).collect();
        let (_folder, path) = written(vec![column("times", &times[..])]);
        let segment = Segment::open(&path).unwrap();
        let rows = rows as usize;
        assert_eq!(segment.heights().iter().sum::<usize>(), rows);
        assert_eq!(segment.groups(0..rows), Some(0..segment.heights().len()));
        assert_eq!(segment.groups(1..rows), None);
        let (present, values) = read(&segment, "times", rows).unwrap();
        assert_eq!((present, values.len()), (1 << 18, rows));
        assert!(times.iter().zip(values).all(|(t, v)| t.unwrap_or(i64::MIN) == v));
        let last = segment.groups(1 << 18..rows).unwrap();
        let mut values = Vec::new();
        assert_eq!(segment.read::<i64, i64>("times", last, 0, |v| v, &mut values), Some(0));
        assert!(values.is_empty());
    }

    #[test]
    fn a_column_of_another_type_is_left_to_polars() {
        let (_folder, path) = written(vec![column("n", &[1u32, 2][..])]);
        let segment = Segment::open(&path).unwrap();
        assert_eq!(segment.read::<u16, u16>("n", 0..1, 0, |v| v, &mut Vec::new()), None);
        assert_eq!(segment.read::<u16, u16>("none", 0..1, 0, |v| v, &mut Vec::new()), Some(0));
    }
}
