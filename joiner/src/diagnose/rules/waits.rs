//! How long threads waited for a CPU, and how much of what made commands slow that can be. It names no cause.

use super::super::facts::{Facts, Row};
use crate::timeline::Line;
use run_format::Side;
use std::collections::BTreeMap;

/// The share of the time in which what works on commands waited for a CPU, over time.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// In order, none within another: from when to when, and the share.
    spans: Vec<(i64, i64, f64)>,
}

impl Waits {
    /// Of several lines of shares, the largest at each time. A command is worked on by one thread at a time, so that it
    /// waits no longer than the one that waits most.
    pub(super) fn of<'s>(lines: impl Iterator<Item = &'s [(i64, i64, f64)]> + Clone) -> Waits {
        let mut times: Vec<i64> = lines.clone().flatten().flat_map(|span| [span.0, span.1]).collect();
        times.sort_unstable();
        times.dedup();
        let at = |line: &[(i64, i64, f64)], t: i64| {
            let next = line.partition_point(|span| span.1 <= t);
            line.get(next).filter(|span| span.0 <= t).map_or(0.0, |span| span.2.clamp(0.0, 1.0))
        };
        let largest = |t: i64| lines.clone().map(|line| at(line, t)).fold(0.0, f64::max);
        let spans = times.windows(2).map(|pair| (pair[0], pair[1], largest(pair[0])));
        Waits { spans: spans.filter(|span| span.2 > 0.0).collect() }
    }

    /// Of a side's process: of its threads that work or would like to.
    pub(super) fn of_threads(facts: &Facts<'_>, side: Side) -> Waits {
        let lines: Vec<Vec<(i64, i64, f64)>> = threads(facts, side).into_iter().map(shares).collect();
        Waits::of(lines.iter().map(Vec::as_slice))
    }

    /// No more of what each row is slower by than such waits can have made it: in each span of time they last their share
    /// of it, and hold up the commands in flight meanwhile, which are no more than were in flight in the span when most
    /// were. What is beyond is taken off all rows of that time alike.
    pub(super) fn bound(&self, facts: &Facts<'_>, claim: &[i64]) -> Vec<i64> {
        let mut claimed = vec![0.0f64; self.spans.len()];
        for (n, row) in facts.rows.iter().enumerate() {
            let length = (row.end - row.begin).max(1) as f64;
            for (span, from, to) in self.touched(row.begin, row.end) {
                claimed[span] += claim[n] as f64 * (to - from) as f64 / length;
            }
        }
        let held_up = self.held_up(facts);
        let kept: Vec<f64> =
            claimed.iter().zip(&held_up).map(|(claimed, most)| (most / claimed.max(1.0)).min(1.0)).collect();
        let bounded = |(n, row): (usize, &Row)| {
            let length = (row.end - row.begin).max(1) as f64;
            let share: f64 = self
                .touched(row.begin, row.end)
                .map(|(span, from, to)| kept[span] * (to - from) as f64 / length)
                .sum();
            (claim[n] as f64 * share) as i64
        };
        facts.rows.iter().enumerate().map(bounded).collect()
    }

    /// By how much the waits of each span make commands slower altogether at most, ns.
    fn held_up(&self, facts: &Facts<'_>) -> Vec<f64> {
        let changes = facts.rows.iter().flat_map(|row| [(row.begin, 1i64), (row.end.max(row.begin), -1)]);
        let mut changes: Vec<(i64, i64)> = changes.collect();
        changes.sort_unstable();
        // For how long so many were in flight, by span.
        let mut levels: Vec<BTreeMap<i64, i64>> = vec![BTreeMap::new(); self.spans.len()];
        let mut in_flight = 0;
        for pair in changes.windows(2) {
            in_flight += pair[0].1;
            if in_flight > 0 {
                for (span, from, to) in self.touched(pair[0].0, pair[1].0) {
                    *levels[span].entry(in_flight).or_default() += to - from;
                }
            }
        }
        let most = |(span, levels): (&(i64, i64, f64), BTreeMap<i64, i64>)| {
            let mut left = span.2 * (span.1 - span.0) as f64;
            let mut sum = 0.0;
            for (in_flight, time) in levels.into_iter().rev() {
                let taken = left.min(time as f64);
                sum += taken * in_flight as f64;
                left -= taken;
            }
            sum
        };
        self.spans.iter().zip(levels).map(most).collect()
    }

    /// The spans that a stretch of time touches, each with the part that it shares.
    fn touched(&self, from: i64, to: i64) -> impl Iterator<Item = (usize, i64, i64)> {
        let first = self.spans.partition_point(|span| span.1 <= from);
        let rest = self.spans[first..].iter().enumerate();
        rest.take_while(move |(_, span)| span.0 < to)
            .map(move |(n, span)| (first + n, from.max(span.0), to.min(span.1)))
    }
}

/// The lines of how long each thread of a side's process that works or would like to waited for a CPU; none where it was not
/// sampled, as of the kernel, which is no process.
pub(super) fn threads<'f>(facts: &'f Facts<'_>, side: Side) -> Vec<&'f Line> {
    /// Threads that neither run nor wait for so much of the time do not do the I/O.
    const WORKS: f64 = 0.05;
    let ran = |object: &str| {
        facts.timeline.line(side, "threads", "run_time", object).and_then(Line::mean).unwrap_or(0.0)
    };
    let works = |line: &&Line| (line.mean().unwrap_or(0.0) + ran(&line.object)) / 1e9 >= WORKS;
    facts.timeline.lines(side, "threads", "run_delay").filter(works).collect()
}

/// A line of nanoseconds a second as shares of the time.
pub(super) fn shares(line: &Line) -> Vec<(i64, i64, f64)> {
    line.spans.iter().map(|s| (s.from, s.to, s.value / 1e9)).collect()
}
