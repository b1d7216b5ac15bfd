//! Messages that arrive: which receive they get, and what becomes of it.

use std::collections::VecDeque;
use std::sync::Weak;
use std::sync::atomic::{AtomicU32, Ordering};

use uwarp_proto::rd::Placed::{self, Done, Refused};
use uwarp_wire::ddp::Tagged;
use uwarp_wire::rd::chunk::Reason;

use super::*;
use crate::qp::datagrams::Drops;
use crate::queues::RecvQueue;
use crate::srq::Waiter;
use crate::wr::{Wc, WcFlags};

#[test]
fn without_a_receive_a_message_comes_again() {
    let mut b = End::new();
    assert_eq!(b.arrives(id(1, 1), b"hello"), Placed::NoReceive(12));
    assert!(!b.core.take_ready());
    b.recv(1, 0, 5);
    assert!(b.core.take_ready() && !b.core.take_ready());
    assert_eq!(b.arrives(id(1, 1), b"hello"), Placed::Done);
    b.core.deliver(id(1, 1));
    assert_eq!(b.polled(), [(1, WcStatus::Success)]);
    b.recv(1, 0, 4);
    assert!(!b.core.take_ready(), "nobody was refused");
    assert_eq!(b.arrives(id(1, 2), b"hello"), Placed::Refused(Reason::InvalidRequest));
    assert_eq!(b.arrives(id(1, 3), b"shor"), Placed::Done);
    assert_eq!(b.events(), []);
}

#[test]
fn segments_of_several_messages_of_two_peers_mix() {
    let mut b = End::new();
    for wr_id in 0..4 {
        b.recv(wr_id, 100 * wr_id as usize, 8);
    }
    // Two messages of each; the first segment of one comes last.
    let texts =
        [(id(1, 1), b"abcdefgh"), (id(2, 1), b"ABCDEFGH"), (id(2, 2), b"STUVWXYZ"), (id(1, 2), b"stuvwxyz")];
    for (message, text) in texts {
        assert_eq!(b.place(&segment(message, 5, &text[5..], 8)), Done);
    }
    for (message, text) in texts.into_iter().rev() {
        assert_eq!(b.place(&segment(message, 0, &text[..3], 8)), Done);
        assert_eq!(b.place(&segment(message, 3, &text[3..5], 8)), Done);
    }
    assert_eq!((b.polled(), b.core.snapshot().receives_posted), (vec![], 0));
    for message in [id(2, 2), id(1, 1), id(2, 1), id(1, 2)] {
        b.core.deliver(message);
        b.core.deliver(message);
    }
    assert_eq!(b.polled().iter().map(|(wr_id, _)| *wr_id).collect::<Vec<_>>(), [2, 0, 1, 3]);
    for (wr_id, (_, text)) in texts.iter().enumerate() {
        assert_eq!(&&b.memory[100 * wr_id..][..8], text);
    }
    assert_eq!(b.core.snapshot().counters.received.send.messages, 4);
}

#[test]
fn a_receive_of_two_regions_is_filled_across_them() {
    let mut b = End::new();
    let other = vec![0u8; 8];
    let addr = other.as_ptr().expose_provenance() as u64;
    let mr = Mr::register(&b.pd, addr, 8, addr, Access::LOCAL_WRITE).unwrap();
    let list = [b.sge(10, 3), Sge { addr, length: 5, lkey: mr.stag() }];
    b.core.post_recv(&RecvWr { wr_id: 1, sges: &list }).unwrap();
    for (offset, text) in [(6, b"gh"), (2, b"cd"), (4, b"ef"), (0, b"ab")] {
        assert_eq!(b.place(&segment(id(1, 1), offset, text, 8)), Done);
    }
    b.core.deliver(id(1, 1));
    assert_eq!(b.polled(), [(1, WcStatus::Success)]);
    let mut second = Vec::new();
    uwarp_mem::copy_out(uwarp_mem::MemSeg { addr, len: 8 }, &mut second).unwrap();
    assert_eq!((&b.memory[10..13], &second[..]), (&b"abc"[..], &b"defgh\0\0\0"[..]));
    drop(other);
}

/// As the payload of joined datagrams lies, with heads in between.
#[test]
fn pieces_go_behind_each_other() {
    let mut b = End::new();
    let joined = b"ab..cd..ef..";
    assert_eq!(RdBytes::pieces(joined, 2, 4, 3).len(), 6);
    let list = [b.sge(10, 3), b.sge(20, 6)];
    b.core.post_recv(&RecvWr { wr_id: 1, sges: &list }).unwrap();
    assert_eq!(b.place(&segment(id(1, 1), 0, b"0", 9)), Done);
    let pieces = RdSegment { bytes: RdBytes::pieces(joined, 2, 4, 3), ..segment(id(1, 1), 1, b"", 9) };
    assert_eq!(b.place(&pieces), Done);
    let outside = RdSegment { offset: 4, ..pieces };
    assert_eq!(b.place(&outside), Refused(Reason::InvalidRequest), "one byte too many");
    assert_eq!((&b.memory[10..13], &b.memory[20..26]), (&b"0ab"[..], &b"cdef\xee\xee"[..]));
}

#[test]
fn a_routing_header_precedes_the_message_where_the_program_wants_it() {
    let mut b =
        End::with(How { init: RdInit { ordered: false, grh: true, job_key: 0, max_records: 0 }, ..PLAIN });
    b.recv(1, 0, 44);
    assert_eq!(b.arrives(id(1, 1), b"hello"), Refused(Reason::InvalidRequest), "45 bytes");
    // The area is written once, whichever segment comes first.
    assert_eq!(b.place(&segment(id(1, 2), 2, b"cd", 4)), Done);
    assert_eq!((b.memory[20], b.memory[29]), (0x45, 17));
    b.memory[20] = 0;
    assert_eq!(b.place(&segment(id(1, 2), 0, b"ab", 4)), Done);
    b.core.deliver(id(1, 2));
    assert_eq!(b.memory[20], 0);
    assert_eq!(
        (&b.memory[32..44], b.memory[19], b.memory[44]),
        (&b"\x0A\0\0\x01\x0A\0\0\x02abcd"[..], 0xEE, 0xEE)
    );
    let wc = polled_one(&b);
    assert_eq!((wc.wr_id, wc.byte_len, wc.flags, wc.sl, wc.src_qp), (1, 44, WcFlags::GRH, 8 | 2, 0x99));
}

fn polled_one(end: &End) -> Wc {
    let mut all = Vec::new();
    end.cq.poll(4, |wc| all.push(wc));
    assert_eq!(all.len(), 1);
    all[0]
}

#[test]
fn a_completion_shows_the_immediate_and_the_address_of_its_message() {
    let mut b = End::new();
    b.recv(1, 0, 8);
    let whole = segment(id(1, 1), 0, b"ab", 4);
    let first = whole.first.map(|first| First { immediate: Some([1, 2, 3, 4]), ..first });
    assert_eq!(b.place(&segment(id(1, 1), 2, b"cd", 4)), Done);
    assert_eq!(b.place(&RdSegment { first, ..whole }), Done);
    b.core.deliver(id(1, 1));
    let wc = polled_one(&b);
    assert_eq!((wc.byte_len, wc.flags, wc.imm_or_inv.to_ne_bytes()), (4, WcFlags::WITH_IMM, [1, 2, 3, 4]));
    // With a LID, as InfiniBand's.
    b.recv(2, 0, 8);
    assert_eq!(b.core.place(&segment(id(1, 2), 0, b"", 0), &Arrival { slid: 7, ..ARRIVAL }), Done);
    b.core.deliver(id(1, 2));
    let wc = polled_one(&b);
    assert_eq!((wc.byte_len, wc.flags, wc.slid, wc.sl), (0, WcFlags::empty(), 7, 0));
}

#[test]
fn only_a_send_with_solicited_event_wakes_who_waits_for_that() {
    #[derive(Default)]
    struct Wakes(AtomicU32);
    impl crate::event::CompletionSink for Wakes {
        fn completion_event(&self, _cookie: u64) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let wakes = Arc::new(Wakes::default());
    let mut b = End::new();
    let cq = Cq::new(8, 0, Some(wakes.clone()), b.events.clone());
    let init = QpInit {
        pd: b.pd.clone(),
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        caps: CAPS,
        sq_sig_all: false,
        cookie: 0,
        async_sink: b.events.clone(),
    };
    b.core = RdCore::new(QPN, init, PLAIN.init).unwrap();
    b.start();
    cq.arm(true);
    for (number, opcode, woken) in [(1, Opcode::Send, 0), (2, Opcode::SendSe, 1)] {
        b.recv(number, 0, 8);
        let segment = segment(id(1, number), 0, b"x", 1);
        assert_eq!(b.place(&RdSegment { ddp: send_header(opcode), ..segment }), Done);
        b.core.deliver(id(1, number));
        assert_eq!(wakes.0.load(Ordering::Relaxed), woken);
    }
}

#[test]
fn what_cannot_be_taken_is_refused_and_leaves_the_receive() {
    let mut b = End::new();
    b.recv(1, 0, 4);
    let good = segment(id(1, 1), 0, b"abcd", 4);
    let wrong = First { qkey: QKEY + 1, ..First::default() };
    assert_eq!(b.place(&RdSegment { first: Some(wrong), ..good }), Refused(Reason::InvalidDestination));
    assert_eq!(b.arrives(id(1, 2), b"abcde"), Refused(Reason::InvalidRequest));
    let untagged =
        |rsvdulp, qn| Header::Untagged(Untagged { last: true, rsvdulp, rsvdulp32: 0, qn, msn: 1, mo: 0 });
    let send = Control::new(Opcode::Send).to_byte();
    for ddp in [
        Header::Tagged(Tagged { last: true, rsvdulp: Control::new(Opcode::Write).to_byte(), stag: 1, to: 0 }),
        untagged(send, 1),
        send_header(Opcode::SendInvalidate),
        send_header(Opcode::Unknown(0xD)),
        // Another version of RDMAP.
        untagged(send & 0x3F, 0),
    ] {
        assert_eq!(b.place(&RdSegment { ddp, ..good }), Refused(Reason::InvalidRequest), "{ddp:?}");
    }
    // Nobody has shown the Q_Key: an empty message without a first segment.
    let empty = RdSegment { first: None, ..segment(id(1, 3), 0, b"", 0) };
    assert_eq!(b.place(&empty), Refused(Reason::InvalidRequest));
    // Bytes outside of their message.
    for (offset, bytes) in [(1, &b"abcd"[..]), (5, b""), (u32::MAX, b"abcd")] {
        let outside = RdSegment { offset, bytes: bytes.into(), ..good };
        assert_eq!(b.place(&outside), Refused(Reason::InvalidRequest));
    }
    assert_eq!(b.place(&segment(id(1, 4), 7, b"", u32::MAX)), Refused(Reason::InvalidRequest));
    assert_eq!(b.core.drops(), Drops { qkey: 1, too_long: 2, ..Drops::default() });
    // None of them has taken the receive.
    assert_eq!(b.place(&good), Done);
    let contradiction = RdSegment { message_len: 5, ..segment(id(1, 1), 4, b"e", 5) };
    assert_eq!(b.place(&contradiction), Refused(Reason::InvalidRequest));
    b.core.deliver(id(1, 1));
    assert_eq!(b.polled(), [(1, WcStatus::Success)]);
    assert!(b.memory[4..].iter().all(|byte| *byte == 0xEE));
}

#[test]
fn a_late_first_segment_with_a_wrong_q_key_gives_the_receive_back() {
    let mut b = End::new();
    b.recv(1, 0, 4);
    assert_eq!(b.place(&segment(id(1, 1), 2, b"cd", 4)), Done);
    let wrong = Some(First { qkey: QKEY + 1, ..First::default() });
    let first = RdSegment { first: wrong, ..segment(id(1, 1), 0, b"ab", 4) };
    assert_eq!(b.place(&first), Refused(Reason::InvalidDestination));
    assert!(b.core.take_back(id(1, 1)).is_empty());
    assert_eq!(b.arrives(id(1, 2), b"wxyz"), Done);
    b.core.deliver(id(1, 2));
    assert_eq!((b.polled(), &b.memory[..4]), (vec![(1, WcStatus::Success)], &b"wxyz"[..]));
}

#[test]
fn states_decide_whether_messages_are_taken() {
    let mut b = End::new();
    b.modify(QpState::Reset);
    let mut number = 0;
    let mut arrives = |b: &mut End| {
        number += 1;
        b.arrives(id(1, number), b"x")
    };
    let refused = Refused(Reason::InvalidDestination);
    assert_eq!(arrives(&mut b), refused);
    for (state, taken) in
        [(QpState::Init, false), (QpState::Rtr, true), (QpState::Rts, true), (QpState::Sqd, true)]
    {
        let change = QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() };
        b.core.modify(&change).unwrap();
        b.recv(1, 0, 8);
        assert_eq!(arrives(&mut b), if taken { Done } else { refused }, "{state:?}");
    }
    b.modify(QpState::Err);
    assert_eq!(arrives(&mut b), refused);
    assert_eq!(b.core.drops().state, 3);
}

#[test]
fn memory_that_must_not_be_used_fails_the_receive_alone() {
    let mut b = End::new();
    let bad = [Sge { lkey: 1, ..b.sge(0, 8) }];
    b.core.post_recv(&RecvWr { wr_id: 1, sges: &bad }).unwrap();
    // The first segment to come: the machine has not heard of a receive, and ends nothing.
    assert_eq!(b.arrives(id(1, 1), b"x"), Refused(Reason::Operation));
    assert_eq!(b.polled(), [(1, WcStatus::LocProtErr)]);
    assert!(b.core.receives.is_empty(), "so nothing is remembered of it");
    // A later one, which lies in another region.
    let other = vec![0u8; 8];
    let addr = other.as_ptr().expose_provenance() as u64;
    let mr = Mr::register(&b.pd, addr, 8, addr, Access::LOCAL_WRITE).unwrap();
    let list = [b.sge(0, 4), Sge { addr, length: 4, lkey: mr.stag() }];
    b.core.post_recv(&RecvWr { wr_id: 2, sges: &list }).unwrap();
    b.recv(3, 100, 8);
    assert_eq!(b.place(&segment(id(1, 2), 0, b"ab", 6)), Done);
    assert!(mr.deregister());
    assert_eq!(b.place(&segment(id(1, 2), 4, b"ef", 6)), Refused(Reason::Operation));
    assert_eq!(b.polled(), [(2, WcStatus::LocProtErr)]);
    // The rest of it takes no other receive, and the machine's taking back returns none.
    assert_eq!(b.place(&segment(id(1, 2), 2, b"cd", 6)), Refused(Reason::Operation));
    assert!(b.core.take_back(id(1, 2)).is_empty());
    assert!(b.core.receives.is_empty());
    assert_eq!((b.core.query().state, b.core.snapshot().receives_posted), (QpState::Rts, 1));
    assert_eq!(b.arrives(id(1, 3), b"next"), Done);
    b.core.deliver(id(1, 3));
    assert_eq!((b.polled(), b.events()), (vec![(3, WcStatus::Success)], vec![]));
    drop(other);
}

/// Memory without the right to be written, and an empty message, which needs none.
#[test]
fn an_empty_message_needs_no_memory() {
    let mut b = End::new();
    let bad = [Sge { lkey: 1, ..b.sge(0, 8) }];
    b.core.post_recv(&RecvWr { wr_id: 1, sges: &bad }).unwrap();
    b.core.post_recv(&RecvWr { wr_id: 2, sges: &[] }).unwrap();
    for number in [1, 2] {
        assert_eq!(b.arrives(id(1, number), b""), Done);
        b.core.deliver(id(1, number));
    }
    assert_eq!(b.polled(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn receives_taken_back_the_last_first_keep_their_order() {
    let mut b = End::new();
    for wr_id in 1..=4 {
        b.recv(wr_id, 0, 8 * wr_id as u32);
    }
    for number in 1..=3 {
        assert_eq!(b.arrives(id(1, number), b"x"), Done);
    }
    b.core.deliver(id(1, 1));
    assert_eq!(b.polled(), [(1, WcStatus::Success)]);
    for number in [3, 2, 2] {
        assert!(b.core.take_back(id(1, number)).is_empty());
    }
    assert_eq!(b.core.snapshot().receives_posted, 3);
    // A message that begins again gets another receive.
    for (number, text) in [(3, &[1; 16][..]), (2, &[2; 24]), (4, &[3; 32])] {
        assert_eq!(b.arrives(id(1, number), text), Done);
        b.core.deliver(id(1, number));
    }
    assert_eq!(b.polled().iter().map(|(wr_id, _)| *wr_id).collect::<Vec<_>>(), [2, 3, 4]);
}

#[test]
fn a_receive_that_was_taken_back_keeps_its_place_and_its_list() {
    let mut b = End::new();
    let list = [b.sge(0, 2), b.sge(100, 2)];
    for wr_id in 1..=4 {
        b.core.post_recv(&RecvWr { wr_id, sges: &list }).unwrap();
    }
    let full = Err(VerbsError::QueueFull);
    assert_eq!(b.arrives(id(1, 1), b"abcd"), Done);
    assert_eq!(b.core.post_recv(&RecvWr { wr_id: 5, sges: &list }), full, "it is bound");
    assert!(b.core.take_back(id(1, 1)).is_empty());
    assert_eq!(b.core.post_recv(&RecvWr { wr_id: 5, sges: &list }), full);
    assert_eq!(b.arrives(id(1, 1), b"wxyz"), Done);
    assert_eq!((&b.memory[..3], &b.memory[100..103]), (&b"wx\xEE"[..], &b"yz\xEE"[..]));
    b.core.deliver(id(1, 1));
    assert_eq!(b.core.post_recv(&RecvWr { wr_id: 5, sges: &list }), full, "it is not polled");
    assert_eq!(b.polled(), [(1, WcStatus::Success)]);
    b.core.post_recv(&RecvWr { wr_id: 5, sges: &list }).unwrap();
}

#[test]
fn a_receive_that_comes_back_is_news_for_who_was_refused() {
    let mut b = End::new();
    b.recv(1, 0, 8);
    assert_eq!(b.arrives(id(1, 1), b"x"), Done);
    assert_eq!(b.arrives(id(2, 1), b"x"), Placed::NoReceive(12));
    assert!(!b.core.take_ready());
    assert!(b.core.take_back(id(1, 1)).is_empty());
    assert!(b.core.take_ready() && !b.core.take_ready());
    assert_eq!(b.arrives(id(2, 1), b"x"), Done);
}

/// Any order of posts, messages, deliveries and takings back, beside a plain model of the queue.
#[test]
fn receives_are_used_in_their_order_and_each_once() {
    let mut b = End::new();
    let mut numbers = Numbers(7);
    let (mut queue, mut bound, mut unpolled) = (VecDeque::new(), Vec::new(), Vec::new());
    let (mut next, mut delivered) = (0, 0);
    for round in 0..20_000 {
        match numbers.below(6) {
            0 | 1 => {
                let sges = [b.sge(0, 8)];
                let result = b.core.post_recv(&RecvWr { wr_id: round, sges: &sges });
                let is_full = queue.len() + bound.len() + unpolled.len() == 4;
                assert_eq!(result, if is_full { Err(VerbsError::QueueFull) } else { Ok(()) });
                if !is_full {
                    queue.push_back(round);
                }
            }
            2 | 3 => {
                next += 1;
                let placed = b.place(&segment(id(next % 2, next), 3, b"abc", 8));
                match queue.pop_front() {
                    Some(wr_id) => {
                        assert_eq!(placed, Done);
                        bound.push((id(next % 2, next), wr_id));
                    }
                    None => assert_eq!(placed, Placed::NoReceive(12)),
                }
            }
            4 if !bound.is_empty() => {
                let (message, wr_id) = bound.remove(numbers.below(bound.len()));
                b.core.deliver(message);
                unpolled.push((wr_id, WcStatus::Success));
                delivered += 1;
            }
            4 => {}
            _ if numbers.below(2) == 0 => {
                // Some of the last ones go back, the last first.
                for _ in 0..numbers.below(bound.len() + 1) {
                    let (message, wr_id) = bound.pop().unwrap();
                    assert!(b.core.take_back(message).is_empty());
                    queue.push_front(wr_id);
                }
            }
            _ => assert_eq!(b.polled(), std::mem::take(&mut unpolled)),
        }
        assert_eq!(b.core.snapshot().receives_posted, queue.len());
    }
    assert!(delivered > 1000, "{delivered}");
}

// A shared receive queue.

#[test]
fn receives_of_a_shared_queue_come_back_to_its_front() {
    let pool = Pool::new();
    let mut ends = [pool.end(), pool.end()];
    let [b, c] = &mut ends;
    assert_eq!(b.arrives(id(1, 1), b"x"), Placed::NoReceive(12));
    for wr_id in 1..=3 {
        pool.recv(wr_id, 100 * wr_id as usize, 8 + wr_id as u32).unwrap();
    }
    assert_eq!(b.arrives(id(1, 1), &[1; 12]), Refused(Reason::InvalidRequest));
    assert_eq!((b.arrives(id(1, 1), b"one"), c.arrives(id(1, 2), b"two")), (Done, Done));
    assert_eq!(b.arrives(id(2, 1), b"three"), Done);
    for (end, message) in [(0, id(2, 1)), (1, id(1, 2)), (0, id(1, 1))] {
        assert!(ends[end].core.take_back(message).is_empty());
    }
    for (end, number, text) in [(1, 5, "again"), (0, 6, "twice"), (1, 7, "thrice")] {
        assert_eq!(ends[end].arrives(id(3, number), text.as_bytes()), Done);
        ends[end].core.deliver(id(3, number));
    }
    let ok = WcStatus::Success;
    assert_eq!(ends.map(|end| end.polled()), [vec![(2, ok)], vec![(1, ok), (3, ok)]]);
    for (at, text) in [(100, &b"again"[..]), (200, b"twice"), (300, b"thrice")] {
        assert_eq!(&pool.memory[at..][..text.len()], text);
    }
}

#[test]
fn a_place_of_a_shared_queue_is_free_when_its_completion_is_polled_or_its_queue_pair_reset() {
    let pool = Pool::new();
    let mut b = pool.end();
    for wr_id in 1..=4 {
        pool.recv(wr_id, 0, 8).unwrap();
    }
    assert_eq!((b.arrives(id(1, 1), b"x"), b.arrives(id(1, 2), b"x")), (Done, Done));
    b.core.deliver(id(1, 2));
    assert_eq!(pool.recv(5, 0, 8), Err(VerbsError::QueueFull));
    assert_eq!(b.polled(), [(2, WcStatus::Success)]);
    pool.recv(5, 0, 8).unwrap();
    assert_eq!(pool.recv(6, 0, 8), Err(VerbsError::QueueFull));
    b.modify(QpState::Reset);
    pool.recv(6, 0, 8).unwrap();
    assert_eq!(pool.recv(7, 0, 8), Err(VerbsError::QueueFull));
    assert_eq!((b.polled(), b.events(), pool.events.0.lock().unwrap().len()), (vec![], vec![], 0));
}

/// Queue pairs of connections wait in line for receives. A message of a reliable datagram has taken the only
/// one, and gives it up.
#[test]
fn a_receive_that_comes_back_goes_to_the_first_in_the_line() {
    #[derive(Default)]
    struct Waits(AtomicU32);
    impl Waiter for Waits {
        fn receive_kept(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let pool = Pool::new();
    let mut b = pool.end();
    pool.recv(1, 0, 8).unwrap();
    assert_eq!(b.arrives(id(1, 1), b"x"), Done);
    let line = [Arc::new(Waits::default()), Arc::new(Waits::default())];
    for (qpn, waits) in line.iter().enumerate() {
        let waiter: Weak<dyn Waiter> = Arc::downgrade(waits) as Weak<dyn Waiter>;
        let mut to = RecvQueue::new(1, 2);
        assert!(!pool.srq.take(qpn as u32, &mut to, Some(&waiter)));
    }
    let woken = b.core.take_back(id(1, 1));
    assert!(!woken.is_empty());
    woken.wake();
    assert_eq!([0, 1].map(|n: usize| line[n].0.load(Ordering::Relaxed)), [1, 0]);
    // It is reserved: not too short for the message, but not for it.
    assert_eq!(b.arrives(id(1, 1), b"123456789"), Placed::NoReceive(12));
    let mut to = RecvQueue::new(1, 2);
    assert!(pool.srq.take(0, &mut to, None));
    assert_eq!(to.front().map(|recv| recv.wr_id), Some(1));
}
