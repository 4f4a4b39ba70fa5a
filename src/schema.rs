//! `fabscope schema`: the JSON schemas of what programs read.

use crate::cli::{Schema, SchemaOf};
use crate::exit::print;
use crate::probe;
use anyhow::Result;
use std::process::ExitCode;

/// Prints a schema.
///
/// # Errors
/// When it can not be written.
pub fn run(options: &Schema) -> Result<ExitCode> {
    let text = match options.of {
        SchemaOf::Report => joiner::SCHEMA,
        SchemaOf::Probe => probe::SCHEMA,
        SchemaOf::ProbeBaseline => probe::COMPARISON_SCHEMA,
        SchemaOf::Compare => joiner::COMPARE_SCHEMA,
        SchemaOf::Diagnose => joiner::DIAGNOSE_SCHEMA,
        SchemaOf::Selftest => crate::selftest::SCHEMA,
        SchemaOf::Batch => joiner::BATCH_SCHEMA,
        SchemaOf::Watch => joiner::live::WATCH_SCHEMA,
    };
    print(text)?;
    Ok(ExitCode::SUCCESS)
}
