//! What the tests of the command share.

use std::path::Path;
use std::process::{Command, Stdio};

/// The command, with `libdir` for its library and without other settings of the test's environment.
pub fn uwarp(libdir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uwarp"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("UWARP_")) {
        command.env_remove(name);
    }
    command.env("UWARP_LIBDIR", libdir).env_remove("LD_LIBRARY_PATH").stdin(Stdio::null());
    command
}

/// Compiles with the system's C compiler, for what only a real ELF file shows.
#[track_caller]
pub fn cc(arguments: &[&str], output: &Path, sources: &[&Path]) {
    let status = Command::new("cc").args(arguments).arg("-o").arg(output).args(sources).status();
    let needed = "a C compiler and <infiniband/verbs.h> are needed: scripts/setup build test";
    assert!(status.expect(needed).success(), "{needed}: {arguments:?} {sources:?}");
}
