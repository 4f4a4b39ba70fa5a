/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What these programs need to know of the kernel: the members that they read, and no others. libbpf moves
 * each access to where the running kernel has the member (CO-RE), so neither order nor size matters here;
 * pt_regs alone is taken as it stands, since the processor fixes it.
 */
#ifndef FABSCOPE_TYPES_H
#define FABSCOPE_TYPES_H

/* Makes libbpf's headers use the kernel's names of registers. */
#define __VMLINUX_H__

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef _Bool bool;
enum { false, true };

/* Of the kernel's user interface (linux/bpf.h). */
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_RINGBUF = 27,
};
enum { BPF_ANY = 0, BPF_NOEXIST = 1 };
enum { BPF_RB_NO_WAKEUP = 1, BPF_RB_FORCE_WAKEUP = 2 };
enum { BPF_RB_AVAIL_DATA = 0 };

#define AF_INET 2
#define AF_INET6 10

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags,
		sp, ss;
};
#elif defined(__TARGET_ARCH_arm64)
struct user_pt_regs {
	__u64 regs[31], sp, pc, pstate;
};
struct pt_regs {
	struct user_pt_regs user_regs;
};
#endif

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

/* Block layer. */

struct blk_mq_ops;

struct request_queue {
	const struct blk_mq_ops *mq_ops;
	void *queuedata;
};

struct gendisk {
	char disk_name[32];
	struct request_queue *queue;
};

struct block_device {
	struct gendisk *bd_disk;
};

struct bio {
	struct bio *bi_next;
	unsigned short bi_flags;
	struct block_device *bi_bdev;
	void *bi_end_io;
	void *bi_private;
};

struct blk_mq_hw_ctx {
	void *driver_data;
	unsigned int queue_num;
};

struct request;

struct blk_mq_tags {
	struct request **rqs;
};

struct blk_mq_tag_set {
	struct blk_mq_tags **tags;
};

struct request {
	struct request_queue *q;
	struct blk_mq_hw_ctx *mq_hctx;
	unsigned int __data_len;
	struct bio *bio;
	struct bio *biotail;
	__u64 start_time_ns;
	void *end_io_data;
};

struct blk_mq_queue_data {
	struct request *rq;
};

/* Sockets. */

struct in6_addr {
	union {
		__u8 u6_addr8[16];
	} in6_u;
};

struct ns_common {
	__u32 inum;
};

struct net {
	struct ns_common ns;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
};

struct sock {
	struct sock_common __sk_common;
	void *sk_user_data;
};

struct tcp_ulp_ops;

struct inet_connection_sock {
	const struct tcp_ulp_ops *icsk_ulp_ops;
};

struct tcp_sock {
	__u32 rcv_nxt;
	__u32 copied_seq;
	__u32 write_seq;
};

struct socket {
	struct sock *sk;
};

struct sk_buff {
	char cb[48];
};

/* What TCP keeps in `cb`. */
struct tcp_skb_cb {
	__u16 tcp_gso_segs;
};

struct page;

/* What tcp_read_sock hands to its actor; the kernel's own name is a typedef of an unnamed structure. */
typedef struct {
	union {
		char *buf;
		void *data;
	} arg;
} read_descriptor_t;

/* RDMA: the connection manager and verbs. */

struct __kernel_sockaddr_storage {
	unsigned short ss_family;
};

struct rdma_addr {
	struct __kernel_sockaddr_storage src_addr;
	struct __kernel_sockaddr_storage dst_addr;
};

struct rdma_route {
	struct rdma_addr addr;
};

struct rdma_cm_id {
	struct rdma_route route;
};

struct ib_cqe {
	void *done;
};

struct ib_qp {
	void *qp_context;
};

enum ib_wc_status {
	IB_WC_SUCCESS = 0,
};

struct ib_wc {
	union {
		__u64 wr_id;
		struct ib_cqe *wr_cqe;
	};
	enum ib_wc_status status;
	__u32 byte_len;
	struct ib_qp *qp;
};

/* NVMe core. */

/* Only the states that are asked for; libbpf puts this kernel's values in. */
enum nvme_ctrl_state {
	NVME_CTRL_LIVE = 1,
	NVME_CTRL_RESETTING = 2,
	NVME_CTRL_CONNECTING = 3,
	NVME_CTRL_DELETING = 4,
	NVME_CTRL_DEAD = 6,
};

struct nvmf_host {
	char nqn[223];
};

struct nvmf_ctrl_options {
	char *subsysnqn;
	struct nvmf_host *host;
};

struct nvme_ctrl_ops {
	const char *name;
};

struct nvme_ctrl {
	const struct nvme_ctrl_ops *ops;
	int instance;
	__u16 cntlid;
	struct nvmf_ctrl_options *opts;
};

struct nvme_command;

struct nvme_request {
	struct nvme_command *cmd;
	__u8 genctr;
	__u8 retries;
	__u8 flags;
	__u16 status;
	struct nvme_ctrl *ctrl;
};

/* NVMe/TCP. */

enum nvme_tcp_send_state {
	NVME_TCP_SEND_CMD_PDU = 0,
	NVME_TCP_SEND_H2C_PDU = 1,
	NVME_TCP_SEND_DATA = 2,
	NVME_TCP_SEND_DDGST = 3,
};

struct nvme_tcp_request;

struct nvme_tcp_queue {
	struct socket *sock;
	int io_cpu;
	struct nvme_tcp_request *request;
};

struct nvme_tcp_request {
	struct nvme_tcp_queue *queue;
	__u32 data_len;
	__u32 pdu_len;
	unsigned long offset;
	enum nvme_tcp_send_state state;
};

/* NVMe/RDMA. */

struct nvme_rdma_qe {
	struct ib_cqe cqe;
	void *data;
};

struct nvme_rdma_queue;

struct nvme_rdma_ctrl {
	struct nvme_rdma_queue *queues;
	struct blk_mq_tag_set tag_set;
};

struct nvme_rdma_queue {
	struct nvme_rdma_ctrl *ctrl;
	struct rdma_cm_id *cm_id;
};

struct nvme_rdma_request {
	struct nvme_rdma_qe sqe;
};

#pragma clang attribute pop

#endif /* FABSCOPE_TYPES_H */
