//! Records an SPDK NVMe/TCP target: `nvmf_tgt`, `spdk_tgt`, or any program with SPDK's nvmf library.

use std::mem::MaybeUninit;
use std::time::Duration;

use libbpf_rs::OpenObject;
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use run_format::{Counters, Hook, Kind, Side, Sink, Software, Source};

use crate::loader::{
    self, Attach, InFlight, Maps, Recorder, fill_common, offset, optional, optional_enumerator,
};
use crate::plan::{Kernel, Survey};
use crate::process::Process;
use crate::resolve::BinarySet;
use crate::{Error, Options, messages};

#[allow(missing_docs, missing_debug_implementations, unreachable_pub, unused_qualifications, clippy::all)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/target.skel.rs"));
}
use skeleton::types::spdk_layout_target;

/// An SPDK target being recorded. Dropping it takes every probe away.
#[derive(Debug)]
pub struct Target(Recorder);

impl Target {
    /// Finds the hooks in the process's binaries and attaches to it while it runs.
    ///
    /// # Errors
    /// When rights are missing, the process is gone or is no SPDK target, its functions or structures can
    /// not be found, or the kernel refuses a program.
    pub fn attach(process: &Process, options: &Options) -> Result<Target, Error> {
        loader::check(process)?;
        let set = loader::binaries(process, options.layout.as_deref(), options.debug_file.as_deref())?;
        let kernel = Kernel::default();
        let survey = survey(&set, options, &kernel, false)?;
        let layout = layout(&set, &survey)?;
        let common = loader::common(process, options, &survey, &kernel);
        let how = Attach::here(options);
        let refused = |what: &str| {
            let what = format!("{what} the target's programs");
            move |source| Error::Bpf { what, source }
        };

        let mut storage = MaybeUninit::<OpenObject>::uninit();
        let mut open = skeleton::TargetSkelBuilder::default().open(&mut storage).map_err(refused("open"))?;
        if let Some(rodata) = open.maps.rodata_data.as_mut() {
            fill_common!(rodata, &common);
            rodata.layout = layout;
        }
        loader::prepare(open.open_object_mut(), &survey, how, options.ring_bytes);
        let loaded = open.load().map_err(refused("load"))?;
        let object = loaded.object();
        let in_flight = InFlight { map: loader::map(object, "in_flight")?, counted: |_| true };
        let maps = Maps {
            ring: loader::map(object, "ring")?,
            counters: loader::map(object, "counters")?,
            connections: loader::map(object, "connections")?,
            sockets: loader::map(object, "sockets")?,
            in_flight: vec![in_flight],
        };
        let links = loader::attach(object, &survey, how, process.pid)?;
        let software = loader::software(&set, process);
        let states = loader::subsystem_states(&set);
        Recorder::new(Side::Target, maps, links, process, survey, software, states).map(Target)
    }

    /// How each boundary is taken, with what was passed over for it.
    #[must_use]
    pub fn survey(&self) -> &Survey {
        &self.0.survey
    }
}

/// What the target's ladders come to on these binaries.
pub(crate) fn survey(
    set: &BinarySet,
    options: &Options,
    kernel: &Kernel,
    thorough: bool,
) -> Result<Survey, Error> {
    // The one function that no target lacks says best what is wrong with a program that is none.
    set.resolve_function("nvmf_tcp_req_process").map_err(|error| match error {
        Error::NoFunction { .. } | Error::NotSpdk { .. } => Error::WrongProgram {
            name: set.name().to_owned(),
            expected: "an SPDK NVMe/TCP target, such as nvmf_tgt or spdk_tgt",
            source: Box::new(error),
        },
        other => other,
    })?;
    Survey::of(set, Side::Target, options, kernel, thorough)
}

/// The target's structures as this build has them.
fn layout(set: &BinarySet, survey: &Survey) -> Result<spdk_layout_target, Error> {
    let state = |name| set.enumerator(crate::functions::TARGET_STATES, name).map(|value| value as u32);
    let cc = match optional(set, "spdk_nvmf_ctrlr.vcprop.cc") {
        messages::SPDK_ABSENT => optional(set, "spdk_nvmf_ctrlr.cc"),
        found => found,
    };
    let absent = messages::SPDK_ABSENT;
    Ok(spdk_layout_target {
        tcp_req_state: offset(set, "spdk_nvmf_tcp_req.state")?,
        request_qpair: offset(set, "spdk_nvmf_request.qpair")?,
        request_cmd: offset(set, "spdk_nvmf_request.cmd")?,
        request_rsp: offset(set, "spdk_nvmf_request.rsp")?,
        qpair_qid: offset(set, "spdk_nvmf_qpair.qid")?,
        qpair_ctrlr: offset(set, "spdk_nvmf_qpair.ctrlr")?,
        qpair_group: optional(set, "spdk_nvmf_qpair.group"),
        qpair_state: optional(set, "spdk_nvmf_qpair.state"),
        tqpair_pdu: offset(set, "spdk_nvmf_tcp_qpair.pdu_in_progress")?,
        tqpair_sock: offset(set, "spdk_nvmf_tcp_qpair.sock")?,
        tqpair_host_address: optional(set, "spdk_nvmf_tcp_qpair.initiator_addr"),
        tqpair_target_address: optional(set, "spdk_nvmf_tcp_qpair.target_addr"),
        tqpair_host_port: optional(set, "spdk_nvmf_tcp_qpair.initiator_port"),
        tqpair_target_port: optional(set, "spdk_nvmf_tcp_qpair.target_port"),
        pdu_sqe: loader::sqe_offset(set)?,
        ctrlr_cntlid: offset(set, "spdk_nvmf_ctrlr.cntlid")?,
        ctrlr_hostnqn: offset(set, "spdk_nvmf_ctrlr.hostnqn")?,
        ctrlr_subsys: offset(set, "spdk_nvmf_ctrlr.subsys")?,
        ctrlr_cc: cc,
        subsystem_subnqn: offset(set, "spdk_nvmf_subsystem.subnqn")?,
        group_thread: optional(set, "spdk_nvmf_poll_group.thread"),
        thread_name: optional(set, "spdk_thread.name"),
        sock_fd: loader::descriptor_offset(set),
        bdev_io_caller_ctx: optional(set, "spdk_bdev_io.internal.caller_ctx"),
        bdev_io_type: optional(set, "spdk_bdev_io.type"),
        unmap_req: optional(set, "nvmf_bdev_ctrlr_unmap.req"),
        state_new: state("TCP_REQUEST_STATE_NEW")?,
        state_ready_to_execute: state("TCP_REQUEST_STATE_READY_TO_EXECUTE")?,
        state_executed: state("TCP_REQUEST_STATE_EXECUTED")?,
        state_completed: state("TCP_REQUEST_STATE_COMPLETED")?,
        qpair_enabled: optional_enumerator(set, "spdk_nvmf_qpair_state", "SPDK_NVMF_QPAIR_ENABLED")
            .unwrap_or(absent),
        type_unmap: optional_enumerator(set, "spdk_bdev_io_type", "SPDK_BDEV_IO_TYPE_UNMAP")
            .unwrap_or(absent),
        r2t_at_queueing: u32::from(survey.kernel_probes().is_empty() && !survey.uses("flush_call")),
    })
}

impl Source for Target {
    type Error = Error;

    fn side(&self) -> Side {
        Side::Target
    }

    fn kind(&self) -> Kind {
        Kind::Spdk
    }

    fn software(&self) -> Software {
        self.0.software.clone()
    }

    fn hooks(&self) -> Vec<Hook> {
        self.0.survey.hooks()
    }

    fn poll(&mut self, timeout: Duration, sink: &mut dyn Sink) -> Result<usize, Error> {
        Ok(self.0.poll(timeout, sink))
    }

    fn stop(&mut self, sink: &mut dyn Sink) -> Result<(), Error> {
        self.0.stop(sink);
        Ok(())
    }

    fn counters(&self) -> Result<Counters, Error> {
        self.0.counters()
    }

    fn ended(&self) -> bool {
        self.0.ended()
    }
}
