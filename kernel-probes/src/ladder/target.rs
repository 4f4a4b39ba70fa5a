//! The kernel target's ladders.

use super::{Ladder, Point, Program, Rung, fentry, fexit, kprobe, raw_tp, rung, stand_in, tp};
use run_format::{Boundary, Transport};

const NOT_REJECTED: &str = "commands that the target rejects when it parses them are not seen";
const PARSED: &str = "it comes when the capsule has been read";

const AFTER_DATA: &str = "of reads it is the time when their data has gone to the socket";

const COMPLETE_TP: Program = tp("complete_tp", "nvmet_req_complete");
const COMPLETE_RAW: Program = raw_tp("complete_raw", "nvmet_req_complete");
/// The data's WRITE and the response's SEND are posted as one.
const RESPONSE_RDMA: &[Rung] = entry!("response_rdma" "nvmet_rdma_queue_response");

/// What begins and ends a command in its back end. Zones, files and passthru are not in every kernel.
macro_rules! storage {
    ($attach:ident $hook:literal) => {
        Storage {
            begin: concat!($hook, " nvmet_bdev_execute_rw and its like"),
            filled: concat!($hook, " nvmet_bdev_execute_rw and its like, with the last of the data read"),
            execute: programs!($attach "bdev_rw" "nvmet_bdev_execute_rw"),
            also_execute: programs!($attach
                "bdev_flush" "nvmet_bdev_execute_flush",
                "bdev_dsm" "nvmet_bdev_execute_dsm",
                "bdev_zeroes" "nvmet_bdev_execute_write_zeroes",
                "bdev_append" "nvmet_bdev_execute_zone_append",
                "bdev_zones" "nvmet_bdev_execute_zone_mgmt_recv",
                "bdev_zone" "nvmet_bdev_execute_zone_mgmt_send",
                "file_rw" "nvmet_file_execute_rw",
                "file_flush" "nvmet_file_execute_flush",
                "file_dsm" "nvmet_file_execute_dsm",
                "file_zeroes" "nvmet_file_execute_write_zeroes",
                "passthru" "nvmet_passthru_execute_cmd"
            ),
            also_done: programs!($attach
                "file_done" "nvmet_file_io_done",
                "passthru_done" "nvmet_passthru_req_done"
            ),
        }
    };
}

struct Storage {
    begin: &'static str,
    filled: &'static str,
    execute: &'static [Program],
    also_execute: &'static [Program],
    also_done: &'static [Program],
}

impl Storage {
    const fn begins(&self) -> Rung {
        rung(self.begin, self.execute).with(self.also_execute)
    }

    /// The transport gives a command to its back end when all of its data is there.
    const fn is_filled(&self) -> Rung {
        rung(self.filled, self.execute).with(self.also_execute)
    }
}

const BY_FENTRY: Storage = storage!(fentry "fentry");
const BY_KPROBE: Storage = storage!(kprobe "kprobe");

pub(super) const TARGET: &[Ladder] = &[
    Ladder {
        point: Point::Identity,
        transport: None,
        essential: true,
        what: "a command's identity",
        without: "nothing can be recorded",
        rungs: entry!("init" "nvmet_req_init", stand_in("tp_btf nvmet_req_init", &[tp("init_tp", "nvmet_req_init")], NOT_REJECTED), stand_in("raw_tp nvmet_req_init", &[raw_tp("init_raw", "nvmet_req_init")], NOT_REJECTED)),
    },
    Ladder {
        point: Point::Boundary(Boundary::TRecv),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_recv over TCP",
        without: "the target driver's time to read a capsule",
        rungs: entry!("receive_tcp" "nvmet_tcp_try_recv_pdu", stand_in("nvmet_req_init", &[], PARSED)),
    },
    Ladder {
        point: Point::Boundary(Boundary::TRecv),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "t_recv over RDMA",
        without: "the target driver's time to take a capsule",
        rungs: entry!("receive_rdma" "nvmet_rdma_recv_done", stand_in("nvmet_req_init", &[], PARSED)),
    },
    Ladder {
        point: Point::Boundary(Boundary::TR2t),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_r2t over TCP",
        without: "the wait for the data of large writes counts as the target driver's",
        rungs: &[
            rung("fentry nvmet_try_send_r2t", programs!(fentry "send_r2t" "nvmet_try_send_r2t")),
            rung("fentry kernel_sendpage", programs!(fentry "sendpage" "kernel_sendpage")),
            rung("kprobe nvmet_try_send_r2t", programs!(kprobe "send_r2t" "nvmet_try_send_r2t")),
            rung("kprobe kernel_sendpage", programs!(kprobe "sendpage" "kernel_sendpage")),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TR2t),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "t_r2t over RDMA",
        without: "the READs of a write's data count as the target driver's time",
        rungs: entry!("pull" "nvmet_rdma_execute_command"),
    },
    Ladder {
        point: Point::Boundary(Boundary::TData),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_data over TCP",
        without: "the time from a large write's last data to its execution counts as network",
        rungs: &[BY_FENTRY.is_filled(), BY_KPROBE.is_filled()],
    },
    Ladder {
        point: Point::Boundary(Boundary::TData),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "t_data over RDMA",
        without: "the time from a write's last data to its execution counts as network",
        rungs: entry!("pulled" "nvmet_rdma_read_data_done"),
    },
    Ladder {
        point: Point::Boundary(Boundary::TSubmit),
        transport: None,
        essential: false,
        what: "t_submit",
        without: "the border of driver and storage on the way in",
        rungs: &[BY_FENTRY.begins(), BY_KPROBE.begins()],
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
                &[fentry("bdev_done_fentry", "nvmet_bio_done"), COMPLETE_TP],
            )
            .with(BY_FENTRY.also_done),
            rung(
                "fentry nvmet_bio_done and its like, raw_tp nvmet_req_complete",
                &[fentry("bdev_done_fentry", "nvmet_bio_done"), COMPLETE_RAW],
            )
            .with(BY_FENTRY.also_done),
            rung(
                "kprobe nvmet_bio_done and its like, tp_btf nvmet_req_complete",
                &[kprobe("bdev_done_kprobe", "nvmet_bio_done"), COMPLETE_TP],
            )
            .with(BY_KPROBE.also_done),
            rung(
                "kprobe nvmet_bio_done and its like, raw_tp nvmet_req_complete",
                &[kprobe("bdev_done_kprobe", "nvmet_bio_done"), COMPLETE_RAW],
            )
            .with(BY_KPROBE.also_done),
            rung("tp_btf nvmet_req_complete", &[COMPLETE_TP]),
            rung("raw_tp nvmet_req_complete", &[COMPLETE_RAW]),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TResp),
        transport: Some(Transport::Tcp),
        essential: false,
        what: "t_resp over TCP",
        without: "the wait of responses for the sender",
        rungs: entry!("response_tcp" "nvmet_tcp_queue_response"),
    },
    Ladder {
        point: Point::Boundary(Boundary::TResp),
        transport: Some(Transport::Rdma),
        essential: false,
        what: "t_resp over RDMA",
        without: "nothing can be recorded",
        rungs: RESPONSE_RDMA,
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
                programs!(fentry "send_data" "nvmet_try_send_data_pdu", "send_response" "nvmet_try_send_response"),
            ),
            rung("fentry kernel_sendpage", programs!(fentry "sendpage" "kernel_sendpage")),
            rung(
                "kprobe nvmet_try_send_data_pdu, nvmet_try_send_response",
                programs!(kprobe "send_data" "nvmet_try_send_data_pdu", "send_response" "nvmet_try_send_response"),
            ),
            rung("kprobe kernel_sendpage", programs!(kprobe "sendpage" "kernel_sendpage")),
            stand_in(
                "fentry nvmet_setup_response_pdu",
                programs!(fentry "setup_response" "nvmet_setup_response_pdu"),
                AFTER_DATA,
            ),
            stand_in(
                "kprobe nvmet_setup_response_pdu",
                programs!(kprobe "setup_response" "nvmet_setup_response_pdu"),
                AFTER_DATA,
            ),
        ],
    },
    Ladder {
        point: Point::Boundary(Boundary::TSent),
        transport: Some(Transport::Rdma),
        essential: true,
        what: "t_sent over RDMA",
        without: "nothing can be recorded",
        rungs: RESPONSE_RDMA,
    },
    Ladder {
        point: Point::Drive,
        transport: None,
        essential: false,
        what: "the drive's own time",
        without: "storage is not split into the target's block layer and the drive",
        rungs: &[
            rung(
                "tp_btf block_rq_issue, tp_btf block_rq_complete",
                &[tp("issue_tp", "block_rq_issue"), tp("issued_tp", "block_rq_complete")],
            ),
            rung(
                "kprobe blk_mq_start_request, tp_btf block_rq_complete",
                &[kprobe("issue_kprobe", "blk_mq_start_request"), tp("issued_tp", "block_rq_complete")],
            ),
        ],
    },
    Ladder {
        point: Point::Connect,
        transport: None,
        essential: false,
        what: "connections",
        without: "a queue is taken to have been there when its first command came",
        rungs: entry!("install" "nvmet_install_queue"),
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
        rungs: entry!("fatal" "nvmet_ctrl_fatal_error"),
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
                programs!(fentry "enable" "nvmet_ns_enable", "disable" "nvmet_ns_disable"),
            ),
            rung(
                "kprobe nvmet_ns_enable, nvmet_ns_disable",
                programs!(kprobe "enable" "nvmet_ns_enable", "disable" "nvmet_ns_disable"),
            ),
        ],
    },
];
