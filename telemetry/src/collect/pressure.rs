//! How long work stood still for want of CPU, memory or I/O, from `/proc/pressure` (Documentation/accounting/psi.rst).

use super::{Collector, Lack, Places};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{fields, lines, number};
use crate::{About, Nanos, Rows};

metrics! {
    Some = "some", "us", Counter64, "at least one thread was stalled";
    Full = "full", "us", Counter64, "all threads that were not idle were stalled at once";
}

pub(super) const ABOUT: About = About {
    name: "pressure",
    source: "/proc/pressure/*",
    object: "`cpu`, `memory`, `io`, `irq`",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "all of it where the kernel has no CONFIG_PSI or was booted without psi=1 and its default is off; irq before Linux 6.1",
};

/// The collector.
#[derive(Debug)]
pub(super) struct Pressure {
    files: Vec<(&'static str, Kept)>,
}

impl Pressure {
    pub(super) fn open(places: &Places) -> Result<Pressure, Lack> {
        let mut files = Vec::new();
        let mut last = Lack(String::new());
        for name in ["cpu", "memory", "io", "irq"] {
            let path = places.proc.join("pressure").join(name);
            // Where it is off, opening works and reading does not.
            match Kept::open(&path).and_then(|mut kept| kept.read().map(drop).map(|()| kept)) {
                Ok(kept) => files.push((name, kept)),
                Err(error) if name == "irq" => drop(error),
                Err(error) => {
                    last = Lack(format!("{}: {error} (psi=1 on the kernel's command line)", path.display()));
                }
            }
        }
        if files.is_empty() { Err(last) } else { Ok(Pressure { files }) }
    }
}

impl Collector for Pressure {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        for (name, file) in &mut self.files {
            let text = file.read().map_err(|e| Lack(format!("/proc/pressure/{name}: {e}")))?;
            parse(text, name, rows);
        }
        Ok(())
    }
}

fn parse(text: &[u8], of: &str, rows: &mut Rows) {
    for line in lines(text) {
        let mut fields = fields(line);
        let metric = match fields.next() {
            Some(b"some") => M::Some,
            Some(b"full") => M::Full,
            _ => continue,
        };
        let total = fields.find_map(|field| field.strip_prefix(b"total=")).and_then(number);
        if let (Some(total), Some(object)) = (total, rows.object(of)) {
            rows.count(object, metric, total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Pressure, parse};
    use crate::collect::fixture::{places, put};
    use crate::rows::tests::{key, sampled};

    const TEXT: &str = "some avg10=56.67 avg60=83.28 avg300=52.03 total=24665263342\n\
        full avg10=0.00 avg60=0.00 avg300=0.00 total=17\n";

    fn of(text: &[u8], rows: &mut crate::Rows) {
        parse(text, "cpu", rows);
    }

    #[test]
    fn totals_are_taken() {
        let found = sampled(&ABOUT, |rows| of(TEXT.as_bytes(), rows));
        assert_eq!(found[&key("cpu", "some")], 24_665_263_342.0);
        assert_eq!(found[&key("cpu", "full")], 17.0);
    }

    #[test]
    fn what_is_there_is_sampled_and_nothing_is_told() {
        let root = tempfile::tempdir().unwrap();
        let lack = Pressure::open(&places(root.path())).unwrap_err();
        assert!(lack.to_string().contains("psi=1"), "{lack}");
        put(root.path(), "proc/pressure/io", TEXT);
        assert_eq!(Pressure::open(&places(root.path())).unwrap().files.len(), 1);
    }

    super::super::parser_properties!(&ABOUT, TEXT, of);
}
