//! Turns `bpf/fabscope.h` into Rust types and its hash into native code, for the probe crates (feature
//! `bpf`), and tells dependants' build scripts where the header is.
#![allow(clippy::expect_used)] // a build script has nobody to return an error to

fn main() {
    println!("cargo::rerun-if-changed=bpf/fabscope.h");
    println!("cargo::rerun-if-changed=bpf/native.c");
    // A dependant's build script finds the header through DEP_FABSCOPE_HASH_INCLUDE.
    println!(
        "cargo::metadata=include={}/bpf",
        std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR")
    );
    #[cfg(feature = "bpf")]
    generate();
}

#[cfg(feature = "bpf")]
fn generate() {
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindgen::Builder::default()
        .header_contents("wrapper.h", "#include <linux/types.h>\n#include \"bpf/fabscope.h\"")
        .allowlist_type("fab_.*")
        .allowlist_var("FAB_.*")
        .prepend_enum_name(false)
        .derive_default(true)
        .layout_tests(false)
        .use_core()
        .generate()
        .expect("bpf/fabscope.h becomes Rust types: is libclang installed?")
        .write_to_file(out.join("fabscope.rs"))
        .expect("OUT_DIR can be written");
    cc::Build::new().file("bpf/native.c").include("bpf").warnings(true).compile("fabscope_hash");
}
