//! The ring's reader with a source of records that needs no SPDK, for the benchmark.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenObject};
use run_format::bpf::raw;
use run_format::{Side, Sink};

use crate::Error;
use crate::loader::{REST, map};
use crate::queues::{Queues, SubsystemStates};
use crate::ring::Ring;

#[allow(missing_docs, missing_debug_implementations, unreachable_pub, unused_qualifications, clippy::all)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/flood.skel.rs"));
}

/// A ring, a program that fills it, and its reader.
#[derive(Debug)]
pub struct Flood {
    program: OwnedFd,
    counts: MapHandle,
    ring: Ring,
    queues: Queues,
}

/// The filling end alone, for a thread of its own.
#[derive(Debug)]
pub struct Producer(OwnedFd);

impl Producer {
    /// Runs the program so often.
    ///
    /// # Errors
    /// When the kernel refuses to.
    pub fn fill(&self, rounds: u64) -> std::io::Result<()> {
        for _ in 0..rounds {
            let mut opts = libbpf_rs::libbpf_sys::bpf_test_run_opts {
                sz: size_of::<libbpf_rs::libbpf_sys::bpf_test_run_opts>() as _,
                ..Default::default()
            };
            // SAFETY: the descriptor is a loaded program, and the options are zero but for their size.
            let result =
                unsafe { libbpf_rs::libbpf_sys::bpf_prog_test_run_opts(self.0.as_raw_fd(), &raw mut opts) };
            if result < 0 {
                return Err(std::io::Error::from_raw_os_error(-result));
            }
        }
        Ok(())
    }

    /// Runs the program at an even pace until the time is over. Where this thread was kept waiting, it catches up.
    ///
    /// # Errors
    /// When the kernel refuses to.
    pub fn pace(&self, records_a_second: u64, time: Duration) -> std::io::Result<()> {
        let began = Instant::now();
        let rounds =
            |elapsed: Duration| elapsed.as_secs_f64() * records_a_second as f64 / Flood::RECORDS as f64;
        let mut done = 0;
        while began.elapsed() < time {
            let due = rounds(began.elapsed()) as u64;
            self.fill(due.saturating_sub(done))?;
            done = due.max(done);
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(())
    }
}

impl Flood {
    /// Records of one round of filling.
    pub const RECORDS: u64 = 1024;

    /// Loads the program.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn new() -> Result<Flood, Error> {
        let refused = |source| Error::Bpf { what: "load the measuring program".to_owned(), source };
        let mut storage = MaybeUninit::<OpenObject>::uninit();
        let open = skeleton::FloodSkelBuilder::default().open(&mut storage).map_err(refused)?;
        let loaded = open.load().map_err(refused)?;
        let ring = Ring::new(map(loaded.object(), "ring")?).map_err(Error::Ring)?;
        let program = loaded.progs.flood.as_fd().try_clone_to_owned().map_err(Error::Ring)?;
        let counts = map(loaded.object(), "counts")?;
        Ok(Flood { program, counts, ring, queues: Queues::new(Side::Target, 0, SubsystemStates::default()) })
    }

    /// The filling end.
    ///
    /// # Errors
    /// When there is no more room for open files.
    pub fn producer(&self) -> std::io::Result<Producer> {
        self.program.try_clone().map(Producer)
    }

    /// Runs the program so often.
    ///
    /// # Errors
    /// When the kernel refuses to.
    pub fn fill(&mut self, rounds: u64) -> std::io::Result<()> {
        self.producer()?.fill(rounds)
    }

    /// Records that went into the ring so far, and those that found it full.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn sent_and_lost(&self) -> Result<(u64, u64), Error> {
        let count = |which: u32| {
            let read = |source| Error::Bpf { what: "read the measuring program's counts".to_owned(), source };
            let value = self.counts.lookup(&which.to_ne_bytes(), MapFlags::ANY).map_err(read)?;
            let bytes = value.as_deref().and_then(|value| value.get(..8)?.try_into().ok());
            Ok(bytes.map_or(0, u64::from_ne_bytes))
        };
        Ok((count(0)?, count(1)?))
    }

    /// As a recording does it: takes what is there, and waits for more where there is nothing; the number of
    /// records.
    pub fn poll(&mut self, timeout: Duration, sink: &mut dyn Sink) -> usize {
        let end = Instant::now() + timeout;
        loop {
            let taken = self.drain(sink);
            let left = end.saturating_duration_since(Instant::now());
            if taken > 0 || left.is_zero() {
                return taken;
            }
            self.ring.wait(left.min(REST));
        }
    }

    /// Takes everything that is in the ring, the way a recording does; the number of records.
    pub fn drain(&mut self, sink: &mut dyn Sink) -> usize {
        let Flood { ring, queues, .. } = self;
        ring.drain(|message| {
            if let Some(record) = raw::fab_command::parse(message) {
                let queue = queues.of(record.queue, sink);
                sink.command(&record.to_command(queue));
            }
        })
    }
}
