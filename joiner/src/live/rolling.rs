//! What came in the current slot, in the last ones and since the start, without keeping each slot for good. It knows
//! nothing of commands.

use crate::histogram::Histogram;
use std::collections::VecDeque;

/// Slots that are kept one by one.
pub(crate) const SLOTS: usize = 10;
/// Groups of [`SLOTS`] that are kept, besides the one that is being filled.
const GROUPS: usize = 5;

/// What adds up.
pub(crate) trait Sum: Default {
    /// Adds another.
    fn add(&mut self, other: &Self);
    /// Whether there is nothing in it.
    fn is_none(&self) -> bool;
}

impl Sum for u64 {
    fn add(&mut self, other: &u64) {
        *self += other;
    }

    fn is_none(&self) -> bool {
        *self == 0
    }
}

/// Which stretch of time figures are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Over {
    /// The last whole slot.
    #[default]
    Slot,
    /// The last ten slots.
    Ten,
    /// The last fifty to sixty slots.
    Sixty,
    /// All since the start.
    Start,
}

impl Over {
    /// All of them, the shortest first.
    pub const ALL: [Over; 4] = [Over::Slot, Over::Ten, Over::Sixty, Over::Start];
}

/// Something over the stretches of [`Over`].
#[derive(Debug, Default)]
pub(crate) struct Rolling<T> {
    /// The slot that goes on.
    pub(crate) now: T,
    /// The last ones, the newest at the end.
    slots: VecDeque<T>,
    groups: VecDeque<T>,
    /// The group that is being filled.
    group: T,
    total: T,
}

impl<T: Sum> Rolling<T> {
    /// The slot is over. `ends_group` says that it is the last of its group.
    pub(crate) fn end_slot(&mut self, ends_group: bool) {
        let ended = std::mem::take(&mut self.now);
        if !ended.is_none() {
            self.total.add(&ended);
            self.group.add(&ended);
        }
        if self.slots.len() == SLOTS {
            self.slots.pop_front();
        }
        self.slots.push_back(ended);
        if ends_group {
            if self.groups.len() == GROUPS {
                self.groups.pop_front();
            }
            self.groups.push_back(std::mem::take(&mut self.group));
        }
    }

    /// What came in a stretch of time, up to the last slot's end.
    pub(crate) fn over(&self, over: Over) -> T {
        let mut sum = T::default();
        match over {
            Over::Slot => self.slots.back().into_iter().for_each(|slot| sum.add(slot)),
            Over::Ten => self.slots.iter().for_each(|slot| sum.add(slot)),
            Over::Sixty => self.groups.iter().chain([&self.group]).for_each(|group| sum.add(group)),
            Over::Start => sum.add(&self.total),
        }
        sum
    }

    /// What came since the start, up to the last slot's end.
    pub(crate) fn total(&self) -> &T {
        &self.total
    }

    /// Adds what another had since the start to this one's.
    pub(crate) fn inherit(&mut self, gone: &Rolling<T>) {
        self.total.add(&gone.total);
    }

    /// Whether nothing came in all that is kept of the last slots.
    pub(crate) fn is_idle(&self) -> bool {
        self.now.is_none() && self.group.is_none() && self.slots.iter().chain(&self.groups).all(Sum::is_none)
    }
}

/// Figures of one class of commands: how many, their bytes, and latency, two stages and the rest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    pub(crate) commands: u64,
    pub(crate) bytes: u64,
    pub(crate) times: [Histogram; 4],
}

impl Figures {
    pub(crate) fn command(&mut self, times: &[i64; 4], bytes: u32) {
        self.commands += 1;
        self.bytes += u64::from(bytes);
        for (histogram, time) in self.times.iter_mut().zip(times) {
            histogram.add(*time);
        }
    }
}

impl Sum for Figures {
    fn add(&mut self, other: &Figures) {
        self.commands += other.commands;
        self.bytes += other.bytes;
        self.times.iter_mut().zip(&other.times).for_each(|(ours, theirs)| ours.merge(theirs));
    }

    fn is_none(&self) -> bool {
        self.commands == 0
    }
}

/// Figures of one queue: as those of a class, but of the stages the sums alone.
#[derive(Clone, Debug, Default)]
pub(crate) struct QueueFigures {
    pub(crate) commands: u64,
    pub(crate) bytes: u64,
    pub(crate) sums: [i128; 3],
    pub(crate) latency: Histogram,
}

impl QueueFigures {
    pub(crate) fn command(&mut self, times: &[i64; 4], bytes: u32) {
        self.commands += 1;
        self.bytes += u64::from(bytes);
        let [latency, stages @ ..] = times;
        self.latency.add(*latency);
        self.sums.iter_mut().zip(stages).for_each(|(sum, time)| *sum += i128::from(*time));
    }
}

impl Sum for QueueFigures {
    fn add(&mut self, other: &QueueFigures) {
        self.commands += other.commands;
        self.bytes += other.bytes;
        self.sums.iter_mut().zip(other.sums).for_each(|(ours, theirs)| *ours += theirs);
        self.latency.merge(&other.latency);
    }

    fn is_none(&self) -> bool {
        self.commands == 0
    }
}

#[cfg(test)]
mod tests {
    use super::{Over, Rolling};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_stretch_has_what_came_in_it(slots in proptest::collection::vec(0u64..100, 0..200)) {
            let mut rolling = Rolling::<u64>::default();
            for (n, &came) in slots.iter().enumerate() {
                rolling.now += came;
                rolling.end_slot((n + 1) % super::SLOTS == 0);
            }
            let last = |n: usize| slots.iter().rev().take(n).sum::<u64>();
            prop_assert_eq!(rolling.over(Over::Slot), last(1));
            prop_assert_eq!(rolling.over(Over::Ten), last(10));
            prop_assert_eq!(rolling.over(Over::Sixty), last(50 + slots.len() % 10));
            prop_assert_eq!(rolling.over(Over::Start), last(usize::MAX));
            prop_assert_eq!(rolling.is_idle(), last(50 + slots.len() % 10) == 0);
        }
    }
}
