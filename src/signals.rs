//! Ctrl-C and SIGTERM as a flag that the recording loop looks at, so that a recording always ends in order.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The last signal that asked us to end.
#[derive(Clone, Debug)]
pub struct Signals {
    process: Arc<AtomicUsize>,
    own: Arc<AtomicUsize>,
}

impl Signals {
    /// From now on SIGINT, SIGTERM and SIGHUP are only noted.
    ///
    /// # Errors
    /// When the handlers can not be installed.
    pub fn catch() -> Result<Signals> {
        let process = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_usize(signal, Arc::clone(&process), signal as usize)
                .context("catch signals")?;
        }
        Ok(Signals { process, own: Arc::default() })
    }

    /// The signal that asked us to end, if one came.
    pub fn came(&self) -> Option<i32> {
        let seen = [&self.process, &self.own].map(|flag| flag.load(Ordering::Relaxed));
        seen.into_iter().find(|&signal| signal != 0).and_then(|signal| i32::try_from(signal).ok())
    }

    /// A flag of its own, raised by the same signals as this one or by [`Signals::raise`]: for ending one of
    /// several recordings.
    pub fn another(&self) -> Signals {
        Signals { process: Arc::clone(&self.process), own: Arc::default() }
    }

    /// Asks those who look at this flag to end.
    pub fn raise(&self) {
        self.own.store(SIGTERM as usize, Ordering::Relaxed);
    }
}
