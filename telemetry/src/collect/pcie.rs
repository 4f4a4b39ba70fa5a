//! How fast the PCIe links of drives and NICs run, beside how fast they could.

use super::{Collector, Lack, Places, attribute, names};
use crate::about::metrics;
use crate::{About, Nanos, Rows};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

metrics! {
    Speed = "link_speed", "GT/s", Gauge, "speed of each lane at present";
    Width = "link_width", "lanes", Gauge, "lanes in use at present";
    MaxSpeed = "max_link_speed", "GT/s", Gauge, "speed that the device is able to";
    MaxWidth = "max_link_width", "lanes", Gauge, "lanes that the device has";
}

pub(super) const ABOUT: About = About {
    name: "pcie",
    source: "/sys/class/{nvme,net,infiniband}/*/device/{current,max}_link_{speed,width}",
    object: "the controller or interface, such as `nvme0` or `eth0`",
    at_most_every: Some(Duration::from_secs(10)),
    waits: true,
    metrics: METRICS,
    further: "",
    lacks: "devices that are not on PCIe, and virtual ones that tell no link",
};

fn devices(sys: &Path) -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    for class in ["nvme", "net", "infiniband"] {
        let folder = sys.join("class").join(class);
        for name in names(&folder) {
            let device = folder.join(&name).join("device");
            if device.join("current_link_speed").is_file() {
                found.insert(name, device);
            }
        }
    }
    found
}

/// The collector.
#[derive(Debug)]
pub(super) struct Pcie {
    devices: BTreeMap<String, PathBuf>,
}

impl Pcie {
    pub(super) fn open(places: &Places) -> Result<Pcie, Lack> {
        let devices = devices(&places.sys);
        if devices.is_empty() {
            return Err(Lack("no NVMe controller, NIC or RDMA device tells of a PCIe link".to_owned()));
        }
        Ok(Pcie { devices })
    }
}

impl Collector for Pcie {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        for (name, device) in &self.devices {
            for (metric, file) in [
                (M::Speed, "current_link_speed"),
                (M::Width, "current_link_width"),
                (M::MaxSpeed, "max_link_speed"),
                (M::MaxWidth, "max_link_width"),
            ] {
                let value = first_number(&attribute(&device.join(file)));
                if let (Some(value), Some(object)) = (value, rows.object(name)) {
                    rows.put(object, metric, value);
                }
            }
        }
        Ok(())
    }
}

/// `16.0 GT/s PCIe`, `4`; none of `Unknown` and of a link that is down (0, and 63 or 255 lanes).
fn first_number(text: &str) -> Option<f64> {
    let number: f64 = text.split_whitespace().next()?.parse().ok()?;
    (number > 0.0 && number != 63.0 && number < 255.0).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Pcie, first_number};
    use crate::Nanos;
    use crate::collect::Collector;
    use crate::collect::fixture::{places, put};
    use crate::rows::tests::{key, sampled};
    use proptest::prelude::*;

    #[test]
    fn links_of_drives_and_nics_are_told() {
        let root = tempfile::tempdir().unwrap();
        assert!(Pcie::open(&places(root.path())).is_err());
        put(root.path(), "sys/class/nvme/nvme0/device/current_link_speed", "8.0 GT/s PCIe\n");
        put(root.path(), "sys/class/nvme/nvme0/device/current_link_width", "2\n");
        put(root.path(), "sys/class/nvme/nvme0/device/max_link_speed", "16.0 GT/s PCIe\n");
        put(root.path(), "sys/class/net/eth0/device/current_link_speed", "Unknown\n");
        let mut pcie = Pcie::open(&places(root.path())).unwrap();
        let found = sampled(&ABOUT, |rows| pcie.sample(Nanos(1), rows).unwrap());
        assert_eq!(found[&key("nvme0", "link_speed")], 8.0);
        assert_eq!(found[&key("nvme0", "max_link_speed")], 16.0);
        assert_eq!(found.len(), 3);
    }

    proptest! {
        #[test]
        fn any_text_is_a_number_or_none(text in ".{0,40}") {
            prop_assert!(first_number(&text).is_none_or(f64::is_finite));
        }
    }
}
