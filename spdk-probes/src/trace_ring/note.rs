//! A note of the tracepoints that a recording needs to be on. Other recordings of the same process, which live at the
//! same time, leave those on; and should the recording be killed before it switches them off, the next one finds the
//! note and does so. It switches nothing itself.
//!
//! A note is a file in `/dev/shm`, where the ring is too, so it does not outlive the machine's next start. It is locked
//! (flock(2)) as long as its recording lives, and names the process by its number and when it started. Notes are
//! written and read only by whose turn it is ([`super::turn`]).

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::switch::Masks;

/// What their names begin with.
const NAME: &str = "fabscope-tracepoints";
/// Where notes are.
const FOLDER: &str = "/dev/shm";
/// The most of a note that is read, in bytes.
const LONGEST: u64 = 1 << 16;

/// What others' notes about a process say, all together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Others {
    /// Those of recordings that were killed.
    pub(super) left: Masks,
    /// Those of recordings that live.
    pub(super) live: Masks,
}

/// The note of a recording that lives.
#[derive(Debug)]
pub(super) struct Note {
    path: PathBuf,
    file: File,
    pid: u32,
    started: u64,
}

impl Note {
    /// Leaves an empty note about a process, and takes away those of recordings that were killed. What the others
    /// say is returned. Where no note can be left the recording goes on without.
    pub(super) fn leave(pid: u32) -> (Option<Note>, Others) {
        Note::leave_in(Path::new(FOLDER), pid)
    }

    fn leave_in(folder: &Path, pid: u32) -> (Option<Note>, Others) {
        let Some(started) = started(pid) else { return (None, Others::default()) };
        let about = about(pid, started);
        let others = others(folder, &about, None);
        let mut options = OpenOptions::new();
        // Who finds the name taken is not to be led elsewhere.
        options.read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let own = std::process::id();
        let note = (0..100).find_map(|n| {
            let path = folder.join(format!("{about}{own}.{n}"));
            let file = options.open(&path).ok()?;
            file.try_lock().ok()?;
            Some(Note { path, file, pid, started })
        });
        (note, others)
    }

    /// What other recordings of the same process need to be on, which live now.
    pub(super) fn live_others(&self) -> Masks {
        let folder = self.path.parent().unwrap_or(Path::new(FOLDER));
        others(folder, &about(self.pid, self.started), Some(&self.path)).live
    }

    /// Says what is needed now.
    pub(super) fn write(&mut self, masks: &Masks) {
        let text = serde_json::to_vec(masks).unwrap_or_default();
        // A note that can not be written is one that says less.
        let _ = self.file.set_len(0).and_then(|()| {
            std::os::unix::fs::FileExt::write_all_at(&self.file, &text, 0)?;
            self.file.flush()
        });
    }

    /// Whether the process has ended, and its tracepoints with it.
    pub(super) fn is_over(&self) -> bool {
        started(self.pid) != Some(self.started)
    }

    /// Nothing is needed any more.
    pub(super) fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// When a process that has not ended started, in ticks after the machine's start (proc_pid_stat(5), fields 3 and 22).
pub(super) fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may hold anything.
    let (_, behind) = stat.rsplit_once(')')?;
    let behind = behind.trim_start();
    if behind.starts_with(['Z', 'X']) {
        return None;
    }
    behind.split_whitespace().nth(19)?.parse().ok()
}

/// Whether a note's name is about a process that has ended.
fn is_of_ended(name: &str) -> bool {
    let mut parts = name.strip_prefix(NAME).unwrap_or_default().split('.').skip(1);
    let mut number = || parts.next()?.parse::<u64>().ok();
    let (Some(pid), Some(since)) = (number(), number()) else { return false };
    u32::try_from(pid).is_ok_and(|pid| started(pid) != Some(since))
}

/// What the names of the notes about a process begin with.
fn about(pid: u32, started: u64) -> String {
    format!("{NAME}.{pid}.{started}.")
}

/// Reads the notes about a process but one's own. Those that nobody holds are taken away, unless one has a note
/// already: then they are for who comes next.
fn others(folder: &Path, about: &str, but: Option<&Path>) -> Others {
    let mut others = Others::default();
    let names =
        std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.file_name()));
    for name in names.filter_map(|name| name.into_string().ok()) {
        let ended = is_of_ended(&name);
        if !ended && !name.starts_with(about) {
            continue;
        }
        let path = folder.join(name);
        if but == Some(path.as_path()) {
            continue;
        }
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let Ok(file) = options.open(&path) else { continue };
        // Others' notes are not believed.
        let own = nix::unistd::geteuid().as_raw();
        if !file.metadata().is_ok_and(|meta| meta.is_file() && [0, own].contains(&meta.uid())) {
            continue;
        }
        let masks = match file.try_lock() {
            Ok(()) if but.is_some() => continue,
            Ok(()) => {
                let _ = std::fs::remove_file(&path);
                &mut others.left
            }
            Err(TryLockError::WouldBlock) => &mut others.live,
            Err(TryLockError::Error(_)) => continue,
        };
        let mut text = Vec::new();
        let read = (&file).take(LONGEST).read_to_end(&mut text);
        if !ended && let (Ok(_), Ok(said)) = (read, serde_json::from_slice::<Masks>(&text)) {
            for (group, bits) in said {
                *masks.entry(group).or_insert(0) |= bits;
            }
        }
    }
    others
}

#[cfg(test)]
mod tests {
    use super::{Note, Others, started};
    use crate::trace_ring::switch::Masks;

    #[test]
    fn a_note_is_found_when_its_recording_is_gone_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let pid = std::process::id();
        let (note, others) = Note::leave_in(folder.path(), pid);
        let mut note = note.unwrap();
        assert_eq!(others, Others::default());
        note.write(&[("bdev".to_owned(), 0xffff)].into());
        note.write(&[("bdev".to_owned(), 3)].into());
        // While it lives it is nobody else's, and known to the others.
        let (second, others) = Note::leave_in(folder.path(), pid);
        let mut second = second.unwrap();
        assert_eq!(others, Others { live: [("bdev".to_owned(), 3)].into(), ..Others::default() });
        second.write(&[("nvmf_tcp".to_owned(), 1), ("bdev".to_owned(), 4)].into());
        assert_eq!(note.live_others(), Masks::from([("bdev".to_owned(), 4), ("nvmf_tcp".to_owned(), 1)]));
        second.write(&Masks::new());
        assert_eq!(note.live_others(), Masks::new());
        second.write(&[("nvmf_tcp".to_owned(), 1), ("bdev".to_owned(), 4)].into());
        // Both end without a word.
        drop((note, second));
        // Nonsense, another process's, and a link are passed over.
        let started = started(pid).unwrap();
        let about = |name: &str| folder.path().join(format!("fabscope-tracepoints.{pid}.{started}.{name}"));
        std::fs::write(about("x"), "nonsense").unwrap();
        std::fs::write(folder.path().join(format!("fabscope-tracepoints.{pid}.1.1")), "{\"sock\":1}")
            .unwrap();
        std::os::unix::fs::symlink("/dev/zero", about("link")).unwrap();
        let (third, others) = Note::leave_in(folder.path(), pid);
        let left = Masks::from([("bdev".to_owned(), 7), ("nvmf_tcp".to_owned(), 1)]);
        assert_eq!(others, Others { left, ..Others::default() });
        // One that ends in order leaves nothing.
        third.unwrap().remove();
        let (fourth, others) = Note::leave_in(folder.path(), pid);
        assert_eq!(others, Others::default());
        fourth.unwrap().remove();
        // What is about a process that has ended goes too; the link was nobody's.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn without_a_process_or_a_folder_there_is_no_note() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Note::leave_in(folder.path(), u32::MAX).0.is_none());
        let nowhere = folder.path().join("nowhere");
        let (note, others) = Note::leave_in(&nowhere, std::process::id());
        assert!(note.is_none() && others == Others::default());
    }
}
