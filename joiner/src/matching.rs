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

/// All pairs of the same key that fit at some offset near what `near` gives at a target time.
fn edges(host: &Lanes, target: &Lanes, near: impl Fn(i64) -> (i64, i64) + Sync) -> Vec<Edge> {
    let mut both: Vec<(&[Item], usize, &[Item], usize)> = Vec::new();
    let mut hosts = host.lanes().peekable();
    for (lane, from, items) in target.lanes() {
        while hosts.peek().is_some_and(|h| h.0 < lane) {
            hosts.next();
        }
        if let Some(&(_, host_from, host_items)) = hosts.peek().filter(|h| h.0 == lane) {
            both.push((host_items, host_from, items, from));
        }
    }
    both.par_iter()
        .with_min_len(16)
        .fold(Vec::new, |mut edges, &(hosts, host_from, targets, target_from)| {
            for (n, t) in targets.iter().enumerate() {
                let (low, high) = near(t.begin);
                hosts_around(hosts, t, low, high, |m, h| {
                    let (low, high) = bounds(h, t);
                    edges.push(Edge {
                        host: (host_from + m) as u32,
                        target: (target_from + n) as u32,
                        low,
                        high,
                    });
                });
            }
            edges
        })
        .reduce(Vec::new, |mut a, mut b| {
            a.append(&mut b);
            a
        })
}

/// Refines the clock along a line and matches.
pub(crate) fn along(host: &Lanes, target: &Lanes, line: &Line) -> (Clock, Matching) {
    let edges = edges(host, target, |t| {
        let (low, high) = line.at(t);
        let more = ((high - low) / 2).max(2 * SLACK);
        (low - more, high + more)
    });
    let mut pairs: Vec<(i64, i64, i64)> =
        edges.iter().map(|e| (target.items[e.target as usize].begin, e.low, e.high)).collect();
    pairs.par_sort_unstable();
    let clock = Clock::refine(line, &pairs);
    drop(pairs);
    let matching = accept(host, target, &edges, &clock);
    (clock, matching)
}

/// Matches by a clock that is known exactly.
pub(crate) fn exactly(host: &Lanes, target: &Lanes, clock: &Clock) -> Matching {
    let edges = edges(host, target, |t| {
        let (low, high) = clock.at(t);
        (low - 2 * SLACK, high + 2 * SLACK)
    });
    accept(host, target, &edges, clock)
}

fn accept(host: &Lanes, target: &Lanes, edges: &[Edge], clock: &Clock) -> Matching {
    let fits = |e: &Edge| {
        let t = &target.items[e.target as usize];
        let (low, high) = clock.at(t.begin);
        // Slack is for the timestamps; it must not let a short command slip beside its host's interval.
        let slack = SLACK.min((t.end - t.begin) / 2);
        e.low <= low + slack && e.high >= high - slack
    };
    let (mut of_host, mut of_target) = (vec![0u8; host.items.len()], vec![0u8; target.items.len()]);
    let fit: Vec<bool> = edges.par_iter().with_min_len(4096).map(fits).collect();
    for (e, _) in edges.iter().zip(&fit).filter(|(_, fits)| **fits) {
        let count = |n: &mut u8| *n = n.saturating_add(1);
        count(&mut of_host[e.host as usize]);
        count(&mut of_target[e.target as usize]);
    }
    let mut matching = Matching {
        pairs: Vec::with_capacity(edges.len()),
        host: of_host.iter().map(|&n| if n > 1 { Fate::Ambiguous } else { Fate::Alone }).collect(),
        target: of_target.iter().map(|&n| if n > 1 { Fate::Ambiguous } else { Fate::Alone }).collect(),
    };
    for (e, _) in edges.iter().zip(&fit).filter(|(_, fits)| **fits) {
        let (h, t) = (e.host as usize, e.target as usize);
        if of_host[h] == 1 && of_target[t] == 1 {
            matching.pairs.push((host.items[h].row, target.items[t].row));
            matching.host[h] = Fate::Matched;
            matching.target[t] = Fate::Matched;
        } else {
            matching.host[h] = Fate::Ambiguous;
            matching.target[t] = Fate::Ambiguous;
        }
    }
    for (e, _) in edges.iter().zip(&fit).filter(|(_, fits)| !**fits) {
        let (h, t) = (e.host as usize, e.target as usize);
        let offset = clock.offset(target.items[t].begin).0;
        let overlap = host.items[h].begin <= target.items[t].end + offset
            && target.items[t].begin + offset <= host.items[h].end;
        if overlap && matching.host[h] == Fate::Alone && matching.target[t] == Fate::Alone {
            matching.host[h] = Fate::Implausible;
            matching.target[t] = Fate::Implausible;
        }
    }
    matching.pairs.par_sort_unstable();
    matching
}
