//! Samples what the machine counts anyway, on the clock of a recording: TCP connections, interfaces, CPUs,
//! interrupts, drives, SPDK's own counters, GPUs, and the user's series. It knows no run directory and draws no
//! conclusions: rows go to whoever gave the sink.
//!
//! Each collector reads one source and is cheap; one that fails is told of and dropped, one that is too dear
//! samples less often, and none of them ever ends a recording. A value is a row when it changes (`rows.rs` says how
//! the rest is known).

mod about;
mod clock;
mod collect;
mod csv;
mod kept;
mod pace;
mod rows;
mod sampler;
mod series;
mod sock_diag;
mod text;

pub use about::{About, Kind, Metric, SAMPLED, all, table};
pub use clock::{Nanos, monotonic, thread_cpu};
pub use collect::{
    Collector, Lack, OpenRetransmissions, Opened, Places, Retransmission, Retransmissions, Subject, open,
};
pub use rows::{Batch, Known, ObjectId, Row, Rows};
pub use sampler::{CollectorStatus, Options, Sampler, State, Status};
pub use series::{ClockPair, Series, SeriesError, Told, wall_to_monotonic};
pub use sock_diag::tcp_bytes;
