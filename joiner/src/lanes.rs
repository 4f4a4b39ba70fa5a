//! The commands of one side, sorted so that the same queue and cid stand together in time: what the clock
//! and the matching look partners up in.
//!
//! A cid is not reused before its completion, so the commands of a lane (one queue, one cid) are disjoint in
//! time on both sides. The matching rests on that.

use crate::radix;

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
        // By lane; rows keep their order.
        let mut order: Vec<u64> = (0..given.len() as u64).collect();
        let lane_of = |n: u64| given[n as usize].lane;
        match u32::try_from(given.iter().map(|i| i.lane).max().unwrap_or(0)) {
            Ok(most) => {
                order.iter_mut().zip(&given).for_each(|(w, item)| *w |= item.lane << 32);
                radix::by_upper_half(&mut order, most);
                order.iter_mut().for_each(|w| *w &= u64::from(u32::MAX));
            }
            // More than 65 536 links.
            Err(_) => order.sort_by_key(|&n| lane_of(n)),
        }
        let mut items: Vec<Item> = order.iter().map(|&n| given[n as usize]).collect();
        drop(order);
        drop(given);
        let mut starts: Vec<(u64, u32)> = Vec::new();
        let mut from = 0;
        while from < items.len() {
            let lane = items[from].lane;
            let length = items[from..].iter().take_while(|i| i.lane == lane).count();
            starts.push((lane, from as u32));
            // The commands of a lane follow each other, so mostly they are recorded in the order of their times.
            let whole = |i: &Item| (i.begin, i.end, i.key, i.row);
            let of_lane = &mut items[from..from + length];
            if !of_lane.is_sorted_by_key(whole) {
                of_lane.sort_unstable_by_key(whole);
            }
            from += length;
        }
        Lanes { items, starts, by_time: Vec::new() }
    }

    /// The lanes in order, each with its items and the index of the first of them.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (u64, usize, &[Item])> {
        (0..self.starts.len()).map(|n| {
            let (lane, from) = self.starts[n];
            let to = self.starts.get(n + 1).map_or(self.items.len(), |s| s.1 as usize);
            (lane, from as usize, &self.items[from as usize..to])
        })
    }

    /// The items of a lane, in time order.
    pub(crate) fn lane(&self, lane: u64) -> &[Item] {
        match self.starts.binary_search_by_key(&lane, |s| s.0) {
            Ok(n) => {
                let to = self.starts.get(n + 1).map_or(self.items.len(), |s| s.1 as usize);
                &self.items[self.starts[n].1 as usize..to]
            }
            Err(_) => &[],
        }
    }
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
