//! What can keep the kernel from being recorded, with what to do about it.

use run_format::Side;

/// Why the kernel can not be recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process may not load BPF programs.
    #[error(
        "probing the kernel needs {}; missing: {}. Run it as root: sudo fabscope record {side}",
        crate::facts::CAPABILITIES_TEXT,
        .missing.join(", ")
    )]
    Privileges {
        /// The side that was to be recorded.
        side: Side,
        /// The capabilities that the process does not have.
        missing: Vec<&'static str>,
    },
    /// The kernel forbids programs to read its memory.
    #[error(
        "the kernel is locked down to \"confidentiality\" (/sys/kernel/security/lockdown): BPF programs may not \
         read its memory, so no boundary can be taken. Boot without lockdown=confidentiality"
    )]
    Lockdown,
    /// The kernel does not describe its own types.
    #[error(
        "kernel {release} has no type information at {path}: without it no program can tell where a request \
         keeps its command, so no boundary can be taken. Boot a kernel built with {option}"
    )]
    NoTypes {
        /// Its release.
        release: String,
        /// What was looked for.
        path: String,
        /// The build option that makes it.
        option: &'static str,
    },
    /// No driver of the side is there.
    #[error(
        "neither {} is loaded: {}, or {} first",
        .drivers.join(" nor "),
        .drivers.iter().map(|driver| format!("modprobe {driver}")).collect::<Vec<_>>().join(" or "),
        match .side { Side::Host => "connect", Side::Target => "set up a port" }
    )]
    NoDriver {
        /// The side.
        side: Side,
        /// The modules, one of which is needed.
        drivers: Vec<String>,
    },
    /// A file of the kernel's could not be read.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: String,
        /// What the system said.
        why: String,
    },
    /// Type information that makes no sense.
    #[error("{path}: {why}")]
    Types {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// No way to take what every record needs.
    #[error("kernel {release} offers no way to see {what}: {why}")]
    NoHook {
        /// Its release.
        release: String,
        /// What has to be seen.
        what: &'static str,
        /// Each way, and why not.
        why: String,
    },
    /// The kernel refused the programs.
    #[error("the kernel did not take the programs while {doing}: {why}")]
    Load {
        /// What was being done.
        doing: &'static str,
        /// What libbpf and the kernel said.
        why: String,
    },
    /// The ring buffer or a map could not be read.
    #[error("{doing}: {source}")]
    Read {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: libbpf_rs::Error,
    },
}
