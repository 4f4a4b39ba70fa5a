//! The commands that are under way, as the BPF programs keep them: an array of slots in memory that is shared with
//! the programs, and a table for those whose slot another one has. It looks at them and frees them; only the programs
//! add any.

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use nix::sys::mman::{MapFlags as Mapping, ProtFlags, mmap, munmap};
use run_format::bpf::raw;

use crate::messages::spdk_in_flight;

/// An array map's memory, shared with the programs.
#[derive(Debug)]
struct Shared {
    at: NonNull<AtomicU64>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread; it is read as atomics and volatile.
unsafe impl Send for Shared {}

impl Shared {
    fn new(map: &MapHandle) -> std::io::Result<Shared> {
        // The kernel lays values out at multiples of 8 bytes, and maps whole pages.
        let bytes = (map.value_size() as usize).next_multiple_of(8) * map.max_entries() as usize;
        let length =
            NonZeroUsize::new(bytes).ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
        // SAFETY: a new mapping, which nothing else in this process refers to.
        let at = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                Mapping::MAP_SHARED,
                map.as_fd(),
                0,
            )
        }?;
        Ok(Shared { at: at.cast(), bytes })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has so many bytes, is aligned to a page, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes / 8) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; nothing refers to it any more.
        let _ = unsafe { munmap(self.at.cast(), self.bytes) };
    }
}

/// Empties an array map that the programs share.
pub(crate) fn zero(map: &MapHandle) -> std::io::Result<()> {
    let shared = Shared::new(map)?;
    shared.words().iter().filter(|word| word.load(Ordering::Relaxed) != 0).for_each(|word| {
        word.store(0, Ordering::Relaxed);
    });
    Ok(())
}

/// The command itself, as the ring would have it.
pub(crate) fn record(command: &spdk_in_flight) -> Option<raw::fab_command> {
    let whole = std::ptr::from_ref(&command.command).cast::<u8>();
    // SAFETY: a plain structure of integers, all of whose bytes were written.
    raw::fab_command::parse(unsafe { std::slice::from_raw_parts(whole, size_of_val(&command.command)) })
}

/// The commands under way of one side.
#[derive(Debug)]
pub(crate) struct UnderWay {
    slots: Shared,
    overflow: MapHandle,
}

impl UnderWay {
    const WORDS: usize = size_of::<spdk_in_flight>() / 8;
    const REQUEST: usize = std::mem::offset_of!(spdk_in_flight, request) / 8;

    /// `slots` and `overflow` are the maps of these names.
    pub(crate) fn new(slots: &MapHandle, overflow: MapHandle) -> std::io::Result<UnderWay> {
        if slots.value_size() as usize != size_of::<spdk_in_flight>()
            || overflow.value_size() as usize != size_of::<spdk_in_flight>()
        {
            return Err(std::io::Error::from(std::io::ErrorKind::InvalidInput));
        }
        Ok(UnderWay { slots: Shared::new(slots)?, overflow })
    }

    /// Shows every command that is under way; those for which `is_over` says so are taken out.
    pub(crate) fn sweep(&self, mut is_over: impl FnMut(&spdk_in_flight) -> bool) {
        for slot in self.slots.words().chunks_exact(Self::WORDS) {
            let Some(owner) = slot.get(Self::REQUEST) else { continue };
            let request = owner.load(Ordering::Acquire);
            if request == 0 {
                continue;
            }
            // SAFETY: a slot has the structure's size and alignment, and every bit pattern is a value; a program
            // may write to it meanwhile, which makes the copy a mixture of two moments, as the caller knows.
            let value = unsafe { std::ptr::read_volatile(slot.as_ptr().cast::<spdk_in_flight>()) };
            if is_over(&value) {
                // Not if it is another's by now.
                let _ = owner.compare_exchange(request, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        for key in self.overflow.keys() {
            let Ok(Some(bytes)) = self.overflow.lookup(&key, MapFlags::ANY) else { continue };
            if bytes.len() < size_of::<spdk_in_flight>() {
                continue;
            }
            // SAFETY: the length was checked, every bit pattern is a value, and the read needs no alignment.
            let value = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<spdk_in_flight>()) };
            if is_over(&value) {
                // What is gone already need not be taken away.
                let _ = self.overflow.delete(&key);
            }
        }
    }
}
