//! Opens a run directory, whole or cut short. It reads; it never writes.

use crate::batch::queues_from_frame;
use crate::writer::parquet;
use crate::{Error, Manifest, Queue, QueueId, State, Window, columns, slices};
use polars::prelude::{DataFrame, IntoLazy, LazyFrame, NULL, ScanArgsParquet, lit};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A run on disk.
#[derive(Clone, Debug)]
pub struct Run {
    directory: PathBuf,
    place: Place,
    manifest: Manifest,
    segments: Vec<PathBuf>,
    broken: Vec<PathBuf>,
}

impl Run {
    /// Opens a run of this or an older format version.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::NotARun`], [`Error::Newer`], [`Error::Manifest`] or what the file system
    /// says.
    pub fn open(directory: &Path) -> Result<Run, Error> {
        let mut manifest = Manifest::read(directory)?;
        // A recording that was cut short wrote its list of slices last.
        if manifest.state == State::Open
            && let Ok(Some(slices)) = slices::read(directory, &manifest)
            && let Some(windows) = &mut manifest.windows
        {
            (windows.slices, windows.armed_ns) = (slices.len() as u64, slices::armed(&slices));
        }
        let (segments, broken) = segments(&directory.join("commands"))?;
        let place = Place::of(directory)?;
        Ok(Run { directory: directory.to_owned(), place, manifest, segments, broken })
    }

    /// Its directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its command segments that are whole, in order.
    #[must_use]
    pub fn segments(&self) -> &[PathBuf] {
        &self.segments
    }

    /// Files among its segments that are cut or are no Parquet files. They are left out of
    /// [`Run::commands`]; a report says so.
    #[must_use]
    pub fn broken_segments(&self) -> &[PathBuf] {
        &self.broken
    }

    /// All its commands, with the columns of [`columns::commands`]; nothing is read yet.
    ///
    /// # Errors
    /// When a segment's footer can not be read or lacks a column.
    pub fn commands(&self) -> Result<LazyFrame, Error> {
        let schema = columns::schema(&columns::commands(self.manifest.side));
        if self.segments.is_empty() {
            return Ok(DataFrame::empty_with_schema(&schema).lazy());
        }
        let folder = self.directory.join("commands");
        let paths = self.segments.iter().map(|p| self.place.path("commands", p).as_str().into()).collect();
        let args = ScanArgsParquet { glob: false, cache: false, ..ScanArgsParquet::default() };
        let mut frame = LazyFrame::scan_parquet_files(paths, args).map_err(parquet("read", &folder))?;
        let found = frame.collect_schema().map_err(parquet("read", &folder))?;
        for (name, data_type) in schema.iter() {
            match found.get(name) {
                Some(t) if t == data_type => {}
                Some(t) => {
                    return Err(Error::Column {
                        path: folder,
                        column: name.to_string(),
                        reason: format!("is {t}, not {data_type}"),
                    });
                }
                None if columns::ADDED.contains(&name.as_str()) => {
                    let null = lit(NULL).cast(data_type.clone()).alias(name.clone());
                    frame = frame.with_column(null);
                }
                None => {
                    return Err(Error::Column {
                        path: folder,
                        column: name.to_string(),
                        reason: "is missing".into(),
                    });
                }
            }
        }
        Ok(frame)
    }

    /// From when to when its probes were armed, in order and apart from each other; `None` where they were in place
    /// throughout. Slices that were cut off with the recording are left out, though their commands may be there.
    ///
    /// # Errors
    /// [`Error::Slices`] where the list is missing or damaged, or what the file system says.
    pub fn slices(&self) -> Result<Option<Vec<Window>>, Error> {
        slices::read(&self.directory, &self.manifest)
    }

    /// Its queues by number. A run that was cut before the first segment has none.
    ///
    /// # Errors
    /// When a file of `queues/` can not be read, or is cut: without it nothing says whose the commands are.
    pub fn queues(&self) -> Result<BTreeMap<QueueId, Queue>, Error> {
        let (files, broken) = segments(&self.directory.join("queues"))?;
        if let Some(path) = broken.into_iter().next() {
            return Err(Error::Damaged(path));
        }
        let mut queues = BTreeMap::new();
        for path in files {
            let args = ScanArgsParquet { glob: false, cache: false, ..ScanArgsParquet::default() };
            let frame = LazyFrame::scan_parquet(self.place.path("queues", &path).as_str().into(), args)
                .and_then(LazyFrame::collect)
                .map_err(parquet("read", &path))?;
            queues.extend(queues_from_frame(&frame).map_err(parquet("read", &path))?);
        }
        Ok(queues)
    }
}

impl Manifest {
    /// Reads the manifest of a run of this or an older format version, and nothing else of the run.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::NotARun`], [`Error::Newer`], [`Error::Manifest`] or what the file system
    /// says.
    pub fn read(directory: &Path) -> Result<Manifest, Error> {
        match fs::metadata(directory) {
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::NotFound => return Err(Error::Missing(directory.to_owned())),
            Err(source) => return Err(unreadable(directory)(source)),
        }
        let path = directory.join("run.json");
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Err(Error::NotARun(directory.to_owned()));
            }
            Err(source) => return Err(unreadable(&path)(source)),
        };
        parse_manifest(&path, &text)
    }
}

/// Where a run lies, as polars takes it: it knows only UTF-8, and takes a relative path like `s3://x` or
/// `file:x` for an address of another kind.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    path: String,
    /// What the path goes through where the directory's own is not UTF-8.
    _open: Option<Arc<File>>,
}

impl Place {
    pub(crate) fn of(directory: &Path) -> Result<Place, Error> {
        let absolute = std::path::absolute(directory).map_err(unreadable(directory))?;
        if let Some(path) = absolute.to_str() {
            return Ok(Place { path: path.to_owned(), _open: None });
        }
        let open = File::open(directory).map_err(unreadable(directory))?;
        Ok(Place { path: format!("/proc/self/fd/{}", open.as_raw_fd()), _open: Some(Arc::new(open)) })
    }

    /// A file of one of the run's folders.
    pub(crate) fn path(&self, folder: &str, file: &Path) -> String {
        // `segments` takes only names that are UTF-8.
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        format!("{}/{folder}/{name}", self.path)
    }
}

fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { doing: "read", path, source }
}

fn parse_manifest(path: &Path, text: &[u8]) -> Result<Manifest, Error> {
    const DAMAGED: &str = "the run was damaged after it was recorded";
    let bad = |reason: String| Error::Manifest { path: path.to_owned(), reason };
    let value: serde_json::Value =
        serde_json::from_slice(text).map_err(|e| bad(format!("not JSON ({e}): {DAMAGED}")))?;
    let format = value.get("format").and_then(|f| f.as_str()).unwrap_or_default();
    let version = format
        .strip_prefix(Manifest::FORMAT_NAME)
        .and_then(|rest| rest.strip_prefix('/'))
        .and_then(|v| v.parse::<u32>().ok());
    match version {
        Some(1..=Manifest::FORMAT_VERSION) => {}
        Some(v) if v > Manifest::FORMAT_VERSION => {
            return Err(Error::Newer {
                path: path.to_owned(),
                found: format.to_owned(),
                ours: Manifest::FORMAT,
            });
        }
        _ => return Err(bad(format!("format is {format:?}, not {}: not a fabscope run", Manifest::FORMAT))),
    }
    serde_json::from_value(value).map_err(|e| bad(format!("{e}: {DAMAGED}")))
}

/// The Parquet files of a folder: whole ones and others, each in the order of their names. A file that is
/// being written aside is neither.
pub(crate) fn segments(folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), Error> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        Err(source) => return Err(unreadable(folder)(source)),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(unreadable(folder))?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if text.ends_with(".parquet") && !text.starts_with('.') {
            paths.push((entry.path(), name.to_str().is_some()));
        }
    }
    paths.sort();
    let (mut whole, mut broken) = (Vec::new(), Vec::new());
    for (path, named) in paths {
        let is_whole = named && is_whole(&path).map_err(unreadable(&path))?;
        if is_whole { whole.push(path) } else { broken.push(path) }
    }
    Ok((whole, broken))
}

/// Whether a file begins and ends as a Parquet file does and its footer fits into it. What can not be read at
/// all is an error: it may well be whole.
fn is_whole(path: &Path) -> std::io::Result<bool> {
    let length = match fs::metadata(path) {
        // Opening a pipe would wait for its writer.
        Ok(metadata) if metadata.is_file() => metadata.len(),
        Ok(_) => return Ok(false),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    if length < 12 {
        return Ok(false);
    }
    let mut file = File::open(path)?;
    let mut magic = [0; 4];
    file.read_exact(&mut magic)?;
    file.seek(SeekFrom::End(-8))?;
    let mut tail = [0; 8];
    file.read_exact(&mut tail)?;
    let footer = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
    Ok(&magic == b"PAR1" && &tail[4..] == b"PAR1" && footer + 12 <= length)
}
