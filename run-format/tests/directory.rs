//! The run directory: what is written reads back, whole, cut short, damaged or foreign.
#![allow(clippy::unwrap_used)] // the helpers of tests, too

use polars::prelude::{DataFrame, col, lit};
use proptest::prelude::*;
use run_format::{
    Boundary, Cid, Command, Counters, Endpoint, Error, Kind, Machine, Manifest, Nanos, Queue, QueueId, Run,
    RunWriter, Side, Sink, Software, State, Window, Windows,
};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

fn manifest(side: Side) -> Manifest {
    Manifest {
        format: Manifest::FORMAT.into(),
        side,
        kind: Kind::Kernel,
        tool: "0".into(),
        state: State::Open,
        machine: Machine::default(),
        software: Software::default(),
        hooks: Vec::new(),
        detail: "stages".into(),
        one_in: 1,
        window: Window::default(),
        windows: None,
        overhead: None,
        clocks: Vec::new(),
        counters: Counters::default(),
        workload: None,
        price: None,
        telemetry: None,
        events: Vec::new(),
        labels: Default::default(),
    }
}

fn command(n: u64) -> Command {
    let mut c =
        Command { cid: Cid(n as u16), opcode: 2, nsid: 1, slba: n, bytes: 4096, ..Command::default() };
    c.times[0] = Some(Nanos(1_000 + n));
    c
}

fn count(run: &Run) -> usize {
    run.commands().unwrap().collect().unwrap().height()
}

fn write(directory: &Path, commands: u64) {
    let mut writer = RunWriter::create(directory, manifest(Side::Host), false).unwrap();
    let queue = writer.queue(Queue { qid: 1, ..Queue::default() });
    for n in 0..commands {
        writer.command(&Command { queue, ..command(n) });
    }
    writer.close(Counters { seen: commands, recorded: commands, ..Counters::default() }, Nanos(9)).unwrap();
}

fn arbitrary_command() -> impl Strategy<Value = Command> {
    let time = || proptest::option::of((1..u64::MAX / 4).prop_map(Nanos));
    (
        any::<(u16, u8, u32, u64, u16, u32, u16, u16, u16, u8)>(),
        proptest::option::of(any::<u32>()),
        (time(), time()),
        proptest::array::uniform8(time()),
    )
        .prop_map(|(f, stream_position, (r2t_turnaround, drive), times)| Command {
            queue: QueueId(0),
            cid: Cid(f.0),
            opcode: f.1,
            nsid: f.2,
            slba: f.3,
            nlb0: f.4,
            bytes: f.5,
            status: f.6,
            cpu: f.7,
            flags: f.8,
            r2ts: f.9,
            stream_position,
            r2t_turnaround,
            drive,
            times,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_field_of_every_command_comes_back(
        commands in proptest::collection::vec(arbitrary_command(), 0..600),
        host in any::<bool>(),
    ) {
        let side = if host { Side::Host } else { Side::Target };
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("x.run");
        let mut writer = RunWriter::create(&path, manifest(side), false).unwrap();
        for c in &commands {
            writer.command(c);
        }
        writer.close(Counters::default(), Nanos(0)).unwrap();
        let frame = Run::open(&path).unwrap().commands().unwrap().collect().unwrap();
        prop_assert_eq!(frame.height(), commands.len());
        for (i, c) in commands.iter().enumerate() {
            prop_assert_eq!(frame.column("cid").unwrap().u16().unwrap().get(i), Some(c.cid.0));
            prop_assert_eq!(frame.column("opcode").unwrap().u8().unwrap().get(i), Some(c.opcode));
            prop_assert_eq!(frame.column("nsid").unwrap().u32().unwrap().get(i), Some(c.nsid));
            prop_assert_eq!(frame.column("slba").unwrap().u64().unwrap().get(i), Some(c.slba));
            prop_assert_eq!(frame.column("nlb").unwrap().u16().unwrap().get(i), Some(c.nlb0));
            prop_assert_eq!(frame.column("bytes").unwrap().u32().unwrap().get(i), Some(c.bytes));
            prop_assert_eq!(frame.column("status").unwrap().u16().unwrap().get(i), Some(c.status));
            prop_assert_eq!(frame.column("cpu").unwrap().u16().unwrap().get(i), Some(c.cpu));
            prop_assert_eq!(frame.column("flags").unwrap().u16().unwrap().get(i), Some(c.flags));
            prop_assert_eq!(frame.column("r2ts").unwrap().u8().unwrap().get(i), Some(c.r2ts));
            prop_assert_eq!(frame.column("stream_position").unwrap().u32().unwrap().get(i), c.stream_position);
            for b in Boundary::of(side) {
                let time = frame.column(b.name()).unwrap().i64().unwrap().get(i);
                prop_assert_eq!(time, c.time(b).map(Nanos::as_i64));
            }
            if side == Side::Host {
                let turnaround = frame.column("h_r2t_turnaround").unwrap().i64().unwrap().get(i);
                prop_assert_eq!(turnaround, c.r2t_turnaround.map(Nanos::as_i64));
            } else {
                let drive = frame.column("t_drive").unwrap().i64().unwrap().get(i);
                prop_assert_eq!(drive, c.drive.map(Nanos::as_i64));
            }
        }
    }

    #[test]
    fn any_text_for_a_manifest_is_refused_or_read(text in ".{0,300}") {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("run.json"), text).unwrap();
        prop_assert!(Run::open(home.path()).is_err());
    }

    #[test]
    fn a_segment_cut_anywhere_is_left_out_and_the_others_read(at in 0.0..1.0f64) {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("x.run");
        write(&path, 100);
        let whole = path.join("commands/000000.parquet");
        let bytes = fs::read(&whole).unwrap();
        let cut = path.join("commands/000001.parquet");
        fs::write(&cut, &bytes[..((bytes.len() - 1) as f64 * at) as usize]).unwrap();
        let run = Run::open(&path).unwrap();
        prop_assert_eq!(run.broken_segments(), [cut]);
        prop_assert_eq!(count(&run), 100);
    }
}

/// Of more than a row group: whole, part of it, and what a condition keeps.
#[test]
fn a_large_segment_comes_back() {
    const COMMANDS: u64 = 300_000;
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("x.run");
    write(&path, COMMANDS);
    let run = Run::open(&path).unwrap();
    let sum = |frame: &DataFrame, name: &str| match name {
        "slba" => frame.column(name).unwrap().u64().unwrap().iter().map(|v| v.unwrap()).sum::<u64>(),
        _ => frame.column(name).unwrap().i64().unwrap().iter().map(|v| v.unwrap() as u64).sum(),
    };
    let all = (0..COMMANDS).sum::<u64>();
    let frame = run.commands().unwrap().collect().unwrap();
    assert_eq!((sum(&frame, "slba"), sum(&frame, "h_queued")), (all, all + 1_000 * COMMANDS));
    let part = run.commands().unwrap().slice(262_000, 300).collect().unwrap();
    assert_eq!(sum(&part, "slba"), (262_000..262_300).sum::<u64>());
    let late = || col("h_queued").gt_eq(lit(1_000i64 + COMMANDS as i64 - 7));
    let late =
        run.commands().unwrap().filter(late()).select([col("slba"), col("h_queued")]).collect().unwrap();
    assert_eq!((late.height(), sum(&late, "slba")), (7, (COMMANDS - 7..COMMANDS).sum::<u64>()));
}

#[test]
fn queues_events_and_counters_come_back() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("x.run");
    let mut writer = RunWriter::create(&path, manifest(Side::Target), false).unwrap();
    let first = writer.queue(Queue { qid: 1, ..Queue::default() });
    let second = writer.queue(Queue { qid: 2, ..Queue::default() });
    let learned = Queue {
        qid: 2,
        subsystem_nqn: "nqn.a".into(),
        host: Some(Endpoint { address: "127.0.0.1".into(), port: 4 }),
        ..Queue::default()
    };
    writer.queue_is(second, learned.clone());
    writer.queue_went(first, Nanos(77));
    let counters = Counters { seen: 5, unsampled: 5, ..Counters::default() };
    writer.close(counters, Nanos(99)).unwrap();

    let run = Run::open(&path).unwrap();
    let queues = run.queues().unwrap();
    assert_eq!(queues[&first].went, Some(Nanos(77)));
    assert_eq!(queues[&second], learned);
    assert_eq!(run.manifest().counters, counters);
    assert_eq!(run.manifest().state, State::Closed);
    assert_eq!(count(&run), 0);
}

#[test]
fn a_run_that_is_killed_loses_at_most_its_last_second() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("x.run");
    let mut writer = RunWriter::create(&path, manifest(Side::Host), false).unwrap();
    let started = Instant::now();
    let mut n = 0;
    while started.elapsed() < Duration::from_millis(1600) {
        writer.command(&command(n));
        n += 1;
        writer.tick().unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    // As after `kill -9`: nobody closes it.
    std::mem::forget(writer);
    let run = Run::open(&path).unwrap();
    assert_eq!(run.manifest().state, State::Open);
    let kept = count(&run) as u64;
    assert!(kept * 16 >= n * 5, "{kept} of {n} commands of 1.6 s");
}

#[test]
fn what_is_not_a_run_is_named() {
    let home = tempfile::tempdir().unwrap();
    let missing = home.path().join("missing.run");
    assert!(matches!(Run::open(&missing), Err(Error::Missing(p)) if p == missing));
    assert!(matches!(Run::open(home.path()), Err(Error::NotARun(_))));
    let file = home.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(matches!(Run::open(&file), Err(Error::NotARun(_))));
    fs::write(home.path().join("run.json"), r#"{"format":"fabscope-run/2"}"#).unwrap();
    let error = Run::open(home.path()).unwrap_err();
    assert!(matches!(&error, Error::Newer { found, .. } if found == "fabscope-run/2"));
    assert!(error.to_string().contains("use a newer fabscope"));
}

#[test]
fn an_existing_directory_is_kept_unless_forced_and_a_foreign_one_always() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("x.run");
    write(&path, 3);
    let again = |force| RunWriter::create(&path, manifest(Side::Host), force);
    assert!(matches!(again(false), Err(Error::Exists(_))));
    assert_eq!(count(&Run::open(&path).unwrap()), 3);
    drop(again(true).unwrap());
    assert_eq!(count(&Run::open(&path).unwrap()), 0);

    fs::write(home.path().join("precious"), "x").unwrap();
    let foreign = RunWriter::create(home.path(), manifest(Side::Host), true);
    assert!(matches!(foreign, Err(Error::NotOurs(_))));
    assert!(home.path().join("precious").exists());
}

#[test]
fn a_full_disk_ends_the_recording_and_keeps_what_is_written() {
    let home = tempfile::tempdir().unwrap();
    let disk = home.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"])
        .arg(&disk)
        .status();
    if !mounted.is_ok_and(|s| s.success()) {
        println!("skipped: a full disk needs the right to mount a tmpfs");
        return;
    }
    let path = disk.join("x.run");
    let mut writer = RunWriter::create(&path, manifest(Side::Host), false).unwrap();
    let mut n = 0u64;
    let error = loop {
        for _ in 0..2_000 {
            // Numbers that do not compress.
            writer.command(&Command { slba: n.wrapping_mul(0x9e37_79b9_7f4a_7c15), ..command(n) });
            n += 1;
        }
        if let Err(error) = writer.tick() {
            break error;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    drop(writer);
    let kept = Run::open(&path).map(|run| (count(&run), run.broken_segments().len()));
    let unmounted = std::process::Command::new("umount").arg(&disk).status();
    assert!(unmounted.unwrap().success());
    assert!(error.is_disk_full(), "{error}");
    let (kept, broken) = kept.unwrap();
    assert!(kept > 0 && (kept as u64) < n, "{kept} of {n}");
    assert_eq!(broken, 0);
}

/// Runs are read wherever they lie: polars takes `s3://x` and `file:x` for addresses, and only UTF-8.
#[test]
fn a_run_reads_under_any_name() {
    use std::os::unix::ffi::OsStrExt;
    let here = tempfile::tempdir().unwrap();
    let not_text = std::ffi::OsStr::from_bytes(b"n\xff[a]*?.run");
    for name in [Path::new(not_text), Path::new("file:x"), Path::new("s3:"), Path::new("a b%20\n.run")] {
        let path = here.path().join(name);
        write(&path, 3);
        let run = Run::open(&path).unwrap();
        assert_eq!((count(&run), run.queues().unwrap().len()), (3, 1), "{}", path.display());
        assert_eq!(count(&run.clone()), 3);
    }
}

#[test]
fn queues_that_are_cut_are_named() {
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("x.run");
    write(&path, 3);
    let file = path.join("queues/0.parquet");
    let whole = fs::read(&file).unwrap();
    for bad in [&whole[..whole.len() / 2], b"", b"PAR1xxxxPAR1"] {
        fs::write(&file, bad).unwrap();
        let run = Run::open(&path).unwrap();
        let error = run.queues().unwrap_err();
        assert!(matches!(&error, Error::Damaged(path) if *path == file), "{error}");
    }
}

/// A pipe would wait for its writer, and a folder is no file.
#[test]
fn a_segment_that_is_no_file_is_left_out() {
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("x.run");
    write(&path, 3);
    nix::unistd::mkfifo(&path.join("commands/1.parquet"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::create_dir(path.join("commands/2.parquet")).unwrap();
    std::os::unix::fs::symlink("nowhere", path.join("commands/3.parquet")).unwrap();
    let run = Run::open(&path).unwrap();
    assert_eq!((count(&run), run.broken_segments().len()), (3, 3));
}

#[test]
fn what_may_be_created_is_known_before_and_changes_nothing() {
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("x.run");
    RunWriter::may_create(&path, false).unwrap();
    assert!(!path.exists());
    write(&path, 3);
    assert!(matches!(RunWriter::may_create(&path, false), Err(Error::Exists(_))));
    RunWriter::may_create(&path, true).unwrap();
    assert_eq!(count(&Run::open(&path).unwrap()), 3);

    fs::write(here.path().join("file"), "x").unwrap();
    assert!(matches!(RunWriter::may_create(&here.path().join("file"), true), Err(Error::NotOurs(_))));
    let inside = RunWriter::may_create(&here.path().join("file/x.run"), true);
    assert!(matches!(inside, Err(Error::Io { .. })), "{inside:?}");
}

/// `--force -o .`: the directory itself can not be taken away, nor where something is mounted on it.
#[test]
fn force_replaces_what_is_in_a_run_and_keeps_the_directory() {
    use std::os::unix::fs::MetadataExt;
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("x.run");
    write(&path, 3);
    fs::create_dir(path.join("workload")).unwrap();
    let inode = fs::metadata(&path).unwrap().ino();
    drop(RunWriter::create(&path, manifest(Side::Target), true).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
    let run = Run::open(&path).unwrap();
    assert_eq!((count(&run), run.manifest().side), (0, Side::Target));
    assert!(!path.join("workload").exists());
}

#[test]
fn losses_beyond_any_count_are_added_up() {
    let lost = run_format::Lost { ring_full: u64::MAX, map_full: u64::MAX, ..Default::default() };
    assert_eq!(lost.total(), u64::MAX);
}

/// A windowed run with two slices, and one that was never over.
fn windowed(directory: &Path) {
    windowed_until_now(directory).close(Counters::default(), Nanos(400)).unwrap();
}

fn windowed_until_now(directory: &Path) -> RunWriter {
    let windows = Some(Windows { length_ns: 10, every_ns: 100, ..Windows::default() });
    let window = Window { start_ns: Nanos(50), end_ns: Nanos(400) };
    let manifest = Manifest { windows, window, ..manifest(Side::Host) };
    let mut writer = RunWriter::create(directory, manifest, false).unwrap();
    for (start, end) in [(100, 110), (200, 210), (300, 300)] {
        writer.slice(Window { start_ns: Nanos(start), end_ns: Nanos(end) }).unwrap();
    }
    writer
}

#[test]
fn slices_come_back_and_are_counted_in_the_manifest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.run");
    windowed(&path);
    let run = Run::open(&path).unwrap();
    let slices = run.slices().unwrap().unwrap();
    assert_eq!(
        slices.iter().map(|s| (s.start_ns.0, s.end_ns.0)).collect::<Vec<_>>(),
        [(100, 110), (200, 210)]
    );
    let windows = run.manifest().windows.unwrap();
    assert_eq!((windows.slices, windows.armed_ns), (2, 20));
    // A run that was recorded throughout has none, whatever lies there.
    let plain = folder.path().join("b.run");
    write(&plain, 1);
    fs::write(plain.join("slices.csv"), "nonsense").unwrap();
    assert!(Run::open(&plain).unwrap().slices().unwrap().is_none());
}

/// The manifest of a recording that was killed is older than its list, in which the last line may be cut: that slice was
/// never written.
#[test]
fn a_run_that_was_cut_short_has_the_slices_of_its_list() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.run");
    drop(windowed_until_now(&path));
    let said = |run: &Run| run.manifest().windows.map(|w| (w.slices, w.armed_ns));
    assert_eq!(said(&Run::open(&path).unwrap()), Some((2, 20)));
    let list = path.join("slices.csv");
    let whole = fs::read_to_string(&list).unwrap();
    fs::write(&list, &whole[..whole.len() - 3]).unwrap();
    let run = Run::open(&path).unwrap();
    assert_eq!((run.slices().unwrap().unwrap().len(), said(&run)), (1, Some((1, 10))));
}

#[test]
fn a_slice_in_which_a_recording_was_cut_short_goes_up_to_the_last_segment() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.run");
    let begins = |start, end| {
        let mut writer = windowed_until_now(&path);
        writer.slice_begins(Window { start_ns: Nanos(start), end_ns: Nanos(end) });
        writer.command(&command(1));
        drop(writer);
        let run = Run::open(&path).unwrap();
        let last = run.slices().unwrap().unwrap().last().map(|slice| (slice.start_ns.0, slice.end_ns.0));
        let said = run.manifest().windows.map(|w| (w.slices, w.armed_ns)).unwrap();
        fs::remove_dir_all(&path).unwrap();
        (last.unwrap(), said)
    };
    // The window of the run ends at 400.
    assert_eq!(begins(300, 310), ((300, 310), (3, 30)));
    assert_eq!(begins(300, 900), ((300, 400), (3, 120)));
    // Nothing of it had reached the disk; it is in the list already.
    assert_eq!(begins(400, 900), ((200, 210), (2, 20)));
    assert_eq!(begins(200, 210), ((200, 210), (2, 20)));
    // A slice that is over is written once.
    let mut writer = windowed_until_now(&path);
    let slice = Window { start_ns: Nanos(300), end_ns: Nanos(310) };
    writer.slice_begins(slice);
    writer.slice(slice).unwrap();
    writer.command(&command(1));
    drop(writer);
    assert_eq!(Run::open(&path).unwrap().slices().unwrap().unwrap().len(), 3);
}

#[test]
fn a_run_that_is_cut_short_saw_no_fewer_commands_than_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.run");
    let mut writer = RunWriter::create(&path, manifest(Side::Host), false).unwrap();
    writer.manifest().counters = Counters { seen: 9, recorded: 2, unsampled: 7, ..Counters::default() };
    (0..5).for_each(|n| writer.command(&command(n)));
    std::thread::sleep(Duration::from_millis(600));
    assert!(writer.is_due());
    writer.tick().unwrap();
    assert!(!writer.is_due());
    drop(writer);
    let run = Run::open(&path).unwrap();
    assert_eq!((count(&run), run.manifest().counters.recorded, run.manifest().counters.seen), (5, 5, 12));
}

#[test]
fn two_recorders_do_not_share_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.run");
    let create = || RunWriter::create(&path, manifest(Side::Host), true);
    let mut first = create().unwrap();
    for error in [create().unwrap_err(), RunWriter::may_create(&path, true).unwrap_err()] {
        assert!(matches!(error, Error::InUse(_)), "{error}");
        assert!(error.to_string().contains("another fabscope"), "{error}");
    }
    first.command(&command(1));
    first.close(Counters::default(), Nanos(9)).unwrap();
    assert_eq!(count(&Run::open(&path).unwrap()), 1, "nothing of it was removed");
    RunWriter::may_create(&path, true).unwrap();
    drop(create().unwrap());
}

#[test]
fn slices_that_no_recorder_wrote_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.run");
    windowed(&path);
    let list = path.join("slices.csv");
    let whole = fs::read_to_string(&list).unwrap();
    let refused = |text: &str| {
        fs::write(&list, text).unwrap();
        match Run::open(&path).unwrap().slices() {
            Err(Error::Slices { line, .. }) => line,
            other => panic!("{text:?}: {other:?}"),
        }
    };
    assert_eq!(refused(&format!("{whole}40,45,0\n")), 4, "before the one above it");
    assert_eq!(refused("start_ns,end_ns,realtime_ns\n40,45,0\n"), 2, "before the recording");
    assert_eq!(refused(&format!("{whole}390,401,0\n")), 4, "after a recording that was closed");
    assert_eq!(refused("a,b\n"), 1);
    // One that was closed has as many as it says.
    assert_eq!(refused(&whole[..whole.len() - 3]), 3);
    assert_eq!(refused("start_ns,end_ns,realtime_ns\n"), 2);
    assert_eq!(refused(""), 2);
    fs::remove_file(&list).unwrap();
    // What is wrong with the file as a whole is in no line.
    let missing = Run::open(&path).unwrap().slices().unwrap_err().to_string();
    assert!(missing.contains("slices.csv: it is missing: the run was damaged"), "{missing}");
    fs::create_dir(&list).unwrap();
    assert!(Run::open(&path).unwrap().slices().is_err());
}
