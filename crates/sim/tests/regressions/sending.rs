//! The way out.

use uwarp_rnic::qp::{QpModify, QpState, Rtr, StreamParams};
use uwarp_rnic::{EventKind, WcStatus};
use uwarp_sim::Side::{A, B};

use crate::duo::{Duo, SEND, params, with_rtr};

/// A Write that the lower layer had taken was reported as done although the Read before it was flushed: a program that
/// stops counting at the first failure took the two for one.
#[test]
fn no_work_request_succeeds_behind_a_flushed_one() {
    let mut duo = Duo::new(params());
    let (read, write) = (duo.read_op(A, 0), duo.write_op(A, 4096));
    let sge = duo.sge(A, 0, 64);
    duo.queue(A, 1, read, sge);
    duo.queue(A, 2, write, sge);
    duo.world.pump(A);
    duo.world.end(A).core.close();
    assert_eq!(duo.sends(A), [(1, WcStatus::WrFlushErr), (2, WcStatus::WrFlushErr)]);
}

/// SQ_DRAINED was only looked for when the last work request of the queue was done, and in SQD those that were not started
/// stay.
#[test]
fn drained_is_told_with_work_requests_waiting() {
    let mut duo = Duo::new(params());
    let (read, sge) = (duo.read_op(A, 0), duo.sge(A, 0, 64));
    duo.queue(A, 1, read, sge);
    duo.world.pump(A);
    let sqd = QpModify { state: Some(QpState::Sqd), sqd_async_notify: Some(true), ..QpModify::default() };
    duo.world.end(A).core.modify(&sqd).unwrap();
    duo.queue(A, 2, SEND, sge);
    assert_eq!(duo.world.end(A).events.kinds(), []);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)]);
    assert_eq!(duo.world.end(A).events.kinds(), [EventKind::SqDrained]);
    assert!(!duo.world.end(A).core.query().sq_draining);

    duo.recv(B, 10, 0, 64);
    let rts = QpModify { state: Some(QpState::Rts), ..QpModify::default() };
    duo.world.end(A).core.modify(&rts).unwrap();
    duo.world.settle();
    assert_eq!(duo.sends(A), [(2, WcStatus::Success)]);
}

/// The peer counts the ready-to-receive Write among what it has placed, the sender did not count it among what it has sent:
/// each completion came one message too early.
#[test]
fn the_ready_to_receive_write_is_no_acknowledgement_of_the_first_send() {
    let mut duo = Duo::new(with_rtr(Rtr::SendWrite).map(|p| StreamParams { placement_acks: true, ..p }));
    let sge = duo.sge(A, 0, 64);
    duo.queue(A, 1, SEND, sge);
    // B has no receive: nothing but the ready-to-receive frame can be placed.
    duo.world.settle();
    assert_eq!(duo.sends(A), []);
    duo.recv(B, 10, 0, 64);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)]);
}
