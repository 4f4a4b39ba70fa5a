/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What both SPDK programs do alike: counters, the ring, the socket's flushes and reads, events.
 *
 * A command's first byte leaves, and its answer arrives, through the kernel's socket. SPDK's own flush
 * function runs for every socket on every poll, millions of times a second, nearly always with nothing to
 * send: a uprobe on it would stop the target. The kernel's tcp_sendmsg runs only when there is something to
 * send, and an fentry program on it costs some tens of nanoseconds instead of a trap. So flushes are seen
 * there: a command that queues a PDU is put on its socket's list, and the flush that comes next is the one
 * that takes the PDU along; it gives its time to all that wait, and empties the list.
 *
 * A flush that finds the socket's buffer full counts all the same: that wait is the network's doing.
 *
 * What a program does costs tens of nanoseconds where the trap that leads to it costs many hundreds, but it is paid
 * on every hit. So commands under way lie in an array, in a slot that their request's address alone tells: looking
 * one up is an addition and a comparison, without a call, and a command that is not sampled is known by its slot
 * not being its own. Where two requests have the same slot, the later one goes into a hash table.
 */
#ifndef FABSCOPE_SPDK_BPF_H
#define FABSCOPE_SPDK_BPF_H

#include <stddef.h>
#include <linux/bpf.h>
#include <linux/ptrace.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "spdk.h"

#define PDU_CAPSULE_CMD 0x04
#define PDU_H2C_DATA 0x06
#define PDU_FLAG_LAST 0x04
#define OPC_FABRIC 0x7f
#define FCTYPE_CONNECT 0x01

const volatile struct spdk_common common = {};

struct socket_state {
	__u64 received;        /* when the last read that brought bytes returned */
	__u64 waiting;         /* commands on the list */
	__u64 list[SPDK_WAITING];
};

/* The first 52 bytes of an SQE, as the NVMe base specification lays it out. */
struct sqe {
	__u8 opcode;
	__u8 flags;
	__u16 cid;
	__u32 nsid;            /* of a fabrics command: its type in the lowest byte */
	__u64 cdw2_3;
	__u64 metadata;
	__u64 sgl_address;
	__u32 sgl_length;
	__u32 sgl_type;
	__u32 cdw10;
	__u32 cdw11;
	__u32 cdw12;
};

/* A connection: one life of a queue pair. */
struct connection {
	__u64 queue;           /* its key; 0 until its first I/O command */
	__u64 came;
	__u64 socket;
	__u16 qid;
	__u8 existed;          /* connected before recording */
	__u8 announced;        /* its message is in the ring */
	__u8 went;
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 24);
} ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FAB_COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* By slot; see slot_of. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SPDK_SLOTS);
	__type(key, __u32);
	__type(value, struct spdk_in_flight);
} in_flight SEC(".maps");

/* By the address of the request: those whose slot another one has. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SPDK_OVERFLOW);
	__type(key, __u64);
	__type(value, struct spdk_in_flight);
} overflow SEC(".maps");

/* By the kernel's struct sock, or by file descriptor. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct socket_state);
} sockets SEC(".maps");

/* By the address of the queue pair. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct connection);
} connections SEC(".maps");

/* What new entries begin as; too large for the stack. */
const struct socket_state no_socket = {};
const struct spdk_in_flight nothing = {};

__u64 last_queue = 0;

/* Whether the overflow table has ever been needed. */
__u64 overflowed = 0;

#define FIELD(base, offset) ((const void *)((base) + (offset)))
#define READ(destination, base, offset) \
	bpf_probe_read_user(&(destination), sizeof(destination), FIELD(base, offset))

/*
 * Two members of one structure, with one read where they lie near each other: the offsets are constants when the
 * program is loaded, and the verifier leaves one of the ways.
 */
#define NEAR 64
#define READ_BOTH(first, second, base, first_offset, second_offset) \
	({ \
		__u32 begins = (first_offset) < (second_offset) ? (first_offset) : (second_offset); \
		__u32 one = (first_offset) - begins, two = (second_offset) - begins; \
		char block[NEAR] = {}; \
		long failed; \
		if (one <= NEAR - sizeof(first) && two <= NEAR - sizeof(second)) { \
			__u32 length = one + sizeof(first) > two + sizeof(second) ? one + sizeof(first) : \
										    two + sizeof(second); \
			failed = length > NEAR || bpf_probe_read_user(block, length, FIELD(base, begins)); \
			__builtin_memcpy(&(first), block + one, sizeof(first)); \
			__builtin_memcpy(&(second), block + two, sizeof(second)); \
		} else { \
			failed = READ(first, base, first_offset) || READ(second, base, second_offset); \
		} \
		failed; \
	})

static __always_inline void count(__u32 counter)
{
	__u64 *n = bpf_map_lookup_elem(&counters, &counter);

	if (n)
		*n += 1; /* its own CPU's; a uprobe is not interrupted by another one on this CPU */
}

/* A uprobe sits in a file, and old kernels run it for every process that has mapped it. */
static __always_inline int ours(void)
{
	struct bpf_pidns_info in_namespace;

	if (!common.namespace_inode)
		return bpf_get_current_pid_tgid() >> 32 == common.tgid;
	return bpf_get_ns_current_pid_tgid(common.namespace_device, common.namespace_inode, &in_namespace,
					   sizeof(in_namespace)) == 0 &&
	       in_namespace.tgid == common.tgid;
}

/*
 * The reader looks every few milliseconds by itself: waking it for each record would cost the recorded
 * thread more than the record. Only a ring that fills up wakes it, and that is looked at once in so many records.
 */
#define LOOK_EVERY 64

static __always_inline __u64 wakeup(__u64 sent)
{
	if (sent % LOOK_EVERY)
		return BPF_RB_NO_WAKEUP;
	return bpf_ringbuf_query(&ring, BPF_RB_AVAIL_DATA) > bpf_ringbuf_query(&ring, BPF_RB_RING_SIZE) / 4
		       ? BPF_RB_FORCE_WAKEUP
		       : BPF_RB_NO_WAKEUP;
}

static __always_inline void send_command(struct fab_command *command)
{
	__u32 recorded = FAB_RECORDED;
	__u64 *sent = bpf_map_lookup_elem(&counters, &recorded);

	if (!sent)
		return;
	if (bpf_ringbuf_output(&ring, command, sizeof(*command), wakeup(*sent)) == 0)
		*sent += 1;
	else
		count(FAB_LOST_RING);
}

/* Requests lie at least 64 bytes apart, most of them in arrays: neighbours have slots of their own. */
static __always_inline __u32 slot_of(__u64 request)
{
	return (request >> 6 ^ request >> 22) & (SPDK_SLOTS - 1);
}

/* The command of this request, if it is under way and sampled. */
static __always_inline struct spdk_in_flight *find(__u64 request)
{
	__u32 slot = slot_of(request);
	struct spdk_in_flight *e = bpf_map_lookup_elem(&in_flight, &slot);

	if (e && e->request == request)
		return e;
	if (!overflowed)
		return 0;
	return bpf_map_lookup_elem(&overflow, &request);
}

/* An entry for a request that has none, with nothing of it known but that; 0 where there is no more room. */
static __always_inline struct spdk_in_flight *claim(__u64 request)
{
	__u32 slot = slot_of(request);
	struct spdk_in_flight *e = bpf_map_lookup_elem(&in_flight, &slot);

	/* Two threads may want the same slot. */
	if (e && __sync_val_compare_and_swap(&e->request, 0, request) == 0)
		return e;
	overflowed = 1;
	if (bpf_map_update_elem(&overflow, &request, &nothing, BPF_ANY))
		return 0;
	e = bpf_map_lookup_elem(&overflow, &request);
	if (e)
		e->request = request;
	return e;
}

/* Forgets what the slot's last command left. */
static __always_inline void clear(struct spdk_in_flight *e)
{
	__builtin_memset(&e->command, 0, sizeof(e->command));
	e->socket = 0;
	e->r2t_at = 0;
	e->holder = 0;
	e->waiting = 0;
	e->identified = 0;
	e->answering = 0;
	e->answered = 0;
}

/* The command is over. */
static __always_inline void end(struct spdk_in_flight *e, __u64 request)
{
	__u32 slot = slot_of(request);
	struct spdk_in_flight *own = bpf_map_lookup_elem(&in_flight, &slot);

	if (own == e) {
		e->request = 0;
		return;
	}
	bpf_map_delete_elem(&overflow, &request);
}

/* Fills in what the SQE says of a command. */
static __always_inline void identify(struct fab_command *command, const struct sqe *sqe)
{
	command->message = FAB_MSG_COMMAND;
	command->opcode = sqe->opcode;
	command->cid = sqe->cid;
	command->nsid = sqe->nsid;
	command->slba = sqe->cdw10 | (__u64)sqe->cdw11 << 32;
	command->nlb0 = sqe->cdw12;
	/* The two low bits of an opcode are its direction of transfer; 0 is none. */
	command->bytes = sqe->opcode & 3 ? sqe->sgl_length : 0;
	command->stream_position = FAB_NO_POSITION;
	command->cpu = bpf_get_smp_processor_id();
}

static __always_inline int kept(const struct sqe *sqe)
{
	return fab_sampled(common.limit, sqe->cid, sqe->opcode, sqe->nsid,
			   sqe->cdw10 | (__u64)sqe->cdw11 << 32, sqe->cdw12);
}

static __always_inline __u64 kernel_pointer(__u64 base, __u32 offset)
{
	__u64 value = 0;

	if (base)
		bpf_probe_read_kernel(&value, sizeof(value), FIELD(base, offset));
	return value;
}

/* The key under which the flushes of this file descriptor of the running process are counted, or 0. */
static __always_inline __u64 socket_key(int fd)
{
	__u64 at;

	if (fd < 0)
		return 0;
	if (!common.by_sock)
		return fd + 1;
	at = kernel_pointer(bpf_get_current_task(), common.task_files);
	at = kernel_pointer(at, common.files_fdt);
	at = kernel_pointer(at, common.fdt_fd);
	at = kernel_pointer(at, (__u32)fd * 8);
	at = kernel_pointer(at, common.file_private);
	return kernel_pointer(at, common.socket_sk);
}

/* Begins to watch the flushes and reads of a connection's socket. */
static __always_inline void watch(__u64 socket)
{
	if (socket)
		bpf_map_update_elem(&sockets, &socket, &no_socket, BPF_ANY);
}

/* The PDU that was queued for this boundary leaves with the next flush. Whether that will be seen. */
static __always_inline int await_flush(struct spdk_in_flight *e, __u64 request, __u32 boundary)
{
	struct socket_state *s;
	__u64 n;

	if (!e->socket)
		return 0;
	s = bpf_map_lookup_elem(&sockets, &e->socket);
	if (!s)
		return 0;
	n = s->waiting;
	if (n >= SPDK_WAITING)
		return 0; /* the boundary stays unknown */
	s->list[n & (SPDK_WAITING - 1)] = request;
	s->waiting = n + 1;
	e->waiting = boundary + 1;
	return 1;
}

/* A flush that this request waited for. A function of its own: the verifier looks at it once, not for each. */
__noinline int flushed_one(__u64 request, __u64 now)
{
	struct spdk_in_flight *e = find(request);
	__u32 boundary;

	if (!e || !e->waiting)
		return 0;
	boundary = (e->waiting - 1) & (FAB_SLOTS - 1);
	e->waiting = 0;
	if (!e->command.ts[boundary])
		e->command.ts[boundary] = now;
	if (e->answered) {
		send_command(&e->command);
		end(e, request);
	} else if (e->r2t_at && boundary == FAB_H_DATA_SENT) {
		e->command.r2t_turnaround += now - e->r2t_at;
		e->r2t_at = 0;
	}
	return 0;
}

/* A flush of a socket of this process. */
static __always_inline void flushed(__u64 socket)
{
	struct socket_state *s = bpf_map_lookup_elem(&sockets, &socket);
	__u64 now, n;
	__u32 i;

	if (!s || !s->waiting)
		return;
	now = bpf_ktime_get_ns();
	n = s->waiting;
	for (i = 0; i < SPDK_WAITING; i++) {
		if (i >= n)
			break;
		flushed_one(s->list[i], now);
	}
	s->waiting = 0;
}

/* First byte to the socket, best hook: the kernel's own, by struct sock. */
SEC("fentry/tcp_sendmsg")
int flush_tcp_sendmsg(__u64 *ctx)
{
	if (ours())
		flushed(ctx[0]);
	return 0;
}

/*
 * The same where the machine's owner does not allow fentry: the tracepoint inside tcp_sendmsg, since 6.16. It
 * fires once for each buffer that one call fills; only the first one after a PDU was queued counts.
 */
SEC("raw_tp/tcp_sendmsg_locked")
int flush_raw(__u64 *ctx)
{
	if (ours())
		flushed(ctx[0]);
	return 0;
}

/* The same where neither is to be had: at the call instructions of sendmsg in the socket module. */
SEC("uprobe")
int flush_call(struct pt_regs *ctx)
{
	if (ours())
		flushed(socket_key(PT_REGS_PARM1(ctx)));
	return 0;
}

struct sys_enter {
	__u64 common;
	__s64 number;
	__u64 args[6];
};

/* The same where sendmsg is not called by name: any sendmsg of the process. */
SEC("tracepoint/syscalls/sys_enter_sendmsg")
int flush_syscall(struct sys_enter *ctx)
{
	if (ours())
		flushed(socket_key(ctx->args[0]));
	return 0;
}

/*
 * An argument of the function that a uprobe stands for. Where it is depends on the site: in an argument register
 * at a function's entry, wherever the compiler chose where the function was cloned or inlined, and at a USDT
 * probe. The loader packs that into the site's cookie, SPDK_ARGUMENT_BITS for each argument: bits 0-1 how (enum
 * spdk_argument), bits 2-6 the register as an index into struct pt_regs, the rest a signed displacement.
 */
static __always_inline __u64 argument(struct pt_regs *ctx, __u32 which)
{
	__u64 spec = bpf_get_attach_cookie(ctx) >> (which * SPDK_ARGUMENT_BITS);
	__s64 displacement = (__s64)(spec << (64 - SPDK_ARGUMENT_BITS)) >> (64 - SPDK_ARGUMENT_BITS + 7);
	__u64 value = 0, at;

	if ((spec & 3) == SPDK_ARGUMENT_CONSTANT)
		return displacement;
	/* Nearly always it is one of the first arguments in its own register; those need no call. */
	switch (spec >> 2 & 31) {
	case offsetof(struct pt_regs, rdi) / sizeof(long):
		value = ctx->rdi;
		break;
	case offsetof(struct pt_regs, rsi) / sizeof(long):
		value = ctx->rsi;
		break;
	case offsetof(struct pt_regs, rdx) / sizeof(long):
		value = ctx->rdx;
		break;
	case offsetof(struct pt_regs, rcx) / sizeof(long):
		value = ctx->rcx;
		break;
	default:
		bpf_probe_read_kernel(&value, sizeof(value), (void *)ctx + (spec >> 2 & 31) * sizeof(long));
	}
	at = value + displacement;
	if ((spec & 3) == SPDK_ARGUMENT_MEMORY && READ(value, at, 0))
		return 0;
	return (spec & 3) == SPDK_ARGUMENT_MEMORY ? value : at;
}

static __always_inline void event(__u32 what, __u64 queue, __u32 before, __u32 after, __u64 on)
{
	struct spdk_event_message *m = bpf_ringbuf_reserve(&ring, sizeof(*m), 0);

	if (!m)
		return; /* events explain, they are not counted */
	m->message = SPDK_MSG_EVENT;
	m->what = what;
	m->at = bpf_ktime_get_ns();
	m->queue = queue;
	m->before = before;
	m->after = after;
	m->on[0] = 0;
	if (on)
		bpf_probe_read_user_str(m->on, sizeof(m->on), (const void *)on);
	bpf_ringbuf_submit(m, BPF_RB_NO_WAKEUP);
}

/* A queue pair goes: its commands that are still under way end or not, no new ones come. */
static __always_inline void gone(__u64 qpair)
{
	struct connection *c = bpf_map_lookup_elem(&connections, &qpair);
	struct spdk_went_message *m;

	if (!c || c->went || !c->queue)
		return;
	c->went = 1;
	m = bpf_ringbuf_reserve(&ring, sizeof(*m), 0);
	if (m) {
		m->message = SPDK_MSG_QUEUE_WENT;
		m->unused = 0;
		m->queue = c->queue;
		m->at = bpf_ktime_get_ns();
		bpf_ringbuf_submit(m, BPF_RB_NO_WAKEUP);
	}
	event(SPDK_EVENT_DISCONNECT, c->queue, 0, 0, 0);
}

/* A CONNECT command opens a new life of its queue pair, whatever was known under its address before. */
static __always_inline void connecting(__u64 qpair, __u64 now)
{
	struct connection c = {.came = now};

	bpf_map_update_elem(&connections, &qpair, &c, BPF_ANY);
}

/* Event: a queue pair is being disconnected; argument 0 is the queue pair. */
SEC("uprobe")
int qpair_disconnect(struct pt_regs *ctx)
{
	if (ours())
		gone(argument(ctx, 0));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#endif /* FABSCOPE_SPDK_BPF_H */
