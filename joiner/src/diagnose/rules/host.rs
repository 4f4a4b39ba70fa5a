//! The host's CPUs: time that they have not, and completions on the wrong ones.

use super::super::Evidence;
use super::super::cause::Cause;
use super::super::facts::{Facts, mean_part, over};
use super::super::figures::mean;
use super::fabric::{elsewhere, split};
use super::waits::{Waits, shares, threads};
use super::{Claim, Found, LEAST, NOT_THERE, Rule, Threshold, Verdict, WAITS_AS_LONG, number, percent};
use crate::model::SubStage;
use crate::table::time;
use crate::timeline::Line;
use run_format::{Kind, Side, Stage};
use std::collections::BTreeMap;

/// Where commands wait for a CPU of the host: also a completion that softirq or the driver's worker has yet to take.
const HOST: &[SubStage] = &[
    SubStage::HostBlockIn,
    SubStage::HostBlockOut,
    SubStage::HostDriverIn,
    SubStage::HostDriverR2t,
    SubStage::HostDriverOut,
    SubStage::NetworkBack,
];

const STEAL: Threshold = Threshold {
    name: "steal",
    value: 0.05,
    unit: "of the time",
    why: "a virtual CPU that is taken away for a twentieth of the time is away for milliseconds at a stretch",
};
const SOFTIRQ: Threshold = Threshold {
    name: "softirq",
    value: 0.50,
    unit: "of the time of a CPU that submits",
    why: "above half, packets wait for ksoftirqd and threads for the CPU",
};
const RUN_DELAY: Threshold = Threshold {
    name: "run-queue delay",
    value: 0.25,
    unit: "threads waiting for each CPU that submits",
    why: "a quarter of a thread that always waits is one that often finds its CPU taken",
};
const THREAD_WAITS: Threshold = Threshold {
    name: "run-queue delay of a thread of the host's process",
    value: 0.10,
    unit: "of the time",
    why: "a thread that is woken for each completion waits some microseconds each time, a few hundredths in all; one whose CPU is taken waits for others' time slices, milliseconds each",
};
const PRESSURE: Threshold = Threshold {
    name: "CPU pressure",
    value: 0.30,
    unit: "of the time with a thread stalled, where the host's own threads are not known",
    why: "short stalls of other programs' threads make up to a fifth on any busy machine",
};
const WITH_IT: Threshold = Threshold {
    name: "host's stages while it is so",
    value: 1.3,
    unit: "x other times",
    why: "a CPU that is short of time at another moment than commands are slow is not their cause",
};

pub(super) const CPU: Rule = Rule {
    cause: Cause::HostCpu,
    shows: "steal, softirq time, run-queue delay or CPU pressure is high on the CPUs that submit, and the host's stages (with the way back, which ends when a CPU takes the completion) are slow while it is; it explains no more than such waits lasted, for the commands in flight meanwhile",
    refutes: "the CPUs that submit have time, or the host's stages have little of the excess",
    thresholds: &[
        &STEAL,
        &SOFTIRQ,
        &RUN_DELAY,
        &THREAD_WAITS,
        &PRESSURE,
        &WITH_IT,
        &WAITS_AS_LONG,
        &LEAST,
        &NOT_THERE,
    ],
    mitigation: "keep other work off the CPUs that do I/O (cpusets, isolcpus, IRQ affinity), give the virtual machine dedicated CPUs, or spread the load over more queues and CPUs",
    trade_off: "CPUs set aside for I/O are idle when it is",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'host_driver.p99<=100us'",
    yields_to: &[Cause::TooFewQueues],
    judge: cpu,
};

/// The share of commands that each CPU submits.
fn submitters(facts: &Facts<'_>) -> BTreeMap<u16, f64> {
    let mut cpus: BTreeMap<u16, f64> = BTreeMap::new();
    let each = 1.0 / facts.rows.len().max(1) as f64;
    facts.rows.iter().for_each(|row| *cpus.entry(row.cpu).or_default() += each);
    cpus
}

/// The times of a CPU, by /proc/stat.
const TIMES: [&str; 8] = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"];

/// Something that takes a CPU's time, over time.
struct Pressure {
    name: &'static str,
    limit: f64,
    unit: &'static str,
    metric: String,
    object: String,
    /// From when to when, and its value there.
    spans: Vec<(i64, i64, f64)>,
}

impl Pressure {
    fn mean(&self) -> Option<f64> {
        let time: f64 = self.spans.iter().map(|s| (s.1 - s.0) as f64).sum();
        let sum: f64 = self.spans.iter().map(|s| s.2 * (s.1 - s.0) as f64).sum();
        (time > 0.0).then(|| sum / time)
    }

    fn high(&self) -> Vec<(i64, i64)> {
        self.spans.iter().filter(|s| s.2 >= self.limit).map(|s| (s.0, s.1)).collect()
    }

    /// Whether it is far less for a good part of the time: otherwise there are no two kinds of times, and it is so all the
    /// time.
    fn comes_and_goes(&self) -> bool {
        let of = |high: bool| {
            let spans = || self.spans.iter().filter(|s| (s.2 >= self.limit) == high);
            let time: f64 = spans().map(|s| (s.1 - s.0) as f64).sum();
            (time, spans().map(|s| s.2 * (s.1 - s.0) as f64).sum::<f64>() / time.max(1.0))
        };
        let ((long, high), (short, low)) = (of(true), of(false));
        short >= (long + short) / 10.0 && low <= high / 3.0
    }
}

/// The share that one kind of time has of a CPU's whole time, sample by sample.
fn share_of_time(facts: &Facts<'_>, object: &str, kind: &str) -> Vec<(i64, i64, f64)> {
    let Some(line) = facts.timeline.line(Side::Host, "cpu", kind, object) else { return Vec::new() };
    let others: Vec<&Line> =
        TIMES.iter().filter_map(|t| facts.timeline.line(Side::Host, "cpu", t, object)).collect();
    let all = |from: i64, to: i64| others.iter().filter_map(|l| l.mean_in(from, to)).sum::<f64>();
    let share = |s: &crate::timeline::Span| {
        let whole = all(s.from, s.to);
        (whole > 0.0).then(|| (s.from, s.to, s.value / whole))
    };
    line.spans.iter().filter_map(share).collect()
}

fn pressures(facts: &Facts<'_>) -> Vec<Pressure> {
    let mut pressures = Vec::new();
    // CPUs with a twentieth of the commands or more.
    let cpus: Vec<u16> =
        submitters(facts).into_iter().filter(|(_, share)| *share >= 0.05).map(|(cpu, _)| cpu).collect();
    for cpu in &cpus {
        let object = format!("cpu{cpu}");
        for (kind, limit) in [("steal", &STEAL), ("softirq", &SOFTIRQ)] {
            pressures.push(Pressure {
                name: limit.name,
                limit: limit.value,
                unit: "of the time",
                metric: format!("cpu.{kind}"),
                spans: share_of_time(facts, &object, kind),
                object: object.clone(),
            });
        }
    }
    // How long the threads that do the I/O waited is known of a process. What others wait for, and whether the machine
    // as a whole is short of CPUs, says no more then.
    let threads = waiting_threads(facts);
    if !threads.is_empty() {
        pressures.extend(threads);
        pressures.retain(|p| !p.spans.is_empty());
        return pressures;
    }
    for cpu in &cpus {
        let object = format!("cpu{cpu}");
        if let Some(line) = facts.timeline.line(Side::Host, "sched", "run_delay", &object) {
            pressures.push(Pressure {
                name: RUN_DELAY.name,
                limit: RUN_DELAY.value,
                unit: "threads waiting",
                metric: "sched.run_delay".into(),
                spans: shares(line),
                object,
            });
        }
    }
    if let Some(line) = facts.timeline.line(Side::Host, "pressure", "some", "cpu") {
        pressures.push(Pressure {
            name: PRESSURE.name,
            limit: PRESSURE.value,
            unit: "of the time",
            metric: "pressure.some".into(),
            object: "cpu".into(),
            spans: line.spans.iter().map(|s| (s.from, s.to, s.value / 1e6)).collect(),
        });
    }
    pressures.retain(|p| !p.spans.is_empty());
    pressures
}

/// How long each working thread of the host's process waited for a CPU.
fn waiting_threads(facts: &Facts<'_>) -> Vec<Pressure> {
    let of = |line: &Line| Pressure {
        name: "run-queue delay",
        limit: THREAD_WAITS.value,
        unit: "of the time",
        metric: "threads.run_delay".into(),
        object: line.object.clone(),
        spans: shares(line),
    };
    threads(facts, Side::Host).into_iter().map(of).collect()
}

fn cpu(facts: &Facts<'_>) -> Verdict {
    let (all, tail) = facts.excess_in(HOST);
    if all.max(tail) < NOT_THERE.value {
        return Verdict::RuledOut(elsewhere("host with the way back", all, tail));
    }
    let pressures = pressures(facts);
    if pressures.is_empty() {
        return Verdict::CannotTell(format!(
            "the host's run has no cpu, sched or pressure telemetry of this time, and the host with the way back has {} of the excess",
            percent(all.max(tail))
        ));
    }
    let load = |p: &Pressure| p.mean().unwrap_or(0.0) / p.limit;
    // In a tenth of the time at least, or always a little.
    let is_high = |p: &&Pressure| {
        let high: i64 = p.high().iter().map(|s| s.1 - s.0).sum();
        let time: i64 = p.spans.iter().map(|s| s.1 - s.0).sum();
        load(p) >= 1.0 || high * 10 >= time
    };
    let mut held: Vec<(&Pressure, f64)> = Vec::new();
    let figure = |row: &super::super::facts::Row| {
        let floor: i64 = HOST.iter().map(|&p| facts.class(row).floor[p as usize]).sum();
        HOST.iter().map(|&p| row.part(p)).sum::<i64>() as f64 / floor.max(1) as f64
    };
    let mut apart: Option<(String, f64)> = None;
    for pressure in pressures.iter().filter(is_high) {
        let (high, low) = split(facts, &super::fabric::merged(pressure.high()), figure);
        // Commands beside those of the high times are needed to compare with, at times that are others.
        let ratio = if low.len() < 50 || high.len() < 50 || !pressure.comes_and_goes() {
            // It is so all the time: the host's own excess says whether it matters.
            let slower = facts.beyond_floor(HOST);
            if slower >= WAITS_AS_LONG.value { slower } else { 0.0 }
        } else {
            let of = |rows: &[(usize, f64)]| mean(rows.iter().map(|r| r.1)).unwrap_or(1.0).max(1e-9);
            of(&high) / of(&low)
        };
        if ratio >= WITH_IT.value {
            held.push((pressure, ratio));
        } else {
            apart = Some((format!("{} of {}", pressure.name, pressure.object), ratio));
        }
    }
    held.sort_by(|a, b| load(b.0).total_cmp(&load(a.0)));
    let Some((worst, ratio)) = held.first() else {
        if let Some((what, ratio)) = apart {
            return Verdict::RuledOut(if ratio > 0.0 {
                format!("{what} is high, but the host's stages take {}x as long while it is", number(ratio))
            } else {
                format!(
                    "{what} is high all the time, but the host and the way back take {}x what they take at best",
                    number(facts.beyond_floor(HOST))
                )
            });
        }
        let most = pressures.iter().max_by(|a, b| load(a).total_cmp(&load(b)));
        return Verdict::RuledOut(most.map_or_else(String::new, |p| {
            format!(
                "the CPUs that submit have time: the nearest to its limit is {} of {} with {} {} (limit {})",
                p.name,
                p.object,
                number(p.mean().unwrap_or(0.0)),
                p.unit,
                number(p.limit)
            )
        }));
    };
    let claim: Vec<i64> = facts.rows.iter().map(|row| over(row, facts.class(row), HOST)).collect();
    let claim = Waits::of(held.iter().map(|(p, _)| p.spans.as_slice())).bound(facts, &claim);
    let mut evidence: Vec<Evidence> = held
        .iter()
        .take(3)
        .map(|(p, _)| {
            let most = p.spans.iter().map(|s| s.2).fold(0.0, f64::max);
            let span = (p.spans.first().map_or(0, |s| s.0), p.spans.last().map_or(0, |s| s.1));
            Evidence::said(format!(
                "{} of {} was {} {} on average and {} at most (limit {})",
                p.name,
                p.object,
                number(p.mean().unwrap_or(0.0)),
                p.unit,
                number(most),
                number(p.limit)
            ))
            .of(Some(Side::Host), &p.metric, &p.object)
            .between(span)
            .figures(p.mean().unwrap_or(0.0), Some(p.limit), p.unit)
        })
        .collect();
    evidence.push(
        Evidence::said(format!(
            "the host's stages and the way back have {} of the excess of all commands and {} of the slowest's",
            percent(all),
            percent(tail)
        ))
        .of(None, "host_driver", "")
        .figures(all.max(tail), Some(NOT_THERE.value), "of the excess"),
    );
    let excess = |stage: &Stage| {
        let of_stage = |part: &&SubStage| part.stage() == *stage;
        let parts: Vec<SubStage> = HOST.iter().filter(of_stage).copied().collect();
        facts.shares(|_, row, class| over(row, class, &parts)).0
    };
    let stages = [Stage::HostBlock, Stage::HostDriver, Stage::Network];
    let stage =
        stages.into_iter().max_by(|a, b| excess(a).total_cmp(&excess(b))).unwrap_or(Stage::HostDriver);
    Verdict::Holds(Found {
        stage,
        subject: Some(worst.object.clone()),
        claim: Claim::Excess(claim),
        evidence,
        not_refuted: vec![format!(
            "at other times the host's stages would be as slow; they are {}x as slow while it is high",
            number(*ratio)
        )],
    })
}

const OVERLAP: Threshold = Threshold {
    name: "completions on the submitters' CPUs",
    value: 0.20,
    unit: "of the interrupts",
    why: "below that, nearly every completion has to wake another CPU",
};
const WAY_OUT: Threshold = Threshold {
    name: "the host's way out",
    value: 10_000.0,
    unit: "ns",
    why: "completing on the CPU that took the completion takes a few microseconds; waking another one takes ten or more",
};

pub(super) const AFFINITY: Rule = Rule {
    cause: Cause::InterruptAffinity,
    shows: "the network's interrupts (or net_rx softirqs) come to other CPUs than those that submit, and the host's way out, from the completion's arrival to its end, is slow",
    refutes: "interrupts come to the CPUs that submit, or the way out is short",
    thresholds: &[&OVERLAP, &WAY_OUT, &LEAST],
    mitigation: "let each NIC queue interrupt a CPU that submits (set_irq_affinity of the driver, /proc/irq/N/smp_affinity, or RPS and RFS for a NIC with few queues), and keep the applications on those CPUs and their NUMA node",
    trade_off: "interrupts on the application's CPUs take that time from it",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'host_driver.p99<=50us'",
    yields_to: &[Cause::HostCpu],
    judge: affinity,
};

/// Where the network comes in, a second and CPU.
fn arrivals(facts: &Facts<'_>) -> (BTreeMap<u16, f64>, &'static str) {
    let cpu = |object: &str| object.rsplit("cpu").next().and_then(|n| n.parse::<u16>().ok());
    let mut cpus: BTreeMap<u16, f64> = BTreeMap::new();
    for line in facts.timeline.lines(Side::Host, "interrupts", "interrupts") {
        // Those of drives are not the network's.
        if let (Some(cpu), false) = (cpu(&line.object), line.object.contains("nvme")) {
            *cpus.entry(cpu).or_default() += line.mean().unwrap_or(0.0);
        }
    }
    if cpus.values().sum::<f64>() >= 100.0 {
        return (cpus, "interrupts.interrupts");
    }
    cpus.clear();
    for line in facts.timeline.lines(Side::Host, "softirqs", "net_rx") {
        if let Some(cpu) = cpu(&line.object) {
            *cpus.entry(cpu).or_default() += line.mean().unwrap_or(0.0);
        }
    }
    (cpus, "softirqs.net_rx")
}

fn affinity(facts: &Facts<'_>) -> Verdict {
    if facts.joined.host.manifest.kind == Kind::Spdk {
        return Verdict::RuledOut("the host is SPDK, which polls for its completions".into());
    }
    const OUT: &[SubStage] = &[SubStage::HostDriverOut, SubStage::HostBlockOut];
    let out = mean_part(facts.rows.iter(), OUT).unwrap_or(0.0);
    if out < WAY_OUT.value {
        return Verdict::RuledOut(format!(
            "the host's way out takes {} on average, and a completion that has to wake another CPU takes {} or more",
            time(out),
            time(WAY_OUT.value)
        ));
    }
    let (arrivals, metric) = arrivals(facts);
    let total: f64 = arrivals.values().sum();
    if total < 100.0 {
        return Verdict::CannotTell(format!(
            "the host's way out takes {}, and its run has no interrupts or softirqs telemetry of this time",
            time(out)
        ));
    }
    let submitters = submitters(facts);
    let overlap: f64 =
        arrivals.iter().map(|(cpu, n)| (n / total).min(submitters.get(cpu).copied().unwrap_or(0.0))).sum();
    if overlap >= OVERLAP.value {
        return Verdict::RuledOut(format!(
            "{} of the network's arrivals ({metric}) come to the CPUs that submit",
            percent(overlap)
        ));
    }
    let list = |cpus: &BTreeMap<u16, f64>, whole: f64| {
        let mut by: Vec<(&u16, &f64)> = cpus.iter().filter(|(_, n)| **n / whole >= 0.05).collect();
        by.sort_by(|a, b| b.1.total_cmp(a.1));
        let names: Vec<String> =
            by.iter().take(6).map(|(cpu, n)| format!("cpu{cpu} {}", percent(**n / whole))).collect();
        names.join(", ")
    };
    // Completing where it was submitted takes a small part of it.
    const AT_HOME: i64 = 2_000;
    let claim = facts
        .rows
        .iter()
        .map(|row| (OUT.iter().map(|&p| row.part(p)).sum::<i64>() - AT_HOME).max(0))
        .collect();
    Verdict::Holds(Found {
        stage: Stage::HostDriver,
        subject: None,
        claim: Claim::Always(claim),
        evidence: vec![
            Evidence::said(format!(
                "the network comes in on {}; commands are submitted on {}",
                list(&arrivals, total),
                list(&submitters, 1.0)
            ))
            .of(Some(Side::Host), metric, "")
            .figures(overlap, Some(1.0), "of the arrivals"),
            Evidence::said(format!("the host's way out takes {} on average", time(out)))
                .of(None, "host_driver_out", "")
                .figures(out, Some(AT_HOME as f64), "ns"),
        ],
        not_refuted: vec!["on the submitters' own CPUs the way out would be a few microseconds".into()],
    })
}
