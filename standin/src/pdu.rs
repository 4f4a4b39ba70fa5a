//! A PDU in flight, sent or received. Shared by target and initiator; knows no state machine.

#![allow(non_camel_case_types, reason = "the names are what debug information is searched for")]
#![allow(dead_code, reason = "some fields exist for a probe to find")]

use std::ffi::c_void;

use crate::sock::xfer_complete_cb;
use crate::wire::nvme_tcp_pdu_hdr;

/// A PDU being sent or received. Its header does not stand first, as nothing may rely on that.
#[repr(C)]
pub(crate) struct nvme_tcp_pdu {
    standin_pad0: [u64; 2],
    /// The request that the PDU belongs to.
    pub(crate) req: *mut c_void,
    pub(crate) data_iov: libc::iovec,
    pub(crate) data_len: u32,
    /// Bytes of payload received so far.
    pub(crate) rw_offset: u32,
    /// Bytes between the header and the payload that are still to be skipped.
    pub(crate) padding_len: u32,
    pub(crate) ch_valid_bytes: u8,
    pub(crate) psh_valid_bytes: u8,
    pub(crate) psh_len: u8,
    standin_pad1: u8,
    pub(crate) hdr: nvme_tcp_pdu_hdr,
    standin_pad2: [u32; 3],
    pub(crate) cb_arg: *mut c_void,
    pub(crate) cb_fn: Option<xfer_complete_cb>,
    pub(crate) qpair: *mut c_void,
}

impl Default for nvme_tcp_pdu {
    fn default() -> Self {
        Self {
            standin_pad0: [0; 2],
            req: std::ptr::null_mut(),
            data_iov: libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
            data_len: 0,
            rw_offset: 0,
            padding_len: 0,
            ch_valid_bytes: 0,
            psh_valid_bytes: 0,
            psh_len: 0,
            standin_pad1: 0,
            hdr: nvme_tcp_pdu_hdr::default(),
            standin_pad2: [0; 3],
            cb_arg: std::ptr::null_mut(),
            cb_fn: None,
            qpair: std::ptr::null_mut(),
        }
    }
}

impl nvme_tcp_pdu {
    /// Empties it for the next PDU to be received.
    pub(crate) fn reset(&mut self) {
        let qpair = self.qpair;
        *self = Self { qpair, ..Self::default() };
    }
}

/// Where a connection stands in receiving a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum nvme_tcp_pdu_recv_state {
    NVME_TCP_PDU_RECV_STATE_ERROR = 2,
    NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_READY = 3,
    NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_CH = 5,
    NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PSH = 8,
    NVME_TCP_PDU_RECV_STATE_AWAIT_REQ = 9,
    NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_PAYLOAD = 12,
    NVME_TCP_PDU_RECV_STATE_QUIESCING = 14,
}
