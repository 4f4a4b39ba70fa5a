//! `fabscope diagnose`: opens the runs, has them diagnosed, prints, and maps the service levels to an exit code.

use crate::cli::{Diagnose, DiagnoseFormat};
use crate::exit;
use crate::report::host_first;
use anyhow::{Context, Result, bail};
use joiner::{DiagnoseOptions, Diagnosis, Failure, Input};
use run_format::Run;
use std::path::Path;
use std::process::ExitCode;

/// Runs `diagnose`.
///
/// # Errors
/// When a run can not be read or joined, or there is too little to say.
pub fn run(options: &Diagnose) -> Result<ExitCode> {
    let diagnosis = match diagnose(options) {
        Ok(diagnosis) => diagnosis,
        Err(error) => {
            if options.format == DiagnoseFormat::Json {
                // What reads the output as a file is told there too. That it can not be written changes no exit code.
                let failure = Failure::of(joiner::DIAGNOSE_FORMAT, exit::text(&error));
                let _ = exit::print(&(serde_json::to_string_pretty(&failure)? + "\n"));
            }
            return Err(error);
        }
    };
    let text = match options.format {
        DiagnoseFormat::Table => diagnosis.to_table(),
        DiagnoseFormat::Json => {
            serde_json::to_string_pretty(&diagnosis).context("write the diagnosis")? + "\n"
        }
        DiagnoseFormat::Markdown => diagnosis.to_markdown(),
    };
    exit::print(&text)?;
    Ok(exit::of_gates(diagnosis.slo_outcome()))
}

fn diagnose(options: &Diagnose) -> Result<Diagnosis> {
    let (host, target) = pair(&options.first, options.second.as_deref())?;
    let how = DiagnoseOptions {
        baseline: options.baseline.as_deref().map(Input::find).transpose()?,
        slo: options.slo.clone(),
        memory: options.memory,
        ..DiagnoseOptions::default()
    };
    Ok(joiner::diagnose(&host, &target, &how)?)
}

/// The host's and the target's run, in whichever order they are given, or from the directory that holds both.
fn pair(first: &Path, second: Option<&Path>) -> Result<(Run, Run)> {
    let Some(second) = second else {
        let input = Input::find(first)?;
        let (Some(host), Some(target)) = (input.host(), input.target()) else {
            bail!(
                "{}: a diagnosis needs both sides, and this is one: give the host's run and the target's",
                first.display()
            );
        };
        return Ok((host.clone(), target.clone()));
    };
    Ok(host_first(Run::open(first)?, Run::open(second)?))
}
