//! Temperatures that the kernel reads by itself, from `/sys/class/hwmon` (Documentation/hwmon/sysfs-interface.rst): those
//! of drives and NICs, where `smart` can not be asked.

use super::{Collector, Lack, Places, attribute, names};
use crate::about::metrics;
use crate::{About, Nanos, Rows};
use std::path::PathBuf;
use std::time::Duration;

metrics! {
    Temperature = "temperature", "C", Gauge, "at the sensor";
}

pub(super) const ABOUT: About = About {
    name: "hwmon",
    source: "/sys/class/hwmon/*/temp*_input",
    object: "`DEVICE LABEL`: the device behind the sensor (`nvme0`) or the sensor's driver, and the sensor's label or number",
    at_most_every: Some(Duration::from_secs(10)),
    waits: true,
    metrics: METRICS,
    further: "",
    lacks: "machines without sensors (most virtual ones); sensors beyond 64",
};

/// More sensors than this are not sampled.
const MOST: usize = 64;

fn sensors(places: &Places) -> Vec<(String, PathBuf)> {
    let folder = places.sys.join("class/hwmon");
    let mut found = Vec::new();
    for monitor in names(&folder) {
        let monitor = folder.join(monitor);
        let device = std::fs::read_link(monitor.join("device"))
            .ok()
            .and_then(|path| Some(path.file_name()?.to_str()?.to_owned()))
            .filter(|name| name.starts_with("nvme"));
        let of = device.unwrap_or_else(|| attribute(&monitor.join("name")));
        for file in names(&monitor) {
            let Some(sensor) = file.strip_suffix("_input").filter(|name| name.starts_with("temp")) else {
                continue;
            };
            let label = attribute(&monitor.join(format!("{sensor}_label")));
            let label = if label.is_empty() { sensor.to_owned() } else { label };
            found.push((format!("{of} {label}"), monitor.join(&file)));
        }
    }
    found.truncate(MOST);
    found
}

/// The collector.
#[derive(Debug)]
pub(super) struct Hwmon {
    sensors: Vec<(String, PathBuf)>,
}

impl Hwmon {
    pub(super) fn open(places: &Places) -> Result<Hwmon, Lack> {
        let sensors = sensors(places);
        if sensors.is_empty() {
            return Err(Lack("/sys/class/hwmon has no temperature".to_owned()));
        }
        Ok(Hwmon { sensors })
    }
}

impl Collector for Hwmon {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        for (name, path) in &self.sensors {
            // In thousandths; a sensor that sleeps can not be read.
            let value = attribute(path).parse::<i32>();
            if let (Ok(value), Some(object)) = (value, rows.object(name)) {
                rows.put(object, M::Temperature, f64::from(value) / 1e3);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Hwmon};
    use crate::Nanos;
    use crate::collect::Collector;
    use crate::collect::fixture::{places, put};
    use crate::rows::tests::{key, sampled};

    #[test]
    fn a_drive_s_sensor_bears_the_drive_s_name() {
        let root = tempfile::tempdir().unwrap();
        assert!(Hwmon::open(&places(root.path())).is_err());
        let here = |path: &str, text: &str| put(root.path(), &format!("sys/class/hwmon/{path}"), text);
        here("hwmon0/name", "nvme\n");
        here("hwmon0/temp1_input", "45850\n");
        here("hwmon0/temp1_label", "Composite\n");
        std::os::unix::fs::symlink("../../nvme3", root.path().join("sys/class/hwmon/hwmon0/device")).unwrap();
        here("hwmon1/name", "coretemp\n");
        here("hwmon1/temp2_input", "-5000\n");
        here("hwmon1/temp3_input", "off\n");
        let mut hwmon = Hwmon::open(&places(root.path())).unwrap();
        let found = sampled(&ABOUT, |rows| hwmon.sample(Nanos(1), rows).unwrap());
        assert_eq!(found[&key("nvme3 Composite", "temperature")], 45.85);
        assert_eq!(found[&key("coretemp temp2", "temperature")], -5.0);
        assert_eq!(found.len(), 2);
    }
}
