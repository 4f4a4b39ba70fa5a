//! The self-test of the diagnosis with the kernel's host and target in one VM: causes are injected by the machine's own
//! means (netem, null_blk, device mapper, sysctl, MTUs, busy CPUs), both sides are recorded without and with each, and
//! `fabscope diagnose` has to name that cause first, in its stage and with its size; and none where there is none.

mod support;

use anyhow::{Context, Result, ensure};
use joiner::{Class, Report};
use run_format::{Run, Stage};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::vm::Both;
use support::{FABSCOPE, Pair, cut};
use testbed::{Backing, Controller, FarNetwork, Kernel, NullBlk, Port, Transport, Vm};

/// A fault, and what has to be found of it.
struct Case {
    /// What has to be named first; none where nothing may be named.
    cause: Option<&'static str>,
    /// Names its runs.
    name: &'static str,
    /// What is done.
    injected: &'static str,
    /// The stages that it may be found in.
    stages: &'static [Stage],
    size: Size,
}

/// What the fault adds to the mean time of stages, of the class with most commands.
struct Size {
    of: &'static [Stage],
    by: Duration,
    /// By what share of it what is found may be off; none where it is the least that it adds.
    within: Option<f64>,
}

/// Both sides' runs of one load.
struct Runs {
    folder: PathBuf,
    report: Report,
}

/// A load that was recorded: its place among them.
#[derive(Clone, Copy)]
struct Load(usize);

/// Host and target in a VM, each in a network of its own, and both recorded.
struct Bed {
    both: Both,
    network: FarNetwork,
    runs: PathBuf,
    /// From when to when each load ran.
    loads: Vec<(i64, i64)>,
    /// What has to be found in a load without and one with the fault.
    cases: Vec<(Case, Load, Load)>,
}

impl Bed {
    fn boot(kernel: Kernel) -> Result<Bed> {
        let runs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm-selftest").join(kernel.to_string());
        let _old = std::fs::remove_dir_all(&runs);
        let builder =
            Vm::builder(kernel).counted_time().kernel_option("psi=1").program("dmsetup").program("nsenter");
        let mut both = Both::keeping(builder, &runs)?;
        for module in ["nvme_tcp", "nvmet_tcp", "tcp_diag"] {
            both.vm.load_module(module)?;
        }
        let network = both.vm.far_network()?;
        both.at_target = network.inside();
        Ok(Bed { both, network, runs, loads: Vec::new(), cases: Vec::new() })
    }

    fn port(&self, number: u16, in_capsule: Option<u32>) -> Port<'static> {
        let (address, within) = (self.network.target_address, Some(self.network.namespace));
        Port { within, in_capsule, ..Port::new(Transport::Tcp, address, number) }
    }

    fn sh(&self, script: &str) -> Result<String> {
        self.both.vm.sh(script)
    }

    /// What both ends do to what they send; nothing where that is empty.
    fn netem(&self, how: &str) -> Result<()> {
        let FarNetwork { host_device: h, target_device: t, .. } = self.network;
        for (device, inside) in [(h, String::new()), (t, self.network.inside())] {
            self.sh(&if how.is_empty() {
                format!("{inside} tc qdisc del dev {device} root")
            } else {
                format!("{inside} tc qdisc replace dev {device} root netem limit 100000 {how}")
            })?;
        }
        Ok(())
    }

    /// Runs a load.
    fn load(&mut self, command: &str) -> Result<Load> {
        let began = std::time::Instant::now();
        let from = self.both.now()?;
        self.both.vm.run(command, LOAD)?.check()?;
        let to = self.both.now()?;
        eprintln!("  {:.1?}, {:.1} s there", began.elapsed(), (to - from) as f64 / 1e9);
        self.loads.push((from, to));
        Ok(Load(self.loads.len() - 1))
    }

    fn expect(&mut self, case: Case, clean: Load, fault: Load) {
        self.cases.push((case, clean, fault));
    }

    /// Ends it all, and holds what is found against what was done.
    fn end(self) -> Result<()> {
        let release = self.both.vm.release().to_owned();
        let (host, target) = self.both.end_recording()?;
        // A VM that counts its time takes a whole CPU when it has nothing to do.
        self.both.end()?;
        let whole = [Run::open(&host)?, Run::open(&target)?];
        for run in &whole {
            let telemetry = run.manifest().telemetry.as_ref().context("no telemetry")?;
            for name in ["tcp", "retransmits", "sched"] {
                let collector = telemetry.collectors.iter().find(|collector| collector.name == name);
                ensure!(collector.is_some_and(|collector| collector.present), "{collector:#?}");
            }
        }
        let mut wrong = Vec::new();
        for (case, clean, fault) in self.cases {
            let runs = |load: Load, which: &str| -> Result<Runs> {
                part(&whole, self.loads[load.0], &self.runs.join(format!("{}-{which}", case.name)))
            };
            let (clean, fault) = (runs(clean, "clean")?, runs(fault, "fault")?);
            wrong.extend(case.wrong(&clean, &fault)?);
        }
        ensure!(wrong.is_empty(), "{release}:\n{}", wrong.join("\n"));
        Ok(())
    }
}

/// The runs of one load.
fn part(whole: &[Run; 2], load: (i64, i64), folder: &Path) -> Result<Runs> {
    let [host, target] = ["host.run", "target.run"].map(|run| folder.join(run));
    for (run, into) in whole.iter().zip([&host, &target]) {
        cut::cut(run, load, into)?;
    }
    let pair = Pair::join(&host, &target).with_context(|| folder.display().to_string())?;
    pair.nearly_all_joined(1)?;
    Ok(Runs { report: pair.report()?, folder: folder.to_owned() })
}

impl Case {
    /// What is not as it has to be.
    fn wrong(&self, clean: &Runs, fault: &Runs) -> Result<Option<String>> {
        let (without, with) = (diagnose(clean, None)?, diagnose(fault, Some(clean))?);
        let mut wrong = Vec::new();
        let (no_fault, named) = (causes(&without), causes(&with));
        if no_fault == ["host_cpu"] {
            // An emulated CPU is short of time where a real one is not: that is so, and tells nothing of the fault.
            support::skipped(&format!("{}: the VM's CPU had no time without the fault either", self.name));
            return Ok(None);
        }
        if !no_fault.is_empty() {
            wrong.push(format!("without the fault {} was named", no_fault.join(", ")));
        }
        if named.first().map(String::as_str) != self.cause {
            wrong.push(format!("{} was named, not {}", list(&named), self.cause.unwrap_or("nothing")));
        }
        let stage = with["causes"][0]["stage"].as_str().unwrap_or("-");
        if self.cause.is_some() && !self.stages.iter().any(|of| of.name() == stage) {
            wrong.push(format!("it was found in {stage}"));
        }
        let (by, found) = (self.size.by.as_nanos() as f64, grown(self.size.of, clean, fault)?);
        let holds = match self.size.within {
            Some(within) => (found - by).abs() <= within * by,
            None => found >= by,
        };
        if !holds {
            wrong.push(format!("{found:.0} ns were found, and {by:.0} injected"));
        }
        eprintln!(
            "{:<18} {:<32} {stage:<14} {:>9.3} ms {:>9.3} ms  {}",
            self.name,
            list(&named),
            by / 1e6,
            found / 1e6,
            self.injected
        );
        if wrong.is_empty() {
            return Ok(None);
        }
        let why = |diagnosis: &Value| -> String {
            let of = |part: &str| diagnosis[part].as_array().cloned().unwrap_or_default();
            let found = of("causes");
            let found = found.iter().map(|f| format!("\n      {}: {}", f["cause"], f["evidence"]));
            let others = of("ruled_out").into_iter().chain(of("cannot_tell"));
            found.chain(others.map(|j| format!("\n      {}: {}", j["cause"], j["why"]))).collect()
        };
        Ok(Some(format!(
            "{}: {}\n    without it{}\n    with it{}",
            self.name,
            wrong.join("; "),
            why(&without),
            why(&with)
        )))
    }
}

/// How long a load may take: it is emulated, on a busy machine.
const LOAD: Duration = Duration::from_secs(240);

fn list(names: &[String]) -> String {
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

/// `fabscope diagnose HOST TARGET --format json`.
fn diagnose(of: &Runs, baseline: Option<&Runs>) -> Result<Value> {
    let mut command = Command::new(FABSCOPE);
    command.arg("diagnose").args(["host.run", "target.run"].map(|run| of.folder.join(run)));
    command.args(["--format", "json"]);
    if let Some(baseline) = baseline {
        command.arg("--baseline").arg(&baseline.folder);
    }
    Ok(serde_json::from_str(&support::outcome(&mut command)?.expect(0, &[])?.stdout)?)
}

fn causes(diagnosis: &Value) -> Vec<String> {
    let all = diagnosis["causes"].as_array().into_iter().flatten();
    all.filter_map(|finding| finding["cause"].as_str()).map(str::to_owned).collect()
}

/// By how much stages took longer on average with the fault, ns.
fn grown(of: &[Stage], clean: &Runs, fault: &Runs) -> Result<f64> {
    let class = clean.report.classes.iter().max_by_key(|class| class.commands).context("no commands")?;
    let is_same = |other: &&Class| {
        (other.operation, other.bytes, other.error) == (class.operation, class.bytes, class.error)
    };
    let with = fault.report.classes.iter().find(is_same).context("no such commands with the fault")?;
    let mean = |class: &Class| -> f64 {
        of.iter().map(|stage| class.stages.of(*stage).map_or(0.0, |figures| figures.times.mean_ns)).sum()
    };
    Ok(mean(with) - mean(class))
}

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
    let mut bed = Bed::boot(kernel)?;
    bed.both.begin_recording("")?;
    let controller = storage(&mut bed)?;
    bed.both.vm.disconnect(&controller)?;
    network(&mut bed)?;
    bed.end()
}

#[test]
fn causes_are_found_on_debian_6_12() -> Result<()> {
    causes_are_found(Kernel::Debian6_12)
}
