//! Runs that no recorder wrote: times out of order and out of range, queues that are not there, Parquet of
//! other programs. The report says something about each, or what is wrong with it; it never panics and never
//! hangs. And recordings of what does not behave: commands that leave processes behind, that do not listen,
//! that are not there; containers.

mod support;

use anyhow::{Context, Result, ensure};
use joiner::{JoinOptions, ReportOptions};
use polars::prelude::{Column, DataFrame, DataType, IntoLazy, ParquetCompression, ParquetWriter, col, lit};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use run_format::{
    Cid, ClockPair, Command as NvmeCommand, Counters, Endpoint, Kind, Machine, Manifest, Nanos, Queue,
    QueueId, Run, RunWriter, Side, Sink, Software, State, Window,
};
use standin::Target;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{FABSCOPE, Outcome, Recording, outcome};

fn manifest(side: Side, boot: &str, window: (u64, u64)) -> Manifest {
    Manifest {
        format: Manifest::FORMAT.into(),
        side,
        kind: Kind::Spdk,
        tool: "0".into(),
        state: State::Open,
        machine: Machine { hostname: "a\u{1b}[31mb".into(), boot_id: boot.into(), ..Machine::default() },
        software: Software::default(),
        hooks: Vec::new(),
        detail: "stages".into(),
        one_in: 1,
        window: Window { start_ns: Nanos(window.0), end_ns: Nanos(window.1) },
        windows: None,
        overhead: None,
        clocks: vec![ClockPair { monotonic_ns: Nanos(window.1), realtime_ns: Nanos(window.0) }],
        counters: Counters::default(),
        workload: None,
        price: None,
        telemetry: None,
        events: Vec::new(),
        labels: Default::default(),
    }
}

fn write(path: &Path, manifest: Manifest, commands: &[NvmeCommand]) -> Result<()> {
    let end = manifest.window.end_ns;
    let mut writer = RunWriter::create(path, manifest, true)?;
    writer.queue(Queue {
        subsystem_nqn: "nqn.2024-01.org.example:disk".into(),
        cntlid: 1,
        qid: 1,
        host: Some(Endpoint { address: "192.0.2.1".into(), port: 4000 }),
        ..Queue::default()
    });
    for command in commands {
        writer.command(command);
    }
    writer.close(Counters::default(), end)?;
    Ok(())
}

/// A few values that lie close together, and the ends of what a column holds.
fn time() -> impl Strategy<Value = Option<Nanos>> {
    prop_oneof![
        6 => (1_000u64..1_200).prop_map(|t| Some(Nanos(t))),
        1 => Just(None),
        1 => prop_oneof![Just(0), Just(1 << 60), Just((1 << 60) - 1), Just(u64::MAX)].prop_map(|t| Some(Nanos(t))),
    ]
}

fn command() -> impl Strategy<Value = NvmeCommand> {
    (
        (prop_oneof![8 => Just(0u32), 1 => Just(1), 1 => Just(u32::MAX)], 0u16..3, any::<bool>()),
        (proptest::array::uniform8(time()), time(), proptest::option::of(0u32..3)),
        prop_oneof![4 => Just(0u16), 1 => any::<u16>()],
        0u8..3,
    )
        .prop_map(|((queue, cid, write), (times, r2t_turnaround, stream_position), odd, r2ts)| {
            NvmeCommand {
                queue: QueueId(queue),
                cid: Cid(if odd == 7 { u16::MAX } else { cid }),
                opcode: if write { 1 } else { 2 },
                nsid: 1,
                bytes: 4096,
                status: odd,
                cpu: odd,
                flags: odd & 15,
                r2ts,
                stream_position,
                r2t_turnaround,
                drive: r2t_turnaround,
                times,
                ..NvmeCommand::default()
            }
        })
}

#[test]
fn whatever_the_commands_hold_every_one_is_accounted_for() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (host, target) = (here.path().join("h"), here.path().join("t"));
    let commands = || proptest::collection::vec(command(), 0..60);
    let edge = || prop_oneof![3 => Just(1_000u64), 1 => Just(0), 1 => Just(u64::MAX), 1 => Just(1 << 60)];
    let window = || (edge(), edge());
    let mut runner = TestRunner::new(Config { cases: 96, failure_persistence: None, ..Config::default() });
    runner.run(
        &(commands(), commands(), any::<bool>(), window(), window()),
        |(ours, theirs, one_machine, ours_window, theirs_window)| {
            let boot = if one_machine { "h" } else { "t" };
            let made = write(&host, manifest(Side::Host, "h", ours_window), &ours)
                .and_then(|()| write(&target, manifest(Side::Target, boot, theirs_window), &theirs));
            prop_assert!(made.is_ok(), "{made:?}");
            let opened = (Run::open(&host), Run::open(&target));
            let (Ok(h), Ok(t)) = opened else { return Err(TestCaseError::fail(format!("{opened:?}"))) };
            let options = ReportOptions { detail: true, ..ReportOptions::default() };
            if let Ok(joined) = joiner::join(&h, &t, &JoinOptions::default()) {
                let a = joined.accounting();
                prop_assert_eq!(a.host_commands, a.joined + a.host.total());
                prop_assert_eq!(a.target_commands, a.joined + a.target.total());
                for pair in joined.pairs() {
                    let stages = joined.stages(*pair);
                    let sum = stages.map(|s| s.stages.iter().sum::<i64>());
                    prop_assert_eq!(sum, stages.map(|s| s.latency));
                }
                if let Ok(report) = joiner::report(&joined, &options) {
                    let _ = report.to_table();
                }
            }
            for report in
                [joiner::host_report(&h, &options), joiner::target_report(&t, &options)].into_iter().flatten()
            {
                let _ = report.to_table();
            }
            Ok(())
        },
    )?;
    Ok(())
}

fn plain_run(path: &Path, side: Side) -> Result<()> {
    let commands: Vec<NvmeCommand> = (0..200)
        .map(|n| NvmeCommand {
            opcode: 2,
            cid: Cid(n as u16 % 8),
            nsid: 1,
            slba: n * 8,
            bytes: 4096,
            times: std::array::from_fn(|slot| match (side, slot) {
                (Side::Host, 3 | 4) | (Side::Target, 1 | 2 | 7) => None,
                (Side::Host, _) => Some(Nanos(1_000_000 + n * 100_000 + slot as u64 * 1_000)),
                (Side::Target, _) => Some(Nanos(1_000_000 + n * 100_000 + 2_500 + slot as u64 * 100)),
            }),
            ..NvmeCommand::default()
        })
        .collect();
    write(path, manifest(side, "one", (1_000_000, 30_000_000)), &commands)
}

fn report(host: &Path, target: &Path) -> Result<Outcome> {
    outcome(Command::new("timeout").arg("60").arg(FABSCOPE).arg("report").args([host, target]))
}

/// Rewrites the one segment of a run.
fn change(run: &Path, how: impl FnOnce(DataFrame) -> Result<DataFrame>) -> Result<()> {
    let mut frame = how(Run::open(run)?.commands()?.collect()?)?;
    let file = File::create(run.join("commands/000000.parquet"))?;
    ParquetWriter::new(file).with_compression(ParquetCompression::Lz4Raw).finish(&mut frame)?;
    Ok(())
}

#[test]
fn parquet_of_another_program_is_refused_by_the_column_that_is_wrong() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (host, target) = (here.path().join("h.run"), here.path().join("t.run"));
    let fresh = || plain_run(&host, Side::Host).and_then(|()| plain_run(&target, Side::Target));
    fresh()?;
    report(&host, &target)?.expect(0, &[])?;

    change(&host, |f| Ok(f.drop("h_recv")?))?;
    report(&host, &target)?.expect(1, &["h.run", "column h_recv is missing"])?;
    for (name, wrong) in [
        ("cid", DataType::UInt32),
        ("h_sent", DataType::UInt64),
        ("slba", DataType::Int64),
        ("bytes", DataType::String),
    ] {
        fresh()?;
        change(&host, |f| Ok(f.lazy().with_column(col(name).cast(wrong.clone())).collect()?))?;
        report(&host, &target)?.expect(1, &["h.run", &format!("column {name} is "), "not "])?;
    }
    // A second segment of another shape than the first.
    fresh()?;
    let mut other = DataFrame::new(1, vec![Column::new("x".into(), [1i32])])?;
    ParquetWriter::new(File::create(host.join("commands/1.parquet"))?).finish(&mut other)?;
    report(&host, &target)?.expect(1, &["h.run"])?;
    // A column that no fabscope writes is none of our business.
    fresh()?;
    change(&host, |f| Ok(f.lazy().with_column(lit(1).alias("extra")).collect()?))?;
    report(&host, &target)?.expect(0, &[])?;
    // No boundary was ever taken.
    fresh()?;
    change(&host, |f| {
        let nothing = ["h_queued", "h_driver", "h_sent", "h_recv", "h_done", "h_end"]
            .map(|name| lit(polars::prelude::NULL).cast(DataType::Int64).alias(name));
        Ok(f.lazy().with_columns(nothing).collect()?)
    })?;
    report(&host, &target)?.expect(4, &["too little to report"])?;
    Ok(())
}

#[test]
fn a_run_is_reported_from_wherever_it_lies() -> Result<()> {
    let here = tempfile::tempdir()?;
    let host = here.path().join(std::ffi::OsStr::from_bytes(b"h\xff.run"));
    let target = here.path().join("t.run");
    plain_run(&host, Side::Host)?;
    plain_run(&target, Side::Target)?;
    let said = report(&host, &target)?.expect(0, &[])?;
    ensure!(!said.stdout.contains('\u{1b}'), "a name in a run steers the terminal: {}", said.stdout);
    for name in ["file:x", "s3:"] {
        let other = here.path().join(name);
        fs::rename(&target, &other)?;
        let (first, second) = (host.file_name().context("a name")?, Path::new(name));
        outcome(Command::new(FABSCOPE).current_dir(here.path()).arg("report").arg(first).arg(second))?
            .expect(0, &[])?;
        fs::rename(&other, &target)?;
    }
    Ok(())
}

#[test]
fn a_cause_is_said_once() -> Result<()> {
    let said = support::fabscope(["probe", "target", "--spdk", "/no/such/program"])?
        .expect(1, &["/no/such/program"])?;
    ensure!(said.stderr.matches("No such file").count() == 1, "{}", said.stderr);
    Ok(())
}

#[test]
fn without_rights_no_target_is_said_to_be_missing() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    if !nix::unistd::geteuid().is_root() {
        support::skipped("only root can run a program as another user");
        return Ok(());
    }
    let here = tempfile::tempdir()?;
    let copy = here.path().join("fabscope");
    fs::copy(FABSCOPE, &copy)?;
    for path in [here.path(), &copy] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    let target = Target::spawn(Vec::<String>::new())?;
    outcome(Command::new(&copy).args(["record", "target", "-o", "/tmp/never.run"]).uid(65534).gid(65534))?
        .expect(1, &["not allowed to", "sudo"])?;
    target.stop()
}

#[test]
fn a_full_standard_output_is_an_error_that_says_so() -> Result<()> {
    let full = File::options().write(true).open("/dev/full")?;
    let output = Command::new(FABSCOPE).arg("schema").stdout(full).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1) && said.contains("write to standard output"), "{said}");
    Ok(())
}

/// Records a target while a shell runs `script`.
fn record_while(target: &Target, run: &Path, script: &str, more: &[&str]) -> Result<Outcome> {
    let pid = target.pid().to_string();
    let mut command = Command::new("timeout");
    command.args(["60", FABSCOPE, "record", "target", "--spdk", &pid, "-o"]).arg(run).args(more);
    outcome(command.args(["--", "sh", "-c", script]))
}

#[test]
fn what_a_command_leaves_behind_is_not_waited_for() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let target = Target::spawn(Vec::<String>::new())?;
    let began = Instant::now();
    let said = record_while(&target, &here.path().join("x.run"), "sleep 55 & echo $!; exit 3", &[])?
        .expect(3, &["left behind still holds its output"])?;
    ensure!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    outcome(Command::new("kill").arg(said.stdout.trim()))?.expect(0, &[])?;
    ensure!(Run::open(&here.path().join("x.run"))?.manifest().state == State::Closed);
    target.stop()
}

#[test]
fn a_command_that_is_not_there_costs_no_run() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let run = here.path().join("x.run");
    let target = Target::spawn(Vec::<String>::new())?;
    let pid = target.pid().to_string();
    let record = |more: &[&str]| {
        let mut command = Command::new(FABSCOPE);
        command.args(["record", "target", "--spdk", &pid, "-d", "100ms", "-o"]).arg(&run).args(more);
        outcome(&mut command)
    };
    record(&["--", "no-such-program"])?.expect(1, &["no-such-program", "PATH"])?;
    record(&["--", "/dev/null"])?.expect(1, &["/dev/null", "not a program"])?;
    let script = here.path().join("script");
    fs::write(&script, "#!/no/such/interpreter\n")?;
    outcome(Command::new("chmod").arg("755").arg(&script))?.expect(0, &[])?;
    record(&["--", &script.display().to_string()])?.expect(1, &["script"])?;
    ensure!(!run.exists());
    record(&[])?.expect(0, &[])?;
    let before = fs::read(run.join("run.json"))?;
    record(&["--force", "--", "no-such-program"])?.expect(1, &["no-such-program"])?;
    ensure!(fs::read(run.join("run.json"))? == before, "the run that was there is lost");
    target.stop()
}

#[test]
fn a_command_that_does_not_listen_is_ended_by_the_third_signal() -> Result<()> {
    use nix::sys::signal::Signal::{SIGINT, SIGTERM};
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let run = here.path().join("x.run");
    let target = Target::spawn(Vec::<String>::new())?;
    let script = "trap '' INT TERM HUP; while :; do sleep 0.1; done";
    let mut recording =
        Recording::start("target", target.pid(), &run, &["-d", "100ms", "--", "sh", "-c", script])?;
    let process = recording.process();
    for signal in [SIGTERM, SIGINT, SIGTERM] {
        std::thread::sleep(Duration::from_millis(500));
        ensure!(process.ended()?.is_none());
        process.signal(signal)?;
    }
    ensure!(process.wait(Duration::from_secs(20))?.code() == Some(128 + 9));
    let opened = Run::open(&run)?;
    let workload = opened.manifest().workload.clone().context("no workload")?;
    ensure!(opened.manifest().state == State::Closed && workload.signal == Some(9), "{workload:?}");
    target.stop()
}

/// BPF programs see the machine's own process numbers, and a container has others.
#[test]
fn inside_a_pid_namespace_every_command_is_seen() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let of = standin::spawn::program;
    let script = format!(
        "{target} > listening & for i in $(seq 100); do grep -q listening listening && break; sleep 0.1; done
         {initiator} --connect $(sed -n 's/^listening \\([^ ]*\\) .*/\\1/p' listening) --hold --count 200 < go > summary &
         exec 3> go
         sleep 1
         {FABSCOPE} record target -q -o target.run -- sh -c 'echo go > go; while ! grep -q . summary || ! grep -q }} summary; do sleep 0.1; done'
         code=$?; kill %1; exit $code",
        target = of("standin-target")?.display(),
        initiator = of("standin-initiator")?.display(),
    );
    nix::unistd::mkfifo(&here.path().join("go"), nix::sys::stat::Mode::S_IRWXU)?;
    let said = outcome(
        Command::new("timeout")
            .args(["60", "unshare", "--pid", "--mount-proc", "--fork", "sh", "-c", &script])
            .current_dir(here.path()),
    )?;
    if said.stderr.contains("unshare:") {
        support::skipped(&said.stderr);
        return Ok(());
    }
    said.expect(0, &[])?;
    let run = Run::open(&here.path().join("target.run"))?;
    ensure!(run.manifest().counters.recorded >= 200, "{:?}", run.manifest().counters);
    Ok(())
}

#[test]
fn a_layout_file_is_never_put_in_the_place_of_a_device() -> Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let here = tempfile::tempdir()?;
    let pipe = here.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU)?;
    let program = standin::spawn::program("standin-target")?;
    let mut reader = Command::new("cat").arg(&pipe).stdout(Stdio::piped()).spawn()?;
    outcome(
        Command::new(FABSCOPE)
            .args(["probe", "target", "--spdk"])
            .arg(&program)
            .arg("--save-layout")
            .arg(&pipe),
    )?
    .expect(0, &[])?;
    ensure!(fs::symlink_metadata(&pipe)?.file_type().is_fifo());
    let mut text = String::new();
    std::io::Read::read_to_string(reader.stdout.as_mut().context("no output")?, &mut text)?;
    reader.wait()?;
    ensure!(text.contains("fabscope-layout"), "{text}");
    Ok(())
}
