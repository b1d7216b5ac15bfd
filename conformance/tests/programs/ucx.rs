//! UCX over the device's files: its tools, and `c/ucx.c`, which verifies what libucp carries.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use uwarp_conformance::check;
use uwarp_conformance::netns::{NetNs, Veth};
use uwarp_conformance::pair::{self, Ends};
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Context, Outcome, cc, require};

use super::Run::Custom;
use super::{AS_IB, CRC_OFF, Case, Env, Scratch, World};

/// For programs that a busy machine slows down.
const LONG: Duration = Duration::from_secs(300);

const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4];
const VETH6: &[Topology] = &[Veth1500V6];

/// UCX's ways over the device. It connects RC queue pairs by messages over UD.
const RC: Env = &[("UCX_TLS", "rc_verbs,ud_verbs:aux,self")];
const UD: Env = &[("UCX_TLS", "ud_verbs,self")];

const GID_1: Env = &[("UCX_IB_GID_INDEX", "1")];

const FIGURES: &str = "each test runs to its end, a figure for each, no error at either end";
const BYTES: &str = "tag, stream, active message, Put, Get, atomics, both ways; every byte";
const HANDLER: &str = "the peer is killed: error handler called, requests fail, the endpoint closes";

/// Of libucp, by name and arguments. An option without a value must not be a line's last: ucx_perftest 1.13
/// begins the next line with a `getopt` that is still inside of it.
const UCP: [(&str, &str); 26] = [
    // Left out over UD: each message passes through three threads at each end (ours, UCX's own, which takes
    // the event, the program's), and on a busy machine runs stall. Traces show no lost datagram and no lost
    // wake-up, but threads that were woken and did not run for 20 to 50 ms. UCX's authors have seen UD hang
    // in this mode, too (openucx/ucx, pull request 6224).
    ("tag_lat", "-E sleep"),
    ("tag_lat", ""),
    ("tag_lat", "-e -s 3000"),
    ("tag_lat", "-C -s 0"),
    ("tag_lat", "-U -s 8"),
    ("tag_bw", ""),
    ("tag_bw", "-s 100000"),
    ("tag_bw", "-s 30000,10,5000 -D iov"),
    ("tag_sync_lat", ""),
    ("tag_sync_bw", "-s 1000"),
    ("stream_lat", "-s 500"),
    ("stream_lat", "-r recv_data"),
    ("stream_bw", "-s 20000"),
    ("ucp_am_lat", "-H 32"),
    ("ucp_am_lat", "-s 9000"),
    ("ucp_am_bw", "-s 100000 -H 64"),
    ("ucp_put_lat", ""),
    ("ucp_put_bw", "-s 100000"),
    ("ucp_get", ""),
    ("ucp_get", "-s 50000"),
    ("ucp_add", ""),
    ("ucp_fadd", ""),
    ("ucp_fadd", "-s 4"),
    ("ucp_swap", ""),
    ("ucp_cswap", ""),
    ("ucp_cswap", "-s 4"),
];

/// Of libuct over RC: one transport by itself.
const UCT_RC: [(&str, &str); 12] = [
    ("am_lat", ""),
    ("am_lat", "-D bcopy -s 8000"),
    ("am_bw", "-D zcopy -s 8000"),
    ("put_lat", ""),
    ("put_bw", "-D bcopy -s 8000"),
    ("put_bw", "-D zcopy -s 100000"),
    ("get", "-D bcopy -s 8000"),
    ("get", "-D zcopy -s 100000"),
    ("add_mr", ""),
    ("fadd", ""),
    ("cswap", ""),
    ("am_lat", "-A thread_mutex"),
];

/// And over UD.
const UCT_UD: [(&str, &str); 4] =
    [("am_lat", ""), ("am_lat", "-D bcopy -s 1000"), ("am_bw", "-D zcopy -s 1000"), ("am_bw", "-s 32")];

const TWO_DEVICES: Env = &[("UWARP_DEVICES", "per-interface"), ("UCX_NET_DEVICES", "uwarp0:1,uwarp1:1")];
const TWO: &str = "of 100 MB, at least 30 % on each device by `uwarp stat`; then every message to the end";

/// All rows.
pub fn cases() -> Vec<Case> {
    [tools(), data(), faults(), vec![two_devices()]].into_iter().flatten().collect()
}

fn two_devices() -> Case {
    Case {
        program: "ucx_perftest",
        manner: "tag_bw -s 1000000, UCX_NET_DEVICES=uwarp0:1,uwarp1:1",
        checked: TWO,
        at: &[Veth1500V4],
        run: Custom(|w, _| w.ucx_two_devices()),
    }
}

fn tools() -> Vec<Case> {
    let case = |program, manner, checked, run| Case { program, manner, checked, at: LO_AND_VETH, run };
    vec![
        case("ucx_info", "-d", "rc_verbs and ud_verbs of uwarp0:1", Custom(|w, p| w.ucx_info(p))),
        case("ucx_perftest", "UCP, rc_verbs", FIGURES, Custom(|w, p| w.ucx_perftest(&UCP, "", RC, p))),
        case("ucx_perftest", "UCP, ud_verbs", FIGURES, Custom(|w, p| w.ucx_perftest(&UCP[1..], "", UD, p))),
        case(
            "ucx_perftest",
            "-x rc_verbs -d uwarp0:1",
            FIGURES,
            Custom(|w, p| w.ucx_perftest(&UCT_RC, "-x rc_verbs -d uwarp0:1", &[], p)),
        ),
        case(
            "ucx_perftest",
            "-x ud_verbs -d uwarp0:1",
            FIGURES,
            Custom(|w, p| w.ucx_perftest(&UCT_UD, "-x ud_verbs -d uwarp0:1", &[], p)),
        ),
    ]
}

fn data() -> Vec<Case> {
    let case = |manner, at, run| Case { program: "libucp", manner, checked: BYTES, at, run };
    vec![
        case("c/ucx.c, rc_verbs", LO_AND_VETH, Custom(|w, p| w.ucx("address", &[RC], p))),
        case("c/ucx.c, ud_verbs", LO_AND_VETH, Custom(|w, p| w.ucx("address", &[UD], p))),
        case(
            "c/ucx.c, rc_verbs, UWARP_CRC=off",
            LO_AND_VETH,
            Custom(|w, p| w.ucx("address", &[RC, CRC_OFF], p)),
        ),
        case(
            "c/ucx.c, rc_verbs, as InfiniBand",
            LO_AND_VETH,
            Custom(|w, p| w.ucx("address", &[RC, AS_IB], p)),
        ),
        case(
            "c/ucx.c, ud_verbs, as InfiniBand",
            LO_AND_VETH,
            Custom(|w, p| w.ucx("address", &[UD, AS_IB], p)),
        ),
        case("c/ucx.c, rc_verbs, rdma_cm", LO_AND_VETH, Custom(|w, p| w.ucx("listener", &[RC], p))),
        case("c/ucx.c, ud_verbs, rdma_cm", LO_AND_VETH, Custom(|w, p| w.ucx("listener", &[UD], p))),
        // By itself, UCX compares with the first GID, of IPv4.
        case("c/ucx.c, rc_verbs, rdma_cm, IPv6", VETH6, Custom(|w, p| w.ucx("listener", &[RC, GID_1], p))),
        case("c/ucx.c, ud_verbs, rdma_cm, IPv6", VETH6, Custom(|w, p| w.ucx("listener", &[UD, GID_1], p))),
    ]
}

fn faults() -> Vec<Case> {
    let case = |manner, run| Case {
        program: "libucp",
        manner,
        checked: HANDLER,
        at: &[Loopback4],
        run: Custom(run),
    };
    vec![
        case("c/ucx.c, rc_verbs, killed while it receives", |w, p| w.ucx_killed("sending", RC, p)),
        case("c/ucx.c, rc_verbs, killed while nothing is sent", |w, p| w.ucx_killed("waiting", RC, p)),
        case("c/ucx.c, rc_verbs, killed before it reads", |w, p| w.ucx_killed("reading", RC, p)),
        case("c/ucx.c, ud_verbs, killed while it receives", |w, p| w.ucx_killed("sending", UD, p)),
        case("c/ucx.c, ud_verbs, killed while nothing is sent", |w, p| w.ucx_killed("waiting", UD, p)),
        case("c/ucx.c, ud_verbs, killed before it reads", |w, p| w.ucx_killed("reading", UD, p)),
    ]
}

impl World {
    /// A program under `uwarp run --files on`, whose files are in this directory.
    fn with_files(&self, line: &str, ns: Option<&NetNs>, home: &Scratch) -> Outcome<Cmd> {
        let front = [
            self.dist()?.uwarp()?.into_os_string(),
            "run".into(),
            "--files".into(),
            "on".into(),
            "--".into(),
        ];
        let cmd = Cmd::line(line).behind(front).unset("LD_LIBRARY_PATH").in_ns(ns);
        Ok(cmd.env("XDG_RUNTIME_DIR", home.path()).limit(LONG))
    }

    fn ucx_info(&self, place: Place<'_>) -> Outcome {
        let home = Scratch::new("ucx")?;
        let out = self.with_files("ucx_info -d", place.client, &home)?.run_ok()?;
        check::has(&out, "Memory domain: uwarp0")?;
        check::has(&out, "Connection manager: rdmacm")?;
        for transport in ["rc_verbs", "ud_verbs"] {
            let mut lines = out.stdout.lines().map(|line| line.trim_start_matches(['#', ' ']));
            let found = lines.any(|line| line == format!("Transport: {transport}"))
                && lines.next() == Some("Device: uwarp0:1");
            require!(found, "{transport} is not there for uwarp0:1\n{}", out.text());
        }
        // Standard output speaks of error handling.
        require!(out.stderr.is_empty(), "complains\n{}", out.text());
        Ok(())
    }

    /// All tests in one run of both ends, as the programs read them from a file.
    fn ucx_perftest(&self, tests: &[(&str, &str)], args: &str, env: Env, place: Place<'_>) -> Outcome {
        let (home, port) = (Scratch::new("ucx")?, free_port());
        let rounds = 50;
        let batch = home.path().join("tests");
        let mut lines = String::new();
        for (number, (test, more)) in tests.iter().enumerate() {
            lines += &format!("{number}:{test} -t {test} -n {rounds} -w 5 {args} {more}\n");
        }
        std::fs::write(&batch, lines).context(batch.display())?;
        let v6 = if place.address.contains(':') { "-6" } else { "" };
        let line = format!("ucx_perftest -p {port} {v6} -f -v -b {}", batch.display());
        let server = self.with_files(&line, place.server, &home)?.envs(env);
        let client = self.with_files(&line, place.client, &home)?.envs(env).arg(place.address);
        let ends = pair::run(&server, &client, port)?;
        check::no_complaints(&ends.server)?;
        check::no_complaints(&ends.client)?;
        for (number, (test, more)) in tests.iter().enumerate() {
            // "0:tag_lat,  50,22.6,…": name, iterations, figures. A test that fails has no line.
            let wanted = [format!("{number}:{test}"), rounds.to_string()];
            let found =
                ends.client.stdout.lines().any(|line| line.split(',').map(str::trim).take(2).eq(&wanted));
            if !found {
                return ends.failure(format_args!("no figures of {test} {more}"));
            }
        }
        Ok(())
    }

    /// Two namespaces joined by two networks, with a device for each.
    fn ucx_two_devices(&self) -> Outcome {
        const ENOUGH: u64 = 100_000_000;
        let (veth, home, port) = (Veth::twice(1500)?, Scratch::new("ucx")?, free_port());
        // More than enough: the last look at them is before their end.
        let line = format!("ucx_perftest -p {port} -f -t tag_bw -w 5 -n 5000 -s 1000000");
        let end = |ns| Ok(self.with_files(&line, Some(ns), &home)?.envs(RC).envs(TWO_DEVICES));
        let server = pair::serve(&end(&veth.server)?, port)?;
        let client = end(&veth.client)?.arg(Veth::SERVER4).spawn()?;
        let stat = Cmd::new(self.dist()?.uwarp()?).args("stat --json").in_ns(Some(&veth.client));
        let mut sent = [0; 2];
        client.until(LONG, "sending", |_| {
            if let Ok(out) = stat.run_ok() {
                sent = [Veth::CLIENT4, Veth::SECOND_CLIENT4].map(|own| bytes_from(own, &out.stdout));
            }
            sent.iter().sum::<u64>() > ENOUGH
        })?;
        let ends = Ends { client: client.wait()?, server: server.wait()? };
        ends.exited_ok()?;
        let all: u64 = sent.iter().sum();
        if sent.iter().any(|one| one * 10 < all * 3) {
            return ends.failure(format_args!("of {all} bytes, the devices sent {sent:?}"));
        }
        Ok(())
    }

    fn ucx_ends(&self, how: &str, fault: &str, env: &[Env], place: Place<'_>) -> Outcome<Ends> {
        let (home, port) = (Scratch::new("ucx")?, free_port());
        let program = cc::build_with("ucx", home.path(), "-lucp -lucs")?;
        let end = |role: &str, ns| -> Outcome<Cmd> {
            let line = format!("{} {role} {} {port} {how} {fault}", program.display(), place.address);
            // An endpoint's close ends with "Endpoint timeout" once in some thousand runs, cause not known.
            let cmd = self.with_files(&line, ns, &home)?.logs("info,uwarp_cm=debug,uwarp_rnic=debug");
            Ok(env.iter().fold(cmd, |cmd, variables| cmd.envs(variables)))
        };
        pair::run_any(&end("server", place.server)?, &end("client", place.client)?, port)
    }

    fn ucx(&self, how: &str, env: &[Env], place: Place<'_>) -> Outcome {
        let rdma_cm: Env = &[("UCX_SOCKADDR_TLS_PRIORITY", "rdmacm")];
        let env: Vec<Env> = env.iter().copied().chain([rdma_cm]).collect();
        let ends = self.ucx_ends(how, "", &env, place)?;
        ends.exited_ok()?;
        for out in [&ends.server, &ends.client] {
            check::statements(out)?;
            check::has(out, "ok the endpoint closes")?;
        }
        Ok(())
    }

    /// UCX looks once a second after an idle peer, not every 20, and waits 5 seconds, not 300, for an answer
    /// over UD.
    fn ucx_killed(&self, fault: &str, env: Env, place: Place<'_>) -> Outcome {
        let soon: Env = &[("UCX_KEEPALIVE_INTERVAL", "1s"), ("UCX_UD_TIMEOUT", "5s")];
        let ends = self.ucx_ends("address", fault, &[env, soon], place)?;
        let killed = ends.server.status.and_then(|status| status.signal()) == Some(Signal::KILL.as_raw());
        if !killed {
            return ends.failure("the server was not killed");
        }
        check::statements(&ends.client)?;
        check::has(&ends.client, "ok the endpoint closes")
    }
}

/// What connected queue pairs with this local address have sent, from `uwarp stat --json`.
fn bytes_from(local: &str, said: &str) -> u64 {
    let said: Value = serde_json::from_str(said).unwrap_or_default();
    let processes = said["processes"].as_array().into_iter().flatten();
    let pairs = processes.flat_map(|process| process["queue_pairs"].as_array().into_iter().flatten());
    let here =
        pairs.filter(|pair| pair["local"].as_str().is_some_and(|at| at.split(':').next() == Some(local)));
    let kinds = here.flat_map(|pair| pair["sent"].as_object().into_iter().flat_map(|kinds| kinds.values()));
    kinds.filter_map(|kind| kind["bytes"].as_u64()).sum()
}
