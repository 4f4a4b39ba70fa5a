//! Joins a host run and a target run into the five-stage model, and reports it. It sees only run
//! directories: it knows no probes, needs no root, and draws nothing but text.
//!
//! [`join`] matches the commands of the two sides; [`report`] says where their time went; [`host_report`]
//! and [`target_report`] say what one side alone can know; [`compare`] says what moved between runs;
//! [`diagnose`] names the cause of what is slow, with its evidence; [`batch`] puts many runs into one table.

mod batch;
mod clock;
mod compare;
mod describe;
mod diagnose;
mod error;
mod frame;
mod gather;
mod histogram;
mod join;
mod lanes;
mod listed;
pub mod live;
mod matching;
mod model;
mod order;
mod parts;
mod queues;
mod radix;
mod random;
mod recording;
mod report;
mod stats;
mod student;
#[cfg(any(test, feature = "synthetic"))]
pub mod synthetic;
mod table;
mod tails;
#[cfg(test)]
mod tests;
mod threads;
mod timeline;

pub use batch::{
    BATCH_SCHEMA, Batch, BatchOptions, Buckets, By, Change, ChangedLabel, ClassRows, Differs, FarOff, Figure,
    Found, FoundRun, Group, JoinCounts, Labels, Merged, MergedStage, Moved, Outlier, PairRows, Quantile,
    RunName, RunPair, Skipped, Slopes, Times, TooFew, Trend, batch, find, step,
};
pub use compare::{
    BoundaryPair, COMPARE_SCHEMA, Cell, ClassComparison, ClassName, CompareOptions, Comparison, Difference,
    Failure, Floor, Form, Gate, GateResult, Input, LoadFigures, Outcome, Repetition, Row, SideOf, Statistic,
    Verdict, compare,
};
pub use diagnose::{
    Cause, DIAGNOSE_FORMAT, DIAGNOSE_SCHEMA, DiagnoseOptions, Diagnosis, Evidence, Finding, Judged,
    QueueLevel, ServiceLevel, Slo, SloResult, StageLevel, Stall, diagnose, diagnose_guide,
};
pub use error::Error;
pub use join::{Accounting, Aside, BoundaryFigures, ClockFigures, JoinOptions, Joined, Pair, SetAside, join};
pub use listed::SlowCommand;
pub use model::{Stages, SubStage};
pub use parts::{Bounds, report_alone_within, report_within};
pub use queues::{Link, LinkedBy};
pub use report::{
    Class, FioFigures, GroupBy, Report, ReportOptions, SCHEMA, host_report, report, target_report,
};
pub use stats::Distribution;
pub use tails::{Cause as TailCause, Otherwise, Tail};
