//! The VM test bed: Debian's stock kernels under QEMU's software emulation, as a library for tests.
//! It fetches a kernel, boots it with the programs under test, runs commands and moves files. It
//! measures nothing, and timings inside it are for function and proportion, never for performance.
//!
//! The machine's 127.0.0.1 is 10.0.2.2 in the VM, so a kernel host there reaches a target here.
//!
//! ```no_run
//! use std::time::Duration;
//! use testbed::{Kernel, NullBlk, Vm};
//!
//! # fn main() -> anyhow::Result<()> {
//! if !testbed::available(Kernel::Debian6_12)? {
//!     return Ok(()); // it has said why
//! }
//! let vm = Vm::builder(Kernel::Debian6_12).program("fio").boot()?;
//! let drive = vm.null_blk(NullBlk::default())?;
//! vm.nvmet_tcp("nqn.2024-01.org.example:a", &drive, 4420)?;
//! let controller = vm.connect_tcp("127.0.0.1", 4420, "nqn.2024-01.org.example:a", "nr_io_queues=1")?;
//! let block = vm.namespace(&controller, 1)?;
//! let output = vm.run(&format!("dd if={block} of=/dev/null bs=4k count=9"), Duration::from_secs(30))?;
//! assert_eq!(output.status, 0, "{}", output.errors());
//! # Ok(())
//! # }
//! ```
//!
//! Needs the Debian packages `qemu-system-x86`, `busybox-static`, `xz-utils`, `zstd` and `binutils`
//! besides what every Debian has, and the package registry for the first boot of each kernel. What was
//! fetched stays in `target/testbed` (or where `FABSCOPE_TESTBED` says), 70 MB a kernel, until it is
//! removed; then the newest versions are fetched again.
//!
//! The kernel runs with `mitigations=off` and a fixed address, which makes emulation faster and leaves
//! what can be probed as it is.

mod apt;
mod available;
mod bzimage;
mod cpio;
mod image;
pub mod kernel;
mod modules;
mod network;
mod nvme;
mod outside;
mod vm;
mod wire;

pub use available::{WhyNot, available, why_not};
pub use kernel::{CACHE_VARIABLE, Kernel};
pub use network::FarNetwork;
pub use nix::sys::signal::Signal;
pub use nvme::{Backing, Controller, NullBlk, Port, SoftRoce, Transport};
pub use vm::{Builder, Output, Running, SHORT, Vm};
