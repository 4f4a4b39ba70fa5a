//! Faults injected into a real SPDK: its `nvmf_tgt` with its `bdevperf` as the load, both started from a build and told
//! what to be over their RPC. What the faults are, `cases` says; how a process is started and ended, `process`.

mod cases;
mod process;

use super::beside::two_cpus;
use super::standin::words;
use super::{Expected, Inject, Recorded};
use crate::pair::{self, Load};
use crate::signals::Signals;
use anyhow::{Context, Result, bail, ensure};
use cases::{CASES, Case, Part, Plan};
use process::{Process, Start};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

/// The subsystem that the target serves.
const NQN: &str = "nqn.2024-01.io.fabscope:selftest";
/// What the load is on: the first namespace of the controller.
const BDEV: &str = "Nvme0n1";
/// How much longer than its time a part of the load may take, to connect and to end.
const LATE: Duration = Duration::from_secs(30);

/// Where a build has its programs.
const TARGET: &[&str] = &["bin/nvmf_tgt"];
const LOAD: &[&str] = &["examples/bdevperf", "bin/bdevperf"];

/// The names of all that can be injected.
pub fn names() -> Vec<&'static str> {
    CASES.iter().map(|case| case.name).collect()
}

/// All faults, on this build.
pub fn all(build: Build) -> Vec<Box<dyn Inject>> {
    let build = Rc::new(build);
    CASES.iter().map(|case| Box::new(OnSpdk { case, build: Rc::clone(&build) }) as Box<dyn Inject>).collect()
}

/// The build of an SPDK.
#[derive(Debug)]
pub struct Build {
    target: PathBuf,
    load: PathBuf,
    version: String,
}

impl Build {
    /// Looks whether the programs are there, start, and know what they will be told.
    ///
    /// # Errors
    /// They do not, with what is missing; or a signal came.
    pub fn open(directory: &Path, signals: &Signals) -> Result<Build> {
        let (target, load) = (program(directory, TARGET)?, program(directory, LOAD)?);
        let folder = tempfile::tempdir().context("make a folder for a socket")?;
        let cpu = *standin::cpus::usable()?.first().context("no CPU")?;
        let start = |program: &Path, options: &[&str]| {
            Process::start(&Start { program, folder: folder.path(), cpu, options, startup: &[] }, signals)
        };
        let (first, second) = (start(&target, &[])?, start(&load, BDEVPERF)?);
        let told = first.call("spdk_get_version", Value::Null)?;
        let version = told.get("version").and_then(Value::as_str).unwrap_or("of no known version");
        let wanted = |of: fn(&Plan) -> Vec<&'static str>| -> BTreeSet<&'static str> {
            CASES.iter().flat_map(|case| of(&(case.plan)(true))).collect()
        };
        knows(&first, wanted(|plan| plan.startup.iter().chain(&plan.bdevs).map(|call| call.0).collect()))?;
        knows(&second, wanted(|plan| plan.load_startup.iter().map(|call| call.0).collect()))?;
        let version = version.to_owned();
        second.stop()?;
        first.stop()?;
        Ok(Build { target, load, version })
    }

    /// What the commands go between.
    pub fn title(&self) -> String {
        format!("nvmf_tgt and bdevperf of {}", self.version)
    }
}

/// What the load's program is started with: it waits until it is told what to do.
const BDEVPERF: &[&str] = &["-z", "-q", "1", "-o", "4096", "-w", "randread", "-t", "1", "-T", BDEV];

/// The first of these that is there.
fn program(directory: &Path, places: &[&str]) -> Result<PathBuf> {
    if !directory.is_dir() {
        bail!("--spdk {}: there is no such directory", directory.display());
    }
    match places.iter().map(|place| directory.join(place)).find(|path| path.is_file()) {
        // The processes have a folder of their own.
        Some(path) => path.canonicalize().with_context(|| path.display().to_string()),
        None => bail!(
            "--spdk {}: no SPDK build, it has no {}; give the directory `build` that `make` fills in SPDK's source",
            directory.display(),
            places.join(" or ")
        ),
    }
}

/// That a process knows these methods.
fn knows(process: &Process, methods: BTreeSet<&'static str>) -> Result<()> {
    let known = process.call("rpc_get_methods", json!({ "current": false }))?;
    let known: BTreeSet<&str> = known.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let lacking: Vec<&str> = methods.into_iter().filter(|method| !known.contains(method)).collect();
    ensure!(
        lacking.is_empty(),
        "this SPDK knows no {}: a self-test needs the delay, malloc and split bdevs and RPC of a default build",
        lacking.join(", ")
    );
    Ok(())
}

/// A fault of a real SPDK.
#[derive(Debug)]
struct OnSpdk {
    case: &'static Case,
    build: Rc<Build>,
}

impl Inject for OnSpdk {
    fn expected(&self) -> Expected {
        let Case { name, cause, injected, stages, size, every, least, .. } = *self.case;
        Expected { name, cause, injected, stages, size, every, least, polls: true }
    }

    fn lacking(&self) -> Option<String> {
        let cpus = two_cpus().err().map(|error| format!("{error:#}"));
        cpus.or_else(|| (self.case.plan)(true).beside.lacking())
    }

    fn record(&self, what: &Recorded<'_>) -> Result<()> {
        let (plan, build) = ((self.case.plan)(what.fault), &*self.build);
        plan.beside.around(|| record(self.case.name, build, &plan, what))
    }
}

fn record(name: &str, build: &Build, plan: &Plan, what: &Recorded<'_>) -> Result<()> {
    let [first, second] = two_cpus()?;
    let folder = tempfile::tempdir().context("make a folder for sockets")?;
    let folder = folder.path();
    let start = Start { program: &build.target, folder, cpu: first, options: &[], startup: &plan.startup };
    let target = Process::start(&start, what.signals)?;
    let port = serve(&target, plan)?;
    let start =
        Start { program: &build.load, folder, cpu: second, options: BDEVPERF, startup: &plan.load_startup };
    let process = Process::start(&start, what.signals)?;
    let bdevs = process.call(
        "bdev_nvme_attach_controller",
        json!({
            "name": "Nvme0",
            "trtype": "TCP",
            "adrfam": "IPv4",
            "traddr": "127.0.0.1",
            "trsvcid": port.to_string(),
            "subnqn": NQN,
        }),
    )?;
    ensure!(bdevs.get(0).is_some_and(|bdev| bdev == BDEV), "bdevperf has bdevs {bdevs} and no {BDEV}");
    let load = Bdevperf { process, parts: plan.load.clone(), duration: what.duration };
    let around = plan.beside.begin(|how| {
        let mut options = words(&["--connect", &format!("127.0.0.1:{port}"), "--nqn", NQN]);
        // It does not poll: CPUs are for the two that are recorded.
        options.extend(words(&["--spin", "0us"]));
        options.extend(words(how));
        // It outlasts the load.
        options.extend(["--duration".to_owned(), format!("{}s", what.duration.as_secs() + 120)]);
        options
    })?;
    around.before_others()?;
    pair::record(target.pid(), load, &what.wish(name), what.signals)?;
    drop(around);
    target.stop()
}

/// Makes the bdevs and serves them; returns the port.
fn serve(target: &Process, plan: &Plan) -> Result<u16> {
    let mut transport = plan.transport.clone();
    if let Some(options) = transport.as_object_mut() {
        options.insert("trtype".to_owned(), json!("TCP"));
    }
    target.call("nvmf_create_transport", transport)?;
    for (method, params) in &plan.bdevs {
        target.call(method, params.clone())?;
    }
    let subsystem = json!({ "nqn": NQN, "allow_any_host": true, "serial_number": "FABSCOPE" });
    target.call("nvmf_create_subsystem", subsystem)?;
    for (n, bdev) in plan.namespaces.iter().enumerate() {
        let namespace = json!({ "nsid": n + 1, "bdev_name": bdev });
        target.call("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": namespace }))?;
    }
    // A port that nobody has.
    let port =
        TcpListener::bind(("127.0.0.1", 0)).and_then(|l| l.local_addr()).context("find a port")?.port();
    let address =
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
    target.call("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address }))?;
    Ok(port)
}

/// `bdevperf`, connected, and what it is to do.
#[derive(Debug)]
struct Bdevperf {
    process: Process,
    parts: Vec<Part>,
    duration: Duration,
}

impl Load for Bdevperf {
    fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn finish(self) -> Result<()> {
        // It counts in whole seconds.
        let parts = u64::try_from(self.parts.len().max(1)).unwrap_or(1);
        let seconds = self.duration.as_secs().div_ceil(parts).max(1);
        for part in &self.parts {
            let how = json!({
                "workload_type": part.pattern,
                "io_size": part.bytes.to_string(),
                "queue_depth": part.depth,
                "time_in_sec": seconds,
            });
            let within = Duration::from_secs(seconds) + LATE;
            let told = self.process.call_within(within, "perform_tests", how)?;
            ended_well(&told)?;
        }
        self.process.stop()
    }
}

/// That there were commands, and none failed.
fn ended_well(told: &Value) -> Result<()> {
    let jobs = told.get("results").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    ensure!(!jobs.is_empty(), "bdevperf did no work: {told}");
    for job in jobs {
        let number = |name: &str| job.get(name).and_then(Value::as_f64);
        ensure!(number("io_failed") == Some(0.0), "commands of bdevperf failed: {job}");
        ensure!(number("iops").is_some_and(|rate| rate > 0.0), "the load had no commands: {job}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_no_build_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let said = |path: &Path| Build::open(path, &Signals::uncaught()).unwrap_err().to_string();
        assert!(said(&folder.path().join("none")).contains("there is no such directory"));
        assert!(said(folder.path()).contains("bin/nvmf_tgt"));
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        std::fs::write(folder.path().join("bin/nvmf_tgt"), "").unwrap();
        assert!(said(folder.path()).contains("examples/bdevperf or bin/bdevperf"));
    }

    #[test]
    fn a_load_without_commands_or_with_failed_ones_is_no_load() {
        let of = |results: Value| ended_well(&json!({ "results": results }));
        assert!(of(json!([{ "iops": 7.5, "io_failed": 0 }])).is_ok());
        for (results, why) in [
            (json!([]), "no work"),
            (json!(null), "no work"),
            (json!([{ "iops": 0.0, "io_failed": 0 }]), "no commands"),
            (json!([{ "iops": 7.5, "io_failed": 3 }]), "failed"),
            (json!([{ "iops": 7.5 }]), "failed"),
        ] {
            let said = of(results).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
    }
}
