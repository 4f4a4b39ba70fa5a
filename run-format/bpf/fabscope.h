/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What every fabscope BPF program shares: the record of one command, the counters of what was seen and
 * lost, and the sampling hash. The Rust side's types are generated from this file (bindgen), so that the
 * two can not differ. It declares nothing of the kernel's and nothing of SPDK's.
 *
 * Includers provide __u8 .. __u64 (vmlinux-style declarations or <linux/types.h>).
 */
#ifndef FABSCOPE_H
#define FABSCOPE_H

/* Slots of fab_command.ts, by side. The names are design words; src/boundary.rs has the same order. */
enum fab_host_slot {
	FAB_H_QUEUED = 0,
	FAB_H_DRIVER = 1,
	FAB_H_SENT = 2,
	FAB_H_R2T = 3,
	FAB_H_DATA_SENT = 4,
	FAB_H_RECV = 5,
	FAB_H_DONE = 6,
	FAB_H_END = 7,
};

enum fab_target_slot {
	FAB_T_RECV = 0,
	FAB_T_R2T = 1,
	FAB_T_DATA = 2,
	FAB_T_SUBMIT = 3,
	FAB_T_DONE = 4,
	FAB_T_RESP = 5,
	FAB_T_SENT = 6,
};

#define FAB_SLOTS 8

/* Bits of fab_command.flags. */
enum fab_flag {
	FAB_FLAG_MERGED = 1,   /* the request carried more than one bio */
	FAB_FLAG_RETRY = 2,    /* not the first attempt of this request */
	FAB_FLAG_FAILOVER = 4, /* ended by multipath failover: its bios went to another path */
	FAB_FLAG_CANCELED = 8, /* ended without a completion from the wire */
};

/* "No stream position is known." */
#define FAB_NO_POSITION (~0ULL)

/* First word of every message in a ring buffer. Kinds from FAB_MSG_PRIVATE on belong to one probe crate. */
enum fab_message {
	FAB_MSG_COMMAND = 1,
	FAB_MSG_PRIVATE = 16,
};

/*
 * One command, sent once, when it is over. Times are CLOCK_MONOTONIC nanoseconds, 0 where the boundary was
 * not passed or not measured. slba and nlb0 are the SQE's CDW10/11 and the low half of CDW12 as they stand
 * on the wire, whatever the opcode makes of them: both sides see the same bits.
 */
struct fab_command {
	__u32 message;         /* FAB_MSG_COMMAND */
	__u32 nsid;
	__u64 queue;           /* the probe's key of the queue, one per connection */
	__u64 slba;            /* CDW10 | CDW11 << 32 */
	__u64 ts[FAB_SLOTS];
	__u64 r2t_turnaround;  /* host: sum over its R2Ts of (H2CData handed to the socket - R2T seen), ns */
	__u64 drive;           /* target: from the issue of its first block request to the completion of its last, ns; 0 unknown */
	__u64 stream_position; /* TCP sequence number of the capsule's first byte, or FAB_NO_POSITION */
	__u32 bytes;           /* data length, 0 where there is none */
	__u16 cid;
	__u16 nlb0;            /* CDW12 & 0xffff */
	__u16 status;          /* SCT << 8 | SC */
	__u16 cpu;             /* host: where it was handed to the driver; target: where it was received */
	__u16 flags;           /* enum fab_flag */
	__u8 opcode;
	__u8 r2ts;             /* R2Ts seen (host) or sent (target), saturating */
};

/*
 * Counters, one per CPU, in a BPF_MAP_TYPE_PERCPU_ARRAY by this index. For every probe program
 * seen = recorded + unsampled + the lost ones, exactly.
 */
enum fab_counter {
	FAB_SEEN = 0,          /* commands that reached the first hook while recording */
	FAB_RECORDED = 1,      /* records handed to the ring */
	FAB_UNSAMPLED = 2,     /* left at the first hook by the sampling hash */
	FAB_LOST_RING = 3,     /* ring buffer full */
	FAB_LOST_MAP = 4,      /* in-flight map full */
	FAB_LOST_UNFINISHED = 5, /* started, but replaced or dropped without a completion */
	FAB_NO_START = 6,      /* completions of commands that began before recording: not among the seen */
	FAB_LOST_READ = 7,     /* identity could not be read from memory */
	FAB_COUNTERS = 8,
};

static inline __attribute__((always_inline)) __u32 fab_mix(__u32 h)
{
	/* The finaliser of MurmurHash3: full avalanche in 32 bits. */
	h ^= h >> 16;
	h *= 0x85ebca6bU;
	h ^= h >> 13;
	h *= 0xc2b2ae35U;
	h ^= h >> 16;
	return h;
}

/* The sampling hash: of what both sides see of a command on the wire, and of nothing else. */
static inline __attribute__((always_inline)) __u32 fab_hash(__u16 cid, __u8 opcode, __u32 nsid, __u64 slba,
							     __u16 nlb0)
{
	__u32 h = fab_mix(((__u32)cid << 16 | (__u32)opcode << 8) ^ 0x9e3779b9U);

	h = fab_mix(h ^ nsid);
	h = fab_mix(h ^ (__u32)slba);
	h = fab_mix(h ^ (__u32)(slba >> 32));
	return fab_mix(h ^ nlb0);
}

/* Kept when the hash is at most limit; limit = 2^32 / N - 1, so N = 1 keeps all. */
static inline __attribute__((always_inline)) int fab_sampled(__u32 limit, __u16 cid, __u8 opcode, __u32 nsid,
							      __u64 slba, __u16 nlb0)
{
	return limit == 0xffffffffU || fab_hash(cid, opcode, nsid, slba, nlb0) <= limit;
}

#endif /* FABSCOPE_H */
