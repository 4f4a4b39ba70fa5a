//! Connecting a controller: ICReq, CONNECT, properties, Identify, the I/O queues.

use std::cell::Cell;
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::InitiatorConfig;
use super::tcp::{self, spdk_nvme_ns};
use super::types::{nvme_qpair_state, nvme_tcp_qpair, spdk_nvme_ctrlr, spdk_nvme_qpair};
use crate::trid::{put_cstr, spdk_nvme_transport_id};
use crate::wire::{Status, fctype, opc, property, spdk_nvme_cmd, spdk_nvme_cpl};

const TIMEOUT: Duration = Duration::from_secs(10);
const KEEP_ALIVE_MS: u32 = 30_000;
const ADMIN_ENTRIES: u16 = 32;

/// A connected controller with its queues.
#[derive(Debug)]
pub(crate) struct Connection {
    ctrlr: *mut spdk_nvme_ctrlr,
    admin: *mut nvme_tcp_qpair,
    io: Vec<*mut nvme_tcp_qpair>,
    pub(crate) ns: *mut spdk_nvme_ns,
    last_keep_alive: Cell<Instant>,
}

struct Outcome {
    cpl: Option<spdk_nvme_cpl>,
}

unsafe extern "C" fn admin_done(cb_arg: *mut c_void, cpl: *const spdk_nvme_cpl) {
    let outcome: *mut Outcome = cb_arg.cast();
    // SAFETY: `cb_arg` is the outcome that `execute` waits with, `cpl` is readable for the call.
    unsafe { (*outcome).cpl = Some(*cpl) };
}

impl Connection {
    /// Connects admin and I/O queues and identifies the namespace.
    ///
    /// # Errors
    /// Says which step the target refused, or that it did not answer.
    pub(crate) fn open(config: &InitiatorConfig) -> Result<Self> {
        let address = config.connect;
        let mut trid = spdk_nvme_transport_id::new(&address.ip().to_string(), &address.port().to_string());
        put_cstr(&mut trid.subnqn, config.nqn.as_bytes());
        let ctrlr = spdk_nvme_ctrlr::new(trid, &config.hostnqn, KEEP_ALIVE_MS);
        let ctrlr = Box::into_raw(Box::new(ctrlr));
        // SAFETY: `ctrlr` is freed when the connection is dropped, after its queues.
        let admin = unsafe { tcp::new_qpair(ctrlr, 0, ADMIN_ENTRIES, address, None) };
        let admin = match admin {
            Ok(admin) => admin,
            Err(e) => {
                // SAFETY: nothing else has it.
                drop(unsafe { Box::from_raw(ctrlr) });
                return Err(e).context("the admin queue");
            }
        };
        let mut this = Self {
            ctrlr,
            admin,
            io: Vec::new(),
            ns: std::ptr::null_mut(),
            last_keep_alive: Cell::new(Instant::now()),
        };
        this.connect_admin(config).context("the admin queue")?;
        this.identify(config.nsid)?;
        for qid in 1..=config.queues {
            let depth = config.depth_of(qid);
            // SAFETY: as for the admin queue.
            let qpair = unsafe { tcp::new_qpair(ctrlr, qid, depth + 1, address, config.socket_buffer) }
                .with_context(|| format!("I/O queue {qid}"))?;
            this.io.push(qpair);
            connect_queue(qpair, config, this.cntlid(), depth, 0)
                .with_context(|| format!("I/O queue {qid}"))?;
        }
        Ok(this)
    }

    /// The controller's identifier.
    pub(crate) fn cntlid(&self) -> u16 {
        // SAFETY: the controller lives as long as `self`.
        unsafe { (*self.ctrlr).cntlid }
    }

    /// The I/O queues.
    pub(crate) fn queues(&self) -> &[*mut nvme_tcp_qpair] {
        &self.io
    }

    fn connect_admin(&self, config: &InitiatorConfig) -> Result<()> {
        let cntlid = connect_queue(self.admin, config, 0xffff, ADMIN_ENTRIES - 1, KEEP_ALIVE_MS)?;
        // SAFETY: the controller lives as long as `self`, and nothing else writes it.
        unsafe {
            (*self.ctrlr).cntlid = cntlid;
            (*self.ctrlr).adminq = self.admin.cast();
        }
        // Enabled, 64-byte SQEs, 16-byte CQEs.
        let cc = 1 | (6 << 16) | (4 << 20);
        let mut set = fabrics(fctype::PROPERTY_SET);
        set.cdw11 = property::CC;
        set.cdw12 = cc;
        execute(self.admin, set, &mut []).context("writing CC")?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let mut get = fabrics(fctype::PROPERTY_GET);
            get.cdw11 = property::CSTS;
            let csts = execute(self.admin, get, &mut []).context("reading CSTS")?;
            if csts.cdw0 & 1 != 0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the controller did not become ready in {} s", TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn identify(&mut self, nsid: u32) -> Result<()> {
        let mut data = vec![0; 4096];
        let mut cmd = spdk_nvme_cmd { opc: opc::IDENTIFY, cdw10: 1, ..Default::default() };
        execute(self.admin, cmd, &mut data).context("identifying the controller")?;
        let u32_at =
            |data: &[u8], at: usize| u32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
        let capsule = u32_at(&data, 1792).saturating_mul(16).saturating_sub(64);
        let max = match data[77] {
            0 => u32::MAX,
            shift => 4096u32.checked_shl(u32::from(shift)).unwrap_or(u32::MAX),
        };
        // SAFETY: the controller lives as long as `self`.
        unsafe {
            (*self.ctrlr).ioccsz_bytes = capsule.min(64 << 10);
            (*self.ctrlr).max_xfer_size = max;
        }

        let queues = spdk_nvme_cmd {
            opc: opc::SET_FEATURES,
            cdw10: 7,
            cdw11: 127 | (127 << 16),
            ..Default::default()
        };
        execute(self.admin, queues, &mut []).context("asking for I/O queues")?;

        cmd.nsid = nsid;
        cmd.cdw10 = 0;
        execute(self.admin, cmd, &mut data).with_context(|| format!("identifying namespace {nsid}"))?;
        let blocks = u64::from(u32_at(&data, 0)) | (u64::from(u32_at(&data, 4)) << 32);
        let format = usize::from(data[26] & 0xf);
        let shift = data[128 + 4 * format + 2];
        if blocks == 0 || !(9..=16).contains(&shift) {
            bail!("namespace {nsid} does not exist or has a format that is not understood");
        }
        self.ns = Box::into_raw(Box::new(spdk_nvme_ns {
            blocks,
            sector_size: 1 << shift,
            id: nsid,
            deallocated_reads_zero: data[33] & 7 == 1,
        }));
        Ok(())
    }

    /// Most bytes of one command.
    pub(crate) fn max_xfer(&self) -> u32 {
        // SAFETY: the controller lives as long as `self`.
        unsafe { (*self.ctrlr).max_xfer_size }
    }

    /// Sends a Keep Alive when it is time for one. To be called now and then.
    ///
    /// # Errors
    /// The admin queue is broken.
    pub(crate) fn keep_alive(&self) -> Result<()> {
        let period = Duration::from_millis(u64::from(KEEP_ALIVE_MS) / 3);
        if self.last_keep_alive.get().elapsed() < period {
            return Ok(());
        }
        self.last_keep_alive.set(Instant::now());
        let cmd = spdk_nvme_cmd { opc: opc::KEEP_ALIVE, ..Default::default() };
        execute(self.admin, cmd, &mut []).context("Keep Alive").map(drop)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: queues first, then what they point to; nothing is used afterwards.
        unsafe {
            for qpair in self.io.drain(..) {
                tcp::free_qpair(qpair);
            }
            tcp::free_qpair(self.admin);
            if !self.ns.is_null() {
                drop(Box::from_raw(self.ns));
            }
            drop(Box::from_raw(self.ctrlr));
        }
    }
}

fn fabrics(kind: u8) -> spdk_nvme_cmd {
    spdk_nvme_cmd { opc: opc::FABRIC, nsid: u32::from(kind), ..Default::default() }
}

/// Waits for the ICResp, then connects the queue. Returns the controller's identifier.
fn connect_queue(
    tqpair: *mut nvme_tcp_qpair,
    config: &InitiatorConfig,
    cntlid: u16,
    sqsize: u16,
    kato_ms: u32,
) -> Result<u16> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        // SAFETY: the queue pair is live.
        if unsafe { (*tqpair).ic_done } {
            break;
        }
        turn(tqpair, deadline).context("waiting for the ICResp")?;
    }
    // SAFETY: the queue pair is live.
    let qid = unsafe { (*tqpair).qpair.id };
    let mut data = vec![0; 1024];
    let mut hostid = [0; 16];
    hostid[..8].copy_from_slice(b"fabscope");
    hostid[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    data[..16].copy_from_slice(&hostid);
    data[16..18].copy_from_slice(&cntlid.to_le_bytes());
    data[256..256 + config.nqn.len()].copy_from_slice(config.nqn.as_bytes());
    data[512..512 + config.hostnqn.len()].copy_from_slice(config.hostnqn.as_bytes());
    let mut cmd = fabrics(fctype::CONNECT);
    cmd.cdw10 = u32::from(qid) << 16;
    // Queue size, and no SQ flow control.
    cmd.cdw11 = u32::from(sqsize) | (1 << 18);
    cmd.cdw12 = kato_ms;
    let cpl = execute(tqpair, cmd, &mut data).context("CONNECT")?;
    // SAFETY: the queue pair is live.
    unsafe { (*tqpair).qpair.state = nvme_qpair_state::NVME_QPAIR_ENABLED };
    Ok(cpl.cdw0 as u16)
}

/// Executes one command and waits for it.
fn execute(tqpair: *mut nvme_tcp_qpair, cmd: spdk_nvme_cmd, data: &mut [u8]) -> Result<spdk_nvme_cpl> {
    let mut outcome = Box::new(Outcome { cpl: None });
    let arg: *mut Outcome = &raw mut *outcome;
    let qpair: *mut spdk_nvme_qpair = tqpair.cast();
    // SAFETY: data and outcome live until the command is done; where it never is, they are leaked.
    let rc = unsafe {
        let payload = if data.is_empty() { std::ptr::null_mut() } else { data.as_mut_ptr() };
        tcp::submit(qpair, cmd, payload, data.len() as u32, admin_done, arg.cast())
    };
    if rc != 0 {
        bail!("the command could not be submitted (error {})", -rc);
    }
    let deadline = Instant::now() + TIMEOUT;
    loop {
        // SAFETY: `outcome` is alive; written only inside `turn`.
        if let Some(cpl) = unsafe { (*arg).cpl } {
            let status = Status::from_word(cpl.status);
            if status != Status::SUCCESS {
                bail!("refused with status type {:#x}, code {:#04x}", status.sct, status.sc);
            }
            return Ok(cpl);
        }
        if let Err(e) = turn(tqpair, deadline) {
            // The queue is not polled any more, so nothing comes late; but be safe.
            std::mem::forget(outcome);
            return Err(e);
        }
    }
}

/// One poll of a queue, sleeping until something comes.
fn turn(tqpair: *mut nvme_tcp_qpair, deadline: Instant) -> Result<()> {
    // SAFETY: the queue pair is live.
    unsafe {
        if tcp::spdk_nvme_qpair_process_completions(tqpair.cast(), 0) < 0 {
            return Err(failure(tqpair));
        }
        if Instant::now() > deadline {
            bail!("no answer in {} s", TIMEOUT.as_secs());
        }
        if !tcp::has_queued(tqpair) {
            let fd = BorrowedFd::borrow_raw(tcp::descriptor(tqpair));
            let _ = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::from(1u8));
        }
    }
    Ok(())
}

/// Why a queue is broken.
pub(crate) fn failure(tqpair: *mut nvme_tcp_qpair) -> anyhow::Error {
    // SAFETY: the queue pair is live.
    let (why, qid) = unsafe { ((*tqpair).failure.clone(), (*tqpair).qpair.id) };
    anyhow!("queue {qid}: {}", why.unwrap_or_else(|| "the connection is gone".to_owned()))
}
