// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Each retransmission of TCP's, with its moment and its connection. It knows no queues: the loader names their ports.
 */
#include "types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include "kernel.h"
#include "ends.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Shared with the loader. */

/* The network namespace whose connections are taken, by its inode; 0 for all. */
__u32 namespace = 0;
/* Whether only connections of these ports are taken: from a local one, or to a remote one. */
__u32 by_port = 0;
__u8 local_ports[KERNEL_PORT_BYTES] = {};
__u8 remote_ports[KERNEL_PORT_BYTES] = {};
/* Those that found the ring full. */
__u64 lost = 0;

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} retransmits SEC(".maps");

static __always_inline bool has(const __u8 *ports, __u16 port)
{
	__u32 at = port >> 3;

	/* The compiler knows that this is in bounds and would leave the mask out; the verifier of Linux 6.12 does not
	 * know it of a port whose bytes were swapped. */
	barrier_var(at);
	return ports[at & (KERNEL_PORT_BYTES - 1)] & (1 << (port & 7));
}

/* A raw tracepoint: it has been there since 4.17, and its first two arguments have stayed. */
SEC("raw_tp/tcp_retransmit_skb")
int BPF_PROG(retransmit, struct sock *sk, struct sk_buff *skb)
{
	struct tcp_skb_cb *cb = __builtin_preserve_access_index((void *)&skb->cb);
	__u16 local = BPF_CORE_READ(sk, __sk_common.skc_num);
	__u16 remote = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	struct kernel_retransmit event = { .at = bpf_ktime_get_ns() };

	if (by_port && !has(local_ports, local) && !has(remote_ports, remote))
		return 0;
	if (namespace && BPF_CORE_READ(sk, __sk_common.skc_net.net, ns.inum) != namespace)
		return 0;
	event.segments = BPF_CORE_READ(cb, tcp_gso_segs);
	READ_ENDS(&event, sk);
	/* The consumer comes by itself. */
	if (bpf_ringbuf_output(&retransmits, &event, sizeof(event), BPF_RB_NO_WAKEUP))
		__sync_fetch_and_add(&lost, 1);
	return 0;
}
