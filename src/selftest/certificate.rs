//! What a self-test came to: the certificate, for a person and as JSON.

use joiner::Cause;
use run_format::{Hook, Nanos, Stage};
use serde::Serialize;
use std::fmt::Write as _;

/// The JSON schema of a certificate.
pub const SCHEMA: &str = include_str!("../../joiner/src/schema/selftest.json");

/// All that was tried, on what, and what came of it.
#[derive(Debug, Serialize)]
pub struct Certificate {
    /// Name and version of this format.
    pub format: &'static str,
    /// The version of fabscope.
    pub fabscope: &'static str,
    /// Where it was tried.
    pub machine: Machine,
    /// What the boundaries were taken by.
    pub hooks: Vec<TakenBy>,
    /// The faults, one each.
    pub faults: Vec<Tried>,
    /// All together.
    pub verdict: Verdict,
}

/// A machine.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// Its kernel's release.
    pub kernel: String,
    /// The CPUs that were to be had.
    pub cpus: usize,
    /// What the commands went between.
    pub between: String,
}

/// How a boundary was taken.
#[derive(Debug, Serialize, PartialEq, Eq)]
pub struct TakenBy {
    /// Which.
    pub boundary: String,
    /// The hook; null where there was none.
    pub hook: Option<String>,
}

impl TakenBy {
    pub fn of(hooks: &[Hook]) -> Vec<TakenBy> {
        hooks
            .iter()
            .map(|hook| TakenBy { boundary: hook.boundary.name().to_owned(), hook: hook.hook.clone() })
            .collect()
    }
}

/// What came of a fault, or of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Found as it had to be, and nothing found without it.
    Holds,
    /// Not found as it had to be.
    DoesNotHold,
    /// Other work on the machine took so much of its CPUs that it can not be told.
    Disturbed,
    /// Not tried: the machine lacks something.
    Skipped,
}

impl Verdict {
    pub const fn title(self) -> &'static str {
        match self {
            Verdict::Holds => "holds",
            Verdict::DoesNotHold => "DOES NOT HOLD",
            Verdict::Disturbed => "disturbed",
            Verdict::Skipped => "skipped",
        }
    }
}

/// A fault that was injected, and what was found.
#[derive(Debug, Serialize)]
pub struct Tried {
    /// What was injected, by name: its cause's, where it has one.
    pub name: &'static str,
    /// The cause that had to be named first; null where none may be named.
    pub cause: Option<Cause>,
    /// What was done.
    pub injected: String,
    /// The stages that it may be found in.
    pub stages: Vec<Stage>,
    /// Times that it was tried; more than one where other work disturbed it.
    pub attempts: u32,
    /// What the last of them showed; null where it was not tried.
    pub found: Option<Found>,
    /// How what was found compares with what was injected.
    pub verdict: Verdict,
    /// What is not as it had to be, or why it was not tried.
    pub why: Vec<String>,
}

/// What a recording with and one without the fault showed.
#[derive(Debug, Serialize)]
pub struct Found {
    /// The causes that were named with the fault, the first first.
    pub causes: Vec<Cause>,
    /// The stage that the first was found in.
    pub stage: Option<Stage>,
    /// The causes that were named without the fault.
    pub without: Vec<Cause>,
    /// Commands recorded with the fault.
    pub commands: u64,
    /// The size.
    pub size: Size,
    /// The share of the time in which some thread of the machine waited for a CPU while there was no fault; null
    /// where the kernel does not tell.
    pub cpu_pressure: Option<f64>,
    /// The same of that thread of the recorded processes that waited most.
    pub cpu_wait: Option<f64>,
}

/// How much was added.
#[derive(Debug, Serialize)]
pub struct Size {
    /// The stages that it is of.
    pub of: Vec<Stage>,
    /// What of them is compared.
    pub by: By,
    /// What was injected, for each command on average, ns.
    pub injected_ns: f64,
    /// What these stages grew by, ns.
    pub found_ns: f64,
    /// By what share the two may differ; null where only the least is known.
    pub tolerance: Option<f64>,
    /// Why that much.
    pub why: String,
    /// Whether it is within.
    pub holds: bool,
    /// Another stage that changed by more than that, where none may.
    pub elsewhere: Option<Stage>,
}

/// What is compared of two recordings' commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// Their means.
    Mean,
    /// Their medians: of what every command has the same of, which a busy machine does not change.
    Median,
}

impl Certificate {
    /// All together: what does not hold is worse than what can not be told.
    pub fn verdict_of(faults: &[Tried]) -> Verdict {
        let any = |verdict| faults.iter().any(|tried| tried.verdict == verdict);
        if any(Verdict::DoesNotHold) {
            Verdict::DoesNotHold
        } else if any(Verdict::Disturbed) {
            Verdict::Disturbed
        } else if any(Verdict::Holds) {
            Verdict::Holds
        } else {
            Verdict::Skipped
        }
    }

    /// For a person.
    pub fn to_table(&self) -> String {
        let mut out = String::new();
        // Writing to a string can not fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "fabscope {} self-test: {}", self.fabscope, self.verdict.title())?;
        writeln!(
            out,
            "Linux {}, {} CPUs; {}\n",
            self.machine.kernel, self.machine.cpus, self.machine.between
        )?;
        writeln!(
            out,
            "{:<19}{:<19}{:<15}{:>11}{:>11}  {:<9}{:<18}verdict",
            "injected", "named first", "stage", "added", "found", "within", "without the fault"
        )?;
        for tried in &self.faults {
            tried.write(out)?;
        }
        let wrong = self.faults.iter().filter(|tried| !tried.why.is_empty());
        for (n, tried) in wrong.enumerate() {
            if n == 0 {
                writeln!(out)?;
            }
            for why in &tried.why {
                writeln!(out, "{}: {why}", tried.name)?;
            }
        }
        writeln!(out, "\nWhat was injected")?;
        for tried in &self.faults {
            writeln!(out, "  {:<19}{}", tried.name, tried.injected)?;
            if let Some(found) = &tried.found {
                writeln!(out, "  {:<19}size: {}", "", found.size.why)?;
            }
        }
        if !self.hooks.is_empty() {
            writeln!(out, "\nBoundaries were taken by")?;
            for taken in &self.hooks {
                writeln!(out, "  {:<12}{}", taken.boundary, taken.hook.as_deref().unwrap_or("nothing"))?;
            }
        }
        Ok(())
    }
}

impl Tried {
    fn write(&self, out: &mut String) -> std::fmt::Result {
        let Some(found) = &self.found else {
            return writeln!(out, "{:<19}{:<83}{}", self.name, "", self.verdict.title());
        };
        let time = |ns: f64| {
            let text = Nanos(ns.abs() as u64).to_string();
            if ns < 0.0 { format!("-{text}") } else { text }
        };
        let within = found.size.tolerance.map_or("at least".to_owned(), |t| format!("{:.0} %", t * 100.0));
        let without = match &found.without[..] {
            [] => "no cause".to_owned(),
            [first, ..] => first.name().to_owned(),
        };
        writeln!(
            out,
            "{:<19}{:<19}{:<15}{:>11}{:>11}  {:<9}{:<18}{}",
            self.name,
            found.causes.first().map_or("none", |cause| cause.name()),
            found.stage.map_or("-", |stage| stage.name()),
            time(found.size.injected_ns),
            time(found.size.found_ns),
            within,
            without,
            self.verdict.title()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{Certificate, Tried, Verdict};
    use joiner::Cause;

    #[test]
    fn what_does_not_hold_is_worse_than_what_can_not_be_told() {
        use Verdict::{Disturbed, DoesNotHold, Holds, Skipped};
        let of = |verdicts: &[Verdict]| {
            let tried = |verdict: &Verdict| Tried {
                name: "fabric_loss",
                cause: Some(Cause::FabricLoss),
                injected: String::new(),
                stages: Vec::new(),
                attempts: 1,
                found: None,
                verdict: *verdict,
                why: Vec::new(),
            };
            Certificate::verdict_of(&verdicts.iter().map(tried).collect::<Vec<_>>())
        };
        assert_eq!(of(&[Holds, Disturbed, DoesNotHold]), DoesNotHold);
        assert_eq!(of(&[Holds, Disturbed, Skipped]), Disturbed);
        assert_eq!(of(&[Holds, Skipped]), Holds);
        assert_eq!((of(&[Skipped]), of(&[])), (Skipped, Skipped));
    }
}
