//! What a trace ring's file says of itself: where each lcore's ring is, which tracepoints it knows and what they
//! carry. It reads the header once and believes nothing that does not fit into the file.
//!
//! The file states no version. Its layout changed twice (`include/spdk/trace.h`): 24.05 gave it a header of its
//! own in place of 24.01's flags, 26.05 put the header into sections.

use std::collections::BTreeMap;

use super::memory::{Shared, WORD};

/// A layout of the ring's file, by the release that introduced it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Generation {
    /// 24.01 and before.
    Flags,
    /// 24.05 to 26.01.
    File,
    /// 26.05 and later.
    Sections,
}

impl Generation {
    /// The release that introduced it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Generation::Flags => "24.01",
            Generation::File => "24.05",
            Generation::Sections => "26.05",
        }
    }

    /// The layout of a release.
    pub(crate) fn of_release(release: (u32, u32)) -> Generation {
        match release {
            (..24, _) | (24, ..5) => Generation::Flags,
            (24..26, _) | (26, ..5) => Generation::File,
            _ => Generation::Sections,
        }
    }
}

/// Bytes of an entry.
pub(super) const ENTRY: usize = 32;
/// Bytes of arguments in a record's first entry, and in each entry that continues it.
pub(super) const FIRST_ARGUMENTS: usize = 8;
pub(super) const MORE_ARGUMENTS: usize = 22;
/// Bytes of a tracepoint's count.
pub(super) const WORD_OF_COUNT: usize = 8;
/// Tracepoints of a group.
const GROUP: usize = 64;
/// Bytes of a tracepoint's description.
const TRACEPOINT: usize = 190;
/// Bytes of the tables of owner types and of objects: 256 entries of 2 bytes each.
const TYPES: usize = 512;
/// The most groups, lcores and sections that are believed.
const MOST_GROUPS: usize = 64;
const MOST_LCORES: usize = 4096;
const MOST_SECTIONS: usize = 64;
/// Ticks per second that are believed.
const RATES: std::ops::RangeInclusive<u64> = 10_000_000..=100_000_000_000;

/// An argument of a tracepoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Argument {
    pub(super) name: String,
    /// Bytes.
    pub(super) size: usize,
    /// Where it is in the record's arguments, in bytes.
    pub(super) at: usize,
}

/// A tracepoint as the file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tracepoint {
    pub(super) name: String,
    pub(super) arguments: Vec<Argument>,
}

impl Tracepoint {
    /// Bytes of all arguments.
    pub(super) fn bytes(&self) -> usize {
        self.arguments.last().map_or(0, |last| last.at + last.size)
    }

    /// Entries that a record of it takes.
    pub(super) fn slots(&self) -> usize {
        1 + self.bytes().saturating_sub(FIRST_ARGUMENTS).div_ceil(MORE_ARGUMENTS)
    }

    /// Where an argument of this name is, and its size.
    pub(super) fn argument(&self, name: &str) -> Option<&Argument> {
        self.arguments.iter().find(|argument| argument.name == name)
    }
}

/// One lcore's ring; positions are bytes from the beginning of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lcore {
    pub(super) number: u32,
    /// Entries of the ring, a power of two.
    pub(super) entries: u64,
    /// How often each tracepoint was recorded.
    pub(super) counts_at: usize,
    /// The count of entries written.
    pub(super) next_at: usize,
    pub(super) entries_at: usize,
}

/// The table of owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owners {
    pub(super) at: usize,
    pub(super) number: usize,
    /// Bytes of one.
    pub(super) size: usize,
}

/// Bytes of an owner before its description: when it was registered, and its type.
pub(super) const OWNER_HEAD: usize = 9;

/// The whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) generation: Generation,
    /// Ticks per second, as the process measured them.
    pub(super) rate: u64,
    /// One word of 64 tracepoints for each group: which are switched on.
    pub(super) masks_at: usize,
    /// The number that marks an entry as the continuation of the one before it, and how many tracepoints there
    /// may be.
    pub(super) marker: u16,
    pub(super) tracepoints: BTreeMap<u16, Tracepoint>,
    pub(super) lcores: Vec<Lcore>,
    pub(super) owners: Option<Owners>,
}

impl Layout {
    /// Reads the header.
    ///
    /// # Errors
    /// What does not hold of it.
    pub(super) fn read(file: &Shared) -> Result<Layout, String> {
        let first = word(file, 0)?;
        let length = file.length() as u64;
        if first == 0 {
            return Err("its first word is 0: the process has not finished to set it up".to_owned());
        }
        let layout = if first == length {
            // A rate of ticks is never as small as a number of sections.
            match word(file, WORD)? {
                sections if sections <= MOST_SECTIONS as u64 => Layout::sections(file, sections as usize)?,
                _ => Layout::file(file)?,
            }
        } else if RATES.contains(&first) {
            Layout::flags(file)?
        } else {
            return Err(format!(
                "it begins with {first:#x}, which is neither its length ({length} bytes) nor a rate of ticks"
            ));
        };
        if !RATES.contains(&layout.rate) {
            return Err(format!("it claims {} ticks a second", layout.rate));
        }
        if layout.lcores.is_empty() {
            return Err("it has no lcore's ring".to_owned());
        }
        Ok(layout)
    }

    /// 24.01 and before: one structure with 16 groups and 128 lcores, and the end of the file as the last offset.
    fn flags(file: &Shared) -> Result<Layout, String> {
        const GROUPS: usize = 16;
        const LCORES: usize = 128;
        let masks_at = WORD;
        let tracepoints_at = masks_at + GROUPS * WORD + 2 * TYPES;
        let offsets_at = tracepoints_at + GROUPS * GROUP * TRACEPOINT;
        let end = word(file, offsets_at + LCORES * WORD)?;
        if end != file.length() as u64 {
            return Err(format!(
                "as a ring of SPDK 24.01 or before it would be {end} bytes long, and it has {}",
                file.length()
            ));
        }
        Ok(Layout {
            generation: Generation::Flags,
            rate: word(file, 0)?,
            masks_at,
            marker: (GROUPS * GROUP) as u16,
            tracepoints: tracepoints(file, tracepoints_at, GROUPS * GROUP)?,
            lcores: lcores(file, offsets_at, LCORES, |at| lcore_before_sections(file, at, GROUPS * GROUP))?,
            owners: None,
        })
    }

    /// 24.05 to 26.01: one structure whose number of groups (16, later 20) nothing states, but that everything
    /// behind fits only one number.
    fn file(file: &Shared) -> Result<Layout, String> {
        let mut reasons = Vec::new();
        for groups in (1..=MOST_GROUPS).rev() {
            match Layout::file_of(file, groups) {
                Ok(layout) => return Ok(layout),
                Err(reason) if groups == 16 || groups == 20 => {
                    reasons.push(format!("with {groups} groups {reason}"));
                }
                Err(_) => {}
            }
        }
        Err(format!("its header fits no number of tracepoint groups: {}", reasons.join("; ")))
    }

    fn file_of(file: &Shared, groups: usize) -> Result<Layout, String> {
        const LCORES: usize = 1024;
        const THREAD_NAMES: usize = LCORES * 16;
        let count = groups * GROUP;
        let masks_at = 2 * WORD;
        let tracepoints_at = masks_at + groups * WORD + THREAD_NAMES + 2 * TYPES;
        let owners_at = tracepoints_at + count * TRACEPOINT;
        let offsets_at = owners_at + WORD;
        // The owners' place is behind the offsets; with another number of groups it would be anything.
        let place = word(file, offsets_at + LCORES * WORD)?;
        let numbers = word(file, owners_at)?;
        let owners = owners(file, place, numbers)?;
        let tracepoints = tracepoints(file, tracepoints_at, count)?;
        if tracepoints.is_empty() {
            return Err("it knows no tracepoint".to_owned());
        }
        Ok(Layout {
            generation: Generation::File,
            rate: word(file, WORD)?,
            masks_at,
            marker: count as u16,
            tracepoints,
            lcores: lcores(file, offsets_at, LCORES, |at| lcore_before_sections(file, at, count))?,
            owners: Some(owners),
        })
    }

    /// 26.05 and later: sections, each with a head that says how many it holds.
    fn sections(file: &Shared, sections: usize) -> Result<Layout, String> {
        const HEAD: usize = 128;
        const NAMES: [&str; 7] =
            ["main", "owner", "tracepoint mask", "owner type", "object", "tracepoint", "lcore"];
        if sections < NAMES.len() {
            return Err(format!("it claims {sections} sections, and {} are needed", NAMES.len()));
        }
        let section = |index: usize| -> Result<usize, String> {
            let at = word(file, 2 * WORD + index * WORD)?;
            inside(file, at, HEAD as u64)
                .map_err(|why| format!("its {} section {why}", NAMES.get(index).copied().unwrap_or("next")))
        };
        let counted = |index: usize| -> Result<(usize, usize), String> {
            let at = section(index)?;
            Ok((at + HEAD, (word(file, at)? & 0xffff) as usize))
        };
        let rate = word(file, section(0)?)?;
        let owner_section = section(1)?;
        let numbers = word(file, owner_section)?;
        let owners = owners(file, (owner_section + HEAD) as u64, numbers)?;
        let (masks_at, groups) = counted(2)?;
        let (tracepoints_at, count) = counted(5)?;
        let (offsets_at, lcore_count) = counted(6)?;
        if groups == 0 || groups > MOST_GROUPS || count != groups * GROUP {
            return Err(format!("it claims {groups} groups with {count} tracepoints together"));
        }
        inside(file, masks_at as u64, (groups * WORD) as u64)?;
        if lcore_count > MOST_LCORES {
            return Err(format!("it claims {lcore_count} lcores"));
        }
        Ok(Layout {
            generation: Generation::Sections,
            rate,
            masks_at,
            marker: count as u16,
            tracepoints: tracepoints(file, tracepoints_at, count)?,
            lcores: lcores(file, offsets_at, lcore_count, |at| lcore_of_sections(file, at, count))?,
            owners: Some(owners),
        })
    }

    /// The number of the tracepoint with this name.
    pub(super) fn number(&self, name: &str) -> Option<u16> {
        self.tracepoints.iter().find(|(_, tracepoint)| tracepoint.name == name).map(|(number, _)| *number)
    }

    /// The most entries that one record takes.
    pub(super) fn longest(&self) -> u64 {
        self.tracepoints.values().map(Tracepoint::slots).max().unwrap_or(1) as u64
    }

    /// Which tracepoints of a group are switched on.
    pub(super) fn mask(&self, file: &Shared, group: u16) -> u64 {
        let known = usize::from(group) < usize::from(self.marker) / GROUP;
        known.then(|| file.word(self.masks_at + usize::from(group) * WORD)).flatten().unwrap_or(0)
    }
}

fn word(file: &Shared, at: usize) -> Result<u64, String> {
    file.word(at)
        .ok_or_else(|| format!("its header needs a word at {at:#x}, and it has {} bytes", file.length()))
}

/// A place of so many bytes, aligned, inside the file.
fn inside(file: &Shared, at: u64, bytes: u64) -> Result<usize, String> {
    let whole = at.is_multiple_of(WORD as u64) && at > 0;
    let end = at.checked_add(bytes).filter(|end| *end <= file.length() as u64);
    match (usize::try_from(at), end) {
        (Ok(at), Some(_)) if whole => Ok(at),
        _ => Err(format!("has {bytes} bytes at {at:#x}, which do not lie in its {} bytes", file.length())),
    }
}

/// The owners' table, whose numbers are in one word: how many, and bytes of a description.
fn owners(file: &Shared, at: u64, numbers: u64) -> Result<Owners, String> {
    let number = numbers & 0xffff;
    let size = (numbers >> 16 & 0xffff) + OWNER_HEAD as u64;
    if number == 0 || numbers >> 32 != 0 {
        return Err("its table of owners has no sensible size".to_owned());
    }
    let at = inside(file, at, number * size).map_err(|why| format!("its table of owners {why}"))?;
    Ok(Owners { at, number: number as usize, size: size as usize })
}

/// The table of tracepoints. One that is not used is all zeros.
fn tracepoints(file: &Shared, at: usize, count: usize) -> Result<BTreeMap<u16, Tracepoint>, String> {
    const NAME: usize = 24;
    const ARGUMENTS: usize = 30;
    const ARGUMENT: usize = 16;
    const MOST_ARGUMENTS: usize = 8;
    let table = file.bytes(at, count * TRACEPOINT).ok_or_else(|| {
        format!("its {count} tracepoints at {at:#x} do not lie in its {} bytes", file.length())
    })?;
    let mut tracepoints = BTreeMap::new();
    for (number, bytes) in (0u16..).zip(table.chunks_exact(TRACEPOINT)) {
        let Some(name) = bytes.get(..NAME).filter(|name| name.first() != Some(&0)) else { continue };
        let name = text(name).ok_or_else(|| format!("the name of its tracepoint {number} is no text"))?;
        if u16_at(bytes, NAME) != Some(number) {
            return Err(format!("its tracepoint {number} ({name}) claims to be another"));
        }
        let arguments = usize::from(bytes.get(29).copied().unwrap_or(0));
        if arguments > MOST_ARGUMENTS {
            return Err(format!("its tracepoint {name} claims {arguments} arguments"));
        }
        let mut position = 0;
        let mut known = Vec::with_capacity(arguments);
        for argument in 0..arguments {
            let from = ARGUMENTS + argument * ARGUMENT;
            let (name, size) = (bytes.get(from..from + 14), bytes.get(from + 15));
            let size = usize::from(size.copied().unwrap_or(0));
            let name = name.and_then(text).unwrap_or_default();
            known.push(Argument { name, size, at: position });
            position += size;
        }
        tracepoints.insert(number, Tracepoint { name, arguments: known });
    }
    Ok(tracepoints)
}

/// The lcores' rings that the offsets lead to.
fn lcores(
    file: &Shared,
    offsets_at: usize,
    count: usize,
    one: impl Fn(usize) -> Result<Lcore, String>,
) -> Result<Vec<Lcore>, String> {
    let mut found: Vec<Lcore> = Vec::new();
    for number in 0..count {
        let offset = word(file, offsets_at + number * WORD)?;
        if offset == 0 {
            continue;
        }
        let place = inside(file, offset, WORD as u64);
        let lcore = place.map_err(|why| format!("the ring of its lcore {number} {why}"))?;
        let lcore = one(lcore).map_err(|why| format!("the ring of its lcore {number} {why}"))?;
        if lcore.number as usize != number {
            return Err(format!("the ring of its lcore {number} claims to be that of {}", lcore.number));
        }
        found.push(lcore);
    }
    Ok(found)
}

fn lcore_before_sections(file: &Shared, at: usize, tracepoints: usize) -> Result<Lcore, String> {
    let counts_at = at + 2 * WORD;
    let next_at = counts_at + tracepoints * WORD;
    ring(file, at, word(file, at + WORD)?, counts_at, next_at, next_at + WORD)
}

fn lcore_of_sections(file: &Shared, at: usize, tracepoints: usize) -> Result<Lcore, String> {
    let claimed = word(file, at + 32)?;
    if claimed != tracepoints as u64 {
        return Err(format!("counts {claimed} tracepoints, and there are {tracepoints}"));
    }
    let counts_at = at + 48;
    ring(file, at, word(file, at + 24)?, counts_at, at + 40, counts_at + tracepoints * WORD)
}

fn ring(
    file: &Shared,
    at: usize,
    entries: u64,
    counts_at: usize,
    next_at: usize,
    entries_at: usize,
) -> Result<Lcore, String> {
    if !entries.is_power_of_two() {
        return Err(format!("claims {entries} entries, which is no power of two"));
    }
    let bytes = entries.checked_mul(ENTRY as u64).ok_or_else(|| format!("claims {entries} entries"))?;
    inside(file, entries_at as u64, bytes)?;
    // The number is an int, followed by what is not of interest here.
    let number = word(file, at)? as u32;
    Ok(Lcore { number, entries, counts_at, next_at, entries_at })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// A C string of printable characters.
pub(super) fn text(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let text = std::str::from_utf8(bytes.get(..end)?).ok()?;
    text.chars().all(|c| !c.is_control()).then(|| text.to_owned())
}
