//! A real SPDK build, where `SPDK_BUILD` names one: its target and its `spdk_nvme_perf`, started and
//! stopped.

use super::{Process, SOON, outcome, skipped};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The build's directory; says so where there is none.
pub fn build() -> Option<PathBuf> {
    let build = std::env::var_os("SPDK_BUILD").filter(|build| !build.is_empty()).map(PathBuf::from);
    if build.is_none() {
        skipped("SPDK_BUILD is not set");
    }
    build
}

/// An `nvmf_tgt` that `scripts/spdk-setup` started, stopped when this is dropped.
#[derive(Debug)]
pub struct Target {
    state: tempfile::TempDir,
    pub port: u16,
    pub pid: u32,
}

/// The subsystem that the target serves.
pub const NQN: &str = "nqn.2024-01.io.fabscope:default";

fn script(name: &str, state: &Path) -> Command {
    let mut command =
        Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/spdk-setup").join(name));
    command.env_remove("FABSCOPE_STATE").arg("--state").arg(state);
    command
}

impl Target {
    /// Starts the build's target on core 0 with these bdevs, as `start-target --bdev` takes them.
    pub fn start(build: &Path, bdevs: &[&str]) -> Result<Target> {
        Target::start_with(build, bdevs, &[])
    }

    /// As [`Target::start`], with more arguments for the target.
    pub fn start_with(build: &Path, bdevs: &[&str], more: &[&str]) -> Result<Target> {
        let state = tempfile::tempdir()?;
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let mut target = Target { state, port, pid: 0 };
        let mut start = script("start-target", target.state.path());
        start.arg("--spdk-build").arg(build).arg("--listen").arg(format!("127.0.0.1:{port}"));
        for bdev in bdevs {
            start.args(["--bdev", bdev]);
        }
        // The machine's cores may have other targets on them.
        outcome(start.args(["--cores", "0x1", "--", "--disable-cpumask-locks"]).args(more))?
            .expect(0, &[])?;
        let text = std::fs::read_to_string(target.state.path().join("target-default/state"))?;
        let pid = text.lines().find_map(|line| line.strip_prefix("pid=")).context("no pid in the state")?;
        target.pid = pid.parse()?;
        Ok(target)
    }

    /// Calls an RPC method.
    pub fn rpc(&self, arguments: &[&str]) -> Result<Value> {
        let answer = outcome(script("rpc", self.state.path()).args(arguments))?.expect(0, &[])?;
        Ok(serde_json::from_str(&answer.stdout)?)
    }

    /// Sets the mean delay of a delay bdev.
    pub fn set_delay(&self, bdev: &str, delay: Duration) -> Result<()> {
        for kind in ["avg_read", "p99_read", "avg_write", "p99_write"] {
            self.rpc(&[
                "bdev_delay_update_latency",
                &format!("delay_bdev_name={bdev}"),
                &format!("latency_type={kind}"),
                &format!("latency_us:={}", delay.as_micros()),
            ])?;
        }
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = outcome(script("stop-target", self.state.path()).arg("--all"));
    }
}

/// Runs `spdk_nvme_perf` on core 1 against a target's namespaces.
pub fn perf(build: &Path, port: u16, arguments: &[&str]) -> Command {
    let mut command = Command::new(build.join("bin/spdk_nvme_perf"));
    let trid: OsString =
        format!("trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{port} subnqn:{NQN}").into();
    command.args(["--no-huge", "-s", "256", "-c", "0x2", "-r"]).arg(trid).args(arguments);
    command
}

/// A running `spdk_nvme_perf`, its output in a file.
#[derive(Debug)]
pub struct Perf {
    process: Process,
    log: PathBuf,
}

impl Perf {
    /// Starts it.
    pub fn start(build: &Path, port: u16, arguments: &[&str], log: &Path) -> Result<Perf> {
        let file = std::fs::File::create(log)?;
        let mut command = perf(build, port, arguments);
        command.stdout(file.try_clone()?).stderr(Stdio::from(file));
        Ok(Perf { process: Process::start(&mut command)?, log: log.to_owned() })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits until its load has begun, which the target's recording shows.
    pub fn wait_until_it_runs(&mut self, target: &Path) -> Result<()> {
        let deadline = Instant::now() + SOON;
        while !target.join("commands/000000.parquet").exists() {
            ensure!(self.process.ended()?.is_none(), "spdk_nvme_perf ended: {}", self.said());
            ensure!(Instant::now() < deadline, "spdk_nvme_perf does not begin: {}", self.said());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Result<Option<std::process::ExitStatus>> {
        self.process.ended()
    }

    /// What it wrote.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it before its time, in order.
    pub fn end(mut self) -> Result<()> {
        self.process.signal(Signal::SIGINT)?;
        self.process.wait(SOON)?;
        Ok(())
    }
}
