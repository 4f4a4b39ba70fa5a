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

/// What became of a boundary's hook.
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
    let same = |rung: &&Rung| before.rung().is_some_and(|old| same_way(old, rung));
    let old = after.rungs.iter().find(same)?;
    let used = after.rung().is_some_and(|rung| same_way(rung, old));
    match (used, &old.why) {
        (true, _) if was.whole && !old.whole => old.note.clone(),
        (true, _) => None,
        (false, Some(why)) => Some(why.clone()),
        (false, None) => old.note.clone().filter(|_| !old.whole),
    }
}

/// Who lacks what the rung of before needs.
fn lacking(before: &Ladder, after: &Ladder) -> Option<Lack> {
    let old = before.rung()?;
    after.rungs.iter().find(|rung| same_way(old, rung))?.lack
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
        push(weight, What::Member, path, before.as_ref().map(member), after.as_ref().map(member));
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
    for (name, before, after) in in_both(&ring.structures, &new_ring.structures) {
        push(
            Weight::Moved,
            What::Trace,
            &format!("sizeof({name})"),
            Some(before.size.to_string()),
            Some(after.size.to_string()),
        );
        let members: BTreeSet<&String> = before.members.keys().chain(after.members.keys()).collect();
        for path in members {
            let (was, is) = (before.members.get(path), after.members.get(path));
            let weight = match is {
                Some(_) => Weight::Moved,
                None => Weight::Gone,
            };
            push(weight, What::Trace, &format!("{name}.{path}"), was.map(member), is.map(member));
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
