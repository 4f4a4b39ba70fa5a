//! `fabscope probe host|target`: shows the plan that `record` would carry out.

use crate::cli::{Format, Probe, ProbeCommon};
use crate::exit::{print, say};
use crate::software::parse_choice;
use anyhow::{Result, bail};
use run_format::{Hook, Side};
use serde_json::json;
use spdk_probes::{Choice, Options, resolve::Binary};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

/// Runs `probe`.
///
/// # Errors
/// When there is nothing to look at, or it can not be read.
pub fn run(what: &Probe) -> Result<ExitCode> {
    let (side, common, kernel) = match what {
        Probe::Host(options) => {
            (Side::Host, &options.common, options.kernel || options.common.spdk.is_none())
        }
        Probe::Target(options) => (Side::Target, &options.common, false),
    };
    if kernel && (common.layout.is_some() || common.debug_file.is_some()) {
        bail!("--layout and --debug-file are for an SPDK program: name it with --spdk");
    }
    let (of, hooks, obstacles) = if kernel { of_kernel()? } else { of_spdk(side, common)? };
    let text = match common.format.format {
        Format::Json => {
            let value = json!({ "format": "fabscope-probe/1", "side": side, "of": of, "boundaries": hooks,
                                "obstacles": obstacles });
            serde_json::to_string_pretty(&value)? + "\n"
        }
        Format::Table => table(&of, &hooks, &obstacles),
    };
    print(&text)?;
    Ok(if obstacles.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn of_kernel() -> Result<(String, Vec<Hook>, Vec<String>)> {
    let survey = kernel_probes::survey(run_format::Side::Host)?;
    Ok((format!("kernel {}", survey.kernel), survey.hooks(), survey.obstacles))
}

fn of_spdk(side: Side, common: &ProbeCommon) -> Result<(String, Vec<Hook>, Vec<String>)> {
    let choice = common.spdk.as_deref().map_or(Ok(Choice::Only), parse_choice)?;
    let options = Options {
        layout: common.layout.clone(),
        debug_file: common.debug_file.clone(),
        ..Options::default()
    };
    if let Some(file) = &common.save_layout {
        let Choice::Path(program) = &choice else {
            bail!("--save-layout reads a program file: give its path with --spdk PATH");
        };
        save_layout(program, common.debug_file.as_deref(), file)?;
    }
    let (of, survey) = match choice {
        Choice::Path(program) => {
            (program.display().to_string(), spdk_probes::survey_program(&program, side, &options)?)
        }
        choice => {
            let process = spdk_probes::find(side, &choice)?;
            let of = format!("process {} ({})", process.pid, process.path.display());
            (of, spdk_probes::survey(&process, side, &options)?)
        }
    };
    Ok((of, survey.hooks(), Vec::new()))
}

fn save_layout(program: &Path, debug_file: Option<&Path>, file: &Path) -> Result<()> {
    let mut binary = Binary::open(program, None)?;
    if let Some(debug_file) = debug_file {
        binary.set_debug_file(debug_file)?;
    }
    let layout = binary.layout()?;
    layout.save(file)?;
    say(&format!("{}: layout of build-id {}", file.display(), layout.build_id()));
    Ok(())
}

fn table(of: &str, hooks: &[Hook], obstacles: &[String]) -> String {
    let mut text = format!("{of}\n\n");
    let width = hooks.iter().filter_map(|h| h.hook.as_ref().map(String::len)).max().unwrap_or(4).max(4);
    // Writing into a String can not fail.
    let _ = writeln!(
        text,
        "{:<12}  {:<width$}  {:>4}  {:>8}  instruction",
        "boundary", "hook", "rung", "per hit"
    );
    for hook in hooks {
        let _ = writeln!(
            text,
            "{:<12}  {:<width$}  {:>4}  {:>8}  {}",
            hook.boundary,
            hook.hook.as_deref().unwrap_or("none"),
            hook.rung,
            hook.estimated_ns.map_or_else(String::new, |ns| format!("{ns} ns")),
            hook.instruction.as_deref().unwrap_or_default()
        );
        if let Some(why) = &hook.why {
            let _ = writeln!(text, "{:<12}    {why}", "");
        }
    }
    for obstacle in obstacles {
        let _ = writeln!(text, "\ncan not record: {obstacle}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::table;
    use run_format::{Boundary, Hook};

    #[test]
    fn a_boundary_that_is_lost_is_shown_as_none_with_the_reason() {
        let hook = Hook {
            boundary: Boundary::TSent,
            hook: None,
            rung: 3,
            measured: false,
            instruction: None,
            transport: None,
            estimated_ns: None,
            why: Some("lost: the wait for the flush".into()),
        };
        let text = table("x", &[hook], &["no root".into()]);
        assert!(text.contains("t_sent        none"), "{text}");
        assert!(text.contains("lost: the wait for the flush") && text.contains("can not record: no root"));
    }
}
