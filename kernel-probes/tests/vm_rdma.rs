//! Records the kernel's NVMe/RDMA host in the test bed's VM over soft RoCE, alone and together with NVMe/TCP:
//! each kind of command, what identifies it, sampling, IPv6, a reset and a removal. One boot a kernel.

mod support;

use anyhow::{Context, Result, bail, ensure};
use run_format::{Boundary, Side};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use support::{
    LIMIT, Recording, Row, content, example, expected, ready, record, recorded,
    sampling_keeps_what_the_hash_says,
};
use testbed::{Backing, Controller, Kernel, NullBlk, Port, Transport, Vm};

const RDMA_NQN: &str = "nqn.2024-01.org.example:over-rdma";
const TCP_NQN: &str = "nqn.2024-01.org.example:over-tcp";
const HOST: &str =
    "hostnqn=nqn.2024-01.org.example:host,hostid=6a7c2f0e-0c5b-4c5e-9d3e-1f2a3b4c5d6e,nr_io_queues=2";
const HOST_NQN: &str = "nqn.2024-01.org.example:host";
const PORT: u16 = 4420;
const TCP_PORT: u16 = 4421;
const ONE_IN: u32 = 3;
/// Namespace of a drive that has a command whenever the queues go.
const SLOW: u32 = 2;
/// `host_io --reads`, and its threads.
const READS: u64 = 800;
const THREADS: u64 = 4;

const FLUSH: u8 = 0;
const WRITE: u8 = 1;
const READ: u8 = 2;
const COMPARE: u8 = 5;
const WRITE_ZEROES: u8 = 8;
const DATASET_MANAGEMENT: u8 = 9;
const CANCELED: u16 = run_format::Command::CANCELED;

fn the_host_is_recorded(kernel: Kernel) -> Result<()> {
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let tools = ["ip", "rdma"];
    if let Some(tool) = tools.iter().find(|tool| which(tool).is_none()) {
        println!("skipped: soft RoCE is set up with {tool}, which is not in PATH");
        return Ok(());
    }
    let vm = Vm::builder(kernel)
        .program(example("record_kernel")?)
        .program(example("host_io")?)
        .program("ip")
        .program("rdma")
        .boot()?;
    let ends = vm.soft_roce()?;
    let drive = NullBlk { size_mb: 64, memory_backed: true, ..NullBlk::default() };
    let disk = vm.null_blk(drive)?;
    let slow = vm.null_blk(NullBlk { completion: Duration::from_secs(1), ..drive })?;
    let port = Port::new(Transport::Rdma, ends.target_address, PORT);
    vm.nvmet(RDMA_NQN, &[Backing::Block(&disk), Backing::Block(&slow)], &port)?;
    let rdma = vm.connect(&port, RDMA_NQN, &format!("{HOST},host_traddr={}", ends.host_address))?;
    let over_rdma = vm.namespace(&rdma, 1)?;
    let slow_over_rdma = vm.namespace(&rdma, SLOW)?;

    let alone = rdma_alone_by_the_lower_rungs(&vm, &over_rdma)?;
    println!("{} alone {:?} {:?}", vm.release(), alone.counters, alone.events);
    the_load_is_there(&alone, "rdma", true)?;

    let disk = vm.null_blk(drive)?;
    let port = Port::new(Transport::Tcp, "127.0.0.1", TCP_PORT);
    vm.nvmet(TCP_NQN, &[Backing::Block(&disk)], &port)?;
    let tcp = vm.connect(&port, TCP_NQN, HOST)?;
    let over_tcp = vm.namespace(&tcp, 1)?;
    let whole = record(&vm, "host", "whole", "")?;
    ready(&vm, "whole", &whole)?;
    // This one has to learn which operations are the drivers'.
    vm.sh(
        "echo 2 > /proc/sys/kernel/kptr_restrict; ! grep -q '^0*[1-9a-f].* nvme_rdma_mq_ops' /proc/kallsyms",
    )?;
    let some = record(&vm, "host", "some", &format!("--one-in {ONE_IN}"))?;
    ready(&vm, "some", &some)?;
    vm.sh("echo 0 > /proc/sys/kernel/kptr_restrict")?;
    let loads = [&over_rdma, &over_tcp]
        .map(|device| vm.spawn(&format!("host_io --reads {READS} --threads {THREADS} {device}")));
    for load in loads {
        let said = load?.wait(LIMIT)?.check()?.text();
        agrees(&expected(&said)?)?;
    }
    let some = recorded(&vm, "some", some)?;
    let reads =
        [&over_rdma, &slow_over_rdma].map(|device| vm.spawn(&format!("host_io {device} --read-for 4")));
    let drive = slow.rsplit('/').next().unwrap_or_default();
    vm.sh(&format!(
        "sleep 1; for try in $(seq 300); do grep -q '[1-9]' /sys/block/{drive}/inflight && break; sleep 0.1; done; \
         echo 1 > /sys/class/nvme/{}/reset_controller",
        rdma.name
    ))?;
    for reads in reads {
        reads?.wait(LIMIT)?.check().context("reads go on over a reset")?;
    }
    vm.disconnect(&rdma)?;
    let sixth = over_ipv6(&vm, ends.target_device)?;
    vm.disconnect(&tcp)?;
    let whole = recorded(&vm, "whole", whole)?;
    println!("{} whole {:?} {:?}", vm.release(), whole.counters, whole.events);
    println!("some {:?} {:?}", some.counters, some.events);
    println!("{:?}", whole.queues);

    hooks_are_the_moments_themselves(&whole)?;
    the_load_is_there(&whole, "rdma", false)?;
    the_load_is_there(&whole, "tcp", true)?;
    // A kprobe that an interrupt hits inside another is skipped. 6.1 does not count that.
    let uncounted = if kernel == Kernel::Debian6_1 { alone.commands.len() / 50 } else { 0 };
    each_boundary_is_there_in_order(&alone, uncounted)?;
    for recording in [&whole, &some] {
        each_boundary_is_there_in_order(recording, 0)?;
        recording.adds_up()?;
        for lost in ["unreadable", "ring_full", "map_full"] {
            ensure!(recording.counter(lost) == 0, "{:?}", recording.counters);
        }
        recording.sees_nearly_all()?;
        ensure!(
            recording.counter("unfinished") + recording.counter("in_flight") <= recording.missed() as u64
        );
    }
    queues_are_named(&whole, &rdma, &tcp, &sixth)?;
    the_sample_is_right(&whole, &some)?;
    let reset = whole.events.iter().find(|(_, what, on)| what == "controller reset" && *on == rdma.name);
    let reset = reset.with_context(|| format!("no reset among the events {:?}", whole.events))?.0;
    a_reset_makes_new_queues(&whole, reset)?;
    // The slow drive had them when the queues went.
    let canceled = |row: &&Row| row.nsid == SLOW && row.flags & CANCELED != 0;
    let canceled: Vec<&Row> = whole.commands.iter().filter(canceled).collect();
    ensure!(!canceled.is_empty(), "the reset canceled nothing");
    for row in canceled {
        let [sent, received, done] = [Boundary::HSent, Boundary::HRecv, Boundary::HDone].map(|at| row.at(at));
        ensure!(sent.is_some() && received.is_none() && done >= Some(reset), "{row:?}");
    }
    for controller in [&rdma, &tcp] {
        let removed =
            |(_, what, on): &(u64, String, String)| what == "controller removed" && *on == controller.name;
        ensure!(whole.events.iter().any(removed), "{:?}", whole.events);
    }
    content(&vm)
}

fn which(tool: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(tool)).find(|file| file.is_file())
}

/// Before nvme-tcp is loaded, whose types are then unknown.
fn rdma_alone_by_the_lower_rungs(vm: &Vm, device: &str) -> Result<Recording> {
    ensure!(vm.run("grep -q ^nvme_tcp /proc/modules", LIMIT)?.status != 0, "nvme-tcp is loaded");
    let alone = record(vm, "host", "alone", "--avoid fentry")?;
    ready(vm, "alone", &alone)?;
    let said = vm.run(&format!("host_io --reads {READS} --threads {THREADS} {device}"), LIMIT)?;
    agrees(&expected(&said.check()?.text())?)?;
    let alone = recorded(vm, "alone", alone)?;
    for boundary in [Boundary::HDriver, Boundary::HSent, Boundary::HRecv] {
        let hook = alone.hook(boundary, "rdma")?;
        ensure!(hook.hook.starts_with("kprobe nvme_rdma_") && hook.measured, "{boundary}: {hook:?}");
    }
    for boundary in [Boundary::HR2t, Boundary::HDataSent] {
        ensure!(alone.hook(boundary, "rdma").is_err(), "NVMe/RDMA has no {boundary}");
    }
    alone.adds_up()?;
    Ok(alone)
}

/// Connects to the same subsystem over IPv6, does a few reads and disconnects.
fn over_ipv6(vm: &Vm, device: &str) -> Result<Controller> {
    const ADDRESS: &str = "fd00:9::2";
    vm.sh(&format!(
        "set -e; ip -6 addr add {ADDRESS}/128 dev {device} nodad; cd /sys/kernel/config/nvmet/ports; \
         mkdir 6; echo rdma > 6/addr_trtype; echo ipv6 > 6/addr_adrfam; echo {ADDRESS} > 6/addr_traddr; \
         echo {PORT} > 6/addr_trsvcid; ln -s ../subsystems/{RDMA_NQN} 6/subsystems/{RDMA_NQN}"
    ))?;
    let port = Port::new(Transport::Rdma, ADDRESS, PORT);
    let controller = vm.connect(&port, RDMA_NQN, HOST)?;
    let disk = vm.namespace(&controller, 1)?;
    vm.run(&format!("host_io {disk} --read-for 0.5"), LIMIT)?.check()?;
    vm.disconnect(&controller)?;
    Ok(controller)
}

fn hooks_are_the_moments_themselves(whole: &Recording) -> Result<()> {
    for boundary in Boundary::of(Side::Host) {
        for transport in ["tcp", "rdma"] {
            if transport == "rdma" && matches!(boundary, Boundary::HR2t | Boundary::HDataSent) {
                continue;
            }
            let hook = whole.hook(boundary, transport)?;
            ensure!(hook.measured && hook.hook != "-", "{boundary}: {hook:?}");
        }
    }
    Ok(())
}

/// What `host_io` does, by opcode, CDW10/11 and the low half of CDW12.
fn load() -> BTreeMap<(u8, u64, u16), u64> {
    let mut all = BTreeMap::new();
    let mut does = |opcode, at: u64, bytes: u64| {
        let blocks = u16::try_from(bytes / 512 - 1).unwrap_or(u16::MAX);
        *all.entry((opcode, at / 512, blocks)).or_default() += 1;
    };
    for thread in 0..THREADS {
        for i in 0..READS / THREADS {
            let at = (i * 7919 + thread * 104_729) % 2048 * 4096;
            does(READ, at, 4096);
            if i % 8 == 0 {
                does(WRITE, at, 4096);
            }
        }
    }
    for (bytes, times) in [(4096, 10), (16384, 5), (65536, 8), (1 << 20, 3)] {
        for i in 0..times {
            does(WRITE, i * bytes, bytes);
            does(READ, i * bytes, bytes);
        }
    }
    for i in 0..4 {
        does(WRITE_ZEROES, i * 65536, 65536);
        does(COMPARE, i * 4096, 4096);
        does(READ, i * 4096, 4096);
    }
    all
}

/// Whether that is what `host_io` says that it did.
fn agrees(said: &BTreeMap<u8, u64>) -> Result<()> {
    let mut ours: BTreeMap<u8, u64> = BTreeMap::new();
    for ((opcode, ..), count) in load() {
        *ours.entry(opcode).or_default() += count;
    }
    let theirs: BTreeMap<u8, u64> = said
        .iter()
        .filter(|(op, _)| !matches!(**op, FLUSH | DATASET_MANAGEMENT))
        .map(|(o, c)| (*o, *c))
        .collect();
    ensure!(ours == theirs, "the load is {theirs:?}, not {ours:?}");
    Ok(())
}

/// Every command of the load is there as often as it was done, by what identifies it, and the reads of a
/// second load where there was one.
fn the_load_is_there(recording: &Recording, transport: &str, only: bool) -> Result<()> {
    let of = |row: &&Row| recording.queues[row.queue].transport == transport && row.nsid != SLOW;
    let over: Vec<&Row> = recording.commands.iter().filter(of).collect();
    let mut got: BTreeMap<(u8, u64, u16), u64> = BTreeMap::new();
    for row in &over {
        ensure!(row.nsid == 1, "{row:?}");
        let blocks = u32::from(row.nlb0) + 1;
        match row.opcode {
            FLUSH => ensure!((row.slba, row.nlb0, row.bytes) == (0, 0, 0), "{row:?}"),
            // One range: CDW10 is 0, and CDW11 says deallocate. The driver sends a whole page.
            DATASET_MANAGEMENT => ensure!((row.slba, row.bytes) == (4 << 32, 4096), "{row:?}"),
            WRITE_ZEROES => ensure!(row.bytes == 0, "{row:?}"),
            _ => ensure!(row.bytes == blocks * 512 || row.flags & CANCELED != 0, "{row:?}"),
        }
        if !matches!(row.opcode, FLUSH | DATASET_MANAGEMENT) {
            *got.entry((row.opcode, row.slba, row.nlb0)).or_default() += 1;
        }
        // The target's drive may know neither.
        if row.flags & CANCELED == 0 && !matches!(row.opcode, COMPARE | DATASET_MANAGEMENT) {
            ensure!(row.status == 0, "{row:?}");
        }
    }
    let discards = over.iter().filter(|row| row.opcode == DATASET_MANAGEMENT).count() as u64;
    let mut lacking = 4 - discards.min(4);
    ensure!(discards <= 4 && over.iter().filter(|row| row.opcode == FLUSH).count() <= 6);
    for (command, count) in load() {
        lacking += count.saturating_sub(got.get(&command).copied().unwrap_or(0));
    }
    // One whose end was missed has no record either.
    ensure!(
        lacking <= recording.missed() as u64,
        "{lacking} lack: {:?} {:?}",
        recording.counters,
        recording.events
    );
    if only {
        let done = load();
        let more = got.iter().find(|(command, count)| done.get(*command).is_none_or(|most| *count > most));
        ensure!(more.is_none(), "{transport}: {more:?} more often than was done");
    }
    // A tag's generation goes on with each completion, so that none was taken for another. The block layer's
    // own flushes borrow a tag and count for themselves.
    if recording.missed() == 0 && only {
        let mut tags: BTreeMap<(usize, u16), Vec<&Row>> = BTreeMap::new();
        for row in &over {
            tags.entry((row.queue, row.cid & 0xfff)).or_default().push(row);
        }
        for rows in tags.values_mut() {
            rows.sort_by_key(|row| row.at(Boundary::HDriver));
            let (mut last, mut flushes) = (None::<&Row>, 0);
            for &row in &*rows {
                if row.opcode == FLUSH {
                    flushes += 1;
                    continue;
                }
                if let Some(last) = last {
                    let step = ((row.cid >> 12) + 16 - (last.cid >> 12)) % 16;
                    ensure!((1..=1 + flushes).contains(&step), "{step} between {last:?} and {row:?}");
                }
                (last, flushes) = (Some(row), 0);
            }
        }
    }
    Ok(())
}

/// But for those that hits were missed of, and this many.
fn each_boundary_is_there_in_order(recording: &Recording, uncounted: usize) -> Result<()> {
    let mut incomplete = Vec::new();
    let mut received = BTreeSet::new();
    for row in &recording.commands {
        let rdma = recording.queues[row.queue].transport == "rdma";
        let times: Vec<u64> = row.times.iter().copied().flatten().collect();
        ensure!(times.is_sorted(), "out of order: {row:?}");
        let mut lacks = Vec::new();
        for boundary in Boundary::of(Side::Host) {
            let has = row.at(boundary).is_some();
            let wanted = match boundary {
                Boundary::HR2t | Boundary::HDataSent if rdma => false,
                Boundary::HR2t | Boundary::HDataSent => row.opcode == WRITE && row.bytes > 16384,
                // Newer kernels stamp no time on commands that are passed through.
                Boundary::HQueued if matches!(row.opcode, FLUSH | READ | COMPARE) => has,
                Boundary::HSent | Boundary::HRecv if row.flags & CANCELED != 0 => has,
                _ => true,
            };
            if has != wanted {
                lacks.push(boundary);
            }
        }
        if !lacks.is_empty() {
            incomplete.push((lacks, row));
        }
        if rdma {
            ensure!(row.position.is_none() && row.r2ts == 0 && row.turnaround.is_none(), "{row:?}");
            // An entry of the completion queue is for one command: no two got the same moment.
            let at = row.at(Boundary::HRecv);
            ensure!(at.is_none() || received.insert((row.queue, at)), "of another command, too: {row:?}");
        } else {
            ensure!(row.position.is_some() == row.at(Boundary::HSent).is_some(), "{row:?}");
        }
    }
    // A hit is of one command, but bytes from a socket that a hit was missed of may have completed one of each thread's.
    let missed = recording.missed() + (THREADS as usize - 1) * recording.missed_by("receive_");
    ensure!(incomplete.len() <= missed + uncounted, "{missed} and {uncounted} missed, not {incomplete:?}");
    let unqueued = recording.commands.iter().filter(|row| row.at(Boundary::HQueued).is_none()).count();
    // Those that are passed through, of two loads at most.
    ensure!(unqueued <= 2 * (3 + 4 + 4), "{unqueued} commands without h_queued");
    Ok(())
}

fn queues_are_named(
    whole: &Recording,
    rdma: &Controller,
    tcp: &Controller,
    sixth: &Controller,
) -> Result<()> {
    let mut seen = BTreeSet::new();
    for queue in &whole.queues {
        ensure!(queue.host_nqn == HOST_NQN && (1..=2).contains(&queue.qid), "{queue:?}");
        let host = queue.host.0.as_str();
        let over = (queue.transport.as_str(), queue.target.0.as_str(), queue.target.1);
        match over {
            ("rdma", "10.9.0.2", PORT) => {
                ensure!(queue.subsystem_nqn == RDMA_NQN && queue.device == rdma.name, "{queue:?}");
                ensure!(host == "10.9.0.1" && queue.served_by == "-", "{queue:?}");
                ensure!(queue.cntlid == rdma.cntlid || !queue.existed, "{queue:?}");
            }
            ("rdma", "fd00:9::2", PORT) => {
                ensure!(queue.subsystem_nqn == RDMA_NQN && queue.device == sixth.name, "{queue:?}");
                ensure!(host.contains(':') && !queue.existed && queue.cntlid == sixth.cntlid, "{queue:?}");
            }
            ("tcp", "127.0.0.1", TCP_PORT) => {
                ensure!(queue.subsystem_nqn == TCP_NQN && queue.device == tcp.name, "{queue:?}");
                ensure!(host == "127.0.0.1" && queue.cntlid == tcp.cntlid, "{queue:?}");
            }
            _ => bail!("{queue:?}"),
        }
        ensure!(queue.host.1 != 0, "{queue:?}");
        seen.insert(over);
    }
    ensure!(seen.len() == 3, "{seen:?}");
    Ok(())
}

fn the_sample_is_right(whole: &Recording, some: &Recording) -> Result<()> {
    let last = some.commands.iter().filter_map(|row| row.at(Boundary::HEnd)).max().unwrap_or(0);
    // Two recorders do not read the clock at the same moment.
    let while_some = |row: &Row| row.at(Boundary::HDriver) <= Some(last);
    sampling_keeps_what_the_hash_says(whole, some, ONE_IN, while_some)?;
    for transport in ["rdma", "tcp"] {
        let of = |row: &&Row| some.queues[row.queue].transport == transport;
        ensure!(some.commands.iter().filter(of).count() > 100, "few over {transport}");
    }
    Ok(())
}

fn a_reset_makes_new_queues(whole: &Recording, reset: u64) -> Result<()> {
    let rdma: Vec<(usize, &support::QueueRow)> = whole
        .queues
        .iter()
        .enumerate()
        .filter(|(_, queue)| queue.transport == "rdma" && queue.target.0 == "10.9.0.2")
        .collect();
    let live = whole.events.iter().find(|(at, what, _)| what == "controller live" && *at > reset);
    let live = live.with_context(|| format!("not live again: {:?}", whole.events))?.0;
    let (old, new): (Vec<_>, Vec<_>) = rdma.into_iter().partition(|(_, queue)| queue.existed);
    ensure!(!old.is_empty() && !new.is_empty(), "{:?}", whole.queues);
    let ports: BTreeSet<(&str, u16)> =
        whole.queues.iter().map(|queue| (queue.transport.as_str(), queue.host.1)).collect();
    ensure!(ports.len() == whole.queues.len(), "one connection is two queues: {:?}", whole.queues);
    for (id, queue) in old {
        let went = whole.went.get(&id).with_context(|| format!("{queue:?} never went"))?;
        ensure!(*went >= reset && *went <= live, "{queue:?} went at {went}, the reset was at {reset}");
        let late =
            whole.commands.iter().find(|row| row.queue == id && row.at(Boundary::HDriver) > Some(*went));
        ensure!(late.is_none(), "after it went, on the old connection: {late:?}");
    }
    for (id, queue) in new {
        ensure!(whole.went.contains_key(&id), "{queue:?} never went");
        ensure!(whole.commands.iter().any(|row| row.queue == id), "no command on {queue:?}");
    }
    Ok(())
}

#[test]
fn debian_6_1_rdma_host_is_recorded() -> Result<()> {
    the_host_is_recorded(Kernel::Debian6_1)
}

#[test]
fn debian_6_12_rdma_host_is_recorded() -> Result<()> {
    the_host_is_recorded(Kernel::Debian6_12)
}

#[test]
fn newest_rdma_host_is_recorded() -> Result<()> {
    the_host_is_recorded(Kernel::Newest)
}
