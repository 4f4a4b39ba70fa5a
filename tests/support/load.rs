//! The stand-in's target and initiator as a load that goes on, to be recorded.

use anyhow::{Result, ensure};
use standin::{Initiator, Summary, Target};
use std::time::Duration;

/// A target and an initiator that is connected to it.
#[derive(Debug)]
pub struct Load {
    pub target: Target,
    pub initiator: Initiator,
}

impl Load {
    /// Starts both. The load begins with `initiator.start()`, and takes this long.
    pub fn new(rw: &str, queue_depth: u32, duration: Duration) -> Result<Load> {
        let target = Target::spawn(Vec::<String>::new())?;
        let initiator = against(&target, rw, queue_depth, duration)?;
        Ok(Load { target, initiator })
    }

    /// Starts both and the load.
    pub fn running(rw: &str, queue_depth: u32, duration: Duration) -> Result<Load> {
        let mut load = Load::new(rw, queue_depth, duration)?;
        load.initiator.start()?;
        Ok(load)
    }

    /// Waits for the load's end, and fails if it was harmed in any way.
    pub fn unharmed(self) -> Result<Summary> {
        let summary = self.initiator.finish()?;
        ensure!(summary.errors == 0 && summary.verify_errors == 0, "{summary:?}");
        self.target.stop()?;
        Ok(summary)
    }
}

/// An initiator that is connected to this target and checks every byte.
pub fn against(target: &Target, rw: &str, queue_depth: u32, duration: Duration) -> Result<Initiator> {
    Initiator::spawn([
        "--connect",
        &target.address().to_string(),
        "--rw",
        rw,
        "--queue-depth",
        &queue_depth.to_string(),
        "--duration",
        &format!("{}ms", duration.as_millis()),
        "--region",
        "8M",
        "--verify",
    ])
}
