//! The host side of NVMe/TCP: queue pairs, sending commands and data, receiving data and
//! completions. PDUs are queued on the socket and leave with the next poll's flush.

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::types::{
    nvme_qpair_state, nvme_request, nvme_tcp_qpair, nvme_tcp_req, nvme_tcp_req_state as ReqState,
    spdk_nvme_cmd_cb, spdk_nvme_ctrlr, spdk_nvme_qpair,
};
use crate::pdu::{nvme_tcp_pdu, nvme_tcp_pdu_recv_state as Recv};
use crate::sock::{
    _sock_flush, Received, limit_buffers, posix_sock, sock_close, sock_from_stream, sock_queue,
    spdk_sock_request, xfer_complete_cb,
};
use crate::wire::{
    Receiver, SGL_IN_CAPSULE, SGL_TRANSPORT, check_common, nvme_tcp_pdu_hdr, opc, pdu_flag, pdu_type,
    spdk_nvme_cmd, spdk_nvme_cpl, spdk_nvme_data_transfer as Transfer, spdk_nvme_sgl_descriptor,
};

/// Data that fabrics and admin commands may carry in their capsule, as the specification fixes it.
const ADMIN_IN_CAPSULE: u32 = 8192;

/// The most data that a target may put into one C2HData.
const MAX_C2H_DATA: u32 = 8 << 20;

const RECV_BUFFER: usize = 64 * 1024;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// PDUs of a queue that belong to no command.
const EXTRA_PDUS: usize = 2;

/// Connects a socket for queue `id` with `entries` slots and sends the ICReq.
///
/// # Errors
/// Nobody listens there.
///
/// # Safety
/// `ctrlr` outlives the queue pair, which the caller frees with [`free_qpair`].
pub(crate) unsafe fn new_qpair(
    ctrlr: *mut spdk_nvme_ctrlr,
    id: u16,
    entries: u16,
    address: SocketAddr,
    socket_buffer: Option<u32>,
) -> io::Result<*mut nvme_tcp_qpair> {
    let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
    if let Some(bytes) = socket_buffer {
        limit_buffers(&stream, bytes)?;
    }
    let sock = sock_from_stream(stream, RECV_BUFFER)?;
    let tqpair = Box::into_raw(Box::new(nvme_tcp_qpair::new(id, ctrlr, sock)));
    let n = usize::from(entries);
    let mut pdus = Vec::with_capacity(n + EXTRA_PDUS);
    pdus.resize_with(n + EXTRA_PDUS, nvme_tcp_pdu::default);
    let pdus = Box::leak(pdus.into_boxed_slice()).as_mut_ptr();
    // SAFETY: freshly allocated; the indices are inside the arrays.
    unsafe {
        let reqs: Vec<_> =
            (0..entries).map(|cid| nvme_tcp_req::new(cid, tqpair, pdus.add(usize::from(cid)))).collect();
        let reqs = Box::leak(reqs.into_boxed_slice()).as_mut_ptr();
        for i in (0..n).rev() {
            (*tqpair).free_reqs.push(reqs.add(i));
            (*pdus.add(i)).req = reqs.add(i).cast();
            let request = Box::new(nvme_request::new(&raw mut (*tqpair).qpair));
            (*tqpair).qpair.free_req.push(Box::into_raw(request));
        }
        (*tqpair).num_entries = entries;
        (*tqpair).tcp_reqs = reqs;
        (*tqpair).send_pdus = pdus;
        (*tqpair).send_pdu = pdus.add(n);
        (*tqpair).recv_pdu = pdus.add(n + 1);
        let pdu = (*tqpair).send_pdu;
        (*pdu).hdr = nvme_tcp_pdu_hdr::for_ic_req((*tqpair).maxr2t);
        nvme_tcp_qpair_write_pdu(tqpair, pdu, ic_req_sent, tqpair.cast());
    }
    Ok(tqpair)
}

unsafe extern "C" fn ic_req_sent(_cb_arg: *mut c_void, _err: c_int) {}

/// Closes the connection and frees the queue pair. Commands that are still out are forgotten.
///
/// # Safety
/// `tqpair` comes from [`new_qpair`] and is not used again.
pub(crate) unsafe fn free_qpair(tqpair: *mut nvme_tcp_qpair) {
    // SAFETY: by contract; the arrays were leaked with just these lengths, and every request is
    // either on the free list or with a slot.
    unsafe {
        sock_close((*tqpair).sock);
        let n = usize::from((*tqpair).num_entries);
        for i in 0..n {
            let req = (*(*tqpair).tcp_reqs.add(i)).req;
            if !req.is_null() {
                drop(Box::from_raw(req));
            }
        }
        for req in (*tqpair).qpair.free_req.drain(..) {
            drop(Box::from_raw(req));
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut((*tqpair).tcp_reqs, n)));
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut((*tqpair).send_pdus, n + EXTRA_PDUS)));
        drop(Box::from_raw(tqpair));
    }
}

/// The descriptor to wait on.
///
/// # Safety
/// `tqpair` is live.
pub(crate) unsafe fn descriptor(tqpair: *mut nvme_tcp_qpair) -> c_int {
    // SAFETY: by contract.
    unsafe { (*posix_sock((*tqpair).sock)).fd }
}

/// Whether the queue has PDUs to send.
///
/// # Safety
/// `tqpair` is live.
pub(crate) unsafe fn has_queued(tqpair: *mut nvme_tcp_qpair) -> bool {
    // SAFETY: by contract.
    unsafe { !(*(*tqpair).sock).queued_reqs.is_empty() }
}

/// Whether the last flush found the socket full.
///
/// # Safety
/// `tqpair` is live.
pub(crate) unsafe fn write_blocked(tqpair: *mut nvme_tcp_qpair) -> bool {
    // SAFETY: by contract.
    unsafe { (*(*tqpair).sock).write_blocked }
}

// ---------------------------------------------------------------------------------------------
// Commands
// ---------------------------------------------------------------------------------------------

/// Submits a command. `payload` holds `payload_size` bytes, null with 0 where there is no data.
/// Returns 0, or -EAGAIN when the queue is full.
///
/// # Safety
/// `qpair` is live; `payload` stays valid, and untouched by others, until `cb_fn` is called.
pub(crate) unsafe fn submit(
    qpair: *mut spdk_nvme_qpair,
    cmd: spdk_nvme_cmd,
    payload: *mut u8,
    payload_size: u32,
    cb_fn: spdk_nvme_cmd_cb,
    cb_arg: *mut c_void,
) -> c_int {
    // SAFETY: by contract.
    unsafe {
        let Some(req) = (*qpair).free_req.pop() else {
            return -libc::EAGAIN;
        };
        (*req).cmd = cmd;
        (*req).payload = payload;
        (*req).payload_size = payload_size;
        (*req).cb_fn = Some(cb_fn);
        (*req).cb_arg = cb_arg;
        (*req).submit_tick = crate::entry::tsc();
        let rc = nvme_qpair_submit_request(qpair, req);
        if rc != 0 {
            (*qpair).free_req.push(req);
        }
        rc
    }
}

macro_rules! ns_command {
    ($(#[$doc:meta])* $name:ident, $opc:expr, $bytes_per_block:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As for [`submit`]; `ns` is live.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) unsafe extern "C" fn $name(
            ns: *mut spdk_nvme_ns,
            qpair: *mut spdk_nvme_qpair,
            payload: *mut u8,
            lba: u64,
            lba_count: u32,
            cb_fn: spdk_nvme_cmd_cb,
            cb_arg: *mut c_void,
        ) -> c_int {
            probe_entry!();
            // SAFETY: by contract.
            unsafe {
                let cmd = spdk_nvme_cmd {
                    opc: $opc,
                    nsid: (*ns).id,
                    cdw10: lba as u32,
                    cdw11: (lba >> 32) as u32,
                    cdw12: lba_count.wrapping_sub(1) & 0xffff,
                    ..Default::default()
                };
                let bytes = if $bytes_per_block { lba_count * (*ns).sector_size } else { 0 };
                submit(qpair, cmd, payload, bytes, cb_fn, cb_arg)
            }
        }
    };
}

/// A namespace, as the initiator knows it.
#[allow(non_camel_case_types, reason = "the name is what debug information is searched for")]
#[repr(C)]
#[derive(Debug)]
pub(crate) struct spdk_nvme_ns {
    pub(crate) blocks: u64,
    pub(crate) sector_size: u32,
    pub(crate) id: u32,
    /// What was deallocated reads as zeroes.
    pub(crate) deallocated_reads_zero: bool,
}

ns_command!(
    /// Reads.
    spdk_nvme_ns_cmd_read, opc::READ, true);
ns_command!(
    /// Writes.
    spdk_nvme_ns_cmd_write, opc::WRITE, true);
ns_command!(
    /// Compares.
    spdk_nvme_ns_cmd_compare, opc::COMPARE, true);
ns_command!(
    /// Writes zeroes; `payload` is not used.
    spdk_nvme_ns_cmd_write_zeroes, opc::WRITE_ZEROES, false);

/// Flushes.
///
/// # Safety
/// As for [`submit`]; `ns` is live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn spdk_nvme_ns_cmd_flush(
    ns: *mut spdk_nvme_ns,
    qpair: *mut spdk_nvme_qpair,
    cb_fn: spdk_nvme_cmd_cb,
    cb_arg: *mut c_void,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let cmd = spdk_nvme_cmd { opc: opc::FLUSH, nsid: (*ns).id, ..Default::default() };
        submit(qpair, cmd, std::ptr::null_mut(), 0, cb_fn, cb_arg)
    }
}

/// Deallocates the `num_ranges` ranges of 16 bytes at `ranges`.
///
/// # Safety
/// As for [`submit`]; `ns` is live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn spdk_nvme_ns_cmd_dataset_management(
    ns: *mut spdk_nvme_ns,
    qpair: *mut spdk_nvme_qpair,
    attributes: u32,
    ranges: *mut u8,
    num_ranges: u16,
    cb_fn: spdk_nvme_cmd_cb,
    cb_arg: *mut c_void,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let cmd = spdk_nvme_cmd {
            opc: opc::DATASET_MANAGEMENT,
            nsid: (*ns).id,
            cdw10: u32::from(num_ranges) - 1,
            cdw11: attributes,
            ..Default::default()
        };
        submit(qpair, cmd, ranges, u32::from(num_ranges) * 16, cb_fn, cb_arg)
    }
}

/// Submits a request to a queue pair.
///
/// # Safety
/// Both are live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_qpair_submit_request(
    qpair: *mut spdk_nvme_qpair,
    req: *mut nvme_request,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let usable = (*qpair).state == nvme_qpair_state::NVME_QPAIR_ENABLED
            || (*qpair).state == nvme_qpair_state::NVME_QPAIR_CONNECTED;
        if !usable {
            return -libc::ENXIO;
        }
        nvme_tcp_qpair_submit_request(qpair, req)
    }
}

/// Gives the request a slot, builds its capsule and queues it.
///
/// # Safety
/// Both are live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_qpair_submit_request(
    qpair: *mut spdk_nvme_qpair,
    req: *mut nvme_request,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract; the queue pair is the first member of its TCP queue pair.
    unsafe {
        let tqpair: *mut nvme_tcp_qpair = qpair.cast();
        let Some(tcp_req) = (*tqpair).free_reqs.pop() else {
            return -libc::EAGAIN;
        };
        (*tcp_req).req = req;
        (*tcp_req).state = ReqState::NVME_TCP_REQ_ACTIVE;
        (*tcp_req).datao = 0;
        (*tcp_req).expected_datao = 0;
        (*tcp_req).r2tl_remain = 0;
        (*tcp_req).active_r2ts = 0;
        (*tcp_req).ttag = 0;
        (*tcp_req).send_ack = false;
        (*tcp_req).data_recv = false;
        (*tcp_req).rsp = spdk_nvme_cpl::default();

        let size = (*req).payload_size;
        let limit = if (*qpair).id == 0 || (*req).cmd.opc == opc::FABRIC {
            ADMIN_IN_CAPSULE
        } else {
            (*(*qpair).ctrlr).ioccsz_bytes
        };
        let outbound = (*req).cmd.transfer() == Transfer::SPDK_NVME_DATA_HOST_TO_CONTROLLER && size > 0;
        (*tcp_req).in_capsule_data = outbound && size <= limit;
        (*req).cmd.cid = (*tcp_req).cid;
        // SGLs instead of PRPs.
        (*req).cmd.fuse_psdt = 1 << 6;
        (*req).cmd.dptr = spdk_nvme_sgl_descriptor {
            length: size,
            kind: if (*tcp_req).in_capsule_data { SGL_IN_CAPSULE } else { SGL_TRANSPORT },
            ..Default::default()
        };
        let in_capsule = if (*tcp_req).in_capsule_data { size } else { 0 };
        let pdu = (*tcp_req).pdu;
        (*pdu).hdr = nvme_tcp_pdu_hdr::for_command((*req).cmd, in_capsule);
        (*pdu).data_len = in_capsule;
        (*pdu).data_iov.iov_base = (*req).payload.cast();
        (*pdu).data_iov.iov_len = in_capsule as usize;
        (*qpair).num_outstanding_reqs += 1;
        (*qpair).queue_depth += 1;
        nvme_tcp_qpair_write_pdu(tqpair, pdu, nvme_tcp_qpair_cmd_send_complete, tcp_req.cast());
    }
    0
}

/// Queues a PDU on the queue pair's socket.
///
/// # Safety
/// `tqpair` is live; `pdu` and its data stay untouched until `cb_fn(cb_arg)`.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_qpair_write_pdu(
    tqpair: *mut nvme_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
    cb_fn: xfer_complete_cb,
    cb_arg: *mut c_void,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        (*pdu).cb_fn = Some(cb_fn);
        (*pdu).cb_arg = cb_arg;
        let common = (*pdu).hdr.common();
        sock_queue(
            (*tqpair).sock,
            spdk_sock_request {
                offset: 0,
                hdr: (*pdu).hdr.bytes().as_ptr(),
                hdr_len: usize::from(common.hlen),
                data: (*pdu).data_iov.iov_base.cast(),
                data_len: (*pdu).data_len as usize,
                cb_arg,
                cb_fn,
            },
        );
    }
    0
}

/// The capsule has left.
///
/// # Safety
/// `cb_arg` is the live command.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_qpair_cmd_send_complete(cb_arg: *mut c_void, _err: c_int) {
    probe_entry!();
    let tcp_req: *mut nvme_tcp_req = cb_arg.cast();
    // SAFETY: by contract.
    unsafe {
        (*tcp_req).send_ack = true;
        complete_when_done(tcp_req);
    }
}

/// Sends the next H2CData of the R2T that is being answered.
///
/// # Safety
/// `tcp_req` is live and has an open R2T.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_send_h2c_data(tcp_req: *mut nvme_tcp_req) {
    probe_entry!();
    // SAFETY: by contract; the range lies inside the payload, which `r2t` has checked.
    unsafe {
        let tqpair = (*tcp_req).tqpair;
        let len = (*tcp_req).r2tl_remain.min((*tqpair).maxh2cdata);
        let flags = if len == (*tcp_req).r2tl_remain { pdu_flag::DATA_LAST } else { 0 };
        let pdu = (*tcp_req).pdu;
        let at = (*tcp_req).datao;
        (*pdu).hdr = nvme_tcp_pdu_hdr::for_h2c_data((*tcp_req).cid, (*tcp_req).ttag, flags, at, len);
        (*pdu).data_len = len;
        (*pdu).data_iov.iov_base = (*(*tcp_req).req).payload.add(at as usize).cast();
        (*pdu).data_iov.iov_len = len as usize;
        (*tcp_req).datao += len;
        (*tcp_req).r2tl_remain -= len;
        (*tcp_req).send_ack = false;
        nvme_tcp_qpair_write_pdu(tqpair, pdu, nvme_tcp_qpair_h2c_data_send_complete, tcp_req.cast());
    }
}

/// One H2CData has left.
///
/// # Safety
/// `cb_arg` is the live command.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_qpair_h2c_data_send_complete(cb_arg: *mut c_void, _err: c_int) {
    probe_entry!();
    let tcp_req: *mut nvme_tcp_req = cb_arg.cast();
    // SAFETY: by contract.
    unsafe {
        (*tcp_req).send_ack = true;
        if (*tcp_req).r2tl_remain > 0 {
            nvme_tcp_send_h2c_data(tcp_req);
            return;
        }
        (*tcp_req).active_r2ts = 0;
        (*tcp_req).state = ReqState::NVME_TCP_REQ_ACTIVE;
        complete_when_done(tcp_req);
    }
}

/// Completes a command whose completion is here and whose last PDU has left.
///
/// # Safety
/// `tcp_req` is live.
unsafe fn complete_when_done(tcp_req: *mut nvme_tcp_req) {
    // SAFETY: by contract.
    unsafe {
        if (*tcp_req).send_ack && (*tcp_req).data_recv {
            let mut rsp = (*tcp_req).rsp;
            nvme_tcp_req_complete(tcp_req, (*tcp_req).tqpair, &raw mut rsp, true);
        }
    }
}

/// Completes a command towards whoever submitted it.
///
/// # Safety
/// All are live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_req_complete(
    tcp_req: *mut nvme_tcp_req,
    tqpair: *mut nvme_tcp_qpair,
    rsp: *mut spdk_nvme_cpl,
    print_on_error: bool,
) {
    probe_entry!();
    let _ = print_on_error;
    // SAFETY: by contract; the slot and the request are free before the callback, which may
    // submit the next command with them.
    unsafe {
        let req = (*tcp_req).req;
        let (cb_fn, cb_arg) = ((*req).cb_fn, (*req).cb_arg);
        (*tcp_req).req = std::ptr::null_mut();
        (*tcp_req).state = ReqState::NVME_TCP_REQ_FREE;
        (*tqpair).free_reqs.push(tcp_req);
        (*tqpair).qpair.free_req.push(req);
        (*tqpair).qpair.num_outstanding_reqs -= 1;
        (*tqpair).qpair.queue_depth -= 1;
        (*tqpair).completions += 1;
        if let Some(cb_fn) = cb_fn {
            cb_fn(cb_arg, rsp);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Receiving
// ---------------------------------------------------------------------------------------------

/// Flushes what is queued, then receives what has come. Returns the number of completions, or
/// -ENXIO when the connection is at its end (`failure` says why).
///
/// # Safety
/// `qpair` is live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn spdk_nvme_qpair_process_completions(
    qpair: *mut spdk_nvme_qpair,
    max_completions: u32,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract.
    unsafe { nvme_tcp_qpair_process_completions(qpair, max_completions) }
}

/// The TCP part of [`spdk_nvme_qpair_process_completions`].
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_qpair_process_completions(
    qpair: *mut spdk_nvme_qpair,
    max_completions: u32,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract; the queue pair is the first member of its TCP queue pair.
    unsafe {
        let tqpair: *mut nvme_tcp_qpair = qpair.cast();
        (*tqpair).completions = 0;
        let max = if max_completions == 0 { u32::from((*tqpair).num_entries) } else { max_completions };
        if has_queued(tqpair) {
            _sock_flush((*tqpair).sock);
            if (*(*tqpair).sock).broken {
                fail(tqpair, "the target closed the connection");
            }
        }
        while (*tqpair).failure.is_none() && (*tqpair).completions < max {
            if !receive(tqpair) {
                break;
            }
        }
        if (*tqpair).failure.is_some() {
            (*tqpair).qpair.state = nvme_qpair_state::NVME_QPAIR_DISCONNECTED;
            return -libc::ENXIO;
        }
        (*tqpair).completions as c_int
    }
}

/// # Safety
/// `tqpair` is live.
unsafe fn fail(tqpair: *mut nvme_tcp_qpair, why: &str) {
    // SAFETY: by contract.
    unsafe {
        if (*tqpair).failure.is_none() {
            (*tqpair).failure = Some(why.to_owned());
        }
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_ERROR;
    }
}

/// Receives one step further. False when nothing more is here.
///
/// # Safety
/// `tqpair` is live.
unsafe fn receive(tqpair: *mut nvme_tcp_qpair) -> bool {
    // SAFETY: by contract; payload goes to places that belong to commands that wait for it.
    unsafe {
        let pdu = (*tqpair).recv_pdu;
        let sock = posix_sock((*tqpair).sock);
        let got = match (*tqpair).recv_state {
            Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY => {
                (*pdu).reset();
                (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_CH;
                return true;
            }
            Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_CH => {
                let have = usize::from((*pdu).ch_valid_bytes);
                let got = (*sock).read(&mut (*pdu).hdr.bytes_mut()[have..8]);
                if let Received::Bytes(n) = got {
                    (*pdu).ch_valid_bytes += n as u8;
                    if (*pdu).ch_valid_bytes == 8 {
                        let receiver = Receiver::Host { max_c2h_data: MAX_C2H_DATA };
                        match check_common(&(*pdu).hdr.common(), receiver, (*tqpair).ic_done) {
                            Ok(hlen) => {
                                (*pdu).psh_len = hlen - 8;
                                (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PSH;
                            }
                            Err(e) => fail(tqpair, &format!("the target sent a bad PDU: {e:?}")),
                        }
                    }
                }
                got
            }
            Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PSH => {
                let have = 8 + usize::from((*pdu).psh_valid_bytes);
                let whole = 8 + usize::from((*pdu).psh_len);
                let got = (*sock).read(&mut (*pdu).hdr.bytes_mut()[have..whole]);
                if let Received::Bytes(n) = got {
                    (*pdu).psh_valid_bytes += n as u8;
                    if (*pdu).psh_valid_bytes == (*pdu).psh_len {
                        header_done(tqpair, pdu);
                    }
                }
                got
            }
            Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PAYLOAD => {
                let got;
                if (*pdu).padding_len > 0 {
                    let mut skipped = [0; 256];
                    let want = ((*pdu).padding_len as usize).min(skipped.len());
                    got = (*sock).read(&mut skipped[..want]);
                    if let Received::Bytes(n) = got {
                        (*pdu).padding_len -= n as u32;
                    }
                } else {
                    let at = (*pdu).rw_offset as usize;
                    let base = (*pdu).data_iov.iov_base.cast::<u8>().add(at);
                    let left = (*pdu).data_len as usize - at;
                    got = (*sock).read(std::slice::from_raw_parts_mut(base, left));
                    if let Received::Bytes(n) = got {
                        (*pdu).rw_offset += n as u32;
                    }
                }
                if (*pdu).rw_offset == (*pdu).data_len {
                    nvme_tcp_c2h_data_payload_handle(tqpair, pdu);
                }
                got
            }
            Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_REQ
            | Recv::NVME_TCP_PDU_RECV_STATE_QUIESCING
            | Recv::NVME_TCP_PDU_RECV_STATE_ERROR => return false,
        };
        match got {
            Received::Bytes(_) => true,
            Received::Nothing => false,
            Received::Closed => {
                fail(tqpair, "the target closed the connection");
                false
            }
        }
    }
}

/// # Safety
/// Both are live; the whole header is in.
unsafe fn header_done(tqpair: *mut nvme_tcp_qpair, pdu: *mut nvme_tcp_pdu) {
    // SAFETY: by contract.
    unsafe {
        match (*pdu).hdr.common().pdu_type {
            pdu_type::IC_RESP => {
                let resp = (*pdu).hdr.ic_resp();
                if resp.pfv != 0 || resp.dgst != 0 || resp.maxh2cdata < 4096 || resp.cpda != 0 {
                    fail(tqpair, "the target's ICResp asks for what the stand-in does not do");
                    return;
                }
                (*tqpair).maxh2cdata = resp.maxh2cdata;
                (*tqpair).ic_done = true;
                (*tqpair).qpair.state = nvme_qpair_state::NVME_QPAIR_CONNECTED;
                (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY;
            }
            pdu_type::CAPSULE_RESP => nvme_tcp_capsule_resp_hdr_handle(tqpair, pdu),
            pdu_type::C2H_DATA => nvme_tcp_c2h_data_hdr_handle(tqpair, pdu),
            pdu_type::R2T => nvme_tcp_r2t_hdr_handle(tqpair, pdu),
            _ => {
                let fes = (*pdu).hdr.term_req().fes;
                fail(tqpair, &format!("the target terminated the connection, status {fes}"));
            }
        }
    }
}

/// The command that a PDU speaks of, if there is one.
///
/// # Safety
/// `tqpair` is live.
unsafe fn active(tqpair: *mut nvme_tcp_qpair, cid: u16) -> Option<*mut nvme_tcp_req> {
    // SAFETY: by contract; the index is checked.
    unsafe {
        if cid >= (*tqpair).num_entries {
            return None;
        }
        let tcp_req = (*tqpair).tcp_reqs.add(usize::from(cid));
        ((*tcp_req).state != ReqState::NVME_TCP_REQ_FREE).then_some(tcp_req)
    }
}

/// A response capsule is in.
///
/// # Safety
/// Both are live; the whole header is in.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_capsule_resp_hdr_handle(
    tqpair: *mut nvme_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let cqe = (*pdu).hdr.capsule_resp().rccqe;
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY;
        let Some(tcp_req) = active(tqpair, cqe.cid) else {
            return fail(tqpair, &format!("a completion for cid {}, which is not out", cqe.cid));
        };
        (*tcp_req).rsp = cqe;
        (*tcp_req).data_recv = true;
        complete_when_done(tcp_req);
    }
}

/// A C2HData header is in.
///
/// # Safety
/// Both are live; the whole header is in.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_c2h_data_hdr_handle(
    tqpair: *mut nvme_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let hdr = (*pdu).hdr.c2h_data();
        let Some(tcp_req) = active(tqpair, hdr.cccid) else {
            return fail(tqpair, &format!("data for cid {}, which is not out", hdr.cccid));
        };
        let req = (*tcp_req).req;
        let wants = (*req).cmd.transfer() == Transfer::SPDK_NVME_DATA_CONTROLLER_TO_HOST;
        let end = hdr.datao.checked_add(hdr.datal);
        let payload = hdr.common.plen.checked_sub(u32::from(hdr.common.pdo));
        if !wants
            || hdr.datal == 0
            || payload != Some(hdr.datal)
            || hdr.datao != (*tcp_req).expected_datao
            || end.is_none_or(|end| end > (*req).payload_size)
        {
            return fail(tqpair, &format!("data for cid {} that was not asked for", hdr.cccid));
        }
        (*pdu).req = tcp_req.cast();
        (*pdu).data_len = hdr.datal;
        (*pdu).padding_len = u32::from(hdr.common.pdo) - 24;
        (*pdu).data_iov.iov_base = (*req).payload.add(hdr.datao as usize).cast();
        (*pdu).data_iov.iov_len = hdr.datal as usize;
        (*tcp_req).expected_datao += hdr.datal;
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PAYLOAD;
    }
}

/// The payload of a C2HData is in.
///
/// # Safety
/// Both are live; `pdu.req` is the command.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_c2h_data_payload_handle(
    tqpair: *mut nvme_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let tcp_req: *mut nvme_tcp_req = (*pdu).req.cast();
        let flags = (*pdu).hdr.common().flags;
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY;
        if flags & pdu_flag::DATA_SUCCESS != 0 {
            if flags & pdu_flag::DATA_LAST == 0 {
                return fail(tqpair, "data with SUCCESS that is not the last");
            }
            (*tcp_req).rsp = spdk_nvme_cpl { cid: (*tcp_req).cid, ..Default::default() };
            (*tcp_req).data_recv = true;
            complete_when_done(tcp_req);
        }
    }
}

/// An R2T is in.
///
/// # Safety
/// Both are live; the whole header is in.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvme_tcp_r2t_hdr_handle(tqpair: *mut nvme_tcp_qpair, pdu: *mut nvme_tcp_pdu) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let hdr = (*pdu).hdr.r2t();
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY;
        let Some(tcp_req) = active(tqpair, hdr.cccid) else {
            return fail(tqpair, &format!("an R2T for cid {}, which is not out", hdr.cccid));
        };
        let req = (*tcp_req).req;
        let outbound = (*req).cmd.transfer() == Transfer::SPDK_NVME_DATA_HOST_TO_CONTROLLER;
        let end = hdr.r2to.checked_add(hdr.r2tl);
        if !outbound
            || (*tcp_req).in_capsule_data
            || !(*tcp_req).send_ack
            || (*tcp_req).active_r2ts > 0
            || hdr.r2tl == 0
            || hdr.r2to != (*tcp_req).datao
            || end.is_none_or(|end| end > (*req).payload_size)
        {
            return fail(tqpair, &format!("an R2T for cid {} that does not fit", hdr.cccid));
        }
        (*tcp_req).state = ReqState::NVME_TCP_REQ_ACTIVE_R2T;
        (*tcp_req).active_r2ts = 1;
        (*tcp_req).ttag = hdr.ttag;
        (*tcp_req).r2tl_remain = hdr.r2tl;
        nvme_tcp_send_h2c_data(tcp_req);
    }
}
