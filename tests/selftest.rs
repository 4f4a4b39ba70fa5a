//! `fabscope selftest`, the whole program: faults that are injected are found, the certificate is what its schema says,
//! and what it exits with is what it found.

mod support;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use support::{Outcome, fabscope, outcome, schema, skipped};

fn selftest(arguments: &[&str]) -> Result<Outcome> {
    fabscope(["selftest"].iter().chain(arguments))
}

#[test]
fn a_cause_that_is_not_known_is_refused_with_those_that_are() -> Result<()> {
    selftest(&["--only", "gremlins"])?.expect(1, &["gremlins", "fabric_loss", "iops_limit"])?;
    selftest(&["--format", "xml"])?.expect(2, &["table", "json"])?;
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
    let keep = here.path().join("runs");
    let only = "fabric_loss,r2t_round_trips,drive_saturated";
    let said = outcome(
        std::process::Command::new(support::FABSCOPE)
            .args(["selftest", "--quick", "--format", "json", "--only", only, "--keep"])
            .arg(&keep),
    )?;
    let certificate: Value = serde_json::from_str(&said.stdout)
        .with_context(|| format!("no certificate: {} {}", said.stdout, said.stderr))?;
    let schemas = fabscope(["schema", "selftest"])?.expect(0, &[])?.stdout;
    schema::check(&certificate, &serde_json::from_str(&schemas)?)?;
    ensure!(certificate["format"] == "fabscope-selftest/1");
    let faults = certificate["faults"].as_array().context("faults")?;
    let names: Vec<&str> = faults.iter().filter_map(|fault| fault["cause"].as_str()).collect();
    ensure!(names == only.split(',').collect::<Vec<_>>(), "{names:?}");
    let mut verdicts = Vec::new();
    for fault in faults {
        let verdict = fault["verdict"].as_str().context("verdict")?;
        verdicts.push(verdict);
        let why = fault["why"].as_array().context("why")?;
        ensure!((verdict == "holds") == why.is_empty(), "{fault:#}");
        match verdict {
            "holds" => {
                ensure!(fault["found"]["causes"][0] == fault["cause"], "{fault:#}");
                ensure!(fault["found"]["without"].as_array().is_some_and(Vec::is_empty), "{fault:#}");
                ensure!(fault["found"]["size"]["holds"] == true, "{fault:#}");
            }
            "disturbed" => {
                skipped("other work on this machine keeps the self-test from telling");
                ensure!(fault["attempts"] == 3, "{fault:#}");
                let found = &fault["found"];
                let had_no_cpu = found["cpu_pressure"].as_f64().is_some_and(|share| share >= 0.3)
                    || found["without"].as_array().is_some_and(|named| named.contains(&"host_cpu".into()));
                ensure!(had_no_cpu, "{fault:#}");
            }
            other => ensure!(false, "{other}: {fault:#}"),
        }
    }
    let code = if verdicts.contains(&"disturbed") { 4 } else { 0 };
    ensure!(said.code == Some(code), "{:?} for {verdicts:?}", said.code);
    // The runs are kept, and are what was said of them.
    let run = run_format::Run::open(&keep.join("fabric_loss/fault/host.run"))?;
    ensure!(run.manifest().labels.get("fault").map(String::as_str) == Some("true"));
    let again = run.telemetry()?.events("retransmits", "retransmit")?;
    ensure!(!again.is_empty(), "a network that loses packets had no retransmission");
    Ok(())
}
