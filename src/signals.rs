//! Ctrl-C and SIGTERM as counts that the recording loop looks at, so that a recording always ends in order.

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The signals that asked us to end.
#[derive(Clone, Debug)]
pub struct Signals {
    /// How often each came that was not taken yet, counted by the handlers: on a busy machine several come between two
    /// looks, and each says more than the one before.
    caught: Arc<[(i32, AtomicUsize); 3]>,
    /// What [`Signals::next`] has taken last.
    taken: Arc<AtomicUsize>,
    /// Whether they are counted; before, one ends the program.
    counting: Arc<AtomicBool>,
    own: Arc<AtomicUsize>,
}

/// What is said where nothing was recorded.
const NO_RUN: &str = "ended by a signal before the recording began: no run was made";
/// That from a handler, which may not make a text.
const FROM_HANDLER: &[u8] = b"fabscope: ended by a signal before the recording began: no run was made\n";

impl Signals {
    /// From now on SIGINT, SIGTERM and SIGHUP are only counted: see [`Signals::until_counted`].
    ///
    /// # Errors
    /// When the handlers can not be installed.
    pub fn catch() -> Result<Signals> {
        let signals = Signals::until_counted()?;
        signals.count();
        Ok(signals)
    }

    /// SIGINT, SIGTERM and SIGHUP end the program and say that nothing was recorded, until [`Signals::count`]. A shell
    /// without job control has what it starts in the background ignore SIGINT; a script that sends it means it all the
    /// same, before as after the recording begins. A SIGHUP that was to be ignored, as nohup has it, stays ignored.
    ///
    /// # Errors
    /// When the handlers can not be installed.
    pub fn until_counted() -> Result<Signals> {
        let signals = Signals::uncaught();
        for (n, &(signal, _)) in signals.caught.iter().enumerate() {
            if signal == SIGHUP && is_ignored(signal) {
                continue;
            }
            let (counts, counting) = (Arc::clone(&signals.caught), Arc::clone(&signals.counting));
            let take = move || {
                if counting.load(Ordering::Relaxed) {
                    counts[n].1.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                let _ = nix::unistd::write(std::io::stderr(), FROM_HANDLER);
                signal_hook::low_level::exit(1);
            };
            // SAFETY: a handler may do this: it adds to a number, or calls write and _exit.
            unsafe { signal_hook::low_level::register(signal, take) }.context("catch signals")?;
        }
        // A limit on the size of files (ulimit -f) is then an error of writing, told like a full disk.
        signal_hook::flag::register(SIGXFSZ, Arc::default()).context("catch signals")?;
        Ok(signals)
    }

    /// From now on signals are only counted.
    pub fn count(&self) {
        self.counting.store(true, Ordering::Relaxed);
    }

    /// None, ever: nothing is caught.
    pub fn uncaught() -> Signals {
        let caught = Arc::new([SIGINT, SIGTERM, SIGHUP].map(|signal| (signal, AtomicUsize::new(0))));
        Signals { caught, taken: Arc::default(), counting: Arc::default(), own: Arc::default() }
    }

    /// The signal that asked us to end, if one came.
    pub fn came(&self) -> Option<i32> {
        let waiting = self.caught.iter().find(|(_, count)| count.load(Ordering::Relaxed) > 0);
        let seen = [&self.taken, &self.own].map(|flag| flag.load(Ordering::Relaxed));
        let seen =
            || seen.into_iter().find(|&signal| signal != 0).and_then(|signal| i32::try_from(signal).ok());
        waiting.map(|(signal, _)| *signal).or_else(seen)
    }

    /// That none came, before anything is recorded.
    ///
    /// # Errors
    /// When one did.
    pub fn none_yet(&self) -> Result<()> {
        match self.came() {
            None => Ok(()),
            Some(_) => bail!("{NO_RUN}"),
        }
    }

    /// The next signal of those that came; each is told once.
    pub fn next(&self) -> Option<i32> {
        let one_less = |count: usize| count.checked_sub(1);
        let (signal, _) = self
            .caught
            .iter()
            .find(|(_, count)| count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok())?;
        self.taken.store(*signal as usize, Ordering::Relaxed);
        Some(*signal)
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

#[cfg(test)]
mod tests {
    use super::Signals;
    use nix::sys::signal::{Signal, raise};

    #[test]
    fn both_ways_say_the_same() {
        assert_eq!(super::FROM_HANDLER, format!("fabscope: {}\n", super::NO_RUN).as_bytes());
    }

    #[test]
    fn each_signal_is_told_once_however_late_one_looks() {
        let signals = Signals::catch().unwrap();
        assert_eq!((signals.came(), signals.next()), (None, None));
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGTERM] {
            raise(signal).unwrap();
        }
        let told: Vec<i32> = std::iter::from_fn(|| signals.next()).collect();
        assert_eq!(told, [Signal::SIGINT, Signal::SIGTERM, Signal::SIGTERM].map(|signal| signal as i32));
        assert!(signals.came().is_some() && signals.another().came().is_some());
    }
}
