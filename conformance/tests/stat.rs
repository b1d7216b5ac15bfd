//! `uwarp stat` looks at real programs while they run.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use uwarp_conformance::attacker::encode::Setup;
use uwarp_conformance::attacker::peer::Peer;
use uwarp_conformance::attacker::victim::Victim;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{cc, pair};

/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(120);

fn over_uwarp(line: &str) -> Cmd {
    Cmd::line(line).env("LD_LIBRARY_PATH", Dist::find().unwrap().lib())
}

fn stat(arguments: &[&str]) -> (bool, String) {
    let uwarp = Dist::find().unwrap().uwarp().unwrap();
    let output = Command::new(uwarp).arg("stat").args(arguments).output().unwrap();
    // It names a process that it does not find.
    let said = String::from_utf8_lossy(&output.stderr);
    let known =
        [" has opened no device of uwarp, or runs with --stat off", "there is no process ", " is of user "];
    assert!(said.is_empty() || known.iter().any(|known| said.contains(known)), "{said}");
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

/// What `uwarp stat --json` says of a process.
fn of(process: &Running) -> Option<Value> {
    let (_, text) = stat(&["--json", "--pid", &number(process)]);
    let document: Value = serde_json::from_str(&text).unwrap();
    document["processes"].as_array().unwrap().first().cloned()
}

/// The program's number: what was started is its guard.
fn number(process: &Running) -> String {
    let guard = process.pid().as_raw_nonzero();
    let start = Instant::now();
    loop {
        let children = std::fs::read_to_string(format!("/proc/{guard}/task/{guard}/children")).unwrap();
        if let Some(child) = children.split_whitespace().next() {
            return child.to_owned();
        }
        assert!(start.elapsed() < PATIENCE, "the program has not started");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Looks until it is as wanted.
fn until(process: &Running, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let found = of(process);
        if let Some(found) = &found
            && wanted(found)
        {
            return found.clone();
        }
        assert!(start.elapsed() < PATIENCE, "{what}: {found:?}\n{}", process.so_far());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until it is so.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "never {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn sent(found: &Value) -> u64 {
    found["totals"]["sent"]["send"]["bytes"].as_u64().unwrap_or(0)
}

/// A client that goes on until it is stopped, and its server.
fn endless_rping(server_env: &[(&str, &str)], client_env: &[(&str, &str)]) -> (Running, Running) {
    let (server, port) = rping_server();
    let server = pair::serve(&server.envs(server_env), port).unwrap();
    let client = over_uwarp(&format!("rping -c -S 1000 -a 127.0.0.1 -p {port}"));
    (server, client.envs(client_env).spawn().unwrap())
}

/// A server that waits for ever.
fn rping_server() -> (Cmd, u16) {
    let port = free_port();
    (over_uwarp(&format!("rping -s -P -S 1000 -a 127.0.0.1 -p {port}")), port)
}

#[test]
fn datagrams_that_reach_nobody_are_counted_by_reason() {
    let port = free_port();
    let server = pair::serve(&over_uwarp(&format!("ibv_ud_pingpong -g 0 -p {port}")), port).unwrap();
    let found = until(&server, "a queue pair", |found| found["queue_pairs"][0]["qpn"].is_u64());
    assert_eq!(found["queue_pairs"][0]["service"], "UD");
    let to = u16::try_from(found["queue_pairs"][0]["qpn"].as_u64().unwrap() >> 8).unwrap();
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    for _ in 0..3 {
        stranger.send_to(b"no datagram of iWARP", ("127.0.0.1", to)).unwrap();
    }
    until(&server, "counting", |found| found["drops"]["malformed"] == 3);
    let (_, text) = stat(&["--pid", &number(&server)]);
    assert!(text.contains("datagrams dropped: 3 malformed"), "{text}");
    assert!(text.contains(" UD "), "{text}");
}

#[test]
fn counters_grow_while_a_program_sends() {
    let port = free_port();
    // They send until they are stopped, however long looking at them takes.
    let line = format!("ib_send_bw -R -F -D 1000 -p {port}");
    let server = pair::serve(&over_uwarp(&line), port).unwrap();
    let client = over_uwarp(&format!("{line} 127.0.0.1")).spawn().unwrap();

    let first = until(&client, "sending", |found| sent(found) > 1 << 20);
    until(&client, "sending on", |found| sent(found) > sent(&first) + (1 << 20));
    let pair = first["queue_pairs"]
        .as_array()
        .unwrap()
        .iter()
        .max_by_key(|pair| pair["sent"]["send"]["bytes"].as_u64())
        .unwrap();
    assert_eq!(pair["state"], "RTS");
    assert_eq!(pair["peer_is_uwarp"], true);
    assert!(pair["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{pair}");
    let messages = pair["sent"]["send"]["messages"].as_u64().unwrap();
    assert_eq!(pair["sent"]["send"]["bytes"].as_u64(), Some(messages * 65536));
    assert_eq!(pair["failed"], 0);

    let at_server = until(&server, "receiving", |found| {
        found["totals"]["received"]["send"]["bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20)
    });
    assert_eq!(at_server["command"], "ib_send_bw");

    let (ok, table) = stat(&["--pid", &number(&client)]);
    assert!(ok && table.starts_with(&format!("ib_send_bw ({}): ", number(&client))), "{table}");
    // It only sends: of what there was none, there is no row.
    assert!(table.contains("\nSend ") && table.contains(" RTS "), "{table}");
    assert!(!table.contains("Response"), "{table}");

    assert!(client.is_running() && server.is_running(), "{}{}", client.so_far(), server.so_far());
    client.stop();
    server.stop();
}

#[test]
fn a_peer_with_the_reserved_bits_off_is_a_stranger() {
    const OFF: &[(&str, &str)] = &[("UWARP_PEER", "off")];
    for (server_env, client_env, known) in [(&[][..], &[][..], true), (OFF, &[], false), (&[], OFF, false)] {
        let (server, client) = endless_rping(server_env, client_env);
        for end in [&server, &client] {
            // rping's server has no other queue pair than that of its one client.
            let found = until(end, "connected", |found| found["queue_pairs"][0]["state"] == "RTS");
            assert_eq!(
                found["queue_pairs"][0]["peer_is_uwarp"], known,
                "{server_env:?} {client_env:?}: {found}"
            );
        }
        client.stop();
        server.stop();
    }
}

/// Processor time of a process, in ticks.
fn ticks(process: &Running) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", number(process))).unwrap();
    let (_, words) = stat.rsplit_once(") ").unwrap();
    words.split(' ').skip(11).take(2).map(|word| word.parse::<u64>().unwrap()).sum()
}

/// With nothing to do, a process whose background thread sleeps stands still.
#[test]
fn a_background_thread_that_spins_never_sleeps() {
    let (server, port) = rping_server();
    let server = pair::serve(&server.env("UWARP_PROGRESS", "spin"), port).unwrap();
    let (start, before) = (Instant::now(), ticks(&server));
    while ticks(&server) < before + 20 {
        assert!(start.elapsed() < PATIENCE, "it sleeps");
        std::thread::sleep(Duration::from_millis(20));
    }
    server.stop();
}

#[test]
fn reads_and_writes_count_where_the_payload_goes() {
    let (server, port) = rping_server();
    let server = pair::serve(&server, port).unwrap();
    let line = format!("rping -c -v -V -C 40 -S 1000 -a 127.0.0.1 -p {port}");
    over_uwarp(&line).run_ok().unwrap();
    // The server reads the client's buffer and writes it back, once in each round. Its queue pair may be
    // gone.
    let totals = until(&server, "40 rounds", |found| {
        found["totals"]["received"]["read_response"]["messages"].as_u64().is_some_and(|n| n >= 40)
    })["totals"]
        .clone();
    assert_eq!(totals["received"]["read_response"]["bytes"].as_u64(), Some(40 * 1000), "{totals}");
    assert_eq!(totals["sent"]["write"]["messages"].as_u64(), Some(40), "{totals}");
    assert_eq!(totals["received"]["write"]["messages"].as_u64(), Some(0), "{totals}");
    server.stop();
}

/// Stalls, Terminates, failures, flushes: `c/counted.c` does each on purpose, and says what of it a queue
/// pair must have counted.
#[test]
fn what_goes_wrong_is_counted() {
    let program = cc::build("counted", &Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-stat")).unwrap();
    let program = Cmd::new(program).arg("127.0.0.1").env("LD_LIBRARY_PATH", Dist::find().unwrap().lib());
    let program = program.spawn().unwrap();
    program.until(PATIENCE, "waiting", |program| program.so_far().contains("\nwaiting\n")).unwrap();
    let (found, text) = (of(&program).unwrap(), program.so_far());
    let expected: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("queue pair ")).collect();
    assert_eq!(expected.len(), 4, "{text}");
    for line in expected {
        let (qpn, counters) = line.split_once(": ").unwrap();
        let qpn: u64 = qpn.parse().unwrap();
        let mut pairs = found["queue_pairs"].as_array().unwrap().iter();
        let pair = pairs.find(|pair| pair["qpn"] == qpn).unwrap();
        let words: Vec<_> = counters.split(' ').collect();
        assert_eq!(words.len(), 12, "{line}");
        for counter in words.chunks(2) {
            let (name, want) = (counter[0], counter[1].parse().unwrap());
            let counted = pair[name].as_u64().unwrap_or_else(|| panic!("no {name}: {pair}"));
            // How often a socket is full is up to the system.
            let right = if name == "room_stalls" { counted >= want } else { counted == want };
            assert!(right, "{name} is {counted}, want {want}: {pair}\n{text}");
        }
    }
    let sum = |name: &str| {
        let pairs = found["queue_pairs"].as_array().unwrap();
        pairs.iter().map(|pair| pair[name].as_u64().unwrap()).sum::<u64>()
    };
    for name in ["receive_stalls", "room_stalls", "terminates_sent", "terminates_received", "flushed"] {
        assert_eq!(found["totals"][name].as_u64(), Some(sum(name)), "{name}");
    }
    let (_, table) = stat(&["--pid", &number(&program)]);
    for words in ["1 receive", " room", "1 failed", " flushed", "1 Terminate sent", "1 Terminate received"] {
        assert!(table.contains(words), "no \"{words}\": {table}");
    }
    program.stop();
}

#[test]
fn nothing_is_left_of_a_process_that_was_killed() {
    let (server, port) = rping_server();
    let server = pair::serve(&server, port).unwrap();
    until(&server, "there", |_| true);
    let pid = number(&server);
    server.signal(Signal::KILL).unwrap();
    drop(server.wait());
    // What was waited for is its guard; the system may still be at it.
    eventually("gone", || {
        let (ok, text) = stat(&["--pid", &pid]);
        !ok && text.is_empty()
    });
}

#[test]
fn a_stopped_process_keeps_nobody_waiting() {
    let (server, port) = rping_server();
    let server = pair::serve(&server, port).unwrap();
    server.signal(Signal::STOP).unwrap();
    let tasks = format!("/proc/{}/task", number(&server));
    let stopped = |task: std::io::Result<std::fs::DirEntry>| {
        // A thread may end before it is stopped.
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
    };
    eventually("stopped", || std::fs::read_dir(&tasks).unwrap().all(stopped));
    let (_, text) = stat(&["--pid", &number(&server)]);
    assert!(text.contains("does not answer; it may be stopped"), "{text}");
    server.signal(Signal::CONT).unwrap();
    until(&server, "going on", |found| found["totals"].is_object());
    server.stop();
}

#[test]
fn a_program_can_be_hidden() {
    let (server, port) = rping_server();
    let server = pair::serve(&server.env("UWARP_STAT", "off"), port).unwrap();
    assert!(of(&server).is_none());
    server.stop();
}

/// `ib_write_lat`'s server writes first. Where its client's end does not ask for the peer-to-peer model, as
/// Linux siw does not, neither goes on: RFC 5044 section 7.1.2 has the responder wait. The program cannot
/// know; whoever looks is told.
#[test]
fn a_server_that_must_not_speak_first_says_so() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stat");
    let program = cc::build("victim", &dir).unwrap();
    let mut server = Victim::start(&program, &Dist::find().unwrap(), &[], &[]).unwrap();
    server.tell("profile sends=1").unwrap();
    // A client that asks for no peer-to-peer model, as siw does not, and that says nothing.
    let client = Peer::set_up(server.port, &Setup::request1()).unwrap();
    let pid = server.pid().to_string();
    let muted = || {
        let document: Value = serde_json::from_str(&stat(&["--json", "--pid", &pid]).1).unwrap();
        let pairs = document["processes"][0]["queue_pairs"].as_array().cloned().unwrap_or_default();
        pairs.iter().any(|pair| pair["muted"] == true)
    };
    let start = Instant::now();
    while !muted() {
        assert!(start.elapsed() < PATIENCE, "nothing is muted");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (_, table) = stat(&["--pid", &pid]);
    assert!(table.contains("RTS, waits for the peer's first message"), "{table}");
    drop(client);
}

/// Names in the abstract namespace are open to all.
#[test]
fn other_users_learn_nothing() {
    let (server, port) = rping_server();
    let server = pair::serve(&server, port).unwrap();
    until(&server, "there", |_| true);
    let name = format!("\\0uwarp-stat-{}-{}-0", rustix::process::getuid().as_raw(), number(&server));
    let script = format!(
        "import socket as s;c=s.socket(s.AF_UNIX);c.settimeout(60);c.connect('{name}');print(len(c.recv(9)))"
    );
    let look = |cmd: Cmd| cmd.run_ok().unwrap().stdout.trim().to_owned();
    let python = || Cmd::new("/usr/bin/python3").arg("-c").arg(&script);
    assert_eq!(look(python()), "9", "the same user is answered");
    assert_eq!(look(python().as_user(65534)), "0", "another one is not");
    server.stop();
}
