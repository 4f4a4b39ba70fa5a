//! The collectors: what one sample of each source is. They know no clock but the one they are given, no thread and no
//! file of a run; the machine is what lies under [`Places`].

mod cpu;
mod disk;
mod ethtool;
mod gpu;
mod hwmon;
mod interrupts;
mod link;
mod netstat;
mod nic;
mod pcie;
mod pressure;
mod queues;
mod rdma;
mod reactors;
mod retransmits;
mod rpc;
mod sched;
mod smart;
mod softirqs;
mod softnet;
mod spdk;
mod tcp;
mod threads;

use crate::{About, Nanos, Rows};
pub use retransmits::{OpenRetransmissions, Retransmission, Retransmissions};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// All of them, in the order of the documents.
pub(crate) const ABOUT: &[&About] = &[
    &tcp::ABOUT,
    &retransmits::ABOUT,
    &netstat::ABOUT,
    &nic::ABOUT,
    &ethtool::ABOUT,
    &link::ABOUT,
    &rdma::ABOUT,
    &softnet::ABOUT,
    &softirqs::ABOUT,
    &cpu::ABOUT,
    &sched::ABOUT,
    &threads::ABOUT,
    &pressure::ABOUT,
    &interrupts::ABOUT,
    &disk::ABOUT,
    &queues::ABOUT,
    &smart::ABOUT,
    &pcie::ABOUT,
    &hwmon::ABOUT,
    &reactors::ABOUT,
    &spdk::ABOUT,
    &gpu::ABOUT,
];

/// Where the machine lies: `/proc`, `/sys` and `/dev`, or a copy of some of their files.
#[derive(Clone, Debug)]
pub struct Places {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
    /// NVIDIA's management library, by name or path.
    pub nvml: PathBuf,
}

impl Default for Places {
    fn default() -> Places {
        Places {
            proc: "/proc".into(),
            sys: "/sys".into(),
            dev: "/dev".into(),
            nvml: "libnvidia-ml.so.1".into(),
        }
    }
}

/// What is recorded.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    /// The process, where it is one: its connections and threads are sampled. Otherwise the kernel's NVMe/TCP
    /// connections are, which are told by their ports.
    pub pid: Option<u32>,
    /// TCP ports whose connections are sampled besides those that are found.
    pub ports: Vec<u16>,
    /// Sockets on which it may answer SPDK's RPC, the likeliest first; where there are none, all that it listens on.
    pub rpc: Vec<PathBuf>,
    /// What sees retransmissions, where they are to be seen.
    pub retransmissions: Option<OpenRetransmissions>,
}

/// The TCP ports of the connections that are sampled, as far as they are known: `tcp` finds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) local: BTreeSet<u16>,
    pub(crate) remote: BTreeSet<u16>,
}

impl Ports {
    /// Whether a connection is of one of them; any is where none is known.
    pub(crate) fn has(&self, local: u16, remote: u16) -> bool {
        let unknown = self.local.is_empty() && self.remote.is_empty();
        unknown || self.local.contains(&local) || self.remote.contains(&remote)
    }
}

/// Why a collector has nothing to collect here, or can not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Lack(pub String);

impl Lack {
    pub(crate) fn of(what: &Path, error: &std::io::Error) -> Lack {
        Lack(format!("{}: {error}", what.display()))
    }
}

/// One source.
pub trait Collector: Send {
    /// What it takes.
    fn about(&self) -> &'static About;
    /// Takes a sample. The times of its rows are `at`.
    ///
    /// # Errors
    /// When the source is gone for good. What is not there for the moment is left out of the rows.
    fn sample(&mut self, at: Nanos, rows: &mut Rows) -> Result<(), Lack>;
}

/// A collector, or why there is nothing to collect.
pub type Opened = Result<Box<dyn Collector>, Lack>;

/// Opens each collector, or says why there is nothing to collect.
#[must_use]
pub fn open(places: &Places, subject: &Subject) -> Vec<(&'static About, Opened)> {
    fn boxed<C: Collector + 'static>(opened: Result<C, Lack>) -> Opened {
        opened.map(|collector| Box::new(collector) as Box<dyn Collector>)
    }
    let ports = Arc::new(Mutex::new(Ports::default()));
    vec![
        (&tcp::ABOUT, boxed(tcp::Tcp::open(places, subject, &ports))),
        (&retransmits::ABOUT, boxed(retransmits::Retransmits::open(places, subject, &ports))),
        (&netstat::ABOUT, boxed(netstat::Netstat::open(places))),
        (&nic::ABOUT, boxed(nic::Nic::open(places))),
        (&ethtool::ABOUT, boxed(ethtool::Ethtool::open(places))),
        (&link::ABOUT, boxed(link::Link::open(places))),
        (&rdma::ABOUT, boxed(rdma::Rdma::open(places))),
        (&softnet::ABOUT, boxed(softnet::Softnet::open(places))),
        (&softirqs::ABOUT, boxed(softirqs::Softirqs::open(places))),
        (&cpu::ABOUT, boxed(cpu::Cpu::open(places))),
        (&sched::ABOUT, boxed(sched::Sched::open(places))),
        (&threads::ABOUT, boxed(threads::Threads::open(places, subject))),
        (&pressure::ABOUT, boxed(pressure::Pressure::open(places))),
        (&interrupts::ABOUT, boxed(interrupts::Interrupts::open(places))),
        (&disk::ABOUT, boxed(disk::Disk::open(places))),
        (&queues::ABOUT, boxed(queues::Queues::open(places))),
        (&smart::ABOUT, boxed(smart::Smart::open(places))),
        (&pcie::ABOUT, boxed(pcie::Pcie::open(places))),
        (&hwmon::ABOUT, boxed(hwmon::Hwmon::open(places))),
        (&reactors::ABOUT, boxed(reactors::open(places, subject))),
        (&spdk::ABOUT, boxed(spdk::Spdk::open(places, subject))),
        (&gpu::ABOUT, boxed(gpu::Gpu::open(places))),
    ]
}

/// When a collector looks again for what came: devices, threads, connections.
#[derive(Debug)]
pub(crate) struct Again {
    every: u64,
    last: Option<Nanos>,
}

impl Again {
    /// At once, and then each so many ns.
    pub(crate) const fn each(every: u64) -> Again {
        Again { every, last: None }
    }

    /// Whether it is time; then that is noted.
    pub(crate) fn is_due(&mut self, at: Nanos) -> bool {
        let due = self.last.is_none_or(|last| at.0 >= last.0 + self.every);
        if due {
            self.last = Some(at);
        }
        due
    }
}

/// The names in a folder, in order; none where it can not be read.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The text of an attribute, without the blanks around it; empty where it can not be read.
pub(crate) fn attribute(path: &Path) -> String {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Properties that every parser has: damaged text never panics, and text that is cut gives no value that the whole
/// does not give.
#[cfg(test)]
macro_rules! parser_properties {
    ($about:expr, $text:expr, $parse:expr) => {
        proptest::proptest! {
            #[test]
            fn damaged_text_never_panics(
                cut in 0usize..100_000, changes in proptest::collection::vec((0usize..100_000, proptest::prelude::any::<u8>()), 0..6),
            ) {
                let text: &str = $text;
                let bytes = crate::collect::fixture::damaged(text, cut, &changes);
                let found = crate::rows::tests::sampled($about, |rows| $parse(&bytes, rows));
                proptest::prop_assert!(found.values().all(|value| value.is_finite()));
            }

            #[test]
            fn text_that_is_cut_gives_no_wrong_number(cut in 0usize..100_000) {
                let text: &str = $text;
                let whole = crate::rows::tests::sampled($about, |rows| $parse(text.as_bytes(), rows));
                let cut = text.get(..cut % (text.len() + 1)).unwrap_or_default();
                let part = crate::rows::tests::sampled($about, |rows| $parse(cut.as_bytes(), rows));
                for (key, value) in &part {
                    proptest::prop_assert_eq!(Some(value), whole.get(key), "{:?}", key);
                }
            }
        }
    };
}
#[cfg(test)]
use parser_properties;

#[cfg(test)]
pub(crate) mod fixture {
    //! A machine made of files.

    use super::Places;
    use std::path::Path;

    pub(crate) fn put(root: &Path, path: &str, text: impl AsRef<[u8]>) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(crate) fn places(root: &Path) -> Places {
        Places {
            proc: root.join("proc"),
            sys: root.join("sys"),
            dev: root.join("dev"),
            nvml: root.join("nvml.so"),
        }
    }

    /// Texts like `text`, of which some bytes are others and the end may be missing.
    pub(crate) fn damaged(text: &str, cut: usize, changes: &[(usize, u8)]) -> Vec<u8> {
        let mut bytes = text.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at % bytes.len().max(1);
            if let Some(place) = bytes.get_mut(at) {
                *place = *byte;
            }
        }
        bytes.truncate(cut % (bytes.len() + 1));
        bytes
    }
}
