//! What went through each interface and what was dropped, from `/sys/class/net/*/statistics`
//! (Documentation/ABI/testing/sysfs-class-net-statistics).

use super::{Again, Collector, Lack, Places, names};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::single;
use crate::{About, Nanos, ObjectId, Rows};
use std::path::Path;

metrics! {
    RxBytes = "rx_bytes", "bytes", Counter64, "received";
    TxBytes = "tx_bytes", "bytes", Counter64, "sent";
    RxPackets = "rx_packets", "packets", Counter64, "received";
    TxPackets = "tx_packets", "packets", Counter64, "sent";
    RxDropped = "rx_dropped", "packets", Counter64, "received and dropped by the kernel";
    TxDropped = "tx_dropped", "packets", Counter64, "dropped on the way out";
    RxErrors = "rx_errors", "packets", Counter64, "received damaged";
    TxErrors = "tx_errors", "packets", Counter64, "not sent for an error";
    RxMissed = "rx_missed_errors", "packets", Counter64, "dropped by the NIC, whose buffers were full";
    RxFifo = "rx_fifo_errors", "packets", Counter64, "dropped because the NIC's FIFO was full";
    RxCrc = "rx_crc_errors", "packets", Counter64, "received with a wrong checksum of the link";
    TxCarrier = "tx_carrier_errors", "", Counter64, "not sent because the carrier was lost";
    CarrierChanges = "carrier_changes", "", Counter32, "times that the link came or went";
}

pub(super) const ABOUT: About = About {
    name: "nic",
    source: "/sys/class/net/*/statistics, carrier_changes",
    object: "the interface",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "interfaces that are down, those of other network namespaces, and those beyond 16 (hardware first); 32-bit counters of old drivers wrap and are told as a gap",
};

/// More interfaces than this are not sampled.
pub(super) const MOST: usize = 16;
/// Between looks for interfaces that came, ns.
const LOOK: u64 = 5_000_000_000;

/// The interfaces that are worth sampling: hardware first, then the others that are up.
pub(super) fn interfaces(sys: &Path, rows: Option<&mut Rows>) -> Vec<String> {
    let folder = sys.join("class/net");
    let mut found: Vec<(bool, String)> = names(&folder)
        .into_iter()
        .filter(|name| {
            let state = super::attribute(&folder.join(name).join("operstate"));
            // Loopback says that it does not know.
            !matches!(state.as_str(), "down" | "notpresent" | "lowerlayerdown" | "")
        })
        .map(|name| (!folder.join(&name).join("device").exists(), name))
        .collect();
    found.sort();
    if let Some(rows) = rows.filter(|_| found.len() > MOST) {
        let left_out = found.len() - MOST;
        rows.lack("", &format!("{} interfaces: {left_out} of them are left out", found.len()));
    }
    found.into_iter().take(MOST).map(|(_, name)| name).collect()
}

/// One interface's open files, with the metric of each.
#[derive(Debug)]
struct Interface {
    name: String,
    object: ObjectId,
    files: Vec<(u16, Kept)>,
}

/// The collector.
#[derive(Debug)]
pub(super) struct Nic {
    sys: std::path::PathBuf,
    interfaces: Vec<Interface>,
    look_again: Again,
}

impl Nic {
    pub(super) fn open(places: &Places) -> Result<Nic, Lack> {
        let sys = places.sys.clone();
        if interfaces(&sys, None).is_empty() {
            return Err(Lack(format!("{}: no interface is up", sys.join("class/net").display())));
        }
        Ok(Nic { sys, interfaces: Vec::new(), look_again: Again::each(LOOK) })
    }

    fn look(&mut self, rows: &mut Rows) {
        let found = interfaces(&self.sys, Some(rows));
        self.interfaces.retain(|known| found.contains(&known.name));
        for name in found {
            if self.interfaces.iter().any(|known| known.name == name) {
                continue;
            }
            let folder = self.sys.join("class/net").join(&name);
            let files = (0u16..).zip(METRICS).filter_map(|(position, metric)| {
                let inside = if position == u16::from(M::CarrierChanges) { "" } else { "statistics" };
                Some((position, Kept::open(&folder.join(inside).join(&*metric.name)).ok()?))
            });
            let files = files.collect();
            let Some(object) = rows.object(&name) else { return };
            self.interfaces.push(Interface { name, object, files });
        }
    }
}

impl Collector for Nic {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, at: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        if self.look_again.is_due(at) {
            self.look(rows);
        }
        for Interface { object, files, .. } in &mut self.interfaces {
            for (position, file) in files {
                // An interface may go.
                if let Some(value) = file.attribute().ok().and_then(single) {
                    rows.count(*object, *position, value);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, METRICS, Nic, interfaces};
    use crate::collect::fixture::{places, put};
    use crate::collect::{Collector, Places};
    use crate::rows::tests::{key, sampled, values};
    use crate::{Nanos, Rows};

    #[test]
    fn interfaces_that_are_up_are_sampled_hardware_first() {
        let root = tempfile::tempdir().unwrap();
        let sys = |path: &str, text: &str| put(root.path(), &format!("sys/class/net/{path}"), text);
        let places = places(root.path());
        assert!(Nic::open(&places).is_err());
        sys("eth0/operstate", "up\n");
        sys("eth0/device/vendor", "1\n");
        sys("eth0/statistics/rx_bytes", "18446744073709551615\n");
        sys("eth0/statistics/tx_bytes", "12");
        sys("eth0/carrier_changes", "2\n");
        sys("aa/operstate", "unknown\n");
        sys("aa/statistics/rx_bytes", "-3\n");
        sys("off/operstate", "down\n");
        assert_eq!(interfaces(&places.sys, None), ["eth0", "aa"]);
        let mut nic = Nic::open(&places).unwrap();
        let mut rows = Rows::new(&ABOUT);
        rows.begin(Nanos(1));
        nic.sample(Nanos(1), &mut rows).unwrap();
        rows.finish(Nanos(0));
        let found = values(&rows);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[&key("eth0", "rx_bytes")], 18_446_744_073_709_551_615.0);
        assert_eq!(found[&key("eth0", "carrier_changes")], 2.0);

        for n in 0..40 {
            sys(&format!("veth{n}/operstate"), "up\n");
        }
        rows.begin(Nanos(6_000_000_000));
        nic.sample(Nanos(6_000_000_000), &mut rows).unwrap();
        assert!(rows.lacks()[0].1.contains("42 interfaces: 26 of them"), "{:?}", rows.lacks());
        assert_eq!(nic.interfaces.len(), super::MOST);
    }

    #[test]
    fn loopback_is_there() {
        let mut nic = Nic::open(&Places::default()).unwrap();
        let found = sampled(&ABOUT, |rows| nic.sample(Nanos(1), rows).unwrap());
        let of_loopback = found.keys().filter(|(object, _)| object == "lo").count();
        assert_eq!(of_loopback, METRICS.len(), "{found:?}");
    }
}
