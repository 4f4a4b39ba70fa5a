//! A program whose SPDK is in shared libraries, looked at without running it: its libraries are found, and one layout
//! file serves them all when they are stripped.

// What a helper of a test cannot do is the test's failure.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use run_format::Side;
use spdk_probes::{Offer, Options, layout_of_program, offer_of_program};

const BDEV: &str = "
    struct spdk_bdev_io { int type; struct { void *caller_ctx; } internal; };
    int bdev_io_submit(struct spdk_bdev_io *io) { return io->type; }
";

const NVMF: &str = "
    enum spdk_nvmf_tcp_req_state { TCP_REQUEST_STATE_NEW = 1 };
    struct spdk_nvmf_tcp_req { long padding[3]; enum spdk_nvmf_tcp_req_state state; };
    struct spdk_bdev_io;
    int bdev_io_submit(struct spdk_bdev_io *io);
    int nvmf_tcp_req_process(void *transport, struct spdk_nvmf_tcp_req *req) {
        return transport ? bdev_io_submit(transport) : req->state;
    }
";

const MAIN: &str =
    "int nvmf_tcp_req_process(void *, void *); int main(void) { return nvmf_tcp_req_process(0, 0); }";

/// `bin/nvmf_tgt`, `lib/libspdk_nvmf.so`, and `lib/libspdk_bdev.so`, which only the former needs.
struct Build(tempfile::TempDir);

impl Build {
    /// None where there is no compiler.
    fn new(run_path: Option<&str>) -> Option<Build> {
        let build = Build(tempfile::tempdir().unwrap());
        for folder in ["bin", "lib"] {
            std::fs::create_dir(build.path(folder)).unwrap();
        }
        let folder = format!("-L{}", build.path("lib").display());
        let gcc = |source: &str, output: &str, flags: &[&str]| {
            let file = build.path("source.c");
            std::fs::write(&file, source).unwrap();
            let mut gcc = Command::new("gcc");
            gcc.args(["-g", "-O1", "-Wl,--build-id", "-o"]).arg(build.path(output)).arg(&file).args(flags);
            gcc.status().is_ok_and(|status| status.success())
        };
        let shared = ["-shared", "-fPIC"];
        let rpath = run_path.map(|path| format!("-Wl,-rpath,{path}"));
        let mut of_main = vec![folder.as_str(), "-lspdk_nvmf", "-Wl,--allow-shlib-undefined"];
        of_main.extend(rpath.as_deref());
        let done = gcc(BDEV, "lib/libspdk_bdev.so", &shared)
            && gcc(NVMF, "lib/libspdk_nvmf.so", &[shared[0], shared[1], &folder, "-lspdk_bdev"])
            && gcc(MAIN, "bin/nvmf_tgt", &of_main);
        if !done {
            println!("skipped: gcc makes no shared libraries");
        }
        done.then_some(build)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn offer(&self, layout: Option<&Path>) -> Result<Offer, spdk_probes::Error> {
        let options = Options { layout: layout.map(Path::to_owned), ..Options::default() };
        offer_of_program(&self.path("bin/nvmf_tgt"), Side::Target, &options)
    }
}

fn names(offer: &Offer) -> Vec<&str> {
    let mut names: Vec<&str> = offer.build.files.iter().map(|file| file.name.as_str()).collect();
    names.sort_unstable();
    names
}

#[test]
fn libraries_are_found_by_the_run_path_and_beside_the_program() {
    for run_path in [Some("$ORIGIN/../lib"), None] {
        let Some(build) = Build::new(run_path) else { return };
        let offer = build.offer(None).unwrap();
        assert_eq!(names(&offer), ["libspdk_bdev.so", "libspdk_nvmf.so"]);
        for function in ["nvmf_tcp_req_process", "bdev_io_submit"] {
            assert_eq!(offer.build.functions[function].copies.len(), 1, "{function}");
        }
        assert_eq!(offer.build.members["spdk_nvmf_tcp_req.state"].as_ref().unwrap().offset, 24);
    }
}

#[test]
fn a_library_that_is_not_there_is_named() {
    let Some(build) = Build::new(Some("/nowhere")) else { return };
    std::fs::remove_dir_all(build.path("lib")).unwrap();
    let said = build.offer(None).unwrap_err().to_string();
    assert!(said.contains("libspdk_nvmf.so") && said.contains("LD_LIBRARY_PATH"), "{said}");
}

#[test]
fn one_layout_file_serves_all_of_a_program_s_files() {
    let Some(build) = Build::new(None) else { return };
    let whole = build.offer(None).unwrap();
    let layout = layout_of_program(&build.path("bin/nvmf_tgt"), None).unwrap();
    assert_eq!(layout.files(), 2);
    let file = build.path("layout");
    layout.save(&file).unwrap();
    for library in ["lib/libspdk_bdev.so", "lib/libspdk_nvmf.so"] {
        assert!(Command::new("strip").arg(build.path(library)).status().unwrap().success());
    }
    let served = build.offer(Some(&file)).unwrap();
    for (name, function) in &whole.build.functions {
        let served = &served.build.functions[name];
        assert_eq!((&served.copies, served.inlined), (&function.copies, function.inlined), "{name}");
    }
    for member in ["spdk_nvmf_tcp_req.state", "spdk_bdev_io.internal.caller_ctx"] {
        assert!(whole.build.members[member].is_some(), "{member}");
        assert_eq!(served.build.members[member], whole.build.members[member], "{member}");
    }
    let compared = whole.compare(&served);
    assert!(compared.holds && compared.changes.is_empty(), "{compared:#?}");

    // A program of which no file is in it is another build.
    let mut text: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    text["build_id"] = "00".into();
    text["others"][0]["build_id"] = "11".into();
    std::fs::write(&file, text.to_string()).unwrap();
    let said = build.offer(Some(&file)).unwrap_err().to_string();
    assert!(said.contains("made from the build 00"), "{said}");
}
