//! The queues: too few of them, one that carries most, and small commands behind large ones. The commands alone show
//! these; telemetry adds to it.

use super::super::Evidence;
use super::super::cause::Cause;
use super::super::facts::{Facts, Row, mean_part, over};
use super::super::figures::mean;
use super::fabric::{NETWORK, elsewhere};
use super::{Claim, Found, LEAST, Rule, Threshold, Verdict, number, percent};
use crate::model::SubStage;
use crate::table::{bytes, count, time};
use run_format::{Operation, Side, Stage, Transport};
use std::collections::{BTreeMap, BTreeSet};

const CPUS: Threshold = Threshold {
    name: "CPUs that submit to each queue",
    value: 2.0,
    unit: "CPUs",
    why: "below two, queues and CPUs are as many as each other or nearly",
};
const WAITING: Threshold = Threshold {
    name: "wait before being sent",
    value: 0.20,
    unit: "of latency",
    why: "handing a command to the socket takes a few per cent of a fabric's latency",
};
const IN_LINE: Threshold = Threshold {
    name: "commands that wait on each queue",
    value: 1.0,
    unit: "commands (rate x wait)",
    why: "less than one on average is no line of waiting commands",
};
const ONE_BUSY: Threshold = Threshold {
    name: "the one busy CPU",
    value: 0.90,
    unit: "of its time",
    why: "one CPU that does the work of a queue is full from there on",
};
const OTHERS_IDLE: Threshold = Threshold {
    name: "the other CPUs",
    value: 0.70,
    unit: "of their time",
    why: "with all CPUs busy, more queues would not help",
};

/// The host's time before a command is sent.
const BEFORE: &[SubStage] = &[SubStage::HostBlockIn, SubStage::HostDriverIn];

pub(super) const TOO_FEW: Rule = Rule {
    cause: Cause::TooFewQueues,
    shows: "several CPUs submit to each queue, and commands wait in line in the host before they are sent (Little's law), or one CPU does a queue's work and is full while others idle",
    refutes: "there are about as many queues as CPUs that submit, or nothing waits before it is sent",
    thresholds: &[&CPUS, &WAITING, &IN_LINE, &ONE_BUSY, &OTHERS_IDLE, &LEAST],
    mitigation: "connect with more I/O queues (nvme connect --nr-io-queues=N, N up to the number of CPUs that submit; SPDK target: nvmf_create_transport -m, max_qpairs_per_ctrlr)",
    trade_off: "each queue is a connection with buffers on both sides, and work for a poll group of the target",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'host_driver.p99<=50us'",
    yields_to: &[Cause::FabricLoss],
    judge: too_few,
};

/// Queues that carry commands.
fn used<'f>(facts: &'f Facts<'_>) -> Vec<(usize, &'f super::super::facts::QueueFacts)> {
    let least = facts.rows.len() / 100;
    facts.queues.iter().enumerate().filter(|(_, q)| q.rows.len() > least).collect()
}

fn too_few(facts: &Facts<'_>) -> Verdict {
    let queues = used(facts);
    let mut cpus: BTreeMap<u16, usize> = BTreeMap::new();
    facts.rows.iter().for_each(|row| *cpus.entry(row.cpu).or_default() += 1);
    // Those with a twentieth of an equal share and more: a thread that moved once is no submitter.
    let equal = facts.rows.len() / cpus.len().max(1);
    let submitting = cpus.values().filter(|&&n| n * 20 > equal).count();
    let each = submitting as f64 / queues.len().max(1) as f64;
    if each < CPUS.value {
        return Verdict::RuledOut(format!("{} CPUs submit to {} queues", submitting, queues.len()));
    }
    let share = facts.share_of(BEFORE);
    let wait: f64 =
        facts.rows.iter().map(|row| BEFORE.iter().map(|&p| row.part(p)).sum::<i64>() as f64).sum();
    let in_line = wait * f64::from(facts.one_in) / (facts.seconds * 1e9) / queues.len().max(1) as f64;
    if share >= WAITING.value && in_line >= IN_LINE.value {
        let claim = facts.rows.iter().map(|row| over(row, facts.class(row), BEFORE)).collect();
        return Verdict::Holds(Found {
            stage: if facts.share_of(&[SubStage::HostBlockIn]) > facts.share_of(&[SubStage::HostDriverIn]) {
                Stage::HostBlock
            } else {
                Stage::HostDriver
            },
            subject: queues.first().map(|(_, q)| q.name.clone()),
            claim: Claim::Excess(claim),
            evidence: vec![
                few(submitting, queues.len()),
                Evidence::said(format!(
                    "commands wait {} of their latency before they are sent: {} on average",
                    percent(share),
                    time(wait / facts.rows.len().max(1) as f64)
                ))
                .of(None, "host_driver_in", "")
                .figures(share, Some(WAITING.value), "of latency"),
                Evidence::said(format!(
                    "by Little's law {} commands are in line on each queue at any moment",
                    number(in_line)
                ))
                .figures(in_line, Some(IN_LINE.value), "commands"),
            ],
            not_refuted: vec![
                "with a queue for each CPU that submits, commands would not wait for each other".into(),
            ],
        });
    }
    if let Some((cpu, busy, others)) = one_busy_cpu(facts) {
        const PARTS: &[SubStage] = &[
            SubStage::HostDriverIn,
            SubStage::HostDriverOut,
            SubStage::HostDriverR2t,
            SubStage::NetworkOut,
            SubStage::NetworkBack,
        ];
        let claim = facts.rows.iter().map(|row| over(row, facts.class(row), PARTS)).collect();
        return Verdict::Holds(Found {
            stage: Stage::HostDriver,
            subject: queues.first().map(|(_, q)| q.name.clone()),
            claim: Claim::Excess(claim),
            evidence: vec![
                few(submitting, queues.len()),
                Evidence::said(format!(
                    "cpu{cpu} was busy {} of its time, the others {} on average",
                    percent(busy),
                    percent(others)
                ))
                .of(Some(Side::Host), "cpu.idle", &format!("cpu{cpu}"))
                .figures(busy, Some(others), "of the time"),
            ],
            not_refuted: vec![
                "with all CPUs as busy, there would be nothing for more queues to run on".into(),
            ],
        });
    }
    Verdict::RuledOut(format!(
        "{} CPUs submit to {} queues, but commands wait {} of their latency before they are sent, {} in line on each queue",
        submitting,
        queues.len(),
        percent(share),
        number(in_line)
    ))
}

fn few(cpus: usize, queues: usize) -> Evidence {
    let plural = if queues == 1 { "" } else { "s" };
    Evidence::said(format!("{cpus} CPUs submit to {queues} queue{plural}")).figures(
        queues as f64,
        Some(cpus as f64),
        "queues",
    )
}

/// A CPU of the host that is full while the others have time: its number, how busy it is, and they.
fn one_busy_cpu(facts: &Facts<'_>) -> Option<(u16, f64, f64)> {
    let mut busy: Vec<(u16, f64)> = Vec::new();
    for idle in facts.timeline.lines(Side::Host, "cpu", "idle") {
        let Some(cpu) = idle.object.strip_prefix("cpu").and_then(|n| n.parse().ok()) else { continue };
        let waiting = facts.timeline.line(Side::Host, "cpu", "iowait", &idle.object).and_then(|l| l.mean());
        // Milliseconds a second.
        let free = (idle.mean()? + waiting.unwrap_or(0.0)) / 1_000.0;
        busy.push((cpu, (1.0 - free).clamp(0.0, 1.0)));
    }
    let most = busy.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let others = mean(busy.iter().filter(|b| b.0 != most.0).map(|b| b.1))?;
    (most.1 >= ONE_BUSY.value && others <= OTHERS_IDLE.value).then_some((most.0, most.1, others))
}

const HOT_SHARE: Threshold = Threshold {
    name: "the hot queue's share",
    value: 2.0,
    unit: "x an equal share, and half of all at least",
    why: "schedulers do not spread load evenly; twice the share, and most of all commands, is no accident",
};
const HOT_SLOWER: Threshold = Threshold {
    name: "the hot queue's time outside storage",
    value: 1.5,
    unit: "x the other queues' for the same class",
    why: "a queue that carries more and is as fast as the rest hurts nobody",
};

const HOT_DEEP: Threshold = Threshold {
    name: "commands in flight on the hot queue",
    value: 4.0,
    unit: "commands (rate x latency), and twice the other queues'",
    why: "with two or three in flight, commands hardly wait for each other",
};

pub(super) const HOT: Rule = Rule {
    cause: Cause::HotQueue,
    shows: "one of several queues carries far more than its share, and the same commands take longer on it than on the others, outside storage",
    refutes: "the queues carry about the same, or the one that carries more is as fast",
    thresholds: &[&HOT_SHARE, &HOT_SLOWER, &HOT_DEEP, &LEAST],
    mitigation: "spread the submitters over CPUs (a queue belongs to the CPUs that map to it: taskset, numjobs, cpus_allowed), or let fewer jobs share one CPU",
    trade_off: "threads on other CPUs may lose cache and NUMA locality",
    verify: "fabscope report AFTER_HOST.run AFTER_TARGET.run --by queue; fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE",
    yields_to: &[Cause::FabricLoss],
    judge: hot,
};

fn hot(facts: &Facts<'_>) -> Verdict {
    let queues = used(facts);
    if queues.len() < 2 {
        return Verdict::RuledOut(format!(
            "{} queue carries commands, so none is hotter than others",
            queues.len()
        ));
    }
    let Some(&(hot, about)) = queues.iter().max_by_key(|(_, q)| q.rows.len()) else {
        return Verdict::RuledOut("no queue carries commands".into());
    };
    let share = about.rows.len() as f64 / facts.rows.len().max(1) as f64;
    // Of two, twice the share would be all.
    let least = (HOT_SHARE.value / facts.queues.len().max(queues.len()) as f64).clamp(0.5, 0.75);
    if share < least {
        return Verdict::RuledOut(format!(
            "{} queues carry commands, the most on {} with {} of them",
            queues.len(),
            about.name,
            percent(share)
        ));
    }
    let outside = |row: &Row| (row.latency - row.stage(Stage::Storage)) as f64;
    // By class, on the other queues.
    let mut others: BTreeMap<usize, (f64, usize)> = BTreeMap::new();
    for row in facts.rows.iter().filter(|row| row.queue != hot) {
        let sum = others.entry(row.class).or_default();
        sum.0 += outside(row);
        sum.1 += 1;
    }
    let normal = |row: &Row| others.get(&row.class).filter(|o| o.1 >= 20).map(|o| o.0 / o.1 as f64);
    let on_hot = || facts.rows.iter().filter(|row| row.queue == hot);
    let compared: Vec<(f64, f64)> = on_hot().filter_map(|row| Some((outside(row), normal(row)?))).collect();
    if compared.len() < 50 {
        return Verdict::CannotTell(format!(
            "{} carries {} of the commands, and the others too few of the same class to compare with",
            about.name,
            percent(share)
        ));
    }
    let (here, there) = (
        mean(compared.iter().map(|c| c.0)).unwrap_or(0.0),
        mean(compared.iter().map(|c| c.1)).unwrap_or(0.0),
    );
    let slower = here / there.max(1.0);
    if slower < HOT_SLOWER.value {
        return Verdict::RuledOut(format!(
            "{} carries {} of the commands, but they take {}x what the same take on the other queues outside storage",
            about.name,
            percent(share),
            number(slower)
        ));
    }
    let waits = |n: usize| {
        let rows = facts.queues[n].rows.iter().map(|&n| &facts.rows[n]);
        rows.map(|row| row.latency as f64).sum::<f64>() * f64::from(facts.one_in) / (facts.seconds * 1e9)
    };
    let rest = mean(queues.iter().filter(|(n, _)| *n != hot).map(|(n, _)| waits(*n))).unwrap_or(0.0);
    if waits(hot) < HOT_DEEP.value || waits(hot) < 2.0 * rest {
        return Verdict::RuledOut(format!(
            "{} carries {} of the commands, but only {} are in flight on it ({} on each of the others)",
            about.name,
            percent(share),
            number(waits(hot)),
            number(rest)
        ));
    }
    let claim = facts
        .rows
        .iter()
        .map(|row| match normal(row) {
            Some(normal) if row.queue == hot => (outside(row) - normal).max(0.0) as i64,
            _ => 0,
        })
        .collect();
    let stage = Stage::ALL
        .into_iter()
        .filter(|&stage| stage != Stage::Storage)
        .max_by(|&a, &b| {
            let more = |stage: Stage| {
                let of = |on_hot: bool| {
                    mean(
                        facts
                            .rows
                            .iter()
                            .filter(|r| (r.queue == hot) == on_hot)
                            .map(|r| r.stage(stage) as f64),
                    )
                };
                of(true).unwrap_or(0.0) - of(false).unwrap_or(0.0)
            };
            more(a).total_cmp(&more(b))
        })
        .unwrap_or(Stage::Network);
    Verdict::Holds(Found {
        stage,
        subject: Some(about.name.clone()),
        claim: Claim::Excess(claim),
        evidence: vec![
            Evidence::said(format!(
                "{} carries {} of the commands; {} queues carry any",
                about.name,
                percent(share),
                queues.len()
            ))
            .of(None, "commands", &about.name)
            .figures(share, Some(1.0 / queues.len() as f64), "of the commands"),
            Evidence::said(format!(
                "outside storage a command takes {} there and {} on the others for the same classes, {}x",
                time(here),
                time(there),
                number(slower)
            ))
            .of(None, stage.name(), &about.name)
            .figures(here, Some(there), "ns"),
            Evidence::said(format!(
                "by Little's law {} commands are in flight on it, {} on each of the others",
                number(waits(hot)),
                number(rest)
            ))
            .figures(waits(hot), Some(rest), "commands"),
        ],
        not_refuted: vec![
            "were the path or the target slow for all, the other queues would be as slow".into(),
        ],
    })
}

const LARGE: Threshold = Threshold {
    name: "large and small",
    value: 8.0,
    unit: "x, and 32 KiB at least",
    why: "a transfer of 32 KiB takes longer on the wire than a small command takes there altogether",
};
const BEHIND: Threshold = Threshold {
    name: "small commands behind large ones",
    value: 2.0,
    unit: "x those that are not",
    why: "half as much again is what sharing a link costs",
};
const THIS_QUEUE: Threshold = Threshold {
    name: "behind large ones on the same queue",
    value: 1.5,
    unit: "x behind large ones on other queues",
    why: "where it makes no difference on which queue the large ones are, the link is what is shared",
};

pub(super) const HEAD_OF_LINE: Rule = Rule {
    cause: Cause::HeadOfLine,
    shows: "small commands are slow between the host's driver and the target's while a large transfer is under way on the same queue's connection, and not while it is on another",
    refutes: "there are no large transfers beside small commands, or these are as fast behind them",
    thresholds: &[&LARGE, &BEHIND, &THIS_QUEUE, &LEAST],
    mitigation: "give large and small I/O queues of their own (separate connections for the bulk load, poll and read queues: nvme connect --nr-poll-queues, --nr-write-queues), or split large requests (max_sectors_kb)",
    trade_off: "more connections; smaller requests cost more commands for the same data",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'read/4KiB:network.p99<=200us'",
    yields_to: &[Cause::FabricLoss],
    judge: head_of_line,
};

/// Stretches of time in which large data goes one way, in order, by queue.
#[derive(Default)]
struct Transfers {
    from: Vec<i64>,
    to: Vec<i64>,
}

impl Transfers {
    fn of(mut spans: Vec<(i64, i64)>) -> Transfers {
        spans.sort_unstable();
        let from = spans.iter().map(|s| s.0).collect();
        let mut to: Vec<i64> = spans.iter().map(|s| s.1).collect();
        to.sort_unstable();
        Transfers { from, to }
    }

    fn under_way(&self, t: i64) -> bool {
        self.from.partition_point(|&f| f < t) > self.to.partition_point(|&f| f <= t)
    }
}

fn head_of_line(facts: &Facts<'_>) -> Verdict {
    const OUT: &[SubStage] = &[SubStage::HostDriverIn, SubStage::NetworkOut];
    const BACK: &[SubStage] = &[SubStage::TargetDriverSend, SubStage::NetworkBack];
    if !facts.has_tcp() {
        return Verdict::RuledOut(
            "no queue is a TCP connection: RDMA does not keep commands in one stream of bytes".into(),
        );
    }
    let sizes: BTreeSet<u32> = facts.classes.iter().filter(|c| c.commands >= 50).map(|c| c.bytes).collect();
    let (Some(&least), Some(&most)) = (sizes.iter().find(|&&b| b > 0), sizes.iter().next_back()) else {
        return Verdict::RuledOut("no class of commands carries data".into());
    };
    let limit = (f64::from(least) * LARGE.value).max(32_768.0);
    if f64::from(most) < limit {
        let few = facts.classes.iter().filter(|c| f64::from(c.bytes) >= limit);
        let few: usize = few.map(|c| c.commands).sum();
        return Verdict::RuledOut(if few > 0 {
            format!("{few} commands are large beside those of {}: too few to hold them up", bytes(least))
        } else {
            format!("commands carry {} to {}: none is large beside the others", bytes(least), bytes(most))
        });
    }
    let is_large = |row: &Row| f64::from(row.bytes) >= limit;
    let is_small = |row: &Row| f64::from(row.bytes) * LARGE.value <= f64::from(most) && !is_large(row);
    let on_tcp = |row: &Row| facts.queues[row.queue].host.transport == Transport::Tcp;
    // Data goes to the target from when a write is sent until it is all there, and to the host from when storage has
    // read it until it has come.
    let spans = |queue: usize, write: bool| {
        let rows = facts.queues[queue].rows.iter().map(|&n| &facts.rows[n]).filter(|row| is_large(row));
        let way = |row: &Row| {
            let is_write = facts.class(row).operation == Operation::Write;
            let span = if write { (row.sent, row.submit) } else { (row.done, row.recv) };
            (is_write == write).then_some(span)
        };
        Transfers::of(rows.filter_map(way).filter(|s| s.1 > s.0).collect())
    };
    let ways: Vec<[Transfers; 2]> =
        (0..facts.queues.len()).map(|q| [spans(q, true), spans(q, false)]).collect();
    // Of each small command and way: how long it took, whether behind a large one here, and elsewhere.
    let mut figures: Vec<(usize, usize, i64, bool, bool)> = Vec::new();
    for (n, row) in facts.rows.iter().enumerate().filter(|(_, row)| is_small(row) && on_tcp(row)) {
        let in_driver = row.begin + row.part(SubStage::HostBlockIn);
        let handed = row.recv - row.part(SubStage::NetworkBack) - row.part(SubStage::TargetDriverSend);
        for (way, at, parts) in [(0usize, in_driver, OUT), (1, handed, BACK)] {
            let here = ways[row.queue][way].under_way(at);
            let elsewhere = (0..ways.len()).any(|q| q != row.queue && ways[q][way].under_way(at));
            figures.push((n, way, parts.iter().map(|&p| row.part(p)).sum(), here, elsewhere));
        }
    }
    let of = |way: usize, test: &dyn Fn(bool, bool) -> bool| {
        let chosen = figures.iter().filter(|f| f.1 == way && test(f.3, f.4)).map(|f| f.2 as f64);
        let n = chosen.clone().count();
        (n, mean(chosen).unwrap_or(0.0))
    };
    let mut held: Option<(usize, f64, f64, usize, f64)> = None;
    let (mut told, mut unclear) = (Vec::new(), None);
    for way in [0usize, 1] {
        let (behind, with) = of(way, &|here, _| here);
        let (free, without) = of(way, &|here, _| !here);
        if behind < 50 {
            continue;
        }
        if free < 50 {
            unclear = Some(behind);
            continue;
        }
        let (n, beside) = of(way, &|here, elsewhere| !here && elsewhere);
        let beside = if n >= 50 { beside / without.max(1.0) } else { 1.0 };
        let slower = with / without.max(1.0);
        told.push((behind, slower, beside));
        if slower >= BEHIND.value
            && slower >= THIS_QUEUE.value * beside
            && held.as_ref().is_none_or(|h| slower > h.1 / h.2.max(1.0))
        {
            held = Some((way, with, without, behind, beside));
        }
    }
    let Some((way, with, without, behind, beside)) = held else {
        let (all, tail) = facts.excess_in(NETWORK);
        return match (told.iter().max_by(|a, b| a.1.total_cmp(&b.1)), unclear) {
            (Some((n, slower, beside)), _) => Verdict::RuledOut(format!(
                "{} small commands were behind a large transfer on their queue and took {}x as long as those that were not ({}x beside one on another queue)",
                count(*n as u64),
                number(*slower),
                number(*beside)
            )),
            (None, Some(_)) if all.max(tail) >= super::NOT_THERE.value => Verdict::CannotTell(
                "large transfers were always under way on the small commands' queues: there is nothing to compare with".into(),
            ),
            (None, Some(_)) => Verdict::RuledOut(elsewhere("network", all, tail)),
            (None, None) => Verdict::RuledOut("hardly any small command was behind a large transfer on its queue".into()),
        };
    };
    let mut claim = vec![0i64; facts.rows.len()];
    for (n, _, took, here, _) in &figures {
        if *here {
            claim[*n] += (*took - without as i64).max(0);
        }
    }
    let rate = facts.rows.iter().filter(|row| is_large(row)).count();
    let large_network = mean_part(facts.rows.iter().filter(|row| is_large(row)), NETWORK).unwrap_or(0.0);
    let in_flight = rate as f64 * large_network * f64::from(facts.one_in) / (facts.seconds * 1e9);
    let name = if way == 0 { "to the target" } else { "to the host" };
    Verdict::Holds(Found {
        stage: Stage::Network,
        subject: None,
        claim: Claim::Excess(claim),
        evidence: vec![
            Evidence::said(format!(
                "{} small commands were behind a large transfer on the same connection and took {} on the way {name}; those that were not took {}, {}x less",
                count(behind as u64),
                time(with),
                time(without),
                number(with / without.max(1.0))
            ))
            .of(None, if way == 0 { "network_out" } else { "network_back" }, "")
            .figures(with, Some(without), "ns"),
            Evidence::said(format!(
                "with a large transfer on another queue they take {}x what they take without",
                number(beside)
            ))
            .figures(beside, Some(1.0), "x"),
            Evidence::said(format!(
                "by Little's law {} large transfers are in the network at any moment (up to {} each)",
                number(in_flight),
                bytes(most)
            ))
            .figures(in_flight, None, "commands"),
        ],
        not_refuted: vec![
            "were the link itself full, it would not matter on which queue the large transfers are".into(),
        ],
    })
}
