//! `fabscope report`: opens the runs, joins them where there are two, and prints.

use crate::cli::{By, Format, Report as Options};
use crate::exit;
use anyhow::Result;
use joiner::{GroupBy, JoinOptions, Report, ReportOptions};
use run_format::{Run, Side};
use std::process::ExitCode;

/// Runs `report`.
///
/// # Errors
/// When a run can not be read, the two can not be joined, or there is too little to say.
pub fn run(options: &Options) -> Result<ExitCode> {
    let how = ReportOptions {
        group_by: match options.by {
            By::Class => GroupBy::Class,
            By::Queue => GroupBy::Queue,
            By::Device => GroupBy::Device,
            By::Cpu => GroupBy::Cpu,
        },
        detail: options.detail,
    };
    let first = Run::open(&options.first)?;
    let report = match &options.second {
        Some(second) => joined(&first, &Run::open(second)?, &how)?,
        None => match first.manifest().side {
            Side::Host => joiner::host_report(&first, &how)?,
            Side::Target => joiner::target_report(&first, &how)?,
        },
    };
    print(&report, options.format.format)?;
    Ok(ExitCode::SUCCESS)
}

/// The report of a pair, given in either order. Two of the same side are the joiner's to refuse.
fn joined(first: &Run, second: &Run, how: &ReportOptions) -> Result<Report> {
    let swapped = first.manifest().side == Side::Target && second.manifest().side == Side::Host;
    let (host, target) = if swapped { (second, first) } else { (first, second) };
    Ok(joiner::report(&joiner::join(host, target, &JoinOptions::default())?, how)?)
}

/// Prints a report.
///
/// # Errors
/// When standard output can not be written.
pub fn print(report: &Report, format: Format) -> Result<()> {
    let mut text = match format {
        Format::Table => report.to_table(),
        Format::Json => serde_json::to_string_pretty(report)?,
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    exit::print(&text)
}
