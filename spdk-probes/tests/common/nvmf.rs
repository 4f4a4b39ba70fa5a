//! Starts and steers a real SPDK target and its loads, if `SPDK_BUILD` names the `build` folder of one.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use run_format::Side;
use serde_json::{Value, json};
use spdk_probes::{Choice, Options, Rpc, Target, find};

use super::standin::Running;

/// The machine has two cores and every SPDK process takes one whole: one test at a time.
static ONE: Mutex<()> = Mutex::new(());

pub(crate) fn build() -> Option<(PathBuf, MutexGuard<'static, ()>)> {
    let Some(build) = std::env::var_os("SPDK_BUILD") else {
        println!("skipped: SPDK_BUILD is not set");
        return None;
    };
    Some((build.into(), ONE.lock().unwrap_or_else(PoisonError::into_inner)))
}

pub(crate) fn rpc(socket: &Path, method: &str, params: Value) -> Value {
    let params = (!params.is_null()).then_some(params);
    Rpc::new(socket).call_within(Duration::from_secs(60), method, params).unwrap()
}

pub(crate) const NQN: &str = "nqn.2016-06.io.spdk:fabscope";

pub(crate) struct Nvmf {
    process: Running,
    build: PathBuf,
    pub(crate) folder: tempfile::TempDir,
    pub(crate) port: u16,
}

impl Nvmf {
    /// A target with one namespace for each bdev.
    pub(crate) fn start(build: &Path, cores: &str, bdevs: &[(&str, Value)]) -> Nvmf {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("rpc.sock");
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let process = Process::new(build.join("bin/nvmf_tgt"))
            .args(["--no-huge", "-s", "512", "-m", cores, "--disable-cpumask-locks", "-r"])
            .arg(&socket)
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let process = Running(process);
        let began = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "nvmf_tgt does not start");
            std::thread::sleep(Duration::from_millis(100));
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        rpc(&socket, "nvmf_create_transport", json!({"trtype": "TCP"}));
        rpc(
            &socket,
            "nvmf_create_subsystem",
            json!({"nqn": NQN, "allow_any_host": true, "serial_number": "1"}),
        );
        for (method, params) in bdevs {
            let made = rpc(&socket, method, params.clone());
            if params.get("base_of").is_none() && !params["name"].as_str().unwrap().starts_with("Base") {
                rpc(&socket, "nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": {"bdev_name": made}}));
            }
        }
        rpc(
            &socket,
            "nvmf_subsystem_add_listener",
            json!({"nqn": NQN, "listen_address":
                {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string()}}),
        );
        Nvmf { process, build: build.to_owned(), folder, port }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.0.id()
    }

    pub(crate) fn rpc(&self, method: &str, params: Value) -> Value {
        rpc(&self.folder.path().join("rpc.sock"), method, params)
    }

    pub(crate) fn attach(&self, options: &Options) -> Target {
        let process = find(Side::Target, &Choice::Pid(self.pid())).unwrap();
        let began = Instant::now();
        let target = Target::attach(&process, options).unwrap();
        println!("attached in {:?}", began.elapsed());
        target
    }

    pub(crate) fn transport(&self) -> String {
        format!("trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{} subnqn:{NQN}", self.port)
    }

    pub(crate) fn perf(&self, arguments: &[&str]) -> Process {
        let mut perf = Process::new(self.build.join("bin/spdk_nvme_perf"));
        perf.args(["--no-huge", "-s", "256", "-c", "0x2", "-r", &self.transport()])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        perf
    }
}

pub(crate) fn malloc() -> Vec<(&'static str, Value)> {
    vec![("bdev_malloc_create", json!({"name": "Malloc0", "num_blocks": 131_072, "block_size": 512}))]
}
