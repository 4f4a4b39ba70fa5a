//! What both programs need at the points where they are probed: the macro that a probed function
//! begins with, the symbol that says what the program is, and the time stamp counter.
//!
//! This and the other files that both programs include are part of each program, not of the
//! library, so that a program that only links the library holds none of the probe points.

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

const VERSION: &[u8] = standin::version().as_bytes();

/// What `standin::version` says, zero-terminated, for whoever looks at the file.
///
/// The name is not Rust's style because it is a symbol for others to find.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "a symbol that other programs look for")]
#[used]
static fabscope_standin_version: [u8; VERSION.len() + 1] = {
    let mut bytes = [0; VERSION.len() + 1];
    let mut i = 0;
    while i < VERSION.len() {
        bytes[i] = VERSION[i];
        i += 1;
    }
    bytes
};

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
