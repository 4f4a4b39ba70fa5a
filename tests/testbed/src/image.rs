//! Makes what the kernel unpacks at boot: busybox, the modules, the agent, and the programs and files
//! that a test names. It writes one archive and boots nothing.

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::io::BufWriter;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cpio::Archive;
use crate::kernel::Files;

const AGENT: &[u8] = include_bytes!(env!("TESTBED_AGENT"));
const INIT: &str = include_str!("init.sh");

/// A program to carry.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// A path, or a name to look up in `PATH`.
    pub(crate) source: PathBuf,
    /// Whether its debug information is left in.
    pub(crate) keep_debug: bool,
}

/// What a VM carries besides busybox and modules.
#[derive(Debug, Clone, Default)]
pub(crate) struct Contents {
    pub(crate) programs: Vec<Program>,
    /// Source on the machine, absolute path in the VM.
    pub(crate) files: Vec<(PathBuf, String)>,
}

/// Finds a program by path or in `PATH` and the system's folders.
pub(crate) fn find_program(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return name.is_file().then(|| name.to_owned());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// Writes the archive to `into` and returns its size in bytes.
pub(crate) fn write(into: &Path, kernel: &Files, contents: &Contents) -> Result<u64> {
    let file = File::create(into).with_context(|| into.display().to_string())?;
    let mut image =
        Image { archive: Archive::new(BufWriter::with_capacity(1 << 20, file)), placed: BTreeSet::new() };
    image.folders()?;
    // The shell that runs commands. Busybox's own would prefer its applets to programs of that name.
    let shell = Program { source: PathBuf::from("dash"), keep_debug: false };
    image.program(&shell).context("cannot pack the shell; install the package dash")?;
    image.archive.symlink("/usr/bin/sh", "dash")?;
    image.placed.insert("/usr/bin/sh".to_owned());
    image.modules(kernel).context("cannot pack the kernel's modules")?;
    for program in &contents.programs {
        image
            .program(program)
            .with_context(|| format!("cannot pack program {}", program.source.display()))?;
    }
    for (source, to) in &contents.files {
        image
            .tree(source, &in_vm(Path::new(to)))
            .with_context(|| format!("cannot pack {} as {to}", source.display()))?;
    }
    image.base().context("cannot pack busybox and the agent")?;
    image.archive.finish()?;
    Ok(fs::metadata(into)?.len())
}

struct Image {
    archive: Archive<BufWriter<File>>,
    /// What is in already: libraries are shared by programs.
    placed: BTreeSet<String>,
}

impl Image {
    fn folders(&mut self) -> Result<()> {
        for folder in ["/dev", "/proc", "/sys", "/run", "/tmp", "/root", "/etc", "/usr/lib", "/usr/lib64"] {
            self.archive.directory(folder)?;
        }
        for name in ["bin", "sbin", "lib", "lib64"] {
            self.archive.symlink(&format!("/{name}"), &format!("usr/{name}"))?;
        }
        Ok(())
    }

    fn base(&mut self) -> Result<()> {
        let busybox = find_program(Path::new("busybox"))
            .context("busybox is not installed; install the package busybox-static")?;
        if !libraries(&busybox)?.is_empty() {
            bail!("{} is not static; install the package busybox-static", busybox.display());
        }
        self.archive.copy("/usr/bin/busybox", 0o755, &busybox)?;
        let output = Command::new(&busybox).arg("--list-full").output()?;
        for applet in String::from_utf8_lossy(&output.stdout).lines() {
            let path = in_vm(Path::new(applet));
            // A program that a test names comes before the applet.
            if path != "/usr/bin/busybox" && self.placed.insert(path.clone()) {
                self.archive.symlink(&path, "/usr/bin/busybox")?;
            }
        }
        self.archive.file("/usr/bin/testbed-agent", 0o755, AGENT)?;
        self.archive.file("/init", 0o755, INIT.as_bytes())?;
        self.archive.file("/etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
        self.archive.file("/etc/group", 0o644, b"root:x:0:\n")?;
        self.archive.file("/etc/hosts", 0o644, b"127.0.0.1 localhost testbed\n10.0.2.2 machine\n")?;
        Ok(())
    }

    fn modules(&mut self, kernel: &Files) -> Result<()> {
        let folder = format!("/usr/lib/modules/{}", kernel.release);
        let mut entries: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(&kernel.modules)? {
            entries.push(entry?.path());
        }
        entries.sort();
        for path in entries {
            if let Some(name) = path.file_name().and_then(|n| n.to_str()) {
                self.archive.copy(&format!("{folder}/{name}"), 0o644, &path)?;
            }
        }
        Ok(())
    }

    fn program(&mut self, program: &Program) -> Result<()> {
        let source = find_program(&program.source).with_context(|| {
            format!("no such program: {}; build or install it first", program.source.display())
        })?;
        let name = source.file_name().and_then(|n| n.to_str()).context("a name that is not UTF-8")?;
        let to = if program.source.components().count() > 1 {
            format!("/usr/local/bin/{name}")
        } else {
            in_vm(&source)
        };
        if !self.placed.insert(to.clone()) {
            return Ok(());
        }
        for library in libraries(&source)? {
            let at = in_vm(&library);
            if self.placed.insert(at.clone()) {
                self.archive.copy(&at, 0o755, &library)?;
            }
        }
        if program.keep_debug || !is_elf(&source)? {
            self.archive.copy(&to, 0o755, &source)?;
            return Ok(());
        }
        let stripped = tempfile::NamedTempFile::new()?;
        let output = Command::new("strip")
            .arg("-o")
            .arg(stripped.path())
            .arg(&source)
            .output()
            .context("strip; install the package binutils")?;
        if !output.status.success() {
            bail!("strip: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        self.archive.copy(&to, 0o755, stripped.path())?;
        Ok(())
    }

    /// A file, or a folder with all that is in it.
    fn tree(&mut self, source: &Path, to: &str) -> Result<()> {
        let meta = fs::metadata(source)?;
        if !meta.is_dir() {
            self.archive.copy(to, meta.permissions().mode() & 0o7777, source)?;
            return Ok(());
        }
        self.archive.directory(to)?;
        for entry in fs::read_dir(source)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_str().context("a name that is not UTF-8")?;
            self.tree(&entry.path(), &format!("{}/{name}", to.trim_end_matches('/')))?;
        }
        Ok(())
    }
}

/// In the VM all programs and libraries are under `/usr`.
fn in_vm(path: &Path) -> String {
    let path = path.to_string_lossy();
    let path = path.trim_start_matches('/');
    if ["bin/", "sbin/", "lib/", "lib64/"].iter().any(|folder| path.starts_with(folder)) {
        format!("/usr/{path}")
    } else {
        format!("/{path}")
    }
}

fn is_elf(path: &Path) -> Result<bool> {
    use std::io::Read;
    let mut magic = [0u8; 4];
    let mut file = File::open(path)?;
    Ok(file.read_exact(&mut magic).is_ok() && magic == *b"\x7fELF")
}

/// The shared libraries of a program and its loader; none for a static one or a script.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).env("LC_ALL", "C").output().context("ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(missing) = text.lines().find(|line| line.contains("not found")) {
        bail!("{} lacks a library: {}", program.display(), missing.trim());
    }
    Ok(libraries_of(&text))
}

/// The paths in what `ldd` prints.
fn libraries_of(ldd: &str) -> Vec<PathBuf> {
    ldd.lines()
        .filter_map(|line| {
            let line = line.trim();
            let path = line.split_once("=> ").map_or(line, |(_, path)| path);
            let path = path.split_once(" (").map_or(path, |(path, _)| path);
            path.starts_with('/').then(|| PathBuf::from(path))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_is_read() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibelf.so.1 => /lib/x86_64-linux-gnu/libelf.so.1 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            libraries_of(text),
            [
                PathBuf::from("/lib/x86_64-linux-gnu/libelf.so.1"),
                PathBuf::from("/lib64/ld-linux-x86-64.so.2")
            ]
        );
        assert!(libraries_of("\tnot a dynamic executable\n").is_empty());
        assert_eq!(
            in_vm(Path::new("/lib/x86_64-linux-gnu/libelf.so.1")),
            "/usr/lib/x86_64-linux-gnu/libelf.so.1"
        );
        assert_eq!(in_vm(Path::new("/opt/x")), "/opt/x");
    }
}
