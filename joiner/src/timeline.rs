//! The telemetry of both runs on one line of time, the host's clock: what a metric of an object was from when to when.
//! The target's samples are moved by the clock offset that the join found. It draws no conclusions.
//!
//! What is not known is nothing, never 0: a collector that is absent has no lines, a gap in a line has no spans, and a
//! sample that does not lie after the one before it (a clock that jumped) begins anew.

use crate::join::Joined;
use run_format::{Endpoint, MetricKind, Point, Queue, Run, Side, Telemetry, TelemetryMetric, increase};
use std::net::{IpAddr, SocketAddr};

/// A length of time and what was in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Span {
    /// On the host's clock, ns.
    pub(crate) from: i64,
    /// After `from`.
    pub(crate) to: i64,
    /// Of a gauge its value, of a counter its growth a second.
    pub(crate) value: f64,
}

impl Span {
    /// How much a counter grew.
    pub(crate) fn grown(&self) -> f64 {
        self.value * (self.to - self.from) as f64 / 1e9
    }
}

/// One metric of one object over time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    pub(crate) side: Side,
    pub(crate) collector: String,
    pub(crate) metric: String,
    pub(crate) object: String,
    /// In order, and none within another.
    pub(crate) spans: Vec<Span>,
}

impl Line {
    /// The mean over the time that is known; `None` where nothing is.
    pub(crate) fn mean(&self) -> Option<f64> {
        let time: f64 = self.spans.iter().map(|s| (s.to - s.from) as f64).sum();
        let sum: f64 = self.spans.iter().map(|s| s.value * (s.to - s.from) as f64).sum();
        (time > 0.0).then(|| sum / time)
    }

    /// What it was for most of the time, or as near to that as it gets: the median over time. A value that changes, as a
    /// path's MTU does while it is found out, has no part in it.
    pub(crate) fn usual(&self) -> Option<f64> {
        let mut values: Vec<(f64, i64)> = self.spans.iter().map(|s| (s.value, s.to - s.from)).collect();
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let time: i64 = values.iter().map(|v| v.1).sum();
        let mut before = 0;
        let half = |v: &&(f64, i64)| {
            before += v.1;
            before * 2 >= time
        };
        values.iter().find(half).map(|v| v.0)
    }

    /// How much a counter grew altogether; `None` where nothing is known of it.
    pub(crate) fn grown(&self) -> Option<f64> {
        (!self.spans.is_empty()).then(|| self.spans.iter().map(Span::grown).sum())
    }

    /// The mean over a stretch of time, of what is known of it.
    pub(crate) fn mean_in(&self, from: i64, to: i64) -> Option<f64> {
        let first = self.spans.partition_point(|s| s.to <= from);
        let (mut time, mut sum) = (0.0, 0.0);
        for span in self.spans[first..].iter().take_while(|s| s.from < to) {
            let within = (span.to.min(to) - span.from.max(from)) as f64;
            time += within;
            sum += span.value * within;
        }
        (time > 0.0).then(|| sum / time)
    }

    /// The largest value.
    pub(crate) fn most(&self) -> Option<f64> {
        self.spans.iter().map(|s| s.value).max_by(f64::total_cmp)
    }
}

/// A single event, on the host's clock.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Happened {
    pub(crate) side: Side,
    pub(crate) at: i64,
    /// How many at this moment.
    pub(crate) segments: f64,
    pub(crate) object: String,
}

/// What both runs' telemetry has of a stretch of time.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    lines: Vec<Line>,
    events: Vec<Happened>,
    /// Whether single retransmissions were watched for, of the host and of the target.
    watched: [bool; 2],
    /// What could not be read, and why.
    pub(crate) notes: Vec<String>,
}

/// What the rules read, by collector. An empty list is all that the device names.
const READ: &[(&str, &[&str])] = &[
    (
        "tcp",
        &[
            "rtt",
            "min_rtt",
            "cwnd",
            "mss",
            "pmtu",
            "unacked",
            "retransmitted",
            "dsack_duplicates",
            "bytes_sent",
            "segments_out",
            "busy_time",
            "receive_window_limited",
            "send_buffer_limited",
            "receive_queue",
            "delivered_ce",
            "send_window",
        ],
    ),
    ("netstat", &["retransmitted", "timeouts", "ecn_ce_received", "to_zero_window"]),
    ("nic", &["rx_dropped", "tx_dropped", "rx_missed_errors", "rx_crc_errors", "rx_bytes", "tx_bytes"]),
    ("ethtool", &[]),
    ("rdma", &[]),
    ("link", &["mtu", "speed"]),
    ("softnet", &["dropped", "squeezed"]),
    ("cpu", &["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"]),
    ("sched", &["run_delay"]),
    ("threads", &["run_time", "run_delay"]),
    ("pressure", &["some"]),
    ("softirqs", &["net_rx"]),
    ("interrupts", &["interrupts"]),
    ("disk", &["inflight_reads", "inflight_writes", "busy_time", "reads", "writes"]),
    (
        "smart",
        &[
            "temperature",
            "critical_warning",
            "throttle1_count",
            "throttle2_count",
            "throttle1_time",
            "throttle2_time",
            "warning_temperature_time",
        ],
    ),
    ("reactors", &["busy", "idle", "in_interrupt"]),
    ("spdk", &["buffer_waits", "pending_bdev_io", "transport_pending_buffers"]),
];

/// Of these, what is a value that stands; all else counts up, also what a device names itself.
const GAUGES: &[(&str, &[&str])] = &[
    ("tcp", &["rtt", "min_rtt", "cwnd", "mss", "pmtu", "unacked", "receive_queue", "send_window"]),
    ("link", &["mtu", "speed"]),
    ("disk", &["inflight_reads", "inflight_writes"]),
    ("smart", &["temperature", "critical_warning"]),
    ("reactors", &["in_interrupt"]),
];

/// Whether a metric is of the kind that the rules take it for: a value that stands can not be read as one that counts.
fn is_as_known(collector: &str, metric: &TelemetryMetric) -> bool {
    let is_gauge = |(of, names): &(&str, &[&str])| *of == collector && names.contains(&metric.name.as_str());
    let known = if GAUGES.iter().any(is_gauge) { MetricKind::Gauge } else { MetricKind::Counter };
    metric.kind == known
}

impl Timeline {
    /// Reads the telemetry of two joined runs from when to when, on the host's clock. What can not be read is noted and
    /// is as if it were not there.
    pub(crate) fn read(joined: &Joined, host: &Run, target: &Run, from: i64, to: i64) -> Timeline {
        let mut timeline = Timeline::default();
        for (run, side) in [(host, Side::Host), (target, Side::Target)] {
            let on_host = |t: i64| match side {
                Side::Host => t,
                Side::Target => joined.host_time(t),
            };
            match run.telemetry() {
                Ok(telemetry) => timeline.take(&telemetry, side, &on_host, (from, to)),
                Err(error) => timeline.notes.push(format!("the {side}'s telemetry can not be read: {error}")),
            }
        }
        timeline.events.sort_by_key(|event| event.at);
        timeline
    }

    fn take(&mut self, telemetry: &Telemetry, side: Side, on_host: &dyn Fn(i64) -> i64, window: (i64, i64)) {
        for broken in telemetry.broken() {
            let path = broken.display();
            self.notes.push(format!("{path}: cut or no Parquet file; what it had is as if not sampled"));
        }
        for &(collector, names) in READ {
            let there = telemetry.metrics().get(collector).map_or(&[][..], Vec::as_slice);
            let read = |name: &str| names.is_empty() || names.contains(&name);
            for metric in there.iter().filter(|m| read(&m.name)) {
                if !is_as_known(collector, metric) {
                    self.notes.push(format!(
                        "{collector}'s {} of the {side} is told to be of another kind than this version knows it as: it is left out",
                        metric.name
                    ));
                    continue;
                }
                match telemetry.values(collector, &metric.name) {
                    Ok(lines) => {
                        for line in lines {
                            let spans = spans(&line.points, metric.kind, metric.bits, on_host, window);
                            self.lines.push(Line {
                                side,
                                collector: collector.to_owned(),
                                metric: metric.name.clone(),
                                object: line.object,
                                spans,
                            });
                        }
                    }
                    Err(error) => {
                        self.notes.push(format!("{collector}'s {} is left out: {error}", metric.name));
                    }
                }
            }
        }
        match telemetry.events(RETRANSMITS, RETRANSMIT) {
            Ok(events) => {
                let is_watched = telemetry.metrics().contains_key(RETRANSMITS);
                self.watched[side as usize] = is_watched;
                let moved = events.into_iter().map(|e| Happened {
                    side,
                    at: on_host(e.at.as_i64()),
                    segments: e.value,
                    object: e.object,
                });
                let moved = moved.filter(|e| e.segments > 0.0);
                self.events.extend(moved.filter(|e| (window.0..=window.1).contains(&e.at)));
            }
            Err(error) => self.notes.push(format!("single retransmissions are left out: {error}")),
        }
    }

    /// The lines of a metric of a side.
    pub(crate) fn lines<'a>(
        &'a self,
        side: Side,
        collector: &'a str,
        metric: &'a str,
    ) -> impl Iterator<Item = &'a Line> {
        let is = move |l: &&Line| l.side == side && l.collector == collector && l.metric == metric;
        self.lines.iter().filter(is).filter(|l| !l.spans.is_empty())
    }

    /// All lines of a collector of a side.
    pub(crate) fn of<'a>(&'a self, side: Side, collector: &'a str) -> impl Iterator<Item = &'a Line> {
        let is = move |l: &&Line| l.side == side && l.collector == collector;
        self.lines.iter().filter(is).filter(|l| !l.spans.is_empty())
    }

    /// Whether a side has anything of a collector.
    pub(crate) fn has(&self, side: Side, collector: &str) -> bool {
        self.of(side, collector).next().is_some()
    }

    /// The line of an object.
    pub(crate) fn line<'a>(
        &'a self,
        side: Side,
        collector: &'a str,
        metric: &'a str,
        object: &str,
    ) -> Option<&'a Line> {
        self.lines(side, collector, metric).find(|l| l.object == object)
    }

    /// Single retransmissions in order of time, those of both sides.
    pub(crate) fn retransmissions(&self) -> &[Happened] {
        &self.events
    }

    /// Whether a side watched for single retransmissions.
    pub(crate) fn watched(&self, side: Side) -> bool {
        self.watched[side as usize]
    }
}

/// Where single retransmissions are.
pub(crate) const RETRANSMITS: &str = "retransmits";
const RETRANSMIT: &str = "retransmit";

/// No counter grows by more between two samples: a value beyond is no count. Nanoseconds of ten years are less.
const MOST: f64 = 1e18;

/// The spans between samples, on the host's clock.
fn spans(
    points: &[Point],
    kind: MetricKind,
    bits: Option<u8>,
    on_host: &dyn Fn(i64) -> i64,
    (from, to): (i64, i64),
) -> Vec<Span> {
    let mut spans = Vec::new();
    if kind == MetricKind::Event {
        return spans;
    }
    for pair in points.windows(2) {
        let [before, after] = pair else { continue };
        let (start, end) = (on_host(before.at.as_i64()), on_host(after.at.as_i64()));
        if end <= start || end <= from || start >= to {
            continue;
        }
        let value = match kind {
            // A value stands until the next sample.
            MetricKind::Gauge | MetricKind::Event => before.value,
            MetricKind::Counter => before
                .value
                .zip(after.value)
                .and_then(|(b, a)| increase(b, a, bits))
                .filter(|grown| *grown <= MOST)
                .map(|grown| grown * 1e9 / (end - start) as f64),
        };
        if let Some(value) = value.filter(|v| v.is_finite()) {
            spans.push(Span { from: start, to: end, value });
        }
    }
    // What was sampled once stands for the moment; a counter needs two.
    if let (MetricKind::Gauge, [only]) = (kind, points) {
        let at = on_host(only.at.as_i64());
        if let Some(value) = only.value.filter(|v| v.is_finite() && (from..=to).contains(&at)) {
            spans.push(Span { from: at, to: at.saturating_add(1), value });
        }
    }
    spans
}

/// The two ends of a connection as `tcp` names it.
fn ends(object: &str) -> Option<(SocketAddr, SocketAddr)> {
    let (local, remote) = object.split_once('>')?;
    Some((local.parse().ok()?, remote.parse().ok()?))
}

/// Whether a connection of a side is a queue's.
pub(crate) fn is_of_queue(object: &str, side: Side, queue: &Queue) -> bool {
    let Some((local, remote)) = ends(object) else { return false };
    let (host, target) = match side {
        Side::Host => (local, remote),
        Side::Target => (remote, local),
    };
    // The host's port tells queues apart; without it nothing does.
    let Some(of_host) = &queue.host else { return false };
    agrees(&host, of_host) && queue.target.as_ref().is_none_or(|end| agrees(&target, end))
}

fn agrees(end: &SocketAddr, known: &Endpoint) -> bool {
    let same_address = known
        .address
        .trim_matches(['[', ']'])
        .parse::<IpAddr>()
        .map_or(true, |address| address.to_canonical() == end.ip().to_canonical());
    end.port() == known.port && same_address
}
