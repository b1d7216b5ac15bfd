//! What uwarp ends say of themselves: in the initiator's ready-to-receive Write (docs/adr/002), and when a
//! program gives its number of retries (docs/adr/004).

use uwarp_proto::setup::PeerData;
use uwarp_rnic::qp::{QpCaps, QpModify, QpState, Rtr, ShownPsns, StreamParams};
use uwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr, WcStatus};
use uwarp_sim::Side::{A, B};
use uwarp_sim::{EndConfig, NetParams, Side, World};
use uwarp_wire::introduction::Half;

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

/// Two queue pairs that their programs connect by number, in RTR when the stream begins.
fn by_number(acks: bool) -> World {
    let [a, b] = with_rtr(Rtr::SendWrite);
    in_rtr([a, b].map(|params| StreamParams { placement_acks: acks, infiniband: acks, ..params }))
}

fn in_rtr(params: [StreamParams; 2]) -> World {
    let caps =
        QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let config = EndConfig { caps, ..EndConfig::default() };
    let mut world = World::new(1, [config; 2], NetParams::default(), [None, None]);
    for side in Side::BOTH {
        world.end(side).init();
        let rtr = QpModify {
            state: Some(QpState::Rtr),
            awaits_stream: true,
            min_rnr_timer: Some(14),
            ..QpModify::default()
        };
        world.end(side).core.modify(&rtr).unwrap();
    }
    world.attach(params);
    world.settle();
    world
}

fn statuses(world: &mut World, side: Side) -> Vec<WcStatus> {
    world.end(side).sends().iter().map(|wc| wc.status).collect()
}

/// The program gives the number with the move to RTS. The peer, whose stream was there already, waited for
/// ever.
#[test]
fn a_number_of_retries_that_is_given_when_the_stream_is_there_counts() {
    for acks in [false, true] {
        for sender in Side::BOTH {
            for retries in [0, 2, 7] {
                let mut world = by_number(acks);
                let rts =
                    QpModify { state: Some(QpState::Rts), rnr_retry: Some(retries), ..QpModify::default() };
                world.end(sender).core.modify(&rts).unwrap();
                let send = SendWr { wr_id: 1, op: SEND, flags: SendFlags::SIGNALED, sges: &[] };
                world.post_send(sender, &send).unwrap();
                world.settle();
                let case = format!("{retries} retries, {sender:?} sends, {acks}");
                // What completes with the kernel's word has completed; the peer ends the stream all the same.
                let early = if acks { vec![] } else { vec![WcStatus::Success] };
                let ended = !world.end(sender.peer()).disconnected.is_empty();
                assert_eq!(ended, retries < 7, "{case}");
                if retries < 7 {
                    let late = if acks { vec![WcStatus::RnrRetryExcErr] } else { early };
                    assert_eq!(statuses(&mut world, sender), late, "{case}");
                    continue;
                }
                assert_eq!(statuses(&mut world, sender), early, "{case}");
                world.post_recv(sender.peer(), &RecvWr { wr_id: 2, sges: &[] }).unwrap();
                world.settle();
                let rest = if acks { vec![WcStatus::Success] } else { vec![] };
                assert_eq!(statuses(&mut world, sender), rest, "{case}");
                assert_eq!(world.end(sender.peer()).recvs().len(), 1, "{case}");
            }
        }
    }
}

/// Set-up can compare one packet sequence number only while an end is in RTR. What its program set later was
/// not compared: this end sent to a peer that over InfiniBand would have dropped it.
#[test]
fn a_packet_sequence_number_that_is_set_when_the_stream_is_there_must_fit() {
    const PSN: u32 = 0x00AB_CDEF;
    for (late, half, used) in Side::BOTH
        .into_iter()
        .flat_map(|late| [(late, Half::Lower, false), (late, Half::Upper, false), (late, Half::Upper, true)])
    {
        for (set, fits) in [(PSN, true), (PSN ^ 0x1001, false)] {
            let shown = ShownPsns { half, expects: Some(half.of(PSN)), begins: None };
            let params = with_rtr(Rtr::SendWrite);
            let mut world = in_rtr(params.map(|p| StreamParams { by_number: true, psns: Some(shown), ..p }));
            // The peer has set its own, and may have used the stream.
            let rts = QpModify { state: Some(QpState::Rts), sq_psn: Some(PSN), ..QpModify::default() };
            world.end(late.peer()).core.modify(&rts).unwrap();
            if used {
                world.post_recv(late, &RecvWr { wr_id: 2, sges: &[] }).unwrap();
                let send = SendWr { wr_id: 1, op: SEND, flags: SendFlags::SIGNALED, sges: &[] };
                world.post_send(late.peer(), &send).unwrap();
                world.settle();
            }
            world.end(late).core.modify(&QpModify { sq_psn: Some(set), ..rts }).unwrap();
            world.settle();
            let case = format!("{late:?} {half:?} {used} {set:#x}");
            assert_eq!(world.end(late).disconnected.is_empty(), fits, "{case}");
            assert_eq!(world.end(late.peer()).disconnected.is_empty(), fits, "{case}");
            let waits = world.end(late).core.awaits_stream().is_some();
            assert_eq!(waits, !fits && !used, "{case}: a stream that was not used does not count");
            if used && !fits {
                let send = SendWr { wr_id: 1, op: SEND, flags: SendFlags::SIGNALED, sges: &[] };
                world.post_send(late, &send).unwrap();
                world.settle();
                assert_eq!(statuses(&mut world, late), [WcStatus::RetryExcErr], "{case}");
            }
        }
    }
}
