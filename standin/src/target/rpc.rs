//! The part of SPDK's JSON-RPC that tells how busy reactors are and who waited for a buffer, over a UNIX socket. It
//! changes nothing; all other methods are refused as unknown.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Shared, faults};

/// A request is no longer.
const LONGEST: usize = 64 << 10;

/// The listening end's file, which goes with it.
#[derive(Debug)]
pub(crate) struct Rpc(PathBuf);

impl Rpc {
    /// Answers on this socket from now on.
    ///
    /// # Errors
    /// The path can not be bound.
    pub(crate) fn open(path: &Path, shared: &Arc<Shared>) -> Result<Self> {
        if UnixStream::connect(path).is_err() {
            // Left behind by a process that is gone, or not there at all.
            let _ = std::fs::remove_file(path);
        }
        let listener =
            UnixListener::bind(path).with_context(|| format!("the RPC socket {}", path.display()))?;
        let shared = Arc::clone(shared);
        std::thread::Builder::new()
            .name("rpc".to_owned())
            .spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    let shared = Arc::clone(&shared);
                    std::thread::spawn(move || talk(&shared, stream));
                }
            })
            .context("the RPC socket's thread")?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Rpc {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn talk(shared: &Shared, mut stream: UnixStream) {
    let mut buffer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(n) if n > 0 && buffer.len() + n <= LONGEST => buffer.extend_from_slice(&piece[..n]),
            _ => return,
        }
        // Nothing frames a request: it is over where its value is.
        let mut values = serde_json::Deserializer::from_slice(&buffer).into_iter::<Value>();
        let mut answers = String::new();
        let mut broken = false;
        for value in values.by_ref() {
            match value {
                Ok(request) => answers += &answer(shared, &request).to_string(),
                Err(error) => {
                    broken = !error.is_eof();
                    break;
                }
            }
        }
        let read = values.byte_offset();
        buffer.drain(..read);
        if broken || stream.write_all(answers.as_bytes()).is_err() {
            return;
        }
    }
}

fn answer(shared: &Shared, request: &Value) -> Value {
    let id = request.get("id").cloned().unwrap_or(Value::Null);
    let result = match request.get("method").and_then(Value::as_str) {
        Some("spdk_get_version") => json!({ "version": standin::version() }),
        Some("framework_get_reactors") => reactors(shared),
        Some("iobuf_get_stats") => json!([{
            "module": "nvmf_TCP",
            "small_pool": { "cache": 0, "main": faults::TAKEN.load(Ordering::Relaxed), "retry": faults::WAITED.load(Ordering::Relaxed) },
        }]),
        _ => {
            return json!({ "jsonrpc": "2.0", "id": id, "error": { "code": -32601, "message": "Method not found" } });
        }
    };
    json!({ "jsonrpc": "2.0", "id": id, "result": result })
}

/// A tick is a nanosecond here.
fn reactors(shared: &Shared) -> Value {
    let reactors: Vec<Value> = shared
        .times
        .iter()
        .enumerate()
        .map(|(lcore, times)| {
            let (busy, idle) = (times.busy.load(Ordering::Relaxed), times.idle.load(Ordering::Relaxed));
            json!({ "lcore": lcore, "busy": busy, "idle": idle, "in_interrupt": false,
                "lw_threads": [{ "name": format!("nvmf_tgt_poll_group_{lcore:03}") }] })
        })
        .collect();
    json!({ "tick_rate": 1_000_000_000u64, "pid": std::process::id(), "reactors": reactors })
}
