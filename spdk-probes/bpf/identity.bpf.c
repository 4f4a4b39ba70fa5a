// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Who an SPDK target's commands are, for a recording whose times come from SPDK's own trace ring: one uprobe a
 * command. The trace ring knows a command by the address of its request, and so does this; the SQE, which the ring
 * does not have, is in the request by the time that it is executed.
 */
#include "spdk.bpf.h"

struct identity_layout {
	__u32 request_qpair;
	__u32 request_cmd;
	__u32 qpair_qid;
};

const volatile struct identity_layout layout = {};

/*
 * spdk_nvmf_request_exec(req). The record's queue is the request's address, and its first time is now. A command
 * that waited for its subsystem passes twice.
 */
SEC("uprobe")
int identity(struct pt_regs *ctx)
{
	struct fab_command command = {};
	__u64 req, qpair = 0, cmd = 0;
	struct sqe sqe = {};
	__u16 qid = 0;

	command.ts[FAB_T_RECV] = bpf_ktime_get_ns();
	if (!ours())
		return 0;
	req = argument(ctx, 0);
	if (READ_BOTH(qpair, cmd, req, layout.request_qpair, layout.request_cmd) ||
	    READ(qid, qpair, layout.qpair_qid)) {
		count(FAB_LOST_READ);
		return 0;
	}
	if (qid == 0)
		return 0;
	if (READ(sqe, cmd, 0)) {
		count(FAB_LOST_READ);
		return 0;
	}
	if (sqe.opcode == OPC_FABRIC)
		return 0;
	identify(&command, &sqe);
	command.queue = req;
	send_command(&command);
	return 0;
}
