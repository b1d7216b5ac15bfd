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
            Action::Disconnect { conn: of } if of == conn => Did::Disconnected,
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
        // It goes on, and its owner hears of it.
        end.cancel();
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
    // A request of revision one has no enhanced data, and no room for ours behind much private data.
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
        end.cancel();
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

/// Two ends, with frames in any parts, bytes turned over, and ends, failures, refusals, limits and cancels at
/// any moment. Nothing is left behind, and each end reports as the grammar says.
#[test]
fn any_order_of_inputs() {
    let [mut adopted, mut ended, mut fails, mut refusals, mut cancels] = [0_u32; 5];
    for seed in 0..4000 {
        let seed = Seed(seed);
        let mut random = Random::new(seed.0);
        let mut clock = Clock::new();
        let data = |random: &mut Random| if random.one_in(8) { b"hi".to_vec() } else { b"hello".to_vec() };
        let [ours, theirs] = [data(&mut random), data(&mut random)];
        let mut ends = [initiator(&clock, &ours), responder(&clock, &theirs)];
        let faults = random.one_in(2);
        let mut pipes = [Vec::new(), Vec::new()];
        let mut places = [Place::Machine; 2];
        let [mut up, mut over, mut cancelled] = [[false; 2]; 3];
        for _ in 0..300 {
            let own = random.below(2);
            let (end, other) = (&mut ends[own], 1 - own);
            let conn = end.conn();
            let was_attaching = places[own] == Place::Shell;
            match random.below(30) {
                0..10 => {
                    if let Some(Transmit::Bytes { bytes, .. }) = end.poll_transmit() {
                        assert_eq!(places[own], Place::Machine, "sends on what it does not have");
                        let taken = random.below(bytes.len() + 1);
                        pipes[other].extend_from_slice(&bytes[..taken]);
                        if faults && taken > 0 && random.one_in(40) {
                            *pipes[other].last_mut().unwrap() ^= 1 << random.below(8);
                        }
                        end.handle_input(&clock.now(), Input::Sent { conn, bytes: taken });
                    }
                }
                10..20 => match end.want(conn) {
                    Want::Bytes(want) => {
                        assert!((1..=512).contains(&want) && places[own] == Place::Machine);
                        let most = pipes[own].len().min(want);
                        let some: Vec<u8> = pipes[own].drain(..random.below(most + 1)).collect();
                        if !some.is_empty() {
                            end.handle_input(&clock.now(), Input::Bytes { conn, bytes: &some });
                        }
                    }
                    Want::End | Want::Nothing => {}
                },
                20..23 => end.handle_input(&clock.now(), Input::Room { conn }),
                23..26 if was_attaching => {
                    let event = match random.below(if faults { 4 } else { 3 }) {
                        3 => StreamEvent::Refused(VerbsError::Busy),
                        2 => StreamEvent::Established,
                        _ => StreamEvent::Attached,
                    };
                    let is_refused = matches!(event, StreamEvent::Refused(_));
                    refusals += u32::from(is_refused);
                    places[own] = if is_refused { Place::Machine } else { Place::QueuePair };
                    end.handle_input(&clock.now(), Input::Stream { conn, event });
                }
                23..26 if places[own] == Place::QueuePair => {
                    let event = if random.one_in(3) {
                        StreamEvent::Ended(Disconnect::PeerClosed)
                    } else {
                        StreamEvent::Established
                    };
                    end.handle_input(&clock.now(), Input::Stream { conn, event });
                }
                26 if faults && random.one_in(10) && end.want(conn) != Want::Nothing => {
                    end.handle_input(&clock.now(), Input::End { conn });
                }
                27 if faults && random.one_in(10) && places[own] == Place::Machine => {
                    places[own] = Place::Gone;
                    end.handle_input(&clock.now(), Input::Failed { conn, why: Refusal::Gone });
                }
                28 if faults && random.one_in(30) => {
                    cancels += 1;
                    cancelled[own] = !up[own];
                    end.cancel();
                }
                29 if faults && random.one_in(20) => {
                    if let Some(deadline) = end.poll_timeout() {
                        clock.reach(deadline);
                    }
                    end.handle_timeout(&clock.now());
                    assert!(end.poll_timeout().is_none_or(|deadline| deadline > clock.get()));
                }
                _ => end.handle_timeout(&clock.now()),
            }
            for action in did(end) {
                match action {
                    Did::Attached(_) => {
                        assert_eq!(places[own], Place::Machine);
                        places[own] = Place::Shell;
                    }
                    Did::Closed => {
                        assert_eq!(places[own], Place::Machine, "closes what it does not have");
                        places[own] = Place::Gone;
                    }
                    Did::Disconnected => assert!(matches!(places[own], Place::Shell | Place::QueuePair)),
                    Did::Reported(report) => {
                        assert!(!over[own] && !cancelled[own], "{report:?} after the end");
                        match report {
                            Report::Adopted(data) => {
                                assert!(!std::mem::replace(&mut up[own], true));
                                // No checksum protects set-up frames.
                                assert!(faults || data == [&theirs, &ours][own][..]);
                                adopted += 1;
                            }
                            Report::Failed(_) => {
                                assert!(!up[own]);
                                (over[own], fails) = (true, fails + 1);
                            }
                            Report::Ended(_) => {
                                assert!(up[own]);
                                (over[own], ended) = (true, ended + 1);
                            }
                        }
                    }
                }
            }
            let end = &ends[own];
            match (&end.state, end.poll_timeout()) {
                (State::Handshaking(_) | State::Attaching(_) | State::Attached(_), limit) => {
                    assert!(limit.is_some());
                }
                (State::Leaving(handshake, _), limit) => assert!(limit.is_none() && !handshake.is_drained()),
                (State::Established | State::Over { .. }, limit) => assert_eq!(limit, None),
            }
            let has_ended = over[own] || cancelled[own];
            if has_ended && !was_attaching {
                assert!(matches!(places[own], Place::Gone | Place::QueuePair | Place::Shell), "left behind");
                assert_eq!(end.want(conn), Want::Nothing);
            }
        }
    }
    let counts = [adopted, ended, fails, refusals, cancels];
    assert!(counts.iter().all(|&times| times > 100), "what is not tried is not tested: {counts:?}");
}
