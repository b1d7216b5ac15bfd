use super::*;
use crate::wr::WcFlags;

const SUCCESS: WcStatus = WcStatus::Success;

#[test]
fn a_message_takes_a_receive_when_it_is_whole() {
    let mut b = End::new();
    b.recv(1, 100, 20);
    b.core.place(&segment(id(1, 1), 0, b"hello, ", 12));
    assert_eq!(b.polled(), []);
    b.core.place(&segment(id(1, 1), 7, b"world", 12));
    let [wc] = b.completions().try_into().unwrap();
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, SUCCESS, WcOpcode::Recv));
    assert_eq!((wc.byte_len, b.text(100, 12)), (12, &b"hello, world"[..]));
    assert_eq!(b.core.drops(), Drops::default());
}

#[test]
fn segments_may_overtake_each_other_behind_the_first_and_come_twice() {
    let mut b = End::new();
    b.recv(1, 0, 20);
    for (offset, text) in [(0, "he"), (10, "ld"), (4, "o,"), (10, "ld"), (6, " wor"), (2, "ll"), (2, "ll")] {
        b.core.place(&segment(id(1, 1), offset, text.as_bytes(), 12));
    }
    assert_eq!((b.polled(), b.text(0, 12)), (vec![(1, SUCCESS)], &b"hello, world"[..]));
    assert_eq!(b.core.drops(), Drops::default(), "a late copy is no second message");
}

#[test]
fn a_message_with_a_gap_gives_its_receive_to_the_next_one() {
    let mut b = End::new();
    b.recv(1, 0, 20);
    b.recv(2, 100, 20);
    b.core.place(&segment(id(1, 1), 0, b"lost", 12));
    b.core.place(&segment(id(1, 2), 0, b"whole", 5));
    // The rest of the first one comes too late, and nothing of it is placed.
    b.core.place(&segment(id(1, 1), 4, b"too late", 12));
    assert_eq!((b.polled(), b.text(0, 6)), (vec![(1, SUCCESS)], &b"whole\xEE"[..]));
    assert_eq!(b.core.drops(), Drops { incomplete: 1, ..Drops::default() });
    // Without its first segment, a message is lost, and counted once.
    b.core.place(&segment(id(1, 3), 4, b"o", 6));
    b.core.place(&segment(id(1, 3), 5, b"o", 6));
    b.core.place(&segment(id(1, 4), 0, b"next", 4));
    assert_eq!((b.polled(), b.text(100, 4)), (vec![(2, SUCCESS)], &b"next"[..]));
    assert_eq!(b.core.drops(), Drops { incomplete: 2, ..Drops::default() });
}

#[test]
fn no_message_comes_twice_or_behind_a_later_one() {
    let mut b = End::new();
    (0..4).for_each(|n| b.recv(n, 0, 20));
    for number in [1, 1, 3, 2, 3] {
        b.core.place(&segment(id(1, number), 0, b"x", 1));
    }
    assert_eq!(b.polled(), [(0, SUCCESS), (1, SUCCESS)]);
    // A later exchange counts anew.
    b.core.place(&segment(id(2, 1), 0, b"x", 1));
    assert_eq!(b.polled(), [(2, SUCCESS)]);
    b.core.place(&segment(id(1, 9), 0, b"x", 1));
    assert_eq!(b.polled(), []);
}

#[test]
fn nothing_is_taken_of_anybody_else() {
    let mut b = End::new();
    b.recv(1, 0, 20);
    let good = segment(id(1, 1), 0, b"x", 1);
    let other_host = RdSegment { remote: SocketAddr::new([10, 0, 0, 2].into(), REMOTE.port()), ..good };
    let other_port = RdSegment { remote: SocketAddr::new(HOST, 0x789B), ..good };
    let other_number = RdSegment { source_qpn: PEER + 1, ..good };
    let other_psn = RdSegment { first: Some(First { qkey: RQ_PSN + 1, ..First::default() }), ..good };
    for (stranger, count) in [other_host, other_port, other_number, other_psn].iter().zip(1..) {
        b.core.place(stranger);
        assert_eq!(b.core.drops(), Drops { qkey: count, ..Drops::default() });
    }
    assert_eq!((b.polled(), b.text(0, 1)), (vec![], &b"\xEE"[..]));
    b.core.place(&segment(id(1, 2), 0, b"x", 1));
    assert_eq!(b.polled(), [(1, SUCCESS)]);
}

#[test]
fn before_rtr_and_in_err_nothing_is_taken() {
    let mut b = End::new();
    b.modify(QpState::Reset);
    b.core.place(&segment(id(1, 1), 0, b"x", 1));
    b.start();
    b.recv(1, 0, 20);
    b.core.place(&segment(id(1, 2), 0, b"x", 2));
    b.modify(QpState::Err);
    b.core.place(&segment(id(1, 2), 1, b"x", 2));
    assert_eq!(b.polled(), [(1, WcStatus::WrFlushErr)]);
    assert_eq!(b.core.drops(), Drops { state: 2, ..Drops::default() });
    // A new life begins anew, whatever its peer counts.
    b.modify(QpState::Reset);
    b.start();
    b.recv(2, 0, 20);
    b.core.place(&segment(id(1, 1), 0, b"x", 1));
    assert_eq!(b.polled(), [(2, SUCCESS)]);
}

#[test]
fn without_a_fitting_receive_a_message_is_dropped() {
    let mut b = End::new();
    b.core.place(&segment(id(1, 1), 0, b"xx", 4));
    b.recv(1, 0, 3);
    b.core.place(&segment(id(1, 1), 2, b"xx", 4));
    b.core.place(&segment(id(1, 2), 0, b"xxxx", 4));
    assert_eq!(b.polled(), []);
    assert_eq!(b.core.drops(), Drops { no_receive: 1, too_long: 1, ..Drops::default() });
    b.core.place(&segment(id(1, 3), 0, b"xxx", 3));
    assert_eq!(b.polled(), [(1, SUCCESS)], "the receive is still there");
    b.recv(2, 0, 0);
    b.core.place(&segment(id(1, 4), 0, b"", 0));
    assert_eq!(b.polled(), [(2, SUCCESS)]);
}

#[test]
fn a_write_goes_to_memory_and_its_immediate_to_a_receive() {
    let mut b = End::new();
    b.core.place(&write(&b, id(1, 1), 1000, 0, b"abc", 6));
    b.core.place(&write(&b, id(1, 1), 1000, 3, b"def", 6));
    assert_eq!((b.polled(), b.text(999, 8)), (vec![], &b"\xEEabcdef\xEE"[..]));
    let counters = b.core.snapshot().counters.received.write;
    assert_eq!((counters.messages, counters.bytes), (1, 6));
    // Without a receive, not even its bytes are placed.
    b.core.place(&with_immediate(write(&b, id(1, 2), 2000, 0, b"ghi", 3)));
    assert_eq!((b.core.drops().no_receive, b.text(2000, 3)), (1, &b"\xEE\xEE\xEE"[..]));
    b.recv(1, 0, 0);
    b.core.place(&with_immediate(write(&b, id(1, 3), 2000, 0, b"gh", 3)));
    assert_eq!(b.polled(), [], "it is not whole");
    b.core.place(&write(&b, id(1, 3), 2000, 2, b"i", 3));
    let [wc] = b.completions().try_into().unwrap();
    assert_eq!((wc.opcode, wc.byte_len, wc.flags), (WcOpcode::RecvRdmaWithImm, 3, WcFlags::WITH_IMM));
    assert_eq!((wc.imm_or_inv, b.text(2000, 3)), (u32::from_ne_bytes(*b"imm!"), &b"ghi"[..]));
}

#[test]
fn what_is_placed_of_a_lost_write_stays_and_its_receive_does_too() {
    let mut b = End::new();
    b.recv(1, 0, 0);
    b.core.place(&with_immediate(write(&b, id(1, 1), 1000, 0, b"abc", 6)));
    b.core.place(&with_immediate(write(&b, id(1, 2), 2000, 0, b"def", 3)));
    assert_eq!((b.polled(), b.text(1000, 4)), (vec![(1, SUCCESS)], &b"abc\xEE"[..]));
    b.core.place(&write(&b, id(1, 1), 1000, 3, b"def", 6));
    assert_eq!(b.text(1000, 4), b"abc\xEE", "nothing of it is written behind a later message");
}

#[test]
fn memory_that_may_not_be_written_is_not() {
    let mut b = End::new();
    let good = |b: &End, number| write(b, id(1, number), 1000, 0, b"abc", 3);
    let Header::Tagged(tagged) = good(&b, 1).ddp else { panic!("a Write is tagged") };
    let end = b.mr.range().0 + b.memory.len() as u64;
    let wrong = [
        RdSegment { ddp: Header::Tagged(Tagged { stag: tagged.stag ^ 1, ..tagged }), ..good(&b, 1) },
        RdSegment { ddp: Header::Tagged(Tagged { to: end - 2, ..tagged }), ..good(&b, 2) },
        // All of it must have a place before the first byte is written.
        RdSegment { message_len: 1 << 20, ..good(&b, 3) },
        // A Read Response, and a Read Request.
        RdSegment { ddp: Header::Tagged(Tagged { rsvdulp: 0x42, ..tagged }), ..good(&b, 4) },
        RdSegment { ddp: send_header(Opcode::ReadRequest), ..good(&b, 5) },
    ];
    for (segment, count) in wrong.iter().zip(1..) {
        assert_eq!(b.core.place(segment), UcPlaced::NoRight);
        assert_eq!(b.core.drops(), Drops { access: count, ..Drops::default() });
    }
    // A rest that goes elsewhere than its beginning.
    b.core.place(&write(&b, id(1, 6), 1000, 0, b"a", 3));
    b.core.place(&write(&b, id(1, 6), 1001, 1, b"bc", 3));
    assert_eq!((b.core.drops().access, b.text(1000, 4)), (6, &b"a\xEE\xEE\xEE"[..]));
    // The queue pair grants no right to write.
    let none = QpModify { access: Some(Access::empty()), ..QpModify::default() };
    b.core.modify(&none, None).unwrap();
    let segment = good(&b, 7);
    assert_eq!(b.core.place(&segment), UcPlaced::NoRight);
    assert_eq!(b.text(1000, 2), b"a\xEE");
}

#[test]
fn a_segment_that_contradicts_its_message_ends_it() {
    let mut b = End::new();
    b.recv(1, 0, 20);
    b.core.place(&segment(id(1, 1), 0, b"ab", 6));
    b.core.place(&segment(id(1, 1), 2, b"cd", 7));
    b.core.place(&segment(id(1, 1), 2, b"cdef", 6));
    assert_eq!((b.polled(), b.core.drops().access), (vec![], 1));
    b.core.place(&segment(id(1, 3), 0, b"too long for it", 2));
    assert_eq!((b.polled(), b.core.drops().access), (vec![], 2));
}

/// Who sends a message byte by byte and leaves gaps makes the queue pair remember only so much.
#[test]
fn a_message_in_crumbs_is_given_up() {
    let mut b = End::new();
    b.recv(1, 0, 1000);
    b.core.place(&segment(id(1, 1), 0, b"", 1000));
    for offset in (1..1000).step_by(2) {
        b.core.place(&segment(id(1, 1), offset, b"x", 1000));
    }
    assert_eq!(b.core.drops(), Drops { incomplete: 1, ..Drops::default() });
}

#[test]
fn a_receive_of_a_shared_queue_is_kept_for_the_next_message() {
    let (srq, mr, memory) = shared();
    let mut b = End::with(Some(srq.clone()), 32);
    let post = |wr_id, at: u64| {
        let sges = [Sge { addr: mr.range().0 + at, length: 20, lkey: mr.stag() }];
        let (result, woken) = srq.post_recv(std::iter::once(RecvWr { wr_id, sges: &sges }));
        woken.wake();
        result.map_err(|(_, error)| error).unwrap();
    };
    post(1, 0);
    post(2, 100);
    b.core.place(&segment(id(1, 1), 0, b"lo", 4));
    b.core.place(&segment(id(1, 2), 0, b"whole", 5));
    b.core.place(&segment(id(1, 3), 0, b"next", 4));
    b.core.place(&segment(id(1, 4), 0, b"none", 4));
    assert_eq!(b.polled(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!((&memory[..5], &memory[100..104]), (&b"whole"[..], &b"next"[..]));
    assert_eq!(b.core.drops(), Drops { incomplete: 1, no_receive: 1, ..Drops::default() });
}

#[test]
fn memory_of_a_receive_that_is_gone_is_the_programs_mistake() {
    let mut b = End::new();
    b.recv(1, 0, 20);
    b.recv(2, 0, 20);
    b.mr.deregister();
    b.core.place(&segment(id(1, 1), 0, b"x", 1));
    assert_eq!(b.polled(), [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(b.core.query().state, QpState::Err);
}
