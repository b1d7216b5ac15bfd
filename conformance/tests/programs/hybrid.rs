//! `UWARP_LINK=hybrid:N`: each row sees in `uwarp stat` which connections have a link of their own, and which
//! go by reliable datagrams.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;
use uwarp_conformance::pair;
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Context, Outcome, cc, check, fail, require};

use super::Run::Custom;
use super::mpi::Built;
use super::mpis::{Job, OPEN_MPI};
use super::{Case, LONG, PERFTEST_LIMIT, Scratch, World};

const LO: &[Topology] = &[Loopback4];
const BOTH: &[Topology] = &[Loopback4, Veth1500V4];

const ONE_PEER: &str = "uwarp stat says rd for hybrid:0, a link of its own for hybrid:1";
const PLACES: &str = "uwarp stat: the first peer alone has a link of its own, also for its second \
                      connection; when it has none left, the next peer";
const ASKED: &str = "uwarp stat: two by memory, one by rd; the process has asked for memory twice";
const OTHERS: &str = "rd and tcp at the client are taken, tcp and rd at the server refuse and say why";
const PAIRS: &str = "c/mpi/pairs.c: every byte; uwarp stat: of each rank, one peer by memory, six by rd";

/// All rows.
pub fn cases() -> Vec<Case> {
    let row = |program, manner, checked, at, run| Case { program, manner, checked, at, run: Custom(run) };
    vec![
        row("ib_send_lat", "hybrid:0 and hybrid:1, -R -D 2", ONE_PEER, BOTH, |w, p| {
            w.one_peer("ib_send_lat -R -s 64", p)
        }),
        row("ib_send_bw", "hybrid:0 and hybrid:1, by number, -D 2", ONE_PEER, LO, |w, p| {
            w.one_peer("ib_send_bw", p)
        }),
        row("peers.c", "hybrid:1, three peers", PLACES, BOTH, |w, p| w.three_peers(p)),
        row("peers.c", "hybrid:2, three peers", ASKED, LO, |w, p| w.asks_for_two(p)),
        row("rping", "hybrid:N at one end alone", OTHERS, LO, |w, p| w.other_rules(p)),
        row("mpirun.openmpi -np 8", "hybrid:1, uwarp mpi --transport openib", PAIRS, LO, |w, p| {
            w.heavy_pairs("openib", p)
        }),
        row("mpirun.openmpi -np 8", "hybrid:1, uwarp mpi --transport ofi", PAIRS, LO, |w, p| {
            w.heavy_pairs("ofi", p)
        }),
    ]
}

/// What carries connections without a rule.
fn own_link(place: Place<'_>) -> &'static str {
    if place.server.is_some() { "tcp" } else { "memory" }
}

impl World {
    fn one_peer(&self, line: &str, place: Place<'_>) -> Outcome {
        self.perftest_over(line, ["hybrid:0"; 2], "rd", place)?;
        self.perftest_over(line, ["hybrid:1"; 2], own_link(place), place)
    }

    /// Three servers, and a client that may have one link of its own.
    fn three_peers(&self, place: Place<'_>) -> Outcome {
        let peers = Peers::begin(self, "hybrid:1", place)?;
        let [a, b, c] = peers.ports;
        let own = own_link(place);
        let mut client =
            peers.client(self, &format!("+{a} +{b} +{c} . +{a} . -{a} +{b} . -{a} +{c} ."), place)?;
        for (step, wanted) in [
            [(a, own), (b, "rd"), (c, "rd")].as_slice(),
            &[(a, own), (a, own), (b, "rd"), (c, "rd")],
            &[(a, own), (b, "rd"), (b, "rd"), (c, "rd")],
            &[(b, "rd"), (b, "rd"), (c, "rd"), (c, own)],
        ]
        .into_iter()
        .enumerate()
        {
            client = peers.see(self, client, step + 1, wanted)?;
        }
        check::statements(&client.wait()?)
    }

    /// What goes by datagrams does not ask for memory.
    fn asks_for_two(&self, place: Place<'_>) -> Outcome {
        let peers = Peers::begin(self, "hybrid:2", place)?;
        let [a, b, c] = peers.ports;
        let client = peers.client(self, &format!("+{a} +{b} +{c} ."), place)?;
        let client = peers.see(self, client, 1, &[(a, "memory"), (b, "memory"), (c, "rd")])?;
        let client = client.wait()?;
        check::statements(&client)?;
        for (said, times) in [("asks the peer's process for memory", 2), ("and no place is free", 1)] {
            let found = client.text().matches(said).count();
            require!(found == times, "\"{said}\" {found} times, wanted {times}\n{}", client.text());
        }
        Ok(())
    }

    /// A listener takes what is connected to it; who has no use for what comes says so.
    fn other_rules(&self, place: Place<'_>) -> Outcome {
        self.rping_over(["hybrid:1", "rd"], "rd", &[], place)?;
        self.rping_over(["hybrid:1", "tcp"], "tcp", &[], place)?;
        self.rping_over(["hybrid:0", "auto"], own_link(place), &[], place)?;
        self.fails_to_connect(["tcp", "hybrid:0"], "the peer does not answer them", place)?;
        self.fails_to_connect(["rd", "hybrid:1"], "the peer has connected over TCP", place)
    }

    /// Ranks that connect when they first have something to say, and the first peer of each has the most.
    fn heavy_pairs(&self, transport: &'static str, place: Place<'_>) -> Outcome {
        let (built, ranks) = (Built::new("pairs", OPEN_MPI)?, 8);
        let job = self.launch(built.dir.path(), Job { mpi: OPEN_MPI, ranks, transport }, place)?;
        let job = job.env("UWARP_LINK", "hybrid:1").limit(LONG).arg(&built.program).arg(built.dir.path());
        let job = job.spawn()?;
        job.until(LONG, "the end of the all-to-all", |job| {
            job.so_far().contains("ok light: ") || !job.is_running()
        })?;
        let stat = Cmd::new(self.dist()?.uwarp()?).args("stat --json").run_ok()?;
        fs::write(built.dir.path().join("seen"), "").context("the file of the row")?;
        let out = job.wait()?;
        out.exited_ok()?;
        check::has(&out, "every byte as it was sent")?;
        let processes = peers_of_ranks(&stat.stdout)?;
        let is_right = |links: &BTreeMap<u64, String>| {
            let by = |link| links.values().filter(|other| *other == link).count();
            [by("memory"), by("rd"), links.len()] == [1, 6, 7]
        };
        require!(
            processes.len() == 8 && processes.iter().all(is_right),
            "the peers of each rank: {processes:#?}\n{}",
            out.text()
        );
        Ok(())
    }
}

/// Of each process that is called "pairs": its peers, and what carries the connections with each.
fn peers_of_ranks(report: &str) -> Outcome<Vec<BTreeMap<u64, String>>> {
    let report: Value = serde_json::from_str(report).context("the report of uwarp stat")?;
    let processes = report["processes"].as_array().into_iter().flatten();
    let ours = processes.filter(|process| process["command"] == "pairs");
    let peers = ours.map(|process| {
        let mut peers = BTreeMap::<u64, String>::new();
        for qp in process["queue_pairs"].as_array().into_iter().flatten() {
            let (Some(peer), Some(link)) = (qp["peer_qpn"].as_u64(), qp["link"].as_str()) else { continue };
            if qp["qpn"].as_u64().is_some_and(|own| own >> 8 == peer >> 8) {
                continue;
            }
            let known = peers.entry(peer >> 8).or_insert_with(|| link.to_owned());
            if known != link {
                known.push_str(" and ");
                known.push_str(link);
            }
        }
        peers
    });
    Ok(peers.collect())
}

/// The servers of `c/peers.c`.
struct Peers {
    dir: Scratch,
    link: &'static str,
    ports: [u16; 3],
    _servers: [Running; 3],
}

impl Peers {
    fn begin(world: &World, link: &'static str, place: Place<'_>) -> Outcome<Self> {
        let dir = Scratch::new("peers")?;
        let program = cc::build("peers", dir.path())?;
        let ports = [free_port(), free_port(), free_port()];
        let serve = |port| {
            let line = format!("{} server {} {port}", program.display(), place.address);
            pair::serve(&world.over(&line, link, place.server)?, port)
        };
        let servers = [serve(ports[0])?, serve(ports[1])?, serve(ports[2])?];
        Ok(Self { dir, link, ports, _servers: servers })
    }

    fn client(&self, world: &World, steps: &str, place: Place<'_>) -> Outcome<Running> {
        let dir = self.dir.path().display();
        let line = format!("{dir}/peers client {} {dir} {steps}", place.address);
        let client = world.over(&line, self.link, place.client)?;
        client.env("UWARP_LOG", "info,uwarp_driver=debug").limit(PERFTEST_LIMIT).spawn()
    }

    /// Waits until the client's connections, by the servers' ports, are these; then the client goes on.
    fn see(&self, world: &World, client: Running, step: usize, wanted: &[(u16, &str)]) -> Outcome<Running> {
        let said = format!("step {step}\n");
        client.until(LONG, &said, |client| client.so_far().contains(&said) || !client.is_running())?;
        let mut seen: Vec<(u16, String)> = Vec::new();
        for qp in world.queue_pairs(&client).unwrap_or_default() {
            let peer = qp["peer"].as_str().and_then(|peer| peer.rsplit_once(':')?.1.parse().ok());
            seen.extend(peer.zip(qp["link"].as_str().map(str::to_owned)));
        }
        let mut wanted: Vec<_> = wanted.iter().map(|(port, link)| (*port, (*link).to_owned())).collect();
        seen.sort();
        wanted.sort();
        if seen != wanted {
            fail!("step {step}: {seen:?}, wanted {wanted:?}\n{}", client.stop().text());
        }
        fs::write(self.dir.path().join(step.to_string()), "").context("the file of the step")?;
        Ok(client)
    }
}
