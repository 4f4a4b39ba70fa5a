//! Reads a BPF ring buffer in place: every message is handed over as it lies in the shared memory, with no
//! copy and no allocation. It knows nothing of what the messages mean.
//!
//! libbpf's own reader calls a closure that must outlive it; the recorder hands its sink in with each poll,
//! so the ring is read here. The protocol is the kernel's (kernel/bpf/ringbuf.c): the consumer's position on
//! the first page, the producer's on the second, then the data, mapped twice in a row so that a message never
//! breaks; each message is led by its length, with a bit for "not finished" and one for "discarded".

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use libbpf_rs::{MapCore, MapHandle};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

const BUSY: u32 = 1 << 31;
const DISCARDED: u32 = 1 << 30;
const HEADER: usize = 8;

/// The reading end of a ring buffer. There is only one.
#[derive(Debug)]
pub(crate) struct Ring {
    map: MapHandle,
    consumer: NonNull<AtomicUsize>,
    producer: NonNull<AtomicUsize>,
    data: NonNull<u8>,
    size: usize,
    page: usize,
}

// SAFETY: the mappings belong to this value alone and are not tied to a thread; positions are atomics, and
// reading takes `&mut self`.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the ring.
    pub(crate) fn new(map: MapHandle) -> std::io::Result<Ring> {
        let size = map.max_entries() as usize;
        // SAFETY: sysconf reads a constant.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
        let length = |bytes: usize| {
            NonZeroUsize::new(bytes).ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput))
        };
        // SAFETY: a new mapping of the map's first page, which the kernel lets be written; nothing else in
        // this process refers to it.
        let consumer = unsafe {
            mmap(
                None,
                length(page)?,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                map.as_fd(),
                0,
            )
        }?;
        // SAFETY: as above, read only: the producer's page and twice the data.
        let producer = unsafe {
            mmap(
                None,
                length(page + 2 * size)?,
                ProtFlags::PROT_READ,
                MapFlags::MAP_SHARED,
                map.as_fd(),
                page as libc::off_t,
            )
        };
        let producer = match producer {
            Ok(producer) => producer,
            Err(error) => {
                // SAFETY: mapped above with this length, and not used any more.
                let _ = unsafe { munmap(consumer, page) };
                return Err(error.into());
            }
        };
        // SAFETY: one page into a mapping of more than one page.
        let data = unsafe { producer.byte_add(page) };
        Ok(Ring { map, consumer: consumer.cast(), producer: producer.cast(), data: data.cast(), size, page })
    }

    /// Hands over every message that is there, and returns how many.
    pub(crate) fn drain(&mut self, mut take: impl FnMut(&[u8])) -> usize {
        // SAFETY: both pages stay mapped as long as `self`; the kernel writes the producer's position with
        // release, aligned, so it is an atomic.
        let (consumer, producer) = unsafe { (self.consumer.as_ref(), self.producer.as_ref()) };
        let mut position = consumer.load(Ordering::Relaxed);
        let mut messages = 0;
        loop {
            let end = producer.load(Ordering::Acquire);
            if position >= end {
                return messages;
            }
            while position < end {
                let at = position & (self.size - 1);
                // SAFETY: `at` is inside the data and a multiple of 8, so the header lies inside; the kernel
                // writes it atomically.
                let header = unsafe { self.data.byte_add(at).cast::<AtomicU32>().as_ref() };
                let header = header.load(Ordering::Acquire);
                if header & BUSY != 0 {
                    return messages;
                }
                let length = (header & !(BUSY | DISCARDED)) as usize;
                if header & DISCARDED == 0 {
                    // SAFETY: the kernel never lets a message be longer than the ring, and the data is
                    // mapped twice in a row, so the message lies inside; it is not written again before the
                    // consumer's position has passed it, which is below.
                    let message = unsafe {
                        std::slice::from_raw_parts(self.data.byte_add(at + HEADER).as_ptr(), length)
                    };
                    take(message);
                    messages += 1;
                }
                position += (length + HEADER).next_multiple_of(8);
                consumer.store(position, Ordering::Release);
            }
        }
    }

    /// Waits until the producer asks to be read, which it does when the ring fills up, or something is in
    /// the ring already.
    pub(crate) fn wait(&self, most: Duration) {
        let mut fds = [PollFd::new(self.map.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(most).unwrap_or(PollTimeout::ZERO);
        // A signal ends the wait early; the caller looks at the ring anyway.
        let _ = poll(&mut fds, timeout);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: both were mapped in `new` with these lengths, and nothing refers to them any more.
        unsafe {
            let _ = munmap(self.consumer.cast(), self.page);
            let _ = munmap(self.producer.cast(), self.page + 2 * self.size);
        }
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

/// Whether a process has ended, by its pidfd.
pub(crate) fn has_ended(pidfd: &impl AsRawFd) -> bool {
    ends_within(pidfd, Duration::ZERO)
}

/// Whether the process of a pidfd has ended by then.
pub(crate) fn ends_within(pidfd: &impl AsRawFd, time: Duration) -> bool {
    // SAFETY: the descriptor stays open as long as the borrow.
    let fd = unsafe { BorrowedFd::borrow_raw(pidfd.as_raw_fd()) };
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    let time = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
    matches!(poll(&mut fds, time), Ok(1))
}
