//! Decides which hook each boundary gets on a kernel, and says why. It attaches nothing.

use crate::error::Error;
use crate::facts::{Facts, STRUCTS, drivers, modules};
use crate::ladder::host::BIO_START;
use crate::ladder::{self, Attach, Point, Program, Rung};
use run_format::{Boundary, Hook, Side, Transport};
use std::collections::{BTreeMap, BTreeSet};

/// What the running kernel offers a recording of one side.
#[derive(Clone, Debug)]
pub struct Survey {
    /// Kernel release.
    pub kernel: String,
    /// The side.
    pub side: Side,
    /// The transports whose drivers are there: what is recorded.
    pub transports: Vec<Transport>,
    /// The side's boundaries, in the order a command passes them: one entry each, or one for each transport
    /// that takes it in a way of its own.
    pub boundaries: Vec<Choice>,
    /// What else is watched: identity, retries, connections, controller states.
    pub others: Vec<Choice>,
    /// What keeps anything from being recorded; empty when recording works.
    pub obstacles: Vec<String>,
}

/// The ladder of hooks for one thing that has to be seen.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The boundary's name, or what is watched.
    pub what: &'static str,
    /// The boundary, where it is one.
    pub boundary: Option<Boundary>,
    /// The transport whose commands it is for; `None` for all.
    pub transport: Option<Transport>,
    /// Whether nothing can be recorded without it.
    pub essential: bool,
    /// The ways to see it, best first.
    pub rungs: Vec<Way>,
    /// Index in `rungs` of the one that is used; `None` when there is none.
    pub chosen: Option<usize>,
    /// What a recording loses without it.
    pub without: &'static str,
}

/// One way to see something.
#[derive(Clone, Debug)]
pub struct Way {
    /// How it is taken, such as `fentry nvme_tcp_queue_rq`.
    pub hook: &'static str,
    /// Whether it is the moment itself, as opposed to a near one that stands for it.
    pub measured: bool,
    /// Why this kernel does not offer it.
    pub obstacle: Option<String>,
    /// What is less good about it than about those before it.
    pub lack: Option<&'static str>,
}

/// What the running kernel offers. Nothing is attached; a kernel that can not be recorded is described too.
///
/// # Errors
/// When `/proc` or the kernel's type information can not be read.
pub fn survey(side: Side) -> Result<Survey, Error> {
    Ok(Plan::make(&Facts::gather(side)?, &BTreeMap::new()).survey)
}

impl Survey {
    /// How each boundary is taken, as a run's manifest has it.
    #[must_use]
    pub fn hooks(&self) -> Vec<Hook> {
        self.boundaries.iter().filter_map(Choice::hook).collect()
    }
}

impl Choice {
    fn hook(&self) -> Option<Hook> {
        let boundary = self.boundary?;
        let passed = &self.rungs[..self.chosen.unwrap_or(self.rungs.len())];
        let mut why: Vec<String> = passed
            .iter()
            .map(|way| format!("not {}: {}", way.hook, way.obstacle.as_deref().unwrap_or("not needed")))
            .collect();
        let way = self.chosen.map(|index| &self.rungs[index]);
        match way {
            Some(way) => why.extend(way.lack.map(str::to_owned)),
            None => why.push(format!("lost: {}", self.without)),
        }
        Some(Hook {
            boundary,
            hook: way.map(|way| way.hook.to_owned()),
            rung: u32::try_from(self.chosen.unwrap_or(self.rungs.len())).unwrap_or(u32::MAX),
            measured: way.is_some_and(|way| way.measured),
            instruction: None,
            transport: self.transport,
            estimated_ns: None,
            why: (!why.is_empty()).then(|| why.join("; ")),
        })
    }
}

/// A survey and the programs that go with it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) survey: Survey,
    /// The programs to load, by name; each once, though two boundaries may share it.
    pub(crate) programs: BTreeSet<&'static str>,
    /// The program that a command is seen first in, and counted.
    pub(crate) identity: &'static str,
    /// Whether a hook tells of reconnects.
    pub(crate) connections: bool,
}

impl Plan {
    /// Chooses from what the kernel has. `refused` holds programs that the kernel did not take when it was
    /// tried, and why.
    pub(crate) fn make(facts: &Facts, refused: &BTreeMap<&'static str, String>) -> Plan {
        let mut plan = Plan {
            survey: Survey {
                kernel: facts.release.clone(),
                side: facts.side,
                transports: facts.transports(),
                boundaries: Vec::new(),
                others: Vec::new(),
                obstacles: Vec::new(),
            },
            programs: BTreeSet::new(),
            identity: "",
            connections: false,
        };
        let identified = ladder::of(facts.side)
            .iter()
            .filter(|ladder| ladder.point == Point::Identity)
            .flat_map(|ladder| ladder.rungs)
            .any(|rung| way(facts, refused, rung).obstacle.is_none());
        for ladder in ladder::of(facts.side) {
            // Where no driver is there, all is shown, with the reason.
            let there = &plan.survey.transports;
            if ladder.transport.is_some_and(|transport| !there.is_empty() && !there.contains(&transport)) {
                continue;
            }
            let mut rungs: Vec<Way> = ladder.rungs.iter().map(|rung| way(facts, refused, rung)).collect();
            if facts.preemptible && ladder.in_tasks() {
                prefer_kprobes(ladder.rungs, &mut rungs);
            }
            for (way, rung) in rungs.iter_mut().zip(ladder.rungs) {
                if facts.transports().is_empty() {
                    way.obstacle.get_or_insert_with(|| NOT_LOADED.to_owned());
                } else if rung.programs.is_empty() && !identified {
                    way.obstacle.get_or_insert_with(|| "nothing tells of a command's identity".to_owned());
                }
            }
            let chosen = rungs.iter().position(|way| way.obstacle.is_none());
            if let Some(index) = chosen {
                let Rung { programs, also, again, .. } = ladder.rungs[index];
                let again = if facts.preemptible { again } else { &[] };
                let more = also.iter().chain(again);
                let more = more.filter(|program| obstacle(facts, refused, program).is_none());
                plan.programs.extend(programs.iter().chain(more).map(|program| program.name));
                if ladder.point == Point::Identity {
                    plan.identity = programs.first().map_or("", |program| program.name);
                }
            }
            plan.connections |= ladder.point == Point::Connect && chosen.is_some();
            let boundary = match ladder.point {
                Point::Boundary(boundary) => Some(boundary),
                _ => None,
            };
            let choice = Choice {
                what: ladder.what,
                boundary,
                transport: ladder.transport,
                essential: ladder.essential,
                rungs,
                chosen,
                without: ladder.without,
            };
            match boundary {
                Some(_) => plan.survey.boundaries.push(choice),
                None => plan.survey.others.push(choice),
            }
        }
        // Without the driver nothing of it is there: that alone is said.
        let obstacle = prevented(facts).and_then(|()| plan.essential());
        plan.survey.obstacles.extend(obstacle.err().map(|error| error.to_string()));
        plan
    }

    /// Whether a boundary of a transport's commands has a hook.
    pub(crate) fn takes(&self, boundary: Boundary, transport: Transport) -> bool {
        self.survey.boundaries.iter().any(|choice| {
            choice.boundary == Some(boundary)
                && choice.transport.is_none_or(|of| of == transport)
                && choice.chosen.is_some()
        })
    }

    /// Fails when what every record needs can not be seen.
    pub(crate) fn essential(&self) -> Result<(), Error> {
        let mut all = self.survey.boundaries.iter().chain(&self.survey.others);
        let Some(choice) = all.find(|choice| choice.essential && choice.chosen.is_none()) else {
            return Ok(());
        };
        let why: Vec<String> = choice
            .rungs
            .iter()
            .map(|way| format!("{}: {}", way.hook, way.obstacle.as_deref().unwrap_or("")))
            .collect();
        Err(Error::NoHook { release: self.survey.kernel.clone(), what: choice.what, why: why.join("; ") })
    }
}

/// The obstacle of a way that can not be told of, or is of no use, before a driver of the side is there.
pub const NOT_LOADED: &str = "the driver is not loaded";

/// What keeps every program from working, whatever hooks there are.
pub(crate) fn prevented(facts: &Facts) -> Result<(), Error> {
    if !facts.missing.is_empty() {
        return Err(Error::Privileges { side: facts.side, missing: facts.missing.clone() });
    }
    if facts.confidential {
        return Err(Error::Lockdown);
    }
    let no_types = |module: &str, option| Error::NoTypes {
        release: facts.release.clone(),
        path: format!("/sys/kernel/btf/{module}"),
        option,
    };
    if !facts.typed.contains("vmlinux") {
        return Err(no_types("vmlinux", "CONFIG_DEBUG_INFO_BTF=y"));
    }
    if facts.transports().is_empty() {
        return Err(no_driver(facts.side));
    }
    if STRUCTS.iter().any(|name| !facts.structs.contains(*name)) {
        return Err(no_types("vmlinux", "CONFIG_DEBUG_INFO_BTF=y"));
    }
    for module in modules(facts.side) {
        // What is built in has its types in vmlinux's.
        let needed = module.transport.is_none() || facts.has(*module);
        if needed && module.structs.iter().any(|name| !facts.structs.contains(*name)) {
            return Err(no_types(module.name, "CONFIG_DEBUG_INFO_BTF_MODULES=y"));
        }
    }
    Ok(())
}

fn no_driver(side: Side) -> Error {
    Error::NoDriver { side, drivers: drivers(side).map(|(_, module)| module.command()).collect() }
}

/// Why a program is not to be used.
fn obstacle(facts: &Facts, refused: &BTreeMap<&'static str, String>, program: &Program) -> Option<String> {
    refused.get(program.name).cloned().or_else(|| missing(facts, program))
}

fn way(facts: &Facts, refused: &BTreeMap<&'static str, String>, rung: &Rung) -> Way {
    let obstacle = rung.programs.iter().find_map(|program| obstacle(facts, refused, program));
    Way { hook: rung.hook, measured: rung.measured, obstacle, lack: rung.lack }
}

/// Passes over the ways that a preemptible kernel skips hits of, where a kprobe sees the same moment.
fn prefer_kprobes(rungs: &[Rung], ways: &mut [Way]) {
    let kprobe = |program: &Program| matches!(program.attach, Attach::Kprobe(_));
    let whole = rungs.iter().zip(ways.iter()).position(|(rung, way)| {
        let kprobes = rung.programs.iter().any(kprobe);
        kprobes && way.measured && way.obstacle.is_none()
    });
    for way in &mut ways[..whole.unwrap_or(0)] {
        way.obstacle.get_or_insert_with(|| {
            "this kernel may stop a task inside it, and skips its hits on that CPU meanwhile".to_owned()
        });
    }
}

/// Why a program can not be attached, as far as that can be told without trying.
fn missing(facts: &Facts, program: &Program) -> Option<String> {
    let name = program.attach.name();
    if let (Attach::Fentry(_) | Attach::Fexit(_), Some(why)) = (program.attach, &facts.no_fentry) {
        return Some(why.clone());
    }
    // It may well have it once it is there.
    if facts.transports().is_empty()
        && name.starts_with("nvm")
        && !matches!(program.attach, Attach::Kprobe(_))
    {
        return Some(NOT_LOADED.to_owned());
    }
    match program.attach {
        Attach::Tracepoint(_) => (!facts.tracepoints.contains(name))
            .then(|| format!("no tracepoint {name} in this kernel's type information")),
        Attach::RawTracepoint(_) => match &facts.events {
            Some(events) => (!events.contains(name)).then(|| format!("no tracepoint {name}")),
            None => (!facts.tracepoints.contains(name)).then(|| format!("no sign of a tracepoint {name}")),
        },
        Attach::Fentry(_) | Attach::Fexit(_) => {
            if !facts.functions.contains(name) {
                return Some(absent(facts, name, "it has no type information"));
            }
            let untraceable = facts.traceable.as_ref().is_some_and(|functions| !functions.contains(name));
            untraceable.then(|| format!("{name} has no room for ftrace"))
        }
        Attach::Kprobe(_) => {
            if !facts.kprobes {
                return Some("this kernel is built without kprobes".to_owned());
            }
            if name == BIO_START && facts.bio_told.is_none() {
                return Some("which flag a bio has that was told of is not known".to_owned());
            }
            (!facts.symbols.contains_key(name)).then(|| absent(facts, name, "it is not a symbol"))
        }
    }
}

/// Why a function is not there under its plain name.
fn absent(facts: &Facts, name: &str, there: &str) -> String {
    if facts.symbols.contains_key(name) {
        return format!("{name}: {there}");
    }
    let variant = facts.symbols.keys().find(|symbol| symbol.split('.').next() == Some(name));
    match variant {
        Some(variant) => {
            format!("the compiler made {variant} of it, whose arguments are not those of the source")
        }
        None if facts.transports().is_empty() && name.starts_with("nvm") => NOT_LOADED.to_owned(),
        None => format!("no function {name}: the compiler inlined it, or this kernel has none"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIDES: [Side; 2] = [Side::Host, Side::Target];

    /// A kernel that has everything, as far as the ladders ask.
    fn rich(side: Side) -> Facts {
        let mut facts =
            Facts { release: "6.99".to_owned(), kprobes: true, bio_told: Some(7), ..Facts::none(side) };
        facts.modules = modules(side).iter().map(|module| module.name.to_owned()).collect();
        facts.typed = facts.modules.clone();
        facts.typed.insert("vmlinux".to_owned());
        let structs = STRUCTS.iter().chain(modules(side).iter().flat_map(|module| module.structs));
        facts.structs = structs.map(|name| (*name).to_owned()).collect();
        for name in ladder::names(side) {
            facts.functions.insert(name.to_owned());
            facts.tracepoints.insert(name.to_owned());
            facts.symbols.insert(name.to_owned(), 1);
        }
        facts
    }

    fn hook(facts: &Facts, boundary: Boundary) -> Hook {
        let hooks = Plan::make(facts, &BTreeMap::new()).survey.hooks();
        hooks.into_iter().find(|hook| hook.boundary == boundary).unwrap()
    }

    #[test]
    fn a_rich_kernel_gets_the_best_rung_everywhere() {
        for side in SIDES {
            let plan = Plan::make(&rich(side), &BTreeMap::new());
            assert_eq!(plan.survey.obstacles, Vec::<String>::new());
            for hook in plan.survey.hooks() {
                assert_eq!((hook.rung, hook.measured, &hook.why), (0, true, &None), "{hook:?}");
            }
            assert!(plan.connections);
        }
    }

    #[test]
    fn what_a_kernel_is_built_without_is_left_out_and_nothing_else() {
        let mut facts = rich(Side::Target);
        facts.functions.remove("nvmet_passthru_execute_cmd");
        let plan = Plan::make(&facts, &BTreeMap::new());
        assert!(!plan.programs.contains("passthru_fentry") && plan.programs.contains("file_rw_fentry"));
        let refused = BTreeMap::from([("file_rw_fentry", "EINVAL".to_owned())]);
        let plan = Plan::make(&rich(Side::Target), &refused);
        assert!(!plan.programs.contains("file_rw_fentry") && plan.programs.contains("bdev_rw_fentry"));
    }

    #[test]
    fn a_transport_whose_driver_is_not_there_has_no_hooks() {
        for side in SIDES {
            for (there, gone) in [(Transport::Rdma, Transport::Tcp), (Transport::Tcp, Transport::Rdma)] {
                let mut facts = rich(side);
                let (_, module) = drivers(side).find(|(transport, _)| *transport == gone).unwrap();
                facts.modules.remove(module.name);
                facts.symbols.remove(module.function);
                facts.structs.retain(|name| !module.structs.contains(&name.as_str()));
                let plan = Plan::make(&facts, &BTreeMap::new());
                assert_eq!(plan.survey.obstacles, Vec::<String>::new());
                assert_eq!(plan.survey.transports, [there]);
                assert!(plan.survey.hooks().iter().all(|hook| hook.transport != Some(gone)));
                let only = |program: &&Program| program.attach.name().starts_with(module.name);
                let of_driver = ladder::programs(side).filter(only);
                assert_eq!(of_driver.filter(|program| plan.programs.contains(program.name)).count(), 0);
            }
        }
    }

    #[test]
    fn records_end_with_the_response_where_nothing_sees_it_sent() {
        let mut facts = rich(Side::Target);
        assert!(Plan::make(&facts, &BTreeMap::new()).takes(Boundary::TSent, Transport::Tcp));
        for name in ["nvmet_try_send_response", "kernel_sendpage", "nvmet_setup_response_pdu"] {
            facts.functions.remove(name);
            facts.symbols.remove(name);
        }
        let plan = Plan::make(&facts, &BTreeMap::new());
        assert!(!plan.takes(Boundary::TSent, Transport::Tcp) && plan.takes(Boundary::TSent, Transport::Rdma));
        assert_eq!(plan.survey.obstacles, Vec::<String>::new());
    }

    #[test]
    fn inlined_send_functions_lead_to_the_page_that_is_sent() {
        let mut facts = rich(Side::Host);
        for name in ["nvme_tcp_try_send_cmd_pdu", "nvme_tcp_try_send_data_pdu"] {
            facts.functions.remove(name);
            facts.symbols.remove(name);
        }
        let sent = hook(&facts, Boundary::HSent);
        assert_eq!(sent.hook.as_deref(), Some("fentry kernel_sendpage"));
        assert!(sent.measured);
        assert!(sent.why.unwrap().contains("the compiler inlined it"));
        let plan = Plan::make(&facts, &BTreeMap::new());
        assert!(plan.programs.contains("sendpage_fentry") && !plan.programs.contains("send_command_fentry"));
    }

    #[test]
    fn a_suffix_of_the_compilers_is_named() {
        let mut facts = rich(Side::Host);
        facts.functions.remove("nvme_tcp_setup_h2c_data_pdu");
        facts.symbols.remove("nvme_tcp_setup_h2c_data_pdu");
        facts.symbols.insert("nvme_tcp_setup_h2c_data_pdu.isra.0".to_owned(), 1);
        let r2t = hook(&facts, Boundary::HR2t);
        assert_eq!(r2t.hook, None);
        let why = r2t.why.unwrap();
        assert!(why.contains("nvme_tcp_setup_h2c_data_pdu.isra.0"), "{why}");
        assert!(why.contains("lost: the wait for R2Ts"), "{why}");
    }

    #[test]
    fn a_function_without_room_for_ftrace_is_taken_by_kprobe() {
        let mut facts = rich(Side::Host);
        let mut traceable: BTreeSet<String> = facts.functions.clone();
        traceable.remove("nvme_tcp_queue_rq");
        facts.traceable = Some(traceable);
        assert_eq!(hook(&facts, Boundary::HDriver).hook.as_deref(), Some("kprobe nvme_tcp_queue_rq"));
        facts.kprobes = false;
        let driver = hook(&facts, Boundary::HDriver);
        assert_eq!(driver.hook.as_deref(), Some("nvme_setup_cmd"));
        assert!(!driver.measured);
    }

    #[test]
    fn on_a_preemptible_kernel_kprobes_see_what_runs_in_tasks() {
        for (side, identity) in [(Side::Host, "setup_kprobe"), (Side::Target, "init_kprobe")] {
            let mut facts = rich(side);
            facts.preemptible = true;
            let plan = Plan::make(&facts, &BTreeMap::new());
            assert_eq!(plan.identity, identity);
            for hook in plan.survey.hooks() {
                let its = |ladder: &&ladder::Ladder| {
                    ladder.point == Point::Boundary(hook.boundary) && ladder.transport == hook.transport
                };
                let in_tasks = ladder::of(side).iter().find(its).unwrap().in_tasks();
                let kprobe = hook.hook.as_deref().is_some_and(|hook| hook.starts_with("kprobe "));
                assert!(hook.measured, "{hook:?}");
                assert_eq!(kprobe, in_tasks, "{hook:?}");
                assert_eq!(kprobe, hook.why.is_some_and(|why| why.contains("may stop a task")));
            }
        }
        // What interrupts pass, too, is taken by two programs there, and by one elsewhere.
        for preemptible in [true, false] {
            let facts = Facts { preemptible, ..rich(Side::Host) };
            let plan = Plan::make(&facts, &BTreeMap::new());
            for name in ["end_again_tp", "done_again_fentry"] {
                assert_eq!(plan.programs.contains(name), preemptible, "{name}");
            }
            let facts = Facts { no_fentry: Some("no".to_owned()), ..facts };
            assert!(!Plan::make(&facts, &BTreeMap::new()).programs.contains("done_again_fentry"));
        }
        // Better some than none.
        let mut facts = rich(Side::Host);
        facts.preemptible = true;
        facts.kprobes = false;
        assert_eq!(Plan::make(&facts, &BTreeMap::new()).identity, "setup_tp");
        assert_eq!(hook(&facts, Boundary::HSent).rung, 0);
    }

    #[test]
    fn a_refused_program_gives_way_to_the_next_rung_with_the_kernels_reason() {
        let refused = BTreeMap::from([("end_tp", "EINVAL".to_owned())]);
        let plan = Plan::make(&rich(Side::Host), &refused);
        let end = plan.survey.hooks().pop().unwrap();
        assert_eq!(end.hook.as_deref(), Some("tp_btf nvme_complete_rq"));
        assert!(end.why.unwrap().contains("EINVAL"));
    }

    #[test]
    fn a_kernel_that_refuses_fentry_has_none_chosen() {
        for side in SIDES {
            let mut facts = rich(side);
            facts.no_fentry = Some("the kernel refuses fentry programs (EPERM)".to_owned());
            let plan = Plan::make(&facts, &BTreeMap::new());
            assert_eq!(plan.survey.obstacles, Vec::<String>::new());
            for hook in plan.survey.hooks() {
                let of = hook.hook.as_deref().unwrap_or_default();
                assert!(!of.contains("fentry") && !of.contains("fexit"), "{hook:?}");
                if of.starts_with("kprobe ") {
                    assert!(hook.why.is_some_and(|why| why.contains("refuses fentry")), "{of}");
                }
            }
            assert!(!plan.programs.iter().any(|name| name.ends_with("_fentry")), "{:?}", plan.programs);
        }
    }

    #[test]
    fn without_a_driver_or_an_identity_no_rung_is_chosen() {
        for side in SIDES {
            let mut facts = rich(side);
            facts.modules.clear();
            for (_, module) in drivers(side) {
                facts.symbols.remove(module.function);
            }
            let plan = Plan::make(&facts, &BTreeMap::new());
            assert_eq!(plan.survey.obstacles.len(), 1);
            for choice in plan.survey.boundaries.iter().chain(&plan.survey.others) {
                assert_eq!(choice.chosen, None, "{choice:?}");
                assert!(choice.rungs.iter().all(|way| way.obstacle.is_some()));
                assert!(choice.rungs.iter().any(|way| way.obstacle.as_deref() == Some(NOT_LOADED)));
            }
        }
        // What comes with the identity is not there without it.
        let mut facts = rich(Side::Target);
        let identity =
            ladder::of(Side::Target).iter().find(|ladder| ladder.point == Point::Identity).unwrap();
        let refused: BTreeMap<&str, String> = identity
            .rungs
            .iter()
            .flat_map(|rung| rung.programs)
            .map(|program| (program.name, "EINVAL".to_owned()))
            .collect();
        facts.functions.clear();
        facts.kprobes = false;
        let plan = Plan::make(&facts, &refused);
        let recv = &plan.survey.hooks()[0];
        assert_eq!(recv.hook, None);
        assert!(recv.why.as_deref().is_some_and(|why| why.contains("identity")), "{recv:?}");
    }

    #[test]
    fn what_prevents_recording_is_said_with_the_way_out() {
        let case = |change: &dyn Fn(&mut Facts)| {
            let mut facts = rich(Side::Host);
            change(&mut facts);
            Plan::make(&facts, &BTreeMap::new()).survey.obstacles.join("\n")
        };
        let said = case(&|f| f.missing = vec!["CAP_BPF"]);
        assert!(said.contains("missing: CAP_BPF") && said.contains("sudo fabscope record host"), "{said}");
        assert!(case(&|f| f.confidential = true).contains("lockdown=confidentiality"));
        assert!(case(&|f| f.typed.clear()).contains("CONFIG_DEBUG_INFO_BTF=y"));
        assert!(
            case(&|f| f.structs.retain(|name| name != "nvme_tcp_request"))
                .contains("/sys/kernel/btf/nvme_tcp")
        );
        let said = case(&|f| {
            f.modules.clear();
            f.symbols.clear();
        });
        assert!(said.contains("modprobe nvme-tcp or modprobe nvme-rdma, or connect first"), "{said}");
        let said = case(&|f| {
            f.tracepoints.remove("nvme_setup_cmd");
            f.functions.remove("nvme_setup_cmd");
            f.symbols.remove("blk_mq_start_request");
        });
        assert!(said.contains("no way to see a command's identity"), "{said}");
    }

    proptest! {
        #[test]
        fn whatever_is_missing_the_programs_are_those_of_the_chosen_rungs(
            target: bool,
            gone in proptest::collection::vec(any::<(bool, bool, bool)>(), 64),
            kprobes: bool,
        ) {
            let side = if target { Side::Target } else { Side::Host };
            let mut facts = rich(side);
            facts.kprobes = kprobes;
            prop_assert!(ladder::names(side).len() <= gone.len());
            for (name, (function, tracepoint, symbol)) in ladder::names(side).into_iter().zip(gone) {
                if function { facts.functions.remove(name); }
                if tracepoint { facts.tracepoints.remove(name); }
                if symbol { facts.symbols.remove(name); }
            }
            let plan = Plan::make(&facts, &BTreeMap::new());
            prop_assert_eq!(plan.survey.hooks().len(), plan.survey.boundaries.len());
            for program in ladder::programs(side) {
                if plan.programs.contains(program.name) {
                    prop_assert!(missing(&facts, program).is_none());
                }
            }
            for choice in plan.survey.boundaries.iter().chain(&plan.survey.others) {
                if let Some(chosen) = choice.chosen {
                    prop_assert!(choice.rungs[chosen].obstacle.is_none());
                    prop_assert!(choice.rungs[..chosen].iter().all(|way| way.obstacle.is_some()));
                }
            }
        }
    }
}
