//! Tests of the reader against rings written in every layout.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;

use super::follow::{Follower, Look, Step};
use super::layout::{Generation, Layout};
use super::memory::Shared;
use super::writer::{Shape, Writer};

const ALL: [Generation; 3] = [Generation::Flags, Generation::File, Generation::Sections];

fn read(writer: &Writer) -> (Shared, Layout) {
    let shared = Shared::new(writer.open()).unwrap();
    let layout = Layout::read(&shared).unwrap();
    (shared, layout)
}

#[test]
fn every_layout_is_recognised_and_read() {
    for generation in ALL {
        for groups in [16, 20] {
            if generation == Generation::Flags && groups != 16 {
                continue;
            }
            let shape = Shape { lcores: vec![0, 3, 17], groups, entries: 256, ..Shape::new(generation) };
            let writer = Writer::new(&shape);
            let (_, layout) = read(&writer);
            assert_eq!(layout.generation, generation);
            assert_eq!(layout.rate, shape.rate);
            assert_eq!(usize::from(layout.marker), groups * 64);
            assert_eq!(layout.lcores.iter().map(|l| l.number).collect::<Vec<_>>(), [0, 3, 17]);
            assert!(layout.lcores.iter().all(|l| l.entries == 256));
            assert_eq!(layout.tracepoints.len(), shape.tracepoints.len());
            for (id, name, arguments) in shape.tracepoints {
                assert_eq!(layout.number(name), Some(*id));
                let known = &layout.tracepoints[id];
                let sizes = arguments.iter().map(|(_, _, size)| usize::from(*size));
                assert_eq!(known.bytes(), sizes.sum::<usize>());
            }
            assert_eq!(layout.owners.is_some(), generation != Generation::Flags);
        }
    }
}

#[test]
fn arguments_are_read_across_entries() {
    for generation in ALL {
        let writer = Writer::new(&Shape::new(generation));
        let (shared, layout) = read(&writer);
        let mut follower = Follower::new(&shared, &layout, layout.lcores[0]).unwrap();
        let start = &layout.tracepoints[&layout.number("BDEV_IO_START").unwrap()];
        let arguments = [2, 0xffff_eeee_dddd_cccc, 0x0123_4567_89ab_cdef, 7];
        writer.record(0, "BDEV_IO_START", 42, 9, 8, 0xaaaa_bbbb, &arguments);
        let mut seen = 0;
        let look = follower.look(&shared, |step| {
            let Step::Record(record) = step else { panic!("{step:?}") };
            assert_eq!((record.ticks, record.owner, record.size, record.object), (42, 9, 8, 0xaaaa_bbbb));
            for (argument, value) in start.arguments.iter().zip(arguments) {
                assert_eq!(record.number(argument.at, argument.size), Some(value), "{}", argument.name);
            }
            if let Some(name) = start.argument("name") {
                assert_eq!(record.text(name.at, name.size).as_deref(), Some("Malloc0"));
            }
            assert_eq!(record.number(4096, 8), None);
            seen += 1;
        });
        assert_eq!((look, seen, follower.missed), (Look::Done, 1, 0));
    }
}

/// Writes numbered records of several lengths; a record's number is in all that it carries.
fn write(writer: &Writer, number: u64) -> u64 {
    let name = if number.is_multiple_of(3) { "BDEV_IO_START" } else { "TCP_REQ_EXECUTED" };
    writer.record(0, name, number, number as u16, number as u32, number, &[number; 4]);
    u64::from(name == "BDEV_IO_START")
}

/// The number of a record whose every part agrees.
fn number_of(record: &super::follow::Record<'_>, layout: &Layout) -> u64 {
    let n = record.object;
    assert_eq!(record.ticks, n);
    assert_eq!((record.owner, record.size), (n as u16, n as u32));
    let tracepoint = &layout.tracepoints[&record.tracepoint];
    let numbers = tracepoint.arguments.iter().filter(|a| a.size == 8);
    for argument in numbers {
        assert_eq!(record.number(argument.at, argument.size), Some(n), "{}", argument.name);
    }
    n
}

#[test]
fn a_reader_that_keeps_up_misses_nothing() {
    for generation in ALL {
        let writer = Writer::new(&Shape { entries: 64, ..Shape::new(generation) });
        let (shared, layout) = read(&writer);
        let mut follower = Follower::new(&shared, &layout, layout.lcores[0]).unwrap();
        let mut next = 0;
        for number in 0..10_000 {
            write(&writer, number);
            if number % 8 == 7 {
                follower.look(&shared, |step| {
                    let Step::Record(record) = step else { panic!("{step:?}") };
                    assert_eq!(number_of(&record, &layout), next);
                    next += 1;
                });
            }
        }
        assert_eq!((next, follower.missed), (10_000, 0));
    }
}

#[test]
fn what_was_overwritten_is_counted_and_the_rest_is_whole() {
    for generation in ALL {
        let writer = Writer::new(&Shape { entries: 64, ..Shape::new(generation) });
        let (shared, layout) = read(&writer);
        let mut follower = Follower::new(&shared, &layout, layout.lcores[0]).unwrap();
        let (mut entries, mut read_entries, mut last, mut gaps) = (0, 0, None, 0);
        for number in 0..5_000u64 {
            let before = writer.next(0);
            write(&writer, number);
            entries += writer.next(0) - before;
            if number % 100 == 99 {
                follower.look(&shared, |step| match step {
                    Step::Record(record) => {
                        let n = number_of(&record, &layout);
                        assert!(last.is_none_or(|last| n > last));
                        last = Some(n);
                        read_entries += layout.tracepoints[&record.tracepoint].slots() as u64;
                    }
                    Step::Gap => gaps += 1,
                });
            }
        }
        assert_eq!(last, Some(4_999));
        assert!(gaps >= 50);
        assert_eq!(read_entries + follower.missed, entries);
    }
}

#[test]
fn a_record_that_is_being_written_is_not_taken_for_an_old_one() {
    // The writer has begun a record on top of the oldest one that still counts.
    let writer = Writer::new(&Shape { entries: 64, ..Shape::new(Generation::Sections) });
    let (shared, layout) = read(&writer);
    let mut follower = Follower::new(&shared, &layout, layout.lcores[0]).unwrap();
    for number in 0..64 {
        writer.record(0, "TCP_REQ_EXECUTED", number, number as u16, number as u32, number, &[]);
    }
    let begun = writer.begin(0, "BDEV_IO_START", 999, 1, 1, 999, &[1, 2, 3, 4]);
    let mut seen = Vec::new();
    follower.look(&shared, |step| {
        if let Step::Record(record) = step {
            seen.push(number_of(&record, &layout));
        }
    });
    assert_eq!(seen.first(), Some(&layout.longest()));
    assert_eq!(seen.last(), Some(&63));
    writer.publish(0, begun);
    let mut tracepoint = None;
    follower.look(&shared, |step| match step {
        Step::Record(record) => tracepoint = Some(record.tracepoint),
        Step::Gap => panic!("nothing was overwritten"),
    });
    assert_eq!(tracepoint, layout.number("BDEV_IO_START"));
}

#[test]
fn a_ring_that_begins_anew_is_noticed() {
    let writer = Writer::new(&Shape::new(Generation::Sections));
    let (shared, layout) = read(&writer);
    write(&writer, 0);
    let mut follower = Follower::new(&shared, &layout, layout.lcores[0]).unwrap();
    writer.set_next(0, 0);
    assert_eq!(follower.look(&shared, |_| panic!("nothing")), Look::Restarted);
}

/// A writer that laps the reader again and again, each on its own thread: no record is torn, none comes twice, and
/// what was read and what was missed is all that was written.
#[test]
fn a_writer_that_laps_the_reader_tears_nothing() {
    const RECORDS: u64 = 400_000;
    for generation in ALL {
        let writer = Writer::new(&Shape { entries: 512, ..Shape::new(generation) });
        let (shared, layout) = read(&writer);
        let mut follower = Follower::new(&shared, &layout, layout.lcores[0]).unwrap();
        let (over, entries) = (AtomicBool::new(false), AtomicU64::new(0));
        let (mut read_entries, mut records, mut last) = (0, 0u64, None);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..RECORDS {
                    write(&writer, number);
                    if number % 4096 == 0 {
                        std::thread::yield_now();
                    }
                }
                entries.store(writer.next(0), Ordering::Relaxed);
                over.store(true, Ordering::Release);
            });
            loop {
                let last_look = over.load(Ordering::Acquire);
                let look = follower.look(&shared, |step| {
                    if let Step::Record(record) = step {
                        let n = number_of(&record, &layout);
                        assert!(last.is_none_or(|last| n > last), "{n} after {last:?}");
                        last = Some(n);
                        records += 1;
                        read_entries += layout.tracepoints[&record.tracepoint].slots() as u64;
                    }
                });
                assert_eq!(look, Look::Done);
                if last_look {
                    break;
                }
            }
        });
        assert_eq!(last, Some(RECORDS - 1));
        assert!(records > 0);
        assert_eq!(read_entries + follower.missed, entries.load(Ordering::Relaxed));
    }
}

#[test]
fn a_header_that_lies_is_an_error_that_says_what() {
    // Where a word of the header is replaced, by what, and what the error names.
    let lies: [(Generation, usize, u64, &str); 9] = [
        (Generation::Sections, 0, 12, "neither its length"),
        (Generation::Sections, 0, 0, "not finished"),
        (Generation::Sections, 8, 3, "3 sections"),
        (Generation::Sections, 16, u64::MAX - 7, "main section"),
        (Generation::Sections, 16 + 8, 1 << 40, "owner section"),
        (Generation::Sections, 16 + 40, 9, "tracepoint section"),
        (Generation::Sections, 72, 5, "ticks a second"),
        (Generation::File, 8, 3_000, "ticks a second"),
        (Generation::Flags, 195_720 + 128 * 8, 4096, "4096 bytes long"),
    ];
    for (generation, at, value, expected) in lies {
        let writer = Writer::new(&Shape::new(generation));
        writer.set(at, value);
        let shared = Shared::new(writer.open()).unwrap();
        let error = Layout::read(&shared).unwrap_err();
        assert!(error.contains(expected), "{generation:?} {at:#x}: {error}");
    }
    let empty = tempfile::tempfile().unwrap();
    assert!(Shared::new(empty).is_err());
}

#[test]
fn a_file_that_shrinks_is_noticed() {
    let writer = Writer::new(&Shape::new(Generation::File));
    let shared = Shared::new(writer.open()).unwrap();
    assert!(shared.is_whole());
    writer.file.as_file().set_len(4096).unwrap();
    assert!(!shared.is_whole());
}

/// Reading behind the end of a file is a fatal signal, unless somebody sees to it.
#[test]
fn a_file_that_shrinks_under_the_reader_reads_as_zeros() {
    for generation in ALL {
        let writer = Writer::new(&Shape::new(generation));
        let (shared, layout) = read(&writer);
        write(&writer, 1);
        let mut follower = Follower::new(&shared, &layout, layout.lcores[0]).unwrap();
        write(&writer, 2);
        writer.file.as_file().set_len(4096).unwrap();
        // It was not asked whether it is whole.
        assert_eq!(follower.look(&shared, |_| panic!("nothing")), Look::Restarted);
        assert_eq!(shared.bytes(8192, 64), Some(vec![0; 64]));
        // And is cut from now on, even if it grows again.
        writer.file.as_file().set_len(shared.length() as u64).unwrap();
        assert!(!shared.is_whole());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever stands in a file: an error or a layout whose every place is inside it.
    #[test]
    fn damaged_headers_are_read_or_refused(
        generation in 0usize..3,
        damage in proptest::collection::vec((0usize..40_000, any::<u64>(), 0u8..4), 1..8),
    ) {
        let writer = Writer::new(&Shape { entries: 64, lcores: vec![0, 1], ..Shape::new(ALL[generation]) });
        let length = std::fs::metadata(writer.file.path()).unwrap().len() as usize;
        for (word, value, kind) in damage {
            // Many at the beginning, where most of the header is.
            let at = match kind { 0 => word % 40, 1 => word % 1_000, _ => word };
            let value = match kind { 3 => value % 5_000, _ => value };
            writer.set(at * 8 % (length / 8 * 8), value);
        }
        let shared = Shared::new(writer.open()).unwrap();
        let Ok(layout) = Layout::read(&shared) else { return Ok(()) };
        for lcore in &layout.lcores {
            prop_assert!(lcore.entries_at + lcore.entries as usize * 32 <= length);
            let mut follower = Follower::new(&shared, &layout, *lcore).unwrap();
            let mut records = 0u64;
            // From the beginning, so that the entries are read too.
            follower.look(&shared, |_| records += 1);
            prop_assert!(records <= lcore.entries + 1);
        }
    }

    /// Whatever stands in the entries and in the counts: no panic, and never more records than entries.
    #[test]
    fn damaged_entries_are_read_to_their_end(
        generation in 0usize..3,
        words in proptest::collection::vec(any::<u64>(), 256),
        markers in proptest::collection::vec(0usize..64, 0..64),
        next in prop_oneof![Just(u64::MAX), Just(1u64 << 63), 0u64..10_000],
    ) {
        let writer = Writer::new(&Shape { entries: 64, ..Shape::new(ALL[generation]) });
        let (shared, layout) = read(&writer);
        let lcore = layout.lcores[0];
        let mut follower = Follower::new(&shared, &layout, lcore).unwrap();
        for (n, word) in words.iter().enumerate() {
            writer.set(lcore.entries_at + n * 8, *word);
        }
        for slot in markers {
            writer.set(lcore.entries_at + slot * 32 + 8, u64::from(layout.marker));
        }
        writer.set_next(0, next);
        let mut records = 0u64;
        follower.look(&shared, |step| {
            if let Step::Record(record) = step {
                let _ = (record.number(0, 8), record.number(20, 8), record.text(8, 40));
                records += 1;
            }
        });
        prop_assert!(records <= 64);
    }

    /// Any pace of writing and reading: records come in order, and what was read and what was missed is all.
    #[test]
    fn any_pace_accounts_for_every_entry(
        generation in 0usize..3,
        paces in proptest::collection::vec(1u64..200, 1..60),
    ) {
        let writer = Writer::new(&Shape { entries: 128, ..Shape::new(ALL[generation]) });
        let (shared, layout) = read(&writer);
        let mut follower = Follower::new(&shared, &layout, layout.lcores[0]).unwrap();
        let (mut number, mut last, mut entries) = (0, None, 0);
        for pace in paces {
            for _ in 0..pace {
                write(&writer, number);
                number += 1;
            }
            follower.look(&shared, |step| if let Step::Record(record) = step {
                let n = number_of(&record, &layout);
                assert!(last.is_none_or(|last| n > last));
                last = Some(n);
                entries += layout.tracepoints[&record.tracepoint].slots() as u64;
            });
        }
        prop_assert_eq!(last, Some(number - 1));
        prop_assert_eq!(entries + follower.missed, writer.next(0));
    }
}

mod assembling {
    use super::*;
    use std::sync::Arc;

    use run_format::{Boundary, Cid, Command, Nanos, Operation, Queue};

    use crate::trace_ring::assemble::{Assembler, Identity, NO_CNTLID, NO_OPCODE, Out};
    use crate::trace_ring::directory::{Connection, Directory};
    use crate::trace_ring::events::Events;
    use crate::trace_ring::ticks::{self, Ticks};
    use crate::trace_ring::writer::TARGET_24_01;

    /// A target that records in a ring, and the assembler that reads it.
    struct Bench {
        writer: Writer,
        shared: Arc<Shared>,
        followers: Vec<Follower>,
        events: Events,
        ticks: Ticks,
        assembler: Assembler,
        now: u64,
        out: Vec<Out>,
    }

    const PEER: &str = "10.0.0.1:4001";

    fn directory() -> Directory {
        let end = |text: &str| {
            let (address, port) = text.rsplit_once(':').unwrap();
            Some(run_format::Endpoint { address: address.to_owned(), port: port.parse().unwrap() })
        };
        let connection = |qid, peer: &str| Connection {
            subsystem: "nqn.a".to_owned(),
            host: "nqn.h".to_owned(),
            cntlid: 7,
            qid,
            thread: Some("poll_group_0".to_owned()),
            peer: end(peer),
            listener: end("10.0.0.2:4420"),
        };
        Directory {
            listeners: Vec::new(),
            silent: false,
            connections: vec![connection(0, "10.0.0.1:4000"), connection(1, PEER)],
            namespaces: [(("nqn.a".to_owned(), "Malloc0".to_owned()), 3)].into(),
            blocks: [("Malloc0".to_owned(), 512)].into(),
        }
    }

    impl Bench {
        fn new(shape: &Shape, identified: bool, directory: Directory) -> Bench {
            // The rate of this machine, so that ticks are times.
            let writer = Writer::new(&Shape { rate: ticks::rate(), ..shape.clone() });
            let shared = Arc::new(Shared::new(writer.open()).unwrap());
            let layout = Layout::read(&shared).unwrap();
            let events = Events::new(&layout).unwrap();
            let ticks = Ticks::new(layout.rate).unwrap();
            let now = ticks::now();
            if layout.owners.is_some() {
                writer.owner(260, now - 2_000_000, "10.0.0.1:4000 nqn.a 10.0.0.2:4420 qid:0");
                writer.owner(261, now - 1_000_000, "10.0.0.1:4001 nqn.a 10.0.0.2:4420 qid:1");
                writer.owner(259, now - 3_000_000, "bdev_Malloc0");
            }
            let followers =
                layout.lcores.iter().map(|l| Follower::new(&shared, &layout, *l).unwrap()).collect();
            let lcores = layout.lcores.iter().map(|l| l.number);
            let assembler =
                Assembler::new(Arc::clone(&shared), layout.owners, lcores, identified, true, now, directory);
            Bench { writer, shared, followers, events, ticks, assembler, now, out: Vec::new() }
        }

        fn record(&mut self, ring: usize, name: &str, owner: u16, size: u32, object: u64, arguments: &[u64]) {
            self.now += 1_000;
            self.writer.record(ring, name, self.now, owner, size, object, arguments);
        }

        /// A whole read or write of a request, without or with an R2T.
        fn command(&mut self, owner: u16, request: u64, io_type: u64, offset: u64, blocks: u32, r2t: bool) {
            self.record(0, "TCP_REQ_NEW", owner, 0, request, &[1]);
            if r2t {
                self.record(0, "TCP_REQ_AWAIT_R2T_ACK", owner, 0, request, &[]);
            }
            self.record(0, "TCP_REQ_RDY_TO_EXECUTE", owner, 0, request, &[]);
            self.record(0, "BDEV_IO_START", 259, blocks, request + 8, &[io_type, request, offset, 1]);
            self.end(owner, request, request + 8);
        }

        fn end(&mut self, owner: u16, request: u64, io: u64) {
            self.record(0, "BDEV_IO_DONE", 259, 0, io, &[request, 1]);
            self.record(0, "TCP_REQ_EXECUTED", owner, 0, request, &[]);
            self.record(0, "SOCK_REQ_PEND", 0, 0, request + 16, &[request]);
            self.record(0, "TCP_REQ_COMPLETED", owner, 0, request, &[1]);
        }

        fn read(&mut self) {
            let Bench { shared, followers, events, ticks, assembler, out, .. } = self;
            for (lcore, follower) in (0u32..).zip(followers) {
                let mut items = Vec::new();
                follower.look(shared, |step| match step {
                    Step::Record(record) => items.push(events.of(&record, lcore)),
                    Step::Gap => items.push(None),
                });
                for item in items {
                    match item {
                        Some(event) => assembler.event(&event, events, ticks, out),
                        None => assembler.gap(lcore, ticks, out),
                    }
                }
            }
        }

        fn commands(&self) -> Vec<Command> {
            let command = |out: &Out| match out {
                Out::Command(command) => Some(command.clone()),
                _ => None,
            };
            self.out.iter().filter_map(command).collect()
        }

        fn queues(&self) -> Vec<Queue> {
            let queue = |out: &Out| match out {
                Out::Came(queue) => Some(queue.clone()),
                _ => None,
            };
            self.out.iter().filter_map(queue).collect()
        }
    }

    #[test]
    fn commands_are_read_with_their_times_and_their_queue() {
        for generation in [Generation::File, Generation::Sections] {
            let mut bench = Bench::new(&Shape::new(generation), false, directory());
            // Connect came before; the admin queue's commands are none of ours.
            bench.record(0, "TCP_REQ_NEW", 260, 0, 0x9000, &[1]);
            bench.record(0, "TCP_REQ_RDY_TO_EXECUTE", 260, 0, 0x9000, &[]);
            bench.record(0, "TCP_REQ_EXECUTED", 260, 0, 0x9000, &[]);
            bench.record(0, "TCP_REQ_COMPLETED", 260, 0, 0x9000, &[1]);
            bench.command(261, 0x1000, 1, 64, 8, false);
            bench.command(261, 0x2000, 2, 128, 32, true);
            bench.read();
            let [queue] = bench.queues().try_into().unwrap();
            assert_eq!((queue.cntlid, queue.qid), (7, 1));
            assert_eq!((queue.subsystem_nqn.as_str(), queue.host_nqn.as_str()), ("nqn.a", "nqn.h"));
            assert_eq!(queue.host.as_ref().unwrap().port, 4001);
            assert_eq!(queue.target.as_ref().unwrap().port, 4420);
            assert_eq!(queue.served_by.as_deref(), Some("poll_group_0"));
            assert!(queue.existed);
            let [read, write] = bench.commands().try_into().unwrap();
            assert_eq!(Operation::of(read.opcode), Operation::Read);
            assert_eq!((read.nsid, read.slba, read.nlb0, read.bytes), (3, 64, 7, 4096));
            assert_eq!((read.flags, read.cid, read.r2ts), (Command::NO_CID, Cid(0), 0));
            assert_eq!((write.slba, write.nlb0, write.bytes, write.r2ts), (128, 31, 16384, 1));
            use Boundary::{TData, TDone, TR2t, TRecv, TResp, TSent, TSubmit};
            let times = |c: &Command, of: &[Boundary]| -> Vec<Nanos> {
                of.iter().map(|b| c.time(*b).unwrap()).collect()
            };
            assert!(times(&read, &[TRecv, TSubmit, TDone, TResp, TSent]).is_sorted_by(|a, b| a < b));
            assert!(
                times(&write, &[TRecv, TR2t, TData, TSubmit, TDone, TResp, TSent]).is_sorted_by(|a, b| a < b)
            );
            assert_eq!((read.time(TR2t), read.time(TData)), (None, None));
            let whole = bench.ticks.seconds(3_000) * 1e9;
            let took = read.time(TDone).unwrap().0 - read.time(TRecv).unwrap().0;
            assert!((took as f64 - whole).abs() <= 1.0, "{took} {whole}");
            assert_eq!(bench.assembler.tally.handed, 2);
        }
    }

    #[test]
    fn the_ring_of_24_01_tells_queue_and_namespace_its_own_way() {
        let shape = Shape { tracepoints: TARGET_24_01, ..Shape::new(Generation::Flags) };
        let mut directory = directory();
        for connection in &mut directory.connections {
            connection.peer = None;
        }
        let mut bench = Bench::new(&shape, false, directory);
        let qpair = 0x7f00_0000_1000;
        bench.record(0, "TCP_REQ_NEW", 1, 0, 0x1000, &[qpair]);
        bench.record(0, "TCP_REQ_RDY_TO_EXECUTE", 1, 0, 0x1000, &[qpair]);
        bench.record(0, "BDEV_IO_START", 0, 0, 0x1008, &[2, 0x1000, 4096, 16]);
        bench.record(0, "BDEV_IO_DONE", 0, 0, 0x1008, &[0x1000]);
        bench.record(0, "TCP_REQ_EXECUTED", 1, 0, 0x1000, &[qpair]);
        bench.record(0, "TCP_REQ_COMPLETED", 1, 0, 0x1000, &[qpair]);
        bench.read();
        let [queue] = bench.queues().try_into().unwrap();
        assert_eq!((queue.cntlid, queue.qid), (7, 1));
        let [write] = bench.commands().try_into().unwrap();
        assert_eq!(Operation::of(write.opcode), Operation::Write);
        assert_eq!((write.slba, write.nlb0, write.nsid, write.bytes), (4096, 15, 3, 8192));
        assert_eq!(write.time(Boundary::TSent), None);
    }

    #[test]
    fn a_new_connection_s_connect_is_no_command_and_its_names_may_come_later() {
        let mut bench = Bench::new(&Shape::new(Generation::Sections), false, Directory::default());
        bench.now += 5_000;
        bench.writer.owner(262, bench.now, "10.0.0.1:4002");
        for name in ["TCP_REQ_NEW", "TCP_REQ_RDY_TO_EXECUTE", "TCP_REQ_EXECUTED", "TCP_REQ_COMPLETED"] {
            bench.record(0, name, 262, 0, 0x1000, &[]);
        }
        bench.writer.owner(262, bench.now - 4_000, "10.0.0.1:4002 nqn.a 10.0.0.2:4420 qid:5");
        bench.read();
        assert_eq!(bench.out, []);
        bench.command(262, 0x1000, 1, 0, 8, false);
        bench.read();
        let [queue] = bench.queues().try_into().unwrap();
        assert_eq!((queue.cntlid, queue.qid, queue.existed), (NO_CNTLID, 5, false));
        assert!(bench.assembler.wants_directory);
        let mut told = directory();
        told.connections[1].peer.as_mut().unwrap().port = 4002;
        told.connections[1].qid = 5;
        bench.assembler.told(told, &mut bench.out);
        let is = bench.out.iter().find_map(|out| match out {
            Out::Is(0, queue) => Some(queue.cntlid),
            _ => None,
        });
        assert_eq!(is, Some(7));
        // A command that the bdev layer never saw is one all the same.
        for name in ["TCP_REQ_NEW", "TCP_REQ_RDY_TO_EXECUTE", "TCP_REQ_EXECUTED", "TCP_REQ_COMPLETED"] {
            bench.record(0, name, 262, 0, 0x2000, &[]);
        }
        bench.read();
        assert_eq!(bench.commands().last().unwrap().opcode, NO_OPCODE);
        // The connection goes, and its owner's number is given to another.
        bench.record(0, "TCP_QP_DISCONNECT", 262, 0, 0, &[]);
        bench.now += 5_000;
        bench.writer.owner(262, bench.now, "10.0.0.1:4003 nqn.a 10.0.0.2:4420 qid:6");
        bench.record(0, "TCP_REQ_NEW", 262, 0, 0x1000, &[1]);
        bench.command(262, 0x2000, 1, 0, 8, false);
        bench.read();
        assert!(bench.out.iter().any(|out| matches!(out, Out::Went(0, _))));
        let queues = bench.queues();
        assert_eq!(queues.iter().map(|q| q.qid).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(bench.commands().last().unwrap().queue.0, 1);
    }

    #[test]
    fn a_deallocation_of_several_ranges_is_one_command() {
        let mut bench = Bench::new(&Shape::new(Generation::Sections), false, directory());
        bench.record(0, "TCP_REQ_NEW", 261, 0, 0x1000, &[1]);
        bench.record(0, "TCP_REQ_RDY_TO_EXECUTE", 261, 0, 0x1000, &[]);
        bench.record(0, "BDEV_IO_START", 259, 8, 0x5000, &[3, 0xdead, 0, 1]);
        bench.record(0, "BDEV_IO_START", 259, 8, 0x5100, &[3, 0xdead, 64, 1]);
        bench.command(261, 0x2000, 1, 0, 8, false);
        bench.record(0, "BDEV_IO_DONE", 259, 0, 0x5000, &[0xdead, 1]);
        let last = bench.now + 1_000;
        bench.end(261, 0x1000, 0x5100);
        bench.read();
        let [_, deallocate] = bench.commands().try_into().unwrap();
        assert_eq!(Operation::of(deallocate.opcode), Operation::DatasetManagement);
        assert_eq!(deallocate.time(Boundary::TDone), Some(bench.ticks.time(last)));
    }

    #[test]
    fn what_a_gap_hides_is_given_up_and_counted() {
        let mut bench =
            Bench::new(&Shape { entries: 64, ..Shape::new(Generation::Sections) }, false, directory());
        bench.command(261, 0x1000, 1, 0, 8, false);
        bench.record(0, "TCP_REQ_NEW", 261, 0, 0x2000, &[1]);
        bench.record(0, "TCP_REQ_NEW", 261, 0, 0x3000, &[1]);
        bench.record(0, "TCP_REQ_EXECUTED", 261, 0, 0x3000, &[]);
        bench.read();
        for n in 0..30 {
            bench.command(261, 0x4000 + n, 1, 0, 8, false);
        }
        bench.read();
        // The one that had its response is a command; the other is not, though its request is used again.
        assert_eq!(bench.assembler.tally.overwritten, 1);
        let slba_and_resp: Vec<bool> =
            bench.commands().iter().map(|c| c.time(Boundary::TResp).is_some()).collect();
        assert!(slba_and_resp.iter().all(|has| *has) && slba_and_resp.len() >= 6);
        bench.command(261, 0x2000, 1, 0, 8, false);
        bench.read();
        let Bench { assembler, ticks, out, .. } = &mut bench;
        assembler.end(ticks, out);
        let told: Vec<&str> = bench
            .out
            .iter()
            .filter_map(|out| match out {
                Out::Event(event) => Some(event.what.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(told, ["trace ring overrun begins", "trace ring overrun ends"]);
        assert_eq!(bench.assembler.tally.no_start, 0);
    }

    /// What the uprobe sees of a read.
    fn identity(at: Nanos, cid: u16, kept: bool) -> Identity {
        Identity { at, cid: Cid(cid), opcode: 2, nsid: 3, slba: u64::from(cid), nlb0: 7, bytes: 4096, kept }
    }

    #[test]
    fn an_identity_is_that_of_the_command_it_was_seen_in() {
        let mut bench = Bench::new(&Shape::new(Generation::Sections), true, directory());
        for (n, kept) in [(1u16, true), (2, false), (3, true)] {
            bench.record(0, "TCP_REQ_NEW", 261, 0, 0x1000, &[1]);
            let at = bench.ticks.time(bench.now + 500);
            // The third passes twice.
            for _ in 0..if n == 3 { 2 } else { 1 } {
                let Bench { assembler, ticks, out, .. } = &mut bench;
                assembler.identity(0x1000, identity(at, n, kept), ticks, out);
            }
            bench.record(0, "TCP_REQ_RDY_TO_EXECUTE", 261, 0, 0x1000, &[]);
            bench.record(0, "BDEV_IO_START", 259, 8, 0x1008, &[1, 0x1000, u64::from(n), 1]);
            bench.end(261, 0x1000, 0x1008);
            bench.now += 100_000;
        }
        // And one without.
        bench.command(261, 0x1000, 1, 0, 8, false);
        bench.read();
        let cids: Vec<u16> = bench.commands().iter().map(|c| c.cid.0).collect();
        assert_eq!(cids, [1, 3]);
        assert!(bench.commands().iter().all(|c| c.flags == 0 && c.slba == u64::from(c.cid.0)));
        // The last is waited for, until there is nothing more to wait for.
        assert_eq!((bench.assembler.tally.unidentified, bench.assembler.under_way_now()), (0, 1));
        let Bench { assembler, ticks, out, .. } = &mut bench;
        assembler.end(ticks, out);
        let tally = bench.assembler.tally;
        assert_eq!((tally.handed, tally.unsampled, tally.unidentified), (2, 1, 1));
    }

    /// A reader that comes late finds hundreds of identities of one request, and each is that of its command.
    #[test]
    fn identities_that_piled_up_are_each_that_of_its_command() {
        let mut bench =
            Bench::new(&Shape { entries: 8192, ..Shape::new(Generation::Sections) }, true, directory());
        let identity = |at, cid| identity(at, cid, true);
        for look in 0..3 {
            bench.assembler.look_begins(bench.ticks.time(bench.now));
            for n in 0..600u16 {
                let (cid, request) = (look * 600 + n, 0x1000 * u64::from(1 + n % 4));
                bench.record(0, "TCP_REQ_NEW", 261, 0, request, &[1]);
                let at = bench.ticks.time(bench.now + 500);
                let Bench { assembler, ticks, out, .. } = &mut bench;
                assembler.identity(request, identity(at, cid), ticks, out);
                bench.record(0, "BDEV_IO_START", 259, 8, request + 8, &[1, request, u64::from(cid), 1]);
                bench.end(261, request, request + 8);
            }
            bench.read();
        }
        let cids: Vec<u64> = bench.commands().iter().map(|c| u64::from(c.cid.0)).collect();
        assert_eq!(cids, (0..1800).collect::<Vec<u64>>());
        assert!(bench.commands().iter().all(|c| c.slba == u64::from(c.cid.0)));
        assert_eq!(bench.assembler.tally.unidentified, 0);
    }

    /// What another CPU has begun to send before holds up an identity, and not for ever.
    #[test]
    fn an_identity_that_comes_after_its_command_s_end_is_waited_for() {
        let mut bench = Bench::new(&Shape::new(Generation::Sections), true, directory());
        bench.command(261, 0x1000, 1, 0, 8, false);
        let first = bench.ticks.time(bench.now - 6_000);
        bench.command(261, 0x1000, 1, 8, 8, false);
        let second = bench.ticks.time(bench.now - 6_000);
        bench.command(261, 0x2000, 1, 16, 8, false);
        bench.read();
        assert_eq!((bench.commands(), bench.assembler.under_way_now()), (Vec::new(), 3));
        let identity = |at, cid| Identity {
            at,
            cid: Cid(cid),
            opcode: 2,
            nsid: 3,
            slba: 0,
            nlb0: 7,
            bytes: 4096,
            kept: true,
        };
        let Bench { assembler, ticks, out, .. } = &mut bench;
        assembler.identity(0x1000, identity(second, 2), ticks, out);
        assembler.identity(0x1000, identity(first, 1), ticks, out);
        assembler.identities_came(Nanos(second.0 + 1_000_000), ticks);
        assert_eq!((assembler.tally.unidentified, assembler.under_way_now()), (0, 1));
        assembler.identities_came(Nanos(second.0 + 1_000_000_000), ticks);
        assert_eq!((assembler.tally.unidentified, assembler.under_way_now()), (1, 0));
        assert_eq!(bench.commands().iter().map(|c| c.cid.0).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(bench.assembler.tally.handed, 2);
    }

    /// Within a machine a command is over with its response: its end need not be recorded.
    #[test]
    fn within_a_machine_the_response_is_the_end() {
        let mut bench = Bench::new(&Shape::new(Generation::Sections), false, Directory::default());
        bench.writer.owner(270, bench.now - 1_000, "127.0.0.1:4001 nqn.a 127.0.0.1:4420 qid:1");
        for ended in [false, true] {
            bench.record(0, "TCP_REQ_NEW", 270, 0, 0x1000, &[1]);
            bench.record(0, "BDEV_IO_START", 259, 8, 0x1008, &[1, 0x1000, 8, 1]);
            bench.record(0, "BDEV_IO_DONE", 259, 0, 0x1008, &[0x1000, 1]);
            bench.record(0, "TCP_REQ_EXECUTED", 270, 0, 0x1000, &[]);
            if ended {
                bench.record(0, "TCP_REQ_COMPLETED", 270, 0, 0x1000, &[1]);
            }
        }
        bench.read();
        assert_eq!(bench.commands().len(), 2);
        assert_eq!((bench.assembler.tally.no_start, bench.assembler.under_way_now()), (0, 0));
        // What is under way when the connection goes has no response.
        bench.record(0, "TCP_REQ_NEW", 270, 0, 0x1000, &[1]);
        bench.record(0, "BDEV_IO_START", 259, 8, 0x1008, &[1, 0x1000, 16, 1]);
        bench.record(0, "TCP_QP_DISCONNECT", 270, 0, 0, &[]);
        bench.read();
        let last = bench.commands().pop().unwrap();
        assert_eq!((last.slba, last.flags & Command::CANCELED != 0), (16, true));
        assert_eq!(bench.assembler.under_way_now(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        /// Any events in any order: no panic, and no command whose times run backwards.
        #[test]
        fn any_events_make_commands_or_none(
            steps in proptest::collection::vec((0usize..9, 0u64..6, 0u64..6, 255u16..265), 1..300),
        ) {
            let mut bench = Bench::new(&Shape { entries: 256, lcores: vec![0, 1], ..Shape::new(Generation::Sections) }, false, directory());
            for (n, (which, object, context, owner)) in steps.iter().enumerate() {
                let (_, name, _) = bench.writer.shape.tracepoints[*which];
                bench.record(n % 2, name, *owner, 8, 0x1000 * object, &[*context % 4, 0x1000 * context, 5, 1]);
                if n % 64 == 63 {
                    bench.read();
                }
            }
            bench.read();
            for command in bench.commands() {
                let received = command.time(Boundary::TRecv).unwrap();
                prop_assert!(command.times.iter().flatten().all(|time| *time >= received));
                prop_assert!(command.flags & Command::NO_CID != 0);
            }
        }
    }
}
