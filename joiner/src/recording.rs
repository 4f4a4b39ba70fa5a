//! One run in memory, as plain columns: what the matcher and the model work on. It reads and judges
//! nothing else.

use crate::error::{Error, polars};
use crate::threads;
use polars::prelude::{ChunkedArray, Column, DataFrame, PolarsNumericType, col};
use rayon::prelude::*;
use run_format::{Boundary, Hook, Manifest, Number, Queue, QueueId, Run, Segment, Side, Transport, Window};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// "Not passed or not measured" in a column of times. Times are kept within 0 ..= [`LATEST`], so that no
/// difference overflows.
pub(crate) const NONE: i64 = i64::MIN;
/// The latest time that is taken for one: 36 years after boot.
const LATEST: i64 = 1 << 60;

/// A time, or [`NONE`] where it is none that can be.
pub(crate) fn in_range(time: i64) -> i64 {
    if (0..=LATEST).contains(&time) { time } else { NONE }
}

/// What both sides see of a command on the wire, and what it takes to use that.
pub(crate) const IDENTITY: [&str; 8] =
    ["queue", "cid", "opcode", "nsid", "slba", "nlb", "flags", "stream_position"];

/// One run: its manifest, queues and commands. A column that is null throughout is empty.
#[derive(Debug)]
pub(crate) struct Recording {
    pub(crate) directory: PathBuf,
    pub(crate) manifest: Manifest,
    pub(crate) queues: BTreeMap<QueueId, Queue>,
    pub(crate) broken: usize,
    /// From when to when its probes were armed, on its own clock; `None` where they were throughout.
    pub(crate) slices: Option<Arc<[(i64, i64)]>>,
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
        let mut recording = Recording::empty(run)?;
        let reading = || format!("read the commands of {}", run.directory().display());
        let frame = run
            .commands()?
            .select(recording.columns().into_iter().map(col).collect::<Vec<_>>())
            .collect()
            .map_err(polars(reading()))?;
        if u32::try_from(frame.height()).is_err() {
            return Err(Error::TooMany {
                run: run.directory().display().to_string(),
                commands: frame.height(),
                most: u32::MAX,
            });
        }
        recording.extend(frame).map_err(polars(reading()))?;
        Ok(recording)
    }

    /// A run without its commands.
    ///
    /// # Errors
    /// What reading its queues ended with.
    pub(crate) fn empty(run: &Run) -> Result<Recording, Error> {
        threads::ready()?;
        let (directory, broken) = (run.directory().to_owned(), run.broken_segments().len());
        let mut recording =
            Recording::without_commands(directory, run.manifest().clone(), run.queues()?, broken);
        let plain = |slice: &Window| (slice.start_ns.as_i64(), slice.end_ns.as_i64());
        recording.slices = run.slices()?.map(|slices| slices.iter().map(plain).collect());
        Ok(recording)
    }

    fn without_commands(
        directory: PathBuf,
        manifest: Manifest,
        queues: BTreeMap<QueueId, Queue>,
        broken: usize,
    ) -> Recording {
        Recording {
            directory,
            queues,
            broken,
            slices: None,
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
        }
    }

    /// The same run without commands.
    pub(crate) fn bare(&self) -> Recording {
        let (directory, manifest) = (self.directory.clone(), self.manifest.clone());
        let slices = self.slices.clone();
        Recording {
            slices,
            ..Recording::without_commands(directory, manifest, self.queues.clone(), self.broken)
        }
    }

    /// The names of its columns.
    pub(crate) fn columns(&self) -> Vec<&'static str> {
        let mut names = IDENTITY.to_vec();
        names.extend(["bytes", "status", "cpu", "r2ts"]);
        names.extend(Boundary::of(self.manifest.side).map(Boundary::name));
        names.push(match self.manifest.side {
            Side::Host => "h_r2t_turnaround",
            Side::Target => "t_drive",
        });
        names
    }

    /// Appends the commands of a frame. Columns that it lacks are null throughout.
    pub(crate) fn extend(&mut self, frame: DataFrame) -> polars::prelude::PolarsResult<()> {
        let (before, added) = (self.len(), frame.height());
        // Column by column, so that each frame column is freed as soon as it is copied.
        for column in frame.into_columns() {
            let series = column.as_materialized_series();
            match column.name().as_str() {
                "queue" => plain(&mut self.queue, series.u32()?),
                "cid" => plain(&mut self.cid, series.u16()?),
                "opcode" => plain(&mut self.opcode, series.u8()?),
                "nsid" => plain(&mut self.nsid, series.u32()?),
                "slba" => plain(&mut self.slba, series.u64()?),
                "nlb" => plain(&mut self.nlb, series.u16()?),
                "bytes" => plain(&mut self.bytes, series.u32()?),
                "status" => plain(&mut self.status, series.u16()?),
                "cpu" => plain(&mut self.cpu, series.u16()?),
                "flags" => plain(&mut self.flags, series.u16()?),
                "r2ts" => plain(&mut self.r2ts, series.u8()?),
                "stream_position" => {
                    nullable(&mut self.stream_position, before, series.u32()?, i64::from);
                }
                "h_r2t_turnaround" => times(&mut self.r2t_turnaround, before, &column)?,
                "t_drive" => times(&mut self.drive, before, &column)?,
                name => {
                    if let Some(b) = Boundary::parse(name) {
                        times(&mut self.times[b.slot()], before, &column)?;
                    }
                }
            }
        }
        for column in self.nullables() {
            if !column.is_empty() {
                column.resize(before + added, NONE);
            }
        }
        Ok(())
    }

    /// Appends the commands in some row groups of a segment, with those of its columns that are wanted. `false`, and
    /// nothing appended, where that takes polars.
    pub(crate) fn extend_from(
        &mut self,
        segment: &Segment,
        groups: Range<usize>,
        rows: usize,
        wanted: &[&str],
    ) -> bool {
        /// A column that a segment's is appended to.
        enum Into<'a> {
            U8(&'a mut Vec<u8>),
            U16(&'a mut Vec<u16>),
            U32(&'a mut Vec<u32>),
            U64(&'a mut Vec<u64>),
            Position(&'a mut Vec<i64>),
            Time(&'a mut Vec<i64>),
        }
        /// `of` as values, where there are any; those before are `NONE` where the column was left out so far.
        fn nullable<N: Number>(
            segment: &Segment,
            name: &str,
            groups: Range<usize>,
            (before, rows): (usize, usize),
            of: impl Fn(N) -> i64,
            values: &mut Vec<i64>,
        ) -> Option<usize> {
            let was_left_out = values.is_empty();
            values.reserve(before + rows - values.len());
            values.resize(before, NONE);
            let present = segment.read(name, groups, NONE, of, values)?;
            match present {
                0 if was_left_out => values.clear(),
                0 => values.resize(before + rows, NONE),
                _ => {}
            }
            Some(present)
        }
        let before = self.len();
        let side = self.manifest.side;
        let mut columns = vec![
            ("queue", Into::U32(&mut self.queue)),
            ("cid", Into::U16(&mut self.cid)),
            ("opcode", Into::U8(&mut self.opcode)),
            ("nsid", Into::U32(&mut self.nsid)),
            ("slba", Into::U64(&mut self.slba)),
            ("nlb", Into::U16(&mut self.nlb)),
            ("bytes", Into::U32(&mut self.bytes)),
            ("status", Into::U16(&mut self.status)),
            ("cpu", Into::U16(&mut self.cpu)),
            ("flags", Into::U16(&mut self.flags)),
            ("r2ts", Into::U8(&mut self.r2ts)),
            ("stream_position", Into::Position(&mut self.stream_position)),
            ("h_r2t_turnaround", Into::Time(&mut self.r2t_turnaround)),
            ("t_drive", Into::Time(&mut self.drive)),
        ];
        columns.extend(Boundary::of(side).map(Boundary::name).zip(self.times.iter_mut().map(Into::Time)));
        let read = |(name, into): &mut (&str, Into<'_>)| {
            let groups = groups.clone();
            let all = |present: Option<usize>| present == Some(rows);
            match into {
                Into::U8(values) => all(segment.read(name, groups, 0, |v| v, values)),
                Into::U16(values) => all(segment.read(name, groups, 0, |v| v, values)),
                Into::U32(values) => all(segment.read(name, groups, 0, |v| v, values)),
                Into::U64(values) => all(segment.read(name, groups, 0, |v| v, values)),
                Into::Position(values) => {
                    nullable::<u32>(segment, name, groups, (before, rows), i64::from, values).is_some()
                }
                Into::Time(values) => {
                    nullable(segment, name, groups, (before, rows), in_range, values).is_some()
                }
            }
        };
        columns.retain(|(name, _)| wanted.contains(name));
        let good = columns.par_iter_mut().with_max_len(1).map(read).reduce(|| true, |a, b| a && b);
        drop(columns);
        if good {
            self.nullables().for_each(|column| {
                if !column.is_empty() {
                    column.resize(before + rows, NONE);
                }
            });
        } else {
            self.truncate(before);
        }
        good
    }

    fn truncate(&mut self, rows: usize) {
        self.queue.truncate(rows);
        self.cid.truncate(rows);
        self.opcode.truncate(rows);
        self.nsid.truncate(rows);
        self.slba.truncate(rows);
        self.nlb.truncate(rows);
        self.bytes.truncate(rows);
        self.status.truncate(rows);
        self.cpu.truncate(rows);
        self.flags.truncate(rows);
        self.r2ts.truncate(rows);
        self.nullables().for_each(|column| column.truncate(rows));
    }

    fn nullables(&mut self) -> impl Iterator<Item = &mut Vec<i64>> {
        let own = [&mut self.stream_position, &mut self.r2t_turnaround, &mut self.drive];
        own.into_iter().chain(&mut self.times)
    }

    /// Keeps the rows in `kept`, which are in order, and forgets the others.
    pub(crate) fn keep(&mut self, kept: &[u32]) {
        fn of<T: Copy>(column: &mut Vec<T>, kept: &[u32]) {
            if column.is_empty() {
                return;
            }
            for (n, &row) in kept.iter().enumerate() {
                column[n] = column[row as usize];
            }
            column.truncate(kept.len());
        }
        of(&mut self.queue, kept);
        of(&mut self.cid, kept);
        of(&mut self.opcode, kept);
        of(&mut self.nsid, kept);
        of(&mut self.slba, kept);
        of(&mut self.nlb, kept);
        of(&mut self.bytes, kept);
        of(&mut self.status, kept);
        of(&mut self.cpu, kept);
        of(&mut self.flags, kept);
        of(&mut self.r2ts, kept);
        self.nullables().for_each(|column| of(column, kept));
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
            slices: recorded.slices.clone(),
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

    /// All times at a boundary of this side, by row; empty where there is none.
    pub(crate) fn times_at(&self, boundary: Boundary) -> &[i64] {
        &self.times[boundary.slot()]
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

fn plain<T: PolarsNumericType>(values: &mut Vec<T::Native>, column: &ChunkedArray<T>) {
    values.reserve(column.len());
    for chunk in column.downcast_iter() {
        values.extend_from_slice(chunk.values());
    }
}

/// Appends a column to one that has `before` values, or is empty where all of them are null.
fn nullable<T: PolarsNumericType>(
    values: &mut Vec<i64>,
    before: usize,
    column: &ChunkedArray<T>,
    as_i64: impl Fn(T::Native) -> i64,
) {
    if column.null_count() == column.len() {
        return;
    }
    values.reserve(before + column.len() - values.len());
    values.resize(before, NONE);
    for chunk in column.downcast_iter() {
        let plain = chunk.values().iter().map(|&v| as_i64(v));
        match chunk.validity() {
            None => values.extend(plain),
            Some(valid) => values.extend(plain.zip(valid.iter()).map(|(v, ok)| if ok { v } else { NONE })),
        }
    }
}

fn times(values: &mut Vec<i64>, before: usize, column: &Column) -> polars::prelude::PolarsResult<()> {
    nullable(values, before, column.i64()?, in_range);
    Ok(())
}
