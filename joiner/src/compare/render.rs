//! A comparison for a person, as a table for a terminal and as Markdown for a pull request. It shows what the
//! comparison holds and computes nothing.

use super::verdict::{factor, signed};
use super::{Cell, ClassComparison, Comparison, Form, Row, SideOf, Statistic, Verdict};
use crate::report::RunFigures;
use crate::table::{count, time};
use std::fmt::Write;

/// Classes that a table shows; the rest is counted.
const CLASSES: usize = 16;

impl Comparison {
    /// The comparison as a person reads it, some 110 columns wide. With `detail`, every figure of every row.
    #[must_use]
    pub fn to_table(&self, detail: bool) -> String {
        let mut out = String::new();
        // Writing into a String can not fail.
        let _ = self.write_table(&mut out, detail);
        out
    }

    /// The comparison as Markdown.
    #[must_use]
    pub fn to_markdown(&self) -> String {
        let mut out = String::new();
        let _ = self.write_markdown(&mut out);
        out
    }

    /// The classes with the most commands, in order, and how many others there are.
    fn shown(&self) -> (Vec<&ClassComparison>, usize) {
        let mut sizes: Vec<u64> = self.classes.iter().map(size).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let least = sizes.get(CLASSES - 1).copied().unwrap_or(0);
        let shown: Vec<_> = self.classes.iter().filter(|c| size(c) >= least).take(CLASSES).collect();
        let left = self.classes.len() - shown.len();
        (shown, left)
    }

    fn write_table(&self, out: &mut String, detail: bool) -> std::fmt::Result {
        for (name, side) in [("base", &self.base), ("new", &self.new)] {
            write_side(out, name, side)?;
        }
        if self.differences.is_empty() {
            writeln!(out, "differs nothing that is recorded")?;
        } else {
            writeln!(out, "differs")?;
            let width = self.differences.iter().map(|d| d.what.len()).max().unwrap_or(0);
            for d in &self.differences {
                writeln!(out, "        {:<width$}  {} -> {}", d.what, d.base, d.new)?;
            }
        }
        writeln!(out, "        not recorded, check that they are alike: {}", self.not_recorded.join(", "))?;
        for b in &self.boundaries {
            writeln!(
                out,
                "hooks   {}: {} -> {}{}",
                b.boundary,
                hook(b.base_hook.as_deref(), b.base_measured, b.base_rung),
                hook(b.new_hook.as_deref(), b.new_measured, b.new_rung),
                if b.same_moment { ", the same moment" } else { ", NOT the same moment" }
            )?;
        }
        for note in &self.notes {
            writeln!(out, "note    {note}")?;
        }
        let (shown, left) = self.shown();
        for class in shown {
            writeln!(out)?;
            write_class(out, class, detail)?;
        }
        if left > 0 {
            writeln!(out, "\n{left} more classes with fewer commands: --format json has them all")?;
        }
        self.write_alone(out, "\n")?;
        writeln!(
            out,
            "\nAll intervals hold together with {} confidence; a change counts from {} or {} on, whichever is larger.",
            share(self.confidence),
            share(self.floor.share),
            time(self.floor.ns)
        )?;
        if !self.gates.is_empty() {
            writeln!(out)?;
        }
        for gate in &self.gates {
            let class = gate.class.map_or(String::new(), |c| format!(" [{c}]"));
            writeln!(out, "gate    {}{class}: {}; {}", gate.gate, gate.outcome.title(), gate.text)?;
        }
        Ok(())
    }

    fn write_alone(&self, out: &mut String, before: &str) -> std::fmt::Result {
        for (side, classes) in [("the base", &self.only_in_base), ("the new", &self.only_in_new)] {
            if !classes.is_empty() {
                let names: Vec<String> = classes.iter().map(ToString::to_string).collect();
                writeln!(out, "{before}Not in every run, and not compared: of {side} {}", names.join("; "))?;
            }
        }
        Ok(())
    }

    fn write_markdown(&self, out: &mut String) -> std::fmt::Result {
        let conclusion = if self.moved() {
            "something moved"
        } else if self.classes.iter().all(|c| c.verdict == Verdict::Same) {
            "nothing moved"
        } else {
            "nothing is shown to have moved"
        };
        writeln!(out, "### fabscope compare: {conclusion}\n")?;
        for class in &self.classes {
            writeln!(out, "- **{}**: {}", escape(&class.class.to_string()), escape(&class.sentence))?;
        }
        if !self.gates.is_empty() {
            writeln!(out, "\n| gate | class | outcome | figures |\n|---|---|---|---|")?;
            for gate in &self.gates {
                let class = gate.class.map_or(String::new(), |c| c.to_string());
                writeln!(
                    out,
                    "| `{}` | {} | {} | {} |",
                    gate.gate.replace('|', "\\|"),
                    escape(&class),
                    gate.outcome.title(),
                    escape(&gate.text)
                )?;
            }
        }
        for class in self.shown().0 {
            writeln!(
                out,
                "\n**{}** ({} commands against {})\n",
                escape(&class.class.to_string()),
                count(class.base_commands),
                count(class.new_commands)
            )?;
            writeln!(out, "| | base | new | difference | between | ratio | verdict |")?;
            writeln!(out, "|---|--:|--:|--:|--:|--:|---|")?;
            for row in &class.rows {
                let mut verdict = row.verdict.map_or("not comparable", Verdict::title).to_owned();
                if row.verdict == Some(Verdict::CannotTell) && row.hooks_ns > 0.0 {
                    verdict += &format!(" (hooks may be {})", time(row.hooks_ns));
                }
                match row.of(Statistic::Typical) {
                    Some(c) => writeln!(
                        out,
                        "| {} | {} | {} | {} | {} | {} | {verdict} |",
                        row.title,
                        time(c.base_ns),
                        time(c.new_ns),
                        signed(c.difference_ns),
                        interval(c),
                        c.ratio.map_or("-".into(), factor)
                    )?,
                    None => writeln!(out, "| {} | - | - | - | - | - | {verdict} |", row.title)?,
                }
            }
        }
        writeln!(out)?;
        for d in &self.differences {
            writeln!(out, "- differs: {}: {} → {}", escape(&d.what), escape(&d.base), escape(&d.new))?;
        }
        for b in self.boundaries.iter().filter(|b| !b.same_moment) {
            writeln!(out, "- not the same moment: {}", b.boundary)?;
        }
        for note in &self.notes {
            writeln!(out, "- {}", escape(note))?;
        }
        self.write_alone(out, "- ")
    }
}

fn size(class: &ClassComparison) -> u64 {
    class.base_commands.min(class.new_commands)
}

fn hook(hook: Option<&str>, measured: bool, rung: Option<u32>) -> String {
    match (hook, measured) {
        (None, _) => "none".into(),
        (Some(hook), true) => format!("{hook} (rung {})", rung.unwrap_or(0)),
        (Some(hook), false) => {
            format!("{hook} (rung {}, not always or not its own moment)", rung.unwrap_or(0))
        }
    }
}

fn write_side(out: &mut String, name: &str, side: &SideOf) -> std::fmt::Result {
    let runs = side.runs.len();
    for (n, repetition) in side.runs.iter().enumerate().take(2) {
        for run in [&repetition.host, &repetition.target].into_iter().flatten() {
            let start = if n == 0 { name } else { "" };
            writeln!(out, "{start:<7} {}", describe(run))?;
        }
    }
    if runs > 2 {
        let s = if runs == 3 { "" } else { "s" };
        writeln!(out, "        and {} more repetition{s}", runs - 2)?;
    }
    let load = &side.load;
    writeln!(
        out,
        "        {} commands/s, {:.1} in flight, {:.0} queue{}, {}",
        count(load.commands_per_second.round() as u64),
        load.in_flight,
        load.queues,
        if load.queues == 1.0 { "" } else { "s" },
        load.transports.join(" and ")
    )
}

fn describe(run: &RunFigures) -> String {
    format!(
        "{}: {} {} {}, machine {}, {} commands in {:.1} s",
        run.run,
        run.kind,
        run.software,
        run.version,
        run.machine,
        count(run.commands),
        run.seconds
    )
}

fn write_class(out: &mut String, class: &ClassComparison, detail: bool) -> std::fmt::Result {
    writeln!(
        out,
        "{}: {} commands against {}",
        class.class,
        count(class.base_commands),
        count(class.new_commands)
    )?;
    writeln!(out, "  {}", class.sentence)?;
    writeln!(
        out,
        "  {:<26}{:>8}{:>10}{:>10}{:>11}{:>24}{:>9}  verdict",
        "", "", "base", "new", "difference", "between", "ratio"
    )?;
    for row in &class.rows {
        let statistics: Vec<Statistic> = Statistic::ALL
            .into_iter()
            .filter(|s| {
                let moved = row.of(*s).is_some_and(|c| c.verdict == Verdict::Moved);
                *s == Statistic::Typical || detail || moved
            })
            .collect();
        write_row(out, row, &statistics)?;
    }
    let lacking: Vec<String> = Statistic::ALL
        .into_iter()
        .filter(|s| detail && class.rows.iter().all(|row| row.of(*s).is_none()))
        .map(|s| format!("{} needs {} commands a run", s.title(), count(s.needs())))
        .collect();
    if !lacking.is_empty() {
        writeln!(out, "  not shown: {}", lacking.join(", "))?;
    }
    let reasons: Vec<&Row> = class.rows.iter().filter(|r| r.why.is_some()).collect();
    for row in reasons {
        writeln!(out, "  {}: {}", row.title, row.why.as_deref().unwrap_or_default())?;
    }
    Ok(())
}

fn write_row(out: &mut String, row: &Row, statistics: &[Statistic]) -> std::fmt::Result {
    if row.verdict.is_none() {
        return writeln!(out, "  {:<26}can not be compared", row.title);
    }
    let mut first = true;
    // A long title has a line of its own.
    if row.title.len() > 25 {
        writeln!(out, "  {}", row.title)?;
        first = false;
    }
    for &statistic in statistics {
        let title = if first { row.title.as_str() } else { "" };
        first = false;
        // What is said once for all rows.
        let Some(c) = row.of(statistic) else { continue };
        writeln!(
            out,
            "  {title:<26}{:>8}{:>10}{:>10}{:>11}{:>24}{:>9}  {}",
            statistic.title(),
            time(c.base_ns),
            time(c.new_ns),
            signed(c.difference_ns),
            interval(c),
            c.ratio.map_or("-".into(), factor),
            told(c, row.hooks_ns)
        )?;
    }
    Ok(())
}

fn interval(c: &Cell) -> String {
    match (c.low_ns, c.high_ns) {
        (Some(low), Some(high)) => format!("{} .. {}", signed(low), signed(high)),
        _ => "-".into(),
    }
}

fn told(c: &Cell, hooks_ns: f64) -> String {
    match (c.verdict, c.detectable_ns) {
        (Verdict::CannotTell, Some(least)) if hooks_ns > 0.0 => {
            format!("cannot tell (shows {} or more; hooks may be {})", time(least), time(hooks_ns))
        }
        (Verdict::CannotTell, Some(least)) => format!("cannot tell (shows {} or more)", time(least)),
        (verdict, _) => verdict.title().into(),
    }
}

fn share(share: f64) -> String {
    let text = format!("{:.4}", share * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Names in a run are what other machines sent: nothing in them is to be markup.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '_' | '|' | '[' | ']' | '#' => {
                out.push('\\');
                out.push(c);
            }
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '\n' | '\r' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// The form's name, for headings.
pub(crate) const fn form_name(form: Form) -> &'static str {
    match form {
        Form::Single => "one run a side",
        Form::Repeated => "repeated runs",
    }
}
