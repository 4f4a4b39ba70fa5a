//! The bdev layer and its two back ends: memory, and null, which keeps nothing. The storage delay
//! is taken here, between `bdev_io_submit` and `spdk_bdev_io_complete`, on a timer.

use std::ffi::{CString, c_int, c_void};
use std::sync::RwLock;
use std::sync::atomic::Ordering;

use super::nvmf;
use super::reactor::now_ns;
use super::types::{
    spdk_bdev, spdk_bdev_desc, spdk_bdev_io, spdk_bdev_io_block_params, spdk_bdev_io_type, spdk_io_channel,
    spdk_nvmf_request,
};
use super::{DELAYS, Status, faults};

/// Memory is allocated in pieces of this size, when first written.
const PIECE: usize = 256 * 1024;

impl spdk_bdev {
    /// A bdev of `blockcnt` blocks; with `memory` it keeps what is written.
    pub(crate) fn create(name: CString, blockcnt: u64, blocklen: u32, memory: bool) -> *mut Self {
        let bytes = blockcnt * u64::from(blocklen);
        let pieces = if memory { bytes.div_ceil(PIECE as u64) as usize } else { 0 };
        let mut store = Vec::with_capacity(pieces);
        store.resize_with(pieces, || RwLock::new(None));
        Box::into_raw(Box::new(Self::with(name.into_raw(), blockcnt, blocklen, store)))
    }

    fn each_piece(offset: u64, len: usize, mut f: impl FnMut(usize, usize, std::ops::Range<usize>)) {
        let mut done = 0;
        while done < len {
            let at = offset as usize + done;
            let inside = at % PIECE;
            let n = (PIECE - inside).min(len - done);
            f(at / PIECE, inside, done..done + n);
            done += n;
        }
    }

    fn read(&self, offset: u64, dst: &mut [u8]) {
        Self::each_piece(offset, dst.len(), |piece, inside, range| {
            let dst = &mut dst[range];
            let guard = self.store[piece].read().unwrap_or_else(|e| e.into_inner());
            match guard.as_ref() {
                Some(bytes) => dst.copy_from_slice(&bytes[inside..inside + dst.len()]),
                None => dst.fill(0),
            }
        });
    }

    fn write(&self, offset: u64, src: &[u8]) {
        Self::each_piece(offset, src.len(), |piece, inside, range| {
            let src = &src[range];
            let mut guard = self.store[piece].write().unwrap_or_else(|e| e.into_inner());
            let bytes = guard.get_or_insert_with(|| vec![0; PIECE].into_boxed_slice());
            bytes[inside..inside + src.len()].copy_from_slice(src);
        });
    }

    fn zero(&self, offset: u64, len: usize) {
        Self::each_piece(offset, len, |piece, inside, range| {
            let mut guard = self.store[piece].write().unwrap_or_else(|e| e.into_inner());
            if range.len() == PIECE {
                *guard = None;
            } else if let Some(bytes) = guard.as_mut() {
                bytes[inside..inside + range.len()].fill(0);
            }
        });
    }

    fn equals(&self, offset: u64, other: &[u8]) -> bool {
        let mut equal = true;
        Self::each_piece(offset, other.len(), |piece, inside, range| {
            let other = &other[range];
            let guard = self.store[piece].read().unwrap_or_else(|e| e.into_inner());
            equal &= match guard.as_ref() {
                Some(bytes) => bytes[inside..inside + other.len()] == *other,
                None => other.iter().all(|b| *b == 0),
            };
        });
        equal
    }

    /// Whether the blocks lie on the device.
    pub(crate) fn holds(&self, offset_blocks: u64, num_blocks: u64) -> bool {
        offset_blocks.checked_add(num_blocks).is_some_and(|end| end <= self.blockcnt)
    }
}

/// Takes a bdev I/O for `req` and submits it.
///
/// # Safety
/// `desc`, `ch` and `req` are live, `req` has a controller.
unsafe fn submit(
    kind: spdk_bdev_io_type,
    desc: *mut spdk_bdev_desc,
    ch: *mut spdk_io_channel,
    req: *mut spdk_nvmf_request,
    offset_blocks: u64,
    num_blocks: u64,
) {
    // SAFETY: by contract; the bdev I/O is exclusively ours until it is submitted.
    unsafe {
        let reactor = &*(*ch).reactor;
        let reused = reactor.free_bdev_ios.borrow_mut().pop();
        let io = reused.unwrap_or_else(|| Box::into_raw(Box::new(spdk_bdev_io::empty())));
        (*io).bdev = (*desc).bdev;
        (*io).r#type = kind;
        (*io).u.bdev = spdk_bdev_io_block_params {
            num_blocks,
            iovs: (&raw mut (*req).iov).cast(),
            iovcnt: i32::from((*req).iovcnt),
            offset_blocks,
        };
        (*io).internal.ch = ch;
        (*io).internal.caller_ctx = req.cast();
        (*io).internal.cb = Some(nvmf::nvmf_bdev_ctrlr_complete_cmd);
        (*io).internal.status = 0;
        (*io).internal.miscompare = false;
        (*io).internal.submit_tsc = crate::entry::tsc();
        bdev_io_submit(io);
    }
}

/// Enters the bdev layer with one I/O.
///
/// # Safety
/// `bdev_io` is complete and not in flight.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn bdev_io_submit(bdev_io: *mut spdk_bdev_io) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe { bdev_io_do_submit((*bdev_io).internal.ch, bdev_io) };
}

/// Hands one I/O to the back end.
///
/// # Safety
/// As for [`bdev_io_submit`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn bdev_io_do_submit(bdev_ch: *mut spdk_io_channel, bdev_io: *mut spdk_bdev_io) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        if (*(*bdev_io).bdev).store.is_empty() {
            bdev_null_submit_request(bdev_ch, bdev_io);
        } else {
            bdev_malloc_submit_request(bdev_ch, bdev_io);
        }
    }
}

/// The memory back end.
///
/// # Safety
/// As for [`bdev_io_submit`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn bdev_malloc_submit_request(
    ch: *mut spdk_io_channel,
    bdev_io: *mut spdk_bdev_io,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        execute(bdev_io);
        finish_later(ch, bdev_io);
    }
}

/// The null back end: reads give zeroes, and nothing else happens.
///
/// # Safety
/// As for [`bdev_io_submit`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn bdev_null_submit_request(
    ch: *mut spdk_io_channel,
    bdev_io: *mut spdk_bdev_io,
) {
    probe_entry!();
    // SAFETY: by contract; `u.bdev` is the member that `submit` wrote.
    unsafe {
        if (*bdev_io).r#type == spdk_bdev_io_type::SPDK_BDEV_IO_TYPE_READ {
            let iov = *(*bdev_io).u.bdev.iovs;
            std::slice::from_raw_parts_mut(iov.iov_base.cast::<u8>(), iov.iov_len).fill(0);
        }
        finish_later(ch, bdev_io);
    }
}

/// Does the I/O. The ranges have been checked.
///
/// # Safety
/// As for [`bdev_io_submit`].
unsafe fn execute(bdev_io: *mut spdk_bdev_io) {
    use spdk_bdev_io_type::*;
    // SAFETY: by contract; the request's buffer belongs to this I/O while it is in flight. `u.bdev`
    // is the member that `submit` wrote.
    unsafe {
        let bdev = &*(*bdev_io).bdev;
        let params = (*bdev_io).u.bdev;
        let blocklen = u64::from(bdev.blocklen);
        let offset = params.offset_blocks * blocklen;
        let len = (params.num_blocks * blocklen) as usize;
        let buffer = || {
            let iov = *params.iovs;
            std::slice::from_raw_parts_mut(iov.iov_base.cast::<u8>(), len.min(iov.iov_len))
        };
        match (*bdev_io).r#type {
            SPDK_BDEV_IO_TYPE_READ => bdev.read(offset, buffer()),
            SPDK_BDEV_IO_TYPE_WRITE => bdev.write(offset, buffer()),
            SPDK_BDEV_IO_TYPE_COMPARE => {
                (*bdev_io).internal.miscompare = !bdev.equals(offset, buffer());
            }
            SPDK_BDEV_IO_TYPE_WRITE_ZEROES => bdev.zero(offset, len),
            SPDK_BDEV_IO_TYPE_UNMAP => {
                for range in unmap_ranges(buffer()) {
                    if bdev.holds(range.0, range.1) {
                        bdev.zero(range.0 * blocklen, (range.1 * blocklen) as usize);
                    }
                }
            }
            SPDK_BDEV_IO_TYPE_FLUSH => {}
        }
    }
}

/// The (first block, number of blocks) pairs of a dataset management command's payload.
pub(crate) fn unmap_ranges(payload: &[u8]) -> impl Iterator<Item = (u64, u64)> + '_ {
    payload.chunks_exact(16).map(|range| {
        let word = |at: usize| u32::from_le_bytes([range[at], range[at + 1], range[at + 2], range[at + 3]]);
        (u64::from(word(8)) | (u64::from(word(12)) << 32), u64::from(word(4)))
    })
}

/// Arranges the completion: in the reactor's next turn, or when the storage delay ends.
///
/// # Safety
/// As for [`bdev_io_submit`].
unsafe fn finish_later(ch: *mut spdk_io_channel, bdev_io: *mut spdk_bdev_io) {
    // SAFETY: a channel's reactor outlives its commands.
    let reactor = unsafe { &*(*ch).reactor };
    match (DELAYS.storage.load(Ordering::Relaxed), reactor.shared.config.drive) {
        (0, None) => reactor.queue_finished(bdev_io),
        (delay, drive) => reactor.complete_at(faults::done_at(drive, now_ns(), delay), bdev_io),
    }
}

/// The back end is done with an I/O; `status` is 1 for success, negative for an error.
///
/// # Safety
/// `bdev_io` is in flight.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn spdk_bdev_io_complete(bdev_io: *mut spdk_bdev_io, status: c_int) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        (*bdev_io).internal.status = if (*bdev_io).internal.miscompare { -3 } else { status as i8 };
        bdev_io_complete(bdev_io);
    }
}

/// Calls back whoever submitted the I/O.
///
/// # Safety
/// As for [`spdk_bdev_io_complete`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn bdev_io_complete(ctx: *mut spdk_bdev_io) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let internal = &raw mut (*ctx).internal;
        let success = (*internal).status == 1;
        let caller: *mut c_void = (*internal).caller_ctx;
        if let Some(cb) = (*internal).cb {
            cb(ctx, success, caller);
        }
    }
}

/// Gives a bdev I/O back.
///
/// # Safety
/// `bdev_io` is not in flight any more and not used again by the caller.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn spdk_bdev_free_io(bdev_io: *mut spdk_bdev_io) {
    probe_entry!();
    // SAFETY: by contract; the reactor outlives its I/Os.
    unsafe {
        let reactor = &*(*(*bdev_io).internal.ch).reactor;
        (*bdev_io).internal.caller_ctx = std::ptr::null_mut();
        reactor.free_bdev_ios.borrow_mut().push(bdev_io);
    }
}

/// What `nvmf_bdev_ctrlr_*_cmd` say: done already (with this status), or the bdev layer has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) enum ExecStatus {
    /// The completion entry is filled in.
    Complete,
    /// `spdk_nvmf_request_complete` will be called.
    Asynchronous,
}

macro_rules! block_command {
    ($(#[$doc:meta])* $name:ident, $kind:ident, $needs_buffer:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The four are live, the request has a controller and is executing.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) unsafe extern "C" fn $name(
            bdev: *mut spdk_bdev,
            desc: *mut spdk_bdev_desc,
            ch: *mut spdk_io_channel,
            req: *mut spdk_nvmf_request,
        ) -> ExecStatus {
            probe_entry!();
            // SAFETY: by contract.
            unsafe {
                let cmd = (*(*req).cmd).nvme_cmd();
                let (slba, blocks) = (cmd.slba(), u64::from(cmd.nlb()));
                if !(*bdev).holds(slba, blocks) {
                    nvmf::set_status(req, Status::LBA_OUT_OF_RANGE);
                    return ExecStatus::Complete;
                }
                if $needs_buffer && blocks * u64::from((*bdev).blocklen) > u64::from((*req).length) {
                    nvmf::set_status(req, Status::SGL_LENGTH_INVALID);
                    return ExecStatus::Complete;
                }
                submit(spdk_bdev_io_type::$kind, desc, ch, req, slba, blocks);
                ExecStatus::Asynchronous
            }
        }
    };
}

block_command!(
    /// Read.
    nvmf_bdev_ctrlr_read_cmd, SPDK_BDEV_IO_TYPE_READ, true);
block_command!(
    /// Write.
    nvmf_bdev_ctrlr_write_cmd, SPDK_BDEV_IO_TYPE_WRITE, true);
block_command!(
    /// Compare.
    nvmf_bdev_ctrlr_compare_cmd, SPDK_BDEV_IO_TYPE_COMPARE, true);
block_command!(
    /// Write Zeroes.
    nvmf_bdev_ctrlr_write_zeroes_cmd, SPDK_BDEV_IO_TYPE_WRITE_ZEROES, false);

/// Flush.
///
/// # Safety
/// As for the block commands.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_bdev_ctrlr_flush_cmd(
    bdev: *mut spdk_bdev,
    desc: *mut spdk_bdev_desc,
    ch: *mut spdk_io_channel,
    req: *mut spdk_nvmf_request,
) -> ExecStatus {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let all = (*bdev).blockcnt;
        submit(spdk_bdev_io_type::SPDK_BDEV_IO_TYPE_FLUSH, desc, ch, req, 0, all);
    }
    ExecStatus::Asynchronous
}

/// Dataset Management: deallocates, and takes the other attributes as the hints that they are.
///
/// # Safety
/// As for the block commands.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_bdev_ctrlr_dsm_cmd(
    bdev: *mut spdk_bdev,
    desc: *mut spdk_bdev_desc,
    ch: *mut spdk_io_channel,
    req: *mut spdk_nvmf_request,
) -> ExecStatus {
    const ATTRIBUTE_DEALLOCATE: u32 = 1 << 2;
    probe_entry!();
    // SAFETY: by contract; a command with data has its buffer in `iov`.
    unsafe {
        let cmd = (*(*req).cmd).nvme_cmd();
        let ranges = (cmd.cdw10 & 0xff) + 1;
        if ranges * 16 > (*req).length {
            nvmf::set_status(req, Status::SGL_LENGTH_INVALID);
            return ExecStatus::Complete;
        }
        if cmd.cdw11 & ATTRIBUTE_DEALLOCATE == 0 {
            nvmf::set_status(req, Status::SUCCESS);
            return ExecStatus::Complete;
        }
        let iov = (*req).iov[0];
        let payload = std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), iov.iov_len);
        let used = &payload[..(ranges as usize * 16).min(payload.len())];
        if unmap_ranges(used).any(|(first, count)| !(*bdev).holds(first, count)) {
            nvmf::set_status(req, Status::LBA_OUT_OF_RANGE);
            return ExecStatus::Complete;
        }
        // The I/O works on the ranges' bytes, however many blocks they name.
        (*req).iov[0].iov_len = used.len();
        submit(spdk_bdev_io_type::SPDK_BDEV_IO_TYPE_UNMAP, desc, ch, req, 0, (*bdev).blockcnt);
    }
    ExecStatus::Asynchronous
}
