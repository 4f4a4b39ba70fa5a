//! Records SPDK as the host over NVMe/TCP: `spdk_nvme_perf`, `bdevperf`, or any program with SPDK's NVMe
//! driver.

use std::mem::MaybeUninit;

use libbpf_rs::OpenObject;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use run_format::Side;

use crate::loader::{self, Chosen, Recorder, fill_common, fill_layout, source_of_recorder};
use crate::plan::{Kernel, Survey};
use crate::process::Process;
use crate::resolve::BinarySet;
use crate::{Error, Options, functions, messages};

#[allow(missing_docs, missing_debug_implementations, unreachable_pub, unused_qualifications, clippy::all)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/host.skel.rs"));
}
use skeleton::types::spdk_layout_host as Layout;

/// An SPDK host being recorded. Dropping it takes every probe away.
#[derive(Debug)]
pub struct Host(Recorder);

impl Host {
    /// Finds the hooks in the process's binaries and attaches to it while it runs.
    ///
    /// # Errors
    /// When rights are missing, the process is gone or is no SPDK host, its functions or structures can not
    /// be found, or the kernel refuses a program.
    pub fn attach(process: &Process, options: &Options) -> Result<Host, Error> {
        process.unless_ended(Self::attach_to(process, options))
    }

    fn attach_to(process: &Process, options: &Options) -> Result<Host, Error> {
        let chosen = Chosen::of(Side::Host, process, options, survey, layout)?;
        // The programs live as long as the recording, and borrow this: some bytes a recording stay.
        let storage = Box::leak(Box::new(MaybeUninit::<OpenObject>::uninit()));
        let mut open = skeleton::HostSkelBuilder::default().open(storage).map_err(chosen.refused("open"))?;
        if let Some(rodata) = open.maps.rodata_data.as_mut() {
            fill_common!(rodata, &chosen.common);
            rodata.layout = chosen.layout;
        }
        chosen.prepare(open.open_object_mut(), options.ring_bytes);
        let loaded = open.load().map_err(chosen.refused("load"))?;
        chosen.attach(Box::new(loaded), process).map(Host)
    }

    /// How each boundary is taken, with what was passed over for it.
    #[must_use]
    pub fn survey(&self) -> &Survey {
        &self.0.survey
    }
}

/// What the host's ladders come to on these binaries, as far as a recording needs it.
fn survey(set: &BinarySet, options: &Options, kernel: &Kernel) -> Result<Survey, Error> {
    // The one function that no host lacks says best what is wrong with a program that is none.
    loader::is_there(set, "nvme_tcp_req_complete").map_err(|error| wrong_program(set, error))?;
    let survey = Survey::of(set, Side::Host, options, kernel, false);
    survey.essential(set.name())?;
    Ok(survey)
}

/// The same with every rung tried, and with what would keep a recording from starting.
pub(crate) fn whole_survey(set: &BinarySet, options: &Options, kernel: &Kernel) -> Result<Survey, Error> {
    if !functions::is_of(Side::Host, set)
        && let Err(error) = loader::is_there(set, "nvme_tcp_req_complete")
    {
        return Err(wrong_program(set, error));
    }
    let mut survey = Survey::of(set, Side::Host, options, kernel, true);
    let works = survey.essential(set.name()).and_then(|()| layout(set, &survey).map(|_| ()));
    survey.obstacles.extend(works.err().map(|error| error.to_string()));
    Ok(survey)
}

fn wrong_program(set: &BinarySet, error: Error) -> Error {
    match error {
        Error::NoFunction { .. } | Error::NotSpdk { .. } => Error::WrongProgram {
            name: set.name().to_owned(),
            expected: "a program with SPDK's NVMe/TCP driver, such as spdk_nvme_perf or bdevperf",
            source: Box::new(error),
        },
        other => other,
    }
}

functions::host_layout!(fill_layout);

/// The host's structures as this build has them.
fn layout(set: &BinarySet, survey: &Survey) -> Result<Layout, Error> {
    let absent = messages::SPDK_ABSENT;
    let table = of_table(set)?;
    let of_bdev = survey.uses("bdev_submit") || survey.uses("bdev_nvme_submit");
    Ok(Layout {
        // Without the number to compare it with, the transport's type tells nothing.
        qpair_trtype: if table.trtype_tcp == absent { absent } else { table.qpair_trtype },
        bdev_io_driver_ctx: if of_bdev { table.bdev_io_driver_ctx } else { absent },
        sock_fd: loader::descriptor_offset(set),
        driver_with_capsule: u32::from(!survey.uses("tcp_submit_request")),
        ends_at_callback: u32::from(survey.uses("bdev_complete") || survey.uses("io_complete")),
        ..table
    })
}

source_of_recorder!(Host);
