//! A VM with the kernel's NVMe/TCP host in it, connected to a target on this machine, and recorded
//! together with that target.

use super::{FABSCOPE, Recording};
use anyhow::Result;
use std::path::PathBuf;
use std::time::Duration;
use testbed::{Kernel, Vm};

const HOSTID: &str = "5b1d2a0e-6d9f-4a55-9a3e-1f0c6c6b7a11";

/// The NQN that the VM's host has.
pub fn hostnqn() -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{HOSTID}")
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
        let options = format!("hostnqn={},hostid={HOSTID},nr_io_queues=2", hostnqn());
        let controller = vm.connect_tcp("10.0.2.2", port, nqn, &options)?;
        let block = vm.namespace(&controller, 1)?;
        Ok(Host { vm, block, folder: tempfile::tempdir()? })
    }

    /// Records both sides while fio runs these jobs in the VM, and brings the two runs together.
    pub fn record(&self, name: &str, target: u32, jobs: &str) -> Result<(PathBuf, PathBuf)> {
        let folder = self.folder.path().join(name);
        std::fs::create_dir(&folder)?;
        let on_target = Recording::start("target", target, &folder.join("target.run"), &[])?;
        let command = format!(
            "cd /tmp && fabscope record host --kernel -q -o {name}-host.run -- fio --filename={} \
             --ioengine=libaio --direct=1 --output-format=json {jobs}",
            self.block
        );
        self.vm.run(&command, LOAD)?.check()?;
        let target = on_target.stop()?;
        let host = self.vm.pull(&format!("/tmp/{name}-host.run"), &folder)?;
        Ok((host, target))
    }
}
