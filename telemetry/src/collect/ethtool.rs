//! What a NIC's driver counts of congestion and loss, by ethtool's ioctls (`include/uapi/linux/ethtool.h`): pause
//! frames, priority flow control, ECN, discards. Names and meanings are the driver's.

use super::{Collector, Lack, Places, nic};
use crate::text::value;
use crate::{About, Kind, Metric, Nanos, ObjectId, Rows};
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

pub(super) const ABOUT: About = About {
    name: "ethtool",
    source: "ethtool's statistics (`ethtool -S`), by ioctl",
    object: "the interface",
    at_most_every: Some(Duration::from_secs(1)),
    waits: true,
    metrics: NONE,
    further: "the driver's statistics whose names tell of pause, PFC, ECN, CNP, discards, drops, full buffers, damaged frames or time-outs, at most 128 an interface",
    lacks: "interfaces whose driver has no such statistics (loopback), and what the driver does not count",
};

const NONE: &[Metric] = &[];
/// More statistics of one interface than this are not taken.
const MOST: usize = 128;

const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSTATS: u32 = 0x1d;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETH_SS_STATS: u32 = 1;
const SIOCETHTOOL: libc::c_ulong = 0x8946;
/// Bytes of a name (`ETH_GSTRING_LEN`).
const NAME: usize = 32;
/// More statistics than a driver has.
const COUNTS: usize = 1 << 16;

/// Whether a statistic of this name tells of congestion or loss.
fn is_wanted(name: &str) -> bool {
    const WORDS: [&str; 20] = [
        "pause",
        "pfc",
        "ecn",
        "cnp",
        "discard",
        "drop",
        "out_of_buffer",
        "nobuf",
        "no_buf",
        "no_desc",
        "missed",
        "overrun",
        "fifo",
        "congest",
        "crc",
        "symbol",
        "corrected",
        "timeout",
        "roce",
        "slow_restart",
    ];
    let name = name.to_ascii_lowercase();
    WORDS.iter().any(|word| name.contains(word)) && !name.contains("xdp")
}

/// The ethtool interface of the kernel.
#[derive(Debug)]
pub(super) struct Control {
    socket: OwnedFd,
}

impl Control {
    pub(super) fn open() -> nix::Result<Control> {
        let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        Ok(Control { socket })
    }

    /// One command; `data` begins with its number and is what the kernel reads and writes.
    fn command(&self, interface: &str, data: &mut [u64]) -> nix::Result<()> {
        // SAFETY: the structure is plain numbers, for which zeros are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // The last byte stays the end of the name.
        let room = request.ifr_name.len() - 1;
        for (into, byte) in request.ifr_name.iter_mut().take(room).zip(interface.bytes()) {
            *into = byte.cast_signed();
        }
        request.ifr_ifru.ifru_data = data.as_mut_ptr().cast();
        // SAFETY: the descriptor is open, and the request points to `data`, which callers make as long as the command
        // takes: its head, and what follows it by the length that the head names.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        nix::errno::Errno::result(result).map(drop)
    }

    /// A command of `struct ethtool_value`: its number in, a value out.
    pub(super) fn single(&self, interface: &str, command: u32) -> nix::Result<u32> {
        let mut data = [u64::from_ne_bytes(two(command, 0))];
        self.command(interface, &mut data)?;
        let bytes = data[0].to_ne_bytes();
        Ok(u32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]))
    }

    /// The flow control that is set: `struct ethtool_pauseparam`'s receive and transmit.
    pub(super) fn pause(&self, interface: &str) -> nix::Result<(bool, bool)> {
        const ETHTOOL_GPAUSEPARAM: u32 = 0x12;
        let mut data = [u64::from_ne_bytes(two(ETHTOOL_GPAUSEPARAM, 0)), 0];
        self.command(interface, &mut data)?;
        let bytes = data[1].to_ne_bytes();
        Ok((bytes[..4] != [0; 4], bytes[4..] != [0; 4]))
    }

    /// How many statistics there are.
    fn statistics(&self, interface: &str) -> nix::Result<usize> {
        // struct ethtool_sset_info: command, reserved, mask of sets (64 bits), a length for each.
        let mut data = [u64::from_ne_bytes(two(ETHTOOL_GSSET_INFO, 0)), 1 << ETH_SS_STATS, 0];
        self.command(interface, &mut data)?;
        let bytes = data[2].to_ne_bytes();
        let count = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        Ok(if data[1] == 0 { 0 } else { count.min(COUNTS) })
    }

    fn names(&self, interface: &str, count: usize) -> nix::Result<Vec<String>> {
        // struct ethtool_gstrings: command, set, length, names.
        let mut data = vec![0u64; (12 + count * NAME).div_ceil(8)];
        data[0] = u64::from_ne_bytes(two(ETHTOOL_GSTRINGS, ETH_SS_STATS));
        data[1] = u64::from_ne_bytes(two(u32::try_from(count).unwrap_or(0), 0));
        self.command(interface, &mut data)?;
        let bytes: Vec<u8> = data.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let names = bytes.get(12..12 + count * NAME).unwrap_or_default().chunks(NAME);
        Ok(names
            .map(|name| {
                let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
                String::from_utf8_lossy(name.get(..end).unwrap_or_default()).trim().to_owned()
            })
            .collect())
    }

    /// Fills `data` with the head and the values, which follow it.
    fn values(&self, interface: &str, count: usize, data: &mut [u64]) -> nix::Result<()> {
        // struct ethtool_stats: command, length, values.
        if let Some(head) = data.first_mut() {
            *head = u64::from_ne_bytes(two(ETHTOOL_GSTATS, u32::try_from(count).unwrap_or(0)));
        }
        self.command(interface, data)
    }
}

/// Two numbers as they stand one after the other in memory.
fn two(first: u32, second: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&first.to_ne_bytes());
    bytes[4..].copy_from_slice(&second.to_ne_bytes());
    bytes
}

#[derive(Debug)]
struct Interface {
    name: String,
    object: ObjectId,
    count: usize,
    /// Position among the values, and the metric.
    wanted: Vec<(usize, u16)>,
    data: Vec<u64>,
}

/// The collector.
#[derive(Debug)]
pub(super) struct Ethtool {
    control: Control,
    sys: PathBuf,
    interfaces: Option<Vec<Interface>>,
}

impl Ethtool {
    pub(super) fn open(places: &Places) -> Result<Ethtool, Lack> {
        let control = Control::open().map_err(|e| Lack(format!("ethtool's ioctl: {e}")))?;
        let some = nic::interfaces(&places.sys, None)
            .iter()
            .any(|name| control.statistics(name).is_ok_and(|count| count > 0));
        if !some {
            return Err(Lack("no interface that is up has statistics of its driver".to_owned()));
        }
        Ok(Ethtool { control, sys: places.sys.clone(), interfaces: None })
    }

    fn look(&self, rows: &mut Rows) -> Vec<Interface> {
        let mut found = Vec::new();
        for name in nic::interfaces(&self.sys, None) {
            let Ok(count) = self.control.statistics(&name) else { continue };
            let Ok(names) = self.control.names(&name, count) else { continue };
            let mut wanted = Vec::new();
            for (position, statistic) in names.iter().enumerate().filter(|(_, name)| is_wanted(name)) {
                if wanted.len() >= MOST {
                    rows.lack(
                        "",
                        &format!("{name} has more than {MOST} such statistics: the others are left out"),
                    );
                    break;
                }
                wanted.extend(rows.named(statistic, "", Kind::Counter64).map(|metric| (position, metric)));
            }
            if let (false, Some(object)) = (wanted.is_empty(), rows.object(&name)) {
                found.push(Interface { name, object, count, wanted, data: vec![0; count + 1] });
            }
        }
        found
    }
}

impl Collector for Ethtool {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        let mut interfaces = match self.interfaces.take() {
            Some(known) => known,
            None => self.look(rows),
        };
        let mut changed = false;
        for interface in &mut interfaces {
            // Queues that are added or taken away change the statistics.
            let count = self.control.statistics(&interface.name);
            if count != Ok(interface.count)
                || self.control.values(&interface.name, interface.count, &mut interface.data).is_err()
            {
                changed = true;
                continue;
            }
            for (position, metric) in &interface.wanted {
                if let Some(count) = interface.data.get(position + 1) {
                    rows.put(interface.object, *metric, value(*count));
                }
            }
        }
        self.interfaces = (!changed).then_some(interfaces);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Control, Ethtool, is_wanted};
    use crate::Nanos;
    use crate::collect::{Collector, Places};
    use crate::rows::tests::sampled;

    #[test]
    fn statistics_that_tell_of_congestion_are_wanted() {
        for name in [
            "rx_pause_ctrl_phy",
            "rx_prio3_pause_duration",
            "rx_discards_phy",
            "rx_out_of_buffer",
            "rx_ecn_mark",
            "np_cnp_sent",
            "rx_queue_0_drops",
            "tx_timeout",
        ] {
            assert!(is_wanted(name), "{name}");
        }
        for name in ["rx_packets", "rx3_bytes", "tx_queue_0_kicks", "rx_queue_0_xdp_drops"] {
            assert!(!is_wanted(name), "{name}");
        }
    }

    #[test]
    fn a_driver_s_statistics_are_read() {
        let mut ethtool = match Ethtool::open(&Places::default()) {
            Ok(ethtool) => ethtool,
            Err(lack) => return println!("skipped: {lack}"),
        };
        let found = sampled(&ABOUT, |rows| {
            ethtool.sample(Nanos(1), rows).unwrap();
            ethtool.sample(Nanos(2), rows).unwrap();
        });
        assert!(found.keys().all(|(_, metric)| is_wanted(metric)), "{found:?}");
        let interfaces = ethtool.interfaces.as_ref().unwrap();
        for interface in interfaces {
            let names = ethtool.control.names(&interface.name, interface.count).unwrap();
            assert!(names.iter().all(|name| !name.is_empty() && name.is_ascii()), "{names:?}");
        }
        println!("{} statistics of {} interfaces", found.len(), interfaces.len());
    }

    #[test]
    fn an_interface_that_is_not_there_is_an_error() {
        let control = Control::open().unwrap();
        assert!(control.statistics("nosuch0").is_err());
        assert!(control.pause("a_name_that_is_much_too_long_for_an_interface").is_err());
        assert!(control.single("lo", 0xffff_ffff).is_err());
    }
}
