//! Memory that peers name, and the answers to requests.

use crate::qp::Source;
use uwarp_proto::rd::Placed::{Done, NoReceive, Refused};
use uwarp_wire::ddp::{QN_ATOMIC_RESPONSE, QN_READ_REQUEST, Tagged};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rdmap::{AtomicOp, AtomicRequest, AtomicResponse, ReadRequest};

use super::*;

const JOB: u64 = 0x1234_5678_9abc;
const WRITABLE: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// A queue pair with a job key, and 64 bytes at 8192 that peers may use.
fn open() -> (End, Arc<Mr>, u64) {
    let end = End::with(How { init: RdInit { job_key: JOB, ..PLAIN.init }, ..PLAIN });
    let at = end.mr.range().0 + 8192;
    let mr = Mr::register(&end.pd, at, 64, at, WRITABLE).unwrap();
    (end, mr, at)
}

fn tagged(opcode: Opcode, stag: u32, to: u64) -> Header {
    Header::Tagged(Tagged { last: true, rsvdulp: Control::new(opcode).to_byte(), stag, to })
}

fn untagged(opcode: Opcode, qn: u32) -> Header {
    let rsvdulp = Control::new(opcode).to_byte();
    Header::Untagged(Untagged { last: true, rsvdulp, rsvdulp32: 0, qn, msn: 1, mo: 0 })
}

fn first(job_key: u64, immediate: Option<[u8; 4]>) -> Option<First> {
    Some(First { qkey: QKEY, immediate, job_key: Some(job_key) })
}

/// A whole message that names memory.
fn naming(number: u64, ddp: Header, bytes: &[u8]) -> RdSegment<'_> {
    let len = u32::try_from(bytes.len()).unwrap();
    RdSegment { first: first(JOB, None), ddp, ..segment(id(1, number), 0, bytes, len) }
}

#[test]
fn a_write_needs_key_region_range_and_rights() {
    let (mut b, mr, at) = open();
    let write = |to| tagged(Opcode::Write, mr.stag(), to);
    let good = naming(1, write(at), b"abcd");
    assert_eq!(b.place(&good), Done);
    assert_eq!(&b.memory[8192..8196], b"abcd");
    let pieces = RdBytes::pieces(b"ij..kl", 2, 4, 2);
    assert_eq!(b.place(&RdSegment { bytes: pieces, ..naming(9, write(at + 60), b"0123") }), Done);
    assert_eq!(&b.memory[8252..8256], b"ijkl");
    let access = Refused(Reason::Access);
    assert_eq!(b.place(&RdSegment { first: first(JOB + 1, None), ..good }), access, "another job key");
    let none = Some(First { qkey: QKEY, ..First::default() });
    assert_eq!(b.place(&RdSegment { first: none, ..good }), access, "no job key");
    let wrong = Some(First { qkey: QKEY + 1, immediate: None, job_key: Some(JOB) });
    assert_eq!(b.place(&RdSegment { first: wrong, ..good }), Refused(Reason::InvalidDestination));
    assert_eq!(b.place(&RdSegment { first: None, ..good }), Refused(Reason::InvalidRequest));
    for to in [at - 1, at + 61, u64::MAX - 1] {
        assert_eq!(b.place(&RdSegment { ddp: write(to), ..good }), access, "{to:#x}");
    }
    // The second segment of a message whose end is outside.
    let late = RdSegment { offset: 4, message_len: 100, ddp: write(at + 4), ..good };
    assert_eq!(b.place(&late), access, "the last byte is outside");
    let local = tagged(Opcode::Write, b.mr.stag(), b.mr.range().0);
    assert_eq!(b.place(&RdSegment { ddp: local, ..good }), access, "a region without the right");
    let other = Pd::new();
    let foreign = Mr::register(&other, at, 64, at, WRITABLE).unwrap();
    let ddp = tagged(Opcode::Write, foreign.stag(), at);
    assert_eq!(b.place(&RdSegment { ddp, ..good }), access, "another domain");
    // An empty Write names nothing.
    let empty = naming(9, tagged(Opcode::Write, 1, 0), b"");
    assert_eq!(b.place(&empty), Done);
    b.core.modify(&QpModify { access: Some(Access::REMOTE_READ), ..QpModify::default() }).unwrap();
    assert_eq!(b.place(&good), access, "the queue pair does not grant it");
    let mut closed = End::new();
    assert_eq!(closed.place(&good), Refused(Reason::InvalidRequest), "a queue pair without a job key");
    assert_eq!(&b.memory[8192..8200], b"abcd\xEE\xEE\xEE\xEE");
}

#[test]
fn only_sources_that_are_named() {
    let (mut b, mr, at) = open();
    let write = naming(1, tagged(Opcode::Write, mr.stag(), at), b"x");
    let other = Source { prefix: IpAddr::V4(Ipv4Addr::new(10, 9, 0, 0)), bits: 112, qpn: None };
    b.core.allow_source(other).unwrap();
    assert_eq!(b.place(&write), Refused(Reason::Access));
    b.core.allow_source(Source { prefix: ARRIVAL.from, bits: 128, qpn: Some(0x99) }).unwrap();
    assert_eq!(b.place(&write), Done);
    assert_eq!(b.place(&RdSegment { source_qpn: 0x9A, ..write }), Refused(Reason::Access));
    assert!(b.core.allow_source(Source { bits: 129, ..other }).is_err());
    (2..64).for_each(|_| b.core.allow_source(other).unwrap());
    assert!(b.core.allow_source(other).is_err(), "a 65th");
}

#[test]
fn a_write_with_an_immediate_takes_its_receive_before_its_first_byte() {
    let (mut b, mr, at) = open();
    let half = |offset: u32, bytes| RdSegment {
        offset,
        message_len: 4,
        first: first(JOB, Some([1, 2, 3, 4])),
        ..naming(1, tagged(Opcode::Write, mr.stag(), at + u64::from(offset)), bytes)
    };
    assert_eq!(b.place(&half(0, b"ab")), NoReceive(12));
    assert_eq!(b.memory[8192], 0xEE);
    // Of any length, even none.
    b.recv(7, 0, 0);
    assert_eq!((b.place(&half(0, b"ab")), b.place(&half(2, b"cd"))), (Done, Done));
    assert_eq!((b.core.deliver(id(1, 1)), b.core.snapshot().receives_posted), (None, 0));
    let mut all = Vec::new();
    b.cq.poll(8, |wc| all.push(wc));
    let wc = all[0];
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (7, WcStatus::Success, WcOpcode::RecvRdmaWithImm));
    assert_eq!((wc.byte_len, wc.imm_or_inv.to_ne_bytes()), (4, [1, 2, 3, 4]));
    assert_eq!(&b.memory[8192..8196], b"abcd");
    // One that must not write takes none.
    b.recv(8, 0, 4);
    let outside = RdSegment { ddp: tagged(Opcode::Write, mr.stag(), at + 62), ..half(0, b"ab") };
    let outside = RdSegment { message: id(1, 2), ..outside };
    assert_eq!((b.place(&outside), b.core.snapshot().receives_posted), (Refused(Reason::Access), 1));
}

/// Posts a Read of `len` bytes into 4096, and returns its name in the answer.
fn ask(a: &mut End, wr_id: u64, len: u32) -> (u64, u32) {
    let read = SendOp::Read { stag: 5, to: 77, invalidate_local: false };
    let sges = [a.sge(4096, len)];
    a.send_op(wr_id, read, &sges, SIGNALED).unwrap();
    let sent = a.next();
    let mut bytes = Vec::new();
    assert!(a.core.fill(sent.request, 0, sent.message.len, &mut bytes));
    let request = ReadRequest::parse(&bytes).unwrap();
    assert_eq!((request.source_stag, request.source_to, request.size), (5, 77, len));
    (sent.request, request.sink_stag)
}

#[test]
fn an_answer_counts_only_from_who_was_asked() {
    let mut a = End::new();
    let asked = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), u16::try_from(QPN >> 8).unwrap());
    let answer = |stag, bytes| RdSegment {
        source_qpn: QPN,
        remote: asked,
        first: Some(First::default()),
        ..naming(1, tagged(Opcode::ReadResponse, stag, 0), bytes)
    };
    let late = Refused(Reason::Aborted);
    assert_eq!(a.place(&answer(1, b"abcd")), late, "nothing was asked");
    let (_, stag) = ask(&mut a, 7, 4);
    let good = answer(stag, b"abcd");
    assert_eq!(a.place(&RdSegment { source_qpn: QPN + 1, ..good }), late, "another queue pair");
    assert_eq!(a.place(&RdSegment { remote: REMOTE, ..good }), late, "another address");
    let port = SocketAddr::new(asked.ip(), 1);
    assert_eq!(a.place(&RdSegment { remote: port, ..good }), late, "another port");
    assert_eq!(a.place(&answer(stag + 1, b"abcd")), late, "another request");
    assert!(a.memory[4096..4104].iter().all(|byte| *byte == 0xEE));
    assert_eq!(a.place(&RdSegment { message_len: 4, ..answer(stag, b"ab") }), Done);
    let second = RdSegment { message: id(1, 2), ..good };
    assert_eq!(a.place(&second), late, "a second answer");
    let rest = RdSegment { offset: 2, message_len: 4, ..answer(stag, b"cd") };
    assert_eq!(a.place(&rest), Done);
    assert_eq!((a.core.deliver(id(1, 1)), a.polled()), (None, vec![(7, WcStatus::Success)]));
    assert_eq!((&a.memory[4096..4100], a.memory[4100]), (&b"abcd"[..], 0xEE));
    assert_eq!(a.place(&good), late, "it is answered");
    let (_, stag) = ask(&mut a, 8, 4);
    assert_eq!(a.place(&answer(stag, b"abc")), Refused(Reason::InvalidRequest), "another length");
    assert_eq!(a.polled(), [(8, WcStatus::BadRespErr)]);
    let (_, stag) = ask(&mut a, 9, 4);
    // Even after a part of the answer.
    let part = RdSegment { message: id(1, 4), message_len: 4, ..answer(stag, b"ab") };
    assert_eq!(a.place(&part), Done);
    let mut failure = stag.to_be_bytes().to_vec();
    failure.extend_from_slice(&[Reason::Access.code(), 0, 0, 0]);
    let ddp = untagged(Opcode::Terminate, 2);
    let message = RdSegment { message: id(1, 5), ddp, message_len: 8, bytes: failure[..].into(), ..good };
    assert_eq!((a.place(&message), a.core.deliver(id(1, 5))), (Done, None));
    assert_eq!(a.polled(), [(9, WcStatus::RemAccessErr)]);
}

#[test]
fn fences_wait_for_answers() {
    let mut a = End::new();
    let read = SendOp::Read { stag: 5, to: 0, invalidate_local: false };
    let list = [a.sge(0, 4)];
    a.send_op(1, read, &list, SIGNALED).unwrap();
    a.send_op(2, SendOp::Write { stag: 5, to: 0 }, &list, SIGNALED).unwrap();
    a.send(3, &list, SIGNALED | SendFlags::FENCE).unwrap();
    a.send(4, &list, SIGNALED).unwrap();
    let sent = [a.next(), a.next()];
    assert_eq!((a.core.next_message(), a.core.waits()), (None, true), "the fence");
    a.core.finished(sent[1].request, Ok(()));
    assert_eq!(a.core.next_message(), None);
    a.core.finished(sent[0].request, Err(Failure::Silent));
    assert_eq!(a.polled(), [(2, WcStatus::Success), (1, WcStatus::RetryExcErr)]);
    assert!(a.core.next_message().is_some() && a.core.next_message().is_some() && !a.core.waits());
    // A sink that cannot be written is found before the question.
    let mut b = End::new();
    let wrong = [Sge { lkey: 1, ..b.sge(0, 8) }];
    b.send_op(5, SendOp::FetchAdd { stag: 5, to: 0, add: 1 }, &wrong, SIGNALED).unwrap();
    assert_eq!((b.core.next_message(), b.polled()), (None, vec![(5, WcStatus::LocProtErr)]));
}

#[test]
fn requests_of_peers_are_carried_out_and_answered() {
    let (mut b, mr, at) = open();
    let add = AtomicRequest {
        operation: AtomicOp::FetchAdd,
        request_id: 9,
        stag: mr.stag(),
        to: at,
        add_swap_data: 5,
        add_swap_mask: 0,
        compare_data: 0,
        compare_mask: u64::MAX,
    };
    let ddp = untagged(Opcode::AtomicRequest, QN_READ_REQUEST);
    let old = u64::from_ne_bytes([0xEE; 8]);
    assert_eq!(b.place(&naming(1, ddp, &add.to_bytes())), Done);
    let answer = b.core.take_answer().unwrap();
    assert_eq!(answer.destination, 0x99);
    assert!(matches!(answer.target, Target::Untagged { qn: QN_ATOMIC_RESPONSE, .. }));
    let AnswerBytes::Own(bytes) = &answer.bytes else { panic!("{answer:?}") };
    assert_eq!(AtomicResponse::parse(bytes), Ok(AtomicResponse { request_id: 9, original: old }));
    assert_eq!(b.memory[8192..8200], (old + 5).to_ne_bytes());
    let unaligned = AtomicRequest { to: at + 4, ..add };
    let refused = b.place(&naming(2, ddp, &unaligned.to_bytes()));
    assert_eq!((refused, b.core.take_answer()), (Refused(Reason::InvalidRequest), None));
    let longer = [&add.to_bytes()[..], &[0]].concat();
    assert_eq!(b.place(&naming(3, ddp, &longer)), Refused(Reason::InvalidRequest));

    let request =
        ReadRequest { sink_stag: 3, sink_to: 0, size: 8, source_stag: mr.stag(), source_to: at + 8 };
    let ddp = untagged(Opcode::ReadRequest, QN_READ_REQUEST);
    assert_eq!(b.place(&naming(4, ddp, &request.to_bytes())), Done);
    let answer = b.core.take_answer().unwrap();
    b.memory[8202] = 0x11;
    let mut bytes = Vec::new();
    assert!(b.core.fill_answer(&answer, 2, answer.len() - 2, &mut bytes));
    assert_eq!(bytes, [0x11, 0xEE, 0xEE, 0xEE, 0xEE, 0xEE]);
    let mut grants = |access| {
        b.core.modify(&QpModify { access: Some(access), ..QpModify::default() }).unwrap();
        b.core.fill_answer(&answer, 0, 8, &mut Vec::new())
    };
    assert_eq!([grants(Access::REMOTE_WRITE), grants(Access::REMOTE_READ)], [false, true]);
    b.modify(QpState::Reset);
    b.start();
    assert!(!b.core.fill_answer(&answer, 0, 8, &mut bytes), "it was asked for before the RESET");
    assert_eq!(b.place(&naming(5, ddp, &request.to_bytes())), Done);
    let answer = b.core.take_answer().unwrap();
    mr.deregister();
    assert!(!b.core.fill_answer(&answer, 0, 8, &mut bytes));
    assert_eq!(bytes.len(), 6);
    let AnswerBytes::Own(bytes) = answer.instead(Reason::Access).bytes else { panic!() };
    assert_eq!(bytes[..], [0, 0, 0, 3, Reason::Access.code(), 0, 0, 0]);
    assert_eq!(b.place(&naming(6, ddp, &request.to_bytes())), Refused(Reason::Access));
}

/// Answers to one that is gone may still be under way.
#[test]
fn a_new_queue_pair_asks_under_other_names() {
    let names = [(); 4].map(|()| ask(&mut End::new(), 1, 4).1);
    assert!(names.iter().all(|name| names.iter().filter(|other| name == *other).count() == 1), "{names:?}");
}
