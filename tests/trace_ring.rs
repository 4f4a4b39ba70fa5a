//! Records a real SPDK target by its trace ring (`record target --source trace`), beside uprobes and beside
//! `spdk_nvme_perf`. Needs an SPDK build, whose directory is in `SPDK_BUILD`; says so and tests nothing where there
//! is none.

mod support;

use anyhow::{Context, Result, ensure};
use joiner::JoinOptions;
use nix::sys::signal::Signal;
use run_format::{Command, Run};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use support::spdk::{Perf, Target};
use support::{Pair, Recording, Rows, fabscope};

const SECOND: Duration = Duration::from_secs(1);
/// A uprobe's own time stands between its timestamp and the ring's, and that of the probes between two boundaries.
const APART_NS: i64 = 8_000;

/// The file that a target which has recorded anything leaves behind; gone with this.
struct Left(u32);

impl Drop for Left {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(format!("/dev/shm/nvmf_trace.pid{}", self.0));
    }
}

/// The tracepoints that a target has switched on, by group.
fn switched_on(target: &Target) -> Result<HashMap<String, String>> {
    let info = target.rpc(&["trace_get_info"])?;
    let groups = info.as_object().context("no object")?.iter().filter_map(|(name, group)| {
        let mask = group.get("tpoint_mask")?.as_str()?;
        (mask != "0x0").then(|| (name.clone(), mask.to_owned()))
    });
    Ok(groups.collect())
}

/// Fails unless the tracepoints of a recording within this machine are on, and no others: NEW, AWAIT_R2T_ACK,
/// RDY_TO_EXECUTE, EXECUTED and the rare DISCONNECT of nvmf_tcp, START and DONE of bdev.
fn only_the_needed_are_on(target: &Target) -> Result<()> {
    let on = switched_on(target)?;
    let tcp = on.get("nvmf_tcp").and_then(|mask| u64::from_str_radix(mask.trim_start_matches("0x"), 16).ok());
    let tcp = tcp.with_context(|| format!("{on:?}"))?;
    // As 24.09 and later number them; the mask is that of `spdk_trace`'s groups.
    ensure!(tcp & 0x1_2241 == 0x1_0241 && tcp.count_ones() == 5, "{on:?}");
    ensure!(on.len() == 2 && on.get("bdev").is_some_and(|mask| mask == "0x3"), "{on:?}");
    Ok(())
}

/// Joins by order. The addresses of a sequential load are the truth that the joiner does not need.
fn join(host: &Path, target: &Path) -> Result<Pair> {
    let (host, target) = (Run::open(host)?, Run::open(target)?);
    for run in [&host, &target] {
        support::counters_are_exact(run)?;
    }
    let joined = joiner::join(&host, &target, &JoinOptions::default())?;
    let pair = Pair { joined, host: Rows::read(&host)?, target: Rows::read(&target)? };
    for name in ["opcode", "nsid", "slba", "nlb", "bytes"] {
        let (ours, theirs) = (pair.host.column(name)?, pair.target.column(name)?);
        for p in pair.joined.pairs() {
            let (h, t) = (ours[p.host_row as usize], theirs[p.target_row as usize]);
            ensure!(h == t, "{name} is {h:?} on the host and {t:?} on the target: {p:?}");
        }
    }
    Ok(pair)
}

/// The row of each command by its address, which a sequential load uses once.
fn by_address(rows: &Rows) -> Result<HashMap<(i64, i64), usize>> {
    let keys = rows.full("opcode")?.into_iter().zip(rows.full("slba")?);
    Ok(keys.enumerate().map(|(row, key)| (key, row)).collect())
}

/// Holds what the ring told against what uprobes told of the same commands.
fn same_as_uprobes(ring: &Path, uprobes: &Path) -> Result<()> {
    let (ring_run, uprobe_run) = (Run::open(ring)?, Run::open(uprobes)?);
    let (ring, uprobe) = (Rows::read(&ring_run)?, Rows::read(&uprobe_run)?);
    let (ring_rows, uprobe_rows) = (by_address(&ring)?, by_address(&uprobe)?);
    let windows = [ring_run.manifest().window, uprobe_run.manifest().window];
    let from = windows.iter().map(|w| w.start_ns.as_i64()).max().unwrap_or(0);
    let to = windows.iter().map(|w| w.end_ns.as_i64()).min().unwrap_or(0) - 50_000_000;
    for (rows, mine, others, what) in
        [(&ring, &ring_rows, &uprobe_rows, "uprobes"), (&uprobe, &uprobe_rows, &ring_rows, "the ring")]
    {
        let received = rows.full("t_recv")?;
        let both = mine.iter().filter(|(_, row)| (from..to).contains(&received[**row]));
        let missing = both.clone().filter(|(key, _)| !others.contains_key(*key)).count();
        ensure!(missing == 0, "{missing} of {} commands are not among those of {what}", both.count());
    }
    let r2t = ring.full("r2ts")?.iter().any(|&n| n > 0);
    let mut boundaries = vec!["t_recv", "t_submit", "t_done", "t_resp"];
    if r2t {
        boundaries.push("t_data");
    }
    for boundary in boundaries {
        let (a, b) = (ring.column(boundary)?, uprobe.column(boundary)?);
        let mut apart: Vec<i64> =
            ring_rows.iter().filter_map(|(key, row)| Some(a[*row]? - b[*uprobe_rows.get(key)?]?)).collect();
        apart.sort_unstable();
        let middle = *apart.get(apart.len() / 2).context("no command has it on both")?;
        eprintln!(
            "{boundary}: the ring's time less the uprobe's: median {middle} ns of {}, 1 % {} ns, 99 % {} ns",
            apart.len(),
            apart[apart.len() / 100],
            apart[apart.len() - 1 - apart.len() / 100]
        );
        ensure!(middle.abs() <= APART_NS, "{boundary} differs by {middle} ns");
    }
    Ok(())
}

/// Records a load by the ring, by the hybrid and by uprobes at once, and joins it with the host's recording. False
/// where the machine was so busy that the ring was overrun, which then is all that is wrong.
fn holds(build: &Path, target: &Target, load: &[&str], folder: &Path) -> Result<bool> {
    std::fs::create_dir_all(folder)?;
    let record = |source: &str| {
        let run = folder.join(source).with_extension("run");
        Recording::start("target", target.pid, &run, &["--source", source])
    };
    let ring = record("trace")?;
    only_the_needed_are_on(target)?;
    let (hybrid, uprobes) = (record("hybrid")?, record("uprobe")?);
    let mut arguments = vec!["-t", "60"];
    arguments.extend(load);
    let mut perf = Perf::start(build, target.port, &arguments, &folder.join("perf.log"))?;
    perf.wait_until_it_runs(&ring.run)?;
    let host = Recording::start("host", perf.pid(), &folder.join("host.run"), &[])?;
    thread::sleep(2 * SECOND);
    let (host, uprobes) = (host.stop()?, uprobes.stop()?);
    // What both need goes off with the last of them, whoever began.
    let ring = ring.stop()?;
    only_the_needed_are_on(target)?;
    let hybrid = hybrid.stop()?;
    perf.end()?;
    ensure!(switched_on(target)?.is_empty(), "{:?}", switched_on(target)?);

    let mut overwritten = 0;
    for run in [&ring, &hybrid] {
        let counters = Run::open(run)?.manifest().counters;
        eprintln!("{counters:?}");
        overwritten += counters.lost.overwritten;
        ensure!(counters.lost.total() == counters.lost.overwritten, "{counters:?}");
    }
    // No pair is wrong, whatever was lost.
    let (by_order, exact) = (join(&host, &ring)?, Pair::join(&host, &hybrid)?);
    by_order.none_crosses()?;
    exact.none_wrong_by_address()?;
    ensure!(by_order.target.full("flags")?.iter().all(|&f| f & i64::from(Command::NO_CID) != 0));
    ensure!(exact.target.full("flags")?.iter().all(|&f| f == 0));
    if overwritten > 0 {
        return Ok(false);
    }
    by_order.nearly_all_joined(500)?;
    exact.nearly_all_joined(500)?;
    same_as_uprobes(&ring, &uprobes)?;
    same_as_uprobes(&hybrid, &uprobes)?;
    eprintln!("{}", by_order.report()?.to_table());
    Ok(true)
}

#[test]
fn the_ring_tells_what_uprobes_tell_and_joins_with_perf() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    // So large that a sequential load uses no address twice.
    let target = Target::start(&build, &["null:1T"])?;
    let _left = Left(target.pid);
    for (name, load) in [
        ("read-1", ["-q", "1", "-o", "4096", "-w", "read"]),
        ("read-32", ["-q", "32", "-o", "4096", "-w", "read"]),
        ("write-4", ["-q", "4", "-o", "4096", "-w", "write"]),
        ("r2t-8", ["-q", "8", "-o", "65536", "-w", "write"]),
    ] {
        eprintln!("{name}:");
        let mut whole = false;
        for round in 0..4 {
            whole = whole || holds(&build, &target, &load, &here.path().join(format!("{name}-{round}")))?;
        }
        if !whole {
            support::skipped("the machine is so busy that the trace ring was overrun each time");
        }
    }
    Ok(())
}

#[test]
fn a_ring_that_is_overrun_loses_what_it_says_and_joins_nothing_wrongly() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    // Room for some thirty commands: no reader keeps up with that.
    let target = Target::start_with(&build, &["null:1T"], &["--num-trace-entries", "256"])?;
    let _left = Left(target.pid);
    let run = here.path().join("ring.run");
    let ring = Recording::start("target", target.pid, &run, &["--source", "trace"])?;
    let load = ["-t", "60", "-q", "16", "-o", "4096", "-w", "read"];
    let mut perf = Perf::start(&build, target.port, &load, &here.path().join("perf.log"))?;
    perf.wait_until_it_runs(&ring.run)?;
    let host = Recording::start("host", perf.pid(), &here.path().join("host.run"), &[])?;
    thread::sleep(2 * SECOND);
    let (host, ring) = (host.stop()?, ring.stop()?);
    perf.end()?;
    let manifest = Run::open(&ring)?.manifest().clone();
    eprintln!("{:?}, {} events", manifest.counters, manifest.events.len());
    ensure!(manifest.counters.lost.overwritten > 0, "{:?}", manifest.counters);
    ensure!(manifest.events.iter().any(|event| event.what == "trace ring overrun begins"));
    // Its addresses say that no pair is wrong.
    let pair = join(&host, &ring)?;
    pair.none_crosses()?;
    eprintln!("{:?}", pair.joined.accounting());
    ensure!(pair.joined.accounting().joined > 0);
    Ok(())
}

/// The numbers of the 4 KiB blocks that a run has, in order.
fn blocks(run: &Path) -> Result<Vec<i64>> {
    let rows = Rows::read(&Run::open(run)?)?;
    let mut blocks: Vec<i64> = rows.full("slba")?.into_iter().map(|slba| slba / 8).collect();
    blocks.sort_unstable();
    Ok(blocks)
}

/// A recording in windows, by the ring and with a uprobe, comes and goes beside one that lasts; which loses nothing.
#[test]
fn a_windowed_recording_takes_nothing_from_another() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let target = Target::start(&build, &["null:1T"])?;
    let _left = Left(target.pid);
    for source in ["trace", "hybrid"] {
        let run = |name: &str| here.path().join(format!("{source}-{name}.run"));
        let whole = Recording::start("target", target.pid, &run("whole"), &["--source", "trace"])?;
        let load = ["-t", "60", "-q", "4", "-o", "4096", "-w", "read"];
        let mut perf = Perf::start(&build, target.port, &load, &here.path().join("perf.log"))?;
        perf.wait_until_it_runs(&whole.run)?;
        let more = ["--source", source, "--window", "100ms/400ms"];
        let windowed = Recording::start("target", target.pid, &run("windowed"), &more)?;
        thread::sleep(2 * SECOND);
        let windowed = windowed.stop()?;
        only_the_needed_are_on(&target)?;
        thread::sleep(SECOND / 2);
        let whole = whole.stop()?;
        perf.end()?;
        ensure!(switched_on(&target)?.is_empty(), "{:?}", switched_on(&target)?);
        for run in [&whole, &windowed] {
            support::counters_are_exact(&Run::open(run)?)?;
        }
        let counters = [&whole, &windowed].map(|run| Run::open(run).map(|run| run.manifest().counters));
        eprintln!("{source}: {counters:?}");
        let [of_whole, of_windows] = [counters[0].as_ref().ok(), counters[1].as_ref().ok()];
        let (of_whole, of_windows) = of_whole.zip(of_windows).context("no counters")?;
        let (all, some) = (blocks(&whole)?, blocks(&windowed)?);
        // What the windows saw the other saw.
        ensure!(some.len() > 100 && some.iter().all(|block| all.binary_search(block).is_ok()));
        if of_whole.lost.total() > 0 {
            ensure!(of_whole.lost.total() == of_whole.lost.overwritten, "{of_whole:?}");
            support::skipped("the machine is so busy that the trace ring was overrun");
            continue;
        }
        ensure!(of_windows.lost.total() == 0, "{of_windows:?}");
        // A sequential load leaves nothing out; the last may have been under way.
        let all = all.get(..all.len().saturating_sub(64)).unwrap_or_default();
        let gaps = all.windows(2).filter(|two| two[1] != two[0] + 1).count();
        ensure!(gaps == 0, "{gaps} gaps in {} commands", all.len());
    }
    Ok(())
}

/// A build folder whose target has neither symbols nor debug information.
fn stripped(build: &Path, folder: &Path) -> Result<PathBuf> {
    let bare = folder.join("stripped");
    std::fs::create_dir_all(bare.join("bin"))?;
    let out = bare.join("bin/nvmf_tgt");
    support::outcome(
        std::process::Command::new("strip")
            .arg("--strip-all")
            .arg(build.join("bin/nvmf_tgt"))
            .arg("-o")
            .arg(&out),
    )?
    .expect(0, &[])?;
    Ok(bare)
}

#[test]
fn a_stripped_target_is_recorded_and_a_killed_recorder_does_no_harm() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let target = Target::start(&stripped(&build, here.path())?, &["null:1T"])?;
    let _left = Left(target.pid);
    let trace = ["--source", "trace"];
    let killed = here.path().join("killed.run");
    let mut perf = Perf::start(
        &build,
        target.port,
        &["-t", "60", "-q", "4", "-o", "4096", "-w", "read"],
        &here.path().join("perf.log"),
    )?;
    let mut recording = Recording::start("target", target.pid, &killed, &trace)?;
    perf.wait_until_it_runs(&killed)?;
    recording.process().signal(Signal::SIGKILL)?;
    recording.process().wait(10 * SECOND)?;
    // Nobody was left to switch them off.
    only_the_needed_are_on(&target)?;
    // The next one finds that, records, and switches off with its own what the killed one had switched on.
    let run = here.path().join("next.run");
    let recording = Recording::start("target", target.pid, &run, &trace)?;
    thread::sleep(SECOND);
    recording.stop()?;
    ensure!(switched_on(&target)?.is_empty(), "{:?}", switched_on(&target)?);
    let events = Run::open(&run)?.manifest().events.clone();
    ensure!(events.iter().any(|event| event.what.contains("a killed recording left on")), "{events:?}");
    let counters = Run::open(&run)?.manifest().counters;
    ensure!(counters.recorded > 100 && counters.lost.total() == 0, "{counters:?}");
    support::counters_are_exact(&Run::open(&run)?)?;
    perf.end()
}

#[test]
fn what_the_ring_can_not_do_is_refused_with_its_reason() -> Result<()> {
    let run = |more: &[&str]| {
        let mut arguments = vec!["record", "target", "--spdk", "1", "-o", "/nonexistent/x.run"];
        arguments.extend(more);
        fabscope(arguments)
    };
    run(&["--source", "trace", "--sample", "10"])?.expect(2, &["--sample chooses by the cid"])?;
    run(&["--rpc", "/tmp/x.sock"])?.expect(2, &["--rpc is for SPDK's tracepoints"])?;
    run(&["--source", "trace", "--debug-file", "x"])?.expect(2, &["are for uprobes"])?;
    fabscope(["record", "target", "--kernel", "--source", "trace"])?.expect(2, &["cannot be used with"])?;
    let here = tempfile::tempdir()?;
    let own = std::process::id().to_string();
    let output = here.path().join("x.run");
    let output = output.to_str().context("a path that is no text")?;
    fabscope(["record", "target", "--spdk", &own, "--source", "trace", "-o", output])?
        .expect(1, &["has no trace ring", "--source uprobe"])?;
    Ok(())
}

/// What was on before stays on, whatever it is, and nothing else does.
#[test]
fn the_masks_are_put_back_exactly() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let target = Target::start(&build, &["null:1T"])?;
    let _left = Left(target.pid);
    for (group, mask) in [("nvmf_tcp", 0x2002), ("bdev", 0x1), ("sock", 0x4)] {
        let (name, mask) = (format!("name={group}"), format!("tpoint_mask:={mask}"));
        target.rpc(&["trace_set_tpoint_mask", &name, &mask])?;
    }
    let before = target.rpc(&["trace_get_info"])?;
    let run = here.path().join("ring.run");
    let recording = Recording::start("target", target.pid, &run, &["--source", "trace"])?;
    ensure!(target.rpc(&["trace_get_info"])? != before);
    recording.stop()?;
    let after = target.rpc(&["trace_get_info"])?;
    ensure!(after == before, "{before} and then {after}");
    Ok(())
}

#[test]
fn another_target_s_socket_is_not_believed() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let target = Target::start(&build, &["null:1T"])?;
    let _left = Left(target.pid);
    let nobody = here.path().join("nobody.sock");
    let nobody = nobody.to_str().context("a path that is no text")?;
    let output = here.path().join("x.run");
    let output = output.to_str().context("a path that is no text")?;
    let pid = target.pid.to_string();
    fabscope(["record", "target", "--spdk", &pid, "--source", "trace", "--rpc", nobody, "-o", output])?
        .expect(1, &["can not be switched on", nobody])?;
    ensure!(!Path::new(output).exists());
    ensure!(switched_on(&target)?.is_empty());
    Ok(())
}
