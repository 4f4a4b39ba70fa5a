//! What each CPU's network softirq dropped and left for later, from `/proc/net/softnet_stat`.

use super::{Collector, Lack, Places};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{fields, hex, lines};
use crate::{About, Nanos, Rows};

metrics! {
    Processed = "processed", "packets", Counter32, "packets that the softirq took";
    Dropped = "dropped", "packets", Counter32, "dropped because the CPU's backlog was full";
    Squeezed = "squeezed", "", Counter32, "times that the softirq ended with work left, its budget or time being over";
    Rps = "received_rps", "", Counter32, "times that another CPU handed packets over (RPS)";
    FlowLimit = "flow_limit", "packets", Counter32, "dropped by the flow limit";
    Backlog = "backlog", "packets", Gauge, "packets that wait in the CPU's backlog";
}

pub(super) const ABOUT: About = About {
    name: "softnet",
    source: "/proc/net/softnet_stat",
    object: "`cpuN`",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "backlog before Linux 5.10; packets on loopback and virtual interfaces are processed through the backlog, those of a NIC's NAPI are not in it",
};

/// The collector.
#[derive(Debug)]
pub(super) struct Softnet {
    stat: Kept,
}

impl Softnet {
    pub(super) fn open(places: &Places) -> Result<Softnet, Lack> {
        let path = places.proc.join("net/softnet_stat");
        Ok(Softnet { stat: Kept::open(&path).map_err(|e| Lack::of(&path, &e))? })
    }
}

impl Collector for Softnet {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        let text = self.stat.read().map_err(|e| Lack(format!("/proc/net/softnet_stat: {e}")))?;
        parse(text, rows);
        Ok(())
    }
}

/// A line a CPU, of hexadecimal columns (`net/core/net-procfs.c`). The thirteenth says which CPU; where a kernel has
/// no such column, lines are the online CPUs in order.
fn parse(text: &[u8], rows: &mut Rows) {
    for (line_number, line) in (0u64..).zip(lines(text)) {
        let mut columns = [None; 13];
        let mut count = 0;
        for (column, field) in columns.iter_mut().zip(fields(line)) {
            *column = hex(field);
            count += 1;
        }
        let cpu = match columns[12] {
            Some(cpu) => Some(u64::from(cpu)),
            None => (3..13).contains(&count).then_some(line_number),
        };
        let Some(object) = cpu.and_then(|cpu| rows.cpu(cpu)) else { continue };
        let metrics = [
            (M::Processed, 0),
            (M::Dropped, 1),
            (M::Squeezed, 2),
            (M::Rps, 9),
            (M::FlowLimit, 10),
            (M::Backlog, 11),
        ];
        for (metric, column) in metrics {
            if let Some(Some(value)) = columns.get(column) {
                rows.put(object, metric, f64::from(*value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, parse};
    use crate::rows::tests::{key, sampled};

    const TEXT: &str = "0496b4c5 00000002 00000010 00000000 00000000 00000000 00000000 00000000 00000000 00000007 00000001 00000003 00000000 00000000 00000000\n\
        ffffffff 00000000 00000015 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000002 00000000 00000000\n";

    #[test]
    fn columns_are_hexadecimal_and_the_cpu_is_named() {
        let found = sampled(&ABOUT, |rows| parse(TEXT.as_bytes(), rows));
        assert_eq!(found[&key("cpu0", "processed")], f64::from(0x0496_b4c5));
        assert_eq!(found[&key("cpu0", "dropped")], 2.0);
        assert_eq!(found[&key("cpu0", "backlog")], 3.0);
        assert_eq!(found[&key("cpu2", "processed")], f64::from(u32::MAX));
        assert_eq!(found[&key("cpu2", "squeezed")], 21.0);
        assert_eq!(found.len(), 12);
        let old =
            sampled(&ABOUT, |rows| parse(b"00000001 00000000 00000002\n00000003 00000000 00000004\n", rows));
        assert_eq!(old[&key("cpu1", "squeezed")], 4.0);
    }

    super::super::parser_properties!(&ABOUT, TEXT, parse);
}
