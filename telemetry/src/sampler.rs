//! Samples on threads of its own until it is stopped. It knows neither sources nor files: collectors sample, the sink
//! keeps.
//!
//! Collectors that never wait share one thread. Each of those that may wait for a device or a process has its own, so
//! that a drive that hangs holds up nothing else; one that does not come back is left behind when sampling stops.

use crate::collect::{Collector, Lack, Opened, Places, Subject, open};
use crate::pace::{Pace, adjust};
use crate::{About, Batch, Metric, Nanos, Rows, monotonic, thread_cpu};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What all collectors together may take of one core: the promise is 1 %, and threads, rows and their writing take
/// some of it.
const SHARE: f64 = 0.007;
/// How often rows are handed over, ns.
const HAND_OVER: u64 = 1_000_000_000;
/// A collector's values are all rows again after this many rows or this time (ns), whichever is first.
const ANEW_ROWS: usize = 16_384;
const ANEW_AFTER: u64 = 60_000_000_000;
/// How long a collector that is sampling is waited for when sampling stops.
const PATIENCE: Duration = Duration::from_millis(1500);

/// What to sample, and how often.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often.
    pub every: Duration,
    /// Where the machine lies.
    pub places: Places,
    /// What is recorded.
    pub subject: Subject,
}

impl Options {
    /// How often collectors sample that are not told otherwise.
    pub const EVERY: Duration = Duration::from_millis(100);
    /// No oftener than this.
    pub const LEAST: Duration = Duration::from_millis(10);
}

impl Default for Options {
    fn default() -> Options {
        Options { every: Options::EVERY, places: Places::default(), subject: Subject::default() }
    }
}

/// How a collector fares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It samples.
    Sampling,
    /// There is nothing to collect here, and why.
    Absent(String),
    /// It sampled and can not go on, and why.
    Failed(String),
}

/// One collector, as things are.
#[derive(Clone, Debug)]
pub struct CollectorStatus {
    /// What it takes.
    pub about: &'static About,
    /// How it fares.
    pub state: State,
    /// How often it samples now.
    pub every: Nanos,
    /// How often it was to sample.
    pub asked: Nanos,
    /// Samples so far.
    pub samples: u64,
    /// CPU time of all of them.
    pub cpu: Nanos,
    /// Its metrics so far.
    pub metrics: Arc<[Metric]>,
    /// What it lacks: the metric (empty where it is more than one) and why.
    pub lacks: Vec<(String, String)>,
}

/// All collectors, as things are.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// One each.
    pub collectors: Vec<CollectorStatus>,
    /// CPU time of the sampler's threads, with what is not any collector's.
    pub cpu: Nanos,
}

type Sink = Arc<Mutex<dyn FnMut(Batch) + Send>>;

#[derive(Debug, Default)]
struct Stop {
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn set(&self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits until then at the longest; whether it was stopped.
    fn wait_until(&self, until: Nanos) -> bool {
        let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = until.0.saturating_sub(monotonic().0);
            if *stopped || left == 0 {
                return *stopped;
            }
            let wait = self.changed.wait_timeout(stopped, Duration::from_nanos(left));
            stopped = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Sampling that goes on. Dropping it stops it.
#[derive(Debug)]
pub struct Sampler {
    stop: Arc<Stop>,
    status: Arc<Mutex<Status>>,
    ended: Receiver<usize>,
    workers: Vec<Option<std::thread::JoinHandle<()>>>,
    /// Which collectors each worker has, by their places in the status.
    of: Vec<Vec<usize>>,
}

impl Sampler {
    /// Opens what there is and begins to sample. `sink` is given each collector's rows about once a second, from the
    /// sampler's threads: it must be quick.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(options: &Options, sink: impl FnMut(Batch) + Send + 'static) -> std::io::Result<Sampler> {
        let opened = open(&options.places, &options.subject);
        Sampler::of(opened, options.every, sink)
    }

    /// The same with these collectors.
    ///
    /// # Errors
    /// As those of [`Sampler::start`].
    pub fn of(
        opened: Vec<(&'static About, Opened)>,
        every: Duration,
        sink: impl FnMut(Batch) + Send + 'static,
    ) -> std::io::Result<Sampler> {
        let every = every.max(Options::LEAST);
        let (mut status, mut groups) = (Status::default(), Vec::new());
        let mut quick = Vec::new();
        for (place, (about, collector)) in opened.into_iter().enumerate() {
            let asked = nanos(about.at_most_every.map_or(every, |least| least.max(every)));
            let rows = Rows::new(about);
            let mut entry = CollectorStatus {
                about,
                state: State::Sampling,
                every: asked,
                asked,
                samples: 0,
                cpu: Nanos(0),
                metrics: Arc::from([]),
                lacks: Vec::new(),
            };
            match collector {
                Ok(collector) => {
                    let one = One::new(place, collector, rows, asked);
                    if about.waits { groups.push(vec![one]) } else { quick.push(one) }
                }
                Err(Lack(why)) => entry.state = State::Absent(why),
            }
            status.collectors.push(entry);
        }
        if !quick.is_empty() {
            groups.insert(0, quick);
        }
        let count = groups.len();
        let (stop, status) = (Arc::new(Stop::default()), Arc::new(Mutex::new(status)));
        let sink: Sink = Arc::new(Mutex::new(sink));
        let (sender, ended) = channel();
        let mut sampler = Sampler {
            stop: Arc::clone(&stop),
            status: Arc::clone(&status),
            ended,
            workers: Vec::new(),
            of: Vec::new(),
        };
        for (number, group) in groups.into_iter().enumerate() {
            sampler.of.push(group.iter().map(|one| one.place).collect());
            // The quick ones have most of the share; those that wait are few and seldom.
            let share = if group.len() > 1 || count == 1 { SHARE * 0.8 } else { SHARE * 0.2 / count as f64 };
            let worker = Worker {
                group,
                share,
                stop: Arc::clone(&stop),
                status: Arc::clone(&status),
                sink: Arc::clone(&sink),
                told: Nanos(0),
            };
            let sender: Sender<usize> = sender.clone();
            let name = if number == 0 { "telemetry".to_owned() } else { format!("telemetry {number}") };
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                worker.run();
                // Nobody may be waiting any more.
                let _ = sender.send(number);
            })?;
            sampler.workers.push(Some(thread));
        }
        Ok(sampler)
    }

    /// How the collectors fare.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes the last samples, hands over what is left, and ends. A collector that hangs is left behind, which its
    /// state says.
    #[must_use]
    pub fn stop(mut self) -> Status {
        self.end();
        self.status()
    }

    fn end(&mut self) {
        self.stop.set();
        let until = Instant::now() + PATIENCE;
        while self.workers.iter().any(Option::is_some) {
            match self.ended.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(number) => {
                    if let Some(thread) = self.workers.get_mut(number).and_then(Option::take) {
                        // It has told that it is over.
                        let _ = thread.join();
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        for (worker, places) in self.workers.iter().zip(&self.of) {
            for place in places.iter().filter(|_| worker.is_some()) {
                if let Some(entry) = status.collectors.get_mut(*place) {
                    entry.state = State::Failed("it did not come back from its last sample".to_owned());
                }
            }
        }
        self.workers.clear();
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        if !self.workers.is_empty() {
            self.end();
        }
    }
}

fn nanos(duration: Duration) -> Nanos {
    Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// One collector at work.
struct One {
    place: usize,
    collector: Option<Box<dyn Collector>>,
    rows: Rows,
    pace: Pace,
    due: u64,
    state: State,
    samples: u64,
    cpu: u64,
    all_at: u64,
}

impl One {
    fn new(place: usize, collector: Box<dyn Collector>, rows: Rows, asked: Nanos) -> One {
        One {
            place,
            collector: Some(collector),
            rows,
            pace: Pace::new(asked.0),
            due: 0,
            state: State::Sampling,
            samples: 0,
            cpu: 0,
            all_at: 0,
        }
    }

    fn sample(&mut self) {
        let Some(collector) = &mut self.collector else { return };
        let (before, at) = (thread_cpu(), monotonic());
        self.rows.begin(at);
        let rows = &mut self.rows;
        // A collector's own fault ends that collector alone.
        let sampled = catch_unwind(AssertUnwindSafe(|| collector.sample(at, rows)));
        let why = match sampled {
            Ok(Ok(())) => None,
            Ok(Err(Lack(why))) => Some(why),
            Err(_) => Some("it failed by a fault of its own".to_owned()),
        };
        let cost = thread_cpu().0.saturating_sub(before.0);
        self.samples += 1;
        self.cpu += cost;
        match why {
            None => {
                self.rows.finish(Nanos(cost));
                // The first finds and opens everything.
                if self.samples > 1 {
                    self.pace.took(cost);
                }
            }
            Some(why) => {
                self.rows.end(at);
                self.state = State::Failed(why);
                self.collector = None;
            }
        }
    }

    /// When it is due next: at multiples of its interval, so that those that were late are left out.
    fn plan(&mut self, now: u64) {
        self.due =
            if self.collector.is_some() { (now / self.pace.every + 1) * self.pace.every } else { u64::MAX };
    }
}

/// Some collectors that share a thread.
struct Worker {
    group: Vec<One>,
    share: f64,
    stop: Arc<Stop>,
    status: Arc<Mutex<Status>>,
    sink: Sink,
    /// Its CPU time that the status has.
    told: Nanos,
}

impl Worker {
    fn run(mut self) {
        let mut handed = monotonic().0;
        loop {
            let now = monotonic().0;
            for one in &mut self.group {
                if one.due <= now {
                    one.sample();
                    one.plan(now);
                }
            }
            if now >= handed + HAND_OVER || handed > now {
                handed = now;
                self.hand_over(now);
                let mut paces: Vec<Pace> = self.group.iter().map(|one| one.pace).collect();
                adjust(&mut paces, self.share);
                for (one, pace) in self.group.iter_mut().zip(paces) {
                    one.pace = pace;
                }
            }
            let next = self.group.iter().map(|one| one.due).min().unwrap_or(u64::MAX);
            if next == u64::MAX {
                // Nothing is left that could sample.
                self.hand_over(now);
                return;
            }
            if self.stop.wait_until(Nanos(next.min(handed + HAND_OVER))) {
                // One last sample, so that the values reach to the end.
                let now = monotonic().0;
                for one in self.group.iter_mut().filter(|one| !one.rows_are_of(now)) {
                    one.sample();
                }
                self.hand_over(now);
                return;
            }
        }
    }

    fn hand_over(&mut self, now: u64) {
        for one in &mut self.group {
            let Some(batch) = one.rows.take() else { continue };
            let begins = batch.anew;
            {
                let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
                sink(batch);
            }
            if begins {
                one.all_at = now;
            }
            if one.rows.since_anew() >= ANEW_ROWS || now >= one.all_at + ANEW_AFTER {
                one.rows.anew();
            }
        }
        let cpu = thread_cpu();
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.cpu.0 += cpu.0.saturating_sub(self.told.0);
        self.told = cpu;
        for one in &self.group {
            let Some(entry) = status.collectors.get_mut(one.place) else { continue };
            if entry.state != one.state {
                entry.state.clone_from(&one.state);
            }
            entry.every = Nanos(one.pace.every);
            entry.samples = one.samples;
            entry.cpu = Nanos(one.cpu);
            let metrics = one.rows.metrics();
            if entry.metrics.len() != metrics.len() {
                entry.metrics = metrics;
            }
            if entry.lacks.len() != one.rows.lacks().len() {
                entry.lacks = one.rows.lacks().to_vec();
            }
        }
    }
}

impl One {
    /// Whether it has sampled a moment ago, or is so seldom that one more sample would cost a device a command.
    fn rows_are_of(&self, now: u64) -> bool {
        self.collector.as_ref().is_none_or(|collector| collector.about().waits)
            || now < self.due.saturating_sub(self.pace.every) + self.pace.every / 10
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, Row};
    use std::borrow::Cow;

    const METRICS: &[Metric] =
        &[Metric { name: Cow::Borrowed("n"), unit: Cow::Borrowed(""), kind: Kind::Gauge, meaning: "" }];

    macro_rules! about {
        ($konst:ident, $name:literal, $waits:literal) => {
            const $konst: About = About {
                name: $name,
                source: "",
                object: "",
                at_most_every: None,
                waits: $waits,
                metrics: METRICS,
                further: "",
                lacks: "",
            };
        };
    }
    about!(STEADY, "steady", false);
    about!(FAILING, "failing", false);
    about!(FAULTY, "faulty", false);
    about!(HANGING, "hanging", true);
    about!(DEAR, "dear", false);
    about!(ABSENT, "absent", false);

    struct Test(&'static About, Box<dyn FnMut(u64) -> Result<f64, Lack> + Send>, u64);

    impl Collector for Test {
        fn about(&self) -> &'static About {
            self.0
        }
        fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
            self.2 += 1;
            let value = (self.1)(self.2)?;
            let object = rows.object("x").unwrap();
            rows.put(object, 0u16, value);
            Ok(())
        }
    }

    type Named = (&'static About, Opened);

    fn test(about: &'static About, with: impl FnMut(u64) -> Result<f64, Lack> + Send + 'static) -> Named {
        (about, Ok(Box::new(Test(about, Box::new(with), 0))))
    }

    fn of(batches: &Mutex<Vec<Batch>>, collector: &str) -> Vec<Row> {
        let batches = batches.lock().unwrap();
        batches.iter().filter(|b| b.collector == collector).flat_map(|b| b.rows.clone()).collect()
    }

    fn sampler(opened: Vec<Named>) -> (Sampler, Arc<Mutex<Vec<Batch>>>) {
        let batches = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&batches);
        let sampler =
            Sampler::of(opened, Duration::from_millis(20), move |batch| into.lock().unwrap().push(batch));
        (sampler.unwrap(), batches)
    }

    #[test]
    fn what_fails_faults_hangs_or_is_absent_leaves_the_others_alone() {
        let (sampler, batches) = sampler(vec![
            test(&STEADY, |n| Ok(n as f64)),
            test(&FAILING, |n| if n < 3 { Ok(1.0) } else { Err(Lack("gone".into())) }),
            test(&FAULTY, |n| if n < 2 { Ok(1.0) } else { panic!("a fault on purpose") }),
            test(&HANGING, |_| {
                loop {
                    std::thread::park();
                }
            }),
            (&ABSENT, Err(Lack("not here".into()))),
        ]);
        let until = Instant::now() + Duration::from_secs(20);
        while sampler.status().collectors[0].samples < 10 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        let from = Instant::now();
        let status = sampler.stop();
        assert!(from.elapsed() < PATIENCE * 20);
        let state = |name: &str| {
            status.collectors.iter().find(|c| c.about.name == name).map(|c| c.state.clone()).unwrap()
        };
        assert_eq!(state("steady"), State::Sampling);
        assert_eq!(state("failing"), State::Failed("gone".into()));
        assert!(matches!(state("faulty"), State::Failed(why) if why.contains("fault")));
        assert!(matches!(state("hanging"), State::Failed(why) if why.contains("did not come back")));
        assert_eq!(state("absent"), State::Absent("not here".into()));

        let steady = of(&batches, "steady");
        let values: Vec<f64> = steady.iter().filter(|r| r.metric == 0).filter_map(|r| r.value).collect();
        assert!(values.len() >= 5, "{values:?}");
        assert!(values.windows(2).all(|w| w[1] == w[0] + 1.0), "{values:?}");
        assert!(steady.windows(2).all(|w| w[0].at <= w[1].at));
        // What was known of a collector that failed is not known any more.
        let failing: Vec<Option<f64>> =
            of(&batches, "failing").iter().filter(|r| r.metric == 0).map(|r| r.value).collect();
        assert_eq!(failing, [Some(1.0), None]);
        assert!(of(&batches, "hanging").is_empty());
    }

    #[test]
    fn a_dear_collector_samples_less_often_and_a_cheap_one_as_often_as_before() {
        let (sampler, batches) = sampler(vec![
            test(&STEADY, |n| Ok(n as f64)),
            test(&DEAR, |n| {
                let from = thread_cpu();
                while thread_cpu().0 < from.0 + 2_000_000 {}
                Ok(n as f64)
            }),
        ]);
        std::thread::sleep(Duration::from_millis(2_600));
        let status = sampler.stop();
        let every = |name: &str| status.collectors.iter().find(|c| c.about.name == name).unwrap().every;
        assert_eq!(every("steady"), Nanos(20_000_000));
        // 2 ms are to be less than 0.56 % of the interval, or it is as slow as may be.
        assert!(every("dear").0 >= 350_000_000, "{:?}", every("dear"));
        assert!(status.cpu.0 >= status.collectors.iter().map(|c| c.cpu.0).sum::<u64>());
        assert!(!of(&batches, "dear").is_empty());
    }

    #[test]
    fn nothing_to_sample_is_no_error() {
        let (sampler, batches) = sampler(vec![(&ABSENT, Err(Lack("not here".into())))]);
        assert_eq!(sampler.status().collectors.len(), 1);
        drop(sampler);
        assert!(batches.lock().unwrap().is_empty());
    }
}
