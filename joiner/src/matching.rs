//! Matches host and target commands one to one, once the clock is known. It would rather leave a command
//! unmatched than match it wrongly.
//!
//! Why a match can not be wrong: a target interval that fits inside a host interval at every offset that is
//! still possible fits at the true one. In truth it lies inside its own host command's interval; and the
//! host intervals of one queue and cid are disjoint. So there is no second one that it could lie in.

use crate::clock::{Clock, Line, SLACK};
use crate::lanes::{Item, Lanes, bounds, hosts_around};
use rayon::prelude::*;

/// A possible pair near the clock's line, with the offsets that it allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    /// Index of the host's item.
    host: u32,
    /// Index of the target's item.
    target: u32,
    low: i64,
    high: i64,
}

/// What became of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It has no partner.
    Alone,
    /// It was matched.
    Matched,
    /// It has more than one possible partner.
    Ambiguous,
    /// A command that is the same on the wire and at the same time does not fit.
    Implausible,
}

/// The matched rows (host, target), and every item's fate, by the item's index.
#[derive(Debug)]
pub(crate) struct Matching {
    pub(crate) pairs: Vec<(u32, u32)>,
    pub(crate) host: Vec<Fate>,
    pub(crate) target: Vec<Fate>,
}

/// A lane's host items and the index of the first, and a piece of its target items and the index of its first.
type Pieces<'a> = (&'a [Item], usize, &'a [Item], usize);

/// Targets whose edges are looked for at a time.
const CHUNK: usize = 1 << 13;

/// All pairs of the same key that fit at some offset near what `near` gives at a target time, in the order
/// of the targets. `near` is given a hint that it may use and keep: times come in order but for jumps.
fn edges(
    host: &Lanes,
    target: &Lanes,
    near: impl Fn(i64, &mut usize) -> (i64, i64) + Sync,
) -> Vec<Vec<Edge>> {
    let mut both: Vec<Pieces<'_>> = Vec::new();
    let mut hosts = host.lanes().peekable();
    for (lane, from, items) in target.lanes() {
        while hosts.peek().is_some_and(|h| h.0 < lane) {
            hosts.next();
        }
        if let Some(&(_, host_from, host_items)) = hosts.peek().filter(|h| h.0 == lane) {
            let chunks = items.chunks(CHUNK).enumerate();
            both.extend(chunks.map(|(n, chunk)| (host_items, host_from, chunk, from + n * CHUNK)));
        }
    }
    // Lanes may be one or many thousands: together they make pieces of work of about one size.
    let mut work: Vec<&[Pieces<'_>]> = Vec::new();
    let (mut from, mut size) = (0, 0);
    for (n, lane) in both.iter().enumerate() {
        size += lane.2.len();
        if size >= CHUNK || n + 1 == both.len() {
            work.push(&both[from..=n]);
            (from, size) = (n + 1, 0);
        }
    }
    work.par_iter()
        .map(|lanes| {
            let mut edges = Vec::with_capacity(lanes.iter().map(|l| l.2.len()).sum());
            let mut of_near = 0;
            for &(hosts, host_from, targets, target_from) in *lanes {
                let mut of_hosts = 0;
                for (n, t) in targets.iter().enumerate() {
                    let (low, high) = near(t.begin, &mut of_near);
                    hosts_around(hosts, t, low, high, &mut of_hosts, |m, h| {
                        let (low, high) = bounds(h, t);
                        edges.push(Edge {
                            host: (host_from + m) as u32,
                            target: (target_from + n) as u32,
                            low,
                            high,
                        });
                    });
                }
            }
            edges
        })
        .collect()
}

/// The edges' target times and bounds, in time order.
fn in_time(target: &Lanes, edges: &[Vec<Edge>]) -> Vec<(i64, i64, i64)> {
    let mut places = vec![0u32; target.items.len()];
    for e in edges.iter().flatten() {
        places[e.target as usize] += 1;
    }
    let mut before = 0;
    for &t in &target.by_time {
        before += std::mem::replace(&mut places[t as usize], before);
    }
    let mut pairs = vec![(0, 0, 0); before as usize];
    for e in edges.iter().flatten() {
        let place = &mut places[e.target as usize];
        pairs[*place as usize] = (target.items[e.target as usize].begin, e.low, e.high);
        *place += 1;
    }
    pairs
}

/// Refines the clock along a line and matches.
pub(crate) fn along(host: &Lanes, target: &Lanes, line: &Line) -> (Clock, Matching) {
    let edges = edges(host, target, |t, hint| {
        let (low, high) = line.at_near(t, hint);
        let more = ((high - low) / 2).max(2 * SLACK);
        (low - more, high + more)
    });
    let pairs = in_time(target, &edges);
    let clock = Clock::refine(line, &pairs);
    drop(pairs);
    let matching = accept(host, target, &edges, &clock);
    (clock, matching)
}

/// Matches by a clock that is known exactly.
pub(crate) fn exactly(host: &Lanes, target: &Lanes, clock: &Clock) -> Matching {
    let edges = edges(host, target, |t, _| {
        let (low, high) = clock.at(t);
        (low - 2 * SLACK, high + 2 * SLACK)
    });
    accept(host, target, &edges, clock)
}

fn accept(host: &Lanes, target: &Lanes, edges: &[Vec<Edge>], clock: &Clock) -> Matching {
    let fits = |e: &Edge| {
        let t = &target.items[e.target as usize];
        let (low, high) = clock.at(t.begin);
        // Slack is for the timestamps; it must not let a short command slip beside its host's interval.
        let slack = SLACK.min((t.end - t.begin) / 2);
        e.low <= low + slack && e.high >= high - slack
    };
    let (mut of_host, mut of_target) = (vec![0u8; host.items.len()], vec![0u8; target.items.len()]);
    let fit: Vec<Vec<bool>> = edges.par_iter().map(|edges| edges.iter().map(fits).collect()).collect();
    let judged = || edges.iter().flatten().zip(fit.iter().flatten());
    for (e, _) in judged().filter(|(_, fits)| **fits) {
        let count = |n: &mut u8| *n = n.saturating_add(1);
        count(&mut of_host[e.host as usize]);
        count(&mut of_target[e.target as usize]);
    }
    let mut matching = Matching {
        pairs: Vec::new(),
        host: of_host.iter().map(|&n| if n > 1 { Fate::Ambiguous } else { Fate::Alone }).collect(),
        target: of_target.iter().map(|&n| if n > 1 { Fate::Ambiguous } else { Fate::Alone }).collect(),
    };
    const NOBODY: u32 = u32::MAX;
    // By the host's rows.
    let rows = host.items.iter().map(|i| i.row as usize + 1).max().unwrap_or(0);
    let mut partners = vec![NOBODY; rows];
    let mut matched = 0;
    for (e, _) in judged().filter(|(_, fits)| **fits) {
        let (h, t) = (e.host as usize, e.target as usize);
        if of_host[h] == 1 && of_target[t] == 1 {
            partners[host.items[h].row as usize] = target.items[t].row;
            matched += 1;
            matching.host[h] = Fate::Matched;
            matching.target[t] = Fate::Matched;
        } else {
            matching.host[h] = Fate::Ambiguous;
            matching.target[t] = Fate::Ambiguous;
        }
    }
    for (e, _) in judged().filter(|(_, fits)| !**fits) {
        let (h, t) = (e.host as usize, e.target as usize);
        let offset = clock.offset(target.items[t].begin).0;
        let overlap = host.items[h].begin <= target.items[t].end + offset
            && target.items[t].begin + offset <= host.items[h].end;
        if overlap && matching.host[h] == Fate::Alone && matching.target[t] == Fate::Alone {
            matching.host[h] = Fate::Implausible;
            matching.target[t] = Fate::Implausible;
        }
    }
    matching.pairs.reserve_exact(matched);
    matching.pairs.extend((0..).zip(partners).filter(|p| p.1 != NOBODY));
    matching
}
