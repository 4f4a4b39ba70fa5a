//! `record -- CMD`: runs CMD, passes its output on while keeping it in the run, and reads what fio says of
//! itself.

use crate::exit;
use crate::signals::Signals;
use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{AccessFlags, Pid, access};
use run_format::{FioJob, Workload};
use serde_json::Value;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long CMD's output is still waited for when CMD has ended and nothing comes: a process that it left
/// behind may hold it open for ever.
const OUTPUT_GRACE: Duration = Duration::from_secs(1);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Whether CMD's program is there and may be run, before anything is set up for it.
///
/// # Errors
/// When it is not; the text names it.
pub fn check(argv: &[OsString]) -> Result<()> {
    let Some(program) = argv.first() else { return Ok(()) };
    let shown = program.display();
    if program.as_encoded_bytes().contains(&b'/') {
        let path = Path::new(program);
        let kind = fs::metadata(path).with_context(|| format!("the command {shown}"))?;
        if !kind.is_file() || access(path, AccessFlags::X_OK).is_err() {
            bail!("the command {shown} is not a program that may be run");
        }
        return Ok(());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .any(|file| file.is_file() && access(&file, AccessFlags::X_OK).is_ok());
    if !found {
        bail!(
            "the command {shown} is not there: no folder of PATH has a program of this name; give its path"
        );
    }
    Ok(())
}

/// A running CMD.
#[derive(Debug)]
pub struct Running {
    child: Child,
    argv: Vec<String>,
    directory: PathBuf,
    copies: Vec<Copy>,
    forwarded: u32,
}

/// One of CMD's output streams on its way to ours and into the run.
#[derive(Debug)]
struct Copy {
    thread: JoinHandle<std::io::Result<()>>,
    /// Whether all that came has been passed on, and it waits for more.
    waits: Arc<AtomicBool>,
}

impl Running {
    /// Starts `argv` with its output going to ours and to `run/workload/`.
    ///
    /// # Errors
    /// When it can not be started; the text names the program.
    pub fn start(argv: &[OsString], run: &Path) -> Result<Running> {
        let directory = run.join("workload");
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        let (program, arguments) = argv.split_first().context("no command was given after --")?;
        let mut child = Command::new(program)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start the command {}", program.display()))?;
        let mut copies = Vec::new();
        if let Some(from) = child.stdout.take() {
            copies.push(copy(from, std::io::stdout(), &directory.join("stdout"))?);
        }
        if let Some(from) = child.stderr.take() {
            copies.push(copy(from, std::io::stderr(), &directory.join("stderr"))?);
        }
        let argv = argv.iter().map(|a| a.to_string_lossy().into_owned()).collect();
        Ok(Running { child, argv, directory, copies, forwarded: 0 })
    }

    /// What is known of it while it runs.
    pub fn describe(&self) -> Workload {
        Workload {
            argv: self.argv.clone(),
            stdout: "workload/stdout".into(),
            stderr: "workload/stderr".into(),
            ..Workload::default()
        }
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When the system can not say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("wait for the command")
    }

    /// Passes a signal on. The second one goes as SIGTERM and the third as SIGKILL, so that a command that
    /// does not listen can be ended.
    pub fn forward(&mut self, signal: i32) {
        self.forwarded += 1;
        let signal = match self.forwarded {
            // A Ctrl-C on our terminal reaches CMD by itself.
            1 if signal == Signal::SIGINT as i32 && in_foreground() => return,
            1 => Signal::try_from(signal).unwrap_or(Signal::SIGTERM),
            2 => Signal::SIGTERM,
            _ => Signal::SIGKILL,
        };
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // It may have ended by itself in this moment.
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Waits for the end of its output and says what it did.
    ///
    /// # Errors
    /// When its output could not be kept.
    pub fn finish(mut self, status: ExitStatus, signals: &Signals) -> Result<(Workload, u8)> {
        let mut kept = Ok(());
        let (mut silent, mut held) = (Duration::ZERO, false);
        for copy in self.copies.drain(..) {
            if !copy.is_over(&mut silent, signals) {
                held = true;
                continue;
            }
            let copied = match copy.thread.join() {
                Ok(copied) => copied.context("keep the command's output"),
                Err(_) => Err(anyhow::anyhow!("keeping the command's output failed")),
            };
            kept = kept.and(copied);
        }
        if held {
            exit::say(
                "a process that the command left behind still holds its output; what it writes from now on is not kept",
            );
        }
        kept?;
        let workload = Workload {
            exit_code: status.code(),
            signal: status.signal(),
            fio: self.fio(),
            ..self.describe()
        };
        let code = match (status.code(), status.signal()) {
            (Some(code), _) => u8::try_from(code).unwrap_or(1),
            (None, Some(signal)) => u8::try_from(128 + signal).unwrap_or(1),
            (None, None) => 1,
        };
        Ok((workload, code))
    }

    /// fio's figures, where CMD was fio with JSON output; empty otherwise.
    fn fio(&self) -> Vec<FioJob> {
        let is_fio = self.argv.iter().any(|a| Path::new(a).file_name().is_some_and(|n| n == "fio"));
        if !is_fio {
            return Vec::new();
        }
        let elsewhere =
            self.argv.iter().enumerate().find_map(|(i, argument)| match argument.strip_prefix("--output") {
                Some("") => self.argv.get(i + 1).cloned(),
                Some(rest) => rest.strip_prefix('=').map(str::to_owned),
                None => None,
            });
        let path = elsewhere.map_or_else(|| self.directory.join("stdout"), PathBuf::from);
        fs::read_to_string(path).map(|text| parse_fio(&text)).unwrap_or_default()
    }
}

impl Copy {
    /// Waits until the stream ends; false when it stays open and silent, or a signal says that it is enough.
    fn is_over(&self, silent: &mut Duration, signals: &Signals) -> bool {
        while !self.thread.is_finished() {
            if *silent >= OUTPUT_GRACE || signals.next().is_some() {
                return false;
            }
            std::thread::sleep(LOOK);
            if self.waits.load(Ordering::Relaxed) {
                *silent += LOOK;
            }
        }
        true
    }
}

/// Whether our process group is the one that the terminal sends a Ctrl-C to.
fn in_foreground() -> bool {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in parentheses may hold anything; after it come state, parent, group, session, terminal and
    // the terminal's foreground group.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = rest.split_whitespace().collect();
    matches!((fields.get(2), fields.get(5)), (Some(group), Some(foreground)) if group == foreground)
}

/// Copies a stream to ours and to a file, in a thread of its own. Whatever can not be written, the stream is
/// read to its end: the command is not to notice.
fn copy(
    mut from: impl Read + Send + 'static,
    mut ours: impl Write + Send + 'static,
    file: &Path,
) -> Result<Copy> {
    let mut file = File::create(file).with_context(|| format!("create {}", file.display()))?;
    let waits = Arc::new(AtomicBool::new(false));
    let waiting = Arc::clone(&waits);
    let thread = std::thread::Builder::new().name("output".into()).spawn(move || {
        let mut buffer = [0; 8192];
        let mut kept = Ok(());
        loop {
            waiting.store(true, Ordering::Relaxed);
            let read = from.read(&mut buffer);
            waiting.store(false, Ordering::Relaxed);
            match read {
                Ok(0) => return kept,
                Ok(n) => {
                    if kept.is_ok() {
                        kept = file.write_all(&buffer[..n]);
                    }
                    // Our own reader may be gone.
                    let _ = ours.write_all(&buffer[..n]).and_then(|()| ours.flush());
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return kept.and(Err(e)),
            }
        }
    })?;
    Ok(Copy { thread, waits })
}

/// fio's figures per job and direction from its JSON output, which may have other lines around it. What is
/// not fio's JSON gives none.
pub fn parse_fio(text: &str) -> Vec<FioJob> {
    let Some(start) = text.find("{\n").or_else(|| text.find('{')) else { return Vec::new() };
    let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    let Some(Ok(value)) = values.next() else { return Vec::new() };
    let version = value.get("fio version").and_then(Value::as_str).unwrap_or_default();
    let jobs = value.get("jobs").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    jobs.iter()
        .flat_map(|job| {
            let name = job.get("jobname").and_then(Value::as_str).unwrap_or_default();
            ["read", "write", "trim"].into_iter().filter_map(move |direction| {
                let of = job.get(direction)?;
                let ios = of.get("total_ios")?.as_u64()?;
                let mean = |what: &str| of.get(what)?.get("mean")?.as_f64();
                (ios > 0).then_some(FioJob {
                    job: name.to_owned(),
                    direction: direction.to_owned(),
                    ios,
                    slat_mean_ns: mean("slat_ns")?,
                    clat_mean_ns: mean("clat_ns")?,
                    lat_mean_ns: mean("lat_ns")?,
                    version: version.to_owned(),
                })
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::parse_fio;
    use proptest::prelude::*;

    const FIO: &str = r#"note: both iodepth >= 1 and synchronous I/O engine are selected
{
  "fio version" : "fio-3.33",
  "jobs" : [ { "jobname" : "a", "error" : 0,
      "read" : { "total_ios" : 10, "slat_ns" : { "mean" : 1.5 }, "clat_ns" : { "mean" : 20.0 }, "lat_ns" : { "mean" : 21.5 } },
      "write" : { "total_ios" : 0, "slat_ns" : { "mean" : 0 }, "clat_ns" : { "mean" : 0 }, "lat_ns" : { "mean" : 0 } } } ]
}
trailing text"#;

    #[test]
    fn fio_json_is_read_with_text_around_it() {
        let jobs = parse_fio(FIO);
        assert_eq!(jobs.len(), 1);
        assert_eq!((jobs[0].direction.as_str(), jobs[0].ios, jobs[0].lat_mean_ns), ("read", 10, 21.5));
    }

    proptest! {
        #[test]
        fn cut_fio_json_gives_nothing_and_no_panic(at in 0usize..FIO.len() - 20) {
            let at = (0..=at).rev().find(|&i| FIO.is_char_boundary(i)).unwrap_or(0);
            prop_assert!(parse_fio(&FIO[..at]).is_empty());
        }
    }
}
