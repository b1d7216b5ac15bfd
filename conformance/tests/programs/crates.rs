//! Examples of Rust crates, which `make programs` builds from their packages, each with the lock file in it.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use uwarp_conformance::netns::NetNs;
use uwarp_conformance::pair::{self, Ends};
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Outcome, check, require};

use super::Run::Long;
use super::{Case, LONG, World};

const LO: &[Topology] = &[Loopback4];
const LO_AND_1500: &[Topology] = &[Loopback4, Veth1500V4];

/// A crate, its version, and its examples.
type Crate = (&'static str, &'static str, &'static [&'static str]);
const IBVERBS: Crate = ("ibverbs", "0.9.2", &["loopback"]);
const SIDEWAY: Crate = ("sideway", "0.4.3", &["rc_pingpong", "rc_pingpong_split", "cmtime", "ibv_devinfo"]);
const ASYNC: Crate = ("async-rdma", "0.5.0", &["devices", "rpc"]);
const MUMMY: Crate = ("rdma-mummy-sys", "0.2.6", &["server", "client"]);

const PINGS: &str = "every message at both ends";
const CONNECTIONS: &str = "every connection is made, a figure for each step";
const TALK: &str = "the message of the other end at both ends, and `end`";
const RPC: &str = "one call by Sends and one by Writes and Reads, each with its answer";

/// All rows.
pub fn cases() -> Vec<Case> {
    let case = |program, manner, checked, at, run| Case { program, manner, checked, at, run: Long(run) };
    vec![
        case("crate ibverbs", "0.9.2, loopback", "`received` and `sent`", LO_AND_1500, |w, p| w.loopback(p)),
        case("crate sideway", "0.4.3, ibv_devinfo", "uwarp0, its port active", LO, |w, p| w.crate_devinfo(p)),
        case("crate sideway", "0.4.3, rc_pingpong", PINGS, LO_AND_1500, |w, p| {
            w.crate_pingpong("rc_pingpong", "-n 1000", p)
        }),
        case("crate sideway", "0.4.3, rc_pingpong -t", PINGS, LO, |w, p| {
            w.crate_pingpong("rc_pingpong", "-n 1000 -t", p)
        }),
        case("crate sideway", "0.4.3, rc_pingpong_split", PINGS, LO_AND_1500, |w, p| {
            w.crate_pingpong("rc_pingpong_split", "-n 1000 -s 65536 -m 4096", p)
        }),
        case("crate sideway", "0.4.3, cmtime", CONNECTIONS, LO_AND_1500, |w, p| w.crate_cmtime("", p)),
        case("crate sideway", "0.4.3, cmtime -q", CONNECTIONS, LO_AND_1500, |w, p| w.crate_cmtime("-q", p)),
        case("crate rdma-mummy-sys", "0.2.6, server and client", TALK, LO_AND_1500, |w, p| w.talk(p)),
        case("crate async-rdma", "0.5.0, devices", "uwarp0 with its GUID", LO, |w, p| w.async_devices(p)),
        // Its port is always the same one: in a namespace.
        case("crate async-rdma", "0.5.0, rpc", RPC, &[Veth1500V4], |w, p| w.rpc(p)),
    ]
}

/// The example of a crate, built if it has not been.
fn example((name, version, examples): Crate, example: &str) -> Outcome<PathBuf> {
    static BUILDS: Mutex<()> = Mutex::new(());
    let _one_at_a_time = BUILDS.lock().unwrap_or_else(|e| e.into_inner());
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("crates");
    let root = home.join(format!("{name}-{version}"));
    let program = root.join("bin").join(example);
    if !program.exists() {
        // A few minutes for each crate, on a machine with nothing else to do.
        let install = format!("cargo install {name} --version {version} --locked --debug --no-track");
        let cmd = examples.iter().fold(Cmd::line(&install), |cmd, name| cmd.arg("--example").arg(name));
        let cmd = cmd.arg("--root").arg(&root).env("CARGO_TARGET_DIR", home.join("build"));
        cmd.limit(Duration::from_secs(3600)).run_ok()?;
    }
    Ok(program)
}

impl World {
    fn crate_example(&self, of: Crate, name: &str, args: &str, ns: Option<&NetNs>) -> Outcome<Cmd> {
        let program = example(of, name)?;
        Ok(self.over_uwarp(&format!("{} {args}", program.display()), ns)?.limit(LONG))
    }

    fn loopback(&self, place: Place<'_>) -> Outcome {
        let out = self.crate_example(IBVERBS, "loopback", "", place.client)?.run_ok()?;
        let mut lines: Vec<&str> = out.stdout.lines().collect();
        lines.sort_unstable();
        require!(lines == ["received", "sent"], "not both\n{}", out.text());
        Ok(())
    }

    fn crate_devinfo(&self, place: Place<'_>) -> Outcome {
        let out = self.crate_example(SIDEWAY, "ibv_devinfo", "", place.client)?.run_ok()?;
        check::has(&out, "uwarp0")?;
        check::has(&out, "Active (4)")
    }

    /// Both exchange numbers and GIDs over IPv4, and then 1,000 messages.
    fn crate_pingpong(&self, name: &str, args: &str, place: Place<'_>) -> Outcome {
        let port = free_port();
        let args = format!("-g 0 -p {port} {args}");
        let server = self.crate_example(SIDEWAY, name, &args, place.server)?;
        let client = self.crate_example(SIDEWAY, name, &args, place.client)?.arg(place.address);
        let ends = pair::run(&server, &client, port)?;
        for out in [&ends.server, &ends.client] {
            check::no_complaints(out)?;
            if !out.stdout.contains("1000 iters in ") {
                return ends.failure("not every message came");
            }
        }
        Ok(())
    }

    fn crate_cmtime(&self, args: &str, place: Place<'_>) -> Outcome {
        let port = free_port();
        let end = |which: &str, ns| {
            let args = format!("-{which} {} -p {port} -c 200 {args}", place.address);
            self.crate_example(SIDEWAY, "cmtime", &args, ns)
        };
        let server = pair::serve(&end("b", place.server)?, port)?;
        let client = end("s", place.client)?.run();
        // Some versions end with their client, others never.
        let ends = Ends { client: client?, server: server.stop() };
        let steps = ["CreateId", "ResolveAddr", "ResolveRoute", "CreateQueuePair", "Connect", "Disconnect"];
        let figure = |step: &&str| {
            let row = ends.client.stdout.lines().find(|line| line.trim_start().starts_with(*step));
            let total = row.and_then(|row| row.split('|').nth(1)?.trim().parse::<f64>().ok());
            total.is_some_and(|total| total > 0.0)
        };
        if !ends.client.ok() || !steps.iter().all(figure) {
            return ends.failure("not a figure for each step");
        }
        Ok(())
    }

    fn talk(&self, place: Place<'_>) -> Outcome {
        // Its server knows no other.
        const PORT: u16 = 7471;
        let server = self.crate_example(MUMMY, "server", "", place.server)?;
        let client =
            self.crate_example(MUMMY, "client", &format!("{} {PORT}", place.address), place.client)?;
        let ends = pair::run(&server, &client, PORT)?;
        for (out, name) in [(&ends.server, "rdma_server"), (&ends.client, "rdma_client")] {
            let sent = format!("{name}: recv msg : {:?}", [1; 16]);
            let all = [sent, format!("{name}: end")].iter().all(|line| out.stdout.lines().any(|l| l == line));
            if !all {
                return ends.failure(format_args!("{name} has not got its message"));
            }
        }
        Ok(())
    }

    fn async_devices(&self, place: Place<'_>) -> Outcome {
        let out = self.crate_example(ASYNC, "devices", "", place.client)?.run_ok()?;
        check::has(&out, " uwarp0 ")
    }

    fn rpc(&self, place: Place<'_>) -> Outcome {
        let out = self.crate_example(ASYNC, "rpc", "", place.server)?.run_ok()?;
        for word in ["hello", "world"] {
            check::has(&out, &format!("request: {word}\nresponse: {word}\n"))?;
        }
        Ok(())
    }
}
