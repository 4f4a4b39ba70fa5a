//! Linux probes: records the commands of the kernel's NVMe-oF host or target with BPF programs, on the hooks that the
//! running kernel has. It keeps no run and does no analysis: what it sees goes to a [`run_format::Sink`].

mod btf;
mod error;
mod facts;
mod host;
mod ladder;
mod message;
mod programs;
mod queues;
mod retransmits;
mod survey;
mod target;
mod trial;

pub use error::Error;
pub use host::Host;
pub use programs::{Options, Probes};
pub use retransmits::{Retransmission, Retransmissions};
pub use survey::{Choice, NOT_LOADED, Survey, Way, survey};
pub use target::Target;
