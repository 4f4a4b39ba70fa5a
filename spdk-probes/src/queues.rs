//! Turns the programs' messages about queues and events into what a sink is told: which queue a command's key
//! stands for, its names and addresses, and when it went.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use run_format::{Endpoint, Event, Nanos, Queue, QueueId, Side, Sink, Transport};

use crate::messages;

/// A queue that the programs told of.
#[derive(Clone, Copy, Debug)]
struct Known {
    id: QueueId,
    went: bool,
}

/// What goes with a queue's end: its entries in the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dead {
    pub(crate) queue: u64,
    pub(crate) qpair: u64,
    pub(crate) socket: u64,
}

/// All queues of one source. Keys are given out by the programs, counting from 1.
#[derive(Debug)]
pub(crate) struct Queues {
    side: Side,
    pid: u32,
    known: Vec<Option<Known>>,
    homes: Vec<Dead>,
    /// The queues known when the programs were taken away last: a queue that is told of anew may be one of them.
    before: Vec<(QueueId, Queue)>,
    /// Those told of since.
    since: Vec<(QueueId, Queue)>,
    subsystem_states: SubsystemStates,
    /// The process's connections when recording began, by descriptor: a short-lived one may be gone when its
    /// queue's message is read.
    at_first: HashMap<i32, (Endpoint, Endpoint)>,
}

/// Numbers of SPDK's subsystem states, where the build tells them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SubsystemStates {
    pub(crate) inactive: Option<u32>,
    pub(crate) active: Option<u32>,
    pub(crate) paused: Option<u32>,
}

/// The highest key that is believed; more connections no recording sees.
const MOST_QUEUES: u64 = 1 << 24;

impl Queues {
    pub(crate) fn new(side: Side, pid: u32, subsystem_states: SubsystemStates) -> Queues {
        Queues {
            side,
            pid,
            known: Vec::new(),
            homes: Vec::new(),
            before: Vec::new(),
            since: Vec::new(),
            subsystem_states,
            at_first: connections(pid).into_iter().collect(),
        }
    }

    fn slot(&mut self, key: u64) -> Option<&mut Option<Known>> {
        if key == 0 || key > MOST_QUEUES {
            return None;
        }
        let index = key as usize;
        if index >= self.known.len() {
            self.known.resize(index + 1, None);
        }
        self.known.get_mut(index)
    }

    /// The queue of a command. One whose message was lost is given a number all the same; the programs send
    /// the message again with the next command.
    pub(crate) fn of(&mut self, key: u64, sink: &mut dyn Sink) -> QueueId {
        if let Some(Some(known)) = self.known.get(key as usize) {
            return known.id;
        }
        let id = sink.queue(Queue::default());
        if let Some(slot) = self.slot(key) {
            *slot = Some(Known { id, went: false });
        }
        id
    }

    /// A queue's message.
    pub(crate) fn came(&mut self, message: &messages::spdk_queue_message, sink: &mut dyn Sink) {
        let queue = self.describe(message);
        let home = Dead { queue: message.queue, qpair: message.qpair, socket: message.socket };
        let id = match self.known.get(message.queue as usize).copied().flatten() {
            Some(known) => {
                sink.queue_is(known.id, queue.clone());
                known.id
            }
            None => {
                let before = self.before.iter().position(|(_, known)| is_same(known, &queue));
                let before = before.map(|at| self.before.swap_remove(at).0);
                let id = before.unwrap_or_else(|| sink.queue(queue.clone()));
                let Some(slot) = self.slot(message.queue) else { return };
                *slot = Some(Known { id, went: false });
                id
            }
        };
        self.since.retain(|(known, _)| *known != id);
        self.since.push((id, queue));
        self.homes.push(home);
    }

    /// The programs were taken away, and will tell of every queue again.
    pub(crate) fn suspend(&mut self) {
        self.homes.clear();
        // Queues without commands since stay known.
        self.before.append(&mut self.since);
    }

    /// A queue's end; returns what its end leaves behind in the maps.
    pub(crate) fn went(
        &mut self,
        message: &messages::spdk_went_message,
        sink: &mut dyn Sink,
    ) -> Option<Dead> {
        if let Some(Some(known)) = self.slot(message.queue)
            && !known.went
        {
            known.went = true;
            let id = known.id;
            self.since.retain(|(since, _)| *since != id);
            sink.queue_went(id, Nanos(message.at));
        }
        let at = self.homes.iter().position(|home| home.queue == message.queue)?;
        Some(self.homes.swap_remove(at))
    }

    /// Something else.
    pub(crate) fn event(&mut self, message: &messages::spdk_event_message, sink: &mut dyn Sink) {
        let name = text(&message.on);
        let (what, on) = match message.what {
            messages::SPDK_EVENT_DISCONNECT => {
                let known = self.known.get(message.queue as usize).copied().flatten();
                ("qpair disconnect", known.map_or(name, |known| format!("queue {}", known.id.0)))
            }
            messages::SPDK_EVENT_CC => match cc_change(message.before, message.after) {
                Some(what) => (what, name),
                None => return,
            },
            messages::SPDK_EVENT_DESTRUCT => {
                ("controller removed", format!("{name} cntlid {}", message.before))
            }
            messages::SPDK_EVENT_SUBSYSTEM => {
                let states = self.subsystem_states;
                let after = Some(message.after);
                let what = if after == states.paused {
                    "subsystem pause"
                } else if after == states.active {
                    "subsystem resume"
                } else if after == states.inactive {
                    "subsystem stop"
                } else {
                    "subsystem change"
                };
                (what, name)
            }
            messages::SPDK_EVENT_RESET => ("controller reset", name),
            _ => return,
        };
        sink.event(Event { at_ns: Nanos(message.at), what: what.to_owned(), on });
    }

    fn describe(&self, message: &messages::spdk_queue_message) -> Queue {
        let endpoint = |address: &[std::ffi::c_char], port: u16| {
            let address = text(address);
            (port != 0 && !address.is_empty()).then(|| Endpoint { address: plain_address(&address), port })
        };
        let mut host = endpoint(&message.host_address, message.host_port);
        let mut target = endpoint(&message.target_address, message.target_port);
        if host.is_none() || target.is_none() {
            // Builds that do not keep the peer, and hosts, which never do: the kernel knows the connection.
            let there = connection(self.pid, message.fd);
            // A descriptor may be another connection's by now, but not that of one that existed at first.
            let at_first = || self.at_first.get(&message.fd).filter(|_| message.existed != 0).cloned();
            if let Some((local, remote)) = there.or_else(at_first) {
                let (near, far) = match self.side {
                    Side::Host => (&mut host, &mut target),
                    Side::Target => (&mut target, &mut host),
                };
                near.get_or_insert(local);
                far.get_or_insert(remote);
            }
        }
        let served_by = text(&message.served_by);
        Queue {
            subsystem_nqn: text(&message.subsystem_nqn),
            host_nqn: text(&message.host_nqn),
            cntlid: message.cntlid,
            qid: message.qid,
            transport: Transport::Tcp,
            host,
            target,
            device: None,
            served_by: (!served_by.is_empty()).then_some(served_by),
            came: Nanos(message.came),
            existed: message.existed != 0,
            went: None,
        }
    }
}

/// Whether a queue that the programs tell of anew is one they told of before: same ends and same identity. When it
/// came is not told again.
fn is_same(known: &Queue, told: &Queue) -> bool {
    let come = Queue { came: known.came, existed: known.existed, ..told.clone() };
    *known == come
}

/// What a write of CC means (NVMe base specification, section 3.1.4.5: EN is bit 0, SHN bits 14 and 15).
fn cc_change(before: u32, after: u32) -> Option<&'static str> {
    let enabled = |cc: u32| cc & 1 != 0;
    let shutdown = |cc: u32| cc >> 14 & 3;
    if enabled(before) && !enabled(after) {
        Some("controller reset")
    } else if shutdown(before) == 0 && shutdown(after) != 0 {
        Some("controller shutdown")
    } else if !enabled(before) && enabled(after) {
        Some("controller enable")
    } else {
        None
    }
}

/// A C string as text.
fn text(characters: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> =
        characters.iter().take_while(|character| **character != 0).map(|c| c.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// An IPv4 address that is written as an IPv6 one is an IPv4 one.
pub(crate) fn plain_address(address: &str) -> String {
    match address.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().to_string(),
        Err(_) => address.to_owned(),
    }
}

/// The inode of the socket behind a file descriptor of a process.
fn socket_inode(pid: u32, fd: i32) -> Option<String> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
    Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
}

/// The TCP connections of a process's network, as the kernel prints them.
fn tables(pid: u32) -> String {
    let table = |name| fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    ["tcp", "tcp6"].map(table).concat()
}

/// The two ends (own, peer's) of the connection behind a file descriptor of a process.
fn connection(pid: u32, fd: i32) -> Option<(Endpoint, Endpoint)> {
    let inode = socket_inode(pid, fd)?;
    tables(pid).lines().filter_map(row).find(|(found, ..)| *found == inode).map(|(_, own, peer)| (own, peer))
}

/// The same for all descriptors of a process.
fn connections(pid: u32) -> Vec<(i32, (Endpoint, Endpoint))> {
    let tables = tables(pid);
    let ends: HashMap<&str, (Endpoint, Endpoint)> =
        tables.lines().filter_map(row).map(|(inode, own, peer)| (inode, (own, peer))).collect();
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    descriptors
        .filter_map(|entry| {
            let fd = entry.ok()?.file_name().to_str()?.parse().ok()?;
            Some((fd, ends.get(socket_inode(pid, fd)?.as_str())?.clone()))
        })
        .collect()
}

/// A line of /proc/net/tcp or tcp6: inode, own end, peer's (proc(5); the layout is that of net/ipv4/tcp_ipv4.c).
fn row(line: &str) -> Option<(&str, Endpoint, Endpoint)> {
    let mut fields = line.split_whitespace();
    let (own, peer) = (fields.nth(1)?, fields.next()?);
    Some((fields.nth(6)?, end(own)?, end(peer)?))
}

fn end(field: &str) -> Option<Endpoint> {
    let (address, port) = field.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // Each 32-bit word is in the machine's byte order.
    let words: Vec<u32> = (0..address.len() / 8)
        .map(|word| u32::from_str_radix(address.get(word * 8..word * 8 + 8)?, 16).ok())
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let address = match bytes.len() {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => return None,
    };
    Some(Endpoint { address: address.to_canonical().to_string(), port })
}

#[cfg(test)]
mod tests {
    use super::{cc_change, connection, connections, end, row, text};
    use proptest::prelude::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn the_ends_of_a_connection_are_found_by_its_descriptor() {
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(local) else {
                println!("skipped: no {local} here");
                continue;
            };
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (near, far) = connection(std::process::id(), stream.as_raw_fd()).unwrap();
            let all = connections(std::process::id());
            assert!(all.contains(&(stream.as_raw_fd(), (near.clone(), far.clone()))), "{all:?}");
            assert_eq!(near.port, stream.local_addr().unwrap().port());
            assert_eq!(near.address, stream.local_addr().unwrap().ip().to_string());
            assert_eq!(far.port, listener.local_addr().unwrap().port());
            assert_eq!(far.address, listener.local_addr().unwrap().ip().to_string());
        }
        assert_eq!(connection(std::process::id(), -1), None);
    }

    #[test]
    fn a_mapped_address_is_written_as_ipv4() {
        let field = "0000000000000000FFFF00000100007F:1144";
        if cfg!(target_endian = "little") {
            assert_eq!(end(field).unwrap().address, "127.0.0.1");
        }
        assert_eq!(end(field).unwrap().port, 0x1144);
    }

    #[test]
    fn writes_of_cc_are_told_apart() {
        assert_eq!(cc_change(0x0046_0001, 0x0046_0000), Some("controller reset"));
        assert_eq!(cc_change(0x0046_0001, 0x0046_4001), Some("controller shutdown"));
        assert_eq!(cc_change(0, 0x0046_0001), Some("controller enable"));
        assert_eq!(cc_change(0x0046_0001, 0x0046_0001), None);
    }

    proptest! {
        #[test]
        fn any_line_is_a_row_or_none(line in ".{0,200}") {
            let _ = row(&line);
        }

        #[test]
        fn any_field_is_an_end_or_none(field in "[0-9A-Fa-f:]{0,60}") {
            let _ = end(&field);
        }

        #[test]
        fn any_characters_are_text(characters: Vec<i8>) {
            let n = characters.iter().position(|c| *c == 0).unwrap_or(characters.len());
            prop_assert!(text(&characters.iter().map(|c| *c as std::ffi::c_char).collect::<Vec<_>>()).len() >= n / 3);
        }
    }
}
