//! Connections for queue pairs that the program moves itself.

use super::*;

#[test]
fn a_connection_by_number_waits_for_its_queue_pair() {
    let mut shell = Shell::responded(by_number());
    assert_eq!(shell.private_data(), b"yes");
    let conn = *shell.open.first().unwrap();
    assert_eq!(shell.life.want(conn), Want::End);
    assert_eq!(shell.life.awaits(), Some(Awaits { ours: Some(QPN), peer: 0 }));
    shell.call(|life, _| life.adopt()).unwrap();
    assert_eq!((shell.did(), shell.life.awaits()), ("attach, ok".into(), None));
    assert!(shell.call(|life, _| life.adopt()).is_err(), "once");
    shell.stream(StreamEvent::Established);
    assert_eq!((shell.did(), shell.life.state()), (String::new(), State::Responded));
    assert_eq!(shell.life.poll_timeout(), None);
    shell.call(|life, _| life.establish()).unwrap();
    assert_eq!((shell.did(), shell.life.state()), ("ok".into(), State::Established));
    shell.call(|life, now| life.disconnect(now)).unwrap();
    shell.stream(StreamEvent::Ended(Disconnect::LocalClosed));
    assert_eq!(shell.did(), "disconnect, Disconnected 0");
    shell.destroyed();
}

#[test]
fn a_connection_by_number_may_be_established_before_it_has_its_queue_pair() {
    let mut shell = Shell::responded(by_number());
    shell.call(|life, _| life.establish()).unwrap();
    assert!(shell.life.awaits().is_some());
    shell.call(|life, _| life.adopt()).unwrap();
    assert_eq!((shell.did(), shell.life.state()), ("ok, attach, ok".into(), State::Established));
    shell.destroyed();
}

#[test]
fn a_peer_that_hangs_up_on_a_connection_that_waits_has_disconnected() {
    for establish in [false, true] {
        for ends in [true, false] {
            let mut shell = Shell::responded(by_number());
            if establish {
                shell.call(|life, _| life.establish()).unwrap();
                shell.did();
            }
            let conn = *shell.open.first().unwrap();
            let input = if ends { Input::End { conn } } else { Input::Failed { conn, why: Refusal::Gone } };
            shell.input(input);
            assert_eq!(shell.did(), if ends { "close, Disconnected 0" } else { "Disconnected 0" });
            assert_eq!((shell.life.state(), shell.life.awaits()), (State::Closed, None));
            shell.pass(TIMEWAIT);
            assert_eq!(shell.did(), "TimewaitExit 0");
            shell.destroyed();
        }
    }
}

#[test]
fn a_connection_that_waits_is_disconnected() {
    let mut shell = Shell::responded(by_number());
    shell.call(|life, now| life.disconnect(now)).unwrap();
    assert_eq!((shell.did(), shell.life.state()), ("close, Disconnected 0".into(), State::Closed));
    shell.destroyed();
}

#[test]
fn a_queue_pair_that_refuses_what_it_waited_for_loses_it() {
    let mut shell = Shell::responded(by_number());
    shell.attaches = Err(REFUSED);
    shell.call(|life, _| life.adopt()).unwrap();
    assert_eq!(shell.did(), format!("attach, send, close, Disconnected 0, error {}", raw(Errno::INVAL)));
    shell.destroyed();
}

#[test]
fn a_stand_in_gets_the_connection_when_the_program_says_that_it_is_established() {
    let stand_in = Ours { pair: Pair::StandIn, ..ours(b"") };
    let mut shell = Shell::responded(stand_in);
    assert_eq!(shell.life.awaits(), None, "no queue pair of the program can have it");
    shell.call(|life, _| life.establish()).unwrap();
    assert_eq!((shell.did(), shell.life.state()), ("attach, ok".into(), State::Established));
    shell.destroyed();
    // The peer sees the number that the program gives.
    let param = ConnParam { qp_num: 0x77, ..ConnParam::DEFAULT };
    for (ours, qpn) in [(stand_in, 0x77), (by_number(), QPN), (ours(b""), QPN)] {
        let mut shell = Shell::resolved(true);
        shell.call(|life, now| life.connect(now, ours, param)).unwrap();
        let request = shell.wire.values().next().unwrap();
        let (_, request) = responder(&shell.clock.now(), request);
        assert_eq!(request.peer.unwrap().qpn, qpn);
    }
}

#[test]
fn an_attempt_for_a_queue_pair_that_is_destroyed_fails() {
    let mut shell = Shell::connecting(true, by_number());
    shell.life.pair_is_gone(&shell.clock.now());
    shell.run();
    assert_eq!(shell.did(), format!("close, ConnectError {}", -raw(Errno::INVAL)));
    shell.destroyed();
    // One of the id's own is its program's business.
    let mut shell = Shell::connecting(true, ours(b""));
    shell.life.pair_is_gone(&shell.clock.now());
    assert_eq!(shell.life.state(), State::Connecting);
}

/// Its program may have received before it says that the connection is established.
#[test]
fn the_end_by_number_waits_until_the_completions_before_it_are_polled() {
    let mut shell = Shell::responded(by_number());
    shell.call(|life, _| life.adopt()).unwrap();
    shell.unpolled = true;
    shell.stream(StreamEvent::Established);
    shell.stream(StreamEvent::Ended(Disconnect::PeerClosed));
    assert_eq!((shell.did(), shell.life.state()), ("attach, ok, look".into(), State::Responded));
    shell.unpolled = false;
    shell.pass(UNPOLLED_LOOK);
    assert_eq!((shell.did(), shell.life.state()), ("look, Disconnected 0".into(), State::Closed));
    shell.destroyed();
}
