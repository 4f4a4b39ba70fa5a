//! Telemetry in a run: sampled beside the commands, on their clock and about their connections; the user's series beside
//! it; and what is missing, broken or not wanted.

mod support;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use run_format::{Run, TelemetrySummary, Timeline};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use support::load::Load;
use support::{FABSCOPE, Outcome, Recording, outcome};

const SECOND: Duration = Duration::from_secs(1);

fn record(pid: u32, run: &Path, more: &[&str]) -> Result<Outcome> {
    outcome(
        Command::new(FABSCOPE)
            .args(["record", "target", "--spdk", &pid.to_string(), "-q", "-o"])
            .arg(run)
            .args(more),
    )
}

fn summary(run: &Run) -> Result<TelemetrySummary> {
    run.manifest().telemetry.clone().context("no telemetry in the manifest")
}

fn last(line: &Timeline) -> Option<f64> {
    line.points.iter().rev().find_map(|point| point.value)
}

#[test]
fn a_run_has_its_connections_and_cpus_on_the_clock_of_its_commands() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("mixed", 4, 5 * SECOND)?;
    let path = here.path().join("target.run");
    record(load.target.pid(), &path, &["-d", "2500ms"])?.expect(0, &[])?;
    load.unharmed()?;

    let run = Run::open(&path)?;
    let (summary, telemetry, window) = (summary(&run)?, run.telemetry()?, run.manifest().window);
    ensure!(summary.every_ns == 100_000_000 && summary.ended.is_none(), "{summary:?}");
    ensure!(telemetry.broken().is_empty() && !telemetry.files().is_empty());

    // Each queue's connection is there by its addresses, with what went over it.
    let rates = telemetry.timelines("tcp", "bytes_received")?;
    let connections: BTreeSet<String> = rates.iter().map(|line| line.object.clone()).collect();
    let queues = run.queues()?;
    ensure!(!queues.is_empty());
    for queue in queues.values() {
        let (host, target) = (queue.host.as_ref().context("host")?, queue.target.as_ref().context("target")?);
        let name = format!("{}:{}>{}:{}", target.address, target.port, host.address, host.port);
        ensure!(connections.contains(&name), "{name} in {connections:?}");
        let line = rates.iter().find(|line| line.object == name).context("its rates")?;
        ensure!(
            line.metric.unit == "bytes/s" && line.points.iter().any(|p| p.value > Some(10_000.0)),
            "{line:?}"
        );
        let rtt = telemetry.timelines("tcp", "rtt")?;
        let rtt = rtt.iter().find(|line| line.object == name).and_then(last).context("rtt")?;
        ensure!(rtt > 0.0 && rtt < 1e6, "{rtt}");
    }
    // The samples cover the recording, in order.
    let samples = telemetry.samples("cpu")?;
    ensure!(samples.is_sorted() && samples.len() >= 10, "{samples:?}");
    let (first, end) = (samples[0], samples[samples.len() - 1]);
    ensure!(
        first.0 <= window.start_ns.0 + 500_000_000 && end >= window.end_ns,
        "{first} to {end} in {window:?}"
    );
    // A thread of the target ran, and the CPUs were busy.
    let ran: f64 = telemetry
        .timelines("threads", "run_time")?
        .iter()
        .flat_map(|line| line.points.iter().filter_map(|point| point.value))
        .fold(0.0, f64::max);
    if summary.collectors.iter().any(|c| c.name == "threads" && c.present) {
        ensure!(ran > 0.0, "no thread ran");
    } else {
        support::skipped("the kernel keeps no scheduling times of threads");
    }
    let busy = telemetry.timelines("cpu", "user")?;
    ensure!(
        busy.iter().any(|line| line.object == "cpu0") && busy.iter().all(|line| line.metric.unit == "ms/s")
    );
    // What is not here is told once, with why; and it all costs little: a share of the time that was recorded.
    for collector in &summary.collectors {
        ensure!(collector.present || collector.lacks.len() == 1, "{collector:?}");
        ensure!(!collector.present || collector.samples > 0, "{collector:?}");
    }
    let share = summary.cpu_ns as f64 / (window.end_ns.0 - window.start_ns.0) as f64;
    println!("telemetry: {:.2} % of one core", share * 100.0);
    ensure!(share < 0.03, "{share}: {summary:?}");
    Ok(())
}

#[test]
fn telemetry_can_be_off_or_rare_and_a_wrong_time_is_refused() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("read", 2, 6 * SECOND)?;
    let pid = load.target.pid();
    let off = here.path().join("off.run");
    record(pid, &off, &["-d", "300ms", "--telemetry", "off"])?.expect(0, &[])?;
    let run = Run::open(&off)?;
    ensure!(run.manifest().telemetry.is_none() && !off.join("telemetry").exists());
    ensure!(run.telemetry()?.files().is_empty() && run.telemetry()?.timelines("tcp", "rtt")?.is_empty());
    let rare = here.path().join("rare.run");
    record(pid, &rare, &["-d", "1s", "--telemetry", "500ms"])?.expect(0, &[])?;
    let samples = Run::open(&rare)?.telemetry()?.samples("cpu")?.len();
    ensure!((2..=5).contains(&samples), "{samples}");
    record(pid, &rare, &["--telemetry", "often"])?.expect(2, &["or write off"])?;
    record(pid, &rare, &["--telemetry", "1ms"])?.expect(2, &["at least 10 ms"])?;
    let missing = here.path().join("missing.csv").display().to_string();
    let none = here.path().join("none.run");
    record(pid, &none, &["--series", &missing])?.expect(1, &["missing.csv"])?;
    ensure!(!none.exists());
    load.unharmed()?;
    Ok(())
}

#[test]
fn a_killed_recording_keeps_its_telemetry() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("mixed", 4, 8 * SECOND)?;
    let path = here.path().join("killed.run");
    let mut recording = Recording::start("target", load.target.pid(), &path, &[])?;
    std::thread::sleep(Duration::from_millis(3_500));
    recording.process().signal(Signal::SIGKILL)?;
    recording.process().wait(5 * SECOND)?;
    load.unharmed()?;
    let run = Run::open(&path)?;
    let telemetry = run.telemetry()?;
    ensure!(telemetry.broken().is_empty());
    ensure!(telemetry.samples("cpu")?.len() >= 5, "{:?}", telemetry.files());
    ensure!(telemetry.timelines("tcp", "rtt")?.iter().any(|line| last(line).is_some()));
    ensure!(!summary(&run)?.collectors.is_empty());
    Ok(())
}

#[test]
fn a_series_that_the_command_writes_is_on_the_run_s_clock() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("read", 2, 6 * SECOND)?;
    let (path, series) = (here.path().join("target.run"), here.path().join("tokens.csv"));
    let file = series.display().to_string();
    // Two lines with different kinds of zone, one with none, one of text, one of another day.
    let script = format!(
        "echo time,tokens,note > {file}; sleep 0.5; echo \"$(date -u +%FT%T.%NZ),100,a\" >> {file}; sleep 0.5; \
         echo \"$(TZ=XXX-3 date +%FT%T.%N+03:00),250,b\" >> {file}; echo \"$(date +%FT%T),7,c\" >> {file}; \
         echo \"$(date -u +%FT%TZ),many,d\" >> {file}; echo 2001-01-01T00:00:00Z,1,e >> {file}; sleep 0.3"
    );
    let said =
        record(load.target.pid(), &path, &["--series", &file, "--", "sh", "-c", &script])?.expect(0, &[])?;
    load.unharmed()?;
    for text in ["line 4: its time has no zone", "outside of the recording", "tokens is no number"] {
        ensure!(said.stderr.contains(text), "{text:?} in {}", said.stderr);
    }
    let run = Run::open(&path)?;
    let told = summary(&run)?.series.context("no series in the manifest")?;
    ensure!(told.time == "RFC 3339" && told.columns == ["tokens"] && told.lines >= 2, "{told:?}");
    let lines = run.telemetry()?.timelines("series", "tokens")?;
    ensure!(lines.len() == 1 && lines[0].object == "tokens.csv", "{lines:?}");
    let points: Vec<(u64, f64)> = lines[0].points.iter().filter_map(|p| Some((p.at.0, p.value?))).collect();
    let values: Vec<f64> = points.iter().map(|(_, value)| *value).collect();
    ensure!(values == [100.0, 250.0], "{points:?}");
    let apart = (points[1].0 - points[0].0) as f64 / 1e9;
    ensure!((0.45..3.0).contains(&apart), "{apart} s apart");
    let window = run.manifest().window;
    let into = (points[0].0 - window.start_ns.0) as f64 / 1e9;
    ensure!((0.4..3.0).contains(&into), "{into} s into the recording");
    Ok(())
}
