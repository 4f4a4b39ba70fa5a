//! Counts what the recorded does whether or not anything is armed, for `record --measure-overhead`: from what the
//! kernel counts anyway. It asks nothing of the recorded process and touches none of its memory.
//!
//! An SPDK process's commands are told by the bytes over its TCP connections, which the kernel has for each socket
//! (`sock_diag(7)`): SPDK's own counters would have to be asked for over its RPC, whose answers the app thread
//! makes, mostly on the reactor that is measured. How many bytes a command is, the commands recorded in the armed
//! windows tell. The kernel's host and target are told by their block devices' I/O counts and times.

use anyhow::{Result, anyhow, bail};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use run_format::{Kind, Nanos, Side, monotonic_now};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use telemetry::tcp_bytes;

/// What is counted.
#[derive(Clone, Debug)]
pub enum Counter {
    /// Bytes over a process's TCP connections.
    Connections(u32),
    /// I/Os of block devices, by their `stat` files.
    Devices(Vec<PathBuf>),
}

/// Counts at an instant, by what they are of: those that are there at two instants have a difference.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    pub at: Nanos,
    /// CPU time that the recorded process has had, where it is one; ns.
    pub cpu_ns: Option<u64>,
    of: BTreeMap<u64, (u64, u64)>,
}

impl Counter {
    /// The counter for one side.
    ///
    /// # Errors
    /// Where nothing counts its commands.
    pub fn of(side: Side, kind: Kind, pid: Option<u32>) -> Result<Counter> {
        let counter = match (kind, side, pid) {
            (Kind::Spdk, _, Some(pid)) => Counter::Connections(pid),
            (Kind::Spdk, _, None) => bail!("the recorded process is not known"),
            (Kind::Kernel, Side::Host, _) => Counter::Devices(fabrics_devices(Path::new("/sys"))),
            (Kind::Kernel, Side::Target, _) => {
                Counter::Devices(backing_devices(Path::new("/sys/kernel/config/nvmet"), Path::new("/sys")))
            }
        };
        match &counter {
            Counter::Devices(devices) if devices.is_empty() => bail!(
                "no block device counts this side's commands (a host needs connected namespaces, a target namespaces that are block devices)"
            ),
            _ => Ok(counter),
        }
    }

    /// For a person.
    pub fn name(&self) -> String {
        match self {
            Counter::Connections(_) => "bytes over the process's TCP connections, by sock_diag".to_owned(),
            Counter::Devices(devices) => {
                let names: Vec<String> = devices
                    .iter()
                    .filter_map(|path| path.parent()?.file_name())
                    .map(|name| name.to_string_lossy().into_owned())
                    .collect();
                format!("I/Os of {}", names.join(", "))
            }
        }
    }

    /// Units a command counts, where that is known beforehand.
    pub fn per_command(&self) -> Option<f64> {
        matches!(self, Counter::Devices(_)).then_some(1.0)
    }

    /// The counts now.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn sample(&self) -> Result<Sample> {
        let of = match self {
            Counter::Connections(pid) => {
                let bytes = tcp_bytes(*pid).map_err(|lack| {
                    anyhow!("ask the kernel for the bytes of process {pid}'s TCP connections: {lack}")
                })?;
                bytes.into_iter().map(|(inode, n)| (inode, (n, 0))).collect()
            }
            Counter::Devices(devices) => {
                let mut counts = BTreeMap::new();
                for (number, path) in devices.iter().enumerate() {
                    // A device may go.
                    let text = std::fs::read_to_string(path).unwrap_or_default();
                    counts.extend(device_counts(&text).map(|counts| (number as u64, counts)));
                }
                counts
            }
        };
        let cpu_ns = match self {
            Counter::Connections(pid) => cpu_time(*pid),
            Counter::Devices(_) => None,
        };
        Ok(Sample { at: monotonic_now(), cpu_ns, of })
    }

    /// Units and the time that they took together (ns, where the counter tells) from one instant to a later one.
    pub fn between(&self, before: &Sample, after: &Sample) -> (f64, Option<f64>) {
        let (mut units, mut busy) = (0u64, 0u64);
        for (key, (n, ms)) in &after.of {
            if let Some((n_before, ms_before)) = before.of.get(key) {
                units += n.saturating_sub(*n_before);
                busy += ms.saturating_sub(*ms_before);
            }
        }
        let times = matches!(self, Counter::Devices(_));
        (units as f64, times.then_some(busy as f64 * 1e6))
    }
}

/// CPU time that all threads of a process have had, ns; none where it is gone (`clock_getcpuclockid(3)`).
pub fn cpu_time(pid: u32) -> Option<u64> {
    let clock = ClockId::pid_cpu_clock_id(Pid::from_raw(i32::try_from(pid).ok()?)).ok()?;
    let time = clock_gettime(clock).ok()?;
    let part = |part: i64| u64::try_from(part).ok();
    part(time.tv_sec())?.checked_mul(1_000_000_000)?.checked_add(part(time.tv_nsec())?)
}

/// I/Os and their milliseconds of a device's `stat` (Documentation/block/stat.rst: reads, writes, discards and
/// flushes have their I/Os at 0, 4, 11 and 15, their times at 3, 7, 14 and 16).
fn device_counts(text: &str) -> Option<(u64, u64)> {
    let fields: Vec<u64> = text.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
    let sum =
        |at: [usize; 4]| at.iter().filter_map(|n| fields.get(*n)).fold(0u64, |a, b| a.saturating_add(*b));
    (fields.len() >= 11).then(|| (sum([0, 4, 11, 15]), sum([3, 7, 14, 16])))
}

/// The `stat` files of the namespaces of all controllers over TCP and RDMA: of each path, where multipath has several.
fn fabrics_devices(sys: &Path) -> Vec<PathBuf> {
    let names = |path: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let mut stats = BTreeSet::new();
    for controller in names(&sys.join("class/nvme")) {
        let transport = std::fs::read_to_string(controller.join("transport")).unwrap_or_default();
        if !matches!(transport.trim(), "tcp" | "rdma") {
            continue;
        }
        for device in names(&controller) {
            let is_namespace =
                device.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvme"));
            if is_namespace && device.join("stat").is_file() {
                stats.insert(device.join("stat"));
            }
        }
    }
    stats.into_iter().collect()
}

/// The `stat` files of the block devices behind a kernel target's namespaces.
fn backing_devices(configuration: &Path, sys: &Path) -> Vec<PathBuf> {
    let inside = |path: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let mut stats = BTreeSet::new();
    for subsystem in inside(&configuration.join("subsystems")) {
        for namespace in inside(&subsystem.join("namespaces")) {
            let enabled = std::fs::read_to_string(namespace.join("enable")).unwrap_or_default();
            let path = std::fs::read_to_string(namespace.join("device_path")).unwrap_or_default();
            let device = std::fs::canonicalize(path.trim()).ok();
            let name = device.as_deref().and_then(Path::file_name);
            if let Some(name) = name.filter(|_| enabled.trim() == "1") {
                let stat = sys.join("class/block").join(name).join("stat");
                if stat.is_file() {
                    stats.insert(stat);
                }
            }
        }
    }
    stats.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};

    #[test]
    fn bytes_over_a_connection_are_counted() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let counter = Counter::of(Side::Target, Kind::Spdk, Some(std::process::id())).unwrap();
        near.write_all(&[1; 10]).unwrap();
        far.read_exact(&mut [0; 10]).unwrap();
        let before = counter.sample().unwrap();
        near.write_all(&[1; 100_000]).unwrap();
        far.read_exact(&mut [0; 100_000]).unwrap();
        // What was read is acknowledged at the latest with the next bytes back.
        far.write_all(&[1; 1]).unwrap();
        near.read_exact(&mut [0; 1]).unwrap();
        let after = counter.sample().unwrap();
        let (units, busy) = counter.between(&before, &after);
        // Sent on one end, received on the other; other tests of this process may have connections, too.
        assert!(units >= 150_000.0 && busy.is_none(), "{units}");
        assert!(counter.per_command().is_none());
    }

    #[test]
    fn a_process_s_cpu_time_is_what_it_worked() {
        let own = std::process::id();
        let before = cpu_time(own).unwrap();
        let until = Instant::now() + Duration::from_millis(30);
        while Instant::now() < until {
            std::hint::black_box(1);
        }
        let worked = cpu_time(own).unwrap() - before;
        // Other tests of this process work, too; a busy machine lets it work less.
        assert!(worked > 1_000_000, "{worked}");
        assert_eq!(cpu_time(u32::MAX), None);
        assert_eq!(cpu_time(4_194_303), None, "no such process");
    }

    #[test]
    fn a_device_s_counts_are_its_ios_and_their_times() {
        let text = " 10 1 80 5 20 2 160 7 0 9 12 3 0 24 1 4 2\n";
        assert_eq!(device_counts(text), Some((10 + 20 + 3 + 4, 5 + 7 + 1 + 2)));
        // Before discards and flushes were counted.
        assert_eq!(device_counts("10 1 80 5 20 2 160 7 0 9 12"), Some((30, 12)));
        assert_eq!(device_counts(""), None);
        assert_eq!(device_counts("10 x"), None);
    }

    #[test]
    fn only_namespaces_over_fabrics_are_a_host_s() {
        let folder = tempfile::tempdir().unwrap();
        let make = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        make("class/nvme/nvme0/transport", "pcie\n");
        make("class/nvme/nvme0/nvme0n1/stat", "1");
        make("class/nvme/nvme1/transport", "tcp\n");
        make("class/nvme/nvme1/nvme1c1n1/stat", "1");
        make("class/nvme/nvme1/power/stat", "1");
        let found = fabrics_devices(folder.path());
        assert_eq!(found, [folder.path().join("class/nvme/nvme1/nvme1c1n1/stat")]);
        assert_eq!(Counter::Devices(found).name(), "I/Os of nvme1c1n1");
        assert!(fabrics_devices(&folder.path().join("nowhere")).is_empty());
    }

    proptest! {
        #[test]
        fn any_counts_are_taken_or_left(text in any::<String>()) {
            let _ = device_counts(&text);
        }
    }
}
