//! What is shown of one side at a moment: its figures over a stretch of time, ready to be printed, drawn or written as
//! JSON. It computes nothing that the aggregator does not hold.

use super::rolling::{Figures, Over, QueueFigures};
use super::telemetry::Known;
use super::{Live, Place};
use crate::histogram::Histogram;
use crate::model::own_stages;
use crate::stats::Distribution;
use run_format::{Counters, Manifest, Operation, PerKindNs, Software, Transport, clock_pair};
use serde::Serialize;
use serde::ser::Serializer;

/// The JSON schema (draft 2020-12) of a line of `watch --format json`.
pub const WATCH_SCHEMA: &str = include_str!("../schema/watch.json");

/// Name and version of the format.
const FORMAT: &str = "fabscope-watch/1";

/// One side at a moment, as `fabscope watch --format json` prints it: times in nanoseconds, null where not known or not
/// carried by the sample. Figures are those of the last whole slot, or of the stretch that was asked for.
#[derive(Clone, Debug, Serialize)]
pub struct LiveView {
    /// Name and version of the format.
    pub format: &'static str,
    /// Which end is looked at.
    pub side: run_format::Side,
    /// Kernel or SPDK.
    pub kind: run_format::Kind,
    /// What is looked at.
    pub software: Software,
    /// When, `CLOCK_REALTIME` ns.
    pub realtime_ns: u64,
    /// Since the start, seconds.
    pub elapsed_seconds: f64,
    /// What the figures are of.
    pub stretch: Stretch,
    /// One command in this many is kept; rates are those of all.
    pub one_in: u32,
    /// Boundaries that are taken at their own moment, of how many.
    pub measured: [usize; 2],
    /// What a command was estimated to be made slower by; null where it is not known.
    pub price: Option<PerKindNs>,
    /// What was seen and lost since the start.
    pub counters: Counters,
    /// Commands without figures, since the start.
    pub left_out: LeftOut,
    /// The time windows in which it looks; absent where it looks throughout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub windows: Option<WindowsView>,
    /// All commands together.
    pub totals: Totals,
    /// The classes of commands, in the order in which they came.
    pub classes: Vec<ClassView>,
    /// The queues that are or were of late, and the others.
    pub queues: Vec<QueueView>,
    /// What the machine counts: the most telling of it.
    pub telemetry: Vec<TelemetryView>,
    /// What a reader should know besides the figures.
    pub notes: Vec<String>,
}

/// A stretch of time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Stretch {
    /// `slot` (the last one), `ten` (the last ten of them), `sixty`, or `start`.
    #[serde(serialize_with = "over")]
    pub over: Over,
    /// How long commands were taken in it, seconds: rates are those of this time.
    pub seconds: f64,
}

fn over<S: Serializer>(over: &Over, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match over {
        Over::Slot => "slot",
        Over::Ten => "ten",
        Over::Sixty => "sixty",
        Over::Start => "start",
    })
}

/// Commands that have no figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// They were cancelled, failed over or lack times.
    pub unfinished: u64,
    /// Their times run backwards.
    pub backwards: u64,
    /// They have figures, in the class of others: there were too many classes.
    pub in_other_class: u64,
    /// They have figures, among those of other queues: there were too many queues.
    pub in_other_queues: u64,
    /// Values of telemetry that found no room.
    pub telemetry: u64,
}

/// The time windows in which a side is looked at.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct WindowsView {
    /// How long each is.
    pub length_ns: u64,
    /// From the beginning of one to that of the next.
    pub every_ns: u64,
    /// How many there were.
    pub slices: u64,
    /// How many were left out.
    pub skipped: u64,
}

/// Commands and their rates.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Totals {
    /// How many came.
    pub commands: u64,
    /// Commands a second; null where nothing was taken.
    pub iops: Option<f64>,
    /// Bytes a second.
    pub bytes_per_second: Option<f64>,
    /// How many were under way on average, by Little's law: rate times latency.
    pub in_flight: Option<f64>,
}

/// A class of commands.
#[derive(Clone, Debug, Serialize)]
pub struct ClassView {
    /// What the commands do; null for those of more classes than are told apart.
    pub operation: Option<Operation>,
    /// Bytes of data that each carries; null for those.
    pub bytes: Option<u32>,
    /// Whether they ended with an error status.
    pub error: bool,
    /// Number and rates.
    #[serde(flatten)]
    pub totals: Totals,
    /// The whole time on this side; null where none came.
    pub latency: Option<Distribution>,
    /// The side's own stages, and what lies elsewhere: three of them.
    #[serde(serialize_with = "stages")]
    pub stages: Vec<StageView>,
    /// The one of them with the largest excess of its highest known percentile over its median; null where the sample
    /// carries none.
    pub slowest: Option<&'static str>,
    /// Commands since the start.
    pub commands_since_start: u64,
    /// Bytes since the start.
    pub bytes_since_start: u64,
    /// The whole time since the start.
    pub latency_since_start: Option<Distribution>,
}

/// A stage of a class.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StageView {
    /// Its JSON name.
    #[serde(skip)]
    pub name: &'static str,
    /// Its mean as a share of the mean latency.
    pub share: f64,
    /// Its times.
    #[serde(flatten)]
    pub times: Distribution,
}

fn stages<S: Serializer>(stages: &[StageView], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(stages.iter().map(|stage| (stage.name, stage)))
}

/// A queue.
#[derive(Clone, Debug, Serialize)]
pub struct QueueView {
    /// NQN of the subsystem; null for the queues that are not told apart.
    pub subsystem_nqn: Option<String>,
    /// NQN of the host.
    pub host_nqn: Option<String>,
    /// Controller identifier.
    pub cntlid: Option<u16>,
    /// Queue identifier.
    pub qid: Option<u16>,
    /// What carries it.
    pub transport: Option<Transport>,
    /// The host's end.
    pub host: Option<String>,
    /// CPU or SPDK thread that it is bound to.
    pub served_by: Option<String>,
    /// Whether it went.
    pub went: bool,
    /// Number and rates.
    #[serde(flatten)]
    pub totals: Totals,
    /// The whole time on this side; null where none came.
    pub latency: Option<Distribution>,
    /// Means of the side's own stages and of what lies elsewhere, in their order; null where none came.
    pub stage_means_ns: Option<[f64; 3]>,
    /// Commands since the start.
    pub commands_since_start: u64,
}

/// A metric of telemetry, all its objects together.
#[derive(Clone, Debug, Serialize)]
pub struct TelemetryView {
    /// The collector.
    pub collector: String,
    /// The metric.
    pub metric: String,
    /// The unit: of a counter that of its growth, `%` being a share of one core or of the time.
    pub unit: String,
    /// How many objects have it.
    pub objects: usize,
    /// All of them together; null where their sum says nothing.
    pub sum: Option<f64>,
    /// The worst one's value.
    pub worst: f64,
    /// Whose that is; empty where it is the machine's.
    pub of: String,
}

/// What the worst of several values is, and whether their sum says something.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Worst {
    /// The largest; the sum is of interest.
    MostOfAll,
    /// The largest; the sum is not.
    Most,
    /// The smallest; the sum is not.
    Least,
}

/// The metrics that say most about where commands wait, in the order of the view.
pub(super) const TELLING: &[(&str, &str, Worst)] = &[
    ("tcp", "retransmitted", Worst::MostOfAll),
    ("tcp", "rtt", Worst::Most),
    ("tcp", "cwnd", Worst::Least),
    ("tcp", "send_queue", Worst::Most),
    ("tcp", "receive_queue", Worst::Most),
    ("tcp", "receive_window_limited", Worst::Most),
    ("tcp", "send_buffer_limited", Worst::Most),
    ("tcp", "delivered_ce", Worst::MostOfAll),
    ("netstat", "timeouts", Worst::MostOfAll),
    ("netstat", "ecn_ce_received", Worst::MostOfAll),
    ("nic", "rx_dropped", Worst::MostOfAll),
    ("nic", "tx_dropped", Worst::MostOfAll),
    ("nic", "rx_missed_errors", Worst::MostOfAll),
    ("softnet", "dropped", Worst::MostOfAll),
    ("softnet", "squeezed", Worst::MostOfAll),
    ("cpu", "softirq", Worst::MostOfAll),
    ("cpu", "steal", Worst::MostOfAll),
    ("sched", "run_delay", Worst::MostOfAll),
    ("threads", "run_delay", Worst::MostOfAll),
    ("pressure", "some", Worst::Most),
    ("reactors", "busy", Worst::Most),
    ("spdk", "pending_bdev_io", Worst::MostOfAll),
    ("spdk", "buffer_waits", Worst::MostOfAll),
    ("spdk", "transport_pending_buffers", Worst::MostOfAll),
    ("spdk", "bdev_queue_depth", Worst::Most),
    ("queues", "in_flight", Worst::MostOfAll),
    ("disk", "busy_time", Worst::Most),
    ("smart", "temperature", Worst::Most),
    ("smart", "throttle1_count", Worst::MostOfAll),
    ("smart", "throttle2_count", Worst::MostOfAll),
    ("smart", "media_errors", Worst::MostOfAll),
];

impl Live {
    /// What came over a stretch of time, for a person or a program. `manifest` says what is looked at.
    #[must_use]
    pub fn view(&self, over: Over, manifest: &Manifest) -> LiveView {
        let armed_ns = self.armed.over(over);
        let rates = Rates { seconds: armed_ns as f64 / 1e9, one_in: f64::from(self.options.one_in) };
        let mut classes: Vec<ClassView> = self
            .keys
            .iter()
            .zip(&self.classes)
            .map(|(key, class)| self.class(Some(*key), &class.over(over), class.total(), &rates))
            .collect();
        if self.others.total().commands > 0 {
            classes.push(self.class(None, &self.others.over(over), self.others.total(), &rates));
        }
        let mut queues: Vec<QueueView> = self
            .places
            .iter()
            .map(|place| rates.queue(Some(place), &place.figures.over(over), place.figures.total()))
            .collect();
        let others = self.other_queues.total();
        if others.commands > 0 {
            queues.push(rates.queue(None, &self.other_queues.over(over), others));
        }
        let mut totals = Totals { iops: rates.of(0.0), bytes_per_second: rates.of(0.0), ..Totals::default() };
        let sum = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a + b);
        totals.in_flight = rates.of(0.0);
        for class in &classes {
            totals.commands += class.totals.commands;
            totals.iops = sum(totals.iops, class.totals.iops);
            totals.bytes_per_second = sum(totals.bytes_per_second, class.totals.bytes_per_second);
            totals.in_flight = sum(totals.in_flight, class.totals.in_flight);
        }
        let measured = manifest.hooks.iter().filter(|hook| hook.measured).count();
        LiveView {
            format: FORMAT,
            side: self.side,
            kind: manifest.kind,
            software: manifest.software.clone(),
            realtime_ns: clock_pair().realtime_ns.0,
            elapsed_seconds: self.slot_began.0.saturating_sub(self.began.0) as f64 / 1e9,
            stretch: Stretch { over, seconds: rates.seconds },
            one_in: self.options.one_in,
            measured: [measured, manifest.hooks.len()],
            price: manifest.price.as_ref().map(|price| price.per_command),
            counters: manifest.counters,
            left_out: LeftOut {
                unfinished: self.unfinished,
                backwards: self.backwards,
                in_other_class: self.others.total().commands,
                in_other_queues: others.commands,
                telemetry: self.values.left_out(),
            },
            windows: manifest.windows.map(|windows| WindowsView {
                length_ns: windows.length_ns,
                every_ns: windows.every_ns,
                slices: windows.slices,
                skipped: windows.skipped,
            }),
            totals,
            classes,
            queues,
            telemetry: self.telling(),
            notes: self.notes(manifest),
        }
    }

    fn class(
        &self,
        key: Option<(u8, u32, bool)>,
        figures: &Figures,
        total: &Figures,
        rates: &Rates,
    ) -> ClassView {
        let [latency, parts @ ..] = &figures.times;
        let mean = latency.mean();
        let stages: Vec<StageView> = own_stages(self.side)
            .into_iter()
            .zip(parts)
            .filter(|_| figures.commands > 0)
            .map(|(name, part)| StageView {
                name,
                share: if mean > 0.0 { part.mean() / mean } else { 0.0 },
                times: part.distribution(),
            })
            .collect();
        let excess = |stage: &StageView| {
            let times = &stage.times;
            let highest = times.p999_ns.or(times.p99_ns).or(times.p90_ns)?;
            Some((highest - times.p50_ns?, stage.name))
        };
        ClassView {
            operation: key.map(|(opcode, ..)| Operation::of(opcode)),
            bytes: key.map(|(_, bytes, _)| bytes),
            error: key.is_some_and(|(.., error)| error),
            totals: rates.totals(figures.commands, figures.bytes, latency),
            latency: known(latency),
            slowest: stages.iter().filter_map(excess).max().map(|(_, name)| name),
            stages,
            commands_since_start: total.commands,
            bytes_since_start: total.bytes,
            latency_since_start: known(&total.times[0]),
        }
    }

    /// The most telling telemetry.
    fn telling(&self) -> Vec<TelemetryView> {
        let of = |&(collector, metric, worst): &(&str, &str, Worst)| {
            let known = self.values.of(collector, metric);
            let unit = known.first().map(unit)?;
            let value = |k: &Known<'_>| k.rate.map_or(k.value, |rate| rate * unit.1);
            let by_value = |a: &&Known<'_>, b: &&Known<'_>| value(a).total_cmp(&value(b));
            let chosen = match worst {
                Worst::Least => known.iter().min_by(by_value),
                Worst::Most | Worst::MostOfAll => known.iter().max_by(by_value),
            }?;
            Some(TelemetryView {
                collector: collector.to_owned(),
                metric: metric.to_owned(),
                unit: unit.0,
                objects: known.len(),
                sum: (worst == Worst::MostOfAll).then(|| known.iter().map(value).sum()),
                worst: value(chosen),
                of: chosen.object.to_owned(),
            })
        };
        TELLING.iter().filter_map(of).collect()
    }

    fn notes(&self, manifest: &Manifest) -> Vec<String> {
        let mut notes = Vec::new();
        let others = self.others.total().commands;
        if others > 0 {
            let classes = self.options.classes;
            notes.push(format!("more than {classes} classes: {others} commands are in the class of others"));
        }
        if self.queues_left_out > 0 {
            notes.push(format!(
                "more than {} queues at once: {} came later and are told together",
                self.options.queues, self.queues_left_out
            ));
        }
        if self.unfinished > 0 {
            let n = self.unfinished;
            notes.push(format!("{n} commands were cancelled, failed over or lack times, and are left out"));
        }
        if self.backwards > 0 {
            notes
                .push(format!("{} commands have times that run backwards, and are left out", self.backwards));
        }
        if self.values.left_out() > 0 {
            notes.push(format!("{} values of telemetry found no room", self.values.left_out()));
        }
        if let Some(why) = manifest.telemetry.as_ref().and_then(|summary| summary.ended.as_ref()) {
            notes.push(format!("no telemetry any more: {why}"));
        }
        notes
    }
}

fn known(latency: &Histogram) -> Option<Distribution> {
    (latency.count() > 0).then(|| latency.distribution())
}

/// The unit of a value that is shown, and what a counter's rate is to be multiplied by for it. The growth of a time is a
/// share of one core, or of the time that passed.
fn unit(known: &Known<'_>) -> (String, f64) {
    let unit = known.metric.unit.as_str();
    if known.rate.is_none() {
        return (unit.to_owned(), 1.0);
    }
    let share = match unit {
        "ns" => 1e-7,
        "us" => 1e-4,
        "ms" => 1e-1,
        "s" => 1e2,
        _ => return (format!("{unit}/s"), 1.0),
    };
    ("%".to_owned(), share)
}

/// How rates are made of numbers.
struct Rates {
    seconds: f64,
    one_in: f64,
}

impl Rates {
    /// A second; `None` where nothing was taken.
    fn of(&self, sum: f64) -> Option<f64> {
        (self.seconds > 0.0).then(|| sum * self.one_in / self.seconds)
    }

    fn totals(&self, commands: u64, bytes: u64, latency: &Histogram) -> Totals {
        Totals {
            commands,
            iops: self.of(commands as f64),
            bytes_per_second: self.of(bytes as f64),
            in_flight: self.of(latency.mean() * commands as f64 / 1e9),
        }
    }

    fn queue(&self, place: Option<&Place>, figures: &QueueFigures, total: &QueueFigures) -> QueueView {
        let queue = place.map(|place| &place.queue);
        QueueView {
            subsystem_nqn: queue.map(|q| q.subsystem_nqn.clone()),
            host_nqn: queue.map(|q| q.host_nqn.clone()),
            cntlid: queue.map(|q| q.cntlid),
            qid: queue.map(|q| q.qid),
            transport: queue.map(|q| q.transport),
            host: queue.and_then(|q| q.host.as_ref()).map(endpoint),
            served_by: queue.and_then(|q| q.served_by.clone()),
            went: queue.is_some_and(|q| q.went.is_some()),
            totals: self.totals(figures.commands, figures.bytes, &figures.latency),
            latency: known(&figures.latency),
            stage_means_ns: (figures.commands > 0)
                .then(|| figures.sums.map(|sum| sum as f64 / figures.commands as f64)),
            commands_since_start: total.commands,
        }
    }
}

/// An endpoint as `ADDRESS:PORT`, IPv6 addresses in brackets.
pub(super) fn endpoint(endpoint: &run_format::Endpoint) -> String {
    let run_format::Endpoint { address, port } = endpoint;
    if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") }
}
