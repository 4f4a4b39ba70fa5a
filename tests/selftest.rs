//! `fabscope selftest`, the whole program: faults that are injected are found, the certificate is what its schema says,
//! and what it exits with is what it found.

mod support;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use support::{FABSCOPE, Outcome, Process, SOON, fabscope, outcome, schema, skipped};

fn selftest(arguments: &[&str]) -> Result<Outcome> {
    fabscope(["selftest"].iter().chain(arguments))
}

#[test]
fn a_cause_that_is_not_known_is_refused_with_those_that_are() -> Result<()> {
    selftest(&["--only", "gremlins"])?.expect(1, &["gremlins", "fabric_loss", "iops_limit"])?;
    selftest(&["--format", "xml"])?.expect(2, &["table", "json"])?;
    Ok(())
}

/// That there is no room for the runs is no fault that was not found.
#[test]
fn a_directory_that_can_not_be_made_is_told_before_anything_is_recorded() -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let keep = file.path().join("runs");
    let keep = keep.to_str().context("a path")?;
    selftest(&["--only", "iops_limit", "--keep", keep])?.expect(1, &["--keep", keep, "Not a directory"])?;
    Ok(())
}

/// What looks like an SPDK build: its programs are these shell scripts.
fn build_of(folder: &Path, target: &str, load: &str) -> Result<()> {
    for (name, script) in [("bin/nvmf_tgt", target), ("examples/bdevperf", load)] {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n"))?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755))?;
    }
    Ok(())
}

#[test]
fn a_directory_that_is_no_build_of_spdk_is_told() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("a path")?;
    let none = folder.path().join("none");
    let none = none.to_str().context("a path")?;
    selftest(&["--spdk", none])?.expect(1, &["none", "there is no such directory"])?;
    selftest(&["--spdk", path])?.expect(1, &["no SPDK build", "bin/nvmf_tgt"])?;
    selftest(&["--spdk", path, "--only", "head_of_line"])?.expect(1, &["head_of_line", "slower_drive"])?;
    build_of(folder.path(), "echo EAL: no memory >&2; exit 7", "exit 0")?;
    selftest(&["--spdk", path])?.expect(1, &["nvmf_tgt ended", "exit status: 7", "EAL: no memory"])?;
    std::fs::remove_file(folder.path().join("examples/bdevperf"))?;
    selftest(&["--spdk", path])?.expect(1, &["examples/bdevperf or bin/bdevperf"])?;
    Ok(())
}

/// A target that never answers is given up on Ctrl-C, and ended.
#[test]
fn an_interrupted_self_test_leaves_no_target() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let number = folder.path().join("number");
    let target = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", number.display());
    build_of(folder.path(), &target, "exit 0")?;
    let mut process = Process::start(
        Command::new(FABSCOPE)
            .args(["selftest", "--spdk"])
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null()),
    )?;
    let deadline = Instant::now() + SOON;
    while !number.exists() {
        ensure!(Instant::now() < deadline && process.ended()?.is_none(), "it starts nothing");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let number = std::fs::read_to_string(number)?;
    let of_target = Path::new("/proc").join(number.trim());
    ensure!(of_target.exists(), "its target has gone");
    process.signal(Signal::SIGINT)?;
    ensure!(process.wait(SOON)?.code() == Some(1));
    ensure!(!of_target.exists(), "its target still runs");
    Ok(())
}

/// Three kinds of faults: of the drive, of the target, of the network. On a machine with other work to do a fault may be
/// told to be disturbed; then its stage and size have been looked at all the same, and the verdict says so.
#[test]
fn injected_faults_are_found_and_certified() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let only = "fabric_loss,r2t_round_trips,drive_saturated";
    let certificate = certified(&[], only, here.path())?;
    ensure!(certificate["machine"]["between"].as_str().is_some_and(|b| b.contains("stand-in")));
    // The runs are kept, and are what was said of them.
    let run = run_format::Run::open(&here.path().join("fabric_loss/fault/host.run"))?;
    ensure!(run.manifest().labels.get("fault").map(String::as_str) == Some("true"));
    let again = run.telemetry()?.events("retransmits", "retransmit")?;
    ensure!(!again.is_empty(), "a network that loses packets had no retransmission");
    Ok(())
}

/// The same on a real SPDK, where there is a build of one.
#[test]
fn faults_injected_into_a_real_spdk_are_found_and_certified() -> Result<()> {
    let Some(build) = support::spdk::build() else { return Ok(()) };
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let build = build.to_str().context("a path")?;
    let before = shared_memory()?;
    let only = "slower_drive,iops_limit,buffer_pool,r2t_round_trips";
    let certificate = certified(&["--spdk", build], only, here.path())?;
    ensure!(certificate["machine"]["between"].as_str().is_some_and(|b| b.contains("SPDK v")));
    let run = run_format::Run::open(&here.path().join("iops_limit/clean/target.run"))?;
    ensure!(run.manifest().software.name == "SPDK", "{:?}", run.manifest().software);
    for side in ["host", "target"] {
        let run = here.path().join(format!("slower_drive/fault/{side}.run"));
        support::all_boundaries_were_taken(&run_format::Run::open(&run)?)?;
    }
    // What the processes leave behind is gone with them.
    let left: Vec<String> = shared_memory()?.difference(&before).cloned().collect();
    ensure!(left.is_empty(), "{left:?} are left");
    Ok(())
}

/// The traces of SPDK's programs that there are.
fn shared_memory() -> Result<BTreeSet<String>> {
    let names = std::fs::read_dir("/dev/shm")?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter(|name| name.contains("_trace.pid")).collect())
}

/// Runs the self-test for these and checks its certificate, its verdicts and its exit code.
fn certified(options: &[&str], only: &str, keep: &Path) -> Result<Value> {
    let said = outcome(
        Command::new(FABSCOPE)
            .args(["selftest", "--quick", "--format", "json", "--only", only])
            .args(options)
            .arg("--keep")
            .arg(keep),
    )?;
    let certificate: Value = serde_json::from_str(&said.stdout)
        .with_context(|| format!("no certificate: {} {}", said.stdout, said.stderr))?;
    let schemas = fabscope(["schema", "selftest"])?.expect(0, &[])?.stdout;
    schema::check(&certificate, &serde_json::from_str(&schemas)?)?;
    ensure!(certificate["format"] == "fabscope-selftest/1");
    let faults = certificate["faults"].as_array().context("faults")?;
    let names: Vec<&str> = faults.iter().filter_map(|fault| fault["name"].as_str()).collect();
    for name in only.split(',') {
        ensure!(names.contains(&name), "{name} is not among {names:?}");
    }
    ensure!(names.len() == only.split(',').count(), "{names:?}");
    let mut verdicts = Vec::new();
    for fault in faults {
        let verdict = fault["verdict"].as_str().context("verdict")?;
        verdicts.push(verdict);
        let why = fault["why"].as_array().context("why")?;
        ensure!((verdict == "holds") == why.is_empty(), "{fault:#}");
        let found = &fault["found"];
        match verdict {
            "holds" => {
                ensure!(found["causes"].get(0).unwrap_or(&Value::Null) == &fault["cause"], "{fault:#}");
                ensure!(found["without"].as_array().is_some_and(Vec::is_empty), "{fault:#}");
                ensure!(found["size"]["holds"] == true && found["size"]["elsewhere"].is_null(), "{fault:#}");
                let stages = fault["stages"].as_array().context("stages")?;
                ensure!(found["stage"].is_null() || stages.contains(&found["stage"]), "{fault:#}");
            }
            "disturbed" => {
                skipped("other work on this machine keeps the self-test from telling");
                ensure!(fault["attempts"] == 3, "{fault:#}");
                // Without figures it was so little that there is no diagnosis.
                let over = |name: &str, limit: f64| found[name].as_f64().is_some_and(|share| share >= limit);
                let had_no_cpu = found.is_null()
                    || over("cpu_pressure", 0.3)
                    || over("cpu_wait", 0.1)
                    || found["without"].as_array().is_some_and(|named| named.contains(&"host_cpu".into()));
                ensure!(had_no_cpu, "{fault:#}");
            }
            other => ensure!(false, "{other}: {fault:#}"),
        }
    }
    let code = if verdicts.contains(&"disturbed") { 4 } else { 0 };
    ensure!(said.code == Some(code), "{:?} for {verdicts:?}", said.code);
    Ok(certificate)
}
