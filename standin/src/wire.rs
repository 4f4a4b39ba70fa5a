//! The bytes of NVMe and NVMe/TCP: PDU headers, submission and completion queue entries, and the
//! checks that a received PDU header must pass. Pure: it neither reads nor writes a socket.
//!
//! Layouts are those of the NVM Express NVMe/TCP Transport Specification 1.0 (section 3.6) and of
//! the NVM Express Base Specification. The type and field names are the ones a probe looks for.
//! Where C code has bit-fields (the first bytes of the SQE, the status of the CQE), these types
//! have the whole byte or word.

#![allow(non_camel_case_types, reason = "the names are what debug information is searched for")]
#![allow(dead_code, reason = "fields stand for bytes on the wire, whether or not this side reads them")]

#[cfg(target_endian = "big")]
compile_error!("the stand-in lays NVMe structures over memory and needs a little-endian machine");

/// PDU types, NVMe/TCP section 3.6.
pub(crate) mod pdu_type {
    pub(crate) const IC_REQ: u8 = 0x00;
    pub(crate) const IC_RESP: u8 = 0x01;
    pub(crate) const H2C_TERM_REQ: u8 = 0x02;
    pub(crate) const C2H_TERM_REQ: u8 = 0x03;
    pub(crate) const CAPSULE_CMD: u8 = 0x04;
    pub(crate) const CAPSULE_RESP: u8 = 0x05;
    pub(crate) const H2C_DATA: u8 = 0x06;
    pub(crate) const C2H_DATA: u8 = 0x07;
    pub(crate) const R2T: u8 = 0x09;
}

/// Flag bits of the common header.
pub(crate) mod pdu_flag {
    pub(crate) const HDGST: u8 = 1 << 0;
    pub(crate) const DDGST: u8 = 1 << 1;
    pub(crate) const DATA_LAST: u8 = 1 << 2;
    pub(crate) const DATA_SUCCESS: u8 = 1 << 3;
}

/// Command opcodes of the three command sets that the stand-in speaks.
pub(crate) mod opc {
    pub(crate) const FABRIC: u8 = 0x7f;

    pub(crate) const FLUSH: u8 = 0x00;
    pub(crate) const WRITE: u8 = 0x01;
    pub(crate) const READ: u8 = 0x02;
    pub(crate) const COMPARE: u8 = 0x05;
    pub(crate) const WRITE_ZEROES: u8 = 0x08;
    pub(crate) const DATASET_MANAGEMENT: u8 = 0x09;

    pub(crate) const GET_LOG_PAGE: u8 = 0x02;
    pub(crate) const IDENTIFY: u8 = 0x06;
    pub(crate) const ABORT: u8 = 0x08;
    pub(crate) const SET_FEATURES: u8 = 0x09;
    pub(crate) const GET_FEATURES: u8 = 0x0a;
    pub(crate) const ASYNC_EVENT_REQUEST: u8 = 0x0c;
    pub(crate) const KEEP_ALIVE: u8 = 0x18;
}

/// Fabrics command types.
pub(crate) mod fctype {
    pub(crate) const PROPERTY_SET: u8 = 0x00;
    pub(crate) const CONNECT: u8 = 0x01;
    pub(crate) const PROPERTY_GET: u8 = 0x04;
}

/// Controller property offsets.
pub(crate) mod property {
    pub(crate) const CAP: u32 = 0x00;
    pub(crate) const VS: u32 = 0x08;
    pub(crate) const CC: u32 = 0x14;
    pub(crate) const CSTS: u32 = 0x1c;
}

/// An NVMe status: status code type and status code. Do Not Retry is set on every error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) sct: u8,
    pub(crate) sc: u8,
}

impl Status {
    const fn generic(sc: u8) -> Self {
        Self { sct: 0, sc }
    }
    const fn specific(sc: u8) -> Self {
        Self { sct: 1, sc }
    }
    pub(crate) const SUCCESS: Self = Self::generic(0x00);
    pub(crate) const INVALID_OPCODE: Self = Self::generic(0x01);
    pub(crate) const INVALID_FIELD: Self = Self::generic(0x02);
    pub(crate) const INTERNAL_ERROR: Self = Self::generic(0x06);
    pub(crate) const INVALID_NAMESPACE: Self = Self::generic(0x0b);
    pub(crate) const SEQUENCE_ERROR: Self = Self::generic(0x0c);
    pub(crate) const SGL_LENGTH_INVALID: Self = Self::generic(0x0f);
    pub(crate) const SGL_TYPE_INVALID: Self = Self::generic(0x11);
    pub(crate) const SGL_OFFSET_INVALID: Self = Self::generic(0x16);
    pub(crate) const LBA_OUT_OF_RANGE: Self = Self::generic(0x80);
    pub(crate) const AER_LIMIT_EXCEEDED: Self = Self::specific(0x05);
    pub(crate) const INVALID_LOG_PAGE: Self = Self::specific(0x09);
    pub(crate) const CONNECT_INCOMPATIBLE_FORMAT: Self = Self::specific(0x80);
    pub(crate) const CONNECT_CONTROLLER_BUSY: Self = Self::specific(0x81);
    pub(crate) const CONNECT_INVALID_PARAMETERS: Self = Self::specific(0x82);
    pub(crate) const CONNECT_INVALID_HOST: Self = Self::specific(0x84);
    pub(crate) const COMPARE_FAILURE: Self = Self { sct: 2, sc: 0x85 };

    /// The status word of a CQE, phase bit zero (fabrics have none).
    pub(crate) fn word(self) -> u16 {
        let dnr = if self == Self::SUCCESS { 0 } else { 1 << 15 };
        dnr | (u16::from(self.sct) << 9) | (u16::from(self.sc) << 1)
    }

    /// The status in a CQE's status word.
    pub(crate) fn from_word(word: u16) -> Self {
        Self { sct: ((word >> 9) & 7) as u8, sc: ((word >> 1) & 0xff) as u8 }
    }
}

/// Submission queue entry, 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct spdk_nvme_cmd {
    pub(crate) opc: u8,
    /// Bits 1:0 fused operation, bits 7:6 PRP or SGL.
    pub(crate) fuse_psdt: u8,
    pub(crate) cid: u16,
    /// For a fabrics command the first byte is the fabrics command type.
    pub(crate) nsid: u32,
    pub(crate) rsvd2: u32,
    pub(crate) rsvd3: u32,
    pub(crate) mptr: u64,
    pub(crate) dptr: spdk_nvme_sgl_descriptor,
    pub(crate) cdw10: u32,
    pub(crate) cdw11: u32,
    pub(crate) cdw12: u32,
    pub(crate) cdw13: u32,
    pub(crate) cdw14: u32,
    pub(crate) cdw15: u32,
}

/// The direction in which a command moves data: the two low bits of its opcode (of the command
/// type for fabrics commands).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum spdk_nvme_data_transfer {
    SPDK_NVME_DATA_NONE = 0,
    SPDK_NVME_DATA_HOST_TO_CONTROLLER = 1,
    SPDK_NVME_DATA_CONTROLLER_TO_HOST = 2,
    SPDK_NVME_DATA_BIDIRECTIONAL = 3,
}

impl spdk_nvme_cmd {
    pub(crate) fn fctype(&self) -> u8 {
        (self.nsid & 0xff) as u8
    }
    /// The direction as opcode or fabrics command type says it. Flush and the like carry none.
    pub(crate) fn transfer(&self) -> spdk_nvme_data_transfer {
        let code = if self.opc == opc::FABRIC { self.fctype() } else { self.opc };
        match code & 3 {
            0 => spdk_nvme_data_transfer::SPDK_NVME_DATA_NONE,
            1 => spdk_nvme_data_transfer::SPDK_NVME_DATA_HOST_TO_CONTROLLER,
            2 => spdk_nvme_data_transfer::SPDK_NVME_DATA_CONTROLLER_TO_HOST,
            _ => spdk_nvme_data_transfer::SPDK_NVME_DATA_BIDIRECTIONAL,
        }
    }
    pub(crate) fn slba(&self) -> u64 {
        u64::from(self.cdw10) | (u64::from(self.cdw11) << 32)
    }
    /// Number of logical blocks, counted from one.
    pub(crate) fn nlb(&self) -> u32 {
        (self.cdw12 & 0xffff) + 1
    }
}

/// SGL descriptor, 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct spdk_nvme_sgl_descriptor {
    /// Address, or the offset inside the capsule.
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) rsvd: [u8; 3],
    /// Type in the high four bits, sub-type in the low four.
    pub(crate) kind: u8,
}

/// SGL descriptor kind: data block, sub-type offset (data inside the capsule).
pub(crate) const SGL_IN_CAPSULE: u8 = 0x01;
/// SGL descriptor kind: transport data block.
pub(crate) const SGL_TRANSPORT: u8 = 0x5a;

/// Completion queue entry, 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct spdk_nvme_cpl {
    pub(crate) cdw0: u32,
    pub(crate) cdw1: u32,
    pub(crate) sqhd: u16,
    pub(crate) sqid: u16,
    pub(crate) cid: u16,
    /// Phase in bit 0, status code in bits 8:1, status code type in bits 11:9.
    pub(crate) status: u16,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct spdk_nvme_tcp_common_pdu_hdr {
    pub(crate) pdu_type: u8,
    pub(crate) flags: u8,
    pub(crate) hlen: u8,
    pub(crate) pdo: u8,
    pub(crate) plen: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvme_tcp_ic_req {
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) pfv: u16,
    pub(crate) hpda: u8,
    pub(crate) dgst: u8,
    pub(crate) maxr2t: u32,
    pub(crate) reserved16: [u8; 112],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvme_tcp_ic_resp {
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) pfv: u16,
    pub(crate) cpda: u8,
    pub(crate) dgst: u8,
    pub(crate) maxh2cdata: u32,
    pub(crate) reserved16: [u8; 112],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvme_tcp_term_req_hdr {
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) fes: u16,
    pub(crate) fei: [u8; 4],
    pub(crate) reserved14: [u8; 10],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvme_tcp_cmd {
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) ccsqe: spdk_nvme_cmd,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvme_tcp_rsp {
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) rccqe: spdk_nvme_cpl,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvme_tcp_h2c_data_hdr {
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) cccid: u16,
    pub(crate) ttag: u16,
    pub(crate) datao: u32,
    pub(crate) datal: u32,
    pub(crate) reserved20: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvme_tcp_c2h_data_hdr {
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) cccid: u16,
    pub(crate) rsvd: u16,
    pub(crate) datao: u32,
    pub(crate) datal: u32,
    pub(crate) reserved20: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct spdk_nvme_tcp_r2t_hdr {
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) cccid: u16,
    pub(crate) ttag: u16,
    pub(crate) r2to: u32,
    pub(crate) r2tl: u32,
    pub(crate) reserved20: u32,
}

/// Largest PDU header: a termination request with the header that it complains about.
pub(crate) const TERM_REQ_MAX: usize = 152;

/// Any PDU header. Every member is plain bytes without padding, so every member may be read
/// whatever was written last.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union nvme_tcp_pdu_hdr {
    pub(crate) raw: [u8; TERM_REQ_MAX],
    pub(crate) common: spdk_nvme_tcp_common_pdu_hdr,
    pub(crate) ic_req: spdk_nvme_tcp_ic_req,
    pub(crate) term_req: spdk_nvme_tcp_term_req_hdr,
    pub(crate) capsule_cmd: spdk_nvme_tcp_cmd,
    pub(crate) h2c_data: spdk_nvme_tcp_h2c_data_hdr,
    pub(crate) ic_resp: spdk_nvme_tcp_ic_resp,
    pub(crate) capsule_resp: spdk_nvme_tcp_rsp,
    pub(crate) c2h_data: spdk_nvme_tcp_c2h_data_hdr,
    pub(crate) r2t: spdk_nvme_tcp_r2t_hdr,
}

impl Default for nvme_tcp_pdu_hdr {
    fn default() -> Self {
        Self { raw: [0; TERM_REQ_MAX] }
    }
}

macro_rules! view {
    ($($name:ident: $type:ty),* $(,)?) => {$(
        pub(crate) fn $name(&self) -> $type {
            // SAFETY: every member of the union is plain bytes, any bit pattern is valid.
            unsafe { self.$name }
        }
    )*};
}

impl nvme_tcp_pdu_hdr {
    view! {
        common: spdk_nvme_tcp_common_pdu_hdr,
        ic_req: spdk_nvme_tcp_ic_req,
        term_req: spdk_nvme_tcp_term_req_hdr,
        capsule_cmd: spdk_nvme_tcp_cmd,
        h2c_data: spdk_nvme_tcp_h2c_data_hdr,
        ic_resp: spdk_nvme_tcp_ic_resp,
        capsule_resp: spdk_nvme_tcp_rsp,
        c2h_data: spdk_nvme_tcp_c2h_data_hdr,
        r2t: spdk_nvme_tcp_r2t_hdr,
    }

    pub(crate) fn bytes(&self) -> &[u8; TERM_REQ_MAX] {
        // SAFETY: as in the views above.
        unsafe { &self.raw }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8; TERM_REQ_MAX] {
        // SAFETY: as in the views above.
        unsafe { &mut self.raw }
    }

    fn zeroed_with(write: impl FnOnce(&mut Self)) -> Self {
        let mut hdr = Self::default();
        write(&mut hdr);
        hdr
    }

    /// A command capsule; `in_capsule` bytes of data follow it.
    pub(crate) fn for_command(ccsqe: spdk_nvme_cmd, in_capsule: u32) -> Self {
        Self::zeroed_with(|hdr| {
            hdr.capsule_cmd = spdk_nvme_tcp_cmd {
                common: common(
                    pdu_type::CAPSULE_CMD,
                    0,
                    72,
                    if in_capsule > 0 { 72 } else { 0 },
                    72 + in_capsule,
                ),
                ccsqe,
            };
        })
    }

    /// A response capsule.
    pub(crate) fn for_response(rccqe: spdk_nvme_cpl) -> Self {
        Self::zeroed_with(|hdr| {
            hdr.capsule_resp =
                spdk_nvme_tcp_rsp { common: common(pdu_type::CAPSULE_RESP, 0, 24, 0, 24), rccqe };
        })
    }

    /// A C2HData header; the data begins `pdo` bytes after the header's first byte.
    pub(crate) fn for_c2h_data(cccid: u16, flags: u8, pdo: u8, datao: u32, datal: u32) -> Self {
        Self::zeroed_with(|hdr| {
            hdr.c2h_data = spdk_nvme_tcp_c2h_data_hdr {
                common: common(pdu_type::C2H_DATA, flags, 24, pdo, u32::from(pdo) + datal),
                cccid,
                rsvd: 0,
                datao,
                datal,
                reserved20: 0,
            };
        })
    }

    /// An H2CData header.
    pub(crate) fn for_h2c_data(cccid: u16, ttag: u16, flags: u8, datao: u32, datal: u32) -> Self {
        Self::zeroed_with(|hdr| {
            hdr.h2c_data = spdk_nvme_tcp_h2c_data_hdr {
                common: common(pdu_type::H2C_DATA, flags, 24, 24, 24 + datal),
                cccid,
                ttag,
                datao,
                datal,
                reserved20: 0,
            };
        })
    }

    /// An R2T.
    pub(crate) fn for_r2t(cccid: u16, ttag: u16, r2to: u32, r2tl: u32) -> Self {
        Self::zeroed_with(|hdr| {
            hdr.r2t = spdk_nvme_tcp_r2t_hdr {
                common: common(pdu_type::R2T, 0, 24, 0, 24),
                cccid,
                ttag,
                r2to,
                r2tl,
                reserved20: 0,
            };
        })
    }

    /// An ICReq with no digests and no alignment wish; `maxr2t` counts from one.
    pub(crate) fn for_ic_req(maxr2t: u32) -> Self {
        Self::zeroed_with(|hdr| {
            hdr.ic_req = spdk_nvme_tcp_ic_req {
                common: common(pdu_type::IC_REQ, 0, 128, 0, 128),
                pfv: 0,
                hpda: 0,
                dgst: 0,
                maxr2t: maxr2t.saturating_sub(1),
                reserved16: [0; 112],
            };
        })
    }

    /// An ICResp that turns both digests off.
    pub(crate) fn for_ic_resp(maxh2cdata: u32) -> Self {
        Self::zeroed_with(|hdr| {
            hdr.ic_resp = spdk_nvme_tcp_ic_resp {
                common: common(pdu_type::IC_RESP, 0, 128, 0, 128),
                pfv: 0,
                cpda: 0,
                dgst: 0,
                maxh2cdata,
                reserved16: [0; 112],
            };
        })
    }

    /// A C2HTermReq that quotes the first `quoted` bytes of the header it complains about.
    pub(crate) fn for_c2h_term_req(fatal: Fatal, offender: &Self, quoted: usize) -> Self {
        let quoted = quoted.min(TERM_REQ_MAX - 24);
        let mut hdr = Self::default();
        hdr.term_req = spdk_nvme_tcp_term_req_hdr {
            common: common(pdu_type::C2H_TERM_REQ, 0, 24, 0, 24 + quoted as u32),
            fes: fatal.fes as u16,
            fei: fatal.fei.to_le_bytes(),
            reserved14: [0; 10],
        };
        hdr.bytes_mut()[24..24 + quoted].copy_from_slice(&offender.bytes()[..quoted]);
        hdr
    }
}

fn common(pdu_type: u8, flags: u8, hlen: u8, pdo: u8, plen: u32) -> spdk_nvme_tcp_common_pdu_hdr {
    spdk_nvme_tcp_common_pdu_hdr { pdu_type, flags, hlen, pdo, plen }
}

/// Fatal error status of a termination request, NVMe/TCP section 3.6.2.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum FatalStatus {
    InvalidHeaderField = 1,
    SequenceError = 2,
    DataOutOfRange = 4,
    DataLimitExceeded = 5,
}

/// Why a connection has to be terminated: the status and the offset of the offending field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fatal {
    pub(crate) fes: FatalStatus,
    pub(crate) fei: u32,
}

impl Fatal {
    pub(crate) fn field(offset: u32) -> Self {
        Self { fes: FatalStatus::InvalidHeaderField, fei: offset }
    }
    pub(crate) fn status(fes: FatalStatus) -> Self {
        Self { fes, fei: 0 }
    }
}

/// Who receives: decides which PDU types may arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// The controller; the number is the most data that a capsule may carry.
    Target {
        /// In bytes.
        in_capsule: u32,
        /// In bytes.
        max_h2c_data: u32,
    },
    /// The host; the number is the most data that one C2HData may carry.
    Host {
        /// In bytes.
        max_c2h_data: u32,
    },
}

/// Checks a common header and says how many bytes the whole header has.
///
/// # Errors
/// What the connection is to be terminated for.
pub(crate) fn check_common(
    hdr: &spdk_nvme_tcp_common_pdu_hdr,
    receiver: Receiver,
    ic_done: bool,
) -> Result<u8, Fatal> {
    use pdu_type::*;
    let (hlen, data_max) = match (receiver, hdr.pdu_type) {
        (Receiver::Target { .. }, IC_REQ) | (Receiver::Host { .. }, IC_RESP) => (128, 0),
        (Receiver::Target { .. }, H2C_TERM_REQ) | (Receiver::Host { .. }, C2H_TERM_REQ) => {
            (24, (TERM_REQ_MAX - 24) as u32)
        }
        (Receiver::Target { in_capsule, .. }, CAPSULE_CMD) => (72, in_capsule),
        (Receiver::Target { max_h2c_data, .. }, H2C_DATA) => (24, max_h2c_data),
        (Receiver::Host { .. }, CAPSULE_RESP) | (Receiver::Host { .. }, R2T) => (24, 0),
        (Receiver::Host { max_c2h_data }, C2H_DATA) => (24, max_c2h_data),
        _ => return Err(Fatal::field(0)),
    };
    let is_ic = matches!(hdr.pdu_type, IC_REQ | IC_RESP);
    let is_term = matches!(hdr.pdu_type, H2C_TERM_REQ | C2H_TERM_REQ);
    if is_ic == ic_done && !is_term {
        return Err(Fatal::status(FatalStatus::SequenceError));
    }
    if hdr.flags & (pdu_flag::HDGST | pdu_flag::DDGST) != 0 {
        // Digests are never agreed to in the ICResp.
        return Err(Fatal::field(1));
    }
    if hdr.hlen != hlen {
        return Err(Fatal::field(2));
    }
    let Some(after_header) = hdr.plen.checked_sub(u32::from(hlen)) else {
        return Err(Fatal::field(4));
    };
    if is_ic || is_term || after_header == 0 {
        if after_header > data_max {
            return Err(Fatal::field(4));
        }
        return Ok(hlen);
    }
    if hdr.pdo < hlen || u32::from(hdr.pdo) > hdr.plen {
        return Err(Fatal::field(3));
    }
    if hdr.plen - u32::from(hdr.pdo) > data_max {
        return Err(match hdr.pdu_type {
            H2C_DATA => Fatal::status(FatalStatus::DataLimitExceeded),
            _ => Fatal::field(4),
        });
    }
    Ok(hlen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_those_of_the_specification() {
        assert_eq!(size_of::<spdk_nvme_cmd>(), 64);
        assert_eq!(size_of::<spdk_nvme_cpl>(), 16);
        assert_eq!(size_of::<spdk_nvme_tcp_common_pdu_hdr>(), 8);
        assert_eq!(size_of::<spdk_nvme_tcp_cmd>(), 72);
        assert_eq!(size_of::<spdk_nvme_tcp_rsp>(), 24);
        assert_eq!(size_of::<spdk_nvme_tcp_ic_req>(), 128);
        assert_eq!(size_of::<spdk_nvme_tcp_ic_resp>(), 128);
        assert_eq!(size_of::<spdk_nvme_tcp_term_req_hdr>(), 24);
        assert_eq!(size_of::<spdk_nvme_tcp_h2c_data_hdr>(), 24);
        assert_eq!(size_of::<spdk_nvme_tcp_c2h_data_hdr>(), 24);
        assert_eq!(size_of::<spdk_nvme_tcp_r2t_hdr>(), 24);
        assert_eq!(size_of::<nvme_tcp_pdu_hdr>(), TERM_REQ_MAX);
    }

    fn u16_at(bytes: &[u8], at: usize) -> u16 {
        u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
    }
    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    const TARGET: Receiver = Receiver::Target { in_capsule: 8192, max_h2c_data: 131_072 };
    const HOST: Receiver = Receiver::Host { max_c2h_data: 1 << 20 };

    proptest! {
        /// A command capsule's bytes lie where the specification puts them, and read back.
        #[test]
        fn command_round_trip(opcode: u8, cid: u16, nsid: u32, slba: u64, nlb in 0u32..=0xffff,
                              data in 0u32..=8192) {
            let sqe = spdk_nvme_cmd {
                opc: opcode, cid, nsid, cdw10: slba as u32, cdw11: (slba >> 32) as u32, cdw12: nlb,
                ..Default::default()
            };
            let hdr = nvme_tcp_pdu_hdr::for_command(sqe, data);
            let raw = hdr.bytes();
            prop_assert_eq!(raw[0], 0x04);
            prop_assert_eq!(raw[2], 72);
            prop_assert_eq!(u32_at(raw, 4), 72 + data);
            prop_assert_eq!(raw[8], opcode);
            prop_assert_eq!(u16_at(raw, 10), cid);
            prop_assert_eq!(u32_at(raw, 12), nsid);
            prop_assert_eq!(u64::from_le_bytes(raw[48..56].try_into().unwrap()), slba);
            prop_assert_eq!(hdr.capsule_cmd().ccsqe, sqe);
            prop_assert_eq!(sqe.slba(), slba);
            prop_assert_eq!(sqe.nlb(), nlb + 1);
            prop_assert_eq!(check_common(&hdr.common(), TARGET, true), Ok(72));
            prop_assert!(check_common(&hdr.common(), TARGET, false).is_err());
            prop_assert!(check_common(&hdr.common(), HOST, true).is_err());
        }

        #[test]
        fn data_and_r2t_round_trip(cid: u16, ttag: u16, offset: u32, len in 1u32..=131_072, last: bool) {
            let flags = if last { pdu_flag::DATA_LAST } else { 0 };
            let h2c = nvme_tcp_pdu_hdr::for_h2c_data(cid, ttag, flags, offset, len);
            let raw = h2c.bytes();
            prop_assert_eq!((raw[0], raw[1], raw[2], raw[3]), (0x06, flags, 24, 24));
            prop_assert_eq!((u16_at(raw, 8), u16_at(raw, 10)), (cid, ttag));
            prop_assert_eq!((u32_at(raw, 12), u32_at(raw, 16)), (offset, len));
            prop_assert_eq!(check_common(&h2c.common(), TARGET, true), Ok(24));

            let c2h = nvme_tcp_pdu_hdr::for_c2h_data(cid, flags, 24, offset, len);
            let raw = c2h.bytes();
            prop_assert_eq!((raw[0], u16_at(raw, 8), u32_at(raw, 12), u32_at(raw, 16)), (0x07, cid, offset, len));
            prop_assert_eq!(check_common(&c2h.common(), HOST, true), Ok(24));

            let r2t = nvme_tcp_pdu_hdr::for_r2t(cid, ttag, offset, len);
            let raw = r2t.bytes();
            prop_assert_eq!((raw[0], u16_at(raw, 8), u16_at(raw, 10)), (0x09, cid, ttag));
            prop_assert_eq!((u32_at(raw, 12), u32_at(raw, 16)), (offset, len));
            prop_assert_eq!(check_common(&r2t.common(), HOST, true), Ok(24));
        }

        #[test]
        fn response_round_trip(cid: u16, sct in 0u8..8, sc: u8, cdw0: u32) {
            let status = Status { sct, sc };
            let cqe = spdk_nvme_cpl { cid, cdw0, status: status.word(), ..Default::default() };
            let hdr = nvme_tcp_pdu_hdr::for_response(cqe);
            prop_assert_eq!(u16_at(hdr.bytes(), 20), cid);
            prop_assert_eq!(Status::from_word(u16_at(hdr.bytes(), 22)), status);
            prop_assert_eq!(hdr.capsule_resp().rccqe, cqe);
        }

        /// Whatever the eight bytes say, the check answers, and what it lets pass is bounded.
        #[test]
        fn accepted_headers_are_bounded(raw: [u8; 8], ic_done: bool) {
            let hdr = spdk_nvme_tcp_common_pdu_hdr {
                pdu_type: raw[0], flags: raw[1], hlen: raw[2], pdo: raw[3],
                plen: u32_at(&raw, 4),
            };
            if let Ok(hlen) = check_common(&hdr, TARGET, ic_done) {
                prop_assert_eq!(hlen, hdr.hlen);
                prop_assert!(hdr.plen >= u32::from(hlen));
                prop_assert!(hdr.plen <= 255 + 131_072);
                prop_assert!(hdr.flags & 3 == 0);
            }
        }

        #[test]
        fn termination_quotes_the_offender(raw: [u8; 32], quoted in 0usize..200) {
            let mut offender = nvme_tcp_pdu_hdr::default();
            offender.bytes_mut()[..32].copy_from_slice(&raw);
            let term = nvme_tcp_pdu_hdr::for_c2h_term_req(Fatal::field(7), &offender, quoted);
            let n = quoted.min(TERM_REQ_MAX - 24);
            prop_assert_eq!(term.common().plen as usize, 24 + n);
            prop_assert_eq!(&term.bytes()[24..24 + n], &offender.bytes()[..n]);
            prop_assert_eq!(u32_at(term.bytes(), 10), 7);
        }
    }
}
