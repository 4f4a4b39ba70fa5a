//! Debian's stock kernels, fetched on first use and kept. It takes from the packages only what the VM
//! needs and installs nothing.

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};

use crate::apt::Suite;
use crate::bzimage;
use crate::modules::{self, Tree};

/// The environment variable that names the folder for what is fetched.
pub const CACHE_VARIABLE: &str = "FABSCOPE_TESTBED";

/// A kernel of the test bed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// 6.1, of Debian 12 (bookworm).
    Debian6_1,
    /// 6.12, of Debian 13 (trixie).
    Debian6_12,
    /// The newest in Debian's archive (sid).
    Newest,
}

impl Kernel {
    /// Every kernel, oldest first.
    pub const ALL: [Self; 3] = [Self::Debian6_1, Self::Debian6_12, Self::Newest];

    fn suite(self) -> &'static str {
        match self {
            Self::Debian6_1 => "bookworm",
            Self::Debian6_12 => "trixie",
            Self::Newest => "sid",
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Debian6_1 => "6.1",
            Self::Debian6_12 => "6.12",
            Self::Newest => "newest",
        })
    }
}

impl FromStr for Kernel {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|kernel| kernel.to_string() == text)
            .ok_or_else(|| anyhow!("kernel {text:?}: the test bed has 6.1, 6.12 and newest"))
    }
}

/// A kernel's files on this machine.
#[derive(Debug, Clone)]
pub struct Files {
    /// The kernel's own name for itself, as `uname -r` prints it.
    pub release: String,
    /// What QEMU boots.
    pub image: PathBuf,
    /// The folder of modules, unpacked, with `modules.dep` and `modules.alias`.
    pub modules: PathBuf,
}

/// The folder for what is fetched and made: `FABSCOPE_TESTBED`, else `testbed` in the workspace's
/// target folder.
pub fn cache_folder() -> PathBuf {
    match env::var_os(CACHE_VARIABLE) {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder),
        _ => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/testbed"),
    }
}

/// Where newer kernels keep their image, their modules and the list of what is built in.
const SPLIT: &[&str] = &["linux-binary-", "linux-modules-", "linux-base-"];

/// The kernel's files, fetched if need be. Several processes may ask at once; one interrupted leaves
/// nothing that a later one would take for whole.
///
/// # Errors
///
/// When the registry cannot be reached, a package is missing, or the disk is full; the message says
/// what to do.
pub fn obtain(kernel: Kernel) -> Result<Files> {
    let cache = cache_folder();
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    // apt-get runs in another folder, so the path must not depend on this one.
    let cache = cache.canonicalize()?;
    let folder = cache.join(format!("kernel-{kernel}"));
    if let Some(files) = whole(&folder)? {
        return Ok(files);
    }
    let lock_path = cache.join(format!("kernel-{kernel}.lock"));
    let lock = File::create(&lock_path).with_context(|| lock_path.display().to_string())?;
    lock.lock().with_context(|| format!("cannot lock {}", lock_path.display()))?;
    // Another process may have fetched it while this one waited.
    if let Some(files) = whole(&folder)? {
        return Ok(files);
    }
    let work = cache.join(format!("kernel-{kernel}.part"));
    remove(&work)?;
    fetch(kernel, &work).with_context(|| format!("cannot fetch Debian's kernel {kernel}"))?;
    remove(&folder)?;
    fs::rename(work.join("whole"), &folder)?;
    remove(&work)?;
    whole(&folder)?.context("the kernel was fetched, yet its folder is not whole")
}

/// Says which choice of modules a folder was made with.
fn stamp() -> String {
    format!("2 {} / {}", modules::NEEDED.join(" "), modules::WANTED.join(" "))
}

fn whole(folder: &Path) -> Result<Option<Files>> {
    match fs::read_to_string(folder.join("stamp")) {
        Ok(text) if text == stamp() => {}
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| folder.display().to_string()),
    }
    Ok(Some(Files {
        release: fs::read_to_string(folder.join("release"))?,
        image: folder.join("image"),
        modules: folder.join("modules"),
    }))
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn fetch(kernel: Kernel, work: &Path) -> Result<()> {
    let suite = Suite::update(kernel.suite(), &work.join("apt"), Path::new("/etc/apt"))?;
    let image = suite
        .depends("linux-image-amd64")?
        .into_iter()
        .find(|name| name.starts_with("linux-image-"))
        .context("linux-image-amd64 depends on no linux-image package")?;
    let release = image.trim_start_matches("linux-image-").to_owned();
    // Newer kernels are split over several packages.
    let mut packages = vec![image.clone()];
    packages
        .extend(suite.depends(&image)?.into_iter().filter(|n| SPLIT.iter().any(|part| n.starts_with(part))));
    let unpacked = work.join("unpacked");
    for package in suite.download(&packages, &work.join("packages"))? {
        let output = Command::new("dpkg").arg("-x").arg(&package).arg(&unpacked).output()?;
        if !output.status.success() {
            bail!("dpkg -x {}: {}", package.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        fs::remove_file(&package)?;
    }
    let folder_of_modules =
        [unpacked.join("usr/lib/modules").join(&release), unpacked.join("lib/modules").join(&release)]
            .into_iter()
            .find(|folder| folder.is_dir())
            .with_context(|| format!("{} hold no lib/modules/{release}", packages.join(", ")))?;
    let vmlinuz = [unpacked.join(format!("boot/vmlinuz-{release}")), folder_of_modules.join("vmlinuz")]
        .into_iter()
        .find(|file| file.is_file())
        .with_context(|| format!("{} hold no vmlinuz", packages.join(", ")))?;

    let whole = work.join("whole");
    let modules_out = whole.join("modules");
    fs::create_dir_all(&modules_out)?;
    fs::write(whole.join("image"), bzimage::unpack(&vmlinuz)?)?;
    let tree = Tree::scan(&folder_of_modules)?;
    let modules = tree.closure()?;
    for (name, module) in &modules {
        fs::write(modules_out.join(format!("{name}.ko")), &module.content)?;
    }
    fs::write(modules_out.join("modules.dep"), modules::dep_file(&modules))?;
    fs::write(modules_out.join("modules.alias"), modules::alias_file(&modules))?;
    fs::write(modules_out.join("modules.builtin"), tree.builtin_file())?;
    fs::write(whole.join("release"), &release)?;
    fs::write(whole.join("stamp"), stamp())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_one_name_each() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.to_string().parse::<Kernel>().unwrap(), kernel);
        }
        assert!("6".parse::<Kernel>().unwrap_err().to_string().contains("6.12"));
    }
}
