//! Queue pairs that are brought up by number, attacked by another user of the same host and from another
//! host. The attacker knows every address and number. Whatever it does, either the honest two are joined, as
//! uwarp, or the victim's work request ends with `RETRY_EXC_ERR`; and its message reaches nobody else.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uwarp_conformance::attacker::encode::{REJECT, Setup, Tagged};
use uwarp_conformance::attacker::named::{Named, Psns, RETRIES_EXCEEDED};
use uwarp_conformance::attacker::numbers::{
    Cookie, Introduction, cookie_reply, cookie_request, echo, halves, introduction1, reply, said,
};
use uwarp_conformance::attacker::peer::{PATIENCE, Peer};
use uwarp_conformance::attacker::stranger::{Port, Stranger, Tried};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::{Bridged, NetNs};
use uwarp_conformance::process::Cmd;
use uwarp_conformance::{Context, Outcome, fail, require};

/// The listening end's, the connecting end's, the attacker's.
pub const PORTS: [u16; 3] = [20_000, 20_001, 20_002];
/// The word that nobody else may read.
const SECRET: &str = "SECRET-0123456789";
/// What each end begins with. No half of one is another half.
const LISTENERS: u32 = 0xAB_C123;
const CONNECTORS: u32 = 0x45_6DEF;
/// For as long as it takes.
const ENDLESS: (u32, u32) = (0, 7);
/// `timeout` and `retry_cnt` of a program that wants to know: some seconds.
const LIMITED: (u32, u32) = (19, 2);

/// Where the attacker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Another user's process where both ends are.
    SameHost,
    /// A third host.
    OtherHost,
}

/// The hosts of one test.
pub enum Hosts {
    One(NetNs),
    Three(Bridged),
}

impl Hosts {
    pub fn of(place: Place) -> Outcome<Hosts> {
        Ok(match place {
            Place::SameHost => Hosts::One(NetNs::new()?),
            Place::OtherHost => Hosts::Three(Bridged::new()?),
        })
    }

    /// The listener's, the connector's, the attacker's.
    pub fn ends(&self) -> [(&str, &NetNs); 3] {
        match self {
            Hosts::One(ns) => [("127.0.0.1", ns); 3],
            Hosts::Three(bridged) => bridged.ends(),
        }
    }
}

/// Runs an attack from there.
pub fn run(attack: fn(&mut Stage<'_>) -> Outcome, place: Place, dist: &Dist, program: &Path) -> Outcome {
    let hosts = Hosts::of(place)?;
    let stranger = Stranger::start(hosts.ends()[2].1)?;
    attack(&mut Stage { dist, program, hosts: &hosts, stranger })
}

/// All that one attack has.
pub struct Stage<'a> {
    pub dist: &'a Dist,
    pub program: &'a Path,
    pub hosts: &'a Hosts,
    pub stranger: Stranger,
}

impl Stage<'_> {
    fn address(&self, end: usize) -> &str {
        self.hosts.ends()[end].0
    }

    /// The listener (0) or the connector (1): the smaller address and number listens.
    fn start(&self, end: usize) -> Outcome<Named> {
        self.start_at(end, PORTS[end])
    }

    fn start_at(&self, end: usize, port: u16) -> Outcome<Named> {
        let (address, ns) = self.hosts.ends()[end];
        // The attacker may have had it until now, and a process that another thread starts just then has what
        // this one has, until it runs its program.
        let deadline = Instant::now() + PATIENCE;
        let mut who = Cmd::line(&format!("ss -Hltun sport = :{port}")).in_ns(Some(ns)).run_ok()?;
        while !who.stdout.is_empty() {
            require!(Instant::now() < deadline, "somebody has port {port}: {}", who.text());
            std::thread::sleep(Duration::from_millis(5));
            who = Cmd::line(&format!("ss -Hltun sport = :{port}")).in_ns(Some(ns)).run_ok()?;
        }
        Named::start(self.program, self.dist, ns, address, port)
    }

    fn both(&self) -> Outcome<[Named; 2]> {
        Ok([self.start(0)?, self.start(1)?])
    }

    /// A port of the attacker's.
    fn hold(&mut self, port: u16) -> Outcome<Port> {
        let address = self.hosts.ends()[2].0;
        self.stranger.bind(address, port)
    }

    /// A message in each direction, of which the listener's may have been posted already, and both know each
    /// other as uwarp.
    fn joined(&self, [listener, connector]: [&mut Named; 2], posted: bool) -> Outcome {
        if !posted {
            listener.send(SECRET)?;
        }
        connector.expect(&format!("received {SECRET}"))?;
        listener.expect("sent 0")?;
        connector.send("answer")?;
        listener.expect("received answer")?;
        connector.expect("sent 0")?;
        let ends = self.hosts.ends();
        let known = [listener.knows_peer(self.dist, ends[0].1)?, connector.knows_peer(self.dist, ends[1].1)?];
        require!(known == [true; 2], "they are strangers to each other: {known:?}");
        Ok(())
    }

    /// Tries these requests at the listener's port. None may be accepted; that it comes to nothing is not
    /// enough, since the true peer's comes then.
    fn none_is_accepted(&mut self, requests: &[(&'static str, Vec<u8>)]) -> Outcome {
        let address = self.hosts.ends()[0].0;
        for (what, introduction) in requests {
            let tried = self.stranger.try_request(address, PORTS[0], introduction)?;
            if let Tried::Accepted(mut peer, _) = tried {
                peer.send(&Tagged::write(0x0100_E000, 0, 0).fpdu())?;
                let read = read_for(&mut peer, Duration::from_secs(2))?;
                let got = if holds_secret(&read) { "and got the secret" } else { "without the secret" };
                fail!("{what}: the stranger was accepted, {got}");
            }
            if let Tried::Waits(_) = tried {
                fail!("{what}: it is kept, neither accepted nor turned away");
            }
        }
        Ok(())
    }
}

fn both_up([listener, connector]: [&mut Named; 2]) -> Outcome {
    listener.toward((connector.qpn, &connector.address), (CONNECTORS, LISTENERS), ENDLESS)?;
    connector.toward((listener.qpn, &listener.address), (LISTENERS, CONNECTORS), ENDLESS)
}

fn read_for(peer: &mut Peer, time: Duration) -> Outcome<Vec<u8>> {
    let deadline = Instant::now() + time;
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    peer.tcp.set_read_timeout(Some(Duration::from_millis(50))).context("time limit")?;
    while Instant::now() < deadline {
        match peer.tcp.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => all.extend(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    Ok(all)
}

fn holds_secret(bytes: &[u8]) -> bool {
    bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes())
}

/// The connector's introduction, with these halves and this cookie.
fn lie(source: u32, destination: u32, halves: u32, cookie: Cookie) -> Vec<u8> {
    Introduction { source, destination, halves, incarnation: 99, cookie }.bytes()
}

const NONE: Cookie = [0; 16];

/// The two halves that the connector's request shows.
fn right_halves() -> u32 {
    halves(LISTENERS, CONNECTORS)
}

/// Those that the listener has shown to whoever had the connector's port: the upper ones.
fn shown_halves() -> u32 {
    halves(LISTENERS >> 12, CONNECTORS >> 12)
}

/// While a queue pair waits for its peer, in the peer's name. The peer comes last.
pub fn requests_in_anothers_name(stage: &mut Stage<'_>) -> Outcome {
    let [mut listener, mut connector] = stage.both()?;
    listener.toward((connector.qpn, &connector.address), (CONNECTORS, LISTENERS), ENDLESS)?;
    listener.send(SECRET)?;
    let (to, from) = (listener.qpn, connector.qpn);
    // From another host even the port is the same.
    let port = if stage.address(1) == stage.address(2) { PORTS[2] } else { PORTS[1] };
    let own = stage.hold(port)?;
    let number = u32::from(port) << 8 | 9;
    // What version 1 takes for a request: it proves nothing.
    stage.none_is_accepted(&[("version 1, wrong numbers", introduction1(from, to, 1, 1))])?;
    let at = stage.address(0).to_owned();
    let Some(cookie) = own.cookie((&at, PORTS[0]), number, to)? else { fail!("no cookie for an own number") };
    for shown in [halves(1, 1), 0, shown_halves(), right_halves()] {
        let mut made_up = cookie;
        made_up[15] ^= 1;
        // Again and again: the first ones cost the stranger nothing.
        stage.none_is_accepted(&[
            ("no cookie", lie(from, to, shown, NONE)),
            ("a made-up cookie", lie(from, to, shown, [0x5A; 16])),
            ("a changed cookie", lie(from, to, shown, made_up)),
            ("its own cookie for another's number", lie(from, to, shown, cookie)),
            ("its own number", lie(number, to, shown, cookie)),
            ("another of its own port", lie(number ^ 1, to, shown, cookie)),
        ])?;
    }
    connector.toward((listener.qpn, &listener.address), (LISTENERS, CONNECTORS), ENDLESS)?;
    stage.joined([&mut listener, &mut connector], true)
}

/// The attacker has the connector's port first, and a cookie of that time. Later it also knows all packet
/// sequence numbers.
pub fn cookies_of_the_ports_last_owner(stage: &mut Stage<'_>) -> Outcome {
    let mut listener = stage.start(0)?;
    let to = listener.qpn;
    let mut before = Vec::new();
    {
        let port = stage.hold(PORTS[1])?;
        let from = u32::from(PORTS[1]) << 8;
        listener.toward((from, stage.address(1)), (CONNECTORS, LISTENERS), ENDLESS)?;
        listener.send(SECRET)?;
        stage.none_is_accepted(&[("version 1", introduction1(from, to, 1, 1))])?;
        let Some(cookie) = port.cookie((stage.address(0), PORTS[0]), from, to)? else {
            fail!("no cookie for the port's owner")
        };
        // It is the owner, and does not know the numbers.
        stage.none_is_accepted(&[
            ("wrong halves", lie(from, to, halves(1, 1), cookie)),
            ("no halves", lie(from, to, 0, cookie)),
            ("the halves that it was shown", lie(from, to, shown_halves(), cookie)),
        ])?;
        before.push(cookie);
    }
    listener.reset()?;
    let mut connector = stage.start(1)?;
    let from = connector.qpn;
    listener.toward((from, stage.address(1)), (CONNECTORS, LISTENERS), ENDLESS)?;
    listener.send(SECRET)?;
    for cookie in before {
        stage.none_is_accepted(&[(
            "an old cookie, and all else right",
            lie(from, to, right_halves(), cookie),
        )])?;
    }
    connector.toward((to, stage.address(0)), (LISTENERS, CONNECTORS), ENDLESS)?;
    stage.joined([&mut listener, &mut connector], true)
}

/// The connector was joined and dies; its port belongs to the attacker then. The program brings the queue
/// pair up again toward the same number.
pub fn the_port_of_a_dead_connector(stage: &mut Stage<'_>) -> Outcome {
    let [mut listener, mut connector] = stage.both()?;
    both_up([&mut listener, &mut connector])?;
    stage.joined([&mut listener, &mut connector], false)?;
    let (to, from) = (listener.qpn, connector.qpn);
    connector.kill();
    let port = stage.hold(PORTS[1])?;
    listener.reset()?;
    listener.toward((from, stage.address(1)), (CONNECTORS, LISTENERS), LIMITED)?;
    listener.send(SECRET)?;
    // All that the connector was ever sent: the reply's halves, and what a version 1 said.
    stage.none_is_accepted(&[("version 1, an echo", introduction1(from, to, LISTENERS, CONNECTORS))])?;
    if let Some(cookie) = port.cookie((stage.address(0), PORTS[0]), from, to)? {
        let reply = Introduction {
            source: to,
            destination: from,
            halves: halves(CONNECTORS >> 12, LISTENERS >> 12),
            incarnation: 99,
            cookie,
        };
        stage.none_is_accepted(&[
            ("an echo of the reply", echo(&reply.bytes())),
            ("the halves that it was shown, the other way", lie(from, to, reply.halves, cookie)),
        ])?;
    }
    listener.expect(RETRIES_EXCEEDED)?;
    drop(port);
    listener.reset()?;
    let mut connector = stage.start(1)?;
    both_up([&mut listener, &mut connector])?;
    stage.joined([&mut listener, &mut connector], false)
}

/// Serves a port that it has taken until told to stop; returns all that it was sent by TCP.
fn serve(port: Port, stop: Arc<AtomicBool>, answers: fn(&Setup) -> Option<Setup>) -> Outcome<Vec<u8>> {
    port.udp.set_nonblocking(true).context("non-blocking")?;
    port.tcp.set_nonblocking(true).context("non-blocking")?;
    let mut all = Vec::new();
    let mut peers = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut bytes = [0; 512];
        if let Ok((len, from)) = port.udp.recv_from(&mut bytes)
            && let Some(reply) = cookie_reply(&bytes[..len], &[0x5A; 16])
        {
            let _ = port.udp.send_to(&reply, from);
        }
        if let Ok((tcp, _)) = port.tcp.accept() {
            tcp.set_nonblocking(false).context("blocking")?;
            let mut peer = Peer::over(tcp)?;
            if let Some(request) = peer.read_setup()?
                && let Some(reply) = answers(&request)
            {
                peer.send(&reply.bytes())?;
                all.extend(read_for(&mut peer, Duration::from_millis(300))?);
            }
            peers.push(peer);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    for peer in &mut peers {
        all.extend(read_for(peer, Duration::from_millis(1))?);
    }
    Ok(all)
}

/// The listener was joined and dies. The attacker answers at its port: it sends back what comes, or says
/// nothing.
fn at_a_dead_listener(stage: &mut Stage<'_>, answers: fn(&Setup) -> Option<Setup>) -> Outcome {
    let [mut listener, mut connector] = stage.both()?;
    both_up([&mut listener, &mut connector])?;
    stage.joined([&mut listener, &mut connector], false)?;
    let to = listener.qpn;
    listener.kill();
    let port = stage.hold(PORTS[0])?;
    connector.reset()?;
    connector.toward((to, stage.address(0)), (LISTENERS, CONNECTORS), LIMITED)?;
    connector.send(SECRET)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let server = std::thread::spawn(move || serve(port, stopped, answers));
    let ended = connector.expect(RETRIES_EXCEEDED);
    stop.store(true, Ordering::Relaxed);
    let Ok(read) = server.join() else { fail!("the attacker's thread") };
    require!(!holds_secret(&read?), "the stranger at the dead peer's port got the secret");
    ended?;
    connector.reset()?;
    // The stranger's connections to the other one may be there still.
    let mut listener = stage.start_at(0, PORTS[0] - 1)?;
    both_up([&mut listener, &mut connector])?;
    stage.joined([&mut listener, &mut connector], false)
}

pub fn the_port_of_a_dead_listener(stage: &mut Stage<'_>) -> Outcome {
    at_a_dead_listener(stage, |request| Some(reply(request, &echo(said(request)))))
}

pub fn a_dead_listeners_port_that_is_silent(stage: &mut Stage<'_>) -> Outcome {
    at_a_dead_listener(stage, |request| (request.flags & REJECT != 0).then(|| request.clone()))
}

/// Packet sequence numbers that everybody knows prove nothing: whoever has the port is taken for the peer. If
/// it says nothing then, it gets nothing, and the work request ends.
pub fn silence_after_the_reply(stage: &mut Stage<'_>) -> Outcome {
    let mut listener = stage.start(0)?;
    let (to, from) = (listener.qpn, u32::from(PORTS[1]) << 8);
    let zero: Psns = (0, 0);
    let port = stage.hold(PORTS[1])?;
    listener.toward((from, stage.address(1)), zero, LIMITED)?;
    let at = stage.address(0).to_owned();
    let mut tried = stage.stranger.try_request(&at, PORTS[0], &introduction1(from, to, 0, 0))?;
    if let Some(cookie) = port.cookie((&at, PORTS[0]), from, to)? {
        tried = stage.stranger.try_request(&at, PORTS[0], &lie(from, to, halves(0, 0), cookie))?;
    }
    let Tried::Accepted(mut silent, _) = tried else { fail!("the port's owner was not accepted: {tried:?}") };
    listener.send(SECRET)?;
    let ended = listener.expect(RETRIES_EXCEEDED);
    let read = read_for(&mut silent, PATIENCE / 120)?;
    require!(!holds_secret(&read), "the message went to a peer that has said nothing");
    ended?;
    drop(port);
    let mut connector = stage.start(1)?;
    listener.reset()?;
    both_up([&mut listener, &mut connector])?;
    stage.joined([&mut listener, &mut connector], false)
}

/// Before the listener's queue pair is in RTR: more requests for it than may wait, before the peer's and
/// after.
pub fn early_requests(stage: &mut Stage<'_>) -> Outcome {
    let [mut listener, mut connector] = stage.both()?;
    both_up([&mut listener, &mut connector])?;
    stage.joined([&mut listener, &mut connector], false)?;
    listener.reset()?;
    connector.reset()?;
    let port = stage.hold(PORTS[2])?;
    let at = stage.address(0).to_owned();
    let to = listener.qpn;
    let mut waiting = Vec::new();
    for round in 0..2 {
        for slot in 0..5 {
            let from = u32::from(PORTS[2]) << 8 | slot;
            waiting.push(stage.stranger.request(&at, PORTS[0], &introduction1(from, to, 1, 1))?);
            if let Some(cookie) = port.cookie((&at, PORTS[0]), from, to)? {
                let request = lie(from, to, halves(1, 1), cookie);
                waiting.push(stage.stranger.request(&at, PORTS[0], &request)?);
            }
        }
        if round == 0 {
            connector.toward((to, &at), (LISTENERS, CONNECTORS), ENDLESS)?;
            // So that its request is among them.
            std::thread::sleep(Duration::from_millis(300));
        }
    }
    std::thread::sleep(Duration::from_millis(300));
    listener.toward((connector.qpn, &connector.address), (CONNECTORS, LISTENERS), ENDLESS)?;
    stage.joined([&mut listener, &mut connector], false)
}

/// Cookies in a second for ports that no queue pair names.
const COOKIES: u64 = 1000;

/// Requests for cookies as fast as two threads can, while the honest two are joined again and again. Not many
/// are answered, and never those two instead.
pub fn a_flood_of_requests_for_cookies(stage: &mut Stage<'_>) -> Outcome {
    let [mut listener, mut connector] = stage.both()?;
    both_up([&mut listener, &mut connector])?;
    stage.joined([&mut listener, &mut connector], false)?;
    let stop = Arc::new(AtomicBool::new(false));
    let to = listener.qpn;
    let mut floods = Vec::new();
    for _ in 0..2 {
        let (port, stopped) = (stage.hold(0)?, stop.clone());
        let at = (stage.address(0).to_owned(), PORTS[0]);
        let from = u32::from(port.number()?) << 8;
        floods.push(std::thread::spawn(move || {
            let (mut sent, mut answered) = (0_u64, 0_u64);
            let mut bytes = [0; 512];
            port.udp.set_nonblocking(true).context("non-blocking")?;
            while !stopped.load(Ordering::Relaxed) {
                let request = cookie_request(from, to, sent);
                sent += u64::from(port.udp.send_to(&request, (&*at.0, at.1)).is_ok());
                while port.udp.recv(&mut bytes).is_ok() {
                    answered += 1;
                }
            }
            Outcome::Ok((sent, answered))
        }));
    }
    let mut rounds = || -> Outcome {
        for _ in 0..5 {
            listener.reset()?;
            connector.reset()?;
            both_up([&mut listener, &mut connector])?;
            stage.joined([&mut listener, &mut connector], false)?;
        }
        Ok(())
    };
    let begun = Instant::now();
    let joined = rounds();
    // Long enough for a flood to be more than what is answered.
    std::thread::sleep(Duration::from_secs(2));
    stop.store(true, Ordering::Relaxed);
    let (mut sent, mut answered) = (0, 0);
    for flood in floods {
        let Ok(flood) = flood.join() else { fail!("the attacker's thread") };
        let (more, of_them) = flood?;
        (sent, answered) = (sent + more, answered + of_them);
    }
    joined?;
    // A second begins with its first request, so there was at most one more of them.
    let most = COOKIES * (begun.elapsed().as_secs() + 2);
    require!(sent > 2 * most, "{sent} requests are no flood");
    require!(answered <= most, "{answered} of {sent} requests were answered, and {most} at most may be");
    Ok(())
}
