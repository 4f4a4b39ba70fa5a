//! What an SPDK process does at present, by its RPC: commands and the time that its reactors were busy with them. It
//! changes nothing, and needs no probe.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::directory::Directory;
use super::events::Events;
use super::layout::Layout;
use super::memory::Shared;
use super::rpc::{self, Rpc, RpcError};
use super::ticks::Ticks;
use super::{find, target};
use crate::{Error, Process};

/// What was done in a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Commands that ended.
    pub commands: u64,
    /// The time that all reactors together were busy.
    pub busy: Duration,
    /// The while.
    pub over: Duration,
}

impl Load {
    /// Core time of a command, in nanoseconds; none where there was no command.
    #[must_use]
    pub fn per_command_ns(&self) -> Option<f64> {
        (self.commands > 0).then(|| self.busy.as_nanos() as f64 / self.commands as f64)
    }
}

/// Watches a process for a while.
///
/// # Errors
/// Why nothing can be said: none of its RPC sockets answers, or it tells nothing of its commands.
pub fn load(process: &Process, named: Option<&Path>, over: Duration) -> Result<Load, String> {
    rpc::first(process.pid, named, |rpc| match watch(rpc, over) {
        Ok(Some(load)) => Ok(load),
        Ok(None) => Err("its RPC tells nothing of reactors and commands".to_owned()),
        Err(error) => Err(error.to_string()),
    })
}

fn watch(rpc: &Rpc, over: Duration) -> Result<Option<Load>, RpcError> {
    let first = Snapshot::take(rpc)?;
    let since = Instant::now();
    std::thread::sleep(over);
    let last = Snapshot::take(rpc)?;
    Ok(first.zip(last).map(|(first, last)| first.until(&last, since.elapsed())))
}

/// The counters at an instant.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Snapshot {
    commands: u64,
    /// Ticks, and how many there are in a second.
    busy: u64,
    rate: u64,
}

impl Snapshot {
    fn take(rpc: &Rpc) -> Result<Option<Snapshot>, RpcError> {
        let reactors = rpc.call("framework_get_reactors", None)?;
        // An application without the target has bdevs that it uses.
        let commands = match rpc.call("nvmf_get_stats", None) {
            Ok(stats) => of_target(&stats),
            Err(RpcError::Refused { .. }) => of_bdevs(&rpc.call("bdev_get_iostat", None)?),
            Err(error) => return Err(error),
        };
        Ok(commands.zip(busy(&reactors)).map(|(commands, (busy, rate))| Snapshot { commands, busy, rate }))
    }

    fn until(&self, later: &Snapshot, over: Duration) -> Load {
        let ticks = later.busy.saturating_sub(self.busy);
        let nanos = u128::from(ticks) * 1_000_000_000 / u128::from(self.rate.max(1));
        Load {
            commands: later.commands.saturating_sub(self.commands),
            busy: Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)),
            over,
        }
    }
}

/// Busy ticks of all reactors, and the ticks of a second.
fn busy(answer: &Value) -> Option<(u64, u64)> {
    let rate = answer.get("tick_rate")?.as_u64().filter(|rate| *rate > 0)?;
    let each = answer.get("reactors")?.as_array()?.iter().map(|reactor| reactor.get("busy")?.as_u64());
    each.sum::<Option<u64>>().map(|busy| (busy, rate))
}

fn of_target(answer: &Value) -> Option<u64> {
    let groups = answer.get("poll_groups")?.as_array()?;
    groups.iter().map(|group| group.get("completed_nvme_io")?.as_u64()).sum()
}

fn of_bdevs(answer: &Value) -> Option<u64> {
    let of = |bdev: &Value| -> u64 {
        let counts = ["num_read_ops", "num_write_ops", "num_unmap_ops"];
        counts.iter().filter_map(|name| bdev.get(name)?.as_u64()).sum()
    };
    Some(answer.get("bdevs")?.as_array()?.iter().map(of).sum())
}

/// Whether a recording could take its commands from the process's trace ring.
///
/// # Errors
/// Why not.
pub fn ring_usable(process: &Process, named: Option<&Path>) -> Result<(), Error> {
    let (file, path) = find::ring_of(process.pid)?;
    let bad = |why: String| Error::TraceRing { path: path.clone(), why };
    let file = Arc::new(Shared::new(file).map_err(|error| bad(error.to_string()))?);
    let layout = Layout::read(&file).map_err(bad)?;
    Events::new(&layout)
        .map_err(|lacking| Error::NoTracepoints { path: path.clone(), lacking: lacking.join(", ") })?;
    Ticks::new(layout.rate)?;
    target(process.pid, &path, named).map(|_| ())
}

/// Whether a recording by the ring would record when responses were sent, which it does of connections that leave the
/// machine: there is one, or there is none at all and the target listens where one may come from. So it is, too, where
/// the target does not say.
#[must_use]
pub fn ring_sends(process: &Process, named: Option<&Path>) -> bool {
    let Ok((_, path)) = find::ring_of(process.pid) else { return true };
    let directory = target(process.pid, &path, named).ok().and_then(|rpc| Directory::ask(&rpc).ok());
    directory.is_none_or(|directory| directory.may_become_remote())
}

#[cfg(test)]
mod tests {
    use super::{Load, Snapshot, busy, of_bdevs, of_target};
    use serde_json::json;
    use std::time::Duration;

    #[test]
    fn the_counters_are_summed_over_reactors_groups_and_bdevs() {
        let reactors = json!({ "tick_rate": 2_000_000_000u64, "reactors": [
            { "lcore": 0, "busy": 10, "idle": 5 }, { "lcore": 1, "busy": 30, "idle": 5 } ] });
        assert_eq!(busy(&reactors), Some((40, 2_000_000_000)));
        let stats = json!({ "poll_groups": [{ "completed_nvme_io": 3 }, { "completed_nvme_io": 4 }] });
        assert_eq!(of_target(&stats), Some(7));
        let bdevs = json!({ "bdevs": [{ "num_read_ops": 3, "num_write_ops": 1 }, { "num_read_ops": 2 }] });
        assert_eq!(of_bdevs(&bdevs), Some(6));
        for odd in
            [json!(null), json!([]), json!({ "tick_rate": 0, "reactors": [] }), json!({ "reactors": 7 })]
        {
            assert_eq!((busy(&odd), of_target(&odd), of_bdevs(&odd)), (None, None, None));
        }
        assert_eq!(busy(&json!({ "tick_rate": 1, "reactors": [{ "lcore": 0 }] })), None);
    }

    #[test]
    fn the_load_is_what_came_between_and_never_negative() {
        let at = |commands, busy| Snapshot { commands, busy, rate: 2_000_000_000 };
        let over = Duration::from_millis(200);
        let load = at(10, 100).until(&at(110, 400_100), over);
        assert_eq!(load, Load { commands: 100, busy: Duration::from_micros(200), over });
        assert_eq!(load.per_command_ns(), Some(2000.0));
        // A target that was started anew counts from nothing.
        let load = at(10, 100).until(&at(0, 0), over);
        assert_eq!((load.commands, load.busy, load.per_command_ns()), (0, Duration::ZERO, None));
    }
}
