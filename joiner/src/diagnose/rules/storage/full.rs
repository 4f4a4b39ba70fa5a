//! A drive that serves no more: because it is full, or because of a limit.

use super::super::super::Evidence;
use super::super::super::cause::Cause;
use super::super::super::facts::{Facts, Row};
use super::super::super::figures::{Trend, mean, percentile, trend};
use super::super::{Claim, Found, LEAST, Rule, Threshold, Verdict, number, percent};
use super::{STORAGE, slowness, storage_claim};
use crate::table::bytes;
use run_format::{Side, Stage};
use std::collections::BTreeMap;

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

pub(in super::super) const SATURATED: Rule = Rule {
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

/// Whether storage serves no more; else the figure that says so.
fn full(facts: &Facts<'_>) -> Result<Full, String> {
    let share = facts.share_of(STORAGE);
    if share < STORAGE_SHARE.value {
        return Err(format!("storage is {} of the latency", percent(share)));
    }
    // What was in storage while nothing was over for long took longer for a reason of its own.
    let still = facts.storage.standstills();
    let stood_still = |row: &Row| {
        let next = still.partition_point(|s| s.1 <= row.submit);
        still.get(next).is_some_and(|s| s.0 < row.done)
    };
    let points: Vec<(f64, f64)> = facts
        .rows
        .iter()
        .filter(|row| row.stage(Stage::Storage) > 0 && !stood_still(row))
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

/// Whether the commands are small and random: the mean size of all that storage completes, also for others than this
/// host, and the share that begins where another ended.
fn small_random(facts: &Facts<'_>) -> (f64, f64) {
    let size = facts.bytes_in_storage().unwrap_or(0.0);
    let mut ends: BTreeMap<(usize, u32), u64> = BTreeMap::new();
    let mut follows = 0usize;
    for row in &facts.rows {
        let last = ends.insert((row.queue, row.nsid), row.slba + u64::from(row.nlb));
        follows += usize::from(last == Some(row.slba));
    }
    (size, follows as f64 / facts.rows.len().max(1) as f64)
}

/// How evenly storage completes: how the completions of equal times spread by their median (1: at random), and how many
/// there are a second. The spread is taken from the middle half of them: a machine that is away for some milliseconds
/// leaves a few times without completions, and the next with twice as many, which says nothing of the drive.
fn evenness(facts: &Facts<'_>) -> Option<(f64, f64)> {
    const EACH: usize = 50;
    /// The middle half of a normal distribution is so many standard deviations wide.
    const WIDE: f64 = 1.349;
    let (from, to) = (facts.rows.first()?.submit, facts.rows.iter().map(|row| row.done).max()?);
    let all = facts.storage.over_in(from, to);
    // The ends of a recording have fewer under way.
    let (from, to) = (from + (to - from) / 20, to - (to - from) / 20);
    let least = 10_000_000;
    let step = ((to - from) / (all / EACH).max(1) as i64).max(least);
    let mut counts: Vec<i64> = (0..(to - from) / step)
        .map(|n| facts.storage.over_in(from + n * step, from + (n + 1) * step) as i64)
        .collect();
    if counts.len() < 8 {
        return None;
    }
    counts.sort_unstable();
    let middle = percentile(&counts, 0.5) as f64;
    let wide = (percentile(&counts, 0.75) - percentile(&counts, 0.25)) as f64 / WIDE;
    (middle > 0.0).then(|| (wide * wide / middle, middle * 1e9 / step as f64))
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
    value: 0.2,
    unit: "spread (variance by median, of the middle half) of equal times (1: at random)",
    why: "a limit lets the same number through in equal times (0.01 and less here, also SPDK's); a drive that is busy does not (0.4 and more, where 16 commands wait for each other); a machine that is away now and then changes a few of them only",
};

pub(in super::super) const IOPS: Rule = Rule {
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
            "completions of equal times vary by {} (variance by median of the middle half; a limit lets the same number through each time)",
            number(even)
        ));
    }
    Verdict::Holds(Found {
        stage: Stage::Storage,
        subject: None,
        claim: Claim::Excess(storage_claim(facts)),
        evidence: vec![
            Evidence::said(format!(
                "storage completes {} commands of {} on average in each second, and hardly more or fewer at any time (variance by median {})",
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
