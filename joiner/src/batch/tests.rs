//! Batches of runs whose truth is known: that nothing is done twice, that what is found is there, and how often something is
//! said that is not.

use super::judge::{Judged, judge};
use super::step::tests::{figure, pair_of};
use super::{Batch, BatchOptions, PairRows, batch, find, groups, table};
use crate::compare::Floor;
use crate::error::Error;
use crate::histogram::Histogram;
use crate::random::Random;
use crate::synthetic::{Load, Runs};
use polars::prelude::{
    Column, DataFrame, ExplodeOptions, IntoLazy, LazyFrame, ScanArgsParquet, SortMultipleOptions, col, lit,
};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The pair of a day.
fn runs_of(day: u32, commands: usize) -> Runs {
    let mut runs = Load { seed: u64::from(day) + 1, commands, ..Load::default() }.record();
    for side in [&mut runs.host, &mut runs.target] {
        side.of_day(day);
        side.manifest.labels.insert("day of week".into(), (day % 7).to_string());
    }
    runs
}

fn written(folder: &Path, days: u32) {
    for day in 0..days {
        runs_of(day, 600).write(&folder.join(format!("{day}"))).unwrap();
    }
}

fn done(folder: &Path, out: &Path) -> Batch {
    batch(&[folder.to_owned()], out, &BatchOptions::default()).unwrap()
}

fn read(out: &Path) -> DataFrame {
    let path = out.join("batch.parquet");
    let path = path.to_str().unwrap().into();
    LazyFrame::scan_parquet(path, ScanArgsParquet::default()).unwrap().collect().unwrap()
}

/// When each file of the results was written.
fn results(out: &Path) -> Vec<(PathBuf, std::time::SystemTime)> {
    let entries = fs::read_dir(out.join("results")).unwrap().map(|e| e.unwrap().path());
    let mut all: Vec<_> =
        entries.map(|p| (p.clone(), fs::metadata(&p).unwrap().modified().unwrap())).collect();
    all.push((
        out.join("batch.parquet"),
        fs::metadata(out.join("batch.parquet")).unwrap().modified().unwrap(),
    ));
    all.retain(|(path, _)| !path.ends_with("lock"));
    all.sort();
    all
}

#[test]
fn a_second_call_does_nothing_and_then_only_what_is_new() {
    let here = tempfile::tempdir().unwrap();
    let (lab, out) = (here.path().join("lab"), here.path().join("out"));
    written(&lab, 4);
    let first = done(&lab, &out);
    assert_eq!((first.runs, first.pairs, first.done_now, first.done_before), (8, 4, 4, 0));
    let (files, table) = (results(&out), read(&out));
    assert_eq!(table.height(), first.rows);
    let second = done(&lab, &out);
    assert_eq!((second.done_now, second.done_before), (0, 4));
    assert_eq!(results(&out), files);

    // One is new, one is recorded anew, one is gone.
    runs_of(9, 600).write(&lab.join("9")).unwrap();
    fs::remove_dir_all(lab.join("1")).unwrap();
    runs_of(1, 900).write(&lab.join("1")).unwrap();
    fs::remove_dir_all(lab.join("2")).unwrap();
    let third = done(&lab, &out);
    assert_eq!((third.pairs, third.done_now, third.done_before), (4, 2, 2));
    assert_eq!(third.commands, 600 * 3 + 900);
    assert_eq!(fs::read_dir(out.join("results")).unwrap().count(), 4 + 2);

    // What is lost of the output is made again.
    let table = read(&out);
    let some = results(&out).into_iter().find(|(p, _)| p.extension().is_some_and(|e| e == "pair")).unwrap().0;
    fs::write(&some, "cut").unwrap();
    fs::remove_file(out.join("batch.parquet")).unwrap();
    assert_eq!(done(&lab, &out).done_now, 1);
    assert!(read(&out).equals_missing(&table));
}

#[test]
fn an_ended_batch_goes_on_where_it_was_and_makes_the_same_table() {
    let here = tempfile::tempdir().unwrap();
    let (lab, out, whole) = (here.path().join("lab"), here.path().join("out"), here.path().join("whole"));
    written(&lab, 6);
    let early = BatchOptions { stop: &|| true, ..BatchOptions::default() };
    let error = batch(std::slice::from_ref(&lab), &out, &early).unwrap_err();
    assert!(matches!(error, Error::Interrupted { of: 0, .. }) && !out.exists(), "{error}");
    let stop = || {
        let files = fs::read_dir(out.join("results")).into_iter().flatten().flatten();
        files.filter(|file| file.path().extension().is_some_and(|e| e == "pair")).count() >= 3
    };
    let ending = BatchOptions { jobs: 1, stop: &stop, ..BatchOptions::default() };
    let error = batch(std::slice::from_ref(&lab), &out, &ending).unwrap_err();
    assert!(matches!(error, Error::Interrupted { done: 3, of: 6 }), "{error}");
    assert!(!out.join("batch.parquet").exists());
    let rest = done(&lab, &out);
    assert_eq!((rest.done_now, rest.done_before), (3, 3));
    done(&lab, &whole);
    assert!(read(&out).equals_missing(&read(&whole)));
    assert_eq!(fs::read(out.join("batch.parquet")).unwrap(), fs::read(whole.join("batch.parquet")).unwrap());
}

#[test]
fn what_is_no_run_is_told_and_no_run_counts_twice() {
    let here = tempfile::tempdir().unwrap();
    let (lab, out) = (here.path().join("lab"), here.path().join("out"));
    written(&lab, 2);
    // A copy, a link to a run, a loop, a link to nothing, other files.
    runs_of(0, 600).write(&lab.join("copy")).unwrap();
    for (to, name) in [("0", "again"), ("..", "loop"), ("nowhere", "nothing")] {
        std::os::unix::fs::symlink(to, lab.join(name)).unwrap();
    }
    fs::write(lab.join("notes.txt"), "of the lab").unwrap();
    // One that is no run, one that was cut, one of a newer version, and one without commands.
    for (name, text) in [("foreign", "{\"format\": \"pyproject\"}"), ("cut", "{\"format\": \"fabsc")] {
        fs::create_dir(lab.join(name)).unwrap();
        fs::write(lab.join(name).join("run.json"), text).unwrap();
    }
    let mut newer = runs_of(5, 10);
    newer.host.manifest.format = "fabscope-run/7".into();
    // It is written, and can not be opened again.
    assert!(newer.host.write(&lab.join("newer")).is_err());
    runs_of(6, 0).write(&lab.join("empty")).unwrap();
    fs::create_dir(lab.join("pipe")).unwrap();
    nix_pipe(&lab.join("pipe/run.json"));

    let told =
        batch(&[lab.clone(), lab.join("0"), lab.join("loop")], &out, &BatchOptions::default()).unwrap();
    assert_eq!((told.pairs, told.one_sided, told.rows), (2, 0, 36));
    let why = |name: &str| {
        let of = told.skipped.iter().filter(|s| s.path.contains(name));
        of.map(|s| s.why.as_str()).collect::<Vec<_>>().join("; ")
    };
    for (name, part) in [
        ("copy", "the same recording as"),
        ("foreign", "not a fabscope run"),
        ("cut", "damaged"),
        ("newer", "fabscope-run/7"),
        ("empty", "no commands"),
        ("pipe", "is no file"),
    ] {
        assert!(why(name).contains(part), "{name}: {:#?}", told.skipped);
    }
    assert_eq!(told.skipped.len(), 7, "{:#?}", told.skipped);
    // What failed is not tried again while it is the same.
    assert_eq!(done(&lab, &out).done_now, 0);

    let nothing = here.path().join("none");
    fs::create_dir(&nothing).unwrap();
    let said = |directory: &Path, out: &Path| {
        batch(&[directory.to_owned()], out, &BatchOptions::default()).unwrap_err().to_string()
    };
    assert!(said(&nothing, &out).contains("no run beneath"));
    assert!(said(&here.path().join("missing"), &out).contains("no such directory"));
    assert!(said(&lab.join("notes.txt"), &out).contains("no directory"));
    assert!(said(&lab, &lab.join("0/host.run")).contains("it is a run"));
    let options = BatchOptions { by: Some("colour".into()), ..BatchOptions::default() };
    let said = batch(std::slice::from_ref(&lab), &out, &options).unwrap_err().to_string();
    assert!(said.contains("no run has this label") && said.contains("spdk.version"), "{said}");
    let only_empty =
        batch(&[lab.join("empty")], &here.path().join("o"), &BatchOptions::default()).unwrap_err();
    assert!(only_empty.is_too_little(), "{only_empty}");
}

fn nix_pipe(path: &Path) {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path ends with a nul.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

#[test]
fn runs_that_lie_apart_are_paired_by_time_and_queues() {
    let here = tempfile::tempdir().unwrap();
    for day in 0..3u32 {
        let mut runs = runs_of(day, 300);
        let clock = runs.host.manifest.clocks[0].realtime_ns;
        let into = runs.host.manifest.window.start_ns.0 - runs.host.manifest.clocks[0].monotonic_ns.0;
        runs.target.manifest.clocks[0] = run_format::ClockPair {
            monotonic_ns: run_format::Nanos(runs.target.manifest.window.start_ns.0 - into),
            realtime_ns: clock,
        };
        if day == 2 {
            // Another subsystem at the same time.
            runs.target.queues.iter_mut().for_each(|q| q.subsystem_nqn = "nqn.2026-01.example:other".into());
        }
        runs.host.write(&here.path().join(format!("hosts/{day}.run"))).unwrap();
        runs.target.write(&here.path().join(format!("targets/{day}.run"))).unwrap();
    }
    let found = find(&[here.path().to_owned()], &|| false).unwrap().unwrap();
    let sides: Vec<(bool, bool)> =
        found.pairs.iter().map(|p| (p.host.is_some(), p.target.is_some())).collect();
    assert_eq!(sides, [(true, true), (true, true), (true, false), (false, true)]);
    for pair in &found.pairs[..2] {
        let name = |run: &Option<std::sync::Arc<super::FoundRun>>| {
            run.as_ref().unwrap().directory.file_name().unwrap().to_owned()
        };
        assert_eq!(name(&pair.host), name(&pair.target));
    }
    let told = done(here.path(), &here.path().join("out"));
    assert_eq!((told.pairs, told.one_sided), (2, 2));
}

#[test]
fn the_tables_histograms_add_up_in_polars() {
    let here = tempfile::tempdir().unwrap();
    let (lab, out) = (here.path().join("lab"), here.path().join("out"));
    written(&lab, 3);
    let told = done(&lab, &out);
    let merged = read(&out)
        .lazy()
        .filter(col("operation").eq(lit("read")).and(col("stage").eq(lit("storage"))))
        .select([col("hist_ns"), col("hist_count")])
        .explode(
            polars::prelude::by_name(["hist_ns", "hist_count"], true, false),
            ExplodeOptions { empty_as_null: false, keep_nulls: false },
        )
        .group_by([col("hist_ns")])
        .agg([col("hist_count").sum()])
        .sort(["hist_ns"], SortMultipleOptions::default())
        .collect()
        .unwrap();
    // All storage times of the three runs' reads, read and joined here.
    let mut all = Histogram::default();
    for day in 0..3 {
        let pair = lab.join(day.to_string());
        let open = |side: &str| run_format::Run::open(&pair.join(side)).unwrap();
        let joined =
            crate::join(&open("host.run"), &open("target.run"), &crate::JoinOptions::default()).unwrap();
        let frame = joined.frame().unwrap();
        let (opcode, storage) = (frame.column("opcode").unwrap(), frame.column("storage").unwrap());
        let both = opcode.u8().unwrap().iter().zip(storage.i64().unwrap().iter());
        both.filter(|(o, _)| *o == Some(2)).for_each(|(_, ns)| all.add_all(&[ns.unwrap()]));
    }
    let expected: Vec<(i64, i64)> =
        all.buckets().into_iter().map(|(b, n)| (crate::histogram::middle(b), n as i64)).collect();
    let numbers = |c: &Column| c.i64().unwrap().into_no_null_iter().collect::<Vec<i64>>();
    let found: Vec<(i64, i64)> = numbers(merged.column("hist_ns").unwrap())
        .into_iter()
        .zip(numbers(merged.column("hist_count").unwrap()))
        .collect();
    assert_eq!(found, expected);
    let reads = told.classes.iter().find(|c| c.class.operation == run_format::Operation::Read).unwrap();
    let storage = reads.stages.iter().find(|s| s.stage == "storage").unwrap();
    assert_eq!(storage.times.p50_ns, all.distribution().p50_ns);
    assert_eq!(storage.commands, all.count());
}

#[test]
fn every_label_is_a_column_and_what_is_not_known_is_null() {
    let mut pairs = vec![pair_of(0, vec![figure("latency", &[5; 30])]), pair_of(1, vec![])];
    pairs.push(PairRows { start_ns: None, host: None, ..pair_of(2, vec![figure("latency", &[7; 30])]) });
    pairs[0].labels.insert("label.a b".into(), "x".into());
    let labels: BTreeSet<&str> = BTreeSet::from(["label.a b"]);
    let frame = table::frame(&pairs, &labels).unwrap();
    assert_eq!(frame.height(), 2);
    let text = |name: &str| {
        let column = frame.column(name).unwrap().str().unwrap().clone();
        column.iter().map(|v| v.map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(text("label.a b"), [Some("x".into()), None]);
    assert_eq!(text("sides"), [Some("pair".into()), Some("target".into())]);
    assert_eq!(text("start"), [Some("2023-11-14T22:13:20Z".into()), None]);
    assert_eq!(frame.column("p99_ns").unwrap().null_count(), 2);
    assert_eq!(frame.column("p50_ns").unwrap().null_count(), 0);
}

/// How a system's runs come out: each stage's times are at least so long and so much longer on average (us), and runs
/// differ by about a hundredth.
const STAGES: [(&str, f64, f64); 5] = [
    ("host_block", 1.0, 0.6),
    ("host_driver", 2.0, 1.0),
    ("network", 16.0, 6.0),
    ("target_driver", 2.0, 0.8),
    ("storage", 6.0, 4.0),
];
const RUNS: i64 = 40;
const RUN_TO_RUN: f64 = 0.01;

fn normal(random: &mut Random) -> f64 {
    let (a, b) = (1.0 - random.unit(), random.unit());
    (-2.0 * a.ln()).sqrt() * (2.0 * std::f64::consts::PI * b).cos()
}

/// Runs of two classes, of which from the `from`th on storage takes `factor` times as long.
fn system(seed: u64, from: i64, factor: f64) -> Vec<PairRows> {
    let mut random = Random::new(seed);
    let run = |n: i64| {
        let mut class = || {
            let mut latency = vec![0i64; 1_000];
            let mut figures = Vec::new();
            for (stage, least, more) in STAGES {
                let slower = if stage == "storage" && n >= from { factor } else { 1.0 };
                let of_run = (RUN_TO_RUN * normal(&mut random)).exp() * slower * 1e3;
                let times: Vec<i64> = latency
                    .iter_mut()
                    .map(|latency| {
                        let time = (of_run * (least - (1.0 - random.unit()).ln() * more)) as i64;
                        *latency += time;
                        time
                    })
                    .collect();
                figures.push((stage, times));
            }
            figures.insert(0, ("latency", latency));
            figures
        };
        let bare = |figures: Vec<(&str, Vec<i64>)>| {
            let figure = |(stage, values): (&str, Vec<i64>)| super::Figure {
                stage: stage.into(),
                share: 1.0,
                times: crate::Distribution::of(&mut values.clone()).into(),
                buckets: super::Buckets::default(),
            };
            figures.into_iter().map(figure).collect::<Vec<_>>()
        };
        let mut pair = pair_of(n, bare(class()));
        let mut second = pair_of(n, bare(class())).classes.remove(0);
        second.operation = run_format::Operation::Write;
        pair.classes.push(second);
        pair.labels.insert("spdk.version".into(), if n >= from { "26.05" } else { "24.09" }.into());
        pair
    };
    (0..RUNS).map(run).collect()
}

fn alarms(judged: &Judged) -> usize {
    judged.changes.len() + judged.trends.len() + judged.outliers.len()
}

#[test]
fn runs_of_one_system_raise_hardly_an_alarm() {
    let floor = Floor::default();
    let alarmed: Vec<Judged> = (0..100)
        .map(|seed| judge(&system(seed, RUNS / 2, 1.0), Some("spdk.version"), &floor))
        .filter(|judged| alarms(judged) > 0)
        .collect();
    assert!(alarmed.len() <= 2, "{} of 100: {alarmed:#?}", alarmed.len());
    // The floor is not what holds them back.
    let none = Floor { share: 0.0, ns: 0.0 };
    let alarmed =
        (100..200).filter(|&seed| alarms(&judge(&system(seed, RUNS, 1.0), None, &none)) > 0).count();
    assert!(alarmed <= 5, "{alarmed} of 100 without a floor");
}

#[test]
fn a_change_of_six_per_cent_of_one_stage_is_found_and_named() {
    let (mut found, mut by_label) = (0, 0);
    for seed in 1_000..1_100 {
        let judged = judge(&system(seed, RUNS / 2, 1.06), Some("spdk.version"), &Floor::default());
        let told = |along: &str| {
            let is = |c: &&super::Change| {
                c.along == along
                    && c.stage == "storage"
                    && (18..=22).contains(&c.runs_before)
                    && c.labels.iter().any(|l| l.label == "spdk.version")
            };
            judged.changes.iter().filter(is).map(|c| c.class).collect::<BTreeSet<_>>().len() == 2
        };
        found += usize::from(told("time"));
        by_label += usize::from(told("spdk.version"));
        assert!(judged.changes.iter().all(|c| c.stage == "storage"), "{:#?}", judged.changes);
    }
    assert!(found >= 90 && by_label >= 90, "{found} and {by_label} of 100");
}

#[test]
fn a_trend_and_an_outlier_are_told_with_their_stage() {
    let mut pairs: Vec<PairRows> = system(7, RUNS, 1.0);
    let scaled = |p: Option<i64>, by: f64| p.map(|p| (p as f64 * by) as i64);
    for (n, pair) in pairs.iter_mut().enumerate() {
        let network = pair.classes[0].figures.iter_mut().find(|f| f.stage == "network").unwrap();
        network.times.p50_ns = scaled(network.times.p50_ns, 1.0 + n as f64 * 0.004);
    }
    let storage = pairs[11].classes[1].figures.iter_mut().find(|f| f.stage == "storage").unwrap();
    storage.times.p50_ns = scaled(storage.times.p50_ns, 1.5);
    let judged = judge(&pairs, None, &Floor::default());
    let [trend] = &judged.trends[..] else { panic!("{judged:#?}") };
    assert_eq!((trend.stage.as_str(), trend.runs), ("network", 40));
    let slope = &trend.slopes[0];
    assert!(slope.low_ns > 0.0 && (2_000.0..4_500.0).contains(&slope.over_all_ns), "{slope:?}");
    let [outlier] = &judged.outliers[..] else { panic!("{judged:#?}") };
    assert_eq!((outlier.stage.as_str(), outlier.run.run.as_str()), ("storage", "11/host.run,11/target.run"));
    assert!(judged.changes.is_empty(), "{judged:#?}");
}

#[test]
fn runs_that_are_not_alike_are_judged_apart_and_few_are_not_judged() {
    let mut pairs = system(8, RUNS, 1.0);
    for (n, pair) in pairs.iter_mut().enumerate() {
        // Two loads in turn, one after the other more and more often: no change of either.
        let other = n % 2 == 1;
        pair.labels.insert("label.load".into(), if other { "b" } else { "a" }.into());
        if other {
            for figure in pair.classes.iter_mut().flat_map(|c| &mut c.figures) {
                figure.times.p50_ns = figure.times.p50_ns.map(|p| p * 3);
            }
        }
        pair.labels.insert("label.number".into(), n.to_string());
    }
    let judged = judge(&pairs, None, &Floor::default());
    assert_eq!((alarms(&judged), judged.too_few.len()), (0, 0), "{judged:#?}");
    let judged = judge(&pairs[..9], None, &Floor::default());
    assert_eq!((alarms(&judged), judged.too_few.len()), (0, 2), "{judged:#?}");
    assert!(judged.too_few.iter().all(|few| few.needed == 10));
    // By the load itself they are one series, and differ.
    let judged = judge(&pairs, Some("label.load"), &Floor::default());
    let along: Vec<&str> = judged.changes.iter().map(|c| c.along.as_str()).collect();
    assert_eq!(along, ["label.load", "label.load"]);
    let by = groups::by(&pairs, "label.load", &judged.changes);
    assert!(by.differs_most.iter().all(|d| d.shown && d.stage == "network"), "{:?}", by.differs_most);
}
