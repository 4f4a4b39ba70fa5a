//! One run in memory, as plain columns: what the matcher and the model work on. It reads and judges
//! nothing else.

use crate::error::{Error, polars};
use polars::prelude::{ChunkedArray, Column, DataFrame, PolarsNumericType, col};
use run_format::{Boundary, Hook, Manifest, Queue, QueueId, Run, Side, Transport};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// "Not passed or not measured" in a column of times. Times are kept within 0 ..= [`LATEST`], so that no
/// difference overflows.
pub(crate) const NONE: i64 = i64::MIN;
/// The latest time that is taken for one: 36 years after boot.
const LATEST: i64 = 1 << 60;

/// One run: its manifest, queues and commands. A column that is null throughout is empty.
#[derive(Debug)]
pub(crate) struct Recording {
    pub(crate) directory: PathBuf,
    pub(crate) manifest: Manifest,
    pub(crate) queues: BTreeMap<QueueId, Queue>,
    pub(crate) broken: usize,
    pub(crate) queue: Vec<u32>,
    pub(crate) cid: Vec<u16>,
    pub(crate) opcode: Vec<u8>,
    pub(crate) nsid: Vec<u32>,
    pub(crate) slba: Vec<u64>,
    pub(crate) nlb: Vec<u16>,
    pub(crate) bytes: Vec<u32>,
    pub(crate) status: Vec<u16>,
    pub(crate) cpu: Vec<u16>,
    pub(crate) flags: Vec<u16>,
    pub(crate) r2ts: Vec<u8>,
    stream_position: Vec<i64>,
    r2t_turnaround: Vec<i64>,
    drive: Vec<i64>,
    times: Vec<Vec<i64>>,
}

impl Recording {
    /// Reads a run whole.
    pub(crate) fn read(run: &Run) -> Result<Recording, Error> {
        let side = run.manifest().side;
        let mut names = vec![
            "queue",
            "cid",
            "opcode",
            "nsid",
            "slba",
            "nlb",
            "bytes",
            "status",
            "cpu",
            "flags",
            "r2ts",
            "stream_position",
        ];
        names.extend(Boundary::of(side).map(Boundary::name));
        names.push(match side {
            Side::Host => "h_r2t_turnaround",
            Side::Target => "t_drive",
        });
        let reading = || format!("read the commands of {}", run.directory().display());
        let frame = run
            .commands()?
            .select(names.iter().map(|n| col(*n)).collect::<Vec<_>>())
            .collect()
            .map_err(polars(reading()))?;
        if u32::try_from(frame.height()).is_err() {
            return Err(Error::TooMany {
                run: run.directory().display().to_string(),
                commands: frame.height(),
                most: u32::MAX,
            });
        }
        Recording::from_frame(run, frame).map_err(polars(reading()))?
    }

    fn from_frame(run: &Run, frame: DataFrame) -> polars::prelude::PolarsResult<Result<Recording, Error>> {
        let queues = match run.queues() {
            Ok(queues) => queues,
            Err(error) => return Ok(Err(error.into())),
        };
        let manifest = run.manifest().clone();
        let mut recording = Recording {
            directory: run.directory().to_owned(),
            queues,
            broken: run.broken_segments().len(),
            queue: Vec::new(),
            cid: Vec::new(),
            opcode: Vec::new(),
            nsid: Vec::new(),
            slba: Vec::new(),
            nlb: Vec::new(),
            bytes: Vec::new(),
            status: Vec::new(),
            cpu: Vec::new(),
            flags: Vec::new(),
            r2ts: Vec::new(),
            stream_position: Vec::new(),
            r2t_turnaround: Vec::new(),
            drive: Vec::new(),
            times: vec![Vec::new(); Boundary::of(manifest.side).count()],
            manifest,
        };
        let r = &mut recording;
        // Column by column, so that each frame column is freed as soon as it is copied.
        for column in frame.into_columns() {
            let series = column.as_materialized_series();
            match column.name().as_str() {
                "queue" => r.queue = plain(series.u32()?),
                "cid" => r.cid = plain(series.u16()?),
                "opcode" => r.opcode = plain(series.u8()?),
                "nsid" => r.nsid = plain(series.u32()?),
                "slba" => r.slba = plain(series.u64()?),
                "nlb" => r.nlb = plain(series.u16()?),
                "bytes" => r.bytes = plain(series.u32()?),
                "status" => r.status = plain(series.u16()?),
                "cpu" => r.cpu = plain(series.u16()?),
                "flags" => r.flags = plain(series.u16()?),
                "r2ts" => r.r2ts = plain(series.u8()?),
                "stream_position" => r.stream_position = nullable(series.u32()?, i64::from),
                "h_r2t_turnaround" => r.r2t_turnaround = time_column(&column)?,
                "t_drive" => r.drive = time_column(&column)?,
                name => {
                    if let Some(b) = Boundary::parse(name) {
                        r.times[b.slot()] = time_column(&column)?;
                    }
                }
            }
        }
        Ok(Ok(recording))
    }

    /// A recording that was never written, for tests.
    #[cfg(test)]
    pub(crate) fn of(recorded: &crate::synthetic::Recorded) -> Recording {
        let commands = || recorded.commands.iter().map(|(_, c)| c);
        let time = |t: Option<run_format::Nanos>| t.map_or(NONE, run_format::Nanos::as_i64);
        let position = |c: &run_format::Command| c.stream_position.map_or(NONE, i64::from);
        let positions: Vec<i64> = commands().map(position).collect();
        Recording {
            directory: format!("{}.run", recorded.manifest.side).into(),
            manifest: recorded.manifest.clone(),
            queues: recorded
                .queues
                .iter()
                .cloned()
                .enumerate()
                .map(|(n, q)| (QueueId(n as u32), q))
                .collect(),
            broken: 0,
            queue: commands().map(|c| c.queue.0).collect(),
            cid: commands().map(|c| c.cid.0).collect(),
            opcode: commands().map(|c| c.opcode).collect(),
            nsid: commands().map(|c| c.nsid).collect(),
            slba: commands().map(|c| c.slba).collect(),
            nlb: commands().map(|c| c.nlb0).collect(),
            bytes: commands().map(|c| c.bytes).collect(),
            status: commands().map(|c| c.status).collect(),
            cpu: commands().map(|c| c.cpu).collect(),
            flags: commands().map(|c| c.flags).collect(),
            r2ts: commands().map(|c| c.r2ts).collect(),
            stream_position: if positions.iter().all(|p| *p == NONE) { Vec::new() } else { positions },
            r2t_turnaround: commands().map(|c| time(c.r2t_turnaround)).collect(),
            drive: commands().map(|c| time(c.drive)).collect(),
            times: Boundary::of(recorded.manifest.side)
                .map(|b| commands().map(|c| time(c.time(b))).collect())
                .collect(),
        }
    }

    /// Whether a queue's commands go over RDMA: its host passes no R2T boundary, since the target itself
    /// reads a write's data.
    pub(crate) fn is_rdma(&self, queue: u32) -> bool {
        self.queues.get(&QueueId(queue)).is_some_and(|q| q.transport == Transport::Rdma)
    }

    /// The hooks of a boundary that its queues' transports used: one, or one for each transport.
    pub(crate) fn hooks(&self, boundary: Boundary) -> Vec<&Hook> {
        let used = |hook: &&Hook| {
            hook.transport.is_none_or(|transport| {
                self.queues.is_empty() || self.queues.values().any(|queue| queue.transport == transport)
            })
        };
        self.manifest.hooks.iter().filter(|hook| hook.boundary == boundary).filter(used).collect()
    }

    /// Number of commands.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// The time at a boundary of this side, or [`NONE`].
    pub(crate) fn time(&self, boundary: Boundary, row: usize) -> i64 {
        self.times[boundary.slot()].get(row).copied().unwrap_or(NONE)
    }

    /// Whether every command has a time at a boundary of this side.
    pub(crate) fn has_all(&self, boundary: Boundary) -> bool {
        let times = &self.times[boundary.slot()];
        times.len() == self.len() && !times.contains(&NONE)
    }

    /// All times of a command by [`Boundary::slot`].
    pub(crate) fn times<const N: usize>(&self, row: usize) -> [i64; N] {
        std::array::from_fn(|slot| self.times[slot].get(row).copied().unwrap_or(NONE))
    }

    /// The sum of the command's R2T turnarounds, or [`NONE`].
    pub(crate) fn r2t_turnaround(&self, row: usize) -> i64 {
        self.r2t_turnaround.get(row).copied().unwrap_or(NONE)
    }

    /// The drive's part of the command's time in storage, or [`NONE`].
    pub(crate) fn drive(&self, row: usize) -> i64 {
        self.drive.get(row).copied().unwrap_or(NONE)
    }

    /// TCP sequence number of the command's capsule, or [`NONE`].
    pub(crate) fn stream_position(&self, row: usize) -> i64 {
        self.stream_position.get(row).copied().unwrap_or(NONE)
    }

    /// Whether no command has a stream position.
    pub(crate) fn lacks_positions(&self) -> bool {
        self.stream_position.is_empty()
    }
}

fn plain<T: PolarsNumericType>(column: &ChunkedArray<T>) -> Vec<T::Native> {
    let mut values = Vec::with_capacity(column.len());
    for chunk in column.downcast_iter() {
        values.extend_from_slice(chunk.values());
    }
    values
}

fn nullable<T: PolarsNumericType>(column: &ChunkedArray<T>, as_i64: impl Fn(T::Native) -> i64) -> Vec<i64> {
    if column.null_count() == column.len() {
        return Vec::new();
    }
    let mut values = Vec::with_capacity(column.len());
    for chunk in column.downcast_iter() {
        let plain = chunk.values().iter().map(|&v| as_i64(v));
        match chunk.validity() {
            None => values.extend(plain),
            Some(valid) => values.extend(plain.zip(valid.iter()).map(|(v, ok)| if ok { v } else { NONE })),
        }
    }
    values
}

fn time_column(column: &Column) -> polars::prelude::PolarsResult<Vec<i64>> {
    Ok(nullable(column.i64()?, |t| if (0..=LATEST).contains(&t) { t } else { NONE }))
}
