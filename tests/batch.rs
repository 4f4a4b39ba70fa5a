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
use support::disk::Tmpfs;
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
    ensure!(left_over(&out).is_empty(), "{:?}", left_over(&out));
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

/// What a batch left besides results, its lock and its note of the table.
fn left_over(out: &Path) -> Vec<std::path::PathBuf> {
    let both = [out.to_owned(), out.join("results")];
    let entries = both.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "tmp")).collect()
}

#[test]
fn a_full_disk_and_one_that_is_read_only_end_it_and_it_goes_on_from_there() -> Result<()> {
    const DAYS: u64 = 30;
    let here = tempfile::tempdir()?;
    let lab_ = here.path().join("lab");
    lab(&lab_, DAYS)?;
    let Some(disk) = Tmpfs::mount(&here.path().join("disk"), 128)? else { return Ok(()) };
    let out = here.path().join("disk/out");
    let run = || outcome(batch(&[&lab_, Path::new("-o"), &out]).args(["--format", "json"]));
    let full = run()?.expect(1, &["disk/out", "No space left on device"])?;
    ensure!(full.stdout.is_empty(), "{full:?}");
    let kept = results(&out) as u64;
    ensure!((1..DAYS).contains(&kept), "{kept} results");
    ensure!(left_over(&out).is_empty() && !out.join("batch.parquet").exists(), "{:?}", left_over(&out));
    // With the disk as full as it was, nothing gets worse.
    run()?.expect(1, &["No space left on device"])?;
    ensure!(results(&out) as u64 >= kept);
    disk.remount("size=65536k")?;
    let told = json(&run()?.expect(0, &[])?)?;
    ensure!(told["pairs"] == DAYS && told["done_before"].as_u64() >= Some(kept), "{told:#}");
    let table = fs::read(out.join("batch.parquet"))?;
    let whole = here.path().join("whole");
    outcome(&mut batch(&[&lab_, Path::new("-o"), &whole]))?.expect(0, &[])?;
    ensure!(fs::read(whole.join("batch.parquet"))? == table);

    disk.remount("ro")?;
    run()?.expect(1, &["disk/out", "Read-only file system"])?;
    ensure!(fs::read(out.join("batch.parquet"))? == table && results(&out) as u64 == DAYS);
    disk.remount("rw")?;
    ensure!(json(&run()?.expect(0, &[])?)?["done_now"] == 0);
    Ok(())
}

#[test]
fn thousands_of_foreign_files_and_folders_are_walked_past() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out) = (here.path().join("lab"), here.path().join("out"));
    lab(&lab_, 2)?;
    for n in 0..3_000 {
        fs::write(lab_.join(format!("{n}.log")), "x")?;
        fs::create_dir(lab_.join(format!("job-{n}")))?;
        std::os::unix::fs::symlink(format!("{n}.log"), lab_.join(format!("latest-{n}")))?;
        fs::write(lab_.join(format!("job-{n}/run.txt")), "x")?;
    }
    // Another program's file of this name, longer than any manifest; it takes no room on the disk.
    fs::File::create(lab_.join("job-1/run.json"))?.set_len(1 << 40)?;
    let told = outcome(batch(&[&lab_, Path::new("-o"), &out]).args(["--format", "json"]))?.expect(0, &[])?;
    let told = json(&told)?;
    ensure!(told["pairs"] == 2 && told["skipped"].as_array().is_some_and(|s| s.len() == 1), "{told:#}");
    ensure!(told["skipped"][0]["why"].as_str().is_some_and(|w| w.contains("longer than 64 MiB")), "{told:#}");
    Ok(())
}

/// Runs that recorders left which were killed, at any moment.
#[test]
fn half_written_runs_are_read_as_far_as_they_go_or_told() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out) = (here.path().join("lab"), here.path().join("out"));
    let day = |name: &str, day: u64| -> Result<std::path::PathBuf> {
        on_day("spdk-26.05", &lab_.join(name), day)?;
        Ok(lab_.join(name))
    };
    // Open: neither its end nor its counters were written, and a segment is still aside.
    let open = day("open", 0)?;
    for side in ["host.run", "target.run"] {
        change(&open.join(side), |m| {
            m["state"] = "open".into();
            (m["counters"]["seen"], m["counters"]["recorded"]) = (0.into(), 0.into());
            m["window"]["end_ns"] = m["window"]["start_ns"].clone();
        })?;
        fs::write(open.join(side).join("commands/.000009.parquet.tmp"), "PAR1")?;
    }
    let no_commands = day("no-commands", 1)?;
    fs::remove_dir_all(no_commands.join("target.run/commands"))?;
    let no_queues = day("no-queues", 2)?;
    fs::remove_dir_all(no_queues.join("host.run/queues"))?;
    let nothing = day("nothing", 3)?;
    fs::write(nothing.join("host.run/run.json"), "")?;
    let half = day("half", 4)?;
    let text = fs::read(half.join("target.run/run.json"))?;
    fs::write(half.join("target.run/run.json"), &text[..text.len() / 2])?;
    let zero = day("zero", 5)?;
    for file in fs::read_dir(zero.join("host.run/commands"))? {
        fs::File::create(file?.path())?;
    }
    let told = outcome(batch(&[&lab_, Path::new("-o"), &out]).args(["--format", "json"]))?.expect(0, &[])?;
    let told = json(&told)?;
    let skipped = told["skipped"].as_array().context("skipped")?;
    for (name, why) in [
        ("no-commands", "no commands"),
        ("no-queues", ""),
        ("nothing/host.run", "damaged"),
        ("half/target.run", "damaged"),
        ("zero", ""),
    ] {
        let of = |s: &&Value| s["path"].as_str().is_some_and(|p| p.contains(name));
        let found = skipped.iter().find(of).with_context(|| format!("{name}: {told:#}"))?;
        ensure!(found["why"].as_str().is_some_and(|w| w.contains(why) && !w.is_empty()), "{found}");
    }
    // The open pair, and the other sides of those whose manifest is cut.
    ensure!(told["pairs"] == 1 && told["one_sided"] == 2 && skipped.len() == 5, "{told:#}");
    Ok(())
}

#[test]
fn linked_and_nested_runs_are_found_once_and_paired_where_they_lie() -> Result<()> {
    let here = tempfile::tempdir()?;
    let at = |name: &str| here.path().join(name);
    // Each machine has its own folder, and a folder of links says which belong together: their wall clocks do not.
    for (n, name) in ["spdk-24.09", "spdk-26.05"].into_iter().enumerate() {
        on_day(name, &at(&format!("made/{n}")), n as u64)?;
        let pair = at(&format!("lab/pairs/{n}"));
        fs::create_dir_all(&pair)?;
        for (folder, side, late) in [("hosts", "host.run", 0), ("targets", "target.run", 7)] {
            fs::create_dir_all(at(&format!("lab/{folder}")))?;
            let to = at(&format!("lab/{folder}/{n}"));
            fs::rename(at(&format!("made/{n}/{side}")), &to)?;
            change(&to, |m| {
                for clock in m["clocks"].as_array_mut().into_iter().flatten() {
                    let at = clock["realtime_ns"].as_u64().unwrap_or(0);
                    clock["realtime_ns"] = (at + late * 3_600_000_000_000).into();
                }
            })?;
            std::os::unix::fs::symlink(format!("../../{folder}/{n}"), pair.join(side))?;
        }
    }
    // A pair within a run, ten folders down, and the whole lab by a link.
    on_day("spdk-26.05", &at("lab/hosts/0/more/a/b/c/d/e/f/g/h"), 5)?;
    std::os::unix::fs::symlink("lab", at("link"))?;
    for (directory, out) in [("lab", "out"), ("link", "out-of-link")] {
        let mut command = batch(&[&at(directory), &at("lab/pairs"), Path::new("-o"), &at(out)]);
        let told = json(&outcome(command.args(["--format", "json"]))?.expect(0, &[])?)?;
        ensure!(told["pairs"] == 3 && told["one_sided"] == 0 && told["runs"] == 6, "{told:#}");
        ensure!(told["skipped"].as_array().is_some_and(Vec::is_empty), "{told:#}");
    }
    Ok(())
}

/// A reader takes its own version and older ones; what a newer one wrote is told with its version.
#[test]
fn older_formats_are_read_and_newer_ones_are_refused_by_name() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out) = (here.path().join("lab"), here.path().join("out"));
    lab(&lab_, 3)?;
    for side in ["host.run", "target.run"] {
        // As the first recorders wrote it.
        change(&lab_.join("000").join(side), |m| {
            let fields = m.as_object_mut();
            let later = ["windows", "overhead", "price", "telemetry", "events", "labels", "workload"];
            fields.into_iter().for_each(|fields| later.iter().for_each(|of| drop(fields.remove(*of))));
        })?;
        let _ = fs::remove_dir_all(lab_.join("000").join(side).join("telemetry"));
        change(&lab_.join("001").join(side), |m| m["format"] = "fabscope-run/2".into())?;
    }
    change(&lab_.join("002/host.run"), |m| m["format"] = "fabscope-run/11".into())?;
    let run = |format: &str| outcome(batch(&[&lab_, Path::new("-o"), &out]).args(["--format", format]));
    let told = json(&run("json")?.expect(0, &[])?)?;
    ensure!(told["pairs"] == 1 && told["one_sided"] == 1, "{told:#}");
    let text = run("table")?.expect(0, &[])?.stdout;
    for part in ["skipped 3", "001/host.run: has format fabscope-run/2, newer than", "fabscope-run/11"] {
        ensure!(text.contains(part), "{part:?} was expected: {text}");
    }
    // Of newer ones alone there is too little to say.
    outcome(&mut batch(&[&lab_.join("001"), Path::new("-o"), &here.path().join("none")]))?
        .expect(4, &["fabscope-run/2"])?;
    Ok(())
}

#[test]
fn ctrl_c_ends_one_that_waits_for_another() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out) = (here.path().join("lab"), here.path().join("out"));
    lab(&lab_, 1)?;
    fs::create_dir_all(out.join("results"))?;
    let lock = fs::File::create(out.join("results/lock"))?;
    lock.lock()?;
    let error = here.path().join("stderr");
    let mut command = batch(&[&lab_, Path::new("-o"), &out]);
    let mut process = Process::start(command.stdout(Stdio::null()).stderr(fs::File::create(&error)?))?;
    let deadline = Instant::now() + SOON;
    while !fs::read_to_string(&error)?.contains("another batch works on it") {
        ensure!(Instant::now() < deadline && process.ended()?.is_none(), "{}", fs::read_to_string(&error)?);
        std::thread::sleep(Duration::from_millis(5));
    }
    process.signal(Signal::SIGINT)?;
    ensure!(process.wait(SOON)?.code() == Some(1));
    let said = fs::read_to_string(&error)?;
    ensure!(said.contains("ended by a signal before it joined a pair of runs"), "{said}");
    drop(lock);
    outcome(&mut command)?.expect(0, &[])?;
    Ok(())
}

#[test]
fn pairs_that_were_done_elsewhere_count() -> Result<()> {
    let here = tempfile::tempdir()?;
    let (lab_, out, whole) = (here.path().join("lab"), here.path().join("out"), here.path().join("whole"));
    lab(&lab_, 4)?;
    fs::create_dir_all(out.join("results"))?;
    for day in 0..3 {
        let part = here.path().join(format!("part-{day}"));
        outcome(&mut batch(&[&lab_.join(format!("{day:03}")), Path::new("-o"), &part]))?.expect(0, &[])?;
        for entry in fs::read_dir(part.join("results"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "pair") {
                fs::copy(&path, out.join("results").join(path.file_name().context("a name")?))?;
            }
        }
    }
    let told =
        json(&outcome(batch(&[&lab_, Path::new("-o"), &out]).args(["--format", "json"]))?.expect(0, &[])?)?;
    ensure!(told["done_before"] == 3 && told["done_now"] == 1, "{told:#}");
    outcome(&mut batch(&[&lab_, Path::new("-o"), &whole]))?.expect(0, &[])?;
    ensure!(fs::read(out.join("batch.parquet"))? == fs::read(whole.join("batch.parquet"))?);
    Ok(())
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
