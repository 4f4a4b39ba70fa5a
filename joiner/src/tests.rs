//! The join against loads whose truth is known: nothing is ever matched wrongly, everything is accounted
//! for, and what can be matched is.

use crate::join::{JoinOptions, Joined, SetAside, join_recordings};
use crate::recording::Recording;
use crate::report::{ReportOptions, report};
use crate::synthetic::{Cids, Load, Pattern, Random, Runs, View};
use crate::{Error, GroupBy};
use proptest::prelude::*;
use run_format::{Boundary, FioJob, Hook, Nanos, Stage, Transport, Workload};
use serde_json::Value;

fn joined(runs: &Runs) -> Joined {
    join_recordings(Recording::of(&runs.host), Recording::of(&runs.target), &JoinOptions::default()).unwrap()
}

/// Joins, and checks everything that holds for any join: no wrong match, exact sums, exact accounts.
/// Returns the join and the number of commands that both sides recorded.
fn checked(runs: &Runs) -> (Joined, usize) {
    let joined = joined(runs);
    for pair in joined.pairs() {
        let (h, hc) = &runs.host.commands[pair.host_row as usize];
        let (t, _) = &runs.target.commands[pair.target_row as usize];
        assert_eq!(h, t, "command {h} of the host was matched with {t} of the target");
        let stages = joined.stages(*pair).unwrap();
        let latency = hc.time(Boundary::HEnd).unwrap().0 - hc.time(Boundary::HQueued).unwrap().0;
        assert_eq!(stages.stages.iter().sum::<i64>(), latency as i64);
        assert_eq!(stages.latency, latency as i64);
    }
    let a = joined.accounting();
    assert_eq!(a.joined, joined.pairs().len() as u64);
    assert_eq!(a.host_commands, runs.host.commands.len() as u64);
    assert_eq!(a.target_commands, runs.target.commands.len() as u64);
    assert_eq!(a.host_commands, a.joined + a.host.total());
    assert_eq!(a.target_commands, a.joined + a.target.total());
    let of_target: std::collections::HashSet<u64> = runs.target.commands.iter().map(|c| c.0).collect();
    let both = runs.host.commands.iter().filter(|c| of_target.contains(&c.0)).count();
    (joined, both)
}

/// Checks, and that at least this share of what both sides recorded was joined.
fn joins(runs: &Runs, share: f64) -> Joined {
    let (joined, both) = checked(runs);
    let least = (both as f64 * share).ceil() as usize;
    assert!(
        joined.pairs().len() >= least,
        "{} of {both} joined; {:?}; {:?}; {:?}",
        joined.pairs().len(),
        joined.accounting(),
        joined.clock(),
        joined.notes()
    );
    joined
}

#[test]
fn a_plain_load_joins_whole_and_its_clock_is_found() {
    let load = Load::default();
    let joined = joins(&load.record(), 1.0);
    let clock = joined.clock().unwrap();
    let truth = load.host_clock_ns - load.target_clock_ns;
    // The target's clock gains 8 us a second over the load's fraction of a second.
    assert!((clock.offset_ns - truth).abs() <= clock.uncertainty_max_ns + 10_000, "{clock:?}, not {truth}");
    assert!(clock.uncertainty_ns < 20_000, "{clock:?}");
}

#[test]
fn twenty_commands_suffice() {
    for seed in 0..50 {
        let load =
            Load { seed, commands: 20, pause_ns: 50_000_000.0, drift_ppm: 40.0, depth: 1, ..Load::default() };
        joins(&load.record(), 0.99);
    }
}

#[test]
fn one_side_may_have_a_seventh_of_the_commands() {
    let seventh = View { keep: 1.0 / 7.0, ..View::default() };
    joins(&Load { host: seventh, ..Load::default() }.record(), 0.999);
    joins(&Load { target: seventh, ..Load::default() }.record(), 0.999);
}

#[test]
fn the_target_may_be_recorded_late_and_the_host_end_early() {
    let load = Load {
        host: View { during: (-0.1, 0.7), ..View::default() },
        target: View { during: (0.6, 1.1), ..View::default() },
        ..Load::default()
    };
    let joined = joins(&load.record(), 0.999);
    let a = joined.accounting();
    assert!(a.host.of(SetAside::Lost) <= 64 && a.target.of(SetAside::Lost) <= 64, "{a:?}");
    assert!(a.host.of(SetAside::Outside) > 5_000 && a.target.of(SetAside::Outside) > 1_000, "{a:?}");
}

#[test]
fn one_block_at_depth_one_with_sixteen_cids() {
    let load = Load {
        pattern: Pattern::OneBlock,
        queues: 1,
        depth: 1,
        writes: 0.0,
        target: View { during: (0.3, 1.1), ..View::default() },
        ..Load::default()
    };
    joins(&load.record(), 0.99);
}

#[test]
fn one_block_at_depth_one_with_one_cid() {
    for drift_ppm in [-500.0, 0.0, 500.0] {
        let load = Load {
            pattern: Pattern::OneBlock,
            cids: Cids::Reused,
            queues: 1,
            depth: 1,
            writes: 0.0,
            drift_ppm,
            ..Load::default()
        };
        joins(&load.record(), 0.99);
    }
}

#[test]
fn deep_queues_on_one_block_with_reused_cids() {
    let load = Load {
        pattern: Pattern::OneBlock,
        cids: Cids::Reused,
        queues: 8,
        depth: 128,
        commands: 60_000,
        ..Load::default()
    };
    joins(&load.record(), 0.99);
}

#[test]
fn a_load_without_any_irregularity_is_ambiguous_and_nothing_is_matched() {
    // One block, one cid, and every command takes exactly as long: any shift fits as well.
    let mut runs = Load {
        pattern: Pattern::OneBlock,
        cids: Cids::Reused,
        queues: 1,
        depth: 1,
        writes: 0.0,
        commands: 2_000,
        target: View { during: (0.3, 0.6), ..View::default() },
        ..Load::default()
    }
    .record();
    for (side, from, step) in [(&mut runs.host, 1_000_000_000, 1_000), (&mut runs.target, 7_000_002_100, 300)]
    {
        for (id, c) in &mut side.commands {
            for (slot, time) in c.times.iter_mut().enumerate() {
                *time = time.map(|_| Nanos(from + *id * 20_000 + slot as u64 * step));
            }
        }
        side.commands.sort_by_key(|(id, _)| *id);
    }
    let (joined, _) = checked(&runs);
    assert!(joined.pairs().is_empty());
    assert!(joined.notes().iter().any(|n| n.contains("ambiguous")), "{:?}", joined.notes());
    let error = report(&joined, &ReportOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::TooLittle { why, .. } if why.contains("ambiguous")), "{error}");
}

#[test]
fn stream_positions_are_an_exact_key() {
    // A handful of commands of one block and one cid: only the stream tells them apart.
    let load = Load {
        pattern: Pattern::OneBlock,
        cids: Cids::Reused,
        commands: 12,
        queues: 1,
        depth: 1,
        positions: true,
        target: View { keep: 0.5, ..View::default() },
        ..Load::default()
    };
    for seed in 0..20 {
        joins(&Load { seed, ..load.clone() }.record(), 1.0);
    }
}

#[test]
fn one_machine_has_one_clock() {
    let mut runs = Load {
        host_clock_ns: 5_000_000_000,
        target_clock_ns: 5_000_000_000,
        drift_ppm: 0.0,
        commands: 3,
        ..Load::default()
    }
    .record();
    runs.target.manifest.machine.boot_id = runs.host.manifest.machine.boot_id.clone();
    let joined = joins(&runs, 1.0);
    let clock = joined.clock().unwrap();
    assert!(clock.shared);
    assert_eq!((clock.offset_ns, clock.uncertainty_ns, clock.uncertainty_max_ns), (0, 0, 0));
}

#[test]
fn the_sparser_sampling_holds() {
    let load = Load {
        host: View { one_in: 5, ..View::default() },
        target: View { one_in: 3, ..View::default() },
        ..Load::default()
    };
    let joined = joins(&load.record(), 1.0);
    let a = joined.accounting();
    assert_eq!(a.host.total(), 0);
    assert_eq!(a.target.of(SetAside::Unsampled), a.target.total());
    assert!(a.target.total() > 1_000);
}

#[test]
fn a_cancelled_command_is_set_aside_with_its_partner() {
    let mut runs = Load { commands: 1_000, ..Load::default() }.record();
    runs.host.commands[500].1.flags |= run_format::Command::CANCELED;
    let a = *joined(&runs).accounting();
    assert_eq!((a.joined, a.host.of(SetAside::Unfinished), a.target.of(SetAside::Unfinished)), (999, 1, 1));
}

#[test]
fn what_contradicts_its_partner_is_implausible_on_both_sides() {
    let mut runs = Load { commands: 1_000, ..Load::default() }.record();
    // A hook that fired for another command: the response leaves after the host has it.
    let (_, c) = &mut runs.target.commands[500];
    let late = c.times[Boundary::TSent.slot()].unwrap().0 + 400_000;
    c.times[Boundary::TSent.slot()] = Some(Nanos(late));
    let a = *checked(&runs).0.accounting();
    assert_eq!(a.joined, 999, "{a:?}");
    assert_eq!((a.host.of(SetAside::Lost) + a.host.of(SetAside::Implausible)), 1, "{a:?}");
}

#[test]
fn a_run_given_twice_or_the_wrong_way_round_is_told() {
    let runs = Load { commands: 10, ..Load::default() }.record();
    let (h, t) = (|| Recording::of(&runs.host), || Recording::of(&runs.target));
    let options = JoinOptions::default();
    let error = join_recordings(h(), h(), &options).unwrap_err();
    assert!(matches!(error, Error::SameSide { .. }));
    assert!(error.to_string().contains("kernel host (nvme-tcp 6.12.30) on initiator"), "{error}");
    assert!(matches!(join_recordings(t(), h(), &options), Err(Error::WrongSide { .. })));
    let mut other = runs.target.clone();
    for q in &mut other.queues {
        q.subsystem_nqn = "nqn.2026-01.example:other".into();
    }
    let error = join_recordings(h(), Recording::of(&other), &options).unwrap_err();
    assert!(matches!(error, Error::NoSharedQueue { .. }));
    assert!(
        error.to_string().contains("example:other") && error.to_string().contains("example:fast"),
        "{error}"
    );
}

#[test]
fn recordings_of_different_times_are_told() {
    let runs = Load {
        host: View { during: (-0.1, 0.4), ..View::default() },
        target: View { during: (0.6, 1.1), ..View::default() },
        ..Load::default()
    }
    .record();
    let error =
        join_recordings(Recording::of(&runs.host), Recording::of(&runs.target), &JoinOptions::default())
            .unwrap_err();
    assert!(matches!(error, Error::NoOverlap { .. }), "{error}");
}

#[test]
fn an_empty_run_is_too_little() {
    let mut runs = Load { commands: 100, ..Load::default() }.record();
    runs.target.commands.clear();
    let joined = joined(&runs);
    let error = report(&joined, &ReportOptions::default()).unwrap_err();
    assert!(error.to_string().contains("the target's run has no commands"), "{error}");
}

#[test]
fn written_and_read_it_is_the_same() {
    let runs = Load { commands: 3_000, ..Load::default() }.record();
    let folder = tempfile::tempdir().unwrap();
    let (host, target) = runs.write(folder.path()).unwrap();
    let read = crate::join(&host, &target, &JoinOptions::default()).unwrap();
    let kept = joined(&runs);
    assert_eq!(read.pairs(), kept.pairs());
    let frame = read.frame().unwrap();
    assert_eq!(frame.height(), 3_000);
    let sum =
        |name: &str| frame.column(name).unwrap().i64().unwrap().into_no_null_iter().collect::<Vec<i64>>();
    let stages: Vec<Vec<i64>> = Stage::ALL.iter().map(|s| sum(s.name())).collect();
    for (row, latency) in sum("latency").into_iter().enumerate() {
        assert_eq!(stages.iter().map(|s| s[row]).sum::<i64>(), latency);
    }
    let by_device = ReportOptions { group_by: GroupBy::Device, detail: true, ..ReportOptions::default() };
    let report = report(&read, &by_device).unwrap();
    assert!(report.classes.iter().all(|c| c.group.as_deref() == Some("nvme0 nsid 1")));
    assert_eq!(report.classes.iter().map(|c| c.commands).sum::<u64>(), 3_000);
}

/// Whether a value is what a schema says, as far as the report's schema goes: `$ref`, `anyOf`, `type`,
/// `const`, `enum`, `required`, `properties`, `additionalProperties`, `items`, `minimum`.
pub(crate) fn fits(value: &Value, schema: &Value, root: &Value) -> Result<(), String> {
    let no = |why: &str| Err(format!("{value} {why} of {schema}"));
    if let Some(name) = schema["$ref"].as_str() {
        let part = root.pointer(name.strip_prefix('#').unwrap()).ok_or(format!("no {name}"))?;
        fits(value, part, root)?;
    }
    if let Some(any) = schema["anyOf"].as_array()
        && !any.iter().any(|s| fits(value, s, root).is_ok())
    {
        return no("is none");
    }
    if let Some(one) = schema["oneOf"].as_array()
        && one.iter().filter(|s| fits(value, s, root).is_ok()).count() != 1
    {
        return no("is not one");
    }
    let is = |name: &Value| match name.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64(),
        other => panic!("type {other}"),
    };
    match &schema["type"] {
        Value::Null => {}
        Value::Array(names) if !names.iter().any(is) => return no("is not of the types"),
        name @ Value::String(_) if !is(name) => return no("is not of the type"),
        _ => {}
    }
    if schema.get("const").is_some_and(|c| c != value) {
        return no("is not the constant");
    }
    if schema["enum"].as_array().is_some_and(|e| !e.contains(value)) {
        return no("is not among those");
    }
    if schema["minimum"].as_f64().zip(value.as_f64()).is_some_and(|(least, v)| v < least) {
        return no("is below the minimum");
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        if value.get(name.as_str().unwrap()).is_none() {
            return no(&format!("lacks {name}"));
        }
    }
    for (name, v) in value.as_object().into_iter().flatten() {
        match (schema["properties"].get(name), &schema["additionalProperties"]) {
            (Some(s), _) => fits(v, s, root)?,
            (None, Value::Bool(false)) => return no(&format!("has {name}, which is no property")),
            (None, s @ Value::Object(_)) => fits(v, s, root)?,
            _ => {}
        }
    }
    for v in value.as_array().into_iter().flatten() {
        if let s @ Value::Object(_) = &schema["items"] {
            fits(v, s, root)?;
        }
    }
    Ok(())
}

#[test]
fn reports_are_what_the_schema_says_and_the_schema_says_no_to_others() {
    let mut runs = Load { commands: 2_000, ..Load::default() }.record();
    runs.host.commands[7].1.status = 0x285;
    runs.host.manifest.workload = Some(Workload {
        argv: vec!["fio".into()],
        fio: vec![FioJob {
            direction: "read".into(),
            ios: 1_390,
            lat_mean_ns: 70_000.0,
            ..FioJob::default()
        }],
        ..Workload::default()
    });
    let folder = tempfile::tempdir().unwrap();
    let (host, target) = runs.write(folder.path()).unwrap();
    let schema: Value = serde_json::from_str(crate::SCHEMA).unwrap();
    let options = ReportOptions { group_by: GroupBy::Queue, detail: true, histograms: true, slowest: 3 };
    let joined = crate::join(&host, &target, &JoinOptions::default()).unwrap();
    let reports = [
        report(&joined, &options).unwrap(),
        crate::host_report(&host, &options).unwrap(),
        crate::target_report(&target, &ReportOptions::default()).unwrap(),
    ];
    for report in &reports {
        let mut value = serde_json::to_value(report).unwrap();
        fits(&value, &schema, &schema).unwrap();
        if let Some(slow) = report.slowest.first() {
            let text = report.to_table();
            assert!(text.contains("the slowest 3 commands") && text.contains(&slow.queue), "{text}");
        }
        let class = value.pointer_mut("/classes/0").unwrap();
        class["stages"].as_object_mut().unwrap().remove("network");
        assert!(fits(&value, &schema, &schema).is_err());
        assert_eq!(report.classes.iter().map(|c| c.commands).sum::<u64>(), 2_000);
    }
    assert_eq!(reports[0].classes.iter().filter(|c| c.error).map(|c| c.commands).sum::<u64>(), 1);
    // Both queues' commands together carry a percentile.
    let joined = report(&joined, &ReportOptions::default()).unwrap();
    let host = crate::host_report(&host, &ReportOptions::default()).unwrap();
    for (report, stages) in [(&joined, 5), (&host, 3), (&reports[2], 3)] {
        let tails: Vec<_> = report.classes.iter().flat_map(|c| &c.tails).collect();
        assert!(!tails.is_empty() && tails.iter().all(|tail| tail.causes.len() == stages), "{tails:?}");
        fits(&serde_json::to_value(report).unwrap(), &schema, &schema).unwrap();
        let text = report.to_table();
        assert!(text.contains("  above p99 (") && text.contains("slow by"), "{text}");
    }
    let fio = &reports[0].fio[0];
    assert!(fio.difference_ns > 0.0 && fio.commands > 1_000, "{fio:?}");
    // One side alone says what it does not know, and its two stages are those of the join.
    for class in &reports[1].classes {
        assert!(class.stages.of(Stage::Network).is_none() && class.stages.of(Stage::Storage).is_none());
        let own: f64 = class.stages.0.iter().flatten().map(|f| f.times.mean_ns).sum();
        let all = own + class.beyond_host.unwrap().times.mean_ns;
        assert!((all - class.latency.mean_ns).abs() < 1.0);
    }
    assert!(reports[1].to_table().contains("beyond the host"));
    assert!(reports[2].classes.iter().all(|c| c.stages.of(Stage::HostBlock).is_none()));
    let table = reports[0].to_table();
    assert!(table.contains("host block layer") && table.contains("ended with an error"), "{table}");
    assert!(table.contains("every boundary was measured"), "{table}");
}

#[test]
fn a_boundary_that_was_not_measured_is_told_with_what_it_means() {
    let mut runs = Load { commands: 300, writes: 1.0, ..Load::default() }.record();
    for (_, c) in &mut runs.target.commands {
        c.times[Boundary::TR2t.slot()] = None;
        c.times[Boundary::TSent.slot()] = None;
    }
    for hook in &mut runs.target.manifest.hooks {
        if hook.boundary == Boundary::TSent {
            hook.hook = None;
        }
    }
    let (joined, _) = checked(&runs);
    assert_eq!(joined.pairs().len(), 300);
    let told = |b| joined.boundaries().iter().find(|f| f.boundary == b).unwrap().clone();
    assert_eq!((told(Boundary::TSent).measured, told(Boundary::TSent).fell_back), (false, 300));
    let r2ts = runs.host.commands.iter().filter(|c| c.1.r2ts > 0).count() as u64;
    assert_eq!((told(Boundary::TR2t).measured, told(Boundary::TR2t).fell_back), (false, r2ts));
    assert!(told(Boundary::TData).measured);
    let table = report(&joined, &ReportOptions::default()).unwrap().to_table();
    assert!(
        table.contains("t_sent not measured; 300 commands lack it: t_resp or t_done stands for it"),
        "{table}"
    );
}

/// Loads small enough for many cases, of every kind.
fn load() -> impl Strategy<Value = Load> {
    let pattern = prop_oneof![
        Just(Pattern::Random(1 << 20)),
        Just(Pattern::Random(16)),
        Just(Pattern::Sequential),
        Just(Pattern::OneBlock)
    ];
    let cids = prop_oneof![Just(Cids::Generations), Just(Cids::Reused)];
    let depth = prop_oneof![Just(1u16), Just(4), Just(32)];
    (
        any::<u64>(),
        0usize..1_500,
        1u16..4,
        depth,
        pattern,
        cids,
        -500.0..500.0f64,
        0u64..1 << 50,
        any::<bool>(),
    )
        .prop_map(|(seed, commands, queues, depth, pattern, cids, drift_ppm, target_clock_ns, ports)| {
            Load {
                seed,
                commands,
                queues,
                depth,
                pattern,
                cids,
                drift_ppm,
                target_clock_ns: target_clock_ns as i64,
                ports,
                ..Load::default()
            }
        })
}

/// The joined pairs as (number of the command, its five stages).
fn facts(runs: &Runs) -> Vec<(u64, [i64; 5])> {
    let Ok(joined) =
        join_recordings(Recording::of(&runs.host), Recording::of(&runs.target), &JoinOptions::default())
    else {
        return Vec::new();
    };
    let mut facts: Vec<_> = joined
        .pairs()
        .iter()
        .map(|p| (runs.host.commands[p.host_row as usize].0, joined.stages(*p).unwrap().stages))
        .collect();
    facts.sort_unstable();
    facts
}

fn shift(runs: &mut Runs, host_ns: i64, target_ns: i64) {
    for (side, by) in [(&mut runs.host, host_ns), (&mut runs.target, target_ns)] {
        let move_by = |t: &mut Nanos| t.0 = t.0.checked_add_signed(by).unwrap();
        for (_, c) in &mut side.commands {
            c.times.iter_mut().flatten().for_each(move_by);
        }
        move_by(&mut side.manifest.window.start_ns);
        move_by(&mut side.manifest.window.end_ns);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn random_blocks_join_whole_whatever_the_clocks(load in load(), keep in 0.3..1.0f64) {
        let load = Load { pattern: Pattern::Random(1 << 20), ..load };
        let (joined, both) = checked(&load.record());
        prop_assert!(both < 30 || joined.pairs().len() * 1_000 >= both * 999, "{} of {both}", joined.pairs().len());
        let view = View { keep, ..View::default() };
        let (joined, both) = checked(&Load { host: view, target: view, ..load }.record());
        prop_assert!(both < 30 || joined.pairs().len() * 1_000 >= both * 990, "{} of {both}", joined.pairs().len());
    }

    #[test]
    fn dropping_any_records_joins_fewer_commands_never_wrong_ones(
        load in load(),
        host in (0.02..1.0f64, -0.1..0.5f64, 0.5..1.1f64),
        target in (0.02..1.0f64, -0.1..0.5f64, 0.5..1.1f64),
        positions: bool,
    ) {
        let view = |(keep, from, to)| View { keep, during: (from, to), one_in: 1 };
        let runs = Load { host: view(host), target: view(target), positions, ..load }.record();
        if let Err(error) =
            join_recordings(Recording::of(&runs.host), Recording::of(&runs.target), &JoinOptions::default())
        {
            let told = matches!(error, Error::NoOverlap { .. });
            prop_assert!(told, "{}", error);
        } else {
            let (joined, both) = checked(&runs);
            prop_assert!(joined.pairs().len() <= both);
        }
    }

    #[test]
    fn shifting_either_clock_changes_nothing(load in load(), host in 0i64..1 << 50, target in 0i64..1 << 50) {
        let mut runs = load.record();
        let before = facts(&runs);
        shift(&mut runs, host, target);
        prop_assert_eq!(before, facts(&runs));
    }

    #[test]
    fn the_order_of_rows_changes_nothing(load in load(), seed: u64) {
        let mut runs = load.record();
        let before = facts(&runs);
        let mut random = Random::new(seed);
        for side in [&mut runs.host, &mut runs.target] {
            for n in (1..side.commands.len()).rev() {
                side.commands.swap(n, random.bits() as usize % (n + 1));
            }
        }
        prop_assert_eq!(before, facts(&runs));
    }

    #[test]
    fn drift_changes_no_stage_of_a_host_and_no_match(load in load(), drift in -500.0..500.0f64) {
        let load = Load { pattern: Pattern::Random(1 << 20), ..load };
        let one = facts(&Load { drift_ppm: 0.0, ..load.clone() }.record());
        let other = facts(&Load { drift_ppm: drift, ..load }.record());
        let ids = |f: &[(u64, [i64; 5])]| f.iter().map(|f| f.0).collect::<Vec<_>>();
        prop_assert_eq!(ids(&one), ids(&other));
        for (a, b) in one.iter().zip(&other) {
            prop_assert_eq!(a.1[..2].to_vec(), b.1[..2].to_vec());
            // The target's own clock runs up to 500 ppm fast or slow; that is all that may show.
            for n in 2..5 {
                prop_assert!((a.1[n] - b.1[n]).abs() <= a.1.iter().sum::<i64>() / 1_000 + 4);
            }
        }
    }
}

/// A load as it is recorded over RDMA: the target reads a write's data by itself, and nobody sees stream
/// positions. Both drivers are loaded, so each boundary has a hook for either transport.
fn over_rdma(load: &Load) -> Runs {
    let mut runs = load.record();
    for side in [&mut runs.host, &mut runs.target] {
        side.queues.iter_mut().for_each(|q| q.transport = Transport::Rdma);
        side.manifest.hooks = std::mem::take(&mut side.manifest.hooks)
            .into_iter()
            .flat_map(|hook| {
                [Transport::Tcp, Transport::Rdma].map(|transport| Hook {
                    transport: Some(transport),
                    hook: Some(format!("{} hook", transport.name())),
                    ..hook.clone()
                })
            })
            .collect();
        side.commands.iter_mut().for_each(|(_, c)| c.stream_position = None);
    }
    for (_, c) in &mut runs.host.commands {
        c.times[Boundary::HR2t.slot()] = None;
        c.times[Boundary::HDataSent.slot()] = None;
        c.r2t_turnaround = None;
        c.r2ts = 0;
    }
    runs
}

#[test]
fn over_rdma_the_targets_reading_of_data_is_the_networks_and_the_host_lacks_nothing() {
    let runs = over_rdma(&Load { writes: 1.0, ..Load::default() });
    let joined = joins(&runs, 0.999);
    let mut read = 0;
    for pair in joined.pairs() {
        let (_, c) = &runs.target.commands[pair.target_row as usize];
        let Some((posted, done)) = c.time(Boundary::TR2t).zip(c.time(Boundary::TData)) else { continue };
        let stages = joined.stages(*pair).unwrap();
        let way_in = c.time(Boundary::TSubmit).unwrap().0 - c.time(Boundary::TRecv).unwrap().0;
        let way_out = c.time(Boundary::TSent).unwrap().0 - c.time(Boundary::TDone).unwrap().0;
        assert_eq!(stages.of(Stage::TargetDriver), (way_in + way_out - (done.0 - posted.0)) as i64);
        read += 1;
    }
    assert!(read > 1_000, "{read}");
    for figures in joined.boundaries() {
        assert_eq!(figures.fell_back, 0, "{}", figures.boundary);
        assert_eq!(figures.hook.as_deref(), Some("rdma hook"), "{}", figures.boundary);
    }
}

#[test]
fn with_queues_of_both_transports_a_boundary_has_the_hooks_of_both() {
    let mut runs = over_rdma(&Load { queues: 2, ..Load::default() });
    for side in [&mut runs.host, &mut runs.target] {
        side.queues[0].transport = Transport::Tcp;
    }
    for figures in joined(&runs).boundaries() {
        assert_eq!(figures.hook.as_deref(), Some("tcp: tcp hook, rdma: rdma hook"));
    }
}

#[test]
fn storage_is_split_in_the_classes_whose_every_command_tells_its_drives_time() {
    let mut runs = Load { writes: 0.5, ..Load::default() }.record();
    for (_, c) in &mut runs.target.commands {
        let storage = c.time(Boundary::TDone).unwrap().0 - c.time(Boundary::TSubmit).unwrap().0;
        c.drive = (c.opcode == 2).then_some(Nanos(storage - 1_000));
    }
    let joined = joins(&runs, 1.0);
    let report = report(&joined, &ReportOptions { detail: true, ..ReportOptions::default() }).unwrap();
    for class in &report.classes {
        let parts: Vec<_> = class.parts.iter().filter(|p| p.stage == Stage::Storage).collect();
        if class.operation.to_string() != "read" {
            assert!(parts.is_empty());
            continue;
        }
        let [block, drive] = parts[..] else { panic!("{parts:?}") };
        assert_eq!(block.figures.times.mean_ns, 1_000.0);
        let storage = class.stages.of(Stage::Storage).unwrap().times.mean_ns;
        assert!((drive.figures.times.mean_ns + 1_000.0 - storage).abs() < 1.0);
    }
    assert!(report.to_table().contains("target's block layer"), "{}", report.to_table());
    let frame = joined.frame().unwrap();
    let nulls = |name: &str| frame.column(name).unwrap().null_count();
    assert_eq!(nulls("storage_block"), nulls("storage_drive"));
    assert!(nulls("storage_drive") > 1_000 && nulls("storage") == 0);
}

/// Both sides in windows of 5 ms each 20 ms, the target's this much later than the host's.
fn in_windows(load: &Load, late: i64) -> Runs {
    let mut runs = load.record();
    let of = |late: i64| u64::try_from(late.max(0)).unwrap();
    runs.host.in_windows(5_000_000, 20_000_000, of(-late));
    runs.target.in_windows(5_000_000, 20_000_000, of(late));
    runs
}

/// A load over some hundred milliseconds.
fn long_load() -> Load {
    Load { commands: 60_000, pause_ns: 60_000.0, ..Load::default() }
}

#[test]
fn windows_in_step_join_whole_and_what_is_cut_by_one_side_is_outside_and_not_lost() {
    // In step by wall clocks that agree, and that do not within 1 ms.
    for late in [0, 1_000_000, -1_000_000] {
        let runs = in_windows(&long_load(), late);
        assert!(runs.host.slices.as_ref().unwrap().len() > 5);
        let joined = joins(&runs, 1.0);
        let a = joined.accounting();
        assert!(a.joined > 3_000, "{a:?}");
        assert_eq!((a.host.of(SetAside::Lost), a.target.of(SetAside::Lost)), (0, 0), "{late}: {a:?}");
        assert!(late == 0 || a.host.of(SetAside::Outside) > 100, "{a:?}");
        let clock = joined.clock().unwrap();
        assert!(clock.uncertainty_ns < 10_000, "{clock:?}");
        let report = report(&joined, &ReportOptions::default()).unwrap();
        let windows = report.host.as_ref().unwrap().windows.unwrap();
        assert!((0.2..0.3).contains(&windows.share), "{windows:?}");
        // Each slice is shorter in both by what they disagree.
        let both = report.join.as_ref().unwrap().armed_seconds.unwrap();
        let expected = windows.armed_seconds * (5e6 - late.abs() as f64) / 5e6;
        assert!((both - expected).abs() < 0.05 * expected, "{both} of {windows:?}, {late} apart");
        let table = report.to_table();
        assert!(table.contains("both sides were armed at once for "), "{table}");
    }
}

#[test]
fn windows_on_one_side_join_with_a_whole_recording_on_the_other() {
    for target in [false, true] {
        let mut runs = long_load().record();
        let side = if target { &mut runs.target } else { &mut runs.host };
        side.in_windows(5_000_000, 20_000_000, 0);
        let joined = joins(&runs, 1.0);
        let a = joined.accounting();
        assert_eq!(a.host.of(SetAside::Lost) + a.target.of(SetAside::Lost), 0, "{target}: {a:?}");
        assert!(a.host.of(SetAside::Outside) + a.target.of(SetAside::Outside) > 10_000, "{a:?}");
        let report = report(&joined, &ReportOptions::default()).unwrap();
        let windows = [report.host, report.target].into_iter().flatten().find_map(|run| run.windows).unwrap();
        let both = report.join.unwrap().armed_seconds.unwrap();
        assert!((both - windows.armed_seconds).abs() < 0.05 * both, "{both} of {windows:?}");
    }
}

#[test]
fn one_window_is_one_and_short_times_have_their_digits() {
    let mut runs = long_load().record();
    runs.host.in_windows(140_000_000, 100_000_000_000, 1);
    let report = report(&joins(&runs, 0.999), &ReportOptions::default()).unwrap();
    let table = report.to_table();
    assert!(table.contains("in 1 window of 140 ms each 100 s: armed for 140 ms, "), "{table}");
}

#[test]
fn what_is_lost_within_a_window_is_lost_all_the_same() {
    let mut load = long_load();
    load.target.keep = 0.9;
    let runs = in_windows(&load, 0);
    let joined = joins(&runs, 0.999);
    let lost = joined.accounting().host.of(SetAside::Lost) as f64;
    let share = lost / joined.accounting().host_commands as f64;
    assert!((0.07..0.13).contains(&share), "{:?}", joined.accounting());
}

#[test]
fn windows_of_few_commands_with_long_gaps_find_the_clock() {
    // Two commands at a time, some dozens a window, a window each 200 ms over seconds.
    let load = Load { commands: 40_000, queues: 1, depth: 2, pause_ns: 200_000.0, ..Load::default() };
    let mut runs = load.record();
    runs.host.in_windows(5_000_000, 200_000_000, 0);
    runs.target.in_windows(5_000_000, 200_000_000, 300_000);
    let joined = joins(&runs, 0.999);
    assert!(joined.pairs().len() > 200, "{:?}", joined.accounting());
    let a = joined.accounting();
    assert_eq!(a.host.of(SetAside::Lost) + a.target.of(SetAside::Lost), 0, "{a:?}");
}

#[test]
fn the_slowest_commands_are_those_of_all_with_parts_that_add_up() {
    let runs = Load { commands: 3_000, ..Load::default() }.record();
    let folder = tempfile::tempdir().unwrap();
    let (host, target) = runs.write(folder.path()).unwrap();
    let joined = crate::join(&host, &target, &JoinOptions::default()).unwrap();
    let options = ReportOptions { slowest: 20, ..ReportOptions::default() };
    let listed = report(&joined, &options).unwrap().slowest;
    let mut all: Vec<i64> = joined.pairs().iter().map(|&pair| joined.stages(pair).unwrap().latency).collect();
    all.sort_unstable_by_key(|&latency| std::cmp::Reverse(latency));
    assert_eq!(listed.iter().map(|slow| slow.latency_ns).collect::<Vec<_>>(), all[..20]);
    for slow in &listed {
        assert_eq!(slow.stages.iter().map(|ns| ns.unwrap()).sum::<i64>(), slow.latency_ns);
        let of =
            |stage: Stage| slow.parts.iter().filter(|(p, _)| p.stage() == stage).map(|p| p.1).sum::<i64>();
        for stage in Stage::ALL.into_iter().filter(|&stage| stage != Stage::Storage) {
            assert_eq!(Some(of(stage)), slow.stages[stage as usize], "{slow:?}");
        }
        assert!(slow.cid.is_some() && slow.uncertainty_ns.is_some() && slow.at_seconds >= 0.0);
    }
    // One side's list has what it knows, and no more than there is.
    for (report, rest) in [
        (
            crate::host_report(&host, &ReportOptions { slowest: 5_000, ..ReportOptions::default() }).unwrap(),
            true,
        ),
        (
            crate::target_report(&target, &ReportOptions { slowest: 5_000, ..ReportOptions::default() })
                .unwrap(),
            false,
        ),
    ] {
        assert_eq!(report.slowest.len(), 3_000);
        for slow in &report.slowest {
            assert_eq!((slow.beyond_host_ns.is_some(), slow.data_wait_ns.is_some()), (rest, !rest));
            let own: i64 = slow.stages.iter().flatten().sum();
            let rest = slow.beyond_host_ns.or(slow.data_wait_ns).unwrap();
            assert_eq!(own + rest, slow.latency_ns);
        }
    }
    assert!(report(&joined, &ReportOptions::default()).unwrap().slowest.is_empty());
}
