//! Whose turn it is to switch a process's tracepoints: one recording at a time looks at the others' notes, switches, and
//! writes its own. It knows nothing of tracepoints.
//!
//! The lock (flock(2)) is on the ring's own file, which every recording of the process has open: there is nothing to
//! clean up, and a recording that is killed gives it back. The process itself never locks it.

use std::fs::{File, TryLockError};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How long another one's turn is waited for, which is a few calls of the target's RPC.
const LONGEST: Duration = Duration::from_secs(10);
/// Between two looks.
const BETWEEN: Duration = Duration::from_millis(1);

/// A recording's own handle of the lock.
#[derive(Debug)]
pub(super) struct Turns {
    file: Option<File>,
}

/// One's turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    file: Option<&'a File>,
}

impl Turns {
    /// Of a ring's file.
    pub(super) fn of(ring: &File) -> Turns {
        // Opened anew, since a duplicate of a handle shares its lock.
        Turns { file: File::open(format!("/proc/self/fd/{}", ring.as_raw_fd())).ok() }
    }

    /// Waits for one's turn. Where there is no lock, or somebody else keeps it, things go on without.
    pub(super) fn take(&self) -> Turn<'_> {
        let until = Instant::now() + LONGEST;
        let Some(file) = &self.file else { return Turn { file: None } };
        loop {
            match file.try_lock() {
                Ok(()) => return Turn { file: Some(file) },
                Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(BETWEEN),
                Err(_) => return Turn { file: None },
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(file) = self.file {
            let _ = file.unlock();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Turns;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn one_at_a_time_has_its_turn() {
        let ring = tempfile::tempfile().unwrap();
        let inside = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let turns = Turns::of(&ring);
                    for _ in 0..50 {
                        let turn = turns.take();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(turn);
                    }
                });
            }
        });
    }
}
