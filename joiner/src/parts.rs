//! Joins and reports runs that do not fit into memory, part after part, in the order in which commands end. What
//! a command is matched by is `matching`'s, what is said of it `gather`'s; this reads the parts, keeps what a part
//! does not decide for the next, and sees to it that neither grows beyond a limit.
//!
//! 1. **Survey**: both runs are read once, only what the wire shows of their commands. It tells how the parts of the
//!    files follow each other in time, and keeps one command in so many, by the hash that both sides share, as a
//!    sparser recording would have: the clock is searched in those.
//! 2. **Join**: both runs are read side by side, in the order in which their commands end. Each part is matched
//!    together with what earlier ones left undecided, and what it decides is added to the report's figures and
//!    forgotten.

use crate::clock::{self, Clock, Keys, Line, Search};
use crate::describe::describe_of;
use crate::error::{Error, polars};
use crate::gather::{Classes, Pairs};
use crate::histogram::RELATIVE_ERROR;
use crate::join::{
    Accounting, Aside, BoundaryFigures, ClockFigures, Inside, JoinOptions, Keep, OnTheWire, SetAside,
    by_queue, figures_of, is_one_clock, join, link_of, linked, longest, no_clock, note_broken, on_the_wire,
};
use crate::lanes::{Item, Lanes};
use crate::listed::Listed;
use crate::matching::{Fate, Known, Mark, Matcher};
use crate::model::is_of_r2t;
use crate::queues::{LinkedBy, Links};
use crate::recording::{IDENTITY, NONE, Recording};
use crate::report::{
    FORMAT, Groups, Report, ReportOptions, SeenByHost, began, host_alone, host_report, join_figures,
    one_class, one_sides_notes, pair_class, report, run_figures_of, target_alone, target_report,
    why_nothing_of,
};
use crate::threads;
use polars::prelude::{DataFrame, ParallelStrategy, ParquetReader, SerReader};
use rayon::prelude::*;
use run_format::{Boundary, Command, Run, Segment, Side};
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

/// How much memory a report may take, and whom to tell how far it is.
#[derive(Clone, Copy)]
pub struct Bounds<'a> {
    /// About as much memory as is taken at most, bytes. Runs that fit are held in it whole; others are read part
    /// after part, twice.
    pub memory: u64,
    /// Called now and then with how much of the work is done, of how much: for runs that do not fit.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl Bounds<'_> {
    /// The memory that is taken where nothing else was said: 2 GiB.
    pub const MEMORY: u64 = 2 << 30;
    /// The least that can be worked with: 128 MiB.
    pub const LEAST: u64 = 128 << 20;
}

impl Default for Bounds<'_> {
    fn default() -> Self {
        Bounds { memory: Bounds::MEMORY, progress: &|_, _| {} }
    }
}

impl std::fmt::Debug for Bounds<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bounds").field("memory", &self.memory).finish_non_exhaustive()
    }
}

/// What is taken whatever the runs are, by the program and its threads, and by what a segment is read with: bytes.
const FIXED: u64 = 64 << 20;
/// What a command of either side takes while runs are held whole and joined, measured: bytes.
const WHOLE: u64 = 280;
/// What a command of a part takes, with all that is made of it: bytes.
const PART: u64 = 600;
/// Commands of a segment that are read at once, at most.
const CHUNK: usize = 1 << 18;
/// Commands of both sides that are matched at once, at most: more would only leave the processor's caches. Fewer would
/// have more of them looked at twice, those that wait for what comes next.
const ROUND: usize = 1 << 19;
/// Commands of each side in which the clock is searched.
const SEARCHED: u64 = 1 << 19;
/// Commands that may lie before all others of their chunk without the chunk being taken for as early as they.
const STRAYS: usize = 64;

/// Joins a host run and a target run and reports the join, in bounded memory. Percentiles are exact where the runs
/// fit into it whole; else [`Report::percentile_error`] says how exact they are.
///
/// # Errors
/// As those of [`join`] and [`report`], and [`Error::Memory`] where runs that do not fit can not be joined in parts.
pub fn report_within(
    host: &Run,
    target: &Run,
    joining: &JoinOptions,
    options: &ReportOptions,
    bounds: &Bounds<'_>,
) -> Result<Report, Error> {
    threads::ready()?;
    let size = Size::of(bounds.memory);
    if rows_of(host)?.saturating_add(rows_of(target)?) <= size.whole {
        return report(&join(host, target, joining)?, options);
    }
    in_parts(host, target, joining, options, &size, bounds.progress)
}

/// Reports one side's run alone, in bounded memory, as [`host_report`] and [`target_report`] do.
///
/// # Errors
/// As theirs.
pub fn report_alone_within(run: &Run, options: &ReportOptions, bounds: &Bounds<'_>) -> Result<Report, Error> {
    threads::ready()?;
    let size = Size::of(bounds.memory);
    if rows_of(run)? > size.whole {
        return alone_in_parts(run, options, &size, bounds.progress);
    }
    match run.manifest().side {
        Side::Host => host_report(run, options),
        Side::Target => target_report(run, options),
    }
}

/// How many commands are worked on at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Commands of all runs that are held whole.
    pub(crate) whole: u64,
    /// Commands that are read from a segment at once.
    pub(crate) chunk: usize,
    /// Commands of both sides that come to what was left, for one round.
    pub(crate) round: usize,
    /// Commands of both sides that may be left for the next.
    pub(crate) left: usize,
    /// Commands of each side in which the clock is searched.
    pub(crate) searched: u64,
    /// Commands without a partner whose reason may wait for the end.
    pub(crate) deferred: usize,
    /// Bytes of the figures of all classes.
    pub(crate) classes: usize,
    pub(crate) memory: u64,
}

impl Size {
    fn of(memory: u64) -> Size {
        let memory = memory.max(Bounds::LEAST);
        let free = memory - FIXED;
        let rows = (free / 4 / PART) as usize;
        Size {
            whole: free / WHOLE,
            chunk: (rows / 4).clamp(1 << 10, CHUNK),
            round: rows.min(ROUND),
            left: rows / 2,
            searched: (free / 8 / 256).min(SEARCHED),
            deferred: (free / 32 / 16) as usize,
            classes: (free / 4) as usize,
            memory,
        }
    }
}

fn rows_of(run: &Run) -> Result<u64, Error> {
    let rows = run.segments().par_iter().map(|path| {
        let count = || ParquetReader::new(File::open(path)?).num_rows();
        count().map_err(polars(format!("read {}", path.display()))).map(|n| n as u64)
    });
    rows.sum()
}

/// Rows of a segment.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    segment: usize,
    offset: usize,
    rows: usize,
}

/// The rows of a run, in row groups, which are read best, or in pieces of so many where groups are more than twice that.
fn chunks(run: &Run, most: usize) -> Result<Vec<Chunk>, Error> {
    let mut chunks = Vec::new();
    for (segment, path) in run.segments().iter().enumerate() {
        let count = || ParquetReader::new(File::open(path)?).num_rows();
        let heights = match Segment::open(path) {
            Some(segment) => segment.heights(),
            None => vec![count().map_err(polars(format!("read {}", path.display())))?],
        };
        let mut from = 0;
        for rows in heights {
            let piece = if rows <= 2 * most { rows.max(1) } else { most };
            let pieces = (0..rows).step_by(piece);
            chunks.extend(pieces.map(|at| Chunk { segment, offset: from + at, rows: piece.min(rows - at) }));
            from += rows;
        }
    }
    Ok(chunks)
}

/// Reads columns of a chunk; those that its file lacks are left out.
fn read(run: &Run, chunk: Chunk, columns: &[&str]) -> Result<DataFrame, Error> {
    let path = &run.segments()[chunk.segment];
    let frame = || {
        let mut reader = ParquetReader::new(File::open(path)?);
        let schema = reader.schema()?;
        let there = columns.iter().filter(|c| schema.contains(c)).map(|&c| c.to_owned()).collect();
        reader
            .with_columns(Some(there))
            .with_slice(Some((chunk.offset, chunk.rows)))
            .read_parallel(ParallelStrategy::None)
            .finish()
    };
    frame().map_err(polars(format!("read {}", path.display())))
}

/// Appends columns of a chunk to the rows of its run.
fn append(run: &Run, chunk: Chunk, columns: &[&str], rows: &mut Recording) -> Result<(), Error> {
    // Whole row groups, as most chunks are, take no frame.
    let straight = Segment::open(&run.segments()[chunk.segment]).and_then(|segment| {
        let groups = segment.groups(chunk.offset..chunk.offset + chunk.rows)?;
        Some((segment, groups))
    });
    if let Some((segment, groups)) = straight
        && rows.extend_from(&segment, groups, chunk.rows, columns)
    {
        return Ok(());
    }
    rows.extend(read(run, chunk, columns)?)
        .map_err(polars(format!("read the commands of {}", run.directory().display())))
}

/// Whether the first commands of a run have places in the TCP stream.
fn has_places(run: &Run, size: &Size) -> Result<bool, Error> {
    let Some(&first) = chunks(run, size.chunk.min(1 << 12))?.first() else { return Ok(false) };
    let frame = read(run, first, &["stream_position"])?;
    Ok(frame.column("stream_position").is_ok_and(|places| places.null_count() < places.len()))
}

/// What the survey tells of one chunk.
#[derive(Debug)]
struct Surveyed {
    chunk: Chunk,
    /// When the first of its commands ended on the wire, and when they began to end but for a few strays.
    first: i64,
    typical: i64,
    /// When the first began, and the last ended.
    begin: i64,
    end: i64,
    no_cid: bool,
    /// The links of which it has a command without a place in the TCP stream.
    without_place: Vec<u32>,
    items: Vec<Item>,
}

/// What the survey tells of one side.
#[derive(Debug)]
struct Survey {
    chunks: Vec<Surveyed>,
    rows: u64,
    /// No command of this chunk or a later one ended before this; one more than chunks.
    none_before: Vec<i64>,
    /// The same but for strays.
    few_before: Vec<i64>,
    window: (i64, i64),
}

impl Survey {
    fn of(run: &Recording, chunks: Vec<Surveyed>) -> Survey {
        let least_of_rest = |of: fn(&Surveyed) -> i64| {
            let mut least = vec![i64::MAX; chunks.len() + 1];
            for (n, chunk) in chunks.iter().enumerate().rev() {
                least[n] = least[n + 1].min(of(chunk));
            }
            least
        };
        let (none_before, few_before) = (least_of_rest(|c| c.first), least_of_rest(|c| c.typical));
        let window = run.manifest.window;
        let from = match window.start_ns.0 {
            0 => chunks.iter().map(|c| c.begin).min().filter(|&t| t != i64::MAX).unwrap_or(0),
            _ => window.start_ns.as_i64(),
        };
        let last = chunks.iter().map(|c| c.end).max().unwrap_or(0);
        Survey {
            rows: chunks.iter().map(|c| c.chunk.rows as u64).sum(),
            none_before,
            few_before,
            window: (from, window.end_ns.as_i64().max(last)),
            chunks,
        }
    }

    fn take_items(&mut self) -> Vec<Item> {
        let mut items = Vec::with_capacity(self.chunks.iter().map(|c| c.items.len()).sum());
        self.chunks.iter_mut().for_each(|c| items.append(&mut c.items));
        items
    }
}

/// One side while it is surveyed.
#[derive(Clone, Copy)]
struct Surveyor<'a> {
    run: &'a Run,
    empty: &'a Recording,
    keep: Keep<'a>,
}

impl Surveyor<'_> {
    fn survey(&self, chunk: Chunk) -> Result<Surveyed, Error> {
        let side = self.empty.manifest.side;
        let (begin, end) = match side {
            Side::Host => (Boundary::HSent, Boundary::HRecv),
            Side::Target => (Boundary::TRecv, Boundary::TSent),
        };
        // What is matched on one clock needs no search, and so nothing by which commands are told apart.
        let searched = self.keep.one_in < u32::MAX;
        let identity = if searched { &IDENTITY[..] } else { &["queue", "flags", "stream_position"] };
        let mut columns = identity.to_vec();
        columns.extend([begin.name(), end.name()]);
        let mut rows = self.empty.bare();
        append(self.run, chunk, &columns, &mut rows)?;
        if !rows.has_all(begin) || !rows.has_all(end) {
            // Others stand for them.
            columns.truncate(identity.len());
            columns.extend(Boundary::of(side).map(Boundary::name));
            rows = self.empty.bare();
            append(self.run, chunk, &columns, &mut rows)?;
        }
        let (mut first, mut last) = (i64::MAX, 0);
        let mut ends = Vec::with_capacity(rows.len());
        let on_the_wire = OnTheWire::of(&rows);
        for row in 0..rows.len() {
            let (begin, end) = on_the_wire.at(row);
            if begin != NONE {
                first = first.min(begin);
            }
            if end != NONE {
                last = last.max(end);
                ends.push(end);
            }
        }
        let stray = STRAYS.min(ends.len().saturating_sub(1));
        let typical = match ends.is_empty() {
            true => i64::MAX,
            false => *ends.select_nth_unstable(stray).1,
        };
        let mut lacks = vec![false; self.keep.exact.len()];
        let all_lack = rows.lacks_positions();
        for (row, &queue) in rows.queue.iter().enumerate() {
            if (all_lack || rows.stream_position(row) == NONE)
                && let Some(link) = link_of(self.keep.links, queue)
            {
                lacks[link as usize] = true;
            }
        }
        let without_place = (0..).zip(lacks).filter(|l| l.1).map(|l| l.0).collect();
        Ok(Surveyed {
            chunk,
            first: ends.iter().take(stray + 1).copied().min().unwrap_or(i64::MAX),
            typical,
            begin: first,
            end: last,
            no_cid: rows.flags.iter().any(|flags| flags & Command::NO_CID != 0),
            without_place,
            items: if searched { self.keep.items(&rows, |_, _| ()) } else { Vec::new() },
        })
    }
}

/// Counts what is done.
struct Counter<'a> {
    done: AtomicU64,
    of: u64,
    tell: &'a (dyn Fn(u64, u64) + Sync),
}

impl Counter<'_> {
    fn add(&self, rows: usize) {
        let done = self.done.fetch_add(rows as u64, Ordering::Relaxed) + rows as u64;
        (self.tell)(done.min(self.of), self.of);
    }
}

/// Surveys both sides. The clock is searched in one command of `one_in`.
fn survey(
    runs: [(&Run, &Recording); 2],
    links: &Links,
    exact: &[bool],
    one_in: u32,
    size: &Size,
    counter: &Counter<'_>,
) -> Result<[Survey; 2], Error> {
    let by_queues = [by_queue(&links.host), by_queue(&links.target)];
    let mut work = Vec::new();
    for (n, (run, empty)) in runs.into_iter().enumerate() {
        let keep = Keep { links: &by_queues[n], one_in, exact, by_order: false };
        let surveyor = Surveyor { run, empty, keep };
        work.extend(chunks(run, size.chunk)?.into_iter().map(|chunk| (n, surveyor, chunk)));
    }
    let surveyed: Vec<(usize, Surveyed)> = work
        .par_iter()
        .map(|(n, surveyor, chunk)| {
            let surveyed = surveyor.survey(*chunk)?;
            counter.add(chunk.rows);
            Ok((*n, surveyed))
        })
        .collect::<Result<_, Error>>()?;
    let (host, target): (Vec<_>, Vec<_>) = surveyed.into_iter().partition(|s| s.0 == 0);
    let of =
        |empty, chunks: Vec<(usize, Surveyed)>| Survey::of(empty, chunks.into_iter().map(|c| c.1).collect());
    Ok([of(runs[0].1, host), of(runs[1].1, target)])
}

fn in_parts(
    host_run: &Run,
    target_run: &Run,
    joining: &JoinOptions,
    options: &ReportOptions,
    size: &Size,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Report, Error> {
    threads::keep_memory(size.memory);
    // Whatever is wrong with the columns is told by them.
    let _ = (host_run.commands()?, target_run.commands()?);
    let (host, target) = (Recording::empty(host_run)?, Recording::empty(target_run)?);
    let (host_rows, target_rows) = (rows_of(host_run)?, rows_of(target_run)?);
    let (links, mut notes) = linked(&host, &target, (host_rows, target_rows))?;
    let counter = Counter { done: AtomicU64::new(0), of: 2 * (host_rows + target_rows), tell: progress };
    let too_large = |why: &str| Error::Memory {
        runs: format!("{}\n  {}", describe_of(&host, host_rows), describe_of(&target, target_rows)),
        why: why.to_owned(),
        limit: size.memory >> 20,
        needed: ((host_rows + target_rows) * WHOLE + FIXED).div_ceil(1 << 20),
    };

    let one_in = host.manifest.one_in.max(target.manifest.one_in).max(1);
    let shared = is_one_clock(&host.manifest, &target.manifest, joining);
    let sparser = u32::try_from(host_rows.min(target_rows).div_ceil(size.searched)).unwrap_or(u32::MAX);
    let searched = if shared { u32::MAX } else { one_in.saturating_mul(sparser.max(1)) };
    let runs = [(host_run, &host), (target_run, &target)];
    let by_port: Vec<bool> = links.links.iter().map(|l| l.by == LinkedBy::Port).collect();
    // Mostly either all commands of a run have a place in the TCP stream or none has, so its first ones tell. Where they
    // told wrongly, the survey is done again.
    let supposed = match has_places(host_run, size)? && has_places(target_run, size)? {
        true => by_port.clone(),
        false => vec![false; by_port.len()],
    };
    let [mut h, mut t] = survey(runs, &links, &supposed, searched, size, &counter)?;
    if t.chunks.iter().any(|c| c.no_cid) {
        return Err(too_large(
            "the target's commands have no cids, and are matched by their order in the whole run, which --source hybrid \
             spares; or record for a shorter time",
        ));
    }
    let mut exact = by_port;
    for &link in h.chunks.iter().chain(&t.chunks).flat_map(|c| &c.without_place) {
        exact[link as usize] = false;
    }
    if !shared && exact != supposed {
        [h, t] = survey(runs, &links, &exact, searched, size, &counter)?;
    }

    let line = if shared {
        None
    } else {
        let (a, b) = (h.take_items(), t.take_items());
        let items = (a.len(), b.len());
        let expected = host_rows.min(target_rows) / u64::from(sparser.max(1));
        let unlike = |n: usize| (n as u64) < expected / 8 || n as u64 > 8 * size.searched;
        if sparser > 1 && (unlike(items.0) || unlike(items.1)) {
            return Err(too_large(
                "their commands are too much alike (few blocks and cids) for the clock to be found from a part of them",
            ));
        }
        let (a, b) = rayon::join(|| Lanes::new(a), || Lanes::new(b));
        let keys = if exact.iter().all(|&e| e) { Keys::Certain } else { Keys::OneAtATime };
        match clock::search(&a, &b, keys) {
            Search::Found(line) => Some(line),
            none => {
                notes.extend(no_clock(&none, &host, &target, items, (host_rows, target_rows))?);
                return Err(nothing(&host, &target, &h, &t, &notes));
            }
        }
    };
    [&host, &target].into_iter().for_each(|run| note_broken(run, &mut notes));
    let groups = Groups::new(options.group_by, &host);
    let queues = [by_queue(&links.host), by_queue(&links.target)];
    let threads = rayon::current_num_threads().max(1);
    let expected = h.rows.min(t.rows) / threads as u64;
    let mut joiner = Joiner {
        sides: [
            Rows::new(host, host_run, Keep { links: &queues[0], one_in, exact: &exact, by_order: false }),
            Rows::new(target, target_run, Keep { links: &queues[1], one_in, exact: &exact, by_order: false }),
        ],
        matcher: line.as_ref().map_or_else(Matcher::of_one_machine, Matcher::along),
        line: line.as_ref(),
        gathered: (0..threads).map(|_| Pairs::new(options, expected, h.rows.min(t.rows))).collect(),
        groups: &groups,
        size,
        deferred: [Vec::new(), Vec::new()],
        given_up: i64::MIN,
        forced: [i64::MIN; 2],
        waited: 0,
        late: 0,
        seen: SeenByHost::default(),
    };
    joiner.all(&[&h, &t], &counter)?;
    joiner.report([&h, &t], &links, shared, options, notes)
}

/// The error of two runs whose clock was not found.
fn nothing(host: &Recording, target: &Recording, h: &Survey, t: &Survey, notes: &[String]) -> Error {
    let rows = Accounting { host_commands: h.rows, target_commands: t.rows, ..Accounting::default() };
    Error::TooLittle {
        why: match notes.join("; ") {
            _ if h.rows == 0 || t.rows == 0 => why_nothing_of(&rows, notes),
            notes if notes.is_empty() => "no commands could be joined".into(),
            notes => format!("no commands could be joined: {notes}"),
        },
        runs: format!("{}\n  {}", describe_of(host, h.rows), describe_of(target, t.rows)),
    }
}

/// The rows of one side that are in memory.
#[derive(Debug)]
struct Rows<'a> {
    rows: Recording,
    run: &'a Run,
    keep: Keep<'a>,
    marks: Vec<Mark>,
    aside: Aside,
}

impl<'a> Rows<'a> {
    fn new(rows: Recording, run: &'a Run, keep: Keep<'a>) -> Rows<'a> {
        Rows { rows, run, keep, marks: Vec::new(), aside: Aside::default() }
    }

    /// Reads chunks of the run to what is in memory of it.
    fn append(&mut self, chunks: &[Chunk], counter: &Counter<'_>) -> Result<(), Error> {
        let columns = self.rows.columns();
        for &chunk in chunks {
            append(self.run, chunk, &columns, &mut self.rows)?;
            counter.add(chunk.rows);
        }
        Ok(())
    }

    /// What is to be matched; what is not is counted.
    fn lanes(&mut self) -> Lanes {
        let aside = &mut self.aside;
        Lanes::without_time(self.keep.items(&self.rows, |_, reason| aside.count(reason, 1)))
    }
}

/// What goes on from round to round.
struct Joiner<'a> {
    sides: [Rows<'a>; 2],
    matcher: Matcher<'a>,
    line: Option<&'a Line>,
    /// What each thread gathered.
    gathered: Vec<Pairs>,
    groups: &'a Groups,
    size: &'a Size,
    /// Commands that have no partner, whose reason is told when all is known: from when to when they were on the
    /// wire.
    deferred: [Vec<(i64, i64)>; 2],
    /// Target commands that ended before this may have been given up.
    given_up: i64,
    /// Commands that ended before this were taken to be all known, though they were not.
    forced: [i64; 2],
    waited: u64,
    late: u64,
    seen: SeenByHost,
}

impl Joiner<'_> {
    /// Reads and matches everything.
    fn all(&mut self, surveys: &[&Survey; 2], counter: &Counter<'_>) -> Result<(), Error> {
        // The chunks of both sides in the order of the ends of their commands.
        let clock = self.line.map_or_else(Clock::same, |line| Clock::around(line, 0));
        let on_target = |n: usize| clock.target_time(surveys[0].few_before[n]);
        let (mut order, mut next) = (Vec::new(), [0, 0]);
        while next[0] < surveys[0].chunks.len() || next[1] < surveys[1].chunks.len() {
            let side = match (next[0] < surveys[0].chunks.len(), next[1] < surveys[1].chunks.len()) {
                (true, true) => usize::from(surveys[1].few_before[next[1]] < on_target(next[0])),
                (true, false) => 0,
                _ => 1,
            };
            order.push((side, next[side]));
            next[side] += 1;
        }
        self.rounds(surveys, &order, counter)
    }

    fn rounds(
        &mut self,
        surveys: &[&Survey; 2],
        order: &[(usize, usize)],
        counter: &Counter<'_>,
    ) -> Result<(), Error> {
        let mut order = order.iter().peekable();
        let mut next = [0, 0];
        let mut forced = 0;
        loop {
            let mut new = 0;
            let mut chunks = [Vec::new(), Vec::new()];
            while new < self.size.round
                && let Some(&(side, n)) = order.next()
            {
                let chunk = surveys[side].chunks[n].chunk;
                new += chunk.rows;
                chunks[side].push(chunk);
                next[side] = n + 1;
            }
            let before = self.sides[0].rows.len();
            let [h, t] = &mut self.sides;
            let (host, target) =
                rayon::join(|| h.append(&chunks[0], counter), || t.append(&chunks[1], counter));
            host.and(target)?;
            self.seen.add(&h.rows, before..h.rows.len());
            let all = order.peek().is_none();
            let mut known = Known {
                host: surveys[0].none_before[next[0]],
                target: surveys[1].none_before[next[1]],
                all,
                force: forced > 0,
            };
            // What is known for sure was not enough, so a few strays hold up all others.
            if forced > 1 && !all {
                known.host = known.host.max(surveys[0].few_before[next[0]]);
                known.target = known.target.max(surveys[1].few_before[next[1]]);
                let left = self.sides.iter().map(|s| s.rows.len()).sum::<usize>();
                if forced > 2 && left > self.size.left.saturating_add(2 * self.size.round) {
                    // The rows are in no order: half of what is there has to go.
                    let middle = |rows: &Recording| {
                        let mut ends: Vec<i64> =
                            (0..rows.len()).map(|row| on_the_wire(rows, row).1).collect();
                        let half = ends.len() / 2;
                        if ends.is_empty() { i64::MIN } else { *ends.select_nth_unstable(half).1 }
                    };
                    known.host = known.host.max(middle(&self.sides[0].rows));
                    known.target = known.target.max(middle(&self.sides[1].rows));
                }
            }
            self.round(known, [surveys[0].window, surveys[1].window]);
            let truly = [surveys[0].none_before[next[0]], surveys[1].none_before[next[1]]];
            for (side, known) in [known.host, known.target].into_iter().enumerate() {
                if known > truly[side] {
                    self.forced[side] = self.forced[side].max(known);
                }
            }
            if all {
                return Ok(());
            }
            let left = self.sides.iter().map(|s| s.rows.len()).sum::<usize>();
            forced = if left > self.size.left { forced + 1 } else { 0 };
            let slowest = self.size.classes / 4 / self.gathered.len().max(1);
            self.gathered.iter_mut().for_each(|g| g.classes.fit_slowest(slowest));
            let held = self.gathered.iter().map(|g| g.classes.bytes()).sum::<usize>();
            if held > self.size.classes {
                return Err(Error::Memory {
                    runs: format!(
                        "{}\n  {}",
                        describe_of(&self.sides[0].rows, surveys[0].rows),
                        describe_of(&self.sides[1].rows, surveys[1].rows)
                    ),
                    why: "their commands are of too many classes".into(),
                    limit: self.size.memory >> 20,
                    needed: (held as u64 * 8) >> 20,
                });
            }
        }
    }

    /// Matches what is in memory, gathers what that decides, and forgets it.
    fn round(&mut self, known: Known, windows: [(i64, i64); 2]) {
        let [h, t] = &mut self.sides;
        let (host, target) = rayon::join(|| h.lanes(), || t.lanes());
        let (h, t) = (&*h, &*t);
        let part = self.matcher.part(&host, &target, &t.marks, known);
        let clock = self.matcher.clock();

        let lacking: Vec<Boundary> = Boundary::ALL
            .par_iter()
            .copied()
            .filter(|&b| {
                let run = if b.side() == Side::Host { &h.rows } else { &t.rows };
                is_of_r2t(b) || !run.has_all(b)
            })
            .collect();
        let each = part.pairs.len().div_ceil(self.gathered.len()).max(1);
        let groups = self.groups;
        self.gathered.par_iter_mut().zip(part.pairs.par_chunks(each)).for_each(|(gathered, pairs)| {
            gathered.add(pairs, &h.rows, &t.rows, groups, clock, &lacking);
        });

        // What has no partner, and what stays.
        // Before the first pair, the clock is what the search found.
        let searched = self.line.filter(|_| clock.is_empty()).map(|line| Clock::around(line, 0));
        let known = searched.as_ref().unwrap_or(clock);
        let inside = Inside {
            clock: known,
            host: windows[0],
            target: windows[1],
            slices: [h.rows.slices.as_deref(), t.rows.slices.as_deref()],
            lead: 0,
            tail: 0,
        };
        let mut kept: [Vec<u32>; 2] = [Vec::new(), Vec::new()];
        let mut asides = [Aside::default(), Aside::default()];
        for (side, (lanes, fates)) in [(&host, &part.host), (&target, &part.target)].into_iter().enumerate() {
            for (item, fate) in lanes.items.iter().zip(fates) {
                let reason = match fate {
                    Some(Fate::Matched) => continue,
                    None => {
                        kept[side].push(item.row);
                        continue;
                    }
                    Some(Fate::Ambiguous) => SetAside::Ambiguous,
                    Some(Fate::Implausible) => SetAside::Implausible,
                    Some(Fate::Alone) if item.end < self.forced[side] => {
                        self.late += 1;
                        SetAside::Ambiguous
                    }
                    Some(Fate::Alone) if side == 0 && item.begin < self.given_up => {
                        self.waited += 1;
                        SetAside::Ambiguous
                    }
                    Some(Fate::Alone) if self.deferred[side].len() < self.size.deferred => {
                        self.deferred[side].push((item.begin, item.end));
                        continue;
                    }
                    Some(Fate::Alone) => {
                        let inside = match side {
                            0 => inside.of_host(item.begin, item.end),
                            _ => inside.of_target(item.begin, item.end),
                        };
                        if inside { SetAside::Lost } else { SetAside::Outside }
                    }
                };
                asides[side].count(reason, 1);
            }
        }
        if let Some(end) = part.given_up {
            // As the host's clock has it.
            self.given_up = self.given_up.max(end.saturating_add(clock.offset(end).0));
        }
        let [of_host, of_target] = kept.each_mut();
        rayon::join(|| of_host.par_sort_unstable(), || of_target.par_sort_unstable());
        let mut marks = vec![Mark::Clean; of_target.len()];
        for (row, mark) in part.marks {
            if let Ok(place) = of_target.binary_search(&row) {
                marks[place] = mark;
            }
        }
        let [h, t] = &mut self.sides;
        t.marks = marks;
        h.aside = h.aside.with(&asides[0]);
        t.aside = t.aside.with(&asides[1]);
        rayon::join(|| h.rows.keep(of_host), || t.rows.keep(of_target));
    }

    fn report(
        mut self,
        surveys: [&Survey; 2],
        links: &Links,
        shared: bool,
        options: &ReportOptions,
        mut notes: Vec<String>,
    ) -> Result<Report, Error> {
        let mut gathered = self.gathered.swap_remove(0);
        self.gathered.into_iter().for_each(|other| gathered.merge(other));
        let clock = self.matcher.into_clock();
        let inside = Inside {
            clock: &clock,
            host: surveys[0].window,
            target: surveys[1].window,
            slices: self.sides.each_ref().map(|side| side.rows.slices.as_deref()),
            lead: longest(gathered.leads),
            tail: longest(gathered.tails),
        };
        let mut asides = self.sides.each_ref().map(|side| side.aside.with(&gathered.aside));
        for (side, deferred) in self.deferred.iter().enumerate() {
            let lost = deferred
                .par_iter()
                .filter(|&&(begin, end)| match side {
                    0 => inside.of_host(begin, end),
                    _ => inside.of_target(begin, end),
                })
                .count();
            asides[side].count(SetAside::Lost, lost as u64);
            asides[side].count(SetAside::Outside, (deferred.len() - lost) as u64);
        }
        let accounting = Accounting {
            host_commands: surveys[0].rows,
            target_commands: surveys[1].rows,
            joined: gathered.joined,
            host: asides[0],
            target: asides[1],
        };
        if self.waited > 0 {
            notes.push(format!(
                "{} commands of the host were under way longer than the commands around them could be held in memory, \
                 and were set aside as ambiguous: --memory says how much may be taken",
                self.waited
            ));
        }
        if self.late > 0 {
            notes.push(format!(
                "{} commands were recorded long after others that ended later, and were set aside as ambiguous: \
                 --memory says how much may be held to wait for them",
                self.late
            ));
        }
        let [host, target] = &self.sides;
        let (host, target) = (&host.rows, &target.rows);
        if gathered.joined == 0 {
            return Err(Error::TooLittle {
                why: why_nothing_of(&accounting, &notes),
                runs: format!(
                    "{}\n  {}",
                    describe_of(host, surveys[0].rows),
                    describe_of(target, surveys[1].rows)
                ),
            });
        }
        let boundaries = Boundary::ALL
            .iter()
            .zip(gathered.passed)
            .map(|(&b, (passed, without))| {
                figures_of(if b.side() == Side::Host { host } else { target }, b, passed, without)
            })
            .collect();
        let detail = options.detail;
        let classes =
            gathered.classes.each(|key, n, columns| pair_class(key, self.groups, n, columns, detail));
        Ok(Report {
            format: FORMAT,
            host: Some(run_figures_of(host, surveys[0].rows)),
            target: Some(run_figures_of(target, surveys[1].rows)),
            join: Some(join_figures(&accounting, links.links.len(), inside.in_both())),
            clock: clock_figures(gathered.clocks, &clock, shared),
            boundaries,
            group_by: options.group_by,
            percentile_error: RELATIVE_ERROR,
            classes,
            slowest: gathered.listed.commands(host, self.groups),
            fio: self.seen.beside_fio(host),
            notes,
        })
    }
}

/// The clock's figures from some pairs' times, offsets and uncertainties.
fn clock_figures(mut pairs: Vec<(i64, i64, i64)>, clock: &Clock, shared: bool) -> Option<ClockFigures> {
    pairs.sort_unstable();
    let offset_ns = pairs.get(pairs.len() / 2)?.1;
    let mut uncertainties: Vec<i64> = pairs.iter().map(|p| p.2).collect();
    uncertainties.sort_unstable();
    Some(ClockFigures {
        offset_ns,
        uncertainty_ns: uncertainties[uncertainties.len() / 2],
        uncertainty_max_ns: *uncertainties.last()?,
        drift_ppm: clock.drift() * 1e6,
        shared,
    })
}

fn alone_in_parts(
    run: &Run,
    options: &ReportOptions,
    size: &Size,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Report, Error> {
    threads::keep_memory(size.memory);
    let _ = run.commands()?;
    let empty = Recording::empty(run)?;
    let side = empty.manifest.side;
    let groups = Groups::new(options.group_by, &empty);
    let boundaries: Vec<Boundary> = Boundary::of(side).collect();
    let columns = empty.columns();
    let chunks = chunks(run, size.chunk)?;
    let rows = chunks.iter().map(|c| c.rows as u64).sum();
    let counter = Counter { done: AtomicU64::new(0), of: rows, tell: progress };
    let too_many = |held: usize| Error::Memory {
        runs: describe_of(&empty, rows),
        why: "its commands are of too many classes".into(),
        limit: size.memory >> 20,
        needed: (held as u64 * 8) >> 20,
    };
    let threads = rayon::current_num_threads().max(1);
    let share = chunks.len().div_ceil(threads).max(1);
    let parts = chunks.par_chunks(share).map(|chunks| {
        let mut alone = Alone {
            classes: Classes::new(4, rows),
            listed: Listed::of(options.slowest),
            passed: vec![(0, 0); boundaries.len()],
            unfinished: 0,
            against: 0,
            seen: SeenByHost::default(),
        };
        for &chunk in chunks {
            let mut rows = empty.bare();
            append(run, chunk, &columns, &mut rows)?;
            alone.add(&rows, &groups, &boundaries);
            counter.add(chunk.rows);
            alone.classes.fit_slowest(size.classes / 4 / threads);
            let held = alone.classes.bytes();
            if held * threads > size.classes {
                return Err(too_many(held * threads));
            }
        }
        Ok(alone)
    });
    let whole = parts.try_reduce_with(|mut a, b| {
        a.merge(b);
        Ok(a)
    });
    let Some(alone) = whole.transpose()?.filter(|alone| !alone.classes.is_empty()) else {
        return Err(Error::TooLittle {
            why: format!("none of its {rows} commands has the times that a report needs"),
            runs: describe_of(&empty, rows),
        });
    };
    let is_host = side == Side::Host;
    let figures = Some(run_figures_of(&empty, rows));
    let (host, target) = if is_host { (figures, None) } else { (None, figures) };
    Ok(Report {
        format: FORMAT,
        host,
        target,
        join: None,
        clock: None,
        boundaries: boundaries
            .iter()
            .zip(alone.passed)
            .map(|(&b, (passed, without))| figures_of(&empty, b, passed, without))
            .collect::<Vec<BoundaryFigures>>(),
        group_by: options.group_by,
        percentile_error: RELATIVE_ERROR,
        classes: alone.classes.each(|key, n, columns| one_class(key, &groups, n, columns, is_host)),
        slowest: alone.listed.commands(&empty, &groups),
        fio: if is_host { alone.seen.beside_fio(&empty) } else { Vec::new() },
        notes: one_sides_notes(&empty, alone.unfinished, alone.against),
    })
}

/// What is said of one side's commands.
struct Alone {
    classes: Classes,
    listed: Listed,
    passed: Vec<(u64, u64)>,
    unfinished: u64,
    against: u64,
    seen: SeenByHost,
}

impl Alone {
    fn add(&mut self, rows: &Recording, groups: &Groups, boundaries: &[Boundary]) {
        let is_host = rows.manifest.side == Side::Host;
        self.seen.add(rows, 0..rows.len());
        for row in 0..rows.len() {
            let figures = if is_host { host_alone(rows, row) } else { target_alone(rows, row) };
            match figures {
                None => self.unfinished += 1,
                Some(figures) if figures.iter().any(|&f| f < 0) => self.against += 1,
                Some(figures) => {
                    self.classes.add(groups.key(rows, row), || began(rows, row), &figures);
                    self.listed.add_alone(rows, row, &figures);
                    for (place, &b) in self.passed.iter_mut().zip(boundaries) {
                        let has = rows.time(b, row) != NONE;
                        if !is_of_r2t(b) || rows.r2ts[row] > 0 || has {
                            place.0 += 1;
                            place.1 += u64::from(!has);
                        }
                    }
                }
            }
        }
    }

    fn merge(&mut self, other: Alone) {
        self.classes.merge(other.classes);
        self.listed.merge(other.listed);
        for (ours, theirs) in self.passed.iter_mut().zip(&other.passed) {
            ours.0 += theirs.0;
            ours.1 += theirs.1;
        }
        self.unfinished += other.unfinished;
        self.against += other.against;
        self.seen.merge(&other.seen);
    }
}

#[cfg(test)]
mod tests {
    use super::{Size, alone_in_parts, in_parts};
    use crate::error::Error;
    use crate::histogram::RELATIVE_ERROR;
    use crate::join::{JoinOptions, SetAside, join};
    use crate::listed::SlowCommand;
    use crate::model::SubStage;
    use crate::report::{Class, GroupBy, Report, ReportOptions, host_report, report, target_report};
    use crate::stats::Distribution;
    use crate::synthetic::{Cids, Load, Pattern, Random, Runs, View};
    use proptest::prelude::*;
    use run_format::{Boundary, Nanos, Run, Stage};
    use tempfile::TempDir;

    const OPTIONS: ReportOptions =
        ReportOptions { group_by: GroupBy::Queue, detail: true, histograms: true, slowest: 7 };

    /// Room for everything, `chunk` and `round` commands at a time.
    fn size(chunk: usize, round: usize) -> Size {
        Size {
            whole: 0,
            chunk,
            round,
            left: usize::MAX,
            searched: 1 << 20,
            deferred: usize::MAX,
            classes: usize::MAX,
            memory: 1 << 30,
        }
    }

    fn written(runs: &Runs) -> (TempDir, Run, Run) {
        let folder = tempfile::tempdir().unwrap();
        let (host, target) = runs.write(folder.path()).unwrap();
        (folder, host, target)
    }

    fn parted(host: &Run, target: &Run, size: &Size) -> Result<Report, Error> {
        in_parts(host, target, &JoinOptions::default(), &OPTIONS, size, &|_, _| {})
    }

    fn whole(host: &Run, target: &Run) -> Result<Report, Error> {
        report(&join(host, target, &JoinOptions::default())?, &OPTIONS)
    }

    fn same_times(found: &Distribution, exact: &Distribution) {
        assert_eq!(found.mean_ns, exact.mean_ns);
        let pairs = [
            (found.p50_ns, exact.p50_ns),
            (found.p90_ns, exact.p90_ns),
            (found.p99_ns, exact.p99_ns),
            (found.p999_ns, exact.p999_ns),
        ];
        for (f, e) in pairs {
            assert_eq!(f.is_some(), e.is_some());
            let (f, e) = (f.unwrap_or(0) as f64, e.unwrap_or(0) as f64);
            assert!((f - e).abs() <= e.abs() * RELATIVE_ERROR + 0.5, "{f} for {e}");
        }
    }

    fn same_classes(found: &[Class], exact: &[Class]) {
        assert_eq!(found.len(), exact.len());
        for (f, e) in found.iter().zip(exact) {
            let what =
                |c: &Class| (c.operation, c.bytes, c.error, c.group.clone(), c.commands, c.largest_stage);
            assert_eq!(what(f), what(e));
            same_times(&f.latency, &e.latency);
            for stage in Stage::ALL {
                match (f.stages.of(stage), e.stages.of(stage)) {
                    (Some(f), Some(e)) => same_times(&f.times, &e.times),
                    (f, e) => assert!(f.is_none() && e.is_none()),
                }
            }
            assert_eq!(f.histograms.len(), e.histograms.len());
            for (f, e) in f.histograms.iter().zip(&e.histograms) {
                assert_eq!(f.buckets(), e.buckets());
            }
            assert_eq!(f.parts.len(), e.parts.len());
            for (f, e) in f.parts.iter().zip(&e.parts) {
                assert_eq!(f.part, e.part);
                same_times(&f.figures.times, &e.figures.times);
                assert_eq!(f.uncertainty_ns, e.uncertainty_ns);
            }
        }
    }

    fn json(value: impl serde::Serialize) -> serde_json::Value {
        serde_json::to_value(value).unwrap()
    }

    /// That a report in parts says what the report of the whole says.
    fn same(found: Result<Report, Error>, exact: Result<Report, Error>) {
        match (found, exact) {
            (Ok(found), Ok(exact)) => {
                assert_eq!(json(&found.join), json(&exact.join));
                assert_eq!(found.boundaries, exact.boundaries);
                assert_eq!(found.notes, exact.notes);
                assert_eq!(
                    (json(&found.host), json(&found.target)),
                    (json(&exact.host), json(&exact.target))
                );
                assert_eq!(json(&found.fio), json(&exact.fio));
                let (f, e) = (found.clock.unwrap(), exact.clock.unwrap());
                assert_eq!(f.uncertainty_max_ns, e.uncertainty_max_ns);
                assert_eq!((f.drift_ppm, f.shared), (e.drift_ppm, e.shared));
                same_classes(&found.classes, &exact.classes);
                // The clock is known better in the end than on the way: it has only the network's ways apart.
                let but_ways = |report: &Report| {
                    report
                        .slowest
                        .iter()
                        .map(|slow| {
                            let mut slow = slow.clone();
                            slow.parts.retain(|(part, _)| {
                                !matches!(part, SubStage::NetworkOut | SubStage::NetworkBack)
                            });
                            SlowCommand { uncertainty_ns: None, ..slow }
                        })
                        .collect::<Vec<_>>()
                };
                assert_eq!(but_ways(&found), but_ways(&exact));
            }
            (Err(found), Err(exact)) => {
                // Where no clock was found, what became of each command is not looked at.
                let why = |error: &Error| match error {
                    Error::TooLittle { why, .. } => why.split(" (set aside").next().unwrap().to_owned(),
                    other => other.to_string(),
                };
                assert_eq!(why(&found), why(&exact));
            }
            (found, exact) => panic!("{found:?}\nand whole\n{exact:?}"),
        }
    }

    fn accounted(report: &Report) {
        let join = report.join.as_ref().unwrap();
        assert_eq!(join.host_commands, join.joined + join.host_set_aside.total());
        assert_eq!(join.target_commands, join.joined + join.target_set_aside.total());
        assert_eq!(report.classes.iter().map(|c| c.commands).sum::<u64>(), join.joined);
    }

    fn load() -> impl Strategy<Value = Load> {
        let pattern = prop_oneof![
            3 => Just(Pattern::Random(1 << 20)),
            1 => Just(Pattern::Random(16)),
            1 => Just(Pattern::Sequential),
            1 => Just(Pattern::OneBlock)
        ];
        let cids = prop_oneof![Just(Cids::Generations), Just(Cids::Reused)];
        let view = || {
            let keep = prop_oneof![Just(1.0f64), 0.1..1.0f64];
            let during = prop_oneof![Just((-0.1, 1.1)), (-0.1..0.5f64, 0.5..1.1f64)];
            let one_in = prop_oneof![3 => Just(1u32), 1 => 1u32..4];
            (keep, during, one_in).prop_map(|(keep, during, one_in)| View { keep, during, one_in })
        };
        let depth = prop_oneof![Just(1u16), Just(4), Just(32)];
        let pause_ns = prop_oneof![Just(2_000.0f64), Just(3_000_000.0)];
        (
            (any::<u64>(), 0usize..3_000, 1u16..4, depth, pause_ns),
            (pattern, cids, -100.0..100.0f64),
            (view(), view()),
            any::<(bool, bool)>(),
        )
            .prop_map(
                |(
                    (seed, commands, queues, depth, pause_ns),
                    (pattern, cids, drift_ppm),
                    (host, target),
                    (ports, positions),
                )| {
                    Load {
                        seed,
                        commands,
                        queues,
                        depth,
                        pause_ns,
                        pattern,
                        cids,
                        drift_ppm,
                        host,
                        target,
                        ports,
                        positions,
                        ..Load::default()
                    }
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn parts_say_what_the_whole_says(load in load(), one_clock: bool, chunk in 20usize..1_000, round in 1usize..2_000) {
            let mut runs = if one_clock {
                Load { host_clock_ns: load.target_clock_ns, drift_ppm: 0.0, ..load }.record()
            } else {
                load.record()
            };
            if one_clock {
                runs.target.manifest.machine.boot_id = runs.host.manifest.machine.boot_id.clone();
            }
            let (_folder, host, target) = written(&runs);
            same(parted(&host, &target, &size(chunk, round)), whole(&host, &target));
        }

        #[test]
        fn one_sides_parts_say_what_it_says(load in load(), chunk in 20usize..1_000) {
            let (_folder, host, target) = written(&load.record());
            for (run, exact) in [(&host, host_report(&host, &OPTIONS)), (&target, target_report(&target, &OPTIONS))] {
                match (alone_in_parts(run, &OPTIONS, &size(chunk, 1), &|_, _| {}), exact) {
                    (Ok(found), Ok(exact)) => {
                        prop_assert_eq!(found.notes, exact.notes);
                        prop_assert_eq!(found.boundaries, exact.boundaries);
                        prop_assert_eq!(found.slowest, exact.slowest);
                        same_classes(&found.classes, &exact.classes);
                    }
                    (found, exact) => prop_assert!(found.is_err() && exact.is_err()),
                }
            }
        }

        #[test]
        fn with_no_room_to_wait_every_command_is_still_accounted_for(
            load in load(), shuffled: bool, chunk in 20usize..300, round in 1usize..500, left in 1usize..500
        ) {
            let mut runs = load.record();
            if shuffled {
                let mut random = Random::new(load.seed);
                for side in [&mut runs.host, &mut runs.target] {
                    for n in (1..side.commands.len()).rev() {
                        side.commands.swap(n, random.bits() as usize % (n + 1));
                    }
                }
            }
            let (_folder, host, target) = written(&runs);
            let tight = Size { left, deferred: left, ..size(chunk, round) };
            if let Ok(report) = parted(&host, &target, &tight) {
                accounted(&report);
                if let Ok(exact) = whole(&host, &target) {
                    prop_assert!(report.join.unwrap().joined <= exact.join.unwrap().joined);
                }
            }
        }
    }

    #[test]
    fn whole_and_parts_name_what_makes_commands_slow() {
        let load = Load { commands: 40_000, slow_one_in: 60, ..Load::default() };
        let (_folder, host, target) = written(&load.record());
        let exact = whole(&host, &target).unwrap();
        let found = parted(&host, &target, &size(3_000, 5_000)).unwrap();
        let mut seen = 0;
        for (f, e) in found.classes.iter().zip(&exact.classes) {
            assert_eq!(f.tails.len(), e.tails.len());
            for (f, e) in f.tails.iter().zip(&e.tails) {
                seen += 1;
                assert_eq!(f.percentile, e.percentile);
                assert!(f.commands.abs_diff(e.commands) <= 2 + e.commands / 20, "{f:?} for {e:?}");
                for tail in [f, e] {
                    let cause = &tail.causes[0];
                    assert_eq!(cause.stage, "storage");
                    assert!(cause.share > 0.8 && cause.otherwise.ns < tail.above_ns, "{tail:?}");
                }
                let near = |a: f64, b: f64| (a - b).abs() < 0.02;
                assert!(near(f.causes[0].share, e.causes[0].share), "{f:?} for {e:?}");
            }
        }
        assert!(seen >= 2, "{:?}", exact.classes);
    }

    #[test]
    fn the_order_of_rows_does_not_matter_where_there_is_room() {
        let mut runs = Load { commands: 3_000, ..Load::default() }.record();
        let mut random = Random::new(3);
        for side in [&mut runs.host, &mut runs.target] {
            for n in (1..side.commands.len()).rev() {
                side.commands.swap(n, random.bits() as usize % (n + 1));
            }
        }
        let (_folder, host, target) = written(&runs);
        same(parted(&host, &target, &size(200, 500)), whole(&host, &target));
    }

    #[test]
    fn the_clock_is_found_in_a_part_of_the_commands() {
        for keep in [1.0, 0.6] {
            let view = View { keep, ..View::default() };
            let load = Load { commands: 40_000, host: view, target: view, ..Load::default() };
            let (_folder, host, target) = written(&load.record());
            let few = Size { searched: 2_000, ..size(3_000, 8_000) };
            let (found, exact) = (parted(&host, &target, &few).unwrap(), whole(&host, &target).unwrap());
            accounted(&found);
            let (found, exact) = (found.join.unwrap(), exact.join.unwrap());
            assert!(found.joined * 1_000 >= exact.joined * 999, "{} of {}", found.joined, exact.joined);
        }
    }

    #[test]
    fn commands_that_are_too_much_alike_are_told() {
        let load = Load {
            commands: 20_000,
            pattern: Pattern::OneBlock,
            cids: Cids::Reused,
            queues: 1,
            depth: 1,
            writes: 0.0,
            ..Load::default()
        };
        let (_folder, host, target) = written(&load.record());
        let error = parted(&host, &target, &Size { searched: 1_000, ..size(3_000, 8_000) }).unwrap_err();
        assert!(matches!(&error, Error::Memory { why, .. } if why.contains("alike")), "{error}");
    }

    /// A load of which one command's response takes until the end to reach the host, and nothing else of its queue
    /// and cid follows.
    fn one_late(commands: usize) -> Runs {
        let mut runs = Load { commands, queues: 1, depth: 8, cids: Cids::Reused, ..Load::default() }.record();
        let late = runs.host.commands[100].1.clone();
        let id = runs.host.commands[100].0;
        let after = |c: &run_format::Command, of: u64| c.cid != late.cid || of <= id;
        runs.host.commands.retain(|(of, c)| after(c, *of));
        runs.target.commands.retain(|(of, c)| after(c, *of));
        let end = runs.host.manifest.window.end_ns.0 - 1_000;
        let (_, mut c) = runs.host.commands.remove(100);
        for (n, b) in [Boundary::HRecv, Boundary::HDone, Boundary::HEnd].into_iter().enumerate() {
            c.times[b.slot()] = Some(Nanos(end + n as u64));
        }
        runs.host.commands.push((id, c));
        runs
    }

    #[test]
    fn a_command_that_is_under_way_long_is_matched_where_there_is_room_and_else_told() {
        let runs = one_late(20_000);
        let (_folder, host, target) = written(&runs);
        let room = parted(&host, &target, &size(1_000, 2_000)).unwrap();
        accounted(&room);
        let all = runs.host.commands.len() as u64;
        assert_eq!(room.join.as_ref().unwrap().joined, all, "{:?} {:?}", room.join, room.notes);
        // What is left for the next part never becomes more than a few hundred commands with one waiting.
        let mut tight = size(1_000, 2_000);
        tight.left = 400;
        let told = parted(&host, &target, &tight).unwrap();
        accounted(&told);
        let join = told.join.unwrap();
        assert_eq!(join.joined, all - 1);
        assert_eq!(join.host_set_aside.of(SetAside::Ambiguous), 1);
        assert!(told.notes.iter().any(|n| n.contains("under way longer")), "{:?}", told.notes);
    }

    #[test]
    fn a_target_whose_host_falls_silent_does_not_fill_the_memory() {
        let load = Load {
            commands: 40_000,
            host: View { during: (-0.1, 0.3), ..View::default() },
            ..Load::default()
        };
        let mut runs = load.record();
        // The host's recording went on, and lost everything.
        runs.host.manifest.window.end_ns = Nanos(runs.host.manifest.window.end_ns.0 * 2);
        let (_folder, host, target) = written(&runs);
        let tight = Size { left: 12_000, ..size(1_000, 2_000) };
        let report = parted(&host, &target, &tight).unwrap();
        accounted(&report);
        assert_eq!(json(report.join), json(whole(&host, &target).unwrap().join));
    }
}
