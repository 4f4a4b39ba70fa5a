//! The target against a host that speaks byte by byte: right commands with wrong contents, wrong
//! PDUs, noise. The target answers with the status that the specification names, or terminates
//! the connection; it never panics and goes on serving others.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod raw;

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use raw::{Raw, capsule, connect_capsule, h2c_data, ic_req, sqe, with_blocks};
use standin::Stage;
use standin::spawn::{Initiator, Target};

fn target(options: &[&str]) -> Target {
    Target::spawn(options.iter().copied()).unwrap()
}

/// The target still serves, and ends cleanly when it is asked to.
fn still_well(target: Target) {
    let address = target.address().to_string();
    let summary = Initiator::spawn([
        "--connect",
        &address,
        "--rw",
        "randrw",
        "--verify",
        "--count",
        "200",
        "--region",
        "1M",
    ])
    .unwrap()
    .finish()
    .unwrap();
    assert_eq!((summary.errors, summary.verify_errors), (0, 0));
    target.stop().unwrap();
}

#[test]
fn wrong_commands_get_the_status_that_the_specification_names() {
    let target = target(&["--namespace-size", "1M", "--max-io-size", "64K"]);
    let (mut admin, cntlid) = Raw::admin(target.address());
    let mut io = Raw::io(target.address(), cntlid);
    let blocks = (1 << 20) / 512;

    // Opcodes that do not exist.
    assert_eq!(admin.command(sqe(0xc4, 7, 0, 0)).status(), (0, 0x01));
    assert_eq!(io.command(sqe(0x84, 7, 1, 0)).status(), (0, 0x01));
    // Namespaces that do not exist.
    for nsid in [0, 2, u32::MAX] {
        let read = with_blocks(sqe(0x02, 8, nsid, 512), 0, 1);
        assert_eq!(io.command(read).status(), (0, 0x0b), "nsid {nsid}");
    }
    // Ranges outside the namespace.
    for (slba, nlb) in [(blocks, 1), (blocks - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 4)] {
        let read = with_blocks(sqe(0x02, 9, 1, 512 * 4), slba, nlb);
        assert_eq!(io.command(read).status(), (0, 0x80), "slba {slba} nlb {nlb}");
        let zeroes = with_blocks(sqe(0x08, 9, 1, 0), slba, nlb);
        assert_eq!(io.command(zeroes).status(), (0, 0x80), "slba {slba} nlb {nlb}");
    }
    // Less room than blocks, and more than the target takes.
    assert_eq!(io.command(with_blocks(sqe(0x02, 10, 1, 512), 0, 2)).status(), (0, 0x0f));
    assert_eq!(io.command(with_blocks(sqe(0x02, 10, 1, 1 << 17), 0, 256)).status(), (0, 0x0f));
    // An SGL of a kind that does not exist.
    let mut keyed = with_blocks(sqe(0x02, 11, 1, 512), 0, 1);
    keyed[39] = 0x40;
    assert_eq!(io.command(keyed).status(), (0, 0x11));
    // A comparison that finds a difference.
    let compare = with_blocks(sqe(0x05, 12, 1, 512), 0, 1);
    io.send(&capsule(compare, &[1; 512]));
    assert_eq!(io.pdu().unwrap().status(), (2, 0x85));
    // Identify, Get Log Page and features of kinds that do not exist.
    let mut identify = sqe(0x06, 13, 0, 4096);
    identify[40] = 0xee;
    assert_eq!(admin.command(identify).status(), (0, 0x02));
    let mut log = sqe(0x02, 14, 0, 512);
    log[40] = 0xee;
    log[42] = 127;
    assert_eq!(admin.command(log).status(), (1, 0x09));
    let mut feature = sqe(0x0a, 15, 0, 0);
    feature[40] = 0xee;
    assert_eq!(admin.command(feature).status(), (0, 0x02));
    // The fifth asynchronous event request is one too many; the four are kept.
    for cid in 20..24 {
        admin.send(&capsule(sqe(0x0c, cid, 0, 0), &[]));
    }
    assert_eq!(admin.command(sqe(0x0c, 24, 0, 0)).status(), (1, 0x05));
    assert_eq!(admin.command(sqe(0x18, 25, 0, 0)).status(), (0, 0));
    still_well(target);
}

#[test]
fn a_read_without_the_success_flag_sends_a_response() {
    let target = target(&["--no-c2h-success"]);
    let (_admin, cntlid) = Raw::admin(target.address());
    let mut io = Raw::io(target.address(), cntlid);
    let data = io.command(with_blocks(sqe(0x02, 3, 1, 4096), 0, 8));
    assert_eq!((data.kind(), data.0[1], data.u16_at(8), data.u32_at(16)), (0x07, 0x04, 3, 4096));
    let response = io.pdu().unwrap();
    assert_eq!((response.status(), response.u16_at(20)), ((0, 0), 3));
    still_well(target);
}

#[test]
fn connect_refuses_what_does_not_fit() {
    let target = target(&["--max-queue-depth", "32"]);
    let address = target.address();
    let refused = |bytes: &[u8]| {
        let mut raw = Raw::greeted(address);
        raw.send(bytes);
        raw.pdu().unwrap().status()
    };
    // A subsystem, a controller that do not exist.
    assert_eq!(refused(&connect_capsule(0, 0xffff, "nqn.2024-01.io.fabscope:nobody")), (1, 0x82));
    assert_eq!(refused(&connect_capsule(1, 999, raw::NQN)), (1, 0x82));
    // A queue that is too deep.
    let mut deep = connect_capsule(0, 0xffff, raw::NQN);
    deep[8 + 44..8 + 46].copy_from_slice(&32u16.to_le_bytes());
    assert_eq!(refused(&deep), (1, 0x82));
    // A record format that does not exist.
    let mut format = connect_capsule(0, 0xffff, raw::NQN);
    format[8 + 40] = 1;
    assert_eq!(refused(&format), (1, 0x80));
    // Anything before CONNECT.
    assert_eq!(refused(&capsule(sqe(0x06, 1, 0, 0), &[])), (0, 0x0c));
    // The same I/O queue twice, one with a number beyond those granted.
    let (_admin, cntlid) = Raw::admin(address);
    let _io = Raw::io(address, cntlid);
    assert_eq!(refused(&connect_capsule(1, cntlid, raw::NQN)), (0, 0x0c));
    assert_eq!(refused(&connect_capsule(2, cntlid, raw::NQN)), (1, 0x82));
    still_well(target);
}

#[test]
fn digests_are_declined_in_the_ic_resp() {
    let target = target(&[]);
    let mut raw = Raw::open(target.address());
    let mut req = ic_req();
    req[11] = 3;
    raw.send(&req);
    let resp = raw.pdu().unwrap();
    assert_eq!((resp.kind(), resp.0.len(), resp.0[11]), (0x01, 128, 0));
    still_well(target);
}

#[test]
fn wrong_pdus_end_the_connection_with_the_reason() {
    const FIELD: u16 = 1;
    const SEQUENCE: u16 = 2;
    const RANGE: u16 = 4;
    let target = target(&["--in-capsule", "4K", "--r2t-bytes", "4K"]);
    let address = target.address();

    let first = |bytes: &[u8]| {
        let mut raw = Raw::open(address);
        raw.send(bytes);
        raw.terminated()
    };
    assert_eq!(first(&capsule(sqe(0, 0, 0, 0), &[])), (SEQUENCE, 0));
    assert_eq!(first(&[0xaa, 0, 8, 0, 8, 0, 0, 0]), (FIELD, 0));
    let mut version = ic_req();
    version[8] = 1;
    assert_eq!(first(&version), (FIELD, 8));
    let mut short = ic_req();
    short[4] = 64;
    assert_eq!(first(&short), (FIELD, 4));

    let greeted = |bytes: &[u8]| {
        let mut raw = Raw::greeted(address);
        raw.send(bytes);
        raw.terminated()
    };
    assert_eq!(greeted(&ic_req()), (SEQUENCE, 0));
    // More data in the capsule than the target takes.
    assert_eq!(greeted(&capsule(sqe(0x01, 0, 1, 0), &[0; 8192])), (FIELD, 4));
    // Digests that were never agreed on.
    let mut digest = capsule(sqe(0, 0, 0, 0), &[]);
    digest[1] = 1;
    assert_eq!(greeted(&digest), (FIELD, 1));
    // Data for nobody.
    assert_eq!(greeted(&h2c_data(0, 1, 0, &[0; 512], true)), (FIELD, 10));
    assert_eq!(greeted(&h2c_data(0, 0xffff, 0, &[0; 512], true)), (FIELD, 10));

    // Data at a place that the R2T did not ask for, and beyond what it asked for.
    for (offset, len) in [(512, 512), (0, 8192), (u32::MAX, 512)] {
        let (_admin, cntlid) = Raw::admin(address);
        let mut io = Raw::io(address, cntlid);
        let r2t = io.command(with_blocks(sqe(0x01, 5, 1, 16_384), 0, 32));
        assert_eq!((r2t.kind(), r2t.u16_at(8), r2t.u32_at(12), r2t.u32_at(16)), (0x09, 5, 0, 4096));
        io.send(&h2c_data(5, r2t.u16_at(10), offset, &vec![0; len], true));
        assert_eq!(io.terminated(), (RANGE, 0), "offset {offset}, {len} bytes");
    }
    still_well(target);
}

#[test]
fn a_host_that_vanishes_with_commands_out_takes_nothing_with_it() {
    let target = target(&["--reactors", "2"]);
    target.set_delay(Stage::Storage, Duration::from_millis(30)).unwrap();
    for round in 0..20u16 {
        let (mut admin, cntlid) = Raw::admin(target.address());
        let mut io = Raw::io(target.address(), cntlid);
        admin.send(&capsule(sqe(0x0c, 1, 0, 0), &[]));
        for cid in 0..20 {
            io.send(&capsule(with_blocks(sqe(0x02, cid, 1, 4096), 0, 8), &[]));
            io.send(&capsule(with_blocks(sqe(0x01, 20 + cid, 1, 16_384), 0, 32), &[]));
        }
        if round % 2 == 0 {
            drop(admin);
            std::thread::sleep(Duration::from_millis(u64::from(round)));
        }
        drop(io);
    }
    target.set_delay(Stage::Storage, Duration::ZERO).unwrap();
    still_well(target);
}

#[test]
fn more_commands_than_slots_wait_for_their_turn() {
    let target = target(&["--max-queue-depth", "8"]);
    target.set_delay(Stage::Storage, Duration::from_millis(5)).unwrap();
    let mut admin = Raw::greeted(target.address());
    let mut connect = connect_capsule(0, 0xffff, raw::NQN);
    connect[8 + 44] = 7;
    admin.send(&connect);
    let cntlid = admin.pdu().unwrap().u16_at(8);
    let mut set = sqe(0x7f, 1, 0, 0);
    set[44] = 0x14;
    set[48..52].copy_from_slice(&0x0046_0001u32.to_le_bytes());
    assert_eq!(admin.command(set).status(), (0, 0));
    let mut io = Raw::greeted(target.address());
    let mut connect = connect_capsule(1, cntlid, raw::NQN);
    connect[8 + 44] = 7;
    io.send(&connect);
    assert_eq!(io.pdu().unwrap().status(), (0, 0));
    let mut batch = Vec::new();
    for cid in 0..64 {
        batch.extend_from_slice(&capsule(with_blocks(sqe(0x02, cid, 1, 512), 0, 1), &[]));
    }
    io.send(&batch);
    let mut seen: Vec<_> = (0..64).map(|_| io.pdu().unwrap().u16_at(8)).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..64).collect::<Vec<_>>());
    target.set_delay(Stage::Storage, Duration::ZERO).unwrap();
    target.stop().unwrap();
}

/// Noise, whole or after a correct greeting, and PDUs of the right kind with bytes changed.
#[test]
fn noise_never_stops_the_target() {
    let target = target(&[]);
    let address = target.address();
    let valid = {
        let mut all = ic_req();
        all.extend(connect_capsule(0, 0xffff, raw::NQN));
        all.extend(capsule(with_blocks(sqe(0x01, 2, 1, 16_384), 0, 32), &[]));
        all.extend(h2c_data(2, 1, 0, &[7; 512], false));
        all.extend(capsule(with_blocks(sqe(0x02, 3, 1, 4096), 0, 8), &[]));
        all
    };
    let changed = proptest::collection::vec((0..valid.len(), any::<u8>()), 1..8);
    let strategy = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..600),
        proptest::collection::vec(any::<u8>(), 0..600).prop_map(|noise| {
            let mut all = ic_req();
            all.extend(noise);
            all
        }),
        changed.prop_map(move |changes| {
            let mut all = valid.clone();
            for (at, byte) in changes {
                all[at] = byte;
            }
            all
        }),
    ];
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    runner
        .run(&strategy, |bytes| {
            let mut raw = Raw::open(address);
            raw.send(&bytes);
            // No more is coming: the target has to give up the connection by itself.
            let _ = raw.stream.shutdown(std::net::Shutdown::Write);
            raw.drain();
            Ok(())
        })
        .unwrap();
    still_well(target);
}

#[test]
fn a_silent_host_is_dropped_after_its_keep_alive_timeout() {
    let target = target(&[]);
    let mut raw = Raw::greeted(target.address());
    let mut connect = connect_capsule(0, 0xffff, raw::NQN);
    connect[8 + 48..8 + 52].copy_from_slice(&200u32.to_le_bytes());
    raw.send(&connect);
    assert_eq!(raw.pdu().unwrap().status(), (0, 0));
    assert!(raw.drain().is_empty());
    still_well(target);
}
