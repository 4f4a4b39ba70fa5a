//! `fabscope demo`, and `fabscope record` on the stand-in: how recordings begin and end, what is kept when
//! they end badly, and that the recorded programs never notice.

mod support;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use run_format::{Run, State};
use standin::{Initiator, Target};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use support::disk::Tmpfs;
use support::load::{self, Load};
use support::{FABSCOPE, Outcome, Pair, Recording, Rows, fabscope, outcome};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn the_demo_shows_what_was_made_slower() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let keep = here.path().join("kept");
    // So long a delay is told from what a busy machine does to the other stages.
    let said =
        fabscope(["demo", "--duration", "4s", "--delay", "10ms", "--keep", &keep.display().to_string()])?
            .expect(0, &[])?;
    for text in [
        "stand-in",
        "not SPDK",
        "host block layer",
        "host driver",
        "network",
        "target driver",
        "slower by 10.0 ms",
        "as it was made slower",
        "The storage stage grew by what was done to it, and no other stage did.",
    ] {
        ensure!(said.stdout.contains(text), "{text:?} was expected: {}", said.stdout);
    }
    for phase in ["before", "after"] {
        let (host, target) = (keep.join(phase).join("host.run"), keep.join(phase).join("target.run"));
        let pair = Pair::join(&host, &target)?;
        pair.nearly_all_joined(100)?;
        ensure!(pair.joined.host_manifest().software.name.contains("stand-in"));
        support::report_json(&host, &target)?;
        // Either order will do.
        support::report_json(&target, &host)?;
    }
    Ok(())
}

/// `fabscope record SIDE --spdk PID -o RUN ...`, to its end.
fn record(side: &str, pid: u32, run: &Path, more: &[&str]) -> Result<Outcome> {
    outcome(
        Command::new(FABSCOPE).args(["record", side, "--spdk", &pid.to_string(), "-o"]).arg(run).args(more),
    )
}

#[test]
fn a_commands_end_ends_the_recording_with_its_code() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let mut load = Load::new("randread", 4, 20 * SECOND)?;

    let run = here.path().join("idle.run");
    let said =
        record("target", load.target.pid(), &run, &["--", "sh", "-c", "echo out; echo err >&2; exit 7"])?
            .expect(7, &["err", "0 commands seen, 0 recorded, 0 lost (the command ended)"])?;
    ensure!(said.stdout == "out\n", "{said:?}");
    ensure!(fs::read_to_string(run.join("workload/stdout"))? == "out\n");
    ensure!(fs::read_to_string(run.join("workload/stderr"))? == "err\n");
    let workload = Run::open(&run)?.manifest().workload.clone().unwrap_or_default();
    ensure!(workload.exit_code == Some(7) && workload.argv[..2] == ["sh", "-c"], "{workload:?}");
    // Nothing was recorded: too little to say.
    fabscope(["report".as_ref(), run.as_os_str()])?.expect(4, &["too little to report", "0 commands"])?;

    load.initiator.start()?;
    let run = here.path().join("killed.run");
    record("host", load.initiator.pid(), &run, &["--", "sh", "-c", "sleep 0.5; kill -KILL $$"])?
        .expect(128 + 9, &["commands seen"])?;
    let opened = Run::open(&run)?;
    let workload = opened.manifest().workload.clone().unwrap_or_default();
    ensure!(workload.signal == Some(9) && workload.exit_code.is_none(), "{workload:?}");
    ensure!(opened.manifest().state == State::Closed && Rows::read(&opened)?.len() > 100);
    support::counters_are_exact(&opened)?;

    let run = here.path().join("none.run");
    record("target", load.target.pid(), &run, &["--", "/no/such/program"])?
        .expect(1, &["/no/such/program"])?;
    ensure!(!run.exists(), "a command that is not there leaves no run");
    load.unharmed()?;
    Ok(())
}

#[test]
fn time_and_signals_end_a_recording_in_order() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("randrw", 8, 30 * SECOND)?;
    for (name, signal) in
        [("int.run", Signal::SIGINT), ("term.run", Signal::SIGTERM), ("hup.run", Signal::SIGHUP)]
    {
        if signal == Signal::SIGHUP && support::ignores(signal)? {
            // A recorder that inherits this does as nohup asks.
            println!("skipped: the end by SIGHUP, which whatever started these tests has ignored");
            continue;
        }
        let run = here.path().join(name);
        let mut recording = Recording::start("target", load.target.pid(), &run, &[])?;
        thread::sleep(SECOND / 2);
        recording.process().signal(signal)?;
        let opened = Run::open(&recording.finish()?)?;
        ensure!(opened.manifest().state == State::Closed, "{signal}");
        ensure!(Rows::read(&opened)?.len() > 100, "{signal}");
        support::counters_are_exact(&opened)?;
        support::all_boundaries_were_taken(&opened)?;
    }
    let run = here.path().join("time.run");
    record("host", load.initiator.pid(), &run, &["-d", "500ms", "--label", "a=b"])?
        .expect(0, &["ended after its time", "0 lost"])?;
    let opened = Run::open(&run)?;
    ensure!(opened.manifest().labels.get("a").is_some_and(|b| b == "b"));
    let window = opened.manifest().window;
    let length = window.end_ns.0 - window.start_ns.0;
    ensure!((450_000_000..10_000_000_000).contains(&length), "recorded {length} ns");
    support::all_boundaries_were_taken(&opened)?;

    // A signal reaches the command too, whose code is passed on.
    let run = here.path().join("forwarded.run");
    let script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let mut recording = Recording::start("target", load.target.pid(), &run, &["--", "sh", "-c", script])?;
    while fs::read_to_string(run.join("workload/stdout")).unwrap_or_default() != "ready\n" {
        ensure!(recording.process().ended()?.is_none(), "{}", recording.said());
        thread::sleep(SECOND / 50);
    }
    recording.process().signal(Signal::SIGTERM)?;
    ensure!(recording.process().wait(support::SOON)?.code() == Some(9));
    ensure!(Run::open(&run)?.manifest().state == State::Closed);
    load.unharmed()?;
    Ok(())
}

#[test]
fn a_killed_recorder_leaves_a_run_that_reads() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("randread", 8, 15 * SECOND)?;
    let (host, target) = (here.path().join("host.run"), here.path().join("target.run"));
    let mut on_target = Recording::start("target", load.target.pid(), &target, &[])?;
    let mut on_host = Recording::start("host", load.initiator.pid(), &host, &[])?;
    thread::sleep(3 * SECOND);
    for recording in [&mut on_target, &mut on_host] {
        recording.process().signal(Signal::SIGKILL)?;
        recording.process().wait(support::SOON)?;
    }
    for run in [&host, &target] {
        let run = Run::open(run)?;
        ensure!(run.manifest().state == State::Open && run.broken_segments().is_empty());
        ensure!(Rows::read(&run)?.len() > 1000 && !run.queues()?.is_empty());
        let manifest = run.manifest();
        ensure!(manifest.window.end_ns.0 - manifest.window.start_ns.0 > 1_000_000_000, "{manifest:?}");
    }
    let report = support::report_json(&host, &target)?;
    ensure!(report["host"]["state"] == "open", "{report:#}");
    let join = &report["join"];
    let inside =
        join["host_commands"].as_u64().unwrap_or(0) - join["host_set_aside"]["outside"].as_u64().unwrap_or(0);
    ensure!(join["joined"].as_u64().unwrap_or(0) as f64 >= 0.999 * inside as f64, "{join:#}");
    // The kernel took the probes away with the recorder: another one attaches as if nothing had been.
    Recording::start("target", load.target.pid(), &here.path().join("again.run"), &[])?.stop()?;
    load.unharmed()?;
    Ok(())
}

#[test]
fn what_is_there_is_replaced_only_when_told_so_and_only_a_run() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("randread", 1, 30 * SECOND)?;
    let run = here.path().join("target.run");
    let pid = load.target.pid();
    record("target", pid, &run, &["-d", "200ms"])?.expect(0, &[])?;
    let before = fs::read(run.join("run.json"))?;
    record("target", pid, &run, &["-d", "200ms"])?
        .expect(1, &["target.run is already there", "-o", "--force"])?;
    ensure!(fs::read(run.join("run.json"))? == before, "what was there is untouched");
    record("target", pid, &run, &["-d", "200ms", "--force"])?.expect(0, &[])?;
    ensure!(fs::read(run.join("run.json"))? != before);

    let precious = here.path().join("precious");
    fs::create_dir(&precious)?;
    fs::write(precious.join("data"), "mine")?;
    record("target", pid, &precious, &["-d", "200ms", "--force"])?
        .expect(1, &["precious is there and is not a fabscope run", "choose another name"])?;
    record("target", pid, &precious.join("data"), &["-d", "200ms", "--force"])?
        .expect(1, &["is not a fabscope run"])?;
    ensure!(fs::read_to_string(precious.join("data"))? == "mine");
    record("target", pid, Path::new("/proc/x.run"), &["-d", "200ms"])?.expect(1, &["/proc/x.run"])?;
    drop(load);
    Ok(())
}

#[test]
fn a_full_disk_ends_the_recording_and_what_is_written_reads() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    // It holds a second of the fastest such load, so that something is written, and no minute of a slow one.
    let Some(disk) = Tmpfs::mount(&here.path().join("disk"), 2048)? else { return Ok(()) };
    let load = Load::running("randread", 1, 60 * SECOND)?;
    let run = disk.path().join("target.run");
    record("target", load.target.pid(), &run, &["-d", "50s"])?
        .expect(1, &["No space left on device", "target.run"])?;
    let opened = Run::open(&run)?;
    ensure!(opened.manifest().state == State::Open && opened.broken_segments().is_empty());
    ensure!(Rows::read(&opened)?.len() > 1000);
    fabscope(["report".as_ref(), run.as_os_str()])?.expect(0, &[])?;
    drop(load);
    Ok(())
}

#[test]
fn probes_come_and_go_twenty_times_and_the_load_never_notices() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let (mut round, mut commands) = (0, 0);
    while round < 20 {
        // On a busy machine twenty rounds outlast one load.
        let load = Load::running("randrw", 8, 15 * SECOND)?;
        let started = Instant::now();
        while round < 20 && started.elapsed() < 7 * SECOND {
            let host = here.path().join(format!("{round}-host.run"));
            let target = here.path().join(format!("{round}-target.run"));
            let on_target = Recording::start("target", load.target.pid(), &target, &[])?;
            let on_host = Recording::start("host", load.initiator.pid(), &host, &[])?;
            thread::sleep(SECOND / 10);
            // Every few rounds the recorders die instead of ending.
            if round % 5 == 4 {
                drop((on_target, on_host));
            } else {
                let (host, target) = (on_host.stop()?, on_target.stop()?);
                Pair::join(&host, &target)?.nearly_all_joined(10)?;
            }
            round += 1;
        }
        let summary = load.unharmed()?;
        ensure!(summary.verified > 0, "{summary:?}");
        commands += summary.commands;
    }
    ensure!(commands > 1000, "{commands} commands");
    Ok(())
}

#[test]
fn the_end_of_the_recorded_process_ends_the_recording() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let Load { target, initiator } = Load::running("randread", 4, 60 * SECOND)?;
    let (host_run, target_run) = (here.path().join("host.run"), here.path().join("target.run"));
    let on_target = Recording::start("target", target.pid(), &target_run, &[])?;
    let on_host = Recording::start("host", initiator.pid(), &host_run, &[])?;
    thread::sleep(SECOND);
    kill(initiator.pid())?;
    let host = Run::open(&on_host.finish()?)?;
    kill(target.pid())?;
    let target_opened = Run::open(&on_target.finish()?)?;
    for run in [&host, &target_opened] {
        ensure!(run.manifest().state == State::Closed);
        support::counters_are_exact(run)?;
        ensure!(Rows::read(run)?.len() > 100);
    }
    Pair::join(&host_run, &target_run)?.nearly_all_joined(100)?;
    drop::<(Target, Initiator)>((target, initiator));

    // The same, with the target ending first.
    let Load { target, initiator } = Load::running("randread", 4, 60 * SECOND)?;
    let run = here.path().join("second.run");
    let on_host = Recording::start("host", initiator.pid(), &run, &[])?;
    kill(target.pid())?;
    ensure!(Run::open(&on_host.finish()?)?.manifest().state == State::Closed);
    Ok(())
}

fn kill(pid: u32) -> Result<()> {
    Ok(nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?)
}

#[test]
fn both_sides_keep_the_same_one_command_in_so_many() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let target = Target::spawn(Vec::<String>::new())?;
    let mut initiator = load::against(&target, "randrw", 16, 3 * SECOND)?;
    let (host, target_run) = (here.path().join("host.run"), here.path().join("target.run"));
    let on_target = Recording::start("target", target.pid(), &target_run, &["--sample", "10"])?;
    let on_host = Recording::start("host", initiator.pid(), &host, &["--sample", "10"])?;
    initiator.start()?;
    let summary = initiator.finish()?;
    ensure!(summary.errors == 0 && summary.verify_errors == 0, "{summary:?}");
    on_host.finish()?;
    on_target.stop()?;
    let pair = Pair::join(&host, &target_run)?;
    pair.nearly_all_joined(100)?;
    let accounting = pair.joined.accounting();
    ensure!(accounting.host_commands == accounting.target_commands, "{accounting:?}");
    let counters = pair.joined.host_manifest().counters;
    let kept = counters.recorded as f64 / counters.seen as f64;
    ensure!((0.07..0.13).contains(&kept), "{kept} of the commands were kept: {counters:?}");
    Ok(())
}
