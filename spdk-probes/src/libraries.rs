//! Finds SPDK's shared libraries of a program that does not run: by what it says that it needs and where it says to
//! look, as the dynamic linker does (ld.so(8)), and beside it, where a build has them. Other libraries are not looked
//! for: no probe goes there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use object::LittleEndian;
use object::elf::{DT_NEEDED, DT_RPATH, DT_RUNPATH, FileHeader64};
use object::read::elf::{Dyn, FileHeader};

use crate::Error;

/// How many libraries a program may need, one through another.
const MOST: usize = 256;

/// Where libraries are when nothing says where.
const USUAL: [&str; 6] = [
    "/usr/local/lib",
    "/usr/local/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];

/// SPDK's libraries that a program needs, directly or through each other.
#[derive(Debug, Default)]
pub(crate) struct Libraries {
    pub(crate) found: Vec<PathBuf>,
    pub(crate) missing: Vec<String>,
}

impl Libraries {
    /// Looks for those of a program.
    pub(crate) fn of(program: &Path) -> Libraries {
        let mut libraries = Libraries::default();
        let mut known = BTreeSet::new();
        let mut to_read = vec![program.to_owned()];
        // An executable's own run path holds for all that it loads.
        let mut inherited = Vec::new();
        while let Some(file) = to_read.pop() {
            let Some(links) = Links::read(&file) else { continue };
            if inherited.is_empty() {
                inherited.clone_from(&links.folders);
            }
            for name in links.needed {
                if !name.starts_with("libspdk") || known.len() >= MOST || !known.insert(name.clone()) {
                    continue;
                }
                let folders = links.folders.iter().chain(&inherited).cloned();
                match folders
                    .chain(usual(program))
                    .map(|folder| folder.join(&name))
                    .find(|path| path.is_file())
                {
                    Some(path) => {
                        to_read.push(path.clone());
                        libraries.found.push(path);
                    }
                    None => libraries.missing.push(name),
                }
            }
        }
        libraries
    }

    /// Why a program of which no file holds SPDK is none, where its libraries are not there.
    pub(crate) fn error(&self, program: &Path) -> Option<Error> {
        let name = self.missing.first()?;
        let more = match self.missing.len() - 1 {
            0 => String::new(),
            more => format!(" (as are {more} more)"),
        };
        let what = format!(
            "needed by {}, and in none of its run paths nor beside it{more}: set LD_LIBRARY_PATH to the folder with \
             SPDK's libraries",
            program.display()
        );
        Some(Error::Read {
            path: PathBuf::from(name),
            source: std::io::Error::new(std::io::ErrorKind::NotFound, what),
        })
    }
}

/// Where every file's libraries are looked for, after its own folders.
fn usual(program: &Path) -> impl Iterator<Item = PathBuf> {
    let environment = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let set: Vec<PathBuf> = std::env::split_paths(&environment).filter(|path| path.is_absolute()).collect();
    let folder = program.parent().map(Path::to_owned).unwrap_or_default();
    // A build has bin/nvmf_tgt and lib/libspdk_nvmf.so.
    let beside = [folder.clone(), folder.join("../lib")];
    set.into_iter().chain(beside).chain(USUAL.into_iter().map(PathBuf::from))
}

/// What a file says of the libraries that it needs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Links {
    needed: Vec<String>,
    folders: Vec<PathBuf>,
}

impl Links {
    fn read(file: &Path) -> Option<Links> {
        // What is no file, such as a pipe, is not waited for; what is wrong with it, who opens it says.
        if !std::fs::metadata(file).ok()?.is_file() {
            return None;
        }
        let opened = std::fs::File::open(file).ok()?;
        // SAFETY: the mapping is only read. A file that shrinks meanwhile raises SIGBUS, as for every reader of a
        // mapping; nothing here writes to programs.
        let bytes = unsafe { memmap2::Mmap::map(&opened) }.ok()?;
        Links::parse(&bytes, file.parent().unwrap_or(Path::new("/")))
    }

    /// Of the file's bytes and its folder, which is its `$ORIGIN`.
    fn parse(bytes: &[u8], origin: &Path) -> Option<Links> {
        let header = FileHeader64::<LittleEndian>::parse(bytes).ok()?;
        let endian = header.endian().ok()?;
        let sections = header.sections(endian, bytes).ok()?;
        let (entries, strings) = sections.dynamic(endian, bytes).ok()??;
        let strings = sections.strings(endian, bytes, strings).ok()?;
        let mut links = Links::default();
        for entry in entries {
            let text = || -> Option<String> {
                let text = entry.string(endian, strings).ok()?;
                Some(String::from_utf8_lossy(text).into_owned())
            };
            match entry.d_tag(endian) {
                DT_NEEDED => links.needed.extend(text()),
                DT_RUNPATH | DT_RPATH => {
                    for folder in text()?.split(':').filter(|folder| !folder.is_empty()) {
                        let origin = origin.to_string_lossy();
                        let folder = folder.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin);
                        links.folders.push(PathBuf::from(folder));
                    }
                }
                _ => {}
            }
        }
        Some(links)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn this_test_needs_no_library_of_spdk() {
        let program = std::env::current_exe().unwrap();
        let links = Links::read(&program).unwrap();
        assert!(links.needed.iter().any(|name| name.starts_with("libc.so")), "{links:?}");
        let libraries = Libraries::of(&program);
        assert!(libraries.found.is_empty() && libraries.missing.is_empty(), "{libraries:?}");
        assert!(libraries.error(&program).is_none());
    }

    #[test]
    fn what_is_not_there_is_named_with_the_way_out() {
        let missing = vec!["libspdk_nvmf.so.20".to_owned(), "libspdk_bdev.so.17".to_owned()];
        let libraries = Libraries { missing, ..Libraries::default() };
        let said = libraries.error(Path::new("/opt/nvmf_tgt")).unwrap().to_string();
        for text in ["libspdk_nvmf.so.20", "/opt/nvmf_tgt", "1 more", "LD_LIBRARY_PATH"] {
            assert!(said.contains(text), "{said}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..600), magic: bool) {
            let mut bytes = bytes;
            if magic {
                for (at, byte) in b"\x7fELF\x02\x01\x01".iter().zip(&mut bytes) {
                    *byte = *at;
                }
            }
            Links::parse(&bytes, Path::new("/"));
        }
    }
}
