//! Compiles the BPF programs into skeletons and turns `bpf/kernel.h` into Rust types.
#![allow(clippy::expect_used)] // a build script has nobody to return an error to

use libbpf_cargo::SkeletonBuilder;
use std::env;
use std::path::PathBuf;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let shared = env::var("DEP_FABSCOPE_HASH_INCLUDE").expect("run-format's build script tells its headers");
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-changed={shared}");
    for object in ["host", "target", "retransmits"] {
        SkeletonBuilder::new()
            .source(format!("bpf/{object}.bpf.c"))
            .clang_args(["-Wall", "-Werror", "-mcpu=v3", "-I", "bpf", "-I", &shared])
            .build_and_generate(out.join(format!("{object}.skel.rs")))
            .unwrap_or_else(|error| {
                panic!("bpf/{object}.bpf.c does not compile (is clang 14 or newer installed?): {error:#}")
            });
    }
    bindgen::Builder::default()
        .header_contents("wrapper.h", "#include <linux/types.h>\n#include \"bpf/kernel.h\"")
        .clang_arg(format!("-I{shared}"))
        .allowlist_type("kernel_.*")
        .allowlist_var("KERNEL_.*")
        .prepend_enum_name(false)
        .layout_tests(false)
        .use_core()
        .generate()
        .expect("bpf/kernel.h becomes Rust types: is libclang installed?")
        .write_to_file(out.join("kernel.rs"))
        .expect("OUT_DIR can be written");
}
