//! The whole way of a record: from the ring, through the reader, into a run on disk, at a pace that any machine keeps.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's way to fail")]

mod common;

use std::time::{Duration, Instant};

use common::Kept;
use run_format::{Nanos, Side};
use spdk_probes::measure::Flood;

/// A ring of the default size (16 MiB) holds about a hundred of the program's rounds.
const HOLDS: u64 = 100;

#[test]
fn nothing_is_lost_at_a_rate_that_the_ring_can_hold() {
    let mut flood = Flood::new().unwrap();
    let mut kept = Kept::default();
    let producer = flood.producer().unwrap();
    let began = Instant::now();
    // A tenth of what the ring holds each 50 ms: half a second late is not too late.
    let (rate, time) = (Flood::RECORDS * HOLDS / 10 * 20, Duration::from_secs(1));
    let thread = std::thread::spawn(move || producer.pace(rate, time).unwrap());
    while !thread.is_finished() {
        flood.poll(Duration::from_millis(50), &mut kept);
    }
    thread.join().unwrap();
    flood.poll(Duration::ZERO, &mut kept);
    let (sent, lost) = flood.sent_and_lost().unwrap();
    println!("{sent} records in {:?}", began.elapsed());
    assert_eq!((kept.commands.len() as u64, lost), (sent, 0));
    assert!(sent > rate / 4, "{sent}");
    // Each is whole, and in the order in which it was sent.
    assert!(kept.commands.iter().all(|command| command.bytes == 4096 && command.nlb0 == 7));
    kept.commands.iter().for_each(|command| common::assert_ordered(Side::Target, command));
    let received = |command: &run_format::Command| command.time(run_format::Boundary::TRecv);
    assert!(kept.commands.windows(2).all(|two| received(&two[0]) <= received(&two[1]).map(later)));
}

/// The program gives the records of one round times a nanosecond apart, and may take less than that for them.
fn later(time: Nanos) -> Nanos {
    Nanos(time.0 + Flood::RECORDS)
}

#[test]
fn what_a_full_ring_loses_is_counted_and_what_it_holds_is_kept() {
    let mut flood = Flood::new().unwrap();
    let mut kept = Kept::default();
    flood.fill(2 * HOLDS).unwrap();
    let (sent, lost) = flood.sent_and_lost().unwrap();
    assert!(lost > 0);
    assert_eq!(sent + lost, 2 * HOLDS * Flood::RECORDS);
    assert_eq!(flood.drain(&mut kept) as u64, sent);
    assert_eq!(kept.commands.len() as u64, sent);
    // There is room again.
    flood.fill(1).unwrap();
    assert_eq!(flood.drain(&mut kept) as u64, Flood::RECORDS);
    assert_eq!(flood.sent_and_lost().unwrap(), (sent + Flood::RECORDS, lost));
}
