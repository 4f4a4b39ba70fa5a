//! The target's software: reactors and buffers.

use super::super::Evidence;
use super::super::cause::Cause;
use super::super::facts::{Facts, over};
use super::fabric::{elsewhere, per_second};
use super::{Claim, Found, LEAST, NOT_THERE, Rule, Threshold, Verdict, WAITS_AS_LONG, number, percent};
use crate::model::SubStage;
use run_format::{Kind, Side, Stage};

/// Where commands wait for a target that has no time: in its socket, then in its driver.
const TARGET: &[SubStage] = &[
    SubStage::NetworkOut,
    SubStage::TargetDriverIn,
    SubStage::TargetDriverComplete,
    SubStage::TargetDriverSend,
];
const DRIVER: &[SubStage] =
    &[SubStage::TargetDriverIn, SubStage::TargetDriverComplete, SubStage::TargetDriverSend];

const BUSY: Threshold = Threshold {
    name: "reactor busy",
    value: 0.90,
    unit: "of its time",
    why: "a queue in front of a single server is nine deep at 90 %, and a reactor that always has work still looks in vain after its other pollers",
};

const DRIVER_SHARE: Threshold = Threshold {
    name: "or the target's driver",
    value: 0.25,
    unit: "of latency",
    why: "a reactor that is full from beginning to end leaves no command without a wait to compare with; a driver that keeps up takes a few per cent",
};

pub(super) const REACTOR: Rule = Rule {
    cause: Cause::ReactorSaturated,
    shows: "a reactor is busy all of its time (its pollers always find something), and commands wait before and in the target's driver",
    refutes: "every reactor has idle time, or commands wait little there",
    thresholds: &[&BUSY, &WAITS_AS_LONG, &DRIVER_SHARE, &LEAST, &NOT_THERE],
    mitigation: "give the target more cores (spdk_tgt -m) and spread queues over them (more I/O queues from the host, more listeners), and move bdevs with much work (crypto, compression, RAID) to other threads",
    trade_off: "each reactor takes a whole core at 100 %, idle or not",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'target_driver.p99<=50us'",
    yields_to: &[Cause::BufferPool],
    judge: reactor,
};

/// What a target of the kernel's says of SPDK's matters.
fn is_kernel(facts: &Facts<'_>) -> bool {
    facts.joined.target.manifest.kind == Kind::Kernel
}

fn reactor(facts: &Facts<'_>) -> Verdict {
    if is_kernel(facts) {
        return Verdict::RuledOut("the target is the kernel's and has no reactors".into());
    }
    let (all, tail) = facts.excess_in(TARGET);
    let mut most: Option<(f64, String, (i64, i64))> = None;
    for busy in facts.timeline.lines(Side::Target, "reactors", "busy") {
        let Some(idle) = facts.timeline.line(Side::Target, "reactors", "idle", &busy.object) else {
            continue;
        };
        let sleeps = facts.timeline.line(Side::Target, "reactors", "in_interrupt", &busy.object);
        if sleeps.and_then(|l| l.most()).is_some_and(|v| v > 0.5) {
            continue;
        }
        let (Some(b), Some(i)) = (busy.grown(), idle.grown()) else { continue };
        let span = (busy.spans.first().map_or(0, |s| s.from), busy.spans.last().map_or(0, |s| s.to));
        let share = if b + i > 0.0 { b / (b + i) } else { 0.0 };
        if most.as_ref().is_none_or(|m| share > m.0) {
            most = Some((share, busy.object.clone(), span));
        }
    }
    let Some((share, object, span)) = most else {
        if all.max(tail) < NOT_THERE.value {
            return Verdict::RuledOut(elsewhere("way into and through the target", all, tail));
        }
        return Verdict::CannotTell(format!(
            "the target's run has no reactors telemetry of this time (its RPC socket, a recording of 2 s at least), and the way into and through the target has {} of the excess",
            percent(all.max(tail))
        ));
    };
    if share < BUSY.value {
        return Verdict::RuledOut(format!(
            "the busiest reactor ({object}) was busy {} of its time",
            percent(share)
        ));
    }
    if all.max(tail) < NOT_THERE.value {
        return Verdict::RuledOut(format!(
            "{object} was busy {} of its time, but {}",
            percent(share),
            elsewhere("way into and through the target", all, tail)
        ));
    }
    let slower = facts.beyond_floor(TARGET);
    let driver = facts.share_of(DRIVER);
    if slower < WAITS_AS_LONG.value && driver < DRIVER_SHARE.value {
        return Verdict::RuledOut(format!(
            "{object} was busy {} of its time and keeps up: the way into and through the target takes {}x what it takes at best, and its driver has {} of the latency",
            percent(share),
            number(slower),
            percent(driver)
        ));
    }
    let claim = facts.rows.iter().map(|row| over(row, facts.class(row), TARGET)).collect();
    Verdict::Holds(Found {
        stage: Stage::TargetDriver,
        subject: Some(object.clone()),
        claim: Claim::Excess(claim),
        evidence: vec![
            Evidence::said(format!("the reactor on {object} was busy {} of its time", percent(share)))
                .of(Some(Side::Target), "reactors.busy", &object)
                .between(span)
                .figures(share, Some(0.5), "of the time"),
            Evidence::said(format!(
                "waiting to be read by the target and its driver have {} of the excess of all commands and {} of the slowest's",
                percent(all),
                percent(tail)
            ))
            .of(None, "target_driver", "")
            .figures(all.max(tail), Some(NOT_THERE.value), "of the excess"),
        ],
        not_refuted: vec!["with idle time, the wait would not be for the reactor".into()],
    })
}

const WAITS: Threshold = Threshold {
    name: "waits for a buffer",
    value: 0.001,
    unit: "of the commands",
    why: "one wait in a thousand commands is what p99.9 sees",
};

pub(super) const BUFFERS: Rule = Rule {
    cause: Cause::BufferPool,
    shows: "the target counts commands that waited for a buffer, and commands wait before they are submitted to storage",
    refutes: "nothing waited for a buffer, or commands wait little before storage",
    thresholds: &[&WAITS, &LEAST, &NOT_THERE],
    mitigation: "enlarge the pools (iobuf_set_options --small-pool-count, --large-pool-count; nvmf_create_transport -n, -b; bdev_set_options -p) and give the target the hugepages for it",
    trade_off: "hugepages that are pinned whether or not they are used",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'target_driver.p99<=50us'",
    yields_to: &[],
    judge: buffers,
};

fn buffers(facts: &Facts<'_>) -> Verdict {
    if is_kernel(facts) {
        return Verdict::RuledOut("the target is the kernel's, which has no buffer pool".into());
    }
    const IN: &[SubStage] = &[SubStage::TargetDriverIn];
    let (all, tail) = facts.excess_in(IN);
    let lines: Vec<_> = ["buffer_waits", "transport_pending_buffers", "pending_bdev_io"]
        .into_iter()
        .flat_map(|metric| facts.timeline.lines(Side::Target, "spdk", metric))
        .collect();
    if lines.is_empty() {
        if all.max(tail) < NOT_THERE.value {
            return Verdict::RuledOut(elsewhere("target's way to storage", all, tail));
        }
        return Verdict::CannotTell(format!(
            "the target's run has no spdk telemetry of this time (sampled every 5 s: record 10 s at least), and its way to storage has {} of the excess",
            percent(all.max(tail))
        ));
    }
    let Some(most) =
        lines.iter().max_by(|a, b| a.grown().unwrap_or(0.0).total_cmp(&b.grown().unwrap_or(0.0)))
    else {
        return Verdict::RuledOut("nothing waited for a buffer".into());
    };
    let grown = most.grown().unwrap_or(0.0);
    let commands = facts.rows.len() as f64 * f64::from(facts.one_in);
    if grown < (WAITS.value * commands).max(3.0) {
        return Verdict::RuledOut(format!(
            "{} waits for a buffer were counted beside {} commands",
            number(lines.iter().filter_map(|l| l.grown()).sum()),
            number(commands)
        ));
    }
    if all.max(tail) < NOT_THERE.value {
        return Verdict::RuledOut(format!(
            "{} waits for a buffer were counted, but {}",
            number(grown),
            elsewhere("target's way to storage", all, tail)
        ));
    }
    let claim = facts.rows.iter().map(|row| over(row, facts.class(row), IN)).collect();
    let span = (most.spans.first().map_or(0, |s| s.from), most.spans.last().map_or(0, |s| s.to));
    let (driver, _) = facts.excess_in(DRIVER);
    Verdict::Holds(Found {
        stage: Stage::TargetDriver,
        subject: Some(most.object.clone()),
        claim: Claim::Excess(claim),
        evidence: vec![
            Evidence::said(format!(
                "{} of {} grew by {} ({})",
                most.metric,
                if most.object.is_empty() { "the target" } else { most.object.as_str() },
                number(grown),
                per_second(grown, facts.seconds)
            ))
            .of(Some(Side::Target), &format!("spdk.{}", most.metric), &most.object)
            .between(span)
            .figures(grown, Some(0.0), "waits"),
            Evidence::said(format!(
                "the way from t_recv to t_submit has {} of the excess of all commands and {} of the slowest's; the target's driver {} altogether",
                percent(all),
                percent(tail),
                percent(driver)
            ))
            .of(None, "target_driver_in", "")
            .figures(all.max(tail), Some(NOT_THERE.value), "of the excess"),
        ],
        not_refuted: vec!["a saturated reactor would make completions slow as well as submissions".into()],
    })
}
