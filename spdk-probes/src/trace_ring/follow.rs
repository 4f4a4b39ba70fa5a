//! Follows one lcore's ring: hands over every record once, in order, and knows which it missed. The writer knows
//! nothing of it and never waits.
//!
//! `next_entry` counts the entries ever written; a record's entries are written first and counted then. So what
//! is counted is whole, until the writer comes round to it again. The reader copies, looks at the count again,
//! and throws away what the writer may have touched meanwhile: everything older than a ring's length less the
//! longest record, which may be being written and is not yet counted.

use super::layout::{ENTRY, FIRST_ARGUMENTS, Layout, Lcore, MORE_ARGUMENTS};
use super::memory::{Shared, WORD};

/// Words of an entry.
const WORDS: usize = ENTRY / WORD;
/// Entries that are copied at a time.
const CHUNK: u64 = 4096;

/// A record as it stands in the ring.
#[derive(Debug)]
pub(super) struct Record<'a> {
    /// When, in ticks.
    pub(super) ticks: u64,
    /// Which tracepoint.
    pub(super) tracepoint: u16,
    /// Who: an owner's number (24.01 and before: the tracepoint's own choice).
    pub(super) owner: u16,
    /// A number of the tracepoint's choice.
    pub(super) size: u32,
    /// What it is about, an address.
    pub(super) object: u64,
    /// Its entries, each of so many words.
    entries: &'a [u64],
}

impl Record<'_> {
    /// A number of the arguments, by its place and size in bytes.
    pub(super) fn number(&self, at: usize, size: usize) -> Option<u64> {
        // Most are a whole word: the first entry has eight bytes for arguments.
        if at == 0 && size == WORD {
            return self.entries.get(WORDS - 1).copied();
        }
        let mut value = [0; 8];
        self.bytes(at, value.get_mut(..size)?)?;
        Some(u64::from_le_bytes(value))
    }

    /// The text of the arguments, by its place and size in bytes.
    pub(super) fn text(&self, at: usize, size: usize) -> Option<String> {
        let mut bytes = vec![0; size];
        self.bytes(at, &mut bytes)?;
        super::layout::text(&bytes)
    }

    /// Copies bytes of the arguments.
    fn bytes(&self, mut at: usize, mut into: &mut [u8]) -> Option<()> {
        while !into.is_empty() {
            let (entry, offset) = match at.checked_sub(FIRST_ARGUMENTS) {
                None => (0, ENTRY - FIRST_ARGUMENTS + at),
                Some(at) => (1 + at / MORE_ARGUMENTS, ENTRY - MORE_ARGUMENTS + at % MORE_ARGUMENTS),
            };
            let word = self.entries.get(entry * WORDS + offset / WORD)?.to_le_bytes();
            let there = word.get(offset % WORD..)?;
            let count = there.len().min(into.len());
            let (now, rest) = into.split_at_mut(count);
            now.copy_from_slice(there.get(..count)?);
            (at, into) = (at + count, rest);
        }
        Some(())
    }
}

/// What a look at the ring came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Everything that was there has been handed over.
    Done,
    /// The ring was begun anew: its count went backwards.
    Restarted,
}

/// What [`Follower::look`] hands over.
#[derive(Debug)]
pub(super) enum Step<'a> {
    /// The next record.
    Record(Record<'a>),
    /// Records are missing here: entries were overwritten before they were read.
    Gap,
}

/// The reader of one lcore's ring.
#[derive(Debug)]
pub(super) struct Follower {
    pub(super) lcore: Lcore,
    /// Entries of the longest record.
    longest: u64,
    marker: u16,
    /// The next entry to read, counted as the writer counts.
    position: u64,
    /// Entries that were overwritten before they were read.
    pub(super) missed: u64,
    /// What was copied, as words.
    buffer: Vec<u64>,
}

impl Follower {
    /// Begins with what is written from now on.
    pub(super) fn new(file: &Shared, layout: &Layout, lcore: Lcore) -> Option<Follower> {
        let position = file.word_first(lcore.next_at)?;
        Some(Follower {
            lcore,
            longest: layout.longest(),
            marker: layout.marker,
            position,
            missed: 0,
            buffer: Vec::new(),
        })
    }

    /// How many entries are waiting to be read.
    pub(super) fn waiting(&self, file: &Shared) -> u64 {
        file.word_first(self.lcore.next_at).map_or(0, |next| next.saturating_sub(self.position))
    }

    /// Goes on further behind, and misses nothing by it.
    pub(super) fn skip(&mut self, position: u64) {
        self.position = self.position.max(position);
    }

    /// Hands over what has come.
    pub(super) fn look(&mut self, file: &Shared, mut take: impl FnMut(Step<'_>)) -> Look {
        // What came while it was being read is for the next look, so that no look lasts for ever.
        let Some(end) = file.word_first(self.lcore.next_at) else { return Look::Restarted };
        if end < self.position {
            return Look::Restarted;
        }
        while self.position < end {
            let Some(now) = file.word_first(self.lcore.next_at).filter(|now| *now >= end) else {
                return Look::Restarted;
            };
            self.skip_to(self.safe(now), &mut take);
            // Records are counted whole, so a chunk that does not reach the end may cut one: it is read again.
            let upto = end.min(self.position.saturating_add(CHUNK.max(2 * self.longest)));
            if self.position >= upto {
                continue;
            }
            self.copy(file, upto);
            let Some(after) = file.word_last(self.lcore.next_at).filter(|after| *after >= now) else {
                return Look::Restarted;
            };
            let from = self.position;
            self.skip_to(self.safe(after).min(upto), &mut take);
            let begin = (self.position - from) as usize * WORDS;
            let copied = std::mem::take(&mut self.buffer);
            let used = self.records(copied.get(begin..).unwrap_or_default(), upto == end, &mut take);
            self.buffer = copied;
            self.position += used;
        }
        Look::Done
    }

    /// The oldest entry that is sure not to be written to when the writer's count is `next`.
    fn safe(&self, next: u64) -> u64 {
        next.saturating_add(self.longest).saturating_sub(self.lcore.entries).min(next)
    }

    fn skip_to(&mut self, safe: u64, take: &mut impl FnMut(Step<'_>)) {
        if self.position < safe {
            let missed = safe - self.position;
            self.missed += missed;
            self.position = safe;
            take(Step::Gap);
        }
    }

    fn copy(&mut self, file: &Shared, upto: u64) {
        self.buffer.clear();
        let (mut at, entries) = (self.position, self.lcore.entries);
        while at < upto {
            let slot = at & (entries - 1);
            // As far as the ring's end.
            let count = (entries - slot).min(upto - at);
            // The layout was held against the file, so this is inside.
            let from = self.lcore.entries_at + slot as usize * ENTRY;
            let read = file.words(from, count as usize * WORDS, &mut self.buffer);
            debug_assert!(read.is_some());
            at += count;
        }
    }

    /// Hands over the records of some entries and returns how many entries that were. What continues a record
    /// whose beginning is missing is missing too.
    fn records(&mut self, words: &[u64], whole: bool, take: &mut impl FnMut(Step<'_>)) -> u64 {
        let continues = |entry: &[u64]| entry.get(1).is_some_and(|word| *word as u16 == self.marker);
        let mut missed = 0;
        let mut left = words;
        while let [ticks, head, object, ..] = left {
            if continues(left) {
                missed += 1;
                take(Step::Gap);
                left = left.get(WORDS..).unwrap_or_default();
                continue;
            }
            let behind = left.get(WORDS..).unwrap_or_default();
            let more = behind.chunks_exact(WORDS).take_while(|entry| continues(entry)).count();
            let (entries, rest) = left.split_at((1 + more) * WORDS);
            if rest.is_empty() && !whole && left.len() < words.len() {
                // It may go on behind what was copied. One that fills all of it is no record of an honest ring.
                break;
            }
            take(Step::Record(Record {
                ticks: *ticks,
                tracepoint: *head as u16,
                owner: (head >> 16) as u16,
                size: (head >> 32) as u32,
                object: *object,
                entries,
            }));
            left = rest;
        }
        self.missed += missed;
        ((words.len() - left.len()) / WORDS) as u64
    }
}
