//! Joins two runs and prints the report, with the time and memory that it took: for measuring the joiner by
//! itself.
//!
//!     cargo run -p joiner --example report -- HOST.run TARGET.run [detail] [json]

use joiner::{GroupBy, JoinOptions, ReportOptions, join, report};
use run_format::Run;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [host, target, how @ ..] = &arguments[..] else {
        return Err("usage: report HOST.run TARGET.run [detail] [json]".into());
    };
    let has = |word: &str| how.iter().any(|h| h == word);
    let began = Instant::now();
    let joined = join(&Run::open(Path::new(host))?, &Run::open(Path::new(target))?, &JoinOptions::default())?;
    let took = began.elapsed();
    let options = ReportOptions { group_by: GroupBy::Class, detail: has("detail") };
    let report = report(&joined, &options)?;
    let all = began.elapsed();
    if has("json") {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.to_table());
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or("VmHWM unknown");
    eprintln!("join {took:.2?}, report {:.2?}, {peak}", all - took);
    Ok(())
}
