//! SPDK's own trace ring as a source of a target's commands: no symbols, no debug information and no BPF, unless one
//! uprobe is to tell who the commands are. It switches the tracepoints on over the target's RPC, reads the ring's
//! shared memory, and writes nothing there.

mod assemble;
mod directory;
mod events;
#[cfg(test)]
mod fake;
mod fault;
mod find;
mod follow;
mod identity;
pub(crate) mod layout;
mod load;
mod memory;
mod note;
mod owners;
mod reader;
mod rpc;
mod switch;
#[cfg(test)]
mod tests;
mod ticks;
mod turn;
#[cfg(test)]
mod whole;
#[cfg(test)]
mod writer;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use run_format::{
    Boundary, Counters, Event, Hook, Kind, Lost, Queue, QueueId, Side, Sink, Software, Source, monotonic_now,
};

use crate::ring::{ends_within, has_ended};
use crate::{Error, Options, Process};
use assemble::{Assembler, Out};
use directory::{Asking, Directory};
use events::{Events, WANTED};
use follow::Follower;
use identity::Probe;
use layout::Layout;
pub use load::{Load, load, ring_sends, ring_usable};
use memory::Shared;
use reader::{Reader, Work};
pub use rpc::{Rpc, RpcError};
use switch::{Info, Switch};
use ticks::Ticks;
use turn::Turns;

/// How long commands that are under way at the end may take to end.
const LAST_COMMANDS: Duration = Duration::from_millis(10);
/// After the tracepoints are off a record that had begun is soon written.
const LAST_RECORD: Duration = Duration::from_millis(2);
/// How long a process may take to end after the first of it is gone.
const LAST_OF_A_PROCESS: Duration = Duration::from_secs(3);
/// What a record costs, ns: measured at 30 to 50.
const RECORD_NS: u32 = 40;

/// How to record from the ring.
#[derive(Clone, Debug, Default)]
pub struct TraceOptions {
    /// The target's RPC socket; where there is none, it is found.
    pub rpc: Option<PathBuf>,
    /// Takes who a command is from one uprobe, placed by these options; without, only the ring is read, and no
    /// command has a cid.
    pub identities: Option<Options>,
}

/// What the run's events call the tracepoints that an earlier recording left on.
const LEFT_ON: &str = "tracepoints that a killed recording left on are switched off with this one";

/// A target that is recorded by its trace ring. Dropping it switches the tracepoints off that it switched on.
#[derive(Debug)]
pub struct TraceTarget {
    // The order matters: the tracepoints go off first.
    switch: Switch,
    /// The tracepoints that are on while it is armed, by group.
    masks: BTreeMap<u16, u64>,
    armed: bool,
    /// The tracepoints of sends, by group, while they are off.
    sends: BTreeMap<u16, u64>,
    /// A connection that leaves this machine has come.
    remote: bool,
    /// For the run's events.
    remarks: Vec<Event>,
    /// The tracepoint that commands begin with.
    beginning: Option<u16>,
    reader: Reader,
    probe: Option<Probe>,
    hooks: Vec<Hook>,
    software: Software,
    pidfd: OwnedFd,
    /// The sink's numbers of the reader's queues.
    queues: Vec<QueueId>,
    delivered: u64,
    failed: Option<String>,
}

impl TraceTarget {
    /// Finds the process's ring, switches its tracepoints on and begins to read.
    ///
    /// # Errors
    /// When the process has no ring, or one of no known layout; when its SPDK lacks tracepoints; when its RPC can
    /// not be reached or refuses; when the ring's ticks are not this machine's.
    pub fn attach(process: &Process, options: &TraceOptions) -> Result<TraceTarget, Error> {
        process.unless_ended(Self::attach_to(process, options))
    }

    fn attach_to(process: &Process, options: &TraceOptions) -> Result<TraceTarget, Error> {
        let (file, path) = find::ring_of(process.pid)?;
        let bad = |why: String| Error::TraceRing { path: path.clone(), why };
        let turns = Turns::of(&file);
        let file = Arc::new(Shared::new(file).map_err(|error| bad(error.to_string()))?);
        let layout = Layout::read(&file).map_err(bad)?;
        let events = Events::new(&layout)
            .map_err(|lacking| Error::NoTracepoints { path: path.clone(), lacking: lacking.join(", ") })?;
        let ticks = Ticks::new(layout.rate)?;
        let rpc = target(process.pid, &path, options.rpc.as_deref())?;
        let refused = |error: RpcError| Error::TraceRpc { pid: process.pid, why: error.to_string() };
        // What the target can not say is only missing in the queues.
        let directory = Directory::ask(&rpc).unwrap_or_default();
        // The uprobe is there before the first tracepoint, so that no command has times and no name.
        let (probe, sent) = match &options.identities {
            Some(options) => {
                let (probe, sent) = Probe::attach(process, options)?;
                (Some(probe), Some(Box::new(sent) as Box<dyn reader::Identities>))
            }
            None => (None, None),
        };
        let began = ticks::now();
        let followers = layout.lcores.iter().map(|lcore| Follower::new(&file, &layout, *lcore));
        let followers: Option<Vec<Follower>> = followers.collect();
        let followers = followers.ok_or_else(|| bad("it was cut".to_owned()))?;
        let numbers = layout.lcores.iter().map(|lcore| lcore.number);
        let has_sends = events.has_sends();
        let remote = has_sends && directory.has_remote();
        let assembler = Assembler::new(
            Arc::clone(&file),
            layout.owners,
            numbers,
            probe.is_some(),
            has_sends,
            began,
            directory,
        );
        let (hooks, software) = (hooks(&events, &ticks, probe.as_ref(), remote), software(process, &rpc));
        let (mut masks, beginning) = (events.masks(), events.number(events::Kind::New));
        let mut sends = events.masks_of_sends();
        if remote {
            for (group, bits) in std::mem::take(&mut sends) {
                *masks.entry(group).or_insert(0) |= bits;
            }
        }
        let work = Work {
            file: Arc::clone(&file),
            followers,
            events,
            ticks,
            assembler,
            asking: Asking::new(rpc.clone()),
            identities: sent,
        };
        let reader = Reader::start(work, process.pid);
        // The reader is there before anything comes.
        let (mut switch, left) = Switch::new(rpc, turns, process.pid).map_err(refused)?;
        switch.more(&masks).map_err(refused)?;
        let remarks = left.iter().map(|(group, bits)| Event {
            at_ns: monotonic_now(),
            what: LEFT_ON.to_owned(),
            on: format!("{group} {bits:#x}"),
        });
        let remarks = remarks.collect();
        for (group, wanted) in &masks {
            let lacking = wanted & !layout.mask(&file, *group);
            if lacking != 0 {
                let why = format!(
                    "{lacking:#x} of its group {group} stayed off, though it was told to switch them on"
                );
                return Err(Error::TraceRpc { pid: process.pid, why });
            }
        }
        Ok(TraceTarget {
            switch,
            masks,
            armed: true,
            sends,
            remote: false,
            remarks,
            beginning,
            reader,
            probe,
            hooks,
            software,
            pidfd: process.watch()?,
            queues: Vec::new(),
            delivered: 0,
            failed: None,
        })
    }

    fn hand_over(&mut self, out: Vec<Out>, sink: &mut dyn Sink) -> usize {
        let mut commands = 0;
        for out in out {
            match out {
                Out::Came(queue) => {
                    self.remote |= is_remote(&queue);
                    self.queues.push(sink.queue(queue));
                }
                Out::Is(number, queue) => {
                    self.remote |= is_remote(&queue);
                    if let Some(id) = self.queues.get(number as usize) {
                        sink.queue_is(*id, queue);
                    }
                }
                Out::Went(number, at) => {
                    if let Some(id) = self.queues.get(number as usize) {
                        sink.queue_went(*id, at);
                    }
                }
                Out::Command(mut command) => {
                    if let Some(id) = self.queues.get(command.queue.0 as usize) {
                        command.queue = *id;
                        sink.command(&command);
                        commands += 1;
                    }
                }
                Out::Event(event) => sink.event(event),
            }
        }
        self.delivered += commands as u64;
        commands
    }

    /// Switches the tracepoints of sends on, once there is a connection for which they tell something.
    fn follow_remote(&mut self, sink: &mut dyn Sink) {
        for remark in self.remarks.drain(..) {
            sink.event(remark);
        }
        if !std::mem::take(&mut self.remote) || self.sends.is_empty() {
            return;
        }
        let sends = std::mem::take(&mut self.sends);
        for (group, bits) in &sends {
            *self.masks.entry(*group).or_insert(0) |= bits;
        }
        if !self.armed {
            return;
        }
        if let Err(error) = self.switch.more(&sends) {
            sink.event(Event {
                at_ns: monotonic_now(),
                what: "when responses were sent is not recorded".to_owned(),
                on: error.to_string(),
            });
        }
    }

    /// Why the recording can not go on, unless its process ends.
    fn failed<T>(&self, result: Result<T, RpcError>, what: &str) -> Result<(), Error> {
        match result {
            Err(error) if !self.ends() => Err(Error::TraceRingEnded { why: format!("{what}: {error}") }),
            _ => Ok(()),
        }
    }

    /// Whether the process has ended, or is about to: its RPC is gone some time before it is.
    fn ends(&self) -> bool {
        ends_within(&self.pidfd.as_fd(), LAST_OF_A_PROCESS)
    }
}

fn is_remote(queue: &Queue) -> bool {
    !owners::is_local(queue.host.as_ref(), queue.target.as_ref())
}

/// The process's RPC.
fn target(pid: u32, ring: &Path, named: Option<&Path>) -> Result<Rpc, Error> {
    let take = |rpc: &Rpc| match Info::ask(rpc) {
        Ok(info) if Path::new(&info.path).file_name() == ring.file_name() => Ok(rpc.clone()),
        Ok(info) => Err(format!("{} is that of another process ({})", rpc.path().display(), info.path)),
        Err(error) => Err(error.to_string()),
    };
    rpc::first(pid, named, take).map_err(|why| Error::TraceRpc { pid, why })
}

/// How each boundary is taken.
fn hooks(events: &Events, ticks: &Ticks, probe: Option<&Probe>, remote: bool) -> Vec<Hook> {
    let mut hooks: Vec<Hook> = Vec::new();
    for (name, kind, boundary) in WANTED {
        let Some(boundary) = *boundary else { continue };
        let there = events.number(*kind).is_some();
        let why = match boundary {
            Boundary::TRecv => {
                let within = format!("ticks are made times within {} ns", ticks.error());
                Some(match probe {
                    None => format!("{within}; no cid is known, so commands are joined by their order"),
                    Some(probe) => format!(
                        "{within}; who a command is tells a uprobe on {}+{} ({})",
                        probe.site.symbol, probe.site.offset_in_function, probe.site.instruction
                    ),
                })
            }
            Boundary::TR2t => Some("when the R2T was queued, not when it was sent".to_owned()),
            Boundary::TSent if there => Some(
                "after the send returned; only on connections that leave this machine: within one the host may be first"
                    .to_owned(),
            ),
            Boundary::TSent => Some("this SPDK records nothing of its sockets".to_owned()),
            _ => None,
        };
        // A send is two records, and only where a connection leaves this machine.
        let records = match boundary {
            Boundary::TSent if remote => 2,
            Boundary::TSent => 0,
            _ => 1,
        };
        // The one uprobe of a command is paid where it begins.
        let trap = probe.filter(|_| boundary == Boundary::TRecv).map_or(0, |probe| probe.site.estimated_ns);
        hooks.push(Hook {
            boundary,
            transport: None,
            hook: there.then(|| format!("trace ring {name}")),
            rung: 0,
            measured: there && !matches!(boundary, Boundary::TR2t | Boundary::TSent),
            instruction: None,
            estimated_ns: there.then_some(records * RECORD_NS + trap),
            why,
        });
    }
    hooks.sort_by_key(|hook| hook.boundary.slot());
    hooks
}

/// What the manifest says of the program, as far as it can be told without its symbols.
fn software(process: &Process, rpc: &Rpc) -> Software {
    let told = rpc.call("spdk_get_version", None).ok();
    let told = told.as_ref().and_then(|answer| answer.get("version")?.as_str());
    let text = process.version.as_deref().or(told).unwrap_or_default();
    let binaries = crate::resolve::BinarySet::of_process(process.pid).ok();
    let id = binaries.as_ref().and_then(|set| set.build_id().map(<[u8]>::to_vec));
    Software {
        name: "SPDK".to_owned(),
        version: text.strip_prefix("SPDK").unwrap_or(text).trim().to_owned(),
        build_id: id.map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect()),
        path: Some(process.path.display().to_string()),
        pid: Some(process.pid),
    }
}

impl Source for TraceTarget {
    type Error = Error;

    fn side(&self) -> Side {
        Side::Target
    }

    fn kind(&self) -> Kind {
        Kind::Spdk
    }

    fn software(&self) -> Software {
        self.software.clone()
    }

    fn hooks(&self) -> Vec<Hook> {
        self.hooks.clone()
    }

    fn poll(&mut self, timeout: Duration, sink: &mut dyn Sink) -> Result<usize, Error> {
        let out = self.reader.take(timeout);
        let commands = self.hand_over(out, sink);
        self.follow_remote(sink);
        let over = self.reader.is_over();
        if let Some(why) = self
            .reader
            .look(|state| state.failed.clone())
            .or_else(|| over.then(|| "the thread that reads it has ended".to_owned()))
        {
            // A target that has ended is no failure of the recording.
            if !self.ends() {
                return Err(Error::TraceRingEnded { why });
            }
            self.failed = Some(why);
        }
        Ok(commands)
    }

    fn has_windows(&self) -> bool {
        true
    }

    fn disarm(&mut self, sink: &mut dyn Sink) -> Result<(), Error> {
        if !std::mem::take(&mut self.armed) {
            return self.poll(Duration::ZERO, sink).map(drop);
        }
        // The uprobe goes last, so that no command has times and no name; another recording may have the tracepoints on.
        let off = self.switch.rest();
        self.reader.suspend();
        if let Some(probe) = &mut self.probe {
            probe.detach();
        }
        let out = self.reader.take(Duration::ZERO);
        self.hand_over(out, sink);
        self.failed(off, "its tracepoints can not be switched off")
    }

    fn arm(&mut self) -> Result<bool, Error> {
        if self.armed || self.ended() {
            return Ok(self.armed);
        }
        if let Some(probe) = &mut self.probe {
            match probe.attach_again() {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(_) if self.ends() => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.reader.resume();
        let on = self.switch.more(&self.masks);
        let ended = on.is_err();
        self.failed(on, "its tracepoints can not be switched on again")?;
        self.armed = !ended;
        Ok(self.armed)
    }

    fn stop(&mut self, sink: &mut dyn Sink) -> Result<(), Error> {
        // Beginnings first, so that what has begun is seen to its end.
        self.reader.closing();
        let first = self.beginning.map_or(Ok(()), |number| self.switch.off_first(number));
        if !self.ended() {
            std::thread::sleep(LAST_COMMANDS);
        }
        let off = self.switch.off().and(first);
        if !self.ended() {
            std::thread::sleep(LAST_RECORD);
        }
        self.reader.stop();
        if let Some(probe) = &mut self.probe {
            probe.detach();
        }
        let out = self.reader.take(Duration::ZERO);
        self.hand_over(out, sink);
        self.failed(off, "its tracepoints can not be switched off again")
    }

    fn counters(&self) -> Result<Counters, Error> {
        Ok(self.reader.look(|state| {
            let tally = &state.tally;
            // An identity is missing where it did not fit into the programs' ring, where it could not be read, or
            // where the uprobe was passed unseen.
            let (full, unread) = self.probe.as_ref().map_or((0, 0), Probe::lost);
            let ring_full = full.min(tally.unidentified);
            let unreadable = unread.min(tally.unidentified - ring_full);
            let lost = Lost {
                ring_full,
                unfinished: tally.unfinished,
                unreadable,
                probe_missed: tally.unidentified - ring_full - unreadable,
                overwritten: tally.overwritten + state.missing,
                ..Lost::default()
            };
            let in_flight = state.under_way + tally.handed.saturating_sub(self.delivered);
            Counters {
                seen: self.delivered + tally.unsampled + lost.total() + in_flight,
                recorded: self.delivered,
                unsampled: tally.unsampled,
                lost,
                in_flight,
                no_start: tally.no_start,
                cut: tally.cut,
            }
        }))
    }

    fn ended(&self) -> bool {
        has_ended(&self.pidfd.as_fd())
    }
}
