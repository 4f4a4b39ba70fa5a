//! Compiles the BPF programs to skeletons and turns `bpf/spdk.h` into Rust types.
#![allow(clippy::expect_used)] // a build script has nobody to return an error to

use std::path::{Path, PathBuf};

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let shared = std::env::var("DEP_FABSCOPE_HASH_INCLUDE").expect("run-format tells where its header is");
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-changed={shared}/fabscope.h");

    // Debian keeps the architecture's kernel headers in a folder that clang does not search for BPF.
    let architecture = std::env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets CARGO_CFG_TARGET_ARCH");
    let multiarch = format!("/usr/include/{architecture}-linux-gnu");
    let mut arguments: Vec<String> = ["-Wall", "-Werror", "-mcpu=v3"].map(str::to_owned).into();
    arguments.push(format!("-I{shared}"));
    if Path::new(&multiarch).is_dir() {
        arguments.extend(["-idirafter".to_owned(), multiarch]);
    }
    for programs in ["target", "host", "identity", "flood", "calibrate"] {
        libbpf_cargo::SkeletonBuilder::new()
            .source(format!("bpf/{programs}.bpf.c"))
            .clang_args(&arguments)
            .build_and_generate(out.join(format!("{programs}.skel.rs")))
            .expect("the BPF programs compile: is clang installed?");
    }

    bindgen::Builder::default()
        .header_contents("wrapper.h", "#include <linux/types.h>\n#include \"bpf/spdk.h\"")
        .clang_arg(format!("-I{shared}"))
        .allowlist_type("spdk_.*_message")
        .allowlist_type("spdk_message")
        .allowlist_type("spdk_in_flight")
        .allowlist_type("spdk_event")
        .allowlist_type("spdk_argument")
        .allowlist_var("SPDK_.*")
        .prepend_enum_name(false)
        .layout_tests(false)
        .use_core()
        .generate()
        .expect("bpf/spdk.h becomes Rust types: is libclang installed?")
        .write_to_file(out.join("spdk.rs"))
        .expect("OUT_DIR can be written");
}
