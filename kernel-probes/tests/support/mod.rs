//! What the tests that record kernels in the test bed's VM share: building the example programs, running a
//! recorder in the VM and reading what it printed. It makes no connections and no load.
#![allow(dead_code)] // each test program takes its part

use anyhow::{Context, Result, ensure};
use run_format::Cid;
use run_format::bpf::{sampled, sampling_limit};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use testbed::{Running, Vm};

/// How long what a test waits for may take: in an emulated machine, and on a real one that is busy, attaching alone takes
/// long.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

/// A program of `examples/`, built as this test was.
pub(crate) fn example(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let profile = test.ancestors().nth(2).context("a test lies in target/PROFILE/deps")?;
    let program = profile.join("examples").join(name);
    if !program.exists() {
        // `cargo test --test vm` builds no examples.
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let built = Command::new(cargo)
            .args(["build", "--package", "kernel-probes", "--example", name])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()?;
        ensure!(built.success() && program.exists(), "example {name} is not at {}", program.display());
    }
    Ok(program)
}

/// One command that a recorder printed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    pub(crate) queue: usize,
    pub(crate) cid: u16,
    pub(crate) opcode: u8,
    pub(crate) nsid: u32,
    pub(crate) slba: u64,
    pub(crate) nlb0: u16,
    pub(crate) bytes: u32,
    pub(crate) status: u16,
    pub(crate) flags: u16,
    pub(crate) r2ts: u8,
    pub(crate) position: Option<u32>,
    pub(crate) turnaround: Option<u64>,
    pub(crate) drive: Option<u64>,
    pub(crate) times: Vec<Option<u64>>,
}

/// cid, opcode, nsid, slba, nlb.
pub(crate) type Identity = (u16, u8, u32, u64, u16);

impl Row {
    pub(crate) fn at(&self, boundary: run_format::Boundary) -> Option<u64> {
        self.times[boundary.slot()]
    }

    /// What the wire tells of it.
    pub(crate) fn identity(&self) -> Identity {
        (self.cid, self.opcode, self.nsid, self.slba, self.nlb0)
    }
}

/// One queue that a recorder printed.
#[derive(Debug, Clone)]
pub(crate) struct QueueRow {
    pub(crate) subsystem_nqn: String,
    pub(crate) host_nqn: String,
    pub(crate) cntlid: u16,
    pub(crate) qid: u16,
    pub(crate) host: (String, u16),
    pub(crate) target: (String, u16),
    pub(crate) device: String,
    pub(crate) served_by: String,
    pub(crate) existed: bool,
    pub(crate) transport: String,
}

/// How one boundary was taken: the hook, its rung, whether it is the moment itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HookRow {
    pub(crate) hook: String,
    pub(crate) rung: u32,
    pub(crate) measured: bool,
}

/// What `record_kernel` printed.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    /// By boundary and transport (`-` for all).
    pub(crate) hooks: BTreeMap<(String, String), HookRow>,
    pub(crate) queues: Vec<QueueRow>,
    pub(crate) went: BTreeMap<usize, u64>,
    pub(crate) events: Vec<(u64, String, String)>,
    pub(crate) commands: Vec<Row>,
    pub(crate) counters: BTreeMap<String, u64>,
}

impl Recording {
    fn parse(text: &str) -> Result<Recording> {
        let mut all = Recording::default();
        for line in text.lines() {
            let f: Vec<&str> = line.split('\t').collect();
            all.line(&f).with_context(|| line.to_owned())?;
        }
        ensure!(!all.counters.is_empty(), "the recorder did not end in order:\n{text}");
        Ok(all)
    }

    fn line(&mut self, f: &[&str]) -> Result<()> {
        let end = |address: &str, port: &str| -> Result<(String, u16)> {
            Ok((address.to_owned(), if port == "-" { 0 } else { port.parse()? }))
        };
        match f[0] {
            "ready" => println!("attached in {} ms", f[1]),
            "hook" => {
                let row = HookRow { hook: f[2].to_owned(), rung: f[3].parse()?, measured: f[4] == "true" };
                self.hooks.insert((f[1].to_owned(), f[6].to_owned()), row);
            }
            "queue" => {
                ensure!(f[1].parse::<usize>()? == self.queues.len());
                self.queues.push(QueueRow {
                    subsystem_nqn: f[2].to_owned(),
                    host_nqn: f[3].to_owned(),
                    cntlid: f[4].parse()?,
                    qid: f[5].parse()?,
                    host: end(f[6], f[7])?,
                    target: end(f[8], f[9])?,
                    device: f[10].to_owned(),
                    served_by: f[11].to_owned(),
                    existed: f[13] == "true",
                    transport: f[14].to_owned(),
                });
            }
            "went" => drop(self.went.insert(f[1].parse()?, f[2].parse()?)),
            "event" => self.events.push((f[1].parse()?, f[2].to_owned(), f[3].to_owned())),
            "command" => {
                let known =
                    |t: &str| -> Result<Option<u64>> { Ok((t != "-").then(|| t.parse()).transpose()?) };
                self.commands.push(Row {
                    queue: f[1].parse()?,
                    cid: f[2].parse()?,
                    opcode: f[3].parse()?,
                    nsid: f[4].parse()?,
                    slba: f[5].parse()?,
                    nlb0: f[6].parse()?,
                    bytes: f[7].parse()?,
                    status: f[8].parse()?,
                    flags: f[10].parse()?,
                    r2ts: f[11].parse()?,
                    position: (f[12] != "-").then(|| f[12].parse()).transpose()?,
                    turnaround: known(f[13])?,
                    drive: known(f[14])?,
                    times: f[15..].iter().map(|t| known(t)).collect::<Result<_>>()?,
                });
            }
            "counters" => {
                for pair in f[1..].chunks(2) {
                    self.counters.insert(pair[0].to_owned(), pair[1].parse()?);
                }
            }
            _ => {}
        }
        Ok(())
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.counters[name]
    }

    /// How a boundary is taken of a transport's commands.
    pub(crate) fn hook(&self, boundary: run_format::Boundary, transport: &str) -> Result<&HookRow> {
        let of = |transport: &str| self.hooks.get(&(boundary.name().to_owned(), transport.to_owned()));
        of(transport).or_else(|| of("-")).with_context(|| format!("no hook of {boundary} over {transport}"))
    }

    /// seen = recorded + unsampled + lost + in flight, and what was recorded came out.
    pub(crate) fn adds_up(&self) -> Result<()> {
        let lost = ["ring_full", "map_full", "unfinished", "unreadable", "probe_missed"];
        let parts = self.counter("recorded")
            + self.counter("unsampled")
            + self.counter("in_flight")
            + lost.iter().map(|name| self.counter(name)).sum::<u64>();
        ensure!(self.counter("seen") == parts, "{:?}", self.counters);
        ensure!(self.counter("recorded") == self.commands.len() as u64, "{:?}", self.counters);
        Ok(())
    }

    /// Of the commands that began, hardly any was missed: where a kernel preempts tasks, the hooks of what runs in
    /// tasks are such that it does not skip them, but for what comes in with an interrupt at the wrong moment.
    pub(crate) fn sees_nearly_all(&self) -> Result<()> {
        ensure!(self.counter("probe_missed") * 200 <= self.counter("seen"), "{:?}", self.counters);
        Ok(())
    }

    /// Hits that the kernel ran no program for.
    pub(crate) fn missed(&self) -> usize {
        self.missed_by("")
    }

    /// Those of the programs whose name begins so.
    pub(crate) fn missed_by(&self, program: &str) -> usize {
        self.events
            .iter()
            .filter(|(_, _, on)| on.starts_with(program))
            .filter_map(|(_, what, _)| {
                what.strip_prefix("probe missed ")?.split(' ').next()?.parse::<usize>().ok()
            })
            .sum()
    }

    /// How many commands there are of each identity and connection.
    pub(crate) fn identities(&self, keep: impl Fn(&Row) -> bool) -> BTreeMap<(u16, Identity), usize> {
        let mut all = BTreeMap::new();
        for row in self.commands.iter().filter(|row| keep(row)) {
            *all.entry((self.queues[row.queue].host.1, row.identity())).or_default() += 1;
        }
        all
    }
}

/// Fails unless `some`, which keeps one command in so many, has of what was done `while_some` recorded those commands of
/// `whole` that the hash keeps, and no others.
pub(crate) fn sampling_keeps_what_the_hash_says(
    whole: &Recording,
    some: &Recording,
    one_in: u32,
    while_some: impl Fn(&Row) -> bool,
) -> Result<()> {
    let limit = sampling_limit(one_in);
    let kept = |row: &Row| sampled(limit, Cid(row.cid), row.opcode, row.nsid, row.slba, row.nlb0);
    ensure!(some.commands.iter().all(kept), "one was kept that the hash does not keep");
    let (ours, all) = (some.identities(|_| true), whole.identities(|row| kept(row) && while_some(row)));
    let differ = ours.iter().filter(|(key, count)| all.get(key) != Some(count)).count()
        + all.keys().filter(|key| !ours.contains_key(key)).count();
    ensure!(differ <= some.missed() + whole.missed(), "{differ} are not those that the hash keeps");
    ensure!(some.counter("recorded") > 0, "{:?}", some.counters);
    ensure!(some.counter("unsampled") > some.counter("recorded"), "{:?}", some.counters);
    Ok(())
}

/// Starts a recorder of a side (`host`, `target`) in the VM; it writes to `/tmp/NAME` and records until
/// `/tmp/NAME.stop` exists.
pub(crate) fn record<'vm>(vm: &'vm Vm, side: &str, name: &str, options: &str) -> Result<Running<'vm>> {
    vm.spawn(&format!("record_kernel {side} --seconds 600 --until /tmp/{name}.stop {options} > /tmp/{name}"))
}

/// Waits until a recorder is attached.
pub(crate) fn ready(vm: &Vm, name: &str, recorder: &Running<'_>) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while vm.run(&format!("grep -q ^ready /tmp/{name}"), LIMIT)?.status != 0 {
        ensure!(recorder.is_running(), "recorder {name} ended: {}", recorder.stderr());
        ensure!(Instant::now() < deadline, "recorder {name} did not attach in {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Stops a recorder and reads what it printed.
pub(crate) fn recorded(vm: &Vm, name: &str, recorder: Running<'_>) -> Result<Recording> {
    vm.sh(&format!("touch /tmp/{name}.stop"))?;
    recorder.wait(LIMIT)?.check()?;
    let folder = tempfile::tempdir()?;
    let file = vm.pull(&format!("/tmp/{name}"), folder.path())?;
    Recording::parse(&std::fs::read_to_string(file)?).with_context(|| format!("recording {name}"))
}

/// What `host_io` says that it did: how many commands of each opcode.
pub(crate) fn expected(said: &str) -> Result<BTreeMap<u8, u64>> {
    said.lines()
        .filter_map(|line| line.strip_prefix("expect\t")?.split_once('\t'))
        .map(|(opcode, count)| Ok((opcode.parse()?, count.parse()?)))
        .collect()
}

/// Fails when the VM's kernel complained.
pub(crate) fn content(vm: &Vm) -> Result<()> {
    let console = vm.console();
    for bad in ["BUG:", "WARNING:", "Oops"] {
        ensure!(!console.contains(bad), "the kernel complained:\n{console}");
    }
    Ok(())
}
