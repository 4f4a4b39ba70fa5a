//! All the places where a function begins: its copies, and the places where the compiler put its body into a
//! caller's. What a probe on each of them sees together is every call once; where that can not be had, what is
//! missed is said.

use gimli::{EndianSlice, LittleEndian, UnwindSection};

use super::{Binary, BinarySet, Function, FunctionCopy, Site, hex_list, keep_better};
use crate::Error;
use crate::dwarf::{Argument, Wanted};
use crate::inlined::{Base, InlinedSite, Place};
use crate::place::{self, Code, Emulation, Reg};
use crate::plan::from_source;

/// A function without a symbol is taken to be this long.
const UNSIZED: u64 = 4096;

/// What a program can be told to add to a register; see `pack` of the plan.
pub(crate) const READABLE: std::ops::Range<i64> = -(1 << 13)..1 << 13;

/// Where to probe a function, and what that misses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Coverage {
    pub(crate) sites: Vec<Site>,
    /// Which calls no site sees, in words; none where they see all.
    pub(crate) gap: Option<String>,
    /// The functions into which the calls were inlined that no site sees, where that is all that is missed.
    pub(crate) unseen_in: Vec<String>,
}

/// What is known of the places where a function was inlined.
#[derive(Clone, Debug, Default)]
struct Places {
    /// How many there are.
    count: usize,
    sites: Vec<InlinedSite>,
    /// How many of those no code is left of.
    vanished: usize,
    /// Whether anything could tell.
    told: bool,
}

impl Binary {
    /// Every place where a function begins, with the arguments in the `live` registers where they are there.
    fn coverage(&self, name: &str, live: &[Reg], source: Option<&str>) -> Result<Coverage, Error> {
        let emulation = Emulation::of_this_kernel();
        let places = self.places(name);
        let (function, other_sources) = match self.resolve_function(name) {
            Ok(function) => {
                let all = function.copies.len();
                let function = from_source(function, source);
                let fewer = function.copies.len() < all;
                (function, fewer)
            }
            Err(Error::OnlyInlined { .. }) => (Function { name: name.to_owned(), copies: Vec::new() }, false),
            Err(error) => return Err(error),
        };
        let (parts, mut heads): (Vec<FunctionCopy>, Vec<FunctionCopy>) =
            function.copies.into_iter().partition(FunctionCopy::is_part);
        if !other_sources {
            heads.extend(self.without_symbol(name, &heads, &parts));
        }
        let inlined = self.inlined_sites(name, live, &places, emulation);
        let of_copies = |copies: Vec<FunctionCopy>| {
            self.place_for(&Function { name: name.to_owned(), copies }, live, emulation)
        };
        let whole = match inlined {
            Ok(_) if other_sources && places.count > 0 => {
                Err("functions of its name in other files may be meant".to_owned())
            }
            Ok(_) if !parts.is_empty() && !places.told => {
                Err("without debug information its beginning can not be found there".to_owned())
            }
            other => other,
        };
        let reason = match whole {
            Ok(inlined) => {
                let mut sites = of_copies(heads.clone())?;
                sites.extend(inlined);
                if !sites.is_empty() {
                    return Ok(Coverage { sites, gap: None, unseen_in: Vec::new() });
                }
                "its debug information names no place".to_owned()
            }
            Err(reason) => reason,
        };
        // The part that was not inlined sees the calls of all others that do not return at once; with its own
        // head it would see some twice.
        let has_parts = !parts.is_empty();
        let copies = if has_parts { parts } else { heads };
        if copies.is_empty() {
            return Err(Error::InlinedUnseen {
                path: self.path().to_owned(),
                name: name.to_owned(),
                places: places.count,
                why: reason,
            });
        }
        let gap = if has_parts {
            format!(
                "the beginning of `{name}` was inlined into its callers: a probe sees only calls that did not \
                 return at once ({reason})"
            )
        } else {
            let at =
                if places.count == 1 { "a place".to_owned() } else { format!("{} places", places.count) };
            format!("`{name}` was also inlined at {at}, where a probe does not see it: {reason}")
        };
        let only_inlined = !has_parts && places.count == places.sites.len();
        let callers = places.sites.iter().filter(|_| only_inlined).map(|site| site.caller.clone());
        Ok(Coverage { sites: of_copies(copies)?, gap: Some(gap), unseen_in: callers.collect() })
    }

    /// Copies that only the debug information knows of.
    fn without_symbol(
        &self,
        name: &str,
        heads: &[FunctionCopy],
        parts: &[FunctionCopy],
    ) -> Vec<FunctionCopy> {
        let wanted = Wanted { functions: vec![name.to_owned()], ..Wanted::default() };
        let entries: Vec<u64> = self
            .with_found(wanted, |found| {
                found
                    .functions
                    .get(name)
                    .map_or_else(Vec::new, |facts| facts.copies.iter().map(|(entry, _)| *entry).collect())
            })
            .unwrap_or_default();
        entries
            .into_iter()
            .filter(|entry| !heads.iter().chain(parts).any(|copy| copy.vaddr == *entry))
            // What the linker dropped is left at address 0 or thereabouts.
            .filter(|entry| *entry != 0 && self.elf.code(*entry, 1).is_some())
            .map(|vaddr| FunctionCopy {
                binary: self.path().to_owned(),
                symbol: name.to_owned(),
                vaddr,
                size: UNSIZED,
                source: None,
                cold: Vec::new(),
            })
            .collect()
    }

    fn places(&self, name: &str) -> Places {
        if let Some((count, sites, vanished)) = self.layout.as_ref().and_then(|layout| layout.places(name)) {
            return Places { count, sites: sites.to_vec(), vanished, told: true };
        }
        let wanted = Wanted { functions: vec![name.to_owned()], ..Wanted::default() };
        self.with_found(wanted, |found| {
            let Some(facts) = found.functions.get(name) else {
                return Places::default();
            };
            // What the linker dropped is left at address 0 or thereabouts.
            let sites: Vec<InlinedSite> =
                facts.sites.iter().filter(|site| self.elf.code(site.entry, 1).is_some()).cloned().collect();
            Places { count: sites.len() + facts.vanished, sites, vanished: facts.vanished, told: true }
        })
        .unwrap_or_default()
    }

    /// Where functions of the table were inlined: a probe that stands for something earlier must not lie behind.
    pub(super) fn inlined_entries(&self) -> Vec<u64> {
        if let Some(layout) = &self.layout {
            return layout.inlined_entries().collect();
        }
        self.with_found(Wanted::default(), |found| {
            found.functions.values().flat_map(|facts| &facts.sites).map(|site| site.entry).collect()
        })
        .unwrap_or_default()
    }

    /// What a layout file keeps of the places where a function was inlined.
    pub(crate) fn places_for_layout(&self, name: &str) -> (Vec<InlinedSite>, usize) {
        let places = self.places(name);
        (places.sites, places.vanished)
    }

    /// A site in every place where the function was inlined; else the reason why one of them can not be had.
    fn inlined_sites(
        &self,
        name: &str,
        live: &[Reg],
        places: &Places,
        emulation: Emulation,
    ) -> Result<Vec<Site>, String> {
        if places.vanished > 0 {
            return Err("of some nothing is left but their effect".to_owned());
        }
        if places.count > places.sites.len() {
            return Err("it is not known where its arguments are there".to_owned());
        }
        let at = |site: &InlinedSite| format!("in `{}` at {:#x}", site.caller, site.entry);
        places
            .sites
            .iter()
            .map(|place| {
                self.inlined_site(name, live, place, emulation)
                    .map_err(|reason| format!("{} {reason}", at(place)))
            })
            .collect()
    }

    fn inlined_site(
        &self,
        name: &str,
        live: &[Reg],
        place: &InlinedSite,
        emulation: Emulation,
    ) -> Result<Site, String> {
        let pieces: Vec<Code<'_>> = place
            .caller_ranges
            .iter()
            .filter_map(|(begin, end)| self.elf.code(*begin, end.checked_sub(*begin)?))
            .collect();
        place.exact(&pieces).map_err(str::to_owned)?;
        let stops = self.inlined_entries();
        let mut best: Option<(place::Spot, Vec<Place>)> = None;
        let mut lacking = None;
        for spot in place::straight_line(&pieces, place.entry, &stops, emulation) {
            match self.arguments_at(place, live, spot.vaddr) {
                Ok(arguments) => {
                    if best.as_ref().is_none_or(|(best, _)| spot.class < best.class) {
                        best = Some((spot, arguments));
                    }
                }
                Err(number) => {
                    lacking.get_or_insert(number);
                }
            }
        }
        let Some((spot, arguments)) = best else {
            return Err(format!(
                "its argument {} is in no place that can be read",
                lacking.unwrap_or_default()
            ));
        };
        let begin = place.caller_ranges.first().map_or(place.entry, |(begin, _)| *begin);
        let file_offset = self.elf.file_offset(spot.vaddr).ok_or("has no code in the file")?;
        Ok(Site {
            binary: self.path().to_owned(),
            symbol: place.caller.clone(),
            vaddr: spot.vaddr,
            file_offset,
            offset_in_function: spot.vaddr.wrapping_sub(begin),
            instruction: spot.instruction,
            class: spot.class,
            estimated_ns: spot.class.estimated_ns(),
            why: format!("`{name}` was inlined here"),
            inlined: Some(name.to_owned()),
            arguments,
        })
    }

    /// Where the arguments that are wanted in these registers are at an address of an inlined place; else the
    /// number of the first that is nowhere.
    fn arguments_at(&self, site: &InlinedSite, live: &[Reg], at: u64) -> Result<Vec<Place>, usize> {
        live.iter()
            .map(|register| {
                let number = Reg::ARGUMENTS.iter().position(|argument| argument == register);
                let number = number.ok_or(0_usize)?;
                let place = site.argument(number, at).ok_or(number)?;
                let place = match place.base {
                    Base::Frame => {
                        let (register, offset) = self.frame(at).ok_or(number)?;
                        let offset = place.offset.checked_add(offset).ok_or(number)?;
                        Place { base: Base::Register(register), offset, ..place }
                    }
                    _ => place,
                };
                READABLE.contains(&place.offset).then_some(place).ok_or(number)
            })
            .collect()
    }

    /// What the canonical frame address is computed from at an address: register and offset.
    fn frame(&self, at: u64) -> Option<(Reg, i64)> {
        let section = self.elf.section(".eh_frame").ok()?;
        let address = self.elf.section_address(".eh_frame")?;
        let frames = gimli::EhFrame::from(EndianSlice::new(&section, LittleEndian));
        let bases = gimli::BaseAddresses::default().set_eh_frame(address);
        let mut context = gimli::UnwindContext::new();
        let row =
            frames.unwind_info_for_address(&bases, &mut context, at, gimli::EhFrame::cie_from_offset).ok()?;
        match row.cfa() {
            gimli::CfaRule::RegisterAndOffset { register, offset } => {
                Some((Reg::from_dwarf(register.0)?, *offset))
            }
            gimli::CfaRule::Expression(_) => None,
        }
    }

    /// Where the arguments of a copy are at its entry, by the registers that the calling convention gives them.
    pub(super) fn arguments_at_entry(
        &self,
        name: &str,
        copy: &FunctionCopy,
        live: &[Reg],
    ) -> Result<Vec<Place>, Error> {
        let Some(arguments) = self.arguments(name, copy) else {
            // Nothing is known: without debug information, the calling convention is what there is.
            return Ok(live.iter().map(|register| Place::register(*register)).collect());
        };
        live.iter()
            .map(|register| {
                let number = Reg::ARGUMENTS.iter().position(|argument| argument == register);
                let number = number.unwrap_or(usize::MAX);
                let place = match arguments.get(number) {
                    Some(Argument::Register(found)) => return Ok(Place::register(*found)),
                    Some(Argument::Elsewhere) => format!("not in {register}"),
                    Some(Argument::Unknown) | None if copy.is_clone() => "no longer".to_owned(),
                    Some(Argument::Unknown) | None => return Ok(Place::register(*register)),
                };
                Err(Error::MovedArgument {
                    path: self.path().to_owned(),
                    symbol: copy.symbol.clone(),
                    argument: number,
                    place,
                })
            })
            .collect()
    }

    /// The calls of `callee` in `caller`, wherever the code of that went, and the places in it where `callee`
    /// itself was inlined.
    ///
    /// `alone` says that calls from elsewhere are not meant.
    fn calls_covered(
        &self,
        caller: &str,
        callee: &str,
        live: &[Reg],
        alone: bool,
    ) -> Result<Coverage, Error> {
        let emulation = Emulation::of_this_kernel();
        let function = match self.resolve_function(caller) {
            Err(Error::OnlyInlined { .. }) => Function { name: caller.to_owned(), copies: Vec::new() },
            other => other?,
        };
        let mut gaps = Vec::new();
        let inlined = self.places(caller);
        let mut ranges = Vec::new();
        for site in &inlined.sites {
            ranges.extend(site.ranges.iter().map(|range| (site.caller.clone(), *range)));
        }
        if inlined.count > inlined.sites.len() && inlined.vanished == 0 {
            gaps.push(format!("`{caller}` was also inlined where its calls can not be found"));
        }
        let mut sites = self.calls_in(&function, &ranges, callee, live, emulation)?;
        let places = self.places(callee);
        match self.inlined_sites(callee, live, &places, emulation) {
            Ok(more) => sites.extend(more),
            Err(reason) => gaps.push(format!("`{callee}` was also inlined: {reason}")),
        }
        let strays = if alone { Vec::new() } else { self.stray_references(callee, &sites) };
        if !strays.is_empty() {
            gaps.push(format!("`{callee}` is also reached from {}", hex_list(&strays)));
        }
        let gap = (!gaps.is_empty()).then(|| gaps.join("; "));
        Ok(Coverage { sites, gap, unseen_in: Vec::new() })
    }

    /// Every call of the function in the file, but for those in the code of the functions that are left out. Only
    /// where nothing but calls leads to it: its address is not taken, and no part of it was inlined.
    fn calls_but(&self, left_out: &[&str], callee: &str, live: &[Reg]) -> Result<Coverage, Error> {
        let emulation = Emulation::of_this_kernel();
        let function = self.resolve_function(callee)?;
        let unseen =
            |why: String| Error::CallsUnseen { path: self.path().to_owned(), name: callee.to_owned(), why };
        let (parts, heads): (Vec<FunctionCopy>, Vec<FunctionCopy>) =
            self.own_copies(&function).cloned().partition(FunctionCopy::is_part);
        if !parts.is_empty() || self.places(callee).count > 0 {
            return Err(unseen("some of its code was inlined".to_owned()));
        }
        if !self.without_symbol(callee, &heads, &parts).is_empty() {
            return Err(unseen("it has a copy without a name".to_owned()));
        }
        let skipped: Vec<(u64, u64)> = left_out
            .iter()
            .filter_map(|name| self.resolve_function(name).ok())
            .flat_map(|function| {
                let own: Vec<FunctionCopy> = self.own_copies(&function).cloned().collect();
                own.into_iter().flat_map(|copy| std::iter::once((copy.vaddr, copy.size)).chain(copy.cold))
            })
            .collect();
        let skipped = |at: u64| {
            skipped.iter().any(|(begin, size)| at.checked_sub(*begin).is_some_and(|in_it| in_it < *size))
        };
        let mut sites = Vec::new();
        for copy in &heads {
            let arguments = self.arguments_at_entry(callee, copy, live)?;
            if self.address_in_data(copy.vaddr) {
                return Err(unseen("its address is kept in the file's data".to_owned()));
            }
            for at in self.references(copy.vaddr) {
                let (caller, site) = self.call_with_operand(at, copy.vaddr, emulation).ok_or_else(|| {
                    unseen(format!("what refers to it at {at:#x} is no call that can be found"))
                })?;
                if skipped(site.vaddr) {
                    continue;
                }
                let why = format!("calls {callee}");
                let word = site.instruction.split(' ').next().unwrap_or_default();
                let instruction = format!("{word} {callee}");
                let site = self.site(&caller, site.vaddr, instruction, site.class, why)?;
                sites.push(Site { arguments: arguments.clone(), ..site });
            }
        }
        if sites.is_empty() {
            return Err(unseen("there is none".to_owned()));
        }
        if let Some(site) = sites.iter().find(|site| site.class == place::Class::SingleStep) {
            return Err(unseen(format!("the one at {:#x} would be single-stepped", site.vaddr)));
        }
        Ok(Coverage { sites, gap: None, unseen_in: Vec::new() })
    }

    /// The call whose operand is at an address, and the code that it is in.
    fn call_with_operand(
        &self,
        at: u64,
        target: u64,
        emulation: Emulation,
    ) -> Option<(FunctionCopy, place::CallSite)> {
        // A call or a jump is one byte, then its operand.
        let vaddr = at.checked_sub(1)?;
        let (symbol, begin, size) = self.piece_at(vaddr)?;
        let code = self.elf.code(begin, size)?;
        let call = place::calls(code, emulation)
            .into_iter()
            .find(|call| call.vaddr == vaddr && call.to == place::Destination::Code(target))?;
        let copy = FunctionCopy {
            binary: self.path().to_owned(),
            symbol,
            vaddr: begin,
            size,
            source: None,
            cold: Vec::new(),
        };
        Some((copy, call))
    }

    /// The function, or part of one, that an address is in: its name, where it begins, and its size.
    fn piece_at(&self, at: u64) -> Option<(String, u64, u64)> {
        match self.elf.function_at(at) {
            Some(symbol) => Some((symbol.name, symbol.vaddr, symbol.size)),
            None => self.unwound_at(at).map(|(begin, size)| (format!("{begin:#x}"), begin, size)),
        }
    }

    /// The piece of code that an address is in, by the tables for unwinding, which stripped files have as well.
    fn unwound_at(&self, at: u64) -> Option<(u64, u64)> {
        let section = self.elf.section(".eh_frame").ok()?;
        let address = self.elf.section_address(".eh_frame")?;
        let frames = gimli::EhFrame::from(EndianSlice::new(&section, LittleEndian));
        let bases = gimli::BaseAddresses::default().set_eh_frame(address);
        let frame = frames.fde_for_address(&bases, at, gimli::EhFrame::cie_from_offset).ok()?;
        Some((frame.initial_address(), frame.len()))
    }

    /// Whether the file's data holds an address: of a function, as a pointer to it or as what is to become one.
    fn address_in_data(&self, vaddr: u64) -> bool {
        let wanted = vaddr.to_le_bytes();
        [".data", ".data.rel.ro", ".data.rel.ro.local", ".rodata", ".init_array", ".rela.dyn", ".got"]
            .iter()
            .filter_map(|name| self.elf.section(name).ok())
            .any(|bytes| bytes.chunks_exact(8).any(|word| word == wanted))
    }

    /// Where in the code something refers to an address by its distance: what looks like such an operand of four
    /// bytes, and the short jumps near it.
    fn references(&self, target: u64) -> Vec<u64> {
        let mut found = Vec::new();
        for code in self.elf.all_code() {
            for (index, word) in code.bytes.windows(4).enumerate() {
                let Ok(word) = <[u8; 4]>::try_from(word) else { continue };
                let at = code.vaddr.wrapping_add(index as u64);
                let to = at.wrapping_add(4).wrapping_add_signed(i64::from(i32::from_le_bytes(word)));
                // Zeros right before a function are the end of the padding there, unless they are a call's.
                let padding = || {
                    let before = index.checked_sub(1).and_then(|before| code.bytes.get(before));
                    word == [0; 4] && !matches!(before, Some(0xe8 | 0xe9))
                };
                if to == target && !padding() {
                    found.push(at);
                }
            }
        }
        // A short jump is two bytes, and many pairs of bytes look like one: only where an instruction begins.
        let from = target.saturating_sub(130);
        let near = self.elf.code(from, 260).map_or(&[][..], |code| code.bytes);
        for (index, pair) in near.windows(2).enumerate() {
            let &[0x70..=0x7f | 0xe0..=0xe3 | 0xeb, distance] = pair else { continue };
            let at = from.wrapping_add(index as u64);
            if at.wrapping_add(2).wrapping_add_signed(i64::from(distance as i8)) != target {
                continue;
            }
            let begins = self
                .piece_at(at)
                .and_then(|(_, begin, size)| self.elf.code(begin, size))
                .is_none_or(|code| place::flows(&[code]).iter().any(|flow| flow.at == at));
            if begins {
                found.push(at + 1);
            }
        }
        found
    }

    /// Where else in the code the file's own function is referred to: calls from other functions, and its address
    /// taken. Addresses of what looks like such an instruction's operand.
    fn stray_references(&self, callee: &str, sites: &[Site]) -> Vec<u64> {
        let targets: Vec<u64> = self
            .symbols(callee)
            .into_iter()
            .filter(|symbol| !symbol.cold)
            .map(|symbol| symbol.vaddr)
            .collect();
        if targets.is_empty() {
            return Vec::new();
        }
        // A call's operand is its last four bytes, at most two behind its beginning.
        let known =
            |at: u64| sites.iter().any(|site| (1..=2).any(|behind| site.vaddr.wrapping_add(behind) == at));
        let all = targets.iter().flat_map(|target| self.references(*target));
        all.filter(|at| !known(*at)).take(8).collect()
    }
}

impl BinarySet {
    /// Every place where a function begins in all files; `source` is the file it must come from, where other
    /// programs have functions of that name.
    pub(crate) fn coverage(&self, name: &str, live: &[Reg], source: Option<&str>) -> Result<Coverage, Error> {
        self.covered(|binary| binary.coverage(name, live, source))
    }

    /// Every call of `callee` in `caller`, and every place where `callee` was inlined.
    pub(crate) fn calls_covered(&self, caller: &str, callee: &str, live: &[Reg]) -> Result<Coverage, Error> {
        // Of a function without arguments of interest only the calls in this caller count.
        self.covered(|binary| binary.calls_covered(caller, callee, live, live.is_empty()))
    }

    /// The same, and calls from elsewhere are not meant. A program that has no such function makes none.
    pub(crate) fn calls_in_alone(&self, caller: &str, callee: &str, live: &[Reg]) -> Result<Coverage, Error> {
        // A layout file has every function that is wanted of its build and that the build has.
        let absent = match self.resolve_function(callee) {
            Err(Error::NoFunction { .. }) => true,
            Err(Error::Stripped { .. }) => self.binaries().iter().any(|binary| binary.layout.is_some()),
            _ => false,
        };
        if absent {
            return Ok(Coverage { sites: Vec::new(), gap: None, unseen_in: Vec::new() });
        }
        self.covered(|binary| binary.calls_covered(caller, callee, live, true))
    }

    /// Every call of the function but for those in the code of those that are left out.
    pub(crate) fn calls_but(&self, left_out: &[&str], callee: &str, live: &[Reg]) -> Result<Coverage, Error> {
        self.covered(|binary| binary.calls_but(left_out, callee, live))
    }

    fn covered(&self, of: impl Fn(&Binary) -> Result<Coverage, Error>) -> Result<Coverage, Error> {
        let mut all = Coverage { sites: Vec::new(), gap: None, unseen_in: Vec::new() };
        let mut failed: Option<Error> = None;
        for binary in self.binaries() {
            match of(binary) {
                Ok(found) => {
                    all.sites.extend(found.sites);
                    all.gap = all.gap.or(found.gap);
                    all.unseen_in.extend(found.unseen_in);
                }
                Err(error) => keep_better(&mut failed, error),
            }
        }
        match failed {
            Some(error) if all.sites.is_empty() => Err(error),
            // One file has it, and another has it only where no probe sees it.
            Some(error @ (Error::InlinedUnseen { .. } | Error::MovedArgument { .. })) => {
                all.gap.get_or_insert(error.to_string());
                all.unseen_in.clear();
                Ok(all)
            }
            _ if all.sites.is_empty() => Err(self.not_spdk()),
            _ => Ok(all),
        }
    }
}
