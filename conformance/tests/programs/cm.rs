//! Programs that come with rdma_cm, and benchmarks and libraries on top of it.

use std::path::PathBuf;
use std::time::Duration;

use uwarp_conformance::check;
use uwarp_conformance::netns::{Bridged, NetNs};
use uwarp_conformance::pair::{self, Ends};
use uwarp_conformance::process::{Cmd, Output};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Context, Outcome, require};

use super::{Env, Scratch, World};

/// For programs that a busy machine slows down.
const LONG: Duration = Duration::from_secs(180);

/// What programs of rdma_cm say when all their messages have come.
pub fn whole(ends: &Ends) -> Outcome {
    for out in [&ends.server, &ends.client] {
        check::no_complaints(out)?;
        check::has(out, "data transfers complete")?;
        check::has(out, "return status 0")?;
    }
    Ok(())
}

impl World {
    /// `ucmatose` at both ends with the same arguments.
    pub fn ucmatose(&self, args: &str, place: Place<'_>) -> Outcome {
        let port = free_port();
        let server = format!("ucmatose -b {} -p {port} {args}", place.address);
        let client = format!("ucmatose -s {} -p {port} {args}", place.address);
        let server = self.over_uwarp(&server, place.server)?.limit(LONG);
        let client = self.over_uwarp(&client, place.client)?.limit(LONG);
        whole(&pair::run(&server, &client, port)?)
    }

    /// `udaddy` at both ends: datagrams there and back, between queue pairs that lookups find.
    pub fn udaddy(&self, args: &str, place: Place<'_>) -> Outcome {
        // It knows no other.
        const PORT: u16 = 7174;
        let server = format!("udaddy -b {} {args}", place.address);
        let client = format!("udaddy -s {} {args}", place.address);
        let server = self.over_uwarp(&server, place.server)?.limit(LONG);
        let client = self.over_uwarp(&client, place.client)?.limit(LONG);
        whole(&pair::run_datagrams(&server, &client, PORT)?)
    }

    /// The same over `::1` on a host whose interface has no IPv6 address but the link-local one. The server
    /// answers by `ibv_create_ah_from_wc`, with the only GID of that family.
    pub fn udaddy_beside_link_local(&self, args: &str) -> Outcome {
        let host = NetNs::new()?;
        host.ip("link add up0 type veth peer name up1")?;
        host.ip("address add 10.55.7.1/24 dev up0")?;
        host.ip("link set up0 up")?;
        host.ip("link set up1 up")?;
        host.settled()?;
        let both = Some(&host);
        self.udaddy(args, Place { server: both, client: both, address: "::1", any: "::" })
    }

    /// `mckey`: one end sends to a group, with the options that say how it joins; the other one is a member.
    pub fn mckey(&self, group: &str, own: [&str; 2], joins: &str, place: Place<'_>) -> Outcome {
        // The port that all members share.
        const PORT: u16 = 18514;
        let member = self.over_uwarp(&format!("mckey -m {group} -b {}", own[0]), place.server)?.limit(LONG);
        let sender =
            self.over_uwarp(&format!("mckey -m {group} -b {} -s {joins}", own[1]), place.client)?.limit(LONG);
        whole(&pair::run_datagrams(&member, &sender, PORT)?)
    }

    /// `mckey` with the address for all hosts instead of a group: two receivers and a sender on three hosts.
    pub fn mckey_to_all(&self, address: &str) -> Outcome {
        const PORT: u16 = 18514;
        let hosts = Bridged::new()?;
        let [sender, first, second] = hosts.ends().map(|(own, ns)| {
            Ok(self.over_uwarp(&format!("mckey -m {address} -b {own}"), Some(ns))?.limit(LONG))
        });
        let (first, second) = (first?, pair::serve_datagrams(&second?, PORT)?);
        let ends = pair::run_datagrams(&first, &sender?.arg("-s"), PORT)?;
        whole(&ends)?;
        let second = second.wait()?;
        whole(&Ends { server: second, ..ends })
    }

    /// `cmtime` with so many connections; its server goes on until it is stopped.
    pub fn cmtime(&self, connections: u32, place: Place<'_>) -> Outcome {
        let port = free_port();
        let server = format!("cmtime -b {} -p {port} -c {connections}", place.address);
        let client = format!("cmtime -s {} -p {port} -c {connections}", place.address);
        let running = pair::serve(&self.over_uwarp(&server, place.server)?.limit(LONG), port)?;
        let client = self.over_uwarp(&client, place.client)?.limit(LONG).run();
        let server = running.stop();
        let ends = Ends { client: client?, server };
        // A connection that fails is an "event: " line, and cmtime goes on.
        let failed = ends.client.stdout.lines().find(|line| line.starts_with("event: "));
        let steps =
            ["create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect", "destroy"];
        let missing = steps.into_iter().find(|step| {
            let row = ends.client.stdout.lines().find(|line| line.starts_with(step) && line.contains(':'));
            row.is_none_or(|row| row.split_whitespace().last().is_none_or(|n| n.parse::<f64>().is_err()))
        });
        match (ends.client.ok(), failed, missing) {
            (true, None, None) => Ok(()),
            (_, Some(event), _) => ends.failure(format_args!("a connection failed: {event}")),
            (_, _, Some(step)) => ends.failure(format_args!("no figure for the step \"{step}\"")),
            _ => ends.failure("the client's exit status is not 0"),
        }
    }

    /// rping whose ends make their queue pairs themselves (`-q`), or one of them.
    pub fn rping_by_number(&self, env: Env, place: Place<'_>) -> Outcome {
        for (server_q, client_q) in [(" -q", " -q"), (" -q", ""), ("", " -q")] {
            let (port, size) = (free_port(), 1000);
            let server = format!("rping -s -v -a {} -p {port} -S {size}{server_q}", place.address);
            let client = format!("rping -c -v -V -a {} -p {port} -C 20 -S {size}{client_q}", place.address);
            let server = self.over_uwarp(&server, place.server)?.envs(env);
            let client = self.over_uwarp(&client, place.client)?.envs(env);
            super::check_rping(&pair::run(&server, &client, port)?, 20, size)?;
        }
        Ok(())
    }

    /// One qperf server, and these tests one after the other; each must print a figure with a unit.
    pub fn qperf(&self, tests: &[&str], place: Place<'_>) -> Outcome {
        self.qperf_with("-cm1", &[], tests, place)
    }

    /// One qperf server, and clients of these tests one after the other, with this option and these
    /// variables.
    pub fn qperf_with(&self, option: &str, env: super::Env, tests: &[&str], place: Place<'_>) -> Outcome {
        let port = free_port();
        let server = self.over_uwarp(&format!("qperf -lp {port}"), place.server)?.envs(env).limit(LONG * 3);
        let server = pair::serve(&server, port)?;
        let client = |what: &str| -> Outcome<Output> {
            let line = format!("qperf -lp {port} {} {option} -t 1 {what}", place.address);
            self.over_uwarp(&line, place.client)?.envs(env).limit(LONG).run()
        };
        let all = || -> Outcome {
            for test in tests {
                let out = client(test)?;
                out.exited_ok()?;
                check::no_complaints(&out)?;
                // "rc_lat:" and, below it, "latency  =  9.35 us".
                let figure =
                    out.stdout.lines().find_map(|line| line.split_once('=')).map(|(_, value)| value.trim());
                let value = figure.and_then(|f| f.split_whitespace().next()?.parse::<f64>().ok());
                require!(
                    out.stdout.starts_with(&format!("{test}:")) && value.is_some_and(|v| v > 0.0),
                    "{test}: no figure\n{}",
                    out.text()
                );
            }
            client("quit")?.exited_ok()
        };
        all().or_else(|why| uwarp_conformance::fail!("{why}--- server\n{}", server.stop().text()))
    }

    /// fio's rdma engine: one job writes, reads or sends to another process in blocks of `block` bytes.
    ///
    /// fio does not look at the data in this mode; `c/random.c` does that.
    ///
    /// Sends are as many as the receiver has receives, the most that fio allows: it has no flow control, and
    /// its `fio_rdmaio_connect` leaves rnr_retry_count at 0, so a receiver that got no processor for as long
    /// as 16 Sends take has ended the connection, over an adapter at once (here after 100 ms,
    /// `rnic/qp/rnr.rs`).
    pub fn fio(&self, verb: &str, block: &str, depth: u32, place: Place<'_>) -> Outcome {
        let port = free_port();
        let dir = Scratch::new("fio")?;
        let (size, receives, sent) =
            if verb == "send" { ("2m", 512, "io=2048KiB") } else { ("32m", 16, "io=32.0MiB") };
        let common =
            format!("--ioengine=rdma --port={port} --bs={block} --size={size} --output-format=normal");
        let server = format!("fio {common} --name=receiver --rw=read --iodepth={receives}");
        let client = format!(
            "fio {common} --name=sender --rw=write --iodepth={depth} --hostname={} --verb={verb}",
            place.address
        );
        // fio takes five minutes to give up a job that does not end: the limit kills it.
        let at = |line: &str, ns| Ok(self.over_uwarp(line, ns)?.arg(dir.flag("--aux-path")).limit(LONG));
        let ends = pair::run(&at(&server, place.server)?, &at(&client, place.client)?, port)?;
        for (out, name) in [(&ends.server, "receiver"), (&ends.client, "sender")] {
            let done =
                out.stdout.lines().any(|l| l.starts_with(&format!("{name}: (")) && l.contains("err= 0"));
            if !done || out.stderr.contains("error") {
                return ends.failure(format_args!("{name} does not end with err= 0"));
            }
        }
        if !ends.client.stdout.contains(sent) {
            return ends.failure(format_args!("the sender did not say {sent}"));
        }
        Ok(())
    }

    /// A program over DAPL's rdma_cm provider, which takes its device from a table: each end's by its
    /// address.
    fn over_dapl(&self, line: &str, address: &str, at: &Dapl, ns: Option<&super::NetNs>) -> Outcome<Cmd> {
        Ok(self.over_uwarp(line, ns)?.env("DAT_OVERRIDE", at.table(address)?).limit(LONG))
    }

    /// `dtest` or `dtestcm` with these arguments at both ends.
    pub fn dtest(&self, program: &str, args: &str, passed: &str, place: Place<'_>) -> Outcome {
        let ends = self.dtest_ends(&Dapl::new()?, program, args, place)?;
        dtest_passed(&ends, &[&ends.server, &ends.client], passed)
    }

    /// The same over DAPL's provider that brings queue pairs up itself, by GID and number over a socket of
    /// its own.
    pub fn dtest_by_number(&self, program: &str, args: &str, passed: &str, place: Place<'_>) -> Outcome {
        let ends = self.dtest_ends(&Dapl::by_number()?, program, args, place)?;
        // A race inside DAPL and dtestcm, whatever carries the queue pairs: 43 of 200 runs over the kernel's
        // rxe end in the same way. The client disconnects all as soon as its own ends are connected. The
        // server's cr_thread (openib_scm/cm.c) looks at the sockets in turn: it may have passed the last ones
        // before their RTU came, and then finds the first ones disconnected. So DISCONNECTED of the first
        // comes before ESTABLISHED of the last. dtestcm counts any event as ESTABLISHED (its check applies to
        // `-u` only) and then takes the late ESTABLISHED for DISCONNECTED: it frees a connected endpoint,
        // whose own DISCONNECTED names no endpoint any more.
        let raced = ends.server.stderr.contains("Error disconnect_eps: DAT_INVALID_HANDLE");
        if program == "dtestcm" && raced && ends.server.stdout.contains("CONNECTED on Server!") {
            return dtest_passed(&ends, &[&ends.client], passed);
        }
        dtest_passed(&ends, &[&ends.server, &ends.client], passed)
    }

    fn dtest_ends(&self, at: &Dapl, program: &str, args: &str, place: Place<'_>) -> Outcome<Ends> {
        // Fixed in the programs: the ends tell each other over TCP where to connect.
        // dtestsrq knows it and connects there at once.
        let port = if program == "dtestsrq" { 45248 } else { 15828 };
        let server =
            self.over_dapl(&format!("{program} -P uwarp -s {args}"), place.address, at, place.server)?;
        let line = format!("{program} -P uwarp -h {} {args}", place.address);
        let client = self.over_dapl(&line, client_address(place), at, place.client)?;
        pair::run(&server, &client, port)
    }

    /// `dtestx`: RDMA Write with immediate data, atomic operations. It asks only devices that call themselves
    /// InfiniBand or RoCE for it.
    pub fn dtestx(&self, place: Place<'_>) -> Outcome {
        let at = Dapl::new()?;
        let line = "dtestx -P uwarp -s";
        let server = self.over_dapl(line, place.address, &at, place.server)?;
        let line = format!("dtestx -P uwarp -h {}", place.address);
        let client = self.over_dapl(&line, client_address(place), &at, place.client)?;
        let ends = pair::run(&server, &client, 15828)?;
        for out in [&ends.server, &ends.client] {
            check::has(out, "RDMA_WRITE_WITH_IMMEDIATE_DATA test - PASSED")?;
            check::has(out, "CMP_SWAP test - PASSED")?;
            check::has(out, "FETCH_ADD test - PASSED")?;
            check::has(out, "IB extension test - immed/atomic test PASSED")?;
        }
        Ok(())
    }

    /// One `dapltest` server, and clients of these kinds of test one after the other.
    pub fn dapltest(&self, tests: &[&str], place: Place<'_>) -> Outcome {
        let at = Dapl::new()?;
        const PORT: u16 = 62000;
        let line = "dapltest -T S -D uwarp";
        let server =
            pair::serve(&self.over_dapl(line, place.address, &at, place.server)?.limit(LONG * 3), PORT)?;
        let client = |args: &str| -> Outcome<Output> {
            let line = format!("dapltest -T {args} -s {} -D uwarp", place.address);
            // The kind of test comes first, the operations last.
            let line = match args.split_once(" -- ") {
                Some((options, operations)) => {
                    format!("dapltest -T {options} -s {} -D uwarp {operations}", place.address)
                }
                None => line,
            };
            self.over_dapl(&line, client_address(place), &at, place.client)?.run()
        };
        let all = || -> Outcome {
            for test in tests.iter().chain(&["Q"]) {
                let out = client(test)?;
                out.exited_ok()?;
                let lower = out.text().to_lowercase();
                let bad = ["error", "fail", "warning"].into_iter().any(|word| lower.contains(word));
                require!(!bad && out.stdout.contains("End of Work"), "complains\n{}", out.text());
            }
            Ok(())
        };
        let result = all();
        let server = if result.is_ok() { server.wait()? } else { server.stop() };
        result.or_else(|why| uwarp_conformance::fail!("{why}--- server\n{}", server.text()))
    }
}

/// Where the client's end of the topology is.
fn dtest_passed(ends: &Ends, outputs: &[&Output], passed: &str) -> Outcome {
    for out in outputs {
        if !out.stdout.contains(passed) || out.stdout.contains("FAILED") || out.stderr.contains("ERR") {
            return ends.failure(format_args!("no \"{passed}\", or a complaint"));
        }
    }
    Ok(())
}

fn client_address(place: Place<'_>) -> &'static str {
    if place.client.is_none() { place.address } else { uwarp_conformance::netns::Veth::CLIENT4 }
}

/// DAPL's tables of interface adapters.
struct Dapl {
    scratch: Scratch,
    by_number: bool,
}

impl Dapl {
    fn new() -> Outcome<Dapl> {
        Ok(Dapl { scratch: Scratch::new("dapl")?, by_number: false })
    }

    fn by_number() -> Outcome<Dapl> {
        Ok(Dapl { by_number: true, ..Dapl::new()? })
    }

    /// A table with the one adapter `uwarp`, found by its address, or by its name and port.
    fn table(&self, address: &str) -> Outcome<PathBuf> {
        let file = self.scratch.path().join(format!("dat-{address}.conf"));
        let (library, adapter) = match self.by_number {
            true => ("libdaploscm.so.2", "uwarp0 1".to_owned()),
            false => ("libdaplofa.so.2", format!("{address} 0")),
        };
        let row = format!("uwarp u2.0 nonthreadsafe default {library} dapl.2.0 \"{adapter}\" \"\"\n");
        std::fs::write(&file, row).context(file.display())?;
        Ok(file)
    }
}
