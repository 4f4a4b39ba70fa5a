//! Records a real SPDK target and real SPDK hosts, if `SPDK_BUILD` names the `build` folder of one.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's way to fail")]

mod common;

use std::os::unix::net::UnixStream;
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant};

use common::nvmf::{NQN, Nvmf, build, malloc, rpc};
use common::standin::Running;
use common::{Kept, assert_has, assert_ordered, poll_until, stop};
use run_format::{Boundary, Command, Side, Source};
use serde_json::{Value, json};
use spdk_probes::resolve::Binary;
use spdk_probes::{Choice, Detail, Host, Options, Target, find};

/// Records a target while perf sends exactly `ios` commands.
fn record_target(
    nvmf: &Nvmf,
    options: &Options,
    ios: u64,
    arguments: &[&str],
) -> (Kept, run_format::Counters) {
    let mut target = nvmf.attach(options);
    let mut kept = Kept::default();
    let ios_text = ios.to_string();
    let mut perf = Running(nvmf.perf(&[arguments, &["-d", &ios_text, "-t", "60"]].concat()).spawn().unwrap());
    while perf.0.try_wait().unwrap().is_none() {
        target.poll(Duration::from_millis(50), &mut kept).unwrap();
    }
    poll_until(&mut target, &mut kept, Duration::from_millis(300), |_| false);
    let counters = stop(&mut target, &mut kept);
    (kept, counters)
}

const READ: &[Boundary] =
    &[Boundary::TRecv, Boundary::TSubmit, Boundary::TDone, Boundary::TResp, Boundary::TSent];
const R2T_WRITE: &[Boundary] = &[Boundary::TR2t, Boundary::TData];

fn check_target(kept: &Kept, expected: &[Boundary], bytes: u32, opcode: u8, r2ts: u8) {
    for command in &kept.commands {
        assert_has(command, expected);
        assert_ordered(Side::Target, command);
        assert_eq!((command.opcode, command.bytes, command.status), (opcode, bytes, 0), "{command:?}");
        assert_eq!(command.nlb0, (bytes / 512 - 1) as u16);
        assert_eq!(command.r2ts, r2ts, "{command:?}");
        let queue = kept.queue_of(command);
        assert_eq!(queue.subsystem_nqn, NQN);
        assert_ne!(queue.qid, 0);
        assert_eq!(queue.target.as_ref().unwrap().address, "127.0.0.1");
        assert_ne!(queue.host.as_ref().unwrap().port, 0);
        assert!(queue.served_by.is_some() && !queue.existed && queue.went.is_some(), "{queue:?}");
    }
}

#[test]
fn a_target_s_reads_and_writes_are_all_recorded_with_every_boundary() {
    let Some((build, _one)) = build() else { return };
    let nvmf = Nvmf::start(&build, "0x1", &malloc());
    for depth in ["1", "32"] {
        let (kept, counters) =
            record_target(&nvmf, &Options::default(), 2000, &["-q", depth, "-o", "4096", "-w", "randread"]);
        assert_eq!((counters.seen, counters.recorded), (2000, 2000), "{counters:?}");
        check_target(&kept, READ, 4096, 2, 0);
        let (kept, counters) =
            record_target(&nvmf, &Options::default(), 2000, &["-q", depth, "-o", "4096", "-w", "randwrite"]);
        assert_eq!((counters.seen, counters.recorded), (2000, 2000), "{counters:?}");
        check_target(&kept, READ, 4096, 1, 0);
        assert!(kept.commands.iter().all(|command| command.time(Boundary::TData).is_none()));
        let (kept, counters) =
            record_target(&nvmf, &Options::default(), 500, &["-q", depth, "-o", "131072", "-w", "randwrite"]);
        assert_eq!((counters.seen, counters.recorded), (500, 500), "{counters:?}");
        check_target(&kept, &[READ, R2T_WRITE].concat(), 131_072, 1, 1);
    }
}

#[test]
fn one_in_n_is_kept_and_all_are_counted_on_two_reactors() {
    let Some((build, _one)) = build() else { return };
    let nvmf = Nvmf::start(&build, "0x3", &malloc());
    let options = Options { one_in: 8, ..Options::default() };
    let (kept, counters) =
        record_target(&nvmf, &options, 8000, &["-q", "16", "-P", "2", "-o", "4096", "-w", "randread"]);
    assert_eq!(counters.seen, 8000, "{counters:?}");
    assert_eq!(counters.unsampled + counters.recorded, 8000, "{counters:?}");
    let limit = run_format::bpf::sampling_limit(8);
    for c in &kept.commands {
        assert!(run_format::bpf::sampled(limit, c.cid, c.opcode, c.nsid, c.slba, c.nlb0));
    }
    // Six standard deviations of a binomial.
    assert!((counters.recorded as f64 - 1000.0).abs() < 6.0 * 1000f64.sqrt(), "{counters:?}");
    check_target(&kept, READ, 4096, 2, 0);
}

#[test]
fn a_delay_in_the_bdev_is_storage_s_alone() {
    let Some((build, _one)) = build() else { return };
    let delay = 2000;
    let nvmf = Nvmf::start(
        &build,
        "0x1",
        &[
            ("bdev_malloc_create", json!({"name": "Base0", "num_blocks": 131_072, "block_size": 512})),
            (
                "bdev_delay_create",
                json!({"name": "Delay0", "base_bdev_name": "Base0", "avg_read_latency": delay,
                    "p99_read_latency": delay, "avg_write_latency": delay, "p99_write_latency": delay}),
            ),
        ],
    );
    let (kept, counters) =
        record_target(&nvmf, &Options::default(), 300, &["-q", "1", "-o", "4096", "-w", "randread"]);
    assert_eq!((counters.seen, counters.recorded), (300, 300), "{counters:?}");
    check_target(&kept, READ, 4096, 2, 0);
    let mut storage: Vec<u64> = kept
        .commands
        .iter()
        .map(|c| c.time(Boundary::TDone).unwrap().0 - c.time(Boundary::TSubmit).unwrap().0)
        .collect();
    storage.sort_unstable();
    assert!(storage[0] >= delay * 1000, "{storage:?}");
}

#[test]
fn a_target_is_recorded_in_the_middle_of_its_work_and_left_alone_afterwards() {
    let Some((build, _one)) = build() else { return };
    let nvmf = Nvmf::start(
        &build,
        "0x1",
        &[("bdev_null_create", json!({"name": "Null0", "num_blocks": 131_072, "block_size": 512}))],
    );
    // It lasts until it is told to end, however long attaching takes on a busy machine.
    let mut perf =
        Running(nvmf.perf(&["-q", "32", "-o", "4096", "-w", "randread", "-t", "600"]).spawn().unwrap());
    let completed = || -> u64 {
        let stats = nvmf.rpc("nvmf_get_stats", Value::Null);
        let groups = stats["poll_groups"].as_array().unwrap();
        groups.iter().filter_map(|group| group["completed_nvme_io"].as_u64()).sum()
    };
    let progresses = || {
        let (before, began) = (completed(), Instant::now());
        while completed() < before + 1000 {
            assert!(began.elapsed() < Duration::from_secs(60), "nothing is completed");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    progresses();
    // So large that a reader which is kept from its core does not fill it.
    let options = Options { ring_bytes: 128 << 20, ..Options::default() };
    for _ in 0..2 {
        let mut target = nvmf.attach(&options);
        let mut kept = Kept::default();
        assert!(poll_until(&mut target, &mut kept, Duration::from_secs(60), |k| k.commands.len() > 500));
        let counters = stop(&mut target, &mut kept);
        assert_eq!(counters.lost.total(), 0, "{counters:?}");
        assert!(counters.no_start <= 32, "{counters:?}");
        assert!(counters.in_flight <= 32, "{counters:?}");
        assert!(kept.queues.iter().all(|queue| queue.existed && queue.went.is_none()), "{:?}", kept.queues);
        for command in &kept.commands {
            assert_has(command, READ);
            assert_ordered(Side::Target, command);
        }
        assert!(!target.ended());
        // It goes on without the probes.
        drop(target);
        progresses();
    }
    assert!(perf.0.try_wait().unwrap().is_none());
    // SAFETY: the process is this one's child and has not been waited for, so that the number is its own.
    assert_eq!(unsafe { libc::kill(perf.0.id().cast_signed(), libc::SIGINT) }, 0);
    assert!(perf.0.wait().unwrap().success());
    // The target still works, and its end is seen.
    nvmf.rpc("spdk_get_version", Value::Null);
    let target = nvmf.attach(&Options::default());
    drop(nvmf);
    assert!(target.ended());
}

#[test]
fn a_stripped_target_is_recorded_with_a_layout_file_or_its_debug_file() {
    let Some((build, _one)) = build() else { return };
    let folder = tempfile::tempdir().unwrap();
    let programs = folder.path().join("bin");
    std::fs::create_dir(&programs).unwrap();
    let (whole, stripped) = (build.join("bin/nvmf_tgt"), programs.join("nvmf_tgt"));
    let (layout, debug_file) = (folder.path().join("layout.json"), folder.path().join("nvmf_tgt.debug"));
    for (tool, how, to) in [("strip", "-s", &stripped), ("objcopy", "--only-keep-debug", &debug_file)] {
        let mut command = Process::new(tool);
        command.arg(how);
        if tool == "strip" {
            command.arg("-o").arg(to).arg(&whole);
        } else {
            command.arg(&whole).arg(to);
        }
        if !command.status().is_ok_and(|status| status.success()) {
            println!("skipped: {tool} is not installed");
            return;
        }
    }
    std::os::unix::fs::symlink(build.join("bin/spdk_nvme_perf"), programs.join("spdk_nvme_perf")).unwrap();
    Binary::open(&whole, None).unwrap().layout().unwrap().save(&layout).unwrap();

    let nvmf = Nvmf::start(folder.path(), "0x1", &malloc());
    let process = find(Side::Target, &Choice::Pid(nvmf.pid())).unwrap();
    let error = Target::attach(&process, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("is stripped") && error.contains("--debug-file"), "{error}");
    for options in [
        Options { layout: Some(layout), ..Options::default() },
        Options { debug_file: Some(debug_file), ..Options::default() },
    ] {
        let (kept, counters) =
            record_target(&nvmf, &options, 500, &["-q", "4", "-o", "131072", "-w", "randwrite"]);
        assert_eq!((counters.seen, counters.recorded), (500, 500), "{counters:?}");
        check_target(&kept, &[READ, R2T_WRITE].concat(), 131_072, 1, 1);
    }
}

fn check_host(kept: &Kept, command: &Command) {
    assert_has(
        command,
        &[Boundary::HQueued, Boundary::HDriver, Boundary::HSent, Boundary::HRecv, Boundary::HDone],
    );
    assert_ordered(Side::Host, command);
    assert_eq!(command.status, 0);
    let queue = kept.queue_of(command);
    assert_eq!(queue.subsystem_nqn, NQN);
    assert_ne!(queue.qid, 0);
    assert_eq!(queue.target.as_ref().unwrap().address, "127.0.0.1");
    assert_ne!(queue.host.as_ref().unwrap().port, 0);
}

#[test]
fn perf_is_recorded_as_a_host() {
    let Some((build, _one)) = build() else { return };
    let nvmf = Nvmf::start(&build, "0x1", &malloc());
    for (size, kind, bytes, r2ts) in
        [("4096", "randread", 4096, 0), ("4096", "randwrite", 4096, 0), ("131072", "randwrite", 131_072, 1)]
    {
        for (depth, detail) in [("1", Detail::Stages), ("32", Detail::Full)] {
            let perf = nvmf.perf(&["-q", depth, "-o", size, "-w", kind, "-t", "6"]).spawn().unwrap();
            let perf = Running(perf);
            std::thread::sleep(Duration::from_millis(1500));
            let process = find(Side::Host, &Choice::Pid(perf.0.id())).unwrap();
            let mut host = Host::attach(&process, &Options { detail, ..Options::default() }).unwrap();
            let mut kept = Kept::default();
            poll_until(&mut host, &mut kept, Duration::from_secs(30), |_| process.ended());
            let counters = stop(&mut host, &mut kept);
            println!("{kind} {size} at {depth}: {counters:?}");
            assert!(counters.recorded > 50, "{counters:?}");
            assert_eq!(counters.lost.total(), 0, "{counters:?}");
            for command in &kept.commands {
                check_host(&kept, command);
                assert_eq!((command.bytes, command.r2ts), (bytes, r2ts), "{command:?}");
                assert_eq!(command.time(Boundary::HEnd).is_some(), detail == Detail::Full, "{command:?}");
                if r2ts > 0 {
                    assert_has(command, &[Boundary::HR2t, Boundary::HDataSent]);
                    let waited = command.time(Boundary::HDataSent).unwrap().0
                        - command.time(Boundary::HR2t).unwrap().0;
                    assert_eq!(command.r2t_turnaround.unwrap().0, waited);
                }
            }
        }
    }
}

#[test]
fn bdevperf_is_recorded_from_its_bdev_layer_on_and_every_command_is_there() {
    let Some((build, _one)) = build() else { return };
    let nvmf = Nvmf::start(&build, "0x1", &malloc());
    let socket = nvmf.folder.path().join("bdevperf.sock");
    let bdevperf = Process::new(build.join("examples/bdevperf"))
        .args([
            "--no-huge",
            "-s",
            "512",
            "-m",
            "0x2",
            "-z",
            "-q",
            "4",
            "-o",
            "4096",
            "-w",
            "randrw",
            "-M",
            "50",
            "-t",
            "3",
        ])
        .arg("-r")
        .arg(&socket)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let bdevperf = Running(bdevperf);
    let began = Instant::now();
    while UnixStream::connect(&socket).is_err() {
        assert!(began.elapsed() < Duration::from_secs(60), "bdevperf does not start");
        std::thread::sleep(Duration::from_millis(100));
    }
    rpc(
        &socket,
        "bdev_nvme_attach_controller",
        json!({"name": "Nvme0", "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1",
            "trsvcid": nvmf.port.to_string(), "subnqn": NQN}),
    );
    let process = find(Side::Host, &Choice::Pid(bdevperf.0.id())).unwrap();
    let mut host = Host::attach(&process, &Options::default()).unwrap();
    let mut target = nvmf.attach(&Options::default());
    let (mut kept, mut there) = (Kept::default(), Kept::default());
    let test = std::thread::spawn({
        let socket = socket.clone();
        move || rpc(&socket, "perform_tests", Value::Null)
    });
    while !test.is_finished() {
        host.poll(Duration::from_millis(20), &mut kept).unwrap();
        target.poll(Duration::from_millis(20), &mut there).unwrap();
    }
    test.join().unwrap();
    drop(bdevperf);
    poll_until(&mut target, &mut there, Duration::from_millis(300), |_| false);
    let (ours, theirs) = (stop(&mut host, &mut kept), stop(&mut target, &mut there));
    println!("host {ours:?}\ntarget {theirs:?}");
    assert!(ours.recorded > 100);
    assert_eq!((ours.recorded, ours.lost.total()), (theirs.recorded, theirs.lost.total()));
    for command in &kept.commands {
        check_host(&kept, command);
        assert_has(command, &[Boundary::HEnd]);
    }
    // Both sides name the same connections.
    for queue in &kept.queues {
        assert!(
            there.queues.iter().any(|q| q.host == queue.host
                && q.target == queue.target
                && (q.cntlid, q.qid, &q.host_nqn) == (queue.cntlid, queue.qid, &queue.host_nqn)),
            "{queue:#?} is not among {:#?}",
            there.queues
        );
    }
}
