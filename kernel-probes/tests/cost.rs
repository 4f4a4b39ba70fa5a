//! Measures what recording the kernel's NVMe/TCP host costs a command, in a VM whose time is counted in
//! instructions, beside a bpftrace script that takes the same boundaries and the same identity. It tells how many
//! instructions are in the way of a command, not how long a processor takes for them.
//!
//!     cargo test -p kernel-probes --test cost -- --ignored --nocapture

mod support;

use anyhow::{Context, Result, ensure};
use run_format::Boundary;
use std::collections::BTreeMap;
use support::{LIMIT, content, example, ready, record, recorded};
use testbed::{Kernel, NullBlk, Running, Vm};

const NQN: &str = "nqn.2024-01.org.example:cost";
/// Reads of a load, besides those that warm up.
const READS: u64 = 400;
const WARM: u64 = READS / 16;
const PAIRS: usize = 5;
const ONE_IN: u32 = 1000;

/// Each boundary of a read and the words that identify it, a line a command. Where it can, it uses fentry too.
const SCRIPT: &str = r#"
struct sqe { unsigned char opcode; unsigned char flags; unsigned short cid; unsigned int nsid;
             unsigned long other[4]; unsigned long slba; unsigned int cdw12; };
BEGIN { printf("ready\n"); }
kfunc:submit_bio_noacct { @bio[(uint64)args->bio] = nsecs; }
kfunc:nvme_tcp_queue_rq { @driver[(uint64)args->bd->rq] = nsecs; }
kfunc:blk_mq_start_request {
  $rq = (uint64)args->rq;
  if (@driver[$rq]) {
    $bio = (uint64)args->rq->bio;
    @queued[$rq] = @bio[$bio];
    delete(@bio[$bio]);
    $sqe = (struct sqe *)*(uint64 *)($rq + sizeof(struct request));
    @id[$rq] = ($sqe->cid, $sqe->opcode, $sqe->nsid, $sqe->slba, $sqe->cdw12, args->rq->mq_hctx->queue_num);
  }
}
kfunc:nvme_tcp_try_send_cmd_pdu { @sent[(uint64)args->req - sizeof(struct request)] = nsecs; }
kfunc:nvme_tcp_recv_skb { @recv[tid] = nsecs; }
kfunc:blk_mq_complete_request_remote {
  $rq = (uint64)args->rq;
  if (@driver[$rq]) { @received[$rq] = @recv[tid]; @done[$rq] = nsecs; }
}
kfunc:blk_update_request {
  $rq = (uint64)args->req;
  if (@driver[$rq]) {
    $id = @id[$rq];
    printf("command %d %d %d %llu %d %d %llu %llu %llu %llu %llu %llu\n",
           $id.0, $id.1, $id.2, $id.3, $id.4, $id.5,
           @queued[$rq], @driver[$rq], @sent[$rq], @received[$rq], @done[$rq], nsecs);
    delete(@queued[$rq]); delete(@driver[$rq]); delete(@id[$rq]);
    delete(@sent[$rq]); delete(@received[$rq]); delete(@done[$rq]);
  }
}
"#;
/// What both take of a read.
const TAKEN: [Boundary; 6] =
    [Boundary::HQueued, Boundary::HDriver, Boundary::HSent, Boundary::HRecv, Boundary::HDone, Boundary::HEnd];

/// What a read takes, ns: the first decile, which nothing disturbs, the median, and the mean. With one CPU whoever
/// takes the records disturbs the reads.
type Took = [f64; 3];

struct Bed {
    vm: Vm,
    device: String,
}

impl Bed {
    fn boot(kernel: Kernel, programs: &[&str]) -> Result<Bed> {
        let mut builder = Vm::builder(kernel).counted_time();
        for name in ["record_kernel", "host_io", "loaded_programs"] {
            builder = builder.program(example(name)?);
        }
        let vm = programs.iter().fold(builder, |builder, name| builder.program(*name)).boot()?;
        let drive = NullBlk { size_mb: 64, memory_backed: true, ..NullBlk::default() };
        let drive = vm.null_blk(drive)?;
        vm.nvmet_tcp(NQN, &drive, 4420)?;
        let controller = vm.connect_tcp("127.0.0.1", 4420, NQN, "nr_io_queues=1")?;
        let device = vm.namespace(&controller, 1)?;
        Ok(Bed { vm, device })
    }

    /// Reads one after the other.
    fn read(&self) -> Result<Took> {
        let said = self.vm.run(&format!("host_io --time-reads {READS} {}", self.device), LIMIT)?;
        let said = said.check()?.text();
        let fields: Vec<&str> = said.trim().split('\t').collect();
        ensure!(fields.first() == Some(&"took") && fields.len() == 5, "{said}");
        Ok([fields[2].parse()?, fields[3].parse()?, fields[4].parse()?])
    }

    /// Reads while fabscope records one command in so many.
    fn recorded(&self, one_in: u32) -> Result<Took> {
        let recorder = record(&self.vm, "host", "cost", &format!("--one-in {one_in}"))?;
        ready(&self.vm, "cost", &recorder)?;
        let took = self.read()?;
        let recording = recorded(&self.vm, "cost", recorder)?;
        self.vm.sh("rm /tmp/cost /tmp/cost.stop")?;
        recording.adds_up()?;
        ensure!(recording.counter("seen") == READS + WARM, "{:?}", recording.counters);
        if one_in == 1 {
            ensure!(recording.commands.len() as u64 == READS + WARM, "{:?}", recording.counters);
            for row in &recording.commands {
                let all = TAKEN.iter().all(|boundary| row.at(*boundary).is_some());
                ensure!(all, "a boundary lacks: {row:?}");
            }
        }
        Ok(took)
    }

    fn scripted(&self) -> Result<Running<'_>> {
        let script = self.vm.spawn("bpftrace /tmp/script.bt > /tmp/script.out")?;
        let wait = "until grep -q ready /tmp/script.out; do sleep 0.1; done";
        self.vm.run(wait, LIMIT)?.check().with_context(|| script.stderr())?;
        Ok(script)
    }

    fn end_script(&self, script: Running<'_>) -> Result<()> {
        self.vm.sh("kill -INT $(pidof bpftrace)")?;
        script.wait(LIMIT)?.check()?;
        let said = self.vm.sh("cat /tmp/script.out; rm /tmp/script.out")?;
        let mut commands = 0;
        for line in said.lines().filter_map(|line| line.strip_prefix("command ")) {
            let words: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            ensure!(words.len() == 6 + TAKEN.len() && words[6..].iter().all(|at| *at > 0), "{line}");
            ensure!(words[6..].is_sorted(), "{line}");
            commands += 1;
        }
        ensure!(commands == READS + WARM, "the script saw {commands} commands: {said:.2000}");
        Ok(())
    }

    /// Reads while bpftrace does.
    fn traced(&self) -> Result<Took> {
        let script = self.scripted()?;
        let took = self.read()?;
        self.end_script(script)?;
        Ok(took)
    }

    /// What each loaded program has come to, by name: instructions, runs, ns in them.
    fn programs(&self) -> Result<BTreeMap<String, (u64, u64, u64)>> {
        let said = self.vm.sh("loaded_programs")?;
        let mut all = BTreeMap::new();
        for line in said.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            ensure!(fields.len() == 7, "{line}");
            all.insert(fields[1].to_owned(), (fields[2].parse()?, fields[4].parse()?, fields[5].parse()?));
        }
        Ok(all)
    }

    /// Prints what the loaded programs cost a read.
    fn print_programs(&self, what: &str) -> Result<()> {
        let before = self.programs()?;
        self.vm.sh("echo 1 > /proc/sys/kernel/bpf_stats_enabled")?;
        self.read()?;
        self.vm.sh("echo 0 > /proc/sys/kernel/bpf_stats_enabled")?;
        let commands = (READS + WARM) as f64;
        let (mut hits, mut time) = (0.0, 0.0);
        println!(
            "\n{what}\n\n| program | instructions | hits a read | instructions run a hit |\n|---|---|---|---|"
        );
        for (name, (length, runs, ns)) in self.programs()? {
            let (_, runs_before, ns_before) = before.get(&name).copied().unwrap_or_default();
            let (runs, ns) = ((runs - runs_before) as f64, (ns - ns_before) as f64);
            if runs / commands < 0.1 {
                continue;
            }
            println!("| `{name}` | {length} | {:.2} | {:.0} |", runs / commands, ns / runs);
            hits += runs / commands;
            time += ns / commands;
        }
        println!("| all | | {hits:.2} | {time:.0} a read |");
        Ok(())
    }

    fn print_recording(&self, one_in: u32) -> Result<()> {
        let recorder = record(&self.vm, "host", "cost", &format!("--one-in {one_in}"))?;
        ready(&self.vm, "cost", &recorder)?;
        self.print_programs(&format!("{}, fabscope, one command in {one_in}", self.vm.release()))?;
        recorded(&self.vm, "cost", recorder)?;
        self.vm.sh("rm /tmp/cost /tmp/cost.stop")?;
        Ok(())
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

#[test]
#[ignore = "takes minutes: a measurement"]
fn a_sampled_command_costs_no_more_than_by_bpftrace() -> Result<()> {
    if !testbed::available(Kernel::Debian6_12)? {
        return Ok(());
    }
    if !is_there("bpftrace") {
        println!("skipped: bpftrace is not in PATH");
        return Ok(());
    }
    let bed = Bed::boot(Kernel::Debian6_12, &["bpftrace"])?;
    bed.vm.sh(&format!("cat > /tmp/script.bt <<'END'{SCRIPT}END"))?;
    bed.read()?;
    let mut added: BTreeMap<&str, Vec<Took>> = BTreeMap::new();
    println!("{}, ns a read: first decile, median, mean", bed.vm.release());
    for _ in 0..PAIRS {
        let ways: [(&str, &dyn Fn() -> Result<Took>); 3] = [
            ("fabscope, every command", &|| bed.recorded(1)),
            ("bpftrace, every command", &|| bed.traced()),
            ("fabscope, one in 1000", &|| bed.recorded(ONE_IN)),
        ];
        for (name, way) in ways {
            let (bare, with) = (bed.read()?, way()?);
            println!("{name}: {with:?}, bare {bare:?}");
            added.entry(name).or_default().push([0, 1, 2].map(|i| with[i] - bare[i]));
        }
    }
    println!(
        "\n| added to a read, instructions | undisturbed | least and most | median | mean |\n|---|---|---|---|---|"
    );
    let mut undisturbed = BTreeMap::new();
    for (name, all) in &added {
        let of = |figure: usize| all.iter().map(|took| took[figure]).collect::<Vec<f64>>();
        let [decile, middle, mean] = [0, 1, 2].map(|figure| median(of(figure)));
        let (least, most) =
            of(0).into_iter().fold((f64::MAX, f64::MIN), |(least, most), x| (least.min(x), most.max(x)));
        println!("| {name} | {decile:.0} | {least:.0} to {most:.0} | {middle:.0} | {mean:.0} |");
        undisturbed.insert(*name, decile);
    }
    for one_in in [1, ONE_IN] {
        bed.print_recording(one_in)?;
    }
    let script = bed.scripted()?;
    bed.print_programs("bpftrace")?;
    bed.end_script(script)?;
    ensure!(
        undisturbed["fabscope, every command"] <= undisturbed["bpftrace, every command"],
        "a command costs more than by bpftrace: {undisturbed:?}"
    );
    content(&bed.vm)
}

#[test]
#[ignore = "takes minutes: a measurement"]
fn the_programs_of_every_kernel() -> Result<()> {
    for kernel in Kernel::ALL {
        if !testbed::available(kernel)? {
            continue;
        }
        let bed = Bed::boot(kernel, &[])?;
        bed.read()?;
        for one_in in [1, ONE_IN] {
            bed.print_recording(one_in)?;
        }
        content(&bed.vm)?;
    }
    Ok(())
}
