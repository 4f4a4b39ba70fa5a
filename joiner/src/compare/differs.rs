//! What differs between the runs of a comparison themselves: machines, software, transport, sampling, load. A stage
//! that moved together with one of these may have moved because of it. What runs do not record is named too.

use super::input::{Reading, Sample};
use super::resample::BETWEEN_RUNS;
use super::{ClassName, Form};
use crate::describe::wall_clock;
use crate::order::overlaps;
use crate::report::length;
use run_format::{Manifest, Nanos, Side};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Something that is not the same on both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// What, such as `target version`.
    pub what: String,
    /// The base's; several where its repetitions differ.
    pub base: String,
    /// The new's.
    pub new: String,
}

/// What may differ and no run says.
pub(crate) const NOT_RECORDED: &[&str] =
    &["PDU digests", "TLS", "MTU and network settings", "CPU frequency and power settings"];

/// Figures of a load by which it differs from another, over all repetitions.
const APART: f64 = 0.05;

/// The load of one side's runs: means over its repetitions.
#[derive(Clone, Debug, Serialize)]
pub struct LoadFigures {
    /// Commands a second, with those that were not sampled.
    pub commands_per_second: f64,
    /// Commands in flight: commands a second times their mean latency (Little's law).
    pub in_flight: f64,
    /// Queues.
    pub queues: f64,
    /// `tcp`, `rdma`.
    pub transports: Vec<&'static str>,
    /// The share of commands that each class is.
    pub mix: Vec<Share>,
}

/// A class's share of a load.
#[derive(Clone, Debug, Serialize)]
pub struct Share {
    /// Which.
    #[serde(flatten)]
    pub class: ClassName,
    /// Of all commands.
    pub share: f64,
}

/// Commands a second and in flight, of one repetition: from the first command's begin to the last one's end, so that
/// no more are in flight on average than there ever were at once.
pub(crate) fn rate(reading: &Reading) -> (f64, f64) {
    let times = reading.classes.values().flat_map(|s: &Sample| {
        let latency = s.columns.first().map_or(&[][..], Vec::as_slice);
        s.start.iter().zip(latency).map(|(&start, &took)| (start, start.saturating_add(took)))
    });
    let (first, last) =
        times.fold((i64::MAX, i64::MIN), |(first, last), (start, end)| (first.min(start), last.max(end)));
    // Runs in windows have commands only in those, and joined ones in what both sides' windows have in common. A
    // recording that was killed in its first window may have commands and no slice.
    let armed = reading.armed.as_ref().map(|slices| length(&overlaps(slices, &[(first, last)])));
    let whole = last.saturating_sub(first).max(1);
    let seconds = armed.filter(|&armed| armed > 0).unwrap_or(whole) as f64 / 1e9;
    let one_in = reading.manifests.iter().map(|m| m.one_in.max(1)).max().unwrap_or(1);
    let all = reading.commands() as f64 * f64::from(one_in);
    let busy: f64 =
        reading.classes.values().map(|s: &Sample| s.columns[0].iter().map(|&v| v as f64).sum::<f64>()).sum();
    (all / seconds, busy / 1e9 * f64::from(one_in) / seconds)
}

pub(crate) fn load(readings: &[Reading]) -> LoadFigures {
    let n = readings.len().max(1) as f64;
    let rates: Vec<(f64, f64)> = readings.iter().map(rate).collect();
    let mut mix: BTreeMap<_, f64> = BTreeMap::new();
    for reading in readings {
        let all = reading.commands().max(1) as f64;
        for (key, sample) in &reading.classes {
            *mix.entry(*key).or_default() += sample.len() as f64 / all / n;
        }
    }
    let transports: BTreeSet<&'static str> =
        readings.iter().flat_map(|r| r.transports.iter().copied()).collect();
    LoadFigures {
        commands_per_second: rates.iter().map(|r| r.0).sum::<f64>() / n,
        in_flight: rates.iter().map(|r| r.1).sum::<f64>() / n,
        queues: readings.iter().map(|r| r.queues as f64).sum::<f64>() / n,
        transports: transports.into_iter().collect(),
        mix: mix.into_iter().map(|(key, share)| Share { class: key.name(), share }).collect(),
    }
}

/// A fact of one side's manifest.
type Fact = (&'static str, fn(&Manifest) -> String);

const FACTS: &[Fact] = &[
    ("kind", |m| m.kind.to_string()),
    ("software", |m| m.software.name.clone()),
    ("version", |m| m.software.version.clone()),
    ("build-id", |m| m.software.build_id.clone().unwrap_or_default()),
    ("machine", |m| m.machine.hostname.clone()),
    ("CPUs", |m| m.machine.cpus.to_string()),
    ("architecture", |m| m.machine.architecture.clone()),
    ("kernel", |m| m.machine.kernel.clone()),
    ("kernel build", |m| m.machine.kernel_build.clone()),
    ("sampling", |m| format!("1 in {}", m.one_in.max(1))),
    ("time windows", |m| match m.windows {
        Some(windows) => format!("{} each {}", Nanos(windows.length_ns), Nanos(windows.every_ns)),
        None => "none".into(),
    }),
    ("detail", |m| m.detail.clone()),
    ("recorded by", |m| format!("fabscope {}", m.tool)),
    ("workload", |m| m.workload.as_ref().map_or(String::new(), |w| w.argv.join(" "))),
    ("recording", |m| match m.state {
        run_format::State::Open => "cut short".into(),
        run_format::State::Closed => "whole".into(),
    }),
    ("lost while recording", |m| {
        let (lost, seen) = (m.counters.lost.total(), m.counters.seen.max(1));
        // Less than a command in a thousand changes no figure.
        if lost.saturating_mul(1000) < seen {
            "under 0.1 %".into()
        } else {
            format!("{:.1} %", lost as f64 / seen as f64 * 100.0)
        }
    }),
    ("resets and the like", |m| {
        let what: BTreeSet<&str> = m.events.iter().map(|e| e.what.as_str()).collect();
        what.into_iter().collect::<Vec<_>>().join(", ")
    }),
];

/// All that differs.
pub(crate) fn between(base: &[Reading], new: &[Reading]) -> Vec<Difference> {
    let mut differences = Vec::new();
    let mut add = |what: String, base: BTreeSet<String>, new: BTreeSet<String>| {
        if base != new {
            let list = |set: BTreeSet<String>| {
                let some = |v: String| if v.is_empty() { "none".into() } else { v };
                set.into_iter().map(some).collect::<Vec<String>>().join(", ")
            };
            differences.push(Difference { what, base: list(base), new: list(new) });
        }
    };
    for side in [Side::Host, Side::Target] {
        let of = |readings: &[Reading], fact: &dyn Fn(&Manifest) -> String| -> BTreeSet<String> {
            readings.iter().flat_map(|r| &r.manifests).filter(|m| m.side == side).map(fact).collect()
        };
        for (what, fact) in FACTS {
            add(format!("{side} {what}"), of(base, fact), of(new, fact));
        }
        let labels: BTreeSet<&String> = base
            .iter()
            .chain(new)
            .flat_map(|r| &r.manifests)
            .filter(|m| m.side == side)
            .flat_map(|m| m.labels.keys())
            .collect();
        for label in labels {
            let value = |m: &Manifest| m.labels.get(label).cloned().unwrap_or_default();
            add(format!("{side} label {label}"), of(base, &value), of(new, &value));
        }
    }
    let words = |readings: &[Reading], fact: &dyn Fn(&Reading) -> String| readings.iter().map(fact).collect();
    let one_machine = |r: &Reading| match &r.manifests[..] {
        [host, target] if host.machine.boot_id == target.machine.boot_id => "one machine".to_owned(),
        [_, _] => "two machines".to_owned(),
        _ => String::new(),
    };
    add("host and target on".into(), words(base, &one_machine), words(new, &one_machine));
    let transports = |r: &Reading| r.transports.iter().copied().collect::<Vec<_>>().join("+");
    add("transport".into(), words(base, &transports), words(new, &transports));
    add("queues".into(), words(base, &|r| r.queues.to_string()), words(new, &|r| r.queues.to_string()));
    let joined = |r: &Reading| match r.joined_share {
        share if share >= 0.999 => "99.9 % or more".to_owned(),
        share => format!("{:.1} %", share * 100.0),
    };
    add("joined".into(), words(base, &joined), words(new, &joined));

    let (before, after) = (load(base), load(new));
    let mut number = |what: &str, base: f64, new: f64, unit: &str| {
        if (new - base).abs() > APART * base.abs().max(new.abs()) {
            let show = |v: f64| format!("{}{unit}", significant(v));
            differences.push(Difference { what: what.into(), base: show(base), new: show(new) });
        }
    };
    number("commands/s", before.commands_per_second, after.commands_per_second, "");
    number("commands in flight", before.in_flight, after.in_flight, "");
    let share = |of: &LoadFigures, class: &ClassName| {
        of.mix.iter().find(|s| s.class == *class).map_or(0.0, |s| s.share)
    };
    let classes: BTreeSet<ClassName> = before.mix.iter().chain(&after.mix).map(|s| s.class).collect();
    for class in classes {
        let (b, n) = (share(&before, &class), share(&after, &class));
        // Shares of a percent of the load are told as they come.
        if (b - n).abs() > 0.02 {
            number(&format!("share of {class}"), b * 100.0, n * 100.0, " %");
        }
    }
    differences
}

/// Three digits.
fn significant(v: f64) -> String {
    match v.abs() {
        a if a >= 100.0 => format!("{v:.0}"),
        a if a >= 10.0 => format!("{v:.1}"),
        _ => format!("{v:.2}"),
    }
}

/// What a reader should know of the runs before believing a verdict.
pub(crate) fn notes(base: &[Reading], new: &[Reading], form: Form) -> Vec<String> {
    let mut notes = Vec::new();
    match form {
        Form::Single => notes.push(format!(
            "one run a side: this tells two runs apart, not two systems: that runs of one system differ by {:.1} % is assumed, and many differ by more; \
             for systems, give several runs of each: BASE... --against NEW...",
            BETWEEN_RUNS * 100.0
        )),
        Form::Repeated => {
            let fewest = base.len().min(new.len());
            if fewest < 5 {
                notes.push(format!(
                    "{fewest} run{} on {} side: only large changes can be told with fewer than 5, and 8 or more are better",
                    if fewest == 1 { "" } else { "s" },
                    if base.len() == new.len() { "each" } else { "one" }
                ));
            }
            if one_after_the_other(base, new) {
                notes.push(
                    "all runs of one side were recorded before all of the other: a slow change of the machines looks like a change of the system; record them in turn"
                        .into(),
                );
            }
        }
    }
    let (before, after) = (load(base), load(new));
    let factor = after.in_flight / before.in_flight.max(1e-9);
    if !(0.7..1.0 / 0.7).contains(&factor) {
        notes.push(format!(
            "the load differs: {} commands in flight against {}; waiting in queues grows with the load, so stages may have moved by that alone",
            significant(before.in_flight),
            significant(after.in_flight)
        ));
    }
    for reading in base.iter().chain(new) {
        notes.extend(reading.notes.iter().map(|note| format!("{}: {note}", reading.name)));
    }
    notes
}

fn one_after_the_other(base: &[Reading], new: &[Reading]) -> bool {
    let times = |readings: &[Reading]| -> Option<(i64, i64)> {
        let each: Option<Vec<(i64, i64)>> =
            readings.iter().map(|r| r.manifests.first().and_then(wall_clock)).collect();
        let each = each?;
        Some((each.iter().map(|t| t.0).min()?, each.iter().map(|t| t.1).max()?))
    };
    match (times(base), times(new)) {
        (Some(b), Some(n)) => b.1 < n.0 || n.1 < b.0,
        _ => false,
    }
}
