//! A view as lines of text, for where there is no terminal to draw on.

use super::view::{ClassView, LiveView, QueueView, Totals};
use crate::table::{bytes, count, time};
use std::fmt::Write;

/// Queues and telemetry that are printed; the rest is counted.
const ROWS: usize = 12;

impl LiveView {
    /// The view as a block of lines, about 110 columns wide.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        // Writing into a String can not fail.
        let _ = self.write(&mut out);
        out
    }

    /// What is looked at, at which cost and with which losses, in one line.
    #[must_use]
    pub fn head(&self) -> String {
        let mut head =
            format!("{} {} {} {}", self.side, self.kind, self.software.name, self.software.version);
        if let Some(pid) = self.software.pid {
            head += &format!(", process {pid}");
        }
        head += &format!("; {} of {} boundaries measured", self.measured[0], self.measured[1]);
        if let Some(price) = self.price {
            head += &format!("; about {:.2} us a read", f64::from(price.read_ns) / 1e3);
        }
        if self.one_in > 1 {
            head += &format!("; 1 in {} kept", self.one_in);
        }
        head
    }

    /// All commands together, in one line.
    #[must_use]
    pub fn sums(&self) -> String {
        let mut sums = rates(&self.totals);
        sums += &format!("; {} seen, {} lost", count(self.counters.seen), count(self.counters.lost.total()));
        if let Some(windows) = &self.windows {
            let skipped = windows.skipped;
            sums += &format!("; {} windows", count(windows.slices));
            if skipped > 0 {
                sums += &format!(", {} left out", count(skipped));
            }
        }
        sums
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "{:>8.1} s  {}", self.elapsed_seconds, self.head())?;
        writeln!(out, "            {} (over {:.1} s)", self.sums(), self.stretch.seconds)?;
        let shown = self.classes.iter().filter(|class| class.totals.commands > 0);
        for (n, class) in shown.enumerate() {
            if n == 0 {
                writeln!(out, "  {CLASS_HEAD}")?;
            }
            write!(out, "  {:<20}", class.name())?;
            write_cells(out, &class.cells())?;
            writeln!(out, "  {}", class.shares())?;
        }
        let queues: Vec<&QueueView> = self.queues.iter().filter(|queue| queue.totals.commands > 0).collect();
        for queue in queues.iter().take(ROWS) {
            write!(out, "  {:<20}", queue.name())?;
            write_cells(out, &queue.cells())?;
            writeln!(out, "  {}", queue.host.as_deref().unwrap_or_default())?;
        }
        if queues.len() > ROWS {
            writeln!(out, "  {} more queues: --format json has them all", queues.len() - ROWS)?;
        }
        let telling: Vec<String> =
            self.telemetry.iter().filter(|t| t.is_news()).map(|t| t.to_string()).collect();
        for line in telling.chunks(3).take(ROWS) {
            writeln!(out, "  telemetry: {}", line.join("; "))?;
        }
        self.notes.iter().try_for_each(|note| writeln!(out, "  note: {note}"))
    }
}

/// The head of the columns.
const CLASS_HEAD: &str = "                            IOPS      bytes/s  in flight      mean       p50       p99     p99.9  own stages";

fn write_cells(out: &mut String, cells: &[String; 7]) -> std::fmt::Result {
    let widths = [12, 13, 11, 10, 10, 10, 10];
    cells.iter().zip(widths).try_for_each(|(cell, width)| write!(out, "{cell:>width$}"))
}

fn figure(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value < 99.95 => format!("{value:.1}"),
        Some(value) => count(value.round() as u64),
    }
}

/// Bytes a second in the unit that fits.
#[must_use]
pub fn byte_rate(rate: Option<f64>) -> String {
    let Some(mut rate) = rate else { return "-".to_owned() };
    let mut units = ["B/s", "KiB/s", "MiB/s"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    for next in units {
        if rate < 1024.0 {
            break;
        }
        rate /= 1024.0;
        unit = next;
    }
    format!("{} {unit}", figure(Some(rate)))
}

fn rates(totals: &Totals) -> String {
    format!(
        "{} IOPS, {}, {} in flight",
        figure(totals.iops),
        byte_rate(totals.bytes_per_second),
        figure(totals.in_flight)
    )
}

fn percentile(ns: Option<i64>) -> String {
    ns.map_or_else(|| "-".to_owned(), |ns| time(ns as f64))
}

fn cells(totals: &Totals, latency: Option<&crate::Distribution>) -> [String; 7] {
    let latency = |of: fn(&crate::Distribution) -> Option<i64>| percentile(latency.and_then(of));
    [
        figure(totals.iops),
        byte_rate(totals.bytes_per_second),
        figure(totals.in_flight),
        latency(|l| Some(l.mean_ns as i64)),
        latency(|l| l.p50_ns),
        latency(|l| l.p99_ns),
        latency(|l| l.p999_ns),
    ]
}

impl ClassView {
    /// What a person calls it.
    #[must_use]
    pub fn name(&self) -> String {
        let name = match (self.operation, self.bytes) {
            (Some(operation), Some(0)) => operation.to_string(),
            (Some(operation), Some(size)) => format!("{operation} {}", bytes(size)),
            _ => "others".to_owned(),
        };
        if self.error { name + ", failed" } else { name }
    }

    /// IOPS, bytes a second, in flight, mean, p50, p99 and p99.9.
    #[must_use]
    pub fn cells(&self) -> [String; 7] {
        cells(&self.totals, self.latency.as_ref())
    }

    /// The stages' shares of the mean latency.
    #[must_use]
    pub fn shares(&self) -> String {
        let shares: Vec<String> = self
            .stages
            .iter()
            .map(|stage| format!("{} {:.0} %", stage.name.replace('_', " "), stage.share * 1e2))
            .collect();
        shares.join(", ")
    }
}

impl QueueView {
    /// What a person calls it.
    #[must_use]
    pub fn name(&self) -> String {
        match (self.cntlid, self.qid) {
            (Some(cntlid), Some(qid)) if cntlid != 0xffff => format!("queue {cntlid}/{qid}"),
            (Some(_), Some(_)) => "queue".to_owned(),
            _ => "other queues".to_owned(),
        }
    }

    /// IOPS, bytes a second, in flight, mean, p50, p99 and p99.9.
    #[must_use]
    pub fn cells(&self) -> [String; 7] {
        cells(&self.totals, self.latency.as_ref())
    }
}

impl super::TelemetryView {
    /// Whether it is more than that nothing happened.
    #[must_use]
    pub fn is_news(&self) -> bool {
        self.worst != 0.0 || self.sum.is_some_and(|sum| sum != 0.0)
    }
}

impl std::fmt::Display for super::TelemetryView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = |value: f64| figure(Some(value));
        write!(f, "{} {} ", self.collector, self.metric)?;
        if let Some(sum) = self.sum.filter(|_| self.objects > 1) {
            write!(f, "{} {} in all, ", value(sum), self.unit)?;
        }
        write!(f, "{} {}", value(self.worst), self.unit)?;
        if self.of.is_empty() { Ok(()) } else { write!(f, " ({})", self.of) }
    }
}
