//! Where a recording goes: into a run on disk, or into a view that keeps none. The recorder, its windows and its
//! telemetry know no more of it than this.

use crate::telemetry::Keeping;
use anyhow::{Context, Result};
use run_format::{Counters, Manifest, Nanos, RunWriter, Sink, TelemetryWriter, Window};
use std::path::Path;

/// What a recording is put into.
pub trait Destination: Sink {
    /// What is recorded, and how; the recorder keeps it up to date.
    fn manifest(&mut self) -> &mut Manifest;
    /// Where its telemetry goes.
    ///
    /// # Errors
    /// When there is no place for it.
    fn telemetry(&mut self) -> Result<Keeping>;
    /// The directory that a command's output may be kept in.
    fn directory(&self) -> Option<&Path>;
    /// A slice of a windowed recording has begun, and is to end when it says.
    fn slice_begins(&mut self, slice: Window);
    /// A slice of a windowed recording is over.
    ///
    /// # Errors
    /// When it can not be kept.
    fn slice(&mut self, slice: Window) -> Result<()>;
    /// Whether [`Destination::tick`] will make use of the manifest, which is to be up to date then.
    fn is_due(&self) -> bool;
    /// Does what is due; to be called many times a second.
    ///
    /// # Errors
    /// When the recording can not go on.
    fn tick(&mut self) -> Result<()>;
    /// Why the recording is to end, where whoever looks at it has had enough.
    fn enough(&self) -> Option<&'static str> {
        None
    }
    /// Ends in order.
    ///
    /// # Errors
    /// When what is left can not be kept or shown.
    fn close(self: Box<Self>, counters: Counters, end: Nanos) -> Result<()>;
    /// Leaves nothing behind: the recording never began.
    fn discard(self: Box<Self>);
    /// What it is called in the line at the end.
    fn name(&self) -> String;
}

/// What the errors of a run are about.
const WRITING: &str = "write the run";

impl Destination for RunWriter {
    fn manifest(&mut self) -> &mut Manifest {
        RunWriter::manifest(self)
    }

    fn telemetry(&mut self) -> Result<Keeping> {
        Ok(Keeping::Run(TelemetryWriter::create(RunWriter::directory(self))?))
    }

    fn directory(&self) -> Option<&Path> {
        Some(RunWriter::directory(self))
    }

    fn slice_begins(&mut self, slice: Window) {
        RunWriter::slice_begins(self, slice);
    }

    fn slice(&mut self, slice: Window) -> Result<()> {
        RunWriter::slice(self, slice).context(WRITING)
    }

    fn is_due(&self) -> bool {
        RunWriter::is_due(self)
    }

    fn tick(&mut self) -> Result<()> {
        RunWriter::tick(self).context(WRITING)
    }

    fn close(self: Box<Self>, counters: Counters, end: Nanos) -> Result<()> {
        RunWriter::close(*self, counters, end).context(WRITING)
    }

    fn discard(self: Box<Self>) {
        let directory = RunWriter::directory(&self).to_owned();
        drop(self);
        let _ = std::fs::remove_dir_all(directory);
    }

    fn name(&self) -> String {
        RunWriter::directory(self).display().to_string()
    }
}
