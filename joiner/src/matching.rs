//! Matches host and target commands one to one, once the clock is known. It would rather leave a command
//! unmatched than match it wrongly.
//!
//! Why a match can not be wrong: a target interval that fits inside a host interval at every offset that is
//! still possible fits at the true one. In truth it lies inside its own host command's interval; and the
//! host intervals of one queue and cid are disjoint. So there is no second one that it could lie in.
//!
//! Runs that do not fit into memory are matched part after part, in the order in which commands end. Each part
//! decides what no later command can change, and what it does not decide is given to it again with the next.
//! A part decides the same whether it is one of many or all there is:
//! - the clock is refined by pairs in the order in which they end on the target, of which every part knows all
//!   up to a time;
//! - a host command is decided when every target command that could lie in it is known, all of which end
//!   before it;
//! - a target command without a partner is decided when a later command of its queue and cid has begun on the
//!   host, or all of the host's are known: no command that ends later can hold it.

use crate::clock::{Clock, Ended, Line, Refiner, SLACK};
use crate::lanes::{Item, Lanes, bounds, hosts_around};
use crate::radix;
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

/// What a target's row that was given before is known to be, so that it ends no better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Nothing.
    #[default]
    Clean,
    /// A host command that was decided could have been its partner.
    Spoiled,
    /// A host command that was decided contradicts it.
    Contradicted,
}

/// How far the commands of a part are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    /// Every host command that ends before this is in this part or was decided, on the host's clock.
    pub(crate) host: i64,
    /// The same of the target.
    pub(crate) target: i64,
    /// No command comes after this part.
    pub(crate) all: bool,
    /// Decide what can be decided even though later commands might change it: there is no room to wait.
    pub(crate) force: bool,
}

impl Known {
    /// Everything.
    pub(crate) const ALL: Known = Known { host: i64::MAX, target: i64::MAX, all: true, force: false };
}

/// What one part came to: the matched rows (host, target) by the host's rows, and the fates of all items by their
/// indices, `None` where they are not decided yet.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) pairs: Vec<(u32, u32)>,
    pub(crate) host: Vec<Option<Fate>>,
    pub(crate) target: Vec<Option<Fate>>,
    /// What is to be remembered of targets' rows that are not decided.
    pub(crate) marks: Vec<(u32, Mark)>,
    /// Target commands that ended before this were given up waiting for, where it was forced.
    pub(crate) given_up: Option<i64>,
}

/// How long a response may take from target to host without its command missing the refinement of the clock, ns.
/// Only where a run is matched in parts.
const ON_THE_WAY: i64 = 5_000_000;

/// What goes on from part to part.
#[derive(Debug)]
pub(crate) struct Matcher<'a> {
    /// The line along which the clock is refined; none where it is known exactly.
    line: Option<&'a Line>,
    refiner: Refiner,
    clock: Clock,
}

impl<'a> Matcher<'a> {
    /// Refines the clock along a line, and matches by it.
    pub(crate) fn along(line: &'a Line) -> Matcher<'a> {
        Matcher { line: Some(line), refiner: Refiner::default(), clock: Clock::empty() }
    }

    /// Matches by the clock of one machine.
    pub(crate) fn of_one_machine() -> Matcher<'a> {
        Matcher { line: None, refiner: Refiner::default(), clock: Clock::same() }
    }

    /// The clock as far as it is known.
    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The clock.
    pub(crate) fn into_clock(self) -> Clock {
        self.clock
    }

    /// Which offsets are looked at, at a time of the target.
    fn near(&self, t: i64, hint: &mut usize) -> (i64, i64) {
        match self.line {
            Some(line) => {
                let (low, high) = line.at_near(t, hint);
                let more = ((high - low) / 2).max(2 * SLACK);
                (low - more, high + more)
            }
            None => (-2 * SLACK, 2 * SLACK),
        }
    }

    /// Matches what a part decides. `marks` are those of the target's rows, as earlier parts left them.
    pub(crate) fn part(&mut self, host: &Lanes, target: &Lanes, marks: &[Mark], known: Known) -> Part {
        let edges = edges(host, target, |t, hint| self.near(t, hint));
        // All pairs of targets that end before this are among the edges.
        let mut complete = match known.all {
            true => i64::MAX,
            false => known.target.min(self.target_time(known.host.saturating_sub(ON_THE_WAY))),
        };
        if let Some(line) = self.line {
            let pairs = in_order_of_end(target, &edges, self.refiner.upto(), complete);
            let whole = known.all || known.force;
            complete = self.refiner.refine(line, &pairs, complete, whole, &mut self.clock);
        }
        self.accept(host, target, &edges, marks, complete, known)
    }

    /// The earliest that a host's time may be on the target.
    fn target_time(&self, h: i64) -> i64 {
        let mut hint = 0;
        let mut t = h.saturating_sub(self.near(0, &mut hint).1);
        for _ in 0..4 {
            t = h.saturating_sub(self.near(t, &mut hint).1);
        }
        t
    }

    /// `decided`: targets that end before this are.
    fn accept(
        &self,
        host: &Lanes,
        target: &Lanes,
        edges: &[Vec<Edge>],
        marks: &[Mark],
        decided: i64,
        known: Known,
    ) -> Part {
        let mark = |t: usize| marks.get(target.items[t].row as usize).copied().unwrap_or_default();
        // Every target that can lie in a host command that ends before this is decided.
        let host_decided = match known.all {
            true => i64::MAX,
            false => decided.saturating_add(self.near(decided, &mut 0).0 - 2 * SLACK),
        };
        let done = |h: usize| known.all || host.items[h].end < host_decided;
        let over = |t: usize| known.all || target.items[t].end < decided;
        let fits = |e: &Edge, hint: &mut usize| {
            let t = &target.items[e.target as usize];
            if !known.all && t.end >= decided {
                return false;
            }
            let (low, high) = self.clock.of(t, hint);
            // Slack is for the timestamps; it must not let a short command slip beside its host's interval.
            let slack = SLACK.min((t.end - t.begin) / 2);
            e.low <= low + slack && e.high >= high - slack
        };
        let (mut of_host, mut of_target) = (vec![0u8; host.items.len()], vec![0u8; target.items.len()]);
        // Whether a target waits for a host command that is not decided.
        let mut waits = vec![false; target.items.len()];
        let fit_all = |edges: &Vec<Edge>| {
            let mut hint = 0;
            edges.iter().map(|e| fits(e, &mut hint)).collect()
        };
        let fit: Vec<Vec<bool>> = edges.par_iter().map(fit_all).collect();
        let judged = || edges.iter().flatten().zip(fit.iter().flatten());
        if !marks.is_empty() {
            for (t, count) in of_target.iter_mut().enumerate() {
                *count = u8::from(mark(t) == Mark::Spoiled);
            }
        }
        for (e, fits) in judged() {
            let (h, t) = (e.host as usize, e.target as usize);
            if *fits {
                of_host[h] = of_host[h].saturating_add(1);
                of_target[t] = of_target[t].saturating_add(1);
            }
            if !done(h) {
                waits[t] = true;
            }
        }
        let fate = |&n: &u8| if n > 1 { Fate::Ambiguous } else { Fate::Alone };
        let mut of_hosts: Vec<Fate> = of_host.iter().map(fate).collect();
        let mut of_targets: Vec<Fate> = of_target.iter().map(fate).collect();
        const NOBODY: u32 = u32::MAX;
        // By the host's rows.
        let rows = host.items.iter().map(|i| i.row as usize + 1).max().unwrap_or(0);
        let mut partners = vec![NOBODY; rows];
        let mut matched = 0;
        for (e, _) in judged().filter(|(e, fits)| **fits && done(e.host as usize)) {
            let (h, t) = (e.host as usize, e.target as usize);
            if of_host[h] == 1 && of_target[t] == 1 {
                partners[host.items[h].row as usize] = target.items[t].row;
                matched += 1;
                of_hosts[h] = Fate::Matched;
                of_targets[t] = Fate::Matched;
            } else {
                of_hosts[h] = Fate::Ambiguous;
                of_targets[t] = Fate::Ambiguous;
            }
        }
        let contradicted = |t: usize| mark(t) == Mark::Contradicted;
        for (e, _) in judged().filter(|(e, fits)| !**fits && done(e.host as usize) && over(e.target as usize))
        {
            let (h, t) = (e.host as usize, e.target as usize);
            let offset = self.clock.offset(target.items[t].begin).0;
            let overlap = host.items[h].begin <= target.items[t].end + offset
                && target.items[t].begin + offset <= host.items[h].end;
            let alone = of_targets[t] == Fate::Alone && of_target[t] == 0;
            if overlap && of_hosts[h] == Fate::Alone && alone {
                of_hosts[h] = Fate::Implausible;
                of_targets[t] = Fate::Implausible;
            }
        }
        let mut part = Part::default();
        // Nothing that ends later on the host can hold it: another command of its queue and cid has begun there.
        let sure = |t: usize, lane: &[Item], given_up: &mut Option<i64>| {
            let item = &target.items[t];
            let (_, high) = self.near(item.begin, &mut 0);
            if known.all || lane.last().is_some_and(|h| h.begin > item.begin + high) {
                return true;
            }
            if known.force {
                *given_up = (*given_up).max(Some(item.end));
            }
            known.force
        };
        part.target = Vec::with_capacity(target.items.len());
        for (lane, from, items) in target.lanes() {
            let hosts = if known.all { &[][..] } else { host.lane(lane) };
            for t in from..from + items.len() {
                let fate = of_targets[t];
                let ready = match fate {
                    Fate::Matched => true,
                    Fate::Ambiguous if of_target[t] > u8::from(mark(t) == Mark::Spoiled) => !waits[t],
                    _ => over(t) && !waits[t] && sure(t, hosts, &mut part.given_up),
                };
                let fate = match fate {
                    Fate::Alone if mark(t) == Mark::Spoiled => Fate::Ambiguous,
                    Fate::Alone if contradicted(t) => Fate::Implausible,
                    fate => fate,
                };
                if !ready && !known.all {
                    let mark = match fate {
                        Fate::Ambiguous => Mark::Spoiled,
                        Fate::Implausible => Mark::Contradicted,
                        Fate::Alone | Fate::Matched => Mark::Clean,
                    };
                    if mark != Mark::Clean {
                        part.marks.push((items[t - from].row, mark));
                    }
                }
                part.target.push((ready || known.all).then_some(fate));
            }
        }
        part.host = (0..).zip(of_hosts).map(|(h, fate)| done(h).then_some(fate)).collect();
        part.pairs.reserve_exact(matched);
        part.pairs.extend((0..).zip(partners).filter(|p| p.1 != NOBODY));
        part
    }
}

/// The edges of targets that end from `from` on and before `to`: end, begin and bounds, by end.
fn in_order_of_end(target: &Lanes, edges: &[Vec<Edge>], from: i64, to: i64) -> Vec<Ended> {
    let wanted = || {
        let found = edges.iter().flatten().map(|e| (e, &target.items[e.target as usize]));
        found.filter(|(_, item)| item.end >= from && item.end < to)
    };
    // In the order of rows first: mostly that is the order in which they ended.
    let rows = target.items.iter().map(|i| i.row as usize + 1).max().unwrap_or(0);
    let mut places = vec![0u32; rows];
    wanted().for_each(|(_, item)| places[item.row as usize] += 1);
    let mut before = 0;
    for place in &mut places {
        before += std::mem::replace(place, before);
    }
    let mut pairs = vec![(0, (0, 0, 0)); before as usize];
    for (e, item) in wanted() {
        let place = &mut places[item.row as usize];
        pairs[*place as usize] = (item.end, (item.begin, e.low, e.high));
        *place += 1;
    }
    if !pairs.is_sorted() {
        let order =
            radix::order(pairs.iter().map(|p| p.0), |&a, &b| pairs[a as usize].cmp(&pairs[b as usize]));
        pairs = order.into_iter().map(|n| pairs[n as usize]).collect();
    }
    pairs
}

/// Refines the clock along a line and matches everything.
pub(crate) fn along(host: &Lanes, target: &Lanes, line: &Line) -> (Clock, Matching) {
    let mut matcher = Matcher::along(line);
    let part = matcher.part(host, target, &[], Known::ALL);
    (matcher.into_clock(), part.whole())
}

/// Matches everything by the clock of one machine.
pub(crate) fn exactly(host: &Lanes, target: &Lanes) -> Matching {
    Matcher::of_one_machine().part(host, target, &[], Known::ALL).whole()
}

impl Part {
    /// Of a part that is all there is.
    fn whole(self) -> Matching {
        let decided =
            |fates: Vec<Option<Fate>>| fates.into_iter().map(|f| f.unwrap_or(Fate::Alone)).collect();
        Matching { pairs: self.pairs, host: decided(self.host), target: decided(self.target) }
    }
}
