//! `fabscope record host|target`: records one side into a run.

use crate::attach::{Going, Subject};
use crate::cli::{Record, RecordSide, conflict};
use crate::destination::Destination;
use crate::signals::Signals;
use crate::{telemetry, workload};
use anyhow::Result;
use run_format::{RunWriter, Side};
use std::path::Path;
use std::process::ExitCode;

/// Runs `record`.
///
/// # Errors
/// When nothing can be recorded, with what is missing and what to do; or when the recording could not be
/// written.
pub fn run(what: &Record) -> Result<ExitCode> {
    let signals = Signals::until_counted()?;
    let (side, options, from) = match what {
        Record::Host(options) => (Side::Host, options, None),
        Record::Target(options) => (Side::Target, &options.side, Some(&options.from)),
    };
    let subject = Subject { side, observe: &options.observe, from };
    subject.check();
    check_labels(&options.label);
    // What the recording would fail at later is refused before the system under test is touched, and before
    // --force removes anything.
    let output = output(options, side);
    RunWriter::may_create(output, options.force)?;
    workload::check(&options.command)?;
    telemetry::check(options.series.as_deref(), !options.command.is_empty())?;
    let going = Going {
        open: &|manifest| {
            let writer: Box<dyn Destination> = Box::new(RunWriter::create(output, manifest, options.force)?);
            Ok(writer)
        },
        measure_overhead: options.measure_overhead,
        series: options.series.clone(),
        labels: options.label.iter().cloned().collect(),
        command: &options.command,
        quiet: options.quiet,
        has_own_progress: false,
    };
    subject.record(&going, &signals)
}

/// A label that is given twice would silently lose a value.
fn check_labels(labels: &[(String, String)]) {
    let again = labels.iter().enumerate().find(|(n, (name, _))| labels[..*n].iter().any(|l| l.0 == *name));
    if let Some((_, (name, _))) = again {
        conflict(&format!("the label {name} is given twice"))
    }
}

fn output(options: &RecordSide, side: Side) -> &Path {
    match (&options.output, side) {
        (Some(output), _) => output,
        (None, Side::Host) => Path::new("host.run"),
        (None, Side::Target) => Path::new("target.run"),
    }
}
