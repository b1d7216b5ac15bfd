//! What becomes of a connection when its network or its peer has a bad day: `c/traffic.c`, two processes that
//! check every byte, in two namespaces whose wire is cut, made lossy or narrow; or whose programs are stopped
//! and killed.

use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use rustix::process::Signal;
use serde_json::Value;
use uwarp_conformance::check;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::{NetNs, Veth, listens};
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::{Context, Failure, Outcome, cc, fail};

const PORT: u16 = 7471;
/// Nothing takes as long, on any machine.
const LIMIT: Duration = Duration::from_secs(150);

type Case = (&'static str, fn() -> Outcome);

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Mostly waiting, each in its own network.
    args.test_threads = Some(args.test_threads.unwrap_or(4));
    let cases: [Case; 12] = [
        ("a_network_that_is_cut_for_good_ends_both_ends", cut_for_good),
        ("a_quiet_connection_hears_of_a_cut_network", cut_while_quiet),
        ("a_link_that_comes_back_costs_nothing", link_down),
        ("packets_that_are_dropped_for_a_while_cost_nothing", dropped),
        ("one_percent_of_loss_costs_nothing", loss),
        ("a_path_that_becomes_narrow_and_wide_costs_nothing", mtu),
        ("a_server_that_is_stopped_goes_on", || stopped(true)),
        ("a_client_that_is_stopped_goes_on", || stopped(false)),
        ("a_server_that_is_stopped_longer_than_silence_may_last_goes_on", stopped_for_long),
        ("a_server_that_is_killed_is_missed", || killed(true)),
        ("a_client_that_is_killed_is_missed", || killed(false)),
        ("undisturbed_traffic_is_whole", || Traffic::start(3, "whole")?.whole()),
    ];
    let trials = cases.map(|(name, case)| Trial::test(name, move || Ok(case()?))).into();
    libtest_mimic::run(&args, trials).exit_code()
}

/// A server and a client that talk over a wire of their own.
struct Traffic {
    server: Running,
    client: Running,
    // Last: removed when nobody lives there any more.
    wire: Veth,
}

impl Traffic {
    /// Starts them, and returns when bytes flow. The client posts for `seconds`.
    fn start(seconds: u32, mode: &str) -> Outcome<Traffic> {
        static PROGRAM: OnceLock<Outcome<std::path::PathBuf>> = OnceLock::new();
        let build = || cc::build("traffic", &Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-traffic"));
        let program = PROGRAM.get_or_init(build).clone()?;
        let dist = Dist::find()?;
        let wire = Veth::new(9000)?;
        let start = |place: &NetNs, words: &str| {
            let cmd = Cmd::new(&program).args(words).env("LD_LIBRARY_PATH", dist.lib());
            cmd.in_ns(Some(place)).limit(LIMIT).spawn()
        };
        let address = Veth::SERVER4;
        let server = start(&wire.server, &format!("server {address} {PORT}"))?;
        server.until(Duration::from_secs(60), "listening", |r| listens(r.pid(), r.ns(), PORT))?;
        let client = start(&wire.client, &format!("client {address} {PORT} {seconds} {mode}"))?;
        let traffic = Traffic { server, client, wire };
        traffic.flows()?;
        Ok(traffic)
    }

    /// Messages that came back, so far.
    fn count(&self) -> u64 {
        let text = self.client.so_far();
        let last = text.lines().rev().find_map(|line| line.strip_prefix("flows ")?.parse().ok());
        last.unwrap_or(0)
    }

    /// Waits until more messages come back.
    fn flows(&self) -> Outcome {
        let before = self.count();
        self.client.until(Duration::from_secs(60), "receiving more", |_| self.count() > before)
    }

    /// Waits until none do.
    fn stands(&self) -> Outcome {
        for _ in 0..100 {
            let before = self.count();
            std::thread::sleep(Duration::from_millis(300));
            if self.count() == before {
                return Ok(());
            }
        }
        fail!("messages still come back\n{}", self.client.so_far())
    }

    /// Both ends come to their good end.
    fn whole(self) -> Outcome {
        check::statements(&self.client.wait()?)?;
        check::statements(&self.server.wait()?)
    }
}

/// Runs `nft ARGS` in one of the namespaces.
fn nft(place: &NetNs, args: &str) -> Outcome {
    Cmd::line(&format!("nft {args}")).in_ns(Some(place)).run_ok().map(drop)
}

/// Nothing arrives there any more.
fn cut(place: &NetNs) -> Outcome {
    nft(place, "add table inet bad")?;
    nft(place, "add chain inet bad in { type filter hook input priority 0 ; policy drop ; }")
}

fn mend(place: &NetNs) -> Outcome {
    nft(place, "delete table inet bad")
}

fn cut_for_good() -> Outcome {
    let traffic = Traffic::start(1000, "broken")?;
    cut(&traffic.wire.server)?;
    cut(&traffic.wire.client)?;
    traffic.whole()
}

fn cut_while_quiet() -> Outcome {
    let traffic = Traffic::start(2, "quiet")?;
    traffic.client.until(Duration::from_secs(60), "quiet", |r| r.so_far().contains("quiet"))?;
    cut(&traffic.wire.server)?;
    cut(&traffic.wire.client)?;
    traffic.whole()
}

fn link_down() -> Outcome {
    let traffic = Traffic::start(10, "whole")?;
    for place in [&traffic.wire.server, &traffic.wire.client] {
        place.ip(&format!("link set {} down", Veth::INTERFACE))?;
        traffic.stands()?;
        std::thread::sleep(Duration::from_secs(1));
        place.ip(&format!("link set {} up", Veth::INTERFACE))?;
        traffic.flows()?;
    }
    traffic.whole()
}

fn dropped() -> Outcome {
    let traffic = Traffic::start(10, "whole")?;
    for place in [&traffic.wire.server, &traffic.wire.client] {
        cut(place)?;
        traffic.stands()?;
        mend(place)?;
        traffic.flows()?;
    }
    traffic.whole()
}

fn loss() -> Outcome {
    let traffic = Traffic::start(8, "whole")?;
    for place in [&traffic.wire.server, &traffic.wire.client] {
        nft(place, "add table inet bad")?;
        nft(place, "add chain inet bad in { type filter hook input priority 0 ; }")?;
        nft(place, "add rule inet bad in numgen random mod 100 < 1 drop")?;
    }
    traffic.flows()?;
    // And it can be seen that there is one.
    for (end, place) in [(&traffic.client, &traffic.wire.client), (&traffic.server, &traffic.wire.server)] {
        let mut seen = Ok(0);
        let told = end.until(Duration::from_secs(30), "sending segments again", |_| {
            seen = retransmits(place);
            !matches!(seen, Ok(0))
        });
        seen?;
        told?;
    }
    traffic.whole()
}

/// What `uwarp stat` says that the one program there has had to send again.
fn retransmits(place: &NetNs) -> Outcome<u64> {
    let stat = Cmd::new(Dist::find()?.uwarp()?).args("stat --json").in_ns(Some(place)).run_ok()?;
    let document: Value = serde_json::from_str(&stat.stdout).context("JSON")?;
    let segments = &document["processes"][0]["totals"]["retransmits"];
    segments.as_u64().ok_or_else(|| Failure(format!("no number of retransmissions: {document}")))
}

fn mtu() -> Outcome {
    let traffic = Traffic::start(8, "whole")?;
    for mtu in [1500, 600, 9000, 1500] {
        for place in [&traffic.wire.server, &traffic.wire.client] {
            place.ip(&format!("link set {} mtu {mtu}", Veth::INTERFACE))?;
        }
        traffic.flows()?;
    }
    traffic.whole()
}

fn stopped(server: bool) -> Outcome {
    let traffic = Traffic::start(6, "whole")?;
    let who = if server { &traffic.server } else { &traffic.client };
    for _ in 0..2 {
        who.signal(Signal::STOP)?;
        traffic.stands()?;
        who.signal(Signal::CONT)?;
        traffic.flows()?;
    }
    traffic.whole()
}

/// Its system answers for it.
fn stopped_for_long() -> Outcome {
    let traffic = Traffic::start(70, "whole")?;
    traffic.server.signal(Signal::STOP)?;
    traffic.stands()?;
    std::thread::sleep(Duration::from_secs(50));
    traffic.server.signal(Signal::CONT)?;
    traffic.flows()?;
    traffic.whole()
}

fn killed(server: bool) -> Outcome {
    let Traffic { server: one, client: other, wire: _wire } = Traffic::start(1000, "broken")?;
    let (victim, survivor) = if server { (one, other) } else { (other, one) };
    victim.signal(Signal::KILL)?;
    check::statements(&survivor.wait()?)
}
