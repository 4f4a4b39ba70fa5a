//! Compares what two builds offer to a recording: what moved between them, and whether each boundary still
//! resolves. It looks at two [`Offer`]s, never at programs.

use std::collections::{BTreeMap, BTreeSet};

use run_format::{Boundary, Lack, Ladder, Rung};
use serde::Serialize;

use crate::offer::{CopyOffer, FunctionOffer, Offer, PerKind, SideOffer};
use crate::resolve::Member;

/// What moved from one build to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// Whether every boundary that the baseline takes is still taken at its own moment, for every command.
    pub holds: bool,
    /// Each boundary of the side that was asked for.
    pub boundaries: Vec<BoundaryChange>,
    /// Those of the other side, where both builds have it; they decide nothing.
    pub other_side: Vec<BoundaryChange>,
    /// What moved, the most telling first.
    pub changes: Vec<Change>,
    /// What makes the two not quite comparable.
    pub notes: Vec<String>,
}

/// What became of the hook of a boundary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BoundaryChange {
    /// The boundary.
    pub boundary: Boundary,
    /// What became of it.
    pub verdict: Verdict,
    /// How the baseline takes it.
    pub was: Taken,
    /// How the new build has it taken.
    pub is: Taken,
    /// Why it is not taken as it was.
    pub why: Option<String>,
}

/// How a boundary is taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// With what; `None`: not at all.
    pub hook: Option<String>,
    /// Position on the ladder; that of no rung where it is not taken.
    pub rung: usize,
    /// Whether this is the boundary's own moment.
    pub measured: bool,
    /// Whether it sees every command.
    pub whole: bool,
    /// The dearest of its uprobes, in nanoseconds a hit.
    pub estimated_ns: Option<u32>,
}

/// What became of a boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Taken as before.
    Same,
    /// Taken by another hook, elsewhere or at another price, at the same moment.
    Moved,
    /// Taken where it was not, or at its own moment where it was not.
    Better,
    /// Not taken, or not at its own moment, by a lack of this machine's kernel and not of the build.
    Kernel,
    /// No longer taken at its own moment, or no longer for every command.
    Worse,
    /// No longer taken.
    Lost,
}

impl Verdict {
    /// Whether the check holds with it.
    #[must_use]
    pub fn holds(self) -> bool {
        self < Verdict::Worse
    }

    /// The name that people and programs read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Same => "same",
            Verdict::Moved => "moved",
            Verdict::Better => "better",
            Verdict::Kernel => "kernel",
            Verdict::Worse => "worse",
            Verdict::Lost => "lost",
        }
    }
}

/// Something that is not as it was.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Change {
    /// How much it tells.
    pub weight: Weight,
    /// What kind of thing.
    pub what: What,
    /// Which one.
    pub name: String,
    /// What it was; `None`: not there.
    pub was: Option<String>,
    /// What it is.
    pub is: Option<String>,
}

/// How much a change tells. What it comes to for a boundary, the boundary's verdict says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weight {
    /// Something that recordings use went away or means something else.
    Gone,
    /// Something that recordings read from each build anew lies elsewhere.
    Moved,
    /// It came, or is of no consequence.
    Detail,
}

/// A kind of thing that a build offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// A function: there or not, its copies.
    Function,
    /// How often it is inlined.
    Inlining,
    /// Where its arguments are.
    Argument,
    /// Where a member lies.
    Member,
    /// The value of an enumerator.
    Enumerator,
    /// A USDT probe and its arguments.
    Usdt,
    /// Something besides commands that is watched.
    Event,
    /// The trace ring's layout.
    Trace,
    /// A tracepoint of the ring.
    Tracepoint,
    /// What recording costs a command.
    Price,
    /// A function's first instructions.
    Opening,
    /// A function's size.
    Size,
}

impl What {
    /// The name that people and programs read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            What::Function => "function",
            What::Inlining => "inlining",
            What::Argument => "argument",
            What::Member => "member",
            What::Enumerator => "enumerator",
            What::Usdt => "usdt",
            What::Event => "event",
            What::Trace => "trace",
            What::Tracepoint => "tracepoint",
            What::Price => "price",
            What::Opening => "opening",
            What::Size => "size",
        }
    }
}

impl Offer {
    /// Compares this, the baseline, with what another build offers of the same side.
    #[must_use]
    pub fn compare(&self, new: &Offer) -> Comparison {
        let boundaries = boundaries(&self.here, &new.here);
        let other_side = match (&self.other_side, &new.other_side) {
            (Some(was), Some(is)) => self::boundaries(was, is),
            _ => Vec::new(),
        };
        let mut notes = Vec::new();
        if self.kernel != new.kernel {
            notes.push(format!(
                "the baseline was made on Linux {}, this is Linux {}: what is of the kernel may differ too",
                self.kernel, new.kernel
            ));
        }
        if self.build.knowledge != new.build.knowledge {
            let tells = |knowledge: crate::resolve::Knowledge| match knowledge {
                crate::resolve::Knowledge::Dwarf => "its debug information",
                crate::resolve::Knowledge::Layout => "a layout file",
                crate::resolve::Knowledge::Symbols => "its symbols only",
                crate::resolve::Knowledge::Nothing => "nothing",
            };
            notes.push(format!(
                "of the baseline's build {} told, of this one {}: what only one of them knows is not compared",
                tells(self.build.knowledge),
                tells(new.build.knowledge)
            ));
        }
        if let (Some(was), Some(is)) = (&self.build.build_id, &new.build.build_id)
            && was == is
        {
            notes.push("both are one build: the build-ids are the same".to_owned());
        }
        match (&self.other_side, &new.other_side) {
            (Some(was), None) => {
                notes.push(format!(
                    "the baseline's build can be recorded as a {} too, this one not",
                    was.side
                ));
            }
            (None, Some(is)) => {
                notes.push(format!("this build can be recorded as a {} too, the baseline's not", is.side));
            }
            _ => {}
        }
        Comparison {
            holds: boundaries.iter().all(|boundary| boundary.verdict.holds()),
            boundaries,
            other_side,
            changes: changes(self, new),
            notes,
        }
    }
}

fn boundaries(was: &SideOffer, is: &SideOffer) -> Vec<BoundaryChange> {
    // What keeps a recording from starting takes every boundary with it.
    let prevented = is.obstacles.first().filter(|_| was.obstacles.is_empty());
    was.boundaries
        .iter()
        .map(|before| {
            let after = is
                .boundaries
                .iter()
                .find(|ladder| ladder.boundary == before.boundary && ladder.transport == before.transport);
            let (was, is) = (taken(before), after.map(taken).unwrap_or_default());
            let mut verdict = verdict(&was, &is);
            let mut why =
                (verdict != Verdict::Same).then(|| after.and_then(|after| why(&was, before, after)));
            let missing = after.and_then(|after| lacking(before, after));
            if !verdict.holds() && missing == Some(Lack::Kernel) {
                verdict = Verdict::Kernel;
            }
            if let (Some(obstacle), true) = (prevented, was.hook.is_some()) {
                (verdict, why) = (Verdict::Lost, Some(Some(obstacle.clone())));
            }
            BoundaryChange { boundary: before.boundary, verdict, was, is, why: why.flatten() }
        })
        .collect()
}

fn taken(ladder: &Ladder) -> Taken {
    let Some(rung) = ladder.rung() else {
        return Taken { rung: ladder.rungs.len(), ..Taken::default() };
    };
    Taken {
        hook: Some(rung.hook.clone()),
        rung: ladder.chosen.unwrap_or(ladder.rungs.len()),
        measured: rung.measured,
        whole: rung.whole,
        estimated_ns: rung.uprobes.iter().map(|spot| spot.estimated_ns).max(),
    }
}

fn verdict(was: &Taken, is: &Taken) -> Verdict {
    match (&was.hook, &is.hook) {
        (None, None) => Verdict::Same,
        (None, Some(_)) => Verdict::Better,
        (Some(_), None) => Verdict::Lost,
        (Some(_), Some(_)) if was == is => Verdict::Same,
        (Some(_), Some(_)) => {
            // Its own moment first, every command second.
            if (was.measured && !is.measured) || (was.whole && !is.whole) {
                Verdict::Worse
            } else if (is.measured && !was.measured) || (is.whole && !was.whole) {
                Verdict::Better
            } else {
                Verdict::Moved
            }
        }
    }
}

/// Why the rung of before is not used any more.
fn why(was: &Taken, before: &Ladder, after: &Ladder) -> Option<String> {
    let old = counterpart(before, after)?;
    let used = after.rung().is_some_and(|rung| std::ptr::eq(rung, old));
    match (used, &old.why) {
        (true, _) if was.whole && !old.whole => old.note.clone(),
        (true, _) => None,
        (false, Some(why)) => Some(why.clone()),
        (false, None) => old.note.clone().filter(|_| !old.whole),
    }
}

/// Who lacks what the rung of before needs.
fn lacking(before: &Ladder, after: &Ladder) -> Option<Lack> {
    counterpart(before, after)?.lack
}

/// The rung that the baseline uses, on the new build's ladder. Ladders of one length are of one table of hooks.
fn counterpart<'a>(before: &Ladder, after: &'a Ladder) -> Option<&'a Rung> {
    let old = before.rung()?;
    if before.rungs.len() == after.rungs.len() {
        return after.rungs.get(before.chosen?);
    }
    after.rungs.iter().find(|rung| same_way(old, rung))
}

/// Whether two builds' rungs are the same way: the same hooks, wherever in the function each is.
fn same_way(a: &Rung, b: &Rung) -> bool {
    let words = |rung: &Rung| -> Vec<String> {
        rung.hook
            .split(", ")
            .map(|hook| {
                let mut words = hook.split_whitespace();
                let kind = words.next().unwrap_or_default().to_owned();
                // A symbol's suffix and the offset are the compiler's.
                let name = words.next().unwrap_or_default();
                let name = name.split(['+', '.']).next().unwrap_or_default();
                format!("{kind} {name}")
            })
            .collect()
    };
    words(a) == words(b)
}

fn changes(was: &Offer, is: &Offer) -> Vec<Change> {
    let (old, new) = (&was.build, &is.build);
    let mut all = Vec::new();
    let mut push = |weight, what, name: &str, was: Option<String>, is: Option<String>| {
        if was != is {
            all.push(Change { weight, what, name: name.to_owned(), was, is });
        }
    };

    for (name, before, after) in in_both(&old.functions, &new.functions) {
        functions(name, before, after, &mut push);
    }
    for (path, before, after) in in_both(&old.members, &new.members) {
        let weight = gone_moved_or_new(before.is_some(), after.is_some());
        let (was, is) = members(before.as_ref(), after.as_ref());
        push(weight, What::Member, path, was, is);
    }
    for (name, before, after) in in_both(&old.enumerators, &new.enumerators) {
        let weight = gone_moved_or_new(before.is_some(), after.is_some());
        push(weight, What::Enumerator, name, before.map(|v| v.to_string()), after.map(|v| v.to_string()));
    }
    let names: BTreeSet<&String> = old.usdt.keys().chain(new.usdt.keys()).collect();
    let used = used_usdt(&was.here, was.other_side.as_ref());
    for name in names {
        let (before, after) = (old.usdt.get(name), new.usdt.get(name));
        let weight = match (before, after) {
            (Some(_), None) if used.contains(name) => Weight::Gone,
            // The shape: how many arguments, of which size.
            (Some(before), Some(after)) if shape(before) != shape(after) => Weight::Gone,
            (Some(_), None) => Weight::Moved,
            _ => Weight::Detail,
        };
        push(
            weight,
            What::Usdt,
            name,
            before.map(|sites| arguments(sites)),
            after.map(|sites| arguments(sites)),
        );
    }
    let sides = [Some((&was.here, &is.here)), was.other_side.as_ref().zip(is.other_side.as_ref())];
    for (before, after) in sides.into_iter().flatten() {
        for event in &before.events {
            let now = after.events.iter().find(|new| new.event == event.event);
            let seen = |event: &crate::EventOffer| event.why.is_none().then(|| event.hook.clone());
            let (was, is) = (seen(event), now.and_then(seen));
            push(gone_moved_or_new(was.is_some(), is.is_some()), What::Event, &event.event, was, is);
        }
        prices(before, after, &mut push);
    }
    let (ring, new_ring) = (&old.trace, &new.trace);
    if ring.layout.is_some() || new_ring.layout.is_some() {
        let named = |layout: &Option<String>| layout.as_ref().map(|layout| format!("that of {layout}"));
        push(Weight::Gone, What::Trace, "file layout", named(&ring.layout), named(&new_ring.layout));
    }
    // Where the whole file is another one, its members' places tell nothing more.
    let weight = if ring.layout == new_ring.layout { Weight::Moved } else { Weight::Detail };
    for (name, before, after) in in_both(&ring.structures, &new_ring.structures) {
        push(
            weight,
            What::Trace,
            &format!("sizeof({name})"),
            Some(before.size.to_string()),
            Some(after.size.to_string()),
        );
        let paths: BTreeSet<&String> = before.members.keys().chain(after.members.keys()).collect();
        for path in paths {
            let (was, is) = members(before.members.get(path), after.members.get(path));
            push(weight, What::Trace, &format!("{name}.{path}"), was, is);
        }
    }
    let names: BTreeSet<&String> = ring.tracepoints.iter().chain(&new_ring.tracepoints).collect();
    for name in names {
        let there = |all: &[String]| all.contains(name).then(|| "there".to_owned());
        let (was, is) = (there(&ring.tracepoints), there(&new_ring.tracepoints));
        push(gone_moved_or_new(was.is_some(), is.is_some()), What::Tracepoint, name, was, is);
    }
    all.sort();
    all
}

fn gone_moved_or_new(was: bool, is: bool) -> Weight {
    match (was, is) {
        (true, false) => Weight::Gone,
        (true, true) => Weight::Moved,
        (false, _) => Weight::Detail,
    }
}

/// What both know, which is what can be compared.
fn in_both<'a, T>(
    old: &'a BTreeMap<String, T>,
    new: &'a BTreeMap<String, T>,
) -> impl Iterator<Item = (&'a str, &'a T, &'a T)> {
    old.iter().filter_map(|(name, before)| Some((name.as_str(), before, new.get(name)?)))
}

type Push<'a> = &'a mut dyn FnMut(Weight, What, &str, Option<String>, Option<String>);

fn functions(name: &str, was: &FunctionOffer, is: &FunctionOffer, push: Push<'_>) {
    let symbols = |function: &FunctionOffer| {
        let names: Vec<&str> = function.copies.iter().map(|copy| copy.symbol.as_str()).collect();
        match (names.is_empty(), function.inlined) {
            (false, _) => Some(names.join(", ")),
            (true, Some(places @ 1..)) => Some(format!("inlined only, at {}", plural(places, "place"))),
            (true, _) => None,
        }
    };
    let weight = match (was.copies.is_empty(), is.copies.is_empty()) {
        (false, true) => Weight::Gone,
        (true, _) => Weight::Detail,
        (false, false) => Weight::Moved,
    };
    push(weight, What::Function, name, symbols(was), symbols(is));
    if was.copies.is_empty() || is.copies.is_empty() {
        return;
    }
    if let (Some(before), Some(after)) = (was.inlined, is.inlined) {
        let text = |places: usize| Some(format!("inlined at {}", plural(places, "place")));
        let weight = if before == 0 { Weight::Gone } else { Weight::Moved };
        let weight = if after == 0 { Weight::Detail } else { weight };
        push(weight, What::Inlining, name, text(before), text(after));
    }
    // Of what only the calling convention tells, nothing can have moved.
    let told = |copies: &[CopyOffer]| copies.iter().all(|copy| copy.arguments_by == "dwarf");
    if told(&was.copies) && told(&is.copies) {
        let text = |copies: &[CopyOffer]| list(copies, |copy| copy.arguments.join(" "));
        push(Weight::Moved, What::Argument, name, text(&was.copies), text(&is.copies));
    }
    let text = |copies: &[CopyOffer]| {
        list(copies, |copy| {
            let texts: Vec<&str> = copy.opening.iter().map(|i| i.instruction.as_str()).collect();
            texts.join("; ")
        })
    };
    push(Weight::Detail, What::Opening, name, text(&was.copies), text(&is.copies));
    let text = |copies: &[CopyOffer]| list(copies, |copy| copy.size.to_string());
    push(Weight::Detail, What::Size, name, text(&was.copies), text(&is.copies));
}

/// One text of all copies; copies that are the same are told once.
fn list(copies: &[CopyOffer], text: impl Fn(&CopyOffer) -> String) -> Option<String> {
    let mut texts: Vec<String> = copies.iter().map(text).collect();
    texts.dedup();
    Some(texts.join(" | "))
}

pub(crate) fn plural(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

/// Two members, of which one may not be there: only the offsets, where nothing else differs.
fn members(was: Option<&Member>, is: Option<&Member>) -> (Option<String>, Option<String>) {
    match (was, is) {
        (Some(was), Some(is)) if (Member { offset: is.offset, ..was.clone() }) == *is => {
            let text = |member: &Member| Some(format!("byte {}", member.offset));
            (text(was), text(is))
        }
        _ => (was.map(member), is.map(member)),
    }
}

fn member(member: &Member) -> String {
    let Member { offset, size, bit, type_name } = member;
    let bit = bit.map_or_else(String::new, |(first, width)| format!(" bit {first}:{width}"));
    format!("byte {offset}{bit}, {} of {type_name}", plural(*size as usize, "byte"))
}

fn arguments(sites: &[Vec<String>]) -> String {
    let mut texts: Vec<String> = sites.iter().map(|site| site.join(" ")).collect();
    texts.dedup();
    texts.join(" | ")
}

/// Sizes and signs of a probe's arguments.
fn shape(sites: &[Vec<String>]) -> BTreeSet<Vec<&str>> {
    sites
        .iter()
        .map(|site| site.iter().map(|arg| arg.split('@').next().unwrap_or_default()).collect())
        .collect()
}

/// The USDT probes that events are seen with.
fn used_usdt(here: &SideOffer, other: Option<&SideOffer>) -> BTreeSet<String> {
    std::iter::once(here)
        .chain(other)
        .flat_map(|side| &side.events)
        .filter(|event| event.why.is_none())
        .filter_map(|event| event.hook.strip_prefix("usdt ").map(str::to_owned))
        .collect()
}

fn prices(was: &SideOffer, is: &SideOffer, push: Push<'_>) {
    let PerKind { read, write, r2t_write } = was.cost.per_command;
    let new = is.cost.per_command;
    for (kind, before, after) in
        [("read", read, new.read), ("write", write, new.write), ("R2T write", r2t_write, new.r2t_write)]
    {
        let text = |price: crate::Price| {
            Some(format!("{} hits, {} ns", price.hits, price.estimated_ns)).filter(|_| price.hits > 0)
        };
        let name = format!("{} {kind}", was.side);
        push(Weight::Moved, What::Price, &name, text(before), text(after));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::offer::{Build, Cost, EventOffer, Instruction};
    use crate::resolve::Knowledge;
    use crate::trace::{Structure, Trace};
    use proptest::prelude::*;
    use run_format::{Side, Spot};

    pub(crate) fn rung(hook: &str) -> Rung {
        Rung {
            hook: hook.to_owned(),
            usable: true,
            measured: true,
            whole: true,
            why: None,
            lack: None,
            note: None,
            uprobes: vec![Spot {
                symbol: hook.to_owned(),
                offset: 0,
                instruction: "push rbx".to_owned(),
                class: "emulated".to_owned(),
                estimated_ns: 510,
                why: "entry".to_owned(),
            }],
        }
    }

    pub(crate) fn ladder(boundary: Boundary, rungs: Vec<Rung>) -> Ladder {
        let chosen = rungs.iter().position(|rung| rung.usable);
        Ladder { boundary, transport: None, essential: false, chosen, rungs, without: "it".to_owned() }
    }

    fn function(symbol: &str) -> FunctionOffer {
        let opening = Instruction {
            instruction: "push rbx".to_owned(),
            class: "emulated".to_owned(),
            estimated_ns: 510,
        };
        FunctionOffer {
            copies: vec![CopyOffer {
                symbol: symbol.to_owned(),
                suffixes: Vec::new(),
                size: 100,
                cold: false,
                opening: vec![opening],
                arguments: vec!["rdi".to_owned(), "rsi".to_owned()],
                arguments_by: "dwarf".to_owned(),
            }],
            inlined: Some(0),
            why: None,
        }
    }

    fn member_at(offset: u64) -> Member {
        Member { offset, size: 4, bit: None, type_name: "int".to_owned() }
    }

    fn offer() -> Offer {
        let mut queued = rung("uprobe nvmf_tcp_req_process, fentry tcp_sendmsg");
        queued.note = Some("best".to_owned());
        let mut other = rung("uprobe spdk_nvmf_request_exec");
        other.measured = false;
        other.note = Some("later".to_owned());
        let here = SideOffer {
            side: Side::Target,
            boundaries: vec![
                ladder(Boundary::TSent, vec![queued, rung("uprobe nvmf_tcp_req_process, raw tracepoint x")]),
                ladder(Boundary::TSubmit, vec![rung("uprobe bdev_io_submit"), other]),
            ],
            events: vec![EventOffer {
                event: "ctrlr_destruct".to_owned(),
                hook: "usdt spdk:nvmf_ctrlr_destruct".to_owned(),
                why: None,
                uprobes: Vec::new(),
            }],
            cost: Cost::default(),
            obstacles: Vec::new(),
        };
        let usdt = |arguments: &[&str]| vec![arguments.iter().map(|text| (*text).to_owned()).collect()];
        let ring = Structure {
            size: 72,
            members: BTreeMap::from([
                ("file_size".to_owned(), member_at(0)),
                ("data".to_owned(), member_at(8)),
            ]),
        };
        Offer {
            kernel: "6.12".to_owned(),
            here,
            other_side: None,
            build: Build {
                version: None,
                build_id: Some("aa".to_owned()),
                knowledge: Knowledge::Dwarf,
                files: Vec::new(),
                functions: BTreeMap::from([("bdev_io_submit".to_owned(), function("bdev_io_submit"))]),
                members: BTreeMap::from([
                    ("a.b".to_owned(), Some(member_at(920))),
                    ("a.c".to_owned(), Some(member_at(4))),
                ]),
                enumerators: BTreeMap::from([("state.NEW".to_owned(), Some(1))]),
                usdt: BTreeMap::from([
                    ("spdk:nvmf_ctrlr_destruct".to_owned(), usdt(&["8@rax", "8@rbx"])),
                    ("spdk:unused".to_owned(), usdt(&["4@rax"])),
                ]),
                trace: Trace {
                    layout: Some("24.05".to_owned()),
                    told_by: Some("structures".to_owned()),
                    structures: BTreeMap::from([("spdk_trace_file".to_owned(), ring)]),
                    tracepoints: vec!["TCP_REQ_NEW".to_owned()],
                },
            },
        }
    }

    /// What changing the new build comes to: whether it holds, the verdicts, and the changes in short.
    fn after(change: impl Fn(&mut Offer)) -> (bool, Vec<Verdict>, Vec<String>) {
        let was = offer();
        let mut is = offer();
        is.build.build_id = Some("bb".to_owned());
        change(&mut is);
        let compared = was.compare(&is);
        let text = |part: &Option<String>| part.clone().unwrap_or_else(|| "-".to_owned());
        let changes = compared
            .changes
            .iter()
            .map(|c| {
                format!("{:?} {} {}: {} > {}", c.weight, c.what.name(), c.name, text(&c.was), text(&c.is))
            })
            .collect();
        (compared.holds, compared.boundaries.iter().map(|b| b.verdict).collect(), changes)
    }

    fn take_away(ladder: &mut Ladder, at: usize, lack: Lack) {
        let rung = &mut ladder.rungs[at];
        rung.usable = false;
        rung.why = Some("it is gone".to_owned());
        rung.lack = Some(lack);
        rung.uprobes.clear();
        ladder.chosen = ladder.rungs.iter().position(|rung| rung.usable);
    }

    use Verdict::{Better, Kernel, Lost, Moved, Same, Worse};

    #[test]
    fn one_build_is_as_it_was_and_that_is_said() {
        let compared = offer().compare(&offer());
        assert!(compared.holds && compared.changes.is_empty());
        assert!(compared.boundaries.iter().all(|b| b.verdict == Same && b.why.is_none()));
        assert!(compared.notes.iter().any(|note| note.contains("one build")), "{:?}", compared.notes);
    }

    #[test]
    fn a_boundary_that_is_taken_at_another_moment_or_not_at_all_does_not_hold() {
        let submit = |change: fn(&mut Ladder)| {
            let (holds, verdicts, _) = after(|offer| change(&mut offer.here.boundaries[1]));
            assert_eq!(verdicts[0], Same);
            (holds, verdicts[1])
        };
        assert_eq!(submit(|ladder| take_away(ladder, 0, Lack::Program)), (false, Worse));
        assert_eq!(
            submit(|ladder| {
                take_away(ladder, 0, Lack::Program);
                take_away(ladder, 1, Lack::Program);
            }),
            (false, Lost)
        );
        assert_eq!(submit(|ladder| ladder.rungs[0].whole = false), (false, Worse));
        // A ladder that is not there at all is one without rungs.
        let (holds, verdicts, _) = after(|offer| offer.here.boundaries.truncate(1));
        assert_eq!((holds, verdicts[1]), (false, Lost));
    }

    #[test]
    fn a_hook_of_the_same_moment_holds_wherever_it_is() {
        let (holds, verdicts, _) = after(|offer| take_away(&mut offer.here.boundaries[0], 0, Lack::Program));
        assert!(holds && verdicts == [Moved, Same]);
        let (holds, verdicts, _) = after(|offer| {
            let rung = &mut offer.here.boundaries[1].rungs[0];
            rung.hook = "uprobe bdev_io_submit.isra.0+4".to_owned();
            rung.uprobes[0].estimated_ns = 4700;
        });
        assert!(holds && verdicts == [Same, Moved]);
    }

    #[test]
    fn the_kernel_s_lack_is_not_the_build_s() {
        let (holds, verdicts, _) = after(|offer| {
            take_away(&mut offer.here.boundaries[0], 0, Lack::Kernel);
            take_away(&mut offer.here.boundaries[0], 1, Lack::Kernel);
            offer.kernel = "5.10".to_owned();
        });
        assert!(holds && verdicts == [Kernel, Same]);
        let mut other = offer();
        other.kernel = "5.10".to_owned();
        assert!(
            offer().compare(&other).notes.iter().any(|note| note.contains("6.12") && note.contains("5.10"))
        );
    }

    #[test]
    fn what_keeps_a_recording_from_starting_takes_every_boundary() {
        let was = offer();
        let mut is = offer();
        is.here.obstacles.push("no member".to_owned());
        let compared = was.compare(&is);
        assert!(!compared.holds);
        assert!(
            compared.boundaries.iter().all(|b| b.verdict == Lost && b.why.as_deref() == Some("no member"))
        );
        // What could not be recorded before has not become worse.
        assert!(is.compare(&is).holds);
        assert!(is.compare(&was).holds);
    }

    #[test]
    fn the_way_back_is_better() {
        let mut worse = offer();
        take_away(&mut worse.here.boundaries[1], 0, Lack::Program);
        let compared = worse.compare(&offer());
        assert_eq!(compared.boundaries[1].verdict, Better);
        take_away(&mut worse.here.boundaries[1], 1, Lack::Program);
        let compared = worse.compare(&offer());
        assert!(compared.holds && compared.boundaries[1].verdict == Better);
    }

    #[test]
    fn what_moved_is_named_and_weighed() {
        let changes = |change: fn(&mut Offer)| after(change).2;
        let none: [&str; 0] = [];
        assert_eq!(changes(|_| {}), none);
        assert_eq!(
            changes(|o| _ = o.build.members.insert("a.b".to_owned(), Some(member_at(944)))),
            ["Moved member a.b: byte 920 > byte 944"]
        );
        assert_eq!(
            changes(|o| _ = o.build.members.insert("a.b".to_owned(), None)),
            ["Gone member a.b: byte 920, 4 bytes of int > -"]
        );
        // What the new build does not tell is no change.
        assert_eq!(changes(|o| _ = o.build.members.remove("a.b")), none);
        assert_eq!(
            changes(|o| _ = o.build.enumerators.insert("state.NEW".to_owned(), Some(2))),
            ["Moved enumerator state.NEW: 1 > 2"]
        );
        let of = |change: fn(&mut FunctionOffer)| {
            after(|offer| {
                let function = offer.build.functions.get_mut("bdev_io_submit").unwrap();
                change(function);
            })
            .2
        };
        assert_eq!(
            of(|f| f.copies[0].symbol = "bdev_io_submit.constprop.0".to_owned()),
            ["Moved function bdev_io_submit: bdev_io_submit > bdev_io_submit.constprop.0"]
        );
        assert_eq!(
            of(|f| f.inlined = Some(2)),
            ["Gone inlining bdev_io_submit: inlined at 0 places > inlined at 2 places"]
        );
        assert_eq!(
            of(|f| {
                f.copies.clear();
                f.inlined = Some(1);
            }),
            ["Gone function bdev_io_submit: bdev_io_submit > inlined only, at 1 place"]
        );
        assert_eq!(
            of(|f| f.copies[0].arguments = vec!["rdi".to_owned(), "elsewhere".to_owned()]),
            ["Moved argument bdev_io_submit: rdi rsi > rdi elsewhere"]
        );
        assert_eq!(of(|f| f.copies[0].arguments_by = "convention".to_owned()), none);
        assert_eq!(of(|f| f.copies[0].size = 99), ["Detail size bdev_io_submit: 100 > 99"]);
    }

    #[test]
    fn probes_and_the_ring_count_where_they_are_used() {
        let changes = |change: fn(&mut Offer)| after(change).2;
        assert_eq!(
            changes(|o| _ = o.build.usdt.remove("spdk:nvmf_ctrlr_destruct")),
            ["Gone usdt spdk:nvmf_ctrlr_destruct: 8@rax 8@rbx > -"]
        );
        assert_eq!(
            changes(|o| _ = o.build.usdt.remove("spdk:unused")),
            ["Moved usdt spdk:unused: 4@rax > -"]
        );
        let arguments = |o: &mut Offer, text: &str| {
            let sites = vec![text.split(' ').map(str::to_owned).collect()];
            o.build.usdt.insert("spdk:nvmf_ctrlr_destruct".to_owned(), sites);
        };
        // Another register is read from the program's own note; another number of arguments is another probe.
        assert_eq!(
            after(|o| arguments(o, "8@rax 8@r12")).2,
            ["Detail usdt spdk:nvmf_ctrlr_destruct: 8@rax 8@rbx > 8@rax 8@r12"]
        );
        assert_eq!(
            after(|o| arguments(o, "8@rax 4@ebx")).2,
            ["Gone usdt spdk:nvmf_ctrlr_destruct: 8@rax 8@rbx > 8@rax 4@ebx"]
        );
        assert_eq!(
            changes(|o| o.here.events[0].why = Some("no".to_owned())),
            ["Gone event ctrlr_destruct: usdt spdk:nvmf_ctrlr_destruct > -"]
        );
        assert_eq!(
            changes(|o| o.build.trace.tracepoints.clear()),
            ["Gone tracepoint TCP_REQ_NEW: there > -"]
        );
        let ring = |o: &mut Offer| {
            o.build.trace.structures.get_mut("spdk_trace_file").unwrap().size = 80;
        };
        assert_eq!(after(ring).2, ["Moved trace sizeof(spdk_trace_file): 72 > 80"]);
        let other = |o: &mut Offer| {
            ring(o);
            o.build.trace.layout = Some("26.05".to_owned());
        };
        assert_eq!(
            after(other).2,
            [
                "Gone trace file layout: that of 24.05 > that of 26.05",
                "Detail trace sizeof(spdk_trace_file): 72 > 80"
            ]
        );
    }

    #[test]
    fn why_the_rung_of_before_is_not_used_is_told() {
        let why = |change: fn(&mut Ladder)| {
            let mut is = offer();
            change(&mut is.here.boundaries[1]);
            offer().compare(&is).boundaries[1].why.clone()
        };
        assert_eq!(why(|l| take_away(l, 0, Lack::Program)).as_deref(), Some("it is gone"));
        assert_eq!(why(|l| l.rungs[0].hook = "uprobe caller+9 (bdev_io_submit inlined)".to_owned()), None);
        // A table with another rung knows the old one by its hook.
        let longer = why(|ladder| {
            take_away(ladder, 0, Lack::Program);
            ladder.rungs.insert(0, rung("uprobe something_new"));
            ladder.chosen = Some(0);
        });
        assert_eq!(longer.as_deref(), Some("it is gone"));
    }

    #[test]
    fn rungs_are_told_by_their_hooks_and_not_by_where_these_are() {
        assert!(same_way(&rung("uprobe a.isra.0+4, fentry b"), &rung("uprobe a, fentry b")));
        assert!(!same_way(&rung("uprobe a, fentry b"), &rung("uprobe a, fentry c")));
        assert!(!same_way(&rung("uprobe a"), &rung("uprobe a, fentry b")));
    }

    proptest! {
        /// However the new build's ladders come out: it holds just when no boundary is worse or lost, and a
        /// boundary that is taken at its own moment for every command is neither.
        #[test]
        fn the_verdict_follows_from_the_rungs(
            usable in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>()), 4),
        ) {
            let was = offer();
            let mut is = offer();
            let rungs = is.here.boundaries.iter_mut().flat_map(|ladder| &mut ladder.rungs);
            for (rung, (usable, measured, whole)) in rungs.zip(usable) {
                (rung.usable, rung.measured, rung.whole) = (usable, measured, whole);
                rung.lack = (!usable).then_some(Lack::Program);
            }
            for ladder in &mut is.here.boundaries {
                ladder.chosen = ladder.rungs.iter().position(|rung| rung.usable);
            }
            let compared = was.compare(&is);
            prop_assert_eq!(compared.holds, compared.boundaries.iter().all(|b| b.verdict.holds()));
            for (ladder, change) in is.here.boundaries.iter().zip(&compared.boundaries) {
                let good = ladder.rung().is_some_and(|rung| rung.measured && rung.whole);
                prop_assert_eq!(change.verdict.holds(), good, "{:?}", change);
            }
        }
    }
}
