//! The clocks: the recording's, and the time that a thread has worked.

use nix::time::{ClockId, clock_gettime};

/// A time on `CLOCK_MONOTONIC` or a duration, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

/// `CLOCK_MONOTONIC` now: the clock of the recording's boundaries.
#[must_use]
pub fn monotonic() -> Nanos {
    read(ClockId::CLOCK_MONOTONIC)
}

/// How long this thread has been on a CPU.
#[must_use]
pub fn thread_cpu() -> Nanos {
    read(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

fn read(clock: ClockId) -> Nanos {
    // Neither clock can fail on Linux.
    clock_gettime(clock).map_or(Nanos(0), |t| {
        let part = |v: i64| u64::try_from(v).unwrap_or(0);
        Nanos(part(t.tv_sec()) * 1_000_000_000 + part(t.tv_nsec()))
    })
}
