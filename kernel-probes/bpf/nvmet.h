/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the target's programs need to know of nvmet, nvmet-tcp and nvmet-rdma besides types.h, by the same
 * rules: only members that are read, wherever the running kernel has them.
 */
#ifndef FABSCOPE_NVMET_H
#define FABSCOPE_NVMET_H

#include "types.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct kiocb {
	void *ki_filp;
};

struct nvmet_subsys {
	char *subsysnqn;
};

struct nvmet_ctrl {
	struct nvmet_subsys *subsys;
	__u16 cntlid;
	bool reset_tbkas;
	char hostnqn[256];
};

struct nvmet_ns {
	__u32 nsid;
	bool enabled;
};

struct nvmet_sq {
	struct nvmet_ctrl *ctrl;
	__u16 qid;
};

struct nvmet_fabrics_ops {
	unsigned int type;
};

struct nvme_completion {
	__u16 status;
};

struct nvmet_req {
	struct nvme_command *cmd;
	struct nvme_completion *cqe;
	struct nvmet_sq *sq;
	struct {
		struct kiocb iocb;
	} f;
	unsigned long transfer_len;
	const struct nvmet_fabrics_ops *ops;
};

/* NVMe/TCP. */

enum nvmet_tcp_send_state {
	NVMET_TCP_SEND_DATA_PDU = 0,
	NVMET_TCP_SEND_DATA = 1,
	NVMET_TCP_SEND_R2T = 2,
	NVMET_TCP_SEND_DDGST = 3,
	NVMET_TCP_SEND_RESPONSE = 4,
};

struct work_struct {
	void *func;
};

struct nvmet_tcp_queue;

struct nvmet_tcp_cmd {
	struct nvmet_tcp_queue *queue;
	struct nvmet_req req;
	__u32 rbytes_done;
	__u32 offset;
	enum nvmet_tcp_send_state state;
};

struct nvmet_tcp_queue {
	struct socket *sock;
	struct work_struct io_work;
	struct nvmet_sq nvme_sq;
	struct nvmet_tcp_cmd *snd_cmd;
	int offset;
};

/* NVMe/RDMA. */

struct nvmet_rdma_queue {
	struct rdma_cm_id *cm_id;
	struct nvmet_sq nvme_sq;
};

struct nvmet_rdma_rsp {
	struct nvmet_rdma_queue *queue;
	struct nvmet_req req;
	__u8 n_rdma;
	struct ib_cqe read_cqe;
};

#pragma clang attribute pop

#endif /* FABSCOPE_NVMET_H */
