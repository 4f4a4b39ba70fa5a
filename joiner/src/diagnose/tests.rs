//! Each cause on simulated systems of which the truth is known, over several seeds: named first where it is there, not
//! named where it only looks so, and nothing named where nothing is wrong. Telemetry is written and read as in a real
//! run.

use super::simulate::{Happened, Sampled, Storage, World, connection, run, sampled};
use super::{Cause, DiagnoseOptions, Diagnosis, RULES, diagnose, diagnose_guide};
use run_format::MetricKind::{Counter, Event, Gauge};
use run_format::Side::{Host, Target};
use std::collections::BTreeSet;

pub(super) const SEEDS: std::ops::Range<u64> = 1..7;

/// What a healthy system's telemetry says: connections without loss, CPUs with time, reactors with idle time.
pub(super) fn healthy(world: &World) -> Vec<Sampled> {
    let seconds = |at: i64| at as f64 / 1e9;
    let mut lines = Vec::new();
    for side in [Host, Target] {
        for queue in 0..world.queues {
            let of = connection(side, queue);
            let tcp = |metric, kind, value: fn(f64) -> f64| {
                sampled(side, "tcp", metric, kind, &of, move |at| Some(value(seconds(at))))
            };
            lines.extend([
                tcp("retransmitted", Counter, |_| 7.0),
                tcp("busy_time", Counter, |s| s * 4e5),
                tcp("receive_window_limited", Counter, |s| s * 500.0),
                tcp("send_buffer_limited", Counter, |_| 0.0),
                tcp("unacked", Gauge, |_| 2.0),
                tcp("cwnd", Gauge, |_| 10.0),
                tcp("pmtu", Gauge, |_| 1_500.0),
            ]);
        }
        let link =
            |metric, kind, value: f64| sampled(side, "link", metric, kind, "eth0", move |_| Some(value));
        lines.push(link("mtu", Gauge, 1_500.0));
        lines.push(sampled(side, "rdma", "np_cnp_sent", Counter, "mlx5_0/1", |_| Some(3.0)));
        for cpu in 0..world.cpus.max(4) {
            let of = format!("cpu{cpu}");
            let times =
                [("user", 150.0), ("system", 200.0), ("idle", 580.0), ("softirq", 60.0), ("steal", 10.0)];
            for (metric, each) in times {
                lines.push(sampled(side, "cpu", metric, Counter, &of, move |at| Some(seconds(at) * each)));
            }
        }
    }
    for cpu in 0..world.cpus {
        let of = format!("{} eth0-TxRx-{cpu} cpu{cpu}", 30 + cpu);
        lines
            .push(sampled(Host, "interrupts", "interrupts", Counter, &of, move |at| Some(seconds(at) * 9e3)));
    }
    for core in 0..2 {
        let of = format!("lcore {core}");
        lines.push(sampled(Target, "reactors", "busy", Counter, &of, move |at| Some(at as f64 * 0.6)));
        lines.push(sampled(Target, "reactors", "idle", Counter, &of, move |at| Some(at as f64 * 0.4)));
    }
    lines.push(sampled(Target, "spdk", "buffer_waits", Counter, "nvmf_TCP large", |_| Some(0.0)));
    lines.push(sampled(Target, "smart", "throttle1_count", Counter, "nvme0", |_| Some(2.0)));
    lines.push(sampled(Target, "smart", "critical_warning", Gauge, "nvme0", |_| Some(0.0)));
    lines.push(sampled(Target, "smart", "temperature", Gauge, "nvme0", |_| Some(48.0)));
    lines
}

/// Puts lines in the place of those of the same name and object.
pub(super) fn replace(lines: &mut Vec<Sampled>, other: Sampled) {
    lines.retain(|l| {
        (l.side, l.collector, l.metric, &l.object)
            != (other.side, other.collector, other.metric, &other.object)
    });
    lines.push(other);
}

pub(super) fn diagnosed(world: &World, more: impl Fn(&mut Vec<Sampled>, &Happened)) -> Diagnosis {
    let folder = tempfile::tempdir().unwrap();
    let happened = run(world);
    let mut lines = healthy(world);
    more(&mut lines, &happened);
    let (host, target) = happened.write(folder.path(), &lines);
    diagnose(&host, &target, &DiagnoseOptions::default()).unwrap()
}

/// The same without any telemetry.
fn bare(world: &World) -> Diagnosis {
    let folder = tempfile::tempdir().unwrap();
    let (host, target) = run(world).write(folder.path(), &[]);
    diagnose(&host, &target, &DiagnoseOptions::default()).unwrap()
}

pub(super) fn names(diagnosis: &Diagnosis) -> Vec<&'static str> {
    diagnosis.causes.iter().map(|f| f.cause.name()).collect()
}

/// That every cause is told of exactly once.
pub(super) fn complete(diagnosis: &Diagnosis) {
    let told = diagnosis
        .causes
        .iter()
        .map(|f| f.cause)
        .chain(diagnosis.ruled_out.iter().map(|j| j.cause))
        .chain(diagnosis.cannot_tell.iter().map(|j| j.cause));
    let mut told: Vec<Cause> = told.collect();
    told.sort();
    assert_eq!(told, Cause::ALL, "{diagnosis:#?}");
}

pub(super) fn is_first(cause: Cause, seed: u64, diagnosis: &Diagnosis) {
    complete(diagnosis);
    let first = diagnosis.causes.first().map(|f| f.cause);
    assert_eq!(first, Some(cause), "seed {seed}: {}", diagnosis.to_table());
    let finding = &diagnosis.causes[0];
    assert!(!finding.evidence.is_empty() && finding.excess_ns > 0.0 && finding.commands > 0);
}

pub(super) fn is_not_named(cause: Cause, seed: u64, diagnosis: &Diagnosis) {
    complete(diagnosis);
    assert!(!names(diagnosis).contains(&cause.name()), "seed {seed}: {}", diagnosis.to_table());
}

pub(super) fn is_clean(what: &str, seed: u64, diagnosis: &Diagnosis) {
    complete(diagnosis);
    assert!(diagnosis.causes.is_empty(), "{what}, seed {seed}: {}", diagnosis.to_table());
}

pub(super) fn event_lines(happened: &Happened, queues: u32) -> Vec<Sampled> {
    (0..queues)
        .map(|queue| Sampled {
            side: Target,
            collector: "retransmits",
            metric: "retransmit",
            kind: Event,
            object: connection(Target, queue),
            value: Box::new(|_| None),
            events: happened.losses.iter().filter(|l| l.1 == queue).map(|l| l.0).collect(),
        })
        .collect()
}

#[test]
fn fabric_loss_is_tied_to_the_commands_in_flight() {
    for seed in SEEDS {
        let lossy = World { losses: 8.0, stall: 5_000_000, ..World::new(seed) };
        let exact = diagnosed(&lossy, |lines, happened| lines.extend(event_lines(happened, 4)));
        is_first(Cause::FabricLoss, seed, &exact);
        let longest = exact.stalls.iter().max_by_key(|s| s.slowest_ns).unwrap();
        assert!(longest.from_ns == longest.to_ns && longest.commands >= 1, "{longest:?}");
        assert!(exact.stalls.iter().all(|s| s.segments == 1.0));
        // Of counters alone, to the sample.
        let counted = diagnosed(&lossy, |lines, happened| {
            for queue in 0..4 {
                let times: Vec<i64> = happened.losses.iter().filter(|l| l.1 == queue).map(|l| l.0).collect();
                let count = move |at: i64| Some(7.0 + times.partition_point(|&t| t <= at) as f64);
                replace(
                    lines,
                    sampled(Target, "tcp", "retransmitted", Counter, &connection(Target, queue), count),
                );
            }
        });
        is_first(Cause::FabricLoss, seed, &counted);
        // A receiver that was away acknowledges late: what was sent again meanwhile it had already, and says so. Its
        // commands are slow all the same.
        let reported = |share: usize| {
            move |lines: &mut Vec<Sampled>, happened: &Happened| {
                lines.extend(event_lines(happened, 4));
                for queue in 0..4 {
                    let all = happened.losses.iter().filter(|l| l.1 == queue).map(|l| l.0);
                    let times: Vec<i64> =
                        all.enumerate().filter(|(n, _)| n % share == 0).map(|t| t.1).collect();
                    // A report comes after the next round trip.
                    let count = move |at: i64| Some(times.partition_point(|&t| t + 1_000_000 <= at) as f64);
                    let of = connection(Target, queue);
                    lines.push(sampled(Target, "tcp", "dsack_duplicates", Counter, &of, count));
                }
            }
        };
        let late = diagnosed(&lossy, reported(1));
        is_not_named(Cause::FabricLoss, seed, &late);
        assert!(late.stalls.iter().all(|s| s.needed() < 0.5), "{:?}", late.stalls);
        let why = late.ruled_out.iter().find(|j| j.cause == Cause::FabricLoss).map(|j| j.why.as_str());
        assert!(why.is_some_and(|why| why.contains("DSACK")), "{why:?}");
        // A third of them needless leaves the rest lost.
        let some = diagnosed(&lossy, reported(3));
        is_first(Cause::FabricLoss, seed, &some);
        let (lost, all) =
            some.stalls.iter().fold((0.0, 0.0), |(n, all), s| (n + s.needed(), all + s.segments));
        assert!((0.6..0.75).contains(&(lost / all)), "{lost} of {all}");
        // Needless retransmissions, that hold nothing up.
        let spurious = World { losses: 8.0, stall: 0, ..World::new(seed) };
        let diagnosis = diagnosed(&spurious, |lines, happened| lines.extend(event_lines(happened, 4)));
        is_not_named(Cause::FabricLoss, seed, &diagnosis);
    }
}

#[test]
fn fabric_congestion_is_a_slow_network_while_marked() {
    for seed in SEEDS {
        let cnps = |lines: &mut Vec<Sampled>, _: &Happened| {
            replace(lines, counted_while_slow("mlx5_0/1", "np_cnp_sent"));
        };
        is_first(Cause::FabricCongestion, seed, &diagnosed(&slow_now_and_then(seed), cnps));
        is_clean("marks that cost nothing", seed, &diagnosed(&World::new(seed), cnps));
    }
}

/// Its network is slow for 300 ms of each second.
fn slow_now_and_then(seed: u64) -> World {
    World { slow_network: Some((200, 500, 8.0)), ..World::new(seed) }
}

/// An RDMA counter that grows in just that time.
fn counted_while_slow(object: &str, metric: &'static str) -> Sampled {
    sampled(Target, "rdma", metric, Counter, object, |at| {
        let (second, rest) = (at / 1_000_000_000, at % 1_000_000_000);
        Some((second * 300 + ((rest - 200_000_000) / 1_000_000).clamp(0, 300)) as f64 * 20.0)
    })
}

#[test]
fn what_devices_count_when_rdma_loses_packets_tells_of_congestion_and_their_traffic_does_not() {
    let with = |object: &str, metric: &'static str| {
        diagnosed(&slow_now_and_then(1), |lines, _| lines.push(counted_while_slow(object, metric)))
    };
    for (object, metric) in [
        ("mlx5_0/1", "out_of_sequence"),
        ("mlx5_0/1", "packet_seq_err"),
        ("mlx5_0/1", "local_ack_timeout_err"),
        ("rxe0/1", "out_of_seq_request"),
        ("rxe0/1", "rcvd_seq_err"),
        ("rxe0/1", "completer_retry_err"),
    ] {
        is_first(Cause::FabricCongestion, 1, &with(object, metric));
    }
    for metric in ["sent_pkts", "rcvd_pkts", "rdma_sends", "ack_deferred", "rcvd_rnr_err"] {
        is_not_named(Cause::FabricCongestion, 1, &with("rxe0/1", metric));
    }
}

#[test]
fn mtu_mismatch_makes_large_commands_slow_alone() {
    for seed in SEEDS {
        let jumbo = |lines: &mut Vec<Sampled>, _: &Happened| {
            for queue in 0..4 {
                let of = connection(Host, queue);
                replace(lines, sampled(Host, "tcp", "pmtu", Gauge, &of, |_| Some(9_000.0)));
            }
        };
        let large = large_and_small(seed);
        is_first(Cause::MtuMismatch, seed, &diagnosed(&large, jumbo));
        let fast = World { per_byte: 0.0, ..large };
        is_clean("MTUs that differ and cost nothing", seed, &diagnosed(&fast, jumbo));
        is_clean("small commands alone", seed, &diagnosed(&World::new(seed), jumbo));
    }
}

#[test]
fn r2t_round_trips_of_small_writes_are_seen_in_the_commands_alone() {
    for seed in SEEDS {
        let small = World { writes: 6, in_capsule: 0, network: 25_000, ..World::new(seed) };
        is_first(Cause::R2tRoundTrips, seed, &bare(&small));
        let large = World { sizes: [(65_536, 10), (65_536, 0)], ..small };
        is_clean("large writes", seed, &bare(&large));
    }
}

/// Large reads on one connection.
pub(super) fn large_reads(seed: u64) -> World {
    World {
        queues: 1,
        cpus: 1,
        sizes: [(131_072, 10), (131_072, 0)],
        writes: 0,
        per_byte: 1.2,
        network_serial: 1,
        places: 8,
        pause: 1e6,
        ..World::new(seed)
    }
}

/// Commands of one segment and of many, whose data takes its time.
pub(super) fn large_and_small(seed: u64) -> World {
    World { sizes: [(4_096, 5), (65_536, 5)], in_capsule: 1 << 20, per_byte: 8.0, ..World::new(seed) }
}

#[test]
fn transport_window_is_a_connection_that_is_held_back() {
    for seed in SEEDS {
        let held = |share: f64| {
            move |lines: &mut Vec<Sampled>, _: &Happened| {
                let of = connection(Target, 0);
                let time = move |at: i64| Some(at as f64 / 1e3 * 0.4 * share);
                replace(lines, sampled(Target, "tcp", "receive_window_limited", Counter, &of, time));
            }
        };
        let world = large_reads(seed);
        is_first(Cause::TransportWindow, seed, &diagnosed(&world, held(0.6)));
        is_not_named(Cause::TransportWindow, seed, &diagnosed(&world, held(0.02)));
    }
}

#[test]
fn drive_saturated_serves_no_more() {
    for seed in SEEDS {
        let full = World {
            storage: Storage::Serial(20_000, 20_000.0, 1.0),
            sizes: [(65_536, 5), (131_072, 5)],
            writes: 0,
            sequential: true,
            places: 48,
            pause: 1e6,
            ..World::new(seed)
        };
        is_first(Cause::DriveSaturated, seed, &bare(&full));
        let roomy = World { storage: Storage::Parallel(500_000, 200_000.0), ..full };
        is_clean("a deep queue on a drive with room", seed, &bare(&roomy));
    }
}

#[test]
fn reactor_saturated_is_busy_all_the_time() {
    for seed in SEEDS {
        let reactor = |share: f64| {
            move |lines: &mut Vec<Sampled>, _: &Happened| {
                let busy = move |at: i64| Some(at as f64 * share);
                let idle = move |at: i64| Some(at as f64 * (1.0 - share));
                replace(lines, sampled(Target, "reactors", "busy", Counter, "lcore 1", busy));
                replace(lines, sampled(Target, "reactors", "idle", Counter, "lcore 1", idle));
            }
        };
        let busy = World { target_serial: 60_000, places: 48, pause: 1e6, ..World::new(seed) };
        is_first(Cause::ReactorSaturated, seed, &diagnosed(&busy, reactor(0.995)));
        is_not_named(Cause::ReactorSaturated, seed, &diagnosed(&busy, reactor(0.7)));
        is_clean("a busy reactor that keeps up", seed, &diagnosed(&World::new(seed), reactor(0.97)));
    }
}

#[test]
fn buffer_pool_is_waited_for_before_storage() {
    for seed in SEEDS {
        let waits = |lines: &mut Vec<Sampled>, _: &Happened| {
            let count = |at: i64| Some(at as f64 / 1e9 * 800.0);
            replace(lines, sampled(Target, "spdk", "buffer_waits", Counter, "nvmf_TCP large", count));
        };
        let dry = World { buffer_waits: (150, 400_000), ..World::new(seed) };
        is_first(Cause::BufferPool, seed, &diagnosed(&dry, waits));
        is_not_named(Cause::BufferPool, seed, &diagnosed(&dry, |_, _| ()));
        is_clean("waits that cost nothing", seed, &diagnosed(&World::new(seed), waits));
    }
}

#[test]
fn drive_internal_has_two_speeds() {
    for seed in SEEDS {
        let gc = Storage::Episodes(60_000, 20_000.0, 150_000_000, 8_000_000, 20.0);
        is_first(Cause::DriveInternal, seed, &bare(&World { storage: gc, ..World::new(seed) }));
        let long = Storage::Parallel(10_000, 150_000.0);
        is_clean("one speed with a long tail", seed, &bare(&World { storage: long, ..World::new(seed) }));
    }
}

#[test]
fn drive_throttled_counts_it() {
    for seed in SEEDS {
        let hot = |lines: &mut Vec<Sampled>, _: &Happened| {
            let count = |at: i64| Some(2.0 + (at / 500_000_000) as f64);
            replace(lines, sampled(Target, "smart", "throttle1_count", Counter, "nvme0", count));
            replace(lines, sampled(Target, "smart", "temperature", Gauge, "nvme0", |_| Some(83.0)));
        };
        let slow = World { slow_storage: Some((450, 1_000, 4.0)), ..World::new(seed) };
        is_first(Cause::DriveThrottled, seed, &diagnosed(&slow, hot));
        let warm = |lines: &mut Vec<Sampled>, _: &Happened| {
            replace(lines, sampled(Target, "smart", "temperature", Gauge, "nvme0", |_| Some(71.0)));
        };
        is_clean("a warm drive", seed, &diagnosed(&World::new(seed), warm));
    }
}

#[test]
fn host_cpu_is_short_while_the_host_is_slow() {
    for seed in SEEDS {
        let steal = |share: f64| {
            move |lines: &mut Vec<Sampled>, _: &Happened| {
                for cpu in 0..4 {
                    let of = format!("cpu{cpu}");
                    let in_second =
                        |at: i64| ((at % 1_000_000_000 - 300_000_000).clamp(0, 300_000_000)) as f64;
                    let time = move |at: i64| {
                        Some(((at / 1_000_000_000) as f64 * 3e8 + in_second(at)) / 1e6 * share)
                    };
                    replace(lines, sampled(Host, "cpu", "steal", Counter, &of, time));
                }
            }
        };
        let slow = World { slow_host: Some((300, 600, 15.0)), ..World::new(seed) };
        is_first(Cause::HostCpu, seed, &diagnosed(&slow, steal(0.4)));
        is_clean("steal that costs nothing", seed, &diagnosed(&World::new(seed), steal(0.4)));
        is_not_named(Cause::HostCpu, seed, &diagnosed(&slow, steal(0.01)));
        // A machine that is short of CPUs, and a process whose thread has one when it needs it, or has not.
        let waits = |share: f64| {
            move |lines: &mut Vec<Sampled>, _: &Happened| {
                let slow = |at: i64| {
                    ((at / 1_000_000_000) * 300_000_000
                        + (at % 1_000_000_000 - 300_000_000).clamp(0, 300_000_000)) as f64
                };
                let thread = "42 reactor_1";
                lines.push(sampled(Host, "pressure", "some", Counter, "cpu", move |at| {
                    Some(slow(at) / 1e3 * 0.6)
                }));
                lines.push(sampled(Host, "threads", "run_time", Counter, thread, |at| Some(at as f64 * 0.3)));
                lines.push(sampled(Host, "threads", "run_delay", Counter, thread, move |at| {
                    Some(slow(at) * share)
                }));
            }
        };
        is_first(Cause::HostCpu, seed, &diagnosed(&slow, waits(0.5)));
        is_not_named(Cause::HostCpu, seed, &diagnosed(&slow, waits(0.02)));
    }
}

#[test]
fn interrupt_affinity_needs_a_slow_way_out() {
    for seed in SEEDS {
        let elsewhere = |lines: &mut Vec<Sampled>, _: &Happened| {
            lines.retain(|l| l.collector != "interrupts");
            let count = |at: i64| Some(at as f64 / 1e9 * 3e4);
            lines.push(sampled(Host, "interrupts", "interrupts", Counter, "38 eth0-TxRx-0 cpu7", count));
        };
        let slow = World { way_out: 40_000, ..World::new(seed) };
        is_first(Cause::InterruptAffinity, seed, &diagnosed(&slow, elsewhere));
        is_not_named(Cause::InterruptAffinity, seed, &diagnosed(&slow, |_, _| ()));
        is_clean("a short way out", seed, &diagnosed(&World::new(seed), elsewhere));
    }
}

#[test]
fn too_few_queues_make_commands_wait_to_be_sent() {
    for seed in SEEDS {
        let few = World {
            queues: 1,
            cpus: 8,
            places: 64,
            host_serial: 40_000,
            pause: 200_000.0,
            ..World::new(seed)
        };
        is_first(Cause::TooFewQueues, seed, &bare(&few));
        let free = World { host_serial: 0, ..few.clone() };
        is_clean("one queue that nothing waits for", seed, &bare(&free));
        is_not_named(Cause::TooFewQueues, seed, &bare(&World { queues: 8, ..few }));
    }
}

#[test]
fn a_hot_queue_is_slower_than_the_others() {
    for seed in SEEDS {
        let hot =
            World { on_first: 8, places: 60, network_serial: 35_000, pause: 300_000.0, ..World::new(seed) };
        is_first(Cause::HotQueue, seed, &bare(&hot));
        let fast = World { network_serial: 0, ..hot };
        is_clean("a queue that carries most and is as fast", seed, &bare(&fast));
    }
}

#[test]
fn small_commands_behind_large_ones_on_a_queue() {
    for seed in SEEDS {
        let mixed = World {
            sizes: [(4_096, 7), (524_288, 3)],
            writes: 0,
            per_byte: 0.9,
            in_order: true,
            places: 16,
            pause: 4e6,
            ..World::new(seed)
        };
        is_first(Cause::HeadOfLine, seed, &bare(&mixed));
        let apart = World { in_order: false, per_byte: 0.05, ..mixed };
        is_clean("mixed sizes that do not wait for each other", seed, &bare(&apart));
    }
}

#[test]
fn a_noisy_neighbour_completes_more_while_the_other_is_slow() {
    for seed in SEEDS {
        let noisy = World {
            neighbour: 6,
            bursts: true,
            places: 40,
            storage: Storage::Shared(60_000, 20_000.0, 0.6),
            pause: 300_000.0,
            commands: 16_000,
            ..World::new(seed)
        };
        is_first(Cause::NoisyNeighbour, seed, &bare(&noisy));
        let quiet = World { storage: Storage::Parallel(60_000, 20_000.0), ..noisy };
        is_clean("a neighbour that disturbs nobody", seed, &bare(&quiet));
    }
}

/// What another host has on the drive is large: its bandwidth is what is met, however small the recorded host's are.
#[test]
fn small_commands_among_large_ones_of_another_host_meet_no_iops_limit() {
    for seed in SEEDS {
        let world = World {
            storage: Storage::Limit(100_000, 60_000.0),
            places: 40,
            pause: 2e6,
            sizes: [(65_536, 5), (4_096, 0)],
            writes: 0,
            ..World::new(seed)
        };
        let mut happened = run(&world);
        happened.leave_to_another_host(|command| command.bytes > 4_096);
        let folder = tempfile::tempdir().unwrap();
        let (host, target) = happened.write(folder.path(), &[]);
        let diagnosis = diagnose(&host, &target, &DiagnoseOptions::default()).unwrap();
        is_first(Cause::DriveSaturated, seed, &diagnosis);
        assert!(!names(&diagnosis).contains(&"iops_limit"), "seed {seed}: {}", diagnosis.to_table());
    }
}

#[test]
fn an_iops_limit_lets_the_same_number_through() {
    for seed in SEEDS {
        let limited =
            World { storage: Storage::Limit(100_000, 60_000.0), places: 40, pause: 2e6, ..World::new(seed) };
        is_first(Cause::IopsLimit, seed, &bare(&limited));
        let below =
            World { storage: Storage::Limit(100_000, 60_000.0), places: 8, pause: 4e6, ..World::new(seed) };
        is_clean("below the limit", seed, &bare(&below));
        // A machine that is away now and then completes nothing meanwhile and much afterwards.
        let away = Some((500_000_000, 40_000_000));
        is_first(Cause::IopsLimit, seed, &bare(&World { away, ..limited.clone() }));
        // A drive that serves one at a time and is full completes unevenly, whether or not the machine is away.
        for away in [None, away] {
            let full = World {
                storage: Storage::Serial(0, 100_000.0, 0.0),
                places: 60,
                pause: 4e6,
                away,
                ..World::new(seed)
            };
            is_first(Cause::DriveSaturated, seed, &bare(&full));
        }
    }
}

/// A load and its name.
type Named = (&'static str, fn(u64) -> World);

#[test]
fn clean_loads_have_no_cause() {
    let worlds: [Named; 13] = [
        ("plain", World::new),
        ("deep queues", |s| World { places: 128, pause: 10_000.0, ..World::new(s) }),
        ("mixed sizes", |s| World { sizes: [(4_096, 6), (8_192, 4)], per_byte: 0.1, ..World::new(s) }),
        ("writes with R2T", |s| World { writes: 10, sizes: [(65_536, 10), (65_536, 0)], ..World::new(s) }),
        ("writes in capsules", |s| World { writes: 10, ..World::new(s) }),
        ("few commands", |s| World { commands: 300, ..World::new(s) }),
        ("sampled", |s| World { one_in: 4, places: 64, pause: 100_000.0, ..World::new(s) }),
        ("one queue", |s| World { queues: 1, cpus: 1, ..World::new(s) }),
        ("many queues", |s| World { queues: 32, cpus: 32, places: 96, ..World::new(s) }),
        ("sequential", |s| World { sequential: true, sizes: [(131_072, 10), (131_072, 0)], ..World::new(s) }),
        ("a slow fabric", |s| World { network: 200_000, network_more: 20_000.0, ..World::new(s) }),
        ("two namespaces", |s| World { neighbour: 5, places: 32, ..World::new(s) }),
        ("a fast drive", |s| World { storage: Storage::Parallel(3_000, 1_500.0), ..World::new(s) }),
    ];
    for (what, world) in worlds {
        for seed in 1..4 {
            is_clean(what, seed, &bare(&world(seed)));
            is_clean(what, seed, &diagnosed(&world(seed), |_, _| ()));
        }
    }
}

#[test]
fn every_cause_has_one_rule_with_reasons_and_the_guide_has_them_all() {
    let causes: BTreeSet<Cause> = RULES.iter().map(|rule| rule.cause).collect();
    assert_eq!(causes.len(), RULES.len());
    assert_eq!(causes.into_iter().collect::<Vec<_>>(), Cause::ALL);
    for rule in RULES {
        assert!(
            !rule.thresholds.is_empty()
                && rule.thresholds.iter().all(|t| t.why.len() > 10 && !t.unit.is_empty())
        );
        assert!(rule.verify.contains("AFTER_HOST.run") && rule.verify.contains("BEFORE"));
        assert!(!rule.yields_to.contains(&rule.cause));
    }
    let guide = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/diagnose.md")).unwrap();
    for line in diagnose_guide().lines() {
        assert!(guide.contains(line), "docs/diagnose.md lacks: {line}");
    }
    for &cause in Cause::ALL {
        assert_eq!(Cause::parse(cause.name()), Some(cause));
    }
    assert_eq!(Cause::parse("gremlins"), None);
}
