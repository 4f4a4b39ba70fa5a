//! A client of SPDK's JSON-RPC that keeps its connection. It knows no method's meaning.

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::TimeVal;
use serde_json::{Value, json};
use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The longest answer that is read, in bytes.
const LONGEST: usize = 64 << 20;

/// Why a call came to nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum RpcError {
    /// The connection is of no use any more.
    #[error("{0}")]
    Broken(Error),
    /// The target said no.
    #[error("{method} is refused: {message}")]
    Refused { method: String, message: String },
}

/// A connection.
#[derive(Debug)]
pub(super) struct Rpc {
    stream: UnixStream,
    buffer: Vec<u8>,
    id: u64,
}

impl Rpc {
    pub(super) fn open(path: &Path) -> Result<Rpc, Error> {
        // Where nobody takes the connections that wait, connecting would wait for ever.
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&socket, sockopt::SendTimeout, &TimeVal::new(TIMEOUT.as_secs().cast_signed(), 0))?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(Rpc { stream: UnixStream::from(socket), buffer: Vec::new(), id: 0 })
    }

    /// Calls a method and returns its result.
    pub(super) fn call(&mut self, method: &str) -> Result<Value, RpcError> {
        self.id += 1;
        let request = json!({ "jsonrpc": "2.0", "id": self.id, "method": method }).to_string();
        self.stream.write_all(request.as_bytes()).map_err(RpcError::Broken)?;
        let mut answer = self.answer().map_err(RpcError::Broken)?;
        if let Some(error) = answer.get("error") {
            let message = error.get("message").and_then(Value::as_str).unwrap_or("for no reason told");
            return Err(RpcError::Refused { method: method.to_owned(), message: message.to_owned() });
        }
        match (answer.get("id").and_then(Value::as_u64), answer.get_mut("result")) {
            (Some(id), Some(result)) if id == self.id => Ok(result.take()),
            _ => Err(RpcError::Broken(Error::other("it does not speak JSON-RPC"))),
        }
    }

    /// The next whole value: nothing frames an answer, so it is over where its brackets are closed.
    fn answer(&mut self) -> Result<Value, Error> {
        let deadline = Instant::now() + TIMEOUT;
        let mut scan = Scan::default();
        let mut seen = 0;
        loop {
            if let Some(end) = scan.over(self.buffer.get(seen..).unwrap_or_default()) {
                let end = seen + end;
                let value = serde_json::from_slice(self.buffer.get(..end).unwrap_or_default());
                self.buffer.drain(..end);
                return value.map_err(Error::other);
            }
            seen = self.buffer.len();
            if seen > LONGEST {
                return Err(Error::other("an answer that does not end"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(timed_out());
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut piece = [0; 16 << 10];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(Error::new(ErrorKind::UnexpectedEof, "it closed the connection")),
                Ok(n) => self.buffer.extend(piece.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(timed_out()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

fn timed_out() -> Error {
    Error::new(ErrorKind::TimedOut, format!("no answer within {} s", TIMEOUT.as_secs()))
}

/// Where a JSON object or array ends.
#[derive(Debug, Default)]
struct Scan {
    depth: usize,
    in_text: bool,
    escaped: bool,
}

impl Scan {
    /// The length up to the end, if it is in these bytes.
    fn over(&mut self, bytes: &[u8]) -> Option<usize> {
        for (at, byte) in bytes.iter().enumerate() {
            if self.in_text {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_text = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_text = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{Rpc, RpcError, Scan};
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::path::{Path, PathBuf};

    /// A server at `path` that answers each call by `answer`, in pieces, until it gives none.
    pub(in super::super) fn serve(
        folder: &Path,
        mut answer: impl FnMut(&str, u64) -> Option<String> + Send + 'static,
    ) -> PathBuf {
        let path = folder.join("rpc.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut request = [0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut request) {
                    let call: serde_json::Value = serde_json::from_slice(&request[..n]).unwrap();
                    let (method, id) = (call["method"].as_str().unwrap(), call["id"].as_u64().unwrap());
                    let Some(answer) = answer(method, id) else { break };
                    for piece in answer.as_bytes().chunks(7) {
                        if stream.write_all(piece).is_err() {
                            break;
                        }
                    }
                }
            }
        });
        path
    }

    #[test]
    fn answers_come_one_after_another_over_one_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = serve(folder.path(), |method, id| {
            Some(format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"of":"{method}}}\"","n":[1,2]}}}}"#))
        });
        let mut rpc = Rpc::open(&path).unwrap();
        for method in ["a", "b", "c"] {
            let result = rpc.call(method).unwrap();
            assert_eq!(result["of"], format!("{method}}}\""));
            assert_eq!(result["n"][1], 2);
        }
    }

    #[test]
    fn what_goes_wrong_is_told() {
        for (answer, why) in [
            (Some(r#"{"id":1,"error":{"code":-32601,"message":"Method not found"}}"#), "Method not found"),
            (Some("[]"), "does not speak"),
            (Some(r#"{"id":9,"result":1}"#), "does not speak"),
            (Some("{nonsense}"), "key must be a string"),
            (None, "closed"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = serve(folder.path(), move |_, _| answer.map(str::to_owned));
            let error = Rpc::open(&path).unwrap().call("x").unwrap_err();
            assert!(error.to_string().contains(why), "{answer:?}: {error}");
            assert_eq!(matches!(error, RpcError::Refused { .. }), why == "Method not found");
        }
        assert!(Rpc::open(Path::new("/nonexistent/rpc.sock")).is_err());
        assert!(Rpc::open(Path::new(&format!("/{}", "x".repeat(200)))).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_end_or_do_not(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..8)) {
            let mut scan = Scan::default();
            for piece in &pieces {
                if let Some(end) = scan.over(piece) {
                    prop_assert!(end <= piece.len());
                    break;
                }
            }
        }

        #[test]
        fn a_value_ends_where_it_ends(texts in proptest::collection::vec(".{0,12}", 0..6), cut in 0usize..200) {
            let text = serde_json::json!({ "a": texts }).to_string();
            let mut whole = text.clone().into_bytes();
            whole.extend(b"{\"next\":1}");
            let cut = cut % text.len();
            let mut scan = Scan::default();
            prop_assert_eq!(scan.over(&whole[..cut]), None);
            prop_assert_eq!(scan.over(&whole[cut..]).map(|end| cut + end), Some(text.len()));
        }
    }
}
