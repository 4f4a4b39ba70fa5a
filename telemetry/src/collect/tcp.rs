//! What the kernel knows of each NVMe/TCP connection, by sock_diag(7). It sees no packets and no events: `retransmits`
//! sees those, of the ports that are found here.
//!
//! A dump of all connections walks the kernel's whole table, which has hundreds of thousands of places on a large
//! machine however few connections there are. So connections are looked for only now and then, by a dump that the
//! kernel filters by port; in between each known one is asked for by its own address, which is one look into the
//! table.

use super::{Again, Collector, Lack, Places, Ports, Subject, attribute, names};
use crate::about::metrics;
use crate::text::{Name, value};
use crate::{About, Nanos, ObjectId, Rows};
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

metrics! {
    Rtt = "rtt", "us", Gauge, "smoothed round-trip time";
    Rttvar = "rttvar", "us", Gauge, "its mean deviation";
    MinRtt = "min_rtt", "us", Gauge, "least round-trip time of late";
    Rto = "rto", "us", Gauge, "retransmission timeout";
    Cwnd = "cwnd", "segments", Gauge, "congestion window";
    Ssthresh = "ssthresh", "segments", Gauge, "slow start threshold; 2147483647 while there was no loss";
    Mss = "mss", "bytes", Gauge, "largest segment sent";
    Pmtu = "pmtu", "bytes", Gauge, "MTU of the path";
    State = "ca_state", "", Gauge, "congestion state: 0 open, 1 disorder, 2 cwnd reduced, 3 recovery, 4 loss";
    Unacked = "unacked", "segments", Gauge, "sent and not acknowledged";
    Lost = "lost", "segments", Gauge, "taken for lost at the moment";
    RetransOut = "retransmitting", "segments", Gauge, "sent again and not acknowledged";
    Backoff = "backoff", "", Gauge, "times that the retransmission timer was doubled";
    TotalRetrans = "retransmitted", "segments", Counter32, "sent again";
    BytesRetrans = "bytes_retransmitted", "bytes", Counter64, "sent again";
    BytesSent = "bytes_sent", "bytes", Counter64, "sent, with those sent again";
    BytesAcked = "bytes_acked", "bytes", Counter64, "acknowledged by the peer";
    BytesReceived = "bytes_received", "bytes", Counter64, "received in order";
    SegsOut = "segments_out", "segments", Counter32, "sent";
    SegsIn = "segments_in", "segments", Counter32, "received";
    DeliveryRate = "delivery_rate", "bytes/s", Gauge, "rate at which data was delivered of late";
    PacingRate = "pacing_rate", "bytes/s", Gauge, "rate at which it is sent";
    Busy = "busy_time", "us", Counter64, "time with data to send";
    RwndLimited = "receive_window_limited", "us", Counter64, "of it, time in which the peer's window was full";
    SndbufLimited = "send_buffer_limited", "us", Counter64, "of it, time in which the send buffer was full";
    ReceiveQueue = "receive_queue", "bytes", Gauge, "received and not yet read by the driver or the process";
    SendQueue = "send_queue", "bytes", Gauge, "written and not yet acknowledged";
    NotSent = "not_sent", "bytes", Gauge, "written and not yet sent";
    DeliveredCe = "delivered_ce", "segments", Counter32, "delivered with a congestion mark (ECN CE)";
    DsackDups = "dsack_duplicates", "segments", Counter32, "sent again needlessly";
    Reordering = "reorder_seen", "", Counter32, "times that reordering was seen";
    OutOfOrder = "out_of_order", "segments", Counter32, "received out of order";
    SendWindow = "send_window", "bytes", Gauge, "the peer's receive window";
    SinceSent = "since_sent", "ms", Gauge, "since data was last sent";
    SinceReceived = "since_received", "ms", Gauge, "since data was last received";
}

pub(super) const ABOUT: About = About {
    name: "tcp",
    source: "sock_diag netlink, inet_diag with TCP_INFO",
    object: "the connection as `LOCAL>REMOTE`, each ADDRESS:PORT",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "what the kernel is too old for (send window before 5.4, out-of-order before 5.4); connections that lasted less than 2 s may be missed",
};

/// Between looks for connections that came, ns.
const LOOK: u64 = 2_000_000_000;
/// More connections than this are not sampled.
const CONNECTIONS: usize = 4096;
/// Asked for at once, so that the answers fit into a socket's buffer.
const AT_ONCE: usize = 64;
/// More ports than this are not filtered by the kernel.
const FILTERED: usize = 64;

/// `include/uapi/linux/sock_diag.h`, `inet_diag.h` and `netlink.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_INFO: u16 = 2;
const INET_DIAG_REQ_BYTECODE: u16 = 1;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Of `struct nlmsghdr`, `struct inet_diag_req_v2` and `struct inet_diag_msg`.
const HEADER: usize = 16;
const REQUEST: usize = 56;
const MESSAGE: usize = 72;
/// Of `struct inet_diag_sockid`, and where it stands in `inet_diag_msg`.
const ID: usize = 48;
const MESSAGE_ID: usize = 4;
/// `TCP_ESTABLISHED`, `TCP_FIN_WAIT1`, `TCP_FIN_WAIT2`, `TCP_CLOSE_WAIT`; and `TCP_LISTEN`
/// (`include/net/tcp_states.h`).
const CONNECTED: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8;
const LISTEN: u32 = 1 << 10;
/// `INET_DIAG_BC_S_EQ`, `INET_DIAG_BC_D_EQ` and `INET_DIAG_BC_JMP`.
const LOCAL_IS: u8 = 11;
const REMOTE_IS: u8 = 12;
const JUMP: u8 = 1;

/// Whose connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    /// Those to or from these ports of this machine.
    local: BTreeSet<u16>,
    /// Those to these ports of others.
    remote: BTreeSet<u16>,
    /// Where a process is recorded: its sockets. A connection to a port that it listens on is one of its own, too.
    sockets: Option<BTreeSet<u32>>,
}

impl Wanted {
    fn has(&self, socket: &Socket<'_>) -> bool {
        let (local, remote) = (socket.port(0), socket.port(2));
        match &self.sockets {
            Some(sockets) => sockets.contains(&socket.inode()) || self.local.contains(&local),
            None => self.local.contains(&local) || self.remote.contains(&remote),
        }
    }
}

#[derive(Debug)]
struct Connection {
    family: u8,
    id: [u8; ID],
    object: ObjectId,
}

/// The collector.
#[derive(Debug)]
pub(super) struct Tcp {
    kernel: OwnedFd,
    places: Places,
    subject: Subject,
    connections: Vec<Connection>,
    look_again: Again,
    buffer: Vec<u8>,
    request: Vec<u8>,
    /// The kernel refused the filter.
    unfiltered: bool,
    /// The ports of the connections, for those who look for nothing themselves.
    ports: Arc<Mutex<Ports>>,
}

impl Tcp {
    pub(super) fn open(places: &Places, subject: &Subject, ports: &Arc<Mutex<Ports>>) -> Result<Tcp, Lack> {
        let kernel = match subject.pid {
            None => open_socket().map_err(|e| refused(&e))?,
            Some(pid) => in_namespace_of(&places.proc, pid)?,
        };
        Ok(Tcp {
            kernel,
            places: places.clone(),
            subject: subject.clone(),
            connections: Vec::new(),
            look_again: Again::each(LOOK),
            buffer: vec![0; 1 << 16],
            request: Vec::new(),
            unfiltered: false,
            ports: Arc::clone(ports),
        })
    }

    /// Whose connections to look for, as things are now.
    fn wanted(&mut self) -> Result<Wanted, Lack> {
        let mut wanted = Wanted::default();
        wanted.local.extend(&self.subject.ports);
        wanted.remote.extend(&self.subject.ports);
        let Some(pid) = self.subject.pid else {
            wanted.remote.extend(host_ports(&self.places.sys));
            wanted.local.extend(target_ports(&self.places.sys));
            return Ok(wanted);
        };
        let own = sockets(&self.places.proc.join(format!("{pid}/fd")));
        let mut listening = BTreeSet::new();
        dump(&self.kernel, &mut self.buffer, LISTEN, &[], &mut |socket| {
            if own.contains(&socket.inode()) {
                listening.insert(socket.port(0));
            }
        })
        .map_err(|e| refused(&e))?;
        wanted.local.extend(listening);
        wanted.sockets = Some(own);
        Ok(wanted)
    }

    fn look(&mut self, rows: &mut Rows) -> Result<(), Lack> {
        let wanted = self.wanted()?;
        self.connections.clear();
        let filter = if self.unfiltered { Vec::new() } else { filter(&wanted) };
        let (connections, mut more) = (&mut self.connections, false);
        let mut ports = Ports { local: wanted.local.clone(), remote: wanted.remote.clone() };
        let mut take = |socket: &Socket<'_>| {
            if !wanted.has(socket) {
                return;
            }
            if connections.len() >= CONNECTIONS {
                more = true;
                return;
            }
            if wanted.sockets.is_some() && !wanted.local.contains(&socket.port(0)) {
                // One of its own, and those that it will have to the same place.
                ports.local.insert(socket.port(0));
                ports.remote.insert(socket.port(2));
            }
            let name = socket.name();
            if let (Some(object), Some(id)) = (rows.object(name.as_str()), socket.id()) {
                connections.push(Connection { family: socket.family(), id, object });
            }
        };
        let dumped = match dump(&self.kernel, &mut self.buffer, CONNECTED, &filter, &mut take) {
            Err(Errno::EINVAL) if !filter.is_empty() => {
                self.unfiltered = true;
                dump(&self.kernel, &mut self.buffer, CONNECTED, &[], &mut take)
            }
            dumped => dumped,
        };
        dumped.map_err(|e| refused(&e))?;
        *self.ports.lock().unwrap_or_else(PoisonError::into_inner) = ports;
        if more {
            rows.lack("", &format!("more than {CONNECTIONS} connections: the others are left out"));
        }
        Ok(())
    }

    /// Asks for each known connection.
    fn ask(&mut self, rows: &mut Rows) -> nix::Result<()> {
        for (first, some) in (0u32..).step_by(AT_ONCE).zip(self.connections.chunks(AT_ONCE)) {
            self.request.clear();
            for (number, connection) in (first..).zip(some) {
                request(
                    &mut self.request,
                    connection.family,
                    CONNECTED,
                    NLM_F_REQUEST,
                    number,
                    &connection.id,
                );
            }
            send(self.kernel.as_raw_fd(), &self.request, MsgFlags::empty())?;
            let mut answers = 0;
            while answers < some.len() {
                // All answers were made while the requests were sent.
                let n = match recv(self.kernel.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT) {
                    Ok(n) => n,
                    Err(Errno::EAGAIN | Errno::ENOBUFS) => break,
                    Err(Errno::EINTR) => continue,
                    Err(error) => return Err(error),
                };
                for message in Messages(self.buffer.get(..n).unwrap_or_default()) {
                    answers += 1;
                    let Message { kind: SOCK_DIAG_BY_FAMILY, sequence, body } = message else { continue };
                    let known = sequence.checked_sub(first).and_then(|n| some.get(n as usize));
                    if let (Some(connection), Some(socket)) = (known, Socket::of(body)) {
                        socket.rows(connection.object, rows);
                    }
                }
            }
        }
        Ok(())
    }
}

impl Collector for Tcp {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, at: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        if self.look_again.is_due(at) {
            self.look(rows)?;
        }
        self.ask(rows).map_err(|e| refused(&e))
    }
}

fn refused(error: &Errno) -> Lack {
    Lack(format!("sock_diag: {error} (the kernel needs CONFIG_INET_DIAG and CONFIG_INET_TCP_DIAG)"))
}

fn open_socket() -> nix::Result<OwnedFd> {
    let kernel = socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkSockDiag,
    )?;
    connect(kernel.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    setsockopt(&kernel, sockopt::ReceiveTimeout, &TimeVal::new(1, 0))?;
    Ok(kernel)
}

/// A socket that sees the connections that a process sees. A thread of its own goes into the process's network
/// namespace, and ends.
fn in_namespace_of(proc: &Path, pid: u32) -> Result<OwnedFd, Lack> {
    let path = proc.join(format!("{pid}/ns/net"));
    let theirs = std::fs::File::open(&path).map_err(|e| Lack::of(&path, &e))?;
    let same = |path: &Path| std::fs::read_link(path).ok();
    let stay = same(&path) == same(&proc.join("thread-self/ns/net"));
    let opened = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                if !stay {
                    setns(&theirs, CloneFlags::CLONE_NEWNET)?;
                }
                open_socket()
            })
            .join()
    });
    match opened {
        Ok(Ok(kernel)) => Ok(kernel),
        Ok(Err(error)) => Err(refused(&error)),
        Err(_) => Err(Lack("sock_diag: could not be opened".to_owned())),
    }
}

/// The ports of the targets that the kernel's host is connected to by TCP.
fn host_ports(sys: &Path) -> Vec<u16> {
    let folder = sys.join("class/nvme");
    names(&folder)
        .iter()
        .filter(|name| attribute(&folder.join(name).join("transport")) == "tcp")
        .filter_map(|name| {
            let address = attribute(&folder.join(name).join("address"));
            address.split(',').find_map(|part| part.strip_prefix("trsvcid="))?.trim().parse().ok()
        })
        .collect()
}

/// The ports that the kernel's target listens on.
fn target_ports(sys: &Path) -> Vec<u16> {
    let folder = sys.join("kernel/config/nvmet/ports");
    names(&folder)
        .iter()
        .filter(|name| attribute(&folder.join(name).join("addr_trtype")) == "tcp")
        .filter_map(|name| attribute(&folder.join(name).join("addr_trsvcid")).parse().ok())
        .collect()
}

/// The inodes of a process's sockets.
fn sockets(folder: &Path) -> BTreeSet<u32> {
    let inode = |path: PathBuf| {
        let target = std::fs::read_link(path).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| inode(entry.path()))
        .collect()
}

/// The kernel's own filter: a chain of comparisons, each of which jumps to the end where it holds
/// (`net/ipv4/inet_diag.c`). Empty where it would filter nothing or be too long.
fn filter(wanted: &Wanted) -> Vec<u8> {
    let mut tests: Vec<(u8, u16)> = wanted.local.iter().map(|port| (LOCAL_IS, *port)).collect();
    if wanted.sockets.is_some() {
        // Its connections to others have ports that are not known beforehand.
        return Vec::new();
    }
    tests.extend(wanted.remote.iter().map(|port| (REMOTE_IS, *port)));
    if tests.len() > FILTERED {
        return Vec::new();
    }
    let length = tests.len() * 12;
    let mut code = Vec::with_capacity(length);
    let mut op = |code_: u8, yes: u8, no: usize| {
        code.push(code_);
        code.push(yes);
        code.extend(u16::try_from(no).unwrap_or(0).to_ne_bytes());
    };
    for (number, (test, port)) in tests.iter().enumerate() {
        let left = length - number * 12;
        let is_last = left == 12;
        // The comparison takes two operations, and skips the jump where it does not hold; past the end is "no".
        op(*test, 8, if is_last { 16 } else { 12 });
        op(0, 0, usize::from(*port));
        op(JUMP, 4, left - 8);
    }
    code
}

fn request(into: &mut Vec<u8>, family: u8, states: u32, flags: u16, sequence: u32, id: &[u8; ID]) {
    let length = u32::try_from(HEADER + REQUEST).unwrap_or(0);
    into.extend(length.to_ne_bytes());
    into.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    into.extend(flags.to_ne_bytes());
    into.extend(sequence.to_ne_bytes());
    into.extend([0; 4]);
    into.extend([family, libc::IPPROTO_TCP as u8, 1 << (INET_DIAG_INFO - 1), 0]);
    into.extend(states.to_ne_bytes());
    into.extend(id);
}

/// Hands over every TCP socket in one of the states that the filter takes.
fn dump(
    kernel: &OwnedFd,
    buffer: &mut [u8],
    states: u32,
    filter: &[u8],
    take: &mut dyn FnMut(&Socket<'_>),
) -> nix::Result<()> {
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut bytes = Vec::new();
        let flags = NLM_F_REQUEST | NLM_F_DUMP;
        request(&mut bytes, u8::try_from(family).unwrap_or(0), states, flags, 0, &[0; ID]);
        if !filter.is_empty() {
            bytes.extend(u16::try_from(filter.len() + 4).unwrap_or(0).to_ne_bytes());
            bytes.extend(INET_DIAG_REQ_BYTECODE.to_ne_bytes());
            bytes.extend(filter);
            let length = u32::try_from(bytes.len()).unwrap_or(0).to_ne_bytes();
            if let Some(place) = bytes.get_mut(..4) {
                place.copy_from_slice(&length);
            }
        }
        send(kernel.as_raw_fd(), &bytes, MsgFlags::empty())?;
        'dump: loop {
            let n = match recv(kernel.as_raw_fd(), buffer, MsgFlags::empty()) {
                Err(Errno::EINTR) => continue,
                received => received?,
            };
            if n == 0 {
                return Err(Errno::EIO);
            }
            for message in Messages(buffer.get(..n).unwrap_or_default()) {
                match message.kind {
                    DONE => break 'dump,
                    ERROR => {
                        let code = u32_at(message.body, 0).unwrap_or(0).cast_signed();
                        return Err(Errno::from_raw(code.saturating_neg()));
                    }
                    SOCK_DIAG_BY_FAMILY => {
                        if let Some(socket) = Socket::of(message.body) {
                            take(&socket);
                        }
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(())
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// One netlink message.
#[derive(Debug)]
struct Message<'a> {
    kind: u16,
    sequence: u32,
    body: &'a [u8],
}

/// The messages of one datagram. It ends at one that is cut.
#[derive(Debug)]
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let (length, kind) = (u32_at(self.0, 0)? as usize, u16_at(self.0, 4)?);
        let sequence = u32_at(self.0, 8)?;
        let body = self.0.get(HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message { kind, sequence, body })
    }
}

/// `struct inet_diag_msg` and what `struct tcp_info` (`include/uapi/linux/tcp.h`) follows it, which newer kernels make
/// longer.
#[derive(Debug)]
struct Socket<'a> {
    message: &'a [u8],
    info: &'a [u8],
}

impl<'a> Socket<'a> {
    fn of(body: &'a [u8]) -> Option<Socket<'a>> {
        let message = body.get(..MESSAGE)?;
        let mut attributes = body.get(MESSAGE..)?;
        let mut info: &[u8] = &[];
        while let (Some(length), Some(kind)) = (u16_at(attributes, 0), u16_at(attributes, 2)) {
            let Some(attribute) = attributes.get(4..usize::from(length)) else { break };
            if kind == INET_DIAG_INFO {
                info = attribute;
            }
            attributes = attributes.get(usize::from(length).next_multiple_of(4)..).unwrap_or_default();
        }
        Some(Socket { message, info })
    }

    fn family(&self) -> u8 {
        self.message.first().copied().unwrap_or(0)
    }

    fn id(&self) -> Option<[u8; ID]> {
        self.message.get(MESSAGE_ID..MESSAGE_ID + ID)?.try_into().ok()
    }

    fn inode(&self) -> u32 {
        u32_at(self.message, 68).unwrap_or(0)
    }

    /// The local port (at 0) or the remote one (at 2), which are big-endian.
    fn port(&self, at: usize) -> u16 {
        u16_at(self.message, MESSAGE_ID + at).map_or(0, u16::from_be)
    }

    fn end(&self, port: usize, address: usize) -> SocketAddr {
        let bytes = |length: usize| self.message.get(MESSAGE_ID + address..MESSAGE_ID + address + length);
        let ip = if i32::from(self.family()) == libc::AF_INET6 {
            let octets: [u8; 16] = bytes(16).and_then(|b| b.try_into().ok()).unwrap_or_default();
            Ipv6Addr::from(octets).to_canonical()
        } else {
            let octets: [u8; 4] = bytes(4).and_then(|b| b.try_into().ok()).unwrap_or_default();
            IpAddr::from(Ipv4Addr::from(octets))
        };
        SocketAddr::new(ip, self.port(port))
    }

    fn name(&self) -> Name {
        Name::of(format_args!("{}>{}", self.end(0, 4), self.end(2, 20)))
    }

    fn rows(&self, object: ObjectId, rows: &mut Rows) {
        for (metric, at) in [(M::ReceiveQueue, 56), (M::SendQueue, 60)] {
            if let Some(n) = u32_at(self.message, at) {
                rows.put(object, metric, f64::from(n));
            }
        }
        for (metric, at) in [(M::State, 1usize), (M::Backoff, 4)] {
            if let Some(n) = self.info.get(at) {
                rows.put(object, metric, f64::from(*n));
            }
        }
        for (metric, at) in INFO_32 {
            if let Some(n) = u32_at(self.info, at) {
                rows.put(object, metric, f64::from(n));
            }
        }
        // "No sample yet" is all ones.
        if let Some(n) = u32_at(self.info, 148).filter(|n| *n != u32::MAX) {
            rows.put(object, M::MinRtt, f64::from(n));
        }
        for (metric, at) in INFO_64 {
            if let Some(n) = u64_at(self.info, at).filter(|n| *n != u64::MAX) {
                rows.put(object, metric, value(n));
            }
        }
    }
}

/// Where `struct tcp_info` has what.
const INFO_32: [(M, usize); 21] = [
    (M::Rto, 8),
    (M::Mss, 16),
    (M::Unacked, 24),
    (M::Lost, 32),
    (M::RetransOut, 36),
    (M::SinceSent, 44),
    (M::SinceReceived, 52),
    (M::Pmtu, 60),
    (M::Rtt, 68),
    (M::Rttvar, 72),
    (M::Ssthresh, 76),
    (M::Cwnd, 80),
    (M::TotalRetrans, 100),
    (M::SegsOut, 136),
    (M::SegsIn, 140),
    (M::NotSent, 144),
    (M::DeliveredCe, 196),
    (M::DsackDups, 216),
    (M::Reordering, 220),
    (M::OutOfOrder, 224),
    (M::SendWindow, 228),
];
const INFO_64: [(M, usize); 9] = [
    (M::PacingRate, 104),
    (M::BytesAcked, 120),
    (M::BytesReceived, 128),
    (M::DeliveryRate, 160),
    (M::Busy, 168),
    (M::RwndLimited, 176),
    (M::SndbufLimited, 184),
    (M::BytesSent, 200),
    (M::BytesRetrans, 208),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::fixture::put;
    use crate::rows::tests::{key, values};
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn pair(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        (near, far)
    }

    fn sample(tcp: &mut Tcp, rows: &mut Rows, at: u64) -> std::collections::BTreeMap<(String, String), f64> {
        rows.begin(Nanos(at));
        tcp.sample(Nanos(at), rows).unwrap();
        rows.finish(Nanos(0));
        values(rows)
    }

    #[test]
    fn a_connection_of_a_port_is_found_by_the_kernel_s_filter_and_others_are_not() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (mut near, mut far) = pair(address);
            let (other, _other) = pair(address);
            let port = far.local_addr().unwrap().port();
            let subject = Subject { ports: vec![port, 1, 2], ..Subject::default() };
            let mut tcp = Tcp::open(&Places::default(), &subject, &Arc::default()).unwrap();
            let mut rows = Rows::new(&ABOUT);
            let before = sample(&mut tcp, &mut rows, 1);
            assert!(!tcp.unfiltered);
            near.write_all(&[1; 100_000]).unwrap();
            far.read_exact(&mut [0; 100_000]).unwrap();
            far.write_all(&[1; 1]).unwrap();
            near.read_exact(&mut [0; 1]).unwrap();
            let after = sample(&mut tcp, &mut rows, 2);
            let name = |a: &TcpStream| format!("{}>{}", a.local_addr().unwrap(), a.peer_addr().unwrap());
            let objects: BTreeSet<&String> = after.keys().map(|(object, _)| object).collect();
            // Both ends are on this machine.
            assert_eq!(objects, BTreeSet::from([&name(&near), &name(&far)]), "and not {}", name(&other));
            let grown = |metric: &str| after[&key(&name(&near), metric)] - before[&key(&name(&near), metric)];
            assert!((100_000.0..101_000.0).contains(&grown("bytes_acked")), "{after:?}");
            assert_eq!(grown("bytes_received"), 1.0);
            assert!(after[&key(&name(&near), "rtt")] > 0.0);
            assert!(after[&key(&name(&near), "mss")] >= 536.0);
            assert!(after[&key(&name(&near), "pmtu")] > 1_280.0);
            // A closed one goes.
            drop((near, far));
            let gone = sample(&mut tcp, &mut rows, 3 + LOOK);
            assert!(!gone.keys().any(|(_, metric)| metric == "rtt"), "{gone:?}");
        }
    }

    #[test]
    fn what_waits_in_the_queues_is_told() {
        let (mut near, far) = pair("127.0.0.1:0");
        let subject = Subject { ports: vec![far.local_addr().unwrap().port()], ..Subject::default() };
        near.write_all(&[1; 5_000]).unwrap();
        let mut tcp = Tcp::open(&Places::default(), &subject, &Arc::default()).unwrap();
        let found = sample(&mut tcp, &mut Rows::new(&ABOUT), 1);
        let waiting: f64 = found.iter().filter(|(k, _)| k.1 == "receive_queue").map(|(_, v)| v).sum();
        assert_eq!(waiting, 5_000.0);
    }

    #[test]
    fn a_process_s_own_connections_are_found_without_ports() {
        let (near, _far) = pair("127.0.0.1:0");
        let subject = Subject { pid: Some(std::process::id()), ..Subject::default() };
        let mut tcp = Tcp::open(&Places::default(), &subject, &Arc::default()).unwrap();
        let found = sample(&mut tcp, &mut Rows::new(&ABOUT), 1);
        let ports = tcp.ports.lock().unwrap().clone();
        let (from, to) = (near.local_addr().unwrap().port(), near.peer_addr().unwrap().port());
        assert!(ports.local.contains(&from) && ports.remote.contains(&to), "{ports:?}");
        let name = format!("{}>{}", near.local_addr().unwrap(), near.peer_addr().unwrap());
        assert!(found.contains_key(&key(&name, "rtt")), "{found:?}");
        let gone = Subject { pid: Some(u32::MAX), ..Subject::default() };
        assert!(Tcp::open(&Places::default(), &gone, &Arc::default()).is_err());
    }

    #[test]
    fn the_kernel_s_host_and_target_name_their_ports() {
        let root = tempfile::tempdir().unwrap();
        let sys = |path: &str, text: &str| put(root.path(), path, text);
        sys("class/nvme/nvme0/transport", "pcie\n");
        sys("class/nvme/nvme0/address", "0000:01:00.0\n");
        sys("class/nvme/nvme1/transport", "tcp\n");
        sys("class/nvme/nvme1/address", "traddr=10.0.0.2,trsvcid=4420,src_addr=10.0.0.1\n");
        sys("class/nvme/nvme2/transport", "tcp\n");
        sys("class/nvme/nvme2/address", "traddr=10.0.0.2,trsvcid=none\n");
        sys("kernel/config/nvmet/ports/1/addr_trtype", "tcp\n");
        sys("kernel/config/nvmet/ports/1/addr_trsvcid", "8009\n");
        sys("kernel/config/nvmet/ports/2/addr_trtype", "rdma\n");
        sys("kernel/config/nvmet/ports/2/addr_trsvcid", "4420\n");
        assert_eq!(host_ports(root.path()), [4420]);
        assert_eq!(target_ports(root.path()), [8009]);
    }

    #[test]
    fn no_metric_is_left_out_and_positions_are_within_the_structure() {
        let mut all: BTreeSet<u16> = INFO_32.iter().chain(&INFO_64).map(|(m, _)| u16::from(*m)).collect();
        all.extend([M::ReceiveQueue, M::SendQueue, M::State, M::Backoff, M::MinRtt].map(u16::from));
        assert_eq!(all.len(), METRICS.len());
    }

    proptest! {
        #[test]
        fn any_answer_is_taken_or_left(bytes in proptest::collection::vec(any::<u8>(), 0..600), kind in 0u16..30, length in 0u32..700) {
            let mut message = bytes;
            if message.len() >= HEADER {
                message[..4].copy_from_slice(&length.to_ne_bytes());
                message[4..6].copy_from_slice(&kind.to_ne_bytes());
            }
            let mut rows = Rows::new(&ABOUT);
            rows.begin(Nanos(1));
            for message in Messages(&message) {
                if let Some(socket) = Socket::of(message.body) {
                    let object = rows.object(socket.name().as_str()).unwrap();
                    socket.rows(object, &mut rows);
                    let _ = (socket.id(), socket.inode());
                }
            }
            rows.finish(Nanos(0));
        }

        /// A structure that an older kernel cuts gives the same values, or none.
        #[test]
        fn a_shorter_structure_has_fewer_values(info in proptest::collection::vec(any::<u8>(), 248), cut in 0usize..248) {
            let of = |info: &[u8]| {
                let socket = Socket { message: &[0; MESSAGE], info };
                crate::rows::tests::sampled(&ABOUT, |rows| {
                    let object = rows.object("x").unwrap();
                    socket.rows(object, rows);
                })
            };
            let whole = of(&info);
            for (key, value) in of(&info[..cut]) {
                prop_assert_eq!(Some(&value), whole.get(&key));
            }
        }
    }
}
