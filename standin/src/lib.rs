//! A small NVMe/TCP target and initiator with SPDK's probe points: a stand-in, never SPDK.
//!
//! Both bear SPDK's function, structure, member, enumerator and USDT names at the points where a
//! command passes, with a structure layout of their own. What records SPDK records them by the
//! same way: uprobes at functions found by name, offsets read from DWARF. They are for
//! demonstration and tests on a machine without SPDK; they say what they are in their help, their
//! log, in Identify, and in the symbol `fabscope_standin_version`.
//!
//! [`run_target`] and [`run_initiator`] are the two programs; [`spawn`] starts and steers them from
//! another process.

/// Stands first in every function that a probe may be put on.
///
/// The empty instruction sequence claims callee-saved registers, so that the function begins by
/// pushing them, an instruction that the kernel emulates at a uprobe; and its text differs from
/// function to function, so that no two functions are the same to the optimiser.
macro_rules! probe_entry {
    () => {
        // SAFETY: no instructions.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::asm!(
                concat!("/* ", module_path!(), " ", line!(), " */"),
                out("r14") _,
                out("r15") _,
                options(nomem, nostack, preserves_flags)
            );
        }
    };
}

mod duration;
mod initiator;
mod pdu;
mod sock;
pub mod spawn;
mod target;
mod wire;

pub use duration::{parse_duration, parse_size, parse_size_u32};
pub use initiator::{InitiatorConfig, Summary, Workload, run_initiator};
pub use target::{Backend, Stage, TargetConfig, run_target, set_delay};

/// NQN of the subsystem that a target serves when it is given none.
pub const DEFAULT_NQN: &str = "nqn.2024-01.io.fabscope:standin1";

const VERSION: &str = concat!("fabscope stand-in ", env!("CARGO_PKG_VERSION"), " (not SPDK)");

/// What [`version`] says, zero-terminated, for whoever looks at the file.
///
/// The name is not Rust's style because it is a symbol for others to find.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "a symbol that other programs look for")]
#[used]
static fabscope_standin_version: [u8; VERSION.len() + 1] = {
    let mut bytes = [0; VERSION.len() + 1];
    let mut i = 0;
    while i < VERSION.len() {
        bytes[i] = VERSION.as_bytes()[i];
        i += 1;
    }
    bytes
};

/// Name and version, with the words "stand-in" and "not SPDK".
pub fn version() -> &'static str {
    VERSION
}

/// Makes the symbol part of every program that runs a target or an initiator.
pub(crate) fn keep_version() {
    // SAFETY: reads one byte of a static.
    let _ = unsafe { std::ptr::read_volatile(fabscope_standin_version.as_ptr()) };
}

/// The time stamp counter, the first argument of some USDT probes.
#[inline]
pub(crate) fn tsc() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}
