//! `uwarp run --sockets`: preloads the library that makes sockets iWARP's (abi/sockets; docs/sockets.md), and
//! refuses programs that would not see it.

use std::path::{Path, PathBuf};

use crate::elf::Facts;
use crate::program::{self, Caller};
use crate::{preload, run};

/// The preloaded library, beside the other one.
pub const LIBRARY: &str = "libuwarp-sockets.so";

/// The library for a program that the loader will load from `file`; or why the program cannot have it.
pub fn preload(libdir: &Path, file: &Path) -> Result<PathBuf, String> {
    if let Some((found, remedy)) = refusal(file) {
        return Err(format!("--sockets cannot be used for {}: {found}; {remedy}", file.display()));
    }
    preload::find(libdir, LIBRARY)
}

/// Why a program's sockets cannot become iWARP's, and what to do.
pub fn refusal(file: &Path) -> Option<(String, String)> {
    let Ok(Some(facts)) = Facts::read(file) else { return None };
    if facts.go {
        let found = "it is written in Go, which makes system calls without libc";
        return Some((found.to_owned(), "use a program that calls libc".to_owned()));
    }
    if facts.is_static() {
        let found = "it is linked statically, so no library can be preloaded";
        return Some((found.to_owned(), "link it dynamically".to_owned()));
    }
    if let Some(uring) = facts.needed.iter().find(|name| name.starts_with("liburing.so")) {
        let found = format!("it uses io_uring ({uring}), which does without libc's calls");
        return Some((found, "use a build without io_uring".to_owned()));
    }
    program::secure_execution(file, Caller::current()).map(|reason| {
        let found = format!("the loader preloads no library, because {reason}");
        (found, run::secure_remedy(file).to_owned())
    })
}
