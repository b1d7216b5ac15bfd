//! The way out.

use uwarp_proto::framing::{Framing, Mpa};
use uwarp_rnic::qp::{Disconnect, LinkEvent, Now, QpModify, QpState, Rtr, StreamParams};
use uwarp_rnic::{EventKind, SendFlags, SendOp, SendWr, Sge, WcStatus};
use uwarp_sim::NetParams;
use uwarp_sim::Side::{A, B};
use uwarp_wire::terminate::{self, TerminateError};

use crate::duo::{Duo, SEND, params, with_rtr};

/// A Write that the lower layer had taken was reported as done although the Read before it was flushed: a
/// program that stops counting at the first failure took the two for one.
#[test]
fn no_work_request_succeeds_behind_a_flushed_one() {
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

/// SQ_DRAINED was only looked for when the last work request of the queue was done, and in SQD those that
/// were not started stay.
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

/// The peer counts the ready-to-receive Write among what it has placed, the sender did not count it among
/// what it has sent: each completion came one message too early.
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

/// A work request that fails by its own fault waits for earlier ones. Meanwhile the peer's Reads are served;
/// their responses were cut off after one segment.
#[test]
fn responses_go_on_while_a_failed_work_request_waits() {
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

/// Bytes that were dropped in favour of a Terminate were still counted for the markers, so that the peer
/// could not read why the stream ended.
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
    let cut_short = LinkEvent::End { partial: true, broken: false };
    duo.world.end(A).core.handle_link(&Now::unread(), cut_short);
    duo.world.settle();
    let error = TerminateError::Mpa(terminate::Mpa::ConnectionLost);
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::Terminated(error)]);
}

/// RESET gives the program its buffers back, but what was queued still named them.
#[test]
fn reset_lets_go_of_the_buffers() {
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

/// A receiver that is slow to place was run ahead of by all that its socket holds: a sender with credits used
/// them up and had all its completions before the first message was seen.
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
    // Placed in lots: the peer need not tell of each.
    for wr_id in 0..128 {
        duo.recv(B, wr_id, 0, 64);
        duo.world.settle();
        assert_eq!(duo.recvs(B).len(), 1);
    }
    assert_eq!(duo.sends(A).len(), 241 - 192);
    assert_eq!(duo.sent(B).iter().filter(|line| line.starts_with("Ack")).count(), 1);
}

/// Sends under way at A, `later` of them so that the acknowledgement of the first nine is on its way before
/// they arrive: B is not asked about those.
fn under_way(receives: u64, later: u64) -> Duo {
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

/// The sender was told of nothing in front of a Send that waited for a receive, when it had asked about a
/// later message only.
#[test]
fn what_is_placed_in_front_of_a_waiting_send_completes() {
    let mut duo = under_way(13, 7);
    duo.world.pump(A);
    duo.world.settle();
    assert_eq!(duo.sends(A), successes(13));
}

/// The message that asked failed while it was cut, so nobody asked about those before it, and nothing ever
/// completed.
#[test]
fn a_work_request_that_fails_takes_no_question_with_it() {
    let mut duo = under_way(20, 8);
    let bad = Sge { lkey: 0, ..duo.sge(A, 0, 8) };
    duo.queue(A, 18, SEND, bad);
    duo.world.pump(A);
    duo.world.settle();
    let mut expected = successes(17);
    expected.push((18, WcStatus::LocProtErr));
    assert_eq!(duo.sends(A), expected);
}

/// What B had placed and was not asked about failed at A when B ended the connection in the next moment.
#[test]
fn what_is_placed_is_told_before_the_end() {
    let mut duo = under_way(20, 3);
    duo.world.pump(A);
    duo.world.settle_for(30_000);
    duo.world.disconnect(B);
    duo.world.settle();
    assert_eq!(duo.sends(A), successes(12));
}

/// While B streams, A acknowledges, and never asked about its own last messages.
#[test]
fn questions_do_not_wait_for_acknowledgements_to_end() {
    let mut duo = under_way(20, 3);
    duo.world.pump(A);
    let (write, sge) = (duo.write_op(B, 0), duo.sge(B, 0, 8));
    for id in 0..20 {
        duo.queue(B, id, write, sge);
        duo.world.pump(B);
        duo.world.settle_for(50_000);
    }
    assert_eq!(duo.sends(A), successes(12));
}

/// A receiver that is always in the middle of the next message told of none: the sender of 16 large Writes
/// had them all placed, and went on only when the receiver's quarter of a millisecond was over.
#[test]
fn who_is_always_in_the_middle_of_a_message_tells_all_the_same() {
    let net = NetParams { capacity: 2 << 20, ..NetParams::default() };
    let mut duo = Duo::with_net(params().map(|p| StreamParams { placement_acks: true, ..p }), net);
    let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 40_000));
    (1..=24).for_each(|id| duo.queue(A, id, write, sge));
    // All of them lie in the socket when B looks.
    duo.world.pump(A);
    duo.world.settle_for(100_000);
    let told = duo.sent(B).iter().filter(|line| line.starts_with("Ack")).count();
    assert!(told >= 3, "told {told} times");
}

/// A stream of which one work request in a hundred is signalled (perftest's) asked about one message in eight
/// all the same, and had an acknowledgement for each. It asks about what it waits for, and now and then for
/// the sake of its send queue.
#[test]
fn unsignalled_messages_ask_seldom() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (op, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    for wr_id in 1..=60 {
        let flags = if wr_id == 50 { SendFlags::SIGNALED } else { SendFlags::empty() };
        duo.world.end(A).core.post_send(&SendWr { wr_id, op, flags, sges: &[sge] }).unwrap();
    }
    duo.world.pump(A);
    duo.world.settle();
    let lines = duo.sent(A);
    let asked: Vec<usize> = (1..=60).filter(|n| lines[n - 1].contains(" tell ")).collect();
    // The send queue has 64 places.
    assert_eq!(asked, [17, 34, 50]);
    assert_eq!(duo.sends(A), [(50, WcStatus::Success)]);
    let idle = duo.world.end(A).core.snapshot();
    assert_eq!((idle.sends_posted, idle.waiting_bytes), (0, 0));
}

/// perftest posts until its window is full before it polls. Where the peer kept up, few messages were in
/// flight, so each of them asked, and the peer made a call for each second or third one. A program that has
/// completions to poll does not wait for the next one.
#[test]
fn a_program_with_completions_to_poll_asks_seldom() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (op, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    let post = |duo: &mut Duo, wr_id| {
        duo.queue(A, wr_id, op, sge);
        duo.world.pump(A);
        // Those that ask are acknowledged. Eight others take less time than the timer that asks about them.
        let asks = wr_id <= 72 || wr_id % 8 == 0 || wr_id == 100;
        duo.world.settle_for(if asks { 100_000 } else { 10_000 });
    };
    let asked = |duo: &Duo| -> Vec<usize> {
        let tells = |line: &&String| line.contains(" tell ") && !line.starts_with("Ack");
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

/// libfabric's fi_pingpong leaves the completions of its Sends for later. The acknowledgements rode on the
/// answers; without a request for each, one had to be requested by a frame of its own four thousand times a
/// second.
#[test]
fn a_program_with_completions_to_poll_asks_all_the_same_where_the_peer_answers() {
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
    assert_eq!(lines.iter().filter(|line| line.contains(" tell ") && !line.starts_with("Ack")).count(), 120);
}

/// The program disconnects while an acknowledgement is on its way that leaves a rest: asked about in that
/// moment, not by the timer.
#[test]
fn an_orderly_end_does_not_wait_for_the_timer() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let (op, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
    for wr_id in 1..=20 {
        let core = &mut duo.world.end(A).core;
        core.post_send(&SendWr { wr_id, op, flags: SendFlags::empty(), sges: &[sge] }).unwrap();
        if wr_id == 17 {
            // The last that asks.
            duo.world.pump(A);
            duo.world.settle_for(6_000);
        }
    }
    duo.world.pump(A);
    duo.world.disconnect(A);
    duo.world.settle_for(100_000);
    assert_eq!(duo.world.end(A).disconnected, [Disconnect::LocalClosed]);
}

/// It is done at once, but completes behind the Write, of which nobody would have asked for long.
#[test]
fn a_local_invalidate_behind_an_unsignalled_message_has_the_peer_asked() {
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

/// A Send whose STag may not be invalidated was acknowledged before it was refused.
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

/// `ib_write_lat` against Linux siw: perftest's server writes first, siw's client asks for no
/// ready-to-receive indication and waits. RFC 5044 section 7.1.2 rule 4 lets nothing go out then; what is
/// posted is kept, and that it waits can be seen.
#[test]
fn a_responder_does_not_speak_first() {
    let [a, b] = params().map(|p| StreamParams { peer_is_uwarp: false, ..p });
    let mut duo = Duo::new([a, StreamParams { wait_first_fpdu: true, ..b }]);
    duo.world.settle();
    assert_eq!(duo.world.end(B).established, 1, "the program may go on, nobody knows when the peer speaks");
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

/// Has B get a Write it is asked about, and poll in vain until it lets go of the acknowledgement; says how
/// many polls that takes.
fn polls_until_told(duo: &mut Duo) -> usize {
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

/// libfabric's ofi_rxm polls until nothing is left before its program can answer. That poll in vain let go of
/// the acknowledgement, which went by itself, in each round: twice the time, and twice the calls.
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

/// A program that does not answer within some polls has its peer wait the less the more often that happens;
/// what it sends because of what came meanwhile is no answer. One that sends something of its own accord just
/// after it was let go gets the time back.
#[test]
fn an_acknowledgement_is_held_where_that_pays() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    answer(&mut duo);
    let polls: Vec<_> = (0..7)
        .map(|_| {
            let polls = polls_until_told(&mut duo);
            duo.world.pump(B);
            duo.world.settle_for(20_000);
            // It comes, and is asked about, after the other was acknowledged.
            let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 8));
            duo.queue(A, 2, write, sge);
            duo.world.pump(A);
            duo.world.settle_for(20_000);
            answer(&mut duo);
            polls
        })
        .collect();
    assert_eq!(polls, [17, 9, 5, 3, 2, 1, 1]);
    assert_eq!(polls_until_told(&mut duo), 1);
    duo.world.pump(B);
    answer(&mut duo);
    assert_eq!(polls_until_told(&mut duo), 17);
}
