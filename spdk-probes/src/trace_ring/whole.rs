//! Tests of the whole source against a process that looks like a target, without SPDK: switching, following, decoding,
//! overruns, windows, what goes wrong, and what is put back.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use run_format::{Boundary, Command, Counters, Nanos, Operation, Source, monotonic_now};
use serde_json::json;

use self::kept::Kept;
use super::assemble::NO_CNTLID;
use super::fake::{Fake, Plan, Wrong, call};
use super::layout::Generation;
use super::note::Note;
use super::{LEFT_ON, TraceOptions, TraceTarget, ring_usable};
use crate::Error;

#[path = "../../tests/common/kept.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod kept;

const ALL: [Generation; 3] = [Generation::Flags, Generation::File, Generation::Sections];
const WHILE: Duration = Duration::from_millis(400);
/// nvmf_tcp's NEW, READY, EXECUTED, AWAIT_R2T_ACK and DISCONNECT, as the fake numbers them since 24.09.
const MINIMUM: u64 = 1 | 1 << 6 | 1 << 9 | 1 << 16 | 1 << 20;

fn attach(fake: &Fake) -> Result<TraceTarget, Error> {
    let options = TraceOptions { rpc: Some(fake.socket.clone()), identities: None };
    TraceTarget::attach(&fake.process(), &options)
}

fn poll(source: &mut TraceTarget, kept: &mut Kept, length: Duration) -> Result<(), Error> {
    let until = Instant::now() + length;
    while Instant::now() < until {
        source.poll(Duration::from_millis(10), kept)?;
    }
    Ok(())
}

/// Fails unless the counters add up and are those of what was handed over.
fn exact(source: &TraceTarget, kept: &Kept) -> Counters {
    let counters = source.counters().unwrap();
    assert_eq!(counters.recorded, kept.commands.len() as u64, "{counters:?}");
    let sum = counters.recorded + counters.unsampled + counters.lost.total() + counters.in_flight;
    assert_eq!(counters.seen, sum, "{counters:?}");
    counters
}

/// Fails unless each command is one that the fake made, and none comes twice. Returns their numbers, in order.
fn honest(kept: &Kept) -> Vec<u64> {
    let mut seen = HashSet::new();
    for command in &kept.commands {
        let n = command.slba / 8;
        assert!(seen.insert(n), "{n} comes twice");
        assert_eq!(command.slba % 8, 0);
        let operation = if n % 2 == 0 { Operation::Read } else { Operation::Write };
        assert_eq!(Operation::of(command.opcode), operation);
        assert_eq!((command.nlb0, command.nsid, command.bytes), (7, 3, 4096), "{n}");
        assert_eq!((command.flags, command.r2ts), (Command::NO_CID, u8::from(n % 4 == 3)), "{n}");
        let mut way = vec![Boundary::TRecv];
        if n % 4 == 3 {
            way.extend([Boundary::TR2t, Boundary::TData]);
        }
        way.extend([Boundary::TSubmit, Boundary::TDone, Boundary::TResp]);
        let times: Option<Vec<Nanos>> = way.iter().map(|boundary| command.time(*boundary)).collect();
        assert!(times.as_ref().is_some_and(|times| times.is_sorted()), "{n}: {times:?}");
    }
    let mut numbers: Vec<u64> = seen.into_iter().collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn every_command_of_every_layout_is_recorded_and_the_masks_are_put_back() {
    for generation in ALL {
        let mut fake = Fake::start(&Plan::new(generation));
        // Somebody has switched on what is wanted, and what is not.
        for (group, bits) in [("bdev", 0b10), ("sock", 0b101)] {
            call(&fake.socket, "trace_set_tpoint_mask", json!({ "name": group, "tpoint_mask": bits }));
        }
        assert_eq!(fake.masks(), [0b10, 0, 0b101]);
        let from = monotonic_now();
        let mut source = attach(&fake).unwrap();
        let on = fake.masks();
        assert_eq!((on[0], on[2]), (0b11, 0b101), "{on:x?}");
        if generation == Generation::Flags {
            assert_eq!(on[1], 1 | 1 << 5 | 1 << 8 | 1 << 16 | 1 << 20, "{on:x?}");
        } else {
            assert_eq!(on[1], MINIMUM, "{on:x?}");
        }
        let mut kept = Kept::default();
        let before = fake.written();
        poll(&mut source, &mut kept, WHILE).unwrap();
        let after = fake.written();
        source.stop(&mut kept).unwrap();
        assert_eq!(fake.masks(), [0b10, 0, 0b101]);
        let to = monotonic_now();

        let counters = exact(&source, &kept);
        let numbers = honest(&kept);
        if counters.lost.overwritten == 0 {
            // One can be under way, if its writer is kept from its core for long.
            assert!(counters.lost.total() == 0 && counters.in_flight <= 1, "{counters:?}");
            // Every one between two moments, one after the other.
            assert!(numbers.windows(2).all(|two| two[1] == two[0] + 1), "{generation:?}");
            assert!(*numbers.first().unwrap() <= before && *numbers.last().unwrap() + 1 >= after);
        } else {
            println!("skipped: this machine is so busy that the ring was overrun");
        }
        let [queue] = kept.queues.as_slice() else { panic!("{:?}", kept.queues) };
        assert_eq!((queue.cntlid, queue.qid, queue.subsystem_nqn.as_str()), (7, 1, "nqn.a"));
        let times = kept.commands.iter().flat_map(|command| command.times.iter().flatten());
        assert!(times.clone().all(|time| (from.0..to.0).contains(&time.0)), "{from:?} {to:?}");
        // Within a machine nothing says when a response was sent.
        assert!(kept.commands.iter().all(|command| command.time(Boundary::TSent).is_none()));
        let hooks = source.hooks();
        let named = |boundary| hooks.iter().find(|hook| hook.boundary == boundary).unwrap().clone();
        assert_eq!(named(Boundary::TSubmit).hook.as_deref(), Some("trace ring BDEV_IO_START"));
    }
}

/// A release that may end when it is asked for its connections is not asked; the ring tells the host's end.
#[test]
fn a_target_is_not_asked_what_it_may_not_survive() {
    let plan = Plan { release: (24, 9), ..Plan::new(Generation::File) };
    let mut fake = Fake::start(&plan);
    let process = fake.process();
    let mut source = attach(&fake).unwrap();
    let mut kept = Kept::default();
    poll(&mut source, &mut kept, WHILE).unwrap();
    source.stop(&mut kept).unwrap();
    assert_eq!(fake.masks(), [0, 0, 0]);
    assert!(!process.ended() && honest(&kept).len() > 100);
    let [queue] = kept.queues.as_slice() else { panic!("{:?}", kept.queues) };
    assert_eq!((queue.cntlid, queue.subsystem_nqn.as_str()), (NO_CNTLID, "nqn.a"));
    assert_eq!(queue.host.as_ref().unwrap().port, 4001);
}

#[test]
fn what_leaves_the_machine_is_recorded_to_its_sending() {
    for generation in [Generation::File, Generation::Sections] {
        let mut fake = Fake::start(&Plan { peer: "192.0.2.7".to_owned(), ..Plan::new(generation) });
        let mut source = attach(&fake).unwrap();
        assert_eq!(fake.masks(), [0b11, MINIMUM | 1 << 13, 0b10]);
        let mut kept = Kept::default();
        poll(&mut source, &mut kept, WHILE).unwrap();
        source.stop(&mut kept).unwrap();
        assert_eq!(fake.masks(), [0, 0, 0]);
        exact(&source, &kept);
        assert!(!honest(&kept).is_empty());
        for command in &kept.commands {
            assert!(command.time(Boundary::TSent) >= command.time(Boundary::TResp), "{command:?}");
        }
    }
}

#[test]
fn a_ring_that_is_overrun_again_and_again_tells_what_it_lost() {
    for generation in ALL {
        let mut fake = Fake::start(&Plan { entries: 64, rate: 40_000, ..Plan::new(generation) });
        let mut source = attach(&fake).unwrap();
        let mut kept = Kept::default();
        let before = fake.written();
        poll(&mut source, &mut kept, WHILE).unwrap();
        // Nothing is under way when it stops.
        fake.tell("rate 0");
        let after = fake.written();
        source.stop(&mut kept).unwrap();
        let counters = exact(&source, &kept);
        let numbers = honest(&kept);
        assert!(counters.lost.overwritten > 0, "{counters:?}");
        assert!(!numbers.is_empty());
        // Every command that it does not have is one that it says it lost.
        let lost = counters.lost.overwritten + counters.recorded;
        assert!((after - before..=after).contains(&lost), "{before} {after} {counters:?}");
        let told = |what: &str| kept.events.iter().filter(|event| event.what == what).count();
        assert!(told("trace ring overrun begins") > 0);
        assert_eq!(told("trace ring overrun begins"), told("trace ring overrun ends"));
        assert_eq!(fake.masks(), [0, 0, 0]);
    }
}

#[test]
fn between_two_windows_nothing_is_recorded_and_nothing_is_switched_on() {
    let mut fake = Fake::start(&Plan::new(Generation::Sections));
    let mut source = attach(&fake).unwrap();
    let mut kept = Kept::default();
    let mut slices = Vec::new();
    for n in 0..3 {
        if n > 0 {
            assert!(source.arm().unwrap());
        }
        let from = monotonic_now();
        assert_eq!(fake.masks(), [0b11, MINIMUM, 0]);
        poll(&mut source, &mut kept, WHILE / 4).unwrap();
        source.disarm(&mut kept).unwrap();
        assert_eq!(fake.masks(), [0, 0, 0]);
        slices.push((from, monotonic_now()));
        poll(&mut source, &mut kept, WHILE / 4).unwrap();
    }
    source.disarm(&mut kept).unwrap();
    source.stop(&mut kept).unwrap();
    let counters = exact(&source, &kept);
    let numbers = honest(&kept);
    assert_eq!(counters.lost.total(), 0, "{counters:?}");
    let gaps = numbers.windows(2).filter(|two| two[1] != two[0] + 1).count();
    assert_eq!(gaps, 2, "{counters:?}");
    let idle = kept.commands.iter().filter(|command| {
        let (from, to) = (command.time(Boundary::TRecv).unwrap(), command.time(Boundary::TResp).unwrap());
        // Arming takes a while, in which the first have been switched on.
        slices.windows(2).any(|two| from > two[0].1 && Nanos(to.0 + 50_000_000) < two[1].0)
    });
    assert_eq!(idle.count(), 0);
}

/// The tracepoints that recordings share go off with the last of them, and a windowed one takes none away from the
/// others, and nothing of theirs.
#[test]
fn recordings_of_one_target_do_each_other_no_harm() {
    for windowed_ends_first in [true, false] {
        let mut fake = Fake::start(&Plan::new(Generation::Sections));
        let on = [0b11, MINIMUM, 0];
        let mut whole = (attach(&fake).unwrap(), Kept::default());
        let mut windowed = (attach(&fake).unwrap(), Kept::default());
        let both = |whole: &mut (TraceTarget, Kept), windowed: &mut (TraceTarget, Kept)| {
            for _ in 0..10 {
                poll(&mut whole.0, &mut whole.1, WHILE / 80).unwrap();
                poll(&mut windowed.0, &mut windowed.1, WHILE / 80).unwrap();
            }
        };
        let from = fake.written();
        let mut idle = Vec::new();
        for _ in 0..3 {
            both(&mut whole, &mut windowed);
            windowed.0.disarm(&mut windowed.1).unwrap();
            assert_eq!(fake.masks(), on);
            let away = monotonic_now();
            both(&mut whole, &mut windowed);
            idle.push((away, monotonic_now()));
            assert!(windowed.0.arm().unwrap());
            assert_eq!(fake.masks(), on);
        }
        both(&mut whole, &mut windowed);
        let upto = fake.written();
        let (first, last) =
            if windowed_ends_first { (&mut windowed, &mut whole) } else { (&mut whole, &mut windowed) };
        first.0.stop(&mut first.1).unwrap();
        assert_eq!(fake.masks(), on);
        poll(&mut last.0, &mut last.1, WHILE / 8).unwrap();
        last.0.stop(&mut last.1).unwrap();
        assert_eq!(fake.masks(), [0, 0, 0]);

        let (counters, of_windows) = (exact(&whole.0, &whole.1), exact(&windowed.0, &windowed.1));
        let numbers = honest(&whole.1);
        honest(&windowed.1);
        // Ticks are made times, which is not exact.
        let slack = 1_000_000;
        let away = |at: Nanos| idle.iter().any(|(from, to)| (from.0 + slack..to.0 - slack).contains(&at.0));
        let came = |command: &Command| command.time(Boundary::TRecv).unwrap();
        assert_eq!(windowed.1.commands.iter().filter(|command| away(came(command))).count(), 0);
        assert!(windowed.1.commands.len() > 100 && of_windows.lost.unfinished == 0, "{of_windows:?}");
        if counters.lost.overwritten + of_windows.lost.overwritten == 0 {
            assert_eq!(
                (counters.lost.total(), of_windows.lost.total()),
                (0, 0),
                "{counters:?} {of_windows:?}"
            );
            assert!(numbers.windows(2).all(|two| two[1] == two[0] + 1));
            assert!(*numbers.first().unwrap() <= from && *numbers.last().unwrap() + 1 >= upto);
        } else {
            println!("skipped: this machine is so busy that the ring was overrun");
        }
    }
}

/// What a windowed recording lost it does not lose again by what others record while it is away.
#[test]
fn what_others_record_between_two_windows_is_not_lost() {
    let mut fake = Fake::start(&Plan { entries: 64, rate: 40_000, ..Plan::new(Generation::Sections) });
    let mut other = attach(&fake).unwrap();
    let mut source = attach(&fake).unwrap();
    let mut kept = Kept::default();
    poll(&mut source, &mut kept, WHILE / 2).unwrap();
    source.disarm(&mut kept).unwrap();
    let before = exact(&source, &kept);
    assert!(before.lost.overwritten > 0, "{before:?}");
    poll(&mut source, &mut kept, WHILE / 2).unwrap();
    assert_eq!(exact(&source, &kept), before);
    fake.tell("rate 0");
    assert!(source.arm().unwrap());
    poll(&mut source, &mut kept, WHILE / 8).unwrap();
    source.stop(&mut kept).unwrap();
    assert_eq!(exact(&source, &kept), before);
    other.stop(&mut Kept::default()).unwrap();
    assert_eq!(fake.masks(), [0, 0, 0]);
}

#[test]
fn what_a_killed_recording_left_on_is_switched_off_by_the_next() {
    let mut fake = Fake::start(&Plan::new(Generation::Sections));
    call(&fake.socket, "trace_set_tpoint_mask", json!({ "name": "bdev", "tpoint_mask": 0b100 }));
    // What a recording does before it is killed.
    let pid = fake.process().pid;
    let (note, _) = Note::leave(pid);
    let mut note = note.unwrap();
    note.write(&[("bdev".to_owned(), 0b11), ("sock".to_owned(), 0b10)].into());
    for (group, bits) in [("bdev", 0b11), ("sock", 0b10)] {
        call(&fake.socket, "trace_set_tpoint_mask", json!({ "name": group, "tpoint_mask": bits }));
    }
    // While it lives, another leaves that alone.
    let mut kept = Kept::default();
    let mut source = attach(&fake).unwrap();
    source.stop(&mut kept).unwrap();
    assert_eq!(fake.masks(), [0b111, 0, 0b10]);
    drop(note);
    let mut source = attach(&fake).unwrap();
    assert_eq!(fake.masks(), [0b111, MINIMUM, 0b10]);
    poll(&mut source, &mut kept, Duration::from_millis(20)).unwrap();
    source.stop(&mut kept).unwrap();
    assert_eq!(fake.masks(), [0b100, 0, 0]);
    let told: Vec<&str> = kept.events.iter().filter(|e| e.what == LEFT_ON).map(|e| e.on.as_str()).collect();
    assert_eq!(told, ["bdev 0x3", "sock 0x2"]);
    // Nothing is left of the notes.
    let names = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name());
    let about = format!("fabscope-tracepoints.{pid}.");
    assert_eq!(names.filter(|name| name.to_string_lossy().starts_with(&about)).count(), 0);
}

#[test]
fn a_source_that_is_dropped_puts_the_masks_back() {
    let mut fake = Fake::start(&Plan::new(Generation::File));
    drop(attach(&fake).unwrap());
    assert_eq!(fake.masks(), [0, 0, 0]);
}

/// Records for a while, does something to the target, and goes on until something comes of it.
fn harmed(what: impl FnOnce(&mut Fake)) -> (TraceTarget, Kept, Result<(), Error>) {
    let mut fake = Fake::start(&Plan::new(Generation::Sections));
    let mut source = attach(&fake).unwrap();
    let mut kept = Kept::default();
    poll(&mut source, &mut kept, WHILE / 2).unwrap();
    what(&mut fake);
    let until = Instant::now() + Duration::from_secs(10);
    let mut result = Ok(());
    while result.is_ok() && !source.ended() && Instant::now() < until {
        result = source.poll(Duration::from_millis(10), &mut kept).map(drop);
    }
    let (stopped, about) =
        (source.stop(&mut kept), format!("fabscope-tracepoints.{}.", fake.process_number()));
    assert!(stopped.is_ok(), "{stopped:?}");
    // Nobody needs the note about a process that has ended. One that is cut dies of its own reads, at any time.
    if result.is_ok() {
        let names = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.filter(|name| name.to_string_lossy().starts_with(&about)).count(), 0);
    }
    // What came before is kept, and is what it is.
    assert!(honest(&kept).len() > 100);
    exact(&source, &kept);
    (source, kept, result)
}

#[test]
fn a_target_that_ends_while_it_is_recorded_ends_the_recording() {
    let (source, _, result) = harmed(Fake::kill);
    assert!(source.ended() && result.is_ok(), "{result:?}");
}

#[test]
fn a_ring_that_is_cut_or_begun_anew_ends_the_recording_with_its_reason() {
    for (what, why) in [("cut", "cut short"), ("anew", "begun anew")] {
        let (_, _, result) = harmed(|fake| drop(fake.tell(what)));
        let error = result.unwrap_err();
        assert!(matches!(error, Error::TraceRingEnded { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains(why) && error.contains("is kept"), "{error}");
    }
}

#[test]
fn what_is_wrong_with_a_target_is_told_and_nothing_stays_on() {
    let cases: [(Wrong, &[&str]); 8] = [
        (Wrong::NoRpc, &["can not be switched on", "rpc.sock: No such file", "--rpc"]),
        (Wrong::Silent, &["no answer to trace_get_info", "nothing came within 5 s"]),
        (Wrong::Web, &["no answer to trace_get_info", "expected value"]),
        (Wrong::Forbids, &["trace_set_tpoint_mask is refused: Operation not permitted"]),
        (Wrong::Lies, &["stayed off"]),
        (
            Wrong::LeftOut,
            &["no tracepoints TCP_REQ_NEW, BDEV_IO_DONE, TCP_REQ_EXECUTED", "left out of the build"],
        ),
        (Wrong::Header, &["no trace ring of a known layout", "--source uprobe"]),
        (Wrong::Rate, &["ticks a second", "--source uprobe"]),
    ];
    for (wrong, texts) in cases {
        let mut fake = Fake::start(&Plan { wrong, rate: 0, ..Plan::new(Generation::Sections) });
        let error = attach(&fake).map(drop).unwrap_err().to_string();
        for text in texts {
            assert!(error.contains(text), "{wrong:?}: {text:?} is not in: {error}");
        }
        assert_eq!(fake.masks(), [0, 0, 0], "{wrong:?}");
    }
}

#[test]
fn a_target_that_is_gone_is_told_to_be() {
    let mut fake = Fake::start(&Plan::new(Generation::Sections));
    let process = fake.process();
    fake.kill();
    let error = TraceTarget::attach(&process, &TraceOptions::default()).unwrap_err();
    assert!(matches!(error, Error::ProcessEnded { .. }), "{error}");
}

#[test]
fn the_socket_is_found_by_itself_among_others_and_none_is_asked_twice() {
    let mut fake = Fake::start(&Plan { wrong: Wrong::Sockets, ..Plan::new(Generation::Sections) });
    let process = fake.process();
    // The default socket may be that of a real target here, which is passed over.
    for _ in 0..3 {
        drop(TraceTarget::attach(&process, &TraceOptions::default()).unwrap());
        ring_usable(&process, None).unwrap();
        let asked: u64 = fake.tell("asked").parse().unwrap();
        assert!(asked <= 2, "{asked}");
    }
    assert_eq!(fake.masks(), [0, 0, 0]);
    // Without its own there is none, and each of the others says why.
    let mut fake = Fake::start(&Plan { wrong: Wrong::Sockets, ..Plan::new(Generation::Sections) });
    std::fs::remove_file(&fake.socket).unwrap();
    let process = fake.process();
    for _ in 0..2 {
        let error = ring_usable(&process, None).unwrap_err().to_string();
        for text in
            ["silent.sock: no answer to rpc_get_methods: nothing came within 1 s", "web.sock", "--rpc"]
        {
            assert!(error.contains(text), "{text:?} is not in: {error}");
        }
        assert_eq!(fake.tell("asked"), "2");
    }
}

/// The end of a target takes a while, and its RPC is gone first.
#[test]
fn a_target_that_ends_as_a_window_is_armed_ends_the_recording() {
    let mut fake = Fake::start(&Plan::new(Generation::Sections));
    let mut source = attach(&fake).unwrap();
    let mut kept = Kept::default();
    poll(&mut source, &mut kept, WHILE / 4).unwrap();
    source.disarm(&mut kept).unwrap();
    fake.tell("end");
    assert!(!source.arm().unwrap() && source.ended());
    source.stop(&mut kept).unwrap();
    exact(&source, &kept);
    assert!(honest(&kept).len() > 100);
}

/// The same, where it is in place, or taken away, or about to be stopped.
#[test]
fn a_target_that_ends_as_it_is_let_go_ends_the_recording() {
    for windowed in [true, false] {
        let mut fake = Fake::start(&Plan::new(Generation::Sections));
        let mut source = attach(&fake).unwrap();
        let mut kept = Kept::default();
        poll(&mut source, &mut kept, WHILE / 4).unwrap();
        fake.tell("end");
        if windowed {
            source.disarm(&mut kept).unwrap();
        }
        source.stop(&mut kept).unwrap();
        exact(&source, &kept);
        assert!(honest(&kept).len() > 100);
    }
}
