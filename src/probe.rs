//! `fabscope probe host|target`: shows what each boundary would be taken with and why, and compares it with what
//! an earlier build offered. Attaches nothing.

mod document;
mod table;

use crate::cli::{Format, Probe, ProbeCommon, ProbeSide};
use crate::exit::{self, print, say};
use crate::software::{self, Software, parse_choice};
use anyhow::{Result, bail};
use document::{Baseline, ComparisonDocument, Document};
use run_format::Side;
use spdk_probes::{Calibration, Choice, Options};
use std::path::Path;
use std::process::ExitCode;

/// The JSON schema of what `probe --format json` prints.
pub const SCHEMA: &str = include_str!("probe/schema.json");
/// The JSON schema of what `probe --baseline FILE --format json` prints.
pub const COMPARISON_SCHEMA: &str = include_str!("probe/comparison-schema.json");

/// Runs `probe`.
///
/// # Errors
/// When there is nothing to look at, or it can not be read; when the baseline is none of this side.
pub fn run(what: &Probe) -> Result<ExitCode> {
    let (side, ProbeSide { kernel, common }) = match what {
        Probe::Host(options) => (Side::Host, options),
        Probe::Target(options) => (Side::Target, options),
    };
    // A baseline that is none needs no look at the program.
    let baseline = common.baseline.as_deref().map(|file| Baseline::read(file, side)).transpose()?;
    let new = document(side, *kernel, common)?;
    let Some(baseline) = baseline else {
        print(&match common.format.format {
            Format::Json => serde_json::to_string_pretty(&new)? + "\n",
            Format::Table => table::of_document(&new, common.detail),
        })?;
        return Ok(if new.obstacles.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    };
    let comparison = ComparisonDocument::of(&baseline, &new)?;
    print(&match common.format.format {
        Format::Json => serde_json::to_string_pretty(&comparison)? + "\n",
        Format::Table => table::of_comparison(&comparison, common.detail),
    })?;
    Ok(match (comparison.comparison.holds, new.obstacles.is_empty()) {
        (false, _) => ExitCode::from(exit::GATE),
        (true, true) => ExitCode::SUCCESS,
        // It could not be recorded before either.
        (true, false) => ExitCode::FAILURE,
    })
}

/// What the software that is meant offers.
fn document(side: Side, kernel: bool, common: &ProbeCommon) -> Result<Document> {
    let options = Options {
        layout: common.layout.clone(),
        debug_file: common.debug_file.clone(),
        ..Options::default()
    };
    // Two builds are compared at prices that are the same on every machine.
    let calibration = common.baseline.is_none().then(|| spdk_probes::calibrate(&options));
    // A program file need not run.
    if let Some(choice) = common.spdk.as_deref()
        && let Choice::Path(program) = parse_choice(choice)?
    {
        let offer = spdk_probes::offer_of_program(&program, side, &options)?;
        // The layout is written last: of a program that is none, nothing is.
        if let Some(file) = &common.save_layout {
            save_layout(&program, common.debug_file.as_deref(), file)?;
        }
        return Ok(Document::of_spdk(program.display().to_string(), offer, calibration.as_ref()));
    }
    if common.save_layout.is_some() {
        bail!("--save-layout reads a program file: give its path with --spdk PATH");
    }
    let software = match software::find(side, kernel, common.spdk.as_deref()) {
        // Who has no rights to look into processes may still ask for the kernel's host.
        Err(error) if side == Side::Host && common.spdk.is_none() && lacks_rights(&error) => Software::Kernel,
        found => found?,
    };
    match software {
        Software::Spdk(process) => {
            let of = format!("process {} ({})", process.pid, process.path.display());
            Ok(Document::of_spdk(of, spdk_probes::offer(&process, side, &options)?, calibration.as_ref()))
        }
        Software::Kernel if common.layout.is_some() || common.debug_file.is_some() => {
            bail!("--layout and --debug-file are for an SPDK program: name it with --spdk")
        }
        Software::Kernel if common.baseline.is_some() => {
            bail!("--baseline compares builds of SPDK: name the new one with --spdk")
        }
        Software::Kernel => {
            let calibration = calibration.unwrap_or_else(|| Calibration::none("builds are compared"));
            Ok(Document::of_kernel(&kernel_probes::survey(side)?, &calibration))
        }
    }
}

fn lacks_rights(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(spdk_probes::Error::Privilege { .. }))
}

fn save_layout(program: &Path, debug_file: Option<&Path>, file: &Path) -> Result<()> {
    let layout = spdk_probes::layout_of_program(program, debug_file)?;
    layout.save(file)?;
    let more = match layout.files() - 1 {
        0 => String::new(),
        more => format!(" and of {more} more of its files"),
    };
    say(&format!("{}: layout of build-id {}{more}", file.display(), layout.build_id()));
    Ok(())
}
