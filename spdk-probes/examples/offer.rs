//! Prints what a program offers to a recording as JSON, and to standard error how long that took.
//!
//!     cargo run -p spdk-probes --example offer -- PATH [target|host]

use std::path::Path;
use std::time::Instant;

use run_format::Side;
use spdk_probes::{Options, offer_of_program};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or_else(|| anyhow::anyhow!("usage: offer PATH [target|host]"))?;
    let side = if arguments.next().as_deref() == Some("host") { Side::Host } else { Side::Target };
    let began = Instant::now();
    let offer = offer_of_program(Path::new(&path), side, &Options::default())?;
    let took = began.elapsed();
    println!("{}", serde_json::to_string_pretty(&offer)?);
    eprintln!("{path}: {took:.1?}");
    Ok(())
}
