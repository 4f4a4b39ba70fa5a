//! Keeps track of the queues that the programs tell of, and of their comings and goings. It knows no
//! maps and no ring.

use crate::message::{EventKind, EventMessage, QueueMessage};
use run_format::{Nanos, Queue, QueueId, Sink};
use std::collections::HashMap;

/// One connection of one queue.
#[derive(Debug)]
struct Known {
    instance: i32,
    queue: Queue,
    /// The key that it was told with first.
    key: u64,
    /// Its number in the sink, once it has had a command.
    id: Option<QueueId>,
}

/// The queues by the key that their commands carry.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    known: Vec<Known>,
    keys: HashMap<u64, usize>,
}

impl Queues {
    /// Takes in a queue. Two CPUs may tell of the same connection at once, each with its own key.
    pub(crate) fn told(&mut self, message: QueueMessage) {
        let same = self.known.iter().position(|known| {
            known.queue.went.is_none()
                && known.instance == message.instance
                && known.queue.qid == message.queue.qid
                && known.queue.cntlid == message.queue.cntlid
                && known.queue.transport == message.queue.transport
                && known.queue.host == message.queue.host
                && known.queue.host.is_some()
        });
        let index = same.unwrap_or_else(|| {
            let (key, instance, queue) = (message.key, message.instance, message.queue);
            self.known.push(Known { instance, queue, key, id: None });
            self.known.len() - 1
        });
        self.keys.insert(message.key, index);
    }

    /// The sink's number for a command's queue; `None` when nothing was told of it.
    pub(crate) fn id(&mut self, key: u64, sink: &mut dyn Sink) -> Option<QueueId> {
        let known = &mut self.known[*self.keys.get(&key)?];
        if known.id.is_none() {
            let id = sink.queue(known.queue.clone());
            if let Some(at) = known.queue.went {
                sink.queue_went(id, at);
            }
            known.id = Some(id);
        }
        known.id
    }

    /// Ends the queues that an event ends.
    pub(crate) fn happened(&mut self, event: &EventMessage, sink: &mut dyn Sink) {
        let ends: &dyn Fn(&Known) -> bool = match event.kind {
            EventKind::Connecting | EventKind::Deleting | EventKind::Dead => &|_| true,
            EventKind::Connect => &|known| known.queue.qid == event.qid,
            EventKind::QueueGone => &|known| known.key == event.key,
            // While a controller is being reset or has failed its queues still serve what they have.
            EventKind::Resetting
            | EventKind::Live
            | EventKind::Timeout
            | EventKind::Fatal
            | EventKind::NamespaceEnabled
            | EventKind::NamespaceDisabled => &|_| false,
        };
        for known in &mut self.known {
            if known.instance == event.instance && known.queue.went.is_none() && ends(known) {
                // What was told of after the event is not ended by it.
                if known.queue.came > event.at && event.kind != EventKind::Deleting {
                    continue;
                }
                known.queue.went = Some(Nanos(event.at.0.max(known.queue.came.0)));
                if let Some(id) = known.id {
                    sink.queue_went(id, event.at);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use run_format::{Command, Endpoint, Event};

    #[derive(Default)]
    struct Book {
        queues: Vec<Queue>,
        went: Vec<(QueueId, Nanos)>,
    }

    impl Sink for Book {
        fn queue(&mut self, queue: Queue) -> QueueId {
            self.queues.push(queue);
            QueueId(u32::try_from(self.queues.len() - 1).unwrap())
        }
        fn queue_is(&mut self, _: QueueId, _: Queue) {}
        fn queue_went(&mut self, id: QueueId, at: Nanos) {
            self.went.push((id, at));
        }
        fn command(&mut self, _: &Command) {}
        fn event(&mut self, _: Event) {}
    }

    fn message(key: u64, qid: u16, port: u16, came: u64) -> QueueMessage {
        let host = Some(Endpoint { address: "10.0.0.1".to_owned(), port });
        QueueMessage { key, instance: 0, queue: Queue { qid, host, came: Nanos(came), ..Queue::default() } }
    }

    fn event(kind: EventKind, qid: u16, at: u64) -> EventMessage {
        EventMessage { kind, at: Nanos(at), instance: 0, qid, key: 0 }
    }

    #[test]
    fn two_keys_of_one_connection_are_one_queue() {
        let (mut queues, mut book) = (Queues::default(), Book::default());
        queues.told(message(1, 1, 40000, 10));
        queues.told(message(2, 1, 40000, 11));
        queues.told(message(3, 2, 40001, 11));
        assert_eq!(queues.id(1, &mut book), queues.id(2, &mut book));
        assert_ne!(queues.id(1, &mut book), queues.id(3, &mut book));
        assert_eq!(queues.id(9, &mut book), None);
        assert_eq!(book.queues.len(), 2);
    }

    #[test]
    fn a_reset_ends_the_queues_and_a_reconnect_makes_new_ones() {
        let (mut queues, mut book) = (Queues::default(), Book::default());
        queues.told(message(1, 1, 40000, 10));
        let first = queues.id(1, &mut book).unwrap();
        queues.happened(&event(EventKind::Resetting, 0, 40), &mut book);
        queues.happened(&event(EventKind::Connecting, 0, 50), &mut book);
        queues.happened(&event(EventKind::Connect, 1, 60), &mut book);
        queues.told(message(2, 1, 40002, 60));
        let second = queues.id(2, &mut book).unwrap();
        assert_ne!(first, second);
        assert_eq!(book.went, [(first, Nanos(50))]);
    }

    #[test]
    fn a_queue_that_went_before_its_first_command_came_out_is_told_with_its_end() {
        let (mut queues, mut book) = (Queues::default(), Book::default());
        queues.told(message(1, 1, 40000, 10));
        queues.happened(&event(EventKind::Deleting, 0, 50), &mut book);
        let id = queues.id(1, &mut book).unwrap();
        assert_eq!(book.went, [(id, Nanos(50))]);
    }

    #[test]
    fn a_disconnect_ends_the_connection_of_its_key_alone() {
        let (mut queues, mut book) = (Queues::default(), Book::default());
        queues.told(message(1, 1, 40000, 10));
        let first = queues.id(1, &mut book).unwrap();
        // Connected again before the target knew that the host was gone.
        queues.told(message(2, 1, 40002, 60));
        queues.id(2, &mut book);
        queues.happened(&EventMessage { key: 1, ..event(EventKind::QueueGone, 1, 70) }, &mut book);
        assert_eq!(book.went, [(first, Nanos(70))]);
    }

    #[test]
    fn a_connect_of_another_queue_ends_nothing() {
        let (mut queues, mut book) = (Queues::default(), Book::default());
        queues.told(message(1, 1, 40000, 10));
        queues.id(1, &mut book);
        queues.happened(&event(EventKind::Connect, 2, 60), &mut book);
        queues.happened(&event(EventKind::Timeout, 1, 60), &mut book);
        assert_eq!(book.went, []);
    }
}
