//! `fabscope report`: opens the runs, joins them where there are two, and prints.

use crate::cli::{By, Format, Report as Options};
use crate::exit;
use crate::progress::Reading;
use anyhow::{Result, bail};
use joiner::{Bounds, GroupBy, Input, JoinOptions, Report, ReportOptions};
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
        slowest: options.slowest,
        histograms: false,
    };
    let reading = Reading::new();
    let how = How {
        report: how,
        bounds: Bounds { memory: options.memory, progress: &|done, of| reading.update(done, of) },
    };
    let report = match &options.second {
        Some(second) => {
            let (host, target) = host_first(Run::open(&options.first)?, Run::open(second)?);
            joined(&host, &target, &how)?
        }
        None => match Run::open(&options.first) {
            Ok(run) => alone(&run, &how)?,
            // A directory that holds a pair, as compare takes it.
            Err(error @ run_format::Error::NotARun(_)) => {
                let input = Input::find(&options.first).map_err(|_| error)?;
                match (input.host(), input.target()) {
                    (Some(host), Some(target)) => joined(host, target, &how)?,
                    (Some(run), None) | (None, Some(run)) => alone(run, &how)?,
                    (None, None) => bail!("{}: no run is in it", options.first.display()),
                }
            }
            Err(error) => return Err(error.into()),
        },
    };
    reading.finish();
    print(&report, options.format.format)?;
    Ok(ExitCode::SUCCESS)
}

/// What to report, within what.
struct How<'a> {
    report: ReportOptions,
    bounds: Bounds<'a>,
}

/// The report of one side.
fn alone(run: &Run, how: &How<'_>) -> Result<Report> {
    Ok(joiner::report_alone_within(run, &how.report, &how.bounds)?)
}

/// A pair that was given in either order. Two of the same side are the joiner's to refuse.
pub fn host_first(first: Run, second: Run) -> (Run, Run) {
    let swapped = first.manifest().side == Side::Target && second.manifest().side == Side::Host;
    if swapped { (second, first) } else { (first, second) }
}

/// The report of a pair.
fn joined(host: &Run, target: &Run, how: &How<'_>) -> Result<Report> {
    Ok(joiner::report_within(host, target, &JoinOptions::default(), &how.report, &how.bounds)?)
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
