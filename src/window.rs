//! Recording in time windows: when the probes are armed and taken away, and which commands are whole within one
//! slice. It knows sources only by their contract, and nothing of probes.
//!
//! Windows begin at the multiples of their distance on the wall clock, so that the two sides' recorders are in step
//! with no contact. Arming begins ahead, by as much as it mostly took before; a window that finds the probes in place
//! only after its beginning is so much shorter, and one that they come too late for is left out and counted. A budget
//! is an account of the time in which probes are in place: a window comes only when it holds enough for it.

use crate::counting::{Counter, Sample, cpu_time};
use crate::destination::Destination;
use crate::overhead::{self, Counted, Draw};
use crate::signals::Signals;
use anyhow::{Context, Result, bail};
use run_format::{
    Command, Counters, Event, Lost, Nanos, Overhead, Queue, QueueId, Sink, Source, Window, Windows,
    clock_pair, monotonic_now,
};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// After the last probe is in place, a slice begins at the earliest: what was on its way to a first hook that was
/// not there yet has then passed a later one, by which it is known to have begun before.
const SETTLE: u64 = 2_000_000;
/// The probes stay this long after a slice, so that commands that end within it are seen to have ended.
const LINGER: u64 = 1_000_000;
/// What a thread may wake up too late by, on a busy machine.
const SLACK: u64 = 3_000_000;
/// How often the probes are armed to find out how long it takes.
const TRIALS: usize = 3;
/// Between two of them.
const BETWEEN_TRIALS: Duration = Duration::from_millis(30);
/// No window is shorter than this: commands themselves take their time.
const SHORTEST: u64 = 2_000_000;
/// The shortest window that is chosen for a budget, how often windows come where that is enough, and how rarely at
/// most.
pub const CHOSEN: Duration = Duration::from_millis(50);
const EVERY: u64 = 1_000_000_000;
pub const RAREST: Duration = Duration::from_secs(60);
/// How long a recorded process that is about to end may take until it is seen to have ended.
const ENDING: Duration = Duration::from_millis(500);
/// How many of the last armings are remembered.
const REMEMBERED: usize = 16;
/// Slices whose commands may still come: far more than a ring holds.
const KEPT: usize = 64;

/// How long windows are and how often they come, as `--window 50ms/1s` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Each window's length.
    pub length: Duration,
    /// From the beginning of one to that of the next.
    pub every: Duration,
}

impl Spec {
    /// From `50ms/1s`.
    pub fn parse(text: &str) -> Result<Spec, String> {
        let Some((length, every)) = text.split_once('/') else {
            return Err(format!(
                "{text:?} is no window: write how long and how often, such as 50ms/1s for 50 ms of each second"
            ));
        };
        let spec =
            Spec { length: crate::cli::duration(length.trim())?, every: crate::cli::duration(every.trim())? };
        if spec.length >= spec.every {
            return Err(format!(
                "a window of {length} each {every} is never over: make it shorter, or leave --window out to record throughout"
            ));
        }
        if spec.every > Duration::from_secs(24 * 3600) {
            return Err(format!("a window each {every} is too rare: at most 24h"));
        }
        Ok(spec)
    }

    /// For the manifest, before the first slice.
    pub fn describe(self) -> Windows {
        Windows { length_ns: nanos(self.length), every_ns: nanos(self.every), ..Windows::default() }
    }

    /// The first window that begins at or after an instant of the wall clock, `CLOCK_REALTIME` ns.
    fn next(&self, realtime: u64) -> (u64, u64) {
        let every = nanos(self.every);
        let start = realtime.div_ceil(every) * every;
        (start, start + nanos(self.length))
    }
}

impl std::fmt::Display for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}/{:?}", self.length, self.every)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// What is asked of a recording's windows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Their length and distance, where those were given.
    pub spec: Option<Spec>,
    /// The share of the time in which probes may be in place, where a budget limits it. Where no windows were given, it
    /// makes them.
    pub share: Option<f64>,
    /// Arms only one of every two, and measures what recording costs.
    pub measure: bool,
}

impl Wanted {
    /// For the manifest before the first slice; none where probes are in place throughout.
    pub fn describe(&self) -> Option<Windows> {
        let windowed = self.share.is_some() || self.measure;
        self.spec.map(Spec::describe).or(windowed.then(Windows::default))
    }

    /// The option that asks for them.
    fn option(&self) -> &'static str {
        match self {
            Wanted { spec: Some(_), .. } => "--window",
            Wanted { share: Some(_), .. } => "--max-overhead",
            _ => "--measure-overhead",
        }
    }
}

/// Some times, the last ones of which are remembered; ns.
#[derive(Clone, Debug, Default)]
struct Lately(VecDeque<u64>);

impl Lately {
    fn note(&mut self, took: u64) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(took);
    }

    fn longest(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or(0)
    }

    fn shortest(&self) -> u64 {
        self.0.iter().copied().min().unwrap_or(0)
    }

    /// What three of four are not above.
    fn mostly(&self) -> u64 {
        let mut sorted: Vec<u64> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get((sorted.len() * 3).div_ceil(4).saturating_sub(1)).copied().unwrap_or(0)
    }
}

/// How long it took lately until all probes were in place, and until they were away.
#[derive(Clone, Debug, Default)]
struct Arming {
    took: Lately,
    away: Lately,
}

impl Arming {
    /// How long before a window arming begins. Where it takes longer than mostly, the slice is so much shorter.
    fn ahead(&self) -> u64 {
        self.took.mostly() + SETTLE + SLACK
    }

    /// How long probes are in place around a window, at most: where arming was as fast as it ever was.
    fn around(&self) -> u64 {
        self.ahead() - self.took.shortest() + LINGER + self.away.longest()
    }

    /// What has to be between two windows, in whole milliseconds.
    fn between(&self) -> u64 {
        millis(self.took.longest() + SETTLE + SLACK + LINGER + self.away.longest())
    }

    /// The shortest window: a shorter one would cost more around it than in it. In whole milliseconds.
    fn shortest(&self) -> u64 {
        millis(self.took.longest().max(SHORTEST))
    }
}

/// Rounded up to whole milliseconds.
fn millis(ns: u64) -> u64 {
    ns.div_ceil(1_000_000) * 1_000_000
}

/// The windows that keep probes in place for at most this share of the time.
fn chosen(share: f64, arming: &Arming) -> Result<Spec> {
    let (around, between) = (arming.around(), arming.between());
    let least = arming.shortest().max(nanos(CHOSEN));
    let spec = |length: u64, every: u64| Spec {
        length: Duration::from_nanos(length),
        every: Duration::from_nanos(every),
    };
    // Whole milliseconds, and less than the budget.
    let length = (EVERY as f64 * share) as u64 / 1_000_000 * 1_000_000;
    let length = length.saturating_sub(millis(around)).min(EVERY.saturating_sub(between));
    if length >= least {
        return Ok(spec(length, EVERY));
    }
    let every = ((least + around) as f64 / share).max((least + between) as f64);
    if every > RAREST.as_nanos() as f64 {
        bail!(
            "--max-overhead can not be kept: it leaves probes in place for {:.3} % of the time, and putting them in place takes up to {:.1?} here, so that windows of {:?} with {:.1?} around them would come more rarely than each {RAREST:?}: allow more, or give shorter ones with --window",
            share * 100.0,
            Duration::from_nanos(arming.took.longest()),
            Duration::from_nanos(least),
            Duration::from_nanos(around),
        );
    }
    Ok(spec(least, millis(every.ceil() as u64)))
}

/// The account of the time in which probes are in place, where a budget limits it.
#[derive(Clone, Copy, Debug)]
struct Account {
    share: f64,
    /// `CLOCK_MONOTONIC`, ns.
    begun: u64,
}

impl Account {
    /// Whether the average holds at the end of a window for which probes are in place for so long, after what was
    /// before. It holds at each earlier time then.
    fn allows(&self, before: u64, in_place: u64, end: u64) -> bool {
        (before + in_place) as f64 <= self.share * end.saturating_sub(self.begun) as f64
    }
}

/// Whether these windows are possible where arming takes as long as this.
fn possible(spec: Spec, arming: &Arming) -> Result<()> {
    let took = Duration::from_nanos(arming.took.longest());
    let shortest = Duration::from_nanos(arming.shortest());
    if spec.length < shortest {
        bail!(
            "--window {spec}: putting the probes in place takes up to {took:.1?} here, and a shorter window would cost more around it than in it: make it at least {shortest:?} long"
        );
    }
    let between = Duration::from_nanos(arming.between());
    if spec.every - spec.length < between {
        bail!(
            "--window {spec}: taking the probes away and putting them back takes up to {between:?} here, longer than there is between two windows: make them at least {:?} apart, or leave --window out to record throughout",
            spec.length + between
        );
    }
    Ok(())
}

/// What is to be done at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The probes are away until this window's turn.
    Away(Window),
    /// They are in place for this slice.
    Armed(Window),
    /// The probes stay away in this window, which is counted.
    Idle(Window),
    /// They stay away in this window, for it is left out.
    Left(Window),
}

/// What recording costs, while it is being measured.
#[derive(Debug)]
struct Measuring {
    counter: Counter,
    draw: Draw,
    /// Whether the next window is armed.
    armed: bool,
    /// Of the window at hand: the counts at its beginning, and the commands seen until then.
    began: Option<(Sample, u64)>,
    counted: Vec<Counted>,
    /// Units and commands of the armed windows.
    units: f64,
    seen: u64,
    /// CPU time that this process had before it measured, ns.
    own_before: Option<u64>,
}

impl Measuring {
    fn begin(&mut self, seen: u64) -> Result<()> {
        self.began = Some((self.counter.sample()?, seen));
        Ok(())
    }

    fn end(&mut self, armed: bool, seen: u64) -> Result<()> {
        let Some((began, seen_before)) = self.began.take() else { return Ok(()) };
        let ended = self.counter.sample()?;
        let (units, busy_ns) = self.counter.between(&began, &ended);
        let ns = ended.at.0.saturating_sub(began.at.0) as f64;
        let cpu_ns = ended.cpu_ns.zip(began.cpu_ns).map(|(ended, began)| ended.saturating_sub(began) as f64);
        self.counted.push(Counted { armed, ns, units, busy_ns, cpu_ns });
        if armed {
            self.units += units;
            self.seen += seen.saturating_sub(seen_before);
        }
        self.armed = self.draw.next();
        Ok(())
    }

    /// A window was left out: its pair is none.
    fn skip(&mut self) {
        self.began = None;
        self.counted.truncate(self.counted.len() / 2 * 2);
        self.draw.again();
        self.armed = self.draw.next();
    }
}

/// How long the windows are in which the cost is measured, where the user does not say: long enough that the counts
/// at their ends are sharp, short enough for many pairs.
const MEASURED: Duration = Duration::from_millis(200);

/// Commands that were begun and not seen to end outside of the slices: while probes come and go, some see beginnings
/// whose ends nothing sees. They are no losses.
#[derive(Clone, Copy, Debug, Default)]
struct Stray {
    sum: u64,
    /// The count when the first probe was about to go, until the next slice begins.
    since: Option<u64>,
}

impl Stray {
    fn begin(&mut self, unfinished: u64) {
        self.since.get_or_insert(unfinished);
    }

    fn end(&mut self, unfinished: u64) {
        self.sum = self.until(unfinished);
        self.since = None;
    }

    /// All of them, the count being this.
    fn until(&self, unfinished: u64) -> u64 {
        self.sum + self.since.map_or(0, |since| unfinished.saturating_sub(since))
    }
}

/// The windows of one recording.
#[derive(Debug)]
pub struct Windowing {
    spec: Spec,
    arming: Arming,
    phase: Phase,
    /// The last slices, the current one behind them.
    slices: VecDeque<Window>,
    /// Commands that were not whole within a slice.
    cut: u64,
    stray: Stray,
    skipped: u64,
    account: Option<Account>,
    /// How long probes were in place until now, and before the recording began; ns.
    in_place: u64,
    rehearsed: u64,
    /// When they came, where they are in place.
    since: Option<u64>,
    measuring: Option<Measuring>,
}

impl Windowing {
    /// Takes the probes away, and finds out how long it takes to put them back; chooses the windows where that is left
    /// to it. No command of that time is recorded.
    ///
    /// # Errors
    /// When the source can not do that, or not as fast as the windows or the budget need it; when a signal comes.
    pub fn begin<S: Source>(
        wanted: &Wanted,
        duration: Option<Duration>,
        source: &mut S,
        writer: &mut dyn Destination,
        signals: &Signals,
    ) -> Result<Windowing> {
        let begun = monotonic_now().0;
        if !source.has_windows() {
            let option = wanted.option();
            bail!("{option}: this source can not take its probes away and put them back: leave {option} out");
        }
        let counter = wanted
            .measure
            .then(|| Counter::of(source.side(), source.kind(), source.software().pid))
            .transpose()
            .context("--measure-overhead")?;
        let measuring = counter.map(|counter| {
            // Any seed will do, if only it is another each time.
            let mut draw = Draw::new(begun);
            Measuring {
                counter,
                armed: draw.next(),
                draw,
                began: None,
                counted: Vec::new(),
                units: 0.0,
                seen: 0,
                own_before: cpu_time(std::process::id()),
            }
        });
        let mut windowing = Windowing {
            spec: Spec { length: MEASURED, every: MEASURED * 2 },
            arming: Arming::default(),
            phase: Phase::Away(Window::default()),
            slices: VecDeque::new(),
            cut: 0,
            stray: Stray::default(),
            skipped: 0,
            account: wanted.share.map(|share| Account { share, begun }),
            in_place: 0,
            rehearsed: 0,
            since: Some(begun),
            measuring,
        };
        windowing.disarm(source, writer)?;
        // The first time is that of taking away what was there before.
        windowing.arming = Arming::default();
        for _ in 0..TRIALS {
            signals.none_yet()?;
            std::thread::sleep(BETWEEN_TRIALS);
            if windowing.put_in_place(source)? {
                windowing.disarm(source, writer)?;
            }
        }
        if source.ended() {
            bail!("the recorded process ended before the recording began");
        }
        let arming = &windowing.arming;
        let spec = match (wanted.spec, wanted.share) {
            (Some(spec), _) => spec,
            (None, Some(share)) => chosen(share, arming)?,
            (None, None) => {
                let between = arming.between().div_ceil(10_000_000) * 10_000_000;
                Spec { length: MEASURED, every: MEASURED + Duration::from_nanos(between) }
            }
        };
        possible(spec, arming)?;
        windowing.spec = spec;
        windowing.affordable(duration)?;
        windowing.rehearsed = windowing.in_place;
        writer.manifest().windows = Some(spec.describe());
        windowing.phase = windowing.after(monotonic_now());
        Ok(windowing)
    }

    /// Whether a budget allows these windows, and one of them while it is recorded.
    fn affordable(&self, duration: Option<Duration>) -> Result<()> {
        let Some(account) = self.account else { return Ok(()) };
        let around = self.arming.around();
        let share = (nanos(self.spec.length) + around) as f64 / nanos(self.spec.every) as f64;
        if share > account.share {
            bail!(
                "--max-overhead can not be kept by --window {}: with {:.1?} around each, probes are in place for {:.1} % of the time, and it leaves {:.1} %: make the windows rarer, or leave --window out and it is chosen",
                self.spec,
                Duration::from_nanos(around),
                share * 100.0,
                account.share * 100.0
            );
        }
        let Some(duration) = duration else { return Ok(()) };
        let first = self.first_end();
        if first > duration {
            bail!(
                "--max-overhead can not be kept in {duration:?}: the average of windows of {} keeps it from the end of the first one on, {:.1} s after the beginning: give -d {:.0}s or more, leave -d out, or allow more",
                self.spec,
                first.as_secs_f64(),
                first.as_secs_f64().ceil()
            );
        }
        Ok(())
    }

    /// How long it is until the first window that the account allows is over.
    fn first_end(&self) -> Duration {
        let now = monotonic_now();
        let mut window = self.window_after(now);
        // An account that allows a window allows it at some time.
        while !self.allows(window) {
            window = self.window_after(window.end_ns);
        }
        Duration::from_nanos(window.end_ns.0.saturating_sub(now.0))
    }

    fn allows(&self, window: Window) -> bool {
        let in_place = window.end_ns.0 - window.start_ns.0 + self.arming.around();
        self.account.is_none_or(|account| account.allows(self.in_place, in_place, window.end_ns.0 + LINGER))
    }

    /// How a budget is kept, for a person.
    pub fn kept(&self) -> Option<String> {
        self.account.map(|_| {
            format!(
                "kept on average by --window {} (probes are in place up to {:.1?} around each; the first is over in {:.1} s)",
                self.spec,
                Duration::from_nanos(self.arming.around()),
                self.first_end().as_secs_f64()
            )
        })
    }

    /// What a budget allowed and what of it was used, at the end of a recording of this length, for a person.
    pub fn used(&self, recorded: Duration) -> Option<String> {
        let in_place = (self.in_place - self.rehearsed) as f64 / recorded.as_nanos().max(1) as f64;
        self.account.map(|account| {
            format!(
                "probes were in place for {:.2} % of the time, and --max-overhead allows {:.2} %",
                in_place * 100.0,
                account.share * 100.0
            )
        })
    }

    /// The first window that begins after a time, on `CLOCK_MONOTONIC`.
    fn window_after(&self, after: Nanos) -> Window {
        let pair = clock_pair();
        let ahead = pair.realtime_ns.as_i64() - pair.monotonic_ns.as_i64();
        let (start, end) = self.spec.next(after.0.saturating_add_signed(ahead));
        let to_monotonic = |realtime: u64| Nanos(realtime.saturating_add_signed(-ahead));
        Window { start_ns: to_monotonic(start), end_ns: to_monotonic(end) }
    }

    /// What is to be done with the first window after a time.
    fn after(&self, after: Nanos) -> Phase {
        let window = self.window_after(after);
        let idle = self.is_idle();
        let ready = monotonic_now().0 + if idle { 0 } else { self.arming.took.mostly() + SETTLE };
        if ready + SHORTEST <= window.end_ns.0 && (idle || self.allows(window)) {
            Phase::Away(window)
        } else {
            Phase::Left(window)
        }
    }

    /// Whether the next window's part in measuring is that nothing is armed.
    fn is_idle(&self) -> bool {
        self.measuring.as_ref().is_some_and(|measuring| !measuring.armed)
    }

    /// Does what is due, and returns how long nothing will be.
    ///
    /// # Errors
    /// When the source can not go on or the run can not be written.
    pub fn step<S: Source>(&mut self, source: &mut S, writer: &mut dyn Destination) -> Result<Duration> {
        loop {
            let now = monotonic_now().0;
            let idle = self.is_idle();
            let due = match self.phase {
                Phase::Away(window) if idle => window.start_ns.0,
                Phase::Away(window) => window.start_ns.0.saturating_sub(self.arming.ahead()),
                Phase::Armed(slice) if self.stray.since.is_some() => slice.start_ns.0,
                Phase::Armed(slice) => slice.end_ns.0 + LINGER,
                Phase::Idle(window) => window.end_ns.0,
                Phase::Left(window) => window.start_ns.0,
            };
            if now < due {
                return Ok(Duration::from_nanos(due - now));
            }
            match self.phase {
                Phase::Away(window) if idle => {
                    self.count(|measuring| measuring.begin(0))?;
                    self.phase = Phase::Idle(window);
                }
                Phase::Idle(window) => {
                    self.count(|measuring| measuring.end(false, 0))?;
                    self.phase = self.after(window.end_ns);
                }
                Phase::Away(window) => self.arm(window, source, writer)?,
                Phase::Armed(_) if self.stray.since.is_some() => {
                    self.stray.end(source.counters().context("read the counters")?.lost.unfinished);
                }
                Phase::Armed(slice) => {
                    let seen = self.seen(source)?;
                    self.count(|measuring| measuring.end(true, seen))?;
                    self.disarm(source, writer)?;
                    writer.slice(slice)?;
                    self.phase = self.after(slice.end_ns);
                }
                Phase::Left(window) => self.leave_out(window, writer),
            }
        }
    }

    fn arm<S: Source>(&mut self, window: Window, source: &mut S, writer: &mut dyn Destination) -> Result<()> {
        if self.put_in_place(source)? {
            let settled = Nanos(monotonic_now().0 + SETTLE);
            let slice = Window { start_ns: window.start_ns.max(settled), ..window };
            if slice.start_ns < slice.end_ns {
                if self.slices.len() == KEPT {
                    self.slices.pop_front();
                }
                self.slices.push_back(slice);
                self.phase = Phase::Armed(slice);
                writer.slice_begins(slice);
                if self.measuring.is_some() {
                    // The counts are those of the slice, and so are the commands.
                    let left = slice.start_ns.0.saturating_sub(monotonic_now().0);
                    std::thread::sleep(Duration::from_nanos(left));
                    let seen = self.seen(source)?;
                    self.count(|measuring| measuring.begin(seen))?;
                }
                return Ok(());
            }
            self.disarm(source, writer)?;
        }
        self.leave_out(window, writer);
        Ok(())
    }

    /// Counts a window that nothing comes of.
    fn leave_out(&mut self, window: Window, writer: &mut dyn Destination) {
        self.skipped += 1;
        if let Some(measuring) = &mut self.measuring {
            measuring.skip();
        }
        if let Some(windows) = &mut writer.manifest().windows {
            windows.skipped = self.skipped;
        }
        self.phase = self.after(window.end_ns);
    }

    /// Puts the probes in place; whether they are. They are not where the recorded process is about to end.
    fn put_in_place<S: Source>(&mut self, source: &mut S) -> Result<bool> {
        let before = monotonic_now().0;
        let armed = match source.arm() {
            Ok(armed) => armed,
            Err(_) if ends(source) => false,
            Err(error) => return Err(error).context("put the probes in place"),
        };
        if armed {
            let now = monotonic_now().0;
            self.arming.took.note(now - before);
            self.since = Some(now);
        }
        Ok(armed)
    }

    fn disarm<S: Source>(&mut self, source: &mut S, writer: &mut dyn Destination) -> Result<()> {
        let before = monotonic_now().0;
        self.stray.begin(source.counters().context("read the counters")?.lost.unfinished);
        let away = source.disarm(&mut self.sink(writer)).context("take the probes away");
        let now = monotonic_now().0;
        if let Some(since) = self.since.take() {
            self.arming.away.note(now - before);
            self.in_place += now - since;
        }
        if let Some(windows) = &mut writer.manifest().windows {
            windows.in_place_ns = self.in_place - self.rehearsed;
        }
        away
    }

    fn count(&mut self, what: impl FnOnce(&mut Measuring) -> Result<()>) -> Result<()> {
        self.measuring.as_mut().map_or(Ok(()), what)
    }

    /// Commands seen so far, where they are wanted.
    fn seen<S: Source>(&self, source: &S) -> Result<u64> {
        match self.measuring {
            None => Ok(0),
            Some(_) => Ok(source.counters().context("read the counters")?.seen),
        }
    }

    /// What recording cost, where it was measured.
    pub fn overhead(&self) -> Option<Overhead> {
        let Measuring { counter, counted, units, seen, own_before, .. } = self.measuring.as_ref()?;
        let told = (*seen > 0).then(|| units / *seen as f64);
        let per_command = counter.per_command().or(told);
        let own =
            cpu_time(std::process::id()).zip(*own_before).map(|(now, before)| now.saturating_sub(before));
        Some(Overhead {
            recorder_ns: own.filter(|_| *seen > 0).map(|own| own as f64 / *seen as f64),
            ..overhead::of(counted, &counter.name(), nanos(self.spec.length), per_command)
        })
    }

    /// Ends the slice at hand, at the end of the recording.
    ///
    /// # Errors
    /// As [`Windowing::step`].
    pub fn end<S: Source>(&mut self, source: &mut S, writer: &mut dyn Destination) -> Result<()> {
        let Phase::Armed(slice) = self.phase else { return Ok(()) };
        // The newest time that was taken before this is not after it.
        let slice = Window { end_ns: slice.end_ns.min(monotonic_now()), ..slice };
        if let Some(last) = self.slices.back_mut() {
            *last = slice;
        }
        self.phase = Phase::Away(slice);
        self.disarm(source, writer)?;
        writer.slice(slice)
    }

    /// Where the source is to put its commands.
    pub fn sink<'a>(&'a mut self, writer: &'a mut dyn Destination) -> Sliced<'a> {
        Sliced { slices: &self.slices, cut: &mut self.cut, writer }
    }

    /// The source's counters, as the run has them.
    pub fn counters(&self, counters: Counters) -> Counters {
        let stray = self.stray.until(counters.lost.unfinished);
        let unfinished = counters.lost.unfinished.saturating_sub(stray);
        Counters {
            seen: counters.seen.saturating_sub(self.cut + stray),
            recorded: counters.recorded.saturating_sub(self.cut),
            lost: Lost { unfinished, ..counters.lost },
            cut: counters.cut + self.cut + stray,
            ..counters
        }
    }
}

/// Whether what is recorded has ended or does so in a moment: what its end makes fail may be seen before it.
pub fn ends<S: Source>(source: &S) -> bool {
    let until = Instant::now() + ENDING;
    while !source.ended() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Whether a command lies whole within one of some slices, the newest of which are the likeliest.
fn is_whole(slices: &VecDeque<Window>, command: &Command) -> bool {
    let Some(span) = command.span() else { return false };
    let around = slices.iter().rev().find(|slice| slice.start_ns <= span.start_ns);
    around.is_some_and(|slice| span.end_ns <= slice.end_ns)
}

/// A run that takes what is whole within a slice.
pub struct Sliced<'a> {
    slices: &'a VecDeque<Window>,
    cut: &'a mut u64,
    writer: &'a mut dyn Destination,
}

impl Sink for Sliced<'_> {
    fn queue(&mut self, queue: Queue) -> QueueId {
        self.writer.queue(queue)
    }

    fn queue_is(&mut self, id: QueueId, queue: Queue) {
        self.writer.queue_is(id, queue);
    }

    fn queue_went(&mut self, id: QueueId, at: Nanos) {
        self.writer.queue_went(id, at);
    }

    fn command(&mut self, command: &Command) {
        if is_whole(self.slices, command) {
            self.writer.command(command);
        } else {
            *self.cut += 1;
        }
    }

    fn event(&mut self, event: Event) {
        self.writer.event(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use run_format::{Hook, Kind, Manifest, RunWriter, Side, Software};

    #[test]
    fn a_window_is_a_length_and_a_distance() {
        let of = |text: &str| Spec::parse(text).map(|s| (s.length.as_millis(), s.every.as_millis()));
        assert_eq!(of("50ms/1s"), Ok((50, 1000)));
        assert_eq!(of("1.5s / 1m"), Ok((1500, 60_000)));
        for (bad, why) in [
            ("50ms", "no window"),
            ("", "no window"),
            ("1s/1s", "never over"),
            ("2s/1s", "never over"),
            ("0ms/1s", "more than nothing"),
            ("-1ms/1s", ""),
            ("50ms/0s", "more than nothing"),
            ("50/1", "has no unit"),
            ("50ms/1s/2s", ""),
            ("5ms/25h", "too rare"),
            ("/", ""),
            ("a/b", ""),
            ("1ms/99999999999999h", ""),
        ] {
            let said = of(bad).expect_err(bad);
            assert!(said.contains(why), "{bad}: {said}");
        }
    }

    fn arming(took: &[u64], away: &[u64]) -> Arming {
        let lately = |millis: &[u64]| Lately(millis.iter().map(|ms| ms * 1_000_000).collect());
        Arming { took: lately(took), away: lately(away) }
    }

    fn spec(length: u64, every: u64) -> Spec {
        Spec { length: Duration::from_millis(length), every: Duration::from_millis(every) }
    }

    #[test]
    fn what_arming_takes_bounds_the_windows() {
        let mut arming = arming(&[8], &[1]);
        arming.took.note(17_400_000);
        let check = |length, every| possible(spec(length, every), &arming).map_err(|error| error.to_string());
        assert_eq!(check(50, 1000), Ok(()));
        assert_eq!(check(18, 1000), Ok(()));
        assert!(check(17, 1000).unwrap_err().contains("at least 18ms long"));
        // 17.4 ms, 5 ms before and 1 ms after, and 1 ms for taking them away.
        assert!(check(50, 74).unwrap_err().contains("at least 75ms apart"));
        assert_eq!(check(50, 75), Ok(()));
        // A long one is forgotten some time later, and one of many does not arm every window early.
        assert_eq!(arming.took.mostly(), 17_400_000);
        for _ in 0..REMEMBERED - 1 {
            arming.took.note(5_000_000);
        }
        assert_eq!((arming.took.longest(), arming.took.mostly()), (17_400_000, 5_000_000));
        arming.took.note(5_000_000);
        assert_eq!(arming.took.longest(), 5_000_000);
        let nothing = Arming::default();
        assert_eq!((nothing.took.mostly(), nothing.around()), (0, SETTLE + SLACK + LINGER));
    }

    #[test]
    fn a_budget_s_windows_leave_room_for_what_is_around_them() {
        // 12 + 5 ms ahead, of which 7 ms pass before the first probe, and 3 ms after.
        let arming = arming(&[7, 12, 12], &[2]);
        assert_eq!(arming.around(), 13_000_000);
        assert_eq!(chosen(0.2, &arming).unwrap(), spec(187, 1000));
        // There is no time for more between two.
        assert_eq!(chosen(0.999, &arming).unwrap(), spec(980, 1000));
        // Rarer, not shorter; rounded up.
        assert_eq!(chosen(0.02, &arming).unwrap(), spec(50, 3150));
        let refused = chosen(0.001, &arming).unwrap_err().to_string();
        for text in ["can not be kept", "0.100 %", "12.0ms", "50ms", "13.0ms", "more rarely than each 60s"] {
            assert!(refused.contains(text), "{text}: {refused}");
        }
        // Slow arming makes longer windows, none that would be refused as too short.
        let slow = self::arming(&[300, 400, 300], &[20]);
        let chosen = chosen(0.1, &slow).unwrap();
        assert!(possible(chosen, &slow).is_ok() && chosen.length >= Duration::from_millis(400), "{chosen}");
    }

    fn command(times: &[u64]) -> Command {
        let mut command = Command::default();
        for (slot, time) in times.iter().enumerate() {
            command.times[slot] = (*time != 0).then_some(Nanos(*time));
        }
        command
    }

    fn slices(bounds: &[(u64, u64)]) -> VecDeque<Window> {
        bounds.iter().map(|&(start, end)| Window { start_ns: Nanos(start), end_ns: Nanos(end) }).collect()
    }

    #[test]
    fn only_what_is_whole_within_one_slice_is_in_the_run() {
        let slices = slices(&[(100, 200), (300, 400)]);
        for (times, whole) in [
            (&[100, 150, 0, 200][..], true),
            (&[99, 150], false),
            (&[150, 201], false),
            (&[150, 350], false),
            (&[250, 260], false),
            (&[300, 400], true),
            // A first boundary that was missed does not hide behind a later slice's.
            (&[0, 299, 350], false),
            (&[], false),
        ] {
            assert_eq!(is_whole(&slices, &command(times)), whole, "{times:?}");
        }
        assert!(!is_whole(&VecDeque::new(), &command(&[1])));
    }

    /// A source whose probes take this long to be put in place, and which knows when they were.
    #[derive(Debug, Default)]
    struct Fake {
        took: Duration,
        /// From when on it takes this long instead: after so many times.
        then: Option<(usize, Duration)>,
        armed: Vec<u64>,
        in_place: u64,
        since: Option<u64>,
        refuses: bool,
        ends_at: Option<Instant>,
        unfinished: std::cell::Cell<u64>,
    }

    #[derive(Debug)]
    struct Refused;

    impl std::fmt::Display for Refused {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("refused")
        }
    }

    impl std::error::Error for Refused {}

    impl Source for Fake {
        type Error = Refused;

        fn side(&self) -> Side {
            Side::Target
        }

        fn kind(&self) -> Kind {
            Kind::Spdk
        }

        fn software(&self) -> Software {
            Software { pid: Some(std::process::id()), ..Software::default() }
        }

        fn hooks(&self) -> Vec<Hook> {
            Vec::new()
        }

        fn poll(&mut self, _: Duration, _: &mut dyn Sink) -> Result<usize, Refused> {
            Ok(0)
        }

        fn has_windows(&self) -> bool {
            true
        }

        fn disarm(&mut self, _: &mut dyn Sink) -> Result<(), Refused> {
            self.in_place += self.since.take().map_or(0, |since| monotonic_now().0 - since);
            // What is seen to begin while the probes go is never seen to end.
            self.unfinished.set(self.unfinished.get() + 3);
            Ok(())
        }

        fn arm(&mut self) -> Result<bool, Refused> {
            if self.refuses {
                return Err(Refused);
            }
            let slow = self.then.filter(|(times, _)| self.armed.len() >= *times);
            std::thread::sleep(slow.map_or(self.took, |slow| slow.1));
            self.armed.push(monotonic_now().0);
            self.since = Some(monotonic_now().0);
            Ok(true)
        }

        fn stop(&mut self, _: &mut dyn Sink) -> Result<(), Refused> {
            Ok(())
        }

        fn counters(&self) -> Result<Counters, Refused> {
            let unfinished = self.unfinished.get();
            let lost = Lost { unfinished, ..Lost::default() };
            Ok(Counters { seen: unfinished, lost, ..Counters::default() })
        }

        fn ended(&self) -> bool {
            self.ends_at.is_some_and(|at| Instant::now() >= at)
        }
    }

    fn run(folder: &tempfile::TempDir) -> RunWriter {
        let manifest =
            Manifest { windows: Some(Windows::default()), ..Manifest::begun(Side::Target, Kind::Spdk, "0") };
        RunWriter::create(&folder.path().join("a.run"), manifest, true).unwrap()
    }

    fn signals() -> Signals {
        Signals::uncaught()
    }

    /// Steps for a while, looking each time.
    fn steps(
        windowing: &mut Windowing,
        source: &mut Fake,
        writer: &mut RunWriter,
        over: Duration,
        mut look: impl FnMut(&Fake),
    ) {
        let until = Instant::now() + over;
        while Instant::now() < until {
            let rest = windowing.step(source, writer).unwrap();
            look(source);
            std::thread::sleep(rest.min(Duration::from_millis(5)));
        }
    }

    #[test]
    fn every_window_comes_or_is_counted_however_long_arming_takes() {
        // As long as in the rehearsal; longer than there is between two windows, so that each comes late; longer than
        // from one window to the next.
        for (later, least) in [(2, 0.8), (30, 0.6), (150, 0.0)] {
            let folder = tempfile::tempdir().unwrap();
            let mut writer = run(&folder);
            let mut source = Fake {
                took: Duration::from_millis(2),
                then: Some((TRIALS + 1, Duration::from_millis(later))),
                ..Fake::default()
            };
            let wanted = Wanted { spec: Some(spec(60, 80)), ..Wanted::default() };
            let mut windowing =
                Windowing::begin(&wanted, None, &mut source, &mut writer, &signals()).unwrap();
            let rehearsed = source.in_place;
            let began = Instant::now();
            steps(&mut windowing, &mut source, &mut writer, Duration::from_millis(1600), |_| ());
            windowing.end(&mut source, &mut writer).unwrap();
            let came = began.elapsed().as_secs_f64() / 0.08;
            let windows = writer.manifest().windows.unwrap();
            let counted = (windows.slices + windows.skipped) as f64;
            assert!((counted - came).abs() <= 2.0, "{later} ms: {windows:?} of {came}");
            assert!(windows.slices as f64 >= least * came, "{later} ms: {windows:?} of {came}");
            // What it says of the time in which probes are in place is so, and more than what was recorded.
            let in_place = (source.in_place - rehearsed) as f64;
            let told = windows.in_place_ns as f64;
            assert!((told - in_place).abs() <= 0.05 * in_place + 1e6, "{later} ms: {told} of {in_place}");
            assert!(windows.in_place_ns > windows.armed_ns, "{windows:?}");
        }
    }

    #[test]
    fn a_budget_is_kept_at_every_time() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = run(&folder);
        let mut source = Fake { took: Duration::from_millis(3), ..Fake::default() };
        let wanted = Wanted { share: Some(0.25), ..Wanted::default() };
        let begun = monotonic_now().0;
        let mut windowing = Windowing::begin(&wanted, None, &mut source, &mut writer, &signals()).unwrap();
        assert!(windowing.spec.length >= Duration::from_millis(200), "{}", windowing.spec);
        let said = windowing.kept().unwrap();
        assert!(said.contains("on average by --window 2") && said.contains("/1s"), "{said}");
        let mut most = 0.0f64;
        steps(&mut windowing, &mut source, &mut writer, Duration::from_millis(3500), |source| {
            let now = monotonic_now().0;
            let in_place = source.in_place + source.since.map_or(0, |since| now - since);
            // What came before the first window is the rehearsal, which takes a moment.
            if source.armed.len() > TRIALS {
                most = most.max(in_place as f64 / (now - begun) as f64);
            }
        });
        windowing.end(&mut source, &mut writer).unwrap();
        assert!(most > 0.1 && most <= 0.26, "{most}");
        let windows = writer.manifest().windows.unwrap();
        assert!(windows.slices >= 2, "{windows:?}");
        let used = windowing.used(Duration::from_millis(3500)).unwrap();
        assert!(used.contains("--max-overhead allows 25.00 %"), "{used}");
    }

    #[test]
    fn what_a_budget_can_not_be_kept_in_is_refused() {
        let begin = |wanted: Wanted, duration: Option<u64>| {
            let folder = tempfile::tempdir().unwrap();
            let mut source = Fake { took: Duration::from_millis(2), ..Fake::default() };
            let duration = duration.map(Duration::from_millis);
            Windowing::begin(&wanted, duration, &mut source, &mut run(&folder), &signals())
                .map(|windowing| windowing.spec)
                .map_err(|error| error.to_string())
        };
        let share = |share| Wanted { share: Some(share), ..Wanted::default() };
        let said = begin(share(0.01), Some(1000)).unwrap_err();
        assert!(said.contains("can not be kept in 1s") && said.contains("-d "), "{said}");
        assert!(begin(share(0.3), Some(4000)).is_ok());
        assert!(begin(share(0.01), None).is_ok());
        assert!(begin(share(1e-5), None).unwrap_err().contains("more rarely"));
        // Given windows have room around them, too.
        let given = |length| Wanted { spec: Some(spec(length, 1000)), ..share(0.05) };
        assert!(begin(given(30), None).is_ok());
        let said = begin(given(49), None).unwrap_err();
        assert!(said.contains("--window 49ms/1s") && said.contains("make the windows rarer"), "{said}");
    }

    #[test]
    fn a_process_that_ends_as_it_is_armed_ends_the_recording_and_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = run(&folder);
        let wanted = Wanted { spec: Some(spec(40, 80)), ..Wanted::default() };
        let mut source = Fake::default();
        let mut windowing = Windowing::begin(&wanted, None, &mut source, &mut writer, &signals()).unwrap();
        source.refuses = true;
        source.ends_at = Some(Instant::now() + Duration::from_millis(200));
        steps(&mut windowing, &mut source, &mut writer, Duration::from_millis(300), |_| ());
        assert!(source.ended());
        // One that goes on is asked why.
        source.ends_at = None;
        let error = (0..100)
            .find_map(|_| {
                std::thread::sleep(Duration::from_millis(5));
                windowing.step(&mut source, &mut writer).err()
            })
            .unwrap();
        assert!(format!("{error:#}").contains("put the probes in place: refused"), "{error:#}");
        // Before the recording there is nothing to end.
        let mut source = Fake { ends_at: Some(Instant::now()), ..Fake::default() };
        let error = Windowing::begin(&wanted, None, &mut source, &mut writer, &signals()).unwrap_err();
        assert!(error.to_string().contains("ended before the recording began"), "{error}");
    }

    #[test]
    fn a_signal_ends_the_rehearsal() {
        let folder = tempfile::tempdir().unwrap();
        let signals = signals();
        signals.raise();
        let wanted = Wanted { spec: Some(spec(40, 80)), ..Wanted::default() };
        let mut source = Fake::default();
        let error = Windowing::begin(&wanted, None, &mut source, &mut run(&folder), &signals).unwrap_err();
        assert!(error.to_string().contains("no run was made"), "{error}");
        assert!(source.armed.is_empty());
    }

    #[test]
    fn what_is_seen_to_begin_while_the_probes_go_is_cut_and_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = run(&folder);
        let wanted = Wanted { spec: Some(spec(40, 60)), ..Wanted::default() };
        let mut source = Fake::default();
        let mut windowing = Windowing::begin(&wanted, None, &mut source, &mut writer, &signals()).unwrap();
        let (mut within, mut armed, mut looks) = (0, 0, 0);
        steps(&mut windowing, &mut source, &mut writer, Duration::from_millis(600), |source| {
            // Before its slice begins, which is within 7 ms, one more is none.
            let since = source.since.map_or(0, |since| monotonic_now().0 - since);
            if source.armed.len() > armed && source.since.is_some() {
                armed = source.armed.len();
                looks = 0;
                source.unfinished.set(source.unfinished.get() + 1);
            } else if since > 10_000_000 {
                // One that is lost in each slice is.
                looks += 1;
                if looks == 2 {
                    within += 1;
                    source.unfinished.set(source.unfinished.get() + 1);
                }
            }
        });
        windowing.end(&mut source, &mut writer).unwrap();
        let counters = windowing.counters(source.counters().unwrap());
        assert!(within >= 4, "{within}");
        assert_eq!((counters.lost.unfinished, counters.seen), (within, within), "{counters:?}");
        assert_eq!(counters.cut, source.unfinished.get() - within);
    }

    #[test]
    fn late_windows_are_measured_too() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = run(&folder);
        let mut source = Fake { then: Some((TRIALS + 1, Duration::from_millis(30))), ..Fake::default() };
        let wanted = Wanted { spec: Some(spec(60, 80)), measure: true, ..Wanted::default() };
        let mut windowing = Windowing::begin(&wanted, None, &mut source, &mut writer, &signals()).unwrap();
        steps(&mut windowing, &mut source, &mut writer, Duration::from_millis(1600), |_| ());
        windowing.end(&mut source, &mut writer).unwrap();
        // Twenty windows.
        let pairs = windowing.measuring.as_ref().unwrap().counted.len() / 2;
        assert!(pairs >= 7, "{pairs} pairs, {} left out", windowing.skipped);
    }

    proptest! {
        #[test]
        fn windows_begin_at_multiples_and_both_sides_agree(
            every in 2u64..100_000_000_000, share in 0.01f64..0.99, now in 0u64..2_000_000_000_000_000_000, later in 0u64..1_000_000_000,
        ) {
            let length = Duration::from_nanos(((every as f64 * share) as u64).max(1));
            let spec = Spec { length, every: Duration::from_nanos(every) };
            let (start, end) = spec.next(now);
            prop_assert!(start >= now && start - now < every && start % every == 0 && end - start < every);
            // A recorder that asks a little later has the same window, or one that begins later.
            let other = spec.next(now + later).0;
            prop_assert!(other == start || (other > start && now + later > start));
        }
    }
}
