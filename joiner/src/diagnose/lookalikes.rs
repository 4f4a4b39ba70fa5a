//! What looks like a cause beside another one that is there, and must not be taken for it: each on simulated systems of
//! which the truth is known.

use super::simulate::{Happened, Sampled, Storage, World, connection, run, sampled};
use super::tests::{
    SEEDS, diagnosed, event_lines, healthy, is_clean, is_first, is_not_named, large_and_small, large_reads,
    names, replace,
};
use super::{Cause, DiagnoseOptions, Diagnosis, diagnose};
use crate::compare::Input;
use run_format::MetricKind::{Counter, Gauge};
use run_format::Side::{self, Host, Target};

/// A thread of a side's process that runs and waits for these shares of the time.
fn thread(side: Side, runs: f64, waits: impl Fn(i64) -> f64 + 'static) -> [Sampled; 2] {
    let name = "42 reactor_1";
    [
        sampled(side, "threads", "run_time", Counter, name, move |at| Some(at as f64 * runs)),
        sampled(side, "threads", "run_delay", Counter, name, move |at| Some(waits(at))),
    ]
}

/// Always the same share of the time.
fn always(share: f64) -> impl Fn(i64) -> f64 {
    move |at| at as f64 * share
}

fn explained(diagnosis: &Diagnosis, cause: Cause) -> f64 {
    diagnosis.causes.iter().find(|finding| finding.cause == cause).map_or(0.0, |finding| finding.explains)
}

#[test]
fn a_host_that_waits_a_little_for_its_cpu_explains_no_more_than_that() {
    for seed in SEEDS {
        // Everything on the host takes 40 times as long, all the time. Its thread waits for an eighth of the time, which
        // is an eighth of what a command takes; the rest is slow for another reason, which nobody knows.
        let slow = World { slow_host: Some((0, 1_000, 40.0)), pause: 10_000.0, ..World::new(seed) };
        let folder = tempfile::tempdir().unwrap();
        let good = World { pause: 10_000.0, ..World::new(seed) };
        let of_good = run(&good).write(&folder.path().join("good"), &healthy(&good));
        let mut lines = healthy(&slow);
        lines.extend(thread(Host, 0.3, always(0.125)));
        let (host, target) = run(&slow).write(&folder.path().join("slow"), &lines);
        let baseline = Some(Input::pair(of_good.0, of_good.1));
        let options = DiagnoseOptions { baseline, ..DiagnoseOptions::default() };
        let diagnosis = diagnose(&host, &target, &options).unwrap();
        let explains = explained(&diagnosis, Cause::HostCpu);
        let excess = 1.0 - 95.0 / 240.0;
        assert!(explains < 0.125 / excess * 1.3, "seed {seed}: {explains}: {}", diagnosis.to_table());
    }
}

#[test]
fn a_loss_that_the_host_is_slow_beside_is_named_first() {
    for seed in SEEDS {
        let lossy = World { losses: 8.0, stall: 5_000_000, ..World::new(seed) };
        let diagnosis = diagnosed(&lossy, |lines, happened| {
            lines.extend(event_lines(happened, 4));
            lines.extend(thread(Host, 0.3, always(0.12)));
        });
        is_first(Cause::FabricLoss, seed, &diagnosis);
        is_not_named(Cause::HostCpu, seed, &diagnosis);
    }
}

#[test]
fn a_retransmission_that_finds_commands_as_at_any_moment_is_no_loss() {
    for seed in SEEDS {
        // So deep that the slowest in flight is always far above the median.
        let deep = World {
            losses: 40.0,
            stall: 0,
            places: 256,
            network_more: 60_000.0,
            pause: 10_000.0,
            commands: 16_000,
            ..World::new(seed)
        };
        let diagnosis = diagnosed(&deep, |lines, happened| lines.extend(event_lines(happened, 4)));
        is_not_named(Cause::FabricLoss, seed, &diagnosis);
        // A short stall, of one and a half of what the network takes, at each: most commands in flight are as fast as
        // ever, and the slowest is not.
        let short = World { losses: 600.0, stall: 60_000, network: 20_000, ..World::new(seed) };
        let diagnosis = diagnosed(&short, |lines, happened| lines.extend(event_lines(happened, 4)));
        is_first(Cause::FabricLoss, seed, &diagnosis);
    }
}

#[test]
fn a_full_congestion_window_before_a_queue_in_the_network_is_no_window_that_is_too_small() {
    for seed in SEEDS {
        let world = large_reads(seed);
        let full = |trip: f64| {
            move |lines: &mut Vec<Sampled>, _: &Happened| {
                let of = connection(Target, 0);
                for (metric, value) in [("unacked", 10.0), ("cwnd", 10.0), ("rtt", trip), ("min_rtt", 40.0)] {
                    replace(lines, sampled(Target, "tcp", metric, Gauge, &of, move |_| Some(value)));
                }
            }
        };
        is_first(Cause::TransportWindow, seed, &diagnosed(&world, full(50.0)));
        is_not_named(Cause::TransportWindow, seed, &diagnosed(&world, full(400.0)));
    }
}

#[test]
fn an_mtu_that_is_found_out_at_first_is_the_one_that_it_comes_to() {
    for seed in SEEDS {
        let large = large_and_small(seed);
        let probing = |lines: &mut Vec<Sampled>, _: &Happened| {
            for queue in 0..4 {
                for side in [Host, Target] {
                    let of = connection(side, queue);
                    // The host's path is taken for a narrow one in the first 300 ms.
                    let narrow = move |at: i64| side == Host && at < 300_000_000;
                    let mtu = move |at: i64| Some(if narrow(at) { 1_500.0 } else { 9_000.0 });
                    replace(lines, sampled(side, "tcp", "pmtu", Gauge, &of, mtu));
                }
            }
        };
        is_not_named(Cause::MtuMismatch, seed, &diagnosed(&large, probing));
    }
}

#[test]
fn storage_that_the_target_is_late_to_see_done_is_no_drives_own_work() {
    for seed in SEEDS {
        // The target's thread is away for 8 ms of each 150, and finds what storage did meanwhile when it is back. By the
        // commands alone that is a drive of two speeds.
        let world = World { away: Some((150_000_000, 8_000_000)), ..World::new(seed) };
        is_first(Cause::DriveInternal, seed, &diagnosed(&world, |_, _| ()));
        let late = diagnosed(&world, |lines, _| {
            let waits = |at: i64| ((at / 150_000_000) * 8_000_000 + (at % 150_000_000).min(8_000_000)) as f64;
            lines.extend(thread(Target, 0.3, waits));
        });
        is_not_named(Cause::DriveInternal, seed, &late);
    }
}

#[test]
fn a_drive_that_throttles_all_the_time_is_held_against_a_baseline() {
    let hot = |lines: &mut Vec<Sampled>| {
        let count = |at: i64| Some(2.0 + (at / 50_000_000) as f64);
        replace(lines, sampled(Target, "smart", "throttle1_count", Counter, "nvme0", count));
        replace(lines, sampled(Target, "smart", "critical_warning", Gauge, "nvme0", |_| Some(2.0)));
    };
    for seed in SEEDS {
        let folder = tempfile::tempdir().unwrap();
        let good = World::new(seed);
        let against_good = |world: &World, name: &str| {
            let of_good =
                run(&good).write(&folder.path().join(format!("good-beside-{name}")), &healthy(&good));
            let mut lines = healthy(world);
            hot(&mut lines);
            let (host, target) = run(world).write(&folder.path().join(name), &lines);
            let baseline = Some(Input::pair(of_good.0, of_good.1));
            diagnose(&host, &target, &DiagnoseOptions { baseline, ..DiagnoseOptions::default() }).unwrap()
        };
        let slow = World { storage: Storage::Parallel(240_000, 80_000.0), ..World::new(seed) };
        is_first(Cause::DriveThrottled, seed, &against_good(&slow, "slow"));
        // Another seed: the same drive, and no command the same.
        is_clean("hot and as fast", seed, &against_good(&World::new(seed + 100), "fast"));
        // Without a baseline nothing is known of how fast it could be.
        let alone = diagnosed(&good, |lines, _| hot(lines));
        is_clean("hot, and nothing to compare with", seed, &alone);
        assert!(alone.cannot_tell.iter().any(|judged| judged.cause == Cause::DriveThrottled));
        assert!(names(&alone).is_empty());
    }
}
