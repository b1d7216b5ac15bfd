//! Work requests: posts, the messages that they become, and their completions.

use uwarp_proto::rd::Placed;

use super::*;
use crate::wr::WcFlags;

#[test]
fn a_message_goes_from_two_elements_into_two_and_completes_at_both_ends() {
    let (mut a, mut b) = (End::new(), End::new());
    a.memory[..6].copy_from_slice(b"abcdef");
    let list = [a.sge(4, 2), a.sge(0, 3)];
    let op = SendOp::SendImmediate { imm: [1, 2, 3, 4] };
    a.send_op(1, op, &list, SIGNALED | SendFlags::SOLICITED).unwrap();
    let list = [b.sge(100, 3), b.sge(0, 10)];
    b.core.post_recv(&RecvWr { wr_id: 9, sges: &list }).unwrap();
    let sent = a.next();
    assert_eq!(a.core.next_message(), None);
    assert_eq!((sent.endpoint.to, sent.message.rnr_retry), ((Ipv4Addr::LOCALHOST, 0x1234).into(), 5));
    assert_eq!(carry(&mut a, &mut b, &sent, id(1, 1), 2), Placed::Done);
    assert_eq!((a.polled(), b.polled()), (vec![], vec![]));
    b.core.deliver(id(1, 1));
    a.core.finished(sent.request, Ok(()));
    assert_eq!(a.polled(), [(1, WcStatus::Success)]);
    let mut all = Vec::new();
    b.cq.poll(4, |wc| all.push(wc));
    let wc = all[0];
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (9, WcStatus::Success, WcOpcode::Recv));
    assert_eq!((wc.byte_len, wc.src_qp, wc.qp_num), (5, QPN, QPN));
    assert_eq!((wc.flags, wc.imm_or_inv.to_ne_bytes()), (WcFlags::WITH_IMM, [1, 2, 3, 4]));
    assert_eq!((&b.memory[100..103], &b.memory[..3]), (&b"efa"[..], &b"bc\xEE"[..]));
    assert_eq!(a.core.snapshot().counters.sent.send.bytes, 5);
    assert_eq!(b.core.snapshot().counters.received.send.bytes, 5);
}

#[test]
fn work_requests_complete_in_the_order_in_which_their_messages_are_done() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    for wr_id in 1..=4 {
        a.send(wr_id, &list, SIGNALED).unwrap();
    }
    let [first, second, third, fourth] = [(); 4].map(|()| a.next().request);
    assert_eq!(a.core.next_message(), None);
    for request in [third, first] {
        a.core.finished(request, Ok(()));
    }
    a.core.finished(fourth, Err(Failure::Silent));
    a.core.finished(second, Ok(()));
    let (ok, gone) = (WcStatus::Success, WcStatus::RetryExcErr);
    assert_eq!(a.polled(), [(3, ok), (1, ok), (4, gone), (2, ok)]);
    assert_eq!(a.core.query().state, QpState::Rts);
    // News of what has ended.
    for request in [first, fourth] {
        a.core.finished(request, Ok(()));
        a.core.fail(request, WcStatus::LocProtErr);
        assert!(!a.core.fill(request, 0, 8, &mut Vec::new()));
    }
    assert_eq!((a.polled(), a.core.snapshot().counters.sent.send.messages), (vec![], 3));
}

#[test]
fn a_place_is_free_with_its_own_message_or_with_its_polled_completion() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    for (wr_id, flags) in [(1, SIGNALED), (2, UNSIGNALED), (3, SIGNALED), (4, UNSIGNALED)] {
        a.send(wr_id, &list, flags).unwrap();
    }
    let [first, second, third, fourth] = [(); 4].map(|()| a.next().request);
    let full = Err(VerbsError::QueueFull);
    assert_eq!(a.send(5, &list, SIGNALED), full);
    // The oldest one holds up nothing.
    a.core.finished(fourth, Ok(()));
    a.send(5, &list, UNSIGNALED).unwrap();
    assert_eq!(a.send(6, &list, UNSIGNALED), full);
    a.core.finished(third, Ok(()));
    assert_eq!(a.send(6, &list, UNSIGNALED), full, "its completion was not polled");
    assert_eq!(a.polled(), [(3, WcStatus::Success)]);
    a.send(6, &list, UNSIGNALED).unwrap();
    // A failure is a completion, so it must be polled.
    a.core.finished(second, Err(Failure::NoReceive));
    assert_eq!(a.send(7, &list, UNSIGNALED), full);
    assert_eq!(a.polled(), [(2, WcStatus::RnrRetryExcErr)]);
    a.send(7, &list, UNSIGNALED).unwrap();
    assert_eq!(a.send(8, &list, UNSIGNALED), full);
    a.core.finished(first, Ok(()));
    assert_eq!(a.polled(), [(1, WcStatus::Success)]);
    let ud = UdSendWr {
        wr: SendWr { wr_id: 8, op: SendOp::Send { invalidate: None }, flags: SIGNALED, sges: &list },
        ah: &a.ah(),
        remote_qpn: QPN,
        remote_qkey: QKEY,
        job_key: None,
    };
    assert_eq!((a.core.check_send(&ud, 0), a.core.check_send(&ud, 1)), (Ok(()), full));
}

/// Any order of posts, ends and polls: a post is refused when the queue is full, and only then.
#[test]
fn a_post_is_refused_only_while_every_place_is_taken() {
    let mut a = End::new();
    let mut numbers = Numbers(1);
    let list = [a.sge(0, 8)];
    // Requests in flight, and whether they are signaled; completions that wait.
    let (mut flying, mut waiting, mut refused) = (Vec::new(), 0, 0);
    for wr_id in 0..20_000 {
        match numbers.below(4) {
            0 | 1 => {
                let flags = if numbers.below(2) == 0 { SIGNALED } else { UNSIGNALED };
                let result = a.send(wr_id, &list, flags);
                assert_eq!(result.is_ok(), flying.len() + waiting < 4, "{wr_id}: {result:?}");
                match result {
                    Ok(()) => flying.push((a.next().request, flags == SIGNALED)),
                    Err(error) => {
                        assert_eq!(error, VerbsError::QueueFull);
                        refused += 1;
                    }
                }
            }
            2 if !flying.is_empty() => {
                let (request, signaled) = flying.swap_remove(numbers.below(flying.len()));
                let fails = numbers.below(4) == 0;
                a.core.finished(request, if fails { Err(Failure::Silent) } else { Ok(()) });
                waiting += usize::from(signaled || fails);
            }
            _ => {
                let most = numbers.below(3);
                let polled = a.cq.poll(most, |_| ());
                assert_eq!(polled, waiting.min(most));
                waiting -= polled;
            }
        }
        assert_eq!(a.core.snapshot().sends_posted, flying.len());
    }
    assert!(refused > 1000, "{refused}");
}

#[test]
fn inline_data_needs_no_key_and_is_copied_by_the_post() {
    let mut a = End::new();
    a.memory[..6].copy_from_slice(b"abcdef");
    let keyless = |at, length| Sge { lkey: 0, ..a.sge(at, length) };
    let (list, long) = ([keyless(0, 2), keyless(3, 3)], [keyless(0, 65)]);
    a.send(1, &list, SIGNALED | SendFlags::INLINE).unwrap();
    a.memory[..6].fill(b'X');
    assert!(matches!(a.send(2, &long, SendFlags::INLINE), Err(VerbsError::Invalid(_))));
    let sent = a.next();
    assert_eq!(sent.message.len, 5);
    for _ in 0..2 {
        let mut bytes = b"->".to_vec();
        assert!(a.core.fill(sent.request, 1, 3, &mut bytes));
        assert_eq!(bytes, b"->bde");
    }
    a.core.finished(sent.request, Ok(()));
    // Its slot is used again.
    a.memory[..3].copy_from_slice(b"xyz");
    a.send(3, &[keyless_of(&a, 0, 3)], SendFlags::INLINE).unwrap();
    let (next, mut bytes) = (a.next(), Vec::new());
    assert!(!a.core.fill(sent.request, 0, 3, &mut bytes), "it has ended");
    assert!(!a.core.fill(next.request, 1, 3, &mut bytes), "there is no fourth byte");
    assert!(a.core.fill(next.request, 0, 3, &mut bytes));
    assert_eq!(bytes, b"xyz");
}

fn keyless_of(end: &End, at: usize, length: u32) -> Sge {
    Sge { lkey: 0, ..end.sge(at, length) }
}

#[test]
fn elements_of_several_regions_are_read_again_for_each_packet() {
    let mut a = End::new();
    let other = b"0123456789".to_vec();
    let addr = other.as_ptr().expose_provenance() as u64;
    let mr = Mr::register(&a.pd, addr, 10, addr, Access::empty()).unwrap();
    a.memory[..4].copy_from_slice(b"abcd");
    let list = [a.sge(0, 4), Sge { addr: addr + 2, length: 6, lkey: mr.stag() }];
    a.send(1, &list, SIGNALED).unwrap();
    let sent = a.next();
    let mut bytes = Vec::new();
    assert!(!a.core.fill(sent.request, 8, 3, &mut bytes) && bytes.is_empty(), "it has ten bytes");
    assert!(a.core.fill(sent.request, 3, 4, &mut bytes) && a.core.fill(sent.request, 0, 10, &mut bytes));
    assert_eq!(bytes, b"d234abcd234567");
    // The program must not, but it can: a repair carries what is there then.
    a.memory[..4].copy_from_slice(b"ABCD");
    bytes.clear();
    assert!(a.core.fill(sent.request, 2, 3, &mut bytes));
    assert_eq!(bytes, b"CD2");
    // One of the regions goes.
    assert!(mr.deregister());
    assert!(a.core.fill(sent.request, 0, 4, &mut bytes), "the other is there");
    assert_eq!(bytes, b"CD2ABCD");
    assert!(!a.core.fill(sent.request, 0, 5, &mut bytes));
    assert_eq!(bytes, b"CD2ABCD", "nothing was added");
    a.core.fail(sent.request, WcStatus::LocProtErr);
    assert_eq!((a.polled(), a.core.query().state), (vec![(1, WcStatus::LocProtErr)], QpState::Rts));
    assert!(!a.core.fill(sent.request, 0, 4, &mut bytes));
    drop(other);
}

#[test]
fn a_work_request_that_is_wrong_fails_alone() {
    let mut a = End::new();
    let (good, bad) = ([a.sge(0, 8)], [Sge { lkey: 1, ..a.sge(0, 8) }]);
    let long = [Sge { length: 1 << 30, ..a.sge(0, 0) }, Sge { length: 1 << 30, ..a.sge(0, 0) }];
    a.send(1, &bad, UNSIGNALED).unwrap();
    a.send(2, &long, UNSIGNALED).unwrap();
    let wr = SendWr { wr_id: 3, op: SendOp::Send { invalidate: None }, flags: UNSIGNALED, sges: &good };
    let foreign = Ah::new(&Pd::new(), (Ipv4Addr::LOCALHOST, 0).into(), None);
    a.core
        .post_send(&UdSendWr { wr, ah: &foreign, remote_qpn: QPN, remote_qkey: QKEY, job_key: None })
        .unwrap();
    a.send(4, &good, SIGNALED).unwrap();
    let (bad, good) = (a.next(), a.next());
    assert_eq!(a.core.next_message(), None);
    assert!(!a.core.fill(bad.request, 0, 8, &mut Vec::new()));
    a.core.fail(bad.request, WcStatus::LocProtErr);
    assert!(a.core.fill(good.request, 0, 8, &mut Vec::new()));
    a.core.finished(good.request, Ok(()));
    let polled = a.polled();
    assert_eq!(polled[..2], [(2, WcStatus::LocLenErr), (3, WcStatus::LocQpOpErr)]);
    assert_eq!(polled[2..], [(1, WcStatus::LocProtErr), (4, WcStatus::Success)]);
    assert_eq!((a.core.query().state, a.events()), (QpState::Rts, vec![]));
    let most = [Sge { length: u32::MAX >> 1, ..a.sge(0, 0) }];
    a.send(5, &most, SIGNALED).unwrap();
    assert_eq!(a.next().message.len, u32::MAX >> 1);
}

#[test]
fn what_the_service_does_not_have_is_refused_by_the_post() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    for op in [
        SendOp::Send { invalidate: Some(1) },
        SendOp::Read { stag: 1, to: 0, invalidate_local: true },
        SendOp::LocalInvalidate { stag: 1 },
    ] {
        assert!(matches!(a.send_op(1, op, &list, SIGNALED), Err(VerbsError::Invalid(_))), "{op:?}");
    }
    assert!(matches!(a.send(1, &[list[0]; 3], SIGNALED), Err(VerbsError::Invalid(_))));
    let (read, add) = (
        SendOp::Read { stag: 1, to: 0, invalidate_local: false },
        SendOp::FetchAdd { stag: 1, to: 0, add: 1 },
    );
    assert!(matches!(a.send_op(1, read, &list, SendFlags::INLINE), Err(VerbsError::Invalid(_))));
    assert!(matches!(a.send_op(1, add, &[a.sge(0, 4)], SIGNALED), Err(VerbsError::Invalid(_))));
    let group = Ah::group(&a.pd, ([224, 0, 0, 7], 1).into(), None);
    let wr = SendWr { wr_id: 1, op: SendOp::Send { invalidate: None }, flags: SIGNALED, sges: &list };
    let ud = UdSendWr { wr, ah: &group, remote_qpn: QPN, remote_qkey: QKEY, job_key: None };
    assert!(matches!(a.core.post_send(&ud), Err(VerbsError::Invalid(_))));
    assert_eq!((a.core.next_message(), a.polled()), (None, vec![]));
    assert_eq!(a.core.snapshot().sends_posted, 0);
}

#[test]
fn a_message_says_what_its_work_request_and_its_queue_pair_say() {
    let mut a =
        End::with(How { init: RdInit { ordered: true, grh: false, job_key: 0, max_records: 0 }, ..PLAIN });
    let list = [a.sge(0, 8)];
    let ah = a.ah();
    let op = SendOp::SendImmediate { imm: *b"imm." };
    let wr = SendWr { wr_id: 1, op, flags: SIGNALED | SendFlags::SOLICITED, sges: &list };
    // The top bit stands for the queue pair's own Q_Key.
    a.core
        .post_send(&UdSendWr { wr, ah: &ah, remote_qpn: 0x4321, remote_qkey: 1 << 31 | 5, job_key: None })
        .unwrap();
    let rsvdulp = Control::new(Opcode::SendSe).to_byte();
    let message = Outgoing {
        pair: QpnPair { source: QPN, destination: 0x4321 },
        first: First { qkey: QKEY, immediate: Some(*b"imm."), job_key: None },
        target: Target::Untagged { qn: QN_SEND, rsvdulp, rsvdulp32: 0 },
        len: 8,
        ordered: true,
        rnr_retry: 5,
        unrepeated: false,
    };
    let sent = a.next();
    assert_eq!((sent.message, sent.endpoint), (message, ah.endpoint(0x4321)));
    let wr = SendWr { wr_id: 2, op: SendOp::Send { invalidate: None }, flags: UNSIGNALED, sges: &[] };
    a.core.post_send(&UdSendWr { wr, ah: &ah, remote_qpn: 1, remote_qkey: 7, job_key: None }).unwrap();
    let sent = a.next().message;
    assert_eq!((sent.len, sent.first), (0, First { qkey: 7, ..First::default() }));
    let Target::Untagged { rsvdulp, .. } = sent.target else { panic!("{sent:?}") };
    assert_eq!(Control::parse(rsvdulp), Control::new(Opcode::Send));
}

/// One peer is gone, and its message waits for a long time. Others go on, and the queue pair does not grow.
#[test]
fn a_message_that_stays_holds_up_nothing_and_keeps_nothing() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    a.send(0, &list, SIGNALED).unwrap();
    let stays = a.next();
    for wr_id in 1..10_000 {
        a.send(wr_id, &list, SIGNALED).unwrap();
        let sent = a.next();
        assert!(a.core.fill(sent.request, 0, 8, &mut Vec::new()));
        a.core.finished(sent.request, Ok(()));
        assert_eq!(a.polled(), [(wr_id, WcStatus::Success)]);
    }
    assert_eq!(a.core.requests.slots(), 2);
    a.core.finished(stays.request, Err(Failure::Silent));
    assert_eq!(a.polled(), [(0, WcStatus::RetryExcErr)]);
}

#[test]
fn each_failure_has_its_status() {
    use uwarp_wire::rd::chunk::Reason::*;
    let rows = [
        (Failure::Refused(ReceiverNotReady), WcStatus::RnrRetryExcErr, 13),
        (Failure::Refused(InvalidRequest), WcStatus::RemInvReqErr, 9),
        (Failure::Refused(Access), WcStatus::RemAccessErr, 10),
        (Failure::Refused(InvalidDestination), WcStatus::RemInvRdReqErr, 15),
        (Failure::Refused(Aborted), WcStatus::RemAbortErr, 16),
        (Failure::Refused(Operation), WcStatus::RemOpErr, 11),
        (Failure::Refused(Unassigned(9)), WcStatus::RemOpErr, 11),
        (Failure::NoReceive, WcStatus::RnrRetryExcErr, 13),
        (Failure::Silent, WcStatus::RetryExcErr, 12),
        (Failure::Restarted, WcStatus::RetryExcErr, 12),
        (Failure::Incompatible, WcStatus::RetryExcErr, 12),
        (Failure::Flushed, WcStatus::WrFlushErr, 5),
    ];
    for (failure, status, number) in rows {
        assert_eq!((status_of(failure), status as u32), (status, number), "{failure:?}");
    }
}
