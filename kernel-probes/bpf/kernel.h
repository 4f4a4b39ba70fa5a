/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the kernel's programs send besides commands, on either side. The Rust side's types are generated from
 * this file.
 */
#ifndef FABSCOPE_KERNEL_H
#define FABSCOPE_KERNEL_H

#include "fabscope.h"

enum kernel_message {
	KERNEL_MSG_QUEUE = FAB_MSG_PRIVATE,
	KERNEL_MSG_EVENT = FAB_MSG_PRIVATE + 1,
};

/* What carries a queue. */
enum kernel_transport {
	KERNEL_TCP = 0,
	KERNEL_RDMA = 1,
};

/* An NQN has at most 223 bytes (NVMe base specification, 4.7); one more ends it. */
#define KERNEL_NQN_BYTES 224

/* No CPU: the queue is bound to none. */
#define KERNEL_NO_CPU (-1)

/* One connection of one queue, sent before its first command. */
struct kernel_queue {
	__u32 message; /* KERNEL_MSG_QUEUE */
	__s32 instance; /* host: N of nvmeN; target: the controller's cntlid, of which it has each once */
	__u64 key; /* fab_command.queue of its commands */
	__u64 came; /* when it connected, or when its first command was seen, ns */
	__s32 io_cpu; /* the CPU that the driver serves it on, or KERNEL_NO_CPU */
	__u16 cntlid;
	__u16 qid;
	__u16 family; /* AF_INET or AF_INET6; 0 when the connection could not be read */
	__u16 local_port;
	__u16 remote_port;
	__u8 existed; /* it was not seen to connect */
	__u8 encrypted; /* an upper layer protocol (TLS) sits on the socket */
	__u8 transport; /* enum kernel_transport */
	__u8 local_address[16]; /* network order; IPv4 in the first four */
	__u8 remote_address[16];
	char subsystem_nqn[KERNEL_NQN_BYTES];
	char host_nqn[KERNEL_NQN_BYTES];
};

enum kernel_event_kind {
	/* The host's. */
	KERNEL_EVENT_RESETTING = 0, /* the controller is being reset */
	KERNEL_EVENT_LIVE = 1, /* it takes commands (again) */
	KERNEL_EVENT_DELETING = 2, /* it is being removed */
	KERNEL_EVENT_DEAD = 3, /* it has been given up */
	KERNEL_EVENT_CONNECT = 4, /* queue `qid` is about to be connected (again) */
	KERNEL_EVENT_CONNECTING = 5, /* its queues are gone, and it is about to connect again */
	KERNEL_EVENT_TIMEOUT = 6, /* a command of queue `qid` took too long */
	/* The target's. */
	KERNEL_EVENT_QUEUE_GONE = 7, /* queue `qid` is disconnected */
	KERNEL_EVENT_FATAL = 8, /* the controller reports a fatal error to its host, a missing keep-alive for one */
	KERNEL_EVENT_NAMESPACE_ENABLED = 9, /* a namespace, whose nsid stands for `instance` */
	KERNEL_EVENT_NAMESPACE_DISABLED = 10,
};

/* Something that explains a gap. */
struct kernel_event {
	__u32 message; /* KERNEL_MSG_EVENT */
	__u32 kind; /* enum kernel_event_kind */
	__u64 at; /* ns */
	__s32 instance; /* as in kernel_queue */
	__u32 qid; /* 0 for the whole controller */
	__u64 key; /* the queue's key where it has one, else 0 */
};

/* Segments that TCP sent again, at once. */
struct kernel_retransmit {
	__u64 at; /* ns */
	__u32 segments;
	__u16 family; /* as in kernel_queue */
	__u16 local_port;
	__u16 remote_port;
	__u16 unused[3];
	__u8 local_address[16];
	__u8 remote_address[16];
};

/* Ports, one bit each. */
#define KERNEL_PORT_BYTES 8192

#endif /* FABSCOPE_KERNEL_H */
