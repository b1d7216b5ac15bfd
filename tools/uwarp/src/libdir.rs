//! Where the library is.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::cli::LIBDIR_VARIABLE;

/// The one file of the library.
pub const LIBRARY: &str = "libuwarp.so";
/// The names under which programs load it.
pub const SONAMES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
/// Names that programs with their own loading code may try first, if a development package is installed.
pub const DEVELOPMENT_NAMES: [&str; 2] = ["libibverbs.so", "librdmacm.so"];

/// Why no library directory can be used, and what to do about it.
#[derive(Debug)]
pub struct NoLibrary {
    pub found: String,
    pub remedy: String,
}

impl fmt::Display for NoLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. {}", self.found, self.remedy)
    }
}

/// This command's own file. A sandbox may have no /proc; then it is what the kernel was told to run.
pub fn executable() -> io::Result<PathBuf> {
    env::current_exe()
        .or_else(|_| Ok(PathBuf::from(OsStr::from_bytes(rustix::param::linux_execfn().to_bytes()))))
        .and_then(|path| path.canonicalize())
}

/// The directory that must be first in `LD_LIBRARY_PATH`: `UWARP_LIBDIR`, or `../lib/uwarp` seen from the
/// executable.
pub fn find() -> Result<PathBuf, NoLibrary> {
    let no_library = |found: String, remedy: &str| Err(NoLibrary { found, remedy: remedy.to_owned() });
    let directory = match env::var_os(LIBDIR_VARIABLE).filter(|value| !value.is_empty()) {
        Some(value) => PathBuf::from(value),
        None => match executable() {
            Ok(executable) => {
                executable.parent().and_then(Path::parent).unwrap_or(Path::new("/")).join("lib/uwarp")
            }
            Err(error) => {
                return no_library(format!("cannot find my own executable: {error}"), "Set UWARP_LIBDIR");
            }
        },
    };
    let directory = match directory.canonicalize() {
        Ok(directory) if directory.join(SONAMES[0]).exists() => directory,
        _ => {
            return no_library(
                format!("there is no {} in {}", SONAMES[0], directory.display()),
                "Build with `make` and use dist/bin/uwarp, or set UWARP_LIBDIR to the directory that has it",
            );
        }
    };
    // The loader splits LD_LIBRARY_PATH at `:` and `;` and expands `$`; they cannot be quoted.
    if directory.as_os_str().as_encoded_bytes().iter().any(|byte| b":;$".contains(byte)) {
        return no_library(
            format!("the loader cannot search {}: its path has a `:`, `;` or `$` in it", directory.display()),
            "Move uwarp to a directory without them",
        );
    }
    Ok(directory)
}
