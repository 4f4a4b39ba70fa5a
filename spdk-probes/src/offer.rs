//! What a build offers to a recording, gathered to be shown, kept, and compared with another build's
//! ([`crate::compare`]): the ladders of both sides with their price, and what they stand on, which is functions,
//! arguments, structures, USDT probes and the trace ring.
//!
//! It holds no addresses: they differ from build to build and mean nothing.

use std::collections::BTreeMap;

use run_format::{Ladder, Side, Spot};
use serde::{Deserialize, Serialize};

use crate::dwarf::Argument;
use crate::functions::{self, At, Hits};
use crate::place::{Class, Reg};
use crate::plan::{self, Kernel, PlacedUprobe, Survey};
use crate::resolve::{BinarySet, Knowledge, Member, Version};
use crate::trace::Trace;
use crate::usdt::{UsdtArg, UsdtPlace};
use crate::{Error, Options, host, target};

/// How many instructions of a function's opening are kept.
const OPENING: usize = 4;

/// What a program offers on this kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Release of the kernel that was asked what it can attach to and emulates.
    pub kernel: String,
    /// The side that was asked for.
    #[serde(flatten)]
    pub here: SideOffer,
    /// The other side, where the program has it.
    pub other_side: Option<SideOffer>,
    /// What both stand on.
    pub build: Build,
}

/// What one side can be recorded with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SideOffer {
    /// The side.
    pub side: Side,
    /// Its boundaries, in the order a command passes them.
    pub boundaries: Vec<Ladder>,
    /// What else is watched.
    pub events: Vec<EventOffer>,
    /// What the uprobes of the rungs in use cost.
    pub cost: Cost,
    /// What keeps anything from being recorded; empty where recording works.
    pub obstacles: Vec<String>,
}

/// Something besides commands that a recording sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventOffer {
    /// What it is.
    pub event: String,
    /// With what it is seen, best way first where it is not.
    pub hook: String,
    /// Why it is not; `None` where it is.
    pub why: Option<String>,
    /// Where its uprobes go.
    pub uprobes: Vec<Spot>,
}

/// The estimated price of recording.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Each uprobe that commands hit.
    pub uprobes: Vec<UprobeCost>,
    /// What a command costs by them.
    pub per_command: PerCommand,
}

/// The price of one uprobe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UprobeCost {
    /// Where it goes; of several places the dearest.
    pub at: Spot,
    /// How many places it has: copies of its function, or calls.
    pub places: usize,
    /// What would be at the function's entry, where a uprobe is usually put.
    pub entry: Option<Instruction>,
    /// Hits of a command.
    pub hits: PerKind<u32>,
}

/// Something for each kind of command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PerKind<T> {
    /// A read.
    pub read: T,
    /// A write whose data is in its capsule.
    pub write: T,
    /// A write whose data is asked for by one R2T.
    pub r2t_write: T,
}

/// What the uprobes cost a command.
pub type PerCommand = PerKind<Price>;

/// A price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Price {
    /// How many uprobes are hit.
    pub hits: u32,
    /// Their estimated price, in nanoseconds.
    pub estimated_ns: u32,
    /// The same were each at its function's entry.
    pub at_entry_ns: u32,
}

/// What a program is made of, as far as a recording cares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// What it says that it is.
    pub version: Option<Version>,
    /// Build-id of the file that holds the transport, in hexadecimal.
    pub build_id: Option<String>,
    /// What tells of its functions and structures.
    pub knowledge: Knowledge,
    /// Its files with SPDK in them.
    pub files: Vec<FileOffer>,
    /// The functions of the table of hooks, by name.
    pub functions: BTreeMap<String, FunctionOffer>,
    /// The members that recordings read, by `structure.member`; null where the structure has none. One that is not
    /// in here is not known.
    pub members: BTreeMap<String, Option<Member>>,
    /// The enumerators, by `enumeration.enumerator`, likewise.
    pub enumerators: BTreeMap<String, Option<i64>>,
    /// SPDK's USDT probes: of each place where one fires, its arguments as `size@place`, a minus in front of signed
    /// ones.
    pub usdt: BTreeMap<String, Vec<Vec<String>>>,
    /// The trace ring.
    pub trace: Trace,
}

/// A file of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileOffer {
    /// Its name, without the folder.
    pub name: String,
    /// Its build-id, in hexadecimal.
    pub build_id: Option<String>,
    /// What tells of it.
    pub knowledge: Knowledge,
    /// Its separate debug file.
    pub debug_file: Option<String>,
}

/// A function of the table of hooks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionOffer {
    /// Its copies that can be called; none where it is not there.
    pub copies: Vec<CopyOffer>,
    /// How often it was inlined; none where nothing tells.
    pub inlined: Option<usize>,
    /// Why it is not there.
    pub why: Option<String>,
}

/// A copy of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyOffer {
    /// Its symbol.
    pub symbol: String,
    /// What the compiler added to the name: `isra`, `constprop`, `part`, ...
    pub suffixes: Vec<String>,
    /// In bytes.
    pub size: u64,
    /// Whether parts of it that seldom run lie elsewhere (`.cold`).
    pub cold: bool,
    /// Its first instructions.
    pub opening: Vec<Instruction>,
    /// Where its arguments are at its entry: a register, `elsewhere` or `unknown`. By convention, only those that a
    /// hook reads.
    pub arguments: Vec<String>,
    /// What tells so: `dwarf`, or the calling `convention`.
    pub arguments_by: String,
}

/// An instruction, and what a uprobe on it costs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instruction {
    /// As assembly; of a branch the mnemonic.
    pub instruction: String,
    /// What the kernel does: `nop5`, `emulated` or `single-step`.
    pub class: String,
    /// Estimated price of a hit, in nanoseconds.
    pub estimated_ns: u32,
}

impl Instruction {
    fn new((instruction, class): (String, Class)) -> Instruction {
        Instruction { instruction, class: class.name().to_owned(), estimated_ns: class.estimated_ns() }
    }
}

impl Offer {
    /// What these files offer on this side, and on the other where they have it.
    pub(crate) fn of(set: &BinarySet, side: Side, options: &Options) -> Result<Offer, Error> {
        let kernel = Kernel::default();
        let survey = |side| match side {
            Side::Target => target::whole_survey(set, options, &kernel),
            Side::Host => host::whole_survey(set, options, &kernel),
        };
        let here = SideOffer::of(set, &survey(side)?);
        let other = match side {
            Side::Target => Side::Host,
            Side::Host => Side::Target,
        };
        // Most programs have one side only.
        let other_side = survey(other).ok().map(|survey| SideOffer::of(set, &survey));
        let release = nix::sys::utsname::uname()
            .map(|name| name.release().to_string_lossy().into_owned())
            .unwrap_or_default();
        Ok(Offer { kernel: release, here, other_side, build: Build::of(set) })
    }
}

impl SideOffer {
    fn of(set: &BinarySet, survey: &Survey) -> SideOffer {
        let events = functions::events(survey.side)
            .iter()
            .zip(&survey.events)
            .map(|(event, (hook, outcome))| EventOffer {
                event: event.program.to_owned(),
                hook: hook.clone(),
                why: outcome.as_ref().err().cloned(),
                uprobes: outcome.iter().flatten().map(plan::spot).collect(),
            })
            .collect();
        SideOffer {
            side: survey.side,
            boundaries: survey.boundaries.iter().map(plan::BoundarySurvey::ladder).collect(),
            events,
            cost: Cost::of(set, survey),
            obstacles: survey.obstacles.clone(),
        }
    }
}

impl Cost {
    fn of(set: &BinarySet, survey: &Survey) -> Cost {
        let uprobes: Vec<UprobeCost> =
            survey.chosen_uprobes().into_iter().filter_map(|uprobe| UprobeCost::of(set, uprobe)).collect();
        let sum = |hits: fn(&PerKind<u32>) -> u32| {
            uprobes.iter().fold(Price::default(), |sum, uprobe| {
                let hits = hits(&uprobe.hits);
                let entry = uprobe.entry.as_ref().map_or(uprobe.at.estimated_ns, |entry| entry.estimated_ns);
                Price {
                    hits: sum.hits + hits,
                    estimated_ns: sum.estimated_ns + hits * uprobe.at.estimated_ns,
                    at_entry_ns: sum.at_entry_ns + hits * entry,
                }
            })
        };
        let per_command =
            PerKind { read: sum(|h| h.read), write: sum(|h| h.write), r2t_write: sum(|h| h.r2t_write) };
        Cost { uprobes, per_command }
    }
}

impl UprobeCost {
    fn of(set: &BinarySet, uprobe: &PlacedUprobe) -> Option<UprobeCost> {
        let at = uprobe.sites.iter().max_by_key(|site| site.estimated_ns)?;
        let Hits { read, write, r2t_write } = functions::hits(&uprobe.wanted);
        // A function of a library that is not SPDK's has its entry elsewhere: then the caller's.
        let functions = [
            Some(uprobe.wanted.function),
            match uprobe.wanted.at {
                At::CallsIn(caller) | At::OnlyCallsIn(caller) => Some(caller),
                At::Entry | At::EmulatedEntry | At::CallsBut(_) => None,
            },
        ];
        let entry = functions.into_iter().flatten().find_map(|name| {
            let function = plan::from_source(set.resolve_function(name).ok()?, uprobe.wanted.source);
            let openings = set.binaries().iter().flat_map(|binary| {
                let of_file = function.copies.iter().filter(|copy| copy.binary == binary.path());
                of_file.flat_map(|copy| binary.opening(copy, 1))
            });
            openings.max_by_key(|(_, class)| *class).map(Instruction::new)
        });
        Some(UprobeCost {
            at: plan::spot(at),
            places: uprobe.sites.len(),
            entry,
            hits: PerKind { read, write, r2t_write },
        })
    }
}

impl Build {
    fn of(set: &BinarySet) -> Build {
        let files: Vec<FileOffer> = set
            .binaries()
            .iter()
            .map(|binary| FileOffer {
                name: binary.path().file_name().unwrap_or_default().to_string_lossy().into_owned(),
                build_id: binary.build_id_text(),
                knowledge: binary.knowledge(),
                debug_file: binary.debug_file().map(|path| path.display().to_string()),
            })
            .collect();
        let knowledge = files.iter().map(|file| file.knowledge).max().unwrap_or(Knowledge::Nothing);
        let functions =
            functions::functions().map(|name| (name.to_owned(), function(set, name, knowledge))).collect();
        let members = functions::members()
            .filter_map(|path| Some((path.to_owned(), known(set.offset(path), knowledge)?)))
            .collect();
        let enumerators = functions::enumerators()
            .filter_map(|(enumeration, enumerator)| {
                let value = known(set.enumerator(enumeration, enumerator), knowledge)?;
                Some((format!("{enumeration}.{enumerator}"), value))
            })
            .collect();
        let mut usdt: BTreeMap<String, Vec<Vec<String>>> = BTreeMap::new();
        for site in set.binaries().iter().flat_map(|binary| binary.usdt_probes("spdk")) {
            let arguments = site.args.iter().map(|argument| usdt_argument(argument.as_ref())).collect();
            usdt.entry(format!("{}:{}", site.provider, site.name)).or_default().push(arguments);
        }
        usdt.values_mut().for_each(|sites| sites.sort());
        Build {
            version: set.version(),
            build_id: set.build_id().map(crate::resolve::hex),
            knowledge,
            files,
            functions,
            members,
            enumerators,
            usdt,
            trace: Trace::of(set),
        }
    }
}

/// What is known: the thing, or that it is not there; none where nothing tells.
fn known<T>(answer: Result<T, Error>, knowledge: Knowledge) -> Option<Option<T>> {
    match answer {
        Ok(found) => Some(Some(found)),
        Err(
            Error::NoMember { .. }
            | Error::NoType { .. }
            | Error::NoEnumerator { .. }
            | Error::NotInside { .. },
        ) => Some(None),
        // A layout file holds all that the table wants and the build has.
        Err(Error::NoDebugInformation { .. }) if knowledge == Knowledge::Layout => Some(None),
        Err(_) => None,
    }
}

fn function(set: &BinarySet, name: &str, knowledge: Knowledge) -> FunctionOffer {
    let inlined = set.inlined_copies(name).ok().map(|places| places.len());
    let inlined = inlined.filter(|_| knowledge >= Knowledge::Layout);
    let function = match set.resolve_function(name) {
        Ok(function) => function,
        Err(error) => {
            let why = match error {
                // A layout file holds all that the table wants and the build has.
                Error::Stripped { .. } if knowledge == Knowledge::Layout => {
                    format!("the layout file has no function `{name}`")
                }
                error => error.to_string(),
            };
            return FunctionOffer { copies: Vec::new(), inlined, why: Some(why) };
        }
    };
    let mut copies = Vec::new();
    for binary in set.binaries() {
        for copy in function.copies.iter().filter(|copy| copy.binary == binary.path()) {
            let (arguments, by) = match binary.arguments(name, copy) {
                Some(arguments) => (arguments.iter().map(argument).collect(), "dwarf"),
                None => {
                    let read = functions::read_at_entry(name);
                    (read.into_iter().map(Reg::name).map(str::to_owned).collect(), "convention")
                }
            };
            let numbers = |part: &&str| part.chars().any(|c| !c.is_ascii_digit());
            copies.push(CopyOffer {
                symbol: copy.symbol.clone(),
                suffixes: copy.symbol.split('.').skip(1).filter(numbers).map(str::to_owned).collect(),
                size: copy.size,
                cold: !copy.cold.is_empty(),
                opening: binary.opening(copy, OPENING).into_iter().map(Instruction::new).collect(),
                arguments,
                arguments_by: by.to_owned(),
            });
        }
    }
    FunctionOffer { copies, inlined, why: None }
}

fn argument(argument: &Argument) -> String {
    match argument {
        Argument::Register(register) => register.name().to_owned(),
        Argument::Elsewhere => "elsewhere".to_owned(),
        Argument::Unknown => "unknown".to_owned(),
    }
}

/// `8@rbx`, `-4@$0`, `4@16(rdi)`; `?` for what is written in a way not known here.
fn usdt_argument(argument: Option<&UsdtArg>) -> String {
    let Some(UsdtArg { size, signed, place }) = argument else {
        return "?".to_owned();
    };
    let sign = if *signed { "-" } else { "" };
    let place = match place {
        UsdtPlace::Register { register, shift: 0 } => register.name().to_owned(),
        UsdtPlace::Register { register, shift } => format!("{register}>>{shift}"),
        UsdtPlace::Constant(value) => format!("${value}"),
        UsdtPlace::Memory { offset, base, index } => {
            let mut inside: Vec<String> = base.iter().map(|base| base.name().to_owned()).collect();
            inside.extend(index.iter().map(|(register, scale)| format!("{register}*{scale}")));
            format!("{offset}({})", inside.join("+"))
        }
        UsdtPlace::Symbol { name, offset } => format!("{offset}({name})"),
    };
    format!("{sign}{size}@{place}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_usdt_probes_are_written_shortly() {
        let text = |signed, place| usdt_argument(Some(&UsdtArg { size: 4, signed, place }));
        assert_eq!(text(false, UsdtPlace::Register { register: Reg::Rbx, shift: 0 }), "4@rbx");
        assert_eq!(text(true, UsdtPlace::Constant(-1)), "-4@$-1");
        let memory = UsdtPlace::Memory { offset: 8, base: Some(Reg::Rdi), index: Some((Reg::Rax, 4)) };
        assert_eq!(text(false, memory), "4@8(rdi+rax*4)");
        assert_eq!(usdt_argument(None), "?");
    }

    #[test]
    fn what_a_hook_reads_is_told_by_the_table() {
        assert_eq!(functions::read_at_entry("nvmf_tcp_req_process"), [Reg::Rsi]);
        assert_eq!(functions::read_at_entry("nvme_tcp_qpair_write_pdu"), [Reg::Rdi, Reg::Rsi, Reg::Rcx]);
        assert!(functions::read_at_entry("sendmsg").is_empty());
    }
}
