//! The resolver against programs that gcc and clang compile for it here: each prints the truth about itself
//! (addresses, offsets), and the resolver must say the same.

// What a helper of a test cannot do is the test's failure.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use spdk_probes::resolve::{Binary, BinarySet};
use spdk_probes::{Class, Emulation, Error, Layout, Reg, UsdtPlace};
use tempfile::TempDir;

/// A directory to compile in.
fn workshop() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn have(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: {tool} is not installed");
    }
    found
}

fn run(directory: &Path, tool: &str, arguments: &[&str]) -> String {
    let output =
        Command::new(tool).args(arguments).current_dir(directory).output().expect("a tool that runs");
    assert!(
        output.status.success(),
        "{tool} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn compile(directory: &Path, compiler: &str, flags: &str, sources: &[&str], output: &str) -> PathBuf {
    let sources: Vec<String> = sources.iter().map(|name| fixture(name).display().to_string()).collect();
    let mut arguments: Vec<&str> = flags.split_whitespace().collect();
    arguments.extend(sources.iter().map(String::as_str));
    arguments.extend(["-o", output]);
    run(directory, compiler, &arguments);
    directory.join(output)
}

fn open(path: &Path) -> Binary {
    Binary::open(path, None).expect("a binary")
}

/// Compares every line that the program prints about its structures with what the resolver says.
fn check_structures(program: &Path, binary: &Binary, flags: &str) {
    let truth = run(Path::new("/"), &program.display().to_string(), &[]);
    let mut lines = 0;
    for line in truth.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["member", path, offset, size] => {
                let member = binary.offset(path).unwrap_or_else(|error| panic!("{flags}: {error}"));
                assert_eq!(member.offset.to_string(), *offset, "{flags}: {path}");
                assert_eq!(member.size.to_string(), *size, "{flags}: {path}");
                assert_eq!(member.bit, None, "{flags}: {path}");
            }
            ["bits", path, offset, shift, width] => {
                let member = binary.offset(path).unwrap_or_else(|error| panic!("{flags}: {error}"));
                let (got_shift, got_width) = member.bit.expect("a bit-field");
                // The same bits may be said with another byte to start from.
                let first = member.offset * 8 + u64::from(got_shift);
                let expected = offset.parse::<u64>().unwrap() * 8 + shift.parse::<u64>().unwrap();
                assert_eq!(first, expected, "{flags}: {path}");
                assert_eq!(got_width.to_string(), *width, "{flags}: {path}");
                assert!(u32::from(got_shift) + u32::from(got_width) <= member.size * 8, "{flags}: {path}");
            }
            ["size", name, size] => {
                let got = binary.size_of(name).unwrap_or_else(|error| panic!("{flags}: {error}"));
                assert_eq!(got.to_string(), *size, "{flags}: {name}");
            }
            ["value", enumeration, enumerator, value] => {
                let got = binary
                    .enumerator(enumeration, enumerator)
                    .unwrap_or_else(|error| panic!("{flags}: {error}"));
                assert_eq!(got.to_string(), *value, "{flags}: {enumerator}");
            }
            _ => panic!("{flags}: unknown line {line}"),
        }
        lines += 1;
    }
    assert!(lines > 30, "{flags}: the program said only {lines} lines");
}

#[test]
fn members_are_where_the_compiler_put_them() {
    let directory = workshop();
    let variants = [
        ("gcc", "-g -O2"),
        ("gcc", "-g -O0"),
        ("gcc", "-gdwarf-2 -gstrict-dwarf -O1"),
        ("gcc", "-gdwarf-3 -O1"),
        ("gcc", "-gdwarf-4 -O2"),
        ("gcc", "-gdwarf-5 -O2 -no-pie"),
        ("gcc", "-g -O2 -fdebug-types-section"),
        ("gcc", "-gdwarf-4 -O2 -fdebug-types-section"),
        ("gcc", "-g -O2 -gz=zlib"),
        ("gcc", "-g -O2 -Wl,--compress-debug-sections=zstd"),
        ("gcc", "-g -O2 -flto"),
        ("gcc", "-g -O2 -Wl,-O2"),
        ("clang", "-g -O2"),
        ("clang", "-gdwarf-4 -O0"),
        ("clang", "-gdwarf-5 -O2 -fdebug-types-section"),
    ];
    for (compiler, flags) in variants {
        if !have(compiler) {
            continue;
        }
        let program = compile(directory.path(), compiler, flags, &["structures.c"], "structures");
        check_structures(&program, &open(&program), &format!("{compiler} {flags}"));
    }
}

#[test]
fn split_debug_information_is_read_from_its_files_and_missed_by_name() {
    let directory = workshop();
    for (compiler, flags) in [
        ("gcc", "-g -O2 -gsplit-dwarf"),
        ("gcc", "-gdwarf-4 -O2 -gsplit-dwarf"),
        ("clang", "-g -O2 -gsplit-dwarf"),
    ] {
        if !have(compiler) {
            continue;
        }
        let program = compile(directory.path(), compiler, flags, &["structures.c"], "split");
        check_structures(&program, &open(&program), &format!("{compiler} {flags}"));
        let mut removed = 0;
        for entry in std::fs::read_dir(directory.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "dwo") {
                std::fs::remove_file(path).unwrap();
                removed += 1;
            }
        }
        assert!(removed > 0, "{compiler} {flags} wrote no .dwo");
        let message = open(&program).offset("outer.head").unwrap_err().to_string();
        assert!(message.contains(".dwo") && message.contains(".dwp"), "{message}");
    }
}

#[test]
fn split_debug_information_is_read_from_a_package_beside_the_program() {
    for (compiler, flags, packager) in [
        ("gcc", "-gdwarf-4 -O2 -gsplit-dwarf", "dwp"),
        ("gcc", "-gdwarf-5 -O2 -gsplit-dwarf", "dwp"),
        ("clang", "-gdwarf-5 -O2 -gsplit-dwarf", "llvm-dwp"),
        ("clang", "-gdwarf-5 -O2 -gsplit-dwarf", "llvm-dwp-14"),
    ] {
        if !have(compiler) || !have(packager) {
            continue;
        }
        let directory = workshop();
        let sources = ["twins_a.c", "twins_b.c"];
        let pack = |program: &str| -> bool {
            let package = format!("{program}.dwp");
            let packed = Command::new(packager)
                .args(["-e", program, "-o", &package])
                .current_dir(directory.path())
                .status()
                .is_ok_and(|status| status.success());
            if !packed {
                println!("skipped: {packager} cannot package what {compiler} {flags} makes");
            }
            packed
        };
        let program = compile(directory.path(), compiler, flags, &["structures.c"], "split");
        // Two units in one package, to tell their parts from each other.
        let twins = compile(directory.path(), compiler, flags, &sources, "twins");
        if !pack("split") || !pack("twins") {
            continue;
        }
        for entry in std::fs::read_dir(directory.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "dwo") {
                std::fs::remove_file(path).unwrap();
            }
        }
        let name = format!("{compiler} {flags} {packager}");
        check_structures(&program, &open(&program), &name);
        let twins = open(&twins);
        assert_eq!(twins.size_of("twin").unwrap(), 16, "{name}");
        assert!(matches!(twins.offset("twin.apart"), Err(Error::Ambiguous { .. })), "{name}");
    }
}

#[test]
fn what_is_not_there_is_named_with_what_is_near() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let program = compile(directory.path(), "gcc", "-g -O2", &["structures.c"], "structures");
    let binary = open(&program);
    let says = |path: &str| binary.offset(path).unwrap_err().to_string();
    assert!(says("nothing.head").contains("no structure `nothing`"), "{}", says("nothing.head"));
    assert!(says("opaque.head").contains("only declared"), "{}", says("opaque.head"));
    assert!(says("outer.in_anonymus").contains("`in_anonymous`"), "{}", says("outer.in_anonymus"));
    assert!(says("outer.inner.val").contains("`struct inner` has no member `val`"));
    assert!(says("outer.opaque.x").contains("a pointer (`struct opaque *`)"), "{}", says("outer.opaque.x"));
    assert!(says("outer.named.array.tag").contains("an array"), "{}", says("outer.named.array.tag"));
    assert!(says("outer.head.x").contains("no structure (`uint32_t`)"), "{}", says("outer.head.x"));
    assert!(matches!(binary.offset("outer"), Err(Error::NoMember { .. })));
    let error = binary.enumerator("state", "STATE_OLD").unwrap_err().to_string();
    assert!(error.contains("`STATE_NEW`"), "{error}");
    assert!(matches!(binary.enumerator("nothing", "X"), Err(Error::NoType { .. })));
    assert!(matches!(binary.size_of("nothing"), Err(Error::NoType { .. })));
    let error = binary.resolve_function("man").unwrap_err();
    assert!(matches!(error, Error::NoFunction { .. }), "{error}");
}

#[test]
fn two_structures_of_one_name_are_ambiguous_only_where_they_differ() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let program = compile(directory.path(), "gcc", "-g -O0", &["twins_a.c", "twins_b.c"], "twins");
    let binary = open(&program);
    assert_eq!(binary.offset("twin.same").unwrap().offset, 0);
    assert_eq!(binary.size_of("twin").unwrap(), 16);
    let error = binary.offset("twin.apart").unwrap_err();
    assert!(matches!(error, Error::Ambiguous { .. }), "{error}");
    assert!(error.to_string().contains("byte 4") && error.to_string().contains("byte 8"), "{error}");
    let error = binary.offset("twin.only_here").unwrap_err();
    assert!(error.to_string().contains("one does not have it"), "{error}");
    assert!(matches!(binary.offset("twin.nowhere"), Err(Error::NoMember { .. })));
}

/// The addresses that the program prints for its own functions.
fn printed_functions(program: &Path) -> BTreeMap<String, u64> {
    run(Path::new("/"), &program.display().to_string(), &[])
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let (Some("function"), Some(name), Some(address)) = (words.next(), words.next(), words.next())
            else {
                return None;
            };
            let address = u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()?;
            Some((name.to_owned(), address))
        })
        .collect()
}

#[test]
fn functions_are_where_the_program_says_and_probes_where_their_bytes_are() {
    let directory = workshop();
    let variants = [
        ("gcc", "-g -O2 -pie -fPIE"),
        ("gcc", "-g -O2 -no-pie -fno-pie -DAT_ADDRESS"),
        ("gcc", "-O2 -fcf-protection=full"),
        ("gcc", "-O2 -g0 -Wl,-z,separate-code"),
        ("gcc", "-O2 -Wl,-z,noseparate-code"),
        ("clang", "-g -O2 -fPIE -pie"),
    ];
    for (compiler, flags) in variants {
        if !have(compiler) {
            continue;
        }
        let flags_text = format!("{compiler} {flags}");
        let program = compile(directory.path(), compiler, flags, &["functions.c"], "functions");
        let bytes = std::fs::read(&program).unwrap();
        let binary = open(&program);
        let printed = printed_functions(&program);
        assert_eq!(printed.len(), 5, "{flags_text}");
        for (name, address) in printed {
            let function = binary.resolve_function(&name).unwrap();
            let [copy] = function.copies.as_slice() else {
                panic!("{flags_text}: {name} has {} copies", function.copies.len());
            };
            assert_eq!(copy.vaddr, address, "{flags_text}: {name}");
            let sites = binary.place(&function, &[Reg::Rdi]).unwrap();
            let [site] = sites.as_slice() else {
                panic!("{flags_text}: {name} has {} sites", sites.len());
            };
            assert_eq!(site.vaddr, address + site.offset_in_function);
            let at = usize::try_from(site.file_offset).unwrap();
            let here = &bytes[at..at + 2];
            let endbr = bytes[at - site.offset_in_function as usize..].starts_with(&[0xf3, 0x0f, 0x1e, 0xfa]);
            assert_eq!(endbr, flags.contains("cf-protection") && name != "loop", "{flags_text}: {name}");
            assert!(!here.starts_with(&[0xf3, 0x0f]), "{flags_text}: {name} is probed at its endbr64");
            if let Some(register) = site.instruction.strip_prefix("push ") {
                let opcode = here.iter().find(|byte| (0x50..0x58).contains(*byte));
                assert!(opcode.is_some(), "{flags_text}: push {register} is {here:02x?}");
                assert_eq!(site.class, Class::Emulated);
            }
            if name == "exported" {
                assert_eq!(site.class, Class::Emulated, "{flags_text}: {site:?}");
                assert!(site.offset_in_function >= if endbr { 4 } else { 0 }, "{flags_text}");
            }
            if name == "loop" {
                assert_eq!(
                    (site.offset_in_function, site.class),
                    (0, Class::SingleStep),
                    "{flags_text}: inside the loop: {site:?}"
                );
            }
        }
    }
}

#[test]
fn a_function_without_push_is_probed_at_its_first_branch_while_its_arguments_live() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let program = compile(directory.path(), "gcc", "-g -O2", &["functions.c"], "functions");
    let binary = open(&program);
    let function = binary.resolve_function("leaf").unwrap();
    let site = binary.place(&function, &[Reg::Rdi]).unwrap().remove(0);
    assert_eq!(site.class, Class::Emulated, "{site:?}");
    assert!(site.offset_in_function > 0 && site.instruction.starts_with('j'), "{site:?}");
    // With a register that the code overwrites first, the entry is all there is.
    let site = binary.place(&function, &[Reg::Rdi, Reg::Rax, Reg::Rdx]).unwrap().remove(0);
    assert_eq!((site.class, site.offset_in_function), (Class::SingleStep, 0), "{site:?}");
    assert!(site.why.contains("overwritten"), "{site:?}");
}

#[test]
fn copies_with_a_suffix_are_found_and_lost_arguments_refused() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let program = compile(directory.path(), "gcc", "-g -O2", &["functions.c"], "functions");
    let names = run(directory.path(), "nm", &["functions"]);
    let binary = open(&program);
    let function = binary.resolve_function("dropped_result").unwrap();
    let symbol = &function.copies[0].symbol;
    assert!(names.contains(symbol.as_str()));
    assert_eq!(function.copies[0].source.as_deref(), Some("functions.c"));
    if !symbol.contains("constprop") && !symbol.contains("isra") {
        println!("skipped: this gcc makes no clone of dropped_result, but {symbol}");
        return;
    }
    // Of the second only a member is handed over: a probe that reads rsi would read nonsense.
    let error = binary.place(&function, &[Reg::Rsi]).unwrap_err();
    assert!(matches!(error, Error::MovedArgument { argument: 1, .. }), "{error}");
    assert!(binary.place(&function, &[]).is_ok());
    // Without debug information nothing is known of it.
    let plain = compile(directory.path(), "gcc", "-O2", &["functions.c"], "plain");
    let plain = open(&plain);
    let function = plain.resolve_function("dropped_result").unwrap();
    assert_eq!(plain.place(&function, &[Reg::Rsi]).unwrap().len(), 1);
}

#[test]
fn cold_parts_are_not_copies() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let program = compile(directory.path(), "gcc", "-g -O2", &["functions.c"], "functions");
    let function = open(&program).resolve_function("with_cold_part").unwrap();
    assert_eq!(function.copies.len(), 1);
    let names = run(directory.path(), "nm", &["functions"]);
    assert_eq!(!function.copies[0].cold.is_empty(), names.contains("with_cold_part.cold"), "{names}");
}

#[test]
fn inlined_functions_are_told_from_missing_ones() {
    for compiler in ["gcc", "clang"] {
        if !have(compiler) {
            continue;
        }
        let directory = workshop();
        let program = compile(directory.path(), compiler, "-g -O2", &["functions.c"], "functions");
        let binary = open(&program);
        let error = binary.resolve_function("always_inlined").unwrap_err();
        assert!(matches!(error, Error::OnlyInlined { places: 1.., .. }), "{compiler}: {error}");
        assert_eq!(binary.resolve_function("also_inlined").unwrap().copies.len(), 1);
        assert!(!binary.inlined_copies("also_inlined").unwrap().is_empty(), "{compiler}");
        assert!(binary.inlined_copies("exported").unwrap().is_empty(), "{compiler}");
    }
}

#[test]
fn calls_are_found_through_every_kind_of_linkage() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    for flags in [
        "-O2",
        "-O2 -fcf-protection=full -Wl,-z,ibtplt",
        "-O2 -no-pie -fno-pie",
        "-O2 -fno-plt",
        "-O2 -Wl,-z,now",
        "-O2 -static",
    ] {
        let program = compile(directory.path(), "gcc", flags, &["functions.c"], "functions");
        let bytes = std::fs::read(&program).unwrap();
        let binary = open(&program);
        let function = binary.resolve_function("flush").unwrap();
        let sites =
            binary.call_sites(&function, "sendmsg").unwrap_or_else(|error| panic!("{flags}: {error}"));
        assert_eq!(sites.len(), 1, "{flags}: {sites:?}");
        let first = bytes[usize::try_from(sites[0].file_offset).unwrap()];
        if flags.contains("no-plt") {
            assert_eq!((first, sites[0].class), (0xff, Class::SingleStep), "{flags}");
        } else {
            assert_eq!((first, sites[0].class), (0xe8, Class::Emulated), "{flags}");
        }
        let function = binary.resolve_function("flush_at_last").unwrap();
        let sites =
            binary.call_sites(&function, "sendmsg").unwrap_or_else(|error| panic!("{flags}: {error}"));
        assert!(sites[0].instruction.ends_with("sendmsg"), "{flags}: {sites:?}");
        let function = binary.resolve_function("leaf").unwrap();
        let error = binary.call_sites(&function, "sendmsg").unwrap_err();
        assert!(matches!(error, Error::NoCallSite { .. }), "{flags}: {error}");
    }
}

#[test]
fn a_stripped_program_is_served_by_its_debug_file_or_a_layout_or_says_what_to_do() {
    if !have("gcc") || !have("objcopy") {
        return;
    }
    let directory = workshop();
    let at = directory.path();
    for build_id in ["-Wl,--build-id", "-Wl,--build-id=none"] {
        let flags = format!("-g -O2 {build_id}");
        let whole = compile(at, "gcc", &flags, &["functions.c"], "whole");
        run(at, "objcopy", &["--only-keep-debug", "whole", "stripped.debug"]);
        run(at, "strip", &["-s", "-o", "stripped", "whole"]);
        let stripped = at.join("stripped");
        let error = open(&stripped).resolve_function("flush").unwrap_err();
        assert!(matches!(error, Error::Stripped { .. }), "{error}");
        assert!(error.to_string().contains("--debug-file") && error.to_string().contains("--save-layout"));
        let error = open(&stripped).offset("request.state").unwrap_err();
        assert!(matches!(error, Error::NoDebugInformation { .. }), "{error}");

        // Found by its link, in the same directory and in .debug.
        run(at, "objcopy", &["--add-gnu-debuglink=stripped.debug", "stripped"]);
        let expected = open(&whole);
        let want = expected.place(&expected.resolve_function("flush").unwrap(), &[]).unwrap();
        let check = |binary: &Binary| {
            let function = binary.resolve_function("flush").unwrap();
            let got = binary.place(&function, &[]).unwrap();
            assert_eq!((got[0].vaddr, got[0].class), (want[0].vaddr, want[0].class));
            assert_eq!(binary.offset("request.state").unwrap().offset, 8);
            assert_eq!(binary.call_sites(&function, "sendmsg").unwrap().len(), 1);
        };
        check(&open(&stripped));
        std::fs::create_dir_all(at.join(".debug")).unwrap();
        std::fs::rename(at.join("stripped.debug"), at.join(".debug/stripped.debug")).unwrap();
        let binary = open(&stripped);
        check(&binary);
        assert_eq!(binary.debug_file(), Some(at.join(".debug/stripped.debug").as_path()));

        // Given by hand.
        std::fs::rename(at.join(".debug/stripped.debug"), at.join("elsewhere")).unwrap();
        let mut binary = open(&stripped);
        assert_eq!(binary.debug_file(), None);
        binary.set_debug_file(&at.join("elsewhere")).unwrap();
        check(&binary);

        // A debug file of another build of the same sources is refused where builds can be told apart.
        compile(at, "gcc", &format!("{flags} -O1"), &["functions.c"], "other");
        run(at, "objcopy", &["--only-keep-debug", "other", "stripped.debug"]);
        assert_eq!(open(&stripped).debug_file(), None);
        let result = open(&stripped).set_debug_file(&at.join("stripped.debug"));
        match result {
            Err(Error::OtherBuild { .. }) => assert_eq!(build_id, "-Wl,--build-id"),
            Ok(()) => assert_eq!(build_id, "-Wl,--build-id=none"),
            Err(error) => panic!("{error}"),
        }
        std::fs::remove_file(at.join("stripped.debug")).unwrap();
    }
}

#[test]
fn a_layout_file_serves_its_own_build_and_no_other() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let at = directory.path();
    // Named as in the table of hooks, so that the layout has something to hold.
    let rename = "-Dexported=spdk_nvmf_request_exec -Drequest=spdk_nvmf_request -Dlength=rsp";
    compile(at, "gcc", &format!("-g -O2 {rename} -Wl,--build-id"), &["functions.c"], "whole");
    run(at, "strip", &["-s", "-o", "stripped", "whole"]);
    let whole = open(&at.join("whole"));
    let saved = at.join("layout.json");
    whole.layout().unwrap().save(&saved).unwrap();
    let mut stripped = open(&at.join("stripped"));
    stripped.set_layout(Layout::load(&saved).unwrap()).unwrap();
    let from_layout = stripped.resolve_function("spdk_nvmf_request_exec").unwrap();
    let from_symbols = whole.resolve_function("spdk_nvmf_request_exec").unwrap();
    assert_eq!(from_layout.copies[0].vaddr, from_symbols.copies[0].vaddr);
    let sites = stripped.place(&from_layout, &[Reg::Rdi]).unwrap();
    assert_eq!(sites[0].file_offset, whole.place(&from_symbols, &[Reg::Rdi]).unwrap()[0].file_offset);
    assert_eq!(sites[0].binary, at.join("stripped"));
    assert_eq!(stripped.offset("spdk_nvmf_request.rsp").unwrap().offset, 12);
    let error = stripped.resolve_function("bdev_io_submit").unwrap_err();
    assert!(matches!(error, Error::Stripped { .. }), "{error}");

    compile(at, "gcc", &format!("-g -O1 {rename} -Wl,--build-id"), &["functions.c"], "other");
    let mut other = open(&at.join("other"));
    let error = other.set_layout(Layout::load(&saved).unwrap()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(&whole.build_id_text().unwrap()), "{message}");
    assert!(message.contains(&other.build_id_text().unwrap()), "{message}");
    assert!(message.contains("layout.json"), "{message}");

    // What is no layout file says so.
    for (text, says) in [
        ("", "does not say its format"),
        ("{\"format\": \"fabscope-layout/9\"}", "fabscope-layout/9"),
        ("{\"format\": \"fabscope-layout/1\"}", "missing field"),
        ("[1, 2]", "does not say its format"),
    ] {
        std::fs::write(&saved, text).unwrap();
        let message = Layout::load(&saved).unwrap_err().to_string();
        assert!(message.contains(says), "{text}: {message}");
    }
    assert!(matches!(Layout::load(&at.join("nothing")), Err(Error::Read { .. })));
    assert!(matches!(Layout::load(at), Err(Error::Layout { .. })));
}

#[test]
fn usdt_probes_are_read_with_their_arguments() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    for flags in ["", "-no-pie"] {
        let program = compile(directory.path(), "gcc", flags, &["probes.S"], "probes");
        let bytes = std::fs::read(&program).unwrap();
        let binary = open(&program);
        let first = binary.usdt("spdk", "first");
        let [site] = first.as_slice() else { panic!("{flags}: {} sites", first.len()) };
        assert_eq!(bytes[usize::try_from(site.file_offset).unwrap()], 0x90, "{flags}");
        let main = binary.resolve_function("main").unwrap().copies[0].vaddr;
        assert_eq!(site.vaddr, main + 6, "{flags}");
        assert_eq!(site.semaphore, None);
        let places: Vec<_> = site.args.iter().map(|arg| arg.as_ref().map(|arg| arg.place.clone())).collect();
        assert_eq!(
            places,
            [
                Some(UsdtPlace::Constant(0)),
                Some(UsdtPlace::Register { register: Reg::Rbx, shift: 0 }),
                Some(UsdtPlace::Memory { offset: 2, base: Some(Reg::Rsp), index: None }),
            ]
        );
        let second = binary.usdt("spdk", "second");
        let semaphore = second[0].semaphore.expect("a semaphore");
        assert_eq!(bytes[usize::try_from(semaphore.file_offset).unwrap()..][..2], [0, 0]);
        assert_ne!(semaphore.vaddr, semaphore.file_offset);
        assert!(second[0].args.is_empty());
        assert!(binary.usdt("spdk", "third").is_empty());
        assert!(binary.usdt("other", "first").is_empty());
        assert_eq!(binary.usdt_probes("spdk").len(), 2);
        // It has SPDK's probes, so it counts as SPDK.
        assert!(binary.holds_spdk());
    }
}

#[test]
fn a_shared_library_is_found_among_the_files_of_a_program() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let at = directory.path();
    let names = "-Din_library=bdev_io_submit -Dexported_by_library=spdk_bdev_io_complete \
                 -Drequest=spdk_bdev_io -Did=bdev";
    let library = compile(at, "gcc", &format!("-shared -fPIC -g -O2 {names}"), &["library.c"], "lib.so");
    let names = "-Dexported=spdk_nvmf_request_exec -Drequest=spdk_nvmf_request";
    let program = compile(at, "gcc", &format!("-g -O2 {names}"), &["functions.c"], "program");
    let other = compile(at, "gcc", "-g -O2", &["structures.c"], "other");
    let set = BinarySet::open("a program", &[program.clone(), library.clone(), other.clone()], None).unwrap();
    assert_eq!(set.binaries().len(), 2, "the file without SPDK is left out");
    let submit = set.resolve_function("bdev_io_submit").unwrap();
    assert_eq!(submit.copies[0].binary, library);
    assert_eq!(set.place(&submit, &[Reg::Rdi]).unwrap()[0].binary, library);
    assert_eq!(set.resolve_function("spdk_nvmf_request_exec").unwrap().copies[0].binary, program);
    assert_eq!(set.offset("spdk_bdev_io.bdev").unwrap().offset, 0);
    assert_eq!(set.offset("spdk_nvmf_request.length").unwrap().offset, 12);
    let error = BinarySet::open("nothing", &[other.clone(), other], None).unwrap_err();
    assert!(matches!(error, Error::NotSpdk { files: 2, .. }), "{error}");
}

#[test]
fn a_running_program_is_resolved_through_its_maps_even_when_its_file_is_gone() {
    let me = std::process::id();
    let error = BinarySet::of_process(me).unwrap_err();
    assert!(matches!(error, Error::NotSpdk { .. }), "this test is no SPDK: {error}");
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let at = directory.path();
    std::fs::write(
        at.join("sleeper.c"),
        "#include <unistd.h>\nint bdev_io_submit(int n) { return n; }\nint main(void) { pause(); return bdev_io_submit(0); }\n",
    )
    .unwrap();
    run(at, "gcc", &["-g", "-O0", "sleeper.c", "-o", "sleeper"]);
    let mut child = Command::new(at.join("sleeper")).spawn().unwrap();
    // Its code is mapped once it has been loaded.
    let mut tries = 0;
    let set = loop {
        match BinarySet::of_process(child.id()) {
            Ok(set) => break Ok(set),
            Err(_) if tries < 100 => {
                tries += 1;
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            Err(error) => break Err(error),
        }
    };
    std::fs::remove_file(at.join("sleeper")).unwrap();
    let gone = BinarySet::of_process(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    let set = set.unwrap();
    assert_eq!(set.binaries()[0].path(), at.join("sleeper"));
    assert_eq!(set.resolve_function("bdev_io_submit").unwrap().copies.len(), 1);
    match gone {
        Ok(gone) => assert_eq!(
            gone.resolve_function("bdev_io_submit").unwrap().copies[0].vaddr,
            set.resolve_function("bdev_io_submit").unwrap().copies[0].vaddr
        ),
        Err(error) => {
            // Only a privileged process may go through map_files.
            println!("skipped: deleted files cannot be reached here: {error}");
        }
    }
}

#[test]
fn files_that_are_no_programs_are_refused_with_the_reason() {
    let directory = workshop();
    let at = directory.path();
    let says = |name: &str, bytes: &[u8]| {
        let path = at.join(name);
        std::fs::write(&path, bytes).unwrap();
        Binary::open(&path, None).unwrap_err().to_string()
    };
    assert!(says("empty", b"").contains("it is empty"));
    assert!(says("script", b"#!/bin/sh\nexec nvmf_tgt\n").contains("a script"));
    assert!(says("archive", b"!<arch>\n").contains("a static library"));
    assert!(says("text", b"hello").contains("begins with 68 65 6c 6c"));
    assert!(says("short", b"\x7fELF\x02\x01\x01").contains("less than an ELF header"));
    let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let with = |at: usize, value: u8| {
        let mut bytes = own[..4096].to_vec();
        bytes[at] = value;
        bytes
    };
    assert!(says("32", &with(4, 1)).contains("32-bit"));
    assert!(says("big", &with(5, 2)).contains("big-endian"));
    assert!(says("arm", &with(18, 183)).contains("AArch64"));
    assert!(says("object", &with(16, 1)).contains("an object file"));
    assert!(says("core", &with(16, 4)).contains("a core dump"));
    assert!(says("cut", &own[..4096]).contains("damaged or cut short"));
    assert!(Binary::open(at, None).unwrap_err().to_string().contains("a directory"));
    assert!(matches!(Binary::open(&at.join("nothing"), None), Err(Error::Read { .. })));
    if have("mkfifo") {
        run(at, "mkfifo", &["pipe"]);
        assert!(Binary::open(&at.join("pipe"), None).unwrap_err().to_string().contains("a pipe"));
    }
}

#[test]
fn another_kernel_makes_another_class_of_long_nops() {
    if !have("gcc") {
        return;
    }
    let directory = workshop();
    let at = directory.path();
    std::fs::write(at.join("nops.c"), "int main(void) { return 0; }\n").unwrap();
    run(at, "gcc", &["-O0", "-fpatchable-function-entry=0", "nops.c", "-o", "plain"]);
    std::fs::write(
        at.join("nops.S"),
        "\t.text\n\t.globl main\n\t.type main,@function\nmain:\n\t.byte 0x0f,0x1f,0x44,0,0\n\tmov $0,%eax\n\tret\n\
         \t.size main,.-main\n\t.globl one\n\t.type one,@function\none:\n\tmov $1,%eax\n\tnop\n\tret\n\t.size one,.-one\n\
         \t.section .note.GNU-stack,\"\",@progbits\n",
    )
    .unwrap();
    run(at, "gcc", &["nops.S", "-o", "nops"]);
    let binary = open(&at.join("nops"));
    let function = binary.resolve_function("main").unwrap();
    let class = |function, major, minor| {
        binary.place_for(function, &[], Emulation::of_kernel(major, minor)).unwrap()[0].class
    };
    assert_eq!(class(&function, 6, 18), Class::Nop5);
    assert_eq!(class(&function, 7, 0), Class::Nop5);
    assert_eq!(class(&function, 6, 12), Class::SingleStep);
    assert_eq!(class(&binary.resolve_function("one").unwrap(), 5, 10), Class::Emulated);
}
