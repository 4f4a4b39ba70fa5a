//! A transport address as both sides keep it, and its text fields.

#![allow(non_camel_case_types, reason = "the names are what debug information is searched for")]

/// Length of an NQN field, terminating zero included.
pub(crate) const NQN_LEN: usize = 224;

#[repr(C)]
pub(crate) struct spdk_nvme_transport_id {
    standin_pad0: [u8; 10],
    pub(crate) trsvcid: [u8; 33],
    pub(crate) traddr: [u8; 257],
    pub(crate) subnqn: [u8; NQN_LEN],
}

impl spdk_nvme_transport_id {
    /// Addresses are cut to the fields' lengths.
    pub(crate) fn new(traddr: &str, trsvcid: &str) -> Self {
        let mut this =
            Self { standin_pad0: [0; 10], trsvcid: [0; 33], traddr: [0; 257], subnqn: [0; NQN_LEN] };
        put_cstr(&mut this.traddr, traddr.as_bytes());
        put_cstr(&mut this.trsvcid, trsvcid.as_bytes());
        this
    }
}

/// Copies as much of `text` as the field holds with its terminating zero.
pub(crate) fn put_cstr(field: &mut [u8], text: &[u8]) {
    let n = text.len().min(field.len() - 1);
    field[..n].copy_from_slice(&text[..n]);
    field[n..].fill(0);
}
