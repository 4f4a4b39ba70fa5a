//! The self-test of the diagnosis with the kernel's host and target in one VM: causes are injected by the machine's own
//! means (netem, null_blk, device mapper, sysctl, MTUs, busy CPUs), both sides are recorded without and with each, and
//! `fabscope diagnose` has to name that cause first, in its stage and with its size; and none where there is none.

mod support;

use anyhow::{Context, Result, ensure};
use run_format::{Run, Stage};
use std::time::Duration;
use support::causes::{Bed, Case, Size};
use testbed::{Backing, Controller, Kernel, NullBlk, Vm};

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
    bed.netem("")
}

fn causes_are_found(kernel: Kernel) -> Result<()> {
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let mut bed = Bed::boot(Vm::builder(kernel), true, &kernel.to_string())?;
    bed.both.begin_recording("")?;
    let controller = storage(&mut bed)?;
    bed.both.vm.disconnect(&controller)?;
    network(&mut bed)?;
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
    // Its health log is read every ten seconds: once before and once after, at the least.
    let warned = bed.both.now()?;
    bed.both.vm.set_nvme_drive(0, "smart_critical_warning", WARNS_OF_HEAT)?;
    bed.sh(&format!("dd if={LOCAL} of=/dev/null bs=4k count=100 iflag=direct"))?;

    // As many commands as before, three quarters of them on one CPU.
    let hot = bed.load(&format!(
        "{} --name=many --numjobs=3 --cpus_allowed=0 --number_ios=90 --name=few --cpus_allowed=1 --number_ios=150",
        fio(&shared)
    ))?;
    // A job waits for a place with one command at a time, so that not all of its others are in line.
    let case = Case {
        cause: Some("hot_queue"),
        name: "hot_queue",
        injected: "three of four jobs on one CPU, whose queue takes 14 of their 24 commands at once",
        stages: BEFORE_IT_IS_SENT,
        size: Size { of: BEFORE_IT_IS_SENT, by: SHARED / 20, within: None },
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
        size: Size {
            of: BEFORE_IT_IS_SENT,
            by: SHARED.mul_f64(f64::from(CPUS * EACH) / f64::from(PLACES) - 1.0),
            within: Some(0.35),
        },
    };
    bed.expect(case, clean, one);
    bed.both.vm.disconnect(&controller)?;

    bed.sh(&format!(
        "until [ $(cut -d. -f1 /proc/uptime) -gt {} ]; do sleep 0.2; done",
        warned / 1_000_000_000 + 21
    ))
    .map(drop)
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
    bed.both.begin_recording("")?;
    queues(&mut bed)?;
    for run in bed.end()? {
        the_drive_tells(&run).with_context(|| run.directory().display().to_string())?;
    }
    Ok(())
}

#[test]
fn causes_of_several_cpus_are_found_on_debian_6_12() -> Result<()> {
    causes_of_several_cpus_are_found(Kernel::Debian6_12)
}
