//! The kernel's host against the kernel's target in one VM, over TCP and over soft RoCE, recorded on both
//! sides with `fabscope record`, joined and reported on this machine with `fabscope report`: each kind of
//! command and of storage, digests, two queues, a reconnect, and delays of known size found in their stage.

mod support;

use anyhow::{Context, Result, ensure};
use run_format::{Boundary, Kind, Run, Side, Stage, Transport as Wire};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;
use support::vm::{Both, hostnqn};
use support::{Pair, Rows, windows};
use testbed::{Backing, Controller, Kernel, NullBlk, Port, Transport, Vm};

const TRANSPORTS: [Transport; 2] = [Transport::Tcp, Transport::Rdma];

/// Where the target listens.
fn port(transport: Transport, rdma_address: &str) -> Port<'_> {
    match transport {
        Transport::Tcp => Port::new(transport, "127.0.0.1", 4420),
        Transport::Rdma => Port::new(transport, rdma_address, 4421),
    }
}

/// The run format's name for it.
fn wire(transport: Transport) -> Wire {
    match transport {
        Transport::Tcp => Wire::Tcp,
        Transport::Rdma => Wire::Rdma,
    }
}

fn nqn(transport: Transport, of: &str) -> String {
    format!("nqn.2024-01.io.fabscope:{}-{of}", transport.name())
}

/// `fabscope report --by device --detail --format json`.
fn by_device(host: &Path, target: &Path) -> Result<Vec<Value>> {
    let report = support::report_json_with(host, target, &["--by", "device", "--detail"])?;
    report["classes"].as_array().cloned().context("no classes")
}

/// The class of an operation and size on a device and namespace.
fn class<'a>(classes: &'a [Value], group: &str, operation: &str, bytes: u64) -> Result<&'a Value> {
    classes
        .iter()
        .find(|c| {
            c["group"] == group && c["operation"] == operation && c["bytes"] == bytes && c["error"] == false
        })
        .with_context(|| format!("no {operation} of {bytes} on {group} in the report: {classes:#?}"))
}

/// The median of a stage, or of a part of one.
fn median(class: &Value, name: &str) -> Result<f64> {
    let part = class["parts"].as_array().and_then(|all| all.iter().find(|part| part["part"] == name));
    let figures = part.unwrap_or(&class["stages"][name]);
    figures["p50_ns"].as_f64().with_context(|| format!("no median of {name}: {class:#}"))
}

/// What holds for all pairs of runs here, besides what [`Pair::join`] checks.
fn both_sides_tell_the_same(host: &Path, target: &Path, least: u64) -> Result<Pair> {
    let pair = Pair::join(host, target)?;
    pair.nearly_all_joined(least)?;
    ensure!(pair.joined.clock().is_some_and(|clock| clock.shared), "one VM has one clock");
    for run in [host, target] {
        let run = Run::open(run)?;
        ensure!(run.manifest().kind == Kind::Kernel);
        each_boundary_was_taken(&run)?;
        for queue in run.queues()?.values() {
            ensure!(queue.host_nqn == hostnqn() && queue.subsystem_nqn.contains("fabscope"), "{queue:?}");
        }
    }
    Ok(pair)
}

/// Every command has a time for each boundary that it passed, but for those that the kernel says it skipped hits of,
/// and each time is the moment itself.
fn each_boundary_was_taken(run: &Run) -> Result<()> {
    let mut incomplete: BTreeMap<usize, String> = BTreeMap::new();
    let rows = Rows::read(run)?;
    let (queues, side) = (run.queues()?, run.manifest().side);
    let (queue, r2ts, flags) = (rows.full("queue")?, rows.full("r2ts")?, rows.full("flags")?);
    let over: BTreeMap<i64, Wire> = queues.iter().map(|(id, q)| (i64::from(id.0), q.transport)).collect();
    for boundary in Boundary::of(side) {
        let of_data = matches!(boundary.name(), "h_r2t" | "h_data_sent" | "t_r2t" | "t_data");
        let times = rows.column(boundary.name())?;
        let mut passed_by = BTreeSet::new();
        for row in 0..rows.len() {
            let over = over[&queue[row]];
            // The RDMA host only lets its memory be read.
            let passed = !of_data || r2ts[row] > 0 && (over, side) != (Wire::Rdma, Side::Host);
            // One that a reset cut off passed some of them.
            let cut = flags[row] & CANCELED != 0;
            if !cut && times[row].is_some() != passed {
                incomplete.entry(row).or_default().push_str(&format!(
                    "{boundary} is {:?} for a command over {over:?} of opcode {:?}, {:?} bytes and {} R2Ts; ",
                    times[row],
                    rows.full("opcode")?[row],
                    rows.full("bytes")?[row],
                    r2ts[row]
                ));
            }
            passed_by.extend(passed.then_some(over.name()));
        }
        for over in passed_by {
            let mut hooks = run.manifest().hooks.iter().filter(|hook| hook.boundary == boundary);
            let hook = hooks.find(|hook| hook.transport.is_none_or(|of| of.name() == over));
            ensure!(hook.is_some_and(|hook| hook.hook.is_some() && hook.measured), "{boundary}: {hook:?}");
        }
    }
    let missed = support::missed(run);
    ensure!(incomplete.len() <= missed, "{missed} hits missed, not {incomplete:#?}");
    Ok(())
}

const CANCELED: i64 = run_format::Command::CANCELED as i64;

// ---------------------------------------------------------------- delays

/// What the faster drive takes: a timer's time, as the slower one's is.
const WAIT: Duration = Duration::from_micros(100);
const STORAGE: Duration = Duration::from_micros(300);
/// One way; a command and its answer go both.
const NETWORK: Duration = Duration::from_millis(1);
const TOLERANCE: f64 = 0.05;
/// By what share of itself a stage may move besides: soft RoCE takes 0.9 ms for the data of a large write, three
/// times the drive's delay, and not always the same.
const SCATTER: f64 = 0.03;

/// Fails unless `stage` grew by `delay`, and no other stage did.
fn only_grew(was: &Value, is: &Value, stage: Stage, delay: Duration) -> Result<()> {
    let delay = delay.as_nanos() as f64;
    let mut wrong = Vec::new();
    for each in Stage::ALL {
        let (was, is) = (median(was, each.name())?, median(is, each.name())?);
        let expected = if each == stage { delay } else { 0.0 };
        eprintln!(
            "  {:<18} {was:>9} to {is:>9} ns: {:+.2} % of the delay",
            each.title(),
            (is - was) / delay * 100.0
        );
        if (is - was - expected).abs() > (TOLERANCE * delay).max(SCATTER * was) {
            wrong.push(each.title());
        }
    }
    ensure!(wrong.is_empty(), "a delay in {} shows wrongly in {wrong:?}", stage.title());
    Ok(())
}

/// Time is counted in instructions, so that one round is as good as many. The drives are two namespaces, the
/// near and the far target two controllers, and both transports are in one recording.
fn delays_are_found(kernel: Kernel) -> Result<()> {
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let both = Both::boot(Vm::builder(kernel).counted_time())?;
    let vm = &both.vm;
    let roce = vm.soft_roce()?;
    let drive = |completion| {
        vm.null_blk(NullBlk { size_mb: 64, completion, memory_backed: true, ..NullBlk::default() })
    };
    let (fast, slow) = (drive(WAIT)?, drive(WAIT + STORAGE)?);
    let (mut near, mut far, mut devices) = (String::new(), String::new(), Vec::new());
    for transport in TRANSPORTS {
        let port = port(transport, roce.target_address);
        let connect = |of: &str, backings: &[Backing<'_>], jobs: &mut String| -> Result<String> {
            vm.nvmet(&nqn(transport, of), backings, &port)?;
            let controller = both.connect(&port, &nqn(transport, of), "nr_io_queues=1")?;
            for (nsid, _) in (1..).zip(backings) {
                let device = vm.namespace(&controller, nsid)?;
                for (rw, bytes, ios) in LOADS {
                    jobs.push_str(&format!(
                        " --name={rw}-{bytes} --stonewall --filename={device} --rw={rw} --bs={bytes} --number_ios={ios}"
                    ));
                }
            }
            Ok(controller.name)
        };
        let near = connect("near", &[Backing::Block(&fast), Backing::Block(&slow)], &mut near)?;
        let far = connect("far", &[Backing::Block(&fast)], &mut far)?;
        devices.push((transport, near, far));
    }
    let fio = "fio --ioengine=psync --direct=1 --size=64m --output-format=terse";
    let network = |change: &str| -> String {
        ["lo", roce.host_device, roce.target_device]
            .map(|device| format!("tc qdisc {change} && ").replace("DEVICE", device))
            .concat()
    };
    let load = format!(
        "sh -c '{fio}{near} && {}{fio}{far} && {}true'",
        network(&format!("add dev DEVICE root netem limit 10000 delay {}us", NETWORK.as_micros())),
        network("del dev DEVICE root")
    );
    // Where one CPU does all, sampling is work between a command's moments.
    let (host, target) = both.record_with("delays", "--telemetry off", &load)?;
    let all: u64 = LOADS.iter().map(|load| load.2).sum();
    let pair = both_sides_tell_the_same(&host, &target, all * 6)?;
    pair.none_wrong_by_order()?;
    let classes = by_device(&host, &target)?;
    for (transport, near, far) in devices {
        for (rw, bytes, ios) in LOADS {
            let of = |device: &str, nsid| -> Result<&Value> {
                let class = class(&classes, &format!("{device} nsid {nsid}"), &rw[4..], bytes)?;
                ensure!(class["commands"].as_u64() >= Some(ios), "{class:#}");
                Ok(class)
            };
            let what = format!("{} {} {rw} {bytes}", vm.release(), transport.name());
            let (was, is) = (of(&near, 1)?, of(&near, 2)?);
            eprintln!("{what}, a drive slower by {STORAGE:?}:");
            only_grew(was, is, Stage::Storage, STORAGE)?;
            // The drive is told from the target's block layer.
            let grew = median(is, "storage_drive")? - median(was, "storage_drive")?;
            ensure!(
                (grew / STORAGE.as_nanos() as f64 - 1.0).abs() < TOLERANCE,
                "the drive grew by {grew} ns"
            );
            // Larger writes go there and back once more, for their data.
            if bytes <= IN_CAPSULE {
                eprintln!("{what}, a network longer by {:?}:", 2 * NETWORK);
                only_grew(was, of(&far, 1)?, Stage::Network, 2 * NETWORK)?;
            }
        }
    }
    both.end()
}

/// What the target takes with a capsule.
const IN_CAPSULE: u64 = 4096;

/// Of one command at a time: what fio is to do, with how many bytes, how often.
const LOADS: [(&str, u64, u64); 3] =
    [("randread", 4096, 150), ("randwrite", 4096, 150), ("randwrite", 65536, 60)];

#[test]
fn debian_6_1_delays_are_found() -> Result<()> {
    delays_are_found(Kernel::Debian6_1)
}

#[test]
fn debian_6_12_delays_are_found() -> Result<()> {
    delays_are_found(Kernel::Debian6_12)
}

#[test]
fn the_newest_kernels_delays_are_found() -> Result<()> {
    delays_are_found(Kernel::Newest)
}

// ---------------------------------------------------------------- time windows

/// Both sides put their probes in place and take them away again and again, at the same times of the wall clock; what
/// is whole in windows of both is joined.
#[test]
fn windows_of_both_sides_are_in_step() -> Result<()> {
    let kernel = Kernel::Debian6_12;
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let both = Both::boot(Vm::builder(kernel).counted_time())?;
    let vm = &both.vm;
    let drive = vm.null_blk(NullBlk {
        size_mb: 64,
        completion: Duration::ZERO,
        memory_backed: true,
        ..NullBlk::default()
    })?;
    let port = port(Transport::Tcp, "");
    vm.nvmet(&nqn(Transport::Tcp, "windows"), &[Backing::Block(&drive)], &port)?;
    let controller = both.connect(&port, &nqn(Transport::Tcp, "windows"), "nr_io_queues=2")?;
    let block = vm.namespace(&controller, 1)?;
    // Time is counted in instructions: how long it takes to put probes in place is no matter of other work.
    let load = format!(
        "fio --name=x --filename={block} --ioengine=libaio --direct=1 --output-format=json --size=32m --rw=randrw \
         --bs=4k --iodepth=4 --rate_iops=100 --time_based --runtime=32"
    );
    let (host, target) = both.record_with("windows", "--telemetry off --window 5s/14s", &load)?;
    for run in [&host, &target] {
        let run = Run::open(run)?;
        let windows = run.manifest().windows.context("it was windowed")?;
        eprintln!("{}: {windows:?}", run.manifest().side);
        // Two windows begin in that time at least, of which the first may come too soon after the beginning.
        ensure!(windows.slices >= 1 && windows.slices + windows.skipped >= 2, "{windows:?}");
        ensure!(windows.in_place_ns > windows.armed_ns && windows.under_way.is_none(), "{windows:?}");
        windows::adds_up(run.manifest())?;
        let (commands, astray) = windows::astray(&run)?;
        ensure!(commands > 200 && astray == 0, "{astray} of {commands} are not whole within a slice");
        each_boundary_was_taken(&run)?;
    }
    let pair = Pair::join(&host, &target)?;
    pair.nearly_all_joined(200)?;
    both.end()
}

// ---------------------------------------------------------------- every kind of command and of storage

/// What the target takes with a capsule over TCP, and over RDMA.
const fn in_capsule(over: Wire) -> i64 {
    match over {
        Wire::Tcp => 16384,
        Wire::Rdma => 4096,
    }
}

/// fio's jobs for a device, and what they make of reads, writes, and discards. Each write of 4 KiB in eight is
/// followed by a flush.
struct Jobs {
    options: &'static [&'static str],
    reads: u64,
    writes: u64,
    flushes: u64,
    discards: u64,
}

const MANY: Jobs = Jobs {
    options: &[
        "--rw=randread --bs=4k --number_ios=200",
        "--rw=randread --bs=4k --iodepth=16 --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --number_ios=400",
        "--rw=randwrite --bs=4k --iodepth=4 --fsync=8 --number_ios=200",
        "--rw=randwrite --bs=64k --iodepth=4 --number_ios=100",
        "--rw=randwrite --bs=256k --number_ios=20",
        "--rw=randtrim --bs=64k --number_ios=40",
    ],
    reads: 1000,
    writes: 320,
    flushes: 200 / 8 - 1,
    discards: 40,
};
const FEW: Jobs = Jobs {
    options: &[
        "--rw=randread --bs=4k --iodepth=4 --number_ios=60",
        "--rw=randwrite --bs=4k --fsync=8 --number_ios=40",
        "--rw=randwrite --bs=64k --iodepth=4 --number_ios=30",
        "--rw=randtrim --bs=64k --number_ios=10",
    ],
    reads: 60,
    writes: 70,
    flushes: 40 / 8 - 1,
    discards: 10,
};

const FLUSH: i64 = 0;
const WRITE: i64 = 1;
const READ: i64 = 2;
const DATASET_MANAGEMENT: i64 = 9;

/// A namespace under load.
struct Loaded {
    /// `nvme1 nsid 1`.
    name: String,
    block: String,
    jobs: Jobs,
    /// Whether the drive's time can be told from its storage's; none where either is right.
    drive: Option<bool>,
}

/// The rows of a run by device and namespace.
fn rows_of(run: &Run, rows: &Rows) -> Result<BTreeMap<String, Vec<usize>>> {
    let queues = run.queues()?;
    let device: BTreeMap<i64, String> =
        queues.iter().map(|(id, q)| (i64::from(id.0), q.device.clone().unwrap_or_default())).collect();
    let (queue, nsid) = (rows.full("queue")?, rows.full("nsid")?);
    let mut of = BTreeMap::<String, Vec<usize>>::new();
    for row in 0..rows.len() {
        of.entry(format!("{} nsid {}", device[&queue[row]], nsid[row])).or_default().push(row);
    }
    Ok(of)
}

/// Each job did what it was told to do, and its commands went the way that they had to.
fn each_command_is_there(
    pair: &Pair,
    runs: [&Path; 2],
    transport: Transport,
    loaded: &[Loaded],
) -> Result<()> {
    let wire = wire(transport);
    let [run, target] = [Run::open(runs[0])?, Run::open(runs[1])?];
    let [missed, target_missed] = [&run, &target].map(|run| support::missed(run) as u64);
    let of = rows_of(&run, &pair.host)?;
    let column = |name| pair.host.full(name);
    let (opcode, bytes, status) = (column("opcode")?, column("bytes")?, column("status")?);
    let target_row: BTreeMap<usize, usize> =
        pair.joined.pairs().iter().map(|p| (p.host_row as usize, p.target_row as usize)).collect();
    let r2ts = pair.target.full("r2ts")?;
    let (submit, done, drive) =
        (pair.target.column("t_submit")?, pair.target.column("t_done")?, pair.target.column("t_drive")?);
    for Loaded { name, block, jobs, drive: has_drive } in loaded {
        let rows = of.get(name).with_context(|| format!("nothing of {name} ({block}) was recorded"))?;
        let count = |of: i64| rows.iter().filter(|&&row| opcode[row] == of).count() as u64;
        for (what, opcode, expected) in [
            ("reads", READ, jobs.reads),
            ("writes", WRITE, jobs.writes),
            ("flushes", FLUSH, jobs.flushes),
            ("discards", DATASET_MANAGEMENT, jobs.discards),
        ] {
            // fio may flush once more at a job's end, and read a little before it begins.
            let most = if matches!(opcode, FLUSH | READ) { expected + 40 } else { expected };
            ensure!(
                (expected.saturating_sub(missed)..=most).contains(&count(opcode)),
                "{name} ({block}): {} {what}, not {expected}",
                count(opcode)
            );
        }
        let mut with_drive = 0;
        for &row in rows {
            ensure!(status[row] == 0, "{name}: {} failed with {:#x}", opcode[row], status[row]);
            let Some(&t) = target_row.get(&row) else { continue };
            let asked = opcode[row] == WRITE && bytes[row] > in_capsule(wire);
            ensure!((r2ts[t] > 0) == asked, "{name}: {} R2Ts for {} bytes", r2ts[t], bytes[row]);
            if let Some(drive) = drive[t] {
                if let (Some(submit), Some(done)) = (submit[t], done[t]) {
                    let storage = done - submit;
                    ensure!(
                        (1..=storage).contains(&drive),
                        "{name}: drive {drive} ns of storage's {storage} ns"
                    );
                }
                with_drive += u64::from(matches!(opcode[row], READ | WRITE));
            }
        }
        eprintln!("  {name:<14} {block}: {} commands, drive's time of {with_drive}", rows.len());
        if let Some(has_drive) = has_drive {
            let all = if *has_drive { count(READ) + count(WRITE) } else { 0 };
            // Those that were not joined were not looked at.
            ensure!(
                (all.saturating_sub(2 + missed + target_missed)..=all).contains(&with_drive),
                "{name}: {with_drive} of {all} drives"
            );
        }
    }
    Ok(())
}

fn everything_is_recorded(kernel: Kernel) -> Result<()> {
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let both = Both::boot(Vm::builder(kernel).nvme_drive(64).nvme_drive(64))?;
    let vm = &both.vm;
    vm.load_module("nvme")?;
    vm.sh("for try in $(seq 600); do [ -b /dev/nvme0n1 ] && [ -b /dev/nvme1n1 ] && exit; sleep 0.1; done; exit 1")?;
    let drive = || {
        vm.null_blk(NullBlk {
            size_mb: 64,
            completion: Duration::ZERO,
            memory_backed: true,
            ..NullBlk::default()
        })
    };
    let (null, beneath) = (drive()?, drive()?);
    vm.sh(&format!("mke2fs -q {beneath}; mkdir /tmp/ext4; mount -t ext4 {beneath} /tmp/ext4"))?;
    vm.sh("truncate -s 33554432 /tmp/ext4/file /tmp/file")?;
    let storage = [
        (Backing::Block(null.as_str()), Some(true)),
        (Backing::Block("/dev/nvme0n1"), Some(true)),
        (Backing::File("/tmp/ext4/file"), Some(false)),
        (Backing::Buffered("/tmp/file"), Some(false)),
    ];
    let mut read = Vec::new();
    for transport in TRANSPORTS {
        // The drivers of the second are not there yet when the first is recorded.
        let roce_address = match transport {
            Transport::Tcp => "",
            Transport::Rdma => vm.soft_roce()?.target_address,
        };
        let port = port(transport, roce_address);
        let mut loaded = Vec::new();
        let mut add = |controller: &Controller, nsid: u32, mut jobs: Jobs, drive| -> Result<String> {
            let (name, block) = (format!("{} nsid {nsid}", controller.name), vm.namespace(controller, nsid)?);
            // What has no volatile cache, and says so, is not flushed.
            let file = block.replace("/dev/", "/sys/class/block/") + "/queue/write_cache";
            if vm.sh(&format!("cat {file}"))?.trim() != "write back" {
                jobs.flushes = 0;
            }
            loaded.push(Loaded { name, block: block.clone(), jobs, drive });
            Ok(block)
        };
        let all = nqn(transport, "all");
        vm.nvmet(&all, &storage.map(|(backing, _)| backing), &port)?;
        let controller = both.connect(&port, &all, "nr_io_queues=2")?;
        for (nsid, (_, drive)) in (1..).zip(storage) {
            let block = add(&controller, nsid, if nsid == 1 { MANY } else { FEW }, drive)?;
            if nsid == 1 {
                read.push((transport, controller.name.clone(), block));
            }
        }
        if transport == Transport::Tcp {
            let digests = nqn(transport, "digests");
            vm.nvmet(&digests, &[storage[0].0], &port)?;
            let controller = both.connect(&port, &digests, "nr_io_queues=2,hdr_digest,data_digest")?;
            add(&controller, 1, FEW, Some(true))?;
        }
        if kernel == Kernel::Debian6_1 {
            support::skipped("Debian's 6.1 kernel passes no controller through");
        } else {
            let whole = nqn(transport, "whole");
            // A controller is passed through by one subsystem only.
            let drive = if transport == Transport::Tcp { "/dev/nvme0" } else { "/dev/nvme1" };
            vm.nvmet_passthru(&whole, drive, &port)?;
            let controller = both.connect(&port, &whole, "nr_io_queues=2")?;
            add(&controller, 1, FEW, None)?;
        }
        let mut load = String::from("fio --ioengine=libaio --direct=1 --size=32m --output-format=json");
        for Loaded { block, jobs, .. } in &loaded {
            for job in jobs.options {
                load.push_str(&format!(" --name=x --stonewall --filename={block} {job}"));
            }
        }
        let (host, target) = both.record(transport.name(), &load)?;
        eprintln!("{} {}:", vm.release(), transport.name());
        let least =
            loaded.iter().map(|l| l.jobs.reads + l.jobs.writes + l.jobs.flushes + l.jobs.discards).sum();
        let pair = both_sides_tell_the_same(&host, &target, least)?;
        // By order only where no command lacks on a side, and none has no time.
        let missed = support::missed(&Run::open(&host)?) + support::missed(&Run::open(&target)?);
        if missed == 0 {
            pair.none_wrong_by_order()?;
        } else {
            eprintln!("{missed} hits were missed: pairs are not held against the order of capsules");
        }
        each_command_is_there(&pair, [&host, &target], transport, &loaded)?;
        both_queues_were_used(&pair, &host, &controller.name)?;
        let classes = by_device(&host, &target)?;
        for Loaded { name, .. } in &loaded {
            ensure!(median(class(&classes, name, "read", 4096)?, "storage")? > 0.0);
            ensure!(class(&classes, name, "write", 65536)?["commands"].as_u64() >= Some(30));
        }
    }
    a_reconnect_makes_new_queues(&both, &read)?;
    both.end()
}

fn both_queues_were_used(pair: &Pair, host: &Path, device: &str) -> Result<()> {
    let queue = pair.host.full("queue")?;
    let used: BTreeSet<i64> = queue.iter().copied().collect();
    let queues = Run::open(host)?.queues()?;
    let qids: BTreeSet<u16> = queues
        .iter()
        .filter(|(id, q)| used.contains(&i64::from(id.0)) && q.device.as_deref() == Some(device))
        .map(|(_, q)| q.qid)
        .collect();
    ensure!(qids == BTreeSet::from([1, 2]), "{device} used the queues {qids:?}");
    Ok(())
}

/// Each of these controllers is reset while it reads from its device: it has connections of its own before and
/// after, and what went over them is joined with what went over the same.
fn a_reconnect_makes_new_queues(both: &Both, read: &[(Transport, String, String)]) -> Result<()> {
    // A hundred reads are done before each reset, and a hundred after it.
    let mut script = String::from(
        "reads() { cat /sys/class/nvme/$1/nvme*c*n*/stat | awk '{ done += $1 } END { print done }'; }\n\
         more() { at=$(($(reads $1) + 100)); until [ $(reads $1) -ge $at ]; do kill -0 $fio || exit 9; \
         sleep 0.05; done; }\n\
         fio --ioengine=libaio --iodepth=4 --direct=1 --time_based --runtime=600 --rw=randread --bs=4k",
    );
    for (transport, _, block) in read {
        script.push_str(&format!(" --name={} --filename={block} --size=32m", transport.name()));
    }
    script.push_str(" > /dev/null & fio=$!\n");
    for (_, controller, _) in read {
        script.push_str(&format!(
            "more {controller}; echo 1 > /sys/class/nvme/{controller}/reset_controller; more {controller}\n"
        ));
    }
    script.push_str("kill -INT $fio; wait $fio; exit 0\n");
    both.vm.sh(&format!("cat > /tmp/reset.sh <<'END'\n{script}END"))?;
    let (host, target) = both.record("reset", "sh /tmp/reset.sh")?;
    let pair = Pair::join(&host, &target)?;
    let (ours, theirs) = (Run::open(&host)?.queues()?, Run::open(&target)?.queues()?);
    let used: BTreeSet<i64> = pair.host.full("queue")?.into_iter().collect();
    for (transport, ..) in read {
        for existed in [true, false] {
            let found = ours.iter().any(|(id, q)| {
                used.contains(&i64::from(id.0)) && q.transport == wire(*transport) && q.existed == existed
            });
            let when = if existed { "before" } else { "after" };
            ensure!(found, "nothing over {} {when} the reset: {ours:#?}", transport.name());
        }
    }
    let (queue, of) = (pair.host.full("queue")?, pair.target.full("queue")?);
    for p in pair.joined.pairs() {
        let id = |id: i64| run_format::QueueId(id as u32);
        let (h, t) = (&ours[&id(queue[p.host_row as usize])], &theirs[&id(of[p.target_row as usize])]);
        let port = |q: &run_format::Queue| q.host.as_ref().map(|end| end.port);
        ensure!(port(h).is_some() && port(h) == port(t), "{h:?} and {t:?} are two connections");
    }
    // What the reset cut off may have no other side.
    let flags = pair.host.full("flags")?;
    let cut = flags.iter().filter(|flags| *flags & CANCELED != 0).count() as u64;
    let accounting = pair.joined.accounting();
    eprintln!("reset: {} of {} commands joined, {cut} cut off", accounting.joined, accounting.host_commands);
    ensure!(
        accounting.joined as f64 >= 0.999 * (accounting.host_commands - cut) as f64
            && accounting.joined > 200,
        "{accounting:#?}\n{:#?}",
        pair.joined.notes()
    );
    Ok(())
}

#[test]
fn everything_is_recorded_on_debian_6_1() -> Result<()> {
    everything_is_recorded(Kernel::Debian6_1)
}

#[test]
fn everything_is_recorded_on_debian_6_12() -> Result<()> {
    everything_is_recorded(Kernel::Debian6_12)
}

#[test]
fn everything_is_recorded_on_the_newest_kernel() -> Result<()> {
    everything_is_recorded(Kernel::Newest)
}
