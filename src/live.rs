//! A recording that keeps no run: its commands go to the aggregator, and what is made of them to whoever shows it.

use crate::destination::Destination;
use crate::telemetry::Keeping;
use anyhow::Result;
use joiner::live::{Live, LiveOptions};
use run_format::{
    Command, Counters, Event, Manifest, Nanos, Queue, QueueId, Sink, TelemetryBatch, Window, monotonic_now,
};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Batches of telemetry that may wait; the sampler waits where there are more.
const BATCHES: usize = 256;

/// What shows a side.
pub trait Show {
    /// A slot is over, or the recording is.
    ///
    /// # Errors
    /// When it can not be shown.
    fn news(&mut self, live: &Live, manifest: &Manifest) -> Result<()>;
    /// Does what is due besides; called many times a second, and to be cheap.
    ///
    /// # Errors
    /// When it can not be shown.
    fn tick(&mut self, live: &Live, manifest: &Manifest) -> Result<()>;
    /// Why the recording is to end, where it has shown enough.
    fn enough(&self) -> Option<&'static str>;
}

/// The destination of a recording that is shown and not kept.
pub struct View<S> {
    manifest: Manifest,
    live: Live,
    batches: Receiver<TelemetryBatch>,
    /// What the telemetry gets, once.
    sender: Option<SyncSender<TelemetryBatch>>,
    name: &'static str,
    show: S,
}

impl<S: Show> View<S> {
    /// A view of what the manifest describes; `name` is the subcommand.
    pub fn new(name: &'static str, manifest: Manifest, options: LiveOptions, show: S) -> View<S> {
        let options = LiveOptions { one_in: manifest.one_in.max(1), ..options };
        let mut live = Live::new(manifest.side, options, monotonic_now());
        if manifest.windows.is_some() {
            live.set_windowed();
        }
        let (sender, batches) = sync_channel(BATCHES);
        View { manifest, live, batches, sender: Some(sender), name, show }
    }

    fn take_telemetry(&mut self) {
        while let Ok(batch) = self.batches.try_recv() {
            self.live.telemetry(&batch);
        }
    }
}

impl<S: Show> Sink for View<S> {
    fn queue(&mut self, queue: Queue) -> QueueId {
        self.live.queue(queue)
    }

    fn queue_is(&mut self, id: QueueId, queue: Queue) {
        self.live.queue_is(id, queue);
    }

    fn queue_went(&mut self, id: QueueId, at: Nanos) {
        self.live.queue_went(id, at);
    }

    fn command(&mut self, command: &Command) {
        self.live.command(command);
    }

    fn event(&mut self, event: Event) {
        self.live.event(event);
    }
}

impl<S: Show> Destination for View<S> {
    fn manifest(&mut self) -> &mut Manifest {
        &mut self.manifest
    }

    fn telemetry(&mut self) -> Result<Keeping> {
        let sender = self.sender.take();
        // A second one would find nobody who listens.
        Ok(Keeping::View(sender.unwrap_or_else(|| sync_channel(1).0).into()))
    }

    fn directory(&self) -> Option<&Path> {
        None
    }

    fn slice_begins(&mut self, _: Window) {}

    fn slice(&mut self, slice: Window) -> Result<()> {
        if slice.start_ns < slice.end_ns {
            self.live.armed(slice);
            if let Some(windows) = &mut self.manifest.windows {
                windows.slices += 1;
                windows.armed_ns += slice.end_ns.0 - slice.start_ns.0;
            }
        }
        Ok(())
    }

    fn is_due(&self) -> bool {
        self.live.is_due(monotonic_now())
    }

    fn tick(&mut self) -> Result<()> {
        if self.live.advance(monotonic_now()) {
            self.take_telemetry();
            self.show.news(&self.live, &self.manifest)?;
        }
        self.show.tick(&self.live, &self.manifest)
    }

    fn enough(&self) -> Option<&'static str> {
        self.show.enough()
    }

    fn close(mut self: Box<Self>, counters: Counters, _: Nanos) -> Result<()> {
        self.manifest.counters = counters;
        self.take_telemetry();
        self.live.end_slot(monotonic_now());
        if self.show.enough().is_none() {
            self.show.news(&self.live, &self.manifest)?;
        }
        Ok(())
    }

    fn discard(self: Box<Self>) {}

    fn name(&self) -> String {
        self.name.to_owned()
    }
}
