//! Recording in time windows and the measured cost of recording, on the stand-in: as root, where uprobes are allowed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use run_format::{Manifest, Run, State};
use std::fs;
use std::time::{Duration, Instant};
use support::load::Load;
use support::windows::{adds_up, astray};
use support::{Process, Recording, Rows, SOON, can_trace, fabscope, turn};

fn manifest(run: &std::path::Path) -> Result<Manifest> {
    Ok(Run::open(run)?.manifest().clone())
}

#[test]
fn windows_of_both_sides_are_in_step_and_join_whole() -> Result<()> {
    let _turn = turn()?;
    if !can_trace() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let load = Load::running("randrw", 8, Duration::from_secs(20))?;
    let windows = ["--window", "200ms/500ms", "--duration", "6s"];
    let host_run = folder.path().join("host.run");
    let target_run = folder.path().join("target.run");
    let host = Recording::start("host", load.initiator.pid(), &host_run, &windows)?;
    let target = Recording::start("target", load.target.pid(), &target_run, &windows)?;
    host.finish()?;
    target.finish()?;
    for run in [&host_run, &target_run] {
        let run = Run::open(run)?;
        adds_up(run.manifest())?;
        let windows = run.manifest().windows.context("windows")?;
        // Six seconds less what the beginning takes; each window is there or counted.
        ensure!(
            (10..=13).contains(&(windows.slices + windows.skipped)) && windows.slices >= 4,
            "{windows:?}"
        );
        ensure!(windows.in_place_ns > windows.armed_ns && windows.under_way.is_none(), "{windows:?}");
        let (commands, astray) = astray(&run)?;
        ensure!(commands > 100 && astray == 0, "{astray} of {commands} are not whole within a slice");
    }
    let report = fabscope(
        ["report", "--format", "json"]
            .map(std::ffi::OsString::from)
            .into_iter()
            .chain([host_run.clone().into_os_string(), target_run.clone().into_os_string()]),
    )?
    .expect(0, &[])?;
    let report: serde_json::Value = serde_json::from_str(&report.stdout)?;
    let join = &report["join"];
    let of = |pointer: &str| join.pointer(pointer).and_then(serde_json::Value::as_u64).unwrap_or(u64::MAX);
    // Of what is whole in both: all but what is outside.
    for (side, commands) in [("host", "/host_commands"), ("target", "/target_commands")] {
        let outside = of(&format!("/{side}_set_aside/outside"));
        let within = of(commands) - outside;
        ensure!(of("/joined") as f64 >= 0.999 * within as f64, "{side}: {join}");
    }
    let share = report["host"]["windows"]["share"].as_f64().context("share")?;
    ensure!((0.2..0.5).contains(&share), "{share}");
    let table = fabscope([&host_run, &target_run].map(|run| run.as_os_str()).into_iter().fold(
        vec![std::ffi::OsString::from("report")],
        |mut all, run| {
            all.push(run.to_owned());
            all
        },
    ))?
    .expect(0, &[])?;
    for text in ["windows of 200 ms each 500 ms", "both sides were armed at once for "] {
        ensure!(table.stdout.contains(text), "{text:?} in {}", table.stdout);
    }
    let both = report["join"]["armed_seconds"].as_f64().context("armed_seconds")?;
    let armed = report["host"]["windows"]["armed_seconds"].as_f64().context("armed_seconds")?;
    // On a busy machine windows come late, on each side by another time.
    ensure!(0.0 < both && both <= armed * 1.001, "{both} of {armed}");
    load.unharmed()?;
    Ok(())
}

#[test]
fn between_windows_no_breakpoint_is_in_the_text() -> Result<()> {
    let _turn = turn()?;
    if !can_trace() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let load = Load::running("randread", 8, Duration::from_secs(12))?;
    let text = Text::of(load.target.pid())?;
    let before = text.read()?;
    let run = folder.path().join("target.run");
    let recording =
        Recording::start("target", load.target.pid(), &run, &["--window", "200ms/1s", "--duration", "5s"])?;
    let (mut armed, mut away, began) = (0, 0, Instant::now());
    while began.elapsed() < Duration::from_secs(4) {
        match text.read()? == before {
            true => away += 1,
            false => armed += 1,
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    recording.finish()?;
    ensure!(armed > 10 && away > armed, "{armed} readings with breakpoints, {away} without");
    ensure!(text.read()? == before, "the text is as it was");
    load.unharmed()?;
    Ok(())
}

/// A process's executable mapping of its own program.
struct Text {
    memory: fs::File,
    from: u64,
    length: usize,
}

impl Text {
    fn of(pid: u32) -> Result<Text> {
        let program = fs::read_link(format!("/proc/{pid}/exe"))?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let line = maps
            .lines()
            .find(|line| line.contains(" r-xp ") && line.ends_with(&program.display().to_string()))
            .context("its text")?;
        let (from, to) = line.split(' ').next().and_then(|range| range.split_once('-')).context("a range")?;
        let (from, to) = (u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?);
        let memory = fs::File::open(format!("/proc/{pid}/mem"))?;
        Ok(Text { memory, from, length: usize::try_from(to - from)? })
    }

    fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.length];
        std::os::unix::fs::FileExt::read_exact_at(&self.memory, &mut bytes, self.from)?;
        Ok(bytes)
    }
}

#[test]
fn windows_that_are_too_short_are_refused_with_the_figure_and_leave_no_run() -> Result<()> {
    let _turn = turn()?;
    for (window, why) in [
        ("1s/1s", "never over"),
        ("2s/1s", "never over"),
        ("0ms/1s", "more than nothing"),
        ("50/1", "no unit"),
        ("often", "no window"),
    ] {
        fabscope(["record", "target", "--window", window])?.expect(2, &[why])?;
    }
    if !can_trace() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let load = Load::running("randread", 4, Duration::from_secs(120))?;
    let run = folder.path().join("target.run");
    let pid = load.target.pid().to_string();
    let run_text = run.display().to_string();
    let record = |window: &str| {
        fabscope(["record", "target", "--spdk", &pid, "-o", &run_text, "-d", "2s", "--window", window])
    };
    record("20us/1s")?.expect(1, &["putting the probes in place takes up to", "make it at least"])?;
    ensure!(!run.exists(), "nothing is left of a recording that did not begin");
    record("999ms/1s")?.expect(1, &["longer than there is between two windows"])?;
    Ok(())
}

#[test]
fn what_recording_costs_is_measured_and_found() -> Result<()> {
    let _turn = turn()?;
    if !can_trace() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let load = Load::running("randread", 16, Duration::from_secs(120))?;
    let run = folder.path().join("target.run");
    Recording::start("target", load.target.pid(), &run, &["--measure-overhead", "--duration", "16s"])?
        .finish()?;
    let manifest = manifest(&run)?;
    adds_up(&manifest)?;
    let overhead = manifest.overhead.context("it was measured")?;
    // Of some sixty windows.
    let windows = manifest.windows.context("windows")?;
    ensure!(
        overhead.pairs >= 10 && u64::from(overhead.pairs) + windows.skipped >= 20,
        "{overhead:?}, {windows:?}"
    );
    // What it takes of the process's own time is not more than what it adds while the process may have to wait.
    let own = overhead.recorder_ns.context("its own time")?;
    ensure!(own > 0.0 && overhead.core_ns.is_some(), "{overhead:?}");
    let (lost, added) = (overhead.lost.context("lost")?, overhead.added_ns.context("added")?);
    // A machine that is busy with other things may hide it, and then it says so.
    if lost.is_shown() {
        ensure!(lost.mean > 0.0 && added.mean > 0.0, "{overhead:?}");
    } else {
        ensure!(lost.smallest > 0.02, "a cost that large is there: {overhead:?}");
    }
    let report = fabscope(["report", &run.display().to_string()])?.expect(0, &[])?;
    ensure!(report.stdout.contains("pairs of windows"), "{}", report.stdout);
    Ok(())
}

#[test]
fn a_recording_that_is_killed_in_a_window_has_that_window() -> Result<()> {
    let _turn = turn()?;
    if !can_trace() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let load = Load::running("randread", 8, Duration::from_secs(60))?;
    let path = folder.path().join("target.run");
    let mut recording = Recording::start("target", load.target.pid(), &path, &["--window", "8s/9s"])?;
    let until = Instant::now() + SOON;
    while Rows::read(&Run::open(&path)?)?.len() < 100 {
        ensure!(Instant::now() < until, "nothing is recorded: {}", recording.said());
        std::thread::sleep(Duration::from_millis(50));
    }
    recording.process().signal(Signal::SIGKILL)?;
    recording.process().wait(SOON)?;
    let run = Run::open(&path)?;
    ensure!(run.manifest().state == State::Open, "it was killed");
    let (windows, counters) = (run.manifest().windows.context("windows")?, run.manifest().counters);
    let (commands, astray) = astray(&run)?;
    ensure!(commands >= 100 && astray == 0, "{astray} of {commands} are not whole within a slice");
    ensure!(windows.slices >= 1 && windows.armed_ns > 0, "{windows:?}");
    ensure!(counters.seen >= counters.recorded && counters.recorded >= commands as u64, "{counters:?}");
    let report = fabscope(["report", &path.display().to_string()])?.expect(0, &[])?;
    ensure!(report.stdout.contains("cut short") && report.stdout.contains("armed for "), "{}", report.stdout);
    Ok(())
}

#[test]
fn a_target_that_ends_while_windows_come_and_go_ends_the_recording() -> Result<()> {
    let _turn = turn()?;
    if !can_trace() {
        return Ok(());
    }
    for after in [400, 437, 471, 503] {
        let folder = tempfile::tempdir()?;
        let load = Load::running("randread", 8, Duration::from_secs(60))?;
        let path = folder.path().join("target.run");
        let recording =
            Recording::start("target", load.target.pid(), &path, &["--window", "40ms/100ms", "-d", "50s"])?;
        std::thread::sleep(Duration::from_millis(after));
        kill(Pid::from_raw(load.target.pid().cast_signed()), Signal::SIGKILL)?;
        match recording.finish() {
            Ok(run) => ensure!(Run::open(&run)?.manifest().state == State::Closed, "it ended in order"),
            // A busy machine was not done with trying how long arming takes.
            Err(error) => {
                ensure!(format!("{error:#}").contains("ended before the recording began"), "{error:#}");
                ensure!(!path.exists(), "no run is left");
            }
        }
    }
    Ok(())
}

#[test]
fn ctrl_c_before_the_recording_ends_it_at_once_and_leaves_no_run() -> Result<()> {
    let _turn = turn()?;
    if !can_trace() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let load = Load::running("randread", 4, Duration::from_secs(120))?;
    let path = folder.path().join("target.run");
    let mut in_rehearsal = 0;
    for _ in 0..5 {
        // The run is there before arming is tried.
        let mut recording =
            Recording::start("target", load.target.pid(), &path, &["--window", "200ms/1s", "-d", "30s"])?;
        recording.process().signal(Signal::SIGINT)?;
        let status = recording.process().wait(Duration::from_secs(10))?;
        if status.success() {
            fs::remove_dir_all(&path)?;
            continue;
        }
        in_rehearsal += 1;
        let said = recording.said();
        ensure!(said.contains("ended by a signal before the recording began"), "{status}: {said}");
        ensure!(!path.exists(), "no run is left");
    }
    ensure!(in_rehearsal > 0, "the rehearsal was never met");
    // And while it finds out what hits cost.
    let mut recording = Process::start(
        std::process::Command::new(support::FABSCOPE)
            .args(["record", "target", "--spdk", &load.target.pid().to_string(), "-q", "-d", "30s", "-o"])
            .arg(&path),
    )?;
    std::thread::sleep(Duration::from_millis(150));
    let began = Instant::now();
    recording.signal(Signal::SIGINT)?;
    recording.wait(Duration::from_secs(10))?;
    if began.elapsed() < Duration::from_secs(1) {
        ensure!(!path.exists(), "nothing had been attached");
    }
    Ok(())
}
