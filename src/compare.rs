//! `fabscope compare`: opens the runs, compares them, prints, and maps the gates to an exit code.

use crate::cli::{Compare, CompareFormat};
use crate::exit;
use anyhow::{Context, Result};
use clap::CommandFactory;
use clap::error::ErrorKind;
use joiner::{CompareOptions, Comparison, Failure, Input};
use std::path::PathBuf;
use std::process::ExitCode;

/// Runs `compare`.
///
/// # Errors
/// When a run can not be read or joined, or there is nothing to compare.
pub fn run(options: &Compare) -> Result<ExitCode> {
    let (base, new) = match (&options.runs[..], &options.against[..]) {
        ([base, new], []) => (std::slice::from_ref(base), std::slice::from_ref(new)),
        (_, []) => {
            let wrong = "give BASE and NEW, or several as BASE... --against NEW...";
            crate::cli::Cli::command().error(ErrorKind::WrongNumberOfValues, wrong).exit()
        }
        (base, new) => (base, new),
    };
    let comparison = match compare(base, new, options) {
        Ok(comparison) => comparison,
        Err(error) => {
            // What reads the output as a file is told there too. That it can not be written changes no exit code.
            let failure = Failure::new(exit::text(&error));
            let _ = match options.format {
                CompareFormat::Json => exit::print(&(serde_json::to_string_pretty(&failure)? + "\n")),
                CompareFormat::Junit => exit::print(&failure.to_junit()),
                CompareFormat::Table | CompareFormat::Markdown => Ok(()),
            };
            return Err(error);
        }
    };
    let text = match options.format {
        CompareFormat::Table => comparison.to_table(options.detail),
        CompareFormat::Json => {
            serde_json::to_string_pretty(&comparison).context("write the comparison")? + "\n"
        }
        CompareFormat::Markdown => comparison.to_markdown(),
        CompareFormat::Junit => comparison.to_junit(),
    };
    exit::print(&text)?;
    Ok(exit::of_gates(comparison.outcome()))
}

fn compare(base: &[PathBuf], new: &[PathBuf], options: &Compare) -> Result<Comparison> {
    let mut how = CompareOptions::default();
    how.floor = options.floor;
    how.confidence = options.confidence;
    how.gates.clone_from(&options.gate);
    Ok(joiner::compare(&inputs(base)?, &inputs(new)?, &how)?)
}

fn inputs(given: &[PathBuf]) -> Result<Vec<Input>> {
    given.iter().map(|path| Ok(Input::find(path)?)).collect()
}
