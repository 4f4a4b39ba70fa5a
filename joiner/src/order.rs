//! Matches commands by their order, where the target's source does not know their cid (SPDK's trace ring). It
//! would rather leave a command unmatched than match it wrongly.
//!
//! A queue pair is one connection: the target receives its capsules in the order in which the host sent them.
//! The target's recording has every command of the stretches between its gaps, and its gaps are known. So each
//! host command that lies wholly in such a stretch has its partner there, in the same order, inside its own
//! interval, with the same operation, address and length. The earliest partners that all of them can have
//! together, and the latest, bound where the true one is; where both are the same it is the true one. All else
//! is set aside. Stretches are taken apart where no command of the queue is under way, so that one that holds
//! a contradiction spoils no other.
//!
//! Where the clocks' offset is not known, the search of it finds a line that is right to within the length of a
//! command and no better: with many commands of one kind under way, an offset that is wrong by less explains each
//! of them by its neighbours. The order is then sought within that reach, and the matches tell the offset.
//!
//! Runs that do not fit into memory are matched part after part, as `matching` has it: a piece is decided when all of its
//! commands are known, and where there is no room to wait for that, its first half is.

use crate::clock::{Clock, Line, SLACK};
use crate::lanes::{Item, Lanes, bounds};
use crate::matching::{Fate, Known, Mark, Matching, Part};
use crate::recording::{NONE, Recording};
use rayon::prelude::*;
use run_format::{Boundary, Command, Operation, State};
use std::collections::BTreeMap;

/// What an opcode is where the target's source does not tell it.
const NO_OPCODE: u8 = 0xff;
/// The key of a command of which nothing is known.
const ANY: u64 = u64::MAX;
/// What a recording that was cut may lack of its end, ns.
const CUT: i64 = 1_000_000_000;
/// Events that tell of a gap in a target's recording.
const GAP_BEGINS: &str = "trace ring overrun begins";
const GAP_ENDS: &str = "trace ring overrun ends";

/// What is to be noted of runs whose order contradicts every clock.
pub(crate) const CONTRADICTED: &str = "the runs contradict the clock offset that most of their commands agree with, so \
     nothing was matched; record longer, or with --source hybrid, which knows each command by name";

/// Whether a target's commands are to be matched by their order.
pub(crate) fn applies(target: &Recording) -> bool {
    target.flags.iter().any(|flags| flags & Command::NO_CID != 0)
}

/// What both sides see of a command, where the target sees no cid and no namespace.
pub(crate) fn key(opcode: u8, slba: u64, nlb: u16) -> u64 {
    if opcode == NO_OPCODE {
        return ANY;
    }
    let (slba, nlb) = if Operation::of(opcode).has_blocks() { (slba, nlb) } else { (0, 0) };
    // The finaliser of SplitMix64.
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (mix(mix(slba) ^ (u64::from(opcode) << 16 | u64::from(nlb))) >> 1).min(ANY - 1)
}

/// A hash by which both sides keep the same commands, with all others of their key.
pub(crate) fn hash(opcode: u8, slba: u64, nlb: u16) -> u32 {
    (key(opcode, slba, nlb) >> 31) as u32
}

/// Whether two commands may be the same as far as such a target tells.
pub(crate) fn same(host: &Recording, h: usize, target: &Recording, t: usize) -> bool {
    let of = |run: &Recording, row: usize| key(run.opcode[row], run.slba[row], run.nlb[row]);
    let namespace = target.nsid[t] == 0 || target.nsid[t] == host.nsid[h];
    namespace && (of(target, t) == ANY || of(target, t) == of(host, h))
}

/// The stretches of a target's recording that lack nothing, in its own time.
pub(crate) fn stretches(target: &Recording, window: (i64, i64)) -> Vec<(i64, i64)> {
    let (from, mut to) = window;
    if target.manifest.state == State::Open {
        to -= CUT;
    }
    // Each lcore has its own ring; a gap in one is taken for one in all.
    let mut marks: Vec<(i64, i32)> = Vec::new();
    for event in &target.manifest.events {
        match event.what.as_str() {
            GAP_BEGINS => marks.push((event.at_ns.as_i64(), 1)),
            GAP_ENDS => marks.push((event.at_ns.as_i64(), -1)),
            _ => {}
        }
    }
    marks.sort_by_key(|&(at, what)| (at, -what));
    let (mut stretches, mut open, mut begin) = (Vec::new(), 0, from);
    for (at, what) in marks {
        if what > 0 && open == 0 && begin < at {
            stretches.push((begin, at));
        }
        open = (open + what).max(0);
        begin = at;
    }
    if open == 0 && begin < to {
        stretches.push((begin, to));
    }
    match &target.slices {
        None => stretches,
        // Between slices nothing was recorded, so an order ends with each.
        Some(slices) => overlaps(&stretches, slices),
    }
}

/// What two lists of stretches have in common, each in order and free of overlaps.
pub(crate) fn overlaps(first: &[(i64, i64)], second: &[(i64, i64)]) -> Vec<(i64, i64)> {
    let (mut common, mut a, mut b) = (Vec::new(), 0, 0);
    while let (Some(x), Some(y)) = (first.get(a), second.get(b)) {
        let both = (x.0.max(y.0), x.1.min(y.1));
        if both.0 < both.1 {
            common.push(both);
        }
        if x.1 <= y.1 { a += 1 } else { b += 1 }
    }
    common
}

/// A host command that surely has its partner in the target's recording.
#[derive(Clone, Copy, Debug)]
struct Sure<'a> {
    item: &'a Item,
    /// Index among the lane's items.
    index: usize,
}

/// Matches every queue by its order, part after part. A part decides the same whether it is one of many or all there
/// is, where there is room for the pieces; else pieces are cut, which leaves more unmatched and matches nothing wrongly:
/// bounds of where partners are hold for any of the host's commands, whatever the others are.
#[derive(Debug)]
pub(crate) struct Parts {
    /// What is possible.
    possible: Clock,
    stretches: Vec<(i64, i64)>,
    /// The clock as the matches tell it so far; what is possible where it is known exactly.
    clock: Clock,
    is_known: bool,
    /// Host commands in pieces that have a place in the target's order, and in pieces that have none.
    embedded: u64,
    contradicted: u64,
    /// For each lane, the host's time before which no command can be matched any more: its partner may be gone.
    frontiers: BTreeMap<u64, i64>,
}

impl Parts {
    /// By the clock of one machine.
    pub(crate) fn of_one_machine(stretches: Vec<(i64, i64)>) -> Parts {
        Parts::by(Clock::same(), Clock::same(), true, stretches)
    }

    /// By what is possible within reach of a line. A line says little where many commands of one key are under way at
    /// once: it explains true pairs of another line by their neighbours, as far away as commands are long. So nothing
    /// is taken for impossible within that reach, and the matches tell the clock.
    pub(crate) fn around(line: &Line, host: &Lanes, stretches: Vec<(i64, i64)>) -> Parts {
        Parts::by(Clock::around(line, reach(host)), Clock::empty(), false, stretches)
    }

    fn by(possible: Clock, clock: Clock, is_known: bool, stretches: Vec<(i64, i64)>) -> Parts {
        let frontiers = BTreeMap::new();
        Parts { possible, stretches, clock, is_known, embedded: 0, contradicted: 0, frontiers }
    }

    /// Whether the order contradicts what is taken for possible.
    pub(crate) fn is_contradicted(&self) -> bool {
        self.contradicted * 10 > self.contradicted + self.embedded
    }

    /// The clock as far as it is known.
    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The clock.
    pub(crate) fn into_clock(self) -> Clock {
        if self.clock.is_empty() { self.possible } else { self.clock }
    }

    /// Matches what a part decides. `marks` are those of the target's rows, as earlier parts left them.
    pub(crate) fn part(
        &mut self,
        host: &Recording,
        h: &Lanes,
        t: &Lanes,
        marks: &[Mark],
        known: Known,
    ) -> Part {
        let mut lanes: Vec<u64> = h.lanes().chain(t.lanes()).map(|lane| lane.0).collect();
        lanes.sort_unstable();
        lanes.dedup();
        let found: Vec<(u64, Found)> = lanes
            .into_par_iter()
            .map(|lane| {
                let one = Lane {
                    possible: &self.possible,
                    stretches: &self.stretches,
                    hosts: h.lane(lane),
                    targets: t.lane(lane),
                    marks,
                    known,
                    frontier: self.frontiers.get(&lane).copied(),
                };
                (lane, one.decided(host))
            })
            .collect();
        let mut part =
            Part { host: vec![None; h.items.len()], target: vec![None; t.items.len()], ..Part::default() };
        let mut bounds_of = Vec::new();
        for (lane, found) in found {
            let (of_host, of_target) = (h.range_of(lane), t.range_of(lane));
            for &(host, target) in &found.pairs {
                let (host, target) = (&h.items[of_host.start + host], &t.items[of_target.start + target]);
                part.pairs.push((host.row, target.row));
                if !self.is_known {
                    let (low, high) = bounds(host, target);
                    bounds_of.push((target.begin, low, high));
                }
            }
            part.host[of_host].copy_from_slice(&found.host);
            part.target[of_target].copy_from_slice(&found.target);
            part.marks.extend(found.marks);
            self.embedded += found.embedded;
            self.contradicted += found.contradicted;
            self.frontiers.extend(found.frontier.map(|frontier| (lane, frontier)));
        }
        part.pairs.sort_unstable();
        bounds_of.sort_unstable();
        if let Some(more) = Clock::through(&bounds_of) {
            self.clock.extend(more);
        }
        part
    }
}

/// Matches everything by its order where the clocks' offset is known only roughly, and finds it from the matches.
/// `None` where the order contradicts the line.
pub(crate) fn matched_around(
    host: &Recording,
    h: &Lanes,
    t: &Lanes,
    line: &Line,
    stretches: Vec<(i64, i64)>,
) -> Option<(Clock, Matching)> {
    let mut parts = Parts::around(line, h, stretches);
    let matching = parts.part(host, h, t, &[], Known::ALL).whole();
    (!parts.is_contradicted()).then(|| (parts.into_clock(), matching))
}

/// Matches everything by its order and the clock of one machine.
pub(crate) fn matched(host: &Recording, h: &Lanes, t: &Lanes, stretches: Vec<(i64, i64)>) -> Matching {
    Parts::of_one_machine(stretches).part(host, h, t, &[], Known::ALL).whole()
}

/// How long all but the longest commands of the host are, ns.
fn reach(host: &Lanes) -> i64 {
    let mut lengths: Vec<i64> = host.items.iter().map(|item| item.end - item.begin).collect();
    let place = lengths.len() - 1 - lengths.len().min(lengths.len() / 100);
    if lengths.is_empty() { 0 } else { *lengths.select_nth_unstable(place).1 }
}

/// One queue in a part.
struct Lane<'a> {
    possible: &'a Clock,
    stretches: &'a [(i64, i64)],
    hosts: &'a [Item],
    targets: &'a [Item],
    marks: &'a [Mark],
    known: Known,
    frontier: Option<i64>,
}

/// What became of the items of one queue, by their places in it.
#[derive(Debug, Default)]
struct Found {
    pairs: Vec<(usize, usize)>,
    host: Vec<Option<Fate>>,
    target: Vec<Option<Fate>>,
    marks: Vec<(u32, Mark)>,
    embedded: u64,
    contradicted: u64,
    frontier: Option<i64>,
    /// Targets before this are no partners of what is not decided.
    used: usize,
}

impl Lane<'_> {
    fn decided(&self, host: &Recording) -> Found {
        let mut found = Found {
            host: vec![None; self.hosts.len()],
            target: vec![None; self.targets.len()],
            frontier: self.frontier,
            ..Found::default()
        };
        let mut sure = Vec::with_capacity(self.hosts.len());
        for (index, item) in self.hosts.iter().enumerate() {
            if self.frontier.is_some_and(|frontier| item.begin < frontier) {
                found.host[index] = Some(Fate::Ambiguous);
            } else if self.is_within(item) {
                sure.push(Sure { item, index });
            } else {
                found.host[index] = Some(Fate::Alone);
            }
        }
        // Capsules that one send took have one time; they were queued in the order of their submission.
        let driver = |sure: &Sure<'_>| host.time(Boundary::HDriver, sure.item.row as usize);
        sure.sort_by_key(|sure| (sure.item.begin, driver(sure), sure.item.row));
        let mut rest = &sure[..];
        while let Some(piece) = apart(rest).next().filter(|piece| self.is_closed(piece)) {
            self.decide(piece, piece.len(), &mut found);
            rest = &rest[piece.len()..];
        }
        if self.known.force {
            rest = self.cut(rest, &mut found);
        }
        self.targets(rest, &mut found);
        found
    }

    /// Whether a host command lies wholly in a stretch of the target's recording, at every offset that is possible.
    fn is_within(&self, item: &Item) -> bool {
        let near = self.possible.target_time(item.begin);
        let (low, high) = self.possible.at(near);
        let (begin, end) = (item.begin - high - SLACK, item.end - low + SLACK);
        let n = self.stretches.partition_point(|s| s.1 < end);
        self.stretches.get(n).is_some_and(|s| s.0 <= begin && end <= s.1)
    }

    /// Before this no partner of a host command that began then is received.
    fn after(&self, begin: i64) -> i64 {
        // Offsets change too little within a command to matter here.
        let (_, high) = self.possible.at(self.possible.target_time(begin));
        begin.saturating_sub(high).saturating_sub(4 * SLACK)
    }

    /// After this no partner of a host command that ended then has its response ready.
    fn before(&self, end: i64) -> i64 {
        let (low, _) = self.possible.at(self.possible.target_time(end));
        end - low + 4 * SLACK
    }

    /// Whether the partner is in this part, if it was recorded.
    fn has_partner(&self, sure: &Sure<'_>) -> bool {
        self.known.all || self.before(sure.item.end) < self.known.target
    }

    /// Whether nothing that comes later belongs to a piece or to its commands.
    fn is_closed(&self, piece: &[Sure<'_>]) -> bool {
        let busy = piece.iter().map(|sure| sure.item.end).max().unwrap_or(i64::MIN);
        let is_over = self.known.all || self.known.begun > busy.saturating_add(4 * SLACK);
        is_over && piece.iter().all(|sure| self.has_partner(sure))
    }

    /// Whether a target command may be the host command's partner at an offset that is possible. What is true never
    /// fails here.
    fn may_be(&self, host: &Item, target: &Item) -> bool {
        if target.key != host.key && target.key != ANY {
            return false;
        }
        let (low, high) = self.possible.at(target.begin);
        let (from, to) = (host.begin - target.begin - SLACK, host.end - target.end + SLACK);
        from <= to && from <= high + SLACK && to >= low - SLACK
    }

    /// The earliest and the latest partners that commands can have together, from a place in the targets on; `None` where
    /// something is not as it must be.
    fn embedded(&self, sure: &[Sure<'_>], used: usize) -> Option<(Vec<usize>, Vec<usize>)> {
        let (first, last) = (sure.first()?, sure.last()?);
        let mut earliest = Vec::with_capacity(sure.len());
        let from = self.after(first.item.begin);
        let mut next = self.targets.partition_point(|t| t.begin < from).max(used);
        for sure in sure {
            let upto = self.before(sure.item.end);
            let n = (next..self.targets.len())
                .take_while(|&n| self.targets[n].begin <= upto)
                .find(|&n| self.may_be(sure.item, &self.targets[n]))?;
            earliest.push(n);
            next = n + 1;
        }
        let mut latest = Vec::with_capacity(sure.len());
        let upto = self.before(last.item.end);
        let mut end = self.targets.partition_point(|t| t.begin <= upto);
        for sure in sure.iter().rev() {
            let from = self.after(sure.item.begin);
            let n = (used..end)
                .rev()
                .take_while(|&n| self.targets[n].begin >= from)
                .find(|&n| self.may_be(sure.item, &self.targets[n]))?;
            latest.push(n);
            end = n;
        }
        latest.reverse();
        Some((earliest, latest))
    }

    /// Decides the first so many commands by the place that all of them have in the target's order.
    fn decide(&self, sure: &[Sure<'_>], count: usize, found: &mut Found) {
        let Some((earliest, latest)) = self.embedded(sure, found.used) else {
            // Nothing here is sure.
            found.contradicted += count as u64;
            sure[..count].iter().for_each(|sure| found.host[sure.index] = Some(Fate::Ambiguous));
            return;
        };
        found.embedded += count as u64;
        let mut marked = 0;
        for (sure, (&n, &last)) in sure[..count].iter().zip(earliest.iter().zip(&latest)) {
            if n == last {
                found.pairs.push((sure.index, n));
                found.host[sure.index] = Some(Fate::Matched);
                found.target[n] = Some(Fate::Matched);
            } else {
                found.host[sure.index] = Some(Fate::Ambiguous);
                for n in n.max(marked)..=last {
                    found.target[n].get_or_insert(Fate::Ambiguous);
                }
            }
            marked = marked.max(last + 1);
        }
        // Partners come in the order of their commands.
        found.used = earliest[..count].last().map_or(found.used, |n| n + 1);
    }

    /// Decides about the first half of what waits for the rest of its piece, and returns the other half. Later commands
    /// that began before those are not matched.
    fn cut<'b, 'c>(&self, waiting: &'b [Sure<'c>], found: &mut Found) -> &'b [Sure<'c>] {
        let mut cut = waiting.len() / 2;
        // Of commands with one time a later one may come between.
        while cut > 0 && waiting[cut - 1].item.begin == waiting[cut].item.begin {
            cut -= 1;
        }
        if cut == 0 {
            return waiting;
        }
        let mut before = 0;
        for piece in apart(waiting) {
            let first = &piece[..piece.len().min(cut - before)];
            let lacking = first.iter().filter(|sure| !self.has_partner(sure));
            lacking.for_each(|sure| found.host[sure.index] = Some(Fate::Ambiguous));
            // The rest of the piece tells where their partners are at the latest.
            let here: Vec<Sure<'_>> = piece.iter().filter(|sure| self.has_partner(sure)).copied().collect();
            let count = first.iter().filter(|sure| self.has_partner(sure)).count();
            if count > 0 {
                self.decide(&here, count, found);
            }
            before += first.len();
            if before == cut {
                break;
            }
        }
        found.frontier = Some(waiting[cut].item.begin);
        &waiting[cut..]
    }

    /// Decides about targets that nothing which is not decided can have for a partner.
    fn targets(&self, waiting: &[Sure<'_>], found: &mut Found) {
        let begun = match (waiting, self.known.force && !self.known.all) {
            // Only the longest commands that are to come began before what ends next.
            ([], true) => {
                let frontier = found.frontier.unwrap_or(i64::MIN).max(self.known.host);
                found.frontier = Some(frontier);
                frontier
            }
            _ => self.known.begun.max(found.frontier.unwrap_or(i64::MIN)),
        };
        let least = waiting.iter().map(|sure| sure.item.begin).min().map_or(begun, |first| begun.min(first));
        let upto = if self.known.all { i64::MAX } else { self.after(least) };
        for (n, target) in self.targets.iter().enumerate() {
            let mark = self.marks.get(target.row as usize).copied().unwrap_or_default();
            let fate = found.target[n];
            let is_spoiled = fate == Some(Fate::Ambiguous) || mark == Mark::Spoiled;
            found.target[n] = if fate == Some(Fate::Matched) {
                fate
            } else if self.known.all || n < found.used || target.begin < upto {
                Some(if is_spoiled { Fate::Ambiguous } else { Fate::Alone })
            } else {
                if is_spoiled {
                    found.marks.push((target.row, Mark::Spoiled));
                }
                None
            };
        }
    }
}

/// The pieces between which no command is under way.
fn apart<'a, 'b>(sure: &'b [Sure<'a>]) -> impl Iterator<Item = &'b [Sure<'a>]> {
    let mut rest = sure;
    std::iter::from_fn(move || {
        let mut busy = rest.first()?.item.end;
        let length = rest.iter().take_while(|sure| {
            let under_way = sure.item.begin <= busy + 4 * SLACK;
            busy = busy.max(sure.item.end);
            under_way
        });
        let (piece, others) = rest.split_at(length.count().max(1));
        rest = others;
        Some(piece)
    })
}

/// When a target command's response was ready. Its source tells when a send had returned, and by then the host may
/// have it.
pub(crate) fn end(target: &Recording, row: usize) -> i64 {
    target.time(Boundary::TResp, row)
}

/// Whether a host command certainly got as far as the target.
pub(crate) fn arrived(host: &Recording, row: usize) -> bool {
    host.flags[row] & (Command::CANCELED | Command::FAILOVER) == 0 && host.time(Boundary::HRecv, row) != NONE
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Parts, apart, key, stretches};
    use crate::join::{JoinOptions, Joined, SetAside, join_recordings};
    use crate::lanes::{Item, Lanes};
    use crate::matching::{Fate, Known, Mark};
    use crate::recording::Recording;
    use crate::synthetic::{Load, Pattern, Random, Runs};
    use proptest::prelude::*;
    use run_format::{Boundary, Command, Event, Nanos, QueueId, Side};
    use std::collections::BTreeMap;

    /// Makes the load's network one that keeps the order of each queue's capsules, as a connection does.
    pub(crate) fn keep_order(runs: &mut Runs, later: i64) {
        let places: BTreeMap<u64, usize> =
            runs.target.commands.iter().enumerate().map(|(n, (id, _))| (*id, n)).collect();
        let mut order: Vec<usize> = (0..runs.host.commands.len()).collect();
        order.sort_by_key(|&n| {
            let c = &runs.host.commands[n].1;
            (c.queue, c.time(Boundary::HSent), c.time(Boundary::HDriver))
        });
        let mut last: BTreeMap<QueueId, u64> = BTreeMap::new();
        for n in order {
            let (id, h) = &mut runs.host.commands[n];
            let t = &mut runs.target.commands[places[id]].1;
            let received = t.time(Boundary::TRecv).unwrap().0;
            let least = last.get(&h.queue).map_or(0, |last| last + later as u64);
            let shift = least.saturating_sub(received);
            for time in t.times.iter_mut().flatten() {
                time.0 += shift;
            }
            for boundary in Boundary::of(Side::Host) {
                let sent_before = matches!(boundary, Boundary::HQueued | Boundary::HDriver | Boundary::HSent);
                if let Some(time) = h.times[boundary.slot()].as_mut().filter(|_| !sent_before) {
                    time.0 += shift;
                }
            }
            last.insert(h.queue, received + shift);
        }
    }

    /// What the trace ring tells of the target's commands.
    pub(crate) fn forget(runs: &mut Runs, random: &mut Random, nameless: f64) {
        for (_, c) in &mut runs.target.commands {
            c.flags |= Command::NO_CID;
            c.cid.0 = 0;
            c.nsid = 0;
            if random.unit() < nameless {
                (c.opcode, c.slba, c.nlb0) = (0xff, 0, 0);
            }
        }
    }

    /// Takes away what a ring that was overrun from `from` to `to` lacks, and notes when that was.
    pub(crate) fn overrun(runs: &mut Runs, random: &mut Random, from: u64, to: u64) {
        runs.target.commands.retain(|(_, c)| {
            let (begin, end) = (c.time(Boundary::TRecv).unwrap().0, c.time(Boundary::TResp).unwrap().0);
            end < from || begin > to || random.unit() < 0.2
        });
        for (at, how) in [(from, "begins"), (to, "ends")] {
            runs.target.manifest.events.push(Event {
                at_ns: Nanos(at),
                what: format!("trace ring overrun {how}"),
                on: "lcore 0".into(),
            });
        }
    }

    /// Joins, and holds every pair against the truth.
    fn joined(runs: &Runs, options: &JoinOptions) -> Joined {
        let joined =
            join_recordings(Recording::of(&runs.host), Recording::of(&runs.target), options).unwrap();
        for pair in joined.pairs() {
            let (h, t) = (pair.host_row as usize, pair.target_row as usize);
            assert_eq!(runs.host.commands[h].0, runs.target.commands[t].0, "a wrong match");
        }
        let accounting = joined.accounting();
        assert_eq!(accounting.host_commands, accounting.joined + accounting.host.total());
        assert_eq!(accounting.target_commands, accounting.joined + accounting.target.total());
        joined
    }

    pub(crate) fn one_machine(load: Load) -> Runs {
        let load = Load { host_clock_ns: load.target_clock_ns, drift_ppm: 0.0, ..load };
        let mut runs = load.record();
        runs.target.manifest.machine.boot_id = runs.host.manifest.machine.boot_id.clone();
        runs
    }

    #[test]
    fn without_losses_nearly_everything_is_matched() {
        for (pattern, depth) in
            [(Pattern::Random(1 << 20), 32), (Pattern::Sequential, 8), (Pattern::OneBlock, 4)]
        {
            let mut runs = one_machine(Load { pattern, depth, commands: 20_000, ..Load::default() });
            keep_order(&mut runs, 1);
            forget(&mut runs, &mut Random::new(7), 0.0);
            let joined = joined(&runs, &JoinOptions::default());
            assert!(joined.accounting().joined > 19_900, "{pattern:?}: {:?}", joined.accounting());
        }
    }

    #[test]
    fn two_machines_clocks_are_found_without_cids() {
        let mut runs = Load { commands: 20_000, ..Load::default() }.record();
        keep_order(&mut runs, 1);
        forget(&mut runs, &mut Random::new(7), 0.0);
        let joined = joined(&runs, &JoinOptions::default());
        assert!(joined.accounting().joined > 19_000, "{:?}", joined.accounting());
    }

    #[test]
    fn a_gap_costs_what_was_in_it_and_no_more() {
        let mut runs = one_machine(Load { commands: 20_000, queues: 1, ..Load::default() });
        keep_order(&mut runs, 1);
        let mut random = Random::new(7);
        forget(&mut runs, &mut random, 0.01);
        let times = |n: usize| runs.target.commands[n].1.time(Boundary::TRecv).unwrap().0;
        let (from, to) = (times(8_000), times(9_000));
        let all = runs.target.commands.len();
        overrun(&mut runs, &mut random, from, to);
        let gone = (all - runs.target.commands.len()) as u64;
        let joined = joined(&runs, &JoinOptions::default());
        assert!(gone > 700);
        assert!(joined.accounting().joined > 18_700, "{:?}", joined.accounting());
        assert_eq!(joined.accounting().host.of(SetAside::Implausible), 0);
    }

    #[test]
    fn a_contradiction_spoils_only_its_piece() {
        // Commands one at a time, so that each is a piece of its own.
        let mut runs =
            one_machine(Load { commands: 1_000, queues: 1, depth: 1, pause_ns: 50_000.0, ..Load::default() });
        keep_order(&mut runs, 1);
        forget(&mut runs, &mut Random::new(7), 0.0);
        // Lost without a trace, which no ring does.
        runs.target.commands.remove(500);
        let joined = joined(&runs, &JoinOptions::default());
        assert_eq!(joined.accounting().joined, 999);
    }

    #[test]
    fn stretches_lie_between_the_gaps() {
        let mut runs = one_machine(Load { commands: 10, ..Load::default() });
        let event = |at: u64, how: &str| Event {
            at_ns: Nanos(at),
            what: format!("trace ring overrun {how}"),
            on: "lcore 0".into(),
        };
        let of = |runs: &Runs| stretches(&Recording::of(&runs.target), (0, 1_000));
        assert_eq!(of(&runs), [(0, 1_000)]);
        runs.target.manifest.events = vec![
            event(500, "begins"),
            event(100, "begins"),
            event(150, "begins"),
            event(160, "ends"),
            event(200, "ends"),
        ];
        assert_eq!(of(&runs), [(0, 100), (200, 500)]);
        assert_eq!(apart(&[]).count(), 0);
    }

    /// With many commands of one kind under way for long, a line that is a sixth of their length beside the truth
    /// explains all of them by their neighbours.
    #[test]
    fn a_clock_that_neighbours_agree_with_matches_nothing_wrongly() {
        let seed = 17_507_423_069_027_795_731;
        let load = Load {
            seed,
            commands: 929,
            depth: 32,
            queues: 2,
            pattern: Pattern::Random(2),
            pause_ns: 500.0,
            ..Load::default()
        };
        let mut runs = load.record();
        keep_order(&mut runs, 3_000);
        let mut random = Random::new(seed ^ 1);
        forget(&mut runs, &mut random, 0.180_958_240_522_762_08);
        runs.host.commands.retain(|_| random.unit() < 1.0);
        let window = runs.target.manifest.window;
        let span = (window.end_ns.0 - window.start_ns.0) as f64;
        let from = window.start_ns.0 + (0.592_543_339_101_023_6 * span) as u64;
        overrun(&mut runs, &mut random, from, from + (0.097_808_238_421_655_77 * span) as u64);
        joined(&runs, &JoinOptions::default());
    }

    /// What a target without cids is told of a load, and what it lacks.
    #[derive(Clone, Debug)]
    pub(crate) struct Hostile {
        seed: u64,
        commands: usize,
        depth: u16,
        queues: u16,
        pattern: Pattern,
        keep: f64,
        nameless: f64,
        gaps: Vec<(f64, f64)>,
        later: i64,
        pub(crate) apart: bool,
        pause_ns: f64,
    }

    impl Hostile {
        pub(crate) fn record(&self) -> Runs {
            let &Hostile { seed, commands, depth, queues, pattern, pause_ns, .. } = self;
            let load = Load { seed, commands, depth, queues, pattern, pause_ns, ..Load::default() };
            let mut runs = if self.apart { load.record() } else { one_machine(load) };
            keep_order(&mut runs, self.later);
            let mut random = Random::new(seed ^ 1);
            forget(&mut runs, &mut random, self.nameless);
            runs.host.commands.retain(|_| random.unit() < self.keep);
            let window = runs.target.manifest.window;
            let span = (window.end_ns.0 - window.start_ns.0) as f64;
            for (at, length) in &self.gaps {
                let from = window.start_ns.0 + (at * span) as u64;
                overrun(&mut runs, &mut random, from, from + (length * span) as u64);
            }
            runs
        }
    }

    pub(crate) fn hostile() -> impl Strategy<Value = Hostile> {
        let pattern = prop_oneof![
            Just(Pattern::OneBlock),
            Just(Pattern::Random(2)),
            Just(Pattern::Random(30)),
            Just(Pattern::Sequential)
        ];
        let load = (
            any::<u64>(),
            50usize..1_500,
            prop_oneof![Just(1u16), 2u16..6, Just(32u16)],
            1u16..3,
            pattern,
            prop_oneof![Just(500.0f64), Just(50_000.0f64)],
        );
        let recorded = (
            prop_oneof![Just(1.0f64), 0.5f64..1.0],
            prop_oneof![Just(0.0f64), 0.0f64..0.3],
            proptest::collection::vec((0.0f64..1.0, 0.0f64..0.2), 0..4),
            prop_oneof![Just(1i64), Just(3_000i64)],
            any::<bool>(),
        );
        (load, recorded).prop_map(
            |((seed, commands, depth, queues, pattern, pause_ns), (keep, nameless, gaps, later, apart))| {
                Hostile {
                    seed,
                    commands,
                    depth,
                    queues,
                    pattern,
                    keep,
                    nameless,
                    gaps,
                    later,
                    apart,
                    pause_ns,
                }
            },
        )
    }

    /// The items of a run, all of one queue a lane.
    fn items(run: &Recording) -> Vec<Item> {
        let (begin, end) = match run.manifest.side {
            Side::Host => (Boundary::HSent, Boundary::HRecv),
            Side::Target => (Boundary::TRecv, Boundary::TResp),
        };
        (0..run.len())
            .map(|row| Item {
                lane: u64::from(run.queue[row]),
                key: key(run.opcode[row], run.slba[row], run.nlb[row]),
                begin: run.time(begin, row),
                end: run.time(end, row),
                row: row as u32,
            })
            .collect()
    }

    /// What so many items at a time come to, in the order in which they end: the pairs, and each row's fate.
    fn in_parts(
        (host, target): (&Recording, &Recording),
        mut parts: Parts,
        round: usize,
        force: impl Fn(usize) -> bool,
    ) -> (Vec<(u32, u32)>, [Vec<Fate>; 2]) {
        let mut rest = [items(host), items(target)];
        rest.iter_mut().for_each(|items| items.sort_by_key(|item| std::cmp::Reverse(item.end)));
        let mut held: [Vec<Item>; 2] = [Vec::new(), Vec::new()];
        let mut fates = [vec![None; host.len()], vec![None; target.len()]];
        let (mut pairs, mut marks) = (Vec::new(), vec![Mark::Clean; target.len()]);
        for n in 0.. {
            for (held, rest) in held.iter_mut().zip(&mut rest) {
                held.extend(rest.split_off(rest.len().saturating_sub(round)));
            }
            let least = |items: &[Item], of: fn(&Item) -> i64| items.iter().map(of).min().unwrap_or(i64::MAX);
            let all = rest.iter().all(Vec::is_empty);
            let known = Known {
                host: least(&rest[0], |item| item.end),
                target: least(&rest[1], |item| item.end),
                begun: least(&rest[0], |item| item.begin),
                all,
                force: force(n),
            };
            let lanes = held.each_ref().map(|items| Lanes::without_time(items.clone()));
            let part = parts.part(host, &lanes[0], &lanes[1], &marks, known);
            pairs.extend(part.pairs);
            part.marks.iter().for_each(|&(row, mark)| marks[row as usize] = mark);
            for (side, of) in [part.host, part.target].into_iter().enumerate() {
                for (item, fate) in lanes[side].items.iter().zip(of) {
                    fates[side][item.row as usize] = fate;
                }
                held[side].retain(|item| fates[side][item.row as usize].is_none());
            }
            if all {
                break;
            }
        }
        pairs.sort_unstable();
        (pairs, fates.map(|of| of.into_iter().map(|fate| fate.expect("decided at the end")).collect()))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

        /// Losses on the host, gaps on the target, few or one block, any depth, one machine or two: never a wrong
        /// match, and every command accounted for.
        #[test]
        fn no_match_is_ever_wrong(hostile in hostile()) {
            joined(&hostile.record(), &JoinOptions::default());
        }

        /// With room for the pieces, parts decide what the whole decides; with none, they match nothing wrongly.
        #[test]
        fn parts_decide_what_the_whole_decides(hostile in hostile(), round in 1usize..400, seldom in 1usize..4) {
            let runs = Hostile { apart: false, ..hostile }.record();
            let (host, target) = (Recording::of(&runs.host), Recording::of(&runs.target));
            let parts = || Parts::of_one_machine(stretches(&target, (0, i64::MAX)));
            let whole = in_parts((&host, &target), parts(), usize::MAX, |_| false);
            prop_assert_eq!(&in_parts((&host, &target), parts(), round, |_| false), &whole);
            let (pairs, fates) = in_parts((&host, &target), parts(), round, |n| n % seldom == 0);
            for &(h, t) in &pairs {
                prop_assert_eq!(runs.host.commands[h as usize].0, runs.target.commands[t as usize].0, "a wrong match");
            }
            for of in &fates {
                prop_assert_eq!(of.iter().filter(|fate| **fate == Fate::Matched).count(), pairs.len());
            }
        }
    }

    /// A queue that is never idle is one piece: cut, it loses what lies at the cuts.
    #[test]
    fn what_is_cut_is_matched_nearly_as_well() {
        let mut runs = one_machine(Load { commands: 20_000, queues: 1, depth: 32, ..Load::default() });
        keep_order(&mut runs, 1);
        forget(&mut runs, &mut Random::new(7), 0.01);
        let (host, target) = (Recording::of(&runs.host), Recording::of(&runs.target));
        let parts = Parts::of_one_machine(stretches(&target, (0, i64::MAX)));
        let (pairs, _) = in_parts((&host, &target), parts, 1_000, |_| true);
        assert!(pairs.len() > 19_800, "{}", pairs.len());
    }
}
