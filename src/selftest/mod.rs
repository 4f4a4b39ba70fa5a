//! `fabscope selftest`: injects each known fault, records both sides with and without it, and checks that the stage, the
//! size and the cause come out, and that no cause does where there is no fault.

mod beside;
mod cases;
mod certificate;
mod spdk;
mod standin;

pub use certificate::SCHEMA;

use crate::cli::{Format, Selftest};
use crate::exit;
use crate::pair::{self, Wish};
use crate::signals::Signals;
use crate::telemetry::Asked;
use anyhow::{Context, Result, bail};
use cases::Size as Added;
use certificate::{By, Certificate, Found, Machine, Size, TakenBy, Tried, Verdict};
use joiner::{Cause, Class, DiagnoseOptions, Input, JoinOptions, Report, ReportOptions};
use run_format::{Run, Stage, Timeline};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How often a fault is tried at most, where other work on the machine disturbs it.
const ATTEMPTS: u32 = 3;
/// A recording lasts this long where it need not be shorter or longer.
const LONG: Duration = Duration::from_secs(5);
/// The machine is too busy to judge what does not hold: some thread waited for a CPU for this share of the time,
/// with no fault injected.
const BUSY: f64 = 0.3;
/// The same of a thread of the recorded processes: what the rule of `host_cpu` goes by.
const WAITED: f64 = 0.1;

/// Something that can be injected and recorded.
trait Inject {
    /// What has to be found.
    fn expected(&self) -> Expected;

    /// What the machine lacks for it.
    fn lacking(&self) -> Option<String>;

    /// Records the load with or without the fault, as the two runs of a folder.
    ///
    /// # Errors
    /// Something does not start, can not be recorded, or is ended by a signal.
    fn record(&self, what: &Recorded<'_>) -> Result<()>;
}

/// What has to be found of a fault.
#[derive(Clone, Copy, Debug)]
struct Expected {
    /// Its name: its cause's, where it has one.
    name: &'static str,
    /// What has to be named first; none where what is done is no fault, and nothing may be named.
    cause: Option<Cause>,
    /// What is done, in words.
    injected: &'static str,
    /// Where it may be found.
    stages: &'static [Stage],
    /// What it adds.
    size: Added,
    /// Whether it adds that to every command, whichever: then the medians have to show it, and no other stage may grow.
    every: bool,
    /// How long a recording lasts at least.
    least: Duration,
    /// Whether the recorded processes never sleep, so that whatever else runs has to wait for a CPU.
    polls: bool,
}

/// A recording that is to be made.
#[derive(Debug)]
struct Recorded<'a> {
    fault: bool,
    home: &'a Path,
    duration: Duration,
    signals: &'a Signals,
}

impl Recorded<'_> {
    fn wish(&self, name: &str) -> Wish<'_> {
        Wish {
            home: self.home,
            telemetry: Asked { every: Some(telemetry::Options::EVERY), ..Asked::default() },
            labels: BTreeMap::from([
                ("selftest".to_owned(), name.to_owned()),
                ("fault".to_owned(), self.fault.to_string()),
            ]),
        }
    }
}

/// Runs the self-test.
///
/// # Errors
/// When a cause is not known, or what is to be recorded can not be started.
pub fn run(options: &Selftest) -> Result<ExitCode> {
    let known = match &options.spdk {
        Some(_) => spdk::names(),
        None => standin::all().iter().map(|fault| fault.expected().name).collect(),
    };
    check(&options.only, &known)?;
    let signals = Signals::catch()?;
    let scratch = tempfile::Builder::new().prefix("fabscope-selftest-").tempdir();
    let scratch = scratch.context("make a scratch folder (TMPDIR names where)")?;
    if let Some(keep) = &options.keep {
        // Else each recording would fail, and that would be said to be the self-test's.
        std::fs::create_dir_all(keep).with_context(|| format!("--keep {}", keep.display()))?;
    }
    let home = options.keep.as_deref().unwrap_or(scratch.path());
    let (all, between) = match &options.spdk {
        Some(directory) => {
            let build = spdk::Build::open(directory, &signals)?;
            let between = build.title();
            (spdk::all(build), between)
        }
        None => (standin::all(), ::standin::version().to_owned()),
    };
    let mut faults = Vec::new();
    let mut hooks = Vec::new();
    for fault in all.iter().filter(|fault| is_wanted(&options.only, fault.expected().name)) {
        let expected = fault.expected();
        if options.format.format == Format::Table {
            exit::say(&format!("{}: {}", expected.name, expected.injected));
        }
        let place = home.join(expected.name);
        let tried = tried(fault.as_ref(), &place, options.quick, &signals)?;
        if hooks.is_empty() {
            hooks = hooks_of(&place.join("fault"));
        }
        faults.push(tried);
    }
    let certificate = Certificate {
        format: "fabscope-selftest/1",
        fabscope: env!("CARGO_PKG_VERSION"),
        machine: machine(between)?,
        hooks,
        verdict: Certificate::verdict_of(&faults),
        faults,
    };
    exit::print(&match options.format.format {
        Format::Table => certificate.to_table(),
        Format::Json => serde_json::to_string_pretty(&certificate).context("write the certificate")? + "\n",
    })?;
    Ok(match certificate.verdict {
        Verdict::Holds => ExitCode::SUCCESS,
        Verdict::DoesNotHold => ExitCode::from(exit::GATE),
        Verdict::Disturbed | Verdict::Skipped => ExitCode::from(exit::TOO_LITTLE),
    })
}

/// That only what can be injected is asked for.
fn check(only: &[String], known: &[&str]) -> Result<()> {
    match only.iter().find(|name| !known.contains(&name.as_str())) {
        Some(other) => bail!("--only {other}: what can be injected here is {}", known.join(", ")),
        None => Ok(()),
    }
}

/// All are, where none is named.
fn is_wanted(only: &[String], name: &str) -> bool {
    only.is_empty() || only.iter().any(|wanted| wanted == name)
}

fn machine(between: String) -> Result<Machine> {
    let kernel = nix::sys::utsname::uname().context("the kernel's release")?;
    Ok(Machine {
        kernel: kernel.release().to_string_lossy().into_owned(),
        cpus: ::standin::cpus::usable()?.len(),
        between,
    })
}

/// What the boundaries of the two runs were taken by; none where there are no runs.
fn hooks_of(home: &Path) -> Vec<TakenBy> {
    let (host, target) = pair::runs(home);
    let runs = [host, target].into_iter().filter_map(|run| Run::open(&run).ok());
    runs.flat_map(|run| TakenBy::of(&run.manifest().hooks)).collect()
}

/// Tries a fault, again where other work disturbed it.
fn tried(fault: &dyn Inject, place: &Path, quick: bool, signals: &Signals) -> Result<Tried> {
    let expected = fault.expected();
    let mut tried = Tried {
        name: expected.name,
        cause: expected.cause,
        injected: expected.injected.to_owned(),
        stages: expected.stages.to_vec(),
        attempts: 0,
        found: None,
        verdict: Verdict::Skipped,
        why: Vec::new(),
    };
    if let Some(why) = fault.lacking() {
        tried.why.push(why);
        return Ok(tried);
    }
    let duration = if quick { expected.least } else { expected.least.max(LONG) };
    while tried.attempts < ATTEMPTS {
        tried.attempts += 1;
        let disturbed;
        match with_and_without(fault, place, duration, signals) {
            Ok(found) => {
                tried.why = wrong(&expected, &found);
                disturbed = is_disturbed(&expected, &found.cpu(), &found.without);
                tried.found = Some(found);
            }
            Err(error) if signals.came().is_some() => return Err(error),
            // The others are tried all the same.
            Err(error) => {
                tried.why = vec![exit::text(&error)];
                tried.found = None;
                // A machine without time gives too few commands to say anything.
                disturbed = exit::is_too_little(&error)
                    && Cpu::of(&place.join("clean")).is_ok_and(|cpu| is_disturbed(&expected, &cpu, &[]));
            }
        }
        tried.verdict = match (tried.why.is_empty(), disturbed) {
            (true, _) => Verdict::Holds,
            (false, true) => Verdict::Disturbed,
            (false, false) => Verdict::DoesNotHold,
        };
        if tried.verdict != Verdict::Disturbed {
            break;
        }
    }
    Ok(tried)
}

/// What the machine's CPUs had to spare while there was no fault; null where the kernel does not tell.
#[derive(Clone, Copy, Debug, Default)]
struct Cpu {
    /// The share of the time in which some thread of the machine waited for one.
    pressure: Option<f64>,
    /// The same of that thread of the two recorded processes that waited most, of those that work.
    waited: Option<f64>,
}

impl Cpu {
    /// From a folder's two runs.
    fn of(home: &Path) -> Result<Cpu> {
        let (host, target) = pair::runs(home);
        let (host, target) = (Run::open(&host)?, Run::open(&target)?);
        let waited = [waited(&host)?, waited(&target)?];
        Ok(Cpu { pressure: cpu_pressure(&host)?, waited: waited.into_iter().flatten().reduce(f64::max) })
    }
}

/// Whether other work had the CPUs while there was no fault: then what does not hold says nothing of the rules. That the
/// host's CPUs had no time is named of a control that was disturbed, and is right there.
fn is_disturbed(expected: &Expected, cpu: &Cpu, without: &[Cause]) -> bool {
    let over = |share: Option<f64>, limit: f64| share.is_some_and(|share| share >= limit);
    over(cpu.waited, WAITED)
        || (!expected.polls && over(cpu.pressure, BUSY))
        || without.contains(&Cause::HostCpu)
}

/// What is not as it had to be.
fn wrong(expected: &Expected, found: &Found) -> Vec<String> {
    let mut wrong = Vec::new();
    let names = |causes: &[Cause]| causes.iter().map(|cause| cause.name()).collect::<Vec<_>>().join(", ");
    match (found.causes.first(), expected.cause) {
        (first, cause) if first.copied() == cause => {}
        (Some(_), _) => wrong.push(format!("{} was named", names(&found.causes))),
        (None, _) => wrong.push("no cause was named".to_owned()),
    }
    if let Some(stage) = found.stage.filter(|stage| !expected.stages.contains(stage)) {
        wrong.push(format!("it was found in {}", stage.title()));
    }
    if !found.size.holds {
        wrong.push("its size is not what was injected".to_owned());
    }
    if let Some(stage) = found.size.elsewhere {
        wrong.push(format!("{} grew too", stage.title()));
    }
    if !found.without.is_empty() {
        wrong.push(format!("without the fault {} was named", names(&found.without)));
    }
    wrong
}

/// Records without the fault and with it, and diagnoses both.
fn with_and_without(
    fault: &dyn Inject,
    place: &Path,
    duration: Duration,
    signals: &Signals,
) -> Result<Found> {
    let (clean, faulty) = (place.join("clean"), place.join("fault"));
    for (fault_is_there, home) in [(false, &clean), (true, &faulty)] {
        std::fs::create_dir_all(home).with_context(|| format!("create {}", home.display()))?;
        fault.record(&Recorded { fault: fault_is_there, home, duration, signals })?;
    }
    let open = |home: &Path| -> Result<(Run, Run)> {
        let (host, target) = pair::runs(home);
        Ok((Run::open(&host)?, Run::open(&target)?))
    };
    let (clean_runs, fault_runs) = (open(&clean)?, open(&faulty)?);
    let without = joiner::diagnose(&clean_runs.0, &clean_runs.1, &DiagnoseOptions::default())?;
    let how = DiagnoseOptions { baseline: Some(Input::find(&clean)?), ..DiagnoseOptions::default() };
    let with = joiner::diagnose(&fault_runs.0, &fault_runs.1, &how)?;
    let causes = |diagnosis: &joiner::Diagnosis| diagnosis.causes.iter().map(|f| f.cause).collect::<Vec<_>>();
    let (before, after) = (report(&clean_runs)?, report(&fault_runs)?);
    let cpu = Cpu::of(&clean)?;
    Ok(Found {
        causes: causes(&with),
        stage: with.causes.first().and_then(|finding| finding.stage),
        without: causes(&without),
        commands: after.classes.iter().map(|class| class.commands).sum(),
        size: size(&fault.expected(), &before, &after)?,
        cpu_pressure: cpu.pressure,
        cpu_wait: cpu.waited,
    })
}

impl Found {
    fn cpu(&self) -> Cpu {
        Cpu { pressure: self.cpu_pressure, waited: self.cpu_wait }
    }
}

fn report((host, target): &(Run, Run)) -> Result<Report> {
    let joined = joiner::join(host, target, &JoinOptions::default())?;
    Ok(joiner::report(&joined, &ReportOptions::default())?)
}

/// By how much the fault's stages grew, in the class that most of the clean commands are of.
fn size(expected: &Expected, before: &Report, after: &Report) -> Result<Size> {
    let class = before.classes.iter().max_by_key(|class| class.commands).context("no commands")?;
    let is_same = |other: &&Class| {
        other.operation == class.operation && other.bytes == class.bytes && other.error == class.error
    };
    // A neighbour's commands are the more, but of another class.
    let with = after.classes.iter().find(is_same).context("no such commands with the fault")?;
    let added = &expected.size;
    let of = |class: &Class, stage: Stage| {
        class.stages.of(stage).map_or(0.0, |figures| match figures.times.p50_ns {
            Some(median) if expected.every => median as f64,
            _ => figures.times.mean_ns,
        })
    };
    let grown = |stage: Stage| of(with, stage) - of(class, stage);
    let injected_ns = added.micros * 1e3;
    let found_ns: f64 = added.of.iter().copied().map(grown).sum();
    let holds = match added.within {
        Some(within) => (found_ns - injected_ns).abs() <= within * injected_ns,
        None => found_ns >= injected_ns,
    };
    let others = || Stage::ALL.into_iter().filter(|stage| !added.of.contains(stage));
    let is_too_much = |stage: &Stage| {
        expected.every && grown(*stage).abs() > added.within.unwrap_or_default() * injected_ns
    };
    Ok(Size {
        of: added.of.to_vec(),
        by: if expected.every { By::Median } else { By::Mean },
        injected_ns,
        found_ns,
        tolerance: added.within,
        why: added.why.to_owned(),
        holds,
        elsewhere: others().find(is_too_much),
    })
}

/// The share of the time in which some thread waited for a CPU.
fn cpu_pressure(run: &Run) -> Result<Option<f64>> {
    let lines = run.telemetry()?.timelines("pressure", "some")?;
    let Some(line) = lines.iter().find(|line| line.object == "cpu") else { return Ok(None) };
    // Rates are in us a second.
    Ok(mean(line).map(|rate| rate / 1e6))
}

/// The same of the thread that waited most of the recorded process's own that work.
fn waited(run: &Run) -> Result<Option<f64>> {
    /// Threads that run for less of the time do no I/O.
    const WORKS: f64 = 0.05;
    let telemetry = run.telemetry()?;
    let (waits, runs) =
        (telemetry.timelines("threads", "run_delay")?, telemetry.timelines("threads", "run_time")?);
    // Rates are in ns a second.
    let share = |line: &Timeline| mean(line).unwrap_or(0.0) / 1e9;
    let ran = |object: &str| runs.iter().find(|line| line.object == object).map_or(0.0, share);
    let of_those_that_work = waits.iter().filter(|line| share(line) + ran(&line.object) >= WORKS).map(share);
    Ok(of_those_that_work.reduce(f64::max))
}

fn mean(line: &Timeline) -> Option<f64> {
    let rates: Vec<f64> = line.points.iter().filter_map(|point| point.value).collect();
    (!rates.is_empty()).then(|| rates.iter().sum::<f64>() / rates.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(causes: &[Cause], stage: Option<Stage>, without: &[Cause], holds: bool) -> Found {
        Found {
            causes: causes.to_vec(),
            stage,
            without: without.to_vec(),
            commands: 1,
            size: Size {
                of: Vec::new(),
                by: By::Mean,
                injected_ns: 1.0,
                found_ns: 1.0,
                tolerance: None,
                why: String::new(),
                holds,
                elsewhere: None,
            },
            cpu_pressure: None,
            cpu_wait: None,
        }
    }

    fn expected(cause: Option<Cause>) -> Expected {
        let case =
            standin::all().iter().find(|f| f.expected().cause == Some(Cause::IopsLimit)).unwrap().expected();
        Expected { cause, ..case }
    }

    #[test]
    fn only_the_right_cause_first_in_its_stage_with_its_size_and_a_clean_control_hold() {
        let (right, other) = (Cause::IopsLimit, Cause::HostCpu);
        let storage = Some(Stage::Storage);
        let said = |found: Found| wrong(&expected(Some(right)), &found).join("; ");
        assert_eq!(said(found(&[right, other], storage, &[], true)), "");
        assert_eq!(said(found(&[other, right], storage, &[], true)), "host_cpu, iops_limit was named");
        assert_eq!(said(found(&[], None, &[], true)), "no cause was named");
        assert!(said(found(&[right], Some(Stage::Network), &[], true)).contains("found in"));
        assert!(said(found(&[right], storage, &[other], true)).contains("without the fault host_cpu"));
        assert!(said(found(&[right], storage, &[], false)).contains("size"));
        let mut grew = found(&[right], storage, &[], true);
        grew.size.elsewhere = Some(Stage::Network);
        assert_eq!(said(grew), "network grew too");
    }

    #[test]
    fn of_what_is_no_fault_nothing_may_be_named() {
        let said = |found: Found| wrong(&expected(None), &found).join("; ");
        assert_eq!(said(found(&[], None, &[], true)), "");
        assert_eq!(said(found(&[Cause::HostCpu], None, &[], true)), "host_cpu was named");
    }

    #[test]
    fn a_control_that_had_no_cpu_is_disturbed_and_one_with_another_cause_is_wrong() {
        let of = |polls: bool, without: &[Cause], pressure, waited| {
            let expected = Expected { polls, ..expected(Some(Cause::IopsLimit)) };
            is_disturbed(&expected, &Cpu { pressure, waited }, without)
        };
        for polls in [false, true] {
            assert!(
                of(polls, &[Cause::HostCpu], Some(0.1), None) && of(polls, &[Cause::HostCpu], None, None)
            );
            assert!(of(polls, &[], None, Some(WAITED)));
            assert!(!of(polls, &[], None, None) && !of(polls, &[Cause::FabricLoss], Some(0.1), Some(0.01)));
            // What polls makes everything else wait.
            assert_eq!(of(polls, &[], Some(BUSY), None), !polls);
        }
    }

    #[test]
    fn causes_are_chosen_by_name_and_others_refused() {
        let known = ["fabric_loss", "iops_limit"];
        let only = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert!(check(&[], &known).is_ok() && check(&only(&known), &known).is_ok());
        let said = check(&only(&["gremlins"]), &known).unwrap_err().to_string();
        assert!(said.contains("gremlins") && said.contains("fabric_loss"), "{said}");
        assert!(is_wanted(&[], "iops_limit") && is_wanted(&only(&["iops_limit"]), "iops_limit"));
        assert!(!is_wanted(&only(&["iops_limit"]), "fabric_loss"));
    }
}
