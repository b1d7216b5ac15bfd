//! Connecting, with a clock and a peer that the tests move.

use std::net::Ipv4Addr;

use uwarp_proto::setup::{Responder, Revision};
use uwarp_wire::mpa::FLAG_UWARP_A;

use super::super::testing::{self, Clock, Random, Seed};
use super::*;

fn address(host: u8) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 0, 0, host), 7000))
}

fn target() -> Target {
    let private_data = b"hello".to_vec();
    Target { local: None, peer: address(2), config: testing::initiator(), private_data, fall_back: true }
}

/// A machine, its clock, and what it has said.
struct World {
    clock: Clock,
    active: Active,
    /// The last connection that it began.
    conn: ConnKey,
}

impl World {
    fn new(target: Target) -> Self {
        let clock = Clock::new();
        let active = Active::start(&clock.now(), Space::new(3), Timeouts::default(), target).unwrap();
        let conn = Space::new(3).name();
        let mut world = Self { clock, active, conn };
        world.connects();
        world
    }

    fn input(&mut self, input: Input<'_>) {
        self.active.handle_input(&self.clock.now(), input);
    }

    /// Moves on to its deadline, after this long.
    fn wait(&mut self, time: Duration) {
        assert_eq!(self.active.deadline(), Some(self.clock.get() + time));
        self.clock.pass(time);
        self.active.handle_timeout(&self.clock.now());
        assert!(self.active.poll_timeout().is_none_or(|deadline| deadline > self.clock.get()));
    }

    /// The next action is a Connect.
    fn connects(&mut self) {
        let Some(Action::Connect { conn, from, to }) = self.active.poll_action() else { panic!() };
        assert_eq!((from, to), (self.active.target.local, address(2)));
        assert_eq!(self.active.poll_transmit(), None, "the shell does not know the connection yet");
        self.conn = conn;
        self.idle();
    }

    /// The connection begins, and takes no bytes yet.
    fn opens(&mut self) {
        self.input(Input::Opened { conn: self.conn, local: address(1) });
        let action = self.active.poll_action();
        assert!(matches!(action, Some(Action::Report(Report::ConnectingFrom(local))) if local == address(1)));
        self.idle();
    }

    /// Sends the request; it is returned.
    fn asks(&mut self) -> Vec<u8> {
        self.opens();
        let conn = self.conn;
        self.input(Input::Sent { conn, bytes: 0 });
        assert_eq!(self.active.poll_transmit(), None);
        self.input(Input::Room { conn });
        self.sends()
    }

    fn sends(&mut self) -> Vec<u8> {
        let Some(Transmit::Bytes { conn, bytes }) = self.active.poll_transmit() else { panic!() };
        assert_eq!(conn, self.conn);
        let bytes = bytes.to_vec();
        self.input(Input::Sent { conn, bytes: bytes.len() });
        assert_eq!(self.active.poll_transmit(), None);
        bytes
    }

    fn fails(&mut self, why: Refusal) {
        self.input(Input::Failed { conn: self.conn, why });
    }

    fn ends(&mut self) {
        self.input(Input::End { conn: self.conn });
    }

    fn receives(&mut self, mut input: &[u8]) {
        while let Want::Bytes(want) = self.active.want(self.conn)
            && !input.is_empty()
        {
            let (now, rest) = input.split_at(want.min(input.len()));
            input = rest;
            self.input(Input::Bytes { conn: self.conn, bytes: now });
        }
    }

    fn closes(&mut self, expected: Close) {
        let action = self.active.poll_action();
        let Some(Action::Close { conn, how }) = action else { panic!("{action:?}") };
        assert_eq!((conn, how), (self.conn, expected));
    }

    fn has_failed(&mut self, expected: (EventKind, Errno)) {
        let action = self.active.poll_action();
        let Some(Action::Report(Report::Failed { kind, errno, .. })) = action else { panic!("{action:?}") };
        assert_eq!((kind, errno), expected);
        self.over();
    }

    fn idle(&mut self) {
        let action = self.active.poll_action();
        assert!(action.is_none(), "{action:?}");
    }

    /// Nothing is left of it.
    fn over(&mut self) {
        self.idle();
        assert_eq!((self.active.poll_timeout(), self.active.poll_transmit()), (None, None));
        assert_eq!(self.active.want(self.conn), Want::Nothing);
        let before = format!("{:?}", self.active);
        self.ends();
        self.fails(Refusal::Refused);
        self.clock.pass_ms(100_000);
        self.active.handle_timeout(&self.clock.now());
        assert_eq!(format!("{:?}", self.active), before, "an input for a connection that is over");
    }
}

fn reply_to(request: &[u8], accept: bool) -> Vec<u8> {
    let mut responder = Responder::new(testing::responder());
    let (fixed, rest) = request.split_at(20);
    responder.handle_input(fixed).unwrap();
    responder.handle_input(rest).unwrap().unwrap();
    if accept {
        responder.accept(testing::terms(), b"welcome").unwrap();
    } else {
        responder.reject(b"no").unwrap();
    }
    responder.poll_transmit().unwrap()
}

/// The log's lines of one thread.
struct Lines(std::sync::mpsc::Sender<String>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Message<'a>(&'a Lines);
        impl tracing::field::Visit for Message<'_> {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.0.send(format!("{value:?}")).unwrap();
            }
        }
        event.record(&mut Message(self));
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

impl Lines {
    /// What was said meanwhile.
    fn of(run: impl FnOnce()) -> Vec<String> {
        let (lines, said) = std::sync::mpsc::channel();
        tracing::subscriber::with_default(Self(lines), run);
        said.iter().collect()
    }
}

/// For a minute it was silent, in both cases.
#[test]
fn a_peer_that_is_silent_is_named_after_three_seconds_and_at_the_end() {
    for (connected, first) in [(false, "no answer from "), (true, "connected to ")] {
        let mut world = World::new(target());
        let said = Lines::of(|| {
            if connected {
                world.asks();
            }
            world.clock.pass_ms(2_999);
            world.active.handle_timeout(&world.clock.now());
        });
        assert!(said.is_empty(), "{said:?}");
        let said = Lines::of(|| {
            world.clock.pass_ms(1);
            world.active.handle_timeout(&world.clock.now());
            world.clock.pass_ms(5_000);
            world.active.handle_timeout(&world.clock.now());
        });
        let [line] = &said[..] else { panic!("{said:?}") };
        assert!(line.starts_with(first) && line.contains(" for 3 s: "), "{line}");
        let said = Lines::of(|| {
            world.clock.pass_ms(600_000);
            world.active.handle_timeout(&world.clock.now());
        });
        let [line] = &said[..] else { panic!("{said:?}") };
        assert!(line.starts_with(first) && line.contains(" within 60 s: given up"), "{line}");
    }
    // Queue pairs that are connected by number have words of their own.
    let mut world = World::new(Target { fall_back: false, ..target() });
    let said = Lines::of(|| {
        world.clock.pass_ms(600_000);
        world.active.handle_timeout(&world.clock.now());
    });
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn an_accepted_connection_is_the_owners() {
    let mut world = World::new(target());
    let request = world.asks();
    assert_eq!(world.active.deadline(), Some(world.clock.get() + Duration::from_secs(60)));
    world.receives(&reply_to(&request, true));
    let Some(Action::Report(Report::Accepted { conn, said })) = world.active.poll_action() else { panic!() };
    assert_eq!((conn, said.private_data.as_slice()), (world.conn, b"welcome".as_slice()));
    world.over();
}

#[test]
fn a_rejected_connection_is_closed_first() {
    let mut world = World::new(target());
    let request = world.asks();
    world.receives(&reply_to(&request, false));
    world.closes(Close::Finish);
    let Some(Action::Report(Report::Rejected(rejection))) = world.active.poll_action() else { panic!() };
    assert_eq!(rejection.private_data, b"no");
    world.over();
}

#[test]
fn tcp_and_the_reply_have_limits_of_their_own() {
    let mut world = World::new(target());
    world.opens();
    world.wait(Duration::from_secs(60));
    world.closes(Close::Finish);
    world.has_failed((EventKind::Unreachable, Errno::TIMEDOUT));

    let mut world = World::new(target());
    world.opens();
    world.clock.pass_ms(59_000);
    world.sends();
    world.wait(Duration::from_secs(60));
    world.closes(Close::Finish);
    world.has_failed((EventKind::Unreachable, Errno::TIMEDOUT));
}

#[test]
fn a_refusal_counts_when_it_has_been_repeated() {
    let mut world = World::new(target());
    for pause in [5, 10, 20, 40, 80, 160] {
        world.fails(Refusal::Refused);
        world.idle();
        world.wait(Duration::from_millis(pause));
        world.connects();
    }
    world.fails(Refusal::Refused);
    world.has_failed((EventKind::Rejected, Errno::CONNREFUSED));
}

#[test]
fn other_failures_count_at_once() {
    for (why, expected) in [
        (Refusal::Unreachable(Errno::HOSTUNREACH), (EventKind::Unreachable, Errno::HOSTUNREACH)),
        (Refusal::Unreachable(Errno::TIMEDOUT), (EventKind::Unreachable, Errno::TIMEDOUT)),
        (Refusal::Local(Errno::MFILE), (EventKind::ConnectError, Errno::MFILE)),
    ] {
        let mut world = World::new(target());
        world.fails(why);
        let action = world.active.poll_action();
        let Some(Action::Report(Report::Failed { kind, errno, begun })) = action else { panic!() };
        assert_eq!((kind, errno, begun), (expected.0, expected.1, false), "within the program's call");
        world.over();
        let mut world = World::new(target());
        world.asks();
        world.fails(why);
        assert!(world.active.begun);
        world.has_failed(expected);
    }
}

/// A peer that closed silently was asked again plainer at once: a uwarp end under load became a stranger.
#[test]
fn a_silent_end_is_repeated_before_a_plainer_request() {
    let flags = |request: &[u8]| (request[16] & FLAG_UWARP_A != 0, request[17]);
    for local in [None, Some(address(1))] {
        let how = if local.is_some() { Close::Reset } else { Close::Finish };
        let mut world = World::new(Target { local, ..target() });
        let first = world.asks();
        world.ends();
        world.closes(how);
        world.idle();
        world.wait(FIRST_PAUSE);
        world.connects();
        assert_eq!(world.asks(), first, "the same request again");
        // The connection broke, so the shell has dropped it.
        world.fails(Refusal::Gone);
        world.connects();
        let plainer = world.asks();
        world.ends();
        world.closes(how);
        world.connects();
        let plainest = world.asks();
        assert_eq!(
            [&first, &plainer, &plainest].map(|request| flags(request)),
            [(true, 2), (false, 2), (false, 1)]
        );
        world.ends();
        world.closes(Close::Finish);
        world.has_failed((EventKind::Rejected, Errno::CONNRESET));
    }
}

/// Two uwarp ends by number became strangers.
#[test]
fn by_number_no_request_is_plainer() {
    let mut world = World::new(Target { fall_back: false, ..target() });
    let first = world.asks();
    world.ends();
    world.closes(Close::Finish);
    world.wait(FIRST_PAUSE);
    world.connects();
    assert_eq!(world.asks(), first);
    world.ends();
    world.closes(Close::Finish);
    world.has_failed((EventKind::Rejected, Errno::CONNRESET));
}

#[test]
fn a_peer_that_is_not_enhanced_gets_revision_one() {
    let not_enhanced = [b"MPA ID Rep Frame".as_slice(), &[0, 1, 0, 0]].concat();
    let mut world = World::new(target());
    world.asks();
    world.receives(&not_enhanced);
    world.closes(Close::Finish);
    world.connects();
    assert_eq!(world.active.target.config.revision, Revision::One);
    world.asks();
    world.receives(&not_enhanced);
    let Some(Action::Report(Report::Accepted { said, .. })) = world.active.poll_action() else { panic!() };
    assert_eq!(said.revision, Revision::One);
    world.over();

    let mut world = World::new(Target { fall_back: false, ..target() });
    world.asks();
    world.receives(&not_enhanced);
    world.closes(Close::Finish);
    world.has_failed((EventKind::ConnectError, Errno::PROTO));
}

#[test]
fn a_refusal_of_a_plainer_request_repeats_that() {
    let mut world = World::new(target());
    world.active.repeated = true;
    world.asks();
    world.ends();
    world.closes(Close::Finish);
    world.connects();
    world.fails(Refusal::Refused);
    world.wait(FIRST_PAUSE);
    world.connects();
    assert_eq!(world.active.target.config.peer, None);
}

/// Its ORD is above every limit of ours.
fn greedy() -> Vec<u8> {
    [b"MPA ID Rep Frame".as_slice(), &[0x50, 2, 0, 4, 0x80, 0x10, 0x80, 0x81]].concat()
}

#[test]
fn a_terminate_goes_before_the_end() {
    let expected = (EventKind::ConnectError, Errno::NOMEM);
    let mut world = World::new(target());
    world.asks();
    world.receives(&greedy());
    world.idle();
    let Some(Transmit::Bytes { bytes, .. }) = world.active.poll_transmit() else { panic!() };
    let all = bytes.len();
    world.input(Input::Sent { conn: world.conn, bytes: all - 1 });
    world.idle();
    world.input(Input::Sent { conn: world.conn, bytes: 1 });
    world.closes(Close::Finish);
    world.has_failed(expected);

    let mut world = World::new(target());
    world.asks();
    world.receives(&greedy());
    world.input(Input::Sent { conn: world.conn, bytes: 0 });
    world.closes(Close::Finish);
    world.has_failed(expected);

    let mut world = World::new(target());
    world.asks();
    world.receives(&greedy());
    world.fails(Refusal::Gone);
    world.has_failed(expected);
}

#[test]
fn a_cancelled_one_closes_and_says_nothing() {
    let cancelled = |mut world: World, how: Option<Close>| {
        world.active.cancel();
        if let Some(how) = how {
            world.closes(how);
        }
        world.over();
        world.active.cancel();
        world.over();
    };
    let connecting = World::new(target());
    cancelled(connecting, Some(Close::Finish));
    let mut asking = World::new(target());
    asking.asks();
    cancelled(asking, Some(Close::Finish));
    let mut paused = World::new(target());
    paused.fails(Refusal::Refused);
    cancelled(paused, None);
    let mut accepted = World::new(target());
    let request = accepted.asks();
    accepted.receives(&reply_to(&request, true));
    cancelled(accepted, Some(Close::Finish));
    let mut leaving = World::new(target());
    leaving.asks();
    leaving.receives(&greedy());
    cancelled(leaving, Some(Close::Finish));
    let mut rejected = World::new(target());
    let request = rejected.asks();
    rejected.receives(&reply_to(&request, false));
    cancelled(rejected, Some(Close::Finish));
    let mut fresh = World::new(target());
    fresh.fails(Refusal::Refused);
    fresh.clock.pass_ms(5);
    fresh.active.handle_timeout(&fresh.clock.now());
    cancelled(fresh, None);
}

#[test]
fn private_data_that_does_not_fit_is_the_callers_error() {
    let target = Target { private_data: vec![0; 600], ..target() };
    let error = Active::start(&Clock::new().now(), Space::new(0), Timeouts::default(), target).unwrap_err();
    assert!(matches!(error, SetupError::PrivateDataLimit { .. }));
}

/// One run with any peer, network and program.
struct Trial {
    random: Random,
    clock: Clock,
    begin: Instant,
    active: Active,
    /// The open connection, and what was sent on it.
    open: Option<(ConnKey, Vec<u8>)>,
    /// Which last report came: accepted, rejected, failed.
    outcome: Option<usize>,
    cancelled: bool,
}

impl Trial {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let clock = Clock::new();
        let local = random.one_in(2).then(|| address(1));
        let target = Target { local, fall_back: random.one_in(2), ..target() };
        let active = Active::start(&clock.now(), Space::new(0), Timeouts::default(), target).unwrap();
        Self { random, begin: clock.get(), clock, active, open: None, outcome: None, cancelled: false }
    }

    /// Runs until the last report or a cancel.
    fn run(&mut self) {
        loop {
            self.send();
            while self.act() {
                self.send();
            }
            if self.outcome.is_some() || self.cancelled {
                break;
            }
            self.happen();
        }
        assert!(self.open.is_none(), "a connection is left");
        assert_eq!((self.active.poll_timeout(), self.active.poll_transmit()), (None, None));
        // Seven connections that are refused, one repetition, two plainer ones, each with both limits.
        assert!(self.clock.get() - self.begin <= Duration::from_secs(11 * 120));
    }

    fn input(&mut self, input: Input<'_>) {
        self.active.handle_input(&self.clock.now(), input);
    }

    fn send(&mut self) {
        while let Some(Transmit::Bytes { conn, bytes }) = self.active.poll_transmit() {
            let (own, sent) = self.open.as_mut().expect("it sends on an open connection");
            assert_eq!(conn, *own);
            let part = self.random.one_in(3);
            let taken = if part { self.random.below(bytes.len() + 1) } else { bytes.len() };
            sent.extend_from_slice(&bytes[..taken]);
            self.input(Input::Sent { conn, bytes: taken });
        }
    }

    /// Takes all actions; returns whether there were any.
    fn act(&mut self) -> bool {
        let mut any = false;
        while let Some(action) = self.active.poll_action() {
            any = true;
            assert!(self.outcome.is_none(), "{action:?} after the last report");
            match action {
                Action::Connect { conn, .. } => self.connect(conn),
                Action::Close { conn, .. } => {
                    let (own, _) = self.open.take().expect("it closes an open connection");
                    assert_eq!(own, conn);
                }
                Action::Report(_) if self.cancelled => panic!("reported after cancel"),
                Action::Report(Report::ConnectingFrom(_)) => {}
                Action::Report(Report::Accepted { conn, .. }) => {
                    assert_eq!(self.open.take().map(|(own, _)| own), Some(conn));
                    self.outcome = Some(0);
                }
                Action::Report(Report::Rejected(_)) => self.outcome = Some(1),
                Action::Report(Report::Failed { .. }) => self.outcome = Some(2),
                action => panic!("{action:?}"),
            }
        }
        any
    }

    fn connect(&mut self, conn: ConnKey) {
        assert!(self.open.is_none() && !self.cancelled);
        if self.random.one_in(3) {
            self.input(Input::Failed { conn, why: Refusal::Refused });
        } else {
            self.open = Some((conn, Vec::new()));
            self.input(Input::Opened { conn, local: address(1) });
        }
    }

    /// One event, at any moment before the deadline.
    fn happen(&mut self) {
        let deadline = self.active.poll_timeout().expect("it waits for no one without a limit");
        assert!(deadline > self.clock.get());
        let conn = self.open.as_ref().map(|(conn, _)| *conn);
        match (self.random.below(24), conn) {
            (0..3, _) => {
                self.clock.reach(deadline);
                self.active.handle_timeout(&self.clock.now());
            }
            (3, _) => self.active.handle_timeout(&self.clock.now()),
            (4..10, Some(conn)) => self.input(Input::Room { conn }),
            (10, Some(conn)) => self.input(Input::End { conn }),
            (11, Some(conn)) => {
                let why = [Refusal::Gone, Refusal::Refused, Refusal::Local(Errno::NOBUFS)];
                self.open = None;
                let why = why[self.random.below(3)];
                self.input(Input::Failed { conn, why });
            }
            (12, _) if self.random.one_in(8) => {
                self.active.cancel();
                self.cancelled = true;
            }
            (13..22, Some(_)) => self.answer(),
            _ => {}
        }
    }

    /// The peer replies, well or badly, or does not know the whole request yet.
    fn answer(&mut self) {
        let (conn, sent) = self.open.as_ref().unwrap();
        let conn = *conn;
        let Want::Bytes(want) = self.active.want(conn) else { panic!() };
        let whole = sent.len() > 20 && sent.len() == 20 + usize::from(sent[19]);
        let reply = match self.random.below(4) {
            0 => greedy(),
            1 => vec![b'?'; 20],
            how if whole => reply_to(sent, how == 2),
            _ => return,
        };
        let mut reply = reply.as_slice();
        assert!(want <= 20);
        while let Want::Bytes(want) = self.active.want(conn)
            && !reply.is_empty()
        {
            let (some, rest) = reply.split_at(want.min(reply.len()));
            reply = rest;
            self.input(Input::Bytes { conn, bytes: some });
        }
    }
}

/// Any peer, network and program: connections are closed once and by one end, nothing is heard after the
/// last report, and it ends in bounded time.
#[test]
fn any_order_of_events() {
    let mut reported = [0_u32; 4];
    for seed in 0..3000 {
        let seed = Seed(seed);
        let mut trial = Trial::new(seed.0);
        trial.run();
        reported[trial.outcome.unwrap_or(3)] += 1;
    }
    assert!(reported.iter().all(|&times| times > 50), "what is not tried is not tested: {reported:?}");
}
