//! Retransmissions as events in a run: on a network that really loses packets, there are as many as the kernel counts
//! for each connection, each at its own moment.

mod support;

use anyhow::{Result, ensure};
use run_format::{Run, Telemetry};
use standin::network::{Loss, in_own_network};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use support::Recording;
use support::load::Load;

const LOAD: Duration = Duration::from_secs(4);
/// Of 100 packets, this many are lost: some dozens in a load.
const LOSS: f64 = 0.02;

/// What the kernel counted for each connection until the last sample. The connections are new, so from nothing.
fn counted(telemetry: &Telemetry) -> Result<BTreeMap<String, f64>> {
    let lines = telemetry.values("tcp", "retransmitted")?;
    Ok(lines
        .iter()
        .filter_map(|line| {
            let last = line.points.iter().rev().find_map(|point| point.value)?;
            Some((line.object.clone(), last))
        })
        .collect())
}

fn check(run: &Path, loss: bool) -> Result<()> {
    let run = Run::open(run)?;
    let telemetry = run.telemetry()?;
    let events = telemetry.events("retransmits", "retransmit")?;
    let window = run.manifest().window;
    ensure!(events.is_sorted_by_key(|event| event.at));
    ensure!(events.iter().all(|e| (window.start_ns..=window.end_ns).contains(&e.at) && e.value >= 1.0));
    let mut seen: BTreeMap<String, f64> = BTreeMap::new();
    for event in &events {
        *seen.entry(event.object.clone()).or_default() += event.value;
    }
    let mut counted = counted(&telemetry)?;
    ensure!(!counted.is_empty(), "no connection was sampled");
    counted.retain(|_, count| *count > 0.0);
    println!("{}: {} events, {seen:?}", run.directory().display(), events.len());
    ensure!(seen == counted, "events {seen:?}, counted {counted:?}");
    ensure!(seen.is_empty() != loss, "{seen:?}");
    // They are at moments of their own, not at samples'.
    let samples = telemetry.samples("retransmits")?;
    ensure!(events.iter().filter(|event| samples.contains(&event.at)).count() == 0);
    let lost = telemetry.values("retransmits", "lost")?;
    ensure!(lost.len() == 1 && lost[0].points.iter().all(|point| point.value == Some(0.0)), "{lost:?}");
    Ok(())
}

#[test]
fn each_retransmission_is_an_event_of_its_connection() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    for loss in [true, false] {
        let folder = here.path().join(if loss { "loss" } else { "clean" });
        std::fs::create_dir(&folder)?;
        in_own_network(|| {
            let mut load = Load::new("randrw", 4, LOAD)?;
            let loss = if loss { Some(Loss::on_loopback(LOSS)?) } else { None };
            // From before the load until it is over: a connection's count and its events are of the same time.
            let record = |side, pid| Recording::start(side, pid, &folder.join(format!("{side}.run")), &[]);
            let target = record("target", load.target.pid())?;
            let host = record("host", load.initiator.pid())?;
            load.initiator.start()?;
            // The connections' last counts are of some time before their end, when nothing is lost any more.
            std::thread::sleep(LOAD / 2);
            drop(loss);
            let summary = load.initiator.finish()?;
            ensure!(summary.errors == 0 && summary.verify_errors == 0, "{summary:?}");
            host.finish()?;
            target.stop()?;
            load.target.stop()
        })?;
        check(&folder.join("target.run"), loss)?;
        check(&folder.join("host.run"), loss)?;
    }
    Ok(())
}
