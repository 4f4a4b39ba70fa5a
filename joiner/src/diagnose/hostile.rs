//! Telemetry as broken as machines make it: clocks that jump, counters that wrap or begin anew, names that nobody knows,
//! collectors that looked once or not at all, gaps, samples that are not in order, values that can not be. A healthy
//! system has no cause all the same, and nothing panics.

use super::simulate::{Sampled, Storage, World, connection, run, sampled};
use super::tests::{complete, healthy, is_clean, replace};
use super::{Cause, DiagnoseOptions, Diagnosis, diagnose};
use crate::synthetic::Random;
use run_format::MetricKind::{Counter, Gauge};
use run_format::Side::{Host, Target};
use run_format::{Nanos, TelemetryMetric, TelemetryRow};

/// What is done to a collector's metrics and rows.
type Harm = (&'static str, fn(&mut Random, &mut Vec<TelemetryMetric>, &mut Vec<TelemetryRow>));

fn counters(metrics: &[TelemetryMetric], row: &TelemetryRow) -> bool {
    metrics.get(usize::from(row.metric)).is_some_and(|m| m.kind == Counter)
}

const SECOND: u64 = 1_000_000_000;

const HARMS: &[Harm] = &[
    ("a clock that jumps ahead", |random, _, rows| {
        let at = random.below(rows.len().max(1) as u32) as usize;
        rows.iter_mut().skip(at).for_each(|row| row.at = Nanos(row.at.0 + 3_600 * SECOND));
    }),
    ("a clock that jumps back", |random, _, rows| {
        let at = random.below(rows.len().max(1) as u32) as usize;
        rows.iter_mut().skip(at).for_each(|row| row.at = Nanos(row.at.0.saturating_sub(SECOND / 2)));
    }),
    ("all samples at one time", |_, _, rows| {
        let at = rows.first().map_or(Nanos(0), |row| row.at);
        rows.iter_mut().for_each(|row| row.at = at);
    }),
    ("samples in any order", |random, _, rows| {
        for n in (1..rows.len()).rev() {
            rows.swap(n, random.below(n as u32 + 1) as usize);
        }
    }),
    ("counters of 32 bits that wrap", |_, metrics, rows| {
        metrics.iter_mut().filter(|m| m.kind == Counter).for_each(|m| m.bits = Some(32));
        let of = |row: &TelemetryRow| counters(metrics, row);
        for row in rows.iter_mut().filter(|row| of(row)) {
            row.value = row.value.map(|v| (v + 4_294_967_296.0 - 1_000.0) % 4_294_967_296.0);
        }
    }),
    ("counters that begin anew", |random, metrics, rows| {
        let at = random.below(rows.len().max(1) as u32) as usize;
        let of = |row: &TelemetryRow| counters(metrics, row);
        for (n, row) in rows.iter_mut().enumerate().filter(|(_, row)| of(row)) {
            row.value = row.value.map(|v| if n < at { v + 1e15 } else { v });
        }
    }),
    ("counters of 64 bits at their end", |_, metrics, rows| {
        let of = |row: &TelemetryRow| counters(metrics, row);
        for row in rows.iter_mut().filter(|row| of(row)) {
            row.value = row.value.map(|v| (v + 1.844_674_407_370_955e19) % 1.844_674_407_370_955_2e19);
        }
    }),
    ("objects that nobody knows", |random, _, rows| {
        for row in rows.iter_mut() {
            row.object = match random.below(6) {
                0 => "".into(),
                1 => "cpu".into(),
                2 => "cpu99999999999999999999".into(),
                3 => "[::1]:4420>".into(),
                4 => ">\u{fffd}\u{202e}".into(),
                _ => "x".repeat(5_000).into(),
            };
        }
    }),
    ("metrics of other names", |_, metrics, _| {
        metrics.iter_mut().for_each(|m| m.name = format!("{} (vendor)", m.name));
    }),
    ("gauges for counters and counters for gauges", |_, metrics, _| {
        for metric in metrics.iter_mut().filter(|m| m.name != "sampled") {
            (metric.kind, metric.bits) = match metric.kind {
                Gauge => (Counter, Some(64)),
                Counter => (Gauge, None),
                other => (other, None),
            };
        }
    }),
    ("places that are no metric", |random, _, rows| {
        for row in rows.iter_mut() {
            if random.below(3) == 0 {
                row.metric = u16::MAX - random.below(3) as u16;
            }
        }
    }),
    ("one sample", |_, _, rows| {
        if let Some(first) = rows.first().map(|row| row.at) {
            rows.retain(|row| row.at == first);
        }
    }),
    ("no sample", |_, _, rows| rows.clear()),
    ("gaps", |random, _, rows| {
        for row in rows.iter_mut() {
            if random.below(2) == 0 {
                row.value = None;
            }
        }
    }),
    ("samples that are missing", |random, _, rows| rows.retain(|_| random.below(5) == 0)),
    ("values that can not be", |random, _, rows| {
        for row in rows.iter_mut() {
            if random.below(4) == 0 {
                let values = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 1e308];
                row.value = values.get(random.below(6) as usize).copied();
            }
        }
    }),
];

/// More of what the rules read than [`healthy`] has.
fn everything(world: &World) -> Vec<Sampled> {
    let mut lines = healthy(world);
    for side in [Host, Target] {
        for queue in 0..world.queues {
            let of = connection(side, queue);
            lines.push(sampled(side, "tcp", "dsack_duplicates", Counter, &of, |_| Some(2.0)));
            lines.push(sampled(side, "tcp", "delivered_ce", Counter, &of, |_| Some(0.0)));
        }
        lines.push(sampled(side, "netstat", "ecn_ce_received", Counter, "", |_| Some(5.0)));
        lines.push(sampled(side, "ethtool", "rx_pause", Counter, "eth0", |_| Some(1.0)));
        lines.push(sampled(side, "pressure", "some", Counter, "cpu", |at| Some(at as f64 / 1e3 * 0.05)));
    }
    lines.push(sampled(Host, "threads", "run_time", Counter, "7 fio", |at| Some(at as f64 * 0.4)));
    lines.push(sampled(Host, "threads", "run_delay", Counter, "7 fio", |at| Some(at as f64 * 0.01)));
    lines.push(sampled(Target, "spdk", "pending_bdev_io", Counter, "", |_| Some(0.0)));
    lines.push(sampled(Target, "disk", "busy_time", Counter, "nvme0n1", |at| Some(at as f64 / 1e6 * 0.3)));
    lines
}

fn harmed(world: &World, seed: u64, harm: &Harm) -> Diagnosis {
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random::new(seed);
    let (host, target) = run(world)
        .write_as(folder.path(), &everything(world), &mut |metrics, rows| harm.1(&mut random, metrics, rows));
    diagnose(&host, &target, &DiagnoseOptions::default()).unwrap()
}

#[test]
fn a_healthy_system_has_no_cause_whatever_its_telemetry_says() {
    for harm in HARMS {
        for seed in 1..5 {
            let world = World { commands: 3_000, ..World::new(seed) };
            is_clean(harm.0, seed, &harmed(&world, seed, harm));
        }
    }
}

#[test]
fn what_the_commands_show_by_themselves_is_found_whatever_the_telemetry_says() {
    for harm in HARMS {
        let gc = Storage::Episodes(60_000, 20_000.0, 150_000_000, 8_000_000, 20.0);
        let diagnosis = harmed(&World { storage: gc, ..World::new(3) }, 3, harm);
        complete(&diagnosis);
        let causes: Vec<Cause> = diagnosis.causes.iter().map(|f| f.cause).collect();
        assert_eq!(causes, [Cause::DriveInternal], "{}: {}", harm.0, diagnosis.to_table());
    }
}

#[test]
fn a_counter_that_jumps_once_is_no_pressure() {
    for seed in 1..5 {
        let world = World { commands: 3_000, ..World::new(seed) };
        let mut lines = everything(&world);
        // A second's worth of waiting in a tenth of one can not be.
        let jump = |at: i64| Some(at as f64 * 0.01 + if at > 300_000_000 { 5e12 } else { 0.0 });
        replace(&mut lines, sampled(Host, "threads", "run_delay", Counter, "7 fio", jump));
        let folder = tempfile::tempdir().unwrap();
        let (host, target) = run(&world).write(folder.path(), &lines);
        let diagnosis = diagnose(&host, &target, &DiagnoseOptions::default()).unwrap();
        is_clean("a jump", seed, &diagnosis);
    }
}
