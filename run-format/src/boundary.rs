//! The boundaries a command passes and the stages between them: the one table that code, help, documents
//! and tests read.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Which end of the fabric a run was recorded on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The host (initiator).
    Host,
    /// The target (NVM subsystem).
    Target,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Side::Host => "host",
            Side::Target => "target",
        })
    }
}

/// What software took part on a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The kernel's driver (nvme-tcp, nvmet-tcp).
    Kernel,
    /// A userspace process that has SPDK's functions.
    Spdk,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::Kernel => "kernel",
            Kind::Spdk => "spdk",
        })
    }
}

macro_rules! boundaries {
    ($($(#[doc = $doc:literal])+ $name:ident $text:literal $side:ident $slot:literal $meaning:literal;)+) => {
        /// A point that a command passes. Each has one timestamp, taken at the entry of the function that
        /// does the thing.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Boundary {
            $($(#[doc = $doc])+ #[serde(rename = $text)] $name,)+
        }

        impl Boundary {
            /// All boundaries: the host's, then the target's, each in the order a command passes them.
            pub const ALL: &[Boundary] = &[$(Boundary::$name,)+];

            /// The column and JSON name, such as `h_queued`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Boundary::$name => $text,)+ }
            }

            /// The side that takes it.
            #[must_use]
            pub const fn side(self) -> Side {
                match self { $(Boundary::$name => Side::$side,)+ }
            }

            /// Its index in the record's timestamps (`enum fab_host_slot`, `enum fab_target_slot`).
            #[must_use]
            pub const fn slot(self) -> usize {
                match self { $(Boundary::$name => $slot,)+ }
            }

            /// "The command ..."
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Boundary::$name => $meaning,)+ }
            }
        }
    };
}

boundaries! {
    /// The command enters the host's block layer (SPDK: the application submits it).
    HQueued "h_queued" Host 0 "enters the host's block layer";
    /// The command is handed to the fabrics driver.
    HDriver "h_driver" Host 1 "is handed to the fabrics driver";
    /// The capsule's first byte is handed to the socket or NIC queue.
    HSent "h_sent" Host 2 "has its capsule's first byte handed to the socket or NIC queue";
    /// The (first) R2T is seen.
    HR2t "h_r2t" Host 3 "has its R2T seen (R2T writes only)";
    /// The first H2CData byte is handed to the socket.
    HDataSent "h_data_sent" Host 4 "has its first H2CData byte handed to the socket (R2T writes only)";
    /// The completion reaches the driver.
    HRecv "h_recv" Host 5 "has its completion reach the driver";
    /// The driver completes the command towards the block layer.
    HDone "h_done" Host 6 "is completed by the driver towards the block layer";
    /// The block layer ends the command.
    HEnd "h_end" Host 7 "is ended by the block layer";
    /// The target's transport has read the capsule.
    TRecv "t_recv" Target 0 "has its capsule read by the target's transport";
    /// The R2T is sent.
    TR2t "t_r2t" Target 1 "has its R2T sent (R2T writes only)";
    /// The last H2CData byte is there.
    TData "t_data" Target 2 "has its last H2CData received (R2T writes only)";
    /// The command is submitted to storage.
    TSubmit "t_submit" Target 3 "is submitted to storage";
    /// Storage completes the command.
    TDone "t_done" Target 4 "is completed by storage";
    /// The response is handed to the transport.
    TResp "t_resp" Target 5 "has its response handed to the transport";
    /// The response's first byte is handed to the socket or NIC queue.
    TSent "t_sent" Target 6 "has its response's first byte handed to the socket or NIC queue";
}

impl Boundary {
    /// The boundaries of one side, in the order a command passes them.
    pub fn of(side: Side) -> impl Iterator<Item = Boundary> {
        Boundary::ALL.iter().copied().filter(move |b| b.side() == side)
    }

    /// The boundary of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Boundary> {
        Boundary::ALL.iter().copied().find(|b| b.name() == name)
    }
}

impl fmt::Display for Boundary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The time between boundaries that one component is responsible for. These five are the only stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The host's block layer, way in and way out (SPDK: the application and bdev layer).
    HostBlock,
    /// The host's fabrics driver.
    HostDriver,
    /// The network, both ways, with both network stacks.
    Network,
    /// The target's driver.
    TargetDriver,
    /// The target's storage: its block or bdev layer and the drive.
    Storage,
}

impl Stage {
    /// All five, from host to drive.
    pub const ALL: [Stage; 5] =
        [Stage::HostBlock, Stage::HostDriver, Stage::Network, Stage::TargetDriver, Stage::Storage];

    /// The JSON name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Stage::HostBlock => "host_block",
            Stage::HostDriver => "host_driver",
            Stage::Network => "network",
            Stage::TargetDriver => "target_driver",
            Stage::Storage => "storage",
        }
    }

    /// The name for a person.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Stage::HostBlock => "host block layer",
            Stage::HostDriver => "host driver",
            Stage::Network => "network",
            Stage::TargetDriver => "target driver",
            Stage::Storage => "storage",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.title())
    }
}

#[cfg(test)]
mod tests {
    use super::{Boundary, Side};

    #[test]
    fn slots_are_the_order_of_passing_and_unique_per_side() {
        for side in [Side::Host, Side::Target] {
            let slots: Vec<usize> = Boundary::of(side).map(Boundary::slot).collect();
            assert_eq!(slots, (0..slots.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn names_parse_back_and_tell_their_side() {
        for &b in Boundary::ALL {
            assert_eq!(Boundary::parse(b.name()), Some(b));
            let prefix = if b.side() == Side::Host { "h_" } else { "t_" };
            assert!(b.name().starts_with(prefix));
            assert_eq!(serde_json::to_string(&b).unwrap(), format!("\"{}\"", b.name()));
        }
    }

    #[cfg(feature = "bpf")]
    #[test]
    fn slots_are_those_of_the_bpf_header() {
        use crate::bpf::raw;
        let host = [
            raw::FAB_H_QUEUED,
            raw::FAB_H_DRIVER,
            raw::FAB_H_SENT,
            raw::FAB_H_R2T,
            raw::FAB_H_DATA_SENT,
            raw::FAB_H_RECV,
            raw::FAB_H_DONE,
            raw::FAB_H_END,
        ];
        let target = [
            raw::FAB_T_RECV,
            raw::FAB_T_R2T,
            raw::FAB_T_DATA,
            raw::FAB_T_SUBMIT,
            raw::FAB_T_DONE,
            raw::FAB_T_RESP,
            raw::FAB_T_SENT,
        ];
        for (b, slot) in Boundary::of(Side::Host).zip(host) {
            assert_eq!(b.slot() as u32, slot, "{b}");
        }
        for (b, slot) in Boundary::of(Side::Target).zip(target) {
            assert_eq!(b.slot() as u32, slot, "{b}");
        }
    }
}
