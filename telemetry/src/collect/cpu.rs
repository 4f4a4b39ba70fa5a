//! Where each CPU's time goes, from `/proc/stat` (proc(5)).

use super::{Collector, Lack, Places};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{fields, lines, number, value};
use crate::{About, Nanos, Rows};

metrics! {
    User = "user", "ms", Counter64, "in user space";
    Nice = "nice", "ms", Counter64, "in user space at low priority";
    System = "system", "ms", Counter64, "in the kernel, without interrupts";
    Idle = "idle", "ms", Counter64, "idle";
    Iowait = "iowait", "ms", Counter64, "idle while I/O was outstanding; the kernel may count it backwards";
    Irq = "irq", "ms", Counter64, "in hardware interrupts";
    Softirq = "softirq", "ms", Counter64, "in softirqs";
    Steal = "steal", "ms", Counter64, "taken by the hypervisor for others";
    Switches = "context_switches", "", Counter64, "context switches of all CPUs (object: none)";
    Running = "running", "", Gauge, "runnable threads (object: none)";
    Blocked = "blocked", "", Gauge, "threads that wait for I/O (object: none)";
}

pub(super) const ABOUT: About = About {
    name: "cpu",
    source: "/proc/stat",
    object: "`cpuN`; none for all CPUs together",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "the kernel counts in ticks (10 ms mostly), so a sample of 100 ms is coarse; irq is 0 where the kernel has no CONFIG_IRQ_TIME_ACCOUNTING",
};

/// The collector.
#[derive(Debug)]
pub(super) struct Cpu {
    stat: Kept,
    tick_ms: f64,
}

impl Cpu {
    pub(super) fn open(places: &Places) -> Result<Cpu, Lack> {
        let path = places.proc.join("stat");
        let stat = Kept::open(&path).map_err(|e| Lack::of(&path, &e))?;
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
        Ok(Cpu { stat, tick_ms: 1e3 / f64::from(u32::try_from(ticks.max(1)).unwrap_or(100)) })
    }
}

impl Collector for Cpu {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        let text = self.stat.read().map_err(|e| Lack(format!("/proc/stat: {e}")))?;
        parse(text, self.tick_ms, rows);
        Ok(())
    }
}

const TIMES: [M; 8] = [M::User, M::Nice, M::System, M::Idle, M::Iowait, M::Irq, M::Softirq, M::Steal];

fn parse(text: &[u8], tick_ms: f64, rows: &mut Rows) {
    for line in lines(text) {
        let mut fields = fields(line);
        let Some(name) = fields.next() else { continue };
        let whole = match name {
            b"ctxt" => Some(M::Switches),
            b"procs_running" => Some(M::Running),
            b"procs_blocked" => Some(M::Blocked),
            _ => None,
        };
        if let Some(metric) = whole {
            if let (Some(object), Some(count)) = (rows.object(""), fields.next().and_then(number)) {
                rows.count(object, metric, count);
            }
            continue;
        }
        let Some(cpu) = name.strip_prefix(b"cpu") else { continue };
        let object = if cpu.is_empty() { rows.object("") } else { number(cpu).and_then(|cpu| rows.cpu(cpu)) };
        let Some(object) = object else { continue };
        for (metric, field) in TIMES.into_iter().zip(fields) {
            if let Some(ticks) = number(field) {
                rows.put(object, metric, value(ticks) * tick_ms);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, parse};
    use crate::rows::tests::{key, sampled};

    const TEXT: &str = "cpu  4032068 1363961 1071221 879393 18071 1 47217 14020 0 0\n\
        cpu0 2089457 660069 514327 416801 4779 0 21177 6904 0 0\n\
        cpu11 1942610 703892 556893 462591 13291 0 26040 7116 0 0\n\
        intr 36712985 0 0 0 1 15\nctxt 123456\nbtime 1764424437\nprocesses 5\nprocs_running 3\nprocs_blocked 1\n\
        softirq 1 2 3\n";

    #[test]
    fn each_cpu_has_its_times() {
        let found = sampled(&ABOUT, |rows| parse(TEXT.as_bytes(), 10.0, rows));
        assert_eq!(found[&key("", "user")], 40_320_680.0);
        assert_eq!(found[&key("", "irq")], 10.0);
        assert_eq!(found[&key("cpu0", "softirq")], 211_770.0);
        assert_eq!(found[&key("cpu11", "steal")], 71_160.0);
        assert_eq!(found[&key("", "context_switches")], 123_456.0);
        assert_eq!(found[&key("", "running")], 3.0);
        assert_eq!(found.len(), 3 * 8 + 3);
        // An old kernel has fewer; a name that is no CPU's has none.
        let old = sampled(&ABOUT, |rows| parse(b"cpu1 1 2 3 4\ncpux 1\ncpu 7\n", 10.0, rows));
        assert_eq!(old.len(), 5);
    }

    super::super::parser_properties!(&ABOUT, TEXT, |text: &[u8], rows: &mut crate::Rows| parse(
        text, 10.0, rows
    ));
}
