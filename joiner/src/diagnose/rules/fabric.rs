//! The fabric: congestion, MTUs, and what the rules of the network share.

use super::super::Evidence;
use super::super::cause::Cause;
use super::super::facts::{Facts, Row, over, sides};
use super::super::figures::{Times, mean};
use super::{Claim, Found, LEAST, NOT_THERE, Rule, Threshold, Verdict, lacking, number, percent};
use crate::model::SubStage;
use crate::table::{bytes, time};
use crate::timeline::{Line, is_of_queue};
use run_format::{Side, Stage};

pub(super) const NETWORK: &[SubStage] = &[SubStage::NetworkOut, SubStage::NetworkData, SubStage::NetworkBack];

pub(super) fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

pub(super) fn elsewhere(what: &str, all: f64, tail: f64) -> String {
    format!(
        "the {what} has {} of the excess of all commands and {} of the slowest's: it is elsewhere",
        percent(all),
        percent(tail)
    )
}

const MARKS: Threshold = Threshold {
    name: "marks, CNPs, pauses or lost packets",
    value: 10.0,
    unit: "in the recording",
    why: "a few happen whenever a flow starts",
};
const MARKED: Threshold = Threshold {
    name: "network while marked",
    value: 1.3,
    unit: "x that while not",
    why: "marks without a slower network are congestion control doing its work",
};

pub(super) const CONGESTION: Rule = Rule {
    cause: Cause::FabricCongestion,
    shows: "CNPs, ECN marks, pause frames or, over RDMA, lost packets (out of sequence, sent again) are counted, and the network is slower while they are",
    refutes: "none of them is counted, or the network is no slower while they are",
    thresholds: &[&MARKS, &MARKED, &LEAST, &NOT_THERE],
    mitigation: "find the congested port (switch: ECN marks, PFC and buffer counters; often an incast to the target's port) and give it more: another path, fewer initiators at once, a faster link; on RoCE check that PFC and ECN (DCQCN) are set up for the traffic class on every hop, and where packets are lost all the same, cables and optics",
    trade_off: "pausing less needs marking earlier, which costs some throughput; more paths cost ports",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE",
    yields_to: &[Cause::FabricLoss],
    judge: congestion,
};

/// Whether a counter of a device tells of congestion. RDMA that is not lossless sends lost packets again by itself: mlx5
/// counts `out_of_sequence`, `packet_seq_err` and `local_ack_timeout_err` then, rxe `out_of_seq_request`, `rcvd_seq_err`
/// and `completer_retry_err`.
fn tells_of_congestion(line: &Line) -> bool {
    let name = line.metric.to_ascii_lowercase();
    let any = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    match line.collector.as_str() {
        "rdma" => any(&[
            "cnp",
            "ecn_marked",
            "xmit_wait",
            "out_of_seq",
            "seq_err",
            "ack_timeout",
            "completer_retry",
        ]),
        // Without the settings and storms that some drivers count under such names.
        "ethtool" => any(&["pause", "pfc", "cnp", "ecn"]) && !any(&["duration", "transition", "prio_none"]),
        "netstat" => name == "ecn_ce_received",
        "tcp" => name == "delivered_ce",
        _ => false,
    }
}

fn congestion(facts: &Facts<'_>) -> Verdict {
    const FROM: [&str; 4] = ["rdma", "ethtool", "netstat", "tcp"];
    let lines: Vec<&Line> = sides()
        .into_iter()
        .flat_map(|side| FROM.iter().flat_map(move |c| facts.timeline.of(side, c)))
        .filter(|line| tells_of_congestion(line))
        .collect();
    let (all, tail) = facts.excess_in(NETWORK);
    if lines.is_empty() {
        if all.max(tail) < NOT_THERE.value {
            return Verdict::RuledOut(elsewhere("network", all, tail));
        }
        return Verdict::CannotTell(format!(
            "no counter of marks, CNPs or pause frames was sampled (rdma, ethtool, netstat), and the network has {} of the excess",
            percent(all.max(tail))
        ));
    }
    let grown: f64 = lines.iter().filter_map(|l| l.grown()).sum();
    if grown < MARKS.value {
        return Verdict::RuledOut(format!(
            "{} counters of marks, CNPs and pause frames grew by {} altogether",
            lines.len(),
            number(grown)
        ));
    }
    let Some(most) =
        lines.iter().max_by(|a, b| a.grown().unwrap_or(0.0).total_cmp(&b.grown().unwrap_or(0.0)))
    else {
        return Verdict::CannotTell(lacking(facts, "rdma"));
    };
    let marked: Vec<(i64, i64)> = lines
        .iter()
        .flat_map(|l| l.spans.iter().filter(|s| s.grown() > 0.5).map(|s| (s.from, s.to)))
        .collect();
    let marked = merged(marked);
    let (within, without) = split(facts, &marked, |row| {
        row.stage(Stage::Network) as f64 / facts.class(row).stage_floor[Stage::Network as usize].max(1) as f64
    });
    let Some(in_marks) = mean(within.iter().map(|(_, v)| *v)) else {
        return Verdict::RuledOut(format!(
            "no command was in the network while marks were counted ({})",
            most.metric
        ));
    };
    // What is normal: the time without marks; where there is none, what a command takes with nothing in the way.
    let enough = without.len() * 20 >= facts.rows.len();
    let normal = if enough { mean(without.iter().map(|(_, v)| *v)).unwrap_or(1.0) } else { 1.0 };
    // Without a time to compare with, only a network that is much slower than at its best says anything.
    let needed = if enough || facts.classes.iter().any(|c| c.has_baseline) {
        MARKED.value
    } else {
        2.0 * MARKED.value
    };
    if in_marks < needed * normal {
        return Verdict::RuledOut(format!(
            "{} grew by {}, but the network took {}x what is normal while it did",
            most.metric,
            number(grown),
            number(in_marks / normal)
        ));
    }
    let mut claim = vec![0i64; facts.rows.len()];
    for (n, _) in &within {
        let row = &facts.rows[*n];
        let floor = facts.class(row).stage_floor[Stage::Network as usize] as f64 * normal;
        claim[*n] = row.stage(Stage::Network) - floor as i64;
    }
    let span = (marked.first().map_or(0, |m| m.0), marked.last().map_or(0, |m| m.1));
    let total = most.grown().unwrap_or(0.0);
    Verdict::Holds(Found {
        stage: Stage::Network,
        subject: Some(format!("{} of the {}", most.object, most.side)),
        claim: Claim::Excess(claim),
        evidence: vec![
            Evidence::said(format!(
                "{} of {} on the {} grew by {} ({}); all such counters by {}",
                most.metric,
                if most.object.is_empty() { "its network" } else { most.object.as_str() },
                most.side,
                number(total),
                per_second(total, facts.seconds),
                number(grown)
            ))
            .of(Some(most.side), &format!("{}.{}", most.collector, most.metric), &most.object)
            .between(span)
            .figures(total, Some(0.0), "in the recording"),
            Evidence::said(format!(
                "while they grew, the network took {}x what it takes at its best; {} {}x",
                number(in_marks),
                if enough { "at other times" } else { "normal is" },
                number(normal)
            ))
            .of(None, "network", "")
            .figures(in_marks, Some(normal), "x"),
        ],
        not_refuted: vec![format!(
            "had the marks cost nothing, the network would have been as fast while they grew; it took {}x as long",
            number(in_marks / normal)
        )],
    })
}

pub(super) fn per_second(grown: f64, seconds: f64) -> String {
    format!("{} a second", number(grown / seconds.max(1e-9)))
}

/// Stretches of time in order, those that touch as one.
pub(super) fn merged(mut stretches: Vec<(i64, i64)>) -> Vec<(i64, i64)> {
    stretches.sort_unstable();
    let mut out: Vec<(i64, i64)> = Vec::new();
    for (from, to) in stretches {
        match out.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => out.push((from, to)),
        }
    }
    out
}

/// Places of rows, each with a figure.
pub(super) type Figured = Vec<(usize, f64)>;

/// The rows that were on the wire within the stretches and those that were not, each with a figure.
pub(super) fn split(
    facts: &Facts<'_>,
    stretches: &[(i64, i64)],
    figure: impl Fn(&Row) -> f64,
) -> (Figured, Figured) {
    let is_within = |row: &Row| {
        let next = stretches.partition_point(|s| s.1 <= row.sent);
        stretches.get(next).is_some_and(|s| s.0 < row.recv)
    };
    facts.rows.iter().enumerate().map(|(n, row)| (n, figure(row), is_within(row))).fold(
        (Vec::new(), Vec::new()),
        |(mut yes, mut no), (n, v, within)| {
            if within {
                yes.push((n, v));
            } else {
                no.push((n, v));
            }
            (yes, no)
        },
    )
}

const MTU_SHARE: Threshold = Threshold {
    name: "network's share of large commands",
    value: 0.30,
    unit: "of latency",
    why: "where the network is less of a large command, segments are not what it waits for",
};
const MTU_APART: Threshold = Threshold {
    name: "MTUs apart",
    value: 1.2,
    unit: "x",
    why: "tunnels and VLAN tags take some 100 bytes of an MTU on one side without harm",
};

pub(super) const MTU: Rule = Rule {
    cause: Cause::MtuMismatch,
    shows: "the two ends of a connection, or their interfaces, have different MTUs, and commands of more than one segment are slow in the network",
    refutes: "both ends have the same MTU, or commands of many segments are no slower in the network than small ones",
    thresholds: &[&MTU_APART, &MTU_SHARE, &LEAST],
    mitigation: "give both ends and every switch port between them the same MTU (ip link set DEV mtu 9000; check with ping -M do -s 8972), and leave TSO and GRO on",
    trade_off: "jumbo frames have to hold on the whole path: one port that does not takes large frames for lost",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE",
    yields_to: &[],
    judge: mtu,
};

/// The path's or interface's MTU as each side has it: host, target, and of what.
fn mtus(facts: &Facts<'_>) -> Option<(f64, f64, String)> {
    let mut pairs = Vec::new();
    for queue in facts.queues.iter().filter(|q| !q.rows.is_empty()) {
        let of = |side: Side| {
            let known =
                if side == Side::Target && queue.target.host.is_some() { &queue.target } else { &queue.host };
            facts.timeline.lines(side, "tcp", "pmtu").find(|l| is_of_queue(&l.object, side, known))
        };
        if let (Some(h), Some(t)) = (of(Side::Host), of(Side::Target))
            && let (Some(a), Some(b)) = (h.usual(), t.usual())
        {
            pairs.push((a, b, format!("the connection {}", h.object)));
        }
    }
    let apart = |a: f64, b: f64| a.max(b) / a.min(b).max(1.0);
    if let Some(most) = pairs.into_iter().max_by(|x, y| apart(x.0, x.1).total_cmp(&apart(y.0, y.1))) {
        return Some(most);
    }
    // Interfaces, where each side has only one size besides loopback's.
    let of = |side: Side| {
        let lines = facts.timeline.lines(side, "link", "mtu").filter(|l| l.object != "lo");
        let sizes: Vec<f64> = lines.filter_map(Line::usual).collect();
        let first = *sizes.first()?;
        sizes.iter().all(|s| (s - first).abs() < 0.5).then_some(first)
    };
    Some((of(Side::Host)?, of(Side::Target)?, "the interfaces".into()))
}

fn mtu(facts: &Facts<'_>) -> Verdict {
    let Some((host, target, of)) = mtus(facts) else {
        let (all, tail) = facts.excess_in(NETWORK);
        if all.max(tail) < NOT_THERE.value {
            return Verdict::RuledOut(elsewhere("network", all, tail));
        }
        return Verdict::CannotTell(
            "the MTUs of both sides are not known (telemetry tcp or link), and the network has part of the excess".into(),
        );
    };
    if host.max(target) / host.min(target).max(1.0) < MTU_APART.value {
        return Verdict::RuledOut(format!(
            "{of} has an MTU of {} bytes on the host and {} on the target",
            number(host),
            number(target)
        ));
    }
    let least = host.min(target);
    let is_large = |row: &Row| f64::from(row.bytes) > 2.0 * least;
    let network = |row: &Row| row.stage(Stage::Network);
    let large = Times::of(facts.rows.iter().filter(|r| is_large(r)).map(network));
    let small = Times::of(facts.rows.iter().filter(|r| !is_large(r)).map(network));
    if large.len() < 50 {
        return Verdict::RuledOut(format!(
            "{of} has MTUs of {} and {} bytes, but only {} commands are larger than two of the smaller",
            number(host),
            number(target),
            large.len()
        ));
    }
    let share =
        mean(facts.rows.iter().filter(|r| is_large(r)).map(|r| network(r) as f64 / r.latency.max(1) as f64));
    let share = share.unwrap_or(0.0);
    let alike = small.len() >= 50 && large.median() < 2 * small.median();
    if share < MTU_SHARE.value || alike {
        return Verdict::RuledOut(format!(
            "{of} has MTUs of {} and {} bytes, but commands of many segments spend {} of their time in the network ({}, small ones {})",
            number(host),
            number(target),
            percent(share),
            time(large.median() as f64),
            if small.len() < 50 { "are too few".into() } else { time(small.median() as f64) }
        ));
    }
    // What small commands take, in as far as there are any, is the network without segments.
    let normal = if small.len() >= 50 { small.median() } else { 0 };
    let claim = facts
        .rows
        .iter()
        .map(|row| match is_large(row) {
            true if normal > 0 => (network(row) - normal).max(0),
            true => over(row, facts.class(row), NETWORK),
            false => 0,
        })
        .collect();
    let sizes: std::collections::BTreeSet<u32> =
        facts.rows.iter().filter(|r| is_large(r)).map(|r| r.bytes).collect();
    let sizes: Vec<String> = sizes.into_iter().take(4).map(bytes).collect();
    Verdict::Holds(Found {
        stage: Stage::Network,
        subject: Some(of.clone()),
        claim: if normal > 0 { Claim::Always(claim) } else { Claim::Excess(claim) },
        evidence: vec![
            Evidence::said(format!(
                "{of} has an MTU of {} bytes on the host and {} on the target",
                number(host),
                number(target)
            ))
            .of(Some(Side::Host), "tcp.pmtu", &of)
            .figures(host.max(target), Some(least), "bytes"),
            Evidence::said(format!(
                "commands of many segments ({}) spend {} of their time in the network: {} in the median{}",
                sizes.join(", "),
                percent(share),
                time(large.median() as f64),
                if normal > 0 { format!(", small ones {}", time(normal as f64)) } else { String::new() }
            ))
            .of(None, "network", "")
            .figures(large.median() as f64, (normal > 0).then_some(normal as f64), "ns"),
        ],
        not_refuted: vec!["commands of one segment do not have the delay".into()],
    })
}
