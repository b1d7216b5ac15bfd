//! Programs over unreliable connections, which they set up by number.

use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Outcome, cc, pair};

use super::Run::{Custom, PerftestByNumber};
use super::by_number::{ping, ping_with};
use super::{AS_IB, Case, PERFTEST_LIMIT, Scratch, World};

const LO: &[Topology] = &[Loopback4];
const VETH_1500: &[Topology] = &[Veth1500V4];
const LO_AND_1500: &[Topology] = &[Loopback4, Veth1500V4];
const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4, Veth9000V4];
const V6: &[Topology] = &[Veth1500V6];

const TABLE: &str = "one result for each size, every iteration counted, no error at either end";
const LOSS: &str = "some messages are lost; every one that completes is whole, the right one and in its turn";

/// All rows.
pub fn cases() -> Vec<Case> {
    let uc = "ibv_uc_pingpong";
    let mut all = vec![
        ping(uc, "-g 0", LO_AND_VETH, &[]),
        ping(uc, "-g 0 -e -c -s 1048576 -n 50", LO_AND_1500, &[]),
        ping(uc, "-g 1 -c, an IPv6 GID", V6, &[]),
        ping_with(uc, "by LID, as InfiniBand", LO_AND_1500, "", AS_IB),
    ];
    all.extend(perftest());
    all.push(Case {
        program: "unreliable_loss.c",
        manner: "2 % of the packets are lost",
        checked: LOSS,
        at: VETH_1500,
        run: Custom(|w, _| {
            w.with_loss(|place| {
                let ways = [("64", "1600"), ("14000", "400")];
                ways.iter().try_for_each(|way| w.loses_messages(*way, place))
            })
        }),
    });
    all
}

/// As lossless as loopback and veth are: perftest's receivers wait for each message.
fn perftest() -> Vec<Case> {
    let row = |program, manner, at, expected| Case {
        program,
        manner,
        checked: TABLE,
        at,
        run: PerftestByNumber(manner, &[], expected),
    };
    vec![
        row("ib_send_lat", "-c UC -n 1000 -s 64", LO_AND_VETH, Expected::one(64, 1000)),
        row("ib_send_lat", "-c UC -a -n 20", LO, Expected::all(20)),
        row("ib_send_lat", "-c UC -e -n 500 -s 64", LO_AND_1500, Expected::one(64, 500)),
        row("ib_write_lat", "-c UC -n 1000 -s 64", LO_AND_VETH, Expected::one(64, 1000)),
        row("ib_send_bw", "-c UC -n 1000 -s 65536", LO_AND_VETH, Expected::one(65536, 1000)),
        row("ib_send_bw", "-c UC -b -n 1000 -s 4096", LO, Expected::one(4096, 1000)),
        row("ib_send_bw", "-c UC -q 4 -n 500 -s 4096", LO_AND_1500, Expected::one(4096, 2000)),
        row("ib_write_bw", "-c UC -n 1000 -s 65536", LO_AND_VETH, Expected::one(65536, 1000)),
        row("ib_write_bw", "-c UC -b -n 500", LO, Expected::one(65536, 500)),
        row("ib_write_bw", "-c UC -q 16 -n 50 -s 4096", LO_AND_1500, Expected::one(4096, 800)),
    ]
}

impl World {
    /// Bytes of a message, and messages.
    fn loses_messages(&self, (bytes, count): (&str, &str), place: Place<'_>) -> Outcome {
        let (dir, port) = (Scratch::new("unreliable_loss")?, free_port());
        let program = cc::build_with("unreliable_loss", dir.path(), "")?;
        let end = |role: &str, ns| {
            let line = format!("{} {role} {} {port} {bytes} {count}", program.display(), place.address);
            Ok(self.over_uwarp(&line, ns)?.limit(PERFTEST_LIMIT))
        };
        let ends = pair::run(&end("server", place.server)?, &end("client", place.client)?, port)?;
        for out in [&ends.server, &ends.client] {
            check::statements(out)?;
        }
        check::has(&ends.server, "ok messages were lost").or_else(|why| ends.failure(why))
    }
}
