//! The two programs against each other: every operation with its data checked, delays, pauses.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::time::Duration;

use standin::spawn::{Initiator, Target};
use standin::{Stage, Summary};

fn run(target: &Target, options: &[&str]) -> Summary {
    let address = target.address().to_string();
    let mut all = vec!["--connect", &address];
    all.extend_from_slice(options);
    let summary = Initiator::spawn(all).unwrap().finish().unwrap();
    assert_eq!(summary.errors, 0, "{summary:?}");
    assert_eq!(summary.verify_errors, 0, "{summary:?}");
    summary
}

fn stat(target: &Target, name: &str) -> u64 {
    let stats = target.stats().unwrap();
    stats.iter().find(|(n, _)| n == name).unwrap().1
}

#[test]
fn every_operation_keeps_its_data() {
    let target = Target::spawn(["--reactors", "2"]).unwrap();
    for operation in
        ["read", "write", "randread", "randwrite", "mixed", "randrw", "compare", "write-zeroes", "dsm"]
    {
        let summary = run(
            &target,
            &[
                "--rw",
                operation,
                "--queues",
                "3",
                "--queue-depth",
                "8",
                "--count",
                "3000",
                "--region",
                "2M",
                "--verify",
            ],
        );
        assert_eq!(summary.commands, 3000, "{operation}");
        assert!(summary.verified > 100, "{operation}: {summary:?}");
        let l = summary.latency.unwrap();
        assert!(l.min_ns > 0 && l.min_ns <= l.p50_ns && l.p50_ns <= l.p99_ns, "{l:?}");
    }
    let summary = run(&target, &["--rw", "flush", "--count", "100"]);
    assert_eq!((summary.commands, stat(&target, "flush")), (100, 100));
    assert_eq!(stat(&target, "errors"), 0);
    target.stop().unwrap();
}

#[test]
fn writes_go_in_the_capsule_or_by_r2t() {
    let target = Target::spawn(["--in-capsule", "8K"]).unwrap();
    run(&target, &["--rw", "randwrite", "--block-size", "8K", "--count", "500", "--verify"]);
    assert_eq!(stat(&target, "r2ts"), 0);
    run(
        &target,
        &[
            "--rw",
            "randwrite",
            "--block-size",
            "16K",
            "--count",
            "500",
            "--verify",
            "--region",
            "4M",
            "--queue-depth",
            "16",
        ],
    );
    assert_eq!(stat(&target, "r2ts"), 500);
    target.stop().unwrap();
}

#[test]
fn one_write_may_take_several_r2ts_and_each_several_data_pdus() {
    let target =
        Target::spawn(["--r2t-bytes", "24K", "--max-h2c-data", "8K", "--max-io-size", "256K"]).unwrap();
    let summary = run(
        &target,
        &[
            "--rw",
            "randwrite",
            "--block-size",
            "64K",
            "--count",
            "300",
            "--queue-depth",
            "8",
            "--queues",
            "2",
            "--region",
            "8M",
            "--verify",
        ],
    );
    assert_eq!(summary.writes, 300);
    // 64K in pieces of 24K: three.
    assert_eq!(stat(&target, "r2ts"), 900);
    run(&target, &["--rw", "randrw", "--block-size", "256K", "--count", "100", "--region", "8M", "--verify"]);
    target.stop().unwrap();
}

#[test]
fn other_shapes_of_a_target_work_too() {
    let target = Target::spawn([
        "--nqn",
        "nqn.2024-01.io.fabscope:a",
        "--nqn",
        "nqn.2024-01.io.fabscope:b",
        "--namespaces",
        "2",
        "--block-size",
        "4096",
        "--namespace-size",
        "8M",
        "--no-c2h-success",
        "--ana",
        "--reactors",
        "3",
    ])
    .unwrap();
    for nqn in ["nqn.2024-01.io.fabscope:a", "nqn.2024-01.io.fabscope:b"] {
        for nsid in ["1", "2"] {
            run(
                &target,
                &[
                    "--nqn", nqn, "--nsid", nsid, "--rw", "randrw", "--count", "500", "--queues", "4",
                    "--region", "8M", "--verify",
                ],
            );
        }
    }
    target.stop().unwrap();

    let null = Target::spawn(["--backend", "null", "--namespace-size", "1T"]).unwrap();
    let summary = run(&null, &["--rw", "randrw", "--count", "500", "--region", "1G"]);
    assert_eq!(summary.commands, 500);
    null.stop().unwrap();
}

/// The shortest of many, so that whatever else the machine does shows least.
fn shortest_us(target: &Target, operation: &str, size: &str) -> f64 {
    let summary = run(target, &["--rw", operation, "--block-size", size, "--count", "400"]);
    summary.latency.unwrap().min_ns as f64 / 1e3
}

#[test]
fn a_delay_shows_in_full_and_goes_away_again() {
    let target = Target::spawn(["--delay", "storage=1ms"]).unwrap();
    assert_eq!(target.control("delay storage").unwrap(), "1000000");
    for (operation, size) in [("randread", "4K"), ("randwrite", "4K"), ("randwrite", "32K")] {
        target.set_delay(Stage::Storage, Duration::ZERO).unwrap();
        let without = shortest_us(&target, operation, size);
        for stage in [Stage::Storage, Stage::TargetDriver] {
            target.set_delay(stage, Duration::from_millis(2)).unwrap();
            let with = shortest_us(&target, operation, size);
            target.set_delay(stage, Duration::ZERO).unwrap();
            let said = format!("{operation} {size} {stage:?}: {without} us, with 2 ms {with} us");
            assert!(with >= 2000.0, "{said}");
            assert!((1900.0..2300.0).contains(&(with - without)), "{said}");
        }
    }
    // The delays add up, and do not hold up the other commands: 16 outstanding take the time of one.
    target.set_delay(Stage::Storage, Duration::from_millis(3)).unwrap();
    target.set_delay(Stage::TargetDriver, Duration::from_millis(2)).unwrap();
    let summary = run(&target, &["--rw", "randread", "--queue-depth", "16", "--count", "800"]);
    let latency = summary.latency.unwrap();
    assert!(latency.min_ns >= 5_000_000, "{latency:?}");
    assert!(latency.p50_ns < 20_000_000, "{latency:?}");
    target.stop().unwrap();
}

#[test]
fn a_paused_subsystem_holds_its_commands_and_resumes_them() {
    let target = Target::spawn(["--reactors", "2"]).unwrap();
    let address = target.address().to_string();
    let mut initiator = Initiator::spawn([
        "--connect",
        &address,
        "--rw",
        "randrw",
        "--queues",
        "2",
        "--queue-depth",
        "4",
        "--count",
        "20000",
        "--verify",
    ])
    .unwrap();
    initiator.start().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    target.control(&format!("pause {}", standin::DEFAULT_NQN)).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let before = stat(&target, "read");
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(stat(&target, "read"), before);
    target.control(&format!("resume {}", standin::DEFAULT_NQN)).unwrap();
    let summary = initiator.finish().unwrap();
    assert_eq!((summary.commands, summary.errors, summary.verify_errors), (20_000, 0, 0));
    target.stop().unwrap();
}

#[test]
fn the_control_socket_answers_nonsense_with_a_reason() {
    let target = Target::spawn([] as [&str; 0]).unwrap();
    for line in
        ["", "delay", "delay network 1us", "delay storage 5", "delay storage 100m", "pause nqn.x", "what"]
    {
        let error = target.control(line).unwrap_err().to_string();
        assert!(error.contains("error"), "{line:?}: {error}");
    }
    assert!(target.control("version").unwrap().contains("stand-in"));
    target.control("quit").unwrap();
    target.stop().unwrap();
}

#[test]
fn wrong_options_and_wrong_targets_are_named() {
    let error = Target::spawn(["--block-size", "1000"]).unwrap_err();
    assert!(format!("{error:#}").contains("--block-size"), "{error:#}");
    let error = Target::spawn(["--nqn", "disk"]).unwrap_err();
    assert!(format!("{error:#}").contains("not an NQN"), "{error:#}");

    let target = Target::spawn([] as [&str; 0]).unwrap();
    let address = target.address().to_string();
    let error = Initiator::spawn(["--connect", &address, "--nqn", "nqn.nobody", "--count", "1"]).unwrap_err();
    assert!(format!("{error:#}").contains("status type 0x1, code 0x82"), "{error:#}");
    let error = Initiator::spawn(["--connect", &address, "--nsid", "9", "--count", "1"]).unwrap_err();
    assert!(format!("{error:#}").contains("namespace 9"), "{error:#}");
    target.stop().unwrap();
    let error = Initiator::spawn(["--connect", &address, "--count", "1"]).unwrap_err();
    assert!(format!("{error:#}").contains(&address), "{error:#}");
}

#[test]
fn an_initiator_whose_target_goes_says_so() {
    let target = Target::spawn([] as [&str; 0]).unwrap();
    let address = target.address().to_string();
    let mut initiator = Initiator::spawn(["--connect", &address, "--duration", "60s"]).unwrap();
    initiator.start().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    target.stop().unwrap();
    let error = initiator.finish().unwrap_err();
    assert!(format!("{error:#}").contains("without a summary"), "{error:#}");
}
