//! Prints what is found in a file or a process, and how long it took: every way to take each boundary, with
//! offset, instruction, class and cost of each probe; what else is watched; then the members' offsets.
//!
//!     cargo run -p spdk-probes --example resolve -- PATH | PID

use std::path::{Path, PathBuf};
use std::time::Instant;

use run_format::Side;
use spdk_probes::resolve::{BinarySet, Site};
use spdk_probes::{Choice, Detail, Options, find, functions, survey, survey_program};

fn main() -> anyhow::Result<()> {
    let what = std::env::args().nth(1).ok_or_else(|| anyhow::anyhow!("usage: resolve PATH | PID"))?;
    let pid = what.parse::<u32>().ok().filter(|_| !Path::new(&what).exists());
    let began = Instant::now();
    let set = match pid {
        Some(pid) => BinarySet::of_process(pid)?,
        None => BinarySet::open(&what, &[PathBuf::from(&what)], None)?,
    };
    println!("opened in {:.1?}", began.elapsed());
    for binary in set.binaries() {
        println!(
            "{}  build-id {}  {}",
            binary.path().display(),
            binary.build_id_text().unwrap_or_else(|| "none".to_owned()),
            binary.version().map_or_else(String::new, |version| version.text),
        );
    }
    let options = Options { detail: Detail::Full, ..Options::default() };
    for side in [Side::Target, Side::Host] {
        let began = Instant::now();
        let survey = match pid {
            Some(pid) => find(side, &Choice::Pid(pid)).and_then(|process| survey(&process, side, &options)),
            None => survey_program(Path::new(&what), side, &options),
        };
        println!("\n{side}, after {:.1?}", began.elapsed());
        let survey = match survey {
            Ok(survey) => survey,
            Err(error) => {
                println!("  {error}");
                continue;
            }
        };
        for boundary in &survey.boundaries {
            for (number, rung) in boundary.rungs.iter().enumerate() {
                let chosen = if boundary.chosen == Some(number) { '*' } else { ' ' };
                println!("{chosen} {:12} {}", boundary.boundary.name(), rung.hook);
                match &rung.outcome {
                    Ok(sites) => sites.iter().for_each(print_site),
                    Err(reason) => println!("{:17}{reason}", ""),
                }
                if !rung.note.is_empty() {
                    println!("{:17}{}", "", rung.note);
                }
            }
        }
        for (event, outcome) in &survey.events {
            println!("  {:12} {event}", "event");
            match outcome {
                Ok(sites) => sites.iter().for_each(print_site),
                Err(reason) => println!("{:17}{reason}", ""),
            }
        }
    }
    println!();
    for path in functions::members() {
        match set.offset(path) {
            Ok(member) => {
                println!("  {path:50} {:>6}  {} bytes, {}", member.offset, member.size, member.type_name);
            }
            Err(error) => println!("  {path:50} {error}"),
        }
    }
    for (enumeration, enumerator) in functions::enumerators() {
        match set.enumerator(enumeration, enumerator) {
            Ok(value) => println!("  {enumerator:50} {value:>6}"),
            Err(error) => println!("  {enumerator:50} {error}"),
        }
    }
    Ok(())
}

fn print_site(site: &Site) {
    println!(
        "{:17}{} +{}  {}  {}  {} ns  {}",
        "", site.symbol, site.offset_in_function, site.instruction, site.class, site.estimated_ns, site.why
    );
}
