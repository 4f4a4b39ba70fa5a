//! The control socket: one command a line, one answer a line, over a UNIX socket.
//!
//! | command | answer |
//! |---|---|
//! | `delay STAGE DURATION` | `ok` |
//! | `delay STAGE` | the delay in nanoseconds |
//! | `pause NQN`, `resume NQN` | `ok` |
//! | `stats` | `name=value` pairs |
//! | `version` | the stand-in's version |
//! | `quit` | `ok`, and the target ends |
//!
//! Anything else is answered with `error` and the reason.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use standin::{Stage, parse_duration};

use super::{DELAYS, STATS, Shared, set_delay};

const MAX_LINE: u64 = 1024;
const MAX_CONNECTIONS: usize = 8;

/// The listening end; the socket file goes with it.
#[derive(Debug)]
pub(crate) struct Control {
    listener: UnixListener,
    path: PathBuf,
    open: Arc<AtomicUsize>,
}

impl Control {
    /// Opens the socket that the configuration names, if it names one.
    ///
    /// # Errors
    /// The path is taken by something alive or cannot be bound.
    pub(crate) fn open(shared: &Shared) -> Result<Option<Self>> {
        let Some(path) = shared.config.control.clone() else {
            return Ok(None);
        };
        if UnixStream::connect(&path).is_err() {
            // Left behind by a process that is gone, or not there at all.
            let _ = std::fs::remove_file(&path);
        }
        let listener =
            UnixListener::bind(&path).with_context(|| format!("the control socket {}", path.display()))?;
        listener.set_nonblocking(true).context("the control socket")?;
        Ok(Some(Self { listener, path, open: Arc::default() }))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Takes the connections that wait, each on a thread of its own.
    pub(crate) fn accept(&self, shared: &Arc<Shared>) {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.open.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTIONS {
                self.open.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let (shared, open) = (Arc::clone(shared), Arc::clone(&self.open));
            std::thread::spawn(move || {
                talk(&shared, stream);
                open.fetch_sub(1, Ordering::AcqRel);
            });
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn talk(shared: &Shared, stream: UnixStream) {
    if stream.set_nonblocking(false).is_err() {
        return;
    }
    let Ok(mut answers) = stream.try_clone() else {
        return;
    };
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    loop {
        line.clear();
        match lines.by_ref().take(MAX_LINE).read_line(&mut line) {
            Ok(n) if n > 0 && line.ends_with('\n') => {}
            _ => return,
        }
        let answer = command(shared, line.trim());
        if writeln!(answers, "{answer}").is_err() {
            return;
        }
    }
}

fn command(shared: &Shared, line: &str) -> String {
    let words: Vec<_> = line.split_whitespace().collect();
    match words[..] {
        ["delay", stage, duration] => match (Stage::from_name(stage), parse_duration(duration)) {
            (Some(stage), Ok(delay)) if delay <= Duration::from_secs(60) => {
                set_delay(stage, delay);
                "ok".to_owned()
            }
            (None, _) => format!("error: no stage {stage}; there are storage and target-driver"),
            (_, Ok(_)) => "error: a delay is at most 60s".to_owned(),
            (_, Err(e)) => format!("error: {e}"),
        },
        ["delay", stage] => match Stage::from_name(stage) {
            Some(Stage::Storage) => DELAYS.storage.load(Ordering::Relaxed).to_string(),
            Some(Stage::TargetDriver) => DELAYS.target_driver.load(Ordering::Relaxed).to_string(),
            None => format!("error: no stage {stage}; there are storage and target-driver"),
        },
        ["pause", nqn] | ["resume", nqn] => {
            if shared.pause(nqn, words[0] == "pause") {
                "ok".to_owned()
            } else {
                format!("error: no subsystem {nqn}")
            }
        }
        ["stats"] => {
            let mut answer = String::new();
            for (name, value) in STATS.named() {
                let separator = if answer.is_empty() { "" } else { " " };
                let _ = write!(answer, "{separator}{name}={value}");
            }
            answer
        }
        ["version"] => standin::version().to_owned(),
        ["quit"] => {
            shared.stop();
            "ok".to_owned()
        }
        _ => "error: commands are delay, pause, resume, stats, version, quit".to_owned(),
    }
}
