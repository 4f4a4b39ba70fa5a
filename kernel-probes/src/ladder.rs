//! The table of hooks: for each thing that has to be seen, the ways to see it, best first. It knows names and
//! no kernel.

use run_format::Boundary;
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
    /// Its name in `bpf/host.bpf.c`.
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
}

/// All ways to see one thing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ladder {
    pub(crate) point: Point,
    /// What it is, for a person.
    pub(crate) what: &'static str,
    /// What is lost when no rung fits.
    pub(crate) without: &'static str,
    pub(crate) rungs: &'static [Rung],
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

const fn rung(hook: &'static str, programs: &'static [Program]) -> Rung {
    Rung { hook, programs, measured: true, lack: None }
}

const fn stand_in(hook: &'static str, programs: &'static [Program], lack: &'static str) -> Rung {
    Rung { hook, programs, measured: false, lack: Some(lack) }
}

/// The host over NVMe/TCP.
pub(crate) const HOST: &[Ladder] = &[
    Ladder {
        point: Point::Identity,
        what: "a command's identity",
        without: "nothing can be recorded",
        rungs: &[
            rung("tp_btf nvme_setup_cmd", &[tp("setup_tp", "nvme_setup_cmd")]),
            rung(
                "raw_tp nvme_setup_cmd",
                &[Program { name: "setup_raw", attach: Attach::RawTracepoint("nvme_setup_cmd") }],
            ),
            rung(
                "fexit nvme_setup_cmd",
                &[Program { name: "setup_fexit", attach: Attach::Fexit("nvme_setup_cmd") }],
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HQueued),
        what: "h_queued",
        without: "the wait in the host's block layer",
        rungs: &[
            rung("tp_btf block_bio_queue", &[tp("bio_queue_tp", "block_bio_queue")]),
            stand_in(
                "rq->start_time_ns",
                &[],
                "it is set after the wait for a tag, and may be shared by requests that were plugged together",
            ),
        ],
    },
    Ladder {
        point: Point::Split,
        what: "front parts of split bios",
        without: "h_queued of the front parts of large requests is rq->start_time_ns, after the wait for a tag",
        rungs: &[rung("tp_btf block_split", &[tp("bio_split_tp", "block_split")])],
    },
    Ladder {
        point: Point::Boundary(Boundary::HDriver),
        what: "h_driver",
        without: "the border of block layer and driver",
        rungs: &[
            rung("fentry nvme_tcp_queue_rq", &[fentry("queue_rq_fentry", "nvme_tcp_queue_rq")]),
            rung("kprobe nvme_tcp_queue_rq", &[kprobe("queue_rq_kprobe", "nvme_tcp_queue_rq")]),
            stand_in("nvme_setup_cmd", &[], "it comes a little after the driver was called"),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HSent),
        what: "h_sent",
        without: "the border of driver and network on the way out",
        rungs: &[
            rung(
                "fentry nvme_tcp_try_send_cmd_pdu",
                &[fentry("send_command_fentry", "nvme_tcp_try_send_cmd_pdu")],
            ),
            rung(
                "fentry kernel_sendpage in nvme_tcp_try_send",
                &[
                    fentry("sendpage_fentry", "kernel_sendpage"),
                    fentry("try_send_fentry", "nvme_tcp_try_send"),
                ],
            ),
            rung(
                "kprobe nvme_tcp_try_send_cmd_pdu",
                &[kprobe("send_command_kprobe", "nvme_tcp_try_send_cmd_pdu")],
            ),
            rung(
                "kprobe kernel_sendpage in nvme_tcp_try_send",
                &[
                    kprobe("sendpage_kprobe", "kernel_sendpage"),
                    kprobe("try_send_kprobe", "nvme_tcp_try_send"),
                ],
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HR2t),
        what: "h_r2t",
        without: "the wait for R2Ts of large writes",
        rungs: &[
            rung(
                "fentry nvme_tcp_setup_h2c_data_pdu",
                &[fentry("r2t_fentry", "nvme_tcp_setup_h2c_data_pdu")],
            ),
            rung(
                "kprobe nvme_tcp_setup_h2c_data_pdu",
                &[kprobe("r2t_kprobe", "nvme_tcp_setup_h2c_data_pdu")],
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HDataSent),
        what: "h_data_sent",
        without: "the driver's time from an R2T to its data",
        rungs: &[
            rung(
                "fentry nvme_tcp_try_send_data_pdu",
                &[fentry("send_data_fentry", "nvme_tcp_try_send_data_pdu")],
            ),
            rung(
                "fentry kernel_sendpage in nvme_tcp_try_send",
                &[
                    fentry("sendpage_fentry", "kernel_sendpage"),
                    fentry("try_send_fentry", "nvme_tcp_try_send"),
                ],
            ),
            rung(
                "kprobe nvme_tcp_try_send_data_pdu",
                &[kprobe("send_data_kprobe", "nvme_tcp_try_send_data_pdu")],
            ),
            rung(
                "kprobe kernel_sendpage in nvme_tcp_try_send",
                &[
                    kprobe("sendpage_kprobe", "kernel_sendpage"),
                    kprobe("try_send_kprobe", "nvme_tcp_try_send"),
                ],
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HRecv),
        what: "h_recv",
        without: "the border of network and driver on the way back",
        rungs: &[
            rung("fentry nvme_tcp_recv_skb", &[fentry("receive_fentry", "nvme_tcp_recv_skb")]),
            rung("kprobe nvme_tcp_recv_skb", &[kprobe("receive_kprobe", "nvme_tcp_recv_skb")]),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HDone),
        what: "h_done",
        without: "the border of driver and block layer on the way back",
        rungs: &[
            rung(
                "fentry blk_mq_complete_request_remote",
                &[fentry("done_fentry", "blk_mq_complete_request_remote")],
            ),
            rung(
                "kprobe blk_mq_complete_request_remote",
                &[kprobe("done_kprobe", "blk_mq_complete_request_remote")],
            ),
            stand_in(
                "tp_btf nvme_complete_rq",
                &[tp("done_tp", "nvme_complete_rq")],
                "it comes later by an interrupt where the command completes on another CPU",
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HEnd),
        what: "h_end",
        without: "nothing can be recorded",
        rungs: &[
            rung("tp_btf block_rq_complete", &[tp("end_tp", "block_rq_complete")]),
            stand_in(
                "tp_btf nvme_complete_rq",
                &[tp("end_nvme_tp", "nvme_complete_rq")],
                "it comes a little before the block layer ends the command",
            ),
        ],
    },
    Ladder {
        point: Point::Requeue,
        what: "retries",
        without: "the first attempt of a retried command counts as unfinished",
        rungs: &[rung("tp_btf block_rq_requeue", &[tp("requeue_tp", "block_rq_requeue")])],
    },
    Ladder {
        point: Point::Failover,
        what: "multipath failover",
        without: "commands that failed over look like good ones",
        rungs: &[
            rung("fentry nvme_failover_req", &[fentry("failover_fentry", "nvme_failover_req")]),
            rung("kprobe nvme_failover_req", &[kprobe("failover_kprobe", "nvme_failover_req")]),
        ],
    },
    Ladder {
        point: Point::Connect,
        what: "connections",
        without: "a reconnect is found by its port, at each command",
        rungs: &[
            rung("fentry nvmf_connect_io_queue", &[fentry("connect_fentry", "nvmf_connect_io_queue")]),
            rung("kprobe nvmf_connect_io_queue", &[kprobe("connect_kprobe", "nvmf_connect_io_queue")]),
        ],
    },
    Ladder {
        point: Point::State,
        what: "controller states",
        without: "resets and removals are not told as events",
        rungs: &[rung(
            "fexit nvme_change_ctrl_state",
            &[Program { name: "state_fexit", attach: Attach::Fexit("nvme_change_ctrl_state") }],
        )],
    },
    Ladder {
        point: Point::Timeout,
        what: "timeouts",
        without: "commands that took too long are not told as events",
        rungs: &[
            rung("fentry nvme_tcp_timeout", &[fentry("timeout_fentry", "nvme_tcp_timeout")]),
            rung("kprobe nvme_tcp_timeout", &[kprobe("timeout_kprobe", "nvme_tcp_timeout")]),
        ],
    },
];

/// Every tracepoint and function that the ladders name.
pub(crate) fn names() -> BTreeSet<&'static str> {
    HOST.iter()
        .flat_map(|ladder| ladder.rungs)
        .flat_map(|rung| rung.programs)
        .map(|program| program.attach.name())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use run_format::Side;

    #[test]
    fn each_boundary_of_the_host_has_one_ladder() {
        let points: Vec<Point> = HOST.iter().map(|ladder| ladder.point).collect();
        for boundary in Boundary::of(Side::Host) {
            assert_eq!(points.iter().filter(|p| **p == Point::Boundary(boundary)).count(), 1, "{boundary}");
        }
    }

    #[test]
    fn each_program_of_the_source_stands_on_a_ladder_and_is_attached_as_it_says() {
        let source = include_str!("../bpf/host.bpf.c");
        let mut written: BTreeSet<(String, String)> = BTreeSet::new();
        let mut section = None;
        for line in source.lines() {
            if let Some(name) = line.strip_prefix("SEC(\"").and_then(|rest| rest.strip_suffix("\")")) {
                section = Some(name.to_owned());
            } else if let Some(section) = section.take() {
                let name = line.split_once('(').and_then(|(_, rest)| rest.split_once(',')).unwrap().0;
                written.insert((name.to_owned(), section));
            }
        }
        let told: BTreeSet<(String, String)> = HOST
            .iter()
            .flat_map(|ladder| ladder.rungs)
            .flat_map(|rung| rung.programs)
            .map(|program| {
                let kind = match program.attach {
                    Attach::Tracepoint(_) => "tp_btf",
                    Attach::RawTracepoint(_) => "raw_tp",
                    Attach::Fentry(_) => "fentry",
                    Attach::Fexit(_) => "fexit",
                    Attach::Kprobe(_) => "kprobe",
                };
                (program.name.to_owned(), format!("{kind}/{}", program.attach.name()))
            })
            .collect();
        assert_eq!(written, told);
    }
}
