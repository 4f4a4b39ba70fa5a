//! The commands of one side, sorted so that the same queue and cid stand together in time: what the clock
//! and the matching look partners up in.
//!
//! A cid is not reused before its completion, so the commands of a lane (one queue, one cid) are disjoint in
//! time on both sides. The matching rests on that.

use crate::radix;
use std::ops::Range;

/// One command, as far as matching needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    /// Link of its queue, and its cid.
    pub(crate) lane: u64,
    /// Hash of what else both sides see of it on the wire.
    pub(crate) key: u64,
    /// When it went out to (host) or came in from (target) the network.
    pub(crate) begin: i64,
    /// When its completion came in from (host) or went out to (target) the network.
    pub(crate) end: i64,
    /// Its row in the recording.
    pub(crate) row: u32,
}

impl Item {
    /// Whether two commands may be the same as far as the wire tells.
    pub(crate) fn same(&self, other: &Item) -> bool {
        self.key == other.key && self.lane == other.lane
    }
}

/// The clock offsets (host time less target time) at which the target's interval fits inside the host's;
/// empty where the first is larger.
pub(crate) fn bounds(host: &Item, target: &Item) -> (i64, i64) {
    (host.begin - target.begin, host.end - target.end)
}

/// The lane of a command.
pub(crate) fn lane(link: u32, cid: u16) -> u64 {
    u64::from(link) << 16 | u64::from(cid)
}

/// All of one side.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// By lane, then begin, then end, then row.
    pub(crate) items: Vec<Item>,
    /// Each lane with the index of its first item, in order, and one past the end.
    starts: Vec<(u64, u32)>,
    /// Indices of `items` by begin; empty where it is not needed.
    pub(crate) by_time: Vec<u32>,
}

impl Lanes {
    /// With the order in time, which the search of the clock needs.
    pub(crate) fn new(items: Vec<Item>) -> Lanes {
        let mut lanes = Lanes::without_time(items);
        // Commands that begin together are ordered by their places, and so by all that they are: the result does
        // not depend on the order of rows.
        let begins = lanes.items.iter().map(|i| i.begin);
        lanes.by_time = radix::order(begins, |&a, &b| {
            (lanes.items[a as usize].begin, a).cmp(&(lanes.items[b as usize].begin, b))
        });
        lanes
    }

    /// Without the order in time.
    pub(crate) fn without_time(given: Vec<Item>) -> Lanes {
        let (mut items, starts) = by_lane(given);
        let mut rest = &mut items[..];
        for (n, start) in starts.iter().enumerate() {
            let length = starts.get(n + 1).map_or(rest.len(), |next| (next.1 - start.1) as usize);
            let (of_lane, others) = rest.split_at_mut(length);
            rest = others;
            // The commands of a lane follow each other, so mostly they are recorded in the order of their times.
            let whole = |i: &Item| (i.begin, i.end, i.key, i.row);
            if !of_lane.is_sorted_by_key(whole) {
                of_lane.sort_unstable_by_key(whole);
            }
        }
        Lanes { items, starts, by_time: Vec::new() }
    }

    /// The lanes in order, each with its items and the index of the first of them.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (u64, usize, &[Item])> {
        (0..self.starts.len()).map(|n| {
            let (lane, from) = self.starts[n];
            (lane, from as usize, &self.items[from as usize..self.start_of(n + 1)])
        })
    }

    /// The items of a lane, in time order.
    pub(crate) fn lane(&self, lane: u64) -> &[Item] {
        &self.items[self.range_of(lane)]
    }

    /// The places of a lane's items.
    pub(crate) fn range_of(&self, lane: u64) -> Range<usize> {
        match self.starts.binary_search_by_key(&lane, |s| s.0) {
            Ok(n) => self.starts[n].1 as usize..self.start_of(n + 1),
            Err(n) => self.start_of(n)..self.start_of(n),
        }
    }

    /// Where the items of a lane and of all before it end.
    pub(crate) fn end_of(&self, lane: u64) -> usize {
        self.start_of(self.starts.partition_point(|s| s.0 <= lane))
    }

    fn start_of(&self, n: usize) -> usize {
        self.starts.get(n).map_or(self.items.len(), |s| s.1 as usize)
    }
}

/// Items by lane, those of one in the order given; and each lane with the index of its first item.
fn by_lane(mut given: Vec<Item>) -> (Vec<Item>, Vec<(u64, u32)>) {
    let bounds = given.iter().fold((u64::MAX, 0), |b, i| (b.0.min(i.lane), b.1.max(i.lane)));
    let span = bounds.1.saturating_sub(bounds.0);
    if span > 4 * given.len() as u64 {
        // Few items of very many lanes. The sort keeps the order of equals.
        given.sort_by_key(|i| i.lane);
        let starts = (0..).zip(&given).map(|(n, item)| (item.lane, n));
        let mut starts: Vec<(u64, u32)> = starts.collect();
        starts.dedup_by_key(|start| start.0);
        return (given, starts);
    }
    let place_of = |item: &Item| (item.lane - bounds.0) as usize;
    let mut places = vec![0u32; if given.is_empty() { 0 } else { span as usize + 1 }];
    given.iter().for_each(|item| places[place_of(item)] += 1);
    let mut starts = Vec::new();
    let mut before = 0;
    for (n, place) in places.iter_mut().enumerate() {
        let here = std::mem::replace(place, before);
        if here > 0 {
            starts.push((bounds.0 + n as u64, before));
        }
        before += here;
    }
    // Places are moved first: they are small, and stay in the processor's caches.
    let mut order = vec![0u32; given.len()];
    for (n, item) in (0..).zip(&given) {
        let place = &mut places[place_of(item)];
        order[*place as usize] = n;
        *place += 1;
    }
    (order.into_iter().map(|n| given[n as usize]).collect(), starts)
}

/// How far from where the last search ended a search looks before it halves the rest.
const NEAR: usize = 8;

/// As `partition_point`, and quicker where the answer is at or a little after `hint`.
pub(crate) fn partition_from<T>(sorted: &[T], hint: usize, holds: impl Fn(&T) -> bool) -> usize {
    let from = hint.min(sorted.len());
    if from > 0 && !holds(&sorted[from - 1]) {
        return sorted[..from].partition_point(holds);
    }
    let near = (from + NEAR).min(sorted.len());
    for (n, item) in sorted[from..near].iter().enumerate() {
        if !holds(item) {
            return from + n;
        }
    }
    near + sorted[near..].partition_point(holds)
}

/// How many items of a lane are looked at past the last that could fit: where records are in order none
/// can follow, and a few odd records must not hide the right one.
const PAST: usize = 3;

/// Calls `found` with each host item of `lane` that is the same as `target` on the wire and fits around it at
/// some offset of `low..=high`. `hint` is where the last search in this lane ended.
pub(crate) fn hosts_around<'a>(
    lane: &'a [Item],
    target: &Item,
    low: i64,
    high: i64,
    hint: &mut usize,
    mut found: impl FnMut(usize, &'a Item),
) {
    let after = partition_from(lane, *hint, |h| h.begin <= target.begin + high);
    *hint = after;
    let mut past = 0;
    for (n, host) in lane[..after].iter().enumerate().rev() {
        if host.end < target.end + low {
            past += 1;
            if past > PAST {
                break;
            }
        } else if host.same(target) {
            let (lo, hi) = bounds(host, target);
            if lo <= hi && lo <= high && hi >= low {
                found(n, host);
            }
        }
    }
}

/// Calls `found` with each target item of `lane` that is the same as `host` on the wire and fits inside it at
/// some offset of `low..=high`.
pub(crate) fn targets_inside<'a>(
    lane: &'a [Item],
    host: &Item,
    low: i64,
    high: i64,
    mut found: impl FnMut(usize, &'a Item),
) {
    let from = lane.partition_point(|t| t.begin < host.begin - high);
    for (n, target) in lane.iter().enumerate().skip(from) {
        if target.begin > host.end - low {
            break;
        }
        if target.same(host) {
            let (lo, hi) = bounds(host, target);
            if lo <= hi && lo <= high && hi >= low {
                found(n, target);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Item, Lanes, lane, partition_from};
    use proptest::prelude::*;

    fn items() -> impl Strategy<Value = Vec<Item>> {
        let link = prop_oneof![0u32..3, Just(70_000)];
        let item =
            (link, 0u16..5, 0u64..3, 0i64..200, 0i64..20).prop_map(|(link, cid, key, begin, length)| Item {
                lane: lane(link, cid),
                key,
                begin,
                end: begin + length,
                row: 0,
            });
        proptest::collection::vec(item, 0..500)
    }

    #[test]
    fn there_may_be_none_and_the_last_lane_of_all() {
        assert_eq!(Lanes::new(Vec::new()).lanes().count(), 0);
        let last = Item { lane: u64::MAX, key: 0, begin: 1, end: 2, row: 0 };
        let lanes = Lanes::new(vec![last]);
        assert_eq!(lanes.lanes().map(|(lane, _, of)| (lane, of.len())).collect::<Vec<_>>(), [(u64::MAX, 1)]);
    }

    proptest! {
        #[test]
        fn lanes_are_in_order_and_time_is_too(mut items in items()) {
            for (row, item) in (0..).zip(&mut items) {
                item.row = row;
            }
            let whole = |i: &Item| (i.lane, i.begin, i.end, i.key, i.row);
            let lanes = Lanes::new(items.clone());
            items.sort_unstable_by_key(whole);
            prop_assert!(lanes.items.iter().map(whole).eq(items.iter().map(whole)));
            let mut by_time: Vec<u32> = (0..items.len() as u32).collect();
            by_time.sort_unstable_by_key(|&n| (items[n as usize].begin, n));
            prop_assert_eq!(&lanes.by_time, &by_time);
            for (lane, from, of_lane) in lanes.lanes() {
                prop_assert!(items[from..from + of_lane.len()].iter().all(|i| i.lane == lane));
            }
            prop_assert_eq!(lanes.lanes().map(|l| l.2.len()).sum::<usize>(), items.len());
        }

        #[test]
        fn a_hint_changes_no_search(mut v in proptest::collection::vec(0u32..50, 0..60), hint in 0usize..80, at in 0u32..50) {
            v.sort_unstable();
            prop_assert_eq!(partition_from(&v, hint, |&x| x <= at), v.partition_point(|&x| x <= at));
        }
    }
}
