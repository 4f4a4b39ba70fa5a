//! What may be compared with what: a boundary that was not taken at the same moment on both sides of a
//! comparison parts two stages at different places, so these are compared as their sum, or not at all where the
//! boundary is an outer one. And what the hooks themselves cost: two sides that are measured by different kinds of
//! hook pay different prices for it, which is no change of the system.

use super::input::{Reading, Sample, Sides, transport};
use crate::table::time;
use run_format::{Boundary, Hook, Side};
use serde::Serialize;
use std::collections::BTreeSet;

/// How one boundary was taken on both sides of a comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BoundaryPair {
    /// The boundary.
    pub boundary: Boundary,
    /// The base's hook; null where it has none. Where repetitions differ, all of them.
    pub base_hook: Option<String>,
    /// Its rung on the boundary's ladder, 0 the best.
    pub base_rung: Option<u32>,
    /// Whether it is the boundary's own moment, and gave times.
    pub base_measured: bool,
    /// The new's hook.
    pub new_hook: Option<String>,
    /// Its rung.
    pub new_rung: Option<u32>,
    /// Whether it is the boundary's own moment, and gave times.
    pub new_measured: bool,
    /// Whether both took the same moment, so that what it parts can be compared one by one.
    pub same_moment: bool,
    /// What one hit costs the base, ns, by estimate; the most of its repetitions. 0 where no hook is known.
    pub base_price_ns: u32,
    /// What one hit costs the new.
    pub new_price_ns: u32,
}

impl BoundaryPair {
    pub(crate) fn is_worth_showing(&self) -> bool {
        !self.same_moment
            || self.base_hook != self.new_hook
            || self.base_rung != self.new_rung
            || self.base_price_ns != self.new_price_ns
    }

    /// By how much the two prices of a hit differ, ns.
    const fn price_difference(&self) -> u32 {
        self.base_price_ns.abs_diff(self.new_price_ns)
    }
}

/// The share of commands that may lack a boundary's time before it counts as taken only at times.
const FEW: f64 = 0.01;

/// What a recording took for a boundary.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    /// Its own moment.
    Measured,
    /// That of a hook near it.
    StandIn(String),
    /// None: a neighbour stands for it.
    Lacking,
    /// Its own for some commands and none for others.
    AtTimes,
}

fn hook_of(reading: &Reading, boundary: Boundary) -> Option<&Hook> {
    let manifest = reading.manifests.iter().find(|m| m.side == boundary.side())?;
    let used = transport(reading);
    let of_boundary = || manifest.hooks.iter().filter(|h| h.boundary == boundary);
    of_boundary()
        .find(|h| h.transport.is_some() && h.transport == used)
        .or_else(|| of_boundary().find(|h| h.transport.is_none()))
        .or_else(|| of_boundary().next())
}

/// What a BPF program on one of the kernel's own hooks costs, ns: between 100 and 200 on most machines.
const KERNEL_HOOK_NS: u32 = 150;
/// What a uprobe costs of which the run does not tell its instruction, ns.
const UPROBE_NS: u32 = 1_000;
/// What a record of SPDK's trace ring costs, ns.
const RING_NS: u32 = 40;
/// What is allowed for by how many times the estimate: it is of an idle machine, and a loaded one pays two to three
/// times as much.
const ALLOWED: f64 = 3.0;

/// What a hit of a hook costs, ns. One hook may be several, with commas between.
fn price(hook: &Hook) -> u32 {
    let Some(text) = hook.hook.as_deref() else { return 0 };
    let of = |part: &str| match part.split_whitespace().next().unwrap_or_default() {
        "uprobe" | "uretprobe" | "usdt" => hook.estimated_ns.unwrap_or(UPROBE_NS),
        "trace" => hook.estimated_ns.unwrap_or(RING_NS),
        "fentry" | "fexit" | "tp_btf" | "kprobe" | "kretprobe" | "raw" | "tracepoint" => KERNEL_HOOK_NS,
        // Of a kind that is not known here, and of which the run tells nothing.
        _ => hook.estimated_ns.unwrap_or(0),
    };
    text.split(',').map(|part| of(part.trim())).fold(0, u32::saturating_add)
}

/// The boundaries whose hooks' cost may lie in a part, by its name: a hit's cost lies partly before and partly after
/// the time that it takes, so it counts for the parts on both sides.
fn boundaries_of(part: &str) -> &'static [Boundary] {
    use Boundary::{
        HDataSent, HDone, HDriver, HEnd, HQueued, HR2t, HRecv, HSent, TData, TDone, TR2t, TRecv, TResp,
        TSent, TSubmit,
    };
    match part {
        "host_block" => &[HQueued, HDriver, HDone, HEnd],
        "host_driver" => &[HDriver, HSent, HR2t, HDataSent, HRecv, HDone],
        "network" => &[HSent, HR2t, HDataSent, HRecv, TRecv, TR2t, TData, TSent],
        "target_driver" => &[TRecv, TR2t, TData, TSubmit, TDone, TResp, TSent],
        "storage" => &[TSubmit, TDone],
        "beyond_host" => &[HSent, HR2t, HDataSent, HRecv],
        "data_wait" => &[TR2t, TData],
        _ => &[],
    }
}

/// By how much the hooks' prices differ within these parts, ns, by estimate.
fn price_difference(sides: Sides, columns: &[usize], boundaries: &[BoundaryPair], r2t: bool) -> f64 {
    let names = sides.parts();
    // Column 0 is the latency, which is all of them.
    let parts = (0..names.len()).filter(|part| columns.contains(&0) || columns.contains(&(part + 1)));
    let within: BTreeSet<Boundary> = parts.flat_map(|part| boundaries_of(names[part].0)).copied().collect();
    let paid = boundaries.iter().filter(|p| within.contains(&p.boundary) && (r2t || !of_r2t(p.boundary)));
    paid.map(|p| f64::from(p.price_difference())).sum()
}

/// What a reader should know where the sides pay different prices for being measured.
pub(crate) fn price_note(sides: Sides, boundaries: &[BoundaryPair], r2t: bool) -> Option<String> {
    let differs: Vec<String> = sides
        .parts()
        .iter()
        .enumerate()
        .filter_map(|(part, (_, title))| {
            let ns = price_difference(sides, &[part + 1], boundaries, r2t);
            (ns > 0.0).then(|| format!("{title} {}", time(ns)))
        })
        .collect();
    let whole = price_difference(sides, &[0], boundaries, r2t);
    (!differs.is_empty()).then(|| {
        format!(
            "the two sides are measured by hooks of different prices: by estimate {}, of the latency {} a command; {ALLOWED:.0} times that is \
             allowed for in every interval, and a change within it can not be told from the price; where commands wait for \
             one another the price may be more; record both by the same kind of hook where there is one",
            differs.join(", "),
            time(whole)
        )
    })
}

fn moment(reading: &Reading, boundary: Boundary) -> Moment {
    let figures = reading.boundaries.iter().find(|b| b.boundary == boundary);
    let passed = if of_r2t(boundary) { reading.r2ts } else { reading.commands() };
    let without = figures.map_or(passed, |f| f.fell_back);
    let hook = hook_of(reading, boundary);
    match hook.and_then(|h| Some((h.measured, h.hook.as_deref()?))) {
        None => Moment::Lacking,
        _ if passed > 0 && without >= passed => Moment::Lacking,
        _ if without as f64 > FEW * passed as f64 => Moment::AtTimes,
        Some((true, _)) => Moment::Measured,
        Some((false, hook)) => Moment::StandIn(place(hook).to_owned()),
    }
}

/// A hook without the offset into its function, which differs from build to build.
fn place(hook: &str) -> &str {
    match hook.rsplit_once('+') {
        Some((function, offset)) if offset.starts_with(|c: char| c.is_ascii_digit()) => function,
        _ => hook,
    }
}

const fn of_r2t(boundary: Boundary) -> bool {
    crate::model::is_of_r2t(boundary)
}

/// Every boundary of the sides that were recorded, on both sides of the comparison.
pub(crate) fn compare(base: &[Reading], new: &[Reading]) -> Vec<BoundaryPair> {
    let recorded = |b: &Boundary| match base.first().map(|r| r.sides) {
        Some(Sides::Host) => b.side() == Side::Host,
        Some(Sides::Target) => b.side() == Side::Target,
        _ => true,
    };
    Boundary::ALL.iter().copied().filter(recorded).map(|boundary| pair(base, new, boundary)).collect()
}

fn pair(base: &[Reading], new: &[Reading], boundary: Boundary) -> BoundaryPair {
    let all: BTreeSet<Moment> = base.iter().chain(new).map(|r| moment(r, boundary)).collect();
    let same_moment = all.len() == 1 && !all.contains(&Moment::AtTimes);
    let side = |readings: &[Reading]| {
        let hooks: Vec<Option<&Hook>> = readings.iter().map(|r| hook_of(r, boundary)).collect();
        let mut names: Vec<&str> = hooks.iter().flatten().filter_map(|h| h.hook.as_deref()).collect();
        names.sort_unstable();
        names.dedup();
        let rung = hooks.iter().flatten().filter(|h| h.hook.is_some()).map(|h| h.rung).max();
        let measured = readings.iter().all(|r| moment(r, boundary) == Moment::Measured);
        // Repetitions that were not all measured alike: the dearest.
        let price = hooks.iter().flatten().map(|h| price(h)).max().unwrap_or(0);
        ((!names.is_empty()).then(|| names.join(", ")), rung, measured, price)
    };
    let (base_hook, base_rung, base_measured, base_price_ns) = side(base);
    let (new_hook, new_rung, new_measured, new_price_ns) = side(new);
    // Each recording measures anew what a hit costs, and no two measurings are the same: one hook has one price.
    let (base_price_ns, new_price_ns) = match base_hook == new_hook && instructions(base, new, boundary) < 2 {
        true => (base_price_ns.max(new_price_ns), base_price_ns.max(new_price_ns)),
        false => (base_price_ns, new_price_ns),
    };
    BoundaryPair {
        boundary,
        base_hook,
        base_rung,
        base_measured,
        new_hook,
        new_rung,
        new_measured,
        same_moment,
        base_price_ns,
        new_price_ns,
    }
}

/// How many instructions the hooks of a boundary sit on, in all these runs.
fn instructions(base: &[Reading], new: &[Reading], boundary: Boundary) -> usize {
    let of = |reading| hook_of(reading, boundary).and_then(|hook| hook.instruction.as_deref());
    base.iter().chain(new).map(of).collect::<BTreeSet<Option<&str>>>().len()
}

/// What a boundary parts.
enum Parts {
    /// These parts, by their places in [`Sides::parts`].
    Between(&'static [usize]),
    /// A part from what is outside: the latency begins or ends with it.
    Outer(usize),
    /// Nothing that is compared.
    Nothing,
}

fn parts(sides: Sides, boundary: Boundary) -> Parts {
    use Boundary::{
        HDataSent, HDone, HDriver, HEnd, HQueued, HR2t, HRecv, HSent, TData, TDone, TR2t, TRecv, TResp,
        TSent, TSubmit,
    };
    use Parts::{Between, Nothing, Outer};
    match (sides, boundary) {
        (Sides::Pair | Sides::Host, HQueued | HEnd) => Outer(0),
        (Sides::Pair | Sides::Host, HDriver | HDone) => Between(&[0, 1]),
        (Sides::Pair | Sides::Host, HSent | HRecv | HR2t | HDataSent) => Between(&[1, 2]),
        (Sides::Pair, TRecv | TSent | TData) => Between(&[2, 3]),
        // Without it the target's wait for data stays in its driver, and the host's answers in the network.
        (Sides::Pair, TR2t) => Between(&[1, 2, 3]),
        (Sides::Pair, TSubmit | TDone) => Between(&[3, 4]),
        (Sides::Target, TRecv | TSent) => Outer(0),
        (Sides::Target, TSubmit | TDone) => Between(&[0, 1]),
        (Sides::Target, TR2t | TData) => Between(&[0, 2]),
        (_, TResp) | (Sides::Host, _) | (Sides::Target, _) => Nothing,
    }
}

/// A row of a comparison before it is computed: which columns of a [`Sample`] it adds up.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) name: String,
    pub(crate) title: String,
    pub(crate) columns: Vec<usize>,
    /// Why it is compared only together with others, or why not at all.
    pub(crate) why: Option<String>,
    /// Whether it can be compared.
    pub(crate) comparable: bool,
    /// How much of a change the hooks may be, by what they cost, ns.
    pub(crate) allowance_ns: f64,
}

/// The rows of a class: latency, then the parts, those together that can not be told apart the same way on both
/// sides.
pub(crate) fn rows(sides: Sides, boundaries: &[BoundaryPair], r2t: bool, samples: &[&Sample]) -> Vec<Plan> {
    let names = sides.parts();
    let mut group: Vec<usize> = (0..names.len()).collect();
    let mut blame: Vec<Vec<Boundary>> = vec![Vec::new(); names.len()];
    let mut outer: Vec<Boundary> = Vec::new();
    let mut refused = None;
    for pair in boundaries.iter().filter(|p| !p.same_moment && (r2t || !of_r2t(p.boundary))) {
        match parts(sides, pair.boundary) {
            Parts::Nothing => {}
            Parts::Outer(part) => {
                outer.push(pair.boundary);
                refused = Some(part);
            }
            Parts::Between(members) => {
                let to = members.iter().map(|&m| group[m]).min().unwrap_or(0);
                let from: Vec<usize> = members.iter().map(|&m| group[m]).collect();
                for g in &mut group {
                    if from.contains(g) {
                        *g = to;
                    }
                }
                blame[members[0]].push(pair.boundary);
            }
        }
    }
    let list =
        |boundaries: &[Boundary]| boundaries.iter().map(|b| b.name()).collect::<Vec<_>>().join(" and ");
    let latency_why = (!outer.is_empty()).then(|| {
        format!(
            "the two sides did not take {} at the same moment, so that the latency is not the same time",
            list(&outer)
        )
    });
    let mut rows = vec![Plan {
        name: "latency".into(),
        title: "latency".into(),
        columns: vec![0],
        comparable: latency_why.is_none(),
        why: latency_why,
        allowance_ns: 0.0,
    }];
    let mut beyond = Vec::new();
    for first in 0..names.len() {
        if group[first] != first {
            continue;
        }
        let members: Vec<usize> = (0..names.len()).filter(|&m| group[m] == first).collect();
        // What no command has is no row: reads wait for no data.
        let columns: Vec<usize> = members.iter().map(|m| m + 1).collect();
        let is_data_wait = members.iter().all(|&m| names[m].0 == "data_wait");
        if is_data_wait && samples.iter().all(|s| s.columns[columns[0]].iter().all(|&v| v == 0)) {
            continue;
        }
        let at: Vec<Boundary> = members.iter().flat_map(|&m| blame[m].iter().copied()).collect();
        let is_refused = refused.is_some_and(|part| members.contains(&part));
        let why = if is_refused {
            Some(format!("the two sides did not take {} at the same moment", list(&outer)))
        } else if members.len() > 1 {
            Some(format!(
                "compared together: the two sides did not take {} at the same moment, which parts them",
                list(&at)
            ))
        } else {
            None
        };
        if !is_refused {
            beyond.extend(columns.iter().copied());
        }
        rows.push(Plan {
            name: join(&members, names, "+", |n| n.0),
            title: join(&members, names, " + ", |n| n.1),
            columns,
            why,
            comparable: !is_refused,
            allowance_ns: 0.0,
        });
    }
    // Without the latency, the sum of all that can be compared stands for it.
    let parts_left = rows.iter().skip(1).filter(|r| r.comparable).count();
    if !rows[0].comparable && parts_left > 1 {
        let members: Vec<usize> = beyond.iter().map(|c| c - 1).collect();
        rows.insert(
            1,
            Plan {
                name: join(&members, names, "+", |n| n.0),
                title: "all of these together".into(),
                columns: beyond,
                why: Some("stands for the latency, which can not be compared".into()),
                comparable: true,
                allowance_ns: 0.0,
            },
        );
    }
    for row in &mut rows {
        row.allowance_ns = ALLOWED * price_difference(sides, &row.columns, boundaries, r2t);
    }
    rows
}

fn join(
    members: &[usize],
    names: &[(&'static str, &'static str)],
    with: &str,
    which: impl Fn(&(&'static str, &'static str)) -> &'static str,
) -> String {
    members.iter().map(|&m| which(&names[m])).collect::<Vec<_>>().join(with)
}
