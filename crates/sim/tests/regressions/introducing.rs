//! What a uwarp initiator says of itself in its ready-to-receive Write (docs/adr/002).

use uwarp_proto::setup::PeerData;
use uwarp_rnic::qp::{Rtr, StreamParams};
use uwarp_rnic::{SendOp, WcStatus};
use uwarp_sim::Side::{A, B};

use super::duo::{Duo, with_rtr};

const SEND: SendOp = SendOp::Send { invalidate: None };

/// Only the initiator wishes acknowledgements; the responder, which hears of it last, did not send any.
#[test]
fn a_wish_for_acknowledgements_reaches_the_responder() {
    let [a, b] = with_rtr(Rtr::SendWrite);
    let wish = PeerData { placement_acks: true, ..PeerData::new() };
    let a = StreamParams { placement_acks: true, rtr_stag_to: wish.to_rtr(), ..a };
    let mut duo = Duo::new([a, b]);
    let sge = duo.sge(A, 0, 64);
    duo.queue(A, 1, SEND, sge);
    duo.world.settle();
    assert_eq!(duo.sends(A), [], "nobody has placed it yet");
    duo.recv(B, 10, 0, 64);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)]);
}

/// A stranger that sets our reserved bit by mistake is spoken to as a stranger once its first FPDU shows it.
#[test]
fn a_stranger_that_was_taken_for_uwarp_gets_small_fpdus() {
    let [a, b] = with_rtr(Rtr::SendWrite);
    let a = StreamParams { rtr_stag_to: (0, 0), ..a };
    let b = StreamParams { placement_acks: true, ..b };
    let mut duo = Duo::new([a, b]);
    duo.world.settle();
    duo.recv(A, 10, 0, 5000);
    let sge = duo.sge(B, 0, 5000);
    duo.queue(B, 1, SEND, sge);
    duo.world.pump(B);
    let lines = duo.sent(B);
    assert_eq!(
        lines.iter().filter(|line| line.starts_with("Send")).count(),
        4,
        "one TCP segment each: {lines:#?}"
    );
    duo.world.settle();
    assert_eq!(duo.sends(B), [(1, WcStatus::Success)], "and no acknowledgement is waited for");
}

/// A stranger that does not give the indication it agreed on: what comes first instead is the program's.
#[test]
fn a_first_write_that_carries_something_is_counted() {
    for (rtr, messages) in [(Rtr::None, 1), (Rtr::SendWrite, 1)] {
        let [a, b] = with_rtr(rtr).map(|p| StreamParams { peer_is_uwarp: false, ..p });
        let mut duo = Duo::new([a, b]);
        let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
        duo.queue(A, 1, write, sge);
        duo.world.settle();
        let received = duo.world.end(B).core.snapshot().counters.received.write;
        assert_eq!((received.messages, received.bytes), (messages, 8), "{rtr:?}");
    }
}
