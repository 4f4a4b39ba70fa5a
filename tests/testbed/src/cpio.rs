//! Writes cpio archives of the "newc" kind, as the kernel unpacks them at boot. It does not read
//! them, and knows no compression: under emulation a plain archive unpacks fastest.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

/// An archive being written; entries have absolute paths of the VM.
#[derive(Debug)]
pub(crate) struct Archive<W: Write> {
    out: W,
    inode: u32,
    /// Directories already written: a file's parents are made as needed.
    directories: BTreeSet<String>,
}

const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_777;

impl<W: Write> Archive<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, inode: 0, directories: BTreeSet::new() }
    }

    /// Adds a directory and those above it.
    pub(crate) fn directory(&mut self, path: &str) -> io::Result<()> {
        self.parents(path)?;
        if self.directories.insert(path.trim_matches('/').to_owned()) {
            self.header(path, DIRECTORY, 0)?;
        }
        Ok(())
    }

    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.parents(path)?;
        self.header(path, SYMLINK, target.len() as u64)?;
        self.out.write_all(target.as_bytes())?;
        self.pad(target.len() as u64)
    }

    /// Adds a file with these permission bits.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.parents(path)?;
        self.header(path, REGULAR | mode, content.len() as u64)?;
        self.out.write_all(content)?;
        self.pad(content.len() as u64)
    }

    /// Adds a file of the machine with these permission bits, without reading it whole into memory.
    pub(crate) fn copy(&mut self, path: &str, mode: u32, source: &Path) -> io::Result<()> {
        let mut source = File::open(source)?;
        let length = source.metadata()?.len();
        self.parents(path)?;
        self.header(path, REGULAR | mode, length)?;
        let copied = io::copy(&mut Read::by_ref(&mut source).take(length), &mut self.out)?;
        if copied != length {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("the file shrank from {length} to {copied} bytes while it was copied"),
            ));
        }
        self.pad(length)
    }

    /// Ends the archive and gives the writer back.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.header("TRAILER!!!", 0, 0)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn parents(&mut self, path: &str) -> io::Result<()> {
        let path = path.trim_matches('/').to_owned();
        for (at, _) in path.match_indices('/') {
            let parent = &path[..at];
            if self.directories.insert(parent.to_owned()) {
                self.header(parent, DIRECTORY, 0)?;
            }
        }
        Ok(())
    }

    fn header(&mut self, path: &str, mode: u32, size: u64) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        let size = u32::try_from(size)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("{path}: 4 GiB or more")))?;
        self.inode += 1;
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        let name_size = path.len() + 1;
        let mut head = String::from("070701");
        // inode, mode, uid, gid, links, mtime, size, device major and minor, rdev major and minor,
        // length of the name, checksum
        for field in [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size as u32, 0] {
            head.push_str(&format!("{field:08x}"));
        }
        self.out.write_all(head.as_bytes())?;
        self.out.write_all(path.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad((head.len() + name_size) as u64)
    }

    fn pad(&mut self, written: u64) -> io::Result<()> {
        let missing = (4 - written % 4) % 4;
        self.out.write_all(&[0u8; 3][..missing as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn another_reader_unpacks_what_was_written() {
        let into = tempfile::tempdir().unwrap();
        let source = into.path().join("source");
        std::fs::write(&source, [7u8; 1001]).unwrap();
        let mut archive = Archive::new(Vec::new());
        archive.file("/a/b/c.txt", 0o644, b"hello").unwrap();
        archive.file("/a/empty", 0o600, b"").unwrap();
        archive.copy("/a/b/copy", 0o755, &source).unwrap();
        archive.symlink("/a/link", "b/c.txt").unwrap();
        archive.directory("/d/e").unwrap();
        let bytes = archive.finish().unwrap();

        let mut child = Command::new("busybox")
            .args(["cpio", "-idm"])
            .current_dir(into.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        let read = |name: &str| std::fs::read(into.path().join(name)).unwrap();
        assert_eq!(read("a/link"), b"hello");
        assert_eq!(read("a/empty"), b"");
        assert_eq!(read("a/b/copy"), [7u8; 1001]);
        assert!(into.path().join("d/e").is_dir());
    }
}
