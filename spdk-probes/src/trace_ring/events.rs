//! Which tracepoints tell of a command's way, by name, and what of their records is kept. It links nothing: an
//! event is one record.

use std::collections::{BTreeMap, HashMap};

use run_format::Boundary;

use super::follow::Record;
use super::layout::{Argument, Layout};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A capsule was received: a request begins.
    New,
    /// Its R2T was queued.
    R2t,
    /// All its data is there.
    Ready,
    /// The bdev layer got an I/O.
    Start,
    /// The bdev layer is done with it.
    Done,
    /// The transport has the response.
    Executed,
    /// A PDU was given to the socket whole.
    Pend,
    /// The request is over.
    Completed,
    /// A connection is being closed.
    Disconnect,
}

/// The tracepoints, and the boundary that each is for.
pub(super) const WANTED: &[(&str, Kind, Option<Boundary>)] = &[
    ("TCP_REQ_NEW", Kind::New, Some(Boundary::TRecv)),
    ("TCP_REQ_AWAIT_R2T_ACK", Kind::R2t, Some(Boundary::TR2t)),
    ("TCP_REQ_RDY_TO_EXECUTE", Kind::Ready, Some(Boundary::TData)),
    ("BDEV_IO_START", Kind::Start, Some(Boundary::TSubmit)),
    ("BDEV_IO_DONE", Kind::Done, Some(Boundary::TDone)),
    ("TCP_REQ_EXECUTED", Kind::Executed, Some(Boundary::TResp)),
    ("SOCK_REQ_PEND", Kind::Pend, Some(Boundary::TSent)),
    ("TCP_REQ_COMPLETED", Kind::Completed, None),
    ("TCP_QP_DISCONNECT", Kind::Disconnect, None),
];

/// Those that no recording can do without: a request's beginning, what it asks for, and its response.
const NEEDED: &[Kind] = &[Kind::New, Kind::Start, Kind::Done, Kind::Executed];
/// Those of when a response was sent: of use for connections that leave this machine, and two records a command.
const SENDS: &[Kind] = &[Kind::Pend, Kind::Completed];

/// One record, as far as it is of interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) kind: Kind,
    /// Index of the lcore's ring.
    pub(super) lcore: u32,
    pub(super) ticks: u64,
    /// The owner's number.
    pub(super) owner: u16,
    /// What it is about: the request; for the bdev layer its own I/O.
    pub(super) object: u64,
    /// The request, where the object is not it; the queue pair in 24.01 and before.
    pub(super) context: u64,
    /// Of an I/O's start: its type, offset and number of blocks.
    pub(super) io_type: u8,
    pub(super) offset: u64,
    pub(super) blocks: u64,
    /// Of an I/O's start in 24.01 and before: number of the bdev's name.
    pub(super) name: u32,
}

/// Where the arguments of a tracepoint are.
#[derive(Clone, Debug)]
struct Known {
    kind: Kind,
    context: Option<Argument>,
    io_type: Option<Argument>,
    offset: Option<Argument>,
    blocks: Option<Argument>,
    name: Option<Argument>,
}

/// Makes events of records.
#[derive(Debug)]
pub(super) struct Events {
    /// By the tracepoint's number.
    known: Vec<Option<Known>>,
    numbers: HashMap<Kind, u16>,
    /// Names of bdevs, where records have them.
    names: HashMap<String, u32>,
}

impl std::hash::Hash for Kind {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (*self as u8).hash(state);
    }
}

impl Events {
    /// Finds the tracepoints among those that a ring knows.
    ///
    /// # Errors
    /// The names of those that it lacks and nothing works without.
    pub(super) fn new(layout: &Layout) -> Result<Events, Vec<&'static str>> {
        let mut events = Events {
            known: vec![None; usize::from(layout.marker)],
            numbers: HashMap::new(),
            names: HashMap::new(),
        };
        let mut lacking = Vec::new();
        for (name, kind, _) in WANTED {
            let Some(number) = layout.number(name) else {
                if NEEDED.contains(kind) {
                    lacking.push(*name);
                }
                continue;
            };
            let argument = |names: &[&str]| {
                let tracepoint = layout.tracepoints.get(&number)?;
                names.iter().find_map(|name| tracepoint.argument(name)).filter(|a| a.size <= 8).cloned()
            };
            let known = Known {
                kind: *kind,
                context: argument(&["ctx", "qpair"]),
                io_type: argument(&["type"]),
                offset: argument(&["offset"]),
                blocks: argument(&["len"]),
                name: layout.tracepoints.get(&number).and_then(|t| t.argument("name")).cloned(),
            };
            let complete = match kind {
                Kind::Start => known.context.is_some() && known.io_type.is_some() && known.offset.is_some(),
                Kind::Done | Kind::Pend => known.context.is_some(),
                _ => true,
            };
            if !complete {
                lacking.push(*name);
                continue;
            }
            events.numbers.insert(*kind, number);
            if let Some(place) = events.known.get_mut(usize::from(number)) {
                *place = Some(known);
            }
        }
        lacking.retain(|name| WANTED.iter().any(|(n, kind, _)| n == name && NEEDED.contains(kind)));
        if lacking.is_empty() { Ok(events) } else { Err(lacking) }
    }

    /// The number of a tracepoint, where the ring has it.
    pub(super) fn number(&self, kind: Kind) -> Option<u16> {
        self.numbers.get(&kind).copied()
    }

    /// Whether the ring can tell when responses were sent.
    pub(super) fn has_sends(&self) -> bool {
        SENDS.iter().all(|kind| self.numbers.contains_key(kind))
    }

    /// The tracepoints to switch on, without those of sends: one bit each, by group.
    pub(super) fn masks(&self) -> BTreeMap<u16, u64> {
        self.masks_of(|kind| !SENDS.contains(&kind))
    }

    /// Those of sends, where the ring has all of them.
    pub(super) fn masks_of_sends(&self) -> BTreeMap<u16, u64> {
        self.masks_of(|kind| self.has_sends() && SENDS.contains(&kind))
    }

    fn masks_of(&self, wanted: impl Fn(Kind) -> bool) -> BTreeMap<u16, u64> {
        let mut masks = BTreeMap::new();
        for (_, number) in self.numbers.iter().filter(|(kind, _)| wanted(**kind)) {
            *masks.entry(number / 64).or_insert(0) |= 1 << (number % 64);
        }
        masks
    }

    /// The event of a record; `None` for one that is of no interest.
    pub(super) fn of(&mut self, record: &Record<'_>, lcore: u32) -> Option<Event> {
        let known = self.known.get(usize::from(record.tracepoint))?.as_ref()?;
        let number = |argument: &Option<Argument>| {
            argument.as_ref().and_then(|a| record.number(a.at, a.size)).unwrap_or(0)
        };
        let mut event = Event {
            kind: known.kind,
            lcore,
            ticks: record.ticks,
            owner: record.owner,
            object: record.object,
            context: number(&known.context),
            io_type: 0,
            offset: 0,
            blocks: u64::from(record.size),
            name: 0,
        };
        if known.kind == Kind::Start {
            event.io_type = number(&known.io_type) as u8;
            event.offset = number(&known.offset);
            if known.blocks.is_some() {
                event.blocks = number(&known.blocks);
            }
            if let Some(name) = &known.name
                && let Some(text) = record.text(name.at, name.size)
            {
                let next = self.names.len() as u32 + 1;
                event.name = *self.names.entry(text).or_insert(next);
            }
        }
        Some(event)
    }

    /// The name of a bdev, by the number in its events.
    pub(super) fn name(&self, number: u32) -> Option<&str> {
        self.names.iter().find(|(_, n)| **n == number).map(|(name, _)| name.as_str())
    }
}
