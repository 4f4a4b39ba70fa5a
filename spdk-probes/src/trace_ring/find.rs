//! Finds the trace ring that a process has mapped, whatever it is called and wherever the process lives.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Error;

/// A mapping of a ring's file in /proc/PID/maps (proc_pid_maps(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    range: String,
    inode: u64,
    path: PathBuf,
}

/// The ring's file, and the name that the process knows it by.
pub(super) fn ring_of(pid: u32) -> Result<(File, PathBuf), Error> {
    let none = |why: String| Error::NoTraceRing { pid, why };
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).map_err(|error| {
        if error.kind() == std::io::ErrorKind::NotFound {
            Error::ProcessGone { pid }
        } else {
            none(error.to_string())
        }
    })?;
    let mut mappings: Vec<Mapping> = maps.lines().filter_map(mapping).collect();
    mappings.dedup_by(|a, b| a.inode == b.inode);
    let mapping = match mappings.as_slice() {
        [mapping] => mapping,
        [] => {
            return Err(none(
                "it has no *_trace.* of /dev/shm mapped (started with --num-trace-entries 0?)".to_owned(),
            ));
        }
        several => {
            let names: Vec<String> = several.iter().map(|m| m.path.display().to_string()).collect();
            return Err(none(format!("it has several mapped: {}", names.join(", "))));
        }
    };
    // The mapping itself is the file, even where its name is gone or is another container's.
    let mut failed = None;
    for path in [
        PathBuf::from(format!("/proc/{pid}/map_files/{}", mapping.range)),
        Path::new(&format!("/proc/{pid}/root")).join(mapping.path.strip_prefix("/").unwrap_or(&mapping.path)),
    ] {
        match File::open(&path) {
            Ok(file) if file.metadata().is_ok_and(|meta| meta.ino() == mapping.inode) => {
                return Ok((file, mapping.path.clone()));
            }
            Ok(_) => failed = Some(format!("{} is another file by now", mapping.path.display())),
            Err(error) => failed = Some(format!("{}: {error}", mapping.path.display())),
        }
    }
    Err(none(failed.unwrap_or_default()))
}

fn mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (range, inode) = (fields.next()?, fields.nth(3)?);
    let path = fields.next()?.trim_start().trim_end_matches(" (deleted)");
    let name = path.strip_prefix("/dev/shm/")?;
    (name.contains("_trace.") && !name.contains('/')).then(|| Mapping {
        range: range.to_owned(),
        inode: inode.parse().unwrap_or(0),
        path: PathBuf::from(path),
    })
}

#[cfg(test)]
mod tests {
    use super::{mapping, ring_of};
    use proptest::prelude::*;

    #[test]
    fn a_ring_is_known_among_the_mappings() {
        let line = "7f0000000000-7f0000340000 rw-s 00000000 00:18 4321                       /dev/shm/nvmf_trace.pid77";
        let found = mapping(line).unwrap();
        assert_eq!((found.range.as_str(), found.inode), ("7f0000000000-7f0000340000", 4321));
        assert_eq!(found.path.to_str(), Some("/dev/shm/nvmf_trace.pid77"));
        let gone = mapping(&format!("{line} (deleted)")).unwrap();
        assert_eq!(gone.path, found.path);
        assert_eq!(mapping("7f00-7f01 r--p 00000000 00:18 4321   /usr/lib/nvmf_trace.so"), None);
        assert_eq!(mapping("7f00-7f01 rw-s 00000000 00:18 4321   /dev/shm/other"), None);
        assert_eq!(mapping("7f00-7f01 rw-p 00000000 00:00 0"), None);
    }

    #[test]
    fn a_process_without_a_ring_is_told() {
        let error = ring_of(std::process::id()).unwrap_err().to_string();
        assert!(error.contains("no *_trace.*"), "{error}");
        let gone = ring_of(u32::MAX).unwrap_err();
        assert!(matches!(gone, crate::Error::ProcessGone { .. }), "{gone}");
    }

    proptest! {
        #[test]
        fn any_line_is_a_mapping_or_none(line in ".{0,200}") {
            let _ = mapping(&line);
        }
    }
}
