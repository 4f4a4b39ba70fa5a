//! A host that speaks NVMe/TCP byte by byte, so that it can also speak it wrongly. It shares no
//! code with the crate under test.

#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub(crate) const NQN: &str = "nqn.2024-01.io.fabscope:standin1";
pub(crate) const HOSTNQN: &str = "nqn.2024-01.io.fabscope:raw";

/// One received PDU, header and payload.
#[derive(Debug)]
pub(crate) struct Pdu(pub(crate) Vec<u8>);

impl Pdu {
    pub(crate) fn kind(&self) -> u8 {
        self.0[0]
    }
    pub(crate) fn u16_at(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.0[at..at + 2].try_into().unwrap())
    }
    pub(crate) fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }
    /// (status code type, status code) of a response capsule.
    pub(crate) fn status(&self) -> (u8, u8) {
        assert_eq!(self.kind(), 0x05, "not a response: {:?}", self.0);
        let word = self.u16_at(22);
        (((word >> 9) & 7) as u8, ((word >> 1) & 0xff) as u8)
    }
}

pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
}

pub(crate) fn ic_req() -> Vec<u8> {
    let mut pdu = vec![0u8; 128];
    pdu[0] = 0x00;
    pdu[2] = 128;
    pdu[4] = 128;
    pdu
}

/// A 64-byte SQE; the SGL is a transport data block of `len` bytes.
pub(crate) fn sqe(opcode: u8, cid: u16, nsid: u32, len: u32) -> Vec<u8> {
    let mut sqe = vec![0u8; 64];
    sqe[0] = opcode;
    sqe[1] = 0x40;
    sqe[2..4].copy_from_slice(&cid.to_le_bytes());
    sqe[4..8].copy_from_slice(&nsid.to_le_bytes());
    sqe[32..36].copy_from_slice(&len.to_le_bytes());
    sqe[39] = 0x5a;
    sqe
}

pub(crate) fn with_blocks(mut sqe: Vec<u8>, slba: u64, nlb: u16) -> Vec<u8> {
    sqe[40..48].copy_from_slice(&slba.to_le_bytes());
    sqe[48..50].copy_from_slice(&(nlb - 1).to_le_bytes());
    sqe
}

/// A command capsule; data goes in the capsule, and the SGL says so.
pub(crate) fn capsule(mut sqe: Vec<u8>, data: &[u8]) -> Vec<u8> {
    let mut pdu = vec![0x04, 0, 72, if data.is_empty() { 0 } else { 72 }];
    pdu.extend_from_slice(&(72 + data.len() as u32).to_le_bytes());
    if !data.is_empty() {
        sqe[32..36].copy_from_slice(&(data.len() as u32).to_le_bytes());
        sqe[39] = 0x01;
    }
    pdu.extend_from_slice(&sqe);
    pdu.extend_from_slice(data);
    pdu
}

pub(crate) fn h2c_data(cid: u16, ttag: u16, offset: u32, data: &[u8], last: bool) -> Vec<u8> {
    let mut pdu = vec![0x06, if last { 4 } else { 0 }, 24, 24];
    pdu.extend_from_slice(&(24 + data.len() as u32).to_le_bytes());
    pdu.extend_from_slice(&cid.to_le_bytes());
    pdu.extend_from_slice(&ttag.to_le_bytes());
    pdu.extend_from_slice(&offset.to_le_bytes());
    pdu.extend_from_slice(&(data.len() as u32).to_le_bytes());
    pdu.extend_from_slice(&[0; 4]);
    pdu.extend_from_slice(data);
    pdu
}

pub(crate) fn connect_capsule(qid: u16, cntlid: u16, nqn: &str) -> Vec<u8> {
    let mut data = vec![0u8; 1024];
    data[..16].copy_from_slice(b"raw host of test");
    data[16..18].copy_from_slice(&cntlid.to_le_bytes());
    data[256..256 + nqn.len()].copy_from_slice(nqn.as_bytes());
    data[512..512 + HOSTNQN.len()].copy_from_slice(HOSTNQN.as_bytes());
    let mut cmd = sqe(0x7f, 0, 0, 1024);
    cmd[4] = 0x01;
    cmd[42..44].copy_from_slice(&qid.to_le_bytes());
    cmd[44..46].copy_from_slice(&31u16.to_le_bytes());
    cmd[46] = 4;
    capsule(cmd, &data)
}

impl Raw {
    pub(crate) fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream }
    }

    /// Opens and exchanges ICReq and ICResp.
    pub(crate) fn greeted(address: SocketAddr) -> Self {
        let mut raw = Self::open(address);
        raw.send(&ic_req());
        assert_eq!(raw.pdu().unwrap().kind(), 0x01);
        raw
    }

    /// An enabled admin queue and its controller's identifier.
    pub(crate) fn admin(address: SocketAddr) -> (Self, u16) {
        let mut raw = Self::greeted(address);
        raw.send(&connect_capsule(0, 0xffff, NQN));
        let answer = raw.pdu().unwrap();
        assert_eq!(answer.status(), (0, 0));
        let cntlid = answer.u16_at(8);
        // CC.EN with the entry sizes.
        let mut set = sqe(0x7f, 1, 0, 0);
        set[44..48].copy_from_slice(&0x14u32.to_le_bytes());
        set[48..52].copy_from_slice(&0x0046_0001u32.to_le_bytes());
        assert_eq!(raw.command(set).status(), (0, 0));
        (raw, cntlid)
    }

    /// An I/O queue of that controller.
    pub(crate) fn io(address: SocketAddr, cntlid: u16) -> Self {
        let mut raw = Self::greeted(address);
        raw.send(&connect_capsule(1, cntlid, NQN));
        assert_eq!(raw.pdu().unwrap().status(), (0, 0));
        raw
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        // The target may have hung up already; what it said is read afterwards.
        let _ = self.stream.write_all(bytes);
    }

    pub(crate) fn command(&mut self, sqe: Vec<u8>) -> Pdu {
        self.send(&capsule(sqe, &[]));
        self.pdu().expect("an answer")
    }

    /// The next PDU; none when the target closed the connection.
    pub(crate) fn pdu(&mut self) -> Option<Pdu> {
        let mut bytes = vec![0u8; 8];
        self.stream.read_exact(&mut bytes).ok()?;
        let len = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
        assert!((8..=1 << 22).contains(&len), "a PDU of {len} bytes: {bytes:?}");
        bytes.resize(len, 0);
        self.stream.read_exact(&mut bytes[8..]).ok()?;
        Some(Pdu(bytes))
    }

    /// Everything until the target closes; panics if it does not.
    pub(crate) fn drain(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => rest,
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => rest,
            Err(e) => panic!("the target keeps the connection open: {e}"),
        }
    }

    /// The termination request that has to come, as (status, field offset); then the end.
    pub(crate) fn terminated(&mut self) -> (u16, u32) {
        loop {
            let pdu = self.pdu().expect("a C2HTermReq");
            if pdu.kind() == 0x03 {
                let said = (pdu.u16_at(8), pdu.u32_at(10));
                self.drain();
                return said;
            }
        }
    }
}
