//! A network between the kernel's host and its target inside one VM, to be made slow, lossy or narrow without touching
//! anything else there.

use anyhow::{Context, Result};

use crate::vm::Vm;

/// A network namespace for the target, and the pair of network devices (veth) that joins it to the VM's own network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FarNetwork {
    /// The namespace, for [`crate::Port::within`].
    pub namespace: &'static str,
    /// The host's network device.
    pub host_device: &'static str,
    /// The host's address.
    pub host_address: &'static str,
    /// The target's network device, in its namespace.
    pub target_device: &'static str,
    /// The target's address.
    pub target_address: &'static str,
}

impl FarNetwork {
    /// What to put before a command that is to run in the target's namespace; only its network is another there.
    pub fn inside(&self) -> String {
        enter(self.namespace)
    }
}

/// What runs a command in a network namespace. `ip netns exec` would mount a `/sys` without what is mounted there.
pub(crate) fn enter(namespace: &str) -> String {
    format!("nsenter -n/run/netns/{namespace}")
}

impl Vm {
    /// Makes it. Carry `ip` and `nsenter`: busybox's would run its own programs inside.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or it is there already.
    pub fn far_network(&self) -> Result<FarNetwork> {
        let network = FarNetwork {
            namespace: "target",
            host_device: "to-target",
            host_address: "10.8.0.1",
            target_device: "to-host",
            target_address: "10.8.0.2",
        };
        let FarNetwork {
            namespace: n,
            host_device: h,
            host_address: ha,
            target_device: t,
            target_address: ta,
        } = network;
        self.sh(&format!(
            "set -e; modprobe veth; ip netns add {n}; ip link add {h} type veth peer name {t} netns {n}; \
             ip addr add {ha}/24 dev {h}; ip link set {h} up; \
             {0} ip addr add {ta}/24 dev {t}; {0} ip link set {t} up; {0} ip link set lo up",
            enter(n)
        ))
        .context("cannot make the network of the VM's target")?;
        Ok(network)
    }
}
