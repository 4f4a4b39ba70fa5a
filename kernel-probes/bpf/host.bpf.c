// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The Linux NVMe/TCP and NVMe/RDMA host: one record a command, from the block layer's queue to its end.
 *
 * A command's entry is made at nvme_setup_cmd, the only moment when its identity can be read: NVMe/TCP
 * reuses the command's memory for H2CData headers later, and the generation count moves on before the
 * completion hooks run. Every later hook finds the entry by the request's address and only adds a time.
 *
 * What belongs to one transport alone stands behind record_tcp or record_rdma: the verifier knows their
 * values and leaves out what is behind a false one, so that types of a module that is not there do no harm.
 *
 * Each boundary has several programs; the loader turns on the one that this kernel can attach. A program
 * that is attached with fentry and its twin for kprobe share one body, which is told what it may load
 * (`direct`, READ).
 */
#include "kernel.bpf.h"

/* Set before loading. */

/* The transports whose commands are taken: those whose driver is there. */
const volatile bool record_tcp = true;
const volatile bool record_rdma = true;
/* Addresses of nvme_tcp_mq_ops and nvme_rdma_mq_ops, 0 when the kernel does not tell: then they are learned
 * from the first command. */
const volatile __u64 tcp_mq_ops = 0;
const volatile __u64 rdma_mq_ops = 0;
/* Bit of a bio's flags that says that block_bio_queue was fired for it. */
const volatile __u32 bio_told = 0;
/* No hook tells of reconnects: find them by the connection's local port, at each command. */
const volatile bool watch_port = false;

/* What tcp_mq_ops and rdma_mq_ops would have been told. */
__u64 learned_tcp_mq_ops = 0;
__u64 learned_rdma_mq_ops = 0;

/* A command between its set-up and its end. */
struct in_flight {
	struct fab_command record;
	__u64 driver_queue; /* struct nvme_tcp_queue * or struct nvme_rdma_queue * */
	__u64 r2t_since; /* when the R2T that is not answered yet was seen, 0 for none */
	__u8 transport; /* enum kernel_transport */
	bool plain; /* nothing encrypts below: stream positions are those of the wire */
};

/* By struct request *. */
#include "in_flight.bpf.h"

struct queue_name {
	__u64 ctrl; /* struct nvme_ctrl * */
	__u64 qid;
};

struct queue {
	__u64 key; /* 0: not announced yet */
	__u64 connected; /* when it was seen to connect, 0 when it was not */
	__u32 port; /* the connection's local port, when watch_port */
	bool plain;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct queue_name);
	__type(value, struct queue);
} queues SEC(".maps");

/* The driver's part of a request lies behind it. */
static __always_inline void *behind(struct request *rq)
{
	return (void *)rq + bpf_core_type_size(struct request);
}

static __always_inline struct request *before(void *req)
{
	return req - bpf_core_type_size(struct request);
}

/* No transport that is recorded. */
#define NO_TRANSPORT (-1)

static __always_inline __u64 tcp_operations(void)
{
	return tcp_mq_ops ? tcp_mq_ops : learned_tcp_mq_ops;
}

static __always_inline __u64 rdma_operations(void)
{
	return rdma_mq_ops ? rdma_mq_ops : learned_rdma_mq_ops;
}

/* The transport whose I/O queues have these operations. */
static __always_inline int transport_of(__u64 ops)
{
	if (record_tcp && ops == tcp_operations())
		return KERNEL_TCP;
	if (record_rdma && ops == rdma_operations())
		return KERNEL_RDMA;
	return NO_TRANSPORT;
}

/* Whether operations that transport_of does not know can be none of a recorded transport's. */
static __always_inline bool all_known(void)
{
	return (!record_tcp || tcp_operations()) && (!record_rdma || rdma_operations());
}

/* The transport of a controller, by the name that its driver gives. */
static __always_inline int transport_named(struct nvme_ctrl *ctrl)
{
	char name[8] = {};

	bpf_probe_read_kernel_str(name, sizeof(name), BPF_CORE_READ(ctrl, ops, name));
	if (record_tcp && name[0] == 't' && name[1] == 'c' && name[2] == 'p' && name[3] == 0)
		return KERNEL_TCP;
	if (record_rdma && name[0] == 'r' && name[1] == 'd' && name[2] == 'm' && name[3] == 'a' && name[4] == 0)
		return KERNEL_RDMA;
	return NO_TRANSPORT;
}

static __always_inline void tell(__u32 kind, struct nvme_ctrl *ctrl, __u32 qid)
{
	if (transport_named(ctrl) == NO_TRANSPORT)
		return;
	send_event(kind, BPF_CORE_READ(ctrl, instance), qid, 0);
}

/* A disk of the multipath head has no hardware queues (mq_ops), so it is known by its name. */
static __always_inline int on_bio(struct bio *bio, __u64 ops, const char *disk)
{
	if (ops && all_known()) {
		if (transport_of(ops) == NO_TRANSPORT)
			return 0;
	} else if (disk[0] != 'n' || disk[1] != 'v' || disk[2] != 'm' || disk[3] != 'e') {
		return 0;
	}
	stamp((__u64)bio, bpf_ktime_get_ns());
	return 0;
}

/*
 * h_queued, first choice: a bio enters the block layer. The event comes once for each bio; through native
 * multipath that is when nvme0n1 gets it, not when nvme0c0n1 does.
 */
SEC("tp_btf/block_bio_queue")
int BPF_PROG(bio_queue_tp, struct bio *bio)
{
	struct gendisk *disk;

	if (!recording)
		return 0;
	disk = bio->bi_bdev->bd_disk;
	return on_bio(bio, (__u64)disk->queue->mq_ops, disk->disk_name);
}

/* The function that the block layer calls right before it fires that event, or would have fired it. */
SEC("kprobe/blk_cgroup_bio_start")
int BPF_KPROBE(bio_queue_kprobe, struct bio *bio)
{
	struct gendisk *disk;
	char name[4] = {};

	if (!recording || BPF_CORE_READ(bio, bi_flags) >> bio_told & 1)
		return 0;
	disk = BPF_CORE_READ(bio, bi_bdev, bd_disk);
	bpf_core_read(name, sizeof(name), &disk->disk_name);
	return on_bio(bio, (__u64)BPF_CORE_READ(disk, queue, mq_ops), name);
}

/*
 * h_queued of a bio that was too large: its front part goes on as a new bio for which there is no event of
 * its own, chained to what is left of the one that there was an event for.
 */
SEC("tp_btf/block_split")
int BPF_PROG(bio_split_tp, struct bio *front)
{
	__u64 queued = stamped((__u64)front->bi_private);

	if (queued)
		stamp((__u64)front, queued);
	return 0;
}

/* h_driver: the request is handed to the driver. Called again after the driver was busy: the last counts. */
static __always_inline int on_driver(const struct blk_mq_queue_data *bd, const bool direct)
{
	if (recording)
		stamp((__u64)READ(bd, rq), bpf_ktime_get_ns());
	return 0;
}

BOTH(queue_rq, nvme_tcp_queue_rq, on_driver(bd, direct), void *hctx, const struct blk_mq_queue_data *bd)

BOTH(rdma_queue_rq, nvme_rdma_queue_rq, on_driver(bd, direct), void *hctx, const struct blk_mq_queue_data *bd)

/* Finds out whether these are the operations of a transport's I/O queues, from one of their commands. */
static __always_inline int learn(struct request *rq, struct nvme_request *nvme, __u64 ops)
{
	int transport;

	if (all_known())
		return NO_TRANSPORT;
	/* The admin queue has operations of its own, and no queue data. */
	if (!BPF_CORE_READ(rq, q, queuedata))
		return NO_TRANSPORT;
	transport = transport_named(BPF_CORE_READ(nvme, ctrl));
	if (transport == KERNEL_TCP)
		learned_tcp_mq_ops = ops;
	else if (transport == KERNEL_RDMA)
		learned_rdma_mq_ops = ops;
	return transport;
}

static __always_inline __u16 local_port(struct in_flight *command)
{
	struct socket_address end = {};

	if (record_tcp && command->transport == KERNEL_TCP) {
		struct nvme_tcp_queue *queue = (void *)command->driver_queue;

		return BPF_CORE_READ(queue, sock, sk, __sk_common.skc_num);
	}
	if (record_rdma && command->transport == KERNEL_RDMA) {
		struct nvme_rdma_queue *queue = (void *)command->driver_queue;

		struct rdma_cm_id *id = BPF_CORE_READ(queue, cm_id);

		bpf_probe_read_kernel(&end, sizeof(end),
				      __builtin_preserve_access_index(&id->route.addr.src_addr));
	}
	return bpf_ntohs(end.port);
}

/* Tells the loader of a queue; false when the ring has no room. */
static __always_inline bool announce(struct queue *queue, struct nvme_ctrl *ctrl, __u16 qid,
				     struct in_flight *command, __u64 now)
{
	struct kernel_queue *m = bpf_ringbuf_reserve(&ring, sizeof(*m), 0);
	char *nqn;

	if (!m)
		return false;
	__builtin_memset(m, 0, sizeof(*m));
	m->message = KERNEL_MSG_QUEUE;
	m->key = queue->key;
	m->came = queue->connected ? queue->connected : now;
	m->existed = !queue->connected;
	m->qid = qid;
	m->instance = BPF_CORE_READ(ctrl, instance);
	m->cntlid = BPF_CORE_READ(ctrl, cntlid);
	nqn = BPF_CORE_READ(ctrl, opts, subsysnqn);
	bpf_probe_read_kernel_str(m->subsystem_nqn, sizeof(m->subsystem_nqn), nqn);
	nqn = (char *)BPF_CORE_READ(ctrl, opts, host);
	if (nqn)
		bpf_probe_read_kernel_str(m->host_nqn, sizeof(m->host_nqn),
					  nqn + bpf_core_field_offset(struct nvmf_host, nqn));
	m->io_cpu = KERNEL_NO_CPU;
	if (record_tcp && command->transport == KERNEL_TCP) {
		struct nvme_tcp_queue *driver_queue = (void *)command->driver_queue;
		struct sock *sk = BPF_CORE_READ(driver_queue, sock, sk);

		m->io_cpu = BPF_CORE_READ(driver_queue, io_cpu);
		tcp_ends(m, sk);
		queue->plain = sk && !m->encrypted;
	} else if (record_rdma && command->transport == KERNEL_RDMA) {
		struct nvme_rdma_queue *driver_queue = (void *)command->driver_queue;

		rdma_ends(m, BPF_CORE_READ(driver_queue, cm_id));
	}
	bpf_ringbuf_submit(m, ring_flags());
	return true;
}

/* The queue of a command: known, or announced now. False when that did not work. */
static __always_inline bool queue_of(struct in_flight *command, struct nvme_ctrl *ctrl, __u16 qid, __u64 now)
{
	struct queue_name name = { .ctrl = (__u64)ctrl, .qid = qid };
	struct queue *known = bpf_map_lookup_elem(&queues, &name);
	struct queue queue = {};

	if (known && known->key && (!watch_port || known->port == local_port(command))) {
		command->record.queue = known->key;
		command->plain = known->plain;
		return true;
	}
	if (known)
		queue.connected = known->key ? now : known->connected;
	queue.key = new_queue_key();
	if (watch_port)
		queue.port = local_port(command);
	if (!announce(&queue, ctrl, qid, command, now))
		return false;
	/* Another CPU may have announced it meanwhile: then there are two keys for one queue, of which the
	 * later one stays, and the loader sees by the port that they are one. */
	bpf_map_update_elem(&queues, &name, &queue, BPF_ANY);
	command->record.queue = queue.key;
	command->plain = queue.plain;
	return true;
}

/* What is taken from a request when its command is set up. */
struct set_up {
	struct blk_mq_hw_ctx *hctx;
	struct nvme_ctrl *ctrl;
	__u64 bio;
	__u64 biotail;
	__u64 started;
	bool retried;
};

static __always_inline void read_set_up(struct set_up *to, struct request *rq, const bool direct)
{
	void *nvme = behind(rq);
	struct block driver;

	read_block(&driver, nvme);
	to->ctrl = MEMBER(&driver, nvme, struct nvme_request, ctrl);
	to->retried = MEMBER(&driver, nvme, struct nvme_request, retries);
	if (direct) {
		to->hctx = rq->mq_hctx;
		to->bio = (__u64)rq->bio;
		to->biotail = (__u64)rq->biotail;
		to->started = rq->start_time_ns;
	} else {
		struct block request[2];

		read_block(&request, rq);
		to->hctx = MEMBER(&request, rq, struct request, mq_hctx);
		to->bio = (__u64)MEMBER(&request, rq, struct request, bio);
		to->biotail = (__u64)MEMBER(&request, rq, struct request, biotail);
		to->started = MEMBER(&request, rq, struct request, start_time_ns);
	}
}

/* `earlier` is the same command, set up before. */
static __always_inline int begin(struct request *rq, const struct sqe *sqe, int transport,
				 struct in_flight *earlier, const bool direct)
{
	__u64 now = bpf_ktime_get_ns(), at;
	struct blk_mq_hw_ctx *hctx;
	struct set_up set_up;

	read_set_up(&set_up, rq, direct);
	hctx = set_up.hctx;
	{
		struct in_flight command = {};

		identify(&command.record, sqe);
		command.transport = transport;
		if (set_up.retried)
			command.record.flags |= FAB_FLAG_RETRY;
		command.driver_queue = (__u64)READ(hctx, driver_data);
		if (!queue_of(&command, set_up.ctrl, READ(hctx, queue_num) + 1, now)) {
			count(FAB_LOST_RING);
			if (earlier)
				unfollow(rq);
			return 0;
		}

		if (earlier) {
			command.record.ts[FAB_H_QUEUED] = earlier->record.ts[FAB_H_QUEUED];
		} else {
			at = set_up.bio ? stamped(set_up.bio) : 0;
			command.record.ts[FAB_H_QUEUED] = at ? at : set_up.started;
			if (set_up.bio && set_up.bio != set_up.biotail)
				command.record.flags |= FAB_FLAG_MERGED;
		}
		/* An older stamp is of the request's last use. */
		at = stamped((__u64)rq);
		command.record.ts[FAB_H_DRIVER] = at && at >= command.record.ts[FAB_H_QUEUED] ? at : now;

		if (earlier)
			*earlier = command;
		else if (!follow(rq, &command))
			count(FAB_LOST_MAP);
	}
	return 0;
}

/*
 * The command's identity, and where it starts to be seen: not a boundary of its own, and h_driver's second
 * choice. It comes once for each attempt. What is not told as `cmd` is found behind the request.
 */
static __always_inline int on_setup(struct request *rq, struct nvme_command *cmd, const bool direct)
{
	struct nvme_request *nvme = behind(rq);
	struct in_flight *earlier;
	struct sqe sqe;
	int transport;
	__u64 ops;

	if (!recording)
		return 0;
	ops = (__u64)READ2(rq, q, mq_ops);
	transport = transport_of(ops);
	if (transport == NO_TRANSPORT)
		transport = learn(rq, nvme, ops);
	/* Other drivers' requests have something else behind them. */
	if (transport == NO_TRANSPORT)
		return 0;
	if (!cmd)
		cmd = BPF_CORE_READ(nvme, cmd);
	if (bpf_probe_read_kernel(&sqe, sizeof(sqe), cmd)) {
		count(FAB_SEEN);
		count(FAB_LOST_READ);
		return 0;
	}
	if (sqe.opcode == FABRICS_COMMAND)
		return 0;

	earlier = find(rq);
	/* The driver may be busy and give a command back: it is set up once more. NVMe/RDMA may find only at the
	 * queue pair that there is no room. */
	if (earlier && ((earlier->record.ts[FAB_H_SENT] && transport != KERNEL_RDMA) ||
			earlier->record.ts[FAB_H_DONE] || earlier->record.cid != sqe.cid)) {
		/* This is another one; the end of that one was not seen. */
		if (earlier->record.ts[FAB_H_DONE])
			send_record(&earlier->record);
		else
			count(FAB_LOST_UNFINISHED);
		unfollow(rq);
		earlier = 0;
	}
	if (!is_sampled(&sqe)) {
		count(FAB_UNSAMPLED);
		return 0;
	}
	if (!earlier)
		count(FAB_SEEN);
	return begin(rq, &sqe, transport, earlier, direct);
}

/* First choice. The arguments of a module's tracepoint may be null as far as the verifier knows (6.12). */
SEC("tp_btf/nvme_setup_cmd")
int BPF_PROG(setup_tp, struct request *rq, struct nvme_command *cmd)
{
	if (!rq || !cmd)
		return 0;
	return on_setup(rq, cmd, true);
}

/* Where the module's type information does not tell of the tracepoint. */
SEC("raw_tp/nvme_setup_cmd")
int BPF_PROG(setup_raw, struct request *rq, struct nvme_command *cmd)
{
	return on_setup(rq, cmd, false);
}

/* Where there is no tracepoint: the end of the function that it would be in. */
SEC("fexit/nvme_setup_cmd")
int BPF_PROG(setup_fexit, void *ns, struct request *rq, __u8 status)
{
	return status ? 0 : on_setup(rq, 0, true);
}

/*
 * What the drivers call next. Where the kernel can be preempted, it may stop a task inside the programs above
 * and skip their hits on that CPU until the task goes on; a program of a kprobe is not stopped.
 */
SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(setup_kprobe, struct request *rq)
{
	return on_setup(rq, 0, false);
}

/* The capsule's first byte is about to go to the socket. */
static __always_inline void sent(struct in_flight *command, struct socket *sock, const bool direct)
{
	struct tcp_sock *tcp;

	if (command->record.ts[FAB_H_SENT])
		return;
	command->record.ts[FAB_H_SENT] = bpf_ktime_get_ns();
	if (!command->plain)
		return;
	/* Only this task sends on the queue (it holds the send mutex), so the socket needs no lock. */
	tcp = (void *)READ(sock, sk);
	command->record.stream_position = BPF_CORE_READ(tcp, write_seq);
}

/* The first byte of an H2CData PDU is about to go to the socket. */
static __always_inline void data_sent(struct in_flight *command)
{
	__u64 now;

	/* An R2T may be answered in several PDUs: the first counts. */
	if (!command->r2t_since)
		return;
	now = bpf_ktime_get_ns();
	command->record.r2t_turnaround += now - command->r2t_since;
	command->r2t_since = 0;
	if (!command->record.ts[FAB_H_DATA_SENT])
		command->record.ts[FAB_H_DATA_SENT] = now;
}

/* h_sent, first choice: the function that sends a command PDU, before it sent any of it. */
static __always_inline int on_send_command(struct nvme_tcp_request *req, const bool direct)
{
	struct in_flight *command = find(before(req));

	if (command && !READ(req, offset))
		sent(command, READ2(req, queue, sock), direct);
	return 0;
}

BOTH(send_command, nvme_tcp_try_send_cmd_pdu, on_send_command(req, direct), struct nvme_tcp_request *req)

/* h_data_sent, first choice: the function that sends an H2CData header, before it sent any of it. */
static __always_inline int on_send_data(struct nvme_tcp_request *req, const bool direct)
{
	struct in_flight *command = find(before(req));

	if (command && !READ(req, offset))
		data_sent(command);
	return 0;
}

BOTH(send_data, nvme_tcp_try_send_data_pdu, on_send_data(req, direct), struct nvme_tcp_request *req)

/*
 * h_sent and h_data_sent where the compiler inlined those functions: the page that goes to a socket. The socket
 * leads to the driver's queue, and that to the request being sent.
 */
static __always_inline int on_sendpage(struct socket *sock, const bool direct)
{
	struct nvme_tcp_queue *queue = queue_of_socket(sock, direct);
	enum nvme_tcp_send_state state;
	struct nvme_tcp_request *req;
	struct in_flight *command;

	/* Others send pages, too: then this is a queue of their own, or none. */
	if (!queue || BPF_CORE_READ(queue, sock) != sock)
		return 0;
	req = BPF_CORE_READ(queue, request);
	command = req ? find(before(req)) : 0;
	if (!command || BPF_CORE_READ(req, offset))
		return 0;
	state = BPF_CORE_READ(req, state);
	if (state == bpf_core_enum_value(enum nvme_tcp_send_state, NVME_TCP_SEND_CMD_PDU))
		sent(command, sock, direct);
	else if (state == bpf_core_enum_value(enum nvme_tcp_send_state, NVME_TCP_SEND_H2C_PDU))
		data_sent(command);
	return 0;
}

BOTH(sendpage, kernel_sendpage, on_sendpage(sock, direct), struct socket *sock)

/*
 * h_r2t: the driver has parsed an R2T and makes its H2CData PDU. It comes again for each further PDU of the
 * same R2T, then with the length of the one before.
 */
static __always_inline int on_r2t(struct nvme_tcp_request *req, const bool direct)
{
	struct in_flight *command = find(before(req));
	__u64 now;

	if (!command || READ(req, pdu_len))
		return 0;
	now = bpf_ktime_get_ns();
	command->r2t_since = now;
	if (!command->record.ts[FAB_H_R2T])
		command->record.ts[FAB_H_R2T] = now;
	if (command->record.r2ts != 255)
		command->record.r2ts++;
	return 0;
}

BOTH(r2t, nvme_tcp_setup_h2c_data_pdu, on_r2t(req, direct), struct nvme_tcp_request *req)

/*
 * h_sent of NVMe/RDMA: the capsule is about to be posted, in one chain with the registration of its memory
 * where there is one. Of asynchronous event requests, which belong to no request, nothing is found.
 */
static __always_inline int on_post_send(struct nvme_rdma_qe *qe)
{
	struct nvme_rdma_request *req = (void *)qe - bpf_core_field_offset(struct nvme_rdma_request, sqe);
	struct in_flight *command = find(before(req));

	if (command && !command->record.ts[FAB_H_SENT])
		command->record.ts[FAB_H_SENT] = bpf_ktime_get_ns();
	return 0;
}

BOTH(post_send, nvme_rdma_post_send, on_post_send(qe), void *queue, struct nvme_rdma_qe *qe)

/*
 * h_recv of NVMe/TCP: the driver takes bytes from a queue's socket, one task at a time. What is in them is parsed in
 * functions that the compiler inlines, so the time stays with the queue until a command is completed from them.
 */
static __always_inline int on_receive(read_descriptor_t *desc, const bool direct)
{
	stamp((__u64)READ(desc, arg.data), bpf_ktime_get_ns());
	return 0;
}

BOTH(receive, nvme_tcp_recv_skb, on_receive(desc, direct), read_descriptor_t *desc)

/* A completion queue entry, as the NVMe base specification lays it out (figure 96). */
struct cqe {
	__u64 dw0_1;
	__u16 sqhd;
	__u16 sqid;
	__u16 cid;
	__u16 status;
};

/* A cid has the request's tag below, and above how often the request came back from the wire. */
#define TAG_BITS 12
#define TAGS ((1 << TAG_BITS) - 1)
#define GENERATIONS 0xf

/*
 * h_recv of NVMe/RDMA: the driver is handed a completion queue entry, and looks for its request by queue and
 * tag; so does this. The command may end here or later, when its send or the invalidation of its memory is
 * completed too, but the entry comes once.
 */
static __always_inline int on_receive_entry(struct ib_wc *wc, const bool direct)
{
	struct request **requests, *rq = 0;
	struct blk_mq_tags **tags, *own = 0;
	struct nvme_rdma_queue *queue, *first;
	__u64 now = bpf_ktime_get_ns(), index;
	struct in_flight *command;
	struct nvme_rdma_qe *qe;
	struct cqe cqe;

	if (READ(wc, status) != IB_WC_SUCCESS)
		return 0;
	queue = READ2(wc, qp, qp_context);
	qe = (void *)READ(wc, wr_cqe) - bpf_core_field_offset(struct nvme_rdma_qe, cqe);
	if (bpf_probe_read_kernel(&cqe, sizeof(cqe), BPF_CORE_READ(qe, data)))
		return 0;
	first = BPF_CORE_READ(queue, ctrl, queues);
	index = ((__u64)queue - (__u64)first) / bpf_core_type_size(struct nvme_rdma_queue);
	/* The first queue is the admin queue, which has tags of its own. */
	if (!index)
		return 0;
	tags = BPF_CORE_READ(queue, ctrl, tag_set.tags);
	bpf_probe_read_kernel(&own, sizeof(own), tags + index - 1);
	requests = BPF_CORE_READ(own, rqs);
	bpf_probe_read_kernel(&rq, sizeof(rq), requests + (cqe.cid & TAGS));
	command = find(rq);
	if (command && command->record.cid == cqe.cid && command->driver_queue == (__u64)queue &&
	    !command->record.ts[FAB_H_RECV] && !command->record.ts[FAB_H_DONE])
		command->record.ts[FAB_H_RECV] = now;
	return 0;
}

BOTH(recv_done, nvme_rdma_recv_done, on_receive_entry(wc, direct), void *cq, struct ib_wc *wc)

/* Status codes that only a host makes: path-related 70h and 71h, "host pathing error" and "aborted by
 * host" (NVMe base specification, 4.2.3.4). */
#define HOST_PATHING_ERROR 0x370
#define HOST_ABORTED 0x371
#define STATUS_BITS 0x7ff
/* nvme_request.flags, nvme.h of the driver. */
#define NVME_REQ_CANCELLED 1

/* A data pointer's last 16 bytes hold an SGL descriptor: with a key, as NVMe/RDMA has them for memory, its
 * length has three bytes, else four (NVMe base specification, 4.3.2). */
#define SGL_KEYED 4

/* The length of a command's data. NVMe/RDMA leaves a command as it was sent until its request is used again;
 * NVMe/TCP does not. `driver` is what lies behind the request. */
static __always_inline __u32 data_length(struct in_flight *command, void *behind, struct block *driver)
{
	if (record_tcp && command->transport == KERNEL_TCP)
		return MEMBER(driver, behind, struct nvme_tcp_request, data_len);
	if (record_rdma && command->transport == KERNEL_RDMA) {
		struct sqe sqe;
		__u32 length;

		if (bpf_probe_read_kernel(&sqe, sizeof(sqe), MEMBER(driver, behind, struct nvme_request, cmd)))
			return 0;
		length = (__u32)sqe.data[1];
		return sqe.data[1] >> 60 == SGL_KEYED ? length & 0xffffff : length;
	}
	return 0;
}

/* What a command came to; returns the low bits of the request's generation. */
static __always_inline __u8 conclude(struct in_flight *command, struct request *rq)
{
	void *nvme = behind(rq);
	struct block driver;

	if (read_block(&driver, nvme))
		return 0;
	command->record.bytes = data_length(command, nvme, &driver);
	command->record.status = MEMBER(&driver, nvme, struct nvme_request, status) & STATUS_BITS;
	if ((MEMBER(&driver, nvme, struct nvme_request, flags) & NVME_REQ_CANCELLED) ||
	    command->record.status == HOST_PATHING_ERROR || command->record.status == HOST_ABORTED)
		command->record.flags |= FAB_FLAG_CANCELED;
	return MEMBER(&driver, nvme, struct nvme_request, genctr) & GENERATIONS;
}

/* h_done: the driver completes the command, for whatever reason. */
static __always_inline int on_done(struct request *rq)
{
	struct in_flight *command = find(rq);
	__u64 at;

	if (!command || command->record.ts[FAB_H_DONE])
		return 0;
	command->record.ts[FAB_H_DONE] = bpf_ktime_get_ns();
	conclude(command, rq);
	/* NVMe/RDMA's entry has named its command. */
	if ((command->record.flags & FAB_FLAG_CANCELED) || command->transport != KERNEL_TCP)
		return 0;
	/* Bytes from before the command was sent are of another one: what brought this one was not seen. */
	at = stamped(command->driver_queue);
	if (at && at >= command->record.ts[FAB_H_SENT] && at >= command->record.ts[FAB_H_DATA_SENT])
		command->record.ts[FAB_H_RECV] = at;
	return 0;
}

/* First choice: still in the function that took the bytes from the socket. Other drivers' requests come here
 * too; they are not in the map. */
BOTH(done, blk_mq_complete_request_remote, on_done(rq), struct request *rq)

/* What a driver completes without an answer (canceled, timed out) comes through this, which calls the other one: a
 * compiler may inline that call (7.2), and then only this is seen. */
BOTH(cancel, blk_mq_complete_request, on_done(rq), struct request *rq)

/* Where the kernel can be preempted: see end_again_tp. */
SEC("fentry/blk_mq_complete_request_remote")
int BPF_PROG(done_again_fentry, struct request *rq)
{
	return on_done(rq);
}

/* Later by one interrupt or soft interrupt where the command completes on another CPU. */
SEC("tp_btf/nvme_complete_rq")
int BPF_PROG(done_tp, struct request *rq)
{
	return rq ? on_done(rq) : 0;
}

/* A command ended that is not in the map: it may have begun before recording did. */
static __always_inline int not_known(struct request *rq)
{
	__u64 started = rq->start_time_ns;

	if (recording && started && started < recording_since &&
	    transport_of((__u64)rq->q->mq_ops) != NO_TRANSPORT)
		count(FAB_NO_START);
	return 0;
}

/* h_end: the command is over, and its record goes out. */
static __always_inline int on_end(struct request *rq, struct in_flight *command)
{
	command->record.ts[FAB_H_END] = bpf_ktime_get_ns();
	/* It never came back, or h_done was missed: then the request's next cid is another one. */
	if (!command->record.ts[FAB_H_DONE] && conclude(command, rq) == command->record.cid >> TAG_BITS)
		command->record.flags |= FAB_FLAG_CANCELED;
	send_record(&command->record);
	unfollow(rq);
	return 0;
}

/* First choice. The driver completes requests whole, so the first event is the last. */
SEC("tp_btf/block_rq_complete")
int BPF_PROG(end_tp, struct request *rq)
{
	struct in_flight *command = find(rq);

	return command ? on_end(rq, command) : not_known(rq);
}

/*
 * Once more, where the kernel can be preempted. It may stop a task inside end_tp, and skips that program's hits on
 * its CPU until the task goes on; this one then takes them. As a rule it finds the command gone. A kprobe would not
 * do: requests are completed in interrupts, too, and one that hits inside another kprobe is skipped.
 */
SEC("tp_btf/block_rq_complete")
int BPF_PROG(end_again_tp, struct request *rq)
{
	struct in_flight *command = find(rq);

	return command ? on_end(rq, command) : 0;
}

/* Without the block layer's event: the NVMe core's, a little earlier. */
SEC("tp_btf/nvme_complete_rq")
int BPF_PROG(end_nvme_tp, struct request *rq)
{
	struct in_flight *command;

	if (!rq)
		return 0;
	command = find(rq);
	return command ? on_end(rq, command) : not_known(rq);
}

/*
 * An attempt failed and the request is queued anew: its command is over, with an end of its own on the wire
 * but none in the block layer. The next attempt is a command of its own that has waited since the same
 * h_queued. A request that the driver was too busy for comes here too, before it is done.
 */
SEC("tp_btf/block_rq_requeue")
int BPF_PROG(requeue_tp, struct request *rq)
{
	struct in_flight *command = find(rq);
	__u64 bio;

	if (!command || !command->record.ts[FAB_H_DONE])
		return 0;
	bio = (__u64)rq->bio;
	if (bio)
		stamp(bio, command->record.ts[FAB_H_QUEUED]);
	send_record(&command->record);
	unfollow(rq);
	return 0;
}

/*
 * Multipath takes the bios away and queues them on another path; the request then ends as if it were good.
 * The bios are as old as they were.
 */
static __always_inline int on_failover(struct request *rq, const bool direct)
{
	struct in_flight *command = find(rq);
	__u64 bio;

	if (!command)
		return 0;
	command->record.flags |= FAB_FLAG_FAILOVER;
	bio = (__u64)READ(rq, bio);
	if (bio)
		stamp(bio, command->record.ts[FAB_H_QUEUED]);
	return 0;
}

BOTH(failover, nvme_failover_req, on_failover(rq, direct), struct request *rq)

/* A queue is about to be connected, for the first time or again: what was known of it is of another epoch. */
static __always_inline int on_connect(struct nvme_ctrl *ctrl, __u16 qid)
{
	struct queue_name name = { .ctrl = (__u64)ctrl, .qid = qid };
	struct queue queue = { .connected = bpf_ktime_get_ns() };

	bpf_map_update_elem(&queues, &name, &queue, BPF_ANY);
	tell(KERNEL_EVENT_CONNECT, ctrl, qid);
	return 0;
}

BOTH(connect, nvmf_connect_io_queue, on_connect(ctrl, qid), struct nvme_ctrl *ctrl, __u16 qid)

/* The controller's life, for the gaps that it explains. Whether a change was allowed is known at the end. */
SEC("fexit/nvme_change_ctrl_state")
int BPF_PROG(state_fexit, struct nvme_ctrl *ctrl, enum nvme_ctrl_state state, bool changed)
{
	if (!changed)
		return 0;
	if (state == bpf_core_enum_value(enum nvme_ctrl_state, NVME_CTRL_RESETTING))
		tell(KERNEL_EVENT_RESETTING, ctrl, 0);
	else if (state == bpf_core_enum_value(enum nvme_ctrl_state, NVME_CTRL_LIVE))
		tell(KERNEL_EVENT_LIVE, ctrl, 0);
	else if (state == bpf_core_enum_value(enum nvme_ctrl_state, NVME_CTRL_CONNECTING))
		tell(KERNEL_EVENT_CONNECTING, ctrl, 0);
	else if (state == bpf_core_enum_value(enum nvme_ctrl_state, NVME_CTRL_DELETING))
		tell(KERNEL_EVENT_DELETING, ctrl, 0);
	else if (state == bpf_core_enum_value(enum nvme_ctrl_state, NVME_CTRL_DEAD))
		tell(KERNEL_EVENT_DEAD, ctrl, 0);
	return 0;
}

/* A command took too long. */
static __always_inline int on_timeout(struct request *rq)
{
	struct nvme_request *nvme = behind(rq);
	__u32 qid = BPF_CORE_READ(rq, q, queuedata) ? BPF_CORE_READ(rq, mq_hctx, queue_num) + 1 : 0;

	tell(KERNEL_EVENT_TIMEOUT, BPF_CORE_READ(nvme, ctrl), qid);
	return 0;
}

BOTH(timeout, nvme_tcp_timeout, on_timeout(rq), struct request *rq)

BOTH(rdma_timeout, nvme_rdma_timeout, on_timeout(rq), struct request *rq)
