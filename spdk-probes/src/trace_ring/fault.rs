//! Reads of a mapped file behind its end: the kernel answers them with SIGBUS, which would end this process because
//! another one cut its file. Here they find zeros instead, and the mapping is known to be cut from then on. Faults
//! anywhere else go where they went before.

use std::io::{Error, ErrorKind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The most mappings that are guarded at a time.
const MOST: usize = 64;

/// A guarded mapping: where it is and how long; 0 where the place is free.
struct Place {
    taken: AtomicBool,
    at: AtomicUsize,
    length: AtomicUsize,
    cut: AtomicBool,
}

static PLACES: [Place; MOST] = [const {
    Place {
        taken: AtomicBool::new(false),
        at: AtomicUsize::new(0),
        length: AtomicUsize::new(0),
        cut: AtomicBool::new(false),
    }
}; MOST];

/// What handled the signal before, once it is handled here.
static BEFORE: OnceLock<Before> = OnceLock::new();

/// The action before, and the bytes of a page, which the handler can not ask for.
struct Before {
    action: libc::sigaction,
    page: usize,
}

// SAFETY: never written to again, and its parts are numbers and the address of a function.
unsafe impl Send for Before {}
// SAFETY: as above.
unsafe impl Sync for Before {}

/// The guard of one mapping; gone with this.
#[derive(Debug)]
pub(super) struct Guard(usize);

impl Guard {
    /// Guards the mapping of so many bytes at an address, until the guard is dropped, which has to be before it is
    /// unmapped.
    pub(super) fn new(at: usize, length: usize) -> std::io::Result<Guard> {
        handle()?;
        for (n, place) in PLACES.iter().enumerate() {
            if !place.taken.swap(true, Ordering::AcqRel) {
                place.cut.store(false, Ordering::Relaxed);
                place.at.store(at, Ordering::Relaxed);
                // Last, since a length of 0 holds nothing.
                place.length.store(length, Ordering::Release);
                return Ok(Guard(n));
            }
        }
        Err(Error::new(ErrorKind::QuotaExceeded, format!("{MOST} files are mapped already")))
    }

    /// Whether something behind the file's end was read.
    pub(super) fn is_cut(&self) -> bool {
        PLACES.get(self.0).is_some_and(|place| place.cut.load(Ordering::Acquire))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(place) = PLACES.get(self.0) {
            place.length.store(0, Ordering::Release);
            place.taken.store(false, Ordering::Release);
        }
    }
}

/// Handles the signal from now on.
fn handle() -> std::io::Result<()> {
    static ONCE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONCE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if BEFORE.get().is_some() {
        return Ok(());
    }
    // SAFETY: sysconf reads a constant.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    // SAFETY: all zeros is a valid action; the call only reads the one in force.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut action) } != 0 {
        return Err(Error::last_os_error());
    }
    // There before the handler, which reads it.
    let _ = BEFORE.set(Before { action, page });
    // SAFETY: as above.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = on_fault as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `ours` is a whole action whose handler does what one may: it reads atomics and calls the kernel.
    if unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) } != 0 {
        return Err(Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return };
    // SAFETY: the kernel passes what it knows of the signal.
    let at = unsafe { (*info).si_addr() } as usize;
    for place in &PLACES {
        let length = place.length.load(Ordering::Acquire);
        let first = place.at.load(Ordering::Relaxed);
        if at >= first && at - first < length {
            place.cut.store(true, Ordering::Release);
            let page = (at & !(before.page - 1)) as *mut libc::c_void;
            // SAFETY: replaces a page of a mapping that its guard says is there, which the file has no more, by one of
            // zeros; who reads it reads again, and finds them.
            let zeros = unsafe {
                libc::mmap(
                    page,
                    before.page,
                    libc::PROT_READ,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                    -1,
                    0,
                )
            };
            if zeros == page {
                return;
            }
        }
    }
    // Not ours: as it was before.
    let handler = before.action.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // It comes again with the instruction, and ends the process.
        // SAFETY: puts an action back that was in force.
        unsafe { libc::sigaction(signal, &before.action, std::ptr::null_mut()) };
    } else if before.action.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: the handler in force before, called as the kernel would.
        unsafe {
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(handler);
            handler(signal, info, context);
        }
    } else {
        // SAFETY: as above, for a handler without information.
        unsafe {
            let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Guard, MOST};

    #[test]
    fn places_are_used_again() {
        for _ in 0..3 * MOST {
            assert!(!Guard::new(4096, 4096).unwrap().is_cut());
        }
    }

    /// A fault that is none of ours ends the process, as it does anywhere.
    #[test]
    fn other_faults_end_the_process() {
        const ASKED: &str = "FABSCOPE_TEST_FAULT";
        if std::env::var_os(ASKED).is_some() {
            let file = tempfile::tempfile().unwrap();
            file.set_len(8192).unwrap();
            let map = memmap2::MmapOptions::new().map_raw_read_only(&file).unwrap();
            let _guard = Guard::new(4096, 4096).unwrap();
            file.set_len(0).unwrap();
            // SAFETY: none: this is the read that ends the process.
            let byte = unsafe { map.as_ptr().read_volatile() };
            println!("read {byte}");
            return;
        }
        let name = "trace_ring::fault::tests::other_faults_end_the_process";
        let outcome = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(ASKED, "1")
            .output()
            .unwrap();
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(outcome.status.signal(), Some(libc::SIGBUS), "{outcome:?}");
    }
}
