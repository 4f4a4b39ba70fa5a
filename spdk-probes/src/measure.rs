//! The ring's reader with a source of records that needs no SPDK, for the benchmark.

use std::mem::MaybeUninit;

use libbpf_rs::OpenObject;
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use run_format::bpf::raw;
use run_format::{Side, Sink};

use crate::Error;
use crate::loader::map;
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
    program: std::os::fd::OwnedFd,
    ring: Ring,
    queues: Queues,
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
        let program =
            std::os::fd::AsFd::as_fd(&loaded.progs.flood).try_clone_to_owned().map_err(Error::Ring)?;
        Ok(Flood { program, ring, queues: Queues::new(Side::Target, 0, SubsystemStates::default()) })
    }

    /// Runs the program so often.
    ///
    /// # Errors
    /// When the kernel refuses to.
    pub fn fill(&mut self, rounds: u64) -> std::io::Result<()> {
        use std::os::fd::AsRawFd;
        for _ in 0..rounds {
            let mut opts = libbpf_rs::libbpf_sys::bpf_test_run_opts {
                sz: size_of::<libbpf_rs::libbpf_sys::bpf_test_run_opts>() as _,
                ..Default::default()
            };
            // SAFETY: the descriptor is a loaded program, and the options are zero but for their size.
            let result = unsafe {
                libbpf_rs::libbpf_sys::bpf_prog_test_run_opts(self.program.as_raw_fd(), &raw mut opts)
            };
            if result < 0 {
                return Err(std::io::Error::from_raw_os_error(-result));
            }
        }
        Ok(())
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
