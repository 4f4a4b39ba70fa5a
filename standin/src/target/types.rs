//! The target's structures, with the names a probe looks for and a layout of their own.
//!
//! Every structure is `repr(C)`, so the layout is what stands here; order and padding differ from
//! SPDK's on purpose. Three embeddings stay at offset 0 because SPDK itself casts between them:
//! `spdk_nvmf_tcp_req.req`, `spdk_nvmf_tcp_qpair.qpair`, `spdk_nvmf_tcp_poll_group.group`.
//! Enumerators keep their names and have other numbers.

#![allow(non_camel_case_types, reason = "the names are what debug information is searched for")]
#![allow(dead_code, reason = "some fields exist for a probe to find")]

use std::collections::VecDeque;
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, RwLock};

use crate::pdu::{nvme_tcp_pdu, nvme_tcp_pdu_recv_state};
use crate::sock::spdk_sock;
use crate::wire::{spdk_nvme_cmd, spdk_nvme_cpl};

use crate::trid::{NQN_LEN, put_cstr, spdk_nvme_transport_id};

use super::reactor::Reactor;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum spdk_nvmf_tcp_req_state {
    TCP_REQUEST_STATE_COMPLETED = 3,
    TCP_REQUEST_STATE_FREE = 4,
    TCP_REQUEST_STATE_EXECUTED = 7,
    TCP_REQUEST_STATE_NEW = 10,
    TCP_REQUEST_STATE_NEED_BUFFER = 11,
    TCP_REQUEST_STATE_HAVE_BUFFER = 12,
    TCP_REQUEST_STATE_AWAITING_R2T_ACK = 16,
    TCP_REQUEST_STATE_TRANSFERRING_HOST_TO_CONTROLLER = 17,
    TCP_REQUEST_STATE_READY_TO_EXECUTE = 20,
    TCP_REQUEST_STATE_EXECUTING = 21,
    TCP_REQUEST_STATE_READY_TO_COMPLETE = 25,
    TCP_REQUEST_STATE_TRANSFERRING_CONTROLLER_TO_HOST = 26,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum spdk_nvmf_qpair_state {
    SPDK_NVMF_QPAIR_ERROR = 1,
    SPDK_NVMF_QPAIR_UNINITIALIZED = 2,
    SPDK_NVMF_QPAIR_CONNECTING = 4,
    SPDK_NVMF_QPAIR_ENABLED = 6,
    SPDK_NVMF_QPAIR_DEACTIVATING = 8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum nvmf_tcp_qpair_state {
    NVMF_TCP_QPAIR_STATE_EXITED = 1,
    NVMF_TCP_QPAIR_STATE_INITIALIZING = 3,
    NVMF_TCP_QPAIR_STATE_RUNNING = 5,
    NVMF_TCP_QPAIR_STATE_EXITING = 7,
}

/// Subsystem states. These numbers are the ones that the USDT probes pass, so they are SPDK's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum spdk_nvmf_subsystem_state {
    SPDK_NVMF_SUBSYSTEM_INACTIVE = 0,
    SPDK_NVMF_SUBSYSTEM_ACTIVATING = 1,
    SPDK_NVMF_SUBSYSTEM_ACTIVE = 2,
    SPDK_NVMF_SUBSYSTEM_PAUSING = 3,
    SPDK_NVMF_SUBSYSTEM_PAUSED = 4,
    SPDK_NVMF_SUBSYSTEM_RESUMING = 5,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum spdk_bdev_io_type {
    SPDK_BDEV_IO_TYPE_READ = 1,
    SPDK_BDEV_IO_TYPE_WRITE = 2,
    SPDK_BDEV_IO_TYPE_UNMAP = 3,
    SPDK_BDEV_IO_TYPE_FLUSH = 4,
    SPDK_BDEV_IO_TYPE_WRITE_ZEROES = 9,
    SPDK_BDEV_IO_TYPE_COMPARE = 13,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union nvmf_h2c_msg {
    pub(crate) nvme_cmd: spdk_nvme_cmd,
    pub(crate) connect_cmd: spdk_nvmf_fabric_connect_cmd,
}

impl nvmf_h2c_msg {
    pub(crate) fn nvme_cmd(&self) -> spdk_nvme_cmd {
        // SAFETY: both members are 64 plain bytes.
        unsafe { self.nvme_cmd }
    }
    pub(crate) fn connect_cmd(&self) -> spdk_nvmf_fabric_connect_cmd {
        // SAFETY: both members are 64 plain bytes.
        unsafe { self.connect_cmd }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct spdk_nvmf_fabric_connect_cmd {
    pub(crate) opcode: u8,
    pub(crate) reserved1: u8,
    pub(crate) cid: u16,
    pub(crate) fctype: u8,
    pub(crate) reserved2: [u8; 19],
    pub(crate) sgl1: [u8; 16],
    pub(crate) recfmt: u16,
    pub(crate) qid: u16,
    pub(crate) sqsize: u16,
    pub(crate) cattr: u8,
    pub(crate) reserved3: u8,
    pub(crate) kato: u32,
    pub(crate) reserved4: [u8; 12],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union nvmf_c2h_msg {
    pub(crate) nvme_cpl: spdk_nvme_cpl,
}

impl nvmf_c2h_msg {
    pub(crate) fn nvme_cpl(&self) -> spdk_nvme_cpl {
        // SAFETY: the only member.
        unsafe { self.nvme_cpl }
    }
}

#[repr(C)]
pub(crate) struct spdk_nvmf_request {
    pub(crate) rsp: *mut nvmf_c2h_msg,
    standin_pad0: u32,
    /// Bytes of data that the command moves.
    pub(crate) length: u32,
    pub(crate) iov: [libc::iovec; 1],
    pub(crate) iovcnt: u8,
    /// One of [`crate::wire::spdk_nvme_data_transfer`].
    pub(crate) xfer: u8,
    standin_pad1: [u8; 22],
    pub(crate) cmd: *mut nvmf_h2c_msg,
    pub(crate) timeout_tsc: u64,
    pub(crate) qpair: *mut spdk_nvmf_qpair,
    pub(crate) zcopy_bdev_io: *mut spdk_bdev_io,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_tcp_req {
    pub(crate) req: spdk_nvmf_request,
    pub(crate) ttag: u16,
    pub(crate) has_in_capsule_data: bool,
    pub(crate) pdu_in_use: bool,
    /// Where the next H2CData has to begin.
    pub(crate) h2c_offset: u32,
    standin_pad0: [u64; 3],
    pub(crate) cmd: nvmf_h2c_msg,
    pub(crate) rsp: nvmf_c2h_msg,
    pub(crate) state: spdk_nvmf_tcp_req_state,
    /// Where the R2T that is being answered ends.
    pub(crate) r2t_end: u32,
    pub(crate) pdu: *mut nvme_tcp_pdu,
    /// Data buffer; grows to the largest command that the slot has seen.
    pub(crate) buf: Vec<u8>,
    /// It has one of the reactor's buffers to give back.
    pub(crate) holds_buffer: bool,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_qpair {
    pub(crate) group: *mut spdk_nvmf_poll_group,
    pub(crate) queue_depth: u16,
    pub(crate) sq_head: u16,
    pub(crate) sq_head_max: u16,
    standin_pad0: [u16; 3],
    pub(crate) ctrlr: *mut spdk_nvmf_ctrlr,
    standin_pad1: [u64; 2],
    pub(crate) state: spdk_nvmf_qpair_state,
    pub(crate) qid: u16,
    pub(crate) connect_received: bool,
    pub(crate) disconnect_started: bool,
    /// The host asked for no SQ flow control in its CONNECT.
    pub(crate) sq_flow_control_disabled: bool,
    pub(crate) transport: *mut spdk_nvmf_transport,
    pub(crate) trace_id: u16,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_tcp_qpair {
    pub(crate) qpair: spdk_nvmf_qpair,
    pub(crate) target_port: u16,
    pub(crate) initiator_port: u16,
    pub(crate) recv_state: nvme_tcp_pdu_recv_state,
    pub(crate) reqs: *mut spdk_nvmf_tcp_req,
    pub(crate) pdus: *mut nvme_tcp_pdu,
    pub(crate) resource_count: u32,
    pub(crate) cpda: u8,
    pub(crate) hpda: u8,
    pub(crate) state: nvmf_tcp_qpair_state,
    pub(crate) target_addr: [u8; 256],
    standin_pad0: [u8; 40],
    pub(crate) initiator_addr: [u8; 256],
    pub(crate) mgmt_pdu: *mut nvme_tcp_pdu,
    pub(crate) term_pdu: *mut nvme_tcp_pdu,
    /// The PDU being received; it holds the SQE when a request is NEW.
    pub(crate) pdu_in_progress: *mut nvme_tcp_pdu,
    standin_pad1: u64,
    pub(crate) sock: *mut spdk_sock,
    pub(crate) group: *mut spdk_nvmf_tcp_poll_group,
    /// Free slots, used in turn.
    pub(crate) tcp_req_free_queue: VecDeque<*mut spdk_nvmf_tcp_req>,
    /// The connection's number inside its reactor, never used twice.
    pub(crate) id: u64,
    /// What the descriptor is polled for.
    pub(crate) epoll_mask: u32,
    /// On the reactor's list of sockets to flush.
    pub(crate) pending_flush: bool,
    pub(crate) wait_terminate: bool,
    pub(crate) sock_closed: bool,
}

#[repr(C)]
pub(crate) struct spdk_thread {
    standin_pad0: [u64; 3],
    pub(crate) id: u64,
    standin_pad1: u32,
    pub(crate) name: [u8; 64],
}

#[repr(C)]
pub(crate) struct spdk_nvmf_poll_group {
    standin_pad0: u64,
    pub(crate) thread: *mut spdk_thread,
    pub(crate) reactor: *const Reactor,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_tcp_poll_group {
    pub(crate) group: spdk_nvmf_poll_group,
    pub(crate) ch: *mut spdk_io_channel,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_transport {
    standin_pad0: u32,
    pub(crate) opts: spdk_nvmf_transport_opts,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvmf_transport_opts {
    pub(crate) max_io_size: u32,
    pub(crate) in_capsule_data_size: u32,
    pub(crate) max_queue_depth: u16,
    pub(crate) max_qpairs_per_ctrlr: u16,
    pub(crate) max_h2c_data: u32,
    pub(crate) r2t_bytes: u32,
    pub(crate) c2h_success: bool,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_ctrlr {
    standin_pad0: u64,
    pub(crate) listener: *const spdk_nvmf_subsystem_listener,
    pub(crate) subsys: *mut spdk_nvmf_subsystem,
    /// Atomic, since I/O queues on other reactors look at CC while they connect.
    pub(crate) cc: AtomicU32,
    pub(crate) csts: AtomicU32,
    pub(crate) kato_ms: AtomicU32,
    /// I/O queues that the host may connect.
    pub(crate) number_of_queues: AtomicU32,
    /// When the host was last heard of, CLOCK_MONOTONIC nanoseconds.
    pub(crate) last_keep_alive: AtomicU64,
    standin_pad1: [u16; 7],
    pub(crate) cntlid: u16,
    pub(crate) hostid: [u8; 16],
    standin_pad2: [u8; 12],
    pub(crate) hostnqn: [u8; NQN_LEN],
    pub(crate) admin_qpair: *mut spdk_nvmf_qpair,
    pub(crate) thread: *mut spdk_thread,
    /// What only the admin queue's reactor touches.
    pub(crate) admin: AdminState,
    /// Tells this controller from every other one of the process.
    pub(crate) uid: u64,
    /// Queues that hold this controller, bit by qid; guarded by the subsystem's lock.
    pub(crate) qpair_mask: [u64; 4],
    pub(crate) qpair_count: u32,
    /// The admin queue is gone: no further queue may join.
    pub(crate) in_destruct: bool,
}

/// State of a controller's admin commands.
#[derive(Default)]
pub(crate) struct AdminState {
    pub(crate) aer_req: Vec<*mut spdk_nvmf_request>,
    pub(crate) async_event_config: u32,
    pub(crate) host_behaviour: Vec<u8>,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_subsystem_listener {
    standin_pad0: u64,
    pub(crate) trid: *mut spdk_nvme_transport_id,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_ns {
    standin_pad0: u32,
    pub(crate) nsid: u32,
    pub(crate) anagrpid: u32,
    pub(crate) uuid: [u8; 16],
    pub(crate) bdev: *mut spdk_bdev,
}

#[repr(C)]
pub(crate) struct spdk_nvmf_subsystem {
    pub(crate) id: u32,
    standin_pad0: [u8; 20],
    pub(crate) subnqn: [u8; NQN_LEN],
    pub(crate) ns: *mut *mut spdk_nvmf_ns,
    pub(crate) max_nsid: u32,
    /// One of [`spdk_nvmf_subsystem_state`].
    pub(crate) state: AtomicU32,
    pub(crate) serial: [u8; 20],
    pub(crate) ctrlrs: Mutex<Controllers>,
}

/// The controllers of a subsystem.
#[derive(Default)]
pub(crate) struct Controllers {
    pub(crate) live: Vec<*mut spdk_nvmf_ctrlr>,
    pub(crate) next_cntlid: u16,
}

#[repr(C)]
pub(crate) struct spdk_bdev {
    pub(crate) blockcnt: u64,
    standin_pad0: [u32; 3],
    pub(crate) blocklen: u32,
    standin_pad1: u64,
    /// Zero-terminated.
    pub(crate) name: *mut c_char,
    /// Memory, in pieces that exist once they have been written; empty for the null back end.
    pub(crate) store: Vec<RwLock<Option<Box<[u8]>>>>,
}

#[repr(C)]
pub(crate) struct spdk_bdev_desc {
    standin_pad0: u32,
    pub(crate) write: bool,
    pub(crate) bdev: *mut spdk_bdev,
}

#[repr(C)]
pub(crate) struct spdk_io_channel {
    standin_pad0: u64,
    pub(crate) reactor: *const Reactor,
}

pub(crate) type spdk_bdev_io_completion_cb =
    unsafe extern "C" fn(bdev_io: *mut spdk_bdev_io, success: bool, cb_arg: *mut c_void);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct spdk_bdev_io_block_params {
    pub(crate) num_blocks: u64,
    pub(crate) iovs: *mut libc::iovec,
    pub(crate) iovcnt: i32,
    pub(crate) offset_blocks: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union spdk_bdev_io_params {
    pub(crate) bdev: spdk_bdev_io_block_params,
    pub(crate) raw: [u64; 6],
}

#[repr(C)]
pub(crate) struct spdk_bdev_io_internal_fields {
    pub(crate) submit_tsc: u64,
    pub(crate) caller_ctx: *mut c_void,
    pub(crate) cb: Option<spdk_bdev_io_completion_cb>,
    pub(crate) ch: *mut spdk_io_channel,
    pub(crate) status: i8,
    /// The comparison found a difference.
    pub(crate) miscompare: bool,
}

#[repr(C)]
pub(crate) struct spdk_bdev_io {
    standin_pad0: [u64; 2],
    pub(crate) internal: spdk_bdev_io_internal_fields,
    pub(crate) u: spdk_bdev_io_params,
    standin_pad1: u32,
    pub(crate) r#type: spdk_bdev_io_type,
    standin_pad2: [u8; 51],
    pub(crate) bdev: *mut spdk_bdev,
}

impl spdk_thread {
    pub(crate) fn new(id: u64, name: &str) -> Self {
        let mut field = [0; 64];
        let n = name.len().min(63);
        field[..n].copy_from_slice(&name.as_bytes()[..n]);
        Self { standin_pad0: [0; 3], id, standin_pad1: 0, name: field }
    }
}

impl spdk_io_channel {
    pub(crate) fn new(reactor: *const Reactor) -> Self {
        Self { standin_pad0: 0, reactor }
    }
}

impl spdk_nvmf_poll_group {
    pub(crate) fn new(thread: *mut spdk_thread, reactor: *const Reactor) -> Self {
        Self { standin_pad0: 0, thread, reactor }
    }
}

impl spdk_nvmf_transport {
    pub(crate) fn new(opts: spdk_nvmf_transport_opts) -> Self {
        Self { standin_pad0: 0, opts }
    }
}

impl spdk_bdev {
    pub(crate) fn with(
        name: *mut c_char,
        blockcnt: u64,
        blocklen: u32,
        store: Vec<RwLock<Option<Box<[u8]>>>>,
    ) -> Self {
        Self { blockcnt, standin_pad0: [0; 3], blocklen, standin_pad1: 0, name, store }
    }
}

impl spdk_bdev_desc {
    pub(crate) fn open(bdev: *mut spdk_bdev) -> Self {
        Self { standin_pad0: 0, write: true, bdev }
    }
}

impl spdk_bdev_io {
    pub(crate) fn empty() -> Self {
        Self {
            standin_pad0: [0; 2],
            internal: spdk_bdev_io_internal_fields {
                submit_tsc: 0,
                caller_ctx: std::ptr::null_mut(),
                cb: None,
                ch: std::ptr::null_mut(),
                status: 0,
                miscompare: false,
            },
            u: spdk_bdev_io_params { raw: [0; 6] },
            standin_pad1: 0,
            r#type: spdk_bdev_io_type::SPDK_BDEV_IO_TYPE_READ,
            standin_pad2: [0; 51],
            bdev: std::ptr::null_mut(),
        }
    }
}

impl spdk_nvmf_subsystem_listener {
    pub(crate) fn new(trid: *mut spdk_nvme_transport_id) -> Self {
        Self { standin_pad0: 0, trid }
    }
}

impl spdk_nvmf_ns {
    pub(crate) fn new(nsid: u32, uuid: [u8; 16], bdev: *mut spdk_bdev) -> Self {
        Self { standin_pad0: 0, nsid, anagrpid: 1, uuid, bdev }
    }
}

impl spdk_nvmf_subsystem {
    /// Takes the array of namespaces, which lives as long as the process.
    pub(crate) fn new(id: u32, nqn: &str, serial: &str, namespaces: Vec<*mut spdk_nvmf_ns>) -> Self {
        let mut this = Self {
            id,
            standin_pad0: [0; 20],
            subnqn: [0; NQN_LEN],
            max_nsid: namespaces.len() as u32,
            ns: Box::leak(namespaces.into_boxed_slice()).as_mut_ptr(),
            state: AtomicU32::new(spdk_nvmf_subsystem_state::SPDK_NVMF_SUBSYSTEM_INACTIVE as u32),
            serial: [b' '; 20],
            ctrlrs: Mutex::default(),
        };
        put_cstr(&mut this.subnqn, nqn.as_bytes());
        let n = serial.len().min(20);
        this.serial[..n].copy_from_slice(&serial.as_bytes()[..n]);
        this
    }
}

impl spdk_nvmf_ctrlr {
    pub(crate) fn new(
        cntlid: u16,
        subsys: *mut spdk_nvmf_subsystem,
        listener: *const spdk_nvmf_subsystem_listener,
        uid: u64,
    ) -> Self {
        Self {
            standin_pad0: 0,
            listener,
            subsys,
            cc: AtomicU32::new(0),
            csts: AtomicU32::new(0),
            kato_ms: AtomicU32::new(0),
            number_of_queues: AtomicU32::new(1),
            last_keep_alive: AtomicU64::new(0),
            standin_pad1: [0; 7],
            cntlid,
            hostid: [0; 16],
            standin_pad2: [0; 12],
            hostnqn: [0; NQN_LEN],
            admin_qpair: std::ptr::null_mut(),
            thread: std::ptr::null_mut(),
            admin: AdminState::default(),
            uid,
            qpair_mask: [0; 4],
            qpair_count: 0,
            in_destruct: false,
        }
    }
}

impl spdk_nvmf_tcp_req {
    pub(crate) fn new(ttag: u16, qpair: *mut spdk_nvmf_qpair, pdu: *mut nvme_tcp_pdu) -> Self {
        Self {
            req: spdk_nvmf_request {
                rsp: std::ptr::null_mut(),
                standin_pad0: 0,
                length: 0,
                iov: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }],
                iovcnt: 0,
                xfer: 0,
                standin_pad1: [0; 22],
                cmd: std::ptr::null_mut(),
                timeout_tsc: 0,
                qpair,
                zcopy_bdev_io: std::ptr::null_mut(),
            },
            ttag,
            has_in_capsule_data: false,
            pdu_in_use: false,
            h2c_offset: 0,
            standin_pad0: [0; 3],
            cmd: nvmf_h2c_msg { nvme_cmd: spdk_nvme_cmd::default() },
            rsp: nvmf_c2h_msg { nvme_cpl: spdk_nvme_cpl::default() },
            state: spdk_nvmf_tcp_req_state::TCP_REQUEST_STATE_FREE,
            r2t_end: 0,
            pdu,
            buf: Vec::new(),
            holds_buffer: false,
        }
    }
}

impl spdk_nvmf_tcp_qpair {
    pub(crate) fn new(
        id: u64,
        group: *mut spdk_nvmf_tcp_poll_group,
        transport: *mut spdk_nvmf_transport,
        sock: *mut spdk_sock,
    ) -> Self {
        Self {
            qpair: spdk_nvmf_qpair {
                group: group.cast(),
                queue_depth: 0,
                sq_head: 0,
                sq_head_max: 0,
                standin_pad0: [0; 3],
                ctrlr: std::ptr::null_mut(),
                standin_pad1: [0; 2],
                state: spdk_nvmf_qpair_state::SPDK_NVMF_QPAIR_UNINITIALIZED,
                qid: 0,
                connect_received: false,
                disconnect_started: false,
                sq_flow_control_disabled: false,
                transport,
                trace_id: 0,
            },
            target_port: 0,
            initiator_port: 0,
            recv_state: nvme_tcp_pdu_recv_state::NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY,
            reqs: std::ptr::null_mut(),
            pdus: std::ptr::null_mut(),
            resource_count: 0,
            cpda: 0,
            hpda: 0,
            state: nvmf_tcp_qpair_state::NVMF_TCP_QPAIR_STATE_INITIALIZING,
            target_addr: [0; 256],
            standin_pad0: [0; 40],
            initiator_addr: [0; 256],
            mgmt_pdu: std::ptr::null_mut(),
            term_pdu: std::ptr::null_mut(),
            pdu_in_progress: std::ptr::null_mut(),
            standin_pad1: 0,
            sock,
            group,
            tcp_req_free_queue: VecDeque::new(),
            id,
            epoll_mask: libc::EPOLLIN as u32,
            pending_flush: false,
            wait_terminate: false,
            sock_closed: false,
        }
    }
}
