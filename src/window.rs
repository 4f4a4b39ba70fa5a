//! Recording in time windows: when the probes are armed and taken away, and which commands are whole within one
//! slice. It knows sources only by their contract, and nothing of probes.
//!
//! Windows begin at the multiples of their distance on the wall clock, so that the two sides' recorders are in step
//! with no contact. Arming begins ahead, by as much as it took before; a window that finds the probes in place only
//! after its beginning is so much shorter, and one that they come too late for is left out and counted.

use crate::counting::{Counter, Sample};
use crate::overhead::{self, Counted, Draw};
use anyhow::{Context, Result, bail};
use run_format::{
    Command, Counters, Event, Nanos, Overhead, Queue, QueueId, RunWriter, Sink, Source, Window, Windows,
    clock_pair, monotonic_now,
};
use std::collections::VecDeque;
use std::time::Duration;

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

/// How long arming took lately.
#[derive(Clone, Debug, Default)]
struct Latency(VecDeque<u64>);

impl Latency {
    fn note(&mut self, took: u64) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(took);
    }

    fn longest(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or(0)
    }

    /// How long before a window arming begins.
    fn ahead(&self) -> u64 {
        self.longest() * 5 / 4 + SETTLE + SLACK
    }
}

/// Whether these windows are possible where arming takes as long as this.
fn possible(spec: Spec, latency: &Latency) -> Result<()> {
    let took = Duration::from_nanos(latency.longest());
    let shortest = Duration::from_nanos(latency.longest().max(SHORTEST).div_ceil(1_000_000) * 1_000_000);
    if spec.length < shortest {
        bail!(
            "--window {spec}: putting the probes in place takes up to {took:.1?} here, and a shorter window would cost more around it than in it: make it at least {shortest:?} long"
        );
    }
    let between = Duration::from_nanos((latency.ahead() + LINGER).div_ceil(1_000_000) * 1_000_000);
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
        self.counted.push(Counted { armed, ns, units, busy_ns });
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

/// The windows of one recording.
#[derive(Debug)]
pub struct Windowing {
    spec: Spec,
    latency: Latency,
    phase: Phase,
    /// The last slices, the current one behind them.
    slices: VecDeque<Window>,
    /// Commands that were not whole within a slice.
    cut: u64,
    skipped: u64,
    measuring: Option<Measuring>,
}

impl Windowing {
    /// Takes the probes away, and finds out how long it takes to put them back. No command of that time is
    /// recorded.
    ///
    /// # Errors
    /// When the source can not do that, or not as fast as the windows need it.
    pub fn begin<S: Source>(
        spec: Option<Spec>,
        measure: bool,
        source: &mut S,
        writer: &mut RunWriter,
    ) -> Result<Windowing> {
        if !source.has_windows() {
            let option = if spec.is_some() { "--window" } else { "--measure-overhead" };
            bail!("{option}: this source can not take its probes away and put them back: leave {option} out");
        }
        let counter =
            measure.then(|| Counter::of(source.side(), source.kind(), source.software().pid)).transpose()?;
        let measuring = counter.map(|counter| {
            // Any seed will do, if only it is another each time.
            let mut draw = Draw::new(monotonic_now().0);
            Measuring {
                counter,
                armed: draw.next(),
                draw,
                began: None,
                counted: Vec::new(),
                units: 0.0,
                seen: 0,
            }
        });
        let mut windowing = Windowing {
            spec: Spec { length: MEASURED, every: MEASURED * 2 },
            latency: Latency::default(),
            phase: Phase::Away(Window::default()),
            slices: VecDeque::new(),
            cut: 0,
            skipped: 0,
            measuring,
        };
        windowing.disarm(source, writer)?;
        for _ in 0..TRIALS {
            std::thread::sleep(BETWEEN_TRIALS);
            let before = monotonic_now();
            if source.arm().context("put the probes in place")? {
                windowing.latency.note(monotonic_now().0 - before.0);
                windowing.disarm(source, writer)?;
            }
        }
        let between =
            Duration::from_nanos((windowing.latency.ahead() + LINGER).div_ceil(10_000_000) * 10_000_000);
        let spec = spec.unwrap_or(Spec { length: MEASURED, every: MEASURED + between });
        possible(spec, &windowing.latency)?;
        windowing.spec = spec;
        writer.manifest().windows = Some(spec.describe());
        windowing.phase = Phase::Away(windowing.next());
        Ok(windowing)
    }

    /// The next window that can be armed in time, on `CLOCK_MONOTONIC`.
    fn next(&self) -> Window {
        let pair = clock_pair();
        let to_monotonic = |realtime: u64| {
            Nanos(
                pair.monotonic_ns
                    .0
                    .saturating_add_signed(Nanos(realtime).as_i64() - pair.realtime_ns.as_i64()),
            )
        };
        let (start, end) = self.spec.next(pair.realtime_ns.0 + self.latency.ahead());
        Window { start_ns: to_monotonic(start), end_ns: to_monotonic(end) }
    }

    /// Does what is due, and returns how long nothing will be.
    ///
    /// # Errors
    /// When the source can not go on or the run can not be written.
    pub fn step<S: Source>(&mut self, source: &mut S, writer: &mut RunWriter) -> Result<Duration> {
        loop {
            let now = monotonic_now().0;
            let idle = self.measuring.as_ref().is_some_and(|measuring| !measuring.armed);
            let due = match self.phase {
                Phase::Away(window) if idle => window.start_ns.0,
                Phase::Away(window) => window.start_ns.0.saturating_sub(self.latency.ahead()),
                Phase::Armed(slice) => slice.end_ns.0 + LINGER,
                Phase::Idle(window) => window.end_ns.0,
            };
            if now < due {
                return Ok(Duration::from_nanos(due - now));
            }
            match self.phase {
                Phase::Away(window) if idle => {
                    self.count(|measuring| measuring.begin(0))?;
                    self.phase = Phase::Idle(window);
                }
                Phase::Idle(_) => {
                    self.count(|measuring| measuring.end(false, 0))?;
                    self.phase = Phase::Away(self.next());
                }
                Phase::Away(window) => self.arm(window, source, writer)?,
                Phase::Armed(slice) => {
                    let seen = self.seen(source)?;
                    self.count(|measuring| measuring.end(true, seen))?;
                    self.disarm(source, writer)?;
                    writer.slice(slice).context("write the run")?;
                    self.phase = Phase::Away(self.next());
                }
            }
        }
    }

    fn arm<S: Source>(&mut self, window: Window, source: &mut S, writer: &mut RunWriter) -> Result<()> {
        let before = monotonic_now().0;
        let armed = source.arm().context("put the probes in place")?;
        let now = monotonic_now().0;
        if armed {
            self.latency.note(now - before);
            let slice = Window { start_ns: Nanos(window.start_ns.0.max(now + SETTLE)), ..window };
            if slice.start_ns < slice.end_ns {
                if self.slices.len() == KEPT {
                    self.slices.pop_front();
                }
                self.slices.push_back(slice);
                self.phase = Phase::Armed(slice);
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
        self.skipped += 1;
        if let Some(measuring) = &mut self.measuring {
            measuring.skip();
        }
        if let Some(windows) = &mut writer.manifest().windows {
            windows.skipped = self.skipped;
        }
        self.phase = Phase::Away(self.next());
        Ok(())
    }

    fn disarm<S: Source>(&mut self, source: &mut S, writer: &mut RunWriter) -> Result<()> {
        source.disarm(&mut self.sink(writer)).context("take the probes away")
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
        let Measuring { counter, counted, units, seen, .. } = self.measuring.as_ref()?;
        let told = (*seen > 0).then(|| units / *seen as f64);
        let per_command = counter.per_command().or(told);
        Some(overhead::of(counted, &counter.name(), nanos(self.spec.length), per_command))
    }

    /// Ends the slice at hand, at the end of the recording.
    ///
    /// # Errors
    /// As [`Windowing::step`].
    pub fn end<S: Source>(&mut self, source: &mut S, writer: &mut RunWriter) -> Result<()> {
        let Phase::Armed(slice) = self.phase else { return Ok(()) };
        // The newest time that was taken before this is not after it.
        let slice = Window { end_ns: slice.end_ns.min(monotonic_now()), ..slice };
        if let Some(last) = self.slices.back_mut() {
            *last = slice;
        }
        self.phase = Phase::Away(slice);
        self.disarm(source, writer)?;
        writer.slice(slice).context("write the run")
    }

    /// Where the source is to put its commands.
    pub fn sink<'a>(&'a mut self, writer: &'a mut RunWriter) -> Sliced<'a> {
        Sliced { slices: &self.slices, cut: &mut self.cut, writer }
    }

    /// The source's counters, as the run has them.
    pub fn counters(&self, counters: Counters) -> Counters {
        Counters {
            seen: counters.seen.saturating_sub(self.cut),
            recorded: counters.recorded.saturating_sub(self.cut),
            cut: counters.cut + self.cut,
            ..counters
        }
    }
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
    writer: &'a mut RunWriter,
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

    #[test]
    fn what_arming_takes_bounds_the_windows() {
        let mut latency = Latency::default();
        latency.note(8_000_000);
        latency.note(17_400_000);
        let check = |length, every| {
            let spec = Spec { length: Duration::from_millis(length), every: Duration::from_millis(every) };
            possible(spec, &latency).map_err(|error| error.to_string())
        };
        assert_eq!(check(50, 1000), Ok(()));
        assert_eq!(check(18, 1000), Ok(()));
        assert!(check(17, 1000).unwrap_err().contains("at least 18ms long"));
        // 17.4 ms and a quarter, and 6 ms.
        assert!(check(50, 70).unwrap_err().contains("at least 78ms apart"));
        assert_eq!(check(50, 78), Ok(()));
        // A long one is forgotten some time later.
        for _ in 0..REMEMBERED {
            latency.note(5_000_000);
        }
        assert_eq!(latency.longest(), 5_000_000);
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
