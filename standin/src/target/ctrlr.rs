//! Controllers: fabrics commands (CONNECT, properties) and admin commands.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use probe::probe;

use super::bdev::ExecStatus;
use super::identify::{self, Description};
use super::nvmf::{self, set_status};
use super::reactor::{Message, now_ns};
use super::types::{
    Controllers, spdk_nvmf_ctrlr, spdk_nvmf_qpair, spdk_nvmf_qpair_state, spdk_nvmf_request,
    spdk_nvmf_subsystem, spdk_nvmf_tcp_qpair,
};
use super::{Shared, Status, lock, tcp};
use crate::trid::NQN_LEN;
use crate::wire::{fctype, opc, property, spdk_nvme_cmd};

const CC_EN: u32 = 1;
const CC_SHN: u32 = 3 << 14;
const CSTS_RDY: u32 = 1;
const CSTS_SHST_DONE: u32 = 2 << 2;

/// Length of the data of a CONNECT.
const CONNECT_DATA: usize = 1024;

static NEXT_UID: AtomicU64 = AtomicU64::new(1);

/// Whether the host has enabled the controller.
///
/// # Safety
/// `ctrlr` is live.
pub(crate) unsafe fn enabled(ctrlr: *mut spdk_nvmf_ctrlr) -> bool {
    // SAFETY: by contract.
    unsafe { (*ctrlr).csts.load(Ordering::Acquire) & CSTS_RDY != 0 }
}

/// The data that came with a request, as far as it came.
///
/// # Safety
/// `req` is live and executing; its buffer is not written while the slice is used.
unsafe fn payload<'a>(req: *mut spdk_nvmf_request) -> &'a mut [u8] {
    // SAFETY: by contract; `iov` describes the request's own buffer.
    unsafe {
        if (*req).iovcnt == 0 || (*req).iov[0].iov_base.is_null() {
            return &mut [];
        }
        std::slice::from_raw_parts_mut((*req).iov[0].iov_base.cast(), (*req).iov[0].iov_len)
    }
}

/// Copies an answer into the request's buffer, cut or filled up with zeroes to its length.
///
/// # Safety
/// As for [`payload`].
unsafe fn answer(req: *mut spdk_nvmf_request, data: &[u8]) {
    // SAFETY: by contract.
    let buffer = unsafe { payload(req) };
    let n = data.len().min(buffer.len());
    buffer[..n].copy_from_slice(&data[..n]);
    buffer[n..].fill(0);
}

/// Executes a fabrics command.
///
/// # Safety
/// `req` is live and executing.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_ctrlr_process_fabrics_cmd(req: *mut spdk_nvmf_request) -> ExecStatus {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let cmd = (*(*req).cmd).nvme_cmd();
        let qpair = (*req).qpair;
        let status = match (cmd.fctype(), (*qpair).ctrlr.is_null()) {
            (fctype::CONNECT, true) => connect(req),
            (fctype::CONNECT, false) | (_, true) => Status::SEQUENCE_ERROR,
            (fctype::PROPERTY_GET, false) if (*qpair).qid == 0 => property_get(req, &cmd),
            (fctype::PROPERTY_SET, false) if (*qpair).qid == 0 => property_set(req, &cmd),
            _ => Status::INVALID_OPCODE,
        };
        set_status(req, status);
    }
    ExecStatus::Complete
}

/// # Safety
/// As for [`nvmf_ctrlr_process_fabrics_cmd`]; the queue has no controller yet.
unsafe fn connect(req: *mut spdk_nvmf_request) -> Status {
    // SAFETY: by contract; subsystems live as long as the process.
    unsafe {
        let qpair = (*req).qpair;
        let shared: &Shared = &(*(*(*qpair).group).reactor).shared;
        let cmd = (*(*req).cmd).connect_cmd();
        let data = payload(req);
        // A wrong field is named by its offset and whether it is in the data.
        let wrong = |offset: u32, in_data: bool| {
            (*(*req).rsp).nvme_cpl.cdw0 = offset | (u32::from(in_data) << 16);
            Status::CONNECT_INVALID_PARAMETERS
        };
        if data.len() < CONNECT_DATA {
            return Status::SGL_LENGTH_INVALID;
        }
        if cmd.recfmt != 0 {
            return Status::CONNECT_INCOMPATIBLE_FORMAT;
        }
        let depth = shared.transport_opts().max_queue_depth;
        if cmd.sqsize == 0 || cmd.sqsize >= depth {
            return wrong(44, false);
        }
        let text = |at: usize| {
            let field = &data[at..at + 256];
            let len = field.iter().position(|b| *b == 0);
            len.filter(|len| *len < NQN_LEN).map(|len| &field[..len])
        };
        let (Some(subnqn), Some(hostnqn)) = (text(256), text(512)) else {
            return wrong(256, true);
        };
        let Some(subsystem) = shared.subsystem(subnqn) else {
            return wrong(256, true);
        };
        let mut hostid = [0; 16];
        hostid.copy_from_slice(&data[..16]);
        let cntlid = u16::from_le_bytes([data[16], data[17]]);

        (*qpair).connect_received = true;
        (*qpair).qid = cmd.qid;
        (*qpair).sq_head_max = cmd.sqsize;
        (*qpair).sq_flow_control_disabled = cmd.cattr & (1 << 2) != 0;
        let joined = if cmd.qid == 0 {
            if cntlid != 0xffff {
                return wrong(16, true);
            }
            create(qpair, subsystem, hostnqn, hostid, cmd.kato)
        } else {
            join(qpair, subsystem, hostnqn, cntlid, &wrong)
        };
        match joined {
            Ok(ctrlr) => {
                (*qpair).ctrlr = ctrlr;
                (*qpair).state = spdk_nvmf_qpair_state::SPDK_NVMF_QPAIR_ENABLED;
                nvmf_ctrlr_add_qpair(qpair, ctrlr, req);
                (*(*req).rsp).nvme_cpl.cdw0 = u32::from((*ctrlr).cntlid);
                Status::SUCCESS
            }
            Err(status) => status,
        }
    }
}

/// A new controller for an admin queue.
///
/// # Safety
/// `qpair` and `subsystem` are live.
unsafe fn create(
    qpair: *mut spdk_nvmf_qpair,
    subsystem: *mut spdk_nvmf_subsystem,
    hostnqn: &[u8],
    hostid: [u8; 16],
    kato: u32,
) -> Result<*mut spdk_nvmf_ctrlr, Status> {
    // SAFETY: by contract.
    unsafe {
        let group = (*qpair).group;
        let mut ctrlrs = lock(&(*subsystem).ctrlrs);
        let Some(cntlid) = free_cntlid(&ctrlrs) else {
            return Err(Status::CONNECT_CONTROLLER_BUSY);
        };
        let mut ctrlr = Box::new(spdk_nvmf_ctrlr::new(
            cntlid,
            subsystem,
            (*(*group).reactor).shared.listener(),
            NEXT_UID.fetch_add(1, Ordering::Relaxed),
        ));
        ctrlr.hostnqn[..hostnqn.len()].copy_from_slice(hostnqn);
        ctrlr.hostid = hostid;
        ctrlr.kato_ms = AtomicU32::new(kato);
        ctrlr.last_keep_alive = AtomicU64::new(now_ns());
        ctrlr.admin_qpair = qpair;
        ctrlr.thread = (*group).thread;
        ctrlr.qpair_mask[0] = 1;
        ctrlr.qpair_count = 1;
        let ctrlr = Box::into_raw(ctrlr);
        ctrlrs.next_cntlid = cntlid;
        ctrlrs.live.push(ctrlr);
        drop(ctrlrs);
        nvmf_subsystem_add_ctrlr(subsystem, ctrlr);
        Ok(ctrlr)
    }
}

fn free_cntlid(ctrlrs: &Controllers) -> Option<u16> {
    const LAST: u16 = 0xffef;
    (1..=u32::from(LAST))
        .map(|step| ((u32::from(ctrlrs.next_cntlid) + step - 1) % u32::from(LAST)) as u16 + 1)
        // SAFETY: the list holds live controllers, and the caller holds its lock.
        .find(|id| ctrlrs.live.iter().all(|c| unsafe { (**c).cntlid } != *id))
}

/// An existing controller for an I/O queue.
///
/// # Safety
/// `qpair` and `subsystem` are live; `qpair.qid` is set and not 0.
unsafe fn join(
    qpair: *mut spdk_nvmf_qpair,
    subsystem: *mut spdk_nvmf_subsystem,
    hostnqn: &[u8],
    cntlid: u16,
    wrong: &dyn Fn(u32, bool) -> Status,
) -> Result<*mut spdk_nvmf_ctrlr, Status> {
    // SAFETY: by contract; listed controllers are live while the lock is held, and this one stays
    // so afterwards because it counts this queue.
    unsafe {
        let qid = (*qpair).qid;
        let ctrlrs = lock(&(*subsystem).ctrlrs);
        let found = ctrlrs.live.iter().find(|c| (***c).cntlid == cntlid);
        let Some(&ctrlr) = found else {
            return Err(wrong(16, true));
        };
        if (*ctrlr).hostnqn() != hostnqn {
            return Err(Status::CONNECT_INVALID_HOST);
        }
        if (*ctrlr).in_destruct || !enabled(ctrlr) {
            return Err(Status::CONNECT_CONTROLLER_BUSY);
        }
        if u32::from(qid) > (*ctrlr).number_of_queues.load(Ordering::Acquire) {
            return Err(wrong(42, false));
        }
        let (word, bit) = (usize::from(qid) / 64, 1u64 << (qid % 64));
        let Some(mask) = (*ctrlr).qpair_mask.get(word).copied() else {
            return Err(wrong(42, false));
        };
        if mask & bit != 0 {
            return Err(Status::SEQUENCE_ERROR);
        }
        (*ctrlr).qpair_mask[word] = mask | bit;
        (*ctrlr).qpair_count += 1;
        Ok(ctrlr)
    }
}

/// The queue belongs to the controller from now on.
///
/// # Safety
/// All three are live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_ctrlr_add_qpair(
    qpair: *mut spdk_nvmf_qpair,
    ctrlr: *mut spdk_nvmf_ctrlr,
    req: *mut spdk_nvmf_request,
) {
    probe_entry!();
    let _ = req;
    // SAFETY: by contract.
    unsafe {
        let (subnqn, hostnqn) = ((*(*ctrlr).subsys).subnqn.as_ptr(), (*ctrlr).hostnqn.as_ptr());
        let qid = (*qpair).qid;
        probe!(spdk, nvmf_ctrlr_add_qpair, crate::entry::tsc(), qpair, qid, subnqn, hostnqn);
        if qid != 0 {
            let thread = (*(*ctrlr).thread).id;
            probe!(spdk, nvmf_ctrlr_add_io_qpair, crate::entry::tsc(), ctrlr, qpair, qid, thread);
        }
        super::log(&format!(
            "queue {} connected: cntlid {} subsystem {} host {} peer port {}",
            qid,
            (*ctrlr).cntlid,
            String::from_utf8_lossy((*(*ctrlr).subsys).subnqn()),
            String::from_utf8_lossy((*ctrlr).hostnqn()),
            (*qpair.cast::<spdk_nvmf_tcp_qpair>()).initiator_port,
        ));
    }
}

/// The subsystem has a new controller.
///
/// # Safety
/// Both are live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_subsystem_add_ctrlr(
    subsystem: *mut spdk_nvmf_subsystem,
    ctrlr: *mut spdk_nvmf_ctrlr,
) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe {
        let (subnqn, hostnqn) = ((*subsystem).subnqn.as_ptr(), (*ctrlr).hostnqn.as_ptr());
        probe!(spdk, nvmf_subsystem_add_ctrlr, 0, subnqn, ctrlr, hostnqn);
    }
}

/// A queue that goes leaves its controller; the admin queue takes the others with it, and the last
/// one frees the controller.
///
/// # Safety
/// `qpair` is live and goes now; it is not used as a queue of its controller any more.
#[inline(never)]
pub(crate) unsafe fn leave(qpair: *mut spdk_nvmf_qpair) {
    // SAFETY: by contract; the controller lives until its last queue has left, which is counted
    // under the subsystem's lock.
    unsafe {
        let ctrlr = (*qpair).ctrlr;
        if ctrlr.is_null() {
            return;
        }
        (*qpair).ctrlr = std::ptr::null_mut();
        let subsystem = (*ctrlr).subsys;
        let qid = usize::from((*qpair).qid);
        let mut ctrlrs = lock(&(*subsystem).ctrlrs);
        (*ctrlr).qpair_mask[qid / 64] &= !(1 << (qid % 64));
        (*ctrlr).qpair_count -= 1;
        let was_admin = qid == 0;
        if was_admin {
            (*ctrlr).in_destruct = true;
            (*ctrlr).admin_qpair = std::ptr::null_mut();
        }
        let last = (*ctrlr).qpair_count == 0;
        if last {
            ctrlrs.live.retain(|c| *c != ctrlr);
        }
        drop(ctrlrs);
        if was_admin {
            let thread = (*(*(*qpair).group).thread).id;
            let (subnqn, hostnqn) = ((*subsystem).subnqn.as_ptr(), (*ctrlr).hostnqn.as_ptr());
            probe!(spdk, nvmf_ctrlr_destruct, crate::entry::tsc(), ctrlr, subnqn, thread);
            probe!(spdk, nvmf_subsystem_remove_ctrlr, 0, subnqn, ctrlr, hostnqn);
        }
        if was_admin && !last {
            let uid = (*ctrlr).uid;
            let reactor = &*(*(*qpair).group).reactor;
            for mailbox in &reactor.shared.mailboxes {
                mailbox.send(Message::DisconnectController(uid));
            }
        }
        if last {
            drop(Box::from_raw(ctrlr));
        }
    }
}

/// Disconnects an admin queue whose host has been silent for longer than it promised.
///
/// # Safety
/// `tqpair` is a live connection of the calling reactor.
pub(crate) unsafe fn check_keep_alive(tqpair: *mut spdk_nvmf_tcp_qpair, now: u64) {
    // SAFETY: by contract.
    unsafe {
        let ctrlr = (*tqpair).qpair.ctrlr;
        if ctrlr.is_null() || (*tqpair).qpair.qid != 0 {
            return;
        }
        let kato = u64::from((*ctrlr).kato_ms.load(Ordering::Relaxed)) * 1_000_000;
        let last = (*ctrlr).last_keep_alive.load(Ordering::Relaxed);
        // The granularity that Identify announces is added, as hosts may be that late.
        if kato > 0 && now.saturating_sub(last) > kato + 1_000_000_000 {
            super::log(&format!("cntlid {}: keep-alive timeout", (*ctrlr).cntlid));
            tcp::disconnect(tqpair);
        }
    }
}

/// # Safety
/// As for [`nvmf_ctrlr_process_fabrics_cmd`]; the queue has a controller.
unsafe fn property_get(req: *mut spdk_nvmf_request, cmd: &spdk_nvme_cmd) -> Status {
    let wide = cmd.cdw10 & 7 == 1;
    // SAFETY: by contract.
    unsafe {
        let qpair = (*req).qpair;
        let ctrlr = &*(*qpair).ctrlr;
        let opts = (*(*(*qpair).group).reactor).shared.transport_opts();
        let value = match (cmd.cdw11, wide) {
            (property::CAP, true) => identify::cap(opts.max_queue_depth),
            (property::VS, false) => u64::from(identify::VS),
            (property::CC, false) => u64::from(ctrlr.cc.load(Ordering::Relaxed)),
            (property::CSTS, false) => u64::from(ctrlr.csts.load(Ordering::Relaxed)),
            _ => return Status::INVALID_FIELD,
        };
        let cpl = &raw mut (*(*req).rsp).nvme_cpl;
        (*cpl).cdw0 = value as u32;
        (*cpl).cdw1 = (value >> 32) as u32;
    }
    Status::SUCCESS
}

/// # Safety
/// As for [`property_get`].
unsafe fn property_set(req: *mut spdk_nvmf_request, cmd: &spdk_nvme_cmd) -> Status {
    if cmd.cdw11 != property::CC || cmd.cdw10 & 7 != 0 {
        return Status::INVALID_FIELD;
    }
    // SAFETY: by contract.
    unsafe { nvmf_prop_set_cc((*(*req).qpair).ctrlr, cmd.cdw12) };
    Status::SUCCESS
}

/// The host writes the controller configuration: enables, resets or shuts down.
///
/// # Safety
/// `ctrlr` is live.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_prop_set_cc(ctrlr: *mut spdk_nvmf_ctrlr, value: u32) -> bool {
    probe_entry!();
    // SAFETY: by contract.
    let ctrlr = unsafe { &*ctrlr };
    let before = ctrlr.cc.swap(value, Ordering::AcqRel);
    if (value & CC_EN) != (before & CC_EN) {
        let ready = if value & CC_EN != 0 { CSTS_RDY } else { 0 };
        ctrlr.csts.store(ready, Ordering::Release);
    }
    if value & CC_SHN != 0 {
        ctrlr.csts.fetch_or(CSTS_SHST_DONE, Ordering::AcqRel);
    }
    true
}

/// Executes an admin command.
///
/// # Safety
/// `req` is live, executing, on an admin queue with a controller.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_ctrlr_process_admin_cmd(req: *mut spdk_nvmf_request) -> ExecStatus {
    probe_entry!();
    // SAFETY: by contract; `admin` is touched on the admin queue's reactor only.
    unsafe {
        let qpair = (*req).qpair;
        let ctrlr = (*qpair).ctrlr;
        let cmd = (*(*req).cmd).nvme_cmd();
        (*ctrlr).last_keep_alive.store(now_ns(), Ordering::Relaxed);
        let shared: &Shared = &(*(*(*qpair).group).reactor).shared;
        let status = match cmd.opc {
            opc::KEEP_ALIVE => Status::SUCCESS,
            _ if !enabled(ctrlr) => Status::SEQUENCE_ERROR,
            opc::IDENTIFY => {
                let csi = (cmd.cdw11 >> 24) as u8;
                describe(shared, ctrlr, |d| identify::identify(d, cmd.cdw10 as u8, cmd.nsid, csi))
                    .map_or_else(
                        |e| e,
                        |data| {
                            answer(req, &data);
                            Status::SUCCESS
                        },
                    )
            }
            opc::GET_LOG_PAGE => get_log_page(shared, ctrlr, req, &cmd),
            opc::SET_FEATURES => set_features(shared, ctrlr, req, &cmd),
            opc::GET_FEATURES => get_features(ctrlr, req, &cmd),
            opc::ABORT => {
                // Not aborted: commands end by themselves.
                (*(*req).rsp).nvme_cpl.cdw0 = 1;
                Status::SUCCESS
            }
            opc::ASYNC_EVENT_REQUEST => {
                let held = &mut (*ctrlr).admin.aer_req;
                if held.len() < identify::AER_LIMIT {
                    held.push(req);
                    return ExecStatus::Asynchronous;
                }
                Status::AER_LIMIT_EXCEEDED
            }
            _ => Status::INVALID_OPCODE,
        };
        set_status(req, status);
    }
    ExecStatus::Complete
}

fn describe<T>(shared: &Shared, ctrlr: *mut spdk_nvmf_ctrlr, f: impl FnOnce(&Description<'_>) -> T) -> T {
    let opts = shared.transport_opts();
    // SAFETY: the caller's controller is live, and subsystems live as long as the process.
    let (ctrlr, subsystem) = unsafe { (&*ctrlr, &*(*ctrlr).subsys) };
    let namespaces = subsystem.describe_namespaces();
    f(&Description {
        cntlid: ctrlr.cntlid,
        subnqn: subsystem.subnqn(),
        serial: &subsystem.serial,
        max_io_size: opts.max_io_size,
        in_capsule: opts.in_capsule_data_size,
        max_queue_depth: opts.max_queue_depth,
        ana: shared.config.ana,
        namespaces: &namespaces,
    })
}

/// # Safety
/// As for [`nvmf_ctrlr_process_admin_cmd`].
unsafe fn get_log_page(
    shared: &Shared,
    ctrlr: *mut spdk_nvmf_ctrlr,
    req: *mut spdk_nvmf_request,
    cmd: &spdk_nvme_cmd,
) -> Status {
    let dwords = (u64::from(cmd.cdw11 & 0xffff) << 16 | u64::from(cmd.cdw10 >> 16)) + 1;
    let offset = u64::from(cmd.cdw12) | (u64::from(cmd.cdw13) << 32);
    // SAFETY: by contract.
    if dwords * 4 > u64::from(unsafe { (*req).length }) {
        return Status::SGL_LENGTH_INVALID;
    }
    match describe(shared, ctrlr, |d| identify::log_page(d, cmd.cdw10 as u8)) {
        Ok(page) if offset > page.len() as u64 => Status::INVALID_FIELD,
        Ok(page) => {
            // SAFETY: by contract.
            unsafe { answer(req, &page[offset as usize..]) };
            Status::SUCCESS
        }
        Err(status) => status,
    }
}

mod feature {
    pub(super) const ARBITRATION: u8 = 0x01;
    pub(super) const POWER_MANAGEMENT: u8 = 0x02;
    pub(super) const TEMPERATURE_THRESHOLD: u8 = 0x04;
    pub(super) const ERROR_RECOVERY: u8 = 0x05;
    pub(super) const VOLATILE_WRITE_CACHE: u8 = 0x06;
    pub(super) const NUMBER_OF_QUEUES: u8 = 0x07;
    pub(super) const ASYNC_EVENT_CONFIG: u8 = 0x0b;
    pub(super) const KEEP_ALIVE_TIMER: u8 = 0x0f;
    pub(super) const HOST_BEHAVIOUR: u8 = 0x16;
}

/// # Safety
/// As for [`nvmf_ctrlr_process_admin_cmd`].
unsafe fn set_features(
    shared: &Shared,
    ctrlr: *mut spdk_nvmf_ctrlr,
    req: *mut spdk_nvmf_request,
    cmd: &spdk_nvme_cmd,
) -> Status {
    // SAFETY: by contract.
    unsafe {
        match cmd.cdw10 as u8 {
            feature::NUMBER_OF_QUEUES => {
                let (submission, completion) = (cmd.cdw11 & 0xffff, cmd.cdw11 >> 16);
                if submission == 0xffff || completion == 0xffff {
                    return Status::INVALID_FIELD;
                }
                let most = u32::from(shared.transport_opts().max_qpairs_per_ctrlr) - 1;
                let granted = (submission.min(completion) + 1).min(most);
                (*ctrlr).number_of_queues.store(granted, Ordering::Release);
                (*(*req).rsp).nvme_cpl.cdw0 = (granted - 1) | ((granted - 1) << 16);
            }
            feature::ASYNC_EVENT_CONFIG => (*ctrlr).admin.async_event_config = cmd.cdw11,
            feature::KEEP_ALIVE_TIMER => (*ctrlr).kato_ms.store(cmd.cdw11, Ordering::Relaxed),
            feature::HOST_BEHAVIOUR => {
                let data = payload(req);
                (*ctrlr).admin.host_behaviour = data[..data.len().min(512)].to_vec();
            }
            feature::ARBITRATION
            | feature::POWER_MANAGEMENT
            | feature::TEMPERATURE_THRESHOLD
            | feature::ERROR_RECOVERY
            | feature::VOLATILE_WRITE_CACHE => {}
            _ => return Status::INVALID_FIELD,
        }
    }
    Status::SUCCESS
}

/// # Safety
/// As for [`nvmf_ctrlr_process_admin_cmd`].
unsafe fn get_features(
    ctrlr: *mut spdk_nvmf_ctrlr,
    req: *mut spdk_nvmf_request,
    cmd: &spdk_nvme_cmd,
) -> Status {
    // SAFETY: by contract.
    unsafe {
        let value = match cmd.cdw10 as u8 {
            feature::NUMBER_OF_QUEUES => {
                let n = (*ctrlr).number_of_queues.load(Ordering::Relaxed).saturating_sub(1);
                n | (n << 16)
            }
            feature::ASYNC_EVENT_CONFIG => (*ctrlr).admin.async_event_config,
            feature::KEEP_ALIVE_TIMER => (*ctrlr).kato_ms.load(Ordering::Relaxed),
            feature::VOLATILE_WRITE_CACHE => 1,
            feature::HOST_BEHAVIOUR => {
                let stored = (*ctrlr).admin.host_behaviour.clone();
                answer(req, &stored);
                0
            }
            feature::ARBITRATION
            | feature::POWER_MANAGEMENT
            | feature::TEMPERATURE_THRESHOLD
            | feature::ERROR_RECOVERY => 0,
            _ => return Status::INVALID_FIELD,
        };
        (*(*req).rsp).nvme_cpl.cdw0 = value;
    }
    Status::SUCCESS
}

impl spdk_nvmf_ctrlr {
    /// The host NQN without its terminating zero.
    pub(crate) fn hostnqn(&self) -> &[u8] {
        super::until_zero(&self.hostnqn)
    }

    /// Completes the held Asynchronous Event Requests' slots away when the admin queue goes.
    pub(crate) fn drop_aers(&mut self) {
        self.admin.aer_req.clear();
    }
}

/// The disconnect probe and whatever a controller has to know about it.
///
/// # Safety
/// `tqpair` is a live connection of the calling reactor.
pub(crate) unsafe fn disconnecting(tqpair: *mut spdk_nvmf_tcp_qpair) {
    // SAFETY: by contract; the admin state belongs to the admin queue's reactor, which this is.
    unsafe {
        nvmf::qpair_disconnect(tqpair);
        let ctrlr = (*tqpair).qpair.ctrlr;
        if !ctrlr.is_null() && (*tqpair).qpair.qid == 0 {
            (*ctrlr).drop_aers();
        }
    }
}
