// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The SPDK NVMe/TCP target: one entry per command, keyed by the address of its request, filled in as the
 * command passes and sent with the flush that takes its response along. That the request is freed later is not
 * waited for: it would be one more trap for each command, and tell nothing.
 *
 * struct spdk_nvmf_tcp_req begins with struct spdk_nvmf_request, so the transport, the nvmf library and the
 * bdev layer's caller_ctx all know a command by the same address.
 */
#include "spdk.bpf.h"

const volatile struct spdk_layout_target layout = {};

static __always_inline void copy_name(char *to, __u32 size, __u64 base, __u32 offset)
{
	to[0] = 0;
	if (base && offset != SPDK_ABSENT)
		bpf_probe_read_user_str(to, size, FIELD(base, offset));
}

/* Sends what is known of a queue. Identity is read once, at the queue's first I/O command. */
static __always_inline int announce(__u64 qpair, const struct connection *c, int fd)
{
	__u64 ctrlr = 0, subsystem = 0, group = 0, thread = 0;
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
	m->host_port = 0;
	m->target_port = 0;
	READ(ctrlr, qpair, layout.qpair_ctrlr);
	if (ctrlr) {
		READ(m->cntlid, ctrlr, layout.ctrlr_cntlid);
		READ(subsystem, ctrlr, layout.ctrlr_subsys);
	}
	copy_name(m->host_nqn, sizeof(m->host_nqn), ctrlr, layout.ctrlr_hostnqn);
	copy_name(m->subsystem_nqn, sizeof(m->subsystem_nqn), subsystem, layout.subsystem_subnqn);
	copy_name(m->host_address, sizeof(m->host_address), qpair, layout.tqpair_host_address);
	copy_name(m->target_address, sizeof(m->target_address), qpair, layout.tqpair_target_address);
	if (layout.tqpair_host_port != SPDK_ABSENT)
		READ(m->host_port, qpair, layout.tqpair_host_port);
	if (layout.tqpair_target_port != SPDK_ABSENT)
		READ(m->target_port, qpair, layout.tqpair_target_port);
	if (layout.qpair_group != SPDK_ABSENT && layout.group_thread != SPDK_ABSENT) {
		READ(group, qpair, layout.qpair_group);
		if (group)
			READ(thread, group, layout.group_thread);
	}
	copy_name(m->served_by, sizeof(m->served_by), thread, layout.thread_name);
	bpf_ringbuf_submit(m, BPF_RB_NO_WAKEUP);
	return 1;
}

/* The connection of a queue pair that has a command now. */
static __always_inline struct connection *connection_of(__u64 qpair, __u64 now)
{
	struct connection *known = bpf_map_lookup_elem(&connections, &qpair);
	struct connection c = {};
	__u64 sock = 0;
	int fd = -1;

	if (known && known->announced)
		return known;
	if (known && known->queue && known->qid == 0)
		return known;
	if (known) {
		c = *known;
	} else {
		c.came = now;
		c.existed = 1;
	}
	if (READ(c.qid, qpair, layout.qpair_qid))
		return 0;
	if (!c.queue)
		c.queue = __sync_fetch_and_add(&last_queue, 1) + 1;
	if (c.qid != 0) {
		if (layout.sock_fd != SPDK_NO_FD && !READ(sock, qpair, layout.tqpair_sock) && sock)
			READ(fd, sock, (__s64)layout.sock_fd);
		if (!c.socket) {
			c.socket = socket_key(fd);
			watch(c.socket);
		}
		c.announced = announce(qpair, &c, fd);
	}
	bpf_map_update_elem(&connections, &qpair, &c, BPF_ANY);
	return bpf_map_lookup_elem(&connections, &qpair);
}

/*
 * An entry is there when its request is taken again. On the same connection, its command was answered: without
 * passing EXECUTED where it could not be executed (an SGL that is too long, a broken fused pair), or with a flush
 * that is not seen. On another one, its queue pair died.
 */
static __always_inline void left_over(struct spdk_in_flight *old, __u64 req, __u64 queue)
{
	if (old->command.queue == queue)
		send_command(&old->command);
	else
		count(FAB_LOST_UNFINISHED);
	end(old, req);
}

/* t_recv: the request is NEW. Its SQE is still in the PDU that was received. */
static __always_inline void received(__u64 req, __u64 now)
{
	struct spdk_in_flight *e;
	struct connection *c;
	struct sqe sqe = {};
	__u64 qpair = 0, pdu = 0;

	if (READ(qpair, req, layout.request_qpair) || READ(pdu, qpair, layout.tqpair_pdu) ||
	    READ(sqe, pdu, layout.pdu_sqe)) {
		count(FAB_SEEN);
		count(FAB_LOST_READ);
		return;
	}
	if (sqe.opcode == OPC_FABRIC) {
		if ((sqe.nsid & 0xff) == FCTYPE_CONNECT)
			connecting(qpair, now);
		return;
	}
	c = connection_of(qpair, now);
	if (!c) {
		count(FAB_SEEN);
		count(FAB_LOST_MAP);
		return;
	}
	if (c->qid == 0)
		return;
	count(FAB_SEEN);
	e = find(req);
	if (e)
		left_over(e, req, c->queue);
	if (!kept(&sqe)) {
		count(FAB_UNSAMPLED);
		return;
	}
	e = claim(req);
	if (!e) {
		count(FAB_LOST_MAP);
		return;
	}
	clear(e);
	identify(&e->command, &sqe);
	e->command.queue = c->queue;
	e->command.ts[FAB_T_RECV] = now;
	e->socket = c->socket;
	e->holder = qpair;
	e->identified = 1;
}

/* t_data: all data of a write that had its R2T is there. In-capsule writes pass here too, and have no t_data. */
static __always_inline void data_complete(__u64 req, __u64 now)
{
	struct spdk_in_flight *e = find(req);

	if (!e || !e->command.r2ts || e->command.ts[FAB_T_DATA])
		return;
	e->command.ts[FAB_T_DATA] = now;
}

/*
 * A command that is answered and was not seen to begin: one of the unsampled, or begun before recording. Only
 * without sampling can that be told.
 */
static __always_inline void no_start(__u64 req)
{
	__u64 qpair = 0, cmd = 0;
	__u16 qid = 0;
	__u8 opcode = 0;

	if (common.limit == 0xffffffff &&
	    !READ_BOTH(qpair, cmd, req, layout.request_qpair, layout.request_cmd) &&
	    !READ(qid, qpair, layout.qpair_qid) && qid && !READ(opcode, cmd, 0) && opcode != OPC_FABRIC)
		count(FAB_NO_START);
}

/*
 * t_resp: the completion entry is final and the transport has it. Storage has called back right before, on the same
 * thread and down the same calls; or it was another thread, and thread_message has seen that.
 */
static __always_inline void responding(__u64 req, __u64 now)
{
	struct spdk_in_flight *e = find(req);
	__u16 status = 0;
	__u64 rsp = 0;

	if (!e) {
		no_start(req);
		return;
	}
	if (e->command.ts[FAB_T_RESP])
		return;
	e->command.ts[FAB_T_RESP] = now;
	if (layout.done_with_response && e->command.ts[FAB_T_SUBMIT] && !e->command.ts[FAB_T_DONE])
		e->command.ts[FAB_T_DONE] = now;
	/* CQE dword 3, upper half: phase, SC, SCT. */
	if (!READ(rsp, req, layout.request_rsp) && !READ(status, rsp, 14))
		e->command.status = status >> 1 & 0x7ff;
	e->answered = 1;
	if (layout.r2t_at_queueing || !await_flush(e, req, FAB_T_SENT)) {
		send_command(&e->command);
		end(e, req);
	}
}

/* A zero-copy read is answered as soon as storage has lent its buffer; a write has yet to be executed then. */
static __always_inline void lent(__u64 req, __u64 now)
{
	struct spdk_in_flight *e = find(req);

	if (e && (e->command.opcode & 3) == 2)
		responding(req, now);
}

/*
 * The request is freed, as a dying queue pair does with all of its own. The places where others are freed are
 * not among the hook's where that can be had; else most that pass here are over already.
 */
static __always_inline void freed(__u64 req)
{
	struct spdk_in_flight *e = find(req);
	__u8 state = 0;

	if (!e)
		return;
	if (!e->answered &&
	    (layout.qpair_state == SPDK_ABSENT || layout.qpair_enabled == SPDK_ABSENT ||
	     READ(state, e->holder, layout.qpair_state) || state != layout.qpair_enabled))
		count(FAB_LOST_UNFINISHED);
	else
		send_command(&e->command);
	end(e, req);
}

/*
 * t_recv, t_data, t_resp, and t_done with it: nvmf_tcp_req_process(transport, tcp_req) is the state machine that
 * every step of a request from outside enters, and the state at its entry says which step this is. It is local
 * to its file and far too large to be inlined, in every version known. Best at the instructions that call it, but for
 * those that free a request.
 */
SEC("uprobe")
int req_process(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 req;
	__u32 state = 0;

	if (!ours())
		return 0;
	req = argument(ctx, 0);
	if (READ(state, req, layout.tcp_req_state))
		return 0;
	if (state == layout.state_new)
		received(req, now);
	else if (state == layout.state_executed || state == layout.state_ready_to_complete)
		responding(req, now);
	else if (state == layout.state_completed)
		freed(req);
	else if (state == layout.state_ready_to_execute)
		data_complete(req, now);
	else if (state == layout.state_zcopy_started)
		lent(req, now);
	return 0;
}

/*
 * t_r2t: nvmf_tcp_send_r2t_pdu(tqpair, tcp_req), best at the instructions that call it. Only R2T writes pass
 * here. It queues the R2T; the flush that comes next sends it.
 */
SEC("uprobe")
int send_r2t(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	struct spdk_in_flight *e;
	__u64 req;

	if (!ours())
		return 0;
	req = argument(ctx, 0);
	e = find(req);
	if (!e)
		return 0;
	if (!e->command.r2ts) {
		if (layout.r2t_at_queueing)
			e->command.ts[FAB_T_R2T] = now;
		else
			await_flush(e, req, FAB_T_R2T);
	}
	if (e->command.r2ts != 0xff)
		e->command.r2ts += 1;
	return 0;
}

static __always_inline void submitted(__u64 req, __u64 now)
{
	struct spdk_in_flight *e = find(req);

	if (e && !e->command.ts[FAB_T_SUBMIT])
		e->command.ts[FAB_T_SUBMIT] = now;
}

/*
 * t_submit: bdev_io_submit(bdev_io), before QoS queueing and splitting, which are storage's. Stacked bdevs
 * and split children pass here as well; their caller_ctx is no request. An unmap's caller_ctx is nvmf's own
 * structure that holds the request.
 */
SEC("uprobe")
int bdev_submit(struct pt_regs *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 bdev_io, caller = 0;
	struct spdk_in_flight *e;
	__u8 type = 0;

	if (!ours())
		return 0;
	bdev_io = argument(ctx, 0);
	if (READ(caller, bdev_io, layout.bdev_io_caller_ctx) || !caller)
		return 0;
	e = find(caller);
	if (!e) {
		/* Unsampled, of another bdev, or an unmap. */
		if (layout.unmap_req == SPDK_ABSENT || layout.bdev_io_type == SPDK_ABSENT ||
		    READ(type, bdev_io, layout.bdev_io_type) || type != layout.type_unmap ||
		    READ(caller, caller, layout.unmap_req))
			return 0;
		e = find(caller);
		if (!e)
			return 0;
	}
	if (!e->command.ts[FAB_T_SUBMIT])
		e->command.ts[FAB_T_SUBMIT] = now;
	return 0;
}

/* t_submit, next rung: spdk_nvmf_request_exec(req), which still has the checks of the nvmf layer ahead. */
SEC("uprobe")
int request_exec(struct pt_regs *ctx)
{
	if (ours())
		submitted(argument(ctx, 0), bpf_ktime_get_ns());
	return 0;
}

static __always_inline void done(__u64 req, __u64 now)
{
	struct spdk_in_flight *e = find(req);

	if (e && !e->command.ts[FAB_T_DONE])
		e->command.ts[FAB_T_DONE] = now;
}

/*
 * t_done: spdk_nvmf_request_complete(req): what every completion of storage calls first, also those that
 * have a callback of their own (unmap, zero-copy) and those that never reached a bdev.
 */
SEC("uprobe")
int request_complete(struct pt_regs *ctx)
{
	if (ours())
		done(argument(ctx, 0), bpf_ktime_get_ns());
	return 0;
}

/*
 * t_done of the few that complete on another thread than their queue pair's, where the others' is taken with t_resp:
 * spdk_nvmf_request_complete(req) sends a message, spdk_thread_send_msg(thread, function, req).
 */
SEC("uprobe")
int thread_message(struct pt_regs *ctx)
{
	if (ours())
		done(argument(ctx, 0), bpf_ktime_get_ns());
	return 0;
}

/* t_done where that is inlined: nvmf_bdev_ctrlr_complete_cmd(bdev_io, success, req), the bdev's callback. */
SEC("uprobe")
int bdev_complete(struct pt_regs *ctx)
{
	if (ours())
		done(argument(ctx, 0), bpf_ktime_get_ns());
	return 0;
}

/* Event: nvmf_prop_set_cc(ctrlr, cc): the host enables, resets or shuts down its controller. */
SEC("uprobe")
int set_cc(struct pt_regs *ctx)
{
	__u64 ctrlr = argument(ctx, 0), subsystem = 0;
	__u32 before = 0;

	if (!ours() || layout.ctrlr_cc == SPDK_ABSENT || READ(before, ctrlr, layout.ctrlr_cc))
		return 0;
	READ(subsystem, ctrlr, layout.ctrlr_subsys);
	event(SPDK_EVENT_CC, 0, before, argument(ctx, 1), subsystem ? subsystem + layout.subsystem_subnqn : 0);
	return 0;
}

/* Event: USDT or function nvmf_ctrlr_destruct; argument 0 is the controller. */
SEC("uprobe")
int ctrlr_destruct(struct pt_regs *ctx)
{
	__u64 ctrlr = argument(ctx, 0), subsystem = 0;
	__u16 cntlid = 0;

	if (!ours())
		return 0;
	READ(cntlid, ctrlr, layout.ctrlr_cntlid);
	READ(subsystem, ctrlr, layout.ctrlr_subsys);
	event(SPDK_EVENT_DESTRUCT, 0, cntlid, 0, subsystem ? subsystem + layout.subsystem_subnqn : 0);
	return 0;
}

/*
 * Event: USDT nvmf_subsystem_change_state, else nvmf_subsystem_state_change; argument 0 is the subsystem's NQN,
 * argument 1 the state asked for. A pause explains commands that wait.
 */
SEC("uprobe")
int subsystem_change(struct pt_regs *ctx)
{
	if (ours())
		event(SPDK_EVENT_SUBSYSTEM, 0, 0, argument(ctx, 1), argument(ctx, 0));
	return 0;
}
