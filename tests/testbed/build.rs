//! Compiles the program that runs inside the VM, statically and without any dependency, so that the
//! library can carry it wherever it is used.

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=agent/agent.rs");
    println!("cargo::rerun-if-changed=src/wire.rs");
    let out = PathBuf::from(env::var("OUT_DIR")?).join("testbed-agent");
    let status = Command::new(env::var("RUSTC")?)
        .args(["--edition", "2024", "--crate-name", "testbed_agent"])
        .args(["--crate-type", "bin", "-C", "opt-level=2"])
        .args(["-C", "target-feature=+crt-static", "-C", "strip=symbols"])
        .args(["--target", "x86_64-unknown-linux-gnu", "-o"])
        .arg(&out)
        .arg("agent/agent.rs")
        .status()?;
    if !status.success() {
        return Err("the VM's agent (agent/agent.rs) did not compile; rustc said why above".into());
    }
    println!("cargo::rustc-env=TESTBED_AGENT={}", out.display());
    Ok(())
}
