//! Whether a process uses the network as an initiator now: it has a TCP connection that it opened itself. It reads
//! `/proc`, and knows nothing of what is sent there.

use std::collections::BTreeSet;
use std::fs;

/// include/net/tcp_states.h
const ESTABLISHED: &str = "01";
const LISTEN: &str = "0A";

/// A line of `/proc/PID/net/tcp` or `tcp6`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Socket {
    local_port: u16,
    listens: bool,
    established: bool,
    inode: u64,
}

/// The sockets of a network namespace; a line that is none is passed over.
fn sockets(table: &str) -> impl Iterator<Item = Socket> {
    table.lines().filter_map(|line| {
        // sl local rem st tx:rx tr:when retrnsmt uid timeout inode
        let mut words = line.split_ascii_whitespace();
        let local = words.nth(1)?;
        let state = words.nth(1)?;
        let inode = words.nth(5)?.parse().ok()?;
        let local_port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        Some(Socket { local_port, listens: state == LISTEN, established: state == ESTABLISHED, inode })
    })
}

/// Whether one of these sockets is connected from a port on which none of them listens: who accepts a connection
/// has the listening port.
fn connects_out(own: &[Socket]) -> bool {
    let listening: BTreeSet<u16> =
        own.iter().filter(|socket| socket.listens).map(|socket| socket.local_port).collect();
    own.iter().any(|socket| socket.established && !listening.contains(&socket.local_port))
}

/// Whether a process has an established TCP connection that it opened. No where its files may not be looked at.
pub(crate) fn is_initiator(pid: u32) -> bool {
    let inodes: BTreeSet<u64> = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let to = fs::read_link(entry.ok()?.path()).ok()?;
            to.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
        })
        .collect();
    // Both are of the process's own network namespace.
    let own: Vec<Socket> = ["tcp", "tcp6"]
        .iter()
        .filter_map(|name| fs::read_to_string(format!("/proc/{pid}/net/{name}")).ok())
        .flat_map(|table| sockets(&table).collect::<Vec<_>>())
        .filter(|socket| inodes.contains(&socket.inode))
        .collect();
    connects_out(&own)
}

#[cfg(test)]
mod tests {
    use super::{Socket, connects_out, is_initiator, sockets};
    use proptest::prelude::*;
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::process::{Child, Command, Stdio};

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1144 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 51 1 0000000000000000 100 0 0 10 0
   1: 0100007F:1144 0100007F:D431 01 00000000:00000000 00:00000000 00000000     0        0 52 1 0000000000000000 20 4 30 10 -1
   2: 0100007F:D431 0100007F:1144 01 00000000:00000000 00:00000000 00000000     0        0 53 1 0000000000000000 20 4 30 10 -1
   3: 0100007F:D432 0100007F:1144 06 00000000:00000000 03:00000F8C 00000000     0        0 0 3 0000000000000000
";
    const TABLE_6: &str = "   0: 00000000000000000000000001000000:1144 \
        00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 54 1 0 100 0 0 10 0\n";

    #[test]
    fn the_table_of_sockets_is_read() {
        let all: Vec<Socket> = sockets(TABLE).chain(sockets(TABLE_6)).collect();
        let short: Vec<(u16, bool, bool, u64)> =
            all.iter().map(|s| (s.local_port, s.listens, s.established, s.inode)).collect();
        let expected = [
            (0x1144, true, false, 51),
            (0x1144, false, true, 52),
            (0xd431, false, true, 53),
            (0xd432, false, false, 0),
            (0x1144, true, false, 54),
        ];
        assert_eq!(short, expected);
        // A target and its host, of the same table.
        assert!(!connects_out(&all[..2]));
        assert!(connects_out(&all[2..3]));
        assert!(!connects_out(&all[3..]));
        assert!(!connects_out(&[]));
    }

    /// A process of its own with real sockets, killed at the end.
    struct Peer(Child);

    impl Peer {
        fn new(program: &str) -> (Peer, String) {
            let child = Command::new("python3").args(["-c", program]).stdout(Stdio::piped()).spawn();
            let mut peer = Peer(child.unwrap());
            let mut line = String::new();
            BufReader::new(peer.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
            (peer, line.trim().to_owned())
        }
    }

    impl Drop for Peer {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn who_accepts_is_no_initiator_and_who_connects_is() {
        if Command::new("python3").arg("--version").output().is_err() {
            println!("skipped: no python3 to hold sockets in another process");
            return;
        }
        for (family, address) in [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")] {
            let Ok(listener) = TcpListener::bind((address, 0)) else {
                println!("skipped: no {family} here");
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let (connects, _) = Peer::new(&format!(
                "import socket, time\ns = socket.create_connection(('{address}', {port}))\n\
                 print('there', flush=True)\ntime.sleep(60)"
            ));
            assert!(is_initiator(connects.0.id()), "{family}");

            let (accepts, port) = Peer::new(&format!(
                "import socket, time\ns = socket.socket(socket.{family})\ns.bind(('{address}', 0))\ns.listen()\n\
                 print(s.getsockname()[1], flush=True)\nc = s.accept()\ntime.sleep(60)"
            ));
            let _ours = std::net::TcpStream::connect((address, port.parse().unwrap())).unwrap();
            // Until it has accepted, the connection is in no table of its own.
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(!is_initiator(accepts.0.id()), "{family}");
        }
        assert!(!is_initiator(u32::MAX));
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in "[ 0-9A-F:\n]{0,200}|.{0,80}") {
            for socket in sockets(&text) {
                prop_assert!(!(socket.listens && socket.established));
            }
        }
    }
}
