//! Joins what is to be diagnosed, within the memory that may be taken: runs that fit whole, else the first part of both
//! that does, which is then said. It diagnoses nothing.

use super::DiagnoseOptions;
use crate::error::{Error, polars};
use crate::join::{Joined, join_recordings};
use crate::parts::Bounds;
use crate::recording::Recording;
use crate::table::count;
use crate::threads;
use run_format::Run;

/// About the bytes that a command of either side takes while runs are joined and then diagnosed: an estimate from what
/// is held of each (its columns, its pair, its row and what the rules sort), which bounds no other part of the program.
const COMMAND: u64 = 420;
/// What the program takes besides.
const FIXED: u64 = 64 << 20;

/// Joins two runs, or the first part of both, and says which part.
pub(super) fn joined(
    host: &Run,
    target: &Run,
    options: &DiagnoseOptions,
) -> Result<(Joined, Option<String>), Error> {
    threads::ready()?;
    let most = (options.memory.max(Bounds::LEAST) - FIXED) / COMMAND;
    let (of_host, of_target) = (Recording::segments(host)?, Recording::segments(target)?);
    let (all_host, all_target) = (of_host.iter().sum::<u64>(), of_target.iter().sum::<u64>());
    let fits = all_host.saturating_add(all_target) <= most;
    let share = if fits { 1.0 } else { most as f64 / all_host.saturating_add(all_target) as f64 };
    let first = |rows: u64| (rows as f64 * share) as u64;
    let read = |run: &Run, rows: u64| {
        if fits { Recording::read(run) } else { Recording::read_first(run, first(rows)) }
    };
    let (h, t) = rayon::join(|| read(host, all_host), || read(target, all_target));
    let joined = join_recordings(h?, t?, &options.joining)?;
    let part = (!fits).then(|| {
        format!(
            "the runs ({} and {} commands) do not fit into {} MiB: the first {} and {} commands were diagnosed, as far as \
             they are in both; --memory {} MiB takes all",
            count(all_host),
            count(all_target),
            options.memory >> 20,
            count(first(all_host)),
            count(first(all_target)),
            (all_host.saturating_add(all_target) * COMMAND + FIXED).div_ceil(1 << 20)
        )
    });
    Ok((joined, part))
}

impl Recording {
    /// The commands of each segment of a run.
    fn segments(run: &Run) -> Result<Vec<u64>, Error> {
        use polars::prelude::{ParquetReader, SerReader};
        let rows = |path: &std::path::PathBuf| {
            let count = || ParquetReader::new(std::fs::File::open(path)?).num_rows();
            count().map(|n| n as u64).map_err(polars(format!("read {}", path.display())))
        };
        run.segments().iter().map(rows).collect()
    }

    /// Reads the first commands of a run.
    fn read_first(run: &Run, rows: u64) -> Result<Recording, Error> {
        use polars::prelude::col;
        let mut recording = Recording::empty(run)?;
        let reading = || format!("read the first commands of {}", run.directory().display());
        let columns: Vec<_> = recording.columns().into_iter().map(col).collect();
        let frame = run
            .commands()?
            .select(columns)
            .limit(u32::try_from(rows).unwrap_or(u32::MAX))
            .collect()
            .map_err(polars(reading()))?;
        recording.extend(frame).map_err(polars(reading()))?;
        Ok(recording)
    }
}
