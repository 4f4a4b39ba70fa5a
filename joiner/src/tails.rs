//! What makes the slowest commands slow: by how much each stage exceeds its own median in the commands above a
//! percentile, and what the percentile would be if a stage never took longer than its median. It knows commands by
//! their times alone.

use crate::histogram::RELATIVE_ERROR;
use crate::stats::{Distribution, needed};
use crate::student;
use serde::Serialize;

/// Stages, or what stands for some of them in a report of one side.
pub(crate) const PARTS: usize = 5;
/// The percentiles whose tails are told.
const TAILS: [f64; 2] = [0.99, 0.999];
/// One command in this many is kept: twice those above the lowest of these percentiles, since that percentile of what
/// would be is found among them.
const KEPT: u64 = 50;
/// Stretches of time that are left out in turn to learn how far a share may be off: commands that are slow together
/// are no independent witnesses.
const STRETCHES: usize = 20;
/// Fewer stretches with slow commands than this say nothing of it.
const FEWEST: usize = 5;
/// An interval holds the true value with this probability.
const CONFIDENCE: f64 = 0.95;

/// One command: when it began, and its times; ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timed {
    pub(crate) at: i64,
    pub(crate) latency: i64,
    /// They add up to `latency`. What a report does not have is 0.
    pub(crate) parts: [i64; PARTS],
}

impl Timed {
    /// Of latency and parts, as a report's figures begin.
    pub(crate) fn of(at: i64, figures: &[i64]) -> Timed {
        let figure = |n: usize| figures.get(n).copied().unwrap_or(0);
        Timed { at, latency: figure(0), parts: std::array::from_fn(|part| figure(1 + part)) }
    }
}

/// The slowest commands of a class of which all are seen, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Slowest {
    /// Of how many commands the slowest are kept, at least.
    most: usize,
    kept: Vec<Timed>,
    /// No command that was faster is among them.
    cut: i64,
}

impl Slowest {
    /// For a class of at most so many commands.
    pub(crate) fn of(commands: u64) -> Slowest {
        let most = usize::try_from(commands / KEPT).unwrap_or(usize::MAX).saturating_add(1);
        Slowest { most, kept: Vec::new(), cut: i64::MIN }
    }

    /// Whether a command with this latency may be one of them.
    pub(crate) fn takes(&self, latency: i64) -> bool {
        latency > self.cut
    }

    pub(crate) fn add(&mut self, command: Timed) {
        if self.takes(command.latency) {
            // A quarter more, so that choosing among them is rare.
            let room = self.most.saturating_add(self.most / 4);
            if self.kept.len() == self.kept.capacity() && self.kept.len() >= room / 2 {
                self.kept.reserve_exact(room.saturating_sub(self.kept.len()).max(1));
            }
            self.kept.push(command);
            if self.kept.len() >= room {
                self.shrink();
            }
        }
    }

    /// Adds those of another part of the class.
    pub(crate) fn merge(&mut self, other: &Slowest) {
        self.most = self.most.min(other.most);
        self.cut = self.cut.max(other.cut);
        let (cut, kept) = (self.cut, &other.kept);
        self.kept.retain(|c| c.latency > cut);
        self.kept.extend(kept.iter().filter(|c| c.latency > cut));
        self.shrink();
    }

    /// Keeps half as many; false where it keeps one only.
    pub(crate) fn halve(&mut self) -> bool {
        let some = self.most > 1;
        self.most = self.most.div_ceil(2);
        self.shrink();
        self.kept.shrink_to_fit();
        some
    }

    fn shrink(&mut self) {
        if self.kept.len() > self.most {
            // Of commands that are as slow as the last one that is kept, some would be dropped: then all are. Only their
            // latencies are put in order, which are a seventh of them.
            let mut latencies: Vec<i64> = self.kept.iter().map(|c| c.latency).collect();
            let last = latencies.len() - self.most;
            let (_, &mut least, _) = latencies.select_nth_unstable(last);
            self.cut = self.cut.max(least);
            let cut = self.cut;
            self.kept.retain(|c| c.latency > cut);
        }
    }

    /// Bytes that they take.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Slowest>() + self.kept.capacity() * size_of::<Timed>()
    }
}

/// What makes the commands above a percentile slow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tail {
    /// The percentile, such as 0.999.
    pub percentile: f64,
    /// Its value: the tail's commands took longer than this, ns.
    pub above_ns: i64,
    /// How many they are.
    pub commands: u64,
    /// Their mean latency, ns.
    pub mean_ns: f64,
    /// In how many of the twenty equal stretches of the recording they are.
    pub stretches: usize,
    /// Each stage's part in it, the largest first.
    pub causes: Vec<Cause>,
}

/// One stage's part in making commands slow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cause {
    /// Name of the stage, or `beyond_host` or `data_wait` in a report of one side.
    pub stage: &'static str,
    /// Its mean in these commands, ns.
    pub mean_ns: f64,
    /// Its median in all commands of the class, ns.
    pub median_ns: i64,
    /// The mean less the median, as a share of the excesses of all stages: they add up to 1.
    pub share: f64,
    /// The share's 95 % interval, by leaving out stretches of time in turn; null where the slow commands are in fewer
    /// than five of them.
    pub interval: Option<[f64; 2]>,
    /// What the percentile would be if this stage never took longer than its median.
    pub otherwise: Otherwise,
}

/// A percentile that would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Otherwise {
    /// Its value, ns.
    pub ns: i64,
    /// Whether it is that or less: beyond what is kept of the slow commands.
    pub at_most: bool,
}

/// The tails of a class of so many commands, from its slowest ones and the distributions of its latency and its parts.
/// Parts without a name are not told. Empty where the sample does not carry the percentiles or the medians.
pub(crate) fn tails(
    commands: u64,
    slowest: &Slowest,
    latency: &Distribution,
    parts: &[(Option<&'static str>, Option<i64>); PARTS],
) -> Vec<Tail> {
    let value = |percentile: f64| if percentile < 0.995 { latency.p99_ns } else { latency.p999_ns };
    let medians = parts.map(|(_, median)| median.unwrap_or(0));
    TAILS
        .into_iter()
        .filter(|&p| commands >= needed(p))
        .filter_map(|p| {
            // Of a histogram, what is one value to it may lie on either side of the cut.
            let near = |value: i64| value as f64 * (1.0 + 2.0 * RELATIVE_ERROR) >= slowest.cut as f64;
            let above = value(p).filter(|&value| near(value))?.max(slowest.cut);
            let slow: Vec<&Timed> = slowest.kept.iter().filter(|c| c.latency > above).collect();
            tail(p, above, commands, &slow, slowest, &medians, parts)
        })
        .collect()
}

fn tail(
    percentile: f64,
    above_ns: i64,
    commands: u64,
    slow: &[&Timed],
    slowest: &Slowest,
    medians: &[i64; PARTS],
    parts: &[(Option<&'static str>, Option<i64>); PARTS],
) -> Option<Tail> {
    let whole = Excess::of(slow, medians);
    // Where all that is slow is as fast as the rest, nothing makes it slow.
    if slow.is_empty() || whole.all() <= 0.0 {
        return None;
    }
    let stretches = stretches(slow, slowest, medians);
    let n = slow.len() as f64;
    let mut causes: Vec<Cause> = parts
        .iter()
        .enumerate()
        .filter_map(|(part, (name, _))| {
            let stage = (*name)?;
            Some(Cause {
                stage,
                mean_ns: whole.of[part] / n + medians[part] as f64,
                median_ns: medians[part],
                share: whole.share(part),
                interval: interval(&whole, &stretches, part),
                otherwise: otherwise(percentile, commands, slowest, part, medians[part]),
            })
        })
        .collect();
    causes.sort_by(|a, b| b.share.total_cmp(&a.share));
    Some(Tail {
        percentile,
        above_ns,
        commands: slow.len() as u64,
        mean_ns: slow.iter().map(|c| c.latency as f64).sum::<f64>() / n,
        stretches: stretches.len(),
        causes,
    })
}

/// By how much each part exceeds its median, summed over some commands; ns.
#[derive(Clone, Copy, Debug, Default)]
struct Excess {
    of: [f64; PARTS],
}

impl Excess {
    fn of(commands: &[&Timed], medians: &[i64; PARTS]) -> Excess {
        let mut sum = Excess::default();
        commands.iter().for_each(|command| sum.add(command, medians));
        sum
    }

    fn add(&mut self, command: &Timed, medians: &[i64; PARTS]) {
        for ((sum, part), median) in self.of.iter_mut().zip(command.parts).zip(medians) {
            *sum += (part - median) as f64;
        }
    }

    fn all(&self) -> f64 {
        self.of.iter().sum()
    }

    fn without(&self, other: &Excess) -> Excess {
        Excess { of: std::array::from_fn(|part| self.of[part] - other.of[part]) }
    }

    fn share(&self, part: usize) -> f64 {
        self.of[part] / self.all()
    }
}

/// The excess in each of the equal stretches of time in which there is any slow command. The time is that of all
/// commands that are kept.
fn stretches(slow: &[&Timed], slowest: &Slowest, medians: &[i64; PARTS]) -> Vec<Excess> {
    let times = || slowest.kept.iter().map(|c| c.at);
    let (Some(first), Some(last)) = (times().min(), times().max()) else { return Vec::new() };
    let span = (i128::from(last) - i128::from(first)).max(1);
    let mut all = [(0u64, Excess::default()); STRETCHES];
    for command in slow {
        let place = (i128::from(command.at) - i128::from(first)) * STRETCHES as i128 / span;
        let (count, excess) = &mut all[usize::try_from(place).unwrap_or(0).min(STRETCHES - 1)];
        *count += 1;
        excess.add(command, medians);
    }
    all.into_iter().filter(|(count, _)| *count > 0).map(|(_, excess)| excess).collect()
}

/// The delete-one jackknife over stretches of time.
fn interval(whole: &Excess, stretches: &[Excess], part: usize) -> Option<[f64; 2]> {
    let n = stretches.len();
    if n < FEWEST {
        return None;
    }
    let shares: Vec<f64> = stretches
        .iter()
        .map(|stretch| whole.without(stretch))
        .filter(|rest| rest.all() > 0.0)
        .map(|rest| rest.share(part))
        .collect();
    // One stretch has it all.
    if shares.len() < n {
        return None;
    }
    let mean = shares.iter().sum::<f64>() / n as f64;
    let squares: f64 = shares.iter().map(|share| (share - mean).powi(2)).sum();
    let error = (squares * (n - 1) as f64 / n as f64).sqrt();
    let reach = student::quantile(1.0 - CONFIDENCE, (n - 1) as f64) * error;
    let share = whole.share(part);
    Some([share - reach, share + reach])
}

/// What a percentile would be if a part never took longer than its median. What is not kept would be no slower than it
/// is: not above the cut.
fn otherwise(percentile: f64, commands: u64, slowest: &Slowest, part: usize, median: i64) -> Otherwise {
    let mut would: Vec<i64> =
        slowest.kept.iter().map(|c| c.latency - (c.parts[part] - median).max(0)).collect();
    // By nearest rank, from the slowest down.
    let rank = commands - ((percentile * commands as f64).ceil() as u64).clamp(1, commands);
    let value = usize::try_from(rank)
        .ok()
        .filter(|&rank| rank < would.len())
        .map(|rank| *would.select_nth_unstable_by_key(rank, |&v| std::cmp::Reverse(v)).1);
    match value {
        Some(ns) if ns > slowest.cut => Otherwise { ns, at_most: false },
        _ => Otherwise { ns: slowest.cut, at_most: true },
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT, Otherwise, PARTS, Slowest, Tail, Timed, tails};
    use crate::stats::Distribution;
    use proptest::prelude::*;

    const NAMES: [&str; PARTS] = ["host_block", "host_driver", "network", "target_driver", "storage"];

    fn timed(at: i64, parts: [i64; PARTS]) -> Timed {
        Timed { at, latency: parts.iter().sum(), parts }
    }

    fn slowest(commands: &[Timed]) -> Slowest {
        let mut slowest = Slowest::of(commands.len() as u64);
        commands.iter().for_each(|&command| slowest.add(command));
        slowest
    }

    fn distribution(values: impl Iterator<Item = i64>) -> Distribution {
        Distribution::of(&mut values.collect::<Vec<_>>())
    }

    fn tails_of(commands: &[Timed], slowest: &Slowest) -> Vec<Tail> {
        let parts = std::array::from_fn(|part| {
            (Some(NAMES[part]), distribution(commands.iter().map(|c| c.parts[part])).p50_ns)
        });
        let latency = distribution(commands.iter().map(|c| c.latency));
        tails(commands.len() as u64, slowest, &latency, &parts)
    }

    /// Commands of 100 us, of which one in 50, spread over the time, takes 1 ms more: mostly in the network.
    fn congested() -> Vec<Timed> {
        (0..20_000)
            .map(|i| {
                let more = i64::from(i % 50 == 7) * 100_000;
                timed(
                    i * 1_000,
                    [5_000, 5_000, 20_000 + more * 8 + i * 7_919 % 9_973, 10_000, 60_000 + more * 2],
                )
            })
            .collect()
    }

    #[test]
    fn the_stage_that_makes_commands_slow_is_named_with_its_share() {
        let commands = congested();
        let found = tails_of(&commands, &slowest(&commands));
        assert_eq!(found.iter().map(|t| t.percentile).collect::<Vec<_>>(), [0.99, 0.999]);
        for tail in &found {
            let [network, storage] = &tail.causes[..2] else { panic!("{tail:?}") };
            assert_eq!((network.stage, storage.stage), ("network", "storage"));
            assert!((network.share - 0.8).abs() < 0.01 && (storage.share - 0.2).abs() < 0.01, "{tail:?}");
            let [low, high] = network.interval.unwrap();
            assert!(low <= network.share && network.share <= high && high - low < 0.01, "{tail:?}");
        }
        // Two in a hundred are slow: without the network's part they have storage's left.
        let Otherwise { ns, at_most } = found[0].causes[0].otherwise;
        assert!(!at_most && (300_000..310_000).contains(&ns), "{found:?}");
    }

    #[test]
    fn what_came_in_one_burst_has_a_share_and_no_interval() {
        let commands: Vec<Timed> = (0..20_000)
            .map(|i| {
                timed(
                    i * 1_000,
                    [1, 1, i * 7_919 % 997, 1, 500 + i64::from((9_000..9_300).contains(&i)) * 90_000],
                )
            })
            .collect();
        let found = tails_of(&commands, &slowest(&commands));
        assert!(!found.is_empty());
        for tail in found {
            assert!(tail.stretches <= 2 && tail.causes[0].stage == "storage", "{tail:?}");
            assert!(
                tail.causes[0].share > 0.99 && tail.causes.iter().all(|c| c.interval.is_none()),
                "{tail:?}"
            );
        }
    }

    #[test]
    fn a_sample_that_carries_no_percentile_has_no_tail() {
        let commands = &congested()[..999];
        assert_eq!(tails_of(commands, &slowest(commands)), []);
        let same: Vec<Timed> = (0..20_000).map(|i| timed(i, [1, 2, 3, 4, 5])).collect();
        assert_eq!(tails_of(&same, &slowest(&same)), []);
    }

    #[test]
    fn few_are_kept() {
        let commands = congested();
        let slowest = slowest(&commands);
        assert!(slowest.kept.len() < 2 * (commands.len() / KEPT as usize + 1));
        let mut half = slowest.clone();
        half.halve();
        assert!(half.bytes() < slowest.bytes());
        // The higher percentile's tail is kept longer.
        for _ in 0..2 {
            half.halve();
        }
        let found = tails_of(&commands, &half);
        assert_eq!(found.iter().map(|t| t.percentile).collect::<Vec<_>>(), [0.999]);
    }

    fn command() -> impl Strategy<Value = Timed> {
        let part = || prop_oneof![9 => 0i64..1_000, 1 => 0i64..1_000_000];
        (0i64..1 << 40, proptest::array::uniform5(part())).prop_map(|(at, parts)| timed(at, parts))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn tails_are_those_of_all_commands_however_they_come(
            commands in proptest::collection::vec(command(), 1_000..12_000),
            cuts in proptest::collection::vec(0usize..12_000, 0..4),
        ) {
            let whole = tails_of(&commands, &slowest(&commands));
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(commands.len())).collect();
            cuts.extend([0, commands.len()]);
            cuts.sort_unstable();
            let mut merged = Slowest::of(commands.len() as u64);
            for cut in cuts.windows(2) {
                let mut part = Slowest::of(commands.len() as u64);
                commands[cut[0]..cut[1]].iter().for_each(|&command| part.add(command));
                merged.merge(&part);
            }
            let parted = tails_of(&commands, &merged);
            prop_assert_eq!(whole.len(), parted.len());
            for (a, b) in whole.iter().zip(&parted) {
                prop_assert_eq!((a.above_ns, a.commands), (b.above_ns, b.commands));
                for (a, b) in a.causes.iter().zip(&b.causes) {
                    prop_assert!((a.share - b.share).abs() < 1e-6);
                }
            }
            // By the definition, from all commands.
            for tail in &whole {
                let above = commands.iter().filter(|c| c.latency > tail.above_ns).count() as u64;
                prop_assert_eq!(tail.commands, above);
                prop_assert!((tail.causes.iter().map(|c| c.share).sum::<f64>() - 1.0).abs() < 1e-6);
                for cause in &tail.causes {
                    let part = NAMES.iter().position(|name| *name == cause.stage).unwrap();
                    let would = commands.iter().map(|c| c.latency - (c.parts[part] - cause.median_ns).max(0));
                    let would = distribution(would);
                    let would = if tail.percentile < 0.995 { would.p99_ns } else { would.p999_ns }.unwrap();
                    let Otherwise { ns, at_most } = cause.otherwise;
                    prop_assert!(if at_most { would <= ns } else { would == ns }, "{} for {:?}", would, cause);
                }
            }
        }
    }
}
