//! How long threads waited for each CPU, from `/proc/schedstat` (Documentation/scheduler/sched-stats.rst).

use super::{Collector, Lack, Places};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{fields, lines, number};
use crate::{About, Nanos, Rows};

metrics! {
    Running = "run_time", "ns", Counter64, "threads ran on the CPU";
    Waiting = "run_delay", "ns", Counter64, "runnable threads waited for the CPU, all of them together";
    Slices = "slices", "", Counter64, "times that a thread was put on the CPU";
}

pub(super) const ABOUT: About = About {
    name: "sched",
    source: "/proc/schedstat",
    object: "`cpuN`",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "all of it where the kernel has no CONFIG_SCHEDSTATS; `threads` and `pressure` tell of waiting there",
};

/// The collector.
#[derive(Debug)]
pub(super) struct Sched {
    file: Kept,
}

impl Sched {
    pub(super) fn open(places: &Places) -> Result<Sched, Lack> {
        let path = places.proc.join("schedstat");
        let file = Kept::open(&path)
            .map_err(|e| Lack(format!("{}: {e} (the kernel has no CONFIG_SCHEDSTATS)", path.display())))?;
        Ok(Sched { file })
    }
}

impl Collector for Sched {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        let text = self.file.read().map_err(|e| Lack(format!("/proc/schedstat: {e}")))?;
        parse(text, rows);
        Ok(())
    }
}

/// The lines `cpuN` of versions 14 and later: the last three of nine numbers.
fn parse(text: &[u8], rows: &mut Rows) {
    let mut lines = lines(text);
    let version = lines.next().and_then(|line| line.strip_prefix(b"version ")).and_then(number);
    if version.is_none_or(|version| version < 14) {
        rows.lack("", "/proc/schedstat has a version that is not known (before 14)");
        return;
    }
    for line in lines {
        let Some(rest) = line.strip_prefix(b"cpu") else { continue };
        let mut fields = fields(rest);
        let Some(object) = fields.next().and_then(number).and_then(|cpu| rows.cpu(cpu)) else { continue };
        let mut fields = fields.skip(6);
        for metric in [M::Running, M::Waiting, M::Slices] {
            if let Some(value) = fields.next().and_then(number) {
                rows.count(object, metric, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, parse};
    use crate::rows::tests::{key, sampled};

    const TEXT: &str = "version 15\ntimestamp 4297299139\n\
        cpu0 0 0 0 0 0 0 1145287047860 105917480368 8608857\n\
        domain0 00000003 1 2 3 4 5 6 7 8 9\n\
        cpu21 0 0 0 0 0 0 1151298123 12 7\n";

    #[test]
    fn each_cpu_has_its_waiting() {
        let found = sampled(&ABOUT, |rows| parse(TEXT.as_bytes(), rows));
        assert_eq!(found[&key("cpu0", "run_delay")], 105_917_480_368.0);
        assert_eq!(found[&key("cpu21", "slices")], 7.0);
        assert_eq!(found.len(), 6);
        assert!(sampled(&ABOUT, |rows| parse(b"version 1\ncpu0 1 2 3 4 5 6 7 8 9\n", rows)).is_empty());
        assert!(sampled(&ABOUT, |rows| parse(b"\n", rows)).is_empty());
    }

    super::super::parser_properties!(&ABOUT, TEXT, parse);
}
