//! A client of SPDK's JSON-RPC over its UNIX socket, one connection a call, and which of a process's sockets is one. It
//! knows no method's meaning but that every SPDK lists its own.

use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use serde_json::{Value, json};

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may take a socket of which nothing says that it is SPDK's.
const ASKED: Duration = Duration::from_secs(1);
/// What every SPDK can be asked that has an RPC: the names of its methods.
const METHODS: &str = "rpc_get_methods";
/// The longest answer that is read, in bytes.
const LONGEST: u64 = 64 << 20;
/// The longest path of a socket (`sockaddr_un`).
const LONGEST_PATH: usize = 107;
/// Where SPDK's applications listen that are not told otherwise.
const DEFAULT: &str = "/var/tmp/spdk.sock";

/// Why a call came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum RpcError {
    /// The socket could not be reached.
    #[error("{}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system says.
        source: Error,
    },
    /// No answer, or not a whole one.
    #[error("{}: no answer to {method}: {why}", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What was called.
        method: String,
        /// What came instead.
        why: String,
    },
    /// The socket is something else.
    #[error("{}: {why}", path.display())]
    Other {
        /// The socket.
        path: PathBuf,
        /// What it is, as far as it can be told.
        why: String,
    },
    /// The process said no.
    #[error("{}: {method} is refused: {message}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// What was called.
        method: String,
        /// Its reason.
        message: String,
    },
}

/// A socket on which an SPDK process can be called: JSON-RPC over a UNIX socket (SPDK's `doc/jsonrpc.md`).
#[derive(Clone, Debug)]
pub struct Rpc {
    path: PathBuf,
}

/// A stream that gives up at a deadline.
struct Limited {
    stream: UnixStream,
    within: Duration,
    deadline: Instant,
}

impl Read for Limited {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(timed_out(self.within));
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(into).map_err(|error| in_time(error, self.within))
    }
}

fn timed_out(within: Duration) -> Error {
    Error::new(ErrorKind::TimedOut, format!("nothing came within {} s", within.as_secs()))
}

/// What a socket says whose time is up.
fn in_time(error: Error, within: Duration) -> Error {
    if error.kind() == ErrorKind::WouldBlock { timed_out(within) } else { error }
}

/// Connects, but does not wait for ever where nobody takes the connections that wait.
fn open(path: &Path, within: Duration) -> std::io::Result<UnixStream> {
    if path.as_os_str().len() > LONGEST_PATH {
        let why = format!("the path is longer than the {LONGEST_PATH} bytes that a socket's may have");
        return Err(Error::new(ErrorKind::InvalidInput, why));
    }
    let socket: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let most = TimeVal::new(within.as_secs().cast_signed(), 0);
    setsockopt(&socket, sockopt::SendTimeout, &most)?;
    connect(std::os::fd::AsRawFd::as_raw_fd(&socket), &UnixAddr::new(path)?)
        .map_err(|errno| in_time(errno.into(), within))?;
    // The socket's time for sending stays as it is.
    Ok(UnixStream::from(socket))
}

impl Rpc {
    /// Nothing is connected yet.
    pub fn new(path: &Path) -> Rpc {
        Rpc { path: path.to_owned() }
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Calls a method and returns its result.
    ///
    /// # Errors
    /// As [`Rpc::call_within`].
    pub fn call(&self, method: &str, params: Option<Value>) -> Result<Value, RpcError> {
        self.call_within(TIMEOUT, method, params)
    }

    /// The same, with how long the answer may take.
    ///
    /// # Errors
    /// Nobody listens there, nothing that is an answer comes in time, or the process refuses the call.
    pub fn call_within(
        &self,
        within: Duration,
        method: &str,
        params: Option<Value>,
    ) -> Result<Value, RpcError> {
        let stream = self.open(TIMEOUT.min(within))?;
        self.call_on(stream, method, params, within)
    }

    fn open(&self, within: Duration) -> Result<UnixStream, RpcError> {
        open(&self.path, within).map_err(|source| RpcError::Connect { path: self.path.clone(), source })
    }

    fn call_on(
        &self,
        mut stream: UnixStream,
        method: &str,
        params: Option<Value>,
        within: Duration,
    ) -> Result<Value, RpcError> {
        let answer =
            |why: String| RpcError::Answer { path: self.path.clone(), method: method.to_owned(), why };
        let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
        if let (Some(request), Some(params)) = (request.as_object_mut(), params) {
            request.insert("params".to_owned(), params);
        }
        stream
            .write_all(request.to_string().as_bytes())
            .map_err(|error| answer(in_time(error, within).to_string()))?;
        let limited = Limited { stream, within, deadline: Instant::now() + within };
        let reader = std::io::BufReader::new(limited.take(LONGEST));
        // Nothing frames an answer: it is over where its JSON is.
        let mut values = serde_json::Deserializer::from_reader(reader).into_iter::<Value>();
        let mut value = match values.next() {
            Some(Ok(value)) => value,
            // The parser's own error says where it was besides.
            Some(Err(error)) if error.io_error_kind() == Some(ErrorKind::TimedOut) => {
                return Err(answer(timed_out(within).to_string()));
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

    /// Fails unless SPDK's RPC of this process is behind the socket. Others' sockets are asked nothing.
    fn is_of(&self, pid: u32, within: Duration) -> Result<(), RpcError> {
        let stream = self.open(within)?;
        let other = |why: String| RpcError::Other { path: self.path.clone(), why };
        // Who listens (unix(7), SO_PEERCRED); 0 where that process has no number here.
        let owner = getsockopt(&stream, sockopt::PeerCredentials).map_or(0, |owner| owner.pid());
        if owner != 0 && owner != pid.cast_signed() {
            return Err(other(format!("it is that of process {owner}")));
        }
        let methods = self.call_on(stream, METHODS, None, within)?;
        let has = |methods: &Vec<Value>| methods.iter().any(|name| name.as_str() == Some(METHODS));
        match methods.as_array().is_some_and(has) {
            true => Ok(()),
            false => Err(other(format!("it answers to {METHODS}, but not as SPDK does"))),
        }
    }
}

/// What is known of a process's socket: the process's number and when it started, the socket, and why it is no RPC.
type Known = (u32, u64, PathBuf, Option<String>);

/// The sockets that were asked, so that none is asked twice: one that says nothing takes its time each time.
static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// The first RPC of a process that is taken; where none is, what was tried and what came of it.
///
/// Of sockets that nobody named, those that are not SPDK's RPC are passed over.
pub(super) fn first<T>(
    pid: u32,
    named: Option<&Path>,
    mut take: impl FnMut(&Rpc) -> Result<T, String>,
) -> Result<T, String> {
    if let Some(path) = named {
        return take(&Rpc::new(path));
    }
    let since = super::note::started(pid).unwrap_or(0);
    let mut tried = Vec::new();
    for (path, within) in candidates(pid) {
        let rpc = Rpc::new(&path);
        let taken = match known(pid, since, &rpc, within) {
            None => take(&rpc),
            Some(why) => Err(why),
        };
        match taken {
            Ok(taken) => return Ok(taken),
            Err(why) => tried.push(why),
        }
    }
    if tried.is_empty() {
        tried.push("no RPC socket was found".to_owned());
    }
    Err(tried.join("; "))
}

/// Why a socket is not the process's RPC, if it is not.
fn known(pid: u32, since: u64, rpc: &Rpc, within: Duration) -> Option<String> {
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |(of, began, path, _): &&Known| (*of, *began, path) == (pid, since, &rpc.path);
    if let Some((.., why)) = known().iter().find(is_it) {
        return why.clone();
    }
    let why = rpc.is_of(pid, within).err().map(|error| error.to_string());
    // One that its command line names may only be slow.
    if why.is_none() || within < TIMEOUT {
        known().push((pid, since, rpc.path.clone(), why.clone()));
    }
    why
}

/// The sockets on which a process may listen for calls, the likeliest first: what its command line names, the
/// default, and every socket that it listens on; and how long each may take to say that it is one.
fn candidates(pid: u32) -> Vec<(PathBuf, Duration)> {
    let read = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let mut inside = Vec::new();
    let line = String::from_utf8_lossy(&read("cmdline")).into_owned();
    inside.extend(named(line.split('\0')).map(|path| (PathBuf::from(path), TIMEOUT)));
    inside.push((PathBuf::from(DEFAULT), ASKED));
    let listening = listening(pid, &String::from_utf8_lossy(&read("net/unix")));
    inside.extend(listening.into_iter().map(|path| (path, ASKED)));
    let mut paths: Vec<(PathBuf, Duration)> = Vec::new();
    for (path, within) in inside {
        // As the process sees it: inside its own root, and from its own folder.
        let seen = match path.strip_prefix("/") {
            Ok(inside) => Path::new(&format!("/proc/{pid}/root")).join(inside),
            Err(_) => Path::new(&format!("/proc/{pid}/cwd")).join(&path),
        };
        if seen.exists() && !paths.iter().any(|(path, _)| *path == seen) {
            paths.push((seen, within));
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
            let (kind, inode) = (fields.next()?, fields.nth(1)?);
            let path = fields.next()?;
            // Calls go over a stream (SOCK_STREAM).
            (flags & 0x1_0000 != 0
                && kind == "0001"
                && inodes.iter().any(|own| own == inode)
                && path.starts_with('/'))
            .then(|| PathBuf::from(path))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{ASKED, Rpc, RpcError, candidates, listening, named};
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
                // Who asked may be gone.
                let _ = stream.write_all(piece);
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
        assert!(found.iter().any(|(candidate, _)| candidate.ends_with("own.sock")), "{found:?}");
    }

    #[test]
    fn only_a_stream_that_is_listened_on_can_be_called() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("own.sock")).unwrap();
        let link =
            std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&listener)));
        let link = link.unwrap().to_string_lossy().into_owned();
        let inode = link.trim_start_matches("socket:[").trim_end_matches(']');
        let line = |flags: &str, kind: &str| {
            format!("0000000000000000: 00000002 00000000 {flags} {kind} 01 {inode} /tmp/own.sock\n")
        };
        let found = |table: &str| listening(std::process::id(), table).len();
        assert_eq!(found(&line("00010000", "0001")), 1);
        // A connection, and packets.
        assert_eq!(found(&(line("00000000", "0001") + &line("00010000", "0005"))), 0);
    }

    #[test]
    fn a_socket_of_another_process_or_of_something_else_is_no_rpc_of_a_process() {
        let own = std::process::id();
        let methods = r#"{"jsonrpc":"2.0","id":1,"result":["x","rpc_get_methods"]}"#;
        let (_folder, rpc, server) = answering(methods);
        rpc.is_of(own, ASKED).unwrap();
        assert!(server.join().unwrap().contains("rpc_get_methods"));
        let (_folder, rpc, server) = answering(methods);
        let error = rpc.is_of(own + 1, ASKED).unwrap_err().to_string();
        assert!(error.contains(&format!("that of process {own}")), "{error}");
        // Nothing is said to it.
        assert_eq!(server.join().unwrap(), "");
        for answer in [r#"{"id":1,"result":[]}"#, r#"{"id":1,"result":{"rpc_get_methods":1}}"#] {
            let (_folder, rpc, _server) = answering(answer);
            let error = rpc.is_of(own, ASKED).unwrap_err().to_string();
            assert!(error.contains("not as SPDK does"), "{error}");
        }
    }
}
