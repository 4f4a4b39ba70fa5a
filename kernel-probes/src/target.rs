//! What only the kernel target's programs need.

use crate::programs::{Probes, object};
use run_format::{Boundary, Side, Transport};

object!(
    "/target.skel.rs",
    TargetSkelBuilder,
    OpenTargetSkel,
    TargetSkel,
    Side::Target,
    |constants, settings| {
        constants.end_of_command_bio = settings.facts.address("nvmet_bio_done");
        constants.end_of_chained_bio = settings.facts.address("bio_chain_endio");
        constants.rejected_unseen = !matches!(settings.plan.identity, "init_fentry" | "init_kprobe");
        constants.tcp_ends_with_response = !settings.plan.takes(Boundary::TSent, Transport::Tcp);
    }
);

/// The kernel target's probes, attached.
pub type Target = Probes<skeleton::TargetSkel<'static>>;
