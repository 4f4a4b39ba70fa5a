//! Samples this machine for some seconds and prints what each collector cost:
//! `cargo run -p telemetry --example telemetry_cost -- [SECONDS [EVERY_MS [PID [RPC_SOCKET]]]]`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use telemetry::{Options, Sampler, State, Subject};

static ROWS: AtomicUsize = AtomicUsize::new(0);

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |n: usize| arguments.get(n).and_then(|text| text.parse::<u64>().ok());
    let seconds = number(0).unwrap_or(10);
    let pid = number(2).and_then(|pid| u32::try_from(pid).ok());
    let rpc = arguments.get(3).map(PathBuf::from).into_iter().collect();
    let options = Options {
        every: number(1).map_or(Options::EVERY, Duration::from_millis),
        subject: Subject { pid, rpc, ..Subject::default() },
        ..Options::default()
    };
    let sampler = Sampler::start(&options, |batch| {
        ROWS.fetch_add(batch.rows.len(), Ordering::Relaxed);
    })?;
    std::thread::sleep(Duration::from_secs(seconds));
    let status = sampler.stop();
    println!(
        "{:<11} {:>8} {:>8} {:>11} {:>8}  state",
        "collector", "every ms", "samples", "us a sample", "% core"
    );
    let share = |ns: u64| ns as f64 / (seconds as f64 * 1e7);
    for one in &status.collectors {
        let state = match &one.state {
            State::Sampling => "".to_owned(),
            State::Absent(why) => format!("absent: {why}"),
            State::Failed(why) => format!("failed: {why}"),
        };
        let each = if one.samples == 0 { 0.0 } else { one.cpu.0 as f64 / one.samples as f64 / 1e3 };
        println!(
            "{:<11} {:>8} {:>8} {:>11.1} {:>8.3}  {state}",
            one.about.name,
            one.every.0 / 1_000_000,
            one.samples,
            each,
            share(one.cpu.0),
        );
    }
    let rows = ROWS.load(Ordering::Relaxed);
    println!("all threads: {:.3} % of one core; {rows} rows", share(status.cpu.0));
    Ok(())
}
