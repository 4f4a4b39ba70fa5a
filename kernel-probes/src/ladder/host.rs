//! The host's ladders.

use super::{Ladder, Point, Rung, fentry, fexit, kprobe, raw_tp, rung, stand_in, tp};
use run_format::{Boundary, Transport};

/// What the block layer does with a bio right before it fires block_bio_queue. It is in another file than its
/// only caller, so it is not inlined.
pub(crate) const BIO_START: &str = "blk_cgroup_bio_start";

/// What a kprobe lacks where an interrupt may hit it.
const INTERRUPTED: &str = "a hit that interrupts another kprobe is skipped";

/// Where the driver's own function can not be hooked.
const SET_UP: Rung = stand_in("nvme_setup_cmd", &[], "it comes a little after the driver was called");

pub(super) const HOST: &[Ladder] = &[
    Ladder {
        point: Point::Identity,
        transport: None,
        essential: true,
        what: "a command's identity",
        without: "nothing can be recorded",
        rungs: &[
            rung("tp_btf nvme_setup_cmd", &[tp("setup_tp", "nvme_setup_cmd")]),
            rung("raw_tp nvme_setup_cmd", &[raw_tp("setup_raw", "nvme_setup_cmd")]),
            rung("fexit nvme_setup_cmd", &[fexit("setup_fexit", "nvme_setup_cmd")]),
            rung("kprobe blk_mq_start_request", &[kprobe("setup_kprobe", "blk_mq_start_request")]),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HQueued),
        transport: None,
        essential: false,
        what: "h_queued",
        without: "the wait in the host's block layer",
        rungs: &[
            rung("tp_btf block_bio_queue", &[tp("bio_queue_tp", "block_bio_queue")]),
            rung("kprobe blk_cgroup_bio_start", &[kprobe("bio_queue_kprobe", BIO_START)]),
            stand_in(
                "rq->start_time_ns",
                &[],
                "it is set after the wait for a tag, and may be shared by requests that were plugged together",
            ),
        ],
    },
    Ladder {
        point: Point::Split,
        transport: None,
        essential: false,
        what: "front parts of split bios",
        without: "h_queued of the front parts of large requests is rq->start_time_ns, after the wait for a tag",
        rungs: &[rung("tp_btf block_split", &[tp("bio_split_tp", "block_split")])],
    },
    Ladder {
        point: Point::Boundary(Boundary::HDriver),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "h_driver",
        without: "the border of block layer and driver",
        rungs: entry!("queue_rq" "nvme_tcp_queue_rq", SET_UP),
    },
    Ladder {
        point: Point::Boundary(Boundary::HDriver),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "h_driver",
        without: "the border of block layer and driver",
        rungs: entry!("rdma_queue_rq" "nvme_rdma_queue_rq", SET_UP),
    },
    Ladder {
        point: Point::Boundary(Boundary::HSent),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "h_sent",
        without: "the border of driver and network on the way out",
        rungs: &[
            rung(
                "fentry nvme_tcp_try_send_cmd_pdu",
                &[fentry("send_command_fentry", "nvme_tcp_try_send_cmd_pdu")],
            ),
            rung("fentry kernel_sendpage", programs!(fentry "sendpage" "kernel_sendpage")),
            rung(
                "kprobe nvme_tcp_try_send_cmd_pdu",
                &[kprobe("send_command_kprobe", "nvme_tcp_try_send_cmd_pdu")],
            ),
            rung("kprobe kernel_sendpage", programs!(kprobe "sendpage" "kernel_sendpage")),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HSent),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "h_sent",
        without: "the border of driver and network on the way out",
        rungs: entry!("post_send" "nvme_rdma_post_send"),
    },
    Ladder {
        point: Point::Boundary(Boundary::HR2t),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "h_r2t",
        without: "the wait for R2Ts of large writes",
        rungs: entry!("r2t" "nvme_tcp_setup_h2c_data_pdu"),
    },
    Ladder {
        point: Point::Boundary(Boundary::HDataSent),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "h_data_sent",
        without: "the driver's time from an R2T to its data",
        rungs: &[
            rung(
                "fentry nvme_tcp_try_send_data_pdu",
                &[fentry("send_data_fentry", "nvme_tcp_try_send_data_pdu")],
            ),
            rung("fentry kernel_sendpage", programs!(fentry "sendpage" "kernel_sendpage")),
            rung(
                "kprobe nvme_tcp_try_send_data_pdu",
                &[kprobe("send_data_kprobe", "nvme_tcp_try_send_data_pdu")],
            ),
            rung("kprobe kernel_sendpage", programs!(kprobe "sendpage" "kernel_sendpage")),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HRecv),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "h_recv",
        without: "the border of network and driver on the way back",
        rungs: entry!("receive" "nvme_tcp_recv_skb"),
    },
    Ladder {
        point: Point::Boundary(Boundary::HRecv),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "h_recv",
        without: "the border of network and driver on the way back",
        rungs: &[
            rung("fentry nvme_rdma_recv_done", &[fentry("recv_done_fentry", "nvme_rdma_recv_done")]),
            Rung {
                lack: Some(INTERRUPTED),
                ..rung("kprobe nvme_rdma_recv_done", &[kprobe("recv_done_kprobe", "nvme_rdma_recv_done")])
            },
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HDone),
        transport: None,
        essential: false,
        what: "h_done",
        without: "the border of driver and block layer on the way back",
        rungs: &[
            rung(
                "fentry blk_mq_complete_request_remote",
                &[fentry("done_fentry", "blk_mq_complete_request_remote")],
            )
            .with(&[fentry("cancel_fentry", "blk_mq_complete_request")])
            .again(&[fentry("done_again_fentry", "blk_mq_complete_request_remote")]),
            Rung {
                lack: Some(INTERRUPTED),
                ..rung(
                    "kprobe blk_mq_complete_request_remote",
                    &[kprobe("done_kprobe", "blk_mq_complete_request_remote")],
                )
                .with(&[kprobe("cancel_kprobe", "blk_mq_complete_request")])
            },
            stand_in(
                "tp_btf nvme_complete_rq",
                &[tp("done_tp", "nvme_complete_rq")],
                "it comes later by an interrupt where the command completes on another CPU",
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::HEnd),
        transport: None,
        essential: true,
        what: "h_end",
        without: "nothing can be recorded",
        rungs: &[
            rung("tp_btf block_rq_complete", &[tp("end_tp", "block_rq_complete")])
                .again(&[tp("end_again_tp", "block_rq_complete")]),
            stand_in(
                "tp_btf nvme_complete_rq",
                &[tp("end_nvme_tp", "nvme_complete_rq")],
                "it comes a little before the block layer ends the command",
            ),
        ],
    },
    Ladder {
        point: Point::Requeue,
        transport: None,
        essential: false,
        what: "retries",
        without: "the first attempt of a retried command counts as unfinished",
        rungs: &[rung("tp_btf block_rq_requeue", &[tp("requeue_tp", "block_rq_requeue")])],
    },
    Ladder {
        point: Point::Failover,
        transport: None,
        essential: false,
        what: "multipath failover",
        without: "commands that failed over look like good ones",
        rungs: entry!("failover" "nvme_failover_req"),
    },
    Ladder {
        point: Point::Connect,
        transport: None,
        essential: false,
        what: "connections",
        without: "a reconnect is found by its port, at each command",
        rungs: entry!("connect" "nvmf_connect_io_queue"),
    },
    Ladder {
        point: Point::State,
        transport: None,
        essential: false,
        what: "controller states",
        without: "resets and removals are not told as events",
        rungs: &[rung("fexit nvme_change_ctrl_state", &[fexit("state_fexit", "nvme_change_ctrl_state")])],
    },
    Ladder {
        point: Point::Timeout,
        transport: Some(Transport::Tcp),
        essential: false,
        what: "timeouts",
        without: "commands that took too long are not told as events",
        rungs: entry!("timeout" "nvme_tcp_timeout"),
    },
    Ladder {
        point: Point::Timeout,
        transport: Some(Transport::Rdma),
        essential: false,
        what: "timeouts",
        without: "commands that took too long are not told as events",
        rungs: entry!("rdma_timeout" "nvme_rdma_timeout"),
    },
];
