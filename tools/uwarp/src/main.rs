//! The `uwarp` command: runs unmodified RDMA programs over uwarp, shows its devices, finds what would stop a
//! program, and measures.

#![deny(unsafe_code)]

mod bench;
mod cli;
mod devices;
mod doctor;
mod elf;
mod interfaces;
mod libdir;
mod man;
mod program;
mod run;
mod stat;
#[allow(unsafe_code)]
mod verbs;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match cli::Cli::parse().command {
        cli::Command::Run(args) => run::run(&args),
        cli::Command::Devices(args) => devices::run(&args),
        cli::Command::Doctor(args) => doctor::run(&args),
        cli::Command::Stat(args) => stat::run(&args),
        cli::Command::Bench(args) => bench::run(&args),
        cli::Command::BenchEnd(args) => bench::run_end(&args),
        cli::Command::Man => man::print(),
    }
}

/// Prints an error of the command itself, in the form all of them have.
fn complain(sentence: &dyn std::fmt::Display) {
    anstream::eprintln!("uwarp: {sentence}");
}
