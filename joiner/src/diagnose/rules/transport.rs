//! The transport: round trips that need not be, and windows that hold data back.

use super::super::Evidence;
use super::super::cause::Cause;
use super::super::facts::{Facts, Row, over};
use super::super::figures::mean;
use super::fabric::{NETWORK, elsewhere};
use super::{Claim, Found, LEAST, NOT_THERE, Rule, Threshold, Verdict, lacking, number, percent};
use crate::model::SubStage;
use crate::table::{bytes, count, time};
use crate::timeline::{Line, is_of_queue};
use run_format::{Boundary, Side, Stage, Transport};
use std::collections::BTreeMap;

/// The wait for R2Ts and their data, whoever it is of.
const R2T_WAIT: &[SubStage] = &[SubStage::NetworkData, SubStage::HostDriverR2t];

const IN_CAPSULE: Threshold = Threshold {
    name: "in-capsule data",
    value: 16_384.0,
    unit: "bytes",
    why: "what the kernel's target takes in a capsule by default (inline_data_size); SPDK's takes 4 KiB by default and more when told to",
};
const PER_R2T: Threshold = Threshold {
    name: "data of each R2T",
    value: 65_536.0,
    unit: "bytes",
    why: "both targets ask for 128 KiB at once or more; half of that says that a limit is set too low",
};
const R2T_SHARE: Threshold = Threshold {
    name: "wait for R2T data",
    value: 0.20,
    unit: "of the writes' latency",
    why: "less is the time that the data takes anyway",
};
const R2T_WRITES: Threshold =
    Threshold { name: "such writes", value: 50.0, unit: "commands", why: "a few are no load" };

pub(super) const R2T: Rule = Rule {
    cause: Cause::R2tRoundTrips,
    shows: "writes small enough for in-capsule data wait for an R2T, or large ones for more R2Ts than their size needs, and that wait is a good part of their latency",
    refutes: "no write has an R2T, those that have one are too large for a capsule and have one each, or the wait is a small part of their latency",
    thresholds: &[&IN_CAPSULE, &PER_R2T, &R2T_SHARE, &R2T_WRITES],
    mitigation: "raise the in-capsule data size of the target (SPDK: nvmf_create_transport -t TCP -c 16384; kernel: param_inline_data_size of the port, before it is enabled) and reconnect; where there are too many R2Ts, raise the target's max_io_size, io_unit_size or MAXH2CDATA",
    trade_off: "in-capsule buffers are held for every command of every queue: 16 KiB times the depth times the queues of memory on the target",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'write:network.p50<=50us'",
    yields_to: &[],
    judge: r2t,
};

/// Whether a write's R2Ts need not be.
fn needless(row: &Row) -> bool {
    let size = f64::from(row.bytes);
    row.r2ts > 0 && (size <= IN_CAPSULE.value || (row.r2ts > 1 && size / f64::from(row.r2ts) < PER_R2T.value))
}

fn r2t(facts: &Facts<'_>) -> Verdict {
    let writes = facts.rows.iter().filter(|row| row.is_write(facts.class(row)));
    let of_tcp = |row: &&Row| facts.queues[row.queue].host.transport == Transport::Tcp;
    let writes: Vec<&Row> = writes.filter(of_tcp).collect();
    if writes.is_empty() {
        return Verdict::RuledOut("there are no writes over TCP".into());
    }
    let asked = writes.iter().filter(|row| row.r2ts > 0).count();
    if asked == 0 {
        return Verdict::RuledOut(format!("none of the {} writes had an R2T", count(writes.len() as u64)));
    }
    let needless: Vec<&Row> = writes.iter().copied().filter(|row| needless(row)).collect();
    if (needless.len() as f64) < R2T_WRITES.value {
        return Verdict::RuledOut(format!(
            "{} of {} writes had R2Ts, and {} of them are small enough for a capsule or had more than their size needs",
            count(asked as u64),
            count(writes.len() as u64),
            count(needless.len() as u64)
        ));
    }
    if !facts.is_measured(Boundary::TR2t) {
        return Verdict::CannotTell(format!(
            "{} writes had R2Ts that need not be, but t_r2t was not measured, so their wait is not known",
            count(needless.len() as u64)
        ));
    }
    let wait = |row: &Row| R2T_WAIT.iter().map(|&p| row.part(p)).sum::<i64>();
    let share = mean(needless.iter().map(|row| wait(row) as f64 / row.latency.max(1) as f64)).unwrap_or(0.0);
    let mean_wait = mean(needless.iter().map(|row| wait(row) as f64)).unwrap_or(0.0);
    if share < R2T_SHARE.value {
        return Verdict::RuledOut(format!(
            "{} writes had R2Ts that need not be, but wait for them {} of their latency ({})",
            count(needless.len() as u64),
            percent(share),
            time(mean_wait)
        ));
    }
    let claim = facts
        .rows
        .iter()
        .map(|row| if self::needless(row) && of_tcp(&row) { wait(row).max(0) } else { 0 })
        .collect();
    let mut sizes: BTreeMap<(u32, u8), usize> = BTreeMap::new();
    needless.iter().for_each(|row| *sizes.entry((row.bytes, row.r2ts)).or_default() += 1);
    let most = sizes.iter().max_by_key(|(_, n)| **n).map_or((0, 0), |(key, _)| *key);
    let in_capsule = writes.iter().filter(|row| row.r2ts == 0).map(|row| row.latency as f64);
    let mut evidence = vec![
        Evidence::said(format!(
            "{} of {} writes had R2Ts that need not be, most of them {} with {} R2T{} each",
            count(needless.len() as u64),
            count(writes.len() as u64),
            bytes(most.0),
            most.1,
            if most.1 == 1 { "" } else { "s" }
        ))
        .figures(needless.len() as f64, Some(0.0), "commands"),
        Evidence::said(format!(
            "they wait {} on average for the R2T and its data, {} of their latency",
            time(mean_wait),
            percent(share)
        ))
        .of(None, "network_data", "")
        .figures(mean_wait, Some(0.0), "ns"),
    ];
    if let Some(without) = mean(in_capsule) {
        evidence.push(Evidence::said(format!("writes without an R2T take {} on average", time(without))));
    }
    Verdict::Holds(Found {
        stage: Stage::Network,
        subject: None,
        claim: Claim::Always(claim),
        evidence,
        not_refuted: vec![format!(
            "had they been too large for a capsule, one R2T each would be needed; they are {} or smaller, or have several",
            bytes(IN_CAPSULE.value as u32)
        )],
    })
}

const LIMITED: Threshold = Threshold {
    name: "time limited by a window",
    value: 0.10,
    unit: "of the time with data to send",
    why: "a burst now and then fills any window; a tenth of the time is a window that is too small",
};
const CWND_FULL: Threshold = Threshold {
    name: "congestion window in use",
    value: 0.90,
    unit: "of the window",
    why: "a flow that the application limits leaves its congestion window unused",
};

const QUEUEING: Threshold = Threshold {
    name: "round trip with a full congestion window",
    value: 2.0,
    unit: "x the least round trip, at most",
    why: "a longer one says that segments wait in the network: a larger window would only make that queue longer",
};

const NETWORK_SLOWER: Threshold = Threshold {
    name: "network",
    value: 1.3,
    unit: "x what it takes when nothing is in the way",
    why: "a window that is met and holds nothing up shows in the counters alone",
};

pub(super) const WINDOW: Rule = Rule {
    cause: Cause::TransportWindow,
    shows: "a connection was limited by the receiver's window, the send buffer or a full congestion window, without loss, and the network is where the excess is",
    refutes: "no connection was limited by a window, or the network has little of the excess",
    thresholds: &[&LIMITED, &CWND_FULL, &QUEUEING, &NETWORK_SLOWER, &LEAST, &NOT_THERE],
    mitigation: "raise the limit that is met (net.ipv4.tcp_rmem, tcp_wmem, net.core.rmem_max; SPDK: sock_impl_set_options recv_buf_size, send_buf_size) to twice the bandwidth times the round-trip time, or spread the load over more queues; a full congestion window without loss: check the round-trip time and the congestion control",
    trade_off: "larger buffers take memory on every connection and let more queue in the network before the sender slows down",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'network.p99<=500us'",
    yields_to: &[
        Cause::FabricLoss,
        Cause::FabricCongestion,
        Cause::MtuMismatch,
        Cause::HeadOfLine,
        Cause::HostCpu,
        Cause::ReactorSaturated,
    ],
    judge: window,
};

/// How much of its time a connection was limited.
struct Limited<'a> {
    queue: usize,
    line: &'a Line,
    share: f64,
    by: &'static str,
    mean: f64,
}

fn window(facts: &Facts<'_>) -> Verdict {
    let (all, tail) = facts.excess_in(NETWORK);
    if all.max(tail) < NOT_THERE.value {
        return Verdict::RuledOut(elsewhere("network", all, tail));
    }
    if !facts.has_tcp() {
        return Verdict::CannotTell("credits of RDMA queues are not sampled".into());
    }
    let mut limits: Vec<Limited<'_>> = Vec::new();
    let mut seen = 0;
    for (place, queue) in facts.queues.iter().enumerate().filter(|(_, q)| !q.rows.is_empty()) {
        for side in [Side::Host, Side::Target] {
            let known =
                if side == Side::Target && queue.target.host.is_some() { &queue.target } else { &queue.host };
            let find = |metric: &'static str| {
                facts.timeline.lines(side, "tcp", metric).find(move |l| is_of_queue(&l.object, side, known))
            };
            let Some(busy) = find("busy_time") else { continue };
            seen += 1;
            let time = busy.grown().unwrap_or(0.0);
            for (metric, by) in [
                ("receive_window_limited", "the receiver's window"),
                ("send_buffer_limited", "the send buffer"),
            ] {
                let Some(line) = find(metric) else { continue };
                let grown = line.grown().unwrap_or(0.0);
                // Less than a millisecond a second is no limit, however little was sent.
                if time > 0.0 && grown / facts.seconds > 1_000.0 {
                    limits.push(Limited { queue: place, line, share: grown / time, by, mean: grown });
                }
            }
            let trip = |metric: &'static str| find(metric).and_then(Line::mean).filter(|us| *us > 0.0);
            let queues =
                trip("rtt").zip(trip("min_rtt")).is_some_and(|(now, least)| now > QUEUEING.value * least);
            let again = find("retransmitted").and_then(Line::grown).unwrap_or(0.0);
            if let (Some(line), Some(window)) = (find("unacked"), find("cwnd"))
                && let (Some(out), Some(cwnd)) = (line.mean(), window.mean())
                && again < 1.0
                && !queues
                && cwnd > 0.0
                && out / cwnd >= CWND_FULL.value
            {
                limits.push(Limited {
                    queue: place,
                    line,
                    share: out / cwnd,
                    by: "a full congestion window",
                    mean: cwnd,
                });
            }
        }
    }
    if seen == 0 {
        return Verdict::CannotTell(format!(
            "the network has {} of the excess, and {}",
            percent(all.max(tail)),
            lacking(facts, "tcp")
        ));
    }
    let held: Vec<&Limited<'_>> = limits.iter().filter(|l| l.share >= LIMITED.value).collect();
    let Some(worst) = held.iter().max_by(|a, b| a.share.total_cmp(&b.share)) else {
        let most = limits.iter().map(|l| l.share).fold(0.0, f64::max);
        return Verdict::RuledOut(format!(
            "{seen} ends of connections were watched, and a window limited none of them for more than {} of its time",
            percent(most)
        ));
    };
    let slower = facts.beyond_floor(NETWORK);
    if slower < NETWORK_SLOWER.value {
        return Verdict::RuledOut(format!(
            "{} limited {} for {} of its time, but the network takes {}x what it takes at best",
            worst.by,
            facts.queues[worst.queue].name,
            percent(worst.share),
            number(slower)
        ));
    }
    let queues: std::collections::BTreeSet<usize> = held.iter().map(|l| l.queue).collect();
    let claim = facts
        .rows
        .iter()
        .map(|row| if queues.contains(&row.queue) { over(row, facts.class(row), NETWORK) } else { 0 })
        .collect();
    let evidence = held
        .iter()
        .take(4)
        .map(|l| {
            let text = if l.by.starts_with("a full") {
                format!(
                    "on {} ({}) {} of a congestion window of {} segments was in use on average, and nothing was sent again",
                    facts.queues[l.queue].name,
                    l.line.object,
                    percent(l.share),
                    number(l.mean)
                )
            } else {
                format!(
                    "on {} ({}) {} limited the {} for {} of the time in which it had data to send",
                    facts.queues[l.queue].name,
                    l.line.object,
                    l.by,
                    l.line.side,
                    percent(l.share)
                )
            };
            Evidence::said(text)
                .of(Some(l.line.side), &format!("tcp.{}", l.line.metric), &l.line.object)
                .figures(l.share, Some(0.0), "of the time")
        })
        .chain(std::iter::once(Evidence::said(format!(
            "the network has {} of the excess of all commands and {} of the slowest's",
            percent(all),
            percent(tail)
        ))))
        .collect();
    Verdict::Holds(Found {
        stage: Stage::Network,
        subject: Some(facts.queues[worst.queue].name.clone()),
        claim: Claim::Excess(claim),
        evidence,
        not_refuted: vec![
            "with loss, the windows would be small because of it; that is a cause of its own".into(),
        ],
    })
}
