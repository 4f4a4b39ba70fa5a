//! Boots a kernel of the test bed, runs one command in it and exits with the command's status.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use testbed::{Kernel, Vm};

/// Boots a Debian kernel under QEMU, runs a command in it and exits with its status.
#[derive(Debug, Parser)]
struct Options {
    /// 6.1, 6.12 or newest.
    #[arg(long, default_value = "6.12")]
    kernel: Kernel,
    /// A program to carry, with its libraries: a path (goes to /usr/local/bin) or a name in PATH.
    #[arg(long, value_name = "PROGRAM")]
    program: Vec<PathBuf>,
    /// A program to carry with its debug information.
    #[arg(long, value_name = "PROGRAM")]
    program_with_debug: Vec<PathBuf>,
    /// A file or folder to carry.
    #[arg(long, value_name = "SOURCE:PATH")]
    file: Vec<String>,
    /// A file or folder of the VM to copy into the current folder afterwards.
    #[arg(long, value_name = "PATH")]
    pull: Vec<String>,
    /// Memory in MiB.
    #[arg(long, default_value_t = 1024)]
    memory: u64,
    /// Virtual CPUs.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Seconds that the command may take.
    #[arg(long, default_value_t = 300)]
    timeout: u64,
    /// Count the VM's time in instructions; one CPU.
    #[arg(long)]
    counted_time: bool,
    /// MiB of an emulated NVMe drive to add.
    #[arg(long, value_name = "MIB")]
    nvme_drive: Vec<u64>,
    /// Print the kernel's console too, to standard error.
    #[arg(long)]
    console: bool,
    /// The command, run with `/bin/sh -c`.
    #[arg(required = true, last = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(255)),
        Err(error) => {
            eprintln!("vm: {error:#}");
            ExitCode::from(125)
        }
    }
}

fn run(options: &Options) -> Result<u32> {
    let mut builder = Vm::builder(options.kernel).memory_mb(options.memory).cpus(options.cpus);
    for program in &options.program {
        builder = builder.program(program);
    }
    for program in &options.program_with_debug {
        builder = builder.program_with_debug(program);
    }
    for file in &options.file {
        let (source, to) = file
            .rsplit_once(':')
            .with_context(|| format!("--file {file}: say SOURCE:PATH, as in ./job.fio:/job.fio"))?;
        builder = builder.file(source, to);
    }
    for size in &options.nvme_drive {
        builder = builder.nvme_drive(*size);
    }
    if options.counted_time {
        builder = builder.counted_time();
    }
    let vm = builder.boot()?;
    let output = vm.run(&options.command.join(" "), Duration::from_secs(options.timeout));
    if options.console {
        eprint!("{}", vm.console());
    }
    let output = output?;
    io::stdout().write_all(&output.stdout)?;
    io::stderr().write_all(&output.stderr)?;
    for path in &options.pull {
        vm.pull(path, ".".as_ref())?;
    }
    Ok(output.status)
}
