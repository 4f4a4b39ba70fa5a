//! Prints what the resolver finds in a file or a process, and how long it took: boundary, symbol and
//! offset, instruction, class and cost of each probe, then the members' offsets.
//!
//!     cargo run -p spdk-probes --example resolve -- PATH | PID

use std::path::{Path, PathBuf};
use std::time::Instant;

use run_format::Side;
use spdk_probes::functions::{self, At, Purpose};
use spdk_probes::resolve::BinarySet;

fn main() -> anyhow::Result<()> {
    let what = std::env::args().nth(1).ok_or_else(|| anyhow::anyhow!("usage: resolve PATH | PID"))?;
    let began = Instant::now();
    let set = match what.parse() {
        Ok(pid) if !Path::new(&what).exists() => BinarySet::of_process(pid)?,
        _ => BinarySet::open(&what, &[PathBuf::from(&what)], None)?,
    };
    let opened = began.elapsed();
    for binary in set.binaries() {
        println!(
            "{}  build-id {}  {}",
            binary.path().display(),
            binary.build_id_text().unwrap_or_else(|| "none".to_owned()),
            binary.version().map_or_else(String::new, |version| version.text),
        );
    }
    let began = Instant::now();
    for side in [Side::Target, Side::Host] {
        println!("\n{side}");
        for hook in functions::hooks(side) {
            let purpose = match hook.purpose {
                Purpose::Boundary(boundary) => boundary.name(),
                Purpose::Freed => "freed",
            };
            for probe in hook.rungs.iter().flat_map(|rung| rung.probes) {
                let sites = set.resolve_function(probe.function).and_then(|function| match probe.at {
                    At::Entry => set.place(&function, &probe.live()),
                    At::CallsOf(callee) => set.call_sites(&function, callee),
                });
                match sites {
                    Ok(sites) => {
                        for site in sites {
                            println!(
                                "  {purpose:12} {:40} +{:<4} {:<24} {:<14} {:>5} ns  {}",
                                site.symbol,
                                site.offset_in_function,
                                site.instruction,
                                site.class.to_string(),
                                site.estimated_ns,
                                site.why
                            );
                        }
                        let inlined = set.inlined_copies(probe.function)?.len();
                        if inlined > 0 {
                            println!("  {purpose:12} {:40} also inlined at {inlined} places", probe.function);
                        }
                    }
                    Err(error) => println!("  {purpose:12} {:40} {error}", probe.function),
                }
            }
        }
    }
    println!();
    let members = functions::members(Side::Target)
        .iter()
        .chain(functions::members(Side::Host))
        .chain(functions::OPTIONAL_MEMBERS);
    for path in members {
        match set.offset(path) {
            Ok(member) => {
                let bits =
                    member.bit.map_or_else(String::new, |(shift, width)| format!(" bit {shift}:{width}"));
                println!(
                    "  {path:50} {:>6}{bits}  {} bytes, {}",
                    member.offset, member.size, member.type_name
                );
            }
            Err(error) => println!("  {path:50} {error}"),
        }
    }
    for (enumeration, enumerator) in functions::ENUMERATORS {
        match set.enumerator(enumeration, enumerator) {
            Ok(value) => println!("  {enumerator:50} {value:>6}"),
            Err(error) => println!("  {enumerator:50} {error}"),
        }
    }
    println!("\nopened in {opened:.1?}, resolved in {:.1?}", began.elapsed());
    Ok(())
}
