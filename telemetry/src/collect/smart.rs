//! The health of local NVMe drives, by Get Log Page 02h (NVM Express Base Specification, SMART / Health Information).
//! One admin command a drive and sample, to drives on this machine's PCIe alone.

use super::{Collector, Lack, Places, attribute, names};
use crate::about::metrics;
use crate::text::value;
use crate::{About, Nanos, ObjectId, Rows};
use nix::libc;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

metrics! {
    Temperature = "temperature", "C", Gauge, "composite temperature";
    CriticalWarning = "critical_warning", "", Gauge, "bits: 1 spare low, 2 temperature, 4 reliability degraded, 8 read only, 16 backup failed, 32 persistent memory";
    Spare = "available_spare", "%", Gauge, "spare capacity left";
    Used = "percentage_used", "%", Gauge, "of the drive's rated life; may exceed 100";
    ReadBytes = "read_bytes", "bytes", Counter64, "read by hosts, in steps of 512,000";
    WrittenBytes = "written_bytes", "bytes", Counter64, "written by hosts, in steps of 512,000";
    Reads = "reads", "", Counter64, "read commands completed";
    Writes = "writes", "", Counter64, "write commands completed";
    Busy = "busy_time", "min", Counter64, "time with commands outstanding";
    MediaErrors = "media_errors", "", Counter64, "times that data could not be recovered";
    LogEntries = "error_log_entries", "", Counter64, "entries in the error log over the drive's life";
    WarningTime = "warning_temperature_time", "min", Counter32, "time above the warning temperature";
    CriticalTime = "critical_temperature_time", "min", Counter32, "time above the critical temperature";
    Throttled1 = "throttle1_count", "", Counter32, "times that it lowered its power for heat (TMT1)";
    Throttled2 = "throttle2_count", "", Counter32, "times that it lowered its power much for heat (TMT2)";
    Throttled1Time = "throttle1_time", "s", Counter32, "time with power lowered (TMT1)";
    Throttled2Time = "throttle2_time", "s", Counter32, "time with power lowered much (TMT2)";
}

pub(super) const ABOUT: About = About {
    name: "smart",
    source: "Get Log Page 02h by NVME_IOCTL_ADMIN_CMD on /dev/nvmeN of PCIe drives",
    object: "the controller, such as `nvme0`",
    at_most_every: Some(Duration::from_secs(10)),
    waits: true,
    metrics: METRICS,
    further: "",
    lacks: "drives over fabrics (their target has them); drives that SPDK drives itself; all of it without CAP_SYS_ADMIN; throttling times where the drive does not report them (0)",
};

/// Bytes of the log page.
const LOG: usize = 512;
/// `NVME_IOCTL_ADMIN_CMD`: `_IOWR('N', 0x41, struct nvme_admin_cmd)` (`include/uapi/linux/nvme_ioctl.h`).
const ADMIN_COMMAND: libc::c_ulong = 0xc048_4e41;
/// Get Log Page, of all namespaces together.
const GET_LOG_PAGE: u8 = 2;
const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// `struct nvme_passthru_cmd`.
#[derive(Default)]
#[repr(C)]
struct Command {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    address: u64,
    metadata_length: u32,
    data_length: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    result: u32,
}

fn read_log(drive: &File) -> std::io::Result<[u8; LOG]> {
    let mut log = [0u8; LOG];
    let mut command = Command {
        opcode: GET_LOG_PAGE,
        nsid: ALL_NAMESPACES,
        address: log.as_mut_ptr() as u64,
        data_length: LOG as u32,
        // Dwords less one, and the page.
        cdw10: (LOG as u32 / 4 - 1) << 16 | 0x02,
        timeout_ms: 2_000,
        ..Command::default()
    };
    // SAFETY: the descriptor is open, the command is the kernel's own structure, and its address and length are those
    // of `log`, which outlives the call.
    let result = unsafe { libc::ioctl(drive.as_raw_fd(), ADMIN_COMMAND, &raw mut command) };
    match result {
        0 => Ok(log),
        status if status > 0 => Err(std::io::Error::other(format!("the drive said no (status {status:#x})"))),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The local drives: the controllers on PCIe.
fn drives(sys: &Path) -> Vec<String> {
    let folder = sys.join("class/nvme");
    let mut found = names(&folder);
    found.retain(|name| attribute(&folder.join(name).join("transport")) == "pcie");
    found
}

/// The collector.
#[derive(Debug)]
pub(super) struct Smart {
    drives: Vec<(String, File)>,
}

impl Smart {
    pub(super) fn open(places: &Places) -> Result<Smart, Lack> {
        let found = drives(&places.sys);
        if found.is_empty() {
            return Err(Lack("/sys/class/nvme has no drive on PCIe".to_owned()));
        }
        let (mut drives, mut last) = (Vec::new(), Lack(String::new()));
        for name in found {
            let path = places.dev.join(&name);
            match File::open(&path) {
                Ok(file) => drives.push((name, file)),
                Err(error) => last = Lack::of(&path, &error),
            }
        }
        if drives.is_empty() { Err(last) } else { Ok(Smart { drives }) }
    }
}

impl Collector for Smart {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        // A drive that does not answer is not asked again: it has other worries.
        self.drives.retain(|(name, file)| match read_log(file) {
            Ok(log) => {
                if let Some(object) = rows.object(name) {
                    parse(&log, object, rows);
                }
                true
            }
            Err(error) => {
                rows.lack("", &format!("{name}: Get Log Page 02h: {error}"));
                false
            }
        });
        if self.drives.is_empty() {
            return Err(Lack("no drive answers Get Log Page 02h any more".to_owned()));
        }
        Ok(())
    }
}

fn parse(log: &[u8; LOG], object: ObjectId, rows: &mut Rows) {
    let u16_at = |at: usize| u16::from_le_bytes([log[at], log[at + 1]]);
    let u32_at = |at: usize| u32::from_le_bytes([log[at], log[at + 1], log[at + 2], log[at + 3]]);
    // Counters of 128 bits. What does not fit into 64 is no count of anything.
    let count = |at: usize| {
        let bytes: Option<[u8; 16]> = log.get(at..at + 16).and_then(|bytes| bytes.try_into().ok());
        bytes.and_then(|bytes| u64::try_from(u128::from_le_bytes(bytes)).ok())
    };
    // Kelvin; 0 where it is not measured.
    let kelvin = u16_at(1);
    if kelvin != 0 {
        rows.put(object, M::Temperature, f64::from(kelvin) - 273.0);
    }
    for (metric, at) in [(M::CriticalWarning, 0), (M::Spare, 3), (M::Used, 5)] {
        rows.put(object, metric, f64::from(log[at]));
    }
    for (metric, at, unit) in [
        (M::ReadBytes, 32, 512_000.0),
        (M::WrittenBytes, 48, 512_000.0),
        (M::Reads, 64, 1.0),
        (M::Writes, 80, 1.0),
        (M::Busy, 96, 1.0),
        (M::MediaErrors, 160, 1.0),
        (M::LogEntries, 176, 1.0),
    ] {
        if let Some(count) = count(at) {
            rows.put(object, metric, value(count) * unit);
        }
    }
    for (metric, at) in [
        (M::WarningTime, 192),
        (M::CriticalTime, 196),
        (M::Throttled1, 216),
        (M::Throttled2, 220),
        (M::Throttled1Time, 224),
        (M::Throttled2Time, 228),
    ] {
        rows.put(object, metric, f64::from(u32_at(at)));
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Command, LOG, METRICS, Smart, drives, parse};
    use crate::Nanos;
    use crate::collect::fixture::{places, put};
    use crate::collect::{Collector, Places};
    use crate::rows::tests::{key, sampled};
    use proptest::prelude::*;

    #[test]
    fn the_page_s_fields_stand_where_the_specification_has_them() {
        let mut log = [0u8; LOG];
        log[0] = 2;
        log[1..3].copy_from_slice(&358u16.to_le_bytes());
        log[5] = 104;
        log[32..48].copy_from_slice(&10u128.to_le_bytes());
        log[160..176].copy_from_slice(&3u128.to_le_bytes());
        log[64..80].copy_from_slice(&u128::MAX.to_le_bytes());
        log[192..196].copy_from_slice(&7u32.to_le_bytes());
        log[216..220].copy_from_slice(&5u32.to_le_bytes());
        log[228..232].copy_from_slice(&60u32.to_le_bytes());
        let found = sampled(&ABOUT, |rows| {
            let object = rows.object("nvme0").unwrap();
            parse(&log, object, rows);
        });
        for (metric, value) in [
            ("temperature", 85.0),
            ("critical_warning", 2.0),
            ("percentage_used", 104.0),
            ("read_bytes", 5_120_000.0),
            ("media_errors", 3.0),
            ("warning_temperature_time", 7.0),
            ("throttle1_count", 5.0),
            ("throttle2_time", 60.0),
        ] {
            assert_eq!(found[&key("nvme0", metric)], value, "{metric}");
        }
        assert!(!found.contains_key(&key("nvme0", "reads")));
        assert_eq!(found.len(), METRICS.len() - 1);
        assert_eq!(size_of::<Command>(), 72);
    }

    #[test]
    fn only_drives_on_pcie_are_asked_and_one_that_refuses_is_told() {
        let root = tempfile::tempdir().unwrap();
        assert!(Smart::open(&places(root.path())).is_err());
        put(root.path(), "sys/class/nvme/nvme0/transport", "tcp\n");
        put(root.path(), "sys/class/nvme/nvme1/transport", "pcie\n");
        assert_eq!(drives(&root.path().join("sys")), ["nvme1"]);
        assert!(Smart::open(&places(root.path())).unwrap_err().to_string().contains("nvme1"));
        // A file takes no admin command.
        put(root.path(), "dev/nvme1", "");
        let mut smart = Smart::open(&places(root.path())).unwrap();
        let mut rows = crate::Rows::new(&ABOUT);
        rows.begin(Nanos(1));
        assert!(smart.sample(Nanos(1), &mut rows).is_err());
        assert!(rows.lacks()[0].1.contains("nvme1: Get Log Page 02h"), "{:?}", rows.lacks());
    }

    #[test]
    fn a_drive_of_this_machine_answers() {
        let mut smart = match Smart::open(&Places::default()) {
            Ok(smart) => smart,
            Err(lack) => return println!("skipped: {lack}"),
        };
        let found = sampled(&ABOUT, |rows| smart.sample(Nanos(1), rows).unwrap());
        assert!(found.keys().any(|(_, metric)| metric == "temperature"), "{found:?}");
    }

    proptest! {
        #[test]
        fn any_page_is_numbers(bytes in proptest::collection::vec(any::<u8>(), LOG)) {
            let log: [u8; LOG] = bytes.try_into().unwrap();
            let found = sampled(&ABOUT, |rows| {
                let object = rows.object("x").unwrap();
                parse(&log, object, rows);
            });
            prop_assert!(found.values().all(|value| value.is_finite()));
        }
    }
}
