/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The commands that a side's programs follow, by the kernel's address of each. The includer says what is kept of
 * one (struct in_flight).
 */
#ifndef FABSCOPE_IN_FLIGHT_BPF_H
#define FABSCOPE_IN_FLIGHT_BPF_H

#include "kernel.bpf.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, struct in_flight);
} commands SEC(".maps");

#define IN_FLIGHT_BITS 14

/*
 * How many of them have an address of this hash. Where there is none, none is looked for: that is all that the
 * hooks of a command cost which the hash left, and of what is no command of this side.
 */
__u32 of_hash[1 << IN_FLIGHT_BITS] = {};

static __always_inline __u32 *same_hash(__u64 address)
{
	return &of_hash[hash_of(address, IN_FLIGHT_BITS)];
}

static __always_inline struct in_flight *find(void *address)
{
	__u64 key = (__u64)address;

	return *same_hash(key) ? bpf_map_lookup_elem(&commands, &key) : 0;
}

/* One that is not followed yet; false when there is no room. */
static __always_inline bool follow(void *address, const struct in_flight *command)
{
	__u32 *same = same_hash((__u64)address);
	__u64 key = (__u64)address;

	__sync_fetch_and_add(same, 1);
	if (!bpf_map_update_elem(&commands, &key, command, BPF_NOEXIST))
		return true;
	__sync_fetch_and_add(same, -1);
	return false;
}

/* Whether it was followed. */
static __always_inline bool unfollow(void *address)
{
	__u32 *same = same_hash((__u64)address);
	__u64 key = (__u64)address;

	if (!*same || bpf_map_delete_elem(&commands, &key))
		return false;
	__sync_fetch_and_add(same, -1);
	return true;
}

#endif /* FABSCOPE_IN_FLIGHT_BPF_H */
