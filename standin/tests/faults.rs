//! The stand-in's faults: commands really wait for them, and all data arrives as it was.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::Value;
use standin::Summary;
use standin::spawn::{Initiator, Target};

fn run(target: &Target, options: &[&str]) -> Summary {
    let address = target.address().to_string();
    let mut all = vec!["--connect", &address];
    all.extend_from_slice(options);
    let summary = Initiator::spawn(all).unwrap().finish().unwrap();
    assert_eq!((summary.errors, summary.verify_errors), (0, 0), "{summary:?}");
    summary
}

#[test]
fn a_drive_that_serves_one_at_a_time_is_no_faster_with_more() {
    let target = Target::spawn(["--drive", "serial=500us"]).unwrap();
    let summary = run(&target, &["--queue-depth", "16", "--count", "640", "--bursts"]);
    // Drawn at random: 0.5 ms each on average, 0.4 s for all of them at the very least.
    assert!(summary.iops < 640.0 / 0.25, "{summary:?}");
    target.stop().unwrap();
}

#[test]
fn a_drive_with_a_limit_completes_so_many_a_second() {
    let target = Target::spawn(["--drive", "iops=2000"]).unwrap();
    let summary = run(&target, &["--queue-depth", "16", "--count", "1000"]);
    assert!(summary.iops <= 2_100.0, "{summary:?}");
    target.stop().unwrap();
}

#[test]
fn commands_wait_for_a_buffer_and_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let rpc = folder.path().join("rpc.sock").display().to_string();
    let target = Target::spawn(["--buffers", "2", "--delay", "storage=100us", "--rpc", &rpc]).unwrap();
    // In-capsule data has buffers of its own; larger writes and reads wait.
    let load = ["--rw", "randrw", "--block-size", "16K", "--queue-depth", "16", "--queues", "2"];
    let load = [&load[..], &["--count", "2000", "--region", "4M", "--verify"]].concat();
    run(&target, &load);
    let waits = call(&rpc, "iobuf_get_stats")["result"][0]["small_pool"]["retry"].as_u64().unwrap();
    assert!(waits > 1_000, "{waits}");
    // A connection that ends while its commands wait takes nothing with it.
    let address = target.address().to_string();
    let mut gone =
        Initiator::spawn(["--connect", &address, "--queue-depth", "64", "--duration", "60s"]).unwrap();
    gone.start().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    drop(gone);
    run(&target, &load);
    target.stop().unwrap();
}

fn call(path: &str, method: &str) -> Value {
    let mut stream = UnixStream::connect(path).unwrap();
    // In two pieces, and nothing ends it.
    let request = format!(r#"{{"jsonrpc":"2.0","id":7,"method":"{method}"}}"#);
    let (first, second) = request.split_at(20);
    stream.write_all(first.as_bytes()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    stream.write_all(second.as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

#[test]
fn a_reactor_with_other_work_says_that_it_is_busy() {
    let folder = tempfile::tempdir().unwrap();
    let rpc = folder.path().join("rpc.sock").display().to_string();
    for (work, least, most) in [("200us", 0.99, 1.0), ("0", 0.0, 0.9)] {
        let target = Target::spawn(["--other-work", work, "--rpc", &rpc]).unwrap();
        let times = || {
            let answer = call(&rpc, "framework_get_reactors");
            let of = |name: &str| answer["result"]["reactors"][0][name].as_f64().unwrap();
            (of("busy"), of("idle"))
        };
        let before = times();
        std::thread::sleep(std::time::Duration::from_millis(500));
        let after = times();
        let (busy, idle) = (after.0 - before.0, after.1 - before.1);
        let share = busy / (busy + idle).max(1.0);
        assert!((least..=most).contains(&share), "{work}: {share}");
        run(&target, &["--count", "200", "--verify", "--region", "1M"]);
        assert!(call(&rpc, "bdev_malloc_create")["error"]["code"] == -32601);
        target.stop().unwrap();
    }
}

#[test]
fn small_socket_buffers_large_reads_and_a_hot_queue_lose_nothing() {
    let target = Target::spawn(["--max-io-size", "1M", "--socket-buffer", "64K"]).unwrap();
    let verified = ["--rw", "randrw", "--block-size", "128K", "--queue-depth", "4", "--count", "200"];
    run(&target, &[&verified[..], &["--socket-buffer", "64K", "--verify", "--region", "8M"]].concat());
    let summary = run(
        &target,
        &[
            "--queue-depth",
            "2",
            "--queues",
            "3",
            "--hot-queue",
            "16",
            "--count",
            "2000",
            "--large-reads",
            "10:1M",
        ],
    );
    assert_eq!((summary.commands, summary.reads), (2000, 2000));
    target.stop().unwrap();
}

/// What a connection sends waits for its turn: so much data takes so long at least.
#[test]
fn a_paced_connection_sends_no_more_than_it_may() {
    let target = Target::spawn(["--pace", "16M"]).unwrap();
    let summary =
        run(&target, &["--block-size", "128K", "--queue-depth", "8", "--count", "256", "--region", "8M"]);
    // 32 MiB in all; what the kernel lets through at once at the beginning is less than half.
    let rate = summary.commands as f64 * 131_072.0 / summary.seconds;
    assert!(rate < 32e6, "{rate} bytes a second");
    target.stop().unwrap();
}

#[test]
fn faults_that_make_no_sense_are_refused() {
    for wrong in [
        ["--drive", "iops=0"],
        ["--drive", "broken"],
        ["--buffers", "0"],
        ["--other-work", "2s"],
        ["--socket-buffer", "many"],
        ["--pace", "0"],
    ] {
        assert!(Target::spawn(wrong).is_err(), "{wrong:?}");
    }
    let target = Target::spawn(Vec::<String>::new()).unwrap();
    let address = target.address().to_string();
    for wrong in
        [["--hot-queue", "0"], ["--large-reads", "0:1M"], ["--large-reads", "5"], ["--large-reads", "5:1T"]]
    {
        let all = [&["--connect", address.as_str(), "--count", "10"][..], &wrong[..]].concat();
        let ended = Initiator::spawn(all).map(Initiator::finish);
        assert!(!matches!(ended, Ok(Ok(_))), "{wrong:?}");
    }
    target.stop().unwrap();
}
