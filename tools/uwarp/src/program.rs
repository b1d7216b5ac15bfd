//! Finding the program to run, as a shell would, and the remedy when that fails.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatVfsMountFlags};

/// Why a program cannot be run.
#[derive(Debug, PartialEq, Eq)]
pub enum Unusable {
    /// There is no such file.
    NotFound { name: OsString },
    /// There is such a file, but it cannot be executed.
    NotExecutable { path: PathBuf, directory: bool },
}

impl Unusable {
    /// The exit status that shells use.
    pub fn exit_status(&self) -> u8 {
        match self {
            Unusable::NotFound { .. } => 127,
            Unusable::NotExecutable { .. } => 126,
        }
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> String {
        match self {
            Unusable::NotFound { name } => match debian_package(name) {
                Some(package) => {
                    format!("on Debian it is in the package {package}: apt-get install {package}")
                }
                None if name.as_bytes().contains(&b'/') => "check the path".to_owned(),
                None => "check the spelling, or give its path".to_owned(),
            },
            Unusable::NotExecutable { directory: true, .. } => "name a file in it".to_owned(),
            Unusable::NotExecutable { path, .. } => {
                format!("if it is a program: chmod +x {}", path.display())
            }
        }
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::NotFound { name } if name.as_bytes().contains(&b'/') => {
                write!(f, "there is no file {}", name.display())
            }
            Unusable::NotFound { name } => {
                write!(f, "no program {} in the directories of PATH", name.display())
            }
            Unusable::NotExecutable { path, directory: true } => {
                write!(f, "{} is a directory", path.display())
            }
            Unusable::NotExecutable { path, .. } => {
                write!(f, "{} is not executable for this user", path.display())
            }
        }
    }
}

/// The file that `name` stands for. A name with a slash is a path; others are looked for in PATH.
pub fn find(name: &OsStr) -> Result<PathBuf, Unusable> {
    // execvp(3)'s default when PATH is not set.
    let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    find_in(name, &path)
}

/// The same, with another PATH.
pub fn find_in(name: &OsStr, path: &OsStr) -> Result<PathBuf, Unusable> {
    if name.as_bytes().contains(&b'/') || name == "." || name == ".." {
        return usable(PathBuf::from(name));
    }
    let mut refused = None;
    for directory in env::split_paths(path).filter(|_| !name.is_empty()) {
        match usable(directory.join(name)) {
            Ok(file) => return Ok(file),
            Err(Unusable::NotFound { .. }) => {}
            Err(reason) => refused = refused.or(Some(reason)),
        }
    }
    Err(refused.unwrap_or(Unusable::NotFound { name: name.to_owned() }))
}

fn usable(path: PathBuf) -> Result<PathBuf, Unusable> {
    match fs::metadata(&path) {
        Err(_) => Err(Unusable::NotFound { name: path.into_os_string() }),
        Ok(metadata) if metadata.is_dir() => Err(Unusable::NotExecutable { path, directory: true }),
        Ok(_) if rustix::fs::access(&path, Access::EXEC_OK).is_err() => {
            Err(Unusable::NotExecutable { path, directory: false })
        }
        Ok(_) => Ok(path),
    }
}

/// The Debian package of a well-known RDMA program.
fn debian_package(name: &OsStr) -> Option<&'static str> {
    let name = Path::new(name).file_name()?.to_str()?;
    Some(match name {
        "rping" | "ucmatose" | "udaddy" | "mckey" | "cmtime" | "rcopy" | "rstream" | "riostream"
        | "udpong" => "rdmacm-utils",
        "rdma_server" | "rdma_client" | "rdma_xserver" | "rdma_xclient" => "rdmacm-utils",
        "qperf" => "qperf",
        "fio" => "fio",
        "mpirun" | "mpiexec" => "openmpi-bin",
        "ucx_info" | "ucx_perftest" => "ucx-utils",
        _ if name.starts_with("ibv_") => "ibverbs-utils",
        _ if name.starts_with("ib_") && (name.ends_with("_lat") || name.ends_with("_bw")) => "perftest",
        _ if name.starts_with("fi_") => "libfabric-bin",
        _ => return None,
    })
}

/// The file that the kernel will load for `path`: the interpreter, if `path` is a script.
pub fn behind_script(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    // The kernel also follows five interpreters.
    for _ in 0..5 {
        match interpreter_of(&path) {
            Some(next) => path = next,
            None => break,
        }
    }
    path
}

/// The first line of a script, after its `#!`.
fn first_line(script: &Path) -> Option<Vec<u8>> {
    use std::io::Read;
    let mut head = Vec::with_capacity(256);
    fs::File::open(script).ok()?.take(256).read_to_end(&mut head).ok()?;
    Some(head.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?.to_owned())
}

/// What is wrong with the first line of a script, and what to do.
pub fn broken_first_line(script: &Path) -> Option<(String, String)> {
    let mut script = script.to_owned();
    for _ in 0..5 {
        let line = first_line(&script)?;
        let shown = script.display();
        if line.ends_with(b"\r") {
            let found = format!("the first line of {shown} ends with a carriage return, as in Windows");
            return Some((found, format!("sed -i 's/\\r$//' {shown}")));
        }
        match interpreter_of(&script) {
            Some(next) if next.exists() => script = next,
            _ => {
                let line = String::from_utf8_lossy(&line).trim().to_owned();
                let found =
                    format!("the first line of {shown} names an interpreter that is not there: #!{line}");
                return Some((found, "correct the line, or install the interpreter".to_owned()));
            }
        }
    }
    None
}

/// A line of a shell script that takes `LD_LIBRARY_PATH` away, and with it the library.
pub fn resets_library_path(script: &Path) -> Option<String> {
    first_line(script)?;
    let text = fs::read(script).ok()?;
    let text = String::from_utf8_lossy(&text);
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let resets = |line: &&str| {
        let words: Vec<_> = line.split([' ', ';', '\t']).filter(|word| !word.is_empty()).collect();
        let set = words.iter().find_map(|word| word.strip_prefix("LD_LIBRARY_PATH="));
        let unset = words.windows(2).any(|pair| pair == ["unset", "LD_LIBRARY_PATH"]);
        let cleared = words.windows(2).any(|pair| pair == ["env", "-i"] || pair == ["env", "-"]);
        set.is_some_and(|value| !value.contains("LD_LIBRARY_PATH")) || unset || cleared
    };
    lines.into_iter().find(resets).map(str::to_owned)
}

fn interpreter_of(script: &Path) -> Option<PathBuf> {
    let line = first_line(script)?;
    let mut words =
        line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(OsStr::from_bytes);
    let interpreter = words.next()?;
    if Path::new(interpreter).file_name() == Some(OsStr::new("env")) {
        return find(words.find(|word| !word.as_bytes().starts_with(b"-"))?).ok();
    }
    Some(interpreter.into())
}

/// The calling process: decides whether a program gains rights when it is executed.
#[derive(Clone, Copy)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
}

impl Caller {
    /// This process.
    pub fn current() -> Self {
        Caller { uid: rustix::process::getuid().as_raw(), gid: rustix::process::getgid().as_raw() }
    }
}

/// Why the loader will run `path` in secure mode, in which it does not look at `LD_LIBRARY_PATH` (ld.so(8)).
///
/// `None` if the caller gains nothing: root that runs a file which is setuid to root keeps its environment.
pub fn secure_execution(path: &Path, caller: Caller) -> Option<String> {
    let metadata = fs::metadata(path).ok()?;
    if rustix::fs::statvfs(path).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOSUID)) {
        return None;
    }
    gains_identity(&metadata, caller).or_else(|| {
        let has_capabilities = rustix::fs::getxattr(path, "security.capability", &mut [0_u8; 64][..]).is_ok();
        (has_capabilities && caller.uid != 0).then(|| "it has file capabilities".to_owned())
    })
}

/// Why what `path` starts does not inherit `LD_LIBRARY_PATH`, whoever calls it. Without `-`, su passes it on.
pub fn drops_environment(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    ["sudo", "doas", "pkexec"]
        .contains(&name)
        .then(|| format!("{name} removes LD_LIBRARY_PATH from the environment of what it starts"))
}

fn gains_identity(metadata: &Metadata, caller: Caller) -> Option<String> {
    const SETUID: u32 = 0o4000;
    const SETGID_AND_GROUP_EXECUTE: u32 = 0o2010;
    let mode = metadata.mode();
    if mode & SETUID != 0 && metadata.uid() != caller.uid {
        return Some(format!("it is setuid to user {}", metadata.uid()));
    }
    if mode & SETGID_AND_GROUP_EXECUTE == SETGID_AND_GROUP_EXECUTE && metadata.gid() != caller.gid {
        return Some(format!("it is setgid to group {}", metadata.gid()));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn file(directory: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = directory.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn a_plain_file_in_path_does_not_hide_a_program_further_on() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let plain = file(first.path(), "tool", "", 0o644);
        let path = env::join_paths([first.path(), second.path()]).unwrap();
        let found = find_in("tool".as_ref(), &path);
        assert_eq!(found, Err(Unusable::NotExecutable { path: plain, directory: false }));
        let program = file(second.path(), "tool", "", 0o755);
        assert_eq!(find_in("tool".as_ref(), &path), Ok(program));
    }

    #[test]
    fn missing_programs_name_their_debian_package() {
        for (name, package) in
            [("rping", "rdmacm-utils"), ("/x/ib_send_lat", "perftest"), ("ibv_devinfo", "ibverbs-utils")]
        {
            let reason = Unusable::NotFound { name: name.into() };
            assert!(reason.remedy().ends_with(&format!("apt-get install {package}")), "{}", reason.remedy());
        }
    }

    /// Root gains no rights by them, so the loader is not in secure mode; the variable is gone all the same.
    #[test]
    fn sudo_is_known_to_drop_the_variable_for_root_too() {
        assert!(drops_environment("/usr/bin/sudo".as_ref()).unwrap().starts_with("sudo removes"));
        assert_eq!(drops_environment("/usr/bin/su".as_ref()), None);
        assert_eq!(drops_environment("/usr/bin/sudoku".as_ref()), None);
    }

    #[test]
    fn scripts_lead_to_their_interpreter() {
        let directory = tempfile::tempdir().unwrap();
        let direct = file(directory.path(), "a", "#! /bin/sh -e\n", 0o755);
        assert_eq!(behind_script(&direct), Path::new("/bin/sh"));
        let nested = file(directory.path(), "b", &format!("#!{}\n", direct.display()), 0o755);
        assert_eq!(behind_script(&nested), Path::new("/bin/sh"));
        let through_env = file(directory.path(), "c", "#!/usr/bin/env -S sh -e\n", 0o755);
        assert_eq!(behind_script(&through_env).file_name(), Some("sh".as_ref()));
        assert_eq!(behind_script("/bin/sh".as_ref()), Path::new("/bin/sh"));
    }

    #[test]
    fn what_is_wrong_with_a_script_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let wrong = |text: &str| broken_first_line(&file(directory.path(), "s", text, 0o755));
        assert_eq!(wrong("#!/bin/sh\n"), None);
        assert_eq!(wrong("#!/usr/bin/env sh\n"), None);
        assert!(wrong("#!/no/such\n").unwrap().0.ends_with("that is not there: #!/no/such"));
        assert!(wrong("#!/usr/bin/env no-such-shell\n").unwrap().0.contains("#!/usr/bin/env no-such-shell"));
        assert!(wrong("#!/bin/sh\r\n").unwrap().0.contains("carriage return"));
        let resets = |text: &str| resets_library_path(&file(directory.path(), "s", text, 0o755));
        for line in
            ["export LD_LIBRARY_PATH=/opt/lib", "unset LD_LIBRARY_PATH", "env -i ./p", "LD_LIBRARY_PATH= ./p"]
        {
            assert_eq!(resets(&format!("#!/bin/sh\n {line}\n")).as_deref(), Some(line));
        }
        assert_eq!(
            resets("#!/bin/sh\nLD_LIBRARY_PATH=/a:$LD_LIBRARY_PATH ./p\n# unset LD_LIBRARY_PATH\n"),
            None
        );
    }

    #[test]
    fn only_a_gain_of_rights_is_secure_execution() {
        let directory = tempfile::tempdir().unwrap();
        let setuid = fs::metadata(file(directory.path(), "u", "", 0o4755)).unwrap();
        let setgid = fs::metadata(file(directory.path(), "g", "", 0o2755)).unwrap();
        let mandatory_locking = fs::metadata(file(directory.path(), "l", "", 0o2745)).unwrap();
        let owner = Caller { uid: setuid.uid(), gid: setuid.gid() };
        let stranger = Caller { uid: owner.uid + 1, gid: owner.gid + 1 };
        for metadata in [&setuid, &setgid] {
            assert_eq!(gains_identity(metadata, owner), None);
            assert!(gains_identity(metadata, stranger).is_some());
        }
        assert_eq!(gains_identity(&mandatory_locking, stranger), None);
    }
}
