//! Acknowledgements of placed messages wait for something to ride on, but not for ever, and not beyond the
//! end of the stream.

#![allow(missing_docs)]
// Reason: a signal for one thread.
#![allow(unsafe_code)]

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use common::{End, connect, to, untagged, uwarp, with_raw_peer};
use libc::pthread_t;
use uwarp_driver::StreamParams;
use uwarp_rnic::qp::QpState;
use uwarp_rnic::{SendFlags, SendOp, SendWr, WcStatus};
use uwarp_wire::rdmap::{Ack, QN_UWARP_ACK, UWARP_ACK};

const SEND: SendOp = SendOp::Send { invalidate: None };

fn pair() -> (End, End) {
    connect(StreamParams { placement_acks: true, ..uwarp() }, 4096)
}

/// The receiver polls until it has its message, and never again. The sender makes no progress itself.
#[test]
fn one_that_nobody_takes_along_goes_out_alone() {
    let (left, right) = pair();
    for _ in 0..20 {
        right.recv(&[right.sge(0, 64)]);
        left.send(SEND, &[left.sge(0, 64)]);
        assert_eq!(right.poll().status, WcStatus::Success);
        assert_eq!(left.look_only().status, WcStatus::Success);
    }
}

/// A receiver that has its message and ends the connection in the next moment: what it took has succeeded at
/// the sender.
#[test]
fn the_last_goes_out_before_the_stream_ends() {
    let ends: [fn(&End); 3] =
        [|end| end.qp.destroy(), |end| end.qp.modify(&to(QpState::Err)).unwrap(), |end| end.qp.disconnect()];
    for end in ends {
        for _ in 0..10 {
            let (left, right) = pair();
            right.recv(&[right.sge(0, 64)]);
            left.send(SEND, &[left.sge(0, 64)]);
            assert_eq!(right.poll().status, WcStatus::Success);
            end(&right);
            assert_eq!(left.look_only().status, WcStatus::Success);
        }
    }
}

/// A sender that also ends the connection, as soon as it learns of the receiver's end in another way: the
/// acknowledgement has arrived by then, although nothing may have received it yet. Seen with libdaploscm.
#[test]
fn one_that_has_arrived_counts_although_the_sender_moves_to_err() {
    for _ in 0..100 {
        let (left, right) = pair();
        right.recv(&[right.sge(0, 64)]);
        left.send(SEND, &[left.sge(0, 64)]);
        assert_eq!(right.poll().status, WcStatus::Success);
        right.qp.destroy();
        left.qp.modify(&to(QpState::Err)).unwrap();
        assert_eq!(left.look_only().status, WcStatus::Success);
    }
}

/// Both answer each message, and everything they send completes.
#[test]
fn it_rides_on_answers() {
    let (left, right) = pair();
    for _ in 0..200 {
        for (from, to) in [(&left, &right), (&right, &left)] {
            to.recv(&[to.sge(0, 64)]);
            from.send(SEND, &[from.sge(64, 64)]);
            let mut left_to_see = 1;
            while left_to_see > 0 {
                let wc = to.poll();
                assert_eq!(wc.status, WcStatus::Success);
                left_to_see -= u32::from(wc.wr_id == 2);
            }
        }
    }
}

/// Sends messages whose completion may come late; returns when the peer has them. Nothing asks for an
/// acknowledgement by itself.
fn send_relaxed(left: &End, right: &End) {
    for _ in 0..3 {
        right.recv(&[right.sge(0, 64)]);
        let flags = SendFlags::SIGNALED | SendFlags::RELAXED;
        let wr = SendWr { wr_id: 1, op: SEND, flags, sges: &[left.sge(0, 64)] };
        left.qp.post_send(std::iter::once(wr)).unwrap();
        assert_eq!(right.poll().status, WcStatus::Success);
    }
    // Longer than an acknowledgement waits for an answer.
    std::thread::sleep(Duration::from_millis(3));
    assert!(left.cq.is_empty());
}

#[test]
fn relaxed_messages_complete_with_the_next_that_is_not() {
    let (left, right) = pair();
    for _ in 0..10 {
        send_relaxed(&left, &right);
        right.recv(&[right.sge(0, 64)]);
        left.send(SEND, &[left.sge(0, 64)]);
        assert_eq!(right.poll().status, WcStatus::Success);
        (0..4).for_each(|_| assert_eq!(left.poll().status, WcStatus::Success));
    }
}

#[test]
fn relaxed_messages_complete_when_the_stream_ends_in_order() {
    let ends: [fn(&End, &End); 2] = [|left, _| left.qp.disconnect(), |_, right| right.qp.disconnect()];
    for end in ends {
        let (left, right) = pair();
        send_relaxed(&left, &right);
        end(&left, &right);
        (0..3).for_each(|_| assert_eq!(left.poll().status, WcStatus::Success));
    }
}

/// The next FPDU that the end has sent.
fn read_fpdu(mut socket: &TcpStream) -> Vec<u8> {
    let mut len = [0; 2];
    socket.read_exact(&mut len).unwrap();
    let ulpdu = usize::from(u16::from_be_bytes(len));
    let mut rest = vec![0; (2 + ulpdu).next_multiple_of(4) - 2 + 4];
    socket.read_exact(&mut rest).unwrap();
    rest.truncate(ulpdu);
    rest
}

/// A sender moves to ERR, and `before_the_answer` happens while it waits. Returns what becomes of its Send:
/// the peer acknowledges it afterwards.
fn moved_to_err(before_the_answer: impl FnOnce(&End, pthread_t)) -> WcStatus {
    let (end, peer) = with_raw_peer(StreamParams { placement_acks: true, ..uwarp() }, 4096);
    // So that nothing but the move to ERR requests the acknowledgement.
    let flags = SendFlags::SIGNALED | SendFlags::RELAXED;
    let wr = SendWr { wr_id: 1, op: SEND, flags, sges: &[end.sge(0, 64)] };
    end.qp.post_send(std::iter::once(wr)).unwrap();
    read_fpdu(&peer);
    let (tell, thread) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: no arguments.
            tell.send(unsafe { libc::pthread_self() }).unwrap();
            end.qp.modify(&to(QpState::Err)).unwrap();
        });
        let demand = read_fpdu(&peer);
        assert_eq!(demand[1] & 0xF, UWARP_ACK, "{demand:?}");
        before_the_answer(&end, thread.recv().unwrap());
        let ack = Ack { completed: 1 }.to_bytes();
        let _ = (&peer).write_all(&untagged(UWARP_ACK, QN_UWARP_ACK, 1, &ack));
    });
    end.look_only().status
}

/// It may be too late by chance, on a busy machine.
fn succeeds_once(before_the_answer: impl Fn(&End, pthread_t)) {
    for _ in 0..10 {
        if moved_to_err(&before_the_answer) == WcStatus::Success {
            return;
        }
        // The next wait is as long as the first one.
        std::thread::sleep(Duration::from_secs(1));
    }
    panic!("the wait for the acknowledgement has ended before it came");
}

/// Another thread's call waited until the move to ERR had ended its wait.
#[test]
fn others_use_a_queue_pair_that_waits_for_a_last_acknowledgement() {
    succeeds_once(|end, _| assert_eq!(end.qp.query().state, QpState::Rts));
}

/// A signal ended the wait.
#[test]
fn a_signal_does_not_end_the_wait_for_a_last_acknowledgement() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: the handler does nothing; another signal's is not changed.
    unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
    succeeds_once(|_, thread| {
        // So many that most come during a pause.
        for _ in 0..15 {
            // SAFETY: the thread ends after the answer, or when its wait is over: its number is kept then.
            assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
            std::thread::sleep(Duration::from_micros(50));
        }
    });
}
