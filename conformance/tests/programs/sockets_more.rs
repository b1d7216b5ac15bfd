//! More programs of TCP sockets under `uwarp run --sockets`: tools that measure, servers with child
//! processes, event loops of Python and Node, TLS, an MPI over its own TCP.

use std::fs;
use std::path::Path;
use std::time::Duration;

use uwarp_conformance::pair;
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{Context, Outcome, require};

use super::Run::Long;
use super::sockets::{BOTH, CLIENT, FILE, Rules, THROUGH, file_of, host, nginx_settings, sent_by_iwarp};
use super::{Case, Scratch, World};

const LO: &[Topology] = &[Loopback4];

const THROUGH_WORDS: &str = "passing through";
const BOTH_WORDS: &str = "as rsockets";
const CLIENT_WORDS: &str = "as rsockets at the client, with fallback";

const LARGE: usize = 20_000_000;

const SOCKPERF: &str = "--data-integrity: every message comes back as it was sent, none is lost";
const PGBENCH: &str = "no transaction fails; the sums of the tables agree";
const ECHO: &str = "20 connections, 1 MB each, echoed byte by byte";
const NODE: &str = "the copy is the file; a POST of it arrives whole";
const CLONED: &str = "the file in the clone is the file";
const MPI: &str = "NetPIPE's -i: the integrity of each size to 64 KiB";

/// Rows of sockets. Servers that serve each connection in a child process have no row as rsockets at both
/// ends: a child has no device (docs/sockets.md).
pub fn cases() -> Vec<Case> {
    fn row(
        program: &'static str,
        manner: &'static str,
        checked: &'static str,
        run: fn(&World, Place<'_>) -> Outcome,
    ) -> Case {
        Case { program, manner, checked, at: LO, run: Long(run) }
    }
    const WGET: &str = "wget, http.server";
    const POSTGRES: &str = "pgbench, PostgreSQL";
    const GIT: &str = "git clone, git daemon";
    const ASYNCIO: &str = "asyncio";
    const HTTP: &str = "curl, Node http";
    const TLS: &str = "curl, nginx, TLS";
    const TCP: &str = "NPopenmpi, btl tcp";
    vec![
        row(WGET, THROUGH_WORDS, FILE, |w, p| wget(w, THROUGH, p)),
        row(WGET, BOTH_WORDS, FILE, |w, p| wget(w, BOTH, p)),
        row(WGET, CLIENT_WORDS, FILE, |w, p| wget(w, CLIENT, p)),
        row("sockperf", THROUGH_WORDS, SOCKPERF, |w, p| sockperf(w, THROUGH, p)),
        row("sockperf", BOTH_WORDS, SOCKPERF, |w, p| sockperf(w, BOTH, p)),
        row(POSTGRES, THROUGH_WORDS, PGBENCH, |w, p| postgres(w, THROUGH, p)),
        row(POSTGRES, CLIENT_WORDS, PGBENCH, |w, p| postgres(w, CLIENT, p)),
        row(GIT, THROUGH_WORDS, CLONED, |w, p| git(w, THROUGH, p)),
        row(GIT, CLIENT_WORDS, CLONED, |w, p| git(w, CLIENT, p)),
        row(ASYNCIO, THROUGH_WORDS, ECHO, |w, p| asyncio(w, THROUGH, p)),
        row(ASYNCIO, BOTH_WORDS, ECHO, |w, p| asyncio(w, BOTH, p)),
        row(ASYNCIO, CLIENT_WORDS, ECHO, |w, p| asyncio(w, CLIENT, p)),
        row(HTTP, THROUGH_WORDS, NODE, |w, p| node(w, THROUGH, p)),
        row(HTTP, BOTH_WORDS, NODE, |w, p| node(w, BOTH, p)),
        row(HTTP, CLIENT_WORDS, NODE, |w, p| node(w, CLIENT, p)),
        row(TLS, THROUGH_WORDS, FILE, |w, p| tls(w, THROUGH, p)),
        row(TLS, BOTH_WORDS, FILE, |w, p| tls(w, BOTH, p)),
        row(TLS, CLIENT_WORDS, FILE, |w, p| tls(w, CLIENT, p)),
        row(TCP, THROUGH_WORDS, MPI, |w, p| open_mpi(w, "", p)),
        row(TCP, BOTH_WORDS, MPI, |w, p| open_mpi(w, "rsockets:port=", p)),
    ]
}

/// What the server has printed stands behind the reason.
fn with_server<T>(server: Running, steps: impl FnOnce(&Running) -> Outcome<T>) -> Outcome<T> {
    let result = steps(&server);
    let server = server.stop();
    result.map_err(|why| uwarp_conformance::Failure(format!("{why}\n--- server\n{}", server.text())))
}

/// The client's end of `rules`.
fn client(world: &World, line: &str, rules: Rules, port: u16, place: Place<'_>) -> Outcome<Output> {
    world.with_sockets(line, rules.client, port, place.client)?.run()
}

fn is_copied(client: &Output, dir: &Path, bytes: &[u8]) -> Outcome {
    let same = fs::read(dir.join("to")).is_ok_and(|copy| copy == bytes);
    require!(client.ok() && same, "not copied\n--- client\n{}", client.text());
    Ok(())
}

fn wget(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let (dir, port) = (Scratch::new("wget")?, free_port());
    let bytes = file_of(&dir.0, LARGE)?;
    let (at, address) = (dir.0.display(), place.address);
    let line = format!("/usr/bin/python3 -m http.server {port} --bind {address} --directory {at}");
    let server = pair::serve(&world.with_sockets(&line, rules.server, port, place.server)?, port)?;
    with_server(server, |server| {
        let line = format!("wget -q -O {at}/to http://{}:{port}/from", host(address));
        is_copied(&client(world, &line, rules, port, place)?, &dir.0, &bytes)?;
        sent_by_iwarp(world, server, rules, LARGE)
    })
}

fn sockperf(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let (port, address) = (free_port(), place.address);
    let line = format!("sockperf server -i {address} -p {port} --tcp");
    let server = pair::serve(&world.with_sockets(&line, rules.server, port, place.server)?, port)?;
    with_server(server, |server| {
        let line = format!("sockperf ping-pong -i {address} -p {port} --tcp -t 2 -m 1000 --data-integrity");
        let client = client(world, &line, rules, port, place)?;
        let none = "# dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0";
        require!(client.ok() && client.stdout.contains(none), "--- client\n{}", client.text());
        sent_by_iwarp(world, server, rules, 100_000)
    })
}

/// Its server forks for each connection.
fn postgres(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let (dir, port) = (Scratch::new("postgres")?, free_port());
    let (at, address) = (dir.0.display(), place.address);
    let programs = fs::read_dir("/usr/lib/postgresql").context("/usr/lib/postgresql")?;
    let newest = programs.flatten().map(|version| version.path().join("bin")).max();
    let Some(bin) = newest else { uwarp_conformance::fail!("there is no PostgreSQL") };
    let bin = bin.display();
    // It refuses to run as root.
    let owner = format!("chown postgres {at}");
    Cmd::line(&owner).run_ok()?;
    let user = "setpriv --reuid postgres --regid postgres --clear-groups";
    Cmd::line(&format!("{user} {bin}/initdb -D {at}/data -A trust -U postgres -N")).run_ok()?;
    let line = format!("{user} {bin}/postgres -D {at}/data -h {address} -p {port} -k {at} -c fsync=off");
    let server = pair::serve(&world.with_sockets(&line, rules.server, port, place.server)?, port)?;
    with_server(server, |_| {
        let to = format!("-h {address} -p {port} -U postgres");
        for line in
            [format!("pgbench -q {to} -i -s 1 postgres"), format!("pgbench {to} -c 4 -t 250 postgres")]
        {
            let run = client(world, &line, rules, port, place)?;
            let whole = line.contains("-i") || run.stdout.contains("actually processed: 1000/1000");
            require!(run.ok() && whole, "{}", run.text());
        }
        let sums = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from \
                    pgbench_history), (select count(*) from pgbench_history)";
        let line = format!("psql {to} -d postgres -Atc");
        let psql = world.with_sockets(&line, rules.client, port, place.client)?.arg(sums).run()?;
        require!(psql.stdout.trim() == "t|1000", "the sums differ\n{}", psql.text());
        Ok(())
    })
}

/// Its daemon has a child process for each connection.
fn git(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let (dir, port) = (Scratch::new("git")?, free_port());
    let bytes = file_of(&dir.0, LARGE)?;
    let (at, address) = (dir.0.display(), place.address);
    let work = format!("git -C {at}/work -c user.name=a -c user.email=a@b");
    fs::create_dir(dir.0.join("work")).context(at.to_string())?;
    fs::rename(dir.0.join("from"), dir.0.join("work/from")).context(at.to_string())?;
    for line in [format!("{work} init -q"), format!("{work} add from"), format!("{work} commit -q -m file")] {
        Cmd::line(&line).run_ok()?;
    }
    let line = format!("git daemon --listen={address} --port={port} --base-path={at} --export-all");
    let server = pair::serve(&world.with_sockets(&line, rules.server, port, place.server)?, port)?;
    with_server(server, |_| {
        let line = format!("git clone -q git://{}:{port}/work {at}/clone", host(address));
        let client = client(world, &line, rules, port, place)?;
        let same = fs::read(dir.0.join("clone/from")).is_ok_and(|copy| copy == bytes);
        require!(client.ok() && same, "not cloned\n--- client\n{}", client.text());
        Ok(())
    })
}

const ECHO_PY: &str = r#"import asyncio, sys
port = int(sys.argv[2])

async def serve():
    async def one(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
    async with await asyncio.start_server(one, "127.0.0.1", port) as server:
        await server.serve_forever()

async def client():
    async def one(number):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = bytes((number + place * 7) % 256 for place in range(100000))
        async def send():
            for _ in range(10):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        back, _ = await asyncio.gather(reader.read(-1), send())
        assert back == data * 10, (number, len(back))
        writer.close()
    await asyncio.gather(*(one(number) for number in range(20)))
    print("good")

asyncio.run({"serve": serve, "client": client}[sys.argv[1]]())
"#;

fn asyncio(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let (dir, port) = (Scratch::new("asyncio")?, free_port());
    let program = dir.0.join("echo.py");
    fs::write(&program, ECHO_PY).context(program.display())?;
    let line = |end: &str| format!("/usr/bin/python3 {} {end} {port}", program.display());
    let server = world.with_sockets(&line("serve"), rules.server, port, place.server)?;
    with_server(pair::serve(&server, port)?, |server| {
        let client = client(world, &line("client"), rules, port, place)?;
        require!(client.stdout.trim() == "good", "--- client\n{}", client.text());
        sent_by_iwarp(world, server, rules, 40_000_000)
    })
}

const SERVER_JS: &str = r#"const http = require("http"), fs = require("fs"), crypto = require("crypto");
http.createServer((request, response) => {
  if (request.method === "GET") return fs.createReadStream(process.argv[3]).pipe(response);
  const hash = crypto.createHash("sha256");
  request.on("data", (data) => hash.update(data));
  request.on("end", () => response.end(hash.digest("hex")));
}).listen(Number(process.argv[2]), "127.0.0.1");
"#;

fn node(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let (dir, port) = (Scratch::new("node")?, free_port());
    let bytes = file_of(&dir.0, LARGE)?;
    let at = dir.0.display();
    fs::write(dir.0.join("server.js"), SERVER_JS).context(at.to_string())?;
    let sum = Cmd::line(&format!("sha256sum {at}/from")).run_ok()?;
    let sum = sum.stdout.split_whitespace().next().unwrap_or_default().to_owned();
    let line = format!("node {at}/server.js {port} {at}/from");
    let server = pair::serve(&world.with_sockets(&line, rules.server, port, place.server)?, port)?;
    with_server(server, |server| {
        let url = format!("http://{}:{port}/", host(place.address));
        let got = client(world, &format!("curl -sS -o {at}/to {url}"), rules, port, place)?;
        is_copied(&got, &dir.0, &bytes)?;
        let line = format!("curl -sS --data-binary @{at}/from {url}");
        let posted = client(world, &line, rules, port, place)?;
        require!(posted.stdout == sum, "another sum than {sum}\n--- client\n{}", posted.text());
        sent_by_iwarp(world, server, rules, 2 * LARGE)
    })
}

fn tls(world: &World, rules: Rules, place: Place<'_>) -> Outcome {
    let (dir, port) = (Scratch::new("tls")?, free_port());
    let bytes = file_of(&dir.0, LARGE)?;
    let (at, address) = (dir.0.display(), host(place.address));
    Cmd::line(&format!(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout {at}/key.pem -out {at}/cert.pem -days 2 \
         -subj /CN=localhost -addext subjectAltName=IP:{}",
        place.address
    ))
    .run_ok()?;
    let listen = format!(
        "listen {address}:{port} ssl; ssl_certificate {at}/cert.pem; ssl_certificate_key {at}/key.pem;"
    );
    fs::write(dir.0.join("nginx.conf"), nginx_settings(&dir.0, &listen)).context(at.to_string())?;
    let line = format!("/usr/sbin/nginx -p {at} -c {at}/nginx.conf");
    let server = pair::serve(&world.with_sockets(&line, rules.server, port, place.server)?, port)?;
    with_server(server, |server| {
        let line = format!("curl -sS --cacert {at}/cert.pem -o {at}/to https://{address}:{port}/from");
        is_copied(&client(world, &line, rules, port, place)?, &dir.0, &bytes)?;
        sent_by_iwarp(world, server, rules, LARGE)
    })
}

/// A rule for the ports of Open MPI's own TCP. Each rank is a program that mpirun has started, so it can have
/// a device.
fn open_mpi(world: &World, rule: &str, _: Place<'_>) -> Outcome {
    const RANKS: u16 = 2;
    /// Below those that the kernel gives to the job's other sockets.
    const LAST: u16 = 32_000;
    let dir = Scratch::new("openmpi")?;
    // Each rank listens on one port, the next that is free. These are taken from this process's.
    let first = free_port();
    for _ in 1..2 * RANKS {
        free_port();
    }
    let rule = if rule.is_empty() { String::new() } else { format!("{rule}{first}-") };
    let line = format!(
        "mpirun.openmpi --oversubscribe --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include lo \
         --mca btl_tcp_port_min_v4 {first} --mca btl_tcp_port_range_v4 4 -np {RANKS} \
         NPopenmpi -i -u 65536 -o {}/figures",
        dir.0.display()
    );
    let job = world
        .with_sockets(&line, &rule, LAST, None)?
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let running = job.spawn()?;
    if !rule.is_empty() {
        let stat = Cmd::new(world.dist()?.uwarp()?).args("stat");
        running.until(Duration::from_secs(60), "an iWARP end", |_| {
            stat.run().is_ok_and(|out| {
                let ranks = out.stdout.lines().filter(|line| line.starts_with("NPopenmpi ("));
                ranks.filter(|line| line.contains(" 1 queue pair,")).count() >= RANKS.into()
            })
        })?;
    }
    let out = running.wait()?;
    let failed = out.stdout.to_lowercase().contains("integrity check failed");
    require!(out.ok() && !failed, "{}", out.text());
    Ok(())
}
