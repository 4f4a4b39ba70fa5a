//! Whether a recording keeps up with half a million commands a second, and what it takes of a core:
//! `cargo bench -p spdk-probes --bench recording`.
//!
//! A small BPF program puts records like a target's into a ring of the default size at an even pace, from a thread of
//! its own; the very code that records SPDK takes them out and writes a run, as `fabscope record` does. The table has
//! the CPU time of all threads but the producer's: of reading, encoding, compressing and writing.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use run_format::{Counters, Kind, Manifest, RunWriter, Side, monotonic_now};
use spdk_probes::measure::Flood;

/// How long each rate is held.
const TIME: Duration = Duration::from_secs(5);
const RATES: [u64; 3] = [100_000, 500_000, 1_000_000];
const ROUNDS: usize = 3;

fn manifest() -> Manifest {
    Manifest::begun(Side::Target, Kind::Spdk, env!("CARGO_PKG_VERSION"))
}

fn cpu(who: UsageWho) -> Duration {
    let usage = getrusage(who).unwrap();
    let time = |t: nix::sys::time::TimeVal| {
        Duration::from_micros((t.tv_sec() * 1_000_000 + t.tv_usec()).unsigned_abs())
    };
    time(usage.user_time()) + time(usage.system_time())
}

/// One recording: records sent, lost and written a second, bytes a record, and the share of a core.
struct Measured {
    sent: u64,
    lost: u64,
    recorded: u64,
    bytes: u64,
    share: f64,
    wall: Duration,
}

fn measure(rate: u64) -> Measured {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut flood = Flood::new().expect("BPF can be loaded (as root)");
    let mut writer = RunWriter::create(&run, manifest(), false).unwrap();
    let producer = flood.producer().unwrap();
    let (before, began) = (cpu(UsageWho::RUSAGE_SELF), Instant::now());
    let thread = std::thread::spawn(move || {
        producer.pace(rate, TIME).unwrap();
        cpu(UsageWho::RUSAGE_THREAD)
    });
    while !thread.is_finished() {
        flood.poll(Duration::from_millis(50), &mut writer);
        writer.tick().unwrap();
    }
    let of_producer = thread.join().unwrap();
    flood.poll(Duration::ZERO, &mut writer);
    let recorded = writer.recorded();
    let (sent, lost) = flood.sent_and_lost().unwrap();
    writer.close(Counters { seen: sent + lost, recorded, ..Counters::default() }, monotonic_now()).unwrap();
    let wall = began.elapsed();
    let taken = cpu(UsageWho::RUSAGE_SELF) - before - of_producer;
    let bytes = std::fs::read_dir(run.join("commands"))
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    Measured { sent, lost, recorded, bytes, share: taken.as_secs_f64() / TIME.as_secs_f64(), wall }
}

fn main() {
    println!("| asked for | sent a second | lost | in the run | of one core | bytes a command |");
    println!("|---|---|---|---|---|---|");
    for rate in RATES {
        let mut rounds: Vec<Measured> = (0..ROUNDS).map(|_| measure(rate)).collect();
        rounds.sort_by(|a, b| a.share.total_cmp(&b.share));
        let lost: u64 = rounds.iter().map(|round| round.lost).sum();
        let Some(median) = rounds.get(ROUNDS / 2) else { return };
        assert_eq!(median.recorded, median.sent, "what is in the ring is in the run");
        println!(
            "| {rate} | {:.0} | {lost} | {} | {:.0} % | {:.1} |",
            median.sent as f64 / TIME.min(median.wall).as_secs_f64(),
            median.recorded,
            median.share * 100.0,
            median.bytes as f64 / median.recorded as f64
        );
    }
}
