//! Decides with what each boundary of a process is taken: the choice among the hooks of the table
//! ([`crate::functions`]) for one program on one kernel. It attaches nothing; what it chooses, the loader
//! attaches, and `probe` shows.

use std::cell::OnceCell;
use std::os::fd::{FromRawFd, OwnedFd};

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::{Func, MemberAttr, Struct, Typedef};
use libbpf_rs::libbpf_sys;
use run_format::{Boundary, Hook, Lack, Ladder, Side, Spot};

use crate::functions::{self, Argument, At, Part, Rung, Uprobe, Way, Without};
use crate::inlined::{Base, Place};
use crate::loader::kernel_version;
use crate::place::{Class, Reg};
use crate::price::Prices;
use crate::resolve::{BinarySet, Coverage, Function, READABLE, Site};
use crate::usdt::{UsdtArg, UsdtPlace, UsdtSite};
use crate::{Error, Options, messages};

/// How much of a command's way is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// What the five stages need.
    #[default]
    Stages,
    /// Every boundary there is a hook for, also where its own cost is about what it measures.
    Full,
}

/// What not to use, though the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Avoid {
    /// fentry and fexit programs.
    Trampolines,
    /// Raw tracepoints.
    RawTracepoints,
    /// Uprobes on the socket module's system calls.
    SystemCallUprobes,
    /// Links with several uprobes.
    MultiUprobes,
}

/// What the running kernel offers.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    btf: OnceCell<Option<Btf<'static>>>,
    trampolines: OnceCell<Result<(), String>>,
}

/// Whether fentry programs may be loaded at all: a kernel can be built without, and a machine's owner can
/// forbid them. An empty program tells.
fn try_trampoline(function: u32) -> Result<(), String> {
    const RETURN_0: [libbpf_sys::bpf_insn; 2] = {
        let nothing = libbpf_sys::bpf_insn {
            code: 0,
            _bitfield_align_1: [],
            _bitfield_1: libbpf_sys::__BindgenBitfieldUnit::new([0]),
            off: 0,
            imm: 0,
        };
        // mov64 r0, 0; exit (the kernel's Documentation/bpf/standardization/instruction-set.rst)
        [libbpf_sys::bpf_insn { code: 0xb7, ..nothing }, libbpf_sys::bpf_insn { code: 0x95, ..nothing }]
    };
    let mut opts = libbpf_sys::bpf_prog_load_opts {
        sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as libbpf_sys::size_t,
        expected_attach_type: libbpf_sys::BPF_TRACE_FENTRY,
        attach_btf_id: function,
        ..Default::default()
    };
    // SAFETY: all pointers are valid for the call, the counts are those of the array, and the strings end
    // with a zero.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_TRACING,
            c"fab_try".as_ptr(),
            c"Dual BSD/GPL".as_ptr(),
            RETURN_0.as_ptr(),
            RETURN_0.len() as libbpf_sys::size_t,
            &raw mut opts,
        )
    };
    if fd < 0 {
        let error = std::io::Error::from_raw_os_error(-fd);
        // Who only looks at a file may have no rights to try; a recording has them.
        if error.kind() == std::io::ErrorKind::PermissionDenied && crate::process::check_rights().is_err() {
            return Ok(());
        }
        return Err(format!("the kernel refuses fentry programs ({:?})", nix::errno::Errno::from_raw(-fd)));
    }
    // SAFETY: the descriptor is new, and nobody else has it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// From a file descriptor to its `struct sock`: offsets in bytes, from the kernel's own BTF.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SockPath {
    pub(crate) task_files: u32,
    pub(crate) files_fdt: u32,
    pub(crate) fdt_fd: u32,
    pub(crate) file_private: u32,
    pub(crate) socket_sk: u32,
}

impl Kernel {
    fn btf(&self) -> Option<&Btf<'static>> {
        self.btf.get_or_init(|| Btf::from_vmlinux().ok()).as_ref()
    }

    /// The BTF, if it tells the way from a descriptor to its socket.
    fn sockets(&self) -> Result<&Btf<'static>, String> {
        let btf = self.btf().ok_or("the kernel has no BTF (/sys/kernel/btf/vmlinux)")?;
        match self.sock_path() {
            Some(_) => Ok(btf),
            None => Err("the kernel's BTF does not tell the way from a descriptor to its socket".into()),
        }
    }

    /// Whether a function can take an fentry or fexit program.
    fn function(&self, kind: &str, name: &str) -> Result<(), String> {
        let function = self
            .sockets()?
            .type_by_name::<Func<'_>>(name)
            .ok_or_else(|| format!("the kernel's BTF has no function `{name}`"))?;
        // bpf_get_func_ret, which tells an fexit program the result whatever the number of arguments.
        if kind == "fexit" && kernel_version() < (5, 17) {
            return Err("fexit programs learn the result only from Linux 5.17 on".into());
        }
        self.trampolines.get_or_init(|| try_trampoline(function.type_id().into())).clone()
    }

    /// Whether there is a raw tracepoint of this name.
    fn raw_tracepoint(&self, name: &str) -> Result<(), String> {
        self.sockets()?
            .type_by_name::<Typedef<'_>>(&format!("btf_trace_{name}"))
            .map(|_| ())
            .ok_or_else(|| format!("this kernel has no tracepoint `{name}`"))
    }

    /// How to get from a file descriptor to its `struct sock`.
    pub(crate) fn sock_path(&self) -> Option<SockPath> {
        let btf = self.btf()?;
        let offset = |structure: &str, member: &str| {
            let structure: Struct<'_> = btf.type_by_name(structure)?;
            let found = structure.iter().find(|m| m.name.is_some_and(|name| name == member))?;
            match found.attr {
                MemberAttr::Normal { offset } => Some(offset / 8),
                MemberAttr::BitField { .. } => None,
            }
        };
        Some(SockPath {
            task_files: offset("task_struct", "files")?,
            files_fdt: offset("files_struct", "fdt")?,
            fdt_fd: offset("fdtable", "fd")?,
            file_private: offset("file", "private_data")?,
            socket_sk: offset("socket", "sk")?,
        })
    }

    fn tracepoint(category: &str, name: &str) -> Result<(), String> {
        let mut closed = false;
        for root in ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"] {
            match std::fs::metadata(format!("{root}/events/{category}/{name}/id")) {
                Ok(_) => return Ok(()),
                Err(error) => closed |= error.kind() == std::io::ErrorKind::PermissionDenied,
            }
        }
        Err(if closed {
            format!("whether there is a tracepoint {category}:{name} only root may see")
        } else {
            format!("no tracepoint {category}:{name} here (is tracefs mounted?)")
        })
    }
}

/// One rung, tried on one program and kernel.
#[derive(Clone, Debug)]
pub struct RungSurvey {
    /// What it is, such as `uprobe bdev_io_submit`.
    pub hook: String,
    /// Where its uprobes would go, or why it can not be had.
    pub outcome: Result<Vec<Site>, String>,
    /// Whose lack it is that it can not be had.
    pub lack: Option<Lack>,
    /// Whether this is the boundary's own moment.
    pub measured: bool,
    /// How far it is from the definition, where it is; and what it does not see.
    pub note: String,
    /// Whether it sees every command.
    pub whole: bool,
    pub(crate) uprobes: Vec<PlacedUprobe>,
    pub(crate) kernel: Vec<KernelProbe>,
}

/// A uprobe, and where it goes: in each copy of its function, or at each call.
#[derive(Clone, Debug)]
pub(crate) struct PlacedUprobe {
    pub(crate) wanted: Uprobe,
    pub(crate) sites: Vec<Site>,
}

/// A program on the kernel's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelProbe {
    /// fentry or fexit: the program names its function.
    Trace(&'static str),
    /// A raw tracepoint: program and name.
    Raw(&'static str, &'static str),
    /// A tracepoint.
    Tracepoint(&'static str, &'static str, &'static str),
}

impl KernelProbe {
    pub(crate) fn program(self) -> &'static str {
        match self {
            KernelProbe::Trace(program)
            | KernelProbe::Raw(program, _)
            | KernelProbe::Tracepoint(program, ..) => program,
        }
    }
}

/// How one boundary can be taken.
#[derive(Clone, Debug)]
pub struct BoundarySurvey {
    /// The boundary.
    pub boundary: Boundary,
    /// Its rungs, best first.
    pub rungs: Vec<RungSurvey>,
    /// The first that holds and sees every command, else the first that holds.
    pub chosen: Option<usize>,
    /// Whether nothing can be recorded where none does.
    pub essential: bool,
    /// What is lost where none does.
    pub without: &'static str,
}

impl BoundarySurvey {
    /// The rung that holds.
    pub fn rung(&self) -> Option<&RungSurvey> {
        self.rungs.get(self.chosen?)
    }

    /// Every rung, for whoever wants to see why it is this one.
    #[must_use]
    pub fn ladder(&self) -> Ladder {
        Ladder {
            boundary: self.boundary,
            transport: None,
            essential: self.essential,
            chosen: self.chosen,
            rungs: self.rungs.iter().map(RungSurvey::rung).collect(),
            without: self.without.to_owned(),
        }
    }

    /// As a run's manifest has it.
    #[must_use]
    pub fn hook(&self) -> Hook {
        self.ladder().hook()
    }
}

impl RungSurvey {
    fn rung(&self) -> run_format::Rung {
        run_format::Rung {
            hook: self.hook.clone(),
            usable: self.outcome.is_ok(),
            measured: self.measured,
            whole: self.whole,
            why: self.outcome.as_ref().err().cloned(),
            lack: self.lack,
            note: (!self.note.is_empty()).then(|| self.note.clone()),
            uprobes: self.outcome.iter().flatten().map(spot).collect(),
        }
    }
}

/// A uprobe's place, as people and scripts read it.
pub(crate) fn spot(site: &Site) -> Spot {
    Spot {
        symbol: site.symbol.clone(),
        offset: site.offset_in_function,
        instruction: site.instruction.clone(),
        class: site.class.name().to_owned(),
        estimated_ns: site.estimated_ns,
        why: site.why.clone(),
    }
}

/// What one program on this kernel offers for one side.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The side.
    pub side: Side,
    /// Its boundaries, in the order a command passes them.
    pub boundaries: Vec<BoundarySurvey>,
    /// What else is watched: function, and where its probe goes or why not.
    pub events: Vec<(String, Result<Vec<Site>, String>)>,
    /// What keeps anything from being recorded; empty where recording works.
    pub obstacles: Vec<String>,
    event_uprobes: Vec<(&'static str, Vec<Placed>)>,
}

/// A site, and what its program is told when it is hit there.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) site: Site,
    pub(crate) cookie: u64,
}

impl Survey {
    /// Tries every rung of the side's ladders on these binaries.
    ///
    /// `thorough` tries also those below the chosen one, which only a reader of the survey wants.
    pub(crate) fn of(
        set: &BinarySet,
        side: Side,
        options: &Options,
        kernel: &Kernel,
        thorough: bool,
    ) -> Survey {
        let prober = Prober { set, options, kernel };
        let boundaries =
            functions::ladders(side).iter().map(|ladder| prober.ladder(ladder, thorough)).collect();
        let mut outcomes = Vec::new();
        let mut event_uprobes = Vec::new();
        for event in functions::events(side) {
            let mut reasons = Vec::new();
            let found = event.ways.iter().find_map(|way| {
                prober.way(way).map_err(|reason| reasons.push(reason)).ok().map(|placed| (way, placed))
            });
            match found {
                Some((way, placed)) => {
                    let sites = placed.iter().map(|placed| placed.site.clone()).collect();
                    outcomes.push((way.name(), Ok(sites)));
                    event_uprobes.push((event.program, placed));
                }
                None => {
                    let name = event.ways.first().map_or_else(String::new, |way| way.name());
                    outcomes.push((name, Err(reasons.join("; "))));
                }
            }
        }
        let mut survey = Survey { side, boundaries, events: outcomes, event_uprobes, obstacles: Vec::new() };
        if let Some(prices) = &options.prices {
            survey.reprice(prices);
        }
        survey
    }

    /// Gives the sites of its rungs the prices that were measured.
    fn reprice(&mut self, prices: &Prices) {
        for rung in self.boundaries.iter_mut().flat_map(|boundary| &mut boundary.rungs) {
            let placed = rung.uprobes.iter_mut().flat_map(|uprobe| &mut uprobe.sites);
            for site in rung.outcome.iter_mut().flatten().chain(placed) {
                site.estimated_ns = prices.of(site.class.into()).in_place_ns;
            }
        }
    }

    /// Fails where a boundary can not be taken without which nothing can be recorded. `name` is what the message
    /// calls the program.
    pub(crate) fn essential(&self, name: &str) -> Result<(), Error> {
        let Some(lost) = self.boundaries.iter().find(|b| b.essential && b.chosen.is_none()) else {
            return Ok(());
        };
        let reasons: Vec<&str> =
            lost.rungs.iter().filter_map(|rung| rung.outcome.as_ref().err().map(String::as_str)).collect();
        Err(Error::NoHook { name: name.to_owned(), boundary: lost.boundary, reasons: reasons.join("; ") })
    }

    /// As a run's manifest has it.
    #[must_use]
    pub fn hooks(&self) -> Vec<Hook> {
        self.boundaries.iter().map(BoundarySurvey::hook).collect()
    }

    /// Every uprobe of the chosen rungs and of the events: each program once, with all its sites.
    pub(crate) fn uprobes(&self) -> Vec<(&'static str, Vec<Placed>)> {
        let mut all: Vec<(&'static str, Vec<Placed>)> = Vec::new();
        for uprobe in self.chosen_uprobes() {
            let placed = uprobe
                .sites
                .iter()
                .map(|site| Placed { site: site.clone(), cookie: cookie_of(&site.arguments) })
                .collect();
            all.push((uprobe.wanted.program, placed));
        }
        all.extend(self.event_uprobes.iter().cloned());
        all
    }

    /// Every uprobe of the chosen rungs, each program once.
    pub(crate) fn chosen_uprobes(&self) -> Vec<&PlacedUprobe> {
        let mut all: Vec<&PlacedUprobe> = Vec::new();
        for uprobe in self.boundaries.iter().filter_map(BoundarySurvey::rung).flat_map(|rung| &rung.uprobes) {
            if !all.iter().any(|known| known.wanted.program == uprobe.wanted.program) {
                all.push(uprobe);
            }
        }
        all
    }

    /// Every kernel program of the chosen rungs, each once.
    pub(crate) fn kernel_probes(&self) -> Vec<KernelProbe> {
        let mut all = Vec::new();
        for rung in self.boundaries.iter().filter_map(BoundarySurvey::rung) {
            for probe in &rung.kernel {
                if !all.contains(probe) {
                    all.push(*probe);
                }
            }
        }
        all
    }

    /// Whether a program takes part.
    pub(crate) fn uses(&self, program: &str) -> bool {
        self.uprobes().iter().any(|(name, _)| *name == program)
            || self.kernel_probes().iter().any(|probe| probe.program() == program)
    }
}

struct Prober<'a> {
    set: &'a BinarySet,
    options: &'a Options,
    kernel: &'a Kernel,
}

impl Prober<'_> {
    fn allowed(&self, avoid: Avoid) -> Result<(), (Lack, String)> {
        if self.options.avoid.contains(&avoid) {
            Err((Lack::Request, "left out on request".to_owned()))
        } else {
            Ok(())
        }
    }

    fn ladder(&self, ladder: &functions::Ladder, thorough: bool) -> BoundarySurvey {
        let mut rungs: Vec<RungSurvey> = Vec::new();
        let mut whole = None;
        for rung in ladder.rungs {
            let survey = self.rung(rung);
            if whole.is_none() && survey.outcome.is_ok() && survey.whole {
                whole = Some(rungs.len());
            }
            rungs.push(survey);
            if whole.is_some() && !thorough {
                break;
            }
        }
        let chosen = whole.or_else(|| rungs.iter().position(|rung| rung.outcome.is_ok()));
        let (essential, without) = match ladder.without {
            Without::Nothing => (true, "nothing can be recorded"),
            Without::Lost(what) => (false, what),
        };
        BoundarySurvey { boundary: ladder.boundary, rungs, chosen, essential, without }
    }

    fn rung(&self, rung: &Rung) -> RungSurvey {
        let mut names = Vec::new();
        let mut uprobes: Vec<PlacedUprobe> = Vec::new();
        let mut kernel = Vec::new();
        let mut notes: Vec<String> = Vec::new();
        if !rung.note.is_empty() {
            notes.push(rung.note.to_owned());
        }
        let mut whole = true;
        // The first reason counts; but the program's lack is told before the kernel's, which another machine may
        // not have.
        let mut failed: Option<(Lack, String)> = None;
        let mut fail = |lack: Lack, reason: String| {
            if failed.as_ref().is_none_or(|(known, _)| *known < lack) {
                failed = Some((lack, reason));
            }
        };
        for part in rung.parts {
            match part {
                Part::Uprobe(uprobe) => match self.uprobe(uprobe) {
                    Ok(Coverage { sites, gap, .. }) => {
                        whole &= gap.is_none();
                        notes.extend(gap);
                        // Calls that the program does not make need no place.
                        names.extend((!sites.is_empty()).then(|| name_of(uprobe, &sites)));
                        uprobes.push(PlacedUprobe { wanted: *uprobe, sites });
                    }
                    Err(reason) => {
                        names.push(format!("uprobe {}", uprobe.function));
                        fail(Lack::Program, reason.to_string());
                    }
                },
                Part::First(alternatives) => {
                    let mut reasons = Vec::new();
                    let mut found: Option<(&Uprobe, Vec<Site>, Option<String>)> = None;
                    for uprobe in *alternatives {
                        match self.first_of(uprobe) {
                            Ok(Coverage { sites, gap, .. }) => {
                                let whole = gap.is_none();
                                if whole || found.is_none() {
                                    found = Some((uprobe, sites, gap));
                                }
                                if whole {
                                    break;
                                }
                            }
                            Err(reason) => reasons.push(reason),
                        }
                    }
                    match found {
                        Some((uprobe, sites, gap)) => {
                            whole &= gap.is_none();
                            notes.extend(gap);
                            names.push(name_of(uprobe, &sites));
                            uprobes.push(PlacedUprobe { wanted: *uprobe, sites });
                        }
                        None => {
                            if let Some(uprobe) = alternatives.first() {
                                names.push(format!("uprobe {}", uprobe.function));
                            }
                            let (lack, reason) =
                                reasons.into_iter().next().unwrap_or((Lack::Program, String::new()));
                            fail(lack, reason);
                        }
                    }
                }
                Part::Kernel { program, kind, function } => {
                    names.push(format!("{kind} {function}"));
                    match self
                        .allowed(Avoid::Trampolines)
                        .and_then(|()| self.kernel.function(kind, function).map_err(of_kernel))
                        .and_then(|()| self.descriptor())
                    {
                        Ok(()) => kernel.push(KernelProbe::Trace(program)),
                        Err((lack, reason)) => fail(lack, reason),
                    }
                }
                Part::Raw { program, name } => {
                    names.push(format!("raw tracepoint {name}"));
                    match self
                        .allowed(Avoid::RawTracepoints)
                        .and_then(|()| self.kernel.raw_tracepoint(name).map_err(of_kernel))
                        .and_then(|()| self.descriptor())
                    {
                        Ok(()) => kernel.push(KernelProbe::Raw(program, name)),
                        Err((lack, reason)) => fail(lack, reason),
                    }
                }
                Part::Tracepoint { program, category, name } => {
                    names.push(format!("tracepoint {category}:{name}"));
                    match Kernel::tracepoint(category, name)
                        .map_err(of_kernel)
                        .and_then(|()| self.descriptor())
                    {
                        Ok(()) => kernel.push(KernelProbe::Tracepoint(program, category, name)),
                        Err((lack, reason)) => fail(lack, reason),
                    }
                }
                Part::BdevUser => {
                    let driver = self.set.offset(functions::BDEV_IO_DRIVER);
                    if self.set.resolve_function("bdev_nvme_submit_request").is_err() || driver.is_err() {
                        fail(Lack::Program, "the program does not use NVMe bdevs".to_owned());
                    }
                }
                Part::FullDetail(why) => {
                    if self.options.detail != Detail::Full {
                        fail(Lack::Request, (*why).to_owned());
                    }
                }
            }
        }
        let sites = uprobes.iter().flat_map(|uprobe| uprobe.sites.clone()).collect();
        let lack = failed.as_ref().map(|(lack, _)| *lack);
        RungSurvey {
            hook: names.join(", "),
            outcome: failed.map_or(Ok(sites), |(_, reason)| Err(reason)),
            lack,
            measured: rung.measured,
            note: notes.join("; "),
            whole,
            uprobes,
            kernel,
        }
    }

    /// A uprobe of several that would do. Those on system calls know a connection by its descriptor.
    fn first_of(&self, uprobe: &Uprobe) -> Result<Coverage, (Lack, String)> {
        if uprobe.program == "flush_call" {
            self.allowed(Avoid::SystemCallUprobes)?;
            self.descriptor()?;
        }
        self.uprobe(uprobe).map_err(|error| (Lack::Program, error.to_string()))
    }

    /// Whether a connection's file descriptor can be read, by which its flushes are known.
    fn descriptor(&self) -> Result<(), (Lack, String)> {
        self.set
            .offset(functions::SOCKET_DESCRIPTOR)
            .map(|_| ())
            .map_err(|error| (Lack::Program, error.to_string()))
    }

    fn way(&self, way: &Way) -> Result<Vec<Placed>, String> {
        let (sites, arguments): (Vec<UsdtPlaced>, _) = match way {
            Way::Usdt(name, arguments) => {
                let sites = self.set.usdt("spdk", name);
                if sites.is_empty() {
                    return Err(format!("the program has no USDT probe `{name}`"));
                }
                (sites.into_iter().map(usdt_site).collect(), arguments)
            }
            Way::Function(name, arguments) => {
                let live: Vec<Reg> = arguments
                    .iter()
                    .filter_map(|argument| match argument {
                        Argument::Register(register) | Argument::Member(register, _) => Some(*register),
                        Argument::Usdt(_) => None,
                    })
                    .collect();
                let covered = self.set.coverage(name, &live, None).map_err(|error| error.to_string())?;
                (covered.sites.into_iter().map(|site| (site, Vec::new())).collect(), arguments)
            }
        };
        sites
            .into_iter()
            .map(|(site, usdt)| {
                let mut cookie = 0;
                // A function's site has its arguments in the order in which they were asked for.
                let mut of_function = site.arguments.iter();
                for (which, argument) in arguments.iter().enumerate() {
                    let packed = match argument {
                        Argument::Register(_) => of_function.next().and_then(|place| pack_place(*place, 0)),
                        Argument::Member(_, member) => {
                            let member = self.set.offset(member).map_err(|error| error.to_string())?;
                            of_function.next().and_then(|place| pack_place(*place, member.offset as i64))
                        }
                        Argument::Usdt(number) => usdt.get(*number).and_then(|arg| pack_usdt(arg.as_ref()?)),
                    };
                    let packed = packed.ok_or_else(|| {
                        format!("argument {which} of {} is in no place that can be read", way.name())
                    })?;
                    cookie |= u64::from(packed) << (messages::SPDK_ARGUMENT_BITS as usize * which);
                }
                Ok(Placed { site, cookie })
            })
            .collect()
    }

    /// Where the uprobe goes, and which calls it does not see there.
    fn uprobe(&self, uprobe: &Uprobe) -> Result<Coverage, Error> {
        let covered = match uprobe.at {
            At::Entry | At::EmulatedEntry => {
                let covered = self.set.coverage(uprobe.function, uprobe.live, uprobe.source)?;
                match covered.sites.iter().find(|site| site.class == Class::SingleStep) {
                    Some(site) if uprobe.at == At::EmulatedEntry => {
                        return Err(Error::SingleStepped {
                            symbol: site.symbol.clone(),
                            instruction: site.instruction.clone(),
                        });
                    }
                    _ => covered,
                }
            }
            At::CallsIn(caller) => self.set.calls_covered(caller, uprobe.function, uprobe.live)?,
            At::OnlyCallsIn(caller) => self.set.calls_in_alone(caller, uprobe.function, uprobe.live)?,
            At::CallsBut(left_out) => self.set.calls_but(left_out, uprobe.function, uprobe.live)?,
        };
        let seen = |caller: &String| Some(caller.as_str()) == uprobe.complemented;
        let complete = !covered.unseen_in.is_empty() && covered.unseen_in.iter().all(seen);
        Ok(Coverage { gap: covered.gap.filter(|_| !complete), ..covered })
    }
}

/// What the kernel has not.
fn of_kernel(reason: String) -> (Lack, String) {
    (Lack::Kernel, reason)
}

/// A site, and where the arguments of its USDT probe are; none at a function.
type UsdtPlaced = (Site, Vec<Option<UsdtArg>>);

/// Packs an argument's place as `argument()` in bpf/spdk.bpf.h takes it; none where it does not fit.
fn pack(how: u32, register: Option<Reg>, displacement: i64) -> Option<u32> {
    let displacement = i32::try_from(displacement).ok().filter(|d| READABLE.contains(&i64::from(*d)))?;
    let register = register.map_or(Some(0), pt_regs_index)?;
    let mask = (1 << messages::SPDK_ARGUMENT_BITS) - 1;
    Some((how | register << 2 | (displacement << 7) as u32) & mask)
}

/// Packs an argument's place, with what is to be added to the argument.
fn pack_place(place: Place, more: i64) -> Option<u32> {
    match (place.base, place.memory) {
        (Base::Register(register), false) => {
            pack(messages::SPDK_ARGUMENT_REGISTER, Some(register), place.offset.checked_add(more)?)
        }
        (Base::Register(register), true) if more == 0 => {
            pack(messages::SPDK_ARGUMENT_MEMORY, Some(register), place.offset)
        }
        (Base::Nothing, false) => {
            pack(messages::SPDK_ARGUMENT_CONSTANT, None, place.offset.checked_add(more)?)
        }
        _ => None,
    }
}

/// What a program is told at a site: where its arguments are. A place that does not fit was never chosen.
pub(crate) fn cookie_of(arguments: &[Place]) -> u64 {
    arguments.iter().enumerate().fold(0, |cookie, (which, place)| {
        let packed = pack_place(*place, 0).unwrap_or(0);
        cookie | u64::from(packed) << (messages::SPDK_ARGUMENT_BITS as usize * which)
    })
}

fn pack_usdt(argument: &UsdtArg) -> Option<u32> {
    match &argument.place {
        UsdtPlace::Register { register, shift: 0 } => {
            pack(messages::SPDK_ARGUMENT_REGISTER, Some(*register), 0)
        }
        UsdtPlace::Constant(value) => pack(messages::SPDK_ARGUMENT_CONSTANT, None, *value),
        UsdtPlace::Memory { offset, base: Some(base), index: None } => {
            pack(messages::SPDK_ARGUMENT_MEMORY, Some(*base), *offset)
        }
        _ => None,
    }
}

/// Where x86-64's `struct pt_regs` has a register, in words (arch/x86/include/asm/ptrace.h).
fn pt_regs_index(register: Reg) -> Option<u32> {
    Some(match register {
        Reg::R15 => 0,
        Reg::R14 => 1,
        Reg::R13 => 2,
        Reg::R12 => 3,
        Reg::Rbp => 4,
        Reg::Rbx => 5,
        Reg::R11 => 6,
        Reg::R10 => 7,
        Reg::R9 => 8,
        Reg::R8 => 9,
        Reg::Rax => 10,
        Reg::Rcx => 11,
        Reg::Rdx => 12,
        Reg::Rsi => 13,
        Reg::Rdi => 14,
        Reg::Rip => 16,
        Reg::Rsp => 19,
    })
}

/// A USDT probe's place as a uprobe's. Its nop is emulated.
fn usdt_site(usdt: UsdtSite) -> UsdtPlaced {
    let class = Class::Emulated;
    let site = Site {
        binary: usdt.binary,
        symbol: format!("{}:{}", usdt.provider, usdt.name),
        vaddr: usdt.vaddr,
        file_offset: usdt.file_offset,
        offset_in_function: 0,
        instruction: "nop".to_owned(),
        class,
        estimated_ns: class.estimated_ns(),
        why: "USDT probe".to_owned(),
        inlined: None,
        arguments: Vec::new(),
    };
    (site, usdt.args)
}

/// Only the copies from this source file, where the symbol table tells; all where it tells of none.
pub(crate) fn from_source(mut function: Function, source: Option<&str>) -> Function {
    if let Some(wanted) = source
        && function.copies.iter().any(|copy| copy.source.as_deref() == Some(wanted))
    {
        function.copies.retain(|copy| copy.source.as_deref() == Some(wanted));
    }
    function
}

/// `uprobe bdev_io_submit+1`, `uprobe nvmf_tcp_req_process+530 (call nvmf_tcp_send_r2t_pdu)`, or `uprobe
/// nvmf_tcp_req_process (4 calls)`: who calls has another name in each build, and none in a stripped one.
fn name_of(uprobe: &Uprobe, sites: &[Site]) -> String {
    let Some(site) = sites.first() else { return format!("uprobe {}", uprobe.function) };
    let at = match site.offset_in_function {
        0 => String::new(),
        offset => format!("+{offset}"),
    };
    let more = if sites.len() > 1 { format!(" and {} more", sites.len() - 1) } else { String::new() };
    match uprobe.at {
        _ if site.inlined.is_some() => {
            format!("uprobe {}{at} ({} inlined){more}", site.symbol, uprobe.function)
        }
        At::Entry | At::EmulatedEntry => format!("uprobe {}{at}{more}", site.symbol),
        At::CallsBut(_) => match sites.len() {
            1 => format!("uprobe {} (1 call)", uprobe.function),
            calls => format!("uprobe {} ({calls} calls)", uprobe.function),
        },
        At::CallsIn(_) | At::OnlyCallsIn(_) => {
            format!("uprobe {}{at} ({}){more}", site.symbol, site.instruction)
        }
    }
}
