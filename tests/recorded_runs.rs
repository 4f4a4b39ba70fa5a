//! Real pairs of runs, recorded with `fabscope record` and kept in `tests/data`: the joiner on what real
//! systems said, on every machine. Each pair's target had a delay bdev of 500 us over a malloc bdev, so that
//! what storage has to show is known. Names of machines and paths of programs were taken out of `run.json`.

mod support;

use anyhow::{Context, Result, ensure};
use joiner::JoinOptions;
use run_format::{Boundary, Kind, Run, Stage, State};
use std::path::PathBuf;
use support::Pair;
use support::recorded::data;

/// What is known of a pair.
struct Known {
    name: &'static str,
    host: Kind,
    /// Version of the target's SPDK.
    version: &'static str,
    /// Commands of the host, of the target, and pairs.
    commands: (u64, u64, u64),
    /// How much longer than the delay storage may take in the median, in parts of the delay: the machine of
    /// the first pair emulated the host's beside the target, and its reactor was often late.
    late: f64,
}

const PAIRS: [Known; 3] = [
    Known {
        name: "kernel-6.12-and-spdk-26.05",
        host: Kind::Kernel,
        version: "26.05",
        commands: (660, 663, 660),
        late: 0.25,
    },
    Known { name: "spdk-26.05", host: Kind::Spdk, version: "26.05", commands: (396, 1280, 396), late: 0.05 },
    Known { name: "spdk-24.09", host: Kind::Spdk, version: "24.09", commands: (567, 1478, 567), late: 0.05 },
];

const DELAY_NS: i64 = 500_000;

impl Known {
    fn folder(&self) -> PathBuf {
        data(self.name)
    }

    fn runs(&self) -> (PathBuf, PathBuf) {
        (self.folder().join("host.run"), self.folder().join("target.run"))
    }

    fn join(&self) -> Result<Pair> {
        let (host, target) = self.runs();
        Pair::join(&host, &target).context(self.name)
    }
}

#[test]
fn the_pairs_join_as_they_did_and_none_wrongly() -> Result<()> {
    for known in PAIRS {
        let pair = known.join()?;
        let accounting = pair.joined.accounting();
        ensure!(
            (accounting.host_commands, accounting.target_commands, accounting.joined) == known.commands,
            "{}: {accounting:#?}",
            known.name
        );
        pair.nearly_all_joined(300)?;
        pair.none_crosses()?;
        ensure!(pair.joined.notes().is_empty(), "{}: {:?}", known.name, pair.joined.notes());
    }
    Ok(())
}

#[test]
fn every_boundary_was_measured() -> Result<()> {
    for known in PAIRS {
        let (host, target) = known.runs();
        for run in [&host, &target] {
            let run = Run::open(run)?;
            support::all_boundaries_were_taken(&run).context(known.name)?;
            ensure!(run.manifest().state == State::Closed && run.broken_segments().is_empty());
        }
        for boundary in known.join()?.joined.boundaries() {
            // spdk_nvme_perf has no layer between its driver and itself.
            let none_here = boundary.boundary == Boundary::HEnd && known.host == Kind::Spdk;
            ensure!(boundary.measured != none_here, "{}: {boundary:?}", known.name);
        }
    }
    Ok(())
}

#[test]
fn the_bdevs_delay_is_in_storage_and_in_nothing_else_of_the_target() -> Result<()> {
    for known in PAIRS {
        let pair = known.join()?;
        let report = pair.report()?;
        ensure!(report.classes.len() >= 2, "{}: {:#?}", known.name, report.classes);
        for class in report.classes.iter().filter(|class| class.commands >= 20) {
            let median = |stage| class.stages.of(stage).and_then(|figures| figures.times.p50_ns);
            let (storage, driver) = (
                median(Stage::Storage).context("no median")?,
                median(Stage::TargetDriver).context("no median")?,
            );
            ensure!(
                (0.0..known.late).contains(&(storage as f64 / DELAY_NS as f64 - 1.0)),
                "{}: {} {}: storage took {storage} ns",
                known.name,
                class.operation,
                class.bytes
            );
            ensure!(
                (0..DELAY_NS / 10).contains(&driver),
                "{}: {} {}: the target's driver took {driver} ns",
                known.name,
                class.operation,
                class.bytes
            );
        }
    }
    Ok(())
}

/// Pairs of one machine share its clock. What the joiner finds out of the commands alone has to agree.
#[test]
fn the_clock_that_the_commands_give_is_the_machines_own() -> Result<()> {
    let mut tried = 0;
    for known in PAIRS.iter().filter(|known| known.host == Kind::Spdk) {
        let shared = known.join()?;
        ensure!(shared.joined.clock().is_some_and(|clock| clock.shared), "{}", known.name);
        let (host, target) = known.runs();
        let mut alone = JoinOptions::default();
        alone.ignore_boot_id = true;
        let found = joiner::join(&Run::open(&host)?, &Run::open(&target)?, &alone)?;
        ensure!(found.pairs() == shared.joined.pairs(), "{}: other pairs", known.name);
        let clock = found.clock().context("no clock")?;
        ensure!(!clock.shared && clock.offset_ns.abs() <= clock.uncertainty_ns, "{}: {clock:?}", known.name);
        tried += 1;
    }
    ensure!(tried == 2);
    Ok(())
}

#[test]
fn the_runs_say_what_they_are_and_nothing_of_where_they_were_made() -> Result<()> {
    for known in PAIRS {
        let (host, target) = known.runs();
        let (host_run, target_run) = (Run::open(&host)?, Run::open(&target)?);
        ensure!(host_run.manifest().kind == known.host && target_run.manifest().kind == Kind::Spdk);
        let software = &target_run.manifest().software;
        ensure!(software.name == "SPDK" && software.version.contains(known.version), "{software:?}");
        for run in [&host, &target] {
            let text = std::fs::read_to_string(run.join("run.json"))?;
            let manifest = Run::open(run)?.manifest().clone();
            ensure!(manifest.software.path.is_none_or(|path| !path.contains('/')), "{text}");
            ensure!(["host", "target", "machine"].contains(&manifest.machine.hostname.as_str()), "{text}");
        }
        let report = support::report_json(&host, &target)?;
        ensure!(report["join"]["joined"] == known.commands.2, "{report:#}");
    }
    Ok(())
}

#[test]
fn a_directory_that_holds_a_pair_is_reported_like_the_pair() -> Result<()> {
    for pair in &PAIRS {
        let ((host, target), folder) = (pair.runs(), pair.folder());
        let (host, target) = (host.display().to_string(), target.display().to_string());
        let named = support::fabscope(["report", &host, &target])?.expect(0, &[])?;
        let held = support::fabscope(["report", &folder.display().to_string()])?.expect(0, &[])?;
        ensure!(named.stdout == held.stdout, "{}", held.stdout);
    }
    Ok(())
}
