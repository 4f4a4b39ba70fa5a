/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How the ends of a TCP connection are read from its socket. To be included after libbpf's headers.
 */
#ifndef FABSCOPE_ENDS_BPF_H
#define FABSCOPE_ENDS_BPF_H

/* Into a structure that has the members of struct kernel_queue for them. */
#define READ_ENDS(into, sk)                                                                                    \
	({                                                                                                     \
		(into)->family = BPF_CORE_READ(sk, __sk_common.skc_family);                                    \
		(into)->local_port = BPF_CORE_READ(sk, __sk_common.skc_num);                                   \
		(into)->remote_port = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));                     \
		if ((into)->family == AF_INET) {                                                               \
			BPF_CORE_READ_INTO((__be32 *)(into)->local_address, sk, __sk_common.skc_rcv_saddr);    \
			BPF_CORE_READ_INTO((__be32 *)(into)->remote_address, sk, __sk_common.skc_daddr);       \
		} else if ((into)->family == AF_INET6) {                                                       \
			BPF_CORE_READ_INTO(&(into)->local_address, sk, __sk_common.skc_v6_rcv_saddr);          \
			BPF_CORE_READ_INTO(&(into)->remote_address, sk, __sk_common.skc_v6_daddr);             \
		}                                                                                              \
	})

#endif /* FABSCOPE_ENDS_BPF_H */
