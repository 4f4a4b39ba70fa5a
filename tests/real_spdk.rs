//! Real SPDK on both sides, and the kernel's host against a real SPDK target, recorded by `fabscope record`.
//! Needs an SPDK build, whose directory is in `SPDK_BUILD`; says so and tests nothing where there is none.

mod support;

use anyhow::{Result, ensure};
use run_format::{Run, Stage};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use support::spdk::{NQN, Perf, Target};
use support::vm::Host;
use support::{Pair, Recording};
use testbed::Kernel;

const SECOND: Duration = Duration::from_secs(1);

/// Records a target and `spdk_nvme_perf` while it runs this load.
fn record_perf(build: &Path, target: &Target, load: &[&str], folder: &Path) -> Result<(PathBuf, PathBuf)> {
    std::fs::create_dir_all(folder)?;
    let on_target = Recording::start("target", target.pid, &folder.join("target.run"), &[])?;
    let mut arguments = vec!["-t", "60"];
    arguments.extend(load);
    let mut perf = Perf::start(build, target.port, &arguments, &folder.join("perf.log"))?;
    perf.wait_until_it_runs(&on_target.run)?;
    let on_host = Recording::start("host", perf.pid(), &folder.join("host.run"), &[])?;
    thread::sleep(2 * SECOND);
    let host = on_host.stop()?;
    let target = on_target.stop()?;
    perf.end()?;
    Ok((host, target))
}

#[test]
fn perf_and_nvmf_tgt_join_and_none_wrongly() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    // So large that a sequential load uses no address twice.
    let target = Target::start(&build, &["null:1T"])?;
    for (name, load) in [
        ("read-1", &["-q", "1", "-o", "4096", "-w", "read"][..]),
        ("read-32", &["-q", "32", "-o", "4096", "-w", "read"]),
        ("write-1", &["-q", "1", "-o", "4096", "-w", "write"]),
        ("write-32", &["-q", "32", "-o", "4096", "-w", "write"]),
        // Too large for a capsule: R2T.
        ("r2t-32", &["-q", "32", "-o", "65536", "-w", "write"]),
        ("mixed-32", &["-q", "32", "-o", "4096", "-w", "rw", "-M", "50", "-P", "2"]),
    ] {
        eprintln!("{name}:");
        let (host, target_run) = record_perf(&build, &target, load, &here.path().join(name))?;
        let pair = Pair::join(&host, &target_run)?;
        pair.nearly_all_joined(500)?;
        // Two queues each go through the addresses by themselves.
        if name != "mixed-32" {
            pair.none_wrong_by_address()?;
        }
        pair.none_crosses()?;
        for run in [&host, &target_run] {
            support::all_boundaries_were_taken(&Run::open(run)?)?;
        }
        eprintln!("{}", pair.report()?.to_table());
    }
    Ok(())
}

const DELAY: Duration = Duration::from_micros(500);
const TOLERANCE: f64 = 0.03;

#[test]
fn a_bdev_delay_is_found_in_storage_and_nowhere_else() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let target = Target::start(&build, &["delay:1us:malloc:64M"])?;
    for (operation, load) in [
        ("read", ["-q", "1", "-o", "4096", "-w", "randread"]),
        ("write", ["-q", "1", "-o", "4096", "-w", "randwrite"]),
    ] {
        let report = |name: &str| -> Result<joiner::Report> {
            let folder = here.path().join(format!("{operation}-{name}"));
            let (host, target) = record_perf(&build, &target, &load, &folder)?;
            let pair = Pair::join(&host, &target)?;
            pair.nearly_all_joined(500)?;
            pair.report()
        };
        let (mut before, mut after) = (Vec::new(), Vec::new());
        for round in 0..3 {
            target.set_delay("Delay1", Duration::from_micros(1))?;
            before.push(report(&format!("before-{round}"))?);
            target.set_delay("Delay1", DELAY + Duration::from_micros(1))?;
            after.push(report(&format!("after-{round}"))?);
        }
        support::only_this_stage_grew(&before, &after, operation, Stage::Storage, DELAY, TOLERANCE)?;
    }
    Ok(())
}

#[test]
fn a_kernel_host_and_nvmf_tgt_join() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    if !testbed::available(Kernel::Debian6_12)? {
        return Ok(());
    }
    let _turn = support::turn()?;
    let target = Target::start(&build, &["delay:1us:malloc:256M"])?;
    let host = Host::connect(Kernel::Debian6_12, target.port, NQN)?;
    let (_, _, pair) = host.mixed(target.pid)?;

    let reads = |name: &str| -> Result<joiner::Report> {
        let jobs = "--name=x --rw=randread --bs=4k --iodepth=1 --size=64m --number_ios=60";
        let (host, target) = host.record(name, target.pid, jobs)?;
        let pair = Pair::join(&host, &target)?;
        pair.nearly_all_joined(60)?;
        pair.report()
    };
    // Emulation and a busy machine add a millisecond or two here and there: 5 % of the delay is more. A VM
    // that waits is slow to wake up, so the load waits without the delay too.
    let (wait, delay) = (Duration::from_millis(20), Duration::from_millis(60));
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for round in 0..3 {
        target.set_delay("Delay1", wait)?;
        before.push(reads(&format!("before-{round}"))?);
        target.set_delay("Delay1", wait + delay)?;
        after.push(reads(&format!("after-{round}"))?);
    }
    support::only_this_stage_grew(&before, &after, "read", Stage::Storage, delay, 0.05)?;
    ensure!(pair.joined.target_manifest().software.name == "SPDK");
    host.vm.shutdown()
}
