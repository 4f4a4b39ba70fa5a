//! The joined commands as a polars frame, for whoever goes on with them: compare, diagnose, batch, export.

use crate::error::{Error, polars};
use crate::join::Joined;
use crate::model::SubStage;
use crate::recording::NONE;
use polars::prelude::{
    ChunkedArray, Column, DataFrame, Int64Chunked, IntoColumn, NewChunkedArray, PolarsNumericType, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use run_format::{Boundary, Side, Stage};

fn numbers<T: PolarsNumericType>(name: &str, values: impl Iterator<Item = T::Native>) -> Column
where
    ChunkedArray<T>: NewChunkedArray<T, T::Native> + IntoColumn,
{
    ChunkedArray::<T>::from_iter_values(name.into(), values).into_column()
}

impl Joined {
    /// One row a pair, in the order of [`Joined::pairs`]: identity (`host_queue`, `target_queue`, `cid`,
    /// `opcode`, `nsid`, `slba`, `nlb`, `bytes`, `status`, `host_cpu`, `target_cpu`, `r2ts`), every boundary
    /// as it was recorded (ns on its own side's clock, null where not passed or not measured), `latency`,
    /// the five stages, their parts (storage's null where the drive's time is not known), and `clock_offset` and `clock_uncertainty` (all ns).
    ///
    /// # Errors
    /// When polars can not build the frame.
    pub fn frame(&self) -> Result<DataFrame, Error> {
        let pairs = &self.pairs;
        let h = || pairs.iter().map(|p| p.host_row as usize);
        let t = || pairs.iter().map(|p| p.target_row as usize);
        let (host, target) = (&self.host, &self.target);
        let mut columns = vec![
            numbers::<UInt32Type>("host_queue", h().map(|r| host.queue[r])),
            numbers::<UInt32Type>("target_queue", t().map(|r| target.queue[r])),
            numbers::<UInt16Type>("cid", h().map(|r| host.cid[r])),
            numbers::<UInt8Type>("opcode", h().map(|r| host.opcode[r])),
            numbers::<UInt32Type>("nsid", h().map(|r| host.nsid[r])),
            numbers::<UInt64Type>("slba", h().map(|r| host.slba[r])),
            numbers::<UInt16Type>("nlb", h().map(|r| host.nlb[r])),
            numbers::<UInt32Type>("bytes", h().map(|r| host.bytes[r])),
            numbers::<UInt16Type>("status", h().map(|r| host.status[r])),
            numbers::<UInt16Type>("host_cpu", h().map(|r| host.cpu[r])),
            numbers::<UInt16Type>("target_cpu", t().map(|r| target.cpu[r])),
            numbers::<UInt8Type>(
                "r2ts",
                pairs.iter().map(|p| host.r2ts[p.host_row as usize].max(target.r2ts[p.target_row as usize])),
            ),
        ];
        for &b in Boundary::ALL {
            let times = pairs.iter().map(|p| {
                let time = match b.side() {
                    Side::Host => host.time(b, p.host_row as usize),
                    Side::Target => target.time(b, p.target_row as usize),
                };
                (time != NONE).then_some(time)
            });
            columns.push(Int64Chunked::from_iter_options(b.name().into(), times).into_column());
        }
        let mut values: Vec<(&str, Vec<Option<i64>>)> = std::iter::once("latency")
            .chain(Stage::ALL.iter().map(|s| s.name()))
            .chain(SubStage::ALL.iter().map(|s| s.name()))
            .chain(["clock_offset", "clock_uncertainty"])
            .map(|name| (name, Vec::with_capacity(pairs.len())))
            .collect();
        for &pair in pairs {
            let Some(terms) = self.terms(pair) else { continue };
            let stages = terms.stages();
            let (offset, uncertainty) = self.offset_of(pair);
            let parts = terms.sub_stages(offset);
            let known = |s: &SubStage| s.stage() != Stage::Storage || terms.drive.is_some();
            let row = std::iter::once(stages.latency)
                .chain(stages.stages)
                .map(Some)
                .chain(SubStage::ALL.iter().zip(parts).map(|(s, v)| known(s).then_some(v)))
                .chain([Some(offset), Some(uncertainty)]);
            for (column, value) in values.iter_mut().zip(row) {
                column.1.push(value);
            }
        }
        columns.extend(values.into_iter().map(|(name, values)| {
            Int64Chunked::from_iter_options(name.into(), values.into_iter()).into_column()
        }));
        DataFrame::new(pairs.len(), columns).map_err(polars("put the joined commands into a frame"))
    }
}
