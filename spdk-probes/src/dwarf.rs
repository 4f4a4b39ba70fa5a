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
use crate::inlined::{Base, InlinedSite, Place, Span};
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

/// How many arguments a function may have, and how many places each.
const MOST_ARGUMENTS: usize = 64;
const MOST_SPANS: usize = 1024;

/// How many pieces a function's code may be in.
const MOST_RANGES: usize = 4096;

/// How many entries may refer to each other in a row.
const LONGEST_CHAIN: usize = 4;

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
    /// A split debug file that is there, but of another build; the first one, and how many.
    pub(crate) other_split: Option<(PathBuf, usize)>,
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
    /// More of the places where it was inlined, those that have code.
    pub(crate) sites: Vec<InlinedSite>,
    /// How many places of which no code is left, by what the debug information says.
    pub(crate) vanished: usize,
}

impl FunctionFacts {
    /// In order, each once: a function in a header is described by many units.
    fn tidy(&mut self) {
        self.inlined.sort_unstable();
        self.inlined.dedup();
        self.inlined.truncate(MOST_INLINED);
        self.copies.sort_by_key(|(entry, _)| *entry);
        self.copies.dedup();
        self.sites.sort_by(|a, b| (a.entry, &a.ranges, &a.caller).cmp(&(b.entry, &b.ranges, &b.caller)));
        self.sites.dedup();
        self.sites.truncate(MOST_INLINED);
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
            known.sites.extend(facts.sites);
            known.vanished += facts.vanished;
            known.tidy();
        }
        self.declared.extend(other.declared);
        self.missing_split = match (self.missing_split.take(), other.missing_split) {
            (Some((path, count)), Some((_, more))) => Some((path, count + more)),
            (one, other) => one.or(other),
        };
        self.other_split = match (self.other_split.take(), other.other_split) {
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

/// Where the files that a binary's debug information was split into are looked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beside {
    /// The binary and its debug file, by every path that they are known by.
    pub(crate) files: Vec<PathBuf>,
    /// The root directory of the process that runs it, where that is another one.
    pub(crate) root: Option<PathBuf>,
}

impl Beside {
    /// A path as a compiler wrote it, as seen by the process and from here.
    fn both(&self, path: PathBuf) -> impl Iterator<Item = PathBuf> {
        let inside = self.root.as_ref().map(|root| root.join(path.strip_prefix("/").unwrap_or(&path)));
        inside.into_iter().chain([path])
    }

    /// The package of split debug files beside the program, if there is one.
    fn package(&self) -> Option<Elf> {
        self.files.iter().find_map(|file| {
            let mut name = file.as_os_str().to_owned();
            name.push(".dwp");
            Elf::open_debug(Path::new(&name)).ok()
        })
    }

    /// Where the compiler put a split debug file, and beside the binary, in case all was moved together.
    fn split(&self, directory: &Path, name: &Path) -> impl Iterator<Item = PathBuf> {
        let moved = self.files.iter().filter_map(|file| file.parent()).flat_map(move |folder| {
            let last = name.file_name().map(|last| folder.join(last));
            name.is_relative().then(|| folder.join(name)).into_iter().chain(last)
        });
        let moved: Vec<PathBuf> = moved.collect();
        self.both(directory.join(name)).chain(moved)
    }
}

/// Looks through the DWARF of `elf` for everything wanted.
///
/// `alternate` is the file that dwz moved shared entries to.
pub(crate) fn scan(
    elf: &Elf,
    alternate: Option<&Elf>,
    beside: &Beside,
    wanted: &Wanted,
) -> Result<Found, Error> {
    let sections = sections(elf, gimli::SectionId::name)?;
    let alternate = alternate.map(|elf| self::sections(elf, gimli::SectionId::name)).transpose()?;
    let dwarf = sections.borrow_with_sup(alternate.as_ref(), borrow);
    let pass = Pass::new(&dwarf, wanted);
    let package_elf = beside.package();
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
        split_unit(unit, &dwarf, package.as_ref(), beside, wanted, found);
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

/// Reads what a skeleton unit stands for: from the package, else from its own file.
fn split_unit<'a>(
    skeleton: &Unit<'a>,
    dwarf: &Dwarf<'a>,
    package: Option<&gimli::DwarfPackage<Slice<'a>>>,
    beside: &Beside,
    wanted: &Wanted,
    found: &mut Found,
) {
    if let (Some(package), Some(id)) = (package, skeleton.dwo_id)
        && let Ok(Some(dwo)) = package.find_cu(id, dwarf)
        && let Some(all) = scan_split(&dwo, skeleton, wanted)
    {
        found.absorb(all);
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
    let mut other = None;
    for path in beside.split(&directory, &name) {
        let Ok(elf) = Elf::open_debug(&path) else { continue };
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
        match scan_split(&dwo, skeleton, wanted) {
            Some(all) => {
                found.absorb(all);
                return;
            }
            None => other = other.or(Some((path, 1))),
        }
    }
    if other.is_some() {
        found.absorb(Found { other_split: other, ..Found::default() });
    } else {
        found.absorb(Found { missing_split: Some((directory.join(name), 1)), ..Found::default() });
    }
}

/// Reads a skeleton's unit in a split file; none where the file does not hold it.
fn scan_split<'a>(dwo: &Dwarf<'a>, skeleton: &Unit<'_>, wanted: &Wanted) -> Option<Found> {
    // A skeleton's bases are numbers; they hold for any lifetime.
    let bases = Bases {
        low_pc: skeleton.low_pc,
        addr: skeleton.addr_base,
        // As gimli's `copy_relocated_attributes`: DWARF 4's ranges stay in the program.
        ranges: (skeleton.header.version() < 5).then_some(skeleton.rnglists_base),
        id: skeleton.dwo_id,
    };
    let pass = Pass { bases: Some(bases), ..Pass::new(dwo, wanted) };
    pass.holds_its_unit().then(|| pass.run(&|_, _| {}))
}

/// What a split unit takes from its skeleton.
#[derive(Clone, Copy)]
struct Bases {
    low_pc: u64,
    addr: gimli::DebugAddrBase,
    ranges: Option<gimli::DebugRngListsBase>,
    id: Option<gimli::DwoId>,
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
    /// Of a split file: what its skeleton says.
    bases: Option<Bases>,
    header_error: Option<String>,
    /// The same for the file that dwz moved shared entries to.
    alternate: Option<Box<Pass<'d, 'a>>>,
}

/// Where an entry is: in which file's pass, unit and place.
struct Spot<'p, 'd, 'a> {
    pass: &'p Pass<'d, 'a>,
    unit: Arc<Unit<'a>>,
    offset: UnitOffset,
}

/// An entry by its place in .debug_info, of the file itself or of the one that dwz moved shared entries to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Global {
    alternate: bool,
    offset: usize,
}

/// What a name is wanted as.
#[derive(Clone, Copy, Default)]
struct Names {
    structure: Option<usize>,
    enumeration: Option<usize>,
    function: Option<usize>,
}

/// The entries by which wanted functions and their parameters are referred to.
#[derive(Default)]
struct Origins {
    functions: HashMap<Global, usize>,
    /// Which parameter of its function an entry is.
    parameters: HashMap<Global, usize>,
    /// Functions' entries that stand for another entry.
    aliases: Vec<(Global, Global)>,
}

impl Origins {
    fn absorb(&mut self, other: Origins) {
        self.functions.extend(other.functions);
        self.parameters.extend(other.parameters);
        self.aliases.extend(other.aliases);
    }

    /// Takes the entries that stand for a wanted function's as its own. Link-time optimisation makes them.
    fn settle(&mut self) {
        for _ in 0..LONGEST_CHAIN {
            let before = self.functions.len();
            for (alias, of) in &self.aliases {
                if let Some(index) = self.functions.get(of).copied() {
                    self.functions.entry(*alias).or_insert(index);
                }
            }
            if self.functions.len() == before {
                break;
            }
        }
        self.aliases = Vec::new();
    }
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
            alternate: dwarf.sup().map(|other| Box::new(Pass::new(other, wanted))),
        }
    }

    /// Of a split file: whether the unit that its skeleton means is in it.
    fn holds_its_unit(&self) -> bool {
        (0..self.headers.len()).any(|index| self.is_meant(index))
    }

    /// Whether this is not another skeleton's unit.
    fn is_meant(&self, index: usize) -> bool {
        let Some(Bases { id: Some(id), .. }) = self.bases else { return true };
        self.make_unit(index).is_ok_and(|unit| unit.dwo_id == Some(id))
    }

    fn run(&self, skeleton: &(dyn Fn(&Unit<'a>, &mut Found) + Sync)) -> Found {
        let mut all = Found::default();
        let mut origins = Origins::default();
        if let Some(alternate) = &self.alternate {
            let (found, of_it) = alternate.all_outermost(&|_, _| {});
            all.absorb(found);
            let moved = |global: Global| Global { alternate: true, ..global };
            origins.absorb(Origins {
                functions: of_it.functions.into_iter().map(|(at, index)| (moved(at), index)).collect(),
                parameters: of_it.parameters.into_iter().map(|(at, index)| (moved(at), index)).collect(),
                aliases: of_it.aliases.into_iter().map(|(at, of)| (moved(at), moved(of))).collect(),
            });
        }
        let (found, of_this) = self.all_outermost(skeleton);
        all.absorb(found);
        origins.absorb(of_this);
        origins.settle();
        // Where a function's code went, any unit may say: with link-time optimisation it is another one than
        // that of its source.
        if !origins.functions.is_empty() {
            all.absorb(self.in_parallel(|index, found: &mut Found| {
                if let Err(error) = self.functions(index, &origins, found) {
                    found.absorb(Found { damaged: Some((error.to_string(), 1)), ..Found::default() });
                }
            }));
        }
        for facts in all.functions.values_mut() {
            facts.tidy();
        }
        if let Some(error) = &self.header_error {
            all.absorb(Found { damaged: Some((error.clone(), 1)), ..Found::default() });
        }
        all
    }

    /// Walks the outermost entries of all units.
    fn all_outermost(&self, skeleton: &(dyn Fn(&Unit<'a>, &mut Found) + Sync)) -> (Found, Origins) {
        let both = self.in_parallel(|index, (found, origins): &mut (Found, Origins)| {
            if let Err(error) = self.unit_by_index(index, skeleton, found, origins) {
                found.absorb(Found { damaged: Some((error.to_string(), 1)), ..Found::default() });
            }
        });
        (both.0, both.1)
    }

    /// Does something with each unit, on several cores.
    fn in_parallel<T: Absorb + Default + Send>(&self, each: impl Fn(usize, &mut T) + Sync) -> T {
        let next = AtomicUsize::new(0);
        let threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(8)
            .min(self.headers.len().div_ceil(8).max(1));
        let work = || {
            let mut all = T::default();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= self.headers.len() {
                    return all;
                }
                each(index, &mut all);
            }
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut all = work();
            for worker in workers {
                match worker.join() {
                    Ok(found) => all.take_in(found),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            all
        })
    }

    fn make_unit(&self, index: usize) -> gimli::Result<Unit<'a>> {
        let header = *self.headers.get(index).ok_or(gimli::Error::MissingUnitDie)?;
        let mut unit = self.dwarf.unit(header)?;
        if let Some(bases) = self.bases {
            unit.low_pc = bases.low_pc;
            unit.addr_base = bases.addr;
            if let Some(ranges) = bases.ranges {
                unit.rnglists_base = ranges;
            }
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
        origins: &mut Origins,
    ) -> gimli::Result<()> {
        found.units += 1;
        let unit = Arc::new(self.make_unit(index)?);
        if self.dwarf.file_type != gimli::DwarfFileType::Dwo && unit.dwo_name()?.is_some() {
            skeleton(&unit, found);
        }
        self.outermost(&unit, found, origins)
    }

    /// Walks the entries that no function or structure encloses.
    fn outermost(&self, unit: &Arc<Unit<'a>>, found: &mut Found, origins: &mut Origins) -> gimli::Result<()> {
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
            let mut stands_for = None;
            let mut sibling = None;
            let mut declaration = false;
            for specification in abbreviation.attributes() {
                let attribute = entries.read_attribute_inline(*specification)?;
                match attribute.name() {
                    gimli::DW_AT_name => name = Some(attribute.raw_value()),
                    gimli::DW_AT_abstract_origin | gimli::DW_AT_specification => {
                        stands_for = Some(attribute.raw_value());
                    }
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
                self.outermost_entry(unit, tag, offset, declaration, *names, found, origins)?;
            }
            if tag == gimli::DW_TAG_subprogram
                && let Some(of) = stands_for.and_then(|value| self.referred(unit, value))
                && let Some(at) = self.global(unit, offset)
            {
                origins.aliases.push((at, of));
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
        Ok(())
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
        origins: &mut Origins,
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
                    _ => Some(Spot { pass: self, unit: Arc::clone(unit), offset }),
                };
                match target {
                    None => {
                        found.declared.insert(name.clone());
                    }
                    Some(Spot { pass, unit, offset }) => {
                        let print = pass.fingerprint(&unit, offset)?;
                        let new = {
                            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
                            seen.insert((index, print))
                        };
                        if new {
                            let mut budget = MOST_MEMBERS;
                            let structure = pass.structure(&unit, offset, 0, &mut budget)?;
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
                    origins.functions.insert(at, index);
                    let mut tree = unit.entries_tree(Some(offset))?;
                    let mut children = tree.root()?.children();
                    let mut number = 0;
                    while let Some(child) = children.next()? {
                        let entry = child.entry();
                        if entry.tag() != gimli::DW_TAG_formal_parameter || number >= MOST_ARGUMENTS {
                            break;
                        }
                        if let Some(at) = self.global(unit, entry.offset()) {
                            origins.parameters.insert(at, number);
                        }
                        number += 1;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// An entry's place in its section, by which other units refer to it.
    fn global(&self, unit: &Unit<'a>, offset: UnitOffset) -> Option<Global> {
        let offset = offset.to_debug_info_offset(&unit.header)?.0;
        Some(Global { alternate: false, offset })
    }

    /// The place of the entry that an attribute of a function or parameter refers to.
    fn referred(&self, unit: &Unit<'a>, value: Value<'a>) -> Option<Global> {
        match value {
            AttributeValue::UnitRef(offset) => self.global(unit, offset),
            AttributeValue::DebugInfoRef(offset) => Some(Global { alternate: false, offset: offset.0 }),
            AttributeValue::DebugInfoRefSup(offset) => Some(Global { alternate: true, offset: offset.0 }),
            _ => None,
        }
    }

    /// The entry at a place in this file's .debug_info.
    fn locate(&self, offset: gimli::DebugInfoOffset) -> gimli::Result<Option<Spot<'_, 'd, 'a>>> {
        let index = self
            .headers
            .partition_point(|header| header.debug_info_offset().is_some_and(|start| start.0 <= offset.0))
            .checked_sub(1);
        let Some(index) = index else {
            return Ok(None);
        };
        let unit = self.other(index)?;
        let offset = offset.to_unit_offset(&unit.header);
        Ok(offset.map(|offset| Spot { pass: self, unit, offset }))
    }

    /// The entry that a reference leads to.
    fn follow(&self, unit: &Arc<Unit<'a>>, value: Value<'a>) -> gimli::Result<Option<Spot<'_, 'd, 'a>>> {
        match value {
            AttributeValue::UnitRef(offset) => Ok(Some(Spot { pass: self, unit: Arc::clone(unit), offset })),
            AttributeValue::DebugInfoRef(offset) => self.locate(offset),
            AttributeValue::DebugInfoRefSup(offset) => {
                self.alternate.as_ref().map_or(Ok(None), |alternate| alternate.locate(offset))
            }
            AttributeValue::DebugTypesRef(signature) => {
                let Some((index, offset)) = self.signatures().get(&signature.0) else {
                    return Ok(None);
                };
                Ok(Some(Spot { pass: self, unit: self.other(*index)?, offset: *offset }))
            }
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
    ) -> gimli::Result<Option<Spot<'_, 'd, 'a>>> {
        let mut spot = Spot { pass: self, unit: Arc::clone(unit), offset };
        for _ in 0..DEEPEST {
            let entry = spot.unit.entry(spot.offset)?;
            let to = match entry.tag() {
                gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type | gimli::DW_TAG_class_type => {
                    // A stand-in for a type in a unit of its own; gcc does not even mark it as declaration.
                    let elsewhere = entry.attr_value(gimli::DW_AT_signature);
                    let declared =
                        entry.attr_value(gimli::DW_AT_declaration) == Some(AttributeValue::Flag(true));
                    if elsewhere.is_none() && !declared {
                        return Ok(Some(spot));
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
            let Some(next) = spot.pass.follow(&spot.unit, value)? else {
                return Ok(None);
            };
            spot = next;
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
                    && let Some(type_) = self.follow(unit, type_)?
                    && let Some(Spot { pass, unit, offset }) =
                        type_.pass.structure_behind(&type_.unit, type_.offset)?
                {
                    pass.add_fingerprint(&unit, offset, depth + 1, budget, hash)?;
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
        let Some(Spot { pass, unit, offset }) = self.follow(unit, value)? else {
            return Ok(TypeFacts::default());
        };
        if depth > DEEPEST {
            return Ok(TypeFacts::default());
        }
        let entry = unit.entry(offset)?;
        let name = pass.string(&unit, entry.attr_value(gimli::DW_AT_name));
        let size = entry.attr_value(gimli::DW_AT_byte_size).and_then(|value| value.udata_value());
        let behind = |budget: &mut usize| -> gimli::Result<TypeFacts> {
            match entry.attr_value(gimli::DW_AT_type) {
                Some(value) => pass.type_facts(&unit, value, depth + 1, budget),
                // `void` has no entry.
                None => Ok(TypeFacts { name: "void".to_owned(), ..TypeFacts::default() }),
            }
        };
        Ok(match entry.tag() {
            gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type | gimli::DW_TAG_class_type => {
                let word = if entry.tag() == gimli::DW_TAG_union_type { "union" } else { "struct" };
                let text = |name: Option<&str>| format!("{word} {}", name.unwrap_or("{...}"));
                match pass.structure_behind(&unit, offset)? {
                    Some(Spot { pass, unit: behind, offset: at }) => {
                        let structure = pass.structure(&behind, at, depth + 1, budget)?;
                        let name = match name {
                            Some(name) => Some(name),
                            None => pass.string(&behind, behind.entry(at)?.attr_value(gimli::DW_AT_name)),
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
                name: format!("{} *", pass.pointee(&unit, &entry, 0)?),
                kind: Kind::Pointer,
            },
            gimli::DW_TAG_array_type => {
                let element = behind(budget)?;
                let count = pass.array_length(&unit, offset)?;
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
        let Some(Spot { pass, unit, offset }) = self.follow(unit, value)? else {
            return Ok("void".to_owned());
        };
        let entry = unit.entry(offset)?;
        let name = pass.string(&unit, entry.attr_value(gimli::DW_AT_name));
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
                format!("{} *", pass.pointee(&unit, &entry, depth + 1)?)
            }
            gimli::DW_TAG_const_type | gimli::DW_TAG_volatile_type if depth < 4 => {
                pass.pointee(&unit, &entry, depth + 1)?
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

    /// Walks a whole unit for the copies of wanted functions, and for the places where they were inlined.
    fn functions(&self, index: usize, origins: &Origins, found: &mut Found) -> gimli::Result<()> {
        if self.bases.is_some() && !self.is_meant(index) {
            return Ok(());
        }
        let unit = Arc::new(self.make_unit(index)?);
        let by_gcc = self.made_by_gcc(&unit);
        let mut entries = unit.entries_raw(None)?;
        // Functions that enclose the entry at hand and have code: depth and entry.
        let mut enclosing: Vec<(isize, UnitOffset)> = Vec::new();
        // Copies and places whose parameters are being read, innermost last.
        let mut open: Vec<Open> = Vec::new();
        let mut places = 0;
        while !entries.is_empty() {
            let depth = entries.next_depth();
            let offset = entries.next_offset();
            let Some(abbreviation) = entries.read_abbreviation()? else {
                continue;
            };
            while open.last().is_some_and(|open| depth <= open.depth) {
                self.finish(open.pop(), found);
            }
            while enclosing.last().is_some_and(|(at, _)| depth <= *at) {
                enclosing.pop();
            }
            let tag = abbreviation.tag();
            let function = matches!(tag, gimli::DW_TAG_subprogram | gimli::DW_TAG_inlined_subroutine);
            let parameter = tag == gimli::DW_TAG_formal_parameter
                && open.last().is_some_and(|open| depth == open.depth + 1);
            if !function && !parameter {
                entries.skip_attributes(abbreviation.attributes())?;
                continue;
            }
            let (mut origin, mut location, mut constant, mut code) = (None, None, None, false);
            for specification in abbreviation.attributes() {
                let attribute = entries.read_attribute_inline(*specification)?;
                match attribute.name() {
                    gimli::DW_AT_abstract_origin | gimli::DW_AT_specification => {
                        origin = Some(attribute.value());
                    }
                    gimli::DW_AT_low_pc | gimli::DW_AT_ranges | gimli::DW_AT_entry_pc => code = true,
                    gimli::DW_AT_location => location = Some(attribute.value()),
                    gimli::DW_AT_const_value => constant = Some(attribute.value()),
                    _ => {}
                }
            }
            if parameter {
                if let Some(open) = open.last_mut() {
                    self.parameter(&unit, origin, location, constant, origins, open);
                }
                continue;
            }
            let own = self.global(&unit, offset).and_then(|at| origins.functions.get(&at));
            let of_origin = || origins.functions.get(&self.referred(&unit, origin?)?);
            let wanted = own.or_else(of_origin).copied();
            let inlined = tag == gimli::DW_TAG_inlined_subroutine;
            if !code {
                // Nothing is left of it; inside code that is a place all the same, which no probe can see.
                if let (true, Some(function), Some(_)) = (inlined, wanted, enclosing.last())
                    && let Some(name) = self.wanted.functions.get(function)
                {
                    found.functions.entry(name.clone()).or_default().vanished += 1;
                }
                continue;
            }
            if !inlined {
                enclosing.push((depth, offset));
            }
            let Some(function) = wanted else { continue };
            let entry = unit.entry(offset)?;
            let Some(address) = self.entry_address(&unit, &entry, inlined) else { continue };
            let mut opened = Open { depth, function, address, arguments: Vec::new(), site: None };
            if inlined {
                let Some((_, caller)) = enclosing.last() else { continue };
                places += 1;
                if places > MOST_INLINED {
                    continue;
                }
                let caller = unit.entry(*caller)?;
                opened.site = Some(OpenSite {
                    frame: self.frame_base(&unit, &caller),
                    site: InlinedSite {
                        entry: address,
                        ranges: self.ranges(&unit, &entry)?,
                        caller: self.name_behind(&unit, &caller),
                        caller_ranges: self.ranges(&unit, &caller)?,
                        complete: by_gcc,
                        marked: entry.has_attr(gimli::DW_AT_entry_pc),
                        arguments: Vec::new(),
                    },
                });
            }
            open.push(opened);
        }
        while let Some(last) = open.pop() {
            self.finish(Some(last), found);
        }
        Ok(())
    }

    /// Whether gcc made a unit, also at link time.
    fn made_by_gcc(&self, unit: &Unit<'a>) -> bool {
        let mut entries = unit.entries();
        let Ok(Some(root)) = entries.next_dfs() else { return false };
        self.string(unit, root.attr_value(gimli::DW_AT_producer)).is_some_and(|name| name.starts_with("GNU "))
    }

    fn finish(&self, open: Option<Open>, found: &mut Found) {
        let Some(Open { function, address, arguments, site, .. }) = open else { return };
        let Some(name) = self.wanted.functions.get(function) else { return };
        let facts = found.functions.entry(name.clone()).or_default();
        match site {
            None => facts.copies.push((address, arguments)),
            Some(OpenSite { site, .. }) => {
                facts.inlined.push(address);
                facts.sites.push(site);
            }
        }
    }

    /// Takes in where a parameter is.
    fn parameter(
        &self,
        unit: &Arc<Unit<'a>>,
        origin: Option<Value<'a>>,
        location: Option<Value<'a>>,
        constant: Option<Value<'a>>,
        origins: &Origins,
        open: &mut Open,
    ) {
        let number = match origin {
            Some(origin) => self.parameter_number(unit, origin, origins),
            None => Some(match &open.site {
                Some(OpenSite { site, .. }) => site.arguments.len(),
                None => open.arguments.len(),
            }),
        };
        let Some(number) = number.filter(|number| *number < MOST_ARGUMENTS) else { return };
        match &mut open.site {
            None => {
                let argument = self.argument(unit, location, open.address);
                fill(&mut open.arguments, number, Argument::Unknown);
                if let Some(slot) = open.arguments.get_mut(number) {
                    *slot = argument;
                }
            }
            Some(OpenSite { site, frame }) => {
                let spans = self.spans(unit, location, constant, *frame);
                fill(&mut site.arguments, number, Vec::new());
                if let Some(slot) = site.arguments.get_mut(number) {
                    *slot = spans;
                }
            }
        }
    }

    /// Which parameter of its function it is, by the entry that it refers to.
    fn parameter_number(&self, unit: &Arc<Unit<'a>>, origin: Value<'a>, origins: &Origins) -> Option<usize> {
        let number = |pass: &Pass<'d, 'a>, unit: &Arc<Unit<'a>>, value: Value<'a>| {
            let mut at = pass.referred(unit, value)?;
            at.alternate |= !std::ptr::eq(pass, self);
            origins.parameters.get(&at).copied()
        };
        if let Some(number) = number(self, unit, origin) {
            return Some(number);
        }
        let mut spot = self.follow(unit, origin).ok().flatten()?;
        for _ in 0..LONGEST_CHAIN {
            let next = spot.unit.entry(spot.offset).ok()?.attr_value(gimli::DW_AT_abstract_origin)?;
            if let Some(number) = number(spot.pass, &spot.unit, next) {
                return Some(number);
            }
            spot = spot.pass.follow(&spot.unit, next).ok().flatten()?;
        }
        None
    }

    /// A function's name, or that of the entry that it stands for.
    fn name_behind(
        &self,
        unit: &Arc<Unit<'a>>,
        entry: &gimli::DebuggingInformationEntry<Slice<'a>>,
    ) -> String {
        let origin = |entry: &gimli::DebuggingInformationEntry<Slice<'a>>| {
            entry
                .attr_value(gimli::DW_AT_abstract_origin)
                .or_else(|| entry.attr_value(gimli::DW_AT_specification))
        };
        if let Some(name) = self.string(unit, entry.attr_value(gimli::DW_AT_name)) {
            return name;
        }
        let mut to = origin(entry).and_then(|value| self.follow(unit, value).ok().flatten());
        for _ in 0..LONGEST_CHAIN {
            let Some(Spot { pass, unit, offset }) = to else { break };
            let Ok(entry) = unit.entry(offset) else { break };
            if let Some(name) = pass.string(&unit, entry.attr_value(gimli::DW_AT_name)) {
                return name;
            }
            to = origin(&entry).and_then(|value| pass.follow(&unit, value).ok().flatten());
        }
        "a function without a name".to_owned()
    }

    /// Where the code of an entry begins.
    fn entry_address(
        &self,
        unit: &Unit<'a>,
        entry: &gimli::DebuggingInformationEntry<Slice<'a>>,
        inlined: bool,
    ) -> Option<u64> {
        let address = |value: Value<'a>| self.dwarf.attr_address(unit, value).ok().flatten();
        let low = || {
            entry.attr_value(gimli::DW_AT_low_pc).and_then(address).or_else(|| {
                let mut ranges = self.dwarf.die_ranges(unit, entry).ok()?;
                ranges.next().ok().flatten().map(|range| range.begin)
            })
        };
        let named = entry.attr_value(gimli::DW_AT_entry_pc).and_then(|value| match value {
            // DWARF 5, section 2.18: a constant counts from the entry's base address.
            AttributeValue::Udata(_)
            | AttributeValue::Data1(_)
            | AttributeValue::Data2(_)
            | AttributeValue::Data4(_)
            | AttributeValue::Data8(_) => Some(low()?.wrapping_add(value.udata_value()?)),
            value => address(value),
        });
        // A function begins at its lowest address, whatever else is said of it.
        if inlined { named.or_else(low) } else { low().or(named) }
    }

    /// All code of an entry.
    fn ranges(
        &self,
        unit: &Unit<'a>,
        entry: &gimli::DebuggingInformationEntry<Slice<'a>>,
    ) -> gimli::Result<Vec<(u64, u64)>> {
        let mut ranges = self.dwarf.die_ranges(unit, entry)?;
        let mut all = Vec::new();
        while let Some(range) = ranges.next()? {
            if all.len() < MOST_RANGES && range.begin < range.end {
                all.push((range.begin, range.end));
            }
        }
        Ok(all)
    }

    /// What a function's frame offsets count from.
    fn frame_base(
        &self,
        unit: &Unit<'a>,
        function: &gimli::DebuggingInformationEntry<Slice<'a>>,
    ) -> Option<Place> {
        let AttributeValue::Exprloc(expression) = function.attr_value(gimli::DW_AT_frame_base)? else {
            return None;
        };
        // The expression's value is the base, whether it is a register's or an address.
        let place = in_place(expression, unit, None)?;
        Some(Place { memory: false, ..place })
    }

    /// All places of a parameter of an inlined function.
    fn spans(
        &self,
        unit: &Unit<'a>,
        location: Option<Value<'a>>,
        constant: Option<Value<'a>>,
        frame: Option<Place>,
    ) -> Vec<Span> {
        let always = |place: Place| vec![Span { begin: 0, end: u64::MAX, place }];
        if let Some(value) = constant {
            let value = value.sdata_value().or_else(|| value.udata_value().map(|value| value as i64));
            return value.map_or_else(Vec::new, |offset| {
                always(Place { base: Base::Nothing, offset, memory: false })
            });
        }
        let Some(value) = location else {
            return Vec::new();
        };
        if let AttributeValue::Exprloc(expression) = value {
            // One place for all of its life is memory that the caller's code may not have written yet at the
            // beginning; of a register it can not be so.
            return in_place(expression, unit, frame)
                .filter(|place| !place.memory)
                .map_or_else(Vec::new, always);
        }
        let Ok(Some(mut list)) = self.dwarf.attr_locations(unit, value) else {
            return Vec::new();
        };
        let mut spans = Vec::new();
        while let Ok(Some(entry)) = list.next() {
            if spans.len() >= MOST_SPANS {
                break;
            }
            if let Some(place) = in_place(entry.data, unit, frame)
                && entry.range.begin < entry.range.end
            {
                spans.push(Span { begin: entry.range.begin, end: entry.range.end, place });
            }
        }
        spans
    }

    /// Where an argument is at a function's entry.
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

/// A copy of a function, or a place where it was inlined, whose parameters are being read.
struct Open {
    depth: isize,
    function: usize,
    address: u64,
    arguments: Vec<Argument>,
    site: Option<OpenSite>,
}

struct OpenSite {
    site: InlinedSite,
    /// What the caller's frame offsets count from.
    frame: Option<Place>,
}

/// Makes a list long enough to have an element of this number.
fn fill<T: Clone>(list: &mut Vec<T>, number: usize, with: T) {
    if list.len() <= number {
        list.resize(number + 1, with);
    }
}

/// Takes in what another thread found.
trait Absorb {
    fn take_in(&mut self, other: Self);
}

impl Absorb for Found {
    fn take_in(&mut self, other: Found) {
        self.absorb(other);
    }
}

impl Absorb for (Found, Origins) {
    fn take_in(&mut self, other: (Found, Origins)) {
        self.0.absorb(other.0);
        self.1.absorb(other.1);
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

/// The place that an expression describes, where that is a register, a constant, memory at either, or a sum of
/// such. `frame` is what frame offsets count from.
fn in_place(
    expression: gimli::Expression<Slice<'_>>,
    unit: &Unit<'_>,
    frame: Option<Place>,
) -> Option<Place> {
    let mut operations = expression.operations(unit.encoding());
    let mut place: Option<Place> = None;
    let mut value = false;
    while let Some(operation) = operations.next().ok()? {
        if value {
            return None;
        }
        place = Some(match (operation, place) {
            (gimli::Operation::Register { register }, None) => {
                value = true;
                Place::register(Reg::from_dwarf(register.0)?)
            }
            (gimli::Operation::RegisterOffset { register, offset, base_type }, None) if base_type.0 == 0 => {
                Place { base: Base::Register(Reg::from_dwarf(register.0)?), offset, memory: false }
            }
            (gimli::Operation::FrameOffset { offset }, None) => {
                let frame = frame.filter(|frame| !frame.memory)?;
                Place { offset: frame.offset.checked_add(offset)?, ..frame }
            }
            (gimli::Operation::CallFrameCFA, None) => Place { base: Base::Frame, offset: 0, memory: false },
            (gimli::Operation::UnsignedConstant { value }, None) => {
                Place { base: Base::Nothing, offset: value as i64, memory: false }
            }
            (gimli::Operation::SignedConstant { value }, None) => {
                Place { base: Base::Nothing, offset: value, memory: false }
            }
            (gimli::Operation::PlusConstant { value }, Some(place)) if !place.memory => {
                Place { offset: place.offset.checked_add(i64::try_from(value).ok()?)?, ..place }
            }
            (gimli::Operation::Deref { size: 8, space: false, .. }, Some(place)) if !place.memory => {
                Place { memory: true, ..place }
            }
            (gimli::Operation::StackValue, Some(place)) => {
                value = true;
                place
            }
            (gimli::Operation::Nop, Some(place)) => place,
            _ => return None,
        });
    }
    let place = place?;
    match (value, place.memory) {
        (true, _) => Some(place),
        // An address: the value is in memory there.
        (false, false) => Some(Place { memory: true, ..place }),
        (false, true) => None,
    }
}

fn in_register(expression: gimli::Expression<Slice<'_>>, unit: &Unit<'_>) -> Argument {
    let mut operations = expression.operations(unit.encoding());
    let first = operations.next().ok().flatten();
    let second = operations.next();
    match (first, second) {
        (Some(gimli::Operation::Register { register }), Ok(None)) => {
            Reg::from_dwarf(register.0).map_or(Argument::Elsewhere, Argument::Register)
        }
        // What a register held at the entry; here is the entry.
        (Some(gimli::Operation::EntryValue { expression }), Ok(Some(gimli::Operation::StackValue)))
            if matches!(operations.next(), Ok(None)) =>
        {
            match in_place(gimli::Expression(expression), unit, None) {
                Some(Place { base: Base::Register(register), offset: 0, memory: false }) => {
                    Argument::Register(register)
                }
                _ => Argument::Elsewhere,
            }
        }
        (None, _) => Argument::Unknown,
        // Spilled to the frame at -O0: the prologue does that, so at the entry it is in its register.
        (Some(gimli::Operation::FrameOffset { .. }), _) => Argument::Unknown,
        (Some(_), _) => Argument::Elsewhere,
    }
}
