//! Is the library there, is it complete, and does it work?

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Check;
use crate::elf::Facts;
use crate::libdir::{self, DEVELOPMENT_NAMES, LIBRARY, NoLibrary, SONAMES};
use crate::variables;

/// The table from which the library is linked: its version nodes are in brackets, one on a line.
const SYMBOLS: &str = include_str!("../../../../abi/symbols.txt");

const REBUILD: &str = "build it again: make clean && make";

pub fn checks(libdir: &Result<PathBuf, NoLibrary>) -> Vec<Check> {
    match libdir {
        Err(reason) => vec![Check::fail("library", reason.found.clone(), reason.remedy.clone())],
        Ok(libdir) => vec![files(libdir), versions(libdir), device()],
    }
}

/// All names are links to one file: the loader then loads it once, under the name that is used first.
fn files(libdir: &Path) -> Check {
    let name = "library";
    let library = libdir.join(LIBRARY);
    let Ok(target) = library.canonicalize() else {
        return Check::fail(name, format!("there is no {}", library.display()), REBUILD);
    };
    let astray = |names: &[&'static str]| {
        names.iter().find(|name| libdir.join(name).canonicalize().ok() != Some(target.clone())).copied()
    };
    if let Some(link) = astray(&SONAMES) {
        return Check::fail(
            name,
            format!("{} is not a link to {LIBRARY}", libdir.join(link).display()),
            REBUILD,
        );
    }
    if let Some(link) = astray(&DEVELOPMENT_NAMES) {
        let found = format!("{} is not a link to {LIBRARY}", libdir.join(link).display());
        return Check::warn(name, found, format!("some programs load that name first; {REBUILD}"));
    }
    let size = fs::metadata(&target).map_or(0, |file| file.len());
    Check::ok(
        name,
        format!("{} ({} KiB), under the names of libibverbs and librdmacm", target.display(), size / 1024),
    )
}

fn versions(libdir: &Path) -> Check {
    let name = "versions";
    let library = libdir.join(LIBRARY);
    let versions = match Facts::read(&library) {
        Ok(Some(facts)) => facts.versions,
        Ok(None) => {
            return Check::fail(name, format!("{} is not a shared library", library.display()), REBUILD);
        }
        Err(error) => {
            return Check::fail(name, format!("cannot read {}: {error}", library.display()), REBUILD);
        }
    };
    let wanted = wanted_versions();
    let missing: Vec<_> =
        wanted.iter().filter(|wanted| !versions.iter().any(|version| version == *wanted)).copied().collect();
    match missing[..] {
        [] => Check::ok(
            name,
            format!("all {} symbol versions of libibverbs and librdmacm are defined", wanted.len()),
        ),
        _ => Check::fail(name, format!("the library does not define {}", missing.join(", ")), REBUILD),
    }
}

fn wanted_versions() -> Vec<&'static str> {
    SYMBOLS.lines().filter_map(|line| line.trim().strip_prefix('[')?.split([' ', ']']).next()).collect()
}

/// Runs the library in a separate process, so that a crash or hang is a finding and does not end this
/// command.
fn device() -> Check {
    let name = "device";
    let report = "please report it, with what UWARP_LOG=debug uwarp devices prints";
    // Wrong settings are a finding of their own.
    let judged = variables::set().into_iter();
    let wrong =
        judged.filter(|(name, value)| variables::judge(name, value).is_some_and(|fault| fault.invalid));
    let child = libdir::executable().and_then(|me| {
        let mut devices = Command::new(me);
        wrong.for_each(|(name, _)| _ = devices.env_remove(name));
        devices
            .args(["devices", "--json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    });
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            let remedy = match error.kind() {
                ErrorKind::WouldBlock => {
                    "no process is left below a limit: `ulimit -u`, pids.max of the control group, or \
                     `sysctl kernel.threads-max kernel.pid_max`"
                }
                _ => "run it by hand",
            };
            return Check::fail(name, format!("cannot start `uwarp devices`: {error}"), remedy);
        }
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Ok(None) | Err(_) => {
                // It may have ended already.
                let _ = child.kill();
                let _ = child.wait();
                return Check::fail(name, "the library did not list its devices within 10 seconds", report);
            }
        }
    };
    let (mut answer, mut complaint) = (String::new(), String::new());
    let read = child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut answer));
    if let Some(mut pipe) = child.stderr.take() {
        // For display only.
        let _ = pipe.read_to_string(&mut complaint);
    }
    if !status.success() || !matches!(read, Some(Ok(_))) {
        if let Some((found, remedy)) = limit_reached(&complaint) {
            return Check::fail(name, format!("the library {found}"), remedy);
        }
        let last = complaint.lines().last().unwrap_or("it printed nothing").trim_start_matches("uwarp: ");
        return Check::fail(name, format!("`uwarp devices` ended with {status}: {last}"), report);
    }
    shown(name, &answer).unwrap_or_else(|| Check::fail(name, "the library shows no device", report))
}

/// What the library logs when a limit of the system keeps it from starting, and the limit.
fn limit_reached(complaint: &str) -> Option<(&str, &str)> {
    let line = complaint.lines().find_map(|line| line.strip_prefix("uwarp: "))?;
    line.get(line.find("cannot start: ")?..)?.split_once("; ")
}

fn shown(name: &'static str, answer: &str) -> Option<Check> {
    let answer: serde_json::Value = serde_json::from_str(answer).ok()?;
    let devices = answer.get("devices")?.as_array()?;
    let words = |device: &serde_json::Value| {
        let view = device.get("view").and_then(|view| view.as_str()).unwrap_or("no");
        let gid = device
            .pointer("/ports/0/gids/0/address")
            .and_then(|address| address.as_str())
            .unwrap_or("no address");
        Some(format!("{} ({view} view, {gid})", device.get("name")?.as_str()?))
    };
    let found: Vec<_> = devices.iter().filter_map(words).collect();
    (!found.is_empty()).then(|| Check::ok(name, format!("programs see {}", found.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_that_the_library_names_is_the_remedy() {
        let log = "uwarp: cannot start: Try again (os error 11); no thread: `ulimit -u`\n\
                   uwarp: ibv_open_device says: Cannot allocate memory (os error 12)\n";
        assert_eq!(
            limit_reached(log),
            Some(("cannot start: Try again (os error 11)", "no thread: `ulimit -u`"))
        );
        assert_eq!(limit_reached("cannot start: x; y\n"), None);
    }

    #[test]
    fn versions_come_from_the_table_of_symbols() {
        let versions = wanted_versions();
        for version in ["IBVERBS_1.0", "IBVERBS_1.18", "IBVERBS_PRIVATE_34", "RDMACM_1.0", "RDMACM_1.5"] {
            assert_eq!(
                versions.iter().filter(|node| **node == version).count(),
                1,
                "{version} in {versions:?}"
            );
        }
    }
}
