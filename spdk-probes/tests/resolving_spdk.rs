//! The resolver against a real SPDK, where `SPDK_BUILD` names a build directory (with `bin/nvmf_tgt` in it).

// What a helper of a test cannot do is the test's failure.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use run_format::{Boundary, Side};
use spdk_probes::resolve::{BinarySet, Product};
use spdk_probes::{Class, Detail, Layout, Options, Survey, functions, survey_program};

fn build() -> Option<PathBuf> {
    let build = std::env::var_os("SPDK_BUILD").map(PathBuf::from);
    if build.is_none() {
        println!("skipped: SPDK_BUILD is not set");
    }
    build
}

fn program(build: &std::path::Path, names: &[&str]) -> Option<BinarySet> {
    let found = names.iter().map(|name| build.join(name)).find(|path| path.exists());
    let Some(path) = found else {
        println!("skipped: none of {names:?} is in {}", build.display());
        return None;
    };
    Some(BinarySet::open(&path.display().to_string(), &[path], None).expect("SPDK"))
}

/// All that can be had of a program.
fn full() -> Options {
    Options { detail: Detail::Full, ..Options::default() }
}

/// Every boundary is taken, with probes that the kernel emulates.
fn check_survey(survey: &Survey) {
    for boundary in &survey.boundaries {
        let rung = boundary.rung().unwrap_or_else(|| panic!("{boundary:#?}"));
        let sites = rung.outcome.as_ref().unwrap();
        assert!(!sites.is_empty(), "{boundary:#?}");
        for site in sites {
            assert!(site.class <= Class::Emulated, "{}: {site:?}", boundary.boundary);
        }
        // bdev_io_complete is inlined into a path that no I/O of a healthy drive takes; that is said.
        let said = boundary.boundary == Boundary::HEnd && rung.note.contains("inlined");
        assert!(rung.whole || said, "{boundary:#?}");
    }
}

#[test]
fn a_target_has_every_boundary_and_member_and_is_resolved_in_time() {
    let Some(set) = build().and_then(|build| program(&build, &["bin/nvmf_tgt"])) else {
        return;
    };
    // What the recorder does at its start: everything, once, from nothing.
    let path = set.binaries()[0].path().to_owned();
    let began = Instant::now();
    let survey = survey_program(&path, Side::Target, &full()).unwrap();
    let took = began.elapsed();
    println!("resolved in {took:.1?}");
    // The aim is below a tenth of this; a busy machine takes longer.
    assert!(took < Duration::from_secs(1), "{took:?}");
    check_survey(&survey);
    for path in functions::needed_members(Side::Target) {
        set.offset(path).unwrap_or_else(|error| panic!("{error}"));
    }
    let version = set.version().expect("a version");
    assert_eq!(version.product, Product::Spdk);
    assert!(version.text.starts_with("SPDK v"), "{}", version.text);

    // What did not move between 24.01 and 26.05, and what the NVMe specification fixes.
    let offset = |path: &str| set.offset(path).unwrap().offset;
    for (path, expected) in [
        ("spdk_nvmf_request.qpair", 0),
        ("spdk_nvmf_request.length", 8),
        ("spdk_nvmf_request.xfer", 12),
        ("spdk_nvmf_request.cmd", 16),
        ("spdk_nvmf_request.rsp", 24),
        ("spdk_nvmf_qpair.qid", 2),
        ("spdk_nvmf_qpair.ctrlr", 16),
        ("spdk_nvmf_ctrlr.cntlid", 0),
        ("spdk_nvmf_ctrlr.hostnqn", 2),
        ("spdk_nvmf_ctrlr.subsys", 232),
        ("spdk_nvmf_tcp_qpair.pdu_in_progress", 136),
        ("spdk_nvme_cmd.cid", 2),
        ("spdk_nvme_cmd.nsid", 4),
        ("spdk_nvme_cmd.cdw10", 40),
        ("spdk_nvme_cpl.cid", 12),
        ("spdk_nvme_cpl.status", 14),
        ("spdk_nvme_tcp_cmd.ccsqe", 8),
        ("spdk_nvme_tcp_c2h_data_hdr.cccid", 8),
    ] {
        assert_eq!(offset(path), expected, "{path}");
    }
    let opcode = set.offset("spdk_nvme_cmd.opc").unwrap();
    assert_eq!((opcode.offset, opcode.bit), (0, Some((0, 8))));
    let fuse = set.offset("spdk_nvme_cmd.fuse").unwrap();
    assert_eq!((fuse.offset, fuse.bit), (1, Some((0, 2))));
    // What moved.
    let moved = match version.number {
        Some((24, 9)) => Some([920, 294, 736, 808]),
        Some((26, 1)) => Some([944, 294, 864, 832]),
        Some((26, 5)) => Some([944, 304, 864, 832]),
        _ => None,
    };
    if let Some([state, subnqn, context, request]) = moved {
        assert_eq!(offset("spdk_nvmf_tcp_req.state"), state);
        assert_eq!(offset("spdk_nvmf_subsystem.subnqn"), subnqn);
        assert_eq!(offset("spdk_bdev_io.internal.caller_ctx"), context);
        assert_eq!(set.size_of("spdk_nvmf_request").unwrap(), request);
    }
    for (name, value) in [
        ("TCP_REQUEST_STATE_NEW", 1),
        ("TCP_REQUEST_STATE_READY_TO_EXECUTE", 8),
        ("TCP_REQUEST_STATE_EXECUTED", 11),
        ("TCP_REQUEST_STATE_COMPLETED", 15),
    ] {
        assert_eq!(set.enumerator("spdk_nvmf_tcp_req_state", name).unwrap(), value, "{name}");
    }
}

#[test]
fn a_host_has_every_boundary_and_member() {
    let Some(build) = build() else {
        return;
    };
    for names in [["bin/spdk_nvme_perf", "build/bin/spdk_nvme_perf"], ["examples/bdevperf", "bin/bdevperf"]] {
        let Some(set) = program(&build, &names) else {
            continue;
        };
        let path = set.binaries()[0].path();
        check_survey(&survey_program(path, Side::Host, &full()).unwrap());
        for path in functions::needed_members(Side::Host) {
            set.offset(path).unwrap_or_else(|error| panic!("{error}"));
        }
        let offset = |path: &str| set.offset(path).unwrap().offset;
        assert_eq!(offset("spdk_nvme_qpair.id"), 8);
        assert_eq!(offset("nvme_tcp_req.cid"), 12);
        assert_eq!(offset("nvme_tcp_req.ttag"), 14);
        match set.version().and_then(|version| version.number) {
            Some((26, 5)) => assert_eq!(offset("spdk_nvme_ctrlr.cntlid"), 40),
            Some((24, 9) | (26, 1)) => assert_eq!(offset("spdk_nvme_ctrlr.cntlid"), 22),
            _ => {}
        }
    }
}

#[test]
fn a_stripped_target_is_served_by_a_layout_file_as_by_its_symbols() {
    let Some(set) = build().and_then(|build| program(&build, &["bin/nvmf_tgt"])) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let stripped = directory.path().join("nvmf_tgt");
    let done =
        Command::new("strip").arg("-s").arg("-o").arg(&stripped).arg(set.binaries()[0].path()).status();
    if !done.is_ok_and(|status| status.success()) {
        println!("skipped: strip is not installed");
        return;
    }
    let saved = directory.path().join("layout.json");
    set.binaries()[0].layout().unwrap().save(&saved).unwrap();
    // The version and the USDT probes survive stripping, so it still counts as SPDK.
    let mut bare = BinarySet::open("stripped", std::slice::from_ref(&stripped), None).unwrap();
    let error = bare.resolve_function("nvmf_tcp_req_process").unwrap_err().to_string();
    assert!(error.contains("is stripped") && error.contains("--save-layout"), "{error}");
    bare.binaries_mut()[0].set_layout(Layout::load(&saved).unwrap()).unwrap();
    for side in [Side::Target, Side::Host] {
        let whole = survey_program(set.binaries()[0].path(), side, &full()).unwrap();
        let options = Options { layout: Some(saved.clone()), ..full() };
        let served = survey_program(&stripped, side, &options).unwrap();
        for (whole, served) in whole.boundaries.iter().zip(&served.boundaries) {
            assert_eq!(whole.chosen, served.chosen, "{served:#?}");
            for (whole, served) in whole.rungs.iter().zip(&served.rungs) {
                let places = |rung: &spdk_probes::RungSurvey| -> Option<Vec<(u64, u64, Class)>> {
                    let sites = rung.outcome.as_ref().ok()?.iter();
                    Some(sites.map(|site| (site.vaddr, site.file_offset, site.class)).collect())
                };
                assert_eq!((&whole.hook, places(whole)), (&served.hook, places(served)));
                assert_eq!((whole.whole, &whole.note), (served.whole, &served.note));
            }
        }
    }
    for path in functions::members() {
        assert_eq!(set.offset(path).ok(), bare.offset(path).ok(), "{path}");
    }
    for (enumeration, enumerator) in functions::enumerators() {
        let value = |set: &BinarySet| set.enumerator(enumeration, enumerator).ok();
        assert_eq!(value(&set), value(&bare), "{enumerator}");
    }
}

#[test]
fn usdt_probes_are_those_of_the_build() {
    let Some(set) = build().and_then(|build| program(&build, &["bin/nvmf_tgt"])) else {
        return;
    };
    let all: usize = set.binaries().iter().map(|binary| binary.usdt_probes("spdk").len()).sum();
    if all == 0 {
        println!("skipped: this build has no USDT probes");
        return;
    }
    let add = set.usdt("spdk", "nvmf_ctrlr_add_qpair");
    assert_eq!(add.len(), 1);
    assert_eq!(add[0].semaphore, None);
    assert_eq!(add[0].args.len(), 5);
    assert!(add[0].args.iter().all(Option::is_some), "{:?}", add[0].args);
    // The last release with a probe on the I/O path was 26.01.
    let on_path = !set.usdt("spdk", "nvmf_request_io_exec_path").is_empty();
    if let Some(number) = set.version().and_then(|version| version.number) {
        assert_eq!(on_path, number <= (26, 1), "{number:?}");
    }
}
