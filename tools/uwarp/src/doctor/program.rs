//! Will this program load the library?

use std::env;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::Check;
use crate::elf::{Facts, Flaw};
use crate::libdir::{LIBRARY, SONAMES};
use crate::picture::{self, Picture, Use};
use crate::program::{self, Caller};
use crate::{bundled, files, run, sockets};

pub fn checks(name: &OsStr, libdir: Option<&Path>) -> Vec<Check> {
    let path = match program::find(name) {
        Ok(path) => path,
        Err(reason) => return vec![Check::fail("program", reason.to_string(), reason.remedy())],
    };
    let file = program::behind_script(&path);
    if let Some((found, remedy)) = program::broken_first_line(&path) {
        return vec![Check::fail("program", found, remedy)];
    }
    let mut checks = vec![kind(&path, &file, libdir)];
    checks.extend(rights(&file));
    checks.push(sockets(&file));
    checks.extend(script(&path));
    checks.extend(by_path(&path));
    checks.extend(bundled::check(&path, &file, libdir));
    if let Some(libdir) = libdir
        && let Ok(Some(facts)) = Facts::read(&file)
        && let Some(loader) = facts.interpreter.as_deref().filter(|loader| is_glibc(loader))
        // The loader ignores a library of another kind, and would report it as not installed.
        && run::unlike_library(&facts, libdir).is_none()
    {
        checks.push(libraries(&file, &facts, loader, libdir));
    }
    checks.extend([pci(&file), shared_memory(&path, &file)].into_iter().flatten());
    checks.extend([view(&path, &file), shown(&file)]);
    checks
}

/// Which kind of device it wants to see.
fn view(path: &Path, file: &Path) -> Check {
    let name = |path: &Path| path.file_name().and_then(OsStr::to_str).unwrap_or_default().to_owned();
    let (name, links) = (name(path), Facts::read(file).ok().flatten().unwrap_or_default().needed);
    let mpi = links.iter().any(|library| library.starts_with("libmpi"));
    Check::ok(
        "view",
        if mpi || name.starts_with("mpirun") || name.starts_with("mpiexec") {
            "roce, the default; `uwarp mpi -- mpirun ...` sets what the MPI needs, and the ib view for openib"
        } else if name.starts_with("ib_") {
            "roce, the default; --as iwarp if the other end is siw or an iWARP adapter: perftest wants both \
             ends of one kind"
        } else {
            "roce, the default: most programs expect it"
        },
    )
}

/// perftest looks where its adapter is plugged in, by a library that ends the program if it cannot look.
fn pci(file: &Path) -> Option<Check> {
    let links = Facts::read(file).ok().flatten()?.needed;
    let wants = links.iter().any(|library| library.starts_with("libpci.so"));
    let seen = ["/sys/bus/pci", "/proc/bus/pci"].iter().any(|directory| Path::new(directory).is_dir());
    (wants && !seen).then(|| {
        Check::fail(
            "pci",
            "it is linked to libpci, which ends it where neither /sys/bus/pci nor /proc/bus/pci is there",
            "show it one of them: `--ro-bind /sys /sys` of bwrap",
        )
    })
}

/// Over any transport, and also with shared memory switched off.
fn shared_memory(path: &Path, file: &Path) -> Option<Check> {
    let links = Facts::read(file).ok().flatten().unwrap_or_default().needed;
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let launcher = name.ends_with(".mpich") || name.ends_with(".hydra");
    let mpich = launcher || links.iter().any(|library| library.starts_with("libmpich.so"));
    (mpich && !Path::new("/dev/shm").is_dir()).then(|| {
        Check::fail(
            "shm",
            "MPICH makes a file for its ranks in /dev/shm, and there is none",
            "mount it: `--tmpfs /dev/shm` of bwrap",
        )
    })
}

/// What `uwarp run` shows it below /sys and /dev.
fn shown(file: &Path) -> Check {
    let name = "files";
    let Picture { kind, reason } = picture::of(file);
    match kind {
        Use::Wanted => match files::home() {
            Ok(_) => {
                Check::ok(name, format!("`uwarp run --files auto` shows it the device's files: {reason}"))
            }
            Err(why) => {
                let (why, remedy) = why.split_once(". ").unwrap_or((&why, "set XDG_RUNTIME_DIR"));
                Check::warn(
                    name,
                    format!("the device's files cannot be shown to it, and {reason}: {why}"),
                    remedy,
                )
            }
        },
        Use::Unused => {
            Check::ok(name, format!("`uwarp run --files auto` does not show it the device's files: {reason}"))
        }
        Use::Unseen => Check::warn(
            name,
            format!("it cannot see the device's files below /sys and /dev: {reason}"),
            "ignore this if it only calls verbs",
        ),
    }
}

/// Can the loader load shared libraries for it, and are they of the same kind as our library?
fn kind(path: &Path, file: &Path, libdir: Option<&Path>) -> Check {
    let name = "program";
    let shown = match path == file {
        true => path.display().to_string(),
        false => format!("{} (a script for {})", path.display(), file.display()),
    };
    if let Ok(Some(flaw)) = Flaw::of(file) {
        return Check::fail(name, format!("{shown} {flaw}"), flaw.remedy());
    }
    let facts = match Facts::read(file) {
        Ok(Some(facts)) => facts,
        Ok(None) => {
            return Check::fail(
                name,
                format!("{shown} is neither an ELF program nor a script"),
                "check the file",
            );
        }
        // Its user may run it, and not look into it.
        Err(error) if error.kind() == ErrorKind::PermissionDenied && may_be_run(file) => {
            return Check::warn(
                name,
                format!("cannot look into {shown}: {error}"),
                "a static program loads no library; a line of uwarp's with --log info shows that it is none",
            );
        }
        Err(error) => {
            return Check::fail(
                name,
                format!("cannot read {shown}: {error}"),
                "check the file and its permissions",
            );
        }
    };
    if let Some((found, remedy)) = libdir.and_then(|libdir| run::unlike_library(&facts, libdir)) {
        return Check::fail(name, format!("{shown} {found}"), remedy);
    }
    if facts.is_static() {
        let remedy = "link it against the shared libibverbs";
        return Check::fail(name, format!("{shown} is linked statically and loads no library"), remedy);
    }
    if let Some(loader) = facts.interpreter.as_deref().filter(|loader| !is_glibc(loader)) {
        let found = format!("{shown} uses the loader {}; the library is built for glibc", loader.display());
        return Check::fail(name, found, "build the program for glibc");
    }
    Check::ok(name, format!("{shown}, {} bit, dynamically linked", facts.bits))
}

fn may_be_run(file: &Path) -> bool {
    rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok()
}

/// What a script does to the variable that leads to the library.
fn script(path: &Path) -> Option<Check> {
    let line = program::resets_library_path(path)?;
    Some(Check::warn(
        "script",
        format!(
            "{} sets LD_LIBRARY_PATH anew, so what it starts does not find the library: {line}",
            path.display()
        ),
        "keep what is there (LD_LIBRARY_PATH=DIRECTORY:$LD_LIBRARY_PATH), or write `uwarp run --` into the \
         script, in front of the program",
    ))
}

/// A library that is opened by its path is not looked for.
fn by_path(path: &Path) -> Option<Check> {
    let named = picture::libraries_by_path(path);
    let there = named.iter().find(|library| Path::new(library).exists())?;
    Some(Check::warn(
        "bundled",
        format!("{} names {there}, which it may open by this path, past uwarp's library", path.display()),
        "let that file be a link to uwarp's library of this name, or remove it",
    ))
}

fn is_glibc(loader: &Path) -> bool {
    loader
        .file_name()
        .and_then(OsStr::to_str)
        .is_some_and(|name| name.starts_with("ld-linux") || name.starts_with("ld64"))
}

/// Can `uwarp run --sockets` do anything for it?
fn sockets(file: &Path) -> Check {
    match sockets::refusal(file) {
        Some((found, remedy)) => Check::warn("sockets", format!("no --sockets: {found}"), remedy),
        None if !calls_sockets(file) => Check::ok(
            "sockets",
            "it calls no sockets itself; `uwarp run --sockets` applies to the libraries it loads and the \
             programs it starts",
        ),
        None => Check::ok(
            "sockets",
            "it calls the sockets of libc, so `uwarp run --sockets` can be used; with upgrade rules and \
             --log info, each connection says if it has switched to iWARP, and if not, why",
        ),
    }
}

/// An interpreter's own sockets are in its modules.
fn calls_sockets(file: &Path) -> bool {
    let facts = Facts::read(file).ok().flatten().unwrap_or_default();
    ["socket", "connect", "listen", "accept", "accept4"]
        .iter()
        .any(|call| facts.imports.iter().any(|i| i == call))
}

/// `None` if nothing is wrong, and the program has no loader that could use the variable.
fn rights(file: &Path) -> Option<Check> {
    let name = "rights";
    let ignored = program::secure_execution(file, Caller::current())
        .map(|reason| format!("the loader ignores LD_LIBRARY_PATH, because {reason}"));
    match ignored.or_else(|| program::drops_environment(file)) {
        Some(found) => Some(Check::fail(name, found, run::secure_remedy(file))),
        None => {
            let loader = Facts::read(file).ok().flatten().and_then(|facts| facts.interpreter);
            let found = "it gets no extra rights when it runs, so the loader uses LD_LIBRARY_PATH";
            loader.map(|_| Check::ok(name, found))
        }
    }
}

/// The loader lists what it would load, without running the program.
fn libraries(file: &Path, facts: &Facts, loader: &Path, libdir: &Path) -> Check {
    let name = "libraries";
    let listing = Command::new(loader)
        .arg("--list")
        .arg(file)
        // Without it, missing symbol versions are ignored.
        .env("LD_WARN", "1")
        .env("LD_LIBRARY_PATH", run::library_path(libdir, env::var_os("LD_LIBRARY_PATH")))
        .output();
    let listing = match listing {
        Ok(listing) => listing,
        Err(error) => {
            return Check::fail(name, format!("cannot run {}: {error}", loader.display()), "install libc6");
        }
    };
    let resolved = resolved(&String::from_utf8_lossy(&listing.stdout));
    if let Some((soname, other)) = ours_missed(&resolved, libdir) {
        let why = match run::rpath_to_other_library(file, facts, libdir) {
            Some(_) => {
                format!("an RPATH in the program; remove it: patchelf --remove-rpath {}", file.display())
            }
            None => "an RPATH in one of the libraries it loads, or LD_PRELOAD; `LD_DEBUG=libs` shows which"
                .to_owned(),
        };
        return Check::fail(
            name,
            format!("it loads {soname} from {}", other.display()),
            format!("the cause is {why}"),
        );
    }
    if let Some(complaint) = complaint(&listing, &resolved) {
        return Check::fail(
            name,
            complaint,
            "the program does not start without uwarp either; install what is missing",
        );
    }
    match resolved.iter().any(|(soname, _)| is_ours(soname)) {
        true => Check::ok(name, format!("it loads libibverbs and librdmacm from {}", libdir.display())),
        false => Check::ok(
            name,
            "it is not linked to libibverbs or librdmacm; libraries and programs that it loads later use \
             uwarp",
        ),
    }
}

/// Name and path of each library in what `ld.so --list` prints; no path for one that it does not find.
fn resolved(listing: &str) -> Vec<(String, Option<PathBuf>)> {
    let line = |line: &str| {
        let Some((soname, rest)) = line.trim().split_once(" => ") else {
            // By its path: the loader itself, and what LD_PRELOAD names.
            let path = PathBuf::from(line.trim().rsplit_once(" (")?.0);
            let soname = path.is_absolute().then(|| path.file_name()?.to_str()).flatten()?.to_owned();
            return Some((soname, Some(path)));
        };
        let path = rest.rsplit_once(" (").map(|(path, _)| PathBuf::from(path));
        Some((soname.to_owned(), path))
    };
    listing.lines().filter_map(line).collect()
}

fn is_ours(soname: &str) -> bool {
    soname == LIBRARY || SONAMES.contains(&soname)
}

/// One line can be for both names, because the loader recognises that both are one file.
fn ours_missed<'a>(resolved: &'a [(String, Option<PathBuf>)], libdir: &Path) -> Option<(&'a str, &'a Path)> {
    resolved
        .iter()
        .filter(|(soname, _)| is_ours(soname))
        .filter_map(|(soname, path)| Some((soname.as_str(), path.as_deref()?)))
        .find(|(_, path)| {
            path.parent().and_then(|parent| parent.canonicalize().ok()).as_deref() != Some(libdir)
        })
}

fn complaint(listing: &Output, resolved: &[(String, Option<PathBuf>)]) -> Option<String> {
    if let Some((soname, _)) = resolved.iter().find(|(_, path)| path.is_none()) {
        return Some(format!("the loader does not find {soname}"));
    }
    // It exits with 0 even when a version is missing.
    let words = String::from_utf8_lossy(&listing.stderr);
    let missing = words.lines().find(|line| line.contains("not found"));
    let said = missing.or_else(|| words.lines().next().filter(|_| !listing.status.success()));
    said.map(|line| format!("the loader says: {}", line.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_is_read_as_the_loader_prints_it() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibibverbs.so.1 => /u/libibverbs.so.1 (0x00007f11)\n\
                       \tlibnone.so.3 => not found\n\t/p/librdmacm.so.1 (0x00007f12)\n";
        assert_eq!(
            resolved(listing),
            [
                ("libibverbs.so.1".to_owned(), Some(PathBuf::from("/u/libibverbs.so.1"))),
                ("libnone.so.3".to_owned(), None),
                ("librdmacm.so.1".to_owned(), Some(PathBuf::from("/p/librdmacm.so.1")))
            ]
        );
    }
}
