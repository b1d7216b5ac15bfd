//! One id with a shell that does as the test says, and a peer that speaks with the real handshake.

// Calls that cannot fail are made like those that can.
#![allow(clippy::unit_arg)]

mod accepting;
mod by_number;
mod cut_short;
mod ends;
mod random;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use uwarp_driver::Disconnect;
use uwarp_llp::carrier::Refusal;
use uwarp_proto::setup::{AcceptParams, InitiatorConfig};
use uwarp_rnic::VerbsError;
use uwarp_wire::mpa;

use super::super::handshake::Event as Setup;
use super::super::testing::{self, Clock};
use super::super::{Ends, StreamEvent};
use super::*;
use crate::timeouts::UNPOLLED_LOOK;

const ACK_TIMEOUT: u8 = 14;
const TIMEWAIT: Duration = Duration::from_millis(64);
const QPN: u32 = 0x51;
const REFUSED: VerbsError = VerbsError::Invalid("test");

fn rules(infiniband: bool) -> Rules {
    Rules { timeouts: Timeouts::default(), infiniband, policy: testing::responder() }
}

fn here(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

const THERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 7);

fn ours(private_data: &[u8]) -> Ours<'_> {
    Ours { pair: Pair::Own(QPN), min_rnr_timer: 3, private_data }
}

fn by_number() -> Ours<'static> {
    Ours { pair: Pair::Number(QPN), ..ours(b"") }
}

/// What the lower layer does with bytes.
#[derive(Debug, Clone, Copy)]
enum Takes {
    All,
    Part,
    Fails(Refusal),
}

/// Carries out what the machine wants, and writes down what that is.
struct Shell {
    clock: Clock,
    life: Life,
    log: Vec<String>,
    /// What the random test has seen.
    history: Vec<String>,
    /// Connections of the shell.
    open: BTreeSet<ConnKey>,
    /// Connections that were given away, and whether the test has said what became of it.
    given: Vec<ConnKey>,
    /// What was sent.
    wire: BTreeMap<ConnKey, Vec<u8>>,
    /// The last event, and the last request.
    event: Option<IdEvent>,
    new: Vec<NewId>,
    replies: Vec<Reply>,
    datagrams: Vec<Vec<u8>>,
    /// A connection waits to be accepted.
    arrives: bool,
    takes: Takes,
    opens: Result<u16, Refusal>,
    listens: Result<(), Errno>,
    attaches: Result<(), VerbsError>,
    unpolled: bool,
    /// Answers Attach and Fail at once.
    prompt: bool,
}

impl Shell {
    fn of(life: Life) -> Self {
        Self {
            clock: Clock::new(),
            life,
            log: Vec::new(),
            history: Vec::new(),
            open: BTreeSet::new(),
            given: Vec::new(),
            wire: BTreeMap::new(),
            event: None,
            new: Vec::new(),
            replies: Vec::new(),
            datagrams: Vec::new(),
            arrives: false,
            takes: Takes::All,
            opens: Ok(99),
            listens: Ok(()),
            attaches: Ok(()),
            unpolled: false,
            prompt: true,
        }
    }

    fn new(infiniband: bool) -> Self {
        let mut shell = Self::of(Life::new(rules(infiniband)));
        shell.life.set_ack_timeout(Some(ACK_TIMEOUT));
        shell
    }

    fn run(&mut self) {
        loop {
            let now = self.clock.now();
            if let Some(transmit) = self.life.poll_transmit() {
                let (conn, bytes) = match transmit {
                    Transmit::Bytes { conn, bytes } => (conn, bytes.to_vec()),
                    Transmit::Datagram { bytes, .. } => {
                        self.datagrams.push(bytes.to_vec());
                        self.log.push("datagram".into());
                        continue;
                    }
                };
                assert!(self.open.contains(&conn), "bytes for a connection that is not there");
                self.log.push("send".into());
                let input = match self.takes {
                    Takes::All => {
                        self.wire.entry(conn).or_default().extend(&bytes);
                        Input::Sent { conn, bytes: bytes.len() }
                    }
                    Takes::Part => Input::Sent { conn, bytes: bytes.len() / 2 },
                    Takes::Fails(why) => {
                        self.open.remove(&conn);
                        Input::Failed { conn, why }
                    }
                };
                self.life.handle_input(&now, input);
            } else if let Some(action) = self.life.poll_action() {
                self.act(&now, action);
            } else {
                return;
            }
        }
    }

    fn act(&mut self, now: &Now, action: Action<Report>) {
        let (word, answer) = match action {
            Action::Connect { conn, .. } => (
                "connect".into(),
                Some(match self.opens {
                    Ok(port) => {
                        self.open.insert(conn);
                        Input::Opened { conn, local: here(port) }
                    }
                    Err(why) => Input::Failed { conn, why },
                }),
            ),
            Action::Listen => ("listen".into(), self.listens.err().map(Input::NotListening)),
            Action::Accept { conn } if std::mem::take(&mut self.arrives) => {
                self.open.insert(conn);
                let ends = Ends { local: here(5), peer: THERE };
                ("accept".into(), Some(Input::Accepted { conn, ends }))
            }
            Action::Accept { conn } => ("accept".into(), Some(Input::NotAccepted { conn, why: None })),
            Action::Close { conn, how } => {
                assert!(self.open.remove(&conn), "closed twice");
                (if how == Close::Finish { "close" } else { "reset" }.into(), None)
            }
            Action::Attach { conn, to, said, .. } => {
                assert_eq!(to, Recipient::Own);
                assert!(self.open.remove(&conn) && said.private_data.is_empty());
                self.given.push(conn);
                let event = match self.attaches {
                    Ok(()) => StreamEvent::Attached,
                    Err(error) => {
                        self.open.insert(conn);
                        StreamEvent::Refused(error)
                    }
                };
                ("attach".into(), self.prompt.then_some(Input::Stream { conn, event }))
            }
            Action::Disconnect { conn, .. } => {
                assert!(self.given.contains(&conn));
                ("disconnect".into(), None)
            }
            Action::Look { .. } => unreachable!("an id never does"),
            Action::CheckPolled => ("look".into(), Some(Input::Unpolled(self.unpolled))),
            Action::Fail => ("fail".into(), self.prompt.then_some(Input::Flushed)),
            Action::Answer(Ok(())) => ("ok".into(), None),
            Action::Answer(Err(errno)) => (format!("error {}", errno.raw_os_error()), None),
            Action::Report(report) => (self.reported(report), None),
        };
        self.log.push(word);
        if let Some(answer) = answer {
            self.life.handle_input(now, answer);
        }
    }

    fn reported(&mut self, report: Report) -> String {
        match report {
            Report::Event(event) => {
                let word = format!("{:?} {}", event.kind, event.status);
                self.event = Some(event);
                word
            }
            Report::Request(new) => {
                self.new.push(*new);
                "request".into()
            }
            Report::Settled(_) => "settled".into(),
            Report::Reply(reply) => {
                self.replies.push(reply);
                "reply".into()
            }
        }
    }

    fn call<T>(&mut self, call: impl FnOnce(&mut Life, &Now) -> Result<T, CmError>) -> Result<T, CmError> {
        let result = call(&mut self.life, &self.clock.now());
        self.run();
        result
    }

    fn input(&mut self, input: Input<'_>) {
        if let Input::Failed { conn, .. } = input {
            self.open.remove(&conn);
        }
        self.life.handle_input(&self.clock.now(), input);
        self.run();
    }

    fn stream(&mut self, event: StreamEvent) {
        let conn = *self.given.last().unwrap();
        self.input(Input::Stream { conn, event });
    }

    /// The deadlines up to this time come.
    fn pass(&mut self, time: Duration) {
        let end = self.clock.get() + time;
        while let Some(next) = self.life.poll_timeout().filter(|next| *next <= end) {
            self.clock.reach(next);
            self.life.handle_timeout(&self.clock.now());
            let left = self.life.poll_timeout();
            assert!(left.is_none_or(|left| left > self.clock.get()), "a deadline that is over is left");
            self.run();
        }
        self.clock.reach(end);
        self.life.handle_timeout(&self.clock.now());
        self.run();
    }

    /// What has happened since the last look.
    fn did(&mut self) -> String {
        std::mem::take(&mut self.log).join(", ")
    }

    fn private_data(&self) -> &[u8] {
        self.event.as_ref().map_or(&[], |event| &event.private_data)
    }

    /// The peer says this, on the only connection that there is.
    fn hear(&mut self, mut bytes: &[u8]) {
        let conn = *self.open.last().unwrap();
        while !bytes.is_empty() {
            let Want::Bytes(want) = self.life.want(conn) else { return };
            let (now, rest) = bytes.split_at(want.min(bytes.len()));
            bytes = rest;
            self.input(Input::Bytes { conn, bytes: now });
        }
    }

    fn resolved(infiniband: bool) -> Self {
        let mut shell = Self::new(infiniband);
        shell.call(|life, _| life.resolve_address(THERE, Ok(here(0).ip()))).unwrap();
        shell.call(|life, _| life.resolve_route()).unwrap();
        assert_eq!(shell.did(), "AddressResolved 0, RouteResolved 0");
        shell
    }

    fn connecting(infiniband: bool, ours: Ours<'_>) -> Self {
        let mut shell = Self::resolved(infiniband);
        shell.call(|life, now| life.connect(now, ours, ConnParam::DEFAULT)).unwrap();
        assert_eq!((shell.did(), shell.life.state()), ("connect, send, ok".into(), State::Connecting));
        shell
    }

    /// The peer's answer to the request that is on the wire.
    fn answer(&mut self, answer: impl FnOnce(&mut Handshake, &Now)) {
        let request = self.wire.values_mut().next_back().map(std::mem::take).unwrap();
        let now = self.clock.now();
        let (mut peer, _) = responder(&now, &request);
        answer(&mut peer, &now);
        let reply = peer.poll_transmit().unwrap().to_vec();
        self.hear(&reply);
    }

    fn accepted(&mut self) {
        self.answer(|peer, now| {
            peer.accept(now, testing::terms(), b"yes").unwrap();
        });
    }

    fn established(infiniband: bool) -> Self {
        let mut shell = Self::connecting(infiniband, ours(b""));
        shell.accepted();
        shell.stream(StreamEvent::Established);
        assert_eq!((shell.did(), shell.life.state()), ("attach, Established 0".into(), State::Established));
        shell
    }

    fn responded(ours: Ours<'_>) -> Self {
        let mut shell = Self::connecting(true, ours);
        shell.accepted();
        assert_eq!((shell.did(), shell.life.state()), ("ConnectResponse 0".into(), State::Responded));
        shell
    }

    /// An id that came as this request.
    fn requested_by(infiniband: bool, config: InitiatorConfig) -> Self {
        let mut listener = Self::new(infiniband);
        let now = listener.clock.now();
        let mut peer = Handshake::ask(&now, None, config, b"please").unwrap();
        let request = peer.poll_transmit().unwrap().to_vec();
        peer.handle_input(Input::Sent { conn: Space::new(9).name(), bytes: request.len() });
        let (handshake, request) = responder(&now, &request);
        let (handshake, conn) = (Box::new(handshake), Space::new(1).name());
        let ends = Ends { local: here(5), peer: THERE };
        let place = Budget::new(1).take(0).unwrap();
        listener.life.requested(listener::Report::Requested { conn, ends, handshake, request, place });
        listener.run();
        assert_eq!(listener.did(), "request");
        let NewId { life, conn, event } = listener.new.pop().unwrap();
        assert_eq!((event.kind, &event.private_data[..]), (EventKind::ConnectRequest, &b"please"[..]));
        assert_eq!((life.local(), life.peer()), (Some(here(5)), Some(THERE)));
        let mut shell = Self { clock: listener.clock, ..Self::of(life) };
        shell.open.extend(conn);
        assert_eq!(shell.life.want(conn.unwrap()), Want::Nothing, "it is not watched before its answer");
        shell
    }

    fn requested(infiniband: bool) -> Self {
        Self::requested_by(infiniband, testing::initiator())
    }

    fn accepting(infiniband: bool) -> Self {
        let mut shell = Self::requested(infiniband);
        shell.call(|life, now| life.accept(now, ours(b"yes"), None)).unwrap();
        assert_eq!((shell.did(), shell.life.state()), ("send, attach, ok".into(), State::Accepting));
        shell
    }

    /// Nothing is left, and nothing comes any more.
    fn destroyed(mut self) {
        self.call(|life, now| {
            life.destroy(now);
            Ok(())
        })
        .unwrap();
        self.did();
        self.pass(Duration::from_secs(300));
        for conn in self.given.clone() {
            for event in
                [StreamEvent::Attached, StreamEvent::Established, StreamEvent::Ended(Disconnect::Reset)]
            {
                self.input(Input::Stream { conn, event });
            }
        }
        assert_eq!(self.did(), "");
        assert_eq!((self.life.state(), self.life.poll_timeout()), (State::Destroyed, None));
        assert!(self.open.is_empty(), "a connection is left");
    }
}

/// A responder that has this request.
fn responder(now: &Now, request: &[u8]) -> (Handshake, uwarp_proto::setup::Request) {
    let conn = Space::new(9).name();
    let mut peer = Handshake::await_request(now, None, testing::responder(), None);
    let mut rest = request;
    loop {
        let Want::Bytes(want) = peer.want() else { panic!("not a request") };
        let (bytes, after) = rest.split_at(want.min(rest.len()));
        rest = after;
        if let Some(Setup::Requested(request)) = peer.handle_input(Input::Bytes { conn, bytes }) {
            return (peer, request);
        }
        assert!(!rest.is_empty());
    }
}

/// A peer of revision one: it has no ready-to-receive indication.
fn plain() -> InitiatorConfig {
    InitiatorConfig { revision: uwarp_proto::setup::Revision::One, peer: None, ..testing::initiator() }
}

fn raw(errno: Errno) -> i32 {
    errno.raw_os_error()
}

#[test]
fn an_id_connects_and_is_disconnected() {
    for infiniband in [true, false] {
        let mut shell = Shell::connecting(infiniband, ours(b"please"));
        assert_eq!(shell.life.local(), Some(here(99)), "the system has chosen the port");
        shell.accepted();
        assert_eq!((shell.did(), shell.life.state()), ("attach".into(), State::Connecting));
        shell.stream(StreamEvent::Established);
        assert_eq!((shell.did(), shell.life.state()), ("Established 0".into(), State::Established));
        assert_eq!((shell.private_data(), shell.life.poll_timeout()), (&b"yes"[..], None));
        shell.call(|life, now| life.disconnect(now)).unwrap();
        assert_eq!((shell.did(), shell.life.state()), ("disconnect".into(), State::Established));
        shell.stream(StreamEvent::Ended(Disconnect::LocalClosed));
        assert_eq!((shell.did(), shell.life.state()), ("Disconnected 0".into(), State::Closed));
        shell.pass(TIMEWAIT - Duration::from_millis(1));
        assert_eq!(shell.did(), "");
        shell.pass(Duration::from_millis(1));
        assert_eq!(shell.did(), if infiniband { "TimewaitExit 0" } else { "" });
        assert_eq!(shell.call(|life, now| life.disconnect(now)), Ok(true), "the peer is left");
        assert_eq!(shell.call(|life, now| life.disconnect(now)), Ok(false), "once");
        assert_eq!(shell.did(), "");
        shell.destroyed();
    }
}

#[test]
fn the_peers_depths_and_number_are_reported() {
    let mut shell = Shell::resolved(true);
    let param = ConnParam { responder_resources: 3, initiator_depth: 5, ..ConnParam::DEFAULT };
    shell.call(|life, now| life.connect(now, ours(b""), param)).unwrap();
    shell.answer(|peer, now| {
        let peer_data = PeerDataOf { qpn: 77, rnr_retry: 5 }.get();
        let depths = Depths::negotiated(3, 4);
        peer.accept(now, AcceptParams { depths, peer: peer_data }, b"").unwrap();
    });
    let param = shell.life.peer_param();
    assert_eq!((param.qp_num, param.rnr_retry_count), (77, 5));
    assert_eq!((param.responder_resources, param.initiator_depth), (3, 5));
    assert_eq!(shell.life.retries(), 7);
}

struct PeerDataOf {
    qpn: u32,
    rnr_retry: u8,
}

impl PeerDataOf {
    fn get(self) -> uwarp_proto::setup::PeerData {
        uwarp_proto::setup::PeerData {
            qpn: self.qpn,
            rnr_retry: self.rnr_retry,
            ..uwarp_proto::setup::PeerData::new()
        }
    }
}

#[test]
fn this_host_refuses_to_begin() {
    let mut shell = Shell::resolved(true);
    shell.opens = Err(Refusal::Local(Errno::MFILE));
    for _ in 0..2 {
        shell.call(|life, now| life.connect(now, ours(b""), ConnParam::DEFAULT)).unwrap();
        assert_eq!(shell.did(), format!("connect, error {}", raw(Errno::MFILE)));
        assert_eq!((shell.life.state(), shell.life.poll_timeout()), (State::RouteResolved, None));
    }
    shell.opens = Ok(5);
    shell.call(|life, now| life.connect(now, ours(b""), ConnParam::DEFAULT)).unwrap();
    assert_eq!(shell.did(), "connect, send, ok");
    // What the first attempts may still hear is not the third one's.
    let old = Space::new(1).name();
    shell.input(Input::Failed { conn: old, why: Refusal::Refused });
    assert_eq!((shell.did(), shell.life.state()), (String::new(), State::Connecting));
    shell.destroyed();
}

/// Over loopback a refusal is there before `connect` returns. Programs wait for an event.
#[test]
fn a_refusal_is_an_event_however_early_it_comes() {
    for (why, event) in [
        (Refusal::Refused, "fail, Rejected 8"),
        (Refusal::Unreachable(Errno::NETUNREACH), "Unreachable -101"),
    ] {
        let mut shell = Shell::resolved(true);
        shell.opens = Err(why);
        shell.call(|life, now| life.connect(now, ours(b""), ConnParam::DEFAULT)).unwrap();
        assert!(shell.log.starts_with(&["connect".into(), "ok".into()]));
        shell.pass(Duration::from_secs(1));
        assert!(shell.did().ends_with(event));
        assert_eq!(shell.life.state(), State::Closed);
        shell.destroyed();
    }
}

/// Only the first attempt can make the call fail: later ones have an event.
#[test]
fn this_host_refuses_a_later_attempt() {
    let mut shell = Shell::resolved(true);
    shell.opens = Err(Refusal::Refused);
    shell.call(|life, now| life.connect(now, ours(b""), ConnParam::DEFAULT)).unwrap();
    assert_eq!(shell.did(), "connect, ok");
    shell.opens = Err(Refusal::Local(Errno::MFILE));
    shell.pass(Duration::from_secs(1));
    assert_eq!(shell.did(), format!("connect, ConnectError {}", -raw(Errno::MFILE)));
    shell.destroyed();
}

/// So that the program finds the completions, and not in any order.
#[test]
fn a_rejection_is_reported_when_the_queue_pair_is_flushed() {
    for (infiniband, status) in [(true, 28), (false, -raw(Errno::CONNREFUSED))] {
        let mut shell = Shell::connecting(infiniband, ours(b""));
        shell.prompt = false;
        shell.answer(|peer, now| peer.reject(now, b"no").unwrap());
        assert_eq!((shell.did(), shell.life.state()), ("close, fail".into(), State::Closed));
        shell.input(Input::Flushed);
        assert_eq!(shell.did(), format!("Rejected {status}"));
        assert_eq!(shell.private_data(), b"no");
        shell.input(Input::Flushed);
        shell.pass(Duration::from_secs(60));
        assert_eq!(shell.did(), "", "there was no connection, so no timewait");
        shell.destroyed();
    }
}

#[test]
fn a_rejection_is_not_reported_to_an_id_that_is_destroyed_meanwhile() {
    let mut shell = Shell::connecting(true, ours(b""));
    shell.prompt = false;
    shell.answer(|peer, now| peer.reject(now, b"no").unwrap());
    shell
        .call(|life, now| {
            life.destroy(now);
            Ok(())
        })
        .unwrap();
    shell.did();
    shell.input(Input::Flushed);
    assert_eq!(shell.did(), "");
    shell.destroyed();
}

#[test]
fn a_silent_peer_is_unreachable() {
    let mut shell = Shell::connecting(true, ours(b""));
    shell.pass(Timeouts::default().reply);
    assert_eq!(shell.did(), format!("close, Unreachable {}", -raw(Errno::TIMEDOUT)));
    shell.destroyed();
}

#[test]
fn a_queue_pair_that_takes_no_connection_tells_the_peer() {
    let mut shell = Shell::connecting(true, ours(b""));
    shell.attaches = Err(REFUSED);
    shell.accepted();
    assert_eq!(shell.did(), format!("attach, send, close, ConnectError {}", -raw(Errno::INVAL)));
    assert_eq!(shell.life.state(), State::Closed);
    let terminate = shell.wire.values().next_back().unwrap();
    assert_eq!(terminate[2..4], [0x41, 0x47], "a Terminate (RFC 6581 section 9.3)");
    shell.destroyed();

    let mut shell = Shell::requested(true);
    shell.attaches = Err(REFUSED);
    shell.call(|life, now| life.accept(now, ours(b""), None)).unwrap();
    // The call fails: no event.
    assert_eq!(shell.did(), format!("send, attach, send, close, error {}, settled", raw(Errno::INVAL)));
    assert_eq!(shell.life.state(), State::Closed);
    shell.destroyed();
}

#[test]
fn an_id_accepts() {
    for infiniband in [true, false] {
        let mut shell = Shell::accepting(infiniband);
        assert_eq!(shell.life.poll_timeout(), Some(shell.clock.get() + Timeouts::default().ready));
        shell.stream(StreamEvent::Established);
        assert_eq!((shell.did(), shell.life.state()), ("Established 0, settled".into(), State::Established));
        assert_eq!(shell.life.poll_timeout(), None);
        shell.stream(StreamEvent::Ended(Disconnect::PeerClosed));
        assert_eq!(shell.did(), "look, Disconnected 0");
        shell.destroyed();
    }
}

#[test]
fn a_peer_without_an_indication_is_established_when_it_is_accepted() {
    let mut shell = Shell::requested_by(true, plain());
    let requested = shell.life.peer_param();
    assert_eq!((requested.responder_resources, requested.initiator_depth), (128, 128), "our own limits");
    shell.call(|life, now| life.accept(now, ours(b""), None)).unwrap();
    assert_eq!(shell.did(), "send, attach, Established 0, ok, settled");
    assert_eq!(shell.life.poll_timeout(), None);
    shell.destroyed();
}

#[test]
fn a_stream_that_ends_before_it_is_established_is_an_error() {
    for mut shell in [Shell::accepting(true), {
        let mut shell = Shell::connecting(true, ours(b""));
        shell.accepted();
        shell.did();
        shell
    }] {
        shell.unpolled = true;
        shell.stream(StreamEvent::Ended(Disconnect::PeerClosed));
        assert!(shell.did().starts_with(&format!("ConnectError {}", -raw(Errno::CONNRESET))));
        shell.pass(Duration::from_secs(60));
        assert_eq!(shell.did(), "");
        shell.destroyed();
    }
}

#[test]
fn the_end_waits_until_the_completions_before_it_are_polled() {
    let ended = |infiniband, why| {
        let mut shell = Shell::established(infiniband);
        shell.unpolled = true;
        shell.stream(StreamEvent::Ended(why));
        shell
    };
    // Polled after two looks.
    let mut shell = ended(true, Disconnect::PeerClosed);
    shell.pass(UNPOLLED_LOOK);
    assert_eq!((shell.did(), shell.life.state()), ("look, look".into(), State::Established));
    shell.unpolled = false;
    shell.pass(UNPOLLED_LOOK);
    assert_eq!((shell.did(), shell.life.state()), ("look, Disconnected 0".into(), State::Closed));
    // Never polled.
    let mut shell = ended(false, Disconnect::PeerClosed);
    shell.pass(Timeouts::default().unpolled - Duration::from_millis(1));
    assert_eq!(shell.did(), ["look"; 10].join(", "));
    shell.pass(Duration::from_millis(1));
    assert_eq!(shell.did(), "Disconnected 0");
    // One that breaks: a short wait, in the views that pass for InfiniBand.
    let mut shell = ended(true, Disconnect::Reset);
    assert_eq!(shell.did(), "look");
    shell.pass(UNPOLLED_LOOK);
    assert_eq!(shell.did(), "Disconnected 0");
    for (infiniband, why) in [(false, Disconnect::Reset), (true, Disconnect::LocalClosed)] {
        assert_eq!(ended(infiniband, why).did(), "Disconnected 0");
    }
    // The program disconnects meanwhile.
    let mut shell = ended(true, Disconnect::PeerClosed);
    shell.did();
    assert_eq!(shell.call(|life, now| life.disconnect(now)), Ok(true), "the peer is left");
    assert_eq!(shell.did(), "Disconnected 0");
    shell.input(Input::Unpolled(false));
    assert_eq!(shell.did(), "");
    // Or it is destroyed.
    ended(true, Disconnect::PeerClosed).destroyed();
}

/// A stale timer of the indication or of the end once reported this too early (one nameless timer for all
/// three deadlines).
#[test]
fn deadlines_of_an_id_are_told_apart() {
    let mut shell = Shell::new(true);
    shell.life.set_ack_timeout(Some(30));
    shell.call(|life, _| life.resolve_address(THERE, Ok(here(0).ip()))).unwrap();
    shell.call(|life, _| life.resolve_route()).unwrap();
    shell.call(|life, now| life.connect(now, ours(b""), ConnParam::DEFAULT)).unwrap();
    shell.accepted();
    shell.stream(StreamEvent::Established);
    shell.unpolled = true;
    shell.stream(StreamEvent::Ended(Disconnect::PeerClosed));
    shell.did();
    assert_eq!(shell.call(|life, now| life.disconnect(now)), Ok(true), "the peer is left");
    assert_eq!(shell.did(), "Disconnected 0");
    // The times of the next look, of the longest wait and of the indication come.
    for time in
        [UNPOLLED_LOOK, Timeouts::default().unpolled, Timeouts::default().ready, Duration::from_secs(60)]
    {
        shell.clock.pass(time);
        shell.life.handle_timeout(&shell.clock.now());
        shell.run();
        assert_eq!(shell.did(), "");
    }
    shell.pass(timewait(Some(30)));
    assert_eq!(shell.did(), "TimewaitExit 0");
}

#[test]
fn a_refused_listen_leaves_the_id_bound() {
    let mut shell = Shell::new(true);
    assert!(shell.call(|life, _| life.listen(4, Budget::new(64))).is_err(), "not bound");
    shell.call(|life, _| life.bind(here(5))).unwrap();
    shell.listens = Err(Errno::ADDRINUSE);
    shell.call(|life, _| life.listen(4, Budget::new(64))).unwrap();
    assert_eq!(shell.did(), format!("listen, error {}", raw(Errno::ADDRINUSE)));
    assert_eq!((shell.life.state(), shell.life.local()), (State::Bound, Some(here(5))));
    shell.listens = Ok(());
    shell.call(|life, _| life.listen(4, Budget::new(64))).unwrap();
    assert_eq!((shell.did(), shell.life.state()), ("listen, ok".into(), State::Listening));
    shell.destroyed();
}

#[test]
fn an_address_without_a_route_is_an_event() {
    let mut shell = Shell::new(true);
    shell.call(|life, _| life.resolve_address(THERE, Err(Errno::NETUNREACH))).unwrap();
    assert_eq!(shell.did(), format!("AddressError {}", -raw(Errno::NETUNREACH)));
    assert_eq!(shell.life.state(), State::Bound);
    shell.call(|life, _| life.resolve_address(THERE, Ok(here(0).ip()))).unwrap();
    assert_eq!((shell.did(), shell.life.local()), ("AddressResolved 0".into(), Some(here(0))));
    let six = "[::1]:7".parse().unwrap();
    let mut shell = Shell::new(true);
    shell.call(|life, _| life.bind("0.0.0.0:5".parse().unwrap())).unwrap();
    assert!(shell.call(|life, _| life.resolve_address(six, Ok(six.ip()))).is_err());
    shell.call(|life, _| life.resolve_address(THERE, Ok(here(0).ip()))).unwrap();
    assert_eq!(shell.life.local(), Some(here(5)), "a wildcard becomes the address of the route");
}

#[test]
fn arguments_are_checked_before_anything_changes() {
    let long = [0; MAX_PRIVATE_DATA + 1];
    let deep = ConnParam { initiator_depth: 129, ..ConnParam::DEFAULT };
    let mut shell = Shell::resolved(true);
    assert_eq!(shell.call(|l, now| l.connect(now, ours(&long), ConnParam::DEFAULT)), Err(TOO_MUCH_DATA));
    assert!(shell.call(|l, now| l.connect(now, ours(b""), deep)).is_err());
    assert_eq!((shell.did(), shell.life.state()), (String::new(), State::RouteResolved));
    let mut shell = Shell::requested(true);
    assert_eq!(shell.call(|life, now| life.accept(now, ours(&long), None)), Err(TOO_MUCH_DATA));
    assert_eq!(shell.call(|life, now| life.reject(now, &long)), Err(TOO_MUCH_DATA));
    assert!(shell.call(|life, now| life.accept(now, ours(b""), Some(deep))).is_err());
    assert_eq!((shell.did(), shell.life.state()), (String::new(), State::RequestPending));
    shell.call(|life, now| life.accept(now, ours(&long[1..]), None)).unwrap();
    assert_eq!(shell.did(), "send, attach, ok");
}
