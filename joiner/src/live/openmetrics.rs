//! One side's figures in the text formats that monitoring systems scrape: OpenMetrics 1.0 and Prometheus 0.0.4. It
//! serves nothing; the number of its series is bounded, and what is left out is told in a metric of its own.

use super::rolling::Figures;
use super::telemetry::Known;
use super::view::{TELLING, endpoint};
use super::{Live, Over, Place};
use crate::histogram::Histogram;
use crate::model::own_stages;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, LabelSetEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use run_format::{Manifest, MetricKind, Operation, Side};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Upper bounds of the histograms' buckets, ns: six in each power of ten, from 1 us to 10 s. A command is counted within
/// a thousandth of them.
pub const BOUNDS: [i64; 43] = {
    const STEPS: [i64; 6] = [10, 15, 20, 30, 50, 70];
    let (mut bounds, mut n, mut power) = ([0; 43], 0, 100);
    while n < 42 {
        bounds[n] = STEPS[n % 6] * power;
        n += 1;
        if n.is_multiple_of(6) {
            power *= 10;
        }
    }
    bounds[42] = 10_000_000_000;
    bounds
};

/// The percentiles that are given of the last stretches, where the sample carries them.
const PERCENTILES: [(&str, f64); 5] = [("50", 0.5), ("90", 0.9), ("95", 0.95), ("99", 0.99), ("99.9", 0.999)];

/// What is given, and how much of it at most.
#[derive(Clone, Copy, Debug)]
pub struct ExpositionOptions {
    /// Figures of each queue too.
    pub queues: bool,
    /// Series of telemetry at most; the most telling ones come first.
    pub telemetry_series: usize,
    /// What a collector's metric is, for its help.
    pub meaning: fn(&str, &str) -> &'static str,
}

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus 0.0.4.
    Prometheus,
}

impl TextFormat {
    /// Its media type, for the `Content-Type` of an answer.
    #[must_use]
    pub const fn media_type(self) -> &'static str {
        match self {
            TextFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            TextFormat::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// The format that an `Accept` header asks for: OpenMetrics where it is wanted no less than plain text.
    #[must_use]
    pub fn wanted(accept: &str) -> TextFormat {
        let weight = |names: &[&str]| {
            let of = |range: &str| {
                let mut parts = range.split(';').map(str::trim);
                let name = parts.next()?.to_ascii_lowercase();
                let q = parts.find_map(|p| p.strip_prefix("q=").or_else(|| p.strip_prefix("Q=")));
                let q = q.map_or(Some(1.0), |q| q.trim().parse::<f64>().ok())?;
                names.contains(&name.as_str()).then_some(q)
            };
            accept.split(',').filter_map(of).fold(0.0, f64::max)
        };
        let open = weight(&["application/openmetrics-text"]);
        if open > 0.0 && open >= weight(&["text/plain", "text/*"]) {
            TextFormat::OpenMetrics
        } else {
            TextFormat::Prometheus
        }
    }
}

/// The figures at a moment. It is written as text when it is asked for, once a format.
#[derive(Debug)]
pub struct Exposition {
    families: Arc<Families>,
    open: OnceLock<Arc<str>>,
    prometheus: OnceLock<Arc<str>>,
}

#[derive(Debug)]
struct Families(Vec<Family>);

/// A metric with all its series.
#[derive(Debug)]
struct Family {
    name: String,
    help: String,
    unit: Option<Unit>,
    kind: Kind,
    series: Vec<(Labels, Value)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
    Info,
}

#[derive(Debug)]
enum Value {
    Count(u64),
    Number(f64),
    Histogram { sum: f64, count: u64, buckets: Vec<(f64, u64)> },
    Info,
}

/// Names and values, in order.
#[derive(Clone, Debug, Default)]
struct Labels(Vec<(&'static str, String)>);

impl Labels {
    fn with(mut self, name: &'static str, value: impl fmt::Display) -> Labels {
        self.0.push((name, escaped(&value.to_string())));
        self
    }
}

/// A label's value with what would end it escaped: the encoder writes it as it is.
fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            // Nothing else is to steer the terminal of whoever looks at it.
            c if c.is_control() => text.push(char::REPLACEMENT_CHARACTER),
            c => text.push(c),
        }
    }
    text
}

impl EncodeLabelSet for Labels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), fmt::Error> {
        self.0.as_slice().encode(encoder)
    }
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in &self.0 {
            let kind = match family.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
                Kind::Info => MetricType::Info,
            };
            let mut metric =
                encoder.encode_descriptor(&family.name, &family.help, family.unit.as_ref(), kind)?;
            for (labels, value) in &family.series {
                match value {
                    Value::Info => metric.encode_info(labels)?,
                    Value::Count(count) => {
                        let mut one = metric.encode_family(labels)?;
                        match family.kind {
                            Kind::Counter => one.encode_counter::<NoLabelSet, u64, u64>(count, None)?,
                            _ => one.encode_gauge(count)?,
                        }
                    }
                    Value::Number(number) => {
                        let mut one = metric.encode_family(labels)?;
                        match family.kind {
                            Kind::Counter => one.encode_counter::<NoLabelSet, f64, u64>(number, None)?,
                            _ => one.encode_gauge(number)?,
                        }
                    }
                    Value::Histogram { sum, count, buckets } => {
                        let mut one = metric.encode_family(labels)?;
                        one.encode_histogram::<NoLabelSet>(*sum, *count, buckets, None)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Exposition {
    /// Its text.
    #[must_use]
    pub fn text(&self, format: TextFormat) -> Arc<str> {
        let open = self.open.get_or_init(|| {
            let mut registry = Registry::with_prefix("fabscope");
            registry.register_collector(Box::new(Arc::clone(&self.families)));
            let mut out = String::new();
            // Writing into a String can not fail.
            let _ = text::encode(&mut out, &registry);
            out.into()
        });
        match format {
            TextFormat::OpenMetrics => Arc::clone(open),
            TextFormat::Prometheus => Arc::clone(self.prometheus.get_or_init(|| plain(open).into())),
        }
    }
}

/// OpenMetrics as Prometheus 0.0.4: it names counters by their samples, knows no units and no infos, and does not end.
fn plain(open: &str) -> String {
    let kinds: BTreeMap<&str, &str> =
        open.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    let mut out = String::with_capacity(open.len());
    for line in open.lines() {
        let of = |word: &str| line.strip_prefix(word)?.split_once(' ');
        let named = |name: &str| match kinds.get(name) {
            Some(&"counter") => format!("{name}_total"),
            Some(&"info") => format!("{name}_info"),
            _ => name.to_owned(),
        };
        if let Some((name, help)) = of("# HELP ") {
            out += &format!("# HELP {} {help}\n", named(name));
        } else if let Some((name, kind)) = of("# TYPE ") {
            let kind = if kind == "info" { "gauge" } else { kind };
            out += &format!("# TYPE {} {kind}\n", named(name));
        } else if !line.starts_with('#') {
            out += line;
            out.push('\n');
        }
    }
    out
}

/// A histogram's value: how many times lie within each bound, and all beyond the last.
fn histogram(of: &Histogram) -> Value {
    let mut buckets: Vec<(f64, u64)> =
        BOUNDS.iter().map(|&bound| seconds(bound)).zip(of.within(&BOUNDS)).collect();
    let within: u64 = buckets.iter().map(|(_, n)| n).sum();
    buckets.push((f64::MAX, of.count() - within));
    Value::Histogram { sum: of.sum() as f64 / 1e9, count: of.count(), buckets }
}

/// Nanoseconds as the nearest seconds: dividing keeps 0.0015 what it is.
fn seconds(ns: i64) -> f64 {
    ns as f64 / 1e9
}

fn unit(name: &str) -> Option<Unit> {
    Some(Unit::Other(name.to_owned()))
}

impl Live {
    /// The figures as they are up to the last slot's end.
    #[must_use]
    pub fn exposition(&self, manifest: &Manifest, options: &ExpositionOptions) -> Exposition {
        let mut families = self.of_commands();
        families.extend(self.of_recording(manifest));
        if options.queues {
            families.extend(self.of_queues());
        }
        let (telemetry, left_out) = self.of_telemetry(options, &families);
        families.extend(telemetry);
        families.push(Family {
            name: "telemetry_series_left_out".to_owned(),
            help: "Series of telemetry that are not given, because there are more than were allowed."
                .to_owned(),
            unit: None,
            kind: Kind::Gauge,
            series: vec![(self.labels(), Value::Count(left_out))],
        });
        Exposition {
            families: Arc::new(Families(families)),
            open: OnceLock::new(),
            prometheus: OnceLock::new(),
        }
    }

    fn labels(&self) -> Labels {
        Labels::default().with("side", self.side)
    }

    fn class_labels(&self, key: Option<(u8, u32, bool)>) -> Labels {
        let labels = self.labels();
        match key {
            Some((opcode, bytes, error)) => {
                labels.with("operation", Operation::of(opcode)).with("bytes", bytes).with("error", error)
            }
            None => labels.with("operation", "other").with("bytes", "other").with("error", "other"),
        }
    }

    /// Latency, stages, numbers and bytes of each class.
    fn of_commands(&self) -> Vec<Family> {
        let mut latency = Vec::new();
        let mut stages = Vec::new();
        let (mut commands, mut bytes, mut percentiles) = (Vec::new(), Vec::new(), Vec::new());
        let known = self.keys.iter().map(|key| Some(*key)).zip(&self.classes);
        let others = Some((None, &self.others)).filter(|(_, others)| others.total().commands > 0);
        for (key, class) in known.chain(others) {
            let labels = self.class_labels(key);
            let Figures { commands: number, bytes: sum, times: [whole, parts @ ..] } = class.total();
            commands.push((labels.clone(), Value::Count(*number)));
            bytes.push((labels.clone(), Value::Count(*sum)));
            latency.push((labels.clone(), histogram(whole)));
            for (stage, part) in own_stages(self.side).into_iter().zip(parts) {
                stages.push((labels.clone().with("stage", stage), histogram(part)));
            }
            let of_late = class.over(Over::Sixty);
            for (name, p) in PERCENTILES {
                if let Some(ns) = of_late.times[0].percentile(p) {
                    percentiles.push((labels.clone().with("percentile", name), Value::Number(seconds(ns))));
                }
            }
        }
        let (whole, late) = match self.side {
            Side::Host => ("Whole time of a command on the host, from its block layer and back.", "host"),
            Side::Target => ("Whole time of a command on the target, from capsule to response.", "target"),
        };
        vec![
            Family {
                name: "latency".to_owned(),
                help: whole.to_owned(),
                unit: unit("seconds"),
                kind: Kind::Histogram,
                series: latency,
            },
            Family {
                name: "stage".to_owned(),
                help: format!(
                    "Time of a command in each stage of the {late}, and elsewhere ({}).",
                    own_stages(self.side)[2]
                ),
                unit: unit("seconds"),
                kind: Kind::Histogram,
                series: stages,
            },
            Family {
                name: "latency_percentile".to_owned(),
                help:
                    "Percentiles of the last minute's latency, to 0.1 %, where ten commands lie above them."
                        .to_owned(),
                unit: unit("seconds"),
                kind: Kind::Gauge,
                series: percentiles,
            },
            Family {
                name: "commands".to_owned(),
                help: "Commands that were recorded and have figures.".to_owned(),
                unit: None,
                kind: Kind::Counter,
                series: commands,
            },
            Family {
                name: "transferred".to_owned(),
                help: "Data of these commands.".to_owned(),
                unit: unit("bytes"),
                kind: Kind::Counter,
                series: bytes,
            },
        ]
    }

    /// What is recorded, at which cost, and what is lost.
    fn of_recording(&self, manifest: &Manifest) -> Vec<Family> {
        let counters = &manifest.counters;
        let one = |name: &str, help: &str, kind, value| Family {
            name: name.to_owned(),
            help: help.to_owned(),
            unit: None,
            kind,
            series: vec![(self.labels(), value)],
        };
        let by = |label: &'static str, values: &[(&str, Value)]| -> Vec<(Labels, Value)> {
            let value = |value: &Value| match value {
                Value::Number(number) => Value::Number(*number),
                Value::Count(count) => Value::Count(*count),
                _ => Value::Info,
            };
            values.iter().map(|(name, v)| (self.labels().with(label, name), value(v))).collect()
        };
        let lost = &counters.lost;
        let software = &manifest.software;
        let mut about = self
            .labels()
            .with("kind", manifest.kind)
            .with("software", &software.name)
            .with("version", &software.version);
        for (name, value) in [("build_id", &software.build_id), ("path", &software.path)] {
            about = about.with(name, value.as_deref().unwrap_or_default());
        }
        let mut families = vec![
            Family {
                name: "recorded".to_owned(),
                help: "What is looked at.".to_owned(),
                unit: None,
                kind: Kind::Info,
                series: vec![(about, Value::Info)],
            },
            one(
                "seen_commands",
                "Commands that reached the first hook.",
                Kind::Counter,
                Value::Count(counters.seen),
            ),
            one(
                "unsampled_commands",
                "Commands left out by sampling.",
                Kind::Counter,
                Value::Count(counters.unsampled),
            ),
            Family {
                series: by(
                    "reason",
                    &[
                        ("ring_full", Value::Count(lost.ring_full)),
                        ("map_full", Value::Count(lost.map_full)),
                        ("unfinished", Value::Count(lost.unfinished)),
                        ("unreadable", Value::Count(lost.unreadable)),
                        ("probe_missed", Value::Count(lost.probe_missed)),
                        ("overwritten", Value::Count(lost.overwritten)),
                    ],
                ),
                ..one(
                    "lost_commands",
                    "Commands that were seen and lost, by reason.",
                    Kind::Counter,
                    Value::Info,
                )
            },
            Family {
                series: by(
                    "reason",
                    &[
                        ("unfinished", Value::Count(self.unfinished)),
                        ("backwards", Value::Count(self.backwards)),
                    ],
                ),
                ..one(
                    "left_out_commands",
                    "Recorded commands without figures: cancelled, failed over, lacking times, or with times that run backwards.",
                    Kind::Counter,
                    Value::Info,
                )
            },
            one(
                "in_flight_commands",
                "Commands that are seen and not over.",
                Kind::Gauge,
                Value::Count(counters.in_flight),
            ),
            one(
                "sample_one_in",
                "One command in this many is kept.",
                Kind::Gauge,
                Value::Count(self.options.one_in.into()),
            ),
            Family {
                unit: unit("seconds"),
                ..one(
                    "armed",
                    "Time in which commands were taken: rates are those of this time.",
                    Kind::Counter,
                    Value::Number(*self.armed.total() as f64 / 1e9),
                )
            },
        ];
        if let Some(price) = &manifest.price {
            let price = price.per_command;
            let cost = |ns: u32| Value::Number(f64::from(ns) / 1e9);
            families.push(Family {
                unit: unit("seconds"),
                series: by(
                    "command",
                    &[
                        ("read", cost(price.read_ns)),
                        ("write", cost(price.write_ns)),
                        ("r2t_write", cost(price.r2t_write_ns)),
                    ],
                ),
                ..one(
                    "hook_cost",
                    "What the hooks were estimated to add to a command while they are in place.",
                    Kind::Gauge,
                    Value::Info,
                )
            });
        }
        families
    }

    fn of_queues(&self) -> Vec<Family> {
        let labels = |place: Option<&Place>| {
            let queue = place.map(|place| &place.queue);
            let text = |of: fn(&run_format::Queue) -> String| queue.map_or_else(|| "other".to_owned(), of);
            self.labels()
                .with("subsystem_nqn", text(|q| q.subsystem_nqn.clone()))
                .with("host_nqn", text(|q| q.host_nqn.clone()))
                .with("cntlid", text(|q| q.cntlid.to_string()))
                .with("qid", text(|q| q.qid.to_string()))
                .with("host", text(|q| q.host.as_ref().map(endpoint).unwrap_or_default()))
        };
        // Two connections of one name, as where no port is known, would be one series twice.
        let mut seen = HashSet::new();
        let known = self.places.iter().map(|place| (Some(place), &place.figures));
        let others = Some((None, &self.other_queues)).filter(|(_, others)| others.total().commands > 0);
        let (mut commands, mut bytes, mut latency) = (Vec::new(), Vec::new(), Vec::new());
        for (number, (place, figures)) in known.chain(others).enumerate() {
            let mut labels = labels(place);
            if !seen.insert(labels.0.clone()) {
                labels = labels.with("queue", number);
            }
            let total = figures.total();
            commands.push((labels.clone(), Value::Count(total.commands)));
            bytes.push((labels.clone(), Value::Count(total.bytes)));
            latency.push((labels, histogram(&total.latency)));
        }
        let family = |name: &str, help: &str, named: Option<Unit>, kind, series| Family {
            name: name.to_owned(),
            help: help.to_owned(),
            unit: named,
            kind,
            series,
        };
        vec![
            family("queue_commands", "Commands of a queue.", None, Kind::Counter, commands),
            family("queue_transferred", "Data of a queue's commands.", unit("bytes"), Kind::Counter, bytes),
            family(
                "queue_latency",
                "Whole time of a queue's commands on this side.",
                unit("seconds"),
                Kind::Histogram,
                latency,
            ),
        ]
    }

    /// Telemetry within the bound, and how many series it leaves out.
    fn of_telemetry(&self, options: &ExpositionOptions, others: &[Family]) -> (Vec<Family>, u64) {
        let mut order: Vec<(String, String)> =
            TELLING.iter().map(|(c, m, _)| ((*c).to_owned(), (*m).to_owned())).collect();
        let telling: HashSet<(String, String)> = order.iter().cloned().collect();
        for collector in self.values.collectors() {
            let metrics = self.values.metrics(collector).iter();
            let rest = metrics.map(|metric| (collector.to_owned(), metric.name.clone()));
            order.extend(rest.filter(|name| !telling.contains(name)));
        }
        let mut names: HashSet<String> = others.iter().map(|family| family.name.clone()).collect();
        let (mut families, mut room, mut left_out) = (Vec::new(), options.telemetry_series, 0);
        for (collector, metric) in order {
            let known = self.values.of(&collector, &metric);
            let Some(first) = known.first() else { continue };
            let (name, shown, factor) = metric_name(&collector, first);
            let whole = match &shown {
                Some(unit) => format!("{name}_{unit}"),
                None => name.clone(),
            };
            if !names.insert(whole) {
                left_out += known.len() as u64;
                continue;
            }
            let taken = known.len().min(room);
            left_out += (known.len() - taken) as u64;
            room -= taken;
            if taken == 0 {
                continue;
            }
            let meaning = (options.meaning)(&collector, &metric);
            let series = known
                .iter()
                .take(taken)
                .map(|k| (self.labels().with("object", k.object), Value::Number(k.value * factor)));
            families.push(Family {
                name,
                help: match meaning {
                    "" => format!("{collector} {metric}, as the device names it"),
                    meaning => format!("{collector} {metric}: {meaning}"),
                },
                unit: shown.map(Unit::Other),
                kind: match first.metric.kind {
                    MetricKind::Gauge => Kind::Gauge,
                    MetricKind::Counter | MetricKind::Event => Kind::Counter,
                },
                series: series.collect(),
            });
        }
        (families, left_out)
    }
}

/// What a metric of telemetry is called here without its unit, its unit here, and what its values are multiplied by for
/// that.
fn metric_name(collector: &str, known: &Known<'_>) -> (String, Option<String>, f64) {
    let (unit, factor) = match known.metric.unit.as_str() {
        "" => ("", 1.0),
        "ns" => ("seconds", 1e-9),
        "us" => ("seconds", 1e-6),
        "ms" => ("seconds", 1e-3),
        "s" => ("seconds", 1.0),
        "min" => ("seconds", 60.0),
        "%" => ("ratio", 1e-2),
        "C" => ("celsius", 1.0),
        "mW" => ("watts", 1e-3),
        "bytes/s" => ("bytes_per_second", 1.0),
        "Mb/s" => ("bits_per_second", 1e6),
        "GT/s" => ("transfers_per_second", 1e9),
        other => (other, 1.0),
    };
    let unit = plain_name(unit);
    let mut name = plain_name(&known.metric.name);
    // A unit or a suffix is not said twice.
    let ends = [format!("_{unit}"), "_total".to_owned()];
    while let Some(shorter) =
        ends.iter().filter(|end| end.len() > 1).find_map(|end| name.strip_suffix(end.as_str()))
    {
        name = shorter.to_owned();
    }
    if let Some(rest) = name.strip_prefix(&format!("{unit}_")).filter(|_| !unit.is_empty()) {
        name = rest.to_owned();
    }
    let name = format!("telemetry_{}_{name}", plain_name(collector));
    (name, Some(unit).filter(|unit| !unit.is_empty()), factor)
}

/// A name of letters, digits and underscores.
fn plain_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    name.chars().map(plain).collect()
}

#[cfg(test)]
mod tests;
