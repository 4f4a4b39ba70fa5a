//! The process in which a hit's price is measured: a fork of this one with one function for each class of
//! instruction, which it calls in loops when told to. It attaches nothing and knows no prices.
//!
//! A fork and not a program of its own, so that nothing has to be installed: the functions are in whichever file
//! this code was linked into. Between fork and exit the child allocates nothing, takes no lock and can not panic,
//! as the other threads of the parent are not in it.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What the child can be told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub(super) enum Work {
    /// A call of a function that begins with a five-byte nop.
    Nop5,
    /// With the ten-byte nop.
    Nop10,
    /// With a push.
    Push,
    /// With the one-byte nop of a USDT probe.
    Nop,
    /// With an instruction that no kernel emulates.
    Step,
    /// Renaming itself, which passes a tracepoint and a function of the kernel.
    Rename,
    /// A leaf function that keeps a value below the stack pointer over a five-byte nop.
    RedZone,
}

impl Work {
    const ALL: [Work; 7] =
        [Work::Nop5, Work::Nop10, Work::Push, Work::Nop, Work::Step, Work::Rename, Work::RedZone];

    /// Where a uprobe on it goes.
    pub(super) fn site(self) -> Option<u64> {
        let function: unsafe extern "C" fn() -> u64 = match self {
            Work::Nop5 => fabscope_price_nop5,
            Work::Nop10 => fabscope_price_nop10,
            Work::Push => fabscope_price_push,
            Work::Nop => fabscope_price_nop,
            Work::Step => fabscope_price_step,
            Work::RedZone => fabscope_price_red_zone_site,
            Work::Rename => return None,
        };
        Some(function as usize as u64)
    }

    /// Does it once. Of [`Work::RedZone`], whether the value below the stack pointer was changed.
    fn once(self) -> u64 {
        // SAFETY: the functions are written below: they follow the C convention, take nothing and touch only their
        // own stack; prctl reads the sixteen bytes of a name.
        unsafe {
            match self {
                Work::Nop5 => fabscope_price_nop5(),
                Work::Nop10 => fabscope_price_nop10(),
                Work::Push => fabscope_price_push(),
                Work::Nop => fabscope_price_nop(),
                Work::Step => fabscope_price_step(),
                Work::RedZone => fabscope_price_red_zone(),
                Work::Rename => libc::prctl(libc::PR_SET_NAME, c"fabscope-price".as_ptr()) as u64,
            }
        }
    }
}

unsafe extern "C" {
    fn fabscope_price_nop5() -> u64;
    fn fabscope_price_nop10() -> u64;
    fn fabscope_price_push() -> u64;
    fn fabscope_price_nop() -> u64;
    fn fabscope_price_step() -> u64;
    fn fabscope_price_red_zone() -> u64;
    fn fabscope_price_red_zone_site() -> u64;
}

// By hand, so that it is sure what stands at their entries. Each begins a line of the cache, so that no nop lies
// across two pages, where the kernel would not optimise it.
std::arch::global_asm!(
    ".text",
    ".macro fabscope_price name",
    ".balign 64",
    ".globl fabscope_price_\\name",
    ".hidden fabscope_price_\\name",
    ".type fabscope_price_\\name, @function",
    "fabscope_price_\\name:",
    ".endm",
    "fabscope_price nop5",
    ".byte 0x0f, 0x1f, 0x44, 0x00, 0x00",
    "ret",
    "fabscope_price nop10",
    ".byte 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00",
    "ret",
    "fabscope_price push",
    "push rbx",
    "pop rbx",
    "ret",
    "fabscope_price nop",
    "nop",
    "ret",
    "fabscope_price step",
    "mov rax, rdi",
    "ret",
    // What a compiler does in a function that calls nothing: it keeps values below the stack pointer.
    "fabscope_price red_zone",
    "mov rax, 0x5a5a5a5a",
    "mov [rsp - 8], rax",
    "mov [rsp - 16], rax",
    "mov [rsp - 24], rax",
    "mov [rsp - 32], rax",
    "jmp fabscope_price_red_zone_site",
    "fabscope_price red_zone_site",
    ".byte 0x0f, 0x1f, 0x44, 0x00, 0x00",
    "mov rcx, 0x5a5a5a5a",
    "xor eax, eax",
    "cmp [rsp - 8], rcx",
    "jne 2f",
    "cmp [rsp - 16], rcx",
    "jne 2f",
    "cmp [rsp - 24], rcx",
    "jne 2f",
    "cmp [rsp - 32], rcx",
    "je 3f",
    "2: mov eax, 1",
    "3: ret",
    ".purgem fabscope_price",
);

/// What is between two hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Between {
    /// Nothing: everything that a hit needs is in the caches.
    Nothing,
    /// A walk through more memory than the nearer caches hold.
    Memory,
}

/// How many hits are timed together where nothing is between them.
const BATCH: u32 = 24;
/// The most times that are kept of one measurement.
const TIMES: usize = 2048;
/// The memory that is walked through: more than the nearer caches of a core hold, on most.
const WALK: usize = 1 << 20;
const LINE: usize = 64;

/// A message each way is three words.
const MESSAGE: usize = 24;

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    /// The time of one, with what timing takes: of the batches, or of the single ones, the time that a tenth was
    /// below, so that other work on the machine does not show.
    pub(super) ns: f64,
    /// How many were done.
    pub(super) done: u64,
    /// The sum of what they returned.
    pub(super) sum: u64,
}

/// The child. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Child {
    pid: libc::pid_t,
    socket: UnixStream,
}

impl Child {
    /// Forks it, bound to the CPU that this runs on.
    pub(super) fn start() -> io::Result<Child> {
        let (ours, its) = UnixStream::pair()?;
        ours.set_read_timeout(Some(Duration::from_secs(2)))?;
        // What the child needs is there before it is.
        let mut memory = vec![1u8; WALK];
        let mut times = vec![0u64; TIMES];
        // SAFETY: takes nothing.
        let cpu = unsafe { libc::sched_getcpu() };
        // SAFETY: the child calls nothing but what may be called between fork and exec, and ends by _exit.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => Err(io::Error::last_os_error()),
            0 => serve(its.as_raw_fd(), cpu, &mut memory, &mut times),
            pid => Ok(Child { pid, socket: ours }),
        }
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Measures one kind of work for that long.
    pub(super) fn measure(&mut self, work: Work, between: Between, time: Duration) -> io::Result<Measured> {
        let mut message = [0u8; MESSAGE];
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        for (word, value) in message.chunks_exact_mut(8).zip([work as u64, between as u64, nanos]) {
            word.copy_from_slice(&value.to_ne_bytes());
        }
        self.socket.write_all(&message)?;
        self.socket.read_exact(&mut message)?;
        let word = |n: usize| {
            message.chunks_exact(8).nth(n).and_then(|w| w.try_into().ok()).map_or(0, u64::from_ne_bytes)
        };
        Ok(Measured { ns: f64::from_bits(word(0)), done: word(1), sum: word(2) })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: the process is this one's child and has not been waited for, so that the number is its own.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, &raw mut status, 0);
        }
    }
}

/// What the child does until its parent goes.
fn serve(socket: RawFd, cpu: i32, memory: &mut [u8], times: &mut [u64]) -> ! {
    // SAFETY: system calls on the child's own state alone; the set of CPUs and of signals are whole.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // Ctrl-C goes to the whole group, and the parent ends the child.
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        if let Ok(cpu) = usize::try_from(cpu) {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
        }
    }
    // The parent's descriptors are not the child's to hold.
    const OWN: RawFd = 3;
    // SAFETY: the child uses no other descriptor than this one from here on.
    unsafe {
        if socket != OWN && libc::dup2(socket, OWN) < 0 {
            libc::_exit(1);
        }
        libc::syscall(libc::SYS_close_range, OWN + 1, u32::MAX, 0);
    }
    let mut message = [0u64; MESSAGE / 8];
    loop {
        // SAFETY: the buffer has so many bytes.
        let read = unsafe { libc::read(OWN, message.as_mut_ptr().cast(), MESSAGE) };
        let work = Work::ALL.iter().find(|work| **work as u64 == message[0]);
        let (MESSAGE_READ, Some(work)) = (read, work) else {
            // SAFETY: ends the child without running what belongs to the parent.
            unsafe { libc::_exit(0) }
        };
        let Measured { ns, done, sum } = match message[1] {
            0 => warm(*work, message[2], times),
            _ => cold(*work, message[2], times, memory),
        };
        message = [ns.to_bits(), done, sum];
        // SAFETY: as above.
        unsafe { libc::write(OWN, message.as_ptr().cast(), MESSAGE) };
    }
}

const MESSAGE_READ: isize = MESSAGE as isize;

fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is whole.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// One after the other, in batches.
fn warm(work: Work, nanos: u64, times: &mut [u64]) -> Measured {
    let (start, mut taken, mut sum) = (now(), 0, 0u64);
    while let Some(time) = times.get_mut(taken) {
        let from = now();
        for _ in 0..BATCH {
            sum = sum.wrapping_add(work.once());
        }
        let to = now();
        *time = to.wrapping_sub(from);
        taken += 1;
        if to.wrapping_sub(start) >= nanos {
            break;
        }
    }
    let done = taken as u64 * u64::from(BATCH);
    Measured { ns: low(times, taken) / f64::from(BATCH), done, sum }
}

/// One at a time, with other memory touched between them.
fn cold(work: Work, nanos: u64, times: &mut [u64], memory: &mut [u8]) -> Measured {
    let (start, mut taken, mut sum) = (now(), 0, 0u64);
    while let Some(time) = times.get_mut(taken) {
        for line in memory.chunks_mut(LINE) {
            if let Some(byte) = line.first_mut() {
                *byte = std::hint::black_box(byte.wrapping_add(1));
            }
        }
        let from = now();
        sum = sum.wrapping_add(work.once());
        let to = now();
        *time = to.wrapping_sub(from);
        taken += 1;
        if to.wrapping_sub(start) >= nanos {
            break;
        }
    }
    Measured { ns: low(times, taken), done: taken as u64, sum }
}

/// The time that a tenth of the times are below.
fn low(times: &mut [u64], taken: usize) -> f64 {
    let Some(times) = times.get_mut(..taken) else { return 0.0 };
    times.sort_unstable();
    times.get(taken / 10).map_or(0.0, |time| *time as f64)
}

/// Where in its file a function of this program is.
pub(super) fn file_offset(address: u64) -> Option<u64> {
    struct Search {
        address: u64,
        found: Option<u64>,
    }
    unsafe extern "C" fn look(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        data: *mut libc::c_void,
    ) -> libc::c_int {
        // SAFETY: the loader hands over a whole structure with so many program headers, and the pointer that this
        // was called with, which is to a Search that nobody else uses meanwhile.
        let (base, headers, search) = unsafe {
            let info = &*info;
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
            (info.dlpi_addr, headers, &mut *data.cast::<Search>())
        };
        let inside = search.address.wrapping_sub(base);
        search.found = headers
            .iter()
            .filter(|header| header.p_type == libc::PT_LOAD)
            .find(|header| inside.wrapping_sub(header.p_vaddr) < header.p_filesz)
            .map(|header| inside - header.p_vaddr + header.p_offset);
        // The first is the program itself, which this code is in.
        1
    }
    let mut search = Search { address, found: None };
    // SAFETY: the callback takes its data as what it is, and keeps nothing.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

#[cfg(test)]
mod tests {
    use super::{Between, Child, Work, file_offset};
    use std::time::Duration;

    #[test]
    fn the_functions_are_in_the_file_as_they_were_written() {
        let file = std::fs::read("/proc/self/exe").unwrap();
        let openings: [(Work, &[u8]); 6] = [
            (Work::Nop5, &[0x0f, 0x1f, 0x44, 0x00, 0x00]),
            (Work::Nop10, &[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00]),
            (Work::Push, &[0x53]),
            (Work::Nop, &[0x90]),
            (Work::Step, &[0x48, 0x89, 0xf8]),
            (Work::RedZone, &[0x0f, 0x1f, 0x44, 0x00, 0x00]),
        ];
        for (work, opening) in openings {
            let at = file_offset(work.site().unwrap()).unwrap() as usize;
            assert_eq!(&file[at..at + opening.len()], opening, "{work:?}");
        }
        assert_eq!(Work::Rename.site(), None);
        assert_eq!(file_offset(u64::MAX), None);
    }

    #[test]
    fn the_child_does_what_it_is_told_and_ends_with_its_parent() {
        let mut child = Child::start().unwrap();
        for work in Work::ALL {
            for between in [Between::Nothing, Between::Memory] {
                let measured = child.measure(work, between, Duration::from_millis(2)).unwrap();
                assert!(measured.done > 0 && measured.ns > 0.0, "{work:?}: {measured:?}");
                // Without a probe nothing writes below the stack pointer.
                assert!(work != Work::RedZone || measured.sum == 0, "{measured:?}");
            }
        }
        let pid = child.pid();
        drop(child);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
