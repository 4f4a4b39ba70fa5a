//! One side's commands as they come: rates, latency and own stages over the last seconds and since the start, in
//! bounded memory. It keeps no command, and joins nothing: what the other side knows is not here.
//!
//! Time is cut into slots. A command is counted in the slot in which its record comes, and what is shown is of whole
//! slots. Only the current slot's histograms are touched by a command; longer stretches are sums of slots.

pub mod openmetrics;
mod rolling;
mod telemetry;
mod text;
mod view;

pub use rolling::Over;
pub use text::byte_rate;
pub use view::{
    ClassView, LeftOut, LiveView, QueueView, StageView, Stretch, TelemetryView, Totals, WATCH_SCHEMA,
    WindowsView,
};

use crate::model::{host_alone, target_alone};
use crate::recording::{NONE, in_range};
use rolling::{Figures, QueueFigures, Rolling, SLOTS};
use run_format::{Command, Event, Nanos, Queue, QueueId, Side, Sink, TelemetryBatch, Window};
use std::time::Duration;
use telemetry::Values;

/// What is kept at most, and how time is cut.
#[derive(Clone, Copy, Debug)]
pub struct LiveOptions {
    /// How long a slot is.
    pub slot: Duration,
    /// Classes that are told apart; the commands of more are in one class of others.
    pub classes: usize,
    /// Queues that are told apart at once; the commands of more are those of other queues.
    pub queues: usize,
    /// One command in this many is kept: rates are so many times what came.
    pub one_in: u32,
}

impl Default for LiveOptions {
    fn default() -> LiveOptions {
        LiveOptions { slot: Duration::from_secs(1), classes: 24, queues: 64, one_in: 1 }
    }
}

/// A queue that is told apart, or was.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) queue: Queue,
    pub(crate) figures: Rolling<QueueFigures>,
}

/// The aggregator: a sink of one side's commands.
#[derive(Debug)]
pub struct Live {
    side: Side,
    options: LiveOptions,
    began: Nanos,
    /// When the current slot began.
    slot_began: Nanos,
    slots: u64,
    /// How long probes were armed, ns: rates are those of this time.
    armed: Rolling<u64>,
    is_windowed: bool,
    keys: Vec<(u8, u32, bool)>,
    classes: Vec<Rolling<Figures>>,
    others: Rolling<Figures>,
    places: Vec<Place>,
    other_queues: Rolling<QueueFigures>,
    queues_left_out: u64,
    /// Commands without figures: cancelled, failed over or lacking times, and those whose times run backwards.
    unfinished: u64,
    backwards: u64,
    events: u64,
    values: Values,
}

/// The number of all queues that are not told apart.
const OTHER: QueueId = QueueId(u32::MAX);

impl Live {
    /// Nothing has come yet.
    #[must_use]
    pub fn new(side: Side, options: LiveOptions, now: Nanos) -> Live {
        Live {
            side,
            options,
            began: now,
            slot_began: now,
            slots: 0,
            armed: Rolling::default(),
            is_windowed: false,
            keys: Vec::new(),
            classes: Vec::new(),
            others: Rolling::default(),
            places: Vec::new(),
            other_queues: Rolling::default(),
            queues_left_out: 0,
            unfinished: 0,
            backwards: 0,
            events: 0,
            values: Values::default(),
        }
    }

    /// Ends the current slot if its time is over, and says whether it did. A slot that is looked at late is so much
    /// longer: rates are of the time that it really took.
    pub fn advance(&mut self, now: Nanos) -> bool {
        let is_due = self.is_due(now);
        if is_due {
            self.end_slot(now);
        }
        is_due
    }

    /// Whether the current slot's time is over.
    #[must_use]
    pub fn is_due(&self, now: Nanos) -> bool {
        now.0.saturating_sub(self.slot_began.0) >= nanos(self.options.slot)
    }

    /// Ends the current slot now.
    pub fn end_slot(&mut self, now: Nanos) {
        if !self.is_windowed {
            self.armed.now = now.0.saturating_sub(self.slot_began.0);
        }
        self.slot_began = now;
        self.slots += 1;
        let ends_group = self.slots.is_multiple_of(SLOTS as u64);
        self.armed.end_slot(ends_group);
        for class in self.classes.iter_mut().chain([&mut self.others]) {
            class.end_slot(ends_group);
        }
        for place in &mut self.places {
            place.figures.end_slot(ends_group);
        }
        self.other_queues.end_slot(ends_group);
    }

    /// The probes are armed in windows only.
    pub fn set_windowed(&mut self) {
        self.is_windowed = true;
    }

    /// The probes were armed for this slice.
    pub fn armed(&mut self, slice: Window) {
        self.armed.now += slice.end_ns.0.saturating_sub(slice.start_ns.0);
    }

    /// Rows of telemetry came.
    pub fn telemetry(&mut self, batch: &TelemetryBatch) {
        self.values.take(batch);
    }

    /// The side.
    #[must_use]
    pub fn side(&self) -> Side {
        self.side
    }

    /// A place for a queue: one that is free, or that of a queue which went and whose commands are forgotten but for
    /// their number.
    fn place(&mut self) -> Option<usize> {
        if self.places.len() < self.options.queues {
            return Some(self.places.len());
        }
        let free = self.places.iter().position(|p| p.queue.went.is_some() && p.figures.is_idle())?;
        self.other_queues.inherit(&self.places[free].figures);
        Some(free)
    }
}

impl Sink for Live {
    fn queue(&mut self, queue: Queue) -> QueueId {
        let Some(place) = self.place() else {
            self.queues_left_out += 1;
            return OTHER;
        };
        let new = Place { queue, figures: Rolling::default() };
        match self.places.get_mut(place) {
            Some(old) => *old = new,
            None => self.places.push(new),
        }
        QueueId(u32::try_from(place).unwrap_or(u32::MAX))
    }

    fn queue_is(&mut self, id: QueueId, queue: Queue) {
        if let Some(place) = self.places.get_mut(id.0 as usize) {
            place.queue = queue;
        }
    }

    fn queue_went(&mut self, id: QueueId, at: Nanos) {
        if let Some(place) = self.places.get_mut(id.0 as usize) {
            place.queue.went.get_or_insert(at);
        }
    }

    fn command(&mut self, command: &Command) {
        let Some(times) = own_times(self.side, command) else {
            self.unfinished += 1;
            return;
        };
        if times.iter().any(|&time| time < 0) {
            self.backwards += 1;
            return;
        }
        let key = (command.opcode, command.bytes, command.status != 0);
        let class = match self.keys.iter().position(|known| *known == key) {
            Some(known) => &mut self.classes[known],
            None if self.keys.len() < self.options.classes => {
                self.keys.push(key);
                self.classes.push(Rolling::default());
                let new = self.classes.len() - 1;
                &mut self.classes[new]
            }
            None => &mut self.others,
        };
        class.now.command(&times, command.bytes);
        let place = self.places.get_mut(command.queue.0 as usize);
        place.map_or(&mut self.other_queues, |p| &mut p.figures).now.command(&times, command.bytes);
    }

    fn event(&mut self, _: Event) {
        self.events += 1;
    }
}

/// A command's whole time on this side, its two stages and the rest, ns; `None` where it lacks times.
fn own_times(side: Side, command: &Command) -> Option<[i64; 4]> {
    let time = |time: Option<Nanos>| time.map_or(NONE, |t| in_range(t.as_i64()));
    match side {
        Side::Host => host_alone(&command.times.map(time), time(command.r2t_turnaround), command.flags),
        Side::Target => {
            let [times @ .., _] = command.times.map(time);
            target_alone(&times)
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
