//! What can go wrong between a binary and its probes, said so that the reader knows what to do next.
//!
//! One type serves the crate. The first group comes from resolving (files, symbols, DWARF, placement).

use std::path::PathBuf;

/// Why a binary could not be resolved, or its probes not be attached.
///
/// Every message names the thing, the reason, and where there is one, the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be opened or read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },

    /// A file could not be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },

    /// The file is not ELF.
    #[error("{}: not an ELF file ({found}): name the executable itself, not a wrapper script or an archive", path.display())]
    NotElf {
        /// The file.
        path: PathBuf,
        /// What it is instead, as far as its first bytes tell.
        found: String,
    },

    /// The file is ELF, but not a program for this machine.
    #[error("{}: an ELF file for {machine}; only 64-bit x86 (little-endian) programs and shared libraries can be probed here", path.display())]
    OtherMachine {
        /// The file.
        path: PathBuf,
        /// Class, machine or kind found.
        machine: String,
    },

    /// The file contradicts itself or ends too early.
    #[error("{}: damaged or cut short: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What does not hold.
        what: String,
    },

    /// No symbol table, and nothing that could replace it.
    #[error(
        "{}: `{wanted}` cannot be found: the file is stripped and has no symbols; give the matching \
         debug file (--debug-file), install it as {debug_file}, or give a layout file made from the \
         unstripped build by `fabscope probe target --spdk UNSTRIPPED --save-layout FILE`",
        path.display()
    )]
    Stripped {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        wanted: String,
        /// Where a debug file is looked for.
        debug_file: String,
    },

    /// Symbols are there, type information is not.
    #[error(
        "{}: `{wanted}` cannot be found: {reason}; give the matching debug file (--debug-file), install \
         it as {debug_file}, or give a layout file made from a build with `-g` by `fabscope probe target --spdk \
         UNSTRIPPED --save-layout FILE`",
        path.display()
    )]
    NoDebugInformation {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        wanted: String,
        /// Which part is missing.
        reason: String,
        /// Where a debug file is looked for.
        debug_file: String,
    },

    /// The symbol table has no such function.
    #[error("{}: no function `{name}`{}", path.display(), hint(similar))]
    NoFunction {
        /// The file, or all of the process's files.
        path: PathBuf,
        /// The function.
        name: String,
        /// Functions with a similar name.
        similar: Vec<String>,
    },

    /// The function exists only inside its callers.
    #[error("{}: `{name}` has no code of its own: the compiler inlined it at {places} places; use the next hook of its boundary", path.display())]
    OnlyInlined {
        /// The file.
        path: PathBuf,
        /// The function.
        name: String,
        /// How often it was inlined.
        places: usize,
    },

    /// The function exists only inside its callers, and a probe can not be had in all of them.
    #[error("{}: `{name}` has no code of its own: the compiler inlined it at {places} places, and {why}; use the next hook of its boundary", path.display())]
    InlinedUnseen {
        /// The file.
        path: PathBuf,
        /// The function.
        name: String,
        /// How often it was inlined.
        places: usize,
        /// Why not there.
        why: String,
    },

    /// A function's symbol points to where there is no code.
    #[error("{}: `{symbol}` is said to be at {vaddr:#x}, where the file has no code", path.display())]
    NoCode {
        /// The file.
        path: PathBuf,
        /// The symbol.
        symbol: String,
        /// Its address.
        vaddr: u64,
    },

    /// Not all calls of a function can be found.
    #[error("{}: not every call of `{name}` can be probed: {why}; use the next hook of its boundary", path.display())]
    CallsUnseen {
        /// The file.
        path: PathBuf,
        /// The called function.
        name: String,
        /// What stands in the way.
        why: String,
    },

    /// The function does not call what it was expected to call.
    #[error("{}: `{function}` does not call `{callee}`; use the next hook of its boundary", path.display())]
    NoCallSite {
        /// The file.
        path: PathBuf,
        /// The calling function.
        function: String,
        /// The called function.
        callee: String,
    },

    /// An argument is not in the register that the calling convention gives it.
    #[error("{}: `{symbol}` takes its argument {argument} {place}: the compiler changed this copy's arguments; use the next hook of its boundary", path.display())]
    MovedArgument {
        /// The file.
        path: PathBuf,
        /// The symbol, with the compiler's suffix.
        symbol: String,
        /// The argument, counted from 0.
        argument: usize,
        /// Where it is instead.
        place: String,
    },

    /// DWARF has no complete type of this name.
    #[error("{}: no {kind} `{name}` in the debug information{note}", path.display())]
    NoType {
        /// The file.
        path: PathBuf,
        /// Structure or enumeration.
        kind: &'static str,
        /// Its name.
        name: String,
        /// What was found instead, or nothing.
        note: String,
    },

    /// The structure has no such member.
    #[error("{}: `{structure}` has no member `{member}` (asked for as `{asked}`){}", path.display(), hint(similar))]
    NoMember {
        /// The file.
        path: PathBuf,
        /// The structure.
        structure: String,
        /// The member.
        member: String,
        /// The whole path asked for.
        asked: String,
        /// Members with a similar name.
        similar: Vec<String>,
    },

    /// The path cannot be walked without reading memory.
    #[error("{}: `{asked}`: `{member}` is {what}, so what is behind it has no offset here", path.display())]
    NotInside {
        /// The file.
        path: PathBuf,
        /// The whole path asked for.
        asked: String,
        /// The member that ends the walk.
        member: String,
        /// What it is.
        what: String,
    },

    /// Several types of one name, and they disagree.
    #[error("{}: `{asked}` is ambiguous: {candidates}", path.display())]
    Ambiguous {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        asked: String,
        /// What the candidates say.
        candidates: String,
    },

    /// The enumeration has no such enumerator.
    #[error("{}: `enum {enumeration}` has no `{enumerator}`{}", path.display(), hint(similar))]
    NoEnumerator {
        /// The file.
        path: PathBuf,
        /// The enumeration.
        enumeration: String,
        /// The enumerator.
        enumerator: String,
        /// Enumerators with a similar name.
        similar: Vec<String>,
    },

    /// A separate debug file belongs to another build.
    #[error("{}: belongs to the build {theirs}, but {} is the build {ours}; give the debug file of this very build", debug_file.display(), path.display())]
    OtherBuild {
        /// The debug file.
        debug_file: PathBuf,
        /// The binary.
        path: PathBuf,
        /// Build-id of the debug file.
        theirs: String,
        /// Build-id of the binary.
        ours: String,
    },

    /// A layout file belongs to another build.
    #[error("{}: made from the build {theirs}, but {} is the build {ours}; make it anew from the debug build of this very binary with `fabscope probe target --spdk UNSTRIPPED --save-layout FILE`", layout.display(), path.display())]
    OtherLayout {
        /// The layout file.
        layout: PathBuf,
        /// The binary.
        path: PathBuf,
        /// Build-id in the layout file.
        theirs: String,
        /// Build-id of the binary.
        ours: String,
    },

    /// A layout file cannot be used at all.
    #[error("{}: not a usable layout file: {what}", path.display())]
    Layout {
        /// The layout file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },

    /// A program of which no layout file can be made.
    #[error(
        "{}: no layout file can be made of this program: it has no build-id, by which a layout file is told to be of \
         a build; link it with -Wl,--build-id",
        path.display()
    )]
    NoBuildId {
        /// The program.
        path: PathBuf,
    },

    /// No file of the process holds SPDK.
    #[error(
        "{name}: no SPDK in it: none of its {files} mapped files has an SPDK version, SPDK probes or SPDK functions; give the process or path of an SPDK application"
    )]
    NotSpdk {
        /// The process or file.
        name: String,
        /// How many files were looked at.
        files: usize,
    },

    /// No process to record.
    #[error(
        "no SPDK {side} is running{}: start it, or give its PID{}",
        program_hint(program),
        aside_hint(aside)
    )]
    NoProcess {
        /// The side asked for.
        side: run_format::Side,
        /// The program asked for.
        program: Option<PathBuf>,
        /// Targets that could be a host too and have no connection as one.
        aside: Vec<u32>,
    },

    /// More than one process to record.
    #[error("several processes could be the SPDK {side}; give the PID of one:{list}")]
    SeveralProcesses {
        /// The side asked for.
        side: run_format::Side,
        /// One line for each: PID, program, version.
        list: String,
    },

    /// No such process.
    #[error(
        "process {pid} is gone: it exited or never was, or has another number here (of a process in a container, \
         give the PID that `ps` shows where fabscope runs)"
    )]
    ProcessGone {
        /// The process.
        pid: u32,
    },

    /// The process exited meanwhile.
    #[error("process {pid} ended while it was looked at")]
    ProcessEnded {
        /// The process.
        pid: u32,
    },

    /// The number is not a process's.
    #[error("{tid} is a thread of process {process}: give the process, {process}")]
    Thread {
        /// The number.
        tid: u32,
        /// The process that the thread is of.
        process: u32,
    },

    /// The process runs no program.
    #[error(
        "process {pid} runs no program (a thread of the kernel, or a process that has exited): give the PID of an SPDK application"
    )]
    NoProgram {
        /// The process.
        pid: u32,
    },

    /// The process holds SPDK, but not what is asked for.
    #[error("{name}: is this {expected}? {source}")]
    WrongProgram {
        /// The process or file.
        name: String,
        /// What it should be.
        expected: &'static str,
        /// What is missing.
        source: Box<Error>,
    },

    /// The hooks of a boundary that nothing works without are all out of reach.
    #[error("{name}: `{boundary}` can not be taken, and nothing works without it: {reasons}")]
    NoHook {
        /// The process or file.
        name: String,
        /// The boundary.
        boundary: run_format::Boundary,
        /// Each hook, and why not.
        reasons: String,
    },

    /// A probe there would be dear.
    #[error("`{symbol}` begins with `{instruction}`, which would be single-stepped")]
    SingleStepped {
        /// The symbol.
        symbol: String,
        /// The instruction.
        instruction: String,
    },

    /// The rights to do this are missing.
    #[error("not allowed to {what}: {}", rights_hint(command))]
    Privilege {
        /// What was to be done, and what is missing for it.
        what: String,
        /// The command line.
        command: String,
    },

    /// The kernel refused something.
    #[error("{what}: the kernel refuses: {source}")]
    Bpf {
        /// What was to be done, with what.
        what: String,
        /// What it said.
        source: libbpf_rs::Error,
    },

    /// The process has no trace ring, or it can not be opened.
    #[error("process {pid} has no trace ring that can be read: {why}; record with --source uprobe")]
    NoTraceRing {
        /// The process.
        pid: u32,
        /// What was found instead.
        why: String,
    },

    /// The trace ring's file is not what SPDK writes.
    #[error("{}: no trace ring of a known layout (SPDK 24.01 and before, 24.05 to 26.01, 26.05): {why}; record with --source uprobe", path.display())]
    TraceRing {
        /// The file.
        path: PathBuf,
        /// What does not hold.
        why: String,
    },

    /// The trace ring lacks tracepoints.
    #[error("{}: its SPDK has no tracepoints {lacking}: they were left out of the build; record with --source uprobe", path.display())]
    NoTracepoints {
        /// The file.
        path: PathBuf,
        /// Their names.
        lacking: String,
    },

    /// The trace ring can not be read any more.
    #[error("the trace ring can not be followed any more: {why}; what was recorded before is kept")]
    TraceRingEnded {
        /// What happened.
        why: String,
    },

    /// The trace ring's times are not this machine's.
    #[error("the trace ring's times can not be told: {why}; record with --source uprobe")]
    Ticks {
        /// What does not hold.
        why: String,
    },

    /// The target can not be told to switch its tracepoints.
    #[error(
        "the tracepoints of process {pid} can not be switched on: {why}; name its RPC socket with --rpc, or record with --source uprobe"
    )]
    TraceRpc {
        /// The process.
        pid: u32,
        /// What was tried, and what came of it.
        why: String,
    },

    /// The programs' ring buffer can not be read.
    #[error("the ring buffer of the BPF programs can not be mapped: {0}")]
    Ring(std::io::Error),
}

/// How to get the rights to run this command line.
fn rights_hint(command: &str) -> String {
    if nix::unistd::geteuid().is_root() {
        "root has not the right to here, as inside a container: run it on the machine itself, or give the container \
         CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE and the machine's PID namespace"
            .to_owned()
    } else {
        format!("run it as root (`sudo {command}`)")
    }
}

/// Names the program that was looked for.
fn program_hint(program: &Option<PathBuf>) -> String {
    program.as_ref().map_or_else(String::new, |path| format!(" from {}", path.display()))
}

/// Names the targets that were not taken for the host.
fn aside_hint(aside: &[u32]) -> String {
    let pids: Vec<String> = aside.iter().map(u32::to_string).collect();
    let (process, holds, it) = match aside {
        [] => return String::new(),
        [_] => ("process", "holds", "it"),
        _ => ("processes", "hold", "one"),
    };
    format!(
        "; {process} {} {holds} SPDK's initiator beside a target, without a connection as a host now: give a PID to \
         record {it} all the same",
        pids.join(", ")
    )
}

/// The end of a message that lists names near the one asked for.
fn hint(similar: &[String]) -> String {
    if similar.is_empty() {
        return String::new();
    }
    let names: Vec<String> = similar.iter().map(|name| format!("`{name}`")).collect();
    format!("; similar: {}", names.join(", "))
}
