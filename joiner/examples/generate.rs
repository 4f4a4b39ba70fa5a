//! Writes synthetic runs, for measuring the joiner and batches.
//!
//!     cargo run --release -p joiner --example generate -- --commands 10000000 DIR
//!
//! makes `DIR/host.run` and `DIR/target.run` in little memory: random blocks, 4 KiB and 64 KiB, eight queues at depth 32.
//!
//!     cargo run --release -p joiner --example generate -- --commands 10000 --pairs 1000 DIR
//!
//! makes pairs `DIR/0000` and so on, one a day, of two loads (label.load); the second half was recorded of a newer SPDK,
//! whose storage takes 6 % longer.

use joiner::synthetic::Load;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (commands, pairs, directory) = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--commands", commands, directory] => (commands.to_owned(), None, directory.to_owned()),
        ["--commands", commands, "--pairs", pairs, directory] => {
            (commands.to_owned(), Some(*pairs), directory.to_owned())
        }
        _ => return Err("usage: generate --commands N [--pairs N] DIR".into()),
    };
    let commands: usize = commands.parse().map_err(|e| format!("--commands {commands}: {e}"))?;
    let directory = Path::new(directory);
    std::fs::create_dir_all(directory)?;
    let began = Instant::now();
    match pairs {
        None => {
            let load = Load { commands, queues: 8, ..Load::default() };
            let (host, target) = load.stream(directory)?;
            println!("{} and {}", host.directory().display(), target.directory().display());
        }
        Some(pairs) => {
            let pairs: u32 = pairs.parse().map_err(|e| format!("--pairs {pairs}: {e}"))?;
            for n in 0..pairs {
                pair(commands, n, n >= pairs / 2).write(&directory.join(format!("{n:04}")))?;
            }
            println!("{pairs} pairs in {}", directory.display());
        }
    }
    eprintln!("{commands} commands a side in {:.1?}", began.elapsed());
    Ok(())
}

/// The `n`th pair.
fn pair(commands: usize, n: u32, newer: bool) -> joiner::synthetic::Runs {
    let (load, depth) = if n.is_multiple_of(2) { ("qd8", 8) } else { ("qd32", 32) };
    let slower = if newer { 1.06 } else { 1.0 };
    let load_of = Load {
        seed: u64::from(n) + 1,
        commands,
        queues: 4,
        depth,
        storage_least_ns: (8_000.0 * slower) as i64,
        storage_ns: 4_000.0 * slower,
        ..Load::default()
    };
    let mut runs = load_of.record();
    let version = if newer { "26.05" } else { "24.09" };
    runs.target.manifest.software.version = version.into();
    for side in [&mut runs.host, &mut runs.target] {
        side.of_day(n);
        side.manifest.labels.insert("load".into(), load.into());
    }
    runs
}
