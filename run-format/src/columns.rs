//! The columns of a run's Parquet files, with units: the one place that says what they are. Writer,
//! reader and documents read this table.

use crate::{Boundary, Side};
use polars::prelude::{DataType, Field, Schema};

/// One column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its name in the file.
    pub name: &'static str,
    /// Its type.
    pub kind: ColumnKind,
    /// Its unit, empty where it has none.
    pub unit: &'static str,
    /// Whether it can be null.
    pub nullable: bool,
    /// What it is.
    pub meaning: &'static str,
}

/// The types that the columns have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnKind {
    /// Unsigned, 8 bits.
    U8,
    /// Unsigned, 16 bits.
    U16,
    /// Unsigned, 32 bits.
    U32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits: times, so that differences stay in the type.
    I64,
    /// UTF-8 text.
    Text,
    /// True or false.
    Bool,
}

impl ColumnKind {
    /// The polars type.
    #[must_use]
    pub fn data_type(self) -> DataType {
        match self {
            U8 => DataType::UInt8,
            U16 => DataType::UInt16,
            U32 => DataType::UInt32,
            U64 => DataType::UInt64,
            I64 => DataType::Int64,
            Text => DataType::String,
            Bool => DataType::Boolean,
        }
    }
}

const fn column(
    name: &'static str,
    kind: ColumnKind,
    unit: &'static str,
    nullable: bool,
    meaning: &'static str,
) -> Column {
    Column { name, kind, unit, nullable, meaning }
}

use ColumnKind::{Bool, I64, Text, U8, U16, U32, U64};

/// What a command is, on both sides.
const COMMAND: &[Column] = &[
    column("queue", U32, "", false, "the queue it went through: `queue` of queues/*.parquet"),
    column("cid", U16, "", false, "command identifier in the SQE and CQE"),
    column("opcode", U8, "", false, "opcode in the SQE"),
    column("nsid", U32, "", false, "namespace identifier in the SQE"),
    column(
        "slba",
        U64,
        "",
        false,
        "CDW10 and CDW11 as on the wire: the starting LBA where the opcode has one",
    ),
    column(
        "nlb",
        U16,
        "",
        false,
        "low half of CDW12 as on the wire: blocks less one where the opcode has blocks",
    ),
    column("bytes", U32, "bytes", false, "data that it carries"),
    column("status", U16, "", false, "status code type << 8 | status code; 0 is success"),
    column("cpu", U16, "", false, "CPU it was handed to the driver on (host) or received on (target)"),
    column(
        "flags",
        U16,
        "",
        false,
        "1 merged bios, 2 a retry, 4 failed over, 8 cancelled, 16 cid not known (it is 0)",
    ),
    column("r2ts", U8, "", false, "R2Ts seen or sent for it, at most 255"),
    column("stream_position", U32, "", true, "TCP sequence number of its capsule's first byte"),
];

/// A host's own.
const HOST: &[Column] = &[column(
    "h_r2t_turnaround",
    I64,
    "ns",
    true,
    "sum over its R2Ts of (H2CData handed to the socket less R2T seen)",
)];

/// A target's own.
const TARGET: &[Column] = &[column(
    "t_drive",
    I64,
    "ns",
    true,
    "the drive's part of storage: from the issue of its first block request to the completion of its last",
)];

/// Columns that an older recording of this format version may lack; it reads as if they were null.
pub(crate) const ADDED: &[&str] = &["t_drive"];

/// What a queue is.
pub const QUEUES: &[Column] = &[
    column("queue", U32, "", false, "number of the queue in this run; a reconnect makes a new one"),
    column("subsystem_nqn", Text, "", false, "NQN of the subsystem"),
    column("host_nqn", Text, "", false, "NQN of the host; empty where it sent none"),
    column("cntlid", U16, "", false, "controller identifier"),
    column("qid", U16, "", false, "queue identifier"),
    column("transport", Text, "", false, "tcp or rdma"),
    column("host_address", Text, "", true, "the host's address"),
    column("host_port", U16, "", true, "the host's port: it names the connection on both sides"),
    column("target_address", Text, "", true, "the target's address"),
    column("target_port", U16, "", true, "the target's port"),
    column("device", Text, "", true, "the device as this side names it, such as nvme0"),
    column("served_by", Text, "", true, "CPU or SPDK thread that it is bound to"),
    column("came", I64, "ns", false, "when this recording first saw it, CLOCK_MONOTONIC"),
    column("existed", Bool, "", false, "whether it was connected before recording began"),
    column("went", I64, "ns", true, "when it went, CLOCK_MONOTONIC"),
];

/// The columns of `commands/*.parquet` of a side, in their order: what the command is, then its times
/// (`CLOCK_MONOTONIC`, nanoseconds, null where the boundary was not passed or not measured).
#[must_use]
pub fn commands(side: Side) -> Vec<Column> {
    let own = match side {
        Side::Host => HOST,
        Side::Target => TARGET,
    };
    COMMAND
        .iter()
        .copied()
        .chain(Boundary::of(side).map(|b| column(b.name(), I64, "ns", true, b.meaning())))
        .chain(own.iter().copied())
        .collect()
}

/// The polars schema of a list of columns.
#[must_use]
pub fn schema(columns: &[Column]) -> Schema {
    columns.iter().map(|c| Field::new(c.name.into(), c.kind.data_type())).collect()
}
