//! Two programs on one host over the memory that they share (`UWARP_LINK`), and who must not share it:
//! another user, a program behind a proxy, whoever has not seen the connection.

use std::io::copy;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use serde_json::Value;
use uwarp_conformance::attacker::encode::Setup;
use uwarp_conformance::attacker::peer::Peer;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::NetNs;
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{cc, pair};

/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(120);
const NOBODY: u32 = 65534;
/// Another one, who is not what a namespace makes of those that it does not know.
const SOMEBODY: u32 = 65533;

/// A program over this link.
fn over(link: &str, line: &str) -> Cmd {
    let lib = Dist::find().unwrap().lib();
    Cmd::line(line).env("LD_LIBRARY_PATH", lib).env("UWARP_LINK", link).limit(PATIENCE)
}

/// A server that serves for ever, and its port.
fn server(link: &str) -> (Running, u16) {
    let port = free_port();
    let server = over(link, &format!("rping -s -P -S 1000 -a 127.0.0.1 -p {port}"));
    (pair::serve(&server, port).unwrap(), port)
}

/// A client that sends and reads 50 times and compares, and ends with 0 if all was right.
fn client(link: &str, port: u16) -> Cmd {
    over(link, &format!("rping -c -v -V -S 1000 -C 50 -a 127.0.0.1 -p {port}"))
}

/// One that goes on until it is stopped.
fn endless(link: &str, port: u16) -> Running {
    over(link, &format!("rping -c -S 1000 -a 127.0.0.1 -p {port}")).spawn().unwrap()
}

/// The program's number: what was started is its guard.
fn number(process: &Running) -> String {
    let guard = process.pid().as_raw_nonzero();
    let children = format!("/proc/{guard}/task/{guard}/children");
    let first = || std::fs::read_to_string(&children).unwrap().split_whitespace().next().map(str::to_owned);
    wait_for("a program", process, first)
}

fn wait_for<T>(what: &str, process: &Running, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "never {what}\n{}", process.so_far());
        sleep(Duration::from_millis(10));
    }
}

/// The first queue pair of a process with a stream, as `uwarp stat` shows it.
fn stream(process: &Running) -> Value {
    let pid = number(process);
    let uwarp = Dist::find().unwrap().uwarp().unwrap();
    wait_for("a stream", process, || {
        let output = Command::new(&uwarp).args(["stat", "--json", "--pid", &pid]).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).ok()?;
        let pairs = document["processes"][0]["queue_pairs"].as_array()?;
        let sends = |pair: &Value| pair["sent"]["send"]["bytes"].as_u64().is_some_and(|bytes| bytes > 0);
        pairs.iter().find(|pair| pair["link"].is_string() && sends(pair)).cloned()
    })
}

/// The names of the sockets by which a process is asked for memory: of these, the process holds the inodes.
fn names(process: &Running) -> Vec<String> {
    let pid = number(process);
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let held: Vec<PathBuf> = links.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect();
    let all = std::fs::read_to_string("/proc/net/unix").unwrap();
    let rows = all.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(6);
        let (inode, name) = (words.next()?, words.next()?);
        let name = name.strip_prefix('@').filter(|name| name.starts_with("uwarp-host-"))?;
        held.contains(&PathBuf::from(format!("socket:[{inode}]"))).then(|| name.to_owned())
    });
    let mut names: Vec<String> = rows.collect();
    names.dedup();
    names
}

/// Asks the server for memory in one of the ways of the script.
fn join(server: &Running, way: &str) -> Cmd {
    let name = wait_for("a name", server, || names(server).pop());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("py/joins.py");
    // Another user may not be able to read the file.
    let script = std::fs::read_to_string(script).unwrap();
    Cmd::new("/usr/bin/python3").arg("-c").arg(script).arg(name).arg(way).limit(PATIENCE)
}

fn said(cmd: &Cmd) -> String {
    cmd.run_ok().unwrap().stdout.trim().to_owned()
}

fn descriptors(process: &Running) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", number(process))).unwrap().count()
}

/// The library where another user can read it, for one test.
fn readable_by_all(test: &str) -> PathBuf {
    let to = Path::new("/tmp").join(format!("uwarp-memory-{test}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&to);
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(Dist::find().unwrap().lib()).unwrap().flatten() {
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        match std::fs::read_link(&from) {
            Ok(target) => std::os::unix::fs::symlink(target, to).unwrap(),
            Err(_) if from.is_file() => _ = std::fs::copy(from, to).unwrap(),
            Err(_) => {}
        }
    }
    to
}

/// Carries bytes between one client and the server, as a proxy does; returns its port.
fn proxy(to: u16) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let carried = spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
        let one_way = |from: &TcpStream, to: &TcpStream| {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            spawn(move || {
                // An end that resets its connection ends the other one's.
                let _ = copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            })
        };
        for way in [one_way(&client, &server), one_way(&server, &client)] {
            way.join().unwrap();
        }
    });
    (port, carried)
}

#[test]
fn two_programs_use_memory() {
    for links in [["memory", "memory"], ["auto", "auto"], ["auto", "memory"], ["memory", "auto"]] {
        let (server, port) = server(links[0]);
        client(links[1], port).run_ok().unwrap();
        let client = endless(links[1], port);
        for end in [&server, &client] {
            let stream = stream(end);
            assert_eq!((&stream["link"], &stream["why_tcp"]), (&"memory".into(), &Value::Null), "{links:?}");
        }
        client.stop();
        server.stop();
    }
}

/// Where one end says `tcp`, the other one knows why.
#[test]
fn one_end_decides_for_tcp() {
    let some = |port: u16| format!("tcp:127.0.0.1:{port},memory");
    for (links, whys) in [
        (["tcp", "auto"], [None, Some("memory was not offered")]),
        (
            ["auto", "tcp"],
            [Some("the end that has connected has chosen it"), Some("UWARP_LINK says so here")],
        ),
        (["tcp", "tcp"], [None, None]),
        (["rules", "auto"], [Some("UWARP_LINK says so here"), Some("UWARP_LINK says so at the peer")]),
        (
            ["auto", "rules"],
            [Some("the end that has connected has chosen it"), Some("UWARP_LINK says so here")],
        ),
    ] {
        let port = free_port();
        let link = |link: &str| if link == "rules" { some(port) } else { link.to_owned() };
        let server = over(&link(links[0]), &format!("rping -s -P -S 1000 -a 127.0.0.1 -p {port}"));
        let server = pair::serve(&server, port).unwrap();
        let client = endless(&link(links[1]), port);
        for (end, why) in [&server, &client].into_iter().zip(whys) {
            let stream = stream(end);
            assert_eq!(stream["link"], "tcp", "{links:?}");
            let said = stream["why_tcp"].as_str();
            assert!(
                said.is_some() == why.is_some() && said.is_none_or(|said| said.starts_with(why.unwrap())),
                "{links:?}: {why:?}, and it says {said:?}"
            );
        }
        assert_eq!(names(&server).is_empty(), links[0] == "tcp", "{links:?}");
        client.stop();
        server.stop();
    }
}

/// A link that is named is used, or the connection fails, at both ends.
#[test]
fn a_link_that_is_required_is_had_or_refused() {
    let (port, with_cause) = (free_port(), "UWARP_LINK requires memory, but ");
    let rping = |link: &str, rest: &str| over(link, &format!("rping -S 1000 -a 127.0.0.1 -p {port} {rest}"));
    for (links, why) in [
        (["tcp", "memory"], "memory was not offered"),
        (["tcp:*:1-65535,auto", "memory:127.0.0.0/8"], "UWARP_LINK says so at the peer"),
    ] {
        let server = pair::serve(&rping(links[0], "-s -P"), port).unwrap();
        let said = rping(links[1], "-c -v -C 3").run().unwrap();
        assert!(
            said.status.is_some_and(|status| !status.success()) && !said.stdout.contains("ping data"),
            "{links:?}: {}",
            said.text()
        );
        for word in [with_cause, why, "RDMA_CM_EVENT_CONNECT_ERROR, error -95"] {
            assert!(said.text().contains(word), "{links:?}: {word}: {}", said.text());
        }
        // Others are served.
        rping("auto", "-c -C 3").run_ok().unwrap();
        server.stop();
    }
    // The end that has connected does not care; the one that accepts does.
    for links in ["tcp", "tcp:127.0.0.1", "auto"] {
        let server = rping("memory:127.0.0.1,tcp", "-s").spawn().unwrap();
        wait_for("a port", &server, || TcpListener::bind(("127.0.0.1", port)).is_err().then_some(()));
        let client = rping(links, "-c -v -C 3").spawn().unwrap();
        let refused = links != "auto";
        let server = server.wait().unwrap();
        for word in [with_cause, "RDMA_CM_EVENT_CONNECT_ERROR, error -95"] {
            assert_eq!(server.text().contains(word), refused, "{links}: {}", server.text());
        }
        // rping's client waits for ever if its connection ends just before it waits.
        let client = if refused { client.stop() } else { client.wait().unwrap() };
        assert_eq!(client.stdout.contains("ping data"), !refused, "{links}: {}", client.text());
    }
}

/// A TCP connection in two halves has other addresses at each end.
#[test]
fn a_proxy_is_not_passed_by() {
    let (server, port) = server("auto");
    let (between, carried) = proxy(port);
    let client = endless("auto", between);
    let stream = stream(&client);
    assert_eq!(stream["link"], "tcp");
    let why = stream["why_tcp"].as_str().unwrap_or_default();
    assert!(why.contains("does not know this connection"), "{why}");
    client.stop();
    carried.join().unwrap();
    server.stop();
}

#[test]
fn a_program_of_another_user_uses_tcp_or_does_not_connect() {
    let lib = readable_by_all("users");
    let as_nobody = |cmd: Cmd| cmd.env("LD_LIBRARY_PATH", &lib).as_user(NOBODY);
    let (server, port) = server("auto");
    let client_of_his = as_nobody(over("auto", &format!("rping -c -S 1000 -a 127.0.0.1 -p {port}")));
    let his = client_of_his.spawn().unwrap();
    assert_eq!(stream(&server)["link"], "tcp");
    his.stop();
    as_nobody(client("auto", port)).run_ok().unwrap();
    let without = as_nobody(client("memory", port)).run().unwrap();
    assert!(!without.stdout.contains("ping data"), "there was no memory for it: {}", without.text());
    client("memory", port).run_ok().unwrap();
    server.stop();
    std::fs::remove_dir_all(lib).unwrap();
}

#[test]
fn another_user_is_not_heard() {
    let (server, port) = server("memory");
    let honest = endless("memory", port);
    assert_eq!(stream(&honest)["link"], "memory");
    let before = descriptors(&server);
    for way in ["nothing", "guesses", "nonsense", "crowds", "floods"] {
        assert_eq!(said(&join(&server, way).as_user(NOBODY)), "closed", "{way}");
        client("memory", port).run_ok().unwrap();
    }
    // What was shared with those that have ended is gone.
    wait_for("as many descriptors", &server, || (descriptors(&server) <= before).then_some(()));
    assert!(honest.is_running(), "{}", honest.so_far());
    honest.stop();
    server.stop();
}

/// The word that proves who asks goes over the connection, counts once, and for that connection.
#[test]
fn a_nonce_counts_once_and_on_this_host() {
    let elsewhere = NetNs::new().unwrap();
    // A question about a connection that does not come is answered after a while.
    for (way, first) in [
        ("proves", "granted"),
        ("proves_twice", "granted answered 2"),
        ("proves_another_connection", "answered 2"),
    ] {
        // rping does not take one connection while it ends another.
        let (server, port) = server("memory");
        let peer = Peer::set_up(port, &Setup::uwarp()).unwrap();
        let data = &peer.reply.as_ref().unwrap().private_data;
        let nonce: String = data[data.len() - 28..][..16].iter().map(|byte| format!("{byte:02x}")).collect();
        let proof = format!("{nonce} {} {port}", peer.tcp.local_addr().unwrap().port());
        let asks = |way: &str, ns: Option<&NetNs>| said(&join(&server, way).args(&proof).in_ns(ns));
        assert_eq!(asks("proves", Some(&elsewhere)), "not there");
        assert_eq!(asks(way, None), first, "{way}");
        // Another process has heard it, and asks again.
        assert_eq!(asks("proves", None), "answered 2", "{way}, again");
        // No honest client, as in the other tests: the raw connection is given up 10 s after its set-up, and
        // rping's server ends with that.
        server.stop();
    }
}

/// A process of the same user may ask. What it says is checked, and costs nobody else anything.
#[test]
fn who_lies_gets_nothing() {
    let (server, port) = server("memory");
    let honest = endless("memory", port);
    assert_eq!(stream(&honest)["link"], "memory");
    for (way, becomes) in [
        ("nothing", "closed"),
        ("guesses", "answered 2"),
        ("nonsense", "closed"),
        ("another_version", "closed"),
        ("no_descriptors", "answered 3 closed"),
        ("too_many_descriptors", "answered 3 closed"),
        ("files", "answered 3 closed"),
        ("without_seals", "answered 3 closed"),
        ("a_small_slab", "answered 3 closed"),
        ("a_slab_before_the_board", "answered 3 closed"),
        ("a_second_board", "answered 3 closed"),
        ("a_bell_that_is_a_pipe", "answered 3 closed"),
        ("a_bell_that_waits", "answered 3 closed"),
        ("half", "closed"),
        ("asks_on_and_on", "answered 2"),
        ("crowds", "closed"),
        ("floods", "closed"),
    ] {
        assert_eq!(said(&join(&server, way)), becomes, "{way}");
        client("memory", port).run_ok().unwrap();
    }
    assert!(honest.is_running(), "{}", honest.so_far());
    honest.stop();
    server.stop();
}

/// To the processes of this host that datagrams of a process go to, as `uwarp stat` shows it.
fn datagram_peers(process: &Running) -> Vec<Value> {
    let uwarp = Dist::find().unwrap().uwarp().unwrap();
    let output = Command::new(&uwarp).args(["stat", "--json", "--pid", &number(process)]).output().unwrap();
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let pairs = document["processes"][0]["queue_pairs"].as_array().cloned().unwrap_or_default();
    pairs.iter().filter_map(|pair| pair["peers"].as_array().cloned()).flatten().collect()
}

/// Two ends that send datagrams to each other until they are stopped, over these links.
fn endless_datagrams(links: [&str; 2]) -> [Running; 2] {
    let port = free_port();
    let line = format!("ibv_ud_pingpong -g 0 -p {port} -n 100000000");
    let server = pair::serve(&over(links[0], &line), port).unwrap();
    [server, over(links[1], &format!("{line} 127.0.0.1")).spawn().unwrap()]
}

#[test]
fn datagrams_go_by_memory_and_uwarp_stat_says_so() {
    let ends = endless_datagrams(["auto", "memory"]);
    for end in &ends {
        let peer = wait_for("by memory", end, || {
            let mut peers = datagram_peers(end).into_iter();
            peers.find(|peer| peer["link"] == "memory" && peer["received"].as_u64() > Some(100))
        });
        assert!(peer["sent"].as_u64() > Some(100) && peer["no_room"] == 0 && peer["why"].is_null(), "{peer}");
        let uwarp = Dist::find().unwrap().uwarp().unwrap();
        let text = Command::new(&uwarp).args(["stat", "--pid", &number(end)]).output().unwrap();
        assert!(String::from_utf8_lossy(&text.stdout).contains(" by memory"), "{text:?}");
    }
    ends.into_iter().for_each(|end| _ = end.stop());
}

#[test]
fn who_wants_udp_is_left_with_it_and_his_peer_says_why() {
    let ends = endless_datagrams(["tcp", "auto"]);
    let peer = wait_for("a reason", &ends[1], || {
        datagram_peers(&ends[1]).into_iter().find(|peer| peer["why"].is_string())
    });
    assert_eq!((&peer["link"], &peer["sent"]), (&"udp".into(), &0.into()), "{peer}");
    assert!(peer["why"].as_str().unwrap().contains("memory was not offered"), "{peer}");
    assert_eq!(datagram_peers(&ends[0]), Vec::<Value>::new());
    ends.into_iter().for_each(|end| _ = end.stop());
}

/// Of perftest, rdma-core and rdma_cm. Bandwidth for a time, not for a number of messages: a receiver that
/// gets no processor for a while has no receive posted for what its background thread then finds, and loses
/// it.
#[test]
fn programs_that_send_datagrams_find_memory() {
    let says = "go by memory";
    for line in [
        "ibv_ud_pingpong -g 0 -p PORT -n 5000",
        "ibv_ud_pingpong -g 0 -p PORT -n 500 -e",
        "ib_send_lat -c UD -F -p PORT -n 5000 -s 64",
        "ib_send_lat -c UD -F -p PORT -n 500 -s 1024 -e",
        "ib_send_lat -c UD -F -p PORT -R -n 2000",
        "ib_send_bw -c UD -F -p PORT -D 1 -s 1024",
        "ib_send_bw -c UD -F -p PORT -D 1 -b -s 512",
        "ib_send_bw -c UD -F -p PORT -D 1 -q 4 -s 512",
    ] {
        let port = free_port();
        let line = line.replace("PORT", &port.to_string());
        let server = over("auto", &line).env("UWARP_LOG", "info");
        let client = over("auto", &format!("{line} 127.0.0.1")).env("UWARP_LOG", "info");
        let ends = pair::run(&server, &client, port).unwrap();
        ends.exited_ok().unwrap();
        for output in [&ends.server, &ends.client] {
            assert!(output.stderr.contains(says), "{line}\n{}", output.text());
        }
    }
}

const CANNOT_BE_TRACED: &str = "this program has more rights than its user, cannot be traced";
const ITS_PEER_CANNOT: &str = "the peer's program cannot be traced any more";
const ITS_PEER_DECIDES: &str = "the end that has connected has chosen it";
const NOT_OFFERED: &str = "memory was not offered";

/// Why each stream of a process is TCP, sorted; "": it goes by memory. `uwarp`: the command, of its user.
fn whys(process: &Running, uwarp: &Cmd, streams: usize) -> Vec<String> {
    let stat = uwarp.clone().args("stat --json --pid").arg(number(process)).limit(PATIENCE);
    wait_for("so many streams", process, || {
        let document: Value = serde_json::from_str(&stat.run().unwrap().stdout).ok()?;
        let pairs = document["processes"][0]["queue_pairs"].as_array()?;
        let sends = |pair: &&Value| pair["sent"]["send"]["bytes"].as_u64().is_some_and(|bytes| bytes > 0);
        let why = |pair: &Value| match pair["link"].as_str()? {
            "memory" => Some(String::new()),
            link => Some(pair["why_tcp"].as_str().unwrap_or(link).to_owned()),
        };
        let mut whys: Vec<String> = pairs.iter().filter(sends).filter_map(why).collect();
        whys.sort();
        (whys.len() == streams).then_some(whys)
    })
}

/// What both ends say of their streams must begin with these.
fn end_up(ends: [&Cmd; 2], port: u16, uwarp: &Cmd, becomes: [&[&str]; 2]) {
    let server = pair::serve(ends[0], port).unwrap();
    let client = ends[1].spawn().unwrap();
    for (end, whys_of_end) in [&server, &client].into_iter().zip(becomes) {
        let said = whys(end, uwarp, whys_of_end.len());
        let all = said.iter().zip(whys_of_end);
        assert!(
            all.clone().all(|(said, why)| said.starts_with(why) && said.is_empty() == why.is_empty()),
            "{said:?}, and not {becomes:?}: {} and {}",
            ends[0].shown(),
            ends[1].shown()
        );
    }
    client.stop();
    server.stop();
}

/// One of two ends, which requires memory, is told by its event that there is none, and the log says why.
fn is_refused(ends: [&Cmd; 2], port: u16, refused: usize, why: &str) {
    let server = pair::serve(ends[0], port).unwrap();
    let client = ends[1].spawn().unwrap();
    let mut both = [server, client];
    both.swap(0, refused);
    let [told, other] = both;
    let told = told.wait().unwrap();
    other.stop();
    for words in ["RDMA_CM_EVENT_CONNECT_ERROR (status -95)", "UWARP_LINK requires memory, but ", why] {
        assert!(told.text().contains(words), "{words}: {}", told.text());
    }
    assert!(!told.stdout.contains("ok connected"), "{}", told.text());
}

/// A program may forbid other processes of its user to look into it (PR_SET_DUMPABLE) at any time. From then
/// on it shares nothing more with them.
#[test]
fn who_must_not_be_looked_into_shares_nothing() {
    let program = cc::build("shares", &Path::new(env!("CARGO_TARGET_TMPDIR")).join("memory")).unwrap();
    let end = |link: &str, args: String| over(link, &program.display().to_string()).args(&args);
    let uwarp = Cmd::new(Dist::find().unwrap().uwarp().unwrap());
    // In turn: before which connection each end is not dumpable any more, and what becomes of them.
    let rows: [([u32; 2], [&[&str]; 2]); 5] = [
        ([0, 0], [&["", ""], &["", ""]]),
        ([1, 0], [&[CANNOT_BE_TRACED; 2], &[ITS_PEER_CANNOT; 2]]),
        ([0, 1], [&[ITS_PEER_DECIDES; 2], &[CANNOT_BE_TRACED; 2]]),
        ([2, 0], [&["", CANNOT_BE_TRACED], &["", ITS_PEER_CANNOT]]),
        ([0, 2], [&["", ITS_PEER_DECIDES], &["", CANNOT_BE_TRACED]]),
    ];
    for ([server, client], becomes) in rows {
        let port = free_port();
        let server = end("auto", format!("serve {port} 2 {server}"));
        let client = end("auto", format!("connect {port} 2 {client}"));
        end_up([&server, &client], port, &uwarp, becomes);
    }
    for (links, undumpable, refused, why) in [
        (["auto", "memory"], [1, 0], 1, ITS_PEER_CANNOT),
        (["auto", "memory"], [0, 1], 1, CANNOT_BE_TRACED),
        (["memory", "auto"], [1, 0], 0, CANNOT_BE_TRACED),
        (["memory", "auto"], [0, 1], 0, ITS_PEER_DECIDES),
    ] {
        let port = free_port();
        let server = end(links[0], format!("serve {port} 1 {}", undumpable[0]));
        let client = end(links[1], format!("connect {port} 1 {}", undumpable[1]));
        is_refused([&server, &client], port, refused, why);
    }
}

/// Gives a program one capability, CAP_NET_BIND_SERVICE: who starts it has it then (capabilities(7)).
fn give_rights(program: &Path) {
    // `struct vfs_cap_data` of the second revision, with its "effective" bit.
    let words: [u32; 5] = [0x0200_0001, 1 << 10, 0, 0, 0];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    rustix::fs::setxattr(program, "security.capability", &bytes, rustix::fs::XattrFlags::empty()).unwrap();
}

/// A program with rights of its file's (AT_SECURE) must not be read by others of its user. It finds the
/// library where it was told when it was linked: LD_LIBRARY_PATH is not heard.
#[test]
fn who_has_more_rights_than_its_user_shares_nothing() {
    let lib = readable_by_all("rights");
    let program = cc::build_with(
        "shares",
        &Path::new(env!("CARGO_TARGET_TMPDIR")).join("memory_rights"),
        &format!("-Wl,-rpath,{}", lib.display()),
    );
    let program = program.unwrap();
    let [plain, with_rights] = ["plain", "with_rights"].map(|name| lib.join(name));
    for copy in [&plain, &with_rights] {
        std::fs::copy(&program, copy).unwrap();
    }
    give_rights(&with_rights);
    let end = |link: &str, program: &Path, args: String| {
        let cmd = Cmd::new(program).args(&args).env("UWARP_LINK", link).limit(PATIENCE);
        cmd.unset("LD_LIBRARY_PATH").as_user(SOMEBODY)
    };
    // Only the user's own command is answered.
    std::fs::copy(Dist::find().unwrap().uwarp().unwrap(), lib.join("uwarp")).unwrap();
    let uwarp = Cmd::new(lib.join("uwarp")).as_user(SOMEBODY);
    let said = end("tcp", &with_rights, "connect 1".into()).run().unwrap();
    assert!(said.stdout.contains("AT_SECURE 1"), "is /tmp mounted with nosuid? {}", said.text());
    let rows: [([&PathBuf; 2], [&[&str]; 2]); 3] = [
        ([&plain, &plain], [&[""], &[""]]),
        ([&with_rights, &plain], [&[CANNOT_BE_TRACED], &[NOT_OFFERED]]),
        ([&plain, &with_rights], [&[ITS_PEER_DECIDES], &[CANNOT_BE_TRACED]]),
    ];
    for (programs, becomes) in rows {
        let port = free_port();
        let server = end("auto", programs[0], format!("serve {port}"));
        let client = end("auto", programs[1], format!("connect {port}"));
        end_up([&server, &client], port, &uwarp, becomes);
    }
    for (links, programs, refused, why) in [
        (["auto", "memory"], [&with_rights, &plain], 1, NOT_OFFERED),
        (["auto", "memory"], [&plain, &with_rights], 1, CANNOT_BE_TRACED),
        (["memory", "auto"], [&with_rights, &plain], 0, CANNOT_BE_TRACED),
    ] {
        let port = free_port();
        let server = end(links[0], programs[0], format!("serve {port}"));
        let client = end(links[1], programs[1], format!("connect {port}"));
        is_refused([&server, &client], port, refused, why);
    }
    std::fs::remove_dir_all(lib).unwrap();
}
