//! How many commands are in flight on each hardware queue of each NVMe namespace, from blk-mq's debugfs.

use super::{Again, Collector, Lack, Places, disk, names};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{lines, number};
use crate::{About, Nanos, ObjectId, Rows};
use std::path::{Path, PathBuf};

metrics! {
    Busy = "in_flight", "", Gauge, "tags in use: commands of all namespaces of the controller on this queue";
    Tags = "tags", "", Gauge, "tags that the queue has";
}

pub(super) const ABOUT: About = About {
    name: "queues",
    source: "/sys/kernel/debug/block/nvme*/hctx*/tags",
    object: "`DEVICE hctxN`; hctxN is NVMe queue N + 1",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "all of it without debugfs or CONFIG_BLK_DEBUG_FS (`disk` has the whole device's); SPDK's queues; queues beyond 512",
};

/// More queues than this are not sampled.
const MOST: usize = 512;
/// Between looks for queues that came, ns.
const LOOK: u64 = 5_000_000_000;

fn queues(sys: &Path) -> Vec<(String, PathBuf)> {
    let folder = sys.join("kernel/debug/block");
    let mut found = Vec::new();
    for device in disk::devices(sys).into_iter().filter(|name| name.starts_with("nvme")) {
        for name in names(&folder.join(&device)).into_iter().filter(|name| name.starts_with("hctx")) {
            found.push((format!("{device} {name}"), folder.join(&device).join(name).join("tags")));
        }
    }
    found.truncate(MOST);
    found
}

/// The collector.
#[derive(Debug)]
pub(super) struct Queues {
    sys: PathBuf,
    files: Vec<(String, ObjectId, Kept)>,
    look_again: Again,
}

impl Queues {
    pub(super) fn open(places: &Places) -> Result<Queues, Lack> {
        if queues(&places.sys).is_empty() {
            let why = "/sys/kernel/debug/block has no queue of an NVMe namespace (none is there, or debugfs is not mounted or has no CONFIG_BLK_DEBUG_FS)";
            return Err(Lack(why.to_owned()));
        }
        Ok(Queues { sys: places.sys.clone(), files: Vec::new(), look_again: Again::each(LOOK) })
    }
}

impl Collector for Queues {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, at: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        if self.look_again.is_due(at) {
            self.files.clear();
            for (name, path) in queues(&self.sys) {
                if let (Ok(file), Some(object)) = (Kept::open(&path), rows.object(&name)) {
                    self.files.push((name, object, file));
                }
            }
        }
        for (_, object, file) in &mut self.files {
            // A queue may go.
            if let Ok(text) = file.read() {
                parse(text, *object, rows);
            }
        }
        Ok(())
    }
}

/// `nr_tags=N`, then the bitmap of ordinary tags with its `busy=N`; that of reserved tags comes after it.
fn parse(text: &[u8], object: ObjectId, rows: &mut Rows) {
    let mut inside = false;
    for line in lines(text) {
        if let Some(tags) = line.strip_prefix(b"nr_tags=").and_then(number) {
            rows.count(object, M::Tags, tags);
        }
        inside |= line == b"bitmap_tags:";
        if inside && let Some(busy) = line.strip_prefix(b"busy=") {
            if let Some(busy) = number(busy) {
                rows.count(object, M::Busy, busy);
            }
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::fixture::{places, put};
    use crate::rows::tests::{key, sampled, values};

    const TEXT: &str = "nr_tags=1023\nnr_reserved_tags=1\nactive_queues=0\n\nbitmap_tags:\ndepth=1022\nbusy=37\ncleared=4\nbits_per_word=64\n\nbitmap_reserved_tags:\ndepth=1\nbusy=1\n";

    fn of(text: &[u8], rows: &mut Rows) {
        if let Some(object) = rows.object("q") {
            parse(text, object, rows);
        }
    }

    #[test]
    fn busy_tags_are_in_flight() {
        let found = sampled(&ABOUT, |rows| of(TEXT.as_bytes(), rows));
        assert_eq!(found[&key("q", "in_flight")], 37.0);
        assert_eq!(found[&key("q", "tags")], 1023.0);
    }

    #[test]
    fn queues_of_nvme_devices_are_sampled() {
        let root = tempfile::tempdir().unwrap();
        assert!(Queues::open(&places(root.path())).is_err());
        for device in ["nvme0n1", "sda"] {
            put(root.path(), &format!("sys/block/{device}/stat"), "1\n");
            put(root.path(), &format!("sys/kernel/debug/block/{device}/hctx1/tags"), TEXT);
        }
        let mut queues = Queues::open(&places(root.path())).unwrap();
        let mut rows = Rows::new(&ABOUT);
        rows.begin(Nanos(1));
        queues.sample(Nanos(1), &mut rows).unwrap();
        rows.finish(Nanos(0));
        assert_eq!(values(&rows)[&key("nvme0n1 hctx1", "in_flight")], 37.0);
        assert_eq!(values(&rows).len(), 2);
    }

    super::super::parser_properties!(&ABOUT, TEXT, of);
}
