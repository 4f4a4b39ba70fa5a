//! The commands of one side, sorted so that the same queue and cid stand together in time: what the clock
//! and the matching look partners up in.
//!
//! A cid is not reused before its completion, so the commands of a lane (one queue, one cid) are disjoint in
//! time on both sides. The matching rests on that.

use rayon::prelude::*;

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
    /// Indices of `items` by begin.
    pub(crate) by_time: Vec<u32>,
}

impl Lanes {
    pub(crate) fn new(mut items: Vec<Item>) -> Lanes {
        // The whole tuple, so that the result does not depend on the order of rows.
        items.par_sort_unstable_by_key(|i| (i.lane, i.begin, i.end, i.key, i.row));
        let mut starts: Vec<(u64, u32)> = Vec::new();
        for (n, item) in items.iter().enumerate() {
            if starts.last().is_none_or(|s| s.0 != item.lane) {
                starts.push((item.lane, n as u32));
            }
        }
        let mut by_time: Vec<u32> = (0..items.len() as u32).collect();
        by_time.par_sort_unstable_by_key(|&n| (items[n as usize].begin, n));
        Lanes { items, starts, by_time }
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

/// How many items of a lane are looked at past the last that could fit: where records are in order none
/// can follow, and a few odd records must not hide the right one.
const PAST: usize = 3;

/// Calls `found` with each host item of `lane` that is the same as `target` on the wire and fits around it at
/// some offset of `low..=high`.
pub(crate) fn hosts_around<'a>(
    lane: &'a [Item],
    target: &Item,
    low: i64,
    high: i64,
    mut found: impl FnMut(usize, &'a Item),
) {
    let after = lane.partition_point(|h| h.begin <= target.begin + high);
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
