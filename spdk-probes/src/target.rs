//! Records an SPDK NVMe/TCP target: `nvmf_tgt`, `spdk_tgt`, or any program with SPDK's nvmf library.

use std::mem::MaybeUninit;

use libbpf_rs::OpenObject;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use run_format::Side;

use crate::loader::{self, Chosen, Recorder, fill_common, fill_layout, source_of_recorder};
use crate::plan::{Kernel, Survey};
use crate::process::Process;
use crate::resolve::BinarySet;
use crate::{Error, Options, functions};

#[allow(missing_docs, missing_debug_implementations, unreachable_pub, unused_qualifications, clippy::all)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/target.skel.rs"));
}
use skeleton::types::spdk_layout_target as Layout;

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
        process.unless_ended(Self::attach_to(process, options))
    }

    fn attach_to(process: &Process, options: &Options) -> Result<Target, Error> {
        let chosen = Chosen::of(Side::Target, process, options, survey, layout)?;
        // The programs live as long as the recording, and borrow this: some bytes a recording stay.
        let storage = Box::leak(Box::new(MaybeUninit::<OpenObject>::uninit()));
        let mut open =
            skeleton::TargetSkelBuilder::default().open(storage).map_err(chosen.refused("open"))?;
        if let Some(rodata) = open.maps.rodata_data.as_mut() {
            fill_common!(rodata, &chosen.common);
            rodata.layout = chosen.layout;
        }
        chosen.prepare(open.open_object_mut(), options.ring_bytes);
        let loaded = open.load().map_err(chosen.refused("load"))?;
        chosen.attach(Box::new(loaded), process).map(Target)
    }

    /// How each boundary is taken, with what was passed over for it.
    #[must_use]
    pub fn survey(&self) -> &Survey {
        &self.0.survey
    }
}

/// What the target's ladders come to on these binaries, as far as a recording needs it.
fn survey(set: &BinarySet, options: &Options, kernel: &Kernel) -> Result<Survey, Error> {
    // The one function that no target lacks says best what is wrong with a program that is none.
    loader::is_there(set, "nvmf_tcp_req_process").map_err(|error| wrong_program(set, error))?;
    let survey = Survey::of(set, Side::Target, options, kernel, false);
    survey.essential(set.name())?;
    Ok(survey)
}

/// The same with every rung tried, and with what would keep a recording from starting.
pub(crate) fn whole_survey(set: &BinarySet, options: &Options, kernel: &Kernel) -> Result<Survey, Error> {
    if !functions::is_of(Side::Target, set)
        && let Err(error) = loader::is_there(set, "nvmf_tcp_req_process")
    {
        return Err(wrong_program(set, error));
    }
    let mut survey = Survey::of(set, Side::Target, options, kernel, true);
    let works = survey.essential(set.name()).and_then(|()| layout(set, &survey).map(|_| ()));
    survey.obstacles.extend(works.err().map(|error| error.to_string()));
    Ok(survey)
}

fn wrong_program(set: &BinarySet, error: Error) -> Error {
    match error {
        Error::NoFunction { .. } | Error::NotSpdk { .. } => Error::WrongProgram {
            name: set.name().to_owned(),
            expected: "an SPDK NVMe/TCP target, such as nvmf_tgt or spdk_tgt",
            source: Box::new(error),
        },
        other => other,
    }
}

functions::target_layout!(fill_layout);

/// The target's structures as this build has them.
fn layout(set: &BinarySet, survey: &Survey) -> Result<Layout, Error> {
    Ok(Layout {
        sock_fd: loader::descriptor_offset(set),
        done_with_response: u32::from(survey.uses("thread_message")),
        r2t_at_queueing: u32::from(survey.kernel_probes().is_empty() && !survey.uses("flush_call")),
        ..of_table(set)?
    })
}

source_of_recorder!(Target);
