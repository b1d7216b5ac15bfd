//! RC programs over reliable datagrams (`UWARP_LINK=rd`): each row sees in `uwarp stat` that its stream goes
//! that way.

use std::fs;
use std::process::Command;

use uwarp_conformance::netns::NetNs;
use uwarp_conformance::pair::{self, Ends};
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Outcome, check, fail, require};

use super::Run::Custom;
use super::by_number::exchange;
use super::{AS_IWARP, Case, Env, LONG, PERFTEST_LIMIT, World};

const LO: &[Topology] = &[Loopback4];
const VETH: &[Topology] = &[Veth1500V4];
const VETH6: &[Topology] = &[Veth1500V6];
const WAYS: &[Topology] = &[Loopback4, Veth1500V4, Veth9000V4];
const ALL: &[Topology] = &[Loopback4, Veth1500V4, Veth9000V4, Veth1500V6];

const CHECKED: &str = "as over TCP, and uwarp stat says that the stream goes by rd";
const REFUSED: &str = "EOPNOTSUPP and a sentence at the end that requires it";

/// Seconds that perftest runs for: long enough to be looked at.
const LASTING: &str = "-D 2";

/// All rows.
pub fn cases() -> Vec<Case> {
    let row = |program, manner, at, run| Case { program, manner, checked: CHECKED, at, run: Custom(run) };
    vec![
        row("rping", "over rd", ALL, |w, p| w.rping_over_rd(&[], p)),
        row("rping", "over rd, as iWARP", LO, |w, p| w.rping_over_rd(AS_IWARP, p)),
        row("ib_send_lat", "over rd, -R -D 2 -s 64", WAYS, |w, p| {
            w.perftest_over_rd("ib_send_lat -R -s 64", p)
        }),
        row("ib_write_bw", "over rd, -R -D 2", WAYS, |w, p| w.perftest_over_rd("ib_write_bw -R", p)),
        row("ib_read_bw", "over rd, -R -D 2 -q 16", VETH, |w, p| {
            w.perftest_over_rd("ib_read_bw -R -q 16", p)
        }),
        row("ib_send_bw", "over rd, by number, -D 2", WAYS, |w, p| w.perftest_over_rd("ib_send_bw", p)),
        row("ib_atomic_bw", "over rd, by number, -D 2", LO, |w, p| w.perftest_over_rd("ib_atomic_bw", p)),
        row("ibv_rc_pingpong", "over rd, -g 0 -n 20000", LO, |w, p| w.pingpong_over_rd("-g 0 -n 20000", p)),
        row("ibv_rc_pingpong", "over rd, -g 2 -n 20000, a link-local GID", VETH6, |w, p| {
            for ns in [p.server, p.client].into_iter().flatten() {
                ns.settled()?;
            }
            w.pingpong_over_rd("-g 2 -n 20000", p)
        }),
        row("ibv_rc_pingpong", "over rd, -g 0 -e -c -s 1048576 -n 1000", VETH, |w, p| {
            w.pingpong_over_rd("-g 0 -e -c -s 1048576 -n 1000", p)
        }),
        Case {
            program: "tgtd",
            manner: "iser://, over rd",
            checked: "as over TCP. The target listens on one port of IPv4 and of IPv6, each by itself",
            at: LO,
            run: Custom(|w, p| w.iser(&[("UWARP_LINK", "rd")], p)),
        },
        row("ib_send_lat", "over rd, 2 % of the packets are lost", VETH, |w, _| {
            w.with_loss(|place| w.perftest_over_rd("ib_send_lat -R -s 64", place))
        }),
        row("ib_write_bw", "over rd, 2 % of the packets are lost", VETH, |w, _| {
            w.with_loss(|place| w.perftest_over_rd("ib_write_bw -R", place))
        }),
        row("ibv_rc_pingpong", "over rd, 2 % of the packets are lost", VETH, |w, _| {
            w.with_loss(|place| w.pingpong_over_rd("-g 0 -c -s 65536 -n 2000", place))
        }),
        Case {
            program: "rping",
            manner: "over rd, to a host that is switched off",
            checked: "UNREACHABLE with EHOSTUNREACH, as over TCP",
            at: VETH,
            run: Custom(|w, place| {
                ["tcp", "rd"].into_iter().try_for_each(|link| w.finds_nobody(link, place))
            }),
        },
        Case {
            program: "rping",
            manner: "rd at one end alone",
            checked: REFUSED,
            at: LO,
            run: Custom(|w, place| {
                w.fails_to_connect(["tcp", "rd"], "the peer does not answer them", place)?;
                w.fails_to_connect(["rd", "tcp"], "the peer has connected over TCP", place)
            }),
        },
    ]
}

impl World {
    fn rping_over_rd(&self, env: Env, place: Place<'_>) -> Outcome {
        self.rping_over(["rd"; 2], "rd", env, place)
    }

    /// With these rules at server and client, `link` carries the stream.
    pub fn rping_over(&self, rules: [&str; 2], link: &str, env: Env, place: Place<'_>) -> Outcome {
        let port = free_port();
        let end = |role, rule, ns| {
            let line = format!("rping {role} -V -S 1000 -C 2000 -a {} -p {port}", place.address);
            Ok(self.over(&line, rule, ns)?.envs(env))
        };
        let [server, client] = rules;
        let ends =
            self.see(link, &end("-s", server, place.server)?, &end("-c", client, place.client)?, port)?;
        check::rping_quiet(&ends.client).or_else(|why| ends.failure(why))
    }

    fn perftest_over_rd(&self, line: &str, place: Place<'_>) -> Outcome {
        self.perftest_over(line, ["rd"; 2], "rd", place)
    }

    /// As [`Self::rping_over`].
    pub fn perftest_over(&self, line: &str, rules: [&str; 2], link: &str, place: Place<'_>) -> Outcome {
        let port = free_port();
        let line = format!("{line} {LASTING} -F -p {port}");
        let [server, client] = rules;
        let client = self.over(&line, client, place.client)?.arg(place.address);
        let ends = self.see(link, &self.over(&line, server, place.server)?, &client, port)?;
        check::no_complaints(&ends.server)?;
        let rows = check::perftest_rows(&ends.client.stdout);
        let [row] = &rows[..] else { return ends.failure("not one result") };
        require!(row.iterations > 0, "no iterations\n{}", ends.client.text());
        Ok(())
    }

    pub fn pingpong_over_rd(&self, args: &str, place: Place<'_>) -> Outcome {
        let port = free_port();
        let line = format!("ibv_rc_pingpong {args} -p {port}");
        let client = self.over(&line, "rd", place.client)?.arg(exchange(place));
        let ends = self.see_rd(&self.over(&line, "rd", place.server)?, &client, port)?;
        check::has(&ends.client, " iters in ").or_else(|why| ends.failure(why))
    }

    /// The end that requires it says why it cannot have it.
    pub fn fails_to_connect(&self, [server, client]: [&str; 2], cause: &str, place: Place<'_>) -> Outcome {
        let port = free_port();
        let end = |role, link, ns| {
            self.over(&format!("rping {role} -C 5 -a {} -p {port}", place.address), link, ns)
        };
        let server_end = pair::serve(&end("-s", server, place.server)?, port)?;
        let client_end = end("-c", client, place.client)?.spawn()?;
        // The other one may stay for ever: rping joins a thread that waits for a completion, when it hears of
        // the end of its connection before it has looked whether it is connected.
        let requires = if server == "rd" { &server_end } else { &client_end };
        let told = requires.until(LONG, "saying why", |end| {
            let said = end.so_far();
            said.contains("UWARP_LINK requires reliable datagrams, ")
                && said.contains(cause)
                && said.contains("CONNECT_ERROR, error -95")
        });
        let [client_end, server_end] = [client_end.stop(), server_end.stop()];
        told.or_else(|why| fail!("{why}: \"{cause}\" and -95\n{}\n{}", client_end.text(), server_end.text()))
    }

    /// No host has this address.
    fn finds_nobody(&self, link: &str, place: Place<'_>) -> Outcome {
        let line = format!("rping -c -C 5 -a 10.55.0.99 -p {}", free_port());
        let client = self.over(&line, link, place.client)?.spawn()?;
        let told = client
            .until(LONG, "an event", |end| end.so_far().contains("RDMA_CM_EVENT_UNREACHABLE, error -113"));
        let client = client.stop();
        told.or_else(|why| fail!("{why}: UNREACHABLE and -113 over {link}\n{}", client.text()))
    }

    pub fn over(&self, line: &str, link: &str, ns: Option<&NetNs>) -> Outcome<Cmd> {
        Ok(self.over_uwarp(line, ns)?.env("UWARP_LINK", link).limit(PERFTEST_LIMIT))
    }

    /// Runs both ends, which must use reliable datagrams alone.
    fn see_rd(&self, server: &Cmd, client: &Cmd, port: u16) -> Outcome<Ends> {
        self.see("rd", server, client, port)
    }

    /// The same of any link.
    fn see(&self, link: &str, server: &Cmd, client: &Cmd, port: u16) -> Outcome<Ends> {
        let server = pair::serve(server, port)?;
        let client = client.spawn()?;
        for end in [&client, &server] {
            let what = format!("a stream over {link}");
            end.until(LONG, &what, |end| self.links(end).is_some_and(|links| links == [link]))?;
        }
        let ends = Ends { client: client.wait()?, server: server.wait()? };
        ends.exited_ok()?;
        Ok(ends)
    }

    /// What carries the streams of a process, each name once; `None`: it has none yet.
    fn links(&self, process: &Running) -> Option<Vec<String>> {
        let pairs = self.queue_pairs(process)?;
        let mut links: Vec<String> =
            pairs.iter().filter_map(|pair| pair["link"].as_str().map(str::to_owned)).collect();
        links.sort();
        links.dedup();
        (!links.is_empty()).then_some(links)
    }

    /// The queue pairs of a process, as `uwarp stat --json` has them.
    pub fn queue_pairs(&self, process: &Running) -> Option<Vec<serde_json::Value>> {
        let guard = process.pid().as_raw_nonzero();
        let children = fs::read_to_string(format!("/proc/{guard}/task/{guard}/children")).ok()?;
        let pid = children.split_whitespace().next()?;
        let uwarp = self.dist().ok()?.uwarp().ok()?;
        // It is no command of the row, so it is not started as one. Its socket belongs to the namespace.
        let mut stat = match process.ns() {
            Some(ns) => {
                let mut within = Command::new("ip");
                within.args(["netns", "exec", ns]).arg(uwarp);
                within
            }
            None => Command::new(uwarp),
        };
        let output = stat.args(["stat", "--json", "--pid", pid]).output().ok()?;
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        document["processes"][0]["queue_pairs"].as_array().cloned()
    }
}
