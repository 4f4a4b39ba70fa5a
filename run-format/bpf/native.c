/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The sampling hash as native code, so that Rust asks the very header that the BPF programs include. */
#include <linux/types.h>
#include "fabscope.h"

__u32 fabscope_hash(__u16 cid, __u8 opcode, __u32 nsid, __u64 slba, __u16 nlb0)
{
	return fab_hash(cid, opcode, nsid, slba, nlb0);
}

int fabscope_sampled(__u32 limit, __u16 cid, __u8 opcode, __u32 nsid, __u64 slba, __u16 nlb0)
{
	return fab_sampled(limit, cid, opcode, nsid, slba, nlb0);
}
