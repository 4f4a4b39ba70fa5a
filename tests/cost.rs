//! What recording costs a real SPDK target, from each source, beside what bpftrace costs it: added core time per command
//! of a saturated reactor, and added latency of a lone command. A benchmark, so ignored unless asked for; takes some five
//! minutes on a machine with nothing else to do, and prints a table.
//!
//!     SPDK_BUILD=... cargo test -p fabscope --test cost -- --ignored --nocapture what_each_source_costs
//!     SPDK_BUILD=... cargo test -p fabscope --test cost -- --ignored --nocapture endbr64
//!
//! The second wants a build with `-fcf-protection=full`.
//!
//! The recorder has to share the initiator's core where there are but two, and an initiator that is kept waiting leaves
//! the reactor less to do at a time, which shows in what each command costs it. The test's own recorder is built for tests
//! and takes about 3 us of that core's time for a command by the trace ring (a third in reading the ring, the rest in
//! writing the run), so that it halves the rate: a figure that says something is measured with the recorder that users
//! have. `FABSCOPE_RELEASE` names one, built with `--release`.

mod support;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use run_format::Run;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use support::spdk::{Target, build, perf};
use support::{FABSCOPE, Process, Recording, SOON, outcome, skipped};

/// Rounds, each of which has every configuration once.
const ROUNDS: usize = 5;
/// How long each load lasts, seconds.
const SECONDS: &str = "1";
/// What is not the target shares the initiator's core, recorders and bpftrace alike.
const CORE: &str = "1";

/// A way of looking at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Nothing,
    /// bpftrace at the boundaries that fabscope's uprobes take, with the same arguments.
    Bpftrace,
    /// bpftrace counting three functions.
    Three,
    /// `fabscope record --source ...`.
    Source(&'static str),
}

impl Way {
    fn name(self) -> String {
        match self {
            Way::Nothing => "nothing".to_owned(),
            Way::Bpftrace => "bpftrace, same boundaries".to_owned(),
            Way::Three => "bpftrace, three counting uprobes".to_owned(),
            Way::Source(source) => format!("fabscope --source {source}"),
        }
    }
}

/// What one configuration did in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    /// Commands a second at depth 32.
    iops: f64,
    /// The reactor's busy time per command there, us, by its own account.
    busy: f64,
    /// At depth 1, us.
    p50: f64,
    seen: u64,
    lost: u64,
}

/// Where a release of SPDK has what the script needs: `spdk_nvmf_tcp_req.state` and `spdk_bdev_io.internal.caller_ctx`.
fn offsets(target: &Target) -> Result<(u32, u32)> {
    let version = target.rpc(&["spdk_get_version"])?;
    let field = |name: &str| version.pointer(&format!("/fields/{name}")).and_then(serde_json::Value::as_u64);
    match (field("major").context("no version")?, field("minor").context("no version")?) {
        (24, 9) => Ok((920, 736)),
        (25, 9..) | (26, ..) => Ok((944, 864)),
        (major, minor) => bail!("the script does not know SPDK {major}.{minor}"),
    }
}

/// The name under which a program has a function, where the compiler may have added to it.
fn symbol(program: &Path, name: &str) -> Result<String> {
    let symbols = outcome(Command::new("nm").arg(program))?.expect(0, &[])?;
    let of = |line: &str| line.split_whitespace().nth(2).map(str::to_owned);
    let mut found = symbols.stdout.lines().filter_map(of).filter(|found| {
        let rest = found.strip_prefix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(".isra.") && !rest.ends_with(".cold"))
    });
    found.next().with_context(|| format!("{} has no {name}", program.display()))
}

/// A script that takes what fabscope's uprobes take: when a command was received, submitted, done and answered, keyed by
/// its request, with who it is; and makes figures of them, as there is nothing that it could hand each command to.
fn same_boundaries(program: &Path, pid: u32, (state, caller): (u32, u32)) -> Result<String> {
    let path = program.display();
    let process = symbol(program, "nvmf_tcp_req_process")?;
    Ok(format!(
        r#"
uprobe:{path}:"{process}" /pid == {pid}/ {{
    $request = arg1;
    $state = *(uint32 *)($request + {state});
    if ($state == 1) {{
        $qpair = *(uint64 *)$request;
        $qid = *(uint16 *)($qpair + 2);
        if ($qid != 0) {{
            $sqe = *(uint64 *)($qpair + 136) + 8;
            @recv[$request] = nsecs;
            @cid[$request] = *(uint16 *)($sqe + 2);
            @opcode[$request] = *(uint8 *)$sqe;
            @nsid[$request] = *(uint32 *)($sqe + 4);
            @slba[$request] = *(uint64 *)($sqe + 40);
            @nlb[$request] = *(uint16 *)($sqe + 48);
        }}
    }} else if ($state == 11 && @recv[$request] != 0) {{
        @resp[$request] = nsecs;
    }} else if ($state == 15 && @recv[$request] != 0) {{
        $now = nsecs;
        @before = hist(@submit[$request] - @recv[$request]);
        @storage = hist(@done[$request] - @submit[$request]);
        @after = hist(@resp[$request] - @done[$request]);
        @sent = hist($now - @resp[$request]);
        @commands[@opcode[$request]] = count();
        delete(@recv[$request]);
        delete(@cid[$request]);
        delete(@opcode[$request]);
        delete(@nsid[$request]);
        delete(@slba[$request]);
        delete(@nlb[$request]);
        delete(@submit[$request]);
        delete(@done[$request]);
        delete(@resp[$request]);
    }}
}}
uprobe:{path}:bdev_io_submit /pid == {pid}/ {{
    $request = *(uint64 *)(arg0 + {caller});
    if (@recv[$request] != 0) {{ @submit[$request] = nsecs; }}
}}
uprobe:{path}:spdk_nvmf_request_complete /pid == {pid}/ {{
    if (@recv[arg0] != 0) {{ @done[arg0] = nsecs; }}
}}
END {{
    clear(@recv); clear(@cid); clear(@opcode); clear(@nsid); clear(@slba); clear(@nlb); clear(@submit); clear(@done);
    clear(@resp);
}}
"#
    ))
}

fn three(program: &Path, pid: u32) -> String {
    let functions = ["spdk_nvmf_request_exec", "nvmf_bdev_ctrlr_complete_cmd", "nvmf_tcp_req_complete"];
    let one =
        |name| format!("uprobe:{}:{name} /pid == {pid}/ {{ @[probe] = count(); }}\n", program.display());
    functions.map(one).concat()
}

/// Runs on the initiator's core.
fn beside(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", CORE]).arg(program);
    command
}

/// The recorder.
fn recorder() -> std::ffi::OsString {
    std::env::var_os("FABSCOPE_RELEASE").filter(|path| !path.is_empty()).unwrap_or_else(|| FABSCOPE.into())
}

/// A running bpftrace, all of whose probes are in place.
struct Script {
    process: Process,
    log: std::path::PathBuf,
}

impl Script {
    fn start(target: &Target, text: &str, folder: &Path) -> Result<Script> {
        let (script, log) = (folder.join("script.bt"), folder.join("bpftrace.log"));
        // What stands first is done when all probes are in place.
        std::fs::write(
            &script,
            format!("{text}\ninterval:ms:50 {{ if (!@ready) {{ printf(\"ready\\n\"); @ready = 1; }} }}\n"),
        )?;
        let out = File::create(&log)?;
        let mut command = beside("bpftrace");
        command.env("BPFTRACE_MAP_KEYS_MAX", "16384").arg("-p").arg(target.pid.to_string()).arg(&script);
        command.stdout(out.try_clone()?).stderr(Stdio::from(out));
        let mut script = Script { process: Process::start(&mut command)?, log };
        let deadline = Instant::now() + SOON;
        while !script.said().contains("ready") {
            ensure!(script.process.ended()?.is_none(), "bpftrace ended: {}", script.said());
            ensure!(Instant::now() < deadline, "bpftrace does not attach: {}", script.said());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(script)
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it, and returns what it wrote.
    fn stop(mut self) -> Result<String> {
        self.process.signal(Signal::SIGINT)?;
        self.process.wait(SOON)?;
        Ok(self.said())
    }
}

/// What the target says of itself: the busy time of its reactor in us, and the commands that it has completed.
fn account(target: &Target) -> Result<(f64, f64)> {
    let reactors = target.rpc(&["framework_get_reactors"])?;
    let number = |value: Option<&serde_json::Value>| value.and_then(serde_json::Value::as_f64);
    let rate = number(reactors.get("tick_rate")).context("no tick_rate")?;
    let busy = number(reactors.pointer("/reactors/0/busy")).context("no busy")?;
    let stats = target.rpc(&["nvmf_get_stats"])?;
    let groups = stats.get("poll_groups").and_then(serde_json::Value::as_array).context("no poll groups")?;
    let commands = groups
        .iter()
        .flat_map(|group| group.get("transports").and_then(serde_json::Value::as_array).into_iter().flatten())
        .chain(groups)
        .filter_map(|group| number(group.get("completed_nvme_io")))
        .sum();
    Ok((busy / rate * 1e6, commands))
}

/// One load: commands a second and the median latency in us.
fn load(build: &Path, target: &Target, depth: &str) -> Result<(f64, f64)> {
    let arguments = ["-L", "-q", depth, "-o", "4096", "-w", "randread", "-t", SECONDS];
    let said = outcome(&mut perf(build, target.port, &arguments))?.expect(0, &[])?.stdout;
    let total = said.lines().find_map(|line| line.trim_start().strip_prefix("Total")).context("no total")?;
    let iops = total.split_whitespace().find_map(|word| word.parse::<f64>().ok()).context("no rate")?;
    let p50 = said.lines().find_map(|line| line.trim().strip_prefix("50.00000% :")).context("no median")?;
    Ok((iops, p50.trim().trim_end_matches("us").trim().parse().context("the median")?))
}

/// Both loads under one way of looking.
fn measure(build: &Path, target: &Target, way: Way, folder: &Path) -> Result<Measured> {
    std::fs::create_dir_all(folder)?;
    let program = build.join("bin/nvmf_tgt");
    let mut script = None;
    let mut recording = None;
    match way {
        Way::Nothing => {}
        Way::Bpftrace => {
            let text = same_boundaries(&program, target.pid, offsets(target)?)?;
            script = Some(Script::start(target, &text, folder)?);
        }
        Way::Three => script = Some(Script::start(target, &three(&program, target.pid), folder)?),
        Way::Source(source) => {
            let run = folder.join("target.run");
            let more = ["--source", source];
            recording =
                Some(Recording::start_as(&mut beside(recorder()), "target", target.pid, &run, &more)?);
        }
    }
    let (_, p50) = load(build, target, "1")?;
    let before = account(target)?;
    let (iops, _) = load(build, target, "32")?;
    let after = account(target)?;
    let commands = after.1 - before.1;
    ensure!(commands > 1_000.0, "the target says that it completed {commands} commands");
    let mut measured = Measured { iops, busy: (after.0 - before.0) / commands, p50, seen: 0, lost: 0 };
    if let Some(script) = script {
        let said = script.stop()?;
        ensure!(said.contains("@"), "bpftrace saw nothing: {said}");
        if way == Way::Bpftrace {
            ensure!(said.contains("@storage"), "bpftrace saw no command: {said}");
        }
    }
    if let Some(recording) = recording {
        let counters = Run::open(&recording.stop()?)?.manifest().counters;
        ensure!(counters.recorded > 0, "{counters:?}");
        (measured.seen, measured.lost) = (counters.seen, counters.lost.total());
        std::fs::remove_dir_all(folder)?;
    }
    Ok(measured)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs all ways in turn, forwards and backwards and each time with another first, and prints the medians.
fn compare(build: &Path, ways: &[Way]) -> Result<()> {
    let here = tempfile::tempdir()?;
    let target = Target::start(build, &["malloc:64M"])?;
    let _left = Left(target.pid);
    let mut all = vec![Vec::new(); ways.len()];
    for round in 0..ROUNDS {
        let mut order: Vec<usize> = (0..ways.len()).collect();
        order.rotate_left(round % ways.len());
        if round % 2 == 1 {
            order.reverse();
        }
        for n in order {
            let measured = measure(build, &target, ways[n], &here.path().join(format!("{round}-{n}")))?;
            eprintln!("round {round}, {}: {measured:?}", ways[n].name());
            all[n].push(measured);
        }
    }
    let nothing = ways.iter().position(|way| *way == Way::Nothing).context("nothing to compare with")?;
    // Of each round by itself, since a round's configurations saw the same machine.
    let added = |n: usize, of: fn(&Measured) -> f64| {
        median(all[n].iter().zip(&all[nothing]).map(|(with, without)| of(with) - of(without)).collect())
    };
    let per_command: fn(&Measured) -> f64 = |m| 1e6 / m.iops;
    let three = ways.iter().position(|way| *way == Way::Three).map(|n| added(n, |m| m.busy));
    let same = ways.iter().position(|way| *way == Way::Bpftrace).map(|n| added(n, |m| m.busy));
    println!(
        "| | commands/s at depth 32 | added us a command by the rate | added us a command by the reactor's account | of \
         bpftrace's three | of bpftrace at the same boundaries | p50 at depth 1, us | added | lost of seen |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (n, way) in ways.iter().enumerate() {
        let of = |value: fn(&Measured) -> f64| median(all[n].iter().map(value).collect());
        let share = |whole: Option<f64>| match whole {
            Some(whole) if n != nothing => format!("{:.3}", added(n, |m| m.busy) / whole),
            _ => String::new(),
        };
        let (lost, seen) = all[n].iter().fold((0, 0), |sum, m| (sum.0 + m.lost, sum.1 + m.seen));
        println!(
            "| {} | {:.0} k | {:.2} | {:.2} | {} | {} | {:.1} | {:+.1} | {} |",
            way.name(),
            of(|m| m.iops) / 1e3,
            added(n, per_command),
            added(n, |m| m.busy),
            share(three),
            share(same),
            of(|m| m.p50),
            added(n, |m| m.p50),
            if seen == 0 { String::new() } else { format!("{lost} of {seen}") },
        );
    }
    Ok(())
}

/// The file that a target which has recorded anything leaves behind; gone with this.
struct Left(u32);

impl Drop for Left {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(format!("/dev/shm/nvmf_trace.pid{}", self.0));
    }
}

/// Whether all that is compared is here; says what is not.
fn can_compare() -> bool {
    for program in ["bpftrace", "taskset", "nm"] {
        if outcome(Command::new(program).arg("--version")).is_err() {
            skipped(&format!("there is no {program} here"));
            return false;
        }
    }
    if thread::available_parallelism().map_or(0, usize::from) < 2 {
        skipped("target and initiator need a core each");
        return false;
    }
    support::can_trace()
}

#[test]
#[ignore = "a benchmark of five minutes"]
fn what_each_source_costs() -> Result<()> {
    let Some(build) = build().filter(|_| can_compare()) else { return Ok(()) };
    let _turn = support::turn()?;
    let ways = [
        Way::Nothing,
        Way::Bpftrace,
        Way::Three,
        Way::Source("uprobe"),
        Way::Source("hybrid"),
        Way::Source("trace"),
    ];
    compare(&build, &ways)
}

#[test]
#[ignore = "a benchmark of some minutes, for a build with -fcf-protection"]
fn uprobes_where_functions_begin_with_endbr64() -> Result<()> {
    let Some(build) = build().filter(|_| can_compare()) else { return Ok(()) };
    let _turn = support::turn()?;
    compare(&build, &[Way::Nothing, Way::Bpftrace, Way::Three, Way::Source("uprobe"), Way::Source("hybrid")])
}
