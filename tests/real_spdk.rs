//! Real SPDK on both sides, and the kernel's host against a real SPDK target, recorded by `fabscope record`.
//! Needs an SPDK build, whose directory is in `SPDK_BUILD`; says so and tests nothing where there is none.

mod support;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use run_format::{Run, Stage};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use support::live::{Live, address, lines, scrape, sum};
use support::spdk::{NQN, Perf, Target};
use support::vm::Host;
use support::{Pair, Recording, SOON, fabscope, schema};
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

/// What a live view counts is what the target's bdevs count, and both sides' views have figures of every stage.
#[test]
fn live_views_show_a_real_target_and_its_host() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let at = |name: &str| here.path().join(name);
    let target = Target::start(&build, &["malloc:64M"])?;
    let done = || -> Result<u64> {
        let told = target.rpc(&["bdev_get_iostat"])?;
        let bdevs = told["bdevs"].as_array().context("no bdevs")?;
        let of = |bdev: &Value| Some(bdev["num_read_ops"].as_u64()? + bdev["num_write_ops"].as_u64()?);
        Ok(bdevs.iter().filter_map(of).sum())
    };
    let before = done()?;
    // It looks before the load comes, so that nothing is missed.
    let listen = ["--listen", "127.0.0.1:0", "--queues"];
    let mut served = Live::start(&at("serve-target"), "serve", "target", target.pid, &listen)?;
    let of_target = address(&mut served)?;
    let load = ["-q", "8", "-o", "4096", "-w", "randrw", "-M", "50", "-t", "120"];
    let mut perf = Perf::start(&build, target.port, &load, &at("perf.log"))?;
    let deadline = Instant::now() + SOON;
    while sum(&scrape(&of_target)?, "fabscope_commands_total") < 1_000.0 {
        ensure!(Instant::now() < deadline && perf.ended()?.is_none(), "{} {}", served.err(), perf.said());
        thread::sleep(SECOND / 4);
    }

    let schema = serde_json::from_str(&fabscope(["schema", "watch"])?.expect(0, &[])?.stdout)?;
    for (side, pid, stages) in [
        ("target", target.pid, ["target_driver", "storage", "data_wait"]),
        ("host", perf.pid(), ["host_block", "host_driver", "beyond_host"]),
    ] {
        let more = ["--format", "json", "--count", "4", "--interval", "500ms"];
        let (out, err) = Live::start(&at(&format!("watch-{side}")), "watch", side, pid, &more)?.ended()?;
        let lines = lines(&out)?;
        ensure!(lines.len() == 4, "{out} {err}");
        for line in &lines {
            schema::check(line, &schema)?;
        }
        let last = lines.last().context("no lines")?;
        ensure!(last["side"] == side && last["kind"] == "spdk", "{last}");
        ensure!(last["measured"][0].as_u64() >= Some(7), "{last}");
        let classes = last["classes"].as_array().context("no classes")?;
        let operations: Vec<&str> = classes.iter().filter_map(|c| c["operation"].as_str()).collect();
        ensure!(operations.contains(&"read") && operations.contains(&"write"), "{last}");
        for class in classes {
            ensure!(class["error"] == false && class["bytes"] == 4096, "{class}");
            let mean = |stage: &str| class["stages"][stage]["mean_ns"].as_f64().context(stage.to_owned());
            let whole = class["latency"]["mean_ns"].as_f64().context("latency")?;
            let parts: f64 = stages.iter().map(|stage| mean(stage)).sum::<Result<f64>>()?;
            ensure!((parts - whole).abs() < 1.0 && whole > 0.0, "{parts} of {whole}: {class}");
        }
        ensure!(last["queues"].as_array().is_some_and(|queues| !queues.is_empty()), "{last}");
        ensure!(
            last["counters"]["lost"].as_object().is_some_and(|lost| lost.values().all(|n| n == 0)),
            "{last}"
        );
        let telemetry = last["telemetry"].as_array().context("no telemetry")?;
        let has = |collector: &str| telemetry.iter().any(|value| value["collector"] == collector);
        ensure!(has("tcp") && has("cpu"), "{last}");
        // Text for persons, too.
        let (out, _) =
            Live::start(&at(&format!("text-{side}")), "watch", side, pid, &["--count", "2"])?.ended()?;
        ensure!(
            out.contains("read 4 KiB") && out.contains("write 4 KiB") && out.contains(" IOPS, "),
            "{out}"
        );
    }

    let mut host = Live::start(&at("serve-host"), "serve", "host", perf.pid(), &listen)?;
    let of_host = address(&mut host)?;
    let deadline = Instant::now() + SOON;
    while sum(&scrape(&of_host)?, "fabscope_queue_commands_total") < 1_000.0 {
        ensure!(Instant::now() < deadline, "{}", host.err());
        thread::sleep(SECOND / 4);
    }
    let one = scrape(&of_host)?;
    ensure!(sum(&one, "fabscope_stage_seconds_count") == 3.0 * sum(&one, "fabscope_commands_total"), "{one}");
    ensure!(one.contains("side=\"host\"") && !one.contains("side=\"target\""), "{one}");
    // The end of the recorded process is the view's.
    perf.end()?;
    let (_, err) = host.ended()?;
    ensure!(err.contains("the recorded process ended"), "{err}");

    let deadline = Instant::now() + SOON;
    let expected = (done()? - before) as f64;
    loop {
        let figures = scrape(&of_target)?;
        let lost = sum(&figures, "fabscope_lost_commands_total");
        let counted = sum(&figures, "fabscope_commands_total") + lost;
        if counted == expected {
            ensure!(lost < 0.001 * expected, "{lost} of {expected} are lost");
            break;
        }
        ensure!(Instant::now() < deadline, "{counted} commands, and {expected} by the bdevs: {figures}");
        thread::sleep(SECOND / 4);
    }
    served.process.signal(Signal::SIGTERM)?;
    served.ended()?;
    Ok(())
}
