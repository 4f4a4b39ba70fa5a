//! What only the host's programs need.

use crate::programs::{Probes, object};

object!(
    "/host.skel.rs",
    HostSkelBuilder,
    OpenHostSkel,
    HostSkel,
    run_format::Side::Host,
    |constants, settings| {
        constants.tcp_mq_ops = settings.facts.address("nvme_tcp_mq_ops");
        constants.watch_port = !settings.plan.connections;
    }
);

/// The host's probes, attached.
pub type Host = Probes<skeleton::HostSkel<'static>>;
