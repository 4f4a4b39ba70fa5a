//! Injected causes in a VM with the kernel's host and target: loads are recorded without and with each, and `fabscope
//! diagnose` has to name the right cause first, in its stage and with its size; and none where there is none. An answer
//! that is wrong counts unless it is known that the machine, or the emulated CPU, had no time; then it is told.

use super::vm::Both;
use super::{FABSCOPE, Pair, cut, outcome, skipped};
use anyhow::{Context, Result, ensure};
use joiner::{Class, Report};
use run_format::{Run, Stage};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use testbed::{Builder, FarNetwork, Port, Transport};

/// A fault, and what has to be found of it.
#[derive(Debug)]
pub struct Case {
    /// What has to be named first; none where nothing may be named.
    pub cause: Option<&'static str>,
    /// Names its runs.
    pub name: &'static str,
    /// What is done.
    pub injected: &'static str,
    /// The stages that it may be found in.
    pub stages: &'static [Stage],
    pub size: Size,
}

/// What the fault adds to the mean time of stages, of the class with most commands.
#[derive(Debug)]
pub struct Size {
    pub of: &'static [Stage],
    pub by: Duration,
    /// By what share of it what is found may be off; none where it is the least that it adds.
    pub within: Option<f64>,
}

/// Both sides' runs of one load.
struct Runs {
    folder: PathBuf,
    report: Report,
    /// What the machine did to it that is no cause of its own.
    disturbed: Option<String>,
}

/// What a bed leaves behind.
#[derive(Debug)]
pub struct Ended {
    /// Both sides' whole runs.
    pub whole: [Run; 2],
    /// What the machine did to the first load that it did anything to.
    pub disturbed: Option<String>,
}

/// A load that was recorded: its place among them.
#[derive(Clone, Copy, Debug)]
pub struct Load(usize);

/// When a load ran.
#[derive(Clone, Debug)]
struct Span {
    from: i64,
    to: i64,
    disturbed: Option<String>,
}

/// Host and target in a VM, each in a network of its own, and both recorded.
#[derive(Debug)]
pub struct Bed {
    pub both: Both,
    pub network: FarNetwork,
    /// Whether its time is counted in instructions: what the machine does is nothing to it.
    counted_time: bool,
    runs: PathBuf,
    loads: Vec<Span>,
    /// What has to be found in a load without and one with the fault.
    cases: Vec<(Case, Load, Load)>,
}

/// How long a load may take: it is emulated, on a busy machine.
const LOAD: Duration = Duration::from_secs(240);

/// How often health logs are read, with what it takes.
const HEALTH_LOGS: Duration = Duration::from_secs(11);

/// The share of a load's time for which the emulator may wait for a CPU of the machine before the load tells of the machine.
const STARVED: f64 = 0.05;

/// By what share the time that passed in the VM may be another than the machine's: QEMU's clock jumps where the machine was
/// stopped.
const OFF: f64 = 0.1;

impl Bed {
    /// Boots it; the runs stay in the build folder's `tmp/vm-selftest/NAME`.
    pub fn boot(builder: Builder, counted_time: bool, name: &str) -> Result<Bed> {
        let runs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm-selftest").join(name);
        let _old = std::fs::remove_dir_all(&runs);
        let builder = builder.kernel_option("psi=1").program("dmsetup").program("nsenter").program("chrt");
        let builder = if counted_time { builder.counted_time() } else { builder };
        let mut both = Both::keeping(builder, &runs)?;
        for module in ["nvme_tcp", "nvmet_tcp", "tcp_diag"] {
            both.vm.load_module(module)?;
        }
        let network = both.vm.far_network()?;
        both.at_target = network.inside();
        Ok(Bed { both, network, counted_time, runs, loads: Vec::new(), cases: Vec::new() })
    }

    /// Where the target listens.
    pub fn port(&self, number: u16, in_capsule: Option<u32>) -> Port<'static> {
        let (address, within) = (self.network.target_address, Some(self.network.namespace));
        Port { within, in_capsule, ..Port::new(Transport::Tcp, address, number) }
    }

    pub fn sh(&self, script: &str) -> Result<String> {
        self.both.vm.sh(script)
    }

    /// What both ends do to what they send; nothing where that is empty.
    pub fn netem(&self, how: &str) -> Result<()> {
        let FarNetwork { host_device: h, target_device: t, .. } = self.network;
        self.netem_on(&[("", h), (&self.network.inside(), t)], how)
    }

    /// What these network devices do to what they send, each with what enters its network.
    pub fn netem_on(&self, devices: &[(&str, &str)], how: &str) -> Result<()> {
        for (inside, device) in devices {
            self.sh(&if how.is_empty() {
                format!("{inside} tc qdisc del dev {device} root")
            } else {
                format!("{inside} tc qdisc replace dev {device} root netem limit 100000 {how}")
            })?;
        }
        Ok(())
    }

    /// Has another CPU take what comes to the target, so that the target works there too and not where the host's
    /// submitter does.
    pub fn target_receives_on(&self, cpu: u32) -> Result<()> {
        let (inside, device) = (self.network.inside(), self.network.target_device);
        // A /sys shows the devices of the network that it was mounted in.
        self.sh(&format!(
            "set -e; mkdir -p /tmp/sys; {inside} mount -t sysfs sys /tmp/sys; \
             echo {:x} > /tmp/sys/class/net/{device}/queues/rx-0/rps_cpus; umount /tmp/sys",
            1 << cpu
        ))
        .map(drop)
    }

    /// Changes what an emulated drive says of itself (`smart_critical_warning`), and waits until both sides have read it.
    pub fn set_nvme_drive(&self, drive: usize, property: &str, value: u32) -> Result<()> {
        self.both.vm.set_nvme_drive(drive, property, value)?;
        self.health_logs_are_read()
    }

    /// Waits until the drives' health logs have been read once more: what one says stands until the next is read.
    pub fn health_logs_are_read(&self) -> Result<()> {
        let then = self.both.now()? / 1_000_000_000 + HEALTH_LOGS.as_secs() as i64;
        self.sh(&format!("until [ $(cut -d. -f1 /proc/uptime) -gt {then} ]; do sleep 0.2; done")).map(drop)
    }

    /// Runs a load.
    pub fn load(&mut self, command: &str) -> Result<Load> {
        let (starved, began) = (self.both.vm.starved(), Instant::now());
        let from = self.both.now()?;
        self.both.vm.run(command, LOAD)?.check()?;
        let to = self.both.now()?;
        let (took, there) = (began.elapsed().as_secs_f64(), (to - from) as f64 / 1e9);
        let starved = self.both.vm.starved().zip(starved).map(|(is, was)| is.saturating_sub(was));
        let waited = starved.map_or(0.0, |time| time.as_secs_f64() / took);
        eprintln!("  {took:.1} s, {there:.1} s there, {:.1} % waited for a CPU", waited * 100.0);
        let disturbed = if self.counted_time {
            None
        } else if waited > STARVED {
            Some(format!("the emulator waited {:.0} % of the time for a CPU", waited * 100.0))
        } else if (there / took - 1.0).abs() > OFF {
            Some(format!("{there:.1} s passed in the VM and {took:.1} s on the machine"))
        } else {
            None
        };
        self.loads.push(Span { from, to, disturbed });
        Ok(Load(self.loads.len() - 1))
    }

    /// What has to be found in these two loads.
    pub fn expect(&mut self, case: Case, clean: Load, fault: Load) {
        self.cases.push((case, clean, fault));
    }

    /// Ends it all, and holds what is found against what was done.
    pub fn end(self) -> Result<Ended> {
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
        let disturbed = self.loads.iter().find_map(|load| load.disturbed.clone());
        let (mut wrong, mut told, all) = (Vec::new(), Vec::new(), self.cases.len());
        for (case, clean, fault) in self.cases {
            let runs = |load: Load, which: &str| -> Result<Runs> {
                part(&whole, &self.loads[load.0], &self.runs.join(format!("{}-{which}", case.name)))
            };
            let (clean, fault) = (runs(clean, "clean")?, runs(fault, "fault")?);
            match case.judge(&clean, &fault)? {
                Verdict::Holds => {}
                Verdict::Disturbed(why) => told.push(why),
                Verdict::Wrong(why) => wrong.push(why),
            }
        }
        for why in &told {
            skipped(why);
        }
        eprintln!("{release}: {} of {all} hold, {} disturbed", all - wrong.len() - told.len(), told.len());
        ensure!(wrong.is_empty(), "{release}:\n{}", wrong.join("\n"));
        Ok(Ended { whole, disturbed })
    }
}

/// The runs of one load.
fn part(whole: &[Run; 2], load: &Span, folder: &Path) -> Result<Runs> {
    let [host, target] = ["host.run", "target.run"].map(|run| folder.join(run));
    for (run, into) in whole.iter().zip([&host, &target]) {
        cut::cut(run, (load.from, load.to), into)?;
    }
    let pair = Pair::join(&host, &target).with_context(|| folder.display().to_string())?;
    pair.nearly_all_joined(1)?;
    Ok(Runs { report: pair.report()?, folder: folder.to_owned(), disturbed: load.disturbed.clone() })
}

/// What was found of a case.
enum Verdict {
    Holds,
    /// Not as it had to be, and why that tells nothing.
    Disturbed(String),
    Wrong(String),
}

impl Case {
    fn judge(&self, clean: &Runs, fault: &Runs) -> Result<Verdict> {
        let (without, with) = (diagnose(clean, None)?, diagnose(fault, Some(clean))?);
        let mut wrong = Vec::new();
        let (no_fault, named) = (causes(&without), causes(&with));
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
            return Ok(Verdict::Holds);
        }
        let said = format!("{}: {}", self.name, wrong.join("; "));
        if let Some(why) = clean.disturbed.as_ref().or(fault.disturbed.as_ref()) {
            return Ok(Verdict::Disturbed(format!("{said}: {why}")));
        }
        // An emulated CPU is short of time where a real one is not: that is so, and tells nothing of the fault.
        if no_fault == ["host_cpu"] {
            return Ok(Verdict::Disturbed(format!(
                "{said}: the VM's CPU had no time without the fault either"
            )));
        }
        let why = |diagnosis: &Value| -> String {
            let of = |part: &str| diagnosis[part].as_array().cloned().unwrap_or_default();
            let found = of("causes");
            let found = found.iter().map(|f| format!("\n      {}: {}", f["cause"], f["evidence"]));
            let others = of("ruled_out").into_iter().chain(of("cannot_tell"));
            found.chain(others.map(|j| format!("\n      {}: {}", j["cause"], j["why"]))).collect()
        };
        Ok(Verdict::Wrong(format!("{said}\n    without it{}\n    with it{}", why(&without), why(&with))))
    }
}

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
    Ok(serde_json::from_str(&outcome(&mut command)?.expect(0, &[])?.stdout)?)
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
