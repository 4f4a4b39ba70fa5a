//! A client of SPDK's JSON-RPC over its UNIX socket: one connection a call. It knows no method's meaning.

use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::TimeVal;
use serde_json::{Value, json};

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer that is read, in bytes.
const LONGEST: u64 = 64 << 20;
/// The longest path of a socket (`sockaddr_un`).
const LONGEST_PATH: usize = 107;
/// Where SPDK's applications listen that are not told otherwise.
const DEFAULT: &str = "/var/tmp/spdk.sock";

/// Why a call came to nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum RpcError {
    /// The socket could not be reached.
    #[error("{}: {source}", path.display())]
    Connect { path: PathBuf, source: Error },
    /// No answer, or not a whole one.
    #[error("{}: no answer to {method}: {why}", path.display())]
    Answer { path: PathBuf, method: String, why: String },
    /// The target said no.
    #[error("{}: {method} is refused: {message}", path.display())]
    Refused { path: PathBuf, method: String, message: String },
}

/// A socket to call.
#[derive(Clone, Debug)]
pub(super) struct Rpc {
    path: PathBuf,
}

/// A stream that gives up at a deadline.
struct Limited {
    stream: UnixStream,
    deadline: Instant,
}

impl Read for Limited {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(timed_out());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(into).map_err(in_time)
    }
}

fn timed_out() -> Error {
    Error::new(ErrorKind::TimedOut, format!("nothing came within {} s", TIMEOUT.as_secs()))
}

/// What a socket says whose time is up.
fn in_time(error: Error) -> Error {
    if error.kind() == ErrorKind::WouldBlock { timed_out() } else { error }
}

/// Connects, but does not wait for ever where nobody takes the connections that wait.
fn open(path: &Path) -> std::io::Result<UnixStream> {
    let socket: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let most = TimeVal::new(TIMEOUT.as_secs().cast_signed(), 0);
    setsockopt(&socket, sockopt::SendTimeout, &most)?;
    connect(std::os::fd::AsRawFd::as_raw_fd(&socket), &UnixAddr::new(path)?)
        .map_err(|errno| in_time(errno.into()))?;
    Ok(UnixStream::from(socket))
}

impl Rpc {
    pub(super) fn new(path: &Path) -> Rpc {
        Rpc { path: path.to_owned() }
    }

    /// Calls a method and returns its result.
    pub(super) fn call(&self, method: &str, params: Option<Value>) -> Result<Value, RpcError> {
        let connect = |source| RpcError::Connect { path: self.path.clone(), source };
        let answer =
            |why: String| RpcError::Answer { path: self.path.clone(), method: method.to_owned(), why };
        if self.path.as_os_str().len() > LONGEST_PATH {
            let why = format!("the path is longer than the {LONGEST_PATH} bytes that a socket's may have");
            return Err(connect(Error::new(ErrorKind::InvalidInput, why)));
        }
        // The socket's time for sending stays as it is.
        let mut stream = open(&self.path).map_err(connect)?;
        let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
        if let (Some(request), Some(params)) = (request.as_object_mut(), params) {
            request.insert("params".to_owned(), params);
        }
        stream
            .write_all(request.to_string().as_bytes())
            .map_err(|error| answer(in_time(error).to_string()))?;
        let limited = Limited { stream, deadline: Instant::now() + TIMEOUT };
        let reader = std::io::BufReader::new(limited.take(LONGEST));
        // Nothing frames an answer: it is over where its JSON is.
        let mut values = serde_json::Deserializer::from_reader(reader).into_iter::<Value>();
        let mut value = match values.next() {
            Some(Ok(value)) => value,
            // The parser's own error says where it was besides.
            Some(Err(error)) if error.io_error_kind() == Some(ErrorKind::TimedOut) => {
                return Err(answer(timed_out().to_string()));
            }
            Some(Err(error)) => return Err(answer(error.to_string())),
            None => return Err(answer("it closed the connection".to_owned())),
        };
        if let Some(error) = value.get("error") {
            let message =
                error.get("message").and_then(Value::as_str).map_or_else(|| error.to_string(), str::to_owned);
            return Err(RpcError::Refused { path: self.path.clone(), method: method.to_owned(), message });
        }
        match value.get_mut("result") {
            Some(result) => Ok(result.take()),
            None => Err(answer("it is no JSON-RPC".to_owned())),
        }
    }
}

/// The sockets on which a process may listen for calls, the likeliest first: what its command line names, the
/// default, and every socket that it listens on.
pub(super) fn candidates(pid: u32) -> Vec<PathBuf> {
    let read = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let mut inside = Vec::new();
    let line = String::from_utf8_lossy(&read("cmdline")).into_owned();
    inside.extend(named(line.split('\0')).map(PathBuf::from));
    inside.push(PathBuf::from(DEFAULT));
    inside.extend(listening(pid, &String::from_utf8_lossy(&read("net/unix"))));
    let mut paths = Vec::new();
    for path in inside {
        // As the process sees it: inside its own root, and from its own folder.
        let seen = match path.strip_prefix("/") {
            Ok(inside) => Path::new(&format!("/proc/{pid}/root")).join(inside),
            Err(_) => Path::new(&format!("/proc/{pid}/cwd")).join(&path),
        };
        if seen.exists() && !paths.contains(&seen) {
            paths.push(seen);
        }
    }
    paths
}

/// The socket that a command line names.
fn named<'a>(mut words: impl Iterator<Item = &'a str>) -> Option<String> {
    while let Some(word) = words.next() {
        let joined = word.strip_prefix("--rpc-socket=").or_else(|| {
            // Long options begin with two hyphens, so this is the short one with its value.
            word.strip_prefix("-r").filter(|value| !value.is_empty())
        });
        if let Some(value) = joined {
            return Some(value.to_owned());
        }
        if word == "-r" || word == "--rpc-socket" {
            return words.next().map(str::to_owned);
        }
    }
    None
}

/// The UNIX sockets that a process listens on (/proc/net/unix, unix(7)).
fn listening(pid: u32, table: &str) -> Vec<PathBuf> {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let inodes: Vec<String> = descriptors
        .filter_map(|entry| {
            let link = std::fs::read_link(entry.ok()?.path()).ok()?;
            Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    table
        .lines()
        .filter_map(|line| {
            // Num RefCount Protocol Flags Type St Inode Path; the flag of a listening one is SO_ACCEPTCON.
            let mut fields = line.split_whitespace();
            let flags = u32::from_str_radix(fields.nth(3)?, 16).ok()?;
            let inode = fields.nth(2)?;
            let path = fields.next()?;
            (flags & 0x1_0000 != 0 && inodes.iter().any(|own| own == inode) && path.starts_with('/'))
                .then(|| PathBuf::from(path))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Rpc, RpcError, candidates, named};
    use serde_json::json;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    /// A server that answers one call with these bytes, in pieces.
    fn answering(answer: &'static str) -> (tempfile::TempDir, Rpc, std::thread::JoinHandle<String>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rpc.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let n = stream.read(&mut request).unwrap();
            for piece in answer.as_bytes().chunks(7) {
                stream.write_all(piece).unwrap();
            }
            String::from_utf8_lossy(&request[..n]).into_owned()
        });
        (folder, Rpc::new(&path), server)
    }

    #[test]
    fn an_answer_is_over_where_its_json_is() {
        let (_folder, rpc, server) = answering(r#"{"jsonrpc":"2.0","id":1,"result":{"a":[1,2,3]}}"#);
        let result = rpc.call("trace_get_info", Some(json!({ "name": "bdev" }))).unwrap();
        assert_eq!(result, json!({ "a": [1, 2, 3] }));
        let request: serde_json::Value = serde_json::from_str(&server.join().unwrap()).unwrap();
        assert_eq!(request["method"], "trace_get_info");
        assert_eq!(request["params"], json!({ "name": "bdev" }));
    }

    #[test]
    fn what_goes_wrong_is_told() {
        let (_folder, rpc, _server) =
            answering(r#"{"id":1,"error":{"code":-32601,"message":"Method not found"}}"#);
        let error = rpc.call("x", None).unwrap_err();
        assert!(matches!(error, RpcError::Refused { .. }));
        assert!(error.to_string().contains("Method not found"), "{error}");
        for (answer, why) in
            [("", "closed"), ("{\"id\":1", "EOF"), ("[]", "no JSON-RPC"), ("<html>", "expected")]
        {
            let (_folder, rpc, _server) = answering(answer);
            let error = rpc.call("x", None).unwrap_err().to_string();
            assert!(error.contains(why), "{answer}: {error}");
        }
        // Values that are no objects have no result, whatever they are.
        for answer in ["7", "null", r#""text""#, r#"[{"result":1}]"#] {
            let (_folder, rpc, _server) = answering(answer);
            let error = rpc.call("x", None).unwrap_err().to_string();
            assert!(error.contains("no JSON-RPC"), "{answer}: {error}");
        }
        let nobody = Rpc::new(std::path::Path::new("/nonexistent/rpc.sock"));
        assert!(matches!(nobody.call("x", None), Err(RpcError::Connect { .. })));
        let long = Rpc::new(std::path::Path::new(&format!("/{}", "x".repeat(200))));
        assert!(long.call("x", None).unwrap_err().to_string().contains("longer"));
    }

    #[test]
    fn a_target_that_hangs_is_waited_for_no_longer_than_said() {
        // One takes the connection and says nothing, another half of an answer; a third takes no connection, and
        // as many wait there as may.
        let folder = tempfile::tempdir().unwrap();
        let bind = |name: &str| {
            let path = folder.path().join(name);
            (UnixListener::bind(&path).unwrap(), path)
        };
        let ((silent, silent_path), (half, half_path), (full, full_path)) =
            (bind("silent"), bind("half"), bind("full"));
        // SAFETY: a descriptor that stays open as long as `full`, and a number.
        let listens = unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&full), 0) };
        assert_eq!(listens, 0);
        let _waiting = std::os::unix::net::UnixStream::connect(&full_path).unwrap();
        let from = std::time::Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = half.accept().unwrap();
                stream.write_all(b"{\"jsonrpc\":").unwrap();
                // Held until the caller gives up.
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let calls: Vec<_> = [&silent_path, &half_path, &full_path]
                .map(|path| scope.spawn(|| Rpc::new(path).call("x", None).unwrap_err().to_string()))
                .into_iter()
                .collect();
            for call in calls {
                let error = call.join().unwrap();
                assert!(error.contains("nothing came within 5 s"), "{error}");
            }
        });
        let took = from.elapsed().as_secs_f64();
        assert!((4.5..12.0).contains(&took), "{took} s");
        drop(silent);
    }

    #[test]
    fn a_socket_that_may_not_be_used_is_told() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: becoming another user needs root");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rpc.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let call = std::thread::spawn(move || {
            // Of this thread alone, unlike what the C library does.
            // SAFETY: changes the identity of this thread, which ends here.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65_534, -1) };
            assert_eq!(done, 0);
            Rpc::new(&path).call("x", None).unwrap_err().to_string()
        });
        let error = call.join().unwrap();
        assert!(error.contains("rpc.sock: Permission denied"), "{error}");
    }

    #[test]
    fn a_command_line_names_its_socket() {
        let of = |line: &str| named(line.split(' '));
        assert_eq!(of("nvmf_tgt -m 0x1 -r /tmp/a.sock").as_deref(), Some("/tmp/a.sock"));
        assert_eq!(of("nvmf_tgt -r/tmp/a.sock").as_deref(), Some("/tmp/a.sock"));
        assert_eq!(of("nvmf_tgt --rpc-socket=/tmp/a.sock -m 1").as_deref(), Some("/tmp/a.sock"));
        assert_eq!(of("nvmf_tgt --rpc-socket /tmp/a.sock").as_deref(), Some("/tmp/a.sock"));
        assert_eq!(of("nvmf_tgt -m 0x1"), None);
        assert_eq!(of("nvmf_tgt -r"), None);
    }

    #[test]
    fn a_listening_socket_of_a_process_is_a_candidate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let found = candidates(std::process::id());
        assert!(found.iter().any(|candidate| candidate.ends_with("own.sock")), "{found:?}");
    }
}
