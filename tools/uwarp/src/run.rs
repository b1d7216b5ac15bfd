//! `uwarp run`: sets the environment up and becomes the program.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::bundled;
use crate::cli::{Files, RunArgs, View};
use crate::complain;
use crate::doctor::settings;
use crate::elf::{self, Facts, Flaw};
use crate::exec::exec;
use crate::files;
use crate::libdir::{self, LIBRARY, SONAMES};
use crate::picture::{self, Use};
use crate::program::{self, Caller};
use crate::{preload, sockets, variables};

/// Exit status when `uwarp run` itself fails, as in env(1) and nice(1); 126 and 127 are about the program.
pub const OWN_FAILURE: u8 = 125;

/// Every queue pair holds a descriptor. Containers may set a hard limit of a thousand million. Programs that
/// close every descriptor below the soft limit would then take minutes to start; this many are enough.
pub const DESCRIPTORS_WANTED: u64 = 1 << 20;

/// Does not return if the program starts.
pub fn run(args: &RunArgs) -> ExitCode {
    run_with(args, Vec::new())
}

/// The same with more variables for the program.
pub fn run_with(args: &RunArgs, more: Vec<(&'static str, OsString)>) -> ExitCode {
    let Some(name) = args.program.first() else {
        complain(&"no program given");
        return ExitCode::from(OWN_FAILURE);
    };
    let libdir = match libdir::find() {
        Ok(directory) => directory,
        Err(reason) => {
            complain(&reason);
            return ExitCode::from(OWN_FAILURE);
        }
    };
    let path = match program::find(name) {
        Ok(path) => path,
        Err(reason) => {
            complain(&format_args!("{reason}; {}", reason.remedy()));
            return ExitCode::from(reason.exit_status());
        }
    };
    let file = program::behind_script(&path);
    for warning in warnings(&file, &libdir) {
        complain(&format_args!("warning: {warning}"));
    }
    let options = args.options.environment();
    if let Some(reason) = options.iter().find_map(|(name, file)| variables::unwritable(name, file)) {
        complain(&reason);
        return ExitCode::from(OWN_FAILURE);
    }
    let mut environment = args.device.environment();
    let (shown, why) = files_shown(args.options.files, &file);
    if shown {
        match files::make(&libdir, &environment) {
            Ok(more) => environment.extend(more),
            Err(reason) if args.options.files == Some(Files::On) => {
                complain(&reason);
                return ExitCode::from(OWN_FAILURE);
            }
            // With auto: most programs do not need them.
            Err(reason) => complain(&format_args!(
                "warning: {reason}. The program does not see the device below /sys and /dev ({why})"
            )),
        }
    }
    if args.options.sockets.is_some() {
        match sockets::preload(&libdir, &file) {
            Ok(library) => preload::add(&mut environment, &library),
            Err(reason) => {
                complain(&reason);
                return ExitCode::from(OWN_FAILURE);
            }
        }
    }
    if let Some(library) = bundled::of(&path, &file) {
        preload_before(&library, &libdir, &mut environment, args.verbose);
    }
    if args.verbose {
        complain(&format_args!(
            "{} sees the device as {}; the device's files below /sys and /dev {}: {why}",
            path.display(),
            args.device.view.unwrap_or(View::Roce).name(),
            if shown { "are shown" } else { "are not shown" },
        ));
    }
    // Beside the files stand commands that answer for the device.
    let own = environment.iter().find(|(name, _)| *name == "PATH");
    let path = own.and_then(|(_, places)| program::find_in(name, places).ok()).unwrap_or(path);
    raise_descriptor_limit();
    environment.extend(options);
    environment.extend(more);
    environment.push(("LD_LIBRARY_PATH", library_path(&libdir, env::var_os("LD_LIBRARY_PATH"))));
    let error = exec(&path, &args.program, &environment, !elf::is_elf(&file));
    complain(&format_args!("cannot execute {}: {error}{}", path.display(), reason(&path, &file)));
    ExitCode::from(126)
}

/// What is preloaded comes before a library of any name.
fn preload_before(
    bundled: &Path,
    libdir: &Path,
    environment: &mut Vec<(&'static str, OsString)>,
    verbose: bool,
) {
    let bundled = bundled.display();
    match preload::find(libdir, LIBRARY) {
        Ok(ours) => preload::add(environment, &ours),
        Err(reason) => complain(&format_args!("warning: {bundled} is used instead: {reason}")),
    }
    if verbose {
        complain(&format_args!("the library is preloaded, because of {bundled}"));
    }
}

/// Whether the program sees the device's files, and why.
fn files_shown(wanted: Option<Files>, file: &Path) -> (bool, String) {
    match wanted {
        None => {
            (false, "--files is off by default; `uwarp doctor` says if the program needs them".to_owned())
        }
        Some(Files::On) => (true, "--files on".to_owned()),
        Some(Files::Off) => (false, "--files off".to_owned()),
        Some(Files::Auto) => {
            let picture = picture::of(file);
            (picture.kind == Use::Wanted, picture.reason)
        }
    }
}

/// Why the kernel refused `path`, for which it would have loaded `file`, and what to do.
fn reason(path: &Path, file: &Path) -> String {
    match Flaw::of(file) {
        Ok(Some(flaw)) => format!(". {} {flaw}; {}", file.display(), flaw.remedy()),
        _ => match program::broken_first_line(path) {
            Some((found, remedy)) => format!(": {found}; {remedy}"),
            None => format!(". `uwarp doctor -- {}` shows more", path.display()),
        },
    }
}

/// The library directory in front of the inherited entries, without an empty entry: that would mean the
/// current directory.
pub fn library_path(libdir: &Path, inherited: Option<OsString>) -> OsString {
    let mut value = libdir.as_os_str().to_owned();
    for entry in env::split_paths(&inherited.unwrap_or_default()) {
        if !entry.as_os_str().is_empty() && entry != libdir {
            value.push(":");
            value.push(entry);
        }
    }
    value
}

/// Raises the soft limit as far as the hard one allows; never lowers it.
pub fn raise_descriptor_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.unwrap_or(u64::MAX).min(DESCRIPTORS_WANTED);
    if current.is_some_and(|soft| soft < wanted) {
        // A refusal leaves the limit as it was; many programs never need more.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    }
}

/// Reasons for which the program would not use the library, and the loader would not say so.
fn warnings(file: &Path, libdir: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(reason) = program::secure_execution(file, Caller::current()) {
        warnings.push(format!(
            "the loader ignores LD_LIBRARY_PATH for {}, because {reason}; {}",
            file.display(),
            secure_remedy(file)
        ));
    } else if let Some(reason) = program::drops_environment(file) {
        warnings.push(format!("{reason}; {}", secure_remedy(file)));
    }
    if let Some(found) = settings::preloaded(Some(libdir), env::var_os("LD_PRELOAD")) {
        warnings.push(format!("{found}. Remove it from LD_PRELOAD"));
    }
    if let Ok(Some(flaw @ Flaw::CutShort { .. })) = Flaw::of(file) {
        warnings.push(format!("{} {flaw}; {}", file.display(), flaw.remedy()));
    }
    let Ok(Some(facts)) = Facts::read(file) else { return warnings };
    if let Some((found, remedy)) = unlike_library(&facts, libdir) {
        warnings.push(format!("{} {found}, so it does not load it; {remedy}", file.display()));
    }
    if facts.is_static() {
        warnings.push(format!(
            "{} is linked statically, so it does not load the library. Link it against the shared libibverbs",
            file.display()
        ));
    }
    if let Some(other) = rpath_to_other_library(file, &facts, libdir) {
        warnings.push(format!(
            "{} has an RPATH that leads to {} before LD_LIBRARY_PATH is searched. Remove it: \
             patchelf --remove-rpath {}",
            file.display(),
            other.display(),
            file.display()
        ));
    }
    warnings
}

/// What to do about a program that gains rights.
pub fn secure_remedy(file: &Path) -> &'static str {
    match file.file_name().and_then(OsStr::to_str) {
        Some("sudo" | "su" | "doas" | "pkexec") => "use the other order: sudo uwarp run -- PROGRAM",
        _ => "run a copy of it: cp drops these rights, and RDMA over uwarp needs none",
    }
}

/// For a program that this machine can run, but that is of another kind than the library: what is wrong, and
/// what to do.
pub fn unlike_library(facts: &Facts, libdir: &Path) -> Option<(String, String)> {
    let library = Facts::read(&libdir.join(LIBRARY)).ok()??;
    if library.same_kind(facts) {
        return None;
    }
    let remedy = match facts.bits {
        // The structures of the C interface are those of 64 bits (abi/types); it cannot be built for fewer.
        32 => {
            format!("build it for {}: there is no uwarp for 32-bit programs", library.processor())
        }
        _ => "build both for the same processor".to_owned(),
    };
    Some((format!("is for {}, and the library is for {}", facts.processor(), library.processor()), remedy))
}

/// The library that an RPATH leads to, if it is not ours.
pub fn rpath_to_other_library(file: &Path, facts: &Facts, libdir: &Path) -> Option<std::path::PathBuf> {
    facts
        .rpath
        .iter()
        .flat_map(|entry| SONAMES.map(|soname| elf::expand_origin(entry, file).join(soname)))
        .find(|library| library.canonicalize().is_ok_and(|library| library.parent() != Some(libdir)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_path_begins_with_ours_and_gains_no_empty_entry() {
        for (inherited, expected) in [
            (None, "/u"),
            (Some(""), "/u"),
            (Some("/a:/b"), "/u:/a:/b"),
            (Some(":/a:"), "/u:/a"),
            (Some("/a:/u"), "/u:/a"),
        ] {
            assert_eq!(library_path("/u".as_ref(), inherited.map(OsString::from)), expected, "{inherited:?}");
        }
    }

    #[test]
    fn rpath_matters_only_where_it_holds_another_library() {
        let directory = tempfile::tempdir().unwrap();
        let (ours, other, empty) =
            (directory.path().join("u"), directory.path().join("o"), directory.path().join("e"));
        for path in [&ours, &other, &empty] {
            std::fs::create_dir(path).unwrap();
        }
        std::fs::write(ours.join("libuwarp.so"), "").unwrap();
        std::os::unix::fs::symlink("libuwarp.so", ours.join(SONAMES[0])).unwrap();
        std::fs::write(other.join(SONAMES[1]), "").unwrap();
        let found = |entries: &[&Path]| {
            let rpath = entries.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
            let facts = Facts { rpath, ..Default::default() };
            rpath_to_other_library("/bin/sh".as_ref(), &facts, &ours.canonicalize().unwrap())
        };
        assert_eq!(found(&[&ours, &empty]), None);
        assert_eq!(found(&[&empty, &other]), Some(other.join(SONAMES[1])));
    }
}
