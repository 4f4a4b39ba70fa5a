//! Gathers what a report says of commands, part after part, in memory that does not grow with their number. It
//! matches nothing.

use crate::clock::Clock;
use crate::histogram::Histogram;
use crate::join::{Aside, around, judge, on_the_wire, passes};
use crate::listed::Listed;
use crate::recording::Recording;
use crate::report::{Class, Columns, Groups, Key, ReportOptions, began, fill, width};
use crate::tails::{PARTS, Slowest, Timed};
use run_format::Boundary;
use std::collections::HashMap;

/// Commands of a class whose figures are added at once: one distribution after the other stays in the processor's
/// caches.
const AT_ONCE: usize = 128;

/// The figures of commands by class.
#[derive(Debug)]
pub(crate) struct Classes {
    width: usize,
    numbers: HashMap<Key, usize>,
    /// Most loads have few classes: finding one of the first few takes no hashing.
    first: Vec<(Key, usize)>,
    figures: Vec<Vec<Histogram>>,
    /// What waits to be added to the figures of each class, figure after figure, and how much of it there is.
    waiting: Vec<(Vec<i64>, usize)>,
    slowest: Vec<Slowest>,
    /// What a class keeps of its slowest when it begins.
    all_slowest: Slowest,
    counts: Vec<u64>,
}

impl Classes {
    /// Of at most so many commands with so many figures each.
    pub(crate) fn new(width: usize, commands: u64) -> Classes {
        Classes {
            width,
            numbers: HashMap::new(),
            first: Vec::new(),
            figures: Vec::new(),
            waiting: Vec::new(),
            slowest: Vec::new(),
            all_slowest: Slowest::of(commands),
            counts: Vec::new(),
        }
    }

    fn number(&mut self, key: Key) -> usize {
        if let Some(known) = self.first.iter().find(|f| f.0 == key) {
            return known.1;
        }
        let next = self.figures.len();
        let number = *self.numbers.entry(key).or_insert(next);
        if number == next {
            self.figures.push(vec![Histogram::default(); self.width]);
            self.waiting.push((vec![0; self.width * AT_ONCE], 0));
            self.slowest.push(self.all_slowest.clone());
            self.counts.push(0);
            if self.first.len() < 8 {
                self.first.push((key, number));
            }
        }
        number
    }

    /// Adds a command that came at this time.
    pub(crate) fn add(&mut self, key: Key, at: impl FnOnce() -> i64, row: &[i64]) {
        let number = self.number(key);
        self.counts[number] += 1;
        let slowest = &mut self.slowest[number];
        if row.first().is_some_and(|&latency| slowest.takes(latency)) {
            slowest.add(Timed::of(at(), row.get(..1 + PARTS).unwrap_or(row)));
        }
        let (waiting, n) = &mut self.waiting[number];
        for (values, &value) in waiting.chunks_exact_mut(AT_ONCE).zip(row) {
            values[*n] = value;
        }
        *n += 1;
        if *n == AT_ONCE {
            self.settle_class(number);
        }
    }

    fn settle_class(&mut self, number: usize) {
        let (waiting, n) = &mut self.waiting[number];
        for (figure, values) in self.figures[number].iter_mut().zip(waiting.chunks_exact(AT_ONCE)) {
            figure.add_all(&values[..*n]);
        }
        *n = 0;
    }

    /// Adds to the figures what waits for it.
    fn settle(&mut self) {
        (0..self.waiting.len()).for_each(|number| self.settle_class(number));
    }

    /// Adds what others gathered.
    pub(crate) fn merge(&mut self, mut other: Classes) {
        other.settle();
        for (&key, &theirs) in &other.numbers {
            let ours = self.number(key);
            self.counts[ours] += other.counts[theirs];
            self.slowest[ours].merge(&other.slowest[theirs]);
            for (figure, more) in self.figures[ours].iter_mut().zip(&other.figures[theirs]) {
                figure.merge(more);
            }
        }
    }

    /// Whether there was no command.
    pub(crate) fn is_empty(&self) -> bool {
        self.figures.is_empty()
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        let waiting = self.waiting.len() * self.width * AT_ONCE * size_of::<i64>();
        self.figures.iter().flatten().map(Histogram::bytes).sum::<usize>() + waiting + self.slowest_bytes()
    }

    fn slowest_bytes(&self) -> usize {
        self.slowest.iter().map(Slowest::bytes).sum()
    }

    /// Keeps fewer of the slowest commands, so that they take no more than this where that is possible.
    pub(crate) fn fit_slowest(&mut self, bytes: usize) {
        while self.slowest_bytes() > bytes && self.all_slowest.halve() {
            self.slowest.iter_mut().for_each(|slowest| {
                slowest.halve();
            });
        }
    }

    /// The classes in order, each made from its key, its commands and its figures.
    pub(crate) fn each(mut self, mut make: impl FnMut(Key, u64, Columns) -> Class) -> Vec<Class> {
        self.settle();
        let mut numbers: Vec<(Key, usize)> =
            self.numbers.iter().map(|(&key, &number)| (key, number)).collect();
        numbers.sort_unstable();
        let class = |(key, number): (Key, usize)| {
            let distributions = self.figures[number].iter().map(Histogram::distribution).collect();
            let slowest = std::mem::replace(&mut self.slowest[number], self.all_slowest.clone());
            let mut histograms = std::mem::take(&mut self.figures[number]);
            histograms.truncate(1 + PARTS);
            make(key, self.counts[number], Columns::of(distributions, slowest).with(histograms))
        };
        numbers.into_iter().map(class).collect()
    }
}

/// What a join says of its pairs.
#[derive(Debug)]
pub(crate) struct Pairs {
    pub(crate) classes: Classes,
    pub(crate) listed: Listed,
    pub(crate) joined: u64,
    /// Those set aside, as many on either side.
    pub(crate) aside: Aside,
    /// Of each boundary: joined commands that passed it, and those of them without its time.
    pub(crate) passed: [(u64, u64); Boundary::ALL.len()],
    /// When some of them were received, with the clock's offset and its uncertainty.
    pub(crate) clocks: Vec<(i64, i64, i64)>,
    /// How long the host knew of some before the target did, and after.
    pub(crate) leads: Vec<i64>,
    pub(crate) tails: Vec<i64>,
    /// One pair in so many is sampled.
    step: u64,
    seen: u64,
    row: Vec<i64>,
}

/// Pairs by whose clock and way a whole run is judged.
pub(crate) const SAMPLE: u64 = 65_536;

impl Pairs {
    /// Of about so many pairs, of a run of at most so many.
    pub(crate) fn new(options: &ReportOptions, expected: u64, all: u64) -> Pairs {
        Pairs {
            classes: Classes::new(width(options), all),
            listed: Listed::of(options.slowest),
            joined: 0,
            aside: Aside::default(),
            passed: [(0, 0); Boundary::ALL.len()],
            clocks: Vec::new(),
            leads: Vec::new(),
            tails: Vec::new(),
            step: (expected / SAMPLE).max(1),
            seen: 0,
            row: vec![0; width(options)],
        }
    }

    /// Adds pairs of rows. `lacking` are the boundaries that not every command has a time for.
    pub(crate) fn add(
        &mut self,
        pairs: &[(u32, u32)],
        host: &Recording,
        target: &Recording,
        groups: &Groups,
        clock: &Clock,
        lacking: &[Boundary],
    ) {
        let before = self.joined;
        for &(h, t) in pairs {
            let (h, t) = (h as usize, t as usize);
            let sampled = self.seen.is_multiple_of(self.step);
            self.seen += 1;
            if sampled {
                let (lead, tail) = around(host, h, target, t, clock);
                self.leads.push(lead);
                self.tails.push(tail);
            }
            let (terms, stages) = match judge(host, h, target, t) {
                Ok(good) => good,
                Err(reason) => {
                    self.aside.count(reason, 1);
                    continue;
                }
            };
            let offset = || clock.offset(on_the_wire(target, t).0);
            fill(&mut self.row, &terms, &stages, offset);
            self.classes.add(groups.key(host, h), || began(host, h), &self.row);
            self.listed.add_pair(host, h, &terms, &stages, offset);
            self.joined += 1;
            for &b in lacking {
                if let Some(has) = passes(b, host, h, target, t) {
                    let place = &mut self.passed[b as usize];
                    place.0 += 1;
                    place.1 += u64::from(!has);
                }
            }
            if sampled {
                let (offset, uncertainty) = offset();
                self.clocks.push((on_the_wire(target, t).0, offset, uncertainty));
            }
        }
        for &b in Boundary::ALL.iter().filter(|b| !lacking.contains(b)) {
            self.passed[b as usize].0 += self.joined - before;
        }
    }

    /// Adds what another gathered.
    pub(crate) fn merge(&mut self, other: Pairs) {
        self.classes.merge(other.classes);
        self.listed.merge(other.listed);
        self.joined += other.joined;
        self.aside = self.aside.with(&other.aside);
        for (ours, theirs) in self.passed.iter_mut().zip(other.passed) {
            ours.0 += theirs.0;
            ours.1 += theirs.1;
        }
        self.clocks.extend(other.clocks);
        self.leads.extend(other.leads);
        self.tails.extend(other.tails);
    }
}
