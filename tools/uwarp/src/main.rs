//! The `uwarp` command: runs unmodified RDMA programs over uwarp, shows its devices, finds what would stop a
//! program, and measures.

#![deny(unsafe_code)]

/// Prints a line to standard output, as `println!`. If it cannot be written, the command ends with an error;
/// silently, if the reader has gone.
macro_rules! say {
    ($($args:tt)*) => { crate::say_line(format_args!($($args)*)) };
}
pub(crate) use say;

mod bench;
mod bundled;
mod cli;
mod devices;
mod doctor;
mod elf;
#[allow(unsafe_code)]
mod exec;
mod files;
mod interfaces;
mod libdir;
mod man;
mod mpi;
mod parse;
mod picture;
mod preload;
mod program;
mod rdma;
mod run;
mod sockets;
mod stat;
mod table;
mod variables;
#[allow(unsafe_code)]
mod verbs;

use std::fmt;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use uwarp_driver::config::without_error_numbers;

fn main() -> ExitCode {
    if rdma::is_meant() {
        return rdma::run();
    }
    let command = match parse::parse() {
        Ok(cli) => cli.command,
        Err(status) => return status,
    };
    match command {
        cli::Command::Run(args) => run::run(&args),
        cli::Command::Mpi(args) => mpi::run(args),
        cli::Command::Devices(args) => devices::run(&args),
        cli::Command::Doctor(args) => doctor::run(&args),
        cli::Command::Stat(args) => stat::run(&args),
        cli::Command::Bench(args) => bench::run(&args),
        cli::Command::BenchEnd(args) => bench::run_end(&args),
        cli::Command::Files(args) => files::fill(&args),
        cli::Command::Man => man::print(),
    }
}

fn say_line(line: fmt::Arguments<'_>) {
    if let Err(e) = writeln!(anstream::stdout(), "{line}") {
        if e.kind() != ErrorKind::BrokenPipe {
            complain(&format_args!("cannot write to standard output: {e}"));
        }
        std::process::exit(1);
    }
}

/// Prints an error of the command itself; all of them have this form.
fn complain(sentence: &dyn fmt::Display) {
    anstream::eprintln!("uwarp: {}", without_error_numbers(&sentence.to_string()));
}
