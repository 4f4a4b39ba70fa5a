// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The Linux kernel target (nvmet) over NVMe/TCP and NVMe/RDMA: one record a command, from the capsule that
 * was read to the response's first byte.
 *
 * A command's entry is made when nvmet_req_init begins, which every transport calls once a command with the
 * submission queue entry in place: only there are those seen, too, that the target rejects while parsing
 * them. Every later hook finds the entry by the address of its nvmet_req, which stays the command's own until
 * its response is sent.
 */
#include "kernel.bpf.h"
#include "nvmet.h"

/* Set before loading. */

/* Addresses of nvmet_bio_done and bio_chain_endio: what ends a bio tells whose it is. 0 when the kernel hides
 * them; then the drive's own time stays unknown. */
const volatile __u64 end_of_command_bio = 0;
const volatile __u64 end_of_chained_bio = 0;
/* Commands that are rejected while they are parsed are not seen to begin. */
const volatile bool rejected_unseen = false;
/* No hook tells of the first byte that is sent: the record ends with the response. */
const volatile bool tcp_ends_with_response = false;

/* A command between its capsule and its response. */
struct in_flight {
	struct fab_command record;
	__u64 sq; /* struct nvmet_sq * */
	__u64 drive_since; /* when its first block request was issued, 0 for none */
	__u64 drive_until; /* when one of them was completed last */
};

/* By struct nvmet_req *. */
#include "in_flight.bpf.h"

/* Commands that were counted as lost and still run, so that their ends are not taken for those of commands
 * from before. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64); /* struct nvmet_req * */
	__type(value, __u8);
} losses SEC(".maps");

/* Whether there ever was one. */
__u32 had_losses = 0;

/* One connection of one queue. Its capsules are read by one task at a time, so what was read last stands
 * here. */
struct queue {
	__u64 key; /* 0: not announced yet */
	__u64 connected; /* when it was seen to connect, 0 when it was not */
	__u64 received_at; /* when the capsule began to be read that has no command yet, 0 for none */
	__u64 position; /* the stream position of its first byte, or FAB_NO_POSITION */
	__u16 cntlid;
	__u16 qid;
	bool plain; /* nothing encrypts below: stream positions are those of the wire */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64); /* struct nvmet_sq * */
	__type(value, struct queue);
} queues SEC(".maps");

#define container(pointer, type, member) ((type *)((void *)(pointer)-bpf_core_field_offset(type, member)))
#define member_of(pointer, type, member) ((void *)(pointer) + bpf_core_field_offset(type, member))

/* nvmet_fabrics_ops.type: the TRTYPE of the discovery log (NVMe base specification, figure 294). */
#define TRTYPE_RDMA 1
#define TRTYPE_TCP 3
/* Opcodes of the NVM command set. */
#define NVME_WRITE 1
#define NVME_READ 2

static __always_inline struct queue *queue_at(void *sq)
{
	__u64 key = (__u64)sq;

	return bpf_map_lookup_elem(&queues, &key);
}

static __always_inline struct nvmet_tcp_cmd *tcp_command(struct nvmet_req *req)
{
	return container(req, struct nvmet_tcp_cmd, req);
}

static __always_inline struct nvmet_req *tcp_req(struct nvmet_tcp_cmd *cmd)
{
	return member_of(cmd, struct nvmet_tcp_cmd, req);
}

static __always_inline struct nvmet_rdma_rsp *rdma_command(struct nvmet_req *req)
{
	return container(req, struct nvmet_rdma_rsp, req);
}

/* Of a discard that is several bios only the last tells whose it is, so it could be known in part only; flushes
 * have requests without a bio. */
static __always_inline bool has_drive(__u8 opcode)
{
	return opcode == NVME_READ || opcode == NVME_WRITE;
}

/* The command is over: its record goes out. Its completion stands until its memory is used again. */
static __always_inline void end(struct in_flight *command, struct nvmet_req *req)
{
	command->record.status = (BPF_CORE_READ(req, cqe, status) >> 1) & 0x7ff;
	command->record.bytes = BPF_CORE_READ(req, transfer_len);
	if (has_drive(command->record.opcode) && command->drive_since && command->drive_until > command->drive_since)
		command->record.drive = command->drive_until - command->drive_since;
	send_record(&command->record);
	unfollow(req);
}

static __always_inline void lose(__u64 key, __u32 counter)
{
	__u8 one = 1;

	count(counter);
	had_losses = 1;
	bpf_map_update_elem(&losses, &key, &one, BPF_ANY);
}

/* A queue begins: nothing that was known under its address is of it. */
static __always_inline int on_install(struct nvmet_req *req)
{
	struct queue queue = { .connected = bpf_ktime_get_ns(), .position = FAB_NO_POSITION };
	__u64 key = (__u64)BPF_CORE_READ(req, sq);

	bpf_map_update_elem(&queues, &key, &queue, BPF_ANY);
	return 0;
}

BOTH(install, nvmet_install_queue, on_install(req), struct nvmet_ctrl *ctrl, struct nvmet_req *req)

/*
 * t_recv: a capsule begins to be read, if any of it is `there`. The driver looks for one once more when there
 * is none, so the last time before a command is its own; a capsule that comes in pieces keeps the time of its
 * first. What comes between the look and the reading has no time of its own here: it would lie before the host
 * had sent it.
 */
static __always_inline void received(struct nvmet_sq *sq, __u64 position, bool there)
{
	struct queue *queue = queue_at(sq);

	if (!queue) {
		struct queue first = { .position = FAB_NO_POSITION };
		__u64 key = (__u64)sq;

		if (!BPF_CORE_READ(sq, qid))
			return;
		bpf_map_update_elem(&queues, &key, &first, BPF_NOEXIST);
		queue = queue_at(sq);
		if (!queue)
			return;
	}
	queue->received_at = there ? bpf_ktime_get_ns() : 0;
	queue->position = position;
}

/* What was read last has its command. */
static __always_inline void taken(struct queue *queue)
{
	queue->received_at = 0;
	queue->position = FAB_NO_POSITION;
}

static __always_inline int on_receive_tcp(struct nvmet_tcp_queue *queue, const bool direct)
{
	struct tcp_sock *tcp;
	__u32 position;

	if (!recording || READ(queue, offset))
		return 0;
	/* Only this task reads from the socket, so it needs no lock. */
	tcp = (void *)READ2(queue, sock, sk);
	position = BPF_CORE_READ(tcp, copied_seq);
	received(member_of(queue, struct nvmet_tcp_queue, nvme_sq), position, BPF_CORE_READ(tcp, rcv_nxt) != position);
	return 0;
}

BOTH(receive_tcp, nvmet_tcp_try_recv_pdu, on_receive_tcp(queue, direct), struct nvmet_tcp_queue *queue)

static __always_inline int on_receive_rdma(struct ib_wc *wc, const bool direct)
{
	struct nvmet_rdma_queue *queue;

	if (!recording)
		return 0;
	queue = (void *)READ2(wc, qp, qp_context);
	received(member_of(queue, struct nvmet_rdma_queue, nvme_sq), FAB_NO_POSITION, true);
	return 0;
}

BOTH(receive_rdma, nvmet_rdma_recv_done, on_receive_rdma(wc, direct), void *cq, struct ib_wc *wc)

/* Tells the loader of a queue; false when the ring has no room. */
static __always_inline bool announce(struct queue *queue, struct nvmet_req *req, struct nvmet_sq *sq, bool rdma,
				     __u64 now)
{
	struct kernel_queue *m = bpf_ringbuf_reserve(&ring, sizeof(*m), 0);
	struct nvmet_ctrl *ctrl;
	char *nqn;

	if (!m)
		return false;
	__builtin_memset(m, 0, sizeof(*m));
	ctrl = BPF_CORE_READ(sq, ctrl);
	queue->qid = BPF_CORE_READ(sq, qid);
	queue->cntlid = BPF_CORE_READ(ctrl, cntlid);
	queue->key = new_queue_key();
	m->message = KERNEL_MSG_QUEUE;
	m->key = queue->key;
	m->came = queue->connected ? queue->connected : now;
	m->existed = !queue->connected;
	m->qid = queue->qid;
	m->cntlid = queue->cntlid;
	m->instance = queue->cntlid;
	m->io_cpu = KERNEL_NO_CPU;
	nqn = BPF_CORE_READ(ctrl, subsys, subsysnqn);
	bpf_probe_read_kernel_str(m->subsystem_nqn, sizeof(m->subsystem_nqn), nqn);
	nqn = member_of(ctrl, struct nvmet_ctrl, hostnqn);
	bpf_probe_read_kernel_str(m->host_nqn, sizeof(m->host_nqn), nqn);
	if (rdma) {
		if (bpf_core_type_exists(struct nvmet_rdma_rsp))
			rdma_ends(m, BPF_CORE_READ(rdma_command(req), queue, cm_id));
	} else if (bpf_core_type_exists(struct nvmet_tcp_cmd)) {
		tcp_ends(m, BPF_CORE_READ(tcp_command(req), queue, sock, sk));
		queue->plain = m->family && !m->encrypted;
	}
	bpf_ringbuf_submit(m, ring_flags());
	return true;
}

/* The command's identity, and where it starts to be seen: not a boundary of its own, and t_recv's second
 * choice. */
static __always_inline int on_init(struct nvmet_req *req, struct nvmet_sq *sq, bool rdma)
{
	struct in_flight command = {};
	__u64 key = (__u64)req, sq_key = (__u64)sq, now;
	struct queue *queue;
	struct sqe sqe;

	if (!recording || !BPF_CORE_READ(sq, qid))
		return 0;
	if (bpf_probe_read_kernel(&sqe, sizeof(sqe), BPF_CORE_READ(req, cmd))) {
		count(FAB_SEEN);
		lose(key, FAB_LOST_READ);
		return 0;
	}
	/* Connect comes to a queue before it has its number, and its controller. */
	if (sqe.opcode == FABRICS_COMMAND || !BPF_CORE_READ(sq, ctrl))
		return 0;

	if (unfollow(req))
		/* Its memory was used again: its end was not seen. */
		count(FAB_LOST_UNFINISHED);
	if (had_losses)
		bpf_map_delete_elem(&losses, &key);
	if (!is_sampled(&sqe)) {
		count(FAB_UNSAMPLED);
		return 0;
	}
	count(FAB_SEEN);

	now = bpf_ktime_get_ns();
	queue = queue_at(sq);
	if (!queue) {
		struct queue first = { .position = FAB_NO_POSITION };

		bpf_map_update_elem(&queues, &sq_key, &first, BPF_NOEXIST);
		queue = queue_at(sq);
		if (!queue) {
			lose(key, FAB_LOST_MAP);
			return 0;
		}
	}
	if (!queue->key && !announce(queue, req, sq, rdma, now)) {
		taken(queue);
		lose(key, FAB_LOST_RING);
		return 0;
	}
	identify(&command.record, &sqe);
	command.sq = sq_key;
	command.record.queue = queue->key;
	command.record.ts[FAB_T_RECV] = now;
	if (queue->received_at)
		command.record.ts[FAB_T_RECV] = queue->received_at;
	if (queue->plain)
		command.record.stream_position = queue->position;
	taken(queue);
	if (!follow(req, &command))
		lose(key, FAB_LOST_MAP);
	return 0;
}

/*
 * First choice. The submission queue is the second argument of newer kernels and the third of older ones. It
 * is part of the transport's queue, to which the transport's command around the request points: where one of
 * the two is that, the command is of that transport. Other transports have other commands.
 */
static __always_inline int on_entry(struct nvmet_req *req, void *second, void *third)
{
	void *sq;

	if (bpf_core_type_exists(struct nvmet_tcp_cmd)) {
		sq = member_of(BPF_CORE_READ(tcp_command(req), queue), struct nvmet_tcp_queue, nvme_sq);
		if (sq == second || sq == third)
			return on_init(req, sq, false);
	}
	if (bpf_core_type_exists(struct nvmet_rdma_rsp)) {
		sq = member_of(BPF_CORE_READ(rdma_command(req), queue), struct nvmet_rdma_queue, nvme_sq);
		if (sq == second || sq == third)
			return on_init(req, sq, true);
	}
	return 0;
}

BOTH(init, nvmet_req_init, on_entry(req, second, third), struct nvmet_req *req, void *second, void *third)

/* After the command was parsed. */
static __always_inline int on_parsed(struct nvmet_req *req)
{
	__u32 type = BPF_CORE_READ(req, ops, type);

	return type == TRTYPE_TCP || type == TRTYPE_RDMA ? on_init(req, BPF_CORE_READ(req, sq), type == TRTYPE_RDMA)
							 : 0;
}

/* A module's tracepoint may have null arguments as far as the verifier knows (6.12). */
SEC("tp_btf/nvmet_req_init")
int BPF_PROG(init_tp, struct nvmet_req *req)
{
	return req ? on_parsed(req) : 0;
}

/* Where the module's type information does not tell of the tracepoint. */
SEC("raw_tp/nvmet_req_init")
int BPF_PROG(init_raw, struct nvmet_req *req)
{
	return on_parsed(req);
}

/* t_r2t: the host is asked for a write's data. */
static __always_inline void asked(struct in_flight *command)
{
	command->record.ts[FAB_T_R2T] = bpf_ktime_get_ns();
	if (command->record.r2ts != 255)
		command->record.r2ts++;
}

/* Over TCP: the function that sends an R2T, before it sent any of it. */
static __always_inline int on_send_r2t(struct nvmet_tcp_cmd *cmd, const bool direct)
{
	struct in_flight *command = find(tcp_req(cmd));

	/* The target sends one R2T for all of a command's data, if in pieces. */
	if (command && !command->record.ts[FAB_T_R2T] && !READ(cmd, offset))
		asked(command);
	return 0;
}

BOTH(send_r2t, nvmet_try_send_r2t, on_send_r2t(cmd, direct), struct nvmet_tcp_cmd *cmd)

/* Over RDMA: the READs are about to be posted. It comes again when the send queue had no room. */
static __always_inline int on_pull(struct nvmet_rdma_rsp *rsp, const bool direct)
{
	struct in_flight *command = find(member_of(rsp, struct nvmet_rdma_rsp, req));

	/* A command's second bit is set when data goes to the target (NVMe base specification, 3.3.3.1.1). */
	if (command && (command->record.opcode & 1) && READ(rsp, n_rdma)) {
		command->record.r2ts = 0;
		asked(command);
	}
	return 0;
}

BOTH(pull, nvmet_rdma_execute_command, on_pull(rsp, direct), struct nvmet_rdma_rsp *rsp)

/* t_data over RDMA: the READs are done. */
static __always_inline int on_pulled(struct ib_wc *wc, const bool direct)
{
	struct nvmet_rdma_rsp *rsp = container(READ(wc, wr_cqe), struct nvmet_rdma_rsp, read_cqe);
	struct in_flight *command = find(member_of(rsp, struct nvmet_rdma_rsp, req));

	if (command)
		command->record.ts[FAB_T_DATA] = bpf_ktime_get_ns();
	return 0;
}

BOTH(pulled, nvmet_rdma_read_data_done, on_pulled(wc, direct), void *cq, struct ib_wc *wc)

/*
 * t_submit: the command is given to its back end. The transport does so when all of its data is there, in the
 * function that read the last of it, so over TCP this is t_data of a write with an R2T, too.
 */
static __always_inline int on_submit(struct nvmet_req *req)
{
	struct in_flight *command = find(req);

	if (!command || command->record.ts[FAB_T_SUBMIT])
		return 0;
	command->record.ts[FAB_T_SUBMIT] = bpf_ktime_get_ns();
	if (command->record.ts[FAB_T_R2T] && !command->record.ts[FAB_T_DATA])
		command->record.ts[FAB_T_DATA] = command->record.ts[FAB_T_SUBMIT];
	return 0;
}

BOTH(bdev_rw, nvmet_bdev_execute_rw, on_submit(req), struct nvmet_req *req)
BOTH(bdev_flush, nvmet_bdev_execute_flush, on_submit(req), struct nvmet_req *req)
BOTH(bdev_dsm, nvmet_bdev_execute_dsm, on_submit(req), struct nvmet_req *req)
BOTH(bdev_zeroes, nvmet_bdev_execute_write_zeroes, on_submit(req), struct nvmet_req *req)
BOTH(bdev_append, nvmet_bdev_execute_zone_append, on_submit(req), struct nvmet_req *req)
BOTH(bdev_zones, nvmet_bdev_execute_zone_mgmt_recv, on_submit(req), struct nvmet_req *req)
BOTH(bdev_zone, nvmet_bdev_execute_zone_mgmt_send, on_submit(req), struct nvmet_req *req)
BOTH(file_rw, nvmet_file_execute_rw, on_submit(req), struct nvmet_req *req)
BOTH(file_flush, nvmet_file_execute_flush, on_submit(req), struct nvmet_req *req)
BOTH(file_dsm, nvmet_file_execute_dsm, on_submit(req), struct nvmet_req *req)
BOTH(file_zeroes, nvmet_file_execute_write_zeroes, on_submit(req), struct nvmet_req *req)
BOTH(passthru, nvmet_passthru_execute_cmd, on_submit(req), struct nvmet_req *req)

/* t_done: the back end is through with a command that it was given. */
static __always_inline int on_done(struct nvmet_req *req)
{
	struct in_flight *command = find(req);

	if (command && command->record.ts[FAB_T_SUBMIT] && !command->record.ts[FAB_T_DONE])
		command->record.ts[FAB_T_DONE] = bpf_ktime_get_ns();
	return 0;
}

BOTH(bdev_done, nvmet_bio_done, on_done(READ(bio, bi_private)), struct bio *bio)
BOTH(file_done, nvmet_file_io_done, on_done(container(iocb, struct nvmet_req, f.iocb)), struct kiocb *iocb)
BOTH(passthru_done, nvmet_passthru_req_done, on_done(READ(rq, end_io_data)), struct request *rq)

/* For commands that a back end completes where it was given them, or from a work item of its own; a few
 * instructions later where it does so from the functions above. */
SEC("tp_btf/nvmet_req_complete")
int BPF_PROG(complete_tp, struct nvmet_req *req)
{
	return req ? on_done(req) : 0;
}

SEC("raw_tp/nvmet_req_complete")
int BPF_PROG(complete_raw, struct nvmet_req *req)
{
	return on_done(req);
}

/* Whether a command that is not in the map is one that the hash keeps: it may have begun before recording did. Its
 * memory still holds it. */
static __always_inline bool may_be_older(struct nvmet_req *req, const bool direct)
{
	struct sqe sqe;

	return recording && !bpf_probe_read_kernel(&sqe, sizeof(sqe), READ(req, cmd)) &&
	       sqe.opcode != FABRICS_COMMAND && is_sampled(&sqe);
}

/* A response to such a command. */
static __always_inline void not_known(struct nvmet_req *req)
{
	__u64 key = (__u64)req;

	if (!BPF_CORE_READ(req, sq, qid) || (had_losses && !bpf_map_delete_elem(&losses, &key)))
		return;
	if (rejected_unseen && BPF_CORE_READ(req, cqe, status))
		return;
	count(FAB_NO_START);
}

/*
 * t_resp over TCP: the response is queued. So are R2Ts, by the same function, before the command is executed.
 * It may come twice, when a write was rejected before its in-capsule data was read: the last counts.
 */
static __always_inline int on_response_tcp(struct nvmet_req *req, const bool direct)
{
	struct in_flight *command = find(req);
	struct nvmet_tcp_cmd *cmd = tcp_command(req);

	if (!command && !may_be_older(req, direct))
		return 0;
	if (!READ2(req, cqe, status) && (BPF_CORE_READ(cmd, rbytes_done) < READ(req, transfer_len))) {
		__u8 opcode = 0;

		bpf_probe_read_kernel(&opcode, sizeof(opcode), READ(req, cmd));
		if (opcode & 1)
			return 0;
	}
	if (!command) {
		not_known(req);
		return 0;
	}
	command->record.ts[FAB_T_RESP] = bpf_ktime_get_ns();
	if (tcp_ends_with_response)
		end(command, req);
	return 0;
}

BOTH(response_tcp, nvmet_tcp_queue_response, on_response_tcp(req, direct), struct nvmet_req *req)

/* t_resp and t_sent over RDMA: the data's WRITE and the response's SEND are about to be posted, as one. */
static __always_inline int on_response_rdma(struct nvmet_req *req, const bool direct)
{
	struct in_flight *command = find(req);

	if (!command) {
		if (may_be_older(req, direct))
			not_known(req);
		return 0;
	}
	command->record.ts[FAB_T_RESP] = bpf_ktime_get_ns();
	command->record.ts[FAB_T_SENT] = command->record.ts[FAB_T_RESP];
	end(command, req);
	return 0;
}

BOTH(response_rdma, nvmet_rdma_queue_response, on_response_rdma(req, direct), struct nvmet_req *req)

/* t_sent over TCP: a response's first byte is about to go to the socket, and with that the command's own
 * time is over. */
static __always_inline void sent(struct nvmet_tcp_cmd *cmd)
{
	struct nvmet_req *req = tcp_req(cmd);
	struct in_flight *command = find(req);

	if (!command)
		return;
	command->record.ts[FAB_T_SENT] = bpf_ktime_get_ns();
	end(command, req);
}

/* First choice: of a read the function that sends its first C2HData header; of others, that which sends the
 * CQE. A read is over by then. */
static __always_inline int on_send(struct nvmet_tcp_cmd *cmd, const bool direct)
{
	if (!READ(cmd, offset))
		sent(cmd);
	return 0;
}

BOTH(send_data, nvmet_try_send_data_pdu, on_send(cmd, direct), struct nvmet_tcp_cmd *cmd)
BOTH(send_response, nvmet_try_send_response, on_send(cmd, direct), struct nvmet_tcp_cmd *cmd)

/*
 * t_r2t and t_sent where the compiler inlined those functions: the page that goes to a socket. The socket leads to
 * the driver's queue, and that to the command being answered.
 */
static __always_inline int on_sendpage(struct socket *sock, const bool direct)
{
	struct nvmet_tcp_queue *queue = queue_of_socket(sock, direct);
	enum nvmet_tcp_send_state state;
	struct nvmet_tcp_cmd *cmd;

	/* Others send pages, too: then this is a queue of their own, or none. */
	if (!queue || BPF_CORE_READ(queue, sock) != sock)
		return 0;
	cmd = BPF_CORE_READ(queue, snd_cmd);
	if (!cmd || !find(tcp_req(cmd)))
		return 0;
	state = BPF_CORE_READ(cmd, state);
	if (state == bpf_core_enum_value(enum nvmet_tcp_send_state, NVMET_TCP_SEND_R2T))
		return on_send_r2t(cmd, false);
	if (state == bpf_core_enum_value(enum nvmet_tcp_send_state, NVMET_TCP_SEND_DATA_PDU) ||
	    state == bpf_core_enum_value(enum nvmet_tcp_send_state, NVMET_TCP_SEND_RESPONSE))
		return on_send(cmd, false);
	return 0;
}

BOTH(sendpage, kernel_sendpage, on_sendpage(sock, direct), struct socket *sock)

/* t_sent, later: the response PDU is made, of a read after its data has gone to the socket. */
static __always_inline int on_setup_response(struct nvmet_tcp_cmd *cmd)
{
	sent(cmd);
	return 0;
}

BOTH(setup_response, nvmet_setup_response_pdu, on_setup_response(cmd), struct nvmet_tcp_cmd *cmd)

/*
 * The drive's own time: from the issue of the first block request with a bio of the command's to the
 * completion of the last. A read or write is one bio, or several that are chained to the first, and the block
 * layer may split each into a chain. Below a stacked device (device mapper, md) the requests carry other
 * bios, and nothing is known.
 */
#define BIOS_OF_REQUEST 32
#define CHAINED_BIOS 8

static __always_inline struct in_flight *command_of(struct bio *bio, const bool direct)
{
	__u64 ends = (__u64)READ(bio, bi_end_io);
	void *private = READ(bio, bi_private);

	for (int i = 0; i < CHAINED_BIOS; i++) {
		if (ends == end_of_command_bio)
			return find(private);
		if (ends != end_of_chained_bio)
			return 0;
		bio = private;
		ends = (__u64)BPF_CORE_READ(bio, bi_end_io);
		private = BPF_CORE_READ(bio, bi_private);
	}
	return 0;
}

static __always_inline int on_request(struct request *rq, bool issue, const bool direct)
{
	struct bio *bio;
	__u64 now = 0;

	if (!end_of_command_bio || !end_of_chained_bio)
		return 0;
	bio = READ(rq, bio);
	/* The block layer merges the bios of several commands into one request, too. */
	for (int i = 0; i < BIOS_OF_REQUEST && bio; i++) {
		struct in_flight *command = command_of(bio, direct);

		if (command) {
			now = now ? now : bpf_ktime_get_ns();
			if (!issue)
				command->drive_until = now;
			else if (!command->drive_since)
				command->drive_since = now;
		}
		bio = READ(bio, bi_next);
	}
	return 0;
}

SEC("tp_btf/block_rq_issue")
int BPF_PROG(issue_tp, struct request *rq)
{
	return on_request(rq, true, true);
}

/* The function that fires that event as its first. */
SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(issue_kprobe, struct request *rq)
{
	return on_request(rq, true, false);
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(issued_tp, struct request *rq)
{
	return on_request(rq, false, true);
}

/* A queue is gone with all that its commands waited for. */
struct leaving {
	__u64 sq;
};

static long leave(void *map, __u64 *key, struct in_flight *command, struct leaving *leaving)
{
	__u64 req = *key;

	if (command->sq == leaving->sq && unfollow((void *)req))
		lose(req, FAB_LOST_UNFINISHED);
	return 0;
}

static __always_inline int on_destroy(struct nvmet_sq *sq)
{
	struct leaving leaving = { .sq = (__u64)sq };
	struct queue *queue = queue_at(sq);

	if (!queue)
		return 0;
	if (queue->key) {
		send_event(KERNEL_EVENT_QUEUE_GONE, queue->cntlid, queue->qid, queue->key);
		bpf_for_each_map_elem(&commands, leave, &leaving, 0);
	}
	bpf_map_delete_elem(&queues, &leaving.sq);
	return 0;
}

/* First choice: by its end every command of the queue is complete. At its beginning some may not be, but the
 * connection is gone, so none will be sent a response. */
SEC("fexit/nvmet_sq_destroy")
int BPF_PROG(destroy_fexit, struct nvmet_sq *sq)
{
	return on_destroy(sq);
}

SEC("kprobe/nvmet_sq_destroy")
int BPF_KPROBE(destroy_kprobe, struct nvmet_sq *sq)
{
	return on_destroy(sq);
}

/* What explains gaps. */

static __always_inline int on_fatal(struct nvmet_ctrl *ctrl)
{
	send_event(KERNEL_EVENT_FATAL, BPF_CORE_READ(ctrl, cntlid), 0, 0);
	return 0;
}

BOTH(fatal, nvmet_ctrl_fatal_error, on_fatal(ctrl), struct nvmet_ctrl *ctrl)

static __always_inline int on_namespace(struct nvmet_ns *ns, bool enable)
{
	if (bpf_core_field_exists(ns->enabled) && BPF_CORE_READ(ns, enabled) == enable)
		return 0;
	send_event(enable ? KERNEL_EVENT_NAMESPACE_ENABLED : KERNEL_EVENT_NAMESPACE_DISABLED,
		   BPF_CORE_READ(ns, nsid), 0, 0);
	return 0;
}

BOTH(enable, nvmet_ns_enable, on_namespace(ns, true), struct nvmet_ns *ns)
BOTH(disable, nvmet_ns_disable, on_namespace(ns, false), struct nvmet_ns *ns)
