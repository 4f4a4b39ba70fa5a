//! Builds that hide things: one small program with the functions and structures of the table of hooks, compiled in
//! every way that moves, clones, splits, inlines or hides them. Each build runs, is attached to while it runs, and
//! must deliver exactly the commands of its script; and every rung that claims to see all calls must be hit exactly
//! as often as the program itself counted.

// What a helper of a test cannot do is the test's failure.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use common::standin::Running;
use common::{Kept, assert_ordered, poll_until, stop};
use run_format::{Boundary, Side, Source};
use spdk_probes::resolve::Site;
use spdk_probes::{Choice, Error, Host, Options, Process, Survey, Target, find, survey};
use tempfile::TempDir;

const SOURCES: [&str; 6] = ["tcp.c", "ctrlr.c", "bdev.c", "nvme_tcp.c", "nvme_qpair.c", "main.c"];

/// Commands of one script.
const COMMANDS: usize = 210;

fn source(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hidden");
    folder.join(name).display().to_string()
}

fn have(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: {tool} is not installed");
    }
    found
}

/// Runs a tool, and gives what it says where it fails.
fn try_run(directory: &Path, tool: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(tool)
        .args(arguments)
        .current_dir(directory)
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(format!("{tool} {}: {said}", arguments.join(" ")))
    }
}

fn run(directory: &Path, tool: &str, arguments: &[&str]) {
    if let Err(error) = try_run(directory, tool, arguments) {
        panic!("{error}");
    }
}

/// Compiles each source by itself and links them, as projects do; `None` where the compiler can not.
fn build(at: &Path, compiler: &str, flags: &str) -> Option<PathBuf> {
    if !have(compiler) {
        return None;
    }
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let (link, compile): (Vec<&str>, Vec<&str>) =
        flags.iter().partition(|flag| flag.starts_with("-Wl,") || flag.starts_with("-fuse-ld"));
    let mut objects = Vec::new();
    for name in SOURCES {
        let object = name.replace(".c", ".o");
        let path = source(name);
        let mut arguments = compile.clone();
        arguments.extend(["-c", &path, "-o", &object]);
        if let Err(error) = try_run(at, compiler, &arguments) {
            println!("skipped: {compiler} {}: {error}", flags.join(" "));
            return None;
        }
        objects.push(object);
    }
    let mut arguments = [compile, link].concat();
    arguments.extend(objects.iter().map(String::as_str));
    arguments.extend(["-o", "program"]);
    if let Err(error) = try_run(at, compiler, &arguments) {
        println!("skipped: {compiler} {}: {error}", flags.join(" "));
        return None;
    }
    Some(at.join("program"))
}

/// One command of the script, as the program says it: queue, cid, opcode, nsid, slba, dword 12, R2Ts.
type Scripted = (u16, u16, u8, u32, u64, u16, u8);

/// A running build.
struct Program {
    process: Running,
    pid: u32,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    name: String,
    calls: BTreeMap<String, u64>,
}

impl Program {
    fn start(command: &mut Command, name: &str) -> Program {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = Running(child.unwrap_or_else(|error| panic!("{name}: {error}")));
        let input = process.0.stdin.take().unwrap();
        let mut output = BufReader::new(process.0.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert!(line.starts_with("ready "), "{name}: {line}");
        let pid = process.0.id();
        Program { process, pid, input, output, name: name.to_owned(), calls: BTreeMap::new() }
    }

    /// Runs the script once: its commands, and how often each function was called in it.
    fn script(&mut self) -> (Vec<Scripted>, BTreeMap<String, u64>) {
        writeln!(self.input, "{COMMANDS}").unwrap();
        let (mut commands, mut calls) = (Vec::new(), BTreeMap::new());
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "{}: it ended", self.name);
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["command", qid, cid, opcode, nsid, slba, nlb, r2ts] => commands.push((
                    qid.parse().unwrap(),
                    cid.parse().unwrap(),
                    opcode.parse().unwrap(),
                    nsid.parse().unwrap(),
                    slba.parse().unwrap(),
                    nlb.parse().unwrap(),
                    r2ts.parse().unwrap(),
                )),
                ["calls", name, count] => {
                    calls.insert((*name).to_owned(), count.parse::<u64>().unwrap());
                }
                ["done"] => break,
                _ => panic!("{}: {line}", self.name),
            }
        }
        let so_far = std::mem::replace(&mut self.calls, calls.clone());
        for (name, count) in &mut calls {
            *count -= so_far.get(name).copied().unwrap_or(0);
        }
        (commands, calls)
    }

    fn process(&self, side: Side) -> Process {
        find(side, &Choice::Pid(self.pid)).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

/// Counts the hits at one place of a file, with the kernel's own counter: none of this project's programs.
struct Counter(OwnedFd);

impl Counter {
    fn open(site: &Site, pid: u32) -> Counter {
        let kind = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type").expect("uprobes");
        let path = std::ffi::CString::new(site.binary.as_os_str().as_encoded_bytes()).unwrap();
        // struct perf_event_attr (include/uapi/linux/perf_event.h): type, size, and at 56 and 64 path and offset.
        let mut attributes = [0_u64; 16];
        attributes[0] = u64::from(kind.trim().parse::<u32>().unwrap()) | 128 << 32;
        attributes[7] = path.as_ptr() as u64;
        attributes[8] = site.file_offset;
        // SAFETY: the attributes have the size that they state, and the path lives through the call.
        let fd = unsafe {
            libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), pid as libc::pid_t, -1, -1, 0)
        };
        assert!(fd >= 0, "{site:?}: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new, and nobody else has it.
        Counter(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    fn hits(&self) -> u64 {
        let mut count = 0_u64;
        // SAFETY: eight bytes are read into a variable of eight bytes.
        let read = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        assert_eq!(read, 8);
        count
    }
}

/// The function of a rung's first uprobe, by the name of the hook: `uprobe FUNCTION.suffix+N` or
/// `uprobe CALLER+N (FUNCTION inlined)`, `uprobe CALLER+N (call FUNCTION)` or `uprobe FUNCTION (N calls)`.
fn function_of(hook: &str, calls: &BTreeMap<String, u64>) -> Option<String> {
    let hook = hook.split(", ").next()?.strip_prefix("uprobe ")?;
    let name = match hook.split_once('(') {
        Some((before, inside)) if inside.starts_with(|c: char| c.is_ascii_digit()) => {
            before.trim().to_owned()
        }
        Some((_, inside)) => {
            let inside = inside.split(')').next()?;
            inside.trim_end_matches(" inlined").split(' ').next_back()?.to_owned()
        }
        None => hook.split(['.', '+', ' ']).next()?.to_owned(),
    };
    calls.contains_key(&name).then_some(name)
}

/// What a build shows of itself.
#[derive(Debug, Default)]
struct Seen {
    /// Rungs whose hits were compared.
    counted: usize,
    /// Those with an inlined place among them.
    inlined: usize,
    /// Boundaries whose chosen rung does not see everything, or that have none.
    lacking: Vec<String>,
    /// Why a side could not be recorded at all.
    refused: Vec<String>,
}

impl Seen {
    /// Whether the target could be recorded.
    fn of_target(&self) -> bool {
        !self.refused.iter().any(|why| why.contains("`t_"))
    }
}

/// Compares the hits of every whole rung with the program's own count.
fn count_hits(program: &mut Program, options: &Options) -> Seen {
    let mut seen = Seen::default();
    let mut counters: Vec<(String, String, Vec<Counter>, bool)> = Vec::new();
    let (_, known) = program.script();
    for side in [Side::Target, Side::Host] {
        let process = program.process(side);
        let survey = survey(&process, side, options).unwrap_or_else(|e| panic!("{}: {e}", program.name));
        for boundary in &survey.boundaries {
            let whole = boundary.rung().is_some_and(|rung| rung.whole && rung.outcome.is_ok());
            if !whole {
                let why = boundary.rung().map(|rung| rung.note.clone());
                seen.lacking.push(format!("{}: {:?}", boundary.boundary, why));
            }
            for rung in &boundary.rungs {
                let Ok(sites) = &rung.outcome else { continue };
                // Of a rung with several functions, which sites are whose can not be told from outside.
                let single = rung.hook.matches("uprobe ").count() == 1;
                if !rung.whole || !single || counters.iter().any(|(hook, ..)| *hook == rung.hook) {
                    continue;
                }
                let Some(name) = function_of(&rung.hook, &known) else { continue };
                let inlined = sites.iter().any(|site| site.inlined.is_some());
                let open = sites.iter().map(|site| Counter::open(site, program.pid)).collect();
                counters.push((rung.hook.clone(), name, open, inlined));
            }
        }
    }
    let (_, calls) = program.script();
    for (hook, name, counters, inlined) in &counters {
        let hits: u64 = counters.iter().map(Counter::hits).sum();
        assert_eq!(hits, calls[name], "{}: {hook} at {} places", program.name, counters.len());
        seen.counted += 1;
        seen.inlined += usize::from(*inlined);
    }
    seen
}

/// What was recorded, as the script says it.
fn as_scripted(kept: &Kept) -> Vec<Scripted> {
    let all = kept.commands.iter().map(|command| {
        let queue = kept.queue_of(command);
        assert_eq!((queue.cntlid, queue.subsystem_nqn.as_str()), (5, "nqn.2026-01.test:hidden"), "{queue:?}");
        let slba = command.slba;
        (queue.qid, command.cid.0, command.opcode, command.nsid, slba, command.nlb0, command.r2ts)
    });
    all.collect()
}

/// A side that can be recorded; what can not is refused by name, never recorded in part.
fn attached<T>(side: Result<T, Error>, name: &str, seen: &mut Seen) -> Option<T> {
    match side {
        Ok(side) => Some(side),
        Err(error @ Error::NoHook { .. }) => {
            seen.refused.push(error.to_string());
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Attaches to both sides of the program at once, runs the script, and compares.
fn record(program: &mut Program, options: &Options, seen: &mut Seen) {
    let name = program.name.clone();
    let target = Target::attach(&program.process(Side::Target), options);
    let mut target = attached(target, &name, seen);
    let mut host = attached(Host::attach(&program.process(Side::Host), options), &name, seen);
    let (expected, calls) = program.script();
    assert!(calls["nvmf_tcp_send_r2t_pdu"] > 10, "{calls:?}");
    if let Some(target) = &mut target {
        let whole = whole_boundaries(target.survey());
        compare(target, Side::Target, &whole, &expected, &name);
    }
    if let Some(host) = &mut host {
        let whole = whole_boundaries(host.survey());
        compare(host, Side::Host, &whole, &expected, &name);
    }
}

fn whole_boundaries(survey: &Survey) -> Vec<Boundary> {
    let whole = survey.boundaries.iter().filter(|boundary| boundary.rung().is_some_and(|rung| rung.whole));
    whole.map(|boundary| boundary.boundary).collect()
}

/// Everything of the script was recorded, nothing else, each once, with every boundary that is claimed.
fn compare<S: Source>(source: &mut S, side: Side, whole: &[Boundary], expected: &[Scripted], name: &str)
where
    S::Error: std::fmt::Debug,
{
    let mut kept = Kept::default();
    poll_until(source, &mut kept, Duration::from_secs(5), |kept| kept.commands.len() >= expected.len());
    let hooks = source.hooks();
    let counters = stop(source, &mut kept);
    let (lost, in_flight, no_start) = (counters.lost.total(), counters.in_flight, counters.no_start);
    assert_eq!((lost, in_flight, no_start), (0, 0, 0), "{name}: {side}: {counters:?}");
    let mut recorded = as_scripted(&kept);
    let mut expected = expected.to_vec();
    if side == Side::Target && !whole.contains(&Boundary::TR2t) {
        // What is not seen is not counted, and the boundary is said to be lost.
        recorded.iter_mut().chain(&mut expected).for_each(|command| command.6 = 0);
    }
    let differ = recorded.iter().zip(&expected).find(|(recorded, expected)| recorded != expected);
    assert_eq!((recorded.len(), differ), (expected.len(), None), "{name}: {side}: {hooks:#?}");
    // What storage never saw has no t_done by the bdev's callback.
    let done = hooks.iter().find(|hook| hook.boundary == Boundary::TDone).and_then(|hook| hook.hook.as_ref());
    let submit = hooks.iter().find(|hook| hook.boundary == Boundary::TSubmit);
    let by_bdev = submit.is_some_and(|hook| hook.measured);
    let by_callback = done.is_some_and(|hook| !hook.contains("spdk_nvmf_request_complete"));
    // With t_resp, t_done is taken of what has a t_submit.
    let with_response = done.is_some_and(|hook| hook.contains("nvmf_tcp_req_process"));
    for command in &kept.commands {
        // What storage never saw has no t_submit: the fixture answers the vendor's opcode itself.
        let absent = |boundary: &Boundary| match boundary {
            Boundary::TR2t | Boundary::TData | Boundary::HR2t | Boundary::HDataSent => command.r2ts == 0,
            Boundary::TSubmit => command.opcode == 0x99 && by_bdev,
            Boundary::TDone => command.opcode == 0x99 && if with_response { by_bdev } else { by_callback },
            _ => false,
        };
        assert_ordered(side, command);
        for boundary in Boundary::of(side).filter(|boundary| whole.contains(boundary)) {
            let there = command.time(boundary).is_some();
            assert_eq!(there, !absent(&boundary), "{name}: {boundary}: {command:#?} {hooks:#?}");
        }
    }
}

/// The whole of it for one program.
fn check(command: &mut Command, name: &str, options: &Options) -> Seen {
    let mut program = Program::start(command, name);
    let mut seen = count_hits(&mut program, options);
    record(&mut program, options, &mut seen);
    println!("{name}: {} rungs counted, {} of them inlined", seen.counted, seen.inlined);
    println!("    lacking: {:?}", seen.lacking);
    println!("    refused: {:?}", seen.refused);
    assert!(seen.counted >= 2, "{name}: {seen:?}");
    drop(program.input);
    program.process.0.wait().unwrap();
    seen
}

fn check_build(compiler: &str, flags: &str) -> Option<Seen> {
    let directory = TempDir::new().unwrap();
    let program = build(directory.path(), compiler, flags)?;
    Some(check(&mut Command::new(program), &format!("{compiler} {flags}"), &Options::default()))
}

#[test]
fn every_compiler_and_level_of_optimisation() {
    let (mut inlined, mut both, mut target) = (0, 0, 0);
    for (compiler, flags) in [
        ("gcc", "-g -O0"),
        ("gcc", "-g -O1"),
        ("gcc", "-g -O2"),
        ("gcc", "-g -O3"),
        ("gcc", "-g -Os"),
        ("gcc", "-g -O2 -no-pie -fno-pie"),
        ("gcc", "-g -O2 -fcf-protection=full"),
        ("gcc", "-g -O3 -fcf-protection=full -fpartial-inlining"),
        ("gcc", "-gdwarf-4 -O2"),
        ("gcc", "-gdwarf-4 -O3"),
        ("gcc", "-gdwarf-5 -O2"),
        ("clang", "-g -O0"),
        ("clang", "-g -O2"),
        ("clang", "-g -O3"),
        ("clang", "-gdwarf-4 -O2"),
        ("clang", "-gdwarf-4 -O3 -fcf-protection=full"),
        ("clang", "-g -O2 -no-pie -fno-pie"),
    ] {
        let Some(seen) = check_build(compiler, flags) else { continue };
        inlined += seen.inlined;
        target += usize::from(seen.of_target());
        both += usize::from(seen.refused.is_empty());
    }
    if have("gcc") {
        assert!(inlined > 10 && both >= 2 && target >= 10, "{inlined} {both} {target}");
    }
}

#[test]
fn link_time_optimisation() {
    for (compiler, flags) in [
        ("gcc", "-g -O2 -flto"),
        ("gcc", "-g -O3 -flto"),
        ("gcc", "-g -O2 -flto -ffat-lto-objects -flto-partition=none"),
        ("gcc", "-gdwarf-4 -O2 -flto"),
        ("gcc", "-g -O2 -flto -fcf-protection=full -no-pie -fno-pie"),
        ("clang", "-g -O2 -flto -fuse-ld=lld"),
        ("clang", "-g -O3 -flto -fuse-ld=lld"),
        ("clang", "-g -O2 -flto=thin -fuse-ld=lld"),
        ("clang", "-gdwarf-4 -O2 -flto -fuse-ld=lld"),
        ("clang", "-g -O2 -flto -fuse-ld=gold"),
    ] {
        let Some(seen) = check_build(compiler, flags) else { continue };
        assert!(seen.of_target(), "{compiler} {flags}: {seen:?}");
        assert!(compiler == "clang" || seen.inlined > 5, "{compiler} {flags}: {seen:?}");
    }
}

/// Runs the program of a finished build in the directory.
fn check_program(at: &Path, name: &str, options: &Options) -> Seen {
    check(&mut Command::new(at.join("program")), name, options)
}

/// The build-id's file beneath a debug directory.
fn build_id_file(program: &Path) -> PathBuf {
    let id = spdk_probes::resolve::Binary::open(program, None).unwrap().build_id_text().unwrap();
    PathBuf::from(format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]))
}

#[test]
fn stripped_with_a_separate_debug_file() {
    if !have("gcc") || !have("objcopy") {
        return;
    }
    for (flags, compress) in [
        ("-g -O2", ""),
        ("-g -O3", "--compress-debug-sections=zlib"),
        ("-gdwarf-4 -O2", "--compress-debug-sections=zlib"),
        ("-g -O2 -flto", "--compress-debug-sections=zstd"),
        ("-g -O2", "--compress-debug-sections=zstd"),
    ] {
        let directory = TempDir::new().unwrap();
        let at = directory.path();
        let flags = format!("{flags} -Wl,--build-id");
        let Some(program) = build(at, "gcc", &flags) else { continue };
        let name = format!("stripped gcc {flags} {compress}");
        let whole = check_program(at, &format!("gcc {flags}"), &Options::default());
        let mut arguments = vec!["--only-keep-debug", "program", "program.debug"];
        arguments.extend((!compress.is_empty()).then_some(compress));
        if let Err(error) = try_run(at, "objcopy", &arguments) {
            println!("skipped: {error}");
            continue;
        }
        std::fs::copy(&program, at.join("unstripped")).unwrap();
        run(at, "strip", &["-s", "program"]);
        // Without it the program is refused, with the way out.
        let mut stripped = Program::start(&mut Command::new(&program), &name);
        let error = Target::attach(&stripped.process(Side::Target), &Options::default()).unwrap_err();
        assert!(matches!(error, Error::Stripped { .. } | Error::NotSpdk { .. }), "{name}: {error}");
        drop(stripped.input);
        stripped.process.0.wait().unwrap();

        // Named by hand; then found by its link; then by the build-id.
        let by_hand = Options { debug_file: Some(at.join("program.debug")), ..Options::default() };
        let by_hand = check_program(at, &format!("{name}, named"), &by_hand);
        assert_eq!((by_hand.counted, by_hand.inlined), (whole.counted, whole.inlined), "{name}");
        run(at, "objcopy", &["--add-gnu-debuglink=program.debug", "program"]);
        let linked = check_program(at, &format!("{name}, linked"), &Options::default());
        assert_eq!((linked.counted, linked.inlined), (whole.counted, whole.inlined), "{name}");

        // By a layout file of the unstripped build: the inlined places too.
        let layout = at.join("layout.json");
        let unstripped = spdk_probes::resolve::Binary::open(&at.join("unstripped"), None).unwrap();
        unstripped.layout().unwrap().save(&layout).unwrap();
        std::fs::remove_file(at.join("program.debug")).unwrap();
        let options = Options { layout: Some(layout), ..Options::default() };
        let by_layout = check_program(at, &format!("{name}, by its layout"), &options);
        assert_eq!((by_layout.counted, by_layout.inlined), (whole.counted, whole.inlined), "{name}");
    }
}

#[test]
fn split_debug_information() {
    for (compiler, flags, packager) in [
        ("gcc", "-gdwarf-5 -O2 -gsplit-dwarf", "dwp"),
        ("gcc", "-gdwarf-4 -O2 -gsplit-dwarf", "dwp"),
        ("gcc", "-gdwarf-5 -O3 -gsplit-dwarf", "dwp"),
        ("clang", "-gdwarf-5 -O2 -gsplit-dwarf", "llvm-dwp-14"),
        ("clang", "-gdwarf-4 -O2 -gsplit-dwarf", "llvm-dwp-14"),
    ] {
        let directory = TempDir::new().unwrap();
        let at = directory.path();
        let Some(program) = build(at, compiler, flags) else { continue };
        let name = format!("{compiler} {flags}");
        let plain = TempDir::new().unwrap();
        let expected = build(plain.path(), compiler, flags.trim_end_matches(" -gsplit-dwarf"));
        let expected = check_program(
            expected.unwrap().parent().unwrap(),
            &format!("{name}, not split"),
            &Options::default(),
        );
        let beside = check_program(at, &name, &Options::default());
        assert_eq!((beside.counted, beside.inlined), (expected.counted, expected.inlined), "{name}");

        let packed = have(packager).then(|| try_run(at, packager, &["-e", "program", "-o", "packaged"]));

        // All moved together: the objects' directory is no longer what the debug information says.
        let moved = TempDir::new().unwrap();
        for entry in std::fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension == "dwo") && path.is_file() {
                std::fs::rename(&path, moved.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        let after = check_program(moved.path(), &format!("{name}, moved"), &Options::default());
        assert_eq!((after.counted, after.inlined), (expected.counted, expected.inlined), "{name}");
        let at = moved.path();

        match packed {
            Some(Ok(())) => {
                let aside = TempDir::new().unwrap();
                std::fs::copy(at.join("program"), aside.path().join("program")).unwrap();
                std::fs::copy(at.join("packaged"), aside.path().join("program.dwp")).unwrap();
                let seen = check_program(aside.path(), &format!("{name}, packaged"), &Options::default());
                assert_eq!((seen.counted, seen.inlined), (expected.counted, expected.inlined), "{name}");
            }
            Some(Err(error)) => println!("skipped: {error}"),
            None => {}
        }

        // Files of another build are not taken for these.
        let other = TempDir::new().unwrap();
        build(other.path(), compiler, &flags.replace("-O2", "-O1").replace("-O3", "-O1")).unwrap();
        for source in SOURCES {
            let file = source.replace(".c", ".dwo");
            std::fs::copy(other.path().join(&file), at.join(&file)).unwrap();
        }
        let binary = spdk_probes::resolve::Binary::open(&at.join("program"), None).unwrap();
        let message = binary.offset("spdk_nvmf_tcp_req.state").unwrap_err().to_string();
        assert!(message.contains("another build") || message.contains("missing"), "{name}: {message}");
        drop(program);
    }
}

#[test]
fn what_dwz_moved_to_a_shared_file() {
    if !have("dwz") || !have("gcc") {
        return;
    }
    for flags in ["-gdwarf-4 -O2", "-gdwarf-5 -O2", "-gdwarf-5 -O2 -flto"] {
        let directory = TempDir::new().unwrap();
        let at = directory.path();
        let flags = format!("{flags} -Wl,--build-id");
        if build(at, "gcc", &flags).is_none() {
            continue;
        }
        let expected = check_program(at, &format!("gcc {flags}"), &Options::default());
        let compare = |seen: &Seen, name: &str| {
            assert_eq!((seen.counted, seen.inlined), (expected.counted, expected.inlined), "{name}");
        };
        // Within one file: partial units.
        std::fs::copy(at.join("program"), at.join("original")).unwrap();
        match try_run(at, "dwz", &["program"]) {
            Ok(()) => compare(&check_program(at, &format!("dwz {flags}"), &Options::default()), &flags),
            Err(error) => println!("skipped: {error}"),
        }
        // Of two files, what they share goes to a third.
        std::fs::copy(at.join("original"), at.join("program")).unwrap();
        match try_run(at, "dwz", &["-m", "shared", "program", "original"]) {
            Ok(()) => {
                assert!(at.join("shared").exists(), "dwz shares nothing of {flags}");
                compare(&check_program(at, &format!("dwz -m {flags}"), &Options::default()), &flags);
                std::fs::remove_file(at.join("shared")).unwrap();
                let binary = spdk_probes::resolve::Binary::open(&at.join("program"), None).unwrap();
                let message = binary.offset("spdk_nvmf_tcp_req.state").unwrap_err().to_string();
                assert!(message.contains("dwz") && message.contains("shared"), "{message}");
            }
            Err(error) => println!("skipped: {error}"),
        }
    }
}

#[test]
fn shared_libraries() {
    for (compiler, flags) in [
        ("gcc", "-g -O2 -fPIC"),
        ("gcc", "-g -O3 -fPIC -fcf-protection=full"),
        ("clang", "-gdwarf-4 -O2 -fPIC"),
    ] {
        if !have(compiler) {
            continue;
        }
        let directory = TempDir::new().unwrap();
        let at = directory.path();
        let flags_list: Vec<&str> = flags.split_whitespace().collect();
        let library = |output: &str, sources: &[&str], with: &[&str]| {
            let sources: Vec<String> = sources.iter().map(|name| source(name)).collect();
            let mut arguments = flags_list.clone();
            arguments.extend(sources.iter().map(String::as_str));
            arguments.extend(["-shared", "-o", output]);
            arguments.extend(with);
            run(at, compiler, &arguments);
        };
        library("libspdk_bdev.so", &["bdev.c"], &[]);
        library("libspdk_nvmf.so", &["tcp.c", "ctrlr.c"], &[]);
        library("libspdk_nvme.so", &["nvme_tcp.c", "nvme_qpair.c"], &[]);
        let main = source("main.c");
        let mut arguments = flags_list.clone();
        arguments.extend([&main, "-o", "program", "-L.", "-Wl,-rpath,$ORIGIN"]);
        arguments.extend(["-lspdk_nvmf", "-lspdk_nvme", "-lspdk_bdev"]);
        run(at, compiler, &arguments);
        let seen = check_program(at, &format!("shared {compiler} {flags}"), &Options::default());
        assert!(seen.of_target(), "{seen:?}");
    }
}

#[test]
fn a_container_of_its_own() {
    if !have("gcc") || !have("unshare") {
        return;
    }
    let directory = TempDir::new().unwrap();
    let at = directory.path();
    if build(at, "gcc", "-g -O2 -static -Wl,--build-id").is_none() {
        return;
    }
    run(at, "objcopy", &["--only-keep-debug", "program", "program.debug"]);
    run(at, "strip", &["-s", "program"]);
    let installed = build_id_file(&at.join("program"));
    // Its file system is an overlay that only it sees; there the program is /spdk/program, its PID is 1, and its
    // debug file is installed. Then the program is deleted under it.
    let script = format!(
        "set -e; cd '{}'; mkdir -p lower/spdk lower/proc lower/$(dirname {installed}) upper work merged;
         cp program lower/spdk/; cp program.debug lower/{installed};
         mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged;
         cd merged; exec chroot . /spdk/program",
        at.display(),
        installed = installed.display()
    );
    for deleted in [false, true] {
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
            "sh",
            "-c",
            &script,
        ]);
        let _ = std::fs::remove_dir_all(at.join("work"));
        let launcher = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut launcher = Running(launcher.unwrap());
        let input = launcher.0.stdin.take().unwrap();
        let mut output = BufReader::new(launcher.0.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut said = String::new();
            std::io::Read::read_to_string(&mut launcher.0.stderr.take().unwrap(), &mut said).unwrap();
            println!("skipped: no overlay in a mount namespace here: {said}");
            return;
        }
        // It says its own number, which is another one outside.
        assert_eq!(line.trim(), "ready 1");
        let children = format!("/proc/{0}/task/{0}/children", launcher.0.id());
        let children = std::fs::read_to_string(children).unwrap();
        let pid: u32 = children.split_whitespace().next().expect("the program").parse().unwrap();
        let name = format!("container, deleted: {deleted}");
        let mut program =
            Program { process: launcher, pid, input, output, name: name.clone(), calls: BTreeMap::new() };
        assert!(!Path::new("/spdk/program").exists());
        if deleted {
            std::fs::remove_file(format!("/proc/{pid}/root/spdk/program")).unwrap();
        }
        let mut seen = count_hits(&mut program, &Options::default());
        record(&mut program, &Options::default(), &mut seen);
        println!("{name}: {} rungs counted, {} of them inlined", seen.counted, seen.inlined);
        assert!(seen.counted >= 8 && seen.of_target(), "{name}: {seen:?}");
    }
}

#[test]
fn a_program_that_was_replaced_while_it_runs() {
    if !have("gcc") {
        return;
    }
    let directory = TempDir::new().unwrap();
    let Some(path) = build(directory.path(), "gcc", "-g -O2") else { return };
    let mut program = Program::start(&mut Command::new(&path), "replaced");
    // As a package manager does it: another file of the same name.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "#!/bin/sh\n").unwrap();
    let mut seen = count_hits(&mut program, &Options::default());
    record(&mut program, &Options::default(), &mut seen);
    assert!(seen.counted >= 8 && seen.of_target(), "{seen:?}");
}
