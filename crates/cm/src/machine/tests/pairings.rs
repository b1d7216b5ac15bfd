//! Pairings without sockets and clock.

use super::super::testing::{Clock, responder};
use super::*;

const LOW: u32 = 0x0004_0001;
const HIGH: u32 = 0x0005_0001;

fn pairings(clock: &Clock) -> Pairings {
    let settings = Settings {
        timeouts: Timeouts::default(),
        policy: responder(),
        crc: true,
        markers: false,
        says_uwarp: true,
        budget: Budget::new(16),
    };
    Pairings::new(&clock.now(), settings, &[7; 16])
}

/// Both ends are at this host.
fn begin(pairings: &mut Pairings, clock: &Clock, (qpn, moves): (u32, u32), peer: u32) {
    let here = SocketAddr::from(([127, 0, 0, 1], 0));
    let psns = Psns { expects: Some(1), begins: Some(1) };
    let terms = Terms { psns, ..Terms::default() };
    pairings.begin(&clock.now(), (qpn, moves), Path { local: here, peer: here }, peer, terms, 1, 2);
}

fn actions(pairings: &mut Pairings) -> Vec<String> {
    std::iter::from_fn(|| pairings.poll_action()).map(|action| format!("{action:?}")).collect()
}

#[test]
fn the_owner_learns_that_the_port_cannot_listen() {
    let clock = Clock::new();
    let mut pairings = pairings(&clock);
    begin(&mut pairings, &clock, (LOW, 1), HIGH);
    assert_eq!(actions(&mut pairings), ["Listen"]);
    assert_eq!(pairings.refused(LOW), None);
    pairings.handle_input(&clock.now(), Input::NotListening(Errno::ADDRINUSE));
    assert_eq!(pairings.refused(LOW), Some(Errno::ADDRINUSE));
    // The next one tries again.
    begin(&mut pairings, &clock, (LOW + 1, 1), HIGH);
    assert_eq!(actions(&mut pairings), ["Listen"]);
    assert_eq!(pairings.refused(LOW + 1), None);
}

/// Its queue pair was moved to RESET while the stream was given to it. The connection was never closed.
#[test]
fn a_connection_that_comes_back_to_a_pairing_that_is_over_is_closed() {
    let clock = Clock::new();
    let mut pairings = pairings(&clock);
    begin(&mut pairings, &clock, (LOW, 1), LOW);
    let conn = match pairings.poll_action() {
        Some(Action::Connect { conn, .. }) => conn,
        other => panic!("{other:?}"),
    };
    let local = SocketAddr::from(([127, 0, 0, 1], 9));
    pairings.handle_input(&clock.now(), Input::Opened { conn, local });
    assert!(matches!(pairings.poll_action(), Some(Action::Attach { .. })));
    pairings.end(LOW);
    let event = StreamEvent::Refused(uwarp_rnic::VerbsError::Invalid("it does not wait"));
    pairings.handle_input(&clock.now(), Input::Stream { conn, event });
    assert!(matches!(pairings.poll_action(), Some(Action::Close { conn: closed, .. }) if closed == conn));
}

/// A queue pair that fails on its own ends the move that it failed in, and no later one.
#[test]
fn a_connecting_end_is_given_up_by_its_move() {
    let mut clock = Clock::new();
    let mut pairings = pairings(&clock);
    begin(&mut pairings, &clock, (HIGH, 1), LOW);
    assert!(matches!(pairings.poll_transmit(), Some(Transmit::Datagram { .. })));
    assert_eq!(pairings.due(&clock.now()), []);
    clock.reach(pairings.poll_timeout().unwrap());
    assert_eq!(pairings.due(&clock.now()), [(HIGH, 1)]);
    begin(&mut pairings, &clock, (HIGH, 2), LOW);
    pairings.give_up(HIGH, 1);
    assert!(pairings.poll_timeout().is_some(), "the second one goes on");
    pairings.give_up(HIGH, 2);
    assert_eq!(pairings.poll_timeout(), None);
}

/// The first column is what this end's program has set: expected, begun with.
#[test]
fn packet_sequence_numbers_fit_if_all_that_both_know_is_equal() {
    let shown = |half: Half, expects: Option<u32>, begins: Option<u32>| Introduction {
        source_qpn: 1,
        destination_qpn: 2,
        expects: expects.map(|psn| half.of(psn)),
        begins: begins.map(|psn| half.of(psn)),
        incarnation: 1,
        cookie: Cookie::NONE,
    };
    let (a, b) = (0x00AB_CDEF, 0x0012_3456);
    for half in [Half::Lower, Half::Upper] {
        for (own, said, fits) in [
            ((Some(a), Some(b)), (Some(b), Some(a)), Some(true)),
            ((Some(a), Some(b)), (Some(b), None), Some(true)),
            ((Some(a), None), (Some(b), Some(a)), Some(true)),
            ((Some(a), None), (Some(b), None), None),
            ((None, None), (Some(b), Some(a)), None),
            ((Some(a), Some(b)), (None, None), None),
            ((Some(a), Some(b)), (Some(a), Some(b)), Some(false)),
            ((Some(a), Some(b)), (Some(b), Some(a + 0x1001)), Some(false)),
            ((Some(a), Some(b)), (Some(b + 0x1001), Some(a)), Some(false)),
        ] {
            let own = Psns { expects: own.0, begins: own.1 };
            assert_eq!(fit(&own, half, &shown(half, said.0, said.1)), fits, "{own:x?} {said:x?}");
        }
    }
    // Who has seen a request only cannot answer it.
    let own = Psns { expects: Some(a), begins: Some(b) };
    assert_eq!(fit(&own, Half::Upper, &shown(Half::Lower, Some(b), Some(a))), Some(false));
}
