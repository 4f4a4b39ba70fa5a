//! Joins a host run and a target run: links their queues, finds the clock, matches the commands, and
//! accounts for every command that it sets aside.

use crate::clock::{self, Clock, Keys, Search};
use crate::describe::{describe_of, wall_clock};
use crate::error::Error;
use crate::lanes::{Item, Lanes, lane};
use crate::matching::{self, Fate, Matching};
use crate::model::{Stages, SubStage, Terms, filled, is_of_r2t};
use crate::order;
use crate::queues::{Link, LinkedBy, Links, link};
use crate::recording::{NONE, Recording};
use crate::threads;
use rayon::prelude::*;
use run_format::{Boundary, Cid, Command, Manifest, Nanos, Run, Side, sampling};
use std::collections::BTreeMap;

/// What a join may assume.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct JoinOptions {
    /// Find the clock offset from the commands even where both runs come from one boot of one machine, whose
    /// clock they share.
    pub ignore_boot_id: bool,
}

/// Why a command was set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SetAside {
    /// It was not wholly within the other side's recording.
    Outside,
    /// It was within both recordings and the other side has no record of it: lost there.
    Lost,
    /// The other side samples fewer commands, and not this one.
    Unsampled,
    /// The other run does not have its queue.
    OtherQueue,
    /// More than one command of the other side may be the same.
    Ambiguous,
    /// Its times contradict its partner's: a wrong hook, or not its partner.
    Implausible,
    /// It was cancelled, failed over, or ended without the times that stages need.
    Unfinished,
}

impl SetAside {
    /// All reasons.
    pub const ALL: [SetAside; 7] = [
        SetAside::Outside,
        SetAside::Lost,
        SetAside::Unsampled,
        SetAside::OtherQueue,
        SetAside::Ambiguous,
        SetAside::Implausible,
        SetAside::Unfinished,
    ];

    /// The JSON name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            SetAside::Outside => "outside",
            SetAside::Lost => "lost",
            SetAside::Unsampled => "unsampled",
            SetAside::OtherQueue => "other_queue",
            SetAside::Ambiguous => "ambiguous",
            SetAside::Implausible => "implausible",
            SetAside::Unfinished => "unfinished",
        }
    }

    /// What it means, for a person.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            SetAside::Outside => "outside the other side's recording",
            SetAside::Lost => "no record of it on the other side",
            SetAside::Unsampled => "not sampled on the other side",
            SetAside::OtherQueue => "its queue is not in the other run",
            SetAside::Ambiguous => "more than one possible partner",
            SetAside::Implausible => "its times contradict its partner's",
            SetAside::Unfinished => "cancelled, failed over or without the times needed",
        }
    }
}

/// How many commands of one side were set aside, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aside([u64; SetAside::ALL.len()]);

impl Aside {
    pub(crate) fn count(&mut self, reason: SetAside, n: u64) {
        self.0[reason as usize] += n;
    }

    /// Those of one reason.
    #[must_use]
    pub fn of(&self, reason: SetAside) -> u64 {
        self.0[reason as usize]
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Those of two sides together.
    #[must_use]
    pub fn with(&self, other: &Aside) -> Aside {
        Aside(std::array::from_fn(|n| self.0[n] + other.0[n]))
    }
}

/// Where every command went. On each side `commands = joined + aside.total()`, exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounting {
    /// Commands of the host run.
    pub host_commands: u64,
    /// Commands of the target run.
    pub target_commands: u64,
    /// Pairs.
    pub joined: u64,
    /// Host commands without a place in a pair.
    pub host: Aside,
    /// Target commands without a place in a pair.
    pub target: Aside,
}

/// The relation of the two clocks, as the report shows it.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct ClockFigures {
    /// Host time less target time in the middle of the joined commands, ns.
    pub offset_ns: i64,
    /// The offset is known within this much either way: the median over the joined commands, ns.
    pub uncertainty_ns: i64,
    /// The largest uncertainty of any joined command, ns.
    pub uncertainty_max_ns: i64,
    /// Drift of the host's clock against the target's, parts per million.
    pub drift_ppm: f64,
    /// Both runs come from one boot of one machine and share its clock.
    pub shared: bool,
}

/// How one boundary was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundaryFigures {
    /// The boundary.
    pub boundary: Boundary,
    /// What it was taken with, by the run's manifest.
    pub hook: Option<String>,
    /// Whether the hook is the boundary's own moment, and gave at least one time.
    pub measured: bool,
    /// Commands that passed it and have no time for it.
    pub fell_back: u64,
}

/// One host command and its target command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Row of the host command, in the order in which [`Run::commands`] has them.
    pub host_row: u32,
    /// Row of the target command.
    pub target_row: u32,
}

/// A host run and a target run, joined.
#[derive(Debug)]
pub struct Joined {
    pub(crate) host: Recording,
    pub(crate) target: Recording,
    pub(crate) pairs: Vec<Pair>,
    accounting: Accounting,
    clock: Option<Clock>,
    shared_clock: bool,
    links: Links,
    boundaries: Vec<BoundaryFigures>,
    pub(crate) notes: Vec<String>,
}

/// Joins a host run and a target run.
///
/// Commands are matched only beyond doubt; what is not is counted by reason in [`Joined::accounting`]. When
/// nothing can be matched the join is empty and says why in its report.
///
/// # Errors
/// [`Error::SameSide`], [`Error::WrongSide`] (the runs are given the wrong way round), [`Error::NoSharedQueue`],
/// [`Error::NoOverlap`], [`Error::TooMany`], or what reading a run ended with.
pub fn join(host: &Run, target: &Run, options: &JoinOptions) -> Result<Joined, Error> {
    threads::ready()?;
    let (host, target) = rayon::join(|| Recording::read(host), || Recording::read(target));
    join_recordings(host?, target?, options)
}

pub(crate) fn join_recordings(
    host: Recording,
    target: Recording,
    options: &JoinOptions,
) -> Result<Joined, Error> {
    let (links, notes) = linked(&host, &target, (host.len() as u64, target.len() as u64))?;
    join_linked(host, target, links, notes, options)
}

/// The queues that both runs have, and what is to be noted of the others. `rows`: the commands of each run, which need
/// not be in memory.
pub(crate) fn linked(
    host: &Recording,
    target: &Recording,
    rows: (u64, u64),
) -> Result<(Links, Vec<String>), Error> {
    let (of_host, of_target) = (|| describe_of(host, rows.0), || describe_of(target, rows.1));
    match (host.manifest.side, target.manifest.side) {
        (Side::Host, Side::Target) => {}
        (Side::Target, Side::Host) => {
            return Err(Error::WrongSide { wanted: Side::Host, run: of_host() });
        }
        (side, _) => {
            return Err(Error::SameSide { side, first: of_host(), second: of_target() });
        }
    }
    let links = link(&host.queues, &target.queues);
    if links.links.is_empty() {
        return Err(Error::NoSharedQueue { host: of_host(), target: of_target() });
    }
    let mut notes = Vec::new();
    if links.unclear > 0 {
        notes.push(format!(
            "{} queues fit more than one queue of the other run by name and port, so their commands were set aside",
            links.unclear
        ));
    }
    Ok((links, notes))
}

/// Whether the two runs were recorded on one clock.
pub(crate) fn is_one_clock(host: &Manifest, target: &Manifest, options: &JoinOptions) -> bool {
    let boot = &host.machine.boot_id;
    !boot.is_empty() && *boot == target.machine.boot_id && !options.ignore_boot_id
}

/// What a search that found no clock has to tell: in so many of so many commands of either side.
pub(crate) fn no_clock(
    search: &Search,
    host: &Recording,
    target: &Recording,
    items: (usize, usize),
    rows: (u64, u64),
) -> Result<Option<String>, Error> {
    match search {
        Search::Found(_) => Ok(None),
        Search::Ambiguous { first, second } => Ok(Some(format!(
            "the clock offset is ambiguous: {} ns explains {} of {} commands and {} ns explains {} of {}, \
             so nothing was matched; record longer, without sampling, or with a load whose addresses differ",
            first.offset, first.explained, first.of, second.offset, second.explained, second.of
        ))),
        Search::Nothing { first } => {
            // A few commands may disagree by chance, whatever the wall clocks say.
            let many = items.0.min(items.1) >= 20;
            if many && apart(&host.manifest, &target.manifest) {
                return Err(Error::NoOverlap {
                    host: describe_of(host, rows.0),
                    target: describe_of(target, rows.1),
                });
            }
            Ok((items.0.min(items.1) > 0).then(|| {
                format!(
                    "only {} commands of the two runs agree with one clock offset, which is too few to be sure \
                     of it: were both sides recorded while the same load ran?",
                    first.explained
                )
            }))
        }
    }
}

/// What is to be noted of runs whose segments could not all be read.
pub(crate) fn note_broken(run: &Recording, notes: &mut Vec<String>) {
    if run.broken > 0 {
        notes.push(format!(
            "{}: {} command segments are cut or no Parquet files and were left out",
            run.directory.display(),
            run.broken
        ));
    }
}

fn join_linked(
    host: Recording,
    target: Recording,
    links: Links,
    mut notes: Vec<String>,
    options: &JoinOptions,
) -> Result<Joined, Error> {
    let exact = exact_links(&host, &target, &links);
    let one_in = host.manifest.one_in.max(target.manifest.one_in);
    let by_order = order::applies(&target);
    let (h, t) = rayon::join(
        || Prepared::new(&host, &links.host, one_in, &exact, by_order),
        || Prepared::new(&target, &links.target, one_in, &exact, by_order),
    );
    let (mut h, mut t) = (h, t);

    let shared_clock = is_one_clock(&host.manifest, &target.manifest, options);
    let found = if shared_clock {
        let clock = Clock::same();
        let matching = if by_order {
            order::matching(&host, &h.lanes, &t.lanes, &clock, &order::stretches(&target, window(&target)))
        } else {
            matching::exactly(&h.lanes, &t.lanes)
        };
        Some((clock, matching))
    } else {
        let keys = match (by_order, exact.iter().all(|&e| e)) {
            (true, _) => Keys::OfMany,
            (false, true) => Keys::Certain,
            (false, false) => Keys::OneAtATime,
        };
        match clock::search(&h.lanes, &t.lanes, keys) {
            Search::Found(line) if by_order => {
                order::matched_around(&host, &target, &h.lanes, &t.lanes, &line, window(&target)).or_else(|| {
                    notes.push(
                        "the runs contradict the clock offset that most of their commands agree with, so nothing was \
                         matched; record longer, or with --source hybrid, which knows each command by name"
                            .into(),
                    );
                    None
                })
            }
            Search::Found(line) => Some(matching::along(&h.lanes, &t.lanes, &line)),
            none => {
                let items = (h.lanes.items.len(), t.lanes.items.len());
                let rows = (host.len() as u64, target.len() as u64);
                notes.extend(no_clock(&none, &host, &target, items, rows)?);
                None
            }
        }
    };

    let (clock, pairs) = match found {
        Some((clock, matching)) => {
            let pairs = settle(&host, &target, &mut h, &mut t, &matching, &clock);
            (Some(clock), pairs)
        }
        None => {
            for side in [&mut h, &mut t] {
                for item in &side.lanes.items {
                    side.fates[item.row as usize] = Row::Aside(SetAside::Ambiguous);
                }
            }
            (None, Vec::new())
        }
    };
    let accounting = Accounting {
        host_commands: host.len() as u64,
        target_commands: target.len() as u64,
        joined: pairs.len() as u64,
        host: h.aside(),
        target: t.aside(),
    };
    [&host, &target].into_iter().for_each(|run| note_broken(run, &mut notes));
    let boundaries = boundary_figures(&host, &target, &pairs);
    Ok(Joined { host, target, pairs, accounting, clock, shared_clock, links, boundaries, notes })
}

/// Whether the wall clocks say that the runs were recorded at different times.
pub(crate) fn apart(host: &Manifest, target: &Manifest) -> bool {
    match (wall_clock(host), wall_clock(target)) {
        (Some(h), Some(t)) => h.1 < t.0 || t.1 < h.0,
        _ => false,
    }
}

/// For each link, whether every command of it has a place in the TCP stream on both sides and nothing
/// between them rewrites the stream: the host's port is the same on both.
fn exact_links(host: &Recording, target: &Recording, links: &Links) -> Vec<bool> {
    let mut exact: Vec<bool> = links.links.iter().map(|l| l.by == LinkedBy::Port).collect();
    if host.lacks_positions() || target.lacks_positions() {
        exact.fill(false);
    }
    if exact.iter().any(|&e| e) {
        for (run, queues) in [(host, &links.host), (target, &links.target)] {
            let links = by_queue(queues);
            for row in 0..run.len() {
                if run.stream_position(row) == NONE
                    && let Some(link) = link_of(&links, run.queue[row])
                {
                    exact[link as usize] = false;
                }
            }
        }
    }
    exact
}

const NO_LINK: u32 = u32::MAX;

/// The link of each queue by the queue's number, where numbers are small, as they are in a run.
pub(crate) fn by_queue(queues: &BTreeMap<run_format::QueueId, u32>) -> Vec<u32> {
    let most = queues.keys().next_back().map_or(0, |q| q.0 as usize + 1).min(1 << 24);
    let mut links = vec![NO_LINK; most];
    for (id, &link) in queues {
        if let Some(place) = links.get_mut(id.0 as usize) {
            *place = link;
        }
    }
    links
}

pub(crate) fn link_of(links: &[u32], queue: u32) -> Option<u32> {
    links.get(queue as usize).copied().filter(|&l| l != NO_LINK)
}

/// Where a row stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Row {
    Joined,
    Aside(SetAside),
}

/// One side made ready for matching.
#[derive(Debug)]
struct Prepared {
    lanes: Lanes,
    fates: Vec<Row>,
}

impl Prepared {
    fn new(
        run: &Recording,
        queues: &BTreeMap<run_format::QueueId, u32>,
        one_in: u32,
        exact: &[bool],
        by_order: bool,
    ) -> Prepared {
        let keep = Keep { links: &by_queue(queues), one_in, exact, by_order };
        let mut fates = vec![Row::Aside(SetAside::Lost); run.len()];
        let items = keep.items(run, |row, reason| fates[row] = Row::Aside(reason));
        Prepared { lanes: Lanes::new(items), fates }
    }

    fn aside(&self) -> Aside {
        let mut aside = Aside::default();
        for fate in &self.fates {
            if let Row::Aside(reason) = fate {
                aside.0[*reason as usize] += 1;
            }
        }
        aside
    }
}

/// Which commands of a run are to be matched, and by what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keep<'a> {
    /// Links by the numbers of this side's queues, of [`by_queue`].
    pub(crate) links: &'a [u32],
    /// One command in so many, by the shared hash.
    pub(crate) one_in: u32,
    /// The links whose commands' places in the TCP stream count.
    pub(crate) exact: &'a [bool],
    /// Whether the target knows no cids.
    pub(crate) by_order: bool,
}

impl Keep<'_> {
    /// What is to be matched. `aside` is told of the other rows.
    pub(crate) fn items(&self, run: &Recording, mut aside: impl FnMut(usize, SetAside)) -> Vec<Item> {
        let Keep { links, one_in, exact, by_order } = *self;
        let limit = (run.manifest.one_in.max(1) < one_in).then(|| sampling::limit(one_in));
        let mut items = Vec::with_capacity(if limit.is_none() { run.len() } else { 0 });
        let on_the_wire = OnTheWire::of(run);
        for row in 0..run.len() {
            let Some(link) = link_of(links, run.queue[row]) else {
                aside(row, SetAside::OtherQueue);
                continue;
            };
            let (cid, opcode, nsid) = (run.cid[row], run.opcode[row], run.nsid[row]);
            let (slba, nlb) = (run.slba[row], run.nlb[row]);
            // What the sparser side kept is kept on the denser side too: the limits of the hash nest.
            if !by_order && limit.is_some_and(|l| sampling::hash(Cid(cid), opcode, nsid, slba, nlb) > l) {
                aside(row, SetAside::Unsampled);
                continue;
            }
            let (begin, mut end) = on_the_wire.at(row);
            if by_order {
                match run.manifest.side {
                    Side::Host if !order::arrived(run, row) => end = NONE,
                    Side::Host => {}
                    Side::Target => end = order::end(run, row),
                }
            }
            if begin == NONE || end == NONE {
                aside(row, SetAside::Unfinished);
                continue;
            }
            if end < begin {
                aside(row, SetAside::Implausible);
                continue;
            }
            let position = if exact[link as usize] { run.stream_position(row) } else { NONE };
            let (cid, key) = match by_order {
                true => (0, order::key(opcode, slba, nlb)),
                false => (cid, key(opcode, nsid, slba, nlb, position)),
            };
            items.push(Item { lane: lane(link, cid), key, begin, end, row: row as u32 });
        }
        items
    }
}

/// From when to when a command was in the network's or the other side's hands (host), or in this side's
/// (target). A fallback makes the host's interval wider and the target's narrower, so that the one always
/// holds the other.
pub(crate) fn on_the_wire(run: &Recording, row: usize) -> (i64, i64) {
    OnTheWire::of(run).at(row)
}

/// The same of many commands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnTheWire<'a> {
    run: &'a Recording,
    begin: &'a [i64],
    end: &'a [i64],
}

impl OnTheWire<'_> {
    pub(crate) fn of(run: &Recording) -> OnTheWire<'_> {
        let (begin, end) = match run.manifest.side {
            Side::Host => (Boundary::HSent, Boundary::HRecv),
            Side::Target => (Boundary::TRecv, Boundary::TSent),
        };
        OnTheWire { run, begin: run.times_at(begin), end: run.times_at(end) }
    }

    /// Of a command.
    #[inline]
    pub(crate) fn at(&self, row: usize) -> (i64, i64) {
        match (self.begin.get(row), self.end.get(row)) {
            (Some(&begin), Some(&end)) if begin != NONE && end != NONE => (begin, end),
            _ => instead(self.run, row),
        }
    }
}

/// When a command was on the wire as far as other boundaries tell.
#[cold]
fn instead(run: &Recording, row: usize) -> (i64, i64) {
    match run.manifest.side {
        Side::Host => {
            let h = filled(run.times::<8>(row), Side::Host);
            (h[Boundary::HSent.slot()], h[Boundary::HRecv.slot()])
        }
        Side::Target => {
            let t = filled(run.times::<7>(row), Side::Target);
            (t[Boundary::TRecv.slot()], t[Boundary::TSent.slot()])
        }
    }
}

/// A hash of what both sides see of a command on the wire, besides queue and cid.
fn key(opcode: u8, nsid: u32, slba: u64, nlb: u16, position: i64) -> u64 {
    // The finaliser of SplitMix64, once a word.
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let first = u64::from(opcode) << 48 | u64::from(nlb) << 32 | u64::from(nsid);
    let mut h = mix(first.wrapping_add(0x9e37_79b9_7f4a_7c15));
    h = mix(h ^ slba);
    if position == NONE { h } else { mix(h ^ position as u64) }
}

/// The terms and stages of a pair that was matched, or why it is set aside.
pub(crate) fn judge(
    host: &Recording,
    h: usize,
    target: &Recording,
    t: usize,
) -> Result<(Terms, Stages), SetAside> {
    const GONE: u16 = Command::CANCELED | Command::FAILOVER;
    if !same_on_the_wire(host, h, target, t) {
        return Err(SetAside::Ambiguous);
    }
    if (host.flags[h] | target.flags[t]) & GONE != 0 {
        return Err(SetAside::Unfinished);
    }
    let terms = Terms::new(&host.times(h), host.r2t_turnaround(h), &target.times(t), target.drive(t))
        .ok_or(SetAside::Unfinished)?;
    let stages = terms.stages();
    if stages.stages.iter().any(|&s| s < 0) { Err(SetAside::Implausible) } else { Ok((terms, stages)) }
}

/// Turns what was matched into pairs and every other row's reason.
fn settle(
    host: &Recording,
    target: &Recording,
    h: &mut Prepared,
    t: &mut Prepared,
    matching: &Matching,
    clock: &Clock,
) -> Vec<Pair> {
    let verdicts: Vec<Option<SetAside>> = matching
        .pairs
        .par_iter()
        .with_min_len(4096)
        .map(|&(hr, tr)| judge(host, hr as usize, target, tr as usize).err())
        .collect();
    let mut pairs = Vec::with_capacity(verdicts.len());
    // How long before t_recv and after t_sent the host knew of the commands.
    let (mut leads, mut tails) = (Vec::new(), Vec::new());
    let sampled = (matching.pairs.len() / 65_536).max(1);
    for (n, (&(hr, tr), verdict)) in matching.pairs.iter().zip(&verdicts).enumerate() {
        let fate = match verdict {
            None => {
                pairs.push(Pair { host_row: hr, target_row: tr });
                Row::Joined
            }
            Some(reason) => Row::Aside(*reason),
        };
        h.fates[hr as usize] = fate;
        t.fates[tr as usize] = fate;
        if n % sampled == 0 {
            let (lead, tail) = around(host, hr as usize, target, tr as usize, clock);
            leads.push(lead);
            tails.push(tail);
        }
    }
    let (lead, tail) = (longest(leads), longest(tails));

    let slices = [host.slices.as_deref(), target.slices.as_deref()];
    let inside = Inside { clock, host: window(host), target: window(target), slices, lead, tail };
    for (n, fate) in matching.host.iter().enumerate().filter(|(_, f)| **f != Fate::Matched) {
        let item = &h.lanes.items[n];
        if let Some(reason) = unmatched(*fate, || inside.of_host(item.begin, item.end)) {
            h.fates[item.row as usize] = Row::Aside(reason);
        }
    }
    for (n, fate) in matching.target.iter().enumerate().filter(|(_, f)| **f != Fate::Matched) {
        let item = &t.lanes.items[n];
        if let Some(reason) = unmatched(*fate, || inside.of_target(item.begin, item.end)) {
            t.fates[item.row as usize] = Row::Aside(reason);
        }
    }
    pairs
}

/// How long before `t_recv` and after `t_sent` the host knew of a pair's command.
pub(crate) fn around(host: &Recording, h: usize, target: &Recording, t: usize, clock: &Clock) -> (i64, i64) {
    let (recv, sent) = on_the_wire(target, t);
    let times = filled(host.times::<8>(h), Side::Host);
    let lead = recv + clock.offset(recv).0 - times[Boundary::HQueued.slot()];
    (lead, times[Boundary::HEnd.slot()] - sent - clock.offset(sent).0)
}

/// What all but one in a thousand do not exceed, and at least 0.
pub(crate) fn longest(mut v: Vec<i64>) -> i64 {
    let n = v.len() - v.len() / 1_000;
    if n == 0 { 0 } else { (*v.select_nth_unstable(n - 1).1).max(0) }
}

/// Tells whether the other side was recording all along a command that it has no record of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inside<'a> {
    pub(crate) clock: &'a Clock,
    /// From when to when each side recorded, on its own clock.
    pub(crate) host: (i64, i64),
    pub(crate) target: (i64, i64),
    /// The slices in which the host and the target recorded, where they did not throughout.
    pub(crate) slices: [Option<&'a [(i64, i64)]>; 2],
    /// How long before the target and after it the host knows of a command.
    pub(crate) lead: i64,
    pub(crate) tail: i64,
}

impl Inside<'_> {
    /// Of a host's command, by when it was on the wire.
    pub(crate) fn of_host(&self, begin: i64, end: i64) -> bool {
        let (begin, end) = (self.clock.target_time(begin), self.clock.target_time(end));
        begin >= self.target.0 && end <= self.target.1 && within_one(self.slices[1], begin, end)
    }

    /// Of a target's command.
    pub(crate) fn of_target(&self, begin: i64, end: i64) -> bool {
        let begin = begin + self.clock.offset(begin).0 - self.lead;
        let end = end + self.clock.offset(end).0 + self.tail;
        begin >= self.host.0 && end <= self.host.1 && within_one(self.slices[0], begin, end)
    }

    /// From when to when both sides were armed at once, on the host's clock and in order; `None` where both
    /// were throughout. A pair's command was recorded in such a time, so rates of pairs are those of these.
    pub(crate) fn in_both(&self) -> Option<Vec<(i64, i64)>> {
        let [host, target] = self.slices;
        if host.is_none() && target.is_none() {
            return None;
        }
        let of_host = host.map_or_else(|| vec![self.host], <[_]>::to_vec);
        let of_target = target.map_or_else(|| vec![self.target], <[_]>::to_vec);
        let as_host = |t: i64| t + self.clock.offset(t).0;
        let of_target: Vec<_> =
            of_target.into_iter().map(|(from, to)| (as_host(from), as_host(to))).collect();
        Some(order::overlaps(&of_host, &of_target))
    }
}

/// Whether a time lies whole within one of the slices, which are in order.
fn within_one(slices: Option<&[(i64, i64)]>, begin: i64, end: i64) -> bool {
    let Some(slices) = slices else { return true };
    let after = slices.partition_point(|slice| slice.0 <= begin);
    after.checked_sub(1).and_then(|n| slices.get(n)).is_some_and(|slice| end <= slice.1)
}

pub(crate) fn unmatched(fate: Fate, inside: impl Fn() -> bool) -> Option<SetAside> {
    match fate {
        Fate::Matched => None,
        Fate::Ambiguous => Some(SetAside::Ambiguous),
        Fate::Implausible => Some(SetAside::Implausible),
        Fate::Alone if inside() => Some(SetAside::Lost),
        Fate::Alone => Some(SetAside::Outside),
    }
}

pub(crate) fn same_on_the_wire(host: &Recording, h: usize, target: &Recording, t: usize) -> bool {
    if target.flags[t] & Command::NO_CID != 0 {
        return order::same(host, h, target, t);
    }
    host.cid[h] == target.cid[t]
        && host.opcode[h] == target.opcode[t]
        && host.nsid[h] == target.nsid[t]
        && host.slba[h] == target.slba[t]
        && host.nlb[h] == target.nlb[t]
}

/// From when to when a run recorded, on its own clock.
pub(crate) fn window(run: &Recording) -> (i64, i64) {
    let Manifest { window, .. } = &run.manifest;
    let wire = || (0..run.len()).map(|row| on_the_wire(run, row));
    let from = match window.start_ns {
        Nanos(0) => wire().map(|w| w.0).filter(|&t| t != NONE).min().unwrap_or(0),
        start => start.as_i64(),
    };
    // The manifest of a run that was cut is up to a second older than its last commands.
    let last = wire().map(|w| w.1).max().unwrap_or(0);
    (from, window.end_ns.as_i64().max(last))
}

/// Whether a pair's command has a boundary's time, where it passed it.
pub(crate) fn passes(b: Boundary, host: &Recording, h: usize, target: &Recording, t: usize) -> Option<bool> {
    let time = match b.side() {
        Side::Host => host.time(b, h),
        Side::Target => target.time(b, t),
    };
    let asked = || {
        (host.r2ts[h] > 0 || target.r2ts[t] > 0) && !(b.side() == Side::Host && host.is_rdma(host.queue[h]))
    };
    (time != NONE || !is_of_r2t(b) || asked()).then_some(time != NONE)
}

fn boundary_figures(host: &Recording, target: &Recording, pairs: &[Pair]) -> Vec<BoundaryFigures> {
    // For a boundary: joined commands that passed it, and those of them without its time.
    let count = |&b: &Boundary| {
        let run = match b.side() {
            Side::Host => host,
            Side::Target => target,
        };
        if !is_of_r2t(b) && run.has_all(b) {
            return (pairs.len() as u64, 0);
        }
        let (mut passed, mut without) = (0, 0);
        for pair in pairs {
            let (h, t) = (pair.host_row as usize, pair.target_row as usize);
            if let Some(has) = passes(b, host, h, target, t) {
                passed += 1;
                without += u64::from(!has);
            }
        }
        (passed, without)
    };
    let counts: Vec<(u64, u64)> = Boundary::ALL.par_iter().map(count).collect();
    Boundary::ALL
        .iter()
        .zip(counts)
        .map(|(&b, (passed, without))| {
            let run = match b.side() {
                Side::Host => host,
                Side::Target => target,
            };
            figures_of(run, b, passed, without)
        })
        .collect()
}

/// A boundary's figures: `passed` commands passed it, `without` of them have no time for it.
pub(crate) fn figures_of(run: &Recording, b: Boundary, passed: u64, without: u64) -> BoundaryFigures {
    let hooks = run.hooks(b);
    let mut names: Vec<String> = Vec::new();
    for hook in &hooks {
        let Some(name) = &hook.hook else { continue };
        names.push(match hook.transport {
            Some(transport) if hooks.len() > 1 => format!("{}: {name}", transport.name()),
            _ => name.clone(),
        });
    }
    let took = passed == 0 || without < passed;
    BoundaryFigures {
        boundary: b,
        hook: (!names.is_empty()).then(|| names.join(", ")),
        measured: !hooks.is_empty() && hooks.iter().all(|h| h.measured && h.hook.is_some()) && took,
        fell_back: without,
    }
}

impl Joined {
    /// The host run's manifest.
    #[must_use]
    pub fn host_manifest(&self) -> &Manifest {
        &self.host.manifest
    }

    /// The target run's manifest.
    #[must_use]
    pub fn target_manifest(&self) -> &Manifest {
        &self.target.manifest
    }

    /// The pairs, by the host's rows.
    #[must_use]
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// Where every command of both runs went.
    #[must_use]
    pub fn accounting(&self) -> &Accounting {
        &self.accounting
    }

    /// The queues that are in both runs.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links.links
    }

    /// How each boundary was taken, and for how many joined commands it is lacking.
    #[must_use]
    pub fn boundaries(&self) -> &[BoundaryFigures] {
        &self.boundaries
    }

    /// What a reader of a report should know besides its figures.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    pub(crate) fn terms(&self, pair: Pair) -> Option<Terms> {
        let (h, t) = (pair.host_row as usize, pair.target_row as usize);
        Terms::new(
            &self.host.times(h),
            self.host.r2t_turnaround(h),
            &self.target.times(t),
            self.target.drive(t),
        )
    }

    /// The five stages of a pair; `None` for a pair that is not of this join.
    #[must_use]
    pub fn stages(&self, pair: Pair) -> Option<Stages> {
        self.terms(pair).map(|t| t.stages())
    }

    /// The parts of the stages of a pair in the order of [`SubStage::ALL`], ns, and the uncertainty of the
    /// network's two ways, ns (what one is too long the other is too short).
    #[must_use]
    pub fn sub_stages(&self, pair: Pair) -> Option<([i64; SubStage::COUNT], i64)> {
        let terms = self.terms(pair)?;
        let (offset, uncertainty) = self.offset_of(pair);
        Some((terms.sub_stages(offset), uncertainty))
    }

    /// The clock offset (host time less target time) when a pair's capsule reached the target, and its
    /// uncertainty, ns.
    pub(crate) fn offset_of(&self, pair: Pair) -> (i64, i64) {
        let received = on_the_wire(&self.target, pair.target_row as usize).0;
        self.clock.as_ref().map_or((0, 0), |c| c.offset(received))
    }

    /// A time of the target's clock on the host's; as it is where the relation of the clocks was not found.
    pub(crate) fn host_time(&self, t: i64) -> i64 {
        self.clock.as_ref().map_or(t, |clock| t.saturating_add(clock.offset(t).0))
    }

    /// From when to when both sides were armed at once, as [`Inside::in_both`] has it.
    pub(crate) fn in_both(&self) -> Option<Vec<(i64, i64)>> {
        let slices = [self.host.slices.as_deref(), self.target.slices.as_deref()];
        let (clock, host, target) = (self.clock.as_ref()?, window(&self.host), window(&self.target));
        Inside { clock, host, target, slices, lead: 0, tail: 0 }.in_both()
    }

    /// The relation of the clocks; `None` where it could not be found.
    #[must_use]
    pub fn clock(&self) -> Option<ClockFigures> {
        let clock = self.clock.as_ref()?;
        let step = (self.pairs.len() / 65_536).max(1);
        let mut uncertainties: Vec<i64> =
            self.pairs.iter().step_by(step).map(|&p| self.offset_of(p).1).collect();
        let middle = self.pairs.get(self.pairs.len() / 2)?;
        let half = uncertainties.len() / 2;
        let max = uncertainties.iter().copied().max()?;
        Some(ClockFigures {
            offset_ns: self.offset_of(*middle).0,
            uncertainty_ns: *uncertainties.select_nth_unstable(half).1,
            uncertainty_max_ns: max,
            drift_ppm: clock.drift() * 1e6,
            shared: self.shared_clock,
        })
    }
}
