//! A drive that throttles itself for heat.

use super::super::super::Evidence;
use super::super::super::cause::Cause;
use super::super::super::facts::Facts;
use super::super::super::figures::mean;
use super::super::fabric::{elsewhere, merged, split};
use super::super::{
    Claim, Found, LEAST, NOT_THERE, Rule, Threshold, Verdict, WAITS_AS_LONG, number, percent,
};
use super::{STORAGE, slowness, storage_claim};
use crate::timeline::Line;
use run_format::{Side, Stage};

const THROTTLES: Threshold = Threshold {
    name: "throttling",
    value: 1.0,
    unit: "count, second or warning",
    why: "the drive itself counts it: one is one",
};
const SLOWER_HOT: Threshold = Threshold {
    name: "storage while throttled",
    value: 1.2,
    unit: "x other times, or x the baseline's where it is so all the time",
    why: "light throttling of a drive that has time to spare costs nothing",
};

pub(in super::super) const THROTTLED: Rule = Rule {
    cause: Cause::DriveThrottled,
    shows: "the drive counts thermal throttling (or warns of its temperature) during the recording, and storage is where the excess is",
    refutes: "the drive's SMART log counts no throttling and no warning, or storage has little of the excess",
    thresholds: &[&THROTTLES, &SLOWER_HOT, &WAITS_AS_LONG, &LEAST, &NOT_THERE],
    mitigation: "cool the drive (airflow, heat sinks, slots apart), check its power state and thermal limits (nvme get-feature -f 0x10, HCTM), or lower its write load",
    trade_off: "fans take power and make noise; higher thermal limits wear the drive",
    verify: "nvme smart-log DRIVE before and after, and fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE",
    yields_to: &[],
    judge: throttled,
};

fn throttled(facts: &Facts<'_>) -> Verdict {
    let (all, tail) = facts.excess_in(STORAGE);
    let smart = |metric: &'static str| facts.timeline.lines(Side::Target, "smart", metric);
    let mut signs: Vec<(&Line, f64, String)> = Vec::new();
    for metric in
        ["throttle1_count", "throttle2_count", "throttle1_time", "throttle2_time", "warning_temperature_time"]
    {
        for line in smart(metric) {
            let grown = line.grown().unwrap_or(0.0).round();
            if grown >= THROTTLES.value {
                let text = format!("{metric} of {} grew by {}", line.object, number(grown));
                signs.push((line, grown, text));
            }
        }
    }
    for line in smart("critical_warning") {
        let hot = line.spans.iter().filter(|s| s.value as u64 & 2 != 0).count();
        if hot > 0 {
            let text = format!("{} warns of its temperature (critical warning, bit 1)", line.object);
            signs.push((line, 1.0, text));
        }
    }
    if signs.is_empty() {
        if facts.timeline.has(Side::Target, "smart") {
            let hottest = smart("temperature").filter_map(Line::most).fold(f64::MIN, f64::max);
            let at =
                if hottest > f64::MIN { format!(" (at most {} C)", number(hottest)) } else { String::new() };
            return Verdict::RuledOut(format!("the target's drives count no throttling and no warning{at}"));
        }
        if all.max(tail) < NOT_THERE.value {
            return Verdict::RuledOut(elsewhere("storage", all, tail));
        }
        return Verdict::CannotTell(format!(
            "the target's run has no smart telemetry of this time (SPDK's own drives have none), and storage has {} of the excess",
            percent(all.max(tail))
        ));
    }
    if all.max(tail) < NOT_THERE.value {
        return Verdict::RuledOut(format!("{}, but {}", signs[0].2, elsewhere("storage", all, tail)));
    }
    let while_so: Vec<(i64, i64)> = signs
        .iter()
        .flat_map(|(line, _, _)| {
            let is_gauge = line.metric == "critical_warning";
            let hot = move |s: &&crate::timeline::Span| {
                if is_gauge { s.value as u64 & 2 != 0 } else { s.value > 0.0 }
            };
            line.spans.iter().filter(hot).map(|s| (s.from, s.to))
        })
        .collect();
    let (hot, cool) = split(facts, &merged(while_so), |row| slowness(facts, row));
    if hot.len() >= 50 && cool.len() >= 50 {
        let of = |rows: &[(usize, f64)]| mean(rows.iter().map(|r| r.1)).unwrap_or(1.0).max(1e-9);
        let ratio = of(&hot) / of(&cool);
        if ratio < SLOWER_HOT.value {
            return Verdict::RuledOut(format!(
                "{}, but storage took {}x as long then",
                signs[0].2,
                number(ratio)
            ));
        }
    } else {
        // It is hot all the time, or nearly: what storage takes otherwise is a baseline's to say.
        let slower = facts.beyond_floor(STORAGE);
        let has_baseline = facts.classes.iter().any(|class| class.has_baseline);
        let needed = if has_baseline { SLOWER_HOT.value } else { WAITS_AS_LONG.value };
        if slower < needed {
            return if has_baseline {
                Verdict::RuledOut(format!(
                    "{}, but storage takes {}x what the baseline's takes",
                    signs[0].2,
                    number(slower)
                ))
            } else {
                Verdict::CannotTell(format!(
                    "{} nearly all the time, and storage takes {}x what it takes at best: a baseline of a cool drive would tell",
                    signs[0].2,
                    number(slower)
                ))
            };
        }
    }
    let warmest =
        smart("temperature").max_by(|a, b| a.most().unwrap_or(0.0).total_cmp(&b.most().unwrap_or(0.0)));
    let mut evidence: Vec<Evidence> = signs
        .iter()
        .take(3)
        .map(|(line, grown, text)| {
            let span = (line.spans.first().map_or(0, |s| s.from), line.spans.last().map_or(0, |s| s.to));
            Evidence::said(text.clone())
                .of(Some(Side::Target), &format!("smart.{}", line.metric), &line.object)
                .between(span)
                .figures(*grown, Some(0.0), "")
        })
        .collect();
    if let Some(line) = warmest {
        let most = line.most().unwrap_or(0.0);
        evidence.push(
            Evidence::said(format!("{} was at {} C", line.object, number(most)))
                .of(Some(Side::Target), "smart.temperature", &line.object)
                .figures(most, None, "C"),
        );
    }
    evidence.push(Evidence::said(format!(
        "storage has {} of the excess of all commands and {} of the slowest's",
        percent(all),
        percent(tail)
    )));
    Verdict::Holds(Found {
        stage: Stage::Storage,
        subject: Some(signs[0].0.object.clone()),
        claim: Claim::Excess(storage_claim(facts)),
        evidence,
        not_refuted: vec!["a drive that is only busy counts no throttling".into()],
    })
}
