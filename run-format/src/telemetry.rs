//! A run's telemetry: `telemetry/COLLECTOR-NNNNNN.parquet`, written while it is recorded, and read as timelines. It
//! samples nothing and draws no conclusions.
//!
//! A value is a row when it changes; a row without a value says that the value is not known from then on. Each sample
//! leaves one row of the metric `sampled`, so that at each of these times a value is what its last row says. An event
//! is a row at its own moment, and nothing lasts of it. Each file begins with all values, so that it reads without those before it. Files are written aside and renamed, like
//! segments of commands; `metrics.json` beside them says what each metric is.

use crate::reader::{Place, segments};
use crate::writer::{aside, parquet, write_parquet};
use crate::{Error, Nanos, Run};
use polars::prelude::{
    Column, DataFrame, Float64Chunked, IntoColumn, IntoLazy, LazyFrame, NamedFrom, NewChunkedArray,
    PolarsResult, ScanArgsParquet, Series, StringChunked, col, lit,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The folder in a run.
const FOLDER: &str = "telemetry";
/// The file that says what the metrics are.
const METRICS: &str = "metrics.json";
/// The metric whose rows say when the collector looked.
const SAMPLED: &str = "sampled";
/// Batches that may wait for the disk before the sampler waits too.
const BATCHES_WAITING: usize = 256;
/// A file is written again when it has this many times fewer new rows than old ones, or after this time.
const GROWN: usize = 8;
const WRITE_EVERY: Duration = Duration::from_secs(2);

/// How a metric's values are to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MetricKind {
    /// As it is at the moment.
    #[default]
    Gauge,
    /// A count that only grows, wraps at its width, or begins anew.
    Counter,
    /// Something that happened: each row is one, at its own moment, and no value lasts.
    Event,
}

/// What a metric is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TelemetryMetric {
    /// Its name in the `metric` column.
    pub name: String,
    /// Its unit; empty where it is a plain number.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// Gauge, counter or event.
    pub kind: MetricKind,
    /// The width at which a counter wraps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<u8>,
}

/// What a run's manifest says of its telemetry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TelemetrySummary {
    /// How often was asked for.
    pub every_ns: u64,
    /// CPU time of sampling so far, all threads of it together.
    pub cpu_ns: u64,
    /// The collectors.
    pub collectors: Vec<TelemetryCollector>,
    /// The user's own series, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series: Option<TelemetrySeries>,
    /// Why it ended before the recording did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

/// One collector, as the manifest keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TelemetryCollector {
    /// Its name.
    pub name: String,
    /// Whether it had something to collect; `lacks` says why not.
    pub present: bool,
    /// How often it sampled, at the end.
    pub every_ns: u64,
    /// Samples.
    pub samples: u64,
    /// CPU time of them.
    pub cpu_ns: u64,
    /// What it lacks on this machine, once each, and whether it ended early.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<TelemetryLack>,
}

/// Something that a collector lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TelemetryLack {
    /// The metric; empty where it is more than one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub metric: String,
    /// Why.
    pub why: String,
}

/// The user's series, as the manifest keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TelemetrySeries {
    /// The file that it was read from.
    pub file: String,
    /// What its time column was taken for.
    pub time: String,
    /// Its columns.
    pub columns: Vec<String>,
    /// Lines that were taken.
    pub lines: u64,
    /// What was not taken as it stands, with the number of its first line; or why nothing was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub told: Vec<String>,
}

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub struct TelemetryRow {
    /// When.
    pub at: Nanos,
    /// Its place in [`TelemetryBatch::metrics`].
    pub metric: u16,
    /// Whose.
    pub object: Arc<str>,
    /// The value; `None` where it is not known any more.
    pub value: Option<f64>,
}

/// Rows of one collector, in the order of their times.
#[derive(Clone, Debug)]
pub struct TelemetryBatch {
    /// The collector: a file's name begins with it.
    pub collector: String,
    /// Whether all its values come first, so that a file may begin here.
    pub anew: bool,
    /// The rows.
    pub rows: Vec<TelemetryRow>,
    /// Its metrics so far; more may come, at the end.
    pub metrics: Arc<[TelemetryMetric]>,
}

/// Writes a run's telemetry on a thread of its own. Dropping it writes what it was given.
#[derive(Debug)]
pub struct TelemetryWriter {
    batches: Option<SyncSender<TelemetryBatch>>,
    thread: Option<JoinHandle<()>>,
    failed: Receiver<Error>,
}

/// Gives batches to a [`TelemetryWriter`], or to a view that has the other end of the channel; ends with it.
#[derive(Clone, Debug)]
pub struct TelemetrySink(SyncSender<TelemetryBatch>);

impl TelemetrySink {
    /// Takes a batch; waits where the disk is slow. After a failure it is lost, which [`TelemetryWriter::close`] tells.
    pub fn give(&self, batch: TelemetryBatch) {
        // The writer has told why it is gone.
        let _ = self.0.send(batch);
    }
}

impl From<SyncSender<TelemetryBatch>> for TelemetrySink {
    fn from(batches: SyncSender<TelemetryBatch>) -> TelemetrySink {
        TelemetrySink(batches)
    }
}

impl TelemetryWriter {
    /// Makes the folder in a run that is there.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create(run: &Path) -> Result<TelemetryWriter, Error> {
        let folder = run.join(FOLDER);
        let io = |doing| {
            let path = folder.clone();
            move |source| Error::Io { doing, path, source }
        };
        fs::create_dir(&folder).map_err(io("create"))?;
        let (batches, waiting) = sync_channel(BATCHES_WAITING);
        let (told, failed) = sync_channel(1);
        let mut files = Files { folder: folder.clone(), open: BTreeMap::new(), metrics: BTreeMap::new() };
        let thread = std::thread::Builder::new()
            .name("telemetry files".into())
            .spawn(move || {
                for batch in waiting {
                    if let Err(error) = files.take(batch) {
                        // One is enough.
                        let _ = told.try_send(error);
                        return;
                    }
                }
                if let Err(error) = files.write_all() {
                    let _ = told.try_send(error);
                }
            })
            .map_err(io("start the writer of"))?;
        Ok(TelemetryWriter { batches: Some(batches), thread: Some(thread), failed })
    }

    /// What batches are given to.
    #[must_use]
    pub fn sink(&self) -> Option<TelemetrySink> {
        self.batches.clone().map(TelemetrySink)
    }

    /// Why nothing is written any more, if it is so.
    pub fn failed(&self) -> Option<Error> {
        self.failed.try_recv().ok()
    }

    /// Writes what is left. Every [`TelemetrySink`] has to be gone by then: what they are given later is waited for.
    ///
    /// # Errors
    /// What the writing ended with. What was written before is whole.
    pub fn close(mut self) -> Result<(), Error> {
        self.end();
        self.failed().map_or(Ok(()), Err)
    }

    fn end(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // It panics only by a fault of its own, and then what it wrote is whole.
            let _ = thread.join();
        }
    }
}

impl Drop for TelemetryWriter {
    fn drop(&mut self) {
        self.end();
    }
}

/// The files being written.
#[derive(Debug)]
struct Files {
    folder: PathBuf,
    open: BTreeMap<String, File>,
    metrics: BTreeMap<String, Arc<[TelemetryMetric]>>,
}

/// The newest file of one collector: all its rows are kept until it is full, since a Parquet file can not grow.
#[derive(Debug)]
struct File {
    number: u64,
    rows: Vec<TelemetryRow>,
    written: usize,
    at: Instant,
}

impl Files {
    fn take(&mut self, batch: TelemetryBatch) -> Result<(), Error> {
        let TelemetryBatch { collector, anew, mut rows, metrics } = batch;
        let grown = self.metrics.get(&collector).is_none_or(|known| known.len() != metrics.len());
        if grown {
            self.metrics.insert(collector.clone(), metrics);
            self.write_metrics()?;
        }
        let at = Instant::now();
        match self.open.get_mut(&collector) {
            Some(_) if anew => {
                self.write(&collector)?;
                let number = self.open.get(&collector).map_or(0, |file| file.number + 1);
                self.open.insert(collector.clone(), File { number, rows, written: 0, at });
            }
            Some(file) => file.rows.append(&mut rows),
            None => {
                self.open.insert(collector.clone(), File { number: 0, rows, written: 0, at });
            }
        }
        let is_due = self.open.get(&collector).is_some_and(|file| {
            (file.rows.len() - file.written) * GROWN >= file.written || file.at.elapsed() >= WRITE_EVERY
        });
        if is_due { self.write(&collector) } else { Ok(()) }
    }

    fn write_all(&mut self) -> Result<(), Error> {
        let collectors: Vec<String> = self.open.keys().cloned().collect();
        collectors.iter().try_for_each(|collector| self.write(collector))
    }

    fn write(&mut self, collector: &str) -> Result<(), Error> {
        let (Some(file), Some(metrics)) = (self.open.get_mut(collector), self.metrics.get(collector)) else {
            return Ok(());
        };
        if file.written == file.rows.len() {
            return Ok(());
        }
        let path = self.folder.join(format!("{collector}-{:06}.parquet", file.number));
        let frame = frame(collector, metrics, &file.rows).map_err(parquet("write", &path))?;
        write_parquet(&path, frame)?;
        file.written = file.rows.len();
        file.at = Instant::now();
        Ok(())
    }

    fn write_metrics(&self) -> Result<(), Error> {
        let path = self.folder.join(METRICS);
        let named: BTreeMap<&str, &[TelemetryMetric]> =
            self.metrics.iter().map(|(name, metrics)| (name.as_str(), &**metrics)).collect();
        let mut text = serde_json::to_vec_pretty(&named)
            .map_err(|e| Error::Manifest { path: path.clone(), reason: e.to_string() })?;
        text.push(b'\n');
        aside(&path, &text)
    }
}

fn frame(collector: &str, metrics: &[TelemetryMetric], rows: &[TelemetryRow]) -> PolarsResult<DataFrame> {
    fn text<'a>(name: &str, values: impl Iterator<Item = &'a str>) -> Column {
        StringChunked::from_iter_values(name.into(), values).into_column()
    }
    let at: Vec<u64> = rows.iter().map(|row| row.at.0).collect();
    let name = |row: &TelemetryRow| metrics.get(usize::from(row.metric)).map_or("", |m| m.name.as_str());
    let columns = vec![
        Series::new("at_ns".into(), at.as_slice()).into_column(),
        text("collector", rows.iter().map(|_| collector)),
        text("metric", rows.iter().map(name)),
        text("object", rows.iter().map(|row| &*row.object)),
        Float64Chunked::from_iter_options("value".into(), rows.iter().map(|row| row.value)).into_column(),
    ];
    DataFrame::new(rows.len(), columns)
}

/// The telemetry of a run on disk.
#[derive(Clone, Debug)]
pub struct Telemetry {
    place: Place,
    files: Vec<PathBuf>,
    broken: Vec<PathBuf>,
    metrics: BTreeMap<String, Vec<TelemetryMetric>>,
}

/// One metric of one object over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The collector.
    pub collector: String,
    /// The metric. Of a counter the values are rates: its unit is then of one second.
    pub metric: TelemetryMetric,
    /// Whose values they are.
    pub object: String,
    /// A point for each sample from the object's first on, in the order of time; of events one each.
    pub points: Vec<Point>,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub struct TelemetryEvent {
    /// When, `CLOCK_MONOTONIC`: its own moment, not a sample's.
    pub at: Nanos,
    /// To what.
    pub object: String,
    /// How much, in the metric's unit.
    pub value: f64,
}

/// A value at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// When it was sampled, `CLOCK_MONOTONIC`. A rate is that since the sample before.
    pub at: Nanos,
    /// The value; `None` where it is not known.
    pub value: Option<f64>,
}

impl Run {
    /// Its telemetry. A run that has none, as older ones have not, has no files.
    ///
    /// # Errors
    /// When the folder or what it says of the metrics can not be read.
    pub fn telemetry(&self) -> Result<Telemetry, Error> {
        let folder = self.directory().join(FOLDER);
        let (files, broken) = segments(&folder)?;
        let path = folder.join(METRICS);
        let mut metrics: BTreeMap<String, Vec<TelemetryMetric>> = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| Error::Manifest {
                path,
                reason: format!("{e}: the run was damaged after it was recorded"),
            })?,
            Err(e) if e.kind() == ErrorKind::NotFound && files.is_empty() => BTreeMap::new(),
            Err(source) => return Err(Error::Io { doing: "read", path, source }),
        };
        // It says when a collector looked, which [`Telemetry::samples`] tells, and is nothing that was measured.
        metrics.values_mut().for_each(|of| of.retain(|metric| metric.name != SAMPLED));
        Ok(Telemetry { place: Place::of(self.directory())?, files, broken, metrics })
    }
}

impl Telemetry {
    /// Its whole files, in order.
    #[must_use]
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Files that are cut or are no Parquet files. Timelines have a gap there; a report says so.
    #[must_use]
    pub fn broken(&self) -> &[PathBuf] {
        &self.broken
    }

    /// What each collector measured.
    #[must_use]
    pub fn metrics(&self) -> &BTreeMap<String, Vec<TelemetryMetric>> {
        &self.metrics
    }

    /// When a collector looked, in order.
    ///
    /// # Errors
    /// As those of [`Telemetry::timelines`].
    pub fn samples(&self, collector: &str) -> Result<Vec<Nanos>, Error> {
        let mut samples = Vec::new();
        for path in self.of(collector) {
            let rows = self.read(path, SAMPLED)?;
            samples.extend(rows.into_iter().map(|row| Nanos(row.at)));
        }
        samples.sort();
        Ok(samples)
    }

    /// What happened, in the order of time: all events of a metric. None where the run has none of it, or where it is no
    /// metric of events.
    ///
    /// # Errors
    /// When a file can not be read or lacks a column.
    pub fn events(&self, collector: &str, metric: &str) -> Result<Vec<TelemetryEvent>, Error> {
        let is_events = |m: &TelemetryMetric| m.name == metric && m.kind == MetricKind::Event;
        let mut events = Vec::new();
        if self.metrics.get(collector).is_some_and(|all| all.iter().any(is_events)) {
            for path in self.of(collector) {
                let rows = self.read(path, metric)?.into_iter().filter(|row| !row.sampled);
                events.extend(rows.filter_map(|row| {
                    Some(TelemetryEvent { at: Nanos(row.at), object: row.object, value: row.value? })
                }));
            }
        }
        // The sort is stable: of events at one time the one that was written first comes first.
        events.sort_by_key(|event| event.at);
        Ok(events)
    }

    /// The timelines of a metric, one an object, by name: values of a gauge, rates a second of a counter, events as
    /// they came. None where the run has none of it.
    ///
    /// # Errors
    /// When a file can not be read or lacks a column.
    pub fn timelines(&self, collector: &str, metric: &str) -> Result<Vec<Timeline>, Error> {
        let mut lines = self.values(collector, metric)?;
        for line in &mut lines {
            if line.metric.kind == MetricKind::Counter {
                line.points = rates(&line.points, line.metric.bits);
                line.metric.unit = if line.metric.unit.is_empty() {
                    "1/s".into()
                } else {
                    format!("{}/s", line.metric.unit)
                };
            }
        }
        Ok(lines)
    }

    /// The same with counters as they stood.
    ///
    /// # Errors
    /// As those of [`Telemetry::timelines`].
    pub fn values(&self, collector: &str, metric: &str) -> Result<Vec<Timeline>, Error> {
        let Some(is) = self.metrics.get(collector).and_then(|all| all.iter().find(|m| m.name == metric))
        else {
            return Ok(Vec::new());
        };
        let mut points: BTreeMap<String, Vec<Point>> = BTreeMap::new();
        for path in self.of(collector) {
            let rows = self.read(path, metric)?;
            let (sampled, rows): (Vec<Read>, Vec<Read>) = rows.into_iter().partition(|row| row.sampled);
            let mut samples: Vec<u64> = sampled.into_iter().map(|row| row.at).collect();
            samples.sort_unstable();
            let mut objects: BTreeMap<String, Vec<(u64, Option<f64>)>> = BTreeMap::new();
            for row in rows {
                objects.entry(row.object).or_default().push((row.at, row.value));
            }
            for (object, rows) in objects {
                let points = points.entry(object).or_default();
                match is.kind {
                    MetricKind::Event => {
                        points.extend(rows.into_iter().map(|(at, value)| Point { at: Nanos(at), value }));
                    }
                    MetricKind::Gauge | MetricKind::Counter => points.extend(filled(&samples, rows)),
                }
            }
        }
        let line = |(object, mut points): (String, Vec<Point>)| {
            points.sort_by_key(|point| point.at);
            Timeline { collector: collector.to_owned(), metric: is.clone(), object, points }
        };
        Ok(points.into_iter().map(line).collect())
    }

    /// The files of a collector.
    fn of(&self, collector: &str) -> impl Iterator<Item = &Path> {
        let is_its = move |path: &Path| {
            let name = path.file_stem().and_then(|name| name.to_str());
            let rest =
                name.and_then(|name| name.strip_prefix(collector)).and_then(|rest| rest.strip_prefix('-'));
            rest.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        };
        self.files.iter().map(PathBuf::as_path).filter(move |path| is_its(path))
    }

    /// The rows of a metric and of `sampled` in a file.
    fn read(&self, path: &Path, metric: &str) -> Result<Vec<Read>, Error> {
        let args = ScanArgsParquet { glob: false, cache: false, ..ScanArgsParquet::default() };
        let frame = LazyFrame::scan_parquet(self.place.path(FOLDER, path).as_str().into(), args)
            .map(|frame| {
                let wanted = col("metric").eq(lit(metric)).or(col("metric").eq(lit(SAMPLED)));
                frame.lazy().filter(wanted)
            })
            .and_then(LazyFrame::collect)
            .map_err(parquet("read", path))?;
        Read::of(&frame).map_err(parquet("read", path))
    }
}

/// A row as it is read.
#[derive(Debug)]
struct Read {
    at: u64,
    sampled: bool,
    object: String,
    value: Option<f64>,
}

impl Read {
    fn of(frame: &DataFrame) -> PolarsResult<Vec<Read>> {
        let (at, names) = (frame.column("at_ns")?.u64()?, frame.column("metric")?.str()?);
        let (objects, values) = (frame.column("object")?.str()?, frame.column("value")?.f64()?);
        Ok((0..frame.height())
            .filter_map(|i| {
                let name = names.get(i)?;
                Some(Read {
                    at: at.get(i)?,
                    sampled: name == SAMPLED,
                    object: objects.get(i)?.to_owned(),
                    value: values.get(i).filter(|value| value.is_finite()),
                })
            })
            .collect())
    }
}

/// The value at each sample from the first row on: what the last row up to it says.
#[must_use]
fn filled(samples: &[u64], mut rows: Vec<(u64, Option<f64>)>) -> Vec<Point> {
    // Of rows at one time the last counts.
    rows.sort_by_key(|(at, _)| *at);
    let mut points = Vec::new();
    let mut rows = rows.into_iter().peekable();
    let mut known = None;
    for sample in samples {
        while let Some((_, value)) = rows.next_if(|(at, _)| at <= sample) {
            known = Some(value);
        }
        if let Some(value) = known {
            points.push(Point { at: Nanos(*sample), value });
        }
    }
    points
}

/// How much a counter grew from one value to a later one. `None` where it began anew, or where that can not be told from
/// a wrap: then how much it grew is not known, and nothing is guessed.
///
/// A counter of 32 bits that is less than before wrapped where it was in its upper half and has grown by less than half
/// of its range since; one of 64 bits never wraps in a machine's life.
#[must_use]
pub fn increase(before: f64, after: f64, bits: Option<u8>) -> Option<f64> {
    const RANGE: f64 = 4_294_967_296.0;
    if !(before.is_finite() && after.is_finite() && before >= 0.0 && after >= 0.0) {
        return None;
    }
    if after >= before {
        return Some(after - before);
    }
    let wrapped = after + RANGE - before;
    let may_wrap = bits == Some(32) && (RANGE / 2.0..RANGE).contains(&before) && wrapped < RANGE / 2.0;
    may_wrap.then_some(wrapped)
}

/// The rates of a counter, a second: at each point from the second on, that since the point before.
#[must_use]
pub fn rates(points: &[Point], bits: Option<u8>) -> Vec<Point> {
    points
        .windows(2)
        .filter_map(|pair| {
            let [before, after] = pair else { return None };
            let time = after.at.0.checked_sub(before.at.0).filter(|time| *time > 0)?;
            let grown = before.value.zip(after.value).and_then(|(b, a)| increase(b, a, bits));
            Some(Point { at: after.at, value: grown.map(|grown| grown * 1e9 / time as f64) })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, Manifest, RunWriter, Side};
    use proptest::prelude::*;

    fn metric(name: &str, kind: MetricKind, bits: Option<u8>) -> TelemetryMetric {
        TelemetryMetric { name: name.into(), unit: "bytes".into(), kind, bits }
    }

    fn metrics() -> Arc<[TelemetryMetric]> {
        [
            metric("level", MetricKind::Gauge, None),
            metric("count", MetricKind::Counter, Some(32)),
            metric(SAMPLED, MetricKind::Gauge, None),
            metric("struck", MetricKind::Event, None),
        ]
        .into()
    }

    fn row(at: u64, metric: u16, object: &str, value: Option<f64>) -> TelemetryRow {
        TelemetryRow { at: Nanos(at * 1_000_000_000), metric, object: object.into(), value }
    }

    fn batch(anew: bool, rows: Vec<TelemetryRow>) -> TelemetryBatch {
        TelemetryBatch { collector: "tcp".into(), anew, rows, metrics: metrics() }
    }

    fn run(folder: &Path) -> PathBuf {
        let directory = folder.join("x.run");
        drop(RunWriter::create(&directory, Manifest::begun(Side::Host, Kind::Kernel, "0"), false).unwrap());
        directory
    }

    fn points(line: &Timeline) -> Vec<(u64, Option<f64>)> {
        line.points.iter().map(|p| (p.at.0 / 1_000_000_000, p.value)).collect()
    }

    #[test]
    fn what_changed_is_read_at_every_sample_and_counters_as_rates() {
        let folder = tempfile::tempdir().unwrap();
        let directory = run(folder.path());
        let writer = TelemetryWriter::create(&directory).unwrap();
        let sink = writer.sink().unwrap();
        let sampled = |at| row(at, 2, "", Some(0.0));
        let high = 4_294_967_290.0;
        sink.give(batch(
            true,
            vec![
                row(1, 0, "a", Some(5.0)),
                row(1, 1, "a", Some(high)),
                sampled(1),
                sampled(2),
                row(3, 1, "a", Some(4.0)),
                row(3, 0, "b", Some(1.0)),
                sampled(3),
            ],
        ));
        sink.give(batch(false, vec![row(4, 0, "a", None), row(4, 1, "a", Some(2.0)), sampled(4)]));
        sink.give(batch(true, vec![row(6, 1, "a", Some(12.0)), sampled(6)]));
        drop(sink);
        writer.close().unwrap();

        let run = Run::open(&directory).unwrap();
        let telemetry = run.telemetry().unwrap();
        assert_eq!((telemetry.files().len(), telemetry.broken().len()), (2, 0));
        let measured: Vec<_> = metrics().iter().filter(|metric| metric.name != SAMPLED).cloned().collect();
        assert_eq!(telemetry.metrics()["tcp"], measured);
        let levels = telemetry.timelines("tcp", "level").unwrap();
        assert_eq!(levels.len(), 2);
        assert_eq!(points(&levels[0]), [(1, Some(5.0)), (2, Some(5.0)), (3, Some(5.0)), (4, None)]);
        // It is in no row of the second file, so it was gone by then.
        assert_eq!(points(&levels[1]), [(3, Some(1.0)), (4, Some(1.0))]);
        let counts = telemetry.timelines("tcp", "count").unwrap();
        assert_eq!(counts[0].metric.unit, "bytes/s");
        // Still, wrapped by 10, begun anew, and 10 within two seconds.
        assert_eq!(points(&counts[0]), [(2, Some(0.0)), (3, Some(10.0)), (4, None), (6, Some(5.0))]);
        assert_eq!(telemetry.samples("tcp").unwrap().len(), 5);
        assert!(telemetry.timelines("tcp", "nothing").unwrap().is_empty());
        assert!(telemetry.timelines("tc", "level").unwrap().is_empty());
    }

    #[test]
    fn events_have_their_own_times_and_do_not_last() {
        let folder = tempfile::tempdir().unwrap();
        let directory = run(folder.path());
        let writer = TelemetryWriter::create(&directory).unwrap();
        let sink = writer.sink().unwrap();
        let sampled = |at| row(at, 2, "", Some(0.0));
        // Two at one time, two alike, and one in the next file.
        let first = [row(2, 3, "a", Some(1.0)), row(2, 3, "b", Some(4.0)), row(3, 3, "a", Some(1.0))];
        sink.give(batch(true, [vec![sampled(1)], first.to_vec(), vec![sampled(5)]].concat()));
        sink.give(batch(true, vec![row(6, 3, "a", Some(2.0)), sampled(7), sampled(8)]));
        drop(sink);
        writer.close().unwrap();
        let telemetry = Run::open(&directory).unwrap().telemetry().unwrap();
        let events = telemetry.events("tcp", "struck").unwrap();
        let told: Vec<(u64, &str, f64)> =
            events.iter().map(|e| (e.at.0 / 1_000_000_000, e.object.as_str(), e.value)).collect();
        assert_eq!(told, [(2, "a", 1.0), (2, "b", 4.0), (3, "a", 1.0), (6, "a", 2.0)]);
        let lines = telemetry.timelines("tcp", "struck").unwrap();
        assert_eq!(points(&lines[0]), [(2, Some(1.0)), (3, Some(1.0)), (6, Some(2.0))]);
        for other in ["level", "nothing", SAMPLED] {
            assert!(telemetry.events("tcp", other).unwrap().is_empty());
        }
        assert!(telemetry.events("none", "struck").unwrap().is_empty());
    }

    #[test]
    fn a_run_without_telemetry_and_one_that_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let directory = run(folder.path());
        let open = || Run::open(&directory).unwrap().telemetry();
        assert!(open().unwrap().files().is_empty());
        let writer = TelemetryWriter::create(&directory).unwrap();
        assert!(TelemetryWriter::create(&directory).is_err());
        let sink = writer.sink().unwrap();
        for n in 0..3 {
            sink.give(batch(true, vec![row(n, 0, "a", Some(n as f64)), row(n, 2, "", Some(0.0))]));
        }
        drop(sink);
        writer.close().unwrap();
        let file = |n: u32| directory.join(format!("telemetry/tcp-{n:06}.parquet"));
        // Cut, and of no length: what is between them is a gap.
        let whole = fs::read(file(1)).unwrap();
        fs::write(file(1), &whole[..whole.len() / 2]).unwrap();
        let telemetry = open().unwrap();
        assert_eq!(telemetry.broken(), [file(1)]);
        assert_eq!(points(&telemetry.values("tcp", "level").unwrap()[0]), [(0, Some(0.0)), (2, Some(2.0))]);
        fs::write(file(0), "").unwrap();
        assert_eq!(open().unwrap().broken().len(), 2);
        fs::write(directory.join("telemetry/metrics.json"), "{").unwrap();
        assert!(open().unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn a_folder_that_went_is_told_and_ends_the_writer_alone() {
        let folder = tempfile::tempdir().unwrap();
        let directory = run(folder.path());
        let writer = TelemetryWriter::create(&directory).unwrap();
        fs::remove_dir_all(directory.join("telemetry")).unwrap();
        let sink = writer.sink().unwrap();
        for _ in 0..1_000 {
            sink.give(batch(true, vec![row(1, 0, "a", Some(1.0))]));
        }
        drop(sink);
        assert!(matches!(writer.close(), Err(Error::Io { .. })));
    }

    #[test]
    fn a_decrease_is_a_wrap_only_where_it_can_be_nothing_else() {
        assert_eq!(increase(4_294_967_295.0, 0.0, Some(32)), Some(1.0));
        assert_eq!(increase(3e9, 1e9, Some(32)), None);
        assert_eq!(increase(1e9, 5.0, Some(32)), None);
        assert_eq!(increase(4_294_967_295.0, 0.0, Some(64)), None);
        assert_eq!(increase(1e18, 5.0, Some(64)), None);
        assert_eq!(increase(5e9, 1.0, Some(32)), None);
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(increase(bad, 1.0, Some(32)), None);
            assert_eq!(increase(1.0, bad, Some(32)), None);
        }
    }

    proptest! {
        #[test]
        fn a_counter_of_32_bits_is_unwrapped(start: u32, steps in proptest::collection::vec(0u64..1 << 31, 1..40)) {
            let mut true_count = u64::from(start);
            let mut before = f64::from(start);
            for step in steps {
                true_count += step;
                let after = f64::from(true_count as u32);
                // Exact, or not known; never another number. Half of the range from the lower half can not be told from
                // a new beginning.
                let told = increase(before, after, Some(32));
                prop_assert!(told == Some(step as f64) || told.is_none() && after < before);
                before = after;
            }
        }

        #[test]
        fn small_steps_of_32_bits_are_always_known(start: u32, steps in proptest::collection::vec(0u64..1 << 30, 1..40)) {
            let mut count = u64::from(start);
            for step in steps {
                let before = count as u32;
                count += step;
                prop_assert_eq!(increase(f64::from(before), f64::from(count as u32), Some(32)), Some(step as f64));
            }
        }

        #[test]
        fn any_points_have_rates_that_are_no_less_than_nothing(
            values in proptest::collection::vec((any::<u64>(), proptest::option::of(any::<f64>())), 0..40), bits in proptest::option::of(0u8..70),
        ) {
            let mut points: Vec<Point> = values.iter().map(|(at, value)| Point { at: Nanos(*at), value: *value }).collect();
            for sorted in [false, true] {
                if sorted { points.sort_by_key(|p| p.at); }
                let rates = rates(&points, bits);
                prop_assert!(rates.iter().filter_map(|p| p.value).all(|rate| rate >= 0.0));
            }
        }

        #[test]
        fn each_sample_has_what_its_last_row_says(
            samples in proptest::collection::btree_set(0u64..60, 0..30), rows in proptest::collection::btree_map(0u64..60, proptest::option::of(0u8..9), 0..30),
        ) {
            let samples: Vec<u64> = samples.into_iter().collect();
            let given: Vec<(u64, Option<f64>)> = rows.iter().map(|(at, v)| (*at, v.map(f64::from))).collect();
            for point in filled(&samples, given) {
                let last = rows.range(..=point.at.0).next_back().map(|(_, v)| v.map(f64::from));
                prop_assert_eq!(Some(point.value), last);
            }
        }
    }
}
