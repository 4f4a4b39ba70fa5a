//! What is in flight on each drive and each namespace, and what went through, from `/sys/block/*/{inflight,stat}`
//! (Documentation/block/stat.rst).

use super::{Again, Collector, Lack, Places, names};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{fields, lines, number};
use crate::{About, Nanos, ObjectId, Rows};
use std::path::{Path, PathBuf};

metrics! {
    InflightReads = "inflight_reads", "", Gauge, "reads handed to the driver and not completed";
    InflightWrites = "inflight_writes", "", Gauge, "writes handed to the driver and not completed";
    Reads = "reads", "", Counter64, "completed";
    ReadBytes = "read_bytes", "bytes", Counter64, "read";
    ReadTime = "read_time", "ms", Counter64, "that reads took, all together";
    Writes = "writes", "", Counter64, "completed";
    WrittenBytes = "written_bytes", "bytes", Counter64, "written";
    WriteTime = "write_time", "ms", Counter64, "that writes took, all together";
    Busy = "busy_time", "ms", Counter64, "with something in flight";
    Flushes = "flushes", "", Counter64, "completed";
    FlushTime = "flush_time", "ms", Counter64, "that flushes took, all together";
}

pub(super) const ABOUT: About = About {
    name: "disk",
    source: "/sys/block/*/inflight, stat",
    object: "the block device, such as `nvme0n1` (with multipath `nvme0c0n1` for a path)",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "drives that SPDK drives itself; devices with no hardware behind them (loop, RAM, zram) and those beyond 64; counts where the device's iostats are off",
};

/// More devices than this are not sampled.
const MOST: usize = 64;
/// Between looks for devices that came, ns.
const LOOK: u64 = 5_000_000_000;

/// The devices: NVMe first, then others that have hardware.
pub(super) fn devices(sys: &Path) -> Vec<String> {
    let folder = sys.join("block");
    let mut found: Vec<(bool, String)> = names(&folder)
        .into_iter()
        .map(|name| (!name.starts_with("nvme"), name))
        .filter(|(other, name)| !other || folder.join(name).join("device").exists())
        .collect();
    found.sort();
    found.into_iter().take(MOST).map(|(_, name)| name).collect()
}

/// The collector.
#[derive(Debug)]
pub(super) struct Disk {
    sys: PathBuf,
    files: Vec<(String, ObjectId, Kept, Kept)>,
    look_again: Again,
}

impl Disk {
    pub(super) fn open(places: &Places) -> Result<Disk, Lack> {
        if devices(&places.sys).is_empty() {
            return Err(Lack("/sys/block has no drive and no NVMe namespace".to_owned()));
        }
        Ok(Disk { sys: places.sys.clone(), files: Vec::new(), look_again: Again::each(LOOK) })
    }

    fn look(&mut self, rows: &mut Rows) {
        let found = devices(&self.sys);
        self.files.retain(|(name, ..)| found.contains(name));
        for name in found {
            if self.files.iter().any(|(known, ..)| *known == name) {
                continue;
            }
            let folder = self.sys.join("block").join(&name);
            let files = (Kept::open(&folder.join("inflight")), Kept::open(&folder.join("stat")));
            if let ((Ok(inflight), Ok(stat)), Some(object)) = (files, rows.object(&name)) {
                self.files.push((name, object, inflight, stat));
            }
        }
    }
}

impl Collector for Disk {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, at: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        if self.look_again.is_due(at) {
            self.look(rows);
        }
        self.files.retain_mut(|(_, object, inflight, stat)| {
            // A device may go; another of its name is found with the next look.
            let (Ok(inflight), Ok(stat)) = (inflight.attribute(), stat.attribute()) else { return false };
            parse_inflight(inflight, *object, rows);
            parse_stat(stat, *object, rows);
            true
        });
        Ok(())
    }
}

fn parse_inflight(text: &[u8], object: ObjectId, rows: &mut Rows) {
    let Some(line) = lines(text).next() else { return };
    for (metric, field) in [M::InflightReads, M::InflightWrites].into_iter().zip(fields(line)) {
        if let Some(count) = number(field) {
            rows.count(object, metric, count);
        }
    }
}

fn parse_stat(text: &[u8], object: ObjectId, rows: &mut Rows) {
    let Some(line) = lines(text).next() else { return };
    for (position, field) in fields(line).enumerate() {
        // A sector of these files has 512 bytes, whatever the device's blocks are.
        let (metric, times) = match position {
            0 => (M::Reads, 1),
            2 => (M::ReadBytes, 512),
            3 => (M::ReadTime, 1),
            4 => (M::Writes, 1),
            6 => (M::WrittenBytes, 512),
            7 => (M::WriteTime, 1),
            9 => (M::Busy, 1),
            15 => (M::Flushes, 1),
            16 => (M::FlushTime, 1),
            _ => continue,
        };
        if let Some(count) = number(field).and_then(|n| n.checked_mul(times)) {
            rows.count(object, metric, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::fixture::{places, put};
    use crate::rows::tests::{key, sampled, values};

    const STAT: &str = " 10 1 80 5 20 2 160 7 3 9 12 3 0 24 1 4 2\n";

    fn stat(text: &[u8], rows: &mut Rows) {
        if let Some(object) = rows.object("d") {
            parse_stat(text, object, rows);
        }
    }

    fn inflight(text: &[u8], rows: &mut Rows) {
        if let Some(object) = rows.object("d") {
            parse_inflight(text, object, rows);
        }
    }

    #[test]
    fn columns_of_both_files() {
        let found = sampled(&ABOUT, |rows| stat(STAT.as_bytes(), rows));
        assert_eq!(found[&key("d", "read_bytes")], 40_960.0);
        assert_eq!(found[&key("d", "busy_time")], 9.0);
        assert_eq!(found[&key("d", "flush_time")], 2.0);
        assert_eq!(found.len(), 9);
        let found = sampled(&ABOUT, |rows| inflight(b"       3       12\n", rows));
        assert_eq!(found[&key("d", "inflight_writes")], 12.0);
    }

    #[test]
    fn drives_and_namespaces_are_sampled_and_may_go() {
        let root = tempfile::tempdir().unwrap();
        let here = |path: &str, text: &str| put(root.path(), &format!("sys/block/{path}"), text);
        assert!(Disk::open(&places(root.path())).is_err());
        for name in ["nvme0c0n1", "sda", "loop0"] {
            here(&format!("{name}/stat"), STAT);
            here(&format!("{name}/inflight"), "1 2\n");
        }
        here("sda/device/model", "x\n");
        assert_eq!(devices(&root.path().join("sys")), ["nvme0c0n1", "sda"]);
        let mut disk = Disk::open(&places(root.path())).unwrap();
        let mut rows = Rows::new(&ABOUT);
        let mut sample = |disk: &mut Disk, at: u64| {
            rows.begin(Nanos(at));
            disk.sample(Nanos(at), &mut rows).unwrap();
            rows.finish(Nanos(0));
            values(&rows).len()
        };
        assert_eq!(sample(&mut disk, 1), 22);
        std::fs::remove_dir_all(root.path().join("sys/block/sda")).unwrap();
        assert_eq!(sample(&mut disk, 2 + LOOK), 11);
    }

    mod of_stat {
        use super::*;
        crate::collect::parser_properties!(&ABOUT, STAT, stat);
    }

    mod of_inflight {
        use super::*;
        crate::collect::parser_properties!(&ABOUT, "      130       12\n", inflight);
    }
}
