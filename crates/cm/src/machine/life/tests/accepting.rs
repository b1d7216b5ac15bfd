//! From the answer to a request until the connection is established, or not.

use super::*;

/// The queue pair can report both before it has said that it has the connection.
#[test]
fn a_stream_may_begin_and_end_before_it_is_attached() {
    let mut shell = Shell::requested(true);
    shell.prompt = false;
    shell.call(|life, now| life.accept(now, ours(b""), None)).unwrap();
    shell.stream(StreamEvent::Established);
    assert_eq!(
        (shell.did(), shell.life.state()),
        ("send, attach, Established 0, settled".into(), State::Established)
    );
    shell.stream(StreamEvent::Ended(Disconnect::LocalClosed));
    assert_eq!(shell.did(), "Disconnected 0");
    shell.stream(StreamEvent::Attached);
    assert_eq!((shell.did(), shell.life.state()), ("ok".into(), State::Closed));
    assert_eq!(
        shell.life.poll_timeout(),
        Some(shell.clock.get() + TIMEWAIT),
        "no deadline for the indication"
    );
    shell.destroyed();
}

#[test]
fn an_accept_that_comes_too_late_fails_the_queue_pair() {
    for (takes, errno, closes) in [
        (Takes::Fails(Refusal::Gone), Errno::CONNRESET, ""),
        (Takes::Fails(Refusal::Local(Errno::NOBUFS)), Errno::NOBUFS, ""),
        (Takes::Part, Errno::NOBUFS, "close, "),
    ] {
        let mut shell = Shell::requested(true);
        (shell.takes, shell.prompt) = (takes, false);
        assert_eq!(shell.life.awaits(), Some(Awaits { ours: None, peer: 0 }));
        shell.call(|life, now| life.accept(now, ours(b""), None)).unwrap();
        assert_eq!(shell.did(), format!("send, {closes}fail, settled"));
        shell.input(Input::Flushed);
        // The call fails: no event.
        assert_eq!((shell.did(), shell.life.state()), (format!("error {}", raw(errno)), State::Closed));
        assert_eq!(shell.life.awaits(), None, "a request that is gone waits for no queue pair");
        assert_eq!(shell.call(|life, now| life.disconnect(now)), Err(NOT_CONNECTED));
        shell.destroyed();
    }
}

#[test]
fn a_request_whose_connection_has_failed_is_noticed_by_the_answer() {
    let mut shell = Shell::requested(true);
    let conn = *shell.open.first().unwrap();
    shell.input(Input::Failed { conn, why: Refusal::Gone });
    assert_eq!((shell.did(), shell.life.state()), (String::new(), State::RequestPending));
    shell.call(|life, now| life.accept(now, ours(b""), None)).unwrap();
    assert_eq!(shell.did(), format!("fail, settled, error {}", raw(Errno::CONNRESET)));
    shell.destroyed();
}

/// It reached the queue pair after the program had used that for something else.
#[test]
fn a_queue_pair_is_not_failed_for_an_id_that_was_destroyed_before() {
    let mut shell = Shell::requested(true);
    let conn = *shell.open.first().unwrap();
    shell.input(Input::Failed { conn, why: Refusal::Gone });
    shell
        .call(|life, now| {
            life.accept(now, ours(b""), None)?;
            life.destroy(now);
            Ok(())
        })
        .unwrap();
    assert_eq!(shell.did(), format!("settled, error {}", raw(Errno::INVAL)));
    shell.destroyed();
}

#[test]
fn a_request_is_rejected_with_private_data() {
    for takes in [Takes::All, Takes::Part, Takes::Fails(Refusal::Gone)] {
        let mut shell = Shell::requested(true);
        shell.takes = takes;
        let conn = *shell.open.first().unwrap();
        shell.call(|life, now| life.reject(now, b"no")).unwrap();
        let closes = !matches!(takes, Takes::Fails(_));
        assert_eq!(shell.did(), if closes { "send, close, settled" } else { "send, settled" });
        if let Some(reply) = shell.wire.get(&conn) {
            assert!(reply.ends_with(b"no") && reply[16] & mpa::FLAG_R != 0);
        }
        assert_eq!(shell.life.state(), State::Closed);
        shell.destroyed();
    }
}

#[test]
fn a_request_that_is_destroyed_is_rejected() {
    let mut shell = Shell::requested(true);
    shell
        .call(|life, now| {
            life.destroy(now);
            Ok(())
        })
        .unwrap();
    assert_eq!(shell.did(), "send, close, settled");
    shell.destroyed();
}

#[test]
fn a_peer_that_never_shows_itself_is_unreachable() {
    let mut shell = Shell::accepting(true);
    shell.prompt = false;
    shell.pass(Timeouts::default().ready);
    assert_eq!(shell.did(), "disconnect, fail", "the program is told when the queue pair has failed");
    shell.input(Input::Flushed);
    assert_eq!(shell.did(), format!("Unreachable {}, settled", -raw(Errno::TIMEDOUT)));
    shell.stream(StreamEvent::Ended(Disconnect::LocalClosed));
    assert_eq!((shell.did(), shell.life.state()), (String::new(), State::Closed));
    shell.destroyed();
}
