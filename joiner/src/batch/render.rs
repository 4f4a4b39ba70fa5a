//! A batch for a person. It shows what a batch holds and computes nothing but counts for reading.

use super::groups::{By, Merged, MergedStage, OF_TARGETS};
use super::judge::{Change, Outlier, RunName, TooFew, Trend};
use super::series::Quantile;
use super::{Batch, Labels};
use crate::compare::{percent, signed};
use crate::describe::utc;
use crate::table::{count, time};
use run_format::Stage;
use std::fmt::Write;

/// What is shown of each kind; the rest is counted.
const SHOWN: usize = 12;
/// Classes that are shown.
const CLASSES: usize = 8;

impl Batch {
    /// The batch as a person reads it.
    #[must_use]
    pub fn to_table(&self) -> String {
        let mut out = String::new();
        // Writing into a String can not fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let when = match (self.first_ns, self.last_ns) {
            (Some(first), Some(last)) => format!(", {} to {} UTC", utc(first), utc(last)),
            _ => String::new(),
        };
        writeln!(
            out,
            "runs    {} found{when}: {}, {} of one side alone; {} joined now, {} before",
            count(self.runs as u64),
            some(self.pairs, "pair"),
            count(self.one_sided as u64),
            count(self.done_now as u64),
            count(self.done_before as u64)
        )?;
        writeln!(
            out,
            "table   {}: {} rows of {} commands",
            self.table,
            count(self.rows as u64),
            count(self.commands)
        )?;
        if !self.skipped.is_empty() {
            writeln!(out, "skipped {}", count(self.skipped.len() as u64))?;
            for skipped in self.skipped.iter().take(SHOWN) {
                // A reason names the runs on lines of its own, which are known here.
                let why = skipped.why.lines().next().unwrap_or_default();
                let why = why.strip_prefix(&format!("{}/run.json", skipped.path)).unwrap_or(why);
                let why = why.trim_start_matches([':', ' ']);
                writeln!(out, "        {}: {why}", skipped.path)?;
            }
            rest(out, "        ", self.skipped.len(), SHOWN)?;
        }
        if self.by.is_none() {
            let names: Vec<String> = self
                .labels
                .iter()
                .filter(|(_, values)| **values > 1)
                .map(|(l, v)| format!("{l} ({v})"))
                .collect();
            if !names.is_empty() {
                writeln!(out, "labels  with several values, for --by: {}", names.join(", "))?;
            }
        }
        match &self.by {
            Some(by) => write_by(out, by)?,
            None => self.write_classes(out)?,
        }
        self.write_findings(out)
    }

    fn write_classes(&self, out: &mut String) -> std::fmt::Result {
        for merged in largest(&self.classes) {
            writeln!(
                out,
                "\n{}: {}, {} commands",
                merged.class,
                some(merged.runs, "run"),
                count(merged.commands)
            )?;
            writeln!(out, "  {:<28}{:>10}{HEADS}", "all runs merged", "mean")?;
            for stage in &merged.stages {
                writeln!(
                    out,
                    "  {:<28}{:>10}{}",
                    title(&stage.stage),
                    time(stage.times.mean_ns),
                    quantiles(stage)
                )?;
            }
        }
        more_classes(out, self.classes.len())
    }

    fn write_findings(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out)?;
        for change in self.changes.iter().take(SHOWN) {
            write_change(out, change)?;
        }
        rest(out, "", self.changes.len(), SHOWN)?;
        for trend in self.trends.iter().take(SHOWN) {
            write_trend(out, trend)?;
        }
        rest(out, "", self.trends.len(), SHOWN)?;
        for outlier in self.outliers.iter().take(SHOWN) {
            write_outlier(out, outlier)?;
        }
        rest(out, "", self.outliers.len(), SHOWN)?;
        let judged = self.classes.iter().any(|c| !self.too_few.iter().any(|few| few.class == c.class));
        let nothing: Vec<&str> = [
            (self.changes.is_empty(), "change"),
            (self.trends.is_empty(), "trend"),
            (self.outliers.is_empty(), "outlier"),
        ]
        .iter()
        .filter(|(none, _)| *none && judged)
        .map(|(_, what)| *what)
        .collect();
        if !nothing.is_empty() {
            writeln!(out, "none    no {} is shown among the runs that are alike", nothing.join(", no "))?;
        }
        for few in self.too_few.iter().take(SHOWN) {
            write_too_few(out, few)?;
        }
        rest(out, "", self.too_few.len(), SHOWN)
    }
}

/// So many of something.
fn some(n: usize, what: &str) -> String {
    format!("{} {what}{}", count(n as u64), if n == 1 { "" } else { "s" })
}

fn rest(out: &mut String, indent: &str, all: usize, shown: usize) -> std::fmt::Result {
    if all > shown {
        writeln!(out, "{indent}{} more: --format json has them all", count((all - shown) as u64))?;
    }
    Ok(())
}

fn more_classes(out: &mut String, all: usize) -> std::fmt::Result {
    if all > CLASSES {
        writeln!(out, "\n{} more classes with fewer commands: --format json has them all", all - CLASSES)?;
    }
    Ok(())
}

/// The largest classes, in their order.
fn largest(classes: &[Merged]) -> Vec<&Merged> {
    let mut sizes: Vec<u64> = classes.iter().map(|c| c.commands).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let least = sizes.get(CLASSES - 1).copied().unwrap_or(0);
    classes.iter().filter(|c| c.commands >= least).take(CLASSES).collect()
}

const HEADS: &str = "       p50       p90       p99     p99.9";

fn quantiles(stage: &MergedStage) -> String {
    let t = &stage.times;
    let cell = |p: Option<i64>| format!("{:>10}", p.map_or("-".to_owned(), |ns| time(ns as f64)));
    [t.p50_ns, t.p90_ns, t.p99_ns, t.p999_ns].map(cell).concat()
}

/// A stage as the reports call it.
fn title(stage: &str) -> String {
    match stage {
        OF_TARGETS => "latency of targets".into(),
        "beyond_host" => "beyond the host".into(),
        "data_wait" => "wait for R2T data".into(),
        name => {
            let known = Stage::ALL.iter().find(|s| s.name() == name);
            known.map_or_else(|| name.replace('_', " "), |s| s.title().to_owned())
        }
    }
}

fn of(quantile: Quantile) -> &'static str {
    match quantile {
        Quantile::P50 => "p50",
        Quantile::P99 => "p99",
    }
}

fn value(value: Option<&String>) -> &str {
    value.map_or("(none)", String::as_str)
}

fn write_by(out: &mut String, by: &By) -> std::fmt::Result {
    let mut classes: Vec<Merged> = Vec::new();
    for merged in by.groups.iter().flat_map(|g| &g.classes) {
        match classes.iter_mut().find(|c| c.class == merged.class) {
            Some(class) => class.commands += merged.commands,
            None => classes.push(merged.clone()),
        }
    }
    classes.sort_by_key(|c| c.class);
    let width = by.groups.iter().map(|g| value(g.value.as_ref()).chars().count()).max().unwrap_or(0);
    let width = width.clamp(by.label.chars().count(), 32);
    for class in largest(&classes) {
        writeln!(out, "\n{}, by {}", class.class, by.label)?;
        writeln!(
            out,
            "  {:<18}{:<width$}{:>6}{:>12}{:>10}{HEADS}",
            "stage", by.label, "runs", "commands", "mean"
        )?;
        let groups: Vec<_> = by
            .groups
            .iter()
            .filter_map(|g| Some((g, g.classes.iter().find(|c| c.class == class.class)?)))
            .collect();
        let mut stages: Vec<&str> = Vec::new();
        for stage in groups.iter().flat_map(|(_, c)| &c.stages) {
            if !stages.contains(&stage.stage.as_str()) {
                stages.push(&stage.stage);
            }
        }
        for stage in stages {
            let mut name = title(stage);
            let shown: Vec<_> = groups
                .iter()
                .filter_map(|(g, c)| Some((*g, c.stages.iter().find(|s| s.stage == stage)?)))
                .collect();
            for (group, merged) in shown.iter().take(SHOWN) {
                let label: String = value(group.value.as_ref()).chars().take(width).collect();
                writeln!(
                    out,
                    "  {name:<18}{label:<width$}{:>6}{:>12}{:>10}{}",
                    merged.runs,
                    count(merged.commands),
                    time(merged.times.mean_ns),
                    quantiles(merged)
                )?;
                name.clear();
            }
            rest(out, "                    ", shown.len(), SHOWN)?;
        }
        if let Some(differs) = by.differs_most.iter().find(|d| d.class == class.class) {
            let shown = if differs.shown { "" } else { "; not shown to be more than chance" };
            writeln!(
                out,
                "  differs most: {} from {} to {}, typical p50 {}{}{shown}",
                title(&differs.stage),
                value(differs.from.as_ref()),
                value(differs.to.as_ref()),
                signed(differs.difference_ns),
                differs.ratio.map_or(String::new(), |r| format!(" ({})", percent(r)))
            )?;
        }
    }
    more_classes(out, classes.len())
}

/// What runs share, as far as it says which runs are meant.
fn within(labels: &Labels) -> String {
    let told =
        labels.iter().filter(|(name, _)| name.starts_with(super::labels::OWN) || name.ends_with(".machine"));
    let told: Vec<String> = told.map(|(name, value)| format!("{name} {value}")).collect();
    if told.is_empty() { String::new() } else { format!(" ({})", told.join(", ")) }
}

fn run(run: &RunName) -> String {
    match run.start_ns {
        Some(start) => format!("{} ({})", run.run, utc(start)),
        None => run.run.clone(),
    }
}

fn write_change(out: &mut String, change: &Change) -> std::fmt::Result {
    let Some(main) = change.moved.first() else { return Ok(()) };
    let ratio = |ratio: Option<f64>| ratio.map_or(String::new(), |r| format!(" ({})", percent(r)));
    writeln!(
        out,
        "change  {}: {} {} {} {}{}, {} to {}{}",
        change.class,
        title(&change.stage),
        of(main.quantile),
        if main.difference_ns > 0.0 { "rose by" } else { "fell by" },
        time(main.difference_ns.abs()),
        ratio(main.ratio),
        time(main.before_ns),
        time(main.after_ns),
        if change.along == "time" { String::new() } else { format!(", along {}", change.along) }
    )?;
    writeln!(
        out,
        "        after {} runs, before {}{}",
        change.runs_before,
        change.runs_after,
        within(&change.within)
    )?;
    writeln!(out, "        last before  {}", run(&change.last_before))?;
    writeln!(out, "        first after  {}", run(&change.first_after))?;
    let also: Vec<String> = change.moved[1..]
        .iter()
        .map(|m| {
            format!("{} {} {}{}", title(&m.stage), of(m.quantile), signed(m.difference_ns), ratio(m.ratio))
        })
        .collect();
    if !also.is_empty() {
        writeln!(out, "        with it      {}", also.join(", "))?;
    }
    for label in &change.labels {
        writeln!(
            out,
            "        changed      {}: {} -> {}",
            label.label,
            value(label.before.as_ref()),
            value(label.after.as_ref())
        )?;
    }
    Ok(())
}

fn write_trend(out: &mut String, trend: &Trend) -> std::fmt::Result {
    let Some(main) = trend.slopes.first() else { return Ok(()) };
    writeln!(
        out,
        "trend   {}: {} {} {} {} a day ({} to {}), {} over {} runs in {:.1} days{}",
        trend.class,
        title(&trend.stage),
        of(main.quantile),
        if main.per_day_ns > 0.0 { "rises by" } else { "falls by" },
        time(main.per_day_ns.abs()),
        signed(main.low_ns),
        signed(main.high_ns),
        signed(main.over_all_ns),
        trend.runs,
        trend.days,
        within(&trend.within)
    )?;
    let also: Vec<String> = trend.slopes[1..]
        .iter()
        .map(|s| format!("{} {} {}", title(&s.stage), of(s.quantile), signed(s.over_all_ns)))
        .collect();
    if !also.is_empty() {
        writeln!(out, "        with it      {}", also.join(", "))?;
    }
    Ok(())
}

fn write_outlier(out: &mut String, outlier: &Outlier) -> std::fmt::Result {
    let Some(main) = outlier.far.first() else { return Ok(()) };
    writeln!(
        out,
        "outlier {}: {} {} is {}, the other runs' around {} ({:.0} deviations); {} runs{}",
        outlier.class,
        title(&outlier.stage),
        of(main.quantile),
        time(main.value_ns),
        time(main.others_ns),
        main.deviations.abs(),
        outlier.runs,
        within(&outlier.within)
    )?;
    writeln!(out, "        {}", run(&outlier.run))
}

fn write_too_few(out: &mut String, few: &TooFew) -> std::fmt::Result {
    writeln!(
        out,
        "too few {}: {} alike{}; changes, trends and outliers need {}",
        few.class,
        some(few.runs, "run"),
        within(&few.within),
        few.needed
    )
}
