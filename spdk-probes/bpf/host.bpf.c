// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * SPDK as the host over NVMe/TCP: one entry per nvme_request, from its submission to its completion.
 *
 * The cid is given out late: an nvme_request has none until the transport has taken a tcp_req for it. So the
 * entry begins without identity, and gets it (and leaves, if it is not sampled) where the capsule is queued.
 */
#include "spdk.bpf.h"

const volatile struct spdk_layout_host layout = {};

/* When a bdev_io was submitted to the bdev layer. */
struct bdev_io_at {
	__u64 bdev_io;
	__u64 at;
};

/* By the slot of the bdev_io's address; see slot_of. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SPDK_SLOTS);
	__type(key, __u32);
	__type(value, struct bdev_io_at);
} bdev_ios SEC(".maps");

/* Those whose slot another one has, by their address. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SPDK_OVERFLOW);
	__type(key, __u64);
	__type(value, __u64);
} bdev_overflow SEC(".maps");

/* Whether that has ever been needed. */
__u64 bdev_overflowed = 0;

/*
 * Commands that the driver has completed and the layer above not yet are found by what the application is called
 * back with, in the same table as requests: addresses are even, these keys are not.
 */
#define ENDING(callback) ((callback) | 1)

static __always_inline int announce(__u64 qpair, const struct connection *c, int fd)
{
	__u64 ctrlr = 0;
	struct spdk_queue_message *m = bpf_ringbuf_reserve(&ring, sizeof(*m), 0);

	if (!m)
		return 0;
	m->message = SPDK_MSG_QUEUE;
	m->queue = c->queue;
	m->qpair = qpair;
	m->socket = c->socket;
	m->qid = c->qid;
	m->came = c->came;
	m->existed = c->existed;
	m->unused = 0;
	m->fd = fd;
	m->cntlid = 0xffff;
	m->host_port = 0; /* the loader finds it by the descriptor */
	m->target_port = 0;
	m->subsystem_nqn[0] = 0;
	m->host_nqn[0] = 0;
	m->host_address[0] = 0;
	m->target_address[0] = 0;
	m->served_by[0] = 0;
	READ(ctrlr, qpair, layout.qpair_ctrlr);
	if (ctrlr) {
		READ(m->cntlid, ctrlr, layout.ctrlr_cntlid);
		bpf_probe_read_user_str(m->subsystem_nqn, SPDK_NQN, FIELD(ctrlr, layout.ctrlr_subnqn));
		bpf_probe_read_user_str(m->host_nqn, SPDK_NQN, FIELD(ctrlr, layout.ctrlr_hostnqn));
		bpf_probe_read_user_str(m->target_address, SPDK_ADDRESS, FIELD(ctrlr, layout.ctrlr_traddr));
	}
	bpf_get_current_comm(m->served_by, SPDK_NAME);
	bpf_ringbuf_submit(m, BPF_RB_NO_WAKEUP);
	return 1;
}

static __always_inline struct connection *connection_of(__u64 qpair, __u64 now)
{
	struct connection *known = bpf_map_lookup_elem(&connections, &qpair);
	struct connection c = {};
	__u64 sock = 0;
	int fd = -1;

	if (known && known->announced)
		return known;
	if (known) {
		c = *known;
	} else {
		c.came = now;
		c.existed = 1;
	}
	if (READ(c.qid, qpair, layout.qpair_id))
		return 0;
	if (!c.queue)
		c.queue = __sync_fetch_and_add(&last_queue, 1) + 1;
	if (layout.sock_fd != SPDK_NO_FD && !READ(sock, qpair, layout.tqpair_sock) && sock)
		READ(fd, sock, (__s64)layout.sock_fd);
	if (!c.socket) {
		c.socket = socket_key(fd);
		watch(c.socket);
	}
	c.announced = announce(qpair, &c, fd);
	bpf_map_update_elem(&connections, &qpair, &c, BPF_ANY);
	return bpf_map_lookup_elem(&connections, &qpair);
}

/* Whether this qpair is an I/O queue over TCP: the same process may drive local drives as well. */
static __always_inline int concerns(__u64 qpair)
{
	__u32 trtype = 0;
	__u16 id = 0;

	if (layout.qpair_trtype == SPDK_ABSENT)
		return !READ(id, qpair, layout.qpair_id) && id;
	return !READ_BOTH(id, trtype, qpair, layout.qpair_id, layout.qpair_trtype) && id &&
	       trtype == layout.trtype_tcp;
}

static __always_inline void bdev_began(__u64 bdev_io, __u64 now)
{
	__u32 slot = slot_of(bdev_io);
	struct bdev_io_at *own = bpf_map_lookup_elem(&bdev_ios, &slot);

	if (own) {
		__u64 whose = own->bdev_io;

		/* Two threads may want the same slot. */
		if (!whose)
			whose = __sync_val_compare_and_swap(&own->bdev_io, 0, bdev_io);
		if (!whose || whose == bdev_io) {
			own->at = now;
			return;
		}
	}
	bdev_overflowed = 1;
	bpf_map_update_elem(&bdev_overflow, &bdev_io, &now, BPF_ANY);
}

/* When the bdev_io was submitted, or 0. */
static __always_inline __u64 bdev_at(__u64 bdev_io)
{
	__u32 slot = slot_of(bdev_io);
	struct bdev_io_at *own = bpf_map_lookup_elem(&bdev_ios, &slot);
	__u64 *at;

	if (own && own->bdev_io == bdev_io)
		return own->at;
	if (!bdev_overflowed)
		return 0;
	at = bpf_map_lookup_elem(&bdev_overflow, &bdev_io);
	return at ? *at : 0;
}

/* The bdev_io is over. */
static __always_inline void bdev_over(__u64 bdev_io)
{
	__u32 slot = slot_of(bdev_io);
	struct bdev_io_at *own = bpf_map_lookup_elem(&bdev_ios, &slot);

	if (own && own->bdev_io == bdev_io)
		own->bdev_io = 0;
	else if (bdev_overflowed)
		bpf_map_delete_elem(&bdev_overflow, &bdev_io);
}

/* h_queued of bdev users: bdev_io_submit(bdev_io), where the application's I/O enters SPDK's block layer. */
SEC("uprobe")
int bdev_submit(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();

	if (ours())
		bdev_began(argument(ctx, 0), now);
	return 0;
}

/* The same from bdev_nvme_submit_request(channel, bdev_io), where bdev_io_submit is inlined. */
SEC("uprobe")
int bdev_nvme_submit(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();

	if (ours())
		bdev_began(argument(ctx, 0), now);
	return 0;
}

/*
 * h_queued: nvme_qpair_submit_request(qpair, request), which every NVMe command of an application passes
 * once: what the driver queues for want of a slot is submitted again below it. A request with children comes
 * here too; its children are the commands, it stays without identity and is never counted. A request of the
 * NVMe bdev began earlier, when its bdev_io was submitted.
 */
SEC("uprobe")
int submit_request(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 callback = 0, qpair, request, bdev_io, began;
	struct spdk_in_flight *e;

	if (!ours())
		return 0;
	qpair = argument(ctx, 0);
	request = argument(ctx, 1);
	if (!concerns(qpair))
		return 0;
	e = find(request);
	if (e) {
		if (e->identified)
			count(FAB_LOST_UNFINISHED); /* freed without a completion: its queue pair died */
		end(e, request);
	}
	e = claim(request);
	if (!e) {
		count(FAB_SEEN);
		count(FAB_LOST_MAP);
		return 0;
	}
	/* The rest is cleared when it is known whether the command is sampled. */
	e->identified = 0;
	e->holder = 0;
	e->command.ts[FAB_H_DRIVER] = 0;
	e->command.ts[FAB_H_QUEUED] = now;
	if (READ(callback, request, layout.request_cb_arg))
		return 0;
	if (layout.bdev_io_driver_ctx != SPDK_ABSENT) {
		/* The NVMe bdev's part of a bdev_io is what its requests are completed with. */
		bdev_io = callback - layout.bdev_io_driver_ctx;
		began = bdev_at(bdev_io);
		if (!began)
			return 0;
		e->command.ts[FAB_H_QUEUED] = began;
		callback = bdev_io;
	}
	if (layout.ends_at_callback)
		e->holder = callback;
	return 0;
}

/*
 * h_driver: nvme_tcp_qpair_submit_request(qpair, request). When no slot is free it returns -EAGAIN and comes
 * again: the last time counts, the wait is the block layer's.
 */
SEC("uprobe")
int tcp_submit_request(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	struct spdk_in_flight *e;
	__u64 request;

	if (!ours())
		return 0;
	request = argument(ctx, 0);
	e = find(request);
	if (e && !e->identified)
		e->command.ts[FAB_H_DRIVER] = now;
	return 0;
}

/* The capsule is queued on the socket: it has its cid now, and the flush that comes next sends it. */
static __always_inline void capsule(__u64 tqpair, const struct sqe *sqe, __u64 request, __u64 now)
{
	struct spdk_in_flight *e = find(request);
	__u64 queued, driver, holder;
	struct connection *c;

	if (sqe->opcode == OPC_FABRIC) {
		if ((sqe->nsid & 0xff) == FCTYPE_CONNECT)
			connecting(tqpair, now);
		if (e)
			end(e, request);
		return;
	}
	if (!e || e->identified)
		return; /* admin, or queued before recording began */
	count(FAB_SEEN);
	if (!kept(sqe)) {
		count(FAB_UNSAMPLED);
		end(e, request);
		return;
	}
	c = connection_of(tqpair, now);
	if (!c) {
		count(FAB_LOST_MAP);
		end(e, request);
		return;
	}
	queued = e->command.ts[FAB_H_QUEUED];
	driver = e->command.ts[FAB_H_DRIVER];
	holder = e->holder;
	clear(e);
	e->command.ts[FAB_H_QUEUED] = queued;
	e->command.ts[FAB_H_DRIVER] = layout.driver_with_capsule ? now : driver;
	e->holder = holder;
	e->identified = 1;
	identify(&e->command, sqe);
	e->command.queue = c->queue;
	e->socket = c->socket;
	await_flush(e, request, FAB_H_SENT);
}

/*
 * An H2CData PDU is queued. The R2T was handled right before, in the same call, and the read that brought it
 * is the socket's last one: the driver reads a socket again only when all that it has read is used up.
 */
static __always_inline void h2c_data(__u64 request, __u8 flags, __u64 now)
{
	struct spdk_in_flight *e = find(request);
	struct socket_state *s;
	__u64 seen = now;

	if (!e || !e->identified)
		return;
	if (!e->answering) {
		s = bpf_map_lookup_elem(&sockets, &e->socket);
		if (s && s->received)
			seen = s->received;
		if (!e->command.ts[FAB_H_R2T])
			e->command.ts[FAB_H_R2T] = seen;
		e->r2t_at = seen;
		await_flush(e, request, FAB_H_DATA_SENT);
		if (e->command.r2ts != 0xff)
			e->command.r2ts += 1;
	}
	e->answering = !(flags & PDU_FLAG_LAST);
}

/* What a PDU says can not be read; if it was a capsule, its command stays unknown. */
static __always_inline void unread(__u64 request)
{
	struct spdk_in_flight *e = find(request);

	if (!e || e->identified)
		return;
	count(FAB_SEEN);
	count(FAB_LOST_READ);
	end(e, request);
}

/* h_sent, h_r2t, h_data_sent: nvme_tcp_qpair_write_pdu(tqpair, pdu, callback, tcp_req) queues a PDU. */
SEC("uprobe")
int write_pdu(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 tqpair, pdu, tcp_req, request = 0;
	/* A PDU's header begins 8 bytes before the SQE that a command capsule carries. */
	struct {
		__u8 type;
		__u8 flags;
		__u8 rest[6];
		struct sqe sqe;
	} head = {};

	if (!ours())
		return 0;
	tqpair = argument(ctx, 0);
	pdu = argument(ctx, 1);
	tcp_req = argument(ctx, 2);
	if (READ(request, tcp_req, layout.tcp_req_req))
		return 0;
	if (READ(head, pdu, layout.pdu_sqe - 8)) {
		unread(request);
		return 0;
	}
	if (head.type == PDU_CAPSULE_CMD)
		capsule(tqpair, &head.sqe, request, now);
	else if (head.type == PDU_H2C_DATA)
		h2c_data(request, head.flags, now);
	return 0;
}

static __always_inline void received(__u64 socket, __s32 bytes)
{
	struct socket_state *s;

	if (bytes <= 0)
		return;
	s = bpf_map_lookup_elem(&sockets, &socket);
	if (s)
		s->received = bpf_ktime_get_ns();
}

/*
 * h_recv: the return of the read that brought the completion. SPDK reads a socket's next bytes only when it
 * has used up those before, so the last read that returned bytes is the one that completed this PDU; the
 * time from there is the driver's, also when a batch of completions waits for its turn. No trap is needed.
 */
SEC("fexit/tcp_recvmsg")
int received_tcp_recvmsg(__u64 *ctx)
{
	__u64 bytes = 0;

	if (ours() && bpf_get_func_ret(ctx, &bytes) == 0)
		received(ctx[0], bytes);
	return 0;
}

/* The same where fexit is not allowed: the tracepoint behind every socket's read, since 6.3. */
SEC("raw_tp/sock_recv_length")
int received_raw(__u64 *ctx)
{
	if (ours())
		received(ctx[0], ctx[1]);
	return 0;
}

/*
 * h_done: nvme_tcp_req_complete(tcp_req, tqpair, cpl, ...). It needs both the completion and the
 * acknowledgement that the capsule was sent. Aborted requests end here too.
 */
SEC("uprobe")
int req_complete(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 tcp_req, qpair, cpl, request = 0, ending;
	struct spdk_in_flight *e, *other;
	struct socket_state *s;
	__u16 status = 0;
	__u8 opcode = 0;

	if (!ours())
		return 0;
	tcp_req = argument(ctx, 0);
	if (READ(request, tcp_req, layout.tcp_req_req))
		return 0;
	e = find(request);
	if (!e) {
		if (common.limit != 0xffffffff)
			return 0;
		qpair = argument(ctx, 1);
		if (concerns(qpair) && !READ(opcode, request, layout.request_cmd) && opcode != OPC_FABRIC)
			count(FAB_NO_START);
		return 0;
	}
	if (!e->identified) {
		end(e, request);
		return 0;
	}
	cpl = argument(ctx, 2);
	e->command.ts[FAB_H_DONE] = now;
	s = bpf_map_lookup_elem(&sockets, &e->socket);
	if (s && s->received > e->command.ts[FAB_H_DRIVER])
		e->command.ts[FAB_H_RECV] = s->received;
	/* CQE dword 3, upper half: phase, SC, SCT. */
	if (!READ(status, cpl, 14))
		e->command.status = status >> 1 & 0x7ff;
	if (e->command.status == 0x008) {
		/* Aborted by deletion of its queue: made up by the driver. */
		e->command.flags |= FAB_FLAG_CANCELED;
		e->command.ts[FAB_H_RECV] = 0;
	}
	if (!e->holder) {
		send_command(&e->command);
		end(e, request);
		return 0;
	}
	ending = ENDING(e->holder);
	/* A retry of the layer above takes the same bdev_io again: the first attempt ends without it. */
	other = find(ending);
	if (other) {
		send_command(&other->command);
		end(other, ending);
	}
	other = claim(ending);
	if (other) {
		other->command = e->command;
		other->waiting = 0;
		other->identified = 1;
	} else {
		send_command(&e->command);
	}
	end(e, request);
	return 0;
}

static __always_inline void ended(__u64 callback, __u64 now)
{
	struct spdk_in_flight *e = find(ENDING(callback));

	if (!e)
		return;
	e->command.ts[FAB_H_END] = now;
	send_command(&e->command);
	end(e, ENDING(callback));
}

/* h_end of bdev users: bdev_io_complete(bdev_io), which calls the application back. */
SEC("uprobe")
int bdev_complete(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 bdev_io;

	if (!ours())
		return 0;
	bdev_io = argument(ctx, 0);
	ended(bdev_io, now);
	bdev_over(bdev_io);
	return 0;
}

/* h_end of spdk_nvme_perf: io_complete(task, cpl). */
SEC("uprobe")
int io_complete(struct pt_regs *ctx)
{
	if (ours())
		ended(argument(ctx, 0), bpf_ktime_get_ns());
	return 0;
}

/* Event: USDT bdev_nvme_ctrlr_reset; argument 0 is the controller's name. */
SEC("uprobe")
int bdev_reset(struct pt_regs *ctx)
{
	if (ours())
		event(SPDK_EVENT_RESET, 0, 0, 0, argument(ctx, 0));
	return 0;
}
