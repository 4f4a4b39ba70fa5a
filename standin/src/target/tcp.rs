//! The NVMe/TCP transport: connections, the receive state machine and the request state machine.
//!
//! A request enters [`nvmf_tcp_req_process`] from outside in the states NEW (its capsule's header
//! is in), READY_TO_EXECUTE (its data is in), EXECUTED (it is done) and COMPLETED (it is being
//! freed); between these it passes further states inside one call. At the entry in state NEW the
//! SQE is still in the connection's `pdu_in_progress`; the call copies it into the request.
//!
//! A PDU is queued by [`nvmf_tcp_qpair_write_pdu`] and leaves with the next poll's flush.

use std::ffi::{c_int, c_void};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;

use probe::probe;

use super::reactor::{Reactor, now_ns};
use super::types::{
    nvmf_h2c_msg, nvmf_tcp_qpair_state, spdk_nvmf_qpair, spdk_nvmf_qpair_state, spdk_nvmf_request,
    spdk_nvmf_tcp_poll_group, spdk_nvmf_tcp_qpair, spdk_nvmf_tcp_req, spdk_nvmf_tcp_req_state as State,
    spdk_nvmf_transport,
};
use super::{DELAYS, STATS, Status, ctrlr, nvmf};
use crate::pdu::{nvme_tcp_pdu, nvme_tcp_pdu_recv_state as Recv};
use crate::sock::{
    _sock_flush, Received, limit_buffers, pace, posix_sock, sock_close, sock_from_stream, sock_queue,
    spdk_sock, spdk_sock_request, xfer_complete_cb,
};
use crate::trid::put_cstr;
use crate::wire::{
    Fatal, FatalStatus, Receiver, SGL_IN_CAPSULE, SGL_TRANSPORT, check_common, nvme_tcp_pdu_hdr, opc,
    pdu_flag, pdu_type, spdk_nvme_cpl, spdk_nvme_data_transfer as Transfer,
};

/// Connections that one reactor takes.
const MAX_CONNECTIONS: usize = 256;

/// How long a terminated connection waits for its peer to hang up.
const HANG_UP_NS: u64 = 500_000_000;

/// PDUs of a connection that belong to no request.
const EXTRA_PDUS: usize = 3;

const RECV_BUFFER: usize = 64 * 1024;

// ---------------------------------------------------------------------------------------------
// Connections
// ---------------------------------------------------------------------------------------------

/// Takes a new connection into the reactor's poll group, or drops it.
pub(crate) fn accept(reactor: &Reactor, stream: TcpStream) {
    if reactor.connections() >= MAX_CONNECTIONS {
        super::log("a connection is refused: this reactor serves as many as it takes");
        return;
    }
    let (Ok(peer), Ok(local)) = (stream.peer_addr(), stream.local_addr()) else {
        return;
    };
    let sized = match reactor.shared.config.socket_buffer {
        Some(bytes) => limit_buffers(&stream, bytes),
        None => Ok(()),
    };
    let paced = sized.and_then(|()| reactor.shared.config.pace.map_or(Ok(()), |rate| pace(&stream, rate)));
    let sock = match paced.and_then(|()| sock_from_stream(stream, RECV_BUFFER)) {
        Ok(sock) => sock,
        Err(e) => {
            super::log(&format!("a connection from {peer} is dropped: {e}"));
            return;
        }
    };
    let transport = reactor.shared.transport();
    let group = reactor.group();
    let id = reactor.new_qpair_id();
    let mut tqpair = Box::new(spdk_nvmf_tcp_qpair::new(id, group, transport, sock));
    put_address(&mut tqpair.initiator_addr, &mut tqpair.initiator_port, peer);
    put_address(&mut tqpair.target_addr, &mut tqpair.target_port, local);
    let tqpair = Box::into_raw(tqpair);
    // SAFETY: everything is freshly allocated and not shared yet.
    unsafe {
        allocate(tqpair, reactor.shared.transport_opts().max_queue_depth);
        let fd = (*posix_sock(sock)).fd;
        nvmf_tcp_poll_group_add(group, &raw mut (*tqpair).qpair);
        if let Err(e) = reactor.add_qpair(id, tqpair, fd, (*tqpair).epoll_mask) {
            super::log(&format!("a connection from {peer} is dropped: {e}"));
            sock_close(sock);
            (*tqpair).sock_closed = true;
            destroy(reactor, tqpair);
        }
    }
    STATS.connections.fetch_add(1, Ordering::Relaxed);
}

fn put_address(text: &mut [u8], port: &mut u16, address: SocketAddr) {
    put_cstr(text, address.ip().to_string().as_bytes());
    *port = address.port();
}

/// Gives the connection its request slots and PDUs.
///
/// # Safety
/// `tqpair` is live and has none yet.
unsafe fn allocate(tqpair: *mut spdk_nvmf_tcp_qpair, slots: u16) {
    let n = usize::from(slots);
    // One PDU per slot, one for management, one being received, one for termination.
    let mut pdus = Vec::with_capacity(n + EXTRA_PDUS);
    pdus.resize_with(n + EXTRA_PDUS, nvme_tcp_pdu::default);
    let pdus = Box::leak(pdus.into_boxed_slice()).as_mut_ptr();
    // SAFETY: by contract; the indices are inside the arrays just made.
    unsafe {
        let qpair = &raw mut (*tqpair).qpair;
        let reqs: Vec<_> =
            (0..slots).map(|i| spdk_nvmf_tcp_req::new(i + 1, qpair, pdus.add(usize::from(i)))).collect();
        let reqs = Box::leak(reqs.into_boxed_slice()).as_mut_ptr();
        for i in 0..n {
            let req = reqs.add(i);
            (*req).req.cmd = &raw mut (*req).cmd;
            (*req).req.rsp = &raw mut (*req).rsp;
            (*pdus.add(i)).req = req.cast();
            (*tqpair).tcp_req_free_queue.push_back(req);
        }
        for i in 0..n + EXTRA_PDUS {
            (*pdus.add(i)).qpair = tqpair.cast();
        }
        (*tqpair).reqs = reqs;
        (*tqpair).pdus = pdus;
        (*tqpair).mgmt_pdu = pdus.add(n);
        (*tqpair).pdu_in_progress = pdus.add(n + 1);
        (*tqpair).term_pdu = pdus.add(n + 2);
        (*tqpair).resource_count = u32::from(slots);
    }
}

/// A connection joins a poll group.
///
/// # Safety
/// Both are live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_poll_group_add(
    group: *mut spdk_nvmf_tcp_poll_group,
    qpair: *mut spdk_nvmf_qpair,
) -> c_int {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let thread = (*(*group).group.thread).id;
        let qid = (*qpair).qid;
        probe!(spdk, nvmf_transport_poll_group_add, 0, qpair, qid, thread);
        probe!(spdk, nvmf_poll_group_add_qpair, crate::entry::tsc(), qpair, thread);
    }
    0
}

/// Takes a connection down. Its commands that are with the bdev layer or wait for a delay end
/// first; then it is freed.
///
/// # Safety
/// `tqpair` is a live connection of the calling reactor.
pub(crate) unsafe fn disconnect(tqpair: *mut spdk_nvmf_tcp_qpair) {
    // SAFETY: by contract.
    unsafe {
        if (*tqpair).qpair.disconnect_started {
            return;
        }
        (*tqpair).qpair.disconnect_started = true;
        ctrlr::disconnecting(tqpair);
        (*tqpair).qpair.state = spdk_nvmf_qpair_state::SPDK_NVMF_QPAIR_DEACTIVATING;
        (*tqpair).state = nvmf_tcp_qpair_state::NVMF_TCP_QPAIR_STATE_EXITING;
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_ERROR;
        // Closing takes the descriptor out of the reactor's poll set, and drops what is queued.
        sock_close((*tqpair).sock);
        (*tqpair).sock = std::ptr::null_mut();
        (*tqpair).sock_closed = true;

        let transport = (*tqpair).qpair.transport;
        for i in 0..(*tqpair).resource_count as usize {
            let tcp_req = (*tqpair).reqs.add(i);
            let aer = (*tcp_req).cmd.nvme_cmd().opc == opc::ASYNC_EVENT_REQUEST && (*tqpair).qpair.qid == 0;
            match (*tcp_req).state {
                State::TCP_REQUEST_STATE_FREE => {}
                // Somebody will complete it; the held event requests nobody ever will.
                State::TCP_REQUEST_STATE_EXECUTING if !aer => {}
                _ => {
                    (*tcp_req).state = State::TCP_REQUEST_STATE_COMPLETED;
                    nvmf_tcp_req_process(transport, tcp_req);
                }
            }
        }
        reap_if_idle(tqpair);
    }
}

/// # Safety
/// As for [`disconnect`].
unsafe fn reap_if_idle(tqpair: *mut spdk_nvmf_tcp_qpair) {
    // SAFETY: by contract.
    unsafe {
        let idle = (*tqpair).tcp_req_free_queue.len() == (*tqpair).resource_count as usize;
        if idle && (*tqpair).sock_closed {
            reactor(tqpair).queue_reap((*tqpair).id);
        }
    }
}

/// Frees a connection.
///
/// # Safety
/// `tqpair` is down, has no command left, and is not used again.
#[inline(never)]
pub(crate) unsafe fn destroy(reactor: &Reactor, tqpair: *mut spdk_nvmf_tcp_qpair) {
    // SAFETY: by contract; the arrays were leaked by `allocate` with just these lengths.
    unsafe {
        let _ = reactor;
        let thread = (*(*tqpair).group).group.thread;
        let thread = (*thread).id;
        let qid = (*tqpair).qpair.qid;
        probe!(spdk, nvmf_poll_group_remove_qpair, crate::entry::tsc(), tqpair, thread);
        probe!(spdk, nvmf_transport_poll_group_remove, 0, tqpair, qid, thread);
        probe!(spdk, nvmf_transport_qpair_fini, 0, tqpair);
        ctrlr::leave(&raw mut (*tqpair).qpair);
        let n = (*tqpair).resource_count as usize;
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut((*tqpair).reqs, n)));
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut((*tqpair).pdus, n + EXTRA_PDUS)));
        drop(Box::from_raw(tqpair));
    }
}

/// The reactor that serves a connection.
///
/// # Safety
/// `tqpair` is live.
unsafe fn reactor<'a>(tqpair: *mut spdk_nvmf_tcp_qpair) -> &'a Reactor {
    // SAFETY: by contract; a reactor outlives its connections.
    unsafe { &*(*(*tqpair).group).group.reactor }
}

// ---------------------------------------------------------------------------------------------
// Sending
// ---------------------------------------------------------------------------------------------

/// Queues a PDU on the connection's socket; `cb_fn(cb_arg)` runs when the kernel has taken it.
///
/// # Safety
/// `tqpair` is live; `pdu` and its data stay untouched until the callback.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_qpair_write_pdu(
    tqpair: *mut spdk_nvmf_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
    cb_fn: xfer_complete_cb,
    cb_arg: *mut c_void,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        if (*tqpair).sock_closed {
            return;
        }
        (*pdu).cb_fn = Some(cb_fn);
        (*pdu).cb_arg = cb_arg;
        let common = (*pdu).hdr.common();
        let hdr_len = if (*pdu).data_len > 0 {
            // The padding up to the data is part of the header's zeroes.
            usize::from(common.pdo)
        } else {
            common.plen as usize
        };
        sock_queue(
            (*tqpair).sock,
            spdk_sock_request {
                offset: 0,
                hdr: (*pdu).hdr.bytes().as_ptr(),
                hdr_len,
                data: (*pdu).data_iov.iov_base.cast(),
                data_len: (*pdu).data_len as usize,
                cb_arg,
                cb_fn,
            },
        );
        if !(*tqpair).pending_flush {
            (*tqpair).pending_flush = true;
            reactor(tqpair).queue_flush((*tqpair).id);
        }
    }
}

/// Sends what the connection has queued, as far as the kernel takes it.
///
/// # Safety
/// `tqpair` is a live connection of this reactor.
pub(crate) unsafe fn flush(reactor: &Reactor, tqpair: *mut spdk_nvmf_tcp_qpair) {
    // SAFETY: by contract; the callbacks that run inside do not close the socket.
    unsafe {
        (*tqpair).pending_flush = false;
        if (*tqpair).sock_closed {
            return;
        }
        let sock = (*tqpair).sock;
        _sock_flush(sock);
        if (*sock).broken {
            disconnect(tqpair);
            return;
        }
        let left = !(*sock).queued_reqs.is_empty();
        let blocked = left && (*sock).write_blocked;
        set_polled(tqpair, libc::EPOLLOUT as u32, blocked);
        if left && !blocked && !(*tqpair).pending_flush {
            (*tqpair).pending_flush = true;
            reactor.queue_flush((*tqpair).id);
        }
    }
}

/// # Safety
/// `tqpair` is a live connection with an open socket.
unsafe fn set_polled(tqpair: *mut spdk_nvmf_tcp_qpair, bit: u32, on: bool) {
    // SAFETY: by contract.
    unsafe {
        let before = (*tqpair).epoll_mask;
        let mask = if on { before | bit } else { before & !bit };
        if mask != before {
            (*tqpair).epoll_mask = mask;
            let fd = (*posix_sock((*tqpair).sock)).fd;
            reactor(tqpair).poll_mask((*tqpair).id, fd, mask);
        }
    }
}

/// Asks for the next part of a write's data.
///
/// # Safety
/// Both are live; the request has a buffer.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_send_r2t_pdu(
    tqpair: *mut spdk_nvmf_tcp_qpair,
    tcp_req: *mut spdk_nvmf_tcp_req,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let opts = &(*(*tqpair).qpair.transport).opts;
        let left = (*tcp_req).req.length - (*tcp_req).h2c_offset;
        let len = left.min(opts.r2t_bytes);
        (*tcp_req).r2t_end = (*tcp_req).h2c_offset + len;
        let pdu = (*tcp_req).pdu;
        let cid = (*tcp_req).cmd.nvme_cmd().cid;
        (*pdu).hdr = nvme_tcp_pdu_hdr::for_r2t(cid, (*tcp_req).ttag, (*tcp_req).h2c_offset, len);
        (*pdu).data_len = 0;
        (*tcp_req).state = State::TCP_REQUEST_STATE_AWAITING_R2T_ACK;
        STATS.r2ts.fetch_add(1, Ordering::Relaxed);
        nvmf_tcp_qpair_write_pdu(tqpair, pdu, nvmf_tcp_r2t_complete, tcp_req.cast());
    }
}

/// The R2T has left.
///
/// # Safety
/// `cb_arg` is the live request that it was sent for.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_r2t_complete(cb_arg: *mut c_void, err: c_int) {
    probe_entry!();
    let _ = err;
    let tcp_req: *mut spdk_nvmf_tcp_req = cb_arg.cast();
    // SAFETY: by contract.
    unsafe {
        if (*tcp_req).state == State::TCP_REQUEST_STATE_AWAITING_R2T_ACK {
            (*tcp_req).state = State::TCP_REQUEST_STATE_TRANSFERRING_HOST_TO_CONTROLLER;
        }
    }
}

/// Queues a read's data, with the success flag where that stands for the response.
///
/// # Safety
/// Both are live; the request succeeded and has data.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn _nvmf_tcp_send_c2h_data(
    tqpair: *mut spdk_nvmf_tcp_qpair,
    tcp_req: *mut spdk_nvmf_tcp_req,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let pdu = (*tcp_req).pdu;
        let length = (*tcp_req).req.length;
        let opts = &(*(*tqpair).qpair.transport).opts;
        let cpl = (*tcp_req).rsp.nvme_cpl();
        // A completion that says more than "success" has to be sent.
        let success =
            opts.c2h_success && (*tqpair).qpair.sq_flow_control_disabled && cpl.cdw0 == 0 && cpl.cdw1 == 0;
        let mut flags = pdu_flag::DATA_LAST;
        if success {
            flags |= pdu_flag::DATA_SUCCESS;
        }
        let align = (u32::from((*tqpair).hpda) + 1) * 4;
        let pdo = 24u32.div_ceil(align) * align;
        (*pdu).hdr = nvme_tcp_pdu_hdr::for_c2h_data(cpl.cid, flags, pdo as u8, 0, length);
        (*pdu).data_iov = (*tcp_req).req.iov[0];
        (*pdu).data_len = length;
        STATS.c2h_bytes.fetch_add(u64::from(length), Ordering::Relaxed);
        let done = if success { nvmf_tcp_request_free } else { nvmf_tcp_pdu_c2h_data_complete };
        nvmf_tcp_qpair_write_pdu(tqpair, pdu, done, tcp_req.cast());
    }
}

/// The data has left; the response follows.
///
/// # Safety
/// `cb_arg` is the live request that it was sent for.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_pdu_c2h_data_complete(cb_arg: *mut c_void, err: c_int) {
    probe_entry!();
    let _ = err;
    let tcp_req: *mut spdk_nvmf_tcp_req = cb_arg.cast();
    // SAFETY: by contract; a request's queue pair is the first member of its connection.
    unsafe { nvmf_tcp_send_capsule_resp_pdu(tcp_req, (*tcp_req).req.qpair.cast()) };
}

/// Queues a response capsule.
///
/// # Safety
/// Both are live; the request's completion entry is final.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_send_capsule_resp_pdu(
    tcp_req: *mut spdk_nvmf_tcp_req,
    tqpair: *mut spdk_nvmf_tcp_qpair,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let pdu = (*tcp_req).pdu;
        (*pdu).hdr = nvme_tcp_pdu_hdr::for_response((*tcp_req).rsp.nvme_cpl());
        (*pdu).data_len = 0;
        nvmf_tcp_qpair_write_pdu(tqpair, pdu, nvmf_tcp_request_free, tcp_req.cast());
    }
}

/// The last PDU of a request has left: the slot is free again.
///
/// # Safety
/// `cb_arg` is the live request.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_request_free(cb_arg: *mut c_void, err: c_int) {
    probe_entry!();
    let _ = err;
    let tcp_req: *mut spdk_nvmf_tcp_req = cb_arg.cast();
    // SAFETY: by contract.
    unsafe {
        (*tcp_req).state = State::TCP_REQUEST_STATE_COMPLETED;
        nvmf_tcp_req_process((*(*tcp_req).req.qpair).transport, tcp_req);
    }
}

// ---------------------------------------------------------------------------------------------
// Requests
// ---------------------------------------------------------------------------------------------

/// The request has been executed: hands its completion to the transport.
///
/// # Safety
/// `req` is live and its completion entry is final.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_req_complete(req: *mut spdk_nvmf_request) -> c_int {
    probe_entry!();
    // The request is the first member of its TCP request.
    let tcp_req: *mut spdk_nvmf_tcp_req = req.cast();
    // SAFETY: by contract.
    unsafe {
        let qpair = (*req).qpair;
        (*tcp_req).state = if (*qpair).disconnect_started {
            State::TCP_REQUEST_STATE_COMPLETED
        } else {
            State::TCP_REQUEST_STATE_EXECUTED
        };
        nvmf_tcp_req_process((*qpair).transport, tcp_req);
    }
    0
}

/// Takes a request from state to state as far as it goes for now. Returns whether it moved.
///
/// # Safety
/// Both are live, and the request belongs to a connection of the calling reactor.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_req_process(
    transport: *mut spdk_nvmf_transport,
    tcp_req: *mut spdk_nvmf_tcp_req,
) -> bool {
    probe_entry!();
    let mut moved = false;
    // SAFETY: by contract; a request's queue pair is the first member of its connection.
    unsafe {
        let tqpair: *mut spdk_nvmf_tcp_qpair = (*tcp_req).req.qpair.cast();
        loop {
            let before = (*tcp_req).state;
            match before {
                State::TCP_REQUEST_STATE_NEW => start(tqpair, tcp_req),
                State::TCP_REQUEST_STATE_NEED_BUFFER => {
                    let pooled =
                        (*tcp_req).cmd.nvme_cmd().dptr.kind == SGL_TRANSPORT && (*tqpair).qpair.qid != 0;
                    if pooled && !(*tcp_req).holds_buffer {
                        if !reactor(tqpair).buffers.take(tcp_req) {
                            // The reactor goes on with it when its turn has come.
                            return moved;
                        }
                        (*tcp_req).holds_buffer = true;
                    }
                    if let Err(status) = take_buffer(&*transport, tcp_req) {
                        nvmf::set_status(&raw mut (*tcp_req).req, status);
                        (*tcp_req).state = State::TCP_REQUEST_STATE_EXECUTING;
                        nvmf::spdk_nvmf_request_complete(&raw mut (*tcp_req).req);
                        return true;
                    }
                    (*tcp_req).state = State::TCP_REQUEST_STATE_HAVE_BUFFER;
                }
                State::TCP_REQUEST_STATE_HAVE_BUFFER => {
                    let inbound = (*tcp_req).req.xfer == Transfer::SPDK_NVME_DATA_HOST_TO_CONTROLLER as u8;
                    if !inbound || (*tcp_req).req.length == 0 {
                        (*tcp_req).state = State::TCP_REQUEST_STATE_READY_TO_EXECUTE;
                    } else if (*tcp_req).has_in_capsule_data {
                        (*tcp_req).state = State::TCP_REQUEST_STATE_TRANSFERRING_HOST_TO_CONTROLLER;
                    } else {
                        nvmf_tcp_send_r2t_pdu(tqpair, tcp_req);
                    }
                }
                State::TCP_REQUEST_STATE_READY_TO_EXECUTE => {
                    (*tcp_req).state = State::TCP_REQUEST_STATE_EXECUTING;
                    execute(tqpair, tcp_req);
                    // It may have been completed, and even have been freed, inside.
                    return true;
                }
                State::TCP_REQUEST_STATE_EXECUTED => {
                    (*tcp_req).state = State::TCP_REQUEST_STATE_READY_TO_COMPLETE;
                }
                State::TCP_REQUEST_STATE_READY_TO_COMPLETE => {
                    (*tcp_req).state = State::TCP_REQUEST_STATE_TRANSFERRING_CONTROLLER_TO_HOST;
                    let success = (*tcp_req).rsp.nvme_cpl().status == Status::SUCCESS.word();
                    let outbound = (*tcp_req).req.xfer == Transfer::SPDK_NVME_DATA_CONTROLLER_TO_HOST as u8;
                    if success && outbound && (*tcp_req).req.length > 0 {
                        _nvmf_tcp_send_c2h_data(tqpair, tcp_req);
                    } else {
                        nvmf_tcp_send_capsule_resp_pdu(tcp_req, tqpair);
                    }
                }
                State::TCP_REQUEST_STATE_COMPLETED => {
                    (*tcp_req).state = State::TCP_REQUEST_STATE_FREE;
                    if std::mem::take(&mut (*tcp_req).holds_buffer) {
                        reactor(tqpair).buffers.give();
                    } else {
                        reactor(tqpair).buffers.forget(tcp_req);
                    }
                    (*tqpair).qpair.queue_depth -= 1;
                    (*tqpair).tcp_req_free_queue.push_back(tcp_req);
                    if (*tqpair).sock_closed {
                        reap_if_idle(tqpair);
                    } else if (*tqpair).recv_state == Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_REQ {
                        reactor(tqpair).queue_resume((*tqpair).id);
                    }
                }
                State::TCP_REQUEST_STATE_FREE
                | State::TCP_REQUEST_STATE_AWAITING_R2T_ACK
                | State::TCP_REQUEST_STATE_TRANSFERRING_HOST_TO_CONTROLLER
                | State::TCP_REQUEST_STATE_EXECUTING
                | State::TCP_REQUEST_STATE_TRANSFERRING_CONTROLLER_TO_HOST => {}
            }
            if (*tcp_req).state == before {
                return moved;
            }
            moved = true;
        }
    }
}

/// State NEW: takes the command over from the connection's receive PDU.
///
/// # Safety
/// As for [`nvmf_tcp_req_process`].
unsafe fn start(tqpair: *mut spdk_nvmf_tcp_qpair, tcp_req: *mut spdk_nvmf_tcp_req) {
    // SAFETY: by contract.
    unsafe {
        let cmd = (*(*tqpair).pdu_in_progress).hdr.capsule_cmd().ccsqe;
        (*tcp_req).cmd = nvmf_h2c_msg { nvme_cmd: cmd };
        (*tcp_req).rsp.nvme_cpl = spdk_nvme_cpl::default();
        (*tcp_req).h2c_offset = 0;
        (*tcp_req).r2t_end = 0;
        (*tcp_req).has_in_capsule_data = false;
        (*tcp_req).req.length = 0;
        (*tcp_req).req.iovcnt = 0;
        (*tcp_req).req.iov[0].iov_len = 0;
        let xfer = match cmd.transfer() {
            // A command that moves data both ways does not exist here; it is refused when executed.
            Transfer::SPDK_NVME_DATA_BIDIRECTIONAL => Transfer::SPDK_NVME_DATA_NONE,
            // An opcode may say "data" where a command has none; the length says so.
            _ if cmd.dptr.length == 0 => Transfer::SPDK_NVME_DATA_NONE,
            other => other,
        };
        (*tcp_req).req.xfer = xfer as u8;
        (*tcp_req).state = if xfer == Transfer::SPDK_NVME_DATA_NONE {
            State::TCP_REQUEST_STATE_READY_TO_EXECUTE
        } else {
            State::TCP_REQUEST_STATE_NEED_BUFFER
        };
    }
}

/// State NEED_BUFFER: reads the SGL and gives the request a buffer.
///
/// # Safety
/// As for [`nvmf_tcp_req_process`].
unsafe fn take_buffer(
    transport: &spdk_nvmf_transport,
    tcp_req: *mut spdk_nvmf_tcp_req,
) -> Result<(), Status> {
    // SAFETY: by contract.
    unsafe {
        let sgl = (*tcp_req).cmd.nvme_cmd().dptr;
        let inbound = (*tcp_req).req.xfer == Transfer::SPDK_NVME_DATA_HOST_TO_CONTROLLER as u8;
        match sgl.kind {
            SGL_TRANSPORT => {
                if sgl.length > transport.opts.max_io_size {
                    return Err(Status::SGL_LENGTH_INVALID);
                }
            }
            SGL_IN_CAPSULE if inbound => {
                if sgl.address != 0 {
                    return Err(Status::SGL_OFFSET_INVALID);
                }
                if sgl.length > transport.opts.in_capsule_data_size {
                    return Err(Status::SGL_LENGTH_INVALID);
                }
                (*tcp_req).has_in_capsule_data = true;
            }
            _ => return Err(Status::SGL_TYPE_INVALID),
        }
        let len = sgl.length as usize;
        let buf = &mut (*tcp_req).buf;
        if buf.len() < len {
            buf.resize(len, 0);
        }
        (*tcp_req).req.length = sgl.length;
        (*tcp_req).req.iovcnt = 1;
        (*tcp_req).req.iov[0] = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: len };
    }
    Ok(())
}

/// State READY_TO_EXECUTE: executes the request, after the target-driver delay where one is set.
///
/// # Safety
/// As for [`nvmf_tcp_req_process`].
unsafe fn execute(tqpair: *mut spdk_nvmf_tcp_qpair, tcp_req: *mut spdk_nvmf_tcp_req) {
    // SAFETY: by contract.
    unsafe {
        let req = &raw mut (*tcp_req).req;
        // Only commands of a workload are delayed, so that connecting is not.
        let delay = if (*tqpair).qpair.qid == 0 || (*tqpair).qpair.ctrlr.is_null() {
            0
        } else {
            DELAYS.target_driver.load(Ordering::Relaxed)
        };
        if delay == 0 {
            nvmf::spdk_nvmf_request_exec(req);
        } else {
            reactor(tqpair).exec_at(now_ns() + delay, req);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Receiving
// ---------------------------------------------------------------------------------------------

/// The connection is readable.
///
/// # Safety
/// `arg` is a live connection of the calling reactor.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_sock_cb(
    arg: *mut c_void,
    group: *mut spdk_nvmf_tcp_poll_group,
    sock: *mut spdk_sock,
) {
    probe_entry!();
    let _ = (group, sock);
    let tqpair: *mut spdk_nvmf_tcp_qpair = arg.cast();
    // SAFETY: by contract.
    unsafe {
        if (*tqpair).sock_closed {
            return;
        }
        if (*tqpair).wait_terminate {
            loop {
                match (*posix_sock((*tqpair).sock)).discard() {
                    Received::Bytes(_) => {}
                    Received::Nothing => return,
                    Received::Closed => break,
                }
            }
            disconnect(tqpair);
            return;
        }
        if nvmf_tcp_sock_process(tqpair) < 0 {
            disconnect(tqpair);
        }
    }
}

/// A connection that waited for a request slot goes on.
///
/// # Safety
/// `tqpair` is a live connection of the calling reactor.
pub(crate) unsafe fn resume(tqpair: *mut spdk_nvmf_tcp_qpair) {
    // SAFETY: by contract.
    unsafe {
        if (*tqpair).sock_closed || (*tqpair).wait_terminate {
            return;
        }
        set_polled(tqpair, libc::EPOLLIN as u32, true);
        if nvmf_tcp_sock_process(tqpair) < 0 {
            disconnect(tqpair);
        }
    }
}

/// Receives and handles PDUs until there is nothing more to read or no slot for what was read.
/// Returns a negative number when the connection is at its end.
///
/// # Safety
/// `tqpair` is a live connection of the calling reactor, with an open socket.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_sock_process(tqpair: *mut spdk_nvmf_tcp_qpair) -> c_int {
    probe_entry!();
    // SAFETY: by contract. What is called inside may terminate the connection, but takes its
    // socket away only through `disconnect`, which it does not call.
    unsafe {
        let pdu = (*tqpair).pdu_in_progress;
        loop {
            match (*tqpair).recv_state {
                Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY => {
                    (*pdu).reset();
                    (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_CH;
                }
                Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_CH => {
                    let have = usize::from((*pdu).ch_valid_bytes);
                    let n = match read_header(tqpair, pdu, have, 8) {
                        Received::Bytes(n) => n,
                        Received::Nothing => return 0,
                        Received::Closed => return -1,
                    };
                    (*pdu).ch_valid_bytes += n as u8;
                    if (*pdu).ch_valid_bytes == 8 {
                        let opts = &(*(*tqpair).qpair.transport).opts;
                        let receiver = Receiver::Target {
                            in_capsule: opts.in_capsule_data_size,
                            max_h2c_data: opts.max_h2c_data,
                        };
                        let ic_done = (*tqpair).state == nvmf_tcp_qpair_state::NVMF_TCP_QPAIR_STATE_RUNNING;
                        match check_common(&(*pdu).hdr.common(), receiver, ic_done) {
                            Ok(hlen) => {
                                (*pdu).psh_len = hlen - 8;
                                (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PSH;
                            }
                            Err(fatal) => terminate(tqpair, fatal, 8),
                        }
                    }
                }
                Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PSH => {
                    let have = 8 + usize::from((*pdu).psh_valid_bytes);
                    let whole = 8 + usize::from((*pdu).psh_len);
                    let n = match read_header(tqpair, pdu, have, whole) {
                        Received::Bytes(n) => n,
                        Received::Nothing => return 0,
                        Received::Closed => return -1,
                    };
                    (*pdu).psh_valid_bytes += n as u8;
                    if (*pdu).psh_valid_bytes == (*pdu).psh_len {
                        nvmf_tcp_pdu_psh_handle(tqpair);
                    }
                }
                Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_REQ => {
                    if (*tqpair).tcp_req_free_queue.is_empty() {
                        // Nothing is read until a response has left and its slot is free.
                        set_polled(tqpair, libc::EPOLLIN as u32, false);
                        return 0;
                    }
                    nvmf_tcp_capsule_cmd_hdr_handle(tqpair, pdu);
                }
                Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PAYLOAD => {
                    match read_payload(tqpair, pdu) {
                        Received::Bytes(_) => {}
                        Received::Nothing => return 0,
                        Received::Closed => return -1,
                    }
                    if (*pdu).rw_offset == (*pdu).data_len {
                        _nvmf_tcp_pdu_payload_handle(tqpair, pdu);
                    }
                }
                Recv::NVME_TCP_PDU_RECV_STATE_QUIESCING => return 0,
                Recv::NVME_TCP_PDU_RECV_STATE_ERROR => return -1,
            }
        }
    }
}

/// # Safety
/// As for [`nvmf_tcp_sock_process`]; `have < whole`.
unsafe fn read_header(
    tqpair: *mut spdk_nvmf_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
    have: usize,
    whole: usize,
) -> Received {
    // SAFETY: by contract.
    unsafe {
        let bytes = (*pdu).hdr.bytes_mut();
        (*posix_sock((*tqpair).sock)).read(&mut bytes[have..whole])
    }
}

/// Reads payload, or the padding before it.
///
/// # Safety
/// As for [`nvmf_tcp_sock_process`]; `data_iov` is the payload's place.
unsafe fn read_payload(tqpair: *mut spdk_nvmf_tcp_qpair, pdu: *mut nvme_tcp_pdu) -> Received {
    // SAFETY: by contract; the place belongs to a request that waits for this payload.
    unsafe {
        let sock = posix_sock((*tqpair).sock);
        if (*pdu).padding_len > 0 {
            let mut skipped = [0; 256];
            let want = ((*pdu).padding_len as usize).min(skipped.len());
            let got = (*sock).read(&mut skipped[..want]);
            if let Received::Bytes(n) = got {
                (*pdu).padding_len -= n as u32;
            }
            return got;
        }
        let at = (*pdu).rw_offset as usize;
        let left = (*pdu).data_len as usize - at;
        let dst = std::slice::from_raw_parts_mut((*pdu).data_iov.iov_base.cast::<u8>().add(at), left);
        let got = (*sock).read(dst);
        if let Received::Bytes(n) = got {
            (*pdu).rw_offset += n as u32;
        }
        got
    }
}

/// Terminates the connection for a protocol error: says why, then waits for the peer to hang up.
///
/// # Safety
/// As for [`nvmf_tcp_sock_process`].
unsafe fn terminate(tqpair: *mut spdk_nvmf_tcp_qpair, fatal: Fatal, header_bytes: usize) {
    // SAFETY: by contract.
    unsafe {
        super::log(&format!(
            "connection from port {} terminated: {:?} at byte {} of the PDU header (type {:#04x})",
            (*tqpair).initiator_port,
            fatal.fes,
            fatal.fei,
            (*(*tqpair).pdu_in_progress).hdr.common().pdu_type,
        ));
        let pdu = (*tqpair).term_pdu;
        let offender = (*(*tqpair).pdu_in_progress).hdr;
        (*pdu).hdr = nvme_tcp_pdu_hdr::for_c2h_term_req(fatal, &offender, header_bytes);
        (*pdu).data_len = 0;
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_QUIESCING;
        (*tqpair).qpair.state = spdk_nvmf_qpair_state::SPDK_NVMF_QPAIR_ERROR;
        (*tqpair).wait_terminate = true;
        reactor(tqpair).hang_up_at(now_ns() + HANG_UP_NS, (*tqpair).id);
        nvmf_tcp_qpair_write_pdu(tqpair, pdu, term_req_sent, tqpair.cast());
    }
}

unsafe extern "C" fn term_req_sent(cb_arg: *mut c_void, _err: c_int) {
    let tqpair: *mut spdk_nvmf_tcp_qpair = cb_arg.cast();
    // SAFETY: called by the flush of this connection's open socket.
    unsafe { libc::shutdown((*posix_sock((*tqpair).sock)).fd, libc::SHUT_WR) };
}

/// A whole PDU header is in.
///
/// # Safety
/// As for [`nvmf_tcp_sock_process`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_pdu_psh_handle(tqpair: *mut spdk_nvmf_tcp_qpair) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let pdu = (*tqpair).pdu_in_progress;
        match (*pdu).hdr.common().pdu_type {
            pdu_type::IC_REQ => ic_req(tqpair, pdu),
            pdu_type::CAPSULE_CMD => {
                (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_REQ;
            }
            pdu_type::H2C_DATA => nvmf_tcp_h2c_data_hdr_handle(tqpair, pdu),
            // The host terminates the connection; `check_common` lets nothing else pass.
            _ => (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_ERROR,
        }
    }
}

/// # Safety
/// As for [`nvmf_tcp_sock_process`].
unsafe fn ic_req(tqpair: *mut spdk_nvmf_tcp_qpair, pdu: *mut nvme_tcp_pdu) {
    // SAFETY: by contract.
    unsafe {
        let req = (*pdu).hdr.ic_req();
        if req.pfv != 0 {
            return terminate(tqpair, Fatal::field(8), 128);
        }
        if req.hpda > 31 {
            return terminate(tqpair, Fatal::field(10), 128);
        }
        (*tqpair).hpda = req.hpda;
        let opts = &(*(*tqpair).qpair.transport).opts;
        let mgmt = (*tqpair).mgmt_pdu;
        (*mgmt).hdr = nvme_tcp_pdu_hdr::for_ic_resp(opts.max_h2c_data);
        (*mgmt).data_len = 0;
        (*tqpair).state = nvmf_tcp_qpair_state::NVMF_TCP_QPAIR_STATE_RUNNING;
        (*tqpair).qpair.state = spdk_nvmf_qpair_state::SPDK_NVMF_QPAIR_CONNECTING;
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY;
        nvmf_tcp_qpair_write_pdu(tqpair, mgmt, ic_resp_sent, tqpair.cast());
    }
}

unsafe extern "C" fn ic_resp_sent(_cb_arg: *mut c_void, _err: c_int) {}

/// A command capsule's header is in, and a request slot is free.
///
/// # Safety
/// As for [`nvmf_tcp_sock_process`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_capsule_cmd_hdr_handle(
    tqpair: *mut spdk_nvmf_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let common = (*pdu).hdr.common();
        let sgl = (*pdu).hdr.capsule_cmd().ccsqe.dptr;
        let in_capsule = if common.plen > 72 { common.plen - u32::from(common.pdo) } else { 0 };
        // What follows the header and what the SGL says have to agree, else the stream is lost.
        let announced = if sgl.kind == SGL_IN_CAPSULE { sgl.length } else { 0 };
        if announced != in_capsule {
            return terminate(tqpair, Fatal::field(if in_capsule == 0 { 40 } else { 4 }), 72);
        }
        let Some(tcp_req) = (*tqpair).tcp_req_free_queue.pop_front() else {
            return;
        };
        (*tqpair).qpair.queue_depth += 1;
        (*tcp_req).state = State::TCP_REQUEST_STATE_NEW;
        (*pdu).req = tcp_req.cast();
        nvmf_tcp_req_process((*tqpair).qpair.transport, tcp_req);

        (*tqpair).recv_state = if in_capsule > 0 {
            if (*tcp_req).state != State::TCP_REQUEST_STATE_TRANSFERRING_HOST_TO_CONTROLLER {
                // Refused, or a command that takes no data: its data cannot be placed anywhere.
                return terminate(tqpair, Fatal::status(FatalStatus::DataLimitExceeded), 72);
            }
            (*pdu).data_len = in_capsule;
            (*pdu).padding_len = u32::from(common.pdo) - 72;
            (*pdu).data_iov = (*tcp_req).req.iov[0];
            Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PAYLOAD
        } else {
            Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY
        };
    }
}

/// An H2CData header is in: finds the request that asked for it.
///
/// # Safety
/// As for [`nvmf_tcp_sock_process`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_tcp_h2c_data_hdr_handle(
    tqpair: *mut spdk_nvmf_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
) {
    probe_entry!();
    // SAFETY: by contract; the slot's index is checked.
    unsafe {
        let hdr = (*pdu).hdr.h2c_data();
        let slot = u32::from(hdr.ttag).wrapping_sub(1);
        if slot >= (*tqpair).resource_count {
            return terminate(tqpair, Fatal::field(10), 24);
        }
        let tcp_req = (*tqpair).reqs.add(slot as usize);
        let waits = (*tcp_req).state == State::TCP_REQUEST_STATE_TRANSFERRING_HOST_TO_CONTROLLER
            && !(*tcp_req).has_in_capsule_data;
        if !waits {
            return terminate(tqpair, Fatal::field(10), 24);
        }
        if (*tcp_req).cmd.nvme_cmd().cid != hdr.cccid {
            return terminate(tqpair, Fatal::field(8), 24);
        }
        let payload = hdr.common.plen.checked_sub(u32::from(hdr.common.pdo));
        if payload != Some(hdr.datal) || hdr.datal == 0 {
            return terminate(tqpair, Fatal::field(16), 24);
        }
        let end = hdr.datao.checked_add(hdr.datal);
        if hdr.datao != (*tcp_req).h2c_offset || end.is_none_or(|e| e > (*tcp_req).r2t_end) {
            return terminate(tqpair, Fatal::status(FatalStatus::DataOutOfRange), 24);
        }
        (*pdu).req = tcp_req.cast();
        (*pdu).data_len = hdr.datal;
        (*pdu).padding_len = u32::from(hdr.common.pdo) - 24;
        (*pdu).data_iov = libc::iovec {
            iov_base: (*tcp_req).req.iov[0].iov_base.cast::<u8>().add(hdr.datao as usize).cast(),
            iov_len: hdr.datal as usize,
        };
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PAYLOAD;
    }
}

/// The payload of one PDU is in.
///
/// # Safety
/// As for [`nvmf_tcp_sock_process`]; `pdu.req` is the request that it belongs to.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn _nvmf_tcp_pdu_payload_handle(
    tqpair: *mut spdk_nvmf_tcp_qpair,
    pdu: *mut nvme_tcp_pdu,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let tcp_req: *mut spdk_nvmf_tcp_req = (*pdu).req.cast();
        (*tqpair).recv_state = Recv::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY;
        STATS.h2c_bytes.fetch_add(u64::from((*pdu).data_len), Ordering::Relaxed);
        if (*pdu).hdr.common().pdu_type == pdu_type::H2C_DATA {
            (*tcp_req).h2c_offset += (*pdu).data_len;
            if (*tcp_req).h2c_offset < (*tcp_req).r2t_end {
                return;
            }
            if (*tcp_req).h2c_offset < (*tcp_req).req.length {
                nvmf_tcp_send_r2t_pdu(tqpair, tcp_req);
                return;
            }
        }
        (*tcp_req).state = State::TCP_REQUEST_STATE_READY_TO_EXECUTE;
        nvmf_tcp_req_process((*tqpair).qpair.transport, tcp_req);
    }
}
