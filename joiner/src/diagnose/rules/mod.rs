//! The rules as data: for each cause what shows it, what refutes it, its thresholds with their reasons, what to do about
//! it at what price, and how to verify that. Each group's file has how its rules look at the facts.

mod fabric;
mod host;
mod loss;
mod queues;
mod storage;
mod target;
mod transport;
mod waits;

use super::cause::Cause;
use super::facts::{Class, Facts, Row, excess_of, ratio, sides};
use super::{Evidence, Finding, Judged};
use crate::table::count;
use run_format::{Side, Stage};

/// A figure that a rule goes by.
#[derive(Debug)]
pub(crate) struct Threshold {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) why: &'static str,
}

/// One cause's rule.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) cause: Cause,
    /// What shows it, and what refutes it: for a person.
    pub(crate) shows: &'static str,
    pub(crate) refutes: &'static str,
    pub(crate) thresholds: &'static [&'static Threshold],
    pub(crate) mitigation: &'static str,
    pub(crate) trade_off: &'static str,
    /// What to run once it is changed; runs of before and after are put in.
    pub(crate) verify: &'static str,
    /// Causes that look like this one: where one of them explains as much, it is named alone.
    pub(crate) yields_to: &'static [Cause],
    pub(crate) judge: fn(&Facts<'_>) -> Verdict,
}

/// All rules, in the order in which storage engineers look: fabric, transport, host, queues, target, drive.
pub(crate) const RULES: &[&Rule] = &[
    &loss::LOSS,
    &fabric::CONGESTION,
    &fabric::MTU,
    &transport::R2T,
    &transport::WINDOW,
    &host::CPU,
    &host::AFFINITY,
    &queues::TOO_FEW,
    &queues::HOT,
    &queues::HEAD_OF_LINE,
    &target::REACTOR,
    &target::BUFFERS,
    &storage::SATURATED,
    &storage::INTERNAL,
    &storage::THROTTLED,
    &storage::NEIGHBOUR,
    &storage::IOPS,
];

/// What a rule finds.
#[derive(Debug)]
pub(crate) enum Verdict {
    Holds(Found),
    RuledOut(String),
    CannotTell(String),
}

/// What a rule that holds has to show.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) stage: Stage,
    pub(crate) subject: Option<String>,
    /// By how much it makes each row slower, ns.
    pub(crate) claim: Claim,
    pub(crate) evidence: Vec<Evidence>,
    pub(crate) not_refuted: Vec<String>,
}

/// By how much a cause makes each row slower.
#[derive(Debug)]
pub(crate) enum Claim {
    /// Part of what the row is slower than when nothing is in the way.
    Excess(Vec<i64>),
    /// Time that every such command takes, also the fastest, and need not: a share of latency.
    Always(Vec<i64>),
}

/// A cause has to explain this share of the excess, or it is no cause of what is slow: less is within what the other
/// stages vary by chance.
pub(crate) const LEAST: Threshold = Threshold {
    name: "explains at least",
    value: 0.15,
    unit: "of the excess",
    why: "less is within what the stages vary by chance, and mending it changes little",
};

/// Stages whose excess is less than this are not where the time goes.
pub(crate) const NOT_THERE: Threshold = Threshold {
    name: "is elsewhere below",
    value: 0.10,
    unit: "of the excess",
    why: "a stage with less is not what makes commands slow, whatever its counters say",
};

/// Waiting for something that is full takes longer than the work itself.
pub(crate) const WAITS_AS_LONG: Threshold = Threshold {
    name: "time there",
    value: 1.8,
    unit: "x what it takes when nothing is in the way",
    why: "what waits for something that is full waits about as long as it works, or longer; less is how times vary anyway",
};

impl Found {
    /// The finding, or why it is none after all.
    pub(crate) fn finding(self, rule: &Rule, facts: &Facts<'_>) -> Result<Finding, String> {
        let (claim, always) = match self.claim {
            Claim::Excess(claim) => (claim, false),
            Claim::Always(claim) => (claim, true),
        };
        let of = |n: usize, row: &Row, class: &Class| {
            let most = if always { row.latency } else { excess_of(row, class) };
            claim.get(n).copied().unwrap_or(0).clamp(0, most.max(0))
        };
        let (all, tail) = facts.shares(of);
        let whole = if always {
            // Of those commands alone: others have no such time.
            facts.shares(|n, row, _| if claim.get(n).is_some_and(|&c| c > 0) { row.latency } else { 0 })
        } else {
            facts.excess
        };
        let (of_all, of_slowest) = (ratio(all, whole.0), ratio(tail, whole.1));
        let explains = of_all.max(of_slowest);
        if explains < LEAST.value {
            return Err(format!(
                "its signs are there ({}), but it explains {} of what makes commands slow, and a cause explains {} at least",
                self.evidence.first().map_or("in the telemetry", |e| e.text.as_str()),
                percent(explains),
                percent(LEAST.value)
            ));
        }
        let (commands, excess_ns) = touched(&claim);
        let runs = |run: &crate::recording::Recording| run.directory.display().to_string();
        let before = format!("{},{}", runs(&facts.joined.host), runs(&facts.joined.target));
        Ok(Finding {
            cause: rule.cause,
            stage: Some(self.stage),
            subject: self.subject,
            explains,
            of_all,
            of_slowest,
            commands,
            excess_ns,
            evidence: self.evidence,
            not_refuted: self.not_refuted,
            mitigation: rule.mitigation,
            trade_off: rule.trade_off,
            verify: rule.verify.replace("BEFORE", &before),
            claim,
        })
    }
}

/// How many rows a claim touches, and by how much it makes each of them slower on average, ns.
fn touched(claim: &[i64]) -> (u64, f64) {
    let touched = claim.iter().filter(|&&c| c > 0).count();
    let sum: f64 = claim.iter().map(|&c| c.max(0) as f64).sum();
    (touched as u64, sum / touched.max(1) as f64)
}

/// Causes that show in a part of what others make slow too, in the way back from the network, and have no evidence of their
/// own of a single command: what the others explain of a command is not theirs.
pub(crate) const LESS: &[(Cause, &[Cause])] = &[(
    Cause::HostCpu,
    &[Cause::FabricLoss, Cause::FabricCongestion, Cause::MtuMismatch, Cause::HotQueue, Cause::HeadOfLine],
)];

/// Takes off such causes what others explain of the same commands, and leaves out those of which too little is left.
pub(crate) fn without_shared(
    facts: &Facts<'_>,
    mut causes: Vec<Finding>,
    ruled_out: &mut Vec<Judged>,
) -> Vec<Finding> {
    for &(cause, others) in LESS {
        let Some(at) = causes.iter().position(|finding| finding.cause == cause) else { continue };
        let finding = causes.remove(at);
        let known: Vec<&Finding> = causes.iter().filter(|other| others.contains(&other.cause)).collect();
        let left = |n: usize| {
            let theirs = known.iter().filter_map(|other| other.claim.get(n)).max();
            (finding.claim.get(n).copied().unwrap_or(0) - theirs.copied().unwrap_or(0)).max(0)
        };
        let claim: Vec<i64> = (0..finding.claim.len()).map(left).collect();
        let (all, tail) = facts.shares(|n, row, class| claim[n].clamp(0, excess_of(row, class)));
        let (of_all, of_slowest) = (ratio(all, facts.excess.0), ratio(tail, facts.excess.1));
        let explains = of_all.max(of_slowest);
        if explains < LEAST.value {
            let names: Vec<&str> = known.iter().map(|other| other.cause.name()).collect();
            ruled_out.push(Judged {
                cause,
                why: format!(
                    "its signs are there ({}), but of what makes commands slow it explains {} that {} does not",
                    finding.evidence.first().map_or("in the telemetry", |e| e.text.as_str()),
                    percent(explains),
                    names.join(" or ")
                ),
            });
        } else {
            let (commands, excess_ns) = touched(&claim);
            causes.push(Finding { explains, of_all, of_slowest, commands, excess_ns, claim, ..finding });
        }
    }
    causes
}

/// Leaves out causes that only look like others which explain as much.
pub(crate) fn without_lookalikes(causes: Vec<Finding>, ruled_out: &mut Vec<Judged>) -> Vec<Finding> {
    // What two causes explain is told apart from here on.
    const AS_MUCH: f64 = 0.6;
    let explained: Vec<(Cause, f64)> = causes.iter().map(|f| (f.cause, f.explains)).collect();
    let (kept, lookalikes): (Vec<Finding>, Vec<Finding>) = causes.into_iter().partition(|finding| {
        let rule = RULES.iter().find(|rule| rule.cause == finding.cause);
        let yields_to = rule.map_or(&[][..], |rule| rule.yields_to);
        let as_much = |&(cause, explains): &(Cause, f64)| {
            yields_to.contains(&cause) && explains >= AS_MUCH * finding.explains
        };
        !explained.iter().any(as_much)
    });
    for finding in lookalikes {
        let rule = RULES.iter().find(|rule| rule.cause == finding.cause);
        let yields_to = rule.map_or(&[][..], |rule| rule.yields_to);
        let instead: Vec<&str> = explained
            .iter()
            .filter(|(cause, _)| yields_to.contains(cause))
            .map(|(cause, _)| cause.name())
            .collect();
        let why = format!(
            "its signs ({}) are what {} looks like too, which has evidence of its own",
            finding.evidence.first().map_or("", |e| e.text.as_str()),
            instead.join(" or ")
        );
        ruled_out.push(Judged { cause: finding.cause, why });
    }
    kept
}

/// Whether a side has any telemetry that the rules read.
pub(crate) fn has_telemetry(facts: &Facts<'_>, side: Side) -> bool {
    const ANY: [&str; 8] = ["tcp", "netstat", "cpu", "softnet", "nic", "reactors", "disk", "pressure"];
    facts.timeline.watched(side) || ANY.iter().any(|collector| facts.timeline.has(side, collector))
}

/// A share for a person.
pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() < 9.95 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

/// A number for a person.
pub(crate) fn number(v: f64) -> String {
    match v.abs() {
        a if a >= 1_000.0 => {
            let whole = count(v.abs().round() as u64);
            if v < 0.0 { format!("-{whole}") } else { whole }
        }
        a if a >= 99.95 || (a - a.round()).abs() < 1e-9 => format!("{v:.0}"),
        a if a >= 9.995 => format!("{v:.1}"),
        _ => format!("{v:.2}"),
    }
}

/// The two sides' names of a telemetry that lacks.
pub(crate) fn lacking(facts: &Facts<'_>, collector: &str) -> String {
    let without: Vec<String> = sides()
        .into_iter()
        .filter(|&side| !facts.timeline.has(side, collector))
        .map(|side| format!("the {side}'s run"))
        .collect();
    let have = if without.len() == 1 { "has" } else { "have" };
    format!("{} {have} no {collector} telemetry of this time", without.join(" and "))
}
