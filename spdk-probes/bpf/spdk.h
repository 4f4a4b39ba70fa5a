/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the SPDK programs and their loader share: the messages of a ring buffer besides fab_command, and the
 * constants that the loader puts into the programs before they are loaded. The Rust side's types of both
 * are generated from this file.
 *
 * Nothing here is an offset or a number of SPDK's: all of those are found in the recorded binary's debug
 * information and handed over in struct spdk_layout_*.
 */
#ifndef FABSCOPE_SPDK_H
#define FABSCOPE_SPDK_H

#include "fabscope.h"

/* NVMe base specification: an NQN is at most 223 bytes, with its terminating zero 224. */
#define SPDK_NQN 224
#define SPDK_ADDRESS 64
#define SPDK_NAME 64

/* Commands that may wait for one flush of a socket. SPDK flushes at the latest when 64 buffers are queued. */
#define SPDK_WAITING 128

/* Slots for commands under way, a power of two, and how many may be under way whose slot another one has. */
#define SPDK_SLOTS 16384
#define SPDK_OVERFLOW 65536

/* "The structure has no such member in this build." */
#define SPDK_ABSENT 0xffffffffU
/* The same of a socket's descriptor, which may lie before the part that queue pairs point to. */
#define SPDK_NO_FD (-0x7fffffff)

enum spdk_message {
	SPDK_MSG_QUEUE = FAB_MSG_PRIVATE,
	SPDK_MSG_QUEUE_WENT,
	SPDK_MSG_EVENT,
};

/* A command under way. Both sides have the same, so that the socket's programs serve both. */
struct spdk_in_flight {
	struct fab_command command;
	__u64 request;     /* whose slot this is; 0 for nobody's */
	__u64 socket;
	__u64 r2t_at;      /* host: when the R2T at hand was seen; 0 when its turnaround is in the sum */
	__u64 holder;      /* target: its queue pair; host: what the application will be called back with */
	__u8 waiting;      /* 1 + the boundary that the next flush is, or 0 */
	__u8 identified;   /* counted as seen */
	__u8 answering;    /* host: between the first and the last H2CData of an R2T */
	__u8 answered;     /* target: the response is queued, and the command over with the flush */
};

/* A queue, sent before its first command. */
struct spdk_queue_message {
	__u32 message;       /* SPDK_MSG_QUEUE */
	__u16 cntlid;
	__u16 qid;
	__u64 queue;         /* the key that its commands carry */
	__u64 qpair;         /* where it lives in the process */
	__u64 socket;        /* key of its socket, 0 where it is unknown */
	__u64 came;          /* when it was connected, or first seen */
	__s32 fd;            /* its socket in the process, or -1 */
	__u16 host_port;     /* 0 where the build does not keep it */
	__u16 target_port;
	__u32 existed;       /* connected before recording */
	__u32 unused;
	char subsystem_nqn[SPDK_NQN];
	char host_nqn[SPDK_NQN];
	char host_address[SPDK_ADDRESS];
	char target_address[SPDK_ADDRESS];
	char served_by[SPDK_NAME];
};

/* The end of a queue. */
struct spdk_went_message {
	__u32 message;       /* SPDK_MSG_QUEUE_WENT */
	__u32 unused;
	__u64 queue;
	__u64 at;
};

enum spdk_event {
	SPDK_EVENT_DISCONNECT = 1, /* a queue pair is being disconnected */
	SPDK_EVENT_CC,             /* CC was written: values are the old and the new one */
	SPDK_EVENT_SUBSYSTEM,      /* a subsystem is asked to change its state: value is the state asked for */
	SPDK_EVENT_DESTRUCT,       /* a controller is being destroyed */
	SPDK_EVENT_RESET,          /* the host's bdev module resets a controller */
};

/* Something else that happened. */
struct spdk_event_message {
	__u32 message;       /* SPDK_MSG_EVENT */
	__u32 what;          /* enum spdk_event */
	__u64 at;
	__u64 queue;         /* the queue it is about, or 0 */
	__u32 before;
	__u32 after;
	char on[SPDK_NQN];   /* the subsystem or controller it is about, where it has a name */
};

/* Bits of a site's cookie for each argument; a site has at most three. */
#define SPDK_ARGUMENT_BITS 21

/* How an argument is found. */
enum spdk_argument {
	SPDK_ARGUMENT_REGISTER = 0, /* register + displacement */
	SPDK_ARGUMENT_MEMORY,       /* what is there */
	SPDK_ARGUMENT_CONSTANT,     /* the displacement itself */
};

/* What holds for both sides. */
struct spdk_common {
	__u32 tgid;          /* the recorded process, in the PID namespace below */
	__u32 namespace_inode; /* 0: the machine's own PID namespace */
	__u64 namespace_device;
	__u32 limit;         /* of the sampling hash */
	__u32 by_sock;       /* sockets are known by the kernel's struct sock (else by file descriptor) */
	/* Kernel: from a file descriptor to its struct sock. */
	__u32 task_files;
	__u32 files_fdt;
	__u32 fdt_fd;
	__u32 file_private;
	__u32 socket_sk;
};

/* Offsets in bytes; "a.b" is written a_b. */
struct spdk_layout_target {
	__u32 tcp_req_state;
	__u32 request_qpair;
	__u32 request_cmd;
	__u32 request_rsp;
	__u32 qpair_qid;
	__u32 qpair_ctrlr;
	__u32 qpair_group;           /* or SPDK_ABSENT, as all below that say "optional" */
	__u32 qpair_state;           /* optional */
	__u32 tqpair_pdu;            /* pdu_in_progress */
	__u32 tqpair_sock;
	__u32 tqpair_host_address;   /* optional: initiator_addr */
	__u32 tqpair_target_address; /* optional */
	__u32 tqpair_host_port;      /* optional */
	__u32 tqpair_target_port;    /* optional */
	__u32 pdu_sqe;               /* hdr.capsule_cmd.ccsqe */
	__u32 ctrlr_cntlid;
	__u32 ctrlr_hostnqn;
	__u32 ctrlr_subsys;
	__u32 ctrlr_cc;              /* optional: vcprop.cc */
	__u32 subsystem_subnqn;
	__u32 group_thread;          /* optional */
	__u32 thread_name;           /* optional */
	__s32 sock_fd;               /* optional (SPDK_NO_FD): from the spdk_sock to its descriptor */
	__u32 bdev_io_caller_ctx;    /* optional */
	__u32 bdev_io_type;          /* optional */
	__u32 unmap_req;             /* optional: nvmf_bdev_ctrlr_unmap.req */
	/* Numbers of enumerators. */
	__u32 state_new;
	__u32 state_ready_to_execute;
	__u32 state_executed;
	__u32 state_completed;
	__u32 state_ready_to_complete; /* optional */
	__u32 state_zcopy_started;   /* optional: ZCOPY_START_COMPLETED */
	__u32 qpair_enabled;         /* optional */
	__u32 type_unmap;            /* optional */
	__u32 r2t_at_queueing;       /* no flush is seen: t_r2t is when the R2T was queued */
	__u32 done_with_response;    /* t_done is taken where t_resp is */
};

struct spdk_layout_host {
	__u32 qpair_id;
	__u32 qpair_ctrlr;
	__u32 qpair_trtype;          /* optional */
	__u32 ctrlr_cntlid;
	__u32 ctrlr_subnqn;          /* trid.subnqn */
	__u32 ctrlr_traddr;
	__u32 ctrlr_hostnqn;         /* opts.hostnqn */
	__u32 tqpair_sock;
	__s32 sock_fd;               /* optional (SPDK_NO_FD) */
	__u32 request_cmd;
	__u32 request_cb_arg;
	__u32 tcp_req_req;
	__u32 pdu_sqe;
	__u32 bdev_io_driver_ctx;    /* optional: bdev users */
	__u32 trtype_tcp;            /* optional */
	__u32 ends_at_callback;      /* a hook tells when the application gets its completion */
	__u32 driver_with_capsule;   /* h_driver is taken where the capsule is queued */
};

#endif /* FABSCOPE_SPDK_H */
