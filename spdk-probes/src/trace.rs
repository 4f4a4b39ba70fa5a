//! What a build tells of SPDK's trace ring: the layout of its file, and which tracepoints it has. Reads the
//! program, never a ring.
//!
//! The ring's file states no version, and its layout changed twice so far: 24.05 gave it its own header in place
//! of 24.01's flags, 26.05 put the header into sections (`lib/trace/trace.c`, `include/spdk/trace.h`).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::functions::TRACE_STRUCTURES;
use crate::resolve::{BinarySet, Knowledge, Member, Product};
use crate::trace_ring::layout::Generation;

/// The tracepoints that mark boundaries of commands, on the target and on the host.
const TRACEPOINTS: &[&str] = &[
    "BDEV_IO_DONE",
    "BDEV_IO_START",
    "BDEV_NVME_IO_DONE",
    "BDEV_NVME_IO_START",
    "NVME_TCP_COMPLETE",
    "NVME_TCP_SUBMIT",
    "SOCK_REQ_COMPLETE",
    "SOCK_REQ_PEND",
    "SOCK_REQ_QUEUE",
    "TCP_READ_DONE",
    "TCP_REQ_AWAIT_R2T_ACK",
    "TCP_REQ_COMPLETED",
    "TCP_REQ_EXECUTED",
    "TCP_REQ_EXECUTING",
    "TCP_REQ_HAVE_BUFFER",
    "TCP_REQ_NEED_BUFFER",
    "TCP_REQ_NEW",
    "TCP_REQ_RDY_TO_COMPLETE",
    "TCP_REQ_RDY_TO_EXECUTE",
    "TCP_REQ_TRANSFER_C2H",
    "TCP_REQ_TX_H_TO_C",
];

/// What is known of a build's trace ring.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// The release that introduced its file's layout: 24.01 (or before), 24.05 or 26.05; none where nothing tells.
    pub layout: Option<String>,
    /// What tells: `structures`, or the program's `version`.
    pub told_by: Option<String>,
    /// The file's structures, where debug information or a layout file describes them.
    pub structures: BTreeMap<String, Structure>,
    /// The tracepoints of commands whose names are in the program.
    pub tracepoints: Vec<String>,
}

/// A structure of the ring's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Structure {
    /// In bytes.
    pub size: u64,
    /// Its members.
    pub members: BTreeMap<String, Member>,
}

impl Trace {
    /// Gathers it.
    pub(crate) fn of(set: &BinarySet) -> Trace {
        let mut structures = BTreeMap::new();
        for name in TRACE_STRUCTURES {
            let found = set.binaries().iter().find_map(|binary| {
                let kept = binary.layout_file().and_then(|layout| layout.trace_structure(name).cloned());
                kept.or_else(|| binary.structure(name))
            });
            if let Some((size, members)) = found {
                structures
                    .insert((*name).to_owned(), Structure { size, members: members.into_iter().collect() });
            }
        }
        let of_structures = layout_by_structures(&structures);
        let complete = set.binaries().iter().any(|binary| binary.knowledge() >= Knowledge::Layout)
            && !structures.is_empty();
        let version = set.version().filter(|version| version.product == Product::Spdk);
        let of_version = version.and_then(|version| version.number).map(layout_by_version);
        let (layout, told_by) = match (of_structures, of_version) {
            (Some(layout), _) => (Some(layout), Some("structures")),
            // Structures that fit none of the layouts known are a layout that is not known.
            (None, Some(_)) if complete => (None, Some("structures")),
            (None, Some(layout)) => (Some(layout), Some("version")),
            (None, None) => (None, None),
        };
        Trace {
            layout: layout.map(str::to_owned),
            told_by: told_by.map(str::to_owned),
            structures,
            tracepoints: tracepoints(set.binaries().iter().flat_map(|binary| binary.constants())),
        }
    }
}

fn layout_by_structures(structures: &BTreeMap<String, Structure>) -> Option<&'static str> {
    if structures.contains_key("spdk_trace_flags") {
        return Some(Generation::Flags.name());
    }
    let file = structures.get("spdk_trace_file")?;
    let has = |member: &str| file.members.contains_key(member);
    match (has("section_offsets"), has("lcore_history_offsets")) {
        (true, _) => Some(Generation::Sections.name()),
        (false, true) => Some(Generation::File.name()),
        (false, false) => None,
    }
}

fn layout_by_version(number: (u32, u32)) -> &'static str {
    Generation::of_release(number).name()
}

/// The known names among the strings of some constants.
fn tracepoints<'a>(constants: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    let mut found = BTreeSet::new();
    for part in constants {
        for text in part.split(|byte| *byte == 0) {
            // No name of a tracepoint is longer: they are cut at 23 characters.
            if (8..24).contains(&text.len())
                && let Ok(at) = TRACEPOINTS.binary_search_by(|name| name.as_bytes().cmp(text))
            {
                found.extend(TRACEPOINTS.get(at).map(|name| (*name).to_owned()));
            }
        }
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_as_long_as_a_tracepoint_s() {
        assert!(TRACEPOINTS.is_sorted());
        assert!(TRACEPOINTS.iter().all(|name| (8..24).contains(&name.len())));
        let constants: [&[u8]; 2] = [b"x\0TCP_REQ_NEW\0TCP_REQ_NEWER\0BDEV_IO_DONE", b"\0TCP_REQ_NEW\0"];
        assert_eq!(tracepoints(constants.into_iter()), ["BDEV_IO_DONE", "TCP_REQ_NEW"]);
    }

    #[test]
    fn each_release_has_its_layout() {
        assert_eq!(layout_by_version((23, 9)), "24.01");
        assert_eq!(layout_by_version((24, 1)), "24.01");
        assert_eq!(layout_by_version((24, 5)), "24.05");
        assert_eq!(layout_by_version((26, 1)), "24.05");
        assert_eq!(layout_by_version((26, 5)), "26.05");
        assert_eq!(layout_by_version((27, 1)), "26.05");
        let file = |members: &[&str]| {
            let member = Member { offset: 0, size: 8, bit: None, type_name: "uint64_t".into() };
            let members = members.iter().map(|name| ((*name).to_owned(), member.clone())).collect();
            BTreeMap::from([("spdk_trace_file".to_owned(), Structure { size: 72, members })])
        };
        assert_eq!(layout_by_structures(&file(&["section_offsets"])), Some("26.05"));
        assert_eq!(layout_by_structures(&file(&["lcore_history_offsets"])), Some("24.05"));
        assert_eq!(layout_by_structures(&file(&["something"])), None);
        assert_eq!(layout_by_structures(&BTreeMap::new()), None);
    }
}
