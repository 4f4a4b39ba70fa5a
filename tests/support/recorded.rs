//! The recorded real runs in `tests/data`, and copies of them to be changed.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of a recorded pair.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A path as an argument.
pub fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is no text")
}

/// A copy of a recorded run, to be changed.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let place = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &place)?;
        } else {
            fs::copy(entry.path(), place)?;
        }
    }
    Ok(())
}
