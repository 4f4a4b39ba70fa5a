//! `fabscope batch`: many runs to one table, with progress, until it is done or a signal ends it.

use crate::cli::{Batch as Options, Format};
use crate::exit;
use crate::progress::Pairs;
use crate::signals::Signals;
use anyhow::{Context, Result};
use joiner::BatchOptions;
use std::process::ExitCode;

/// Runs `batch`.
///
/// # Errors
/// When a directory or the label is not there, nothing can be reported, the output can not be written, or a signal
/// came.
pub fn run(options: &Options) -> Result<ExitCode> {
    let signals = Signals::catch()?;
    let pairs = Pairs::new(options.quiet);
    let out = options.output.display();
    let mut how = BatchOptions {
        by: options.by.clone(),
        memory: options.memory,
        floor: options.floor,
        progress: &|done, of| pairs.update(done, of),
        waiting: &|| exit::say(&format!("{out}: another batch works on it; waiting for its end")),
        stop: &|| signals.came().is_some(),
        ..BatchOptions::default()
    };
    if let Some(jobs) = options.jobs {
        how.jobs = usize::from(jobs);
    }
    let done = joiner::batch(&options.directories, &options.output, &how);
    pairs.finish();
    let done = done?;
    let text = match options.format.format {
        Format::Table => done.to_table(),
        Format::Json => serde_json::to_string_pretty(&done).context("write the batch")? + "\n",
    };
    exit::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
