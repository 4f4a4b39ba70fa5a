//! CPUs: which there are, binding a process to one, and hogs, which are threads that do nothing but keep one busy
//! beside what is recorded on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use nix::libc;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The nice value of what has a CPU to itself, as on a machine of its own: what records it takes its time from it
/// otherwise.
pub const FIRST: i32 = -15;

/// Threads that keep a CPU busy until this is dropped.
#[derive(Debug)]
pub struct Hogs {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Hogs {
    /// Starts so many on this CPU, which take its time from what has it to itself.
    ///
    /// # Errors
    /// There is no such CPU for this process, or the system gives no thread.
    pub fn on(cpu: usize, count: usize) -> Result<Hogs> {
        let mut set = CpuSet::new();
        set.set(cpu).with_context(|| format!("CPU {cpu}"))?;
        let mut hogs = Hogs { stop: Arc::default(), threads: Vec::new() };
        for _ in 0..count {
            let (stop, (told, heard)) = (Arc::clone(&hogs.stop), std::sync::mpsc::channel());
            let thread = std::thread::Builder::new().name("hog".to_owned()).spawn(move || {
                let bound = sched_setaffinity(Pid::from_raw(0), &set);
                set_nice(0);
                let go = bound.is_ok();
                // Who started it waits for this.
                let _ = told.send(bound);
                while go && !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })?;
            hogs.threads.push(thread);
            heard.recv().context("a hog ended")?.with_context(|| format!("binding a hog to CPU {cpu}"))?;
        }
        Ok(hogs)
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Binds a process with all its threads to a CPU.
///
/// # Errors
/// There is no such CPU or process.
pub fn bind(pid: u32, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu).with_context(|| format!("CPU {cpu}"))?;
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread: i32 = entry?.file_name().to_string_lossy().parse()?;
        sched_setaffinity(Pid::from_raw(thread), &set)
            .with_context(|| format!("binding thread {thread} to CPU {cpu}"))?;
    }
    Ok(())
}

/// Lets all threads of a process go before others, where that is allowed: without the right to it, it is as busy as the
/// machine is.
///
/// # Errors
/// There is no such process.
pub fn prefer(pid: u32) -> Result<()> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        set_nice(entry?.file_name().to_string_lossy().parse()?);
    }
    Ok(())
}

/// Of a thread; 0 is this one.
fn set_nice(thread: libc::id_t) {
    // SAFETY: it takes numbers only.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, FIRST) };
}

/// The CPUs that this process may use, in order.
///
/// # Errors
/// The system does not tell.
pub fn usable() -> Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0)).context("the CPUs of this process")?;
    Ok((0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn hogs_run_on_their_cpu_and_end() {
        let all = usable().unwrap();
        let hogs = Hogs::on(all[0], 2).unwrap();
        let time = || -> u64 {
            let text = std::fs::read_to_string("/proc/self/task/".to_owned() + &hog() + "/stat").unwrap();
            let behind_name = text.rsplit_once(')').unwrap().1;
            // utime and stime. By place: some before them may be below zero.
            behind_name.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
        };
        fn hog() -> String {
            let is_hog = |entry: &std::fs::DirEntry| {
                std::fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.trim() == "hog")
            };
            let mut all = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            all.find(is_hog).unwrap().file_name().into_string().unwrap()
        }
        let before = time();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while time() < before + 5 && std::time::Instant::now() < until {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert!(time() >= before + 5);
        drop(hogs);
        assert!(Hogs::on(100_000, 1).is_err());
    }
}
