//! What a user gets wrong, and what they are told: every message names the thing, the reason and the way
//! out, and the exit code says which kind of trouble it is.

mod support;

use anyhow::{Result, ensure};
use run_format::{
    Boundary, Cid, ClockPair, Command as NvmeCommand, Counters, Hook, Kind, Machine, Manifest, Nanos, Queue,
    Run, RunWriter, Side, Sink, Software, State, Window,
};
use standin::Target;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{FABSCOPE, Process, fabscope, outcome};

const NOBODY: u32 = 65534;

/// A copy of `fabscope` that every user may run.
fn for_nobody(folder: &Path) -> Result<PathBuf> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    let copy = folder.join("fabscope");
    fs::copy(FABSCOPE, &copy)?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
    Ok(copy)
}

#[test]
fn without_rights_it_says_which_are_missing_and_the_very_command() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        support::skipped("only root can run a program as another user");
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let program = for_nobody(here.path())?;
    let target = Target::spawn(Vec::<String>::new())?;
    let pid = target.pid().to_string();
    let output = here.path().join("x.run");
    let as_nobody = |arguments: &[&str]| {
        outcome(Command::new(&program).args(arguments).arg("-o").arg(&output).uid(NOBODY).gid(NOBODY))
    };
    let path = program.display();
    as_nobody(&["record", "target", "--spdk", &pid])?.expect(
        1,
        &["not allowed to", &format!("`sudo {path} record target --spdk {pid} -o {}`", output.display())],
    )?;
    as_nobody(&["record", "host", "--kernel"])?
        .expect(1, &["CAP_BPF", "CAP_PERFMON", "missing", "sudo fabscope record host"])?;
    ensure!(!output.exists());

    // With the rights that it names, and no others, it can.
    let script = format!(
        "exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups \
         --inh-caps=-all,+bpf,+perfmon,+sys_ptrace,+sys_admin \
         --ambient-caps=-all,+bpf,+perfmon,+sys_ptrace,+sys_admin \
         {path} record target --spdk {pid} -d 200ms -q -o {}",
        output.display()
    );
    fs::set_permissions(here.path(), fs::Permissions::from_mode(0o777))?;
    outcome(Command::new("sh").args(["-c", &script]))?.expect(0, &[])?;
    ensure!(Run::open(&output)?.manifest().state == State::Closed);
    target.stop()
}

#[test]
fn a_process_that_can_not_be_recorded_is_named_with_the_reason() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let output = here.path().join("x.run");
    let record = |side: &str, spdk: &str, more: &[&str]| {
        let mut command = Command::new(FABSCOPE);
        command.args(["record", side, "--spdk", spdk, "-d", "200ms", "-o"]).arg(&output).args(more);
        outcome(&mut command)
    };

    let sleep = Process::start(Command::new("sleep").arg("600"))?;
    let pid = sleep.pid().to_string();
    for side in ["target", "host"] {
        record(side, &pid, &[])?.expect(1, &[&pid, "no SPDK in it", "give the process or path"])?;
    }
    let mut gone = Process::start(&mut Command::new("true"))?;
    gone.wait(support::SOON)?;
    record("target", &gone.pid().to_string(), &[])?.expect(1, &[&gone.pid().to_string(), "is gone"])?;
    record("target", "/no/such/nvmf_tgt", &[])?.expect(1, &["/no/such/nvmf_tgt", "No such file"])?;

    // A program that nobody runs, one that two run.
    let program = standin::spawn::program("standin-target")?;
    let copy = here.path().join("standin-target");
    fs::copy(&program, &copy)?;
    let copied = copy.display().to_string();
    record("target", &copied, &[])?.expect(1, &["no SPDK target is running from", &copied, "start it"])?;
    let run_copy = || {
        let mut command = Command::new(&copy);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Process::start(&mut command)
    };
    let (first, second) = (run_copy()?, run_copy()?);
    record("target", &copied, &[])?.expect(
        1,
        &["several processes", "give the PID of one", &first.pid().to_string(), &second.pid().to_string()],
    )?;
    drop((first, second));

    // A target is no host.
    let target = Target::spawn(Vec::<String>::new())?;
    record("host", &target.pid().to_string(), &[])?.expect(1, &["standin-target"])?;
    ensure!(!output.exists(), "nothing was recorded, and no run was made");
    target.stop()
}

#[test]
fn a_stripped_program_is_recorded_with_what_the_message_asks_for() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let program = standin::spawn::program("standin-target")?;
    let stripped = here.path().join("stripped");
    outcome(Command::new("strip").arg("-s").arg("-o").arg(&stripped).arg(&program))?.expect(0, &[])?;
    let process = Process::start(Command::new(&stripped).stdout(Stdio::null()).stderr(Stdio::null()))?;
    let pid = process.pid().to_string();
    let record = |run: &str, more: &[&str]| {
        let output = here.path().join(run);
        outcome(
            Command::new(FABSCOPE)
                .args(["record", "target", "--spdk", &pid, "-d", "200ms", "-o"])
                .arg(&output)
                .args(more),
        )
    };
    record("x.run", &[])?.expect(1, &["stripped", "--debug-file", "--save-layout"])?;
    ensure!(!here.path().join("x.run").exists());

    let layout = here.path().join("layout").display().to_string();
    let program = program.display().to_string();
    fabscope(["probe", "target", "--spdk", &program, "--save-layout", &layout])?
        .expect(0, &["layout of build-id"])?;
    record("layout.run", &["--layout", &layout])?.expect(0, &[])?;
    record("debug.run", &["--debug-file", &program])?.expect(0, &[])?;

    // Those of another build are not taken.
    let other = standin::spawn::program("standin-initiator")?.display().to_string();
    record("x.run", &["--debug-file", &other])?.expect(1, &["belongs to the build", "standin-initiator"])?;
    fabscope(["probe", "host", "--spdk", &other, "--save-layout", &layout])?.expect(0, &[])?;
    record("x.run", &["--layout", &layout])?.expect(1, &["made from the build", "make it anew"])?;
    fs::write(&layout, "{}")?;
    record("x.run", &["--layout", &layout])?.expect(1, &["not a usable layout file"])?;
    Ok(())
}

/// What a made run is: the side, the subsystem, when by the wall clock, how many commands.
struct Made<'a> {
    side: Side,
    nqn: &'a str,
    second: u64,
    commands: u64,
}

impl Made<'_> {
    /// Writes it. Two of one second are of the same load: what the target has lies inside what the host has.
    fn write(&self, directory: &Path) -> Result<()> {
        let origin = 1_000_000_000_000;
        let end = origin + self.commands * 1_000_000 + 1_000_000;
        let manifest = Manifest {
            format: Manifest::FORMAT.into(),
            side: self.side,
            kind: Kind::Spdk,
            tool: "0".into(),
            state: State::Open,
            machine: Machine {
                hostname: format!("machine-of-the-{}", self.side),
                boot_id: self.side.to_string(),
                ..Machine::default()
            },
            software: Software { name: "SPDK".into(), version: "1".into(), ..Software::default() },
            hooks: Boundary::of(self.side)
                .map(|boundary| Hook {
                    boundary,
                    hook: Some("made".into()),
                    rung: 0,
                    measured: true,
                    instruction: None,
                    transport: None,
                    estimated_ns: None,
                    why: None,
                })
                .collect(),
            detail: "stages".into(),
            one_in: 1,
            window: Window { start_ns: Nanos(origin), end_ns: Nanos(origin) },
            windows: None,
            overhead: None,
            clocks: vec![ClockPair {
                monotonic_ns: Nanos(origin),
                realtime_ns: Nanos(1_700_000_000_000_000_000 + self.second * 1_000_000_000),
            }],
            counters: Counters::default(),
            workload: None,
            price: None,
            telemetry: None,
            events: Vec::new(),
            labels: BTreeMap::new(),
        };
        let mut writer = RunWriter::create(directory, manifest, false)?;
        let queue = writer.queue(Queue {
            subsystem_nqn: self.nqn.into(),
            host_nqn: "nqn.2014-08.org.example:host".into(),
            cntlid: 1,
            qid: 1,
            ..Queue::default()
        });
        let mut state = self.second + 1;
        for n in 0..self.commands {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let from = origin + n * 1_000_000 + (state >> 48) * 10;
            let mut times = [None; NvmeCommand::SLOTS];
            for boundary in Boundary::of(self.side) {
                let after = match boundary {
                    Boundary::HQueued => 0,
                    Boundary::HDriver => 1_000,
                    Boundary::HSent => 2_000,
                    Boundary::TRecv => 12_000,
                    Boundary::TSubmit => 13_000,
                    Boundary::TDone => 83_000,
                    Boundary::TResp => 84_000,
                    Boundary::TSent => 85_000,
                    Boundary::HRecv => 95_000,
                    Boundary::HDone => 96_000,
                    Boundary::HEnd => 97_000,
                    Boundary::HR2t | Boundary::HDataSent | Boundary::TR2t | Boundary::TData => continue,
                };
                times[boundary.slot()] = Some(Nanos(from + after));
            }
            writer.command(&NvmeCommand {
                queue,
                cid: Cid((n % 32) as u16),
                opcode: 2,
                nsid: 1,
                slba: state >> 40,
                nlb0: 7,
                bytes: 4096,
                times,
                ..NvmeCommand::default()
            });
        }
        let counters = Counters { seen: self.commands, recorded: self.commands, ..Counters::default() };
        writer.close(counters, Nanos(end))?;
        Ok(())
    }
}

const NQN: &str = "nqn.2024-01.org.example:disk";

/// A folder of made runs, and the reports of them.
struct Runs(tempfile::TempDir);

impl Runs {
    fn new() -> Result<Runs> {
        let here = tempfile::tempdir()?;
        for (name, side, nqn, second, commands) in [
            ("host.run", Side::Host, NQN, 0, 2000),
            ("target.run", Side::Target, NQN, 0, 2000),
            ("host-later.run", Side::Host, NQN, 3600, 2000),
            ("target-later.run", Side::Target, NQN, 3600, 2000),
            ("target-other.run", Side::Target, "nqn.2024-01.org.example:other", 0, 2000),
            ("host-empty.run", Side::Host, NQN, 0, 0),
            ("target-empty.run", Side::Target, NQN, 0, 0),
        ] {
            Made { side, nqn, second, commands }.write(&here.path().join(name))?;
        }
        Ok(Runs(here))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn report(&self, arguments: &[&str]) -> Result<support::Outcome> {
        outcome(Command::new(FABSCOPE).current_dir(self.0.path()).arg("report").args(arguments))
    }
}

#[test]
fn runs_that_do_not_go_together_are_refused_with_what_each_is() -> Result<()> {
    let runs = Runs::new()?;
    let good = runs.report(&["host.run", "target.run"])?.expect(0, &[])?;
    ensure!(
        good.stdout.contains("storage") && good.stdout.contains("2 000 commands over 1 queue: 100 %"),
        "{}",
        good.stdout
    );
    runs.report(&["target.run", "host.run", "--by", "queue", "--detail"])?.expect(0, &[])?;

    runs.report(&["host.run", "host-later.run"])?.expect(
        1,
        &[
            "both runs are of a host",
            "give one host run and one target run",
            "host.run",
            "host-later.run",
            "machine-of-the-host",
        ],
    )?;
    runs.report(&["target.run", "target-later.run"])?
        .expect(1, &["both runs are of a target", "target-later.run", "machine-of-the-target"])?;
    runs.report(&["host.run", "host.run"])?.expect(1, &["both runs are of a host"])?;
    runs.report(&["host.run", "target-other.run"])?.expect(
        1,
        &[
            "no queue in common",
            "check that the host was connected to this target",
            NQN,
            "nqn.2024-01.org.example:other",
        ],
    )?;
    runs.report(&["host.run", "target-later.run"])?.expect(
        1,
        &[
            "not recorded at the same time",
            "2023-11-14 22:13:20",
            "2023-11-14 23:13:20",
            "record both sides while the same load runs",
        ],
    )?;
    Ok(())
}

#[test]
fn too_little_data_has_an_exit_code_of_its_own() -> Result<()> {
    let runs = Runs::new()?;
    for pair in [
        &["host-empty.run", "target.run"][..],
        &["host.run", "target-empty.run"],
        &["host-empty.run"],
        &["target-empty.run"],
    ] {
        runs.report(pair)?.expect(4, &["too little to report", "-empty.run"])?;
    }
    // One side alone says what it can, and what it can not know.
    for side in ["host.run", "target.run"] {
        let said = runs.report(&[side])?.expect(0, &[])?;
        ensure!(said.stdout.contains("storage") || said.stdout.contains("beyond"), "{}", said.stdout);
    }
    Ok(())
}

#[test]
fn what_is_no_run_or_a_damaged_one_is_named() -> Result<()> {
    let runs = Runs::new()?;
    runs.report(&["missing.run"])?.expect(1, &["missing.run: no such run directory"])?;
    runs.report(&["host.run", "missing.run"])?.expect(1, &["missing.run: no such run directory"])?;
    fs::create_dir(runs.path("folder"))?;
    runs.report(&["folder"])?.expect(1, &["folder is not a fabscope run", "run.json"])?;
    fs::write(runs.path("file"), "x")?;
    runs.report(&["file"])?.expect(1, &["file is not a fabscope run"])?;

    let manifest = fs::read_to_string(runs.path("host.run/run.json"))?;
    let change = |text: &str| fs::write(runs.path("host.run/run.json"), text);
    change(&manifest.replace("fabscope-run/1", "fabscope-run/7"))?;
    runs.report(&["host.run", "target.run"])?.expect(
        1,
        &["host.run/run.json has format fabscope-run/7", "newer than fabscope-run/1", "use a newer fabscope"],
    )?;
    change(&manifest.replace("fabscope-run/1", "other/1"))?;
    runs.report(&["host.run"])?.expect(1, &["run.json", "not a fabscope run"])?;
    change(&manifest[..manifest.len() / 2])?;
    runs.report(&["host.run"])?.expect(1, &["run.json: not JSON", "damaged"])?;
    change("")?;
    runs.report(&["host.run"])?.expect(1, &["run.json: not JSON"])?;
    change(&manifest)?;
    runs.report(&["host.run", "target.run"])?.expect(0, &[])?;

    // A segment that was cut is left out, and the report says so.
    let segment = runs.path("target.run/commands/000000.parquet");
    let whole = fs::read(&segment)?;
    fs::write(runs.path("target.run/commands/000001.parquet"), &whole[..whole.len() - 20])?;
    let said = runs.report(&["host.run", "target.run"])?.expect(0, &[])?;
    ensure!(said.stdout.contains("1 command segments are cut"), "{}", said.stdout);
    fs::write(&segment, &whole[..whole.len() / 2])?;
    runs.report(&["host.run", "target.run"])?.expect(4, &["too little to report"])?;
    // Its footer is whole, its middle is not.
    let mut rotten = whole.clone();
    let middle = rotten.len() / 2;
    rotten[4..middle].fill(0xa5);
    fs::write(&segment, rotten)?;
    runs.report(&["host.run", "target.run"])?.expect(1, &["target.run"])?;
    Ok(())
}

#[test]
fn wrong_usage_exits_with_2_and_says_what_is_right() -> Result<()> {
    for (arguments, text) in [
        (&[][..], "Usage"),
        (&["recrod"], "record"),
        (&["record"], "host"),
        (&["record", "host", "--kernel", "--spdk", "1"], "cannot be used with"),
        (&["record", "target", "-d", "5"], "write 5s"),
        (&["record", "target", "--sample", "0"], "0"),
        (&["record", "target", "--label", "x"], "NAME=VALUE"),
        (&["record", "host", "--layout", "x"], "--spdk"),
        (&["record", "target", "--label", "x=1", "--label", "x=2"], "given twice"),
        (&["report"], "HOST.run"),
        (&["report", "a", "b", "c"], "unexpected argument"),
        (&["report", "a", "--by", "moon"], "queue"),
        (&["report", "a", "--format", "xml"], "json"),
        (&["demo", "--delay", "fast"], "--delay"),
        (&["schema", "nothing"], "report"),
    ] {
        let said = fabscope(arguments)?.expect(2, &[text])?;
        ensure!(said.stdout.is_empty(), "{said:?}");
    }
    Ok(())
}

#[test]
fn a_reader_that_goes_away_is_no_error() -> Result<()> {
    let runs = Runs::new()?;
    for more in [&["--format", "json", "--detail"][..], &[]] {
        let mut child = Command::new(FABSCOPE)
            .current_dir(runs.0.path())
            .args(["report", "host.run", "target.run"])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        drop(child.stdout.take());
        let mut said = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            stderr.read_to_string(&mut said)?;
        }
        ensure!(child.wait()?.success() && said.is_empty(), "{said}");
    }
    Ok(())
}

/// `fabscope probe target --spdk FILE` with a gigabyte for its data; fails on a panic, a signal, or no end.
fn probe_with_little_memory(file: &Path) -> Result<support::Outcome> {
    let began = Instant::now();
    let script = format!("ulimit -d 1048576; exec {FABSCOPE} probe target --spdk \"$0\"");
    let said = outcome(Command::new("sh").arg("-c").arg(script).arg(file))?;
    let took = began.elapsed();
    ensure!(took < Duration::from_secs(60), "{}: {took:?}", file.display());
    ensure!(matches!(said.code, Some(0 | 1)) && !said.stderr.contains("panicked"), "{said:#?}");
    ensure!(
        (said.code == Some(1)) != said.stderr.is_empty() || said.stdout.contains("can not record"),
        "{said:#?}"
    );
    Ok(said)
}

#[test]
fn a_program_that_is_none_or_lies_is_named_with_what_is_wrong() -> Result<()> {
    let here = tempfile::tempdir()?;
    let file = here.path().join("nvmf_tgt");
    let name = file.display().to_string();
    let whole = fs::read(standin::spawn::program("standin-target")?)?;
    let refused = |bytes: &[u8], texts: &[&str]| -> Result<()> {
        fs::write(&file, bytes)?;
        let texts = [&[name.as_str()], texts].concat();
        probe_with_little_memory(&file)?.expect(1, &texts)?;
        Ok(())
    };
    refused(b"", &["not an ELF file"])?;
    refused(b"#!/bin/sh\nexec nvmf_tgt\n", &["not an ELF file", "not a wrapper script"])?;
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = whole.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    // Other machines, by e_machine, class and byte order.
    refused(&changed(18, &183_u16.to_le_bytes()), &["an ELF file for", "AArch64"])?;
    refused(&changed(18, &243_u16.to_le_bytes()), &["an ELF file for", "RISC-V"])?;
    refused(&changed(4, &[1]), &["an ELF file for", "32-bit"])?;
    refused(&changed(5, &[2]), &["an ELF file for", "big-endian"])?;
    for part in 0..16 {
        fs::write(&file, &whole[..whole.len() * part / 16])?;
        probe_with_little_memory(&file)?.expect(1, &[&name])?;
    }

    // Each section says that it is larger than anything; then the tables themselves.
    let word = |at: usize| u64::from_le_bytes(whole[at..at + 8].try_into().unwrap_or_default()) as usize;
    let sections = word(40);
    let count = usize::from(u16::from_le_bytes([whole[60], whole[61]]));
    for size in [u64::MAX, 1 << 62, 1 << 40] {
        let mut bytes = whole.clone();
        for section in 0..count {
            let at = sections + section * 64 + 32;
            bytes[at..at + 8].copy_from_slice(&size.to_le_bytes());
        }
        fs::write(&file, &bytes)?;
        probe_with_little_memory(&file)?;
        for section in (0..count).step_by(3) {
            fs::write(&file, changed(sections + section * 64 + 32, &size.to_le_bytes()))?;
            probe_with_little_memory(&file)?;
        }
    }
    for at in [32, 40] {
        refused(&changed(at, &u64::MAX.to_le_bytes()), &[])?;
    }

    // A terabyte of nothing behind the program, and a terabyte of nothing alone.
    fs::write(&file, &whole)?;
    fs::OpenOptions::new().write(true).open(&file)?.set_len(1 << 40)?;
    probe_with_little_memory(&file)?;
    fs::write(&file, b"")?;
    fs::OpenOptions::new().write(true).open(&file)?.set_len(1 << 40)?;
    probe_with_little_memory(&file)?.expect(1, &[&name, "not an ELF file"])?;

    let pipe = here.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU)?;
    for none in [pipe.as_path(), here.path(), Path::new("/dev/zero"), Path::new("/dev/null")] {
        probe_with_little_memory(none)?.expect(1, &[&none.display().to_string()])?;
    }
    Ok(())
}
