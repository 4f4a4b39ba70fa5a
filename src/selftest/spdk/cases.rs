//! The faults that are injected into a real SPDK, as data: what it is told over its RPC with and without each, under
//! which load, and what has to be found. It starts nothing.

use super::super::beside::Beside;
use super::super::cases::Size;
use joiner::Cause;
use run_format::Stage;
use serde_json::{Value, json};
use std::time::Duration;

/// An RPC method and its parameters.
pub type Call = (&'static str, Value);

/// A fault.
#[derive(Debug)]
pub struct Case {
    /// Its name: its cause's, where it has one.
    pub name: &'static str,
    /// What has to be named first; none where nothing may be named.
    pub cause: Option<Cause>,
    /// What is done, in words.
    pub injected: &'static str,
    /// The stages that the cause may be found in.
    pub stages: &'static [Stage],
    /// What target and load are, with and without the fault.
    pub plan: fn(bool) -> Plan,
    /// How long a recording lasts at least: some counters are read every few seconds only.
    pub least: Duration,
    /// What the fault adds, and how exactly that is known.
    pub size: Size,
    /// Whether every command has the same of it.
    pub every: bool,
}

/// What target and load are.
#[derive(Debug)]
pub struct Plan {
    /// Calls to the target before its subsystems start; those that it does not know then are errors.
    pub startup: Vec<Call>,
    /// Options of the transport.
    pub transport: Value,
    /// Calls that make the bdevs.
    pub bdevs: Vec<Call>,
    /// The bdevs that are namespaces, from 1 on. The load is on the first.
    pub namespaces: &'static [&'static str],
    /// Calls to the load's program before its subsystems start.
    pub load_startup: Vec<Call>,
    /// The load's parts, one after another, of about the same length.
    pub load: Vec<Part>,
    /// What goes on beside it.
    pub beside: Beside,
}

/// A part of a load: random commands at a constant depth.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// `randread` or `randwrite`.
    pub pattern: &'static str,
    /// Bytes of each command.
    pub bytes: u32,
    /// Commands outstanding.
    pub depth: u32,
}

const STORAGE: &[Stage] = &[Stage::Storage];
const NETWORK: &[Stage] = &[Stage::Network];
const TARGET_DRIVER: &[Stage] = &[Stage::TargetDriver];
const BEFORE_STORAGE: &[Stage] = &[Stage::Network, Stage::TargetDriver];
const HOST: &[Stage] = &[Stage::HostBlock, Stage::HostDriver, Stage::Network];

/// Of most recordings. The reactors' times are read once a second.
const SHORT: Duration = Duration::from_secs(3);
const LONGER: Duration = Duration::from_secs(4);
/// What the target counts of its buffers is read every five seconds.
const LONGEST: Duration = Duration::from_secs(11);

/// The bdev that all loads go to.
const DRIVE: &str = "Drive";
/// Of a bdev, 512 bytes each.
const BLOCKS: u32 = 65_536;
/// What a flash drive takes, us.
const FLASH: u32 = 250;
/// Of a drive that large commands are read of, us.
const LESS: u32 = 1_000;
/// What a drive takes that many commands are outstanding on, us.
const SLOW: u32 = 3_000;

/// A drive of memory that takes this long, us; 1 of 100 commands, drawn at random by SPDK, the other.
fn drive(average: u32, one_in_100: u32) -> Vec<Call> {
    vec![
        ("bdev_malloc_create", json!({ "name": "Memory", "num_blocks": BLOCKS, "block_size": 512 })),
        (
            "bdev_delay_create",
            json!({
                "name": DRIVE,
                "base_bdev_name": "Memory",
                "avg_read_latency": average,
                "p99_read_latency": one_in_100,
                "avg_write_latency": average,
                "p99_write_latency": one_in_100,
            }),
        ),
    ]
}

fn reads(bytes: u32, depth: u32) -> Part {
    Part { pattern: "randread", bytes, depth }
}

/// A load whose depth changes, 10 on average: a limit shows in that more at once take longer.
fn deeper_and_deeper(bytes: u32) -> Vec<Part> {
    [4, 8, 12, 16].map(|depth| reads(bytes, depth)).into()
}

/// Small reads of a flash drive, one at a time.
fn plain() -> Plan {
    Plan {
        startup: Vec::new(),
        transport: json!({}),
        bdevs: drive(FLASH, FLASH),
        namespaces: &[DRIVE],
        load_startup: Vec::new(),
        load: vec![reads(4_096, 1)],
        beside: Beside::Nothing,
    }
}

/// A limit of SPDK's own (QoS) on a slow drive.
fn limited(fault: bool, limit: Value, load: Vec<Part>) -> Plan {
    let mut bdevs = drive(SLOW, SLOW);
    if fault {
        bdevs.push(("bdev_set_qos_limit", limit));
    }
    Plan { bdevs, load, ..plain() }
}

fn slower_drive(fault: bool) -> Plan {
    let takes = if fault { FLASH + 300 } else { FLASH };
    Plan { bdevs: drive(takes, takes), ..plain() }
}

fn drive_internal(fault: bool) -> Plan {
    Plan { bdevs: drive(FLASH, if fault { 5_000 } else { FLASH }), load: vec![reads(4_096, 2)], ..plain() }
}

fn iops_limit(fault: bool) -> Plan {
    limited(fault, json!({ "name": DRIVE, "rw_ios_per_sec": 1_000 }), deeper_and_deeper(4_096))
}

fn drive_saturated(fault: bool) -> Plan {
    limited(fault, json!({ "name": DRIVE, "rw_mbytes_per_sec": 64 }), deeper_and_deeper(65_536))
}

fn noisy_neighbour(fault: bool) -> Plan {
    let mut bdevs = drive(FLASH, FLASH);
    bdevs.push(("bdev_set_qos_limit", json!({ "name": DRIVE, "rw_mbytes_per_sec": 200 })));
    bdevs.push(("bdev_split_create", json!({ "base_bdev": DRIVE, "split_count": 2 })));
    Plan {
        bdevs,
        namespaces: &["Drivep0", "Drivep1"],
        beside: Beside::Neighbour(&[
            "--rw",
            "randwrite",
            "--block-size",
            "64K",
            "--queue-depth",
            "16",
            "--nsid",
            "2",
            "--region",
            "16M",
            "--bursts",
        ])
        .when(fault),
        ..plain()
    }
}

fn buffer_pool(fault: bool) -> Plan {
    let buffers = if fault { 8 } else { 1_024 };
    Plan {
        // Neither the bdev layer nor the accelerators keep any of them for themselves.
        startup: vec![
            ("iobuf_set_options", json!({ "small_pool_count": 8_192, "large_pool_count": buffers })),
            ("bdev_set_options", json!({ "iobuf_small_cache_size": 16, "iobuf_large_cache_size": 0 })),
            ("accel_set_options", json!({ "small_cache_size": 16, "large_cache_size": 0 })),
        ],
        bdevs: drive(SLOW, SLOW),
        load: vec![reads(65_536, 16)],
        ..plain()
    }
}

fn reactor_saturated(fault: bool) -> Plan {
    let mut bdevs = drive(FLASH, FLASH);
    bdevs.push(("bdev_malloc_create", json!({ "name": "Other", "num_blocks": BLOCKS, "block_size": 512 })));
    Plan {
        transport: json!({ "max_io_size": 1_048_576 }),
        bdevs,
        namespaces: &[DRIVE, "Other"],
        load: vec![reads(4_096, 2)],
        beside: Beside::Neighbour(&[
            "--rw",
            "write-zeroes",
            "--block-size",
            "4M",
            "--queue-depth",
            "8",
            "--nsid",
            "2",
            "--region",
            "32M",
        ])
        .when(fault),
        ..plain()
    }
}

fn r2t_round_trips(fault: bool) -> Plan {
    Plan {
        transport: json!({ "in_capsule_data_size": if fault { 4_096 } else { 16_384 } }),
        bdevs: drive(10, 10),
        load: vec![Part { pattern: "randwrite", bytes: 16_384, depth: 1 }],
        ..plain()
    }
}

fn transport_window(fault: bool) -> Plan {
    let buffers = json!({ "impl_name": "posix", "recv_buf_size": 65_536 });
    Plan {
        bdevs: drive(LESS, LESS),
        load_startup: if fault { vec![("sock_impl_set_options", buffers)] } else { Vec::new() },
        load: vec![reads(131_072, 4)],
        ..plain()
    }
}

fn fabric_loss(fault: bool) -> Plan {
    Plan { load: vec![reads(4_096, 2)], beside: Beside::Loss(0.01).when(fault), ..plain() }
}

fn host_cpu(fault: bool) -> Plan {
    Plan { beside: Beside::Hogs(3).when(fault), ..plain() }
}

/// All of them.
pub const CASES: &[Case] = &[
    Case {
        name: "slower_drive",
        cause: None,
        injected: "the drive takes 550 us instead of 250, each command: slower, and no cause of those that are known",
        stages: STORAGE,
        plan: slower_drive,
        least: SHORT,
        size: Size {
            of: STORAGE,
            micros: 300.0,
            within: Some(0.05),
            why: "the delay bdev holds each command so much longer; its poller comes round in a microsecond",
        },
        every: true,
    },
    Case {
        name: "drive_internal",
        cause: Some(Cause::DriveInternal),
        injected: "1 of 100 commands, drawn at random by SPDK's delay bdev, takes 5 ms instead of 250 us",
        stages: STORAGE,
        plan: drive_internal,
        least: LONGER,
        size: Size {
            of: STORAGE,
            micros: 0.01 * 4_750.0,
            within: Some(0.3),
            why: "47.5 us on average; how many of some ten thousands are drawn varies by a twentieth",
        },
        every: false,
    },
    Case {
        name: "iops_limit",
        cause: Some(Cause::IopsLimit),
        injected: "SPDK's QoS lets 1,000 commands a second through, and 4, 8, 12 and 16 are outstanding",
        stages: STORAGE,
        plan: iops_limit,
        least: LONGER,
        size: Size {
            of: STORAGE,
            micros: 10.0 * 1_000.0 - 3_000.0,
            within: Some(0.1),
            why: "of 10 outstanding on average each waits its turn, 1 ms apart: 10 ms, in which the drive's own 3 ms are hidden",
        },
        every: false,
    },
    Case {
        name: "drive_saturated",
        cause: Some(Cause::DriveSaturated),
        injected: "SPDK's QoS lets 64 MiB a second through, as a drive whose bandwidth is used up, and 4, 8, 12 and 16 reads of 64 KiB are outstanding",
        stages: STORAGE,
        plan: drive_saturated,
        least: LONGER,
        size: Size {
            of: STORAGE,
            micros: 10.0 * 1_000_000.0 / 1_024.0 - 3_000.0,
            within: Some(0.1),
            why: "64 MiB a second are 1,024 reads: of 10 outstanding on average each waits its turn, in which the drive's own 3 ms are hidden",
        },
        every: false,
    },
    Case {
        name: "noisy_neighbour",
        cause: Some(Cause::NoisyNeighbour),
        injected: "an initiator writes 64 KiB, 16 at once, to another partition of a drive whose bandwidth is 200 MiB a second",
        stages: STORAGE,
        plan: noisy_neighbour,
        least: LONGER,
        size: Size {
            of: STORAGE,
            micros: 200.0,
            within: None,
            why: "the commands before a read are between none and 16, as the neighbour's bursts have it",
        },
        every: false,
    },
    Case {
        name: "buffer_pool",
        cause: Some(Cause::BufferPool),
        injected: "the target has 8 large data buffers (iobuf) for 16 reads of 64 KiB, and storage takes 3 ms",
        stages: TARGET_DRIVER,
        plan: buffer_pool,
        least: LONGEST,
        size: Size {
            of: TARGET_DRIVER,
            micros: 3_000.0,
            within: Some(0.25),
            why: "eight at a time, so that each waits for the eight before it; a little more, as a buffer comes back when the data was sent",
        },
        every: false,
    },
    Case {
        name: "reactor_saturated",
        cause: Some(Cause::ReactorSaturated),
        injected: "the same reactor zeroes 4 MiB of memory with each of a neighbour's commands, 8 at once, on another bdev",
        stages: TARGET_DRIVER,
        plan: reactor_saturated,
        least: LONGER,
        size: Size {
            of: BEFORE_STORAGE,
            micros: 80.0,
            within: None,
            why: "zeroing 4 MiB takes 80 us at the very least, and a command waits for those before it",
        },
        every: false,
    },
    Case {
        name: "r2t_round_trips",
        cause: Some(Cause::R2tRoundTrips),
        injected: "the transport takes 4 KiB in a capsule instead of 16, so that a write of 16 KiB needs an R2T",
        stages: NETWORK,
        plan: r2t_round_trips,
        least: SHORT,
        size: Size {
            of: HOST,
            micros: 3.0,
            within: None,
            why: "one round trip more, of 3 us at the very least; how long it takes is the machine's",
        },
        every: false,
    },
    Case {
        name: "transport_window",
        cause: Some(Cause::TransportWindow),
        injected: "the initiator's sockets have receive buffers of 64 KiB, and it reads 128 KiB, four at once",
        stages: NETWORK,
        plan: transport_window,
        least: SHORT,
        size: Size {
            of: BEFORE_STORAGE,
            micros: 20.0,
            within: None,
            why: "the data waits for the window again and again; how long each time is the kernel's and the machine's",
        },
        every: false,
    },
    Case {
        name: "fabric_loss",
        cause: Some(Cause::FabricLoss),
        injected: "1 % of the packets are lost, in a network of its own",
        stages: NETWORK,
        plan: fabric_loss,
        least: LONGER,
        size: Size {
            of: NETWORK,
            micros: 20.0,
            within: None,
            why: "a lost packet is sent again after one to two round trips or after a timeout of 200 ms and more: which, is TCP's",
        },
        every: false,
    },
    Case {
        name: "host_cpu",
        cause: Some(Cause::HostCpu),
        injected: "three threads keep the initiator's CPU busy",
        stages: &[Stage::HostDriver, Stage::HostBlock, Stage::Network],
        plan: host_cpu,
        least: LONGER,
        size: Size {
            of: HOST,
            micros: 30.0,
            within: None,
            why: "a command waits until the scheduler gives the initiator its CPU again, which is the scheduler's to choose",
        },
        every: false,
    },
];

#[cfg(test)]
mod tests {
    use super::CASES;
    use std::collections::BTreeSet;

    #[test]
    fn each_is_injected_once_under_the_name_of_its_cause_and_something_is_injected() {
        let names: BTreeSet<_> = CASES.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), CASES.len());
        for case in CASES {
            assert!(case.cause.is_none_or(|cause| cause.name() == case.name), "{}", case.name);
            let (clean, fault) = ((case.plan)(false), (case.plan)(true));
            assert_ne!(format!("{clean:?}"), format!("{fault:?}"), "{}", case.name);
            assert!(!case.stages.is_empty() && case.size.micros > 0.0, "{}", case.name);
            assert!(case.size.within.is_none_or(|within| within < 0.5));
            // The sizes of both are compared, and the load is the same.
            assert_eq!(format!("{:?}", clean.load), format!("{:?}", fault.load));
        }
    }

    #[test]
    fn of_what_every_command_has_the_size_is_known() {
        for case in CASES.iter().filter(|case| case.every || case.cause.is_none()) {
            assert!(case.size.within.is_some() && case.every, "{}", case.name);
        }
    }
}
