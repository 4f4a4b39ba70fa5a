//! Joins two runs and prints the report, with the time and memory that it took: for measuring the joiner by
//! itself.
//!
//!     cargo run --release -p joiner --example report -- HOST.run TARGET.run [detail] [json] [memory=MIB]

use joiner::{Bounds, JoinOptions, ReportOptions, report_within};
use run_format::Run;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [host, target, how @ ..] = &arguments[..] else {
        return Err("usage: report HOST.run TARGET.run [detail] [json] [memory=MIB]".into());
    };
    let has = |word: &str| how.iter().any(|h| h == word);
    let mut bounds = Bounds::default();
    if let Some(mib) = how.iter().find_map(|h| h.strip_prefix("memory=")) {
        bounds.memory = mib.parse::<u64>()? << 20;
    }
    let options = ReportOptions { detail: has("detail"), ..ReportOptions::default() };
    let began = Instant::now();
    let (host, target) = (Run::open(Path::new(host))?, Run::open(Path::new(target))?);
    let report = report_within(&host, &target, &JoinOptions::default(), &options, &bounds)?;
    let took = began.elapsed();
    if has("json") {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.to_table());
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or("VmHWM unknown");
    eprintln!("{:.2} s, {peak}", took.as_secs_f64());
    Ok(())
}
