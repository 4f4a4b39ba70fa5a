//! The service levels that a diagnosis begins with: bandwidth, IOPS and percentiles of each class, its stages in the
//! mean and in the tail, and what is in flight where by Little's law. It names no causes.

use super::facts::{Baseline, Facts, Row};
use crate::stats::Distribution;
use run_format::{Operation, Stage};
use serde::Serialize;

/// What one class of commands gets.
#[derive(Clone, Debug, Serialize)]
pub struct ServiceLevel {
    /// What the commands do.
    pub operation: Operation,
    /// Bytes of data that each carries.
    pub bytes: u32,
    /// How many were joined and succeeded.
    pub commands: u64,
    /// Commands a second.
    pub iops: f64,
    /// Bytes a second.
    pub bandwidth: f64,
    /// From the host's block layer and back.
    pub latency: Distribution,
    /// The five stages.
    pub stages: Vec<StageLevel>,
}

/// One stage of a class.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StageLevel {
    /// Which.
    pub stage: Stage,
    /// Its times.
    #[serde(flatten)]
    pub times: Distribution,
    /// Its share of the mean latency.
    pub share: f64,
    /// Its mean in the slowest commands, ns.
    pub slowest_ns: f64,
    /// Its share of what the slowest commands are slower than their median.
    pub of_slowest: f64,
    /// What it takes when nothing is in the way, ns: the baseline's median, else what the fastest tenth does not exceed.
    pub floor_ns: i64,
    /// Whether that is a baseline's.
    pub floor_of_baseline: bool,
}

/// What is in flight on one queue.
#[derive(Clone, Debug, Serialize)]
pub struct QueueLevel {
    /// Which.
    pub queue: String,
    /// Its commands.
    pub commands: u64,
    /// Commands a second.
    pub iops: f64,
    /// Commands in flight on average: rate by latency (Little's law).
    pub in_flight: f64,
    /// The same of each stage, in the order of [`Stage::ALL`].
    pub by_stage: [f64; 5],
    /// CPUs of the host that submit to it.
    pub cpus: usize,
    /// Mean latency as a multiple of the class's median over all queues.
    pub slowness: f64,
}

pub(super) fn levels(facts: &Facts<'_>) -> Vec<ServiceLevel> {
    let mut members: Vec<Vec<&Row>> = vec![Vec::new(); facts.classes.len()];
    facts.rows.iter().for_each(|row| members[row.class].push(row));
    let mut levels: Vec<ServiceLevel> =
        members.iter().enumerate().map(|(class, rows)| level(facts, class, rows)).collect();
    levels.sort_by_key(|level| std::cmp::Reverse(level.commands));
    levels
}

fn level(facts: &Facts<'_>, class: usize, rows: &[&Row]) -> ServiceLevel {
    let about = &facts.classes[class];
    let mut latencies: Vec<i64> = rows.iter().map(|row| row.latency).collect();
    let latency = Distribution::of(&mut latencies);
    let slow: Vec<&&Row> = rows.iter().filter(|row| row.latency > about.tail).collect();
    let iops = rows.len() as f64 * f64::from(facts.one_in) / facts.seconds;
    let mut stages: Vec<StageLevel> = Stage::ALL
        .into_iter()
        .map(|stage| {
            let mut values: Vec<i64> = rows.iter().map(|row| row.stage(stage)).collect();
            let times = Distribution::of(&mut values);
            let mean_ns = times.mean_ns;
            let slowest = slow.iter().map(|row| row.stage(stage) as f64).sum::<f64>();
            StageLevel {
                stage,
                times,
                share: if latency.mean_ns > 0.0 { mean_ns / latency.mean_ns } else { 0.0 },
                slowest_ns: if slow.is_empty() { mean_ns } else { slowest / slow.len() as f64 },
                of_slowest: 0.0,
                floor_ns: about.stage_floor[stage as usize],
                floor_of_baseline: about.has_baseline,
            }
        })
        .collect();
    // Without a median, which too few commands do not carry, the mean stands for it.
    let over =
        |s: &StageLevel| (s.slowest_ns - s.times.p50_ns.map_or(s.times.mean_ns, |v| v as f64)).max(0.0);
    let all: f64 = stages.iter().map(over).sum();
    for stage in &mut stages {
        let over = over(stage);
        stage.of_slowest = if all > 0.0 { over / all } else { 0.0 };
    }
    ServiceLevel {
        operation: about.operation,
        bytes: about.bytes,
        commands: rows.len() as u64,
        iops,
        bandwidth: iops * f64::from(about.bytes),
        latency,
        stages,
    }
}

pub(super) fn queues(facts: &Facts<'_>) -> Vec<QueueLevel> {
    let scale = f64::from(facts.one_in) / (facts.seconds * 1e9);
    let of = |queue: &super::facts::QueueFacts| {
        let rows = || queue.rows.iter().map(|&n| &facts.rows[n]);
        let time = |of: &dyn Fn(&Row) -> i64| rows().map(|row| of(row) as f64).sum::<f64>() * scale;
        let mut cpus: Vec<u16> = rows().map(|row| row.cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        let slowness =
            rows().map(|row| row.latency as f64 / facts.class(row).median.max(1) as f64).sum::<f64>();
        QueueLevel {
            queue: queue.name.clone(),
            commands: queue.rows.len() as u64,
            iops: queue.rows.len() as f64 * f64::from(facts.one_in) / facts.seconds,
            in_flight: time(&|row| row.latency),
            by_stage: std::array::from_fn(|n| time(&|row| row.stage(Stage::ALL[n]))),
            cpus: cpus.len(),
            slowness: slowness / queue.rows.len().max(1) as f64,
        }
    };
    let mut levels: Vec<QueueLevel> = facts.queues.iter().filter(|q| !q.rows.is_empty()).map(of).collect();
    levels.sort_by_key(|level| std::cmp::Reverse(level.commands));
    levels
}

/// Classes that the baseline does not have.
pub(super) fn unlike(facts: &Facts<'_>, baseline: &Baseline) -> Vec<String> {
    let lacking: Vec<String> = facts.classes.iter().filter(|c| !c.has_baseline).map(|c| c.name()).collect();
    if lacking.is_empty() {
        return Vec::new();
    }
    vec![format!(
        "the baseline {} does not have, or has too few of: {}; these are measured against their own fastest tenth",
        baseline.name,
        lacking.join(", ")
    )]
}
