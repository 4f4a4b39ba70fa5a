//! What the whole-program tests share: running `fabscope`, taking turns, and checking a joined pair of
//! runs against truths that the joiner does not use.
#![allow(dead_code, unreachable_pub)] // each test program uses its own part, and has no outside

pub mod causes;
pub mod cut;
pub mod disk;
pub mod live;
pub mod load;
pub mod recorded;
pub mod schema;
pub mod spdk;
pub mod vm;
pub mod windows;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use joiner::{Distribution, JoinOptions, Joined, Report, ReportOptions, SetAside};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use polars::prelude::{DataFrame, DataType};
use run_format::{Boundary, Kind, Manifest, Run, Stage, State};
use serde_json::Value;

/// Longest wait for what should take a second or two.
pub const SOON: Duration = Duration::from_secs(60);

/// Says that something was not tested, and why, past the test runner's capture.
pub fn skipped(why: &str) {
    let _ = writeln!(io::stderr(), "skipped: {why}");
}

/// The turn of a test that traces, boots or polls: two cores carry one of them at a time. It ends when
/// this is dropped.
#[derive(Debug)]
pub struct Turn(#[allow(dead_code)] File);

/// Waits for the turn.
pub fn turn() -> Result<Turn> {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("turn.lock");
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    file.lock().with_context(|| format!("lock {}", path.display()))?;
    Ok(Turn(file))
}

/// The program under test.
pub const FABSCOPE: &str = env!("CARGO_BIN_EXE_fabscope");

/// What a command left behind.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// Fails unless it ended with this code and its error output holds these texts.
    pub fn expect(self, code: i32, texts: &[&str]) -> Result<Outcome> {
        ensure!(self.code == Some(code), "exit code {code} was expected: {self:#?}");
        for text in texts {
            ensure!(self.stderr.contains(text), "{text:?} was expected in the error output: {self:#?}");
        }
        Ok(self)
    }
}

/// Runs a command to its end.
pub fn outcome(command: &mut Command) -> Result<Outcome> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("running {command:?}"))?;
    Ok(Outcome {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Runs `fabscope` to its end.
pub fn fabscope<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<Outcome> {
    outcome(Command::new(FABSCOPE).args(arguments))
}

/// Whether this process, and so what it starts, ignores a signal: some CI runners and nohup have it so.
pub fn ignores(signal: Signal) -> Result<bool> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).context("no SigIgn")?;
    Ok(u64::from_str_radix(mask.trim(), 16)? >> (signal as u32 - 1) & 1 == 1)
}

/// Whether uprobes and BPF programs can be had here; says why where not.
pub fn can_trace() -> bool {
    if !nix::unistd::geteuid().is_root() {
        skipped("recording needs root");
        return false;
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        skipped("this kernel has no BTF");
        return false;
    }
    true
}

/// A process that is killed when this is dropped.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts a command.
    pub fn start(command: &mut Command) -> Result<Process> {
        command.stdin(Stdio::null());
        command.spawn().map(Process).with_context(|| format!("starting {command:?}"))
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.0.id().cast_signed()), signal)?)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// Waits for its end.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "process {} still runs after {timeout:?}", self.pid());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running `fabscope record`.
#[derive(Debug)]
pub struct Recording {
    process: Process,
    pub run: PathBuf,
    log: PathBuf,
}

impl Recording {
    /// Starts `fabscope record SIDE --spdk PID -o RUN -q MORE...` and waits until it has attached.
    pub fn start(side: &str, pid: u32, run: &Path, more: &[&str]) -> Result<Recording> {
        Recording::start_as(&mut Command::new(FABSCOPE), side, pid, run, more)
    }

    /// As [`Recording::start`], with the command that runs `fabscope` given.
    pub fn start_as(
        command: &mut Command,
        side: &str,
        pid: u32,
        run: &Path,
        more: &[&str],
    ) -> Result<Recording> {
        let log = run.with_extension("log");
        command
            .args(["record", side, "--spdk", &pid.to_string(), "-q", "-o"])
            .arg(run)
            .args(more)
            .stdout(Stdio::null())
            .stderr(File::create(&log)?);
        let mut recording = Recording { process: Process::start(command)?, run: run.to_owned(), log };
        let deadline = Instant::now() + SOON;
        // The run is made when every probe is in place.
        while !run.join("run.json").exists() {
            if let Some(status) = recording.process.ended()? {
                bail!("record {side} ended ({status}) before it recorded: {}", recording.said());
            }
            ensure!(Instant::now() < deadline, "record {side} does not attach: {}", recording.said());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(recording)
    }

    /// What it wrote to standard error.
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Waits for its end by itself, which has to be a good one.
    pub fn finish(mut self) -> Result<PathBuf> {
        let status = self.process.wait(SOON)?;
        ensure!(status.success(), "the recording of {} {status}: {}", self.run.display(), self.said());
        Ok(self.run.clone())
    }

    /// Ends it in order, with Ctrl-C.
    pub fn stop(self) -> Result<PathBuf> {
        self.process.signal(Signal::SIGINT)?;
        self.finish()
    }
}

/// The commands of a run as they stand in its files.
#[derive(Debug)]
pub struct Rows(DataFrame);

impl Rows {
    /// All of a run's commands.
    pub fn read(run: &Run) -> Result<Rows> {
        Ok(Rows(run.commands()?.collect()?))
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.height()
    }

    /// A column's values in the order of the rows.
    pub fn column(&self, name: &str) -> Result<Vec<Option<i64>>> {
        let column = self.0.column(name)?.cast(&DataType::Int64)?;
        Ok(column.i64()?.iter().collect())
    }

    /// A column that has no nulls.
    pub fn full(&self, name: &str) -> Result<Vec<i64>> {
        let values: Option<Vec<i64>> = self.column(name)?.into_iter().collect();
        values.with_context(|| format!("{name} is null for some commands"))
    }
}

/// Two runs joined, with the rows they were joined from.
#[derive(Debug)]
pub struct Pair {
    pub joined: Joined,
    pub host: Rows,
    pub target: Rows,
}

impl Pair {
    /// Joins two runs and checks what has to hold for every pair of runs that ended in order:
    /// the counters, the accounting, the queues' identity, that joined commands are the same on the
    /// wire, and that their stages add up to what the host's clock says.
    pub fn join(host: &Path, target: &Path) -> Result<Pair> {
        let (host_run, target_run) = (Run::open(host)?, Run::open(target)?);
        for run in [&host_run, &target_run] {
            ensure!(run.manifest().state == State::Closed, "{} is open", run.directory().display());
            counters_are_exact(run)?;
        }
        let joined = joiner::join(&host_run, &target_run, &JoinOptions::default())?;
        let pair = Pair { joined, host: Rows::read(&host_run)?, target: Rows::read(&target_run)? };
        pair.adds_up()?;
        pair.same_on_the_wire()?;

        let accounting = pair.joined.accounting();
        ensure!(accounting.host_commands == pair.host.len() as u64, "{accounting:?}");
        ensure!(accounting.host_commands == accounting.joined + accounting.host.total(), "{accounting:?}");
        ensure!(
            accounting.target_commands == accounting.joined + accounting.target.total(),
            "{accounting:?}"
        );

        let (ours, theirs) = (host_run.queues()?, target_run.queues()?);
        for link in pair.joined.links() {
            for (h, t) in link.host.iter().zip(&link.target) {
                let (h, t) = (ours.get(h).context("no queue")?, theirs.get(t).context("no queue")?);
                ensure!(
                    (&h.subsystem_nqn, &h.host_nqn, h.cntlid, h.qid)
                        == (&t.subsystem_nqn, &t.host_nqn, t.cntlid, t.qid),
                    "{h:?} and {t:?} were linked"
                );
                ensure!(!h.subsystem_nqn.is_empty() && h.cntlid > 0 && h.qid > 0, "{h:?}");
            }
        }
        Ok(pair)
    }

    /// The stages of every pair add up to the host's latency, none is negative.
    fn adds_up(&self) -> Result<()> {
        let queued = self.host.column("h_queued")?;
        // Where no hook takes h_end, h_done stands for it.
        let not_taken = self
            .joined
            .host_manifest()
            .hooks
            .iter()
            .any(|h| h.boundary == Boundary::HEnd && h.hook.is_none());
        let end = self.host.column(if not_taken { "h_done" } else { "h_end" })?;
        // It stands for the end of single commands, too, where the kernel skipped the hit.
        let done = self.host.column("h_done")?;
        let mut skipped = 0;
        for pair in self.joined.pairs() {
            let row = pair.host_row as usize;
            let stages = self.joined.stages(*pair).context("a pair without stages")?;
            skipped += usize::from(end[row].is_none());
            let (queued, end) = (
                queued[row].context("no h_queued")?,
                end[row].or(done[row]).context("no end and no h_done")?,
            );
            ensure!(stages.latency == end - queued, "row {row}: {stages:?}");
            ensure!(stages.stages.iter().sum::<i64>() == stages.latency, "row {row}: {stages:?}");
            ensure!(stages.stages.iter().all(|&s| s >= 0), "row {row}: {stages:?}");
        }
        let missed = missed_by(self.joined.host_manifest());
        ensure!(skipped <= missed, "{skipped} commands without an end, and {missed} hits missed");
        Ok(())
    }

    fn same_on_the_wire(&self) -> Result<()> {
        for name in ["cid", "opcode", "nsid", "slba", "nlb", "bytes", "status"] {
            let (ours, theirs) = (self.host.column(name)?, self.target.column(name)?);
            for pair in self.joined.pairs() {
                let (h, t) = (ours[pair.host_row as usize], theirs[pair.target_row as usize]);
                ensure!(h == t, "{name} is {h:?} on the host and {t:?} on the target: {pair:?}");
            }
        }
        Ok(())
    }

    /// The share of the host's commands inside both recordings that were joined.
    pub fn share(&self) -> f64 {
        let accounting = self.joined.accounting();
        let elsewhere = accounting.host.of(SetAside::Outside) + accounting.host.of(SetAside::OtherQueue);
        accounting.joined as f64 / (accounting.host_commands - elsewhere) as f64
    }

    /// Fails unless at least 99.9 % of the commands inside both recordings were joined, and of the `least` that
    /// the load did.
    pub fn nearly_all_joined(&self, least: u64) -> Result<()> {
        let accounting = self.joined.accounting();
        let share = self.share();
        eprintln!(
            "{} of {} host and {} target commands joined ({:.3} % of those inside both recordings)",
            accounting.joined,
            accounting.host_commands,
            accounting.target_commands,
            share * 100.0
        );
        for manifest in [self.joined.host_manifest(), self.joined.target_manifest()] {
            for event in manifest.events.iter().filter(|event| event.what.starts_with("probe missed")) {
                eprintln!("{}: {} of {}", manifest.side, event.what, event.on);
            }
        }
        // A preemptible kernel may skip a hit of a hook.
        let enough = accounting.joined as f64 >= least as f64 * 0.999;
        ensure!(share >= 0.999 && enough, "{accounting:#?}\n{:#?}", self.joined.notes());
        Ok(())
    }

    /// Fails if a pair is wrong by a truth that the joiner does not use: a connection keeps the order of
    /// its capsules, so the n-th command that a queue's host sent is the n-th that its target read. Both
    /// recordings have to hold every command of the load. Returns how many pairs were checked.
    pub fn none_wrong_by_order(&self) -> Result<usize> {
        let by_queue = |rows: &Rows, boundary: &str| -> Result<BTreeMap<i64, Vec<(i64, usize)>>> {
            let mut queues = BTreeMap::<i64, Vec<(i64, usize)>>::new();
            let times = rows.full(boundary)?;
            for (row, queue) in rows.full("queue")?.into_iter().enumerate() {
                queues.entry(queue).or_default().push((times[row], row));
            }
            queues.values_mut().for_each(|rows| rows.sort_unstable());
            Ok(queues)
        };
        let (sent, read) = (by_queue(&self.host, "h_sent")?, by_queue(&self.target, "t_recv")?);
        let mut partner = BTreeMap::new();
        for link in self.joined.links() {
            let ([h], [t]) = (&link.host[..], &link.target[..]) else {
                bail!("{link:?} is more than one connection");
            };
            let none = Vec::new();
            let (h, t) =
                (sent.get(&i64::from(h.0)).unwrap_or(&none), read.get(&i64::from(t.0)).unwrap_or(&none));
            ensure!(h.len() == t.len(), "{link:?}: {} commands sent, {} read", h.len(), t.len());
            partner.extend(h.iter().zip(t).map(|(h, t)| (h.1, t.1)));
        }
        for pair in self.joined.pairs() {
            let truth = partner.get(&(pair.host_row as usize));
            ensure!(truth == Some(&(pair.target_row as usize)), "{pair:?}, and the order says {truth:?}");
        }
        Ok(self.joined.pairs().len())
    }

    /// As [`Pair::none_wrong_by_order`] where the recordings hold different parts of the load: what the host
    /// sent first the target read first.
    pub fn none_crosses(&self) -> Result<usize> {
        let (queue, sent, read) =
            (self.host.full("queue")?, self.host.full("h_sent")?, self.target.full("t_recv")?);
        let mut ways: Vec<_> = self
            .joined
            .pairs()
            .iter()
            .map(|pair| {
                let row = pair.host_row as usize;
                (queue[row], sent[row], read[pair.target_row as usize])
            })
            .collect();
        ways.sort_unstable();
        for both in ways.windows(2) {
            let [first, second] = both else { continue };
            ensure!(first.0 != second.0 || first.2 < second.2, "{first:?} and {second:?} cross");
        }
        Ok(ways.len())
    }

    /// Fails if a pair is wrong by the commands' addresses, each of which has to occur once on each side.
    pub fn none_wrong_by_address(&self) -> Result<usize> {
        let keyed = |rows: &Rows| -> Result<BTreeMap<(i64, i64), usize>> {
            let (opcode, slba) = (rows.full("opcode")?, rows.full("slba")?);
            let keyed: BTreeMap<_, _> =
                opcode.into_iter().zip(slba).enumerate().map(|(row, key)| (key, row)).collect();
            ensure!(keyed.len() == rows.len(), "the load was to use each address once");
            Ok(keyed)
        };
        let (ours, theirs) = (keyed(&self.host)?, keyed(&self.target)?);
        let partner: BTreeMap<usize, usize> =
            ours.iter().filter_map(|(key, h)| Some((*h, *theirs.get(key)?))).collect();
        for pair in self.joined.pairs() {
            let truth = partner.get(&(pair.host_row as usize));
            ensure!(truth == Some(&(pair.target_row as usize)), "{pair:?}, and the address says {truth:?}");
        }
        Ok(self.joined.pairs().len())
    }

    /// The report with all its parts.
    pub fn report(&self) -> Result<Report> {
        Ok(joiner::report(&self.joined, &ReportOptions { detail: true, ..ReportOptions::default() })?)
    }
}

/// Fails unless the counters of a run that ended in order account for every command.
pub fn counters_are_exact(run: &Run) -> Result<()> {
    let counters = run.manifest().counters;
    let said = counters.recorded + counters.unsampled + counters.lost.total() + counters.in_flight;
    ensure!(counters.seen == said, "{}: {counters:?}", run.directory().display());
    let rows = Rows::read(run)?.len() as u64;
    ensure!(counters.recorded == rows, "{}: {rows} rows and {counters:?}", run.directory().display());
    Ok(())
}

/// `fabscope report HOST TARGET --format json`.
pub fn report_json(host: &Path, target: &Path) -> Result<Value> {
    report_json_with(host, target, &[])
}

/// As [`report_json`], with more arguments.
pub fn report_json_with(host: &Path, target: &Path, more: &[&str]) -> Result<Value> {
    let mut command = Command::new(FABSCOPE);
    command.arg("report").args([host, target]).args(["--format", "json"]).args(more);
    Ok(serde_json::from_str(&outcome(&mut command)?.expect(0, &[])?.stdout)?)
}

/// Times of a stage, of the class with the most commands of an operation.
pub fn stage_times(report: &Report, operation: &str, stage: Stage) -> Result<Distribution> {
    let class = report
        .classes
        .iter()
        .filter(|class| class.operation.to_string() == operation && !class.error)
        .max_by_key(|class| class.commands)
        .with_context(|| format!("no {operation} in the report"))?;
    Ok(class.stages.of(stage).context("a stage that is not known")?.times)
}

/// Fails unless the medians moved by `delay` in `stage` within `tolerance` of it, and by less than that in
/// every other. Of several rounds the one counts, for each stage, that the machine's other work disturbed
/// least.
pub fn only_this_stage_grew(
    before: &[Report],
    after: &[Report],
    operation: &str,
    stage: Stage,
    delay: Duration,
    tolerance: f64,
) -> Result<()> {
    let delay = delay.as_nanos() as f64;
    let mut wrong = Vec::new();
    for each in Stage::ALL {
        let median = |rounds: &[Report]| -> Result<i64> {
            let mut medians = Vec::new();
            for report in rounds {
                let times = stage_times(report, operation, each)?;
                medians.push(times.p50_ns.context("too few commands for a median")?);
            }
            medians.into_iter().min().context("no rounds")
        };
        let (was, is) = (median(before)?, median(after)?);
        let grew = (is - was) as f64;
        let expected = if each == stage { delay } else { 0.0 };
        eprintln!(
            "{:<18} {was:>10} ns to {is:>10} ns: {:+.2} % of the delay",
            each.title(),
            grew / delay * 100.0
        );
        if (grew - expected).abs() > tolerance * delay {
            wrong.push(each.title());
        }
    }
    ensure!(wrong.is_empty(), "a delay in {} shows wrongly in {wrong:?}", stage.title());
    Ok(())
}

/// Every command of a run has a time for each boundary that it passed. An SPDK host with no bdev layer of
/// its own has no h_end, and its run says so.
pub fn all_boundaries_were_taken(run: &Run) -> Result<()> {
    let (rows, missed) = (Rows::read(run)?, missed(run));
    let r2ts = rows.full("r2ts")?;
    for boundary in Boundary::of(run.manifest().side) {
        let hook = run.manifest().hooks.iter().find(|hook| hook.boundary == boundary).context("no hook")?;
        if boundary == Boundary::HEnd && run.manifest().kind == Kind::Spdk && hook.hook.is_none() {
            ensure!(!hook.measured && hook.why.is_some(), "{hook:?}");
            continue;
        }
        ensure!(hook.hook.is_some(), "{hook:?}");
        let of_r2t = matches!(boundary.name(), "h_r2t" | "h_data_sent" | "t_r2t" | "t_data");
        let lacking = rows
            .column(boundary.name())?
            .iter()
            .zip(&r2ts)
            .filter(|(time, r2ts)| time.is_none() && (!of_r2t || **r2ts > 0))
            .count();
        ensure!(
            lacking <= missed,
            "{lacking} of {} commands have no {boundary}, {missed} hits were missed",
            rows.len()
        );
    }
    Ok(())
}

/// Hits of hooks that the kernel skipped, as it told itself.
pub fn missed(run: &Run) -> usize {
    missed_by(run.manifest())
}

fn missed_by(manifest: &Manifest) -> usize {
    let hits = |what: &str| what.strip_prefix("probe missed ")?.split(' ').next()?.parse::<usize>().ok();
    manifest.events.iter().filter_map(|event| hits(&event.what)).sum()
}
