//! Cuts the part of a recording that holds one load out of it, as a run of its own: what takes long under emulation is to
//! put probes in place, not to record. Telemetry stays whole: who reads it goes by the commands' time.

use anyhow::{Context, Result};
use polars::prelude::{ParquetWriter, col, lit};
use run_format::{Boundary, Run, Side};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::Path;

/// Makes `into` of the commands of `run` that began between when and when, ns of its clock.
pub fn cut(run: &Run, (from, to): (i64, i64), into: &Path) -> Result<()> {
    let first = match run.manifest().side {
        Side::Host => Boundary::HQueued,
        Side::Target => Boundary::TRecv,
    };
    let began = col(first.name());
    let within = began.clone().gt_eq(lit(from)).and(began.lt(lit(to)));
    let mut commands = run.commands()?.filter(within).collect()?;
    for folder in ["queues", "telemetry"] {
        fs::create_dir_all(into.join(folder))?;
        for entry in fs::read_dir(run.directory().join(folder))? {
            let entry = entry?;
            fs::copy(entry.path(), into.join(folder).join(entry.file_name()))?;
        }
    }
    fs::create_dir_all(into.join("commands"))?;
    ParquetWriter::new(File::create(into.join("commands/000000.parquet"))?).finish(&mut commands)?;

    let of = run.directory().join("run.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&of)?)?;
    manifest["window"] = json!({ "start_ns": from, "end_ns": to });
    let counters = manifest["counters"].as_object_mut().context("no counters")?;
    counters.iter_mut().filter(|(_, count)| count.is_u64()).for_each(|(_, count)| *count = json!(0));
    for name in ["seen", "recorded"] {
        counters.insert(name.to_owned(), json!(commands.height()));
    }
    Ok(fs::write(into.join("run.json"), serde_json::to_vec_pretty(&manifest)?)?)
}
