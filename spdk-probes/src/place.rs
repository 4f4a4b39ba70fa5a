//! Where in a function a uprobe costs least: decodes the function's first instructions and finds one
//! that the kernel emulates instead of single-stepping.
//!
//! Works on bytes alone; it knows no files, no symbols, and attaches nothing.
//!
//! What Linux emulates at an x86-64 uprobe (arch/x86/kernel/uprobes.c): `push` of a register, `jmp`,
//! `call rel32`, conditional jumps, the one-byte nop with most prefixes, and since 6.18 the other nops.
//! `endbr64`, `push` of memory or a constant, and every other instruction is copied aside and single-stepped: two
//! traps instead of one. On an instruction with a prefix for a segment or a lock it takes no uprobe.
//!
//! One nop is turned into a call, which is cheaper still. From 6.18 on that was the one of five bytes, and the call
//! pushed its return address where a leaf function keeps values (the 128 bytes below the stack pointer, System V
//! ABI, section 3.2.2): they were overwritten. Since 7.3 it is the one of ten bytes, whose place has room to move
//! the stack pointer first; releases of the branches before may have it too, which their version does not tell. So
//! before 7.3 a five-byte nop is used only where the function can not have stored anything below its stack pointer.
//!
//! A site stands for "this function was called", so it must be passed exactly once a call: it lies on
//! the straight line from the entry, in front of or on the first branch, and no branch of the function
//! leads back to it. Jumps through tables are not followed; compilers place their targets behind the
//! jump, so none of them can reach the straight line again without a direct branch.

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Formatter, Instruction, InstructionInfoFactory, Mnemonic,
    NasmFormatter, OpAccess, OpKind, Register,
};
use serde::{Deserialize, Serialize};

/// How far from the entry a site may be, in bytes. Further in, the function has begun its work.
const WINDOW: u64 = 128;

/// A general-purpose register of x86-64, or the instruction pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Reg {
    Rax,
    Rbx,
    Rcx,
    Rdx,
    Rsi,
    Rdi,
    Rbp,
    Rsp,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
    Rip,
}

impl Reg {
    /// The registers of a function's first six integer arguments (System V ABI, section 3.2.3).
    pub const ARGUMENTS: [Reg; 6] = [Reg::Rdi, Reg::Rsi, Reg::Rdx, Reg::Rcx, Reg::R8, Reg::R9];

    /// Every register, in DWARF's numbering (System V ABI, figure 3.36); 16 is the return address.
    const DWARF: [Reg; 17] = [
        Reg::Rax,
        Reg::Rdx,
        Reg::Rcx,
        Reg::Rbx,
        Reg::Rsi,
        Reg::Rdi,
        Reg::Rbp,
        Reg::Rsp,
        Reg::R8,
        Reg::R9,
        Reg::R10,
        Reg::R11,
        Reg::R12,
        Reg::R13,
        Reg::R14,
        Reg::R15,
        Reg::Rip,
    ];

    /// The register that DWARF gives this number, or none.
    pub fn from_dwarf(number: u16) -> Option<Reg> {
        Self::DWARF.get(usize::from(number)).copied()
    }

    /// The name of the whole register, as in assembly: `rdi`, `r8`.
    pub fn name(self) -> &'static str {
        match self {
            Reg::Rax => "rax",
            Reg::Rbx => "rbx",
            Reg::Rcx => "rcx",
            Reg::Rdx => "rdx",
            Reg::Rsi => "rsi",
            Reg::Rdi => "rdi",
            Reg::Rbp => "rbp",
            Reg::Rsp => "rsp",
            Reg::R8 => "r8",
            Reg::R9 => "r9",
            Reg::R10 => "r10",
            Reg::R11 => "r11",
            Reg::R12 => "r12",
            Reg::R13 => "r13",
            Reg::R14 => "r14",
            Reg::R15 => "r15",
            Reg::Rip => "rip",
        }
    }

    fn from_iced(register: Register) -> Option<Reg> {
        Some(match register.full_register() {
            Register::RAX => Reg::Rax,
            Register::RBX => Reg::Rbx,
            Register::RCX => Reg::Rcx,
            Register::RDX => Reg::Rdx,
            Register::RSI => Reg::Rsi,
            Register::RDI => Reg::Rdi,
            Register::RBP => Reg::Rbp,
            Register::RSP => Reg::Rsp,
            Register::R8 => Reg::R8,
            Register::R9 => Reg::R9,
            Register::R10 => Reg::R10,
            Register::R11 => Reg::R11,
            Register::R12 => Reg::R12,
            Register::R13 => Reg::R13,
            Register::R14 => Reg::R14,
            Register::R15 => Reg::R15,
            _ => return None,
        })
    }
}

impl std::fmt::Display for Reg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What a uprobe at an instruction costs, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// A five-byte nop that the kernel replaces by a call (Linux 6.18 to 7.2).
    Nop5,
    /// A ten-byte nop that the kernel replaces by a call (Linux 7.3 and later).
    Nop10,
    /// The kernel carries the instruction out itself: one trap.
    Emulated,
    /// The kernel steps over a copy of the instruction: two traps.
    SingleStep,
}

impl Class {
    /// What one hit costs the probed thread, in nanoseconds: measured on Linux 6.18 in a virtual
    /// machine on an idle 2.1 GHz core. Other machines differ; the ratios hold.
    pub fn estimated_ns(self) -> u32 {
        match self {
            Class::Nop5 | Class::Nop10 => 280,
            Class::Emulated => 510,
            Class::SingleStep => 4700,
        }
    }

    /// The name that programs read.
    pub fn name(self) -> &'static str {
        match self {
            Class::Nop5 => "nop5",
            Class::Nop10 => "nop10",
            Class::Emulated => "emulated",
            Class::SingleStep => "single-step",
        }
    }
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Class::Nop5 => "five-byte nop",
            Class::Nop10 => "ten-byte nop",
            Class::Emulated => "emulated",
            Class::SingleStep => "single-stepped",
        })
    }
}

/// What a kernel does at uprobes beyond what every kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emulation {
    /// Nops of several bytes (`0f 1f ...`) are emulated.
    pub long_nops: bool,
    /// The nop that is turned into a call.
    pub optimised: Optimised,
}

/// The nop that a kernel turns into a call where a uprobe is on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimised {
    /// None.
    Nothing,
    /// That of five bytes; what the function keeps below its stack pointer may be overwritten.
    Nop5,
    /// That of ten bytes; the function's stack is left alone.
    Nop10,
}

impl Emulation {
    /// Of a kernel by its version.
    pub fn of_kernel(major: u32, minor: u32) -> Emulation {
        let version = (major, minor);
        let optimised = match version {
            _ if version >= (7, 3) => Optimised::Nop10,
            _ if version >= (6, 18) => Optimised::Nop5,
            _ => Optimised::Nothing,
        };
        Emulation { long_nops: version >= (6, 18), optimised }
    }

    /// Of the running kernel. Where its version cannot be told, what every kernel does.
    pub fn of_this_kernel() -> Emulation {
        let release = nix::sys::utsname::uname()
            .map(|name| name.release().to_string_lossy().into_owned())
            .unwrap_or_default();
        let mut numbers =
            release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
        let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        Self::of_kernel(major, minor)
    }

    /// The class of one instruction.
    fn class(self, instruction: &Instruction, bytes: &[u8]) -> Class {
        if self.refuses(bytes) {
            return Class::SingleStep;
        }
        match instruction.mnemonic() {
            // Not with a prefix other than REX.B: the kernel refuses to emulate `66 push`.
            Mnemonic::Push
                if instruction.op0_kind() == OpKind::Register
                    && matches!(bytes, [0x50..=0x57] | [0x41, 0x50..=0x57]) =>
            {
                Class::Emulated
            }
            Mnemonic::Nop => match bytes {
                // Any prefixes in front of 0x90; a REX prefix would make it an exchange.
                [prefixes @ .., 0x90] if prefixes.iter().all(|b| is_legacy_prefix(*b)) => Class::Emulated,
                NOP5 if self.optimised == Optimised::Nop5 => Class::Nop5,
                NOP10 if self.optimised == Optimised::Nop10 => Class::Nop10,
                _ if self.long_nops && is_kernel_nop(bytes) => Class::Emulated,
                _ => Class::SingleStep,
            },
            // The kernel rejects branches with an operand-size prefix.
            _ if bytes.contains(&0x66) && has_operand_size_prefix(bytes) => Class::SingleStep,
            Mnemonic::Jmp | Mnemonic::Call
                if instruction.is_jmp_short_or_near() || instruction.is_call_near() =>
            {
                Class::Emulated
            }
            _ if instruction.is_jcc_short_or_near() => Class::Emulated,
            _ => Class::SingleStep,
        }
    }

    /// Whether it takes no uprobe on this instruction: one with a prefix for a segment (but fs and gs) or a lock.
    fn refuses(self, bytes: &[u8]) -> bool {
        let mut prefixes = bytes.iter().take_while(|byte| is_legacy_prefix(**byte));
        let bad = |byte: &u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0xf0);
        prefixes.any(bad) && !(self.optimised == Optimised::Nop10 && bytes == NOP10)
    }
}

/// The kernel's own nops of five and ten bytes (arch/x86/include/asm/nops.h).
const NOP5: &[u8] = &[0x0f, 0x1f, 0x44, 0x00, 0x00];
const NOP10: &[u8] = &[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00];

fn is_legacy_prefix(byte: u8) -> bool {
    matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0x66 | 0x67 | 0xf0 | 0xf2 | 0xf3)
}

fn has_operand_size_prefix(bytes: &[u8]) -> bool {
    bytes.iter().take_while(|byte| is_legacy_prefix(**byte)).any(|byte| *byte == 0x66)
}

/// The kernel compares with its own nops (arch/x86/include/asm/nops.h), not with the instruction.
fn is_kernel_nop(bytes: &[u8]) -> bool {
    const NOP8: [u8; 8] = [0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00];
    match bytes {
        [0x0f, 0x1f, 0x00]
        | [0x0f, 0x1f, 0x40, 0x00]
        | [0x0f, 0x1f, 0x44, 0x00, 0x00]
        | [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00]
        | [0x0f, 0x1f, 0x80, 0x00, 0x00, 0x00, 0x00] => true,
        [] => false,
        _ => {
            let prefixes = bytes.len().saturating_sub(NOP8.len());
            let (prefixes, nop) = bytes.split_at(prefixes);
            nop == NOP8 && matches!(prefixes, [] | [0x66] | [0x66, 0x2e] | [0x66, 0x66, 0x2e])
        }
    }
}

/// A piece of machine code and where it belongs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Code<'a> {
    /// Address of the first byte, as the file's symbols count.
    pub(crate) vaddr: u64,
    /// The bytes.
    pub(crate) bytes: &'a [u8],
}

impl Code<'_> {
    fn contains(&self, vaddr: u64) -> bool {
        vaddr.wrapping_sub(self.vaddr) < self.bytes.len() as u64
    }

    fn decoder(&self) -> Decoder<'_> {
        Decoder::with_ip(64, self.bytes, self.vaddr, DecoderOptions::NONE)
    }

    fn slice(&self, instruction: &Instruction) -> &[u8] {
        let start = instruction.ip().wrapping_sub(self.vaddr) as usize;
        self.bytes.get(start..start.saturating_add(instruction.len())).unwrap_or_default()
    }
}

/// An instruction chosen for a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    /// Address of the instruction.
    pub(crate) vaddr: u64,
    /// The instruction: `push r15`; of a branch the mnemonic alone.
    pub(crate) instruction: String,
    /// What a probe there costs.
    pub(crate) class: Class,
    /// Why this one.
    pub(crate) why: String,
}

/// The cheapest instruction that every call of the function passes once, with the `live` registers
/// as the caller left them. `cold` are the function's parts elsewhere: their branches count too. `stops` are
/// addresses where other probes stand for something that comes later.
///
/// None where the function's bytes are no instructions.
pub(crate) fn best_spot(
    function: Code<'_>,
    cold: &[Code<'_>],
    live: &[Reg],
    stops: &[u64],
    emulation: Emulation,
) -> Option<Spot> {
    let entry = function.vaddr;
    // How far behind the entry the first instruction is that some branch leads to.
    let first_target = || {
        std::iter::once(&function)
            .chain(cold)
            .flat_map(|code| branch_targets(*code))
            .chain(stops.iter().copied())
            .map(|target| target.wrapping_sub(entry))
            .filter(|offset| *offset > 0 && *offset < function.bytes.len() as u64)
            .min()
            .unwrap_or(u64::MAX)
    };

    let mut decoder = function.decoder();
    let mut info = InstructionInfoFactory::new();
    let mut start = None;
    let mut first: Option<Spot> = None;
    let mut best: Option<Spot> = None;
    let mut limit = u64::MAX;
    let mut stored_below = false;
    let mut left_out = None;
    let mut instruction = Instruction::default();
    let mut end = "the function ends";
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            end = "the bytes are no instructions";
            break;
        }
        let vaddr = instruction.ip();
        if vaddr == entry && instruction.mnemonic() == Mnemonic::Endbr64 {
            continue;
        }
        if start.is_none() {
            start = Some(vaddr);
            limit = first_target();
        }
        let offset = vaddr.wrapping_sub(entry);
        if offset >= WINDOW {
            end = "the function is under way";
            break;
        }
        if offset >= limit {
            end = "a loop or another hook's place begins";
            break;
        }
        let class = emulation.class(&instruction, function.slice(&instruction));
        let unsafe_nop = class == Class::Nop5 && stored_below;
        if unsafe_nop {
            left_out = left_out.or(Some(offset));
        }
        stored_below |= may_store_below(&mut info, &instruction);
        let refused = emulation.refuses(function.slice(&instruction));
        let better = !unsafe_nop && !refused && best.as_ref().is_none_or(|best| class < best.class);
        if better {
            let spot = Spot { vaddr, instruction: text(&instruction), class, why: String::new() };
            if first.is_none() {
                first = Some(spot.clone());
            }
            best = Some(spot);
        }
        if best.as_ref().is_some_and(|best| matches!(best.class, Class::Nop5 | Class::Nop10))
            || instruction.flow_control() != FlowControl::Next
        {
            end = "the first branch comes";
            break;
        }
        if let Some(register) = overwritten(&mut info, &instruction, live) {
            end = match register {
                Reg::Rdi => "rdi is overwritten",
                Reg::Rsi => "rsi is overwritten",
                Reg::Rdx => "rdx is overwritten",
                Reg::Rcx => "rcx is overwritten",
                Reg::R8 => "r8 is overwritten",
                Reg::R9 => "r9 is overwritten",
                _ => "an argument is overwritten",
            };
            break;
        }
    }
    // An endbr64 alone still is an instruction of the function, dear as it is.
    let mut spot = match best {
        Some(spot) => spot,
        None => {
            let mut decoder = function.decoder();
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                return None;
            }
            Spot {
                vaddr: entry,
                instruction: text(&instruction),
                class: emulation.class(&instruction, function.slice(&instruction)),
                why: String::new(),
            }
        }
    };
    let start = start.unwrap_or(entry);
    let behind = if start == entry { "" } else { " behind endbr64" };
    spot.why = match (spot.class, spot.vaddr == start) {
        (Class::SingleStep, _) => {
            format!("entry{behind}: nothing that the kernel emulates before {end}")
        }
        (_, true) => format!("entry{behind}"),
        (class, false) => format!(
            "first {class} instruction: the one at the entry{behind}, `{}`, would be single-stepped",
            first.map_or_else(String::new, |first| first.instruction)
        ),
    };
    if let Some(offset) = left_out {
        spot.why += &format!(
            "; not the five-byte nop at +{offset}, where this kernel's probe may overwrite what the function keeps below its stack pointer"
        );
    }
    Some(spot)
}

/// The first instructions of a function, and what a probe on each costs.
pub(crate) fn opening(code: Code<'_>, most: usize, emulation: Emulation) -> Vec<(String, Class)> {
    let mut decoder = code.decoder();
    let mut instruction = Instruction::default();
    let mut found = Vec::new();
    while found.len() < most && decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            break;
        }
        found.push((text(&instruction), emulation.class(&instruction, code.slice(&instruction))));
    }
    found
}

/// Whether an instruction may have put something below the stack pointer: it writes to memory, and not plainly
/// above. A push moves the pointer first.
fn may_store_below(info: &mut InstructionInfoFactory, instruction: &Instruction) -> bool {
    instruction.mnemonic() != Mnemonic::Push
        && info.info(instruction).used_memory().iter().any(|memory| {
            let above = memory.base() == Register::RSP
                && memory.index() == Register::None
                && memory.displacement().cast_signed() >= 0;
            !above && !matches!(memory.access(), OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess)
        })
}

/// The live register that the instruction changes, if any.
fn overwritten(info: &mut InstructionInfoFactory, instruction: &Instruction, live: &[Reg]) -> Option<Reg> {
    info.info(instruction)
        .used_registers()
        .iter()
        .filter(|used| {
            matches!(
                used.access(),
                OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
            )
        })
        .filter_map(|used| Reg::from_iced(used.register()))
        .find(|register| live.contains(register))
}

/// Targets of all direct branches in the code, calls left out: a call comes back by itself.
fn branch_targets(code: Code<'_>) -> Vec<u64> {
    let mut targets = Vec::new();
    let mut decoder = code.decoder();
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if !instruction.is_invalid()
            && matches!(
                instruction.flow_control(),
                FlowControl::UnconditionalBranch
                    | FlowControl::ConditionalBranch
                    | FlowControl::XbeginXabortXend
            )
            && is_near_branch(&instruction)
        {
            targets.push(instruction.near_branch_target());
        }
    }
    targets
}

fn is_near_branch(instruction: &Instruction) -> bool {
    matches!(instruction.op0_kind(), OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64)
}

/// Where an instruction leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) at: u64,
    /// The address behind it.
    pub(crate) end: u64,
    /// What it jumps to, where it says so itself; calls come back and do not count.
    pub(crate) target: Option<u64>,
    pub(crate) falls_through: bool,
    /// It jumps to where a table or register says.
    pub(crate) table: bool,
    /// It fills up a gap.
    pub(crate) padding: bool,
    /// It does something that can be seen from outside the function: it branches, calls, or writes to memory other
    /// than the function's own on the stack.
    pub(crate) effect: bool,
}

/// The instructions of all pieces, in order of address.
pub(crate) fn flows(pieces: &[Code<'_>]) -> Vec<Flow> {
    let mut flows = Vec::new();
    let mut info = InstructionInfoFactory::new();
    let mut instruction = Instruction::default();
    for code in pieces {
        let mut decoder = code.decoder();
        while decoder.can_decode() {
            decoder.decode_out(&mut instruction);
            if instruction.is_invalid() {
                continue;
            }
            let control = instruction.flow_control();
            let target = matches!(
                control,
                FlowControl::UnconditionalBranch
                    | FlowControl::ConditionalBranch
                    | FlowControl::XbeginXabortXend
            ) && is_near_branch(&instruction);
            flows.push(Flow {
                at: instruction.ip(),
                end: instruction.next_ip(),
                target: target.then(|| instruction.near_branch_target()),
                falls_through: !matches!(
                    control,
                    FlowControl::UnconditionalBranch
                        | FlowControl::IndirectBranch
                        | FlowControl::Return
                        | FlowControl::Exception
                ),
                table: control == FlowControl::IndirectBranch && !instruction.is_ip_rel_memory_operand(),
                padding: matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3),
                effect: control != FlowControl::Next
                    || info.info(&instruction).used_memory().iter().any(|memory| {
                        memory.base() != Register::RSP
                            && !matches!(
                                memory.access(),
                                OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
                            )
                    }),
            });
        }
    }
    flows.sort_by_key(|flow| flow.at);
    flows.dedup_by_key(|flow| flow.at);
    flows
}

/// The instructions that are passed exactly as often as the one at `start`: from there to the first branch, and
/// not beyond an instruction that some branch leads to, nor one of `stops`. Each with what a probe on it costs; the cheapest and
/// nearest is the best.
pub(crate) fn straight_line(
    pieces: &[Code<'_>],
    start: u64,
    stops: &[u64],
    emulation: Emulation,
) -> Vec<Spot> {
    let Some(code) = pieces.iter().find(|code| code.contains(start)) else {
        return Vec::new();
    };
    let behind = usize::try_from(start.wrapping_sub(code.vaddr)).unwrap_or(usize::MAX);
    let here = Code { vaddr: start, bytes: code.bytes.get(behind..).unwrap_or_default() };
    let limit = pieces
        .iter()
        .flat_map(|code| branch_targets(*code))
        .chain(stops.iter().copied())
        .map(|target| target.wrapping_sub(start))
        .filter(|offset| *offset > 0)
        .min()
        .unwrap_or(u64::MAX)
        .min(WINDOW);
    let mut decoder = here.decoder();
    let mut instruction = Instruction::default();
    let mut spots = Vec::new();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() || instruction.ip().wrapping_sub(start) >= limit {
            break;
        }
        let class = emulation.class(&instruction, here.slice(&instruction));
        // What the function has stored before is not known here.
        if class != Class::Nop5 && !emulation.refuses(here.slice(&instruction)) {
            let text = text(&instruction);
            spots.push(Spot { vaddr: instruction.ip(), instruction: text, class, why: String::new() });
        }
        if instruction.flow_control() != FlowControl::Next {
            break;
        }
    }
    spots
}

/// A call, or a jump that ends the function by calling another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallSite {
    /// Address of the instruction.
    pub(crate) vaddr: u64,
    /// `call` or `jmp`.
    pub(crate) instruction: String,
    /// What a probe there costs.
    pub(crate) class: Class,
    /// Where it goes.
    pub(crate) to: Destination,
}

/// Where a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// To this address.
    Code(u64),
    /// To the address that is stored at this one.
    Slot(u64),
}

/// Every direct call out of a piece of code, and every one through a fixed memory slot.
///
/// `emulation` tells what a probe on it costs.
pub(crate) fn calls(code: Code<'_>, emulation: Emulation) -> Vec<CallSite> {
    let mut calls = Vec::new();
    let mut decoder = code.decoder();
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            continue;
        }
        let to = match instruction.flow_control() {
            FlowControl::Call | FlowControl::UnconditionalBranch if is_near_branch(&instruction) => {
                Destination::Code(instruction.near_branch_target())
            }
            FlowControl::IndirectCall | FlowControl::IndirectBranch
                if instruction.is_ip_rel_memory_operand() =>
            {
                Destination::Slot(instruction.ip_rel_memory_address())
            }
            _ => continue,
        };
        // A jump inside the function is no call.
        if instruction.flow_control() == FlowControl::UnconditionalBranch
            && matches!(to, Destination::Code(target) if code.contains(target))
        {
            continue;
        }
        calls.push(CallSite {
            vaddr: instruction.ip(),
            instruction: text(&instruction),
            class: emulation.class(&instruction, code.slice(&instruction)),
            to,
        });
    }
    calls
}

/// The slot that a stub of the procedure linkage table jumps through: `jmp *slot(%rip)`, with or
/// without an `endbr64` or a `bnd` in front.
pub(crate) fn stub_slot(stub: Code<'_>) -> Option<u64> {
    let mut decoder = stub.decoder();
    for _ in 0..2 {
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            return None;
        }
        if instruction.mnemonic() == Mnemonic::Endbr64 {
            continue;
        }
        return (instruction.flow_control() == FlowControl::IndirectBranch
            && instruction.is_ip_rel_memory_operand())
        .then(|| instruction.ip_rel_memory_address());
    }
    None
}

/// One instruction as text; of a branch the mnemonic, since a bare target says nothing.
fn text(instruction: &Instruction) -> String {
    let mut formatter = NasmFormatter::new();
    let mut text = String::new();
    if instruction.op_count() > 0 && is_near_branch(instruction) {
        formatter.format_mnemonic(instruction, &mut text);
    } else {
        let options = formatter.options_mut();
        options.set_hex_prefix("0x");
        options.set_hex_suffix("");
        formatter.format(instruction, &mut text);
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OLD: Emulation = Emulation { long_nops: false, optimised: Optimised::Nothing };
    const NEW: Emulation = Emulation { long_nops: true, optimised: Optimised::Nop5 };
    const NEWER: Emulation = Emulation { long_nops: true, optimised: Optimised::Nop10 };

    fn class(bytes: &[u8], emulation: Emulation) -> Class {
        let code = Code { vaddr: 0x1000, bytes };
        let instruction = code.decoder().decode();
        assert_eq!(instruction.len(), bytes.len(), "{bytes:02x?}");
        emulation.class(&instruction, bytes)
    }

    #[test]
    fn every_kernel_emulates_pushes_branches_and_the_short_nop() {
        let emulated: [&[u8]; 12] = [
            &[0x50],                   // push rax
            &[0x57],                   // push rdi
            &[0x41, 0x57],             // push r15
            &[0x90],                   // nop
            &[0x66, 0x90],             // nop with a prefix
            &[0xeb, 0x10],             // jmp short
            &[0xe9, 0, 1, 0, 0],       // jmp
            &[0xe8, 0, 1, 0, 0],       // call
            &[0x74, 0x10],             // je short
            &[0x0f, 0x85, 0, 1, 0, 0], // jne
            &[0x7f, 0x80],             // jg back
            &[0x72, 0x00],             // jb to the next
        ];
        for bytes in emulated {
            assert_eq!(class(bytes, OLD), Class::Emulated, "{bytes:02x?}");
            assert_eq!(class(bytes, NEW), Class::Emulated, "{bytes:02x?}");
        }
        let stepped: [&[u8]; 16] = [
            &[0xf3, 0x0f, 0x1e, 0xfa], // endbr64
            &[0x6a, 0x01],             // push 1
            &[0x68, 0, 0, 1, 0],       // push 0x10000
            &[0xff, 0x37],             // push [rdi]
            &[0x66, 0x50],             // push ax
            &[0x48, 0x50],             // push rax with a needless REX.W
            &[0x48, 0x89, 0xf8],       // mov rax, rdi
            &[0x31, 0xc0],             // xor eax, eax
            &[0x48, 0x83, 0xec, 0x08], // sub rsp, 8
            &[0xc3],                   // ret
            &[0x5b],                   // pop rbx
            &[0xff, 0xd0],             // call rax
            &[0xff, 0x15, 0, 0, 0, 0], // call [rip]
            &[0xe3, 0x10],             // jrcxz
            &[0xe2, 0x10],             // loop
            &[0x41, 0x90],             // xchg r8, rax
        ];
        for bytes in stepped {
            assert_eq!(class(bytes, OLD), Class::SingleStep, "{bytes:02x?}");
            assert_eq!(class(bytes, NEW), Class::SingleStep, "{bytes:02x?}");
        }
    }

    #[test]
    fn long_nops_are_for_new_kernels_and_only_the_kernels_own() {
        let nops: [&[u8]; 6] = [
            &[0x0f, 0x1f, 0x00],
            &[0x0f, 0x1f, 0x40, 0x00],
            &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
            &[0x0f, 0x1f, 0x80, 0, 0, 0, 0],
            &[0x0f, 0x1f, 0x84, 0x00, 0, 0, 0, 0],
            &[0x66, 0x0f, 0x1f, 0x84, 0x00, 0, 0, 0, 0],
        ];
        for bytes in nops {
            assert_eq!(class(bytes, OLD), Class::SingleStep, "{bytes:02x?}");
            assert_eq!(class(bytes, NEW), Class::Emulated, "{bytes:02x?}");
        }
        let five = [0x0f, 0x1f, 0x44, 0x00, 0x00];
        assert_eq!((class(&five, OLD), class(&five, NEW)), (Class::SingleStep, Class::Nop5));
        assert_eq!(class(&five, NEWER), Class::Emulated);
        assert_eq!(class(NOP10, NEWER), Class::Nop10);
        // The same length and meaning, but not what the kernel compares with.
        assert_eq!(class(&[0x0f, 0x1f, 0x44, 0x00, 0x01], NEW), Class::SingleStep);
        assert_eq!(class(&[0x0f, 0x1f, 0x03], NEW), Class::SingleStep);
    }

    #[test]
    fn what_a_kernel_does_at_nops_is_known_by_its_version() {
        let of = |major, minor| {
            let Emulation { long_nops, optimised } = Emulation::of_kernel(major, minor);
            (long_nops, optimised)
        };
        for (major, minor) in [(5, 10), (6, 1), (6, 17)] {
            assert_eq!(of(major, minor), (false, Optimised::Nothing));
        }
        for (major, minor) in [(6, 18), (6, 19), (7, 0), (7, 2)] {
            assert_eq!(of(major, minor), (true, Optimised::Nop5));
        }
        for (major, minor) in [(7, 3), (7, 10), (8, 0)] {
            assert_eq!(of(major, minor), (true, Optimised::Nop10));
        }
    }

    #[test]
    fn a_probe_is_not_put_where_the_kernel_takes_none() {
        let refused: [&[u8]; 4] = [&[0x2e, 0x74, 0x10], &[0x3e, 0x90], NOP10, &[0xf0, 0x48, 0xff, 0x07]];
        for bytes in refused {
            assert!(OLD.refuses(bytes) && NEW.refuses(bytes), "{bytes:02x?}");
        }
        assert!(!NEWER.refuses(NOP10) && NEWER.refuses(&[0x2e, 0x74, 0x10]));
        // nop10; mov rax, rdi; push rbx; ret
        let bytes = [NOP10, &[0x48, 0x89, 0xf8, 0x53, 0xc3]].concat();
        let function = Code { vaddr: 0x1000, bytes: &bytes };
        let at = |emulation| best_spot(function, &[], &[], &[], emulation).unwrap().vaddr;
        assert_eq!((at(OLD), at(NEW), at(NEWER)), (0x100d, 0x100d, 0x1000));
        assert_eq!(straight_line(&[function], 0x1000, &[], NEW).len(), 3);
        assert_eq!(straight_line(&[function], 0x1000, &[], NEWER).len(), 4);
    }

    #[test]
    fn a_five_byte_nop_is_used_only_where_nothing_is_below_the_stack_pointer() {
        let with = |before: &[u8], emulation| {
            let bytes = [before, NOP5, &[0x53, 0x5b, 0xc3]].concat();
            let spot = best_spot(Code { vaddr: 0x1000, bytes: &bytes }, &[], &[], &[], emulation).unwrap();
            (spot.vaddr - 0x1000, spot.class, spot.why)
        };
        // At the entry, behind endbr64, a move, a read, a push, and a store above the pointer.
        let safe: [&[u8]; 6] = [
            &[],
            &[0xf3, 0x0f, 0x1e, 0xfa],
            &[0x48, 0x89, 0xf8],
            &[0x48, 0x8b, 0x44, 0x24, 0xf8],
            &[0x48, 0x83, 0xec, 0x18],
            &[0x48, 0x89, 0x44, 0x24, 0x08],
        ];
        for before in safe {
            let (at, class, why) = with(before, NEW);
            assert_eq!((at, class), (before.len() as u64, Class::Nop5), "{before:02x?}: {why}");
            assert!(!why.contains("below"), "{why}");
        }
        // Behind a store below it, or by a pointer that may lead there.
        let unsafe_: [&[u8]; 3] =
            [&[0x48, 0x89, 0x44, 0x24, 0xf8], &[0x48, 0x89, 0x07], &[0x48, 0x89, 0x44, 0x0c, 0x08]];
        for before in unsafe_ {
            let (at, class, why) = with(before, NEW);
            assert_eq!((at, class), (before.len() as u64 + 5, Class::Emulated), "{before:02x?}");
            assert!(why.contains(&format!("not the five-byte nop at +{}", before.len())), "{why}");
            // A kernel that leaves the stack alone may have it.
            assert_eq!(with(before, NEWER).0, before.len() as u64);
        }
        // Inside of a function it is not known what was stored before.
        let bytes = [NOP5, &[0x53, 0xc3]].concat();
        let function = Code { vaddr: 0x1000, bytes: &bytes };
        let classes = |emulation| -> Vec<Class> {
            straight_line(&[function], 0x1000, &[], emulation).iter().map(|spot| spot.class).collect()
        };
        assert_eq!(classes(NEW), [Class::Emulated, Class::SingleStep]);
        assert_eq!(classes(NEWER), [Class::Emulated, Class::Emulated, Class::SingleStep]);
    }

    fn spot(bytes: &[u8], live: &[Reg]) -> (u64, Class) {
        let found = best_spot(Code { vaddr: 0x1000, bytes }, &[], live, &[], OLD);
        found.map_or((u64::MAX, Class::SingleStep), |spot| (spot.vaddr - 0x1000, spot.class))
    }

    #[test]
    fn the_cheapest_instruction_is_found_while_arguments_live() {
        // endbr64; push rbp: behind the endbr64.
        assert_eq!(spot(&[0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0xc3], &[Reg::Rdi]), (4, Class::Emulated));
        // mov rax, rdi; push rbx; ret
        assert_eq!(spot(&[0x48, 0x89, 0xf8, 0x53, 0xc3], &[Reg::Rdi]), (3, Class::Emulated));
        // mov edi, esi; push rbx; ret: rdi is gone, even by its lower half.
        assert_eq!(spot(&[0x89, 0xf7, 0x53, 0xc3], &[Reg::Rdi]), (0, Class::SingleStep));
        assert_eq!(spot(&[0x89, 0xf7, 0x53, 0xc3], &[Reg::Rsi]), (2, Class::Emulated));
        // test rdi, rdi; je +1; nop; ret: the branch itself is passed by all calls, the nop behind is not.
        assert_eq!(spot(&[0x48, 0x85, 0xff, 0x74, 0x01, 0x90, 0xc3], &[Reg::Rdi]), (3, Class::Emulated));
        // xor eax, eax; ret; push rbx: what follows the return belongs to others.
        assert_eq!(spot(&[0x31, 0xc0, 0xc3, 0x53], &[]), (0, Class::SingleStep));
        // mov rax, rdi; push rbx; pop rbx; jmp to the push: it would be counted more than once.
        assert_eq!(spot(&[0x48, 0x89, 0xf8, 0x53, 0x5b, 0xeb, 0xfc], &[]), (0, Class::SingleStep));
        // endbr64; push rbx; pop rbx; jmp to the push: only the endbr64 is passed once.
        assert_eq!(spot(&[0xf3, 0x0f, 0x1e, 0xfa, 0x53, 0x5b, 0xeb, 0xfc], &[]), (0, Class::SingleStep));
        // Nothing but endbr64.
        assert_eq!(spot(&[0xf3, 0x0f, 0x1e, 0xfa], &[]), (0, Class::SingleStep));
        assert_eq!(best_spot(Code { vaddr: 0, bytes: &[] }, &[], &[], &[], OLD), None);
        assert_eq!(best_spot(Code { vaddr: 0, bytes: &[0x06] }, &[], &[], &[], OLD), None);
    }

    #[test]
    fn a_cold_part_that_jumps_back_counts() {
        // mov rax, rdi; push rbx; ret, and elsewhere a jump to the push.
        let function = Code { vaddr: 0x1000, bytes: &[0x48, 0x89, 0xf8, 0x53, 0xc3] };
        let cold = Code { vaddr: 0x2000, bytes: &[0xe9, 0xfe, 0xef, 0xff, 0xff] };
        assert_eq!(branch_targets(cold), [0x1003]);
        let found = best_spot(function, &[cold], &[], &[], OLD).unwrap();
        assert_eq!((found.vaddr, found.class), (0x1000, Class::SingleStep));
    }

    #[test]
    fn a_probe_does_not_lie_behind_another_hook() {
        // mov rax,[rdi]; push rbx; ...: the push is cheap, but another function begins there.
        let bytes = [0x48, 0x8b, 0x07, 0x53, 0x5b, 0xc3];
        let function = Code { vaddr: 0x1000, bytes: &bytes };
        assert_eq!(best_spot(function, &[], &[], &[], OLD).unwrap().vaddr, 0x1003);
        assert_eq!(best_spot(function, &[], &[], &[0x1003], OLD).unwrap().vaddr, 0x1000);
        assert_eq!(best_spot(function, &[], &[], &[0x1000, 0x2000], OLD).unwrap().vaddr, 0x1003);
        let line = |stops: &[u64]| straight_line(&[function], 0x1000, stops, OLD).len();
        assert_eq!((line(&[]), line(&[0x1003]), line(&[0x1000])), (4, 1, 4));
    }

    #[test]
    fn stubs_are_told_from_code() {
        let at = |bytes: &'static [u8]| Code { vaddr: 0x1000, bytes };
        assert_eq!(stub_slot(at(&[0xff, 0x25, 0x10, 0, 0, 0])), Some(0x1016));
        assert_eq!(stub_slot(at(&[0xf3, 0x0f, 0x1e, 0xfa, 0xff, 0x25, 0x10, 0, 0, 0])), Some(0x101a));
        assert_eq!(stub_slot(at(&[0xf3, 0x0f, 0x1e, 0xfa, 0xf2, 0xff, 0x25, 0x10, 0, 0, 0])), Some(0x101b));
        assert_eq!(stub_slot(at(&[0x55, 0xff, 0x25, 0x10, 0, 0, 0])), None);
        assert_eq!(stub_slot(at(&[0xff, 0xe0])), None);
        assert_eq!(stub_slot(at(&[])), None);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_spot_inside_or_none(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
            vaddr in prop_oneof![Just(0_u64), Just(u64::MAX - 100), any::<u64>()],
            live in prop::sample::subsequence(&Reg::ARGUMENTS[..], 0..6),
            minor in 0u32..30,
        ) {
            let code = Code { vaddr, bytes: &bytes };
            let emulation = Emulation::of_kernel(6 + minor / 20, minor % 20);
            if let Some(spot) = best_spot(code, &[code], &live, &[], emulation) {
                let offset = spot.vaddr.wrapping_sub(vaddr);
                prop_assert!(offset < WINDOW && offset < bytes.len() as u64);
                prop_assert!(!spot.instruction.is_empty() && !spot.why.is_empty());
                // Never dearer than the entry, and elsewhere only where it is cheaper or the entry takes none.
                let entry = code.decoder().decode();
                let refused = emulation.refuses(code.slice(&entry));
                prop_assert!(refused || offset == 0 || spot.class < Class::SingleStep || bytes.starts_with(&[0xf3, 0x0f, 0x1e, 0xfa]));
            }
            for call in calls(code, emulation) {
                prop_assert!(code.contains(call.vaddr));
            }
            stub_slot(code);
        }
    }
}
