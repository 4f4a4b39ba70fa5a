//! A report for a person. It shows what the report holds and computes nothing but shares and counts for
//! reading.

use crate::join::{Aside, SetAside};
use crate::listed::SlowCommand;
use crate::model::SubStage;
use crate::report::{Class, Figures, JoinFigures, Report, RunFigures, WindowFigures};
use crate::stats::{Distribution, needed};
use crate::tails::{Cause, Otherwise, Tail};
use run_format::{Boundary, Effect, Overhead, Side, Stage};
use std::fmt::Write;

/// Classes that are shown; the rest is counted.
const CLASSES: usize = 16;
/// Width of a full bar.
const BAR: usize = 24;

impl Report {
    /// The report as a person reads it, some 100 columns wide.
    #[must_use]
    pub fn to_table(&self) -> String {
        let mut out = String::new();
        // Writing into a String can not fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        for (side, run) in [(Side::Host, &self.host), (Side::Target, &self.target)] {
            if let Some(run) = run {
                write_run(out, side, run)?;
            }
        }
        if let Some(join) = &self.join {
            write_join(out, join)?;
        }
        self.write_clock(out)?;
        self.write_boundaries(out)?;
        if self.percentile_error > 0.0 {
            writeln!(
                out,
                "note    the runs are larger than the memory that may be taken: percentiles are within {} %",
                self.percentile_error * 100.0
            )?;
        }
        for note in &self.notes {
            writeln!(out, "note    {note}")?;
        }
        let mut shown: Vec<&Class> = self.classes.iter().collect();
        shown.sort_by_key(|c| std::cmp::Reverse(c.commands));
        let left = shown.len().saturating_sub(CLASSES);
        let least = shown.get(CLASSES.saturating_sub(1)).map_or(0, |c| c.commands);
        let mut few = CLASSES;
        for class in &self.classes {
            // The largest classes, in the report's order.
            if class.commands >= least && few > 0 {
                few -= 1;
                writeln!(out)?;
                write_class(out, class)?;
            }
        }
        if left > 0 {
            writeln!(out, "\n{left} more classes with fewer commands: --format json has them all")?;
        }
        if !self.slowest.is_empty() {
            writeln!(out)?;
            write_slowest(out, &self.slowest)?;
        }
        if !self.fio.is_empty() {
            writeln!(out)?;
            for f in &self.fio {
                writeln!(
                    out,
                    "fio     {}: {} I/Os, mean {}; recorded here: {} commands, mean {}; fio's is {} {}",
                    f.direction,
                    count(f.ios),
                    time(f.fio_mean_ns),
                    count(f.commands),
                    time(f.recorded_mean_ns),
                    time(f.difference_ns.abs()),
                    if f.difference_ns >= 0.0 { "more: its own submission and completion" } else { "less" }
                )?;
            }
        }
        Ok(())
    }

    fn write_clock(&self, out: &mut String) -> std::fmt::Result {
        let Some(clock) = &self.clock else { return Ok(()) };
        if clock.shared {
            return writeln!(out, "clock   one machine, one clock");
        }
        writeln!(
            out,
            "clock   host less target {} s, known to +-{} (at worst {}); drift {:+.2} ppm",
            seconds(clock.offset_ns),
            time(clock.uncertainty_ns as f64),
            time(clock.uncertainty_max_ns as f64),
            clock.drift_ppm
        )
    }

    fn write_boundaries(&self, out: &mut String) -> std::fmt::Result {
        let lacking: Vec<_> = self.boundaries.iter().filter(|b| !b.measured || b.fell_back > 0).collect();
        if lacking.is_empty() {
            return writeln!(out, "hooks   every boundary was measured");
        }
        for b in lacking {
            let what = match (&b.hook, b.measured) {
                (None, _) => "not measured".to_owned(),
                (Some(hook), false) => format!("stood for by {hook}"),
                (Some(_), true) => "measured".to_owned(),
            };
            write!(out, "hooks   {} {what}", b.boundary)?;
            if b.fell_back > 0 {
                write!(out, "; {} commands lack it: {}", count(b.fell_back), consequence(b.boundary))?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

/// What it means for the stages that a boundary is lacking.
fn consequence(boundary: Boundary) -> String {
    match boundary {
        Boundary::TR2t => "the wait for their data is counted in the target driver".into(),
        Boundary::HR2t | Boundary::HDataSent => {
            "the host's answer to R2Ts may be counted in the network".into()
        }
        b => {
            let instead: Vec<&str> = crate::model::fallbacks(b).iter().map(|b| b.name()).collect();
            format!("{} stands for it", instead.join(" or "))
        }
    }
}

fn write_run(out: &mut String, side: Side, run: &RunFigures) -> std::fmt::Result {
    write!(
        out,
        "{side:<7} {}: {} {} {}, machine {}, {} commands in {}",
        run.run,
        run.kind,
        run.software,
        run.version,
        run.machine,
        count(run.commands),
        span(run.seconds)
    )?;
    if run.one_in > 1 {
        write!(out, ", 1 in {} kept", run.one_in)?;
    }
    if run.lost > 0 {
        write!(out, ", {} lost while recording", count(run.lost))?;
    }
    if run.state == run_format::State::Open {
        write!(out, ", cut short")?;
    }
    writeln!(out)?;
    if let Some(windows) = &run.windows {
        write_windows(out, windows)?;
    }
    run.overhead.as_ref().map_or(Ok(()), |overhead| write_overhead(out, overhead))
}

fn write_windows(out: &mut String, windows: &WindowFigures) -> std::fmt::Result {
    write!(
        out,
        "        in {} window{} of {} each {}: armed for {}, {:.1} % of the time",
        count(windows.slices),
        if windows.slices == 1 { "" } else { "s" },
        run_format::Nanos(windows.length_ns),
        run_format::Nanos(windows.every_ns),
        span(windows.armed_seconds),
        windows.share * 1e2
    )?;
    if let Some(seconds) = windows.in_place_seconds {
        write!(out, " (probes in place for {})", span(seconds))?;
    }
    if windows.skipped > 0 {
        write!(out, "; {} left out, not armed in time or beyond the budget", count(windows.skipped))?;
    }
    writeln!(out)
}

/// What recording cost, or the least cost that would have been seen.
fn write_overhead(out: &mut String, overhead: &Overhead) -> std::fmt::Result {
    type Shown<'a> = (&'a str, Option<Effect>, &'a dyn Fn(f64) -> String);
    let times = |ns: f64| format!("{:.2} us", ns / 1e3);
    let share = |share: f64| format!("{:.1} %", share * 1e2);
    let mut said = Vec::new();
    let figures: [Shown<'_>; 4] = [
        ("a command", overhead.added_ns, &times),
        ("of the process's CPU time a command", overhead.core_ns, &times),
        ("of mean latency", overhead.latency_ns, &times),
        ("of the throughput", overhead.lost, &share),
    ];
    for (what, effect, text) in figures {
        let Some(effect) = effect else { continue };
        said.push(match effect.is_shown() {
            true => format!("{} {what} ({} to {})", text(effect.mean), text(effect.low), text(effect.high)),
            false => {
                format!("can not tell {what} (less than {} would not have shown)", text(effect.smallest))
            }
        });
    }
    if !said.is_empty() {
        writeln!(
            out,
            "        recording cost: {}; 95 % intervals over {} pairs of windows",
            said.join("; "),
            overhead.pairs
        )?;
    }
    if let Some(own) = overhead.recorder_ns {
        writeln!(out, "        the recorder itself took {} of CPU time a command", times(own))?;
    }
    overhead.notes.iter().try_for_each(|note| writeln!(out, "        what recording cost: {note}"))
}

fn write_join(out: &mut String, join: &JoinFigures) -> std::fmt::Result {
    let within = |aside: &Aside| {
        let elsewhere =
            aside.of(SetAside::Outside) + aside.of(SetAside::Unsampled) + aside.of(SetAside::OtherQueue);
        join.joined + aside.total() - elsewhere
    };
    writeln!(
        out,
        "joined  {} commands over {} queue{}: {} of the host's and {} of the target's within both recordings",
        count(join.joined),
        join.queues,
        if join.queues == 1 { "" } else { "s" },
        share_of(join.joined, within(&join.host_set_aside)),
        share_of(join.joined, within(&join.target_set_aside)),
    )?;
    if let Some(seconds) = join.armed_seconds {
        writeln!(out, "        both sides were armed at once for {}", span(seconds))?;
    }
    let reasons = SetAside::ALL.iter().filter(|r| join.set_aside.of(**r) > 0);
    let rows: Vec<[String; 3]> = reasons
        .map(|r| {
            [
                count(join.host_set_aside.of(*r)),
                count(join.target_set_aside.of(*r)),
                format!("{}: {}", r.name(), r.meaning()),
            ]
        })
        .collect();
    if !rows.is_empty() {
        writeln!(out, "        set aside {:>11} {:>12}", "host", "target")?;
        for [host, target, why] in rows {
            writeln!(out, "        {host:>21} {target:>12}   {why}")?;
        }
    }
    Ok(())
}

fn write_class(out: &mut String, class: &Class) -> std::fmt::Result {
    let group = class.group.as_ref().map_or(String::new(), |g| format!("{g}: "));
    let size = if class.bytes > 0 { format!(" {}", bytes(class.bytes)) } else { String::new() };
    let error = if class.error { ", ended with an error" } else { "" };
    let mostly = class.largest_stage.map_or(String::new(), |s| format!(", most in {s}"));
    writeln!(
        out,
        "{group}{}{size}{error}: {} commands, mean {}{mostly}",
        class.operation,
        count(class.commands),
        time(class.latency.mean_ns)
    )?;
    writeln!(
        out,
        "  {:<28}{:>9}{:>8}{:>10}{:>10}{:>10}{:>10}",
        "stage", "mean", "share", "p50", "p90", "p99", "p99.9"
    )?;
    for stage in Stage::ALL {
        if let Some(figures) = class.stages.of(stage) {
            write_line(out, stage.title(), figures, Some('#'))?;
            // One part says what the stage says.
            if class.parts.iter().filter(|p| p.stage == stage).count() > 1 {
                for part in class.parts.iter().filter(|p| p.stage == stage && passed(&p.figures)) {
                    let (what, _) = part.part.meaning().split_once(':').unwrap_or((part.part.meaning(), ""));
                    let sure = part.uncertainty_ns.filter(|u| *u > 0.5);
                    let sure = sure.map_or(String::new(), |u| format!(" (+-{})", time(u)));
                    write_line(out, &format!("  {what}{sure}"), &part.figures, None)?;
                }
            }
        }
    }
    if let Some(figures) = &class.beyond_host {
        write_line(out, "beyond the host", figures, Some('#'))?;
    }
    if let Some(figures) = class.data_wait.filter(|f| f.times.mean_ns > 0.0) {
        write_line(out, "wait for R2T data", &figures, Some('#'))?;
    }
    let all = Figures { share: 1.0, times: class.latency };
    write_line(out, "latency", &all, None)?;
    for tail in &class.tails {
        write_tail(out, tail)?;
    }
    let lacking: Vec<String> = [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9")]
        .iter()
        .filter(|(p, _)| class.commands < needed(*p))
        .map(|(p, name)| format!("{name} needs {}", count(needed(*p))))
        .collect();
    if !lacking.is_empty() {
        writeln!(
            out,
            "  {} commands are too few for some percentiles: {}",
            class.commands,
            lacking.join(", ")
        )?;
    }
    Ok(())
}

/// Causes that are shown of a tail, and the least share of one that is.
const CAUSES: usize = 3;
const LEAST_SHARE: f64 = 0.05;

fn write_tail(out: &mut String, tail: &Tail) -> std::fmt::Result {
    let name = format!("p{}", (tail.percentile * 1e3).round() / 10.0);
    write!(
        out,
        "  above {name} ({}): {} commands, mean {}",
        time(tail.above_ns as f64),
        count(tail.commands),
        time(tail.mean_ns)
    )?;
    // Fewer say nothing of how sure a share is.
    if tail.causes.iter().any(|cause| cause.interval.is_none()) {
        let all = if tail.stretches == 1 { "stretch" } else { "stretches" };
        write!(out, ", in {} {all} of 20 of the time", tail.stretches)?;
    }
    writeln!(out)?;
    // What may as well be nothing is no finding.
    let found = |cause: &Cause| cause.interval.is_none_or(|[low, _]| low > 0.0);
    if !tail.causes.iter().any(|cause| cause.share >= LEAST_SHARE && found(cause)) {
        writeln!(out, "    too few to tell what makes them slow")?;
    }
    let shown = tail.causes.iter().filter(|cause| cause.share >= LEAST_SHARE && found(cause)).take(CAUSES);
    for (n, cause) in shown.enumerate() {
        let what = if n == 0 { "slow by" } else { "" };
        let stage = Stage::ALL.iter().find(|stage| stage.name() == cause.stage).map(|stage| stage.title());
        let stage = stage.map_or_else(|| cause.stage.replace('_', " "), str::to_owned);
        write!(out, "    {what:<8}{stage:<18}{:>4.0} %", cause.share * 1e2)?;
        if let Some([low, high]) = cause.interval {
            write!(out, " ({:.0} to {:.0})", low.max(0.0) * 1e2, high.min(1.0) * 1e2)?;
        }
        let Otherwise { ns, at_most } = cause.otherwise;
        let would = if at_most { "be at most" } else { "be" };
        writeln!(
            out,
            ": {} for {}; with it at its median {name} would {would} {}",
            time(cause.mean_ns),
            time(cause.median_ns as f64),
            time(ns as f64)
        )?;
    }
    Ok(())
}

/// The slowest commands: when and how long, who, and what of it each part took.
fn write_slowest(out: &mut String, commands: &[SlowCommand]) -> std::fmt::Result {
    let all = if commands.len() == 1 { "command" } else { "commands" };
    writeln!(out, "the slowest {} {all}", count(commands.len() as u64))?;
    for command in commands {
        let size = if command.bytes > 0 { format!(" {}", bytes(command.bytes)) } else { String::new() };
        let cid = command.cid.map_or(String::new(), |cid| format!(", cid {cid}"));
        let status = match command.status {
            0 => String::new(),
            status => format!(", status {:x}h/{:02x}h", status >> 8, status & 0xff),
        };
        writeln!(
            out,
            "  {:>9} at {:.6} s: {}{size}, nsid {} slba {}{cid} of {}, CPU {}{status}",
            time(command.latency_ns as f64),
            command.at_seconds,
            command.operation,
            command.nsid,
            command.slba,
            command.queue,
            command.cpu
        )?;
        let known = Stage::ALL.iter().zip(command.stages).filter_map(|(&stage, ns)| Some((stage, ns?)));
        for (stage, ns) in known {
            write_share(out, command, stage.title(), ns)?;
            let parts: Vec<String> = command
                .parts
                .iter()
                .filter(|(part, ns)| {
                    part.stage() == stage && *ns != 0 && *ns != command.stages[stage as usize].unwrap_or(*ns)
                })
                .map(|(part, ns)| {
                    let (what, _) = part.meaning().split_once(':').unwrap_or((part.meaning(), ""));
                    let sure = command.uncertainty_ns.filter(|u| *u > 0);
                    let sure = sure.filter(|_| matches!(part, SubStage::NetworkOut | SubStage::NetworkBack));
                    let sure = sure.map_or(String::new(), |u| format!(" +-{}", time(u as f64)));
                    format!("{what} {}{sure}", time(*ns as f64))
                })
                .collect();
            if !parts.is_empty() {
                write!(out, "  {}", parts.join(", "))?;
            }
            writeln!(out)?;
        }
        for (what, ns) in
            [("beyond the host", command.beyond_host_ns), ("wait for R2T data", command.data_wait_ns)]
        {
            if let Some(ns) = ns.filter(|&ns| ns != 0) {
                write_share(out, command, what, ns)?;
                writeln!(out)?;
            }
        }
    }
    Ok(())
}

fn write_share(out: &mut String, command: &SlowCommand, what: &str, ns: i64) -> std::fmt::Result {
    let share = ns as f64 / command.latency_ns.max(1) as f64 * 1e2;
    write!(out, "    {what:<18}{:>9}{share:>5.0} %", time(ns as f64))
}

/// Whether any command of a class passed a part: reads have no R2Ts.
fn passed(figures: &Figures) -> bool {
    let Distribution { mean_ns, p999_ns, .. } = figures.times;
    mean_ns != 0.0 || p999_ns.is_some_and(|p| p != 0)
}

fn write_line(out: &mut String, name: &str, figures: &Figures, bar: Option<char>) -> std::fmt::Result {
    let Distribution { mean_ns, p50_ns, p90_ns, p99_ns, p999_ns } = figures.times;
    write!(out, "  {name:<28}{:>9}{:>7.1}%", time(mean_ns), figures.share * 100.0)?;
    for p in [p50_ns, p90_ns, p99_ns, p999_ns] {
        write!(out, "{:>10}", p.map_or("-".to_owned(), |ns| time(ns as f64)))?;
    }
    if let Some(bar) = bar {
        let length = (figures.share * BAR as f64).round().clamp(0.0, BAR as f64) as usize;
        write!(out, "  {}", bar.to_string().repeat(length))?;
    }
    let trimmed = out.trim_end().len();
    out.truncate(trimmed);
    writeln!(out)
}

/// Three digits with the unit that fits.
pub(crate) fn time(ns: f64) -> String {
    let (value, unit) = match ns.abs() {
        v if v < 999.5 => return format!("{ns:.0} ns"),
        v if v < 999.5e3 => (ns / 1e3, "us"),
        v if v < 999.5e6 => (ns / 1e6, "ms"),
        _ => (ns / 1e9, "s"),
    };
    let digits = match value.abs() {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

/// A length of time, to a tenth of a second, or to three digits where it is shorter than one.
fn span(seconds: f64) -> String {
    if seconds < 0.9995 { time(seconds * 1e9) } else { format!("{seconds:.1} s") }
}

/// Nanoseconds as seconds, to the microsecond.
fn seconds(ns: i64) -> String {
    format!("{:+.6}", ns as f64 / 1e9)
}

/// A number with its thousands apart.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// A share that is never rounded up to the whole.
fn share_of(part: u64, whole: u64) -> String {
    if part == whole {
        return "100 %".into();
    }
    let share = part as f64 / whole.max(1) as f64 * 100.0;
    format!("{:.3} %", (share * 1e3).floor() / 1e3)
}

/// A size in the unit that divides it.
pub(crate) fn bytes(n: u32) -> String {
    match n {
        n if n % (1 << 20) == 0 => format!("{} MiB", n >> 20),
        n if n % (1 << 10) == 0 => format!("{} KiB", n >> 10),
        n => format!("{n} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::{bytes, count, share_of, time};

    #[test]
    fn numbers_have_the_digits_that_they_deserve() {
        assert_eq!(
            [0.4, 999.4, 999.6, 12_345.0, 1_234_567.0].map(time),
            ["0 ns", "999 ns", "1.00 us", "12.3 us", "1.23 ms"]
        );
        assert_eq!([7, 999, 1_000, 12_345_678].map(count), ["7", "999", "1 000", "12 345 678"]);
        assert_eq!([512, 4_096, 1 << 20, 5_000].map(bytes), ["512 B", "4 KiB", "1 MiB", "5000 B"]);
        assert_eq!(share_of(999_999, 1_000_000), "99.999 %");
        assert_eq!(share_of(9_999_999, 10_000_000), "99.999 %");
        assert_eq!(share_of(3, 3), "100 %");
    }
}
