//! What may go wrong with memory that two programs of one host share: the other one is killed at any instant,
//! or writes it at random; each system call of the set-up fails once; descriptors or addresses are few.

use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{cc, pair};

/// So many are killed; `make soak` has 1,000.
fn count(few: u32) -> u32 {
    std::env::var("KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(few)
}

/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(120);

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
    let lib = Dist::find().unwrap().lib();
    cmd.env("LD_LIBRARY_PATH", lib).env("UWARP_LINK", link).limit(PATIENCE)
}

/// Serves for ever.
fn server(port: u16) -> Cmd {
    Cmd::line(&format!("rping -s -P -S 1000 -a 127.0.0.1 -p {port}"))
}

/// Sends and reads this often, and compares.
fn client(port: u16, count: u32) -> Cmd {
    Cmd::line(&format!("rping -c -v -V -S 1000 -C {count} -a 127.0.0.1 -p {port}"))
}

/// The processes that were started one by the other, the program's last.
fn last_of(process: &Running) -> String {
    let mut last = process.pid().as_raw_nonzero().to_string();
    while let Some(child) = std::fs::read_to_string(format!("/proc/{last}/task/{last}/children"))
        .ok()
        .and_then(|children| Some(children.split_whitespace().next()?.to_owned()))
    {
        last = child;
    }
    last
}

/// The link of a program's stream that moves bytes, and why it is TCP; `None` when the program has ended.
fn link_of(process: &Running) -> Option<(String, String)> {
    let uwarp = Dist::find().unwrap().uwarp().unwrap();
    let start = Instant::now();
    loop {
        let output =
            Command::new(&uwarp).args(["stat", "--json", "--pid", &last_of(process)]).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let pairs = document["processes"][0]["queue_pairs"].as_array().cloned().unwrap_or_default();
        let moves = |pair: &&Value| pair["sent"]["send"]["bytes"].as_u64().is_some_and(|bytes| bytes > 0);
        if let Some(pair) = pairs.iter().filter(|pair| pair["link"].is_string()).find(moves) {
            let text = |name: &str| pair[name].as_str().unwrap_or_default().to_owned();
            return Some((text("link"), text("why_tcp")));
        }
        if !process.is_running() {
            return None;
        }
        assert!(start.elapsed() < PATIENCE, "no stream\n{}", process.so_far());
        sleep(Duration::from_millis(10));
    }
}

/// The system calls that nothing but the set-up of shared memory makes, as `c/fails.c` names them, and what
/// they fail with.
const CALLS: [(&str, i32); 9] = [
    ("memfd_create", 24),
    ("ftruncate", 12),
    ("mmap", 12),
    ("madvise", 12),
    ("seals", 1),
    ("socket", 24),
    ("listen", 1),
    ("dup", 24),
    ("rights", 105),
];

/// With `auto`, the stream goes on over TCP, and says why; or the call is made again in another way.
#[test]
fn a_call_that_fails_once_leaves_tcp() {
    let fails = built("fails", "auto");
    let port = free_port();
    let server = pair::serve(&over(server(port), "auto"), port).unwrap();
    for (call, errno) in CALLS {
        for nth in 0.. {
            let front = |endless: Cmd| {
                let words = [
                    fails.as_os_str().to_owned(),
                    call.into(),
                    nth.to_string().into(),
                    errno.to_string().into(),
                ];
                over(endless, "auto").behind(words)
            };
            let whole = front(client(port, 20)).run_ok().unwrap();
            if !whole.stderr.contains("has failed") {
                assert!(nth > 0, "{call} is never called\n{}", whole.text());
                break;
            }
            let endless =
                front(Cmd::line(&format!("rping -c -S 1000 -a 127.0.0.1 -p {port}"))).spawn().unwrap();
            let (link, why) = link_of(&endless).expect("it goes on");
            let is_right = match (link.as_str(), call) {
                ("memory", "memfd_create") => true,
                ("tcp", _) => why.contains("no descriptors or memory are left"),
                _ => false,
            };
            assert!(is_right, "{call} {nth}: {link}, {why}\n{}", endless.so_far());
            endless.stop();
        }
    }
    server.stop();
}

/// With `memory`, the connection fails, and a sentence says why.
#[test]
fn a_call_that_fails_once_ends_what_needs_memory() {
    let fails = built("fails", "memory");
    let port = free_port();
    for (call, errno) in CALLS {
        for nth in 0.. {
            // rping's server ends when a client does not come to be connected.
            let server = pair::serve(&over(server(port), "memory"), port).unwrap();
            let cmd = over(client(port, 20), "memory");
            let words =
                [fails.as_os_str().to_owned(), call.into(), nth.to_string().into(), errno.to_string().into()];
            let output = cmd.behind(words).run().unwrap();
            server.stop();
            if !output.stderr.contains("has failed") {
                output.exited_ok().unwrap();
                break;
            }
            let says = output.stderr.contains("no descriptors or memory are left");
            let never = !output.stdout.contains("ping data");
            assert!(
                output.ok() && call == "memfd_create" || says && never,
                "{call} {nth}: {}",
                output.text()
            );
        }
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
        let endless = Cmd::line(&format!("rping -c -S 1000 -a 127.0.0.1 -p {port}"));
        let server_of_all = pair::serve(&over(server(port), "auto"), port).unwrap();
        limited(limit, client(port, 20), "auto").run_ok().unwrap();
        let limited_end = limited(limit, endless.clone(), "auto").spawn().unwrap();
        let (link, why) = link_of(&limited_end).expect("it goes on");
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
        let free_end = over(endless, "auto").spawn().unwrap();
        let (link, why) = link_of(&free_end).expect("it goes on");
        assert_eq!(link, becomes, "a server with {limit}: {why}");
        free_end.stop();
        limited_server.stop();
    }
}

/// Where programs are contained in some way: memory wherever a descriptor can be passed, and otherwise TCP
/// with the reason. (Docker's network namespaces are others; then the ends are not of one host.)
#[test]
fn containers_share_memory_or_step_aside() {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("py/contained.py");
    let filter = &*format!("/usr/bin/python3 {}", script.display());
    // The filter is the container's, and the program is not its first; or it is.
    let inside = &*format!("{filter} sh -c '\"$@\"; exit $?' sh");
    let pid = "unshare -p --fork --kill-child --mount-proc";
    let [container, first] = [inside, filter].map(|front| format!("{pid} {front}"));
    let [two, user_and_pid] =
        [format!("{pid} {filter} {filter}"), "unshare -Urp --fork --kill-child --mount-proc".to_owned()];
    let with_shm = |shm: &str| format!("unshare -m sh -c '{shm} && exec \"$@\"' sh");
    let (no_shm, small_shm) =
        (&*with_shm("umount -l /dev/shm"), &*with_shm("mount -t tmpfs -o size=64k none /dev/shm"));
    let (shares, sandbox, other) = ("", "a sandbox of its own", "belongs to another user");
    for (name, server_in, client_in, why) in [
        ("one filter for both", inside, inside, shares),
        ("a filter for one", "", inside, shares),
        ("a container each", &container, &container, shares),
        ("a container's first program", &first, &first, shares),
        ("a container, and a program outside", &first, "", shares),
        ("a filter of its own", "", filter, sandbox),
        ("a responder with a filter of its own", filter, "", "memory was not offered"),
        ("a first program with a second filter", "", &two, sandbox),
        ("another PID namespace", pid, "", shares),
        ("no /dev/shm", no_shm, no_shm, shares),
        ("a /dev/shm of 64 KiB", small_shm, small_shm, shares),
        ("a user namespace", "", "unshare -Ur", shares),
        ("a user namespace each", "unshare -Ur", "unshare -Ur", shares),
        ("a user namespace that knows no user", "", "unshare -U", other),
        ("a user namespace and a PID namespace", &user_and_pid, &user_and_pid, shares),
    ] {
        for link in if why.is_empty() { &["memory"][..] } else { &["memory", "auto"] } {
            let port = free_port();
            let contained = |front: &str, cmd: Cmd| {
                let shell = ["sh", "-c", &format!("exec {front} \"$@\""), "sh"].map(Into::into);
                over(cmd, link).behind(if front.is_empty() { Vec::new() } else { shell.to_vec() })
            };
            let server = pair::serve(&contained(server_in, server(port)), port).unwrap();
            let said = contained(client_in, client(port, 3)).run().unwrap();
            let server = server.stop();
            let pings = said.stdout.contains("ping data");
            assert_eq!(
                pings,
                *link == "auto" || why.is_empty(),
                "{name}, {link}: {}\n{}",
                said.text(),
                server.text()
            );
            assert!(*link == "auto" || said.text().contains(why), "{name}: {}", said.text());
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
