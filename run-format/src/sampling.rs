//! The sampling hash in plain Rust, for those who read runs: the recorded side takes it from
//! `bpf/fabscope.h`, and a test holds the two against each other. It decides nothing at recording time.

use crate::Cid;

/// The finaliser of MurmurHash3: full avalanche in 32 bits.
const fn mix(mut h: u32) -> u32 {
    h ^= h >> 16;
    h = h.wrapping_mul(0x85eb_ca6b);
    h ^= h >> 13;
    h = h.wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

/// The hash of what both sides see of a command on the wire.
#[must_use]
pub const fn hash(cid: Cid, opcode: u8, nsid: u32, slba: u64, nlb0: u16) -> u32 {
    let mut h = mix(((cid.0 as u32) << 16 | (opcode as u32) << 8) ^ 0x9e37_79b9);
    h = mix(h ^ nsid);
    h = mix(h ^ slba as u32);
    h = mix(h ^ (slba >> 32) as u32);
    mix(h ^ nlb0 as u32)
}

/// The largest hash that is kept at one in `one_in`: 2^32 / N - 1 (0 is taken as 1). So what is kept at a
/// larger N is always among what is kept at a smaller one.
#[must_use]
pub const fn limit(one_in: u32) -> u32 {
    let n = if one_in == 0 { 1 } else { one_in as u64 };
    ((1u64 << 32) / n - 1) as u32
}

#[cfg(test)]
mod tests {
    use super::limit;
    use proptest::prelude::*;

    #[test]
    fn one_in_one_keeps_all_and_the_limits_nest() {
        assert_eq!(limit(1), u32::MAX);
        assert_eq!(limit(0), u32::MAX);
        assert!((1..10_000).all(|n| limit(n + 1) < limit(n)));
    }

    #[cfg(feature = "bpf")]
    proptest! {
        #[test]
        fn it_is_the_hash_of_the_bpf_header(cid: u16, opcode: u8, nsid: u32, slba: u64, nlb0: u16, n: u32) {
            let cid = crate::Cid(cid);
            prop_assert_eq!(super::hash(cid, opcode, nsid, slba, nlb0), crate::bpf::hash(cid, opcode, nsid, slba, nlb0));
            prop_assert_eq!(limit(n), crate::bpf::sampling_limit(n));
        }
    }

    proptest! {
        #[test]
        fn every_limit_keeps_some(n: u32) {
            prop_assert!(u64::from(limit(n)) + 1 >= (1u64 << 32) / u64::from(n.max(1)));
        }
    }
}
