//! Says whether this machine can have the test bed, so that tests skip for a reason and not silently.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Result, bail};

use crate::image::find_program;
use crate::kernel::{self, Kernel};
use crate::vm::QEMU;

/// Programs without which there is no test bed, and the Debian package of each.
const PROGRAMS: &[(&str, &str)] = &[
    (QEMU, "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("dash", "dash"),
    ("ldd", "libc-bin"),
    ("strip", "binutils"),
    ("tar", "tar"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
];

/// Why there is no test bed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WhyNot {
    /// Programs are not installed; the text names them and their packages.
    Programs(String),
    /// The kernel could not be had.
    Kernel(String),
}

/// Why this kernel cannot be booted here, or none. Fetches the kernel if need be.
pub fn why_not(kernel: Kernel) -> Option<WhyNot> {
    let missing: Vec<&(&str, &str)> =
        PROGRAMS.iter().filter(|(program, _)| find_program(Path::new(program)).is_none()).collect();
    if !missing.is_empty() {
        let programs: Vec<&str> = missing.iter().map(|(program, _)| *program).collect();
        let packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
        return Some(WhyNot::Programs(format!(
            "the VM test bed needs {}; apt-get install {}",
            programs.join(", "),
            packages.join(" ")
        )));
    }
    kernel::obtain(kernel).err().map(|error| WhyNot::Kernel(format!("{error:#}")))
}

/// Whether this kernel can be booted here. Where it cannot, says `skipped: why` on standard error,
/// past the test runner's capture.
///
/// # Errors
///
/// When programs are missing and the environment says `CI=true`: CI installs what the tests need, so
/// a test that is skipped there would go unnoticed.
pub fn available(kernel: Kernel) -> Result<bool> {
    match why_not(kernel) {
        None => Ok(true),
        Some(WhyNot::Programs(why)) if std::env::var_os("CI").is_some_and(|ci| ci == "true") => {
            bail!("{why}")
        }
        Some(WhyNot::Programs(why) | WhyNot::Kernel(why)) => {
            writeln!(io::stderr(), "skipped: {why}")?;
            Ok(false)
        }
    }
}
