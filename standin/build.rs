//! Exports the symbol that says "stand-in" from the two programs, so that it is found even in a
//! stripped one.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-bins=-Wl,--export-dynamic-symbol=fabscope_standin_version");
}
