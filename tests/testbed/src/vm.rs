//! A running VM: boot it, run commands in it, move files in and out, end it. It
//! knows nothing of NVMe.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, waitid};

use crate::image::{self, Contents, Program};
use crate::kernel::{self, Kernel};
use crate::wire::{self, Kind};

/// How long a boot may take: some seconds on an idle machine, many more on a busy one.
const BOOT: Duration = Duration::from_secs(180);

/// How long the helpers wait for what should take well under a second, on a machine that stands still for a while too.
pub const SHORT: Duration = Duration::from_secs(180);

/// How long it may take to go off.
const OFF: Duration = Duration::from_secs(120);

/// What a VM is to be, before it boots.
#[derive(Debug, Clone)]
pub struct Builder {
    kernel: Kernel,
    contents: Contents,
    memory_mb: u64,
    cpus: u32,
    forwards: Vec<u16>,
    kernel_options: Vec<String>,
    qemu_options: Vec<String>,
    drives_mb: Vec<u64>,
    counted_time: bool,
}

impl Builder {
    fn new(kernel: Kernel) -> Self {
        Self {
            kernel,
            contents: Contents::default(),
            memory_mb: 1024,
            cpus: 2,
            forwards: Vec::new(),
            kernel_options: Vec::new(),
            qemu_options: Vec::new(),
            drives_mb: Vec::new(),
            counted_time: false,
        }
    }

    /// Carries a program and its shared libraries, stripped. A path goes to `/usr/local/bin`; a bare
    /// name (`fio`, `tc`) is looked up in `PATH` and keeps its place.
    #[must_use]
    pub fn program(mut self, path: impl Into<PathBuf>) -> Self {
        self.contents.programs.push(Program { source: path.into(), keep_debug: false });
        self
    }

    /// Like [`Self::program`], with its symbols and debug information.
    #[must_use]
    pub fn program_with_debug(mut self, path: impl Into<PathBuf>) -> Self {
        self.contents.programs.push(Program { source: path.into(), keep_debug: true });
        self
    }

    /// Carries a file or a folder as `to`, an absolute path in the VM.
    #[must_use]
    pub fn file(mut self, source: impl Into<PathBuf>, to: impl Into<String>) -> Self {
        self.contents.files.push((source.into(), to.into()));
        self
    }

    /// Memory in MiB, 1024 unless said; what the carried programs take comes on top.
    #[must_use]
    pub fn memory_mb(mut self, memory: u64) -> Self {
        self.memory_mb = memory;
        self
    }

    /// Virtual CPUs, 2 unless said.
    #[must_use]
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Makes a TCP port of the VM reachable on the machine's 127.0.0.1; [`Vm::forwarded`] tells the
    /// machine's port.
    #[must_use]
    pub fn forward(mut self, port: u16) -> Self {
        self.forwards.push(port);
        self
    }

    /// Adds an option to the kernel's command line.
    #[must_use]
    pub fn kernel_option(mut self, option: impl Into<String>) -> Self {
        self.kernel_options.push(option.into());
        self
    }

    /// Adds an argument of QEMU, as for an emulated NVMe drive.
    #[must_use]
    pub fn qemu_option(mut self, option: impl Into<String>) -> Self {
        self.qemu_options.push(option.into());
        self
    }

    /// Adds an emulated NVMe drive on PCIe, of so many MiB, all zeroes, behind a port of its own with one lane of
    /// 2.5 GT/s. [`Vm::set_nvme_drive`] changes it.
    #[must_use]
    pub fn nvme_drive(mut self, size_mb: u64) -> Self {
        self.drives_mb.push(size_mb);
        self
    }

    /// Lets the VM's time be counted in instructions: each takes 1 ns, and when there is nothing to do it
    /// is at once the time of the next timer. What happens inside the VM then takes the same time whatever
    /// the machine is busy with, and a delay by a timer is that delay to within a few instructions. One CPU
    /// only: two can keep each other from running under QEMU before 8.1. Not for what waits on the machine
    /// (emulated drives, the network to outside): to the VM that may seem to take minutes.
    #[must_use]
    pub fn counted_time(mut self) -> Self {
        self.counted_time = true;
        self.cpus(1)
    }

    /// Fetches the kernel if need be, boots, and returns when the VM takes commands.
    ///
    /// # Errors
    ///
    /// When the kernel, QEMU or a program is missing, or the VM does not come up; the message then
    /// shows the end of its console.
    pub fn boot(self) -> Result<Vm> {
        let files = kernel::obtain(self.kernel)?;
        let folder = tempfile::Builder::new().prefix("testbed-").tempdir()?;
        let initramfs = folder.path().join("initramfs");
        let size = image::write(&initramfs, &files, &self.contents)?;
        let console = folder.path().join("console.log");
        let socket = folder.path().join("port");
        let listener = UnixListener::bind(&socket)?;

        let mut forwards = HashMap::new();
        let mut network = String::from("user,id=net");
        for port in &self.forwards {
            let outside = free_port()?;
            network.push_str(&format!(",hostfwd=tcp:127.0.0.1:{outside}-10.0.2.15:{port}"));
            forwards.insert(*port, outside);
        }
        let mut options = [
            "console=ttyS0",
            "panic=-1",
            "nowatchdog",
            "mitigations=off",
            "no_timer_check",
            "random.trust_cpu=on",
            "tsc=reliable",
            "net.ifnames=0",
            "loglevel=7",
        ]
        .join(" ");
        for option in &self.kernel_options {
            options.push(' ');
            options.push_str(option);
        }
        // Held twice while it is unpacked, and the root file system may fill half of the memory.
        let memory = self.memory_mb + 2 * size.div_ceil(1 << 20);

        let mut qemu = Command::new(QEMU);
        qemu.args(["-accel", ACCELERATION, "-cpu", "max,la57=off"])
            .args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot"])
            .args(["-smp", &self.cpus.to_string(), "-m", &memory.to_string()])
            .arg("-kernel")
            .arg(&files.image)
            .arg("-initrd")
            .arg(&initramfs)
            .args(["-append", &options])
            .args(["-chardev", &format!("file,id=console,path={}", console.display())])
            .args(["-serial", "chardev:console"])
            .args(["-chardev", &format!("socket,id=port,path={}", socket.display())])
            .args(["-device", "virtio-serial-pci"])
            .args(["-device", &format!("virtserialport,chardev=port,name={PORT}")])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", folder.path().join(QMP).display())])
            .args(["-netdev", &network, "-device", "virtio-net-pci,netdev=net,romfile="])
            .args(&self.qemu_options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::from(fs::File::create(folder.path().join("qemu.log"))?));
        for (n, size_mb) in self.drives_mb.iter().enumerate() {
            let file = folder.path().join(format!("drive{n}"));
            fs::File::create(&file)?.set_len(size_mb << 20)?;
            qemu.args(["-drive", &format!("file={},if=none,format=raw,id=drive{n}", file.display())])
                .args(["-device", &format!("pcie-root-port,id=port{n},chassis={n}")])
                .args([
                    "-device",
                    &format!("nvme,id=drive-{n},bus=port{n},drive=drive{n},serial=testbed{n}"),
                ]);
        }
        // The other one has no PCIe.
        if !self.drives_mb.is_empty() {
            qemu.args(["-machine", "q35"]);
        }
        if self.counted_time {
            qemu.args(["-icount", "shift=0,sleep=off"]);
        }
        let qemu = Qemu::start(qemu)?;

        let mut vm = Vm {
            kernel: self.kernel,
            release: files.release,
            forwards,
            next_id: AtomicU32::new(1),
            link: None,
            qemu,
            console,
            folder,
        };
        let deadline = Instant::now() + BOOT;
        let link = vm
            .accept(&listener, deadline)
            .and_then(|stream| Link::start(stream, Arc::clone(&vm.qemu.gone)))
            .and_then(|link| link.hello(deadline).map(|()| link));
        match link {
            Ok(link) => {
                // The kernel has unpacked it.
                let _kept = fs::remove_file(&initramfs);
                vm.link = Some(link);
                Ok(vm)
            }
            Err(error) => Err(vm.explain(error.context(format!("kernel {} did not boot", vm.release)))),
        }
    }
}

/// The name of the virtio-serial port, by which `/init` finds it.
const PORT: &str = "fabscope.testbed";

/// QEMU's socket for its machine protocol, in the VM's folder.
const QMP: &str = "qmp";

/// One thread emulates all CPUs in turn. With a thread for each, QEMU before 8.1 can run code that
/// another CPU has just replaced (it translates without holding the page): kernels then die of a stray
/// int3 where a static key flips or a probe is attached.
const ACCELERATION: &str = "tcg,thread=single";

/// The emulator's program.
pub(crate) const QEMU: &str = "qemu-system-x86_64";

/// A TCP port that is free on 127.0.0.1 now.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// The emulator's process. A thread of its own starts it and waits for it: the kernel is asked to end
/// it when that thread ends, and so when this process is killed, but not when a test's thread is over.
struct Qemu {
    pid: nix::unistd::Pid,
    gone: Arc<Gone>,
}

/// Whether the emulator has ended.
#[derive(Debug, Default)]
struct Gone {
    status: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl Qemu {
    fn start(mut command: Command) -> Result<Self> {
        let gone = Arc::new(Gone::default());
        let (tell, told) = mpsc::channel();
        let waiter = Arc::clone(&gone);
        let parent = nix::unistd::getpid();
        // SAFETY: between fork and exec the closure makes two system calls and touches no memory that
        // another thread could hold locked.
        unsafe {
            command.pre_exec(move || {
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                if nix::unistd::getppid() == parent {
                    Ok(())
                } else {
                    Err(io::Error::from(io::ErrorKind::BrokenPipe))
                }
            });
        }
        thread::Builder::new().name("qemu".to_owned()).spawn(move || {
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(error) => {
                    let _nobody = tell.send(Err(error));
                    return;
                }
            };
            let _nobody = tell.send(Ok(child.id()));
            // It is reaped under the lock: while there is no status its id is nobody else's.
            let _ended = waitid(
                Id::Pid(nix::unistd::Pid::from_raw(child.id().cast_signed())),
                WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT,
            );
            let mut status = lock(&waiter.status);
            *status = Some(child.wait().unwrap_or_default());
            drop(status);
            waiter.changed.notify_all();
        })?;
        let pid = told
            .recv()
            .context("the thread that starts QEMU ended")?
            .with_context(|| format!("cannot start {QEMU}; install the package qemu-system-x86"))?;
        Ok(Self { pid: nix::unistd::Pid::from_raw(pid.cast_signed()), gone })
    }

    fn ended(&self) -> Option<ExitStatus> {
        *lock(&self.gone.status)
    }

    /// Waits until it has ended; false when it has not by then.
    fn wait(&self, timeout: Duration) -> bool {
        let status = lock(&self.gone.status);
        let (status, _) = self
            .gone
            .changed
            .wait_timeout_while(status, timeout, |status| status.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        status.is_some()
    }

    fn kill(&self) {
        let status = lock(&self.gone.status);
        if status.is_none() {
            let _gone = nix::sys::signal::kill(self.pid, Signal::SIGKILL);
        }
        drop(status);
        self.wait(Duration::from_secs(10));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a command has said so far.
#[derive(Debug, Default, Clone)]
struct Progress {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    status: Option<u32>,
}

#[derive(Debug, Default)]
struct State {
    commands: HashMap<u32, Progress>,
    hello: bool,
    /// Why no more will come.
    broken: Option<String>,
}

/// The connection to the agent.
struct Link {
    writer: Mutex<UnixStream>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Link {
    fn start(stream: UnixStream, gone: Arc<Gone>) -> Result<Self> {
        let mut reader = stream.try_clone()?;
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        thread::Builder::new().name("vm-port".to_owned()).spawn(move || {
            let why = loop {
                let frame = match wire::read_frame(&mut reader) {
                    Ok(frame) => frame,
                    Err(error) => break error.to_string(),
                };
                let mut state = lock(&theirs.state);
                match frame.kind {
                    Kind::Hello => state.hello = true,
                    Kind::Stdout | Kind::Stderr | Kind::Exit => {
                        // One that nobody waits for any more is dropped.
                        if let Some(command) = state.commands.get_mut(&frame.id) {
                            match (frame.kind, frame.payload.as_slice()) {
                                (Kind::Stdout, bytes) => command.stdout.extend_from_slice(bytes),
                                (Kind::Stderr, bytes) => command.stderr.extend_from_slice(bytes),
                                (_, [a, b, c, d]) => {
                                    command.status = Some(u32::from_le_bytes([*a, *b, *c, *d]));
                                }
                                _ => break "an exit frame of the wrong size".to_owned(),
                            }
                        }
                    }
                    Kind::Exec | Kind::Stdin | Kind::Signal => {
                        break format!("{:?} came from the VM", frame.kind);
                    }
                }
                drop(state);
                theirs.changed.notify_all();
            };
            let status = *lock(&gone.status);
            lock(&theirs.state).broken = Some(match status {
                Some(status) => format!("the VM has ended ({status})"),
                None => format!("the VM's port closed ({why})"),
            });
            theirs.changed.notify_all();
        })?;
        Ok(Self { writer: Mutex::new(stream), shared })
    }

    fn hello(&self, deadline: Instant) -> Result<()> {
        self.wait(deadline, |state| state.hello.then_some(()))?
            .ok_or_else(|| anyhow!("its agent did not answer in {} s", BOOT.as_secs()))
    }

    fn send(&self, kind: Kind, id: u32, payload: &[u8]) -> Result<()> {
        wire::write_frame(&mut *lock(&self.writer), kind, id, payload)
            .context("the VM takes no more commands")
    }

    /// Waits until `ready` finds something; none at the deadline, an error when the VM is gone.
    fn wait<T>(&self, deadline: Instant, ready: impl Fn(&State) -> Option<T>) -> Result<Option<T>> {
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(found) = ready(&state) {
                return Ok(Some(found));
            }
            if let Some(why) = &state.broken {
                bail!("{why}");
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Ok(None);
            };
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What a command printed and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// The exit status; 128 plus the signal's number where a signal ended it, as in a shell.
    pub status: u32,
}

impl Output {
    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard error as text.
    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// Itself when the status is 0.
    ///
    /// # Errors
    ///
    /// With status and output when it is not.
    pub fn check(self) -> Result<Self> {
        if self.status == 0 {
            return Ok(self);
        }
        bail!("status {}\nstdout: {}\nstderr: {}", self.status, self.text(), self.errors())
    }
}

/// A VM that takes commands. Dropping it ends it.
pub struct Vm {
    kernel: Kernel,
    release: String,
    forwards: HashMap<u16, u16>,
    next_id: AtomicU32,
    /// None only while it boots.
    link: Option<Link>,
    qemu: Qemu,
    console: PathBuf,
    /// Console log and sockets, removed with the VM.
    folder: tempfile::TempDir,
}

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("release", &self.release)
            .field("qemu", &self.qemu.pid)
            .finish_non_exhaustive()
    }
}

impl Vm {
    /// A VM of 2 CPUs and 1 GiB, to be changed before [`Builder::boot`].
    pub fn builder(kernel: Kernel) -> Builder {
        Builder::new(kernel)
    }

    /// The kernel that was asked for.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// The kernel's name for itself, as `uname -r` prints it.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The port on the machine's 127.0.0.1 that leads to this port of the VM.
    pub fn forwarded(&self, port: u16) -> Option<u16> {
        self.forwards.get(&port).copied()
    }

    /// The emulator's process.
    pub(crate) fn pid(&self) -> nix::unistd::Pid {
        self.qemu.pid
    }

    /// Where QEMU takes commands of its machine protocol.
    pub(crate) fn qmp_socket(&self) -> PathBuf {
        self.folder.path().join(QMP)
    }

    /// What the kernel has printed.
    pub fn console(&self) -> String {
        fs::read(&self.console)
            .map(|bytes| String::from_utf8_lossy(&bytes).replace('\r', ""))
            .unwrap_or_default()
    }

    /// Runs a command with `/bin/sh -c` and waits for it and its output. A status other than 0 is not
    /// an error here; [`Output::check`] makes it one.
    ///
    /// # Errors
    ///
    /// When it takes longer than `timeout` (it and its children are killed), or the VM ends; with
    /// what it printed until then.
    pub fn run(&self, command: &str, timeout: Duration) -> Result<Output> {
        self.spawn(command)?.wait(timeout)
    }

    /// Runs a command that should succeed within a minute, and returns its standard output.
    ///
    /// # Errors
    ///
    /// As [`Self::run`], and when its status is not 0.
    pub fn sh(&self, command: &str) -> Result<String> {
        let output = self.run(command, SHORT)?.check().with_context(|| format!("in the VM: {command}"))?;
        Ok(output.text())
    }

    /// Starts a command with `/bin/sh -c`, its standard input open and empty.
    ///
    /// # Errors
    ///
    /// When the VM is gone.
    pub fn spawn(&self, command: &str) -> Result<Running<'_>> {
        let link = self.link()?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        lock(&link.shared.state).commands.insert(id, Progress::default());
        let running = Running { vm: self, link, id, command: command.to_owned() };
        link.send(Kind::Exec, id, command.as_bytes()).map_err(|error| self.explain(error))?;
        Ok(running)
    }

    /// Copies a file or a folder of the VM into `into`, a folder of the machine (made if need be),
    /// under its own name; returns where it is.
    ///
    /// # Errors
    ///
    /// When it is not there or cannot be written here.
    pub fn pull(&self, from: &str, into: &Path) -> Result<PathBuf> {
        fs::create_dir_all(into)?;
        let (folder, name) = match from.trim_end_matches('/').rsplit_once('/') {
            Some(("", name)) => ("/", name),
            Some((folder, name)) => (folder, name),
            None => ("/", from),
        };
        let output = self
            .run(&format!("tar -c -C {} -- {}", quote(folder), quote(name)), Duration::from_secs(300))?
            .check()
            .with_context(|| format!("cannot read {from} in the VM"))?;
        let mut tar = Command::new("tar")
            .args(["-x", "--no-same-owner", "-C"])
            .arg(into)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("tar")?;
        if let Some(mut stdin) = tar.stdin.take() {
            stdin.write_all(&output.stdout).with_context(|| format!("tar -x in {}", into.display()))?;
        }
        let ended = tar.wait_with_output()?;
        if !ended.status.success() {
            bail!("tar -x in {}: {}", into.display(), String::from_utf8_lossy(&ended.stderr).trim());
        }
        Ok(into.join(name))
    }

    /// Copies a file or a folder of the machine into the VM as `to`, an absolute path.
    ///
    /// # Errors
    ///
    /// When it is not there, or the VM's memory is full.
    pub fn push(&self, from: &Path, to: &str) -> Result<()> {
        let context = || format!("cannot copy {} to {to} in the VM", from.display());
        let is_dir = fs::metadata(from).with_context(context)?.is_dir();
        let command = if is_dir {
            format!("mkdir -p {0} && tar -x -C {0}", quote(to))
        } else {
            let folder = to.rsplit_once('/').map_or("/", |(folder, _)| folder);
            format!("mkdir -p {}/ && cat > {}", quote(folder), quote(to))
        };
        let running = self.spawn(&command)?;
        if is_dir {
            let mut tar = Command::new("tar")
                .arg("-c")
                .arg("-C")
                .arg(from)
                .arg(".")
                .stdout(Stdio::piped())
                .spawn()
                .context("tar")?;
            if let Some(mut stdout) = tar.stdout.take() {
                running.feed(&mut stdout).with_context(context)?;
            }
            if !tar.wait()?.success() {
                bail!("{}: tar failed on this machine", context());
            }
        } else {
            running.feed(&mut fs::File::open(from)?).with_context(context)?;
        }
        running.close_stdin()?;
        running.wait(Duration::from_secs(300))?.check().with_context(context)?;
        if !is_dir {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(from)?.permissions().mode() & 0o7777;
            self.sh(&format!("chmod {mode:o} {}", quote(to)))?;
        }
        Ok(())
    }

    /// Turns the VM off and waits until it is.
    ///
    /// # Errors
    ///
    /// When it has not gone off after some seconds; it is killed then.
    pub fn shutdown(self) -> Result<()> {
        // The command's end is not reported any more.
        let _running = self.spawn("sync; poweroff -f")?;
        if self.qemu.wait(OFF) {
            return Ok(());
        }
        Err(self.explain(anyhow!("the VM did not turn itself off in {OFF:?} and was killed")))
    }

    fn link(&self) -> Result<&Link> {
        self.link.as_ref().context("the VM has not booted")
    }

    /// Adds the end of the console to an error.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let qemu = fs::read_to_string(self.folder.path().join("qemu.log")).unwrap_or_default();
        let console = self.console();
        let lines: Vec<&str> = console.lines().collect();
        let tail = lines[lines.len().saturating_sub(40)..].join("\n");
        let ended = match self.qemu.ended() {
            Some(status) => format!("QEMU has ended: {status}"),
            None => "QEMU runs".to_owned(),
        };
        anyhow!("{error:#}\n{ended}\n{qemu}--- the VM's console, its end:\n{tail}")
    }

    fn accept(&self, listener: &UnixListener, deadline: Instant) -> Result<UnixStream> {
        listener.set_nonblocking(true)?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.qemu.ended().is_some() {
                        bail!("QEMU ended at once");
                    }
                    if Instant::now() > deadline {
                        bail!("QEMU did not open its port");
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.qemu.kill();
    }
}

/// A command that runs in the VM. Dropping it leaves it running there, unheard.
pub struct Running<'vm> {
    vm: &'vm Vm,
    link: &'vm Link,
    id: u32,
    command: String,
}

impl fmt::Debug for Running<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("id", &self.id).field("command", &self.command).finish()
    }
}

impl Running<'_> {
    /// Waits for the command and its output.
    ///
    /// # Errors
    ///
    /// When it takes longer than `timeout` (it and its children are killed), or the VM ends; with
    /// what it printed until then.
    pub fn wait(self, timeout: Duration) -> Result<Output> {
        let ended = |state: &State| state.commands.get(&self.id).and_then(|c| c.status);
        let status = match self.link.wait(Instant::now() + timeout, ended) {
            Ok(Some(status)) => status,
            Ok(None) => {
                self.signal(Signal::SIGKILL)?;
                let killed = self.link.wait(Instant::now() + Duration::from_secs(10), ended);
                return Err(self.failed(match killed {
                    Ok(Some(_)) => anyhow!("took longer than {timeout:?} and was killed"),
                    Ok(None) => anyhow!("took longer than {timeout:?} and could not be killed"),
                    Err(error) => error,
                }));
            }
            Err(error) => return Err(self.failed(error)),
        };
        let said = self.progress();
        Ok(Output { stdout: said.stdout, stderr: said.stderr, status })
    }

    /// Waits until standard output or standard error holds `text`.
    ///
    /// # Errors
    ///
    /// When the command ends or `timeout` is over without it.
    pub fn wait_for(&self, text: &str, timeout: Duration) -> Result<()> {
        let found = self.link.wait(Instant::now() + timeout, |state| {
            let command = state.commands.get(&self.id)?;
            if contains(&command.stdout, text) || contains(&command.stderr, text) {
                Some(true)
            } else {
                command.status.is_some().then_some(false)
            }
        });
        match found {
            Ok(Some(true)) => Ok(()),
            Ok(Some(false)) => Err(self.failed(anyhow!("ended without printing {text:?}"))),
            Ok(None) => Err(self.failed(anyhow!("did not print {text:?} in {timeout:?}"))),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Whether it has not ended yet.
    pub fn is_running(&self) -> bool {
        self.progress().status.is_none()
    }

    /// Standard output until now.
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.progress().stdout).into_owned()
    }

    /// Standard error until now.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.progress().stderr).into_owned()
    }

    /// Sends a signal to the command and its children.
    ///
    /// # Errors
    ///
    /// When the VM is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.link.send(Kind::Signal, self.id, &[signal as u8])
    }

    /// Writes to the command's standard input.
    ///
    /// # Errors
    ///
    /// When the VM is gone; what a command does not read is dropped silently.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        for part in bytes.chunks(wire::MAX_PAYLOAD) {
            self.link.send(Kind::Stdin, self.id, part)?;
        }
        Ok(())
    }

    /// Ends the command's standard input.
    ///
    /// # Errors
    ///
    /// When the VM is gone.
    pub fn close_stdin(&self) -> Result<()> {
        self.link.send(Kind::Stdin, self.id, &[])
    }

    fn feed(&self, from: &mut impl io::Read) -> Result<()> {
        let mut buffer = vec![0u8; wire::MAX_PAYLOAD];
        loop {
            match from.read(&mut buffer)? {
                0 => return Ok(()),
                n => self.write(&buffer[..n])?,
            }
        }
    }

    fn progress(&self) -> Progress {
        lock(&self.link.shared.state).commands.get(&self.id).cloned().unwrap_or_default()
    }

    fn failed(&self, error: anyhow::Error) -> anyhow::Error {
        let said = self.progress();
        self.vm.explain(anyhow!(
            "in the VM: {}: {error:#}\nstdout: {}\nstderr: {}",
            self.command,
            String::from_utf8_lossy(&said.stdout),
            String::from_utf8_lossy(&said.stderr)
        ))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(&self.link.shared.state).commands.remove(&self.id);
    }
}

fn contains(bytes: &[u8], text: &str) -> bool {
    text.is_empty() || bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// A word for the shell.
pub(crate) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shell_sees_a_quoted_word_as_it_is() {
        for word in ["plain", "it's", "a b", "$HOME `x` \"y\" \\", ""] {
            let output =
                Command::new("sh").arg("-c").arg(format!("printf %s {}", quote(word))).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }
}
