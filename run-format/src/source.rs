//! What a recorder asks of a source of commands: the contract between the probe crates and everything
//! behind them.

use crate::{Command, Counters, Event, Hook, Kind, Nanos, Queue, QueueId, Side, Software};
use std::time::Duration;

/// Where a source puts what it sees. Implemented by [`crate::RunWriter`], and by views that keep no run.
pub trait Sink {
    /// A queue was found or came; its number is for this sink's commands.
    fn queue(&mut self, queue: Queue) -> QueueId;
    /// What is known of a queue is now this (a source may learn the NQNs after the first commands).
    fn queue_is(&mut self, id: QueueId, queue: Queue);
    /// A queue went.
    fn queue_went(&mut self, id: QueueId, at: Nanos);
    /// A command is over.
    fn command(&mut self, command: &Command);
    /// Something else happened.
    fn event(&mut self, event: Event);
}

/// An attached source. Dropping it detaches every probe.
pub trait Source {
    /// What a source reports when it can not go on.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Which end it records.
    fn side(&self) -> Side;
    /// What software it records.
    fn kind(&self) -> Kind;
    /// That software, by name and version.
    fn software(&self) -> Software;
    /// How each boundary of its side is taken, one entry a boundary.
    fn hooks(&self) -> Vec<Hook>;
    /// Takes what has come, waiting at most `timeout` for the first; returns the number of commands taken.
    ///
    /// # Errors
    /// When the source can not go on (its process ended, its ring is gone).
    fn poll(&mut self, timeout: Duration, sink: &mut dyn Sink) -> Result<usize, Self::Error>;
    /// Whether its probes can be taken away and put back while it records.
    fn has_windows(&self) -> bool {
        false
    }
    /// Takes the probes away until [`Source::arm`], so that what is recorded runs as if there were none, and hands
    /// over what is in the ring. Commands that are not over are counted as [`Counters::cut`]. Taking probes away goes
    /// on when this returns, and soon ends. Nothing happens where they are away, or where [`Source::has_windows`] is
    /// not so.
    ///
    /// # Errors
    /// As [`Source::poll`].
    fn disarm(&mut self, sink: &mut dyn Sink) -> Result<(), Self::Error> {
        self.poll(Duration::ZERO, sink).map(drop)
    }
    /// Puts the probes back in place; when this returns `true`, all are. Commands that have begun meanwhile may lack
    /// boundaries: it is for the caller to leave out all that began before. `false`, and nothing is done, while too
    /// much of what was taken away earlier still waits for the kernel to let it go.
    ///
    /// # Errors
    /// When the kernel refuses a probe that it took before.
    fn arm(&mut self) -> Result<bool, Self::Error> {
        Ok(true)
    }
    /// Stops new commands from being taken, then hands over what is still in the ring.
    ///
    /// # Errors
    /// As [`Source::poll`].
    fn stop(&mut self, sink: &mut dyn Sink) -> Result<(), Self::Error>;
    /// The counters now. After [`Source::stop`] they add up exactly. `recorded` counts the records that the
    /// source handed to its sink.
    ///
    /// # Errors
    /// When the maps can not be read.
    fn counters(&self) -> Result<Counters, Self::Error>;
    /// Whether that which is recorded has ended (a process that exited).
    fn ended(&self) -> bool {
        false
    }
}
