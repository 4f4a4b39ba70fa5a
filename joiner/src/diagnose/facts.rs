//! What the rules judge by: the joined commands on the host's clock with their stages, class by class, what is in
//! flight where, and the telemetry beside them. It judges nothing itself.

use super::figures::{mean, percentile};
use crate::join::{Joined, on_the_wire};
use crate::model::SubStage;
use crate::recording::{NONE, Recording};
use crate::timeline::Timeline;
use run_format::{Boundary, Operation, Queue, Side, Stage, Transport};
use std::collections::BTreeMap;

/// One joined command, on the host's clock, ns.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// It entered the host's block layer.
    pub(crate) begin: i64,
    /// It was on the wire, by the host.
    pub(crate) sent: i64,
    pub(crate) recv: i64,
    pub(crate) end: i64,
    /// It was in storage.
    pub(crate) submit: i64,
    pub(crate) done: i64,
    /// Place in [`Facts::classes`].
    pub(crate) class: usize,
    /// Place in [`Facts::queues`].
    pub(crate) queue: usize,
    pub(crate) nsid: u32,
    pub(crate) bytes: u32,
    pub(crate) slba: u64,
    pub(crate) nlb: u32,
    pub(crate) cpu: u16,
    pub(crate) r2ts: u8,
    pub(crate) latency: i64,
    /// By [`SubStage::ALL`].
    pub(crate) parts: [i64; SubStage::COUNT],
}

impl Row {
    pub(crate) fn part(&self, part: SubStage) -> i64 {
        self.parts[part as usize]
    }

    pub(crate) fn stage(&self, stage: Stage) -> i64 {
        SubStage::ALL.iter().filter(|p| p.stage() == stage).map(|&p| self.part(p)).sum()
    }

    pub(crate) fn is_write(&self, class: &Class) -> bool {
        class.operation == Operation::Write && self.bytes > 0
    }
}

/// Commands of one operation and size that succeeded.
#[derive(Clone, Debug)]
pub(crate) struct Class {
    pub(crate) operation: Operation,
    pub(crate) bytes: u32,
    pub(crate) commands: usize,
    pub(crate) median: i64,
    /// Each part's median here.
    pub(crate) medians: [i64; SubStage::COUNT],
    /// What each part takes when nothing is in the way: the baseline's median where there is one, else what the
    /// fastest tenth here does not exceed.
    pub(crate) floor: [i64; SubStage::COUNT],
    /// The same of whole stages.
    pub(crate) stage_floor: [i64; 5],
    /// Each stage's median here.
    pub(crate) stage_medians: [i64; 5],
    /// Slower commands are the tail: p99, or p90 where that is not carried.
    pub(crate) tail: i64,
    /// Whether the floor is a baseline's.
    pub(crate) has_baseline: bool,
}

impl Class {
    pub(crate) fn name(&self) -> String {
        if self.bytes == 0 {
            return self.operation.to_string();
        }
        format!("{} {}", self.operation, crate::table::bytes(self.bytes))
    }
}

/// A queue that is in both runs.
#[derive(Clone, Debug)]
pub(crate) struct QueueFacts {
    pub(crate) name: String,
    pub(crate) host: Queue,
    pub(crate) target: Queue,
    /// Its rows, by when they were sent.
    pub(crate) rows: Vec<usize>,
}

/// What was in storage over time, by the target's run: all of its commands, also those of other hosts.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight {
    begins: Vec<i64>,
    ends: Vec<i64>,
}

impl InFlight {
    pub(crate) fn of(spans: impl Iterator<Item = (i64, i64)>) -> InFlight {
        let (mut begins, mut ends): (Vec<i64>, Vec<i64>) = spans.unzip();
        begins.sort_unstable();
        ends.sort_unstable();
        InFlight { begins, ends }
    }

    /// How many had begun before a time and were not over.
    pub(crate) fn at(&self, t: i64) -> usize {
        let begun = self.begins.partition_point(|&b| b < t);
        begun.saturating_sub(self.ends.partition_point(|&e| e <= t))
    }

    pub(crate) fn len(&self) -> usize {
        self.begins.len()
    }

    /// Times in which nothing was over though something was under way, far longer than it takes from one end to the next:
    /// the machine was away, or all of storage stood still.
    pub(crate) fn standstills(&self) -> Vec<(i64, i64)> {
        /// So many times the median from one end to the next, which ends that come at random do not reach.
        const FAR: i64 = 20;
        /// And so long at least, ns: shorter is how any scheduler has it.
        const LEAST: i64 = 5_000_000;
        // It may stand still from the first command on.
        let before = || self.begins.first().into_iter().chain(&self.ends).copied();
        let gaps = || before().zip(self.ends.iter().copied());
        let mut lengths: Vec<i64> = gaps().map(|(from, to)| to - from).collect();
        lengths.sort_unstable();
        let far = percentile(&lengths, 0.5).saturating_mul(FAR).max(LEAST);
        gaps().filter(|&(from, to)| to - from >= far && self.at(from.saturating_add(1)) > 0).collect()
    }

    /// How many were over from when to when.
    pub(crate) fn over_in(&self, from: i64, to: i64) -> usize {
        let before = |t: i64| self.ends.partition_point(|&e| e < t);
        before(to).saturating_sub(before(from))
    }
}

/// What is known of a baseline: each class's median parts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Baseline {
    classes: BTreeMap<(u8, u32), ([i64; SubStage::COUNT], [i64; 5])>,
    pub(crate) name: String,
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Facts<'a> {
    pub(crate) joined: &'a Joined,
    /// By when they began.
    pub(crate) rows: Vec<Row>,
    pub(crate) classes: Vec<Class>,
    pub(crate) queues: Vec<QueueFacts>,
    /// Seconds in which both sides recorded.
    pub(crate) seconds: f64,
    /// One command in this many is there.
    pub(crate) one_in: u32,
    /// Storage by namespace.
    pub(crate) namespaces: BTreeMap<u32, InFlight>,
    pub(crate) storage: InFlight,
    pub(crate) timeline: Timeline,
    /// By how much all commands, and those of the tails, are slower than their floors, ns.
    pub(crate) excess: (f64, f64),
    /// Commands that ended with an error status.
    pub(crate) errors: usize,
}

impl<'a> Facts<'a> {
    /// Of a join. The timeline is put in later, since it is read for the time that the rows span.
    pub(crate) fn of(joined: &'a Joined, baseline: Option<&Baseline>) -> Facts<'a> {
        let (host, target) = (&joined.host, &joined.target);
        let mut queues: Vec<QueueFacts> = Vec::new();
        let mut numbers: BTreeMap<u32, usize> = BTreeMap::new();
        for link in joined.links() {
            let (Some(h), Some(t)) = (link.host.first(), link.target.first()) else { continue };
            let (Some(h_queue), Some(t_queue)) = (host.queues.get(h), target.queues.get(t)) else { continue };
            link.host.iter().for_each(|id| {
                numbers.insert(id.0, queues.len());
            });
            queues.push(QueueFacts {
                name: queue_name(h_queue),
                host: h_queue.clone(),
                target: t_queue.clone(),
                rows: Vec::new(),
            });
        }
        let mut keys: BTreeMap<(u8, u32), usize> = BTreeMap::new();
        let (mut rows, mut errors) = (Vec::with_capacity(joined.pairs().len()), 0);
        for &pair in joined.pairs() {
            let (h, t) = (pair.host_row as usize, pair.target_row as usize);
            let (Some(terms), Some(&queue)) = (joined.terms(pair), numbers.get(&host.queue[h])) else {
                continue;
            };
            if host.status[h] != 0 {
                errors += 1;
                continue;
            }
            let (offset, _) = joined.offset_of(pair);
            let next = keys.len();
            let class = *keys.entry((host.opcode[h], host.bytes[h])).or_insert(next);
            let of_host = |b: Boundary| terms.h[b.slot()];
            let of_target = |b: Boundary| terms.t[b.slot()] + offset;
            let begin = of_host(Boundary::HQueued);
            rows.push(Row {
                begin,
                sent: of_host(Boundary::HSent),
                recv: of_host(Boundary::HRecv),
                end: of_host(Boundary::HEnd),
                submit: of_target(Boundary::TSubmit),
                done: of_target(Boundary::TDone),
                class,
                queue,
                nsid: host.nsid[h],
                bytes: host.bytes[h],
                slba: host.slba[h],
                nlb: u32::from(host.nlb[h]) + 1,
                cpu: host.cpu[h],
                r2ts: host.r2ts[h].max(target.r2ts[t]),
                latency: of_host(Boundary::HEnd) - begin,
                parts: terms.sub_stages(offset),
            });
        }
        rows.sort_by_key(|row| row.begin);
        for (n, row) in rows.iter().enumerate() {
            queues[row.queue].rows.push(n);
        }
        for queue in &mut queues {
            queue.rows.sort_by_key(|&n| rows[n].sent);
        }
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); keys.len()];
        rows.iter().enumerate().for_each(|(n, row)| members[row.class].push(n));
        let mut classes: Vec<(usize, Class)> = keys
            .iter()
            .map(|(&(opcode, bytes), &place)| {
                (place, class_of(&rows, &members[place], (opcode, bytes), baseline))
            })
            .collect();
        classes.sort_by_key(|(place, _)| *place);
        let classes: Vec<Class> = classes.into_iter().map(|(_, class)| class).collect();
        let namespaces = in_storage(joined);
        let everything =
            namespaces.values().flat_map(|n| n.begins.iter().copied().zip(n.ends.iter().copied()));
        let storage = InFlight::of(everything);
        let mut facts = Facts {
            joined,
            seconds: seconds(joined, &rows),
            one_in: host.manifest.one_in.max(target.manifest.one_in).max(1),
            namespaces,
            storage,
            timeline: Timeline::default(),
            excess: (0.0, 0.0),
            errors,
            rows,
            classes,
            queues,
        };
        facts.excess = facts.shares(|_, row, class| excess_of(row, class));
        facts
    }

    /// What some figure of each row adds up to over all rows, and over those of the tails.
    pub(crate) fn shares(&self, of: impl Fn(usize, &Row, &Class) -> i64) -> (f64, f64) {
        let (mut all, mut tail) = (0.0, 0.0);
        for (n, row) in self.rows.iter().enumerate() {
            let class = &self.classes[row.class];
            let value = of(n, row, class) as f64;
            all += value;
            if row.latency > class.tail {
                tail += value;
            }
        }
        (all, tail)
    }

    pub(crate) fn class(&self, row: &Row) -> &Class {
        &self.classes[row.class]
    }

    /// From when to when its commands were, on the host's clock.
    pub(crate) fn span(&self) -> (i64, i64) {
        let from = self.rows.first().map_or(0, |row| row.begin);
        (from, self.rows.iter().map(|row| row.end).max().unwrap_or(from))
    }

    /// The mean share of a part's or parts' time in latency.
    pub(crate) fn share_of(&self, parts: &[SubStage]) -> f64 {
        let all: f64 = self.rows.iter().map(|row| row.latency as f64).sum();
        let of: f64 =
            self.rows.iter().map(|row| parts.iter().map(|&p| row.part(p) as f64).sum::<f64>()).sum();
        if all > 0.0 { of / all } else { 0.0 }
    }

    /// The share of all excess that lies in some parts: of all commands, and of the tails'.
    pub(crate) fn excess_in(&self, parts: &[SubStage]) -> (f64, f64) {
        let (all, tail) = self.shares(|_, row, class| over(row, class, parts).min(excess_of(row, class)));
        (ratio(all, self.excess.0), ratio(tail, self.excess.1))
    }

    /// What parts take altogether, as a multiple of what they take when nothing is in the way.
    pub(crate) fn beyond_floor(&self, parts: &[SubStage]) -> f64 {
        let (mut took, mut floor) = (0.0, 0.0);
        for row in &self.rows {
            let class = self.class(row);
            took += parts.iter().map(|&p| row.part(p) as f64).sum::<f64>();
            floor += parts.iter().map(|&p| class.floor[p as usize] as f64).sum::<f64>();
        }
        took / floor.max(1.0)
    }

    /// The mean size of all commands that were in storage, by the target's run: also those of other hosts.
    pub(crate) fn bytes_in_storage(&self) -> Option<f64> {
        let target = &self.joined.target;
        let was_there = |row: &usize| target.time(Boundary::TDone, *row) != NONE;
        mean((0..target.len()).filter(was_there).map(|row| f64::from(target.bytes[row])))
    }

    /// Whether any queue goes over TCP.
    pub(crate) fn has_tcp(&self) -> bool {
        self.queues.iter().any(|q| q.host.transport == Transport::Tcp)
    }

    /// Whether a boundary has a time in some commands.
    pub(crate) fn is_measured(&self, boundary: Boundary) -> bool {
        self.joined.boundaries().iter().any(|b| b.boundary == boundary && b.measured)
    }
}

/// A part's share of a whole, from 0 to 1.
pub(crate) fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 }
}

/// By how much parts of a row exceed their floors together, at least 0.
pub(crate) fn over(row: &Row, class: &Class, parts: &[SubStage]) -> i64 {
    parts.iter().map(|&p| (row.part(p) - class.floor[p as usize]).max(0)).sum()
}

/// By how much a row is slower than when nothing is in the way.
pub(crate) fn excess_of(row: &Row, class: &Class) -> i64 {
    over(row, class, SubStage::ALL)
}

/// A queue for a person.
pub(crate) fn queue_name(queue: &Queue) -> String {
    let device = queue.device.as_deref().map_or(String::new(), |d| format!("{d} "));
    format!("{device}queue {} of controller {}", queue.qid, queue.cntlid)
}

fn class_of(
    rows: &[Row],
    members: &[usize],
    (opcode, bytes): (u8, u32),
    baseline: Option<&Baseline>,
) -> Class {
    let sorted = |of: &dyn Fn(&Row) -> i64| {
        let mut values: Vec<i64> = members.iter().map(|&n| of(&rows[n])).collect();
        values.sort_unstable();
        values
    };
    let latency = sorted(&|row| row.latency);
    let (mut medians, mut floor) = ([0; SubStage::COUNT], [0; SubStage::COUNT]);
    for &part in SubStage::ALL {
        let values = sorted(&|row| row.part(part));
        medians[part as usize] = percentile(&values, 0.5);
        floor[part as usize] = percentile(&values, 0.1);
    }
    let (mut stage_floor, mut stage_medians) = ([0; 5], [0; 5]);
    for stage in Stage::ALL {
        let values = sorted(&|row| row.stage(stage));
        stage_medians[stage as usize] = percentile(&values, 0.5);
        stage_floor[stage as usize] = percentile(&values, 0.1);
    }
    let known = baseline.and_then(|b| b.classes.get(&(opcode, bytes)));
    if let Some((parts, stages)) = known {
        (floor, stage_floor) = (*parts, *stages);
    }
    let tail = if latency.len() >= 1_000 { 0.99 } else { 0.9 };
    Class {
        operation: Operation::of(opcode),
        bytes,
        commands: members.len(),
        median: percentile(&latency, 0.5),
        medians,
        floor,
        stage_floor,
        stage_medians,
        tail: percentile(&latency, tail),
        has_baseline: known.is_some(),
    }
}

impl Baseline {
    /// The fewest commands of a class that stand for it.
    const FEWEST: usize = 20;

    /// The median parts of a join's classes.
    pub(crate) fn of(joined: &Joined, name: String) -> Baseline {
        let facts = Facts::of(joined, None);
        let key = |class: &Class| (class.operation.opcode(), class.bytes);
        let known = facts.classes.iter().filter(|class| class.commands >= Baseline::FEWEST);
        let classes = known.map(|class| (key(class), (class.medians, class.stage_medians))).collect();
        Baseline { classes, name }
    }
}

/// What the target's commands did in storage, by namespace, on the host's clock.
fn in_storage(joined: &Joined) -> BTreeMap<u32, InFlight> {
    let target: &Recording = &joined.target;
    let mut spans: BTreeMap<u32, Vec<(i64, i64)>> = BTreeMap::new();
    for row in 0..target.len() {
        let (submit, done) = (target.time(Boundary::TSubmit, row), target.time(Boundary::TDone, row));
        if submit == NONE || done == NONE || done < submit {
            continue;
        }
        let at = on_the_wire(target, row).0;
        let offset = joined.host_time(at) - at;
        spans.entry(target.nsid[row]).or_default().push((submit + offset, done + offset));
    }
    spans.into_iter().map(|(nsid, spans)| (nsid, InFlight::of(spans.into_iter()))).collect()
}

/// How long both sides recorded the commands.
fn seconds(joined: &Joined, rows: &[Row]) -> f64 {
    if let Some(stretches) = joined.in_both() {
        return crate::report::length(&stretches).max(1) as f64 / 1e9;
    }
    let from = rows.iter().map(|row| row.begin).min().unwrap_or(0);
    let to = rows.iter().map(|row| row.end).max().unwrap_or(0);
    (to - from).max(1) as f64 / 1e9
}

/// The mean of a part over some rows.
pub(crate) fn mean_part<'r>(rows: impl Iterator<Item = &'r Row>, parts: &[SubStage]) -> Option<f64> {
    mean(rows.map(|row| parts.iter().map(|&p| row.part(p)).sum::<i64>() as f64))
}

/// The other side.
pub(crate) fn sides() -> [Side; 2] {
    [Side::Host, Side::Target]
}
