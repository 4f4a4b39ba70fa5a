//! Reads DWARF (2 to 5) for what probes need: the layout of structures, the values of enumerators, where
//! a function's arguments are at its entry, and where it was inlined. It knows no hooks.
//!
//! A binary of SPDK's size describes the same structures hundreds of times, once in each compilation
//! unit. So everything that is wanted is gathered in one pass over the units' outermost entries, on all
//! cores, skipping what lies beneath; what is found is copied out, and equal copies are kept once.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use gimli::{AttributeValue, EndianSlice, LittleEndian, UnitOffset};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::elf::Elf;
use crate::place::Reg;

type Slice<'a> = EndianSlice<'a, LittleEndian>;
type Dwarf<'a> = gimli::Dwarf<Slice<'a>>;
type Unit<'a> = gimli::Unit<Slice<'a>>;
type Value<'a> = AttributeValue<Slice<'a>>;

/// How deep structures may nest, and how long chains of typedefs may be.
const DEEPEST: usize = 24;

/// How many members one structure may have, nested ones counted.
const MOST_MEMBERS: usize = 50_000;

/// How many different layouts of one name are kept: two already are ambiguous.
const MOST_VARIANTS: usize = 16;

/// How many places where a function was inlined are kept.
const MOST_INLINED: usize = 65_536;

/// Names to look for, all in one pass.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// Structures, unions, and typedefs of either.
    pub(crate) structures: Vec<String>,
    /// Enumerations.
    pub(crate) enumerations: Vec<String>,
    /// Functions.
    pub(crate) functions: Vec<String>,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    /// Every different complete definition of a structure's name.
    pub(crate) structures: HashMap<String, Vec<Arc<Structure>>>,
    /// Every different complete definition of an enumeration's name.
    pub(crate) enumerations: HashMap<String, Vec<Enumerators>>,
    pub(crate) functions: HashMap<String, FunctionFacts>,
    /// Names that were seen declared, but not defined.
    pub(crate) declared: HashSet<String>,
    /// A split debug file that is needed and not there, the first one, and how many.
    pub(crate) missing_split: Option<(PathBuf, usize)>,
    /// Units that could not be read to their end, with the first reason.
    pub(crate) damaged: Option<(String, usize)>,
    /// Units read.
    pub(crate) units: usize,
}

/// Names and values, in the order of the source.
pub(crate) type Enumerators = Arc<Vec<(String, i64)>>;

/// A structure or union.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Structure {
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) members: Vec<Member>,
}

/// A member of a structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// None for an anonymous structure or union.
    pub(crate) name: Option<String>,
    /// From the structure's start, in bytes.
    pub(crate) offset: u64,
    /// In bytes; for a bit-field, the bytes that it touches.
    pub(crate) size: u64,
    /// Of a bit-field: lowest bit in the byte at `offset`, and number of bits.
    pub(crate) bits: Option<(u8, u8)>,
    /// As C writes it.
    pub(crate) type_name: String,
    pub(crate) kind: Kind,
}

/// What a member is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    Structure(Arc<Structure>),
    Pointer,
    Array,
    #[default]
    Other,
}

/// What DWARF says of a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FunctionFacts {
    /// First address of each place where it was inlined.
    pub(crate) inlined: Vec<u64>,
    /// Its copies: entry address, and where each argument is there.
    pub(crate) copies: Vec<(u64, Vec<Argument>)>,
}

impl FunctionFacts {
    /// In order, each once: a function in a header is described by many units.
    fn tidy(&mut self) {
        self.inlined.sort_unstable();
        self.inlined.dedup();
        self.inlined.truncate(MOST_INLINED);
        self.copies.sort_by_key(|(entry, _)| *entry);
        self.copies.dedup();
    }
}

/// Where an argument is when the function is entered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Argument {
    /// In a register.
    Register(Reg),
    /// The debug information does not say.
    Unknown,
    /// Somewhere else: on the stack, split, or a constant.
    Elsewhere,
}

impl Found {
    pub(crate) fn absorb(&mut self, other: Found) {
        for (name, layouts) in other.structures {
            let known = self.structures.entry(name).or_default();
            for layout in layouts {
                if known.len() < MOST_VARIANTS && !known.contains(&layout) {
                    known.push(layout);
                }
            }
        }
        for (name, values) in other.enumerations {
            let known = self.enumerations.entry(name).or_default();
            for value in values {
                if known.len() < MOST_VARIANTS && !known.contains(&value) {
                    known.push(value);
                }
            }
        }
        for (name, facts) in other.functions {
            let known = self.functions.entry(name).or_default();
            known.inlined.extend(facts.inlined);
            known.copies.extend(facts.copies);
            known.tidy();
        }
        self.declared.extend(other.declared);
        self.missing_split = match (self.missing_split.take(), other.missing_split) {
            (Some((path, count)), Some((_, more))) => Some((path, count + more)),
            (one, other) => one.or(other),
        };
        self.damaged = match (self.damaged.take(), other.damaged) {
            (Some((why, count)), Some((_, more))) => Some((why, count + more)),
            (one, other) => one.or(other),
        };
        self.units += other.units;
    }
}

/// Looks through the DWARF of `elf` for everything wanted.
///
/// `alternate` is the file that dwz moved shared entries to; `program` the binary that split debug
/// files are looked for beside.
pub(crate) fn scan(
    elf: &Elf,
    alternate: Option<&Elf>,
    program: &Path,
    wanted: &Wanted,
) -> Result<Found, Error> {
    let sections = sections(elf, gimli::SectionId::name)?;
    let alternate = alternate.map(|elf| self::sections(elf, gimli::SectionId::name)).transpose()?;
    let dwarf = sections.borrow_with_sup(alternate.as_ref(), borrow);
    let pass = Pass::new(&dwarf, wanted);
    let package_elf = package(program);
    let package_sections = package_elf.as_ref().and_then(|elf| {
        gimli::DwarfPackageSections::load(|id| {
            id.dwo_name()
                .map_or(Ok(Cow::Borrowed(&[][..])), |name| elf.section(name))
                .map_err(|_| gimli::Error::Io)
        })
        .ok()
    });
    let package =
        package_sections.as_ref().and_then(|sections: &gimli::DwarfPackageSections<Cow<'_, [u8]>>| {
            sections.borrow(borrow, EndianSlice::new(&[], LittleEndian)).ok()
        });
    Ok(pass.run(&|unit, found| {
        split_unit(unit, &dwarf, package.as_ref(), wanted, found);
    }))
}

// The sections' type is fixed where they are kept.
#[allow(clippy::ptr_arg)]
fn borrow<'a>(section: &'a Cow<'_, [u8]>) -> Slice<'a> {
    EndianSlice::new(section, LittleEndian)
}

fn sections<'a>(
    elf: &'a Elf,
    name: impl Fn(gimli::SectionId) -> &'static str,
) -> Result<gimli::DwarfSections<Cow<'a, [u8]>>, Error> {
    // What neither types nor arguments need is left on the disk.
    gimli::DwarfSections::load(|id| match id {
        gimli::SectionId::DebugAranges
        | gimli::SectionId::DebugMacro
        | gimli::SectionId::DebugMacinfo
        | gimli::SectionId::DebugNames => Ok(Cow::Borrowed(&[][..])),
        id => elf.section(name(id)),
    })
}

/// The package of split debug files beside the program, if there is one.
fn package(program: &Path) -> Option<Elf> {
    let mut name = program.as_os_str().to_owned();
    name.push(".dwp");
    Elf::open_debug(Path::new(&name)).ok()
}

/// Reads what a skeleton unit stands for: from the package, else from its own file.
fn split_unit<'a>(
    skeleton: &Unit<'a>,
    dwarf: &Dwarf<'a>,
    package: Option<&gimli::DwarfPackage<Slice<'a>>>,
    wanted: &Wanted,
    found: &mut Found,
) {
    if let (Some(package), Some(id)) = (package, skeleton.dwo_id)
        && let Ok(Some(dwo)) = package.find_cu(id, dwarf)
    {
        found.absorb(scan_split(&dwo, skeleton, wanted));
        return;
    }
    let string = |value: Option<Value<'a>>| -> Option<PathBuf> {
        let text = dwarf.attr_string(skeleton, value?).ok()?;
        Some(PathBuf::from(text.to_string_lossy().into_owned()))
    };
    let Some(name) = skeleton.dwo_name().ok().and_then(string) else {
        return;
    };
    let directory =
        skeleton.comp_dir.map(|text| PathBuf::from(text.to_string_lossy().into_owned())).unwrap_or_default();
    let path = directory.join(name);
    let Ok(elf) = Elf::open_debug(&path) else {
        found.absorb(Found { missing_split: Some((path, 1)), ..Found::default() });
        return;
    };
    let sections = gimli::DwarfSections::load(|id| {
        id.dwo_name().map_or(Ok(Cow::Borrowed(&[][..])), |name| elf.section(name))
    });
    let sections: gimli::DwarfSections<Cow<'_, [u8]>> = match sections {
        Ok(sections) => sections,
        Err(error) => {
            let error: Error = error;
            found.absorb(Found { damaged: Some((error.to_string(), 1)), ..Found::default() });
            return;
        }
    };
    let mut dwo = sections.borrow(borrow);
    dwo.make_dwo(dwarf);
    found.absorb(scan_split(&dwo, skeleton, wanted));
}

fn scan_split<'a>(dwo: &Dwarf<'a>, skeleton: &Unit<'_>, wanted: &Wanted) -> Found {
    // A skeleton's bases are numbers; they hold for any lifetime.
    let base = skeleton.addr_base;
    let low_pc = skeleton.low_pc;
    let pass = Pass { bases: Some((low_pc, base)), ..Pass::new(dwo, wanted) };
    pass.run(&|_, _| {})
}

/// One pass over the units of one file.
struct Pass<'d, 'a> {
    dwarf: &'d Dwarf<'a>,
    wanted: &'d Wanted,
    names: HashMap<&'d [u8], Names>,
    headers: Vec<gimli::UnitHeader<Slice<'a>>>,
    /// Units that others refer into, made when first needed.
    others: Mutex<HashMap<usize, Arc<Unit<'a>>>>,
    signatures: OnceLock<HashMap<u64, (usize, UnitOffset)>>,
    /// Layouts seen, by name and fingerprint.
    seen: Mutex<HashSet<(usize, u64)>>,
    /// Of a split file: the address bases of its skeleton.
    bases: Option<(u64, gimli::DebugAddrBase)>,
    header_error: Option<String>,
}

/// What a name is wanted as.
#[derive(Clone, Copy, Default)]
struct Names {
    structure: Option<usize>,
    enumeration: Option<usize>,
    function: Option<usize>,
}

/// A wanted function's entries in a unit.
#[derive(Default)]
struct FunctionEntries {
    /// Where each wanted function's own entries are (in .debug_info), by which it is referred to.
    origins: HashMap<usize, usize>,
}

impl<'d, 'a> Pass<'d, 'a> {
    fn new(dwarf: &'d Dwarf<'a>, wanted: &'d Wanted) -> Self {
        let mut names: HashMap<&[u8], Names> = HashMap::new();
        for (index, name) in wanted.structures.iter().enumerate() {
            names.entry(name.as_bytes()).or_default().structure = Some(index);
        }
        for (index, name) in wanted.enumerations.iter().enumerate() {
            names.entry(name.as_bytes()).or_default().enumeration = Some(index);
        }
        for (index, name) in wanted.functions.iter().enumerate() {
            names.entry(name.as_bytes()).or_default().function = Some(index);
        }
        let mut headers = Vec::new();
        let mut header_error = None;
        let mut units = dwarf.units();
        loop {
            match units.next() {
                Ok(Some(header)) => headers.push(header),
                Ok(None) => break,
                Err(error) => {
                    header_error = Some(error.to_string());
                    break;
                }
            }
        }
        let mut types = dwarf.type_units();
        while let Ok(Some(header)) = types.next() {
            headers.push(header);
        }
        Pass {
            dwarf,
            wanted,
            names,
            headers,
            others: Mutex::default(),
            signatures: OnceLock::new(),
            seen: Mutex::default(),
            bases: None,
            header_error,
        }
    }

    fn run(&self, skeleton: &(dyn Fn(&Unit<'a>, &mut Found) + Sync)) -> Found {
        let next = AtomicUsize::new(0);
        let threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(8)
            .min(self.headers.len().div_ceil(8).max(1));
        let work = || {
            let mut found = Found::default();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= self.headers.len() {
                    return found;
                }
                if let Err(error) = self.unit_by_index(index, skeleton, &mut found) {
                    found.absorb(Found { damaged: Some((error.to_string(), 1)), ..Found::default() });
                }
            }
        };
        let mut all = std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut all = work();
            for worker in workers {
                match worker.join() {
                    Ok(found) => all.absorb(found),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            all
        });
        for facts in all.functions.values_mut() {
            facts.tidy();
        }
        if let Some(error) = &self.header_error {
            all.absorb(Found { damaged: Some((error.clone(), 1)), ..Found::default() });
        }
        all
    }

    fn make_unit(&self, index: usize) -> gimli::Result<Unit<'a>> {
        let header = *self.headers.get(index).ok_or(gimli::Error::MissingUnitDie)?;
        let mut unit = self.dwarf.unit(header)?;
        if let Some((low_pc, addr_base)) = self.bases {
            unit.low_pc = low_pc;
            unit.addr_base = addr_base;
        }
        Ok(unit)
    }

    /// A unit that another one refers into.
    fn other(&self, index: usize) -> gimli::Result<Arc<Unit<'a>>> {
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(unit) = others.get(&index) {
            return Ok(Arc::clone(unit));
        }
        let unit = Arc::new(self.make_unit(index)?);
        others.insert(index, Arc::clone(&unit));
        Ok(unit)
    }

    fn unit_by_index(
        &self,
        index: usize,
        skeleton: &(dyn Fn(&Unit<'a>, &mut Found) + Sync),
        found: &mut Found,
    ) -> gimli::Result<()> {
        found.units += 1;
        let unit = Arc::new(self.make_unit(index)?);
        if self.dwarf.file_type != gimli::DwarfFileType::Dwo && unit.dwo_name()?.is_some() {
            skeleton(&unit, found);
        }
        let functions = self.outermost(&unit, found)?;
        if !functions.origins.is_empty() {
            self.functions(&unit, &functions, found)?;
        }
        Ok(())
    }

    /// Walks the entries that no function or structure encloses.
    fn outermost(&self, unit: &Arc<Unit<'a>>, found: &mut Found) -> gimli::Result<FunctionEntries> {
        let mut functions = FunctionEntries::default();
        let mut entries = unit.entries_raw(None)?;
        // `entries` counts depth from where it began; `base` is the depth there.
        let mut base = 0;
        // Entries at this depth are looked at, deeper ones belong to what was skipped.
        let mut open = 0;
        while !entries.is_empty() {
            let depth = base + entries.next_depth();
            let offset = entries.next_offset();
            let Some(abbreviation) = entries.read_abbreviation()? else {
                continue;
            };
            if depth > open {
                entries.skip_attributes(abbreviation.attributes())?;
                continue;
            }
            open = depth;
            let tag = abbreviation.tag();
            let container = matches!(
                tag,
                gimli::DW_TAG_compile_unit
                    | gimli::DW_TAG_partial_unit
                    | gimli::DW_TAG_type_unit
                    | gimli::DW_TAG_skeleton_unit
                    | gimli::DW_TAG_namespace
                    | gimli::DW_TAG_module
            );
            if container {
                entries.skip_attributes(abbreviation.attributes())?;
                if abbreviation.has_children() {
                    open = depth + 1;
                }
                continue;
            }
            let named = matches!(
                tag,
                gimli::DW_TAG_structure_type
                    | gimli::DW_TAG_union_type
                    | gimli::DW_TAG_class_type
                    | gimli::DW_TAG_typedef
                    | gimli::DW_TAG_enumeration_type
                    | gimli::DW_TAG_subprogram
            );
            if !named && !abbreviation.has_children() {
                entries.skip_attributes(abbreviation.attributes())?;
                continue;
            }
            let mut name = None;
            let mut sibling = None;
            let mut declaration = false;
            for specification in abbreviation.attributes() {
                let attribute = entries.read_attribute_inline(*specification)?;
                match attribute.name() {
                    gimli::DW_AT_name => name = Some(attribute.raw_value()),
                    gimli::DW_AT_sibling => {
                        if let AttributeValue::UnitRef(to) = attribute.raw_value() {
                            sibling = Some(to);
                        }
                    }
                    gimli::DW_AT_declaration => {
                        declaration |= matches!(attribute.raw_value(), AttributeValue::Flag(true));
                    }
                    // The definition is in a unit of its own.
                    gimli::DW_AT_signature => declaration = true,
                    _ => {}
                }
            }
            if let Some(name) = name.filter(|_| named)
                && let Ok(name) = self.dwarf.attr_string(unit, name)
                && let Some(names) = self.names.get(name.slice())
            {
                self.outermost_entry(unit, tag, offset, declaration, *names, found, &mut functions)?;
            }
            // A sibling that does not lie ahead would never end.
            if let Some(to) = sibling.filter(|to| to.0 > entries.next_offset().0)
                && abbreviation.has_children()
                && let Ok(ahead) = unit.entries_raw(Some(to))
            {
                entries = ahead;
                base = depth;
            }
        }
        Ok(functions)
    }

    #[allow(clippy::too_many_arguments)]
    fn outermost_entry(
        &self,
        unit: &Arc<Unit<'a>>,
        tag: gimli::DwTag,
        offset: UnitOffset,
        declaration: bool,
        names: Names,
        found: &mut Found,
        functions: &mut FunctionEntries,
    ) -> gimli::Result<()> {
        match tag {
            gimli::DW_TAG_structure_type
            | gimli::DW_TAG_union_type
            | gimli::DW_TAG_class_type
            | gimli::DW_TAG_typedef => {
                let Some(index) = names.structure else {
                    return Ok(());
                };
                let Some(name) = self.wanted.structures.get(index) else {
                    return Ok(());
                };
                let target = match tag {
                    gimli::DW_TAG_typedef => self.structure_behind(unit, offset)?,
                    _ if declaration => None,
                    _ => Some((Arc::clone(unit), offset)),
                };
                match target {
                    None => {
                        found.declared.insert(name.clone());
                    }
                    Some((unit, offset)) => {
                        let print = self.fingerprint(&unit, offset)?;
                        let new = {
                            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
                            seen.insert((index, print))
                        };
                        if new {
                            let mut budget = MOST_MEMBERS;
                            let structure = self.structure(&unit, offset, 0, &mut budget)?;
                            let known = found.structures.entry(name.clone()).or_default();
                            if known.len() < MOST_VARIANTS && !known.contains(&structure) {
                                known.push(structure);
                            }
                        }
                    }
                }
            }
            gimli::DW_TAG_enumeration_type => {
                if declaration {
                    return Ok(());
                }
                if let Some(name) = names.enumeration.and_then(|index| self.wanted.enumerations.get(index)) {
                    let values = Arc::new(self.enumerators(unit, offset)?);
                    let known = found.enumerations.entry(name.clone()).or_default();
                    if known.len() < MOST_VARIANTS && !known.contains(&values) {
                        known.push(values);
                    }
                }
            }
            gimli::DW_TAG_subprogram => {
                if let (Some(index), false) = (names.function, declaration)
                    && let Some(at) = self.global(unit, offset)
                {
                    functions.origins.insert(at, index);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// An entry's offset in its section, by which other units refer to it.
    fn global(&self, unit: &Unit<'a>, offset: UnitOffset) -> Option<usize> {
        offset.to_debug_info_offset(&unit.header).map(|offset| offset.0)
    }

    /// The entry that a reference leads to.
    fn follow(
        &self,
        unit: &Arc<Unit<'a>>,
        value: Value<'a>,
    ) -> gimli::Result<Option<(Arc<Unit<'a>>, UnitOffset)>> {
        match value {
            AttributeValue::UnitRef(offset) => Ok(Some((Arc::clone(unit), offset))),
            AttributeValue::DebugInfoRef(offset) => {
                let index = self
                    .headers
                    .partition_point(|header| {
                        header.debug_info_offset().is_some_and(|start| start.0 <= offset.0)
                    })
                    .checked_sub(1);
                let Some(index) = index else {
                    return Ok(None);
                };
                let other = self.other(index)?;
                let offset = offset.to_unit_offset(&other.header);
                Ok(offset.map(|offset| (other, offset)))
            }
            AttributeValue::DebugTypesRef(signature) => {
                let Some((index, offset)) = self.signatures().get(&signature.0) else {
                    return Ok(None);
                };
                Ok(Some((self.other(*index)?, *offset)))
            }
            // Entries in a file that several debug files share: its types are not followed.
            _ => Ok(None),
        }
    }

    fn signatures(&self) -> &HashMap<u64, (usize, UnitOffset)> {
        self.signatures.get_or_init(|| {
            self.headers
                .iter()
                .enumerate()
                .filter_map(|(index, header)| match header.type_() {
                    gimli::UnitType::Type { type_signature, type_offset }
                    | gimli::UnitType::SplitType { type_signature, type_offset } => {
                        Some((type_signature.0, (index, type_offset)))
                    }
                    _ => None,
                })
                .collect()
        })
    }

    fn string(&self, unit: &Unit<'a>, value: Option<Value<'a>>) -> Option<String> {
        let text = self.dwarf.attr_string(unit, value?).ok()?;
        Some(text.to_string_lossy().into_owned())
    }

    /// The complete structure that a typedef, qualifier or declaration stands for.
    fn structure_behind(
        &self,
        unit: &Arc<Unit<'a>>,
        offset: UnitOffset,
    ) -> gimli::Result<Option<(Arc<Unit<'a>>, UnitOffset)>> {
        let (mut unit, mut offset) = (Arc::clone(unit), offset);
        for _ in 0..DEEPEST {
            let entry = unit.entry(offset)?;
            let to = match entry.tag() {
                gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type | gimli::DW_TAG_class_type => {
                    // A stand-in for a type in a unit of its own; gcc does not even mark it as declaration.
                    let elsewhere = entry.attr_value(gimli::DW_AT_signature);
                    let declared =
                        entry.attr_value(gimli::DW_AT_declaration) == Some(AttributeValue::Flag(true));
                    if elsewhere.is_none() && !declared {
                        return Ok(Some((unit, offset)));
                    }
                    elsewhere
                }
                gimli::DW_TAG_typedef
                | gimli::DW_TAG_const_type
                | gimli::DW_TAG_volatile_type
                | gimli::DW_TAG_restrict_type
                | gimli::DW_TAG_atomic_type => entry.attr_value(gimli::DW_AT_type),
                _ => None,
            };
            let Some(value) = to else {
                return Ok(None);
            };
            let Some((next, at)) = self.follow(&unit, value)? else {
                return Ok(None);
            };
            (unit, offset) = (next, at);
        }
        Ok(None)
    }

    /// A number that differs where layouts differ: of size, and of the members' names and places,
    /// anonymous ones looked into.
    fn fingerprint(&self, unit: &Arc<Unit<'a>>, offset: UnitOffset) -> gimli::Result<u64> {
        let mut hash = Fingerprint::default();
        let mut budget = MOST_MEMBERS;
        self.add_fingerprint(unit, offset, 0, &mut budget, &mut hash)?;
        Ok(hash.0)
    }

    fn add_fingerprint(
        &self,
        unit: &Arc<Unit<'a>>,
        offset: UnitOffset,
        depth: usize,
        budget: &mut usize,
        hash: &mut Fingerprint,
    ) -> gimli::Result<()> {
        if depth > DEEPEST {
            return Ok(());
        }
        let mut entries = unit.entries_raw(Some(offset))?;
        let mut first = true;
        while !entries.is_empty() {
            let level = entries.next_depth();
            let Some(abbreviation) = entries.read_abbreviation()? else {
                if entries.next_depth() <= 0 {
                    break;
                }
                continue;
            };
            if !first && level <= 0 {
                break;
            }
            let member = level == 1 && abbreviation.tag() == gimli::DW_TAG_member;
            let mut anonymous = true;
            let mut type_ = None;
            if first || member {
                for specification in abbreviation.attributes() {
                    let attribute = entries.read_attribute_inline(*specification)?;
                    match attribute.name() {
                        gimli::DW_AT_name if member => {
                            anonymous = false;
                            if let Ok(name) = self.dwarf.attr_string(unit, attribute.raw_value()) {
                                hash.add(name.slice());
                            }
                        }
                        gimli::DW_AT_type => type_ = Some(attribute.raw_value()),
                        gimli::DW_AT_byte_size
                        | gimli::DW_AT_data_member_location
                        | gimli::DW_AT_data_bit_offset
                        | gimli::DW_AT_bit_offset
                        | gimli::DW_AT_bit_size => {
                            hash.add(&attribute.name().0.to_le_bytes());
                            match attribute.raw_value() {
                                AttributeValue::Exprloc(expression) => hash.add(expression.0.slice()),
                                AttributeValue::Block(block) => hash.add(block.slice()),
                                value => {
                                    hash.add(&value.udata_value().unwrap_or(u64::MAX).to_le_bytes());
                                }
                            }
                        }
                        _ => {}
                    }
                }
            } else {
                entries.skip_attributes(abbreviation.attributes())?;
            }
            if member {
                if *budget == 0 {
                    return Ok(());
                }
                *budget -= 1;
                if anonymous
                    && let Some(type_) = type_
                    && let Some((unit, at)) = self.follow(unit, type_)?
                    && let Some((unit, at)) = self.structure_behind(&unit, at)?
                {
                    self.add_fingerprint(&unit, at, depth + 1, budget, hash)?;
                }
            }
            if first && !abbreviation.has_children() {
                break;
            }
            first = false;
        }
        Ok(())
    }

    /// The structure at an entry, copied out with everything that lies in it.
    fn structure(
        &self,
        unit: &Arc<Unit<'a>>,
        offset: UnitOffset,
        depth: usize,
        budget: &mut usize,
    ) -> gimli::Result<Arc<Structure>> {
        let mut tree = unit.entries_tree(Some(offset))?;
        let root = tree.root()?;
        let size = root
            .entry()
            .attr_value(gimli::DW_AT_byte_size)
            .and_then(|value| value.udata_value())
            .unwrap_or(0);
        let mut members = Vec::new();
        let mut children = root.children();
        while let Some(child) = children.next()? {
            let entry = child.entry();
            if entry.tag() != gimli::DW_TAG_member
                || *budget == 0
                // A static member of a C++ class lies elsewhere.
                || entry.has_attr(gimli::DW_AT_external)
            {
                continue;
            }
            *budget -= 1;
            let name = self.string(unit, entry.attr_value(gimli::DW_AT_name));
            let facts = match entry.attr_value(gimli::DW_AT_type) {
                Some(value) => self.type_facts(unit, value, depth, budget)?,
                None => TypeFacts::default(),
            };
            let number = |attribute| entry.attr_value(attribute).and_then(|value| value.udata_value());
            let location = match entry.attr_value(gimli::DW_AT_data_member_location) {
                Some(AttributeValue::Exprloc(expression)) => constant_offset(expression, unit).unwrap_or(0),
                Some(value) => value.udata_value().unwrap_or(0),
                None => 0,
            };
            let width = number(gimli::DW_AT_bit_size);
            let first_bit = if let Some(bit) = number(gimli::DW_AT_data_bit_offset) {
                Some(bit)
            } else if let Some(from_top) = number(gimli::DW_AT_bit_offset) {
                // DWARF 3: counted from the most significant bit of the storage unit.
                let storage = number(gimli::DW_AT_byte_size).unwrap_or(facts.size).saturating_mul(8);
                width.map(|width| {
                    location
                        .saturating_mul(8)
                        .saturating_add(storage.saturating_sub(from_top.saturating_add(width)))
                })
            } else {
                width.map(|_| location.saturating_mul(8))
            };
            let member = match (first_bit, width) {
                (Some(bit), Some(width)) => {
                    let shift = (bit % 8) as u8;
                    Member {
                        name,
                        offset: location.max(bit / 8),
                        size: u64::from(shift).saturating_add(width).div_ceil(8),
                        bits: Some((shift, width.min(64) as u8)),
                        type_name: facts.name,
                        kind: Kind::Other,
                    }
                }
                _ => Member {
                    name,
                    offset: location,
                    size: facts.size,
                    bits: None,
                    type_name: facts.name,
                    kind: facts.kind,
                },
            };
            members.push(member);
        }
        Ok(Arc::new(Structure { size, members }))
    }

    /// Size, name and kind of a type.
    fn type_facts(
        &self,
        unit: &Arc<Unit<'a>>,
        value: Value<'a>,
        depth: usize,
        budget: &mut usize,
    ) -> gimli::Result<TypeFacts> {
        let Some((unit, offset)) = self.follow(unit, value)? else {
            return Ok(TypeFacts::default());
        };
        if depth > DEEPEST {
            return Ok(TypeFacts::default());
        }
        let entry = unit.entry(offset)?;
        let name = self.string(&unit, entry.attr_value(gimli::DW_AT_name));
        let size = entry.attr_value(gimli::DW_AT_byte_size).and_then(|value| value.udata_value());
        let behind = |budget: &mut usize| -> gimli::Result<TypeFacts> {
            match entry.attr_value(gimli::DW_AT_type) {
                Some(value) => self.type_facts(&unit, value, depth + 1, budget),
                // `void` has no entry.
                None => Ok(TypeFacts { name: "void".to_owned(), ..TypeFacts::default() }),
            }
        };
        Ok(match entry.tag() {
            gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type | gimli::DW_TAG_class_type => {
                let word = if entry.tag() == gimli::DW_TAG_union_type { "union" } else { "struct" };
                let text = |name: Option<&str>| format!("{word} {}", name.unwrap_or("{...}"));
                match self.structure_behind(&unit, offset)? {
                    Some((behind, at)) => {
                        let structure = self.structure(&behind, at, depth + 1, budget)?;
                        let name = match name {
                            Some(name) => Some(name),
                            None => self.string(&behind, behind.entry(at)?.attr_value(gimli::DW_AT_name)),
                        };
                        TypeFacts {
                            size: structure.size,
                            name: text(name.as_deref()),
                            kind: Kind::Structure(structure),
                        }
                    }
                    None => TypeFacts { size: 0, name: text(name.as_deref()), kind: Kind::Other },
                }
            }
            gimli::DW_TAG_typedef => TypeFacts { name: name.unwrap_or_default(), ..behind(budget)? },
            gimli::DW_TAG_const_type
            | gimli::DW_TAG_volatile_type
            | gimli::DW_TAG_restrict_type
            | gimli::DW_TAG_atomic_type => behind(budget)?,
            gimli::DW_TAG_pointer_type
            | gimli::DW_TAG_reference_type
            | gimli::DW_TAG_rvalue_reference_type
            | gimli::DW_TAG_ptr_to_member_type => TypeFacts {
                size: size.unwrap_or(8),
                name: format!("{} *", self.pointee(&unit, &entry, 0)?),
                kind: Kind::Pointer,
            },
            gimli::DW_TAG_array_type => {
                let element = behind(budget)?;
                let count = self.array_length(&unit, offset)?;
                TypeFacts {
                    size: size.unwrap_or_else(|| element.size.saturating_mul(count)),
                    name: format!("{}[{count}]", element.name),
                    kind: Kind::Array,
                }
            }
            gimli::DW_TAG_enumeration_type => TypeFacts {
                size: match size {
                    Some(size) => size,
                    None => behind(budget)?.size,
                },
                name: format!("enum {}", name.as_deref().unwrap_or("{...}")),
                kind: Kind::Other,
            },
            _ => TypeFacts { size: size.unwrap_or(0), name: name.unwrap_or_default(), kind: Kind::Other },
        })
    }

    /// The name of what a pointer points to; its layout is not needed and could lead in circles.
    fn pointee(
        &self,
        unit: &Arc<Unit<'a>>,
        pointer: &gimli::DebuggingInformationEntry<Slice<'a>>,
        depth: usize,
    ) -> gimli::Result<String> {
        let Some(value) = pointer.attr_value(gimli::DW_AT_type) else {
            return Ok("void".to_owned());
        };
        let Some((unit, offset)) = self.follow(unit, value)? else {
            return Ok("void".to_owned());
        };
        let entry = unit.entry(offset)?;
        let name = self.string(&unit, entry.attr_value(gimli::DW_AT_name));
        Ok(match entry.tag() {
            gimli::DW_TAG_structure_type | gimli::DW_TAG_class_type => {
                format!("struct {}", name.as_deref().unwrap_or("{...}"))
            }
            gimli::DW_TAG_union_type => format!("union {}", name.as_deref().unwrap_or("{...}")),
            gimli::DW_TAG_enumeration_type => {
                format!("enum {}", name.as_deref().unwrap_or("{...}"))
            }
            gimli::DW_TAG_subroutine_type => "function".to_owned(),
            gimli::DW_TAG_pointer_type if depth < 4 => {
                format!("{} *", self.pointee(&unit, &entry, depth + 1)?)
            }
            gimli::DW_TAG_const_type | gimli::DW_TAG_volatile_type if depth < 4 => {
                self.pointee(&unit, &entry, depth + 1)?
            }
            _ => name.unwrap_or_else(|| "...".to_owned()),
        })
    }

    fn array_length(&self, unit: &Unit<'a>, offset: UnitOffset) -> gimli::Result<u64> {
        let mut tree = unit.entries_tree(Some(offset))?;
        let mut children = tree.root()?.children();
        let mut count = 1_u64;
        let mut dimensions = 0;
        while let Some(child) = children.next()? {
            let entry = child.entry();
            let number = |attribute| entry.attr_value(attribute).and_then(|value| value.udata_value());
            dimensions += 1;
            count = count.saturating_mul(
                number(gimli::DW_AT_count)
                    .or_else(|| number(gimli::DW_AT_upper_bound).map(|last| last.wrapping_add(1)))
                    .unwrap_or(0),
            );
            if dimensions > DEEPEST {
                break;
            }
        }
        Ok(if dimensions == 0 { 0 } else { count })
    }

    fn enumerators(&self, unit: &Unit<'a>, offset: UnitOffset) -> gimli::Result<Vec<(String, i64)>> {
        let mut tree = unit.entries_tree(Some(offset))?;
        let mut children = tree.root()?.children();
        let mut values = Vec::new();
        while let Some(child) = children.next()? {
            let entry = child.entry();
            if entry.tag() != gimli::DW_TAG_enumerator || values.len() >= MOST_MEMBERS {
                continue;
            }
            let value = entry.attr_value(gimli::DW_AT_const_value).and_then(|value| {
                value.udata_value().map(|value| value as i64).or_else(|| value.sdata_value())
            });
            if let (Some(name), Some(value)) = (self.string(unit, entry.attr_value(gimli::DW_AT_name)), value)
            {
                values.push((name, value));
            }
        }
        Ok(values)
    }

    /// Walks a whole unit for the copies of its wanted functions.
    fn functions(
        &self,
        unit: &Arc<Unit<'a>>,
        wanted: &FunctionEntries,
        found: &mut Found,
    ) -> gimli::Result<()> {
        let mut cursor = unit.entries();
        // The function whose formal parameters are being read: depth, entry address, arguments.
        let mut current: Option<(isize, usize, u64, Vec<Argument>)> = None;
        let mut finish = |current: &mut Option<(isize, usize, u64, Vec<Argument>)>| {
            if let Some((_, index, entry, arguments)) = current.take()
                && let Some(name) = self.wanted.functions.get(index)
            {
                let facts = found.functions.entry(name.clone()).or_default();
                facts.copies.push((entry, arguments));
            }
        };
        let mut inlined: Vec<(usize, u64)> = Vec::new();
        while let Some(entry) = cursor.next_dfs()? {
            let depth = entry.depth();
            if current.as_ref().is_some_and(|(at, ..)| depth <= *at) {
                finish(&mut current);
            }
            match entry.tag() {
                gimli::DW_TAG_inlined_subroutine => {
                    let origin = entry.attr_value(gimli::DW_AT_abstract_origin);
                    if let Some(index) = self.origin(unit, origin, wanted)
                        && inlined.len() < MOST_INLINED
                        && let Some(address) = self.first_address(unit, entry)
                    {
                        inlined.push((index, address));
                    }
                }
                gimli::DW_TAG_subprogram => {
                    let own = self
                        .global(unit, entry.offset())
                        .and_then(|offset| wanted.origins.get(&offset).copied());
                    let index = own
                        .or_else(|| self.origin(unit, entry.attr_value(gimli::DW_AT_abstract_origin), wanted))
                        .or_else(|| self.origin(unit, entry.attr_value(gimli::DW_AT_specification), wanted));
                    if let Some(index) = index
                        && let Some(address) = self.first_address(unit, entry)
                    {
                        finish(&mut current);
                        current = Some((depth, index, address, Vec::new()));
                    }
                }
                gimli::DW_TAG_formal_parameter => {
                    if let Some((at, _, address, arguments)) = &mut current
                        && depth == *at + 1
                        && arguments.len() < 64
                    {
                        let location = entry.attr_value(gimli::DW_AT_location);
                        arguments.push(self.argument(unit, location, *address));
                    }
                }
                _ => {}
            }
        }
        finish(&mut current);
        for (index, address) in inlined {
            if let Some(name) = self.wanted.functions.get(index) {
                found.functions.entry(name.clone()).or_default().inlined.push(address);
            }
        }
        Ok(())
    }

    fn origin(&self, unit: &Unit<'a>, value: Option<Value<'a>>, wanted: &FunctionEntries) -> Option<usize> {
        let offset = match value? {
            AttributeValue::UnitRef(offset) => self.global(unit, offset)?,
            AttributeValue::DebugInfoRef(offset) => offset.0,
            _ => return None,
        };
        wanted.origins.get(&offset).copied()
    }

    /// Where the code of an entry begins.
    fn first_address(
        &self,
        unit: &Unit<'a>,
        entry: &gimli::DebuggingInformationEntry<Slice<'a>>,
    ) -> Option<u64> {
        let address = |value: Option<Value<'a>>| self.dwarf.attr_address(unit, value?).ok().flatten();
        if let Some(low) = address(entry.attr_value(gimli::DW_AT_low_pc)) {
            return Some(low);
        }
        if let Some(value) = entry.attr_value(gimli::DW_AT_entry_pc)
            && let Some(entry_pc) = address(Some(value))
        {
            return Some(entry_pc);
        }
        let mut ranges = self.dwarf.die_ranges(unit, entry).ok()?;
        ranges.next().ok().flatten().map(|range| range.begin)
    }

    /// Where an argument is at an address.
    fn argument(&self, unit: &Unit<'a>, location: Option<Value<'a>>, at: u64) -> Argument {
        let Some(value) = location else {
            return Argument::Unknown;
        };
        if let AttributeValue::Exprloc(expression) = value {
            return in_register(expression, unit);
        }
        let Ok(Some(mut list)) = self.dwarf.attr_locations(unit, value) else {
            return Argument::Unknown;
        };
        while let Ok(Some(entry)) = list.next() {
            if entry.range.begin <= at && at < entry.range.end {
                return in_register(entry.data, unit);
            }
        }
        Argument::Unknown
    }
}

#[derive(Default)]
struct TypeFacts {
    size: u64,
    name: String,
    kind: Kind,
}

/// FNV-1a over the parts, each with its length so that they cannot run into each other.
struct Fingerprint(u64);

impl Default for Fingerprint {
    fn default() -> Self {
        Fingerprint(0xcbf2_9ce4_8422_2325)
    }
}

impl Fingerprint {
    fn add(&mut self, bytes: &[u8]) {
        for byte in (bytes.len() as u32).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// The offset that old compilers wrote as an expression: `plus_uconst N`.
fn constant_offset(expression: gimli::Expression<Slice<'_>>, unit: &Unit<'_>) -> Option<u64> {
    let mut operations = expression.operations(unit.encoding());
    match operations.next().ok().flatten()? {
        gimli::Operation::PlusConstant { value } => Some(value),
        gimli::Operation::UnsignedConstant { value } => Some(value),
        _ => None,
    }
}

fn in_register(expression: gimli::Expression<Slice<'_>>, unit: &Unit<'_>) -> Argument {
    let mut operations = expression.operations(unit.encoding());
    let first = operations.next().ok().flatten();
    let more = !matches!(operations.next(), Ok(None));
    match first {
        Some(gimli::Operation::Register { register }) if !more => {
            Reg::from_dwarf(register.0).map_or(Argument::Elsewhere, Argument::Register)
        }
        None => Argument::Unknown,
        // Spilled to the frame at -O0: the prologue does that, so at the entry it is in its register.
        Some(gimli::Operation::FrameOffset { .. }) => Argument::Unknown,
        Some(_) => Argument::Elsewhere,
    }
}
