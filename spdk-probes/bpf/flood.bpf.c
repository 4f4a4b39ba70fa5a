// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Fills a ring with records like those of a target, so that the speed of its reader can be measured. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "spdk.h"

#define RECORDS 1024

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 24);
} ring SEC(".maps");

/* Records in the ring, and those that found it full. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

SEC("raw_tp")
int flood(void *ctx)
{
	struct fab_command command = {.message = FAB_MSG_COMMAND, .queue = 1, .nsid = 1, .bytes = 4096, .nlb0 = 7, .opcode = 2};
	__u64 now = bpf_ktime_get_ns(), *sent, *lost;
	__u32 i, first = 0, second = 1;

	sent = bpf_map_lookup_elem(&counts, &first);
	lost = bpf_map_lookup_elem(&counts, &second);
	if (!sent || !lost)
		return 0;

	command.stream_position = FAB_NO_POSITION;
	for (i = 0; i < RECORDS; i++) {
		command.cid = i & 127;
		command.slba = now + i * 8;
		command.ts[FAB_T_RECV] = now + i;
		command.ts[FAB_T_SUBMIT] = now + i + 900;
		command.ts[FAB_T_DONE] = now + i + 9000;
		command.ts[FAB_T_RESP] = now + i + 9100;
		command.ts[FAB_T_SENT] = now + i + 15000;
		if (bpf_ringbuf_output(&ring, &command, sizeof(command), BPF_RB_NO_WAKEUP))
			*lost += 1;
		else
			*sent += 1;
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
