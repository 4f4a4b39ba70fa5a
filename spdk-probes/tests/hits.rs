//! What a hit of each BPF program costs, and how many hits a command takes, on the stand-in and on a real
//! `nvmf_tgt` (if `SPDK_BUILD` names the `build` folder of one): a measurement, run on request.
//!
//!     SPDK_BUILD=... cargo test -p spdk-probes --test hits -- --ignored --nocapture table
//!
//! The kernel itself counts: hits and nanoseconds of every program (`BPF_ENABLE_STATS`), and the instructions that
//! the verifier left. The time is the program's alone; the trap that leads to a uprobe is not in it, and two
//! readings of the clock are. `HITS_OTHER` names this test of another build, whose rounds alternate with this one's.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's way to fail")]

mod common;

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::Command as Process;
use std::time::Duration;

use common::nvmf::{Nvmf, build, malloc};
use common::standin::{Running, Standin};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use run_format::{Command, Event, Nanos, Queue, QueueId, Side, Sink, Source};
use spdk_probes::{Choice, Host, Options, find};

/// Keeps nothing.
#[derive(Debug, Default)]
struct Counted {
    queues: u32,
    commands: u64,
}

impl Sink for Counted {
    fn queue(&mut self, _: Queue) -> QueueId {
        self.queues += 1;
        QueueId(self.queues - 1)
    }

    fn queue_is(&mut self, _: QueueId, _: Queue) {}

    fn queue_went(&mut self, _: QueueId, _: Nanos) {}

    fn command(&mut self, _: &Command) {
        self.commands += 1;
    }

    fn event(&mut self, _: Event) {}
}

/// One program, as the kernel counted it.
#[derive(Clone, Debug, PartialEq)]
struct Hit {
    program: String,
    instructions: u64,
    bytes: u64,
    hits: u64,
    ns: u64,
}

/// Lets the kernel count until it is dropped.
fn count() -> OwnedFd {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libbpf_rs::libbpf_sys::bpf_enable_stats(libbpf_rs::libbpf_sys::BPF_STATS_RUN_TIME) };
    assert!(fd >= 0, "{}", std::io::Error::from_raw_os_error(-fd));
    // SAFETY: the descriptor is new, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// The programs that this process holds, by the kernel's number; others may record meanwhile.
fn own() -> Vec<u32> {
    let files = std::fs::read_dir("/proc/self/fdinfo").unwrap();
    files
        .filter_map(|file| std::fs::read_to_string(file.ok()?.path()).ok())
        .filter_map(|text| text.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok()))
        .collect()
}

fn programs() -> BTreeMap<u32, Hit> {
    let own = own();
    let all = ProgInfoQueryOptions::default().include_xlated_prog_insns(true).include_jited_prog_insns(true);
    ProgInfoIter::with_query_opts(all)
        .filter(|program| own.contains(&program.id))
        .map(|program| {
            let hit = Hit {
                program: program.name.to_string_lossy().into_owned(),
                instructions: program.xlated_prog_insns.len() as u64 / 8,
                bytes: program.jited_prog_insns.len() as u64,
                hits: program.run_cnt,
                ns: program.run_time_ns,
            };
            (program.id, hit)
        })
        .collect()
}

/// The name under which an own load is printed.
fn load_name(side: Side, load: &str) -> String {
    format!("{side} {load}")
}

/// Prints what a recording of `source` hits until `ended`.
fn measure<S: Source>(
    name: &str,
    before: &BTreeMap<u32, Hit>,
    mut source: S,
    mut ended: impl FnMut() -> bool,
    one_in: u32,
) where
    S::Error: std::fmt::Debug,
{
    let mut kept = Counted::default();
    while !ended() {
        source.poll(Duration::from_millis(20), &mut kept).unwrap();
    }
    source.poll(Duration::from_millis(200), &mut kept).unwrap();
    let own = programs();
    let counters = source.counters().unwrap();
    assert_eq!(counters.lost.total(), 0, "{name}: {counters:?}");
    assert!(counters.seen > 100, "{name}: {counters:?}");
    for hit in
        own.into_iter().filter(|(id, hit)| !before.contains_key(id) && hit.hits > 0).map(|(_, hit)| hit)
    {
        println!(
            "hit\t{name} 1/{one_in}\t{}\t{}\t{}\t{}\t{}\t{}",
            hit.program, hit.instructions, hit.bytes, hit.hits, hit.ns, counters.seen
        );
    }
}

fn options(one_in: u32) -> Options {
    Options { one_in, ..Options::default() }
}

#[test]
#[ignore = "a round of the table below"]
fn one_round() {
    let _counting = count();
    let standin = Standin::start(&["--in-capsule", "8K"]);
    for one_in in [1, 1024] {
        for (load, size) in [("randread", "4K"), ("randwrite", "4K")] {
            let before = programs();
            let target = standin.attach(&options(one_in));
            let mut initiator = standin.initiator(&[
                "--rw",
                load,
                "--block-size",
                size,
                "--count",
                "30000",
                "--queue-depth",
                "8",
            ]);
            initiator.go();
            measure(&load_name(Side::Target, load), &before, target, || initiator.has_ended(), one_in);
        }
    }
    let Some((build, _one)) = build() else { return };
    let nvmf = Nvmf::start(&build, "0x1", &malloc());
    for (load, size, one_in) in [
        ("randread", "4096", 1),
        ("randwrite", "4096", 1),
        ("randwrite", "65536", 1),
        ("randread", "4096", 1024),
    ] {
        let ios = "60000";
        let arguments = ["-q", "32", "-o", size, "-w", load, "-d", ios, "-t", "60"];
        let before = programs();
        let target = nvmf.attach(&options(one_in));
        let mut perf = Running(nvmf.perf(&arguments).spawn().unwrap());
        let name = format!("nvmf_tgt {load} {size}");
        measure(&name, &before, target, || perf.0.try_wait().unwrap().is_some(), one_in);
    }
    for (load, size, one_in) in
        [("randread", "4096", 1), ("randwrite", "4096", 1), ("randread", "4096", 1024)]
    {
        let mut perf = Running(nvmf.perf(&["-q", "32", "-o", size, "-w", load, "-t", "4"]).spawn().unwrap());
        std::thread::sleep(Duration::from_millis(1500));
        let before = programs();
        let process = find(Side::Host, &Choice::Pid(perf.0.id())).unwrap();
        let host = Host::attach(&process, &options(one_in)).unwrap();
        let name = format!("perf {load} {size}");
        measure(&name, &before, host, || perf.0.try_wait().unwrap().is_some(), one_in);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// One build's figures of one program under one load, over the rounds.
#[derive(Debug, Default)]
struct Figures {
    instructions: u64,
    bytes: u64,
    per_hit: Vec<f64>,
    per_command: Vec<f64>,
}

type Table = BTreeMap<(String, String), Figures>;

fn round(program: &std::path::Path, table: &mut Table) {
    let output =
        Process::new(program).args(["--exact", "one_round", "--ignored", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for line in text.lines() {
        let words: Vec<&str> = line.split('\t').collect();
        let ["hit", load, program, instructions, bytes, hits, ns, commands] = words.as_slice() else {
            continue;
        };
        let number = |text: &str| text.parse::<f64>().unwrap();
        let figures = table.entry(((*load).to_owned(), (*program).to_owned())).or_default();
        figures.instructions = instructions.parse().unwrap();
        figures.bytes = bytes.parse().unwrap();
        figures.per_hit.push(number(ns) / number(hits));
        figures.per_command.push(number(hits) / number(commands));
    }
}

#[test]
#[ignore = "a measurement of some minutes, for a quiet machine"]
fn table() {
    let own = std::env::current_exe().unwrap();
    let other = std::env::var_os("HITS_OTHER");
    let rounds = std::env::var("HITS_ROUNDS").map_or(5, |rounds| rounds.parse().unwrap());
    let mut builds: Vec<(&str, std::path::PathBuf, Table)> = Vec::new();
    builds.extend(other.map(|other| ("other", other.into(), Table::new())));
    builds.push(("this", own, Table::new()));
    for _ in 0..rounds {
        for (_, program, table) in &mut builds {
            round(program, table);
        }
    }
    for (name, _, table) in builds {
        println!("\n{name} build, medians of {rounds} rounds\n");
        println!("| load | program | instructions | x86 bytes | hits a command | ns a hit | ns a command |");
        println!("|---|---|---|---|---|---|---|");
        let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for ((load, program), figures) in table {
            let (per_hit, per_command) = (median(figures.per_hit), median(figures.per_command));
            println!(
                "| {load} | `{program}` | {} | {} | {per_command:.2} | {per_hit:.0} | {:.0} |",
                figures.instructions,
                figures.bytes,
                per_hit * per_command
            );
            let sum = sums.entry(load).or_default();
            // What runs in the kernel's own functions takes no trap.
            let traps = !["flush_tcp", "flush_raw", "received_"].iter().any(|kind| program.starts_with(kind));
            sum.0 += if traps { per_command } else { 0.0 };
            sum.1 += per_hit * per_command;
        }
        for (load, (traps, ns)) in sums {
            println!("| {load} | all | | | {traps:.2} traps | | {ns:.0} |");
        }
    }
}
