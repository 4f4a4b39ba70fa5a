//! `fabscope diagnose`, the whole program: recorded real runs, in which nothing is wrong that a rule knows, and input that
//! is wrong. That each cause is found is tested beside the rules, on systems of which the truth is known.

mod support;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use support::recorded::{copy, data, text};
use support::{Outcome, fabscope, schema};

const PAIRS: [&str; 3] = ["kernel-6.12-and-spdk-26.05", "spdk-26.05", "spdk-24.09"];

fn diagnose(arguments: &[&str]) -> Result<Outcome> {
    fabscope(["diagnose"].iter().chain(arguments))
}

fn json(said: &Outcome) -> Result<Value> {
    let value: Value = serde_json::from_str(&said.stdout)?;
    let schema = fabscope(["schema", "diagnose"])?.expect(0, &[])?.stdout;
    schema::check(&value, &serde_json::from_str(&schema)?)?;
    Ok(value)
}

#[test]
fn recorded_real_runs_have_no_cause_and_say_what_it_is_not() -> Result<()> {
    for name in PAIRS {
        let folder = data(name);
        let said = diagnose(&[text(&folder)?, "--format", "json"])?.expect(0, &[])?;
        let diagnosis = json(&said).context(name)?;
        ensure!(diagnosis["causes"].as_array().is_some_and(Vec::is_empty), "{name}: {}", diagnosis["causes"]);
        let of = |list: &str| diagnosis[list].as_array().map_or(0, Vec::len);
        ensure!(of("ruled_out") + of("cannot_tell") == 17 && of("ruled_out") >= 10, "{name}: {diagnosis}");
        // Both in either order, as a table and as Markdown.
        let (host, target) = (folder.join("host.run"), folder.join("target.run"));
        let said = diagnose(&[text(&target)?, text(&host)?])?.expect(0, &[])?.stdout;
        ensure!(said.starts_with("cause   no cause found: ") && said.contains("ruled out"), "{said}");
        ensure!(said.lines().all(|line| line.chars().count() <= 130), "{said}");
        let said = diagnose(&[text(&folder)?, "--format", "markdown"])?.expect(0, &[])?.stdout;
        ensure!(said.starts_with("### fabscope diagnose: no cause found"), "{said}");
    }
    Ok(())
}

/// Real recordings of the stand-in, on machines whose CPUs were away for milliseconds now and then.
#[test]
fn what_a_busy_machine_does_to_a_recording_is_no_loss_and_no_full_drive() -> Result<()> {
    // Nothing was injected. The receiver acknowledged late, and says of each segment that was sent again meanwhile that
    // it had it already.
    let said =
        diagnose(&[text(&data("standin-late-acknowledgements"))?, "--format", "json"])?.expect(0, &[])?;
    let diagnosis = json(&said)?;
    // Its thread had to wait for nine tenths of the time, which is so.
    let causes = diagnosis["causes"].as_array().context("causes")?;
    ensure!(causes.len() == 1 && causes[0]["cause"] == "host_cpu", "{causes:?}");
    let ruled_out = diagnosis["ruled_out"].as_array().context("ruled_out")?;
    let loss = ruled_out.iter().find(|judged| judged["cause"] == "fabric_loss").context("fabric_loss")?;
    ensure!(
        loss["why"].as_str().is_some_and(|why| why.contains("7 segments") && why.contains("DSACK")),
        "{loss}"
    );
    let of = |stall: &Value| (stall["segments"].as_f64(), stall["needless"].as_f64());
    let stalls = diagnosis["stalls"].as_array().context("stalls")?;
    let needless = stalls.iter().filter(|stall| of(stall).1 >= Some(1.0)).count();
    ensure!(stalls.len() == 7 && needless == 6, "{stalls:?}");
    // An exact limit of 2,000 a second was injected, and the machine was away for 50 ms at a time.
    let said =
        diagnose(&[text(&data("standin-iops-limit-and-gaps"))?, "--format", "json"])?.expect(0, &[])?;
    let diagnosis = json(&said)?;
    ensure!(diagnosis["causes"][0]["cause"] == "iops_limit", "{}", diagnosis["causes"]);
    let rate = diagnosis["causes"][0]["evidence"][0]["value"].as_f64();
    ensure!(rate.is_some_and(|rate| (1_900.0..2_100.0).contains(&rate)), "{rate:?}");
    Ok(())
}

#[test]
fn a_baseline_of_the_same_runs_leaves_nothing_to_explain() -> Result<()> {
    let (folder, other) = (data("spdk-26.05"), data("spdk-24.09"));
    let both = format!("{},{}", text(&other.join("host.run"))?, text(&other.join("target.run"))?);
    for baseline in [text(&folder)?, text(&other)?, &both] {
        let said = diagnose(&[text(&folder)?, "--baseline", baseline, "--format", "json"])?.expect(0, &[])?;
        let diagnosis = json(&said)?;
        ensure!(diagnosis["causes"].as_array().is_some_and(Vec::is_empty), "{}", diagnosis["causes"]);
        ensure!(diagnosis["baseline"] == baseline, "{}", diagnosis["baseline"]);
    }
    let alone = other.join("host.run");
    diagnose(&[text(&folder)?, "--baseline", text(&alone)?])?.expect(1, &["a baseline is a pair"])?;
    Ok(())
}

#[test]
fn service_levels_set_the_exit_code() -> Result<()> {
    let folder = data("spdk-26.05");
    let slo = |levels: &str| diagnose(&[text(&folder)?, "--slo", levels, "--format", "json"]);
    let outcomes = |said: &Outcome| -> Result<Vec<String>> {
        let diagnosis = json(said)?;
        let all = diagnosis["slo"].as_array().context("no slo")?;
        Ok(all.iter().map(|s| s["outcome"].to_string()).collect())
    };
    let said = slo("latency.p50<=1s,read:storage.mean<=1s")?.expect(0, &[])?;
    ensure!(outcomes(&said)?.iter().all(|o| o == "\"holds\""));
    let said = slo("read:storage.p50<=1us")?.expect(3, &[])?;
    ensure!(outcomes(&said)? == ["\"does_not_hold\""]);
    // The sample does not carry p99.9; what does not hold counts more than what can not be told.
    slo("latency.p999<=9s")?.expect(4, &[])?;
    slo("latency.p999<=9s,read:storage.p50<=1us")?.expect(3, &[])?;
    slo("compare:latency.p50<=1s")?.expect(4, &[])?;
    // Rates are of an operation's or of all commands together, and have to be reached.
    let said = slo("read.iops>=100,read/4KiB:iops>=0.1k,iops>=500,bandwidth>=1MiB/s")?.expect(0, &[])?;
    ensure!(outcomes(&said)? == ["\"holds\""; 4]);
    let rates = json(&said)?;
    ensure!(rates["slo"][0]["class"] == "read" && rates["slo"][2]["class"].is_null(), "{}", rates["slo"]);
    ensure!(rates["slo"][0]["value_rate"].as_f64() < rates["slo"][2]["value_rate"].as_f64());
    ensure!(rates["slo"][0]["bound_ns"].is_null() && rates["slo"][0]["bound_rate"] == 100.0);
    slo("read.iops>=90k")?.expect(3, &[])?;
    slo("write.bandwidth>=1GB/s")?.expect(3, &[])?;
    slo("compare.iops>=1")?.expect(4, &[])?;
    for (wrong, told) in [
        ("latency.p99<=1.05x", "has no time as its bound"),
        ("latency.typical<=1ms", "mean, p50, p90, p99 or p999"),
        ("beyond_host.p50<=1ms", "of one side alone"),
        ("latency.p98<=1ms", "is no statistic"),
        ("latency", "is no gate"),
        ("read.iops<=90k", "write >="),
        ("latency.p99>=1ms", "is no rate"),
        ("read.iops>=90kB/s", "commands a second"),
        ("read.bandwidth>=90k", "write 1GB/s"),
        ("gremlins.iops>=1", "is no operation"),
        ("iops>=-1", "always kept"),
    ] {
        slo(wrong)?.expect(2, &[told])?;
    }
    Ok(())
}

#[test]
fn wrong_input_and_too_little_are_told() -> Result<()> {
    let here = tempfile::tempdir()?;
    let pair = data("spdk-26.05");
    let host = pair.join("host.run");
    diagnose(&[text(&host)?])?.expect(1, &["needs both sides"])?;
    diagnose(&[text(&host)?, text(&host)?])?.expect(1, &["both runs are of a host"])?;
    diagnose(&[text(&host)?, "/no/such.run"])?.expect(1, &["/no/such.run"])?;
    let other = data("kernel-6.12-and-spdk-26.05").join("target.run");
    let said = diagnose(&[text(&host)?, text(&other)?, "--format", "json"])?;
    ensure!(said.code != Some(0), "{}", said.stdout);
    ensure!(json(&said)?["error"].is_string());

    // A run without commands is too little.
    let empty = here.path().join("empty");
    copy(&pair, &empty)?;
    for entry in fs::read_dir(empty.join("host.run/commands"))? {
        fs::remove_file(entry?.path())?;
    }
    diagnose(&[text(&empty)?])?.expect(4, &["the host's run has no commands"])?;
    Ok(())
}

#[test]
fn broken_telemetry_is_noted_and_takes_nothing_else_with_it() -> Result<()> {
    let here = tempfile::tempdir()?;
    let folder = here.path().join("pair");
    copy(&data("spdk-26.05"), &folder)?;
    let telemetry = folder.join("host.run/telemetry");
    fs::create_dir_all(&telemetry)?;
    fs::write(telemetry.join("tcp-000000.parquet"), "")?;
    fs::write(telemetry.join("metrics.json"), "{}")?;
    let said = diagnose(&[text(&folder)?, "--format", "json"])?.expect(0, &[])?;
    let notes = json(&said)?["notes"].to_string();
    ensure!(notes.contains("no Parquet file"), "{notes}");
    fs::write(telemetry.join("metrics.json"), "[")?;
    let said = diagnose(&[text(&folder)?, "--format", "json"])?.expect(0, &[])?;
    let notes = json(&said)?["notes"].to_string();
    ensure!(notes.contains("telemetry can not be read"), "{notes}");
    Ok(())
}
