//! One queue as a run keeps it: one NVMe queue pair over one connection.

use crate::Nanos;
use serde::{Deserialize, Serialize};

/// What carries the commands of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// NVMe/TCP.
    #[default]
    Tcp,
    /// NVMe/RDMA.
    Rdma,
}

impl Transport {
    /// The name in the `transport` column.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Rdma => "rdma",
        }
    }

    /// The transport of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Transport> {
        [Transport::Tcp, Transport::Rdma].into_iter().find(|t| t.name() == name)
    }
}

/// One end of a connection, as text and number (`traddr` and `trsvcid`).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// IPv4 or IPv6 address.
    pub address: String,
    /// TCP or RDMA CM port.
    pub port: u16,
}

/// One queue over one connection: a reconnect makes a new one. Both sides know it by (subsystem NQN, host
/// NQN, cntlid, qid), and its epoch by the host's port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Queue {
    /// NQN of the subsystem.
    pub subsystem_nqn: String,
    /// NQN of the host; empty where the host sent none.
    pub host_nqn: String,
    /// Controller identifier.
    pub cntlid: u16,
    /// Queue identifier; 0 is the admin queue, which is not recorded.
    pub qid: u16,
    /// What carries it.
    pub transport: Transport,
    /// The host's end, where it is known.
    pub host: Option<Endpoint>,
    /// The target's end, where it is known.
    pub target: Option<Endpoint>,
    /// The device its commands are for, as this side names it (`nvme0`), where there is one.
    pub device: Option<String>,
    /// The CPU or the SPDK thread it is served on, where it is bound to one.
    pub served_by: Option<String>,
    /// When this side's recording first saw it.
    pub came: Nanos,
    /// Whether it was connected before recording began.
    pub existed: bool,
    /// When it went; `None` while it lasts.
    pub went: Option<Nanos>,
}
