//! Programs of sockets that ask and answer: databases, tools that measure, event loops, an MPI.

use std::cell::Cell;
use std::fs;
use std::time::Duration;

use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{Context, Outcome, pair, require};

use super::sockets::Setting;

pub fn redis(setting: &Setting<'_>) -> Outcome {
    let (at, address, port) = (setting.dir().display(), setting.place.address, setting.port);
    let server = format!("redis-server --port {port} --bind {address} --dir {at} --protected-mode no");
    setting.serve(&server, |server| {
        let to = format!("-h {address} -p {port}");
        let bench =
            setting.client(&format!("redis-benchmark {to} -n 100000 -c 8 -t set,get --csv"))?.run()?;
        let rows =
            bench.stdout.lines().filter(|row| row.starts_with("\"SET\"") || row.starts_with("\"GET\""));
        require!(bench.ok() && rows.count() == 2, "rows are missing\n{}", bench.text());
        let value = "v".repeat(40_000);
        let set = setting.client(&format!("redis-cli {to} set key {value}"))?.run()?;
        require!(set.ok() && set.stdout.trim() == "OK", "not set\n{}", set.text());
        let get = setting.client(&format!("redis-cli {to} get key"))?.run()?;
        require!(get.ok() && get.stdout.trim() == value, "not read back\n{}", get.text());
        setting.carried(server, 4_000_000)
    })
}

const PUT_AND_GET: &str = r#"import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
v = b"v" * 500000
e = b"VALUE k 0 500000\r\n" + v + b"\r\nEND\r\n"
for _ in range(100):
    s.sendall(b"set k 0 0 500000\r\n" + v + b"\r\n")
    assert s.recv(8, socket.MSG_WAITALL) == b"STORED\r\n"
    s.sendall(b"get k\r\n")
    assert s.recv(len(e), socket.MSG_WAITALL) == e
print("good")
"#;

pub fn memcached(setting: &Setting<'_>) -> Outcome {
    let (at, address, port) = (setting.dir().display(), setting.place.address, setting.port);
    fs::write(setting.dir().join("client.py"), PUT_AND_GET).context(at.to_string())?;
    setting.serve(&format!("memcached -u root -l {address} -p {port} -U 0"), |server| {
        let client = setting.client(&format!("/usr/bin/python3 {at}/client.py {address} {port}"))?.run()?;
        require!(client.stdout.trim() == "good", "--- client\n{}", client.text());
        setting.carried(server, 100_000_000)
    })
}

pub fn iperf(setting: &Setting<'_>) -> Outcome {
    iperf_with(setting, "-n 400M -P 4")
}

pub fn iperf_back(setting: &Setting<'_>) -> Outcome {
    iperf_with(setting, "-n 400M -P 4 -R")
}

fn iperf_with(setting: &Setting<'_>, args: &str) -> Outcome {
    let (address, port) = (setting.place.address, setting.port);
    let server = setting.server(&format!("iperf3 -s -1 -B {address} -p {port}"))?;
    let server = pair::serve(&server, port)?;
    let client =
        setting.run_watched(&server, &format!("iperf3 -c {address} -p {port} -J {args}"), 100_000_000)?;
    let server = server.wait()?;
    client.exited_ok()?;
    server.exited_ok()?;
    let sum = |name: &str| {
        let rest = client.stdout.split_once(&format!("\"{name}\":"))?.1;
        let rest = rest.split_once("\"bytes\":")?.1;
        rest.split(',').next()?.trim().parse::<u64>().ok()
    };
    match (sum("sum_sent"), sum("sum_received")) {
        // The receiver's count ends when it hears that the test is over; what is on its way is not in it.
        (Some(sent), Some(received)) if received > 0 && received <= sent => Ok(()),
        sums => client.failure(format_args!("sent and received: {sums:?}")),
    }
}

pub fn sockperf(setting: &Setting<'_>) -> Outcome {
    let (address, port) = (setting.place.address, setting.port);
    setting.serve(&format!("sockperf server -i {address} -p {port} --tcp"), |server| {
        let line = format!("sockperf ping-pong -i {address} -p {port} --tcp -t 2 -m 1000 --data-integrity");
        let client = setting.client(&line)?.run()?;
        let none = "# dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0";
        require!(client.ok() && client.stdout.contains(none), "--- client\n{}", client.text());
        setting.carried(server, 100_000)
    })
}

/// Its server forks for each connection, and its processes are another user's.
pub fn postgres(setting: &Setting<'_>) -> Outcome {
    let (at, address, port) = (setting.dir().display(), setting.place.address, setting.port);
    let programs = fs::read_dir("/usr/lib/postgresql").context("/usr/lib/postgresql")?;
    let newest = programs.flatten().map(|version| version.path().join("bin")).max();
    let Some(bin) = newest else { uwarp_conformance::fail!("there is no PostgreSQL") };
    let bin = bin.display();
    // It refuses to run as root.
    Cmd::line(&format!("chown postgres {at}")).run_ok()?;
    let user = "setpriv --reuid postgres --regid postgres --clear-groups";
    Cmd::line(&format!("{user} {bin}/initdb -D {at}/data -A trust -U postgres -N")).run_ok()?;
    let server = format!("{user} {bin}/postgres -D {at}/data -h {address} -p {port} -k {at} -c fsync=off");
    setting.serve(&server, |server| {
        let to = format!("-h {address} -p {port} -U postgres");
        let filled = setting.client(&format!("pgbench -q {to} -i -s 1 postgres"))?.run()?;
        filled.exited_ok()?;
        let done = Cell::new(0);
        setting.with_enough(|times| {
            let all = 1000 * times;
            done.set(done.get() + all);
            // With -n: it empties the history otherwise, and a further round would leave its own alone there.
            let line = format!("pgbench -n {to} -c 4 -t {} postgres", all / 4);
            let run = setting.run_watched(server, &line, times * 20_000)?;
            let whole = run.stdout.contains(&format!("actually processed: {all}/{all}"));
            require!(run.ok() && whole, "{}", run.text());
            Ok(())
        })?;
        let sums = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from \
                    pgbench_history), (select count(*) from pgbench_history)";
        let psql = setting.client(&format!("psql {to} -d postgres -Atc"))?.arg(sums).run()?;
        require!(psql.stdout.trim() == format!("t|{}", done.get()), "the sums differ\n{}", psql.text());
        Ok(())
    })
}

const ECHO_PY: &str = r#"import asyncio, sys
port, rounds = int(sys.argv[2]), int(sys.argv[3])

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
            for _ in range(rounds):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        back, _ = await asyncio.gather(reader.read(-1), send())
        assert back == data * rounds, (number, len(back))
        writer.close()
    await asyncio.gather(*(one(number) for number in range(20)))
    print("good")

asyncio.run({"serve": serve, "client": client}[sys.argv[1]]())
"#;

pub fn asyncio(setting: &Setting<'_>) -> Outcome {
    let program = setting.dir().join("echo.py");
    fs::write(&program, ECHO_PY).context(program.display())?;
    let line = |end: &str, rounds: usize| {
        format!("/usr/bin/python3 {} {end} {} {rounds}", program.display(), setting.port)
    };
    setting.serve(&line("serve", 0), |server| {
        setting.with_enough(|times| {
            let client = setting.client(&line("client", 10 * times))?.run()?;
            require!(client.stdout.trim() == "good", "--- client\n{}", client.text());
            setting.carried(server, times * 40_000_000)
        })
    })
}

/// A rule for the ports of Open MPI's own TCP. Each rank is a program that mpirun has started, so it can have
/// a device.
pub fn open_mpi(setting: &Setting<'_>) -> Outcome {
    const RANKS: u16 = 2;
    /// Below those that the kernel gives to the job's other sockets.
    const LAST: u16 = 32_000;
    // Each rank listens on one port, the next that is free. These are taken from this process's.
    let first = free_port();
    for _ in 1..2 * RANKS {
        free_port();
    }
    let rule = setting.rules.server;
    let rule = if rule.is_empty() { String::new() } else { format!("{rule}{first}-") };
    let line = format!(
        "mpirun.openmpi --oversubscribe --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include lo \
         --mca btl_tcp_port_min_v4 {first} --mca btl_tcp_port_range_v4 4 -np {RANKS} \
         NPopenmpi -i -u 65536 -o {}/figures",
        setting.dir().display()
    );
    let job = setting
        .job(&line, &rule, LAST)?
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let running = job.spawn()?;
    if !rule.is_empty() {
        running.until(Duration::from_secs(60), "iWARP at all ranks", |_| {
            setting.ranks_by_iwarp("NPopenmpi", 10_000).is_ok_and(|ranks| ranks >= RANKS.into())
        })?;
    }
    let out = running.wait()?;
    let failed = out.stdout.to_lowercase().contains("integrity check failed");
    require!(out.ok() && !failed, "{}", out.text());
    Ok(())
}
