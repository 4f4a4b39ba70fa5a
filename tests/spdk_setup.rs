//! The commands of `scripts/spdk-setup`: usage, `check` on programs of every kind, starting and
//! stopping targets without ever touching a process that is not theirs, and connecting a kernel host
//! in a VM. With `SPDK_BUILD` set to an SPDK build's directory, a real `nvmf_tgt` is started as well.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::{Kernel, Vm};

const COMMANDS: [&str; 6] =
    ["check", "start-target", "stop-target", "connect-host", "disconnect-host", "rpc"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/spdk-setup")
}

/// What a command left behind.
#[derive(Debug)]
struct Outcome {
    status: i32,
    stdout: String,
    stderr: String,
}

impl Outcome {
    /// Fails unless the status is this one and the output holds these texts.
    fn expect(self, status: i32, texts: &[&str]) -> Result<Self> {
        ensure!(self.status == status, "status {status} was expected: {self:#?}");
        for text in texts {
            ensure!(
                self.stdout.contains(text) || self.stderr.contains(text),
                "{text:?} was expected: {self:#?}"
            );
        }
        Ok(self)
    }
}

fn outcome(command: &mut Command) -> Result<Outcome> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("running {command:?}"))?;
    Ok(Outcome {
        status: output.status.code().context("ended by a signal")?,
        stdout: String::from_utf8(output.stdout)?,
        stderr: String::from_utf8(output.stderr)?,
    })
}

fn command(name: &str) -> Command {
    let mut command = Command::new(folder().join(name));
    command.env_remove("SPDK_BUILD").env_remove("FABSCOPE_STATE").env_remove("LD_LIBRARY_PATH");
    command
}

fn run<S: AsRef<std::ffi::OsStr>>(name: &str, arguments: &[S]) -> Result<Outcome> {
    outcome(command(name).args(arguments))
}

/// Says that something was not tested, and why, past the test runner's capture.
fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

fn is_installed(program: &str) -> bool {
    Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[test]
fn every_command_explains_itself() -> Result<()> {
    for name in COMMANDS {
        for flag in ["--help", "-h"] {
            let help =
                run(name, &[flag])?.expect(0, &[&format!("Usage: {name}"), "Examples:", "Exit status:"])?;
            ensure!(help.stderr.is_empty(), "{name} {flag}: {help:#?}");
            ensure!(
                help.stdout.lines().all(|line| line.len() <= 110),
                "{name} {flag} has lines too long to read"
            );
        }
    }
    Ok(())
}

#[test]
fn wrong_usage_is_told_and_exits_with_2() -> Result<()> {
    let cases: &[(&str, &[&str], &str)] = &[
        ("check", &["--colour"], "unknown option --colour"),
        ("check", &["a", "b"], "one PID or PATH"),
        ("check", &["--format", "xml"], "neither table nor json"),
        ("check", &["--format"], "--format needs a value"),
        ("check", &[""], "empty"),
        ("start-target", &[], "say which SPDK"),
        ("start-target", &["--spdk-build", "/a", "--nvmf-tgt", "/b"], "not both"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--bdev", "malloc:64"], "K, M, G or T"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--bdev", "malloc:0M"], "K, M, G or T"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--bdev", "floppy:1"], "the kinds are"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--bdev", "delay:5:null:1G"], "no time"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--bdev", "delay:5us"], "the kinds are"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--bdev", "pcie:1:0"], "no PCI address"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--listen", "4420"], "ADDRESS:PORT"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--listen", "127.0.0.1:70000"], "ADDRESS:PORT"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--listen", "::1:4420"], "[ADDRESS]:PORT"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--nqn", "cnode1"], "is no NQN"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--cores", "all"], "core mask"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--name", "../x"], "--name"),
        ("start-target", &["--nvmf-tgt", "/bin/true", "--transport", "x"], "KEY:=JSON"),
        ("start-target", &["malloc:64M"], "unexpected argument"),
        ("stop-target", &["--name", "a", "--all"], "not both"),
        ("stop-target", &["--name", "a/b"], "no target's name"),
        ("stop-target", &["--grace", "soon"], "number of seconds"),
        ("connect-host", &["--address", "127.0.0.1"], "which subsystem"),
        ("connect-host", &["--nqn", "nqn.2024-01.io.fabscope:x"], "where is it"),
        ("connect-host", &["--nqn", "nqn.a,nr_io_queues=1", "--address", "127.0.0.1"], "is no NQN"),
        ("connect-host", &["--nqn", "nqn.x", "--address", "a,b"], "no IP address"),
        ("connect-host", &["--nqn", "nqn.x", "--address", "::1", "--port", "0"], "no port"),
        ("connect-host", &["--nqn", "nqn.x", "--address", "::1", "--io-queues", "0"], "number of queues"),
        ("disconnect-host", &["--nqn"], "--nqn needs a value"),
        ("disconnect-host", &["now"], "unexpected argument"),
        ("rpc", &[], "which method"),
        ("rpc", &["--timeout", "0", "x"], "number of seconds"),
        ("rpc", &["rm -rf"], "no method's name"),
        ("rpc", &["m", "novalue"], "neither KEY=VALUE nor KEY:=JSON"),
        ("rpc", &["m", "key:=nojson"], "no JSON"),
        ("rpc", &["m", "key=1", "key=2"], "given twice"),
        ("rpc", &["m", "{"], "no JSON"),
    ];
    for (name, arguments, text) in cases {
        let outcome = run(name, arguments)?.expect(2, &[text, "--help"])?;
        ensure!(outcome.stdout.is_empty(), "{name} {arguments:?}: {outcome:#?}");
    }
    Ok(())
}

#[test]
fn the_scripts_parse_and_shellcheck_has_nothing_to_say() -> Result<()> {
    let bash = ["check", "start-target", "stop-target"];
    let posix = ["connect-host", "disconnect-host", "lib.sh", "host.sh"];
    for (shell, names) in [("bash", &bash[..]), ("sh", &posix[..])] {
        for name in names {
            outcome(Command::new(shell).arg("-n").arg(folder().join(name)))?.expect(0, &[])?;
        }
    }
    if is_installed("busybox") {
        for name in posix {
            outcome(Command::new("busybox").args(["sh", "-n"]).arg(folder().join(name)))?.expect(0, &[])?;
        }
    } else {
        skipped("busybox is not installed");
    }
    if is_installed("shellcheck") {
        let files = bash.iter().chain(&posix).map(|name| folder().join(name));
        outcome(Command::new("shellcheck").arg("-x").args(files))?.expect(0, &[])?;
    } else {
        skipped("shellcheck is not installed");
    }
    Ok(())
}

/// The functions by which a target is recorded, best first where there are several for a boundary.
const FUNCTIONS: [&str; 4] =
    ["nvmf_tcp_req_process", "spdk_nvmf_request_exec", "bdev_io_submit", "spdk_nvmf_request_complete"];

/// Compiles a program that has functions of these names and then waits for ever.
fn fixture(folder: &Path, name: &str, functions: &[&str], flags: &[&str]) -> Result<PathBuf> {
    let mut source =
        String::from("#include <unistd.h>\nconst char version[] = \"SPDK v99.01 git sha1 0123abcd\";\n");
    for function in functions {
        source.push_str(&format!("void {function}(void) {{ __asm__ volatile(\"\"); }}\n"));
    }
    source.push_str("int main(void) { pause(); return version[0] == 0; }\n");
    compile(folder, name, &source, flags)
}

fn compile(folder: &Path, name: &str, source: &str, flags: &[&str]) -> Result<PathBuf> {
    let file = folder.join(format!("{name}.c"));
    fs::write(&file, source)?;
    let program = folder.join(name);
    let mut compiler = Command::new("cc");
    compiler.arg("-Wl,--build-id").arg("-o").arg(&program).arg(&file).args(flags);
    outcome(&mut compiler)?.expect(0, &[])?;
    Ok(program)
}

/// What `check --format json` says: the state, the finding and the hint of every check.
struct Checked {
    status: i32,
    recordable: bool,
    rows: BTreeMap<String, (String, String, String)>,
}

impl Checked {
    fn state(&self, name: &str) -> &str {
        self.rows.get(name).map_or("", |row| &row.0)
    }

    fn finding(&self, name: &str) -> &str {
        self.rows.get(name).map_or("", |row| &row.1)
    }

    fn hint(&self, name: &str) -> &str {
        self.rows.get(name).map_or("", |row| &row.2)
    }
}

fn check(subject: impl AsRef<std::ffi::OsStr>) -> Result<Checked> {
    let outcome = outcome(command("check").args(["--format", "json"]).arg(subject))?;
    let answer: Value = serde_json::from_str(&outcome.stdout).with_context(|| format!("{outcome:#?}"))?;
    ensure!(answer["format"] == "fabscope-check/1", "{answer}");
    let recordable = answer["recordable"].as_bool().context("recordable is no boolean")?;
    let mut rows = BTreeMap::new();
    for row in answer["checks"].as_array().context("no checks")? {
        let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
        ensure!(["ok", "note", "warn", "fail"].contains(&text("state").as_str()), "{row}");
        ensure!(!text("finding").is_empty(), "{row}");
        rows.insert(text("name"), (text("state"), text("finding"), text("hint")));
    }
    ensure!(recordable == rows.values().all(|row| row.0 != "fail"), "{answer:#}");
    ensure!(outcome.status == i32::from(!recordable), "{outcome:#?}");
    Ok(Checked { status: outcome.status, recordable, rows })
}

#[test]
fn check_refuses_what_is_no_spdk_program() -> Result<()> {
    let here = TempDir::new()?;
    run("check", &["/nonexistent/nvmf_tgt"])?.expect(1, &["there is no /nonexistent/nvmf_tgt"])?;
    run("check", &["999999999"])?.expect(1, &["no process 999999999"])?;
    outcome(command("check").arg(here.path()))?.expect(1, &["no nvmf_tgt under"])?;

    let script = here.path().join("a \"quoted\" name");
    fs::write(&script, "#!/bin/sh\n")?;
    let script = check(&script)?;
    assert_eq!((script.status, script.state("file")), (1, "fail"));
    assert!(script.finding("file").contains("no ELF"), "{}", script.finding("file"));

    fs::write(here.path().join("short"), b"\x7fELF")?;
    assert_eq!(check(here.path().join("short"))?.state("file"), "fail");

    // This very test is a program, and none of SPDK's: the names that it holds are text.
    let own = compile(here.path(), "own", "int main(void) { return 0; }", &[])?;
    let own = check(own)?;
    assert_eq!((own.status, own.state("file"), own.state("version")), (1, "ok", "fail"));
    assert!(own.finding("version").contains("not SPDK"), "{}", own.finding("version"));
    Ok(())
}

#[test]
fn check_tells_a_stripped_program_from_a_whole_one() -> Result<()> {
    let here = TempDir::new()?;
    let whole = fixture(here.path(), "nvmf_tgt", &FUNCTIONS, &["-g"])?;
    let checked = check(&whole)?;
    for name in ["file", "version", "symbols", "functions", "debug", "build-id"] {
        assert_eq!(checked.state(name), "ok", "{name}: {}", checked.finding(name));
    }
    assert_eq!(checked.finding("version"), "SPDK v99.01 git sha1 0123abcd");
    assert_eq!(checked.state("usdt"), "warn");
    assert!(checked.hint("usdt").contains("--with-usdt"));
    // Whether the rest of the machine is fit is its own matter, but the two must agree.
    assert_eq!(checked.recordable, checked.status == 0);

    let stripped = here.path().join("stripped");
    outcome(Command::new("strip").arg("-s").arg("-o").arg(&stripped).arg(&whole))?.expect(0, &[])?;
    let checked = check(&stripped)?;
    assert_eq!(checked.status, 1);
    for name in ["symbols", "functions", "debug"] {
        assert_eq!(checked.state(name), "fail", "{name}: {}", checked.finding(name));
    }
    let id = checked.finding("build-id");
    assert_eq!(id.len(), 40, "{id}");
    // Where the debug file has to be is said to the letter.
    assert!(checked.hint("symbols").contains(&format!(".build-id/{}/{}.debug", &id[..2], &id[2..])));

    // The same program with its debug file beside it.
    let debug = here.path().join(".debug");
    fs::create_dir(&debug)?;
    outcome(Command::new("objcopy").arg("--only-keep-debug").arg(&whole).arg(debug.join("nvmf.debug")))?
        .expect(0, &[])?;
    outcome(
        Command::new("objcopy").current_dir(&debug).arg("--add-gnu-debuglink=nvmf.debug").arg(&stripped),
    )?
    .expect(0, &[])?;
    let checked = check(&stripped)?;
    for name in ["symbols", "functions", "debug"] {
        assert_eq!(checked.state(name), "ok", "{name}: {}", checked.finding(name));
    }
    assert!(checked.finding("debug-file").ends_with(".debug/nvmf.debug"));

    let no_debug = fixture(here.path(), "no_debug", &FUNCTIONS, &["-g0"])?;
    let checked = check(no_debug)?;
    assert_eq!((checked.state("symbols"), checked.state("debug")), ("ok", "fail"));
    Ok(())
}

#[test]
fn check_names_the_boundaries_that_a_build_cannot_time() -> Result<()> {
    let here = TempDir::new()?;
    let host = fixture(here.path(), "perf", &["nvme_tcp_qpair_submit_request"], &["-g"])?;
    let checked = check(host)?;
    assert_eq!(checked.state("functions"), "fail");
    assert!(checked.finding("functions").contains("t_recv t_submit t_done t_resp t_sent"));
    assert!(checked.hint("functions").contains("as a host"), "{}", checked.hint("functions"));

    // The next best function for t_done, and a name with a suffix of the compiler's for t_recv.
    let mut functions = FUNCTIONS;
    functions[3] = "nvmf_bdev_ctrlr_complete_cmd";
    let lesser = fixture(here.path(), "lesser", &functions, &["-g"])?;
    outcome(
        Command::new("objcopy")
            .arg("--redefine-sym=nvmf_tcp_req_process=nvmf_tcp_req_process.isra.0")
            .arg(&lesser),
    )?
    .expect(0, &[])?;
    let checked = check(lesser)?;
    assert_eq!(checked.state("functions"), "warn", "{}", checked.finding("functions"));
    assert!(checked.finding("functions").contains("t_done by nvmf_bdev_ctrlr_complete_cmd"));

    // A part that the compiler moved out of the function is not the function.
    let cold = fixture(here.path(), "cold", &FUNCTIONS, &["-g"])?;
    outcome(Command::new("objcopy").arg("--redefine-sym=bdev_io_submit=bdev_io_submit.cold").arg(&cold))?
        .expect(0, &[])?;
    assert!(check(cold)?.finding("functions").contains("t_submit by spdk_nvmf_request_exec"));
    Ok(())
}

#[test]
fn check_follows_shared_libraries() -> Result<()> {
    let here = TempDir::new()?;
    let library =
        fixture(here.path(), "libspdk_nvmf.so", &FUNCTIONS, &["-g", "-shared", "-fPIC", "-Dmain=unused"])?;
    let folder = here.path().to_str().context("a path that is text")?;
    let program = compile(
        here.path(),
        "nvmf_tgt",
        "#include <unistd.h>\nvoid bdev_io_submit(void);\nint main(void) { bdev_io_submit(); pause(); return 0; }\n",
        &["-g", "-no-pie", &format!("-L{folder}"), "-l:libspdk_nvmf.so", "-Wl,-rpath,$ORIGIN"],
    )?;
    let checked = check(&program)?;
    assert!(checked.finding("file").contains("not position-independent, SPDK in 1 shared libraries"));
    assert_eq!((checked.state("functions"), checked.state("debug")), ("ok", "ok"));

    let running = Waiting::start(&program)?;
    let checked = check(running.0.id().to_string())?;
    assert_eq!((checked.state("functions"), checked.state("process")), ("ok", "ok"));
    drop(running);

    fs::remove_file(library)?;
    let checked = check(&program)?;
    assert_eq!(checked.state("file"), "fail");
    assert!(checked.hint("file").contains("LD_LIBRARY_PATH"));
    Ok(())
}

/// A process that does nothing, ended when dropped.
struct Waiting(Child);

impl Waiting {
    fn start(program: &Path) -> Result<Self> {
        let child =
            Command::new(program).spawn().with_context(|| format!("starting {}", program.display()))?;
        // Until the loader has mapped its libraries.
        let path = format!("/proc/{}/wchan", child.id());
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline && fs::read_to_string(&path).is_ok_and(|text| !text.contains("pause"))
        {
            thread::sleep(Duration::from_millis(20));
        }
        Ok(Waiting(child))
    }

    fn is_running(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_none())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn check_sees_that_the_running_program_was_replaced() -> Result<()> {
    let here = TempDir::new()?;
    let program = fixture(here.path(), "nvmf_tgt", &FUNCTIONS, &["-g"])?;
    let running = Waiting::start(&program)?;
    let pid = running.0.id().to_string();
    assert_eq!(check(&pid)?.state("process"), "ok");
    fs::remove_file(&program)?;
    let checked = check(&pid)?;
    assert_eq!(checked.state("process"), "warn");
    // What runs can still be read.
    assert_eq!((checked.state("functions"), checked.state("debug")), ("ok", "ok"));
    Ok(())
}

#[test]
fn without_readelf_check_says_what_it_could_not_see() -> Result<()> {
    let here = TempDir::new()?;
    let program = fixture(here.path(), "nvmf_tgt", &FUNCTIONS, &["-g"])?;
    let bin = here.path().join("bin");
    fs::create_dir(&bin)?;
    for tool in [
        "bash", "awk", "basename", "cat", "dirname", "grep", "head", "id", "od", "readlink", "sed", "tail",
        "tr", "uname",
    ] {
        let path =
            outcome(Command::new("sh").args(["-c", &format!("command -v {tool}")]))?.expect(0, &[])?.stdout;
        std::os::unix::fs::symlink(path.trim(), bin.join(tool))?;
    }
    outcome(command("check").env("PATH", &bin).arg(program))?
        .expect(1, &["readelf is missing", "binutils", "SPDK v99.01", "not recordable: readelf"])?;
    Ok(())
}

/// The start time of a process as `/proc/PID/stat` has it, in clock ticks since boot.
fn start_time(pid: u32) -> Result<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = stat.rsplit_once(") ").context("no name in stat")?;
    Ok(rest.split(' ').nth(19).context("no start time in stat")?.to_owned())
}

/// Whether a process runs: it exists, and is more than a zombie that nobody has waited for yet.
fn runs(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z')))
}

fn write_state(state: &Path, lines: &[String]) -> Result<()> {
    let target = state.join("target-default");
    fs::create_dir_all(&target)?;
    fs::write(target.join("log"), "")?;
    fs::write(target.join("state"), lines.join("\n") + "\n")?;
    Ok(())
}

#[test]
fn stop_target_ends_only_what_start_target_started() -> Result<()> {
    let here = TempDir::new()?;
    let state = here.path().join("state");
    let stop = || outcome(command("stop-target").arg("--state").arg(&state));
    stop()?.expect(0, &["nothing to stop"])?;

    let sleep = Path::new("/bin/sleep").canonicalize()?;
    let mut stranger = Waiting(Command::new(&sleep).arg("60").spawn()?);
    let pid = stranger.0.id();
    let started = start_time(pid)?;

    // The PID has been reused: another process, started at another time.
    let earlier = started.parse::<u64>()? - 1;
    write_state(
        &state,
        &[
            format!("pid={pid}"),
            format!("start_time={earlier}"),
            format!("executable={}", sleep.display()),
            "phase=ready".into(),
        ],
    )?;
    stop()?.expect(0, &["had ended by itself"])?;
    assert!(stranger.is_running()?);
    stop()?.expect(0, &["nothing to stop"])?;

    // The same process, but another program than the one that was started.
    write_state(
        &state,
        &[
            format!("pid={pid}"),
            format!("start_time={started}"),
            "executable=/usr/bin/nvmf_tgt".into(),
            "phase=ready".into(),
        ],
    )?;
    stop()?.expect(1, &["leaving it alone"])?;
    assert!(stranger.is_running()?);

    for damage in ["", "pid=1", "pid=-1", "pid=1 2", "pid=$(reboot)"] {
        write_state(&state, &[damage.to_owned(), format!("start_time={started}")])?;
        stop()?.expect(1, &["damaged"])?;
    }
    assert!(stranger.is_running()?);

    // And the process that was started is ended.
    write_state(
        &state,
        &[
            format!("pid={pid}"),
            format!("start_time={started}"),
            format!("executable={}", sleep.display()),
            "phase=ready".into(),
        ],
    )?;
    stop()?.expect(0, &[&format!("target 'default' (pid {pid}): stopped")])?;
    assert!(!stranger.is_running()?);
    assert_eq!(fs::read_dir(&state)?.count(), 0);
    Ok(())
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

#[test]
fn a_start_that_fails_says_why_and_leaves_nothing() -> Result<()> {
    let here = TempDir::new()?;
    let state = here.path().join("state");
    let start = |program: &Path, arguments: &[&str]| {
        let port = free_port()?;
        outcome(
            command("start-target")
                .args(["--listen", &format!("127.0.0.1:{port}"), "--state"])
                .arg(&state)
                .arg("--nvmf-tgt")
                .arg(program)
                .args(arguments),
        )
    };
    start(Path::new("/nonexistent/nvmf_tgt"), &[])?.expect(1, &["there is no /nonexistent/nvmf_tgt"])?;
    start(Path::new("/etc/passwd"), &[])?.expect(1, &["no program that you can run"])?;
    start(Path::new("/bin/true"), &["--bdev", "aio:/nonexistent/disk"])?
        .expect(1, &["there is no /nonexistent/disk"])?;
    start(Path::new("/bin/true"), &["--bdev", "pcie:ffff:ff:1f.7"])?.expect(1, &["no PCI device"])?;

    let listener = TcpListener::bind("127.0.0.1:0")?;
    let taken = listener.local_addr()?.to_string();
    start(Path::new("/bin/true"), &["--listen", &taken])?
        .expect(1, &["cannot listen on", &taken, "Address already in use"])?;

    // An address of RFC 5737, which no machine has.
    start(Path::new("/bin/true"), &["--listen", "203.0.113.7:4420"])?
        .expect(1, &["Cannot assign requested address"])?;

    // One that ends with words on its lips, and one that never answers and will not go.
    let script = |name: &str, text: &str| -> Result<PathBuf> {
        let path = here.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    };
    start(&script("ends", "echo out of cheese; exit 3")?, &[])?
        .expect(1, &["ended before it answered", "out of cheese", "nothing of it is left"])?;
    let noted = here.path().join("pid");
    let mute =
        script("mute", &format!("echo $$ > {}; trap '' TERM; while :; do sleep 0.2; done", noted.display()))?;
    start(&mute, &["--wait", "1"])?.expect(1, &["did not answer its RPC socket within 1 s"])?;
    let pid = fs::read_to_string(noted)?;
    assert!(!runs(pid.trim()));
    assert_eq!(fs::read_dir(&state)?.count(), 0);
    Ok(())
}

/// Serves one connection of a JSON-RPC socket: reads a request, sends these bytes, closes.
fn answer_once(socket: &Path, answer: &'static [u8]) -> Result<thread::JoinHandle<Result<Value>>> {
    let _ = fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    Ok(thread::spawn(move || {
        let (mut stream, _) = listener.accept()?;
        let mut bytes = Vec::new();
        let mut chunk = [0; 256];
        let request = loop {
            let count = stream.read(&mut chunk)?;
            if count == 0 {
                bail!("closed before the request was whole");
            }
            bytes.extend_from_slice(&chunk[..count]);
            if let Ok(request) = serde_json::from_slice(&bytes) {
                break request;
            }
        };
        // In two pieces, as a socket may.
        let (first, second) = answer.split_at(answer.len() / 2);
        stream.write_all(first)?;
        thread::sleep(Duration::from_millis(50));
        stream.write_all(second)?;
        Ok(request)
    }))
}

#[test]
fn rpc_sends_what_it_was_told_and_reports_what_it_got() -> Result<()> {
    let here = TempDir::new()?;
    let socket = here.path().join("rpc.sock");
    let rpc = |arguments: &[&str]| outcome(command("rpc").arg("--socket").arg(&socket).args(arguments));
    let joined = |server: thread::JoinHandle<Result<Value>>| match server.join() {
        Ok(request) => request,
        Err(_) => bail!("the server panicked"),
    };

    rpc(&["x"])?.expect(1, &["there is no socket"])?;

    let server = answer_once(&socket, br#"{"jsonrpc":"2.0","id":1,"result":{"a":[1,"two"]}}"#)?;
    let answer =
        rpc(&["bdev_null_create", "name=5", "num_blocks:=5", "text=a=b:=c", "flag:=true"])?.expect(0, &[])?;
    assert_eq!(serde_json::from_str::<Value>(&answer.stdout)?, json!({"a": [1, "two"]}));
    let request = joined(server)?;
    assert_eq!(request["method"], "bdev_null_create");
    assert_eq!(request["params"], json!({"name": "5", "num_blocks": 5, "text": "a=b:=c", "flag": true}));

    let server = answer_once(&socket, br#"{"jsonrpc":"2.0","id":1,"result":true}"#)?;
    rpc(&["m", r#"{"a": {"b": null}}"#])?.expect(0, &["true"])?;
    assert_eq!(joined(server)?["params"], json!({"a": {"b": null}}));

    let server = answer_once(
        &socket,
        br#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"Method not found"}}"#,
    )?;
    rpc(&["m"])?.expect(1, &["m failed: Method not found (code -32601)"])?;
    assert_eq!(joined(server)?.get("params"), None);

    for (bytes, text) in [
        (&b"{\"jsonrpc\""[..], "closed before"),
        (&b""[..], "closed before"),
        (&b"[1, 2]"[..], "no JSON-RPC response"),
        (&b"{\"jsonrpc\": \"2.0\"}"[..], "no JSON-RPC response"),
        (&b"\xff\xfe\xff\xfe"[..], "closed before"),
    ] {
        let server = answer_once(&socket, bytes)?;
        rpc(&["m"])?.expect(1, &[text])?;
        joined(server)?;
    }

    fs::remove_file(&socket)?;
    let _silent = UnixListener::bind(&socket)?;
    rpc(&["--timeout", "0.3", "m"])?.expect(1, &["did not answer m within 0.3 s"])?;
    run("rpc", &["--state", "/nonexistent", "m"])?.expect(1, &["no target named 'default'"])?;
    Ok(())
}

/// Stops what a test that failed would leave running.
struct StopAll<'state>(&'state Path);

impl Drop for StopAll<'_> {
    fn drop(&mut self) {
        let _ = outcome(command("stop-target").arg("--all").arg("--state").arg(self.0));
    }
}

/// Sends a signal by its name, by way of `kill`.
fn signal(name: &str, pid: &str) -> Result<()> {
    outcome(Command::new("kill").args([&format!("-{name}"), pid]))?.expect(0, &[])?;
    Ok(())
}

fn value_of(state: &Path, key: &str) -> Result<String> {
    let file = BufReader::new(fs::File::open(state.join("target-default/state"))?);
    let mut found = None;
    for line in file.lines() {
        if let Some((name, value)) = line?.split_once('=')
            && name == key
        {
            found = Some(value.to_owned());
        }
    }
    found.with_context(|| format!("no {key} in the state"))
}

#[test]
fn a_real_target_starts_and_stops_and_both_may_be_repeated() -> Result<()> {
    let Some(build) = std::env::var_os("SPDK_BUILD") else {
        skipped("SPDK_BUILD is not set");
        return Ok(());
    };
    let here = TempDir::new()?;
    let state = here.path().join("state");
    let _stop = StopAll(&state);
    let port = free_port()?;
    let listen = format!("127.0.0.1:{port}");
    let disk = here.path().join("disk");
    fs::File::create(&disk)?.set_len(16 << 20)?;
    let start = |arguments: &[&str]| {
        outcome(
            command("start-target")
                .arg("--spdk-build")
                .arg(&build)
                .arg("--state")
                .arg(&state)
                .args(arguments)
                // The machine's cores may have other targets on them.
                .args(["--", "--disable-cpumask-locks"]),
        )
    };
    let aio = format!("aio:{}", disk.display());
    let asked = [
        "--listen",
        &listen,
        "--bdev",
        "malloc:64M",
        "--bdev",
        "delay:500us:malloc:32M",
        "--bdev",
        "null:1G",
        "--bdev",
        &aio,
    ];
    let stop = || outcome(command("stop-target").arg("--state").arg(&state));
    let rpc = |arguments: &[&str]| -> Result<Value> {
        let answer = outcome(command("rpc").arg("--state").arg(&state).args(arguments))?.expect(0, &[])?;
        Ok(serde_json::from_str(&answer.stdout)?)
    };

    start(&asked)?.expect(
        0,
        &["target 'default' runs", "Delay2, 500 us over Malloc2, 32M", "fabscope record target"],
    )?;
    let pid = value_of(&state, "pid")?;
    start(&asked)?.expect(0, &["is running already", &pid])?;
    start(&["--listen", &listen])?.expect(1, &["with other options"])?;
    assert_eq!(value_of(&state, "pid")?, pid);

    // What was asked for is what it serves.
    let subsystems = rpc(&["nvmf_get_subsystems"])?;
    let ours = subsystems
        .as_array()
        .and_then(|all| all.iter().find(|one| one["nqn"] == "nqn.2024-01.io.fabscope:default"))
        .context("no subsystem of ours")?;
    assert_eq!(ours["allow_any_host"], true);
    assert_eq!(ours["listen_addresses"][0]["trsvcid"], json!(port.to_string()));
    let namespaces: Vec<_> = ours["namespaces"]
        .as_array()
        .context("no namespaces")?
        .iter()
        .map(|namespace| (namespace["nsid"].as_u64(), namespace["bdev_name"].as_str()))
        .collect();
    let expected = [
        (Some(1), Some("Malloc1")),
        (Some(2), Some("Delay2")),
        (Some(3), Some("Null3")),
        (Some(4), Some("Aio4")),
    ];
    assert_eq!(namespaces, expected);
    // The hint about changing a delay is one that works.
    let changed = rpc(&[
        "bdev_delay_update_latency",
        "delay_bdev_name=Delay2",
        "latency_type=avg_read",
        "latency_us:=800",
    ])?;
    assert_eq!(changed, json!(true));

    let checked = check(&pid)?;
    assert_eq!(checked.state("functions"), "ok", "{}", checked.finding("functions"));
    assert_eq!(checked.state("version"), "ok");
    assert!(checked.finding("version").starts_with("SPDK v"));

    // A second one beside it, whose start fails half-way: an option that is no number.
    let other = format!("127.0.0.1:{}", free_port()?);
    start(&["--name", "second", "--listen", &other, "--transport", "in_capsule_data_size:=\"many\""])?
        .expect(1, &["refused nvmf_create_transport", "nothing of it is left"])?;
    assert!(!state.join("target-second").exists());
    assert!(runs(&pid));

    stop()?.expect(0, &[&format!("pid {pid}): stopped")])?;
    assert!(!runs(&pid));
    stop()?.expect(0, &["nothing to stop"])?;

    // One that has been killed is no obstacle.
    start(&["--listen", &listen])?.expect(0, &["runs: pid"])?;
    let killed = value_of(&state, "pid")?;
    signal("KILL", &killed)?;
    let deadline = Instant::now() + Duration::from_secs(30);
    while runs(&killed) {
        ensure!(Instant::now() < deadline, "{killed} survives SIGKILL");
        thread::sleep(Duration::from_millis(20));
    }
    start(&["--listen", &listen])?.expect(0, &["runs: pid"])?;
    assert_ne!(value_of(&state, "pid")?, killed);
    stop()?.expect(0, &["stopped"])?;
    assert_eq!(fs::read_dir(&state)?.count(), 0);
    assert!(!Path::new("/dev/shm").join(format!("nvmf_trace.pid{killed}")).exists());
    Ok(())
}

#[test]
fn a_kernel_host_connects_and_disconnects_in_a_vm() -> Result<()> {
    if !testbed::available(Kernel::Debian6_12)? {
        return Ok(());
    }
    let vm = Vm::builder(Kernel::Debian6_12).file(folder(), "/spdk-setup").boot()?;
    // The kernel's own target, over null_blk, is enough to connect to.
    vm.sh("modprobe nvmet-tcp && modprobe null_blk nr_devices=1 gb=1 memory_backed=1
         config=/sys/kernel/config/nvmet
         subsystem=$config/subsystems/nqn.2024-01.io.fabscope:vm
         mkdir $subsystem && echo 1 > $subsystem/attr_allow_any_host
         mkdir $subsystem/namespaces/7 && echo -n /dev/nullb0 > $subsystem/namespaces/7/device_path
         echo 1 > $subsystem/namespaces/7/enable
         port=$config/ports/1
         mkdir $port && echo tcp > $port/addr_trtype && echo ipv4 > $port/addr_adrfam
         echo 127.0.0.1 > $port/addr_traddr && echo 4420 > $port/addr_trsvcid
         ln -s $subsystem $port/subsystems/")?;
    let run = |command: &str| -> Result<Outcome> {
        let output = vm.run(&format!("busybox sh /spdk-setup/{command}"), Duration::from_secs(120))?;
        Ok(Outcome { status: i32::try_from(output.status)?, stdout: output.text(), stderr: output.errors() })
    };
    let connect = "connect-host --nqn nqn.2024-01.io.fabscope:vm --address 127.0.0.1 --io-queues 1";

    run("disconnect-host")?.expect(0, &["nothing to disconnect"])?;
    run(connect)?.expect(0, &["connected: nvme0", "/dev/nvme0n1  nsid 7, "])?;
    run(connect)?.expect(0, &["connected already: nvme0 (live)", "disconnect-host undoes it"])?;
    vm.sh("dd if=/dev/nvme0n1 of=/dev/null bs=4k count=8 iflag=direct")?;

    // A device in use is left alone.
    vm.sh("mkswap /dev/nvme0n1 && swapon /dev/nvme0n1")?;
    run("disconnect-host")?.expect(1, &["is in use", "/dev/nvme0n1 is swap"])?;
    vm.sh("swapoff /dev/nvme0n1")?;
    run("disconnect-host")?.expect(0, &["disconnected: nvme0"])?;
    run("disconnect-host")?.expect(0, &["nothing to disconnect"])?;
    vm.sh("[ -z \"$(ls /sys/class/nvme)\" ] && [ -z \"$(ls /run/fabscope)\" ]")?;

    // Somebody else's controller, even by the name of one that we once had, is not ours to end.
    run(connect)?.expect(0, &["connected: nvme0"])?;
    vm.sh(
        "echo 1 > /sys/class/nvme/nvme0/delete_controller; sleep 1
         echo transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn=nqn.2024-01.io.fabscope:vm > /dev/nvme-fabrics",
    )?;
    run("disconnect-host")?.expect(0, &["nothing to disconnect"])?;
    run(connect)?.expect(0, &["connected already", "by someone else"])?;
    run("disconnect-host --nqn nqn.2024-01.io.fabscope:other")?.expect(0, &["nothing to disconnect"])?;
    run("disconnect-host --nqn nqn.2024-01.io.fabscope:vm")?.expect(0, &["disconnected: nvme0"])?;

    run("connect-host --nqn nqn.2024-01.io.fabscope:vm --address 127.0.0.1 --port 4499")?
        .expect(1, &["did not connect", "kernel:"])?;
    run("connect-host --nqn nqn.2024-01.io.fabscope:none --address 127.0.0.1")?
        .expect(1, &["did not connect"])?;
    // A subsystem with nothing in it: connected, found empty, disconnected.
    vm.sh("echo 0 > /sys/kernel/config/nvmet/subsystems/nqn.2024-01.io.fabscope:vm/namespaces/7/enable")?;
    run(&format!("{connect} --wait 2"))?.expect(1, &["no namespace within 2 s", "disconnected again"])?;
    vm.sh("[ -z \"$(ls /sys/class/nvme)\" ] && [ -z \"$(ls /run/fabscope)\" ]")?;
    vm.shutdown()
}
