//! Programs over datagram queue pairs. They exchange number and GID (or LID) over a socket of their own, of
//! IPv4.

use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::netns::NetNs;
use uwarp_conformance::pair;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Outcome, cc, require};

use super::Run::Custom;
use super::by_number::{exchange, ping, ping_with};
use super::{AS_IB, AS_IWARP, Case, PERFTEST_LIMIT, Scratch, World};

const LO: &[Topology] = &[Loopback4];
const LO_AND_1500: &[Topology] = &[Loopback4, Veth1500V4];
const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4, Veth9000V4];
const V6: &[Topology] = &[Veth1500V6, Veth9000V6];

const PINGS: &str = "every message at both ends";
const TABLE: &str = "one result for each size, every iteration counted, no error at either end";
const LARGE: &str = "one datagram, every byte at both ends";
const PARTS: &str = "every message at both ends, and no fragments of IP but those of the first ones";
const FI: &str = "every round of each size, data checked at both ends";

/// All rows.
pub fn cases() -> Vec<Case> {
    [pingpong(), perftest(), others()].into_iter().flatten().collect()
}

fn pingpong() -> Vec<Case> {
    let ud = "ibv_ud_pingpong";
    let rows = [
        ping(ud, "-g 0", LO_AND_VETH, &[]),
        ping(ud, "-g 0 -e", LO_AND_1500, &[]),
        ping(ud, "-g 1, an IPv6 GID", V6, &[]),
        ping(ud, "-g 1 -e, an IPv6 GID", &[Veth1500V6], &[]),
        ping(ud, "-g 0, as iWARP", LO, AS_IWARP),
        ping_with(ud, "by LID, as InfiniBand", LO_AND_1500, "", AS_IB),
    ];
    rows.map(|row| Case { checked: PINGS, ..row }).into()
}

/// As lossless as loopback and veth are: perftest's receiver has as many receives posted as its sender has
/// messages on their way. Over Ethernet perftest's largest datagram is the port's MTU.
fn perftest() -> Vec<Case> {
    let row = |program, manner, at, run| Case { program, manner, checked: TABLE, at, run: Custom(run) };
    vec![
        row("ib_send_lat", "-c UD -a -n 20", LO, |w, p| {
            w.ud_perftest("ib_send_lat", "-a -n 20", &up_to(4096, 20), p)
        }),
        row("ib_send_lat", "-c UD -n 1000 -s 1024", &[Veth1500V4, Veth9000V4], |w, p| {
            w.ud_perftest("ib_send_lat", "-n 1000 -s 1024", &Expected::one(1024, 1000), p)
        }),
        row("ib_send_lat", "-c UD -e -n 1000 -s 64", LO_AND_1500, |w, p| {
            w.ud_perftest("ib_send_lat", "-e -n 1000 -s 64", &Expected::one(64, 1000), p)
        }),
        row("ib_send_lat", "-c UD -x 1, an IPv6 GID", &[Veth1500V6], |w, p| {
            w.ud_perftest("ib_send_lat", "-x 1 -n 1000 -s 64", &Expected::one(64, 1000), p)
        }),
        row("ib_send_bw", "-c UD -n 2000 -s 1024", LO_AND_VETH, |w, p| {
            w.ud_perftest("ib_send_bw", "-n 2000 -s 1024", &Expected::one(1024, 2000), p)
        }),
        row("ib_send_bw", "-c UD -e -n 2000 -s 1024", LO, |w, p| {
            w.ud_perftest("ib_send_bw", "-e -n 2000 -s 1024", &Expected::one(1024, 2000), p)
        }),
        row("ib_send_bw", "-c UD -b -n 1000 -s 1024", LO, |w, p| {
            w.ud_perftest("ib_send_bw", "-b -n 1000 -s 1024", &Expected::one(1024, 1000), p)
        }),
        row("ib_send_bw", "-c UD -q 4 -n 500 -s 512", LO_AND_1500, |w, p| {
            w.ud_perftest("ib_send_bw", "-q 4 -n 500 -s 512", &Expected::one(512, 2000), p)
        }),
        row("ib_send_bw", "-c UD --use-srq -n 1000 -s 512", LO, |w, p| {
            w.ud_perftest("ib_send_bw", "--use-srq -n 1000 -s 512", &Expected::one(512, 1000), p)
        }),
        row("ib_send_bw", "-c UD -s 4096 -n 1000", &[Veth9000V4], |w, p| {
            w.ud_perftest("ib_send_bw", "-s 4096 -n 1000", &Expected::one(4096, 1000), p)
        }),
    ]
}

fn up_to(largest: u64, iterations: u64) -> Expected {
    let sizes = Expected::all(iterations).sizes.into_iter().filter(|size| *size <= largest).collect();
    Expected { sizes, iterations: Some(iterations) }
}

fn others() -> Vec<Case> {
    let row = |program, manner, checked, at, run| Case { program, manner, checked, at, run: Custom(run) };
    vec![
        // qperf names peers by LID only.
        row("qperf", "ud_lat, ud_bw, ud_bi_bw, as InfiniBand", "a figure for each test", LO, |w, p| {
            w.ud_qperf(&["ud_lat", "ud_bw", "ud_bi_bw"], p)
        }),
        row("ib_send_lat", "-c UD -n 2000 -s 4096, in parts", PARTS, &[Veth1500V4, Veth1500V6], |w, p| {
            w.ud_in_parts(p)
        }),
        // The largest datagram it sends is the port's MTU.
        row("fi_pingpong", "-p verbs -e dgram -c", FI, LO_AND_1500, |w, p| {
            w.fi_datagrams("-p verbs -e dgram", &["64", "256", "1k"], p)
        }),
        row("large_datagram.c", "60,000 bytes each way, by uwarpdv.h", LARGE, LO_AND_1500, |w, p| w.large(p)),
        row("fi_pingpong", "-p verbs;ofi_rxd -e rdm -c, to 64k", FI, LO_AND_1500, |w, p| {
            w.fi_datagrams("-p verbs;ofi_rxd -e rdm -S 65536", &["64k"], p)
        }),
    ]
}

/// Fragments of IP that a namespace has made.
fn fragments(ns: Option<&NetNs>) -> Outcome<u64> {
    let named = |file: &str, name: &str| -> Outcome<u64> {
        let text = Cmd::line(&format!("cat /proc/net/{file}")).in_ns(ns).run_ok()?.stdout;
        // IPv6: a line for each. IPv4: names, then numbers.
        if let Some(line) = text.lines().find(|line| line.starts_with(name)) {
            return Ok(line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0));
        }
        let ip: Vec<Vec<&str>> = text
            .lines()
            .filter(|line| line.starts_with("Ip:"))
            .map(|line| line.split_whitespace().collect())
            .collect();
        let at = ip.first().and_then(|names| names.iter().position(|of| *of == name));
        Ok(at.and_then(|at| ip.get(1)?.get(at)?.parse().ok()).unwrap_or(0))
    };
    Ok(named("snmp", "FragCreates")? + named("snmp6", "Ip6FragCreates")?)
}

impl World {
    fn ud_perftest(&self, tool: &str, args: &str, expected: &Expected, place: Place<'_>) -> Outcome {
        let port = free_port();
        let line = format!("{tool} -c UD -F -p {port} {args}");
        let end = |ns| Ok(self.over_uwarp(&line, ns)?.limit(PERFTEST_LIMIT));
        let (server, client) = (end(place.server)?, end(place.client)?.arg(exchange(place)));
        let ends = pair::run(&server, &client, port)?;
        // "-a" says that UD's largest message is smaller, and goes on.
        check::perftest_table(&ends.client, expected).or_else(|why| ends.failure(why))?;
        let failed =
            [&ends.server, &ends.client].iter().any(|out| out.text().contains("Completion with error"));
        if failed { ends.failure("a completion with an error") } else { Ok(()) }
    }

    /// Messages that are longer than a packet of the path, which IP would cut into fragments.
    fn ud_in_parts(&self, place: Place<'_>) -> Outcome {
        let before = fragments(place.server)? + fragments(place.client)?;
        self.ud_perftest("ib_send_lat", "-n 2000 -s 4096", &Expected::one(4096, 2000), place)?;
        // The first message of each end goes before its peer has said that it takes parts.
        let made = fragments(place.server)? + fragments(place.client)? - before;
        require!(made <= 60, "{made} fragments of IP");
        for (mtu, shown) in [("auto", "4096 (5)"), ("interface", "1024 (3)")] {
            let out = self.over_uwarp("ibv_devinfo", place.client)?.env("UWARP_UD_MTU", mtu).run_ok()?;
            let line = out.stdout.lines().find(|line| line.contains("active_mtu")).unwrap_or_default();
            require!(line.ends_with(shown), "UWARP_UD_MTU={mtu}: {line}");
        }
        Ok(())
    }

    /// `c/large_datagram.c`, whose ends find each other through rdma_cm.
    fn large(&self, place: Place<'_>) -> Outcome {
        let (dir, port) = (Scratch::new("large")?, free_port());
        let program = cc::build_with("large_datagram", dir.path(), "")?;
        let end = |role: &str, ns| {
            let line = format!("{} {role} {} {port}", program.display(), place.address);
            Ok(self.over_uwarp(&line, ns)?.limit(PERFTEST_LIMIT))
        };
        let ends = pair::run_datagrams(&end("server", place.server)?, &end("client", place.client)?, port)?;
        for out in [&ends.server, &ends.client] {
            check::statements(out)?;
            check::has(out, "ok every byte as it was sent").or_else(|why| ends.failure(why))?;
        }
        Ok(())
    }

    fn ud_qperf(&self, tests: &[&str], place: Place<'_>) -> Outcome {
        let port = free_port();
        let server = self.over_uwarp(&format!("qperf -lp {port}"), place.server)?.envs(AS_IB);
        let server = pair::serve(&server.limit(PERFTEST_LIMIT), port)?;
        for test in tests {
            let line = format!("qperf -lp {port} {} -t 1 {test}", exchange(place));
            let out = self.over_uwarp(&line, place.client)?.envs(AS_IB).limit(PERFTEST_LIMIT).run()?;
            let figures =
                out.stdout.lines().filter_map(|line| line.split_once('=')?.1.split_whitespace().next());
            let good = out.ok() && figures.clone().count() > 0;
            let good =
                good && figures.map(str::parse::<f64>).all(|value| value.is_ok_and(|value| value > 0.0));
            require!(good, "{test}: no figure\n{}--- server\n{}", out.text(), server.stop().text());
        }
        drop(server.stop());
        Ok(())
    }

    fn fi_datagrams(&self, endpoint: &str, sizes: &[&str], place: Place<'_>) -> Outcome {
        let port = free_port();
        let line = format!("fi_pingpong {endpoint} -c -I 50");
        let server = self.over_uwarp(&format!("{line} -B {port}"), place.server)?.limit(PERFTEST_LIMIT);
        let client = format!("{line} -P {port} {}", place.address);
        let client = self.over_uwarp(&client, place.client)?.limit(PERFTEST_LIMIT);
        let ends = pair::run(&server, &client, port)?;
        for out in [&ends.server, &ends.client] {
            check::no_complaints(out)?;
            let complete = |size: &&str| {
                out.stdout.lines().any(|line| line.split_whitespace().take(3).eq([*size, "50", "=50"]))
            };
            if !sizes.iter().all(complete) {
                return ends.failure(format_args!("not 50 rounds of each of {sizes:?}"));
            }
        }
        Ok(())
    }
}
