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

use crate::clock::{Clock, Line, SLACK};
use crate::lanes::{Item, Lanes, bounds};
use crate::matching::{Fate, Matching};
use crate::recording::{NONE, Recording};
use rayon::prelude::*;
use run_format::{Boundary, Command, Operation, State};

/// What an opcode is where the target's source does not tell it.
const NO_OPCODE: u8 = 0xff;
/// The key of a command of which nothing is known.
const ANY: u64 = u64::MAX;
/// What a recording that was cut may lack of its end, ns.
const CUT: i64 = 1_000_000_000;
/// Events that tell of a gap in a target's recording.
const GAP_BEGINS: &str = "trace ring overrun begins";
const GAP_ENDS: &str = "trace ring overrun ends";

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
    /// Index among all the host's items.
    index: usize,
}

/// Matches every queue by its order where the clocks' offset is known only roughly, and finds it from the matches.
/// A line says little where many commands of one key are under way at once: it explains true pairs of another
/// line by their neighbours, as far away as commands are long. So nothing is taken for impossible within that
/// reach. `None` where the order contradicts the line.
pub(crate) fn matched_around(
    host: &Recording,
    target: &Recording,
    h: &Lanes,
    t: &Lanes,
    line: &Line,
    window: (i64, i64),
) -> Option<(Clock, Matching)> {
    let around = Clock::around(line, reach(h));
    let Ordered { matching, embedded, contradicted } =
        ordered(host, h, t, &around, &stretches(target, window));
    if contradicted * 10 > contradicted + embedded {
        return None;
    }
    let rows = |items: &[Item], run: &Recording| {
        let mut of_row = vec![0u32; run.len()];
        items.iter().enumerate().for_each(|(n, item)| of_row[item.row as usize] = n as u32);
        of_row
    };
    let (of_host, of_target) = (rows(&h.items, host), rows(&t.items, target));
    let mut pairs: Vec<(i64, i64, i64)> = matching
        .pairs
        .iter()
        .map(|&(hr, tr)| {
            let (h, t) = (h.items[of_host[hr as usize] as usize], t.items[of_target[tr as usize] as usize]);
            let (low, high) = bounds(&h, &t);
            (t.begin, low, high)
        })
        .collect();
    pairs.sort_unstable();
    let clock = Clock::through(&pairs).unwrap_or(around);
    Some((clock, matching))
}

/// How long all but the longest commands of the host are, ns.
fn reach(host: &Lanes) -> i64 {
    let mut lengths: Vec<i64> = host.items.iter().map(|item| item.end - item.begin).collect();
    let place = lengths.len() - 1 - lengths.len().min(lengths.len() / 100);
    if lengths.is_empty() { 0 } else { *lengths.select_nth_unstable(place).1 }
}

/// Matches every queue by its order, by a clock that is known.
pub(crate) fn matching(
    host: &Recording,
    h: &Lanes,
    t: &Lanes,
    clock: &Clock,
    stretches: &[(i64, i64)],
) -> Matching {
    ordered(host, h, t, clock, stretches).matching
}

/// What the order tells.
#[derive(Debug)]
struct Ordered {
    matching: Matching,
    /// Host commands in pieces that have a place in the target's order, and in pieces that have none.
    embedded: usize,
    contradicted: usize,
}

fn ordered(host: &Recording, h: &Lanes, t: &Lanes, clock: &Clock, stretches: &[(i64, i64)]) -> Ordered {
    let mut matching = Matching {
        pairs: Vec::new(),
        host: vec![Fate::Alone; h.items.len()],
        target: vec![Fate::Alone; t.items.len()],
    };
    let (mut embedded, mut contradicted) = (0, 0);
    let lanes: Vec<(u64, usize, &[Item])> = h.lanes().collect();
    let of_lanes: Vec<Found> = lanes
        .par_iter()
        .map(|(lane, from, items)| {
            let targets = t.lane(*lane);
            let first = t.lanes().find(|l| l.0 == *lane).map_or(0, |l| l.1);
            let mut found = Found::default();
            let mut sure: Vec<Sure<'_>> = items
                .iter()
                .enumerate()
                .map(|(n, item)| Sure { item, index: from + n })
                .filter(|sure| is_within(sure.item, clock, stretches))
                .collect();
            // Capsules that one send took have one time; they were queued in the order of their submission.
            let driver = |sure: &Sure<'_>| host.time(Boundary::HDriver, sure.item.row as usize);
            sure.sort_by_key(|sure| (sure.item.begin, driver(sure), sure.item.row));
            for stretch in apart(&sure) {
                embed(stretch, targets, first, clock, &mut found);
            }
            found
        })
        .collect();
    for found in of_lanes {
        for (index, fate) in found.host {
            matching.host[index] = fate;
        }
        for (index, fate) in found.target {
            if matching.target[index] != Fate::Matched {
                matching.target[index] = fate;
            }
        }
        matching.pairs.extend(found.pairs);
        embedded += found.embedded;
        contradicted += found.contradicted;
    }
    matching.pairs.sort_unstable();
    Ordered { matching, embedded, contradicted }
}

/// What became of the items of one queue.
#[derive(Debug, Default)]
struct Found {
    pairs: Vec<(u32, u32)>,
    host: Vec<(usize, Fate)>,
    target: Vec<(usize, Fate)>,
    embedded: usize,
    contradicted: usize,
}

/// Whether a host command lies wholly in a stretch of the target's recording, at every offset that is possible.
fn is_within(item: &Item, clock: &Clock, stretches: &[(i64, i64)]) -> bool {
    let near = clock.target_time(item.begin);
    let (low, high) = clock.at(near);
    let (begin, end) = (item.begin - high - SLACK, item.end - low + SLACK);
    let n = stretches.partition_point(|s| s.1 < end);
    stretches.get(n).is_some_and(|s| s.0 <= begin && end <= s.1)
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

/// Whether a target command may be the host command's partner at an offset that is possible. What is true never
/// fails here.
fn may_be(host: &Item, target: &Item, clock: &Clock) -> bool {
    if target.key != host.key && target.key != ANY {
        return false;
    }
    let (low, high) = clock.at(target.begin);
    let (from, to) = (host.begin - target.begin - SLACK, host.end - target.end + SLACK);
    from <= to && from <= high + SLACK && to >= low - SLACK
}

/// Finds the earliest and the latest partners that the commands of a piece can have together.
fn embed(piece: &[Sure<'_>], targets: &[Item], first: usize, clock: &Clock, found: &mut Found) {
    let after = |item: &Item| {
        // Offsets change too little within a command to matter here.
        let (_, high) = clock.at(clock.target_time(item.begin));
        item.begin - high - 4 * SLACK
    };
    let before = |item: &Item| {
        let (low, _) = clock.at(clock.target_time(item.end));
        item.end - low + 4 * SLACK
    };
    let mut earliest = Vec::with_capacity(piece.len());
    let mut next = piece.first().map_or(0, |sure| {
        let from = after(sure.item);
        targets.partition_point(|t| t.begin < from)
    });
    for sure in piece {
        let upto = before(sure.item);
        let partner = (next..targets.len())
            .take_while(|&n| targets[n].begin <= upto)
            .find(|&n| may_be(sure.item, &targets[n], clock));
        let Some(n) = partner else { break };
        earliest.push(n);
        next = n + 1;
    }
    let mut latest = Vec::with_capacity(piece.len());
    if earliest.len() == piece.len() {
        let mut end = piece.last().map_or(0, |sure| {
            let upto = before(sure.item);
            targets.partition_point(|t| t.begin <= upto)
        });
        for sure in piece.iter().rev() {
            let from = after(sure.item);
            let partner = (0..end)
                .rev()
                .take_while(|&n| targets[n].begin >= from)
                .find(|&n| may_be(sure.item, &targets[n], clock));
            let Some(n) = partner else { break };
            latest.push(n);
            end = n;
        }
        latest.reverse();
    }
    if latest.len() != piece.len() {
        // Something is not as it must be: nothing here is sure.
        found.contradicted += piece.len();
        found.host.extend(piece.iter().map(|sure| (sure.index, Fate::Ambiguous)));
        return;
    }
    found.embedded += piece.len();
    let mut marked = 0;
    for (sure, (&n, &last)) in piece.iter().zip(earliest.iter().zip(&latest)) {
        if n == last {
            found.pairs.push((sure.item.row, targets[n].row));
            found.host.push((sure.index, Fate::Matched));
            found.target.push((first + n, Fate::Matched));
        } else {
            found.host.push((sure.index, Fate::Ambiguous));
            found.target.extend((n.max(marked)..=last).map(|n| (first + n, Fate::Ambiguous)));
        }
        marked = marked.max(last + 1);
    }
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
mod tests {
    use super::{apart, stretches};
    use crate::join::{JoinOptions, Joined, SetAside, join_recordings};
    use crate::recording::Recording;
    use crate::synthetic::{Load, Pattern, Random, Runs};
    use proptest::prelude::*;
    use run_format::{Boundary, Command, Event, Nanos, QueueId};
    use std::collections::BTreeMap;

    /// Makes the load's network one that keeps the order of each queue's capsules, as a connection does.
    fn keep_order(runs: &mut Runs, later: i64) {
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
            for boundary in Boundary::of(run_format::Side::Host) {
                let sent_before = matches!(boundary, Boundary::HQueued | Boundary::HDriver | Boundary::HSent);
                if let Some(time) = h.times[boundary.slot()].as_mut().filter(|_| !sent_before) {
                    time.0 += shift;
                }
            }
            last.insert(h.queue, received + shift);
        }
    }

    /// What the trace ring tells of the target's commands.
    fn forget(runs: &mut Runs, random: &mut Random, nameless: f64) {
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
    fn overrun(runs: &mut Runs, random: &mut Random, from: u64, to: u64) {
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

    fn one_machine(load: Load) -> Runs {
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

    proptest! {
        #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

        /// Losses on the host, gaps on the target, few or one block, any depth, one machine or two: never a wrong
        /// match, and every command accounted for.
        #[test]
        fn no_match_is_ever_wrong(
            seed: u64,
            commands in 50usize..1_500,
            depth in prop_oneof![Just(1u16), 2u16..6, Just(32u16)],
            queues in 1u16..3,
            pattern in prop_oneof![
                Just(Pattern::OneBlock), Just(Pattern::Random(2)), Just(Pattern::Random(30)), Just(Pattern::Sequential)
            ],
            keep in prop_oneof![Just(1.0f64), 0.5f64..1.0],
            nameless in prop_oneof![Just(0.0f64), 0.0f64..0.3],
            gaps in proptest::collection::vec((0.0f64..1.0, 0.0f64..0.2), 0..4),
            later in prop_oneof![Just(1i64), Just(3_000i64)],
            apart: bool,
            pause_ns in prop_oneof![Just(500.0f64), Just(50_000.0f64)],
        ) {
            let load = Load { seed, commands, depth, queues, pattern, pause_ns, ..Load::default() };
            let mut runs = if apart { load.record() } else { one_machine(load) };
            keep_order(&mut runs, later);
            let mut random = Random::new(seed ^ 1);
            forget(&mut runs, &mut random, nameless);
            runs.host.commands.retain(|_| random.unit() < keep);
            let window = runs.target.manifest.window;
            let span = (window.end_ns.0 - window.start_ns.0) as f64;
            for (at, length) in gaps {
                let from = window.start_ns.0 + (at * span) as u64;
                overrun(&mut runs, &mut random, from, from + (length * span) as u64);
            }
            joined(&runs, &JoinOptions::default());
        }
    }
}
