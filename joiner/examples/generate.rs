//! Writes a pair of synthetic runs of any length in little memory, for measuring the joiner.
//!
//!     cargo run --release -p joiner --example generate -- --commands 10000000 DIR
//!
//! makes `DIR/host.run` and `DIR/target.run`: random blocks, 4 KiB and 64 KiB, eight queues at depth 32.

use joiner::synthetic::Load;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [option, commands, directory] = &arguments[..] else {
        return Err("usage: generate --commands N DIR".into());
    };
    if option != "--commands" {
        return Err(format!("{option}: the one option is --commands N").into());
    }
    let commands: usize = commands.parse().map_err(|e| format!("--commands {commands}: {e}"))?;
    let began = Instant::now();
    let load = Load { commands, queues: 8, ..Load::default() };
    std::fs::create_dir_all(directory)?;
    let (host, target) = load.stream(Path::new(directory))?;
    println!("{} and {}", host.directory().display(), target.directory().display());
    eprintln!("{commands} commands a side in {:.1?}", began.elapsed());
    Ok(())
}
