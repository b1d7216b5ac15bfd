//! Preloaded libraries.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

const VARIABLE: &str = "LD_PRELOAD";

/// A preloaded library of this directory.
pub fn find(libdir: &Path, name: &str) -> Result<PathBuf, String> {
    let library = libdir.join(name);
    if !library.exists() {
        return Err(format!("there is no {}", library.display()));
    }
    // The loader splits LD_PRELOAD at both, and they cannot be quoted. (No directory of ours has a colon.)
    if library.as_os_str().as_encoded_bytes().contains(&b' ') {
        return Err(format!(
            "the loader cannot preload {}: its path has a space in it. Move uwarp to a directory without one",
            library.display()
        ));
    }
    Ok(library)
}

/// Puts a library in front of those that the program's environment preloads already.
pub fn add(variables: &mut Vec<(&'static str, OsString)>, library: &Path) {
    let before = match variables.iter().position(|(name, _)| *name == VARIABLE) {
        Some(at) => Some(variables.remove(at).1),
        None => env::var_os(VARIABLE),
    };
    variables.push((VARIABLE, in_front(library, before)));
}

/// The library in front of what was there, once.
fn in_front(library: &Path, inherited: Option<OsString>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    for entry in inherited.unwrap_or_default().as_encoded_bytes().split(|byte| b": ".contains(byte)) {
        if !entry.is_empty() && entry != library.as_os_str().as_encoded_bytes() {
            value.push(":");
            value.push(String::from_utf8_lossy(entry).as_ref());
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_preloaded_once_and_first() {
        let library = Path::new("/u/a.so");
        for (inherited, expected) in [
            (None, "/u/a.so"),
            (Some(""), "/u/a.so"),
            (Some("/b.so /c.so"), "/u/a.so:/b.so:/c.so"),
            (Some("/u/a.so:/b.so"), "/u/a.so:/b.so"),
        ] {
            assert_eq!(in_front(library, inherited.map(OsString::from)), expected, "{inherited:?}");
        }
    }

    #[test]
    fn both_libraries_can_be_preloaded() {
        let mut variables = vec![(VARIABLE, "/u/b.so".into()), ("OTHER", "".into())];
        add(&mut variables, Path::new("/u/a.so"));
        assert_eq!(variables, [("OTHER", "".into()), (VARIABLE, OsString::from("/u/a.so:/u/b.so"))]);
    }
}
