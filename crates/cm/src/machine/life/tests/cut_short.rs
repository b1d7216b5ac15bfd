//! What the program ends while it is being set up.

use super::*;

#[test]
fn an_attempt_that_is_disconnected_is_cancelled() {
    let aborted = format!("ConnectError {}", -raw(Errno::CONNABORTED));
    let mut shell = Shell::connecting(true, ours(b""));
    shell.call(|life, now| life.disconnect(now)).unwrap();
    assert_eq!((shell.did(), shell.life.state()), (format!("{aborted}, close"), State::Closed));
    shell.call(|life, now| life.disconnect(now)).unwrap();
    shell.destroyed();
    // Its stream has begun.
    let mut shell = Shell::connecting(true, ours(b""));
    shell.accepted();
    shell.did();
    shell.call(|life, now| life.disconnect(now)).unwrap();
    assert_eq!(shell.did(), format!("{aborted}, disconnect"));
    assert_eq!(shell.life.poll_timeout(), None);
    shell.destroyed();
}

/// The queue pair refuses it afterwards: then only the id can close the connection.
#[test]
fn a_connection_that_is_being_attached_is_not_lost() {
    for refused in [false, true] {
        for destroy in [false, true] {
            let mut shell = Shell::connecting(true, ours(b""));
            shell.prompt = false;
            shell.accepted();
            shell
                .call(
                    |life, now| if destroy { Ok(life.destroy(now)) } else { life.disconnect(now).map(drop) },
                )
                .unwrap();
            assert!(shell.did().ends_with("disconnect"));
            if refused {
                shell.open.extend(shell.given.clone());
                shell.stream(StreamEvent::Refused(REFUSED));
                assert_eq!(shell.did(), "close");
            } else {
                shell.stream(StreamEvent::Attached);
                assert_eq!(shell.did(), "");
            }
            shell.destroyed();
        }
    }
}

#[test]
fn a_call_that_waits_for_its_answer_gets_one_when_the_id_is_destroyed() {
    let mut shell = Shell::requested(true);
    shell.prompt = false;
    shell.call(|life, now| life.accept(now, ours(b""), None)).unwrap();
    shell.did();
    shell.call(|life, now| Ok(life.destroy(now))).unwrap();
    assert_eq!(shell.did(), format!("error {}, disconnect, settled", raw(Errno::INVAL)));
    shell.destroyed();
}

#[test]
fn a_queue_pair_that_the_program_destroys_ends_the_connection() {
    let reset = format!("ConnectError {}", -raw(Errno::CONNRESET));
    for (mut shell, expected) in [
        (Shell::established(true), "Disconnected 0".into()),
        (Shell::accepting(true), format!("{reset}, settled")),
        (Shell::requested(true), format!("send, close, {reset}, settled")),
        (Shell::connecting(true, ours(b"")), format!("close, {reset}")),
        (Shell::responded(by_number()), "close, Disconnected 0".into()),
        (Shell::resolved(true), String::new()),
    ] {
        shell.life.queue_pair_destroyed(&shell.clock.now());
        shell.run();
        assert_eq!(shell.did(), expected);
        shell.destroyed();
    }
}
