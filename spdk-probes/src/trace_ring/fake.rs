//! A process that looks to a recorder of trace rings like an SPDK target: it has a trace ring in shared memory, in any
//! layout, answers the RPC methods that are needed, and records commands that nobody sent. It speaks no NVMe. For tests:
//! the test's own program, started again.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::layout::Generation;
use super::ticks;
use super::writer::{Shape, TARGET, Tracepoints, Writer};
use crate::process::{self, Choice, Process};

/// Names what the started process is to be.
const ASKED: &str = "FABSCOPE_TEST_TARGET";
/// Requests of the connection; each is used again when all others have been.
pub(super) const REQUESTS: u64 = 128;
/// Groups that the fake has, by number.
const GROUPS: [(u16, &str); 3] = [(3, "bdev"), (5, "nvmf_tcp"), (15, "sock")];
/// One that a build lacks whose tracepoints were left out in part.
const TARGET_CUT: Tracepoints = TARGET.split_at(1).0;

/// What is wrong with a fake target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Wrong {
    #[default]
    Nothing,
    /// It listens nowhere.
    NoRpc,
    /// Its socket takes connections and says nothing.
    Silent,
    /// What answers is no JSON-RPC.
    Web,
    /// It answers, but lets nobody switch tracepoints.
    Forbids,
    /// It says that they are on, and they are not.
    Lies,
    /// Tracepoints were left out of the build.
    LeftOut,
    /// Its header says more entries than there are.
    Header,
    /// Its ring counts other ticks than this machine.
    Rate,
    /// Nothing, but it listens on other sockets too: one that takes connections and says nothing, one of the web.
    Sockets,
}

/// What a fake target is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    /// `24.01`, `24.05`, `26.05`.
    pub(super) layout: String,
    pub(super) entries: u64,
    /// Commands a second.
    pub(super) rate: u64,
    /// The host's end.
    pub(super) peer: String,
    pub(super) wrong: Wrong,
    /// Its release, major and minor.
    pub(super) release: (u32, u32),
    pub(super) folder: PathBuf,
}

impl Plan {
    pub(super) fn new(generation: Generation) -> Plan {
        Plan {
            layout: generation.name().to_owned(),
            entries: 32_768,
            rate: 20_000,
            peer: "127.0.0.1".to_owned(),
            wrong: Wrong::Nothing,
            release: match generation {
                Generation::Flags => (24, 1),
                Generation::File => (26, 1),
                Generation::Sections => (26, 5),
            },
            folder: PathBuf::new(),
        }
    }

    fn generation(&self) -> Generation {
        let all = [Generation::Flags, Generation::File, Generation::Sections];
        all.into_iter().find(|generation| generation.name() == self.layout).unwrap()
    }
}

/// A running fake target.
#[derive(Debug)]
pub(super) struct Fake {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    pub(super) socket: PathBuf,
    ring: PathBuf,
    _folder: tempfile::TempDir,
}

impl Fake {
    pub(super) fn start(plan: &Plan) -> Fake {
        let folder = tempfile::tempdir().unwrap();
        let plan = Plan { folder: folder.path().to_owned(), ..plan.clone() };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "trace_ring::fake::a_fake_target", "--nocapture"])
            .env(ASKED, serde_json::to_string(&plan).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let socket = folder.path().join("rpc.sock");
        let mut fake = Fake { child, stdin, stdout, socket, ring: PathBuf::new(), _folder: folder };
        fake.ring = fake.line("ring ").into();
        fake
    }

    fn line(&mut self, begins: &str) -> String {
        let mut line = String::new();
        // The test runner writes lines of its own.
        while !line.contains(begins) {
            line.clear();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the fake target has ended");
        }
        line.split_once(begins).unwrap().1.trim_end().to_owned()
    }

    /// Tells it to do something, and returns its answer.
    pub(super) fn tell(&mut self, what: &str) -> String {
        writeln!(self.stdin, "{what}").unwrap();
        self.line("done ")
    }

    /// How many commands it has recorded the end of.
    pub(super) fn written(&mut self) -> u64 {
        self.tell("written").parse().unwrap()
    }

    /// The tracepoints that are on, by group.
    pub(super) fn masks(&mut self) -> Vec<u64> {
        self.tell("masks").split(' ').map(|mask| mask.parse().unwrap()).collect()
    }

    pub(super) fn process(&self) -> Process {
        process::find(run_format::Side::Target, &Choice::Pid(self.child.id())).unwrap()
    }

    pub(super) fn process_number(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.ring);
    }
}

/// The process itself. Not a test: does nothing unless it is asked to be the target.
#[test]
fn a_fake_target() {
    let Ok(plan) = std::env::var(ASKED) else { return };
    run(&serde_json::from_str(&plan).unwrap());
}

/// What its threads share.
struct Target {
    writer: Writer,
    plan: Plan,
    ring: PathBuf,
    written: AtomicU64,
    rate: AtomicU64,
    /// No command is under way, and none will come at this rate.
    idle: AtomicBool,
    /// Its RPC answers no more.
    ends: AtomicBool,
    /// How often its other sockets were connected to.
    asked: AtomicU64,
}

fn run(plan: &Plan) {
    let generation = plan.generation();
    // The rate of this machine, so that ticks are times.
    let mut shape = Shape { entries: plan.entries, rate: ticks::rate(), ..Shape::new(generation) };
    match plan.wrong {
        Wrong::LeftOut => shape.tracepoints = TARGET_CUT,
        Wrong::Rate => shape.rate *= 2,
        _ => {}
    }
    let file = tempfile::Builder::new().prefix("fabscope_trace.pid").tempfile_in("/dev/shm").unwrap();
    let ring = file.path().to_owned();
    let writer = Writer::write_to(file, &shape);
    if plan.wrong == Wrong::Header {
        // As many bytes as there are, but the first ring is said to be where the file ends.
        let length = std::fs::metadata(&ring).unwrap().len();
        assert_eq!(generation, Generation::Sections);
        writer.set(16 + 6 * 8, length);
    }
    let now = ticks::now();
    if generation != Generation::Flags {
        writer.owner(260, now - 2_000, &format!("{}:4000 nqn.a 127.0.0.1:4420 qid:0", plan.peer));
        writer.owner(261, now - 1_000, &format!("{}:4001 nqn.a 127.0.0.1:4420 qid:1", plan.peer));
        writer.owner(259, now - 3_000, "bdev_Malloc0");
    }
    let target = Target {
        writer,
        plan: plan.clone(),
        ring: ring.clone(),
        written: AtomicU64::new(0),
        rate: AtomicU64::new(plan.rate),
        idle: AtomicBool::new(false),
        ends: AtomicBool::new(false),
        asked: AtomicU64::new(0),
    };
    let listener = UnixListener::bind(plan.folder.join("rpc.sock")).unwrap();
    if plan.wrong == Wrong::NoRpc {
        std::fs::remove_file(plan.folder.join("rpc.sock")).unwrap();
    }
    let others = (plan.wrong == Wrong::Sockets)
        .then(|| ["silent.sock", "web.sock"].map(|name| UnixListener::bind(plan.folder.join(name)).unwrap()));
    println!("\nring {}", ring.display());
    std::thread::scope(|scope| {
        if let Some([silent, web]) = &others {
            scope.spawn(|| {
                let mut held = Vec::new();
                for stream in silent.incoming() {
                    target.asked.fetch_add(1, Ordering::Release);
                    held.push(stream.unwrap());
                }
            });
            scope.spawn(|| {
                for stream in web.incoming() {
                    target.asked.fetch_add(1, Ordering::Release);
                    let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
                }
            });
        }
        scope.spawn(|| {
            let mut silent = Vec::new();
            for stream in listener.incoming() {
                if target.ends.load(Ordering::Acquire) {
                    continue;
                }
                match target.plan.wrong {
                    Wrong::Silent => silent.push(stream.unwrap()),
                    _ => target.answer(stream.unwrap()),
                }
            }
        });
        scope.spawn(|| target.record());
        for line in std::io::stdin().lines() {
            let answer = target.told(&line.unwrap());
            println!("\ndone {answer}");
        }
        // Who started it is gone.
        std::process::exit(0);
    });
}

impl Target {
    /// Records commands for ever: reads and writes of 4 KiB, every fourth with an R2T, each at its own address.
    fn record(&self) {
        let (from, mut n) = (Instant::now(), 0);
        let (mut due, mut before) = (0.0, from);
        loop {
            let (now, rate) = (Instant::now(), self.rate.load(Ordering::Acquire));
            due += (now - before).as_secs_f64() * rate as f64;
            before = now;
            if rate == 0 {
                due = 0.0;
            }
            self.idle.store(rate == 0, Ordering::Release);
            while due >= 1.0 {
                due -= 1.0;
                self.command(n);
                n += 1;
                self.written.store(n, Ordering::Release);
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    fn command(&self, n: u64) {
        let request = 0x7f00_0000_1000 + n % REQUESTS * 0x400;
        let (io, qpair) = (request + 0x200_0000, 0x7f00_1000_0000);
        let flags = self.plan.generation() == Generation::Flags;
        let (connection, bdev) = if flags { (1, 0) } else { (261, 259) };
        let of_request = |name: &str| {
            self.writer.record_if_on(name, connection, 0, request, &[if flags { qpair } else { 1 }]);
        };
        of_request("TCP_REQ_NEW");
        if n % 4 == 3 {
            of_request("TCP_REQ_AWAIT_R2T_ACK");
        }
        of_request("TCP_REQ_RDY_TO_EXECUTE");
        let start = [1 + n % 2, request, n * 8, if flags { 8 } else { 1 }];
        self.writer.record_if_on("BDEV_IO_START", bdev, 8, io, &start);
        self.writer.record_if_on("BDEV_IO_DONE", bdev, 0, io, &[request, 1]);
        of_request("TCP_REQ_EXECUTED");
        self.writer.record_if_on("SOCK_REQ_PEND", 0, 0, io + 8, &[request]);
        of_request("TCP_REQ_COMPLETED");
    }

    fn told(&self, what: &str) -> String {
        match what {
            "written" => self.written.load(Ordering::Acquire).to_string(),
            "asked" => self.asked.load(Ordering::Acquire).to_string(),
            // As a target does: the first of it that goes is its RPC.
            "end" => {
                self.ends.store(true, Ordering::Release);
                std::fs::remove_file(self.plan.folder.join("rpc.sock")).unwrap();
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_millis(300));
                    std::process::exit(0);
                });
                String::new()
            }
            "masks" => {
                let masks = GROUPS.map(|(group, _)| self.mask(group).to_string());
                masks.join(" ")
            }
            // As though another target had the file now.
            "anew" => {
                self.set_rate(0);
                self.writer.set_next(0, 0);
                String::new()
            }
            "cut" => {
                self.set_rate(0);
                std::fs::File::options().write(true).open(&self.ring).unwrap().set_len(4096).unwrap();
                String::new()
            }
            rate => {
                self.set_rate(rate.strip_prefix("rate ").unwrap().parse().unwrap());
                String::new()
            }
        }
    }

    /// With 0, waits until the last command is over.
    fn set_rate(&self, rate: u64) {
        self.rate.store(rate, Ordering::Release);
        while rate == 0 && !self.idle.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn mask(&self, group: u16) -> u64 {
        self.writer.mask(usize::from(group)).load(Ordering::Relaxed)
    }

    fn answer(&self, mut stream: UnixStream) {
        let mut request = vec![0; 4096];
        let length = stream.read(&mut request).unwrap_or(0);
        let answer = match serde_json::from_slice::<Value>(&request[..length]) {
            Ok(_) if self.plan.wrong == Wrong::Web => "HTTP/1.1 400 Bad Request\r\n\r\n".to_owned(),
            Ok(request) => match self.call(&request) {
                Ok(result) => json!({ "jsonrpc": "2.0", "id": request["id"], "result": result }),
                Err(why) => {
                    json!({ "jsonrpc": "2.0", "id": request["id"], "error": { "code": -1, "message": why } })
                }
            }
            .to_string(),
            Err(_) => return,
        };
        // Who asked may be gone.
        let _ = stream.write_all(answer.as_bytes());
    }

    fn call(&self, request: &Value) -> Result<Value, String> {
        let address = |port: &str, address: &str| json!({ "traddr": address, "trsvcid": port });
        match request["method"].as_str().unwrap_or_default() {
            "rpc_get_methods" => Ok(json!(["rpc_get_methods", "trace_get_info", "trace_set_tpoint_mask"])),
            "spdk_get_version" => {
                let (major, minor) = self.plan.release;
                let fields = json!({ "major": major, "minor": minor });
                Ok(json!({ "version": "none: a test's fake target", "fields": fields }))
            }
            "nvmf_subsystem_get_controllers" => {
                Ok(json!([{ "cntlid": 7, "hostnqn": "nqn.h", "num_io_qpairs": 1 }]))
            }
            // What it does where a connection has not sent its Connect command.
            "nvmf_subsystem_get_qpairs" if self.plan.release < (25, 5) => std::process::exit(1),
            "trace_get_info" => {
                let mut info = json!({ "tpoint_shm_path": self.ring.to_str() });
                for (group, name) in GROUPS {
                    let (mask, on) = (format!("{:#x}", 1u64 << group), format!("{:#x}", self.mask(group)));
                    info[name] = json!({ "mask": mask, "tpoint_mask": on });
                }
                Ok(info)
            }
            method @ ("trace_set_tpoint_mask" | "trace_clear_tpoint_mask") => {
                let (name, bits) = (&request["params"]["name"], request["params"]["tpoint_mask"].as_u64());
                let group = GROUPS.iter().find(|(_, known)| name == known).ok_or("no such group")?;
                let mask = self.writer.mask(usize::from(group.0));
                match (self.plan.wrong, method) {
                    (Wrong::Forbids, _) => return Err("Operation not permitted".to_owned()),
                    (Wrong::Lies, _) => 0,
                    (_, "trace_set_tpoint_mask") => mask.fetch_or(bits.ok_or("no mask")?, Ordering::Relaxed),
                    _ => mask.fetch_and(!bits.ok_or("no mask")?, Ordering::Relaxed),
                };
                Ok(json!(true))
            }
            "nvmf_get_subsystems" => Ok(json!([
                { "nqn": "nqn.d", "subtype": "Discovery" },
                { "nqn": "nqn.a", "subtype": "NVMe", "namespaces": [{ "nsid": 3, "bdev_name": "Malloc0" }] },
            ])),
            "nvmf_subsystem_get_qpairs" => {
                let qpair = |qid: u16, port: &str| {
                    let mut qpair = json!({
                        "cntlid": 7, "qid": qid, "state": "active", "listen_address": address("4420", "127.0.0.1"),
                    });
                    if self.plan.generation() != Generation::Flags {
                        qpair["hostnqn"] = json!("nqn.h");
                        qpair["peer_address"] = address(port, &self.plan.peer);
                    }
                    qpair
                };
                Ok(json!([qpair(0, "4000"), qpair(1, "4001")]))
            }
            "bdev_get_bdevs" => Ok(json!([{ "name": "Malloc0", "block_size": 512 }])),
            _ => Err("Method not found".to_owned()),
        }
    }
}

/// Calls a method of a fake target as another program would.
pub(super) fn call(socket: &Path, method: &str, params: Value) -> Value {
    super::rpc::Rpc::new(socket).call(method, Some(params)).unwrap()
}
