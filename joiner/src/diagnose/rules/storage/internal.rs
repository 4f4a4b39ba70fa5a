//! The drive's own work: two speeds.

use super::super::super::Evidence;
use super::super::super::cause::Cause;
use super::super::super::facts::{Facts, Row};
use super::super::super::figures::{Modes, Times, mean, modes};
use super::super::fabric::merged;
use super::super::waits::Waits;
use super::super::{Claim, Found, LEAST, Rule, Threshold, Verdict, number, percent};
use super::slowness;
use crate::table::{count, time};
use run_format::{Side, Stage};

const SLOW_LEAST: Threshold = Threshold {
    name: "slow commands at least",
    value: 0.003,
    unit: "of all",
    why: "fewer are strays: a retry, a flush",
};
const SLOW_MOST: Threshold = Threshold {
    name: "slow commands at most",
    value: 0.45,
    unit: "of all",
    why: "where half is slow, slow is what is normal",
};
const APART: Threshold = Threshold {
    name: "slow by fast",
    value: 4.0,
    unit: "x in the median",
    why: "service times of one speed spread over a factor of two or three",
};
const BETWEEN: Threshold = Threshold {
    name: "commands between the two speeds",
    value: 0.35,
    unit: "of the slow ones",
    why: "one speed with a long tail has many in between; two speeds have a gap",
};

const ELSEWHERE: Threshold = Threshold {
    name: "commands held up as long outside storage",
    value: 0.5,
    unit: "of those slow in storage",
    why: "a machine whose CPUs are taken away is slow in every stage; a drive is slow in its own",
};
const NO_CPU: Threshold = Threshold {
    name: "the target's threads waited for a CPU",
    value: 0.5,
    unit: "of what the slow commands take longer",
    why: "a thread that has no CPU is late to see that storage is done; that is no speed of the drive's",
};
const SLOW_COMMANDS: Threshold = Threshold {
    name: "slow commands",
    value: 20.0,
    unit: "commands",
    why: "fewer do not make a speed of their own",
};

pub(in super::super) const INTERNAL: Rule = Rule {
    cause: Cause::DriveInternal,
    shows: "storage has two speeds with a gap between them, for the same commands, whatever is in storage and whatever other namespaces do: the drive works for itself (garbage collection, wear levelling, refresh)",
    refutes: "storage has one speed, the slow ones are explained by what was before them or by a neighbour, as many commands are held up as long in other stages, or the target's threads waited for a CPU instead",
    thresholds: &[&SLOW_LEAST, &SLOW_MOST, &SLOW_COMMANDS, &APART, &BETWEEN, &ELSEWHERE, &NO_CPU, &LEAST],
    mitigation: "give the drive more room (TRIM: fstrim, blkdiscard; overprovision), keep writes and latency-critical reads on different drives or NVM sets, or use a drive with a steadier class",
    trade_off: "overprovisioned space can not be used; TRIM itself takes the drive's time",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'storage.p999<=1ms'",
    yields_to: &[Cause::DriveThrottled, Cause::NoisyNeighbour, Cause::DriveSaturated, Cause::IopsLimit],
    judge: internal,
};

fn internal(facts: &Facts<'_>) -> Verdict {
    let mut values: Vec<f64> = facts.rows.iter().map(|row| slowness(facts, row)).collect();
    let Some(found) = modes(&mut values, SLOW_LEAST.value, SLOW_MOST.value) else {
        return Verdict::RuledOut("storage has one speed".into());
    };
    let slow = found.slow * facts.rows.len() as f64;
    if slow < SLOW_COMMANDS.value {
        return Verdict::RuledOut(format!(
            "{} commands are slow in storage, too few for a speed of its own",
            number(slow.round())
        ));
    }
    if found.apart < APART.value || found.between > BETWEEN.value {
        return Verdict::RuledOut(format!(
            "storage has one speed: its slowest {} take {}x the median of the rest, and {} as many lie in between",
            percent(found.slow),
            number(found.apart),
            percent(found.between)
        ));
    }
    let is_slow = |row: &Row| slowness(facts, row) >= found.cut;
    let before = |slow: bool| {
        let rows = facts.rows.iter().filter(|row| is_slow(row) == slow);
        mean(rows.map(|row| facts.storage.at(row.submit) as f64 + 1.0)).unwrap_or(1.0)
    };
    let (with_slow, with_fast) = (before(true), before(false));
    let queueing = with_slow / with_fast.max(1e-9);
    if found.apart < 2.0 * queueing {
        return Verdict::RuledOut(format!(
            "the slow commands ({}) take {}x as long, and {}x as many were in storage before them",
            percent(found.slow),
            number(found.apart),
            number(queueing)
        ));
    }
    let held_up = held_up_elsewhere(facts, &is_slow);
    if held_up >= ELSEWHERE.value * found.slow {
        return Verdict::RuledOut(format!(
            "{} of the commands are slow in storage, but {} are held up about as long elsewhere too: the machine was away, not the drive",
            percent(found.slow),
            percent(held_up)
        ));
    }
    let claim: Vec<i64> = facts
        .rows
        .iter()
        .map(|row| match is_slow(row) {
            true => {
                let class = facts.class(row);
                (row.stage(Stage::Storage) - class.stage_medians[Stage::Storage as usize]).max(0)
            }
            false => 0,
        })
        .collect();
    let sum = |of: &[i64]| of.iter().map(|&ns| ns as f64).sum::<f64>();
    let waited = sum(&Waits::of_threads(facts, Side::Target).bound(facts, &claim));
    if waited >= NO_CPU.value * sum(&claim) {
        return Verdict::RuledOut(format!(
            "{} of the commands are slow in storage, but the target's threads waited for a CPU for {} of that: the machine was away, not the drive",
            percent(found.slow),
            percent(waited / sum(&claim).max(1.0))
        ));
    }
    let slow = Times::of(facts.rows.iter().filter(|row| is_slow(row)).map(|row| row.stage(Stage::Storage)));
    let fast = Times::of(facts.rows.iter().filter(|row| !is_slow(row)).map(|row| row.stage(Stage::Storage)));
    let mut evidence = vec![
        Evidence::said(format!(
            "storage has two speeds: {} of the commands ({}) take {} in the median, the others {}, and only {} as many as the slow lie in between",
            percent(found.slow),
            count(slow.len() as u64),
            time(slow.median() as f64),
            time(fast.median() as f64),
            percent(found.between)
        ))
        .of(None, "storage", "")
        .figures(slow.median() as f64, Some(fast.median() as f64), "ns"),
        Evidence::said(format!(
            "{}x as many commands were in storage before the slow ones, which take {}x as long: it is not their number",
            number(queueing),
            number(found.apart)
        ))
        .figures(queueing, Some(found.apart), "x"),
    ];
    if let Some(episodes) = episodes(facts, &found) {
        evidence.push(episodes);
    }
    Verdict::Holds(Found {
        stage: Stage::Storage,
        subject: None,
        claim: Claim::Excess(claim),
        evidence,
        not_refuted: vec![
            "had other commands been in the way, more of them would have been in storage before the slow ones".into(),
        ],
    })
}

/// The share of commands that are held up outside storage by half of what the slow ones are in it.
fn held_up_elsewhere(facts: &Facts<'_>, is_slow: &dyn Fn(&Row) -> bool) -> f64 {
    let of = |row: &Row| row.stage(Stage::Storage) - facts.class(row).stage_medians[Stage::Storage as usize];
    let slow = Times::of(facts.rows.iter().filter(|row| is_slow(row)).map(of));
    const OTHERS: [Stage; 4] = [Stage::HostBlock, Stage::HostDriver, Stage::Network, Stage::TargetDriver];
    let is_held = |row: &&Row| {
        OTHERS.into_iter().any(|stage| {
            row.stage(stage) - facts.class(row).stage_medians[stage as usize] >= slow.median() / 2
        })
    };
    facts.rows.iter().filter(is_held).count() as f64 / facts.rows.len().max(1) as f64
}

/// Whether slow commands come together, and how often.
fn episodes(facts: &Facts<'_>, found: &Modes) -> Option<Evidence> {
    let mut slow: Vec<(i64, i64)> = facts
        .rows
        .iter()
        .filter(|row| slowness(facts, row) >= found.cut)
        .map(|row| (row.submit, row.done))
        .collect();
    slow.sort_unstable();
    let commands = slow.len();
    let episodes = merged(slow);
    if episodes.len() < 2 {
        return None;
    }
    let each = commands as f64 / episodes.len() as f64;
    let lengths = Times::of(episodes.iter().map(|e| e.1 - e.0));
    let gaps = Times::of(episodes.windows(2).map(|pair| pair[1].0 - pair[0].0));
    Some(
        Evidence::said(format!(
            "they come in {} episodes of {} on average, {} commands each; one begins every {}",
            count(episodes.len() as u64),
            time(lengths.mean()),
            number(each),
            time(gaps.median() as f64)
        ))
        .of(None, "storage", "")
        .figures(gaps.median() as f64, None, "ns"),
    )
}
