//! A diagnosis for a person, as a table for a terminal and as Markdown. It shows what the diagnosis holds and computes
//! nothing.

use super::rules::{number, percent};
use super::{Diagnosis, Finding, Judged, QueueLevel, ServiceLevel, Stall};
use crate::table::{bytes, count, time};
use run_format::Side;
use std::fmt::Write;

/// Classes, queues and stalls that are shown; the rest is counted.
const CLASSES: usize = 6;
const QUEUES: usize = 8;
const STALLS: usize = 5;
/// Width of running text.
const WIDTH: usize = 108;

impl Diagnosis {
    /// Whether a service level surely does not hold, or could not be told.
    #[must_use]
    pub fn slo_outcome(&self) -> crate::Outcome {
        crate::Outcome::of_all(self.slo.iter().map(|slo| slo.outcome))
    }

    /// As a person reads it.
    #[must_use]
    pub fn to_table(&self) -> String {
        let mut out = String::new();
        // Writing into a String can not fail.
        let _ = self.write_table(&mut out);
        out
    }

    /// As Markdown.
    #[must_use]
    pub fn to_markdown(&self) -> String {
        let mut out = String::new();
        let _ = self.write_markdown(&mut out);
        out
    }

    /// The answer in one line.
    #[must_use]
    pub fn sentence(&self) -> String {
        match &self.causes[..] {
            [] => {
                let open = match self.cannot_tell.len() {
                    0 => String::new(),
                    n => format!(", {n} can not be told"),
                };
                format!("no cause found: {} ruled out{open}", self.ruled_out.len())
            }
            [first, rest @ ..] => {
                let more = match rest.len() {
                    0 => String::new(),
                    n => format!(" (and {n} more)"),
                };
                let subject = first.subject.as_ref().map_or(String::new(), |s| format!(", {s}"));
                format!("{}: {}{subject}{more}", first.cause, first.cause.title())
            }
        }
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        wrapped(out, "cause   ", &self.sentence())?;
        for (side, run) in [(Side::Host, &self.host), (Side::Target, &self.target)] {
            let line = format!(
                "{}: {} {} {}, machine {}, {} commands in {:.1} s",
                run.run,
                run.kind,
                run.software,
                run.version,
                run.machine,
                count(run.commands),
                run.seconds
            );
            wrapped(out, &format!("{side:<8}"), &line)?;
        }
        let queues = self.join.queues;
        writeln!(out, "joined  {} commands over {queues} queue{}", count(self.join.joined), plural(queues))?;
        if let Some(baseline) = &self.baseline {
            writeln!(out, "against {baseline}")?;
        }
        if let Some(part) = &self.part {
            wrapped(out, "part    ", part)?;
        }
        for note in &self.notes {
            wrapped(out, "note    ", note)?;
        }
        writeln!(out)?;
        for level in self.service.iter().take(CLASSES) {
            write_level(out, level)?;
        }
        if self.service.len() > CLASSES {
            writeln!(out, "{} more classes: --format json has them all", self.service.len() - CLASSES)?;
        }
        write_queues(out, &self.queues)?;
        for (n, finding) in self.causes.iter().enumerate() {
            write_finding(out, n + 1, finding)?;
        }
        write_stalls(out, &self.stalls)?;
        for (title, judged) in [("ruled out", &self.ruled_out), ("cannot tell", &self.cannot_tell)] {
            if !judged.is_empty() {
                writeln!(out, "\n{title}")?;
                for Judged { cause, why } in judged {
                    wrapped(out, &format!("  {:<20}", cause.name()), why)?;
                }
            }
        }
        if !self.slo.is_empty() {
            writeln!(out)?;
        }
        for slo in &self.slo {
            let class = slo.class.as_ref().map_or(String::new(), |c| format!(" [{c}]"));
            writeln!(out, "slo     {}{class}: {}; {}", slo.slo, slo.outcome.title(), slo.text)?;
        }
        Ok(())
    }

    fn write_markdown(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "### fabscope diagnose: {}\n", escape(&self.sentence()))?;
        writeln!(
            out,
            "| class | commands | IOPS | p50 | p99 | p99.9 | most in | slowest by |\n|---|---|---|---|---|---|---|---|"
        )?;
        for level in self.service.iter().take(CLASSES) {
            let of = |ns: Option<i64>| ns.map_or("-".to_owned(), |ns| time(ns as f64));
            let (most, slowest) = largest(level);
            writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {most} | {slowest} |",
                class_name(level),
                count(level.commands),
                number(level.iops),
                of(level.latency.p50_ns),
                of(level.latency.p99_ns),
                of(level.latency.p999_ns)
            )?;
        }
        for finding in &self.causes {
            writeln!(
                out,
                "\n#### {}: {}\n\nExplains {}.\n",
                finding.cause,
                escape(finding.cause.title()),
                escape(&explains(finding))
            )?;
            finding.evidence.iter().try_for_each(|e| writeln!(out, "- {}", escape(&e.text)))?;
            finding
                .not_refuted
                .iter()
                .try_for_each(|text| writeln!(out, "- not refuted: {}", escape(text)))?;
            writeln!(
                out,
                "\n**Change:** {}\n\n**Trade-off:** {}\n\n**Verify:** `{}`",
                escape(finding.mitigation),
                escape(finding.trade_off),
                finding.verify
            )?;
        }
        if !self.slo.is_empty() {
            writeln!(out, "\n| service level | class | outcome | figures |\n|---|---|---|---|")?;
            for slo in &self.slo {
                let class = slo.class.as_deref().unwrap_or("");
                writeln!(out, "| {} | {class} | {} | {} |", escape(&slo.slo), slo.outcome.title(), slo.text)?;
            }
        }
        for (title, judged) in [("Ruled out", &self.ruled_out), ("Cannot tell", &self.cannot_tell)] {
            if !judged.is_empty() {
                writeln!(out, "\n<details><summary>{title}: {}</summary>\n", judged.len())?;
                for Judged { cause, why } in judged {
                    writeln!(out, "- **{cause}**: {}", escape(why))?;
                }
                writeln!(out, "\n</details>")?;
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(out, "\n> {}", escape(note)))
    }
}

fn plural(n: usize) -> &'static str {
    if n == 1 { "" } else { "s" }
}

/// Names from the runs must not be taken for Markdown or HTML.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '|' | '<' | '>' | '*' | '_' | '`' | '[' | ']' | '\\' => out.extend(['\\', c]),
            '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A line with what does not fit continued beneath it.
fn wrapped(out: &mut String, head: &str, text: &str) -> std::fmt::Result {
    let indent = head.chars().count();
    let mut line = String::new();
    let mut first = true;
    let flush = |out: &mut String, line: &mut String, first: &mut bool| {
        let head = if *first { head.to_owned() } else { " ".repeat(indent) };
        *first = false;
        let written = writeln!(out, "{head}{line}");
        line.clear();
        written
    };
    for word in text.split_whitespace() {
        if !line.is_empty() && indent + line.chars().count() + 1 + word.chars().count() > WIDTH {
            flush(out, &mut line, &mut first)?;
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    flush(out, &mut line, &mut first)
}

fn class_name(level: &ServiceLevel) -> String {
    let size = if level.bytes > 0 { format!(" {}", bytes(level.bytes)) } else { String::new() };
    format!("{}{size}", level.operation)
}

/// The stages with the largest mean, and with most of what the slowest commands are slower by.
fn largest(level: &ServiceLevel) -> (String, String) {
    let most = level.stages.iter().max_by(|a, b| a.share.total_cmp(&b.share));
    let slowest = level.stages.iter().max_by(|a, b| a.of_slowest.total_cmp(&b.of_slowest));
    let name = |share: f64, stage: run_format::Stage| format!("{} {}", stage.title(), percent(share));
    (
        most.map_or_else(String::new, |s| name(s.share, s.stage)),
        slowest.map_or_else(String::new, |s| name(s.of_slowest, s.stage)),
    )
}

fn write_level(out: &mut String, level: &ServiceLevel) -> std::fmt::Result {
    let of = |ns: Option<i64>| ns.map_or("-".to_owned(), |ns| time(ns as f64));
    let l = &level.latency;
    writeln!(
        out,
        "{}: {} commands, {} IOPS, {} MiB/s, mean {}, p50 {}, p90 {}, p99 {}, p99.9 {}",
        class_name(level),
        count(level.commands),
        number(level.iops),
        number(level.bandwidth / f64::from(1 << 20)),
        time(l.mean_ns),
        of(l.p50_ns),
        of(l.p90_ns),
        of(l.p99_ns),
        of(l.p999_ns)
    )?;
    writeln!(
        out,
        "  {:<18}{:>10}{:>9}{:>12}{:>18}{:>14}",
        "stage",
        "mean",
        "share",
        if level.stages.iter().any(|s| s.floor_of_baseline) { "baseline" } else { "at best" },
        "in the slowest",
        "slow by"
    )?;
    for stage in &level.stages {
        writeln!(
            out,
            "  {:<18}{:>10}{:>9}{:>12}{:>18}{:>14}",
            stage.stage.title(),
            time(stage.times.mean_ns),
            percent(stage.share),
            time(stage.floor_ns as f64),
            time(stage.slowest_ns),
            percent(stage.of_slowest)
        )?;
    }
    Ok(())
}

fn write_queues(out: &mut String, queues: &[QueueLevel]) -> std::fmt::Result {
    writeln!(
        out,
        "\n  {:<36}{:>10}{:>10}{:>11}   of them in: block, driver, network, target, storage",
        "queue", "IOPS", "CPUs", "in flight"
    )?;
    for queue in queues.iter().take(QUEUES) {
        let stages: Vec<String> = queue.by_stage.iter().map(|v| format!("{:>7}", number(*v))).collect();
        writeln!(
            out,
            "  {:<36}{:>10}{:>10}{:>11}   {}",
            queue.queue,
            number(queue.iops),
            queue.cpus,
            number(queue.in_flight),
            stages.join(" ")
        )?;
    }
    if queues.len() > QUEUES {
        writeln!(out, "  {} more queues", queues.len() - QUEUES)?;
    }
    Ok(())
}

/// How much a finding explains, in words.
fn explains(finding: &Finding) -> String {
    format!(
        "{} of what the slowest commands and {} of what all take longer than when nothing is in the way; {} commands, {} each on average",
        percent(finding.of_slowest),
        percent(finding.of_all),
        count(finding.commands),
        time(finding.excess_ns)
    )
}

fn write_finding(out: &mut String, n: usize, finding: &Finding) -> std::fmt::Result {
    let subject = finding.subject.as_ref().map_or(String::new(), |s| format!(" ({s})"));
    let stage = finding.stage.map_or(String::new(), |s| format!(", in {}", s.title()));
    writeln!(out)?;
    wrapped(
        out,
        &format!("{n}. "),
        &format!("{}: {}{subject}{stage}", finding.cause, finding.cause.title()),
    )?;
    wrapped(out, "   explains    ", &explains(finding))?;
    for (n, evidence) in finding.evidence.iter().enumerate() {
        wrapped(out, if n == 0 { "   evidence    " } else { "               " }, &evidence.text)?;
    }
    for text in &finding.not_refuted {
        wrapped(out, "   not refuted ", text)?;
    }
    wrapped(out, "   change      ", finding.mitigation)?;
    wrapped(out, "   trade-off   ", finding.trade_off)?;
    wrapped(out, "   verify      ", &finding.verify)
}

fn write_stalls(out: &mut String, stalls: &[Stall]) -> std::fmt::Result {
    if stalls.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nretransmissions, and the commands in flight on their queue")?;
    let mut shown: Vec<&Stall> = stalls.iter().collect();
    shown.sort_by_key(|s| std::cmp::Reverse(s.slowest_ns));
    let of = |ns: Option<i64>| ns.map_or("-".to_owned(), |ns| time(ns as f64));
    for stall in shown.into_iter().take(STALLS) {
        let when = if stall.from_ns == stall.to_ns {
            format!("at {:.6} s", stall.from_ns as f64 / 1e9)
        } else {
            format!("from {:.3} to {:.3} s", stall.from_ns as f64 / 1e9, stall.to_ns as f64 / 1e9)
        };
        let text = format!(
            "{when}: {} by the {}{}; {} commands, in the network {} in the median (normal {}), the slowest took {}",
            number(stall.segments),
            stall.side,
            if stall.needed() < 0.5 { ", needlessly" } else { "" },
            count(stall.commands),
            of(stall.network_ns),
            of(stall.normal_ns),
            of(stall.slowest_ns)
        );
        wrapped(out, &format!("  {:<34}", stall.queue), &text)?;
    }
    if stalls.len() > STALLS {
        writeln!(out, "  {} more: --format json has them all", stalls.len() - STALLS)?;
    }
    Ok(())
}
