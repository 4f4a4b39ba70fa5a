//! Loads a side's programs and attaches them, takes their messages and keeps their counters. Which programs
//! those are is [`crate::survey`]'s choice; what only one side has is in [`crate::host`] and
//! [`crate::target`].

use crate::error::Error;
use crate::facts::{Facts, Module, drivers};
use crate::ladder::{self, Program};
use crate::message::Message;
use crate::queues::Queues;
use crate::survey::{Plan, Survey, prevented};
use libbpf_rs::query::{LinkTypeInfo, PerfEventLinkInfo, PerfEventType};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{
    Link, MapCore, MapHandle, OpenObject, PrintCallback, PrintLevel, RingBuffer, RingBufferBuilder,
};
use run_format::bpf::{raw, sampling_limit};
use run_format::{
    Counters, Event, Hook, Kind, Lost, Release, Side, Sink, Software, Source, monotonic_now, urgently,
};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How to record a side.
#[derive(Clone, Debug)]
pub struct Options {
    /// Keep one command in this many, chosen by the hash that both sides share.
    pub one_in: u32,
    /// Bytes of the ring that records wait in; rounded up to a power of two.
    pub ring_bytes: u32,
    /// Commands that may be in flight at once before some are lost.
    pub in_flight: u32,
    /// Hooks not to use, by how their names begin (`fentry`, `tp_btf block_bio_queue`), for a kernel on which
    /// one of them misbehaves. The next rung is taken.
    pub avoid: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options { one_in: 1, ring_bytes: 8 << 20, in_flight: 1 << 16, avoid: Vec::new() }
    }
}

/// A side's probes, attached. Dropping it detaches them.
#[derive(Debug)]
pub struct Probes<O: Object> {
    survey: Survey,
    software: Software,
    programs: Programs<O>,
    ring: RingBuffer<'static>,
    inbox: Arc<Mutex<Vec<Message>>>,
    /// The inbox's other buffer: the two change places, so that none is allocated anew.
    taken: Vec<Message>,
    queues: Queues,
    /// Records handed to the sink.
    handed: u64,
    /// Records of queues that nothing was told of.
    nameless: u64,
    /// Messages other than commands that are known to be lost.
    lost_messages: u64,
    stopped: bool,
    /// Links that were taken away and are not gone yet.
    release: Release,
    /// Whether the programs were taken away before the end.
    windowed: bool,
    /// Commands that were under way when the programs were taken away.
    cut: u64,
}

/// Most links that may still be on their way out when new ones are made: some windows' worth.
const MOST_WAITING: usize = 128;

/// How long the end of a recording waits for the kernel to let the last links go. It lets them go all the same.
const LAST_LINKS: Duration = Duration::from_secs(60);

/// Maps that hold what belongs to commands under way, besides the commands.
const OTHERS: &[&str] = &["losses"];

/// One side's object of BPF programs, loaded: what the loader can not know of both.
pub trait Object: Skel<'static> {
    /// The object before it is loaded.
    type Open: OpenSkel<'static, Output = Self>;
    /// The side.
    const SIDE: Side;
    /// Reads it.
    ///
    /// # Errors
    /// When libbpf can not.
    fn open(storage: &'static mut MaybeUninit<OpenObject>) -> libbpf_rs::Result<Self::Open>;
    /// Sets what has to be set before loading.
    fn set(open: &mut Self::Open, settings: &Settings<'_>);
    /// What it shares with the loader.
    fn shared(&mut self) -> Option<Shared<'_>>;
    /// A counter (`raw::FAB_SEEN` and so on), over all CPUs.
    fn counted(&self, counter: u32) -> u64;
}

/// What is set before loading.
#[derive(Debug)]
pub struct Settings<'a> {
    /// `fab_sampled`'s limit.
    pub(crate) sampling_limit: u32,
    /// Bytes in the ring from which on the consumer is woken.
    pub(crate) wake_at: u64,
    pub(crate) plan: &'a Plan,
    pub(crate) facts: &'a Facts,
}

/// What the programs and the loader share (`bpf/kernel.bpf.h`).
#[derive(Debug)]
pub struct Shared<'a> {
    pub(crate) recording: &'a mut u32,
    pub(crate) recording_since: &'a mut u64,
    pub(crate) lost_messages: &'a mut u64,
    /// How many commands in flight share a hash.
    pub(crate) of_hash: &'a mut [u32],
}

/// Takes in a skeleton as a side's object; the closure sets the side's own constants.
macro_rules! object {
    ($file:literal, $builder:ident, $open:ident, $loaded:ident, $side:expr, |$constants:ident, $settings:ident| $set:block) => {
        #[allow(
            missing_debug_implementations,
            unreachable_pub,
            unused_qualifications,
            clippy::all,
            clippy::undocumented_unsafe_blocks,
            clippy::unwrap_used,
            clippy::expect_used
        )]
        mod skeleton {
            include!(concat!(env!("OUT_DIR"), $file));
        }

        impl $crate::programs::Object for skeleton::$loaded<'static> {
            type Open = skeleton::$open<'static>;
            const SIDE: run_format::Side = $side;

            fn open(
                storage: &'static mut std::mem::MaybeUninit<libbpf_rs::OpenObject>,
            ) -> libbpf_rs::Result<Self::Open> {
                libbpf_rs::skel::SkelBuilder::open(skeleton::$builder::default(), storage)
            }

            fn set(open: &mut Self::Open, $settings: &$crate::programs::Settings<'_>) {
                if let Some($constants) = open.maps.rodata_data.as_deref_mut() {
                    $constants.sampling_limit = $settings.sampling_limit;
                    $constants.wake_at = $settings.wake_at;
                    $set
                }
            }

            fn shared(&mut self) -> Option<$crate::programs::Shared<'_>> {
                self.maps.bss_data.as_deref_mut().map(|shared| $crate::programs::Shared {
                    recording: &mut shared.recording,
                    recording_since: &mut shared.recording_since,
                    lost_messages: &mut shared.lost_messages,
                    of_hash: &mut shared.of_hash,
                })
            }

            fn counted(&self, counter: u32) -> u64 {
                let shared = self.maps.bss_data.as_deref();
                let counters = shared.into_iter().flat_map(|shared| &shared.counters);
                counters.filter_map(|cpu| cpu.of.get(counter as usize)).sum()
            }
        }
    };
}
pub(crate) use object;

/// The loaded object and its links. The order of the fields is that of their end: links first.
struct Programs<O> {
    /// Of the programs on a command's way.
    links: Vec<Link>,
    /// Of those that see queues come and go. They stay between windows: they cost nothing while nothing happens, and
    /// what a queue is must not be missed.
    lasting: Vec<Link>,
    object: O,
    ring: MapHandle,
    commands: MapHandle,
    /// Hits that kprobes skipped whose links are gone, by the program's id.
    skipped: BTreeMap<u32, u64>,
    /// The programs that were loaded.
    wanted: BTreeSet<&'static str>,
    /// The program that counts what is seen.
    identity: &'static str,
}

impl<O> std::fmt::Debug for Programs<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Programs").field("links", &self.links.len()).finish_non_exhaustive()
    }
}

/// Whether programs stay between windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lasting {
    Yes,
    No,
}

/// Why a set of programs did not come up.
enum Refused {
    /// The kernel did not take this program: another may do.
    Program(&'static str, String),
    /// Nothing else to try.
    All(Error),
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Refused::All(error)
    }
}

impl<O: Object> Probes<O> {
    /// Attaches the best hooks that this kernel has, while commands run; recording starts when the last is
    /// in place.
    ///
    /// # Errors
    /// When a privilege, the driver or type information is missing, or the kernel refuses the programs on
    /// every rung; the message says what to do.
    pub fn attach(options: &Options) -> Result<Probes<O>, Error> {
        let facts = Facts::gather(O::SIDE)?;
        prevented(&facts)?;
        let mut refused = avoided(O::SIDE, &options.avoid);
        loop {
            let plan = Plan::make(&facts, &refused);
            plan.essential()?;
            match Programs::load(&plan, &facts, options) {
                Ok(programs) => return Probes::start(programs, plan.survey, &facts),
                Err(Refused::All(error)) => return Err(error),
                Err(Refused::Program(name, why)) => {
                    if refused.insert(name, why.clone()).is_some() {
                        return Err(Error::Load { doing: "attaching them", why });
                    }
                }
            }
        }
    }

    fn start(programs: Programs<O>, survey: Survey, facts: &Facts) -> Result<Probes<O>, Error> {
        let inbox = Arc::new(Mutex::new(Vec::new()));
        let filled = Arc::clone(&inbox);
        let mut builder = RingBufferBuilder::new();
        let read = |source| Error::Read { doing: "mapping the ring of records", source };
        builder
            .add(&programs.ring, move |bytes: &[u8]| {
                if let Some(message) = Message::parse(O::SIDE, bytes) {
                    lock(&filled).push(message);
                }
                0
            })
            .map_err(read)?;
        let ring = builder.build().map_err(read)?;
        let mut probes = Probes {
            software: software(facts),
            survey,
            programs,
            ring,
            inbox,
            taken: Vec::new(),
            queues: Queues::default(),
            handed: 0,
            nameless: 0,
            lost_messages: 0,
            stopped: false,
            release: Release::default(),
            windowed: false,
            cut: 0,
        };
        probes.record(true);
        Ok(probes)
    }

    /// What was chosen for each boundary, and why.
    #[must_use]
    pub fn survey(&self) -> &Survey {
        &self.survey
    }

    /// Takes the programs on a command's way away; the kernel lets go of their links aside.
    fn take_away(&mut self) {
        self.programs.skipped = self.programs.skipped();
        let links = std::mem::take(&mut self.programs.links);
        urgently(|| links.into_iter().rev().for_each(|link| self.release.drop_aside(link)));
    }

    /// Whether new commands are taken.
    fn record(&mut self, recording: bool) {
        if let Some(shared) = self.programs.object.shared() {
            if recording {
                *shared.recording_since = monotonic_now().0;
            }
            *shared.recording = u32::from(recording);
        }
    }

    /// Empties the maps of what was under way when the programs were taken away.
    fn forget(&mut self) {
        let mut shared = self.programs.object.shared();
        for key in self.programs.commands.keys() {
            // The programs may be about to take it out themselves.
            if self.programs.commands.delete(&key).is_err() {
                continue;
            }
            self.cut += 1;
            if let Some(shared) = &mut shared {
                one_less_of_hash(shared.of_hash, &key);
            }
        }
        for map in self.programs.object.object().maps() {
            if map.name().to_str().is_some_and(|name| OTHERS.contains(&name)) {
                for key in map.keys() {
                    // What is gone already need not be taken away.
                    let _ = map.delete(&key);
                }
            }
        }
    }

    /// Takes what is in the ring now; returns the number of commands.
    fn take(&mut self, sink: &mut dyn Sink) -> Result<usize, Error> {
        let mut commands = 0;
        loop {
            // A slice at a time, so that the inbox stays small.
            let consumed = self.ring.consume_raw_n(SLICE);
            if consumed < 0 {
                let source = libbpf_rs::Error::from_raw_os_error(-consumed);
                return Err(Error::Read { doing: "reading the ring of records", source });
            }
            std::mem::swap(&mut *lock(&self.inbox), &mut self.taken);
            for message in self.taken.drain(..) {
                match message {
                    Message::Command(record) => match self.queues.id(record.queue, sink) {
                        Some(queue) => {
                            sink.command(&record.to_command(queue));
                            self.handed += 1;
                            commands += 1;
                        }
                        None => self.nameless += 1,
                    },
                    Message::Queue(queue) => self.queues.told(*queue),
                    Message::Event(event) => {
                        self.queues.happened(&event, sink);
                        if let Some(event) = event.event(O::SIDE) {
                            sink.event(event);
                        }
                    }
                }
            }
            if consumed == 0 {
                break;
            }
        }
        let lost = self.programs.object.shared().map_or(0, |shared| *shared.lost_messages);
        if lost > self.lost_messages {
            self.lost_messages = lost;
            sink.event(Event {
                at_ns: monotonic_now(),
                what: format!("{lost} events lost: the ring was full"),
                on: O::SIDE.to_string(),
            });
        }
        Ok(commands)
    }
}

/// Messages taken from the ring at a time.
const SLICE: usize = 4096;
/// The programs wake the consumer only when the ring fills; meanwhile it looks by itself this often, which
/// costs the recorded system less than a wake-up a command.
const LOOK: Duration = Duration::from_millis(20);
/// The ring is filled by this share when the consumer is woken.
const WAKE_SHARE: u64 = 4;

impl<O: Object> Source for Probes<O> {
    type Error = Error;

    fn side(&self) -> Side {
        O::SIDE
    }

    fn kind(&self) -> Kind {
        Kind::Kernel
    }

    fn software(&self) -> Software {
        self.software.clone()
    }

    fn hooks(&self) -> Vec<Hook> {
        self.survey.hooks()
    }

    fn poll(&mut self, timeout: Duration, sink: &mut dyn Sink) -> Result<usize, Error> {
        let deadline = Instant::now() + timeout;
        loop {
            let taken = self.take(sink)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if taken > 0 || left.is_zero() {
                return Ok(taken);
            }
            let waited = self.ring.poll_raw(left.min(LOOK));
            // A signal is the caller's business.
            if waited == -libc::EINTR {
                return self.take(sink);
            }
            if waited < 0 {
                let source = libbpf_rs::Error::from_raw_os_error(-waited);
                return Err(Error::Read { doing: "waiting for records", source });
            }
        }
    }

    fn has_windows(&self) -> bool {
        true
    }

    fn disarm(&mut self, sink: &mut dyn Sink) -> Result<(), Error> {
        if !self.programs.links.is_empty() {
            self.windowed = true;
            self.record(false);
            self.take_away();
        }
        self.take(sink).map(drop)
    }

    fn arm(&mut self) -> Result<bool, Error> {
        if !self.programs.links.is_empty() {
            return Ok(true);
        }
        if self.release.waiting() > MOST_WAITING {
            return Ok(false);
        }
        self.forget();
        urgently(|| self.programs.attach(Lasting::No)).map_err(|refused| match refused {
            Refused::Program(name, why) => {
                Error::Load { doing: "attaching them again", why: format!("{name}: {why}") }
            }
            Refused::All(error) => error,
        })?;
        self.record(true);
        Ok(true)
    }

    fn stop(&mut self, sink: &mut dyn Sink) -> Result<(), Error> {
        if !self.stopped {
            self.stopped = true;
            // No command begins to be seen from here on; those in flight may still end.
            self.record(false);
            settle();
            self.take_away();
            self.programs.lasting.drain(..).for_each(|link| self.release.drop_aside(link));
            let _ = self.release.wait(LAST_LINKS);
            settle();
            if self.windowed {
                self.forget();
            }
        }
        self.take(sink)?;
        // Where a program could not run, a command lacks that boundary.
        for (program, hits) in self.programs.missed() {
            sink.event(Event {
                at_ns: monotonic_now(),
                what: format!("probe missed {hits} hits"),
                on: program,
            });
        }
        Ok(())
    }

    fn counters(&self) -> Result<Counters, Error> {
        let missed = self.programs.missed().into_iter().find(|(name, _)| name == self.programs.identity);
        let missed = missed.map_or(0, |(_, hits)| hits);
        let counted = |counter| self.programs.object.counted(counter);
        let recorded = counted(raw::FAB_RECORDED);
        let unsampled = counted(raw::FAB_UNSAMPLED);
        let mut counters = Counters {
            // Neither what the hash left nor what a program missed was counted as seen.
            seen: counted(raw::FAB_SEEN) + unsampled + missed,
            recorded: self.handed,
            unsampled,
            lost: Lost {
                ring_full: counted(raw::FAB_LOST_RING),
                map_full: counted(raw::FAB_LOST_MAP),
                unfinished: counted(raw::FAB_LOST_UNFINISHED),
                unreadable: counted(raw::FAB_LOST_READ) + self.nameless,
                probe_missed: missed,
                ..Lost::default()
            },
            in_flight: 0,
            no_start: counted(raw::FAB_NO_START),
            cut: self.cut,
        };
        counters.seen = counters.seen.saturating_sub(self.cut);
        counters.in_flight = if self.stopped {
            self.programs.commands.keys().count() as u64
        } else {
            // What is in flight and what waits in the ring.
            let over = recorded.min(self.handed) + counters.unsampled + counters.lost.total();
            counters.seen.saturating_sub(over)
        };
        Ok(counters)
    }
}

impl<O: Object> Programs<O> {
    fn load(plan: &Plan, facts: &Facts, options: &Options) -> Result<Programs<O>, Refused> {
        let failed = |doing| {
            move |error: libbpf_rs::Error| Refused::All(Error::Load { doing, why: format!("{error:#}") })
        };
        let _said = Said::listen();
        // The skeleton borrows this for as long as it lives, which is as long as the recording: a few bytes
        // a recording stay.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut open = O::open(storage).map_err(failed("opening them"))?;
        let settings = Settings {
            sampling_limit: sampling_limit(options.one_in),
            wake_at: u64::from(ring_bytes(options)) / WAKE_SHARE,
            plan,
            facts,
        };
        O::set(&mut open, &settings);
        for mut map in open.open_object_mut().maps_mut() {
            let entries = match map.name().to_str() {
                Some("ring") => ring_bytes(options),
                Some("commands") => options.in_flight.max(1),
                _ => continue,
            };
            map.set_max_entries(entries).map_err(failed("sizing a map"))?;
        }
        for mut program in open.open_object_mut().progs_mut() {
            let wanted = program.name().to_str().is_some_and(|name| plan.programs.contains(name));
            program.set_autoload(wanted);
        }
        let object = open.load().map_err(|error| {
            let said = Said::take();
            match plan.programs.iter().find(|name| said.contains(&format!("prog '{name}': "))) {
                Some(name) => Refused::Program(name, reason(&said, name)),
                None => {
                    Refused::All(Error::Load { doing: "loading them", why: format!("{error:#}: {said}") })
                }
            }
        })?;
        let map = |name: &str| {
            let map = object.object().maps().find(|map| map.name() == name);
            let map = map.ok_or_else(|| libbpf_rs::Error::from_raw_os_error(libc::ENOENT));
            map.and_then(|map| MapHandle::try_from(&map)).map_err(failed("finding a map"))
        };
        let (ring, commands) = (map("ring")?, map("commands")?);
        let mut programs = Programs {
            links: Vec::new(),
            lasting: Vec::new(),
            object,
            ring,
            commands,
            skipped: BTreeMap::new(),
            wanted: plan.programs.clone(),
            identity: plan.identity,
        };
        programs.attach(Lasting::Yes)?;
        programs.attach(Lasting::No)?;
        Ok(programs)
    }

    /// Attaches the programs that stay between windows, or the others.
    fn attach(&mut self, which: Lasting) -> Result<(), Refused> {
        let lasting = ladder::lasting(O::SIDE);
        for program in self.object.object_mut().progs_mut() {
            let Some(name) = self.wanted.iter().find(|name| program.name() == **name) else { continue };
            if lasting.contains(name) != (which == Lasting::Yes) {
                continue;
            }
            match (program.attach(), which) {
                (Ok(link), Lasting::Yes) => self.lasting.push(link),
                (Ok(link), Lasting::No) => self.links.push(link),
                (Err(error), _) => {
                    return Err(Refused::Program(name, format!("the kernel refused it: {error}")));
                }
            }
        }
        Ok(())
    }

    /// The hits that the kernel could not run a program for, by program: it does not run one on a CPU on which it
    /// runs already, and a kprobe not where an interrupt hits it inside another. It counts both, the first since
    /// 5.12 and the second since 6.7. What another program took in its place (`Rung::again`) is not among them.
    fn missed(&self) -> Vec<(String, u64)> {
        let skipped = self.skipped();
        let loaded = self
            .object
            .object()
            .progs()
            .filter(|program| self.wanted.iter().any(|name| program.name() == *name));
        let mut all: BTreeMap<String, u64> = loaded
            .filter_map(|program| {
                let path = format!("/proc/self/fdinfo/{}", program.as_fd().as_raw_fd());
                let text = std::fs::read_to_string(path).ok()?;
                let field =
                    |name| text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok();
                let id = field("prog_id:").and_then(|id| u32::try_from(id).ok());
                let hits = field("recursion_misses:").unwrap_or(0)
                    + id.and_then(|id| skipped.get(&id)).copied().unwrap_or(0);
                Some((program.name().to_string_lossy().into_owned(), hits))
            })
            .collect();
        taken_again(&mut all);
        all.into_iter().filter(|(_, hits)| *hits > 0).collect()
    }

    /// The hits that kprobes skipped until now, by the program's id.
    fn skipped(&self) -> BTreeMap<u32, u64> {
        let mut all = self.skipped.clone();
        for link in self.links.iter().chain(&self.lasting) {
            let Ok(info) = link.info() else { continue };
            if let LinkTypeInfo::PerfEvent(PerfEventLinkInfo {
                event_type: PerfEventType::Kprobe { missed, .. },
                ..
            }) = info.info
            {
                *all.entry(info.prog_id).or_default() += missed;
            }
        }
        all
    }
}

/// What the programs do when they take a command out of the map (`unfollow` and `hash_of` of `bpf/`).
fn one_less_of_hash(of_hash: &mut [u32], key: &[u8]) {
    let low = key.get(..8).and_then(|key| key.try_into().ok()).map(u64::from_ne_bytes).unwrap_or(0) as u32;
    let bits = of_hash.len().trailing_zeros();
    let hash = low.wrapping_mul(0x9e37_79b1) >> (u32::BITS - bits);
    if let Some(same) = of_hash.get_mut(hash as usize) {
        // SAFETY: it is aligned, valid while borrowed, and whoever else writes to it, in the kernel, does so atomically.
        let same = unsafe { AtomicU32::from_ptr(same) };
        same.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A hit is missed where neither a program nor the one that stands in for it ran: at most as often as the one of them
/// that missed fewer.
fn taken_again(missed: &mut BTreeMap<String, u64>) {
    let again: Vec<String> = missed.keys().filter(|name| name.contains(AGAIN)).cloned().collect();
    for name in again {
        let hits = missed.remove(&name).unwrap_or(0);
        if let Some(first) = missed.get_mut(&name.replace(AGAIN, "")) {
            *first = hits.min(*first);
        }
    }
}

/// In the name of a program that stands in for another.
const AGAIN: &str = "_again";

/// The programs that are not wanted, with the reason.
fn avoided(side: Side, hooks: &[String]) -> BTreeMap<&'static str, String> {
    let unwanted = |program: &&Program| {
        let hook = format!("{} {}", program.attach.kind(), program.attach.name());
        hooks.iter().any(|unwanted| hook.starts_with(unwanted))
    };
    ladder::programs(side)
        .filter(unwanted)
        .map(|program| (program.name, "it is to be avoided".to_owned()))
        .collect()
}

fn ring_bytes(options: &Options) -> u32 {
    options.ring_bytes.clamp(1 << 16, 1 << 30).next_power_of_two()
}

/// What libbpf said of a program: its last line about it, which has the reason.
fn reason(said: &str, name: &str) -> String {
    let about = format!("prog '{name}': ");
    let line = said.lines().rev().find(|line| line.contains(&about)).unwrap_or(said);
    line.trim_start_matches("libbpf: ").to_owned()
}

/// Waits until no CPU is inside a program that began before.
fn settle() {
    const GLOBAL: libc::c_int = 1;
    // SAFETY: the call takes integers and no memory.
    let done = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if done != 0 {
        // Refused on kernels with nohz_full CPUs. A program runs for microseconds.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The drivers that are recorded, as `nvme-tcp, nvme-rdma`, and the first one's build-id.
fn software(facts: &Facts) -> Software {
    let drivers: Vec<Module> =
        drivers(facts.side).map(|(_, module)| module).filter(|module| facts.has(*module)).collect();
    let note = |module: &Module| format!("/sys/module/{}/notes/.note.gnu.build-id", module.name);
    Software {
        name: drivers.iter().map(|module| module.command()).collect::<Vec<_>>().join(", "),
        version: facts.release.clone(),
        build_id: drivers
            .first()
            .and_then(|module| std::fs::read(note(module)).ok())
            .and_then(|note| build_id(&note)),
        ..Software::default()
    }
}

/// From a module's `.note.gnu.build-id`: three words (name length, length, type), the name, the build-id.
fn build_id(note: &[u8]) -> Option<String> {
    let length = u32::from_ne_bytes(note.get(4..8)?.try_into().ok()?) as usize;
    let id = note.get(16..16usize.checked_add(length)?)?;
    (!id.is_empty()).then(|| id.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What libbpf says while it loads; it has one ear for the whole process.
struct Said {
    before: Option<(PrintLevel, PrintCallback)>,
}

static SAID: Mutex<String> = Mutex::new(String::new());

impl Said {
    fn listen() -> Said {
        lock(&SAID).clear();
        Said { before: libbpf_rs::set_print(Some((PrintLevel::Warn, |_, line| lock(&SAID).push_str(&line)))) }
    }

    fn take() -> String {
        std::mem::take(&mut *lock(&SAID))
    }
}

impl Drop for Said {
    fn drop(&mut self) {
        libbpf_rs::set_print(self.before.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_a_power_of_two() {
        let of = |ring_bytes| super::ring_bytes(&Options { ring_bytes, ..Options::default() });
        assert_eq!(of(0), 1 << 16);
        assert_eq!(of((1 << 20) + 1), 1 << 21);
        assert_eq!(of(u32::MAX), 1 << 30);
    }

    #[test]
    fn an_avoided_hook_takes_its_programs_along() {
        let avoided = avoided(Side::Host, &["kprobe".to_owned(), "tp_btf block_bio_queue".to_owned()]);
        assert!(avoided.contains_key("bio_queue_tp") && avoided.contains_key("sendpage_kprobe"));
        assert!(!avoided.contains_key("end_tp") && !avoided.contains_key("queue_rq_fentry"));
    }

    #[test]
    fn one_less_is_of_the_hash_that_the_programs_compute() {
        let mut of_hash = vec![5; 1 << 14];
        // Of the address, the lower half counts.
        for high in [0u64, 0xffff_8880] {
            one_less_of_hash(&mut of_hash, &(high << 32 | 0x1234_5678).to_ne_bytes());
        }
        let place = ((0x1234_5678u64 * 0x9e37_79b1 % (1 << 32)) >> 18) as usize;
        assert_eq!(of_hash[place], 3);
        assert_eq!(of_hash.iter().sum::<u32>(), 5 * (1 << 14) - 2);
    }

    #[test]
    fn a_hit_is_missed_where_both_programs_missed_it() {
        let counted = |all: &[(&str, u64)]| {
            let mut all = all.iter().map(|(name, hits)| ((*name).to_owned(), *hits)).collect();
            taken_again(&mut all);
            all.into_iter().collect::<Vec<_>>()
        };
        let end = |hits| vec![("end_tp".to_owned(), hits)];
        assert_eq!(counted(&[("end_tp", 7), ("end_again_tp", 2)]), end(2));
        assert_eq!(counted(&[("end_tp", 1), ("end_again_tp", 2)]), end(1));
        assert_eq!(counted(&[("end_tp", 7)]), end(7));
    }

    #[test]
    fn a_build_id_is_read_from_its_note() {
        let note = [4u32, 3, 3]
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .chain(*b"GNU\0\x01\xab\xff\0")
            .collect::<Vec<_>>();
        assert_eq!(build_id(&note).as_deref(), Some("01abff"));
        assert_eq!(build_id(&note[..17]), None);
        assert_eq!(build_id(&[]), None);
    }

    #[test]
    fn a_programs_reason_is_the_last_thing_said_of_it() {
        let said = "libbpf: prog 'a_tp': BPF program load failed: -EINVAL\n\
                    libbpf: prog 'b_tp': failed to load: -22\n\
                    libbpf: failed to load object\n";
        assert_eq!(reason(said, "a_tp"), "prog 'a_tp': BPF program load failed: -EINVAL");
    }
}
