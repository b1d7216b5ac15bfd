//! A peer that is gone, where the device looks like InfiniBand's: the queue pair keeps its state until the
//! program reacts.

use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::{Action, Disconnect, LinkEvent, Now, QpModify, QpState, StreamParams};
use uwarp_rnic::{EventKind, SendFlags, SendOp, SendWr, Sge, WcStatus};
use uwarp_sim::Side::{self, A, B};
use uwarp_wire::ddp::{QN_READ_REQUEST, QN_TERMINATE, Untagged};
use uwarp_wire::mpa;
use uwarp_wire::rdmap::ReadRequest;
use uwarp_wire::terminate::{RemoteProtection, Terminate, TerminateError, UntaggedBuffer};

use super::duo::{Duo, SEND, params};

const NONE: [EventKind; 0] = [];

fn infiniband() -> [StreamParams; 2] {
    params().map(|p| StreamParams { placement_acks: true, infiniband: true, ..p })
}

fn state(duo: &mut Duo, side: Side) -> QpState {
    duo.world.end(side).core.query().state
}

/// The flushes overtook completions that the program had not polled yet, and a Rust transport that takes a
/// flush for the end of its stream lost data.
#[test]
fn the_peers_disconnect_flushes_nothing() {
    let mut duo = Duo::new(infiniband());
    for id in 0..3 {
        duo.recv(B, id, 0, 64);
    }
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 1, SEND, sge);
    duo.world.disconnect(A);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)]);
    assert_eq!((duo.recvs(B), state(&mut duo, B)), (vec![(0, WcStatus::Success)], QpState::Rts));
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::PeerClosed]);
    duo.recv(B, 3, 0, 64);
    duo.world.settle();
    assert_eq!(duo.recvs(B), []);
    duo.world.disconnect(B);
    assert_eq!(duo.recvs(B), [1, 2, 3].map(|id| (id, WcStatus::WrFlushErr)));
    assert_eq!(state(&mut duo, B), QpState::Err);
    for side in Side::BOTH {
        assert_eq!(duo.world.end(side).events.kinds(), NONE);
    }
}

/// ibv_rc_pingpong as iWARP, by number: the peer left as soon as its last message was sent, and the program
/// took a flushed receive along with that message's completion.
#[test]
fn queue_pairs_by_number_outlive_their_stream_in_every_view() {
    for why in [Disconnect::PeerClosed, Disconnect::Reset] {
        let mut duo = Duo::new(params().map(|p| StreamParams { by_number: true, ..p }));
        for id in 0..2 {
            duo.recv(B, id, 0, 64);
        }
        let sge = duo.sge(A, 0, 8);
        duo.queue(A, 1, SEND, sge);
        duo.world.settle();
        if why == Disconnect::Reset {
            duo.world.end(B).core.handle_link(&Now::unread(), LinkEvent::Lost(why));
        } else {
            duo.world.disconnect(A);
        }
        duo.world.settle();
        assert_eq!(
            (duo.recvs(B), state(&mut duo, B)),
            (vec![(0, WcStatus::Success)], QpState::Rts),
            "{why:?}"
        );
        assert_eq!(
            (duo.world.end(B).disconnected.clone(), duo.world.end(B).events.kinds()),
            (vec![why], NONE.into())
        );
        duo.queue(B, 2, SEND, sge);
        duo.world.settle();
        assert_eq!((duo.sends(B), state(&mut duo, B)), (vec![(2, WcStatus::RetryExcErr)], QpState::Err));
    }
}

/// Only the flushes reported it.
#[test]
fn sends_to_a_peer_that_is_gone_run_out_of_retries() {
    let mut duo = Duo::new(infiniband());
    duo.recv(B, 9, 0, 64);
    duo.world.disconnect(A);
    duo.world.settle();
    let sge = duo.sge(B, 0, 8);
    for wr_id in 0..3 {
        let wr = SendWr { wr_id, op: SEND, flags: SendFlags::empty(), sges: &[sge] };
        duo.world.post_send(B, &wr).unwrap();
    }
    duo.world.settle_for(50_000_000);
    assert_eq!(
        (duo.sends(B), state(&mut duo, B)),
        (vec![], QpState::Rts),
        "the program can learn of the end first"
    );
    duo.world.settle();
    let expected = [(0, WcStatus::RetryExcErr), (1, WcStatus::WrFlushErr), (2, WcStatus::WrFlushErr)];
    assert_eq!(duo.sends(B), expected);
    assert_eq!((duo.recvs(B), state(&mut duo, B)), (vec![(9, WcStatus::WrFlushErr)], QpState::Err));
    assert_eq!(duo.world.end(B).events.kinds(), NONE);
}

/// A dead peer gave flushes only.
#[test]
fn a_peer_that_does_not_answer_fails_the_oldest_work_request() {
    for (why, infiniband_too) in [(Disconnect::Timeout, true), (Disconnect::Timeout, false)] {
        let mut duo = Duo::new(if infiniband_too { infiniband() } else { params() });
        let sge = duo.sge(A, 0, 8);
        let read = duo.read_op(A, 0);
        duo.queue(A, 1, read, sge);
        duo.queue(A, 2, SEND, sge);
        duo.world.end(A).core.handle_link(&Now::unread(), LinkEvent::Lost(why));
        let first = if infiniband_too { WcStatus::RetryExcErr } else { WcStatus::WrFlushErr };
        assert_eq!(duo.sends(A), [(1, first), (2, WcStatus::WrFlushErr)]);
        let kinds = duo.world.end(A).events.kinds();
        assert_eq!(kinds, if infiniband_too { vec![] } else { vec![EventKind::QpFatal] });
    }
}

/// A requester's error made QP_FATAL in addition to its completion.
#[test]
fn a_requesters_error_is_a_completion_and_no_event() {
    let mut duo = Duo::new(infiniband());
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 1, SendOp::Write { stag: 1, to: 0 }, sge);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::RemAccessErr)]);
    assert_eq!(duo.world.end(A).events.kinds(), NONE);
    assert_eq!(duo.world.end(B).events.kinds(), [EventKind::QpAccessErr]);
    assert_eq!([A, B].map(|side| state(&mut duo, side)), [QpState::Err; 2]);

    // A local error, too; the responder sees a peer that is gone.
    let mut duo = Duo::new(infiniband());
    let sge = duo.sge(A, 0, 8);
    duo.recv(B, 5, 0, 64);
    duo.queue(A, 1, SEND, Sge { lkey: 1, ..sge });
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::LocProtErr)]);
    assert_eq!((duo.recvs(B), state(&mut duo, B)), (vec![], QpState::Rts));
    for side in Side::BOTH {
        assert_eq!(duo.world.end(side).events.kinds(), NONE);
    }
}

/// It went to ERROR with its sender, and all posted work was flushed.
#[test]
fn a_receiver_outlives_a_sender_that_ran_out_of_retries() {
    let [a, b] = infiniband();
    let mut duo =
        Duo::new([a, StreamParams { rnr_timeout: Some(std::time::Duration::from_millis(30)), ..b }]);
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 1, SEND, sge);
    duo.queue(A, 2, SEND, sge);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::RnrRetryExcErr), (2, WcStatus::WrFlushErr)]);
    let none = TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer);
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::Sent(none)]);
    duo.recv(B, 5, 0, 64);
    duo.world.settle();
    assert_eq!((duo.recvs(B), state(&mut duo, B)), (vec![], QpState::Rts));
    assert_eq!(duo.world.end(B).events.kinds(), NONE);
}

/// The program may do everything that it may do in RTS, and start again.
#[test]
fn a_queue_pair_whose_peer_is_gone_can_be_reset() {
    let mut duo = Duo::new(infiniband());
    duo.world.disconnect(A);
    duo.world.settle();
    duo.recv(B, 1, 0, 64);
    let core = &mut duo.world.end(B).core;
    let to = |state| QpModify { state: Some(state), ..QpModify::default() };
    for state in [QpState::Sqd, QpState::Rts, QpState::Reset, QpState::Init] {
        core.modify(&to(state)).unwrap();
    }
    core.attach(&Now::unread(), params()[1]).unwrap();
    assert_eq!(core.query().state, QpState::Rts);
    core.leave_gone_peer();
    assert_eq!(core.query().state, QpState::Rts, "the failed connection was an earlier one");
    assert_eq!(duo.recvs(B), []);
}

/// The bytes of the Terminate were counted as the Send's.
#[test]
fn a_send_that_was_dropped_for_a_terminate_does_not_complete() {
    let stranger = |p| StreamParams { peer_is_uwarp: false, placement_acks: false, ..p };
    let mut duo = Duo::new(infiniband().map(stranger));
    let sge = duo.sge(A, 0, 4);
    let take_all = |duo: &mut Duo| {
        let core = &mut duo.world.end(A).core;
        let n = core.poll_transmit(&Now::unread()).unwrap().waiting();
        core.transmitted(&Now::unread(), n);
    };
    for wr_id in [1, 2] {
        duo.queue(A, wr_id, SEND, sge);
        duo.world.end(A).core.poll_transmit(&Now::unread());
        if wr_id == 1 {
            take_all(&mut duo);
        }
    }
    let cut_short = LinkEvent::End { partial: true, broken: false, unread: None };
    duo.world.end(A).core.handle_link(&Now::unread(), cut_short);
    take_all(&mut duo);
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)], "the kernel had the first one already");
}

/// Sends in flight failed because of an error that was not theirs.
#[test]
fn a_requesters_error_of_the_peer_fails_no_send_in_flight() {
    let mut duo = Duo::new(infiniband());
    let sges = [A, B].map(|side| duo.sge(side, 0, 8));
    // The Send waits for a receive.
    duo.queue(B, 7, SEND, sges[1]);
    duo.world.pump(B);
    duo.world.pump(A);
    duo.queue(A, 1, SEND, Sge { lkey: 1, ..sges[0] });
    duo.world.settle_for(50_000_000);
    assert_eq!(duo.sends(A), [(1, WcStatus::LocProtErr)]);
    assert_eq!((duo.sends(B), state(&mut duo, B)), (vec![], QpState::Rts));
    duo.world.settle();
    assert_eq!(duo.sends(B), [(7, WcStatus::RetryExcErr)]);
    assert_eq!(duo.world.end(B).events.kinds(), NONE);
}

/// It was flushed, though its receive had completed.
#[test]
fn a_send_in_front_of_a_refused_read_completes() {
    for uwarp in [false, true] {
        let with =
            |p| StreamParams { peer_is_uwarp: uwarp, placement_acks: uwarp, placement_reads: !uwarp, ..p };
        let mut duo = Duo::new(infiniband().map(with));
        duo.recv(B, 5, 0, 64);
        let sge = duo.sge(A, 0, 8);
        duo.queue(A, 1, SEND, sge);
        duo.queue(A, 2, SendOp::Read { stag: 1, to: 0, invalidate_local: false }, sge);
        duo.world.settle();
        assert_eq!(duo.recvs(B).first(), Some(&(5, WcStatus::Success)));
        let expected = [(1, WcStatus::Success), (2, WcStatus::RemAccessErr)];
        assert_eq!(duo.sends(A), expected, "toward a uwarp end: {uwarp}");
    }
}

/// No work request failed with an error, and the program saw only flushes.
#[test]
fn a_refused_placement_read_fails_the_oldest_work_request() {
    let with = |p| StreamParams {
        framing: Framing::PLAIN,
        peer_is_uwarp: false,
        placement_acks: false,
        placement_reads: true,
        ..p
    };
    let mut duo = Duo::new(infiniband().map(with));
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 1, SEND, sge);
    duo.world.pump(A);
    assert_eq!(duo.sent(A).len(), 2, "the placement Read is behind the Send");
    // Messages behind the Send are not placed, and no placement Read covers them.
    duo.queue(A, 2, SEND, sge);
    duo.queue(A, 3, SEND, sge);
    duo.world.pump(A);
    let request = Untagged { last: true, rsvdulp: 0x41, rsvdulp32: 0, qn: QN_READ_REQUEST, msn: 1, mo: 0 };
    let request = [&request.to_bytes()[..], &[0; ReadRequest::LEN]].concat();
    let error = TerminateError::RemoteProtection(RemoteProtection::AccessRights);
    let mut bytes = [0; Terminate::MAX_LEN];
    let len = Terminate::new(error, Some((&request, 46))).emit(&mut bytes);
    let header = Untagged { last: true, rsvdulp: 0x47, rsvdulp32: 0, qn: QN_TERMINATE, msn: 1, mo: 0 };
    let mut fpdu = u16::try_from(Untagged::LEN + len).unwrap().to_be_bytes().to_vec();
    fpdu.extend(header.to_bytes());
    fpdu.extend(&bytes[..len]);
    fpdu.resize(mpa::fpdu_len(Untagged::LEN + len), 0);
    duo.world.end(A).core.handle_input(&Now::unread(), &fpdu);
    let expected = [(1, WcStatus::Success), (2, WcStatus::RemAccessErr), (3, WcStatus::WrFlushErr)];
    assert_eq!(duo.sends(A), expected);
}

/// It ended the next connection at once.
#[test]
fn a_lost_completion_does_not_end_the_next_connection() {
    let mut duo = Duo::with_cq_depth(infiniband(), 2);
    let to = |state| QpModify { state: Some(state), ..QpModify::default() };
    duo.world.end(A).core.modify(&to(QpState::Err)).unwrap();
    duo.world.settle();
    let sge = duo.sge(A, 0, 4);
    for wr_id in 0..3 {
        duo.queue(A, wr_id, SEND, sge);
    }
    duo.world.settle();
    let core = &mut duo.world.end(A).core;
    core.modify(&to(QpState::Reset)).unwrap();
    core.attach(&Now::unread(), infiniband()[0]).unwrap();
    core.poll_transmit(&Now::unread());
    let ended = |action| matches!(action, Action::Disconnected { .. });
    assert!(!std::iter::from_fn(|| core.poll_action()).any(ended));
}
