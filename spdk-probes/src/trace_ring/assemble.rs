//! Makes commands of the ring's events: a request's address leads from its capsule to its end. It knows no files
//! but the table of owners, and does no calls.
//!
//! A request's memory is used again and again, so an address is a command only between its capsule and its end; and
//! where entries are missing, what was under way on that lcore is given up, since its end may be missing.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use run_format::{
    Boundary, Cid, Command, Endpoint, Event as RunEvent, Nanos, Operation, Queue, QueueId, Transport,
};

use super::directory::{Connection, Directory};
use super::events::{Event, Events, Kind};
use super::layout::Owners;
use super::memory::Shared;
use super::owners::{self, Ends};
use super::ticks::Ticks;

/// Overruns of one lcore that follow each other within this time are told as one, in seconds; it doubles, up to so many
/// times, with each so many that were told, since a run keeps them all.
const ONE_OVERRUN: f64 = 0.001;
const DOUBLED: u32 = 7;
const OVERRUNS: u32 = 500;
/// How long a command that is over waits for its identity, ns: a message that another CPU began before it, and has not
/// finished, holds it up.
const LATEST_IDENTITY: u64 = 50_000_000;
/// From so many identities of one request on, those that are of no command any more are looked for.
const MANY_IDENTITIES: usize = 16;
/// The host's controller identifier where nothing tells it: no controller has this one (NVMe base specification,
/// the Connect command).
pub(crate) const NO_CNTLID: u16 = 0xffff;

/// What came of the events, in order. Queues are numbered from 0 as they come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Out {
    /// A queue with the next number.
    Came(Queue),
    /// What is known of a queue now.
    Is(u32, Queue),
    /// A queue's end.
    Went(u32, Nanos),
    /// A command; its queue is the number of one that came.
    Command(Command),
    /// Something else.
    Event(RunEvent),
}

/// Who a command is, from elsewhere than the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// When it was seen, between the command's capsule and its response.
    pub(crate) at: Nanos,
    pub(crate) cid: Cid,
    pub(crate) opcode: u8,
    pub(crate) nsid: u32,
    pub(crate) slba: u64,
    pub(crate) nlb0: u16,
    /// Bytes of data.
    pub(crate) bytes: u32,
    /// Whether sampling keeps it.
    pub(crate) kept: bool,
}

/// What became of commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) handed: u64,
    pub(crate) unsampled: u64,
    /// Given up since entries were missing.
    pub(crate) overwritten: u64,
    /// Their request began anew without an end.
    pub(crate) unfinished: u64,
    /// Their identity, which was to come from elsewhere, never came.
    pub(crate) unidentified: u64,
    pub(crate) no_start: u64,
    /// Not over when the tracepoints were switched off for a while.
    pub(crate) cut: u64,
}

/// A command under way, its times in ticks (0: not passed).
#[derive(Clone, Copy, Debug)]
struct Pending {
    queue: u32,
    lcore: u32,
    received: u64,
    r2t: u64,
    ready: u64,
    submit: u64,
    done: u64,
    resp: u64,
    sent: u64,
    /// When the last of it was seen.
    over: u64,
    io_type: u8,
    offset: u64,
    blocks: u64,
    bdev: u16,
    name: u32,
}

/// A connection.
#[derive(Debug)]
struct Connected {
    /// Owner's number, or the queue pair's address before 24.05.
    key: u64,
    owner: u16,
    since: u64,
    queue: Queue,
    /// Whether the queue's names are all known.
    known: bool,
    /// The number that was given out, once it had an I/O command.
    number: Option<u32>,
    /// Whether it is an I/O queue; unknown at first.
    io: Option<bool>,
    /// Whether both ends are on this machine.
    local: bool,
    requests: u64,
    went: bool,
}

/// One lcore's state.
#[derive(Clone, Copy, Debug, Default)]
struct Lcore {
    number: u32,
    /// The request that became ready and nothing happened since.
    ready: u64,
    /// Of the last record.
    last: u64,
    /// Whether entries are missing since the last record.
    gap: bool,
    /// The end of an overrun that was told to have begun.
    overrun: Option<u64>,
    missed: bool,
}

/// SPDK's addresses, well mixed.
#[derive(Clone, Copy, Debug, Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 29;
    }
}

type Map<V> = HashMap<u64, V, BuildHasherDefault<Mixed>>;

/// A namespace's number and the bytes of its blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Namespace {
    since: u64,
    nsid: u32,
    block: u32,
}

/// Makes commands of events.
#[derive(Debug)]
pub(super) struct Assembler {
    file: Arc<Shared>,
    owners: Option<Owners>,
    /// Commands need an identity from elsewhere.
    identified: bool,
    /// The sends of responses are recorded, and the ends of requests, for connections that leave this machine.
    sends: bool,
    /// When following began, in ticks.
    pub(super) began: u64,
    pending: Map<Pending>,
    /// Deallocations have a context of their own: their I/O leads to the request.
    unmaps: Map<u64>,
    /// By request, in the order of time; a reader that comes late finds many of one request.
    identities: Map<VecDeque<Identity>>,
    /// Commands that are over and whose identity is still to come, by request.
    late: Map<VecDeque<Pending>>,
    /// When the last look at the rings began, and the one before it: everything older than that has been read.
    looks: [Nanos; 2],
    connected: Vec<Connected>,
    by_key: Map<u32>,
    lcores: Vec<Lcore>,
    namespaces: HashMap<(u32, u32), Namespace>,
    directory: Directory,
    /// Something came up that the directory does not have.
    pub(super) wants_directory: bool,
    came: u32,
    /// Overruns that were told.
    overruns: u32,
    /// Beginnings are recorded no more, so their lack says nothing.
    pub(super) closing: bool,
    pub(super) tally: Tally,
}

/// Types of the bdev layer (`enum spdk_bdev_io_type`), as the NVMe operations that they come from.
fn operation(io_type: u8) -> Option<Operation> {
    Some(match io_type {
        1 => Operation::Read,
        2 => Operation::Write,
        3 => Operation::DatasetManagement,
        4 => Operation::Flush,
        9 => Operation::WriteZeroes,
        13 => Operation::ZoneAppend,
        14 => Operation::Compare,
        19 => Operation::Copy,
        22 => Operation::WriteUncorrectable,
        _ => return None,
    })
}
const UNMAP: u8 = 3;
/// An admin command that is handed through to the drive.
const NVME_ADMIN: u8 = 6;
/// The opcode of a command whose operation the ring does not tell: no I/O command set has it.
pub(crate) const NO_OPCODE: u8 = 0xff;

impl Assembler {
    pub(super) fn new(
        file: Arc<Shared>,
        owners: Option<Owners>,
        lcores: impl Iterator<Item = u32>,
        identified: bool,
        sends: bool,
        began: u64,
        directory: Directory,
    ) -> Assembler {
        Assembler {
            file,
            owners,
            identified,
            sends,
            began,
            pending: Map::default(),
            unmaps: Map::default(),
            identities: Map::default(),
            late: Map::default(),
            looks: [Nanos(0); 2],
            connected: Vec::new(),
            by_key: Map::default(),
            lcores: lcores.map(|number| Lcore { number, ..Lcore::default() }).collect(),
            namespaces: HashMap::new(),
            directory,
            wants_directory: false,
            came: 0,
            overruns: 0,
            closing: false,
            tally: Tally::default(),
        }
    }

    /// Entries of an lcore's ring are missing here.
    pub(super) fn gap(&mut self, lcore: u32, ticks: &Ticks, out: &mut Vec<Out>) {
        let Some(state) = self.lcores.get_mut(lcore as usize) else { return };
        state.missed = true;
        state.ready = 0;
        if !state.gap {
            state.gap = true;
            if state.overrun.is_none() {
                let at = if state.last == 0 { self.began } else { state.last };
                out.push(overrun(ticks.time(at), "begins", state.number));
            }
        }
        let last = state.last;
        let here: Vec<u64> =
            self.pending.iter().filter(|(_, p)| p.lcore == lcore).map(|(request, _)| *request).collect();
        for request in here {
            let Some(pending) = self.pending.remove(&request) else { continue };
            if pending.resp != 0 {
                // All that stages need has been seen.
                self.finish(request, Pending { over: last, ..pending }, ticks, None, out);
            } else if self.is_io(&pending) {
                self.tally.overwritten += 1;
            }
        }
    }

    fn is_io(&self, pending: &Pending) -> bool {
        let queue = self.connected.get(pending.queue as usize);
        pending.submit != 0 && pending.io_type != NVME_ADMIN
            || queue.is_some_and(|queue| queue.io == Some(true))
    }

    /// A look at the rings begins. What was recorded before it is handed over with it, after the identities.
    pub(super) fn look_begins(&mut self, now: Nanos) {
        self.looks = [now, self.looks[0]];
    }

    /// An identity, before the events of its command's end.
    pub(super) fn identity(&mut self, request: u64, identity: Identity, ticks: &Ticks, out: &mut Vec<Out>) {
        let slack = slack(ticks);
        if let Some(late) = self.late.get_mut(&request)
            && let Some(at) = late.iter().position(|pending| is_within(identity.at, pending, ticks))
            && let Some(pending) = late.remove(at)
        {
            if late.is_empty() {
                self.late.remove(&request);
            }
            self.hand(&pending, Some(identity), ticks, None, out);
            return;
        }
        let known = self.identities.entry(request).or_default();
        known.push_back(identity);
        // Those of commands that are over stay behind where one passes twice, or where entries are missing.
        if known.len() >= MANY_IDENTITIES && known.len().is_power_of_two() {
            let since = self.pending.get(&request).map_or(u64::MAX, |pending| ticks.time(pending.received).0);
            let read = self.looks[1].0.min(since).saturating_sub(slack);
            known.retain(|identity| identity.at.0 >= read);
        }
    }

    /// The identities that are there have come: gives up on those that do not.
    pub(super) fn identities_came(&mut self, now: Nanos, ticks: &Ticks) {
        let over = |pending: &Pending| ticks.time(pending.over).0.saturating_add(LATEST_IDENTITY);
        if self.late.is_empty() {
            return;
        }
        let mut lost = 0;
        self.late.retain(|_, waiting| {
            let before = waiting.len();
            waiting.retain(|pending| now.0 < over(pending));
            lost += (before - waiting.len()) as u64;
            !waiting.is_empty()
        });
        self.tally.unidentified += lost;
    }

    /// The next event.
    pub(super) fn event(&mut self, event: &Event, events: &Events, ticks: &Ticks, out: &mut Vec<Out>) {
        self.passes(event, ticks, out);
        let ready = self.lcores.get(event.lcore as usize).map_or(0, |lcore| lcore.ready);
        let mut now_ready = 0;
        match event.kind {
            Kind::New => self.received(event, ticks, out),
            Kind::R2t => self.at(event.object, event, |pending| &mut pending.r2t),
            Kind::Ready => {
                self.at(event.object, event, |pending| &mut pending.ready);
                now_ready = event.object;
            }
            Kind::Start => now_ready = self.started(event, ready),
            Kind::Done => {
                let request = self.unmaps.remove(&event.object).unwrap_or(event.context);
                if let Some(pending) = self.under_way(request, event) {
                    // A deallocation of several ranges is done with the last.
                    pending.done = event.ticks;
                }
            }
            Kind::Executed => {
                self.at(event.object, event, |pending| &mut pending.resp);
                if self.ends_with_response(event) {
                    self.over(event, ticks, Some(events), out);
                }
            }
            Kind::Pend => {
                if let Some(pending) = self.under_way(event.context, event)
                    && pending.resp != 0
                    && pending.sent == 0
                {
                    pending.sent = event.ticks;
                }
            }
            // Where the response ended it, this says nothing.
            Kind::Completed if self.ends_with_response(event) && !self.is_under_way(event) => {}
            Kind::Completed => self.over(event, ticks, Some(events), out),
            Kind::Disconnect => self.disconnected(event, ticks, out),
        }
        if let Some(lcore) = self.lcores.get_mut(event.lcore as usize) {
            lcore.ready = now_ready;
        }
    }

    /// Notes that an lcore has got this far.
    fn passes(&mut self, event: &Event, ticks: &Ticks, out: &mut Vec<Out>) {
        let Some(lcore) = self.lcores.get_mut(event.lcore as usize) else { return };
        lcore.last = event.ticks;
        if std::mem::take(&mut lcore.gap) {
            lcore.overrun = Some(event.ticks);
        } else if let Some(since) = lcore.overrun
            && ticks.seconds(event.ticks.saturating_sub(since)) > one_overrun(self.overruns)
        {
            lcore.overrun = None;
            self.overruns = self.overruns.saturating_add(1);
            out.push(overrun(ticks.time(since), "ends", lcore.number));
        }
    }

    /// The command at a request's address, where the event can be of it.
    fn under_way(&mut self, request: u64, event: &Event) -> Option<&mut Pending> {
        self.pending.get_mut(&request).filter(|pending| event.ticks >= pending.received)
    }

    /// Notes when a command first passed something.
    fn at(&mut self, request: u64, event: &Event, place: impl Fn(&mut Pending) -> &mut u64) {
        if let Some(pending) = self.under_way(request, event) {
            let place = place(pending);
            if *place == 0 {
                *place = event.ticks;
            }
        }
    }

    fn received(&mut self, event: &Event, ticks: &Ticks, out: &mut Vec<Out>) {
        let queue = self.queue_of(event, ticks, out);
        if let Some(connected) = self.connected.get_mut(queue as usize) {
            connected.requests += 1;
            // The first command of a connection is its Connect.
            if connected.requests == 1 && !connected.queue.existed {
                return;
            }
        }
        let pending = Pending {
            queue,
            lcore: event.lcore,
            received: event.ticks,
            r2t: 0,
            ready: 0,
            submit: 0,
            done: 0,
            resp: 0,
            sent: 0,
            over: 0,
            io_type: 0,
            offset: 0,
            blocks: 0,
            bdev: 0,
            name: 0,
        };
        match self.pending.insert(event.object, pending) {
            Some(old) if old.resp != 0 => {
                self.finish(event.object, Pending { over: event.ticks, ..old }, ticks, None, out);
            }
            // Freed without an end: its connection died.
            Some(old) if self.is_io(&old) => self.tally.unfinished += 1,
            _ => {}
        }
    }

    /// Returns the request that is still just ready.
    fn started(&mut self, event: &Event, ready: u64) -> u64 {
        let mut request = event.context;
        if event.io_type == UNMAP && ready != 0 && !self.pending.contains_key(&request) {
            // A deallocation goes to the bdev layer at once, before anything else happens on its lcore.
            request = ready;
            self.unmaps.insert(event.object, request);
        }
        if let Some(pending) = self.under_way(request, event)
            && pending.submit == 0
        {
            pending.submit = event.ticks;
            pending.io_type = event.io_type;
            pending.offset = event.offset;
            pending.blocks = event.blocks;
            pending.bdev = event.owner;
            pending.name = event.name;
        }
        // A deallocation of several ranges is as many I/Os.
        if event.io_type == UNMAP && request == ready { ready } else { 0 }
    }

    /// Whether a command is over with its response: nothing that comes behind it is of use.
    fn ends_with_response(&self, event: &Event) -> bool {
        let queue = match self.pending.get(&event.object) {
            Some(pending) => Some(pending.queue),
            None => self.by_key.get(&key_of(event, self.owners.is_some())).copied(),
        };
        !self.sends
            || queue.and_then(|queue| self.connected.get(queue as usize)).is_some_and(|queue| queue.local)
    }

    fn is_under_way(&self, event: &Event) -> bool {
        self.pending.get(&event.object).is_some_and(|pending| event.ticks >= pending.received)
    }

    /// The last of a command.
    fn over(&mut self, event: &Event, ticks: &Ticks, events: Option<&Events>, out: &mut Vec<Out>) {
        if !self.is_under_way(event) {
            // Begun before the recording, unless its beginning was overwritten.
            let missed = self.lcores.get(event.lcore as usize).is_some_and(|lcore| lcore.missed);
            let queue = self.by_key.get(&key_of(event, self.owners.is_some()));
            let connected = queue.and_then(|queue| self.connected.get(*queue as usize));
            if !missed
                && !self.closing
                && connected.is_some_and(|connected| connected.io == Some(true) && connected.requests > 1)
            {
                self.tally.no_start += 1;
            }
            return;
        }
        if let Some(pending) = self.pending.remove(&event.object) {
            self.finish(event.object, Pending { over: event.ticks, ..pending }, ticks, events, out);
        }
    }

    /// A command is over, or all that will be seen of it.
    fn finish(
        &mut self,
        request: u64,
        pending: Pending,
        ticks: &Ticks,
        events: Option<&Events>,
        out: &mut Vec<Out>,
    ) {
        if !self.is_io(&pending) {
            return;
        }
        if !self.identified {
            self.hand(&pending, None, ticks, events, out);
        } else if let Some(identity) = self.identity_of(request, &pending, ticks) {
            self.hand(&pending, Some(identity), ticks, events, out);
        } else {
            self.late.entry(request).or_default().push_back(pending);
        }
    }

    /// Hands a command over, with its identity where it needs one.
    fn hand(
        &mut self,
        pending: &Pending,
        identity: Option<Identity>,
        ticks: &Ticks,
        events: Option<&Events>,
        out: &mut Vec<Out>,
    ) {
        if identity.is_some_and(|identity| !identity.kept) {
            self.tally.unsampled += 1;
            return;
        }
        let Some(number) = self.number(pending.queue, ticks, out) else { return };
        // An identity says it all.
        let namespace = match identity {
            Some(_) => Namespace::default(),
            None => self.namespace(pending, events),
        };
        let local = self.connected.get(pending.queue as usize).is_some_and(|queue| queue.local);
        let command = command(number, pending, namespace, identity, local, ticks);
        self.tally.handed += 1;
        out.push(Out::Command(command));
    }

    fn identity_of(&mut self, request: u64, pending: &Pending, ticks: &Ticks) -> Option<Identity> {
        let known = self.identities.get_mut(&request)?;
        // One that waited for its subsystem passes twice; both are the same command.
        let at = known.iter().position(|identity| is_within(identity.at, pending, ticks))?;
        let identity = known.get(at).copied();
        known.drain(..=at);
        identity
    }

    /// The number of a queue that has an I/O command; gives one out where it has none.
    fn number(&mut self, index: u32, ticks: &Ticks, out: &mut Vec<Out>) -> Option<u32> {
        let next = self.came;
        let connected = self.connected.get_mut(index as usize)?;
        connected.io = Some(true);
        if let Some(number) = connected.number {
            return Some(number);
        }
        // What Connect adds to the description is there now.
        describe(connected, &self.file, self.owners.as_ref());
        if !look_up(connected, &self.directory) {
            // Before 24.05 a lone controller tells, once it is there.
            self.wants_directory |= !self.directory.silent || self.owners.is_none();
        }
        connected.queue.came = ticks.time(connected.since.max(self.began));
        connected.number = Some(next);
        self.came += 1;
        out.push(Out::Came(connected.queue.clone()));
        Some(next)
    }

    /// The queue that an event is of.
    fn queue_of(&mut self, event: &Event, ticks: &Ticks, out: &mut Vec<Out>) -> u32 {
        let key = key_of(event, self.owners.is_some());
        let since = self.owners.as_ref().and_then(|owners| owners::since(&self.file, owners, event.owner));
        if let Some(index) = self.by_key.get(&key).copied()
            && let Some(connected) = self.connected.get(index as usize)
        {
            // An owner's number is given to another connection some time after the first has gone. A description
            // that is younger than the event is not yet that of the event.
            let same = since.is_none_or(|since| since == connected.since || since > event.ticks);
            if same && !(connected.went && self.owners.is_none()) {
                return index;
            }
            self.went(index, event.ticks, ticks, out);
        }
        let since = since.filter(|since| *since <= event.ticks).unwrap_or(0);
        let mut connected = Connected {
            key,
            owner: event.owner,
            since,
            queue: Queue { cntlid: NO_CNTLID, existed: since < self.began, ..Queue::default() },
            known: false,
            number: None,
            io: None,
            local: false,
            requests: 0,
            went: false,
        };
        if self.owners.is_none() {
            // Before 24.05 the second word is the qid.
            connected.queue.qid = event.owner;
            connected.io = Some(event.owner != 0);
        }
        describe(&mut connected, &self.file, self.owners.as_ref());
        look_up(&mut connected, &self.directory);
        let index = self.connected.len() as u32;
        self.by_key.insert(key, index);
        self.connected.push(connected);
        index
    }

    fn went(&mut self, index: u32, at: u64, ticks: &Ticks, out: &mut Vec<Out>) {
        let Some(connected) = self.connected.get_mut(index as usize).filter(|connected| !connected.went)
        else {
            return;
        };
        connected.went = true;
        if let Some(number) = connected.number {
            out.push(Out::Went(number, ticks.time(at)));
        }
    }

    fn disconnected(&mut self, event: &Event, ticks: &Ticks, out: &mut Vec<Out>) {
        // Before 24.05 the connection is the object.
        let key = if self.owners.is_some() { u64::from(event.owner) } else { event.object };
        if let Some(index) = self.by_key.get(&key).copied() {
            let number = self.connected.get(index as usize).filter(|c| !c.went).and_then(|c| c.number);
            if let Some(number) = number {
                out.push(Out::Event(RunEvent {
                    at_ns: ticks.time(event.ticks),
                    what: "qpair disconnect".to_owned(),
                    on: format!("queue {number}"),
                }));
            }
            self.went(index, event.ticks, ticks, out);
            if !self.sends || self.connected.get(index as usize).is_some_and(|queue| queue.local) {
                // Nothing more tells the end of what was under way.
                let ended: Vec<u64> = self
                    .pending
                    .iter()
                    .filter(|(_, p)| p.queue == index)
                    .map(|(request, _)| *request)
                    .collect();
                for request in ended {
                    if let Some(pending) = self.pending.remove(&request) {
                        self.finish(request, Pending { over: event.ticks, ..pending }, ticks, None, out);
                    }
                }
            }
        }
    }

    /// The target has said what it knows.
    pub(super) fn told(&mut self, directory: Directory, out: &mut Vec<Out>) {
        self.directory = directory;
        self.namespaces.clear();
        for connected in self.connected.iter_mut().filter(|connected| !connected.known && !connected.went) {
            if look_up(connected, &self.directory)
                && let Some(number) = connected.number
            {
                out.push(Out::Is(number, connected.queue.clone()));
            }
        }
    }

    fn namespace(&mut self, pending: &Pending, events: Option<&Events>) -> Namespace {
        if pending.submit == 0 {
            return Namespace::default();
        }
        let since = self.owners.as_ref().and_then(|owners| owners::since(&self.file, owners, pending.bdev));
        let since = since.unwrap_or(0);
        let key = (pending.queue, u32::from(pending.bdev) | pending.name << 16);
        if let Some(known) = self.namespaces.get(&key).filter(|known| known.since == since) {
            return *known;
        }
        let owner = self.owners.as_ref().and_then(|owners| owners::owner(&self.file, owners, pending.bdev));
        let name = match &owner {
            Some(owner) => owner.description.strip_prefix("bdev_").map(str::to_owned),
            None => events.and_then(|events| events.name(pending.name)).map(str::to_owned),
        };
        let subsystem =
            self.connected.get(pending.queue as usize).map(|queue| queue.queue.subsystem_nqn.clone());
        let (Some(name), Some(subsystem)) = (name, subsystem) else { return Namespace::default() };
        let block = self.directory.blocks.get(&name).copied();
        let nsid = self.directory.namespaces.get(&(subsystem, name)).copied();
        let found = Namespace { since, nsid: nsid.unwrap_or(0), block: block.unwrap_or(0) };
        if nsid.is_none() || block.is_none() {
            self.wants_directory = true;
        }
        self.namespaces.insert(key, found);
        found
    }

    /// Commands seen and not over.
    pub(super) fn under_way_now(&self) -> u64 {
        let late: usize = self.late.values().map(VecDeque::len).sum();
        self.pending.values().filter(|pending| self.is_io(pending)).count() as u64 + late as u64
    }

    /// Nothing is recorded from here on for a while: forgets what is not over.
    pub(super) fn suspend(&mut self) {
        self.tally.cut += self.under_way_now();
        self.pending.clear();
        self.late.clear();
        self.identities.clear();
        self.unmaps.clear();
        for lcore in &mut self.lcores {
            lcore.ready = 0;
        }
    }

    /// No more events come.
    pub(super) fn end(&mut self, ticks: &Ticks, out: &mut Vec<Out>) {
        self.identities_came(Nanos(u64::MAX), ticks);
        for lcore in &self.lcores {
            if let Some(since) = lcore.overrun {
                out.push(overrun(ticks.time(since), "ends", lcore.number));
            }
        }
    }
}

/// By what the identity's clock and the ring's may differ, ns.
fn slack(ticks: &Ticks) -> u64 {
    2 * ticks.error() + 200
}

/// Whether a time is inside a command, as far as clocks can tell.
fn is_within(at: Nanos, pending: &Pending, ticks: &Ticks) -> bool {
    let slack = slack(ticks);
    let from = ticks.time(pending.received).0.saturating_sub(slack);
    let upto = match pending.resp {
        0 => ticks.time(pending.over).0,
        resp => ticks.time(resp).0,
    };
    (from..=upto.saturating_add(slack)).contains(&at.0)
}

/// What names an event's queue.
fn key_of(event: &Event, by_owner: bool) -> u64 {
    if by_owner { u64::from(event.owner) } else { event.context }
}

/// How soon an overrun has to follow another to be told with it, in seconds.
fn one_overrun(told: u32) -> f64 {
    ONE_OVERRUN * f64::from(1 << (told / OVERRUNS).min(DOUBLED))
}

fn overrun(at_ns: Nanos, how: &str, lcore: u32) -> Out {
    Out::Event(RunEvent { at_ns, what: format!("trace ring overrun {how}"), on: format!("lcore {lcore}") })
}

/// Fills in what the ring's text says of a connection.
fn describe(connected: &mut Connected, file: &Shared, owners: Option<&Owners>) {
    let Some(owner) = owners.and_then(|owners| owners::owner(file, owners, connected.owner)) else { return };
    if owner.since != connected.since {
        return;
    }
    let Ends { peer, subsystem, listener, qid } = owners::ends(&owner.description);
    let queue = &mut connected.queue;
    queue.transport = Transport::Tcp;
    if !subsystem.is_empty() {
        queue.subsystem_nqn = subsystem;
    }
    queue.host = peer.or(queue.host.take());
    queue.target = listener.or(queue.target.take());
    if let Some(qid) = qid {
        queue.qid = qid;
        connected.io = Some(qid != 0);
    }
    connected.local = owners::is_local(queue.host.as_ref(), queue.target.as_ref());
}

/// Fills in what the target says of a connection; whether it says anything.
fn look_up(connected: &mut Connected, directory: &Directory) -> bool {
    if connected.known {
        return true;
    }
    let mut found = directory.connections.iter().filter(|c| is_of(c, connected));
    let (Some(connection), None) = (found.next(), found.next()) else { return false };
    let queue = &mut connected.queue;
    queue.subsystem_nqn.clone_from(&connection.subsystem);
    queue.host_nqn.clone_from(&connection.host);
    queue.cntlid = connection.cntlid;
    queue.qid = connection.qid;
    queue.served_by.clone_from(&connection.thread);
    if queue.target.is_none() {
        queue.target.clone_from(&connection.listener);
    }
    connected.local = owners::is_local(queue.host.as_ref(), queue.target.as_ref());
    connected.io = Some(connection.qid != 0);
    connected.known = true;
    true
}

/// Whether a connection of the target's list is this one: its peer tells, and before 24.05, where nothing does, its
/// qid if no other has that.
fn is_of(connection: &Connection, connected: &Connected) -> bool {
    match (&connection.peer, &connected.queue.host) {
        (Some(there), Some(here)) => same_end(there, here),
        _ => connected.key > u64::from(u16::MAX) && connection.qid == connected.queue.qid,
    }
}

fn same_end(a: &Endpoint, b: &Endpoint) -> bool {
    a.port == b.port && a.address == b.address
}

fn command(
    queue: u32,
    pending: &Pending,
    namespace: Namespace,
    identity: Option<Identity>,
    local: bool,
    ticks: &Ticks,
) -> Command {
    let operation = if pending.submit == 0 { None } else { operation(pending.io_type) };
    let has_blocks = operation.is_some_and(Operation::has_blocks);
    let mut command = Command {
        queue: QueueId(queue),
        opcode: operation.map_or(NO_OPCODE, Operation::opcode),
        nsid: namespace.nsid,
        slba: if has_blocks { pending.offset } else { 0 },
        nlb0: if has_blocks { u16::try_from(pending.blocks.saturating_sub(1)).unwrap_or(0) } else { 0 },
        cpu: u16::try_from(pending.lcore).unwrap_or(0),
        flags: Command::NO_CID,
        r2ts: u8::from(pending.r2t != 0),
        ..Command::default()
    };
    if matches!(
        operation,
        Some(Operation::Read | Operation::Write | Operation::Compare | Operation::ZoneAppend)
    ) {
        let bytes = u64::from(namespace.block).saturating_mul(pending.blocks);
        command.bytes = u32::try_from(bytes).unwrap_or(0);
    }
    if let Some(identity) = identity {
        command.flags = 0;
        command.cid = identity.cid;
        command.opcode = identity.opcode;
        command.nsid = identity.nsid;
        command.slba = identity.slba;
        command.nlb0 = identity.nlb0;
        command.bytes = identity.bytes;
    }
    if pending.resp == 0 {
        command.flags |= Command::CANCELED;
    }
    let mut set = |boundary: Boundary, at: u64| {
        if at != 0
            && let Some(place) = command.times.get_mut(boundary.slot())
        {
            *place = Some(ticks.time(at));
        }
    };
    set(Boundary::TRecv, pending.received);
    if pending.r2t != 0 {
        set(Boundary::TR2t, pending.r2t);
        set(Boundary::TData, pending.ready);
    }
    set(Boundary::TSubmit, pending.submit);
    set(Boundary::TDone, pending.done);
    set(Boundary::TResp, pending.resp);
    // Within a machine the send runs the host's receiving side before it returns: its return says nothing of when
    // it began.
    if !local {
        set(Boundary::TSent, pending.sent);
    }
    command
}
