//! Makes pairs of runs whose truth is known: a simulated load on queues between a host and a target, as two
//! recordings see it, each with its own clock and its own losses. For tests and benchmarks; it uses nothing
//! of the join.

use run_format::{
    Boundary, Cid, ClockPair, Command, Counters, Endpoint, Hook, Kind, Machine, Manifest, Nanos, Queue,
    QueueId, Run, RunWriter, Side, Sink, Software, State, Window, Windows, sampling,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::path::Path;

pub use crate::random::Random;

impl Random {
    /// Uniform in 0 .. 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Of the standard normal distribution (Box and Muller).
    fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.unit(), self.unit());
        (-2.0 * a.ln()).sqrt() * (2.0 * std::f64::consts::PI * b).cos()
    }

    /// A time of at least `least` ns, `more` ns longer on average (exponential).
    fn time(&mut self, least: i64, more: f64) -> i64 {
        least + (-(1.0 - self.unit()).ln() * more) as i64
    }
}

/// Which blocks a load touches.
#[derive(Clone, Copy, Debug)]
pub enum Pattern {
    /// Any of so many, at random.
    Random(u64),
    /// One after the other.
    Sequential,
    /// Always the same one.
    OneBlock,
}

/// How a host names its commands.
#[derive(Clone, Copy, Debug)]
pub enum Cids {
    /// A tag and four bits that count its uses, as Linux does.
    Generations,
    /// The same for every command of a place in the queue, as SPDK does.
    Reused,
}

/// What one side's recording keeps of the load.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// The share of commands whose record is not lost, by chance.
    pub keep: f64,
    /// One in this many is sampled, by the shared hash.
    pub one_in: u32,
    /// From and to which share of the load's time it records.
    pub during: (f64, f64),
}

impl Default for View {
    fn default() -> View {
        View { keep: 1.0, one_in: 1, during: (-0.1, 1.1) }
    }
}

/// What makes commands that lie close together in time alike, and runs of one system differ: real machines are
/// not a sequence of independent draws.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// By how much service times wander, as a share of themselves (standard deviation).
    pub wander: f64,
    /// For how long the wandering hangs together, ns.
    pub wander_ns: f64,
    /// By how much service times grow over a second, as a share; its sign is up to the seed.
    pub drift: f64,
    /// Bursts of other work a second, of exponential length, at random.
    pub bursts: f64,
    /// Mean length of a burst, ns.
    pub burst_ns: f64,
    /// What service times are multiplied by in a burst.
    pub burst_factor: f64,
    /// By how much whole runs differ, as a share (standard deviation).
    pub run_to_run: f64,
}

impl Default for Weather {
    /// As on a shared virtual machine.
    fn default() -> Weather {
        Weather {
            wander: 0.05,
            wander_ns: 10e6,
            drift: 0.0005,
            bursts: 2.0,
            burst_ns: 10e6,
            burst_factor: 1.5,
            run_to_run: 0.003,
        }
    }
}

/// Time in a [`Climate`] goes on in steps of this, ns.
const STEP_NS: i64 = 500_000;

/// A weather as it turns out: what service times are multiplied by, over time.
#[derive(Debug)]
struct Climate {
    weather: Option<Weather>,
    random: Random,
    factors: Vec<f64>,
    level: f64,
    trend: f64,
    wandered: f64,
    burst_left: i64,
}

impl Climate {
    fn new(weather: Option<Weather>, seed: u64) -> Climate {
        let mut random = Random::new(seed);
        let (mut level, mut trend) = (1.0, 0.0);
        if let Some(weather) = weather {
            level += weather.run_to_run * random.normal();
            trend = if random.unit() < 0.5 { weather.drift } else { -weather.drift };
        }
        let wandered = random.normal();
        Climate { weather, random, factors: Vec::new(), level, trend, wandered, burst_left: 0 }
    }

    fn at(&mut self, time: i64) -> f64 {
        let Some(weather) = self.weather else { return 1.0 };
        let step = (time / STEP_NS).max(0) as usize;
        while self.factors.len() <= step {
            let keep = (-(STEP_NS as f64) / weather.wander_ns).exp();
            self.wandered = keep * self.wandered + (1.0 - keep * keep).sqrt() * self.random.normal();
            self.burst_left -= STEP_NS;
            if self.random.unit() < weather.bursts * STEP_NS as f64 / 1e9 {
                self.burst_left = self.random.time(0, weather.burst_ns);
            }
            let burst = if self.burst_left > 0 { weather.burst_factor } else { 1.0 };
            let seconds = self.factors.len() as f64 * STEP_NS as f64 / 1e9;
            let factor = self.level * (weather.wander * self.wandered).exp() * burst;
            self.factors.push(factor * (1.0 + self.trend * seconds).max(0.1));
        }
        self.factors[step]
    }
}

/// A load and how it is recorded.
#[derive(Clone, Debug)]
pub struct Load {
    /// The same seed gives the same runs.
    pub seed: u64,
    /// Commands, over all queues.
    pub commands: usize,
    /// Queues.
    pub queues: u16,
    /// Commands outstanding on each queue.
    pub depth: u16,
    /// Blocks touched.
    pub pattern: Pattern,
    /// Names of commands.
    pub cids: Cids,
    /// The share of writes, half of them with an R2T; the others are reads.
    pub writes: f64,
    /// The least time in storage, ns.
    pub storage_least_ns: i64,
    /// Mean of each command's time in storage beyond the least, ns.
    pub storage_ns: f64,
    /// Mean of each way's time in the network beyond 8 us, ns.
    pub network_ns: f64,
    /// Mean pause of a place in the queue before its next command, ns.
    pub pause_ns: f64,
    /// One command in so many is slow in storage, by half a millisecond on average.
    pub slow_one_in: u64,
    /// What disturbs storage, and by itself all the rest.
    pub weather: Option<Weather>,
    /// The host's clock at the load's begin.
    pub host_clock_ns: i64,
    /// The target's clock at the load's begin.
    pub target_clock_ns: i64,
    /// By how much the target's clock runs faster than the host's, parts per million.
    pub drift_ppm: f64,
    /// The host's recording.
    pub host: View,
    /// The target's recording.
    pub target: View,
    /// Whether both sides know the TCP stream positions of the capsules.
    pub positions: bool,
    /// Whether both sides know the host's ports.
    pub ports: bool,
}

impl Default for Load {
    fn default() -> Load {
        Load {
            seed: 1,
            commands: 10_000,
            queues: 2,
            depth: 32,
            pattern: Pattern::Random(1 << 20),
            cids: Cids::Generations,
            writes: 0.3,
            storage_least_ns: 6_000,
            storage_ns: 20_000.0,
            network_ns: 4_000.0,
            pause_ns: 2_000.0,
            slow_one_in: 500,
            weather: None,
            host_clock_ns: 90_000_000_000_000,
            target_clock_ns: 4_000_000_000_000,
            drift_ppm: 8.0,
            host: View::default(),
            target: View::default(),
            positions: false,
            ports: true,
        }
    }
}

/// One side's run, with each command's number in the load: the truth that a join does not see.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The manifest.
    pub manifest: Manifest,
    /// The queues, in the order of their numbers.
    pub queues: Vec<Queue>,
    /// The commands, in the order in which they completed, each with its number in the load.
    pub commands: Vec<(u64, Command)>,
    /// The slices in which it was recorded, on its own clock; `None` for a run that was recorded throughout.
    pub slices: Option<std::sync::Arc<[(i64, i64)]>>,
}

/// Both sides of a load.
#[derive(Clone, Debug)]
pub struct Runs {
    /// The host's run.
    pub host: Recorded,
    /// The target's run.
    pub target: Recorded,
}

/// The two climates of a load.
#[derive(Debug)]
struct Climates {
    storage: Climate,
    rest: Climate,
}

impl Load {
    /// Simulates the load and records it.
    #[must_use]
    pub fn record(&self) -> Runs {
        let mut random = Random::new(self.seed);
        let mut climates = self.climates();
        let places = usize::from(self.queues.max(1)) * usize::from(self.depth.max(1));
        let mut host = Vec::with_capacity(self.commands);
        let mut target = Vec::with_capacity(self.commands);
        let mut next_block = 0;
        let mut end = 0;
        for place in 0..places {
            let queue = (place % usize::from(self.queues.max(1))) as u32;
            let tag = (place / usize::from(self.queues.max(1))) as u16;
            let count = self.commands / places + usize::from(place < self.commands % places);
            let mut now = random.time(0, 10_000.0);
            for n in 0..count {
                let id = (n * places + place) as u64;
                let cid = self.cid(n, tag);
                let slba = self.block(&mut random, &mut next_block);
                let (h, t) = self.command(&mut random, &mut climates, queue, cid, slba, &mut now);
                end = end.max(now);
                host.push((id, h));
                target.push((id, t));
            }
        }
        if self.positions {
            number_stream(&mut host, &mut target);
        }
        let on_host = self.see(&self.host, Side::Host, host, end, &mut random);
        let on_target = self.see(&self.target, Side::Target, target, end, &mut random);
        Runs { host: on_host, target: on_target }
    }

    /// Records commands that were simulated elsewhere, their times in the load's own time, as both sides see them: pairs of
    /// a number and a command, the same ones for the host and the target.
    #[must_use]
    pub fn observe(&self, host: Vec<(u64, Command)>, target: Vec<(u64, Command)>) -> Runs {
        let mut random = Random::new(self.seed ^ 0x0b5e_44e0);
        let last = host.iter().flat_map(|(_, c)| c.times.iter().flatten()).map(|t| t.as_i64()).max();
        let end = last.unwrap_or(0);
        let host = self.see(&self.host, Side::Host, host, end, &mut random);
        let target = self.see(&self.target, Side::Target, target, end, &mut random);
        Runs { host, target }
    }

    /// A time of the load as a side's clock shows it, for what is recorded beside the commands.
    #[must_use]
    pub fn on_clock(&self, side: Side, at: i64) -> Nanos {
        Nanos(self.clock(side, at).max(0) as u64)
    }

    /// One command on both sides, its times in the load's own time.
    fn command(
        &self,
        random: &mut Random,
        climates: &mut Climates,
        queue: u32,
        cid: Cid,
        slba: u64,
        now: &mut i64,
    ) -> (Command, Command) {
        let kind = random.unit();
        let (opcode, bytes, r2t) = match kind {
            k if k >= self.writes => (2, 4_096, false),
            k if k * 2.0 >= self.writes => (1, 4_096, false),
            _ => (1, 65_536, true),
        };
        let base = Command {
            queue: QueueId(queue),
            cid,
            opcode,
            nsid: 1,
            slba,
            nlb0: (bytes / 512 - 1) as u16,
            bytes,
            cpu: queue as u16,
            r2ts: u8::from(r2t),
            ..Command::default()
        };
        let (mut h, mut t) = (base.clone(), base);
        let mut at = *now;
        let rest = climates.rest.at(at);
        let storage = climates.storage.at(at);
        let scaled = |time: i64, factor: f64| (time as f64 * factor) as i64;
        let put = |command: &mut Command, boundary: Boundary, at: i64| {
            command.times[boundary.slot()] = Some(Nanos(at as u64));
        };
        put(&mut h, Boundary::HQueued, at);
        at += scaled(random.time(800, 500.0), rest);
        put(&mut h, Boundary::HDriver, at);
        at += scaled(random.time(1_500, 800.0), rest);
        put(&mut h, Boundary::HSent, at);
        at += scaled(random.time(8_000, self.network_ns), rest);
        put(&mut t, Boundary::TRecv, at);
        at += scaled(random.time(900, 300.0), rest);
        if r2t {
            put(&mut t, Boundary::TR2t, at);
            at += scaled(random.time(8_000, self.network_ns), rest);
            put(&mut h, Boundary::HR2t, at);
            let answer = scaled(random.time(1_200, 500.0), rest);
            h.r2t_turnaround = Some(Nanos(answer as u64));
            at += answer;
            put(&mut h, Boundary::HDataSent, at);
            at += scaled(random.time(12_000, self.network_ns), rest);
            put(&mut t, Boundary::TData, at);
            at += scaled(random.time(300, 100.0), rest);
        }
        put(&mut t, Boundary::TSubmit, at);
        let slow = self.slow_one_in > 0 && random.bits().is_multiple_of(self.slow_one_in);
        let served = random.time(self.storage_least_ns, self.storage_ns);
        at += scaled(served, storage) + if slow { random.time(0, 500_000.0) } else { 0 };
        put(&mut t, Boundary::TDone, at);
        at += scaled(random.time(400, 200.0), rest);
        put(&mut t, Boundary::TResp, at);
        at += scaled(random.time(500, 600.0), rest);
        put(&mut t, Boundary::TSent, at);
        at += scaled(random.time(8_000, self.network_ns), rest);
        put(&mut h, Boundary::HRecv, at);
        at += scaled(random.time(300, 200.0), rest);
        put(&mut h, Boundary::HDone, at);
        at += scaled(random.time(600, 400.0), rest);
        put(&mut h, Boundary::HEnd, at);
        *now = at + random.time(200, self.pause_ns);
        (h, t)
    }

    /// Simulates the load and records it straight to `host.run` and `target.run` in a directory, in memory that
    /// does not grow with the number of commands. The load is not that of [`Load::record`]: each place in a
    /// queue has random numbers of its own. [`View::during`] and [`Load::positions`] are not heeded.
    ///
    /// # Errors
    /// What writing or opening the runs ended with.
    pub fn stream(&self, directory: &Path) -> Result<(Run, Run), run_format::Error> {
        let mut host = Streamed::new(self, Side::Host, &directory.join("host.run"))?;
        let mut target = Streamed::new(self, Side::Target, &directory.join("target.run"))?;
        let queues = usize::from(self.queues.max(1));
        let mut places: Vec<Place> = (0..queues * usize::from(self.depth.max(1)))
            .map(|n| {
                let mut random = Random::new(self.seed ^ (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let now = random.time(0, 10_000.0);
                Place { random, now, queue: (n % queues) as u32, tag: (n / queues) as u16, uses: 0 }
            })
            .collect();
        let mut climates = self.climates();
        let mut next_block = 0;
        let mut begin = |place: &mut Place| {
            let cid = self.cid(place.uses, place.tag);
            place.uses += 1;
            let slba = self.block(&mut place.random, &mut next_block);
            let Place { random, now, queue, .. } = place;
            self.command(random, &mut climates, *queue, cid, slba, now)
        };
        // The command that each place has under way, and the places by when theirs is over on either side.
        let over = |command: &Command, boundary| command.time(boundary).map_or(0, Nanos::as_i64);
        let mut under_way: Vec<(Command, Command)> = Vec::with_capacity(places.len());
        let (mut on_host, mut on_target) = (BinaryHeap::new(), BinaryHeap::new());
        let mut left = self.commands;
        for (n, place) in places.iter_mut().enumerate().take(self.commands) {
            let (h, t) = begin(place);
            on_host.push(Reverse((over(&h, Boundary::HEnd), n)));
            on_target.push(Reverse((over(&t, Boundary::TSent), n)));
            under_way.push((h, t));
            left -= 1;
        }
        let mut last = 0;
        while let Some(Reverse((now, n))) = on_host.pop() {
            last = now;
            // What begins from now on is over on the target later than this; what is over here is over there.
            while let Some(Reverse((_, place))) = on_target.peek().copied().filter(|t| t.0.0 <= now) {
                on_target.pop();
                target.take(std::mem::take(&mut under_way[place].1))?;
            }
            host.take(std::mem::take(&mut under_way[n].0))?;
            if left > 0 {
                left -= 1;
                let (h, t) = begin(&mut places[n]);
                on_host.push(Reverse((over(&h, Boundary::HEnd), n)));
                on_target.push(Reverse((over(&t, Boundary::TSent), n)));
                under_way[n] = (h, t);
            }
        }
        Ok((host.close(last)?, target.close(last)?))
    }

    fn climates(&self) -> Climates {
        Climates {
            storage: Climate::new(self.weather, self.seed ^ 0x5704_a6e0),
            rest: Climate::new(self.weather, self.seed ^ 0x0e57_0000),
        }
    }

    /// The name of a place's `n`th command.
    fn cid(&self, n: usize, tag: u16) -> Cid {
        Cid(match self.cids {
            Cids::Generations => (n as u16 & 0xf) << 12 | tag & 0xfff,
            Cids::Reused => tag,
        })
    }

    fn block(&self, random: &mut Random, next: &mut u64) -> u64 {
        match self.pattern {
            Pattern::Random(blocks) => random.bits() % blocks.max(1) * 8,
            Pattern::Sequential => {
                *next += 8;
                *next
            }
            Pattern::OneBlock => 4_096,
        }
    }

    /// A time of the load as a side's clock shows it.
    fn clock(&self, side: Side, at: i64) -> i64 {
        match side {
            Side::Host => at + self.host_clock_ns,
            Side::Target => at + (at as f64 * self.drift_ppm * 1e-6).round() as i64 + self.target_clock_ns,
        }
    }

    fn view(&self, side: Side) -> &View {
        match side {
            Side::Host => &self.host,
            Side::Target => &self.target,
        }
    }

    /// What one side's recording keeps, on that side's clock.
    fn see(
        &self,
        view: &View,
        side: Side,
        mut commands: Vec<(u64, Command)>,
        end: i64,
        random: &mut Random,
    ) -> Recorded {
        let clock = |at: i64| self.clock(side, at);
        let part = |share: f64| (end as f64 * share) as i64;
        let (from, to) = (part(view.during.0), part(view.during.1));
        let whole = |c: &Command| {
            let mut times = c.times.iter().flatten().map(|t| t.as_i64());
            times.all(|t| (from..=to).contains(&t))
        };
        commands.retain(|(_, c)| {
            let sampled =
                sampling::hash(c.cid, c.opcode, c.nsid, c.slba, c.nlb0) <= sampling::limit(view.one_in);
            // Every command takes its chance, so that a recording keeps the same ones of any load.
            let kept = random.unit() < view.keep;
            kept && sampled && whole(c)
        });
        for (_, c) in &mut commands {
            for time in c.times.iter_mut().flatten() {
                *time = Nanos(clock(time.as_i64()) as u64);
            }
        }
        let over = match side {
            Side::Host => Boundary::HEnd,
            Side::Target => Boundary::TSent,
        };
        commands.sort_by_key(|(id, c)| (c.time(over), *id));
        let window = Window { start_ns: Nanos(clock(from) as u64), end_ns: Nanos(clock(to) as u64) };
        Recorded {
            manifest: manifest(side, view, window, commands.len() as u64),
            queues: (0..self.queues.max(1)).map(|q| self.queue(q, side, window.start_ns)).collect(),
            commands,
            slices: None,
        }
    }

    fn queue(&self, number: u16, side: Side, came: Nanos) -> Queue {
        let port = self.ports.then_some(40_000 + number);
        Queue {
            subsystem_nqn: "nqn.2026-01.example:fast".into(),
            host_nqn: "nqn.2014-08.org.nvmexpress:uuid:host".into(),
            cntlid: 1,
            qid: number + 1,
            host: port.map(|port| Endpoint { address: "192.0.2.1".into(), port }),
            target: Some(Endpoint { address: "192.0.2.2".into(), port: 4_420 }),
            device: (side == Side::Host).then(|| "nvme0".into()),
            came,
            existed: true,
            ..Queue::default()
        }
    }
}

/// Gives every capsule its place in the stream of its queue: capsules follow each other in the order of
/// sending, each with its data where it goes in the capsule. The streams begin anywhere.
fn number_stream(host: &mut [(u64, Command)], target: &mut [(u64, Command)]) {
    let mut order: Vec<usize> = (0..host.len()).collect();
    order.sort_by_key(|&n| (host[n].1.queue, host[n].1.time(Boundary::HSent)));
    let mut next: BTreeMap<QueueId, u32> = BTreeMap::new();
    for n in order {
        let command = &mut host[n].1;
        let next = next.entry(command.queue).or_insert(0xffff_0000 + command.queue.0);
        command.stream_position = Some(*next);
        target[n].1.stream_position = Some(*next);
        let data = if command.opcode == 1 { command.bytes } else { 0 };
        *next = next.wrapping_add(72 + data);
    }
}

fn manifest(side: Side, view: &View, window: Window, recorded: u64) -> Manifest {
    let (kind, name, version, hostname) = match side {
        Side::Host => (Kind::Kernel, "nvme-tcp", "6.12.30", "initiator"),
        Side::Target => (Kind::Spdk, "SPDK", "26.05", "storage"),
    };
    let hooks = Boundary::of(side).map(|boundary| Hook {
        boundary,
        hook: Some(format!("simulated {boundary}")),
        rung: 0,
        measured: true,
        instruction: None,
        transport: None,
        estimated_ns: None,
        why: None,
    });
    Manifest {
        format: Manifest::FORMAT.into(),
        side,
        kind,
        tool: env!("CARGO_PKG_VERSION").into(),
        state: State::Closed,
        machine: Machine {
            hostname: hostname.into(),
            kernel: "6.12.30".into(),
            architecture: "x86_64".into(),
            cpus: 8,
            boot_id: format!("boot of {hostname}"),
            ..Machine::default()
        },
        software: Software { name: name.into(), version: version.into(), ..Software::default() },
        hooks: hooks.collect(),
        detail: "stages".into(),
        one_in: view.one_in,
        window,
        windows: None,
        overhead: None,
        // The wall clocks are hours apart: nothing may rest on them.
        clocks: vec![ClockPair {
            monotonic_ns: window.start_ns,
            realtime_ns: Nanos(match side {
                Side::Host => 1_790_000_000_000_000_000,
                Side::Target => 1_790_000_000_000_000_000 + 7_200_000_000_000,
            }),
        }],
        counters: Counters { seen: recorded, recorded, ..Counters::default() },
        workload: None,
        price: None,
        telemetry: None,
        events: Vec::new(),
        labels: BTreeMap::new(),
    }
}

/// A place in a queue: one command after the other.
#[derive(Debug)]
struct Place {
    random: Random,
    now: i64,
    queue: u32,
    tag: u16,
    uses: usize,
}

/// One side's run while a load is streamed.
#[derive(Debug)]
struct Streamed<'a> {
    load: &'a Load,
    side: Side,
    random: Random,
    writer: RunWriter,
}

impl<'a> Streamed<'a> {
    fn new(load: &'a Load, side: Side, directory: &Path) -> Result<Streamed<'a>, run_format::Error> {
        let start_ns = Nanos(load.clock(side, 0) as u64);
        let window = Window { start_ns, end_ns: start_ns };
        let manifest = manifest(side, load.view(side), window, 0);
        let mut writer = RunWriter::create(directory, manifest, true)?;
        for number in 0..load.queues.max(1) {
            writer.queue(load.queue(number, side, start_ns));
        }
        let random = Random::new(load.seed ^ (side as u64 + 1).wrapping_mul(0x5bd1_e995_0000_0001));
        Ok(Streamed { load, side, random, writer })
    }

    fn take(&mut self, mut command: Command) -> Result<(), run_format::Error> {
        let view = self.load.view(self.side);
        let c = &command;
        let sampled = sampling::hash(c.cid, c.opcode, c.nsid, c.slba, c.nlb0) <= sampling::limit(view.one_in);
        let kept = self.random.unit() < view.keep;
        if kept && sampled {
            for time in command.times.iter_mut().flatten() {
                *time = Nanos(self.load.clock(self.side, time.as_i64()) as u64);
            }
            self.writer.command(&command);
            if self.writer.recorded().is_multiple_of(SEGMENT) {
                self.writer.tick()?;
            }
        }
        Ok(())
    }

    fn close(self, last: i64) -> Result<Run, run_format::Error> {
        let recorded = self.writer.recorded();
        let counters = Counters { seen: recorded, recorded, ..Counters::default() };
        let end = Nanos(self.load.clock(self.side, last + 1) as u64);
        let directory = self.writer.directory().to_owned();
        self.writer.close(counters, end)?;
        Run::open(&directory)
    }
}

/// Commands after which a streamed run may begin a new segment.
const SEGMENT: u64 = 1 << 18;

impl Recorded {
    /// Moves the recording by so many days, wall clock and boot with it: a run of its own.
    pub fn of_day(&mut self, day: u32) {
        for clock in &mut self.manifest.clocks {
            clock.realtime_ns = Nanos(clock.realtime_ns.0 + u64::from(day) * 86_400_000_000_000);
        }
        self.manifest.machine.boot_id += &format!(" on day {day}");
    }

    /// Keeps what is whole within windows of this length that begin every so often (ns), the first at its begin
    /// and this much later: as a recording in time windows.
    pub fn in_windows(&mut self, length: u64, every: u64, late: u64) {
        let Window { start_ns, end_ns } = self.manifest.window;
        let starts =
            (start_ns.0 + late..).step_by(every as usize).take_while(|start| start + length <= end_ns.0);
        let slices: Vec<(i64, i64)> = starts.map(|start| (start as i64, (start + length) as i64)).collect();
        self.commands.retain(|(_, command)| {
            let Some(span) = command.span() else { return false };
            let (from, to) = (span.start_ns.as_i64(), span.end_ns.as_i64());
            let after = slices.partition_point(|slice| slice.0 <= from);
            after.checked_sub(1).is_some_and(|n| to <= slices[n].1)
        });
        self.manifest.windows = Some(Windows {
            length_ns: length,
            every_ns: every,
            slices: slices.len() as u64,
            armed_ns: slices.len() as u64 * length,
            ..Windows::default()
        });
        self.manifest.counters.recorded = self.commands.len() as u64;
        self.manifest.counters.seen = self.commands.len() as u64;
        self.slices = Some(slices.into());
    }

    /// Writes it as a run directory.
    ///
    /// # Errors
    /// What writing or opening the run ended with.
    pub fn write(&self, directory: &Path) -> Result<Run, run_format::Error> {
        let mut writer = RunWriter::create(directory, self.manifest.clone(), true)?;
        for queue in &self.queues {
            writer.queue(queue.clone());
        }
        for (_, command) in &self.commands {
            writer.command(command);
        }
        for (start, end) in self.slices.iter().flat_map(|slices| slices.iter()) {
            let of = |time: &i64| Nanos(time.unsigned_abs());
            writer.slice(Window { start_ns: of(start), end_ns: of(end) })?;
        }
        writer.close(self.manifest.counters, self.manifest.window.end_ns)?;
        Run::open(directory)
    }
}

impl Runs {
    /// Writes both as `host.run` and `target.run` in a directory.
    ///
    /// # Errors
    /// As [`Recorded::write`].
    pub fn write(&self, directory: &Path) -> Result<(Run, Run), run_format::Error> {
        Ok((self.host.write(&directory.join("host.run"))?, self.target.write(&directory.join("target.run"))?))
    }
}
