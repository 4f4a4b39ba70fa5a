//! What is written is read back by a parser of its own: names, types, units, labels, buckets and the end.

use super::{BOUNDS, Exposition, ExpositionOptions, TextFormat, escaped};
use crate::live::{Live, LiveOptions};
use proptest::prelude::*;
use run_format::{
    Boundary, Command, Endpoint, Kind, Manifest, MetricKind, Nanos, Operation, PerKindNs, Price, Queue,
    QueueId, Side, Sink, TelemetryBatch, TelemetryMetric, TelemetryRow,
};
use std::collections::{BTreeMap, BTreeSet};

/// A sample: its name, labels and value.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

#[derive(Clone, Debug, Default)]
struct Parsed {
    types: BTreeMap<String, String>,
    units: BTreeMap<String, String>,
    samples: Vec<Sample>,
}

fn is_name(name: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit())
}

/// Labels up to the closing brace, and what follows it.
fn labels(text: &str) -> (BTreeMap<String, String>, &str) {
    let (mut labels, mut rest) = (BTreeMap::new(), text);
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return (labels, after);
        }
        let (name, after) = rest.split_once("=\"").expect("a label");
        let name = name.trim_start_matches(',');
        assert!(is_name(name), "label {name:?}");
        let (mut value, mut chars) = (String::new(), after.char_indices());
        let end = loop {
            match chars.next().expect("a closing quote") {
                (at, '"') => break at + 1,
                (_, '\\') => value.push(match chars.next().expect("an escape").1 {
                    'n' => '\n',
                    c @ ('\\' | '"') => c,
                    c => panic!("escaped {c:?}"),
                }),
                (_, c) => value.push(c),
            }
        };
        assert!(labels.insert(name.to_owned(), value).is_none(), "{name} twice");
        rest = &after[end..];
    }
}

fn parse(text: &str, format: TextFormat) -> Parsed {
    let open = format == TextFormat::OpenMetrics;
    let mut parsed = Parsed::default();
    assert_eq!(text.ends_with("\n# EOF\n"), open);
    assert_eq!(text.matches("# EOF").count(), usize::from(open));
    let (mut family, mut seen, mut series) = (String::new(), BTreeSet::new(), BTreeSet::new());
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(rest) = line.strip_prefix("# ") {
            let (word, rest) = rest.split_once(' ').unwrap();
            let (name, what) = rest.split_once(' ').unwrap();
            assert!(is_name(name), "{line}");
            match word {
                "HELP" => {
                    family = name.to_owned();
                    assert!(seen.insert(family.clone()), "{name} is told twice");
                }
                "TYPE" => {
                    assert_eq!(family, name);
                    assert!(["counter", "gauge", "histogram", "info"].contains(&what), "{line}");
                    assert!(open || what != "info", "{line}");
                    parsed.types.insert(family.clone(), what.to_owned());
                }
                "UNIT" => {
                    assert!(open && family == name && name.ends_with(&format!("_{what}")), "{line}");
                    parsed.units.insert(family.clone(), what.to_owned());
                }
                _ => panic!("{line}"),
            }
            continue;
        }
        let at = line.find(['{', ' ']).unwrap();
        let name = &line[..at];
        let (labels, rest) = match line[at..].strip_prefix('{') {
            Some(rest) => labels(rest),
            None => (BTreeMap::new(), &line[at..]),
        };
        let value: f64 = rest.strip_prefix(' ').expect("a value").parse().unwrap();
        let suffix = name.strip_prefix(family.as_str()).expect(line);
        let suffixes: &[&str] = match (parsed.types[&family].as_str(), open) {
            ("counter", true) => &["_total"],
            ("info", _) => &["_info"],
            ("histogram", _) => &["_sum", "_count", "_bucket"],
            _ => &[""],
        };
        assert!(suffixes.contains(&suffix), "{line} of {family}");
        assert!(series.insert((name.to_owned(), labels.clone())), "{line} is there twice");
        parsed.samples.push(Sample { name: name.to_owned(), labels, value });
    }
    parsed
}

impl Parsed {
    fn of(&self, name: &str, labels: &[(&str, &str)]) -> Vec<&Sample> {
        let has = |s: &&Sample| labels.iter().all(|(k, v)| s.labels.get(*k).is_some_and(|value| value == v));
        self.samples.iter().filter(|s| s.name == name).filter(has).collect()
    }

    fn one(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let all = self.of(name, labels);
        assert_eq!(all.len(), 1, "{name} {labels:?}: {all:?}");
        all[0].value
    }
}

fn meaning(_: &str, metric: &str) -> &'static str {
    if metric == "rtt" { "smoothed round-trip time" } else { "" }
}

fn manifest() -> Manifest {
    let mut manifest = Manifest::begun(Side::Target, Kind::Spdk, "0");
    manifest.software.name = "a \"target\"\nwith \\ and \u{7}".into();
    manifest.price = Some(Price {
        per_command: PerKindNs { read_ns: 800, write_ns: 900, r2t_write_ns: 1000 },
        ..Price::default()
    });
    manifest.counters.seen = 12;
    manifest.counters.lost.ring_full = 2;
    manifest
}

fn command(queue: u32, bytes: u32, driver: u64, storage: u64) -> Command {
    let mut command =
        Command { queue: QueueId(queue), opcode: Operation::Read.opcode(), bytes, ..Command::default() };
    let times = [
        (Boundary::TRecv, 1_000),
        (Boundary::TSubmit, 1_000 + driver),
        (Boundary::TDone, 1_000 + driver + storage),
        (Boundary::TResp, 1_000 + driver + storage),
        (Boundary::TSent, 1_000 + driver + storage),
    ];
    for (boundary, at) in times {
        command.times[boundary.slot()] = Some(Nanos(at));
    }
    command
}

fn options(queues: bool, telemetry_series: usize) -> ExpositionOptions {
    ExpositionOptions { queues, telemetry_series, meaning }
}

fn both(exposition: &Exposition) -> Parsed {
    let [open, plain] =
        [TextFormat::OpenMetrics, TextFormat::Prometheus].map(|f| parse(&exposition.text(f), f));
    assert_eq!(open.samples, plain.samples);
    open
}

#[test]
fn bounds_grow_and_are_plain_numbers() {
    assert!(BOUNDS.is_sorted() && BOUNDS.windows(2).all(|b| b[0] < b[1]));
    assert_eq!((BOUNDS[0], BOUNDS[1], BOUNDS[41], BOUNDS[42]), (1_000, 1_500, 7_000_000_000, 10_000_000_000));
}

#[test]
fn classes_have_histograms_counters_and_percentiles() {
    let mut live = Live::new(Side::Target, LiveOptions { classes: 2, ..LiveOptions::default() }, Nanos(0));
    let queue =
        live.queue(Queue { cntlid: 1, qid: 2, subsystem_nqn: "nqn.\"x\"".into(), ..Queue::default() });
    for n in 0..2_000 {
        live.command(&command(queue.0, 4096, 2_400, 20_000 + n));
    }
    for bytes in [512, 1024, 2048] {
        live.command(&command(queue.0, bytes, 1_000, 100_000_000_000));
    }
    // What is not of a whole slot is not there yet.
    assert_eq!(
        both(&live.exposition(&manifest(), &options(false, 0))).of("fabscope_commands_total", &[]).len(),
        2
    );
    live.end_slot(Nanos(2_000_000_000));
    let parsed = both(&live.exposition(&manifest(), &options(true, 0)));
    let read = [("side", "target"), ("operation", "read"), ("bytes", "4096"), ("error", "false")];
    assert_eq!(parsed.one("fabscope_commands_total", &read), 2_000.0);
    assert_eq!(parsed.one("fabscope_transferred_bytes_total", &read), 2_000.0 * 4096.0);
    assert_eq!(parsed.one("fabscope_latency_seconds_count", &read), 2_000.0);
    let sum = parsed.one("fabscope_latency_seconds_sum", &read);
    assert!((sum - (2_000.0 * 22_400.0 + 1_999.0 * 1_000.0) / 1e9).abs() < 1e-9, "{sum}");
    let others = parsed.one("fabscope_commands_total", &[("operation", "other")]);
    assert_eq!((others, parsed.of("fabscope_commands_total", &[]).len()), (2.0, 3));
    assert_eq!(parsed.types["fabscope_latency_seconds"], "histogram");
    assert_eq!(parsed.units["fabscope_latency_seconds"], "seconds");
    assert_eq!(parsed.units["fabscope_transferred_bytes"], "bytes");
    // Buckets are cumulative and end with all.
    for name in ["fabscope_latency_seconds", "fabscope_stage_seconds", "fabscope_queue_latency_seconds"] {
        let mut by_series: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
        for sample in parsed.of(&format!("{name}_bucket"), &[]) {
            let mut labels = sample.labels.clone();
            let le = labels.remove("le").unwrap();
            let le = if le == "+Inf" { f64::INFINITY } else { le.parse().unwrap() };
            by_series.entry(labels).or_default().push((le, sample.value));
        }
        assert!(!by_series.is_empty());
        for (labels, buckets) in by_series {
            assert!(buckets.windows(2).all(|b| b[0].0 < b[1].0 && b[0].1 <= b[1].1), "{buckets:?}");
            assert_eq!(buckets.len(), BOUNDS.len() + 1);
            let labels: Vec<(&str, &str)> = labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            assert_eq!(buckets.last().unwrap().1, parsed.one(&format!("{name}_count"), &labels));
        }
    }
    let mut driver = read.to_vec();
    driver.push(("stage", "target_driver"));
    let within = |le: &str| {
        let mut labels = driver.clone();
        labels.push(("le", le));
        parsed.one("fabscope_stage_seconds_bucket", &labels)
    };
    assert_eq!((within("0.000002"), within("0.000003"), within("+Inf")), (0.0, 2_000.0, 2_000.0));
    // Percentiles as far as the sample carries them.
    let percentile = |p: &str| {
        let mut labels = read.to_vec();
        labels.push(("percentile", p));
        parsed.of("fabscope_latency_percentile_seconds", &labels).first().map(|s| s.value)
    };
    assert!((percentile("50").unwrap() - 23.4e-6).abs() < 0.1e-6 && percentile("99").is_some());
    assert_eq!(percentile("99.9"), None);
    // What is recorded, lost and left out.
    assert_eq!(parsed.one("fabscope_seen_commands_total", &[]), 12.0);
    assert_eq!(parsed.one("fabscope_lost_commands_total", &[("reason", "ring_full")]), 2.0);
    assert_eq!(parsed.one("fabscope_armed_seconds_total", &[]), 2.0);
    assert_eq!(parsed.one("fabscope_hook_cost_seconds", &[("command", "read")]), 800e-9);
    let about = parsed.of("fabscope_recorded_info", &[]);
    assert_eq!(about[0].labels["software"], "a \"target\"\nwith \\ and \u{fffd}");
    let queue = [("subsystem_nqn", "nqn.\"x\""), ("cntlid", "1"), ("qid", "2")];
    assert_eq!(parsed.one("fabscope_queue_commands_total", &queue), 2_003.0);
}

#[test]
fn queues_of_one_name_are_still_told_apart() {
    let mut live = Live::new(Side::Target, LiveOptions::default(), Nanos(0));
    let named =
        |port| Queue { qid: 1, host: Some(Endpoint { address: "fe80::1".into(), port }), ..Queue::default() };
    for port in [1, 2, 2] {
        live.queue(named(port));
    }
    let parsed = both(&live.exposition(&manifest(), &options(true, 0)));
    let queues = parsed.of("fabscope_queue_commands_total", &[]);
    assert_eq!(queues.len(), 3);
    assert_eq!(queues[0].labels["host"], "[fe80::1]:1");
}

fn batch(collector: &str, metrics: &[(&str, &str, MetricKind)], objects: usize) -> TelemetryBatch {
    let rows = (0..objects).flat_map(|object| {
        (0..metrics.len()).map(move |metric| TelemetryRow {
            at: Nanos(1),
            metric: metric as u16,
            object: format!("o{object}").into(),
            value: Some(3.0),
        })
    });
    TelemetryBatch {
        collector: collector.into(),
        anew: true,
        rows: rows.collect(),
        metrics: metrics
            .iter()
            .map(|(name, unit, kind)| TelemetryMetric {
                name: (*name).into(),
                unit: (*unit).into(),
                kind: *kind,
                bits: None,
            })
            .collect(),
    }
}

#[test]
fn telemetry_has_base_units_and_is_bounded() {
    use MetricKind::{Counter, Gauge};
    let mut live = Live::new(Side::Host, LiveOptions::default(), Nanos(0));
    live.telemetry(&batch(
        "tcp",
        &[
            ("rtt", "us", Gauge),
            ("bytes_sent", "bytes", Counter),
            ("segments_out", "segments", Counter),
            ("delivery_rate", "bytes/s", Gauge),
        ],
        2,
    ));
    live.telemetry(&batch("nic", &[("rx_bytes", "bytes", Counter), ("rx-Weird.total", "", Counter)], 1));
    live.telemetry(&batch("gpu", &[("memory_total", "bytes", Gauge), ("busy", "%", Gauge)], 1));
    let manifest = Manifest::begun(Side::Host, Kind::Kernel, "0");
    let parsed = both(&live.exposition(&manifest, &options(false, 100)));
    for (name, value) in [
        ("fabscope_telemetry_tcp_rtt_seconds", 3e-6),
        ("fabscope_telemetry_tcp_sent_bytes_total", 3.0),
        ("fabscope_telemetry_tcp_out_segments_total", 3.0),
        ("fabscope_telemetry_tcp_delivery_rate_bytes_per_second", 3.0),
        ("fabscope_telemetry_nic_rx_bytes_total", 3.0),
        ("fabscope_telemetry_nic_rx_weird_total", 3.0),
        ("fabscope_telemetry_gpu_memory_bytes", 3.0),
        ("fabscope_telemetry_gpu_busy_ratio", 0.03),
    ] {
        let value_is = parsed.one(name, &[("object", "o0"), ("side", "host")]);
        assert!((value_is - value).abs() < 1e-12, "{name}: {value_is}");
    }
    assert_eq!(parsed.one("fabscope_telemetry_series_left_out", &[]), 0.0);
    // The telling ones come first, and the rest is counted.
    let parsed = both(&live.exposition(&manifest, &options(false, 3)));
    assert_eq!(parsed.of("fabscope_telemetry_tcp_rtt_seconds", &[]).len(), 2);
    let given = parsed.samples.iter().filter(|s| s.labels.contains_key("object")).count();
    assert_eq!((given, parsed.one("fabscope_telemetry_series_left_out", &[])), (3, 9.0));
}

#[test]
fn the_format_is_what_the_client_wants() {
    let open = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    for (accept, format) in [
        (open, TextFormat::OpenMetrics),
        ("", TextFormat::Prometheus),
        ("*/*", TextFormat::Prometheus),
        ("text/html, Application/OpenMetrics-Text", TextFormat::OpenMetrics),
        ("application/openmetrics-text;q=0.2, text/plain", TextFormat::Prometheus),
        ("application/openmetrics-text;q=0", TextFormat::Prometheus),
        ("application/openmetrics-text;q=x", TextFormat::Prometheus),
        (";;;,,,q=1", TextFormat::Prometheus),
    ] {
        assert_eq!(TextFormat::wanted(accept), format, "{accept}");
    }
}

proptest! {
    #[test]
    fn any_name_survives_as_a_label(name in "\\PC*|[a\\\\\"\n]*") {
        let text = format!("x=\"{}\"}} 1", escaped(&name));
        let (read, rest) = labels(&text);
        prop_assert_eq!(rest, " 1");
        prop_assert_eq!(&read["x"], &name);
    }
}
