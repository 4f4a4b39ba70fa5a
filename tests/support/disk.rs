//! A small disk that can be full, or written no more.

use super::{outcome, skipped};
use anyhow::{Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small file system in memory, unmounted when this is dropped.
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    /// Mounts one of this size on a directory that it makes; says so where that can not be.
    pub fn mount(at: &Path, kib: u32) -> Result<Option<Tmpfs>> {
        fs::create_dir(at)?;
        let mounted = outcome(
            Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "none"]).arg(at),
        )?;
        if mounted.code != Some(0) {
            skipped(&format!("a tmpfs can not be mounted here: {}", mounted.stderr.trim()));
            return Ok(None);
        }
        Ok(Some(Tmpfs(at.to_owned())))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Mounts it anew with other options, such as `ro` or `size=4096k`.
    pub fn remount(&self, options: &str) -> Result<()> {
        let done = outcome(Command::new("mount").args(["-o", &format!("remount,{options}")]).arg(&self.0))?;
        ensure!(done.code == Some(0), "{done:?}");
        Ok(())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = outcome(Command::new("umount").arg(&self.0));
    }
}
