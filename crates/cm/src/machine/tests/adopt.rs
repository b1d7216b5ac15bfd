//! Each row of the table, and two ends over a connection with faults at any moment.

use uwarp_llp::carrier::Refusal;

use super::super::testing::{self, Clock, Random, Seed};
use super::*;

const LIMIT: Duration = Duration::from_secs(30);

/// What the program of each end expects.
fn speaks(data: &[u8]) -> bool {
    data.starts_with(b"hello")
}

fn initiator(clock: &Clock, data: &[u8]) -> Adopt {
    Adopt::new(&clock.now(), Role::Initiator(testing::initiator()), data, speaks, LIMIT).unwrap()
}

fn responder(clock: &Clock, data: &[u8]) -> Adopt {
    let role = Role::Responder(testing::responder(), testing::terms());
    Adopt::new(&clock.now(), role, data, speaks, LIMIT).unwrap()
}

/// What an end does with its connection, beside sending.
#[derive(Debug, PartialEq, Eq)]
enum Did {
    Closed,
    Attached(bool),
    Disconnected,
    Reported(Report),
}

fn failed(errno: Errno) -> Did {
    Did::Reported(Report::Failed(errno))
}

fn did(end: &mut Adopt) -> Vec<Did> {
    let conn = end.conn();
    std::iter::from_fn(|| end.poll_action())
        .map(|action| match action {
            Action::Close { conn: of, how: Close::Finish } if of == conn => Did::Closed,
            Action::Attach { conn: of, to: Recipient::Own, said, .. } if of == conn => {
                assert!(said.private_data.is_empty());
                Did::Attached(said.initiator)
            }
            Action::Disconnect { conn: of, .. } if of == conn => Did::Disconnected,
            Action::Report(report) => Did::Reported(report),
            other => panic!("{other:?}"),
        })
        .collect()
}

fn input(end: &mut Adopt, clock: &Clock, input: impl FnOnce(ConnKey) -> Input<'static>) {
    let input = input(end.conn());
    end.handle_input(&clock.now(), input);
}

fn stream(end: &mut Adopt, clock: &Clock, event: StreamEvent) {
    input(end, clock, |conn| Input::Stream { conn, event });
}

/// All that an end sends now.
fn sent(end: &mut Adopt, clock: &Clock) -> Vec<u8> {
    let mut all = Vec::new();
    let own = end.conn();
    while let Some(Transmit::Bytes { conn, bytes }) = end.poll_transmit() {
        assert_eq!(conn, own);
        let bytes = bytes.to_vec();
        all.extend_from_slice(&bytes);
        input(end, clock, |conn| Input::Sent { conn, bytes: bytes.len() });
    }
    all
}

/// Gives an end these bytes, never more at once than it wants; returns the rest.
fn feed<'a>(end: &mut Adopt, clock: &Clock, mut bytes: &'a [u8]) -> &'a [u8] {
    while let Want::Bytes(want) = end.want(end.conn())
        && !bytes.is_empty()
    {
        let (now, rest) = bytes.split_at(want.min(bytes.len()));
        bytes = rest;
        let conn = end.conn();
        end.handle_input(&clock.now(), Input::Bytes { conn, bytes: now });
    }
    bytes
}

/// An initiator and a responder that have given their connections away.
fn attaching(clock: &Clock) -> [Adopt; 2] {
    let [mut asks, mut answers] = [initiator(clock, b"hello, a"), responder(clock, b"hello, b")];
    assert!(feed(&mut answers, clock, &sent(&mut asks, clock)).is_empty());
    assert_eq!(did(&mut answers), [], "only behind the reply");
    let mut reply = sent(&mut answers, clock);
    reply.extend_from_slice(b"first FPDU");
    assert_eq!(feed(&mut asks, clock, &reply), b"first FPDU");
    assert_eq!(did(&mut answers), [Did::Attached(false)]);
    assert_eq!(did(&mut asks), [Did::Attached(true)]);
    [asks, answers]
}

/// Nothing is sent, done or waited for, whatever comes.
fn is_over(end: &mut Adopt, clock: &Clock) {
    for _ in 0..2 {
        assert_eq!((end.poll_timeout(), end.want(end.conn())), (None, Want::Nothing));
        assert_eq!(end.poll_transmit(), None);
        assert_eq!(did(end), []);
        end.handle_timeout(&clock.now());
        end.cancel();
        for event in [
            StreamEvent::Attached,
            StreamEvent::Refused(VerbsError::Busy),
            StreamEvent::Established,
            StreamEvent::Ended(Disconnect::Reset),
        ] {
            stream(end, clock, event);
        }
        input(end, clock, |conn| Input::End { conn });
        input(end, clock, |conn| Input::Failed { conn, why: Refusal::Gone });
        input(end, clock, |conn| Input::Bytes { conn, bytes: b"MPA" });
    }
}

#[test]
fn both_ends_get_their_stream() {
    let clock = Clock::new();
    for (mut end, peers) in attaching(&clock).into_iter().zip([b"hello, b", b"hello, a"]) {
        assert_eq!((end.want(end.conn()), end.poll_timeout()), (Want::Nothing, Some(clock.get() + LIMIT)));
        stream(&mut end, &clock, StreamEvent::Attached);
        assert_eq!(did(&mut end), []);
        assert_eq!(end.poll_timeout(), Some(clock.get() + LIMIT));
        stream(&mut end, &clock, StreamEvent::Established);
        assert_eq!(did(&mut end), [Did::Reported(Report::Adopted(peers.to_vec()))]);
        assert_eq!(end.poll_timeout(), None);
        stream(&mut end, &clock, StreamEvent::Used);
        assert_eq!(did(&mut end), []);
        stream(&mut end, &clock, StreamEvent::Ended(Disconnect::PeerClosed));
        assert_eq!(did(&mut end), [Did::Reported(Report::Ended(None))]);
        is_over(&mut end, &clock);
    }
}

#[test]
fn a_stream_may_run_or_end_before_the_shell_knows_that_it_is_attached() {
    let clock = Clock::new();
    for mut end in attaching(&clock) {
        stream(&mut end, &clock, StreamEvent::Established);
        assert!(matches!(did(&mut end)[..], [Did::Reported(Report::Adopted(_))]));
        stream(&mut end, &clock, StreamEvent::Attached);
        stream(&mut end, &clock, StreamEvent::Established);
        assert_eq!((did(&mut end), end.poll_timeout()), (vec![], None));
        stream(&mut end, &clock, StreamEvent::Ended(Disconnect::Timeout));
        assert_eq!(did(&mut end), [Did::Reported(Report::Ended(Some(Errno::TIMEDOUT)))]);
        is_over(&mut end, &clock);
    }
    for mut end in attaching(&clock) {
        stream(&mut end, &clock, StreamEvent::Ended(Disconnect::PeerClosed));
        assert_eq!(did(&mut end), [Did::Disconnected, failed(Errno::CONNRESET)]);
        stream(&mut end, &clock, StreamEvent::Attached);
        is_over(&mut end, &clock);
    }
}

#[test]
fn a_stream_that_ends_before_it_runs_has_failed() {
    let clock = Clock::new();
    for mut end in attaching(&clock) {
        stream(&mut end, &clock, StreamEvent::Attached);
        stream(&mut end, &clock, StreamEvent::Ended(Disconnect::Reset));
        assert_eq!(did(&mut end), [Did::Disconnected, failed(Errno::CONNRESET)]);
        is_over(&mut end, &clock);
    }
}

/// A queue pair that was destroyed, or whose last owner has dropped it: the peer hears of it at once, not
/// when the limit is over.
#[test]
fn a_queue_pair_that_is_gone_ends_the_connection() {
    let clock = Clock::new();
    for mut end in attaching(&clock) {
        stream(&mut end, &clock, StreamEvent::Refused(VerbsError::Invalid("destroyed")));
        assert_eq!(did(&mut end), [], "only behind the Terminate");
        assert!(!sent(&mut end, &clock).is_empty(), "a Terminate");
        assert_eq!(did(&mut end), [Did::Closed, failed(Errno::INVAL)]);
        is_over(&mut end, &clock);
    }
    // Without room for it.
    for mut end in attaching(&clock) {
        stream(&mut end, &clock, StreamEvent::Refused(VerbsError::NoResources("")));
        assert!(end.poll_transmit().is_some());
        input(&mut end, &clock, |conn| Input::Sent { conn, bytes: 0 });
        assert_eq!(did(&mut end), [Did::Closed, failed(Errno::NOMEM)]);
        is_over(&mut end, &clock);
    }
    // And without a connection.
    for mut end in attaching(&clock) {
        stream(&mut end, &clock, StreamEvent::Refused(VerbsError::Busy));
        input(&mut end, &clock, |conn| Input::Failed { conn, why: Refusal::Gone });
        assert_eq!(did(&mut end), [failed(Errno::BUSY)]);
        is_over(&mut end, &clock);
    }
}

#[test]
fn data_that_is_not_expected_is_refused_in_words() {
    let clock = Clock::new();
    let [mut asks, mut answers] = [initiator(&clock, b"hi"), responder(&clock, b"hello")];
    feed(&mut answers, &clock, &sent(&mut asks, &clock));
    assert_eq!(did(&mut answers), [], "only behind the rejection");
    let rejection = sent(&mut answers, &clock);
    assert_eq!(did(&mut answers), [Did::Closed, failed(Errno::CONNREFUSED)]);
    feed(&mut asks, &clock, &rejection);
    assert_eq!(did(&mut asks), [Did::Closed, failed(Errno::CONNREFUSED)]);
    is_over(&mut asks, &clock);
    is_over(&mut answers, &clock);

    let [mut asks, mut answers] = [initiator(&clock, b"hello"), responder(&clock, b"hi")];
    feed(&mut answers, &clock, &sent(&mut asks, &clock));
    feed(&mut asks, &clock, &sent(&mut answers, &clock));
    assert_eq!(did(&mut asks), [], "only behind the Terminate");
    assert!(!sent(&mut asks, &clock).is_empty());
    assert_eq!(did(&mut asks), [Did::Closed, failed(Errno::CONNREFUSED)]);
    is_over(&mut asks, &clock);
}

#[test]
fn what_is_not_mpas_ends_the_connection() {
    let clock = Clock::new();
    for mut end in [initiator(&clock, b""), responder(&clock, b"")] {
        sent(&mut end, &clock);
        feed(&mut end, &clock, b"GET / HTTP/1.1\r\nHost: x\r\n");
        assert_eq!(did(&mut end), [Did::Closed, failed(Errno::PROTO)]);
        is_over(&mut end, &clock);
    }
    // A reply with an ORD above every limit: the framing is known.
    let mut end = initiator(&clock, b"");
    sent(&mut end, &clock);
    feed(&mut end, &clock, b"MPA ID Rep Frame\x50\x02\x00\x04\x80\x10\x80\x81");
    assert!(!sent(&mut end, &clock).is_empty(), "a Terminate");
    assert_eq!(did(&mut end), [Did::Closed, failed(Errno::PROTO)]);
    is_over(&mut end, &clock);
    // More private data than a frame holds.
    let too_long = [0; 600];
    let role = Role::Initiator(testing::initiator());
    assert_eq!(Adopt::new(&clock.now(), role, &too_long, speaks, LIMIT).err(), Some(Errno::INVAL));
    let mut answers = responder(&clock, &too_long);
    feed(&mut answers, &clock, &sent(&mut initiator(&clock, b"hello"), &clock));
    assert_eq!(did(&mut answers), [Did::Closed, failed(Errno::PROTO)]);
    is_over(&mut answers, &clock);
}

#[test]
fn a_peer_that_is_gone_ends_the_connection() {
    let clock = Clock::new();
    let replying = || {
        let mut end = responder(&clock, b"hello");
        feed(&mut end, &clock, &sent(&mut initiator(&clock, b"hello"), &clock));
        assert_eq!(end.want(end.conn()), Want::End);
        end
    };
    for mut end in [initiator(&clock, b""), responder(&clock, b""), replying()] {
        input(&mut end, &clock, |conn| Input::End { conn });
        assert_eq!(did(&mut end), [Did::Closed, failed(Errno::CONNRESET)]);
        is_over(&mut end, &clock);
    }
    for (why, errno) in [
        (Refusal::Gone, Errno::CONNRESET),
        (Refusal::Unreachable(Errno::HOSTUNREACH), Errno::HOSTUNREACH),
        (Refusal::Local(Errno::NOBUFS), Errno::NOBUFS),
    ] {
        for mut end in [initiator(&clock, b""), responder(&clock, b""), replying()] {
            input(&mut end, &clock, |conn| Input::Failed { conn, why });
            assert_eq!(did(&mut end), [failed(errno)]);
            is_over(&mut end, &clock);
        }
    }
}

/// Every state before the stream runs, each with whether the queue pair has the connection.
fn unfinished(clock: &Clock) -> Vec<(Adopt, bool)> {
    let mut replying = responder(clock, b"hello");
    feed(&mut replying, clock, &sent(&mut initiator(clock, b"hello"), clock));
    let mut all = vec![(initiator(clock, b""), false), (responder(clock, b""), false), (replying, false)];
    all.extend(attaching(clock).map(|end| (end, true)));
    all.extend(attaching(clock).map(|mut end| {
        stream(&mut end, clock, StreamEvent::Attached);
        (end, true)
    }));
    all
}

#[test]
fn all_of_set_up_has_one_limit() {
    let mut clock = Clock::new();
    for (mut end, has_stream) in unfinished(&clock) {
        let deadline = end.poll_timeout().unwrap();
        end.handle_timeout(&Now::at(deadline - Duration::from_nanos(1)));
        assert_eq!(did(&mut end), [], "early");
        end.handle_timeout(&Now::at(deadline));
        end.handle_timeout(&Now::at(deadline));
        let ends = if has_stream { Did::Disconnected } else { Did::Closed };
        assert_eq!(did(&mut end), [ends, failed(Errno::TIMEDOUT)]);
        assert_eq!((end.poll_timeout(), end.poll_transmit()), (None, None));
    }
    clock.pass(LIMIT);
    let role = Role::Responder(testing::responder(), testing::terms());
    let end = Adopt::new(&clock.now(), role, b"", speaks, Duration::MAX).unwrap();
    assert_eq!(end.poll_timeout(), None);
}

#[test]
fn a_cancelled_adoption_reports_nothing() {
    let clock = Clock::new();
    for (mut end, has_stream) in unfinished(&clock) {
        assert_eq!(end.cancel(), None);
        assert_eq!(did(&mut end), [if has_stream { Did::Disconnected } else { Did::Closed }]);
        end.cancel();
        assert_eq!((did(&mut end), end.poll_timeout(), end.poll_transmit()), (vec![], None, None));
    }
    // The shell has not begun to attach: the queue pair never sees it.
    let mut asks = initiator(&clock, b"hello");
    let mut answers = responder(&clock, b"hello");
    feed(&mut answers, &clock, &sent(&mut asks, &clock));
    sent(&mut answers, &clock);
    answers.cancel();
    assert_eq!(did(&mut answers), [Did::Closed]);
    is_over(&mut answers, &clock);
    // A rejection that is not sent, and a report that is not taken.
    for with_report in [false, true] {
        let mut answers = responder(&clock, b"hello");
        feed(&mut answers, &clock, &sent(&mut initiator(&clock, b"hi"), &clock));
        if with_report {
            sent(&mut answers, &clock);
        }
        answers.cancel();
        assert_eq!(did(&mut answers), [Did::Closed]);
        is_over(&mut answers, &clock);
    }
}

/// Also where the report was not taken yet, or is on its way to the program at this moment.
#[test]
fn who_cancels_a_stream_that_runs_is_given_its_private_data() {
    let clock = Clock::new();
    for is_taken in [false, true] {
        for (mut end, data) in attaching(&clock).into_iter().zip([b"hello, b", b"hello, a"]) {
            stream(&mut end, &clock, StreamEvent::Attached);
            stream(&mut end, &clock, StreamEvent::Established);
            if is_taken {
                assert_eq!(did(&mut end), [Did::Reported(Report::Adopted(data.to_vec()))]);
            }
            assert_eq!(end.cancel(), Some(data.to_vec()));
            assert_eq!((end.cancel(), did(&mut end)), (None, vec![]));
            is_over(&mut end, &clock);
        }
    }
}

/// The end of its stream was reported.
#[test]
fn a_cancelled_adoption_does_not_report_the_end_of_its_stream() {
    let clock = Clock::new();
    for mut end in attaching(&clock) {
        stream(&mut end, &clock, StreamEvent::Attached);
        stream(&mut end, &clock, StreamEvent::Established);
        let taken = did(&mut end);
        assert!(matches!(taken[..], [Did::Reported(Report::Adopted(_))]), "{taken:?}");
        end.cancel();
        stream(&mut end, &clock, StreamEvent::Ended(Disconnect::PeerClosed));
        assert_eq!(did(&mut end), vec![]);
        is_over(&mut end, &clock);
    }
}

/// The shell brings the connection back, and nobody else closes it.
#[test]
fn a_refusal_after_the_end_closes_the_connection() {
    let clock = Clock::new();
    for mut end in attaching(&clock) {
        end.cancel();
        assert_eq!(did(&mut end), [Did::Disconnected]);
        stream(&mut end, &clock, StreamEvent::Refused(VerbsError::Busy));
        assert_eq!(did(&mut end), [Did::Closed]);
        is_over(&mut end, &clock);
    }
}

#[test]
fn inputs_for_other_connections_change_nothing() {
    let clock = Clock::new();
    let mut space = Space::new(0);
    space.name();
    let other = space.name();
    let mut ends = vec![initiator(&clock, b"hello"), responder(&clock, b"hello")];
    ends.extend(attaching(&clock));
    for mut end in ends {
        let before = format!("{end:?}");
        end.handle_input(&clock.now(), Input::End { conn: other });
        end.handle_input(&clock.now(), Input::Bytes { conn: other, bytes: b"M" });
        end.handle_input(&clock.now(), Input::Stream { conn: other, event: StreamEvent::Established });
        end.handle_input(&clock.now(), Input::Failed { conn: other, why: Refusal::Gone });
        end.handle_input(&clock.now(), Input::Waiting);
        end.handle_input(&clock.now(), Input::NoListener);
        assert_eq!((format!("{end:?}"), end.want(other)), (before, Want::Nothing));
    }
}

#[test]
fn how_streams_end() {
    let clock = Clock::new();
    let lost = TerminateError::Mpa(terminate::Mpa::ConnectionLost);
    let other = TerminateError::Mpa(terminate::Mpa::LocalCatastrophic);
    for (why, error) in [
        (Disconnect::PeerClosed, None),
        (Disconnect::LocalClosed, None),
        (Disconnect::Timeout, Some(Errno::TIMEDOUT)),
        (Disconnect::Reset, Some(Errno::CONNRESET)),
        (Disconnect::Sent(lost), Some(Errno::CONNRESET)),
        (Disconnect::Sent(other), Some(Errno::PROTO)),
        (Disconnect::Terminated(lost), Some(Errno::PROTO)),
    ] {
        let [mut end, _] = attaching(&clock);
        stream(&mut end, &clock, StreamEvent::Established);
        did(&mut end);
        stream(&mut end, &clock, StreamEvent::Ended(why));
        assert_eq!(did(&mut end), [Did::Reported(Report::Ended(error))]);
    }
}

/// Where the connection of an end is, as its shell sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Machine,
    Shell,
    QueuePair,
    Gone,
}

/// How often each was tried, in all runs.
#[derive(Default)]
struct Tried {
    adopted: u32,
    ended: u32,
    failed: u32,
    refused: u32,
    cancelled: u32,
}

/// One run: two ends, the connection between them, and their shells. Of each pair the first one is the
/// initiator's.
struct Trial {
    random: Random,
    clock: Clock,
    /// What each end says.
    data: [Vec<u8>; 2],
    ends: [Adopt; 2],
    /// Whether anything goes wrong.
    faults: bool,
    /// What each end has not received yet.
    pipes: [Vec<u8>; 2],
    places: [Place; 2],
    /// Whether it was reported as adopted, its end was reported, and it was cancelled before it was adopted.
    up: [bool; 2],
    over: [bool; 2],
    cancelled: [bool; 2],
}

impl Trial {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let clock = Clock::new();
        let data = [(); 2].map(|()| if random.one_in(8) { b"hi".to_vec() } else { b"hello".to_vec() });
        Self {
            ends: [initiator(&clock, &data[0]), responder(&clock, &data[1])],
            data,
            faults: random.one_in(2),
            random,
            clock,
            pipes: [Vec::new(), Vec::new()],
            places: [Place::Machine; 2],
            up: [false; 2],
            over: [false; 2],
            cancelled: [false; 2],
        }
    }

    /// Anything that can happen to one of the ends.
    fn step(&mut self, tried: &mut Tried) {
        let own = self.random.below(2);
        let conn = self.ends[own].conn();
        let was_attaching = self.places[own] == Place::Shell;
        match self.random.below(30) {
            0..10 => self.send(own),
            10..20 => self.receive(own),
            20..23 => self.input(own, Input::Room { conn }),
            23..26 if was_attaching => self.attach(own, tried),
            23..26 if self.places[own] == Place::QueuePair => {
                let ends = self.random.one_in(3);
                let ended = StreamEvent::Ended(Disconnect::PeerClosed);
                let event = if ends { ended } else { StreamEvent::Established };
                self.input(own, Input::Stream { conn, event });
            }
            26 if self.fault(10) && self.ends[own].want(conn) != Want::Nothing => {
                self.input(own, Input::End { conn });
            }
            27 if self.fault(10) && self.places[own] == Place::Machine => {
                self.places[own] = Place::Gone;
                self.input(own, Input::Failed { conn, why: Refusal::Gone });
            }
            28 if self.fault(30) => {
                tried.cancelled += 1;
                self.cancelled[own] = !self.up[own];
                self.ends[own].cancel();
            }
            29 if self.fault(20) => self.reach_limit(own),
            _ => self.ends[own].handle_timeout(&self.clock.now()),
        }
        for action in did(&mut self.ends[own]) {
            self.act(own, action, tried);
        }
        self.check(own, was_attaching);
    }

    fn fault(&mut self, one_in: usize) -> bool {
        self.faults && self.random.one_in(one_in)
    }

    fn input(&mut self, own: usize, input: Input<'_>) {
        self.ends[own].handle_input(&self.clock.now(), input);
    }

    fn send(&mut self, own: usize) {
        let pipe = &mut self.pipes[1 - own];
        if let Some(Transmit::Bytes { conn, bytes }) = self.ends[own].poll_transmit() {
            assert_eq!(self.places[own], Place::Machine, "sends on what it does not have");
            let taken = self.random.below(bytes.len() + 1);
            pipe.extend_from_slice(&bytes[..taken]);
            if self.faults && taken > 0 && self.random.one_in(40) {
                *pipe.last_mut().unwrap() ^= 1 << self.random.below(8);
            }
            self.input(own, Input::Sent { conn, bytes: taken });
        }
    }

    fn receive(&mut self, own: usize) {
        let conn = self.ends[own].conn();
        if let Want::Bytes(want) = self.ends[own].want(conn) {
            assert!((1..=512).contains(&want) && self.places[own] == Place::Machine);
            let most = self.pipes[own].len().min(want);
            let some: Vec<u8> = self.pipes[own].drain(..self.random.below(most + 1)).collect();
            if !some.is_empty() {
                self.input(own, Input::Bytes { conn, bytes: &some });
            }
        }
    }

    /// The queue pair takes the connection, or refuses it.
    fn attach(&mut self, own: usize, tried: &mut Tried) {
        let event = match self.random.below(if self.faults { 4 } else { 3 }) {
            3 => StreamEvent::Refused(VerbsError::Busy),
            2 => StreamEvent::Established,
            _ => StreamEvent::Attached,
        };
        let is_refused = matches!(event, StreamEvent::Refused(_));
        tried.refused += u32::from(is_refused);
        self.places[own] = if is_refused { Place::Machine } else { Place::QueuePair };
        let conn = self.ends[own].conn();
        self.input(own, Input::Stream { conn, event });
    }

    fn reach_limit(&mut self, own: usize) {
        let end = &mut self.ends[own];
        if let Some(deadline) = end.poll_timeout() {
            self.clock.reach(deadline);
        }
        end.handle_timeout(&self.clock.now());
        assert!(end.poll_timeout().is_none_or(|deadline| deadline > self.clock.get()));
    }

    fn act(&mut self, own: usize, action: Did, tried: &mut Tried) {
        match action {
            Did::Attached(_) => {
                assert_eq!(self.places[own], Place::Machine);
                self.places[own] = Place::Shell;
            }
            Did::Closed => {
                assert_eq!(self.places[own], Place::Machine, "closes what it does not have");
                self.places[own] = Place::Gone;
            }
            Did::Disconnected => assert!(matches!(self.places[own], Place::Shell | Place::QueuePair)),
            Did::Reported(report) => {
                assert!(!self.over[own] && !self.cancelled[own], "{report:?} after the end");
                self.hear(own, report, tried);
            }
        }
    }

    fn hear(&mut self, own: usize, report: Report, tried: &mut Tried) {
        match report {
            Report::Adopted(data) => {
                assert!(!std::mem::replace(&mut self.up[own], true));
                // No checksum protects set-up frames.
                assert!(self.faults || data == self.data[1 - own]);
                tried.adopted += 1;
            }
            Report::Failed(_) => {
                assert!(!self.up[own]);
                self.over[own] = true;
                tried.failed += 1;
            }
            Report::Ended(_) => {
                assert!(self.up[own]);
                self.over[own] = true;
                tried.ended += 1;
            }
        }
    }

    /// It waits for a limit only during set-up, and leaves nothing behind.
    fn check(&self, own: usize, was_attaching: bool) {
        let end = &self.ends[own];
        match (&end.state, end.poll_timeout()) {
            (State::Handshaking(_) | State::Attaching(_) | State::Attached(_), limit) => {
                assert!(limit.is_some());
            }
            (State::Leaving(handshake, _), limit) => assert!(limit.is_none() && !handshake.is_drained()),
            (State::Established(_) | State::Over { .. }, limit) => assert_eq!(limit, None),
        }
        let has_ended = self.over[own] || self.cancelled[own];
        if has_ended && !was_attaching {
            let place = self.places[own];
            assert!(matches!(place, Place::Gone | Place::QueuePair | Place::Shell), "left behind");
            assert_eq!(end.want(end.conn()), Want::Nothing);
        }
    }
}

/// Two ends, with frames in any parts, bytes turned over, and ends, failures, refusals, limits and cancels at
/// any moment. Nothing is left behind, and each end reports as the grammar says.
#[test]
fn any_order_of_inputs() {
    let mut tried = Tried::default();
    for seed in 0..4000 {
        let seed = Seed(seed);
        let mut trial = Trial::new(seed.0);
        for _ in 0..300 {
            trial.step(&mut tried);
        }
    }
    let Tried { adopted, ended, failed, refused, cancelled } = tried;
    let counts = [adopted, ended, failed, refused, cancelled];
    assert!(counts.iter().all(|&times| times > 100), "what is not tried is not tested: {counts:?}");
}
