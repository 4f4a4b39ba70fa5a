//! A sink that keeps everything in memory, for the tests of this folder and for those inside the crate.

use run_format::{Command, Event, Nanos, Queue, QueueId, Sink};

/// Keeps everything in memory.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub(crate) queues: Vec<Queue>,
    pub(crate) commands: Vec<Command>,
    pub(crate) events: Vec<Event>,
}

impl Sink for Kept {
    fn queue(&mut self, queue: Queue) -> QueueId {
        self.queues.push(queue);
        QueueId(self.queues.len() as u32 - 1)
    }

    fn queue_is(&mut self, id: QueueId, queue: Queue) {
        self.queues[id.0 as usize] = queue;
    }

    fn queue_went(&mut self, id: QueueId, at: Nanos) {
        self.queues[id.0 as usize].went = Some(at);
    }

    fn command(&mut self, command: &Command) {
        self.commands.push(command.clone());
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

impl Kept {
    /// The queue of a command.
    pub(crate) fn queue_of(&self, command: &Command) -> &Queue {
        &self.queues[command.queue.0 as usize]
    }
}
