//! Units and small identifiers, so that no bare integer crosses a crate boundary.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A time or a duration in nanoseconds. As a time it is `CLOCK_MONOTONIC` of the machine that recorded it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The time as the run's columns hold it. Monotonic clocks stay far below 2^63 (292 years).
    #[must_use]
    pub fn as_i64(self) -> i64 {
        i64::try_from(self.0).unwrap_or(i64::MAX)
    }
}

impl fmt::Display for Nanos {
    /// Three digits with the unit that fits: `812 ns`, `12.3 us`, `4.56 ms`, `1.20 s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = match self.0 {
            0..1_000 => return write!(f, "{} ns", self.0),
            1_000..1_000_000 => (self.0 as f64 / 1e3, "us"),
            1_000_000..1_000_000_000 => (self.0 as f64 / 1e6, "ms"),
            _ => (self.0 as f64 / 1e9, "s"),
        };
        let digits = match value {
            v if v < 9.995 => 2,
            v if v < 99.95 => 1,
            _ => 0,
        };
        write!(f, "{value:.digits$} {unit}")
    }
}

/// A command identifier as it stands in the SQE and CQE, unique among a queue's outstanding commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cid(pub u16);

/// The number of a queue within one run: the `queue` column of the commands and of the queues. A
/// reconnect makes a new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct QueueId(pub u32);

#[cfg(test)]
mod tests {
    use super::Nanos;

    #[test]
    fn a_duration_is_shown_with_three_digits_and_its_unit() {
        let shown: Vec<String> =
            [0, 999, 1_000, 9_994, 12_345, 999_949, 4_560_000, 1_200_000_000, 120_000_000_000]
                .iter()
                .map(|&n| Nanos(n).to_string())
                .collect();
        assert_eq!(
            shown,
            ["0 ns", "999 ns", "1.00 us", "9.99 us", "12.3 us", "1000 us", "4.56 ms", "1.20 s", "120 s"]
        );
    }
}
