//! Random numbers that are the same everywhere and for ever, so that the same runs always give the same figures.
//! Nothing here is for secrets.
#![allow(unreachable_pub)] // the synthetic runs show it to tests and benchmarks

/// SplitMix64: small, seeded and the same everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that gives the same numbers for the same seed.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0 .. `below`, which is not 0.
    pub fn below(&mut self, below: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(below)) >> 32) as u32
    }
}
