//! How long each thread of the recorded process ran and waited for a CPU, from `/proc/PID/task/TID/schedstat`.

use super::{Again, Collector, Lack, Places, Subject, attribute, names};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{fields, lines, number};
use crate::{About, Nanos, ObjectId, Rows};
use std::collections::BTreeMap;
use std::path::PathBuf;

metrics! {
    Running = "run_time", "ns", Counter64, "it ran";
    Waiting = "run_delay", "ns", Counter64, "it was runnable and waited for a CPU";
    Slices = "slices", "", Counter64, "times that it was put on a CPU";
}

pub(super) const ABOUT: About = About {
    name: "threads",
    source: "/proc/PID/task/*/schedstat of the recorded process",
    object: "`TID NAME`",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "where the kernel is recorded, which has no process; where the kernel has no CONFIG_SCHED_INFO; threads beyond 512",
};

/// More threads than this are not sampled.
const THREADS: usize = 512;
/// Between looks for threads that came, ns.
const LOOK: u64 = 2_000_000_000;

/// The collector.
#[derive(Debug)]
pub(super) struct Threads {
    folder: PathBuf,
    threads: BTreeMap<u32, (Kept, ObjectId)>,
    look_again: Again,
}

impl Threads {
    pub(super) fn open(places: &Places, subject: &Subject) -> Result<Threads, Lack> {
        let pid =
            subject.pid.ok_or_else(|| Lack("the kernel is recorded, which has no process".to_owned()))?;
        let folder = places.proc.join(format!("{pid}/task"));
        let first = folder.join(format!("{pid}/schedstat"));
        Kept::open(&first).map_err(|e| Lack::of(&first, &e))?;
        Ok(Threads { folder, threads: BTreeMap::new(), look_again: Again::each(LOOK) })
    }

    fn look(&mut self, rows: &mut Rows) {
        for name in names(&self.folder) {
            let Ok(tid) = name.parse::<u32>() else { continue };
            if self.threads.contains_key(&tid) {
                continue;
            }
            if self.threads.len() >= THREADS {
                rows.lack("", &format!("more than {THREADS} threads: the others are left out"));
                return;
            }
            // It may have ended meanwhile.
            let folder = self.folder.join(&name);
            let Ok(kept) = Kept::open(&folder.join("schedstat")) else { continue };
            let Some(object) = rows.object(&format!("{tid} {}", attribute(&folder.join("comm")))) else {
                return;
            };
            self.threads.insert(tid, (kept, object));
        }
    }
}

impl Collector for Threads {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, at: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        if self.look_again.is_due(at) {
            self.look(rows);
        }
        self.threads.retain(|_, (kept, object)| match kept.read() {
            Ok(text) => {
                parse(text, *object, rows);
                true
            }
            Err(_) => false,
        });
        if self.threads.is_empty() {
            return Err(Lack("the recorded process has ended".to_owned()));
        }
        Ok(())
    }
}

fn parse(text: &[u8], object: ObjectId, rows: &mut Rows) {
    let Some(line) = lines(text).next() else { return };
    for (metric, field) in [M::Running, M::Waiting, M::Slices].into_iter().zip(fields(line)) {
        if let Some(value) = number(field) {
            rows.count(object, metric, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Threads, parse};
    use crate::collect::{Collector, Places, Subject};
    use crate::rows::tests::{key, sampled, values};
    use crate::{Nanos, Rows};

    fn of(text: &[u8], rows: &mut Rows) {
        if let Some(object) = rows.object("1 x") {
            parse(text, object, rows);
        }
    }

    #[test]
    fn a_thread_that_runs_and_one_that_waits_are_told() {
        let found = sampled(&ABOUT, |rows| of(b"97000 1766 12\n", rows));
        assert_eq!(found[&key("1 x", "run_delay")], 1766.0);
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn this_process_s_own_threads_are_found_and_a_thread_that_ends_goes() {
        let pid = Some(std::process::id());
        let mut threads = Threads::open(&Places::default(), &Subject { pid, ..Subject::default() }).unwrap();
        let mut rows = Rows::new(&ABOUT);
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::Builder::new().name("passing".into()).spawn(move || wait.recv()).unwrap();
        let mut sample = |at: u64| {
            rows.begin(Nanos(at));
            threads.sample(Nanos(at), &mut rows).unwrap();
            rows.finish(Nanos(0));
            values(&rows).keys().any(|(object, _)| object.ends_with(" passing"))
        };
        // The name is set by the thread itself.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(sample(1));
        go.send(()).unwrap();
        other.join().unwrap().unwrap();
        let gone = (0..100).any(|n| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            !sample(2 + n)
        });
        assert!(gone);
    }

    #[test]
    fn without_a_process_there_is_nothing() {
        let lack = Threads::open(&Places::default(), &Subject::default()).unwrap_err();
        assert!(lack.to_string().contains("no process"));
    }

    super::super::parser_properties!(&ABOUT, "97000 1766 12\n", of);
}
