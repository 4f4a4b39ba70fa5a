//! Records the stand-in target and the stand-in initiator, as any machine can.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's way to fail")]

mod common;

use std::process::Command as Process;
use std::time::Duration;

use common::standin::{Both, Running, Standin, program, record};
use common::{Kept, assert_has, assert_ordered, poll_until, stop};
use run_format::{Boundary, Side, Source};
use spdk_probes::{Avoid, Choice, Detail, Error, Options, Target, find, survey, survey_program};

/// Reads, in-capsule writes, one R2T, several R2Ts, and commands without data.
const LOADS: &[(&str, &str, u8, u32, u8)] = &[
    ("randread", "4K", 2, 4096, 0),
    ("randwrite", "4K", 1, 4096, 0),
    ("randwrite", "32K", 1, 32768, 2),
    ("flush", "4K", 0, 0, 0),
    ("write-zeroes", "4K", 8, 0, 0),
];

#[test]
fn every_command_is_recorded_on_both_sides_with_every_boundary() {
    let standin = Standin::start(&["--r2t-bytes", "16K", "--reactors", "2"]);
    for &(load, size, opcode, bytes, r2ts) in LOADS {
        for depth in ["1", "16"] {
            let arguments = [
                "--rw",
                load,
                "--block-size",
                size,
                "--count",
                "400",
                "--queue-depth",
                depth,
                "--queues",
                "2",
            ];
            let options = Options { detail: Detail::Full, ..Options::default() };
            let Both { host: (here, ours), target: (there, theirs) } = record(&standin, &options, &arguments);
            assert_eq!((ours.seen, ours.recorded), (theirs.seen, theirs.recorded), "{ours:?} {theirs:?}");
            assert!(ours.recorded == 400 || ours.recorded == 800, "{load}: {ours:?}");
            for command in &there.commands {
                let queue = there.queue_of(command);
                assert_has(command, &[Boundary::TRecv, Boundary::TDone, Boundary::TResp, Boundary::TSent]);
                assert_ordered(Side::Target, command);
                assert_eq!(
                    (command.opcode, command.bytes, command.r2ts),
                    (opcode, bytes, r2ts),
                    "{command:?}"
                );
                let waits = r2ts > 0;
                assert_eq!(command.time(Boundary::TR2t).is_some(), waits, "{command:?}");
                assert_eq!(command.time(Boundary::TData).is_some(), waits, "{command:?}");
                assert!(queue.subsystem_nqn.ends_with("standin1"), "{queue:?}");
                assert!(queue.host_nqn.ends_with("standin-host"), "{queue:?}");
            }
            for command in &here.commands {
                assert_has(
                    command,
                    &[
                        Boundary::HQueued,
                        Boundary::HDriver,
                        Boundary::HSent,
                        Boundary::HRecv,
                        Boundary::HDone,
                        Boundary::HEnd,
                    ],
                );
                assert_ordered(Side::Host, command);
                assert_eq!(
                    (command.opcode, command.bytes, command.r2ts),
                    (opcode, bytes, r2ts),
                    "{command:?}"
                );
                let other = there
                    .queues
                    .iter()
                    .find(|queue| queue.host == here.queue_of(command).host)
                    .expect("the target saw the same connection");
                let own = here.queue_of(command);
                assert_eq!(
                    (own.cntlid, own.qid, &own.host_nqn, &own.subsystem_nqn, &own.target),
                    (other.cntlid, other.qid, &other.host_nqn, &other.subsystem_nqn, &other.target)
                );
            }
        }
    }
}

#[test]
fn the_rungs_below_the_best_ones_work_as_well() {
    let standin = Standin::start(&["--in-capsule", "4K"]);
    let kernel = [Avoid::Trampolines, Avoid::RawTracepoints];
    for (more, hook) in [
        (&[][..], "call sendmsg"),
        (&[Avoid::MultiUprobes][..], "call sendmsg"),
        (&[Avoid::SystemCallUprobes][..], "syscalls:sys_enter_sendmsg"),
    ] {
        let options = Options { avoid: [&kernel[..], more].concat(), ..Options::default() };
        let process = find(Side::Target, &Choice::Pid(standin.process.0.id())).unwrap();
        let chosen = survey(&process, Side::Target, &options).unwrap().hooks();
        let sent = chosen.iter().find(|hook| hook.boundary == Boundary::TSent).unwrap();
        let Some(name) = &sent.hook else {
            println!("skipped {hook}: {}", sent.why.as_ref().unwrap());
            continue;
        };
        assert!(name.contains(hook), "{sent:?}");
        let arguments = ["--rw", "randwrite", "--block-size", "16K", "--count", "200", "--queue-depth", "4"];
        let Both { host: (here, ours), target: (there, theirs) } = record(&standin, &options, &arguments);
        assert_eq!((ours.recorded, theirs.recorded), (200, 200), "{ours:?} {theirs:?}");
        for command in &there.commands {
            assert_has(
                command,
                &[Boundary::TRecv, Boundary::TR2t, Boundary::TData, Boundary::TSubmit, Boundary::TSent],
            );
            assert_ordered(Side::Target, command);
        }
        for command in &here.commands {
            assert_has(command, &[Boundary::HSent, Boundary::HR2t, Boundary::HDataSent, Boundary::HDone]);
            assert_eq!(command.time(Boundary::HRecv), None);
            assert_ordered(Side::Host, command);
        }
    }
}

#[test]
fn both_sides_keep_the_same_commands_of_a_sample() {
    let standin = Standin::start(&[]);
    let options = Options { one_in: 4, ..Options::default() };
    let both = record(&standin, &options, &["--count", "2000", "--queue-depth", "8"]);
    let ((here, ours), (there, theirs)) = (both.host, both.target);
    assert_eq!((ours.seen, theirs.seen), (2000, 2000));
    assert!((300..700).contains(&ours.recorded), "{ours:?}");
    let key = |c: &run_format::Command| (c.cid, c.opcode, c.nsid, c.slba, c.nlb0);
    let mut left: Vec<_> = here.commands.iter().map(key).collect();
    let mut right: Vec<_> = there.commands.iter().map(key).collect();
    left.sort_unstable();
    right.sort_unstable();
    assert_eq!(left, right);
}

#[test]
fn a_pause_and_the_end_of_a_connection_are_told() {
    let standin = Standin::start(&[]);
    let mut target = standin.attach(&Options::default());
    let mut initiator = standin.initiator(&["--count", "50"]);
    let mut kept = Kept::default();
    let nqn = "nqn.2024-01.io.fabscope:standin1";
    assert_eq!(standin.control(&format!("pause {nqn}")), "ok");
    initiator.go();
    poll_until(&mut target, &mut kept, Duration::from_millis(300), |_| false);
    assert_eq!(standin.control(&format!("resume {nqn}")), "ok");
    while !initiator.has_ended() {
        target.poll(Duration::from_millis(10), &mut kept).unwrap();
    }
    poll_until(&mut target, &mut kept, Duration::from_millis(300), |_| false);
    stop(&mut target, &mut kept);
    let what: Vec<(&str, &str)> = kept.events.iter().map(|e| (e.what.as_str(), e.on.as_str())).collect();
    for expected in [("subsystem pause", nqn), ("subsystem resume", nqn)] {
        assert!(what.contains(&expected), "{expected:?} is not among {what:?}");
    }
    assert!(what.iter().any(|(what, _)| *what == "qpair disconnect"), "{what:?}");
    assert!(kept.queues.iter().all(|queue| queue.went.is_some()), "{:?}", kept.queues);
    // The paused commands waited where a pause holds them: before storage.
    let longest = kept
        .commands
        .iter()
        .map(|c| c.time(Boundary::TSubmit).unwrap().0 - c.time(Boundary::TRecv).unwrap().0)
        .max();
    assert!(longest > Some(100_000_000), "{longest:?}");
}

#[test]
fn a_connection_that_dies_leaves_no_command_unaccounted_for() {
    let standin = Standin::start(&["--delay", "storage=200ms"]);
    let mut target = standin.attach(&Options::default());
    let mut initiator = standin.initiator(&["--count", "100000", "--queue-depth", "8"]);
    let mut kept = Kept::default();
    initiator.go();
    poll_until(&mut target, &mut kept, Duration::from_secs(5), |kept| !kept.commands.is_empty());
    initiator.process.0.kill().unwrap();
    initiator.process.0.wait().unwrap();
    // Longer than the grace after which a dead queue's commands are given up.
    poll_until(&mut target, &mut kept, Duration::from_secs(3), |_| false);
    let counters = stop(&mut target, &mut kept);
    assert_eq!(counters.in_flight, 0, "{counters:?}");
    assert!(counters.lost.unfinished > 0 && counters.lost.unfinished <= 8, "{counters:?}");
}

#[test]
fn attaching_takes_less_than_a_second_of_processor_time() {
    let standin = Standin::start(&[]);
    let cpu = || {
        let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
        let micros = |t: nix::sys::time::TimeVal| t.tv_sec() * 1_000_000 + t.tv_usec();
        micros(usage.user_time()) + micros(usage.system_time())
    };
    let before = cpu();
    let target = standin.attach(&Options::default());
    let taken = cpu() - before;
    drop(target);
    println!("attached in {taken} us of processor time");
    assert!(taken < 1_000_000, "{taken} us");
}

/// Names the process to attach to in [`without_rights`].
const WITHOUT_RIGHTS: &str = "FABSCOPE_TEST_WITHOUT_RIGHTS";

#[test]
fn who_may_not_record_is_told_what_is_missing() {
    let standin = Standin::start(&[]);
    for (dropped, says) in [
        ("-all", "not allowed to read the program of another process"),
        ("-bpf,-sys_admin", "missing CAP_BPF"),
    ] {
        let output = Process::new("setpriv")
            .args(["--bounding-set", dropped, "--inh-caps", dropped])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "without_rights", "--ignored", "--nocapture"])
            .env(WITHOUT_RIGHTS, standin.process.0.id().to_string())
            .output();
        let Ok(output) = output else {
            println!("skipped: setpriv is not installed");
            return;
        };
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            text.contains(says) && text.contains("root has not the right to here"),
            "{dropped}: {output:?}"
        );
    }
}

#[test]
#[ignore = "run with fewer rights, by the test above"]
fn without_rights() {
    let pid = std::env::var(WITHOUT_RIGHTS).expect("the process to attach to").parse().unwrap();
    let attached = find(Side::Target, &Choice::Pid(pid))
        .and_then(|process| Target::attach(&process, &Options::default()));
    println!("{}", attached.unwrap_err());
}

#[test]
fn a_program_that_is_not_spdk_is_told_so() {
    let mut sleep = Running(Process::new("sleep").arg("60").spawn().unwrap());
    let process = find(Side::Target, &Choice::Pid(sleep.0.id())).unwrap();
    let error = Target::attach(&process, &Options::default()).unwrap_err();
    assert!(matches!(error, Error::NotSpdk { .. } | Error::WrongProgram { .. }), "{error}");
    assert!(error.to_string().contains(&sleep.0.id().to_string()), "{error}");
    sleep.0.kill().unwrap();
    sleep.0.wait().unwrap();
    let error = Target::attach(&process, &Options::default()).unwrap_err();
    assert!(matches!(error, Error::ProcessEnded { .. }), "{error}");

    // The initiator is SPDK-like, but no target.
    let error = survey_program(&program("standin-initiator"), Side::Target, &Options::default()).unwrap_err();
    assert!(matches!(&error, Error::WrongProgram { .. }), "{error}");
    assert!(error.to_string().contains("nvmf_tgt"), "{error}");
}

#[test]
fn several_targets_are_listed_and_a_survey_shows_every_rung() {
    let (one, two) = (Standin::start(&[]), Standin::start(&[]));
    let error = find(Side::Target, &Choice::Path(program("standin-target"))).map(|p| p.pid).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::SeveralProcesses { .. }), "{text}");
    for standin in [&one, &two] {
        assert!(text.contains(&standin.process.0.id().to_string()), "{text}");
    }
    let process = find(Side::Target, &Choice::Pid(one.process.0.id())).unwrap();
    let survey = survey(&process, Side::Target, &Options::default()).unwrap();
    let hooks = survey.hooks();
    assert_eq!(
        hooks.iter().map(|hook| hook.boundary).collect::<Vec<_>>(),
        Boundary::of(Side::Target).collect::<Vec<_>>()
    );
    for hook in &hooks {
        assert!(hook.hook.is_some() && hook.estimated_ns.is_some_and(|ns| ns < 1000), "{hook:?}");
    }
    let sent = survey.boundaries.iter().find(|b| b.boundary == Boundary::TSent).unwrap();
    assert!(sent.rungs.len() >= 4, "{sent:?}");
}
