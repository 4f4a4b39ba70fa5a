//! A file that is read again and again, by `pread` on a descriptor that is kept and into a buffer that is kept.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// An attribute of sysfs is no longer than a page.
const PAGE: usize = 4096;
/// No file that is sampled is longer; what is, is not what it seems.
const LONGEST: usize = 64 << 20;

/// An open file and what was last read from it.
#[derive(Debug)]
pub(crate) struct Kept {
    file: File,
    buffer: Vec<u8>,
}

impl Kept {
    pub(crate) fn open(path: &Path) -> io::Result<Kept> {
        Ok(Kept { file: File::open(path)?, buffer: Vec::new() })
    }

    /// All of a file of procfs: it is read until it ends, since a read may give less than there is.
    pub(crate) fn read(&mut self) -> io::Result<&[u8]> {
        if self.buffer.is_empty() {
            self.buffer.resize(PAGE, 0);
        }
        let mut filled = 0;
        loop {
            let room = self.buffer.get_mut(filled..).unwrap_or_default();
            match self.file.read_at(room, filled as u64) {
                Ok(0) => return Ok(self.buffer.get(..filled).unwrap_or_default()),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            if filled == self.buffer.len() {
                if filled >= LONGEST {
                    return Err(io::Error::other("it does not end"));
                }
                self.buffer.resize(filled * 2, 0);
            }
        }
    }

    /// An attribute of sysfs: one read gives all of it.
    pub(crate) fn attribute(&mut self) -> io::Result<&[u8]> {
        if self.buffer.is_empty() {
            self.buffer.resize(PAGE, 0);
        }
        loop {
            match self.file.read_at(&mut self.buffer, 0) {
                Ok(n) => return Ok(self.buffer.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Kept;
    use std::io::{Seek, SeekFrom, Write};

    #[test]
    fn a_file_is_read_whole_and_anew_each_time() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut kept = Kept::open(file.path()).unwrap();
        assert_eq!(kept.read().unwrap(), b"");
        for length in [1, 4095, 4096, 4097, 100_000, 10] {
            file.as_file().set_len(0).unwrap();
            file.seek(SeekFrom::Start(0)).unwrap();
            file.write_all(&vec![b'x'; length]).unwrap();
            assert_eq!(kept.read().unwrap().len(), length);
            assert_eq!(kept.attribute().unwrap().len(), length.min(131_072));
        }
    }
}
