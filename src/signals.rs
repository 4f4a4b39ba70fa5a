//! Ctrl-C and SIGTERM as a flag that the recording loop looks at, so that a recording always ends in order.

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The last signal that asked us to end.
#[derive(Clone, Debug)]
pub struct Signals {
    /// Set by the handlers.
    process: Arc<AtomicUsize>,
    /// What [`Signals::next`] has taken from there.
    taken: Arc<AtomicUsize>,
    own: Arc<AtomicUsize>,
}

impl Signals {
    /// From now on SIGINT, SIGTERM and SIGHUP are only noted. A SIGHUP that was to be ignored, as nohup has
    /// it, stays ignored.
    ///
    /// # Errors
    /// When the handlers can not be installed.
    pub fn catch() -> Result<Signals> {
        let process = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if signal == SIGHUP && is_ignored(signal) {
                continue;
            }
            signal_hook::flag::register_usize(signal, Arc::clone(&process), signal as usize)
                .context("catch signals")?;
        }
        // A limit on the size of files (ulimit -f) is then an error of writing, told like a full disk.
        signal_hook::flag::register(SIGXFSZ, Arc::default()).context("catch signals")?;
        Ok(Signals { process, taken: Arc::default(), own: Arc::default() })
    }

    /// The signal that asked us to end, if one came.
    pub fn came(&self) -> Option<i32> {
        let seen = [&self.process, &self.taken, &self.own].map(|flag| flag.load(Ordering::Relaxed));
        seen.into_iter().find(|&signal| signal != 0).and_then(|signal| i32::try_from(signal).ok())
    }

    /// That none came, before anything is recorded.
    ///
    /// # Errors
    /// When one did.
    pub fn none_yet(&self) -> Result<()> {
        match self.came() {
            None => Ok(()),
            Some(_) => bail!("ended by a signal before the recording began: no run was made"),
        }
    }

    /// A signal that came since this was last asked.
    pub fn next(&self) -> Option<i32> {
        let signal = self.process.swap(0, Ordering::Relaxed);
        if signal == 0 {
            return None;
        }
        self.taken.store(signal, Ordering::Relaxed);
        i32::try_from(signal).ok()
    }

    /// A flag of its own, raised by the same signals as this one or by [`Signals::raise`]: for ending one of
    /// several recordings.
    pub fn another(&self) -> Signals {
        Signals { own: Arc::default(), ..self.clone() }
    }

    /// Asks those who look at this flag to end.
    pub fn raise(&self) {
        self.own.store(SIGTERM as usize, Ordering::Relaxed);
    }
}

/// Whether this process was started with a signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}
