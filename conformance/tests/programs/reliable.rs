//! The examples for reliable datagrams and for RDMA Write-Records, whose ends find each other over a TCP
//! connection of their own; and namespaces that lose packets.

use uwarp_conformance::netns::Veth;
use uwarp_conformance::pair::Ends;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::{Outcome, cc, check, pair, require};

use super::Run::Custom;
use super::{Case, PERFTEST_LIMIT, Scratch, World};

/// In namespaces: they have one port.
const VETH: &[Topology] = &[Veth1500V4];
const WAYS: &[Topology] = &[Veth1500V4, Veth9000V4, Veth1500V6];

const ECHOES: &str = "every message comes back as it was sent";
const RECORDS: &str =
    "every byte that a record calls valid is right; over reliable datagrams all of them are";
const MEMORY: &str = "what is read is what was written, and the target has counted each round";

/// All rows.
pub fn cases() -> Vec<Case> {
    let row =
        |manner, at, run| Case { program: "rd_pingpong.c", manner, checked: ECHOES, at, run: Custom(run) };
    vec![
        row("messages of 0, 64 and 4,096 bytes", WAYS, |w, p| {
            [("0", "1000"), ("64", "1000"), ("4096", "1000")].iter().try_for_each(|way| w.echoes(*way, p))
        }),
        row("messages of 5,000,000 bytes", VETH, |w, p| w.echoes(("5000000", "10"), p)),
        row("2 % of the packets are lost", VETH, |w, _| {
            w.with_loss(|place| {
                [("64", "1000"), ("300000", "50")].iter().try_for_each(|way| w.echoes(*way, place))
            })
        }),
        memory("Writes, Reads and atomic operations of 0, 64 and 100,000 bytes", WAYS, |w, p| {
            let ways = [("0", "500"), ("64", "1000"), ("100000", "50")];
            ways.iter().try_for_each(|way| w.reaches_memory(*way, p))
        }),
        memory("2 % of the packets are lost", VETH, |w, _| {
            w.with_loss(|place| {
                [("64", "1000"), ("300000", "50")].iter().try_for_each(|way| w.reaches_memory(*way, place))
            })
        }),
        records("frames of 64, 65,536 and 1,000,000 bytes", WAYS, |w, p| {
            let ways = [("64", "1000"), ("65536", "200"), ("1000000", "20")];
            let both = |way| ["ud", "rd"].iter().try_for_each(|service| w.records(service, way, p).map(drop));
            ways.into_iter().try_for_each(both)
        }),
        records("2 % of the packets are lost", VETH, |w, _| {
            w.with_loss(|place| {
                w.records("rd", ("65536", "200"), place)?;
                let ends = w.records("ud", ("65536", "200"), place)?;
                require!(
                    !ends.server.stdout.contains(" 0 in part"),
                    "nothing was lost\n{}",
                    ends.server.text()
                );
                Ok(())
            })
        }),
    ]
}

fn records(manner: &'static str, at: &'static [Topology], run: fn(&World, Place<'_>) -> Outcome) -> Case {
    Case { program: "write_record.c", manner, checked: RECORDS, at, run: Custom(run) }
}

fn memory(manner: &'static str, at: &'static [Topology], run: fn(&World, Place<'_>) -> Outcome) -> Case {
    Case { program: "rd_memory.c", manner, checked: MEMORY, at, run: Custom(run) }
}

impl World {
    pub fn echoes(&self, way: (&str, &str), place: Place<'_>) -> Outcome {
        self.example("rd_pingpong", 7472, way, place)
    }

    pub fn reaches_memory(&self, way: (&str, &str), place: Place<'_>) -> Outcome {
        self.example("rd_memory", 7473, way, place)
    }

    pub fn records(&self, service: &str, (bytes, frames): (&str, &str), place: Place<'_>) -> Outcome<Ends> {
        let ends = self.both_ends("write_record", 7474, &format!("{service} {bytes} {frames}"), place)?;
        let all = frames.parse::<u64>().unwrap_or(0) * bytes.parse::<u64>().unwrap_or(0);
        let said =
            if service == "rd" { format!("{all} bytes are valid, 0 of") } else { " valid, 0 of".into() };
        check::has(&ends.server, &said).or_else(|why| ends.failure(why))?;
        Ok(ends)
    }

    /// Bytes of a message, and rounds.
    fn example(&self, name: &str, port: u16, (bytes, rounds): (&str, &str), place: Place<'_>) -> Outcome {
        let ends = self.both_ends(name, port, &format!("{bytes} {rounds}"), place)?;
        let said = format!("{rounds} rounds of {bytes} bytes");
        check::has(&ends.client, &said).or_else(|why| ends.failure(why))
    }

    /// Both ends of an example, which have succeeded.
    fn both_ends(&self, name: &str, port: u16, args: &str, place: Place<'_>) -> Outcome<Ends> {
        let (dist, dir) = (self.dist()?, Scratch::new(name)?);
        let program = dir.path().join(name);
        cc::build_example(name, &program, dist, "-libverbs -ldl")?;
        let end = |role: &str, ns| {
            let line = format!("{} {role} {} {args}", program.display(), place.address);
            Ok(self.over_uwarp(&line, ns)?.limit(PERFTEST_LIMIT))
        };
        pair::run(&end("server", place.server)?, &end("client", place.client)?, port)
    }

    /// In namespaces of its own, whose firewalls go with them and drop 2 % of what comes over UDP. They see
    /// what the system has joined as one packet.
    pub fn with_loss(&self, run: impl Fn(Place<'_>) -> Outcome) -> Outcome {
        let veth = Veth::new(1500)?;
        let nft = |ns, args: &str| Cmd::line("nft").args(args).in_ns(Some(ns)).run_ok();
        for ns in [&veth.server, &veth.client] {
            nft(ns, "add table inet lossy")?;
            nft(ns, "add chain inet lossy in { type filter hook input priority 0 ; }")?;
            nft(ns, "add rule inet lossy in meta l4proto udp numgen random mod 100 < 2 counter drop")?;
        }
        let place =
            Place { server: Some(&veth.server), client: Some(&veth.client), ..self.net.place(Veth1500V4)? };
        run(place)?;
        for ns in [&veth.server, &veth.client] {
            let out = nft(ns, "list chain inet lossy in")?;
            let packets =
                out.stdout.split_once("counter packets ").and_then(|(_, rest)| rest.split(' ').next());
            let dropped = packets.and_then(|packets| packets.parse::<u64>().ok());
            require!(dropped.is_some_and(|dropped| dropped > 0), "nothing was dropped\n{}", out.text());
        }
        Ok(())
    }
}
