//! Connections that a program hands over to become iWARP streams (`uwarp_sockets.h`), attacked by whoever is
//! at their other end: another user of the same host, or another host. Nobody can enter a connection of two
//! others. Whatever the attacker does with its own, the program hears of its failure in limited time,
//! receives nothing from it, and honest connections of the same process go on.

use std::io::{ErrorKind, Read};
use std::process::Command;
use std::time::{Duration, Instant};

use uwarp_conformance::attacker::encode::{CRC, ENHANCED, REJECT, REPLY, Setup, Tagged, Untagged};
use uwarp_conformance::attacker::lines::LineProcess;
use uwarp_conformance::attacker::peer::{PATIENCE, Peer};
use uwarp_conformance::process::Cmd;
use uwarp_conformance::{Context, Outcome, fail, require};

use crate::by_number::Stage;

const INITIATOR: u32 = 1;
const RESPONDER: u32 = 2;
/// For the set-up of the victim's connections.
const LIMIT_MS: u32 = 1000;

const EPROTO: i32 = 71;
const ECONNRESET: i32 = 104;
const ENOTCONN: i32 = 107;
const ETIMEDOUT: i32 = 110;
const ECONNREFUSED: i32 = 111;

/// The program whose connections are attacked.
struct Handed {
    lines: LineProcess,
    role: u32,
    port: u16,
    /// Connections that it has accepted.
    taken: u32,
    /// What it has open when it has no connection.
    idle: usize,
}

impl Handed {
    fn start(stage: &Stage<'_>, role: u32) -> Outcome<Self> {
        let (address, ns) = stage.hosts.ends()[0];
        let mut command = Command::new("ip");
        command.args(["netns", "exec", ns.name()]).arg(stage.program);
        command.args([role.to_string(), LIMIT_MS.to_string(), address.into()]);
        command.env("LD_LIBRARY_PATH", stage.dist.lib());
        let mut lines = LineProcess::start("a program that hands connections over", command)?;
        let port = lines.expect("port ", PATIENCE)?[5..].parse().context("its port")?;
        let mut handed = Self { lines, role, port, taken: 0, idle: 0 };
        // The device is there from the first connection on.
        handed.serves(stage)?;
        handed.idle = handed.settled(None)?;
        Ok(handed)
    }

    fn open(&self) -> Outcome<usize> {
        Ok(std::fs::read_dir(format!("/proc/{}/fd", self.lines.pid())).context("its descriptors")?.count())
    }

    /// What it has open, once that is so many, or for some time the same.
    fn settled(&self, wanted: Option<usize>) -> Outcome<usize> {
        let deadline = Instant::now() + PATIENCE;
        let mut last = (self.open()?, 0);
        while wanted.map_or(last.1 < 20, |wanted| last.0 != wanted) {
            require!(Instant::now() < deadline, "{} descriptors are open, not {wanted:?}", last.0);
            std::thread::sleep(Duration::from_millis(20));
            let open = self.open()?;
            last = if open == last.0 { (open, last.1 + 1) } else { (open, 0) };
        }
        Ok(last.0)
    }

    /// An honest client's bytes come back.
    fn serves(&mut self, stage: &Stage<'_>) -> Outcome {
        let ((address, _), (_, ns)) = (stage.hosts.ends()[0], stage.hosts.ends()[1]);
        let client = Cmd::new(stage.program);
        let role = INITIATOR + RESPONDER - self.role;
        let client = client.args(&format!("{role} 60000 {address} {}", self.port)).in_ns(Some(ns));
        let out = client.env("LD_LIBRARY_PATH", stage.dist.lib()).limit(PATIENCE).run_ok()?;
        require!(out.stdout.contains("echoed"), "an honest client: {}", out.text());
        let number = self.taken;
        self.taken += 1;
        self.is_over(number, 0, 16).map(drop)
    }

    /// The attacker's connection, which is the program's next one.
    fn attacked(&mut self, stage: &mut Stage<'_>) -> Outcome<(Peer, u32)> {
        let address = stage.hosts.ends()[0].0.to_owned();
        let peer = stage.stranger.connect(&address, self.port)?;
        self.taken += 1;
        Ok((peer, self.taken - 1))
    }

    fn is_over(&mut self, number: u32, errno: i32, bytes: usize) -> Outcome {
        let line = self.lines.expect(&format!("over {number} "), PATIENCE)?;
        let is = |errno: i32| line == format!("over {number} {errno} {bytes}");
        // A reset can come before the connection is handed over.
        let early = errno == ECONNRESET && is(ENOTCONN);
        require!(is(errno) || early, "\"{line}\", not {errno} {bytes}");
        Ok(())
    }
}

/// What an honest client sends first: the attacker sees all that is ever sent to a port of its own.
fn honest_request(stage: &mut Stage<'_>) -> Outcome<Setup> {
    let address = stage.hosts.ends()[2].0.to_owned();
    let port = stage.stranger.bind(&address, 0)?;
    let client = Cmd::new(stage.program).args(&format!("{INITIATOR} 60000 {address} {}", port.number()?));
    let client = client.env("LD_LIBRARY_PATH", stage.dist.lib()).in_ns(Some(stage.hosts.ends()[1].1));
    let client = client.spawn()?;
    port.tcp.set_nonblocking(true).context("non-blocking")?;
    let deadline = Instant::now() + PATIENCE;
    let tcp = loop {
        match port.tcp.accept() {
            Ok((tcp, _)) => break tcp,
            Err(_) if client.is_running() && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => fail!("an honest client: {error}: {}", client.so_far()),
        }
    };
    tcp.set_nonblocking(false).context("blocking")?;
    let Some(request) = Peer::over(tcp)?.read_setup()? else { fail!("no request: {}", client.so_far()) };
    Ok(request)
}

/// What the attacker does once its connection is there.
enum Then {
    /// It says no more.
    Waits,
    /// It sends nothing more.
    Finishes,
    Resets,
}

type Case = (&'static str, Vec<u8>, Then, i32);

/// One after the other, and then all at once, each beside an honest client.
fn try_all(stage: &mut Stage<'_>, victim: &mut Handed, cases: &[Case]) -> Outcome {
    for together in [true, false] {
        let mut open = Vec::new();
        for (what, bytes, then, errno) in cases {
            let (mut peer, number) = victim.attacked(stage)?;
            if victim.role == INITIATOR {
                require!(peer.read_setup()?.is_some(), "{what}: no request");
            }
            peer.send(bytes)?;
            match then {
                Then::Waits => open.push((*what, Some(peer), number, *errno)),
                Then::Finishes => {
                    peer.finish();
                    open.push((*what, Some(peer), number, *errno));
                }
                Then::Resets => {
                    peer.reset();
                    open.push((*what, None, number, *errno));
                }
            }
            if !together {
                ends(victim, &mut open)?;
            }
        }
        victim.serves(stage)?;
        ends(victim, &mut open)?;
    }
    victim.settled(Some(victim.idle))?;
    victim.serves(stage)
}

/// The program receives nothing by these connections, hears of the failure, and its end is closed.
fn ends(victim: &mut Handed, open: &mut Vec<(&str, Option<Peer>, u32, i32)>) -> Outcome {
    let mut failures = Vec::new();
    for (what, peer, number, errno) in open.drain(..) {
        if let Err(failure) = victim.is_over(number, errno, 0) {
            failures.push(format!("{what}: {failure}"));
        } else if let Some(mut peer) = peer {
            // A reply or a Terminate, and the end; a reset is one, too.
            let read = peer.tcp.read_to_end(&mut Vec::new());
            let waits = read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
            require!(!waits, "{what}: the connection is open still");
        }
    }
    require!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// The program responds: the attacker is silent, or its request is none, or the program's library has to
/// refuse it, or nothing honest follows.
pub fn requests_to_a_program_that_hands_over(stage: &mut Stage<'_>) -> Outcome {
    let request = honest_request(stage)?;
    let bytes = request.bytes();
    let half = bytes[..bytes.len() / 2].to_vec();
    let with = |more: &[u8]| [&bytes[..], more].concat();
    let mut changed = request.clone();
    if let Some(byte) = changed.private_data.get_mut(4) {
        *byte ^= 1;
    }
    // Behind a request that is as it should be: a message to the program, too early, and others.
    let message = Untagged::send(1, 16).fpdu();
    let cases: Vec<Case> = vec![
        ("silence", vec![], Then::Waits, ETIMEDOUT),
        ("nothing", vec![], Then::Finishes, ECONNRESET),
        ("a reset", vec![], Then::Resets, ECONNRESET),
        ("half a request", half.clone(), Then::Waits, ETIMEDOUT),
        ("half a request and the end", half, Then::Finishes, ECONNRESET),
        ("other bytes", vec![b'x'; 64], Then::Waits, EPROTO),
        ("a reply", Setup { key: REPLY, ..request.clone() }.bytes(), Then::Waits, EPROTO),
        ("a request of another kind of program", Setup::request2().bytes(), Then::Waits, ECONNREFUSED),
        ("changed data", changed.bytes(), Then::Waits, ECONNREFUSED),
        ("silence after the request", bytes.clone(), Then::Waits, ETIMEDOUT),
        // It opens the stream, and is no message of a socket.
        ("a message behind the request", with(&message), Then::Waits, ECONNRESET),
        ("half a frame behind the request", with(&[b'x'; 64]), Then::Waits, ETIMEDOUT),
        ("the request, and the end", bytes.clone(), Then::Finishes, ECONNRESET),
    ];
    let mut victim = Handed::start(stage, RESPONDER)?;
    try_all(stage, &mut victim, &cases)
}

/// The program initiates: so do its library and the attacker's answers.
pub fn answers_to_a_program_that_hands_over(stage: &mut Stage<'_>) -> Outcome {
    let mut echo = honest_request(stage)?;
    echo.key = REPLY;
    let bytes = echo.bytes();
    let rejection = Setup { flags: CRC | ENHANCED | REJECT, ..Setup::reply2() }.bytes();
    let cases: Vec<Case> = vec![
        ("silence", vec![], Then::Waits, ETIMEDOUT),
        ("nothing", vec![], Then::Finishes, ECONNRESET),
        ("a reset", vec![], Then::Resets, ECONNRESET),
        ("half a reply", bytes[..bytes.len() / 2].to_vec(), Then::Waits, ETIMEDOUT),
        ("other bytes", vec![b'x'; 64], Then::Waits, EPROTO),
        ("a rejection", rejection, Then::Waits, ECONNREFUSED),
        ("a reply of another kind of program", Setup::reply2().bytes(), Then::Waits, ECONNREFUSED),
        // With the reply, the stream runs: it may be idle for as long as the peer likes.
        ("half a frame behind a reply", [&bytes[..], &[b'x'; 64]].concat(), Then::Finishes, ECONNRESET),
        ("a Write to nowhere", [bytes, Tagged::write(7, 0, 16).fpdu()].concat(), Then::Waits, EPROTO),
    ];
    let mut victim = Handed::start(stage, INITIATOR)?;
    try_all(stage, &mut victim, &cases)
}
