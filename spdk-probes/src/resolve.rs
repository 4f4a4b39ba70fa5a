//! From a program's files to what a probe needs: where functions are and where in them a uprobe is
//! cheapest, where members lie in their structures, and what the USDT probes carry.
//!
//! Nothing here touches a process's memory or attaches anything, and nothing is guessed: what a file
//! does not say is an error that names the way out.

mod coverage;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::dwarf::{self, Argument, Beside, Found, Kind, Structure, Wanted};
use crate::elf::{Elf, Symbol};
use crate::functions;
use crate::inlined::Place;
use crate::layout::Layout;
use crate::place::{self, CallSite, Class, Code, Destination, Emulation, Reg};
use crate::usdt::{self, UsdtSite};

pub(crate) use coverage::{Coverage, READABLE};

/// A function, with every copy that the compiler made of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// Its name in the source.
    pub name: String,
    /// Its copies that can be called, in order of file and address; never empty.
    pub copies: Vec<FunctionCopy>,
}

/// One copy of a function's code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCopy {
    /// The file that holds it.
    pub binary: PathBuf,
    /// The symbol, with the compiler's suffix: `nvmf_tcp_req_process.isra.0`.
    pub symbol: String,
    /// Address, as the file's symbols count.
    pub vaddr: u64,
    /// In bytes.
    pub size: u64,
    /// The source file, where the symbol is local and the symbol table names it.
    pub source: Option<String>,
    /// Parts that seldom run and lie elsewhere: address and size.
    pub cold: Vec<(u64, u64)>,
}

impl FunctionCopy {
    /// Whether the compiler may have changed this copy's arguments.
    fn is_clone(&self) -> bool {
        self.symbol.split('.').any(|part| matches!(part, "isra" | "constprop" | "part" | "specialized"))
    }

    /// Whether the beginning of the function is elsewhere.
    fn is_part(&self) -> bool {
        self.symbol.split('.').skip(1).any(|part| part == "part")
    }
}

/// A place for a uprobe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Site {
    /// The file, as a uprobe wants it.
    pub binary: PathBuf,
    /// The symbol, with the compiler's suffix.
    pub symbol: String,
    /// Address, as the file's symbols count.
    pub vaddr: u64,
    /// Offset in the file, as a uprobe wants it.
    pub file_offset: u64,
    /// How far behind the symbol's address the site is, in bytes.
    pub offset_in_function: u64,
    /// The instruction: `push r15`; of a branch the mnemonic and, of a call, the callee.
    pub instruction: String,
    /// What the kernel does at this instruction.
    pub class: Class,
    /// What a hit costs, in nanoseconds; see [`Class::estimated_ns`].
    pub estimated_ns: u32,
    /// Why here.
    pub why: String,
    /// The function that was inlined here, where it is another one than that of the symbol.
    pub inlined: Option<String>,
    /// Where the arguments that were asked for are when the probe is hit, in the order of asking.
    pub arguments: Vec<Place>,
}

/// Where a member is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// From the start of the outermost structure, in bytes.
    pub offset: u64,
    /// In bytes. Of a bit-field, the bytes that it touches.
    pub size: u32,
    /// Of a bit-field: its lowest bit in the (little-endian) value at `offset`, and its width.
    pub bit: Option<(u8, u8)>,
    /// Its type, as C writes it.
    pub type_name: String,
}

/// What a program says that it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// SPDK, or this project's stand-in for it.
    pub product: Product,
    /// The whole text.
    pub text: String,
    /// Year and month of an SPDK release: (26, 5).
    pub number: Option<(u32, u32)>,
}

/// What tells of a file's functions and structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Knowledge {
    /// Nothing but its USDT probes and constants.
    Nothing,
    /// Its symbol table.
    Symbols,
    /// A layout file.
    Layout,
    /// Debug information.
    Dwarf,
}

/// Which program a file belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Product {
    /// SPDK.
    Spdk,
    /// The stand-in that demonstrations and tests run.
    StandIn,
}

/// A program or shared library, with its debug file where that is separate.
#[derive(Debug)]
pub struct Binary {
    elf: Elf,
    /// Symbols, DWARF or both.
    debug: Option<Elf>,
    /// What dwz moved out of the debug information.
    alternate: Option<Elf>,
    /// That file's name, where it is needed and not there.
    alternate_missing: Option<PathBuf>,
    /// Its path as the process that runs it sees it, and that process's root directory.
    known_as: PathBuf,
    root: Option<PathBuf>,
    layout: Option<Layout>,
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    /// Names that were looked for.
    structures: HashSet<String>,
    enumerations: HashSet<String>,
    functions: HashSet<String>,
    found: Found,
    /// Names like those that were looked for and not found.
    similar: HashMap<String, Vec<String>>,
}

impl Binary {
    /// Opens a file, and its separate debug file where it needs one and one is installed.
    ///
    /// `root` is the root directory of the process that runs it (`/proc/PID/root`), for processes in
    /// containers; `path` is then taken to be inside.
    pub fn open(path: &Path, root: Option<&Path>) -> Result<Binary, Error> {
        let elf = Elf::open(&inside(root, path))?;
        Ok(Self::with_elf(elf, path, root))
    }

    /// Takes the bytes of a file that was read already; `path` is what messages call it, and where its
    /// debug file is looked for.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Binary, Error> {
        let elf = Elf::from_bytes(path, bytes)?;
        Ok(Self::with_elf(elf, path, None))
    }

    fn with_elf(elf: Elf, path: &Path, root: Option<&Path>) -> Binary {
        let debug =
            if elf.has_symbols() && elf.has_dwarf() { None } else { find_debug_file(&elf, path, root) };
        let mut binary = Binary {
            elf,
            debug,
            alternate: None,
            alternate_missing: None,
            known_as: path.to_owned(),
            root: root.map(Path::to_owned),
            layout: None,
            cache: Mutex::default(),
        };
        binary.find_alternate();
        binary
    }

    /// Opens the file that dwz moved shared debug information to, where the debug information names one.
    fn find_alternate(&mut self) {
        (self.alternate, self.alternate_missing) = (None, None);
        let dwarf = self.debug.as_ref().unwrap_or(&self.elf);
        let Some((name, id)) = dwarf.alternate_link() else { return };
        let root = self.root.as_deref();
        let by_name = |folder: Option<&Path>| Some(folder?.join(&name));
        let mut candidates: Vec<PathBuf> = Vec::new();
        candidates.extend(by_name(dwarf.path().parent()));
        candidates.extend(by_name(self.known_as.parent()).map(|path| inside(root, &path)));
        candidates.extend(build_id_path(&id).map(|path| inside(root, &path)));
        candidates.extend(build_id_path(&id));
        self.alternate = candidates.iter().find_map(|path| {
            let found = Elf::open_debug(path).ok()?;
            // Of another build it would tell nonsense.
            (found.build_id() == Some(id.as_slice())).then_some(found)
        });
        if self.alternate.is_none() {
            self.alternate_missing = Some(name);
        }
    }

    /// Uses this debug file, whatever is installed. It must be of the same build.
    pub fn set_debug_file(&mut self, path: &Path) -> Result<(), Error> {
        let debug = Elf::open_debug(path)?;
        if let (Some(ours), Some(theirs)) = (self.elf.build_id(), debug.build_id())
            && ours != theirs
        {
            return Err(Error::OtherBuild {
                debug_file: path.to_owned(),
                path: self.path().to_owned(),
                theirs: hex(theirs),
                ours: hex(ours),
            });
        }
        self.debug = Some(debug);
        self.cache = Mutex::default();
        self.find_alternate();
        Ok(())
    }

    /// Takes functions, members and enumerators from a layout file where the file itself does not say.
    /// It must be of the same build.
    pub fn set_layout(&mut self, layout: Layout) -> Result<(), Error> {
        let layout = layout.for_build(self.elf.build_id());
        layout.check(self.path(), self.elf.build_id())?;
        self.layout = Some(layout);
        Ok(())
    }

    /// The file, as a uprobe wants it.
    pub fn path(&self) -> &Path {
        self.elf.path()
    }

    /// The separate debug file in use, if any.
    pub fn debug_file(&self) -> Option<&Path> {
        self.debug.as_ref().map(Elf::path)
    }

    /// The build-id that the linker gave this very build, if it did.
    pub fn build_id(&self) -> Option<&[u8]> {
        self.elf.build_id()
    }

    /// The build-id in hexadecimal, as `file` and `readelf` print it.
    pub fn build_id_text(&self) -> Option<String> {
        self.build_id().map(hex)
    }

    /// What the program says that it is; none where it is neither SPDK nor the stand-in.
    pub fn version(&self) -> Option<Version> {
        if let Some((vaddr, size)) = self.elf.object_symbol("fabscope_standin_version") {
            let bytes = self.elf.bytes_at(vaddr).unwrap_or_default();
            let len = usize::try_from(size).map_or(bytes.len(), |size| size.min(bytes.len()));
            let bytes = bytes.get(..len.min(256)).unwrap_or_default();
            let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
            return Some(Version {
                product: Product::StandIn,
                text: String::from_utf8_lossy(text).into_owned(),
                number: None,
            });
        }
        // Old linkers put constants into the same segment as code.
        self.elf.data_parts().find_map(spdk_version).or_else(|| spdk_version(self.elf.bytes()))
    }

    /// Whether the file holds any of what is probed in SPDK. A stripped library tells only by its name, a
    /// stripped program by the version in it.
    pub fn holds_spdk(&self) -> bool {
        let by_name = || {
            let name = self.path().file_name().unwrap_or_default();
            name.to_string_lossy().starts_with("libspdk")
        };
        functions::telling_functions().any(|name| !self.symbols(name).is_empty())
            || !self.usdt_probes("spdk").is_empty()
            || (!self.has_symbols() && by_name())
            || (self.elf.is_program() && self.version().is_some())
    }

    /// Symbols of a function, from the file and from its debug file.
    fn symbols(&self, name: &str) -> Vec<Symbol> {
        let mut symbols = self.elf.functions(name);
        if let Some(debug) = &self.debug {
            symbols.extend(debug.functions(name));
            symbols.sort_by_key(|symbol| symbol.vaddr);
            symbols.dedup_by_key(|symbol| symbol.vaddr);
        }
        symbols
    }

    /// Every copy of a function that has code of its own, whatever suffix the compiler gave it.
    pub fn resolve_function(&self, name: &str) -> Result<Function, Error> {
        let (cold, copies): (Vec<Symbol>, Vec<Symbol>) =
            self.symbols(name).into_iter().partition(|symbol| symbol.cold);
        if !copies.is_empty() {
            let copies = copies
                .into_iter()
                .map(|symbol| FunctionCopy {
                    binary: self.path().to_owned(),
                    cold: cold_parts(&symbol.name, &cold),
                    symbol: symbol.name,
                    vaddr: symbol.vaddr,
                    size: symbol.size,
                    source: symbol.source,
                })
                .collect();
            return Ok(Function { name: name.to_owned(), copies });
        }
        if let Some(function) = self.layout.as_ref().and_then(|layout| layout.function(name)) {
            let mut function = function.clone();
            for copy in &mut function.copies {
                self.path().clone_into(&mut copy.binary);
            }
            return Ok(function);
        }
        let only_inlined =
            |places| Err(Error::OnlyInlined { path: self.path().to_owned(), name: name.to_owned(), places });
        let of_layout = self.layout.as_ref().and_then(|layout| layout.places(name));
        if let Some((places @ 1.., ..)) = of_layout {
            return only_inlined(places);
        }
        if !self.has_symbols() {
            return Err(Error::Stripped {
                path: self.path().to_owned(),
                wanted: name.to_owned(),
                debug_file: self.debug_file_hint(),
            });
        }
        let places = self.inlined_copies(name).map_or(0, |places| places.len());
        if places > 0 {
            return only_inlined(places);
        }
        Err(Error::NoFunction {
            path: self.path().to_owned(),
            name: name.to_owned(),
            similar: self.similar_functions(name),
        })
    }

    fn has_symbols(&self) -> bool {
        self.elf.has_symbols() || self.debug.as_ref().is_some_and(Elf::has_symbols)
    }

    fn similar_functions(&self, name: &str) -> Vec<String> {
        // Several rungs miss the same function, and this goes through all names.
        let known = self.cache.lock().unwrap_or_else(PoisonError::into_inner).similar.get(name).cloned();
        if let Some(similar) = known {
            return similar;
        }
        let similar = self.look_for_similar(name);
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.similar.insert(name.to_owned(), similar.clone());
        similar
    }

    fn look_for_similar(&self, name: &str) -> Vec<String> {
        // The last words of a name are what its renamed successor most likely keeps.
        let words: Vec<&str> = name.trim_start_matches('_').split('_').collect();
        let parts: Vec<String> = (0..words.len().saturating_sub(1))
            .map(|skip| words.get(skip..).unwrap_or_default().join("_"))
            .filter(|part| part.len() > 5)
            .collect();
        std::iter::once(&self.elf)
            .chain(&self.debug)
            .map(|table| table.functions_like(&parts, 3))
            .find(|similar| !similar.is_empty())
            .unwrap_or_default()
    }

    /// For each copy of a function, the cheapest instruction that every call passes once while the
    /// `live` argument registers still hold the arguments. The running kernel decides what is cheap.
    pub fn place(&self, function: &Function, live: &[Reg]) -> Result<Vec<Site>, Error> {
        self.place_for(function, live, Emulation::of_this_kernel())
    }

    /// Like [`Binary::place`], for another kernel.
    pub fn place_for(
        &self,
        function: &Function,
        live: &[Reg],
        emulation: Emulation,
    ) -> Result<Vec<Site>, Error> {
        let stops = self.inlined_entries();
        self.own_copies(function)
            .map(|copy| {
                let arguments = self.arguments_at_entry(&function.name, copy, live)?;
                let held: Vec<Reg> = arguments.iter().filter_map(|place| place.depends_on()).collect();
                let code = self.code(&copy.symbol, copy.vaddr, copy.size)?;
                let cold: Vec<Code<'_>> =
                    copy.cold.iter().filter_map(|(vaddr, size)| self.elf.code(*vaddr, *size)).collect();
                let spot = place::best_spot(code, &cold, &held, &stops, emulation)
                    .ok_or_else(|| self.no_code(&copy.symbol, copy.vaddr))?;
                let site = self.site(copy, spot.vaddr, spot.instruction, spot.class, spot.why)?;
                Ok(Site { arguments, ..site })
            })
            .collect()
    }

    fn own_copies<'a>(&'a self, function: &'a Function) -> impl Iterator<Item = &'a FunctionCopy> {
        function.copies.iter().filter(|copy| copy.binary == self.path())
    }

    fn code(&self, symbol: &str, vaddr: u64, size: u64) -> Result<Code<'_>, Error> {
        self.elf.code(vaddr, size).ok_or_else(|| self.no_code(symbol, vaddr))
    }

    fn no_code(&self, symbol: &str, vaddr: u64) -> Error {
        Error::NoCode { path: self.path().to_owned(), symbol: symbol.to_owned(), vaddr }
    }

    fn site(
        &self,
        copy: &FunctionCopy,
        vaddr: u64,
        instruction: String,
        class: Class,
        why: String,
    ) -> Result<Site, Error> {
        Ok(Site {
            binary: self.path().to_owned(),
            symbol: copy.symbol.clone(),
            vaddr,
            file_offset: self.elf.file_offset(vaddr).ok_or_else(|| self.no_code(&copy.symbol, vaddr))?,
            offset_in_function: vaddr.wrapping_sub(copy.vaddr),
            instruction,
            class,
            estimated_ns: class.estimated_ns(),
            why,
            inlined: None,
            arguments: Vec::new(),
        })
    }

    /// Where the arguments of a copy are at its entry; none where nothing tells.
    pub(crate) fn arguments(&self, name: &str, copy: &FunctionCopy) -> Option<Vec<Argument>> {
        let of_layout = self.layout.as_ref().and_then(|layout| layout.arguments(name, copy.vaddr));
        if let Some(arguments) = of_layout {
            return Some(arguments.to_vec());
        }
        let wanted = Wanted { functions: vec![name.to_owned()], ..Wanted::default() };
        let found = self.with_found(wanted, |found| {
            let copies = &found.functions.get(name)?.copies;
            copies.iter().find(|(entry, _)| *entry == copy.vaddr).map(|(_, arguments)| arguments.clone())
        });
        found.ok().flatten()
    }

    /// The first instructions of a copy, and what a probe on each costs.
    pub(crate) fn opening(&self, copy: &FunctionCopy, most: usize) -> Vec<(String, Class)> {
        let code = self.elf.code(copy.vaddr, copy.size);
        code.map_or_else(Vec::new, |code| place::opening(code, most, Emulation::of_this_kernel()))
    }

    /// All named members of a structure, those of anonymous structures in it too, with its size; none where
    /// there is no such structure, or several.
    pub(crate) fn structure(&self, name: &str) -> Option<(u64, Vec<(String, Member)>)> {
        let Ok([structure]) = <[_; 1]>::try_from(self.structures(name).ok()?) else {
            return None;
        };
        let mut names = Vec::new();
        collect_names(&structure, 0, &mut names);
        let members = names.into_iter().filter_map(|member| {
            let found = self.walk(&structure, name, member, member).ok()?;
            Some((member.to_owned(), found))
        });
        Some((structure.size, members.collect()))
    }

    /// What tells of the file's structures.
    pub(crate) fn knowledge(&self) -> Knowledge {
        match (self.dwarf_file(), &self.layout) {
            (Some(_), _) => Knowledge::Dwarf,
            (None, Some(_)) => Knowledge::Layout,
            (None, None) if self.has_symbols() => Knowledge::Symbols,
            (None, None) => Knowledge::Nothing,
        }
    }

    /// The layout file in use, if any.
    pub(crate) fn layout_file(&self) -> Option<&Layout> {
        self.layout.as_ref()
    }

    /// The file's constants.
    pub(crate) fn constants(&self) -> impl Iterator<Item = &[u8]> {
        self.elf.data_parts()
    }

    /// The instructions in a function that call `callee`: directly, through the procedure linkage table
    /// or through the global offset table; calls that end the function (`jmp`) are among them.
    pub fn call_sites(&self, function: &Function, callee: &str) -> Result<Vec<Site>, Error> {
        self.call_sites_for(function, callee, Emulation::of_this_kernel())
    }

    /// Like [`Binary::call_sites`], for another kernel.
    pub fn call_sites_for(
        &self,
        function: &Function,
        callee: &str,
        emulation: Emulation,
    ) -> Result<Vec<Site>, Error> {
        self.calls_in(function, &[], callee, &[], emulation)
    }

    /// The calls of `callee` in all copies of a function, and in these pieces of others' code. At a call, the
    /// arguments are where the calling convention has them.
    fn calls_in(
        &self,
        function: &Function,
        pieces: &[(String, (u64, u64))],
        callee: &str,
        live: &[Reg],
        emulation: Emulation,
    ) -> Result<Vec<Site>, Error> {
        let slots = self.elf.import_slots(callee);
        let in_layout = self.layout.as_ref().and_then(|layout| layout.function(callee));
        let targets: Vec<u64> = self
            .symbols(callee)
            .into_iter()
            .map(|symbol| symbol.vaddr)
            .chain(in_layout.iter().flat_map(|function| &function.copies).map(|copy| copy.vaddr))
            .collect();
        let leads_there = |call: &CallSite| match call.to {
            Destination::Code(target) => targets.contains(&target) || self.elf.is_stub(target, &slots),
            Destination::Slot(slot) => slots.contains(&slot),
        };
        let elsewhere = pieces.iter().map(|(symbol, (begin, end))| FunctionCopy {
            binary: self.path().to_owned(),
            symbol: symbol.clone(),
            vaddr: *begin,
            size: end.saturating_sub(*begin),
            source: None,
            cold: Vec::new(),
        });
        let mut sites: Vec<Site> = Vec::new();
        for copy in self.own_copies(function).cloned().chain(elsewhere) {
            let whole = self.code(&copy.symbol, copy.vaddr, copy.size)?;
            let cold = copy.cold.iter().filter_map(|(vaddr, size)| self.elf.code(*vaddr, *size));
            for code in std::iter::once(whole).chain(cold) {
                for call in place::calls(code, emulation) {
                    if leads_there(&call) && !sites.iter().any(|site| site.vaddr == call.vaddr) {
                        let why = format!("calls {callee}");
                        let word = call.instruction.split(' ').next().unwrap_or_default();
                        let instruction = format!("{word} {callee}");
                        let site = self.site(&copy, call.vaddr, instruction, call.class, why)?;
                        let arguments = live.iter().map(|register| Place::register(*register)).collect();
                        sites.push(Site { arguments, ..site });
                    }
                }
            }
        }
        if sites.is_empty() {
            return Err(Error::NoCallSite {
                path: self.path().to_owned(),
                function: function.name.clone(),
                callee: callee.to_owned(),
            });
        }
        Ok(sites)
    }

    /// First address of each place where the compiler put a function's body into a caller's. A probe on
    /// the function does not see the calls made there.
    pub fn inlined_copies(&self, name: &str) -> Result<Vec<u64>, Error> {
        if let Some(places) = self.layout.as_ref().and_then(|layout| layout.inlined(name)) {
            return Ok(places.to_vec());
        }
        self.with_found(Wanted { functions: vec![name.to_owned()], ..Wanted::default() }, |found| {
            let inlined = found.functions.get(name).map_or(&[][..], |facts| &facts.inlined);
            // What the linker dropped is left at address 0 or thereabouts.
            inlined.iter().copied().filter(|at| self.elf.code(*at, 1).is_some()).collect()
        })
    }

    /// Where a member is: `spdk_nvmf_tcp_qpair.qpair.ctrlr`, the structure's name first. Members of
    /// anonymous structures and unions are found under their own names.
    pub fn offset(&self, path: &str) -> Result<Member, Error> {
        if let Some(member) = self.layout.as_ref().and_then(|layout| layout.member(path)) {
            return Ok(member.clone());
        }
        let (structure, members) = path.split_once('.').ok_or_else(|| Error::NoMember {
            path: self.path().to_owned(),
            structure: path.to_owned(),
            member: String::new(),
            asked: path.to_owned(),
            similar: Vec::new(),
        })?;
        let layouts = self.structures(structure)?;
        let mut found: Vec<Member> = Vec::new();
        let mut failed = None;
        for layout in &layouts {
            match self.walk(layout, structure, members, path) {
                Ok(member) if found.contains(&member) => {}
                Ok(member) => found.push(member),
                Err(error) => failed = Some(error),
            }
        }
        match (found.len(), failed) {
            (1, None) => found.pop().ok_or_else(|| self.no_structure(structure, "")),
            (0, Some(error)) => Err(error),
            (_, failed) => {
                let mut says: Vec<String> =
                    found.iter().map(|member| format!("one has it at byte {}", member.offset)).collect();
                if failed.is_some() {
                    says.push("one does not have it".to_owned());
                }
                Err(Error::Ambiguous {
                    path: self.path().to_owned(),
                    asked: path.to_owned(),
                    candidates: format!(
                        "the debug information has {} different structures `{structure}`: {}",
                        layouts.len(),
                        says.join(", ")
                    ),
                })
            }
        }
    }

    fn walk(
        &self,
        structure: &std::sync::Arc<Structure>,
        name: &str,
        members: &str,
        asked: &str,
    ) -> Result<Member, Error> {
        let mut structure = std::sync::Arc::clone(structure);
        let mut name = name.to_owned();
        let mut offset = 0_u64;
        let mut words = members.split('.').peekable();
        while let Some(word) = words.next() {
            let Some((within, member)) = find_member(&structure, word, 0) else {
                return Err(Error::NoMember {
                    path: self.path().to_owned(),
                    structure: name,
                    member: word.to_owned(),
                    asked: asked.to_owned(),
                    similar: similar_members(&structure, word),
                });
            };
            offset = offset.saturating_add(within);
            if words.peek().is_none() {
                return Ok(Member {
                    offset,
                    size: u32::try_from(member.size).unwrap_or(u32::MAX),
                    bit: member.bits,
                    type_name: member.type_name.clone(),
                });
            }
            match &member.kind {
                Kind::Structure(inner) => {
                    name = member.type_name.clone();
                    let inner = std::sync::Arc::clone(inner);
                    structure = inner;
                }
                kind => {
                    let what = match kind {
                        Kind::Pointer => format!("a pointer (`{}`)", member.type_name),
                        Kind::Array => format!("an array (`{}`)", member.type_name),
                        _ => format!("no structure (`{}`)", member.type_name),
                    };
                    return Err(Error::NotInside {
                        path: self.path().to_owned(),
                        asked: asked.to_owned(),
                        member: word.to_owned(),
                        what,
                    });
                }
            }
        }
        Err(self.no_structure(asked, ""))
    }

    /// Size of a structure or union, in bytes.
    pub fn size_of(&self, structure: &str) -> Result<u64, Error> {
        let layouts = self.structures(structure)?;
        let mut sizes: Vec<u64> = layouts.iter().map(|layout| layout.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        match sizes.as_slice() {
            [size] => Ok(*size),
            sizes => Err(Error::Ambiguous {
                path: self.path().to_owned(),
                asked: structure.to_owned(),
                candidates: format!("structures of this name have the sizes {sizes:?}"),
            }),
        }
    }

    /// The value of an enumerator.
    pub fn enumerator(&self, enumeration: &str, enumerator: &str) -> Result<i64, Error> {
        if let Some(value) =
            self.layout.as_ref().and_then(|layout| layout.enumerator(enumeration, enumerator))
        {
            return Ok(value);
        }
        self.need_dwarf(&format!("enum {enumeration}"))?;
        let all = self.with_found(
            Wanted { enumerations: vec![enumeration.to_owned()], ..Wanted::default() },
            |found| found.enumerations.get(enumeration).cloned(),
        )?;
        let Some(all) = all.filter(|all| !all.is_empty()) else {
            return Err(self.no_type("enumeration", enumeration));
        };
        let mut values: Vec<Option<i64>> = all
            .iter()
            .map(|values| values.iter().find(|(name, _)| name == enumerator).map(|(_, value)| *value))
            .collect();
        values.sort_unstable();
        values.dedup();
        match values.as_slice() {
            [Some(value)] => Ok(*value),
            [None] => {
                let names = all.iter().flat_map(|values| values.iter()).map(|(name, _)| name.as_str());
                let similar = similar_names(names, enumerator);
                Err(Error::NoEnumerator {
                    path: self.path().to_owned(),
                    enumeration: enumeration.to_owned(),
                    enumerator: enumerator.to_owned(),
                    similar,
                })
            }
            _ => Err(Error::Ambiguous {
                path: self.path().to_owned(),
                asked: format!("{enumeration}::{enumerator}"),
                candidates: format!(
                    "the debug information has {} different enumerations of this name",
                    all.len()
                ),
            }),
        }
    }

    /// The places of a USDT probe, by provider and name. Empty where the build has none.
    pub fn usdt(&self, provider: &str, name: &str) -> Vec<UsdtSite> {
        usdt::sites(&self.elf, provider, Some(name))
    }

    /// All USDT probes of a provider.
    pub fn usdt_probes(&self, provider: &str) -> Vec<UsdtSite> {
        usdt::sites(&self.elf, provider, None)
    }

    /// What a layout file for this build says: every function, member and enumerator that the table
    /// of hooks wants, as far as they are there.
    pub fn layout(&self) -> Result<Layout, Error> {
        Layout::of(self)
    }

    fn structures(&self, name: &str) -> Result<Vec<std::sync::Arc<Structure>>, Error> {
        self.need_dwarf(name)?;
        let layouts = self
            .with_found(Wanted { structures: vec![name.to_owned()], ..Wanted::default() }, |found| {
                found.structures.get(name).cloned()
            })?;
        match layouts {
            Some(layouts) if !layouts.is_empty() => Ok(layouts),
            _ => Err(self.no_type("structure", name)),
        }
    }

    fn no_type(&self, kind: &'static str, name: &str) -> Error {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let found = &cache.found;
        if let Some((first, count)) = &found.missing_split {
            return Error::NoDebugInformation {
                path: self.path().to_owned(),
                wanted: name.to_owned(),
                reason: format!(
                    "its debug information is split off into files of which {count} are missing, {} for one \
                     (a package {}.dwp beside it would do)",
                    first.display(),
                    self.path().display()
                ),
                debug_file: self.debug_file_hint(),
            };
        }
        if let Some((first, count)) = &found.other_split {
            return Error::NoDebugInformation {
                path: self.path().to_owned(),
                wanted: name.to_owned(),
                reason: format!(
                    "its debug information is split off into files of which {count} belong to another build, {} \
                     for one",
                    first.display()
                ),
                debug_file: self.debug_file_hint(),
            };
        }
        if let Some(missing) = &self.alternate_missing {
            return Error::NoDebugInformation {
                path: self.path().to_owned(),
                wanted: name.to_owned(),
                reason: format!(
                    "part of its debug information is in {} (made by dwz), which is missing or of another build",
                    missing.display()
                ),
                debug_file: self.debug_file_hint(),
            };
        }
        if let Some((why, count)) = &found.damaged {
            return Error::Malformed {
                path: self.dwarf_file().map_or(self.path(), Elf::path).to_owned(),
                what: format!(
                    "`{name}` was not found, and {count} of {} units of the debug information cannot be read ({why})",
                    found.units
                ),
            };
        }
        let note = if found.declared.contains(name) {
            ": it is only declared there, its definition was compiled without -g"
        } else {
            ""
        };
        Error::NoType { path: self.path().to_owned(), kind, name: name.to_owned(), note: note.to_owned() }
    }

    fn no_structure(&self, name: &str, note: &str) -> Error {
        Error::NoType {
            path: self.path().to_owned(),
            kind: "structure",
            name: name.to_owned(),
            note: note.to_owned(),
        }
    }

    /// The file with the DWARF.
    fn dwarf_file(&self) -> Option<&Elf> {
        self.debug.iter().chain(std::iter::once(&self.elf)).find(|elf| elf.has_dwarf())
    }

    fn need_dwarf(&self, wanted: &str) -> Result<(), Error> {
        if self.dwarf_file().is_some() {
            return Ok(());
        }
        Err(Error::NoDebugInformation {
            path: self.path().to_owned(),
            wanted: wanted.to_owned(),
            reason: "the file has no debug information (DWARF)".to_owned(),
            debug_file: self.debug_file_hint(),
        })
    }

    /// Answers from what was found, after looking for what was not looked for yet: all that the table
    /// of hooks wants at once, since a pass over the debug information costs the same for one name.
    fn with_found<T>(&self, wanted: Wanted, answer: impl FnOnce(&Found) -> T) -> Result<T, Error> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let known = wanted.structures.iter().all(|name| cache.structures.contains(name))
            && wanted.enumerations.iter().all(|name| cache.enumerations.contains(name))
            && wanted.functions.iter().all(|name| cache.functions.contains(name));
        if !known && let Some(elf) = self.dwarf_file() {
            let table = functions::wanted();
            let fresh = |known: &mut HashSet<String>, asked: Vec<String>, table: Vec<String>| {
                asked.into_iter().chain(table).filter(|name| known.insert(name.clone())).collect::<Vec<_>>()
            };
            let wanted = Wanted {
                structures: fresh(&mut cache.structures, wanted.structures, table.structures),
                enumerations: fresh(&mut cache.enumerations, wanted.enumerations, table.enumerations),
                functions: fresh(&mut cache.functions, wanted.functions, table.functions),
            };
            let mut found = dwarf::scan(elf, self.alternate.as_ref(), &self.beside(), &wanted)?;
            if !cache.found.functions.is_empty() || cache.found.units > 0 {
                // The units were counted by the first pass.
                found.units = 0;
                found.damaged = None;
                found.missing_split = None;
                found.other_split = None;
            }
            cache.found.absorb(found);
        }
        Ok(answer(&cache.found))
    }

    /// Where the parts of split debug information are looked for.
    fn beside(&self) -> Beside {
        let mut files = vec![inside(self.root.as_deref(), &self.known_as), self.path().to_owned()];
        files.extend(self.debug.as_ref().map(|debug| debug.path().to_owned()));
        files.push(self.known_as.clone());
        files.dedup();
        Beside { files, root: self.root.clone() }
    }

    /// Where a debug file for this build would be looked for.
    fn debug_file_hint(&self) -> String {
        self.build_id().and_then(build_id_path).map_or_else(
            || "a file that its .gnu_debuglink names (it has no build-id)".to_owned(),
            |path| path.display().to_string(),
        )
    }
}

/// All files of one program that hold SPDK: one for a static build, many for a shared one.
#[derive(Debug)]
pub struct BinarySet {
    name: String,
    binaries: Vec<Binary>,
}

impl BinarySet {
    /// A set of one.
    pub fn of(binary: Binary) -> BinarySet {
        BinarySet { name: binary.path().display().to_string(), binaries: vec![binary] }
    }

    /// These files, of which those without SPDK are left out. `name` is what messages call them; for
    /// `root` see [`Binary::open`].
    pub fn open(name: &str, paths: &[PathBuf], root: Option<&Path>) -> Result<BinarySet, Error> {
        Self::collect(name, paths.iter().map(|path| Binary::open(path, root)))
    }

    /// The files that a process has mapped as code, those with SPDK in them.
    pub fn of_process(pid: u32) -> Result<BinarySet, Error> {
        let maps_path = PathBuf::from(format!("/proc/{pid}/maps"));
        let maps =
            std::fs::read_to_string(&maps_path).map_err(|source| Error::Read { path: maps_path, source })?;
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        Self::collect(
            &format!("process {pid}"),
            mapped_code(&maps).into_iter().map(|mapped| {
                let elf = Elf::open(&mapped.reachable(pid))?;
                Ok(Binary::with_elf(elf, Path::new(&mapped.path), Some(&root)))
            }),
        )
    }

    fn collect(
        name: &str,
        files: impl ExactSizeIterator<Item = Result<Binary, Error>>,
    ) -> Result<BinarySet, Error> {
        let count = files.len();
        let mut binaries = Vec::new();
        let mut failed = None;
        for file in files {
            match file {
                Ok(binary) if binary.holds_spdk() => binaries.push(binary),
                Ok(_) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match (binaries.is_empty(), failed) {
            (false, _) => Ok(BinarySet { name: name.to_owned(), binaries }),
            (true, Some(error)) if count == 1 => Err(error),
            (true, _) => Err(Error::NotSpdk { name: name.to_owned(), files: count }),
        }
    }

    /// The files.
    pub fn binaries(&self) -> &[Binary] {
        &self.binaries
    }

    /// The files, to give them debug files or layouts.
    pub fn binaries_mut(&mut self) -> &mut [Binary] {
        &mut self.binaries
    }

    /// What messages call the set.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the program says that it is.
    pub fn version(&self) -> Option<Version> {
        self.binaries.iter().find_map(Binary::version)
    }

    /// The build-id of the file that holds the transport, else of the first that has one.
    pub fn build_id(&self) -> Option<&[u8]> {
        self.binaries
            .iter()
            .find(|binary| functions::functions().take(1).any(|name| !binary.symbols(name).is_empty()))
            .and_then(Binary::build_id)
            .or_else(|| self.binaries.iter().find_map(Binary::build_id))
    }

    /// Every copy of a function in all files; see [`Binary::resolve_function`].
    pub fn resolve_function(&self, name: &str) -> Result<Function, Error> {
        let mut copies = Vec::new();
        let mut failed: Option<Error> = None;
        for binary in &self.binaries {
            match binary.resolve_function(name) {
                Ok(function) => copies.extend(function.copies),
                Err(error) => keep_better(&mut failed, error),
            }
        }
        if copies.is_empty() {
            return Err(failed.unwrap_or_else(|| self.not_spdk()));
        }
        Ok(Function { name: name.to_owned(), copies })
    }

    /// One site for each copy; see [`Binary::place`].
    pub fn place(&self, function: &Function, live: &[Reg]) -> Result<Vec<Site>, Error> {
        let mut sites = Vec::new();
        for binary in &self.binaries {
            sites.extend(binary.place(function, live)?);
        }
        Ok(sites)
    }

    /// The calls of `callee` in a function; see [`Binary::call_sites`].
    pub fn call_sites(&self, function: &Function, callee: &str) -> Result<Vec<Site>, Error> {
        let mut sites = Vec::new();
        let mut failed = None;
        for binary in &self.binaries {
            if binary.own_copies(function).next().is_none() {
                continue;
            }
            match binary.call_sites(function, callee) {
                Ok(found) => sites.extend(found),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if sites.is_empty() => Err(error),
            _ => Ok(sites),
        }
    }

    /// Where the function was inlined, as (file, address); see [`Binary::inlined_copies`].
    pub fn inlined_copies(&self, name: &str) -> Result<Vec<(PathBuf, u64)>, Error> {
        let mut places = Vec::new();
        for binary in &self.binaries {
            for vaddr in binary.inlined_copies(name)? {
                places.push((binary.path().to_owned(), vaddr));
            }
        }
        Ok(places)
    }

    /// Where a member is; see [`Binary::offset`]. Files that know it must agree.
    pub fn offset(&self, path: &str) -> Result<Member, Error> {
        self.agreed(path, |binary| binary.offset(path))
    }

    /// Size of a structure; see [`Binary::size_of`].
    pub fn size_of(&self, structure: &str) -> Result<u64, Error> {
        self.agreed(structure, |binary| binary.size_of(structure))
    }

    /// The value of an enumerator; see [`Binary::enumerator`].
    pub fn enumerator(&self, enumeration: &str, enumerator: &str) -> Result<i64, Error> {
        self.agreed(&format!("{enumeration}::{enumerator}"), |binary| {
            binary.enumerator(enumeration, enumerator)
        })
    }

    /// The places of a USDT probe.
    pub fn usdt(&self, provider: &str, name: &str) -> Vec<UsdtSite> {
        self.binaries.iter().flat_map(|binary| binary.usdt(provider, name)).collect()
    }

    fn agreed<T: PartialEq>(
        &self,
        asked: &str,
        ask: impl Fn(&Binary) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut answer: Option<(T, &Path)> = None;
        let mut failed: Option<Error> = None;
        for binary in &self.binaries {
            match ask(binary) {
                Ok(found) => match &answer {
                    None => answer = Some((found, binary.path())),
                    Some((known, _)) if *known == found => {}
                    Some((_, path)) => {
                        return Err(Error::Ambiguous {
                            path: PathBuf::from(&self.name),
                            asked: asked.to_owned(),
                            candidates: format!(
                                "{} and {} disagree",
                                path.display(),
                                binary.path().display()
                            ),
                        });
                    }
                },
                Err(error) => keep_better(&mut failed, error),
            }
        }
        match (answer, failed) {
            (_, Some(error @ Error::Ambiguous { .. })) => Err(error),
            (Some((answer, _)), _) => Ok(answer),
            (None, Some(error)) => Err(error),
            (None, None) => Err(self.not_spdk()),
        }
    }

    fn not_spdk(&self) -> Error {
        Error::NotSpdk { name: self.name.clone(), files: self.binaries.len() }
    }
}

/// Of several files' reasons, the one that tells most.
fn keep_better(kept: &mut Option<Error>, error: Error) {
    let weight = |error: &Error| match error {
        Error::Ambiguous { .. } => 5,
        Error::OnlyInlined { .. }
        | Error::InlinedUnseen { .. }
        | Error::NoMember { .. }
        | Error::NotInside { .. } => 4,
        Error::Malformed { .. } | Error::NoEnumerator { .. } => 3,
        Error::NoFunction { similar, .. } => 1 + u8::from(!similar.is_empty()),
        Error::NoType { note, .. } => 1 + u8::from(!note.is_empty()),
        _ => 0,
    };
    if kept.as_ref().is_none_or(|kept| weight(kept) < weight(&error)) {
        *kept = Some(error);
    }
}

/// The cold parts that belong to a copy: its own name and `.cold`, else those of no copy's own.
fn cold_parts(copy: &str, cold: &[Symbol]) -> Vec<(u64, u64)> {
    cold.iter()
        .filter(|symbol| symbol.name.strip_prefix(copy).is_some_and(|suffix| suffix.starts_with(".cold")))
        .map(|symbol| (symbol.vaddr, symbol.size))
        .collect()
}

/// A member by name, with its offset; members of anonymous structures count as the structure's own.
fn find_member<'a>(structure: &'a Structure, name: &str, depth: usize) -> Option<(u64, &'a dwarf::Member)> {
    let direct = structure.members.iter().find(|member| member.name.as_deref() == Some(name));
    if let Some(member) = direct {
        return Some((member.offset, member));
    }
    if depth > 16 {
        return None;
    }
    structure.members.iter().filter(|member| member.name.is_none()).find_map(|member| match &member.kind {
        Kind::Structure(inner) => {
            let (offset, found) = find_member(inner, name, depth + 1)?;
            Some((member.offset.saturating_add(offset), found))
        }
        _ => None,
    })
}

/// Members with a similar name, those of anonymous structures too.
fn similar_members(structure: &Structure, word: &str) -> Vec<String> {
    let mut names = Vec::new();
    collect_names(structure, 0, &mut names);
    similar_names(names.into_iter(), word)
}

fn collect_names<'a>(structure: &'a Structure, depth: usize, names: &mut Vec<&'a str>) {
    for member in &structure.members {
        match (&member.name, &member.kind) {
            (Some(name), _) => names.push(name),
            (None, Kind::Structure(inner)) if depth < 16 => collect_names(inner, depth + 1, names),
            _ => {}
        }
    }
}

/// The names that are a slip of the pen away from this one, else those that have a word in common.
fn similar_names<'a>(names: impl Iterator<Item = &'a str> + Clone, asked: &str) -> Vec<String> {
    let close: Vec<String> =
        names.clone().filter(|name| distance(name, asked) <= 2).take(3).map(str::to_owned).collect();
    if !close.is_empty() {
        return close;
    }
    names.filter(|name| shares_word(name, asked)).take(5).map(str::to_owned).collect()
}

/// Whether two names have a word of more than two letters in common.
fn shares_word(a: &str, b: &str) -> bool {
    a.split('_')
        .filter(|word| word.len() > 2)
        .any(|word| b.split('_').any(|other| other.eq_ignore_ascii_case(word)))
}

/// How many letters must be put in, taken out or changed to make one name of the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    const LONGEST: usize = 64;
    if a.len() > LONGEST || b.len() > LONGEST || a.len().abs_diff(b.len()) > 2 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        if let Some(first) = row.first_mut() {
            *first = left;
        }
        for (cell, y) in row.iter_mut().skip(1).zip(b.bytes()) {
            let above = *cell;
            *cell = (above + 1).min(left + 1).min(diagonal + usize::from(x != y));
            (diagonal, left) = (above, *cell);
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}

/// A path as seen from outside a process's root directory.
fn inside(root: Option<&Path>, path: &Path) -> PathBuf {
    match root {
        Some(root) => root.join(path.strip_prefix("/").unwrap_or(path)),
        None => path.to_owned(),
    }
}

/// `/usr/lib/debug/.build-id/xx/yyyy.debug`.
fn build_id_path(id: &[u8]) -> Option<PathBuf> {
    let text = hex(id);
    let (first, rest) = text.split_at_checked(2)?;
    (!rest.is_empty()).then(|| PathBuf::from(format!("/usr/lib/debug/.build-id/{first}/{rest}.debug")))
}

/// The separate debug file of a binary: by build-id, else by its debug link.
fn find_debug_file(elf: &Elf, path: &Path, root: Option<&Path>) -> Option<Elf> {
    let roots: Vec<Option<&Path>> = match root {
        Some(root) => vec![Some(root), None],
        None => vec![None],
    };
    let open = |candidate: &Path| -> Option<Elf> {
        // A link may lead back to the stripped file itself.
        if candidate == elf.path() {
            return None;
        }
        let debug = Elf::open_debug(candidate).ok()?;
        (debug.has_symbols() || debug.has_dwarf()).then_some(debug)
    };
    if let Some(file) = elf.build_id().and_then(build_id_path) {
        for root in &roots {
            if let Some(debug) = open(&inside(*root, &file))
                && debug.build_id() == elf.build_id()
            {
                return Some(debug);
            }
        }
    }
    let (name, crc) = elf.debug_link()?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    let candidates = [
        directory.join(&name),
        directory.join(".debug").join(&name),
        Path::new("/usr/lib/debug").join(directory.strip_prefix("/").unwrap_or(directory)).join(&name),
    ];
    for root in &roots {
        for candidate in &candidates {
            if let Some(debug) = open(&inside(*root, candidate)) {
                let same = match (debug.build_id(), elf.build_id()) {
                    (Some(theirs), Some(ours)) => theirs == ours,
                    _ => crc32(debug.bytes()) == crc,
                };
                if same {
                    return Some(debug);
                }
            }
        }
    }
    None
}

/// The checksum of .gnu_debuglink: CRC-32 as in zlib.
fn crc32(bytes: &[u8]) -> u32 {
    let mut table = [0_u32; 256];
    for (index, entry) in table.iter_mut().enumerate() {
        let mut value = index as u32;
        for _ in 0..8 {
            value = if value & 1 == 1 { 0xedb8_8320 ^ (value >> 1) } else { value >> 1 };
        }
        *entry = value;
    }
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        let index = (crc ^ u32::from(*byte)) & 0xff;
        (crc >> 8) ^ table.get(index as usize).copied().unwrap_or(0)
    })
}

/// Addresses for people.
fn hex_list(addresses: &[u64]) -> String {
    addresses.iter().map(|address| format!("{address:#x}")).collect::<Vec<_>>().join(", ")
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// SPDK's own version text, as every program that links it carries: `SPDK v26.05 git sha1 ...`.
fn spdk_version(bytes: &[u8]) -> Option<Version> {
    const MARK: &[u8] = b"SPDK v";
    // No program's constants are larger; a sparse file may be, and reading it takes for ever.
    const MOST: usize = 1 << 28;
    let bytes = bytes.get(..MOST).unwrap_or(bytes);
    let mut from = 0;
    loop {
        let rest = bytes.get(from..)?;
        let at =
            rest.iter().zip(rest.get(4..)?).position(|(first, fifth)| *first == b'S' && *fifth == b' ')?;
        let candidate = rest.get(at..)?;
        from += at + 1;
        if !candidate.starts_with(MARK) {
            continue;
        }
        let text =
            candidate.get(..128).unwrap_or(candidate).split(|byte| !(0x20..0x7f).contains(byte)).next()?;
        let text = String::from_utf8_lossy(text).into_owned();
        let number = text.get(MARK.len()..).and_then(|rest| {
            let mut numbers = rest.split(|c: char| !c.is_ascii_digit());
            Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
        });
        if number.is_some() {
            return Some(Version { product: Product::Spdk, text: text.trim_end().to_owned(), number });
        }
    }
}

/// A file that a process has mapped as code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MappedFile {
    path: String,
    inode: u64,
    /// `START-END`, as the kernel writes it.
    range: String,
}

impl MappedFile {
    /// A path by which this process reaches the very file, even in a container or once deleted.
    fn reachable(&self, pid: u32) -> PathBuf {
        use std::os::unix::fs::MetadataExt;
        let inside = PathBuf::from(format!("/proc/{pid}/root{}", self.path));
        let same = |path: &Path| std::fs::metadata(path).is_ok_and(|metadata| metadata.ino() == self.inode);
        let outside = PathBuf::from(&self.path);
        if same(&outside) && same(&inside) {
            return outside;
        }
        if same(&inside) {
            return inside;
        }
        // There the kernel writes addresses without the zeros that `maps` has in front.
        let plain = |address: &str| match address.trim_start_matches('0') {
            "" => "0".to_owned(),
            digits => digits.to_owned(),
        };
        let range = self.range.split('-').map(plain).collect::<Vec<_>>().join("-");
        PathBuf::from(format!("/proc/{pid}/map_files/{range}"))
    }
}

/// Files mapped as code, by a process's `maps`, each once and in its order: the program itself first.
fn mapped_code(maps: &str) -> Vec<MappedFile> {
    let mut seen = HashSet::new();
    let mut files = Vec::new();
    for line in maps.lines() {
        let mut fields = line.splitn(6, ' ');
        let (Some(range), Some(mode), Some(_), Some(device), Some(inode), Some(path)) =
            (fields.next(), fields.next(), fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let path = path.trim_start();
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        let Ok(inode) = inode.parse::<u64>() else {
            continue;
        };
        if mode.contains('x') && path.starts_with('/') && seen.insert((device, inode)) {
            files.push(MappedFile { path: path.to_owned(), inode, range: range.to_owned() });
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_version_is_spdks_own_text() {
        let version = |text: &[u8]| spdk_version(text).map(|version| (version.text, version.number));
        assert_eq!(
            version(b"xSPDK \0SPDK v26.05 git sha1 d519b163cb\0more"),
            Some(("SPDK v26.05 git sha1 d519b163cb".to_owned(), Some((26, 5))))
        );
        assert_eq!(
            version(b"SPDK v%s SPDK v24.09.1-pre"),
            Some(("SPDK v24.09.1-pre".to_owned(), Some((24, 9))))
        );
        assert_eq!(version(b"SPDK v"), None);
        assert_eq!(version(b"SPDK"), None);
        assert_eq!(version(b""), None);
    }

    #[test]
    fn mapped_files_are_read_from_maps_once_each_and_only_code() {
        let maps = "\
55d0c0a00000-55d0c0a1f000 r--p 00000000 fe:01 1234                       /opt/spdk/bin/nvmf tgt
55d0c0a1f000-55d0c0c00000 r-xp 0001f000 fe:01 1234                       /opt/spdk/bin/nvmf tgt
7f0000000000-7f0000001000 r-xp 00000000 fe:01 99                         /usr/lib/libspdk_nvmf.so.20 (deleted)
7f0000002000-7f0000003000 r-xp 00001000 fe:01 99                         /usr/lib/libspdk_nvmf.so.20 (deleted)
7f0000004000-7f0000005000 rwxp 00000000 00:00 0 
7fff00000000-7fff00001000 r-xp 00000000 00:00 0                          [vdso]
";
        let files = mapped_code(maps);
        let found: Vec<(&str, u64, &str)> =
            files.iter().map(|file| (file.path.as_str(), file.inode, file.range.as_str())).collect();
        assert_eq!(
            found,
            [
                ("/opt/spdk/bin/nvmf tgt", 1234, "55d0c0a1f000-55d0c0c00000"),
                ("/usr/lib/libspdk_nvmf.so.20", 99, "7f0000000000-7f0000001000"),
            ]
        );
        assert!(mapped_code("nonsense\n\n1 2 3 4 5 6").is_empty());
    }

    #[test]
    fn the_checksum_of_debug_links_is_zlibs() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    proptest! {
        #[test]
        fn the_distance_of_names_is_a_distance(a in "[a-d_]{0,12}", b in "[a-d_]{0,12}") {
            prop_assert_eq!(distance(&a, &a), 0);
            prop_assert_eq!(distance(&a, &b), distance(&b, &a));
            prop_assert_eq!(distance(&a, &b) == 0, a == b);
            let longer = format!("{a}x");
            prop_assert_eq!(distance(&a, &longer), 1);
        }
    }
}
