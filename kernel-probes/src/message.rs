//! The messages of the kernel's programs as a run keeps them. It reads bytes and knows no maps.

use run_format::bpf::raw::fab_command;
use run_format::{Endpoint, Event, Nanos, Queue, Side, Transport};
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// `bpf/kernel.h`, as bindgen makes it.
#[allow(
    missing_docs,
    missing_debug_implementations,
    non_camel_case_types,
    dead_code,
    unreachable_pub,
    clippy::all
)]
pub(crate) mod raw {
    include!(concat!(env!("OUT_DIR"), "/kernel.rs"));
}

/// One message of the ring.
#[derive(Debug)]
pub(crate) enum Message {
    /// A command is over.
    Command(fab_command),
    /// A queue's identity, before its first command.
    Queue(Box<QueueMessage>),
    /// Something else happened.
    Event(EventMessage),
}

/// A connection of a queue.
#[derive(Debug)]
pub(crate) struct QueueMessage {
    /// `fab_command.queue` of its commands.
    pub(crate) key: u64,
    /// N of nvmeN on the host, the cntlid on the target.
    pub(crate) instance: i32,
    /// What a run keeps of it.
    pub(crate) queue: Queue,
}

/// A controller's or queue's change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventMessage {
    pub(crate) kind: EventKind,
    pub(crate) at: Nanos,
    /// N of nvmeN on the host, the cntlid on the target.
    pub(crate) instance: i32,
    /// 0 for the whole controller.
    pub(crate) qid: u16,
    /// The queue's key, where the programs know one; else 0.
    pub(crate) key: u64,
}

/// `enum kernel_event_kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    Resetting,
    Connecting,
    Live,
    Deleting,
    Dead,
    Connect,
    Timeout,
    QueueGone,
    Fatal,
    NamespaceEnabled,
    NamespaceDisabled,
}

impl Message {
    /// The message of a side's programs in these bytes; `None` when they are no message of the programs.
    pub(crate) fn parse(side: Side, bytes: &[u8]) -> Option<Message> {
        if let Some(command) = fab_command::parse(bytes) {
            return Some(Message::Command(command));
        }
        let kind = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        match kind {
            raw::KERNEL_MSG_QUEUE => {
                let message = read::<raw::kernel_queue>(bytes)?;
                Some(Message::Queue(Box::new(QueueMessage {
                    key: message.key,
                    instance: message.instance,
                    queue: queue(side, &message),
                })))
            }
            raw::KERNEL_MSG_EVENT => {
                let message = read::<raw::kernel_event>(bytes)?;
                let kind = match message.kind {
                    raw::KERNEL_EVENT_RESETTING => EventKind::Resetting,
                    raw::KERNEL_EVENT_CONNECTING => EventKind::Connecting,
                    raw::KERNEL_EVENT_LIVE => EventKind::Live,
                    raw::KERNEL_EVENT_DELETING => EventKind::Deleting,
                    raw::KERNEL_EVENT_DEAD => EventKind::Dead,
                    raw::KERNEL_EVENT_CONNECT => EventKind::Connect,
                    raw::KERNEL_EVENT_TIMEOUT => EventKind::Timeout,
                    raw::KERNEL_EVENT_QUEUE_GONE => EventKind::QueueGone,
                    raw::KERNEL_EVENT_FATAL => EventKind::Fatal,
                    raw::KERNEL_EVENT_NAMESPACE_ENABLED => EventKind::NamespaceEnabled,
                    raw::KERNEL_EVENT_NAMESPACE_DISABLED => EventKind::NamespaceDisabled,
                    _ => return None,
                };
                Some(Message::Event(EventMessage {
                    kind,
                    at: Nanos(message.at),
                    instance: message.instance,
                    qid: u16::try_from(message.qid).unwrap_or(u16::MAX),
                    key: message.key,
                }))
            }
            _ => None,
        }
    }
}

/// Plain data of bindgen's: integers and arrays of them, for which every bit pattern is valid.
trait Plain {}
impl Plain for raw::kernel_queue {}
impl Plain for raw::kernel_event {}

fn read<T: Plain>(bytes: &[u8]) -> Option<T> {
    // SAFETY: the length is checked, every bit pattern is a valid T, and the read needs no alignment.
    (bytes.len() >= size_of::<T>()).then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<T>()) })
}

fn queue(side: Side, message: &raw::kernel_queue) -> Queue {
    let end = |address: &[u8; 16], port| {
        address_text(message.family, address).map(|address| Endpoint { address, port })
    };
    let local = end(&message.local_address, message.local_port);
    let remote = end(&message.remote_address, message.remote_port);
    let (host, target) = match side {
        Side::Host => (local, remote),
        Side::Target => (remote, local),
    };
    Queue {
        subsystem_nqn: text(&message.subsystem_nqn),
        host_nqn: text(&message.host_nqn),
        cntlid: message.cntlid,
        qid: message.qid,
        transport: if u32::from(message.transport) == raw::KERNEL_RDMA {
            Transport::Rdma
        } else {
            Transport::Tcp
        },
        host,
        target,
        device: (side == Side::Host).then(|| format!("nvme{}", message.instance)),
        served_by: served_by(message.io_cpu),
        came: Nanos(message.came),
        existed: message.existed != 0,
        went: None,
    }
}

/// The driver gives a queue that is bound to no CPU a number beyond all CPUs (`WORK_CPU_UNBOUND`).
fn served_by(io_cpu: i32) -> Option<String> {
    let cpus = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_CONF).ok().flatten()?;
    (io_cpu >= 0 && i64::from(io_cpu) < cpus).then(|| format!("cpu {io_cpu}"))
}

/// An address of the kernel's; `None` where it is of no IP.
pub(crate) fn address(family: u16, bytes: &[u8; 16]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => Some(Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into()),
        // A socket of IPv6 may carry IPv4; the other side then knows it as IPv4.
        libc::AF_INET6 => Some(Ipv6Addr::from(*bytes).to_canonical()),
        _ => None,
    }
}

fn address_text(family: u16, bytes: &[u8; 16]) -> Option<String> {
    address(family, bytes).map(|address| address.to_string())
}

fn text(bytes: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|&c| c.to_ne_bytes()[0]).chain([0]).collect();
    CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

impl EventMessage {
    /// The event as a run keeps it; `None` for what its queues tell already.
    pub(crate) fn event(&self, side: Side) -> Option<Event> {
        let what = match self.kind {
            EventKind::Resetting => "controller reset",
            EventKind::Connecting => "controller connecting",
            EventKind::Live => "controller live",
            EventKind::Deleting => "controller removed",
            EventKind::Dead => "controller given up",
            EventKind::Timeout => "command timeout",
            EventKind::QueueGone => "queue disconnected",
            EventKind::Fatal => "controller fatal error",
            EventKind::NamespaceEnabled => "namespace enabled",
            EventKind::NamespaceDisabled => "namespace disabled",
            EventKind::Connect => return None,
        };
        let controller = match (side, self.kind) {
            (_, EventKind::NamespaceEnabled | EventKind::NamespaceDisabled) => {
                format!("namespace {}", self.instance)
            }
            (Side::Host, _) => format!("nvme{}", self.instance),
            (Side::Target, _) => format!("controller {}", self.instance),
        };
        let on = match self.qid {
            0 => controller,
            qid => format!("{controller} queue {qid}"),
        };
        Some(Event { at_ns: self.at, what: what.to_owned(), on })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of<T: Plain>(value: &T) -> Vec<u8> {
        // SAFETY: a reference to a T may be read as its bytes; bindgen's types here have no padding that
        // matters to the comparison.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }.to_vec()
    }

    fn sample() -> raw::kernel_queue {
        let mut message = read::<raw::kernel_queue>(&[0; size_of::<raw::kernel_queue>()]).unwrap();
        message.message = raw::KERNEL_MSG_QUEUE;
        message.key = 7;
        message.instance = 3;
        message.cntlid = 2;
        message.qid = 1;
        message.family = 2;
        message.local_port = 40000;
        message.remote_port = 4420;
        message.local_address[..4].copy_from_slice(&[10, 0, 2, 15]);
        message.remote_address[..4].copy_from_slice(&[10, 0, 2, 2]);
        for (to, from) in message.subsystem_nqn.iter_mut().zip(b"nqn.test:sub") {
            *to = std::ffi::c_char::from_ne_bytes([*from]);
        }
        message.host_nqn.fill(std::ffi::c_char::from_ne_bytes([b'h']));
        message.io_cpu = 0;
        message
    }

    #[test]
    fn a_queue_is_told_with_its_names_and_addresses() {
        let Some(Message::Queue(told)) = Message::parse(Side::Host, &bytes_of(&sample())) else {
            panic!("no queue")
        };
        assert_eq!((told.key, told.instance), (7, 3));
        let queue = told.queue;
        assert_eq!((queue.cntlid, queue.qid, queue.existed), (2, 1, false));
        assert_eq!(queue.subsystem_nqn, "nqn.test:sub");
        // A name that nothing ends is taken to its last byte.
        assert_eq!(queue.host_nqn, "h".repeat(224));
        assert_eq!(queue.host, Some(Endpoint { address: "10.0.2.15".to_owned(), port: 40000 }));
        assert_eq!(queue.target, Some(Endpoint { address: "10.0.2.2".to_owned(), port: 4420 }));
        assert_eq!(queue.device.as_deref(), Some("nvme3"));
        assert_eq!(queue.served_by.as_deref(), Some("cpu 0"));
    }

    #[test]
    fn the_targets_own_end_is_the_target() {
        let mut message = sample();
        message.transport = u8::try_from(raw::KERNEL_RDMA).unwrap();
        let Some(Message::Queue(told)) = Message::parse(Side::Target, &bytes_of(&message)) else {
            panic!("no queue")
        };
        assert_eq!(told.queue.host.map(|end| end.port), Some(4420));
        assert_eq!(told.queue.target.map(|end| end.port), Some(40000));
        assert_eq!((told.queue.device, told.queue.transport), (None, Transport::Rdma));
    }

    #[test]
    fn addresses_of_both_families_and_none() {
        let mut v6 = [0; 16];
        v6[15] = 1;
        assert_eq!(address_text(10, &v6).as_deref(), Some("::1"));
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];
        assert_eq!(address_text(10, &mapped).as_deref(), Some("192.0.2.1"));
        assert_eq!(address_text(0, &v6), None);
    }

    #[test]
    fn a_queue_bound_to_no_cpu_is_served_by_none() {
        assert_eq!(served_by(1 << 20), None);
        assert_eq!(served_by(-1), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(mut bytes in proptest::collection::vec(any::<u8>(), 0..700), kind in 0u32..20, target: bool) {
            if bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&kind.to_ne_bytes());
            }
            let side = if target { Side::Target } else { Side::Host };
            match Message::parse(side, &bytes) {
                None => {}
                Some(Message::Command(_)) => prop_assert_eq!(kind, 1),
                Some(Message::Queue(told)) => {
                    prop_assert_eq!(kind, raw::KERNEL_MSG_QUEUE);
                    prop_assert!(told.queue.subsystem_nqn.len() <= 3 * 224);
                }
                Some(Message::Event(event)) => {
                    prop_assert_eq!(kind, raw::KERNEL_MSG_EVENT);
                    prop_assert_eq!(event.event(side).is_none(), event.kind == EventKind::Connect);
                }
            }
        }
    }
}
