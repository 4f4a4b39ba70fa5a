//! The target: what it serves, its reactors, its listener and its control socket.
//!
//! `tcp` is the transport, `nvmf` and `ctrlr` the NVMe part, `bdev` storage, `reactor` the event
//! loop, `identify` the answers that are pure data, `control` the commands while it runs.

mod bdev;
mod control;
mod ctrlr;
pub(crate) mod faults;
mod identify;
mod nvmf;
mod reactor;
mod rpc;
mod tcp;
mod types;

use std::ffi::CString;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use standin::Stage;

use crate::wire::opc;
use identify::NamespaceDescription;
use reactor::{Mailbox, Message};
use types::{
    spdk_bdev, spdk_nvmf_ns, spdk_nvmf_subsystem, spdk_nvmf_subsystem_listener, spdk_nvmf_subsystem_state,
    spdk_nvmf_transport, spdk_nvmf_transport_opts,
};

use crate::trid::spdk_nvme_transport_id;
use crate::wire::Status;

/// What a target is started with.
#[derive(Clone, Debug)]
pub(crate) struct TargetConfig {
    /// Where to listen; port 0 takes a free one.
    pub(crate) listen: SocketAddr,
    /// NQNs of the subsystems to serve, each with its own namespaces.
    pub(crate) subsystems: Vec<String>,
    /// Namespaces of each subsystem, 1 to 128.
    pub(crate) namespaces: u32,
    /// Size of each namespace, in bytes.
    pub(crate) namespace_bytes: u64,
    /// Logical block size in bytes: 512 or 4096.
    pub(crate) block_bytes: u32,
    /// Keep what is written (memory), or nothing (null).
    pub(crate) backend: Backend,
    /// Number of reactors, each a thread with its own connections.
    pub(crate) reactors: usize,
    /// How long a reactor polls after its last work before it sleeps, in nanoseconds.
    pub(crate) spin_ns: u64,
    /// Queue entries, 2 to 1024.
    pub(crate) max_queue_depth: u16,
    /// Most I/O queues of a controller, 1 to 128.
    pub(crate) max_io_queues: u16,
    /// Most data of one command, in bytes: a power of two times 4096.
    pub(crate) max_io_bytes: u32,
    /// Most data inside a command capsule, in bytes: a multiple of 16.
    pub(crate) in_capsule_bytes: u32,
    /// Most data in one H2CData PDU, in bytes: at least 4096.
    pub(crate) max_h2c_data: u32,
    /// Most data that one R2T asks for, in bytes; a larger write gets several R2Ts in turn.
    pub(crate) r2t_bytes: u32,
    /// Let the last C2HData stand for the response where the host allows it.
    pub(crate) c2h_success: bool,
    /// Announce Asymmetric Namespace Access, with one optimized group.
    pub(crate) ana: bool,
    /// UNIX socket for commands while it runs.
    pub(crate) control: Option<PathBuf>,
    /// UNIX socket for the part of SPDK's JSON-RPC that tells how reactors and buffers fare.
    pub(crate) rpc: Option<PathBuf>,
    /// What is wrong with the drive.
    pub(crate) drive: Option<faults::Drive>,
    /// Data buffers of each reactor.
    pub(crate) buffers: usize,
    /// Other work that each turn of a reactor has to do.
    pub(crate) other_work: Duration,
    /// Size of each connection's socket buffers; none leaves them to the kernel.
    pub(crate) socket_buffer: Option<u32>,
    /// What each connection sends at most, bytes a second; none leaves it to the kernel.
    pub(crate) pace: Option<u32>,
}

/// Where data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// Memory: reads give what was written, zeroes before that.
    Memory,
    /// Nowhere: reads give zeroes.
    Null,
}

impl Default for TargetConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            subsystems: vec![standin::DEFAULT_NQN.to_owned()],
            namespaces: 1,
            namespace_bytes: 256 << 20,
            block_bytes: 512,
            backend: Backend::Memory,
            reactors: 1,
            spin_ns: 1_000_000,
            max_queue_depth: 128,
            max_io_queues: 64,
            max_io_bytes: 128 << 10,
            in_capsule_bytes: 8192,
            max_h2c_data: 128 << 10,
            r2t_bytes: u32::MAX,
            c2h_success: true,
            ana: false,
            control: None,
            rpc: None,
            drive: None,
            buffers: usize::MAX,
            other_work: Duration::ZERO,
            socket_buffer: None,
            pace: None,
        }
    }
}

impl TargetConfig {
    fn check(&self) -> Result<()> {
        if self.subsystems.is_empty() || self.subsystems.len() > 64 {
            bail!("--nqn: a target serves 1 to 64 subsystems, not {}", self.subsystems.len());
        }
        for (i, nqn) in self.subsystems.iter().enumerate() {
            if nqn.len() > 223 || !nqn.starts_with("nqn.") {
                bail!("--nqn {nqn}: not an NQN (\"nqn.\" and at most 223 bytes)");
            }
            if self.subsystems[..i].contains(nqn) {
                bail!("--nqn {nqn}: given twice");
            }
        }
        if !(1..=identify::MAX_NAMESPACES).contains(&self.namespaces) {
            bail!("--namespaces: 1 to {}, not {}", identify::MAX_NAMESPACES, self.namespaces);
        }
        if ![512, 4096].contains(&self.block_bytes) {
            bail!("--block-size: 512 or 4096, not {}", self.block_bytes);
        }
        if self.namespace_bytes < 1 << 20 || self.namespace_bytes > 1 << 40 {
            bail!("--namespace-size: 1M to 1T, not {} bytes", self.namespace_bytes);
        }
        if !(1..=64).contains(&self.reactors) {
            bail!("--reactors: 1 to 64, not {}", self.reactors);
        }
        if !(2..=1024).contains(&self.max_queue_depth) {
            bail!("--max-queue-depth: 2 to 1024, not {}", self.max_queue_depth);
        }
        if !(1..=128).contains(&self.max_io_queues) {
            bail!("--max-io-queues: 1 to 128, not {}", self.max_io_queues);
        }
        let io = self.max_io_bytes;
        if !io.is_power_of_two() || !(4096..=4 << 20).contains(&io) {
            bail!("--max-io-size: a power of two from 4K to 4M, not {io} bytes");
        }
        let capsule = self.in_capsule_bytes;
        if !capsule.is_multiple_of(16) || !(1024..=64 << 10).contains(&capsule) {
            bail!("--in-capsule: a multiple of 16 from 1K to 64K, not {capsule} bytes");
        }
        if !(4096..=4 << 20).contains(&self.max_h2c_data) {
            bail!("--max-h2c-data: 4K to 4M, not {} bytes", self.max_h2c_data);
        }
        if self.buffers == 0 {
            bail!("--buffers: at least 1: with none no command would ever end");
        }
        if self.pace == Some(0) {
            bail!("--pace: at least 1 byte a second: with none nothing would ever come");
        }
        if self.other_work > Duration::from_secs(1) {
            bail!("--other-work: at most 1s for each turn");
        }
        if self.r2t_bytes < 512 {
            bail!("--r2t-bytes: at least 512, not {}", self.r2t_bytes);
        }
        Ok(())
    }
}

/// The delays in nanoseconds. They belong to the process, as the log does.
#[derive(Debug)]
pub(crate) struct Delays {
    pub(crate) storage: AtomicU64,
    pub(crate) target_driver: AtomicU64,
}

pub(crate) static DELAYS: Delays = Delays { storage: AtomicU64::new(0), target_driver: AtomicU64::new(0) };

/// Makes a stage slower by `delay` from now on; zero takes the delay away.
pub(crate) fn set_delay(stage: Stage, delay: Duration) {
    let ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX / 2);
    match stage {
        Stage::Storage => DELAYS.storage.store(ns, Ordering::Relaxed),
        Stage::TargetDriver => DELAYS.target_driver.store(ns, Ordering::Relaxed),
    }
}

/// What the target has done since it was started.
#[derive(Debug)]
pub(crate) struct Stats {
    pub(crate) connections: AtomicU64,
    pub(crate) read: AtomicU64,
    pub(crate) write: AtomicU64,
    pub(crate) flush: AtomicU64,
    pub(crate) other: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) r2ts: AtomicU64,
    pub(crate) c2h_bytes: AtomicU64,
    pub(crate) h2c_bytes: AtomicU64,
}

pub(crate) static STATS: Stats = Stats {
    connections: AtomicU64::new(0),
    read: AtomicU64::new(0),
    write: AtomicU64::new(0),
    flush: AtomicU64::new(0),
    other: AtomicU64::new(0),
    errors: AtomicU64::new(0),
    r2ts: AtomicU64::new(0),
    c2h_bytes: AtomicU64::new(0),
    h2c_bytes: AtomicU64::new(0),
};

impl Stats {
    fn count(&self, opcode: u8) {
        match opcode {
            opc::READ => &self.read,
            opc::WRITE => &self.write,
            opc::FLUSH => &self.flush,
            _ => &self.other,
        }
        .fetch_add(1, Ordering::Relaxed);
    }

    /// The counters by name.
    pub(crate) fn named(&self) -> [(&'static str, u64); 9] {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        [
            ("connections", get(&self.connections)),
            ("read", get(&self.read)),
            ("write", get(&self.write)),
            ("flush", get(&self.flush)),
            ("other", get(&self.other)),
            ("errors", get(&self.errors)),
            ("r2ts", get(&self.r2ts)),
            ("c2h_bytes", get(&self.c2h_bytes)),
            ("h2c_bytes", get(&self.h2c_bytes)),
        ]
    }
}

/// What all threads of a target share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: TargetConfig,
    pub(crate) mailboxes: Vec<Arc<Mailbox>>,
    transport: *mut spdk_nvmf_transport,
    listener: *const spdk_nvmf_subsystem_listener,
    subsystems: Vec<*mut spdk_nvmf_subsystem>,
    stop: AtomicBool,
    /// How each reactor spent its time.
    pub(crate) times: Vec<ReactorTimes>,
}

/// A reactor's time, ns.
#[derive(Debug, Default)]
pub(crate) struct ReactorTimes {
    /// In turns in which it did something.
    pub(crate) busy: AtomicU64,
    /// In turns in which it found nothing, and asleep.
    pub(crate) idle: AtomicU64,
}

// SAFETY: the pointers go to objects that live as long as the process; what changes in them is
// behind a lock or atomic.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Ends the target.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        for mailbox in &self.mailboxes {
            mailbox.wake();
        }
    }

    pub(crate) fn transport(&self) -> *mut spdk_nvmf_transport {
        self.transport
    }

    pub(crate) fn transport_opts(&self) -> spdk_nvmf_transport_opts {
        // SAFETY: lives as long as the process and never changes.
        unsafe { (*self.transport).opts }
    }

    pub(crate) fn listener(&self) -> *const spdk_nvmf_subsystem_listener {
        self.listener
    }

    pub(crate) fn subsystem(&self, nqn: &[u8]) -> Option<*mut spdk_nvmf_subsystem> {
        // SAFETY: subsystems live as long as the process.
        self.subsystems.iter().copied().find(|s| unsafe { (**s).subnqn() } == nqn)
    }

    /// Holds back a subsystem's I/O, or lets it go on. False where there is no such subsystem.
    pub(crate) fn pause(&self, nqn: &str, pause: bool) -> bool {
        use spdk_nvmf_subsystem_state::*;
        let Some(subsystem) = self.subsystem(nqn.as_bytes()) else {
            return false;
        };
        // SAFETY: subsystems live as long as the process.
        let id = unsafe {
            if pause {
                nvmf::change_state(subsystem, SPDK_NVMF_SUBSYSTEM_PAUSING, SPDK_NVMF_SUBSYSTEM_PAUSED);
            } else {
                nvmf::change_state(subsystem, SPDK_NVMF_SUBSYSTEM_RESUMING, SPDK_NVMF_SUBSYSTEM_ACTIVE);
            }
            (*subsystem).id
        };
        if !pause {
            for mailbox in &self.mailboxes {
                mailbox.send(Message::Resume(id));
            }
        }
        true
    }
}

impl spdk_nvmf_subsystem {
    /// The NQN without its terminating zero.
    pub(crate) fn subnqn(&self) -> &[u8] {
        until_zero(&self.subnqn)
    }

    /// The namespace with this identifier.
    pub(crate) fn ns(&self, nsid: u32) -> Option<*mut spdk_nvmf_ns> {
        let index = nsid.checked_sub(1)?;
        if index >= self.max_nsid {
            return None;
        }
        // SAFETY: `ns` has `max_nsid` entries.
        Some(unsafe { *self.ns.add(index as usize) })
    }

    fn describe_namespaces(&self) -> Vec<NamespaceDescription> {
        (1..=self.max_nsid)
            .filter_map(|nsid| self.ns(nsid))
            .map(|ns| {
                // SAFETY: namespaces and bdevs live as long as the process and never change.
                let (ns, bdev) = unsafe { (&*ns, &*(*ns).bdev) };
                NamespaceDescription { blocks: bdev.blockcnt, block_bytes: bdev.blocklen, uuid: ns.uuid }
            })
            .collect()
    }
}

/// Locks, also after another thread panicked with the lock held: what these locks guard is whole
/// after every single statement.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// A zero-terminated field's text.
pub(crate) fn until_zero(field: &[u8]) -> &[u8] {
    let len = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    &field[..len]
}

/// One line on standard error. A log that cannot be written is no reason to stop.
pub(crate) fn log(line: &str) {
    let _ = writeln!(io::stderr(), "standin-target (not SPDK): {line}");
}

fn subsystems(config: &TargetConfig) -> Result<Vec<*mut spdk_nvmf_subsystem>> {
    let blocks = config.namespace_bytes / u64::from(config.block_bytes);
    let mut made = Vec::new();
    for (i, nqn) in config.subsystems.iter().enumerate() {
        let mut namespaces = Vec::new();
        for nsid in 1..=config.namespaces {
            let kind = match config.backend {
                Backend::Memory => "Malloc",
                Backend::Null => "Null",
            };
            let name = format!("Standin{kind}{}n{nsid}", i + 1);
            let name = CString::new(name).context("a bdev's name holds no zero byte")?;
            let memory = config.backend == Backend::Memory;
            let bdev = spdk_bdev::create(name, blocks, config.block_bytes, memory);
            let mut uuid = *b"fabscope\0\x40\0\x80\0\0\0\0";
            // A version 8 UUID: bytes of our own, told apart by subsystem, process and namespace.
            uuid[6] = 0x80 | (uuid[6] & 0x0f);
            uuid[8] = 0x80;
            uuid[9] = i as u8;
            uuid[10..14].copy_from_slice(&std::process::id().to_be_bytes());
            uuid[15] = nsid as u8;
            namespaces.push(Box::into_raw(Box::new(spdk_nvmf_ns::new(nsid, uuid, bdev))));
        }
        let serial = format!("STANDIN{:05}{:08}", i + 1, std::process::id() % 100_000_000);
        let subsystem = spdk_nvmf_subsystem::new(i as u32 + 1, nqn, &serial, namespaces);
        made.push(Box::into_raw(Box::new(subsystem)));
    }
    Ok(made)
}

/// Runs a target until SIGTERM, SIGINT or a `quit` on the control socket. Prints one line on
/// standard output when hosts can connect.
///
/// # Errors
/// The configuration makes no sense, or an address, a control socket or a thread cannot be had.
pub(crate) fn run_target(config: TargetConfig) -> Result<()> {
    config.check()?;
    log(&format!("{} starts; it is a stand-in, never SPDK", standin::version()));

    // Before any thread exists, so that all of them inherit the mask and only the descriptor
    // below sees these signals.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("blocking SIGTERM and SIGINT")?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .context("a descriptor for signals")?;

    let listener = TcpListener::bind(config.listen)
        .with_context(|| format!("listening on {}; is another target there?", config.listen))?;
    listener.set_nonblocking(true).context("the listener")?;
    let address = listener.local_addr().context("the listener's address")?;

    let trid = spdk_nvme_transport_id::new(&address.ip().to_string(), &address.port().to_string());
    let trid = Box::into_raw(Box::new(trid));
    let opts = spdk_nvmf_transport_opts {
        max_io_size: config.max_io_bytes,
        in_capsule_data_size: config.in_capsule_bytes,
        max_queue_depth: config.max_queue_depth,
        max_qpairs_per_ctrlr: config.max_io_queues + 1,
        max_h2c_data: config.max_h2c_data,
        r2t_bytes: config.r2t_bytes,
        c2h_success: config.c2h_success,
    };
    let mut mailboxes = Vec::new();
    for _ in 0..config.reactors {
        mailboxes.push(Arc::new(Mailbox::new().context("a reactor's mailbox")?));
    }
    let shared = Arc::new(Shared {
        transport: Box::into_raw(Box::new(spdk_nvmf_transport::new(opts))),
        listener: Box::into_raw(Box::new(spdk_nvmf_subsystem_listener::new(trid))),
        subsystems: subsystems(&config)?,
        times: std::iter::repeat_with(ReactorTimes::default).take(mailboxes.len()).collect(),
        mailboxes,
        stop: AtomicBool::new(false),
        config,
    });
    for subsystem in &shared.subsystems {
        use spdk_nvmf_subsystem_state::*;
        // SAFETY: subsystems live as long as the process.
        unsafe {
            nvmf::subsystem_created(*subsystem);
            nvmf::change_state(*subsystem, SPDK_NVMF_SUBSYSTEM_ACTIVATING, SPDK_NVMF_SUBSYSTEM_ACTIVE);
        }
    }

    let control = control::Control::open(&shared)?;
    let _rpc = shared.config.rpc.as_deref().map(|path| rpc::Rpc::open(path, &shared)).transpose()?;
    let mut threads = Vec::new();
    for index in 0..shared.config.reactors {
        let shared = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("reactor_{index}"))
            .spawn(move || reactor::run(index, shared))
            .context("starting a reactor's thread")?;
        threads.push(thread);
    }

    let mut out = io::stdout().lock();
    writeln!(
        out,
        "listening {address} nqn={} pid={} standin={}",
        shared.config.subsystems.join(","),
        std::process::id(),
        env!("CARGO_PKG_VERSION"),
    )
    .and_then(|()| out.flush())
    .context("writing the line that says where the target listens")?;
    drop(out);

    serve(&shared, &listener, &signals, control.as_ref());
    shared.stop();
    let mut result = Ok(());
    for thread in threads {
        match thread.join() {
            Ok(Ok(())) => {}
            Ok(Err(e)) => result = Err(e).context("a reactor"),
            Err(_) => bail!("a reactor panicked"),
        }
    }
    log("ended");
    result
}

/// Accepts connections and spreads them over the reactors, until the target stops.
fn serve(
    shared: &Arc<Shared>,
    listener: &TcpListener,
    signals: &SignalFd,
    control: Option<&control::Control>,
) {
    let mut next = 0;
    while !shared.stopping() {
        // SAFETY: both descriptors stay open while `serve` runs.
        let fds = unsafe {
            [BorrowedFd::borrow_raw(listener.as_raw_fd()), BorrowedFd::borrow_raw(signals.as_raw_fd())]
        };
        let mut polled = vec![PollFd::new(fds[0], PollFlags::POLLIN), PollFd::new(fds[1], PollFlags::POLLIN)];
        if let Some(control) = control {
            polled.push(PollFd::new(control.as_fd(), PollFlags::POLLIN));
        }
        // A control connection may stop the target, which nothing here would show: so look often.
        let _ = poll(&mut polled, PollTimeout::from(100u8));
        if matches!(signals.read_signal(), Ok(Some(_))) {
            return;
        }
        while let Ok((stream, _)) = listener.accept() {
            shared.mailboxes[next % shared.mailboxes.len()].send(Message::Accept(stream));
            next += 1;
        }
        if let Some(control) = control {
            control.accept(shared);
        }
    }
}
