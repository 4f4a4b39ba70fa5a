/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the host's and the target's programs share: the ring, the counters, what the loader sets, and how a
 * queue's ends are read. It knows neither side's commands.
 */
#ifndef FABSCOPE_KERNEL_BPF_H
#define FABSCOPE_KERNEL_BPF_H

#include "types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include "kernel.h"
#include "ends.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Set before loading. */

/* fab_sampled's limit. */
const volatile __u32 sampling_limit = 0xffffffff;
/* Bytes waiting in the ring from which on the consumer is woken; before that it comes by itself. */
const volatile __u64 wake_at = 0;

/* Shared with the loader. */

/* Whether new commands are taken. The loader sets it when every program is attached. */
__u32 recording = 0;
/* When it was set, ns. */
__u64 recording_since = 0;
/* Last key given to a queue. */
__u64 queue_keys = 0;
/* Messages other than commands that found the ring full. */
__u64 lost_messages = 0;

/*
 * The counters, by CPU; on more CPUs some share. They stand in memory that the loader sees, since a system call
 * that reads a map keeps kprobes from running on its CPU meanwhile. Of FAB_SEEN there is only what was not left
 * by the hash: the loader adds FAB_UNSAMPLED.
 */
#define COUNTED_CPUS 512

struct counters {
	__u64 of[FAB_COUNTERS];
} counters[COUNTED_CPUS] __attribute__((aligned(64))) = {};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} ring SEC(".maps");

/*
 * A program for a function's entry, by ftrace and by breakpoint; the loader turns on one of the two. In the first
 * the verifier knows what the arguments point to, so that `direct` is true and READ of them is a load.
 */
#define BOTH(name, function, call, args...)                                                                   \
	SEC("fentry/" #function) int BPF_PROG(name##_fentry, args)                                             \
	{                                                                                                      \
		const bool direct = true;                                                                      \
                                                                                                               \
		(void)direct;                                                                                  \
		return call;                                                                                   \
	}                                                                                                      \
	SEC("kprobe/" #function) int BPF_KPROBE(name##_kprobe, args)                                           \
	{                                                                                                      \
		const bool direct = false;                                                                     \
                                                                                                               \
		(void)direct;                                                                                  \
		return call;                                                                                   \
	}

/* A member of what a program was given. */
#define READ(pointer, member) (direct ? (pointer)->member : BPF_CORE_READ(pointer, member))
/* One of what a member points to. */
#define READ2(pointer, member, of) (direct ? (pointer)->member->of : BPF_CORE_READ(pointer, member, of))

/*
 * The beginning of one of the kernel's structures, read as a whole: a call for it costs more than its bytes do.
 * What of it lies further behind, on a kernel that was not thought of, is read by itself.
 */
struct block {
	__u64 words[8];
};

#define read_block(block, from) bpf_probe_read_kernel(block, sizeof(*(block)), from)

#define MEMBER(block, from, type, member)                                                                      \
	({                                                                                                     \
		typeof(((type *)0)->member) value_;                                                            \
		__u32 offset_ = bpf_core_field_offset(type, member);                                           \
                                                                                                               \
		if (offset_ + sizeof(value_) <= sizeof(*(block)))                                              \
			value_ = *(typeof(value_) *)((void *)(block) + offset_);                               \
		else                                                                                           \
			bpf_probe_read_kernel(&value_, sizeof(value_), (void *)(from) + offset_);              \
		value_;                                                                                        \
	})

/* An interrupt may run another program on this CPU between a load and a store, and CPUs may share: hence atomic. */
static __always_inline void count(__u32 counter)
{
	__u32 cpu = bpf_get_smp_processor_id() & (COUNTED_CPUS - 1);

	__sync_fetch_and_add(&counters[cpu].of[counter], 1);
}

/* A number of so many bits from an address. The verifier allows no arithmetic on its pointers but a copy of the
 * lower half. */
static __always_inline __u32 hash_of(__u64 address, __u32 bits)
{
	__u32 low;

	asm volatile("%0 = %1" : "=w"(low) : "w"((__u32)address));
	return low * 0x9e3779b1U >> (32 - bits);
}

static __always_inline __u64 ring_flags(void)
{
	return bpf_ringbuf_query(&ring, BPF_RB_AVAIL_DATA) >= wake_at ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

static __always_inline __u64 new_queue_key(void)
{
	return __sync_fetch_and_add(&queue_keys, 1) + 1;
}

static __always_inline void send_record(struct fab_command *record)
{
	if (bpf_ringbuf_output(&ring, record, sizeof(*record), ring_flags()))
		count(FAB_LOST_RING);
	else
		count(FAB_RECORDED);
}

static __always_inline void send_event(__u32 kind, __s32 instance, __u32 qid, __u64 key)
{
	struct kernel_event event = {
		.message = KERNEL_MSG_EVENT,
		.kind = kind,
		.at = bpf_ktime_get_ns(),
		.instance = instance,
		.qid = qid,
		.key = key,
	};

	if (bpf_ringbuf_output(&ring, &event, sizeof(event), ring_flags()))
		__sync_fetch_and_add(&lost_messages, 1);
}

/* Whether an upper layer protocol (TLS) sits on a socket: then its positions are not those of the wire. */
static __always_inline bool is_encrypted(struct sock *sk)
{
	struct inet_connection_sock *icsk = (void *)sk;

	return BPF_CORE_READ(icsk, icsk_ulp_ops) != 0;
}

/* The queue of an NVMe/TCP driver that a socket belongs to, if it is one's. */
static __always_inline void *queue_of_socket(struct socket *sock, const bool direct)
{
	return READ2(sock, sk, sk_user_data);
}

/* The ends of a TCP connection. */
static __always_inline void tcp_ends(struct kernel_queue *m, struct sock *sk)
{
	m->transport = KERNEL_TCP;
	if (!sk)
		return;
	m->encrypted = is_encrypted(sk);
	READ_ENDS(m, sk);
}

/* struct sockaddr_in and sockaddr_in6, which the user interface fixes. */
struct socket_address {
	__u16 family;
	__be16 port;
	union {
		__u8 v4[4];
		struct {
			__u32 flowinfo;
			__u8 v6[16];
		};
	};
};

static __always_inline __u16 rdma_end(__u8 *address, __u16 *port, const void *from)
{
	struct socket_address end = {};

	bpf_probe_read_kernel(&end, sizeof(end), from);
	*port = bpf_ntohs(end.port);
	if (end.family == AF_INET)
		__builtin_memcpy(address, end.v4, sizeof(end.v4));
	else if (end.family == AF_INET6)
		__builtin_memcpy(address, end.v6, sizeof(end.v6));
	return end.family;
}

/* The ends of an RDMA connection, as its connection manager has them. */
static __always_inline void rdma_ends(struct kernel_queue *m, struct rdma_cm_id *id)
{
	m->transport = KERNEL_RDMA;
	if (!id)
		return;
	m->family = rdma_end(m->local_address, &m->local_port,
			     __builtin_preserve_access_index(&id->route.addr.src_addr));
	rdma_end(m->remote_address, &m->remote_port,
		 __builtin_preserve_access_index(&id->route.addr.dst_addr));
}

/* The first words of a submission queue entry, as the NVMe base specification lays it out (figure 92). */
struct sqe {
	__u8 opcode;
	__u8 flags;
	__u16 cid;
	__u32 nsid;
	__u64 cdw2_3;
	__u64 metadata;
	__u64 data[2];
	__u64 cdw10_11;
	__u32 cdw12;
};

#define FABRICS_COMMAND 0x7f

/* What stays the same of a command from here on. */
static __always_inline void identify(struct fab_command *record, const struct sqe *sqe)
{
	record->message = FAB_MSG_COMMAND;
	record->nsid = sqe->nsid;
	record->slba = sqe->cdw10_11;
	record->stream_position = FAB_NO_POSITION;
	record->cid = sqe->cid;
	record->nlb0 = (__u16)sqe->cdw12;
	record->opcode = sqe->opcode;
	record->cpu = bpf_get_smp_processor_id();
}

#define STAMP_BITS 14
#define STAMP_WAYS 4

/*
 * When something of the kernel's was seen last, by its address: a bio, a request, a queue. Each has its place in a
 * line of a few, of which the oldest goes. What is stamped twice has the later time.
 */
struct stamps {
	struct stamp {
		__u64 address;
		__u64 at;
	} way[STAMP_WAYS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << STAMP_BITS);
	__type(key, __u32);
	__type(value, struct stamps);
} stamps SEC(".maps");

static __always_inline struct stamps *stamps_of(__u64 address)
{
	__u32 line = hash_of(address, STAMP_BITS);

	return bpf_map_lookup_elem(&stamps, &line);
}

static __always_inline void stamp(__u64 address, __u64 at)
{
	struct stamps *line = stamps_of(address);
	__u64 oldest = ~0ULL, was;
	__u32 victim = 0;

	if (!line)
		return;
	for (int i = 0; i < STAMP_WAYS; i++) {
		__u64 last = line->way[i].at;

		if (line->way[i].address == address) {
			line->way[i].at = at;
			return;
		}
		if (last < oldest) {
			oldest = last;
			victim = i;
		}
	}
	victim &= STAMP_WAYS - 1;
	was = line->way[victim].address;
	/* Another CPU may take the same place at this moment: the time of one of the two is not kept. */
	if (__sync_val_compare_and_swap(&line->way[victim].address, was, address) == was)
		line->way[victim].at = at;
}

/* 0 when it was not seen. */
static __always_inline __u64 stamped(__u64 address)
{
	struct stamps *line = stamps_of(address);

	if (!line)
		return 0;
	for (int i = 0; i < STAMP_WAYS; i++)
		if (line->way[i].address == address)
			return line->way[i].at;
	return 0;
}

static __always_inline bool is_sampled(const struct sqe *sqe)
{
	return fab_sampled(sampling_limit, sqe->cid, sqe->opcode, sqe->nsid, sqe->cdw10_11, (__u16)sqe->cdw12);
}

#endif /* FABSCOPE_KERNEL_BPF_H */
