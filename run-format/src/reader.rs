//! Opens a run directory, whole or cut short. It reads; it never writes.

use crate::batch::queues_from_frame;
use crate::writer::parquet;
use crate::{Error, Manifest, Queue, QueueId, columns};
use polars::prelude::{DataFrame, IntoLazy, LazyFrame, ScanArgsParquet};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// A run on disk.
#[derive(Clone, Debug)]
pub struct Run {
    directory: PathBuf,
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
        if !directory.exists() {
            return Err(Error::Missing(directory.to_owned()));
        }
        let path = directory.join("run.json");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e)
                if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) =>
            {
                return Err(Error::NotARun(directory.to_owned()));
            }
            Err(source) => return Err(Error::Io { doing: "read", path, source }),
        };
        let manifest = parse_manifest(&path, &text)?;
        let (segments, broken) = segments(&directory.join("commands"))?;
        Ok(Run { directory: directory.to_owned(), manifest, segments, broken })
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
        let paths = self.segments.iter().map(|p| p.to_string_lossy().as_ref().into()).collect();
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

    /// Its queues by number. A run that was cut before the first segment has none.
    ///
    /// # Errors
    /// When a file of `queues/` can not be read.
    pub fn queues(&self) -> Result<BTreeMap<QueueId, Queue>, Error> {
        let (files, _) = segments(&self.directory.join("queues"))?;
        let mut queues = BTreeMap::new();
        for path in files {
            let args = ScanArgsParquet { glob: false, cache: false, ..ScanArgsParquet::default() };
            let frame = LazyFrame::scan_parquet(path.to_string_lossy().as_ref().into(), args)
                .and_then(LazyFrame::collect)
                .map_err(parquet("read", &path))?;
            queues.extend(queues_from_frame(&frame).map_err(parquet("read", &path))?);
        }
        Ok(queues)
    }
}

fn parse_manifest(path: &Path, text: &str) -> Result<Manifest, Error> {
    let bad = |reason: String| Error::Manifest { path: path.to_owned(), reason };
    let value: serde_json::Value = serde_json::from_str(text)
        .map_err(|e| bad(format!("not JSON ({e}): the run was damaged after it was recorded")))?;
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
    serde_json::from_value(value).map_err(|e| bad(e.to_string()))
}

/// The Parquet files of a folder: whole ones and others, each in the order of their names. A file that is
/// being written aside is neither.
fn segments(folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), Error> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        Err(source) => return Err(Error::Io { doing: "read", path: folder.to_owned(), source }),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| Error::Io { doing: "read", path: folder.to_owned(), source })?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.ends_with(".parquet") && !name.starts_with('.') {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths.into_iter().partition(|path| is_whole(path)))
}

/// Whether a file begins and ends as a Parquet file does and its footer fits into it.
fn is_whole(path: &Path) -> bool {
    let check = || -> std::io::Result<bool> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        if length < 12 {
            return Ok(false);
        }
        let mut magic = [0; 4];
        file.read_exact(&mut magic)?;
        file.seek(SeekFrom::End(-8))?;
        let mut tail = [0; 8];
        file.read_exact(&mut tail)?;
        let footer = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
        Ok(&magic == b"PAR1" && &tail[4..] == b"PAR1" && footer + 12 <= length)
    };
    check().unwrap_or(false)
}
