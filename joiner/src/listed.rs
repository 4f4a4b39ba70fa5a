//! The slowest commands of a report, one by one, with every stage and part. Few are kept, the same ones whether the runs
//! are held in memory or read in parts. What makes commands slow is not judged here: `tails` does that.

use crate::model::{Stages, SubStage, Terms};
use crate::recording::Recording;
use crate::report::{Groups, began};
use run_format::{Command, Operation, Side, Stage};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One of the slowest commands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlowCommand {
    /// When it came (`h_driver`; `t_recv` without a host), on the clock of the run that it is of: telemetry of that run at
    /// this time is of this moment.
    pub at_ns: u64,
    /// That, from the beginning of its recording.
    pub at_seconds: f64,
    /// What it does.
    pub operation: Operation,
    /// Bytes of data that it carries.
    pub bytes: u32,
    /// Status code type and status code, `SCT << 8 | SC`; 0 is success.
    pub status: u16,
    /// The queue that it went through.
    pub queue: String,
    /// Its identifier on that queue; null where the source does not tell.
    pub cid: Option<u16>,
    /// The SQE's opcode.
    pub opcode: u8,
    /// The SQE's namespace identifier.
    pub nsid: u32,
    /// The starting LBA, where it has one.
    pub slba: u64,
    /// The number of blocks less one as it stands on the wire, where it has one.
    pub nlb: u16,
    /// The CPU that it was handed to the driver on (host), or received on (target).
    pub cpu: u16,
    /// The whole time, as a report's latency.
    pub latency_ns: i64,
    /// The five stages; null where this report can not know it.
    #[serde(serialize_with = "by_stage")]
    pub stages: [Option<i64>; 5],
    /// Without a target: network, target and storage together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beyond_host_ns: Option<i64>,
    /// Without a host: the wait for the data of R2Ts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_wait_ns: Option<i64>,
    /// The parts of the stages in the order of its way, of a joined command; those of storage where the drive's is known.
    #[serde(serialize_with = "by_part", skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<(SubStage, i64)>,
    /// What one of the network's ways is too long at most the other is too short, by the clocks' uncertainty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uncertainty_ns: Option<i64>,
}

fn by_stage<S: Serializer>(stages: &[Option<i64>; 5], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(Stage::ALL.iter().zip(stages).map(|(stage, ns)| (stage.name(), ns)))
}

fn by_part<S: Serializer>(parts: &[(SubStage, i64)], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(parts.len()))?;
    parts.iter().try_for_each(|(part, ns)| map.serialize_entry(part.name(), ns))?;
    map.end()
}

/// What its time was made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    /// Of a pair: stages, parts, the clock's uncertainty, and whether the drive's part is known.
    Joined { stages: [i64; 5], parts: [i64; SubStage::COUNT], uncertainty: i64, split: bool },
    /// Of one side: its two stages, and the rest.
    Alone([i64; 3]),
}

/// What is kept of a command until the report is made. All of it, since its row goes away when runs are read in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    latency: i64,
    at: i64,
    queue: u32,
    cid: u16,
    opcode: u8,
    nsid: u32,
    slba: u64,
    nlb: u16,
    bytes: u32,
    status: u16,
    cpu: u16,
    flags: u16,
    made: Made,
}

impl Kept {
    fn of(run: &Recording, row: usize, latency: i64, made: Made) -> Kept {
        Kept {
            latency,
            at: began(run, row),
            queue: run.queue[row],
            cid: run.cid[row],
            opcode: run.opcode[row],
            nsid: run.nsid[row],
            slba: run.slba[row],
            nlb: run.nlb[row],
            bytes: run.bytes[row],
            status: run.status[row],
            cpu: run.cpu[row],
            flags: run.flags[row],
            made,
        }
    }

    /// The slower one is more; of two that are equally slow the earlier one. The rest makes the choice the same in
    /// whatever order commands come.
    fn order(&self) -> (i64, Reverse<i64>, u32, u16) {
        (self.latency, Reverse(self.at), self.queue, self.cid)
    }
}

impl PartialOrd for Kept {
    fn partial_cmp(&self, other: &Kept) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Kept {
    fn cmp(&self, other: &Kept) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

/// The slowest commands so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listed {
    most: usize,
    kept: BinaryHeap<Reverse<Kept>>,
}

impl Listed {
    /// Of at most so many.
    pub(crate) fn of(most: usize) -> Listed {
        Listed { most, kept: BinaryHeap::new() }
    }

    /// Whether a command of that latency may be among them.
    pub(crate) fn takes(&self, latency: i64) -> bool {
        self.most > 0
            && (self.kept.len() < self.most
                || self.kept.peek().is_some_and(|least| least.0.latency <= latency))
    }

    /// Adds a pair's command. `offset` is the clock's and its uncertainty.
    pub(crate) fn add_pair(
        &mut self,
        host: &Recording,
        row: usize,
        terms: &Terms,
        stages: &Stages,
        offset: impl Fn() -> (i64, i64),
    ) {
        if !self.takes(stages.latency) {
            return;
        }
        let (offset, uncertainty) = offset();
        let parts = terms.sub_stages(offset);
        let made = Made::Joined { stages: stages.stages, parts, uncertainty, split: terms.drive.is_some() };
        self.add(Kept::of(host, row, stages.latency, made));
    }

    /// Adds a command of one side, from its whole time, its two stages and the rest.
    pub(crate) fn add_alone(&mut self, run: &Recording, row: usize, figures: &[i64; 4]) {
        let [latency, made @ ..] = *figures;
        if self.takes(latency) {
            self.add(Kept::of(run, row, latency, Made::Alone(made)));
        }
    }

    fn add(&mut self, command: Kept) {
        self.kept.push(Reverse(command));
        if self.kept.len() > self.most {
            self.kept.pop();
        }
    }

    /// Adds what another kept.
    pub(crate) fn merge(&mut self, other: Listed) {
        other.kept.into_iter().for_each(|Reverse(command)| self.add(command));
    }

    /// The commands, slowest first. `run` is the one whose rows were added.
    pub(crate) fn commands(self, run: &Recording, groups: &Groups) -> Vec<SlowCommand> {
        let start = run.manifest.window.start_ns.as_i64();
        let side = run.manifest.side;
        // The greatest comes first, as the heap's order is turned around.
        let kept = self.kept.into_sorted_vec();
        kept.into_iter().map(|Reverse(command)| told(&command, start, side, groups)).collect()
    }
}

fn told(command: &Kept, start: i64, side: Side, groups: &Groups) -> SlowCommand {
    let mut stages = [None; 5];
    let (mut beyond_host_ns, mut data_wait_ns, mut uncertainty_ns) = (None, None, None);
    let mut parts = Vec::new();
    match command.made {
        Made::Joined { stages: all, parts: known, uncertainty, split } => {
            stages = all.map(Some);
            uncertainty_ns = Some(uncertainty);
            let told = SubStage::ALL.iter().copied().zip(known);
            parts.extend(told.filter(|(part, _)| split || part.stage() != Stage::Storage));
        }
        Made::Alone([first, second, rest]) => {
            let (at, place) = match side {
                Side::Host => ([Stage::HostBlock, Stage::HostDriver], &mut beyond_host_ns),
                Side::Target => ([Stage::TargetDriver, Stage::Storage], &mut data_wait_ns),
            };
            *place = Some(rest);
            for (stage, ns) in at.into_iter().zip([first, second]) {
                stages[stage as usize] = Some(ns);
            }
        }
    }
    SlowCommand {
        at_ns: u64::try_from(command.at).unwrap_or(0),
        at_seconds: (command.at - start) as f64 / 1e9,
        operation: Operation::of(command.opcode),
        bytes: command.bytes,
        status: command.status,
        queue: groups.queue(command.queue),
        cid: (command.flags & Command::NO_CID == 0).then_some(command.cid),
        opcode: command.opcode,
        nsid: command.nsid,
        slba: command.slba,
        nlb: command.nlb,
        cpu: command.cpu,
        latency_ns: command.latency,
        stages,
        beyond_host_ns,
        data_wait_ns,
        parts,
        uncertainty_ns,
    }
}
