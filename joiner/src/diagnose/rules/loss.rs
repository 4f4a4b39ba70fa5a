//! Lost packets of TCP, tied to the very commands that were in flight.

use super::super::cause::Cause;
use super::super::facts::{Facts, Row, sides};
use super::super::figures::{Times, mean};
use super::super::flight::{OnWire, network_median, stalls};
use super::super::{Evidence, Stall};
use super::fabric::{NETWORK, elsewhere, merged, plural};
use super::{Claim, Found, LEAST, NOT_THERE, Rule, Threshold, Verdict, lacking, number, percent};
use crate::table::{count, time};
use crate::timeline::is_of_queue;
use run_format::{Side, Stage};
use std::collections::BTreeMap;

const RETRANSMISSIONS: Threshold = Threshold {
    name: "segments lost",
    value: 3.0,
    unit: "segments sent again that the receiver did not have already (DSACK)",
    why: "one or two happen on any network; a receiver whose CPU was away acknowledges late, and the probe or timeout that came before is a resend of what was not lost",
};
const TIED: Threshold = Threshold {
    name: "the slowest command in flight then",
    value: 1.5,
    unit: "x the slowest in flight at other moments, by their classes' medians of the network; 3 x the median where there are none",
    why: "what is behind a lost segment waits a round trip longer at the least; a retransmission that delayed nothing finds commands as any other moment does",
};

pub(super) const LOSS: Rule = Rule {
    cause: Cause::FabricLoss,
    shows: "segments were sent again on a queue's connection, and the very commands in flight there then were slow in the network",
    refutes: "no segment was sent again on any queue's connection, the receiver had those that were (it acknowledges duplicates), or the commands in flight then were as fast as those at other moments",
    thresholds: &[&RETRANSMISSIONS, &TIED, &LEAST],
    mitigation: "find where segments are dropped (switch port counters, cables and optics, NIC ring sizes: ethtool -S, ethtool -g) and end it there; until then lower the load on that link or spread it over another path",
    trade_off: "larger NIC rings and switch buffers trade loss for queueing delay; flow control (pause, PFC) trades it for blocking others",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'network.p99<=1ms'",
    yields_to: &[],
    judge: loss,
};

fn loss(facts: &Facts<'_>) -> Verdict {
    if !facts.has_tcp() {
        return Verdict::RuledOut(
            "no queue goes over TCP; lost packets of RDMA are congestion's to tell".into(),
        );
    }
    let (stalls, needless): (Vec<Stall>, Vec<Stall>) =
        stalls(facts).into_iter().partition(|stall| stall.needed() >= 0.5);
    let segments: f64 = stalls.iter().map(Stall::needed).sum();
    let already: f64 = stalls.iter().chain(&needless).filter_map(|s| s.needless).sum();
    let seen = sides().into_iter().filter(|&side| sees_connections(facts, side)).count();
    let (all, tail) = facts.excess_in(NETWORK);
    if segments < RETRANSMISSIONS.value {
        if already >= 0.5 {
            return Verdict::RuledOut(format!(
                "{} segments were sent again, but the receiver had {} of them already (DSACK): its acknowledgements were late, and nothing was lost",
                number(segments + already),
                number(already)
            ));
        }
        if seen == 2 {
            return Verdict::RuledOut(format!(
                "{} of the queues' connections, watched on both sides, {} sent again",
                plural(facts.queues.len(), "connection"),
                if segments > 0.0 {
                    format!("only {} segments were", number(segments))
                } else {
                    "no segment was".into()
                }
            ));
        }
        if all.max(tail) < NOT_THERE.value {
            return Verdict::RuledOut(elsewhere("network", all, tail));
        }
        let long = facts.rows.iter().filter(|row| row.stage(Stage::Network) >= RTO_NS).count();
        let hint = if long > 0 {
            format!(
                "; {} commands were in the network for 200 ms or longer, as after a retransmission timeout",
                count(long as u64)
            )
        } else {
            String::new()
        };
        return Verdict::CannotTell(format!(
            "the network has {} of the excess, and {}{hint}",
            percent(all.max(tail)),
            lacking(facts, "tcp")
        ));
    }
    let mut claim = vec![0i64; facts.rows.len()];
    let mut by_queue: BTreeMap<usize, f64> = BTreeMap::new();
    for stall in &stalls {
        *by_queue.entry(stall.place).or_default() += stall.needed();
        for &n in &stall.rows {
            let row = &facts.rows[n];
            claim[n] = claim[n].max((row.stage(Stage::Network) - network_median(facts, row)).max(1));
        }
    }
    let Some(slowest) = Slowest::of(facts, &stalls) else {
        return Verdict::RuledOut(format!(
            "{} segments were sent again, and no command was in flight on those queues then",
            number(segments)
        ));
    };
    let slower = slowest.ratio();
    if slower < slowest.limit() {
        return Verdict::RuledOut(format!(
            "{} segments were sent again, but the slowest command in flight on the queue then took {}x {}",
            number(segments),
            number(slower),
            slowest.normal()
        ));
    }
    let worst = by_queue.iter().max_by(|a, b| a.1.total_cmp(b.1)).map(|(&place, _)| place).unwrap_or(0);
    Verdict::Holds(Found {
        stage: Stage::Network,
        subject: facts.queues.get(worst).map(|q| q.name.clone()),
        evidence: loss_evidence(facts, &stalls, &claim, &slowest, (segments, already)),
        not_refuted: vec![format!(
            "had the retransmissions been needless, the slowest command in flight would have been as fast as at other moments; it took {}x {}",
            number(slower),
            slowest.normal()
        )],
        claim: Claim::Excess(claim),
    })
}

/// How slow the slowest command in flight on a queue was: while segments were sent again, and at other moments.
#[derive(Debug)]
struct Slowest {
    then: f64,
    /// None where retransmissions leave no other moments.
    otherwise: Option<f64>,
}

impl Slowest {
    /// Moments of each queue that are looked at besides.
    const MOMENTS: usize = 200;
    /// So many are needed to compare with.
    const FEWEST: usize = 20;

    /// The means; `None` where no command was in flight during any retransmission.
    fn of(facts: &Facts<'_>, stalls: &[Stall]) -> Option<Slowest> {
        let (mut then, mut otherwise) = (Vec::new(), Vec::new());
        let places: std::collections::BTreeSet<usize> = stalls.iter().map(|stall| stall.place).collect();
        for place in places {
            let wire = OnWire::of(facts, place);
            let slowest = |(from, to): (i64, i64)| {
                let of = |n: usize| {
                    let row = &facts.rows[n];
                    row.stage(Stage::Network) as f64 / network_median(facts, row) as f64
                };
                wire.between(from, to).map(of).max_by(f64::total_cmp)
            };
            let mut held_up = Vec::new();
            let mut length = 0;
            for stall in stalls.iter().filter(|stall| stall.place == place) {
                let stretch = (stall.from_ns, stall.to_ns);
                length = length.max(stretch.1 - stretch.0);
                then.extend(slowest(stretch));
                let rows = stall.rows.iter().map(|&n| &facts.rows[n]);
                let (from, to) = rows.fold(stretch, |(from, to), row| (from.min(row.sent), to.max(row.recv)));
                held_up.push((from, to.saturating_add(1)));
            }
            // Moments as long as the longest of them, from one end of the queue's time to the other.
            let held_up = merged(held_up);
            let (first, last) = wire.span();
            let step = ((last - first) / Slowest::MOMENTS as i64).max(length).max(1);
            let mut at = first;
            while at.saturating_add(length) <= last {
                let next = held_up.partition_point(|stretch| stretch.1 <= at);
                if held_up.get(next).is_none_or(|stretch| stretch.0 > at + length) {
                    otherwise.extend(slowest((at, at + length)));
                }
                at += step;
            }
        }
        let enough = otherwise.len() >= Slowest::FEWEST;
        let otherwise = if enough { mean(otherwise.into_iter()) } else { None };
        Some(Slowest { then: mean(then.into_iter())?, otherwise })
    }

    fn ratio(&self) -> f64 {
        self.then / self.otherwise.unwrap_or(1.0).max(1e-9)
    }

    fn limit(&self) -> f64 {
        if self.otherwise.is_some() { TIED.value } else { 2.0 * TIED.value }
    }

    fn normal(&self) -> &'static str {
        if self.otherwise.is_some() { "the slowest at other moments" } else { "the network's median" }
    }
}

/// Linux's least retransmission timeout (`include/net/tcp.h`, TCP_RTO_MIN).
const RTO_NS: i64 = 200_000_000;

fn loss_evidence(
    facts: &Facts<'_>,
    stalls: &[Stall],
    claim: &[i64],
    slowest: &Slowest,
    (segments, already): (f64, f64),
) -> Vec<Evidence> {
    let touched: Vec<&Row> =
        facts.rows.iter().zip(claim).filter(|(_, c)| **c > 0).map(|(row, _)| row).collect();
    let times = Times::of(touched.iter().map(|row| row.stage(Stage::Network)));
    let normal = Times::of(touched.iter().map(|row| network_median(facts, row)));
    let exact = stalls.iter().filter(|s| s.from_ns == s.to_ns).count();
    let span = (stalls.first().map_or(0, |s| s.from_ns), stalls.iter().map(|s| s.to_ns).max().unwrap_or(0));
    let mut sides: BTreeMap<&str, f64> = BTreeMap::new();
    for stall in stalls {
        *sides.entry(if stall.side == Side::Host { "host" } else { "target" }).or_default() += stall.needed();
    }
    let by: Vec<String> = sides.iter().map(|(side, n)| format!("{} by the {side}", number(*n))).collect();
    let queues: std::collections::BTreeSet<usize> = stalls.iter().map(|s| s.place).collect();
    let first = stalls.first();
    let mut evidence = vec![
        Evidence::said(format!(
            "{} segments were lost and sent again on {} ({}){}{}",
            number(segments),
            plural(queues.len(), "queue"),
            by.join(", "),
            if exact == stalls.len() { ", each seen as it happened" } else { "" },
            if already >= 0.5 {
                format!("; {} more were sent again needlessly", number(already))
            } else {
                String::new()
            }
        ))
        .of(first.map(|s| s.side), "tcp.retransmitted", first.map_or("", |s| s.connection.as_str()))
        .between(span)
        .figures(segments, Some(0.0), "segments"),
        Evidence::said(format!(
            "the {} commands in flight on those queues then were in the network for {} in the median, {} is normal for them; the slowest each time took {}x {}",
            count(times.len() as u64),
            time(times.median() as f64),
            time(normal.median() as f64),
            number(slowest.ratio()),
            slowest.normal()
        ))
        .of(None, "network", "")
        .figures(times.median() as f64, Some(normal.median() as f64), "ns"),
    ];
    let slow = |row: &&Row| row.latency > facts.class(row).tail;
    let (tied, all) = (touched.iter().copied().filter(slow).count(), facts.rows.iter().filter(slow).count());
    evidence.push(Evidence::said(format!(
        "{} of the {} slowest commands were in flight during a retransmission",
        count(tied as u64),
        count(all as u64)
    )));
    evidence
}

/// Whether a side's connections were watched, in whatever way.
fn sees_connections(facts: &Facts<'_>, side: Side) -> bool {
    let every = facts.queues.iter().filter(|q| !q.rows.is_empty()).all(|queue| {
        let of_side = if side == Side::Host { &queue.host } else { &queue.target };
        let known = if of_side.host.is_some() { of_side } else { &queue.host };
        facts.timeline.lines(side, "tcp", "retransmitted").any(|l| is_of_queue(&l.object, side, known))
    });
    facts.timeline.watched(side) || every
}
