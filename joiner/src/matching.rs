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
use std::ops::Range;

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

/// Some lanes, whole: the places of their items on both sides, and their edges in the order of the targets. What is
/// matched in one group has nothing to do with any other.
#[derive(Debug)]
struct Group {
    hosts: Range<usize>,
    targets: Range<usize>,
    edges: Vec<Edge>,
}

/// Targets whose edges are looked for at a time, and targets of a group, unless a lane has more.
const CHUNK: usize = 1 << 13;

/// All lanes in groups, with all pairs of the same key that fit at some offset near what `near` gives at a target time.
/// `near` is given a hint that it may use and keep: times come in order but for jumps.
fn groups(host: &Lanes, target: &Lanes, near: impl Fn(i64, &mut usize) -> (i64, i64) + Sync) -> Vec<Group> {
    let mut groups = Vec::new();
    let (mut hosts, mut targets) = (0, 0);
    for (lane, from, items) in target.lanes() {
        if from + items.len() - targets >= CHUNK {
            let (hosts_end, targets_end) = (host.end_of(lane), from + items.len());
            groups.push(Group { hosts: hosts..hosts_end, targets: targets..targets_end, edges: Vec::new() });
            (hosts, targets) = (hosts_end, targets_end);
        }
    }
    if hosts < host.items.len() || targets < target.items.len() {
        groups.push(Group {
            hosts: hosts..host.items.len(),
            targets: targets..target.items.len(),
            edges: Vec::new(),
        });
    }
    groups.par_iter_mut().with_max_len(1).for_each(|group| group.find(host, target, &near));
    groups
}

impl Group {
    fn find(&mut self, host: &Lanes, target: &Lanes, near: &(impl Fn(i64, &mut usize) -> (i64, i64) + Sync)) {
        // A lane may be all there is.
        let pieces = self.targets.clone().step_by(CHUNK);
        let pieces: Vec<Range<usize>> =
            pieces.map(|from| from..(from + CHUNK).min(self.targets.end)).collect();
        let find = |piece: &Range<usize>| edges(host, &self.hosts, target, piece.clone(), near);
        self.edges = match &pieces[..] {
            [one] => find(one),
            many => many.par_iter().map(find).collect::<Vec<_>>().concat(),
        };
    }
}

/// The edges of some targets, whose partners are among some hosts.
fn edges(
    host: &Lanes,
    hosts: &Range<usize>,
    target: &Lanes,
    targets: Range<usize>,
    near: impl Fn(i64, &mut usize) -> (i64, i64),
) -> Vec<Edge> {
    let mut edges = Vec::with_capacity(targets.len());
    let (mut of_near, mut of_hosts) = (0, 0);
    let mut lane = hosts.start..hosts.start;
    let mut last = None;
    for n in targets {
        let t = &target.items[n];
        if last != Some(t.lane) {
            last = Some(t.lane);
            lane = host.range_of(t.lane);
            of_hosts = 0;
        }
        if lane.is_empty() {
            continue;
        }
        let (low, high) = near(t.begin, &mut of_near);
        hosts_around(&host.items[lane.clone()], t, low, high, &mut of_hosts, |m, h| {
            let (low, high) = bounds(h, t);
            edges.push(Edge { host: (lane.start + m) as u32, target: n as u32, low, high });
        });
    }
    edges
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
        let groups = groups(host, target, |t, hint| self.near(t, hint));
        // All pairs of targets that end before this are among the edges.
        let mut complete = match known.all {
            true => i64::MAX,
            false => known.target.min(self.target_time(known.host.saturating_sub(ON_THE_WAY))),
        };
        if let Some(line) = self.line {
            let pairs = in_order_of_end(target, &groups, self.refiner.upto(), complete);
            let whole = known.all || known.force;
            complete = self.refiner.refine(line, &pairs, complete, whole, &mut self.clock);
        }
        self.accept(host, target, &groups, marks, complete, known)
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
        groups: &[Group],
        marks: &[Mark],
        decided: i64,
        known: Known,
    ) -> Part {
        let deciding = Deciding {
            matcher: self,
            host,
            target,
            marks,
            decided,
            // Every target that can lie in a host command that ends before this is decided.
            host_decided: match known.all {
                true => i64::MAX,
                false => decided.saturating_add(self.near(decided, &mut 0).0 - 2 * SLACK),
            },
            known,
        };
        let parts: Vec<Part> = groups.par_iter().with_max_len(1).map(|group| deciding.group(group)).collect();
        // By the host's rows.
        let rows = host.items.iter().map(|i| i.row as usize + 1).max().unwrap_or(0);
        const NOBODY: u32 = u32::MAX;
        let mut partners = vec![NOBODY; rows];
        let mut part = Part::default();
        part.host.reserve_exact(host.items.len());
        part.target.reserve_exact(target.items.len());
        let mut matched = 0;
        for of_group in parts {
            matched += of_group.pairs.len();
            of_group.pairs.iter().for_each(|&(h, t)| partners[h as usize] = t);
            part.host.extend(of_group.host);
            part.target.extend(of_group.target);
            part.marks.extend(of_group.marks);
            part.given_up = part.given_up.max(of_group.given_up);
        }
        part.pairs.reserve_exact(matched);
        part.pairs.extend((0..).zip(partners).filter(|p| p.1 != NOBODY));
        part
    }
}

/// What a part's groups are decided by.
struct Deciding<'a> {
    matcher: &'a Matcher<'a>,
    host: &'a Lanes,
    target: &'a Lanes,
    marks: &'a [Mark],
    /// Targets and hosts that end before these are decided.
    decided: i64,
    host_decided: i64,
    known: Known,
}

impl Deciding<'_> {
    fn mark(&self, target: &Item) -> Mark {
        self.marks.get(target.row as usize).copied().unwrap_or_default()
    }

    fn done(&self, host: &Item) -> bool {
        self.known.all || host.end < self.host_decided
    }

    fn over(&self, target: &Item) -> bool {
        self.known.all || target.end < self.decided
    }

    fn fits(&self, edge: &Edge, target: &Item, hint: &mut usize) -> bool {
        if !self.over(target) {
            return false;
        }
        let (low, high) = self.matcher.clock.of(target, hint);
        // Slack is for the timestamps; it must not let a short command slip beside its host's interval.
        let slack = SLACK.min((target.end - target.begin) / 2);
        edge.low <= low + slack && edge.high >= high - slack
    }

    /// Whether nothing that ends later on the host can hold a target: another command of its queue and cid, of which
    /// `last` is the last one, has begun there.
    fn sure(&self, target: &Item, last: Option<&Item>, given_up: &mut Option<i64>) -> bool {
        if self.known.all {
            return true;
        }
        let (_, high) = self.matcher.near(target.begin, &mut 0);
        if last.is_some_and(|h| h.begin > target.begin + high) {
            return true;
        }
        if self.known.force {
            *given_up = (*given_up).max(Some(target.end));
        }
        self.known.force
    }

    /// The pairs (host's row, target's row) and the fates of a group.
    fn group(&self, group: &Group) -> Part {
        let (hosts, targets) =
            (&self.host.items[group.hosts.clone()], &self.target.items[group.targets.clone()]);
        let places =
            |e: &Edge| (e.host as usize - group.hosts.start, e.target as usize - group.targets.start);
        let (mut of_host, mut of_target) = (vec![0u8; hosts.len()], vec![0u8; targets.len()]);
        // Whether a target waits for a host command that is not decided.
        let mut waits = vec![false; targets.len()];
        if !self.marks.is_empty() {
            for (count, target) in of_target.iter_mut().zip(targets) {
                *count = u8::from(self.mark(target) == Mark::Spoiled);
            }
        }
        let mut hint = 0;
        let mut fit = Vec::with_capacity(group.edges.len());
        for e in &group.edges {
            let (h, t) = places(e);
            let fits = self.fits(e, &targets[t], &mut hint);
            fit.push(fits);
            if fits {
                of_host[h] = of_host[h].saturating_add(1);
                of_target[t] = of_target[t].saturating_add(1);
            }
            if !self.done(&hosts[h]) {
                waits[t] = true;
            }
        }
        let judged = || group.edges.iter().zip(&fit);
        let fate = |&n: &u8| if n > 1 { Fate::Ambiguous } else { Fate::Alone };
        let mut of_hosts: Vec<Fate> = of_host.iter().map(fate).collect();
        let mut of_targets: Vec<Fate> = of_target.iter().map(fate).collect();
        let mut part = Part { pairs: Vec::with_capacity(group.edges.len()), ..Part::default() };
        for (e, _) in judged().filter(|(_, fits)| **fits) {
            let (h, t) = places(e);
            if !self.done(&hosts[h]) {
                continue;
            }
            if of_host[h] == 1 && of_target[t] == 1 {
                part.pairs.push((hosts[h].row, targets[t].row));
                of_hosts[h] = Fate::Matched;
                of_targets[t] = Fate::Matched;
            } else {
                of_hosts[h] = Fate::Ambiguous;
                of_targets[t] = Fate::Ambiguous;
            }
        }
        for (e, _) in judged().filter(|(_, fits)| !**fits) {
            let (h, t) = places(e);
            let (host, target) = (&hosts[h], &targets[t]);
            if !self.done(host) || !self.over(target) {
                continue;
            }
            let offset = self.matcher.clock.offset(target.begin).0;
            let overlap = host.begin <= target.end + offset && target.begin + offset <= host.end;
            let alone = of_targets[t] == Fate::Alone && of_target[t] == 0;
            if overlap && of_hosts[h] == Fate::Alone && alone {
                of_hosts[h] = Fate::Implausible;
                of_targets[t] = Fate::Implausible;
            }
        }
        part.target = Vec::with_capacity(targets.len());
        for (t, target) in targets.iter().enumerate() {
            let fate = of_targets[t];
            if fate == Fate::Matched {
                part.target.push(Some(fate));
                continue;
            }
            let mark = self.mark(target);
            let ready = match fate {
                Fate::Ambiguous if of_target[t] > u8::from(mark == Mark::Spoiled) => !waits[t],
                _ => {
                    let last = || self.host.lane(target.lane).last();
                    self.over(target) && !waits[t] && self.sure(target, last(), &mut part.given_up)
                }
            };
            let fate = match fate {
                Fate::Alone if mark == Mark::Spoiled => Fate::Ambiguous,
                Fate::Alone if mark == Mark::Contradicted => Fate::Implausible,
                fate => fate,
            };
            if !ready && !self.known.all {
                let mark = match fate {
                    Fate::Ambiguous => Mark::Spoiled,
                    Fate::Implausible => Mark::Contradicted,
                    Fate::Alone | Fate::Matched => Mark::Clean,
                };
                if mark != Mark::Clean {
                    part.marks.push((target.row, mark));
                }
            }
            part.target.push((ready || self.known.all).then_some(fate));
        }
        part.host = hosts.iter().zip(of_hosts).map(|(host, fate)| self.done(host).then_some(fate)).collect();
        part
    }
}

/// The edges of targets that end from `from` on and before `to`: end, begin and bounds, by end.
fn in_order_of_end(target: &Lanes, groups: &[Group], from: i64, to: i64) -> Vec<Ended> {
    let of_group = |group: &Group| -> Vec<Ended> {
        let found = group.edges.iter().map(|e| (e, &target.items[e.target as usize]));
        let wanted = found.filter(|(_, item)| item.end >= from && item.end < to);
        wanted.map(|(e, item)| (item.end, (item.begin, e.low, e.high))).collect()
    };
    let found: Vec<Vec<Ended>> = groups.par_iter().with_max_len(1).map(of_group).collect();
    let ends = || found.iter().flatten().map(|pair| pair.0);
    let (Some(first), Some(last)) = (ends().min(), ends().max()) else { return Vec::new() };
    // Each thread puts one stretch of time in order.
    let stretches = rayon::current_num_threads().clamp(1, 64);
    // Times are far from where this could overflow.
    let length = (last - first) / stretches as i64 + 1;
    let in_order = |n: usize| -> Vec<Ended> {
        let from = first + n as i64 * length;
        let here = found.iter().flatten().filter(|pair| (from..from + length).contains(&pair.0));
        let pairs: Vec<Ended> = here.copied().collect();
        let order =
            radix::order(pairs.iter().map(|p| p.0), |&a, &b| pairs[a as usize].cmp(&pairs[b as usize]));
        order.into_iter().map(|n| pairs[n as usize]).collect()
    };
    (0..stretches).into_par_iter().with_max_len(1).map(in_order).collect::<Vec<_>>().concat()
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
