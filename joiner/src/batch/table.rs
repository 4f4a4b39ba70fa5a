//! The one table of a batch: a row for each pair of runs, class of I/O and stage, as Parquet that Polars, DuckDB, Spark and
//! pandas read as it is. It computes nothing.
//!
//! Every label is a column of text. `hist_ns` and `hist_count` are lists of the same length: the middles of the histogram's
//! buckets in order, and how many commands are in each. Middles are the same in all rows, so counts of equal middles add up
//! across runs. Whole numbers are signed, since Spark has no others.

use super::step::{ClassRows, Figure, PairRows};
use super::store::{io, replace};
use crate::describe::utc;
use crate::error::{Error, polars};
use crate::histogram::middle;
use crate::join::SetAside;
use polars::prelude::{
    BooleanChunked, Column, DataFrame, Float64Chunked, Int64Chunked, Int64Type, IntoColumn, IntoSeries,
    ListBuilderTrait, ListPrimitiveChunkedBuilder, NewChunkedArray, ParquetCompression, ParquetWriter,
    PolarsResult, StringChunked,
};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// Its name in the output directory.
pub(crate) const NAME: &str = "batch.parquet";
/// Pairs of a row group.
const GROUP: usize = 64;

/// Writes the table of all pairs, in their order.
pub(crate) fn write(out: &Path, pairs: &[PairRows]) -> Result<(), Error> {
    let labels: BTreeSet<&str> = pairs.iter().flat_map(|p| p.labels.keys().map(String::as_str)).collect();
    let path = out.join(NAME);
    let doing = || format!("write {}", path.display());
    replace(&path, |aside| {
        let file = BufWriter::new(File::create(aside).map_err(io("create", aside))?);
        let empty = frame(&[], &labels).map_err(polars(doing()))?;
        let writer = ParquetWriter::new(file).with_compression(ParquetCompression::Zstd(None));
        let mut writer = writer.batched(empty.schema()).map_err(polars(doing()))?;
        for pairs in pairs.chunks(GROUP) {
            let frame = frame(pairs, &labels).map_err(polars(doing()))?;
            writer.write_batch(&frame).map_err(polars(doing()))?;
        }
        writer.finish().map_err(polars(doing()))?;
        Ok(())
    })
}

type Row<'a> = (&'a PairRows, &'a ClassRows, &'a Figure);

/// The rows of some pairs, with a column for each of these labels.
pub(crate) fn frame(pairs: &[PairRows], labels: &BTreeSet<&str>) -> PolarsResult<DataFrame> {
    let rows: Vec<Row<'_>> = pairs
        .iter()
        .flat_map(|p| p.classes.iter().flat_map(move |c| c.figures.iter().map(move |f| (p, c, f))))
        .collect();
    let text = |name: &str, of: &dyn Fn(&Row<'_>) -> Option<String>| -> Column {
        StringChunked::from_iter_options(name.into(), rows.iter().map(of)).into_column()
    };
    let whole = |name: &str, of: &dyn Fn(&Row<'_>) -> Option<i64>| -> Column {
        Int64Chunked::from_iter_options(name.into(), rows.iter().map(of)).into_column()
    };
    let number = |name: &str, of: &dyn Fn(&Row<'_>) -> Option<f64>| -> Column {
        Float64Chunked::from_iter_options(name.into(), rows.iter().map(of)).into_column()
    };
    let count = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let start = |ns: i64| format!("{}Z", utc(ns).replace(' ', "T"));
    let mut columns = vec![
        text("pair", &|(p, ..)| Some(p.name())),
        text("sides", &|(p, ..)| Some(p.sides().to_owned())),
        text("host_run", &|(p, ..)| p.host.clone()),
        text("target_run", &|(p, ..)| p.target.clone()),
        text("start", &|(p, ..)| p.start_ns.map(start)),
        whole("start_ns", &|(p, ..)| p.start_ns),
        number("seconds", &|(p, ..)| Some(p.seconds)),
        whole("host_commands", &|(p, ..)| p.join.as_ref().map(|j| count(j.host_commands))),
        whole("target_commands", &|(p, ..)| p.join.as_ref().map(|j| count(j.target_commands))),
        whole("joined", &|(p, ..)| p.join.as_ref().map(|j| count(j.joined))),
        whole("lost", &|(p, ..)| Some(count(p.lost))),
    ];
    for (n, reason) in SetAside::ALL.iter().enumerate() {
        let name = format!("set_aside.{}", reason.name());
        let of = |(p, ..): &Row<'_>| p.join.as_ref()?.set_aside.get(n).map(|&n| count(n));
        columns.push(whole(&name, &of));
    }
    columns.extend([
        whole("clock_uncertainty_ns", &|(p, ..)| p.join.as_ref()?.clock_uncertainty_ns),
        text("operation", &|(_, c, _)| Some(c.operation.to_string())),
        whole("bytes", &|(_, c, _)| Some(c.bytes.into())),
        BooleanChunked::from_iter_values("error".into(), rows.iter().map(|(_, c, _)| c.error)).into_column(),
        whole("commands", &|(_, c, _)| Some(count(c.commands))),
        number("iops", &|(_, c, _)| c.iops),
        number("bytes_per_second", &|(_, c, _)| c.bytes_per_second),
        text("stage", &|(.., f)| Some(f.stage.clone())),
        number("share", &|(.., f)| Some(f.share)),
        number("mean_ns", &|(.., f)| Some(f.times.mean_ns)),
        whole("p50_ns", &|(.., f)| f.times.p50_ns),
        whole("p90_ns", &|(.., f)| f.times.p90_ns),
        whole("p99_ns", &|(.., f)| f.times.p99_ns),
        whole("p999_ns", &|(.., f)| f.times.p999_ns),
        whole("min_ns", &|(.., f)| Some(f.buckets.min_ns)),
        whole("max_ns", &|(.., f)| Some(f.buckets.max_ns)),
    ]);
    let list = |name: &str, of: &dyn Fn((i32, u64)) -> i64| -> Column {
        let int = polars::prelude::DataType::Int64;
        let mut lists =
            ListPrimitiveChunkedBuilder::<Int64Type>::new(name.into(), rows.len(), rows.len() * 512, int);
        let mut values = Vec::new();
        for (.., figure) in &rows {
            values.clear();
            values.extend(figure.buckets.each().map(of));
            lists.append_slice(&values);
        }
        lists.finish().into_series().into_column()
    };
    columns.push(list("hist_ns", &|(bucket, _)| middle(bucket)));
    columns.push(list("hist_count", &|(_, n)| count(n)));
    for &label in labels {
        columns.push(text(label, &|(p, ..)| p.labels.get(label).cloned()));
    }
    DataFrame::new(rows.len(), columns)
}
