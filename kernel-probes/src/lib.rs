//! Linux probes: records the commands of the kernel's NVMe/TCP host with BPF programs, on the hooks that the
//! running kernel has. It keeps no run and does no analysis: what it sees goes to a [`run_format::Sink`].

mod btf;
mod error;
mod facts;
mod host;
mod ladder;
mod message;
mod queues;
mod survey;

pub use error::Error;
pub use host::{Host, HostOptions};
pub use survey::{Choice, Survey, Way, survey};
