//! SPDK probes: records an SPDK NVMe/TCP target or host with uprobes and a little help of the kernel's own
//! functions. It knows nothing of how a run is stored or reported.
//!
//! [`find`] finds the process, [`Target`] and [`Host`] attach to it and hand commands to a sink, [`survey`]
//! says what each boundary would be taken with. [`resolve`] goes from a program's files to what a probe needs,
//! [`functions`] names what is wanted of them.

mod calibrate;
mod compare;
mod connections;
mod dwarf;
mod elf;
mod error;
pub mod functions;
mod host;
mod inlined;
mod layout;
mod libraries;
mod loader;
#[doc(hidden)]
pub mod measure;
mod messages;
mod offer;
mod place;
mod plan;
mod price;
mod process;
mod queues;
pub mod resolve;
mod ring;
mod slots;
mod target;
mod trace;
mod trace_ring;
mod usdt;

use std::path::{Path, PathBuf};

use run_format::Side;

pub use calibrate::{Calibration, RedZone, calibrate};
pub use compare::{BoundaryChange, Change, Comparison, Taken, Verdict, Weight, What};
pub use error::Error;
pub use host::Host;
pub use inlined::{Base, Place};
pub use layout::Layout;
pub use offer::{
    Build, CopyOffer, Cost, EventOffer, FileOffer, FunctionOffer, Instruction, Offer, PerCommand, PerKind,
    Price, SideOffer, UprobeCost,
};
pub use place::{Class, Emulation, Optimised, Reg};
pub use plan::{Avoid, BoundarySurvey, Detail, RungSurvey, Survey};
pub use price::{Amount, Cost as HitCost, HookClass, PlanPrice, Prices, ring_price};
pub use process::{Choice, Process, candidates, find};
pub use target::Target;
pub use trace::{Structure, Trace};
pub use trace_ring::{Load, Rpc, RpcError, TraceOptions, TraceTarget, load, ring_sends, ring_usable};
pub use usdt::{Semaphore, UsdtArg, UsdtPlace, UsdtSite};

/// How to record.
#[derive(Clone, Debug)]
pub struct Options {
    /// One command in this many is kept, by the hash that both sides share.
    pub one_in: u32,
    /// How much of a command's way is asked for.
    pub detail: Detail,
    /// Bytes of the ring between the programs and this process; rounded up to a power of two.
    pub ring_bytes: u32,
    /// A layout file for a stripped program.
    pub layout: Option<PathBuf>,
    /// A debug file for a stripped program, where it is not installed.
    pub debug_file: Option<PathBuf>,
    /// What not to use, though the kernel has it: for machines whose owner rules, and for tests of the rungs
    /// below.
    pub avoid: Vec<Avoid>,
    /// What hits of hooks cost here, where it was measured: the estimates of each hook are then these.
    pub prices: Option<Prices>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            one_in: 1,
            detail: Detail::Stages,
            ring_bytes: 16 << 20,
            layout: None,
            debug_file: None,
            avoid: Vec::new(),
            prices: None,
        }
    }
}

/// What each boundary of a running process would be taken with, every rung of every ladder tried.
///
/// # Errors
/// As for attaching, but for what only attaching needs.
pub fn survey(process: &Process, side: Side, options: &Options) -> Result<Survey, Error> {
    let set = loader::binaries(process, options.layout.as_deref(), options.debug_file.as_deref())?;
    let survey = process.unless_ended(survey_of(&set, side, options))?;
    // What was not found any more is no fault of the program.
    if process.ended() { Err(Error::ProcessEnded { pid: process.pid }) } else { Ok(survey) }
}

/// What a running process offers to a recording of this side, with what that stands on.
///
/// # Errors
/// As for [`survey`].
pub fn offer(process: &Process, side: Side, options: &Options) -> Result<Offer, Error> {
    let set = loader::binaries(process, options.layout.as_deref(), options.debug_file.as_deref())?;
    let offer = process.unless_ended(Offer::of(&set, side, options))?;
    if process.ended() { Err(Error::ProcessEnded { pid: process.pid }) } else { Ok(offer) }
}

/// The same of a program that need not run.
///
/// # Errors
/// As for [`survey`].
pub fn offer_of_program(program: &Path, side: Side, options: &Options) -> Result<Offer, Error> {
    Offer::of(&open(program, options)?, side, options)
}

/// What each boundary of a program that need not run would be taken with.
///
/// # Errors
/// As for [`survey`].
pub fn survey_program(program: &Path, side: Side, options: &Options) -> Result<Survey, Error> {
    survey_of(&open(program, options)?, side, options)
}

fn open(program: &Path, options: &Options) -> Result<resolve::BinarySet, Error> {
    let mut set = open_with_libraries(program)?;
    loader::dress(&mut set, options.layout.as_deref(), options.debug_file.as_deref())?;
    Ok(set)
}

fn open_with_libraries(program: &Path) -> Result<resolve::BinarySet, Error> {
    let libraries = libraries::Libraries::of(program);
    let files: Vec<PathBuf> = std::iter::once(program.to_owned()).chain(libraries.found.clone()).collect();
    let name = program.display().to_string();
    resolve::BinarySet::open(&name, &files, None).map_err(|error| match error {
        Error::NotSpdk { .. } => libraries.error(program).unwrap_or(error),
        other => other,
    })
}

/// What a layout file for this program and its libraries says; see [`Layout`].
///
/// # Errors
/// When the program can not be read, holds no SPDK, or tells nothing of it.
pub fn layout_of_program(program: &Path, debug_file: Option<&Path>) -> Result<Layout, Error> {
    let mut set = open_with_libraries(program)?;
    loader::dress(&mut set, None, debug_file)?;
    Layout::of_set(&set)
}

fn survey_of(set: &resolve::BinarySet, side: Side, options: &Options) -> Result<Survey, Error> {
    let kernel = plan::Kernel::default();
    match side {
        Side::Target => target::whole_survey(set, options, &kernel),
        Side::Host => host::whole_survey(set, options, &kernel),
    }
}
