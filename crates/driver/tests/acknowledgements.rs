//! Acknowledgements of placed messages wait for something to ride on, but not for ever, and not beyond the
//! end of the stream.

#![allow(missing_docs)]

mod common;

use std::time::Duration;

use common::{End, connect, to, uwarp};
use uwarp_driver::StreamParams;
use uwarp_rnic::qp::QpState;
use uwarp_rnic::{SendFlags, SendOp, SendWr, WcStatus};

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
