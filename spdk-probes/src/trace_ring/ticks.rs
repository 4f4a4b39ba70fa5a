//! The time-stamp counter against `CLOCK_MONOTONIC`: what the ring's ticks are in nanoseconds.
//!
//! The counter is read between two reads of the clock, again and again while a recording lasts. A time is taken
//! from the nearest such pair and the rate over the last second, so neither the rounding of the rate that SPDK
//! states nor a clock that is being disciplined adds up.

use run_format::{Nanos, monotonic_now};

use crate::Error;

/// A pair is taken at most this often, ns.
const EVERY: u64 = 10_000_000;
/// The rate is that over this time, ns.
const BASELINE: u64 = 1_000_000_000;
/// Between the first two pairs, which make the first rate.
const FIRST: std::time::Duration = std::time::Duration::from_millis(20);
/// How far the rate may be from the ring's, as a part of it: SPDK rounds its own.
const TOLERANCE: f64 = 0.02;

/// The counter and the clock at one moment.
#[derive(Clone, Copy, Debug)]
struct Pair {
    ticks: u64,
    ns: u64,
    /// Between the two reads of the clock.
    width: u64,
}

/// What the counter is in nanoseconds.
#[derive(Debug)]
pub(super) struct Ticks {
    last: Pair,
    /// A pair of each tenth of the baseline, the oldest first.
    older: std::collections::VecDeque<Pair>,
    ns_per_tick: f64,
}

/// The time-stamp counter now; 0 on processors without one.
pub(super) fn now() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    0
}

fn pair() -> Pair {
    let mut best: Option<Pair> = None;
    for _ in 0..6 {
        let before = monotonic_now().0;
        let ticks = now();
        let width = monotonic_now().0.saturating_sub(before);
        if best.is_none_or(|best| width < best.width) {
            best = Some(Pair { ticks, ns: before + width / 2, width });
        }
    }
    best.unwrap_or(Pair { ticks: 0, ns: 0, width: 0 })
}

/// Whether this machine's counter runs at one rate whatever its processors do.
fn is_invariant(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    // Virtual machines may leave the second away.
    flags.split_whitespace().any(|flag| flag == "constant_tsc" || flag == "nonstop_tsc")
}

impl Ticks {
    /// Calibrates, which takes 20 ms. `rate` is what the ring states.
    pub(super) fn new(rate: u64) -> Result<Ticks, Error> {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        if !is_invariant(&cpuinfo) {
            return Err(Error::Ticks {
                why: "this machine's time-stamp counter does not run at one rate (no constant_tsc among its flags)"
                    .to_owned(),
            });
        }
        let first = pair();
        std::thread::sleep(FIRST);
        let last = pair();
        let ticks = Ticks { last, older: [first].into(), ns_per_tick: slope(&first, &last) };
        let measured = 1e9 / ticks.ns_per_tick;
        if !measured.is_finite() || (measured / rate as f64 - 1.0).abs() > TOLERANCE {
            return Err(Error::Ticks {
                why: format!(
                    "its ring counts {rate} ticks a second, and this machine's time-stamp counter {measured:.0}"
                ),
            });
        }
        Ok(ticks)
    }

    /// To be called often: keeps the relation up to date.
    pub(super) fn update(&mut self) {
        if monotonic_now().0.saturating_sub(self.last.ns) < EVERY {
            return;
        }
        self.last = pair();
        while self.older.len() > 1 && self.older.get(1).is_some_and(|p| self.last.ns - p.ns >= BASELINE) {
            self.older.pop_front();
        }
        if let Some(first) = self.older.front() {
            self.ns_per_tick = slope(first, &self.last);
        }
        if self.older.back().is_none_or(|p| self.last.ns.saturating_sub(p.ns) >= BASELINE / 10) {
            self.older.push_back(self.last);
        }
    }

    /// The time of a count near the present.
    pub(super) fn time(&self, ticks: u64) -> Nanos {
        let apart = ticks.wrapping_sub(self.last.ticks) as i64;
        let ns = (apart as f64 * self.ns_per_tick).round() as i64;
        Nanos(self.last.ns.saturating_add_signed(ns))
    }

    /// The length of so many ticks, in seconds.
    pub(super) fn seconds(&self, ticks: u64) -> f64 {
        ticks as f64 * self.ns_per_tick / 1e9
    }

    /// How far a time may be from the clock's, ns.
    pub(super) fn error(&self) -> u64 {
        let widths = self.older.iter().map(|p| p.width).chain([self.last.width]);
        widths.max().unwrap_or(0).div_ceil(2)
    }
}

fn slope(a: &Pair, b: &Pair) -> f64 {
    b.ns.saturating_sub(a.ns) as f64 / b.ticks.saturating_sub(a.ticks).max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::{Ticks, is_invariant, now};
    use run_format::monotonic_now;

    #[test]
    fn counts_become_times() {
        if !is_invariant(&std::fs::read_to_string("/proc/cpuinfo").unwrap()) {
            println!("skipped: this machine's time-stamp counter is not invariant");
            return;
        }
        let (a, from) = (now(), monotonic_now());
        std::thread::sleep(std::time::Duration::from_millis(50));
        let rate = (now() - a) as f64 / (monotonic_now().0 - from.0) as f64 * 1e9;
        let mut ticks = Ticks::new(rate as u64).unwrap();
        for _ in 0..30 {
            std::thread::sleep(std::time::Duration::from_millis(7));
            ticks.update();
            let before = monotonic_now().0;
            let time = ticks.time(now()).0;
            let after = monotonic_now().0;
            let slack = 200 + ticks.error();
            assert!(time + slack >= before && time <= after + slack, "{before} {time} {after}");
        }
        let error = Ticks::new(rate as u64 / 2).unwrap_err();
        assert!(error.to_string().contains("ticks a second"), "{error}");
    }

    #[test]
    fn the_flags_tell_an_invariant_counter() {
        assert!(is_invariant("processor: 0\nflags\t\t: fpu constant_tsc x\n"));
        assert!(!is_invariant("flags\t\t: fpu tsc rdtscp\n"));
        assert!(!is_invariant(""));
    }
}
