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
/// How far a rate between two pairs may be off for being read inexactly, as a part of it, so that it says something.
const EXACT: f64 = TOLERANCE / 10.0;
/// Where the kernel says what it takes the time from.
const CLOCKS: &str = "/sys/devices/system/clocksource/clocksource0";

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

/// Ticks of a second on this machine, for tests: also where they are kept from their core between two reads.
#[cfg(test)]
pub(super) fn rate() -> u64 {
    let first = pair();
    std::thread::sleep(FIRST);
    (1e9 / slope(&first, &pair())) as u64
}

/// Whether this machine's counter runs at one rate whatever its processors do.
fn is_invariant(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    // Virtual machines may leave the second away.
    flags.split_whitespace().any(|flag| flag == "constant_tsc" || flag == "nonstop_tsc")
}

/// Why the counter is not to be trusted, by the clock that the kernel uses and those that it might: it strikes the
/// counter off where it has seen it run unevenly, and falls back on one of these.
fn is_struck_off(current: &str, available: &str) -> Option<String> {
    let fallen_back = ["hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"].contains(&current.trim());
    let there = available.split_whitespace().any(|clock| clock.starts_with("tsc"));
    (fallen_back && !there).then(|| {
        format!(
            "the kernel found that this machine's time-stamp counter runs unevenly, and uses the clock {} in its place",
            current.trim()
        )
    })
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
        let clock = |name: &str| std::fs::read_to_string(format!("{CLOCKS}/{name}")).unwrap_or_default();
        if let Some(why) = is_struck_off(&clock("current_clocksource"), &clock("available_clocksource")) {
            return Err(Error::Ticks { why });
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
    ///
    /// # Errors
    /// When the counter has run at another rate since the last time, as where a virtual machine was moved.
    pub(super) fn update(&mut self) -> Result<(), String> {
        if monotonic_now().0.saturating_sub(self.last.ns) < EVERY {
            return Ok(());
        }
        self.go_on(pair())
    }

    fn go_on(&mut self, next: Pair) -> Result<(), String> {
        let width = next.width.saturating_add(self.last.width) as f64;
        let rate = slope(&self.last, &next) / self.ns_per_tick;
        let apart = next.ns.saturating_sub(self.last.ns) as f64;
        if (rate - 1.0).abs() > TOLERANCE && width < apart * EXACT {
            return Err(format!(
                "this machine's time-stamp counter has changed its rate, to {:.3} of what it was",
                1.0 / rate
            ));
        }
        self.last = next;
        while self.older.len() > 1 && self.older.get(1).is_some_and(|p| self.last.ns - p.ns >= BASELINE) {
            self.older.pop_front();
        }
        if let Some(first) = self.older.front() {
            self.ns_per_tick = slope(first, &self.last);
        }
        if self.older.back().is_none_or(|p| self.last.ns.saturating_sub(p.ns) >= BASELINE / 10) {
            self.older.push_back(self.last);
        }
        Ok(())
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
    use super::{Pair, Ticks, is_invariant, is_struck_off, now};
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
            ticks.update().unwrap();
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
    fn a_counter_that_changes_its_rate_is_noticed_and_a_late_look_is_not_one() {
        let pair = |ticks, ns, width| Pair { ticks, ns, width };
        let fresh = || Ticks {
            last: pair(2_000_000, 1_000_000, 50),
            older: [pair(0, 0, 50)].into(),
            ns_per_tick: 0.5,
        };
        // 20 ms on: at the old rate; read inexactly, as by a thread that was put aside; and a twentieth slower.
        fresh().go_on(pair(42_000_000, 21_000_000, 60)).unwrap();
        fresh().go_on(pair(42_000_000, 23_000_000, 4_000_000)).unwrap();
        let error = fresh().go_on(pair(40_000_000, 21_000_000, 60)).unwrap_err();
        assert!(error.contains("0.950 of what it was"), "{error}");
        // Or it stood still, or went back.
        assert!(fresh().go_on(pair(2_000_000, 21_000_000, 60)).is_err());
        assert!(fresh().go_on(pair(1_000, 21_000_000, 60)).is_err());
    }

    #[test]
    fn the_kernel_tells_a_counter_that_runs_unevenly() {
        assert_eq!(is_struck_off("tsc\n", "tsc hpet acpi_pm \n"), None);
        assert_eq!(is_struck_off("kvm-clock\n", "kvm-clock acpi_pm \n"), None);
        assert_eq!(is_struck_off("hpet\n", "tsc hpet acpi_pm \n"), None);
        assert_eq!(is_struck_off("", ""), None);
        let why = is_struck_off("hpet\n", "hpet acpi_pm \n").unwrap();
        assert!(why.contains("the clock hpet"), "{why}");
    }

    #[test]
    fn the_flags_tell_an_invariant_counter() {
        assert!(is_invariant("processor: 0\nflags\t\t: fpu constant_tsc x\n"));
        assert!(!is_invariant("flags\t\t: fpu tsc rdtscp\n"));
        assert!(!is_invariant(""));
    }
}
