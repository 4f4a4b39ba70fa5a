//! One uprobe a command that tells who it is: cid, opcode, namespace and address, by the request's address. With it
//! a recording by the trace ring has the exact key that the ring lacks, for one trap.

use std::mem::MaybeUninit;

use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, OpenObject, ProgramAttachType, UprobeMultiOpts, UprobeOpts,
};
use run_format::bpf::raw;
use run_format::{Nanos, QueueId, Release, sampling, urgently};

use super::assemble::Identity;
use super::reader::Identities;
use crate::loader::{self, Attach, Common, PidNamespace, fill_common, needed};
use crate::place::{Class, Reg};
use crate::plan::{SockPath, cookie_of};
use crate::resolve::{BinarySet, Site};
use crate::ring::Ring;
use crate::{Error, Options, Process};

#[allow(missing_docs, missing_debug_implementations, unreachable_pub, unused_qualifications, clippy::all)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/identity.skel.rs"));
}
use skeleton::types::identity_layout as Layout;

/// The function that every command passes on its way to storage.
const FUNCTION: &str = "spdk_nvmf_request_exec";
/// Most links that may be on their way out when new ones are made.
const MOST_WAITING: usize = 64;
/// The program's name.
const PROGRAM: &str = "identity";

/// The attached uprobe. Dropping it takes it away.
pub(super) struct Probe {
    links: Vec<Link>,
    loaded: Box<dyn Skel<'static>>,
    how: Attach,
    pid: u32,
    sites: Vec<Site>,
    /// Links that were taken away and are not gone yet.
    release: Release,
    counters: MapHandle,
    /// Where it is: for the manifest.
    pub(super) site: Site,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe")
            .field("links", &self.links.len())
            .field("site", &self.site)
            .finish_non_exhaustive()
    }
}

/// What it sends.
pub(super) struct Sent {
    ring: Ring,
    /// The largest hash that is kept.
    limit: u32,
}

impl Probe {
    /// Attaches it.
    pub(super) fn attach(process: &Process, options: &Options) -> Result<(Probe, Sent), Error> {
        loader::check(process)?;
        let set = loader::binaries(process, options.layout.as_deref(), options.debug_file.as_deref())?;
        let sites = set.coverage(FUNCTION, &[Reg::Rdi], None)?.sites;
        let site = sites.first().cloned().ok_or_else(|| Error::NoFunction {
            path: process.path.clone(),
            name: FUNCTION.to_owned(),
            similar: Vec::new(),
        })?;
        if let Some(dear) = sites.iter().find(|site| site.class == Class::SingleStep) {
            return Err(Error::SingleStepped {
                symbol: dear.symbol.clone(),
                instruction: dear.instruction.clone(),
            });
        }
        let layout = layout(&set)?;
        let (namespace, tgid) = PidNamespace::of(process.pid);
        let common = Common { tgid, namespace, limit: u32::MAX, by_sock: false, path: SockPath::default() };
        let refused = |what: &str| {
            let what = format!("{what} the program that identifies commands");
            move |source| Error::Bpf { what, source }
        };
        let how = Attach::here(options);
        // The program lives as long as the recording, and borrows this: some bytes a recording stay.
        let storage = Box::leak(Box::new(MaybeUninit::<OpenObject>::uninit()));
        let mut open = skeleton::IdentitySkelBuilder::default().open(storage).map_err(refused("open"))?;
        if let Some(rodata) = open.maps.rodata_data.as_mut() {
            fill_common!(rodata, &common);
            rodata.layout = layout;
        }
        let object = open.open_object_mut();
        for mut program in object.progs_mut() {
            let used = program.name() == PROGRAM;
            program.set_autoload(used);
            if used && how == Attach::Multi {
                program.set_attach_type(ProgramAttachType::TraceUprobeMulti);
            }
        }
        for mut map in object.maps_mut() {
            if map.name() == "ring" {
                let bytes = options.ring_bytes.clamp(1 << 16, 1 << 30).next_power_of_two();
                map.set_max_entries(bytes).map_err(refused("size the ring of"))?;
            }
        }
        let loaded: Box<dyn Skel<'static>> = Box::new(open.load().map_err(refused("load"))?);
        let object = loaded.object();
        let ring = Ring::new(loader::map(object, "ring")?).map_err(Error::Ring)?;
        let counters = loader::map(object, "counters")?;
        let sent = Sent { ring, limit: sampling::limit(options.one_in) };
        let mut probe = Probe {
            links: Vec::new(),
            loaded,
            how,
            pid: process.pid,
            sites,
            release: Release::default(),
            counters,
            site,
        };
        probe.attach_again()?;
        Ok((probe, sent))
    }

    /// Attaches it where it was taken away; false while too much of what was taken away waits for the kernel.
    pub(super) fn attach_again(&mut self) -> Result<bool, Error> {
        if !self.links.is_empty() {
            return Ok(true);
        }
        if self.release.waiting() > MOST_WAITING {
            return Ok(false);
        }
        self.links = urgently(|| self.links())?;
        Ok(true)
    }

    fn links(&self) -> Result<Vec<Link>, Error> {
        let mut links = Vec::new();
        let programs = self.loaded.object().progs_mut();
        for program in programs.filter(|program| program.name() == PROGRAM) {
            for site in &self.sites {
                let offset = site.file_offset as usize;
                let cookie = cookie_of(&site.arguments);
                // Until 6.10 the PID of a multi-uprobe meant a thread, and that of a single one always does. The
                // program looks at the process itself.
                let link = match self.how {
                    Attach::Multi => {
                        let pid = if loader::kernel_version() >= (6, 10) { self.pid as i32 } else { -1 };
                        let opts = UprobeMultiOpts {
                            offsets: vec![offset],
                            cookies: vec![cookie],
                            ..UprobeMultiOpts::default()
                        };
                        program.attach_uprobe_multi_with_opts(pid, &site.binary, "", opts)
                    }
                    Attach::Single => {
                        let opts = UprobeOpts { cookie, ..UprobeOpts::default() };
                        program.attach_uprobe_with_opts(-1, &site.binary, offset, opts)
                    }
                };
                links.push(link.map_err(|source| Error::Bpf {
                    what: "attach the program that identifies commands".to_owned(),
                    source,
                })?);
            }
        }
        Ok(links)
    }

    /// Takes the uprobe away; the kernel lets go of it aside.
    pub(super) fn detach(&mut self) {
        let links = std::mem::take(&mut self.links);
        urgently(|| links.into_iter().for_each(|link| self.release.drop_aside(link)));
    }

    /// Commands whose identity did not fit into the ring, and those whose identity could not be read.
    pub(super) fn lost(&self) -> (u64, u64) {
        (self.count(raw::FAB_LOST_RING), self.count(raw::FAB_LOST_READ))
    }

    fn count(&self, counter: u32) -> u64 {
        let index = counter.to_ne_bytes();
        let values = self.counters.lookup_percpu(&index, MapFlags::ANY).ok().flatten().unwrap_or_default();
        let number = |value: &Vec<u8>| {
            value.get(..8).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok()).map_or(0, u64::from_ne_bytes)
        };
        values.iter().map(number).sum()
    }
}

fn layout(set: &BinarySet) -> Result<Layout, Error> {
    Ok(Layout {
        request_qpair: needed::member(set, &["spdk_nvmf_request.qpair"])?,
        request_cmd: needed::member(set, &["spdk_nvmf_request.cmd"])?,
        qpair_qid: needed::member(set, &["spdk_nvmf_qpair.qid"])?,
    })
}

impl Identities for Sent {
    fn drain(&mut self, take: &mut dyn FnMut(u64, Identity)) {
        let limit = self.limit;
        self.ring.drain(|message| {
            let Some(record) = raw::fab_command::parse(message) else { return };
            let command = record.to_command(QueueId::default());
            let Some(at) = command.times.iter().flatten().next().copied() else { return };
            let hash = sampling::hash(command.cid, command.opcode, command.nsid, command.slba, command.nlb0);
            take(
                record.queue,
                Identity {
                    at: Nanos(at.0),
                    cid: command.cid,
                    opcode: command.opcode,
                    nsid: command.nsid,
                    slba: command.slba,
                    nlb0: command.nlb0,
                    bytes: command.bytes,
                    kept: hash <= limit,
                },
            );
        });
    }
}
