//! The example that a CI pastes, `docs/examples/spdk-upgrade.sh`: its usage, its static check on builds made of the
//! stand-in, and, with `SPDK_BUILD` and `SPDK_BUILD_NEW`, the whole of it on two builds of SPDK.

mod support;

use anyhow::{Context, Result, ensure};
use run_format::{Run, State};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use support::{FABSCOPE, outcome, schema};

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples/spdk-upgrade.sh")
}

/// The example with its surroundings set.
fn upgrade(folder: &Path) -> Command {
    let mut command = Command::new(example());
    command.current_dir(folder).env("FABSCOPE", FABSCOPE).env_remove("SETUP");
    command
}

/// A directory like a build of SPDK's, of these programs.
fn build(folder: &Path, name: &str, target: &Path) -> Result<PathBuf> {
    let build = folder.join(name);
    fs::create_dir_all(build.join("bin"))?;
    fs::copy(target, build.join("bin/nvmf_tgt"))?;
    fs::copy(standin::spawn::program("standin-initiator")?, build.join("bin/spdk_nvme_perf"))?;
    Ok(build)
}

#[test]
fn the_example_explains_itself_and_refuses_wrong_usage() -> Result<()> {
    let here = tempfile::tempdir()?;
    let help = outcome(upgrade(here.path()).arg("--help"))?.expect(0, &[])?;
    ensure!(help.stdout.contains("Exit status: 0 all holds") && help.stderr.is_empty(), "{help:#?}");
    let cases: [(&[&str], &str); 6] = [
        (&[], "which build is the old one"),
        (&["--old", "/a"], "which build is the new one"),
        (&["--old"], "--old needs a value"),
        (&["--old", "/a", "--new", "/b", "--repeats", "0"], "no number from 1 to 99"),
        (&["--old", "/a", "--new", "/b", "--port", "http"], "is no port"),
        (&["now"], "unknown argument now"),
    ];
    for (arguments, text) in cases {
        outcome(upgrade(here.path()).args(arguments))?.expect(2, &[text, "--help"])?;
    }
    outcome(upgrade(here.path()).args(["--old", "/a", "--new", "/b"]))?
        .expect(1, &["there is no /a/bin/nvmf_tgt"])?;
    outcome(upgrade(here.path()).args(["--old", "/a", "--new", "/b"]).env("FABSCOPE", "/no/fabscope"))?
        .expect(1, &["there is no /no/fabscope"])?;
    ensure!(fs::read_dir(here.path())?.next().is_none(), "something was left behind");
    Ok(())
}

#[test]
fn the_example_is_what_a_shell_checker_accepts() -> Result<()> {
    let there = Command::new("shellcheck").arg("--version").output().is_ok();
    if !there {
        support::skipped("shellcheck is not installed");
        return Ok(());
    }
    outcome(Command::new("shellcheck").arg(example()))?.expect(0, &[])?;
    Ok(())
}

#[test]
fn a_build_that_hides_a_boundary_is_refused_before_anything_runs() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let here = tempfile::tempdir()?;
    let whole = standin::spawn::program("standin-target")?;
    let hiding = here.path().join("hiding");
    outcome(
        Command::new("objcopy")
            .args(["--strip-debug", "--strip-symbol=bdev_io_submit"])
            .arg(&whole)
            .arg(&hiding),
    )?
    .expect(0, &[])?;
    let (old, new) = (build(here.path(), "old", &whole)?, build(here.path(), "new", &hiding)?);
    let said = outcome(upgrade(here.path()).arg("--old").arg(&old).arg("--new").arg(&new))?.expect(3, &[])?;
    ensure!(said.stdout.contains("does not hold:"), "{said:#?}");
    let out = here.path().join("spdk-upgrade.out");
    ensure!(fs::read_to_string(out.join("hooks-comparison.txt"))?.contains("does not hold:"));
    ensure!(!out.join("old-1").exists() && !out.join("state").exists(), "something was started");
    // What is there is not written over.
    outcome(upgrade(here.path()).arg("--old").arg(&old).arg("--new").arg(&new))?
        .expect(1, &["choose another directory"])?;
    Ok(())
}

#[test]
fn two_builds_of_spdk_are_checked_in_under_two_minutes() -> Result<()> {
    let Some(old) = support::spdk::build() else { return Ok(()) };
    let Some(new) = std::env::var_os("SPDK_BUILD_NEW").filter(|build| !build.is_empty()) else {
        support::skipped("SPDK_BUILD_NEW is not set");
        return Ok(());
    };
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port().to_string();
    let began = Instant::now();
    let said = outcome(
        upgrade(here.path())
            .arg("--old")
            .arg(&old)
            .arg("--new")
            .arg(&new)
            // Only what a busy machine never does fails.
            .args(["--gate", "latency.typical<=100x", "--load", "-q 4 -o 4096 -w randread"])
            .args(["--repeats", "4", "--out", "out", "--port", &port])
            // The machine's cores may have other targets on them.
            .env("TARGET_ARGUMENTS", "--disable-cpumask-locks"),
    )?;
    let took = began.elapsed();
    eprintln!("{}\nthe whole check took {took:.1?}", said.stdout);
    ensure!(took < Duration::from_secs(120), "{took:?}");

    // Where other work leaves the load hardly any time, there is too little to tell, and that is said.
    ensure!(matches!(said.code, Some(0 | 4)), "{said:#?}");
    let told = if said.code == Some(0) { "holds" } else { "cannot tell" };
    let out = here.path().join("out");
    let read = |name: &str| fs::read_to_string(out.join(name)).with_context(|| name.to_owned());
    let comparison: Value = serde_json::from_str(&read("hooks-comparison.json")?)?;
    let text = support::fabscope(["schema", "probe-baseline"])?.expect(0, &[])?.stdout;
    schema::check(&comparison, &serde_json::from_str(&text)?)?;
    ensure!(comparison["holds"] == true, "{comparison}");
    for build in ["old", "new"] {
        for n in 1..=4 {
            for side in ["host", "target"] {
                let run = Run::open(&out.join(format!("{build}-{n}/{side}.run")))?;
                ensure!(run.manifest().state == State::Closed && run.manifest().counters.recorded > 0);
                ensure!(run.manifest().software.name == "SPDK");
            }
        }
    }
    ensure!(read("compare.xml")?.contains("<testsuite"), "no JUnit");
    let verdict = read("compare.txt")?;
    let gate = verdict.lines().find(|line| line.contains("latency.typical<=100x")).context("no gate")?;
    ensure!(gate.contains(told), "{said:#?}");
    // The targets were stopped.
    ensure!(!out.join("state/target-upgrade").exists());
    Ok(())
}
