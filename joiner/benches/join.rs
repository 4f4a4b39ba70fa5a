//! Joining and reporting pairs of runs whose truth is known, from the files on disk to the table.
//!
//!     cargo bench -p joiner
//!
//! `against_duckdb.py` beside it holds the same against DuckDB.

// What fails here fails the benchmark, as in a test.
#![allow(clippy::expect_used)]

use joiner::synthetic::{Cids, Load, Pattern};
use joiner::{Bounds, JoinOptions, ReportOptions, join, report, report_within};
use run_format::Run;
use std::path::PathBuf;

fn main() {
    divan::main();
}

/// The runs of a load, written once.
fn runs(name: &str, load: &Load) -> (Run, Run) {
    let folder: PathBuf = [env!("CARGO_TARGET_TMPDIR"), name].iter().collect();
    let (host, target) = (folder.join("host.run"), folder.join("target.run"));
    match (Run::open(&host), Run::open(&target)) {
        (Ok(host), Ok(target)) => (host, target),
        _ => load.record().write(&folder).expect("the benchmark's folder can be written"),
    }
}

fn join_and_report(bencher: divan::Bencher<'_, '_>, name: &str, load: &Load) {
    let (host, target) = runs(name, load);
    bencher.bench_local(|| {
        let joined = join(&host, &target, &JoinOptions::default()).expect("the runs join");
        report(&joined, &ReportOptions::default()).expect("the join has commands").to_table()
    });
}

/// 1 million commands a side, random 4 KiB and 64 KiB, eight queues.
#[divan::bench(sample_count = 5)]
fn million(bencher: divan::Bencher<'_, '_>) {
    let load = Load { commands: 1_000_000, queues: 8, ..Load::default() };
    join_and_report(bencher, "million", &load);
}

/// 1 million reads of one block at queue depth 1 with one cid: every key is the same.
#[divan::bench(sample_count = 5)]
fn million_of_one_block(bencher: divan::Bencher<'_, '_>) {
    let load = Load {
        commands: 1_000_000,
        queues: 1,
        depth: 1,
        writes: 0.0,
        pattern: Pattern::OneBlock,
        cids: Cids::Reused,
        ..Load::default()
    };
    join_and_report(bencher, "million_of_one_block", &load);
}

/// 10 million commands a side, within the memory that a report takes at most unless told otherwise; prints the most
/// that the process had, which is this bench's if it runs by itself.
#[divan::bench(sample_count = 1, sample_size = 1)]
fn ten_million(bencher: divan::Bencher<'_, '_>) {
    let folder: PathBuf = [env!("CARGO_TARGET_TMPDIR"), "ten_million_streamed"].iter().collect();
    let (host, target) = match (Run::open(&folder.join("host.run")), Run::open(&folder.join("target.run"))) {
        (Ok(host), Ok(target)) => (host, target),
        _ => {
            std::fs::create_dir_all(&folder).expect("the benchmark's folder can be made");
            let load = Load { commands: 10_000_000, queues: 8, ..Load::default() };
            load.stream(&folder).expect("the benchmark's folder can be written")
        }
    };
    bencher.bench_local(|| {
        let (how, bounds) = (ReportOptions::default(), Bounds::default());
        let report = report_within(&host, &target, &JoinOptions::default(), &how, &bounds);
        report.expect("the runs join").to_table()
    });
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if let Some(peak) = status.lines().find(|line| line.starts_with("VmHWM")) {
        eprintln!("{peak}");
    }
}
