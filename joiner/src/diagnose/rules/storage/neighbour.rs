//! A neighbour on another namespace of the same drive.

use super::super::super::Evidence;
use super::super::super::cause::Cause;
use super::super::super::facts::{Facts, InFlight};
use super::super::super::figures::mean;
use super::super::{Claim, Found, LEAST, Rule, Threshold, Verdict, number};
use super::slowness;
use crate::table::time;
use run_format::{Side, Stage};

const NEIGHBOUR_SLOWER: Threshold = Threshold {
    name: "storage beside a busy neighbour",
    value: 1.5,
    unit: "x beside a quiet one",
    why: "half as much again is beyond what storage varies by itself",
};
const NEIGHBOUR_MORE: Threshold = Threshold {
    name: "the neighbour's completions then",
    value: 1.3,
    unit: "x its other times",
    why: "a drive that is slow for everyone completes less, not more",
};
const NEIGHBOUR_COMMANDS: Threshold =
    Threshold { name: "commands of either kind", value: 20.0, unit: "commands", why: "fewer tell nothing" };

pub(in super::super) const NEIGHBOUR: Rule = Rule {
    cause: Cause::NoisyNeighbour,
    shows: "storage of one namespace is slow while another has much in flight and completes more than at other times",
    refutes: "only one namespace has commands, or storage takes as long whatever the others do",
    thresholds: &[&NEIGHBOUR_SLOWER, &NEIGHBOUR_MORE, &NEIGHBOUR_COMMANDS, &LEAST],
    mitigation: "limit the neighbour (bdev_set_qos_limit, blk-cgroup io.max on the kernel's target), or move one of the two namespaces to another drive",
    trade_off: "the neighbour gets less; a limit also holds when nobody else needs the drive",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'storage.p99<=1ms'",
    yields_to: &[Cause::DriveThrottled],
    judge: neighbour,
};

/// What another namespace's load does to one.
struct Beside {
    victim: u32,
    other: u32,
    slower: f64,
    busy: f64,
    quiet: f64,
    /// In flight of the other from which it is busy, and up to which it is quiet.
    from: usize,
    up_to: usize,
    more: f64,
    /// The rows beside a neighbour that is not quiet, and what is normal beside the quiet one by class median.
    rows: Vec<usize>,
    normal: f64,
}

fn neighbour(facts: &Facts<'_>) -> Verdict {
    let least = NEIGHBOUR_COMMANDS.value as usize;
    let busy: Vec<(u32, &InFlight)> =
        facts.namespaces.iter().filter(|(_, n)| n.len() >= least).map(|(&nsid, n)| (nsid, n)).collect();
    if busy.len() < 2 {
        return Verdict::RuledOut(format!(
            "{} has commands in the target's run",
            if busy.len() == 1 { "one namespace" } else { "no namespace" }
        ));
    }
    let mut told: Option<(u32, u32, f64, f64)> = None;
    let mut found: Vec<Beside> = Vec::new();
    for &(victim, _) in &busy {
        let rows: Vec<usize> = (0..facts.rows.len()).filter(|&n| facts.rows[n].nsid == victim).collect();
        if rows.len() < 4 * least {
            continue;
        }
        for &(other, load) in busy.iter().filter(|(n, _)| *n != victim) {
            if let Some(beside) = beside(facts, victim, &rows, other, load) {
                let better = told.as_ref().is_none_or(|t| beside.slower > t.2);
                if better {
                    told = Some((victim, other, beside.slower, beside.more));
                }
                if beside.slower >= NEIGHBOUR_SLOWER.value && beside.more >= NEIGHBOUR_MORE.value {
                    found.push(beside);
                }
            }
        }
    }
    let Some(worst) = found.iter().max_by(|a, b| a.slower.total_cmp(&b.slower)) else {
        return Verdict::RuledOut(match told {
            Some((victim, other, slower, more)) => format!(
                "storage of namespace {victim} takes {}x as long while namespace {other} has much in flight, which then completes {}x as much",
                number(slower),
                number(more)
            ),
            None => format!(
                "{} namespaces have commands, none of them much at some times and little at others",
                busy.len()
            ),
        });
    };
    let mut claim = vec![0i64; facts.rows.len()];
    for beside in &found {
        for &n in &beside.rows {
            let row = &facts.rows[n];
            let normal = beside.normal * facts.class(row).stage_medians[Stage::Storage as usize] as f64;
            claim[n] = claim[n].max((row.stage(Stage::Storage) as f64 - normal) as i64);
        }
    }
    Verdict::Holds(Found {
        stage: Stage::Storage,
        subject: Some(format!("namespace {}", worst.other)),
        claim: Claim::Excess(claim),
        evidence: vec![
            Evidence::said(format!(
                "storage of namespace {} takes {} on average while namespace {} has {} or more commands in flight, and {} while it has {} or fewer: {}x",
                worst.victim,
                time(worst.busy),
                worst.other,
                worst.from,
                time(worst.quiet),
                worst.up_to,
                number(worst.slower)
            ))
            .of(None, "storage", &format!("namespace {}", worst.victim))
            .figures(worst.busy, Some(worst.quiet), "ns"),
            Evidence::said(format!(
                "namespace {} completes {}x as much then as at other times",
                worst.other,
                number(worst.more)
            ))
            .of(Some(Side::Target), "storage", &format!("namespace {}", worst.other))
            .figures(worst.more, Some(1.0), "x"),
        ],
        not_refuted: vec![
            "were the drive itself slow at those times, the neighbour would complete less, not more".into(),
        ],
    })
}

fn beside(facts: &Facts<'_>, victim: u32, rows: &[usize], other: u32, load: &InFlight) -> Option<Beside> {
    let least = NEIGHBOUR_COMMANDS.value as usize;
    let mut loads: Vec<(usize, usize)> = rows.iter().map(|&n| (load.at(facts.rows[n].submit), n)).collect();
    loads.sort_unstable();
    let quarter = loads.len() / 4;
    let (up_to, from) = (loads[quarter].0, loads[loads.len() - 1 - quarter].0);
    // Much and little have to be apart, or there are no two times to compare.
    if from < 2 * up_to.max(1) || from < up_to + 2 {
        // A neighbour that is quiet, or busy, most of the time.
        let (low, high) = (loads.first()?.0, loads.last()?.0);
        if high < 2 * low.max(1) || high < low + 4 {
            return None;
        }
        let cut = (low + high) / 2;
        let over = loads.len() - loads.partition_point(|l| l.0 < cut);
        if over < least || loads.len() - over < least {
            return None;
        }
        return compare(facts, (victim, other), &loads, load, (cut.saturating_sub(1), cut));
    }
    compare(facts, (victim, other), &loads, load, (up_to, from))
}

fn compare(
    facts: &Facts<'_>,
    (victim, other): (u32, u32),
    loads: &[(usize, usize)],
    load: &InFlight,
    (up_to, from): (usize, usize),
) -> Option<Beside> {
    let least = NEIGHBOUR_COMMANDS.value as usize;
    let quiet = &loads[..loads.partition_point(|l| l.0 <= up_to)];
    let busy = &loads[loads.partition_point(|l| l.0 < from)..];
    // What is in between waits for the neighbour too, only less.
    let beside = &loads[quiet.len()..];
    if quiet.len() < least || busy.len() < least {
        return None;
    }
    let slow = |part: &[(usize, usize)]| mean(part.iter().map(|l| slowness(facts, &facts.rows[l.1])));
    let took =
        |part: &[(usize, usize)]| mean(part.iter().map(|l| facts.rows[l.1].stage(Stage::Storage) as f64));
    // What the neighbour completes around a command of this one's.
    let around = |part: &[(usize, usize)]| {
        mean(part.iter().map(|l| {
            let row = &facts.rows[l.1];
            // A few service times: less than a burst of the neighbour's lasts.
            let floor = facts.class(row).stage_floor[Stage::Storage as usize];
            let around = floor.saturating_mul(4).clamp(AROUND.0, AROUND.1);
            load.over_in(row.submit - around, row.submit + around) as f64
        }))
    };
    let normal = slow(quiet)?;
    Some(Beside {
        victim,
        other,
        slower: slow(busy)? / normal.max(1e-9),
        busy: took(busy)?,
        quiet: took(quiet)?,
        from,
        up_to,
        more: around(busy)? / around(quiet)?.max(0.1),
        rows: beside.iter().map(|l| l.1).collect(),
        normal,
    })
}

/// Either way, for how much a neighbour completes at a time: from and to, ns.
const AROUND: (i64, i64) = (100_000, 5_000_000);
