//! The drive: saturated, at a limit, busy with itself, hot, or with a neighbour. What these rules share is here.

mod full;
mod internal;
mod neighbour;
mod throttled;

use super::super::facts::{Facts, Row, over};
use crate::model::SubStage;
use run_format::Stage;

pub(super) use full::{IOPS, SATURATED};
pub(super) use internal::INTERNAL;
pub(super) use neighbour::NEIGHBOUR;
pub(super) use throttled::THROTTLED;

const STORAGE: &[SubStage] = &[SubStage::StorageBlock, SubStage::StorageDrive];

/// By how much a command's storage time is more than its class's median.
fn slowness(facts: &Facts<'_>, row: &Row) -> f64 {
    row.stage(Stage::Storage) as f64 / facts.class(row).stage_medians[Stage::Storage as usize].max(1) as f64
}

fn storage_claim(facts: &Facts<'_>) -> Vec<i64> {
    facts.rows.iter().map(|row| over(row, facts.class(row), STORAGE)).collect()
}
