//! The part of the target between transport and bdev: a request is executed here and completed
//! here. Admin and fabrics commands are in `ctrlr`.
//!
//! A function that holds a USDT probe is never inlined: the note of a copy that the linker drops
//! would stay behind and point nowhere.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use probe::probe;

use super::bdev::{self, ExecStatus};
use super::reactor::Reactor;
use super::types::{
    spdk_bdev_desc, spdk_bdev_io, spdk_nvmf_request, spdk_nvmf_subsystem, spdk_nvmf_subsystem_state,
    spdk_nvmf_tcp_poll_group, spdk_nvmf_tcp_qpair, spdk_thread,
};
use super::{STATS, Status, ctrlr, tcp};
use crate::wire::{opc, spdk_nvme_cpl};

/// Sets the request's status.
///
/// # Safety
/// `req` is live.
pub(crate) unsafe fn set_status(req: *mut spdk_nvmf_request, status: Status) {
    // SAFETY: by contract; `rsp` points into the request's own slot.
    unsafe { (*(*req).rsp).nvme_cpl.status = status.word() };
}

/// Executes a request whose data, if it has any, is here. Also called again for a request that
/// waited while its subsystem was paused.
///
/// # Safety
/// `req` is live and in state EXECUTING.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn spdk_nvmf_request_exec(req: *mut spdk_nvmf_request) {
    probe_entry!();
    // SAFETY: by contract; a request's queue pair, command and controller outlive it.
    unsafe {
        let qpair = (*req).qpair;
        let cmd = (*(*req).cmd).nvme_cmd();
        let ctrlr = (*qpair).ctrlr;
        let status = if cmd.opc == opc::FABRIC {
            ctrlr::nvmf_ctrlr_process_fabrics_cmd(req)
        } else if ctrlr.is_null() {
            set_status(req, Status::SEQUENCE_ERROR);
            ExecStatus::Complete
        } else if (*qpair).qid == 0 {
            ctrlr::nvmf_ctrlr_process_admin_cmd(req)
        } else {
            let paused = spdk_nvmf_subsystem_state::SPDK_NVMF_SUBSYSTEM_PAUSED as u32;
            if (*(*ctrlr).subsys).state.load(Ordering::Acquire) == paused {
                let reactor = &*(*(*qpair).group).reactor;
                reactor.paused.borrow_mut().push_back(req);
                return;
            }
            nvmf_ctrlr_process_io_cmd(req)
        };
        if status == ExecStatus::Complete {
            spdk_nvmf_request_complete(req);
        }
    }
}

/// Executes an I/O command.
///
/// # Safety
/// `req` is live, executing, and its queue has a controller.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_ctrlr_process_io_cmd(req: *mut spdk_nvmf_request) -> ExecStatus {
    probe_entry!();
    // SAFETY: by contract; namespaces and bdevs live as long as the process.
    unsafe {
        let ctrlr = (*(*req).qpair).ctrlr;
        let cmd = (*(*req).cmd).nvme_cmd();
        if !ctrlr::enabled(ctrlr) {
            set_status(req, Status::SEQUENCE_ERROR);
            return ExecStatus::Complete;
        }
        if cmd.fuse_psdt & 3 != 0 {
            set_status(req, Status::INVALID_FIELD);
            return ExecStatus::Complete;
        }
        let Some(ns) = (*(*ctrlr).subsys).ns(cmd.nsid) else {
            set_status(req, Status::INVALID_NAMESPACE);
            return ExecStatus::Complete;
        };
        let bdev = (*ns).bdev;
        let mut desc = spdk_bdev_desc::open(bdev);
        let desc = &raw mut desc;
        let ch = (*(*(*req).qpair).group.cast::<spdk_nvmf_tcp_poll_group>()).ch;
        STATS.count(cmd.opc);
        match cmd.opc {
            opc::READ => bdev::nvmf_bdev_ctrlr_read_cmd(bdev, desc, ch, req),
            opc::WRITE => bdev::nvmf_bdev_ctrlr_write_cmd(bdev, desc, ch, req),
            opc::COMPARE => bdev::nvmf_bdev_ctrlr_compare_cmd(bdev, desc, ch, req),
            opc::WRITE_ZEROES => bdev::nvmf_bdev_ctrlr_write_zeroes_cmd(bdev, desc, ch, req),
            opc::FLUSH => bdev::nvmf_bdev_ctrlr_flush_cmd(bdev, desc, ch, req),
            opc::DATASET_MANAGEMENT => bdev::nvmf_bdev_ctrlr_dsm_cmd(bdev, desc, ch, req),
            _ => {
                set_status(req, Status::INVALID_OPCODE);
                ExecStatus::Complete
            }
        }
    }
}

/// The bdev layer is done with a request's I/O.
///
/// # Safety
/// `bdev_io` was submitted for the request `cb_arg` and has just been completed.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn nvmf_bdev_ctrlr_complete_cmd(
    bdev_io: *mut spdk_bdev_io,
    success: bool,
    cb_arg: *mut c_void,
) {
    probe_entry!();
    let req: *mut spdk_nvmf_request = cb_arg.cast();
    // SAFETY: by contract.
    unsafe {
        let status = match (success, (*bdev_io).internal.miscompare) {
            (true, _) => Status::SUCCESS,
            (false, true) => Status::COMPARE_FAILURE,
            (false, false) => Status::INTERNAL_ERROR,
        };
        set_status(req, status);
        spdk_nvmf_request_complete(req);
        bdev::spdk_bdev_free_io(bdev_io);
    }
}

/// Completes a request: fills in the rest of its completion entry and hands it to the transport.
///
/// # Safety
/// `req` is live and its status is set.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn spdk_nvmf_request_complete(req: *mut spdk_nvmf_request) {
    probe_entry!();
    // SAFETY: by contract.
    unsafe { _nvmf_request_complete(req.cast()) };
}

/// The second half of [`spdk_nvmf_request_complete`], on the queue's own reactor.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe extern "C" fn _nvmf_request_complete(ctx: *mut c_void) {
    probe_entry!();
    let req: *mut spdk_nvmf_request = ctx.cast();
    // SAFETY: by contract; `rsp` and `cmd` point into the request's own slot.
    unsafe {
        let qpair = (*req).qpair;
        let cmd = (*(*req).cmd).nvme_cmd();
        let cpl: *mut spdk_nvme_cpl = &raw mut (*(*req).rsp).nvme_cpl;
        (*cpl).cid = cmd.cid;
        (*cpl).sqid = 0;
        if (*cpl).status != Status::SUCCESS.word() {
            STATS.errors.fetch_add(1, Ordering::Relaxed);
        }
        if (*qpair).sq_flow_control_disabled {
            // The field is reserved then, except that CONNECT's answer confirms it by all ones.
            let connect = cmd.opc == opc::FABRIC && cmd.fctype() == crate::wire::fctype::CONNECT;
            (*cpl).sqhd = if connect { 0xffff } else { 0 };
        } else {
            let size = u32::from((*qpair).sq_head_max) + 1;
            (*qpair).sq_head = ((u32::from((*qpair).sq_head) + 1) % size) as u16;
            (*cpl).sqhd = (*qpair).sq_head;
        }
        tcp::nvmf_tcp_req_complete(req);
    }
}

/// Runs again what waited for this subsystem.
pub(crate) fn resume_paused(reactor: &Reactor, subsystem_id: u32) {
    let waiting = std::mem::take(&mut *reactor.paused.borrow_mut());
    for req in waiting {
        // SAFETY: a request on this list is live; only I/O commands of queues with a controller
        // come onto it.
        unsafe {
            let ctrlr = (*(*req).qpair).ctrlr;
            if (*(*ctrlr).subsys).id == subsystem_id {
                spdk_nvmf_request_exec(req);
            } else {
                reactor.paused.borrow_mut().push_back(req);
            }
        }
    }
}

/// Ends a connection.
///
/// # Safety
/// `tqpair` is a live connection of the calling reactor.
#[inline(never)]
pub(crate) unsafe fn qpair_disconnect(tqpair: *mut spdk_nvmf_tcp_qpair) {
    // SAFETY: by contract.
    let thread = unsafe { (*(*(*tqpair).qpair.group).thread).id };
    probe!(spdk, nvmf_qpair_disconnect, crate::entry::tsc(), tqpair, thread);
}

/// Moves a subsystem to another state, with the probes that say so.
///
/// # Safety
/// `subsystem` is live (subsystems live as long as the process).
#[inline(never)]
pub(crate) unsafe fn change_state(
    subsystem: *mut spdk_nvmf_subsystem,
    through: spdk_nvmf_subsystem_state,
    to: spdk_nvmf_subsystem_state,
) {
    // SAFETY: by contract.
    let subsystem = unsafe { &*subsystem };
    let before = subsystem.state.load(Ordering::Acquire);
    let nqn = subsystem.subnqn.as_ptr();
    probe!(spdk, nvmf_subsystem_change_state, 0, nqn, to as u32, before);
    subsystem.state.store(through as u32, Ordering::Release);
    subsystem.state.store(to as u32, Ordering::Release);
    probe!(spdk, nvmf_subsystem_change_state_done, 0, nqn, to as u32, before, 0);
}

/// A subsystem exists from now on.
///
/// # Safety
/// `subsystem` is live.
#[inline(never)]
pub(crate) unsafe fn subsystem_created(subsystem: *mut spdk_nvmf_subsystem) {
    // SAFETY: by contract.
    let nqn = unsafe { (*subsystem).subnqn.as_ptr() };
    probe!(spdk, nvmf_subsystem_create, 0, nqn);
}

/// A poll group exists from now on.
#[inline(never)]
pub(crate) fn poll_group_created(thread: *const spdk_thread) {
    // SAFETY: the caller's own, live thread.
    let id = unsafe { (*thread).id };
    probe!(spdk, nvmf_create_poll_group, crate::entry::tsc(), id);
}

/// A poll group is about to go.
#[inline(never)]
pub(crate) fn poll_group_destroyed(thread: *const spdk_thread) {
    // SAFETY: the caller's own, live thread.
    let id = unsafe { (*thread).id };
    probe!(spdk, nvmf_destroy_poll_group, crate::entry::tsc(), id);
}
