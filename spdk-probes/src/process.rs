//! Finds the process to record: by its PID, by its program, or as the only one that holds SPDK's functions.
//! It reads `/proc` and the programs' symbol tables; it attaches nothing.

use std::collections::HashMap;
use std::fs;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use object::{Object, ObjectSection, ObjectSymbol};
use run_format::Side;

use crate::Error;
use crate::connections::is_initiator;
use crate::ring::has_ended;

/// How the process to record is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// This one.
    Pid(u32),
    /// The only one that runs this program.
    Path(PathBuf),
    /// The only one that holds the side's functions; a program that is a target too is a host only while it has a
    /// connection of its own.
    Only,
}

/// A running process that holds SPDK.
#[derive(Debug)]
pub struct Process {
    /// Its process identifier.
    pub pid: u32,
    /// Its program, as the process itself sees the path.
    pub path: PathBuf,
    /// The version it states, where it states one.
    pub version: Option<String>,
    /// Its threads.
    pub threads: Vec<u32>,
    pidfd: OwnedFd,
}

impl Process {
    /// Takes hold of a candidate; it may have ended since it was looked at.
    fn open(candidate: Candidate) -> Result<Process, Error> {
        let Candidate { pid, path, version } = candidate;
        let ended = || Error::ProcessEnded { pid };
        let pidfd = hold(pid).ok_or_else(ended)?;
        // The number may be another process's by now.
        if fs::read_link(format!("/proc/{pid}/exe")).ok().as_ref() != Some(&path) {
            return Err(ended());
        }
        let threads = fs::read_dir(format!("/proc/{pid}/task"))
            .map_err(|_| ended())?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        Ok(Process { pid, path, version, threads, pidfd })
    }

    /// What came of looking at it; whatever went wrong, it is that the process ended where it did.
    pub(crate) fn unless_ended<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        result.map_err(|error| match error {
            _ if self.ended() => Error::ProcessEnded { pid: self.pid },
            error => error,
        })
    }

    /// Whether it has exited.
    #[must_use]
    pub fn ended(&self) -> bool {
        has_ended(&self.pidfd)
    }

    /// Another handle of the same process.
    pub(crate) fn watch(&self) -> Result<OwnedFd, Error> {
        self.pidfd.try_clone().map_err(|_| Error::ProcessGone { pid: self.pid })
    }
}

/// A descriptor of a process that is there.
fn hold(pid: u32) -> Option<OwnedFd> {
    let raw = i32::try_from(pid).ok()?;
    // SAFETY: pidfd_open takes a PID and flags and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, raw, 0) };
    let fd @ 0.. = i32::try_from(fd).ok()? else { return None };
    // SAFETY: the descriptor is new and nobody else has it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The process that a thread is of, where this is a thread and not the first of its process.
fn process_of_thread(tid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()?;
    (process != tid).then_some(process)
}

/// A process that may be meant.
#[derive(Clone, Debug)]
struct Candidate {
    pid: u32,
    path: PathBuf,
    version: Option<String>,
}

/// Finds the process to record on this side.
///
/// # Errors
/// When there is none, when there are several to choose from, when the one named has exited or holds no
/// SPDK.
pub fn find(side: Side, choice: &Choice) -> Result<Process, Error> {
    match choice {
        Choice::Pid(pid) => {
            if let Some(process) = process_of_thread(*pid) {
                return Err(Error::Thread { tid: *pid, process });
            }
            let path = fs::read_link(format!("/proc/{pid}/exe")).map_err(|error| match error.kind() {
                std::io::ErrorKind::PermissionDenied => privilege("read the program of another process"),
                // The kernel's threads are processes without a program.
                _ if Path::new("/proc").join(pid.to_string()).exists() => Error::NoProgram { pid: *pid },
                _ => Error::ProcessGone { pid: *pid },
            })?;
            let facts = Programs::default().facts(*pid);
            Process::open(Candidate { pid: *pid, path, version: facts.and_then(|facts| facts.version) })
        }
        Choice::Path(wanted) => {
            let meant = fs::metadata(wanted)
                .map_err(|source| Error::Read { path: wanted.clone(), source })
                .map(|meta| (meta.dev(), meta.ino()))?;
            let mut programs = Programs::default();
            let found: Vec<Candidate> = processes()
                .filter(|(pid, _)| {
                    fs::metadata(format!("/proc/{pid}/exe"))
                        .is_ok_and(|meta| (meta.dev(), meta.ino()) == meant)
                })
                .map(|(pid, path)| Candidate {
                    pid,
                    path,
                    version: programs.facts(pid).and_then(|facts| facts.version),
                })
                .collect();
            one(side, found, Some(wanted))
        }
        Choice::Only => {
            let mut programs = Programs::default();
            let mut found = Vec::new();
            let mut both = Vec::new();
            for (pid, path) in processes() {
                let Some(facts) = programs.facts(pid) else { continue };
                let candidate = Candidate { pid, path, version: facts.version };
                match (side, facts.target, facts.host) {
                    (Side::Target, true, _) | (Side::Host, false, true) => found.push(candidate),
                    (Side::Host, true, true) => both.push(candidate),
                    _ => {}
                }
            }
            let mut aside = Vec::new();
            if found.is_empty() {
                // A target links the initiator too, for NVMe bdevs; it is the host only if there is no other one
                // and it uses it.
                let (used, unused): (Vec<Candidate>, _) =
                    both.into_iter().partition(|candidate| is_initiator(candidate.pid));
                found = used;
                aside = unused.iter().map(|candidate| candidate.pid).collect();
                aside.sort_unstable();
            }
            if found.is_empty() {
                // Another user's processes can not be looked into: they may well be there.
                check_rights()?;
                return Err(Error::NoProcess { side, program: None, aside });
            }
            one(side, found, None)
        }
    }
}

/// Every process that holds this side's functions: PID, program, version.
#[must_use]
pub fn candidates(side: Side) -> Vec<(u32, PathBuf, Option<String>)> {
    let mut programs = Programs::default();
    processes()
        .filter_map(|(pid, path)| {
            let facts = programs.facts(pid)?;
            let meant = match side {
                Side::Target => facts.target,
                Side::Host => facts.host && !facts.target,
            };
            meant.then_some((pid, path, facts.version))
        })
        .collect()
}

fn one(side: Side, mut found: Vec<Candidate>, program: Option<&Path>) -> Result<Process, Error> {
    match (found.pop(), found.is_empty()) {
        (None, _) => Err(Error::NoProcess { side, program: program.map(Path::to_owned), aside: Vec::new() }),
        (Some(candidate), true) => Process::open(candidate),
        (Some(candidate), false) => {
            found.push(candidate);
            found.sort_by_key(|candidate| candidate.pid);
            let list = found
                .iter()
                .map(|c| {
                    let version = c.version.as_deref().unwrap_or("version unknown");
                    format!("\n  {} {} ({version})", c.pid, c.path.display())
                })
                .collect();
            Err(Error::SeveralProcesses { side, list })
        }
    }
}

/// All processes that run a program, without this one and the kernel's threads.
fn processes() -> impl Iterator<Item = (u32, PathBuf)> {
    let own = std::process::id();
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(move |pid| *pid != own)
        .filter_map(|pid| Some((pid, fs::read_link(format!("/proc/{pid}/exe")).ok()?)))
}

/// What a program is, as far as its symbols tell.
#[derive(Clone, Debug, Default)]
struct Facts {
    target: bool,
    host: bool,
    version: Option<String>,
}

impl Facts {
    fn add(&mut self, other: &Facts) {
        self.target |= other.target;
        self.host |= other.host;
        if self.version.is_none() {
            self.version.clone_from(&other.version);
        }
    }
}

/// Programs and libraries that were looked at, so that each file is read once.
#[derive(Debug, Default)]
struct Programs {
    known: HashMap<(u64, u64), Facts>,
}

impl Programs {
    /// What a process holds; `None` where it holds no SPDK or can not be looked at.
    fn facts(&mut self, pid: u32) -> Option<Facts> {
        let mut facts = self.file(Path::new(&format!("/proc/{pid}/exe")))?;
        if !facts.target && !facts.host {
            // A build with shared libraries has nothing in the program itself.
            let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
            let mut libraries: Vec<&str> = maps
                .lines()
                .filter(|line| line.contains(" r-xp ") && line.contains("/libspdk_nv"))
                .filter_map(|line| line.get(line.find('/')?..))
                .collect();
            libraries.dedup();
            for library in libraries {
                let inside = library.trim_start_matches('/');
                if let Some(found) = self.file(&Path::new(&format!("/proc/{pid}/root")).join(inside)) {
                    facts.add(&found);
                }
            }
        }
        (facts.target || facts.host).then_some(facts)
    }

    fn file(&mut self, path: &Path) -> Option<Facts> {
        let meta = fs::metadata(path).ok()?;
        let key = (meta.dev(), meta.ino());
        if let Some(facts) = self.known.get(&key) {
            return Some(facts.clone());
        }
        let facts = look_at(path).unwrap_or_default();
        self.known.insert(key, facts.clone());
        Some(facts)
    }
}

/// Reads the symbol tables; a stripped program is known by its USDT probes and its version.
fn look_at(path: &Path) -> Option<Facts> {
    let file = fs::File::open(path).ok()?;
    // SAFETY: the mapping is only read; a file that shrinks meanwhile would raise SIGBUS, and a program that
    // is running can not be truncated (ETXTBSY).
    let bytes = unsafe { Mmap::map(&file) }.ok()?;
    let elf = object::File::parse(&*bytes).ok()?;
    let mut facts = Facts::default();
    for symbol in elf.symbols().chain(elf.dynamic_symbols()) {
        if symbol.is_undefined() {
            continue;
        }
        match symbol.name_bytes() {
            Ok(name) if name.starts_with(b"nvmf_tcp_req_process") => facts.target = true,
            Ok(name) if name.starts_with(b"nvme_tcp_qpair_submit_request") => facts.host = true,
            Ok(b"spdk_nvmf_request_exec") => facts.target = true,
            _ => {}
        }
    }
    if !facts.target
        && elf
            .section_by_name(".note.stapsdt")
            .and_then(|section| section.data().ok())
            .is_some_and(|notes| contains(notes, b"nvmf_ctrlr_add_qpair"))
    {
        facts.target = true;
    }
    if facts.target || facts.host {
        facts.version = version(&elf);
    }
    Some(facts)
}

fn contains(bytes: &[u8], what: &[u8]) -> bool {
    bytes.windows(what.len()).any(|window| window == what)
}

/// `SPDK v26.05 git sha1 ...` from the constants of a program.
fn version(elf: &object::File<'_>) -> Option<String> {
    let constants = elf.section_by_name(".rodata")?.data().ok()?;
    let marker = b"SPDK v";
    let at = constants.windows(marker.len()).position(|window| window == marker)?;
    let text = constants.get(at..constants.len().min(at + 80))?.split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}

/// The error for a lack of rights to do this.
pub(crate) fn privilege(what: &str) -> Error {
    let command: Vec<String> = std::env::args().collect();
    Error::Privilege { what: what.to_owned(), command: command.join(" ") }
}

/// Checks that this process may load programs and attach them to another user's process.
pub(crate) fn check_rights() -> Result<(), Error> {
    // include/uapi/linux/capability.h
    const SYS_PTRACE: u64 = 1 << 19;
    const SYS_ADMIN: u64 = 1 << 21;
    const PERFMON: u64 = 1 << 38;
    const BPF: u64 = 1 << 39;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let held = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
        .unwrap_or(u64::MAX);
    let missing = |mask: u64, name: &'static str| (held & (mask | SYS_ADMIN) == 0).then_some(name);
    let lacking: Vec<&str> = [
        missing(BPF, "CAP_BPF"),
        missing(PERFMON, "CAP_PERFMON"),
        (held & SYS_PTRACE == 0).then_some("CAP_SYS_PTRACE"),
    ]
    .into_iter()
    .flatten()
    .collect();
    if lacking.is_empty() {
        Ok(())
    } else {
        Err(privilege(&format!("load and attach BPF programs (missing {})", lacking.join(", "))))
    }
}

#[cfg(test)]
mod tests {
    use super::{Choice, find, processes};
    use crate::Error;
    use run_format::Side;

    #[test]
    fn a_process_that_is_not_there_is_said_to_be_gone() {
        let gone = find(Side::Target, &Choice::Pid(u32::MAX)).map(|process| process.pid);
        assert!(matches!(gone, Err(Error::ProcessGone { pid: u32::MAX })), "{gone:?}");
    }

    #[test]
    fn a_thread_is_told_from_its_process() {
        let (send, stop) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: gettid takes nothing and can not fail.
            tell.send(unsafe { libc::gettid() }).unwrap();
            let _ = stop.recv();
        });
        let tid = told.recv().unwrap().unsigned_abs();
        let error = find(Side::Target, &Choice::Pid(tid)).map(|process| process.pid).unwrap_err();
        let expected = format!("{tid} is a thread of process {}", std::process::id());
        assert!(error.to_string().starts_with(&expected), "{error}");
        drop(send);
        thread.join().unwrap();
    }

    #[test]
    fn what_fails_after_the_end_is_said_to_be_the_end() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = find(Side::Host, &Choice::Pid(child.id())).unwrap();
        let failed = || Err::<(), _>(Error::NotSpdk { name: "x".into(), files: 1 });
        assert!(matches!(process.unless_ended(failed()), Err(Error::NotSpdk { .. })));
        child.kill().unwrap();
        child.wait().unwrap();
        let error = process.unless_ended(failed()).unwrap_err().to_string();
        assert_eq!(error, format!("process {} ended while it was looked at", child.id()));
        assert!(process.unless_ended(Ok(())).is_ok());
        // Whoever has the number next is another process.
        let candidate =
            super::Candidate { pid: std::process::id(), path: "/bin/sleep".into(), version: None };
        let other = super::Process::open(candidate).map(|process| process.pid);
        assert!(matches!(other, Err(Error::ProcessEnded { .. })), "{other:?}");
    }

    #[test]
    fn targets_that_were_set_aside_are_named() {
        let text = |aside: &[u32]| {
            Error::NoProcess { side: Side::Host, program: None, aside: aside.to_vec() }.to_string()
        };
        assert!(text(&[]).ends_with("start it, or give its PID"), "{}", text(&[]));
        assert!(text(&[7, 9]).contains("7, 9 hold") && text(&[7]).contains("7 holds"), "{}", text(&[7, 9]));
    }

    #[test]
    fn a_program_that_does_not_run_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = find(Side::Host, &Choice::Path(file.path().to_owned())).map(|p| p.pid).unwrap_err();
        assert!(error.to_string().contains(&file.path().display().to_string()), "{error}");
    }

    #[test]
    fn a_child_is_among_the_processes_until_it_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(processes().any(|(pid, _)| pid == child.id()));
        let process = find(Side::Host, &Choice::Pid(child.id())).unwrap();
        assert_eq!(process.threads, [child.id()]);
        assert!(!process.ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.ended());
    }
}
