//! The drive: saturated, at a limit, busy with itself, hot, or with a neighbour.

use super::super::Evidence;
use super::super::cause::Cause;
use super::super::facts::{Facts, InFlight, Row, over};
use super::super::figures::{Modes, Times, Trend, mean, modes, trend};
use super::fabric::elsewhere;
use super::{Claim, Found, LEAST, NOT_THERE, Rule, Threshold, Verdict, number, percent};
use crate::model::SubStage;
use crate::table::{bytes, count, time};
use crate::timeline::Line;
use run_format::{Side, Stage};
use std::collections::BTreeMap;

const STORAGE: &[SubStage] = &[SubStage::StorageBlock, SubStage::StorageDrive];

const STORAGE_SHARE: Threshold = Threshold {
    name: "storage's share",
    value: 0.40,
    unit: "of latency",
    why: "below that, something else limits the load before the drive does",
};
const DEEP: Threshold = Threshold {
    name: "commands in storage",
    value: 4.0,
    unit: "at once, on average",
    why: "a drive works on several at once; with fewer waiting it is not full",
};
const GROWS: Threshold = Threshold {
    name: "growth of storage time with what is in storage",
    value: 0.6,
    unit: "(1: in proportion, as before one server; 0: not at all)",
    why: "a drive that serves more when more is asked has a growth near 0",
};
const GROWS_MOST: Threshold = Threshold {
    name: "growth of storage time at most",
    value: 1.6,
    unit: "(1: in proportion)",
    why: "storage that grows faster than what waits in it became slow first, and the waiting followed",
};
const FITS: Threshold = Threshold {
    name: "what that explains",
    value: 0.4,
    unit: "of the variance of storage time",
    why: "below that, other things rule how long storage takes",
};

pub(super) const SATURATED: Rule = Rule {
    cause: Cause::DriveSaturated,
    shows: "storage is most of the latency, several commands are in it at once, and how long each takes grows in proportion to how many are before it: the drive serves no more",
    refutes: "storage takes as long with many commands in it as with few, or it is a small part of the latency",
    thresholds: &[&STORAGE_SHARE, &DEEP, &GROWS, &GROWS_MOST, &FITS, &LEAST],
    mitigation: "ask less at once (a lower queue depth has the same throughput at less latency), or spread the load over more drives (RAID 0, more namespaces)",
    trade_off: "less depth gives latency and no throughput; more drives cost money and fail more often",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'storage.p99<=1ms'",
    yields_to: &[Cause::DriveThrottled, Cause::NoisyNeighbour, Cause::IopsLimit],
    judge: saturated,
};

/// What the commands show of a storage that serves no more.
struct Full {
    depth: f64,
    trend: Trend,
    share: f64,
    /// Commands a second that storage completes, and bytes.
    rate: f64,
    bandwidth: f64,
}

/// By how much a command's storage time is more than its class's median.
fn slowness(facts: &Facts<'_>, row: &Row) -> f64 {
    row.stage(Stage::Storage) as f64 / facts.class(row).stage_medians[Stage::Storage as usize].max(1) as f64
}

/// Whether storage serves no more; else the figure that says so.
fn full(facts: &Facts<'_>) -> Result<Full, String> {
    let share = facts.share_of(STORAGE);
    if share < STORAGE_SHARE.value {
        return Err(format!("storage is {} of the latency", percent(share)));
    }
    let points: Vec<(f64, f64)> = facts
        .rows
        .iter()
        .filter(|row| row.stage(Stage::Storage) > 0)
        .map(|row| (facts.storage.at(row.submit) as f64, slowness(facts, row)))
        .collect();
    let depth = mean(points.iter().map(|p| p.0)).unwrap_or(0.0);
    if depth < DEEP.value {
        return Err(format!("{} commands are in storage when another comes", number(depth)));
    }
    let logs = points.iter().map(|p| ((p.0 + 1.0).ln(), p.1.max(1e-3).ln()));
    let Some(trend) = trend(logs).filter(|t| t.variance >= 0.01) else {
        return Err(format!(
            "always about {} commands are in storage, and it takes as long each time: whether it would take less with fewer can not be seen in these runs",
            number(depth)
        ));
    };
    if !(GROWS.value..=GROWS_MOST.value).contains(&trend.slope) || trend.r2 < FITS.value {
        return Err(format!(
            "storage time grows with what is in storage by {} (1 is in proportion), which explains {} of how it varies",
            number(trend.slope),
            percent(trend.r2)
        ));
    }
    let rate = facts.storage.len() as f64 * f64::from(facts.one_in) / facts.seconds;
    let carried: f64 = facts.rows.iter().map(|row| f64::from(row.bytes)).sum();
    Ok(Full { depth, trend, share, rate, bandwidth: carried * f64::from(facts.one_in) / facts.seconds })
}

/// Whether the commands are small and random: their mean size, and the share that begins where another ended.
fn small_random(facts: &Facts<'_>) -> (f64, f64) {
    let size = mean(facts.rows.iter().map(|row| f64::from(row.bytes))).unwrap_or(0.0);
    let mut ends: BTreeMap<(usize, u32), u64> = BTreeMap::new();
    let mut follows = 0usize;
    for row in &facts.rows {
        let last = ends.insert((row.queue, row.nsid), row.slba + u64::from(row.nlb));
        follows += usize::from(last == Some(row.slba));
    }
    (size, follows as f64 / facts.rows.len().max(1) as f64)
}

/// How evenly storage completes: the variance of the completions of equal times by their mean (1: at random).
fn evenness(facts: &Facts<'_>) -> Option<(f64, f64)> {
    const EACH: usize = 50;
    let (from, to) = (facts.rows.first()?.submit, facts.rows.iter().map(|row| row.done).max()?);
    let all = facts.storage.over_in(from, to);
    // The ends of a recording have fewer under way.
    let (from, to) = (from + (to - from) / 20, to - (to - from) / 20);
    let least = 10_000_000;
    let step = ((to - from) / (all / EACH).max(1) as i64).max(least);
    let counts: Vec<f64> = (0..(to - from) / step)
        .map(|n| facts.storage.over_in(from + n * step, from + (n + 1) * step) as f64)
        .collect();
    if counts.len() < 8 {
        return None;
    }
    let average = mean(counts.iter().copied())?;
    let variance = mean(counts.iter().map(|c| (c - average).powi(2)))?;
    (average > 0.0).then(|| (variance / average, average * 1e9 / step as f64))
}

const SMALL: Threshold = Threshold {
    name: "small",
    value: 16_384.0,
    unit: "bytes on average",
    why: "above that, bandwidth is met before operations a second are",
};
const RANDOM: Threshold = Threshold {
    name: "random",
    value: 0.5,
    unit: "of the commands follow the one before",
    why: "sequential commands are merged and read ahead by most drives",
};
const EVEN: Threshold = Threshold {
    name: "evenness of completions",
    value: 0.5,
    unit: "variance by mean of equal times (1: at random)",
    why: "a limit lets the same number through in equal times; a drive that is busy does not",
};

pub(super) const IOPS: Rule = Rule {
    cause: Cause::IopsLimit,
    shows: "small random commands wait in storage in proportion to how many are before them, and storage completes the same number in equal times",
    refutes: "the commands are large or sequential, completions are uneven, or storage takes as long with many as with few",
    thresholds: &[&SMALL, &RANDOM, &EVEN, &STORAGE_SHARE, &DEEP, &GROWS, &FITS, &LEAST],
    mitigation: "raise the limit where it is one (bdev_set_qos_limit, the volume's service class), make commands larger (merge, larger blocks), or spread them over more drives",
    trade_off: "a limit is there to protect others on the same drive; larger commands read what is not needed",
    verify: "fabscope diagnose AFTER_HOST.run AFTER_TARGET.run --baseline BEFORE --slo 'storage.p50<=200us'",
    yields_to: &[Cause::NoisyNeighbour, Cause::DriveThrottled],
    judge: iops,
};

fn storage_claim(facts: &Facts<'_>) -> Vec<i64> {
    facts.rows.iter().map(|row| over(row, facts.class(row), STORAGE)).collect()
}

fn in_proportion(full: &Full) -> Evidence {
    Evidence::said(format!(
        "storage time grows in proportion to what is in storage (by {}, where 1 is in proportion; it explains {} of how it varies): {} commands on average",
        number(full.trend.slope),
        percent(full.trend.r2),
        number(full.depth)
    ))
    .of(None, "storage", "")
    .figures(full.trend.slope, Some(0.0), "growth")
}

fn saturated(facts: &Facts<'_>) -> Verdict {
    let full = match full(facts) {
        Ok(full) => full,
        Err(why) => return Verdict::RuledOut(why),
    };
    let (size, follow) = small_random(facts);
    let even = evenness(facts);
    if size <= SMALL.value && follow < RANDOM.value && even.is_some_and(|e| e.0 < EVEN.value) {
        return Verdict::RuledOut(format!(
            "small random commands ({} on average) complete evenly, {} a second: a limit, and no drive that is full",
            bytes(size as u32),
            number(even.map_or(0.0, |e| e.1))
        ));
    }
    let mut evidence = vec![
        Evidence::said(format!("storage is {} of the latency", percent(full.share)))
            .of(None, "storage", "")
            .figures(full.share, Some(STORAGE_SHARE.value), "of latency"),
        in_proportion(&full),
        Evidence::said(format!(
            "whatever is asked, it completes {} commands and {} MiB a second",
            number(full.rate),
            number(full.bandwidth / f64::from(1 << 20))
        ))
        .figures(full.rate, None, "commands a second"),
    ];
    if let Some((object, busy)) = busiest_disk(facts) {
        evidence.push(
            Evidence::said(format!("{object} was busy {} of its time", percent(busy)))
                .of(Some(Side::Target), "disk.busy_time", &object)
                .figures(busy, None, "of the time"),
        );
    }
    Verdict::Holds(Found {
        stage: Stage::Storage,
        subject: busiest_disk(facts).map(|d| d.0),
        claim: Claim::Excess(storage_claim(facts)),
        evidence,
        not_refuted: vec![format!(
            "a drive with room would take as long with many commands as with few; its time grows by {}",
            number(full.trend.slope)
        )],
    })
}

/// The target's drive that was busy most, and which part of its time.
fn busiest_disk(facts: &Facts<'_>) -> Option<(String, f64)> {
    facts
        .timeline
        .lines(Side::Target, "disk", "busy_time")
        .filter_map(|line| Some((line.object.clone(), (line.mean()? / 1_000.0).clamp(0.0, 1.0))))
        .max_by(|a, b| a.1.total_cmp(&b.1))
}

fn iops(facts: &Facts<'_>) -> Verdict {
    let (size, follow) = small_random(facts);
    if size > SMALL.value || follow >= RANDOM.value {
        return Verdict::RuledOut(format!(
            "commands carry {} on average, and {} of them follow the one before: that is not small and random",
            bytes(size as u32),
            percent(follow)
        ));
    }
    let full = match full(facts) {
        Ok(full) => full,
        Err(why) => return Verdict::RuledOut(why),
    };
    let Some((even, rate)) = evenness(facts) else {
        return Verdict::CannotTell("the recording is too short to see how evenly storage completes".into());
    };
    if even >= EVEN.value {
        return Verdict::RuledOut(format!(
            "completions of equal times vary by {} (variance by mean; a limit lets the same number through each time)",
            number(even)
        ));
    }
    Verdict::Holds(Found {
        stage: Stage::Storage,
        subject: None,
        claim: Claim::Excess(storage_claim(facts)),
        evidence: vec![
            Evidence::said(format!(
                "storage completes {} commands of {} on average in each second, and hardly more or fewer at any time (variance by mean {})",
                number(rate),
                bytes(size as u32),
                number(even)
            ))
            .of(None, "storage", "")
            .figures(rate, None, "commands a second"),
            in_proportion(&full),
        ],
        not_refuted: vec!["a drive that is busy completes unevenly; bandwidth is not what is met with small commands".into()],
    })
}

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
const SLOW_COMMANDS: Threshold = Threshold {
    name: "slow commands",
    value: 20.0,
    unit: "commands",
    why: "fewer do not make a speed of their own",
};

pub(super) const INTERNAL: Rule = Rule {
    cause: Cause::DriveInternal,
    shows: "storage has two speeds with a gap between them, for the same commands, whatever is in storage and whatever other namespaces do: the drive works for itself (garbage collection, wear levelling, refresh)",
    refutes: "storage has one speed, the slow ones are explained by what was before them or by a neighbour, or as many commands are held up as long in other stages",
    thresholds: &[&SLOW_LEAST, &SLOW_MOST, &SLOW_COMMANDS, &APART, &BETWEEN, &ELSEWHERE, &LEAST],
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
    let claim = facts
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
    let episodes = super::fabric::merged(slow);
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

const THROTTLES: Threshold = Threshold {
    name: "throttling",
    value: 1.0,
    unit: "count, second or warning",
    why: "the drive itself counts it: one is one",
};
const SLOWER_HOT: Threshold = Threshold {
    name: "storage while throttled",
    value: 1.2,
    unit: "x other times",
    why: "light throttling of a drive that has time to spare costs nothing",
};

pub(super) const THROTTLED: Rule = Rule {
    cause: Cause::DriveThrottled,
    shows: "the drive counts thermal throttling (or warns of its temperature) during the recording, and storage is where the excess is",
    refutes: "the drive's SMART log counts no throttling and no warning, or storage has little of the excess",
    thresholds: &[&THROTTLES, &SLOWER_HOT, &LEAST, &NOT_THERE],
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
    let (hot, cool) =
        super::fabric::split(facts, &super::fabric::merged(while_so), |row| slowness(facts, row));
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
    Threshold { name: "commands of either kind", value: 50.0, unit: "commands", why: "fewer tell nothing" };

pub(super) const NEIGHBOUR: Rule = Rule {
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
    /// The rows beside the busy neighbour, and what is normal beside the quiet one by class median.
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
        rows: busy.iter().map(|l| l.1).collect(),
        normal,
    })
}

/// Either way, for how much a neighbour completes at a time: from and to, ns.
const AROUND: (i64, i64) = (100_000, 5_000_000);
