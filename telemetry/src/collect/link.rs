//! How each interface is set: speed, MTU, offloads, flow control. It counts nothing.

use super::ethtool::Control;
use super::{Collector, Lack, Places, nic};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::single;
use crate::{About, Nanos, Rows};
use std::path::PathBuf;
use std::time::Duration;

metrics! {
    Speed = "speed", "Mb/s", Gauge, "speed of the link";
    Mtu = "mtu", "bytes", Gauge, "largest packet that it sends whole";
    Carrier = "carrier", "", Gauge, "1 while the link is up";
    Tso = "tso", "", Gauge, "1 where the NIC cuts TCP segments (TSO)";
    Gso = "gso", "", Gauge, "1 where the kernel cuts them late (GSO)";
    Gro = "gro", "", Gauge, "1 where received segments are merged (GRO)";
    RxPause = "rx_pause", "", Gauge, "1 where the NIC obeys pause frames";
    TxPause = "tx_pause", "", Gauge, "1 where the NIC sends pause frames";
}

pub(super) const ABOUT: About = About {
    name: "link",
    source: "/sys/class/net/*, ethtool's ioctls",
    object: "the interface",
    at_most_every: Some(Duration::from_secs(5)),
    waits: true,
    metrics: METRICS,
    further: "",
    lacks: "the speed of virtual interfaces; flow control where the driver does not tell",
};

/// The collector.
#[derive(Debug)]
pub(super) struct Link {
    sys: PathBuf,
    control: Option<Control>,
}

impl Link {
    pub(super) fn open(places: &Places) -> Result<Link, Lack> {
        if nic::interfaces(&places.sys, None).is_empty() {
            return Err(Lack(format!("{}: no interface is up", places.sys.join("class/net").display())));
        }
        Ok(Link { sys: places.sys.clone(), control: Control::open().ok() })
    }
}

impl Collector for Link {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        const OFFLOADS: [(M, u32); 3] = [(M::Tso, 0x1e), (M::Gso, 0x23), (M::Gro, 0x2b)];
        for name in nic::interfaces(&self.sys, None) {
            let Some(object) = rows.object(&name) else { return Ok(()) };
            let folder = self.sys.join("class/net").join(&name);
            for (metric, file) in [(M::Speed, "speed"), (M::Mtu, "mtu"), (M::Carrier, "carrier")] {
                // Where it is not known, it is -1 or can not be read.
                let value = Kept::open(&folder.join(file)).and_then(|mut kept| kept.attribute().map(single));
                if let Some(value) = value.ok().flatten().filter(|speed| *speed != u64::from(u32::MAX)) {
                    rows.count(object, metric, value);
                }
            }
            let Some(control) = &self.control else { continue };
            for (metric, command) in OFFLOADS {
                if let Ok(value) = control.single(&name, command) {
                    rows.put(object, metric, f64::from(value));
                }
            }
            if let Ok((receive, transmit)) = control.pause(&name) {
                rows.put(object, M::RxPause, f64::from(u8::from(receive)));
                rows.put(object, M::TxPause, f64::from(u8::from(transmit)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Link};
    use crate::Nanos;
    use crate::collect::fixture::{places, put};
    use crate::collect::{Collector, Places};
    use crate::rows::tests::{key, sampled};

    #[test]
    fn loopback_has_an_mtu_and_offloads_and_no_speed() {
        let mut link = Link::open(&Places::default()).unwrap();
        let found = sampled(&ABOUT, |rows| link.sample(Nanos(1), rows).unwrap());
        assert!(found[&key("lo", "mtu")] >= 1_280.0);
        assert!(found[&key("lo", "tso")] <= 1.0);
        assert!(!found.contains_key(&key("lo", "speed")));
    }

    #[test]
    fn a_speed_that_is_not_known_is_none() {
        let root = tempfile::tempdir().unwrap();
        for (name, speed) in [("a", "100000\n"), ("b", "-1\n"), ("c", "4294967295\n"), ("d", "10")] {
            put(root.path(), &format!("sys/class/net/{name}/operstate"), "up\n");
            put(root.path(), &format!("sys/class/net/{name}/speed"), speed);
        }
        let mut link = Link::open(&places(root.path())).unwrap();
        let found = sampled(&ABOUT, |rows| link.sample(Nanos(1), rows).unwrap());
        let speeds: Vec<_> = found.iter().filter(|((_, metric), _)| metric == "speed").collect();
        assert_eq!(speeds, [(&key("a", "speed"), &100_000.0)]);
    }
}
