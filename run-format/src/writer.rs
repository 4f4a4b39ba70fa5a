//! Writes a run directory while it is recorded.
//!
//! The format's guarantee: every file in the directory is whole. A segment is written aside (`.NAME.tmp`)
//! and renamed when it is complete, at least once a second; `run.json` is rewritten the same way after each
//! segment. So a `kill -9` loses at most the last second and everything before it reads. What can not be
//! written (a full disk) ends the recording with an error and leaves what was written.

use crate::batch::{Batch, queues_to_frame};
use crate::slices::SliceLog;
use crate::{
    Command, Counters, Error, Event, Manifest, Nanos, Queue, QueueId, Sink, State, Window, clock_pair,
};
use polars::prelude::{
    ChunkAgg, CompatLevel, DataFrame, DataType, Int64Chunked, PolarsError, PolarsResult, SchemaExt,
};
use polars_parquet::read::ParquetError;
use polars_parquet::write::{
    CompressionOptions, Compressor, DynIter, DynStreamingIterator, Encoding, FallibleStreamingIterator,
    FileWriter, StatisticsOptions, Version, WriteOptions, array_to_columns,
};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest time that a command waits in memory.
const SEGMENT_EVERY: Duration = Duration::from_millis(500);
/// Most commands in one segment.
const SEGMENT_ROWS: usize = 1 << 20;
/// Segments that may wait for the disk before the recorder waits too.
const SEGMENTS_WAITING: usize = 4;
/// Most events that a manifest keeps.
const EVENTS: usize = 10_000;

/// A run being recorded. Dropping it leaves a run that reads, marked `open`; [`RunWriter::close`] ends it in
/// order.
#[derive(Debug)]
pub struct RunWriter {
    directory: PathBuf,
    manifest: Manifest,
    queues: Vec<Queue>,
    queues_changed: bool,
    batch: Batch,
    last: Instant,
    jobs: Option<SyncSender<Job>>,
    done: Receiver<Result<Batch, Error>>,
    thread: Option<JoinHandle<()>>,
    spare: Vec<Batch>,
    failed: Option<Error>,
    recorded: u64,
    slices: Option<SliceLog>,
    /// Keeps other recorders out of the directory.
    _lock: Option<File>,
}

/// What the writing thread is given.
#[derive(Debug)]
struct Job {
    batch: Batch,
    queues: Option<Vec<Queue>>,
    manifest: Manifest,
}

impl RunWriter {
    /// Whether [`RunWriter::create`] would take this directory; nothing is changed. For asking before a
    /// recording is set up.
    ///
    /// # Errors
    /// As those of [`RunWriter::create`].
    pub fn may_create(directory: &Path, force: bool) -> Result<(), Error> {
        if directory.is_dir() {
            lock(directory)?;
        }
        replaced(directory, force).map(drop)
    }

    /// Creates the directory with its manifest. A directory that exists and is not empty is refused;
    /// `force` replaces it if it is a run.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NotOurs`], [`Error::InUse`], or what the file system says.
    pub fn create(directory: &Path, manifest: Manifest, force: bool) -> Result<RunWriter, Error> {
        let lock = make_directory(directory, force)?;
        for folder in ["commands", "queues"] {
            let path = directory.join(folder);
            fs::create_dir(&path).map_err(io("create", &path))?;
        }
        // First, so that no manifest tells of slices that are not there.
        let slices = manifest.windows.map(|_| SliceLog::create(directory)).transpose()?;
        write_manifest(directory, &manifest)?;
        let (jobs, job) = sync_channel::<Job>(SEGMENTS_WAITING);
        let (finished, done) = sync_channel(SEGMENTS_WAITING * 2);
        let root = directory.to_owned();
        let thread = std::thread::Builder::new()
            .name("segments".into())
            .spawn(move || {
                let mut number = 0;
                for job in job {
                    let result = write_segment(&root, &mut number, job);
                    let failed = result.is_err();
                    if finished.send(result).is_err() || failed {
                        break;
                    }
                }
            })
            .map_err(io("start the writer of", directory))?;
        Ok(RunWriter {
            directory: directory.to_owned(),
            batch: Batch::new(manifest.side),
            manifest,
            queues: Vec::new(),
            queues_changed: false,
            last: Instant::now(),
            jobs: Some(jobs),
            done,
            thread: Some(thread),
            spare: Vec::new(),
            failed: None,
            recorded: 0,
            slices,
            _lock: lock,
        })
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The manifest, to be kept up to date by the recorder; it reaches the disk with the next segment.
    pub fn manifest(&mut self) -> &mut Manifest {
        &mut self.manifest
    }

    /// Commands taken so far.
    #[must_use]
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// A slice of a windowed run has begun, and is to end when it says. If the recording is cut short in it, the run
    /// has it up to its last segment.
    pub fn slice_begins(&mut self, slice: Window) {
        if let Some(windows) = &mut self.manifest.windows {
            windows.under_way = Some(slice);
        }
    }

    /// A slice of a windowed run is over: it is written at once, and counted in the manifest.
    ///
    /// # Errors
    /// What the file system says.
    pub fn slice(&mut self, slice: Window) -> Result<(), Error> {
        let (Some(log), Some(windows)) = (&mut self.slices, &mut self.manifest.windows) else {
            return Ok(());
        };
        windows.under_way = None;
        if slice.start_ns >= slice.end_ns {
            return Ok(());
        }
        log.append(slice, clock_pair())?;
        windows.slices += 1;
        windows.armed_ns += slice.end_ns.0 - slice.start_ns.0;
        Ok(())
    }

    /// Whether [`RunWriter::tick`] would write a segment, and the manifest with it, which is to be up to date then.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.last.elapsed() >= SEGMENT_EVERY || self.batch.len() >= SEGMENT_ROWS
    }

    /// Writes a segment if it is time; to be called several times a second.
    ///
    /// # Errors
    /// What an earlier or this segment's writing ended with. After an error nothing more is written.
    pub fn tick(&mut self) -> Result<(), Error> {
        self.collect();
        if self.failed.is_none() && self.is_due() {
            self.hand_over();
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Writes what is left, marks the run closed and waits until all is on its way to the disk.
    ///
    /// # Errors
    /// What the writing of any segment ended with; the run then stays `open` and reads.
    pub fn close(mut self, counters: Counters, end: Nanos) -> Result<(), Error> {
        self.tick()?;
        self.manifest.counters = counters;
        self.manifest.window.end_ns = end;
        self.manifest.state = State::Closed;
        self.hand_over();
        drop(self.jobs.take());
        while let Ok(result) = self.done.recv() {
            result?;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            return Err(Error::WriterGone(self.directory.clone()));
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Gives the batch to the writing thread. An error waits in `failed` for the next tick.
    fn hand_over(&mut self) {
        self.last = Instant::now();
        // The recorder's counters may be older than the last commands.
        let counters = &mut self.manifest.counters;
        counters.recorded = counters.recorded.max(self.recorded);
        let known =
            counters.recorded.saturating_add(counters.unsampled).saturating_add(counters.lost.total());
        counters.seen = counters.seen.max(known);
        let empty = self.spare.pop().unwrap_or_else(|| Batch::new(self.manifest.side));
        let job = Job {
            batch: std::mem::replace(&mut self.batch, empty),
            queues: std::mem::take(&mut self.queues_changed).then(|| self.queues.clone()),
            manifest: self.manifest.clone(),
        };
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !sent {
            self.collect();
            self.failed.get_or_insert_with(|| Error::WriterGone(self.directory.clone()));
        }
    }

    /// Takes back written batches, and the first error.
    fn collect(&mut self) {
        while let Ok(result) = self.done.try_recv() {
            match result {
                Ok(batch) => self.spare.push(batch),
                Err(error) => {
                    self.failed.get_or_insert(error);
                }
            }
        }
    }
}

impl Sink for RunWriter {
    fn queue(&mut self, queue: Queue) -> QueueId {
        let id = QueueId(u32::try_from(self.queues.len()).unwrap_or(u32::MAX));
        self.queues.push(queue);
        self.queues_changed = true;
        id
    }

    fn queue_is(&mut self, id: QueueId, queue: Queue) {
        if let Some(known) = self.queues.get_mut(id.0 as usize)
            && *known != queue
        {
            *known = queue;
            self.queues_changed = true;
        }
    }

    fn queue_went(&mut self, id: QueueId, at: Nanos) {
        if let Some(queue) = self.queues.get_mut(id.0 as usize)
            && queue.went.is_none()
        {
            queue.went = Some(at);
            self.queues_changed = true;
        }
    }

    fn command(&mut self, command: &Command) {
        self.batch.push(command);
        self.recorded += 1;
        if self.batch.len() >= SEGMENT_ROWS && self.failed.is_none() {
            self.hand_over();
        }
    }

    fn event(&mut self, event: Event) {
        if self.manifest.events.len() < EVENTS {
            self.manifest.events.push(event);
        }
    }
}

impl Drop for RunWriter {
    fn drop(&mut self) {
        // The recorder ended without closing: what is in memory still reaches the disk if it can.
        if let Some(jobs) = self.jobs.take() {
            let job = Job {
                batch: std::mem::replace(&mut self.batch, Batch::new(self.manifest.side)),
                queues: self.queues_changed.then(|| self.queues.clone()),
                manifest: self.manifest.clone(),
            };
            if job.batch.len() > 0 || job.queues.is_some() {
                // A writer that is gone has said why already.
                let _ = jobs.send(job);
            }
        }
        while self.done.recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { doing, path, source }
}

/// Makes the directory, empty and for this recorder alone.
fn make_directory(directory: &Path, force: bool) -> Result<Option<File>, Error> {
    // What is not to be replaced is not to be touched.
    replaced(directory, force)?;
    fs::create_dir_all(directory).map_err(io("create", directory))?;
    let lock = lock(directory)?;
    // The directory itself stays: it may be the current one, or one that something is mounted on.
    for path in replaced(directory, force)? {
        let is_directory = fs::symlink_metadata(&path).is_ok_and(|m| m.is_dir());
        let removed = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(io("remove", &path))?;
    }
    Ok(lock)
}

/// Keeps a directory for one recorder, as long as the file is open (`flock(2)`; readers do not ask). None where the
/// file system has no locks.
fn lock(directory: &Path) -> Result<Option<File>, Error> {
    let file = File::open(directory).map_err(io("open", directory))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(Error::InUse(directory.to_owned())),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// What is in a directory that a run may replace.
fn replaced(directory: &Path, force: bool) -> Result<Vec<PathBuf>, Error> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == NotFound && fs::symlink_metadata(directory).is_err() => return Ok(Vec::new()),
        // A file, or a link that leads nowhere.
        Err(e) if matches!(e.kind(), NotADirectory | NotFound) && fs::symlink_metadata(directory).is_ok() => {
            return Err(Error::NotOurs(directory.to_owned()));
        }
        Err(e) => return Err(io("create", directory)(e)),
    };
    let paths: Vec<PathBuf> = entries
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<_, _>>()
        .map_err(io("read", directory))?;
    if paths.is_empty() {
        return Ok(paths);
    }
    if !force {
        return Err(Error::Exists(directory.to_owned()));
    }
    let ours =
        fs::read_to_string(directory.join("run.json")).is_ok_and(|text| text.contains(Manifest::FORMAT_NAME));
    if ours { Ok(paths) } else { Err(Error::NotOurs(directory.to_owned())) }
}

fn write_segment(root: &Path, number: &mut u64, mut job: Job) -> Result<Batch, Error> {
    if let Some(queues) = &job.queues {
        let path = root.join("queues/0.parquet");
        let frame = queues_to_frame(queues).map_err(parquet("write", &path))?;
        write_parquet(&path, frame)?;
    }
    if job.batch.len() > 0 {
        let path = root.join(format!("commands/{number:06}.parquet"));
        let frame = job.batch.to_frame().map_err(parquet("write", &path))?;
        write_parquet(&path, frame)?;
        *number += 1;
        job.batch.clear();
    }
    write_manifest(root, &job.manifest)?;
    Ok(job.batch)
}

pub(crate) fn parquet(doing: &'static str, path: &Path) -> impl FnOnce(PolarsError) -> Error {
    let path = path.to_owned();
    move |source| Error::Parquet { doing, path, source: Box::new(source) }
}

/// A Parquet file, written aside and renamed. It is encoded in memory first, so that what the disk says
/// arrives as the system's own error.
pub(crate) fn write_parquet(path: &Path, frame: DataFrame) -> Result<(), Error> {
    let bytes = encoded(frame).map_err(parquet("encode", path))?;
    aside(path, &bytes)
}

/// Commands of a row group.
const ROW_GROUP: usize = 1 << 18;

/// A frame as a Parquet file.
///
/// Times are written as the differences from one to the next, without compression: half as large as a compressor
/// leaves them, and quicker to read. Other columns have a dictionary where that is smaller, and bits of it that no
/// compressor finds anything in. Only addresses are compressed: their differences may be larger than readers
/// that check their sums take.
fn encoded(frame: DataFrame) -> PolarsResult<Vec<u8>> {
    let options = WriteOptions {
        statistics: StatisticsOptions::default(),
        version: Version::V1,
        // Of each column its own, below.
        compression: CompressionOptions::Uncompressed,
        data_page_size: None,
    };
    let level = CompatLevel::newest();
    let mut writer = FileWriter::try_new(Vec::new(), frame.schema().to_arrow(level), options)?;
    let types = writer.parquet_schema().fields().to_vec();
    for from in (0..frame.height()).step_by(ROW_GROUP) {
        let rows = frame.slice(from as i64, ROW_GROUP);
        let mut columns = Vec::with_capacity(types.len());
        for (column, parquet_type) in rows.columns().iter().zip(&types) {
            let (encoding, compression) = match column.dtype() {
                DataType::Int64 if is_even(column.i64()?) => {
                    (Encoding::DeltaBinaryPacked, CompressionOptions::Uncompressed)
                }
                DataType::Boolean => (Encoding::Plain, CompressionOptions::Uncompressed),
                DataType::UInt64 => (Encoding::RleDictionary, CompressionOptions::Lz4Raw),
                _ => (Encoding::RleDictionary, CompressionOptions::Uncompressed),
            };
            let values = column.as_materialized_series().rechunk().to_arrow(0, level);
            for pages in array_to_columns(values, parquet_type.clone(), options, &[encoding])? {
                let pages =
                    pages.map(|page| page.map_err(|e| ParquetError::FeatureNotSupported(e.to_string())));
                let pages = Compressor::new_from_vec(pages, compression, Vec::new());
                columns.push(Ok(DynStreamingIterator::new(pages.map_err(PolarsError::from))));
            }
        }
        writer.write(rows.height() as u64, DynIter::new(columns.into_iter()))?;
    }
    writer.end(None)?;
    Ok(writer.into_inner())
}

/// Whether the differences of times are as small as those of a recording, so that no reader's sums overflow.
fn is_even(times: &Int64Chunked) -> bool {
    const LARGEST: i64 = 1 << 60;
    const SPAN: i64 = 1 << 54;
    match (times.min(), times.max()) {
        (Some(least), Some(most)) => least > -LARGEST && most < LARGEST && most - least < SPAN,
        _ => true,
    }
}

fn write_manifest(root: &Path, manifest: &Manifest) -> Result<(), Error> {
    let path = root.join("run.json");
    let mut text = serde_json::to_vec_pretty(manifest)
        .map_err(|e| Error::Manifest { path: path.clone(), reason: e.to_string() })?;
    text.push(b'\n');
    aside(&path, &text)
}

/// Writes `.NAME.tmp` beside `path` and renames it when it is complete; removes it when it is not.
pub(crate) fn aside(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!(".{name}.tmp"));
    let written = fs::write(&aside, bytes)
        .map_err(io("write", &aside))
        .and_then(|()| fs::rename(&aside, path).map_err(io("rename", &aside)));
    if written.is_err() {
        // The error to report is the first one.
        let _ = fs::remove_file(&aside);
    }
    written
}
