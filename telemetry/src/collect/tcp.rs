//! What the kernel knows of each NVMe/TCP connection, by sock_diag(7). It sees no packets and no events: `retransmits`
//! sees those, of the ports that are found here.
//!
//! A dump of all connections walks the kernel's whole table, which has hundreds of thousands of places on a large
//! machine however few connections there are. So connections are looked for only now and then, by a dump that the
//! kernel filters by port; in between each known one is asked for by its own address, which is one look into the
//! table.

use super::{Again, Collector, Lack, Places, Ports, Subject, attribute, names};
use crate::about::metrics;
use crate::sock_diag::{
    self, CONNECTED, ID, LISTEN, Message, Messages, NLM_F_REQUEST, SOCK_DIAG_BY_FAMILY, Socket, refused,
    request, u32_at, u64_at,
};
use crate::text::value;
use crate::{About, Nanos, ObjectId, Rows};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
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
            None => sock_diag::open().map_err(|e| refused(&e))?,
            Some(pid) => sock_diag::open_in_namespace_of(&places.proc, pid)?,
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
        let own = sock_diag::sockets_of(&self.places.proc, pid);
        let mut listening = BTreeSet::new();
        sock_diag::dump(&self.kernel, &mut self.buffer, LISTEN, &[], &mut |socket| {
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
        let dumped = match sock_diag::dump(&self.kernel, &mut self.buffer, CONNECTED, &filter, &mut take) {
            Err(Errno::EINVAL) if !filter.is_empty() => {
                self.unfiltered = true;
                sock_diag::dump(&self.kernel, &mut self.buffer, CONNECTED, &[], &mut take)
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
                        put(&socket, connection.object, rows);
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

/// What is known of a connection.
fn put(socket: &Socket<'_>, object: ObjectId, rows: &mut Rows) {
    for (metric, at) in [(M::ReceiveQueue, 56), (M::SendQueue, 60)] {
        if let Some(n) = u32_at(socket.message, at) {
            rows.put(object, metric, f64::from(n));
        }
    }
    for (metric, at) in [(M::State, 1usize), (M::Backoff, 4)] {
        if let Some(n) = socket.info.get(at) {
            rows.put(object, metric, f64::from(*n));
        }
    }
    for (metric, at) in INFO_32 {
        if let Some(n) = u32_at(socket.info, at) {
            rows.put(object, metric, f64::from(n));
        }
    }
    // "No sample yet" is all ones.
    if let Some(n) = u32_at(socket.info, 148).filter(|n| *n != u32::MAX) {
        rows.put(object, M::MinRtt, f64::from(n));
    }
    for (metric, at) in INFO_64 {
        if let Some(n) = u64_at(socket.info, at).filter(|n| *n != u64::MAX) {
            rows.put(object, metric, value(n));
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
    use crate::collect::fixture;
    use crate::rows::tests::{key, values};
    use crate::sock_diag::{HEADER, MESSAGE};
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
        let sys = |path: &str, text: &str| fixture::put(root.path(), path, text);
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
                    put(&socket, object, &mut rows);
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
                    put(&socket, object, rows);
                })
            };
            let whole = of(&info);
            for (key, value) in of(&info[..cut]) {
                prop_assert_eq!(Some(&value), whole.get(&key));
            }
        }
    }
}
