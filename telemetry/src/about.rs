//! What each collector takes, with units and sources: the one table that code, manifest and docs read.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::Duration;

/// How a metric's values are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// As it is at the moment.
    Gauge,
    /// A count that only grows until it wraps at 2^32 or begins anew.
    Counter32,
    /// A count that only grows until it begins anew: 2^64 is never reached.
    Counter64,
    /// Something that happened, at its own moment: every row is one, and no value lasts.
    Event,
}

impl Kind {
    /// `gauge`, `counter` or `event`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Gauge => "gauge",
            Kind::Counter32 | Kind::Counter64 => "counter",
            Kind::Event => "event",
        }
    }

    /// The width at which it wraps; `None` where it is no counter.
    #[must_use]
    pub const fn bits(self) -> Option<u8> {
        match self {
            Kind::Gauge | Kind::Event => None,
            Kind::Counter32 => Some(32),
            Kind::Counter64 => Some(64),
        }
    }
}

/// One metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name in the `metric` column.
    pub name: Cow<'static, str>,
    /// Its unit; empty where it is a plain number.
    pub unit: Cow<'static, str>,
    /// Gauge, counter or event.
    pub kind: Kind,
    /// What it is.
    pub meaning: &'static str,
}

/// The metric that every collector has: one row a sample, with the CPU time that the sample took.
pub const SAMPLED: Metric = Metric {
    name: Cow::Borrowed("sampled"),
    unit: Cow::Borrowed("ns"),
    kind: Kind::Gauge,
    meaning: "CPU time that this sample took; its rows' times are when the collector looked",
};

/// A collector.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Its name in the `collector` column.
    pub name: &'static str,
    /// Where its values come from.
    pub source: &'static str,
    /// What `object` names.
    pub object: &'static str,
    /// The least time between samples; `None` where it samples as often as is asked for.
    pub at_most_every: Option<Duration>,
    /// Whether a sample can wait for a device or a process: then it has a thread of its own.
    pub waits: bool,
    /// Its metrics; [`SAMPLED`] is not among them.
    pub metrics: &'static [Metric],
    /// Metrics that are named by the device, in words; empty where there are none.
    pub further: &'static str,
    /// What it lacks, and where.
    pub lacks: &'static str,
}

/// All collectors.
#[must_use]
pub fn all() -> Vec<&'static About> {
    crate::collect::ABOUT.to_vec()
}

/// The tables of `docs/telemetry.md`, in Markdown.
#[must_use]
pub fn table() -> String {
    let mut text = String::new();
    for about in all() {
        let every = match about.at_most_every {
            None => "every sample".to_owned(),
            Some(every) => format!("every {} s at most", every.as_secs_f64()),
        };
        // Writing to a string can not fail.
        let _ = writeln!(text, "### `{}`\n", about.name);
        let _ = writeln!(text, "Source: {}. Object: {}. Sampled {every}.", about.source, about.object);
        let _ = writeln!(text, "Lacks: {}.\n", about.lacks);
        let _ = writeln!(text, "| metric | unit | kind | what it is |\n|---|---|---|---|");
        for metric in about.metrics {
            let width = metric.kind.bits().map_or_else(String::new, |bits| format!(", {bits} bits"));
            let kind = metric.kind.name();
            let _ = writeln!(
                text,
                "| `{}` | {} | {kind}{width} | {} |",
                metric.name, metric.unit, metric.meaning
            );
        }
        if !about.further.is_empty() {
            let _ = writeln!(text, "| as the device names them | | counter, 64 bits | {} |", about.further);
        }
        text.push('\n');
    }
    text
}

/// The metrics of a collector: an enumeration of their positions and the table itself, in one list.
macro_rules! metrics {
    ($($position:ident = $name:literal, $unit:literal, $kind:ident, $meaning:literal;)*) => {
        /// Positions in [`METRICS`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        #[allow(dead_code, reason = "a collector may go through its table by position")]
        pub(super) enum M { $($position),* }

        /// What this collector takes.
        pub(super) const METRICS: &[$crate::Metric] = &[$($crate::Metric {
            name: std::borrow::Cow::Borrowed($name),
            unit: std::borrow::Cow::Borrowed($unit),
            kind: $crate::Kind::$kind,
            meaning: $meaning,
        }),*];

        impl From<M> for u16 {
            fn from(metric: M) -> u16 {
                metric as u16
            }
        }
    };
}
pub(crate) use metrics;

#[cfg(test)]
mod tests {
    use super::{all, table};
    use std::collections::BTreeSet;

    #[test]
    fn names_are_told_once_and_are_plain() {
        let mut names = BTreeSet::new();
        for about in all() {
            assert!(names.insert(about.name.to_owned()), "{}", about.name);
            let mut own = BTreeSet::new();
            for metric in about.metrics {
                assert!(own.insert(metric.name.clone()), "{} {}", about.name, metric.name);
                assert_ne!(metric.name, super::SAMPLED.name);
                assert!(!metric.meaning.is_empty() && !metric.meaning.ends_with('.'));
                let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
                assert!(metric.name.chars().all(plain), "{}", metric.name);
            }
        }
    }

    #[test]
    fn the_page_has_the_table() {
        let page = include_str!("../../docs/telemetry.md");
        let table = table();
        assert!(page.contains(&table), "docs/telemetry.md lacks the table as it is now:\n{table}");
    }
}
