//! The aggregator against the report of a run with the same commands, and its bounds.

use super::{Live, LiveOptions, OTHER, Over};
use crate::histogram::RELATIVE_ERROR;
use crate::report::{ReportOptions, host_report, target_report};
use crate::stats::Distribution;
use crate::synthetic::{Load, Recorded};
use proptest::prelude::*;
use run_format::{Boundary, Command, Kind, Manifest, Nanos, Operation, Queue, QueueId, Side, Sink, Window};
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;

fn manifest(side: Side) -> Manifest {
    Manifest::begun(side, Kind::Spdk, "0")
}

fn close(found: Option<i64>, exact: Option<i64>) -> bool {
    match (found, exact) {
        (Some(f), Some(e)) => (f as f64 - e as f64).abs() <= (e as f64 * RELATIVE_ERROR).abs() + 0.5,
        (None, None) => true,
        _ => false,
    }
}

fn same(found: &Distribution, exact: &Distribution) -> bool {
    (found.mean_ns - exact.mean_ns).abs() < 1e-6 * exact.mean_ns.max(1.0)
        && close(found.p50_ns, exact.p50_ns)
        && close(found.p90_ns, exact.p90_ns)
        && close(found.p99_ns, exact.p99_ns)
        && close(found.p999_ns, exact.p999_ns)
}

/// A live view of a recording whose commands come in the order of the recording, over this many slots.
fn live(recorded: &Recorded, slots: u64) -> Live {
    let options = LiveOptions { queues: 8, ..LiveOptions::default() };
    let mut live = Live::new(recorded.manifest.side, options, Nanos(0));
    for queue in &recorded.queues {
        live.queue(queue.clone());
    }
    let each = recorded.commands.len().div_ceil(slots as usize).max(1);
    for (n, some) in (1..).zip(recorded.commands.chunks(each)) {
        some.iter().for_each(|(_, command)| live.command(command));
        assert!(live.advance(Nanos(n * SECOND)));
    }
    live
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn since_the_start_it_is_the_report_of_one_side(seed in any::<u64>(), writes in 0.0f64..1.0, slots in 1u64..80) {
        let runs = Load { seed, writes, commands: 6_000, queues: 3, ..Load::default() }.record();
        let here = tempfile::tempdir().unwrap();
        for recorded in [&runs.host, &runs.target] {
            let side = recorded.manifest.side;
            let run = recorded.write(&here.path().join("a.run")).unwrap();
            let report = match side {
                Side::Host => host_report(&run, &ReportOptions::default()),
                Side::Target => target_report(&run, &ReportOptions::default()),
            }
            .unwrap();
            let view = live(recorded, slots).view(Over::Start, &manifest(side));
            prop_assert_eq!(view.classes.len(), report.classes.len());
            for class in &report.classes {
                let found = view.classes.iter().find(|c| {
                    c.operation == Some(class.operation) && c.bytes == Some(class.bytes) && c.error == class.error
                });
                let found = found.unwrap();
                prop_assert_eq!(found.totals.commands, class.commands);
                prop_assert!(same(&found.latency.unwrap(), &class.latency), "{:?} {:?}", found, class);
                let rest = class.beyond_host.as_ref().or(class.data_wait.as_ref()).unwrap();
                let stages = class.stages.0.iter().flatten().chain([rest]);
                prop_assert_eq!(found.stages.len(), 3);
                for (ours, theirs) in found.stages.iter().zip(stages) {
                    prop_assert!(same(&ours.times, &theirs.times), "{:?} {:?}", ours, theirs);
                    prop_assert!((ours.share - theirs.share).abs() < 1e-9);
                }
            }
            // The queues have the same commands between them, and each its own.
            let sum: u64 = view.queues.iter().map(|queue| queue.commands_since_start).sum();
            prop_assert_eq!(sum, view.totals.commands);
            for (n, queue) in view.queues.iter().enumerate() {
                let own = recorded.commands.iter().filter(|(_, c)| c.queue.0 as usize == n).count();
                prop_assert_eq!(queue.commands_since_start, own as u64);
            }
        }
    }
}

/// A target's command on a queue that takes so long, all of it in storage.
fn read(queue: u32, bytes: u32, took: u64) -> Command {
    let mut command =
        Command { queue: QueueId(queue), opcode: Operation::Read.opcode(), bytes, ..Command::default() };
    for boundary in [Boundary::TRecv, Boundary::TSubmit] {
        command.times[boundary.slot()] = Some(Nanos(1_000));
    }
    for boundary in [Boundary::TDone, Boundary::TResp, Boundary::TSent] {
        command.times[boundary.slot()] = Some(Nanos(1_000 + took));
    }
    command
}

fn target(options: LiveOptions) -> Live {
    Live::new(Side::Target, options, Nanos(0))
}

#[test]
fn rates_are_of_the_time_in_which_commands_were_taken_and_of_all_commands() {
    let mut live = target(LiveOptions { one_in: 4, ..LiveOptions::default() });
    let queue = live.queue(Queue::default());
    for _ in 0..100 {
        live.command(&read(queue.0, 4096, 1_000_000));
    }
    // It is looked at late.
    assert!(!live.advance(Nanos(SECOND - 1)));
    assert!(live.advance(Nanos(2 * SECOND)));
    let view = live.view(Over::Slot, &manifest(Side::Target));
    assert_eq!((view.totals.commands, view.totals.iops), (100, Some(200.0)));
    assert_eq!(view.totals.bytes_per_second, Some(200.0 * 4096.0));
    // 200 a second of a millisecond each.
    assert!((view.totals.in_flight.unwrap() - 0.2).abs() < 1e-9);
    assert_eq!(view.queues[0].totals.iops, Some(200.0));
    // In windows, only while the probes were armed.
    live.set_windowed();
    live.command(&read(queue.0, 4096, 10));
    live.armed(Window { start_ns: Nanos(5), end_ns: Nanos(5 + SECOND / 20) });
    live.end_slot(Nanos(3 * SECOND));
    assert_eq!(live.view(Over::Slot, &manifest(Side::Target)).totals.iops, Some(80.0));
    live.end_slot(Nanos(4 * SECOND));
    let view = live.view(Over::Slot, &manifest(Side::Target));
    assert_eq!((view.totals.iops, view.totals.commands), (None, 0));
    assert_eq!(view.classes[0].latency, None);
    assert_eq!(view.classes[0].commands_since_start, 101);
}

#[test]
fn more_classes_and_queues_than_fit_are_told_together() {
    let mut live = target(LiveOptions { classes: 2, queues: 2, ..LiveOptions::default() });
    let ids: Vec<QueueId> = (0..4).map(|_| live.queue(Queue::default())).collect();
    assert_eq!(ids, [QueueId(0), QueueId(1), OTHER, OTHER]);
    for (queue, size) in [(0, 512), (1, 1024), (OTHER.0, 2048), (OTHER.0, 4096), (77, 512)] {
        live.command(&read(queue, size, 10));
    }
    live.end_slot(Nanos(SECOND));
    let view = live.view(Over::Start, &manifest(Side::Target));
    let classes: Vec<_> = view.classes.iter().map(|c| (c.bytes, c.commands_since_start)).collect();
    assert_eq!(classes, [(Some(512), 2), (Some(1024), 1), (None, 2)]);
    let queues: Vec<_> = view.queues.iter().map(|q| (q.cntlid.is_some(), q.commands_since_start)).collect();
    assert_eq!(queues, [(true, 1), (true, 1), (false, 3)]);
    assert_eq!((view.left_out.in_other_class, view.left_out.in_other_queues), (2, 3));
    assert!(view.notes.iter().any(|n| n.contains("more than 2 classes")), "{:?}", view.notes);
    assert!(view.notes.iter().any(|n| n.contains("more than 2 queues")), "{:?}", view.notes);
    // The place of a queue that went is taken when nothing of it is of late, and its commands are not forgotten.
    live.queue_went(ids[0], Nanos(5));
    assert_eq!(live.queue(Queue::default()), OTHER);
    for n in 2..80 {
        live.end_slot(Nanos(n * SECOND));
    }
    assert_eq!(live.queue(Queue { qid: 9, ..Queue::default() }), ids[0]);
    let view = live.view(Over::Start, &manifest(Side::Target));
    let queues: Vec<_> = view.queues.iter().map(|q| (q.qid, q.commands_since_start)).collect();
    assert_eq!(queues, [(Some(9), 0), (Some(0), 1), (None, 4)]);
}

#[test]
fn what_has_no_figures_is_counted_and_left_out() {
    let mut live = target(LiveOptions::default());
    let mut backwards = read(0, 512, 10);
    backwards.times[Boundary::TDone.slot()] = Some(Nanos(1));
    for command in [Command::default(), backwards, read(0, 512, 10)] {
        live.command(&command);
    }
    live.end_slot(Nanos(SECOND));
    let view = live.view(Over::Slot, &manifest(Side::Target));
    assert_eq!((view.left_out.unfinished, view.left_out.backwards, view.totals.commands), (1, 1, 1));
    assert_eq!(view.notes.len(), 2);
}

#[test]
fn the_text_names_classes_queues_and_stages() {
    let mut live = target(LiveOptions { slot: Duration::from_secs(1), ..LiveOptions::default() });
    let queue = live.queue(Queue { cntlid: 3, qid: 2, ..Queue::default() });
    for n in 0..30_000 {
        live.command(&read(queue.0, 4096, 10_000 + n));
    }
    live.advance(Nanos(SECOND));
    let text = live.view(Over::Slot, &manifest(Side::Target)).to_text();
    for part in
        ["target spdk", "30 000 IOPS", "117 MiB/s", "read 4 KiB", "storage 100 %", "queue 3/2", "0 lost"]
    {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}
