//! Reads ELF files: segments, sections, symbols, relocations, build-ids. Knows nothing of DWARF, and
//! chooses nothing.
//!
//! Everything is checked against the file's real size; what lies is an error, never a panic, and no
//! allocation is larger than the file is.

use std::borrow::Cow;
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use object::elf;
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader, Rela, SectionHeader, Sym};
use object::{LittleEndian, Object};

use crate::Error;
use crate::place::{self, Code};

/// Symbol names longer than this are nobody's C functions; reading them could take for ever in a file
/// made to annoy.
const LONGEST_NAME: usize = 512;

/// More than this no section of a debug file decompresses to.
const LARGEST_SECTION: u64 = 4 << 30;

/// The largest function whose instructions are looked at.
const LARGEST_FUNCTION: u64 = 1 << 20;

/// A function symbol without a size is taken to be this long at most.
const UNSIZED_FUNCTION: u64 = 4096;

enum Data {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl std::ops::Deref for Data {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Data::Mapped(map) => map,
            Data::Owned(bytes) => bytes,
        }
    }
}

/// Part of the file that is mapped into a process.
#[derive(Clone, Copy, Debug)]
struct Segment {
    vaddr: u64,
    offset: u64,
    /// Bytes that come from the file.
    size: u64,
    executable: bool,
}

/// A function's symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Symbol {
    /// The whole name, with the compiler's suffix.
    pub(crate) name: String,
    pub(crate) vaddr: u64,
    /// In bytes; where the symbol gives none, up to the next symbol.
    pub(crate) size: u64,
    /// Part of a function that the compiler moved away because it seldom runs.
    pub(crate) cold: bool,
    /// The source file, where the symbol is local and the table says so.
    pub(crate) source: Option<String>,
}

/// Compact: a large binary has hundreds of thousands of them.
#[derive(Clone, Copy)]
struct RawSymbol {
    /// Hash of the name without the compiler's suffix.
    hash: u64,
    /// Where the name is in the file.
    name: usize,
    name_len: u16,
    base_len: u16,
    cold: bool,
    vaddr: u64,
    size: u64,
    /// Where the source file's name is in the file; 0 for none.
    source: usize,
}

/// Function symbols of one file.
struct Symbols {
    /// In order of hash.
    by_hash: Vec<RawSymbol>,
    /// Start addresses, in order.
    starts: Vec<u64>,
}

/// An ELF file for x86-64.
pub(crate) struct Elf {
    path: PathBuf,
    data: Data,
    segments: Vec<Segment>,
    build_id: Option<Vec<u8>>,
    symbols: OnceLock<Symbols>,
}

impl std::fmt::Debug for Elf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Elf")
            .field("path", &self.path)
            .field("bytes", &self.data.len())
            .finish_non_exhaustive()
    }
}

impl Elf {
    pub(crate) fn open(path: &Path) -> Result<Elf, Error> {
        Self::parse(path, read(path)?, Kinds::Loadable)
    }

    pub(crate) fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Elf, Error> {
        Self::parse(path, Data::Owned(bytes), Kinds::Loadable)
    }

    /// Opens a file that holds only debug information; a compiler's `.dwo` is an object file.
    pub(crate) fn open_debug(path: &Path) -> Result<Elf, Error> {
        Self::parse(path, read(path)?, Kinds::Any)
    }

    fn parse(path: &Path, data: Data, kinds: Kinds) -> Result<Elf, Error> {
        check_ident(path, &data, kinds)?;
        let malformed =
            |what: object::Error| Error::Malformed { path: path.to_owned(), what: what.to_string() };
        let file = ElfFile64::<LittleEndian>::parse(&*data).map_err(malformed)?;
        let endian = LittleEndian;
        let segments = file
            .elf_program_headers()
            .iter()
            .filter(|header| header.p_type(endian) == elf::PT_LOAD)
            .map(|header| Segment {
                vaddr: header.p_vaddr(endian),
                offset: header.p_offset(endian),
                size: header.p_filesz(endian),
                executable: header.p_flags(endian).contains(elf::PF_X),
            })
            .collect::<Vec<_>>();
        let build_id = file.build_id().map_err(malformed)?.map(<[u8]>::to_vec);
        Ok(Elf { path: path.to_owned(), segments, build_id, symbols: OnceLock::new(), data })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn build_id(&self) -> Option<&[u8]> {
        self.build_id.as_deref()
    }

    fn file(&self) -> Option<ElfFile64<'_, LittleEndian>> {
        // It parsed once, and the bytes are the same.
        ElfFile64::parse(&*self.data).ok()
    }

    /// Name and checksum of the separate debug file that the binary asks for.
    pub(crate) fn debug_link(&self) -> Option<(PathBuf, u32)> {
        let file = self.file()?;
        let (name, crc) = file.gnu_debuglink().ok()??;
        Some((os_path(name), crc))
    }

    /// Name and build-id of the file that holds what several debug files share (dwz).
    pub(crate) fn alternate_link(&self) -> Option<(PathBuf, Vec<u8>)> {
        let file = self.file()?;
        let (name, id) = file.gnu_debugaltlink().ok()??;
        Some((os_path(name), id.to_vec()))
    }

    /// The whole file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// The parts of the file that a process gets as data: constants among them, code not.
    pub(crate) fn data_parts(&self) -> impl Iterator<Item = &[u8]> {
        self.segments.iter().filter(|segment| !segment.executable).filter_map(|segment| {
            let start = usize::try_from(segment.offset).ok()?;
            let end = usize::try_from(segment.offset.checked_add(segment.size)?).ok()?;
            self.data.get(start..end.min(self.data.len()))
        })
    }

    /// Contents of a section; empty where the file has none of that name.
    pub(crate) fn section(&self, name: &str) -> Result<Cow<'_, [u8]>, Error> {
        let Some(file) = self.file() else {
            return Ok(Cow::Borrowed(&[]));
        };
        let endian = LittleEndian;
        let table = file.elf_section_table();
        let Some((_, section)) = table.section_by_name(endian, name.as_bytes()) else {
            return Ok(Cow::Borrowed(&[]));
        };
        let malformed = |what: String| Error::Malformed {
            path: self.path.clone(),
            what: format!("section {name}: {what}"),
        };
        let contents = section.data(endian, &*self.data).map_err(|error| malformed(error.to_string()))?;
        match section.compression(endian, &*self.data).map_err(|error| malformed(error.to_string()))? {
            None => Ok(Cow::Borrowed(contents)),
            Some((header, offset, size)) => {
                use object::read::elf::CompressionHeader;
                let expected = header.ch_size(endian);
                let start = usize::try_from(offset).ok();
                let end = offset.checked_add(size).and_then(|end| usize::try_from(end).ok());
                let packed = start
                    .zip(end)
                    .and_then(|(start, end)| self.data.get(start..end))
                    .ok_or_else(|| malformed("compressed data beyond the file".to_owned()))?;
                inflate(header.ch_type(endian), packed, expected).map(Cow::Owned).map_err(malformed)
            }
        }
    }

    /// Address of a section, or none where the file has none of that name.
    pub(crate) fn section_address(&self, name: &str) -> Option<u64> {
        let file = self.file()?;
        let (_, section) = file.elf_section_table().section_by_name(LittleEndian, name.as_bytes())?;
        Some(section.sh_addr(LittleEndian))
    }

    /// The bytes from an address on, as far as the file holds them.
    pub(crate) fn bytes_at(&self, vaddr: u64) -> Option<&[u8]> {
        let segment = self.segments.iter().find(|segment| segment.holds(vaddr))?;
        let start = segment.offset.checked_add(vaddr - segment.vaddr)?;
        let end = segment.offset.checked_add(segment.size)?.min(self.data.len() as u64);
        self.data.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
    }

    /// Where in the file the byte of an address is: what the kernel's uprobes want.
    pub(crate) fn file_offset(&self, vaddr: u64) -> Option<u64> {
        let segment = self.segments.iter().find(|segment| segment.holds(vaddr))?;
        segment.offset.checked_add(vaddr - segment.vaddr)
    }

    /// Machine code at an address, at most `size` bytes. None where the file has no code there.
    pub(crate) fn code(&self, vaddr: u64, size: u64) -> Option<Code<'_>> {
        let executable = self.segments.iter().any(|segment| segment.executable && segment.holds(vaddr));
        if !executable {
            return None;
        }
        let bytes = self.bytes_at(vaddr)?;
        let size = usize::try_from(size.min(LARGEST_FUNCTION)).unwrap_or(usize::MAX);
        Some(Code { vaddr, bytes: bytes.get(..size).unwrap_or(bytes) })
    }

    /// All machine code of the file.
    pub(crate) fn all_code(&self) -> impl Iterator<Item = Code<'_>> {
        self.segments
            .iter()
            .filter(|segment| segment.executable)
            .filter_map(|segment| Some(Code { vaddr: segment.vaddr, bytes: self.bytes_at(segment.vaddr)? }))
    }

    /// Whether the file is a program, not a library: it names a dynamic linker, or has a fixed address.
    pub(crate) fn is_program(&self) -> bool {
        self.file().is_some_and(|file| {
            file.elf_header().e_type(LittleEndian) == elf::ET_EXEC
                || file
                    .elf_program_headers()
                    .iter()
                    .any(|header| header.p_type(LittleEndian) == elf::PT_INTERP)
        })
    }

    /// Whether the file has a table of its local symbols.
    pub(crate) fn has_symbols(&self) -> bool {
        self.file().is_some_and(|file| !file.elf_symbol_table().is_empty())
    }

    /// Whether the file has DWARF of its own.
    pub(crate) fn has_dwarf(&self) -> bool {
        self.file().is_some_and(|file| {
            file.elf_section_table().section_by_name(LittleEndian, b".debug_info").is_some_and(
                |(_, section)| {
                    section.sh_type(LittleEndian) != elf::SHT_NOBITS && section.sh_size(LittleEndian) > 0
                },
            )
        })
    }

    /// Functions of this name, with the compiler's suffixes left aside, in order of address; parts
    /// that were moved away as cold are among them and marked.
    pub(crate) fn functions(&self, name: &str) -> Vec<Symbol> {
        let symbols = self.symbols();
        let hash = hash(name.as_bytes());
        let from = symbols.by_hash.partition_point(|symbol| symbol.hash < hash);
        let mut found: Vec<Symbol> = symbols
            .by_hash
            .iter()
            .skip(from)
            .take_while(|symbol| symbol.hash == hash)
            .filter(|symbol| self.name(symbol.name, symbol.base_len) == name.as_bytes())
            .map(|symbol| self.symbol(symbols, symbol))
            .collect();
        found.sort_by(|a, b| {
            (a.vaddr, a.cold, a.name.len(), &a.name).cmp(&(b.vaddr, b.cold, b.name.len(), &b.name))
        });
        found.dedup_by_key(|symbol| symbol.vaddr);
        found
    }

    /// Names of functions that contain one of `parts`: those with the first of the parts that any has,
    /// the shortest first.
    pub(crate) fn functions_like(&self, parts: &[String], most: usize) -> Vec<String> {
        let mut best = parts.len();
        let mut names: Vec<&[u8]> = Vec::new();
        for symbol in self.symbols().by_hash.iter().filter(|symbol| !symbol.cold) {
            let name = self.name(symbol.name, symbol.base_len);
            // C++ and Rust write their names so; there are very many, and none is a C function's.
            if name.starts_with(b"_Z") || name.starts_with(b"_R") {
                continue;
            }
            let found = parts.iter().take(best + 1).position(|part| contains(name, part.as_bytes()));
            if let Some(rank) = found {
                if rank < best {
                    best = rank;
                    names.clear();
                }
                names.push(name);
            }
        }
        names.sort_by_key(|name| (name.len(), *name));
        names.dedup();
        names.into_iter().take(most).map(|name| String::from_utf8_lossy(name).into_owned()).collect()
    }

    /// The address and size of a data symbol.
    pub(crate) fn object_symbol(&self, name: &str) -> Option<(u64, u64)> {
        let file = self.file()?;
        [file.elf_symbol_table(), file.elf_dynamic_symbol_table()].into_iter().find_map(|table| {
            table
                .symbols()
                .iter()
                .find(|symbol| {
                    symbol.st_type() == elf::STT_OBJECT
                        && symbol.st_shndx(LittleEndian) != elf::SHN_UNDEF
                        && symbol
                            .name(LittleEndian, table.strings())
                            .is_ok_and(|found| found == name.as_bytes())
                })
                .map(|symbol| (symbol.st_value(LittleEndian), symbol.st_size(LittleEndian)))
        })
    }

    /// Addresses of the slots that the dynamic linker fills with the address of an imported function.
    pub(crate) fn import_slots(&self, name: &str) -> Vec<u64> {
        let endian = LittleEndian;
        let Some(file) = self.file() else {
            return Vec::new();
        };
        let table = file.elf_dynamic_symbol_table();
        let mut slots = Vec::new();
        for section in file.elf_section_table().iter() {
            let Ok(Some((relocations, _))) = section.rela(endian, &*self.data) else {
                continue;
            };
            for relocation in relocations {
                let kind = relocation.r_type(endian, false);
                if kind != elf::R_X86_64_JUMP_SLOT && kind != elf::R_X86_64_GLOB_DAT {
                    continue;
                }
                let Some(index) = relocation.symbol(endian, false) else {
                    continue;
                };
                let matches = table
                    .symbol(index)
                    .and_then(|symbol| symbol.name(endian, table.strings()))
                    .is_ok_and(|found| found == name.as_bytes());
                if matches {
                    slots.push(relocation.r_offset(endian));
                }
            }
        }
        slots
    }

    /// Whether the code at an address only jumps through one of these slots.
    pub(crate) fn is_stub(&self, vaddr: u64, slots: &[u64]) -> bool {
        // endbr64, bnd jmp *x(%rip): 4 + 7 bytes.
        self.code(vaddr, 16).and_then(place::stub_slot).is_some_and(|slot| slots.contains(&slot))
    }

    fn name(&self, start: usize, len: u16) -> &[u8] {
        self.data.get(start..start.saturating_add(usize::from(len))).unwrap_or_default()
    }

    fn symbol(&self, symbols: &Symbols, raw: &RawSymbol) -> Symbol {
        let source = (raw.source != 0).then(|| {
            let name = self.data.get(raw.source..).unwrap_or_default();
            let len = nul_terminated(name).map_or(0, <[u8]>::len);
            String::from_utf8_lossy(name.get(..len).unwrap_or_default()).into_owned()
        });
        let next = symbols.starts.partition_point(|start| *start <= raw.vaddr);
        let gap = symbols.starts.get(next).map_or(UNSIZED_FUNCTION, |next| next - raw.vaddr);
        Symbol {
            name: String::from_utf8_lossy(self.name(raw.name, raw.name_len)).into_owned(),
            vaddr: raw.vaddr,
            size: if raw.size == 0 { gap.min(UNSIZED_FUNCTION) } else { raw.size },
            cold: raw.cold,
            source,
        }
    }

    /// The function, or part of one, whose code an address is in, as far as symbols tell.
    pub(crate) fn function_at(&self, vaddr: u64) -> Option<Symbol> {
        let symbols = self.symbols();
        let holds = |symbol: &&RawSymbol| vaddr.checked_sub(symbol.vaddr).is_some_and(|at| at < symbol.size);
        symbols.by_hash.iter().find(holds).map(|symbol| self.symbol(symbols, symbol))
    }

    fn symbols(&self) -> &Symbols {
        self.symbols.get_or_init(|| self.read_symbols())
    }

    fn read_symbols(&self) -> Symbols {
        let endian = LittleEndian;
        let mut found = Vec::new();
        let Some(file) = self.file() else {
            return Symbols { by_hash: found, starts: Vec::new() };
        };
        for table in [file.elf_symbol_table(), file.elf_dynamic_symbol_table()] {
            // Where in the file the table's strings are, so that names need no copies.
            let Some((start, end)) = file
                .elf_section_table()
                .section(table.string_section())
                .ok()
                .and_then(|section| section.file_range(endian))
                .and_then(|(offset, size)| {
                    let end = offset.checked_add(size)?.min(self.data.len() as u64);
                    Some((usize::try_from(offset).ok()?, usize::try_from(end).ok()?))
                })
            else {
                continue;
            };
            let Some(strings) = self.data.get(start..end) else {
                continue;
            };
            let mut source = 0;
            for symbol in table.symbols() {
                let name = symbol.st_name(endian) as usize;
                match symbol.st_type() {
                    elf::STT_FILE => source = if name == 0 { 0 } else { start + name },
                    elf::STT_FUNC if symbol.st_shndx(endian) != elf::SHN_UNDEF => {
                        let Some(text) = strings.get(name..).and_then(nul_terminated) else {
                            continue;
                        };
                        let Some((base, cold)) = base_name(text) else {
                            continue;
                        };
                        let local = symbol.st_bind() == elf::STB_LOCAL;
                        found.push(RawSymbol {
                            hash: hash(base),
                            name: start + name,
                            name_len: text.len() as u16,
                            base_len: base.len() as u16,
                            cold,
                            vaddr: symbol.st_value(endian),
                            size: symbol.st_size(endian),
                            source: if local { source } else { 0 },
                        });
                    }
                    _ => {}
                }
            }
        }
        let mut starts: Vec<u64> = found.iter().map(|symbol| symbol.vaddr).collect();
        starts.sort_unstable();
        found.sort_by_key(|symbol| symbol.hash);
        Symbols { by_hash: found, starts }
    }
}

impl Segment {
    fn holds(&self, vaddr: u64) -> bool {
        vaddr.checked_sub(self.vaddr).is_some_and(|offset| offset < self.size)
    }
}

/// Which ELF files will do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    /// Programs and shared libraries.
    Loadable,
    /// Object files too.
    Any,
}

/// Maps a regular file.
fn read(path: &Path) -> Result<Data, Error> {
    let read = |source| Error::Read { path: path.to_owned(), source };
    // Opening a FIFO would wait for a writer.
    let kind = std::fs::metadata(path).map_err(read)?.file_type();
    if !kind.is_file() {
        let found = if kind.is_dir() {
            "a directory"
        } else if kind.is_fifo() {
            "a pipe"
        } else if kind.is_socket() {
            "a socket"
        } else {
            "a device"
        };
        return Err(Error::NotElf { path: path.to_owned(), found: found.to_owned() });
    }
    let file = File::open(path).map_err(read)?;
    let data = if file.metadata().map_err(read)?.len() == 0 {
        Data::Owned(Vec::new())
    } else {
        // SAFETY: the map is private and only read. A file that somebody truncates meanwhile would
        // fault; executables that run cannot be truncated, and package managers replace files by
        // renaming, which leaves this one as it is.
        Data::Mapped(unsafe { memmap2::Mmap::map(&file) }.map_err(read)?)
    };
    Ok(data)
}

/// Says no to files that are not ELF, or ELF for something else.
fn check_ident(path: &Path, data: &[u8], kinds: Kinds) -> Result<(), Error> {
    if !data.starts_with(&elf::ELFMAG) {
        let found = match data {
            [] => "it is empty".to_owned(),
            [b'#', b'!', ..] => "a script".to_owned(),
            [b'!', b'<', b'a', b'r', b'c', b'h', b'>', ..] => "a static library".to_owned(),
            [0x1f, 0x8b, ..] => "compressed by gzip".to_owned(),
            [0xfd, b'7', b'z', b'X', b'Z', ..] => "compressed by xz".to_owned(),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => "compressed by zstd".to_owned(),
            _ => {
                let start: Vec<String> = data.iter().take(4).map(|b| format!("{b:02x}")).collect();
                format!("it begins with {}", start.join(" "))
            }
        };
        return Err(Error::NotElf { path: path.to_owned(), found });
    }
    let other = |machine: String| Err(Error::OtherMachine { path: path.to_owned(), machine });
    match (data.get(4), data.get(5)) {
        (Some(2), Some(1)) => {}
        (Some(1), _) => return other("a 32-bit machine".to_owned()),
        (_, Some(2)) => return other("a big-endian machine".to_owned()),
        _ => {
            return Err(Error::Malformed {
                path: path.to_owned(),
                what: "the ELF header names neither a class nor a byte order".to_owned(),
            });
        }
    }
    let half = |at: usize| -> Option<u16> {
        let bytes = data.get(at..at + 2)?;
        Some(u16::from_le_bytes([*bytes.first()?, *bytes.get(1)?]))
    };
    let (Some(kind), Some(machine)) = (half(16), half(18)) else {
        return Err(Error::Malformed {
            path: path.to_owned(),
            what: format!("{} bytes are less than an ELF header", data.len()),
        });
    };
    match machine {
        62 => {}
        183 => return other("AArch64".to_owned()),
        243 => return other("RISC-V".to_owned()),
        21 => return other("PowerPC".to_owned()),
        22 => return other("S/390".to_owned()),
        247 => return other("the BPF virtual machine".to_owned()),
        number => return other(format!("machine number {number}")),
    }
    match kind {
        2 | 3 => Ok(()),
        1 if kinds == Kinds::Any => Ok(()),
        1 => other("the linker (an object file, not a program)".to_owned()),
        4 => other("debuggers (a core dump, not a program)".to_owned()),
        number => other(format!("ELF type {number}")),
    }
}

fn os_path(bytes: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    PathBuf::from(std::ffi::OsStr::from_bytes(bytes))
}

/// Decompresses a section of which its header says how long it is.
fn inflate(kind: elf::CompressionType, packed: &[u8], expected: u64) -> Result<Vec<u8>, String> {
    // More than a thousandfold deflate cannot do, and zstd does it with nothing that is worth keeping: what says so
    // lies, and must not take the memory.
    if expected > LARGEST_SECTION || expected / 1032 > packed.len() as u64 {
        return Err(format!("says that its {} bytes decompress to {expected}", packed.len()));
    }
    let limit = usize::try_from(expected).map_err(|error| error.to_string())?;
    let contents = match kind {
        elf::ELFCOMPRESS_ZLIB => miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(packed, limit)
            .map_err(|error| format!("does not decompress: {error}"))?,
        elf::ELFCOMPRESS_ZSTD => unpack_zstd(packed, limit)?,
        _ => {
            return Err(
                "compressed with other than zlib and zstd; run `objcopy --decompress-debug-sections` on the file or \
                 a copy of it"
                    .to_owned(),
            );
        }
    };
    if contents.len() != limit {
        return Err(format!("decompresses to {} bytes instead of {expected}", contents.len()));
    }
    Ok(contents)
}

/// Decompresses one zstd frame, of at most so many bytes.
fn unpack_zstd(packed: &[u8], limit: usize) -> Result<Vec<u8>, String> {
    use std::io::Read;
    let failed = |error: String| format!("does not decompress: {error}");
    let decoder =
        ruzstd::decoding::StreamingDecoder::new(packed).map_err(|error| failed(error.to_string()))?;
    let mut contents = Vec::with_capacity(limit);
    let most = (limit as u64).saturating_add(1);
    decoder.take(most).read_to_end(&mut contents).map_err(|error| failed(error.to_string()))?;
    Ok(contents)
}

/// A C string that is not absurdly long.
fn nul_terminated(bytes: &[u8]) -> Option<&[u8]> {
    let bytes = bytes.get(..LONGEST_NAME).unwrap_or(bytes);
    let len = bytes.iter().position(|byte| *byte == 0)?;
    bytes.get(..len)
}

/// A symbol's name without what compiler and linker appended, and whether that says "cold part".
///
/// None for names that are only a suffix.
fn base_name(name: &[u8]) -> Option<(&[u8], bool)> {
    const SUFFIXES: [&[u8]; 9] = [
        b"isra",
        b"constprop",
        b"part",
        b"lto_priv",
        b"llvm",
        b"cold",
        b"localalias",
        b"specialized",
        b"__uniq",
    ];
    // A symbol version, as in `sendmsg@@GLIBC_2.2.5`.
    let name = name.split(|byte| *byte == b'@').next()?;
    let mut base = name.len();
    let mut cold = false;
    let mut at = 0;
    for part in name.split(|byte| *byte == b'.') {
        // `at` is where the part begins; in front of it is its dot.
        let number = !part.is_empty() && part.iter().all(u8::is_ascii_digit);
        if at > 0 && (base < name.len() || SUFFIXES.contains(&part) || number) {
            base = base.min(at - 1);
            cold |= part == b"cold";
        }
        at += part.len() + 1;
    }
    (base > 0).then(|| (&name[..base], cold))
}

fn contains(name: &[u8], part: &[u8]) -> bool {
    let Some(first) = part.first() else {
        return true;
    };
    let last = (name.len() + 1).saturating_sub(part.len());
    name.iter()
        .take(last)
        .enumerate()
        .any(|(at, byte)| byte == first && name.get(at..).is_some_and(|rest| rest.starts_with(part)))
}

/// FNV-1a: the names are short, and collisions only cost a comparison.
fn hash(name: &[u8]) -> u64 {
    name.iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_of_compilers_are_left_aside() {
        let base = |name: &str| {
            base_name(name.as_bytes()).map(|(base, cold)| (String::from_utf8_lossy(base).into_owned(), cold))
        };
        let is = |name: &str, cold: bool| Some((name.to_owned(), cold));
        assert_eq!(base("f"), is("f", false));
        assert_eq!(base("f.isra.0"), is("f", false));
        assert_eq!(base("f.constprop.0.isra.0"), is("f", false));
        assert_eq!(base("f.part.0.cold"), is("f", true));
        assert_eq!(base("f.cold"), is("f", true));
        assert_eq!(base("f.lto_priv.12"), is("f", false));
        assert_eq!(base("f.llvm.1234567"), is("f", false));
        assert_eq!(base("sendmsg@@GLIBC_2.2.5"), is("sendmsg", false));
        // What clang's linker makes of two functions of one name.
        assert_eq!(base("f.17"), is("f", false));
        assert_eq!(base("f.specialized.1"), is("f", false));
        assert_eq!(base("f."), is("f.", false));
        assert_eq!(base("f.constant"), is("f.constant", false));
        assert_eq!(base(".part.0"), None);
        assert_eq!(base(""), None);
    }
}
