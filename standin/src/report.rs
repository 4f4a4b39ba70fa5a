//! What an initiator says about its load, and the words for loads and stages. The programs write
//! and read these; other programs read them.

use serde::{Deserialize, Serialize};

/// A stage that a target can be made slower in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Between the bdev layer's submit and its completion.
    Storage,
    /// Between a command's arrival and its execution.
    TargetDriver,
}

impl Stage {
    /// The stages and their names on the command line and on the control socket.
    pub const ALL: [(&'static str, Self); 2] =
        [("storage", Self::Storage), ("target-driver", Self::TargetDriver)];

    /// The stage of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(n, _)| *n == name).map(|(_, s)| *s)
    }
}

/// What the commands of a load are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// Reads, one after the other.
    Read,
    /// Writes, one after the other.
    Write,
    /// Reads at random places.
    Randread,
    /// Writes at random places.
    Randwrite,
    /// Reads and writes, one after the other.
    Mixed,
    /// Reads and writes at random places.
    Randrw,
    /// Flushes.
    Flush,
    /// Compares, at random places, with what was written there before the load.
    Compare,
    /// Writes of zeroes at random places.
    WriteZeroes,
    /// Deallocations at random places.
    Dsm,
}

impl Workload {
    /// The workloads and their names.
    pub const ALL: [(&'static str, Self); 10] = [
        ("read", Self::Read),
        ("write", Self::Write),
        ("randread", Self::Randread),
        ("randwrite", Self::Randwrite),
        ("mixed", Self::Mixed),
        ("randrw", Self::Randrw),
        ("flush", Self::Flush),
        ("compare", Self::Compare),
        ("write-zeroes", Self::WriteZeroes),
        ("dsm", Self::Dsm),
    ];

    /// The workload of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(n, _)| *n == name).map(|(_, w)| *w)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, w)| *w == self).map_or("", |(n, _)| n)
    }
}

/// Latency of a load's commands, submit to completion, in nanoseconds. Percentiles are exact to
/// within 1 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Shortest.
    pub min_ns: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Median.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

/// What a load did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Says that this is the stand-in, and which version.
    pub standin: String,
    /// What the commands were.
    pub workload: Workload,
    /// Bytes of each command.
    pub block_size: u32,
    /// Commands outstanding on each queue.
    pub queue_depth: u16,
    /// I/O queues.
    pub queues: u16,
    /// The controller's identifier.
    pub cntlid: u16,
    /// Completed commands of the load; preparing and reading back are not counted.
    pub commands: u64,
    /// Of these, reads.
    pub reads: u64,
    /// Of these, writes.
    pub writes: u64,
    /// Commands completed with an error status.
    pub errors: u64,
    /// Blocks whose data was not what it had to be.
    pub verify_errors: u64,
    /// Blocks that were checked.
    pub verified: u64,
    /// How long the load ran.
    pub seconds: f64,
    /// Commands per second.
    pub iops: f64,
    /// None where no command was completed.
    pub latency: Option<Latency>,
}
