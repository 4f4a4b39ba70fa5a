//! Asking the kernel for TCP connections by `sock_diag(7)`: the netlink messages there and back. What of the answers is
//! worth a row, and when to ask, is the collector's (`collect/tcp.rs`).

use crate::Lack;
use crate::text::Name;
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// `include/uapi/linux/sock_diag.h`, `inet_diag.h` and `netlink.h`.
pub(crate) const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_INFO: u16 = 2;
const INET_DIAG_REQ_BYTECODE: u16 = 1;
pub(crate) const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Of `struct nlmsghdr`, `struct inet_diag_req_v2` and `struct inet_diag_msg`.
pub(crate) const HEADER: usize = 16;
const REQUEST: usize = 56;
pub(crate) const MESSAGE: usize = 72;
/// Of `struct inet_diag_sockid`, and where it stands in `inet_diag_msg`.
pub(crate) const ID: usize = 48;
const MESSAGE_ID: usize = 4;
/// `TCP_ESTABLISHED`; with `TCP_FIN_WAIT1`, `TCP_FIN_WAIT2` and `TCP_CLOSE_WAIT`; and `TCP_LISTEN`
/// (`include/net/tcp_states.h`).
const ESTABLISHED: u32 = 1 << 1;
pub(crate) const CONNECTED: u32 = ESTABLISHED | 1 << 4 | 1 << 5 | 1 << 8;
pub(crate) const LISTEN: u32 = 1 << 10;

/// The bytes sent and received on each established TCP connection of a process, by its socket's inode: those that were
/// acknowledged by the peer, and those received in order.
///
/// # Errors
/// When the process is gone, or the kernel does not tell.
pub fn tcp_bytes(pid: u32) -> Result<BTreeMap<u64, u64>, Lack> {
    let proc = Path::new("/proc");
    let kernel = open_in_namespace_of(proc, pid)?;
    let own = sockets_of(proc, pid);
    let mut bytes = BTreeMap::new();
    let mut take = |socket: &Socket<'_>| {
        if own.contains(&socket.inode()) {
            bytes.extend(socket.bytes().map(|n| (u64::from(socket.inode()), n)));
        }
    };
    dump(&kernel, &mut vec![0; 1 << 16], ESTABLISHED, &[], &mut take).map_err(|e| refused(&e))?;
    Ok(bytes)
}

pub(crate) fn refused(error: &Errno) -> Lack {
    Lack(format!("sock_diag: {error} (the kernel needs CONFIG_INET_DIAG and CONFIG_INET_TCP_DIAG)"))
}

/// A socket to ask the kernel with.
pub(crate) fn open() -> nix::Result<OwnedFd> {
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
pub(crate) fn open_in_namespace_of(proc: &Path, pid: u32) -> Result<OwnedFd, Lack> {
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
                open()
            })
            .join()
    });
    match opened {
        Ok(Ok(kernel)) => Ok(kernel),
        Ok(Err(error)) => Err(refused(&error)),
        Err(_) => Err(Lack("sock_diag: could not be opened".to_owned())),
    }
}

/// The inodes of a process's sockets.
pub(crate) fn sockets_of(proc: &Path, pid: u32) -> BTreeSet<u32> {
    let inode = |path: PathBuf| {
        let target = std::fs::read_link(path).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    std::fs::read_dir(proc.join(format!("{pid}/fd")))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| inode(entry.path()))
        .collect()
}

/// Adds a request to a datagram: for the sockets in some states, or for the one of an address.
pub(crate) fn request(into: &mut Vec<u8>, family: u8, states: u32, flags: u16, sequence: u32, id: &[u8; ID]) {
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
pub(crate) fn dump(
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

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// One netlink message.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) sequence: u32,
    pub(crate) body: &'a [u8],
}

/// The messages of one datagram. It ends at one that is cut.
#[derive(Debug)]
pub(crate) struct Messages<'a>(pub(crate) &'a [u8]);

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
pub(crate) struct Socket<'a> {
    pub(crate) message: &'a [u8],
    pub(crate) info: &'a [u8],
}

impl<'a> Socket<'a> {
    pub(crate) fn of(body: &'a [u8]) -> Option<Socket<'a>> {
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

    pub(crate) fn family(&self) -> u8 {
        self.message.first().copied().unwrap_or(0)
    }

    pub(crate) fn id(&self) -> Option<[u8; ID]> {
        self.message.get(MESSAGE_ID..MESSAGE_ID + ID)?.try_into().ok()
    }

    pub(crate) fn inode(&self) -> u32 {
        u32_at(self.message, 68).unwrap_or(0)
    }

    /// The local port (at 0) or the remote one (at 2), which are big-endian.
    pub(crate) fn port(&self, at: usize) -> u16 {
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

    pub(crate) fn name(&self) -> Name {
        Name::of(format_args!("{}>{}", self.end(0, 4), self.end(2, 20)))
    }

    /// The bytes acknowledged and received; none where the kernel does not tell.
    fn bytes(&self) -> Option<u64> {
        u64_at(self.info, 120)?.checked_add(u64_at(self.info, 128)?)
    }
}
