//! Records an SPDK process for some seconds into a run directory, and prints what came of it.
//!
//!     record_spdk target|host PID|only SECONDS DIRECTORY [ONE_IN] [full]

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use run_format::{Manifest, RunWriter, Side, Source, clock_pair, monotonic_now};
use spdk_probes::{Choice, Detail, Host, Options, Target, find};

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [side, process, seconds, directory, rest @ ..] = arguments.as_slice() else {
        bail!("usage: record_spdk target|host PID|only SECONDS DIRECTORY [ONE_IN] [full]");
    };
    let side = if side == "host" { Side::Host } else { Side::Target };
    let choice = match process.as_str() {
        "only" => Choice::Only,
        pid => Choice::Pid(pid.parse().context("the PID")?),
    };
    let options = Options {
        one_in: rest.first().map_or(Ok(1), |n| n.parse()).context("one in how many")?,
        detail: if rest.iter().any(|word| word == "full") { Detail::Full } else { Detail::Stages },
        ..Options::default()
    };
    let length = Duration::from_secs_f64(seconds.parse().context("the seconds")?);
    let began = Instant::now();
    let process = find(side, &choice)?;
    let found = began.elapsed();
    match side {
        Side::Target => {
            let source = Target::attach(&process, &options)?;
            record(source, began, found, length, Path::new(directory), &options)
        }
        Side::Host => {
            let source = Host::attach(&process, &options)?;
            record(source, began, found, length, Path::new(directory), &options)
        }
    }
}

fn record<S: Source>(
    mut source: S,
    began: Instant,
    found: Duration,
    length: Duration,
    directory: &Path,
    options: &Options,
) -> anyhow::Result<()> {
    let attached = began.elapsed();
    println!("found in {found:?}, attached in {attached:?}");
    let manifest = Manifest {
        software: source.software(),
        hooks: source.hooks(),
        detail: format!("{:?}", options.detail).to_lowercase(),
        one_in: options.one_in,
        counters: source.counters()?,
        ..Manifest::begun(source.side(), source.kind(), env!("CARGO_PKG_VERSION"))
    };
    for hook in &manifest.hooks {
        println!(
            "{:<12} {}{}{}",
            hook.boundary.name(),
            hook.hook.as_deref().unwrap_or("-"),
            hook.instruction.as_ref().map(|i| format!(" [{i}]")).unwrap_or_default(),
            hook.why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default()
        );
    }
    let mut writer = RunWriter::create(directory, manifest, true)?;
    let end = Instant::now() + length;
    while Instant::now() < end && !source.ended() {
        source.poll(Duration::from_millis(100), &mut writer)?;
        writer.manifest().counters = source.counters()?;
        writer.tick()?;
    }
    let stopping = Instant::now();
    let stopped = monotonic_now();
    source.stop(&mut writer)?;
    println!("detached in {:?}", stopping.elapsed());
    let counters = source.counters()?;
    writer.manifest().clocks.push(clock_pair());
    writer.close(counters, stopped)?;
    println!("{counters:#?}");
    Ok(())
}
