/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the host's programs send besides commands. The Rust side's types are generated from this file.
 */
#ifndef FABSCOPE_HOST_H
#define FABSCOPE_HOST_H

#include "fabscope.h"

enum host_message {
	HOST_MSG_QUEUE = FAB_MSG_PRIVATE,
	HOST_MSG_EVENT = FAB_MSG_PRIVATE + 1,
};

/* An NQN has at most 223 bytes (NVMe base specification, 4.7); one more ends it. */
#define HOST_NQN_BYTES 224

/* One connection of one queue, sent before its first command. */
struct host_queue {
	__u32 message; /* HOST_MSG_QUEUE */
	__s32 instance; /* N of nvmeN */
	__u64 key; /* fab_command.queue of its commands */
	__u64 came; /* when it connected, or when its first command was seen, ns */
	__s32 io_cpu; /* the CPU that the driver serves it on */
	__u16 cntlid;
	__u16 qid;
	__u16 family; /* AF_INET or AF_INET6; 0 when the socket could not be read */
	__u16 host_port;
	__u16 target_port;
	__u8 existed; /* it was not seen to connect */
	__u8 encrypted; /* an upper layer protocol (TLS) sits on the socket */
	__u8 host_address[16]; /* network order; IPv4 in the first four */
	__u8 target_address[16];
	char subsystem_nqn[HOST_NQN_BYTES];
	char host_nqn[HOST_NQN_BYTES];
};

enum host_event_kind {
	HOST_EVENT_RESETTING = 0, /* the controller is being reset */
	HOST_EVENT_LIVE = 1, /* it takes commands (again) */
	HOST_EVENT_DELETING = 2, /* it is being removed */
	HOST_EVENT_DEAD = 3, /* it has been given up */
	HOST_EVENT_CONNECT = 4, /* queue `qid` is about to be connected (again) */
	HOST_EVENT_CONNECTING = 5, /* its queues are gone, and it is about to connect again */
	HOST_EVENT_TIMEOUT = 6, /* a command of queue `qid` took too long */
};

/* Something that explains a gap. */
struct host_event {
	__u32 message; /* HOST_MSG_EVENT */
	__u32 kind; /* enum host_event_kind */
	__u64 at; /* ns */
	__s32 instance; /* N of nvmeN */
	__u32 qid; /* 0 for the whole controller */
};

#endif /* FABSCOPE_HOST_H */
