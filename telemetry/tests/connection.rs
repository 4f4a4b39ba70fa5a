//! The sampler over real connections: in a network namespace of its own, whose loopback drops what comes too fast, and
//! beside a real SPDK target.
#![allow(clippy::unwrap_used)] // the helpers of tests, too

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use telemetry::{Batch, Options, Sampler, State, Status, Subject};

/// The last value of each metric of each object, and the values that it had.
type Values = BTreeMap<(String, String, String), Vec<Option<f64>>>;

fn values(batches: &Mutex<Vec<Batch>>) -> Values {
    let mut values = Values::new();
    for batch in batches.lock().unwrap().iter() {
        for row in &batch.rows {
            let metric = batch.metrics[usize::from(row.metric)].name.to_string();
            let key = (batch.collector.to_owned(), row.object.to_string(), metric);
            values.entry(key).or_default().push(row.value);
        }
    }
    values
}

fn sampled(subject: Subject, during: impl FnOnce()) -> (Status, Values) {
    let batches = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&batches);
    let options = Options { every: Duration::from_millis(50), subject, ..Options::default() };
    let sampler = Sampler::start(&options, move |batch| into.lock().unwrap().push(batch)).unwrap();
    during();
    let status = sampler.stop();
    (status, values(&batches))
}

fn state<'a>(status: &'a Status, collector: &str) -> &'a State {
    &status.collectors.iter().find(|c| c.about.name == collector).unwrap().state
}

/// A network namespace, which a child that sleeps keeps.
struct Namespace(Child);

impl Namespace {
    fn new() -> Option<Namespace> {
        let child = Command::new("unshare").args(["--net", "sleep", "600"]).spawn().ok()?;
        let namespace = Namespace(child);
        let own = std::fs::read_link("/proc/self/ns/net").ok()?;
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            let theirs = std::fs::read_link(format!("/proc/{}/ns/net", namespace.0.id())).ok();
            // Before it is another program it may be another's namespace or this one.
            if theirs.is_some_and(|theirs| theirs != own) {
                return Some(namespace);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    fn run(&self, program: &str, arguments: &str) -> bool {
        let pid = self.0.id().to_string();
        let status = Command::new("nsenter")
            .args(["--net", "--target", &pid, program])
            .args(arguments.split(' '))
            .stderr(Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    }

    /// Does something on a thread that is in it.
    fn inside<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        let path = format!("/proc/{}/ns/net", self.0.id());
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let file = std::fs::File::open(path).unwrap();
                    nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
                    what()
                })
                .join()
                .unwrap()
        })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_connection_that_loses_segments_shows_how_many_and_when() {
    let Some(namespace) = Namespace::new() else {
        println!("skipped: a network namespace needs root and unshare(1)");
        return;
    };
    // A bucket that holds little and passes little: what is too much is dropped. netem would do as well, but not every
    // kernel has it.
    let shaped = namespace.run("ip", "link set lo mtu 1500 up")
        && (namespace.run("tc", "qdisc add dev lo root tbf rate 40mbit burst 4kb limit 12kb"));
    if !shaped {
        println!("skipped: tc can not shape loopback here");
        return;
    }
    let ((mut near, mut far), port) = namespace.inside(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let port = far.local_addr().unwrap().port();
        ((near, far), port)
    });
    let name = format!("{}>{}", near.local_addr().unwrap(), near.peer_addr().unwrap());
    let send = move || {
        let reader = std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            let mut all = 0;
            while let Ok(n @ 1..) = far.read(&mut buffer) {
                all += n;
            }
            all
        });
        let until = Instant::now() + Duration::from_secs(2);
        let mut sent = 0;
        while Instant::now() < until {
            near.write_all(&[7; 1 << 15]).unwrap();
            sent += 1 << 15;
        }
        (near, reader, sent)
    };
    let mut ends = None;
    // The connection is in another namespace than the sampler; the process that keeps it open is this one.
    let (status, values) = namespace.inside(|| {
        let subject = Subject { ports: vec![port], ..Subject::default() };
        sampled(subject, || ends = Some(send()))
    });
    let (near, reader, sent) = ends.unwrap();
    drop(near);
    assert_eq!(reader.join().unwrap(), sent);
    assert_eq!(state(&status, "tcp"), &State::Sampling);
    let of = |metric: &str| values[&("tcp".to_owned(), name.clone(), metric.to_owned())].clone();
    let retransmitted: Vec<f64> = of("retransmitted").into_iter().flatten().collect();
    println!("{} segments sent again in {} steps", retransmitted.last().unwrap(), retransmitted.len());
    assert!(retransmitted.is_sorted() && retransmitted.len() > 2, "{retransmitted:?}");
    assert!(*retransmitted.last().unwrap() > 5.0);
    let lost: Vec<f64> = of("bytes_retransmitted").into_iter().flatten().collect();
    assert!(*lost.last().unwrap() > 5.0 * 500.0);
    assert!(of("delivery_rate").into_iter().flatten().any(|rate| rate > 100_000.0));
    assert!(of("send_queue").into_iter().flatten().any(|queue| queue > 0.0));
    assert_eq!(of("pmtu"), [Some(1500.0)]);
}

#[test]
fn this_machine_s_cpus_and_interfaces_move() {
    let (status, values) = sampled(Subject::default(), || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let until = Instant::now() + Duration::from_millis(1500);
        while Instant::now() < until {
            near.write_all(&[1; 10_000]).unwrap();
            far.read_exact(&mut [0; 10_000]).unwrap();
        }
    });
    for collector in ["cpu", "nic", "softnet", "softirqs", "netstat"] {
        assert_eq!(state(&status, collector), &State::Sampling, "{collector}");
    }
    let grew = |collector: &str, object: &str, metric: &str| {
        let key = (collector.to_owned(), object.to_owned(), metric.to_owned());
        let values: Vec<f64> = values[&key].iter().copied().flatten().collect();
        assert!(values.is_sorted(), "{key:?} {values:?}");
        values.last().unwrap() - values[0]
    };
    assert!(grew("nic", "lo", "rx_bytes") > 1e6);
    assert!(grew("cpu", "", "system") > 0.0);
    assert!(grew("netstat", "", "segments_out") > 100.0);
    for one in &status.collectors {
        match &one.state {
            State::Absent(why) | State::Failed(why) => println!("skipped: {}: {why}", one.about.name),
            State::Sampling => assert!(one.samples > 0, "{}", one.about.name),
        }
    }
}

/// Ends what it started.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether the target has set up what it was started with.
fn has_bdev(socket: &Path) -> bool {
    let asked = || -> std::io::Result<String> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(br#"{"jsonrpc":"2.0","id":1,"method":"bdev_get_bdevs"}"#)?;
        let mut answer = vec![0; 1 << 14];
        let n = stream.read(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..n]).into_owned())
    };
    asked().is_ok_and(|answer| answer.contains("Malloc0"))
}

#[test]
fn a_real_spdk_target_tells_of_its_reactors_and_bdevs() {
    let Some(build) = std::env::var_os("SPDK_BUILD").map(PathBuf::from) else {
        println!("skipped: SPDK_BUILD names no SPDK build");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let (socket, configuration) = (folder.path().join("rpc.sock"), folder.path().join("bdev.json"));
    std::fs::write(
        &configuration,
        r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"bdev_malloc_create","params":{"name":"Malloc0","num_blocks":8192,"block_size":512}}]}]}"#,
    )
    .unwrap();
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let target = Command::new(build.join("bin/nvmf_tgt"))
        .args(["--no-huge", "-s", "512", "-m", "0x1", "-r"])
        .arg(&socket)
        .arg("-c")
        .arg(&configuration)
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn();
    let target = Ended(target.unwrap());
    let until = Instant::now() + Duration::from_secs(60);
    while !has_bdev(&socket) {
        assert!(Instant::now() < until, "{}", std::fs::read_to_string(folder.path().join("log")).unwrap());
        std::thread::sleep(Duration::from_millis(100));
    }
    let subject = Subject { pid: Some(target.0.id()), rpc: vec![socket], ..Subject::default() };
    let (status, values) = sampled(subject, || std::thread::sleep(Duration::from_millis(4_500)));
    assert_eq!(state(&status, "spdk"), &State::Sampling);
    assert_eq!(state(&status, "reactors"), &State::Sampling);
    let samples = |name: &str| status.collectors.iter().find(|c| c.about.name == name).unwrap().samples;
    assert!((3..=6).contains(&samples("reactors")), "{}", samples("reactors"));
    assert!((1..=2).contains(&samples("spdk")), "{}", samples("spdk"));
    let spdk = status.collectors.iter().find(|c| c.about.name == "spdk").unwrap();
    println!("{} samples, {:?} of CPU here; lacks {:?}", spdk.samples, spdk.cpu, spdk.lacks);
    let of = |collector: &str, object: &str, metric: &str| {
        let key = (collector.to_owned(), object.to_owned(), metric.to_owned());
        values.get(&key).unwrap_or_else(|| panic!("{key:?} in {:?}", values.keys())).clone()
    };
    let time = |metric: &str| {
        let values: Vec<f64> = of("reactors", "lcore 0", metric).into_iter().flatten().collect();
        values.last().unwrap() - values[0]
    };
    // Busy and idle together are the time that passed: at least three seconds between the first and the last.
    let all = time("busy") + time("idle");
    assert!((2e9..6e9).contains(&all), "{all}");
    assert_eq!(of("spdk", "Malloc0", "bdev_writes"), [Some(0.0)]);
    assert!(of("spdk", "app_thread", "thread_busy")[0] > Some(0.0));
    assert!(
        values
            .keys()
            .any(|(_, object, metric)| object.starts_with("nvmf_tgt_poll_group") && metric == "io_qpairs")
    );
    assert!(values.keys().any(|(_, object, metric)| object == "bdev small" && metric == "buffer_waits"));
    let threads = values.keys().filter(|(collector, ..)| collector == "threads").count();
    assert!(threads > 0, "{:?}", state(&status, "threads"));
}
