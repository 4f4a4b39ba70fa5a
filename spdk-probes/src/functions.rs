//! The one table of what is wanted of SPDK and of the kernel: for each boundary the hooks that take it, best
//! first; what else is watched; and the structure members and enumerators that the BPF programs read.
//!
//! It names things only. Whether a build has them, and where, [`crate::resolve`] tells; the choice is
//! `plan.rs`'s; a layout file keeps all of it for a stripped build.
//!
//! Sources: SPDK's `lib/nvmf/tcp.c`, `lib/nvmf/ctrlr.c`, `lib/bdev/bdev.c`, `module/sock/posix/posix.c` for the
//! target; `lib/nvme/nvme_tcp.c`, `lib/nvme/nvme_qpair.c`, `module/bdev/nvme/bdev_nvme.c`, `app/spdk_nvme_perf` for
//! the host; releases 24.09 to 26.05.

use run_format::{Boundary, Side};

use crate::dwarf::Wanted;
use crate::place::Reg;
use crate::resolve::BinarySet;

/// Where a uprobe goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// At the function's entry, or as near behind it as is cheap.
    Entry,
    /// The same, but only if the kernel emulates the instruction there.
    EmulatedEntry,
    /// At the calls of the function inside this one, which the kernel emulates.
    CallsIn(&'static str),
    /// The same, and calls from elsewhere are not meant. A program that has no such function makes none.
    OnlyCallsIn(&'static str),
    /// At every call of the function but for those inside these, which only do what no hook is for.
    CallsBut(&'static [&'static str]),
}

/// A uprobe: which program on which function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Uprobe {
    pub(crate) program: &'static str,
    pub(crate) function: &'static str,
    pub(crate) at: At,
    /// Registers that must still hold the caller's arguments.
    pub(crate) live: &'static [Reg],
    /// The source file it must come from, where other programs have functions of that name.
    pub(crate) source: Option<&'static str>,
    /// Another part of the rung sees the calls that the compiler inlined into this function.
    pub(crate) complemented: Option<&'static str>,
}

/// One thing that a rung needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Uprobe(Uprobe),
    /// The first of these that is there.
    First(&'static [Uprobe]),
    /// An fentry or fexit program, on this function of the kernel.
    Kernel {
        program: &'static str,
        kind: &'static str,
        function: &'static str,
    },
    /// A raw tracepoint of the kernel.
    Raw {
        program: &'static str,
        name: &'static str,
    },
    /// A tracepoint of the kernel.
    Tracepoint {
        program: &'static str,
        category: &'static str,
        name: &'static str,
    },
    /// The program has the NVMe bdev module.
    BdevUser,
    /// Only when everything is asked for; the reason why not else.
    FullDetail(&'static str),
}

/// Everything in `parts` together takes the boundary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rung {
    pub(crate) parts: &'static [Part],
    /// Whether this is the boundary's own moment.
    pub(crate) measured: bool,
    /// How far it is from the definition, where it is.
    pub(crate) note: &'static str,
}

/// A boundary and the ways to take it, best first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ladder {
    pub(crate) boundary: Boundary,
    pub(crate) rungs: &'static [Rung],
    /// What stands for the boundary where no rung holds.
    pub(crate) without: Without,
}

/// What happens without any rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Without {
    /// Nothing can be recorded.
    Nothing,
    /// The model uses another boundary; this is what is lost.
    Lost(&'static str),
}

const fn at_entry(program: &'static str, function: &'static str, live: &'static [Reg]) -> Uprobe {
    Uprobe { program, function, at: At::Entry, live, source: None, complemented: None }
}

const fn rung(parts: &'static [Part]) -> Rung {
    Rung { parts, measured: true, note: "" }
}

/// The state machine is entered last when the request is freed, which is no boundary: all its calls but those from
/// what the transport calls back when a response is written, or a queue pair ends.
const REQ_PROCESS: Part = Part::First(&[
    Uprobe {
        at: At::CallsBut(&[
            "nvmf_tcp_request_free",
            "nvmf_tcp_req_free",
            "nvmf_tcp_pdu_c2h_data_complete",
            "_req_pdu_write_done",
        ]),
        ..at_entry("req_process", "nvmf_tcp_req_process", &[Reg::Rsi])
    },
    at_entry("req_process", "nvmf_tcp_req_process", &[Reg::Rsi]),
]);
/// Where storage completes on another thread than the queue pair's, a message takes the request there.
const THREAD_MESSAGE: Part = Part::Uprobe(Uprobe {
    at: At::OnlyCallsIn("spdk_nvmf_request_complete"),
    ..at_entry("thread_message", "spdk_thread_send_msg", &[Reg::Rdx])
});
const NEAR_RESPONSE: Part = Part::FullDetail(
    "t_resp follows in the same call, some tens of nanoseconds later, and a probe between would mostly measure itself",
);
const NEAR_CAPSULE: Part = Part::FullDetail(
    "the capsule is queued in the same call, some tens of nanoseconds later, and a probe before would mostly measure itself",
);
/// SPDK's R2T function begins with instructions that are single-stepped; the calls of it, which are all in the
/// state machine, are emulated.
const SEND_R2T: Part = Part::First(&[
    Uprobe { at: At::EmulatedEntry, ..at_entry("send_r2t", "nvmf_tcp_send_r2t_pdu", &[Reg::Rsi]) },
    Uprobe {
        at: At::CallsIn("nvmf_tcp_req_process"),
        ..at_entry("send_r2t", "nvmf_tcp_send_r2t_pdu", &[Reg::Rsi])
    },
    at_entry("send_r2t", "nvmf_tcp_send_r2t_pdu", &[Reg::Rsi]),
]);
const WRITE_PDU: Part = Part::Uprobe(Uprobe {
    source: Some("nvme_tcp.c"),
    ..at_entry("write_pdu", "nvme_tcp_qpair_write_pdu", &[Reg::Rdi, Reg::Rsi, Reg::Rcx])
});
const TCP_SUBMIT: Part =
    Part::Uprobe(at_entry("tcp_submit_request", "nvme_tcp_qpair_submit_request", &[Reg::Rsi]));
const SUBMIT_REQUEST: Part =
    Part::Uprobe(at_entry("submit_request", "nvme_qpair_submit_request", &[Reg::Rdi, Reg::Rsi]));
const REQ_COMPLETE: Part =
    Part::Uprobe(at_entry("req_complete", "nvme_tcp_req_complete", &[Reg::Rdi, Reg::Rsi, Reg::Rdx]));
const REQUEST_COMPLETE: Part =
    Part::Uprobe(at_entry("request_complete", "spdk_nvmf_request_complete", &[Reg::Rdi]));
/// Where the bdev layer's callback has it inlined, the probe on the callback sees those.
const REQUEST_COMPLETE_CALLED: Part = Part::Uprobe(Uprobe {
    complemented: Some("nvmf_bdev_ctrlr_complete_cmd"),
    ..at_entry("request_complete", "spdk_nvmf_request_complete", &[Reg::Rdi])
});
const BDEV_COMPLETE_CMD: Part =
    Part::Uprobe(at_entry("bdev_complete", "nvmf_bdev_ctrlr_complete_cmd", &[Reg::Rdx]));

/// The flush that takes a queued PDU along. See bpf/spdk.bpf.h for why not SPDK's own flush function.
const FLUSH_KERNEL: Part =
    Part::Kernel { program: "flush_tcp_sendmsg", kind: "fentry", function: "tcp_sendmsg" };
const FLUSH_RAW: Part = Part::Raw { program: "flush_raw", name: "tcp_sendmsg_locked" };
/// Where the socket module calls sendmsg: directly in its flush, or since 25.09 in a function of its own.
const FLUSH_CALLS: Part = Part::First(&[
    flush_call("posix_writev"),
    flush_call("_sock_flush"),
    flush_call("posix_sock_flush"),
    flush_call("posix_sock_group_impl_poll"),
]);
const FLUSH_SYSCALL: Part =
    Part::Tracepoint { program: "flush_syscall", category: "syscalls", name: "sys_enter_sendmsg" };
const RECEIVE: Part =
    Part::Kernel { program: "received_tcp_recvmsg", kind: "fexit", function: "tcp_recvmsg" };
const RECEIVE_RAW: Part = Part::Raw { program: "received_raw", name: "sock_recv_length" };

const fn flush_call(caller: &'static str) -> Uprobe {
    Uprobe { at: At::CallsIn(caller), ..at_entry("flush_call", "sendmsg", &[]) }
}

/// The target's boundaries.
pub(crate) const TARGET: &[Ladder] = &[
    Ladder { boundary: Boundary::TRecv, rungs: &[rung(&[REQ_PROCESS])], without: Without::Nothing },
    Ladder {
        boundary: Boundary::TR2t,
        rungs: &[
            rung(&[SEND_R2T, FLUSH_KERNEL]),
            rung(&[SEND_R2T, FLUSH_RAW]),
            rung(&[SEND_R2T, FLUSH_CALLS]),
            rung(&[SEND_R2T, FLUSH_SYSCALL]),
            Rung {
                parts: &[SEND_R2T],
                measured: false,
                note: "when the R2T is queued: its wait for the next flush is not seen",
            },
        ],
        without: Without::Lost("a write's wait for its data counts as the target driver's time"),
    },
    Ladder {
        boundary: Boundary::TData,
        rungs: &[rung(&[REQ_PROCESS, SEND_R2T])],
        without: Without::Lost("t_submit stands for it"),
    },
    Ladder {
        boundary: Boundary::TSubmit,
        rungs: &[
            rung(&[Part::Uprobe(at_entry("bdev_submit", "bdev_io_submit", &[Reg::Rdi]))]),
            Rung {
                parts: &[Part::Uprobe(at_entry("request_exec", "spdk_nvmf_request_exec", &[Reg::Rdi]))],
                measured: false,
                note: "when the nvmf layer takes the command: its checks and waiting for a bdev_io count as storage",
            },
        ],
        without: Without::Lost("storage can not be told from the target's driver"),
    },
    Ladder {
        boundary: Boundary::TDone,
        rungs: &[
            rung(&[NEAR_RESPONSE, REQUEST_COMPLETE]),
            Rung {
                parts: &[THREAD_MESSAGE, REQ_PROCESS],
                measured: true,
                note: "with t_resp, which follows in the same call; what completes on another thread, by itself",
            },
            rung(&[REQUEST_COMPLETE]),
            rung(&[REQUEST_COMPLETE_CALLED, BDEV_COMPLETE_CMD]),
            Rung {
                parts: &[BDEV_COMPLETE_CMD],
                measured: true,
                note: "dataset management completes elsewhere and has no t_done",
            },
        ],
        without: Without::Lost("t_resp stands for it"),
    },
    Ladder { boundary: Boundary::TResp, rungs: &[rung(&[REQ_PROCESS])], without: Without::Nothing },
    Ladder {
        boundary: Boundary::TSent,
        rungs: &[
            rung(&[REQ_PROCESS, FLUSH_KERNEL]),
            rung(&[REQ_PROCESS, FLUSH_RAW]),
            rung(&[REQ_PROCESS, FLUSH_CALLS]),
            rung(&[REQ_PROCESS, FLUSH_SYSCALL]),
        ],
        without: Without::Lost(
            "t_resp stands for it: the response's wait for the next flush counts as the network's",
        ),
    },
];

/// The host's boundaries.
pub(crate) const HOST: &[Ladder] = &[
    Ladder {
        boundary: Boundary::HQueued,
        rungs: &[
            rung(&[
                Part::BdevUser,
                Part::Uprobe(at_entry("bdev_submit", "bdev_io_submit", &[Reg::Rdi])),
                SUBMIT_REQUEST,
            ]),
            Rung {
                parts: &[
                    Part::BdevUser,
                    Part::Uprobe(at_entry("bdev_nvme_submit", "bdev_nvme_submit_request", &[Reg::Rsi])),
                    SUBMIT_REQUEST,
                ],
                measured: false,
                note: "when the NVMe bdev takes the I/O: what the bdev layer does before is not seen",
            },
            rung(&[SUBMIT_REQUEST]),
        ],
        without: Without::Nothing,
    },
    Ladder {
        boundary: Boundary::HDriver,
        rungs: &[
            rung(&[NEAR_CAPSULE, TCP_SUBMIT]),
            Rung {
                parts: &[WRITE_PDU],
                measured: true,
                note: "when the capsule is queued, which follows in the same call",
            },
            rung(&[TCP_SUBMIT]),
        ],
        without: Without::Lost("h_queued stands for it"),
    },
    Ladder {
        boundary: Boundary::HSent,
        rungs: &[
            rung(&[WRITE_PDU, FLUSH_KERNEL]),
            rung(&[WRITE_PDU, FLUSH_RAW]),
            rung(&[WRITE_PDU, FLUSH_CALLS]),
            rung(&[WRITE_PDU, FLUSH_SYSCALL]),
            Rung {
                parts: &[WRITE_PDU],
                measured: false,
                note: "not taken: no flush is seen here, and h_driver stands for it",
            },
        ],
        without: Without::Nothing,
    },
    Ladder {
        boundary: Boundary::HR2t,
        rungs: &[
            rung(&[WRITE_PDU, RECEIVE]),
            rung(&[WRITE_PDU, RECEIVE_RAW]),
            Rung {
                parts: &[WRITE_PDU],
                measured: false,
                note: "when the answer to the R2T is queued: handling the R2T is not seen",
            },
        ],
        without: Without::Lost("the host's part of an R2T write's wait counts as the network's"),
    },
    Ladder {
        boundary: Boundary::HDataSent,
        rungs: &[
            rung(&[WRITE_PDU, FLUSH_KERNEL]),
            rung(&[WRITE_PDU, FLUSH_RAW]),
            rung(&[WRITE_PDU, FLUSH_CALLS]),
            rung(&[WRITE_PDU, FLUSH_SYSCALL]),
        ],
        without: Without::Lost("the host's part of an R2T write's wait counts as the network's"),
    },
    Ladder {
        boundary: Boundary::HRecv,
        rungs: &[rung(&[REQ_COMPLETE, RECEIVE]), rung(&[REQ_COMPLETE, RECEIVE_RAW])],
        without: Without::Lost(
            "h_done stands for it: the driver's work on a completion counts as the network's",
        ),
    },
    Ladder { boundary: Boundary::HDone, rungs: &[rung(&[REQ_COMPLETE])], without: Without::Nothing },
    Ladder {
        boundary: Boundary::HEnd,
        rungs: &[
            rung(&[Part::BdevUser, Part::Uprobe(at_entry("bdev_complete", "bdev_io_complete", &[Reg::Rdi]))]),
            rung(&[
                Part::FullDetail(
                    "h_end equals h_done there, and a probe at the callback would mostly measure itself",
                ),
                Part::Uprobe(Uprobe {
                    source: Some("perf.c"),
                    ..at_entry("io_complete", "io_complete", &[Reg::Rdi])
                }),
            ]),
        ],
        without: Without::Lost("h_done stands for it, as the driver calls the application back at once"),
    },
];

/// Where an event's argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Argument {
    /// The USDT probe's argument of this number.
    Usdt(usize),
    /// A register at the function's entry.
    Register(Reg),
    /// This member of what a register points to: its address.
    Member(Reg, &'static str),
}

/// A way to see an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// A USDT probe of SPDK's.
    Usdt(&'static str, &'static [Argument]),
    /// A function's entry.
    Function(&'static str, &'static [Argument]),
}

impl Way {
    pub(crate) fn name(self) -> String {
        match self {
            Way::Usdt(name, _) => format!("usdt spdk:{name}"),
            Way::Function(name, _) => format!("uprobe {name}"),
        }
    }
}

/// Something besides commands that explains a gap: its program and the ways to see it, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Happening {
    pub(crate) program: &'static str,
    pub(crate) ways: &'static [Way],
}

/// The target's. Each is left out where the build lacks it.
pub(crate) const TARGET_EVENTS: &[Happening] = &[
    Happening {
        program: "qpair_disconnect",
        ways: &[
            Way::Usdt("nvmf_qpair_disconnect", &[Argument::Usdt(1)]),
            Way::Function("spdk_nvmf_qpair_disconnect", &[Argument::Register(Reg::Rdi)]),
        ],
    },
    Happening {
        program: "set_cc",
        ways: &[Way::Function(
            "nvmf_prop_set_cc",
            &[Argument::Register(Reg::Rdi), Argument::Register(Reg::Rsi)],
        )],
    },
    Happening {
        program: "ctrlr_destruct",
        ways: &[
            Way::Usdt("nvmf_ctrlr_destruct", &[Argument::Usdt(1)]),
            Way::Function("nvmf_ctrlr_destruct", &[Argument::Register(Reg::Rdi)]),
        ],
    },
    Happening {
        program: "subsystem_change",
        ways: &[
            Way::Usdt("nvmf_subsystem_change_state", &[Argument::Usdt(1), Argument::Usdt(2)]),
            Way::Function(
                "nvmf_subsystem_state_change",
                &[Argument::Member(Reg::Rdi, "spdk_nvmf_subsystem.subnqn"), Argument::Register(Reg::Rdx)],
            ),
        ],
    },
];

/// The host's.
pub(crate) const HOST_EVENTS: &[Happening] = &[
    Happening {
        program: "qpair_disconnect",
        ways: &[Way::Function("nvme_tcp_ctrlr_disconnect_qpair", &[Argument::Register(Reg::Rsi)])],
    },
    Happening { program: "bdev_reset", ways: &[Way::Usdt("bdev_nvme_ctrlr_reset", &[Argument::Usdt(1)])] },
];

/// The ladders of a side.
pub(crate) fn ladders(side: Side) -> &'static [Ladder] {
    match side {
        Side::Target => TARGET,
        Side::Host => HOST,
    }
}

/// What else is watched on a side.
pub(crate) fn events(side: Side) -> &'static [Happening] {
    match side {
        Side::Target => TARGET_EVENTS,
        Side::Host => HOST_EVENTS,
    }
}

/// A structure member that the programs read: which field of their constants it fills, and its ways to be
/// written, of which the first that the build has counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WantedMember {
    pub(crate) needed: bool,
    pub(crate) paths: &'static [&'static str],
}

/// Hands the target's members and enumerators to a macro: `field: needed|optional "structure.member", ...`
/// and `field: needed|optional enumeration enumerator, ...`.
macro_rules! target_layout {
    ($use:ident) => {
        $use! {
            members {
                tcp_req_state: needed "spdk_nvmf_tcp_req.state",
                request_qpair: needed "spdk_nvmf_request.qpair",
                request_cmd: needed "spdk_nvmf_request.cmd",
                request_rsp: needed "spdk_nvmf_request.rsp",
                qpair_qid: needed "spdk_nvmf_qpair.qid",
                qpair_ctrlr: needed "spdk_nvmf_qpair.ctrlr",
                qpair_group: optional "spdk_nvmf_qpair.group",
                qpair_state: optional "spdk_nvmf_qpair.state",
                tqpair_pdu: needed "spdk_nvmf_tcp_qpair.pdu_in_progress",
                tqpair_sock: needed "spdk_nvmf_tcp_qpair.sock",
                tqpair_host_address: optional "spdk_nvmf_tcp_qpair.initiator_addr",
                tqpair_target_address: optional "spdk_nvmf_tcp_qpair.target_addr",
                tqpair_host_port: optional "spdk_nvmf_tcp_qpair.initiator_port",
                tqpair_target_port: optional "spdk_nvmf_tcp_qpair.target_port",
                pdu_sqe: needed "nvme_tcp_pdu.hdr.capsule_cmd.ccsqe",
                ctrlr_cntlid: needed "spdk_nvmf_ctrlr.cntlid",
                ctrlr_hostnqn: needed "spdk_nvmf_ctrlr.hostnqn",
                ctrlr_subsys: needed "spdk_nvmf_ctrlr.subsys",
                ctrlr_cc: optional "spdk_nvmf_ctrlr.vcprop.cc" "spdk_nvmf_ctrlr.cc",
                subsystem_subnqn: needed "spdk_nvmf_subsystem.subnqn",
                group_thread: optional "spdk_nvmf_poll_group.thread",
                thread_name: optional "spdk_thread.name",
                bdev_io_caller_ctx: optional "spdk_bdev_io.internal.caller_ctx",
                bdev_io_type: optional "spdk_bdev_io.type",
                unmap_req: optional "nvmf_bdev_ctrlr_unmap.req",
            }
            enumerators {
                state_new: needed "spdk_nvmf_tcp_req_state" "TCP_REQUEST_STATE_NEW",
                state_ready_to_execute: needed "spdk_nvmf_tcp_req_state" "TCP_REQUEST_STATE_READY_TO_EXECUTE",
                state_executed: needed "spdk_nvmf_tcp_req_state" "TCP_REQUEST_STATE_EXECUTED",
                state_completed: needed "spdk_nvmf_tcp_req_state" "TCP_REQUEST_STATE_COMPLETED",
                state_ready_to_complete: optional "spdk_nvmf_tcp_req_state" "TCP_REQUEST_STATE_READY_TO_COMPLETE",
                state_zcopy_started: optional "spdk_nvmf_tcp_req_state" "TCP_REQUEST_STATE_ZCOPY_START_COMPLETED",
                qpair_enabled: optional "spdk_nvmf_qpair_state" "SPDK_NVMF_QPAIR_ENABLED",
                type_unmap: optional "spdk_bdev_io_type" "SPDK_BDEV_IO_TYPE_UNMAP",
            }
        }
    };
}
pub(crate) use target_layout;

/// The same for the host.
macro_rules! host_layout {
    ($use:ident) => {
        $use! {
            members {
                qpair_id: needed "spdk_nvme_qpair.id",
                qpair_ctrlr: needed "spdk_nvme_qpair.ctrlr",
                qpair_trtype: optional "spdk_nvme_qpair.trtype",
                ctrlr_cntlid: needed "spdk_nvme_ctrlr.cntlid",
                ctrlr_subnqn: needed "spdk_nvme_ctrlr.trid.subnqn",
                ctrlr_traddr: needed "spdk_nvme_ctrlr.trid.traddr",
                ctrlr_hostnqn: needed "spdk_nvme_ctrlr.opts.hostnqn",
                tqpair_sock: needed "nvme_tcp_qpair.sock",
                request_cmd: needed "nvme_request.cmd",
                request_cb_arg: needed "nvme_request.cb_arg",
                tcp_req_req: needed "nvme_tcp_req.req",
                pdu_sqe: needed "nvme_tcp_pdu.hdr.capsule_cmd.ccsqe",
                bdev_io_driver_ctx: optional "spdk_bdev_io.driver_ctx",
            }
            enumerators {
                trtype_tcp: optional "spdk_nvme_transport_type" "SPDK_NVME_TRANSPORT_TCP",
            }
        }
    };
}
pub(crate) use host_layout;

/// From a `spdk_sock`, which both sides' queue pairs point to, to its descriptor.
pub(crate) const SOCKET_DESCRIPTOR: &str = "spdk_posix_sock.fd";
/// What the `spdk_sock` is inside of.
pub(crate) const SOCKET_BASE: &str = "spdk_posix_sock.base";
/// Where a bdev module keeps its part of an I/O.
pub(crate) const BDEV_IO_DRIVER: &str = "spdk_bdev_io.driver_ctx";

/// Of a subsystem: inactive, active, paused. A build may lack them.
pub(crate) const SUBSYSTEM_STATES: [(&str, &str); 3] = [
    ("spdk_nvmf_subsystem_state", "SPDK_NVMF_SUBSYSTEM_INACTIVE"),
    ("spdk_nvmf_subsystem_state", "SPDK_NVMF_SUBSYSTEM_ACTIVE"),
    ("spdk_nvmf_subsystem_state", "SPDK_NVMF_SUBSYSTEM_PAUSED"),
];

macro_rules! member_list {
    (
        members { $($field:ident: $how:ident $($path:literal)+,)* }
        enumerators { $($name:ident: $need:ident $enumeration:literal $enumerator:literal,)* }
    ) => {
        &[$(WantedMember { needed: member_list!($how), paths: &[$($path),+] }),*]
    };
    (needed) => { true };
    (optional) => { false };
}

macro_rules! enumerator_list {
    (
        members { $($field:ident: $how:ident $($path:literal)+,)* }
        enumerators { $($name:ident: $need:ident $enumeration:literal $enumerator:literal,)* }
    ) => {
        &[$(($enumeration, $enumerator)),*]
    };
}

const TARGET_MEMBERS: &[WantedMember] = target_layout!(member_list);
const HOST_MEMBERS: &[WantedMember] = host_layout!(member_list);
const TARGET_ENUMERATORS: &[(&str, &str)] = target_layout!(enumerator_list);
const HOST_ENUMERATORS: &[(&str, &str)] = host_layout!(enumerator_list);

/// The members that a side can not do without.
pub fn needed_members(side: Side) -> impl Iterator<Item = &'static str> {
    let members = match side {
        Side::Target => TARGET_MEMBERS,
        Side::Host => HOST_MEMBERS,
    };
    members.iter().filter(|member| member.needed).flat_map(|member| member.paths).copied()
}

/// Every member in the table, each once or more.
pub fn members() -> impl Iterator<Item = &'static str> {
    TARGET_MEMBERS
        .iter()
        .chain(HOST_MEMBERS)
        .flat_map(|member| member.paths)
        .copied()
        .chain([SOCKET_DESCRIPTOR, SOCKET_BASE])
}

/// Every enumerator in the table, with its enumeration first.
pub fn enumerators() -> impl Iterator<Item = (&'static str, &'static str)> {
    TARGET_ENUMERATORS.iter().chain(HOST_ENUMERATORS).chain(&SUBSYSTEM_STATES).copied()
}

/// Every uprobe that a side's ladders name.
pub(crate) fn named(side: Side) -> impl Iterator<Item = Uprobe> {
    ladders(side).iter().flat_map(|l| l.rungs).flat_map(|rung| rung.parts).flat_map(uprobes_of).copied()
}

/// The function whose code a uprobe goes into.
fn inside(uprobe: &Uprobe) -> &'static str {
    match uprobe.at {
        At::Entry | At::EmulatedEntry | At::CallsBut(_) => uprobe.function,
        At::CallsIn(caller) | At::OnlyCallsIn(caller) => caller,
    }
}

fn uprobes_of(part: &'static Part) -> &'static [Uprobe] {
    match part {
        Part::Uprobe(uprobe) => std::slice::from_ref(uprobe),
        Part::First(uprobes) => uprobes,
        _ => &[],
    }
}

/// The program's functions that a boundary is taken in, best first: of each way the first one. Ways that
/// differ only in the kernel's part are one.
pub fn of_boundary(boundary: Boundary) -> Vec<&'static str> {
    let mut names: Vec<&str> = TARGET
        .iter()
        .chain(HOST)
        .filter(|ladder| ladder.boundary == boundary)
        .flat_map(|ladder| ladder.rungs)
        .filter_map(|rung| rung.parts.iter().flat_map(uprobes_of).map(inside).next())
        .collect();
    names.dedup();
    names
}

/// Every function in the table, each once or more; the target's state machine first.
pub fn functions() -> impl Iterator<Item = &'static str> {
    let uprobes = TARGET.iter().chain(HOST).flat_map(|l| l.rungs).flat_map(|rung| rung.parts);
    let ways = TARGET_EVENTS.iter().chain(HOST_EVENTS).flat_map(|event| event.ways);
    uprobes
        .flat_map(uprobes_of)
        .flat_map(|uprobe| {
            // What is called at a probed call is looked for as well, where it is the program's own.
            let left_out = match uprobe.at {
                At::CallsBut(left_out) => left_out,
                _ => &[],
            };
            std::iter::once(inside(uprobe))
                .chain((inside(uprobe) != uprobe.function).then_some(uprobe.function))
                .chain(left_out.iter().copied())
        })
        .chain(ways.filter_map(|way| match way {
            Way::Usdt(..) => None,
            Way::Function(name, _) => Some(*name),
        }))
}

/// Whether a program holds anything of a side's transport.
pub(crate) fn is_of(side: Side, set: &BinarySet) -> bool {
    let of_side = |name: &&str| match side {
        Side::Target => name.starts_with("nvmf_") || name.starts_with("spdk_nvmf_"),
        Side::Host => name.starts_with("nvme_tcp_"),
    };
    functions().filter(of_side).any(|name| crate::loader::is_there(set, name).is_ok())
}

/// The registers whose values at a function's entry some probe on it reads.
pub(crate) fn read_at_entry(function: &str) -> Vec<Reg> {
    let uprobes = TARGET.iter().chain(HOST).flat_map(|l| l.rungs).flat_map(|rung| rung.parts);
    let of_uprobes = uprobes
        .flat_map(uprobes_of)
        .filter(|uprobe| uprobe.function == function)
        .flat_map(|uprobe| uprobe.live.iter().copied());
    let ways = TARGET_EVENTS.iter().chain(HOST_EVENTS).flat_map(|event| event.ways);
    let of_ways = ways
        .filter_map(|way| match way {
            Way::Function(name, arguments) if *name == function => Some(*arguments),
            _ => None,
        })
        .flatten()
        .filter_map(|argument| match argument {
            Argument::Register(register) | Argument::Member(register, _) => Some(*register),
            Argument::Usdt(_) => None,
        });
    let read: Vec<Reg> = of_uprobes.chain(of_ways).collect();
    Reg::ARGUMENTS.into_iter().filter(|register| read.contains(register)).collect()
}

/// How often a command of each kind hits a uprobe's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hits {
    pub(crate) read: u32,
    /// A write whose data is in its capsule.
    pub(crate) write: u32,
    /// A write whose data is asked for by one R2T.
    pub(crate) r2t_write: u32,
}

/// How often a command hits this uprobe, on the way that commands usually take: nothing waits, one R2T a write.
pub(crate) fn hits(uprobe: &Uprobe) -> Hits {
    match (uprobe.program, uprobe.at) {
        // The state machine is entered when the capsule is there, when a write's data is, when storage has
        // completed, and when the request is freed.
        ("req_process", At::CallsBut(_)) => Hits { read: 2, write: 3, r2t_write: 3 },
        ("req_process", _) => Hits { read: 3, write: 4, r2t_write: 4 },
        ("thread_message", _) => Hits { read: 0, write: 0, r2t_write: 0 },
        ("send_r2t", _) => Hits { read: 0, write: 0, r2t_write: 1 },
        // The target sends an R2T before the response; the host a capsule, then the data.
        ("flush_call" | "write_pdu", _) => Hits { read: 1, write: 1, r2t_write: 2 },
        _ => Hits { read: 1, write: 1, r2t_write: 1 },
    }
}

/// The structures of SPDK's trace ring, of every version: 24.01's one header, what followed it in 24.05, and the
/// sections of 26.05.
pub(crate) const TRACE_STRUCTURES: &[&str] = &[
    "spdk_trace_flags",
    "spdk_trace_file",
    "spdk_trace_history",
    "spdk_trace_entry",
    "spdk_trace_tpoint",
    "spdk_trace_owner",
];

/// The functions by which a file with SPDK is known: those whose names no other program is likely to use,
/// since they say what part of SPDK they are of.
pub(crate) fn telling_functions() -> impl Iterator<Item = &'static str> {
    functions()
        .filter(|name| name.split('_').any(|word| matches!(word, "spdk" | "nvmf" | "nvme" | "bdev" | "sock")))
}

/// Everything in the table, as names to look for in debug information.
pub(crate) fn wanted() -> Wanted {
    let unique = |names: Vec<&str>| {
        let mut names: Vec<String> = names.into_iter().map(str::to_owned).collect();
        names.sort();
        names.dedup();
        names
    };
    Wanted {
        structures: unique(
            members()
                .filter_map(|path| path.split('.').next())
                .chain(TRACE_STRUCTURES.iter().copied())
                .collect(),
        ),
        enumerations: unique(enumerators().map(|(enumeration, _)| enumeration).collect()),
        functions: unique(functions().collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_boundary_of_a_side_has_one_ladder_in_the_order_of_passing() {
        for side in [Side::Host, Side::Target] {
            let named: Vec<_> = ladders(side).iter().map(|ladder| ladder.boundary).collect();
            assert_eq!(named, Boundary::of(side).collect::<Vec<_>>());
            for ladder in ladders(side) {
                let inside = |rung: &Rung| rung.parts.iter().flat_map(uprobes_of).next().is_some();
                assert!(ladder.rungs.iter().all(inside), "{}", ladder.boundary);
            }
        }
    }

    #[test]
    fn the_check_of_the_target_s_set_up_knows_the_table_s_functions() {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/spdk-setup/check");
        let script = std::fs::read_to_string(script).unwrap();
        let list = script.split_once("\nboundaries=(\n").and_then(|(_, rest)| rest.split_once("\n)\n"));
        let list = list.expect("the script has its list of boundaries").0;
        let mut known = Vec::new();
        for line in list.lines() {
            let mut words = line.trim().trim_matches('"').split(' ');
            let name = words.next().unwrap();
            let boundary = Boundary::of(Side::Target).find(|boundary| boundary.name() == name).unwrap();
            assert_eq!(words.collect::<Vec<_>>(), of_boundary(boundary), "{name}");
            known.push(boundary);
        }
        // The others are of writes that wait for their data only.
        let optional = [Boundary::TR2t, Boundary::TData];
        let expected: Vec<_> =
            Boundary::of(Side::Target).filter(|boundary| !optional.contains(boundary)).collect();
        assert_eq!(known, expected);
    }
}
