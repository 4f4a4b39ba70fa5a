//! What can go wrong with a run directory.

use std::path::PathBuf;

/// An error of writing or reading a run. Its text names the thing, the reason and the next step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The output directory is already there.
    #[error("{0} is already there: choose another name with -o, or replace it with --force")]
    Exists(PathBuf),
    /// Another recorder is writing into the directory.
    #[error(
        "{0} is being recorded into by another fabscope: choose another name with -o, or end that recording first"
    )]
    InUse(PathBuf),
    /// The thing to replace is not a run.
    #[error(
        "{0} is there and is not a fabscope run, so --force does not replace it: choose another name with -o"
    )]
    NotOurs(PathBuf),
    /// There is no such directory.
    #[error("{0}: no such run directory")]
    Missing(PathBuf),
    /// The directory has no manifest.
    #[error("{0} is not a fabscope run: it has no run.json")]
    NotARun(PathBuf),
    /// The manifest can not be read.
    #[error("{path}: {reason}")]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The run was written by a newer fabscope.
    #[error(
        "{path} has format {found}, newer than {ours}, the newest that this fabscope reads: use a newer fabscope"
    )]
    Newer {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        found: String,
        /// Ours.
        ours: &'static str,
    },
    /// The file system said no.
    #[error("{doing} {path}: {source}")]
    Io {
        /// What was being done, such as "write".
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A Parquet file could not be written or read.
    #[error("{doing} {path}: {source}")]
    Parquet {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What polars said.
        source: Box<polars::error::PolarsError>,
    },
    /// A file without which the run can not be read is cut or something else.
    #[error(
        "{0} is cut or no Parquet file: the run was damaged after it was recorded; copy it again from where it was recorded"
    )]
    Damaged(PathBuf),
    /// The list of a windowed run's slices is damaged.
    #[error("{path}: {}{reason}: the run was damaged after it was recorded", at(*line))]
    Slices {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1; 0 where it is the file as a whole.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A column is not there or has another type.
    #[error("{path}: column {column} {reason}")]
    Column {
        /// The file or folder.
        path: PathBuf,
        /// The column.
        column: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The thread that writes segments ended unexpectedly.
    #[error("{0}: the writer of this run ended unexpectedly; what it wrote before is kept")]
    WriterGone(PathBuf),
}

/// Where in a file something is wrong; nothing where it is the file as a whole.
fn at(line: usize) -> String {
    if line == 0 { String::new() } else { format!("line {line}: ") }
}

impl Error {
    /// Whether the disk (or a quota) is full.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Error::Io { source, .. }
            if matches!(source.raw_os_error(), Some(nix::libc::ENOSPC | nix::libc::EDQUOT)))
    }
}
