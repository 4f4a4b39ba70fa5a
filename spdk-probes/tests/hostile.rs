//! Files made to hurt: whatever the bytes are, the resolver answers or says no, without a panic, without
//! end, and without taking more memory than a few times the file.

// What a helper of a test cannot do is the test's failure.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use run_format::Side;
use spdk_probes::resolve::Binary;
use spdk_probes::{Emulation, Error, Layout, Options, Reg, survey_program};

/// Small programs with symbols, relocations, USDT notes and DWARF of several kinds.
fn programs() -> &'static [Vec<u8>] {
    static PROGRAMS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        // Memory for what these files can honestly need; what lies about its size runs into this.
        let limit = 4 << 30;
        nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_AS, limit, limit)
            .expect("a lower limit is always allowed");
        let directory = tempfile::tempdir().expect("a temporary directory");
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let rename =
            ["-Dexported=spdk_nvmf_request_exec", "-Drequest=spdk_nvmf_request", "-Dflush=_sock_flush"];
        let variants: [(&str, &[&str]); 6] = [
            ("structures.c", &["-g", "-O1"]),
            ("structures.c", &["-gdwarf-4", "-O1", "-fdebug-types-section"]),
            ("structures.c", &["-g", "-O1", "-gz=zlib"]),
            ("functions.c", &["-g", "-O2", rename[0], rename[1], rename[2]]),
            ("functions.c", &["-gdwarf-4", "-O2", rename[0], rename[1], rename[2], "-flto"]),
            ("probes.S", &[]),
        ];
        let mut programs = Vec::new();
        for (source, flags) in variants {
            let output = directory.path().join("program");
            let done =
                Command::new("gcc").args(flags).arg(fixtures.join(source)).arg("-o").arg(&output).status();
            match done {
                Ok(status) if status.success() => programs.push(std::fs::read(&output).expect("the program")),
                _ => println!("skipped: gcc does not make {source} with {flags:?}"),
            }
        }
        programs
    })
}

/// Asks everything that can be asked.
fn ask_everything(bytes: Vec<u8>) {
    let began = Instant::now();
    let Ok(binary) = Binary::from_bytes(Path::new("/nowhere/hostile"), bytes) else {
        return;
    };
    let _ = (binary.version(), binary.holds_spdk(), binary.usdt_probes("spdk"));
    for name in
        ["spdk_nvmf_request_exec", "_sock_flush", "leaf", "loop", "dropped_result", "by_value", "main"]
    {
        if let Ok(function) = binary.resolve_function(name) {
            for kernel in [(6, 1), (6, 18)] {
                let emulation = Emulation::of_kernel(kernel.0, kernel.1);
                let _ = binary.place_for(&function, &[Reg::Rdi, Reg::Rsi], emulation);
                let _ = binary.call_sites_for(&function, "sendmsg", emulation);
            }
        }
        let _ = binary.inlined_copies(name);
    }
    for path in
        ["outer.in_anonymous", "outer.named.array", "message.packed.eight", "spdk_nvmf_request.length"]
    {
        let _ = binary.offset(path);
    }
    let _ = (binary.size_of("outer"), binary.enumerator("state", "STATE_LAST"), binary.layout());
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "a small file took {took:?}");
}

/// What to write, and where as a share of the file.
#[derive(Clone, Debug)]
enum Change {
    Flip(u16, u8),
    Word(u16, u32),
    Long(u16, u64),
    Copy(u16, u16, u8),
    Cut(u16),
}

fn change() -> impl Strategy<Value = Change> {
    let interesting = prop_oneof![
        Just(0_u64),
        Just(u64::MAX),
        Just(u64::from(u32::MAX)),
        Just(1 << 63),
        Just(i64::MAX as u64),
        0_u64..65536,
        any::<u64>()
    ];
    prop_oneof![
        6 => (any::<u16>(), any::<u8>()).prop_map(|(at, to)| Change::Flip(at, to)),
        2 => (any::<u16>(), interesting.clone()).prop_map(|(at, to)| Change::Word(at, to as u32)),
        2 => (any::<u16>(), interesting).prop_map(|(at, to)| Change::Long(at, to)),
        2 => (any::<u16>(), any::<u16>(), any::<u8>()).prop_map(|(to, from, len)| Change::Copy(to, from, len)),
        1 => any::<u16>().prop_map(Change::Cut),
    ]
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    let len = bytes.len();
    let place = |share: u16| len * usize::from(share) / 65536;
    let mut write = |at: usize, value: &[u8]| {
        for (index, byte) in value.iter().enumerate() {
            if let Some(target) = bytes.get_mut(at + index) {
                *target = *byte;
            }
        }
    };
    match *change {
        Change::Flip(at, value) => write(place(at), &[value]),
        Change::Word(at, value) => write(place(at) & !3, &value.to_le_bytes()),
        Change::Long(at, value) => write(place(at) & !7, &value.to_le_bytes()),
        Change::Copy(to, from, count) => {
            let from = place(from);
            let piece = bytes[from..(from + usize::from(count)).min(len)].to_vec();
            for (target, byte) in bytes.iter_mut().skip(place(to)).zip(piece) {
                *target = byte;
            }
        }
        Change::Cut(at) => bytes.truncate(place(at)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 384, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn changed_anywhere(which in any::<prop::sample::Index>(), changes in prop::collection::vec(change(), 1..12)) {
        let programs = programs();
        if programs.is_empty() {
            return Ok(());
        }
        let mut bytes = programs[which.index(programs.len())].clone();
        for change in &changes {
            apply(&mut bytes, change);
        }
        ask_everything(bytes);
    }

    /// The file's and its sections' headers, where one wrong number does most.
    #[test]
    fn changed_in_its_headers(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<u16>(), any::<bool>(), change()), 1..4),
    ) {
        let programs = programs();
        if programs.is_empty() {
            return Ok(());
        }
        let whole = &programs[which.index(programs.len())];
        let sections = usize::try_from(u64::from_le_bytes(whole[40..48].try_into().unwrap())).unwrap();
        let mut bytes = whole.clone();
        for (_, in_sections, change) in &changes {
            let range = if *in_sections { sections..whole.len() } else { 0..1024.min(whole.len()) };
            let mut part = bytes[range.clone()].to_vec();
            if !matches!(change, Change::Cut(_)) {
                apply(&mut part, change);
            }
            bytes[range].copy_from_slice(&part);
        }
        ask_everything(bytes);
    }

    /// The debug information, found by where its sections lie.
    #[test]
    fn changed_in_its_debug_information(
        which in any::<prop::sample::Index>(),
        section in any::<prop::sample::Index>(),
        changes in prop::collection::vec(change(), 1..8),
    ) {
        let programs = programs();
        if programs.is_empty() {
            return Ok(());
        }
        let whole = &programs[which.index(programs.len())];
        let ranges = debug_sections(whole);
        if ranges.is_empty() {
            return Ok(());
        }
        let range = ranges[section.index(ranges.len())].clone();
        let mut bytes = whole.clone();
        let mut part = bytes[range.clone()].to_vec();
        for change in changes.iter().filter(|change| !matches!(change, Change::Cut(_))) {
            apply(&mut part, change);
        }
        bytes[range].copy_from_slice(&part);
        ask_everything(bytes);
    }

    #[test]
    fn no_file_at_all(bytes in prop::collection::vec(any::<u8>(), 0..4096), with_magic in any::<bool>()) {
        let mut bytes = bytes;
        if with_magic {
            for (target, value) in bytes.iter_mut().zip(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0\x01\0\0\0") {
                *target = *value;
            }
        }
        ask_everything(bytes);
    }

    #[test]
    fn layout_files(text in "\\PC{0,200}") {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layout.json");
        std::fs::write(&path, text).unwrap();
        prop_assert!(Layout::load(&path).is_err());
    }
}

/// Programs with inlined, cloned and split functions of the table of hooks.
fn hidden_programs() -> &'static [Vec<u8>] {
    static PROGRAMS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hidden");
        let sources = ["tcp.c", "ctrlr.c", "bdev.c", "nvme_tcp.c", "nvme_qpair.c", "main.c"];
        let variants: [&[&str]; 3] = [&["-g", "-O2", "-flto"], &["-gdwarf-4", "-O3"], &["-g", "-O1"]];
        let mut programs = Vec::new();
        for flags in variants {
            let output = directory.path().join("program");
            let mut gcc = Command::new("gcc");
            gcc.args(flags).args(sources.map(|name| fixtures.join(name))).arg("-o").arg(&output);
            match gcc.status() {
                Ok(status) if status.success() => programs.push(std::fs::read(&output).expect("the program")),
                _ => println!("skipped: gcc does not make the fixture with {flags:?}"),
            }
        }
        programs
    })
}

/// Lets the whole choice of hooks be made for a file.
fn choose(bytes: &[u8]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("program");
    std::fs::write(&path, bytes).unwrap();
    let began = Instant::now();
    for side in [Side::Target, Side::Host] {
        let _ = survey_program(&path, side, &Options::default());
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "a small file took {took:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 50, ..ProptestConfig::default() })]

    /// The debug information of inlined functions, and the code that is compared with it.
    #[test]
    fn hooks_are_chosen_whatever_is_said_of_inlined_functions(
        which in any::<prop::sample::Index>(),
        section in any::<prop::sample::Index>(),
        changes in prop::collection::vec(change(), 1..8),
    ) {
        let programs = hidden_programs();
        if programs.is_empty() {
            return Ok(());
        }
        let whole = &programs[which.index(programs.len())];
        let ranges = debug_sections(whole);
        let range = ranges[section.index(ranges.len())].clone();
        let mut bytes = whole.clone();
        let mut part = bytes[range.clone()].to_vec();
        for change in changes.iter().filter(|change| !matches!(change, Change::Cut(_))) {
            apply(&mut part, change);
        }
        bytes[range].copy_from_slice(&part);
        choose(&bytes);
    }
}

/// A program whose debug information is written by hand: these entries, after the unit's own.
fn program_with_entries(entries: &str) -> Option<Vec<u8>> {
    let directory = tempfile::tempdir().unwrap();
    // Abbreviations: 1 unit, 2 function with origin, 3 block, 4 inlined with origin, 5 structure that is its own
    // member's type, 6 member, 7 import.
    let text = format!(
        "\t.text\n\t.globl main, nvmf_tcp_req_process\n\t.type main,@function\n\t.type nvmf_tcp_req_process,@function\n\
         main:\n\tret\n\t.size main,.-main\nnvmf_tcp_req_process:\n\tpush %rbx\n\tpop %rbx\n\tret\n\
         \t.size nvmf_tcp_req_process,.-nvmf_tcp_req_process\n\t.section .note.GNU-stack,\"\",@progbits\n\
         \t.section .debug_abbrev,\"\",@progbits\n\
         \t.byte 1,0x11,1,0x25,8,0,0, 2,0x2e,1,3,8,0x31,0x13,0x11,1,0x12,7,0,0, 3,0xb,1,0,0\n\
         \t.byte 4,0x1d,1,0x31,0x13,0x11,1,0x12,7,0,0, 5,0x13,1,3,8,0xb,0xf,0,0, 6,0xd,0,3,8,0x49,0x13,0,0\n\
         \t.byte 7,0x3d,0,0x18,0x10,0,0, 0\n\
         \t.section .debug_info,\"\",@progbits\nstart:\t.long end-unit\nunit:\t.value 5\n\t.byte 1,8\n\t.long .debug_abbrev\n\
         \t.byte 1\n\t.asciz \"GNU C17\"\n{entries}\n\t.byte 0\nend:\n"
    );
    std::fs::write(directory.path().join("program.S"), text).unwrap();
    let made = Command::new("gcc")
        .args(["-no-pie", "program.S", "-o", "program"])
        .current_dir(directory.path())
        .output()
        .ok()?;
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    std::fs::read(directory.path().join("program")).ok()
}

#[test]
fn debug_information_that_leads_in_circles_or_without_end_is_answered() {
    if Command::new("gcc").arg("--version").output().is_err() {
        println!("skipped: gcc is not installed");
        return;
    }
    let name = ".asciz \"nvmf_tcp_req_process\"";
    let function = |label: &str, origin: &str, children: &str| {
        format!(
            "{label}:\t.byte 2\n\t{name}\n\t.long {origin}-start\n\t.quad nvmf_tcp_req_process, 3\n{children}\t.byte 0\n"
        )
    };
    let inlined = "\t.byte 4\n\t.long one-start\n\t.quad nvmf_tcp_req_process, 0x7fffffffffffffff\n";
    let deep = 200_000;
    let cases = [
        ("its own origin", function("one", "one", "")),
        ("each other's", function("one", "two", "") + &function("two", "one", "")),
        ("an origin outside", function("one", "unit+0x7fffff00", "")),
        ("inlined into itself", function("one", "one", &format!("{inlined}\t.byte 0\n"))),
        ("deep blocks", function("one", "one", &(format!("\t.fill {deep}, 1, 3\n\t.fill {deep}, 1, 0\n")))),
        ("blocks that never end", function("one", "one", &format!("\t.fill {deep}, 1, 3\n"))),
        (
            "a structure in itself",
            "one:\t.byte 5\n\t.asciz \"spdk_nvmf_tcp_req\"\n\t.byte 8\n\t.byte 6\n\t.asciz \"state\"\n\t.long one-start\n\t.byte 0\n"
                .to_owned(),
        ),
        ("an import of itself", "one:\t.byte 7\n\t.long start\n".to_owned()),
    ];
    for (what, entries) in cases {
        let Some(bytes) = program_with_entries(&entries) else { return };
        let began = Instant::now();
        ask_everything(bytes.clone());
        choose(&bytes);
        assert!(began.elapsed() < Duration::from_secs(5), "{what} took {:?}", began.elapsed());
        let binary = Binary::from_bytes(Path::new("/nowhere/hostile"), bytes).unwrap();
        let error = binary.offset("spdk_nvmf_request.qpair").unwrap_err();
        assert!(matches!(error, Error::NoType { .. } | Error::Malformed { .. }), "{what}: {error}");
    }
}

/// Where the sections with DWARF lie in the file.
fn debug_sections(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    use object::{Object, ObjectSection};
    let file = object::File::parse(bytes).expect("a whole program");
    file.sections()
        .filter(|section| section.name().is_ok_and(|name| name.starts_with(".debug_")))
        .filter_map(|section| section.file_range())
        .map(|(start, len)| start as usize..(start + len) as usize)
        .filter(|range| range.len() > 8)
        .collect()
}

#[test]
fn every_length_up_to_the_whole_is_answered() {
    for program in programs() {
        for part in 0..=64 {
            ask_everything(program[..program.len() * part / 64].to_vec());
        }
        for len in 0..256 {
            ask_everything(program[..len].to_vec());
        }
    }
}
