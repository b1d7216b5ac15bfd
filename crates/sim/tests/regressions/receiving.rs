//! The way in.

use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::{Disconnect, LinkEvent, Now, QpModify, QpState, Rtr, StreamParams};
use uwarp_rnic::{Access, EventKind, SendOp, WcStatus};
use uwarp_sim::Side::{A, B};
use uwarp_sim::{End, EndConfig, Fault, NetParams};
use uwarp_wire::terminate::{
    Mpa, RemoteOperation, RemoteProtection, TaggedBuffer, TerminateError, UntaggedBuffer,
};

use crate::duo::{Duo, SEND, SIZE, params, with_rtr};

/// Pieces so small that large FPDUs are received straight into place.
fn small_pieces() -> NetParams {
    NetParams { piece: 3000, ..NetParams::default() }
}

/// Only the part of a large Write that had arrived was checked: it was placed up to the region's end, and the
/// Terminate did not name the segment that it was about.
#[test]
fn a_large_write_is_checked_as_a_whole_before_it_is_placed() {
    let mut duo = Duo::with_net(params(), small_pieces());
    duo.memory[0].write(0, &[7; 65_536]);
    let (write, sge) = (duo.write_op(A, SIZE - 40_000), duo.sge(A, 0, 65_536));
    duo.queue(A, 1, write, sge);
    duo.world.settle();
    let error = TerminateError::TaggedBuffer(TaggedBuffer::BaseOrBounds);
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::Sent(error)]);
    let lines = duo.sent(B);
    assert!(lines[0].contains("(1/1/01) segment=") && lines[0].contains("[Write"), "{lines:?}");
    // It arrived in two segments; nothing is placed from the one that does not fit.
    let placed = duo.memory[1].snapshot().iter().filter(|b| **b == 7).count();
    assert_eq!(placed, 32_768);
}

/// A bit flipped in the length field of an FPDU that was received straight into place: the following bytes
/// were written beyond the message, because the announcing segment shows where the message begins, but not
/// where it ends.
#[test]
fn no_flipped_bit_leads_out_of_the_message() {
    const LEN: u32 = 16_384;
    // The announcing segments, and the header of the one with the payload.
    for (at, bit) in (0..60).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        let mut duo = Duo::with_fault(params(), small_pieces(), Fault::Flip { at, bit });
        duo.memory[0].write(0, &[7; LEN as usize]);
        let (write, sge) = (duo.write_op(A, 40_000), duo.sge(A, 0, LEN));
        for id in 1..6 {
            duo.queue(A, id, write, sge);
        }
        duo.world.settle();
        let mut found = duo.memory[1].snapshot();
        found[40_000..40_000 + LEN as usize].fill(0);
        assert_eq!(found.iter().position(|b| *b != 0), None, "byte {at}, bit {bit}");
    }
}

/// A region was invalidated in the middle of a directly placed Write: the Terminate reported it without the
/// header that it must carry.
#[test]
fn a_terminate_in_the_middle_of_a_direct_placement_quotes_the_header() {
    let mut duo =
        Duo::with_net(params().map(|p| StreamParams { framing: Framing::PLAIN, ..p }), small_pieces());
    let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 200_000));
    duo.queue(A, 1, write, sge);
    duo.world.pump(A);
    let bytes: Vec<u8> = duo.world.pipe(A).tapped().iter().flat_map(|(_, b)| b.clone()).collect();
    // The announcing segments and a part of the first large one.
    let b = &mut duo.world.end(B).core;
    let used = b.handle_input(&Now::unread(), &bytes[..5000]);
    assert_eq!(used, 5000, "it is placed directly");
    duo.mr[1].deregister();
    let _ = duo.world.end(B).core.rx_plan(&[], 131_072, &mut Default::default());
    duo.world.pump(B);
    let lines = duo.sent(B);
    assert!(lines[0].contains("(1/1/00) segment=") && lines[0].contains("[Write"), "{lines:?}");
}

/// The stream ended in the middle of an FPDU, and neither the peer nor the program learned that something was
/// lost.
#[test]
fn an_end_within_an_fpdu_is_terminated_and_reported() {
    let mut duo = Duo::new(params());
    duo.world.inject(B, &[0x10, 0x00, 0x41]);
    duo.world.settle();
    let end = LinkEvent::End { partial: true, broken: false, unread: None };
    duo.world.end(B).core.handle_link(&Now::unread(), end);
    duo.world.settle();
    let lost = TerminateError::Mpa(Mpa::ConnectionLost);
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::Sent(lost)]);
    assert_eq!(duo.world.end(B).events.kinds(), [EventKind::QpFatal]);
    assert_eq!(duo.world.end(A).disconnected, [Disconnect::Terminated(lost)]);
}

/// A program that posts its first receives when the connection is reported to be up got no report if the
/// peer's first message was a Send.
#[test]
fn a_send_without_receive_shows_that_the_peer_is_there() {
    let mut duo = Duo::new(with_rtr(Rtr::None));
    let sge = duo.sge(A, 0, 16);
    duo.queue(A, 1, SEND, sge);
    duo.world.settle();
    assert_eq!(duo.world.end(B).established, 1);
    duo.recv(B, 10, 0, 16);
    duo.world.settle();
    assert_eq!(duo.recvs(B), [(10, WcStatus::Success)]);
    assert_eq!(duo.world.end(B).established, 1);
}

/// Memory that the peer reads was passed to the kernel by address: the program changed it meanwhile, which it
/// may do, and the CRC no longer matched.
#[test]
fn memory_may_change_while_the_peer_reads_it() {
    let mut duo = Duo::with_net(params(), NetParams { capacity: 5000, ..NetParams::default() });
    let (read, sge) = (duo.read_op(A, 0), duo.sge(A, 0, 100_000));
    duo.queue(A, 1, read, sge);
    for round in 0..60u8 {
        duo.world.settle_for(5_000);
        duo.memory[1].write(0, &vec![round; 100_000]);
    }
    assert_eq!(duo.sends(A), [], "the Read continues");
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)]);
    assert_eq!(duo.world.end(A).disconnected, []);
}

/// A region was deregistered while its bytes waited to be sent: they were sent with their contents at that
/// time, whatever the memory was used for.
#[test]
fn a_deregistered_region_is_not_read_any_more() {
    let mut duo = Duo::with_net(params(), NetParams { capacity: 5000, ..NetParams::default() });
    let (first, second) = (duo.read_op(A, 0), duo.read_op(A, 4096));
    let (write, sge) = (duo.write_op(A, 900_000), duo.sge(A, 0, 800_000));
    let small = duo.sge(A, 900_000, 8);
    duo.queue(A, 1, write, small);
    duo.queue(A, 2, first, small);
    duo.queue(A, 3, second, sge);
    duo.queue(A, 4, write, small);
    duo.world.settle_for(100_000);
    duo.mr[1].deregister();
    duo.memory[1].write(0, &vec![0x55; SIZE]);
    duo.world.settle();
    let found = duo.memory[0].read(0, 800_000);
    assert!(!found.contains(&0x55), "bytes of another owner");
    // The Terminate names the Read, so the right work request fails.
    let lines = duo.sent(B);
    let last = lines.last().unwrap();
    assert!(last.contains("(0/1/00) segment=46 [ReadReq L qn=1 msn=2"), "{lines:?}");
    let status: Vec<_> = duo.sends(A);
    let expected = [WcStatus::Success, WcStatus::Success, WcStatus::RemAccessErr, WcStatus::WrFlushErr];
    assert_eq!(status.iter().map(|s| s.1).collect::<Vec<_>>(), expected);
}

/// The peer could invalidate a program's own region, which grants it no right.
#[test]
fn a_region_without_remote_rights_cannot_be_invalidated_by_the_peer() {
    let mut duo = Duo::new(params());
    let pd = duo.world.end(B).pd.clone();
    let local = duo.memory[1].register(&pd, 0, 4096, Access::LOCAL_WRITE);
    duo.recv(B, 10, 0, 16);
    let sge = duo.sge(A, 0, 16);
    duo.queue(A, 1, SendOp::Send { invalidate: Some(local.stag()) }, sge);
    duo.world.settle();
    let error = TerminateError::RemoteProtection(RemoteProtection::StagCannotBeInvalidated);
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::Sent(error)]);
    assert!(local.enter().is_some());
}

/// One stream invalidated a region of another stream of the same domain (RFC 5040 section 8.1.1 rule 7).
#[test]
fn a_region_that_another_stream_can_use_is_not_invalidated_by_the_peer() {
    let invalidate = |others: &[QpState]| {
        let mut duo = Duo::new(params());
        let pd = duo.world.end(B).pd.clone();
        let mut more = Vec::new();
        for state in others {
            let mut other = End::new_in(EndConfig { qpn: 77, ..EndConfig::default() }, pd.clone());
            other.init();
            other.attach(params()[1]).unwrap();
            other.core.modify(&QpModify { state: Some(*state), ..QpModify::default() }).unwrap();
            more.push(other);
        }
        duo.recv(B, 10, 0, 16);
        let sge = duo.sge(A, 0, 16);
        let stag = duo.mr[1].stag();
        duo.queue(A, 1, SendOp::Send { invalidate: Some(stag) }, sge);
        duo.world.settle();
        (duo.mr[1].enter().is_none(), duo.world.end(B).disconnected.clone())
    };
    let error = TerminateError::RemoteProtection(RemoteProtection::StagCannotBeInvalidated);
    assert_eq!(invalidate(&[]), (true, vec![]));
    assert_eq!(invalidate(&[QpState::Rts]), (false, vec![Disconnect::Sent(error)]));
    assert_eq!(
        invalidate(&[QpState::Err, QpState::Err]),
        (true, vec![]),
        "streams that have ended use nothing"
    );
}

/// The peer could read although the inbound read depth was zero.
#[test]
fn a_depth_of_none_lets_no_data_be_read() {
    let [a, b] = params().map(|p| StreamParams { peer_is_uwarp: false, ..p });
    let b = StreamParams { ird: 0, ..b };
    let mut duo = Duo::new([a, b]);
    let (read, sge) = (duo.read_op(A, 0), duo.sge(A, 0, 0));
    duo.queue(A, 1, read, sge);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(1, WcStatus::Success)], "one of no bytes shows that all before it is placed");
    let sge = duo.sge(A, 0, 8);
    duo.queue(A, 2, read, sge);
    duo.world.settle();
    let error = TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer);
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::Sent(error)]);
}

/// A Read whose Response was being sent was not counted, so the peer could have one more than the read depth.
#[test]
fn a_read_that_is_being_answered_counts_against_the_depth() {
    const LEN: u32 = 900_000;
    for (ird, more, refused) in [(1, 1, true), (2, 1, false), (2, 2, true)] {
        let [a, b] = params().map(|p| StreamParams { peer_is_uwarp: false, framing: Framing::PLAIN, ..p });
        let b = StreamParams { ird, ..b };
        let mut duo = Duo::with_net([a, b], NetParams { capacity: 10_000, ..NetParams::default() });
        let (read, large, small) = (duo.read_op(A, 0), duo.sge(A, 0, LEN), duo.sge(A, 0, 8));
        duo.queue(A, 1, read, large);
        for id in 0..more {
            duo.queue(A, 2 + id, read, small);
        }
        duo.world.settle();
        let closed = duo.world.end(B).disconnected.clone();
        let error = TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer);
        let expected = if refused { vec![Disconnect::Sent(error)] } else { vec![] };
        assert_eq!(closed, expected, "depth {ird}, {more} more");
    }
}

/// An overflowing completion queue failed the queue pair only when the next bytes arrived.
#[test]
fn an_overflowing_completion_queue_fails_the_queue_pair_at_once() {
    let mut duo = Duo::with_cq_depth(params(), 1);
    let sge = duo.sge(A, 0, 16);
    for id in 1..4 {
        let write = duo.write_op(A, 0);
        duo.queue(A, id, write, sge);
    }
    duo.world.pump(A);
    duo.world.pump(A);
    assert_eq!(duo.world.end(A).disconnected, [Disconnect::Sent(TerminateError::LocalCatastrophic)]);
    assert_eq!(duo.world.end(A).events.kinds(), [EventKind::CqErr, EventKind::QpFatal]);
}

/// An acknowledgement of more than was sent completed work requests that were still in flight.
#[test]
fn an_acknowledgement_of_what_was_not_sent_is_an_error() {
    let acks = params().map(|p| StreamParams { placement_acks: true, framing: Framing::PLAIN, ..p });
    let mut duo = Duo::new(acks);
    let mut ack = vec![0, 26, 0x41, 0x4F, 0, 0, 0, 0, 0x75, 0x57, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];
    ack.extend([0, 0, 0, 0, 0, 0, 0, 1]);
    ack.extend([0; 4]);
    duo.world.inject(A, &ack);
    duo.world.settle();
    let error = TerminateError::RemoteOperation(RemoteOperation::Unspecified);
    assert_eq!(duo.world.end(A).disconnected, [Disconnect::Sent(error)]);
}

/// An untagged message that is no Send, but as long as only a Send can be, was received straight into a
/// posted receive, and no error was reported.
#[test]
fn only_a_send_is_placed_into_a_receive() {
    let mut duo = Duo::with_net(params(), small_pieces());
    duo.recv(B, 10, 0, 65_536);
    // A Read Request: untagged, last, queue 1, first message, from offset 0.
    let mut ulpdu = vec![0x41, 0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0];
    ulpdu.resize(18 + 40_000, 7);
    let mut fpdu = u16::try_from(ulpdu.len()).unwrap().to_be_bytes().to_vec();
    fpdu.extend_from_slice(&ulpdu);
    fpdu.resize(fpdu.len().next_multiple_of(4), 0);
    let sum = uwarp_wire::crc::to_wire(uwarp_wire::crc::crc32c(&fpdu));
    fpdu.extend_from_slice(&sum);
    duo.world.inject(B, &fpdu);
    duo.world.settle();
    assert!(!duo.memory[1].snapshot().contains(&7), "placed");
    let error = TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong);
    assert_eq!(duo.world.end(B).disconnected, [Disconnect::Sent(error)]);
}

/// A Send without a receive blocked the Response behind it: two ends that read from each other before they
/// post receives waited for ever.
#[test]
fn responses_are_received_past_sends_that_wait_for_receives() {
    let mut duo = Duo::new(params());
    let sge = duo.sge(B, 0, 64);
    for wr_id in 0..3 {
        duo.queue(B, wr_id, SEND, sge);
    }
    duo.world.settle();
    assert!(duo.world.end(A).core.stalled());
    let (read, sink) = (duo.read_op(A, 0), duo.sge(A, 4096, 100_000));
    duo.queue(A, 7, read, sink);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(7, WcStatus::Success)]);
    // Now this end waits only for receives, and must stop reading at the peer's Sends.
    assert!(duo.world.end(A).core.stalled());
    assert_eq!(duo.recvs(A), []);
    for wr_id in 20..23 {
        duo.recv(A, wr_id, 0, 64);
        duo.world.settle();
        assert_eq!(duo.recvs(A), [(wr_id, WcStatus::Success)]);
    }
    assert!(!duo.world.end(A).core.awaits_receive());
    duo.queue(B, 9, SEND, sge);
    duo.recv(A, 30, 0, 64);
    duo.world.settle();
    assert_eq!(duo.recvs(A), [(30, WcStatus::Success)]);
}

/// The same with messages of several segments; the first receive takes the first message.
#[test]
fn a_long_buffered_send_arrives_complete() {
    let mut duo = Duo::new(params());
    let (read, sink) = (duo.read_op(A, 0), duo.sge(A, 500_000, 10));
    duo.queue(A, 7, read, sink);
    let sge = duo.sge(B, 0, 200_000);
    duo.queue(B, 1, SEND, sge);
    duo.queue(B, 2, SEND, sge);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(7, WcStatus::Success)]);
    duo.recv(A, 20, 0, 200_000);
    duo.recv(A, 21, 0, 199_999);
    duo.world.settle();
    assert_eq!(duo.recvs(A), [(20, WcStatus::Success), (21, WcStatus::LocLenErr)]);
}

/// A program that waits for the last byte of a Write and then resets it was faster than our look at the bytes
/// in memory: a correct CRC ended the connection.
#[test]
fn the_last_bytes_of_a_message_are_placed_when_its_crc_is_known() {
    let mut duo = Duo::new(params());
    let (write, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 60_000));
    duo.memory[A.index()].write(0, &[7; 60_000]);
    let bytes = duo.request_bytes(A, write, sge);
    let (most, trailer) = bytes.split_at(bytes.len() - 4);
    let (first, second) = most.split_at(20_000);
    for part in [first, second] {
        duo.world.inject(B, part);
        duo.world.settle();
    }
    let at = |duo: &Duo, at| duo.memory[B.index()].read(at, 1)[0];
    assert_eq!((at(&duo, 59_000), at(&duo, 59_999)), (0, 0));
    duo.world.inject(B, trailer);
    duo.world.settle();
    assert_eq!(at(&duo, 59_999), 7);
    assert_eq!(duo.world.end(B).disconnected, []);
}

/// Acknowledgements stayed unread behind a Send that waited for a receive, which the program posted only when
/// its own Send was complete.
#[test]
fn acknowledgements_are_received_past_sends_that_wait_for_receives() {
    for stalled_first in [false, true] {
        let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
        let (a, b) = (duo.sge(A, 0, 64), duo.sge(B, 0, 64));
        duo.recv(B, 10, 0, 64);
        if stalled_first {
            duo.queue(B, 1, SEND, b);
            duo.world.settle();
            assert!(duo.world.end(A).core.stalled());
            duo.queue(A, 2, SEND, a);
        } else {
            duo.queue(A, 2, SEND, a);
            duo.queue(B, 1, SEND, b);
        }
        duo.world.settle();
        assert_eq!(duo.sends(A), [(2, WcStatus::Success)]);
        assert!(duo.world.end(A).core.stalled());
        duo.recv(A, 20, 0, 64);
        duo.world.settle();
        assert_eq!((duo.recvs(A).len(), duo.sends(B).len()), (1, 1));
    }
}

/// A Write between two buffered Sends was acknowledged only when both had their receives.
#[test]
fn writes_between_sends_that_wait_are_acknowledged_in_their_turn() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    let sge = duo.sge(B, 0, 64);
    let write = duo.write_op(B, 4096);
    // A waits for a Response that does not arrive: its Read Request is held back.
    let (read, sink) = (duo.read_op(A, 0), duo.sge(A, 8192, 64));
    let request = duo.request_bytes(A, read, sink);
    duo.queue(B, 1, SEND, sge);
    duo.queue(B, 2, write, sge);
    duo.queue(B, 3, SEND, sge);
    duo.world.settle();
    assert_eq!(duo.sends(B), []);
    duo.recv(A, 20, 0, 64);
    duo.world.settle();
    assert_eq!(duo.sends(B), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    duo.recv(A, 21, 0, 64);
    duo.world.inject(B, &request);
    duo.world.settle();
    assert_eq!(duo.sends(B), [(3, WcStatus::Success)]);
    assert_eq!(duo.sends(A), [(99, WcStatus::Success)]);
}
