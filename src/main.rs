//! fabscope, the command: parse, run, map the result to an exit code.
#![allow(unreachable_pub)] // a binary's modules have no outside

mod attach;
mod batch;
mod cli;
mod compare;
mod counting;
mod demo;
mod destination;
mod diagnose;
mod exit;
mod http;
mod live;
mod overhead;
mod pair;
mod price;
mod probe;
mod progress;
mod record;
mod recorder;
mod report;
mod schema;
mod screen;
mod selftest;
mod serve;
mod signals;
mod software;
mod telemetry;
mod terminal;
mod watch;
mod window;
mod workload;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match cli::Cli::parse().command {
        cli::Subcommand::Batch(options) => batch::run(&options),
        cli::Subcommand::Compare(options) => compare::run(&options),
        cli::Subcommand::Diagnose(options) => diagnose::run(&options),
        cli::Subcommand::Demo(options) => demo::run(&options),
        cli::Subcommand::Probe(what) => probe::run(&what),
        cli::Subcommand::Record(what) => record::run(&what),
        cli::Subcommand::Report(options) => report::run(&options),
        cli::Subcommand::Selftest(options) => selftest::run(&options),
        cli::Subcommand::Schema(options) => schema::run(&options),
        cli::Subcommand::Serve(what) => serve::run(&what),
        cli::Subcommand::Watch(what) => watch::run(&what),
    };
    exit::code(result)
}
