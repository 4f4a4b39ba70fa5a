//! The kernel target's ladders.

use super::{Ladder, Point, Program, fentry, fexit, kprobe, raw_tp, rung, stand_in, tp};
use run_format::{Boundary, Transport};

const NOT_REJECTED: &str = "commands that the target rejects when it parses them are not seen";
const PARSED: &str = "it comes when the capsule has been read";

// Zones, files and passthru are not in every kernel.
const SENDPAGE_FENTRY: &[Program] =
    &[fentry("sendpage_fentry", "kernel_sendpage"), fentry("io_work_fentry", "nvmet_tcp_io_work")];
const EXECUTE_FENTRY: &[Program] = &[fentry("bdev_rw_fentry", "nvmet_bdev_execute_rw")];
const ALSO_EXECUTE_FENTRY: &[Program] = &[
    fentry("bdev_flush_fentry", "nvmet_bdev_execute_flush"),
    fentry("bdev_dsm_fentry", "nvmet_bdev_execute_dsm"),
    fentry("bdev_zeroes_fentry", "nvmet_bdev_execute_write_zeroes"),
    fentry("bdev_append_fentry", "nvmet_bdev_execute_zone_append"),
    fentry("bdev_zones_fentry", "nvmet_bdev_execute_zone_mgmt_recv"),
    fentry("bdev_zone_fentry", "nvmet_bdev_execute_zone_mgmt_send"),
    fentry("file_rw_fentry", "nvmet_file_execute_rw"),
    fentry("file_flush_fentry", "nvmet_file_execute_flush"),
    fentry("file_dsm_fentry", "nvmet_file_execute_dsm"),
    fentry("file_zeroes_fentry", "nvmet_file_execute_write_zeroes"),
    fentry("passthru_fentry", "nvmet_passthru_execute_cmd"),
];
const ALSO_DONE_FENTRY: &[Program] = &[
    fentry("file_done_fentry", "nvmet_file_io_done"),
    fentry("passthru_done_fentry", "nvmet_passthru_req_done"),
];
const SENDPAGE_KPROBE: &[Program] =
    &[kprobe("sendpage_kprobe", "kernel_sendpage"), kprobe("io_work_kprobe", "nvmet_tcp_io_work")];
const EXECUTE_KPROBE: &[Program] = &[kprobe("bdev_rw_kprobe", "nvmet_bdev_execute_rw")];
const ALSO_EXECUTE_KPROBE: &[Program] = &[
    kprobe("bdev_flush_kprobe", "nvmet_bdev_execute_flush"),
    kprobe("bdev_dsm_kprobe", "nvmet_bdev_execute_dsm"),
    kprobe("bdev_zeroes_kprobe", "nvmet_bdev_execute_write_zeroes"),
    kprobe("bdev_append_kprobe", "nvmet_bdev_execute_zone_append"),
    kprobe("bdev_zones_kprobe", "nvmet_bdev_execute_zone_mgmt_recv"),
    kprobe("bdev_zone_kprobe", "nvmet_bdev_execute_zone_mgmt_send"),
    kprobe("file_rw_kprobe", "nvmet_file_execute_rw"),
    kprobe("file_flush_kprobe", "nvmet_file_execute_flush"),
    kprobe("file_dsm_kprobe", "nvmet_file_execute_dsm"),
    kprobe("file_zeroes_kprobe", "nvmet_file_execute_write_zeroes"),
    kprobe("passthru_kprobe", "nvmet_passthru_execute_cmd"),
];
const ALSO_DONE_KPROBE: &[Program] = &[
    kprobe("file_done_kprobe", "nvmet_file_io_done"),
    kprobe("passthru_done_kprobe", "nvmet_passthru_req_done"),
];

pub(super) const TARGET: &[Ladder] = &[
    Ladder {
        point: Point::Identity,
        transport: None,
        essential: true,
        what: "a command's identity",
        without: "nothing can be recorded",
        rungs: &[
            rung("fentry nvmet_req_init", &[fentry("init_fentry", "nvmet_req_init")]),
            rung("kprobe nvmet_req_init", &[kprobe("init_kprobe", "nvmet_req_init")]),
            stand_in("tp_btf nvmet_req_init", &[tp("init_tp", "nvmet_req_init")], NOT_REJECTED),
            stand_in("raw_tp nvmet_req_init", &[raw_tp("init_raw", "nvmet_req_init")], NOT_REJECTED),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TRecv),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_recv over TCP",
        without: "the target driver's time to read a capsule",
        rungs: &[
            rung("fentry nvmet_tcp_try_recv_pdu", &[fentry("receive_tcp_fentry", "nvmet_tcp_try_recv_pdu")]),
            rung("kprobe nvmet_tcp_try_recv_pdu", &[kprobe("receive_tcp_kprobe", "nvmet_tcp_try_recv_pdu")]),
            stand_in("nvmet_req_init", &[], PARSED),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TRecv),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "t_recv over RDMA",
        without: "the target driver's time to take a capsule",
        rungs: &[
            rung("fentry nvmet_rdma_recv_done", &[fentry("receive_rdma_fentry", "nvmet_rdma_recv_done")]),
            rung("kprobe nvmet_rdma_recv_done", &[kprobe("receive_rdma_kprobe", "nvmet_rdma_recv_done")]),
            stand_in("nvmet_req_init", &[], PARSED),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TR2t),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_r2t over TCP",
        without: "the wait for the data of large writes counts as the target driver's",
        rungs: &[
            rung("fentry nvmet_try_send_r2t", &[fentry("send_r2t_fentry", "nvmet_try_send_r2t")]),
            rung("fentry kernel_sendpage in nvmet_tcp_io_work", SENDPAGE_FENTRY),
            rung("kprobe nvmet_try_send_r2t", &[kprobe("send_r2t_kprobe", "nvmet_try_send_r2t")]),
            rung("kprobe kernel_sendpage in nvmet_tcp_io_work", SENDPAGE_KPROBE),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TR2t),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "t_r2t over RDMA",
        without: "the READs of a write's data count as the target driver's time",
        rungs: &[
            rung("fentry nvmet_rdma_execute_command", &[fentry("pull_fentry", "nvmet_rdma_execute_command")]),
            rung("kprobe nvmet_rdma_execute_command", &[kprobe("pull_kprobe", "nvmet_rdma_execute_command")]),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TData),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_data over TCP",
        without: "the time from a large write's last data to its execution counts as network",
        rungs: &[
            rung("fentry nvmet_bdev_execute_rw and its like, with the last of the data read", EXECUTE_FENTRY)
                .with(ALSO_EXECUTE_FENTRY),
            rung("kprobe nvmet_bdev_execute_rw and its like, with the last of the data read", EXECUTE_KPROBE)
                .with(ALSO_EXECUTE_KPROBE),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TData),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "t_data over RDMA",
        without: "the time from a write's last data to its execution counts as network",
        rungs: &[
            rung("fentry nvmet_rdma_read_data_done", &[fentry("pulled_fentry", "nvmet_rdma_read_data_done")]),
            rung("kprobe nvmet_rdma_read_data_done", &[kprobe("pulled_kprobe", "nvmet_rdma_read_data_done")]),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TSubmit),
        transport: None,
        essential: false,
        what: "t_submit",
        without: "the border of driver and storage on the way in",
        rungs: &[
            rung("fentry nvmet_bdev_execute_rw and its like", EXECUTE_FENTRY).with(ALSO_EXECUTE_FENTRY),
            rung("kprobe nvmet_bdev_execute_rw and its like", EXECUTE_KPROBE).with(ALSO_EXECUTE_KPROBE),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TDone),
        transport: None,
        essential: false,
        what: "t_done",
        without: "the border of driver and storage on the way back",
        rungs: &[
            rung(
                "fentry nvmet_bio_done and its like, tp_btf nvmet_req_complete",
                &[fentry("bdev_done_fentry", "nvmet_bio_done"), tp("complete_tp", "nvmet_req_complete")],
            )
            .with(ALSO_DONE_FENTRY),
            rung(
                "fentry nvmet_bio_done and its like, raw_tp nvmet_req_complete",
                &[fentry("bdev_done_fentry", "nvmet_bio_done"), raw_tp("complete_raw", "nvmet_req_complete")],
            )
            .with(ALSO_DONE_FENTRY),
            rung(
                "kprobe nvmet_bio_done and its like, tp_btf nvmet_req_complete",
                &[kprobe("bdev_done_kprobe", "nvmet_bio_done"), tp("complete_tp", "nvmet_req_complete")],
            )
            .with(ALSO_DONE_KPROBE),
            rung(
                "kprobe nvmet_bio_done and its like, raw_tp nvmet_req_complete",
                &[kprobe("bdev_done_kprobe", "nvmet_bio_done"), raw_tp("complete_raw", "nvmet_req_complete")],
            )
            .with(ALSO_DONE_KPROBE),
            rung("tp_btf nvmet_req_complete", &[tp("complete_tp", "nvmet_req_complete")]),
            rung("raw_tp nvmet_req_complete", &[raw_tp("complete_raw", "nvmet_req_complete")]),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TResp),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_resp over TCP",
        without: "the wait of responses for the sender",
        rungs: &[
            rung(
                "fentry nvmet_tcp_queue_response",
                &[fentry("response_tcp_fentry", "nvmet_tcp_queue_response")],
            ),
            rung(
                "kprobe nvmet_tcp_queue_response",
                &[kprobe("response_tcp_kprobe", "nvmet_tcp_queue_response")],
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TResp),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "t_resp over RDMA",
        without: "nothing can be recorded",
        rungs: &[
            rung(
                "fentry nvmet_rdma_queue_response",
                &[fentry("response_rdma_fentry", "nvmet_rdma_queue_response")],
            ),
            rung(
                "kprobe nvmet_rdma_queue_response",
                &[kprobe("response_rdma_kprobe", "nvmet_rdma_queue_response")],
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TSent),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_sent over TCP",
        without: "the border of driver and network on the way back",
        rungs: &[
            rung(
                "fentry nvmet_try_send_data_pdu, nvmet_try_send_response",
                &[
                    fentry("send_data_fentry", "nvmet_try_send_data_pdu"),
                    fentry("send_response_fentry", "nvmet_try_send_response"),
                ],
            ),
            rung("fentry kernel_sendpage in nvmet_tcp_io_work", SENDPAGE_FENTRY),
            rung(
                "kprobe nvmet_try_send_data_pdu, nvmet_try_send_response",
                &[
                    kprobe("send_data_kprobe", "nvmet_try_send_data_pdu"),
                    kprobe("send_response_kprobe", "nvmet_try_send_response"),
                ],
            ),
            rung("kprobe kernel_sendpage in nvmet_tcp_io_work", SENDPAGE_KPROBE),
            stand_in(
                "fentry nvmet_setup_response_pdu",
                &[fentry("setup_response_fentry", "nvmet_setup_response_pdu")],
                "of reads it is the time when their data has gone to the socket",
            ),
            stand_in(
                "kprobe nvmet_setup_response_pdu",
                &[kprobe("setup_response_kprobe", "nvmet_setup_response_pdu")],
                "of reads it is the time when their data has gone to the socket",
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TSent),
        transport: Some(Transport::Rdma),
        essential: true,
        what: "t_sent over RDMA",
        without: "nothing can be recorded",
        rungs: &[
            rung(
                "fentry nvmet_rdma_queue_response",
                &[fentry("response_rdma_fentry", "nvmet_rdma_queue_response")],
            ),
            rung(
                "kprobe nvmet_rdma_queue_response",
                &[kprobe("response_rdma_kprobe", "nvmet_rdma_queue_response")],
            ),
        ],
    },
    Ladder {
        point: Point::Drive,
        transport: None,
        essential: false,
        what: "the drive's own time",
        without: "storage is not split into the target's block layer and the drive",
        rungs: &[rung(
            "tp_btf block_rq_issue, tp_btf block_rq_complete",
            &[tp("issue_tp", "block_rq_issue"), tp("issued_tp", "block_rq_complete")],
        )],
    },
    Ladder {
        point: Point::Connect,
        transport: None,
        essential: false,
        what: "connections",
        without: "a queue is taken to have been there when its first command came",
        rungs: &[
            rung("fentry nvmet_install_queue", &[fentry("install_fentry", "nvmet_install_queue")]),
            rung("kprobe nvmet_install_queue", &[kprobe("install_kprobe", "nvmet_install_queue")]),
        ],
    },
    Ladder {
        point: Point::Disconnect,
        transport: None,
        essential: false,
        what: "disconnects",
        without: "commands that a disconnect ended stay in flight, and queues last until recording ends",
        rungs: &[
            rung("fexit nvmet_sq_destroy", &[fexit("destroy_fexit", "nvmet_sq_destroy")]),
            rung("kprobe nvmet_sq_destroy", &[kprobe("destroy_kprobe", "nvmet_sq_destroy")]),
        ],
    },
    Ladder {
        point: Point::Fatal,
        transport: None,
        essential: false,
        what: "fatal errors of controllers",
        without: "they are not told as events",
        rungs: &[
            rung("fentry nvmet_ctrl_fatal_error", &[fentry("fatal_fentry", "nvmet_ctrl_fatal_error")]),
            rung("kprobe nvmet_ctrl_fatal_error", &[kprobe("fatal_kprobe", "nvmet_ctrl_fatal_error")]),
        ],
    },
    Ladder {
        point: Point::Namespaces,
        transport: None,
        essential: false,
        what: "namespaces that come and go",
        without: "they are not told as events",
        rungs: &[
            rung(
                "fentry nvmet_ns_enable, nvmet_ns_disable",
                &[fentry("enable_fentry", "nvmet_ns_enable"), fentry("disable_fentry", "nvmet_ns_disable")],
            ),
            rung(
                "kprobe nvmet_ns_enable, nvmet_ns_disable",
                &[kprobe("enable_kprobe", "nvmet_ns_enable"), kprobe("disable_kprobe", "nvmet_ns_disable")],
            ),
        ],
    },
];
