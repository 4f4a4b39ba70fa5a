//! A reactor: one OS thread that polls its connections, runs what is due, and never blocks on a
//! command. It knows nothing of NVMe; it calls `tcp` for connections and `bdev` for completions.
//!
//! One turn of the loop: messages from other threads, completions deferred by the back end, timers
//! that are due, then the poll group: first every socket with queued PDUs is flushed, then the
//! readable ones are read.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::faults::{Pool, work};
use super::types::{
    spdk_bdev_io, spdk_io_channel, spdk_nvmf_poll_group, spdk_nvmf_request, spdk_nvmf_tcp_poll_group,
    spdk_nvmf_tcp_qpair, spdk_thread,
};
use super::{Shared, bdev, ctrlr, nvmf, tcp};

/// How long before a deadline the reactor stops sleeping and polls instead: longer than a sleeping
/// thread takes to wake up.
const SPIN_BEFORE_DEADLINE_NS: u64 = 120_000;

/// What is due this soon is waited for: a turn of the loop takes longer, and delays would be whole turns.
const EXACT_NS: u64 = 4_000;
/// The longest sleep, so that keep-alive timers are looked at.
const LONGEST_SLEEP_NS: u64 = 200_000_000;

const EVENTS: usize = 64;

/// A message from another thread.
#[derive(Debug)]
pub(crate) enum Message {
    /// A new connection.
    Accept(TcpStream),
    /// Close every queue of the controller with this `uid`.
    DisconnectController(u64),
    /// Run again what waited while the subsystem with this id was paused.
    Resume(u32),
}

/// The end of a reactor that other threads hold.
#[derive(Debug)]
pub(crate) struct Mailbox {
    queue: Mutex<VecDeque<Message>>,
    filled: AtomicBool,
    event: OwnedFd,
}

impl Mailbox {
    /// # Errors
    /// No event descriptor can be had.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: plain system call; a non-negative result is a descriptor that nobody else owns.
        let event = unsafe {
            let fd = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        Ok(Self { queue: Mutex::new(VecDeque::new()), filled: AtomicBool::new(false), event })
    }

    /// Leaves a message and wakes the reactor.
    pub(crate) fn send(&self, message: Message) {
        super::lock(&self.queue).push_back(message);
        self.filled.store(true, Ordering::Release);
        self.wake();
    }

    /// Wakes the reactor, for it to look at the shared state.
    pub(crate) fn wake(&self) {
        let one: u64 = 1;
        // SAFETY: eight readable bytes; a full counter (EAGAIN) wakes the reactor just as well.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn take(&self) -> Option<Message> {
        super::lock(&self.queue).pop_front()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// A command whose target-driver delay ends.
    Exec(*mut spdk_nvmf_request),
    /// A bdev I/O whose storage delay ends.
    BdevDone(*mut spdk_bdev_io),
    /// A terminated connection whose peer does not hang up.
    HangUp(u64),
}

/// A reactor's state. Only its own thread touches it; the cells are there because the functions
/// that a command passes call each other and come back here.
pub(crate) struct Reactor {
    pub(crate) shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    epoll: OwnedFd,
    group: Cell<*mut spdk_nvmf_tcp_poll_group>,
    qpairs: RefCell<HashMap<u64, *mut spdk_nvmf_tcp_qpair>>,
    next_qpair_id: Cell<u64>,
    timers: RefCell<BinaryHeap<Reverse<(u64, u64, Due)>>>,
    next_timer: Cell<u64>,
    /// I/O that the back end finished inside its submit call.
    finished: RefCell<VecDeque<*mut spdk_bdev_io>>,
    /// Connections with queued PDUs.
    flush: RefCell<Vec<u64>>,
    /// Connections that waited for a free request slot and have one now, or hold unparsed bytes.
    resume: RefCell<Vec<u64>>,
    /// Connections that are down and have no command left.
    reap: RefCell<Vec<u64>>,
    /// Commands that wait for their subsystem's pause to end.
    pub(crate) paused: RefCell<VecDeque<*mut spdk_nvmf_request>>,
    /// The data buffers, and who waits for one.
    pub(crate) buffers: Pool,
    /// Unused bdev I/Os.
    pub(crate) free_bdev_ios: RefCell<Vec<*mut spdk_bdev_io>>,
}

/// CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is writable; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

/// Runs reactor number `index` until the target stops.
///
/// # Errors
/// The event loop's descriptors cannot be had.
pub(crate) fn run(index: usize, shared: Arc<Shared>) -> io::Result<()> {
    let mailbox = Arc::clone(&shared.mailboxes[index]);
    // SAFETY: plain system call; a non-negative result is a descriptor that nobody else owns.
    let epoll = unsafe {
        let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let buffers = Pool::new(shared.config.buffers);
    let reactor = Reactor {
        shared,
        mailbox,
        epoll,
        group: Cell::new(std::ptr::null_mut()),
        qpairs: RefCell::default(),
        next_qpair_id: Cell::new(1),
        timers: RefCell::default(),
        next_timer: Cell::new(0),
        finished: RefCell::default(),
        flush: RefCell::default(),
        resume: RefCell::default(),
        reap: RefCell::default(),
        paused: RefCell::default(),
        buffers,
        free_bdev_ios: RefCell::default(),
    };
    reactor.poll_for(libc::EPOLL_CTL_ADD, reactor.mailbox.event.as_raw_fd(), libc::EPOLLIN as u32, 0)?;

    let thread = Box::into_raw(Box::new(spdk_thread::new(
        index as u64 + 1,
        &format!("nvmf_tgt_poll_group_{index:03}"),
    )));
    let channel = Box::into_raw(Box::new(spdk_io_channel::new(&raw const reactor)));
    let group = Box::into_raw(Box::new(spdk_nvmf_tcp_poll_group {
        group: spdk_nvmf_poll_group::new(thread, &raw const reactor),
        ch: channel,
    }));
    reactor.group.set(group);
    nvmf::poll_group_created(thread);

    reactor.poll_loop(index);
    reactor.shut_down();

    nvmf::poll_group_destroyed(thread);
    // SAFETY: all three came from `Box::into_raw` above, and no connection is left to use them.
    unsafe {
        drop(Box::from_raw(group));
        drop(Box::from_raw(channel));
        drop(Box::from_raw(thread));
    }
    for io in reactor.free_bdev_ios.borrow_mut().drain(..) {
        // SAFETY: every bdev I/O is a leaked box, and it is on the free list exactly once.
        unsafe { drop(Box::from_raw(io)) };
    }
    Ok(())
}

impl Reactor {
    fn poll_loop(&self, index: usize) {
        let spin = self.shared.config.spin_ns;
        let other_work = self.shared.config.other_work;
        let times = &self.shared.times[index];
        let mut turn_began = now_ns();
        let mut last_busy = now_ns();
        let mut next_check = last_busy;
        while !self.shared.stopping() {
            let mut busy = self.take_messages();
            busy |= self.run_finished();
            busy |= self.run_timers();
            busy |= self.serve_buffers();
            busy |= self.flush_sockets();
            if !other_work.is_zero() {
                work(other_work);
                busy = true;
            }
            let now = now_ns();
            if busy {
                last_busy = now;
            }
            let sleep = self.sleep_ns(now, now.saturating_sub(last_busy) < spin);
            let polled = self.poll_sockets(sleep);
            if polled {
                last_busy = now_ns();
            } else if sleep == 0 && !busy && !self.is_due_within(SPIN_BEFORE_DEADLINE_NS) {
                // Polling in vain: others may need the core more.
                std::thread::yield_now();
            }
            self.resume_waiting();
            self.reap_dead();
            let turn_ended = now_ns();
            // Waiting for a deadline without sleeping is no work.
            let spent = if busy || polled { &times.busy } else { &times.idle };
            spent.fetch_add(turn_ended.saturating_sub(turn_began), Ordering::Relaxed);
            turn_began = turn_ended;
            if now >= next_check {
                next_check = now + LONGEST_SLEEP_NS;
                self.check_keep_alive(now);
            }
        }
    }

    fn is_due_within(&self, ns: u64) -> bool {
        let timers = self.timers.borrow();
        timers.peek().is_some_and(|Reverse((deadline, _, _))| *deadline <= now_ns() + ns)
    }

    fn sleep_ns(&self, now: u64, spinning: bool) -> u64 {
        if spinning
            || !self.finished.borrow().is_empty()
            || !self.flush.borrow().is_empty()
            || !self.resume.borrow().is_empty()
            || self.mailbox.filled.load(Ordering::Acquire)
        {
            return 0;
        }
        match self.timers.borrow().peek() {
            Some(Reverse((deadline, _, _))) => {
                deadline.saturating_sub(now).saturating_sub(SPIN_BEFORE_DEADLINE_NS).min(LONGEST_SLEEP_NS)
            }
            None => LONGEST_SLEEP_NS,
        }
    }

    fn take_messages(&self) -> bool {
        if !self.mailbox.filled.swap(false, Ordering::AcqRel) {
            return false;
        }
        while let Some(message) = self.mailbox.take() {
            match message {
                Message::Accept(stream) => tcp::accept(self, stream),
                Message::DisconnectController(uid) => self.disconnect_controller(uid),
                Message::Resume(id) => nvmf::resume_paused(self, id),
            }
        }
        true
    }

    fn run_finished(&self) -> bool {
        let due = self.finished.borrow().len();
        for _ in 0..due {
            let Some(io) = self.finished.borrow_mut().pop_front() else {
                break;
            };
            // SAFETY: a bdev I/O on this list is in flight and completed exactly once, here.
            unsafe { bdev::spdk_bdev_io_complete(io, 1) };
        }
        due > 0
    }

    fn run_timers(&self) -> bool {
        let mut any = false;
        loop {
            let now = now_ns();
            let due = {
                let mut timers = self.timers.borrow_mut();
                match timers.peek() {
                    Some(Reverse((deadline, _, _))) if *deadline <= now + EXACT_NS => timers.pop(),
                    _ => None,
                }
            };
            let Some(Reverse((deadline, _, due))) = due else {
                return any;
            };
            any = true;
            while now_ns() < deadline {
                std::hint::spin_loop();
            }
            match due {
                // SAFETY: a request with a pending delay is not freed before it has run.
                Due::Exec(req) => unsafe { nvmf::spdk_nvmf_request_exec(req) },
                // SAFETY: as for `run_finished`.
                Due::BdevDone(io) => unsafe { bdev::spdk_bdev_io_complete(io, 1) },
                Due::HangUp(id) => {
                    if let Some(tqpair) = self.qpair(id) {
                        // SAFETY: connections in the table are alive.
                        unsafe { tcp::disconnect(tqpair) };
                    }
                }
            }
        }
    }

    fn flush_sockets(&self) -> bool {
        let list = std::mem::take(&mut *self.flush.borrow_mut());
        let any = !list.is_empty();
        for id in &list {
            if let Some(tqpair) = self.qpair(*id) {
                // SAFETY: connections in the table are alive.
                unsafe { tcp::flush(self, tqpair) };
            }
        }
        any
    }

    fn poll_sockets(&self, sleep_ns: u64) -> bool {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        let n = wait(self.epoll.as_raw_fd(), &mut events, sleep_ns);
        let group = self.group.get();
        for event in &events[..n] {
            let (bits, id) = (event.events, event.u64);
            if id == 0 {
                let mut count = [0u8; 8];
                // SAFETY: eight writable bytes.
                unsafe { libc::read(self.mailbox.event.as_raw_fd(), count.as_mut_ptr().cast(), 8) };
                continue;
            }
            let Some(tqpair) = self.qpair(id) else {
                continue;
            };
            if bits & libc::EPOLLOUT as u32 != 0 {
                self.queue_flush(id);
            }
            if bits & !(libc::EPOLLOUT as u32) != 0 {
                // SAFETY: connections in the table are alive.
                unsafe { tcp::nvmf_tcp_sock_cb(tqpair.cast(), group, (*tqpair).sock) };
            }
        }
        n > 0
    }

    /// Gives the buffers that came back to the requests that wait for one.
    fn serve_buffers(&self) -> bool {
        let mut any = false;
        while let Some(tcp_req) = self.buffers.serve() {
            any = true;
            // SAFETY: a request that waits belongs to a live connection: one whose connection goes is forgotten.
            unsafe {
                (*tcp_req).holds_buffer = true;
                tcp::nvmf_tcp_req_process((*(*tcp_req).req.qpair).transport, tcp_req);
            }
        }
        any
    }

    fn resume_waiting(&self) {
        let list = std::mem::take(&mut *self.resume.borrow_mut());
        for id in list {
            if let Some(tqpair) = self.qpair(id) {
                // SAFETY: connections in the table are alive.
                unsafe { tcp::resume(tqpair) };
            }
        }
    }

    fn reap_dead(&self) {
        let list = std::mem::take(&mut *self.reap.borrow_mut());
        for id in list {
            let Some(tqpair) = self.qpairs.borrow_mut().remove(&id) else {
                continue;
            };
            // SAFETY: it was in the table, so it is alive; it is out of the table and off every
            // list now, and has no command left, so this is its end.
            unsafe { tcp::destroy(self, tqpair) };
        }
    }

    fn check_keep_alive(&self, now: u64) {
        let all: Vec<_> = self.qpairs.borrow().values().copied().collect();
        for tqpair in all {
            // SAFETY: connections in the table are alive.
            unsafe { ctrlr::check_keep_alive(tqpair, now) };
        }
    }

    fn disconnect_controller(&self, uid: u64) {
        let all: Vec<_> = self.qpairs.borrow().values().copied().collect();
        for tqpair in all {
            // SAFETY: connections in the table are alive, and a connection's controller lives as
            // long as the connection.
            unsafe {
                let ctrlr = (*tqpair).qpair.ctrlr;
                if !ctrlr.is_null() && (*ctrlr).uid == uid {
                    tcp::disconnect(tqpair);
                }
            }
        }
    }

    /// Ends every connection. Commands that still wait for a delay are completed at once.
    fn shut_down(&self) {
        let all: Vec<_> = self.qpairs.borrow().values().copied().collect();
        for tqpair in all {
            // SAFETY: connections in the table are alive.
            unsafe { tcp::disconnect(tqpair) };
        }
        let paused = std::mem::take(&mut *self.paused.borrow_mut());
        for req in paused {
            // SAFETY: a paused request is alive until it has been completed.
            unsafe { nvmf::spdk_nvmf_request_complete(req) };
        }
        loop {
            let timer = self.timers.borrow_mut().pop();
            let Some(Reverse((_, _, due))) = timer else {
                break;
            };
            match due {
                // SAFETY: a request with a pending delay is alive until it has been completed.
                Due::Exec(req) => unsafe { nvmf::spdk_nvmf_request_complete(req) },
                // SAFETY: as for `run_finished`.
                Due::BdevDone(io) => unsafe { bdev::spdk_bdev_io_complete(io, 1) },
                Due::HangUp(_) => {}
            }
        }
        while self.run_finished() {}
        self.reap_dead();
    }

    /// The poll group of this reactor.
    pub(crate) fn group(&self) -> *mut spdk_nvmf_tcp_poll_group {
        self.group.get()
    }

    fn qpair(&self, id: u64) -> Option<*mut spdk_nvmf_tcp_qpair> {
        self.qpairs.borrow().get(&id).copied()
    }

    /// Number of connections.
    pub(crate) fn connections(&self) -> usize {
        self.qpairs.borrow().len()
    }

    /// A number for a new connection.
    pub(crate) fn new_qpair_id(&self) -> u64 {
        let id = self.next_qpair_id.get();
        self.next_qpair_id.set(id + 1);
        id
    }

    /// Takes a new connection into the poll group.
    ///
    /// # Errors
    /// The kernel refuses to poll it.
    pub(crate) fn add_qpair(
        &self,
        id: u64,
        tqpair: *mut spdk_nvmf_tcp_qpair,
        fd: i32,
        mask: u32,
    ) -> io::Result<()> {
        self.poll_for(libc::EPOLL_CTL_ADD, fd, mask, id)?;
        self.qpairs.borrow_mut().insert(id, tqpair);
        Ok(())
    }

    /// Changes what a connection is polled for.
    pub(crate) fn poll_mask(&self, id: u64, fd: i32, mask: u32) {
        // A descriptor in the table is valid, so this cannot fail; and if it did, the connection's
        // own timeouts would end it.
        let _ = self.poll_for(libc::EPOLL_CTL_MOD, fd, mask, id);
    }

    fn poll_for(&self, op: i32, fd: i32, mask: u32, id: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: mask, u64: id };
        // SAFETY: plain system call with a valid event.
        let rc = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), op, fd, &raw mut event) };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Has the connection flushed at the start of the next poll.
    pub(crate) fn queue_flush(&self, id: u64) {
        self.flush.borrow_mut().push(id);
    }

    /// Has the connection read again without waiting for new bytes.
    pub(crate) fn queue_resume(&self, id: u64) {
        self.resume.borrow_mut().push(id);
    }

    /// Has the connection freed at the end of this turn.
    pub(crate) fn queue_reap(&self, id: u64) {
        self.reap.borrow_mut().push(id);
    }

    /// Has a finished bdev I/O completed in the next turn.
    pub(crate) fn queue_finished(&self, io: *mut spdk_bdev_io) {
        self.finished.borrow_mut().push_back(io);
    }

    /// Has a bdev I/O completed at `deadline`.
    pub(crate) fn complete_at(&self, deadline: u64, io: *mut spdk_bdev_io) {
        self.at(deadline, Due::BdevDone(io));
    }

    /// Has a request executed at `deadline`.
    pub(crate) fn exec_at(&self, deadline: u64, req: *mut spdk_nvmf_request) {
        self.at(deadline, Due::Exec(req));
    }

    /// Has a terminated connection closed at `deadline`.
    pub(crate) fn hang_up_at(&self, deadline: u64, id: u64) {
        self.at(deadline, Due::HangUp(id));
    }

    fn at(&self, deadline: u64, due: Due) {
        let seq = self.next_timer.get();
        self.next_timer.set(seq + 1);
        self.timers.borrow_mut().push(Reverse((deadline, seq, due)));
    }
}

/// Waits for events up to `sleep_ns`; 0 only looks.
fn wait(epoll: i32, events: &mut [libc::epoll_event], sleep_ns: u64) -> usize {
    let max = events.len() as i32;
    let n = if sleep_ns == 0 {
        // SAFETY: `events` is writable for `max` entries.
        unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), max, 0) }
    } else {
        let timeout = libc::timespec {
            tv_sec: (sleep_ns / 1_000_000_000) as _,
            tv_nsec: (sleep_ns % 1_000_000_000) as _,
        };
        // SAFETY: as above; the signal mask is absent.
        let n = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                epoll,
                events.as_mut_ptr(),
                max,
                &raw const timeout,
                std::ptr::null::<libc::sigset_t>(),
                0usize,
            ) as i32
        };
        if n < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
            // Before Linux 5.11: whole milliseconds, rounded down so as never to be late.
            // SAFETY: as above.
            unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), max, (sleep_ns / 1_000_000) as i32) }
        } else {
            n
        }
    };
    usize::try_from(n).unwrap_or(0)
}
