//! Each retransmission of TCP's, as the kernel does it (the tracepoint `tcp_retransmit_skb`): its moment, its connection
//! and how many segments. It knows neither queues nor commands, and keeps nothing.

use crate::Error;
use crate::message::address;
use crate::message::raw::kernel_retransmit;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, RingBuffer, RingBufferBuilder};
use run_format::Nanos;
use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

#[allow(
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    clippy::expect_used
)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/retransmits.skel.rs"));
}

/// Segments that were sent again, at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retransmission {
    /// When, `CLOCK_MONOTONIC`.
    pub at: Nanos,
    /// This end.
    pub local: SocketAddr,
    /// The other.
    pub remote: SocketAddr,
    /// How many.
    pub segments: u32,
}

impl Retransmission {
    /// `None` for what is no such event, or of no IP.
    fn parse(bytes: &[u8]) -> Option<Retransmission> {
        if bytes.len() < size_of::<kernel_retransmit>() {
            return None;
        }
        // SAFETY: the bytes are as many, any of them are a valid `kernel_retransmit`, and it is read unaligned.
        let event = unsafe { bytes.as_ptr().cast::<kernel_retransmit>().read_unaligned() };
        Some(Retransmission {
            at: Nanos(event.at),
            local: SocketAddr::new(address(event.family, &event.local_address)?, event.local_port),
            remote: SocketAddr::new(address(event.family, &event.remote_address)?, event.remote_port),
            segments: event.segments,
        })
    }
}

/// The program, attached. It takes the retransmissions of all connections until it is told whose. Dropping it detaches it.
pub struct Retransmissions {
    // The order of the fields is that of their end.
    _link: Link,
    ring: RingBuffer<'static>,
    inbox: Arc<Mutex<Vec<Retransmission>>>,
    skeleton: skeleton::RetransmitsSkel<'static>,
}

impl std::fmt::Debug for Retransmissions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Retransmissions").finish_non_exhaustive()
    }
}

impl Retransmissions {
    /// Attaches it. Needs the rights and the type information that recording the kernel needs.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn attach() -> Result<Retransmissions, Error> {
        let failed = |doing| move |error: libbpf_rs::Error| Error::Load { doing, why: format!("{error:#}") };
        // The skeleton borrows this for as long as it lives: a few bytes a recording stay.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let open = skeleton::RetransmitsSkelBuilder::default()
            .open(storage)
            .map_err(failed("opening the one for retransmissions"))?;
        let skeleton = open.load().map_err(failed("loading the one for retransmissions"))?;
        let inbox = Arc::new(Mutex::new(Vec::new()));
        let filled = Arc::clone(&inbox);
        let mut builder = RingBufferBuilder::new();
        let read = |source| Error::Read { doing: "mapping the ring of retransmissions", source };
        builder
            .add(&skeleton.maps.retransmits, move |bytes: &[u8]| {
                if let Some(event) = Retransmission::parse(bytes) {
                    filled.lock().unwrap_or_else(PoisonError::into_inner).push(event);
                }
                0
            })
            .map_err(read)?;
        let ring = builder.build().map_err(read)?;
        let link = skeleton
            .progs
            .retransmit
            .attach()
            .map_err(failed("attaching to the tracepoint tcp_retransmit_skb"))?;
        Ok(Retransmissions { _link: link, ring, inbox, skeleton })
    }

    /// From now on only those of connections in the network namespace with this inode, or of all.
    pub fn of_namespace(&mut self, inode: Option<u32>) {
        if let Some(shared) = self.skeleton.maps.bss_data.as_deref_mut() {
            shared.namespace = inode.unwrap_or(0);
        }
    }

    /// From now on only those of connections from these local or to these remote ports; of all where there are none.
    pub fn of_ports(&mut self, local: &BTreeSet<u16>, remote: &BTreeSet<u16>) {
        let Some(shared) = self.skeleton.maps.bss_data.as_deref_mut() else { return };
        let by_port = !(local.is_empty() && remote.is_empty());
        for (bits, ports) in [(&mut shared.local_ports, local), (&mut shared.remote_ports, remote)] {
            let wanted = bits_of(ports);
            for (bit, wanted) in bits.iter_mut().zip(wanted) {
                if *bit != wanted {
                    *bit = wanted;
                }
            }
        }
        shared.by_port = u32::from(by_port);
    }

    /// Adds those since the last call, in the order of their times.
    ///
    /// # Errors
    /// When the ring can not be read.
    pub fn take(&mut self, into: &mut Vec<Retransmission>) -> Result<(), Error> {
        self.ring
            .consume()
            .map_err(|source| Error::Read { doing: "reading the ring of retransmissions", source })?;
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        // Two CPUs may have got their places in the ring in another order than their times.
        inbox.sort_by_key(|event| event.at);
        into.append(&mut inbox);
        Ok(())
    }

    /// How many found the ring full, until now.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.skeleton.maps.bss_data.as_deref().map_or(0, |shared| shared.lost)
    }
}

/// One bit a port.
fn bits_of(ports: &BTreeSet<u16>) -> Vec<u8> {
    let mut bits = vec![0u8; 1 << 13];
    for port in ports {
        if let Some(byte) = bits.get_mut(usize::from(port >> 3)) {
            *byte |= 1 << (port & 7);
        }
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv6Addr;

    fn bytes(event: &kernel_retransmit) -> Vec<u8> {
        let start = std::ptr::from_ref(event).cast::<u8>();
        // SAFETY: the structure has no padding, and as many bytes.
        unsafe { std::slice::from_raw_parts(start, size_of::<kernel_retransmit>()) }.to_vec()
    }

    fn event(family: i32, local: [u8; 16]) -> kernel_retransmit {
        kernel_retransmit {
            at: 7,
            segments: 3,
            family: u16::try_from(family).unwrap(),
            local_port: 4420,
            remote_port: 50_000,
            unused: [0; 3],
            local_address: local,
            remote_address: local,
        }
    }

    #[test]
    fn ends_are_of_their_family() {
        let mut v4 = [0; 16];
        v4[..4].copy_from_slice(&[10, 0, 0, 2]);
        let seen = Retransmission::parse(&bytes(&event(libc::AF_INET, v4))).unwrap();
        assert_eq!((seen.at, seen.segments), (Nanos(7), 3));
        assert_eq!(seen.local.to_string(), "10.0.0.2:4420");
        assert_eq!(seen.remote.to_string(), "10.0.0.2:50000");
        let of = |ip: &str| {
            let ip: Ipv6Addr = ip.parse().unwrap();
            Retransmission::parse(&bytes(&event(libc::AF_INET6, ip.octets()))).unwrap().local.to_string()
        };
        assert_eq!(of("fe80::1"), "[fe80::1]:4420");
        assert_eq!(of("::ffff:10.0.0.2"), "10.0.0.2:4420");
        assert_eq!(Retransmission::parse(&bytes(&event(0, v4))), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_event_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let seen = Retransmission::parse(&bytes);
            prop_assert!(seen.is_none() || bytes.len() >= size_of::<kernel_retransmit>());
        }

        #[test]
        fn each_port_has_its_bit(ports in proptest::collection::btree_set(any::<u16>(), 0..50)) {
            let bits = bits_of(&ports);
            for port in 0..=u16::MAX {
                let set = bits[usize::from(port >> 3)] & (1 << (port & 7)) != 0;
                prop_assert_eq!(set, ports.contains(&port));
            }
        }
    }
}
