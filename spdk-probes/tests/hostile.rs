//! Files made to hurt: whatever the bytes are, the resolver answers or says no, without a panic, without
//! end, and without taking more memory than a few times the file.

// What a helper of a test cannot do is the test's failure.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use spdk_probes::resolve::Binary;
use spdk_probes::{Emulation, Layout, Reg};

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
