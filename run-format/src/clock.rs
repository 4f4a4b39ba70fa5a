//! This machine and its clocks, as a manifest keeps them.

use crate::{ClockPair, Machine, Nanos};
use nix::time::{ClockId, clock_gettime};
use std::fs;

/// `CLOCK_MONOTONIC` now, what `bpf_ktime_get_ns` reads.
#[must_use]
pub fn monotonic_now() -> Nanos {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Both clocks at one instant: the realtime clock is read between two reads of the monotonic one, the
/// closest of several tries.
#[must_use]
pub fn clock_pair() -> ClockPair {
    let mut best = (u64::MAX, ClockPair { monotonic_ns: Nanos(0), realtime_ns: Nanos(0) });
    for _ in 0..8 {
        let before = monotonic_now();
        let realtime_ns = read(ClockId::CLOCK_REALTIME);
        let after = monotonic_now();
        let width = after.0.saturating_sub(before.0);
        if width < best.0 {
            best = (width, ClockPair { monotonic_ns: Nanos(before.0 + width / 2), realtime_ns });
        }
    }
    best.1
}

fn read(clock: ClockId) -> Nanos {
    // Neither clock can fail on Linux; 0 would be a time before boot.
    clock_gettime(clock).map_or(Nanos(0), |t| {
        let part = |v: i64| u64::try_from(v).unwrap_or(0);
        Nanos(part(t.tv_sec()) * 1_000_000_000 + part(t.tv_nsec()))
    })
}

/// The machine this runs on. What can not be read is left empty.
#[must_use]
pub fn machine() -> Machine {
    let text = |path: &str| fs::read_to_string(path).map(|t| t.trim().to_owned()).unwrap_or_default();
    let uts = nix::sys::utsname::uname().ok();
    let field = |get: fn(&nix::sys::utsname::UtsName) -> &std::ffi::OsStr| {
        uts.as_ref().map(|u| get(u).to_string_lossy().into_owned()).unwrap_or_default()
    };
    Machine {
        hostname: field(|u| u.nodename()),
        kernel: field(|u| u.release()),
        kernel_build: field(|u| u.version()),
        architecture: field(|u| u.machine()),
        cpus: std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1)),
        boot_id: text("/proc/sys/kernel/random/boot_id"),
    }
}
