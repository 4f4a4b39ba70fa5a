// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * What is attached while the price of a hook is measured: programs that do the least that every recording
 * program does, which is to take the time and to put it where a command's is kept.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* One command under way, as the recording programs keep many. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16);
	__type(key, __u64);
	__type(value, __u64);
} under_way SEC(".maps");

/* How often each CPU ran a program. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} hits SEC(".maps");

static __always_inline int hit(void)
{
	__u64 now = bpf_ktime_get_ns(), command = 1, *time;
	__u32 first = 0;
	__u64 *count = bpf_map_lookup_elem(&hits, &first);

	if (count)
		*count += 1;
	time = bpf_map_lookup_elem(&under_way, &command);
	if (time)
		*time = now;
	else
		bpf_map_update_elem(&under_way, &command, &now, BPF_ANY);
	return 0;
}

SEC("uprobe")
int at_uprobe(void *ctx)
{
	return hit();
}

/* Renaming a task is what the measured child does for a hook of the kernel: few others do it. */
SEC("tp_btf/task_rename")
int at_tracepoint(void *ctx)
{
	return hit();
}

SEC("fentry/__set_task_comm")
int at_fentry(void *ctx)
{
	return hit();
}

SEC("kprobe")
int at_kprobe(void *ctx)
{
	return hit();
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
