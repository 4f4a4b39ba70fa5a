//! How often each CPU ran the softirqs that carry I/O, from `/proc/softirqs` (proc(5)).

use super::{Collector, Lack, Places};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{fields, lines, number};
use crate::{About, Nanos, ObjectId, Rows};

metrics! {
    NetTx = "net_tx", "", Counter32, "times that packets' sending was finished";
    NetRx = "net_rx", "", Counter32, "times that packets were received";
    Block = "block", "", Counter32, "times that block requests were completed by softirq";
    IrqPoll = "irq_poll", "", Counter32, "times that completions were polled for after an interrupt";
    Timer = "timer", "", Counter32, "times that timers ran";
    Sched = "sched", "", Counter32, "times that the scheduler balanced";
}

pub(super) const ABOUT: About = About {
    name: "softirqs",
    source: "/proc/softirqs",
    object: "`cpuN`",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "the time that they took, which `cpu` has as softirq",
};

/// The collector.
#[derive(Debug)]
pub(super) struct Softirqs {
    file: Kept,
    cpus: Vec<Option<ObjectId>>,
}

impl Softirqs {
    pub(super) fn open(places: &Places) -> Result<Softirqs, Lack> {
        let path = places.proc.join("softirqs");
        Ok(Softirqs { file: Kept::open(&path).map_err(|e| Lack::of(&path, &e))?, cpus: Vec::new() })
    }
}

impl Collector for Softirqs {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        let text = self.file.read().map_err(|e| Lack(format!("/proc/softirqs: {e}")))?;
        parse(text, &mut self.cpus, rows);
        Ok(())
    }
}

/// A head that names the CPUs, then a line a softirq.
fn parse(text: &[u8], cpus: &mut Vec<Option<ObjectId>>, rows: &mut Rows) {
    let mut lines = lines(text);
    let Some(head) = lines.next() else { return };
    cpus.clear();
    for name in fields(head) {
        let cpu = name.strip_prefix(b"CPU").and_then(number);
        cpus.push(cpu.and_then(|cpu| rows.cpu(cpu)));
    }
    for line in lines {
        let mut fields = fields(line);
        let metric = match fields.next() {
            Some(b"NET_TX:") => M::NetTx,
            Some(b"NET_RX:") => M::NetRx,
            Some(b"BLOCK:") => M::Block,
            Some(b"IRQ_POLL:" | b"BLOCK_IOPOLL:") => M::IrqPoll,
            Some(b"TIMER:") => M::Timer,
            Some(b"SCHED:") => M::Sched,
            _ => continue,
        };
        for (object, count) in cpus.iter().zip(fields) {
            if let (Some(object), Some(count)) = (object, number(count)) {
                rows.count(*object, metric, count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, parse};
    use crate::rows::tests::{key, sampled};

    const TEXT: &str = "                    CPU0       CPU3       \n\
        \x20         HI:          0          0\n\
        \x20      TIMER:    2049553    1653139\n\
        \x20     NET_RX:   76843751   82659654\n\
        \x20      BLOCK:         16    1945867\n";

    fn of(text: &[u8], rows: &mut crate::Rows) {
        parse(text, &mut Vec::new(), rows);
    }

    #[test]
    fn the_head_names_the_cpus() {
        let found = sampled(&ABOUT, |rows| of(TEXT.as_bytes(), rows));
        assert_eq!(found[&key("cpu3", "net_rx")], 82_659_654.0);
        assert_eq!(found[&key("cpu0", "block")], 16.0);
        assert_eq!(found.len(), 6);
    }

    super::super::parser_properties!(&ABOUT, TEXT, of);
}
