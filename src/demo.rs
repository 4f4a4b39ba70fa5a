//! `fabscope demo`: records the stand-in's target and initiator, reports, makes storage slower by a known
//! amount, records again, and shows which stage grew.

use crate::cli::{Demo, Format};
use crate::exit;
use crate::pair::{self, Wish};
use crate::report;
use crate::signals::Signals;
use anyhow::{Context, Result, bail};
use joiner::{Class, JoinOptions, Report, ReportOptions};
use run_format::{Nanos, Run, Stage};
use standin::spawn::{Initiator, Target};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// What a read of the stand-in's storage takes to begin with, as on a flash drive. Not nothing: a command that
/// waits lets both programs sleep, and being woken shows up in the other stages; so they sleep in both
/// recordings.
const DRIVE: Duration = Duration::from_micros(100);
/// How often the two recordings are made at most, where other work on the machine disturbs them.
const ROUNDS: u32 = 3;
/// How much of the delay may show up in a wrong stage, or be missing in storage.
const TOLERANCE: f64 = 0.03;

/// Runs the demo. It ends with an error when the stages do not show what was done.
///
/// # Errors
/// When the stand-in can not be started or recorded, or the storage stage did not grow as it should have.
pub fn run(options: &Demo) -> Result<ExitCode> {
    let signals = Signals::catch()?;
    let scratch =
        tempfile::Builder::new().prefix("fabscope-demo-").tempdir().context("make a scratch folder")?;
    let home = options.keep.as_deref().unwrap_or(scratch.path());
    exit::print(
        "This demo records a stand-in target and a stand-in initiator over NVMe/TCP on this machine.\n\
         They have SPDK's probe points and are not SPDK; fabscope records them just as it records SPDK.\n\n",
    )?;

    let target = Target::spawn(["--delay".to_owned(), format!("storage={}us", DRIVE.as_micros())])?;
    let mut shown = false;
    for round in 1..=ROUNDS {
        target.set_delay(standin::Stage::Storage, DRIVE)?;
        let before = phase(&target, &home.join("before"), options, &signals)?;
        if round == 1 {
            report::print(&before, Format::Table)?;
            exit::print(&format!(
                "\nNow the stand-in's storage is made slower by {}, and both are recorded again.\n\n",
                show(options.delay)
            ))?;
        }
        target.set_delay(standin::Stage::Storage, DRIVE + options.delay)?;
        let after = phase(&target, &home.join("after"), options, &signals)?;
        shown = compare(&before, &after, options.delay)?;
        if shown {
            break;
        }
        if round < ROUNDS {
            exit::print(
                "\nOther work on this machine disturbed the recordings: both are made once more.\n\n",
            )?;
        }
    }
    target.stop()?;
    if let Some(keep) = &options.keep {
        let keep = keep.display();
        exit::print(&format!(
            "\nThe runs are kept: fabscope report {keep}/after/host.run {keep}/after/target.run\n"
        ))?;
    }
    if !shown {
        bail!(
            "the stages did not show the delay as they should: this machine is too busy, or a stage is measured wrongly; try --duration 10s, or a larger --delay"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// One load, recorded on both sides and joined.
fn phase(target: &Target, home: &Path, options: &Demo, signals: &Signals) -> Result<Report> {
    let load = [
        "--connect".to_owned(),
        target.address().to_string(),
        "--rw".to_owned(),
        "randread".to_owned(),
        "--queue-depth".to_owned(),
        "1".to_owned(),
        "--duration".to_owned(),
        format!("{}us", options.duration.as_micros()),
    ];
    let wish = Wish {
        home,
        telemetry: crate::telemetry::Asked::default(),
        labels: std::collections::BTreeMap::from([("demo".to_owned(), "stand-in".to_owned())]),
    };
    pair::record(target.pid(), Initiator::spawn(load)?, &wish, signals)?;
    let (host_run, target_run) = pair::runs(home);
    let joined = joiner::join(&Run::open(&host_run)?, &Run::open(&target_run)?, &JoinOptions::default())?;
    Ok(joiner::report(&joined, &ReportOptions::default())?)
}

/// Prints what each stage's median did, and says whether it is what was done to storage. Medians, because a
/// busy machine adds milliseconds to a few commands in every stage.
fn compare(before: &Report, after: &Report, delay: Duration) -> Result<bool> {
    let (before, after) = (main_class(before)?, main_class(after)?);
    let mut text = format!("{:<18}{:>12}{:>12}{:>14}\n", "median", "before", "after", "difference");
    let expected = delay.as_nanos() as f64;
    let mut all_shown = true;
    for stage in Stage::ALL {
        let median = |class: &Class| class.stages.of(stage).and_then(|f| f.times.p50_ns);
        let (Some(b), Some(a)) = (median(before), median(after)) else {
            bail!("too few commands for a median of {stage}: give more time with --duration");
        };
        let difference = a as f64 - b as f64;
        let wanted = if stage == Stage::Storage { expected } else { 0.0 };
        let shown = (difference - wanted).abs() <= TOLERANCE * expected;
        all_shown &= shown;
        text += &format!(
            "{:<18}{:>12}{:>12}{:>14}  {}\n",
            stage.title(),
            time(b as f64),
            time(a as f64),
            format!("{}{}", if difference < 0.0 { "-" } else { "+" }, time(difference.abs())),
            match (shown, stage == Stage::Storage) {
                (true, true) => "as it was made slower",
                (true, false) => "unchanged",
                (false, _) => "NOT as expected",
            }
        );
    }
    if all_shown {
        text += "\nThe storage stage grew by what was done to it, and no other stage did.\n";
    }
    exit::print(&text)?;
    Ok(all_shown)
}

fn main_class(report: &Report) -> Result<&Class> {
    report.classes.iter().max_by_key(|c| c.commands).context("the report has no commands")
}

fn time(nanos: f64) -> String {
    Nanos(nanos as u64).to_string()
}

fn show(duration: Duration) -> String {
    time(duration.as_nanos() as f64)
}
