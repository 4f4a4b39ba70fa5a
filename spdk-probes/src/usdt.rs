//! Reads USDT probes: the `.note.stapsdt` notes that a program built with them carries, and their
//! arguments' places. Attaches nothing.
//!
//! A note holds three addresses (probe, base, semaphore) as they were when the program was linked. If a
//! tool moved the program afterwards, the section `.stapsdt.base` tells by how much.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::elf::Elf;
use crate::place::Reg;

/// One place in a program where a USDT probe fires. A probe inlined several times has several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsdtSite {
    /// The file, as a uprobe wants it.
    pub binary: PathBuf,
    /// Provider: `spdk`.
    pub provider: String,
    /// Name of the probe.
    pub name: String,
    /// Address, as the file's symbols count.
    pub vaddr: u64,
    /// Offset in the file, as a uprobe wants it.
    pub file_offset: u64,
    /// Where the program looks whether the probe is wanted; SPDK's probes have none.
    pub semaphore: Option<Semaphore>,
    /// Where each argument is when the probe fires. None for one that is written in a way not known here.
    pub args: Vec<Option<UsdtArg>>,
}

/// A 16-bit counter that a program looks at before it prepares a probe's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Semaphore {
    /// Address, as the file's symbols count.
    pub vaddr: u64,
    /// Offset in the file, as a uprobe's reference counter wants it.
    pub file_offset: u64,
}

/// An argument of a USDT probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsdtArg {
    /// In bytes: 1, 2, 4 or 8.
    pub size: u8,
    /// Whether to extend the sign.
    pub signed: bool,
    /// Where the value is.
    pub place: UsdtPlace,
}

/// Where a USDT argument's value is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UsdtPlace {
    /// In a register: `8@%rbx`. Of `%ah` and its like, `shift` is 8, of all others 0.
    Register {
        /// The whole register.
        register: Reg,
        /// By how many bits to shift right.
        shift: u8,
    },
    /// It is this number: `-4@$0`.
    Constant(i64),
    /// In memory: `8@-8(%rbp,%rax,4)`.
    Memory {
        /// Added to the registers.
        offset: i64,
        /// Base register; none for an absolute address.
        base: Option<Reg>,
        /// Index register and what it is multiplied by.
        index: Option<(Reg, u8)>,
    },
    /// In memory at a symbol: `4@counter+8(%rip)`.
    Symbol {
        /// The symbol.
        name: String,
        /// Added to its address.
        offset: i64,
    },
}

/// The probes of one name; those of every name where `name` is none.
pub(crate) fn sites(elf: &Elf, provider: &str, name: Option<&str>) -> Vec<UsdtSite> {
    let Ok(notes) = elf.section(".note.stapsdt") else {
        return Vec::new();
    };
    let base = elf.section_address(".stapsdt.base");
    let mut rest: &[u8] = &notes;
    let mut sites = Vec::new();
    while let Some((note, after)) = next_note(rest) {
        rest = after;
        let Some(note) = note else {
            continue;
        };
        if note.provider != provider.as_bytes() || name.is_some_and(|name| note.name != name.as_bytes()) {
            continue;
        }
        let moved = base.map_or(0, |base| base.wrapping_sub(note.base));
        let vaddr = note.vaddr.wrapping_add(moved);
        let Some(file_offset) = elf.file_offset(vaddr) else {
            continue;
        };
        let semaphore = (note.semaphore != 0)
            .then(|| note.semaphore.wrapping_add(moved))
            .and_then(|vaddr| Some(Semaphore { vaddr, file_offset: elf.file_offset(vaddr)? }));
        sites.push(UsdtSite {
            binary: elf.path().to_owned(),
            provider: provider.to_owned(),
            name: String::from_utf8_lossy(note.name).into_owned(),
            vaddr,
            file_offset,
            semaphore,
            args: arguments(&String::from_utf8_lossy(note.arguments)),
        });
    }
    sites
}

struct Note<'a> {
    vaddr: u64,
    base: u64,
    semaphore: u64,
    provider: &'a [u8],
    name: &'a [u8],
    arguments: &'a [u8],
}

/// Splits off one note; what is not a USDT probe's is given as none. None at the end.
#[allow(clippy::type_complexity)]
fn next_note(bytes: &[u8]) -> Option<(Option<Note<'_>>, &[u8])> {
    let word = |at: usize| -> Option<usize> {
        let bytes: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let (owner_len, len, kind) = (word(0)?, word(4)?, word(8)?);
    let start = 12_usize.checked_add(owner_len.checked_next_multiple_of(4)?)?;
    let owner = bytes.get(12..12_usize.checked_add(owner_len)?)?;
    let contents = bytes.get(start..start.checked_add(len)?)?;
    let end = start.checked_add(len.checked_next_multiple_of(4)?)?;
    let rest = bytes.get(end..).unwrap_or_default();
    let note = (owner == b"stapsdt\0" && kind == 3).then(|| parse_note(contents)).flatten();
    Some((note, rest))
}

fn parse_note(contents: &[u8]) -> Option<Note<'_>> {
    let word =
        |at: usize| -> Option<u64> { Some(u64::from_le_bytes(contents.get(at..at + 8)?.try_into().ok()?)) };
    let mut strings = contents.get(24..)?.split(|byte| *byte == 0);
    Some(Note {
        vaddr: word(0)?,
        base: word(8)?,
        semaphore: word(16)?,
        provider: strings.next()?,
        name: strings.next()?,
        arguments: strings.next()?,
    })
}

/// The arguments of a note, in order.
fn arguments(text: &str) -> Vec<Option<UsdtArg>> {
    text.split_ascii_whitespace().map(argument).collect()
}

/// One argument: `[-]SIZE@PLACE`, the place as the assembler writes it.
fn argument(text: &str) -> Option<UsdtArg> {
    let (size, place) = text.split_once('@')?;
    let (signed, size) = match size.strip_prefix('-') {
        Some(size) => (true, size),
        None => (false, size),
    };
    // `8f` is a floating-point number: of no use here.
    let size = match size {
        "1" => 1,
        "2" => 2,
        "4" => 4,
        "8" => 8,
        _ => return None,
    };
    Some(UsdtArg { size, signed, place: self::place(place)? })
}

fn place(text: &str) -> Option<UsdtPlace> {
    if text.is_empty() {
        return None;
    }
    if let Some(constant) = text.strip_prefix('$') {
        return Some(UsdtPlace::Constant(number(constant)?));
    }
    if let Some(name) = text.strip_prefix('%') {
        let (register, shift) = register(name)?;
        return Some(UsdtPlace::Register { register, shift });
    }
    let (front, inside) = match text.split_once('(') {
        Some((front, rest)) => (front, Some(rest.strip_suffix(')')?)),
        None => (text, None),
    };
    let (symbol, offset) = symbol_and_offset(front)?;
    let (mut base, mut index) = (None, None);
    if let Some(inside) = inside {
        let mut parts = inside.split(',').map(str::trim);
        base = match parts.next()? {
            "" => None,
            name => Some(whole_register(name)?),
        };
        if let Some(name) = parts.next() {
            let scale = match parts.next() {
                None | Some("" | "1") => 1,
                Some("2") => 2,
                Some("4") => 4,
                Some("8") => 8,
                Some(_) => return None,
            };
            index = match name {
                "" => None,
                name => Some((whole_register(name)?, scale)),
            };
        }
        if parts.next().is_some() {
            return None;
        }
    }
    match symbol {
        Some(name) if index.is_none() && matches!(base, None | Some(Reg::Rip)) => {
            Some(UsdtPlace::Symbol { name: name.to_owned(), offset })
        }
        Some(_) => None,
        None => Some(UsdtPlace::Memory { offset, base, index }),
    }
}

/// `symbol`, `symbol+8`, `8+symbol`, `-8`, or nothing.
fn symbol_and_offset(text: &str) -> Option<(Option<&str>, i64)> {
    if text.is_empty() {
        return Some((None, 0));
    }
    if let Some(offset) = number(text) {
        return Some((None, offset));
    }
    let named = |name: &str| {
        !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$' | '@'))
    };
    if named(text) {
        return Some((Some(text), 0));
    }
    let at = text.rfind(['+', '-']).filter(|at| *at > 0)?;
    let (left, right) = (text.get(..at)?, text.get(at..)?);
    if named(left) {
        return Some((Some(left), number(right)?));
    }
    let right = right.strip_prefix('+')?;
    named(right).then_some(())?;
    Some((Some(right), number(left)?))
}

fn number(text: &str) -> Option<i64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if !digits.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse::<u64>().ok()?,
    };
    // Large constants are written without a sign: they are what the bits say.
    Some(if negative { (value as i64).wrapping_neg() } else { value as i64 })
}

fn whole_register(text: &str) -> Option<Reg> {
    let (register, shift) = register(text.strip_prefix('%')?)?;
    (shift == 0).then_some(register)
}

/// The whole register that a name is part of, and where in it the part begins.
fn register(name: &str) -> Option<(Reg, u8)> {
    let register = match name {
        "rax" | "eax" | "ax" | "al" => Reg::Rax,
        "rbx" | "ebx" | "bx" | "bl" => Reg::Rbx,
        "rcx" | "ecx" | "cx" | "cl" => Reg::Rcx,
        "rdx" | "edx" | "dx" | "dl" => Reg::Rdx,
        "rsi" | "esi" | "si" | "sil" => Reg::Rsi,
        "rdi" | "edi" | "di" | "dil" => Reg::Rdi,
        "rbp" | "ebp" | "bp" | "bpl" => Reg::Rbp,
        "rsp" | "esp" | "sp" | "spl" => Reg::Rsp,
        "rip" => Reg::Rip,
        "ah" => return Some((Reg::Rax, 8)),
        "bh" => return Some((Reg::Rbx, 8)),
        "ch" => return Some((Reg::Rcx, 8)),
        "dh" => return Some((Reg::Rdx, 8)),
        _ => {
            let number = name.strip_prefix('r')?.trim_end_matches(['d', 'w', 'b', 'l']);
            match number {
                "8" => Reg::R8,
                "9" => Reg::R9,
                "10" => Reg::R10,
                "11" => Reg::R11,
                "12" => Reg::R12,
                "13" => Reg::R13,
                "14" => Reg::R14,
                "15" => Reg::R15,
                _ => return None,
            }
        }
    };
    Some((register, 0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn memory(offset: i64, base: Option<Reg>, index: Option<(Reg, u8)>) -> UsdtPlace {
        UsdtPlace::Memory { offset, base, index }
    }

    #[test]
    fn arguments_are_read_as_assemblers_write_them() {
        let cases = [
            ("-4@$0", 4, true, UsdtPlace::Constant(0)),
            ("-4@$-22", 4, true, UsdtPlace::Constant(-22)),
            ("8@%r14", 8, false, UsdtPlace::Register { register: Reg::R14, shift: 0 }),
            ("2@%r12w", 2, false, UsdtPlace::Register { register: Reg::R12, shift: 0 }),
            ("1@%ah", 1, false, UsdtPlace::Register { register: Reg::Rax, shift: 8 }),
            ("8@(%rsp)", 8, false, memory(0, Some(Reg::Rsp), None)),
            ("4@576(%rdi)", 4, false, memory(576, Some(Reg::Rdi), None)),
            ("8@-8(%rbp,%rax,4)", 8, false, memory(-8, Some(Reg::Rbp), Some((Reg::Rax, 4)))),
            ("8@16(,%r9,8)", 8, false, memory(16, None, Some((Reg::R9, 8)))),
            ("4@counter(%rip)", 4, false, UsdtPlace::Symbol { name: "counter".to_owned(), offset: 0 }),
            ("4@counter+8(%rip)", 4, false, UsdtPlace::Symbol { name: "counter".to_owned(), offset: 8 }),
            ("4@8+counter", 4, false, UsdtPlace::Symbol { name: "counter".to_owned(), offset: 8 }),
        ];
        for (text, size, signed, place) in cases {
            assert_eq!(argument(text), Some(UsdtArg { size, signed, place }), "{text}");
        }
        for text in ["", "@", "8@", "3@%rax", "8f@%xmm0", "8@%xmm0", "8@(%rax", "8@(%rax,%rbx,3)"] {
            assert_eq!(argument(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_and_no_notes_make_it_panic(text in "\\PC{0,40}", notes in prop::collection::vec(any::<u8>(), 0..200)) {
            arguments(&text);
            let mut rest: &[u8] = &notes;
            while let Some((_, after)) = next_note(rest) {
                prop_assert!(after.len() < rest.len());
                rest = after;
            }
        }
    }
}
