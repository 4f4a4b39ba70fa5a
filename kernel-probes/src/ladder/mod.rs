//! The table of hooks: for each thing that has to be seen, the ways to see it, best first. It knows names and
//! no kernel.

/// Programs that `BOTH` of `bpf/kernel.bpf.h` makes, by fentry or by kprobe: each one's name and its function.
macro_rules! programs {
    (fentry $($name:literal $function:literal),+) => { &[$(fentry(concat!($name, "_fentry"), $function)),+] };
    (kprobe $($name:literal $function:literal),+) => { &[$(kprobe(concat!($name, "_kprobe"), $function)),+] };
}

/// The ladder of a function's entry, with further rungs below.
macro_rules! entry {
    ($name:literal $function:literal $(, $more:expr)*) => {
        &[
            rung(concat!("fentry ", $function), programs!(fentry $name $function)),
            rung(concat!("kprobe ", $function), programs!(kprobe $name $function)),
            $($more,)*
        ]
    };
}

pub(crate) mod host;
mod target;

use run_format::{Boundary, Side, Transport};
use std::collections::BTreeSet;

/// What a program is attached with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attach {
    /// A tracepoint whose arguments have types.
    Tracepoint(&'static str),
    /// A tracepoint whose arguments the program takes on trust.
    RawTracepoint(&'static str),
    /// A function's entry, through ftrace.
    Fentry(&'static str),
    /// A function's exit, through ftrace.
    Fexit(&'static str),
    /// A function's entry, through a breakpoint or ftrace.
    Kprobe(&'static str),
}

impl Attach {
    /// What `bpf/*.bpf.c` calls it.
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            Attach::Tracepoint(_) => "tp_btf",
            Attach::RawTracepoint(_) => "raw_tp",
            Attach::Fentry(_) => "fentry",
            Attach::Fexit(_) => "fexit",
            Attach::Kprobe(_) => "kprobe",
        }
    }

    /// The tracepoint or function.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Attach::Tracepoint(name)
            | Attach::RawTracepoint(name)
            | Attach::Fentry(name)
            | Attach::Fexit(name)
            | Attach::Kprobe(name) => name,
        }
    }
}

/// One BPF program and where it goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    /// Its name in the side's `bpf/*.bpf.c`.
    pub(crate) name: &'static str,
    /// What it is attached to.
    pub(crate) attach: Attach,
}

/// One way to see something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rung {
    /// How a person reads it.
    pub(crate) hook: &'static str,
    /// Its own programs; empty where another's program does it.
    pub(crate) programs: &'static [Program],
    /// More programs, for what not every kernel has: each is used where it can be attached.
    pub(crate) also: &'static [Program],
    /// Programs that take the hits which a preemptible kernel skips of the others: on such a kernel they are used,
    /// too. Each is named as the one that it stands in for, with `_again` before the kind.
    pub(crate) again: &'static [Program],
    /// Whether it is the moment itself.
    pub(crate) measured: bool,
    /// What is less good about it.
    pub(crate) lack: Option<&'static str>,
}

/// What has to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Point {
    /// A boundary.
    Boundary(Boundary),
    /// A command's identity: without it there is no record.
    Identity,
    /// The front parts of bios that are split.
    Split,
    /// An attempt that is over and will be tried again.
    Requeue,
    /// A request whose bios go to another path.
    Failover,
    /// A queue that is connected, again or for the first time.
    Connect,
    /// A controller's changes of state.
    State,
    /// A command that took too long.
    Timeout,
    /// A queue that is disconnected.
    Disconnect,
    /// A controller that can not go on.
    Fatal,
    /// A namespace that comes or goes.
    Namespaces,
    /// The drive's own time.
    Drive,
}

/// All ways to see one thing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ladder {
    pub(crate) point: Point,
    /// The transport whose commands it is for; `None` for all.
    pub(crate) transport: Option<Transport>,
    /// Whether nothing can be recorded when no rung fits.
    pub(crate) essential: bool,
    /// What it is, for a person.
    pub(crate) what: &'static str,
    /// What is lost when no rung fits.
    pub(crate) without: &'static str,
    pub(crate) rungs: &'static [Rung],
}

impl Ladder {
    /// Whether the programs run in tasks, where a preemptible kernel may stop them. What comes in with an
    /// interrupt is left out: a kprobe that an interrupt hits inside another is skipped.
    pub(crate) const fn in_tasks(&self) -> bool {
        match self.point {
            // Of the drive the beginning, which is what has the more to do.
            Point::Identity | Point::Disconnect | Point::Drive => true,
            Point::Boundary(boundary) => match boundary {
                Boundary::HQueued
                | Boundary::HDriver
                | Boundary::HSent
                | Boundary::HR2t
                | Boundary::HDataSent => true,
                // Over TCP the driver reads from its socket in its worker, or in the task that polls.
                Boundary::HRecv => matches!(self.transport, Some(Transport::Tcp)),
                // Both target drivers read capsules and take data in workers.
                Boundary::TRecv | Boundary::TR2t | Boundary::TData | Boundary::TSubmit => true,
                // Over RDMA the response is posted by whoever completes the command.
                Boundary::TSent => matches!(self.transport, Some(Transport::Tcp)),
                _ => false,
            },
            _ => false,
        }
    }
}

/// All ladders of a side.
pub(crate) const fn of(side: Side) -> &'static [Ladder] {
    match side {
        Side::Host => host::HOST,
        Side::Target => target::TARGET,
    }
}

const fn tp(name: &'static str, tracepoint: &'static str) -> Program {
    Program { name, attach: Attach::Tracepoint(tracepoint) }
}

const fn fentry(name: &'static str, function: &'static str) -> Program {
    Program { name, attach: Attach::Fentry(function) }
}

const fn kprobe(name: &'static str, function: &'static str) -> Program {
    Program { name, attach: Attach::Kprobe(function) }
}

const fn raw_tp(name: &'static str, tracepoint: &'static str) -> Program {
    Program { name, attach: Attach::RawTracepoint(tracepoint) }
}

const fn fexit(name: &'static str, function: &'static str) -> Program {
    Program { name, attach: Attach::Fexit(function) }
}

const fn rung(hook: &'static str, programs: &'static [Program]) -> Rung {
    Rung { hook, programs, also: &[], again: &[], measured: true, lack: None }
}

const fn stand_in(hook: &'static str, programs: &'static [Program], lack: &'static str) -> Rung {
    Rung { hook, programs, also: &[], again: &[], measured: false, lack: Some(lack) }
}

impl Rung {
    const fn with(self, also: &'static [Program]) -> Rung {
        Rung { also, ..self }
    }

    const fn again(self, again: &'static [Program]) -> Rung {
        Rung { again, ..self }
    }
}

/// Every program on a side's ladders, as often as it stands there.
pub(crate) fn programs(side: Side) -> impl Iterator<Item = &'static Program> {
    of(side)
        .iter()
        .flat_map(|ladder| ladder.rungs)
        .flat_map(|rung| rung.programs.iter().chain(rung.also).chain(rung.again))
}

/// The programs of which none is on a command's way: they see queues, controllers and namespaces come, change and go.
pub(crate) fn lasting(side: Side) -> BTreeSet<&'static str> {
    let (rare, often): (Vec<&Ladder>, Vec<&Ladder>) = of(side).iter().partition(|ladder| {
        matches!(
            ladder.point,
            Point::Connect
                | Point::State
                | Point::Timeout
                | Point::Disconnect
                | Point::Fatal
                | Point::Namespaces
        )
    });
    let names = |ladders: &[&Ladder]| -> BTreeSet<&'static str> {
        let rungs = ladders.iter().flat_map(|ladder| ladder.rungs);
        rungs.flat_map(|rung| rung.programs.iter().chain(rung.also)).map(|program| program.name).collect()
    };
    &names(&rare) - &names(&often)
}

/// Every tracepoint and function that a side's ladders name.
pub(crate) fn names(side: Side) -> BTreeSet<&'static str> {
    programs(side).map(|program| program.attach.name()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIDES: [(Side, &str); 2] = [
        (Side::Host, include_str!("../../bpf/host.bpf.c")),
        (Side::Target, include_str!("../../bpf/target.bpf.c")),
    ];

    #[test]
    fn each_boundary_has_at_most_one_ladder_a_transport_and_at_least_one_in_all() {
        for (side, _) in SIDES {
            for boundary in Boundary::of(side) {
                let taken: Vec<Option<Transport>> = of(side)
                    .iter()
                    .filter(|ladder| ladder.point == Point::Boundary(boundary))
                    .map(|ladder| ladder.transport)
                    .collect();
                let unique: BTreeSet<_> = taken.iter().map(|t| t.map(Transport::name)).collect();
                assert_eq!(unique.len(), taken.len(), "{boundary}: {taken:?}");
                assert!(!taken.is_empty(), "{boundary}");
                assert!(taken.len() == 1 || !taken.contains(&None), "{boundary}: {taken:?}");
            }
        }
    }

    #[test]
    fn what_lasts_is_on_no_command_s_way() {
        let host = lasting(Side::Host);
        assert!(host.contains("connect_fentry") && host.contains("state_fexit"), "{host:?}");
        for name in ["setup_tp", "bio_queue_tp", "end_tp", "queue_rq_fentry", "requeue_tp"] {
            assert!(!host.contains(name), "{name}");
        }
        let target = lasting(Side::Target);
        assert!(!target.is_empty() && !target.iter().any(|name| name.starts_with("req_")), "{target:?}");
    }

    #[test]
    fn each_program_of_the_source_stands_on_a_ladder_and_is_attached_as_it_says() {
        for (side, source) in SIDES {
            let mut written: BTreeSet<(String, String)> = BTreeSet::new();
            let mut section = None;
            for line in source.lines() {
                if let Some(name) = line.strip_prefix("SEC(\"").and_then(|rest| rest.strip_suffix("\")")) {
                    section = Some(name.to_owned());
                } else if let Some(section) = section.take() {
                    let (_, rest) = line.split_once('(').unwrap();
                    written.insert((rest.split([',', ')']).next().unwrap().to_owned(), section));
                } else if let Some(arguments) = line.strip_prefix("BOTH(") {
                    let mut arguments = arguments.split(", ");
                    let (name, function) = (arguments.next().unwrap(), arguments.next().unwrap());
                    for kind in ["fentry", "kprobe"] {
                        written.insert((format!("{name}_{kind}"), format!("{kind}/{function}")));
                    }
                }
            }
            let told: BTreeSet<(String, String)> = programs(side)
                .map(|program| {
                    let Program { name, attach } = program;
                    ((*name).to_owned(), format!("{}/{}", attach.kind(), attach.name()))
                })
                .collect();
            assert_eq!(written, told, "{side}");
        }
    }
}
