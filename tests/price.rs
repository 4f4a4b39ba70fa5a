//! What a recording costs, as `probe` and `record` tell it before anything is attached, and `--max-overhead`; on the
//! stand-in, which has neither RPC nor a trace ring.

mod support;

use anyhow::{Context, Result, ensure};
use run_format::Run;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use support::load::Load;
use support::{FABSCOPE, Outcome, fabscope, outcome};

const SECOND: Duration = Duration::from_secs(1);

fn record(pid: u32, run: &Path, more: &[&str]) -> Result<Outcome> {
    outcome(
        Command::new(FABSCOPE)
            .args(["record", "target", "--spdk", &pid.to_string(), "-o"])
            .arg(run)
            .args(more),
    )
}

#[test]
fn probe_tells_what_was_measured_and_what_it_comes_to() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let program = standin::spawn::program("standin-target")?.display().to_string();
    let said = fabscope(["probe", "target", "--spdk", &program, "--format", "json"])?.expect(0, &[])?;
    let document: Value = serde_json::from_str(&said.stdout)?;
    let price = &document["price"];
    if price["not_measured"] == "the machine is too busy" {
        support::skipped("the machine is too busy to measure what hooks cost");
        return Ok(());
    }
    ensure!(price["not_measured"].is_null() && price["took_ms"].as_u64() < Some(2000), "{price}");
    let hooks = price["hooks"].as_array().context("hooks")?;
    let of = |class: &str, figure: &str| -> Result<u64> {
        let hook = hooks.iter().find(|hook| hook["class"] == class).with_context(|| class.to_owned())?;
        let instead = || hook["instead"][figure].as_u64();
        hook[figure].as_u64().or_else(instead).with_context(|| figure.to_owned())
    };
    for figure in ["ns", "in_place_ns"] {
        ensure!(of("emulated", figure)? < of("single-step", figure)?, "{price}");
        for kind in ["read", "write", "r2t_write"] {
            // Each uprobe's hits at its class's price, and the kernel's hooks on top.
            let uprobes = document["cost"]["uprobes"].as_array().context("uprobes")?;
            let mut sum = 0;
            for uprobe in uprobes {
                let class = uprobe["at"]["class"].as_str().context("class")?;
                sum += uprobe["hits"][kind].as_u64().context("hits")? * of(class, figure)?;
            }
            let told = price["per_command"][kind][figure].as_u64().context("price")?;
            let hooks = document["boundaries"].to_string();
            let kernel = hooks.contains("\"fentry tcp_") || hooks.contains("raw tracepoint");
            ensure!(told == sum || kernel && told > sum, "{kind}: {told}, and the uprobes come to {sum}");
            ensure!(price["naive"][kind]["hits"].as_u64() > Some(0), "{price}");
        }
    }
    let table = fabscope(["probe", "target", "--spdk", &program])?.expect(0, &[])?.stdout;
    for text in ["a command costs: read ", "naive placement: read ", "measured here in ", "single-step "] {
        ensure!(table.contains(text), "{text:?} in {table}");
    }
    Ok(())
}

#[test]
fn a_recording_tells_its_price_first_and_keeps_it() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("mixed", 4, 8 * SECOND)?;
    let pid = load.target.pid();

    let run = here.path().join("plain.run");
    record(pid, &run, &["-d", "300ms"])?.expect(0, &["a command costs: read ", "naive placement: "])?;
    let price = Run::open(&run)?.manifest().price.clone().context("no price")?;
    let told = price.not_measured.as_deref().is_none_or(|why| why == "the machine is too busy");
    ensure!(told && price.budget.is_none(), "{price:?}");
    let naive = price.naive.is_some_and(|naive| naive.read_ns > 0);
    ensure!(price.per_command.read_ns > 0 && naive, "{price:?}");
    // Every hook's own figure is one that was measured, not one of the table.
    let manifest = Run::open(&run)?.manifest().clone();
    let recv = manifest.hooks.iter().find(|hook| hook.boundary.name() == "t_recv").context("t_recv")?;
    ensure!(recv.estimated_ns.is_some_and(|ns| ns > 0 && ns <= price.per_command.read_ns), "{recv:?}");

    let run = here.path().join("quiet.run");
    let said = record(pid, &run, &["-q", "-d", "300ms"])?.expect(0, &[])?;
    ensure!(!said.stderr.contains("costs"), "{said:#?}");
    ensure!(Run::open(&run)?.manifest().price.is_some());

    let run = here.path().join("dear.run");
    record(pid, &run, &["-d", "300ms", "--max-overhead", "1ms"])?.expect(0, &["1.0 ms: kept as planned"])?;
    let manifest = Run::open(&run)?.manifest().clone();
    ensure!(manifest.windows.is_none(), "{manifest:?}");
    ensure!(manifest.price.and_then(|price| price.budget).is_some_and(|said| said.contains("kept")));

    load.unharmed()?;
    Ok(())
}

#[test]
fn a_budget_is_kept_by_windows_or_refused_with_its_figures() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    let _turn = support::turn()?;
    let here = tempfile::tempdir()?;
    let load = Load::running("mixed", 4, 12 * SECOND)?;
    let pid = load.target.pid();

    let run = here.path().join("windows.run");
    let budget = (price_of_a_read(pid, here.path())? / 8).to_string() + "ns";
    record(pid, &run, &["-d", "3500ms", "--max-overhead", &budget])?
        .expect(0, &["kept on average by --window "])?;
    let manifest = Run::open(&run)?.manifest().clone();
    let windows = manifest.windows.context("it was to be windowed")?;
    ensure!(windows.length_ns * 4 < windows.every_ns && windows.slices > 0, "{windows:?}");
    let recorded = Run::open(&run)?.manifest().window;
    let recorded = (recorded.end_ns.0 - recorded.start_ns.0) as f64;
    ensure!(windows.in_place_ns as f64 / recorded <= 1.02 / 8.0, "{windows:?} in {recorded}");

    // What a window costs on average, a recording that is shorter than its distance from the next does not.
    let run = here.path().join("short.run");
    record(pid, &run, &["-d", "400ms", "--max-overhead", &budget])?
        .expect(1, &["--max-overhead can not be kept in 400ms", "give -d "])?;
    ensure!(!run.exists());

    // Nothing is begun that can not be kept.
    let run = here.path().join("refused.run");
    record(pid, &run, &["-d", "1s", "--max-overhead", "1ns"])?
        .expect(1, &["can not be kept", "more rarely than each", "allow more"])?;
    ensure!(!run.exists());
    let often = ["-d", "1s", "--max-overhead", "1ns", "--window", "400ms/1s"];
    record(pid, &run, &often)?.expect(1, &["can not be kept", "in windows of 400ms/1s cost", "rarer"])?;
    ensure!(!run.exists());

    // A share needs to know of what. The stand-in does not tell.
    record(pid, &run, &["-d", "1s", "--max-overhead", "0.01%"])?
        .expect(1, &["0.01% of 2.00 us for each command, which few commands are below", "can not be kept"])?;

    load.unharmed()?;
    Ok(())
}

#[test]
fn a_missing_driver_is_told_before_any_price() -> Result<()> {
    let (side, modules) = ("host", ["nvme_tcp", "nvme_rdma"]);
    if modules.iter().any(|module| Path::new("/sys/module").join(module).exists()) {
        support::skipped("the kernel's driver is loaded here");
        return Ok(());
    }
    let here = tempfile::tempdir()?;
    let run = here.path().join("a.run").display().to_string();
    for budget in [None, Some("--max-overhead=2%")] {
        let arguments = ["record", side, "--kernel", "-o", &run, "-d", "1s"];
        let said = fabscope(arguments.into_iter().chain(budget))?.expect(1, &[])?;
        ensure!(!said.stderr.contains("a command costs"), "{said:#?}");
        ensure!(!Path::new(&run).exists());
    }
    Ok(())
}

/// What the plan of this target costs a read, in nanoseconds.
fn price_of_a_read(pid: u32, folder: &Path) -> Result<u32> {
    let run = folder.join("price.run");
    record(pid, &run, &["-q", "-d", "100ms"])?.expect(0, &[])?;
    Ok(Run::open(&run)?.manifest().price.clone().context("no price")?.per_command.read_ns)
}

#[test]
fn budgets_that_are_none_are_wrong_usage() -> Result<()> {
    for (budget, said) in [
        ("0%", "more than 0%"),
        ("-2%", "more than 0%"),
        ("-1", "less than nothing"),
        ("300%", "at most 100%"),
        ("lots", "no unit of a budget"),
        ("1", "has no unit"),
        ("0us", "at least 1ns"),
        ("", "--max-overhead"),
    ] {
        let argument = format!("--max-overhead={budget}");
        fabscope(["record", "target", &argument])?.expect(2, &[said])?;
    }
    Ok(())
}
