//! Comparisons of runs whose truth is known: what is the same is not called moved, what moved is found and
//! named, and what can not be compared is not.

use super::differs::rate;
use super::input::{ClassKey, Reading, Sample, Sides};
use super::moments::{BoundaryPair, rows};
use super::{
    CompareOptions, Comparison, Failure, Floor, Form, Gate, Input, Outcome, Row, Statistic, Verdict, compare,
    compare_readings,
};
use crate::Error;
use crate::recording::Recording;
use crate::synthetic::{Load, Random, Runs, Weather};
use crate::tests::fits;
use proptest::prelude::*;
use rayon::prelude::*;
use run_format::{Boundary, Side};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Ten seconds of reads, five hundred a second, storage 10 us on average, on a machine with weather: times that
/// wander and drift, bursts of other work. One machine, so that the clock need not be searched for.
fn load(seed: u64) -> Load {
    Load {
        seed,
        commands: 5_000,
        queues: 1,
        depth: 1,
        writes: 0.0,
        storage_ns: 4_000.0,
        pause_ns: 1_950_000.0,
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

/// With these gates.
fn gated(gates: &[&str]) -> CompareOptions {
    let gates = gates.iter().map(|g| Gate::parse(g).unwrap()).collect();
    CompareOptions { gates, ..CompareOptions::default() }
}

/// One input on each side.
fn one_each(base: &Input, new: &Input) -> Result<Comparison, Error> {
    compare(std::slice::from_ref(base), std::slice::from_ref(new), &CompareOptions::default())
}

/// A short load without weather.
fn short(seed: u64) -> Load {
    Load { commands: 1_500, weather: None, pause_ns: 200_000.0, ..load(seed) }
}

fn on_one_machine(mut runs: Runs) -> Runs {
    for run in [&mut runs.host, &mut runs.target] {
        run.manifest.machine.boot_id = "one boot".into();
    }
    runs
}

fn read(runs: &Runs) -> Reading {
    Reading::of("a".into(), Some(Recording::of(&runs.host)), Some(Recording::of(&runs.target))).unwrap()
}

fn reading(load: &Load) -> Reading {
    read(&on_one_machine(load.record()))
}

fn compared(base: &[Reading], new: &[Reading]) -> Comparison {
    compare_readings(base, new, &CompareOptions::default()).unwrap()
}

/// As many comparisons, each of its own runs: how many find anything moved, and how many name storage as what moved
/// most.
fn rates(
    comparisons: u64,
    runs: u64,
    make: impl Fn(u64) -> Load + Sync,
    share: f64,
    weather: &str,
) -> (usize, usize) {
    let results: Vec<Comparison> = (0..comparisons)
        .into_par_iter()
        .map(|n| {
            let side = |of: u64, share: f64| -> Vec<Reading> {
                (0..runs).map(|run| reading(&slower(make(n * 1_000 + of * 500 + run + 1), share))).collect()
            };
            compared(&side(0, 0.0), &side(1, share))
        })
        .collect();
    let moved = results.iter().filter(|c| c.moved()).count();
    let found = results.iter().filter(|c| c.classes[0].moved.as_deref() == Some("storage")).count();
    let detectable = |c: &Comparison| row(c, "storage").of(Statistic::Typical)?.detectable_ns;
    let least = results.iter().filter_map(detectable).sum::<f64>() / comparisons as f64;
    eprintln!(
        "{weather}, {runs} run(s) a side, storage {:+.0} %: {moved} of {comparisons} moved, {found} name storage; \
         {least:.0} ns would show",
        share * 100.0
    );
    (moved, found)
}

fn row<'a>(comparison: &'a Comparison, name: &str) -> &'a Row {
    comparison.classes[0].rows.iter().find(|r| r.row == name).unwrap()
}

#[test]
fn two_hundred_comparisons_of_one_system_raise_two_false_alarms_at_most() {
    let (moved, _) = rates(200, 1, load, 0.0, "usual weather");
    assert!(moved <= 2, "{moved} false alarms");
}

#[test]
fn six_percent_of_ten_microseconds_are_found_ninety_times_of_a_hundred() {
    // More commands than above, in the same time: it takes some to know 10 us to 1 %.
    let make = |seed: u64| Load { commands: 16_000, pause_ns: 575_000.0, ..load(seed + 500_000) };
    let (_, found) = rates(100, 1, make, 0.06, "usual weather");
    assert!(found >= 90, "found {found} times");
}

/// The rates of `docs/performance.md`: `cargo test --release -p joiner --lib rates_over_many_seeds -- --ignored
/// --nocapture`.
#[test]
#[ignore = "takes minutes"]
fn rates_over_many_seeds() {
    let usual = Weather::default();
    let weathers = [
        ("usual weather", usual),
        ("calm", Weather { wander: 0.01, drift: 0.0, bursts: 0.0, run_to_run: 0.0, ..usual }),
        ("drift of 3 % a run", Weather { drift: 0.003, ..usual }),
        ("long bursts, twice as slow", Weather { bursts: 4.0, burst_ns: 20e6, burst_factor: 2.0, ..usual }),
        ("wandering for 100 ms", Weather { wander_ns: 100e6, ..usual }),
        ("2 % from run to run", Weather { run_to_run: 0.02, ..usual }),
    ];
    for (name, weather) in weathers {
        for runs in [1, 6] {
            let commands = if runs == 1 { 16_000 } else { 5_000 };
            let pause_ns = 10e9 / commands as f64 - 50_000.0;
            let make =
                |seed: u64| Load { weather: Some(weather), commands, pause_ns, ..load(seed + 10_000_000) };
            rates(if runs == 1 { 1_000 } else { 200 }, runs, make, 0.0, name);
            rates(if runs == 1 { 300 } else { 100 }, runs, make, 0.06, name);
        }
    }
}

#[test]
fn the_same_runs_give_the_same_comparison_and_nothing_moved() {
    let (base, new) = ([reading(&load(3))], [reading(&load(4))]);
    let json = |c: &Comparison| serde_json::to_value(c).unwrap();
    assert_eq!(json(&compared(&base, &new)), json(&compared(&base, &new)));
    let same = compared(&base, &base.clone());
    assert!(!same.moved());
    for row in &same.classes[0].rows {
        for cell in row.statistics.iter().flatten() {
            assert_eq!((cell.difference_ns, cell.ratio), (0.0, Some(1.0)), "{}", row.row);
        }
    }
    assert!(same.differences.is_empty() && same.boundaries.is_empty(), "{:?}", same.differences);
}

#[test]
fn figures_are_those_of_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let (host, target) = on_one_machine(load(5).record()).write(folder.path()).unwrap();
    let joined = crate::join(&host, &target, &crate::JoinOptions::default()).unwrap();
    let report = crate::report(&joined, &crate::ReportOptions::default()).unwrap();
    let input = Input::find(folder.path()).unwrap();
    let comparison = one_each(&input, &input).unwrap();
    let class = &report.classes[0];
    let network = class.stages.of(run_format::Stage::Network).unwrap().times;
    let ours = row(&comparison, "network");
    let base = |s: Statistic| ours.of(s).unwrap().base_ns;
    assert_eq!(base(Statistic::Mean), network.mean_ns);
    assert_eq!(Some(base(Statistic::P50) as i64), network.p50_ns);
    assert_eq!(Some(base(Statistic::P99) as i64), network.p99_ns);
    assert!(ours.of(Statistic::P999).is_none(), "5 000 commands carry no p99.9");
    // The typical values add up.
    let typical = |name: &str| row(&comparison, name).of(Statistic::Typical).unwrap().base_ns;
    let sum: f64 = run_format::Stage::ALL.iter().map(|s| typical(s.name())).sum();
    assert!((sum - typical("latency")).abs() < 1.0);
}

#[test]
fn a_stage_that_moved_is_named_with_its_share() {
    let c = compared(&[reading(&load(1))], &[reading(&slower(load(2), 0.5))]);
    let class = &c.classes[0];
    assert_eq!((class.verdict, class.moved.as_deref()), (Verdict::Moved, Some("storage")));
    let storage = row(&c, "storage");
    let cell = storage.of(Statistic::Typical).unwrap();
    assert!(cell.low_ns.unwrap() < 5_000.0 && cell.high_ns.unwrap() > 5_000.0, "{cell:?}");
    assert!((0.5..2.0).contains(&storage.explains.unwrap()), "{storage:?}");
    assert!(
        class.sentence.starts_with("storage moved by +")
            && class.sentence.contains("of the latency's change")
    );
    assert_eq!(c.form, Form::Single);
    assert!(c.notes.iter().any(|n| n.contains("one run a side")));
    for text in [c.to_table(false), c.to_table(true), c.to_markdown(), c.to_junit()] {
        assert!(text.contains("storage moved by +"), "{text}");
    }
}

#[test]
fn repeated_runs_carry_the_spread_between_runs() {
    let vary = Weather { run_to_run: 0.1, ..Weather::default() };
    let side = |from: u64, share: f64| -> Vec<Reading> {
        (from..from + 5)
            .into_par_iter()
            .map(|seed| reading(&slower(Load { weather: Some(vary), ..load(seed) }, share)))
            .collect()
    };
    let (base, new) = (side(100, 0.0), side(200, 0.06));
    let c = compared(&base, &new);
    assert_eq!(c.form, Form::Repeated);
    assert_eq!(c.base.runs.len(), 5);
    // Runs that differ by 10 % can not show 6 %, whatever each run says by itself.
    assert_ne!(row(&c, "storage").verdict, Some(Verdict::Moved));
    let single = compared(&base[..1], &new[..1]);
    let reach = |c: &Comparison| row(c, "storage").of(Statistic::Typical).unwrap().detectable_ns.unwrap();
    assert!(reach(&c) > reach(&single));
    assert!(compared(&base[..2], &new).notes.iter().any(|n| n.contains("2 runs on one side")));
}

#[test]
fn comparisons_are_what_the_schema_says_and_the_schema_says_no_to_others() {
    let schema: Value = serde_json::from_str(super::COMPARE_SCHEMA).unwrap();
    // A run is what it is in a report: in time windows, with a measured cost.
    let report: Value = serde_json::from_str(crate::SCHEMA).unwrap();
    for part in ["run", "effect"] {
        let of = |schema: &Value| without_descriptions(&schema["$defs"][part]);
        assert_eq!(of(&schema), of(&report));
    }
    let options = gated(&["storage.p99<=1.05x", "read/4096:latency.mean<=+3us", "flush:network.p50<=1us"]);
    let mut other = on_one_machine(Load { writes: 0.4, ..short(8) }.record());
    other.host.manifest.labels.insert("disk".into(), "new".into());
    other.target.commands.iter_mut().for_each(|(_, c)| c.times[Boundary::TSubmit.slot()] = None);
    other.host.commands[5].1.status = 0x285;
    for (base, new) in [(reading(&load(7)), read(&other)), (read(&other), read(&other))] {
        let comparison = compare_readings(&[base], &[new], &options).unwrap();
        let mut value = serde_json::to_value(&comparison).unwrap();
        fits(&value, &schema, &schema).unwrap();
        assert!(value["gates"].as_array().unwrap().len() >= 3);
        value.pointer_mut("/classes/0/rows/0/statistics").unwrap().as_object_mut().unwrap().remove("typical");
        assert!(fits(&value, &schema, &schema).is_err());
    }
    let mut failure = serde_json::to_value(Failure::new("a <b> & c")).unwrap();
    fits(&failure, &schema, &schema).unwrap();
    failure["more"] = true.into();
    assert!(fits(&failure, &schema, &schema).is_err());
    let xml = Failure::new("a <b> & c").to_junit();
    assert!(xml.contains("<error") && xml.contains("a &lt;b&gt; &amp; c") && !xml.contains("<b>"), "{xml}");
}

fn without_descriptions(schema: &Value) -> Value {
    match schema {
        Value::Object(members) => members
            .iter()
            .filter(|(name, _)| *name != "description")
            .map(|(name, value)| (name.clone(), without_descriptions(value)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
        other => other.clone(),
    }
}

/// A boundary that both sides took at the same moment but for those given.
fn pairs(sides: Sides, apart: &[Boundary]) -> Vec<BoundaryPair> {
    let of_sides = |b: &&Boundary| match sides {
        Sides::Pair => true,
        Sides::Host => b.side() == Side::Host,
        Sides::Target => b.side() == Side::Target,
    };
    let pair = |b: &Boundary| BoundaryPair {
        boundary: *b,
        base_hook: Some("a".into()),
        base_rung: Some(0),
        base_measured: true,
        new_hook: Some("b".into()),
        new_rung: Some(1),
        new_measured: !apart.contains(b),
        same_moment: !apart.contains(b),
        base_price_ns: 0,
        new_price_ns: 0,
    };
    Boundary::ALL.iter().filter(of_sides).map(pair).collect()
}

fn names(sides: Sides, apart: &[Boundary], r2t: bool) -> Vec<(String, bool)> {
    let sample = Sample { start: vec![0], columns: vec![vec![5]; 6], r2t };
    let rows = rows(sides, &pairs(sides, apart), r2t, &[&sample]);
    rows.into_iter().map(|r| (r.name, r.comparable)).collect()
}

#[test]
fn stages_that_meet_at_another_moment_are_compared_together() {
    use Boundary::{HDriver, HEnd, HSent, TDone, TR2t, TRecv, TResp, TSubmit};
    let list = |sides, apart: &[Boundary], r2t| -> String {
        let rows = names(sides, apart, r2t).into_iter();
        rows.map(|(name, ok)| if ok { name } else { format!("({name})") }).collect::<Vec<_>>().join(" ")
    };
    let all = "latency host_block host_driver network target_driver storage";
    assert_eq!(list(Sides::Pair, &[], true), all);
    assert_eq!(list(Sides::Pair, &[TResp], true), all, "nothing is parted by t_resp");
    assert_eq!(
        list(Sides::Pair, &[TRecv], false),
        "latency host_block host_driver network+target_driver storage"
    );
    assert_eq!(list(Sides::Pair, &[TR2t], false), all, "reads have no R2T");
    assert_eq!(
        list(Sides::Pair, &[TR2t], true),
        "latency host_block host_driver+network+target_driver storage"
    );
    assert_eq!(
        list(Sides::Pair, &[HDriver, TSubmit, TDone], false),
        "latency host_block+host_driver network target_driver+storage"
    );
    assert_eq!(
        list(Sides::Pair, &[HEnd], false),
        "(latency) host_driver+network+target_driver+storage (host_block) host_driver network target_driver storage"
    );
    assert_eq!(
        list(Sides::Pair, &[HEnd, HDriver], false),
        "(latency) network+target_driver+storage (host_block+host_driver) network target_driver storage"
    );
    assert_eq!(list(Sides::Host, &[HSent], false), "latency host_block host_driver+beyond_host");
    assert_eq!(
        list(Sides::Target, &[TRecv], false),
        "(latency) storage+data_wait (target_driver) storage data_wait"
    );
}

#[test]
fn another_hook_of_a_boundary_widens_and_says_why() {
    let base = on_one_machine(short(1).record());
    let mut new = on_one_machine(short(2).record());
    for hook in new.target.manifest.hooks.iter_mut().filter(|h| h.boundary == Boundary::TSubmit) {
        (hook.measured, hook.rung) = (false, 3);
    }
    let options = gated(&["storage.p50<=2x", "network.p50<=2x"]);
    let c = compare_readings(&[read(&base)], &[read(&new)], &options).unwrap();
    let both = row(&c, "target_driver+storage");
    assert!(both.verdict.is_some() && both.why.as_ref().unwrap().contains("t_submit"), "{both:?}");
    assert!(c.classes[0].rows.iter().all(|r| r.row != "storage"));
    assert_eq!(c.gates[0].outcome, Outcome::CannotTell);
    assert!(c.gates[0].text.contains("target_driver+storage"), "{}", c.gates[0].text);
    assert_eq!((c.gates[1].outcome, c.outcome()), (Outcome::Holds, Outcome::CannotTell));
    assert!(c.to_table(false).contains("NOT the same moment"));
    // The same stand-in on both sides is one moment.
    let alike = compared(&[read(&new)], &[read(&new)]);
    assert!(alike.classes[0].rows.iter().any(|r| r.row == "storage"));
}

/// The same with the target's hooks of this kind and price, and storage slower by what two hits cost a command.
fn measured_by(runs: &Runs, hook: &str, price: Option<u32>, slower: i64) -> Reading {
    let mut runs = runs.clone();
    for h in &mut runs.target.manifest.hooks {
        (h.hook, h.estimated_ns) = (Some(format!("{hook} of_{}", h.boundary)), price);
    }
    let mut reading = read(&runs);
    for sample in reading.classes.values_mut() {
        for column in [0, 5] {
            sample.columns[column].iter_mut().for_each(|v| *v += slower);
        }
    }
    reading
}

#[test]
fn what_the_hooks_cost_is_no_change_of_the_system() {
    let runs = on_one_machine(short(1).record());
    let side = |hook, price, slower| [measured_by(&runs, hook, price, slower)];
    let options = gated(&["storage.typical<=1.1x", "storage.typical<=+1us", "storage.typical<=12us"]);
    let by = |base: &[Reading], new: &[Reading]| compare_readings(base, new, &options).unwrap();
    let ring = side("trace ring", Some(40), 0);
    // Two hits of 510 ns, as they cost on a loaded machine: twice the estimate.
    let c = by(&ring, &side("uprobe", Some(510), 2_000));
    let storage = row(&c, "storage");
    assert_eq!((storage.verdict, storage.hooks_ns), (Some(Verdict::CannotTell), 3.0 * 2.0 * 470.0));
    assert_eq!(row(&c, "latency").verdict, Some(Verdict::CannotTell));
    assert_eq!(row(&c, "host_block").hooks_ns, 0.0);
    assert_eq!(row(&c, "network").hooks_ns, 3.0 * 2.0 * 470.0, "t_recv and t_sent; reads have no R2T");
    assert!(!c.moved(), "{:?}", c.classes[0]);
    assert!(c.gates[..2].iter().all(|g| g.outcome == Outcome::CannotTell), "{:?}", c.gates);
    assert!(c.gates[0].text.contains("may be what the hooks cost"), "{}", c.gates[0].text);
    let note = c.notes.iter().find(|n| n.contains("different prices")).unwrap();
    assert!(note.contains("storage 940 ns") && note.contains("target driver"), "{note}");
    assert!(c.to_table(false).contains("hooks may be 2.82 us") && c.to_markdown().contains("hooks may be"));
    // The other way round, and what is beyond the price.
    assert!(!by(&side("uprobe", Some(510), 2_000), &ring).moved());
    let more = by(&ring, &side("uprobe", Some(510), 20_000));
    assert_eq!(more.classes[0].moved.as_deref(), Some("storage"), "{:?}", more.classes[0]);
    assert_eq!(more.gates[1].outcome, Outcome::DoesNotHold);
    // By the same kind at the same price it is a change.
    let alike = by(&side("uprobe", Some(510), 0), &side("uprobe", Some(510), 2_000));
    assert_eq!((row(&alike, "storage").hooks_ns, alike.classes[0].moved.as_deref()), (0.0, Some("storage")));
    assert!(alike.notes.iter().all(|n| !n.contains("different prices")));
    // A kernel's hook and a uprobe of unknown price; two probes at one boundary.
    let allowed = |base: &[Reading], new: &[Reading]| row(&by(base, new), "storage").hooks_ns;
    assert_eq!(allowed(&side("fentry", None, 0), &side("usdt", None, 0)), 3.0 * 2.0 * (1_000.0 - 150.0));
    assert_eq!(allowed(&ring, &side("uprobe x, raw tracepoint", Some(510), 0)), 3.0 * 2.0 * (660.0 - 40.0));
}

#[test]
fn a_stall_at_the_end_is_no_load() {
    // One command at a time, and the last one hangs for ten times as long as all before it.
    let mut sample = vec![90_000; 100];
    sample[99] = 100_000_000;
    let (per_second, in_flight) = rate(&made_up(&sample, 0));
    assert!(in_flight <= 1.0 && in_flight > 0.9, "{in_flight}");
    assert!((per_second - 100.0 / 0.1099).abs() < 1.0, "{per_second}");
}

#[test]
fn rates_of_windowed_pairs_are_those_of_the_time_in_which_both_sides_were_armed() {
    let load = Load { commands: 60_000, depth: 4, pause_ns: 60_000.0, weather: None, ..load(1) };
    let (whole, whole_in_flight) = rate(&read(&on_one_machine(load.record())));
    // In step, half a window apart either way, and one side throughout.
    for (host, target) in [
        (Some(0), Some(0)),
        (Some(0), Some(2_500_000)),
        (Some(2_500_000), Some(0)),
        (Some(0), None),
        (None, Some(0)),
    ] {
        let mut runs = on_one_machine(load.record());
        for (run, late) in [(&mut runs.host, host), (&mut runs.target, target)] {
            if let Some(late) = late {
                run.in_windows(5_000_000, 20_000_000, late);
            }
        }
        let (windowed, in_flight) = rate(&read(&runs));
        // A command that a window cuts is in neither run.
        assert!((0.9..1.05).contains(&(windowed / whole)), "{host:?} {target:?}: {windowed} of {whole}");
        assert!((0.85..1.05).contains(&(in_flight / whole_in_flight)), "{in_flight} of {whole_in_flight}");
    }
}

#[test]
fn a_gate_holds_only_where_twice_its_bound_would_have_shown() {
    let certain = made_up(&latencies(1, 3_000, 1.0), 0);
    let mut random = Random::new(5);
    // A tail so rare and heavy that the mean is anything.
    let wild: Vec<i64> =
        (0..250).map(|n| if n % 120 == 7 { (random.unit() * 4e6) as i64 } else { 5_000 }).collect();
    let wild = made_up(&wild, 0);
    let limit = format!(
        "latency.mean<={}ns",
        wild.classes
            .values()
            .next()
            .map_or(0, |s| { s.columns[0].iter().sum::<i64>() / s.len() as i64 + 100 })
    );
    for (base, new, gate, expected) in [
        (&certain, &wild, limit.as_str(), Outcome::CannotTell),
        (&wild, &wild, "latency.mean<=1.01x", Outcome::CannotTell),
        (&wild, &wild, "latency.mean<=+1us", Outcome::CannotTell),
        (&certain, &certain, "latency.mean<=1.01x", Outcome::Holds),
        (&certain, &certain, "latency.mean<=+1us", Outcome::Holds),
        (&certain, &certain, "latency.mean<=11us", Outcome::Holds),
    ] {
        let c =
            compare_readings(std::slice::from_ref(base), std::slice::from_ref(new), &gated(&[gate])).unwrap();
        let found = &c.gates[0];
        assert_eq!(found.outcome, expected, "{gate}: {}", found.text);
        if expected == Outcome::CannotTell {
            assert!(found.text.contains("would not have shown twice"), "{}", found.text);
        }
        // A time is at least 0, and no number is told that says nothing.
        assert!(!gate.ends_with("ns") || found.low.unwrap() >= 0.0);
        assert!(!found.text.contains("e+") && found.text.len() < 250, "{}", found.text);
    }
}

#[test]
fn a_gate_that_is_given_twice_is_one() {
    let one = [made_up(&latencies(1, 1_000, 1.0), 0)];
    let judged = |gates: &[&str]| compare_readings(&one, &one, &gated(gates)).unwrap().gates;
    let twice = judged(&["latency.p50<=+5%", "latency.p50 <= 1.05x"]);
    assert_eq!(twice.len(), 1);
    let alone = judged(&["latency.p50<=+5%"]);
    assert_eq!((twice[0].low, twice[0].high), (alone[0].low, alone[0].high));
    assert_eq!(judged(&["latency.p50<=+5%", "latency.p90<=+5%"]).len(), 2);
}

#[test]
fn a_recording_counts_once() {
    let folder = tempfile::tempdir().unwrap();
    let inputs: Vec<Input> = (1..4)
        .map(|seed| {
            let place = folder.path().join(seed.to_string());
            std::fs::create_dir(&place).unwrap();
            let mut runs = on_one_machine(short(seed).record());
            for run in [&mut runs.host, &mut runs.target] {
                run.manifest.counters.seen += seed;
            }
            let (host, target) = runs.write(&place).unwrap();
            Input::pair(host, target)
        })
        .collect();
    let options = CompareOptions::default();
    let compare = |base: &[&Input], new: &[&Input]| {
        let own = |inputs: &[&Input]| inputs.iter().map(|i| (*i).clone()).collect::<Vec<_>>();
        compare(&own(base), &own(new), &options)
    };
    let [a, b, c] = &inputs[..] else { panic!() };
    let refused = |base: &[&Input], new: &[&Input]| compare(base, new).unwrap_err().to_string();
    assert!(refused(&[a, a], &[b]).contains("given twice"));
    assert!(refused(&[a, b], &[c, a]).contains("given twice"));
    assert!(compare(&[a, b], &[c]).is_ok());
    let same =
        |c: Result<Comparison, Error>| c.unwrap().notes.iter().any(|n| n.contains("the same recording"));
    assert!(same(compare(&[a], &[a])) && !same(compare(&[a], &[b])));
}

#[test]
fn a_manifest_that_is_no_file_is_told_and_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let (host, _) = on_one_machine(short(1).record()).write(folder.path()).unwrap();
    let manifest = host.directory().join("run.json");
    std::fs::remove_file(&manifest).unwrap();
    // A pipe would block whoever opens it; a folder is as little of a file.
    let made = std::process::Command::new("mkfifo").arg(&manifest).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("skipped: mkfifo is not there; a folder in its place");
        std::fs::create_dir(&manifest).unwrap();
    }
    let pair = format!("{0},{0}", host.directory().display());
    for given in [folder.path(), host.directory(), pair.as_ref()] {
        let error = Input::find(given).unwrap_err().to_string();
        assert!(error.contains("run.json is no file"), "{error}");
    }
}

#[test]
fn a_table_says_each_thing_once_and_well() {
    let few = |seed| reading(&short(seed));
    let c = compared(&[few(1), few(2), few(3)], &[few(4), few(5), few(6)]);
    let table = c.to_table(true);
    assert!(table.contains("and 1 more repetition\n"), "{table}");
    assert!(table.contains("3 runs on each side"), "{table}");
    assert_eq!(table.matches("p99.9 needs 10 000 commands").count(), 1, "{table}");
    assert!(table.contains("1.0") && !table.contains("+0.0 %"), "{table}");
    let sentence = &c.classes[0].sentence;
    assert!(sentence.matches("shows").count() <= 2, "{sentence}");
}

#[test]
fn what_differs_between_the_runs_is_listed() {
    let base = on_one_machine(short(1).record());
    let mut new = on_one_machine(Load { depth: 8, ..short(2) }.record());
    new.target.manifest.software.version = "26.09".into();
    new.host.manifest.machine.kernel = "6.18".into();
    new.host.manifest.labels.insert("mtu".into(), "9000".into());
    let c = compared(&[read(&base)], &[read(&new)]);
    let found: BTreeSet<&str> = c.differences.iter().map(|d| d.what.as_str()).collect();
    for what in ["target version", "host kernel", "host label mtu", "commands/s", "commands in flight"] {
        assert!(found.contains(what), "{what}: {found:?}");
    }
    assert!(c.notes.iter().any(|n| n.starts_with("the load differs")), "{:?}", c.notes);
    assert!((0.2..0.6).contains(&(c.base.load.in_flight * 1.2)), "{:?}", c.base.load);
}

#[test]
fn runs_without_a_common_class_and_empty_ones_are_told() {
    let reads = reading(&short(1));
    let writes = reading(&Load { writes: 1.0, ..short(2) });
    let error = compare_readings(&[reads], &[writes], &CompareOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(
        error.is_too_little() && text.contains("read 4 KiB (1500") && text.contains("write 4 KiB"),
        "{text}"
    );
    let mut empty = on_one_machine(short(3).record());
    empty.target.commands.clear();
    empty.target.queues.clear();
    let read = Reading::of("a".into(), Some(Recording::of(&empty.host)), Some(Recording::of(&empty.target)));
    let error = read.unwrap_err();
    assert!(
        error.is_too_little() && error.to_string().contains("the target's run has no commands"),
        "{error}"
    );
}

#[test]
fn inputs_are_found_and_mixtures_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (host, target) = on_one_machine(short(1).record()).write(folder.path()).unwrap();
    let (h, t) = (host.directory().display(), target.directory().display());
    let find = |text: String| Input::find(text.as_ref());
    for pair in [folder.path().display().to_string(), format!("{h},{t}"), format!("{t},{h}")] {
        assert!(find(pair).unwrap().read().is_ok_and(|r| r.sides == Sides::Pair));
    }
    let alone = find(h.to_string()).unwrap();
    assert_eq!(alone.read().unwrap().sides, Sides::Host);
    let pair = find(format!("{h},{t}")).unwrap();
    let mixed = one_each(&pair, &alone).unwrap_err();
    assert!(matches!(mixed, Error::MixedInputs { .. }), "{mixed}");
    let two_hosts = find(format!("{h},{h}")).unwrap_err().to_string();
    assert!(two_hosts.contains("more than one run of a host"), "{two_hosts}");
    assert!(find(format!("{h},{t},{t}")).unwrap_err().to_string().contains("one comma"));
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(find(empty.path().display().to_string()), Err(Error::Input { .. })));
    assert!(find("/no/such.run".into()).is_err());
    // One side alone: its own two stages and the rest.
    let c = one_each(&alone, &alone).unwrap();
    let rows: Vec<&str> = c.classes[0].rows.iter().map(|r| r.row.as_str()).collect();
    assert_eq!(rows, ["latency", "host_block", "host_driver", "beyond_host"]);
    let target = find(t.to_string()).unwrap();
    let c = one_each(&target, &target).unwrap();
    let rows: Vec<&str> = c.classes[0].rows.iter().map(|r| r.row.as_str()).collect();
    assert_eq!(rows, ["latency", "target_driver", "storage"], "reads wait for no data");
}

/// A reading that was made up: one class with this latency, all of it in storage.
fn made_up(latencies: &[i64], start: i64) -> Reading {
    let n = latencies.len() as i64;
    let zero = vec![0; latencies.len()];
    let sample = Sample {
        start: (0..n).map(|i| start + i * 100_000).collect(),
        columns: vec![latencies.to_vec(), zero.clone(), zero.clone(), zero.clone(), zero, latencies.to_vec()],
        r2t: false,
    };
    let key = ClassKey { error: false, opcode: 2, bytes: 4_096 };
    Reading { classes: BTreeMap::from([(key, sample)]), ..reading(&short(1)) }
}

fn latencies(seed: u64, n: usize, scale: f64) -> Vec<i64> {
    let mut random = Random::new(seed);
    (0..n).map(|_| ((5_000.0 - (1.0 - random.unit()).ln() * 5_000.0) * scale) as i64).collect()
}

#[test]
fn gates_hold_fail_and_can_not_be_told() {
    let (base, new) = (made_up(&latencies(1, 3_000, 1.0), 0), made_up(&latencies(2, 3_000, 1.3), 0));
    let outcome = |gate: &str, base: &Reading, new: &Reading| {
        let options = gated(&[gate]);
        let c = compare_readings(std::slice::from_ref(base), std::slice::from_ref(new), &options).unwrap();
        (c.gates[0].outcome, c.gates[0].text.clone())
    };
    for (gate, expected) in [
        ("storage.typical<=1.5x", Outcome::Holds),
        ("storage.typical<=1.1x", Outcome::DoesNotHold),
        ("storage.typical<=+10%", Outcome::DoesNotHold),
        ("latency.mean<=+5us", Outcome::Holds),
        ("latency.mean<=+1us", Outcome::DoesNotHold),
        ("latency.mean<=-1us", Outcome::DoesNotHold),
        ("latency.p50<=1ms", Outcome::Holds),
        ("latency.p50<=2us", Outcome::DoesNotHold),
        ("read/4KiB:latency.p50<=1ms", Outcome::Holds),
        // Nearly what it is: beyond, and not surely.
        ("latency.p50<=1.29x", Outcome::CannotTell),
        ("latency.p999<=9s", Outcome::CannotTell),
        ("write:latency.p50<=9s", Outcome::CannotTell),
        ("network.p50<=1x", Outcome::CannotTell),
        ("beyond_host.p50<=1x", Outcome::CannotTell),
    ] {
        let (found, text) = outcome(gate, &base, &new);
        if gate == "latency.p50<=1.29x" {
            assert_ne!(found, Outcome::DoesNotHold, "{text}");
        } else {
            assert_eq!(found, expected, "{gate}: {text}");
        }
    }
    assert!(outcome("latency.p999<=9s", &base, &new).1.contains("p99.9 needs 10 000 commands"));
    let few = made_up(&latencies(3, 150, 1.0), 0);
    assert!(outcome("latency.p50<=9s", &few, &new).1.contains("needs 200 commands"));
}

#[test]
fn names_from_other_machines_are_no_markup() {
    let mut runs = on_one_machine(short(1).record());
    runs.host.manifest.machine.hostname = "<b>\"&'\u{1b}[31m|`x`".into();
    let options = gated(&["latency.p50<=1ns"]);
    let c = compare_readings(&[reading(&short(2))], &[read(&runs)], &options).unwrap();
    let xml = c.to_junit();
    assert!(xml.contains("failures=\"1\"") && xml.contains("<failure"), "{xml}");
    assert!(xml.contains("&lt;b&gt;") && !xml.contains("<b>") && !xml.contains('\u{1b}'), "{xml}");
    assert!(!c.to_markdown().contains("<b>"));
    // Every element that begins ends.
    for element in ["testsuites", "testsuite", "testcase", "failure", "system-out"] {
        let begun =
            xml.matches(&format!("<{element}>")).count() + xml.matches(&format!("<{element} ")).count();
        assert_eq!(begun, xml.matches(&format!("</{element}>")).count(), "{element}: {xml}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_clocks_offset_changes_nothing(seed: u32, host in 0i64..1 << 50, target in 0i64..1 << 50) {
        let new = Load { storage_ns: 6_000.0, ..short(u64::from(seed) + 1) };
        let moved = |load: Load| Load { host_clock_ns: host + (1 << 40), target_clock_ns: target + (1 << 40), ..load };
        // Found anew, each machine's clock being its own.
        let read_apart = |load: &Load| read(&load.record());
        let base = short(u64::from(seed));
        let near = compared(&[read_apart(&base)], &[read_apart(&new)]);
        let far = compared(&[read_apart(&moved(base))], &[read_apart(&moved(new))]);
        let classes = |c: &Comparison| serde_json::to_value(&c.classes).unwrap();
        prop_assert_eq!(classes(&near), classes(&far));
    }

    #[test]
    fn swapping_the_sides_turns_every_figure_round(seed: u32, scale in 0.5f64..2.0) {
        let a = [made_up(&latencies(u64::from(seed), 1_200, 1.0), 0)];
        let b = [made_up(&latencies(u64::from(seed) + 1, 900, scale), 7)];
        let (there, back) = (compared(&a, &b), compared(&b, &a));
        for (x, y) in there.classes[0].rows.iter().zip(&back.classes[0].rows) {
            for (x, y) in x.statistics.iter().flatten().zip(y.statistics.iter().flatten()) {
                prop_assert_eq!((x.base_ns, x.new_ns, x.difference_ns), (y.new_ns, y.base_ns, -y.difference_ns));
                let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * (1.0 + a.abs());
                prop_assert!(close(x.low_ns.unwrap(), -y.high_ns.unwrap()));
                if let (Some(r), Some(s)) = (x.ratio, y.ratio) {
                    prop_assert!(close(r * s, 1.0));
                    prop_assert!(close(x.ratio_low.unwrap() * y.ratio_high.unwrap(), 1.0));
                }
            }
        }
    }

    #[test]
    fn a_larger_change_is_never_less_certain(seed: u32, small in 1.0f64..1.3, more in 1.0f64..1.5) {
        // The same noise, scaled: only the change grows.
        let base = [made_up(&latencies(u64::from(seed), 1_000, 1.0), 0)];
        let typical = |scale: f64| {
            let new = [made_up(&latencies(u64::from(seed) + 9, 1_000, scale), 0)];
            *row(&compared(&base, &new), "storage").of(Statistic::Typical).unwrap()
        };
        let (less, larger) = (typical(small), typical(small * more));
        if less.verdict == Verdict::Moved && less.difference_ns > 0.0 {
            prop_assert_eq!(larger.verdict, Verdict::Moved, "{:?} {:?}", less, larger);
        }
    }

    #[test]
    fn a_higher_floor_makes_no_more_moves_and_no_fewer_sames(seed: u32, scale in 0.9f64..1.2, low in 0.0f64..0.05) {
        let (a, b) = (made_up(&latencies(u64::from(seed), 1_000, 1.0), 0), made_up(&latencies(u64::from(seed) + 3, 1_000, scale), 0));
        let at = |share: f64| {
            let options = CompareOptions { floor: Floor { share, ns: 0.0 }, ..CompareOptions::default() };
            compare_readings(std::slice::from_ref(&a), std::slice::from_ref(&b), &options).unwrap()
        };
        let (lower, higher) = (at(low), at(low + 0.05));
        for (l, h) in lower.classes[0].rows.iter().zip(&higher.classes[0].rows) {
            for (l, h) in l.statistics.iter().flatten().zip(h.statistics.iter().flatten()) {
                prop_assert!(h.verdict != Verdict::Moved || l.verdict == Verdict::Moved);
                prop_assert!(l.verdict != Verdict::Same || h.verdict == Verdict::Same);
            }
        }
    }
}
