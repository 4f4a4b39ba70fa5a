//! One run pair to its rows: the part of a batch that can be distributed. It reads one host's and one target's run, and
//! nothing else; it keeps nothing and writes nothing.

use super::buckets::Buckets;
use super::labels::{Labels, labels};
use crate::compare::ClassName;
use crate::describe::wall_clock;
use crate::error::Error;
use crate::join::{JoinOptions, SetAside};
use crate::parts::{Bounds, report_alone_within, report_within};
use crate::report::{Class, Figures, Report, ReportOptions};
use crate::stats::Distribution;
use run_format::{Manifest, Operation, Run, Stage};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// What a batch keeps of one pair of runs, or of one side's run alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairRows {
    /// The host's run, as it was given.
    pub host: Option<String>,
    /// The target's run, as it was given.
    pub target: Option<String>,
    /// When recording began by the wall clock of the host (of the target, without one), ns since 1970; `None` where the
    /// run does not tell.
    pub start_ns: Option<i64>,
    /// How long the commands of the rows could be recorded: while both sides were, and were armed.
    pub seconds: f64,
    /// How the two were joined; `None` for one side.
    pub join: Option<JoinCounts>,
    /// Commands that a recorder saw and lost, of both sides.
    pub lost: u64,
    /// All that the manifests say, by name.
    pub labels: Labels,
    /// The classes of commands.
    pub classes: Vec<ClassRows>,
    /// What the report noted.
    pub notes: Vec<String>,
}

/// How many commands were joined, and why others were not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JoinCounts {
    /// Commands of the host's run.
    pub host_commands: u64,
    /// Commands of the target's run.
    pub target_commands: u64,
    /// Pairs of commands.
    pub joined: u64,
    /// Commands set aside on either side, in the order of [`SetAside::ALL`].
    pub set_aside: Vec<u64>,
    /// Half of the commands have a clock offset known to this or better, ns.
    pub clock_uncertainty_ns: Option<i64>,
}

/// One class of one pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassRows {
    /// What the commands do.
    pub operation: Operation,
    /// Bytes of data that each carries.
    pub bytes: u32,
    /// Whether they ended with an error status.
    pub error: bool,
    /// How many were recorded.
    pub commands: u64,
    /// How many there were a second, with those that sampling left out.
    pub iops: Option<f64>,
    /// Bytes a second, likewise.
    pub bytes_per_second: Option<f64>,
    /// Latency first, then the stages that this report knows.
    pub figures: Vec<Figure>,
}

/// Latency or one stage of one class: a row of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// `latency`, the name of a stage, or `beyond_host` or `data_wait` of one side alone.
    pub stage: String,
    /// The mean as a share of the mean latency.
    pub share: f64,
    /// Mean and percentiles, ns; null where the sample does not carry it.
    #[serde(flatten)]
    pub times: Times,
    /// The histogram.
    pub buckets: Buckets,
}

/// Mean and percentiles, as [`Distribution`] has them, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Arithmetic mean.
    pub mean_ns: f64,
    /// Median.
    pub p50_ns: Option<i64>,
    /// 90th percentile.
    pub p90_ns: Option<i64>,
    /// 99th percentile.
    pub p99_ns: Option<i64>,
    /// 99.9th percentile.
    pub p999_ns: Option<i64>,
}

impl From<Distribution> for Times {
    fn from(d: Distribution) -> Times {
        Times { mean_ns: d.mean_ns, p50_ns: d.p50_ns, p90_ns: d.p90_ns, p99_ns: d.p99_ns, p999_ns: d.p999_ns }
    }
}

/// Joins and reports one pair of runs, or reports one side's run alone: a pure function of what is in the two
/// directories. Nothing outside of them is read or written, and no call knows of another, so that any engine can call
/// it for every pair and gather the rows. At most about `memory` bytes are taken.
///
/// # Errors
/// What opening, joining or reporting the runs ended with: [`Error::Run`], [`Error::TooLittle`], [`Error::NoSharedQueue`]
/// and so on; [`Error::Input`] where neither a host nor a target is given.
pub fn step(host: Option<&Path>, target: Option<&Path>, memory: u64) -> Result<PairRows, Error> {
    let open = |path: Option<&Path>| path.map(Run::open).transpose();
    let (host, target) = (open(host)?, open(target)?);
    let options = ReportOptions { histograms: true, ..ReportOptions::default() };
    let bounds = Bounds { memory, ..Bounds::default() };
    let report = match (&host, &target) {
        (Some(host), Some(target)) => {
            report_within(host, target, &JoinOptions::default(), &options, &bounds)?
        }
        (Some(run), None) | (None, Some(run)) => report_alone_within(run, &options, &bounds)?,
        (None, None) => {
            return Err(Error::Input {
                given: String::new(),
                why: "neither a host's nor a target's run".into(),
            });
        }
    };
    let mut transports = Vec::new();
    if let Some(run) = host.as_ref().or(target.as_ref()) {
        transports.extend(run.queues()?.values().map(|queue| queue.transport));
    }
    let (host, target) = (host.as_ref().map(Run::manifest), target.as_ref().map(Run::manifest));
    let seconds = seconds(&report, host, target);
    let one_in = [host, target].into_iter().flatten().map(|m| m.one_in.max(1)).max().unwrap_or(1);
    let runs = [&report.host, &report.target];
    Ok(PairRows {
        host: report.host.as_ref().map(|run| run.run.clone()),
        target: report.target.as_ref().map(|run| run.run.clone()),
        start_ns: host.or(target).and_then(wall_clock).map(|(start, _)| start),
        seconds,
        join: report.join.as_ref().map(|join| JoinCounts {
            host_commands: join.host_commands,
            target_commands: join.target_commands,
            joined: join.joined,
            set_aside: SetAside::ALL.iter().map(|reason| join.set_aside.of(*reason)).collect(),
            clock_uncertainty_ns: report.clock.as_ref().map(|clock| clock.uncertainty_ns),
        }),
        lost: runs.into_iter().flatten().map(|run| run.lost).sum(),
        labels: labels(host, target, &transports),
        classes: report.classes.iter().map(|class| ClassRows::of(class, seconds, one_in)).collect(),
        notes: report.notes,
    })
}

/// How long commands of the report could be recorded.
fn seconds(report: &Report, host: Option<&Manifest>, target: Option<&Manifest>) -> f64 {
    if let Some(armed) = report.join.as_ref().and_then(|join| join.armed_seconds) {
        return armed;
    }
    let alone = [&report.host, &report.target].into_iter().flatten();
    let alone = alone.map(|run| run.windows.as_ref().map_or(run.seconds, |w| w.armed_seconds));
    let shorter = alone.fold(f64::INFINITY, f64::min);
    let both = || {
        let (h, t) = (host?.window, target?.window);
        let offset = report.clock.as_ref()?.offset_ns;
        let from = h.start_ns.as_i64().max(t.start_ns.as_i64().checked_add(offset)?);
        let to = h.end_ns.as_i64().min(t.end_ns.as_i64().checked_add(offset)?);
        Some((to - from) as f64 / 1e9)
    };
    both().map_or(shorter, |both| both.min(shorter)).max(0.0)
}

impl ClassRows {
    /// Which class it is.
    pub(crate) fn name(&self) -> ClassName {
        ClassName { operation: self.operation, bytes: self.bytes, error: self.error }
    }

    fn of(class: &Class, seconds: f64, one_in: u32) -> ClassRows {
        let latency = Figures { share: 1.0, times: class.latency };
        let stages = Stage::ALL.iter().filter_map(|s| Some((s.name(), *class.stages.of(*s)?)));
        let rest = [("beyond_host", class.beyond_host), ("data_wait", class.data_wait)];
        let rest = rest.into_iter().filter_map(|(name, figures)| Some((name, figures?)));
        // In the order in which the report has their histograms.
        let figures = std::iter::once(("latency", latency)).chain(stages).chain(rest);
        let figures = figures.zip(&class.histograms).map(|((stage, figures), histogram)| Figure {
            stage: stage.to_owned(),
            share: figures.share,
            times: figures.times.into(),
            buckets: Buckets::of(histogram),
        });
        let iops = (seconds > 0.0).then(|| class.commands as f64 * f64::from(one_in) / seconds);
        ClassRows {
            operation: class.operation,
            bytes: class.bytes,
            error: class.error,
            commands: class.commands,
            iops,
            bytes_per_second: iops.map(|iops| iops * f64::from(class.bytes)),
            figures: figures.collect(),
        }
    }
}

impl PairRows {
    /// Its runs' directories.
    #[must_use]
    pub fn name(&self) -> String {
        [&self.host, &self.target].into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(",")
    }

    /// `pair`, `host` or `target`: which sides there are.
    #[must_use]
    pub fn sides(&self) -> &'static str {
        match (&self.host, &self.target) {
            (Some(_), Some(_)) => "pair",
            (Some(_), None) => "host",
            _ => "target",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{ClassRows, Figure, PairRows, step};
    use crate::batch::buckets::Buckets;
    use crate::histogram::Histogram;
    use crate::stats::Distribution;
    use crate::synthetic::Load;
    use run_format::Operation;
    use std::collections::BTreeMap;

    const DAY_NS: i64 = 86_400_000_000_000;

    /// A figure of these values.
    pub(crate) fn figure(stage: &str, values: &[i64]) -> Figure {
        Figure {
            stage: stage.into(),
            share: 1.0,
            times: Distribution::of(&mut values.to_vec()).into(),
            buckets: Buckets::of(&Histogram::of(values)),
        }
    }

    /// The `n`th run of a day each, of one class of which these are the figures.
    pub(crate) fn pair_of(n: i64, figures: Vec<Figure>) -> PairRows {
        PairRows {
            host: Some(format!("{n}/host.run")),
            target: Some(format!("{n}/target.run")),
            start_ns: Some(1_700_000_000_000_000_000 + n * DAY_NS),
            seconds: 1.0,
            join: None,
            lost: 0,
            labels: BTreeMap::new(),
            classes: vec![ClassRows {
                operation: Operation::Read,
                bytes: 4_096,
                error: false,
                commands: figures.first().map_or(0, |f| f.buckets.count),
                iops: None,
                bytes_per_second: None,
                figures,
            }],
            notes: Vec::new(),
        }
    }

    /// A run with one class of commands with these latencies.
    pub(crate) fn pair(n: i64, values: &[i64]) -> PairRows {
        pair_of(n, vec![figure("latency", values)])
    }

    #[test]
    fn a_pair_and_its_sides_alone_give_the_rows_of_their_reports() {
        let folder = tempfile::tempdir().unwrap();
        let load = Load { commands: 5_000, ..Load::default() };
        let (host, target) = load.record().write(folder.path()).unwrap();
        let both = step(Some(host.directory()), Some(target.directory()), 1 << 30).unwrap();
        assert_eq!(both.sides(), "pair");
        let commands: u64 = both.classes.iter().map(|c| c.commands).sum();
        assert_eq!(both.join.as_ref().unwrap().joined, commands);
        for class in &both.classes {
            let stages: Vec<&str> = class.figures.iter().map(|f| f.stage.as_str()).collect();
            assert_eq!(
                stages,
                ["latency", "host_block", "host_driver", "network", "target_driver", "storage"]
            );
            for figure in &class.figures {
                assert_eq!(figure.buckets.count, class.commands);
                assert_eq!(figure.buckets.each().map(|b| b.1).sum::<u64>(), class.commands);
                assert!(figure.buckets.min_ns <= figure.times.p50_ns.unwrap());
            }
            let whole: f64 = class.figures[1..].iter().map(|f| f.buckets.sum_ns).sum();
            assert_eq!(whole, class.figures[0].buckets.sum_ns);
        }
        assert!(both.seconds > 0.0 && both.classes[0].iops.unwrap() > 0.0);
        assert_eq!(both.labels["transport"], "tcp");
        for (h, t, sides, rest) in [
            (Some(host.directory()), None, "host", "beyond_host"),
            (None, Some(target.directory()), "target", "data_wait"),
        ] {
            let alone = step(h, t, 1 << 30).unwrap();
            assert_eq!((alone.sides(), alone.join.is_none()), (sides, true));
            assert_eq!(alone.classes[0].figures.last().unwrap().stage, rest);
        }
        assert!(step(None, None, 1 << 30).is_err());
        // In parts, the same but for the percentiles' last digits.
        let parts = step(Some(host.directory()), Some(target.directory()), 0).unwrap();
        assert_eq!(parts.classes[0].figures[5].buckets, both.classes[0].figures[5].buckets);
    }
}
