//! Follows all rings of a process on a thread of its own, so that nothing that its consumer does makes it late, and
//! hands over what they come to.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::assemble::{Assembler, Identity, Out, Tally};
use super::directory::Asking;
use super::events::{Event, Events, Kind};
use super::follow::{Follower, Look, Step};
use super::layout::{Lcore, WORD_OF_COUNT};
use super::memory::Shared;
use super::ticks::{self, Ticks};
use run_format::monotonic_now;

/// The rings are left alone at most this long, when nothing comes.
const LONGEST_REST: Duration = Duration::from_millis(4);
/// And at least this long.
const SHORTEST_REST: Duration = Duration::from_micros(50);
/// Entries a second that a core may write from one moment to the next: a rest lets come half of a ring at most.
const FASTEST: f64 = 8e6;
/// What is handed over and not yet taken, at most; beyond it the rings are left to overrun, and that is counted.
const MOST_WAITING: usize = 1 << 20;
/// The target is asked again for what it did not know at most this often.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long a suspension waits for the thread.
const SUSPENDS: Duration = Duration::from_millis(200);
/// How often it is asked at all.
const MOST_ASKED: u32 = 1_000;

/// Why nothing more comes of a file that is shorter than it was.
const CUT: &str = "its file was cut short while it was read";

/// Where identities come from, besides the ring.
pub(super) trait Identities: Send {
    /// Hands over what has come: a request's address and what it is.
    fn drain(&mut self, take: &mut dyn FnMut(u64, Identity));
}

/// What the thread knows, for its consumer.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) out: Vec<Out>,
    pub(super) tally: Tally,
    /// Capsules whose entries were overwritten.
    pub(super) missing: u64,
    pub(super) under_way: u64,
    /// Suspensions that were carried out.
    suspended: u64,
    /// Why it goes on no more.
    pub(super) failed: Option<String>,
}

#[derive(Debug, Default)]
struct Between {
    state: Mutex<State>,
    more: Condvar,
    closing: AtomicBool,
    stop: AtomicBool,
    /// Suspensions that were asked for.
    suspend: AtomicU64,
    done: Condvar,
    /// That the recording was resumed, until the thread knows.
    resumed: Mutex<Option<Resumed>>,
}

/// What is recorded from here on is read again.
#[derive(Debug)]
struct Resumed {
    /// Which suspension is over.
    suspend: u64,
    /// When, in ticks.
    began: u64,
    /// For each lcore the position in its ring, and how many capsules it had recorded.
    rings: Vec<(u64, u64)>,
}

/// The thread, as its consumer sees it.
#[derive(Debug)]
pub(super) struct Reader {
    between: Arc<Between>,
    thread: Option<JoinHandle<()>>,
    file: Arc<Shared>,
    lcores: Vec<Lcore>,
    /// The tracepoint NEW.
    capsule: Option<u16>,
}

/// What the thread works with.
pub(super) struct Work {
    pub(super) file: Arc<Shared>,
    pub(super) followers: Vec<Follower>,
    pub(super) events: Events,
    pub(super) ticks: Ticks,
    pub(super) assembler: Assembler,
    pub(super) asking: Asking,
    pub(super) identities: Option<Box<dyn Identities>>,
}

impl Reader {
    /// Begins to read the rings of a process.
    pub(super) fn start(work: Work, pid: u32) -> Reader {
        let between = Arc::new(Between::default());
        let shared = Arc::clone(&between);
        let file = Arc::clone(&work.file);
        let lcores = work.followers.iter().map(|follower| follower.lcore).collect();
        let capsule = work.events.number(Kind::New);
        // Here, since capsules may come before the thread runs.
        let running = Running::new(work);
        let thread = std::thread::spawn(move || {
            keep_off(pid);
            hurry();
            running.run(&shared);
        });
        Reader { between, thread: Some(thread), file, lcores, capsule }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.between.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what has come, waiting for the first.
    pub(super) fn take(&self, timeout: Duration) -> Vec<Out> {
        let waiting = |state: &mut State| state.out.is_empty() && state.failed.is_none();
        let state = self.between.more.wait_timeout_while(self.state(), timeout, waiting);
        let (mut state, _) = state.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut state.out)
    }

    /// Everything but what has come.
    pub(super) fn look<T>(&self, of: impl FnOnce(&State) -> T) -> T {
        of(&self.state())
    }

    /// Beginnings of commands are recorded no more.
    pub(super) fn closing(&self) {
        self.between.closing.store(true, Ordering::Release);
    }

    /// Lets it read what is there, and forget what is not over: what is recorded until [`Reader::resume`], for others, is
    /// not read.
    pub(super) fn suspend(&self) {
        let asked = self.between.suspend.fetch_add(1, Ordering::AcqRel) + 1;
        let waits = |state: &mut State| state.suspended < asked && state.failed.is_none();
        // A thread that does not come to it in time does it later.
        drop(self.between.done.wait_timeout_while(self.state(), SUSPENDS, waits));
    }

    /// What is recorded from now on is read again.
    pub(super) fn resume(&self) {
        let rings = self.lcores.iter().map(|lcore| self.now(lcore)).collect();
        let suspend = self.between.suspend.load(Ordering::Acquire);
        let resumed = Resumed { suspend, began: ticks::now(), rings };
        *self.between.resumed.lock().unwrap_or_else(PoisonError::into_inner) = Some(resumed);
    }

    /// How far an lcore's ring is, and how many capsules were recorded until there.
    fn now(&self, lcore: &Lcore) -> (u64, u64) {
        let look = || (position(&self.file, lcore), capsules(&self.file, lcore, self.capsule));
        let mut now = look();
        // Both of one moment, unless another recording has the tracepoints on and one comes each time.
        for _ in 0..8 {
            match look() {
                same if same == now => break,
                other => now = other,
            }
        }
        now
    }

    /// Lets it read what is there, and ends it.
    pub(super) fn stop(&mut self) {
        self.between.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.state().failed = Some("the thread that reads it has failed".to_owned());
        }
    }

    /// Whether the thread ended by itself.
    pub(super) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Keeps this thread off the CPUs that a process has threads bound to: its reactors, from whose time it would take. Where
/// no other CPU is left it stays where it is.
fn keep_off(pid: u32) {
    let Ok(mut left) = sched_getaffinity(Pid::from_raw(0)) else { return };
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    for task in tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok()) {
        let Ok(bound) = sched_getaffinity(Pid::from_raw(task)) else { continue };
        if let [one] = cpus(&bound).as_slice() {
            let _ = left.unset(*one);
        }
    }
    if !cpus(&left).is_empty() {
        // Who may not do this goes on where he is.
        let _ = sched_setaffinity(Pid::from_raw(0), &left);
    }
}

fn cpus(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect()
}

/// Lets this thread run soon after it wakes up, on a machine that is busy: it sleeps most of the time, and what it
/// comes too late for is lost.
fn hurry() {
    const NICE: libc::c_int = -15;
    // Who may not do this goes on as he is. 0 is the calling thread.
    // SAFETY: changes only how this thread is scheduled.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// How many entries an lcore has written.
fn position(file: &Shared, lcore: &Lcore) -> u64 {
    file.word_first(lcore.next_at).unwrap_or(0)
}

/// How many capsules an lcore has recorded.
fn capsules(file: &Shared, lcore: &Lcore, capsule: Option<u16>) -> u64 {
    let at = |new: u16| lcore.counts_at + usize::from(new) * WORD_OF_COUNT;
    capsule.and_then(|new| file.word_first(at(new))).unwrap_or(0)
}

/// Of one lcore: capsules by the tracepoint NEW's count.
#[derive(Clone, Copy, Debug, Default)]
struct Capsules {
    /// The count when following began.
    first: u64,
    /// How many were read.
    read: u64,
    /// The count when the ring was last looked at.
    counted: u64,
}

/// What a ring's follower came upon.
enum Item {
    Event(Event),
    Gap,
}

struct Running {
    work: Work,
    /// By lcore.
    capsules: Vec<Capsules>,
    asked: (Instant, u32),
    suspended: u64,
    /// The rings are not read.
    paused: bool,
}

impl Running {
    fn new(work: Work) -> Running {
        let capsule = work.events.number(Kind::New);
        let of = |follower: &Follower| {
            let first = capsules(&work.file, &follower.lcore, capsule);
            Capsules { first, read: 0, counted: first }
        };
        let capsules = work.followers.iter().map(of).collect();
        Running { capsules, work, asked: (Instant::now(), 0), suspended: 0, paused: false }
    }

    fn run(mut self, between: &Between) {
        let mut rest = LONGEST_REST;
        let mut before = Instant::now();
        let mut came = 0;
        loop {
            let last = between.stop.load(Ordering::Acquire);
            let full = {
                let state = between.state.lock().unwrap_or_else(PoisonError::into_inner);
                state.out.len() >= MOST_WAITING
            };
            // At the end nothing more is written, so what waits is not waited for.
            if full && !last {
                std::thread::sleep(SHORTEST_REST);
                continue;
            }
            if !self.work.file.is_whole() {
                return self.fail(between, CUT);
            }
            // In this order: a suspension that is over was asked for before.
            let resumed = between.resumed.lock().unwrap_or_else(PoisonError::into_inner).take();
            let suspend = between.suspend.load(Ordering::Acquire);
            if let Some(resumed) = &resumed {
                self.resume(resumed);
            }
            self.work.assembler.closing = between.closing.load(Ordering::Acquire);
            let elapsed = before.elapsed();
            before = Instant::now();
            let fullest = self.fullest(elapsed, &mut rest);
            // A little more than the last time: what comes of one look is about what came of the one before.
            let mut out = Vec::with_capacity(came + came / 8);
            let look = match self.cycle(&mut out) {
                Ok(look) => look,
                // The times that are not known any more are those of what was read now.
                Err(why) => return self.fail(between, &why),
            };
            if suspend != self.suspended {
                self.identities(&mut out);
                self.work.assembler.suspend();
                self.suspended = suspend;
                // One that was come to too late may be over.
                self.paused = resumed.is_none_or(|resumed| resumed.suspend != suspend);
            }
            if last {
                self.identities(&mut out);
                self.work.assembler.end(&self.work.ticks, &mut out);
            }
            came = out.len();
            self.publish(between, out);
            // What was read before the cut is whole; behind it everything reads as zeros.
            if !self.work.file.is_whole() {
                return self.fail(between, CUT);
            }
            if look == Look::Restarted {
                return self.fail(between, "it was begun anew: has the target been started again?");
            }
            if last {
                return;
            }
            if fullest < 0.25 {
                std::thread::sleep(rest);
            }
        }
    }

    /// Goes on where the recording was resumed. What others recorded before is none of its own.
    fn resume(&mut self, resumed: &Resumed) {
        self.work.assembler.began = resumed.began;
        if !self.paused || resumed.suspend != self.suspended {
            return;
        }
        self.paused = false;
        let missing: Vec<u64> = (0..self.capsules.len()).map(|lcore| self.missing_of(lcore)).collect();
        let each = self.work.followers.iter_mut().zip(&mut self.capsules).zip(&resumed.rings).zip(missing);
        for (((follower, capsules), (position, count)), missing) in each {
            // A ring that was begun anew is found out by the next look.
            follower.skip(*position);
            *capsules = Capsules {
                first: count.saturating_sub(capsules.read).saturating_sub(missing),
                counted: *count,
                ..*capsules
            };
        }
    }

    /// How full the fullest ring is; sets the next rest by how fast it fills.
    fn fullest(&self, elapsed: Duration, rest: &mut Duration) -> f64 {
        if self.paused {
            *rest = LONGEST_REST;
            return 0.0;
        }
        let mut fullest = 0.0f64;
        let mut longest = LONGEST_REST;
        for follower in &self.work.followers {
            let size = follower.lcore.entries as f64;
            let waiting = follower.waiting(&self.work.file) as f64;
            fullest = fullest.max(waiting / size);
            // A ring that was idle may fill as fast as a core can; one that is busy goes on as it did.
            let quarter = size / 4.0;
            let rate = (waiting / elapsed.as_secs_f64().max(1e-6)).max(1.0);
            let seconds = (quarter / rate).min(size / 2.0 / FASTEST);
            longest = longest.min(Duration::from_secs_f64(seconds.min(1.0)));
        }
        *rest = longest.max(SHORTEST_REST);
        fullest
    }

    /// Reads what is there and makes of it what it is.
    fn cycle(&mut self, out: &mut Vec<Out>) -> Result<Look, String> {
        let Work { file, followers, events, ticks, assembler, asking, identities: _ } = &mut self.work;
        ticks.update()?;
        assembler.look_begins(monotonic_now());
        if let Some(directory) = asking.answer() {
            assembler.told(directory, out);
        }
        let mut look = Look::Done;
        let mut rings: Vec<VecDeque<Item>> = Vec::with_capacity(followers.len());
        let (capsule, looked_at) = (events.number(Kind::New), if self.paused { 0 } else { followers.len() });
        for (lcore, follower) in (0u32..).zip(followers.iter_mut().take(looked_at)) {
            let mut items = VecDeque::new();
            let counted = capsules(file, &follower.lcore, capsule);
            let mut read = 0;
            let this = follower.look(file, |step| match step {
                Step::Record(record) => {
                    if let Some(event) = events.of(&record, lcore) {
                        read += u64::from(event.kind == Kind::New);
                        items.push_back(Item::Event(event));
                    }
                }
                Step::Gap => items.push_back(Item::Gap),
            });
            if let Some(capsules) = self.capsules.get_mut(lcore as usize) {
                capsules.read += read;
                capsules.counted = counted;
            }
            if this == Look::Restarted {
                look = Look::Restarted;
            }
            rings.push(items);
        }
        // A command's identity is sent before its end is recorded, so nearly all of those that end here are there now.
        self.identities(out);
        let Work { events, ticks, assembler, asking, .. } = &mut self.work;
        while let Some(lcore) = earliest(&rings) {
            match rings.get_mut(lcore).and_then(VecDeque::pop_front) {
                Some(Item::Event(event)) => assembler.event(&event, events, ticks, out),
                Some(Item::Gap) => assembler.gap(lcore as u32, ticks, out),
                None => break,
            }
        }
        if assembler.wants_directory && self.asked.0.elapsed() >= ASK_EVERY && self.asked.1 < MOST_ASKED {
            assembler.wants_directory = false;
            self.asked = (Instant::now(), self.asked.1 + 1);
            asking.ask();
        }
        Ok(look)
    }

    /// Takes the identities that are there.
    fn identities(&mut self, out: &mut Vec<Out>) {
        let Work { ticks, assembler, identities, .. } = &mut self.work;
        if let Some(identities) = identities {
            let now = monotonic_now();
            identities.drain(&mut |request, identity| assembler.identity(request, identity, ticks, out));
            assembler.identities_came(now, ticks);
        }
    }

    fn publish(&self, between: &Between, out: Vec<Out>) {
        let missing = self.missing();
        let under_way = self.work.assembler.under_way_now();
        let mut state = between.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.out.is_empty() {
            state.out = out;
        } else {
            state.out.extend(out);
        }
        state.tally = self.work.assembler.tally;
        state.missing = missing;
        state.under_way = under_way;
        let suspended = std::mem::replace(&mut state.suspended, self.suspended) != self.suspended;
        let any = !state.out.is_empty();
        drop(state);
        if suspended {
            between.done.notify_one();
        }
        if any {
            between.more.notify_one();
        }
    }

    /// Capsules that were recorded and overwritten: the counts tell, where entries are missing.
    fn missing(&self) -> u64 {
        (0..self.capsules.len()).map(|lcore| self.missing_of(lcore)).sum()
    }

    fn missing_of(&self, lcore: usize) -> u64 {
        let none = self.work.followers.get(lcore).is_none_or(|follower| follower.missed == 0);
        match self.capsules.get(lcore) {
            Some(Capsules { first, read, counted }) if !none => {
                counted.saturating_sub(*first).saturating_sub(*read)
            }
            _ => 0,
        }
    }

    fn fail(self, between: &Between, why: &str) {
        let mut state = between.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failed = Some(why.to_owned());
        drop(state);
        between.more.notify_one();
        between.done.notify_one();
    }
}

/// The ring whose next item is the earliest; gaps come before anything else.
fn earliest(rings: &[VecDeque<Item>]) -> Option<usize> {
    let at = |items: &VecDeque<Item>| match items.front()? {
        Item::Event(event) => Some(event.ticks),
        Item::Gap => Some(0),
    };
    rings.iter().enumerate().filter_map(|(n, items)| Some((at(items)?, n))).min().map(|(_, n)| n)
}

#[cfg(test)]
mod tests {
    use super::{cpus, keep_off};
    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;

    #[test]
    fn the_reader_keeps_off_the_cpus_of_reactors() {
        let own = cpus(&sched_getaffinity(Pid::from_raw(0)).unwrap());
        let [first, second, ..] = own.as_slice() else {
            println!("skipped: there is one CPU here");
            return;
        };
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let after = |bound: &[usize]| {
            let mut set = CpuSet::new();
            bound.iter().for_each(|cpu| set.set(*cpu).unwrap());
            sched_setaffinity(Pid::from_raw(child.id().cast_signed()), &set).unwrap();
            let pid = child.id();
            let thread = std::thread::spawn(move || {
                keep_off(pid);
                cpus(&sched_getaffinity(Pid::from_raw(0)).unwrap())
            });
            thread.join().unwrap()
        };
        let rest: Vec<usize> = own.iter().copied().filter(|cpu| cpu != first).collect();
        assert_eq!(after(&[*first]), rest);
        // One that may run on either is no reactor.
        assert_eq!(after(&[*first, *second]), own);
        child.kill().unwrap();
        child.wait().unwrap();
        keep_off(u32::MAX);
    }
}
