//! What only the host's programs need.

use crate::programs::{Probes, object};
use run_format::Transport;

object!(
    "/host.skel.rs",
    HostSkelBuilder,
    OpenHostSkel,
    HostSkel,
    run_format::Side::Host,
    |constants, settings| {
        let there = &settings.plan.survey.transports;
        constants.record_tcp = there.contains(&Transport::Tcp);
        constants.record_rdma = there.contains(&Transport::Rdma);
        constants.tcp_mq_ops = settings.facts.address("nvme_tcp_mq_ops");
        constants.rdma_mq_ops = settings.facts.address("nvme_rdma_mq_ops");
        constants.bio_told = settings.facts.bio_told.unwrap_or(0);
        constants.watch_port = !settings.plan.connections;
    }
);

/// The host's probes, attached.
pub type Host = Probes<skeleton::HostSkel<'static>>;
