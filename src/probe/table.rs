//! `probe` for people: a few lines a boundary, more with `--detail`.

use super::document::{Compared, ComparisonDocument, Document};
use crate::price::{Hit, Priced};
use kernel_probes::NOT_LOADED;
use run_format::{Boundary, Ladder, Rung, Transport};
use spdk_probes::{BoundaryChange, Build, Change, Cost, PerKind, Price, RedZone, Taken, Verdict, Weight};
use std::fmt::Write as _;

// Writing into a String can not fail; `let _ =` says so throughout.

/// The ladders of a side.
pub fn of_document(document: &Document, detail: bool) -> String {
    let mut text = head(document);
    for obstacle in &document.obstacles {
        let _ = writeln!(text, "\ncan not record: {obstacle}");
    }
    text.push('\n');
    let label = |ladder: &Ladder| name(ladder.boundary, ladder.transport);
    let wide = |width: usize, text: &str| width.max(text.chars().count());
    let boundary = document.boundaries.iter().map(label).fold(8, |w, t| wide(w, &t));
    let hook = document.boundaries.iter().filter_map(|l| Some(l.rung()?.hook.as_str())).fold(4, wide);
    // The kernel's own hooks have neither.
    let spots = document.boundaries.iter().filter_map(Ladder::rung).any(|rung| !rung.uprobes.is_empty());
    let hits = Hits(document.price.as_ref());
    let per_hit = hits.width();
    let more = if spots { format!("  {:>per_hit$}  instruction", "per hit") } else { String::new() };
    let _ = writeln!(text, "{:<boundary$}  {:<hook$}  rung{more}", "boundary", "hook");
    for ladder in &document.boundaries {
        let spot = ladder.rung().and_then(|rung| rung.uprobes.iter().max_by_key(|spot| spot.estimated_ns));
        let line = format!(
            "{:<boundary$}  {:<hook$}  {:>4}  {:>per_hit$}  {}",
            label(ladder),
            ladder.rung().map_or("none", |rung| rung.hook.as_str()),
            ladder.chosen.map_or("-".to_owned(), |at| format!("{at}/{}", ladder.rungs.len())),
            spot.map_or_else(String::new, |spot| hits.of(&spot.class, spot.estimated_ns)),
            spot.map_or("", |spot| spot.instruction.as_str())
        );
        let _ = writeln!(text, "{}", line.trim_end());
        if detail {
            rungs(&mut text, ladder, &hits);
        } else {
            short(&mut text, ladder);
        }
    }
    let price = document.price.as_ref().filter(|price| price.plan.per_command != PerKind::default());
    if let Some(cost) = &document.cost {
        if detail && !cost.uprobes.is_empty() {
            text.push('\n');
            places(&mut text, cost, &hits);
        }
        // One price: this machine's, where it was asked for it.
        if price.is_none() {
            text.push('\n');
            self::cost(&mut text, cost);
        }
    }
    if let Some(price) = price {
        let _ = write!(text, "\n{}", price.text());
        if price.red_zone == Some(RedZone::Overwritten) {
            text.push_str(
                "a probe on a five-byte nop overwrites what a leaf function keeps below its stack pointer here: it is used only where nothing can be there\n",
            );
        }
        text.push('\n');
    }
    let seen: Vec<&str> =
        document.events.iter().filter(|e| e.why.is_none()).map(|e| e.event.as_str()).collect();
    if !seen.is_empty() {
        let _ = writeln!(text, "also watched: {}", seen.join(", "));
    }
    let waits = |why: &Option<String>| why.as_deref() == Some(NOT_LOADED);
    let waiting: Vec<&str> =
        document.events.iter().filter(|e| waits(&e.why)).map(|e| e.event.as_str()).collect();
    if !waiting.is_empty() && !detail {
        let _ = writeln!(text, "with the driver also watched: {}", waiting.join(", "));
    }
    for event in &document.events {
        match &event.why {
            why if waits(why) && !detail => {}
            Some(why) => _ = writeln!(text, "not watched: {}: {why}", event.event),
            None if detail => _ = writeln!(text, "  {}: {}", event.event, event.hook),
            None => {}
        }
    }
    if let Some(other) = &document.other_side {
        let state = match other.obstacles.first() {
            None => String::new(),
            Some(obstacle) => format!(", but: {obstacle}"),
        };
        let _ = writeln!(text, "the program can be recorded as a {} too{state}", other.side);
    }
    text
}

fn name(boundary: Boundary, transport: Option<Transport>) -> String {
    match transport {
        Some(transport) => format!("{boundary} ({})", transport.name()),
        None => boundary.to_string(),
    }
}

fn head(document: &Document) -> String {
    let Some(build) = &document.build else {
        let transports: Vec<&str> = document.transports.iter().map(|t| t.name()).collect();
        let over =
            if transports.is_empty() { String::new() } else { format!(" over {}", transports.join(", ")) };
        return format!("{} as the {}{over}\n", document.of, document.side);
    };
    let version = build.version.as_ref().map_or("version unknown", |version| version.text.as_str());
    let mut text =
        format!("{}: {version}, as the {} on Linux {}\n", document.of, document.side, document.kernel);
    let _ = writeln!(text, "{}", facts(build));
    text
}

/// `build-id ..., told by its debug information, 51 USDT probes, trace ring of 26.05`.
fn facts(build: &Build) -> String {
    let mut facts = vec![match &build.build_id {
        Some(id) => format!("build-id {id}"),
        None => "no build-id".to_owned(),
    }];
    facts.push(
        match build.knowledge {
            spdk_probes::resolve::Knowledge::Dwarf => "structures by debug information",
            spdk_probes::resolve::Knowledge::Layout => "structures by layout file",
            spdk_probes::resolve::Knowledge::Symbols => "structures unknown: symbols only",
            spdk_probes::resolve::Knowledge::Nothing => "structures unknown",
        }
        .to_owned(),
    );
    if build.files.len() > 1 {
        facts.push(format!("{} files", build.files.len()));
    }
    facts.push(match build.usdt.len() {
        0 => "no USDT probes".to_owned(),
        count => format!("{count} USDT probes"),
    });
    if let Some(layout) = &build.trace.layout {
        facts.push(format!("trace ring as in {layout}"));
    }
    facts.join(", ")
}

/// Why not the better rungs, which ones are below, and what is lost.
fn short(text: &mut String, ladder: &Ladder) {
    let mut line = |words: &str, rest: &str| _ = writeln!(text, "    {words}{rest}");
    if let Some(note) = ladder.rung().and_then(|rung| rung.note.as_deref()) {
        line("", note);
    }
    let at = ladder.chosen.unwrap_or(ladder.rungs.len());
    let (waiting, passed): (Vec<&Rung>, Vec<&Rung>) =
        ladder.rungs.iter().take(at).partition(|rung| rung.why.as_deref() == Some(NOT_LOADED));
    for rung in passed {
        line("not ", &format!("{}: {}", own(rung, ladder), in_short(rung.reason())));
    }
    if !waiting.is_empty() {
        let waiting: Vec<String> = waiting.into_iter().map(|rung| own(rung, ladder)).collect();
        line("with the driver: ", &waiting.join("; "));
    }
    let below: Vec<String> = ladder
        .rungs
        .iter()
        .skip(at + 1)
        .map(|rung| {
            let mut text = own(rung, ladder);
            if !rung.usable {
                text += " (not here)";
            } else if !rung.measured {
                text += " (another moment)";
            }
            text
        })
        .collect();
    if !below.is_empty() {
        line("below: ", &below.join("; "));
    }
    // With the driver it may not be.
    let waits = ladder.rungs.iter().any(|rung| rung.why.as_deref() == Some(NOT_LOADED));
    if ladder.chosen.is_none() && !waits {
        line("lost: ", &ladder.without);
    }
}

/// A reason without the way out, and without the file that it names: the first line and the obstacles name both.
fn in_short(reason: &str) -> &str {
    let reason = reason.split("; ").next().unwrap_or_default();
    match reason.split_once(": ") {
        Some((file, rest)) if file.contains('/') && !file.contains(' ') => rest,
        _ => reason,
    }
}

/// A rung's hook: of one that only exchanges a part of the rung that is used, that part.
fn own(rung: &Rung, ladder: &Ladder) -> String {
    let used: Vec<&str> = ladder.rung().map_or_else(Vec::new, |used| used.hook.split(", ").collect());
    let all: Vec<&str> = rung.hook.split(", ").collect();
    let own: Vec<&str> = all.iter().copied().filter(|hook| !used.contains(hook)).collect();
    if own.is_empty() || all.len() != used.len() { rung.hook.clone() } else { own.join(", ") }
}

/// Every rung, with its uprobes' places.
fn rungs(text: &mut String, ladder: &Ladder, hits: &Hits<'_>) {
    for (at, rung) in ladder.rungs.iter().enumerate() {
        let mark = match (ladder.chosen == Some(at), rung.usable) {
            (true, _) => "*",
            (false, true) => "+",
            (false, false) => "-",
        };
        let moment = if rung.measured { "" } else { " (another moment)" };
        let _ = writeln!(text, "  {mark} {at} {}{moment}", rung.hook);
        for reason in rung.why.iter().chain(&rung.note) {
            let _ = writeln!(text, "      {reason}");
        }
        for spot in &rung.uprobes {
            let _ = writeln!(
                text,
                "      {}+{}: {}, {}, {}: {}",
                spot.symbol,
                spot.offset,
                spot.instruction,
                spot.class,
                hits.of(&spot.class, spot.estimated_ns),
                spot.why
            );
        }
    }
    let _ = writeln!(text, "    without any: {}", ladder.without);
}

/// What a hit costs: as measured on this machine, or where it was not asked, as on every machine.
struct Hits<'a>(Option<&'a Priced>);

impl Hits<'_> {
    fn of(&self, class: &str, estimated_ns: u32) -> String {
        let hit = self.0.and_then(|price| price.of_class(class));
        hit.map_or_else(|| format!("{estimated_ns} ns"), Hit::text)
    }

    fn width(&self) -> usize {
        if self.0.is_some() { "99.99 to 99.99 us".len() } else { "99999 ns".len() + 1 }
    }
}

/// Where the uprobes go, and what stands at their functions' entries.
fn places(text: &mut String, cost: &Cost, hits: &Hits<'_>) {
    let places: Vec<String> =
        cost.uprobes.iter().map(|u| format!("{}+{}", u.at.symbol, u.at.offset)).collect();
    let width = places.iter().map(|p| p.chars().count()).max().unwrap_or(0).max(6);
    let per_hit = hits.width();
    let _ = writeln!(
        text,
        "{:<width$}  {:>4}  {:>5}  {:>9}  {:>per_hit$}  at the function's entry",
        "uprobe", "read", "write", "R2T write", "per hit"
    );
    for (uprobe, place) in cost.uprobes.iter().zip(places) {
        let entry = uprobe.entry.as_ref().map_or_else(String::new, |entry| {
            format!("{}, {}", entry.instruction, hits.of(&entry.class, entry.estimated_ns))
        });
        let _ = writeln!(
            text,
            "{place:<width$}  {:>4}  {:>5}  {:>9}  {:>per_hit$}  {entry}",
            uprobe.hits.read,
            uprobe.hits.write,
            uprobe.hits.r2t_write,
            hits.of(&uprobe.at.class, uprobe.at.estimated_ns)
        );
    }
}

/// The price of a command that is the same on every machine.
fn cost(text: &mut String, cost: &Cost) {
    let per = cost.per_command;
    let kinds = [("a read", per.read), ("a write", per.write), ("an R2T write", per.r2t_write)];
    let text_of = |price: fn(&Price) -> u32| -> String {
        let each: Vec<String> = kinds
            .iter()
            .map(|(kind, of)| format!("{} us for {kind} ({} hits)", micros(price(of)), of.hits))
            .collect();
        each.join(", ")
    };
    let _ = writeln!(text, "estimated price: {}", text_of(|price| price.estimated_ns));
    if kinds.iter().any(|(_, price)| price.at_entry_ns != price.estimated_ns) {
        let _ = writeln!(text, "at the functions' entries: {}", text_of(|price| price.at_entry_ns));
    } else {
        let _ = writeln!(text, "at the functions' entries: the same");
    }
}

fn micros(nanos: u32) -> String {
    format!("{}.{:02}", nanos / 1000, nanos % 1000 / 10)
}

/// What moved from the baseline's build to the new one.
pub fn of_comparison(document: &ComparisonDocument, detail: bool) -> String {
    let comparison = &document.comparison;
    let mut text = String::new();
    let build = |compared: &Compared| {
        let version = compared.version.as_deref().unwrap_or("version unknown");
        let id = compared.build_id.as_ref().map_or_else(String::new, |id| format!(", build-id {id}"));
        format!("{version}{id} ({})", compared.of)
    };
    let file = document.baseline.file.as_deref().unwrap_or_default();
    let _ = writeln!(text, "baseline {file}: {}", build(&document.baseline));
    let _ = writeln!(text, "now: {}\n", build(&document.new));
    boundaries(&mut text, &comparison.boundaries);
    if detail && !comparison.other_side.is_empty() {
        text.push_str("\nas the other side, which decides nothing:\n");
        boundaries(&mut text, &comparison.other_side);
    }
    let shown: Vec<&Change> =
        comparison.changes.iter().filter(|change| detail || change.weight < Weight::Detail).collect();
    let hidden = comparison.changes.len() - shown.len();
    if !shown.is_empty() {
        text.push_str("\nwhat moved:\n");
        let what = shown.iter().map(|c| c.what.name().len()).max().unwrap_or(0);
        let name = shown.iter().map(|c| c.name.chars().count()).max().unwrap_or(0).min(48);
        for change in shown {
            let _ =
                writeln!(text, "  {:<what$}  {:<name$}  {}", change.what.name(), change.name, moved(change));
        }
    }
    if hidden > 0 {
        let _ = writeln!(
            text,
            "\n{hidden} {} of no consequence (sizes, first instructions, what came anew): --detail shows {}",
            if hidden == 1 { "change" } else { "changes" },
            if hidden == 1 { "it" } else { "them" }
        );
    }
    for note in &comparison.notes {
        let _ = writeln!(text, "\nnote: {note}");
    }
    text.push('\n');
    text.push_str(&verdict(document));
    text
}

fn boundaries(text: &mut String, changes: &[BoundaryChange]) {
    let width = changes.iter().map(|c| c.boundary.name().len()).max().unwrap_or(8).max(8);
    let _ = writeln!(text, "{:<width$}  {:<7}  hook", "boundary", "verdict");
    for change in changes {
        let hook = match change.verdict {
            Verdict::Same => taken(&change.is),
            _ if taken(&change.was) == taken(&change.is) => {
                format!("{}: {}", taken(&change.is), differences(&change.was, &change.is))
            }
            _ => format!("{}  ->  {}", taken(&change.was), taken(&change.is)),
        };
        let _ = writeln!(text, "{:<width$}  {:<7}  {hook}", change.boundary.name(), change.verdict.name());
        if let Some(why) = &change.why {
            let _ = writeln!(text, "{:<width$}           {why}", "");
        }
    }
}

fn taken(taken: &Taken) -> String {
    let Some(hook) = &taken.hook else { return "none".to_owned() };
    let mut text = hook.clone();
    if !taken.measured {
        text += " (another moment)";
    }
    if !taken.whole {
        text += " (not every command)";
    }
    text
}

/// What is not the same though the hook is.
fn differences(was: &Taken, is: &Taken) -> String {
    let mut texts = Vec::new();
    if was.rung != is.rung {
        texts.push(format!("rung {} -> {}", was.rung, is.rung));
    }
    if was.estimated_ns != is.estimated_ns {
        let ns = |price: Option<u32>| price.map_or("none".to_owned(), |ns| format!("{ns} ns"));
        texts.push(format!("{} -> {}", ns(was.estimated_ns), ns(is.estimated_ns)));
    }
    texts.join(", ")
}

fn moved(change: &Change) -> String {
    match (&change.was, &change.is) {
        (Some(was), Some(is)) => format!("{was}  ->  {is}"),
        (Some(was), None) => format!("{was}  ->  gone"),
        (None, Some(is)) => format!("new: {is}"),
        (None, None) => String::new(),
    }
}

fn verdict(document: &ComparisonDocument) -> String {
    let comparison = &document.comparison;
    let failed: Vec<String> = comparison
        .boundaries
        .iter()
        .filter(|change| !change.verdict.holds())
        .map(|change| format!("{} ({})", change.boundary, change.verdict.name()))
        .collect();
    if comparison.holds {
        let count = comparison.boundaries.iter().filter(|change| change.verdict == Verdict::Same).count();
        format!(
            "holds: every boundary of the {} is taken as well as before; {count} of {} as they were\n",
            document.side,
            comparison.boundaries.len()
        )
    } else {
        format!("does not hold: {}\n", failed.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use run_format::{Lack, Spot};

    fn rung(hook: &str, usable: bool) -> Rung {
        Rung {
            hook: hook.into(),
            usable,
            measured: true,
            whole: true,
            why: (!usable).then(|| "the kernel has it not".into()),
            lack: (!usable).then_some(Lack::Kernel),
            note: None,
            uprobes: vec![Spot {
                symbol: "f.isra.0".into(),
                offset: 4,
                instruction: "push rbx".into(),
                class: "emulated".into(),
                estimated_ns: 510,
                why: "entry behind endbr64".into(),
            }],
        }
    }

    #[test]
    fn a_ladder_tells_what_was_passed_and_what_is_below() {
        let mut ladder = Ladder {
            boundary: Boundary::TSent,
            transport: None,
            essential: false,
            chosen: Some(1),
            rungs: vec![
                rung("uprobe f, fentry a", false),
                rung("uprobe f, raw tracepoint b", true),
                rung("uprobe f, tracepoint c", false),
                rung("uprobe f", true),
            ],
            without: "the wait for the flush".into(),
        };
        let mut text = String::new();
        short(&mut text, &ladder);
        assert_eq!(
            text,
            "    not fentry a: the kernel has it not\n    below: tracepoint c (not here); uprobe f\n"
        );
        text.clear();
        rungs(&mut text, &ladder, &Hits(None));
        for line in [
            "  - 0 uprobe f, fentry a",
            "  * 1 uprobe f, raw",
            "      f.isra.0+4: push rbx, emulated, 510 ns",
        ] {
            assert!(text.contains(line), "{text}");
        }
        ladder.chosen = None;
        ladder.rungs.truncate(1);
        text.clear();
        short(&mut text, &ladder);
        assert!(text.ends_with("    lost: the wait for the flush\n"), "{text}");
    }

    #[test]
    fn what_waits_for_the_driver_is_told_once() {
        let mut ladder = Ladder {
            boundary: Boundary::TSent,
            transport: None,
            essential: false,
            chosen: None,
            rungs: vec![rung("fentry a", false), rung("kprobe a", false), rung("tracepoint c", false)],
            without: "the wait for the flush".into(),
        };
        ladder.rungs[0].why = Some(NOT_LOADED.into());
        ladder.rungs[2].why = Some(NOT_LOADED.into());
        let mut text = String::new();
        short(&mut text, &ladder);
        assert_eq!(
            text,
            "    not kprobe a: the kernel has it not\n    with the driver: fentry a; tracepoint c\n"
        );
    }

    #[test]
    fn a_reason_in_short_has_neither_file_nor_way_out() {
        assert_eq!(in_short("/a/nvmf_tgt: no function `x`; similar: `y`"), "no function `x`");
        assert_eq!(in_short("the kernel refuses: why"), "the kernel refuses: why");
        assert_eq!(in_short(""), "");
    }

    #[test]
    fn prices_are_told_in_microseconds() {
        assert_eq!(
            (micros(2550), micros(70), micros(28_200)),
            ("2.55".into(), "0.07".into(), "28.20".into())
        );
    }
}
