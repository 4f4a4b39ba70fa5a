//! The layout file: what a debug build says of functions and structures, kept for the stripped build
//! that has the same build-id. Written by `fabscope probe target --save-layout`.
//!
//! It holds no instructions: where a probe goes is decided on the stripped file's own code.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::dwarf::Argument;
use crate::functions;
use crate::inlined::InlinedSite;
use crate::resolve::{Binary, BinarySet, Function, Member, hex};

/// The format's name; another number means that older readers cannot read it.
const FORMAT: &str = "fabscope-layout/1";

/// More than this no layout file has.
const LARGEST_FILE: u64 = 16 << 20;

/// What is known of one build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    format: String,
    /// In hexadecimal.
    build_id: String,
    /// The version that the program states, for people.
    version: Option<String>,
    functions: BTreeMap<String, Function>,
    /// Where functions were inlined; a function that is not in here was not asked for.
    inlined: BTreeMap<String, Vec<u64>>,
    /// More of those places, and how many of them have no code left.
    #[serde(default)]
    places: BTreeMap<String, (Vec<InlinedSite>, usize)>,
    members: BTreeMap<String, Member>,
    enumerators: BTreeMap<String, BTreeMap<String, i64>>,
    /// Where the arguments of each copy of a function are at its entry, by its address.
    #[serde(default)]
    arguments: BTreeMap<String, BTreeMap<u64, Vec<Argument>>>,
    /// The structures of SPDK's trace ring: size and members.
    #[serde(default)]
    trace: BTreeMap<String, (u64, Vec<(String, Member)>)>,
    /// The same of the program's other files, where it is of several.
    #[serde(default)]
    others: Vec<Layout>,
    /// The file that messages name.
    #[serde(skip)]
    path: std::path::PathBuf,
}

impl Layout {
    /// Gathers everything that the table of hooks wants and the binary has.
    pub(crate) fn of(binary: &Binary) -> Result<Layout, Error> {
        let build_id =
            binary.build_id_text().ok_or_else(|| Error::NoBuildId { path: binary.path().to_owned() })?;
        let mut layout = Layout {
            format: FORMAT.to_owned(),
            build_id,
            version: binary.version().map(|version| version.text),
            functions: BTreeMap::new(),
            inlined: BTreeMap::new(),
            places: BTreeMap::new(),
            members: BTreeMap::new(),
            enumerators: BTreeMap::new(),
            arguments: BTreeMap::new(),
            trace: BTreeMap::new(),
            others: Vec::new(),
            path: Path::new("(made now)").to_owned(),
        };
        for name in functions::functions() {
            if let Ok(function) = binary.resolve_function(name) {
                let known: BTreeMap<u64, Vec<Argument>> = function
                    .copies
                    .iter()
                    .filter_map(|copy| Some((copy.vaddr, binary.arguments(name, copy)?)))
                    .collect();
                if !known.is_empty() {
                    layout.arguments.insert(name.to_owned(), known);
                }
                layout.functions.insert(name.to_owned(), function);
            }
            if let Ok(places) = binary.inlined_copies(name) {
                layout.inlined.insert(name.to_owned(), places);
                layout.places.insert(name.to_owned(), binary.places_for_layout(name));
            }
        }
        for path in functions::members() {
            if let Ok(member) = binary.offset(path) {
                layout.members.insert(path.to_owned(), member);
            }
        }
        for (enumeration, enumerator) in functions::enumerators() {
            if let Ok(value) = binary.enumerator(enumeration, enumerator) {
                layout
                    .enumerators
                    .entry(enumeration.to_owned())
                    .or_default()
                    .insert(enumerator.to_owned(), value);
            }
        }
        for name in functions::TRACE_STRUCTURES {
            if let Some(structure) = binary.structure(name) {
                layout.trace.insert((*name).to_owned(), structure);
            }
        }
        if layout.functions.is_empty() && layout.members.is_empty() {
            // A stripped program says nothing, and is SPDK all the same.
            let stripped = functions::telling_functions()
                .filter_map(|name| binary.resolve_function(name).err())
                .find(|error| matches!(error, Error::Stripped { .. } | Error::NoDebugInformation { .. }));
            return Err(match stripped {
                Some(error) if binary.holds_spdk() => error,
                _ => Error::NotSpdk { name: binary.path().display().to_string(), files: 1 },
            });
        }
        Ok(layout)
    }

    /// Gathers it of all files of a program. Those that tell nothing, or have no build-id, are left out, unless all
    /// are so.
    pub(crate) fn of_set(set: &BinarySet) -> Result<Layout, Error> {
        let mut failed = None;
        let mut layouts = set.binaries().iter().filter_map(|binary| {
            Layout::of(binary).map_err(|error| failed = failed.take().or(Some(error))).ok()
        });
        let first = layouts.next();
        let others: Vec<Layout> = layouts.collect();
        match (first, failed) {
            (Some(first), _) => Ok(Layout { others, ..first }),
            (None, Some(error)) => Err(error),
            (None, None) => Err(Error::NotSpdk { name: set.name().to_owned(), files: 0 }),
        }
    }

    /// The part that is of this build; the first where none is, which says so.
    pub(crate) fn for_build(mut self, build_id: Option<&[u8]>) -> Layout {
        let wanted = build_id.map(hex);
        let others = std::mem::take(&mut self.others);
        let path = self.path.clone();
        match others.into_iter().find(|other| Some(&other.build_id) == wanted.as_ref()) {
            Some(other) => Layout { path, ..other },
            None => self,
        }
    }

    /// How many files it is of.
    pub fn files(&self) -> usize {
        1 + self.others.len()
    }

    /// Reads a layout file.
    pub fn load(path: &Path) -> Result<Layout, Error> {
        let read = |source| Error::Read { path: path.to_owned(), source };
        let unusable = |what: String| Error::Layout { path: path.to_owned(), what };
        let metadata = std::fs::metadata(path).map_err(read)?;
        if !metadata.is_file() {
            return Err(unusable("not a file".to_owned()));
        }
        if metadata.len() > LARGEST_FILE {
            return Err(unusable(format!("{} bytes are too many for one", metadata.len())));
        }
        let text = std::fs::read(path).map_err(read)?;
        let mut layout = Self::parse(&text).map_err(unusable)?;
        path.clone_into(&mut layout.path);
        Ok(layout)
    }

    /// Reads a layout file's contents; the error says what is wrong with them.
    fn parse(text: &[u8]) -> Result<Layout, String> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
        }
        let head: Head =
            serde_json::from_slice(text).map_err(|error| format!("it does not say its format ({error})"))?;
        if head.format != FORMAT {
            return Err(format!("its format is {:?}, this fabscope reads {FORMAT:?}", head.format));
        }
        serde_json::from_slice(text).map_err(|error| error.to_string())
    }

    /// Writes the layout file: aside first, then renamed, so that it is whole or not there. What is there and is
    /// no file, such as `/dev/stdout`, is written to: renaming would replace the device.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let failed = |source| Error::Write { path: path.to_owned(), source };
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| Error::Layout { path: path.to_owned(), what: error.to_string() })?;
        if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            return std::fs::write(path, text + "\n").map_err(failed);
        }
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".{}.tmp", std::process::id()));
        let aside = Path::new(&aside);
        std::fs::write(aside, text + "\n").and_then(|()| std::fs::rename(aside, path)).map_err(|error| {
            // Best effort: the write's own error is what matters.
            let _ = std::fs::remove_file(aside);
            failed(error)
        })
    }

    /// The build it belongs to, in hexadecimal.
    pub fn build_id(&self) -> &str {
        &self.build_id
    }

    /// Says no to a binary of another build.
    pub(crate) fn check(&self, path: &Path, build_id: Option<&[u8]>) -> Result<(), Error> {
        let ours = build_id.map_or_else(|| "without a build-id".to_owned(), hex);
        if ours == self.build_id {
            return Ok(());
        }
        Err(Error::OtherLayout {
            layout: self.path.clone(),
            path: path.to_owned(),
            theirs: self.build_id.clone(),
            ours,
        })
    }

    pub(crate) fn function(&self, name: &str) -> Option<&Function> {
        self.functions.get(name)
    }

    pub(crate) fn inlined(&self, name: &str) -> Option<&[u64]> {
        self.inlined.get(name).map(Vec::as_slice)
    }

    /// Where a function was inlined: how often, where, and at how many places nothing is left.
    pub(crate) fn places(&self, name: &str) -> Option<(usize, &[InlinedSite], usize)> {
        match self.places.get(name) {
            Some((sites, vanished)) => Some((sites.len() + vanished, sites, *vanished)),
            None => self.inlined.get(name).map(|places| (places.len(), [].as_slice(), 0)),
        }
    }

    /// Where any function was inlined.
    pub(crate) fn inlined_entries(&self) -> impl Iterator<Item = u64> {
        self.places.values().flat_map(|(sites, _)| sites).map(|site| site.entry)
    }

    pub(crate) fn arguments(&self, name: &str, entry: u64) -> Option<&[Argument]> {
        self.arguments.get(name)?.get(&entry).map(Vec::as_slice)
    }

    pub(crate) fn trace_structure(&self, name: &str) -> Option<&(u64, Vec<(String, Member)>)> {
        self.trace.get(name)
    }

    pub(crate) fn member(&self, path: &str) -> Option<&Member> {
        self.members.get(path)
    }

    pub(crate) fn enumerator(&self, enumeration: &str, enumerator: &str) -> Option<i64> {
        self.enumerators.get(enumeration)?.get(enumerator).copied()
    }
}
