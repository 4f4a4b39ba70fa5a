//! One command as a run keeps it.

use crate::{Boundary, Cid, Nanos, QueueId, Window};

/// One command on one side, from its first boundary to its last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Command {
    /// The queue it went through.
    pub queue: QueueId,
    /// Its identifier on that queue.
    pub cid: Cid,
    /// The SQE's opcode.
    pub opcode: u8,
    /// The SQE's namespace identifier.
    pub nsid: u32,
    /// CDW10 and CDW11 as they stand on the wire: the starting LBA where the command has one.
    pub slba: u64,
    /// The low half of CDW12 as it stands on the wire: the number of blocks less one where the command has
    /// one.
    pub nlb0: u16,
    /// Bytes of data that it carries.
    pub bytes: u32,
    /// Status code type and status code, `SCT << 8 | SC`; 0 is success.
    pub status: u16,
    /// The CPU it was handed to the driver on (host) or received on (target).
    pub cpu: u16,
    /// [`Command::MERGED`] and its like.
    pub flags: u16,
    /// R2Ts seen or sent for it, saturating at 255.
    pub r2ts: u8,
    /// TCP sequence number of its capsule's first byte, where it is known.
    pub stream_position: Option<u32>,
    /// Sum over its R2Ts of (H2CData handed to the socket less R2T seen); host, R2T writes only.
    pub r2t_turnaround: Option<Nanos>,
    /// The drive's part of storage: from the issue of the command's first block request to the completion of
    /// its last; target, where the drive is a local block device.
    pub drive: Option<Nanos>,
    /// Time at each boundary of the run's side, by [`Boundary::slot`]; `None` where it was not passed or
    /// not measured.
    pub times: [Option<Nanos>; Command::SLOTS],
}

impl Command {
    /// Length of [`Command::times`].
    pub const SLOTS: usize = 8;
    /// The request carried more than one bio.
    pub const MERGED: u16 = 1;
    /// Not the first attempt of its request.
    pub const RETRY: u16 = 2;
    /// Ended by multipath failover.
    pub const FAILOVER: u16 = 4;
    /// Ended without a completion from the wire.
    pub const CANCELED: u16 = 8;
    /// Its cid is not known (0 stands there), nor what of opcode (0xff), nsid (0) and address its source does not
    /// tell: it is matched by its order on its queue.
    pub const NO_CID: u16 = 16;

    /// The time at a boundary of this run's side.
    #[must_use]
    pub fn time(&self, boundary: Boundary) -> Option<Nanos> {
        self.times[boundary.slot()]
    }

    /// From its first time to its last; `None` where it has none.
    #[must_use]
    pub fn span(&self) -> Option<Window> {
        let times = || self.times.iter().flatten().copied();
        Some(Window { start_ns: times().min()?, end_ns: times().max()? })
    }
}
