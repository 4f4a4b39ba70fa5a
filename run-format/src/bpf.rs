//! The BPF record header (`bpf/fabscope.h`) as Rust types, and its sampling hash.

use crate::{Cid, Command, Nanos, QueueId};

/// The header's types and constants, as bindgen makes them.
#[allow(missing_docs, missing_debug_implementations, non_camel_case_types, unreachable_pub, clippy::all)]
pub mod raw {
    include!(concat!(env!("OUT_DIR"), "/fabscope.rs"));
}

mod native {
    unsafe extern "C" {
        pub(super) safe fn fabscope_hash(cid: u16, opcode: u8, nsid: u32, slba: u64, nlb0: u16) -> u32;
        pub(super) safe fn fabscope_sampled(
            limit: u32,
            cid: u16,
            opcode: u8,
            nsid: u32,
            slba: u64,
            nlb0: u16,
        ) -> i32;
    }
}

/// The sampling hash of what both sides see of a command on the wire.
#[must_use]
pub fn hash(cid: Cid, opcode: u8, nsid: u32, slba: u64, nlb0: u16) -> u32 {
    native::fabscope_hash(cid.0, opcode, nsid, slba, nlb0)
}

/// Whether a command is kept under `limit` (see [`sampling_limit`]).
#[must_use]
pub fn sampled(limit: u32, cid: Cid, opcode: u8, nsid: u32, slba: u64, nlb0: u16) -> bool {
    native::fabscope_sampled(limit, cid.0, opcode, nsid, slba, nlb0) != 0
}

/// The limit that keeps one command in `one_in`: 2^32 / N - 1. 0 is taken as 1.
#[must_use]
pub fn sampling_limit(one_in: u32) -> u32 {
    crate::sampling::limit(one_in)
}

impl raw::fab_command {
    /// The record at the start of a ring buffer message; `None` when the message is too short or not a
    /// command.
    #[must_use]
    pub fn parse(message: &[u8]) -> Option<raw::fab_command> {
        if message.len() < size_of::<raw::fab_command>() {
            return None;
        }
        // SAFETY: the length was checked, every bit pattern is a valid fab_command (integers only), and the
        // read needs no alignment.
        let record = unsafe { std::ptr::read_unaligned(message.as_ptr().cast::<raw::fab_command>()) };
        (record.message == raw::FAB_MSG_COMMAND).then_some(record)
    }

    /// The command as a run keeps it, on the queue that the source knows by this record's key.
    #[must_use]
    pub fn to_command(&self, queue: QueueId) -> Command {
        let time = |t: u64| (t != 0).then_some(Nanos(t));
        Command {
            queue,
            cid: Cid(self.cid),
            opcode: self.opcode,
            nsid: self.nsid,
            slba: self.slba,
            nlb0: self.nlb0,
            bytes: self.bytes,
            status: self.status,
            cpu: self.cpu,
            flags: self.flags,
            r2ts: self.r2ts,
            stream_position: u32::try_from(self.stream_position).ok(),
            r2t_turnaround: (self.r2t_turnaround != 0).then_some(Nanos(self.r2t_turnaround)),
            drive: (self.drive != 0).then_some(Nanos(self.drive)),
            times: self.ts.map(time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{hash, raw, sampled, sampling_limit};
    use crate::{Cid, Command};
    use proptest::prelude::*;

    #[test]
    fn flags_and_slots_are_those_of_the_header() {
        assert_eq!(u32::from(Command::MERGED), raw::FAB_FLAG_MERGED);
        assert_eq!(u32::from(Command::RETRY), raw::FAB_FLAG_RETRY);
        assert_eq!(u32::from(Command::FAILOVER), raw::FAB_FLAG_FAILOVER);
        assert_eq!(u32::from(Command::CANCELED), raw::FAB_FLAG_CANCELED);
        assert_eq!(Command::SLOTS, raw::FAB_SLOTS as usize);
    }

    #[test]
    fn one_in_n_keeps_about_one_in_n_of_a_sequential_and_of_a_random_load() {
        for n in [1u32, 2, 7, 100] {
            let limit = sampling_limit(n);
            let total = 200_000u32;
            let kept = (0..total)
                .filter(|&i| sampled(limit, Cid((i % 128) as u16), 2, 1, u64::from(i) * 8, 7))
                .count() as f64;
            let expected = f64::from(total) / f64::from(n);
            // Six standard deviations of a binomial.
            assert!((kept - expected).abs() <= 6.0 * expected.sqrt() + 1.0, "1 in {n}: {kept}");
        }
    }

    #[test]
    fn the_hash_stays_what_recorded_runs_were_sampled_with() {
        assert_eq!(hash(Cid(0), 0, 0, 0, 0), HASH_OF_ZERO);
    }
    const HASH_OF_ZERO: u32 = hash_of_zero();
    const fn mix(mut h: u32) -> u32 {
        h ^= h >> 16;
        h = h.wrapping_mul(0x85eb_ca6b);
        h ^= h >> 13;
        h = h.wrapping_mul(0xc2b2_ae35);
        h ^ (h >> 16)
    }
    const fn hash_of_zero() -> u32 {
        mix(mix(mix(mix(mix(0x9e37_79b9)))))
    }

    proptest! {
        #[test]
        fn every_field_of_the_wire_counts(cid: u16, opcode: u8, nsid: u32, slba: u64, nlb0: u16, bit in 0u32..16) {
            let h = hash(Cid(cid), opcode, nsid, slba, nlb0);
            prop_assert_ne!(h, hash(Cid(cid ^ (1 << bit)), opcode, nsid, slba, nlb0));
            prop_assert_ne!(h, hash(Cid(cid), opcode ^ (1 << (bit % 8)), nsid, slba, nlb0));
            prop_assert_ne!(h, hash(Cid(cid), opcode, nsid ^ (1 << bit), slba, nlb0));
            prop_assert_ne!(h, hash(Cid(cid), opcode, nsid, slba ^ (1 << (bit * 4)), nlb0));
            prop_assert_ne!(h, hash(Cid(cid), opcode, nsid, slba, nlb0 ^ (1 << bit)));
        }

        #[test]
        fn any_bytes_parse_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Some(record) = raw::fab_command::parse(&bytes) {
                let command = record.to_command(crate::QueueId(3));
                prop_assert_eq!(command.cid.0, record.cid);
            }
        }
    }
}
