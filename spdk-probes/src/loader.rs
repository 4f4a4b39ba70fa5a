//! Loads a side's BPF programs, attaches those that the plan chose, and reads what they send. What the
//! programs of both sides have in common is here; what differs, [`crate::target`] and [`crate::host`] say.
//!
//! Nothing is pinned and nothing is written into the recorded process: when this process ends, however it
//! ends, the kernel takes every probe away.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use libbpf_rs::skel::Skel;
use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, MapType, Object, OpenObject, ProgramAttachType, UprobeMultiOpts,
    UprobeOpts,
};
use run_format::bpf::raw;
use run_format::{Counters, Lost, Release, Side, Sink, Software, urgently};

use crate::plan::{Avoid, Kernel, KernelProbe, Placed, SockPath, Survey};
use crate::process::{self, Process};
use crate::queues::{Dead, Queues, SubsystemStates};
use crate::resolve::{BinarySet, Product};
use crate::ring::{Ring, ends_within, has_ended};
use crate::slots::{self, UnderWay};
use crate::{Error, Layout, Options, functions, messages};

/// How long the ring is left alone when it was empty. At 500 thousand commands a second the default ring holds
/// twenty times what comes meanwhile.
pub(crate) const REST: Duration = Duration::from_millis(5);

/// How long a queue's commands may still end after the queue went, before they are counted as unfinished.
const GRACE: Duration = Duration::from_secs(2);

/// Most links that may still be on their way out when new ones are made: some windows' worth. Each holds a thread
/// and some of the kernel's memory.
const MOST_WAITING: usize = 64;
/// How long a process may take to end after it can not be probed any more.
const LAST_OF_A_PROCESS: Duration = Duration::from_secs(1);

/// How long the end of a recording waits for the kernel to let the last links go. It lets them go all the same.
const LAST_LINKS: Duration = Duration::from_secs(60);

/// What a uprobe's way of attaching is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attach {
    /// All sites of a program in one link.
    Multi,
    /// One link a site.
    Single,
}

/// The running kernel's version.
pub(crate) fn kernel_version() -> (u32, u32) {
    let release = nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    let mut numbers = release
        .split(|character: char| !character.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

impl Attach {
    /// What this kernel has: multi-uprobe links came with 6.6.
    pub(crate) fn here(options: &Options) -> Attach {
        if kernel_version() >= (6, 6) && !options.avoid.contains(&Avoid::MultiUprobes) {
            Attach::Multi
        } else {
            Attach::Single
        }
    }
}

/// The PID namespace in which a process has the number that programs compare. Programs see the machine's own
/// numbers, which a recorder inside a container does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PidNamespace {
    /// 0 for the machine's own.
    pub(crate) inode: u32,
    pub(crate) device: u64,
}

impl PidNamespace {
    /// The inode of the machine's own namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h).
    const FIRST: u64 = 0xEFFF_FFFC;

    /// The process's namespace and its number there; the machine's own where this process is in that.
    pub(crate) fn of(pid: u32) -> (PidNamespace, u32) {
        use std::os::unix::fs::MetadataExt;
        let meta = |pid: &str| std::fs::metadata(format!("/proc/{pid}/ns/pid"));
        if meta("self").map_or(Self::FIRST, |meta| meta.ino()) == Self::FIRST {
            return (PidNamespace::default(), pid);
        }
        // The last number is the one in the process's own namespace.
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let own = status.lines().find_map(|line| line.strip_prefix("NStgid:"));
        let own = own.and_then(|numbers| numbers.split_whitespace().next_back()?.parse().ok());
        match (meta(&pid.to_string()), own) {
            (Ok(meta), Some(own)) => {
                let inode = u32::try_from(meta.ino()).unwrap_or(0);
                (PidNamespace { inode, device: meta.dev() }, own)
            }
            _ => (PidNamespace::default(), pid),
        }
    }
}

/// The constants that the programs of both sides take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common {
    pub(crate) tgid: u32,
    pub(crate) namespace: PidNamespace,
    pub(crate) limit: u32,
    pub(crate) by_sock: bool,
    pub(crate) path: SockPath,
}

/// Fills in the constants of a skeleton; its types are generated once for each side.
macro_rules! fill_common {
    ($rodata:expr, $common:expr) => {{
        let rodata = &mut *$rodata;
        let common: &$crate::loader::Common = $common;
        rodata.common.tgid = common.tgid;
        rodata.common.namespace_inode = common.namespace.inode;
        rodata.common.namespace_device = common.namespace.device;
        rodata.common.limit = common.limit;
        rodata.common.by_sock = u32::from(common.by_sock);
        rodata.common.task_files = common.path.task_files;
        rodata.common.files_fdt = common.path.files_fdt;
        rodata.common.fdt_fd = common.path.fdt_fd;
        rodata.common.file_private = common.path.file_private;
        rodata.common.socket_sk = common.path.socket_sk;
    }};
}
pub(crate) use fill_common;

/// The binaries of a process with what the options say of their debug information.
pub(crate) fn binaries(
    process: &Process,
    layout: Option<&std::path::Path>,
    debug_file: Option<&std::path::Path>,
) -> Result<BinarySet, Error> {
    let found = BinarySet::of_process(process.pid).and_then(|mut set| {
        dress(&mut set, layout, debug_file)?;
        Ok(set)
    });
    process.unless_ended(found)
}

/// Gives the binaries the debug file or layout file that was named.
pub(crate) fn dress(
    set: &mut BinarySet,
    layout: Option<&std::path::Path>,
    debug_file: Option<&std::path::Path>,
) -> Result<(), Error> {
    let mut used = (layout.is_none(), debug_file.is_none());
    let mut failed = None;
    for binary in set.binaries_mut() {
        if let Some(path) = layout {
            match Layout::load(path).and_then(|layout| binary.set_layout(layout)) {
                Ok(()) => used.0 = true,
                Err(error) => failed = Some(error),
            }
        }
        if let Some(path) = debug_file {
            match binary.set_debug_file(path) {
                Ok(()) => used.1 = true,
                Err(error) => failed = Some(error),
            }
        }
    }
    match failed {
        Some(error) if used != (true, true) => Err(error),
        _ => Ok(()),
    }
}

/// What the manifest says of the recorded program.
pub(crate) fn software(set: &BinarySet, process: &Process) -> Software {
    let version = set.version();
    let name = match version.as_ref().map(|version| version.product) {
        Some(Product::StandIn) => "fabscope stand-in",
        _ => "SPDK",
    };
    let text = version.map(|version| version.text).unwrap_or_default();
    Software {
        // Programs say their name with their version.
        version: text.strip_prefix(name).unwrap_or(&text).trim().to_owned(),
        name: name.to_owned(),
        build_id: set.build_id().map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect()),
        path: Some(process.path.display().to_string()),
        pid: Some(process.pid),
    }
}

/// A part of SPDK's layout that every build has.
pub(crate) mod needed {
    use crate::Error;
    use crate::resolve::BinarySet;

    /// The offset of a member, written as any of these.
    pub(crate) fn member(set: &BinarySet, paths: &[&str]) -> Result<u32, Error> {
        let mut found = paths.iter().map(|path| set.offset(path).map(|member| member.offset as u32));
        let first = found.next().unwrap_or(Ok(super::messages::SPDK_ABSENT));
        first.or_else(|error| found.find_map(Result::ok).ok_or(error))
    }

    /// The value of an enumerator.
    pub(crate) fn enumerator(set: &BinarySet, enumeration: &str, enumerator: &str) -> Result<u32, Error> {
        set.enumerator(enumeration, enumerator).map(|value| value as u32)
    }
}

/// A part of SPDK's layout that a build may lack.
pub(crate) mod optional {
    use crate::Error;
    use crate::messages::SPDK_ABSENT;
    use crate::resolve::BinarySet;

    /// The offset of a member, written as any of these; `SPDK_ABSENT` where there is none.
    pub(crate) fn member(set: &BinarySet, paths: &[&str]) -> Result<u32, Error> {
        Ok(super::needed::member(set, paths).unwrap_or(SPDK_ABSENT))
    }

    /// The value of an enumerator; `SPDK_ABSENT` where there is none.
    pub(crate) fn enumerator(set: &BinarySet, enumeration: &str, enumerator: &str) -> Result<u32, Error> {
        Ok(super::needed::enumerator(set, enumeration, enumerator).unwrap_or(SPDK_ABSENT))
    }
}

/// Makes the function that fills a side's constants with what the table says of its members and enumerators.
/// The rest stays zero.
macro_rules! fill_layout {
    (
        members { $($field:ident: $how:ident $($path:literal)+,)* }
        enumerators { $($name:ident: $need:ident $enumeration:literal $enumerator:literal,)* }
    ) => {
        fn of_table(set: &BinarySet) -> Result<Layout, Error> {
            Ok(Layout {
                $($field: $crate::loader::$how::member(set, &[$($path),+])?,)*
                $($name: $crate::loader::$need::enumerator(set, $enumeration, $enumerator)?,)*
                ..Layout::default()
            })
        }
    };
}
pub(crate) use fill_layout;

/// Makes a side's type, which holds its [`Recorder`], a source of commands. The variant of [`Side`] has the
/// type's name.
macro_rules! source_of_recorder {
    ($side:ident) => {
        impl run_format::Source for $side {
            type Error = $crate::Error;

            fn side(&self) -> run_format::Side {
                run_format::Side::$side
            }

            fn kind(&self) -> run_format::Kind {
                run_format::Kind::Spdk
            }

            fn software(&self) -> run_format::Software {
                self.0.software.clone()
            }

            fn hooks(&self) -> Vec<run_format::Hook> {
                self.0.survey.hooks()
            }

            fn poll(
                &mut self,
                timeout: std::time::Duration,
                sink: &mut dyn run_format::Sink,
            ) -> Result<usize, Self::Error> {
                Ok(self.0.poll(timeout, sink))
            }

            fn has_windows(&self) -> bool {
                true
            }

            fn disarm(&mut self, sink: &mut dyn run_format::Sink) -> Result<(), Self::Error> {
                self.0.disarm(sink);
                Ok(())
            }

            fn arm(&mut self) -> Result<bool, Self::Error> {
                self.0.arm()
            }

            fn stop(&mut self, sink: &mut dyn run_format::Sink) -> Result<(), Self::Error> {
                self.0.stop(sink);
                Ok(())
            }

            fn counters(&self) -> Result<run_format::Counters, Self::Error> {
                self.0.counters()
            }

            fn ended(&self) -> bool {
                self.0.ended()
            }
        }
    };
}
pub(crate) use source_of_recorder;

/// From the `spdk_sock` that queue pairs point to, to its file descriptor.
pub(crate) fn descriptor_offset(set: &BinarySet) -> i32 {
    match (set.offset(functions::SOCKET_DESCRIPTOR), set.offset(functions::SOCKET_BASE)) {
        (Ok(fd), Ok(base)) => (fd.offset as i64 - base.offset as i64) as i32,
        _ => messages::SPDK_NO_FD,
    }
}

/// Numbers of SPDK's subsystem states.
fn subsystem_states(set: &BinarySet) -> SubsystemStates {
    let [inactive, active, paused] = functions::SUBSYSTEM_STATES
        .map(|(enumeration, state)| needed::enumerator(set, enumeration, state).ok());
    SubsystemStates { inactive, active, paused }
}

/// The constants for this process and plan.
fn common(process: &Process, options: &Options, survey: &Survey, kernel: &Kernel) -> Common {
    let (namespace, tgid) = PidNamespace::of(process.pid);
    Common {
        tgid,
        namespace,
        limit: run_format::bpf::sampling_limit(options.one_in),
        by_sock: survey.kernel_probes().iter().any(|probe| !matches!(probe, KernelProbe::Tracepoint(..))),
        path: kernel.sock_path().unwrap_or_default(),
    }
}

/// Before loading: only the programs of the plan, and the ring's size.
fn prepare(object: &mut OpenObject, survey: &Survey, attach: Attach, ring_bytes: u32) {
    let uprobes = survey.uprobes();
    for mut program in object.progs_mut() {
        let name = program.name().to_string_lossy().into_owned();
        let used = survey.uses(&name);
        program.set_autoload(used);
        if used && attach == Attach::Multi && uprobes.iter().any(|(known, _)| *known == name) {
            program.set_attach_type(ProgramAttachType::TraceUprobeMulti);
        }
    }
    for mut map in object.maps_mut() {
        if map.name() == "ring" {
            // The kernel wants a power of two of whole pages.
            let bytes = ring_bytes.clamp(1 << 16, 1 << 30).next_power_of_two();
            let _ = map.set_max_entries(bytes);
        }
    }
}

/// Attaches every program of the plan.
fn attach(object: &Object, survey: &Survey, attach: Attach, pid: u32) -> Result<Vec<Link>, Error> {
    let mut links = Vec::new();
    let kernel = survey.kernel_probes();
    for program in object.progs_mut() {
        let name = program.name().to_string_lossy().into_owned();
        if let Some(probe) = kernel.iter().find(|probe| probe.program() == name) {
            let link = match probe {
                KernelProbe::Trace(_) => program.attach_trace(),
                KernelProbe::Raw(_, event) => program.attach_raw_tracepoint(event),
                KernelProbe::Tracepoint(_, category, event) => program
                    .attach_tracepoint(libbpf_rs::TracepointCategory::Custom((*category).into()), event),
            };
            links.push(link.map_err(|source| Error::Bpf { what: format!("attach {name}"), source })?);
        }
    }
    // The order is from the end of a command's way to its beginning: a command that is seen at its first
    // hook is seen at all of them.
    let mut uprobes = survey.uprobes();
    uprobes.reverse();
    for (name, sites) in &uprobes {
        let Some(program) = object.progs_mut().find(|program| program.name() == *name) else { continue };
        for sites in by_file(sites) {
            let Some(first) = sites.first() else { continue };
            let file = &first.site.binary;
            let what = || format!("attach {name} to {} in {}", first.site.symbol, file.display());
            match attach {
                Attach::Multi => {
                    // Until 6.10 the PID of a multi-uprobe meant a thread. The programs look at the
                    // process themselves.
                    let pid = if kernel_version() >= (6, 10) { pid as i32 } else { -1 };
                    let opts = UprobeMultiOpts {
                        offsets: sites.iter().map(|placed| placed.site.file_offset as usize).collect(),
                        cookies: sites.iter().map(|placed| placed.cookie).collect(),
                        ..UprobeMultiOpts::default()
                    };
                    let link = program.attach_uprobe_multi_with_opts(pid, file, "", opts);
                    links.push(link.map_err(|source| Error::Bpf { what: what(), source })?);
                }
                Attach::Single => {
                    for placed in sites {
                        // The PID of a single uprobe means a thread as well.
                        let opts = UprobeOpts { cookie: placed.cookie, ..UprobeOpts::default() };
                        let offset = placed.site.file_offset as usize;
                        let link = program.attach_uprobe_with_opts(-1, file, offset, opts);
                        links.push(link.map_err(|source| Error::Bpf { what: what(), source })?);
                    }
                }
            }
        }
    }
    Ok(links)
}

fn by_file(sites: &[Placed]) -> Vec<Vec<&Placed>> {
    let mut files: Vec<Vec<&Placed>> = Vec::new();
    for placed in sites {
        let same = |group: &&mut Vec<&Placed>| {
            group.first().is_some_and(|first| first.site.binary == placed.site.binary)
        };
        match files.iter_mut().find(same) {
            Some(group) => group.push(placed),
            None => files.push(vec![placed]),
        }
    }
    files
}

/// A side's loaded programs, to be attached again and again.
pub(crate) type Loaded = Box<dyn Skel<'static> + Send>;

/// The attached programs of one side, and the reading end of what they send. The order of the first fields is that
/// of their end.
pub(crate) struct Recorder {
    links: Vec<Link>,
    loaded: Loaded,
    how: Attach,
    pid: u32,
    /// Links that were taken away and are not gone yet.
    release: Release,
    /// Whether the programs were taken away before the end.
    windowed: bool,
    /// Commands that were under way when the programs were taken away.
    cut: u64,
    ring: Ring,
    counters: MapHandle,
    under_way: UnderWay,
    connections: MapHandle,
    sockets: MapHandle,
    others: Vec<MapHandle>,
    queues: Queues,
    pidfd: OwnedFd,
    delivered: u64,
    purged: u64,
    dying: Vec<(Instant, Dead)>,
    pub(crate) survey: Survey,
    pub(crate) software: Software,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder")
            .field("links", &self.links.len())
            .field("delivered", &self.delivered)
            .field("software", &self.software)
            .finish_non_exhaustive()
    }
}

/// The maps that both sides' objects have.
pub(crate) struct Maps {
    pub(crate) ring: MapHandle,
    pub(crate) counters: MapHandle,
    pub(crate) connections: MapHandle,
    pub(crate) sockets: MapHandle,
    pub(crate) under_way: UnderWay,
    pub(crate) others: Vec<MapHandle>,
}

/// Maps that hold what belongs to commands under way, besides the commands.
const OTHERS: &[&str] = &["bdev_ios", "bdev_overflow"];

/// What is known of a process before its side's programs are opened. `L` is the side's layout.
pub(crate) struct Chosen<L> {
    side: Side,
    pub(crate) survey: Survey,
    pub(crate) layout: L,
    pub(crate) common: Common,
    how: Attach,
    software: Software,
    states: SubsystemStates,
}

impl<L> Chosen<L> {
    /// Finds the hooks and the layout in the process's binaries.
    pub(crate) fn of(
        side: Side,
        process: &Process,
        options: &Options,
        survey: impl FnOnce(&BinarySet, &Options, &Kernel) -> Result<Survey, Error>,
        layout: impl FnOnce(&BinarySet, &Survey) -> Result<L, Error>,
    ) -> Result<Chosen<L>, Error> {
        check(process)?;
        let set = binaries(process, options.layout.as_deref(), options.debug_file.as_deref())?;
        let kernel = Kernel::default();
        let survey = survey(&set, options, &kernel)?;
        Ok(Chosen {
            side,
            layout: layout(&set, &survey)?,
            common: common(process, options, &survey, &kernel),
            how: Attach::here(options),
            software: software(&set, process),
            states: subsystem_states(&set),
            survey,
        })
    }

    /// The error for what the kernel or libbpf refuses to do with the side's programs.
    pub(crate) fn refused(&self, what: &str) -> impl FnOnce(libbpf_rs::Error) -> Error + use<L> {
        let what = format!("{what} the {}'s programs", self.side);
        move |source| Error::Bpf { what, source }
    }

    /// Before loading: only the programs that were chosen, and the ring's size.
    pub(crate) fn prepare(&self, object: &mut OpenObject, ring_bytes: u32) {
        prepare(object, &self.survey, self.how, ring_bytes);
    }

    /// Attaches what is loaded.
    pub(crate) fn attach(self, loaded: Loaded, process: &Process) -> Result<Recorder, Error> {
        let object = loaded.object();
        let under_way =
            UnderWay::new(&map(object, "in_flight")?, map(object, "overflow")?).map_err(|error| {
                Error::Bpf { what: "map the commands under way".to_owned(), source: error.into() }
            })?;
        let maps = Maps {
            ring: map(object, "ring")?,
            counters: map(object, "counters")?,
            connections: map(object, "connections")?,
            sockets: map(object, "sockets")?,
            under_way,
            others: OTHERS.iter().filter_map(|name| map(object, name).ok()).collect(),
        };
        let links = urgently(|| attach(object, &self.survey, self.how, process.pid))?;
        Ok(Recorder {
            links,
            loaded,
            how: self.how,
            pid: process.pid,
            release: Release::default(),
            windowed: false,
            cut: 0,
            ring: Ring::new(maps.ring).map_err(Error::Ring)?,
            counters: maps.counters,
            under_way: maps.under_way,
            connections: maps.connections,
            sockets: maps.sockets,
            others: maps.others,
            queues: Queues::new(self.side, process.pid, self.states),
            pidfd: process.watch()?,
            delivered: 0,
            purged: 0,
            dying: Vec::new(),
            survey: self.survey,
            software: self.software,
        })
    }
}

/// The handle of a map by its name.
pub(crate) fn map(object: &Object, name: &str) -> Result<MapHandle, Error> {
    let found = object.maps().find(|map| map.name() == name);
    let map = found.ok_or_else(|| Error::Bpf {
        what: format!("find the map {name}"),
        source: libbpf_rs::Error::from_raw_os_error(libc::ENOENT),
    })?;
    MapHandle::try_from(&map).map_err(|source| Error::Bpf { what: format!("open the map {name}"), source })
}

impl Recorder {
    /// Hands over what is in the ring; the number of commands.
    fn drain(&mut self, sink: &mut dyn Sink) -> usize {
        let Recorder { ring, queues, dying, .. } = self;
        let mut commands = 0;
        ring.drain(|message| {
            if let Some(record) = raw::fab_command::parse(message) {
                let queue = queues.of(record.queue, sink);
                sink.command(&record.to_command(queue));
                commands += 1;
                return;
            }
            match messages::Message::parse(message) {
                Some(messages::Message::Queue(message)) => queues.came(&message, sink),
                Some(messages::Message::Went(message)) => {
                    dying.extend(queues.went(&message, sink).map(|dead| (Instant::now(), dead)));
                }
                Some(messages::Message::Event(message)) => queues.event(&message, sink),
                None => {}
            }
        });
        self.delivered += commands as u64;
        commands
    }

    pub(crate) fn poll(&mut self, timeout: Duration, sink: &mut dyn Sink) -> usize {
        let end = Instant::now() + timeout;
        loop {
            let commands = self.drain(sink);
            self.bury(GRACE, sink);
            let left = end.saturating_duration_since(Instant::now());
            if commands > 0 || left.is_zero() {
                return commands;
            }
            self.ring.wait(left.min(REST));
        }
    }

    /// Takes all programs away: the breakpoints are out of the process's text at once or very soon, and the kernel
    /// lets go of the links aside.
    pub(crate) fn disarm(&mut self, sink: &mut dyn Sink) {
        if !self.links.is_empty() {
            self.windowed = true;
            self.take_away();
        }
        self.drain(sink);
    }

    /// Attaches all programs again, with nothing known of what happened meanwhile.
    pub(crate) fn arm(&mut self) -> Result<bool, Error> {
        if !self.links.is_empty() {
            return Ok(true);
        }
        if self.release.waiting() > MOST_WAITING || self.ended() {
            return Ok(false);
        }
        self.forget();
        let Recorder { loaded, survey, how, pid, .. } = self;
        match urgently(|| attach(loaded.object(), survey, *how, *pid)) {
            Ok(links) => self.links = links,
            // There is nothing left that a probe could be put into.
            Err(_) if self.ends() => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn take_away(&mut self) {
        // Backwards: the first hook goes first, so that no command begins to be seen that can not be followed.
        let links = std::mem::take(&mut self.links);
        urgently(|| links.into_iter().rev().for_each(|link| self.release.drop_aside(link)));
    }

    /// Empties the maps of what was under way when the programs were taken away. Requests and queue pairs may be
    /// others at the same addresses since.
    fn forget(&mut self) {
        let cut = &mut self.cut;
        self.under_way.sweep(|command| {
            *cut += u64::from(command.identified != 0);
            true
        });
        for map in self.others.iter().chain([&self.connections, &self.sockets]) {
            if map.map_type() == MapType::Array {
                // Without it, what is left there is told from what is new by its key.
                let _ = slots::zero(map);
                continue;
            }
            for key in map.keys() {
                // What is gone already need not be taken away.
                let _ = map.delete(&key);
            }
        }
        self.dying.clear();
        self.queues.suspend();
    }

    pub(crate) fn stop(&mut self, sink: &mut dyn Sink) {
        // The first hook is gone before the others go.
        if let Some(first) = self.links.pop() {
            urgently(|| drop(first));
        }
        self.take_away();
        let _ = self.release.wait(LAST_LINKS);
        self.drain(sink);
        if self.windowed {
            self.forget();
        } else {
            self.bury(Duration::ZERO, sink);
            self.hand_over(sink, |_| true);
        }
    }

    /// Hands over the commands that are answered and whose flush was not seen, of those that `meant` names.
    fn hand_over(&mut self, sink: &mut dyn Sink, meant: impl Fn(&messages::spdk_in_flight) -> bool) {
        let Recorder { under_way, queues, delivered, .. } = self;
        under_way.sweep(|command| {
            let answered = command.answered != 0 && meant(command);
            if answered && let Some(record) = slots::record(command) {
                let queue = queues.of(record.queue, sink);
                sink.command(&record.to_command(queue));
                *delivered += 1;
            }
            answered
        });
    }

    /// Takes away what queues that went some time ago left in the maps: commands that will never end.
    fn bury(&mut self, after: Duration, sink: &mut dyn Sink) {
        let mut dead = Vec::new();
        self.dying.retain(|(since, queue)| {
            let due = since.elapsed() >= after;
            if due {
                dead.push(*queue);
            }
            !due
        });
        if dead.is_empty() {
            return;
        }
        let of_dead = |command: &messages::spdk_in_flight| {
            command.identified != 0 && dead.iter().any(|dead| dead.queue == command.command.queue)
        };
        self.hand_over(sink, of_dead);
        let purged = &mut self.purged;
        self.under_way.sweep(|command| {
            let over = of_dead(command);
            *purged += u64::from(over);
            over
        });
        for queue in dead {
            // Only if no later connection has come to live at the same address.
            let key = queue.qpair.to_ne_bytes();
            let same =
                self.connections.lookup(&key, MapFlags::ANY).ok().flatten().is_some_and(|value| {
                    value.get(..8).is_some_and(|first| first == queue.queue.to_ne_bytes())
                });
            if same {
                let _ = self.connections.delete(&key);
                let _ = self.sockets.delete(&queue.socket.to_ne_bytes());
            }
        }
    }

    fn counter(&self, index: u32) -> Result<u64, Error> {
        let read = |source| Error::Bpf { what: "read the counters".to_owned(), source };
        let values = self
            .counters
            .lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY)
            .map_err(read)?
            .unwrap_or_default();
        let number = |value: &Vec<u8>| {
            value.get(..8).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok()).map_or(0, u64::from_ne_bytes)
        };
        Ok(values.iter().map(number).sum())
    }

    pub(crate) fn counters(&self) -> Result<Counters, Error> {
        let seen = self.counter(raw::FAB_SEEN)?;
        let unsampled = self.counter(raw::FAB_UNSAMPLED)?;
        let lost = Lost {
            ring_full: self.counter(raw::FAB_LOST_RING)?,
            map_full: self.counter(raw::FAB_LOST_MAP)?,
            unfinished: self.counter(raw::FAB_LOST_UNFINISHED)? + self.purged,
            unreadable: self.counter(raw::FAB_LOST_READ)?,
            ..Lost::default()
        };
        let in_flight = if self.links.is_empty() {
            self.under_way()
        } else {
            // Counters of several CPUs that are read while they move need not add up.
            seen.saturating_sub(self.delivered + unsampled + lost.total() + self.cut)
        };
        Ok(Counters {
            seen: seen.saturating_sub(self.cut),
            cut: self.cut,
            recorded: self.delivered,
            unsampled,
            lost,
            in_flight,
            no_start: self.counter(raw::FAB_NO_START)?,
        })
    }

    /// Commands in the maps: seen, and not over.
    fn under_way(&self) -> u64 {
        let mut number = 0;
        self.under_way.sweep(|command| {
            number += u64::from(command.identified != 0);
            false
        });
        number
    }

    pub(crate) fn ended(&self) -> bool {
        has_ended(&self.pidfd.as_fd())
    }

    /// Whether the process has ended, or is about to.
    fn ends(&self) -> bool {
        ends_within(&self.pidfd.as_fd(), LAST_OF_A_PROCESS)
    }
}

/// Whether a program has this function, in whatever form: an inlined one has no code of its own.
pub(crate) fn is_there(set: &BinarySet, function: &str) -> Result<(), Error> {
    match set.resolve_function(function) {
        Ok(_) | Err(Error::OnlyInlined { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Checks what can be checked before anything is loaded.
pub(crate) fn check(process: &Process) -> Result<(), Error> {
    process::check_rights()?;
    if process.ended() { Err(Error::ProcessEnded { pid: process.pid }) } else { Ok(()) }
}
