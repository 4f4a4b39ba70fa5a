//! Runs inside the VM: takes commands from the virtio-serial port, runs them with `/bin/sh -c` and
//! sends back their output and status, several at once. It does not set the VM up (`/init` does) and
//! stays alive whatever its commands do.
//!
//! Usage: `testbed-agent /dev/vportNpM`

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

#[path = "../src/wire.rs"]
mod wire;

use wire::{Frame, Kind};

/// The machine's end, shared by the threads that have output to send.
#[derive(Clone)]
struct Machine(Arc<Mutex<File>>);

impl Machine {
    fn send(&self, kind: Kind, id: u32, payload: &[u8]) -> io::Result<()> {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        wire::write_frame(&mut *port, kind, id, payload)
    }
}

/// What the agent needs of a command while it runs.
struct Entry {
    /// Also the process group.
    pid: u32,
    stdin: Sender<Vec<u8>>,
}

type Table = Arc<Mutex<HashMap<u32, Entry>>>;

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: testbed-agent PORT-DEVICE");
        return ExitCode::from(2);
    };
    match serve(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("testbed-agent: {path}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(path: &str) -> io::Result<()> {
    let mut port = OpenOptions::new().read(true).write(true).open(path)?;
    let machine = Machine(Arc::new(Mutex::new(port.try_clone()?)));
    let table = Table::default();
    machine.send(Kind::Hello, 0, &[])?;
    loop {
        let Frame { kind, id, payload } = wire::read_frame(&mut port)?;
        match kind {
            Kind::Exec => start(&machine, &table, id, &payload)?,
            Kind::Stdin => {
                // A command that is gone takes no input.
                if let Some(entry) = lock(&table).get(&id) {
                    let _gone = entry.stdin.send(payload);
                }
            }
            Kind::Signal => {
                if let (Some(entry), Some(signal)) = (lock(&table).get(&id), payload.first()) {
                    signal_group(entry.pid, *signal);
                }
            }
            Kind::Hello | Kind::Stdout | Kind::Stderr | Kind::Exit => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{kind:?} comes from the VM, not to it"),
                ));
            }
        }
    }
}

fn lock(table: &Table) -> std::sync::MutexGuard<'_, HashMap<u32, Entry>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Signals a whole group. The shell's `kill` spares this program the libc crate.
fn signal_group(group: u32, signal: u8) {
    let _status = Command::new("/bin/busybox")
        .args(["kill", &format!("-{signal}"), "--", &format!("-{group}")])
        .stderr(Stdio::null())
        .status();
}

fn start(machine: &Machine, table: &Table, id: u32, command: &[u8]) -> io::Result<()> {
    let command = String::from_utf8_lossy(command).into_owned();
    let spawned = Command::new("/bin/sh")
        .args(["-c", &command])
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            machine.send(Kind::Stderr, id, format!("/bin/sh: {error}\n").as_bytes())?;
            return machine.send(Kind::Exit, id, &127u32.to_le_bytes());
        }
    };
    let (to_stdin, input) = mpsc::channel::<Vec<u8>>();
    lock(table).insert(id, Entry { pid: child.id(), stdin: to_stdin });
    if let Some(mut stdin) = child.stdin.take() {
        // A thread of its own: a command that does not read must not hold up the others.
        thread::spawn(move || {
            while let Ok(bytes) = input.recv() {
                if bytes.is_empty() || stdin.write_all(&bytes).is_err() {
                    break;
                }
            }
        });
    }
    let machine = machine.clone();
    let table = Arc::clone(table);
    thread::spawn(move || {
        let status = relay(&machine, id, child);
        lock(&table).remove(&id);
        let _gone = machine.send(Kind::Exit, id, &status.to_le_bytes());
    });
    Ok(())
}

/// Sends on the output until both streams close, then the status. A background process that keeps
/// a stream open keeps the command open, as it would in a pipe.
fn relay(machine: &Machine, id: u32, mut child: Child) -> u32 {
    let stderr = child.stderr.take().map(|stream| {
        let machine = machine.clone();
        thread::spawn(move || copy(stream, &machine, Kind::Stderr, id))
    });
    if let Some(stream) = child.stdout.take() {
        copy(stream, machine, Kind::Stdout, id);
    }
    if let Some(thread) = stderr {
        let _panicked = thread.join();
    }
    match child.wait() {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => code.unsigned_abs(),
            (None, Some(signal)) => 128 + signal.unsigned_abs(),
            (None, None) => 255,
        },
        Err(_) => 255,
    }
}

fn copy(mut from: impl Read, machine: &Machine, kind: Kind, id: u32) {
    let mut buffer = vec![0u8; 32 * 1024];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                if machine.send(kind, id, &buffer[..n]).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
