//! Which programs look at the device's files below /sys and /dev (docs/adr/036), and which could see them.
//! The program is not run: its ELF file says which libraries it is linked to and which paths it names.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use serde::Serialize;

use crate::elf::Facts;
use crate::program::{self, Caller};
use crate::rdma;

/// What the files are to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// It looks at them, or starts or loads what may.
    Wanted,
    /// Nothing shows that it looks at them.
    Unused,
    /// It could not see them: the preloaded library stands in libc.
    Unseen,
}

/// The answer and its reason.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Picture {
    #[serde(rename = "use")]
    pub kind: Use,
    pub reason: String,
}

impl fmt::Display for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

/// Paths whose names in a file show that it looks there.
const PATHS: [&str; 2] = ["/sys/class/infiniband", "/dev/infiniband"];
/// The head of what Go's linker writes into each program (debug/buildinfo).
const GO: &str = "\u{1}Go buildinf:";
/// Libraries that look at the files, or load what does.
const LIBRARIES: [(&str, &str); 6] = [
    ("libucp.so", "UCX"),
    ("libuct.so", "UCX"),
    ("libmpi.so", "Open MPI, which loads UCX"),
    ("libmpich.so", "MPICH, which uses UCX"),
    ("libnccl.so", "NCCL"),
    ("librccl.so", "RCCL"),
];
/// Programs that start or load others, which nobody knows in advance. A version may follow: python3.11.
const OPEN: [&str; 17] = [
    "bash", "dash", "sh", "zsh", "ksh", "fish", "busybox", "env", "python", "pypy", "perl", "ruby", "node",
    "julia", "orterun", "mpirun", "mpiexec",
];
/// A program of more bytes is not read to its end: looking at it must cost next to nothing.
const MOST: u64 = 64 << 20;

/// The paths of libraries of RDMA that a file names, and so may open past `LD_LIBRARY_PATH`.
pub fn libraries_by_path(file: &Path) -> Vec<String> {
    let mut bytes = Vec::new();
    if !File::open(file).is_ok_and(|file| file.take(MOST).read_to_end(&mut bytes).is_ok()) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for word in ["/libibverbs", "/librdmacm"] {
        for at in places(&bytes, word.as_bytes()) {
            let is_path = |byte: &u8| byte.is_ascii_graphic() && !b"\"'`<>|;:,=()[]{}$%".contains(byte);
            let before = bytes[..at].iter().rev().take_while(|byte| is_path(byte)).count();
            let after = bytes[at..].iter().take_while(|byte| is_path(byte)).count();
            let path = String::from_utf8_lossy(&bytes[at - before..at + after]).into_owned();
            if path.starts_with('/') && path.contains(".so") && before > 0 && !found.contains(&path) {
                found.push(path);
            }
        }
    }
    found
}

/// Looks at a program: the file that the kernel loads for it.
pub fn of(file: &Path) -> Picture {
    let picture = |kind, reason: String| Picture { kind, reason };
    if let Some(reason) = program::secure_execution(file, Caller::current()) {
        return picture(Use::Unseen, format!("the loader preloads nothing, because {reason}"));
    }
    let Ok(Some(facts)) = Facts::read(file) else {
        return picture(Use::Unused, "it is no ELF file".to_owned());
    };
    if facts.is_static() {
        return picture(Use::Unseen, "it is linked statically and loads no library".to_owned());
    }
    let [go, named @ ..] = words(file);
    if go {
        return picture(Use::Unseen, "it is written in Go, whose system calls bypass libc".to_owned());
    }
    if let Some((_, path)) = named.iter().zip(PATHS).find(|(named, _)| **named) {
        return picture(Use::Wanted, format!("it names {path}"));
    }
    let linked = |(library, _): &&(&str, &str)| facts.needed.iter().any(|needed| needed.starts_with(library));
    if let Some((library, what)) = LIBRARIES.iter().find(linked) {
        return picture(Use::Wanted, format!("it is linked to {library} ({what})"));
    }
    let name = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let name = name.file_name().and_then(OsStr::to_str).unwrap_or_default();
    if name == rdma::NAME {
        return picture(Use::Wanted, "uwarp answers `rdma link` and `rdma dev` from them".to_owned());
    }
    if is_open(name) {
        return picture(
            Use::Wanted,
            format!("{name} starts or loads programs that are not known in advance"),
        );
    }
    picture(
        Use::Unused,
        "it names none of them, and is linked to no library known to look at them".to_owned(),
    )
}

/// Whether it is one of [`OPEN`], by its name.
fn is_open(name: &str) -> bool {
    let rest = |open: &&str| name.strip_prefix(*open);
    OPEN.iter().filter_map(rest).any(|rest| !rest.starts_with(char::is_alphanumeric) || is_version(rest))
}

fn is_version(text: &str) -> bool {
    text.chars().all(|one| one == '.' || one.is_ascii_digit())
}

/// Whether the file contains [`GO`] and each of [`PATHS`].
fn words(file: &Path) -> [bool; 3] {
    let wanted = [GO, PATHS[0], PATHS[1]];
    let mut bytes = Vec::new();
    if File::open(file).is_ok_and(|file| file.take(MOST).read_to_end(&mut bytes).is_ok()) {
        return wanted.map(|word| contains(&bytes, word.as_bytes()));
    }
    [false; 3]
}

fn contains(bytes: &[u8], word: &[u8]) -> bool {
    places(bytes, word).next().is_some()
}

fn places<'a>(bytes: &'a [u8], word: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let mut from = 0;
    std::iter::from_fn(move || {
        while let Some(at) = bytes[from..].iter().position(|byte| Some(byte) == word.first()) {
            let at = from + at;
            from = at + 1;
            if bytes[at..].starts_with(word) {
                return Some(at);
            }
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::process::Command;

    #[test]
    fn shells_and_interpreters_are_known_by_name_and_version() {
        for name in ["sh", "python3.11", "perl5.36.0", "mpiexec.hydra"] {
            assert!(is_open(name), "{name}");
        }
        for name in ["sha256sum", "shutdown", "envsubst", "python3x", "ls", ""] {
            assert!(!is_open(name), "{name}");
        }
    }

    fn compiled(directory: &Path, name: &str, text: &str, flags: &[&str]) -> PathBuf {
        let (source, output) = (directory.join(format!("{name}.c")), directory.join(name));
        std::fs::write(&source, text).unwrap();
        let status = Command::new("cc").arg("-o").arg(&output).arg(&source).args(flags).status();
        assert!(status.expect("cc is needed, as for any build of this project").success(), "{flags:?}");
        output
    }

    #[test]
    fn programs_that_name_a_path_want_the_files_and_static_ones_cannot_see_them() {
        let directory = tempfile::tempdir().unwrap();
        let names = "#include <stdio.h>\nint main(void) { return puts(\"/dev/infiniband/uverbs0\"); }\n";
        let plain = "int main(void) { return 0; }\n";
        let go = "const char build[] = \"\\377\\001Go buildinf:\"; int main(void) { return build[0]; }\n";
        let kind = |name, text, flags: &[&str]| of(&compiled(directory.path(), name, text, flags)).kind;
        assert_eq!(kind("names", names, &[]), Use::Wanted);
        assert_eq!(kind("plain", plain, &[]), Use::Unused);
        assert_eq!(kind("static", names, &["-static"]), Use::Unseen);
        assert_eq!(kind("go", go, &[]), Use::Unseen);
        // A library of the name only.
        compiled(directory.path(), "libucp.so.0", plain, &["-shared", "-fPIC", "-Wl,-soname,libucp.so.0"]);
        let at = format!("-L{}", directory.path().display());
        let linked = compiled(directory.path(), "ucx", plain, &[&at, "-Wl,--no-as-needed", "-l:libucp.so.0"]);
        assert_eq!(of(&linked).kind, Use::Wanted);
        assert!(of(&linked).reason.contains("UCX"));
        assert_eq!(of(Path::new("/bin/sh")).kind, Use::Wanted);
        assert_eq!(of(Path::new("/etc/passwd")).kind, Use::Unused);
    }
}
