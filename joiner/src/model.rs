//! The five stages of one command, from its boundaries on both sides. The formulas, the sub-stages and the
//! table of fallbacks stand here and nowhere else.
//!
//! A difference is always taken between two times of one machine. The stages add up to `h_end - h_queued`
//! exactly, whatever is missing: a fallback moves time from one stage to a neighbour, never out of the sum.

use crate::recording::NONE;
use run_format::{Boundary, Command, Side, Stage};

/// What stands for a boundary that a recording lacks: the first of these that is there.
///
/// Each is a boundary of the same side, the nearest on the way of a command, so that the time between the two
/// is counted with the stage on the other side of the lacking boundary.
pub(crate) const FALLBACKS: &[(Boundary, &[Boundary])] = {
    use Boundary::{
        HDone, HDriver, HEnd, HQueued, HRecv, HSent, TData, TDone, TR2t, TRecv, TResp, TSent, TSubmit,
    };
    &[
        (HQueued, &[HDriver, HSent]),
        (HDriver, &[HSent, HQueued]),
        (HSent, &[HDriver, HQueued]),
        (HRecv, &[HDone, HEnd]),
        (HDone, &[HEnd, HRecv]),
        (HEnd, &[HDone, HRecv]),
        (TRecv, &[TR2t, TSubmit]),
        // An R2T that was not seen leaves its wait where it is: in the target's driver.
        (TR2t, &[]),
        (TData, &[TSubmit]),
        (TSubmit, &[TData, TRecv]),
        (TDone, &[TResp, TSent]),
        (TResp, &[TDone, TSent]),
        (TSent, &[TResp, TDone]),
    ]
};

/// The fallbacks of a boundary, nearest first.
pub(crate) fn fallbacks(boundary: Boundary) -> &'static [Boundary] {
    FALLBACKS.iter().find(|f| f.0 == boundary).map_or(&[], |f| f.1)
}

/// Whether only commands with an R2T pass a boundary.
pub(crate) const fn is_of_r2t(boundary: Boundary) -> bool {
    matches!(boundary, Boundary::HR2t | Boundary::HDataSent | Boundary::TR2t | Boundary::TData)
}

/// The slots of a side's boundaries that every command passes, as bits.
const fn passed_by_all(side: Side) -> u16 {
    let (mut slots, mut n) = (0, 0);
    while n < Boundary::ALL.len() {
        let b = Boundary::ALL[n];
        if b.side() as u8 == side as u8 && !is_of_r2t(b) {
            slots |= 1 << b.slot();
        }
        n += 1;
    }
    slots
}

/// Whether any of the boundaries that every command passes has no time.
fn lacks<const N: usize>(times: &[i64; N], side: Side) -> bool {
    const HOST: u16 = passed_by_all(Side::Host);
    const TARGET: u16 = passed_by_all(Side::Target);
    let passed = match side {
        Side::Host => HOST,
        Side::Target => TARGET,
    };
    // Without a branch for each: this is asked for every command.
    (0..N).fold(false, |lacks, slot| lacks | ((times[slot] == NONE) & (passed >> slot & 1 == 1)))
}

/// The times of one side with every lacking one replaced by its fallback where there is one. The
/// boundaries that only R2T writes pass are left as they are.
pub(crate) fn filled<const N: usize>(mut times: [i64; N], side: Side) -> [i64; N] {
    let recorded = times;
    if !lacks(&recorded, side) {
        return times;
    }
    for (boundary, instead) in FALLBACKS {
        if boundary.side() == side && !is_of_r2t(*boundary) && recorded[boundary.slot()] == NONE {
            let found = instead.iter().map(|b| recorded[b.slot()]).find(|&t| t != NONE);
            times[boundary.slot()] = found.unwrap_or(NONE);
        }
    }
    times
}

/// The times of one side, filled; `None` where boundaries that every command passes still have none.
fn whole<const N: usize>(times: &[i64; N], side: Side) -> Option<[i64; N]> {
    if !lacks(times, side) {
        return Some(*times);
    }
    Some(filled(*times, side)).filter(|times| !lacks(times, side))
}

macro_rules! sub_stages {
    ($($(#[doc = $doc:literal])+ $name:ident $stage:ident $text:literal;)+) => {
        /// A part of a stage.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum SubStage {
            $($(#[doc = $doc])+ $name,)+
        }

        impl SubStage {
            /// All of them, in the order of a command's way.
            pub const ALL: &[SubStage] = &[$(SubStage::$name,)+];
            /// Their number.
            pub const COUNT: usize = SubStage::ALL.len();

            /// The stage that it is a part of.
            #[must_use]
            pub const fn stage(self) -> Stage {
                match self { $(SubStage::$name => Stage::$stage,)+ }
            }

            /// The column and JSON name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(SubStage::$name => $text,)+ }
            }

            /// What it is, for a person.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(SubStage::$name => concat!($($doc),+).trim_ascii(),)+ }
            }
        }
    };
}

sub_stages! {
    /// way in: h_queued to h_driver
    HostBlockIn HostBlock "host_block_in";
    /// way out: h_done to h_end
    HostBlockOut HostBlock "host_block_out";
    /// way in: h_driver to h_sent
    HostDriverIn HostDriver "host_driver_in";
    /// answers to R2Ts: h_r2t to h_data_sent
    HostDriverR2t HostDriver "host_driver_r2t";
    /// way out: h_recv to h_done
    HostDriverOut HostDriver "host_driver_out";
    /// to the target: h_sent to t_recv
    NetworkOut Network "network_out";
    /// R2Ts and their data: t_r2t to t_data, less the host's answers
    NetworkData Network "network_data";
    /// to the host: t_sent to h_recv
    NetworkBack Network "network_back";
    /// way in: t_recv to t_submit, less the wait for data
    TargetDriverIn TargetDriver "target_driver_in";
    /// completion: t_done to t_resp
    TargetDriverComplete TargetDriver "target_driver_complete";
    /// sending: t_resp to t_sent
    TargetDriverSend TargetDriver "target_driver_send";
    /// target's block layer: t_submit to t_done, less the drive
    StorageBlock Storage "storage_block";
    /// drive: issue of the first block request to completion of the last
    StorageDrive Storage "storage_drive";
}

/// One command's stages, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stages {
    /// The five, in the order of [`Stage::ALL`].
    pub stages: [i64; 5],
    /// `h_end - h_queued`: their sum.
    pub latency: i64,
}

impl Stages {
    /// One of them.
    #[must_use]
    pub fn of(&self, stage: Stage) -> i64 {
        self.stages[stage as usize]
    }
}

/// What the stages are made of: times with fallbacks filled in, and the terms of R2T writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) h: [i64; 8],
    pub(crate) t: [i64; 7],
    /// The target waited for data this long (`t_data - t_r2t`), 0 without an R2T.
    pub(crate) wait: i64,
    /// The host took this long over its R2Ts, 0 without one, or where the target's wait is not known.
    pub(crate) turnaround: i64,
    /// The drive's part of storage, where it is known.
    pub(crate) drive: Option<i64>,
}

/// A time of a filled side.
fn at<const N: usize>(times: &[i64; N], boundary: Boundary) -> i64 {
    times[boundary.slot()]
}

/// How long the target waited for the data of its R2Ts.
pub(crate) fn data_wait(recorded: &[i64; 7], filled: &[i64; 7]) -> Option<i64> {
    let r2t = at(recorded, Boundary::TR2t);
    let data = match at(recorded, Boundary::TData) {
        NONE => at(filled, Boundary::TSubmit),
        data => data,
    };
    // Where t_recv itself is lacking and t_r2t stands for it, the wait still lies behind it.
    (r2t != NONE && data != NONE).then(|| data - r2t)
}

/// How long the host took over its R2Ts: the sum where it was kept, else the first one's.
pub(crate) fn turnaround(recorded: &[i64; 8], sum: i64) -> Option<i64> {
    if sum != NONE {
        return Some(sum);
    }
    let (r2t, sent) = (at(recorded, Boundary::HR2t), at(recorded, Boundary::HDataSent));
    (r2t != NONE && sent != NONE).then(|| sent - r2t)
}

/// What one side alone can tell apart, by their JSON names: its two stages, and what lies elsewhere.
pub(crate) const fn own_stages(side: Side) -> [&'static str; 3] {
    match side {
        Side::Host => [Stage::HostBlock.name(), Stage::HostDriver.name(), "beyond_host"],
        Side::Target => [Stage::TargetDriver.name(), Stage::Storage.name(), "data_wait"],
    }
}

/// A host command's latency, its two stages and all beyond the host, ns, from its times by [`Boundary::slot`], the sum
/// of its R2T turnarounds and its flags; `None` where it was cancelled, failed over or lacks times.
pub(crate) fn host_alone(recorded: &[i64; 8], r2t_turnaround: i64, flags: u16) -> Option<[i64; 4]> {
    use Boundary::{HDone, HDriver, HEnd, HQueued, HRecv, HSent};
    if flags & (Command::CANCELED | Command::FAILOVER) != 0 {
        return None;
    }
    let h = whole(recorded, Side::Host)?;
    let at = |b: Boundary| h[b.slot()];
    let answers = turnaround(recorded, r2t_turnaround).unwrap_or(0);
    let block = at(HDriver) - at(HQueued) + at(HEnd) - at(HDone);
    let driver = at(HSent) - at(HDriver) + at(HDone) - at(HRecv) + answers;
    let beyond = at(HRecv) - at(HSent) - answers;
    Some([at(HEnd) - at(HQueued), block, driver, beyond])
}

/// A target command's whole time, its two stages and the wait for the data of R2Ts, ns, from its times by
/// [`Boundary::slot`]; `None` where it lacks times.
pub(crate) fn target_alone(recorded: &[i64; 7]) -> Option<[i64; 4]> {
    use Boundary::{TDone, TRecv, TSent, TSubmit};
    let t = whole(recorded, Side::Target)?;
    let at = |b: Boundary| t[b.slot()];
    let wait = data_wait(recorded, &t).unwrap_or(0);
    let driver = at(TSubmit) - at(TRecv) - wait + at(TSent) - at(TDone);
    Some([at(TSent) - at(TRecv), driver, at(TDone) - at(TSubmit), wait])
}

impl Terms {
    /// Fills in what is lacking; `None` where a side has too few times for any stage.
    pub(crate) fn new(h: &[i64; 8], r2t_turnaround: i64, t: &[i64; 7], drive: i64) -> Option<Terms> {
        let filled_h = whole(h, Side::Host)?;
        let filled_t = whole(t, Side::Target)?;
        let wait = data_wait(t, &filled_t);
        // The host's answers lie within the target's wait. Where that is not known it stays within the
        // target's driver, answers included, and taking them from the network would count them twice.
        let turnaround = wait.and_then(|_| turnaround(h, r2t_turnaround)).unwrap_or(0);
        // What does not fit into storage was not this command's.
        let storage = at(&filled_t, Boundary::TDone) - at(&filled_t, Boundary::TSubmit);
        let drive = Some(drive).filter(|&drive| drive != NONE && drive <= storage);
        Some(Terms { h: filled_h, t: filled_t, wait: wait.unwrap_or(0), turnaround, drive })
    }

    /// The five stages.
    pub(crate) fn stages(&self) -> Stages {
        use Boundary::{HDone, HDriver, HEnd, HQueued, HRecv, HSent, TDone, TRecv, TSent, TSubmit};
        let h = |b| at(&self.h, b);
        let t = |b| at(&self.t, b);
        let host_block = (h(HDriver) - h(HQueued)) + (h(HEnd) - h(HDone));
        let host_driver = (h(HSent) - h(HDriver)) + (h(HDone) - h(HRecv)) + self.turnaround;
        let network = (h(HRecv) - h(HSent)) - self.turnaround - ((t(TSent) - t(TRecv)) - self.wait);
        let target_driver = (t(TSubmit) - t(TRecv)) - self.wait + (t(TSent) - t(TDone));
        let storage = t(TDone) - t(TSubmit);
        Stages {
            stages: [host_block, host_driver, network, target_driver, storage],
            latency: h(HEnd) - h(HQueued),
        }
    }

    /// The parts of the stages, in the order of [`SubStage::ALL`], at a clock offset (host time less
    /// target time). Only the network's two ways depend on the offset. Where the drive's part is not known,
    /// all of storage is counted with its block layer: see [`Terms::drive`].
    pub(crate) fn sub_stages(&self, offset: i64) -> [i64; SubStage::COUNT] {
        use Boundary::{HDone, HDriver, HEnd, HQueued, HRecv, HSent, TDone, TRecv, TResp, TSent, TSubmit};
        let h = |b| at(&self.h, b);
        let t = |b| at(&self.t, b);
        [
            h(HDriver) - h(HQueued),
            h(HEnd) - h(HDone),
            h(HSent) - h(HDriver),
            self.turnaround,
            h(HDone) - h(HRecv),
            t(TRecv) + offset - h(HSent),
            self.wait - self.turnaround,
            h(HRecv) - (t(TSent) + offset),
            t(TSubmit) - t(TRecv) - self.wait,
            t(TResp) - t(TDone),
            t(TSent) - t(TResp),
            t(TDone) - t(TSubmit) - self.drive.unwrap_or(0),
            self.drive.unwrap_or(0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::{FALLBACKS, NONE, Stages, SubStage, Terms, is_of_r2t};
    use proptest::prelude::*;
    use run_format::{Boundary, Stage};

    const H: [i64; 8] = [100, 110, 125, 300, 310, 900, 905, 920];
    const T: [i64; 7] = [5_000, 5_010, 5_200, 5_220, 5_600, 5_604, 5_610];

    fn stages(h: [i64; 8], sum: i64, t: [i64; 7]) -> Stages {
        Terms::new(&h, sum, &t, NONE).unwrap().stages()
    }

    #[test]
    fn an_r2t_write_by_hand() {
        let s = stages(H, 10, T);
        assert_eq!(s.latency, 820);
        assert_eq!(s.of(Stage::HostBlock), 10 + 15);
        assert_eq!(s.of(Stage::HostDriver), 15 + 5 + 10);
        assert_eq!(s.of(Stage::Storage), 380);
        assert_eq!(s.of(Stage::TargetDriver), 220 - 190 + 10);
        assert_eq!(s.of(Stage::Network), 775 - 10 - (610 - 190));
    }

    #[test]
    fn a_read_has_no_r2t_terms() {
        let (mut h, mut t) = (H, T);
        for b in [Boundary::HR2t, Boundary::HDataSent] {
            h[b.slot()] = NONE;
        }
        for b in [Boundary::TR2t, Boundary::TData] {
            t[b.slot()] = NONE;
        }
        let s = stages(h, NONE, t);
        assert_eq!(s.of(Stage::HostDriver), 20);
        assert_eq!(s.of(Stage::TargetDriver), 220 + 10);
        assert_eq!(s.of(Stage::Network), 775 - 610);
    }

    #[test]
    fn the_sum_over_several_r2ts_goes_before_the_first_ones_times() {
        assert_eq!(stages(H, 35, T).of(Stage::HostDriver), 20 + 35);
        assert_eq!(stages(H, NONE, T).of(Stage::HostDriver), 20 + 10);
    }

    #[test]
    fn without_the_targets_r2t_its_wait_stays_in_its_driver_and_the_hosts_answer_is_not_counted_twice() {
        let mut t = T;
        t[Boundary::TR2t.slot()] = NONE;
        let s = stages(H, 10, t);
        assert_eq!(s.of(Stage::TargetDriver), 220 + 10);
        assert_eq!(s.of(Stage::HostDriver), 20);
        assert_eq!(s.of(Stage::Network), 775 - 610);
    }

    #[test]
    fn the_drive_is_a_part_of_storage_where_it_is_known_and_fits() {
        let parts = |drive| {
            let terms = Terms::new(&H, 10, &T, drive).unwrap();
            let parts = terms.sub_stages(0);
            let of = |part| parts[SubStage::ALL.iter().position(|p| *p == part).unwrap()];
            (terms.drive, of(SubStage::StorageBlock), of(SubStage::StorageDrive))
        };
        assert_eq!(parts(300), (Some(300), 80, 300));
        assert_eq!(parts(NONE), (None, 380, 0));
        assert_eq!(parts(381), (None, 380, 0));
    }

    #[test]
    fn each_fallback_is_of_its_own_side_and_every_boundary_that_needs_one_has_one() {
        for (b, instead) in FALLBACKS {
            assert!(instead.iter().all(|i| i.side() == b.side() && i != b));
        }
        for b in Boundary::ALL.iter().filter(|b| !is_of_r2t(**b)) {
            assert!(FALLBACKS.iter().any(|f| f.0 == *b && !f.1.is_empty()), "{b}");
        }
    }

    #[test]
    fn a_side_without_times_has_no_stages() {
        assert!(Terms::new(&[NONE; 8], NONE, &T, NONE).is_none());
        assert!(Terms::new(&H, NONE, &[NONE; 7], NONE).is_none());
    }

    fn time() -> impl Strategy<Value = i64> {
        prop_oneof![4 => 0i64..1 << 60, 1 => Just(NONE)]
    }

    proptest! {
        #[test]
        fn stages_and_their_parts_add_up_whatever_is_lacking(
            h in proptest::array::uniform8(time()),
            t in proptest::array::uniform7(time()),
            sum in prop_oneof![Just(NONE), 0i64..1 << 40],
            drive in time(),
            offset in -(1i64 << 60)..1 << 60,
        ) {
            if let Some(terms) = Terms::new(&h, sum, &t, drive) {
                let s = terms.stages();
                prop_assert_eq!(s.stages.iter().sum::<i64>(), s.latency);
                let parts = terms.sub_stages(offset);
                for stage in Stage::ALL {
                    let of: i64 =
                        SubStage::ALL.iter().zip(parts).filter(|(p, _)| p.stage() == stage).map(|(_, v)| v).sum();
                    prop_assert_eq!(of, s.of(stage), "{}", stage);
                }
                if h[0] != NONE && h[7] != NONE {
                    prop_assert_eq!(s.latency, h[7] - h[0]);
                }
            }
        }
    }
}
