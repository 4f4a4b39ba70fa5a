//! What a batch keeps in its output directory between calls: one file of results for each pair, named by what is in its
//! runs, so that a pair is joined again where a run changed and never else. It judges nothing.
//!
//! A file is a line of JSON, the histograms' bytes in the order of the rows, and a checksum of both. It is written aside
//! and renamed, so a cut one is never met under its name; what does not fit its checksum is made again. One batch at a
//! time works on a directory: the others wait for its lock.

use super::find::Fingerprint;
use super::step::PairRows;
use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name and version of what is kept, and the version that made it: results of another are made again, since what is
/// compared across runs has to be made in one way.
pub(crate) const FORMAT: &str = concat!("fabscope-batch-result/1 by ", env!("CARGO_PKG_VERSION"));

const FOLDER: &str = "results";
const ENDING: &str = "pair";
/// How often a lock that another has is tried.
const PATIENCE: Duration = Duration::from_millis(50);

/// What came of one pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stored {
    /// Its rows.
    Rows(PairRows),
    /// Why it has none; it would not be otherwise another time.
    Failed(String),
}

/// The output directory, which no other batch works on meanwhile.
#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    _lock: File,
}

pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Run(run_format::Error::Io { doing, path, source })
}

impl Store {
    /// Takes the directory, which is made where it is not there. Where another batch has it, `waiting` is called once
    /// and then `stop` again and again; `None` where that says so.
    pub(crate) fn take(
        out: &Path,
        waiting: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Store>, Error> {
        if out.join("run.json").exists() {
            let why = "it is a run: give another directory to write the table into";
            return Err(Error::Input { given: out.display().to_string(), why: why.into() });
        }
        let folder = out.join(FOLDER);
        fs::create_dir_all(&folder).map_err(io("create", &folder))?;
        let path = folder.join("lock");
        let lock = File::create(&path).map_err(io("create", &path))?;
        let mut told = false;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Some(Store { folder, _lock: lock })),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => return Err(io("lock", &path)(source)),
            }
            if !told {
                waiting();
                told = true;
            }
            if stop() {
                return Ok(None);
            }
            std::thread::sleep(PATIENCE);
        }
    }

    fn path(&self, key: u128) -> PathBuf {
        self.folder.join(format!("{key:032x}.{ENDING}"))
    }

    /// What is kept of a pair; `None` where there is nothing, or nothing that can be read.
    pub(crate) fn load(&self, key: u128) -> Option<Stored> {
        read(&fs::read(self.path(key)).ok()?)
    }

    /// Keeps what came of a pair.
    pub(crate) fn save(&self, key: u128, stored: &Stored) -> Result<(), Error> {
        let path = self.path(key);
        let bytes = written(stored).map_err(|e| io("write", &path)(e.into()))?;
        replace(&path, |aside| fs::write(aside, &bytes).map_err(io("write", aside)))
    }

    /// Removes what is kept of pairs that are no more, and what interrupted batches left.
    pub(crate) fn sweep(&self, keep: &HashSet<u128>) -> Result<(), Error> {
        for entry in fs::read_dir(&self.folder).map_err(io("list", &self.folder))? {
            let path = entry.map_err(io("list", &self.folder))?.path();
            let ours = path.extension().is_some_and(|e| e == ENDING || e == "tmp");
            let key = path.file_stem().and_then(|name| u128::from_str_radix(name.to_str()?, 16).ok());
            if ours && !key.is_some_and(|key| keep.contains(&key)) {
                match fs::remove_file(&path) {
                    Err(e) if e.kind() != ErrorKind::NotFound => return Err(io("remove", &path)(e)),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// What the table was made of when it was last written.
    pub(crate) fn table_is_of(&self) -> Option<String> {
        fs::read_to_string(self.folder.join("table")).ok()
    }

    /// Notes what the table was made of.
    pub(crate) fn note_table(&self, of: &str) -> Result<(), Error> {
        let path = self.folder.join("table");
        replace(&path, |aside| fs::write(aside, of).map_err(io("write", aside)))
    }
}

/// Has a file written beside `path` and renamed when it is complete; it is removed when it is not.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&Path) -> Result<(), Error>) -> Result<(), Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let done = write(&aside).and_then(|()| fs::rename(&aside, path).map_err(io("rename", &aside)));
    if done.is_err() {
        // The error to report is the first one.
        let _ = fs::remove_file(&aside);
    }
    done
}

fn checksum(bytes: &[u8]) -> [u8; 16] {
    let mut hash = Fingerprint::new();
    hash.add(bytes);
    hash.get().to_le_bytes()
}

fn written(stored: &Stored) -> serde_json::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(stored)?;
    bytes.push(b'\n');
    if let Stored::Rows(rows) = stored {
        for figure in rows.classes.iter().flat_map(|class| &class.figures) {
            bytes.extend((figure.buckets.bytes.len() as u32).to_le_bytes());
            bytes.extend(&figure.buckets.bytes);
        }
    }
    let sum = checksum(&bytes);
    bytes.extend(sum);
    Ok(bytes)
}

fn read(bytes: &[u8]) -> Option<Stored> {
    let (body, sum) = bytes.split_last_chunk::<16>()?;
    if checksum(body) != *sum {
        return None;
    }
    let end = body.iter().position(|&b| b == b'\n')?;
    let mut stored = serde_json::from_slice(&body[..end]).ok()?;
    let mut rest = &body[end + 1..];
    if let Stored::Rows(rows) = &mut stored {
        for figure in rows.classes.iter_mut().flat_map(|class| &mut class.figures) {
            let (length, after) = rest.split_first_chunk::<4>()?;
            let length = u32::from_le_bytes(*length) as usize;
            figure.buckets.bytes = after.get(..length)?.to_vec();
            rest = &after[length..];
        }
    }
    Some(stored)
}

#[cfg(test)]
mod tests {
    use super::{PairRows, Store, Stored, read, written};
    use crate::batch::step;
    use crate::synthetic::Load;
    use proptest::prelude::*;
    use std::collections::HashSet;
    use std::sync::OnceLock;

    fn rows() -> &'static Stored {
        static ROWS: OnceLock<Stored> = OnceLock::new();
        ROWS.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            let (host, target) =
                Load { commands: 2_000, ..Load::default() }.record().write(folder.path()).unwrap();
            Stored::Rows(step(Some(host.directory()), Some(target.directory()), 1 << 30).unwrap())
        })
    }

    #[test]
    fn what_is_kept_is_read_again() {
        let (Stored::Rows(was), Some(Stored::Rows(is))) = (rows(), read(&written(rows()).unwrap())) else {
            panic!("no rows");
        };
        // A number's last digit may be another one.
        let exact = |rows: &PairRows| {
            let figures = rows.classes.iter().flat_map(|class| &class.figures);
            let buckets: Vec<_> =
                figures.map(|f| (f.stage.clone(), f.times.p50_ns, f.buckets.bytes.clone())).collect();
            (rows.name(), rows.labels.clone(), rows.join.clone(), rows.start_ns, buckets)
        };
        assert_eq!(exact(was), exact(&is));
        assert!(!was.classes.is_empty());
        let failed = Stored::Failed("no commands\nat all".into());
        assert_eq!(read(&written(&failed).unwrap()), Some(failed));
    }

    proptest! {
        #[test]
        fn what_was_damaged_is_not_read(place: proptest::sample::Index, flip in 1u8.., cut: bool) {
            let mut bytes = written(rows()).unwrap();
            let place = place.index(bytes.len());
            if cut {
                bytes.truncate(place);
            } else {
                bytes[place] ^= flip;
            }
            prop_assert_eq!(read(&bytes), None);
        }

        #[test]
        fn any_bytes_are_no_result(bytes: Vec<u8>) {
            prop_assert_eq!(read(&bytes), None);
        }
    }

    #[test]
    fn one_batch_at_a_time_has_a_directory_and_sweeps_what_is_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let take = |stop: bool| Store::take(&out, &|| {}, &move || stop).unwrap();
        let store = take(false).unwrap();
        assert!(take(true).is_none());
        for key in [1, 2] {
            store.save(key, &Stored::Failed(format!("{key}"))).unwrap();
        }
        std::fs::write(out.join("results/.x.pair.1.tmp"), "cut").unwrap();
        std::fs::write(out.join("results/mine.txt"), "not ours").unwrap();
        store.sweep(&HashSet::from([2])).unwrap();
        assert_eq!((store.load(1), store.load(2)), (None, Some(Stored::Failed("2".into()))));
        assert!(!out.join("results/.x.pair.1.tmp").exists() && out.join("results/mine.txt").exists());
        drop(store);
        assert!(take(true).is_some());
    }
}
