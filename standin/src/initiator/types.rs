//! The initiator's structures, with the names a probe looks for and a layout of their own.
//!
//! As on the target's side, order and padding differ from SPDK's on purpose; `nvme_tcp_qpair.qpair`
//! stays at offset 0, since SPDK itself casts between the two.

#![allow(non_camel_case_types, reason = "the names are what debug information is searched for")]
#![allow(dead_code, reason = "some fields exist for a probe to find")]

use std::ffi::c_void;

use crate::pdu::{nvme_tcp_pdu, nvme_tcp_pdu_recv_state};
use crate::sock::spdk_sock;
use crate::trid::{NQN_LEN, put_cstr, spdk_nvme_transport_id};
use crate::wire::{spdk_nvme_cmd, spdk_nvme_cpl};

/// Called with a command's completion.
pub(crate) type spdk_nvme_cmd_cb = unsafe extern "C" fn(cb_arg: *mut c_void, cpl: *const spdk_nvme_cpl);

#[repr(C)]
pub(crate) struct spdk_nvme_ctrlr_opts {
    standin_pad0: [u8; 12],
    pub(crate) num_io_queues: u32,
    pub(crate) hostnqn: [u8; NQN_LEN],
    pub(crate) keep_alive_timeout_ms: u32,
}

#[repr(C)]
pub(crate) struct spdk_nvme_ctrlr {
    standin_pad0: [u64; 3],
    pub(crate) opts: spdk_nvme_ctrlr_opts,
    standin_pad1: [u8; 6],
    /// 0 until the admin queue's CONNECT has been answered.
    pub(crate) cntlid: u16,
    pub(crate) trid: spdk_nvme_transport_id,
    pub(crate) adminq: *mut spdk_nvme_qpair,
    /// Most data inside a command capsule of an I/O queue, in bytes.
    pub(crate) ioccsz_bytes: u32,
    pub(crate) max_xfer_size: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum nvme_qpair_state {
    NVME_QPAIR_DISCONNECTED = 2,
    NVME_QPAIR_CONNECTING = 4,
    NVME_QPAIR_CONNECTED = 6,
    NVME_QPAIR_ENABLED = 8,
}

/// Transports; the stand-in has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum spdk_nvme_transport_type {
    SPDK_NVME_TRANSPORT_PCIE = 0x11,
    SPDK_NVME_TRANSPORT_RDMA = 0x12,
    SPDK_NVME_TRANSPORT_TCP = 0x13,
}

#[repr(C)]
pub(crate) struct spdk_nvme_qpair {
    standin_pad0: u32,
    pub(crate) state: nvme_qpair_state,
    pub(crate) num_outstanding_reqs: u32,
    pub(crate) trtype: spdk_nvme_transport_type,
    pub(crate) queue_depth: u16,
    /// The queue's number, 0 for the admin queue.
    pub(crate) id: u16,
    standin_pad1: u64,
    pub(crate) ctrlr: *mut spdk_nvme_ctrlr,
    /// Unused requests.
    pub(crate) free_req: Vec<*mut nvme_request>,
}

#[repr(C)]
pub(crate) struct nvme_tcp_qpair {
    pub(crate) qpair: spdk_nvme_qpair,
    pub(crate) maxr2t: u32,
    pub(crate) maxh2cdata: u32,
    pub(crate) recv_pdu: *mut nvme_tcp_pdu,
    pub(crate) send_pdu: *mut nvme_tcp_pdu,
    pub(crate) tcp_reqs: *mut nvme_tcp_req,
    pub(crate) send_pdus: *mut nvme_tcp_pdu,
    pub(crate) num_entries: u16,
    standin_pad0: [u16; 3],
    pub(crate) recv_state: nvme_tcp_pdu_recv_state,
    /// The last freed is the next used.
    pub(crate) free_reqs: Vec<*mut nvme_tcp_req>,
    pub(crate) sock: *mut spdk_sock,
    pub(crate) ic_done: bool,
    /// Why the queue cannot be used any more.
    pub(crate) failure: Option<String>,
    /// Completions seen by the poll that is running.
    pub(crate) completions: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum nvme_tcp_req_state {
    NVME_TCP_REQ_ACTIVE_R2T = 1,
    NVME_TCP_REQ_FREE = 4,
    NVME_TCP_REQ_ACTIVE = 5,
}

#[repr(C)]
pub(crate) struct nvme_tcp_req {
    pub(crate) tqpair: *mut nvme_tcp_qpair,
    pub(crate) pdu: *mut nvme_tcp_pdu,
    pub(crate) state: nvme_tcp_req_state,
    /// Where the next H2CData begins.
    pub(crate) datao: u32,
    /// Where the next C2HData has to begin.
    pub(crate) expected_datao: u32,
    /// What the R2T asked for and has not been sent.
    pub(crate) r2tl_remain: u32,
    pub(crate) active_r2ts: u32,
    pub(crate) in_capsule_data: bool,
    /// The last PDU that was sent has left.
    pub(crate) send_ack: bool,
    /// The completion has been received.
    pub(crate) data_recv: bool,
    pub(crate) ttag: u16,
    standin_pad0: [u8; 22],
    pub(crate) cid: u16,
    pub(crate) rsp: spdk_nvme_cpl,
    pub(crate) req: *mut nvme_request,
}

#[repr(C)]
pub(crate) struct nvme_request {
    pub(crate) cb_arg: *mut c_void,
    pub(crate) payload_size: u32,
    standin_pad0: u32,
    pub(crate) payload: *mut u8,
    pub(crate) qpair: *mut spdk_nvme_qpair,
    pub(crate) submit_tick: u64,
    /// The request that this is a part of; requests are never split here.
    pub(crate) parent: *mut nvme_request,
    pub(crate) cmd: spdk_nvme_cmd,
    standin_pad1: [u64; 2],
    pub(crate) cb_fn: Option<spdk_nvme_cmd_cb>,
}

impl spdk_nvme_ctrlr {
    pub(crate) fn new(trid: spdk_nvme_transport_id, hostnqn: &str, keep_alive_ms: u32) -> Self {
        let mut this = Self {
            standin_pad0: [0; 3],
            opts: spdk_nvme_ctrlr_opts {
                standin_pad0: [0; 12],
                num_io_queues: 0,
                hostnqn: [0; NQN_LEN],
                keep_alive_timeout_ms: keep_alive_ms,
            },
            standin_pad1: [0; 6],
            cntlid: 0,
            trid,
            adminq: std::ptr::null_mut(),
            ioccsz_bytes: 0,
            max_xfer_size: 0,
        };
        put_cstr(&mut this.opts.hostnqn, hostnqn.as_bytes());
        this
    }
}

impl nvme_tcp_qpair {
    pub(crate) fn new(id: u16, ctrlr: *mut spdk_nvme_ctrlr, sock: *mut spdk_sock) -> Self {
        Self {
            qpair: spdk_nvme_qpair {
                standin_pad0: 0,
                state: nvme_qpair_state::NVME_QPAIR_CONNECTING,
                num_outstanding_reqs: 0,
                trtype: spdk_nvme_transport_type::SPDK_NVME_TRANSPORT_TCP,
                queue_depth: 0,
                id,
                standin_pad1: 0,
                ctrlr,
                free_req: Vec::new(),
            },
            maxr2t: 1,
            maxh2cdata: 0,
            recv_pdu: std::ptr::null_mut(),
            send_pdu: std::ptr::null_mut(),
            tcp_reqs: std::ptr::null_mut(),
            send_pdus: std::ptr::null_mut(),
            num_entries: 0,
            standin_pad0: [0; 3],
            recv_state: nvme_tcp_pdu_recv_state::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY,
            free_reqs: Vec::new(),
            sock,
            ic_done: false,
            failure: None,
            completions: 0,
        }
    }
}

impl nvme_tcp_req {
    pub(crate) fn new(cid: u16, tqpair: *mut nvme_tcp_qpair, pdu: *mut nvme_tcp_pdu) -> Self {
        Self {
            tqpair,
            pdu,
            state: nvme_tcp_req_state::NVME_TCP_REQ_FREE,
            datao: 0,
            expected_datao: 0,
            r2tl_remain: 0,
            active_r2ts: 0,
            in_capsule_data: false,
            send_ack: false,
            data_recv: false,
            ttag: 0,
            standin_pad0: [0; 22],
            cid,
            rsp: spdk_nvme_cpl::default(),
            req: std::ptr::null_mut(),
        }
    }
}

impl nvme_request {
    pub(crate) fn new(qpair: *mut spdk_nvme_qpair) -> Self {
        Self {
            cb_arg: std::ptr::null_mut(),
            payload_size: 0,
            standin_pad0: 0,
            payload: std::ptr::null_mut(),
            qpair,
            submit_tick: 0,
            parent: std::ptr::null_mut(),
            cmd: spdk_nvme_cmd::default(),
            standin_pad1: [0; 2],
            cb_fn: None,
        }
    }
}
