//! Whatever a recorder looks for in SPDK's binaries is in the stand-in's: functions that begin with
//! an instruction that the kernel emulates at a uprobe, structures, members and enumerators in the
//! debug information, USDT notes; and nothing of it where SPDK has it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use gimli::{AttributeValue, DebuggingInformationEntry, EndianSlice, LittleEndian};
use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use object::{Object, ObjectSection, ObjectSymbol};

type Reader<'a> = EndianSlice<'a, LittleEndian>;

const TARGET: &str = env!("CARGO_BIN_EXE_standin-target");
const INITIATOR: &str = env!("CARGO_BIN_EXE_standin-initiator");

const TARGET_FUNCTIONS: &[&str] = &[
    "_nvmf_request_complete",
    "_nvmf_tcp_pdu_payload_handle",
    "_nvmf_tcp_send_c2h_data",
    "_sock_flush",
    "bdev_io_complete",
    "bdev_io_do_submit",
    "bdev_io_submit",
    "bdev_malloc_submit_request",
    "bdev_null_submit_request",
    "nvmf_bdev_ctrlr_compare_cmd",
    "nvmf_bdev_ctrlr_complete_cmd",
    "nvmf_bdev_ctrlr_dsm_cmd",
    "nvmf_bdev_ctrlr_flush_cmd",
    "nvmf_bdev_ctrlr_read_cmd",
    "nvmf_bdev_ctrlr_write_cmd",
    "nvmf_bdev_ctrlr_write_zeroes_cmd",
    "nvmf_ctrlr_add_qpair",
    "nvmf_ctrlr_process_admin_cmd",
    "nvmf_ctrlr_process_fabrics_cmd",
    "nvmf_ctrlr_process_io_cmd",
    "nvmf_prop_set_cc",
    "nvmf_subsystem_add_ctrlr",
    "nvmf_tcp_capsule_cmd_hdr_handle",
    "nvmf_tcp_h2c_data_hdr_handle",
    "nvmf_tcp_pdu_c2h_data_complete",
    "nvmf_tcp_poll_group_add",
    "nvmf_tcp_qpair_write_pdu",
    "nvmf_tcp_r2t_complete",
    "nvmf_tcp_req_complete",
    "nvmf_tcp_req_process",
    "nvmf_tcp_request_free",
    "nvmf_tcp_send_capsule_resp_pdu",
    "nvmf_tcp_send_r2t_pdu",
    "nvmf_tcp_sock_cb",
    "nvmf_tcp_sock_process",
    "posix_writev",
    "spdk_bdev_free_io",
    "spdk_bdev_io_complete",
    "spdk_nvmf_request_complete",
    "spdk_nvmf_request_exec",
];

const INITIATOR_FUNCTIONS: &[&str] = &[
    "_sock_flush",
    "io_complete",
    "nvme_qpair_submit_request",
    "nvme_tcp_c2h_data_hdr_handle",
    "nvme_tcp_c2h_data_payload_handle",
    "nvme_tcp_capsule_resp_hdr_handle",
    "nvme_tcp_qpair_cmd_send_complete",
    "nvme_tcp_qpair_h2c_data_send_complete",
    "nvme_tcp_qpair_process_completions",
    "nvme_tcp_qpair_submit_request",
    "nvme_tcp_qpair_write_pdu",
    "nvme_tcp_r2t_hdr_handle",
    "nvme_tcp_req_complete",
    "nvme_tcp_send_h2c_data",
    "posix_writev",
    "spdk_nvme_ns_cmd_compare",
    "spdk_nvme_ns_cmd_dataset_management",
    "spdk_nvme_ns_cmd_flush",
    "spdk_nvme_ns_cmd_read",
    "spdk_nvme_ns_cmd_write",
    "spdk_nvme_ns_cmd_write_zeroes",
    "spdk_nvme_qpair_process_completions",
    "submit_single_io",
];

const TARGET_TYPES: &[(&str, &[&str])] = &[
    ("spdk_nvmf_request", &["qpair", "cmd", "rsp", "length", "xfer", "iov", "iovcnt"]),
    (
        "spdk_nvmf_tcp_req",
        &["req", "cmd", "rsp", "state", "ttag", "has_in_capsule_data", "h2c_offset", "pdu"],
    ),
    (
        "spdk_nvmf_qpair",
        &[
            "qid",
            "ctrlr",
            "state",
            "group",
            "transport",
            "sq_head",
            "connect_received",
            "disconnect_started",
            "trace_id",
            "queue_depth",
        ],
    ),
    (
        "spdk_nvmf_tcp_qpair",
        &[
            "qpair",
            "pdu_in_progress",
            "sock",
            "initiator_addr",
            "initiator_port",
            "target_addr",
            "target_port",
            "recv_state",
            "state",
            "group",
            "resource_count",
            "reqs",
        ],
    ),
    ("spdk_nvmf_ctrlr", &["cntlid", "hostnqn", "subsys", "hostid", "listener", "admin_qpair", "thread"]),
    ("spdk_nvmf_subsystem", &["subnqn", "id", "state", "ns", "max_nsid"]),
    ("spdk_nvmf_subsystem_listener", &["trid"]),
    ("spdk_nvme_transport_id", &["traddr", "trsvcid", "subnqn"]),
    ("spdk_nvmf_ns", &["nsid", "bdev", "anagrpid", "uuid"]),
    ("spdk_nvmf_poll_group", &["thread"]),
    ("spdk_nvmf_tcp_poll_group", &["group"]),
    ("spdk_nvmf_transport", &["opts"]),
    ("spdk_thread", &["name", "id"]),
    ("spdk_bdev_io", &["bdev", "type", "internal", "u"]),
    ("spdk_bdev_io_internal_fields", &["caller_ctx", "status", "cb", "submit_tsc"]),
    ("spdk_bdev_io_block_params", &["offset_blocks", "num_blocks", "iovs", "iovcnt"]),
    ("spdk_bdev", &["name", "blocklen", "blockcnt"]),
    ("nvme_tcp_pdu", &["hdr", "req", "data_len", "rw_offset", "cb_fn", "cb_arg", "qpair"]),
    (
        "nvme_tcp_pdu_hdr",
        &[
            "raw",
            "common",
            "ic_req",
            "term_req",
            "capsule_cmd",
            "h2c_data",
            "ic_resp",
            "capsule_resp",
            "c2h_data",
            "r2t",
        ],
    ),
    ("spdk_nvme_tcp_cmd", &["common", "ccsqe"]),
    ("spdk_nvme_tcp_rsp", &["common", "rccqe"]),
    ("spdk_nvme_cmd", &["opc", "cid", "nsid", "cdw10", "cdw11", "cdw12"]),
    ("spdk_nvme_cpl", &["cdw0", "sqhd", "sqid", "cid", "status"]),
    ("nvmf_h2c_msg", &["nvme_cmd", "connect_cmd"]),
    ("nvmf_c2h_msg", &["nvme_cpl"]),
    ("spdk_posix_sock", &["fd", "base"]),
    ("spdk_sock", &["queued_reqs", "queued_iovcnt", "cb_arg"]),
];

const INITIATOR_TYPES: &[(&str, &[&str])] = &[
    ("spdk_nvme_qpair", &["ctrlr", "id", "state", "queue_depth", "num_outstanding_reqs", "trtype"]),
    (
        "nvme_tcp_qpair",
        &[
            "qpair",
            "sock",
            "recv_pdu",
            "send_pdu",
            "tcp_reqs",
            "recv_state",
            "maxh2cdata",
            "maxr2t",
            "num_entries",
        ],
    ),
    (
        "nvme_tcp_req",
        &[
            "req",
            "cid",
            "ttag",
            "state",
            "datao",
            "expected_datao",
            "r2tl_remain",
            "active_r2ts",
            "in_capsule_data",
            "pdu",
            "tqpair",
            "rsp",
        ],
    ),
    ("nvme_request", &["cmd", "qpair", "cb_fn", "cb_arg", "payload_size", "submit_tick", "parent"]),
    ("spdk_nvme_ctrlr", &["cntlid", "trid", "opts"]),
    ("spdk_nvme_ctrlr_opts", &["hostnqn", "num_io_queues", "keep_alive_timeout_ms"]),
    ("spdk_nvme_transport_id", &["traddr", "trsvcid", "subnqn"]),
    ("nvme_tcp_pdu", &["hdr", "req"]),
    ("nvme_tcp_pdu_hdr", &["raw", "common", "capsule_cmd", "h2c_data", "capsule_resp", "c2h_data", "r2t"]),
    ("spdk_nvme_cmd", &["opc", "cid", "nsid", "cdw10", "cdw11", "cdw12"]),
    ("spdk_nvme_cpl", &["cid", "status"]),
    ("spdk_posix_sock", &["fd", "base"]),
    ("spdk_sock", &["cb_arg"]),
];

const TARGET_ENUMS: &[(&str, &[&str])] = &[
    (
        "spdk_nvmf_tcp_req_state",
        &[
            "TCP_REQUEST_STATE_FREE",
            "TCP_REQUEST_STATE_NEW",
            "TCP_REQUEST_STATE_NEED_BUFFER",
            "TCP_REQUEST_STATE_HAVE_BUFFER",
            "TCP_REQUEST_STATE_TRANSFERRING_HOST_TO_CONTROLLER",
            "TCP_REQUEST_STATE_AWAITING_R2T_ACK",
            "TCP_REQUEST_STATE_READY_TO_EXECUTE",
            "TCP_REQUEST_STATE_EXECUTING",
            "TCP_REQUEST_STATE_EXECUTED",
            "TCP_REQUEST_STATE_READY_TO_COMPLETE",
            "TCP_REQUEST_STATE_TRANSFERRING_CONTROLLER_TO_HOST",
            "TCP_REQUEST_STATE_COMPLETED",
        ],
    ),
    (
        "spdk_nvmf_qpair_state",
        &["SPDK_NVMF_QPAIR_CONNECTING", "SPDK_NVMF_QPAIR_ENABLED", "SPDK_NVMF_QPAIR_ERROR"],
    ),
    (
        "nvme_tcp_pdu_recv_state",
        &["NVME_TCP_PDU_RECV_STATE_AWAIT_PDU_CH", "NVME_TCP_PDU_RECV_STATE_AWAIT_REQ"],
    ),
    (
        "spdk_bdev_io_type",
        &[
            "SPDK_BDEV_IO_TYPE_READ",
            "SPDK_BDEV_IO_TYPE_WRITE",
            "SPDK_BDEV_IO_TYPE_UNMAP",
            "SPDK_BDEV_IO_TYPE_FLUSH",
            "SPDK_BDEV_IO_TYPE_WRITE_ZEROES",
            "SPDK_BDEV_IO_TYPE_COMPARE",
        ],
    ),
];

const INITIATOR_ENUMS: &[(&str, &[&str])] = &[
    ("spdk_nvme_transport_type", &["SPDK_NVME_TRANSPORT_TCP"]),
    ("nvme_tcp_req_state", &["NVME_TCP_REQ_FREE", "NVME_TCP_REQ_ACTIVE", "NVME_TCP_REQ_ACTIVE_R2T"]),
    ("nvme_qpair_state", &["NVME_QPAIR_CONNECTED", "NVME_QPAIR_ENABLED"]),
];

const TARGET_USDT: &[(&str, usize)] = &[
    ("nvmf_create_poll_group", 2),
    ("nvmf_ctrlr_add_io_qpair", 5),
    ("nvmf_ctrlr_add_qpair", 5),
    ("nvmf_ctrlr_destruct", 4),
    ("nvmf_destroy_poll_group", 2),
    ("nvmf_poll_group_add_qpair", 3),
    ("nvmf_poll_group_remove_qpair", 3),
    ("nvmf_qpair_disconnect", 3),
    ("nvmf_subsystem_add_ctrlr", 4),
    ("nvmf_subsystem_change_state", 4),
    ("nvmf_subsystem_change_state_done", 5),
    ("nvmf_subsystem_create", 2),
    ("nvmf_subsystem_remove_ctrlr", 4),
    ("nvmf_transport_poll_group_add", 4),
    ("nvmf_transport_poll_group_remove", 4),
    ("nvmf_transport_qpair_fini", 2),
];

/// Members at offset 0 where SPDK casts between the two structures, so they are there here too.
const SAME_PLACE: &[(&str, &str)] = &[
    ("spdk_nvmf_tcp_req", "req"),
    ("spdk_nvmf_tcp_qpair", "qpair"),
    ("spdk_nvmf_tcp_poll_group", "group"),
    ("nvme_tcp_qpair", "qpair"),
];

/// Offsets that SPDK has had (v24.09 to v26.05); none of them may be right here.
const SPDK_OFFSETS: &[(&str, &str, &[u64])] = &[
    ("spdk_nvmf_request", "qpair", &[0]),
    ("spdk_nvmf_request", "length", &[8]),
    ("spdk_nvmf_request", "cmd", &[16]),
    ("spdk_nvmf_request", "rsp", &[24]),
    ("spdk_nvmf_tcp_req", "state", &[888, 920, 928, 944]),
    ("spdk_nvmf_qpair", "qid", &[2]),
    ("spdk_nvmf_qpair", "ctrlr", &[16]),
    ("spdk_nvmf_tcp_qpair", "sock", &[120]),
    ("spdk_nvmf_tcp_qpair", "pdu_in_progress", &[136]),
    ("spdk_nvmf_tcp_qpair", "initiator_addr", &[312]),
    ("spdk_nvmf_tcp_qpair", "initiator_port", &[824]),
    ("spdk_nvmf_ctrlr", "cntlid", &[0]),
    ("spdk_nvmf_ctrlr", "hostnqn", &[2]),
    ("spdk_nvmf_ctrlr", "subsys", &[232]),
    ("spdk_nvmf_subsystem", "subnqn", &[294, 304]),
    ("spdk_bdev_io", "bdev", &[0]),
    ("spdk_bdev_io", "type", &[8]),
    ("spdk_posix_sock", "fd", &[240]),
    ("nvme_tcp_pdu", "hdr", &[0]),
    ("spdk_nvme_qpair", "ctrlr", &[0]),
    ("spdk_nvme_qpair", "id", &[8]),
    ("nvme_tcp_req", "req", &[0]),
    ("nvme_tcp_req", "cid", &[12]),
    ("nvme_request", "cmd", &[0]),
    ("nvme_request", "qpair", &[152, 160]),
    ("spdk_nvme_ctrlr", "cntlid", &[22, 40]),
];

#[derive(Debug, Default)]
struct Debug {
    /// Structures and unions: member, offset.
    types: BTreeMap<String, BTreeMap<String, u64>>,
    /// Enumerations: enumerator, value.
    enums: BTreeMap<String, BTreeMap<String, i64>>,
}

fn debug_information(path: &str) -> Debug {
    let bytes = std::fs::read(path).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let load = |id: gimli::SectionId| -> Result<Reader<'_>, gimli::Error> {
        let data = file.section_by_name(id.name()).map_or(&[][..], |s| s.data().unwrap());
        Ok(EndianSlice::new(data, LittleEndian))
    };
    let dwarf = gimli::Dwarf::load(load).unwrap();
    let mut found = Debug::default();
    let mut units = dwarf.units();
    while let Some(header) = units.next().unwrap() {
        let unit = dwarf.unit(header).unwrap();
        let name = |entry: &DebuggingInformationEntry<Reader<'_>>| {
            let value = entry.attr_value(gimli::DW_AT_name)?;
            let text = dwarf.attr_string(&unit, value).ok()?;
            Some(text.to_string_lossy().into_owned())
        };
        let mut entries = unit.entries();
        // What the entries at each depth are inside of.
        let mut stack: Vec<(isize, gimli::DwTag, Option<String>)> = Vec::new();
        let mut depth = 0;
        while let Some(entry) = entries.next_dfs().unwrap() {
            depth = entry.depth();
            while stack.last().is_some_and(|(d, ..)| *d >= depth) {
                stack.pop();
            }
            let own = name(entry);
            if let (Some((_, tag, Some(outer))), Some(own)) = (stack.last(), &own) {
                match (*tag, entry.tag()) {
                    (gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type, gimli::DW_TAG_member) => {
                        let offset = match entry.attr_value(gimli::DW_AT_data_member_location) {
                            Some(value) => value.udata_value().unwrap(),
                            None => 0,
                        };
                        found.types.entry(outer.clone()).or_default().insert(own.clone(), offset);
                    }
                    (gimli::DW_TAG_enumeration_type, gimli::DW_TAG_enumerator) => {
                        let value = match entry.attr_value(gimli::DW_AT_const_value) {
                            Some(AttributeValue::Udata(v)) => v as i64,
                            Some(value) => value.sdata_value().unwrap(),
                            None => panic!("{own} has no value"),
                        };
                        found.enums.entry(outer.clone()).or_default().insert(own.clone(), value);
                    }
                    _ => {}
                }
            }
            stack.push((depth, entry.tag(), own));
        }
        let _ = depth;
    }
    found
}

fn check_types(path: &str, types: &[(&str, &[&str])], enums: &[(&str, &[&str])]) {
    let debug = debug_information(path);
    for (name, members) in types {
        let known = debug.types.get(*name).unwrap_or_else(|| panic!("{path} has no type {name}"));
        for member in *members {
            assert!(known.contains_key(*member), "{path}: {name} has no member {member}: {known:?}");
        }
    }
    for (name, members) in enums {
        let known = debug.enums.get(*name).unwrap_or_else(|| panic!("{path} has no enum {name}"));
        for member in *members {
            assert!(known.contains_key(*member), "{path}: {name} has no enumerator {member}");
        }
        let values: BTreeSet<_> = known.values().collect();
        assert_eq!(values.len(), known.len(), "{name}: two enumerators with one value");
    }
    for (name, member) in SAME_PLACE {
        if let Some(known) = debug.types.get(*name) {
            assert_eq!(known[*member], 0, "{name}.{member}");
        }
    }
    for (name, member, offsets) in SPDK_OFFSETS {
        if let Some(known) = debug.types.get(*name) {
            let here = known[*member];
            assert!(!offsets.contains(&here), "{name}.{member} is where SPDK has it, at {here}");
        }
    }
}

#[test]
fn the_targets_types_are_in_its_debug_information() {
    check_types(TARGET, TARGET_TYPES, TARGET_ENUMS);
    let debug = debug_information(TARGET);
    let states = &debug.enums["spdk_nvmf_tcp_req_state"];
    for (state, spdk) in [("NEW", 1), ("READY_TO_EXECUTE", 8), ("EXECUTED", 11), ("COMPLETED", 15)] {
        assert_ne!(states[&format!("TCP_REQUEST_STATE_{state}")], spdk);
    }
}

#[test]
fn the_initiators_types_are_in_its_debug_information() {
    check_types(INITIATOR, INITIATOR_TYPES, INITIATOR_ENUMS);
}

/// Address and first instruction of every function in the symbol table.
fn functions(path: &str) -> BTreeMap<String, (u64, Mnemonic)> {
    let bytes = std::fs::read(path).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let text = file.section_by_name(".text").unwrap();
    let (start, code) = (text.address(), text.data().unwrap());
    file.symbols()
        .filter(|s| s.kind() == object::SymbolKind::Text && s.is_definition())
        .filter_map(|s| {
            let at = usize::try_from(s.address().checked_sub(start)?).ok()?;
            let mut decoder = Decoder::with_ip(64, code.get(at..)?, s.address(), DecoderOptions::NONE);
            let first = decoder.decode().mnemonic();
            Some((s.name().ok()?.to_owned(), (s.address(), first)))
        })
        .collect()
}

fn check_functions(path: &str, wanted: &[&str], foreign: &[&str]) {
    let known = functions(path);
    let mut addresses = BTreeSet::new();
    for name in wanted {
        let (address, first) = known.get(*name).unwrap_or_else(|| panic!("{path} has no function {name}"));
        assert!(addresses.insert(address), "{name} shares its address with another function");
        assert_eq!(*first, Mnemonic::Push, "{path}: {name} begins with {first:?}");
    }
    for name in foreign {
        let shared = wanted.contains(name);
        assert!(shared || !known.contains_key(*name), "{path} has {name}, of the other side");
    }
}

#[test]
fn every_function_begins_with_a_push() {
    if cfg!(not(target_arch = "x86_64")) {
        println!("skipped: the first instructions are checked on x86-64 only");
        return;
    }
    check_functions(TARGET, TARGET_FUNCTIONS, INITIATOR_FUNCTIONS);
    check_functions(INITIATOR, INITIATOR_FUNCTIONS, TARGET_FUNCTIONS);
}

/// Names and numbers of arguments of the USDT notes of one provider.
fn usdt(path: &str) -> BTreeMap<String, usize> {
    let bytes = std::fs::read(path).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let Some(section) = file.section_by_name(".note.stapsdt") else {
        return BTreeMap::new();
    };
    let data = section.data().unwrap();
    let text = file.section_by_name(".text").unwrap();
    let code = text.data().unwrap();
    let word = |at: usize| u32::from_le_bytes(data[at..at + 4].try_into().unwrap()) as usize;
    let mut found = BTreeMap::new();
    let mut at = 0;
    while at + 12 <= data.len() {
        let (name_len, desc_len) = (word(at), word(at + 4));
        let desc = at + 12 + name_len.next_multiple_of(4);
        let body = &data[desc..desc + desc_len];
        let semaphore = u64::from_le_bytes(body[16..24].try_into().unwrap());
        let texts: Vec<_> =
            body[24..].split(|b| *b == 0).map(|t| String::from_utf8_lossy(t).into_owned()).collect();
        assert_eq!(texts[0], "spdk");
        let address = u64::from_le_bytes(body[..8].try_into().unwrap());
        let place = address.checked_sub(text.address()).map(|at| at as usize);
        let instruction = place.and_then(|at| code.get(at));
        assert_eq!(instruction, Some(&0x90), "{}: no nop at {address:#x}", texts[1]);
        assert_eq!(semaphore, 0, "{}: a semaphore would have to be written", texts[1]);
        found.insert(texts[1].clone(), texts[2].split_whitespace().count());
        at = desc + desc_len.next_multiple_of(4);
    }
    found
}

#[test]
fn the_targets_usdt_probes_have_their_arguments() {
    let known = usdt(TARGET);
    for (name, arguments) in TARGET_USDT {
        assert_eq!(known.get(*name), Some(arguments), "{name}: {known:?}");
    }
    assert!(usdt(INITIATOR).is_empty());
}

#[test]
fn both_programs_say_what_they_are() {
    for path in [TARGET, INITIATOR] {
        let bytes = std::fs::read(path).unwrap();
        let file = object::File::parse(&*bytes).unwrap();
        let symbol = file
            .dynamic_symbols()
            .find(|s| s.name() == Ok("fabscope_standin_version"))
            .unwrap_or_else(|| panic!("{path} exports no fabscope_standin_version"));
        let section = file.section_by_index(symbol.section_index().unwrap()).unwrap();
        let at = (symbol.address() - section.address()) as usize;
        let text = &section.data().unwrap()[at..at + symbol.size() as usize];
        let text = std::str::from_utf8(text.strip_suffix(&[0]).unwrap()).unwrap();
        assert_eq!(text, standin::version());
        assert!(text.contains("stand-in") && text.contains("not SPDK"));

        let help = std::process::Command::new(path).arg("--help").output().unwrap();
        assert!(String::from_utf8_lossy(&help.stdout).contains("stand-in, never SPDK"));
    }
}
