//! Are the settings in the environment valid, and do they have an effect?

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::CommandFactory;

use super::Check;
use crate::cli::{Cli, LIBDIR_VARIABLE};
use crate::files;
use crate::libdir::SONAMES;

/// The only variable that the library reads and that has no option.
const WITHOUT_OPTION: &str = "UWARP_PEER";

pub fn checks(libdir: Option<&Path>) -> Vec<Check> {
    let variables = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    vec![
        settings(variables.filter(|(name, _)| name.starts_with("UWARP_")).collect()),
        loader_path(libdir, env::var_os("LD_LIBRARY_PATH"), env::var_os("LD_PRELOAD")),
    ]
}

/// The worst finding about any variable; if several are equally bad, the first by name.
fn settings(mut variables: Vec<(String, OsString)>) -> Check {
    let name = "settings";
    variables.sort();
    let findings = variables.iter().filter_map(|(variable, value)| judge(name, variable, value));
    // The first of equals; max_by_key returns the last.
    if let Some(worst) = findings.rev().max_by_key(|finding| finding.status) {
        return worst;
    }
    match variables.len() {
        0 => Check::ok(name, "no UWARP_ variable is set: all settings have their defaults"),
        _ => {
            let words: Vec<_> =
                variables.iter().map(|(name, value)| format!("{name}={}", value.display())).collect();
            Check::ok(name, words.join(" "))
        }
    }
}

/// Finds what is wrong with a variable. It is checked as the option that sets it.
fn judge(name: &'static str, variable: &str, value: &OsStr) -> Option<Check> {
    if [LIBDIR_VARIABLE, files::VARIABLE].contains(&variable) {
        return None;
    }
    let refused = |refusal: &str| {
        let found = format!("{variable}={} is not valid: {refusal}", value.display());
        Check::fail(name, found, format!("correct it, or unset {variable}"))
    };
    let neither = || (!is_boolean(value)).then(|| refused("neither on nor off"));
    if variable == WITHOUT_OPTION {
        return neither();
    }
    let run = Cli::command().find_subcommand("run").cloned().unwrap_or_default();
    let Some(option) = run.get_arguments().find(|option| option.get_env() == Some(OsStr::new(variable)))
    else {
        let remedy = "it has no effect; `uwarp run --help` lists the variables";
        return Some(Check::warn(name, format!("there is no setting {variable}"), remedy));
    };
    let long = option.get_long()?.to_owned();
    if !option.get_action().takes_values() {
        return neither();
    }
    let mut word = OsString::from(format!("--{long}="));
    word.push(value);
    let line = [OsStr::new("run"), &word, OsStr::new("--"), OsStr::new("program")];
    // Options fall back to their variables; here only one is checked.
    if let Err(error) = run.mut_args(|option| option.env(None)).try_get_matches_from(line) {
        return Some(refused(&explanation(&error.to_string())));
    }
    None
}

/// clap's message after "error: ".
fn explanation(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()
}

fn is_boolean(value: &OsStr) -> bool {
    value.to_str().is_some_and(|value| {
        ["1", "0", "true", "false", "yes", "no", "on", "off"].contains(&value.to_ascii_lowercase().as_str())
    })
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

    fn settings_of(variables: &[(&str, &str)]) -> Check {
        settings(variables.iter().map(|(name, value)| (name.to_string(), value.into())).collect())
    }

    #[test]
    fn settings_are_judged_as_options_are() {
        for (variable, value, status) in [
            ("UWARP_VIEW", "roce", Status::Ok),
            ("UWARP_VIEW", "rxe", Status::Fail),
            ("UWARP_MARKERS", "1", Status::Ok),
            ("UWARP_MARKERS", "perhaps", Status::Fail),
            ("UWARP_PORT_RANGE", "9-5", Status::Fail),
            ("UWARP_MPA_REVISION", "3", Status::Fail),
            ("UWARP_LIBDIR", "/anywhere", Status::Ok),
            ("UWARP_VEIW", "roce", Status::Warn),
            ("UWARP_DEVICES", "one", Status::Ok),
            ("UWARP_DEVICES", "per-interface", Status::Ok),
            ("UWARP_DEVICES", "all", Status::Fail),
            ("UWARP_PEER", "off", Status::Ok),
            ("UWARP_PEER", "perhaps", Status::Fail),
        ] {
            assert_eq!(settings_of(&[(variable, value)]).status, status, "{variable}={value}");
        }
        let found = settings_of(&[("UWARP_VIEW", "rxe"), ("UWARP_CRC", "on")]).found;
        assert!(found.contains("iwarp, roce, ib"), "{found}");
    }

    /// A warning about one name hid an invalid value of another, and with it the exit status.
    #[test]
    fn the_worst_of_several_settings_is_said() {
        let check = settings_of(&[("UWARP_A", "1"), ("UWARP_VIEW", "rxe"), ("UWARP_VEIW", "roce")]);
        assert_eq!(check.status, Status::Fail, "{}", check.found);
        assert!(check.found.starts_with("UWARP_VIEW=rxe"), "{}", check.found);
        let check = settings_of(&[("UWARP_VIEW", "rxe"), ("UWARP_CRC", "perhaps")]);
        assert!(check.found.starts_with("UWARP_CRC=perhaps"), "{}", check.found);
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
