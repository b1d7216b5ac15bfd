//! `uwarp run --files on`: the tree of files in which the program and its children see the device, and the
//! preloaded library that shows it to them (abi/fs; docs/adr/036).
//!
//! A tree is a directory of its own for each `uwarp run`. The program takes the place of this process, so
//! nobody is left to remove the tree when it ends. So each run removes the trees that no process uses any
//! more.

mod table;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::iter;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::cli::FilesArgs;
use crate::libdir::SONAMES;
use crate::{complain, libdir, preload, rdma, verbs};
use table::Node;

/// Names the tree for the preloaded library.
pub const VARIABLE: &str = "UWARP_FILES_AT";
/// Where MVAPICH2 finds the file that it otherwise has in /etc: a directory.
const ADDRESSES_AT: &str = "MV2_RDMA_CM_CONF_FILE_PATH";
/// The preloaded library, beside the other one.
pub const LIBRARY: &str = "libuwarp-fs.so";
/// Beginning of the trees' names.
const PREFIX: &str = "files-";
/// The preloaded library keeps the name in a buffer of this size.
const LONGEST: usize = 256;

/// Makes the tree for the program that takes the place of this process, and returns what the program's
/// environment must have. `picture` is what the library's must have.
pub fn make(libdir: &Path, picture: &[(&str, OsString)]) -> Result<Vec<(&'static str, OsString)>, String> {
    let library = preload::find(libdir, LIBRARY)?;
    let home = home()?;
    sweep(&home);
    let tree = home.join(Name::mine().text());
    if tree.as_os_str().len() >= LONGEST {
        return Err(format!("the name of {} is too long. Set XDG_RUNTIME_DIR to another", tree.display()));
    }
    // The name is this process's, so it is nobody else's tree: at most an earlier one of this process.
    let _ = fs::remove_dir_all(&tree);
    let cannot = |error: io::Error| format!("cannot make {}: {error}", tree.display());
    DirBuilder::new().mode(0o755).create(&tree).map_err(cannot)?;
    // Another process asks the library: it starts threads and opens files, and this one is to become the
    // program.
    let asked = Command::new(libdir::executable().map_err(cannot)?)
        .arg("files")
        .arg(&tree)
        .envs(picture.iter().cloned())
        .env("UWARP_STAT", "off")
        .env_remove("UWARP_TRACE")
        .status();
    match asked {
        Ok(status) if status.success() => {
            let mut variables = vec![];
            // Without it, `rdma link` is the kernel's.
            if let Some(path) = own_commands(libdir, env::var_os("PATH")) {
                variables.push(("PATH", path));
            }
            if !Path::new("/etc").join(table::ADDRESSES).exists() && is_ours(env::var_os(ADDRESSES_AT)) {
                variables.push((ADDRESSES_AT, tree.clone().into_os_string()));
            }
            variables.push((VARIABLE, tree.into_os_string()));
            preload::add(&mut variables, &library);
            Ok(variables)
        }
        // It has said why.
        Ok(_) => Err(format!("cannot fill {}", tree.display())),
        Err(error) => Err(cannot(error)),
    }
}

/// Whether a variable is not set, or names a tree: that of a run which started this one, elsewhere perhaps.
fn is_ours(directory: Option<OsString>) -> bool {
    directory.is_none_or(|directory| Path::new(&directory).file_name().and_then(Name::read).is_some())
}

/// PATH with the directory of commands in front that answer for the device instead of the system's. It
/// belongs to the installation: a directory below /tmp can be removed, and made anew by anybody, in the life
/// of a shell that looks there for every command. `None`: there is none.
fn own_commands(libdir: &Path, path: Option<OsString>) -> Option<OsString> {
    let directory = libdir.join("commands");
    directory.join(rdma::NAME).exists().then_some(())?;
    let inherited = path.filter(|path| !path.is_empty());
    // Not that of a run that started this one.
    let others = inherited.iter().flat_map(env::split_paths).filter(|place| *place != directory);
    env::join_paths(iter::once(directory.clone()).chain(others)).ok()
}

/// `uwarp files DIRECTORY`: fills a tree with what the verbs say.
pub fn fill(args: &FilesArgs) -> ExitCode {
    let filled = libdir::find().map_err(|reason| reason.to_string()).and_then(|libdir| {
        let library = libdir.join(SONAMES[0]);
        let devices = verbs::devices(&library, &[])
            .map_err(|reason| format!("cannot list the devices of {}: {reason}", library.display()))?;
        table::nodes(&devices).iter().try_for_each(|node| {
            place(&args.directory, node).map_err(|error| format!("{}: {error}", args.directory.display()))
        })
    });
    match filled {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            complain(&reason);
            ExitCode::FAILURE
        }
    }
}

fn place(tree: &Path, node: &Node) -> io::Result<()> {
    let (Node::File(path, _) | Node::Link(path, _)) = node;
    let path = tree.join(path);
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    match node {
        // Not through a link, nor into a file that is there.
        Node::File(_, text) => File::create_new(path)?.write_all(format!("{text}\n").as_bytes()),
        Node::Link(_, to) => symlink(to, path),
    }
}

/// The directory of this user's trees. A sandbox may have a /tmp that cannot be written to.
pub fn home() -> Result<PathBuf, String> {
    let user = rustix::process::geteuid().as_raw();
    // Not another user's, which su and sudo may leave in the environment.
    let own = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| is_safe(dir, user));
    let usual = own.unwrap_or_else(env::temp_dir);
    let others = || ["/dev/shm", "/var/tmp"].iter().find_map(|above| home_in(Path::new(above), user).ok());
    home_in(&usual, user).or_else(|reason| others().ok_or(reason))
}

fn home_in(above: &Path, user: u32) -> Result<PathBuf, String> {
    if !is_safe(above, user) {
        return Err(format!(
            "other users may replace what is in {}. Set XDG_RUNTIME_DIR to another directory",
            above.display()
        ));
    }
    let home = above.join(format!("uwarp-{user}"));
    match DirBuilder::new().mode(0o755).create(&home) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(format!("cannot make {}: {error}. Set XDG_RUNTIME_DIR to another", home.display()));
        }
        _ => {}
    }
    // Anybody may make a directory of this name in /tmp.
    match fs::symlink_metadata(&home) {
        Ok(found) if found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0 => {
            match rustix::fs::access(&home, rustix::fs::Access::WRITE_OK) {
                Ok(()) => Ok(home),
                Err(error) => Err(format!(
                    "cannot write to {}: {error}. Set XDG_RUNTIME_DIR to another",
                    home.display()
                )),
            }
        }
        _ => Err(format!(
            "{} is not a directory of this user's that others cannot write to. Remove it, or set \
             XDG_RUNTIME_DIR to another",
            home.display()
        )),
    }
}

/// Whether nobody but this user, and root, can replace a directory of this user's in this one.
fn is_safe(directory: &Path, user: u32) -> bool {
    const STICKY: u32 = 0o1000;
    // Not the link that may lead there.
    let Ok(found) = fs::canonicalize(directory).and_then(fs::symlink_metadata) else { return false };
    let others_write = found.mode() & 0o022 != 0 && found.mode() & STICKY == 0;
    directory.is_absolute() && found.is_dir() && [0, user].contains(&found.uid()) && !others_write
}

/// The process that a tree was made for: its number, in which namespace that is, and when it began. Numbers
/// come again, and mean something else in another namespace.
#[derive(Debug, PartialEq, Eq)]
struct Name {
    namespace: u64,
    pid: u32,
    start: u64,
}

impl Name {
    fn mine() -> Self {
        let pid = std::process::id();
        Self { namespace: namespace(), pid, start: start(pid).unwrap_or(0) }
    }

    fn text(&self) -> String {
        format!("{PREFIX}{}-{}-{}", self.namespace, self.pid, self.start)
    }

    fn read(text: &OsStr) -> Option<Self> {
        let mut numbers = text.to_str()?.strip_prefix(PREFIX)?.split('-');
        let name = Self {
            namespace: numbers.next()?.parse().ok()?,
            pid: numbers.next()?.parse().ok()?,
            start: numbers.next()?.parse().ok()?,
        };
        numbers.next().is_none().then_some(name)
    }
}

/// Number of this process's namespace of process numbers; 0 if it cannot be known.
fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino())
}

/// When a process began, in ticks since the machine did.
fn start(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may have anything in it. The start is field 22.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Removes the trees whose process is gone and that no other process of this user may use: a program may
/// leave children behind.
fn sweep(home: &Path) {
    remove_unused(home, uses);
}

fn remove_unused(home: &Path, uses: impl FnOnce() -> Vec<Use>) {
    let here = namespace();
    let trees = fs::read_dir(home).into_iter().flatten().flatten();
    let gone: Vec<_> = trees
        .filter_map(|entry| Some((entry.path(), Name::read(&entry.file_name())?)))
        .filter(|(_, name)| here != 0 && name.namespace == here && start(name.pid) != Some(name.start))
        .collect();
    if gone.is_empty() {
        return;
    }
    let uses = uses();
    for (tree, name) in gone {
        if !uses.iter().any(|used| used.may_be(&tree, name.start)) {
            // Another run may be at it as well.
            let _ = fs::remove_dir_all(tree);
        }
    }
}

/// What a process uses.
#[derive(Debug, PartialEq, Eq)]
enum Use {
    /// The tree that its environment names.
    Tree(Vec<u8>),
    /// Nobody can say which tree; the process began at this time.
    Unclear { start: u64 },
}

impl Use {
    /// Whether it may be this tree, made for a process that began at `made`. Those that use it are this
    /// process and those that it started, so none of them is older.
    fn may_be(&self, tree: &Path, made: u64) -> bool {
        match self {
            Self::Tree(used) => used == tree.as_os_str().as_encoded_bytes(),
            Self::Unclear { start } => *start >= made,
        }
    }
}

/// What the processes of this user use.
fn uses() -> Vec<Use> {
    let user = rustix::process::geteuid().as_raw();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter(|pid| is_of(*pid, user)).filter_map(used_by).collect()
}

/// Whether the process is this user's. Not by the owner of its directory: that is root for some programs.
fn is_of(pid: u32, user: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    users.split_ascii_whitespace().any(|one| one.parse() == Ok(user))
}

fn used_by(pid: u32) -> Option<Use> {
    let directory = PathBuf::from(format!("/proc/{pid}"));
    // Threads of the kernel and processes that have ended have no program.
    match fs::read_link(directory.join("exe")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        _ => {}
    }
    // Empty while the kernel starts a program in the process.
    let environment = fs::read(directory.join("environ")).ok().filter(|text| !text.is_empty());
    let unclear = || start(pid).map(|start| Use::Unclear { start });
    let Some(environment) = environment else { return unclear() };
    let beginning = format!("{VARIABLE}=");
    let mut values = environment.split(|byte| *byte == 0);
    let named = values.find_map(|value| value.strip_prefix(beginning.as_bytes()));
    if let Some(tree) = named.filter(|tree| Path::new(OsStr::from_bytes(tree)).is_dir()) {
        return Some(Use::Tree(tree.to_vec()));
    }
    // A program may write its title over its environment.
    let maps = fs::read(directory.join("maps"));
    let has_library =
        maps.map_or(true, |maps| maps.windows(LIBRARY.len()).any(|part| part == LIBRARY.as_bytes()));
    has_library.then(unclear).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_file_of_addresses_stays() {
        let tree = Path::new("/run/user/0").join(Name::mine().text());
        assert!(is_ours(None) && is_ours(Some(tree.into_os_string())));
        assert!(!is_ours(Some("/home/user/mvapich2".into())));
    }

    #[test]
    fn trees_of_processes_that_are_gone_are_removed_and_no_others() {
        let home = tempfile::tempdir().unwrap();
        let mine = Name::mine();
        assert_eq!(Name::read(mine.text().as_ref()), Some(Name::mine()));
        assert!(start(1).is_some());
        let cases = [
            (mine.text(), true),
            // The number is used again.
            (Name { start: mine.start + 1, ..Name::mine() }.text(), false),
            // Of a container that shares the directory.
            (Name { namespace: mine.namespace + 1, start: 0, ..mine }.text(), true),
            ("files-notes".to_owned(), true),
            ("files-1-2".to_owned(), true),
        ];
        for (name, _) in &cases {
            fs::create_dir_all(home.path().join(name).join("sys")).unwrap();
        }
        remove_unused(home.path(), Vec::new);
        for (name, stays) in cases {
            assert_eq!(home.path().join(&name).exists(), stays, "{name}");
        }
    }

    #[test]
    fn a_tree_stays_while_a_process_has_it_in_its_environment() {
        let home = tempfile::tempdir().unwrap();
        let name = Name { start: Name::mine().start + 1, ..Name::mine() }.text();
        let tree = home.path().join(name);
        fs::create_dir(&tree).unwrap();
        let mut child = Command::new("sleep").arg("60").env(VARIABLE, &tree).spawn().unwrap();
        // It is so after the kernel has started the program; until then nobody can say.
        while fs::read(format!("/proc/{}/environ", child.id())).unwrap().is_empty() {
            std::thread::yield_now();
        }
        let used = used_by(child.id());
        sweep(home.path());
        let stays = tree.exists();
        child.kill().unwrap();
        // It has ended, and waits for its parent.
        while fs::read_link(format!("/proc/{}/exe", child.id())).is_ok() {
            std::thread::yield_now();
        }
        let after = used_by(child.id());
        child.wait().unwrap();
        assert!(stays);
        assert_eq!((used, after), (Some(Use::Tree(tree.as_os_str().as_bytes().to_vec())), None));
        remove_unused(home.path(), Vec::new);
        assert!(!tree.exists());
    }

    #[test]
    fn a_tree_stays_if_a_process_that_is_not_older_may_use_it() {
        let mine = Name::mine();
        let made = mine.start + 1;
        for (used, stays) in [
            (Use::Unclear { start: made }, true),
            (Use::Unclear { start: made - 1 }, false),
            (Use::Tree(b"/tmp/uwarp-0/files-1-2-3".to_vec()), false),
        ] {
            let home = tempfile::tempdir().unwrap();
            let tree = home.path().join(Name { start: made, ..Name::mine() }.text());
            fs::create_dir(&tree).unwrap();
            let shown = format!("{used:?}");
            remove_unused(home.path(), || vec![used]);
            assert_eq!(tree.exists(), stays, "{shown}");
        }
    }

    #[test]
    fn directories_that_others_can_change_are_not_used() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        for (mode, safe) in [(0o700, true), (0o755, true), (0o770, false), (0o777, false), (0o1777, true)] {
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_safe(directory.path(), user), safe, "{mode:o}");
        }
        // Of another user, unless that is root.
        assert_eq!(is_safe(directory.path(), user + 1), user == 0);
        assert!(!is_safe(Path::new("tmp"), user) && !is_safe(&directory.path().join("none"), user));
    }
}
