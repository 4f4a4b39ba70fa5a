//! Starts and steers the stand-in's programs, and records both ends of a load.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use run_format::{Counters, Side, Source};
use serde_json::Value;
use spdk_probes::{Choice, Host, Options, Target, find};

use super::{Kept, poll_until, stop};

/// A program of the stand-in: beside this test, or where cargo puts it; built if it is not there yet.
pub(crate) fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let beside = test.with_file_name(name);
    if beside.exists() {
        return beside;
    }
    let folder = test.parent().and_then(Path::parent).unwrap();
    let path = folder.join(name);
    if !path.exists() {
        let status = Process::new(env!("CARGO"))
            .args(["build", "-p", "standin", "--bins", "--target-dir"])
            .arg(folder.parent().unwrap())
            .status()
            .unwrap();
        assert!(status.success(), "the stand-in does not build");
    }
    path
}

/// A child that ends with the test.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running `standin-target`.
pub(crate) struct Standin {
    pub(crate) process: Running,
    address: String,
    folder: tempfile::TempDir,
}

impl Standin {
    pub(crate) fn start(arguments: &[&str]) -> Standin {
        let folder = tempfile::tempdir().unwrap();
        let mut process = Process::new(program("standin-target"))
            .args(arguments)
            .arg("--control")
            .arg(folder.path().join("control"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(process.stdout.take().unwrap());
        let process = Running(process);
        let line = out
            .lines()
            .map(Result::unwrap)
            .find(|line| line.starts_with("listening "))
            .expect("the stand-in says where it listens");
        let address = line.split(' ').nth(1).unwrap().to_owned();
        Standin { process, address, folder }
    }

    pub(crate) fn attach(&self, options: &Options) -> Target {
        let process = find(Side::Target, &Choice::Pid(self.process.0.id())).unwrap();
        Target::attach(&process, options).unwrap()
    }

    pub(crate) fn control(&self, command: &str) -> String {
        let mut stream = UnixStream::connect(self.folder.path().join("control")).unwrap();
        writeln!(stream, "{command}").unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    }

    /// An initiator that is connected and waits for [`Initiator::go`].
    pub(crate) fn initiator(&self, arguments: &[&str]) -> Initiator {
        let mut process = Process::new(program("standin-initiator"))
            .args(["--connect", &self.address, "--hold"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let input = process.stdin.take().unwrap();
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the initiator does not connect");
        // What it prints at its end must have somewhere to go.
        let summary = std::thread::spawn(move || {
            let mut text = String::new();
            out.read_to_string(&mut text).map(|_| text).unwrap_or_default()
        });
        Initiator { process: Running(process), input, summary }
    }
}

/// A running `standin-initiator`.
pub(crate) struct Initiator {
    pub(crate) process: Running,
    input: ChildStdin,
    summary: JoinHandle<String>,
}

impl Initiator {
    pub(crate) fn attach(&self, options: &Options) -> Host {
        let process = find(Side::Host, &Choice::Pid(self.process.0.id())).unwrap();
        Host::attach(&process, options).unwrap()
    }

    /// Lets the load begin.
    pub(crate) fn go(&mut self) {
        writeln!(self.input, "go").unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.0.try_wait().unwrap().is_some()
    }

    /// What it says of its load.
    pub(crate) fn summary(mut self) -> Value {
        self.process.0.wait().unwrap();
        let text = self.summary.join().unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
    }
}

/// What both sides recorded.
pub(crate) struct Both {
    pub(crate) host: (Kept, Counters),
    pub(crate) target: (Kept, Counters),
}

/// Records both ends of a load.
pub(crate) fn record(standin: &Standin, options: &Options, arguments: &[&str]) -> Both {
    let mut target = standin.attach(options);
    let mut initiator = standin.initiator(arguments);
    let mut host = initiator.attach(options);
    let (mut here, mut there) = (Kept::default(), Kept::default());
    initiator.go();
    while !initiator.has_ended() {
        host.poll(Duration::from_millis(10), &mut here).unwrap();
        target.poll(Duration::from_millis(10), &mut there).unwrap();
    }
    assert!(host.ended());
    poll_until(&mut target, &mut there, Duration::from_millis(200), |_| false);
    let ours = stop(&mut host, &mut here);
    let theirs = stop(&mut target, &mut there);
    Both { host: (here, ours), target: (there, theirs) }
}

/// Records the target and two hosts at once, while each host runs its load.
pub(crate) fn record_two(standin: &Standin, options: &Options, loads: [&[&str]; 2]) -> Two {
    let step = |what: &str, since: Instant| println!("{what} after {:.1?}", since.elapsed());
    let began = Instant::now();
    let mut target = standin.attach(options);
    step("target attached", began);
    let mut initiators = loads.map(|arguments| standin.initiator(arguments));
    let mut hosts = initiators.each_ref().map(|initiator| (initiator.attach(options), Kept::default()));
    step("hosts attached", began);
    let mut there = Kept::default();
    initiators.iter_mut().for_each(Initiator::go);
    while !initiators.iter_mut().all(Initiator::has_ended) {
        target.poll(Duration::from_millis(10), &mut there).unwrap();
        for (host, kept) in &mut hosts {
            host.poll(Duration::from_millis(10), kept).unwrap();
        }
    }
    step("loads ended", began);
    poll_until(&mut target, &mut there, Duration::from_millis(500), |_| false);
    let target_hooks = target.hooks();
    let theirs = stop(&mut target, &mut there);
    let summaries = initiators.map(Initiator::summary);
    let hosts = hosts.map(|(mut host, mut kept)| {
        let hooks = host.hooks();
        let counters = stop(&mut host, &mut kept);
        (kept, counters, hooks)
    });
    step("detached", began);
    Two { target: (there, theirs, target_hooks), hosts, summaries }
}

/// What a target and its two hosts recorded, with the hooks of each, and what the hosts say of their loads.
pub(crate) struct Two {
    pub(crate) target: (Kept, Counters, Vec<run_format::Hook>),
    pub(crate) hosts: [(Kept, Counters, Vec<run_format::Hook>); 2],
    pub(crate) summaries: [Value; 2],
}
