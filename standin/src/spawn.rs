//! Starts and steers the stand-in's two programs from another process: for the demonstration and
//! for tests. It speaks to them only as a person could: options, lines, signals.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{Stage, Summary};

/// Names the directory that holds the two programs, where they are not beside the running one.
pub const DIRECTORY_VARIABLE: &str = "FABSCOPE_STANDIN_DIR";

const READY_TIMEOUT: Duration = Duration::from_secs(15);
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Finds `standin-target` or `standin-initiator`: in `FABSCOPE_STANDIN_DIR`, else beside the
/// running program, else one directory up (where a test's own program lies deeper).
///
/// # Errors
/// Says where it looked and how to get the programs.
pub fn program(name: &str) -> Result<PathBuf> {
    let mut looked = Vec::new();
    let mut directories = Vec::new();
    if let Some(directory) = std::env::var_os(DIRECTORY_VARIABLE) {
        directories.push(PathBuf::from(directory));
    } else {
        let own = std::env::current_exe().context("finding the running program")?;
        directories.extend(own.ancestors().skip(1).take(2).map(Path::to_path_buf));
    }
    for directory in directories {
        let path = directory.join(name);
        if path.is_file() {
            return Ok(path);
        }
        looked.push(path.display().to_string());
    }
    Err(anyhow!(
        "{name} is not there (looked for {}); build it with `cargo build -p standin`, or set \
         {DIRECTORY_VARIABLE} to the directory that holds it",
        looked.join(" and ")
    ))
}

/// A running target. It is ended when this is dropped.
#[derive(Debug)]
pub struct Target {
    child: Child,
    address: SocketAddr,
    control: PathBuf,
    own_directory: Option<PathBuf>,
    // Kept open: a target whose standard output is closed could not write to it any more.
    _stdout: BufReader<ChildStdout>,
}

impl Target {
    /// Starts `standin-target` with these further options and waits until it listens. Where the
    /// options name no control socket, it gets one.
    ///
    /// # Errors
    /// The program is not there, or it does not come up; what it wrote is part of the message.
    pub fn spawn<I, S>(options: I) -> Result<Self>
    where
        I: IntoIterator<Item = S>,
        S: Into<OsString>,
    {
        let options: Vec<OsString> = options.into_iter().map(Into::into).collect();
        let given =
            options.iter().position(|o| o == "--control").and_then(|i| options.get(i + 1)).map(PathBuf::from);
        let mut command = Command::new(program("standin-target")?);
        command.args(&options);
        let (control, own_directory) = match given {
            Some(path) => (path, None),
            None => {
                let directory = private_directory()?;
                let path = directory.join("control");
                command.arg("--control").arg(&path);
                (path, Some(directory))
            }
        };
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting standin-target")?;
        let ready = first_line(&mut child, "listening");
        let (line, stdout) = match ready {
            Ok(ready) => ready,
            Err(e) => {
                if let Some(directory) = &own_directory {
                    let _ = std::fs::remove_dir_all(directory);
                }
                return Err(e.context("standin-target"));
            }
        };
        let address = line
            .split_whitespace()
            .nth(1)
            .and_then(|word| word.parse().ok())
            .with_context(|| format!("standin-target says {line:?}, which names no address"))?;
        Ok(Self { child, address, control, own_directory, _stdout: stdout })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends one line to the control socket and returns the answer.
    ///
    /// # Errors
    /// The target is gone, or answers with an error.
    pub fn control(&self, line: &str) -> Result<String> {
        let mut stream = UnixStream::connect(&self.control)
            .with_context(|| format!("the control socket {} of standin-target", self.control.display()))?;
        stream.set_read_timeout(Some(END_TIMEOUT)).context("the control socket")?;
        writeln!(stream, "{line}").context("the control socket")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).context("the control socket")?;
        let answer = answer.trim().to_owned();
        if answer.is_empty() || answer.starts_with("error") {
            bail!("standin-target answers {answer:?} to {line:?}");
        }
        Ok(answer)
    }

    /// Makes a stage slower from now on.
    ///
    /// # Errors
    /// As for [`Target::control`].
    pub fn set_delay(&self, stage: Stage, delay: Duration) -> Result<()> {
        let name = Stage::ALL.iter().find(|(_, s)| *s == stage).map_or("", |(n, _)| n);
        self.control(&format!("delay {name} {}ns", delay.as_nanos())).map(drop)
    }

    /// Its counters, by name.
    ///
    /// # Errors
    /// As for [`Target::control`].
    pub fn stats(&self) -> Result<Vec<(String, u64)>> {
        let answer = self.control("stats")?;
        Ok(answer
            .split_whitespace()
            .filter_map(|pair| pair.split_once('='))
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect())
    }

    /// Ends it and waits for its end.
    ///
    /// # Errors
    /// It did not end by itself, or ended with an error.
    pub fn stop(mut self) -> Result<()> {
        end(&mut self.child, "standin-target")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // After `stop` this finds the process gone.
        let _ = end(&mut self.child, "standin-target");
        if let Some(directory) = &self.own_directory {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

/// A running initiator. It is ended when this is dropped.
#[derive(Debug)]
pub struct Initiator {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Initiator {
    /// Starts `standin-initiator` with these options and `--hold`, and waits until it is
    /// connected. The load begins with [`Initiator::start`].
    ///
    /// # Errors
    /// The program is not there, or does not connect; what it wrote is part of the message.
    pub fn spawn<I, S>(options: I) -> Result<Self>
    where
        I: IntoIterator<Item = S>,
        S: Into<OsString>,
    {
        let mut child = Command::new(program("standin-initiator")?)
            .args(options.into_iter().map(Into::into))
            .arg("--hold")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting standin-initiator")?;
        let stdin = child.stdin.take();
        let (_, stdout) = first_line(&mut child, "connected").context("standin-initiator")?;
        Ok(Self { child, stdin, stdout })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets the load begin.
    ///
    /// # Errors
    /// The initiator is gone.
    pub fn start(&mut self) -> Result<()> {
        if let Some(mut stdin) = self.stdin.take() {
            stdin.write_all(b"go\n").context("starting the initiator's load")?;
        }
        Ok(())
    }

    /// Lets the load begin, if it has not, and waits for its summary.
    ///
    /// # Errors
    /// The initiator failed; failed commands and wrong data are in the summary instead.
    pub fn finish(mut self) -> Result<Summary> {
        self.start()?;
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).context("the initiator's summary")?;
        let status = self.child.wait().context("waiting for standin-initiator")?;
        match serde_json::from_str(text.trim()) {
            Ok(summary) => Ok(summary),
            Err(_) => bail!("standin-initiator ended ({status}) without a summary"),
        }
    }
}

impl Drop for Initiator {
    fn drop(&mut self) {
        let _ = end(&mut self.child, "standin-initiator");
    }
}

/// Waits for the program's first line, which has to begin with `word`. What the program writes to
/// standard error goes on to ours.
fn first_line(child: &mut Child, word: &str) -> Result<(String, BufReader<ChildStdout>)> {
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        bail!("its output is not a pipe");
    };
    let log = std::thread::spawn(move || {
        let mut last = Vec::new();
        for line in BufReader::new(stderr).lines().map_while(io::Result::ok) {
            let _ = writeln!(io::stderr(), "{line}");
            if last.len() < 20 {
                last.push(line);
            }
        }
        last
    });
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut stdout = BufReader::new(stdout);
        let mut line = String::new();
        let read = stdout.read_line(&mut line);
        // Nobody is waiting any more where this fails.
        let _ = sender.send((read, line, stdout));
    });
    match receiver.recv_timeout(READY_TIMEOUT) {
        Ok((Ok(n), line, stdout)) if n > 0 && line.starts_with(word) => Ok((line, stdout)),
        Ok((_, line, _)) => {
            let _ = child.kill();
            let _ = child.wait();
            let said = log.join().unwrap_or_default().join("; ");
            bail!("ended, or said {:?}, instead of \"{word} ...\": {said}", line.trim())
        }
        Err(_) => {
            let _ = child.kill();
            let _ = child.wait();
            bail!("said nothing for {} s", READY_TIMEOUT.as_secs())
        }
    }
}

/// Ends a child: asks it, waits, and kills it when it does not listen.
fn end(child: &mut Child, name: &str) -> Result<()> {
    if let Ok(Some(_)) = child.try_wait() {
        return Ok(());
    }
    let pid = i32::try_from(child.id()).context("a process number")?;
    kill(Pid::from_raw(pid), Signal::SIGTERM).with_context(|| format!("ending {name}"))?;
    let deadline = Instant::now() + END_TIMEOUT;
    loop {
        match child.try_wait().with_context(|| format!("waiting for {name}"))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => bail!("{name} ended with {status}"),
            None if Instant::now() > deadline => {
                let _ = child.kill();
                let _ = child.wait();
                bail!("{name} did not end within {} s of SIGTERM", END_TIMEOUT.as_secs());
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// A new directory that only this user can look into.
fn private_directory() -> Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let base = std::env::temp_dir();
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("fabscope-standin-{}-{n}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && n < 10_000 => {}
            Err(e) => {
                return Err(e).with_context(|| format!("creating {}", path.display()));
            }
        }
    }
}
