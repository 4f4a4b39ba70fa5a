//! A connection's socket: PDUs are queued on it and leave with one `sendmsg` of the next flush,
//! received bytes come through a buffer so that one system call may bring in many PDUs. Target and
//! initiator share it. It knows nothing of what the bytes mean.
//!
//! The types bear the names that a probe reads a connection's file descriptor through, in a layout
//! of their own: the socket that the queue pairs point to is `base`, and `fd` stands before it.

#![allow(non_camel_case_types, reason = "the names are what debug information is searched for")]
#![allow(dead_code, reason = "each side uses a part")]

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem::offset_of;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, IntoRawFd};

/// Called when the whole PDU has been accepted by the kernel (`err` is 0) or never will be.
pub(crate) type xfer_complete_cb = unsafe extern "C" fn(cb_arg: *mut c_void, err: c_int);

/// One queued PDU: its header, its data, and whom to tell.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct spdk_sock_request {
    pub(crate) offset: usize,
    pub(crate) hdr: *const u8,
    pub(crate) hdr_len: usize,
    pub(crate) data: *const u8,
    pub(crate) data_len: usize,
    pub(crate) cb_arg: *mut c_void,
    pub(crate) cb_fn: xfer_complete_cb,
}

/// The part of a socket that does not depend on its kind.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct spdk_sock {
    standin_pad0: [u32; 3],
    /// Entries of the next `sendmsg`.
    pub(crate) queued_iovcnt: c_int,
    pub(crate) queued_reqs: VecDeque<spdk_sock_request>,
    pub(crate) cb_arg: *mut c_void,
    /// The last flush could not hand over everything: the socket's buffer is full.
    pub(crate) write_blocked: bool,
    /// The peer is gone or the socket failed.
    pub(crate) broken: bool,
}

/// A TCP socket.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct spdk_posix_sock {
    standin_pad0: u64,
    pub(crate) placement_id: c_int,
    pub(crate) fd: c_int,
    pub(crate) recv_buf_sz: c_int,
    standin_pad1: [u16; 5],
    pub(crate) base: spdk_sock,
    pub(crate) recv_pipe: RecvBuffer,
}

/// Bytes received and not parsed yet.
#[derive(Debug)]
pub(crate) struct RecvBuffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// What a read brought.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing for now.
    Nothing,
    /// The peer closed its end, or the socket failed.
    Closed,
}

/// The most entries that one `sendmsg` takes.
const IOV_BATCH: usize = 64;

/// From this size on, payload bypasses the buffer when the buffer is empty.
const DIRECT_READ: usize = 1024;

/// Sets the size of both socket buffers; the kernel doubles it for its own needs.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn limit_buffers(stream: &TcpStream, bytes: u32) -> io::Result<()> {
    use nix::sys::socket::{setsockopt, sockopt};
    let bytes = bytes as usize;
    setsockopt(stream, sockopt::SndBuf, &bytes)?;
    setsockopt(stream, sockopt::RcvBuf, &bytes)?;
    Ok(())
}

/// Sends at most so many bytes a second, as over a slower link: what is more waits in the socket, in order.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn pace(stream: &TcpStream, bytes_a_second: u32) -> io::Result<()> {
    let size = size_of_val(&bytes_a_second) as libc::socklen_t;
    // SAFETY: the value is there for as long as the call, with its size; the descriptor is the stream's.
    let refused = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const bytes_a_second).cast(),
            size,
        )
    };
    if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes over a connected stream. The result is owned by the caller until [`sock_close`].
///
/// # Errors
/// The stream cannot be made non-blocking.
pub(crate) fn sock_from_stream(stream: TcpStream, recv_buf: usize) -> io::Result<*mut spdk_sock> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let sock = Box::new(spdk_posix_sock {
        standin_pad0: 0,
        placement_id: -1,
        fd: stream.as_raw_fd(),
        recv_buf_sz: recv_buf as c_int,
        standin_pad1: [0; 5],
        base: spdk_sock {
            standin_pad0: [0; 3],
            queued_iovcnt: 0,
            queued_reqs: VecDeque::new(),
            cb_arg: std::ptr::null_mut(),
            write_blocked: false,
            broken: false,
        },
        recv_pipe: RecvBuffer { bytes: vec![0; recv_buf].into_boxed_slice(), start: 0, end: 0 },
    });
    // From here on the descriptor is closed by `sock_close`.
    let _ = stream.into_raw_fd();
    let sock = Box::into_raw(sock);
    // SAFETY: `sock` was just allocated; only the address of a field is taken.
    Ok(unsafe { &raw mut (*sock).base })
}

/// The TCP socket around a `base`.
pub(crate) fn posix_sock(sock: *mut spdk_sock) -> *mut spdk_posix_sock {
    sock.wrapping_byte_sub(offset_of!(spdk_posix_sock, base)).cast()
}

/// Closes the descriptor and frees the socket; what is queued is dropped without a callback.
///
/// # Safety
/// `sock` comes from [`sock_from_stream`] and is not used again.
pub(crate) unsafe fn sock_close(sock: *mut spdk_sock) {
    // SAFETY: by contract, `sock` is the `base` of a boxed socket that nobody uses any more.
    let owned = unsafe { Box::from_raw(posix_sock(sock)) };
    // SAFETY: the descriptor is owned by this socket.
    unsafe { libc::close(owned.fd) };
}

/// Queues one PDU. The memory behind `hdr` and `data` stays valid until the callback.
///
/// # Safety
/// `sock` is a live socket, the two memory ranges are readable until `cb_fn` is called or the
/// socket is closed.
pub(crate) unsafe fn sock_queue(sock: *mut spdk_sock, req: spdk_sock_request) {
    // SAFETY: by contract.
    unsafe {
        (*sock).queued_iovcnt += 1 + c_int::from(req.data_len > 0);
        (*sock).queued_reqs.push_back(req);
    }
}

/// Hands what is queued on the connection to the kernel: one `sendmsg` of at most 64 entries.
/// Calls back for every PDU that was accepted whole. Returns the number of bytes accepted, or
/// -1 when the socket failed.
///
/// # Safety
/// `sock` is a live socket; the callbacks may queue more on it but not close it.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn _sock_flush(sock: *mut spdk_sock) -> c_int {
    probe_entry!();
    let mut iovs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; IOV_BATCH];
    let mut count = 0;
    // SAFETY: `sock` is live by contract, and so is the memory that its queue points to.
    unsafe {
        for req in &(*sock).queued_reqs {
            let mut skip = req.offset;
            for (base, len) in [(req.hdr, req.hdr_len), (req.data, req.data_len)] {
                if skip >= len {
                    skip -= len;
                    continue;
                }
                if count == IOV_BATCH {
                    break;
                }
                iovs[count] = libc::iovec { iov_base: base.add(skip).cast_mut().cast(), iov_len: len - skip };
                skip = 0;
                count += 1;
            }
            if count == IOV_BATCH {
                break;
            }
        }
        if count == 0 {
            return 0;
        }
        let sent = posix_writev(posix_sock(sock), iovs.as_mut_ptr(), count as c_int, 0);
        if sent < 0 {
            if sent == -libc::EAGAIN {
                (*sock).write_blocked = true;
            } else if sent != -libc::EINTR {
                (*sock).broken = true;
                return -1;
            }
            return 0;
        }
        (*sock).write_blocked = false;
        let mut left = sent as usize;
        while let Some(first) = (*sock).queued_reqs.front_mut() {
            let whole = first.hdr_len + first.data_len - first.offset;
            if left < whole {
                first.offset += left;
                break;
            }
            left -= whole;
            let Some(done) = (*sock).queued_reqs.pop_front() else {
                break;
            };
            (*sock).queued_iovcnt -= 1 + c_int::from(done.data_len > 0);
            (done.cb_fn)(done.cb_arg, 0);
            if left == 0 {
                break;
            }
        }
        sent
    }
}

/// Hands the entries to the kernel. Returns the number of bytes accepted, or the negative error.
///
/// # Safety
/// `sock` is live; `iov` has `iovcnt` entries whose memory is readable.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn posix_writev(
    sock: *mut spdk_posix_sock,
    iov: *mut libc::iovec,
    iovcnt: c_int,
    flags: c_int,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract; an all-zero message header is a valid one.
    unsafe {
        let mut msg: libc::msghdr = std::mem::zeroed();
        msg.msg_iov = iov;
        msg.msg_iovlen = iovcnt as _;
        let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let sent = libc::sendmsg((*sock).fd, &raw const msg, flags);
        if sent < 0 {
            return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        }
        c_int::try_from(sent).unwrap_or(c_int::MAX)
    }
}

impl spdk_posix_sock {
    /// Reads up to `dst.len()` bytes: from the buffer, else straight from the socket when much is
    /// wanted, else through the buffer.
    pub(crate) fn read(&mut self, dst: &mut [u8]) -> Received {
        if dst.is_empty() {
            return Received::Nothing;
        }
        let pipe = &mut self.recv_pipe;
        if pipe.start == pipe.end {
            if dst.len() >= DIRECT_READ {
                return recv(self.fd, dst);
            }
            pipe.start = 0;
            pipe.end = 0;
            match recv(self.fd, &mut pipe.bytes) {
                Received::Bytes(n) => pipe.end = n,
                other => return other,
            }
        }
        let n = dst.len().min(pipe.end - pipe.start);
        dst[..n].copy_from_slice(&pipe.bytes[pipe.start..pipe.start + n]);
        pipe.start += n;
        Received::Bytes(n)
    }

    /// Throws away what has arrived; used while a terminated connection waits for its peer.
    pub(crate) fn discard(&mut self) -> Received {
        self.recv_pipe.start = 0;
        self.recv_pipe.end = 0;
        recv(self.fd, &mut self.recv_pipe.bytes)
    }
}

fn recv(fd: c_int, dst: &mut [u8]) -> Received {
    loop {
        // SAFETY: `dst` is writable for its length.
        let n = unsafe { libc::recv(fd, dst.as_mut_ptr().cast(), dst.len(), libc::MSG_DONTWAIT) };
        if n > 0 {
            return Received::Bytes(n as usize);
        }
        if n == 0 {
            return Received::Closed;
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN) => return Received::Nothing,
            Some(libc::EINTR) => {}
            _ => return Received::Closed,
        }
    }
}
