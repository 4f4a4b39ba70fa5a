//! The faults that are injected, as data: what is done, and what has to be found. It does nothing itself.

use super::beside::Beside;
use joiner::Cause;
use run_format::Stage;
use std::time::Duration;

/// A fault.
#[derive(Debug)]
pub struct Case {
    /// What has to be named first.
    pub cause: Cause,
    /// What is done, in words.
    pub injected: &'static str,
    /// The stages that the cause may be found in.
    pub stages: &'static [Stage],
    /// The target's options in both recordings.
    pub target: &'static [&'static str],
    /// The initiator's options in both recordings.
    pub load: &'static [&'static str],
    /// The target's further options with the fault.
    pub fault_target: &'static [&'static str],
    /// The initiator's further options with the fault.
    pub fault_load: &'static [&'static str],
    /// What goes on beside it with the fault.
    pub beside: Beside,
    /// How long a recording lasts at least: some counters are read every few seconds only.
    pub least: Duration,
    /// What the fault adds, and how exactly that is known.
    pub size: Size,
}

/// What a fault adds to a class of commands on average.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// The stages that are added up.
    pub of: &'static [Stage],
    /// How much, µs: exactly, or at least.
    pub micros: f64,
    /// By what share what is found may be off; `None` where only the least is known.
    pub within: Option<f64>,
    /// Why that much, and why no more exactly.
    pub why: &'static str,
}

const STORAGE: &[Stage] = &[Stage::Storage];
const NETWORK: &[Stage] = &[Stage::Network];
const BEFORE_STORAGE: &[Stage] = &[Stage::Network, Stage::TargetDriver];
const HOST: &[Stage] = &[Stage::HostBlock, Stage::HostDriver, Stage::Network];

/// Of most recordings. The reactors' times are read once a second.
const SHORT: Duration = Duration::from_millis(2_500);

/// A target that sleeps when it has nothing to do, with a flash drive of 250 us: what records it needs a CPU too.
const DRIVE: &[&str] = &["--spin", "0us", "--delay", "storage=250us"];
/// The same with a drive of 1 ms, for many commands at once.
const SLOW: &[&str] = &["--spin", "0us", "--delay", "storage=1ms"];

/// All of them.
pub const CASES: &[Case] = &[
    Case {
        cause: Cause::FabricLoss,
        injected: "1 % of the packets are lost, in a network of its own",
        stages: NETWORK,
        target: DRIVE,
        load: &["--rw", "randread", "--queue-depth", "2"],
        fault_target: &[],
        fault_load: &[],
        beside: Beside::Loss(0.01),
        least: Duration::from_secs(4),
        size: Size {
            of: NETWORK,
            micros: 20.0,
            within: None,
            why: "a lost packet is sent again after one to two round trips or after a timeout of 200 ms and more: which, is TCP's",
        },
    },
    Case {
        cause: Cause::R2tRoundTrips,
        injected: "each R2T asks for 4 KiB, so that a write of 64 KiB needs 16 round trips",
        stages: NETWORK,
        target: DRIVE,
        load: &["--rw", "randwrite", "--block-size", "64K", "--queue-depth", "1"],
        fault_target: &["--r2t-bytes", "4K"],
        fault_load: &[],
        beside: Beside::Nothing,
        least: SHORT,
        size: Size {
            of: HOST,
            micros: 15.0 * 3.0,
            within: None,
            why: "15 round trips more, each of 3 us at the very least; how long one takes is the machine's",
        },
    },
    Case {
        cause: Cause::TransportWindow,
        injected: "the initiator's socket buffers have 16 KiB, and it reads 128 KiB, four at once",
        stages: NETWORK,
        target: SLOW,
        load: &["--rw", "randread", "--block-size", "128K", "--queue-depth", "4"],
        fault_target: &[],
        fault_load: &["--socket-buffer", "16K"],
        beside: Beside::Nothing,
        least: SHORT,
        size: Size {
            of: BEFORE_STORAGE,
            micros: 10.0,
            within: None,
            why: "the data waits for the window again and again; how long each time is the kernel's and the machine's",
        },
    },
    Case {
        cause: Cause::DriveSaturated,
        injected: "the drive serves one command at a time, 400 us each on average, and 16 come at once",
        stages: STORAGE,
        target: SLOW,
        load: &["--rw", "randread", "--queue-depth", "16", "--bursts"],
        fault_target: &["--drive", "serial=400us"],
        fault_load: &[],
        beside: Beside::Nothing,
        least: SHORT,
        size: Size {
            of: STORAGE,
            micros: 8.5 * 400.0,
            within: Some(0.2),
            why: "of 16 at once the first waits for itself and the last for all: 8.5 services on average, each drawn at random",
        },
    },
    Case {
        cause: Cause::IopsLimit,
        injected: "the drive completes 2,000 commands a second, evenly, and 16 come at once",
        stages: STORAGE,
        target: SLOW,
        load: &["--rw", "randread", "--queue-depth", "16", "--bursts"],
        fault_target: &["--drive", "iops=2000"],
        fault_load: &[],
        beside: Beside::Nothing,
        least: SHORT,
        size: Size {
            of: STORAGE,
            micros: 8.5 * 500.0,
            within: Some(0.1),
            why: "of 16 at once the first waits 0.5 ms and the last 8 ms, 4.25 ms on average",
        },
    },
    Case {
        cause: Cause::DriveInternal,
        injected: "2 % of the commands, drawn at random, take 3 ms longer in the drive",
        stages: STORAGE,
        target: DRIVE,
        load: &["--rw", "randread", "--queue-depth", "2"],
        fault_target: &["--drive", "stalls=0.02:3ms"],
        fault_load: &[],
        beside: Beside::Nothing,
        least: Duration::from_secs(4),
        size: Size {
            of: STORAGE,
            micros: 0.02 * 3_000.0,
            within: Some(0.35),
            why: "60 us on average; how many of some thousands are drawn varies by a tenth and more",
        },
    },
    Case {
        cause: Cause::NoisyNeighbour,
        injected: "a second initiator has 32 writes of 64 KiB outstanding on another namespace of the same drive",
        stages: STORAGE,
        target: &["--spin", "0us", "--namespaces", "2", "--drive", "serial=100us"],
        load: &["--rw", "randread", "--queue-depth", "1", "--nsid", "1"],
        fault_target: &[],
        fault_load: &[],
        beside: Beside::Neighbour(&[
            "--rw",
            "randwrite",
            "--block-size",
            "64K",
            "--queue-depth",
            "32",
            "--nsid",
            "2",
            "--bursts",
        ]),
        least: Duration::from_secs(4),
        size: Size {
            of: STORAGE,
            micros: 300.0,
            within: None,
            why: "the commands before a read are between none and 32, as the neighbour's bursts have it",
        },
    },
    Case {
        cause: Cause::BufferPool,
        injected: "the target has 2 data buffers for 16 commands, and storage takes 2 ms",
        stages: &[Stage::TargetDriver],
        target: &["--spin", "0us", "--delay", "storage=2ms"],
        load: &["--rw", "randread", "--queue-depth", "16"],
        fault_target: &["--buffers", "2"],
        fault_load: &[],
        beside: Beside::Nothing,
        least: Duration::from_secs(11),
        size: Size {
            of: &[Stage::TargetDriver],
            micros: 7.0 * 2_000.0,
            within: Some(0.25),
            why: "two at a time, so that each waits for the seven pairs before it; a little more, as a buffer comes back when the data was sent",
        },
    },
    Case {
        cause: Cause::ReactorSaturated,
        injected: "the reactor has 300 us of other work each turn",
        stages: &[Stage::TargetDriver],
        // It never sleeps, as SPDK's do not: what it does between commands is its other work.
        target: &["--delay", "storage=250us"],
        load: &["--rw", "randread", "--queue-depth", "2"],
        fault_target: &["--other-work", "300us"],
        fault_load: &[],
        beside: Beside::Nothing,
        least: Duration::from_secs(4),
        size: Size {
            of: BEFORE_STORAGE,
            micros: 150.0,
            within: None,
            why: "half a turn to be read, and as much again for what comes in another turn: 150 us at least",
        },
    },
    Case {
        cause: Cause::HostCpu,
        injected: "three threads keep the initiator's CPU busy",
        stages: &[Stage::HostDriver, Stage::HostBlock, Stage::Network],
        target: DRIVE,
        load: &["--rw", "randread", "--queue-depth", "1"],
        fault_target: &[],
        fault_load: &[],
        beside: Beside::Hogs(3),
        least: Duration::from_secs(4),
        size: Size {
            of: HOST,
            micros: 30.0,
            within: None,
            why: "a command waits until the scheduler gives the initiator its CPU again, which is the scheduler's to choose",
        },
    },
    Case {
        cause: Cause::HeadOfLine,
        injected: "one read in 12 is of 1 MiB, which takes 4 ms on the connection, and those of 4 KiB share it",
        stages: NETWORK,
        target: &["--spin", "0us", "--delay", "storage=250us", "--max-io-size", "1M", "--pace", "256M"],
        load: &["--rw", "randread", "--queue-depth", "4"],
        fault_target: &[],
        fault_load: &["--large-reads", "12:1M"],
        beside: Beside::Nothing,
        least: Duration::from_secs(4),
        size: Size {
            of: BEFORE_STORAGE,
            micros: 300.0,
            within: None,
            why: "a large read comes with each 11 small ones of a place, and what is on its way then waits 2 ms on average: of 11 commands two or three",
        },
    },
    Case {
        cause: Cause::HotQueue,
        injected: "one of four queues has 16 commands outstanding, the others one, and a connection carries 16 MiB a second",
        stages: BEFORE_STORAGE,
        target: &["--spin", "0us", "--delay", "storage=2ms", "--pace", "16M"],
        load: &["--rw", "randread", "--queue-depth", "1", "--queues", "4"],
        fault_target: &[],
        fault_load: &["--hot-queue", "16"],
        beside: Beside::Nothing,
        least: Duration::from_secs(4),
        size: Size {
            of: BEFORE_STORAGE,
            micros: 1_000.0,
            within: None,
            why: "16 commands of 4 KiB take 3.9 ms on the connection, of which storage hides 2: 1.9 ms for each of the most commands, by Little's law",
        },
    },
];

#[cfg(test)]
mod tests {
    use super::{Beside, CASES};
    use std::collections::BTreeSet;

    #[test]
    fn each_cause_is_injected_once_and_something_is_injected() {
        let causes: BTreeSet<_> = CASES.iter().map(|case| case.cause).collect();
        assert_eq!(causes.len(), CASES.len());
        assert!(CASES.len() >= 12);
        for case in CASES {
            let changed = !case.fault_target.is_empty() || !case.fault_load.is_empty();
            assert!(changed != (case.beside != Beside::Nothing), "{}", case.cause);
            assert!(!case.stages.is_empty() && case.size.micros > 0.0, "{}", case.cause);
            assert!(case.size.within.is_none_or(|within| within < 0.5));
        }
    }
}
