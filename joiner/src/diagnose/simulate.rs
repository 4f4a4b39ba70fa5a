//! A small simulation of a host, a fabric and a target, with a fault in one of them: what diagnose is tested on, since
//! its truth is known. Commands go from place to place in the order of time, and wait in line where something serves
//! one at a time. It uses nothing of diagnose.

use crate::synthetic::{Load, Random};
use run_format::{
    Boundary, Cid, Command, MetricKind, Nanos, QueueId, Run, Side, TelemetryBatch, TelemetryMetric,
    TelemetryRow, TelemetryWriter,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::path::Path;
use std::sync::Arc;

/// How storage serves.
#[derive(Clone, Copy, Debug)]
pub(super) enum Storage {
    /// Each command by itself: at least so long, and so much longer on average.
    Parallel(i64, f64),
    /// One after the other; the same, and `per_byte` ns for each byte.
    Serial(i64, f64, f64),
    /// The same number in equal times, each at least so long.
    Limit(i64, f64),
    /// As parallel, but so many times slower in episodes: every, for how long, by which factor.
    Episodes(i64, f64, i64, i64, f64),
    /// As parallel, and slower by this share for each command of namespace 2 that is there.
    Shared(i64, f64, f64),
}

/// A system and its load.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) seed: u64,
    pub(super) commands: usize,
    pub(super) queues: u32,
    /// Commands outstanding.
    pub(super) places: u32,
    /// CPUs that submit.
    pub(super) cpus: u32,
    /// Of so many places out of ten, the queue is the first one.
    pub(super) on_first: u32,
    /// Sizes, and out of ten how many of each.
    pub(super) sizes: [(u32, u32); 2],
    /// Of ten commands, how many are writes.
    pub(super) writes: u32,
    /// Writes larger than this have an R2T.
    pub(super) in_capsule: u32,
    pub(super) sequential: bool,
    pub(super) pause: f64,
    pub(super) storage: Storage,
    /// Serving of one command after the other on each queue: in the host's driver, in the target's.
    pub(super) host_serial: i64,
    pub(super) network_serial: i64,
    pub(super) target_serial: i64,
    /// Each byte of data on a queue's connection, one after the other, ns.
    pub(super) per_byte: f64,
    /// Whether small commands wait for the data of large ones.
    pub(super) in_order: bool,
    /// What the network and its data take at least, each way, ns.
    pub(super) network: i64,
    pub(super) network_more: f64,
    /// The host's way out, ns.
    pub(super) way_out: i64,
    /// Stretches of each second in which something is slower: from when to when in ms, of the network, of the host, of
    /// storage; by which factor.
    pub(super) slow_network: Option<(i64, i64, f64)>,
    pub(super) slow_host: Option<(i64, i64, f64)>,
    pub(super) slow_storage: Option<(i64, i64, f64)>,
    /// Of a thousand commands, how many wait for a buffer, and how long.
    pub(super) buffer_waits: (u32, i64),
    /// Retransmissions a second on each queue, and how long the connection stands still for each.
    pub(super) losses: f64,
    pub(super) stall: i64,
    /// Places of the second namespace, out of ten; they run only in odd hundredths of 40 ms where `bursts`.
    pub(super) neighbour: u32,
    pub(super) bursts: bool,
    pub(super) one_in: u32,
    /// The machine is away: every so many ns, for how long. What was due then ends when it is back.
    pub(super) away: Option<(i64, i64)>,
}

impl World {
    /// A healthy one, with a load of some thousand commands a second.
    pub(super) fn new(seed: u64) -> World {
        World {
            seed,
            commands: 8_000,
            queues: 4,
            places: 16,
            cpus: 4,
            on_first: 0,
            sizes: [(4_096, 10), (4_096, 0)],
            writes: 3,
            in_capsule: 8_192,
            sequential: false,
            pause: 2e6,
            storage: Storage::Parallel(60_000, 20_000.0),
            host_serial: 0,
            network_serial: 0,
            target_serial: 0,
            per_byte: 0.0,
            in_order: false,
            network: 10_000,
            network_more: 4_000.0,
            way_out: 600,
            slow_network: None,
            slow_host: None,
            slow_storage: None,
            buffer_waits: (0, 0),
            losses: 0.0,
            stall: 0,
            neighbour: 0,
            bursts: false,
            one_in: 1,
            away: None,
        }
    }

    pub(super) fn load(&self) -> Load {
        let mut load = Load { seed: self.seed, queues: self.queues as u16, ..Load::default() };
        load.host.one_in = self.one_in;
        load.target.one_in = self.one_in;
        load
    }
}

/// What happened.
#[derive(Debug)]
pub(super) struct Happened {
    pub(super) load: Load,
    host: Vec<(u64, Command)>,
    target: Vec<(u64, Command)>,
    /// Retransmissions: when, and on which queue.
    pub(super) losses: Vec<(i64, u32)>,
    /// The end, in the load's time.
    pub(super) end: i64,
}

#[derive(Debug)]
struct Under {
    h: Command,
    t: Command,
    place: u32,
    write: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Begin,
    Driver,
    Sent,
    Received,
    Submit,
    Done,
    Handed,
    Back,
}

/// Runs a world.
pub(super) fn run(world: &World) -> Happened {
    Simulation::new(world).run()
}

struct Simulation<'w> {
    world: &'w World,
    random: Random,
    events: BinaryHeap<Reverse<(i64, usize, Step)>>,
    under: Vec<Under>,
    host_free: Vec<i64>,
    target_free: Vec<i64>,
    way_free: Vec<[i64; 2]>,
    storage_free: i64,
    in_storage: i64,
    stalls: Vec<Vec<i64>>,
    uses: BTreeMap<u32, u16>,
    begun: usize,
    next_block: u64,
    host: Vec<(u64, Command)>,
    target: Vec<(u64, Command)>,
}

impl<'w> Simulation<'w> {
    fn new(world: &'w World) -> Simulation<'w> {
        let queues = world.queues as usize;
        let mut random = Random::new(world.seed);
        let mut stalls = Vec::new();
        for _ in 0..queues {
            let (mut times, mut at) = (Vec::new(), 0i64);
            while world.losses > 0.0 && at < 60_000_000_000 {
                at += more(&mut random, 1e9 / world.losses).max(1_000_000);
                times.push(at);
            }
            stalls.push(times);
        }
        Simulation {
            world,
            random,
            events: BinaryHeap::new(),
            under: Vec::new(),
            host_free: vec![0; queues],
            target_free: vec![0; queues],
            way_free: vec![[0; 2]; queues],
            storage_free: 0,
            in_storage: 0,
            stalls,
            uses: BTreeMap::new(),
            begun: 0,
            next_block: 0,
            host: Vec::new(),
            target: Vec::new(),
        }
    }

    fn run(mut self) -> Happened {
        for place in 0..self.world.places {
            let at = more(&mut self.random, self.world.pause.max(10_000.0));
            self.begin(place, at);
        }
        while let Some(Reverse((now, n, step))) = self.events.pop() {
            self.step(now, n, step);
        }
        let end = self.host.iter().filter_map(|(_, c)| c.time(Boundary::HEnd)).map(Nanos::as_i64).max();
        let end = end.unwrap_or(0);
        let losses = self.stalls.iter().enumerate().flat_map(|(queue, times)| {
            times.iter().filter(move |&&at| at < end).map(move |&at| (at, queue as u32))
        });
        let mut losses: Vec<(i64, u32)> = losses.collect();
        losses.sort_unstable();
        Happened { load: self.world.load(), losses, host: self.host, target: self.target, end }
    }

    /// Begins a place's next command.
    fn begin(&mut self, place: u32, at: i64) {
        if self.begun >= self.world.commands {
            return;
        }
        self.begun += 1;
        let w = self.world;
        let of_neighbour = place % 10 < w.neighbour;
        let at = match of_neighbour && w.bursts && at / 40_000_000 % 2 == 0 {
            true => (at / 40_000_000 + 1) * 40_000_000 + more(&mut self.random, 10_000.0),
            false => at,
        };
        let queue = if place % 10 < w.on_first { 0 } else { place % w.queues };
        let size = if self.random.below(10) < w.sizes[0].1 { w.sizes[0].0 } else { w.sizes[1].0 };
        let write = self.random.below(10) < w.writes;
        let uses = self.uses.entry(place).or_default();
        *uses = uses.wrapping_add(1);
        let slba = if w.sequential {
            self.next_block += u64::from(size / 512);
            self.next_block
        } else {
            self.random.bits() % (1 << 20) * 8
        };
        let base = Command {
            queue: QueueId(queue),
            cid: Cid((*uses & 0xf) << 12 | place as u16 & 0xfff),
            opcode: if write { 1 } else { 2 },
            nsid: if of_neighbour { 2 } else { 1 },
            slba,
            nlb0: (size / 512 - 1) as u16,
            bytes: size,
            cpu: (place % w.cpus) as u16,
            r2ts: u8::from(write && size > w.in_capsule),
            ..Command::default()
        };
        self.under.push(Under { h: base.clone(), t: base, place, write });
        self.events.push(Reverse((at, self.under.len() - 1, Step::Begin)));
    }

    fn next(&mut self, at: i64, n: usize, step: Step) {
        self.events.push(Reverse((at, n, step)));
    }

    fn put_host(&mut self, n: usize, boundary: Boundary, at: i64) {
        self.under[n].h.times[boundary.slot()] = Some(Nanos(at as u64));
    }

    fn put_target(&mut self, n: usize, boundary: Boundary, at: i64) {
        self.under[n].t.times[boundary.slot()] = Some(Nanos(at as u64));
    }

    /// The network one way: its time, its turn on the connection, and what stands still.
    fn way(&mut self, now: i64, n: usize, way: usize, data: u32) -> i64 {
        let w = self.world;
        let queue = self.under[n].h.queue.0 as usize;
        let factor = within(now, w.slow_network);
        let mut at = now + ((w.network + more(&mut self.random, w.network_more)) as f64 * factor) as i64;
        let bytes = (f64::from(data) * w.per_byte) as i64 + w.network_serial;
        if bytes > 0 || w.in_order {
            let begin =
                if w.in_order || w.network_serial > 0 { now.max(self.way_free[queue][way]) } else { now };
            let over = begin + bytes;
            if w.in_order || w.network_serial > 0 {
                self.way_free[queue][way] = over;
            }
            at = at.max(over + w.network);
        }
        // A segment that is lost holds up all behind it.
        let next = self.stalls[queue].partition_point(|&s| s + 20_000 < now);
        if let Some(&stall) = self.stalls[queue].get(next)
            && stall - w.stall < at
            && w.stall > 0
            && now < stall + 20_000
        {
            at = at.max(stall + w.network);
        }
        at
    }

    fn step(&mut self, now: i64, n: usize, step: Step) {
        let w = self.world;
        let queue = self.under[n].h.queue.0 as usize;
        let host = within(now, w.slow_host);
        let scaled = |time: i64, factor: f64| (time as f64 * factor) as i64;
        match step {
            Step::Begin => {
                self.put_host(n, Boundary::HQueued, now);
                let at = now + scaled(800 + more(&mut self.random, 300.0), host);
                self.next(at, n, Step::Driver);
            }
            Step::Driver => {
                self.put_host(n, Boundary::HDriver, now);
                let mut at = now + scaled(1_500 + more(&mut self.random, 500.0), host);
                if w.host_serial > 0 {
                    at = at.max(self.host_free[queue]) + more(&mut self.random, w.host_serial as f64);
                    self.host_free[queue] = at;
                }
                self.next(at, n, Step::Sent);
            }
            Step::Sent => {
                self.put_host(n, Boundary::HSent, now);
                let u = &self.under[n];
                let data = if u.write && u.h.r2ts == 0 { u.h.bytes } else { 0 };
                let at = self.way(now, n, 0, data);
                self.next(at, n, Step::Received);
            }
            Step::Received => {
                let mut at = now;
                if w.target_serial > 0 {
                    at = at.max(self.target_free[queue % 2]);
                    self.target_free[queue % 2] =
                        at + w.target_serial + more(&mut self.random, w.target_serial as f64 * 0.3);
                }
                // What waits for the reactor is read when it comes to it.
                let read = now + (at - now) / 2;
                self.put_target(n, Boundary::TRecv, read);
                let mut at = at + 900 + more(&mut self.random, 300.0);
                if self.random.below(1_000) < w.buffer_waits.0 {
                    at += w.buffer_waits.1 / 2 + more(&mut self.random, w.buffer_waits.1 as f64 / 2.0);
                }
                if self.under[n].h.r2ts > 0 {
                    self.put_target(n, Boundary::TR2t, at);
                    let seen = self.way(at, n, 1, 0);
                    self.put_host(n, Boundary::HR2t, seen);
                    let answer = 1_200 + more(&mut self.random, 400.0);
                    self.under[n].h.r2t_turnaround = Some(Nanos(answer as u64));
                    self.put_host(n, Boundary::HDataSent, seen + answer);
                    at = self.way(seen + answer, n, 0, self.under[n].h.bytes);
                    self.put_target(n, Boundary::TData, at);
                    at += 300;
                }
                self.next(at, n, Step::Submit);
            }
            Step::Submit => {
                self.put_target(n, Boundary::TSubmit, now);
                let took = self.storage(now, n);
                self.in_storage += i64::from(self.under[n].h.nsid == 2);
                self.next(took, n, Step::Done);
            }
            Step::Done => {
                self.in_storage -= i64::from(self.under[n].h.nsid == 2);
                self.put_target(n, Boundary::TDone, now);
                let at = now + 400 + more(&mut self.random, 200.0);
                self.put_target(n, Boundary::TResp, at);
                let handed = at + 500 + more(&mut self.random, 300.0);
                self.next(handed, n, Step::Handed);
            }
            Step::Handed => {
                self.put_target(n, Boundary::TSent, now);
                let u = &self.under[n];
                let data = if u.write { 0 } else { u.h.bytes };
                let at = self.way(now, n, 1, data);
                self.next(at, n, Step::Back);
            }
            Step::Back => self.back(now, n, host),
        }
    }

    fn back(&mut self, now: i64, n: usize, host: f64) {
        let w = self.world;
        self.put_host(n, Boundary::HRecv, now);
        let mut at =
            now + ((w.way_out + more(&mut self.random, w.way_out as f64 * 0.3)) as f64 * host) as i64;
        self.put_host(n, Boundary::HDone, at);
        at += ((600 + more(&mut self.random, 200.0)) as f64 * host) as i64;
        self.put_host(n, Boundary::HEnd, at);
        let under = &self.under[n];
        self.host.push((n as u64, under.h.clone()));
        self.target.push((n as u64, under.t.clone()));
        let place = under.place;
        let pause = 200 + more(&mut self.random, w.pause);
        self.begin(place, at + pause);
    }

    /// When storage is done with a command, and somebody is there to see it.
    fn storage(&mut self, now: i64, n: usize) -> i64 {
        let done = self.served(now, n);
        match self.world.away {
            Some((every, length)) if done % every < length => done / every * every + length,
            _ => done,
        }
    }

    /// When storage has served a command.
    fn served(&mut self, now: i64, n: usize) -> i64 {
        let factor = within(now, self.world.slow_storage);
        let mut served = |least: i64, mean: f64, factor: f64| {
            ((least + more(&mut self.random, mean)) as f64 * factor) as i64
        };
        match self.world.storage {
            Storage::Parallel(least, mean) => now + served(least, mean, factor),
            Storage::Serial(least, mean, per_byte) => {
                let bytes = (f64::from(self.under[n].h.bytes) * per_byte) as i64;
                let over = now.max(self.storage_free) + served(least, mean, factor) + bytes;
                self.storage_free = over;
                over
            }
            Storage::Limit(each, least) => {
                let turn = now.max(self.storage_free) + each;
                self.storage_free = turn;
                turn.max(now + least as i64 + served(0, least * 0.2, 1.0))
            }
            Storage::Episodes(least, mean, every, length, by) => {
                let slow = if now % every < length { by } else { 1.0 };
                now + served(least, mean, slow)
            }
            Storage::Shared(least, mean, each) => {
                let others = if self.under[n].h.nsid == 1 { self.in_storage as f64 } else { 0.0 };
                now + served(least, mean, 1.0 + each * others)
            }
        }
    }
}

/// An exponential time.
pub(super) fn more(random: &mut Random, mean: f64) -> i64 {
    (-(1.0 - random.unit()).ln() * mean) as i64
}

/// The factor at a time.
fn within(now: i64, slow: Option<(i64, i64, f64)>) -> f64 {
    match slow {
        Some((from, to, factor)) if (from * 1_000_000..to * 1_000_000).contains(&(now % 1_000_000_000)) => {
            factor
        }
        _ => 1.0,
    }
}

/// Changes a collector's metrics and rows before they are written.
pub(super) type Change<'a> = dyn FnMut(&mut Vec<TelemetryMetric>, &mut Vec<TelemetryRow>) + 'a;

/// One metric of one object, sampled.
pub(super) struct Sampled {
    pub(super) side: Side,
    pub(super) collector: &'static str,
    pub(super) metric: &'static str,
    pub(super) kind: MetricKind,
    pub(super) object: String,
    /// The value at a time of the load, ns; or the events.
    pub(super) value: Box<dyn Fn(i64) -> Option<f64>>,
    pub(super) events: Vec<i64>,
}

/// A gauge or counter.
pub(super) fn sampled(
    side: Side,
    collector: &'static str,
    metric: &'static str,
    kind: MetricKind,
    object: &str,
    value: impl Fn(i64) -> Option<f64> + 'static,
) -> Sampled {
    Sampled {
        side,
        collector,
        metric,
        kind,
        object: object.to_owned(),
        value: Box::new(value),
        events: Vec::new(),
    }
}

/// The connection of a queue as a side names it.
pub(super) fn connection(side: Side, queue: u32) -> String {
    let (host, target) = (format!("192.0.2.1:{}", 40_000 + queue), "192.0.2.2:4420");
    match side {
        Side::Host => format!("{host}>{target}"),
        Side::Target => format!("{target}>{host}"),
    }
}

impl Happened {
    /// Those commands were another host's, which is not recorded: the target's run alone has them.
    pub(super) fn leave_to_another_host(&mut self, is_its: impl Fn(&Command) -> bool) {
        self.host.retain(|(_, command)| !is_its(command));
    }

    /// Writes both runs with their telemetry, sampled every 100 ms, by the run format's own writers.
    pub(super) fn write(&self, folder: &Path, telemetry: &[Sampled]) -> (Run, Run) {
        self.write_as(folder, telemetry, &mut |_, _| ())
    }

    /// The same, with each collector's metrics and rows in the order of time changed by `change` before they are written.
    pub(super) fn write_as(
        &self,
        folder: &Path,
        telemetry: &[Sampled],
        change: &mut Change<'_>,
    ) -> (Run, Run) {
        let runs = self.load.observe(self.host.clone(), self.target.clone());
        let (host, target) = runs.write(folder).unwrap();
        for (run, side) in [(&host, Side::Host), (&target, Side::Target)] {
            let of_side: Vec<&Sampled> = telemetry.iter().filter(|s| s.side == side).collect();
            if !of_side.is_empty() {
                self.write_telemetry(run.directory(), side, &of_side, change);
            }
        }
        (Run::open(host.directory()).unwrap(), Run::open(target.directory()).unwrap())
    }

    fn write_telemetry(&self, run: &Path, side: Side, lines: &[&Sampled], change: &mut Change<'_>) {
        let writer = TelemetryWriter::create(run).unwrap();
        let sink = writer.sink().unwrap();
        let mut collectors: Vec<&str> = lines.iter().map(|l| l.collector).collect();
        collectors.sort_unstable();
        collectors.dedup();
        for collector in collectors {
            let here: Vec<&&Sampled> = lines.iter().filter(|l| l.collector == collector).collect();
            let mut names: Vec<(&str, MetricKind)> = here.iter().map(|l| (l.metric, l.kind)).collect();
            names.sort_unstable_by_key(|n| n.0);
            names.dedup_by_key(|n| n.0);
            let mut metrics: Vec<TelemetryMetric> = names
                .iter()
                .map(|(name, kind)| TelemetryMetric {
                    name: (*name).into(),
                    unit: String::new(),
                    kind: *kind,
                    bits: (*kind == MetricKind::Counter).then_some(64),
                })
                .collect();
            metrics.push(TelemetryMetric { name: "sampled".into(), ..TelemetryMetric::default() });
            let place = |name: &str| metrics.iter().position(|m| m.name == name).unwrap() as u16;
            let mut rows: Vec<TelemetryRow> = Vec::new();
            let mut row = |at: i64, metric: u16, object: &str, value: Option<f64>| {
                rows.push(TelemetryRow {
                    at: self.load.on_clock(side, at),
                    metric,
                    object: object.into(),
                    value,
                });
            };
            for at in (0..=self.end + 100_000_000).step_by(100_000_000) {
                for line in here.iter().filter(|l| l.kind != MetricKind::Event) {
                    row(at, place(line.metric), &line.object, (line.value)(at));
                }
                row(at, place("sampled"), "", Some(0.0));
            }
            for line in here.iter().filter(|l| l.kind == MetricKind::Event) {
                line.events.iter().for_each(|&at| row(at, place(line.metric), &line.object, Some(1.0)));
            }
            rows.sort_by_key(|row| row.at);
            change(&mut metrics, &mut rows);
            let metrics: Arc<[TelemetryMetric]> = metrics.into();
            sink.give(TelemetryBatch { collector: collector.into(), anew: true, rows, metrics });
        }
        drop(sink);
        writer.close().unwrap();
    }
}
