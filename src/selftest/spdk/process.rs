//! Starts a real SPDK application, steers it over its RPC, and ends it with all that it leaves. It knows no fault.

use crate::signals::Signals;
use anyhow::{Context, Result, bail, ensure};
use nix::libc;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use spdk_probes::Rpc;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long it may take to answer its RPC.
const SOON: Duration = Duration::from_secs(60);
/// How long it may take to end by itself.
const GRACE: Duration = Duration::from_secs(15);
/// MiB of memory for each: what bdevperf's pools take at least.
const MEMORY: &str = "512";
/// The last lines of a log that are told.
const LAST_LINES: usize = 8;

/// A running SPDK application. It is ended when this is dropped, and ends when the thread that started it does.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    log: PathBuf,
    rpc: Rpc,
}

/// How to start one.
#[derive(Debug)]
pub struct Start<'a> {
    /// The program.
    pub program: &'a Path,
    /// Where its socket and its log go.
    pub folder: &'a Path,
    /// The CPU that it takes whole.
    pub cpu: usize,
    /// Its further options.
    pub options: &'a [&'a str],
    /// Calls before its subsystems start; those that are made while they do come later.
    pub startup: &'a [(&'static str, Value)],
}

impl Process {
    /// Starts it without huge pages and waits until it answers.
    ///
    /// # Errors
    /// It is not there, ends, does not answer, or refuses a call: with the last lines that it wrote. A signal came.
    pub fn start(how: &Start<'_>, signals: &Signals) -> Result<Process> {
        let name = how.program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let socket = how.folder.join(format!("{name}.sock"));
        let log = how.folder.join(format!("{name}.log"));
        let file = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = Command::new(how.program);
        command.args(["--no-huge", "-s", MEMORY, "-m", &format!("[{}]", how.cpu), "--disable-cpumask-locks"]);
        command.arg("-r").arg(&socket).args(how.options);
        if !how.startup.is_empty() {
            command.arg("--wait-for-rpc");
        }
        command.stdin(Stdio::null()).stdout(file.try_clone().context("its log")?).stderr(file);
        // A Ctrl-C in the terminal is ours alone: it is ended in order.
        command.process_group(0);
        // SAFETY: prctl(2) and setpriority(2) are all that is called in the child, and nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                // As on a core of its own, where SPDK belongs: the recorder's threads take their time from it otherwise.
                // Without the right to it, it is as busy as the machine is.
                libc::setpriority(libc::PRIO_PROCESS, 0, standin::cpus::FIRST);
                // Nothing of it stays behind where this program is killed.
                Ok(set_pdeathsig(Signal::SIGKILL)?)
            });
        }
        let child = command.spawn().with_context(|| format!("start {}", how.program.display()))?;
        let mut process = Process { child, name, log, rpc: Rpc::new(&socket) };
        process.wait_until_it_answers(signals)?;
        for (method, params) in how.startup {
            process.call(method, params.clone())?;
        }
        if !how.startup.is_empty() {
            process.call("framework_start_init", Value::Null)?;
        }
        process.call("framework_wait_init", Value::Null)?;
        Ok(process)
    }

    fn wait_until_it_answers(&mut self, signals: &Signals) -> Result<()> {
        let deadline = Instant::now() + SOON;
        while self.rpc.call("rpc_get_methods", None).is_err() {
            if let Some(status) = self.child.try_wait().context("wait for it")? {
                bail!("{} ended ({status}) before it answered its RPC socket{}", self.name, self.said());
            }
            ensure!(signals.came().is_none(), "ended by a signal");
            if Instant::now() > deadline {
                bail!("{} did not answer its RPC socket within {SOON:?}{}", self.name, self.said());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Calls a method; no parameters are null.
    ///
    /// # Errors
    /// It is refused, or there is no answer: with the last lines of what the process wrote.
    pub fn call(&self, method: &str, params: Value) -> Result<Value> {
        self.call_within(SOON, method, params)
    }

    /// The same, with how long it may take.
    ///
    /// # Errors
    /// As [`Process::call`].
    pub fn call_within(&self, within: Duration, method: &str, params: Value) -> Result<Value> {
        let params = (!params.is_null()).then_some(params);
        self.rpc.call_within(within, method, params).with_context(|| format!("{}{}", self.name, self.said()))
    }

    /// Ends it in order.
    ///
    /// # Errors
    /// It ended by itself, with an error, or not at all.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if self.child.try_wait().context("wait for it")?.is_none() {
            let pid = i32::try_from(self.child.id()).context("a process number")?;
            kill(Pid::from_raw(pid), Signal::SIGTERM).with_context(|| format!("end {}", self.name))?;
        }
        let deadline = Instant::now() + GRACE;
        let ended = loop {
            match self.child.try_wait().context("wait for it")? {
                Some(status) => break Some(status),
                None if Instant::now() > deadline => break None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        if ended.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        self.remove_leftovers();
        match ended {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("{} ended with {status}{}", self.name, self.said()),
            None => bail!("{} did not end within {GRACE:?} of SIGTERM{}", self.name, self.said()),
        }
    }

    /// DPDK's folder and the trace's shared memory, which stay behind each time.
    fn remove_leftovers(&self) {
        let pid = self.child.id();
        let _ = std::fs::remove_dir_all(format!("/var/run/dpdk/spdk_pid{pid}"));
        for name in ["nvmf", &self.name] {
            let _ = std::fs::remove_file(format!("/dev/shm/{name}_trace.pid{pid}"));
        }
    }

    /// The last lines of its log, for the end of a message.
    fn said(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        last_lines(&String::from_utf8_lossy(&log))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // After `stop` this finds the process gone.
        let _ = self.end();
    }
}

fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines.get(lines.len().saturating_sub(LAST_LINES)..).unwrap_or_default();
    if last.is_empty() {
        "; it wrote nothing".to_owned()
    } else {
        format!("; it wrote:\n  {}", last.join("\n  "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A program that is a shell script.
    fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn start(folder: &Path, program: &Path) -> String {
        let how = Start { program, folder, cpu: 0, options: &["-x"], startup: &[] };
        format!("{:#}", Process::start(&how, &Signals::uncaught()).unwrap_err())
    }

    #[test]
    fn what_does_not_start_is_told_with_what_it_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let said = start(folder, &folder.join("nvmf_tgt"));
        assert!(said.contains("start ") && said.contains("No such file"), "{said}");
        let said = start(folder, &script(folder, "nvmf_tgt", "echo args: $@\necho no hugepages >&2\nexit 3"));
        for part in ["nvmf_tgt ended (exit status: 3)", "no hugepages", "args: --no-huge", "-m [0]", "-x"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let said = start(folder, &script(folder, "silent", "exit 0"));
        assert!(said.contains("silent ended") && said.contains("it wrote nothing"), "{said}");
    }

    #[test]
    fn a_signal_ends_the_waiting_and_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let program = script(folder, "nvmf_tgt", "echo $$ > pid\nexec sleep 100");
        let how = Start { program: &program, folder, cpu: 0, options: &[], startup: &[] };
        let signals = Signals::uncaught();
        signals.raise();
        let said = Process::start(&how, &signals).unwrap_err().to_string();
        assert!(said.contains("ended by a signal"), "{said}");
    }

    #[test]
    fn only_the_last_lines_are_told() {
        let log: String = (0..20).map(|n| format!("line {n}\n\n")).collect();
        let told = last_lines(&log);
        assert!(told.contains("line 19") && told.contains("line 12") && !told.contains("line 11"), "{told}");
    }
}
