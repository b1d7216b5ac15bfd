//! Where two programs of one host share memory, and where they step aside and use TCP, with which reason: as
//! containers are made, one by one. (Docker's network namespaces are others; then the ends are not of one
//! host.) And while an installation is replaced under them.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use uwarp_conformance::dist::Dist;
use uwarp_conformance::one_host::{self, Readable, client, endless, last_of, link_of, server};
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{cc, pair};

/// Another user than root.
const OTHER: u32 = 12345;

const SHARES: &str = "";
const SANDBOX: &str = "a sandbox of its own";
const OTHER_USER: &str = "belongs to another user";
const NOT_OFFERED: &str = "memory was not offered";
const INITIATOR: &str = "the end that has connected has chosen it";

/// What the rows need.
struct World {
    contained: String,
    tree: Readable,
    dist: Dist,
}

/// One end: the options of `contained`, in front of it as often as named, and its user.
#[derive(Clone, Default)]
struct End {
    fronts: Vec<String>,
    user: u32,
}

impl End {
    fn inside(options: &str) -> Self {
        let user = if options.contains("-u ") { OTHER } else { 0 };
        Self { fronts: vec![options.to_owned()], user }
    }

    /// In one of these of its own inside the other.
    fn inside_both(outer: &str, inner: &str) -> Self {
        Self { fronts: vec![outer.to_owned(), inner.to_owned()], user: 0 }
    }
}

impl World {
    fn new(test: &str) -> Self {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("memory_places").join(test);
        // It has the privileges of root, so it is linked with no library of ours.
        let contained = cc::build_by("cc", "contained", &dir, "").unwrap();
        let tree = Readable::new(&Dist::find().unwrap(), test).unwrap();
        let dist = tree.dist().unwrap();
        Self { contained: contained.to_str().unwrap().to_owned(), tree, dist }
    }

    fn at(&self, end: &End, cmd: Cmd) -> Cmd {
        let words = end.fronts.iter().flat_map(|options| {
            std::iter::once(self.contained.as_str()).chain(options.split_whitespace()).map(OsString::from)
        });
        one_host::over(&self.dist, cmd, "auto").behind(words)
    }

    /// Runs a pair, and asserts what `uwarp stat` says at both ends.
    fn row(
        &self,
        name: &str,
        [responder, initiator]: [&End; 2],
        [server_cmd, client_cmd]: [Cmd; 2],
        why: &str,
    ) {
        let port = server_cmd.words().last().and_then(|port| port.parse().ok()).unwrap();
        let server = pair::serve(&self.at(responder, server_cmd), port).unwrap();
        let client = self.at(initiator, client_cmd).spawn().unwrap();
        let link = |end: &End, process: &Running| {
            let link = link_of(&self.dist, end.user, process, 0).unwrap();
            link.unwrap_or_else(|| panic!("{name}: it has ended\n{}", process.so_far()))
        };
        let kind = if why == SHARES { "memory" } else { "tcp" };
        let theirs = match why {
            SHARES => SHARES,
            NOT_OFFERED => SANDBOX,
            _ => INITIATOR,
        };
        for (whose, link, why) in
            [("initiator", link(initiator, &client), why), ("responder", link(responder, &server), theirs)]
        {
            let is_right =
                link.kind == kind && link.why.is_empty() == why.is_empty() && link.why.contains(why);
            assert!(is_right, "{name}: the {whose} has {link:?}, wanted {kind}, {why:?}");
        }
    }

    fn pair(&self, name: &str, ends: [&End; 2], why: &str) {
        let port = free_port();
        self.row(name, ends, [server(port), endless(port)], why);
    }
}

/// Yama's rule that a process may look into its children alone, for as long as this exists, on kernels that
/// have it. Others' processes are under it meanwhile, too; a suite that runs as root does not notice.
struct Yama(Option<String>);

const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";

impl Yama {
    /// Also the calls that `contained` takes away for it.
    fn one() -> (Self, &'static str) {
        let Ok(before) = std::fs::read_to_string(YAMA) else {
            // Past the test harness, which shows nothing of what passes.
            let _ = writeln!(
                std::io::stderr(),
                "memory_places: this kernel has no Yama; a filter of the calls that it refuses stands for it"
            );
            return (Self(None), "attach");
        };
        if before.trim() == "0" {
            std::fs::write(YAMA, "1").unwrap();
            return (Self(Some(before)), "yama");
        }
        (Self(None), "yama")
    }
}

impl Drop for Yama {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = std::fs::write(YAMA, before);
        }
    }
}

/// The whole product: {calls of Docker's default profile, none that looks into a process, Yama's scope of
/// 1} x {one PID namespace, one each} x {a /dev/shm of 64 MB, none} x {one user, two, a user namespace
/// each}. Both ends have what the row says, each for itself.
#[test]
fn every_kind_of_container_shares_memory_unless_users_differ() {
    let world = World::new("product");
    let (_yama, yama) = Yama::one();
    for calls in ["docker", "looks", yama] {
        for pids in ["", "-p"] {
            for shm in ["64m", "none"] {
                for (users, fronts, why) in [
                    ("same", ["", ""], SHARES),
                    ("the responder's is another", ["-u 12345", ""], OTHER_USER),
                    ("the initiator's is another", ["", "-u 12345"], OTHER_USER),
                    ("a namespace each", ["-n", "-n"], SHARES),
                ] {
                    let name = format!("{calls} {pids} {shm} {users}");
                    let ends =
                        fronts.map(|user| End::inside(&format!("-i -f {calls} {pids} -s {shm} {user}")));
                    world.pair(&name, [&ends[0], &ends[1]], why);
                }
            }
        }
    }
}

/// What the product does not have: one end alone in something, programs that are their container's first,
/// filters that are the program's own, users that nobody knows, programs that cannot be traced.
#[test]
fn other_containers_share_memory_or_step_aside() {
    let world = World::new("others");
    let [outside, inside, filter] = [End::default(), End::inside("-f docker -i"), End::inside("-f docker")];
    let [container, first] = [End::inside("-p -f docker -i"), End::inside("-p -f docker")];
    let two = End::inside_both("-p -f docker", "-f docker");
    let [pid, user, nobody] = ["-p", "-n", "-N"].map(End::inside);
    let [no_shm, small_shm] = ["-s none", "-s 64k"].map(End::inside);
    for (name, responder, initiator, why) in [
        ("a filter for one", &outside, &inside, SHARES),
        ("a container, and a program outside", &container, &outside, SHARES),
        ("a container's first program", &first, &first, SHARES),
        ("a first program, and one outside", &first, &outside, SHARES),
        // As the first program of a container in the host's PID namespace is.
        ("a filter of its own", &outside, &filter, SANDBOX),
        ("a responder with a filter of its own", &filter, &outside, NOT_OFFERED),
        ("a first program with a second filter", &outside, &two, SANDBOX),
        ("a PID namespace for one", &pid, &outside, SHARES),
        ("no /dev/shm for one", &no_shm, &outside, SHARES),
        ("a /dev/shm of 64 KiB", &small_shm, &small_shm, SHARES),
        ("a user namespace for one", &outside, &user, SHARES),
    ] {
        world.pair(name, [responder, initiator], why);
    }
    // `uwarp stat` does not know its user, either: the responder alone says what it has.
    let port = free_port();
    let server_of_all = pair::serve(&world.at(&outside, server(port)), port).unwrap();
    let unknown = world.at(&nobody, client(port, 3)).env("UWARP_LOG", "info").run_ok().unwrap();
    assert!(unknown.text().contains(OTHER_USER), "{}", unknown.text());
    drop(server_of_all);
    // The system lets nobody trace a program that its user may execute, but not read.
    let rping = world.tree.root().join("rping");
    let from = uwarp_conformance::process::find_program("rping".as_ref()).unwrap();
    std::fs::copy(from, &rping).unwrap();
    assert!(Command::new("chmod").arg("711").arg(&rping).status().unwrap().success());
    let other = End::inside("-u 12345");
    let unreadable = |cmd: Cmd| {
        let words: Vec<String> = cmd.words().skip(1).collect();
        words.iter().fold(Cmd::new(&rping), |cmd, word| cmd.arg(word))
    };
    for (name, hides, why) in [
        ("an initiator that cannot be traced", [false, true], SANDBOX),
        ("a responder that cannot be traced", [true, false], NOT_OFFERED),
    ] {
        let port = free_port();
        let [of_server, of_client] = hides;
        let server = if of_server { unreadable(server(port)) } else { server(port) };
        let client = if of_client { unreadable(endless(port)) } else { endless(port) };
        world.row(name, [&other, &other], [server, client], why);
    }
}

/// The tree of a build, installed as the Makefile does it.
fn install(from: &Path, prefix: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let make = Cmd::line("make -s --no-print-directory install -C").arg(root);
    let set = |name: &str, to: &Path| format!("{name}={}", to.display());
    make.arg(set("DIST", from)).arg(set("PREFIX", prefix)).unset("DESTDIR").run_ok().unwrap();
}

/// The files of the library that a program has mapped, as the system names them.
fn mapped(process: &Running) -> String {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", last_of(process))).unwrap();
    let mut names: Vec<_> =
        maps.lines().filter_map(|line| line.split_once('/')).map(|(_, name)| name).collect();
    names.retain(|name| name.contains("libuwarp.so"));
    names.dedup();
    names.join(" ")
}

/// `make install` of another build under two programs that move data through memory: they go on, and those
/// that start then have the new file, and share memory with the old ones.
#[test]
fn an_installation_is_replaced_under_running_programs() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("memory_places/install");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let prefix = dir.join("prefix");
    let found = Readable::new(&Dist::find().unwrap(), "install").unwrap();
    install(found.root(), &prefix);
    let dist = Dist::at(&prefix).unwrap();
    let link = |process: &Running, more_than: u64| {
        let link = link_of(&dist, 0, process, more_than).unwrap();
        let link = link.unwrap_or_else(|| panic!("it has ended\n{}", process.so_far()));
        assert_eq!((&*link.kind, &*link.why), ("memory", ""));
        link.bytes
    };
    let port = free_port();
    let over = |cmd: Cmd| one_host::over(&dist, cmd, "auto");
    let old_server = pair::serve(&over(server(port)), port).unwrap();
    let old_client = over(endless(port)).spawn().unwrap();
    let before = [&old_server, &old_client].map(|end| link(end, 0));
    // Another build: the file has other bytes at other places.
    let [lib, note] = [found.root().join("lib/uwarp/libuwarp.so"), dir.join("note")];
    std::fs::write(&note, "another build").unwrap();
    let size = std::fs::metadata(&lib).unwrap().len();
    let section = format!(".note.other={}", note.display());
    Cmd::line("objcopy --strip-debug --add-section").arg(section).arg(&lib).run_ok().unwrap();
    assert_ne!(std::fs::metadata(&lib).unwrap().len(), size);
    install(found.root(), &prefix);
    for (end, bytes) in [&old_server, &old_client].into_iter().zip(before) {
        assert!(mapped(end).ends_with("libuwarp.so (deleted)"), "{}", mapped(end));
        let now = link(end, bytes);
        link(end, now + 10_000);
    }
    over(client(port, 50)).run_ok().unwrap();
    let new_client = over(endless(port)).spawn().unwrap();
    link(&new_client, 0);
    assert!(mapped(&new_client).ends_with("lib/uwarp/libuwarp.so"), "{}", mapped(&new_client));
    // And among themselves; the old pair has noticed nothing of all this.
    let port = free_port();
    let new_server = pair::serve(&over(server(port)), port).unwrap();
    over(client(port, 50)).run_ok().unwrap();
    assert!(new_server.is_running());
    for end in [&old_server, &old_client] {
        let now = link(end, 0);
        link(end, now);
    }
}
