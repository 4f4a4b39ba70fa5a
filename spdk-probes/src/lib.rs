//! SPDK probes: ELF and DWARF resolution, probe placement, uprobes and USDT.
//!
//! [`resolve`] goes from a program's files to what a probe needs, [`functions`] is the one table of what is wanted.

mod dwarf;
mod elf;
mod error;
pub mod functions;
mod layout;
mod place;
pub mod resolve;
mod usdt;

pub use error::Error;
pub use layout::Layout;
pub use place::{Class, Emulation, Reg};
pub use usdt::{Semaphore, UsdtArg, UsdtPlace, UsdtSite};
