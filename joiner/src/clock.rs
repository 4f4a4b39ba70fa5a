//! Finds the offset between the two machines' clocks from the commands alone, and how sure it is. It
//! matches nothing for good: it only says when a host's clock and a target's clock show the same instant.
//!
//! A command's target interval lies inside its host interval, so each true pair bounds the offset (host time
//! less target time) from both sides. Which pairs are true is not known at first: recordings drop commands
//! and start at different times, so even a key that is seen once on each side may be two commands, and a
//! load on few blocks repeats its keys all the time. But true pairs agree on one line (offset and drift)
//! and false ones do not. So:
//!
//! 1. **Search**: in several short windows of the sparser run, all pairs with the same key vote; the lines
//!    through most intervals are candidates. Commands with few possible partners vote first: a long
//!    target interval fits inside few host intervals, even when every key is the same.
//! 2. **Follow**: each candidate is followed through the whole run, in both directions, in small pieces
//!    that each correct the line; what it explains of the run is its support.
//! 3. **Decide**: pairs that the best candidate does not explain vote again. If a rival explains nearly as
//!    much, the offset is ambiguous, and nothing is matched.
//! 4. **Refine**: all pairs near the line narrow it, piece by piece, to the range that (nearly) all of them
//!    allow. Its half width is the stated uncertainty.

use crate::lanes::{Item, Lanes, bounds, hosts_around, partition_from, targets_inside};
use crate::radix;
use rayon::prelude::*;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// The fastest that two clocks are taken to drift apart: NTP's limit.
const MAX_DRIFT: f64 = 500e-6;
/// What a drift may change by between two pieces of a run, per second of the gap.
const DRIFT_CHANGE: f64 = 50e-6;
/// How far a timestamp may lie beside the moment that it stands for, ns: reading the clock takes time, and
/// the clocks of two CPUs differ a little.
pub(crate) const SLACK: i64 = 1_000;
/// Windows that the search looks at.
const WINDOWS: usize = 8;
/// Commands of a window from which the voters are chosen.
const WINDOW: usize = 2_048;
/// Commands that vote in a window.
const VOTERS: usize = 256;
/// Pairs that vote in a window, at one drift and over all drifts.
const PAIRS: usize = 50_000;
const PAIRS_AND_DRIFTS: usize = 3_000_000;
/// Candidates that are followed, at most.
const CANDIDATES: usize = 8;
/// Commands of a piece of a followed line, and pieces of it, at most.
const PIECE: usize = 32;
const PIECES: usize = 2_048;
/// Longest time over which a drift is measured while following, ns.
const BASELINE: i64 = 20_000_000_000;
/// A piece of the refined clock: its length in time and its least number of pairs.
const REFINED_NS: i64 = 1_000_000_000;
const REFINED_PAIRS: usize = 64;
/// And its largest number of pairs, so that what waits for it fits into memory.
const REFINED_MOST: usize = 1 << 15;

/// What the search came to.
#[derive(Debug)]
pub(crate) enum Search {
    /// A line that explains far more than any other.
    Found(Line),
    /// Two lines explain about as much.
    Ambiguous { first: Support, second: Support },
    /// No line explains enough commands.
    Nothing { first: Support },
}

/// How much of the run a line explains.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Support {
    /// Offset in the middle of what it explains, ns.
    pub(crate) offset: i64,
    /// Commands that it explains, of those looked at.
    pub(crate) explained: u64,
    /// Commands looked at that were within both recordings.
    pub(crate) of: u64,
}

/// An offset that changes along the run, with its bounds.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// By target time.
    knots: Vec<Knot>,
    slope: f64,
    slope_error: f64,
    support: Support,
}

#[derive(Clone, Copy, Debug)]
struct Knot {
    at: i64,
    low: i64,
    high: i64,
}

impl Knot {
    fn middle(&self) -> i64 {
        self.low + (self.high - self.low) / 2
    }
    fn half(&self) -> i64 {
        (self.high - self.low) / 2
    }
}

fn scaled(ns: i64, by: f64) -> i64 {
    // `round` is a call on processors that are not known to have an instruction for it.
    let exactly = ns as f64 * by;
    (exactly + 0.5f64.copysign(exactly)) as i64
}

impl Line {
    /// Bounds of the offset at a time of the target.
    pub(crate) fn at(&self, t: i64) -> (i64, i64) {
        self.at_near(t, &mut 0)
    }

    /// As [`Line::at`]; `hint` is kept from one time to the next, which is quicker where they are close.
    pub(crate) fn at_near(&self, t: i64, hint: &mut usize) -> (i64, i64) {
        let after = partition_from(&self.knots, *hint, |k| k.at <= t);
        *hint = after;
        let (Some(first), Some(last)) = (self.knots.first(), self.knots.last()) else {
            return (0, 0);
        };
        let beyond = |k: &Knot| {
            let middle = scaled(t - k.at, self.slope);
            let wider = scaled((t - k.at).abs(), self.slope_error);
            (k.low + middle - wider, k.high + middle + wider)
        };
        if after == 0 {
            beyond(first)
        } else if after == self.knots.len() {
            beyond(last)
        } else {
            let (a, b) = (&self.knots[after - 1], &self.knots[after]);
            let part = (t - a.at) as f64 / (b.at - a.at).max(1) as f64;
            (a.low + scaled(b.low - a.low, part), a.high + scaled(b.high - a.high, part))
        }
    }

    /// Whether it leaves almost nothing unexplained.
    fn is_whole(&self) -> bool {
        self.support.explained * 10 >= self.support.of * 9
    }

    /// Least-squares slope of the knots within `around` of a time.
    fn slope_near(&self, t: i64, around: i64) -> Option<f64> {
        let from = self.knots.partition_point(|k| k.at < t.saturating_sub(around));
        let to = self.knots.partition_point(|k| k.at <= t.saturating_add(around));
        slope_of(self.knots[from..to].iter().map(|k| (k.at, k.middle())))
    }
}

fn slope_of(points: impl Iterator<Item = (i64, i64)> + Clone) -> Option<f64> {
    let n = points.clone().count() as f64;
    let origin = points.clone().next()?;
    let relative = points.map(|(x, y)| ((x - origin.0) as f64, (y - origin.1) as f64));
    let (mean_x, mean_y) = relative.clone().fold((0.0, 0.0), |m, p| (m.0 + p.0 / n, m.1 + p.1 / n));
    let (up, down) = relative
        .fold((0.0, 0.0), |s, (x, y)| (s.0 + (x - mean_x) * (y - mean_y), s.1 + (x - mean_x) * (x - mean_x)));
    (down > 0.0).then(|| up / down)
}

/// The two sides as voters (the sparser one) and their possible partners.
struct Sides<'a> {
    a: &'a Lanes,
    b: &'a Lanes,
    a_is_host: bool,
    /// Time from the first begin to the last end of `b`.
    b_from: i64,
    b_to: i64,
    /// What a true pair's bounds are apart, roughly.
    width: i64,
}

/// A possible pair: when (`a`'s clock), and which offsets it allows.
#[derive(Clone, Copy, Debug)]
struct Pair {
    x: i64,
    low: i64,
    high: i64,
}

#[derive(Debug)]
struct Window {
    pairs: Vec<Pair>,
    voters: usize,
    /// Rank in time of its middle in `a`, and its time.
    rank: usize,
    center: i64,
    span: i64,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    votes: u32,
    low: i64,
    high: i64,
    slope: f64,
    slope_error: f64,
    window: usize,
}

impl Candidate {
    fn middle(&self) -> i64 {
        self.low + (self.high - self.low) / 2
    }
}

#[derive(Clone, Copy, Debug)]
struct Peak {
    votes: u32,
    low: i64,
    high: i64,
}

/// The stretches that more intervals cover than the stretches beside them, of at least `least` intervals.
/// `events` are twice the value, one more where an interval ends; `other` is scratch.
fn peaks(events: &mut Vec<i64>, other: &mut Vec<i64>, least: u32, found: &mut Vec<Peak>) {
    radix::sort(events, other);
    found.clear();
    let (mut cover, mut start, mut rising) = (0u32, 0, false);
    for &event in events.iter() {
        let value = event >> 1;
        if event & 1 == 0 {
            cover += 1;
            start = value;
            rising = true;
        } else {
            if rising && cover >= least {
                found.push(Peak { votes: cover, low: start, high: value });
            }
            rising = false;
            cover -= 1;
        }
    }
}

fn push_interval(events: &mut Vec<i64>, low: i64, high: i64) {
    if low <= high {
        events.push(low << 1);
        events.push(high << 1 | 1);
    }
}

/// The length of a command, ns, as far as 32 bits go.
fn length(item: &Item) -> u32 {
    u32::try_from(item.end - item.begin).unwrap_or(u32::MAX)
}

/// Hashes words that are hashes already, or small.
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u64(b.into()));
    }
    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(29) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl<'a> Sides<'a> {
    fn new(host: &'a Lanes, target: &'a Lanes) -> Sides<'a> {
        let a_is_host = host.items.len() < target.items.len();
        let (a, b) = if a_is_host { (host, target) } else { (target, host) };
        let b_from = b.by_time.first().map_or(0, |&n| b.items[n as usize].begin);
        let b_to = b.items.iter().map(|i| i.end).max().unwrap_or(0);
        let width = (typical_length(host) - typical_length(target)).clamp(2_000, 10_000_000);
        Sides { a, b, a_is_host, b_from, b_to, width }
    }

    fn pair(&self, a: &Item, b: &Item) -> Pair {
        let (low, high) = if self.a_is_host { bounds(a, b) } else { bounds(b, a) };
        Pair { x: a.begin, low, high }
    }

    /// `a`'s time as the target's, at an offset.
    fn target_time(&self, x: i64, offset: i64) -> i64 {
        if self.a_is_host { x - offset } else { x }
    }

    /// `a`'s time as `b`'s, at an offset.
    fn b_time(&self, x: i64, offset: i64) -> i64 {
        if self.a_is_host { x - offset } else { x + offset }
    }

    fn partners(&self, a: &Item, low: i64, high: i64, mut found: impl FnMut(Pair)) {
        let lane = self.b.lane(a.lane);
        if self.a_is_host {
            targets_inside(lane, a, low, high, |_, b| found(self.pair(a, b)));
        } else {
            hosts_around(lane, a, low, high, &mut 0, |_, b| found(self.pair(a, b)));
        }
    }

    fn windows(&self) -> Vec<Window> {
        let n = self.a.by_time.len();
        let size = if n <= 2 * VOTERS { n } else { WINDOW.min(n / WINDOWS).max(VOTERS) };
        let count = if size == n { 1 } else { WINDOWS };
        let starts: Vec<usize> =
            (0..count).map(|w| if count == 1 { 0 } else { (n - size) * w / (count - 1) }).collect();

        // All possible partners of all windows' commands, grouped by key, by length.
        let mut wanted: HashMap<(u64, u64), u32, BuildHasherDefault<Mixed>> = HashMap::default();
        for &start in &starts {
            for &i in &self.a.by_time[start..start + size] {
                let item = &self.a.items[i as usize];
                let next = wanted.len() as u32;
                wanted.entry((item.lane, item.key)).or_insert(next);
            }
        }
        let found: Vec<(u32, u32, u32)> = (self.b.items.par_iter().enumerate())
            .with_min_len(1 << 14)
            .filter_map(|(i, item)| Some((*wanted.get(&(item.lane, item.key))?, length(item), i as u32)))
            .collect();
        let mut order: Vec<u64> = (0..).zip(&found).map(|(n, f)| u64::from(f.1) << 32 | n).collect();
        radix::by_upper_half(&mut order, found.iter().map(|f| f.1).max().unwrap_or(0));
        let place = |w: u64| w as u32 as usize;
        order.iter_mut().for_each(|w| *w = u64::from(found[place(*w)].0) << 32 | *w & u64::from(u32::MAX));
        radix::by_upper_half(&mut order, wanted.len() as u32);
        let partners: Vec<(u32, u32, u32)> = order.iter().map(|&w| found[place(w)]).collect();

        starts
            .iter()
            .filter_map(|&start| {
                let ranks = start..start + size;
                // Who has how many possible partners: a host command those that are not longer, a target
                // command those that are not shorter.
                let mut voters: Vec<(usize, usize, usize)> = ranks
                    .filter_map(|rank| {
                        let item = &self.a.items[self.a.by_time[rank] as usize];
                        let id = *wanted.get(&(item.lane, item.key))?;
                        let length = length(item);
                        let first = partners.partition_point(|p| p.0 < id);
                        let past = first + partners[first..].partition_point(|p| p.0 <= id);
                        let (from, to) = if self.a_is_host {
                            (first, first + partners[first..past].partition_point(|p| p.1 <= length))
                        } else {
                            (first + partners[first..past].partition_point(|p| p.1 < length), past)
                        };
                        (from < to).then_some((rank, from, to))
                    })
                    .collect();
                // Few partners first; the sort is stable, so equals stay neighbours in time.
                voters.sort_by_key(|v| v.2 - v.1);
                let mut pairs = 0;
                let enough = voters
                    .iter()
                    .take(VOTERS)
                    .take_while(|v| {
                        pairs += v.2 - v.1;
                        pairs <= PAIRS
                    })
                    .count();
                voters.truncate(enough.max(16));
                self.window(voters, &partners)
            })
            .collect()
    }

    fn window(&self, mut voters: Vec<(usize, usize, usize)>, partners: &[(u32, u32, u32)]) -> Option<Window> {
        voters.sort_unstable();
        loop {
            let first = voters.first()?.0;
            let last = voters.last()?.0;
            let begin = |rank: usize| self.a.items[self.a.by_time[rank] as usize].begin;
            let span = begin(last) - begin(first);
            let pairs: usize = voters.iter().map(|v| v.2 - v.1).sum();
            if voters.len() > 64 && pairs * self.drifts(span).len() > PAIRS_AND_DRIFTS {
                let quarter = voters.len() / 4;
                voters = voters[quarter..voters.len() - quarter].to_vec();
                continue;
            }
            let rank = voters[voters.len() / 2].0;
            let mut window = Window {
                pairs: Vec::with_capacity(pairs),
                voters: voters.len(),
                rank,
                center: begin(rank),
                span,
            };
            for &(rank, from, to) in &voters {
                let a = &self.a.items[self.a.by_time[rank] as usize];
                for p in &partners[from..to] {
                    let pair = self.pair(a, &self.b.items[p.2 as usize]);
                    if pair.low <= pair.high {
                        window.pairs.push(pair);
                    }
                }
            }
            return Some(window);
        }
    }

    /// The drifts to try over a span of time: close enough that the right one shifts no pair by more than a
    /// quarter of its width.
    fn drifts(&self, span: i64) -> Vec<f64> {
        let reach = (MAX_DRIFT * span as f64 / self.width as f64).ceil() as i64;
        let reach = reach.clamp(0, 100_000);
        (-reach..=reach).map(|n| n as f64 / reach.max(1) as f64 * MAX_DRIFT).collect()
    }

    /// The lines with most votes in a window, best first, leaving out pairs that `left_out` holds for.
    fn candidates(&self, number: usize, window: &Window, left_out: impl Fn(&Pair) -> bool) -> Vec<Candidate> {
        let pairs: Vec<Pair> = window.pairs.iter().filter(|p| !left_out(p)).copied().collect();
        let drifts = self.drifts(window.span);
        let slope_error = if drifts.len() == 1 {
            MAX_DRIFT
        } else {
            MAX_DRIFT.min(2.0 * self.width as f64 / window.span.max(1) as f64)
        };
        let mut best: Vec<Candidate> = Vec::new();
        let (mut events, mut other, mut found) =
            (Vec::with_capacity(pairs.len() * 2), Vec::new(), Vec::new());
        for slope in drifts {
            events.clear();
            // The pairs of a command stand together.
            let (mut x, mut shift) = (window.center, 0);
            for p in &pairs {
                if p.x != x {
                    (x, shift) = (p.x, scaled(p.x - window.center, slope));
                }
                push_interval(&mut events, p.low - shift, p.high - shift);
            }
            let least = best.first().map_or(1, |b| (b.votes / 2).max(1));
            peaks(&mut events, &mut other, least, &mut found);
            found.sort_unstable_by_key(|p| (std::cmp::Reverse(p.votes), p.low - p.high));
            for peak in found.iter().take(4 * CANDIDATES) {
                let new = Candidate {
                    votes: peak.votes,
                    low: peak.low,
                    high: peak.high,
                    slope,
                    slope_error,
                    window: number,
                };
                keep_best(&mut best, new, self.width);
            }
        }
        best
    }

    /// Follows a line from its window to both ends of the run.
    fn follow(&self, candidate: &Candidate, window: &Window, explained: Option<&Line>) -> Line {
        let n = self.a.by_time.len();
        let longest = PIECE.max(n / PIECES);
        let start = Standing {
            x: window.center,
            middle: candidate.middle(),
            half: ((candidate.high - candidate.low) / 2).max(self.width / 2),
            slope: candidate.slope,
            slope_error: candidate.slope_error,
        };
        let first = if n <= 2 * VOTERS {
            0..n
        } else {
            let from = window.rank.saturating_sub(PIECE / 2).min(n - PIECE);
            from..from + PIECE
        };
        let mut line = Line {
            knots: Vec::new(),
            slope: candidate.slope,
            slope_error: candidate.slope_error,
            support: Support::default(),
        };
        let mut scratch = Scratch::default();
        let at_first = self.piece(first.clone(), &start, explained, &mut line, &mut scratch).unwrap_or(start);
        let mut backward = Vec::new();
        for forward in [false, true] {
            let mut standing = at_first;
            let mut step = PIECE;
            let (mut from, mut to) = (first.start, first.end);
            loop {
                let next = if forward {
                    from = to + step - PIECE;
                    to = (from + PIECE).min(n);
                    (from < n).then_some(from..to)
                } else {
                    let end = (from + PIECE).checked_sub(step).filter(|&e| e > 0);
                    end.map(|to| {
                        from = to.saturating_sub(PIECE);
                        from..to
                    })
                };
                let Some(ranks) = next else { break };
                match self.piece(ranks, &standing, explained, &mut line, &mut scratch) {
                    Some(now) => standing = now.with_slope(&line, forward),
                    None if scratch.inside == 0 => break,
                    None => {}
                }
                step = (step * 2).min(longest);
            }
            if !forward {
                // What was found going back stands last first.
                backward = line.knots.split_off(1.min(line.knots.len()));
            }
        }
        line.knots.extend(backward);
        line.knots.sort_unstable_by_key(|k| k.at);
        line.knots.dedup_by_key(|k| k.at);
        if line.knots.len() >= 2
            && let Some(slope) = line.slope_near(0, i64::MAX)
        {
            line.slope = slope;
            let (a, b) = (line.knots[0], line.knots[line.knots.len() - 1]);
            let error = (a.half() + b.half()) as f64 / (b.at - a.at).max(1) as f64;
            line.slope_error = line.slope_error.min(error);
        }
        line.support.offset = line.knots.get(line.knots.len() / 2).map_or(0, Knot::middle);
        line
    }

    /// One piece of a followed line: where most of its commands agree near where the line should be. Adds a
    /// knot and the support; returns where the line stands now, or nothing when too few agree.
    fn piece(
        &self,
        ranks: std::ops::Range<usize>,
        standing: &Standing,
        explained: Option<&Line>,
        line: &mut Line,
        scratch: &mut Scratch,
    ) -> Option<Standing> {
        let begin = |rank: usize| self.a.items[self.a.by_time[rank] as usize].begin;
        let (from, to) = (begin(ranks.start), begin(ranks.end - 1));
        let x = from + (to - from) / 2;
        let gap = (x - standing.x).abs() + (to - from) / 2;
        let expected = standing.middle + scaled(x - standing.x, standing.slope);
        let tolerance = standing.half + scaled(gap, standing.slope_error + DRIFT_CHANGE) + SLACK;
        scratch.events.clear();
        scratch.pairs.clear();
        scratch.inside = 0;
        for rank in ranks.clone() {
            let a = &self.a.items[self.a.by_time[rank] as usize];
            let shift = scaled(a.begin - x, standing.slope);
            let there = self.b_time(a.begin, expected + shift);
            if (self.b_from..=self.b_to).contains(&there) {
                scratch.inside += 1;
            }
            self.partners(a, expected + shift - tolerance, expected + shift + tolerance, |pair| {
                let low = (pair.low - shift).max(expected - tolerance);
                let high = (pair.high - shift).min(expected + tolerance);
                push_interval(&mut scratch.events, low, high);
                scratch.pairs.push((pair, low, high));
            });
        }
        line.support.of += scratch.inside;
        peaks(&mut scratch.events, &mut scratch.other, 1, &mut scratch.peaks);
        let middle = |p: &Peak| p.low + (p.high - p.low) / 2;
        let peak = scratch.peaks.iter().max_by_key(|p| (p.votes, -(middle(p) - expected).abs())).copied()?;
        let at = middle(&peak);
        let agree = scratch.pairs.iter().filter(|p| p.1 <= at && at <= p.2);
        let supported = match explained {
            None => agree.count(),
            Some(other) => agree.filter(|p| !self.is_explained(&p.0, other)).count(),
        };
        line.support.explained += supported as u64;
        // One command that agrees with itself corrects nothing, unless there are no more.
        if peak.votes < 2 && ranks.len() >= PIECE {
            return None;
        }
        line.knots.push(Knot { at: self.target_time(x, at), low: peak.low, high: peak.high });
        Some(Standing { x, middle: at, half: (peak.high - peak.low) / 2, ..*standing })
    }

    /// Whether a line was followed through most of the voters' run. One that overlaps it by little explains
    /// that little easily.
    fn is_long(&self, line: &Line) -> bool {
        let begin = |n: Option<&u32>| n.map_or(0, |&n| self.a.items[n as usize].begin);
        let span = begin(self.a.by_time.last()) - begin(self.a.by_time.first());
        match (line.knots.first(), line.knots.last()) {
            (Some(first), Some(last)) => (last.at - first.at) * 2 >= span,
            _ => false,
        }
    }

    fn is_explained(&self, pair: &Pair, line: &Line) -> bool {
        let middle = pair.low + (pair.high - pair.low) / 2;
        let (low, high) = line.at(self.target_time(pair.x, middle));
        pair.low <= high + SLACK && pair.high >= low - SLACK
    }
}

/// Where a followed line stands.
#[derive(Clone, Copy, Debug)]
struct Standing {
    x: i64,
    middle: i64,
    half: i64,
    slope: f64,
    slope_error: f64,
}

impl Standing {
    /// Takes the drift from the knots found in this direction, where they tell it better.
    fn with_slope(mut self, line: &Line, forward: bool) -> Standing {
        let Some(&now) = line.knots.last() else { return self };
        // The first knot is where both directions begin.
        let begun = line.knots.len() - 1;
        let oldest = line.knots[..begun].iter().find(|k| {
            let distance = if forward { now.at - k.at } else { k.at - now.at };
            (1..=BASELINE).contains(&distance)
        });
        if let Some(then) = oldest {
            let apart = now.at - then.at;
            let error = (now.half() + then.half()) as f64 / apart.unsigned_abs() as f64;
            if error < self.slope_error {
                let slope = (now.middle() - then.middle()) as f64 / apart as f64;
                self.slope = slope.clamp(-1.2 * MAX_DRIFT, 1.2 * MAX_DRIFT);
                self.slope_error = error.max(1e-6);
            }
        }
        self
    }
}

#[derive(Debug, Default)]
struct Scratch {
    events: Vec<i64>,
    other: Vec<i64>,
    pairs: Vec<(Pair, i64, i64)>,
    peaks: Vec<Peak>,
    /// Commands of the last piece that were within the other recording.
    inside: u64,
}

fn keep_best(best: &mut Vec<Candidate>, new: Candidate, apart: i64) {
    let rank = |c: &Candidate| (c.votes, c.high - c.low);
    if let Some(same) = best.iter().position(|c| (c.middle() - new.middle()).abs() <= apart) {
        if rank(&best[same]) >= rank(&new) {
            return;
        }
        best.remove(same);
    }
    let place = best.iter().position(|c| rank(c) < rank(&new)).unwrap_or(best.len());
    if place < CANDIDATES {
        best.insert(place, new);
        best.truncate(CANDIDATES);
    }
}

/// The median length of the commands of one side, from a sample.
fn typical_length(lanes: &Lanes) -> i64 {
    let step = (lanes.items.len() / 4_096).max(1);
    let mut lengths: Vec<i64> = lanes.items.iter().step_by(step).map(|i| i.end - i.begin).collect();
    if lengths.is_empty() {
        return 0;
    }
    let middle = lengths.len() / 2;
    *lengths.select_nth_unstable(middle).1
}

/// Whether a line that explains `first` is beyond doubt when the best rival explains `second`. A rival that
/// were the truth would explain as much but for chance: the margin is four standard deviations of what
/// chance does to it, and at least four commands. Where keys name no command, a line explains a true pair of
/// another by commands that lie beside it, so a rival that explains half as much is a doubt already.
fn is_decisive(first: Support, second: Support, keys: Keys) -> bool {
    if keys == Keys::OfMany && second.explained * 2 > first.explained {
        return false;
    }
    // A pair known by its place in the TCP stream is worth many.
    let worth = if keys == Keys::Certain { 8.0 } else { 1.0 };
    let missed = 1.0 - (second.explained as f64 / second.of.max(1) as f64).min(1.0);
    let margin = 4.0 * (worth * second.explained as f64 * missed).sqrt();
    let ahead = worth * (first.explained as f64 - second.explained as f64);
    worth * first.explained as f64 >= 5.0 && ahead >= margin.max(4.0)
}

/// What commands of one lane and one key have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// The keys hold TCP stream positions: they are the same command.
    Certain,
    /// They have one cid, so that no two of them are under way at once.
    OneAtATime,
    /// Many are under way at once: there are no cids.
    OfMany,
}

/// Searches the line of clock offsets that explains both sides.
pub(crate) fn search(host: &Lanes, target: &Lanes, keys: Keys) -> Search {
    if host.items.is_empty() || target.items.is_empty() {
        return Search::Nothing { first: Support::default() };
    }
    let sides = Sides::new(host, target);
    let windows = sides.windows();
    let of = |n: usize| sides.candidates(n, &windows[n], |_| false).into_iter().take(3);
    // Mostly the window in the middle tells, and the others need not vote.
    let middle = windows.len() / 2;
    let quick = windows.get(middle).and_then(|window| {
        let candidate = of(middle).next()?;
        let line = sides.follow(&candidate, window, None);
        (line.is_whole() && sides.is_long(&line)).then_some((candidate, line))
    });
    let mut best: Option<Line> = None;
    let mut candidates: Vec<Candidate> = match quick {
        Some((candidate, line)) => {
            best = Some(line);
            vec![candidate]
        }
        None => (0..windows.len()).into_par_iter().flat_map_iter(of).collect(),
    };
    let votes = |c: &Candidate| f64::from(c.votes) / windows[c.window].voters.max(16) as f64;
    candidates.sort_by(|a, b| votes(b).total_cmp(&votes(a)));
    let mut followed = 0;
    for candidate in &candidates {
        let window = &windows[candidate.window];
        let known = best.as_ref().is_some_and(|line| {
            let middle = candidate.middle();
            let (low, high) = line.at(sides.target_time(window.center, middle));
            candidate.low <= high + SLACK && candidate.high >= low - SLACK
        });
        let hopeless = best.is_some() && votes(candidate) < votes(&candidates[0]) / 4.0;
        // A line that leaves almost nothing unexplained can only have rivals, and they are looked for below.
        let whole = best.as_ref().is_some_and(Line::is_whole);
        if known || hopeless || whole || followed == CANDIDATES {
            continue;
        }
        followed += 1;
        let line = sides.follow(candidate, window, None);
        if best.as_ref().is_none_or(|b| line.support.explained > b.support.explained) {
            best = Some(line);
        }
    }
    let Some(best) = best else { return Search::Nothing { first: Support::default() } };

    // What the best line does not explain votes again.
    // A rival of a line that explains most of a run, and little less than it, is seen all along a third of
    // the run at least, so every other window is enough to find it.
    let every = if windows.len() == WINDOWS && best.is_whole() && sides.is_long(&best) { 2 } else { 1 };
    let mut rivals: Vec<Candidate> = (windows.par_iter().enumerate().rev())
        .step_by(every)
        .flat_map_iter(|(n, w)| sides.candidates(n, w, |p| sides.is_explained(p, &best)).into_iter().take(3))
        .collect();
    rivals.sort_by(|a, b| votes(b).total_cmp(&votes(a)));
    let mut second = Support::default();
    for (n, rival) in rivals.iter().enumerate() {
        let window = &windows[rival.window];
        let support = if n < CANDIDATES && rival.votes >= 3 && votes(rival) * 4.0 >= votes(&candidates[0]) {
            sides.follow(rival, window, Some(&best)).support
        } else {
            let share = f64::from(rival.votes) / window.voters.max(1) as f64;
            Support {
                offset: rival.middle(),
                explained: (share * best.support.of as f64) as u64,
                of: best.support.of,
            }
        };
        if support.explained > second.explained {
            second = support;
        }
    }
    let first = best.support;
    if is_decisive(first, second, keys) {
        Search::Found(best)
    } else if first.explained >= 5 {
        Search::Ambiguous { first, second }
    } else {
        Search::Nothing { first }
    }
}

/// The clock of a joined run: the offset, host time less target time, piece by piece.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
struct Piece {
    /// Target time from which on it holds, and of its middle.
    from: i64,
    center: i64,
    /// The bounds by drift, for every drift tried that suits all pairs: together, what is possible.
    fits: Vec<Fit>,
}

/// Bounds of the offset in the middle of a piece, at one drift.
#[derive(Clone, Copy, Debug)]
struct Fit {
    low: i64,
    high: i64,
    slope: f64,
}

impl Piece {
    fn at(&self, t: i64) -> (i64, i64) {
        let bounds = self.fits.iter().map(|f| {
            let shift = scaled(t - self.center, f.slope);
            (f.low + shift, f.high + shift)
        });
        bounds.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0))
    }

    fn middle(&self) -> i64 {
        let (low, high) = self.at(self.center);
        low + (high - low) / 2
    }
}

impl Clock {
    /// Both runs were recorded on one machine: one clock.
    pub(crate) fn same() -> Clock {
        Clock { pieces: vec![Piece { from: 0, center: 0, fits: vec![Fit { low: 0, high: 0, slope: 0.0 }] }] }
    }

    /// What is possible within `reach` of a line.
    pub(crate) fn around(line: &Line, reach: i64) -> Clock {
        let piece = |k: &Knot| Piece {
            from: k.at,
            center: k.at,
            fits: vec![Fit { low: k.low - reach, high: k.high + reach, slope: line.slope }],
        };
        Clock { pieces: line.knots.iter().map(piece).collect() }
    }

    /// What pairs that are sure allow: target times and bounds, in time order. `None` without a pair.
    pub(crate) fn through(pairs: &[(i64, i64, i64)]) -> Option<Clock> {
        let knots: Vec<Knot> = pairs
            .chunks(PIECE)
            .map(|pairs| {
                let at = pairs[pairs.len() / 2].0;
                let drifted = |t: i64| scaled((t - at).abs(), MAX_DRIFT);
                let low = pairs.iter().map(|p| p.1 - drifted(p.0)).fold(i64::MIN, i64::max);
                let high = pairs.iter().map(|p| p.2 + drifted(p.0)).fold(i64::MAX, i64::min);
                // Timestamps lie a little beside their moments, so bounds may cross.
                Knot { at, low: low.min(high), high: high.max(low) }
            })
            .collect();
        let (first, last) = (knots.first()?, knots.last()?);
        let span = (last.at - first.at).max(1) as f64;
        let error = ((first.half() + last.half()) as f64 / span).clamp(1e-6, MAX_DRIFT);
        let slope = slope_of(knots.iter().map(|k| (k.at, k.middle()))).unwrap_or(0.0);
        let slope = slope.clamp(-MAX_DRIFT, MAX_DRIFT);
        let line = Line { knots, slope, slope_error: error, support: Support::default() };
        Some(Clock::refine(&line, pairs))
    }

    /// Narrows a line to what the pairs near it allow. `pairs` are target times and bounds, in time order.
    pub(crate) fn refine(line: &Line, pairs: &[(i64, i64, i64)]) -> Clock {
        let mut pieces = Vec::new();
        let mut rest = pairs;
        while let Some(&(from, ..)) = rest.first() {
            let in_time = rest.partition_point(|p| p.0 < from + REFINED_NS);
            let mut size = in_time.max(REFINED_PAIRS).min(rest.len());
            if rest.len() - size < REFINED_PAIRS {
                size = rest.len();
            }
            let (now, later) = rest.split_at(size);
            pieces.push(refine_piece(line, now));
            rest = later;
        }
        Clock { pieces }
    }

    /// Nothing is known.
    pub(crate) fn empty() -> Clock {
        Clock { pieces: Vec::new() }
    }

    /// Bounds of the offset when a target's command began, by the piece that it ended in. `hint` is kept from one
    /// command to the next, which is quicker where they are close.
    pub(crate) fn of(&self, target: &Item, hint: &mut usize) -> (i64, i64) {
        *hint = partition_from(&self.pieces, *hint, |p| p.from <= target.end);
        self.pieces.get(hint.saturating_sub(1)).map_or((0, 0), |p| p.at(target.begin))
    }

    /// Whether nothing is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    fn piece(&self, t: i64) -> Option<&Piece> {
        let after = self.pieces.partition_point(|p| p.from <= t);
        self.pieces.get(after.saturating_sub(1))
    }

    /// Bounds of the offset at a time of the target.
    pub(crate) fn at(&self, t: i64) -> (i64, i64) {
        self.piece(t).map_or((0, 0), |p| p.at(t))
    }

    /// The offset and its uncertainty at a time of the target.
    pub(crate) fn offset(&self, t: i64) -> (i64, i64) {
        let (low, high) = self.at(t);
        (low + (high - low) / 2, (high - low + 1) / 2)
    }

    /// A host time as the target's.
    pub(crate) fn target_time(&self, h: i64) -> i64 {
        // The offset changes by less than a thousandth of a time difference, so three steps are exact.
        let mut t = h - self.pieces.first().map_or(0, Piece::middle);
        for _ in 0..3 {
            t = h - self.offset(t).0;
        }
        t
    }

    /// The drift between the clocks over the run, host less target.
    pub(crate) fn drift(&self) -> f64 {
        match &self.pieces[..] {
            [] => 0.0,
            [one] => {
                let slopes = one.fits.iter().map(|f| (f.slope, f.slope));
                slopes
                    .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
                    .map_or(0.0, |(least, most)| (least + most) / 2.0)
            }
            many => slope_of(many.iter().map(|p| (p.center, p.middle()))).unwrap_or(0.0),
        }
    }
}

/// A pair: when it ended on the target, and when it began there with the offsets that it allows.
pub(crate) type Ended = (i64, (i64, i64, i64));

/// Refines a clock along a line by pairs that come in parts, in the order in which they end on the target. The
/// pieces are the same however the pairs are parted.
#[derive(Debug)]
pub(crate) struct Refiner {
    upto: i64,
}

impl Default for Refiner {
    fn default() -> Refiner {
        Refiner { upto: i64::MIN }
    }
}

impl Refiner {
    /// Pairs that end before this are used up: the clock is final there.
    pub(crate) fn upto(&self) -> i64 {
        self.upto
    }

    /// Uses the pairs (end, then begin and bounds) that are not used up yet, all of them that end before
    /// `complete`. `whole` says that no others are to be waited for. Returns up to where the clock is final.
    pub(crate) fn refine(
        &mut self,
        line: &Line,
        pairs: &[Ended],
        complete: i64,
        whole: bool,
        clock: &mut Clock,
    ) -> i64 {
        let mut pieces: Vec<&[Ended]> = Vec::new();
        let mut rest = pairs;
        while let Some(&(from, _)) = rest.first() {
            let in_time = rest.partition_point(|p| p.0 < from.saturating_add(REFINED_NS));
            let mut size = in_time.clamp(REFINED_PAIRS, REFINED_MOST).min(rest.len());
            size += rest[size..].iter().take_while(|p| p.0 == rest[size - 1].0).count();
            if rest.len() - size < REFINED_PAIRS {
                if !whole {
                    break;
                }
                size = rest.len();
            }
            let (now, later) = rest.split_at(size);
            pieces.push(now);
            rest = later;
        }
        clock.pieces.par_extend(pieces.into_par_iter().map(|piece| {
            let pairs: Vec<(i64, i64, i64)> = piece.iter().map(|p| p.1).collect();
            Piece { from: piece[0].0, ..refine_piece(line, &pairs) }
        }));
        self.upto = rest.first().map_or(complete, |p| p.0).max(self.upto);
        self.upto
    }
}

fn refine_piece(line: &Line, pairs: &[(i64, i64, i64)]) -> Piece {
    let (from, to) = pairs.iter().fold((i64::MAX, i64::MIN), |b, p| (b.0.min(p.0), b.1.max(p.0)));
    let center = from + (to - from) / 2;
    let mut slopes: Vec<f64> = [1, 5, 20]
        .iter()
        .filter_map(|seconds| line.slope_near(center, (to - from) + seconds * 1_000_000_000))
        .collect();
    slopes.push(line.slope);
    if line.knots.len() < 8 {
        slopes.extend((-64..=64).map(|n| line.slope + line.slope_error * f64::from(n) / 32.0));
    }
    let shifted = |p: &(i64, i64, i64), slope: f64| {
        let shift = scaled(p.0 - center, slope);
        (p.1 - shift, p.2 - shift)
    };
    slopes.retain(|s| s.abs() <= 1.2 * MAX_DRIFT);
    let fits: Vec<Fit> = slopes
        .iter()
        .map(|&slope| {
            let (low, high) = pairs
                .iter()
                .map(|p| shifted(p, slope))
                .fold((i64::MIN, i64::MAX), |b, p| (b.0.max(p.0), b.1.min(p.1)));
            Fit { low, high, slope }
        })
        .filter(|f| f.low <= f.high)
        .collect();
    if !fits.is_empty() {
        return Piece { from, center, fits };
    }
    // Otherwise the one that suits most.
    let step = (pairs.len() / 4_096).max(1);
    let (mut events, mut other, mut found) = (Vec::new(), Vec::new(), Vec::new());
    let mut most = |slope: f64, step: usize| {
        events.clear();
        for p in pairs.iter().step_by(step) {
            let (low, high) = shifted(p, slope);
            push_interval(&mut events, low, high);
        }
        peaks(&mut events, &mut other, 1, &mut found);
        found.iter().copied().max_by_key(|p| (p.votes, p.high - p.low))
    };
    let best = slopes
        .iter()
        .map(|&slope| (most(slope, step).map_or((0, 0), |p| (p.votes, p.high - p.low)), slope))
        .max_by_key(|b| b.0);
    let slope = best.map_or(line.slope, |b| b.1);
    let (low, high) = most(slope, 1).map_or_else(|| line.at(center), |p| (p.low, p.high));
    Piece { from, center, fits: vec![Fit { low, high, slope }] }
}
