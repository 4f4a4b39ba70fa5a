//! What is wrong with a target on purpose: a drive that is slow in a known way, a pool with few buffers, a reactor with
//! other work to do. The faults are real: commands wait for them, and no timestamp is touched.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use standin::parse_duration;

use super::types::spdk_nvmf_tcp_req;

/// How the drive behind all namespaces serves commands, besides the storage delay that each has by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Drive {
    /// Serves one command at a time; each takes so long on average, drawn at random (exponential).
    Serial(Duration),
    /// Completes this many commands a second at most, evenly.
    Iops(u32),
    /// This share of the commands, drawn at random, takes so much longer, whatever else is in the drive.
    Stalls(f64, Duration),
}

impl Drive {
    /// `serial=TIME`, `iops=N` or `stalls=SHARE:TIME`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?}: write serial=TIME, iops=N or stalls=SHARE:TIME, for example serial=200us, iops=2000 or stalls=0.02:3ms"
            )
        };
        match text.split_once('=').ok_or_else(wrong)? {
            ("serial", time) => Ok(Self::Serial(parse_duration(time)?)),
            ("iops", n) => n.parse().ok().filter(|n| *n > 0).map(Self::Iops).ok_or_else(wrong),
            ("stalls", how) => {
                let (share, time) = how.split_once(':').ok_or_else(wrong)?;
                let share: f64 = share.parse().map_err(|_| wrong())?;
                if !(0.0..=1.0).contains(&share) {
                    return Err(wrong());
                }
                Ok(Self::Stalls(share, parse_duration(time)?))
            }
            _ => Err(wrong()),
        }
    }
}

/// A random number from 0 to below 1. All reactors draw from one sequence, which begins the same each time.
fn random() -> f64 {
    static STATE: AtomicU64 = AtomicU64::new(1);
    let mut z = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

/// When the drive has nothing left to do, ns.
static FREE_AT: AtomicU64 = AtomicU64::new(0);

/// When a command that comes now (ns) and takes `delay` (ns) by itself is done.
pub(crate) fn done_at(drive: Option<Drive>, now: u64, delay: u64) -> u64 {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 4);
    match drive {
        None => now + delay,
        Some(Drive::Serial(time)) => {
            let took = -(1.0 - random()).ln() * ns(time) as f64;
            in_line(&FREE_AT, now, took as u64) + delay
        }
        Some(Drive::Iops(n)) => in_line(&FREE_AT, now, 1_000_000_000 / u64::from(n)) + delay,
        Some(Drive::Stalls(share, time)) => now + delay + if random() < share { ns(time) } else { 0 },
    }
}

/// The end of something that takes so long and begins when all before it has ended.
fn in_line(free_at: &AtomicU64, now: u64, takes: u64) -> u64 {
    let end = |free: u64| free.max(now).saturating_add(takes);
    let before = free_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(end(free)));
    end(before.unwrap_or(now))
}

/// Keeps the CPU for so long, as work of others on the reactor does.
pub(crate) fn work(time: Duration) {
    let until = std::time::Instant::now() + time;
    while std::time::Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// A reactor's data buffers. Data inside a command capsule has buffers of its own.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Cell<usize>,
    waiting: RefCell<VecDeque<*mut spdk_nvmf_tcp_req>>,
}

/// Buffers that were taken without waiting, and times that a command had to wait, of all reactors.
pub(crate) static TAKEN: AtomicU64 = AtomicU64::new(0);
pub(crate) static WAITED: AtomicU64 = AtomicU64::new(0);

impl Pool {
    pub(crate) fn new(buffers: usize) -> Self {
        Self { free: Cell::new(buffers), waiting: RefCell::default() }
    }

    /// Takes a buffer for the request, or puts it into the line. Whether it has one.
    pub(crate) fn take(&self, req: *mut spdk_nvmf_tcp_req) -> bool {
        if self.free.get() > 0 && self.waiting.borrow().is_empty() {
            self.free.set(self.free.get() - 1);
            TAKEN.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.contains(&req) {
            waiting.push_back(req);
            WAITED.fetch_add(1, Ordering::Relaxed);
        }
        false
    }

    /// A buffer comes back.
    pub(crate) fn give(&self) {
        self.free.set(self.free.get() + 1);
    }

    /// The request does not wait any more: its connection is down.
    pub(crate) fn forget(&self, req: *mut spdk_nvmf_tcp_req) {
        self.waiting.borrow_mut().retain(|waiting| *waiting != req);
    }

    /// The request that has waited longest, with a buffer taken for it; `None` where there is none of either.
    pub(crate) fn serve(&self) -> Option<*mut spdk_nvmf_tcp_req> {
        if self.free.get() == 0 {
            return None;
        }
        let req = self.waiting.borrow_mut().pop_front()?;
        self.free.set(self.free.get() - 1);
        Some(req)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn drives_are_read_and_others_refused() {
        let us = Duration::from_micros;
        assert_eq!(Drive::parse("serial=200us"), Ok(Drive::Serial(us(200))));
        assert_eq!(Drive::parse("iops=2000"), Ok(Drive::Iops(2000)));
        assert_eq!(Drive::parse("stalls=0.02:3ms"), Ok(Drive::Stalls(0.02, us(3000))));
        for bad in [
            "",
            "serial",
            "serial=",
            "iops=0",
            "iops=-1",
            "stalls=2:1ms",
            "stalls=0.1",
            "stalls=NaN:1ms",
            "x=1",
        ] {
            assert!(Drive::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn one_after_the_other_and_stalls_by_share() {
        let line = AtomicU64::new(0);
        assert_eq!(
            [in_line(&line, 100, 10), in_line(&line, 100, 10), in_line(&line, 500, 10)],
            [110, 120, 510]
        );
        assert_eq!(done_at(None, 5, 7), 12);
        let stalls = Some(Drive::Stalls(0.1, Duration::from_nanos(1_000)));
        let slow = (0..10_000).filter(|_| done_at(stalls, 0, 1) > 1_000).count();
        assert!((800..1_200).contains(&slow), "{slow}");
    }

    #[test]
    fn buffers_go_to_those_that_waited_longest() {
        let pool = Pool::new(1);
        let req = |n: usize| std::ptr::without_provenance_mut::<spdk_nvmf_tcp_req>(n * 64);
        assert!(pool.take(req(1)));
        assert!(!pool.take(req(2)) && !pool.take(req(3)) && !pool.take(req(2)));
        assert_eq!(pool.serve(), None);
        pool.give();
        // Nobody passes those that wait.
        assert!(!pool.take(req(4)));
        pool.forget(req(3));
        assert_eq!([pool.serve(), pool.serve()], [Some(req(2)), None]);
        pool.give();
        assert_eq!([pool.serve(), pool.serve()], [Some(req(4)), None]);
    }

    proptest! {
        #[test]
        fn no_text_makes_a_drive_s_reader_panic(text in "\\PC*") {
            let _ = Drive::parse(&text);
        }
    }
}
