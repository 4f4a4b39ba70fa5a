//! What can go wrong with a join or a report.

use run_format::Side;

/// An error of joining or reporting. Its text names the thing, the reason and the next step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A run could not be read.
    #[error(transparent)]
    Run(#[from] run_format::Error),
    /// A run of the other side was needed.
    #[error(
        "a {wanted} run is needed and this is a {} run: {run}",
        match wanted { Side::Host => "target", Side::Target => "host" }
    )]
    WrongSide {
        /// The side that was needed.
        wanted: Side,
        /// What the run is.
        run: String,
    },
    /// Both runs are of the same side.
    #[error(
        "both runs are of a {side}, so there is nothing to join: give one host run and one target run\n  {first}\n  {second}"
    )]
    SameSide {
        /// That side.
        side: Side,
        /// What the first run is.
        first: String,
        /// What the second run is.
        second: String,
    },
    /// No queue is in both runs.
    #[error(
        "the runs have no queue in common, so none of their commands can be the same: check that the host was connected to this target\n  {host}\n  {target}"
    )]
    NoSharedQueue {
        /// What the host run is.
        host: String,
        /// What the target run is.
        target: String,
    },
    /// The runs were recorded at different times.
    #[error(
        "the runs have no commands in common and by their wall clocks were not recorded at the same time: record both sides while the same load runs\n  {host}\n  {target}"
    )]
    NoOverlap {
        /// What the host run is.
        host: String,
        /// What the target run is.
        target: String,
    },
    /// There are not enough commands to say anything.
    #[error("too little to report: {why}\n  {runs}")]
    TooLittle {
        /// What is missing.
        why: String,
        /// What the runs are.
        runs: String,
    },
    /// A run has more commands than one join takes.
    #[error("{run}: {commands} commands are more than one join takes ({most}); record with --sample")]
    TooMany {
        /// What the run is.
        run: String,
        /// Its commands.
        commands: usize,
        /// The limit.
        most: u32,
    },
    /// Runs that do not fit into the memory that may be taken can not be worked on part after part.
    #[error(
        "the runs do not fit into {limit} MiB and can not be reported part after part: {why}; allow more with --memory, {needed} MiB will do\n  {runs}"
    )]
    Memory {
        /// What the runs are.
        runs: String,
        /// Why not part after part.
        why: String,
        /// What may be taken, MiB.
        limit: u64,
        /// What is needed, MiB.
        needed: u64,
    },
    /// The threads that read and join runs could not be made.
    #[error(
        "{threads} threads are needed to read runs and could not be made: {source}; let the user have more (ulimit -u, the service's TasksMax, the container's pids limit), or set RAYON_NUM_THREADS=1 and POLARS_MAX_THREADS=1 to need fewer"
    )]
    Threads {
        /// How many.
        threads: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// What was given to compare is no run and holds no pair of runs.
    #[error("{given}: {why}")]
    Input {
        /// What was given.
        given: String,
        /// What is wrong with it.
        why: String,
    },
    /// Pairs of runs and runs of one side can not be compared with each other.
    #[error(
        "what is compared has to be of the same kind, all pairs, all hosts or all targets: {first}, and {second}"
    )]
    MixedInputs {
        /// What the first is.
        first: String,
        /// What another is.
        second: String,
    },
    /// No class of commands is in every run.
    #[error(
        "the runs have no class of I/O in common, so there is nothing to compare: record both with the same load\n  {base}\n  {new}"
    )]
    NoCommonClass {
        /// The base's classes, run by run.
        base: String,
        /// The new's.
        new: String,
    },
    /// A batch was asked to end before it was done.
    #[error(
        "ended by a signal {}: the same command goes on from there",
        match of { 0 => "before it joined a pair of runs".into(), of => format!("when {done} of {of} pairs of runs were done") }
    )]
    Interrupted {
        /// Pairs that are done, by this call or one before.
        done: usize,
        /// All pairs; 0 where it ended before they were worked on.
        of: usize,
    },
    /// Columns could not be read or made.
    #[error("{doing}: {source}")]
    Polars {
        /// What was being done.
        doing: String,
        /// What polars said.
        source: Box<polars::error::PolarsError>,
    },
}

impl Error {
    /// Whether it says that there is too little data, as opposed to something that is wrong.
    #[must_use]
    pub fn is_too_little(&self) -> bool {
        matches!(self, Error::TooLittle { .. } | Error::NoCommonClass { .. })
    }
}

pub(crate) fn polars(doing: impl Into<String>) -> impl FnOnce(polars::error::PolarsError) -> Error {
    let doing = doing.into();
    move |source| Error::Polars { doing, source: Box::new(source) }
}
