//! The way out.

use uwarp_proto::framing::{Framing, Mpa};
use uwarp_rnic::qp::{Disconnect, LinkEvent, Now, QpModify, QpState, Rtr, StreamParams};
use uwarp_rnic::{EventKind, SendFlags, SendOp, SendWr, Sge, WcStatus};
use uwarp_sim::NetParams;
use uwarp_sim::Side::{A, B};
use uwarp_wire::terminate::{self, TerminateError};

use crate::duo::{Duo, SEND, params, with_rtr};

/// A Write that the lower layer had taken was reported as successful although the Read before it was flushed:
/// a program that stops counting at the first failure mistook one for the other.
#[test]
fn no_work_request_succeeds_after_a_flushed_one() {
    let mut duo = Duo::new(params());
    let (read, write) = (duo.read_op(A, 0), duo.write_op(A, 4096));
    let sge = duo.sge(A, 0, 64);
    duo.queue(A, 1, read, sge);
    duo.queue(A, 2, write, sge);
    duo.world.pump(A);
    let to_error = QpModify { state: Some(QpState::Err), ..QpModify::default() };
    duo.world.end(A).core.modify(&to_error).unwrap();
    assert_eq!(duo.sends(A), [(1, WcStatus::WrFlushErr), (2, WcStatus::WrFlushErr)]);
}

/// SQ_DRAINED was checked only when the last work request of the queue was done, but in SQD those that were
/// not started stay.
#[test]
fn drained_is_reported_with_work_requests_waiting() {
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

/// The peer counts the ready-to-receive Write as placed, but the sender did not count it as sent: each
/// completion was made one message too early.
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

/// A work request that fails because of a local error waits for earlier ones. Meanwhile the peer's Reads are
/// served; their responses were cut off after one segment.
#[test]
fn responses_continue_while_a_failed_work_request_waits() {
    let mut duo = Duo::new(params());
    let (read, sge) = (duo.read_op(A, 0), duo.sge(A, 0, 64));
    // A's Read is outstanding (B does not move), so its bad Send has to wait.
    duo.queue(A, 1, read, sge);
    duo.queue(A, 2, SEND, Sge { lkey: 0, ..sge });
    duo.world.pump(A);
    // B reads more than a segment.
    let (read, sge) = (duo.read_op(B, 0), duo.sge(B, 0, 200_000));
    let request = duo.request_bytes(B, read, sge);
    duo.world.end(A).core.handle_input(&Now::unread(), &request);
    duo.world.pump(A);
    let lines = duo.sent(A);
    assert_eq!(lines.iter().filter(|l| l.starts_with("ReadResp")).count(), 4, "{lines:#?}");
    assert!(lines.last().unwrap().starts_with("ReadResp L"), "{lines:#?}");
}

/// Bytes that were dropped for a Terminate were still counted for the markers, so that the peer could not
/// read why the stream ended.
#[test]
fn a_terminate_with_markers_is_readable_although_bytes_before_it_were_dropped() {
    let [a, b] = params();
    let stranger = |p| StreamParams { peer_is_uwarp: false, ..p };
    let [sends, takes] = [(true, false), (false, true)].map(|(send_markers, receive_markers)| {
        Framing::Mpa(Mpa { send_markers, receive_markers, ..Mpa::default() })
    });
    let markers = [StreamParams { framing: sends, ..a }, StreamParams { framing: takes, ..b }];
    let mut duo = Duo::new(markers.map(stranger));
    duo.recv(B, 10, 0, 5000);
    let sge = duo.sge(A, 0, 5000);
    duo.queue(A, 1, SEND, sge);
    duo.world.end(A).core.poll_transmit(&Now::unread());
    let cut_short = LinkEvent::End { partial: true, broken: false, unread: None };
    duo.world.end(A).core.handle_link(&Now::unread(), cut_short);
    duo.world.settle();
    let error = TerminateError::Mpa(terminate::Mpa::ConnectionLost);
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::Terminated(error)]);
}

/// RESET gives the program its buffers back, but queued bytes still referred to them.
#[test]
fn reset_releases_the_buffers() {
    let mut duo = Duo::new(params());
    duo.recv(B, 10, 0, 100_000);
    let sge = duo.sge(A, 0, 100_000);
    duo.queue(A, 1, SEND, sge);
    duo.world.end(A).core.poll_transmit(&Now::unread());
    let reset = QpModify { state: Some(QpState::Reset), ..QpModify::default() };
    duo.world.end(A).core.modify(&reset).unwrap();
    assert_eq!(duo.world.end(A).core.snapshot().waiting_bytes, 0);
    duo.world.settle();
    assert_eq!(duo.recvs(B), [(10, WcStatus::WrFlushErr)]);
}

/// A sender ran ahead of a slow receiver by everything that the socket holds: a sender with credits used them
/// up and had all its completions before the receiver saw the first message.
#[test]
fn completions_run_ahead_of_placement_by_a_bounded_number_of_messages() {
    let mut duo = Duo::new(params());
    let sge = duo.sge(A, 0, 64);
    let mut done = 0;
    for wr_id in 0..=240 {
        duo.queue(A, wr_id, SEND, sge);
        // B has no receive, the network takes all.
        duo.world.settle();
        done += duo.sends(A).len();
    }
    assert_eq!(done, 192);
    // Placed in groups: the peer need not acknowledge each.
    for wr_id in 0..128 {
        duo.recv(B, wr_id, 0, 64);
        duo.world.settle();
        assert_eq!(duo.recvs(B).len(), 1);
    }
    assert_eq!(duo.sends(A).len(), 241 - 192);
    assert_eq!(duo.sent(B).iter().filter(|line| line.starts_with("Ack")).count(), 1);
}

/// Sends in flight at A. The last `later` of them are sent so that the acknowledgement of the first nine is
/// sent before they arrive: they request no acknowledgement from B.
fn in_flight(receives: u64, later: u64) -> Duo {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    for id in 0..receives {
        duo.recv(B, id, 0, 64);
    }
    let sge = duo.sge(A, 0, 8);
    (1..=9).for_each(|id| duo.queue(A, id, SEND, sge));
    duo.world.pump(A);
    duo.world.settle_for(5_000);
    (10..10 + later).for_each(|id| duo.queue(A, id, SEND, sge));
    duo
}

fn successes(last: u64) -> Vec<(u64, WcStatus)> {
    (1..=last).map(|id| (id, WcStatus::Success)).collect()
}

/// Nothing before a Send that waited for a receive was acknowledged if only a later message had requested it.
#[test]
fn messages_placed_before_a_waiting_send_complete() {
    let mut duo = in_flight(13, 7);
    duo.world.pump(A);
    duo.world.settle();
    assert_eq!(duo.sends(A), successes(13));
}

/// The message that requested an acknowledgement failed while it was cut, so none was requested for those
/// before it, and nothing ever completed.
#[test]
fn a_work_request_that_fails_does_not_drop_the_ack_request() {
    let mut duo = in_flight(20, 8);
    let bad = Sge { lkey: 0, ..duo.sge(A, 0, 8) };
    duo.queue(A, 18, SEND, bad);
    duo.world.pump(A);
    duo.world.settle();
    let mut expected = successes(17);
    expected.push((18, WcStatus::LocProtErr));
    assert_eq!(duo.sends(A), expected);
}

/// Messages that B had placed, and that requested no acknowledgement, failed at A when B ended the connection
/// in the next moment.
#[test]
fn placed_messages_are_acknowledged_before_the_end() {
    let mut duo = in_flight(20, 3);
    duo.world.pump(A);
    duo.world.settle_for(30_000);
    duo.world.disconnect(B);
    duo.world.settle();
    assert_eq!(duo.sends(A), successes(12));
}

/// While B streams, A acknowledges, and never requested an acknowledgement of its own last messages.
#[test]
fn ack_requests_do_not_wait_for_acknowledgements_to_end() {
    let mut duo = in_flight(20, 3);
    duo.world.pump(A);
    let (write, sge) = (duo.write_op(B, 0), duo.sge(B, 0, 8));
    for id in 0..20 {
        duo.queue(B, id, write, sge);
        duo.world.pump(B);
        duo.world.settle_for(50_000);
    }
    assert_eq!(duo.sends(A), successes(12));
}

/// A receiver that is always in the middle of the next message acknowledged none: the sender's 16 large
/// Writes were all placed, and it continued only after the receiver's quarter of a millisecond.
#[test]
fn a_receiver_always_in_the_middle_of_a_message_acknowledges() {
    let net = NetParams { capacity: 2 << 20, ..NetParams::default() };
    let mut duo = Duo::with_net(params().map(|p| StreamParams { placement_acks: true, ..p }), net);
    let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 40_000));
    (1..=24).for_each(|id| duo.queue(A, id, write, sge));
    // All of them are in the socket when B receives.
    duo.world.pump(A);
    duo.world.settle_for(100_000);
    let acks = duo.sent(B).iter().filter(|line| line.starts_with("Ack")).count();
    assert!(acks >= 3, "{acks} acknowledgements");
}

/// A stream in which one work request in a hundred is signalled (as in perftest) still requested an
/// acknowledgement for one message in eight, and got one for each. It must request those that it waits for,
/// and sometimes one for the sake of its send queue.
#[test]
fn unsignalled_messages_seldom_request_acknowledgements() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (op, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    for wr_id in 1..=60 {
        let flags = if wr_id == 50 { SendFlags::SIGNALED } else { SendFlags::empty() };
        duo.world.end(A).core.post_send(&SendWr { wr_id, op, flags, sges: &[sge] }).unwrap();
    }
    duo.world.pump(A);
    duo.world.settle();
    let lines = duo.sent(A);
    let asked: Vec<usize> = (1..=60).filter(|n| lines[n - 1].contains(" ackreq ")).collect();
    // The send queue has 64 places.
    assert_eq!(asked, [17, 34, 50]);
    assert_eq!(duo.sends(A), [(50, WcStatus::Success)]);
    let idle = duo.world.end(A).core.snapshot();
    assert_eq!((idle.sends_posted, idle.waiting_bytes), (0, 0));
}

/// perftest posts until its window is full before it polls. If the peer kept up, few messages were in flight,
/// so each requested an acknowledgement, and the peer made a system call for every second or third one. A
/// program that has completions to poll does not wait for the next one.
#[test]
fn a_program_with_completions_to_poll_seldom_requests_acknowledgements() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (op, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    let post = |duo: &mut Duo, wr_id| {
        duo.queue(A, wr_id, op, sge);
        duo.world.pump(A);
        // Those that request it are acknowledged. Eight others take less time than the timer that requests it
        // for them.
        let asks = wr_id <= 72 || wr_id % 8 == 0 || wr_id == 100;
        duo.world.settle_for(if asks { 100_000 } else { 10_000 });
    };
    let asked = |duo: &Duo| -> Vec<usize> {
        let tells = |line: &&String| line.contains(" ackreq ") && !line.starts_with("Ack");
        duo.sent(A).iter().enumerate().filter(|(_, line)| tells(line)).map(|(n, _)| n + 1).collect()
    };
    // The send queue has 64 places: whether all messages are signalled is known then.
    for wr_id in 1..=64 {
        post(&mut duo, wr_id);
        assert_eq!(duo.sends(A), [(wr_id, WcStatus::Success)]);
    }
    assert_eq!(asked(&duo).len(), 64);
    (65..=96).for_each(|wr_id| post(&mut duo, wr_id));
    assert_eq!(asked(&duo)[64..], [65, 66, 67, 68, 69, 70, 71, 72, 80, 88, 96]);
    (97..=99).for_each(|wr_id| post(&mut duo, wr_id));
    let polled = duo.sends(A);
    assert_eq!(polled.last(), Some(&(96, WcStatus::Success)));
    // The program has nothing else to poll, and waits for the last three.
    assert!(duo.world.end(A).core.polled_in_vain());
    duo.world.pump(A);
    duo.world.settle_for(100_000);
    assert_eq!(duo.sends(A), [97, 98, 99].map(|wr_id| (wr_id, WcStatus::Success)));
    post(&mut duo, 100);
    assert_eq!(asked(&duo).len(), 76);
    assert_eq!(duo.sends(A), [(100, WcStatus::Success)]);
}

/// libfabric's fi_pingpong polls the completions of its Sends late. The acknowledgements rode on the answers;
/// when not every Send requested one, a separate frame had to request one, four thousand times a second.
#[test]
fn a_program_with_completions_to_poll_requests_acknowledgements_if_the_peer_answers() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (op, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    for wr_id in 1..=120 {
        duo.queue(A, wr_id, op, sge);
        duo.world.pump(A);
        duo.world.settle_for(20_000);
        answer(&mut duo);
        duo.sends(B);
        // The send queue has 64 places.
        if wr_id == 64 {
            duo.sends(A);
        }
    }
    let lines = duo.sent(A);
    assert_eq!(
        lines.iter().filter(|line| line.contains(" ackreq ") && !line.starts_with("Ack")).count(),
        120
    );
}

/// The program disconnects while an acknowledgement that does not cover all messages is in flight: the next
/// one is requested at once, not by the timer.
#[test]
fn an_orderly_end_does_not_wait_for_the_timer() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (op, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    for wr_id in 1..=20 {
        let core = &mut duo.world.end(A).core;
        core.post_send(&SendWr { wr_id, op, flags: SendFlags::empty(), sges: &[sge] }).unwrap();
        if wr_id == 17 {
            // The last one that requests an acknowledgement.
            duo.world.pump(A);
            duo.world.settle_for(6_000);
        }
    }
    duo.world.pump(A);
    duo.world.disconnect(A);
    duo.world.settle_for(100_000);
    assert_eq!(duo.world.end(A).disconnected, [Disconnect::LocalClosed]);
}

/// It is done at once, but completes after the Write, for which no acknowledgement would have been requested
/// for long.
#[test]
fn a_local_invalidate_after_an_unsignalled_message_requests_an_acknowledgement() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (op, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    let invalidate = SendOp::LocalInvalidate { stag: duo.mr[0].stag() };
    let core = &mut duo.world.end(A).core;
    core.post_send(&SendWr { wr_id: 1, op, flags: SendFlags::empty(), sges: &[sge] }).unwrap();
    core.post_send(&SendWr { wr_id: 2, op: invalidate, flags: SendFlags::SIGNALED, sges: &[] }).unwrap();
    duo.world.pump(A);
    assert!(duo.world.end(A).core.polled_in_vain());
    duo.world.settle();
    assert_eq!(duo.sends(A), [(2, WcStatus::Success)]);
}

/// A Send whose STag must not be invalidated was acknowledged before it was refused.
#[test]
fn a_refused_invalidation_is_not_acknowledged() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    duo.recv(B, 1, 0, 64);
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 1, SendOp::Send { invalidate: Some(0xDEAD) }, sge);
    duo.world.pump(A);
    duo.world.settle();
    let sends = duo.sends(A);
    assert!(matches!(sends[..], [(1, status)] if status != WcStatus::Success), "{sends:?}");
}

/// `ib_write_lat` against Linux siw: perftest's server writes first, and siw's client requests no
/// ready-to-receive indication and waits. RFC 5044 section 7.1.2 rule 4 then forbids sending; posted work is
/// kept, and a snapshot shows that it waits.
#[test]
fn a_responder_does_not_send_first() {
    let [a, b] = params().map(|p| StreamParams { peer_is_uwarp: false, ..p });
    let mut duo = Duo::new([a, StreamParams { wait_first_frame: true, ..b }]);
    duo.world.settle();
    assert_eq!(duo.world.end(B).established, 1, "the program may continue; the peer may send late");
    assert!(!duo.world.end(B).core.snapshot().muted, "nothing is posted");
    let (write, sge) = (duo.write_op(B, 0), duo.sge(B, 0, 64));
    duo.queue(B, 1, write, sge);
    duo.queue(B, 2, write, sge);
    duo.world.settle();
    assert_eq!((duo.sent(B), duo.sends(B)), (vec![], vec![]));
    assert!(duo.world.end(B).core.snapshot().muted);

    let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 64));
    duo.queue(A, 1, write, sge);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)]);
    assert_eq!(duo.sends(B), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert!(!duo.world.end(B).core.snapshot().muted);
}

/// Sends B a Write that requests an acknowledgement, and lets B poll without result until it releases the
/// acknowledgement; returns how many polls that takes.
fn polls_until_released(duo: &mut Duo) -> usize {
    let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    duo.queue(A, 1, write, sge);
    duo.world.pump(A);
    duo.world.settle_for(20_000);
    (1..).find(|_| duo.world.end(B).core.polled_in_vain()).unwrap()
}

fn answer(duo: &mut Duo) {
    let (write, sge) = (duo.write_op(B, 0), duo.sge(B, 0, 8));
    duo.queue(B, 1, write, sge);
    duo.world.pump(B);
    duo.world.settle_for(20_000);
}

/// libfabric's ofi_rxm polls until nothing is left before its program can answer. That empty poll released
/// the acknowledgement, which was sent alone, in each round: twice the time, and twice the calls.
#[test]
fn an_acknowledgement_waits_for_a_program_that_polls_again_before_it_answers() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    answer(&mut duo);
    for round in 1..=10 {
        duo.queue(A, round, write, sge);
        duo.world.pump(A);
        duo.world.settle_for(20_000);
        let sent = duo.sent(B).len();
        assert!(!duo.world.end(B).core.polled_in_vain());
        duo.world.pump(B);
        assert_eq!(duo.sent(B).len(), sent, "round {round}");
        answer(&mut duo);
        assert_eq!(duo.sends(A), [(round, WcStatus::Success)], "it rode on the answer");
    }
}

/// The more often a program does not answer within some polls, the shorter its acknowledgements are held.
/// What it sends because of messages that arrived meanwhile does not count as an answer. If it sends
/// something by itself just after a release, the full time applies again.
#[test]
fn an_acknowledgement_is_held_where_that_pays() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    answer(&mut duo);
    let polls: Vec<_> = (0..7)
        .map(|_| {
            let polls = polls_until_released(&mut duo);
            duo.world.pump(B);
            duo.world.settle_for(20_000);
            // It arrives, and requests an acknowledgement, after the other was acknowledged.
            let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
            duo.queue(A, 2, write, sge);
            duo.world.pump(A);
            duo.world.settle_for(20_000);
            answer(&mut duo);
            polls
        })
        .collect();
    assert_eq!(polls, [17, 9, 5, 3, 2, 1, 1]);
    assert_eq!(polls_until_released(&mut duo), 1);
    duo.world.pump(B);
    answer(&mut duo);
    assert_eq!(polls_until_released(&mut duo), 17);
}
