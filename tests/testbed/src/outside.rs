//! What is done to a VM from outside, and what the machine does to it: properties of its emulated devices by QEMU's
//! machine protocol (QMP), and how long the emulator had to wait for a CPU.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::vm::{SHORT, Vm};

impl Vm {
    /// Sets a number that an emulated NVMe drive has, the first of [`crate::Builder::nvme_drive`] being 0:
    /// `smart_critical_warning`, the byte of that name in its health log.
    ///
    /// # Errors
    ///
    /// When there is no such drive or property, with what QEMU said.
    pub fn set_nvme_drive(&self, drive: usize, property: &str, value: u32) -> Result<()> {
        let path = format!("/machine/peripheral/drive-{drive}");
        self.qmp("qom-set", &json!({ "path": path, "property": property, "value": value }))
            .with_context(|| format!("cannot set {property} of the VM's drive {drive}"))
    }

    /// Lets an emulated NVMe drive do so many commands a second, each as long after the one before as that makes (of
    /// those that come after a rest, a tenth of a second's worth come at once); 0 ends that.
    ///
    /// # Errors
    ///
    /// When there is no such drive, with what QEMU said.
    pub fn slow_nvme_drive(&self, drive: usize, iops: u32) -> Result<()> {
        let mut limits = json!({ "id": format!("drive-{drive}"), "iops": iops });
        for none in ["bps", "bps_rd", "bps_wr", "iops_rd", "iops_wr"] {
            limits[none] = json!(0);
        }
        self.qmp("block_set_io_throttle", &limits)
            .with_context(|| format!("cannot slow down the VM's drive {drive}"))
    }

    /// Has QEMU execute a command of its machine protocol.
    fn qmp(&self, command: &str, arguments: &Value) -> Result<()> {
        let path = self.qmp_socket();
        let socket = UnixStream::connect(&path).with_context(|| path.display().to_string())?;
        socket.set_read_timeout(Some(SHORT))?;
        let mut answers = BufReader::new(socket.try_clone()?).lines();
        let ours = json!({ "execute": command, "arguments": arguments });
        for command in [json!({ "execute": "qmp_capabilities" }), ours] {
            writeln!(&socket, "{command}")?;
            // Its greeting and events come between.
            loop {
                let line = answers.next().context("QEMU closed its socket")??;
                if line.starts_with("{\"return\"") {
                    break;
                }
                ensure!(!line.starts_with("{\"error\""), "{command}: {line}");
            }
        }
        Ok(())
    }

    /// How long the emulator could not run until now though it had to: what its threads waited for one of the machine's
    /// CPUs, and what was taken from these CPUs themselves (steal). None where the machine does not tell.
    pub fn starved(&self) -> Option<Duration> {
        let mut waited = 0;
        for thread in fs::read_dir(format!("/proc/{}/task", self.pid())).ok()? {
            let file = thread.ok()?.path().join("schedstat");
            // A thread of its pool may be over by now.
            let Ok(text) = fs::read_to_string(file) else { continue };
            waited += run_delay(&text)?;
        }
        Some(Duration::from_nanos(waited) + stolen(&fs::read_to_string("/proc/stat").ok()?)?)
    }
}

/// The nanoseconds that a thread waited for a CPU, the second of `/proc/PID/task/TID/schedstat`.
fn run_delay(schedstat: &str) -> Option<u64> {
    schedstat.split_whitespace().nth(1)?.parse().ok()
}

/// What was taken from a CPU on average, by the first line of `/proc/stat`: its eighth number, in hundredths of a second.
fn stolen(stat: &str) -> Option<Duration> {
    let all = stat.lines().next()?.strip_prefix("cpu ")?;
    let steal: u64 = all.split_whitespace().nth(7)?.parse().ok()?;
    let cpus = stat.lines().filter(|l| l.starts_with("cpu") && !l.starts_with("cpu ")).count().max(1);
    Some(Duration::from_millis(steal * 10) / u32::try_from(cpus).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_s_own_figures_are_read() {
        assert_eq!(run_delay("123 456 7\n"), Some(456));
        let stat = "cpu  10 0 5 900 3 0 1 60 0 0\ncpu0 5 0 3 450 1 0 1 40 0 0\ncpu1 5 0 2 450 2 0 0 20 0 0\nintr 5\n";
        assert_eq!(stolen(stat), Some(Duration::from_millis(300)));
        for wrong in ["", "cpu 1 2\n", "cpu x x x x x x x x\n", "intr 1\n"] {
            assert_eq!(stolen(wrong), None, "{wrong}");
        }
        assert_eq!(run_delay("1"), None);
    }
}
