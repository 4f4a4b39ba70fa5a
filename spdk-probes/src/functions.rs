//! The one table of what is wanted of SPDK: for each boundary, the functions that mark it, best first;
//! and the structure members and enumerators that the BPF programs read.
//!
//! It names things only; whether a build has them, and where, [`crate::resolve`] tells.
//!
//! Sources: SPDK's `lib/nvmf/tcp.c`, `lib/nvmf/ctrlr.c`, `lib/bdev/bdev.c`, `module/sock/posix/posix.c` for the
//! target; `lib/nvme/nvme_tcp.c`, `lib/nvme/nvme_qpair.c`, `module/bdev/nvme/bdev_nvme.c`, `app/spdk_nvme_perf` for
//! the host; releases 24.09 to 26.05.

use run_format::{Boundary, Side};

use crate::dwarf::Wanted;
use crate::place::Reg;

/// What a hook is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A boundary's timestamp.
    Boundary(Boundary),
    /// The request's memory is given back: what is not complete by then never will be.
    Freed,
}

/// Where in the function the probe goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// At its entry, or as near behind it as is cheap.
    Entry,
    /// At its calls of this function.
    CallsOf(&'static str),
}

/// Which of a function's calls mark the boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All.
    Always,
    /// Those with the request (argument 1, `struct spdk_nvmf_tcp_req`) in this state.
    State(&'static str),
    /// Those with a PDU (argument 1, `struct nvme_tcp_pdu`) of this type (NVMe/TCP specification, figure 4).
    Pdu(u8),
}

/// One probe on one function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The function's name in the source.
    pub function: &'static str,
    /// The source file it must come from, where other programs have functions of that name.
    pub source: Option<&'static str>,
    /// Where in it.
    pub at: At,
    /// Registers that must hold arguments there, and what the arguments are: the function's own, or at its
    /// calls the callee's.
    pub arguments: &'static [(Reg, &'static str)],
    /// Which calls count.
    pub when: When,
}

impl Probe {
    /// The registers that must hold the function's arguments.
    pub fn live(&self) -> Vec<Reg> {
        self.arguments.iter().map(|(register, _)| *register).collect()
    }
}

/// Probes that together take one boundary. All are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rung {
    /// The probes.
    pub probes: &'static [Probe],
    /// How far it is from the boundary's definition; empty where it is the definition.
    pub note: &'static str,
}

/// A purpose and the ways to serve it, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hook {
    /// What for.
    pub purpose: Purpose,
    /// The ways.
    pub rungs: &'static [Rung],
}

const fn probe(function: &'static str, arguments: &'static [(Reg, &'static str)]) -> Probe {
    Probe { function, source: None, at: At::Entry, arguments, when: When::Always }
}

const fn in_state(state: &'static str) -> Probe {
    Probe {
        when: When::State(state),
        ..probe("nvmf_tcp_req_process", &[(Reg::Rdi, "transport"), (Reg::Rsi, "tcp_req")])
    }
}

const fn with_pdu(kind: u8, function: &'static str) -> Probe {
    Probe {
        when: When::Pdu(kind),
        ..probe(function, &[(Reg::Rdi, "tqpair"), (Reg::Rsi, "pdu"), (Reg::Rcx, "tcp_req")])
    }
}

const fn rung(probes: &'static [Probe]) -> Rung {
    Rung { probes, note: "" }
}

/// Command capsule (NVMe/TCP specification, section 3.6.2).
pub const PDU_CAPSULE_CMD: u8 = 0x04;
/// Response capsule.
pub const PDU_CAPSULE_RESP: u8 = 0x05;
/// Data from host to controller.
pub const PDU_H2C_DATA: u8 = 0x06;
/// Data from controller to host.
pub const PDU_C2H_DATA: u8 = 0x07;
/// Ready to transfer.
pub const PDU_R2T: u8 = 0x09;

/// The enumeration of a target request's states.
pub const TARGET_STATES: &str = "spdk_nvmf_tcp_req_state";

/// What is wanted of a target.
pub const TARGET: &[Hook] = &[
    Hook {
        purpose: Purpose::Boundary(Boundary::TRecv),
        rungs: &[
            rung(&[in_state("TCP_REQUEST_STATE_NEW")]),
            Rung {
                probes: &[probe("spdk_nvmf_request_exec", &[(Reg::Rdi, "req")])],
                note: "when the command is executed: waiting for buffers and for a write's data is not seen",
            },
        ],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::TR2t),
        rungs: &[
            rung(&[probe("nvmf_tcp_send_r2t_pdu", &[(Reg::Rsi, "tcp_req")])]),
            rung(&[with_pdu(PDU_R2T, "nvmf_tcp_qpair_write_pdu")]),
        ],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::TData),
        rungs: &[rung(&[in_state("TCP_REQUEST_STATE_READY_TO_EXECUTE")])],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::TSubmit),
        rungs: &[
            rung(&[probe("bdev_io_submit", &[(Reg::Rdi, "bdev_io")])]),
            Rung {
                probes: &[probe("spdk_nvmf_request_exec", &[(Reg::Rdi, "req")])],
                note: "when NVMe-oF takes the command, a little before the bdev layer does",
            },
        ],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::TDone),
        rungs: &[
            rung(&[probe("spdk_nvmf_request_complete", &[(Reg::Rdi, "req")])]),
            Rung {
                probes: &[probe("nvmf_bdev_ctrlr_complete_cmd", &[(Reg::Rdi, "bdev_io"), (Reg::Rdx, "req")])],
                note: "dataset management completes elsewhere",
            },
            Rung {
                probes: &[probe("spdk_bdev_io_complete", &[(Reg::Rdi, "bdev_io")])],
                note: "when the bdev module is done, before the bdev layer is",
            },
        ],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::TResp),
        rungs: &[
            rung(&[in_state("TCP_REQUEST_STATE_EXECUTED")]),
            rung(&[probe("nvmf_tcp_req_complete", &[(Reg::Rdi, "req")])]),
        ],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::TSent),
        rungs: &[
            // Releases from 25.09 on send through a function that also serves TLS; before, or where the compiler
            // inlined that, the system call's wrapper is called directly.
            rung(&[Probe {
                at: At::CallsOf("posix_writev"),
                ..probe("_sock_flush", &[(Reg::Rdi, "posix_sock")])
            }]),
            rung(&[Probe { at: At::CallsOf("sendmsg"), ..probe("_sock_flush", &[(Reg::Rdi, "fd")]) }]),
            Rung {
                probes: &[
                    with_pdu(PDU_C2H_DATA, "nvmf_tcp_qpair_write_pdu"),
                    with_pdu(PDU_CAPSULE_RESP, "nvmf_tcp_qpair_write_pdu"),
                ],
                note: "when the response is queued on the socket: the wait for the next flush is not seen",
            },
        ],
    },
    Hook { purpose: Purpose::Freed, rungs: &[rung(&[in_state("TCP_REQUEST_STATE_COMPLETED")])] },
];

/// What is wanted of a host.
pub const HOST: &[Hook] = &[
    Hook {
        purpose: Purpose::Boundary(Boundary::HQueued),
        rungs: &[
            rung(&[probe("bdev_nvme_submit_request", &[(Reg::Rsi, "bdev_io")])]),
            rung(&[probe("nvme_qpair_submit_request", &[(Reg::Rdi, "qpair"), (Reg::Rsi, "req")])]),
        ],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::HDriver),
        rungs: &[rung(&[probe("nvme_tcp_qpair_submit_request", &[(Reg::Rdi, "qpair"), (Reg::Rsi, "req")])])],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::HSent),
        rungs: &[Rung {
            probes: &[with_pdu(PDU_CAPSULE_CMD, "nvme_tcp_qpair_write_pdu")],
            note: "when the capsule is queued on the socket; it leaves with the next flush",
        }],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::HR2t),
        rungs: &[
            rung(&[probe("nvme_tcp_r2t_hdr_handle", &[(Reg::Rdi, "tqpair"), (Reg::Rsi, "pdu")])]),
            Rung {
                probes: &[probe("nvme_tcp_send_h2c_data", &[(Reg::Rdi, "tcp_req")])],
                note: "when the answer to the R2T is begun",
            },
        ],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::HDataSent),
        rungs: &[Rung {
            probes: &[with_pdu(PDU_H2C_DATA, "nvme_tcp_qpair_write_pdu")],
            note: "when the data is queued on the socket; it leaves with the next flush",
        }],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::HRecv),
        rungs: &[
            rung(&[
                probe("nvme_tcp_capsule_resp_hdr_handle", &[(Reg::Rdi, "tqpair"), (Reg::Rsi, "pdu")]),
                probe("nvme_tcp_c2h_data_payload_handle", &[(Reg::Rdi, "tqpair"), (Reg::Rsi, "pdu")]),
            ]),
            Rung {
                probes: &[probe("nvme_tcp_req_complete", &[(Reg::Rdi, "tcp_req"), (Reg::Rsi, "tqpair")])],
                note: "when the request is completed: what the driver does before is not seen",
            },
        ],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::HDone),
        rungs: &[rung(&[probe(
            "nvme_tcp_req_complete",
            &[(Reg::Rdi, "tcp_req"), (Reg::Rsi, "tqpair"), (Reg::Rdx, "cpl")],
        )])],
    },
    Hook {
        purpose: Purpose::Boundary(Boundary::HEnd),
        rungs: &[
            rung(&[
                probe("bdev_nvme_readv_done", &[(Reg::Rdi, "bio")]),
                probe("bdev_nvme_writev_done", &[(Reg::Rdi, "bio")]),
                probe("bdev_nvme_comparev_done", &[(Reg::Rdi, "bio")]),
                probe("bdev_nvme_queued_done", &[(Reg::Rdi, "bio")]),
            ]),
            Rung {
                probes: &[
                    probe("bdev_nvme_readv_done", &[(Reg::Rdi, "bio")]),
                    probe("bdev_nvme_writev_done", &[(Reg::Rdi, "bio")]),
                ],
                note: "of reads and writes only",
            },
            rung(&[Probe { source: Some("perf.c"), ..probe("io_complete", &[(Reg::Rdi, "cb_arg")]) }]),
        ],
    },
];

/// Members that the target's programs read.
pub const TARGET_MEMBERS: &[&str] = &[
    "spdk_nvmf_tcp_req.req",
    "spdk_nvmf_tcp_req.cmd",
    "spdk_nvmf_tcp_req.rsp",
    "spdk_nvmf_tcp_req.state",
    "spdk_nvmf_tcp_req.has_in_capsule_data",
    "spdk_nvmf_tcp_req.h2c_offset",
    "spdk_nvmf_request.qpair",
    "spdk_nvmf_request.length",
    "spdk_nvmf_request.xfer",
    "spdk_nvmf_request.cmd",
    "spdk_nvmf_request.rsp",
    "spdk_nvmf_qpair.qid",
    "spdk_nvmf_qpair.ctrlr",
    "spdk_nvmf_qpair.group",
    "spdk_nvmf_tcp_qpair.qpair",
    "spdk_nvmf_tcp_qpair.sock",
    "spdk_nvmf_tcp_qpair.pdu_in_progress",
    "spdk_nvmf_tcp_qpair.initiator_addr",
    "spdk_nvmf_tcp_qpair.initiator_port",
    "spdk_nvmf_tcp_qpair.target_addr",
    "spdk_nvmf_tcp_qpair.target_port",
    "spdk_nvmf_ctrlr.cntlid",
    "spdk_nvmf_ctrlr.hostnqn",
    "spdk_nvmf_ctrlr.subsys",
    "spdk_nvmf_subsystem.subnqn",
    "spdk_bdev_io.bdev",
    "spdk_bdev_io.type",
    "spdk_bdev_io.internal.caller_ctx",
    "nvme_tcp_pdu.hdr",
    "nvme_tcp_pdu.req",
    "spdk_posix_sock.base",
    "spdk_posix_sock.fd",
];

/// Members that the host's programs read.
pub const HOST_MEMBERS: &[&str] = &[
    "nvme_request.cmd",
    "nvme_request.cb_arg",
    "nvme_request.qpair",
    "nvme_request.parent",
    "spdk_nvme_qpair.ctrlr",
    "spdk_nvme_qpair.id",
    "spdk_nvme_ctrlr.cntlid",
    "spdk_nvme_ctrlr.trid.traddr",
    "spdk_nvme_ctrlr.trid.trsvcid",
    "spdk_nvme_ctrlr.trid.subnqn",
    "spdk_nvme_ctrlr.opts.hostnqn",
    "nvme_tcp_qpair.qpair",
    "nvme_tcp_qpair.sock",
    "nvme_tcp_req.req",
    "nvme_tcp_req.cid",
    "nvme_tcp_req.ttag",
    "nvme_tcp_req.pdu",
    "nvme_tcp_req.tqpair",
    "nvme_tcp_pdu.hdr",
    "nvme_tcp_pdu.req",
];

/// Members that some builds lack; what reads them does without.
pub const OPTIONAL_MEMBERS: &[&str] = &[
    "spdk_bdev_io.driver_ctx",
    "spdk_bdev.name",
    "spdk_bdev.blocklen",
    "spdk_bdev_io.u.bdev.offset_blocks",
    "spdk_bdev_io.u.bdev.num_blocks",
    "spdk_nvmf_ctrlr.listener",
    "spdk_nvmf_subsystem_listener.trid",
    "spdk_nvme_transport_id.traddr",
    "spdk_nvme_transport_id.trsvcid",
    "spdk_nvmf_poll_group.thread",
    "spdk_thread.id",
    "spdk_thread.name",
    "nvme_bdev_io.cpl",
    "nvme_tcp_req.datao",
    "spdk_nvmf_tcp_req.pdu",
    "spdk_nvmf_qpair.state",
    "spdk_nvmf_ctrlr.vcprop.cc",
    "spdk_nvmf_ctrlr.cc",
    "nvme_tcp_pdu.hdr.capsule_cmd.ccsqe",
    "nvmf_bdev_ctrlr_unmap.req",
    "spdk_nvme_qpair.trtype",
];

/// Enumerators that the programs compare with.
pub const ENUMERATORS: &[(&str, &str)] = &[
    (TARGET_STATES, "TCP_REQUEST_STATE_NEW"),
    (TARGET_STATES, "TCP_REQUEST_STATE_READY_TO_EXECUTE"),
    (TARGET_STATES, "TCP_REQUEST_STATE_EXECUTED"),
    (TARGET_STATES, "TCP_REQUEST_STATE_COMPLETED"),
    ("spdk_nvmf_qpair_state", "SPDK_NVMF_QPAIR_ENABLED"),
    ("spdk_bdev_io_type", "SPDK_BDEV_IO_TYPE_UNMAP"),
    ("spdk_nvme_transport_type", "SPDK_NVME_TRANSPORT_TCP"),
    ("spdk_nvmf_subsystem_state", "SPDK_NVMF_SUBSYSTEM_INACTIVE"),
    ("spdk_nvmf_subsystem_state", "SPDK_NVMF_SUBSYSTEM_ACTIVE"),
    ("spdk_nvmf_subsystem_state", "SPDK_NVMF_SUBSYSTEM_PAUSED"),
];

/// Structures whose size is wanted.
pub const SIZES: &[&str] = &[
    "spdk_nvmf_tcp_req",
    "spdk_nvmf_request",
    "spdk_nvmf_tcp_qpair",
    "nvme_tcp_req",
    "nvme_tcp_qpair",
    "spdk_nvme_cmd",
    "spdk_nvme_cpl",
];

/// The hooks of a side.
pub fn hooks(side: Side) -> &'static [Hook] {
    match side {
        Side::Target => TARGET,
        Side::Host => HOST,
    }
}

/// The members that a side cannot do without.
pub fn members(side: Side) -> &'static [&'static str] {
    match side {
        Side::Target => TARGET_MEMBERS,
        Side::Host => HOST_MEMBERS,
    }
}

fn all_probes() -> impl Iterator<Item = &'static Probe> {
    TARGET.iter().chain(HOST).flat_map(|hook| hook.rungs).flat_map(|rung| rung.probes)
}

/// Every function in the table, each once or more; the target's state machine first.
pub(crate) fn all_functions() -> impl Iterator<Item = &'static str> {
    all_probes().map(|probe| probe.function).chain(crate::plan::functions())
}

/// The functions whose calls are probed.
pub(crate) fn all_callees() -> impl Iterator<Item = &'static str> {
    all_probes().filter_map(|probe| match probe.at {
        At::CallsOf(callee) => Some(callee),
        At::Entry => None,
    })
}

/// The functions by which a file with SPDK is known: those whose names no other program is likely to use.
pub(crate) fn telling_functions() -> impl Iterator<Item = &'static str> {
    all_probes().filter(|probe| probe.source.is_none()).map(|probe| probe.function)
}

/// All member paths in the table.
pub(crate) fn all_members() -> impl Iterator<Item = &'static str> {
    TARGET_MEMBERS.iter().chain(HOST_MEMBERS).chain(OPTIONAL_MEMBERS).copied()
}

/// Everything in the table, as names to look for in debug information.
pub(crate) fn wanted() -> Wanted {
    let unique = |mut names: Vec<String>| {
        names.sort();
        names.dedup();
        names
    };
    Wanted {
        structures: unique(
            all_members()
                .filter_map(|path| path.split('.').next())
                .chain(SIZES.iter().copied())
                .map(str::to_owned)
                .collect(),
        ),
        enumerations: unique(ENUMERATORS.iter().map(|(name, _)| (*name).to_owned()).collect()),
        functions: unique(all_functions().map(str::to_owned).collect()),
    }
}
