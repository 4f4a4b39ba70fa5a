//! `fabscope record host|target`: chooses the source, attaches it, and records.

use crate::cli::{Record, RecordCommon, RecordHost, RecordTarget};
use crate::recorder::{self, Plan};
use crate::signals::Signals;
use crate::workload;
use anyhow::{Result, bail};
use run_format::{RunWriter, Side};
use spdk_probes::Choice;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs `record`.
///
/// # Errors
/// When nothing can be recorded, with what is missing and what to do; or when the recording could not be
/// written.
pub fn run(what: &Record) -> Result<ExitCode> {
    // Signals are caught before anything is attached, so that Ctrl-C always ends in order.
    let signals = Signals::catch()?;
    let (side, common) = match what {
        Record::Host(options) => (Side::Host, &options.common),
        Record::Target(options) => (Side::Target, &options.common),
    };
    // What the recording would fail at later is refused before the system under test is touched, and before
    // --force removes anything.
    RunWriter::may_create(output(common, side), common.force)?;
    workload::check(&common.command)?;
    match what {
        Record::Host(options) => host(options, &signals),
        Record::Target(options) => target(options, &signals),
    }
}

fn host(options: &RecordHost, signals: &Signals) -> Result<ExitCode> {
    let common = &options.common;
    let process = match (&common.spdk, options.kernel) {
        (_, true) => None,
        (Some(choice), _) => Some(spdk_probes::find(Side::Host, &parse_choice(choice))?),
        (None, false) => found_by_itself()?,
    };
    let plan = plan(common, Side::Host);
    match process {
        Some(process) => {
            let source = spdk_probes::Host::attach(&process, &spdk_options(common))?;
            recorder::record(source, &plan, signals)
        }
        None => {
            if common.debug_file.is_some() {
                bail!(
                    "--debug-file is for an SPDK program, and the kernel's driver would be recorded: name the program with --spdk, or leave --debug-file out"
                );
            }
            let options = kernel_probes::Options {
                one_in: common.sample,
                ring_bytes: ring_bytes(common),
                ..kernel_probes::Options::default()
            };
            recorder::record(kernel_probes::Host::attach(&options)?, &plan, signals)
        }
    }
}

fn target(options: &RecordTarget, signals: &Signals) -> Result<ExitCode> {
    let common = &options.common;
    let choice = common.spdk.as_deref().map_or(Choice::Only, parse_choice);
    let process = spdk_probes::find(Side::Target, &choice)?;
    let source = spdk_probes::Target::attach(&process, &spdk_options(common))?;
    recorder::record(source, &plan(common, Side::Target), signals)
}

/// The host when neither `--kernel` nor `--spdk` is given: an SPDK process that uses NVMe/TCP, else the
/// kernel's driver (`None`); where both are there, both are named.
fn found_by_itself() -> Result<Option<spdk_probes::Process>> {
    let kernel = kernel_controllers();
    match spdk_probes::find(Side::Host, &Choice::Only) {
        Ok(process) if kernel.is_empty() => Ok(Some(process)),
        Ok(process) => bail!(
            "two hosts are here: SPDK in process {} ({}) and the kernel's {}: choose with --spdk or --kernel",
            process.pid,
            process.path.display(),
            kernel.join(", ")
        ),
        Err(spdk_probes::Error::NoProcess { .. }) => Ok(None),
        // Whether SPDK runs can not be known, and the kernel's driver does.
        Err(spdk_probes::Error::Privilege { .. }) if !kernel.is_empty() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The kernel's NVMe/TCP controllers, by name.
fn kernel_controllers() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/sys/class/nvme") else { return Vec::new() };
    entries
        .flatten()
        .filter(|e| std::fs::read_to_string(e.path().join("transport")).is_ok_and(|t| t.trim() == "tcp"))
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

/// What `--spdk` says: nothing, a PID or a path.
pub fn parse_choice(text: &OsStr) -> Choice {
    if text.is_empty() {
        Choice::Only
    } else if let Some(pid) = text.to_str().and_then(|text| text.parse().ok()) {
        Choice::Pid(pid)
    } else {
        Choice::Path(PathBuf::from(text))
    }
}

fn spdk_options(common: &RecordCommon) -> spdk_probes::Options {
    spdk_probes::Options {
        one_in: common.sample,
        ring_bytes: ring_bytes(common),
        layout: common.layout.clone(),
        debug_file: common.debug_file.clone(),
        ..spdk_probes::Options::default()
    }
}

fn ring_bytes(common: &RecordCommon) -> u32 {
    // The kernel takes a power of two.
    common.ring_mib.next_power_of_two() << 20
}

fn output(common: &RecordCommon, side: Side) -> &Path {
    match (&common.output, side) {
        (Some(output), _) => output,
        (None, Side::Host) => Path::new("host.run"),
        (None, Side::Target) => Path::new("target.run"),
    }
}

fn plan(common: &RecordCommon, side: Side) -> Plan<'_> {
    Plan {
        output: output(common, side),
        force: common.force,
        duration: common.duration,
        one_in: common.sample,
        labels: common.label.iter().cloned().collect(),
        command: &common.command,
        quiet: common.quiet,
    }
}
