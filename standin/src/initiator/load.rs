//! The load: keeps every queue at its depth, checks data, takes latencies.
//!
//! With `verify`, the region is a row of slots of one command each, and a slot is used by one
//! command at a time, so that what it has to hold is known whenever it is read.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::admin::{Connection, failure};
use super::tcp;
use super::types::nvme_tcp_qpair;
use standin::{Latency, Summary, Workload};

use super::InitiatorConfig;
use crate::wire::{Status, spdk_nvme_cpl};

/// What a slot of the region holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Nobody has looked.
    Unknown,
    Zeroes,
    /// The pattern of this generation.
    Pattern(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Read,
    Write,
    Flush,
    Compare,
    WriteZeroes,
    Dsm,
}

/// One outstanding command of the load.
#[allow(non_camel_case_types, reason = "the name is what debug information is searched for")]
#[repr(C)]
pub(crate) struct perf_task {
    load: *mut Load,
    queue: *mut nvme_tcp_qpair,
    submitted: Option<Instant>,
    slot: usize,
    op: Op,
    generation: u32,
    /// Commands that it has submitted.
    number: u32,
    buffer: Vec<u8>,
}

/// Latencies in log-linear buckets: 128 to each power of two, so within 0.8 %.
struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: u128,
    min: u64,
    max: u64,
}

const SUB_BITS: u32 = 7;

impl Histogram {
    fn new() -> Self {
        Self {
            buckets: vec![0; (64 - SUB_BITS as usize + 1) << SUB_BITS],
            count: 0,
            sum: 0,
            min: u64::MAX,
            max: 0,
        }
    }

    fn bucket(value: u64) -> usize {
        let shift = (64 - value.leading_zeros()).saturating_sub(SUB_BITS + 1);
        ((shift as usize) << SUB_BITS) + (value >> shift) as usize
    }

    /// The largest value of a bucket.
    fn upper(bucket: usize) -> u64 {
        let shift = (bucket >> SUB_BITS).saturating_sub(1);
        let base = bucket - (shift << SUB_BITS);
        (((base as u128 + 1) << shift) - 1).min(u128::from(u64::MAX)) as u64
    }

    fn add(&mut self, value: u64) {
        self.buckets[Self::bucket(value)] += 1;
        self.count += 1;
        self.sum += u128::from(value);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    fn quantile(&self, q: f64) -> u64 {
        let wanted = ((self.count as f64 * q).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, n) in self.buckets.iter().enumerate() {
            seen += n;
            if seen >= wanted {
                return Self::upper(bucket).clamp(self.min, self.max);
            }
        }
        self.max
    }

    fn latency(&self) -> Option<Latency> {
        (self.count > 0).then(|| Latency {
            min_ns: self.min,
            mean_ns: self.sum as f64 / self.count as f64,
            p50_ns: self.quantile(0.50),
            p99_ns: self.quantile(0.99),
            max_ns: self.max,
        })
    }
}

/// A small generator, enough to choose places: SplitMix64.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn fill(buffer: &mut [u8], seed: u64, slot: usize, generation: u32) {
    let mut state = seed ^ ((slot as u64) << 32) ^ u64::from(generation).rotate_left(17);
    for word in buffer.chunks_mut(8) {
        let bytes = splitmix(&mut state).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

struct Load {
    config: InitiatorConfig,
    ns: *mut tcp::spdk_nvme_ns,
    blocks_per_command: u32,
    content: Vec<Content>,
    busy: Vec<bool>,
    next: usize,
    random: u64,
    histogram: Histogram,
    /// What is being done: the load itself, or preparing or checking around it.
    phase: Phase,
    left: u64,
    deadline: Option<Instant>,
    outstanding: u64,
    commands: u64,
    reads: u64,
    writes: u64,
    errors: u64,
    verified: u64,
    verify_errors: u64,
    /// Tasks that found every slot busy.
    idle: Vec<*mut perf_task>,
    broken: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Writes every slot once.
    Prepare,
    Load,
    /// Reads back every slot whose content is known.
    Check,
}

/// Runs the load over the connection.
///
/// # Errors
/// The load does not fit the namespace, or a connection breaks.
pub(crate) fn run(config: &InitiatorConfig, connection: &Connection) -> Result<Summary> {
    // SAFETY: the namespace lives as long as the connection.
    let (blocks, block_bytes) = unsafe { ((*connection.ns).blocks, (*connection.ns).sector_size) };
    let size = config.block_size;
    if size == 0 || !size.is_multiple_of(block_bytes) {
        bail!("--block-size {size}: the namespace has blocks of {block_bytes} bytes");
    }
    // What carries no data is held back by the command's number of blocks alone.
    let most = if config.workload == Workload::WriteZeroes { u32::MAX } else { connection.max_xfer() };
    if size > most || size / block_bytes > 65_536 {
        let blocks = block_bytes.saturating_mul(65_536);
        bail!("--block-size {size}: the target takes at most {} bytes", most.min(blocks));
    }
    let region = config.region.min(blocks.saturating_mul(u64::from(block_bytes)));
    let slots = (region / u64::from(size)) as usize;
    if slots == 0 {
        bail!("--region: smaller than one command of {size} bytes");
    }
    if let Some((_, bytes)) = config.large_reads {
        let fits =
            bytes.is_multiple_of(block_bytes) && bytes <= connection.max_xfer() && u64::from(bytes) <= region;
        if bytes == 0 || !fits {
            bail!("--large-reads: {bytes} bytes are no read that the target takes, or more than --region");
        }
    }
    let total = usize::from(config.queues) * usize::from(config.queue_depth);
    let mut load = Load {
        config: config.clone(),
        ns: connection.ns,
        blocks_per_command: size / block_bytes,
        content: vec![Content::Unknown; slots],
        busy: vec![false; slots],
        next: 0,
        random: config.seed,
        histogram: Histogram::new(),
        phase: Phase::Load,
        left: 0,
        deadline: None,
        outstanding: 0,
        commands: 0,
        reads: 0,
        writes: 0,
        errors: 0,
        verified: 0,
        verify_errors: 0,
        idle: Vec::new(),
        broken: false,
    };
    let load_ptr: *mut Load = &raw mut load;
    let mut tasks: Vec<*mut perf_task> = Vec::with_capacity(total);
    let largest = config.large_reads.map_or(size, |(_, bytes)| bytes.max(size));
    for (qid, queue) in (1u16..).zip(connection.queues()) {
        for _ in 0..config.depth_of(qid) {
            let mut buffer = vec![0; largest as usize];
            fill(&mut buffer, config.seed, tasks.len(), 0);
            tasks.push(Box::into_raw(Box::new(perf_task {
                load: load_ptr,
                queue: *queue,
                submitted: None,
                slot: 0,
                op: Op::Read,
                generation: 0,
                number: 0,
                buffer,
            })));
        }
    }
    let result = phases(config, connection, load_ptr, &tasks);
    for task in tasks {
        if result.is_ok() {
            // SAFETY: no command is out any more, so nobody has it.
            drop(unsafe { Box::from_raw(task) });
        }
    }
    let seconds = result?;
    Ok(Summary {
        standin: standin::version().to_owned(),
        workload: config.workload,
        block_size: size,
        queue_depth: config.queue_depth,
        queues: config.queues,
        cntlid: connection.cntlid(),
        commands: load.commands,
        reads: load.reads,
        writes: load.writes,
        errors: load.errors,
        verify_errors: load.verify_errors,
        verified: load.verified,
        seconds,
        iops: load.commands as f64 / seconds.max(1e-9),
        latency: load.histogram.latency(),
    })
}

/// Prepares, loads, checks. Returns how long the load itself took, in seconds.
fn phases(
    config: &InitiatorConfig,
    connection: &Connection,
    load: *mut Load,
    tasks: &[*mut perf_task],
) -> Result<f64> {
    let reads =
        matches!(config.workload, Workload::Read | Workload::Randread | Workload::Mixed | Workload::Randrw);
    let prepare = config.workload == Workload::Compare || (config.verify && reads);
    // SAFETY: `load` is the caller's; it and the tasks are used on this thread only, and the
    // callbacks run inside `drive`.
    unsafe {
        let slots = (*load).content.len() as u64;
        if prepare {
            (*load).phase = Phase::Prepare;
            (*load).left = slots;
            drive(connection, load, tasks)?;
        }
        (*load).phase = Phase::Load;
        (*load).next = 0;
        (*load).left = config.count.unwrap_or(u64::MAX);
        let start = Instant::now();
        (*load).deadline = config.duration.map(|d| start + d);
        drive(connection, load, tasks)?;
        let seconds = start.elapsed().as_secs_f64();
        (*load).deadline = None;
        if config.verify {
            (*load).phase = Phase::Check;
            (*load).next = 0;
            (*load).left = slots;
            drive(connection, load, tasks)?;
        }
        Ok(seconds)
    }
}

/// Keeps the queues full until the phase's commands are done.
///
/// # Safety
/// `load` and `tasks` are live and used by nobody else meanwhile.
unsafe fn drive(connection: &Connection, load: *mut Load, tasks: &[*mut perf_task]) -> Result<()> {
    // SAFETY: by contract.
    unsafe {
        for task in tasks {
            submit_single_io(*task);
        }
        let spin = Duration::from_nanos((*load).config.spin_ns);
        let mut last = Instant::now();
        let mut turns = 0u32;
        while (*load).outstanding > 0 {
            let mut any = false;
            for queue in connection.queues() {
                let done = tcp::spdk_nvme_qpair_process_completions((*queue).cast(), 0);
                if done < 0 {
                    (*load).broken = true;
                    return Err(failure(*queue));
                }
                any |= done > 0 || tcp::has_queued(*queue);
            }
            let next = match (*load).config.bursts && (*load).phase == Phase::Load {
                // A burst is over when all of it is.
                true if (*load).outstanding > 0 => Vec::new(),
                _ => std::mem::take(&mut (*load).idle),
            };
            for task in next {
                submit_single_io(task);
            }
            turns = turns.wrapping_add(1);
            if any {
                last = Instant::now();
            } else if last.elapsed() >= spin {
                sleep(connection);
                last = Instant::now();
            } else {
                // Polling in vain: others may need the core more.
                std::thread::yield_now();
            }
            if turns.is_multiple_of(1024) || !any {
                connection.keep_alive()?;
            }
        }
    }
    Ok(())
}

/// Sleeps until one of the queues has something, a second at most.
fn sleep(connection: &Connection) {
    let mut polled: Vec<_> = connection
        .queues()
        .iter()
        .map(|queue| {
            // SAFETY: the queues and their descriptors live as long as the connection.
            unsafe {
                let mut events = PollFlags::POLLIN;
                if tcp::has_queued(*queue) && tcp::write_blocked(*queue) {
                    events |= PollFlags::POLLOUT;
                }
                PollFd::new(BorrowedFd::borrow_raw(tcp::descriptor(*queue)), events)
            }
        })
        .collect();
    let _ = poll(&mut polled, PollTimeout::from(1000u16));
}

impl Load {
    fn free_slot(&mut self, random: bool) -> Option<usize> {
        let slots = self.busy.len();
        let start = if random { (splitmix(&mut self.random) % slots as u64) as usize } else { self.next };
        let exclusive = self.config.verify || self.phase != Phase::Load;
        // Without a data check commands may meet; with it, look for a slot that nobody uses.
        let found = (0..if exclusive { slots } else { 1 })
            .map(|i| (start + i) % slots)
            .find(|slot| !exclusive || !self.busy[*slot]);
        if let (Some(slot), false) = (found, random) {
            self.next = (slot + 1) % slots;
        }
        found
    }

    fn choose(&mut self) -> Option<(Op, usize)> {
        match self.phase {
            Phase::Prepare => self.free_slot(false).map(|slot| (Op::Write, slot)),
            Phase::Check => self.free_slot(false).map(|slot| (Op::Read, slot)),
            Phase::Load => {
                let random =
                    !matches!(self.config.workload, Workload::Read | Workload::Write | Workload::Mixed);
                let op = match self.config.workload {
                    Workload::Read | Workload::Randread => Op::Read,
                    Workload::Write | Workload::Randwrite => Op::Write,
                    Workload::Mixed | Workload::Randrw => {
                        let share = u64::from(self.config.read_percent);
                        if splitmix(&mut self.random) % 100 < share { Op::Read } else { Op::Write }
                    }
                    Workload::Flush => return Some((Op::Flush, usize::MAX)),
                    Workload::Compare => Op::Compare,
                    Workload::WriteZeroes => Op::WriteZeroes,
                    Workload::Dsm => Op::Dsm,
                };
                self.free_slot(random).map(|slot| (op, slot))
            }
        }
    }

    fn over(&self) -> bool {
        self.left == 0 || self.broken || self.deadline.is_some_and(|d| Instant::now() >= d)
    }
}

/// Submits the task's next command, if the phase has one.
///
/// # Safety
/// `task` is live and not outstanding.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn submit_single_io(task: *mut perf_task) {
    probe_entry!();
    // SAFETY: by contract; the load and the queue outlive the task.
    unsafe {
        let load = &mut *(*task).load;
        if load.over() {
            return;
        }
        let Some((op, slot)) = load.choose() else {
            load.idle.push(task);
            return;
        };
        load.left -= 1;
        (*task).op = op;
        (*task).slot = slot;
        if slot != usize::MAX {
            load.busy[slot] = true;
        }
        let seed = load.config.seed;
        let buffer = &mut (*task).buffer;
        let blocks = load.blocks_per_command;
        let mut lba = if slot == usize::MAX { 0 } else { slot as u64 * u64::from(blocks) };
        (*task).number = (*task).number.wrapping_add(1);
        let blocks = match load.config.large_reads {
            Some((every, bytes)) if (*task).number.is_multiple_of(every) => {
                let large = bytes / (load.config.block_size / blocks);
                let room = (load.content.len() as u64 * u64::from(blocks)).saturating_sub(u64::from(large));
                lba = lba.min(room);
                large
            }
            _ => blocks,
        };
        let patterned = load.config.verify || load.phase != Phase::Load;
        match op {
            Op::Write if patterned => {
                (*task).generation = match load.content[slot] {
                    Content::Pattern(generation) => generation.wrapping_add(1),
                    Content::Unknown | Content::Zeroes => 1,
                };
                fill(buffer, seed, slot, (*task).generation);
            }
            Op::Compare => match load.content[slot] {
                Content::Pattern(generation) => fill(buffer, seed, slot, generation),
                Content::Unknown | Content::Zeroes => buffer.fill(0),
            },
            Op::Dsm => {
                buffer[..16].fill(0);
                buffer[4..8].copy_from_slice(&blocks.to_le_bytes());
                buffer[8..16].copy_from_slice(&lba.to_le_bytes());
            }
            _ => {}
        }
        let (ns, qpair, arg) = (load.ns, (*task).queue.cast(), task.cast::<c_void>());
        let payload = buffer.as_mut_ptr();
        load.outstanding += 1;
        (*task).submitted = Some(Instant::now());
        let rc = match op {
            Op::Read => tcp::spdk_nvme_ns_cmd_read(ns, qpair, payload, lba, blocks, io_complete, arg),
            Op::Write => tcp::spdk_nvme_ns_cmd_write(ns, qpair, payload, lba, blocks, io_complete, arg),
            Op::Compare => tcp::spdk_nvme_ns_cmd_compare(ns, qpair, payload, lba, blocks, io_complete, arg),
            Op::WriteZeroes => tcp::spdk_nvme_ns_cmd_write_zeroes(
                ns,
                qpair,
                std::ptr::null_mut(),
                lba,
                blocks,
                io_complete,
                arg,
            ),
            Op::Flush => tcp::spdk_nvme_ns_cmd_flush(ns, qpair, io_complete, arg),
            Op::Dsm => {
                tcp::spdk_nvme_ns_cmd_dataset_management(ns, qpair, 1 << 2, payload, 1, io_complete, arg)
            }
        };
        if rc != 0 {
            // Depth and slots agree, so only a queue that is down gets here; the next poll of it
            // says why.
            let load = &mut *(*task).load;
            load.outstanding -= 1;
            load.broken = true;
        }
    }
}

/// A command of the load is done.
///
/// # Safety
/// `ctx` is the task that submitted it, `cpl` its completion.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn io_complete(ctx: *mut c_void, cpl: *const spdk_nvme_cpl) {
    probe_entry!();
    let task: *mut perf_task = ctx.cast();
    // SAFETY: by contract; the load outlives the task.
    unsafe {
        let now = Instant::now();
        let load = &mut *(*task).load;
        let ok = Status::from_word((*cpl).status) == Status::SUCCESS;
        load.outstanding -= 1;
        if load.phase == Phase::Load {
            if let Some(at) = (*task).submitted {
                load.histogram.add((now - at).as_nanos() as u64);
            }
            load.commands += 1;
            match (*task).op {
                Op::Read => load.reads += 1,
                Op::Write => load.writes += 1,
                _ => {}
            }
        }
        if !ok {
            load.errors += 1;
        }
        let slot = (*task).slot;
        if slot != usize::MAX {
            load.busy[slot] = false;
            settle(load, &mut *task, slot, ok);
        }
        if load.config.bursts && load.phase == Phase::Load {
            load.idle.push(task);
        } else {
            submit_single_io(task);
        }
    }
}

/// Notes what a slot holds after the command, or checks what it held.
fn settle(load: &mut Load, task: &mut perf_task, slot: usize, ok: bool) {
    let seed = load.config.seed;
    let exclusive = load.config.verify || load.phase != Phase::Load;
    match task.op {
        Op::Read if ok && exclusive => {
            let right = match load.content[slot] {
                Content::Unknown => return,
                Content::Zeroes => task.buffer.iter().all(|b| *b == 0),
                Content::Pattern(generation) => {
                    let mut wanted = vec![0; task.buffer.len()];
                    fill(&mut wanted, seed, slot, generation);
                    wanted == task.buffer
                }
            };
            load.verified += 1;
            load.verify_errors += u64::from(!right);
        }
        Op::Write if ok && exclusive => load.content[slot] = Content::Pattern(task.generation),
        Op::WriteZeroes if ok => load.content[slot] = Content::Zeroes,
        Op::Dsm if ok => {
            // SAFETY: the namespace outlives the load.
            let zeroes = unsafe { (*load.ns).deallocated_reads_zero };
            load.content[slot] = if zeroes { Content::Zeroes } else { Content::Unknown };
        }
        Op::Write | Op::WriteZeroes | Op::Dsm => load.content[slot] = Content::Unknown,
        Op::Read | Op::Compare | Op::Flush => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_bucket_is_within_a_hundredth(value in 1u64..u64::MAX / 2) {
            let upper = Histogram::upper(Histogram::bucket(value));
            prop_assert!(upper >= value);
            prop_assert!(upper - value <= value / 100, "{} for {}", upper, value);
        }

        #[test]
        fn quantiles_lie_in_order_and_inside(values in proptest::collection::vec(1u64..1 << 40, 1..200)) {
            let mut h = Histogram::new();
            for v in &values {
                h.add(*v);
            }
            let l = h.latency().unwrap();
            prop_assert!(l.min_ns <= l.p50_ns && l.p50_ns <= l.p99_ns && l.p99_ns <= l.max_ns);
            prop_assert_eq!(l.max_ns, *values.iter().max().unwrap());
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let exact = sorted[sorted.len().div_ceil(2) - 1];
            prop_assert!(l.p50_ns >= exact && l.p50_ns - exact <= exact / 100);
        }

        #[test]
        fn patterns_tell_slot_and_generation(slot in 0usize..1000, generation in 1u32..1000) {
            let (mut a, mut b, mut c) = ([0u8; 64], [0u8; 64], [0u8; 64]);
            fill(&mut a, 1, slot, generation);
            fill(&mut b, 1, slot, generation + 1);
            fill(&mut c, 1, slot + 1, generation);
            prop_assert_ne!(a, b);
            prop_assert_ne!(a, c);
        }
    }
}
