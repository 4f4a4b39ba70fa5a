//! The kernel's NVMe/TCP host in a VM against the stand-in target on this machine, recorded on both sides
//! with `fabscope record`, joined and reported with `fabscope report`; and delays of known size put into a
//! stage and found there. The VM's clock and the machine's are two clocks.

mod support;

use anyhow::{Context, Result, ensure};
use run_format::{Run, Stage};
use serde_json::Value;
use standin::Target;
use std::time::{Duration, Instant};
use support::Pair;
use support::vm::{Host, hostnqn};
use testbed::Kernel;

/// A VM whose kernel host is connected to a stand-in target on the machine.
struct Bed {
    host: Host,
    target: Target,
}

impl Bed {
    fn new(kernel: Kernel) -> Result<Bed> {
        let target = Target::spawn(["--namespace-size", "256M"])?;
        let host = Host::connect(kernel, target.address().port(), standin::DEFAULT_NQN)?;
        Ok(Bed { host, target })
    }

    fn record(&self, name: &str, jobs: &str) -> Result<(std::path::PathBuf, std::path::PathBuf)> {
        self.host.record(name, self.target.pid(), jobs)
    }

    fn end(self) -> Result<()> {
        self.host.vm.shutdown()?;
        self.target.stop()
    }
}

/// fio's figures stand beside ours in the report: of as many I/Os as fio was told to do, and never faster
/// than ours, since fio's begin before the block layer and end after it, by at most this share.
fn fio_agrees(report: &Value, did: &[(&str, u64)], at_most: f64) -> Result<()> {
    for (direction, ios) in did {
        let beside = report["fio"]
            .as_array()
            .and_then(|all| all.iter().find(|one| one["direction"] == *direction))
            .with_context(|| format!("the report has no {direction} by fio: {report:#}"))?;
        ensure!(beside["ios"] == *ios && beside["commands"] == *ios, "{beside:#}");
        let (theirs, ours, difference) = (
            beside["fio_mean_ns"].as_f64().context("no mean")?,
            beside["recorded_mean_ns"].as_f64().context("no mean")?,
            beside["difference_ns"].as_f64().context("no difference")?,
        );
        eprintln!(
            "{direction}: fio {theirs:.0} ns, recorded {ours:.0} ns, {:.1} %",
            difference / theirs * 100.0
        );
        ensure!((theirs - ours - difference).abs() < 1.0, "{beside:#}");
        ensure!((0.0..at_most * theirs).contains(&difference), "{beside:#}");
    }
    Ok(())
}

fn pair(kernel: Kernel) -> Result<()> {
    if !support::can_trace() || !testbed::available(kernel)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let bed = Bed::new(kernel)?;

    let (host, target, joined) = bed.host.mixed(bed.target.pid())?;
    let report = support::report_json(&host, &target)?;
    // Under emulation fio itself takes most of the time of a deep queue.
    fio_agrees(&report, &[("read", 1800), ("write", 550)], 0.95)?;
    for (operation, bytes, commands) in [("read", 4096, 1800), ("write", 4096, 400), ("write", 65536, 150)] {
        let class = report["classes"]
            .as_array()
            .and_then(|all| all.iter().find(|c| c["operation"] == operation && c["bytes"] == bytes))
            .with_context(|| format!("no class of {operation} {bytes}: {report:#}"))?;
        ensure!(class["commands"] == commands && class["error"] == false, "{class:#}");
    }
    ensure!(
        report["host"]["kind"] == "kernel" && report["host"]["kernel"] == bed.host.vm.release(),
        "{report:#}"
    );
    ensure!(report["clock"]["shared"] == false, "{report:#}");
    // 64 KiB do not fit into a capsule of 8 KiB: those writes, and only those, had an R2T.
    let (bytes, r2ts) = (joined.host.full("bytes")?, joined.host.full("r2ts")?);
    ensure!(bytes.iter().zip(&r2ts).all(|(bytes, r2ts)| (*bytes == 65536) == (*r2ts > 0)));
    let queues = Run::open(&host)?.queues()?;
    ensure!(queues.values().all(|q| q.host_nqn == hostnqn() && q.subsystem_nqn == standin::DEFAULT_NQN));

    bed.end()
}

#[test]
fn debian_6_1_joins_with_the_stand_in() -> Result<()> {
    pair(Kernel::Debian6_1)
}

#[test]
fn debian_6_12_joins_with_the_stand_in() -> Result<()> {
    pair(Kernel::Debian6_12)
}

#[test]
fn the_newest_kernel_joins_with_the_stand_in() -> Result<()> {
    pair(Kernel::Newest)
}

/// One read load, recorded, joined and reported.
fn reads(bed: &Bed, name: &str) -> Result<joiner::Report> {
    let jobs = "--name=x --rw=randread --bs=4k --iodepth=1 --size=64m --number_ios=100";
    let began = (bed.host.vm.starved(), Instant::now());
    let (host, target) = bed.record(name, jobs)?;
    let pair = Pair::join(&host, &target).with_context(|| name.to_owned())?;
    pair.nearly_all_joined(100)?;
    // One command at a time, and most of its time is spent waiting: fio's own part is small, unless it is kept from running.
    let starved =
        bed.host.vm.starved().zip(began.0).map_or(Duration::ZERO, |(is, was)| is.saturating_sub(was));
    let at_most = if starved * 20 > began.1.elapsed() { 0.95 } else { 0.2 };
    fio_agrees(&support::report_json(&host, &target)?, &[("read", 100)], at_most)?;
    pair.report()
}

/// Emulation and a busy machine add a millisecond or two here and there: 5 % of the delay is more. A VM that
/// waits is slow to wake up, so the load waits without the delay too.
const DELAY: Duration = Duration::from_millis(60);
const WAIT: Duration = Duration::from_millis(20);
const TOLERANCE: f64 = 0.05;
/// A machine with other work adds to some rounds: of so many the one counts that it disturbed least.
const ROUNDS: usize = 4;

/// Fails unless `stage` alone grows by the delay when it is put there.
fn found(
    bed: &Bed,
    stage: Stage,
    before: &mut Vec<joiner::Report>,
    delayed: impl Fn(bool) -> Result<()>,
) -> Result<()> {
    let mut after = Vec::new();
    loop {
        delayed(true)?;
        after.push(reads(bed, &format!("{}-{}", stage.name(), after.len()))?);
        delayed(false)?;
        match support::only_this_stage_grew(before, &after, "read", stage, DELAY, TOLERANCE) {
            Err(error) if after.len() < ROUNDS => eprintln!("once more: {error}"),
            done => return done,
        }
        before.push(reads(bed, &format!("before-{}", before.len()))?);
    }
}

#[test]
fn a_delay_is_found_in_its_stage_and_nowhere_else() -> Result<()> {
    if !support::can_trace() || !testbed::available(Kernel::Debian6_12)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let bed = Bed::new(Kernel::Debian6_12)?;
    bed.target.set_delay(standin::Stage::Storage, WAIT)?;
    let mut before = vec![reads(&bed, "before-0")?];
    for (stage, of_target) in
        [(Stage::Storage, standin::Stage::Storage), (Stage::TargetDriver, standin::Stage::TargetDriver)]
    {
        let was = if stage == Stage::Storage { WAIT } else { Duration::ZERO };
        found(&bed, stage, &mut before, |delayed| {
            bed.target.set_delay(of_target, if delayed { was + DELAY } else { was })?;
            Ok(())
        })?;
    }
    found(&bed, Stage::Network, &mut before, |delayed| {
        bed.host.vm.delay_network("eth0", if delayed { DELAY } else { Duration::ZERO })
    })?;

    bed.target.set_delay(standin::Stage::Storage, Duration::ZERO)?;

    // Few addresses, many commands at once: what tells two of them apart is time alone.
    let jobs = "--name=x --rw=randread --bs=4k --iodepth=16 --size=32k --io_size=6000k --norandommap";
    let (host, target) = bed.record("same", jobs)?;
    let pair = Pair::join(&host, &target)?;
    pair.nearly_all_joined(1400)?;
    ensure!(pair.none_wrong_by_order()? >= 1400);

    bed.end()
}
