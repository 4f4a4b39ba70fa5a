//! Ties retransmissions to the very commands that were in flight on their queue, and tells those that nothing was lost
//! for. What they mean is the rules' to say.

use super::facts::{Facts, Row, sides};
use crate::timeline::{Line, is_of_queue};
use run_format::{Side, Stage};
use serde::Serialize;

/// Where only the growth of a counter is known, commands are tied to it whose network took at least so many times its
/// median: a sample is 100 ms long, in which most commands on the queue saw nothing of it.
const SLOW: i64 = 2;
/// Stalls that are kept; the rest is the same again.
const KEPT: usize = 10_000;

/// Retransmissions on a queue's connection, and the commands that were in flight.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stall {
    /// Whose kernel sent again.
    pub side: Side,
    /// The queue.
    pub queue: String,
    /// The connection, as that side's telemetry names it.
    pub connection: String,
    /// Between when, on the host's clock: the same twice where each one was seen.
    pub from_ns: i64,
    /// And when.
    pub to_ns: i64,
    /// Segments that were sent again.
    pub segments: f64,
    /// Of these, those that the receiver then reported to have had already (a duplicate selective acknowledgement,
    /// RFC 2883), so that nothing was lost: a probe or a timeout that came before a late acknowledgement. Null where the
    /// sender's connection was not sampled.
    pub needless: Option<f64>,
    /// Commands in flight on the queue; of a sample's growth, those that were slow in the network.
    pub commands: u64,
    /// Their median time in the network, ns; null where there are none.
    pub network_ns: Option<i64>,
    /// What is normal for the same commands: the median of their classes' medians, ns.
    pub normal_ns: Option<i64>,
    /// The longest of them, from end to end, ns.
    pub slowest_ns: Option<i64>,
    /// Which they are, by their places in the order of beginning: what the rules go by.
    #[serde(skip)]
    pub(crate) rows: Vec<usize>,
    /// Place of the queue.
    #[serde(skip)]
    pub(crate) place: usize,
}

impl Stall {
    /// Segments that were sent again and had been lost, as far as is known.
    pub(crate) fn needed(&self) -> f64 {
        (self.segments - self.needless.unwrap_or(0.0)).max(0.0)
    }
}

/// All retransmissions on connections of the queues, in order of time.
pub(super) fn stalls(facts: &Facts<'_>) -> Vec<Stall> {
    let mut stalls = Vec::new();
    for (place, queue) in facts.queues.iter().enumerate() {
        let wire = OnWire::of(facts, place);
        for side in sides() {
            let of_side = match side {
                Side::Host => &queue.host,
                Side::Target => &queue.target,
            };
            // A side that does not know its ends goes by what the other knows.
            let known = if of_side.host.is_some() { of_side } else { &queue.host };
            let mut of_side = Vec::new();
            let mut add = |object: &str, from: i64, to: i64, segments: f64| {
                let rows = in_flight(facts, &wire, (from, to));
                of_side.push(stall(facts, place, side, object, (from, to), segments, rows));
            };
            if facts.timeline.watched(side) {
                let here = facts.timeline.retransmissions().iter();
                let mut events: Vec<(i64, &str, f64)> = Vec::new();
                for event in here.filter(|e| e.side == side && is_of_queue(&e.object, side, known)) {
                    match events.last_mut() {
                        Some(last) if last.0 == event.at && last.1 == event.object => {
                            last.2 += event.segments;
                        }
                        _ => events.push((event.at, &event.object, event.segments)),
                    }
                }
                events.into_iter().for_each(|(at, object, n)| add(object, at, at, n));
            } else {
                for line in facts.timeline.lines(side, "tcp", "retransmitted") {
                    if is_of_queue(&line.object, side, known) {
                        for span in line.spans.iter().filter(|s| s.grown() > 0.5) {
                            add(&line.object, span.from, span.to, span.grown().round());
                        }
                    }
                }
            }
            of_side.sort_by_key(|stall: &Stall| stall.from_ns);
            for duplicates in facts.timeline.lines(side, "tcp", "dsack_duplicates") {
                if is_of_queue(&duplicates.object, side, known) {
                    let again = facts.timeline.line(side, "tcp", "retransmitted", &duplicates.object);
                    tell_needless(&mut of_side, duplicates, again);
                }
            }
            stalls.append(&mut of_side);
        }
    }
    stalls.sort_by_key(|stall: &Stall| (stall.from_ns, stall.place));
    stalls.truncate(KEPT);
    stalls
}

/// Tells of each stall of a connection how much of it was needless: what the receiver reports as duplicates in a sample is
/// of the segments that were sent again last before the sample's end. A report comes one round trip after them.
fn tell_needless(stalls: &mut [Stall], duplicates: &Line, again: Option<&Line>) {
    let mut here: Vec<&mut Stall> = stalls.iter_mut().filter(|s| s.connection == duplicates.object).collect();
    here.iter_mut().for_each(|stall| stall.needless = Some(0.0));
    // One event may be a packet of several segments, and the reports are of segments.
    let seen: f64 = here.iter().map(|s| s.segments).sum();
    let each = (again.and_then(Line::grown).unwrap_or(0.0) / seen.max(1.0)).max(1.0);
    for span in &duplicates.spans {
        let mut reported = span.grown().round().max(0.0) / each;
        let before = here.partition_point(|s| s.from_ns <= span.to);
        for stall in here[..before].iter_mut().rev() {
            if reported <= 0.0 {
                break;
            }
            let taken = reported.min(stall.needed());
            stall.needless = Some(stall.needless.unwrap_or(0.0) + taken);
            reported -= taken;
        }
    }
}

/// The commands of a queue on the wire, to be looked up by time.
#[derive(Debug)]
pub(super) struct OnWire<'f> {
    facts: &'f Facts<'f>,
    /// By when they were sent.
    rows: &'f [usize],
    /// The longest was on the wire for so long.
    longest: i64,
}

impl<'f> OnWire<'f> {
    pub(super) fn of(facts: &'f Facts<'f>, place: usize) -> OnWire<'f> {
        let rows = facts.queues[place].rows.as_slice();
        let longest = rows.iter().map(|&n| facts.rows[n].recv - facts.rows[n].sent).max().unwrap_or(0);
        OnWire { facts, rows, longest }
    }

    /// Those on the wire at some time from when to when.
    pub(super) fn between(&self, from: i64, to: i64) -> impl Iterator<Item = usize> {
        let until = self.rows.partition_point(|&n| self.facts.rows[n].sent <= to);
        let since =
            self.rows.partition_point(|&n| self.facts.rows[n].sent < from.saturating_sub(self.longest));
        let rows = self.rows.get(since..until).unwrap_or(&[]).iter().copied();
        rows.filter(move |&n| self.facts.rows[n].recv >= from)
    }

    /// From when the first was sent until the last came back.
    pub(super) fn span(&self) -> (i64, i64) {
        let first = self.rows.first().map_or(0, |&n| self.facts.rows[n].sent);
        (first, self.rows.iter().map(|&n| self.facts.rows[n].recv).max().unwrap_or(first))
    }
}

/// The commands on the wire between when and when; of a stretch of time, those that were slow.
fn in_flight(facts: &Facts<'_>, wire: &OnWire<'_>, (from, to): (i64, i64)) -> Vec<usize> {
    let slow = |row: &Row| row.stage(Stage::Network) > SLOW * network_median(facts, row);
    wire.between(from, to).filter(|&n| from == to || slow(&facts.rows[n])).collect()
}

/// The median of the network's stage in a command's class.
pub(super) fn network_median(facts: &Facts<'_>, row: &Row) -> i64 {
    facts.class(row).stage_medians[Stage::Network as usize].max(1)
}

fn stall(
    facts: &Facts<'_>,
    place: usize,
    side: Side,
    object: &str,
    (from_ns, to_ns): (i64, i64),
    segments: f64,
    rows: Vec<usize>,
) -> Stall {
    let median = |of: &dyn Fn(&Row) -> i64| {
        let mut values: Vec<i64> = rows.iter().map(|&n| of(&facts.rows[n])).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied()
    };
    Stall {
        side,
        queue: facts.queues[place].name.clone(),
        connection: object.to_owned(),
        from_ns,
        to_ns,
        segments,
        needless: None,
        commands: rows.len() as u64,
        network_ns: median(&|row| row.stage(Stage::Network)),
        normal_ns: median(&|row| network_median(facts, row)),
        slowest_ns: rows.iter().map(|&n| facts.rows[n].latency).max(),
        rows,
        place,
    }
}
