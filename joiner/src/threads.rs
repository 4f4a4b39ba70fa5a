//! What the libraries beneath take of the system: sees to it that the threads can be made which they take for granted,
//! since they end the program where one can not, and that memory is not given back only to be asked for again. It runs
//! nothing in those threads.

use crate::error::Error;
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::thread::{Builder, available_parallelism};

/// Threads besides those of the pools: of reading ahead, and of giving memory back.
const OTHERS: usize = 4;

/// How many threads reading and joining make at most: rayon's pool and polars' own two, and as many again to spare, since
/// ten were too few on two cores.
fn needed() -> usize {
    let cores = available_parallelism().map_or(1, usize::from);
    let told = |name: &str| std::env::var(name).ok().and_then(|n| n.parse().ok()).filter(|&n: &usize| n > 0);
    told("RAYON_NUM_THREADS").unwrap_or(cores) + 4 * told("POLARS_MAX_THREADS").unwrap_or(cores) + OTHERS
}

/// Makes as many threads as are needed, all at once, and lets them go.
fn can_be_made(threads: usize) -> Result<(), Error> {
    let mut waiting = Vec::with_capacity(threads);
    for _ in 0..threads {
        let (let_go, wait) = channel::<()>();
        // Ends when `let_go` is dropped.
        let thread = Builder::new().name("trial".into()).spawn(move || wait.recv().is_ok());
        waiting.push((let_go, thread.map_err(|source| Error::Threads { threads, source })?));
    }
    for (let_go, thread) in waiting {
        drop(let_go);
        // It does nothing that could fail.
        let _ = thread.join();
    }
    Ok(())
}

/// Whether the threads that are needed are there or can be made. Asked once, when the first run is read.
///
/// # Errors
/// [`Error::Threads`].
pub(crate) fn ready() -> Result<(), Error> {
    static READY: OnceLock<()> = OnceLock::new();
    if READY.get().is_none() {
        can_be_made(needed())?;
        READY.get_or_init(|| ());
    }
    Ok(())
}

/// Lets the allocator keep what is freed for what comes next, of runs that are read in parts within so much memory:
/// every part needs what the one before it gave back, and the system clears all of it anew.
pub(crate) fn keep_memory(memory: u64) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// The most that glibc takes for it.
        const MAPPED: libc::c_int = 32 << 20;
        let kept = libc::c_int::try_from(memory / 8).unwrap_or(libc::c_int::MAX).min(256 << 20);
        // SAFETY: these set two numbers of the allocator, under its own lock.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED.min(kept));
            libc::mallopt(libc::M_TRIM_THRESHOLD, kept);
        }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _ = memory;
}

#[cfg(test)]
mod tests {
    use super::{can_be_made, needed};

    #[test]
    fn the_threads_that_are_needed_can_be_made() {
        assert!(needed() > 4);
        can_be_made(needed()).unwrap();
    }
}
