//! What may go wrong with memory that two programs of one host share: the other one is killed at any instant,
//! or writes it at random; each system call of the set-up fails once; descriptors or addresses are few.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use uwarp_conformance::dist::Dist;
use uwarp_conformance::one_host::{self, Link, client, endless, server};
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{cc, pair};

/// So many are killed; `make soak` has 1,000.
fn count(few: u32) -> u32 {
    std::env::var("KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(few)
}

/// A C program, built for this test alone: tests run side by side.
fn built(program: &str, test: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("memory_faults").join(test);
    cc::build(program, &dir).unwrap()
}

/// `neighbours` in one of its ways; it checks by itself that it runs over memory.
fn neighbours(test: &str, way: &str, rounds: u32, view: &str) -> Output {
    let lib = Dist::find().unwrap().lib();
    let program = Cmd::new(built("neighbours", test)).args(&format!("127.0.0.1 {way} {rounds}"));
    let over = program.env("LD_LIBRARY_PATH", lib).env("UWARP_LINK", "memory").env("UWARP_VIEW", view);
    // The victims' connections end: one line each.
    let output = over
        .env("UWARP_LOG", "off")
        .limit(Duration::from_secs(240 + u64::from(rounds) * 4))
        .run_ok()
        .unwrap();
    assert!(!output.stdout.contains("FAIL"), "{}", output.text());
    println!("{}", output.stdout);
    output
}

#[test]
fn neighbours_are_killed() {
    neighbours("killed", "kill", count(60), "roce");
}

#[test]
fn neighbours_of_an_rnic_are_killed() {
    neighbours("rnic", "kill", count(30), "iwarp");
}

#[test]
fn neighbours_that_scribble_spoil_their_own_streams() {
    neighbours("scribbling", "scribble", count(30), "roce");
}

fn over(cmd: Cmd, link: &str) -> Cmd {
    one_host::over(&Dist::find().unwrap(), cmd, link)
}

/// The link of a program's stream that has sent more than this; `None` when the program has ended.
fn link_of(process: &Running, more_than: u64) -> Option<Link> {
    one_host::link_of(&Dist::find().unwrap(), 0, process, more_than).unwrap()
}

const EPERM: i32 = 1;
const ENOMEM: i32 = 12;
const EMFILE: i32 = 24;
const ENOSPC: i32 = 28;
const ENOBUFS: i32 = 105;

/// What becomes of a stream: it has memory, or it is TCP, and says why, or it ends.
const MEMORY: &str = "memory";
const NOTHING_LEFT: &str = "no descriptors or memory are left";
const OTHER_USER: &str = "belongs to another user";
const NOT_OFFERED: &str = "memory was not offered";
const CLOSED: &str = "the peer's process has not answered: it ends, has no descriptors";
const SILENT: &str = "has not answered in time";
const ENDS: &str = "ends";

/// System calls that nothing but the set-up of shared memory makes, as `c/fails.c` names them.
struct Call {
    name: &'static str,
    /// What it fails with; in `make test` with the first of them alone.
    errors: &'static [i32],
    /// What the initiator's stream may become if it fails there, and if it fails at the responder.
    at_initiator: &'static [&'static str],
    at_responder: &'static [&'static str],
}

/// `fstat` is not among them, nor `fcntl` for flags: they cannot fail. What `recvmsg` fails with after the
/// answer ends the talk of two processes, and no stream.
const CALLS: [Call; 17] = {
    const fn call(
        name: &'static str,
        errors: &'static [i32],
        at_initiator: &'static [&'static str],
        at_responder: &'static [&'static str],
    ) -> Call {
        Call { name, errors, at_initiator, at_responder }
    }
    [
        // Made again in another way.
        call("memfd_create", &[EMFILE, ENOMEM, EPERM], &[MEMORY], &[MEMORY]),
        call("ftruncate", &[ENOSPC, ENOMEM, EPERM], &[NOTHING_LEFT], &[NOT_OFFERED]),
        call("mmap", &[ENOMEM, EPERM], &[NOTHING_LEFT], &[NOT_OFFERED, NOTHING_LEFT]),
        call("madvise", &[ENOMEM, EPERM], &[NOTHING_LEFT], &[NOT_OFFERED, NOTHING_LEFT]),
        call("seals", &[EPERM, ENOMEM], &[NOTHING_LEFT], &[NOT_OFFERED]),
        call("socket", &[EMFILE, ENOMEM, ENOBUFS, EPERM], &[NOTHING_LEFT], &[NOT_OFFERED]),
        call("bind", &[ENOMEM, EPERM], &[NOTHING_LEFT], &[NOT_OFFERED]),
        call("listen", &[EPERM, ENOMEM], &[NOTHING_LEFT], &[NOT_OFFERED]),
        call("connect", &[ENOMEM, EPERM], &[NOTHING_LEFT], &[]),
        // Made again a little later.
        call("accept", &[EMFILE, ENOMEM, EPERM], &[MEMORY], &[MEMORY]),
        // Who is not known is not served.
        call("peer", &[EPERM, ENOMEM], &[OTHER_USER], &[CLOSED]),
        call("eventfd", &[EMFILE, ENOMEM, EPERM], &[NOTHING_LEFT], &[NOTHING_LEFT]),
        call("dup", &[EMFILE, EPERM], &[NOTHING_LEFT], &[NOTHING_LEFT]),
        call("sendmsg", &[ENOBUFS, ENOMEM, EPERM], &[NOTHING_LEFT], &[SILENT]),
        call("recvmsg", &[ENOMEM, EPERM], &[NOTHING_LEFT, CLOSED, MEMORY], &[CLOSED, NOTHING_LEFT, MEMORY]),
        // The last one is for the connection, which memory was agreed on for.
        call(
            "epoll_ctl",
            &[ENOSPC, ENOMEM, EPERM],
            &[NOTHING_LEFT, ENDS],
            &[NOT_OFFERED, CLOSED, NOTHING_LEFT, ENDS],
        ),
        call("seen seals", &[EPERM], &["of another version"], &[NOTHING_LEFT]),
    ]
};

/// Calls of a kind that are tried at most, of those that a process makes.
const MOST: u32 = 6;

impl Call {
    fn errors(&self) -> &[i32] {
        let all = std::env::var_os("PROGRAMS").is_some_and(|programs| programs == "full");
        if all { self.errors } else { &self.errors[..1] }
    }

    /// Each time that it is to fail: runs this with which one it is, and with what it fails, until it has
    /// told of all.
    fn each(&self, mut run: impl FnMut(u32, i32) -> Output) {
        for error in self.errors() {
            let mut nth = 0;
            loop {
                let said = run(nth, *error).stderr;
                let there_were = said.split("fails: there were ").nth(1).and_then(|rest| rest.lines().next());
                let there_were: u32 = there_were.and_then(|count| count.parse().ok()).expect(&said);
                nth += 1;
                if nth >= there_were.min(MOST) {
                    break;
                }
            }
        }
    }

    fn before(&self, fails: &Path, nth: u32, error: i32, cmd: Cmd) -> Cmd {
        let words = [self.name.to_owned(), nth.to_string(), error.to_string()].map(Into::into);
        cmd.behind(std::iter::once(fails.as_os_str().to_owned()).chain(words))
    }
}

/// What has become of a client's stream, which has gone on for a while since.
fn becomes(client: &Running) -> String {
    let Some(link) = link_of(client, 100) else { return ENDS.to_owned() };
    if link_of(client, link.bytes + 1000).is_none() {
        return ENDS.to_owned();
    }
    if link.kind == "memory" { MEMORY.to_owned() } else { link.why }
}

/// With `auto`, the stream goes on over TCP, and says why; or the call is made again in another way.
#[test]
fn a_call_that_fails_once_at_the_initiator_leaves_tcp() {
    let fails = built("fails", "initiator");
    let port = free_port();
    let server = pair::serve(&over(server(port), "auto"), port).unwrap();
    for call in &CALLS {
        call.each(|nth, error| {
            let client = call.before(&fails, nth, error, over(endless(port), "auto")).spawn().unwrap();
            let link = becomes(&client);
            let said = client.stop();
            let is_right = call.at_initiator.iter().any(|may| link.contains(may));
            let is_tolerated = nth > 0 || call.at_initiator == [MEMORY];
            assert!(
                is_right && (link != MEMORY || is_tolerated),
                "{} {nth}, error {error}: {link}\n{}",
                call.name,
                said.text()
            );
            assert!(nth > 0 || said.stderr.contains("has failed"), "{}: {}", call.name, said.text());
            said
        });
    }
    over(client(port, 20), "memory").run_ok().unwrap();
    server.stop();
}

/// The same at the end that is connected to, by two processes one after the other: one of them may notice,
/// or both where the responder offers none.
#[test]
fn a_call_that_fails_once_at_the_responder_leaves_tcp() {
    let fails = built("fails", "responder");
    for call in CALLS.iter().filter(|call| !call.at_responder.is_empty()) {
        call.each(|nth, error| {
            let port = free_port();
            let server = call.before(&fails, nth, error, over(server(port), "auto"));
            let server = pair::serve(&server, port).unwrap();
            let links = [(); 2].map(|()| {
                let client = over(endless(port), "auto").spawn().unwrap();
                let link = becomes(&client);
                client.stop();
                link
            });
            let said = server.stop();
            let which = format!("{} {nth}, error {error}: {links:?}\n{}", call.name, said.text());
            let others: Vec<_> = links.iter().filter(|link| *link != MEMORY).collect();
            let may = |link: &str| call.at_responder.iter().any(|may| link.contains(may));
            assert!(others.iter().all(|link| may(link)), "{which}");
            let is_offered = others.iter().all(|link| !link.contains(NOT_OFFERED));
            assert!(others.len() <= 1 || !is_offered && others.len() == 2, "{which}");
            assert!(nth > 0 || may(&links[0]) && said.stderr.contains("has failed"), "{which}");
            said
        });
    }
}

/// With `memory`, the connection fails, and a sentence says why.
#[test]
fn a_call_that_fails_once_ends_what_needs_memory() {
    let fails = built("fails", "memory");
    let port = free_port();
    for call in &CALLS {
        call.each(|nth, error| {
            // rping's server ends when a client does not come to be connected.
            let server = pair::serve(&over(server(port), "memory"), port).unwrap();
            let output = call.before(&fails, nth, error, over(client(port, 20), "memory")).run().unwrap();
            server.stop();
            let pings = output.stdout.contains("ping data");
            let says = output.stderr.contains("UWARP_LINK requires memory, but ")
                && call.at_initiator.iter().any(|why| output.stderr.contains(why));
            let may_end = call.at_initiator.contains(&ENDS) && output.stderr.contains("cannot watch");
            assert!(
                if pings { output.ok() && call.at_initiator.contains(&MEMORY) } else { says || may_end },
                "{} {nth}, error {error}: {}",
                call.name,
                output.text()
            );
            output
        });
    }
}

/// Few descriptors, and few addresses, of either end: memory, or TCP with the reason, or an error of a call.
#[test]
fn where_little_is_left_the_stream_uses_tcp() {
    let limited = |limit: &str, cmd: Cmd, link: &str| {
        let shell = ["sh", "-c", &format!("ulimit {limit}; exec \"$0\" \"$@\"")].map(Into::into);
        // How many addresses the C library reserves for threads depends on which of them allocate at once.
        over(cmd, link).env("UWARP_LOG", "info").env("MALLOC_ARENA_MAX", "1").behind(shell)
    };
    // Each of them was seen to leave enough for a connection, or too little for memory alone: a connection
    // takes some 30,000 kB of addresses, and a slab 65,536 more.
    for (limit, becomes) in
        [("-n 64", "memory"), ("-v 600000", "memory"), ("-n 25", "tcp"), ("-v 65000", "tcp")]
    {
        let port = free_port();
        let server_of_all = pair::serve(&over(server(port), "auto"), port).unwrap();
        limited(limit, client(port, 20), "auto").run_ok().unwrap();
        let limited_end = limited(limit, endless(port), "auto").spawn().unwrap();
        let Link { kind: link, why, .. } = link_of(&limited_end, 0).expect("it goes on");
        assert_eq!(link, becomes, "a client with {limit}: {why}");
        assert_eq!(why.contains("no descriptors or memory are left"), becomes == "tcp", "{limit}: {why}");
        limited_end.stop();
        server_of_all.stop();
        let output = {
            let required = pair::serve(&over(server(port), "memory"), port).unwrap();
            let output = limited(limit, client(port, 20), "memory").run().unwrap();
            required.stop();
            output
        };
        // rping ends with 0 in any case.
        assert_eq!(output.stdout.contains("ping data"), becomes == "memory", "{limit}: {}", output.text());
        let limited_server = pair::serve(&limited(limit, server(port), "auto"), port).unwrap();
        over(client(port, 20), "auto").run_ok().unwrap();
        let free_end = over(endless(port), "auto").spawn().unwrap();
        let Link { kind: link, why, .. } = link_of(&free_end, 0).expect("it goes on");
        assert_eq!(link, becomes, "a server with {limit}: {why}");
        free_end.stop();
        limited_server.stop();
    }
}

/// A control group of this test; it is removed with this value.
struct Group(PathBuf);

impl Group {
    /// With a limit of this controller, in either version of the system's control groups. `None`: the
    /// machine lets us make none.
    fn new(controller: &str, limit: u64) -> Option<Self> {
        let all = Path::new("/sys/fs/cgroup");
        let has = |file: &str| {
            let names = std::fs::read_to_string(all.join(file)).unwrap_or_default();
            names.split_whitespace().any(|name| name == controller)
        };
        if has("cgroup.controllers") && !has("cgroup.subtree_control") {
            std::fs::write(all.join("cgroup.subtree_control"), format!("+{controller}")).ok()?;
        }
        let [within, file] = match (controller, has("cgroup.controllers")) {
            (_, true) => ["".to_owned(), format!("{controller}.max")],
            ("memory", false) => ["memory".to_owned(), "memory.limit_in_bytes".to_owned()],
            (_, false) => [controller.to_owned(), format!("{controller}.max")],
        };
        let group = Self(all.join(within).join(format!("uwarp-{controller}-{limit}-{}", std::process::id())));
        std::fs::create_dir(&group.0).ok()?;
        std::fs::write(group.0.join(file), limit.to_string()).ok()?;
        Some(group)
    }

    /// This program in it.
    fn within(&self, cmd: Cmd) -> Cmd {
        let script = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.0.display());
        cmd.behind(["sh", "-c", &script, "sh"].map(Into::into))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What was in it may take a moment to go.
        let start = Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The set-up starts no process and no thread, and what it maps costs memory only when it is used: where a
/// control group leaves what the program needs for itself, there is memory; where it does not, the program
/// ends with an error of its own call.
#[test]
fn a_control_group_leaves_memory_or_ends_the_program() {
    // rping's client has two threads beside its first one, and the library one. A slab is of 64 MiB.
    for (controller, limit, becomes) in
        [("pids", 4, "memory"), ("pids", 3, ""), ("memory", 4 << 20, "memory")]
    {
        let Some(group) = Group::new(controller, limit) else {
            // Past the test harness, which shows nothing of what passes.
            let _ = writeln!(std::io::stderr(), "memory_faults: no control group for {controller} here");
            continue;
        };
        for of_server in [false, true] {
            // The program's threads at that end are more with each connection.
            if of_server && controller == "pids" {
                continue;
            }
            let port = free_port();
            let limited = |cmd: Cmd, is: bool| {
                let cmd = over(cmd, "auto").env("MALLOC_ARENA_MAX", "1");
                if is { group.within(cmd) } else { cmd }
            };
            let server = limited(server(port), of_server);
            let server = pair::serve(&server, port).unwrap();
            let client = limited(endless(port), !of_server).spawn().unwrap();
            let link = link_of(&client, 100);
            let said = client.stop();
            server.stop();
            let kind = link.as_ref().map_or("", |link| &link.kind);
            assert_eq!(kind, becomes, "{controller} {limit}: {link:?}\n{}", said.text());
            let by_itself = said.status.is_some_and(|status| status.code().is_some_and(|code| code != 0));
            assert!(link.is_some() || by_itself, "{controller} {limit}: {}", said.text());
        }
    }
}

/// `nearby` in one of its ways: datagrams to neighbours. It checks by itself that they go by memory.
fn nearby(way: &str, rounds: u32) -> Output {
    let lib = Dist::find().unwrap().lib();
    let program = Cmd::new(built("nearby", way)).args(&format!("{way} {rounds}"));
    let over = program.env("LD_LIBRARY_PATH", lib).env("UWARP_LINK", "auto").env("UWARP_LOG", "info");
    let output = over.limit(Duration::from_secs(240 + u64::from(rounds) * 4)).run_ok().unwrap();
    assert!(!output.stdout.contains("FAIL"), "{}", output.text());
    output
}

#[test]
fn datagrams_to_neighbours_that_end() {
    nearby("kill", count(60));
}

#[test]
fn datagrams_to_neighbours_that_stand_still() {
    nearby("stop", 5);
}

#[test]
fn datagrams_to_neighbours_that_scribble() {
    nearby("scribble", count(20));
}

#[test]
fn datagrams_to_another_user_go_by_udp() {
    let output = nearby("user", 2);
    assert!(
        output.stderr.contains("go by UDP: the peer's process belongs to another user"),
        "{}",
        output.text()
    );
}
