//! VMs with the kernel's host in them, recorded together with its target: one on this machine, or the
//! kernel's in the same VM.

use super::{FABSCOPE, Pair, Recording, all_boundaries_were_taken};
use anyhow::{Result, ensure};
use run_format::Run;
use std::path::{Path, PathBuf};
use std::time::Duration;
use testbed::{Builder, Controller, Kernel, Port, Vm};

const HOSTID: &str = "5b1d2a0e-6d9f-4a55-9a3e-1f0c6c6b7a11";

/// The NQN that the VM's host has.
pub fn hostnqn() -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{HOSTID}")
}

/// Options for `/dev/nvme-fabrics` that name this host, and these.
fn host_options(more: &str) -> String {
    format!("hostnqn={},hostid={HOSTID},{more}", hostnqn())
}

/// How long a load may take: it is emulated, on a busy machine.
const LOAD: Duration = Duration::from_secs(240);

/// A VM whose kernel host is connected, with two I/O queues, to a target on the machine.
#[derive(Debug)]
pub struct Host {
    pub vm: Vm,
    pub block: String,
    folder: tempfile::TempDir,
}

impl Host {
    /// Boots and connects.
    pub fn connect(kernel: Kernel, port: u16, nqn: &str) -> Result<Host> {
        let vm = Vm::builder(kernel).program(FABSCOPE).program("fio").program("tc").boot()?;
        let controller = vm.connect_tcp("10.0.2.2", port, nqn, &host_options("nr_io_queues=2"))?;
        let block = vm.namespace(&controller, 1)?;
        Ok(Host { vm, block, folder: tempfile::tempdir()? })
    }

    /// Records both sides while fio runs these jobs in the VM, and brings the two runs together.
    pub fn record(&self, name: &str, target: u32, jobs: &str) -> Result<(PathBuf, PathBuf)> {
        let folder = self.folder.path().join(name);
        std::fs::create_dir(&folder)?;
        // An emulated machine has no time to spare: what it samples shows in its commands.
        let on_target =
            Recording::start("target", target, &folder.join("target.run"), &["--telemetry", "off"])?;
        let command = format!(
            "cd /tmp && fabscope record host --kernel -q --telemetry off -o {name}-host.run -- fio --filename={} \
             --ioengine=libaio --direct=1 --output-format=json {jobs}",
            self.block
        );
        self.vm.run(&command, LOAD)?.check()?;
        let target = on_target.stop()?;
        let host = self.vm.pull(&format!("/tmp/{name}-host.run"), &folder)?;
        Ok((host, target))
    }

    /// Records reads, in-capsule writes and R2T writes, each to addresses of its own, and checks what has to
    /// hold for them with any target.
    pub fn mixed(&self, target: u32) -> Result<(PathBuf, PathBuf, Pair)> {
        let (host, target) = self.record(
            "mixed",
            target,
            "--name=read1 --rw=randread --bs=4k --iodepth=1 --offset=0 --size=32m --number_ios=300 \
             --name=read16 --stonewall --rw=randread --bs=4k --iodepth=16 --offset=32m --size=32m --number_ios=1500 \
             --name=write4k --stonewall --rw=randwrite --bs=4k --iodepth=4 --offset=64m --size=32m --number_ios=400 \
             --name=write64k --stonewall --rw=randwrite --bs=64k --iodepth=4 --offset=128m --size=64m --number_ios=150",
        )?;
        let pair = Pair::join(&host, &target)?;
        pair.nearly_all_joined(2350)?;
        pair.none_wrong_by_address()?;
        pair.none_wrong_by_order()?;
        for run in [&host, &target] {
            all_boundaries_were_taken(&Run::open(run)?)?;
        }
        Ok((host, target, pair))
    }
}

/// A VM in which the kernel's host uses the kernel's target.
#[derive(Debug)]
pub struct Both {
    pub vm: Vm,
    /// What is put before what runs at the target, as to enter its network.
    pub at_target: String,
    /// Where runs are brought to, and what removes them.
    runs: PathBuf,
    _folder: Option<tempfile::TempDir>,
}

impl Both {
    /// Boots it, with the program under test.
    pub fn boot(builder: Builder) -> Result<Both> {
        let folder = tempfile::tempdir()?;
        let both = Both::keeping(builder, folder.path())?;
        Ok(Both { _folder: Some(folder), ..both })
    }

    /// As [`Both::boot`], with the runs left in this folder.
    pub fn keeping(builder: Builder, runs: &Path) -> Result<Both> {
        let vm =
            builder.program(FABSCOPE).program("fio").program("ip").program("rdma").program("tc").boot()?;
        Ok(Both { vm, at_target: String::new(), runs: runs.to_owned(), _folder: None })
    }

    /// Connects the host to a subsystem of the target.
    pub fn connect(&self, port: &Port<'_>, nqn: &str, options: &str) -> Result<Controller> {
        self.vm.connect(port, nqn, &host_options(options))
    }

    /// Records both sides while this command runs in the VM, and brings the two runs here.
    pub fn record(&self, name: &str, load: &str) -> Result<(PathBuf, PathBuf)> {
        self.record_with(name, "", load)
    }

    /// The same, with these options of `fabscope record`.
    pub fn record_with(&self, name: &str, options: &str, load: &str) -> Result<(PathBuf, PathBuf)> {
        let command = format!(
            "mkdir /tmp/{name} && cd /tmp/{name} || exit 9; \
             {0} fabscope record target --kernel -q {options} -o target.run 2> target.log & target=$!; \
             until [ -e target.run/run.json ]; do \
               kill -0 $target 2> /dev/null || {{ cat target.log >&2; exit 9; }}; sleep 0.05; done; \
             fabscope record host --kernel -q {options} -o host.run -- {load}; code=$?; \
             kill -INT $target; wait $target || {{ cat target.log >&2; exit 9; }}; exit $code",
            self.at_target
        );
        self.vm.run(&command, LOAD)?.check()?;
        let here = self.vm.pull(&format!("/tmp/{name}"), &self.runs)?;
        self.vm.sh(&format!("rm -r /tmp/{name}"))?;
        Ok((here.join("host.run"), here.join("target.run")))
    }

    /// Starts to record both sides, until [`Both::end_recording`].
    pub fn begin_recording(&self, options: &str) -> Result<()> {
        let begin = |inside: &str, side: &str| {
            format!(
                "{inside} fabscope record {side} --kernel -q {options} -o {side}.run > {side}.log 2>&1 < /dev/null & \
                 recorder=$!; echo $recorder > {side}.pid; until [ -e {side}.run/run.json ]; do \
                 kill -0 $recorder 2> /dev/null || {{ cat {side}.log >&2; exit 9; }}; sleep 0.05; done; "
            )
        };
        let both = begin(&self.at_target, "target") + &begin("", "host");
        self.vm.run(&format!("mkdir /tmp/both && cd /tmp/both || exit 9; {both}"), LOAD)?.check()?;
        Ok(())
    }

    /// The time of the clock that recordings have, ns.
    pub fn now(&self) -> Result<i64> {
        let uptime = self.vm.sh("cut -d ' ' -f 1 /proc/uptime")?;
        let seconds: f64 = uptime.trim().parse()?;
        Ok((seconds * 1e9) as i64)
    }

    /// Ends what [`Both::begin_recording`] began, and brings the two runs here.
    pub fn end_recording(&self) -> Result<(PathBuf, PathBuf)> {
        let end = |side: &str| {
            format!(
                "kill -INT $(cat {side}.pid); until grep -q '\"state\": \"closed\"' {side}.run/run.json; do \
                 sleep 0.1; [ $((waited += 1)) -lt 6000 ] || {{ cat {side}.log >&2; exit 9; }}; done; "
            )
        };
        let both = end("host") + &end("target");
        self.vm.run(&format!("cd /tmp/both || exit 9; waited=0; {both}"), LOAD)?.check()?;
        let here = self.vm.pull("/tmp/both", &self.runs)?;
        self.vm.sh("rm -r /tmp/both")?;
        Ok((here.join("host.run"), here.join("target.run")))
    }

    /// Fails if the kernel complained of anything.
    pub fn end(self) -> Result<()> {
        let console = self.vm.console();
        for bad in ["BUG:", "WARNING:", "Oops", "Call Trace"] {
            ensure!(!console.contains(bad), "the kernel complained:\n{console}");
        }
        self.vm.shutdown()
    }
}
