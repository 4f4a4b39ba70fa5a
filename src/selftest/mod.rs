//! `fabscope selftest`: injects each known fault, records both sides with and without it, and checks that the stage, the
//! size and the cause come out, and that no cause does where there is no fault.

mod cases;
mod certificate;

pub use certificate::SCHEMA;

use crate::cli::{Format, Selftest};
use crate::exit;
use crate::pair::{self, Wish};
use crate::signals::Signals;
use crate::telemetry::Asked;
use anyhow::{Context, Result, bail};
use cases::{Beside, CASES, Case};
use certificate::{Certificate, Found, Machine, Size, TakenBy, Tried, Verdict};
use joiner::{Cause, Class, DiagnoseOptions, Input, JoinOptions, Report, ReportOptions};
use run_format::{Run, Stage};
use standin::cpus::{self, Hogs};
use standin::network::{Loss, in_own_network};
use standin::spawn::{Initiator, Target};
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

/// Runs the self-test.
///
/// # Errors
/// When a cause is not known, or the stand-in can not be started or recorded.
pub fn run(options: &Selftest) -> Result<ExitCode> {
    let cases = chosen(&options.only)?;
    let signals = Signals::catch()?;
    let scratch =
        tempfile::Builder::new().prefix("fabscope-selftest-").tempdir().context("make a scratch folder")?;
    let home = options.keep.as_deref().unwrap_or(scratch.path());
    let mut faults = Vec::new();
    let mut hooks = Vec::new();
    for case in cases {
        if options.format.format == Format::Table {
            exit::say(&format!("{}: {}", case.cause, case.injected));
        }
        let place = home.join(case.cause.name());
        let tried = tried(case, &place, options.quick, &signals)?;
        if hooks.is_empty() {
            hooks = hooks_of(&place.join("fault"));
        }
        faults.push(tried);
    }
    let certificate = Certificate {
        format: "fabscope-selftest/1",
        fabscope: env!("CARGO_PKG_VERSION"),
        machine: machine()?,
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

/// The cases of these causes; all where none are named.
fn chosen(only: &[String]) -> Result<Vec<&'static Case>> {
    let known = |name: &String| CASES.iter().any(|case| case.cause.name() == name);
    if let Some(other) = only.iter().find(|name| !known(name)) {
        let names: Vec<&str> = CASES.iter().map(|case| case.cause.name()).collect();
        bail!("--only {other}: what can be injected here is {}", names.join(", "));
    }
    let wanted = |case: &&Case| only.is_empty() || only.iter().any(|name| name == case.cause.name());
    Ok(CASES.iter().filter(wanted).collect())
}

fn machine() -> Result<Machine> {
    let kernel = nix::sys::utsname::uname().context("the kernel's release")?;
    Ok(Machine {
        kernel: kernel.release().to_string_lossy().into_owned(),
        cpus: cpus::usable()?.len(),
        standin: standin::version(),
    })
}

/// What the boundaries of the two runs were taken by; none where there are no runs.
fn hooks_of(home: &Path) -> Vec<TakenBy> {
    let (host, target) = pair::runs(home);
    let runs = [host, target].into_iter().filter_map(|run| Run::open(&run).ok());
    runs.flat_map(|run| TakenBy::of(&run.manifest().hooks)).collect()
}

/// Tries a fault, again where other work disturbed it.
fn tried(case: &Case, place: &Path, quick: bool, signals: &Signals) -> Result<Tried> {
    let mut tried = Tried {
        cause: case.cause,
        injected: case.injected.to_owned(),
        stages: case.stages.to_vec(),
        attempts: 0,
        found: None,
        verdict: Verdict::Skipped,
        why: Vec::new(),
    };
    if let Some(why) = lacking(case) {
        tried.why.push(why);
        return Ok(tried);
    }
    let duration = if quick { case.least } else { case.least.max(LONG) };
    while tried.attempts < ATTEMPTS {
        tried.attempts += 1;
        let found = match with_and_without(case, place, duration, signals) {
            Ok(found) => found,
            Err(error) if signals.came().is_some() => return Err(error),
            // The others are tried all the same.
            Err(error) => {
                tried.why = vec![exit::text(&error)];
                tried.verdict = Verdict::DoesNotHold;
                continue;
            }
        };
        tried.why = wrong(case, &found);
        let disturbed = is_disturbed(&found);
        tried.found = Some(found);
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

/// Whether other work had the CPUs while there was no fault: then what does not hold says nothing of the rules. That the
/// host's CPUs had no time is named of a control that was disturbed, and is right there.
fn is_disturbed(found: &Found) -> bool {
    found.cpu_pressure.is_some_and(|share| share >= BUSY) || found.without.contains(&Cause::HostCpu)
}

/// What the machine lacks for a case.
fn lacking(case: &Case) -> Option<String> {
    match case.beside {
        Beside::Hogs(_) => match cpus::usable() {
            Ok(cpus) if cpus.len() >= 2 => None,
            Ok(_) => Some("there is one CPU, and the target needs another than the initiator".to_owned()),
            Err(error) => Some(error.to_string()),
        },
        Beside::Loss(share) => in_own_network(|| Loss::on_loopback(share).map(drop))
            .err()
            .map(|error| format!("no network that loses packets: {error:#}")),
        Beside::Nothing | Beside::Neighbour(_) => None,
    }
}

/// What is not as it had to be.
fn wrong(case: &Case, found: &Found) -> Vec<String> {
    let mut wrong = Vec::new();
    let names = |causes: &[Cause]| causes.iter().map(|cause| cause.name()).collect::<Vec<_>>().join(", ");
    match found.causes.first() {
        Some(first) if *first == case.cause => {}
        Some(_) => wrong.push(format!("{} was named", names(&found.causes))),
        None => wrong.push("no cause was named".to_owned()),
    }
    if let Some(stage) = found.stage.filter(|stage| !case.stages.contains(stage)) {
        wrong.push(format!("it was found in {}", stage.title()));
    }
    if !found.size.holds {
        wrong.push("its size is not what was injected".to_owned());
    }
    if !found.without.is_empty() {
        wrong.push(format!("without the fault {} was named", names(&found.without)));
    }
    wrong
}

/// Records without the fault and with it, and diagnoses both.
fn with_and_without(case: &Case, place: &Path, duration: Duration, signals: &Signals) -> Result<Found> {
    let (clean, fault) = (place.join("clean"), place.join("fault"));
    record(case, false, &clean, duration, signals)?;
    record(case, true, &fault, duration, signals)?;
    let open = |home: &Path| -> Result<(Run, Run)> {
        let (host, target) = pair::runs(home);
        Ok((Run::open(&host)?, Run::open(&target)?))
    };
    let (clean_runs, fault_runs) = (open(&clean)?, open(&fault)?);
    let without = joiner::diagnose(&clean_runs.0, &clean_runs.1, &DiagnoseOptions::default())?;
    let how = DiagnoseOptions { baseline: Some(Input::find(&clean)?), ..DiagnoseOptions::default() };
    let with = joiner::diagnose(&fault_runs.0, &fault_runs.1, &how)?;
    let causes = |diagnosis: &joiner::Diagnosis| diagnosis.causes.iter().map(|f| f.cause).collect::<Vec<_>>();
    let (before, after) = (report(&clean_runs)?, report(&fault_runs)?);
    Ok(Found {
        causes: causes(&with),
        stage: with.causes.first().and_then(|finding| finding.stage),
        without: causes(&without),
        commands: after.classes.iter().map(|class| class.commands).sum(),
        size: size(case, &before, &after)?,
        cpu_pressure: cpu_pressure(&clean_runs.0)?,
    })
}

fn report((host, target): &(Run, Run)) -> Result<Report> {
    let joined = joiner::join(host, target, &JoinOptions::default())?;
    Ok(joiner::report(&joined, &ReportOptions::default())?)
}

/// By how much the fault's stages grew, in the class that most of the clean commands are of.
fn size(case: &Case, before: &Report, after: &Report) -> Result<Size> {
    let class = before.classes.iter().max_by_key(|class| class.commands).context("no commands")?;
    let is_same = |other: &&Class| {
        other.operation == class.operation && other.bytes == class.bytes && other.error == class.error
    };
    // A neighbour's commands are the more, but of another class.
    let with = after.classes.iter().find(is_same).context("no such commands with the fault")?;
    let mean = |class: &Class| {
        let of = |stage: &Stage| class.stages.of(*stage).map_or(0.0, |figures| figures.times.mean_ns);
        case.size.of.iter().map(of).sum::<f64>()
    };
    let (injected_ns, found_ns) = (case.size.micros * 1e3, mean(with) - mean(class));
    let holds = match case.size.within {
        Some(within) => (found_ns - injected_ns).abs() <= within * injected_ns,
        None => found_ns >= injected_ns,
    };
    Ok(Size {
        of: case.size.of.to_vec(),
        injected_ns,
        found_ns,
        tolerance: case.size.within,
        why: case.size.why.to_owned(),
        holds,
    })
}

/// The share of the time in which some thread waited for a CPU.
fn cpu_pressure(run: &Run) -> Result<Option<f64>> {
    let lines = run.telemetry()?.timelines("pressure", "some")?;
    let Some(line) = lines.iter().find(|line| line.object == "cpu") else { return Ok(None) };
    let rates: Vec<f64> = line.points.iter().filter_map(|point| point.value).collect();
    // Rates are in us a second.
    Ok((!rates.is_empty()).then(|| rates.iter().sum::<f64>() / rates.len() as f64 / 1e6))
}

/// Records the load with or without the fault, in a network of its own where the fault is the network's.
fn record(case: &Case, fault: bool, home: &Path, duration: Duration, signals: &Signals) -> Result<()> {
    match case.beside {
        Beside::Loss(share) => in_own_network(|| {
            let loss = if fault { Some(share) } else { None };
            record_here(case, fault, home, duration, signals, loss)
        }),
        _ => record_here(case, fault, home, duration, signals, None),
    }
}

fn record_here(
    case: &Case,
    fault: bool,
    home: &Path,
    duration: Duration,
    signals: &Signals,
    loss: Option<f64>,
) -> Result<()> {
    std::fs::create_dir_all(home).with_context(|| format!("create {}", home.display()))?;
    let rpc = tempfile::tempdir().context("make a folder for a socket")?;
    let mut options = words(case.target);
    options.extend(["--rpc".to_owned(), rpc.path().join("rpc.sock").display().to_string()]);
    if fault {
        options.extend(words(case.fault_target));
    }
    let target = Target::spawn(options)?;
    let load = |how: &[&str], duration: Duration| {
        let mut options = words(&["--connect"]);
        options.push(target.address().to_string());
        options.extend(words(how));
        options.extend(["--duration".to_owned(), format!("{}ms", duration.as_millis())]);
        options
    };
    let mut how = case.load.to_vec();
    if fault {
        how.extend(case.fault_load);
    }
    let initiator = Initiator::spawn(load(&how, duration))?;
    let mut beside = Around::default();
    match case.beside {
        Beside::Hogs(count) => {
            let all = cpus::usable()?;
            let [first, second, ..] = all[..] else { bail!("there is one CPU") };
            cpus::bind(target.pid(), first)?;
            cpus::bind(initiator.pid(), second)?;
            if fault {
                beside.hogs = Some(Hogs::on(second, count)?);
            }
        }
        Beside::Neighbour(options) if fault => {
            // It begins with the load, at the latest, and outlasts it.
            let mut neighbour = Initiator::spawn(load(options, duration + Duration::from_secs(60)))?;
            neighbour.start()?;
            beside.neighbour = Some(neighbour);
        }
        Beside::Loss(_) | Beside::Neighbour(_) | Beside::Nothing => {}
    }
    if let Some(share) = loss {
        beside.loss = Some(Loss::on_loopback(share)?);
    }
    let wish = Wish {
        home,
        telemetry: Asked { every: Some(telemetry::Options::EVERY), ..Asked::default() },
        labels: BTreeMap::from([
            ("selftest".to_owned(), case.cause.name().to_owned()),
            ("fault".to_owned(), fault.to_string()),
        ]),
    };
    pair::record(target.pid(), initiator, &wish, signals)?;
    drop(beside);
    target.stop()
}

/// What goes on beside the load; it ends with this.
#[derive(Debug, Default)]
struct Around {
    hogs: Option<Hogs>,
    neighbour: Option<Initiator>,
    loss: Option<Loss>,
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
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
                injected_ns: 1.0,
                found_ns: 1.0,
                tolerance: None,
                why: String::new(),
                holds,
            },
            cpu_pressure: None,
        }
    }

    #[test]
    fn only_the_right_cause_first_in_its_stage_with_its_size_and_a_clean_control_hold() {
        let case = CASES.iter().find(|case| case.cause == Cause::IopsLimit).unwrap();
        let (right, other) = (Cause::IopsLimit, Cause::HostCpu);
        let storage = Some(Stage::Storage);
        let said = |found: Found| wrong(case, &found).join("; ");
        assert_eq!(said(found(&[right, other], storage, &[], true)), "");
        assert_eq!(said(found(&[other, right], storage, &[], true)), "host_cpu, iops_limit was named");
        assert_eq!(said(found(&[], None, &[], true)), "no cause was named");
        assert!(said(found(&[right], Some(Stage::Network), &[], true)).contains("found in"));
        assert!(said(found(&[right], storage, &[other], true)).contains("without the fault host_cpu"));
        assert!(said(found(&[right], storage, &[], false)).contains("size"));
    }

    #[test]
    fn a_control_that_had_no_cpu_is_disturbed_and_one_with_another_cause_is_wrong() {
        let of = |without: &[Cause], cpu_pressure| {
            is_disturbed(&Found { cpu_pressure, ..found(&[], None, without, true) })
        };
        assert!(of(&[], Some(BUSY)) && of(&[Cause::HostCpu], Some(0.1)) && of(&[Cause::HostCpu], None));
        assert!(!of(&[], None) && !of(&[Cause::FabricLoss], Some(0.1)));
    }

    #[test]
    fn causes_are_chosen_by_name_and_others_refused() {
        assert_eq!(chosen(&[]).unwrap().len(), CASES.len());
        let some = chosen(&["iops_limit".to_owned(), "fabric_loss".to_owned()]).unwrap();
        assert_eq!(some.iter().map(|c| c.cause).collect::<Vec<_>>(), [Cause::FabricLoss, Cause::IopsLimit]);
        let said = chosen(&["gremlins".to_owned()]).unwrap_err().to_string();
        assert!(said.contains("gremlins") && said.contains("fabric_loss"), "{said}");
    }
}
