//! Programs of rsockets: librdmacm's own examples.

use std::fs;

use uwarp_conformance::pair;
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{Context, Outcome, require};

use super::Run::{Custom, Long};
use super::{AS_IB, AS_IWARP, AS_STRANGERS, CRC_OFF, Case, Env, LONG, Scratch, World};

const LO: &[Topology] = &[Loopback4];
const LO_BOTH: &[Topology] = &[Loopback4, Loopback6];
const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4, Veth9000V4];

const CHECKED: &str = "both exit with 0, every byte checked at both ends";
const FILE: &str = "the copy is the file";

/// Rows of rsockets.
pub fn cases() -> Vec<Case> {
    [streams(), views(), copies(), datagrams()].into_iter().flatten().collect()
}

fn row(
    program: &'static str,
    manner: &'static str,
    checked: &'static str,
    at: &'static [Topology],
    run: super::Run,
) -> Case {
    Case { program, manner, checked, at, run }
}

/// Ways of calling: blocking (`-T b`), with `rpoll` (`-T a`), in a loop (neither); data verified (`-T v`).
fn streams() -> Vec<Case> {
    const SOME: &str = "-I 50 -C 10 -S 20000";
    vec![
        row(
            "rstream",
            "-T b -T v",
            CHECKED,
            &Topology::ALL,
            Custom(|w, p| w.rstream("rstream", "-T b -T v -I 50 -C 10 -S 20000", [&[], &[]], p)),
        ),
        row(
            "rstream",
            "-T a -T v",
            CHECKED,
            LO_BOTH,
            Custom(|w, p| w.rstream("rstream", &format!("-T a -T v {SOME}"), [&[], &[]], p)),
        ),
        row(
            "rstream",
            "-T v",
            CHECKED,
            LO_AND_VETH,
            Custom(|w, p| w.rstream("rstream", &format!("-T v {SOME}"), [&[], &[]], p)),
        ),
        row(
            "rstream",
            "-T r -k 1",
            CHECKED,
            LO,
            Custom(|w, p| w.rstream("rstream", &format!("-T b -T v -T r -k 1 {SOME}"), [&[], &[]], p)),
        ),
        row(
            "rstream",
            "small buffers, nothing inline",
            CHECKED,
            LO,
            Custom(|w, p| w.rstream("rstream", &format!("-T b -T v -i 0 -B 4096 {SOME}"), [&[], &[]], p)),
        ),
        row(
            "rstream",
            "all its tests",
            "both exit with 0, a figure for each size",
            LO,
            Long(|w, p| w.rstream("rstream", "-T b -S all", [&[], &[]], p)),
        ),
        row(
            "riostream",
            "-T b -T v",
            CHECKED,
            LO_AND_VETH,
            Custom(|w, p| w.rstream("riostream", "-T b -T v -I 10 -C 10 -S 100000", [&[], &[]], p)),
        ),
        row(
            "riostream",
            "-T a -T v",
            CHECKED,
            LO_BOTH,
            Custom(|w, p| w.rstream("riostream", "-T a -T v -I 10 -C 10 -S 100000", [&[], &[]], p)),
        ),
        row(
            "riostream",
            "all its tests",
            "both exit with 0, a figure for each size",
            LO,
            Long(|w, p| w.rstream("riostream", "-T b", [&[], &[]], p)),
        ),
        row("rstream", "-s, nobody listens", "connection refused", LO_BOTH, Custom(refused)),
        row("rstream", "-s, server killed", "the client ends by itself", LO, Custom(server_killed)),
    ]
}

/// Each end chooses by what the other one is, not by what its own device shows.
fn views() -> Vec<Case> {
    fn both(world: &World, ends: [Env; 2], place: Place<'_>) -> Outcome {
        world.rstream("rstream", "-T b -T v -I 20 -C 10 -S 20000", ends, place)?;
        world.rstream("riostream", "-T b -T v -I 5 -C 10 -S 20000", ends, place)
    }
    let of = |manner, run| row("rstream, riostream", manner, CHECKED, LO, Custom(run));
    vec![
        of("as iWARP", |w, p| both(w, [AS_IWARP, AS_IWARP], p)),
        of("as InfiniBand", |w, p| both(w, [AS_IB, AS_IB], p)),
        of("one end as iWARP, the other as RoCE", |w, p| {
            both(w, [AS_IWARP, &[]], p)?;
            both(w, [&[], AS_IWARP], p)
        }),
        of("UWARP_PEER=off", |w, p| both(w, [AS_STRANGERS, AS_STRANGERS], p)),
        of("one end with UWARP_PEER=off", |w, p| {
            both(w, [AS_STRANGERS, &[]], p)?;
            both(w, [&[], AS_STRANGERS], p)
        }),
        of("UWARP_CRC=off", |w, p| both(w, [CRC_OFF, CRC_OFF], p)),
    ]
}

fn copies() -> Vec<Case> {
    vec![
        row("rcopy", "20 MB", FILE, LO_AND_VETH, Custom(|w, p| rcopy(w, 20_000_000, &[], p))),
        row("rcopy", "20 MB, UWARP_PEER=off", FILE, LO, Custom(|w, p| rcopy(w, 20_000_000, AS_STRANGERS, p))),
        row("rcopy", "1 GB", FILE, LO, Long(|w, p| rcopy(w, 1_000_000_000, &[], p))),
    ]
}

/// Datagrams. What arrives is counted by the server, and echoes are waited for.
///
/// TODO: run the rows with echoes on every test run, too. udpong sends again what is not answered within a
/// millisecond. If the first answer then comes late, it overwrites the next message with it, sends that, and
/// never gets the number that it waits for: on a busy machine it goes on for ever. The group `datagrams` of
/// `conformance/c/rsockets.c` covers what these rows do.
fn datagrams() -> Vec<Case> {
    const ECHOES: &str = "every echo comes back";
    let row = |manner, checked, at, run| row("udpong", manner, checked, at, run);
    vec![
        row("-T e -T b", ECHOES, LO_BOTH, Long(|w, p| udpong(w, "-T e -T b -C 500 -S 1000", [&[], &[]], p))),
        row("-T e -T a", ECHOES, LO_BOTH, Long(|w, p| udpong(w, "-T e -T a -C 500 -S 1000", [&[], &[]], p))),
        row("-T e", ECHOES, LO, Long(|w, p| udpong(w, "-T e -C 500 -S 16", [&[], &[]], p))),
        row(
            "one way",
            "the server says how many came",
            &Topology::ALL,
            Custom(|w, p| udpong(w, "-T b -C 300 -S 1000", [&[], &[]], p)),
        ),
        row(
            "one way, as iWARP and as InfiniBand",
            "the server says how many came",
            LO,
            Custom(|w, p| udpong(w, "-T b -C 300 -S 1000", [AS_IWARP, AS_IB], p)),
        ),
    ]
}

/// A server that goes on, and a client.
fn udpong(world: &World, args: &str, env: [Env; 2], place: Place<'_>) -> Outcome {
    let port = free_port();
    let server = format!("udpong -b {} -p {port} {args}", place.address);
    let server = world.over_uwarp(&server, place.server)?.envs(env[0]);
    let server = pair::serve_datagrams(&server, port)?;
    let client = format!("udpong -s {} -p {port} {args}", place.address);
    let client = world.over_uwarp(&client, place.client)?.envs(env[1]).limit(LONG).run();
    let server = server.stop();
    let client = client?;
    let good = client.ok() && client.stdout.contains("custom") && client.stderr.is_empty();
    require!(good, "no figure\n--- client\n{}--- server\n{}", client.text(), server.text());
    Ok(())
}

impl World {
    /// Both ends of `rstream` or `riostream` with these arguments.
    fn rstream(&self, program: &str, args: &str, env: [Env; 2], place: Place<'_>) -> Outcome {
        let port = free_port();
        let server = format!("{program} -b {} -p {port} {args}", place.address);
        let client = format!("{program} -s {} -p {port} {args}", place.address);
        let server = self.over_uwarp(&server, place.server)?.envs(env[0]).limit(LONG);
        let client = self.over_uwarp(&client, place.client)?.envs(env[1]).limit(LONG);
        let ends = pair::run(&server, &client, port)?;
        // A heading and a row for each test. What goes wrong is printed, too, and does not always show in
        // the status.
        let rows = |out: &str| out.lines().filter(|line| line.contains('.')).count();
        let complete =
            rows(&ends.client.stdout) > 0 && rows(&ends.client.stdout) == rows(&ends.server.stdout);
        if !complete || !ends.client.stderr.is_empty() || !ends.server.stderr.is_empty() {
            return ends.failure("rows are missing, or a complaint");
        }
        Ok(())
    }
}

fn refused(world: &World, place: Place<'_>) -> Outcome {
    let line = format!("rstream -T b -s {} -p {}", place.address, free_port());
    let out = world.over_uwarp(&line, place.client)?.run()?;
    require!(out.stderr.contains("rconnect: Connection refused"), "not refused\n{}", out.text());
    Ok(())
}

fn server_killed(world: &World, place: Place<'_>) -> Outcome {
    let port = free_port();
    let server = format!("rstream -T b -b {} -p {port} -I 100000 -C 100 -S 1000", place.address);
    let server = pair::serve(&world.over_uwarp(&server, place.server)?, port)?;
    let client = format!("rstream -T b -s {} -p {port} -I 100000 -C 100 -S 1000", place.address);
    let client = world.over_uwarp(&client, place.client)?.spawn()?;
    std::thread::sleep(std::time::Duration::from_secs(1));
    server.signal(rustix::process::Signal::KILL)?;
    let out = client.wait()?;
    require!(out.status.is_some_and(|s| s.code().is_some()), "did not end by itself\n{}", out.text());
    Ok(())
}

/// Copies a file of `len` bytes and compares.
fn rcopy(world: &World, len: usize, env: Env, place: Place<'_>) -> Outcome {
    let dir = Scratch::new("rcopy")?;
    let (from, to) = (dir.0.join("from"), dir.0.join("to"));
    let mut seed = 1u64;
    let bytes: Vec<u8> = (0..len)
        .map(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 56) as u8
        })
        .collect();
    fs::write(&from, &bytes).context(from.display())?;
    let port = free_port();
    let server = world.over_uwarp(&format!("rcopy -p {port}"), place.server)?.envs(env);
    let server = pair::serve(&server, port)?;
    let line = format!("rcopy {} {}:{} -p {port}", from.display(), place.address, to.display());
    let client = world.over_uwarp(&line, place.client)?.envs(env).run();
    let server = server.stop();
    let client = client?;
    let same = fs::read(&to).is_ok_and(|copy| copy == bytes);
    require!(client.ok() && same, "not copied\n--- client\n{}--- server\n{}", client.text(), server.text());
    Ok(())
}
