//! Programs of TCP sockets under `uwarp run --sockets`: passing through, as rsockets at both ends, with a
//! rule at one end only, and upgraded in place where both ends or one of them would.

use std::fs;
use std::path::Path;

use rustix::process::{Pid, getpgid};
use uwarp_conformance::netns::NetNs;
use uwarp_conformance::pair;
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{Context, Outcome, require};

use super::Run::{self, Long};
use super::{Case, LONG, Scratch, World};

const LO: &[Topology] = &[Loopback4];
const LO_BOTH: &[Topology] = &[Loopback4, Loopback6];
const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4];

pub const FILE: &str = "the copy is the file";

/// What the two ends are run with.
#[derive(Clone, Copy)]
pub struct Rules {
    pub server: &'static str,
    pub client: &'static str,
}

/// Preloaded, without a rule.
pub const THROUGH: Rules = Rules { server: "", client: "" };
/// A rule for the port, at both ends.
pub const BOTH: Rules = Rules { server: "rsockets:port=", client: "rsockets:port=" };
/// A rule for the port at the client only, which allows TCP.
pub const CLIENT: Rules = Rules { server: "", client: "rsockets:fallback,port=" };

const WAYS: [(&str, Rules); 3] = [
    ("passing through", THROUGH),
    ("as rsockets", BOTH),
    ("as rsockets at the client, with fallback", CLIENT),
];

/// Rules for upgrades in place.
const UPGRADES: [(&str, Rules); 3] = [
    ("upgraded", Rules { server: "upgrade:port=", client: "upgrade:port=" }),
    ("upgraded at the client only: TCP", Rules { server: "", client: "upgrade:port=" }),
    ("upgraded at the server only: TCP", Rules { server: "upgrade:port=", client: "" }),
];

impl Rules {
    /// Whether the connection is upgraded, if at all.
    fn are_upgrades(self) -> bool {
        [self.server, self.client].iter().any(|rule| rule.starts_with("upgrade"))
    }

    /// Whether iWARP carries anything.
    fn agree(self) -> bool {
        !(self.server.is_empty() || self.are_upgrades() && self.client.is_empty())
    }
}

/// Rows of sockets.
pub fn cases() -> Vec<Case> {
    let mut cases = rows();
    cases.extend(upgrades());
    cases
}

/// Rows of connections that begin as TCP.
fn upgrades() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut row = |program, manner, checked, at, run: Run| {
        cases.push(Case { program, manner, checked, at, run });
    };
    macro_rules! way {
        ($index:literal, $at:expr) => {
            let manner = UPGRADES[$index].0;
            row(
                "curl, http.server",
                manner,
                FILE,
                $at,
                Long(|w, p| http(w, 100_000_000, UPGRADES[$index].1, p)),
            );
            row("curl, nginx", manner, FILE, LO, Long(|w, p| nginx(w, UPGRADES[$index].1, p)));
            let checked = "every request answered; what was set is read back";
            row(
                "redis-benchmark",
                manner,
                checked,
                $at,
                Long(|w, p| redis(w, 100_000, UPGRADES[$index].1, p)),
            );
            let checked = "both ends end with 0; bytes are received, and no more than were sent";
            row("iperf3", manner, checked, $at, Long(|w, p| iperf(w, "-n 400M -P 4", UPGRADES[$index].1, p)));
            let checked = "what was set is read back";
            row("memcached", manner, checked, LO, Long(|w, p| memcached(w, UPGRADES[$index].1, p)));
            row("nc", manner, FILE, LO, Long(|w, p| netcat(w, UPGRADES[$index].1, p)));
        };
    }
    way!(0, LO_AND_VETH);
    way!(1, LO);
    way!(2, LO);
    cases
}

fn rows() -> Vec<Case> {
    let row = |program, manner, checked, at, run: Run| Case { program, manner, checked, at, run };
    let [through, both, client] = WAYS.map(|(manner, _)| manner);
    const HTTP: &str = "curl, http.server";
    const REDIS: &str = "redis-benchmark";
    const REDIS_CHECKED: &str = "every request answered; what was set is read back";
    const IPERF: &str = "both ends end with 0; bytes are received, and no more than were sent";
    vec![
        row(HTTP, through, FILE, LO, Long(|w, p| http(w, 1_000_000, THROUGH, p))),
        row(HTTP, both, FILE, LO_BOTH, Long(|w, p| http(w, 5_000_000, BOTH, p))),
        row(HTTP, client, FILE, LO, Long(|w, p| http(w, 1_000_000, CLIENT, p))),
        row("curl, nginx", "256 MiB, passing through", FILE, LO, Long(|w, p| nginx(w, THROUGH, p))),
        row("curl, nginx", "256 MiB, as rsockets", FILE, LO, Long(|w, p| nginx(w, BOTH, p))),
        row("curl, nginx", "256 MiB, as rsockets at the client", FILE, LO, Long(|w, p| nginx(w, CLIENT, p))),
        row(REDIS, through, REDIS_CHECKED, LO, Long(|w, p| redis(w, 1000, THROUGH, p))),
        row(REDIS, both, REDIS_CHECKED, LO_AND_VETH, Long(|w, p| redis(w, 1000, BOTH, p))),
        row(REDIS, client, REDIS_CHECKED, LO, Long(|w, p| redis(w, 1000, CLIENT, p))),
        row(
            REDIS,
            "100,000 requests, as rsockets",
            REDIS_CHECKED,
            LO,
            Long(|w, p| redis(w, 100_000, BOTH, p)),
        ),
        row("iperf3", "passing through", IPERF, LO, Long(|w, p| iperf(w, "-n 200M", THROUGH, p))),
        row("iperf3", both, IPERF, LO, Long(|w, p| iperf(w, "-n 20M", BOTH, p))),
        row("iperf3", "-P 4 -R, as rsockets", IPERF, LO, Long(|w, p| iperf(w, "-n 400M -P 4 -R", BOTH, p))),
        row("memcached", through, "what was set is read back", LO, Long(|w, p| memcached(w, THROUGH, p))),
        row("memcached", both, "what was set is read back", LO, Long(|w, p| memcached(w, BOTH, p))),
        row("nc", through, FILE, LO, Long(|w, p| netcat(w, THROUGH, p))),
        row("nc", both, FILE, LO, Long(|w, p| netcat(w, BOTH, p))),
        // It serves each connection in a child process, which a rule cannot allow.
        row("scp, sshd", through, FILE, LO, Long(|w, p| ssh(w, THROUGH, p))),
        row("scp, sshd", client, FILE, LO, Long(|w, p| ssh(w, CLIENT, p))),
    ]
}

impl World {
    /// A program behind `uwarp run --sockets`, with a rule that ends in the port.
    pub fn with_sockets(&self, line: &str, rule: &str, port: u16, ns: Option<&NetNs>) -> Outcome<Cmd> {
        let option = if rule.is_empty() { "--sockets".to_owned() } else { format!("--sockets={rule}{port}") };
        let front = [self.dist()?.uwarp()?.into_os_string(), "run".into(), option.into(), "--".into()];
        Ok(Cmd::line(line).behind(front).unset("LD_LIBRARY_PATH").in_ns(ns).limit(LONG))
    }
}

/// The address in a URL.
pub fn host(address: &str) -> String {
    if address.contains(':') { format!("[{address}]") } else { address.to_owned() }
}

pub fn file_of(dir: &Path, len: usize) -> Outcome<Vec<u8>> {
    let mut seed = 7u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 56) as u8
    };
    let bytes: Vec<u8> = (0..len).map(|_| next()).collect();
    fs::write(dir.join("from"), &bytes).context(dir.display())?;
    Ok(bytes)
}

/// Runs a server, fetches its file, and compares.
fn fetch(
    world: &World,
    server: &str,
    bytes: &[u8],
    dir: &Path,
    rules: Rules,
    port: u16,
    place: Place<'_>,
) -> Outcome {
    let server = world.with_sockets(server, rules.server, port, place.server)?;
    let server = pair::serve(&server, port)?;
    let to = dir.join("to");
    let line = format!("curl -sS -o {} http://{}:{port}/from", to.display(), host(place.address));
    let client = world.with_sockets(&line, rules.client, port, place.client)?.run();
    // A part of it goes by TCP, before it is upgraded.
    let least = if rules.are_upgrades() { bytes.len() / 4 } else { bytes.len() };
    // `uwarp stat` sees the processes of its own namespace.
    let carried = if place.server.is_none() { sent_by_iwarp(world, &server, rules, least) } else { Ok(()) };
    let server = server.stop();
    let client = client?;
    let same = fs::read(&to).is_ok_and(|copy| copy == bytes);
    require!(client.ok() && same, "not copied\n--- client\n{}--- server\n{}", client.text(), server.text());
    carried
}

/// With a rule at both ends, this server has sent and received at least so many bytes by iWARP; else none.
pub fn sent_by_iwarp(world: &World, server: &Running, rules: Rules, least: usize) -> Outcome {
    let out = Cmd::new(world.dist()?.uwarp()?).args("stat --json").run()?;
    let report: serde_json::Value = serde_json::from_str(&out.stdout).unwrap_or_default();
    // Without a rule there is no device, and the process is not there. It has the group of what started it.
    let of_server = |process: &&serde_json::Value| {
        let pid = process["pid"].as_i64().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
        pid.is_some_and(|pid| getpgid(Some(pid)) == Ok(server.pid()))
    };
    let processes = report["processes"].as_array().into_iter().flatten().filter(of_server);
    let bytes = |process: &serde_json::Value| -> u64 {
        let of = |way: &str| process["totals"][way]["write"]["bytes"].as_u64().unwrap_or(0);
        of("sent") + of("received")
    };
    let sum: u64 = processes.map(bytes).sum();
    let good = if rules.agree() { sum >= least as u64 } else { sum == 0 };
    require!(good, "{sum} bytes went by iWARP, of at least {least}\n{}", out.text());
    Ok(())
}

fn http(world: &World, len: usize, rules: Rules, place: Place<'_>) -> Outcome {
    let dir = Scratch::new("http")?;
    let bytes = file_of(&dir.0, len)?;
    let port = free_port();
    let (address, served) = (place.address, dir.0.display());
    let server = format!("/usr/bin/python3 -m http.server {port} --bind {address} --directory {served}");
    fetch(world, &server, &bytes, &dir.0, rules, port, place)
}

/// In one process: with rsockets, workers would be children that have no device. `listen`: what the server
/// listens on.
pub fn nginx_settings(dir: &Path, listen: &str) -> String {
    let at = dir.display();
    format!(
        "daemon off; master_process off; pid {at}/pid; error_log stderr; user root;\n\
         events {{ }}\n\
         http {{ access_log off; client_body_temp_path {at}; proxy_temp_path {at}; fastcgi_temp_path {at};\n\
         uwsgi_temp_path {at}; scgi_temp_path {at};\n\
         server {{ {listen} root {at}; sendfile on; }} }}\n"
    )
}

fn nginx(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let dir = Scratch::new("nginx")?;
    let bytes = file_of(&dir.0, 256 << 20)?;
    let port = free_port();
    let (at, address) = (dir.0.display(), host(place.address));
    let mut settings = nginx_settings(&dir.0, &format!("listen {address}:{port};"));
    if rules.are_upgrades() {
        // Each worker opens the device itself.
        settings = settings.replace("master_process off;", "worker_processes 2;");
    }
    fs::write(dir.0.join("nginx.conf"), settings).context(dir.0.display())?;
    let server = format!("/usr/sbin/nginx -p {at} -c {at}/nginx.conf");
    fetch(world, &server, &bytes, &dir.0, rules, port, place)
}

fn redis(world: &World, requests: u32, rules: Rules, place: Place<'_>) -> Outcome {
    let dir = Scratch::new("redis")?;
    let port = free_port();
    let (at, address) = (dir.0.display(), place.address);
    let line = format!("redis-server --port {port} --bind {address} --dir {at} --protected-mode no");
    let server = world.with_sockets(&line, rules.server, port, place.server)?;
    let server = pair::serve(&server, port)?;
    let run = |line: &str| world.with_sockets(line, rules.client, port, place.client)?.run();
    let value = "v".repeat(40_000);
    let steps = || {
        let bench =
            run(&format!("redis-benchmark -h {address} -p {port} -n {requests} -c 8 -t set,get --csv"))?;
        let rows =
            bench.stdout.lines().filter(|row| row.starts_with("\"SET\"") || row.starts_with("\"GET\""));
        require!(bench.ok() && rows.count() == 2, "rows are missing\n{}", bench.text());
        let set = run(&format!("redis-cli -h {address} -p {port} set key {value}"))?;
        require!(set.ok() && set.stdout.trim() == "OK", "not set\n{}", set.text());
        let get = run(&format!("redis-cli -h {address} -p {port} get key"))?;
        require!(get.ok() && get.stdout.trim() == value, "not read back\n{}", get.text());
        if place.server.is_none() { sent_by_iwarp(world, &server, rules, 2 * value.len()) } else { Ok(()) }
    };
    let result = steps();
    let server = server.stop();
    result.map_err(|why| uwarp_conformance::Failure(format!("{why}\n--- server\n{}", server.text())))
}

fn iperf(world: &World, args: &str, rules: Rules, place: Place<'_>) -> Outcome {
    let port = free_port();
    let server = format!("iperf3 -s -1 -B {} -p {port}", place.address);
    let server = world.with_sockets(&server, rules.server, port, place.server)?;
    let client = format!("iperf3 -c {} -p {port} -J {args}", place.address);
    let client = world.with_sockets(&client, rules.client, port, place.client)?;
    let ends = pair::run(&server, &client, port)?;
    let sum = |name: &str| {
        let rest = ends.client.stdout.split_once(&format!("\"{name}\":"))?.1;
        let rest = rest.split_once("\"bytes\":")?.1;
        rest.split(',').next()?.trim().parse::<u64>().ok()
    };
    match (sum("sum_sent"), sum("sum_received")) {
        // The receiver's count ends when it hears that the test is over; what is on its way is not in it.
        (Some(sent), Some(received)) if received > 0 && received <= sent => Ok(()),
        sums => ends.failure(format_args!("sent and received: {sums:?}")),
    }
}

fn memcached(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let port = free_port();
    let server = format!("memcached -u root -l {} -p {port} -U 0", place.address);
    let server = pair::serve(&world.with_sockets(&server, rules.server, port, place.server)?, port)?;
    // It takes a while until a connection is upgraded.
    let times = if rules.are_upgrades() { 100 } else { 1 };
    let program = format!(
        r#"import socket; s = socket.create_connection(("{}", {port})); v = b"v" * 500000; "#,
        place.address
    ) + r#"w = socket.MSG_WAITALL; e = b"VALUE k 0 500000\r\n" + v + b"\r\nEND\r\n"; "#
        + r#"print("good" if all((s.sendall(b"set k 0 0 500000\r\n" + v + b"\r\n"), s.recv(8, w), "#
        + r#"s.sendall(b"get k\r\n"), s.recv(len(e), w))[1::2] == (b"STORED\r\n", e) "#
        + &format!("for _ in range({times})) else \"bad\")");
    let client =
        world.with_sockets("/usr/bin/python3 -c", rules.client, port, place.client)?.arg(program).run();
    let carried = sent_by_iwarp(world, &server, rules, 1_000_000);
    let server = server.stop();
    let client = client?;
    require!(client.stdout.trim() == "good", "--- client\n{}--- server\n{}", client.text(), server.text());
    carried
}

/// 100 MB from one to the other; both end when they have ended.
fn netcat(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let dir = Scratch::new("nc")?;
    let bytes = file_of(&dir.0, 100_000_000)?;
    let port = free_port();
    let at = dir.0.display();
    let shell = |script: String, rule, ns| -> Outcome<Cmd> {
        Ok(world.with_sockets("sh -c", rule, port, ns)?.arg(script))
    };
    let server = format!("exec nc -l -N {} {port} < /dev/null > {at}/to", place.address);
    let client = format!("exec nc -N {} {port} < {at}/from", place.address);
    let server = shell(server, rules.server, place.server)?;
    let ends = pair::run(&server, &shell(client, rules.client, place.client)?, port)?;
    let same = fs::read(dir.0.join("to")).is_ok_and(|copy| copy == bytes);
    if same { Ok(()) } else { ends.failure("not copied") }
}

/// sshd serves in children and changes its user: without a rule, all of that is as without the library. It
/// speaks first, also to a client that has sent a request of MPA.
fn ssh(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let dir = Scratch::new("ssh")?;
    let bytes = file_of(&dir.0, 200_000_000)?;
    let port = free_port();
    let at = dir.0.display();
    let key = Cmd::line(&format!("ssh-keygen -q -t ed25519 -f {at}/key -P")).arg("").run()?;
    require!(key.ok(), "no key\n{}", key.text());
    fs::copy(dir.0.join("key.pub"), dir.0.join("authorized")).context(at.to_string())?;
    // sshd wants it, and its service makes it.
    fs::create_dir_all("/run/sshd").context("/run/sshd")?;
    let line = format!("/usr/sbin/sshd -D -e -f {at}/sshd_config -p {port} -h {at}/key");
    let settings = format!(
        "ListenAddress {}\nStrictModes no\nAuthorizedKeysFile {at}/authorized\nPidFile none\nUsePAM no\n\
         PermitRootLogin yes\nSubsystem sftp internal-sftp\n",
        place.address
    );
    fs::write(dir.0.join("sshd_config"), settings).context(at.to_string())?;
    let server = pair::serve(&world.with_sockets(&line, "", port, place.server)?, port)?;
    let client = format!(
        "scp -q -P {port} -i {at}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
         -o BatchMode=yes root@{}:{at}/from {at}/to",
        host(place.address)
    );
    let client = world.with_sockets(&client, rules.client, port, place.client)?.run();
    let server = server.stop();
    let client = client?;
    let same = fs::read(dir.0.join("to")).is_ok_and(|copy| copy == bytes);
    require!(client.ok() && same, "not copied\n--- client\n{}--- server\n{}", client.text(), server.text());
    Ok(())
}
