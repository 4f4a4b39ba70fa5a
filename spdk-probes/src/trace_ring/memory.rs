//! A trace ring's file, mapped for reading while its process writes to it. It knows nothing of what the words mean.
//!
//! Every read is of whole, aligned words, each of them atomic: the process stores its counts and its entries'
//! fields in pieces of at most that size, so no read sees half a count.
//!
//! A file that is cut while it is read reads as zeros behind the cut, and is known to have been: see [`super::fault`].

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};

use super::fault::Guard;

/// Bytes of a word.
pub(super) const WORD: usize = 8;

/// The mapped file. Positions are bytes from its beginning.
#[derive(Debug)]
pub(super) struct Shared {
    // Goes before the mapping does.
    guard: Guard,
    map: MmapRaw,
    file: File,
    length: usize,
}

impl Shared {
    /// Maps a file, for reading only.
    pub(super) fn new(file: File) -> std::io::Result<Shared> {
        let length = file.metadata()?.len();
        let length = usize::try_from(length).map_err(|_| std::io::ErrorKind::FileTooLarge)?;
        if length < WORD {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "it is empty"));
        }
        let map = MmapOptions::new().len(length).map_raw_read_only(&file)?;
        let guard = Guard::new(map.as_ptr() as usize, length)?;
        Ok(Shared { guard, map, file, length })
    }

    /// Bytes of the file when it was mapped.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Whether the file is still as long as it was, and has been.
    pub(super) fn is_whole(&self) -> bool {
        !self.guard.is_cut() && self.file.metadata().is_ok_and(|meta| meta.len() >= self.length as u64)
    }

    fn atomic(&self, at: usize) -> Option<&AtomicU64> {
        if !at.is_multiple_of(WORD) || at.checked_add(WORD)? > self.length {
            return None;
        }
        // SAFETY: inside the mapping and aligned, since a mapping begins on a page; the mapping lasts as long as
        // `self`; other writers use plain stores of at most a word, which an atomic load may race with.
        Some(unsafe { &*self.map.as_ptr().add(at).cast::<AtomicU64>() })
    }

    /// The word at a position that is a multiple of 8; `None` outside the file.
    pub(super) fn word(&self, at: usize) -> Option<u64> {
        self.atomic(at).map(|word| word.load(Ordering::Relaxed))
    }

    /// The same, read before everything that is read after it.
    pub(super) fn word_first(&self, at: usize) -> Option<u64> {
        self.atomic(at).map(|word| word.load(Ordering::Acquire))
    }

    /// The same, read after everything that was read before it.
    pub(super) fn word_last(&self, at: usize) -> Option<u64> {
        fence(Ordering::Acquire);
        self.word(at)
    }

    /// Copies words behind those that are there already; `None` and nothing copied where they are not all inside the
    /// file.
    pub(super) fn words(&self, at: usize, count: usize, into: &mut Vec<u64>) -> Option<()> {
        let bytes = count.checked_mul(WORD)?;
        if !at.is_multiple_of(WORD) || at.checked_add(bytes)? > self.length {
            return None;
        }
        let first = self.map.as_ptr().wrapping_add(at).cast::<AtomicU64>();
        into.reserve(count);
        // SAFETY: as of `atomic`, for each of so many words, all of which are inside.
        into.extend((0..count).map(|n| unsafe { (*first.add(n)).load(Ordering::Relaxed) }));
        Some(())
    }

    /// Copies bytes from anywhere inside the file.
    pub(super) fn bytes(&self, at: usize, length: usize) -> Option<Vec<u8>> {
        let end = at.checked_add(length)?;
        if end > self.length {
            return None;
        }
        let mut bytes = Vec::with_capacity(length);
        let mut position = at;
        while position < end {
            let first = position / WORD * WORD;
            // A file whose length is no multiple of 8 ends with a part of a word.
            let word = match self.word(first) {
                Some(word) => word.to_ne_bytes(),
                None => self.last_part(first),
            };
            let upto = (first + WORD).min(end);
            bytes.extend_from_slice(word.get(position - first..upto - first)?);
            position = upto;
        }
        Some(bytes)
    }

    /// What the file has of the word that its end cuts, with zeros behind.
    fn last_part(&self, at: usize) -> [u8; WORD] {
        let mut word = [0; WORD];
        for (n, byte) in word.iter_mut().enumerate().take(self.length.saturating_sub(at)) {
            // SAFETY: inside the mapping; see `atomic`.
            *byte = unsafe { self.map.as_ptr().add(at + n).read_volatile() };
        }
        word
    }
}
