//! Gathers what decides which hooks a kernel offers: its type information, symbols, modules, lockdown and
//! this process's capabilities. It draws no conclusions; [`crate::survey`] does.

use crate::btf::{self, Name};
use crate::error::Error;
use crate::ladder;
use crate::trial;
use run_format::{Side, Transport};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A module whose types and functions matter to a side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Module {
    /// As `/sys/module` has it.
    pub(crate) name: &'static str,
    /// The transport that it is the driver of.
    pub(crate) transport: Option<Transport>,
    /// A function that is there when the module is built in.
    pub(crate) function: &'static str,
    /// The structures that the programs read and that the module has, without which nothing of it can be recorded.
    pub(crate) structs: &'static [&'static str],
}

impl Module {
    /// As `modprobe` has it.
    pub(crate) fn command(self) -> String {
        self.name.replace('_', "-")
    }
}

const HOST: &[Module] = &[
    Module { name: "nvme_core", transport: None, function: "nvme_setup_cmd", structs: &["nvme_request"] },
    Module { name: "nvme_fabrics", transport: None, function: "nvmf_connect_io_queue", structs: &[] },
    Module {
        name: "nvme_tcp",
        transport: Some(Transport::Tcp),
        function: "nvme_tcp_queue_rq",
        structs: &["nvme_tcp_request"],
    },
    Module {
        name: "nvme_rdma",
        transport: Some(Transport::Rdma),
        function: "nvme_rdma_queue_rq",
        structs: &["nvme_rdma_request"],
    },
];

const TARGET: &[Module] = &[
    Module { name: "nvmet", transport: None, function: "nvmet_req_init", structs: &["nvmet_req"] },
    Module {
        name: "nvmet_tcp",
        transport: Some(Transport::Tcp),
        function: "nvmet_tcp_queue_response",
        structs: &["nvmet_tcp_cmd"],
    },
    Module {
        name: "nvmet_rdma",
        transport: Some(Transport::Rdma),
        function: "nvmet_rdma_queue_response",
        structs: &["nvmet_rdma_rsp"],
    },
];

/// A side's modules, in the order in which they build on one another.
pub(crate) const fn modules(side: Side) -> &'static [Module] {
    match side {
        Side::Host => HOST,
        Side::Target => TARGET,
    }
}

/// The drivers among a side's modules.
pub(crate) fn drivers(side: Side) -> impl Iterator<Item = (Transport, Module)> {
    modules(side).iter().filter_map(|module| Some((module.transport?, *module)))
}

/// Structures of the kernel proper that the programs of both sides read.
pub(crate) const STRUCTS: &[&str] = &["request"];

/// Symbols whose address the programs are told: the host drivers' operations for I/O queues, which tell their
/// commands from other drivers', and the functions that end the target's bios, which tell whose they are.
const ADDRESSES: &[&str] = &["nvme_tcp_mq_ops", "nvme_rdma_mq_ops", "nvmet_bio_done", "bio_chain_endio"];

pub(crate) const CAPABILITIES_TEXT: &str = "CAP_BPF and CAP_PERFMON (programs that read the kernel) and CAP_SYS_ADMIN (the modules' type information)";
const CAPABILITIES: &[(u32, &str)] = &[(39, "CAP_BPF"), (38, "CAP_PERFMON"), (21, "CAP_SYS_ADMIN")];

/// What a kernel has, as far as the ladders ask.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// The side that is asked about.
    pub(crate) side: Side,
    /// `uname -r`.
    pub(crate) release: String,
    /// The side's modules that are there, loaded or built in with a name of their own.
    pub(crate) modules: BTreeSet<String>,
    /// Where type information was found: `vmlinux` and modules.
    pub(crate) typed: BTreeSet<String>,
    /// Structures of [`STRUCTS`] and the side's modules that the type information has.
    pub(crate) structs: BTreeSet<String>,
    /// Functions with type information.
    pub(crate) functions: BTreeSet<String>,
    /// Tracepoints with type information.
    pub(crate) tracepoints: BTreeSet<String>,
    /// Tracepoints that tracefs lists; `None` when it can not be read.
    pub(crate) events: Option<BTreeSet<String>>,
    /// Functions that ftrace can hook; `None` when it does not tell.
    pub(crate) traceable: Option<BTreeSet<String>>,
    /// The bit of a bio's flags that says that block_bio_queue has told of it.
    pub(crate) bio_told: Option<u32>,
    /// Symbols, with their suffixes, and their addresses (0 when hidden).
    pub(crate) symbols: BTreeMap<String, u64>,
    /// Whether the kernel has kprobes.
    pub(crate) kprobes: bool,
    /// Why the kernel refuses fentry and fexit programs; none where it takes them, or where it was not asked.
    pub(crate) no_fentry: Option<String>,
    /// Whether the kernel may stop a task inside it to run another: then it skips hits of those programs that
    /// may not run twice on a CPU.
    pub(crate) preemptible: bool,
    /// Whether lockdown keeps programs from reading kernel memory.
    pub(crate) confidential: bool,
    /// Capabilities that this process lacks.
    pub(crate) missing: Vec<&'static str>,
}

impl Facts {
    /// Nothing.
    pub(crate) fn none(side: Side) -> Facts {
        Facts {
            side,
            release: String::new(),
            modules: BTreeSet::new(),
            typed: BTreeSet::new(),
            structs: BTreeSet::new(),
            functions: BTreeSet::new(),
            tracepoints: BTreeSet::new(),
            events: None,
            traceable: None,
            bio_told: None,
            symbols: BTreeMap::new(),
            kprobes: false,
            no_fentry: None,
            preemptible: false,
            confidential: false,
            missing: Vec::new(),
        }
    }

    /// Whether a module is there, loaded or built in.
    pub(crate) fn has(&self, module: Module) -> bool {
        self.modules.contains(module.name) || self.symbols.contains_key(module.function)
    }

    /// The transports whose drivers are there.
    pub(crate) fn transports(&self) -> Vec<Transport> {
        drivers(self.side).filter(|(_, module)| self.has(*module)).map(|(transport, _)| transport).collect()
    }

    /// A symbol's address; 0 when it is hidden or not there.
    pub(crate) fn address(&self, symbol: &str) -> u64 {
        self.symbols.get(symbol).copied().unwrap_or(0)
    }

    /// Reads them from the running kernel.
    pub(crate) fn gather(side: Side) -> Result<Facts, Error> {
        let wanted = Wanted::new(side);
        let mut facts = Facts {
            release: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            missing: missing_capabilities(&read("/proc/self/status")?),
            preemptible: is_preemptible(
                fs::read_to_string("/sys/kernel/debug/sched/preempt").ok().as_deref(),
                &read("/proc/sys/kernel/version")?,
            ),
            confidential: fs::read_to_string("/sys/kernel/security/lockdown")
                .is_ok_and(|text| is_confidential(&text)),
            ..Facts::none(side)
        };
        facts.read_symbols(&read("/proc/kallsyms")?, &wanted);
        let loaded = modules(side).iter().map(|module| module.name);
        let loaded = loaded.filter(|name| Path::new("/sys/module").join(name).exists());
        facts.modules.extend(loaded.map(str::to_owned));
        facts.read_types(&wanted)?;
        for root in ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"] {
            let root = Path::new(root);
            let Ok(list) = fs::read_to_string(root.join("available_filter_functions")) else { continue };
            facts.traceable = Some(traceable(&list, &wanted));
            facts.events = fs::read_to_string(root.join("available_events")).ok().map(|text| {
                text.lines()
                    .filter_map(|line| line.split_once(':'))
                    .map(|(_, name)| name.to_owned())
                    .collect()
            });
            break;
        }
        // Who lacks the rights is told so, and not that the kernel refuses.
        if facts.missing.is_empty() {
            facts.no_fentry = trial::fentry();
        }
        Ok(facts)
    }

    fn read_types(&mut self, wanted: &Wanted) -> Result<(), Error> {
        let mut base = 0;
        for name in std::iter::once("vmlinux").chain(modules(self.side).iter().map(|module| module.name)) {
            let path = format!("/sys/kernel/btf/{name}");
            let blob = match fs::read(&path) {
                Ok(blob) => blob,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    if name == "vmlinux" {
                        return Ok(());
                    }
                    continue;
                }
                Err(error) => return Err(Error::File { path, why: error.to_string() }),
            };
            let strings = self.add_types(&blob, base, wanted).map_err(|why| Error::Types { path, why })?;
            if name == "vmlinux" {
                base = strings;
            }
            self.typed.insert(name.to_owned());
        }
        Ok(())
    }

    /// Takes in one blob; returns the length of its strings.
    pub(crate) fn add_types(&mut self, blob: &[u8], base: u32, wanted: &Wanted) -> Result<u32, &'static str> {
        btf::names(blob, base, &wanted.beginnings, |name| match name {
            Name::Function(name) if wanted.names.contains(name) => {
                self.functions.insert(name.to_owned());
            }
            Name::Typedef(name) => {
                if let Some(name) = name.strip_prefix(TRACEPOINT).filter(|name| wanted.names.contains(name)) {
                    self.tracepoints.insert(name.to_owned());
                }
            }
            Name::Struct(name) if wanted.structs.contains(name) => {
                self.structs.insert(name.to_owned());
            }
            Name::Enumerator(BIO_TOLD, value) => self.bio_told = Some(value),
            _ => {}
        })
    }

    /// Takes in `/proc/kallsyms`: `address type name [module]`.
    pub(crate) fn read_symbols(&mut self, text: &str, wanted: &Wanted) {
        for line in text.lines() {
            // Most of some hundred thousand lines go here: the address, a space, the type, a space, the name.
            let Some(space) = line.find(' ') else { continue };
            let Some(rest) = line.get(space + 3..) else { continue };
            if !wanted.may_be(rest) {
                continue;
            }
            let name = rest.split_ascii_whitespace().next().unwrap_or(rest);
            // A compiler's suffix (.isra.0, .constprop.0, .part.0, .cold) hides the plain name.
            let plain = name.split('.').next().unwrap_or(name);
            if wanted.names.contains(plain) || ADDRESSES.contains(&plain) {
                self.symbols.insert(name.to_owned(), u64::from_str_radix(&line[..space], 16).unwrap_or(0));
            } else if plain == KPROBES {
                self.kprobes = true;
            }
        }
    }
}

/// The names that are looked for in long lists.
pub(crate) struct Wanted {
    names: BTreeSet<&'static str>,
    structs: BTreeSet<&'static str>,
    /// How all of them, and what else is looked for, begin.
    beginnings: Vec<[u8; btf::BEGINNING]>,
}

impl Wanted {
    pub(crate) fn new(side: Side) -> Wanted {
        let mut names = ladder::names(side);
        names.extend(modules(side).iter().map(|module| module.function));
        let structs: BTreeSet<&str> =
            STRUCTS.iter().chain(modules(side).iter().flat_map(|module| module.structs)).copied().collect();
        let others =
            structs.iter().copied().chain(ADDRESSES.iter().copied()).chain([KPROBES, TRACEPOINT, BIO_TOLD]);
        let beginnings: BTreeSet<[u8; btf::BEGINNING]> = names
            .iter()
            .copied()
            .chain(others)
            .filter_map(|name| name.as_bytes().first_chunk().copied())
            .collect();
        Wanted { names, structs, beginnings: beginnings.into_iter().collect() }
    }

    /// Whether a text may begin with one of them.
    fn may_be(&self, text: &str) -> bool {
        text.as_bytes().first_chunk().is_some_and(|begins| self.beginnings.contains(begins))
    }
}

/// The enumerator of [`Facts::bio_told`]; its `enum` has no name, so that no program can ask for it.
const BIO_TOLD: &str = "BIO_TRACE_COMPLETION";
/// A function of every kernel with kprobes.
const KPROBES: &str = "register_kprobe";
/// How the type of a tracepoint's programs is called.
const TRACEPOINT: &str = "btf_trace_";

fn read(path: &str) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|error| Error::File { path: path.to_owned(), why: error.to_string() })
}

/// From `/proc/self/status`.
fn missing_capabilities(status: &str) -> Vec<&'static str> {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    CAPABILITIES.iter().filter(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| *name).collect()
}

/// From `/sys/kernel/security/lockdown`: `none integrity [confidentiality]`.
fn is_confidential(text: &str) -> bool {
    text.contains("[confidentiality]")
}

/// From `/sys/kernel/debug/sched/preempt`, where the kind of preemption that is in force stands in parentheses
/// (`none (voluntary) full`), or else from the kernel's version (`#1 SMP PREEMPT_DYNAMIC Debian 6.12.30-1`).
fn is_preemptible(kinds: Option<&str>, version: &str) -> bool {
    let in_force = kinds.and_then(|kinds| kinds.split_once('(')?.1.split_once(')')).map(|(kind, _)| kind);
    match in_force {
        Some(kind) => !matches!(kind, "none" | "voluntary"),
        // It may be: nothing is lost by taking it for so.
        None => version.split_ascii_whitespace().any(|word| word.starts_with("PREEMPT")),
    }
}

/// From `available_filter_functions`: `name [module]`.
fn traceable(list: &str, wanted: &Wanted) -> BTreeSet<String> {
    list.lines()
        .filter(|line| wanted.may_be(line))
        .filter_map(|line| line.split_ascii_whitespace().next())
        .filter(|name| wanted.names.contains(name))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_keep_their_suffix_and_address() {
        let mut facts = Facts::none(Side::Host);
        let text = "ffffffff81000000 T register_kprobe\n\
                    ffffffffc0a01230 t nvme_tcp_queue_rq\t[nvme_tcp]\n\
                    ffffffffc0a01240 t nvme_tcp_setup_h2c_data_pdu.isra.0 [nvme_tcp]\n\
                    ffffffffc0a09000 d nvme_tcp_mq_ops [nvme_tcp]\n\
                    not a line\n\n\
                    ffffffff81000010 T something_else\n";
        facts.read_symbols(text, &Wanted::new(Side::Host));
        assert!(facts.kprobes);
        let names: Vec<&str> = facts.symbols.keys().map(String::as_str).collect();
        assert_eq!(names, ["nvme_tcp_mq_ops", "nvme_tcp_queue_rq", "nvme_tcp_setup_h2c_data_pdu.isra.0"]);
        assert_eq!(facts.symbols["nvme_tcp_mq_ops"], 0xffff_ffff_c0a0_9000);
    }

    #[test]
    fn capabilities_are_told_by_name() {
        assert_eq!(missing_capabilities("CapEff:\t000001ffffffffff\n"), Vec::<&str>::new());
        assert_eq!(missing_capabilities("CapEff:\t0000000000200000\n"), ["CAP_BPF", "CAP_PERFMON"]);
        assert_eq!(missing_capabilities("").len(), 3);
    }

    #[test]
    fn preemption_is_what_stands_in_parentheses_or_in_the_version() {
        let case = |kinds, version| is_preemptible(kinds, version);
        assert!(!case(Some("none (voluntary) full \n"), "#1 SMP PREEMPT_DYNAMIC"));
        assert!(!case(Some("(none) voluntary full\n"), "#1 SMP"));
        assert!(case(Some("none voluntary (full)\n"), "#1 SMP"));
        assert!(case(Some("full (lazy) \n"), "#1 SMP"));
        for kinds in [None, Some(""), Some("none full"), Some("(full")] {
            assert!(case(kinds, "#1 SMP PREEMPT Debian 7.2.13-1"));
            assert!(case(kinds, "#1 SMP PREEMPT_RT Debian 6.12"));
            assert!(!case(kinds, "#1 SMP Debian 6.1"));
        }
    }

    #[test]
    fn lockdown_is_what_stands_in_brackets() {
        assert!(is_confidential("none integrity [confidentiality]\n"));
        assert!(!is_confidential("none [integrity] confidentiality\n"));
    }

    #[test]
    fn facts_of_this_kernel_are_gathered() {
        for side in [Side::Host, Side::Target] {
            let facts = Facts::gather(side).unwrap();
            assert!(!facts.release.is_empty());
            if facts.typed.contains("vmlinux") {
                assert!(facts.structs.contains("request"));
                assert!(facts.tracepoints.contains("block_rq_complete"));
                assert!(facts.bio_told.is_some_and(|bit| bit < 16));
                continue;
            }
            println!("skipped: this kernel has no type information");
        }
    }
}
