//! Libraries of RDMA that come with a program under another name. Python's wheels rename what they bring
//! (`libibverbs-1de1263b.so.1.14.48.0` in `nixl.libs`) and have paths to it of their own, so
//! `LD_LIBRARY_PATH` does not replace it. What is preloaded comes first whatever the name.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::doctor::Check;
use crate::elf::{self, Facts};
use crate::libdir::LIBRARY;
use crate::preload;

/// Names of the libraries behind which a wheel's tool puts a part of their hash.
const RENAMED: [&str; 2] = ["libibverbs-", "librdmacm-"];

/// A bundled library that this program uses, or may use. `path`: as it was named; `file`: what the loader
/// gets.
pub fn of(path: &Path, file: &Path) -> Option<PathBuf> {
    linked(file).or_else(|| of_python(path, file))
}

/// What doctor says of it.
pub fn check(path: &Path, file: &Path, libdir: Option<&Path>) -> Option<Check> {
    let library = of(path, file)?;
    let name = "bundled";
    let found = format!("{} is a libibverbs or librdmacm under another name", library.display());
    Some(match libdir.map(|libdir| preload::find(libdir, LIBRARY)) {
        Some(Err(reason)) => Check::fail(name, format!("{found}, and {reason}"), "remove it, or move uwarp"),
        _ => Check::ok(name, format!("{found}; `uwarp run` preloads uwarp's, which comes first")),
    })
}

fn is_renamed(name: &OsStr) -> bool {
    name.to_str()
        .is_some_and(|name| RENAMED.iter().any(|start| name.starts_with(start)) && name.contains(".so"))
}

/// It is linked to one.
fn linked(file: &Path) -> Option<PathBuf> {
    let facts = Facts::read(file).ok().flatten()?;
    let needed = facts.needed.iter().find(|name| is_renamed(OsStr::new(name)))?;
    let places = facts.rpath.iter().map(|entry| elf::expand_origin(entry, file).join(needed));
    Some(places.into_iter().find(|place| place.exists()).unwrap_or_else(|| needed.into()))
}

/// Modules of an interpreter may bring one. Which of them a program imports is not known, so all are looked
/// at: those of the interpreter, of its virtual environment and of the user, and `PYTHONPATH`.
fn of_python(path: &Path, file: &Path) -> Option<PathBuf> {
    let name = file.file_name().and_then(OsStr::to_str)?;
    if !name.starts_with("python") && !name.starts_with("pypy") {
        return None;
    }
    // The interpreter of a virtual environment is a link to another one.
    let prefixes = [path, file].into_iter().filter_map(|file| Some(file.parent()?.parent()?.to_owned()));
    let user = std::env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
    let roots = prefixes.chain([PathBuf::from("/usr/local"), PathBuf::from("/usr")]).chain(user);
    let libraries = roots.flat_map(|root| entries(&root.join("lib"))).filter(|directory| {
        directory.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python"))
    });
    let packages = libraries.flat_map(|library| ["site-packages", "dist-packages"].map(|d| library.join(d)));
    let named = std::env::var_os("PYTHONPATH").unwrap_or_default();
    let named: Vec<_> = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty()).collect();
    packages.chain(named).find_map(|packages| in_packages(&packages))
}

/// `auditwheel repair` puts libraries into `NAME.libs`, beside the module.
fn in_packages(packages: &Path) -> Option<PathBuf> {
    let own = |path: &PathBuf| path.extension() == Some(OsStr::new("libs"));
    let mut libraries = entries(packages).into_iter().filter(own).flat_map(|libs| entries(&libs));
    libraries.find(|library| library.file_name().is_some_and(is_renamed))
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut entries: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_wheels_are_found_beside_their_modules() {
        let directory = tempfile::tempdir().unwrap();
        let libs = directory.path().join("nixl.libs");
        assert_eq!(in_packages(directory.path()), None);
        fs::create_dir(&libs).unwrap();
        fs::write(libs.join("libnuma-123.so.1"), "").unwrap();
        assert_eq!(in_packages(directory.path()), None);
        let library = libs.join("libibverbs-1de1263b.so.1.14.48.0");
        fs::write(&library, "").unwrap();
        assert_eq!(in_packages(directory.path()), Some(library));
    }
}
