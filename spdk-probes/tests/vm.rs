//! Records the stand-in's two sides on Debian's stock kernels, in the test bed's VM: there the kernel's own
//! functions take fentry and fexit programs, and 6.1 lacks multi-uprobes and both raw tracepoints. One boot a
//! kernel; what runs in the VM is this very test program.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's way to fail")]

mod common;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::standin::{Standin, Two, program, record_two};
use common::{assert_has, assert_ordered};
use run_format::{Boundary, Command, Hook, Side};
use spdk_probes::{Avoid, Detail, Options};
use testbed::{Kernel, Vm};

/// Reads and in-capsule writes; reads and writes that wait for two R2Ts.
const SMALL: &[&str] =
    &["--rw", "randrw", "--block-size", "4K", "--count", "300", "--queue-depth", "4", "--queues", "2"];
const LARGE: &[&str] = &["--rw", "randrw", "--block-size", "32K", "--count", "200", "--queue-depth", "4"];
const R2T_BYTES: &str = "16K";

/// An emulated machine is slow, slower when the real one is busy.
const MOST: Duration = Duration::from_secs(240);

fn on(kernel: Kernel) -> anyhow::Result<()> {
    // One at a time: each takes a whole processor.
    static ONE: Mutex<()> = Mutex::new(());
    if !testbed::available(kernel)? {
        return Ok(());
    }
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let began = Instant::now();
    let this = std::env::current_exe()?;
    let name = this.file_name().unwrap().to_string_lossy().into_owned();
    let vm = Vm::builder(kernel)
        .program(this)
        .program_with_debug(program("standin-target"))
        .program_with_debug(program("standin-initiator"))
        .boot()?;
    println!("booted {} after {:.1?}", vm.release(), began.elapsed());
    let output = vm.run(&format!("/usr/local/bin/{name} --exact inside --ignored --nocapture"), MOST)?;
    println!("{}{}", output.text(), output.errors());
    let output = output.check()?;
    anyhow::ensure!(output.text().contains("1 passed"), "nothing ran in the VM");
    let console = vm.console();
    for bad in ["BUG:", "WARNING:", "Oops"] {
        anyhow::ensure!(!console.contains(bad), "the kernel complained:\n{console}");
    }
    println!("{kernel} took {:.1?}", began.elapsed());
    Ok(())
}

#[test]
fn debian_6_1_takes_the_flush_and_the_read_by_fentry_and_fexit() -> anyhow::Result<()> {
    on(Kernel::Debian6_1)
}

#[test]
fn debian_6_12_takes_the_flush_and_the_read_by_fentry_and_fexit() -> anyhow::Result<()> {
    on(Kernel::Debian6_12)
}

#[test]
#[ignore = "runs inside the VM, started by the tests beside it"]
fn inside() {
    let standin = Standin::start(&["--r2t-bytes", R2T_BYTES, "--reactors", "2"]);
    println!("the kernel's own functions");
    let options = Options { detail: Detail::Full, ..Options::default() };
    let two = record_two(&standin, &options, [SMALL, LARGE]);
    let taken = |hooks: &[Hook], boundary, what: &str| {
        let hook = hook(hooks, boundary);
        assert!(hook.measured && hook.hook.as_deref().is_some_and(|hook| hook.contains(what)), "{hook:#?}");
    };
    for boundary in [Boundary::TSent, Boundary::TR2t] {
        taken(&two.target.2, boundary, "fentry tcp_sendmsg");
    }
    for (_, _, hooks) in &two.hosts {
        for boundary in [Boundary::HSent, Boundary::HDataSent] {
            taken(hooks, boundary, "fentry tcp_sendmsg");
        }
        for boundary in [Boundary::HR2t, Boundary::HRecv] {
            taken(hooks, boundary, "fexit tcp_recvmsg");
        }
    }
    check(&two, true);

    println!("without trampolines");
    let options = Options { avoid: vec![Avoid::Trampolines], ..options };
    let two = record_two(&standin, &options, [SMALL, LARGE]);
    let sent = hook(&two.target.2, Boundary::TSent).hook.clone().expect("a way to see the flush");
    // The raw tracepoint in tcp_sendmsg came with 6.16, the one behind a socket's read with 6.3.
    assert!(sent.contains("sendmsg"), "{sent}");
    let received = hook(&two.hosts[0].2, Boundary::HRecv).hook.is_some();
    check(&two, received);
}

fn hook(hooks: &[Hook], boundary: Boundary) -> &Hook {
    hooks.iter().find(|hook| hook.boundary == boundary).unwrap()
}

/// Everything is there once, in order, and as the initiators say.
fn check(two: &Two, received: bool) {
    for hook in two.target.2.iter().chain(&two.hosts[0].2) {
        println!(
            "  {:<12} {}{}",
            hook.boundary.name(),
            hook.hook.as_deref().unwrap_or("-"),
            hook.why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default()
        );
    }
    let (there, theirs, _) = &two.target;
    println!("  target {theirs:?}");
    let is_write = |command: &&Command| command.opcode == 1;
    let (mut commands, mut reads, mut writes) = (0, 0, 0);
    for ((here, ours, _), summary) in two.hosts.iter().zip(&two.summaries) {
        println!("  host {ours:?}\n  {summary}");
        let said = |name: &str| summary[name].as_u64().unwrap();
        assert_eq!((said("errors"), said("verify_errors")), (0, 0), "{summary}");
        assert_eq!((ours.seen, ours.recorded), (said("commands"), said("commands")), "{ours:?} {summary}");
        assert_eq!((ours.lost.total(), ours.in_flight, ours.no_start), (0, 0, 0), "{ours:?}");
        let written = here.commands.iter().filter(is_write).count() as u64;
        assert_eq!((written, ours.recorded - written), (said("writes"), said("reads")), "{summary}");
        assert!(said("writes") > 0 && said("reads") > 0, "{summary}");
        commands += said("commands");
        reads += said("reads");
        writes += said("writes");
        for command in &here.commands {
            assert_has(command, &[Boundary::HQueued, Boundary::HDriver, Boundary::HSent, Boundary::HDone]);
            assert_has(command, &[Boundary::HEnd]);
            assert_eq!(command.time(Boundary::HRecv).is_some(), received, "{command:?}");
            let waits = command.opcode == 1 && command.bytes > 8192;
            assert_eq!(command.r2ts, if waits { 2 } else { 0 }, "{command:?}");
            assert_eq!(command.time(Boundary::HR2t).is_some(), waits, "{command:?}");
            assert_eq!(command.time(Boundary::HDataSent).is_some(), waits, "{command:?}");
            assert_ordered(Side::Host, command);
        }
    }
    assert_eq!((theirs.seen, theirs.recorded), (commands, commands), "{theirs:?}");
    assert_eq!((theirs.lost.total(), theirs.in_flight, theirs.no_start), (0, 0, 0), "{theirs:?}");
    let written = there.commands.iter().filter(is_write).count() as u64;
    assert_eq!((written, theirs.recorded - written), (writes, reads), "{theirs:?}");
    for command in &there.commands {
        assert_has(command, &[Boundary::TRecv, Boundary::TSubmit, Boundary::TDone, Boundary::TResp]);
        assert_has(command, &[Boundary::TSent]);
        let waits = command.opcode == 1 && command.bytes > 8192;
        assert_eq!(command.r2ts, if waits { 2 } else { 0 }, "{command:?}");
        assert_eq!(command.time(Boundary::TR2t).is_some(), waits, "{command:?}");
        assert_eq!(command.time(Boundary::TData).is_some(), waits, "{command:?}");
        assert_ordered(Side::Target, command);
    }
}
