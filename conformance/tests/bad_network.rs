//! What becomes of a connection when its network or its peer has a bad day: `c/traffic.c`, two processes that
//! check every byte, in two namespaces whose wire is cut, made lossy or narrow; or whose programs are stopped
//! and killed. And of messages in parts, which nobody sends again (`c/parted.c`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use rustix::process::Signal;
use serde_json::Value;
use uwarp_bottleneck::Shape;
use uwarp_conformance::attacker::parted::{Parted, joined};
use uwarp_conformance::check;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::{Far, NetNs, Veth, listens};
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::{Context, Failure, Outcome, cc, fail, require};

const PORT: u16 = 7471;
/// Bounds a program that hangs.
const LIMIT: Duration = Duration::from_secs(400);
/// Bounds a wait. A link that was down for a while comes back with TCP's next attempt.
const PATIENCE: Duration = Duration::from_secs(120);

type Case = (&'static str, fn() -> Outcome);

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Mostly waiting, each in its own network.
    args.test_threads = Some(args.test_threads.unwrap_or(4));
    let cases: [Case; 14] = [
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
        ("undisturbed_traffic_is_whole", undisturbed),
        ("messages_in_parts_come_whole_through_a_bad_path", parts_lost_and_late),
        ("messages_in_parts_pass_where_the_path_is_shorter_than_the_interfaces", parts_that_are_too_long),
    ];
    let trials = cases.map(|(name, case)| Trial::test(name, move || Ok(case()?))).into();
    libtest_mimic::run(&args, trials).exit_code()
}

/// A server and a client that talk over a wire of their own.
struct Traffic {
    server: Running,
    client: Running,
    /// The client goes on until this file exists.
    end: EndFile,
    // Last: removed when nothing runs there any more.
    wire: Veth,
}

/// The name of a file that does not exist yet, and no longer exists when it is dropped.
struct EndFile(PathBuf);

impl EndFile {
    fn new() -> EndFile {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("traffic-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        EndFile(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
    }
}

impl Drop for EndFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Traffic {
    /// Starts them, and returns when bytes flow.
    fn start(mode: &str) -> Outcome<Traffic> {
        static PROGRAM: OnceLock<Outcome<PathBuf>> = OnceLock::new();
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
        server.until(PATIENCE, "listening", |r| listens(r.pid(), r.ns(), PORT))?;
        let end = EndFile::new();
        let client = start(&wire.client, &format!("client {address} {PORT} {} {mode}", end.0.display()))?;
        let traffic = Traffic { server, client, end, wire };
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
        self.flows_for(1)
    }

    /// Waits until so many more do. (The client counts them by sixteens.)
    fn flows_for(&self, messages: u64) -> Outcome {
        let enough = self.count() + messages;
        self.client.until(PATIENCE, "receiving more", |_| self.count() >= enough)
    }

    /// Waits until none came back for a second.
    fn stands(&self) -> Outcome {
        let (start, mut last, mut before) = (Instant::now(), Instant::now(), self.count());
        while last.elapsed() < Duration::from_secs(1) {
            if start.elapsed() > PATIENCE {
                fail!("messages still come back\n{}", self.client.so_far())
            }
            std::thread::sleep(Duration::from_millis(20));
            let now = self.count();
            if now != before {
                (last, before) = (Instant::now(), now);
            }
        }
        Ok(())
    }

    /// Has the client post no more.
    fn end(&self) -> Outcome {
        std::fs::write(&self.end.0, "").context(self.end.0.display())
    }

    /// The client posts no more, and both ends end without an error.
    fn whole(self) -> Outcome {
        self.end()?;
        self.ends_well()
    }

    /// Both ends end by themselves, and all that they check is right.
    fn ends_well(self) -> Outcome {
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
    let traffic = Traffic::start("broken")?;
    cut(&traffic.wire.server)?;
    cut(&traffic.wire.client)?;
    traffic.ends_well()
}

fn cut_while_quiet() -> Outcome {
    let traffic = Traffic::start("quiet")?;
    traffic.end()?;
    traffic.client.until(PATIENCE, "quiet", |r| r.so_far().contains("quiet"))?;
    cut(&traffic.wire.server)?;
    cut(&traffic.wire.client)?;
    traffic.ends_well()
}

fn undisturbed() -> Outcome {
    let traffic = Traffic::start("whole")?;
    traffic.flows_for(1000)?;
    traffic.whole()
}

fn link_down() -> Outcome {
    let traffic = Traffic::start("whole")?;
    for place in [&traffic.wire.server, &traffic.wire.client] {
        place.ip(&format!("link set {} down", Veth::INTERFACE))?;
        traffic.stands()?;
        place.ip(&format!("link set {} up", Veth::INTERFACE))?;
        traffic.flows()?;
    }
    traffic.whole()
}

fn dropped() -> Outcome {
    let traffic = Traffic::start("whole")?;
    for place in [&traffic.wire.server, &traffic.wire.client] {
        cut(place)?;
        traffic.stands()?;
        mend(place)?;
        traffic.flows()?;
    }
    traffic.whole()
}

fn loss() -> Outcome {
    let traffic = Traffic::start("whole")?;
    for place in [&traffic.wire.server, &traffic.wire.client] {
        nft(place, "add table inet bad")?;
        nft(place, "add chain inet bad in { type filter hook input priority 0 ; }")?;
        nft(place, "add rule inet bad in numgen random mod 100 < 1 drop")?;
    }
    traffic.flows_for(300)?;
    // And the counters show it.
    for (end, place) in [(&traffic.client, &traffic.wire.client), (&traffic.server, &traffic.wire.server)] {
        let mut seen = Ok(0);
        let counted = end.until(PATIENCE, "sending segments again", |_| {
            seen = retransmits(place);
            !matches!(seen, Ok(0))
        });
        seen?;
        counted?;
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
    let traffic = Traffic::start("whole")?;
    for mtu in [1500, 600, 9000, 1500] {
        for place in [&traffic.wire.server, &traffic.wire.client] {
            place.ip(&format!("link set {} mtu {mtu}", Veth::INTERFACE))?;
        }
        traffic.flows_for(100)?;
    }
    traffic.whole()
}

fn stopped(server: bool) -> Outcome {
    let traffic = Traffic::start("whole")?;
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
    let traffic = Traffic::start("whole")?;
    traffic.server.signal(Signal::STOP)?;
    traffic.stands()?;
    std::thread::sleep(Duration::from_secs(50));
    traffic.server.signal(Signal::CONT)?;
    traffic.flows()?;
    traffic.whole()
}

fn killed(server: bool) -> Outcome {
    let Traffic { server: one, client: other, end: _end, wire: _wire } = Traffic::start("broken")?;
    let (victim, survivor) = if server { (one, other) } else { (other, one) };
    victim.signal(Signal::KILL)?;
    check::statements(&survivor.wait()?)
}

/// Nothing is lost on it, and no packet takes longer than this.
const NEAR: Shape = Shape {
    rate: None,
    queue: 0,
    delay: Duration::from_millis(1),
    loss: 0,
    late: 0,
    lateness: Duration::from_millis(3),
    twice: 0,
    longest: None,
};

/// Two programs with datagrams at the ends of a path: who receives, and who sends.
fn parted(far: &Far) -> Outcome<[Parted; 2]> {
    static PROGRAM: OnceLock<Outcome<PathBuf>> = OnceLock::new();
    let build = || cc::build("parted", &Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-parted"));
    let (program, dist) = (PROGRAM.get_or_init(build).clone()?, Dist::find()?);
    let start = |ns: &NetNs, address: &str| Parted::start(&program, &dist, ns, address, 20_000);
    Ok([start(&far.server, Veth::SERVER4)?, start(&far.client, Veth::CLIENT4)?])
}

/// Of 100 messages of three parts each, with 1 in 20 packets lost and 1 in 20 late, most come at the first
/// time, none comes changed, and none goes in fragments of IP.
fn parts_lost_and_late() -> Outcome {
    let far = Far::new(1500, NEAR)?;
    let [mut receiver, mut sender] = parted(&far)?;
    sender.learns(&mut receiver, &far.server)?;
    let before = joined(&far.server)?;
    far.path.reshape([Shape { loss: 50, late: 50, twice: 20, ..NEAR }; 2]);
    let mut tries = 0;
    for seed in 1000..1100 {
        tries += sender.reaches(&mut receiver, seed)?;
    }
    // One in seven is lost.
    require!((101..200).contains(&tries), "{tries} tries for 100 messages");
    let [there, _] = far.path.counts();
    require!(there.lost > 0 && there.late > 0, "a good path: {there:?}");
    let fragments = joined(&far.server)? - before;
    require!(fragments == 0, "{fragments} messages came in fragments");
    Ok(())
}

/// The interfaces take 9,000 bytes and the path 1,500, and nobody says so: what is longer is lost until the
/// sender has found that shorter parts pass.
fn parts_that_are_too_long() -> Outcome {
    let far = Far::new(9000, Shape { longest: Some(1500), ..NEAR })?;
    let [mut receiver, mut sender] = parted(&far)?;
    sender.reaches(&mut receiver, 1)?;
    let [there, _] = far.path.counts();
    require!(there.too_long > 0, "nothing was too long: {there:?}");
    for seed in 2..20 {
        let tries = sender.reaches(&mut receiver, seed)?;
        // A second one is sent where the receiver gets no processor for as long as a try has.
        require!(tries <= 2, "{tries} tries once it is known what passes");
    }
    require!(far.path.counts()[0].too_long == there.too_long, "longer packets were sent again");
    require!(joined(&far.server)? == 0, "a message came in fragments");
    Ok(())
}
