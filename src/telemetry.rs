//! The telemetry of a recording: starts the sampler beside it, hands its rows to the run or the view, and adds the user's
//! series at the end. Nothing that goes wrong here ends a recording; the manifest says what did.

use crate::destination::Destination;
use crate::exit;
use anyhow::{Result, bail};
use run_format::{
    ClockPair, Kind, MetricKind, Nanos, Software, TelemetryBatch, TelemetryCollector, TelemetryLack,
    TelemetryMetric, TelemetryRow, TelemetrySeries, TelemetrySink, TelemetrySummary, TelemetryWriter,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use telemetry::{Batch, Lack, Metric, Options, Sampler, Series, State, Status, Subject};

/// What of it was asked for.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// How often to sample; `None` for not at all.
    pub every: Option<Duration>,
    /// The user's series.
    pub series: Option<PathBuf>,
    /// The target's RPC socket, where it was named.
    pub rpc: Option<PathBuf>,
}

/// `--telemetry`: a time, or `off`.
///
/// # Errors
/// With what it has to be.
pub fn every(text: &str) -> Result<Every, String> {
    if text == "off" {
        return Ok(Every(None));
    }
    let every = crate::cli::duration(text).map_err(|why| format!("{why}; or write off"))?;
    if every < Options::LEAST {
        return Err(format!("must be at least {} ms", Options::LEAST.as_millis()));
    }
    Ok(Every(Some(every)))
}

/// How often; `None` for not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every(pub Option<Duration>);

/// Refuses a series that can not be read when the recording ends. One that the command is to write may be missing yet.
///
/// # Errors
/// With what it has to be.
pub fn check(series: Option<&Path>, has_command: bool) -> Result<()> {
    let Some(path) = series else { return Ok(()) };
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => bail!("--series {}: it is no file", path.display()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && has_command => Ok(()),
        Err(error) => bail!("--series {}: {error}", path.display()),
    }
}

/// Where the rows go.
#[derive(Debug)]
pub enum Keeping {
    /// Into a run.
    Run(TelemetryWriter),
    /// To a view.
    View(TelemetrySink),
}

impl Keeping {
    fn sink(&self) -> Option<TelemetrySink> {
        match self {
            Keeping::Run(writer) => writer.sink(),
            Keeping::View(sink) => Some(sink.clone()),
        }
    }

    fn failed(&self) -> Option<run_format::Error> {
        match self {
            Keeping::Run(writer) => writer.failed(),
            Keeping::View(_) => None,
        }
    }

    fn close(self) -> Result<(), run_format::Error> {
        match self {
            Keeping::Run(writer) => writer.close(),
            Keeping::View(_) => Ok(()),
        }
    }
}

/// Telemetry under way.
#[derive(Debug)]
pub struct Telemetry {
    every: Option<Duration>,
    sampler: Option<Sampler>,
    keeping: Option<Keeping>,
    ended: Option<String>,
    /// What the sampler said last.
    last: TelemetrySummary,
}

impl Telemetry {
    /// Starts it where a recording is to go. `None` where nothing was asked for.
    pub fn start(
        to: &mut dyn Destination,
        asked: &Asked,
        kind: Kind,
        software: &Software,
    ) -> Option<Telemetry> {
        if asked.every.is_none() && asked.series.is_none() {
            return None;
        }
        let mut telemetry = Telemetry {
            every: asked.every,
            sampler: None,
            keeping: None,
            ended: None,
            last: TelemetrySummary::default(),
        };
        match to.telemetry() {
            Ok(keeping) => telemetry.keeping = Some(keeping),
            Err(error) => telemetry.fail(&exit::text(&error)),
        }
        let sink = telemetry.keeping.as_ref().and_then(Keeping::sink);
        if let (Some(every), Some(sink)) = (asked.every, sink) {
            let pid = software.pid.filter(|_| kind == Kind::Spdk);
            let rpc = asked.rpc.iter().cloned().collect();
            let subject = Subject { pid, rpc, retransmissions: Some(retransmissions), ..Subject::default() };
            let options = Options { every, subject, ..Options::default() };
            match Sampler::start(&options, move |batch| sink.give(written(batch))) {
                Ok(sampler) => telemetry.sampler = Some(sampler),
                Err(error) => telemetry.fail(&format!("start the sampler: {error}")),
            }
        }
        Some(telemetry)
    }

    fn fail(&mut self, why: &str) {
        if self.ended.is_none() {
            exit::say(&format!("no telemetry from here on: {why}"));
            self.ended = Some(why.to_owned());
        }
    }

    /// As things are, for the manifest.
    pub fn summary(&mut self) -> TelemetrySummary {
        if let Some(error) = self.keeping.as_ref().and_then(Keeping::failed) {
            self.fail(&error.to_string());
            drop(self.sampler.take());
        }
        if let Some(sampler) = &self.sampler {
            let status = sampler.status();
            self.take(&status);
        }
        self.last.ended.clone_from(&self.ended);
        self.last.clone()
    }

    fn take(&mut self, status: &Status) {
        self.last.every_ns =
            self.every.map_or(0, |every| u64::try_from(every.as_nanos()).unwrap_or(u64::MAX));
        self.last.cpu_ns = status.cpu.0;
        self.last.collectors = status.collectors.iter().map(collector).collect();
    }

    /// Stops sampling: the recording is over.
    pub fn stop(&mut self) {
        if let Some(sampler) = self.sampler.take() {
            let status = sampler.stop();
            self.take(&status);
        }
    }

    /// Adds the series and writes what is left. `clocks` are the run's, `within` its window.
    pub fn close(
        mut self,
        series: Option<&Path>,
        clocks: &[ClockPair],
        within: (Nanos, Nanos),
    ) -> TelemetrySummary {
        self.stop();
        if let Some(path) = series {
            let (told, batch) = read(path, clocks, within);
            let name = path.display().to_string();
            for line in &told.told {
                // What could not be read names its file already.
                let of = if line.contains(&name) { String::new() } else { format!("{name}: ") };
                exit::say(&format!("--series {of}{line}"));
            }
            if let (Some(sink), Some(batch)) = (self.keeping.as_ref().and_then(Keeping::sink), batch) {
                sink.give(batch);
            }
            self.last.series = Some(told);
        }
        if let Some(Err(error)) = self.keeping.take().map(Keeping::close) {
            self.fail(&error.to_string());
        }
        self.last.ended.clone_from(&self.ended);
        self.last
    }
}

/// Attaches what sees retransmissions.
fn retransmissions() -> Result<Box<dyn telemetry::Retransmissions>, Lack> {
    match kernel_probes::Retransmissions::attach() {
        Ok(attached) => Ok(Box::new(Attached { attached, taken: Vec::new() })),
        Err(error) => Err(Lack(error.to_string())),
    }
}

/// The kernel's retransmissions as the collector takes them.
#[derive(Debug)]
struct Attached {
    attached: kernel_probes::Retransmissions,
    taken: Vec<kernel_probes::Retransmission>,
}

impl telemetry::Retransmissions for Attached {
    fn only(&mut self, namespace: Option<u32>, local: &BTreeSet<u16>, remote: &BTreeSet<u16>) {
        self.attached.of_namespace(namespace);
        self.attached.of_ports(local, remote);
    }

    fn take(&mut self, into: &mut Vec<telemetry::Retransmission>) -> Result<(), Lack> {
        let taken = self.attached.take(&mut self.taken);
        into.extend(self.taken.drain(..).map(|seen| telemetry::Retransmission {
            at: telemetry::Nanos(seen.at.0),
            local: seen.local,
            remote: seen.remote,
            segments: seen.segments,
        }));
        taken.map_err(|error| Lack(error.to_string()))
    }

    fn lost(&self) -> u64 {
        self.attached.lost()
    }
}

/// A series for the run, and what the manifest says of it.
fn read(
    path: &Path,
    clocks: &[ClockPair],
    within: (Nanos, Nanos),
) -> (TelemetrySeries, Option<TelemetryBatch>) {
    let file = path.display().to_string();
    let pairs: Vec<telemetry::ClockPair> = clocks
        .iter()
        .map(|pair| telemetry::ClockPair {
            monotonic: telemetry::Nanos(pair.monotonic_ns.0),
            realtime: telemetry::Nanos(pair.realtime_ns.0),
        })
        .collect();
    let within = (telemetry::Nanos(within.0.0), telemetry::Nanos(within.1.0));
    match Series::read(path, &pairs, within) {
        Ok(series) => {
            let name =
                path.file_name().map_or_else(|| file.clone(), |name| name.to_string_lossy().into_owned());
            let told = TelemetrySeries {
                file,
                time: series.time.clone(),
                columns: series.columns.clone(),
                lines: series.lines.len() as u64,
                told: series.told.iter().map(ToString::to_string).collect(),
            };
            let batch = (!series.lines.is_empty()).then(|| written(series.batch(&name)));
            (told, batch)
        }
        Err(error) => {
            (TelemetrySeries { file, told: vec![error.to_string()], ..TelemetrySeries::default() }, None)
        }
    }
}

/// Rows as the run takes them.
fn written(batch: Batch) -> TelemetryBatch {
    TelemetryBatch {
        collector: batch.collector.to_owned(),
        anew: batch.anew,
        rows: batch
            .rows
            .into_iter()
            .map(|row| TelemetryRow {
                at: Nanos(row.at.0),
                metric: row.metric,
                object: row.object,
                value: row.value,
            })
            .collect(),
        metrics: batch.metrics.iter().map(metric).collect::<Arc<[TelemetryMetric]>>(),
    }
}

fn metric(metric: &Metric) -> TelemetryMetric {
    TelemetryMetric {
        name: metric.name.to_string(),
        unit: metric.unit.to_string(),
        kind: match metric.kind {
            telemetry::Kind::Gauge => MetricKind::Gauge,
            telemetry::Kind::Counter32 | telemetry::Kind::Counter64 => MetricKind::Counter,
            telemetry::Kind::Event => MetricKind::Event,
        },
        bits: metric.kind.bits(),
    }
}

fn collector(status: &telemetry::CollectorStatus) -> TelemetryCollector {
    let why = match &status.state {
        State::Sampling => None,
        State::Absent(why) => Some(why.clone()),
        State::Failed(why) if status.samples > 1 => Some(format!("it ended early: {why}")),
        State::Failed(why) => Some(why.clone()),
    };
    let whole = why.map(|why| TelemetryLack { metric: String::new(), why });
    let parts =
        status.lacks.iter().map(|(metric, why)| TelemetryLack { metric: metric.clone(), why: why.clone() });
    TelemetryCollector {
        name: status.about.name.to_owned(),
        present: !matches!(status.state, State::Absent(_)) && (whole.is_none() || status.samples > 1),
        every_ns: status.every.0,
        samples: status.samples,
        cpu_ns: status.cpu.0,
        lacks: whole.into_iter().chain(parts).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::{Every, check, every};
    use std::time::Duration;

    #[test]
    fn how_often_is_a_time_or_off() {
        assert_eq!(every("100ms"), Ok(Every(Some(Duration::from_millis(100)))));
        assert_eq!(every("off"), Ok(Every(None)));
        for bad in ["", "9ms", "0s", "on", "100", "-1s"] {
            assert!(every(bad).is_err(), "{bad}");
        }
        assert!(every("100").unwrap_err().contains("or write off"));
    }

    #[test]
    fn a_series_that_is_not_there_is_refused_unless_a_command_may_write_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        assert!(check(None, false).is_ok() && check(Some(&path), true).is_ok());
        assert!(check(Some(&path), false).unwrap_err().to_string().contains("a.csv"));
        assert!(check(Some(folder.path()), true).is_err());
        std::fs::write(&path, "").unwrap();
        assert!(check(Some(&path), false).is_ok());
    }
}
