//! The causes that diagnose knows: their names, and nothing of how they are found.

use serde::Serialize;

macro_rules! causes {
    ($($(#[doc = $doc:literal])+ $name:ident $text:literal $title:literal;)+) => {
        /// What can make commands slow, or keep the load from being served faster.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Cause {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Cause {
            /// All of them.
            pub const ALL: &[Cause] = &[$(Cause::$name,)+];

            /// The JSON name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Cause::$name => $text,)+ }
            }

            /// What it is, for a person.
            #[must_use]
            pub const fn title(self) -> &'static str {
                match self { $(Cause::$name => $title,)+ }
            }

            /// The cause of this name.
            #[must_use]
            pub fn parse(name: &str) -> Option<Cause> {
                Cause::ALL.iter().copied().find(|cause| cause.name() == name)
            }
        }

        impl std::fmt::Display for Cause {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

causes! {
    /// TCP segments were lost or sent again, and commands waited for them.
    FabricLoss "fabric_loss" "loss on the fabric: TCP sends segments again";
    /// Congestion marks, CNPs, pause frames or lost RDMA packets, and a slow network with them.
    FabricCongestion "fabric_congestion" "congestion on the fabric: marks, CNPs, pause frames, or packets that RDMA lost";
    /// The two ends have different MTUs, or segments are smaller than the path allows.
    MtuMismatch "mtu_mismatch" "MTU or segmentation mismatch";
    /// Writes wait for R2Ts that in-capsule data would not need, or for more of them than their size needs.
    R2tRoundTrips "r2t_round_trips" "writes wait for R2T round trips";
    /// A congestion, send or receive window holds data back.
    TransportWindow "transport_window" "a transport window holds data back";
    /// The drive serves no more, however many commands wait for it.
    DriveSaturated "drive_saturated" "the drive is saturated";
    /// A reactor of the SPDK target has no time left.
    ReactorSaturated "reactor_saturated" "a reactor of the target is saturated";
    /// Commands wait for a buffer of the target.
    BufferPool "buffer_pool" "the target's buffer pool runs dry";
    /// The drive's own work makes it slow now and then.
    DriveInternal "drive_internal" "the drive's own work: storage has two speeds";
    /// The drive throttles itself for heat.
    DriveThrottled "drive_throttled" "the drive throttles itself for heat";
    /// The host's CPUs have no time for I/O.
    HostCpu "host_cpu" "the host's CPUs have no time for I/O";
    /// Completions are taken on other CPUs than those that submit.
    InterruptAffinity "interrupt_affinity" "completions are taken on other CPUs than the submitters'";
    /// More CPUs submit than there are queues, and commands wait to be sent.
    TooFewQueues "too_few_queues" "too few I/O queues";
    /// One queue carries far more than the others and is slower for it.
    HotQueue "hot_queue" "one hot queue";
    /// Small commands wait behind large ones on the same connection.
    HeadOfLine "head_of_line" "head-of-line blocking on a queue's connection";
    /// The load on another namespace makes this one slow.
    NoisyNeighbour "noisy_neighbour" "a noisy neighbour on another namespace";
    /// Small random I/O has reached a limit of operations a second.
    IopsLimit "iops_limit" "small random I/O is at an IOPS limit";
}
