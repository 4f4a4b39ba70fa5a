//! Lets go of things that take long to let go of, such as a probe's link, on threads of their own. It knows nothing
//! of what they are.
//!
//! Closing a uprobe's link first takes the breakpoints out of the program's text, which takes a fraction of a
//! millisecond, and then waits until no CPU can be in the probe any more, which takes tens. The waiting is nobody's
//! business: the next window's links are made meanwhile. What must not happen is that the first part waits for the
//! second part of another link, or for a CPU that a polling reactor has to itself: so everything gets a thread of
//! its own at once, and the threads run before ordinary ones. They hardly run: they wait.

use nix::libc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Things being let go of.
#[derive(Debug, Default)]
pub struct Release {
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Given and not gone yet.
    waiting: AtomicUsize,
    /// Signalled when one is gone.
    gone: Condvar,
    lock: Mutex<()>,
}

impl Release {
    /// Lets go of `thing` soon; returns at once. Where no thread can be had it is let go of here.
    pub fn drop_aside(&self, thing: impl Send + 'static) {
        self.state.waiting.fetch_add(1, Ordering::SeqCst);
        let done = Done(Arc::clone(&self.state));
        let work = move || {
            urgently(move || drop(thing));
            drop(done);
        };
        // A closure that could not be sent is dropped with what it holds, which is all that was asked for.
        let _ = std::thread::Builder::new().name("release".into()).stack_size(64 << 10).spawn(work);
    }

    /// Things that were given and are not gone yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state.waiting.load(Ordering::SeqCst)
    }

    /// Waits until all is gone, at most this long; whether it is.
    #[must_use]
    pub fn wait(&self, most: Duration) -> bool {
        let end = Instant::now() + most;
        let mut guard = lock(&self.state.lock);
        while self.waiting() > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            guard = self.state.gone.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Counts a thing as gone however its thread ends.
struct Done(Arc<State>);

impl Drop for Done {
    fn drop(&mut self) {
        let _guard = lock(&self.0.lock);
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
        self.0.gone.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does something on this thread before all ordinary threads, so that a reactor which has this CPU to itself does not
/// hold it up. Where the system does not allow that, it is done as any thread's work. Only for what is short or sleeps.
pub fn urgently<T>(work: impl FnOnce() -> T) -> T {
    /// Gives the thread its place back, also when the work panics.
    struct Back(libc::c_int);
    impl Drop for Back {
        fn drop(&mut self) {
            schedule(self.0, 0);
        }
    }
    // SAFETY: the call takes an integer and no memory; 0 is the calling thread.
    let before = unsafe { libc::sched_getscheduler(0) };
    let ordinary = matches!(before, libc::SCHED_OTHER | libc::SCHED_BATCH | libc::SCHED_IDLE);
    let _back = (ordinary && schedule(libc::SCHED_FIFO, 1)).then(|| Back(before));
    work()
}

fn schedule(policy: libc::c_int, priority: libc::c_int) -> bool {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the call reads the parameters, which live through it; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

#[cfg(test)]
mod tests {
    use super::{Release, urgently};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};
    use std::time::Duration;

    /// It goes when all others go, and somebody looks on.
    struct Slow {
        meet: Arc<Barrier>,
        gone: Arc<AtomicUsize>,
        panics: bool,
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            self.meet.wait();
            self.gone.fetch_add(1, Ordering::SeqCst);
            assert!(!self.panics, "as wanted");
        }
    }

    #[test]
    fn slow_things_go_at_the_same_time_and_all_go() {
        let (meet, gone) = (Arc::new(Barrier::new(11)), Arc::new(AtomicUsize::new(0)));
        let release = Release::default();
        for n in 0..10 {
            // One that panics is gone all the same.
            release.drop_aside(Slow { meet: Arc::clone(&meet), gone: Arc::clone(&gone), panics: n == 3 });
        }
        // It waited for none, and one after the other they would never meet.
        assert_eq!(release.waiting(), 10);
        assert!(!release.wait(Duration::from_millis(1)));
        meet.wait();
        assert!(release.wait(Duration::from_secs(120)));
        assert_eq!((release.waiting(), gone.load(Ordering::SeqCst)), (0, 10));
    }

    #[test]
    fn urgent_work_is_done_and_the_thread_is_as_before() {
        // SAFETY: it takes an integer and no memory.
        let policy = || unsafe { nix::libc::sched_getscheduler(0) };
        let before = policy();
        let within = urgently(policy);
        assert!(within == nix::libc::SCHED_FIFO || within == before);
        let _ = std::panic::catch_unwind(|| urgently(|| panic!("as wanted")));
        assert_eq!(policy(), before);
    }
}
