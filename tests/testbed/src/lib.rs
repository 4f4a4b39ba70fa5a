//! The VM test bed: Debian's stock kernels under QEMU's software emulation, as a library for tests.
//! It fetches a kernel, boots it with the programs under test, runs commands and moves files. It
//! measures nothing, and timings inside it are for function and proportion, never for performance.
//!
//! The machine's 127.0.0.1 is 10.0.2.2 in the VM, so a kernel host there reaches a target here.
//!
//! Needs the Debian packages `qemu-system-x86`, `busybox-static`, `xz-utils`, `zstd` and `binutils`,
//! and the package registry for the first boot of each kernel.

mod apt;
mod available;
mod bzimage;
mod cpio;
mod image;
pub mod kernel;
mod modules;
mod nvme;
mod vm;
mod wire;

pub use available::{WhyNot, available, why_not};
pub use kernel::{CACHE_VARIABLE, Kernel};
pub use nix::sys::signal::Signal;
pub use nvme::{Controller, NullBlk};
pub use vm::{Builder, Output, Running, SHORT, Vm};
