//! Are the settings in the environment valid, and do they have an effect?

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::Check;
use crate::libdir::SONAMES;
use crate::variables;

pub fn checks(libdir: Option<&Path>) -> Vec<Check> {
    let mut checks = settings(&variables::set());
    checks.push(loader_path(libdir, env::var_os("LD_LIBRARY_PATH"), env::var_os("LD_PRELOAD")));
    checks
}

/// All variables that are wrong; without one, those that are set.
fn settings(set: &[(String, OsString)]) -> Vec<Check> {
    let name = "settings";
    let faults = set.iter().filter_map(|(variable, value)| variables::judge(variable, value));
    let faults: Vec<_> = faults
        .map(|fault| match fault.invalid {
            true => Check::fail(name, fault.found, fault.remedy),
            false => Check::warn(name, fault.found, fault.remedy),
        })
        .collect();
    if !faults.is_empty() {
        return faults;
    }
    vec![match set.len() {
        0 => Check::ok(name, "no UWARP_ variable is set: all settings have their defaults"),
        _ => {
            let words: Vec<_> =
                set.iter().map(|(name, value)| format!("{name}={}", value.display())).collect();
            Check::ok(name, words.join(" "))
        }
    }]
}

/// Variables that matter for programs that are started without `uwarp run`.
fn loader_path(libdir: Option<&Path>, search: Option<OsString>, preload: Option<OsString>) -> Check {
    let name = "loader";
    if let Some(found) = preloaded(libdir, preload) {
        return Check::fail(name, found, "remove it from LD_PRELOAD");
    }
    let search = search.unwrap_or_default();
    let mut holders = env::split_paths(&search).filter_map(|directory| holds_library(&directory));
    match (holders.next(), libdir) {
        (Some(first), Some(libdir)) if first == libdir => {
            Check::ok(name, "LD_LIBRARY_PATH has uwarp's directory: programs use it without `uwarp run`")
        }
        (Some(first), _) => Check::warn(
            name,
            format!("LD_LIBRARY_PATH finds another libibverbs or librdmacm in {}", first.display()),
            "use `uwarp run`, or put uwarp's directory first in LD_LIBRARY_PATH",
        ),
        (None, _) => Check::ok(name, "LD_LIBRARY_PATH and LD_PRELOAD name no other libibverbs or librdmacm"),
    }
}

/// A finding if `LD_PRELOAD` names a library that would replace ours.
pub fn preloaded(libdir: Option<&Path>, preload: Option<OsString>) -> Option<String> {
    let preload = preload.unwrap_or_default().to_string_lossy().into_owned();
    let library = preload.split([':', ' ']).map(Path::new).find(|entry| {
        entry.file_name().and_then(OsStr::to_str).is_some_and(is_soname)
            && entry.canonicalize().ok().is_none_or(|library| library.parent() != libdir)
    })?;
    Some(format!("LD_PRELOAD names {}, which comes before LD_LIBRARY_PATH", library.display()))
}

fn is_soname(file: &str) -> bool {
    SONAMES.iter().any(|soname| file.starts_with(soname))
}

fn holds_library(directory: &Path) -> Option<PathBuf> {
    SONAMES.iter().any(|soname| directory.join(soname).exists()).then(|| directory.canonicalize().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    /// The worst hid the others, so that a user corrected one at a time.
    #[test]
    fn all_wrong_settings_are_said() {
        let set = [("UWARP_VEIW", "roce"), ("UWARP_VIEW", "rxe"), ("UWARP_CRC", "2"), ("UWARP_STAT", "0")];
        let set: Vec<_> = set.iter().map(|(name, value)| (name.to_string(), value.into())).collect();
        let checks = settings(&set);
        let found: Vec<_> = checks.iter().map(|check| (check.status, check.found.as_str())).collect();
        assert_eq!(
            found,
            [
                (Status::Warn, "there is no setting UWARP_VEIW, so it has no effect"),
                (Status::Fail, "UWARP_VIEW=rxe is not valid: the values are: iwarp, roce, ib"),
                (Status::Fail, "UWARP_CRC=2 is not valid: the values are: on, off"),
            ]
        );
        let set = [("UWARP_STAT".to_owned(), "0".into())];
        assert_eq!(settings(&set)[0].found, "UWARP_STAT=0");
    }

    #[test]
    fn the_first_directory_with_the_library_decides() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let (ours, other, empty) = (root.join("ours"), root.join("other"), root.join("empty"));
        for directory in [&ours, &other, &empty] {
            std::fs::create_dir(directory).unwrap();
        }
        std::fs::write(ours.join(SONAMES[0]), "").unwrap();
        std::fs::write(other.join(SONAMES[1]), "").unwrap();
        let status = |directories: &[&PathBuf]| {
            loader_path(Some(&ours), Some(env::join_paths(directories).unwrap()), None).status
        };
        assert_eq!(status(&[]), Status::Ok);
        assert_eq!(status(&[&empty, &ours, &other]), Status::Ok);
        assert_eq!(status(&[&empty, &other, &ours]), Status::Warn);
        let preload = Some("/usr/lib/libibverbs.so.1.14.44.0 /x.so".into());
        assert_eq!(loader_path(Some(&ours), None, preload).status, Status::Fail);
    }
}
