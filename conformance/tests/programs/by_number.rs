//! Programs that bring their queue pairs up themselves: they exchange number and GID (or LID) over a socket
//! of their own.

use uwarp_conformance::Outcome;
use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::netns::Veth;
use uwarp_conformance::pair;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};

use super::Run::{Custom, PerftestByNumber, Pingpong};
use super::{AS_IB, AS_IWARP, CRC_OFF, Case, Env, World};

const LO: &[Topology] = &[Loopback4];
const VETH_1500: &[Topology] = &[Veth1500V4];
const LO_AND_1500: &[Topology] = &[Loopback4, Veth1500V4];
const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4, Veth9000V4];
const V6: &[Topology] = &[Veth1500V6];

const PINGS: &str = "every message at both ends, and with -c its data";
const TABLE: &str = "one result for each size, every iteration counted, no error at either end";
const DAPL: &str = "PASSED or complete at both ends";

/// Every test of RC but the one for which a program looks at memory and calls nothing: it is a matter of who
/// has a processor.
const QPERF: [&str; 6] =
    ["rc_lat", "rc_bw", "rc_rdma_read_lat", "rc_rdma_write_bw", "rc_compare_swap_mr", "rc_fetch_add_mr"];

/// All rows.
pub fn cases() -> Vec<Case> {
    [pingpong(), perftest(), others()].into_iter().flatten().collect()
}

/// A ping-pong whose arguments are the manner up to a comma.
pub fn ping(program: &'static str, manner: &'static str, at: &'static [Topology], env: Env) -> Case {
    ping_with(program, manner, at, manner.split(',').next().unwrap_or_default(), env)
}

/// The same with other arguments than the manner names.
pub fn ping_with(
    program: &'static str,
    manner: &'static str,
    at: &'static [Topology],
    args: &'static str,
    env: Env,
) -> Case {
    Case { program, manner, checked: PINGS, at, run: Pingpong(args, env) }
}

fn pingpong() -> Vec<Case> {
    let (rc, srq) = ("ibv_rc_pingpong", "ibv_srq_pingpong");
    vec![
        ping(rc, "-g 0", LO_AND_VETH, &[]),
        ping(rc, "-g 0 -e -c -s 1048576 -n 50", LO_AND_VETH, &[]),
        ping_with(rc, "-g 0 -c, UWARP_CRC=off", VETH_1500, "-g 0 -c -s 65536 -n 50", CRC_OFF),
        // ibv_wr_* functions; on-demand paging.
        ping(rc, "-g 0 -N", LO, &[]),
        ping(rc, "-g 0 -o", LO, &[]),
        // Device memory.
        ping(rc, "-g 0 -j -c", LO, &[]),
        // Advice on it, and the times of completions.
        ping(rc, "-g 0 -o -P", LO, &[]),
        ping(rc, "-g 0 -t", LO, &[]),
        ping(rc, "-g 1, an IPv6 GID", V6, &[]),
        Case { run: Custom(link_local), ..ping(rc, "-g 2, a link-local GID", V6, &[]) },
        ping(rc, "-g 0, as iWARP", LO_AND_1500, AS_IWARP),
        ping_with(rc, "by LID, as InfiniBand", LO_AND_1500, "", AS_IB),
        ping(srq, "-g 0", LO_AND_VETH, &[]),
        ping(srq, "-g 0 -e -q 32 -n 100", LO, &[]),
        ping_with(srq, "by LID, as InfiniBand", LO, "", AS_IB),
    ]
}

fn perf(
    program: &'static str,
    manner: &'static str,
    at: &'static [Topology],
    env: Env,
    expected: Expected,
) -> Case {
    let args = manner.trim_start_matches("without -R, ").trim_end_matches(", as iWARP");
    Case { program, manner, checked: TABLE, at, run: PerftestByNumber(args, env, expected) }
}

fn perftest() -> Vec<Case> {
    let as_iwarp = "as iWARP: one result for each size, every iteration counted, no error";
    let as_ib = "as InfiniBand: one result for each size, every iteration counted, no error";
    vec![
        perf("ib_send_lat", "without -R, -n 1000 -s 64", LO_AND_VETH, &[], Expected::one(64, 1000)),
        perf("ib_write_lat", "without -R, -n 1000 -s 64", LO_AND_VETH, &[], Expected::one(64, 1000)),
        perf("ib_read_lat", "without -R, -e -n 1000 -s 64", LO, &[], Expected::one(64, 1000)),
        perf("ib_send_bw", "without -R, -e -n 1000 -s 4096", LO_AND_VETH, &[], Expected::one(4096, 1000)),
        perf("ib_send_bw", "without -R, -q 64 -n 50 -s 4096", LO_AND_VETH, &[], Expected::one(4096, 3200)),
        perf("ib_write_bw", "without -R, -q 64 -n 50 -s 4096", LO_AND_VETH, &[], Expected::one(4096, 3200)),
        perf("ib_read_bw", "without -R, -q 64 -n 50 -s 4096", LO_AND_VETH, &[], Expected::one(4096, 3200)),
        perf(
            "ib_send_bw",
            "without -R, --use-srq -q 4 -n 500 -s 4096",
            LO_AND_1500,
            &[],
            Expected::one(4096, 2000),
        ),
        perf("ib_write_bw", "without -R, -b -n 500", LO, &[], Expected::one(65536, 500)),
        perf("ib_write_lat", "without -R, -x 1 -n 1000 -s 64", V6, &[], Expected::one(64, 1000)),
        perf("ib_send_bw", "without -R, -x 1 -n 500 -s 4096", V6, &[], Expected::one(4096, 500)),
        perf(
            "ib_atomic_lat",
            "without -R, -A FETCH_AND_ADD -n 1000",
            LO_AND_1500,
            &[],
            Expected::one(8, 1000),
        ),
        perf(
            "ib_atomic_bw",
            "without -R, -A CMP_AND_SWAP -q 4 -n 500",
            LO_AND_1500,
            &[],
            Expected::one(8, 2000),
        ),
        Case {
            checked: as_iwarp,
            ..perf(
                "ib_write_lat",
                "without -R, -n 1000 -s 64, as iWARP",
                LO,
                AS_IWARP,
                Expected::one(64, 1000),
            )
        },
        Case {
            program: "ib_send_bw",
            manner: "without -R, -n 2000 -s 4096",
            checked: "as iWARP: one result, every iteration counted. Perftest 4.5 does not deregister its \
                      credits' memory, so it prints an error when it ends",
            at: LO,
            run: Custom(send_bw_as_iwarp),
        },
        Case {
            checked: as_ib,
            ..perf("ib_read_bw", "without -R, -n 500", LO, AS_IB, Expected::one(65536, 500))
        },
    ]
}

fn others() -> Vec<Case> {
    let dapl = |program, manner, run| Case { program, manner, checked: DAPL, at: VETH_1500, run };
    vec![
        // qperf names peers by LID only.
        Case {
            program: "qperf",
            manner: "RC without -cm1, as InfiniBand",
            checked: "a figure for each test",
            at: LO,
            run: Custom(|w, p| w.qperf_with("", AS_IB, &QPERF, p)),
        },
        dapl(
            "dtest",
            "libdaploscm, -b 65536 -B 50 -c",
            Custom(|w, p| w.dtest_by_number("dtest", "-b 65536 -B 50 -c", "DAPL Test Complete. PASSED", p)),
        ),
        dapl(
            "dtestcm",
            "libdaploscm, -c 100",
            Custom(|w, p| w.dtest_by_number("dtestcm", "-c 100", "TOTAL:", p)),
        ),
    ]
}

/// Its server never requests RTS, and yet posts its credits where the device is an iWARP adapter. At the end
/// both programs want to deallocate the domain that the credits' region is still in, and say "Couldn't
/// destroy all SEND resources".
fn send_bw_as_iwarp(world: &World, place: Place<'_>) -> Outcome {
    let port = free_port();
    let line = format!("ib_send_bw -F -p {port} -n 2000 -s 4096");
    let server = world.over_uwarp(&line, place.server)?.envs(AS_IWARP);
    let client = world.over_uwarp(&line, place.client)?.envs(AS_IWARP).arg(place.address);
    let ends = pair::run_any(&server, &client, port)?;
    let row = |line: &str| line.split_whitespace().take(2).eq(["4096", "2000"]);
    if !ends.client.stdout.lines().any(row) || ends.server.text().contains("credit") {
        return ends.failure("no row, or a complaint about credits");
    }
    Ok(())
}

/// Where the server's socket is: these programs exchange numbers over IPv4, whatever their GIDs are.
pub fn exchange(place: Place<'_>) -> &'static str {
    if place.server.is_some() { Veth::SERVER4 } else { place.address }
}

fn link_local(world: &World, place: Place<'_>) -> Outcome {
    for ns in [place.server, place.client].into_iter().flatten() {
        ns.settled()?;
    }
    world.pingpong("ibv_rc_pingpong -g 2", &[], place)
}

impl World {
    /// This line at both ends.
    pub fn pingpong(&self, line: &str, env: Env, place: Place<'_>) -> Outcome {
        let port = free_port();
        let line = format!("{line} -p {port}");
        let server = self.over_uwarp(&line, place.server)?.envs(env);
        let client = self.over_uwarp(&line, place.client)?.envs(env).arg(exchange(place));
        let ends = pair::run(&server, &client, port)?;
        let mut words = line.split(' ').skip_while(|word| *word != "-n");
        let rounds = format!("{} iters in ", words.nth(1).unwrap_or("1000"));
        for out in [&ends.server, &ends.client] {
            check::no_complaints(out)?;
            // With -c a wrong byte is a line of output, and nothing else happens.
            let says = |what: &str| out.stdout.lines().any(|line| line.contains(what));
            if !says(" bytes in ") || !says(&rounds) || out.text().contains("invalid data") {
                return ends.failure("not every message came");
            }
        }
        Ok(())
    }

    /// Both ends of a perftest without `-R`.
    pub fn perftest_by_number(
        &self,
        tool: &str,
        args: &str,
        env: Env,
        expected: &Expected,
        place: Place<'_>,
    ) -> Outcome {
        self.perftest_to(exchange(place), tool, args, env, expected, place)
    }
}
