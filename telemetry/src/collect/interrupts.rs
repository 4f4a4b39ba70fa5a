//! Which CPU took how many interrupts of the network and NVMe queues: from `/sys/kernel/irq/N/per_cpu_count`, which is
//! read for these alone, or from `/proc/interrupts` where the kernel has none.

use super::{Again, Collector, Lack, Places, attribute, names};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{Name, cpu_list, fields, lines, number};
use crate::{About, Nanos, ObjectId, Rows};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

metrics! {
    Interrupts = "interrupts", "", Counter32, "interrupts of this queue that this CPU took";
}

pub(super) const ABOUT: About = About {
    name: "interrupts",
    source: "/sys/kernel/irq/*/per_cpu_count, or /proc/interrupts",
    object: "`IRQ NAME cpuN`, such as `38 eth0-TxRx-1 cpu1`",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "interrupts of devices that are neither NICs, RDMA nor NVMe controllers; pairs of interrupt and CPU that never met; queues that are polled have none",
};

/// Between looks for interrupts that came, ns.
const LOOK: u64 = 10_000_000_000;

/// The interrupts of the devices of network interfaces, RDMA devices and NVMe controllers, with their names.
fn wanted(sys: &Path) -> BTreeMap<u32, String> {
    let mut found = BTreeMap::new();
    for class in ["net", "infiniband", "nvme"] {
        let folder = sys.join("class").join(class);
        for name in names(&folder) {
            let device = folder.join(&name).join("device");
            // A virtual function's or a virtio device's interrupts are its parent's.
            for place in [device.join("msi_irqs"), device.join("../msi_irqs")] {
                for irq in names(&place).iter().filter_map(|irq| irq.parse::<u32>().ok()) {
                    let action = attribute(&sys.join(format!("kernel/irq/{irq}/actions")));
                    let name = if action.is_empty() { name.clone() } else { action };
                    found.entry(irq).or_insert(name);
                }
            }
        }
    }
    found
}

/// One interrupt's objects, by CPU.
#[derive(Debug)]
struct Irq {
    label: String,
    cpus: Vec<Option<ObjectId>>,
    file: Option<Kept>,
}

impl Irq {
    fn count(&mut self, irq: u32, cpu: u32, count: u64, rows: &mut Rows) {
        let index = cpu as usize;
        if count == 0 || index >= 65_536 {
            return;
        }
        if self.cpus.len() <= index {
            self.cpus.resize(index + 1, None);
        }
        let Some(known) = self.cpus.get_mut(index) else { return };
        if known.is_none() {
            *known = rows.object(Name::of(format_args!("{irq} {} cpu{cpu}", self.label)).as_str());
        }
        if let Some(object) = *known {
            rows.count(object, M::Interrupts, count);
        }
    }
}

/// The collector.
#[derive(Debug)]
pub(super) struct Interrupts {
    sys: PathBuf,
    irqs: BTreeMap<u32, Irq>,
    possible: Vec<u32>,
    /// `/proc/interrupts`, where it is needed.
    all: Option<Kept>,
    columns: Vec<u32>,
    look_again: Again,
}

impl Interrupts {
    pub(super) fn open(places: &Places) -> Result<Interrupts, Lack> {
        let irqs = wanted(&places.sys);
        let Some(first) = irqs.keys().next() else {
            return Err(Lack("no device of /sys/class/net, infiniband or nvme has interrupts".to_owned()));
        };
        let possible = cpu_list(&attribute(&places.sys.join("devices/system/cpu/possible")));
        let single = places.sys.join(format!("kernel/irq/{first}/per_cpu_count"));
        let all = if single.is_file() && !possible.is_empty() {
            None
        } else {
            let path = places.proc.join("interrupts");
            Some(Kept::open(&path).map_err(|e| Lack::of(&path, &e))?)
        };
        let sys = places.sys.clone();
        Ok(Interrupts {
            sys,
            irqs: BTreeMap::new(),
            possible,
            all,
            columns: Vec::new(),
            look_again: Again::each(LOOK),
        })
    }

    fn look(&mut self) {
        let found = wanted(&self.sys);
        self.irqs.retain(|irq, known| found.get(irq) == Some(&known.label));
        for (irq, label) in found {
            let path = self.sys.join(format!("kernel/irq/{irq}/per_cpu_count"));
            let file = if self.all.is_none() { Kept::open(&path).ok() } else { None };
            self.irqs.entry(irq).or_insert_with(|| Irq { label, cpus: Vec::new(), file });
        }
    }
}

impl Collector for Interrupts {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, at: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        if self.look_again.is_due(at) {
            self.look();
        }
        if let Some(all) = &mut self.all {
            let text = all.read().map_err(|e| Lack(format!("/proc/interrupts: {e}")))?;
            parse_all(text, &mut self.columns, &mut self.irqs, rows);
            return Ok(());
        }
        for (number, irq) in &mut self.irqs {
            let Some(mut file) = irq.file.take() else { continue };
            // It may have been freed.
            if let Ok(text) = file.attribute() {
                parse_one(text, *number, &self.possible, irq, rows);
            }
            irq.file = Some(file);
        }
        Ok(())
    }
}

/// Counts with commas between them, one a possible CPU. The last counts only where its line is ended.
fn parse_one(text: &[u8], irq: u32, possible: &[u32], into: &mut Irq, rows: &mut Rows) {
    let ended = text.strip_suffix(b"\n");
    let text = match (ended, text.iter().rposition(|byte| *byte == b',')) {
        (Some(text), _) => text,
        (None, Some(comma)) => text.get(..comma).unwrap_or_default(),
        (None, None) => return,
    };
    for (cpu, field) in possible.iter().zip(text.split(|byte| *byte == b',')) {
        if let Some(count) = number(field) {
            into.count(irq, *cpu, count, rows);
        }
    }
}

/// A head that names the CPUs, then a line an interrupt: its number, its counts, what it is.
fn parse_all(text: &[u8], columns: &mut Vec<u32>, irqs: &mut BTreeMap<u32, Irq>, rows: &mut Rows) {
    let mut lines = lines(text);
    let Some(head) = lines.next() else { return };
    columns.clear();
    for name in fields(head) {
        let cpu = name.strip_prefix(b"CPU").and_then(number).and_then(|cpu| u32::try_from(cpu).ok());
        // A head that is not understood leaves columns that can not be told.
        let Some(cpu) = cpu else { return };
        columns.push(cpu);
    }
    for line in lines {
        let mut fields = fields(line);
        let number_ = fields.next().and_then(|field| field.strip_suffix(b":")).and_then(number);
        let Some(irq) = number_.and_then(|irq| u32::try_from(irq).ok()) else { continue };
        let Some(into) = irqs.get_mut(&irq) else { continue };
        for (cpu, field) in columns.iter().zip(fields) {
            let Some(count) = number(field) else { break };
            into.count(irq, *cpu, count, rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::fixture::{places, put};
    use crate::rows::tests::{key, sampled, values};

    const TEXT: &str = "           CPU0       CPU2       \n\
        \x2024:          1          0  IO-APIC   5-edge      ACPI:Ged\n\
        \x2038:          7     158613 PCI-MSIX-0000:00:03.0   1-edge      eth0-rx-0\n\
        \x2039:      41394          0 PCI-MSIX-0000:00:03.0   2-edge      eth0-tx-0\n\
        NMI:          0          0   Non-maskable interrupts\nERR:          0\n";

    fn irqs(of: &[u32]) -> BTreeMap<u32, Irq> {
        let irq = |irq: &u32| (*irq, Irq { label: format!("q{irq}"), cpus: Vec::new(), file: None });
        of.iter().map(irq).collect()
    }

    fn all(text: &[u8], rows: &mut Rows) {
        parse_all(text, &mut Vec::new(), &mut irqs(&[38, 39]), rows);
    }

    fn one(text: &[u8], rows: &mut Rows) {
        let Some(irq) = irqs(&[38]).into_values().next() else { return };
        let mut irq = irq;
        parse_one(text, 38, &[0, 1, 2, 64], &mut irq, rows);
    }

    #[test]
    fn only_wanted_interrupts_and_the_cpus_that_took_them() {
        let found = sampled(&ABOUT, |rows| all(TEXT.as_bytes(), rows));
        assert_eq!(found[&key("38 q38 cpu2", "interrupts")], 158_613.0);
        assert_eq!(found.len(), 3);
        let found = sampled(&ABOUT, |rows| one(b"0,5,0,4294967295\n", rows));
        assert_eq!(found[&key("38 q38 cpu64", "interrupts")], 4_294_967_295.0);
        assert_eq!(found.len(), 2);
        // A page that ends in the middle of a number.
        assert_eq!(sampled(&ABOUT, |rows| one(b"1,5,12", rows)).len(), 2);
    }

    #[test]
    fn the_cheaper_file_is_read_where_there_is_one() {
        let root = tempfile::tempdir().unwrap();
        let here = |path: &str, text: &str| put(root.path(), path, text);
        assert!(Interrupts::open(&places(root.path())).is_err());
        here("sys/class/net/eth0/device/msi_irqs/38", "msix\n");
        here("sys/class/nvme/nvme0/device/msi_irqs/39", "msix\n");
        here("sys/kernel/irq/38/actions", "eth0-rx-0\n");
        here("proc/interrupts", TEXT);
        let sample = || {
            let mut interrupts = Interrupts::open(&places(root.path())).unwrap();
            let mut rows = Rows::new(&ABOUT);
            rows.begin(Nanos(1));
            interrupts.sample(Nanos(1), &mut rows).unwrap();
            rows.finish(Nanos(0));
            values(&rows)
        };
        let found = sample();
        assert_eq!(found[&key("38 eth0-rx-0 cpu0", "interrupts")], 7.0);
        assert_eq!(found[&key("39 nvme0 cpu0", "interrupts")], 41_394.0);
        here("sys/devices/system/cpu/possible", "0-1\n");
        here("sys/kernel/irq/38/per_cpu_count", "3,4\n");
        let found = sample();
        assert_eq!(found[&key("38 eth0-rx-0 cpu1", "interrupts")], 4.0);
        assert_eq!(found.len(), 2);
    }

    mod whole {
        use super::*;
        crate::collect::parser_properties!(&ABOUT, TEXT, all);
    }

    mod single {
        use super::*;
        crate::collect::parser_properties!(&ABOUT, "1000,5,70,4294967295\n", one);
    }
}
