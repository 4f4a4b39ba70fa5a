//! The self-test of the diagnosis with the kernel's host and target in one VM: causes are injected by the machine's own
//! means (netem, null_blk, device mapper, sysctl, MTUs, busy CPUs), both sides are recorded without and with each, and
//! `fabscope diagnose` has to name that cause first, in its stage and with its size; and none where there is none.

mod support;

use anyhow::{Context, Result, ensure};
use run_format::{Run, Stage};
use std::time::Duration;
use support::causes::{Bed, Case, Size};
use testbed::{Backing, Controller, Kernel, NullBlk, Port, SoftRoce, Transport, Vm};

const FIO: &str = "fio --ioengine=libaio --direct=1 --size=60m --output=/dev/null";

/// How long the drives take. Long beside what an emulated CPU does for a command, so that it has time to spare.
const DRIVE: Duration = Duration::from_millis(6);
/// Of drives that sixteen commands come to at once.
const DEEP: Duration = Duration::from_millis(20);
/// A drive that is to be waited for by many.
const QUICK: Duration = Duration::from_millis(2);
/// Of the slow part of a drive that has one.
const SLOW: Duration = Duration::from_millis(60);
/// How long a packet takes, each way.
const WAY: Duration = Duration::from_millis(1);

const STORAGE: &[Stage] = &[Stage::Storage];
const NETWORK: &[Stage] = &[Stage::Network];

fn nqn(of: &str) -> String {
    format!("nqn.2024-01.io.fabscope:{of}")
}

/// The namespaces of a controller that share drives.
struct Devices {
    /// Works on all commands at once.
    roomy: String,
    /// Works on one command at a time.
    one: String,
    /// A second namespace of a drive that works on one quick command at a time, and the first.
    shared: [String; 2],
    /// A drive of two parts, of which one may be slow.
    parts: String,
}

fn storage(bed: &mut Bed) -> Result<Controller> {
    let vm = &bed.both.vm;
    let drive =
        |completion, at_once| vm.null_blk(NullBlk { size_mb: 64, completion, at_once, ..NullBlk::default() });
    let (roomy, one, quick) = (drive(DEEP, 64)?, drive(DEEP, 1)?, drive(QUICK, 1)?);
    let (young, old) = (drive(DRIVE, 64)?, drive(SLOW, 64)?);
    const SECTORS: u64 = 64 << 11;
    // 4 % of what the load reads.
    const AGEING: u64 = (60 << 11) * 4 / 100 / 8 * 8;
    vm.sh(&format!(
        "modprobe dm_mod; dmsetup create parts --noudevrules --noudevsync --table '0 {SECTORS} linear {young} 0'"
    ))?;
    let backings = [&roomy, &one, &quick, &quick, "/dev/dm-0"].map(Backing::Block);
    vm.nvmet(&nqn("storage"), &backings, &bed.port(4420, None))?;
    let controller = bed.both.connect(&bed.port(4420, None), &nqn("storage"), "nr_io_queues=1")?;
    let namespace = |nsid| vm.namespace(&controller, nsid);
    let on = Devices {
        roomy: namespace(1)?,
        one: namespace(2)?,
        shared: [namespace(3)?, namespace(4)?],
        parts: namespace(5)?,
    };

    // Sixteen come at once: the first waits for itself, the last for all.
    let bursts = |device: &str, size: &str| {
        format!(
            "{FIO} --name=x --filename={device} --rw=randread --bs={size} --iodepth=16 --iodepth_batch_submit=16 \
             --iodepth_batch_complete_min=16 --iodepth_batch_complete_max=16 --number_ios=480"
        )
    };
    for (cause, size) in [("drive_saturated", "32k"), ("iops_limit", "4k")] {
        let clean = bed.load(&bursts(&on.roomy, size))?;
        let fault = bed.load(&bursts(&on.one, size))?;
        let case = Case {
            cause: Some(cause),
            name: cause,
            injected: "null_blk: the drive works on one command at a time instead of 64, and 16 come at once",
            stages: STORAGE,
            size: Size { of: STORAGE, by: DEEP * 15 / 2, within: Some(0.1) },
        };
        bed.expect(case, clean, fault);
    }

    let two_parts =
        format!("{FIO} --name=x --filename={} --rw=randread --bs=4k --iodepth=2 --number_ios=800", on.parts);
    let clean = bed.load(&two_parts)?;
    bed.sh(&format!(
        "dmsetup suspend parts; printf '0 {AGEING} linear {old} 0\\n{AGEING} {} linear {young} {AGEING}\\n' \
         | dmsetup load parts && dmsetup resume parts --noudevrules --noudevsync",
        SECTORS - AGEING
    ))?;
    let fault = bed.load(&two_parts)?;
    let case = Case {
        cause: Some("drive_internal"),
        name: "drive_internal",
        injected: "device mapper: 4 % of the drive's addresses take 60 ms, the others 6 ms",
        stages: STORAGE,
        size: Size { of: STORAGE, by: (SLOW - DRIVE) * 4 / 100, within: Some(0.35) },
    };
    bed.expect(case, clean, fault);

    let victim =
        format!("{FIO} --name=victim --filename={} --rw=randread --bs=4k --number_ios=800", on.shared[0]);
    let neighbour = format!(
        "{victim} --name=neighbour --filename={} --rw=randread --bs=16k --iodepth=16 --iodepth_batch_submit=16 \
         --iodepth_batch_complete_min=16 --iodepth_batch_complete_max=16 --thinktime=20ms --thinktime_blocks=16 --number_ios=2400",
        on.shared[1]
    );
    let clean = bed.load(&victim)?;
    let fault = bed.load(&neighbour)?;
    let case = Case {
        cause: Some("noisy_neighbour"),
        name: "noisy_neighbour",
        injected: "16 reads at once of another namespace of the same null_blk drive, which works on one at a time",
        stages: STORAGE,
        size: Size { of: STORAGE, by: QUICK / 2, within: None },
    };
    bed.expect(case, clean, fault);
    Ok(controller)
}

/// Connected anew, so that what was set is in force, to one namespace of a roomy drive.
fn connected(bed: &Bed, of: &str, port: u16, in_capsule: Option<u32>) -> Result<(Controller, String)> {
    let vm = &bed.both.vm;
    if vm.run(&format!("test -e /sys/kernel/config/nvmet/subsystems/{}", nqn(of)), testbed::SHORT)?.status
        != 0
    {
        let roomy = vm.null_blk(NullBlk { size_mb: 64, completion: DRIVE, ..NullBlk::default() })?;
        vm.nvmet(&nqn(of), &[Backing::Block(&roomy)], &bed.port(port, in_capsule))?;
    }
    let controller = bed.both.connect(&bed.port(port, None), &nqn(of), "nr_io_queues=1")?;
    let device = vm.namespace(&controller, 1)?;
    // New connections are looked for every two seconds.
    vm.sh("sleep 3")?;
    Ok((controller, device))
}

fn network(bed: &mut Bed) -> Result<()> {
    let delay = format!("delay {}us", WAY.as_micros());
    let round_trip = 2 * WAY;

    // A longer way: no cause that it knows, and slower all the same.
    let (controller, device) = connected(bed, "way", 4420, None)?;
    let reads = format!("{FIO} --name=x --filename={device} --rw=randread --bs=4k --number_ios=600");
    let near = bed.load(&reads)?;
    bed.netem(&delay)?;
    let far = bed.load(&reads)?;
    let case = Case {
        cause: None,
        name: "long_way",
        injected: "netem: 1 ms each way, which is no fault",
        stages: NETWORK,
        size: Size { of: NETWORK, by: round_trip, within: Some(0.1) },
    };
    bed.expect(case, near, far);

    bed.netem(&format!("{delay} loss 2%"))?;
    let lossy = bed.load(&reads)?;
    let case = Case {
        cause: Some("fabric_loss"),
        name: "fabric_loss",
        injected: "netem: 2 % of the packets are lost",
        stages: NETWORK,
        size: Size { of: NETWORK, by: round_trip / 100, within: None },
    };
    bed.expect(case, far, lossy);
    bed.netem("")?;
    bed.both.vm.disconnect(&controller)?;

    // A capsule takes 16 KiB unless it is told to take less.
    bed.netem(&delay)?;
    let mut runs = Vec::new();
    for (name, port, in_capsule) in [("clean", 4420, None), ("fault", 4421, Some(4096))] {
        let (controller, device) = connected(bed, &format!("r2t-{name}"), port, in_capsule)?;
        let writes = format!("{FIO} --name=x --filename={device} --rw=randwrite --bs=8k --number_ios=250");
        runs.push(bed.load(&writes)?);
        bed.both.vm.disconnect(&controller)?;
    }
    let case = Case {
        cause: Some("r2t_round_trips"),
        name: "r2t_round_trips",
        injected: "nvmet: a capsule takes 4 KiB, and writes have 8",
        stages: NETWORK,
        size: Size { of: NETWORK, by: round_trip, within: Some(0.1) },
    };
    bed.expect(case, runs[0], runs[1]);

    let mut runs = Vec::new();
    for most in [None, Some(16384)] {
        if let Some(most) = most {
            bed.sh(&format!("echo 4096 8192 {most} > /proc/sys/net/ipv4/tcp_rmem"))?;
        }
        let (controller, device) = connected(bed, "window", 4420, None)?;
        let reads = format!("{FIO} --name=x --filename={device} --rw=randread --bs=64k --number_ios=220");
        runs.push(bed.load(&reads)?);
        bed.both.vm.disconnect(&controller)?;
    }
    bed.sh("echo 4096 131072 6291456 > /proc/sys/net/ipv4/tcp_rmem")?;
    let case = Case {
        cause: Some("transport_window"),
        name: "transport_window",
        injected: "sysctl: the host's receive window has 16 KiB at most, and reads have 64",
        stages: NETWORK,
        size: Size { of: NETWORK, by: 3 * round_trip, within: None },
    };
    bed.expect(case, runs[0], runs[1]);

    head_of_line(bed)?;
    bed.netem("")
}

/// What a link carries, bits a second.
const LINK: u64 = 100_000_000;
/// A large read on it.
const LARGE: u64 = 256 << 10;

fn head_of_line(bed: &mut Bed) -> Result<()> {
    bed.netem(&format!("rate {LINK}bit"))?;
    let (controller, device) = connected(bed, "way", 4420, None)?;
    const SMALL: u32 = 500;
    const LARGES: u32 = 100;
    let small = format!("{FIO} --filename={device} --rw=randread --name=small --bs=4k --number_ios={SMALL}");
    let clean = bed.load(&small)?;
    let behind =
        bed.load(&format!("{small} --name=large --bs={LARGE} --thinktime=16ms --number_ios={LARGES}"))?;
    let transfer = Duration::from_secs(8) * u32::try_from(LARGE)? / u32::try_from(LINK)?;
    // The small read that is under way when a large one begins to come is ready at the latest when a drive has read it.
    let case = Case {
        cause: Some("head_of_line"),
        name: "head_of_line",
        injected: "reads of 256 KiB on the connection of those of 4, over a link of 100 Mbit/s",
        stages: NETWORK,
        size: Size { of: NETWORK, by: (transfer - DRIVE) * LARGES / SMALL, within: None },
    };
    bed.expect(case, clean, behind);
    bed.both.vm.disconnect(&controller)
}

fn rdma(bed: &mut Bed, ends: &SoftRoce) -> Result<()> {
    let devices = [("", ends.host_device), ("", ends.target_device)];
    let delay = format!("delay {}us", WAY.as_micros());
    let roomy = bed.both.vm.null_blk(NullBlk { size_mb: 64, completion: DRIVE, ..NullBlk::default() })?;
    let port = Port::new(Transport::Rdma, ends.target_address, 4422);
    bed.both.vm.nvmet(&nqn("roce"), &[Backing::Block(&roomy)], &port)?;
    let options = format!("nr_io_queues=1,host_traddr={}", ends.host_address);
    let controller = bed.both.connect(&port, &nqn("roce"), &options)?;
    let device = bed.both.vm.namespace(&controller, 1)?;
    let reads = format!("{FIO} --name=x --filename={device} --rw=randread --bs=4k --number_ios=400");
    bed.netem_on(&devices, &delay)?;
    let clean = bed.load(&reads)?;
    bed.netem_on(&devices, &format!("{delay} loss 2%"))?;
    let lossy = bed.load(&reads)?;
    bed.netem_on(&devices, "")?;
    // The command and its answer are packets, and either is sent again a round trip later at the earliest.
    let case = Case {
        cause: Some("fabric_congestion"),
        name: "rdma_loss",
        injected: "soft RoCE; netem: 2 % of the packets are lost",
        stages: NETWORK,
        size: Size { of: NETWORK, by: 2 * WAY * 4 / 100, within: None },
    };
    bed.expect(case, clean, lossy);
    bed.both.vm.disconnect(&controller)
}

fn causes_are_found(kernel: Kernel) -> Result<()> {
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let mut bed = Bed::boot(Vm::builder(kernel), true, &kernel.to_string())?;
    // Before it is recorded: telemetry looks for devices once.
    let ends = bed.both.vm.soft_roce()?;
    for module in ["nvme_rdma", "nvmet_rdma"] {
        bed.both.vm.load_module(module)?;
    }
    bed.both.begin_recording("")?;
    let controller = storage(&mut bed)?;
    bed.both.vm.disconnect(&controller)?;
    network(&mut bed)?;
    rdma(&mut bed, &ends)?;
    bed.end().map(drop)
}

#[test]
fn causes_are_found_on_debian_6_12() -> Result<()> {
    causes_are_found(Kernel::Debian6_12)
}

// ---------------------------------------------------------------- several CPUs

/// Of a drive that several CPUs use. So long that the emulated CPUs have time to spare, and that what the machine's other
/// work adds is little beside it.
const SHARED: Duration = Duration::from_millis(200);
/// How many CPUs submit, and how many commands each has outstanding.
const CPUS: u32 = 4;
const EACH: u32 = 8;
/// How many commands a queue of 16 entries takes at once: one stays free, and one is kept for Connect.
const PLACES: u32 = 14;

/// What the emulated drive says of itself.
const CELSIUS: f64 = 50.0;
const WARNS_OF_HEAT: u32 = 2;

const BEFORE_IT_IS_SENT: &[Stage] = &[Stage::HostBlock, Stage::HostDriver];
/// With the way back, which ends when the host takes the answer.
const AT_THE_HOST: &[Stage] = &[Stage::HostBlock, Stage::HostDriver, Stage::Network];

fn queues(bed: &mut Bed) -> Result<()> {
    let of = nqn("queues");
    let vm = &bed.both.vm;
    let drive = vm.null_blk(NullBlk { size_mb: 64, completion: SHARED, ..NullBlk::default() })?;
    vm.nvmet(&of, &[Backing::Block(&drive)], &bed.port(4420, None))?;
    let connect = |bed: &Bed, queues: u32| -> Result<(Controller, String)> {
        let options = format!("nr_io_queues={queues},queue_size=16");
        let controller = bed.both.connect(&bed.port(4420, None), &of, &options)?;
        let device = bed.both.vm.namespace(&controller, 1)?;
        Ok((controller, device))
    };
    let fio = |device: &str| format!("{FIO} --filename={device} --rw=randread --bs=4k --iodepth={EACH}");
    let spread = |device: &str| {
        format!(
            "{} --name=x --numjobs={CPUS} --cpus_allowed=0,1,2,3 --cpus_allowed_policy=split --number_ios=100",
            fio(device)
        )
    };

    let (controller, shared) = connect(bed, CPUS)?;
    let clean = bed.load(&spread(&shared))?;
    // As many commands as before, three quarters of them on one CPU. Of several queues without a scheduler a task waits
    // for a place with the one command that it is about to submit, and its others are not there yet: as many tasks as
    // commands, so that all are in line.
    let (many, few) = (3 * EACH, EACH);
    const IOS: u32 = 12;
    let hot = bed.load(&format!(
        "{FIO} --filename={shared} --rw=randread --bs=4k --thread --number_ios={IOS} \
         --name=many --numjobs={many} --cpus_allowed=0 --name=few --numjobs={few} --cpus_allowed=1"
    ))?;
    let case = Case {
        cause: Some("hot_queue"),
        name: "hot_queue",
        injected: "24 of 32 tasks on one CPU, whose queue takes 14 of their commands at once",
        stages: BEFORE_IT_IS_SENT,
        size: Size {
            of: BEFORE_IT_IS_SENT,
            // Of those on that CPU.
            by: in_line(many) * many / (many + few),
            within: Some(0.35),
        },
    };
    bed.expect(case, clean, hot);

    bed.both.vm.disconnect(&controller)?;

    let (controller, shared) = connect(bed, 1)?;
    let one = bed.load(&spread(&shared))?;
    let case = Case {
        cause: Some("too_few_queues"),
        name: "too_few_queues",
        injected: "nr_io_queues=1: it takes 14 commands at once, and four CPUs have 32",
        stages: BEFORE_IT_IS_SENT,
        size: Size { of: BEFORE_IT_IS_SENT, by: in_line(CPUS * EACH), within: Some(0.35) },
    };
    bed.expect(case, clean, one);
    bed.both.vm.disconnect(&controller)
}

/// How long a command waits for one of a queue's places, by Little's law, where there are always so many.
fn in_line(commands: u32) -> Duration {
    SHARED.mul_f64(f64::from(commands) / f64::from(PLACES) - 1.0)
}

/// Other work in the way of the submitter's CPU, which comes and goes.
const BUSY: Duration = Duration::from_millis(40);
const FREE: Duration = Duration::from_millis(20);
/// A drive that answers while that CPU is busy.
const MEANWHILE: Duration = Duration::from_millis(30);

fn busy_cpu(bed: &mut Bed) -> Result<()> {
    bed.target_receives_on(2)?;
    let vm = &bed.both.vm;
    let drive = vm.null_blk(NullBlk { size_mb: 64, completion: MEANWHILE, ..NullBlk::default() })?;
    vm.nvmet(&nqn("cpu"), &[Backing::Block(&drive)], &bed.port(4420, None))?;
    let controller = bed.both.connect(&bed.port(4420, None), &nqn("cpu"), &format!("nr_io_queues={CPUS}"))?;
    let device = bed.both.vm.namespace(&controller, 1)?;
    let reads = format!(
        "{FIO} --name=x --filename={device} --cpus_allowed=0 --rw=randread --bs=4k --iodepth=4 --number_ios=400"
    );
    let clean = bed.load(&reads)?;
    let share = 100 * BUSY.as_micros() / (BUSY + FREE).as_micros();
    let hog = format!(
        "chrt -f 50 fio --name=hog --ioengine=cpuio --cpuload={share} --cpuchunks={} --cpus_allowed=0 --thread \
         --time_based --runtime=600 --output=/dev/null",
        BUSY.as_micros()
    );
    let taken = bed.load(&format!("{hog} & {reads}; code=$?; kill $!; wait; exit $code"))?;
    // It is submitted when the CPU is free, and its answer comes when it is not.
    let case = Case {
        cause: Some("host_cpu"),
        name: "host_cpu",
        injected: "real-time work takes the submitter's CPU for 40 ms of every 60, and a drive takes 30",
        stages: AT_THE_HOST,
        size: Size { of: AT_THE_HOST, by: (BUSY + FREE - MEANWHILE) / 2, within: None },
    };
    bed.expect(case, clean, taken);
    bed.both.vm.disconnect(&controller)
}

/// Commands a second of a drive that is too hot.
const HOT_IOPS: u32 = 30;

fn heat(bed: &mut Bed) -> Result<()> {
    bed.both.vm.nvmet(&nqn("heat"), &[Backing::Block(LOCAL)], &bed.port(4420, None))?;
    let controller = bed.both.connect(&bed.port(4420, None), &nqn("heat"), "nr_io_queues=1")?;
    let device = bed.both.vm.namespace(&controller, 1)?;
    // More than it does then, and so few that the emulated CPUs have time.
    let reads = format!(
        "{FIO} --name=x --filename={device} --rw=randread --bs=4k --iodepth={EACH} --rate_iops={} --number_ios=260",
        HOT_IOPS * 3 / 2
    );
    let clean = bed.load(&reads)?;
    bed.both.vm.slow_nvme_drive(0, HOT_IOPS)?;
    bed.set_nvme_drive(0, "smart_critical_warning", WARNS_OF_HEAT)?;
    let hot = bed.load(&reads)?;
    bed.health_logs_are_read()?;
    let case = Case {
        cause: Some("drive_throttled"),
        name: "drive_throttled",
        injected: "QEMU lets the drive do 30 commands a second, and it warns of its temperature",
        stages: STORAGE,
        size: Size { of: STORAGE, by: Duration::from_secs(1) * EACH / HOT_IOPS, within: Some(0.2) },
    };
    bed.expect(case, clean, hot);
    bed.both.vm.disconnect(&controller)
}

/// The drive on PCIe.
const LOCAL: &str = "/dev/nvme0n1";

/// What both sides' telemetry tells of the drive on PCIe: of its link, its temperature, its warning and what it read.
fn the_drive_tells(run: &Run) -> Result<()> {
    let telemetry = run.telemetry()?;
    let values = |collector: &str, metric: &str| -> Result<Vec<f64>> {
        let lines = telemetry.timelines(collector, metric)?;
        let line = lines.iter().find(|line| line.object == "nvme0");
        let line = line.with_context(|| format!("{collector}.{metric} of the drive: {lines:?}"))?;
        Ok(line.points.iter().filter_map(|point| point.value).collect())
    };
    let always = |collector: &str, metric: &str, value: f64| -> Result<()> {
        let values = values(collector, metric)?;
        let is_it = !values.is_empty() && values.iter().all(|v| (v - value).abs() < 1e-6);
        ensure!(is_it, "{collector}.{metric} is {values:?}, not {value}");
        Ok(())
    };
    for (metric, value) in
        [("link_speed", 2.5), ("max_link_speed", 2.5), ("link_width", 1.0), ("max_link_width", 1.0)]
    {
        always("pcie", metric, value)?;
    }
    always("smart", "temperature", CELSIUS)?;
    let warnings = values("smart", "critical_warning")?;
    ensure!(
        warnings.first() == Some(&0.0) && warnings.last() == Some(&f64::from(WARNS_OF_HEAT)),
        "{warnings:?}"
    );
    ensure!(warnings.is_sorted(), "it warns from when it was made to: {warnings:?}");
    let reads = values("smart", "reads")?;
    ensure!(reads.iter().any(|rate| *rate > 0.0), "it read: {reads:?}");
    Ok(())
}

fn causes_of_several_cpus_are_found(kernel: Kernel) -> Result<()> {
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let builder = Vm::builder(kernel).cpus(CPUS).nvme_drive(64);
    let mut bed = Bed::boot(builder, false, &format!("{kernel}-several-cpus"))?;
    bed.both.vm.load_module("nvme")?;
    bed.sh(&format!("until [ -b {LOCAL} ]; do sleep 0.1; done"))?;
    // Every 100 ms would take half of what the emulator does.
    bed.both.begin_recording("--telemetry 500ms")?;
    busy_cpu(&mut bed)?;
    queues(&mut bed)?;
    // Last: what it warns of stands in the recording from then on.
    heat(&mut bed)?;
    let ended = bed.end()?;
    for run in &ended.whole {
        let told = the_drive_tells(run).with_context(|| run.directory().display().to_string());
        match (told, &ended.disturbed) {
            // What takes too much of the CPUs' time is sampled more seldom, and all does where they have none.
            (Err(error), Some(why)) => support::skipped(&format!("{error:#}: {why}")),
            (told, _) => told?,
        }
    }
    Ok(())
}

#[test]
fn causes_of_several_cpus_are_found_on_debian_6_12() -> Result<()> {
    causes_of_several_cpus_are_found(Kernel::Debian6_12)
}
