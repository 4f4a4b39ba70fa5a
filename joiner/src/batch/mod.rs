//! Many runs to one table, and what is said of them: finds the runs beneath directories, joins the pairs that are not joined
//! yet, writes one Parquet table, and tells changes, trends and outliers.
//!
//! 1. [`find`] looks for runs and tells which belong together.
//! 2. [`step`] makes rows of one pair. It is a pure function of the two run directories, so any engine may call it for each
//!    pair on any machine; here it is called on as many pairs at once as there are cores.
//! 3. What came of each pair is kept in the output directory under a name that is made of what is in its runs (`store`), so
//!    the next call does only what is new or was not done yet.
//! 4. The rows of all pairs become the table (`table`), and are merged (`groups`) and judged (`judge`).

mod buckets;
mod find;
mod groups;
mod judge;
mod labels;
mod render;
mod series;
mod shifts;
mod step;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod trends;

pub use buckets::Buckets;
pub use find::{Found, FoundRun, RunPair, Skipped, find};
pub use groups::{By, Differs, Group, Merged, MergedStage};
pub use judge::{Change, ChangedLabel, FarOff, Moved, Outlier, RunName, Slopes, TooFew, Trend};
pub use labels::Labels;
pub use series::Quantile;
pub use step::{ClassRows, Figure, JoinCounts, PairRows, Times, step};

use crate::compare::Floor;
use crate::error::Error;
use crate::parts::Bounds;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use store::{Store, Stored};

/// The JSON schema (draft 2020-12) of a batch.
pub const BATCH_SCHEMA: &str = include_str!("../schema/batch.json");

/// Name and version of the format.
const FORMAT: &str = "fabscope-batch/1";

/// How to go about a batch.
pub struct BatchOptions<'a> {
    /// The label to group and order the runs by.
    pub by: Option<String>,
    /// How many pairs are worked on at once, at most.
    pub jobs: usize,
    /// About as much memory as is taken for joining at most, by all pairs at once, bytes.
    pub memory: u64,
    /// The least change that counts.
    pub floor: Floor,
    /// Called now and then with how many pairs are done, of how many.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
    /// Called once where another batch works on the output directory and is waited for.
    pub waiting: &'a (dyn Fn() + Sync),
    /// Whether to end early, in order.
    pub stop: &'a (dyn Fn() -> bool + Sync),
}

impl BatchOptions<'_> {
    /// The memory that is taken where nothing else is said: 1 GiB.
    pub const MEMORY: u64 = 1 << 30;
}

impl Default for BatchOptions<'_> {
    fn default() -> Self {
        BatchOptions {
            by: None,
            jobs: std::thread::available_parallelism().map_or(1, usize::from),
            memory: BatchOptions::MEMORY,
            floor: Floor::default(),
            progress: &|_, _| {},
            waiting: &|| {},
            stop: &|| false,
        }
    }
}

impl std::fmt::Debug for BatchOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchOptions").field("by", &self.by).field("jobs", &self.jobs).finish_non_exhaustive()
    }
}

/// What a batch found, as `fabscope batch --format json` prints it: times in nanoseconds, null where not known or not
/// carried by the sample.
#[derive(Clone, Debug, Serialize)]
pub struct Batch {
    /// Name and version of the format.
    pub format: &'static str,
    /// The table.
    pub table: String,
    /// Its rows.
    pub rows: usize,
    /// Runs that were found.
    pub runs: usize,
    /// Pairs of a host's and a target's run in the table.
    pub pairs: usize,
    /// Runs of one side alone in the table.
    pub one_sided: usize,
    /// Pairs and single runs that were worked on in this call.
    pub done_now: usize,
    /// Those that an earlier call had done.
    pub done_before: usize,
    /// What is not in the table, and why.
    pub skipped: Vec<Skipped>,
    /// Commands in the table.
    pub commands: u64,
    /// When the first run began, ns since 1970.
    pub first_ns: Option<i64>,
    /// When the last run began.
    pub last_ns: Option<i64>,
    /// The labels by which the runs can be grouped, with the number of their values.
    pub labels: BTreeMap<String, usize>,
    /// The classes of commands of all runs.
    pub classes: Vec<Merged>,
    /// The runs by a label, where that was asked for.
    pub by: Option<By>,
    /// Where a stage changed from one run to the next.
    pub changes: Vec<Change>,
    /// Where a stage goes up or down along time.
    pub trends: Vec<Trend>,
    /// Runs that are far from the others.
    pub outliers: Vec<Outlier>,
    /// Classes of which too few runs are alike for anything to be said.
    pub too_few: Vec<TooFew>,
}

/// Finds the runs beneath directories, joins those pairs that are not joined yet, writes the table into `out`, and judges.
///
/// # Errors
/// [`Error::Input`] where a directory or the label is not there or there is no run; [`Error::Interrupted`] where
/// [`BatchOptions::stop`] said so; [`Error::TooLittle`] where no run has a row; what writing ended with. What is wrong
/// with a run is no error: it is among [`Batch::skipped`].
pub fn batch(directories: &[PathBuf], out: &Path, options: &BatchOptions<'_>) -> Result<Batch, Error> {
    let Some(found) = find(directories, options.stop)? else {
        return Err(Error::Interrupted { done: 0, of: 0 });
    };
    let listed = || directories.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", ");
    if found.pairs.is_empty() && found.skipped.is_empty() {
        return Err(Error::Input { given: listed(), why: "there is no run beneath it".into() });
    }
    let keys: Vec<u128> = found.pairs.iter().map(|pair| pair.key(store::FORMAT)).collect();
    let Some(store) = Store::take(out, options.waiting, options.stop)? else {
        return Err(Error::Interrupted { done: 0, of: 0 });
    };
    let mut kept_of: Vec<Option<Stored>> = keys.par_iter().map(|key| store.load(*key)).collect();
    let todo: Vec<usize> = (0..keys.len()).filter(|&n| kept_of[n].is_none()).collect();
    let failed = work(&found.pairs, &keys, &todo, &store, options)?;
    let again: Vec<Option<Stored>> = todo.par_iter().map(|&n| store.load(keys[n])).collect();
    todo.iter().zip(again).for_each(|(&n, kept)| kept_of[n] = kept);
    let mut skipped = found.skipped;
    let mut pairs = Vec::with_capacity(keys.len());
    let mut kept = HashSet::with_capacity(keys.len());
    for ((pair, key), stored) in found.pairs.iter().zip(&keys).zip(kept_of) {
        let why = match stored {
            Some(Stored::Rows(rows)) => {
                pairs.push((rows, *key));
                kept.insert(*key);
                continue;
            }
            Some(Stored::Failed(why)) => {
                kept.insert(*key);
                why
            }
            None => {
                let why = failed.iter().find(|(failed, _)| failed == key).map(|(_, why)| why.clone());
                why.unwrap_or_else(|| "what came of it went while this was under way".into())
            }
        };
        skipped.push(Skipped { path: pair.name(), why });
    }
    pairs.sort_by(|(a, _), (b, _)| {
        let begun = |rows: &PairRows| (rows.start_ns.is_none(), rows.start_ns);
        begun(a).cmp(&begun(b)).then_with(|| a.name().cmp(&b.name()))
    });
    let (pairs, order): (Vec<PairRows>, Vec<u128>) = pairs.into_iter().unzip();
    if pairs.is_empty() {
        let of = |s: &Skipped| format!("{}: {}", s.path, s.why);
        let runs = skipped.iter().take(10).map(of).collect::<Vec<_>>().join("\n  ");
        return Err(Error::TooLittle { why: "no run has commands that can be reported".into(), runs });
    }
    let label = options.by.as_deref().map(|by| groups::label(&pairs, by)).transpose()?;
    write_table(out, &store, &pairs, &order)?;
    store.sweep(&kept)?;
    let judged = judge::judge(&pairs, label, &options.floor);
    let by = label.map(|label| groups::by(&pairs, label, &judged.changes));
    let mut values: BTreeMap<&String, HashSet<&String>> = BTreeMap::new();
    for (label, value) in pairs.iter().flat_map(|p| &p.labels) {
        values.entry(label).or_default().insert(value);
    }
    let one_sided = pairs.iter().filter(|p| p.sides() != "pair").count();
    let classes = || pairs.iter().flat_map(|p| &p.classes);
    Ok(Batch {
        format: FORMAT,
        table: out.join(table::NAME).display().to_string(),
        rows: classes().map(|c| c.figures.len()).sum(),
        runs: found.runs,
        pairs: pairs.len() - one_sided,
        one_sided,
        done_now: todo.len(),
        done_before: keys.len() - todo.len(),
        skipped,
        commands: classes().map(|c| c.commands).sum(),
        first_ns: pairs.iter().filter_map(|p| p.start_ns).min(),
        last_ns: pairs.iter().filter_map(|p| p.start_ns).max(),
        labels: values.into_iter().map(|(label, values)| (label.clone(), values.len())).collect(),
        classes: groups::merged(&pairs.iter().collect::<Vec<_>>()),
        by,
        changes: judged.changes,
        trends: judged.trends,
        outliers: judged.outliers,
        too_few: judged.too_few,
    })
}

/// Pairs that failed and may not fail another time, and why.
type Failed = Vec<(u128, String)>;

/// Makes and keeps the rows of the pairs that have none yet.
fn work(
    pairs: &[RunPair],
    keys: &[u128],
    todo: &[usize],
    store: &Store,
    options: &BatchOptions<'_>,
) -> Result<Failed, Error> {
    let most = usize::try_from(options.memory / Bounds::LEAST).unwrap_or(usize::MAX).max(1);
    let jobs = options.jobs.clamp(1, most).min(todo.len().max(1));
    let memory = options.memory / jobs as u64;
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failed = Mutex::new(Vec::new());
    let job = || -> Result<(), Error> {
        while !(options.stop)()
            && let Some(&n) = todo.get(next.fetch_add(1, Ordering::Relaxed))
        {
            match safely(&pairs[n], memory) {
                Ok(stored) => store.save(keys[n], &stored)?,
                Err(why) => failed.lock().unwrap_or_else(|e| e.into_inner()).push((keys[n], why)),
            }
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            (options.progress)(done, todo.len());
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..jobs).map(|_| scope.spawn(job)).collect();
        let mut ended = job();
        for other in others {
            // A panic of a step is caught in it.
            ended = ended.and(other.join().unwrap_or(Ok(())));
        }
        ended
    })?;
    let done = done.into_inner();
    if done < todo.len() {
        return Err(Error::Interrupted { done: pairs.len() - todo.len() + done, of: pairs.len() });
    }
    Ok(failed.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// What comes of a pair; or why it failed, where it may not fail another time.
fn safely(pair: &RunPair, memory: u64) -> Result<Stored, String> {
    let path = |run: &Option<std::sync::Arc<FoundRun>>| run.as_ref().map(|run| run.directory.clone());
    let (host, target) = (path(&pair.host), path(&pair.target));
    let stepped = catch_unwind(AssertUnwindSafe(|| step(host.as_deref(), target.as_deref(), memory)));
    match stepped {
        Ok(Ok(rows)) => Ok(Stored::Rows(rows)),
        // The runs are what they are; another call has other memory, other rights and other disks.
        Ok(Err(error @ (Error::Memory { .. } | Error::Threads { .. }))) => Err(error.to_string()),
        Ok(Err(Error::Run(error @ run_format::Error::Io { .. }))) => Err(error.to_string()),
        Ok(Err(error)) => Ok(Stored::Failed(error.to_string())),
        Err(panic) => {
            let told = panic.downcast_ref::<String>().map(String::as_str);
            let told = told.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it is damaged");
            Ok(Stored::Failed(format!("reading it ended unexpectedly: {told}")))
        }
    }
}

/// Writes the table where it is not of these results already.
fn write_table(out: &Path, store: &Store, pairs: &[PairRows], order: &[u128]) -> Result<(), Error> {
    let mut hash = find::Fingerprint::new();
    order.iter().for_each(|key| hash.add(&key.to_le_bytes()));
    let path = out.join(table::NAME);
    let of = || {
        let about = std::fs::metadata(&path).ok()?;
        let when = about.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        Some(format!("{:032x} {} {}", hash.get(), about.len(), when.as_nanos()))
    };
    if of().is_some_and(|of| store.table_is_of() == Some(of)) {
        return Ok(());
    }
    table::write(out, pairs)?;
    store.note_table(&of().unwrap_or_default())
}
