//! `fabscope batch`, the whole program: on directories with runs of every kind, ended in the middle and begun again, and two
//! at once.

mod support;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::recorded::{copy, data};
use support::{FABSCOPE, Outcome, Process, SOON, fabscope, outcome};

fn change(run: &Path, with: impl FnOnce(&mut Value)) -> Result<()> {
    let path = run.join("run.json");
    let mut manifest = serde_json::from_slice(&fs::read(&path)?)?;
    with(&mut manifest);
    Ok(fs::write(path, serde_json::to_vec_pretty(&manifest)?)?)
}

/// A recorded pair as if it had been recorded on another day: a recording of its own.
fn on_day(name: &str, to: &Path, day: u64) -> Result<()> {
    copy(&data(name), to)?;
    for side in ["host.run", "target.run"] {
        change(&to.join(side), |manifest| {
            let boot = manifest["machine"]["boot_id"].as_str().unwrap_or_default().to_owned();
            manifest["machine"]["boot_id"] = format!("{boot} {day}").into();
            for clock in manifest["clocks"].as_array_mut().into_iter().flatten() {
                let at = clock["realtime_ns"].as_u64().unwrap_or(0);
                clock["realtime_ns"] = (at + day * 86_400_000_000_000).into();
            }
            manifest["labels"]["load"] = "perf".into();
        })?;
    }
    Ok(())
}

/// Pairs of so many days, older SPDK first.
fn lab(directory: &Path, days: u64) -> Result<()> {
    for day in 0..days {
        let name = if day < days / 2 { "spdk-24.09" } else { "spdk-26.05" };
        on_day(name, &directory.join(format!("{day:03}")), day)?;
    }
    Ok(())
}

fn batch(arguments: &[&Path]) -> Command {
    let mut command = Command::new(FABSCOPE);
    command.arg("batch").args(arguments);
    command
}

fn json(said: &Outcome) -> Result<Value> {
    serde_json::from_str(&said.stdout).with_context(|| said.stdout.clone())
}

/// The results that are there.
fn results(out: &Path) -> usize {
    let entries = fs::read_dir(out.join("results")).into_iter().flatten().filter_map(Result::ok);
    entries.filter(|e| e.path().extension().is_some_and(|x| x == "pair")).count()
}

#[test]
fn mixed_directories_become_one_table_and_what_is_wrong_is_told() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out) = (here.path().join("lab"), here.path().join("out"));
    lab(&lab_.join("a/b"), 4)?;
    on_day("kernel-6.12-and-spdk-26.05", &lab_.join("kernel"), 9)?;
    // One side alone, a newer version, a foreign file, a run whose only segment was cut, a loop.
    on_day("spdk-26.05", &lab_.join("alone"), 20)?;
    fs::remove_dir_all(lab_.join("alone/target.run"))?;
    on_day("spdk-26.05", &lab_.join("newer"), 21)?;
    change(&lab_.join("newer/host.run"), |m| m["format"] = "fabscope-run/9".into())?;
    fs::remove_dir_all(lab_.join("newer/target.run"))?;
    fs::create_dir_all(lab_.join("foreign"))?;
    fs::write(lab_.join("foreign/run.json"), "[]")?;
    on_day("spdk-26.05", &lab_.join("cut"), 22)?;
    for segment in fs::read_dir(lab_.join("cut/host.run/commands"))? {
        let path = segment?.path();
        let bytes = fs::read(&path)?;
        fs::write(&path, &bytes[..bytes.len() / 2])?;
    }
    on_day("spdk-26.05", &lab_.join("noise"), 23)?;
    for segment in fs::read_dir(lab_.join("noise/target.run/commands"))? {
        let path = segment?.path();
        let mut bytes = fs::read(&path)?;
        let n = bytes.len() - 20;
        bytes[4..n].iter_mut().enumerate().for_each(|(i, b)| *b ^= (i % 251) as u8);
        fs::write(&path, bytes)?;
    }
    std::os::unix::fs::symlink("..", lab_.join("a/up"))?;

    let run = |format: &str| -> Result<Outcome> {
        let mut command = batch(&[&lab_, &lab_.join("a"), Path::new("-o"), &out]);
        outcome(command.args(["--by", "spdk.version", "--format", format]))
    };
    let told = json(&run("json")?.expect(0, &[])?)?;
    let schema: Value = serde_json::from_str(&fabscope(["schema", "batch"])?.expect(0, &[])?.stdout)?;
    support::schema::check(&told, &schema)?;
    ensure!(told["pairs"] == 5 && told["one_sided"] == 1, "{told:#}");
    let skipped = told["skipped"].as_array().context("skipped")?;
    for (path, why) in
        [("newer", "fabscope-run/9"), ("foreign", "not a fabscope run"), ("cut", ""), ("noise", "")]
    {
        let of = |s: &&Value| s["path"].as_str().is_some_and(|p| p.contains(path));
        let found = skipped.iter().find(of).with_context(|| format!("{path}: {told:#}"))?;
        ensure!(found["why"].as_str().is_some_and(|w| w.contains(why) && !w.is_empty()), "{found}");
    }
    ensure!(skipped.len() == 4, "{told:#}");
    let groups = told["by"]["groups"].as_array().context("groups")?;
    let values: Vec<&str> = groups.iter().filter_map(|g| g["value"].as_str()).collect();
    ensure!(values.len() == 2 && values[0].contains("24.09") && values[1].contains("26.05"), "{values:?}");
    ensure!(told["too_few"].as_array().is_some_and(|few| !few.is_empty()));

    let text = run("table")?.expect(0, &[])?.stdout;
    for part in [
        "5 pairs, 1 of one side alone; 0 joined now",
        "skipped 4",
        "fabscope-run/9",
        "by spdk.version",
        "differs most",
        "too few",
    ] {
        ensure!(text.contains(part), "{part:?} was expected: {text}");
    }
    // Labels are found without their prefix; those of one value too.
    let mut command = batch(&[&lab_, Path::new("-o"), &out]);
    let text = outcome(command.args(["--by", "load"]))?.expect(0, &[])?.stdout;
    ensure!(text.contains("by label.load"), "{text}");
    Ok(())
}

#[test]
fn a_second_call_touches_nothing_and_a_changed_run_is_done_again() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out) = (here.path().join("lab"), here.path().join("out"));
    lab(&lab_, 3)?;
    let run = || -> Result<Value> {
        json(&outcome(batch(&[&lab_, Path::new("-o"), &out]).args(["--format", "json"]))?.expect(0, &[])?)
    };
    ensure!(run()?["done_now"] == 3);
    let table = out.join("batch.parquet");
    let (bytes, written) = (fs::read(&table)?, fs::metadata(&table)?.modified()?);
    ensure!(run()?["done_now"] == 0 && fs::metadata(&table)?.modified()? == written);
    change(&lab_.join("001/host.run"), |m| m["labels"]["load"] = "other".into())?;
    let told = run()?;
    ensure!(told["done_now"] == 1 && told["done_before"] == 2, "{told:#}");
    ensure!(results(&out) == 3 && fs::read(&table)? != bytes);
    Ok(())
}

/// Ends a batch by a signal when some of its pairs are done, and lets another one go on.
fn ended(signal: Signal) -> Result<()> {
    const DAYS: u64 = 40;
    let here = tempfile::tempdir()?;
    let (lab_, out, whole) = (here.path().join("lab"), here.path().join("out"), here.path().join("whole"));
    lab(&lab_, DAYS)?;
    let mut command = batch(&[&lab_, Path::new("-o"), &out, Path::new("-j1")]);
    let error = here.path().join("stderr");
    let mut process = Process::start(command.stdout(Stdio::null()).stderr(fs::File::create(&error)?))?;
    let deadline = Instant::now() + SOON;
    while results(&out) < 3 {
        ensure!(Instant::now() < deadline && process.ended()?.is_none(), "{}", fs::read_to_string(&error)?);
        std::thread::sleep(Duration::from_millis(1));
    }
    process.signal(signal)?;
    let status = process.wait(SOON)?;
    let done = results(&out) as u64;
    ensure!(done < DAYS, "it was too fast to be ended");
    if signal == Signal::SIGINT {
        ensure!(status.code() == Some(1), "{status:?}");
        let said = fs::read_to_string(&error)?;
        let part = format!("{done} of {DAYS} pairs of runs were done: the same command goes on from there");
        ensure!(said.contains(&part), "{part} was expected: {said}");
    }
    ensure!(!out.join("batch.parquet").exists());
    let rest = outcome(batch(&[&lab_, Path::new("-o"), &out]).args(["--format", "json"]))?.expect(0, &[])?;
    let rest = json(&rest)?;
    ensure!(rest["done_before"] == done && rest["done_now"] == DAYS - done, "{done}: {rest:#}");
    outcome(&mut batch(&[&lab_, Path::new("-o"), &whole]))?.expect(0, &[])?;
    ensure!(fs::read(out.join("batch.parquet"))? == fs::read(whole.join("batch.parquet"))?);
    let left: Vec<_> = fs::read_dir(out.join("results"))?.filter_map(|e| Some(e.ok()?.path())).collect();
    ensure!(left.iter().all(|p| p.extension().is_none_or(|e| e != "tmp")), "{left:?}");
    Ok(())
}

#[test]
fn ended_by_ctrl_c_it_goes_on_from_there() -> Result<()> {
    ended(Signal::SIGINT)
}

#[test]
fn killed_it_goes_on_from_there() -> Result<()> {
    ended(Signal::SIGKILL)
}

#[test]
fn two_at_once_do_each_other_no_harm() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out, whole) = (here.path().join("lab"), here.path().join("out"), here.path().join("whole"));
    lab(&lab_, 12)?;
    let start = || {
        let mut command = batch(&[&lab_, Path::new("-o"), &out]);
        Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()))
    };
    let mut both = [start()?, start()?];
    for process in &mut both {
        ensure!(process.wait(SOON)?.success());
    }
    outcome(&mut batch(&[&lab_, Path::new("-o"), &whole]))?.expect(0, &[])?;
    ensure!(fs::read(out.join("batch.parquet"))? == fs::read(whole.join("batch.parquet"))?);
    ensure!(results(&out) == 12);
    Ok(())
}

#[test]
fn wrong_usage_and_nothing_to_say_have_their_exit_codes() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out) = (here.path().join("lab"), here.path().join("out"));
    lab(&lab_, 1)?;
    fabscope(["batch"])?.expect(2, &["DIR"])?;
    outcome(&mut batch(&[&lab_]))?.expect(2, &["--output"])?;
    for (option, value, why) in [
        ("--jobs", "0", "0 is not in 1..=1024"),
        ("--memory", "1", "has no unit"),
        ("--floor", "much", "is no least change"),
    ] {
        outcome(batch(&[&lab_, Path::new("-o"), &out]).args([option, value]))?.expect(2, &[why])?;
    }
    outcome(&mut batch(&[Path::new("/no/such"), Path::new("-o"), &out]))?
        .expect(1, &["no such directory"])?;
    outcome(&mut batch(&[&lab_, Path::new("-o"), &lab_.join("000/host.run")]))?
        .expect(1, &["it is a run"])?;
    outcome(batch(&[&lab_, Path::new("-o"), &out]).args(["--by", "colour"]))?
        .expect(1, &["no run has this label", "spdk.version"])?;
    // Pairs of which none can be joined.
    change(&lab_.join("000/host.run"), |m| m["labels"]["load"] = "x".into())?;
    fs::remove_dir_all(lab_.join("000/host.run/commands"))?;
    outcome(&mut batch(&[&lab_, Path::new("-o"), &out]))?.expect(4, &["no commands"])?;
    Ok(())
}
