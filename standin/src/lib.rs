//! A small NVMe/TCP target and initiator with SPDK's probe points: a stand-in, never SPDK.
//!
//! Both bear SPDK's function, structure, member, enumerator and USDT names at the points where a
//! command passes, with a structure layout of their own. What records SPDK records them by the
//! same way: uprobes at functions found by name, offsets read from DWARF. They are for
//! demonstration and tests on a machine without SPDK; they say what they are in their help, their
//! log, in Identify, and in the symbol `fabscope_standin_version`.
//!
//! The package builds two programs, `standin-target` and `standin-initiator`. This library is what
//! other programs need to start and steer them ([`spawn`]); the probe points are in the two
//! programs only.

pub mod cpus;
mod duration;
pub mod network;
mod report;
pub mod spawn;

pub use cpus::Hogs;
pub use duration::{parse_duration, parse_size, parse_size_u32};
pub use report::{Latency, Stage, Summary, Workload};
pub use spawn::{Initiator, Target};

/// NQN of the subsystem that a target serves when it is given none.
pub const DEFAULT_NQN: &str = "nqn.2024-01.io.fabscope:standin1";

/// Name and version of the two programs, with the words "stand-in" and "not SPDK".
pub const fn version() -> &'static str {
    concat!("fabscope stand-in ", env!("CARGO_PKG_VERSION"), " (not SPDK)")
}
