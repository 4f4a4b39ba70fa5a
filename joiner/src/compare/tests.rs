//! Comparisons of runs whose truth is known.

use super::input::Reading;
use super::{CompareOptions, Comparison, Statistic, Verdict, compare_readings};
use crate::recording::Recording;
use crate::synthetic::{Load, Runs, Weather};
use rayon::prelude::*;

/// One machine, so that the clock need not be searched for; ten seconds of reads at depth 1, a thousand a second.
fn load(seed: u64) -> Load {
    Load {
        seed,
        commands: 10_000,
        queues: 1,
        depth: 1,
        writes: 0.0,
        storage_ns: 4_000.0,
        pause_ns: 950_000.0,
        slow_one_in: 1_000,
        weather: Some(Weather::default()),
        host_clock_ns: 5_000_000_000_000,
        target_clock_ns: 5_000_000_000_000,
        drift_ppm: 0.0,
        ..Load::default()
    }
}

/// Storage slower by a share of itself.
fn slower(load: Load, share: f64) -> Load {
    Load {
        storage_least_ns: (load.storage_least_ns as f64 * (1.0 + share)) as i64,
        storage_ns: load.storage_ns * (1.0 + share),
        ..load
    }
}

fn on_one_machine(mut runs: Runs) -> Runs {
    for run in [&mut runs.host, &mut runs.target] {
        run.manifest.machine.boot_id = "one boot".into();
    }
    runs
}

fn reading(load: &Load) -> Reading {
    let runs = on_one_machine(load.record());
    Reading::of("a".into(), Some(Recording::of(&runs.host)), Some(Recording::of(&runs.target))).unwrap()
}

fn single(base: &Load, new: &Load) -> Comparison {
    compare_readings(&[reading(base)], &[reading(new)], &CompareOptions::default()).unwrap()
}

fn rate(name: &str, share: f64, runs: usize, from: u64, count: u64, weather: Weather, commands: usize) {
    let began = std::time::Instant::now();
    let r = reading(&load(9)); let t1 = began.elapsed();
    let s = super::slices::Slices::of(r.classes.values().next().unwrap(), &super::moments::rows(r.sides, &[], false, &[])); let t2 = began.elapsed();
    let e = super::resample::estimate(&s); let t3 = began.elapsed();
    println!("{t1:?} {t2:?} {t3:?} block {}", e.block_ns);
    let results: Vec<(Comparison, bool)> = (from..from + count)
        .into_par_iter()
        .map(|n| {
            let make = |side: u64, r: u64| Load {
                weather: Some(weather),
                commands,
                ..load(1 + n * 1000 + side * 500 + r)
            };
            let base: Vec<_> = (0..runs as u64).map(|r| reading(&make(0, r))).collect();
            let new: Vec<_> = (0..runs as u64).map(|r| reading(&slower(make(1, r), share))).collect();
            let c = compare_readings(&base, &new, &CompareOptions::default()).unwrap();
            let found = c.classes[0].moved.as_deref() == Some("storage");
            (c, found)
        })
        .collect();
    let moved = results.iter().filter(|r| r.0.moved()).count();
    let found = results.iter().filter(|r| r.1).count();
    let cells: std::collections::BTreeMap<String, usize> = results
        .iter()
        .flat_map(|r| &r.0.classes[0].rows)
        .flat_map(|row| {
            Statistic::ALL.iter().filter_map(move |s| {
                (row.of(*s)?.verdict == Verdict::Moved).then(|| format!("{}.{}", row.row, s.name()))
            })
        })
        .fold(Default::default(), |mut m, k| {
            *m.entry(k).or_default() += 1;
            m
        });
    let detect: f64 = results
        .iter()
        .filter_map(|r| r.0.classes[0].rows[5].of(Statistic::Typical)?.detectable_ns)
        .sum::<f64>()
        / results.len() as f64;
    let same = results.iter().filter(|r| r.0.classes[0].rows[5].verdict == Some(Verdict::Same)).count();
    println!(
        "{name}: runs {runs} share {share}: moved {moved} storage found {found} of {count}; detectable {detect:.0}; same {same}; {cells:?}"
    );
}

#[test]
#[ignore]
fn sweep() {
    let w = Weather::default();
    let calm = Weather { bursts: 0.0, drift: 0.0, wander: 0.01, run_to_run: 0.0, ..w };
    for (name, w) in [
        ("calm", calm),
        ("default", w),
        ("slow wander", Weather { wander_ns: 50e6, ..w }),
        ("run to run 2 %", Weather { run_to_run: 0.02, ..w }),
    ] {
        rate(name, 0.0, 1, 0, 200, w, 10_000);
        rate(name, 0.06, 1, 5000, 100, w, 10_000);
    }
    rate("default 5", 0.0, 5, 0, 100, w, 5_000);
    rate("default 5", 0.06, 5, 0, 100, w, 5_000);
}

#[test]
fn a_table() {
    let c = single(&load(1), &slower(load(2), 0.1));
    println!("{}", c.to_table(true));
    println!("{}", c.to_markdown());
    println!("{}", serde_json::to_string(&c).unwrap().len());
}
