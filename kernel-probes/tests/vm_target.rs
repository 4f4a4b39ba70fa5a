//! Records the kernel's target in the test bed's VM, over loopback NVMe/TCP and over soft RoCE, with every
//! kind of storage below it: each kind of command against what its host recorded, the drive's own time,
//! sampling, loss, a reset and the end of a connection under I/O. One boot a kernel.

mod support;

use anyhow::{Context, Result, ensure};
use run_format::{Boundary, Side};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use support::{
    LIMIT, Recording, Row, content, example, expected, ready, record, recorded,
    sampling_keeps_what_the_hash_says,
};
use testbed::{Backing, Controller, Kernel, NullBlk, Port, SoftRoce, Transport, Vm};

const LOCAL_NQN: &str = "nqn.2024-01.org.example:local";
const SLOW_NQN: &str = "nqn.2024-01.org.example:slow";
const PASSED_NQN: &str = "nqn.2024-01.org.example:passed-through";
const RDMA_NQN: &str = "nqn.2024-01.org.example:over-rdma";
const HOST_NQN: &str = "nqn.2024-01.org.example:host";
const HOST: &str =
    "hostnqn=nqn.2024-01.org.example:host,hostid=6a7c2f0e-0c5b-4c5e-9d3e-1f2a3b4c5d6e,nr_io_queues=2";
const TCP: Port<'_> = Port::new(Transport::Tcp, "127.0.0.1", 4420);
const RDMA_PORT: u16 = 4421;
const ONE_IN: u32 = 3;
/// How long the slow drive takes.
const DELAY: Duration = Duration::from_millis(3);

const FLUSH: u8 = 0;
const WRITE: u8 = 1;
const READ: u8 = 2;
const COMPARE: u8 = 5;
const WRITE_ZEROES: u8 = 8;
/// What the target takes with the capsule: over TCP 4 pages, over RDMA one page on the older kernels.
const IN_CAPSULE: u32 = 16384;
/// Writes of `host_io` of 64 KiB and of 1 MiB.
const LARGE_WRITES: usize = 8 + 3;

/// A namespace that a host has, and what lies below it.
struct Disk {
    device: String,
    nqn: &'static str,
    nsid: u32,
    below: Below,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Below {
    Drive,
    File,
    Passed,
}

struct Hosts {
    local: Controller,
    disks: Vec<Disk>,
    slow: String,
}

/// Sets up every target and connects to it.
fn connect(vm: &Vm, ends: &SoftRoce, kernel: Kernel) -> Result<Hosts> {
    let drive = NullBlk { size_mb: 64, memory_backed: true, ..NullBlk::default() };
    // A file system that can do all that is asked of files.
    let holds_files = vm.null_blk(NullBlk { size_mb: 128, ..drive })?;
    vm.sh(&format!(
        "set -e; modprobe ext4; mkdir /storage; mke2fs -q -t ext4 {holds_files}; \
         mount -t ext4 {holds_files} /storage; truncate -s 32M /storage/buffered /storage/direct"
    ))?;
    let block = vm.null_blk(drive)?;
    let namespaces =
        [Backing::Block(&block), Backing::Buffered("/storage/buffered"), Backing::File("/storage/direct")];
    vm.nvmet(LOCAL_NQN, &namespaces, &TCP)?;
    let local = vm.connect(&TCP, LOCAL_NQN, HOST)?;
    let mut disks = Vec::new();
    for (nsid, below) in [(1, Below::Drive), (2, Below::File), (3, Below::File)] {
        disks.push(Disk { device: vm.namespace(&local, nsid)?, nqn: LOCAL_NQN, nsid, below });
    }

    let slow = vm.null_blk(NullBlk { completion: DELAY, ..drive })?;
    vm.nvmet(SLOW_NQN, &[Backing::Block(&slow)], &TCP)?;
    let slow = vm.namespace(&vm.connect(&TCP, SLOW_NQN, HOST)?, 1)?;

    if kernel != Kernel::Debian6_1 {
        vm.load_module("nvme")?;
        vm.sh("for try in $(seq 600); do grep -l pcie /sys/class/nvme/*/transport && exit; sleep 0.1; done; exit 1")?;
        let pcie = vm.sh("grep -l pcie /sys/class/nvme/*/transport")?;
        let name = pcie.trim().split('/').nth(4).context("no drive on PCIe")?.to_owned();
        vm.nvmet_passthru(PASSED_NQN, &format!("/dev/{name}"), &TCP)?;
        let passed = vm.connect(&TCP, PASSED_NQN, HOST)?;
        let device = vm.namespace(&passed, 1)?;
        disks.push(Disk { device, nqn: PASSED_NQN, nsid: 1, below: Below::Passed });
    }

    let port = Port::new(Transport::Rdma, ends.target_address, RDMA_PORT);
    let block = vm.null_blk(drive)?;
    vm.nvmet(RDMA_NQN, &[Backing::Block(&block)], &port)?;
    let rdma = vm.connect(&port, RDMA_NQN, &format!("{HOST},host_traddr={}", ends.host_address))?;
    disks.push(Disk { device: vm.namespace(&rdma, 1)?, nqn: RDMA_NQN, nsid: 1, below: Below::Drive });
    Ok(Hosts { local, disks, slow })
}

fn the_target_is_recorded(kernel: Kernel) -> Result<()> {
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let vm = Vm::builder(kernel)
        .program(example("record_kernel")?)
        .program(example("host_io")?)
        .program("ip")
        .program("rdma")
        .program("mke2fs")
        .nvme_drive(64)
        .boot()?;
    before_a_driver_is_there(&vm)?;
    let ends = vm.soft_roce()?;
    let hosts = connect(&vm, &ends, kernel)?;

    // One recorder at a time takes the commands of which the truth is known, and the host's, which knows
    // them too.
    let host = record(&vm, "host", "host", "")?;
    let whole = record(&vm, "target", "whole", "")?;
    // The others use the lower rungs.
    let some = record(&vm, "target", "some", &format!("--one-in {ONE_IN} --avoid fentry"))?;
    for (name, recorder) in [("host", &host), ("whole", &whole), ("some", &some)] {
        ready(&vm, name, recorder)?;
    }
    let mut said = Vec::new();
    for disk in &hosts.disks {
        let load = format!("host_io --reads 200 {}", disk.device);
        said.push(expected(&vm.run(&load, LIMIT)?.check()?.text())?);
    }
    // So many, however slow the machine is.
    vm.run(&format!("host_io --time-reads 32 {}", hosts.slow), LIMIT)?.check()?;
    let some = recorded(&vm, "some", some)?;
    let host = recorded(&vm, "host", host)?;
    let tight = tight(&vm, &hosts.disks[0].device)?;

    let reads = vm.spawn(&format!("host_io {} --read-for 4", hosts.disks[0].device))?;
    vm.sh(&format!("sleep 1; echo 1 > /sys/class/nvme/{}/reset_controller", hosts.local.name))?;
    reads.wait(LIMIT)?.check().context("reads go on over a reset")?;
    vm.sh(&format!("echo 0 > /sys/kernel/config/nvmet/subsystems/{LOCAL_NQN}/namespaces/2/enable"))?;
    vm.disconnect(&hosts.local)?;
    let whole = recorded(&vm, "whole", whole)?;

    println!("{} {:?}", vm.release(), whole.hooks);
    println!("whole {:?}\nsome {:?}\ntight {:?}", whole.counters, some.counters, tight.counters);
    println!("host {:?}\nqueues {:?}\nevents {:?}", host.counters, whole.queues, whole.events);
    let reset = whole.events.iter().filter(|(_, what, _)| what == "queue disconnected");
    let reset = reset.map(|(at, _, _)| *at).min().context("no queue was disconnected")?;
    // The host's recorder ended before the other loads began.
    let last = host.commands.iter().filter_map(|row| row.at(Boundary::HEnd)).max();
    let known = |row: &Row| row.at(Boundary::TRecv) <= last;

    hooks_are_the_moments_themselves(&whole)?;
    lower_rungs_are_taken(&some)?;
    for (disk, expected) in hosts.disks.iter().zip(&said) {
        each_command_is_there_once(&whole, disk, expected, &known)?;
    }
    for recording in [&whole, &some, &tight.recording] {
        // A kprobe that an interrupt hits inside another is skipped. 6.1 does not count that.
        let kprobes = std::ptr::eq(recording, &raw const some);
        let uncounted = kprobes && kernel == Kernel::Debian6_1;
        let skipped = if uncounted { recording.commands.len() / 20 } else { 0 };
        let large = each_boundary_is_there_in_order(recording, &hosts.disks, skipped)?;
        let least = hosts.disks.len() * LARGE_WRITES;
        ensure!(large >= least || !std::ptr::eq(recording, &raw const whole), "{large} writes with an R2T");
        recording.adds_up()?;
        ensure!(recording.counter("unreadable") + recording.counter("no_start") == 0);
    }
    the_host_saw_the_same(&whole, &host, &known)?;
    the_drives_time_is_the_drives(&whole)?;
    queues_are_named(&whole, &ends, &host)?;
    the_sample_is_right(&whole, &some)?;
    tight.lost(hosts.disks[0].nqn)?;
    for recording in [&whole, &some] {
        ensure!(recording.counter("ring_full") + recording.counter("map_full") == 0);
    }
    ensure!(some.counter("unfinished") + some.counter("in_flight") <= some.missed() as u64);
    // What a reset ended at the target never got a response.
    ensure!(whole.counter("unfinished") <= 8 && whole.counter("in_flight") == 0, "{:?}", whole.counters);
    a_reset_makes_new_queues(&whole, reset)?;
    let disabled =
        |(_, what, on): &(u64, String, String)| what == "namespace disabled" && on == "namespace 2";
    ensure!(whole.events.iter().any(disabled), "{:?}", whole.events);
    content(&vm)
}

fn before_a_driver_is_there(vm: &Vm) -> Result<()> {
    let refused = vm.run("record_kernel target --seconds 1", LIMIT)?;
    ensure!(refused.status != 0, "recorded without a driver");
    let said = refused.errors();
    ensure!(said.contains("modprobe nvmet-tcp or modprobe nvmet-rdma, or set up a port first"), "{said}");
    let said = vm.sh("record_kernel target --survey")?;
    ensure!(said.contains("obstacle\tneither nvmet-tcp nor nvmet-rdma is loaded"), "{said}");
    Ok(())
}

fn hooks_are_the_moments_themselves(whole: &Recording) -> Result<()> {
    for boundary in Boundary::of(Side::Target) {
        for transport in ["tcp", "rdma"] {
            let hook = whole.hook(boundary, transport)?;
            // Where a kernel can be preempted, those that run in tasks are kprobes.
            ensure!(hook.measured && hook.hook != "-", "{boundary}: {hook:?}");
        }
    }
    Ok(())
}

fn lower_rungs_are_taken(some: &Recording) -> Result<()> {
    for boundary in Boundary::of(Side::Target) {
        for transport in ["tcp", "rdma"] {
            let hook = some.hook(boundary, transport)?;
            ensure!(
                hook.hook.starts_with("kprobe ") && hook.rung > 0 && hook.measured,
                "{boundary}: {hook:?}"
            );
        }
    }
    Ok(())
}

fn on<'a>(recording: &'a Recording, nqn: &'a str) -> impl Fn(&Row) -> bool + 'a {
    move |row| recording.queues[row.queue].subsystem_nqn == nqn
}

fn each_command_is_there_once(
    whole: &Recording,
    disk: &Disk,
    expected: &BTreeMap<u8, u64>,
    known: &dyn Fn(&Row) -> bool,
) -> Result<()> {
    let mut counted: BTreeMap<u8, u64> = BTreeMap::new();
    let here = on(whole, disk.nqn);
    for row in whole.commands.iter().filter(|row| here(row) && row.nsid == disk.nsid && known(row)) {
        *counted.entry(row.opcode).or_default() += 1;
    }
    for (opcode, count) in expected {
        let got = counted.get(opcode).copied().unwrap_or(0);
        // One whose end was missed has no record either.
        let least = count.saturating_sub(whole.missed() as u64);
        // What is too large for the drive behind is more than one command.
        let split = disk.below == Below::Passed && matches!(*opcode, READ | WRITE);
        let most = if split { 2 * count } else { *count };
        ensure!((least..=most).contains(&got), "{}: opcode {opcode}: {got}, not {count}", disk.device);
    }
    ensure!(counted.keys().all(|opcode| expected.contains_key(opcode)), "{counted:?} {expected:?}");
    Ok(())
}

/// Of `skipped` commands the boundaries may lack that interrupts pass. Returns how many were large writes.
fn each_boundary_is_there_in_order(recording: &Recording, disks: &[Disk], skipped: usize) -> Result<usize> {
    let mut incomplete = Vec::new();
    let mut of_interrupts = 0;
    let mut large = 0;
    for row in &recording.commands {
        let times: Vec<u64> = row.times.iter().copied().flatten().collect();
        ensure!(times.is_sorted(), "out of order: {row:?}");
        let has: BTreeSet<Boundary> = Boundary::of(Side::Target).filter(|b| row.at(*b).is_some()).collect();
        let queue = &recording.queues[row.queue];
        let below = disks.iter().find(|disk| disk.nqn == queue.subsystem_nqn && disk.nsid == row.nsid);
        let below = below.map_or(Below::Drive, |disk| disk.below);
        // The target knows no compare of its own: the command never gets to storage.
        let rejected = row.opcode == COMPARE && below != Below::Passed;
        let pulled = row.opcode == WRITE && row.bytes > IN_CAPSULE;
        large += usize::from(pulled);
        for boundary in Boundary::of(Side::Target) {
            let wanted = match boundary {
                // Over RDMA it is up to the two how large a write may be that comes with its capsule.
                Boundary::TR2t | Boundary::TData if queue.transport == "rdma" && !pulled => {
                    row.opcode == WRITE && has.contains(&boundary)
                }
                Boundary::TR2t | Boundary::TData => pulled,
                Boundary::TSubmit | Boundary::TDone => !rejected,
                _ => true,
            };
            if has.contains(&boundary) == wanted {
                continue;
            }
            if matches!(boundary, Boundary::TDone | Boundary::TResp) && of_interrupts < skipped {
                of_interrupts += 1;
            } else {
                incomplete.push((boundary, row));
            }
        }
        ensure!(has.contains(&Boundary::TR2t) == (row.r2ts > 0), "{row:?}");
        ensure!((row.position.is_some()) == (queue.transport == "tcp"), "{row:?}");
        // What was rejected may have had no room made for its data.
        ensure!(rejected || matches!(row.opcode, FLUSH | WRITE_ZEROES) == (row.bytes == 0), "{row:?}");
        ensure!(row.status == u16::from(rejected), "{row:?}");
        ensure!(
            below == Below::Drive && matches!(row.opcode, READ | WRITE) || row.drive.is_none(),
            "{row:?}"
        );
        if let (Some(drive), Some(done), Some(submit)) =
            (row.drive, row.at(Boundary::TDone), row.at(Boundary::TSubmit))
        {
            ensure!(drive <= done - submit, "the drive is within storage: {row:?}");
        }
    }
    ensure!(
        incomplete.len() <= recording.missed(),
        "{} missed, not {}: {:?}",
        recording.missed(),
        incomplete.len(),
        incomplete.first()
    );
    Ok(large)
}

/// Both sides know each command by the same words, and over TCP by the same position.
fn the_host_saw_the_same(whole: &Recording, host: &Recording, known: &dyn Fn(&Row) -> bool) -> Result<()> {
    let of = |recording: &Recording, keep: &dyn Fn(&Row) -> bool| {
        let mut all = BTreeMap::new();
        for row in recording.commands.iter().filter(|row| keep(row)) {
            let port = recording.queues[row.queue].host.1;
            *all.entry((port, row.identity(), row.position)).or_insert(0u32) += 1;
        }
        all
    };
    let target = of(whole, known);
    // What the host of the drive on PCIe does is no fabric's.
    let host_side = of(host, &|_| true);
    let differ = host_side.iter().filter(|(key, count)| target.get(key) != Some(count)).count()
        + target.keys().filter(|key| !host_side.contains_key(key)).count();
    let missed = host.missed() + whole.missed();
    ensure!(differ <= missed, "{differ} commands are not known by the same words; {missed} hits missed");
    ensure!(host_side.len() > 1000, "{} commands", host_side.len());
    Ok(())
}

fn the_drives_time_is_the_drives(whole: &Recording) -> Result<()> {
    let delay = u64::try_from(DELAY.as_nanos())?;
    let slow: Vec<&Row> = whole.commands.iter().filter(|row| on(whole, SLOW_NQN)(row)).collect();
    ensure!(slow.len() > 20, "{} reads of the slow drive", slow.len());
    let drives: Vec<u64> = slow.iter().filter_map(|row| row.drive).collect();
    ensure!(drives.len() + whole.missed() >= slow.len(), "{} of {} are known", drives.len(), slow.len());
    ensure!(drives.iter().all(|drive| *drive >= delay), "faster than the drive: {drives:?}");
    // An emulated machine's timers are late when the real one is busy, never early.
    let fastest = drives.iter().copied().min().unwrap_or(0);
    ensure!(fastest < delay * 3 / 2, "the drive takes {delay} ns, not {fastest}");
    // Of most commands: the machine may stop the target for longer than a drive takes.
    let mostly = |row: &&&Row| {
        let storage = row.at(Boundary::TDone).zip(row.at(Boundary::TSubmit)).map(|(done, at)| done - at);
        storage.zip(row.drive).is_some_and(|(all, drive)| drive <= all && drive * 10 >= all * 8)
    };
    let of = slow.iter().filter(mostly).count();
    ensure!(of * 2 > slow.len(), "storage is mostly the drive's of {of} of {} commands", slow.len());
    for nqn in [LOCAL_NQN, RDMA_NQN] {
        let here = on(whole, nqn);
        let io = |row: &&Row| here(row) && row.nsid == 1 && matches!(row.opcode, READ | WRITE);
        let unknown = whole.commands.iter().filter(io).filter(|row| row.drive.is_none()).count();
        ensure!(unknown <= whole.missed(), "the drive's time of {unknown} commands on {nqn} is not known");
    }
    Ok(())
}

fn queues_are_named(whole: &Recording, ends: &SoftRoce, host: &Recording) -> Result<()> {
    for queue in &whole.queues {
        ensure!(queue.host_nqn == HOST_NQN && (1..=2).contains(&queue.qid), "{queue:?}");
        let (from, to) = match queue.subsystem_nqn.as_str() {
            RDMA_NQN => (ends.host_address, (ends.target_address, RDMA_PORT)),
            LOCAL_NQN | SLOW_NQN | PASSED_NQN => (TCP.address, (TCP.address, TCP.number)),
            other => anyhow::bail!("a queue of {other}"),
        };
        ensure!(queue.host.0 == from && (queue.target.0.as_str(), queue.target.1) == to, "{queue:?}");
        ensure!((queue.transport == "rdma") == (queue.subsystem_nqn == RDMA_NQN), "{queue:?}");
    }
    for theirs in &host.queues {
        let same = |ours: &&support::QueueRow| {
            (&ours.subsystem_nqn, &ours.host_nqn, ours.cntlid, ours.qid, &ours.host, &ours.target)
                == (
                    &theirs.subsystem_nqn,
                    &theirs.host_nqn,
                    theirs.cntlid,
                    theirs.qid,
                    &theirs.host,
                    &theirs.target,
                )
        };
        ensure!(whole.queues.iter().filter(same).count() == 1, "{theirs:?} is not among {:?}", whole.queues);
    }
    Ok(())
}

fn the_sample_is_right(whole: &Recording, some: &Recording) -> Result<()> {
    // The recorder of some ended first.
    let last = some.commands.iter().filter_map(|row| row.at(Boundary::TSent)).max().unwrap_or(0);
    sampling_keeps_what_the_hash_says(whole, some, ONE_IN, |row| row.at(Boundary::TRecv) <= Some(last))
}

/// A recording with too little room.
#[derive(Debug)]
struct Tight {
    recording: Recording,
    expected: BTreeMap<u8, u64>,
    counters: BTreeMap<String, u64>,
}

fn tight(vm: &Vm, device: &str) -> Result<Tight> {
    let options = "--lazy --ring-bytes 65536 --in-flight 1";
    let recorder = record(vm, "target", "tight", options)?;
    ready(vm, "tight", &recorder)?;
    let said = vm.run(&format!("host_io {device}"), LIMIT)?.check()?.text();
    let recording = recorded(vm, "tight", recorder)?;
    Ok(Tight { expected: expected(&said)?, counters: recording.counters.clone(), recording })
}

impl Tight {
    fn lost(&self, nqn: &str) -> Result<()> {
        let seen = self.recording.counter("seen");
        ensure!(seen == self.expected.values().sum::<u64>(), "{:?} {:?}", self.counters, self.expected);
        ensure!(self.recording.counter("ring_full") > 0, "{:?}", self.counters);
        ensure!(self.recording.counter("map_full") > 0, "{:?}", self.counters);
        ensure!(self.recording.commands.iter().all(on(&self.recording, nqn)));
        Ok(())
    }
}

fn a_reset_makes_new_queues(whole: &Recording, reset: u64) -> Result<()> {
    let local = || whole.queues.iter().enumerate().filter(|(_, queue)| queue.subsystem_nqn == LOCAL_NQN);
    let (old, new): (Vec<_>, Vec<_>) = local().partition(|(_, queue)| queue.existed);
    ensure!(old.len() == 2 && !new.is_empty(), "{:?}", whole.queues);
    let ports: BTreeSet<u16> = local().map(|(_, queue)| queue.host.1).collect();
    ensure!(ports.len() == old.len() + new.len(), "one connection is two queues: {:?}", whole.queues);
    for (id, queue) in old.iter().chain(&new) {
        let went = whole.went.get(id).with_context(|| format!("{queue:?} never went"))?;
        ensure!(*went >= reset, "{queue:?} went at {went}, the reset was at {reset}");
        let late =
            whole.commands.iter().find(|row| row.queue == *id && row.at(Boundary::TRecv) > Some(*went));
        ensure!(late.is_none(), "after it went, on the old connection: {late:?}");
    }
    ensure!(whole.commands.iter().any(|row| new.iter().any(|(id, _)| *id == row.queue)));
    Ok(())
}

#[test]
fn debian_6_1_target_is_recorded() -> Result<()> {
    the_target_is_recorded(Kernel::Debian6_1)
}

#[test]
fn debian_6_12_target_is_recorded() -> Result<()> {
    the_target_is_recorded(Kernel::Debian6_12)
}

#[test]
fn newest_target_is_recorded() -> Result<()> {
    the_target_is_recorded(Kernel::Newest)
}
