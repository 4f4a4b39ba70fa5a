//! What a fabscope run is: the boundaries and stages, one command, one queue, the manifest, and the run
//! directory's writer and reader. It knows no probes and does no analysis.

mod batch;
mod boundary;
#[cfg(feature = "bpf")]
pub mod bpf;
mod clock;
pub mod columns;
mod command;
mod error;
mod ladder;
mod manifest;
mod operation;
mod overhead;
mod packed;
mod queue;
mod reader;
mod release;
pub mod sampling;
mod segment;
mod slices;
mod source;
mod telemetry;
mod units;
mod writer;

pub use boundary::{Boundary, Kind, Side, Stage};
pub use clock::{clock_pair, machine, monotonic_now};
pub use command::Command;
pub use error::Error;
pub use ladder::{Lack, Ladder, Rung, Spot};
pub use manifest::{
    ClockPair, Counters, Event, FioJob, Hook, Lost, Machine, Manifest, PerKindNs, Price, Software, State,
    Window, Windows, Workload,
};
pub use operation::Operation;
pub use overhead::{Effect, Overhead};
pub use queue::{Endpoint, Queue, Transport};
pub use reader::Run;
pub use release::{Release, urgently};
pub use segment::{Number, Segment};
pub use source::{Sink, Source};
pub use telemetry::{
    MetricKind, Point, Telemetry, TelemetryBatch, TelemetryCollector, TelemetryEvent, TelemetryLack,
    TelemetryMetric, TelemetryRow, TelemetrySeries, TelemetrySink, TelemetrySummary, TelemetryWriter,
    Timeline, increase, rates,
};
pub use units::{Cid, Nanos, QueueId};
pub use writer::RunWriter;
