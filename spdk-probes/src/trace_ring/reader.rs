//! Follows all rings of a process on a thread of its own, so that nothing that its consumer does makes it late, and
//! hands over what they come to.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::assemble::{Assembler, Identity, Out, Tally};
use super::directory::Asking;
use super::events::{Event, Events, Kind};
use super::follow::{Follower, Look, Step};
use super::layout::WORD_OF_COUNT;
use super::memory::Shared;
use super::ticks::Ticks;

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
/// How often it is asked at all.
const MOST_ASKED: u32 = 1_000;

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
    /// Why it goes on no more.
    pub(super) failed: Option<String>,
}

#[derive(Debug, Default)]
struct Between {
    state: Mutex<State>,
    more: Condvar,
    closing: AtomicBool,
    stop: AtomicBool,
}

/// The thread, as its consumer sees it.
#[derive(Debug)]
pub(super) struct Reader {
    between: Arc<Between>,
    thread: Option<JoinHandle<()>>,
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
    pub(super) fn start(work: Work) -> Reader {
        let between = Arc::new(Between::default());
        let shared = Arc::clone(&between);
        let thread = std::thread::spawn(move || {
            hurry();
            Running::new(work).run(&shared);
        });
        Reader { between, thread: Some(thread) }
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

/// Lets this thread run soon after it wakes up, on a machine that is busy: it sleeps most of the time, and what it
/// comes too late for is lost.
fn hurry() {
    const NICE: libc::c_int = -15;
    // Who may not do this goes on as he is. 0 is the calling thread.
    // SAFETY: changes only how this thread is scheduled.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// What a ring's follower came upon.
enum Item {
    Event(Event),
    Gap,
}

struct Running {
    work: Work,
    /// By lcore: tracepoint NEW's count when following began, and how many were read.
    capsules: Vec<(u64, u64)>,
    asked: (Instant, u32),
}

impl Running {
    fn new(work: Work) -> Running {
        let mut running = Running { capsules: Vec::new(), work, asked: (Instant::now(), 0) };
        running.capsules = (0..running.work.followers.len()).map(|n| (running.count(n), 0)).collect();
        running
    }

    /// How many capsules an lcore has recorded.
    fn count(&self, lcore: usize) -> u64 {
        let (Some(follower), Some(new)) =
            (self.work.followers.get(lcore), self.work.events.number(Kind::New))
        else {
            return 0;
        };
        let at = follower.lcore.counts_at + usize::from(new) * WORD_OF_COUNT;
        self.work.file.word_first(at).unwrap_or(0)
    }

    fn run(mut self, between: &Between) {
        let mut rest = LONGEST_REST;
        let mut before = Instant::now();
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
                return self.fail(between, "its file was cut");
            }
            self.work.assembler.closing = between.closing.load(Ordering::Acquire);
            let elapsed = before.elapsed();
            before = Instant::now();
            let fullest = self.fullest(elapsed, &mut rest);
            let mut out = Vec::new();
            let look = self.cycle(&mut out);
            if last {
                self.work.assembler.end(&self.work.ticks, &mut out);
            }
            self.publish(between, out);
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

    /// How full the fullest ring is; sets the next rest by how fast it fills.
    fn fullest(&self, elapsed: Duration, rest: &mut Duration) -> f64 {
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
    fn cycle(&mut self, out: &mut Vec<Out>) -> Look {
        let Work { file, followers, events, ticks, assembler, asking, identities } = &mut self.work;
        ticks.update();
        if let Some(directory) = asking.answer() {
            assembler.told(directory, out);
        }
        let mut look = Look::Done;
        let mut rings: Vec<VecDeque<Item>> = Vec::with_capacity(followers.len());
        for (lcore, follower) in (0u32..).zip(followers.iter_mut()) {
            let mut items = VecDeque::new();
            let capsules = self.capsules.get_mut(lcore as usize);
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
            if let Some(capsules) = capsules {
                capsules.1 += read;
            }
            if this == Look::Restarted {
                look = Look::Restarted;
            }
            rings.push(items);
        }
        // A command's identity is sent before its end is recorded, so all of those that end here are there now.
        if let Some(identities) = identities {
            identities.drain(&mut |request, identity| assembler.identity(request, identity));
        }
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
        look
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
        let any = !state.out.is_empty();
        drop(state);
        if any {
            between.more.notify_one();
        }
    }

    /// Capsules that were recorded and overwritten: the counts tell, where entries are missing.
    fn missing(&self) -> u64 {
        let of = |(lcore, follower): (usize, &Follower)| {
            let (first, read) = self.capsules.get(lcore).copied().unwrap_or_default();
            if follower.missed == 0 {
                0
            } else {
                self.count(lcore).saturating_sub(first).saturating_sub(read)
            }
        };
        self.work.followers.iter().enumerate().map(of).sum()
    }

    fn fail(self, between: &Between, why: &str) {
        let mut state = between.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failed = Some(why.to_owned());
        drop(state);
        between.more.notify_one();
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
