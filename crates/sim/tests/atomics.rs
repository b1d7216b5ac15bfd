//! Atomic operations between two queue pairs (RFC 7306 section 5).

#[path = "regressions/duo.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod duo;

use std::sync::Arc;

use uwarp_rnic::qp::{Disconnect, Rtr, StreamParams};
use uwarp_rnic::{Access, Mr, SendFlags, SendOp, SendWr, Sge, VerbsError, WcOpcode, WcStatus};
use uwarp_sim::Side::{A, B};
use uwarp_sim::{NetParams, Side};
use uwarp_wire::terminate::{RemoteOperation, RemoteProtection, TerminateError};

use duo::{Duo, SEND, params};

/// Two ends, each with a region whose words the other may change, from the first aligned address on.
struct Words {
    duo: Duo,
    mr: [Arc<Mr>; 2],
}

const LEN: usize = 4096;

impl Words {
    fn new(params: [StreamParams; 2]) -> Self {
        Self::with_net(params, NetParams::default())
    }

    fn with_net(params: [StreamParams; 2], net: NetParams) -> Self {
        let params = params.map(|p| StreamParams { infiniband: true, ..p });
        let mut duo = Duo::with_net(params, net);
        let mr = Side::BOTH.map(|side| {
            let pd = duo.world.end(side).pd.clone();
            let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
            duo.memory[side.index()].register(&pd, 0, LEN, access)
        });
        Self { duo, mr }
    }

    /// Offset of word `n` of an end.
    fn at(&self, side: Side, n: usize) -> usize {
        let addr = self.duo.memory[side.index()].addr(0);
        usize::try_from(addr.next_multiple_of(8) - addr).unwrap() + 8 * n
    }

    fn get(&self, side: Side, n: usize) -> u64 {
        let bytes = self.duo.memory[side.index()].read(self.at(side, n), 8);
        u64::from_ne_bytes(bytes.try_into().unwrap())
    }

    fn set(&self, side: Side, n: usize, value: u64) {
        self.duo.memory[side.index()].write(self.at(side, n), &value.to_ne_bytes());
    }

    fn target(&self, of: Side, n: usize) -> (u32, u64) {
        (self.mr[of.index()].stag(), self.duo.memory[of.index()].addr(self.at(of, n)))
    }

    /// On the peer's word 0; the value before it goes to word `n` here.
    fn add(&mut self, side: Side, id: u64, add: u64, n: usize) {
        let (stag, to) = self.target(side.peer(), 0);
        let sge = self.duo.sge(side, self.at(side, n), 8);
        self.duo.queue(side, id, SendOp::FetchAdd { stag, to, add }, sge);
    }

    fn swap(&mut self, side: Side, id: u64, (compare, swap): (u64, u64), n: usize) {
        let (stag, to) = self.target(side.peer(), 0);
        let sge = self.duo.sge(side, self.at(side, n), 8);
        self.duo.queue(side, id, SendOp::CmpSwap { stag, to, compare, swap }, sge);
    }
}

fn depth(ird: u16, ord: u16) -> [StreamParams; 2] {
    params().map(|p| StreamParams { ird, ord, ..p })
}

#[test]
fn a_fetch_and_add_and_its_answer() {
    let mut w = Words::new(params());
    w.set(B, 0, 40);
    w.add(A, 7, 2, 5);
    w.duo.world.settle();
    assert_eq!((w.get(B, 0), w.get(A, 5)), (42, 40));
    let wc = w.duo.world.end(A).sends();
    assert_eq!((wc.len(), wc[0].wr_id, wc[0].status), (1, 7, WcStatus::Success));
    assert_eq!((wc[0].opcode, wc[0].byte_len), (WcOpcode::FetchAdd, 8));
    let (stag, to) = w.target(B, 0);
    let request = format!("AtomicReq L qn=1 msn=1 mo=0 FetchAdd id=1 target={stag:#x}/{to:#x} data=0x2/0x0");
    assert!(w.duo.sent(A).contains(&request), "{:?}", w.duo.sent(A));
    assert!(w.duo.sent(B).contains(&"AtomicResp L qn=3 msn=1 mo=0 id=1 original=0x28".into()));
    let counters = Side::BOTH.map(|side| w.duo.world.end(side).core.snapshot().counters);
    assert_eq!(
        (counters[0].received.atomic_response.messages, counters[1].sent.atomic_response.messages),
        (1, 1)
    );
}

#[test]
fn a_compare_and_swap_that_finds_what_it_expects_and_one_that_does_not() {
    let mut w = Words::new(params());
    w.set(B, 0, 40);
    w.swap(A, 1, (40, 50), 1);
    w.swap(A, 2, (40, 60), 2);
    w.duo.world.settle();
    assert_eq!((w.get(B, 0), w.get(A, 1), w.get(A, 2)), (50, 40, 50));
    let opcodes: Vec<_> = w.duo.world.end(A).sends().iter().map(|wc| wc.opcode).collect();
    assert_eq!(opcodes, [WcOpcode::CompSwap; 2]);
}

/// Each end adds to the other's word, with more requests than the read depth and pieces of any size.
#[test]
fn many_at_once_in_both_directions_and_none_beyond_the_read_depth() {
    for ord in [1, 2, 5, 16] {
        let net = NetParams { piece: 37, ..NetParams::default() };
        let mut w = Words::with_net(depth(ord, ord), net);
        for n in 0..60 {
            for side in Side::BOTH {
                w.add(side, n, n + 1, 1 + usize::try_from(n).unwrap());
            }
        }
        w.duo.world.settle();
        for side in Side::BOTH {
            assert_eq!(w.duo.sends(side).len(), 60);
            assert_eq!(w.get(side, 0), (1..=60u64).sum::<u64>());
            // In order: each returned the sum of those before.
            assert!((0..60u64).all(|n| w.get(side, 1 + usize::try_from(n).unwrap()) == (0..=n).sum::<u64>()));
        }
        assert!(w.duo.world.end(A).disconnected.is_empty());
    }
}

/// They share the read depth and the numbering with RDMA Reads, and are answered in order.
#[test]
fn atomics_between_reads() {
    let mut w = Words::new(depth(2, 2));
    let (stag, to) = w.target(B, 0);
    for n in 0..10u64 {
        let at = 10 + 2 * usize::try_from(n).unwrap();
        w.add(A, 2 * n, 1, at);
        let sge = w.duo.sge(A, w.at(A, at + 1), 8);
        w.duo.queue(A, 2 * n + 1, SendOp::Read { stag, to, invalidate_local: false }, sge);
    }
    w.duo.world.settle();
    for n in 0..10u64 {
        let at = 10 + 2 * usize::try_from(n).unwrap();
        assert_eq!(
            (w.get(A, at), w.get(A, at + 1)),
            (n, n + 1),
            "a Read shows the effect of a later operation"
        );
    }
    assert_eq!(w.duo.sends(A), (0..20).map(|id| (id, WcStatus::Success)).collect::<Vec<_>>());
}

/// A Read of much data in progress does not show the change of a later atomic operation.
#[test]
fn a_read_does_not_show_a_later_change() {
    let mut w = Words::new(params());
    let everything = w.duo.read_op(A, 0);
    let sge = w.duo.sge(A, LEN, 512 * 1024);
    w.duo.queue(A, 1, everything, sge);
    w.add(A, 2, 9, 1);
    w.duo.world.settle();
    assert_eq!(w.duo.sends(A), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    let shown = w.duo.memory[0].read(LEN + w.at(B, 0), 8);
    assert_eq!((shown, w.get(A, 1), w.get(B, 0)), (vec![0; 8], 0, 9));
}

/// A fence holds back later work requests until the value has arrived.
#[test]
fn a_fence_waits_for_an_atomic() {
    let mut w = Words::new(params());
    w.set(B, 0, 0x1234);
    w.duo.recv(B, 1, 8192, 8);
    w.add(A, 1, 1, 1);
    let sges = [w.duo.sge(A, w.at(A, 1), 8)];
    let wr = SendWr { wr_id: 2, op: SEND, flags: SendFlags::FENCE | SendFlags::SIGNALED, sges: &sges };
    w.duo.world.end(A).core.post_send(&wr).unwrap();
    w.duo.world.settle();
    assert_eq!(w.duo.memory[1].read(8192, 8), 0x1234u64.to_ne_bytes());
}

/// Without a receive, the answer is received past the Sends that wait.
#[test]
fn an_answer_is_received_past_buffered_sends() {
    let mut w = Words::new(params());
    let sge = w.duo.sge(B, 0, 16);
    for id in 0..3 {
        w.duo.queue(B, id, SEND, sge);
    }
    w.add(A, 9, 1, 1);
    w.duo.world.settle();
    assert_eq!((w.duo.sends(A), w.get(B, 0)), (vec![(9, WcStatus::Success)], 1));
    // An atomic operation of the peer behind a waiting Send waits too: the Send is delivered first.
    let sge = w.duo.sge(A, 0, 16);
    w.duo.queue(A, 10, SEND, sge);
    w.duo.queue(A, 11, SEND, sge);
    w.add(A, 12, 1, 2);
    w.duo.world.settle();
    assert_eq!(w.get(B, 0), 1);
    w.duo.recv(B, 1, 8192, 16);
    w.duo.recv(B, 2, 8192, 16);
    w.duo.world.settle();
    assert_eq!((w.get(B, 0), w.get(A, 2)), (2, 1));
}

/// The value may go to several pieces, which must be eight bytes in all and writable.
#[test]
fn where_the_value_goes() {
    let mut w = Words::new(params());
    w.set(B, 0, 0x0807_0605_0403_0201);
    let (stag, to) = w.target(B, 0);
    let op = SendOp::FetchAdd { stag, to, add: 0 };
    let (first, second) = (w.duo.sge(A, 100, 3), w.duo.sge(A, 200, 5));
    let mut post = |flags, sges: &[Sge]| {
        let wr = SendWr { wr_id: 1, op, flags: flags | SendFlags::SIGNALED, sges };
        w.duo.world.end(A).core.post_send(&wr)
    };
    post(SendFlags::empty(), &[first, second]).unwrap();
    for wrong in [vec![], vec![first], vec![first, first, first]] {
        assert!(matches!(post(SendFlags::empty(), &wrong), Err(VerbsError::Invalid(_))), "{wrong:?}");
    }
    assert!(matches!(post(SendFlags::INLINE, &[first, second]), Err(VerbsError::Invalid(_))));
    w.duo.world.settle();
    let value = w.get(B, 0).to_ne_bytes();
    assert_eq!([w.duo.memory[0].read(100, 3), w.duo.memory[0].read(200, 5)].concat(), value);
    assert_eq!(w.duo.sends(A), [(1, WcStatus::Success)]);
    // The request is not sent if there is no place for its answer.
    let sge = Sge { lkey: 1, ..first };
    w.duo.queue(A, 2, op, Sge { length: 8, ..sge });
    w.duo.world.settle();
    assert_eq!(w.duo.sends(A), [(2, WcStatus::LocProtErr)]);
    assert_eq!(w.duo.world.end(B).core.snapshot().counters.sent.atomic_response.messages, 1);
}

/// An operation that the peer refuses fails with InfiniBand's status and changes nothing.
#[test]
fn refused_by_the_peer() {
    let unaligned = TerminateError::RemoteOperation(RemoteOperation::CatastrophicStream);
    let rights = TerminateError::RemoteProtection(RemoteProtection::AccessRights);
    let stag = TerminateError::RemoteProtection(RemoteProtection::InvalidStag);
    type Target = fn(&Words) -> (u32, u64);
    let cases: [(Target, TerminateError, WcStatus); 3] = [
        (|w| (w.target(B, 0).0, w.target(B, 0).1 + 4), unaligned, WcStatus::RemInvReqErr),
        (|w| (w.duo.mr[1].stag(), w.target(B, 0).1), rights, WcStatus::RemAccessErr),
        (|w| (1, w.target(B, 0).1), stag, WcStatus::RemAccessErr),
    ];
    for (target, error, status) in cases {
        let mut w = Words::new(params());
        w.add(A, 1, 1, 1);
        w.duo.world.settle();
        let (stag, to) = target(&w);
        let sge = w.duo.sge(A, w.at(A, 2), 8);
        w.duo.queue(A, 2, SendOp::FetchAdd { stag, to, add: 5 }, sge);
        w.add(A, 3, 1, 3);
        w.duo.world.settle();
        assert_eq!(w.duo.sends(A), [(1, WcStatus::Success), (2, status), (3, WcStatus::WrFlushErr)]);
        assert_eq!(w.get(B, 0), 1);
        assert_eq!(w.duo.world.end(B).disconnected, [Disconnect::Sent(error)]);
    }
}

/// An operation is carried out when it arrives, also behind a Read of much data that is not answered yet:
/// Writes and Sends behind it find it done. A lock that was taken by a swap and freed by a Write in one list
/// stayed taken.
#[test]
fn c12_an_atomic_behind_an_unanswered_read_comes_before_a_write_behind_it() {
    for (capacity, len) in [(1 << 20, 64), (4096, 512 * 1024)] {
        let net = NetParams { capacity, ..NetParams::default() };
        let mut w = Words::with_net(params(), net);
        w.set(B, 0, 7);
        let sge = w.duo.sge(A, LEN, len);
        let read = w.duo.read_op(A, 0);
        w.duo.queue(A, 1, read, sge);
        w.add(A, 2, 5, 1);
        let free = w.duo.write_op(A, w.at(B, 0));
        let zeros = w.duo.sge(A, w.at(A, 9), 8);
        w.duo.queue(A, 3, free, zeros);
        w.duo.world.settle();
        assert_eq!(w.duo.sends(A), [1, 2, 3].map(|id| (id, WcStatus::Success)));
        assert_eq!((w.get(A, 1), w.get(B, 0)), (7, 0), "{len}");
    }
}

/// Short Reads show nothing of what comes behind them, whether they are answered at once or wait.
#[test]
fn c12_a_short_read_does_not_show_a_write_behind_it() {
    for busy in [false, true] {
        let net = NetParams { capacity: 4096, ..NetParams::default() };
        let mut w = Words::with_net(params(), net);
        w.duo.memory[1].write(0, &[1; 64]);
        w.duo.memory[0].write(0, &[2; 64]);
        if busy {
            // The answers wait behind this.
            w.duo.recv(A, 1, 8192, 512 * 1024);
            let sge = w.duo.sge(B, 8192, 512 * 1024);
            w.duo.queue(B, 1, SEND, sge);
            w.duo.world.settle_for(200);
        }
        for n in 0..8_u8 {
            let (read, write) = (w.duo.read_op(A, 0), w.duo.write_op(A, 0));
            let at = 1024 + 64 * usize::from(n);
            let (into, from) = (w.duo.sge(A, at, 64), w.duo.sge(A, 64 * usize::from(n), 64));
            w.duo.memory[0].write(64 * usize::from(n), &[2 + n; 64]);
            w.duo.queue(A, 1, read, into);
            w.duo.queue(A, 2, write, from);
        }
        w.duo.world.settle();
        assert_eq!(w.duo.sends(A).len(), 16);
        for n in 0..8_u8 {
            let shown = w.duo.memory[0].read(1024 + 64 * usize::from(n), 64);
            assert_eq!(shown, [1 + n; 64], "{n}, busy: {busy}");
        }
    }
}

/// Nothing of what is carried out before an earlier Read is answered shows in it, whatever key the Read
/// names; and the region of an operation may go before its answer.
#[test]
fn a_region_deregistered_before_the_answer() {
    let net = NetParams { capacity: 4096, ..NetParams::default() };
    let mut w = Words::with_net(params(), net);
    let sge = w.duo.sge(A, LEN, 512 * 1024);
    let everything = w.duo.read_op(A, 0);
    w.duo.queue(A, 1, everything, sge);
    w.add(A, 2, 9, 1);
    w.add(A, 3, 9, 2);
    for _ in 0..10_000 {
        w.duo.world.settle_for(100);
        if w.get(B, 0) == 18 {
            break;
        }
    }
    assert_eq!((w.get(B, 0), w.duo.sends(A)), (18, vec![]), "the Read is done too soon for this test");
    w.mr[1].deregister();
    w.duo.world.settle();
    assert_eq!(w.duo.sends(A), [1, 2, 3].map(|id| (id, WcStatus::Success)));
    assert_eq!((w.get(B, 0), w.get(A, 1), w.get(A, 2)), (18, 0, 9));
    assert_eq!(w.duo.memory[0].read(LEN + w.at(B, 0), 8), [0; 8]);
}

/// A stranger is not sent an operation that it may not know: it would end the stream (docs/adr/029).
#[test]
fn strangers_are_sent_none() {
    let mut w = Words::new(params().map(|p| StreamParams { peer_is_uwarp: false, ..p }));
    let (stag, to) = w.target(B, 0);
    let sges = [w.duo.sge(A, 0, 8)];
    for op in [SendOp::FetchAdd { stag, to, add: 1 }, SendOp::CmpSwap { stag, to, compare: 0, swap: 1 }] {
        let wr = SendWr { wr_id: 1, op, flags: SendFlags::SIGNALED, sges: &sges };
        let refused = w.duo.world.end(A).core.post_send(&wr);
        assert!(matches!(refused, Err(VerbsError::NotSupported(_))), "{refused:?}");
    }
    let [a, b] = duo::with_rtr(Rtr::SendWrite);
    let mut w = Words::new([StreamParams { peer_is_uwarp: false, ..a }, b]);
    w.add(B, 1, 1, 1);
    w.duo.world.settle();
    assert_eq!((w.duo.sends(B), w.get(A, 0)), (vec![(1, WcStatus::LocQpOpErr)], 0));
}

#[test]
fn no_read_depth_no_atomics() {
    let mut w = Words::new(depth(0, 0));
    w.add(A, 1, 1, 1);
    w.duo.world.settle();
    assert_eq!(w.duo.sends(A), [(1, WcStatus::LocQpOpErr)]);
}

/// Numbers of requests and of responses wrap.
#[test]
fn numbers_of_atomics_wrap() {
    let mut w = Words::new(depth(3, 3));
    for side in Side::BOTH {
        w.duo.world.end(side).core.set_msn(u32::MAX - 1);
    }
    for n in 0..6 {
        w.add(A, n, 1, 1);
    }
    w.duo.world.settle();
    assert_eq!((w.duo.sends(A).len(), w.get(B, 0)), (6, 6));
    assert!(w.duo.sent(B).iter().any(|line| line.starts_with("AtomicResp L qn=3 msn=0 ")));
}
