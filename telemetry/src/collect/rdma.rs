//! What RDMA devices count, from `/sys/class/infiniband/*/ports/*/{counters,hw_counters}`
//! (Documentation/ABI/stable/sysfs-class-infiniband). Names and meanings are the device's.

use super::{Collector, Lack, Places, names};
use crate::kept::Kept;
use crate::text::single;
use crate::{About, Kind, Metric, Nanos, ObjectId, Rows};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const ABOUT: About = About {
    name: "rdma",
    source: "/sys/class/infiniband/*/ports/*/counters, hw_counters",
    object: "`DEVICE/PORT`",
    at_most_every: Some(Duration::from_secs(1)),
    waits: true,
    metrics: NONE,
    further: "each file of both folders, such as `out_of_sequence`, `packet_seq_err`, `np_cnp_sent`, `rp_cnp_handled`, `port_xmit_wait`; `port_xmit_data` and `port_rcv_data` count 4 bytes each",
    lacks: "machines without RDMA devices; what the device does not count",
};

const NONE: &[Metric] = &[];

#[derive(Debug)]
struct Counter {
    object: String,
    metric: String,
    path: PathBuf,
}

fn counters(sys: &Path) -> Vec<Counter> {
    let folder = sys.join("class/infiniband");
    let mut found = Vec::new();
    for device in names(&folder) {
        for port in names(&folder.join(&device).join("ports")) {
            for group in ["counters", "hw_counters"] {
                let inside = folder.join(&device).join("ports").join(&port).join(group);
                for metric in names(&inside) {
                    // How long the device's own values live: a setting.
                    if metric != "lifespan" {
                        let path = inside.join(&metric);
                        found.push(Counter { object: format!("{device}/{port}"), metric, path });
                    }
                }
            }
        }
    }
    found
}

/// The collector.
#[derive(Debug)]
pub(super) struct Rdma {
    found: Vec<Counter>,
    files: Option<Vec<(ObjectId, u16, Kept)>>,
}

impl Rdma {
    pub(super) fn open(places: &Places) -> Result<Rdma, Lack> {
        let found = counters(&places.sys);
        if found.is_empty() {
            return Err(Lack("/sys/class/infiniband has no device with counters".to_owned()));
        }
        Ok(Rdma { found, files: None })
    }
}

impl Collector for Rdma {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        let files = self.files.get_or_insert_with(|| {
            let open = |counter: &Counter| {
                let file = Kept::open(&counter.path).ok()?;
                let unit = if counter.metric.ends_with("_data") { "4 bytes" } else { "" };
                let metric = rows.named(&counter.metric, unit, Kind::Counter64)?;
                Some((rows.object(&counter.object)?, metric, file))
            };
            self.found.iter().filter_map(open).collect()
        });
        for (object, metric, file) in files {
            // Some can not be read on some devices ("N/A", EINVAL).
            if let Some(value) = file.attribute().ok().and_then(single) {
                rows.count(*object, *metric, value);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Rdma};
    use crate::Nanos;
    use crate::collect::Collector;
    use crate::collect::fixture::{places, put};
    use crate::rows::tests::{key, sampled};

    #[test]
    fn each_port_s_counters_are_taken_by_their_names() {
        let root = tempfile::tempdir().unwrap();
        assert!(Rdma::open(&places(root.path())).is_err());
        let here = |path: &str, text: &str| put(root.path(), &format!("sys/class/infiniband/{path}"), text);
        here("mlx5_0/ports/1/counters/port_xmit_wait", "12\n");
        here("mlx5_0/ports/1/counters/port_rcv_data", "4096\n");
        here("mlx5_0/ports/1/hw_counters/np_cnp_sent", "7\n");
        here("mlx5_0/ports/1/hw_counters/lifespan", "10\n");
        here("mlx5_0/ports/2/hw_counters/out_of_sequence", "N/A (no PMA)\n");
        here("mlx5_0/ports/2/hw_counters/np_cnp_sent", "3");
        let mut rdma = Rdma::open(&places(root.path())).unwrap();
        let found = sampled(&ABOUT, |rows| rdma.sample(Nanos(1), rows).unwrap());
        assert_eq!(found[&key("mlx5_0/1", "np_cnp_sent")], 7.0);
        assert_eq!(found[&key("mlx5_0/1", "port_xmit_wait")], 12.0);
        assert_eq!(found.len(), 3, "{found:?}");
    }
}
