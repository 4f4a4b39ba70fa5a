//! Tries whether the kernel takes fentry programs at all: one can be built without what they need, and a machine's
//! owner can forbid them, though the type information has every function. It loads an empty program and attaches
//! nothing.

use libbpf_rs::libbpf_sys;
use std::ffi::CStr;
use std::os::fd::{FromRawFd, OwnedFd};

/// A function of the kernel proper that both sides' commands pass.
const FUNCTION: &CStr = c"blk_mq_start_request";

/// Why the kernel refuses fentry programs; none where it takes them, or where this can not be told.
pub(crate) fn fentry() -> Option<String> {
    // SAFETY: the name ends with a zero.
    let function =
        unsafe { libbpf_sys::libbpf_find_vmlinux_btf_id(FUNCTION.as_ptr(), libbpf_sys::BPF_TRACE_FENTRY) };
    let function = u32::try_from(function).ok()?;
    let nothing = libbpf_sys::bpf_insn {
        code: 0,
        _bitfield_align_1: [],
        _bitfield_1: libbpf_sys::__BindgenBitfieldUnit::new([0]),
        off: 0,
        imm: 0,
    };
    // mov64 r0, 0; exit (the kernel's Documentation/bpf/standardization/instruction-set.rst)
    let empty =
        [libbpf_sys::bpf_insn { code: 0xb7, ..nothing }, libbpf_sys::bpf_insn { code: 0x95, ..nothing }];
    let mut opts = libbpf_sys::bpf_prog_load_opts {
        sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as libbpf_sys::size_t,
        expected_attach_type: libbpf_sys::BPF_TRACE_FENTRY,
        attach_btf_id: function,
        ..Default::default()
    };
    // SAFETY: all pointers are valid for the call, the count is the array's, and the strings end with a zero.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_TRACING,
            c"fab_try".as_ptr(),
            c"Dual BSD/GPL".as_ptr(),
            empty.as_ptr(),
            empty.len() as libbpf_sys::size_t,
            &raw mut opts,
        )
    };
    if fd < 0 {
        return Some(format!("the kernel refuses fentry programs ({:?})", nix::errno::Errno::from_raw(-fd)));
    }
    // SAFETY: the descriptor is new, and nobody else has it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    None
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_refusal_has_the_systems_reason() {
        match super::fentry() {
            Some(why) => {
                assert!(
                    why.starts_with("the kernel refuses fentry programs (E") && !why.contains("UnknownErrno")
                );
            }
            None => println!("skipped: this kernel takes fentry programs, or does not tell of its functions"),
        }
    }
}
