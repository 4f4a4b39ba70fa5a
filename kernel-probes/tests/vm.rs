//! Records real kernels in the test bed's VM: a kernel host against a kernel target over loopback, each
//! kind of command, sampling, loss, a reset and a removal. One boot a kernel.

mod support;

use anyhow::{Context, Result, bail, ensure};
use run_format::{Boundary, Side};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use support::{
    HookRow, LIMIT, Recording, Row, content, example, expected, ready, record, recorded,
    sampling_keeps_what_the_hash_says,
};
use testbed::{Kernel, NullBlk, Vm};

const NQN: &str = "nqn.2024-01.org.example:kernel-probes";
const HOST_NQN: &str = "nqn.2024-01.org.example:host";
const HOST_ID: &str = "6a7c2f0e-0c5b-4c5e-9d3e-1f2a3b4c5d6e";
const ONE_IN: u32 = 3;

/// `identity` is how the hooks begin that one of the recorders does without.
fn the_host_is_recorded(kernel: Kernel, identity: &str) -> Result<()> {
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let vm = Vm::builder(kernel).program(example("record_kernel")?).program(example("host_io")?).boot()?;
    before_the_driver_is_there(&vm)?;

    let drive = vm.null_blk(NullBlk { size_mb: 64, memory_backed: true, ..NullBlk::default() })?;
    vm.nvmet_tcp(NQN, &drive, 4420)?;
    let controller = vm.connect_tcp(
        "127.0.0.1",
        4420,
        NQN,
        &format!("hostnqn={HOST_NQN},hostid={HOST_ID},nr_io_queues=2"),
    )?;
    let device = vm.namespace(&controller, 1)?;

    let whole = record(&vm, "host", "whole", "")?;
    // The others use the lower rungs.
    let some = record(&vm, "host", "some", &format!("--one-in {ONE_IN} --avoid fentry"))?;
    let tight = record(
        &vm,
        "host",
        "tight",
        &format!(
            "--lazy --ring-bytes 65536 --in-flight 2 --avoid 'tp_btf block_bio_queue' \
             --avoid 'kprobe blk_cgroup_bio_start' --avoid '{identity}'"
        ),
    )?;
    for (name, recorder) in [("whole", &whole), ("some", &some), ("tight", &tight)] {
        ready(&vm, name, recorder)?;
    }
    let said = vm.run(&format!("host_io {device}"), LIMIT)?.check()?.text();
    let some = recorded(&vm, "some", some)?;
    let tight = recorded(&vm, "tight", tight)?;

    let reads = vm.spawn(&format!("host_io {device} --read-for 4"))?;
    vm.sh(&format!("sleep 1; echo 1 > /sys/class/nvme/{}/reset_controller", controller.name))?;
    reads.wait(LIMIT)?.check().context("reads go on over a reset")?;
    vm.disconnect(&controller)?;
    let whole = recorded(&vm, "whole", whole)?;

    let expected = expected(&said)?;
    println!("{} missed {} {} {}", vm.release(), whole.missed(), some.missed(), tight.missed());
    let mut flags: BTreeMap<u16, usize> = BTreeMap::new();
    for row in &whole.commands {
        *flags.entry(row.flags).or_default() += 1;
    }
    println!("commands by flags {flags:?}, events {:?}", whole.events);
    println!("{} {:?}", vm.release(), whole.hooks);
    println!("whole {:?}\nsome {:?}\ntight {:?}", whole.counters, some.counters, tight.counters);
    let reset = whole
        .events
        .iter()
        .find(|(_, what, _)| what == "controller reset")
        .with_context(|| format!("no reset among the events {:?}", whole.events))?
        .0;

    hooks_are_the_moments_themselves(&whole)?;
    each_command_is_there_once(&whole, &expected, reset)?;
    each_boundary_is_there_in_order(&whole)?;
    let r2t_writes = whole.commands.iter().filter(|row| row.opcode == 1 && row.bytes > IN_CAPSULE).count();
    ensure!(r2t_writes + whole.missed() >= R2T_WRITES, "{r2t_writes} writes with an R2T");
    each_boundary_is_there_in_order(&some)?;
    lower_rungs_are_taken(&some, &tight)?;
    queues_are_named(&whole, &controller)?;
    the_sample_is_right(&whole, &some, reset)?;
    loss_is_counted(&tight, &expected)?;
    a_reset_makes_new_queues(&whole, reset)?;
    for recording in [&whole, &some, &tight] {
        recording.adds_up()?;
        ensure!(recording.counter("unreadable") == 0);
        ensure!(
            recording.counter("unfinished") + recording.counter("in_flight") <= recording.missed() as u64
        );
    }
    for lost in ["ring_full", "map_full"] {
        ensure!(whole.counter(lost) == 0, "{:?}", whole.counters);
    }
    whole.sees_nearly_all()?;
    ensure!(whole.events.iter().any(|(_, what, on)| what == "controller removed" && *on == controller.name));
    content(&vm)
}

fn before_the_driver_is_there(vm: &Vm) -> Result<()> {
    let refused = vm.run("record_kernel host --seconds 1", LIMIT)?;
    ensure!(refused.status != 0, "recorded without a driver");
    let said = refused.errors();
    ensure!(said.contains("neither nvme-tcp nor nvme-rdma is loaded: modprobe nvme-tcp or modprobe nvme-rdma, or connect first"), "{said}");
    let said = vm.sh("record_kernel host --survey")?;
    ensure!(said.contains("obstacle\tneither nvme-tcp nor nvme-rdma is loaded"), "{said}");
    Ok(())
}

fn hooks_are_the_moments_themselves(whole: &Recording) -> Result<()> {
    for boundary in Boundary::of(Side::Host) {
        let hook = whole.hook(boundary, "tcp")?;
        ensure!(hook.measured && hook.hook != "-", "{boundary}: {hook:?}");
    }
    Ok(())
}

fn lower_rungs_are_taken(some: &Recording, tight: &Recording) -> Result<()> {
    for boundary in [Boundary::HDriver, Boundary::HSent, Boundary::HR2t, Boundary::HDataSent, Boundary::HRecv]
    {
        let hook = some.hook(boundary, "tcp")?;
        ensure!(hook.hook.starts_with("kprobe ") && hook.rung > 0 && hook.measured, "{boundary}: {hook:?}");
    }
    let stand_in = HookRow { hook: "rq->start_time_ns".to_owned(), rung: 2, measured: false };
    ensure!(*tight.hook(Boundary::HQueued, "tcp")? == stand_in);
    let queued = tight.commands.iter().filter(|row| row.at(Boundary::HQueued) <= row.at(Boundary::HDriver));
    ensure!(queued.count() == tight.commands.len());
    Ok(())
}

fn each_command_is_there_once(whole: &Recording, expected: &BTreeMap<u8, u64>, reset: u64) -> Result<()> {
    let mut counted: BTreeMap<u8, u64> = BTreeMap::new();
    // The second load was of reads only.
    for row in &whole.commands {
        *counted.entry(row.opcode).or_default() += 1;
    }
    for (opcode, count) in expected {
        let got = counted.get(opcode).copied().unwrap_or(0);
        // One whose end was missed has no record either.
        let least = count.saturating_sub(whole.missed() as u64);
        ensure!(got >= least && (*opcode == READ || got <= *count), "opcode {opcode}: {got}, not {count}");
    }
    ensure!(counted.keys().all(|opcode| expected.contains_key(opcode)), "{counted:?} {expected:?}");
    ensure!(whole.commands.iter().any(|row| row.at(Boundary::HQueued).is_some_and(|at| at > reset)));
    Ok(())
}

const CANCELED: u16 = run_format::Command::CANCELED;
const READ: u8 = 2;
const COMPARE: u8 = 5;
const DATASET_MANAGEMENT: u8 = 9;
/// `host_io`'s.
const THREADS: usize = 4;
/// What the target takes with the capsule.
const IN_CAPSULE: u32 = 16384;
/// Those of 64 KiB and of 1 MiB in `host_io`.
const R2T_WRITES: usize = 8 + 3;

fn each_boundary_is_there_in_order(whole: &Recording) -> Result<()> {
    let mut incomplete = Vec::new();
    for row in &whole.commands {
        let times: Vec<u64> = row.times.iter().copied().flatten().collect();
        ensure!(times.is_sorted(), "out of order: {row:?}");
        let has: BTreeSet<Boundary> = Boundary::of(Side::Host).filter(|b| row.at(*b).is_some()).collect();
        let r2t = row.opcode == 1 && row.bytes > IN_CAPSULE;
        let mut lacks = Vec::new();
        for boundary in Boundary::of(Side::Host) {
            let wanted = match boundary {
                Boundary::HR2t | Boundary::HDataSent => r2t,
                // Newer kernels stamp no time on commands that are passed through.
                Boundary::HQueued if matches!(row.opcode, 0 | 2 | COMPARE) => has.contains(&boundary),
                Boundary::HSent | Boundary::HRecv if row.flags & CANCELED != 0 => has.contains(&boundary),
                _ => true,
            };
            if has.contains(&boundary) != wanted {
                lacks.push(boundary);
            }
        }
        if !lacks.is_empty() {
            incomplete.push((lacks, row));
        }
        ensure!(has.contains(&Boundary::HR2t) == (row.r2ts > 0), "{row:?}");
        ensure!(has.contains(&Boundary::HDataSent) == row.turnaround.is_some(), "{row:?}");
        ensure!(row.position.is_some() == row.at(Boundary::HSent).is_some(), "no stream position: {row:?}");
        ensure!(
            matches!(row.opcode, 0 | 8) == (row.bytes == 0) || !has.contains(&Boundary::HDone),
            "{row:?}"
        );
        // The target's drive knows neither.
        if row.flags & CANCELED == 0 && !matches!(row.opcode, COMPARE | DATASET_MANAGEMENT) {
            ensure!(row.status == 0, "{row:?}");
        }
    }
    // A hit is of one command, but bytes that a hit was missed of may have completed one of each thread's.
    let missed = whole.missed() + (THREADS - 1) * whole.missed_by("receive");
    ensure!(incomplete.len() <= missed, "{missed} missed, not {incomplete:?}");
    let unqueued = whole.commands.iter().filter(|row| row.at(Boundary::HQueued).is_none()).count();
    ensure!(unqueued <= 3 + 3 + 4 + 4, "{unqueued} commands without h_queued");
    Ok(())
}

fn queues_are_named(whole: &Recording, controller: &testbed::Controller) -> Result<()> {
    for queue in &whole.queues {
        ensure!(queue.subsystem_nqn == NQN && queue.host_nqn == HOST_NQN, "{queue:?}");
        // A target may give another cntlid for a new connection.
        ensure!(
            (queue.cntlid == controller.cntlid) >= queue.existed && (1..=2).contains(&queue.qid),
            "{queue:?}"
        );
        ensure!(queue.target == ("127.0.0.1".to_owned(), 4420), "{queue:?}");
        ensure!(queue.device == controller.name, "{queue:?}");
    }
    // Positions on one connection grow by a capsule at least: no other connection's is among them.
    let mut by_queue: HashMap<usize, Vec<&Row>> = HashMap::new();
    for row in &whole.commands {
        by_queue.entry(row.queue).or_default().push(row);
    }
    for rows in by_queue.values_mut() {
        rows.sort_by_key(|row| row.at(Boundary::HSent));
        for pair in rows.windows(2) {
            let (Some(first), Some(second)) = (pair[0].position, pair[1].position) else { continue };
            let step = second.wrapping_sub(first);
            ensure!((72..1 << 24).contains(&step), "stream position goes by {step}: {pair:?}");
        }
    }
    Ok(())
}

fn the_sample_is_right(whole: &Recording, some: &Recording, reset: u64) -> Result<()> {
    // The recorder of some ended before the second load began.
    let last = some.commands.iter().filter_map(|row| row.at(Boundary::HEnd)).max().unwrap_or(0);
    ensure!(last < reset);
    // Two recorders do not read the clock at the same moment.
    let first_load = |row: &Row| row.at(Boundary::HQueued).or(row.at(Boundary::HDriver)) <= Some(last);
    sampling_keeps_what_the_hash_says(whole, some, ONE_IN, first_load)
}

fn loss_is_counted(tight: &Recording, expected: &BTreeMap<u8, u64>) -> Result<()> {
    ensure!(tight.counter("seen") == expected.values().sum::<u64>(), "{:?} {expected:?}", tight.counters);
    ensure!(tight.counter("ring_full") > 0 && tight.counter("map_full") > 0, "{:?}", tight.counters);
    Ok(())
}

fn a_reset_makes_new_queues(whole: &Recording, reset: u64) -> Result<()> {
    let live = whole.events.iter().find(|(at, what, _)| what == "controller live" && *at > reset);
    let live = live.with_context(|| format!("not live again: {:?}", whole.events))?.0;
    let (old, new): (Vec<_>, Vec<_>) = whole.queues.iter().enumerate().partition(|(_, queue)| queue.existed);
    ensure!(!old.is_empty() && !new.is_empty(), "{:?}", whole.queues);
    let ports: BTreeSet<u16> = whole.queues.iter().map(|queue| queue.host.1).collect();
    ensure!(ports.len() == whole.queues.len(), "one connection is two queues: {:?}", whole.queues);
    for (id, queue) in old {
        let went = whole.went.get(&id).with_context(|| format!("{queue:?} never went"))?;
        ensure!(*went >= reset && *went <= live, "{queue:?} went at {went}, the reset was at {reset}");
        let late =
            whole.commands.iter().filter(|row| row.queue == id && row.at(Boundary::HDriver) > Some(*went));
        if let Some(row) = late.into_iter().next() {
            bail!("after it went, on the old connection: {row:?}");
        }
    }
    ensure!(new.iter().all(|(id, _)| whole.went.contains_key(id)), "removed queues went: {:?}", whole.went);
    Ok(())
}

#[test]
fn debian_6_1_host_is_recorded() -> Result<()> {
    the_host_is_recorded(Kernel::Debian6_1, "tp_btf nvme_setup_cmd")
}

#[test]
fn debian_6_12_host_is_recorded() -> Result<()> {
    the_host_is_recorded(Kernel::Debian6_12, "raw_tp nvme_setup_cmd' --avoid 'tp_btf nvme_setup_cmd")
}

#[test]
fn newest_host_is_recorded() -> Result<()> {
    // It can be preempted: kprobes are its first choice.
    the_host_is_recorded(Kernel::Newest, "kprobe")
}

#[test]
fn the_examples_are_built() -> Result<()> {
    for name in ["record_kernel", "host_io"] {
        ensure!(Path::new(&example(name)?).is_file());
    }
    Ok(())
}
