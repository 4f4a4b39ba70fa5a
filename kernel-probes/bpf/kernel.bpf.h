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

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FAB_COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} ring SEC(".maps");

/*
 * A program for a function's entry, by ftrace and by breakpoint; the loader turns on one of the two. `call`
 * reads the kernel's memory with bpf_core_read alone, which both may do.
 */
#define BOTH(name, function, call, args...)                                                                   \
	SEC("fentry/" #function) int BPF_PROG(name##_fentry, args)                                             \
	{                                                                                                      \
		return call;                                                                                   \
	}                                                                                                      \
	SEC("kprobe/" #function) int BPF_KPROBE(name##_kprobe, args)                                           \
	{                                                                                                      \
		return call;                                                                                   \
	}

/* An interrupt may run another program on this CPU between a load and a store: hence atomic. */
static __always_inline void count(__u32 counter)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);

	if (value)
		__sync_fetch_and_add(value, 1);
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

/* The ends of a TCP connection. */
static __always_inline void tcp_ends(struct kernel_queue *m, struct sock *sk)
{
	m->transport = KERNEL_TCP;
	if (!sk)
		return;
	m->encrypted = is_encrypted(sk);
	m->family = BPF_CORE_READ(sk, __sk_common.skc_family);
	m->local_port = BPF_CORE_READ(sk, __sk_common.skc_num);
	m->remote_port = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	if (m->family == AF_INET) {
		BPF_CORE_READ_INTO((__be32 *)m->local_address, sk, __sk_common.skc_rcv_saddr);
		BPF_CORE_READ_INTO((__be32 *)m->remote_address, sk, __sk_common.skc_daddr);
	} else if (m->family == AF_INET6) {
		BPF_CORE_READ_INTO(&m->local_address, sk, __sk_common.skc_v6_rcv_saddr);
		BPF_CORE_READ_INTO(&m->remote_address, sk, __sk_common.skc_v6_daddr);
	}
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

static __always_inline bool is_sampled(const struct sqe *sqe)
{
	return fab_sampled(sampling_limit, sqe->cid, sqe->opcode, sqe->nsid, sqe->cdw10_11, (__u16)sqe->cdw12);
}

#endif /* FABSCOPE_KERNEL_BPF_H */
