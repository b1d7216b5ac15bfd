//! The `UWARP_` variables: which there are, and what is wrong with one. Each is checked as the option that
//! sets it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

use clap::CommandFactory;
use rustix::fs::{Access, AtFlags, CWD, accessat};

use crate::cli::{Cli, LIBDIR_VARIABLE, Switch};
use crate::files;

const PREFIX: &str = "UWARP_";

/// The only variable that the library reads and that has no option.
const WITHOUT_OPTION: &str = "UWARP_PEER";

/// Names that begin so belong to this project's tests and scripts.
const OF_THE_TESTS: [&str; 6] =
    ["UWARP_DIST", "UWARP_DEMO_", "UWARP_MODEL_", "UWARP_SIM_", "UWARP_STRESS_", "UWARP_TEST_"];

/// What is wrong with a variable.
#[derive(Debug)]
pub struct Fault {
    /// It has an effect, and its value is none; otherwise the name is unknown and it has no effect.
    pub invalid: bool,
    pub found: String,
    pub remedy: String,
}

/// The variables of this process, by name. An empty one is as if it were not set.
pub fn set() -> Vec<(String, OsString)> {
    let all = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let mut ours: Vec<_> =
        all.filter(|(name, value)| name.starts_with(PREFIX) && !value.is_empty()).collect();
    ours.sort();
    ours
}

/// What is wrong with this variable, if anything is.
pub fn judge(variable: &str, value: &OsStr) -> Option<Fault> {
    let others = OF_THE_TESTS.iter().any(|start| variable.starts_with(start));
    if others || [LIBDIR_VARIABLE, files::VARIABLE].contains(&variable) {
        return None;
    }
    let invalid = |refusal: &str| {
        let found = format!("{variable}={} is not valid: {refusal}", value.display());
        let remedy = format!("correct it, or unset {variable}");
        Some(Fault { invalid: true, found, remedy })
    };
    if variable == WITHOUT_OPTION {
        let word = value.to_str().unwrap_or_default();
        return match <Switch as clap::ValueEnum>::from_str(word, true) {
            Ok(_) => None,
            Err(_) => invalid("the values are: on, off"),
        };
    }
    let run = Cli::command().find_subcommand("run").cloned().unwrap_or_default();
    let Some(option) = run.get_arguments().find(|option| option.get_env() == Some(OsStr::new(variable)))
    else {
        return Some(unknown(variable));
    };
    let (long, values) = (option.get_long()?.to_owned(), option.get_possible_values());
    let mut word = OsString::from(format!("--{long}="));
    word.push(value);
    let line = [OsStr::new("run"), &word, OsStr::new("--"), OsStr::new("program")];
    // Options fall back to their variables; here only one is checked.
    if let Err(error) = run.mut_args(|option| option.env(None)).try_get_matches_from(line) {
        return match values.is_empty() {
            true => invalid(&explanation(&error.to_string())),
            false => {
                let names: Vec<_> = values.iter().map(|value| value.get_name()).collect();
                invalid(&format!("the values are: {}", names.join(", ")))
            }
        };
    }
    if let Some(reason) = unwritable(variable, value) {
        return invalid(&reason);
    }
    None
}

/// What all of them begin with says nothing about which one is meant.
fn own(variable: &str) -> &str {
    variable.strip_prefix(PREFIX).unwrap_or(variable)
}

fn unknown(variable: &str) -> Fault {
    let run = Cli::command().find_subcommand("run").cloned().unwrap_or_default();
    let options = run.get_arguments().filter_map(|option| option.get_env()?.to_str());
    let names = options.chain([WITHOUT_OPTION, LIBDIR_VARIABLE]);
    let (found, remedy) = (
        format!("there is no setting {variable}, so it has no effect"),
        match nearest(own(variable), names.map(own)) {
            Some(name) => format!("did you mean {PREFIX}{name}?"),
            None => "`uwarp run --help` lists the variables".to_owned(),
        },
    );
    Fault { invalid: false, found, remedy }
}

/// The last part of clap's message: why a value is refused.
fn explanation(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| !line.is_empty());
    let line = lines.collect::<Vec<_>>().join(" ");
    // "invalid value '9-5' for '--port-range <FIRST-LAST>': the first port is above the last".
    match line.split_once(">': ").or_else(|| line.split_once("]': ")) {
        Some((_, reason)) => reason.to_owned(),
        None => line.trim_start_matches("error: ").to_owned(),
    }
}

/// Why the file of `--trace` or `--log-file` cannot be written, if this variable names one. Without this
/// check, the library would notice it only when the program opens the device, and the user would see a line
/// in the log and no trace. The file is not opened: the reader of a FIFO would see its end.
pub fn unwritable(variable: &str, file: &OsStr) -> Option<String> {
    let what = match variable {
        "UWARP_TRACE" if file != "-" => "trace",
        "UWARP_LOG_FILE" if file != "-" => "log",
        _ => return None,
    };
    if file.is_empty() {
        return None;
    }
    let path = std::path::absolute(file).unwrap_or_else(|_| file.into());
    let may_write = |path: &Path| accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS);
    let result = match fs::metadata(&path) {
        Ok(found) if found.is_dir() => Err(rustix::io::Errno::ISDIR),
        Ok(_) => may_write(&path),
        Err(_) => may_write(path.parent().unwrap_or(Path::new("/"))),
    };
    let error = result.err()?;
    Some(format!("cannot write the {what} to {}: {}", path.display(), std::io::Error::from(error)))
}

/// The name that a mistyped one most probably means.
pub fn nearest<'a>(typed: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distances = names.into_iter().map(|name| (distance(typed, name), name));
    let (distance, name) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= 2 && 2 * distance <= name.len().min(typed.len())).then_some(name)
}

/// How many letters must be changed, left out, added or exchanged with the next (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let changed = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut least = changed.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    least = least.min(rows[i - 2][j - 2] + 1);
                }
                least
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(variable: &str, value: &str) -> &'static str {
        match judge(variable, value.as_ref()) {
            None => "good",
            Some(Fault { invalid: true, .. }) => "invalid",
            Some(_) => "unknown",
        }
    }

    #[test]
    fn variables_are_judged_as_options_are() {
        for (variable, value, expected) in [
            ("UWARP_VIEW", "roce", "good"),
            ("UWARP_VIEW", "rxe", "invalid"),
            ("UWARP_MARKERS", "1", "good"),
            ("UWARP_MARKERS", "off", "good"),
            ("UWARP_MARKERS", "perhaps", "invalid"),
            ("UWARP_CRC", "0", "good"),
            ("UWARP_CRC", "2", "invalid"),
            ("UWARP_PORT_RANGE", "9-5", "invalid"),
            ("UWARP_MPA_REVISION", "3", "invalid"),
            ("UWARP_LIBDIR", "/anywhere", "good"),
            ("UWARP_VEIW", "roce", "unknown"),
            ("UWARP_DEVICES", "per-interface", "good"),
            ("UWARP_DEVICES", "all", "invalid"),
            ("UWARP_PEER", "off", "good"),
            ("UWARP_PEER", "perhaps", "invalid"),
            ("UWARP_TRACE", "-", "good"),
            ("UWARP_TRACE", "/no such directory/trace", "invalid"),
            ("UWARP_LOG_FILE", "/tmp/%p.log", "good"),
            ("UWARP_LOG_FILE", "/no such directory/%p.log", "invalid"),
        ] {
            assert_eq!(verdict(variable, value), expected, "{variable}={value}");
        }
        let fault = judge("UWARP_PORT_RANGE", "9-5".as_ref()).unwrap();
        assert_eq!(fault.found, "UWARP_PORT_RANGE=9-5 is not valid: the first port is above the last");
        assert_eq!(judge("UWARP_VEIW", "ib".as_ref()).unwrap().remedy, "did you mean UWARP_VIEW?");
        let far = judge("UWARP_FOO", "1".as_ref()).unwrap().remedy;
        assert_eq!(far, "`uwarp run --help` lists the variables");
    }

    #[test]
    fn the_nearest_name_is_near() {
        let names = ["crc", "as", "port-range", "devices"];
        for (typed, name) in [
            ("as", Some("as")),
            ("CRC", None),
            ("ccr", Some("crc")),
            ("portrange", Some("port-range")),
            ("divcies", Some("devices")),
            ("bogus", None),
            ("x", None),
            // Half of it would be another name.
            ("cat", None),
        ] {
            assert_eq!(nearest(typed, names), name, "{typed}");
        }
    }
}
