//! What holds for every run that was recorded in time windows.

use anyhow::{Context, Result, ensure};
use run_format::{Manifest, Run};

/// `seen = recorded + unsampled + lost + in flight`, with nothing left under way.
pub fn adds_up(manifest: &Manifest) -> Result<()> {
    let c = manifest.counters;
    let whole = c.recorded + c.unsampled + c.lost.total() + c.in_flight;
    ensure!(c.seen == whole && c.in_flight == 0, "{c:?}");
    Ok(())
}

/// The commands of a run that are not whole within one of its slices.
pub fn astray(run: &Run) -> Result<(usize, usize)> {
    let slices = run.slices()?.context("it was windowed")?;
    let frame = run.commands()?.collect()?;
    let times: Vec<Vec<Option<i64>>> = frame
        .columns()
        .iter()
        .filter(|column| {
            let name = column.name().as_str();
            name.starts_with("h_") && name != "h_r2t_turnaround"
                || name.starts_with("t_") && name != "t_drive"
        })
        .map(|column| Ok(column.i64()?.iter().collect()))
        .collect::<Result<_>>()?;
    let mut astray = 0;
    for row in 0..frame.height() {
        let of = || times.iter().filter_map(|column| column[row]);
        let (Some(first), Some(last)) = (of().min(), of().max()) else {
            astray += 1;
            continue;
        };
        let within = slices.iter().any(|s| s.start_ns.as_i64() <= first && last <= s.end_ns.as_i64());
        astray += usize::from(!within);
    }
    Ok((frame.height(), astray))
}
