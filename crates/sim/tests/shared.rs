//! Receives from a shared receive queue, in cases that the random workloads do not check.

use std::sync::Arc;
use std::time::Duration;

use uwarp_rnic::qp::{Disconnect, QpModify, QpState, StreamParams};
use uwarp_rnic::{Access, EventKind, Mr, RecvWr, SendFlags, SendOp, SendWr, Sge, Srq, VerbsError, WcStatus};
use uwarp_sim::Side::{A, B};
use uwarp_sim::{Arena, EndConfig, NetParams, Side, World};
use uwarp_wire::terminate::{TerminateError, UntaggedBuffer};

const SIZE: usize = 1 << 18;
const SEND: SendOp = SendOp::Send { invalidate: None };

/// A sends; B's receives are shared.
struct Pair {
    world: World,
    memory: [Arena; 2],
    mr: [Arc<Mr>; 2],
}

impl Pair {
    fn new(params: StreamParams) -> Self {
        let config = EndConfig { shared_recv: true, ..EndConfig::default() };
        let net = NetParams { piece: 3000, capacity: 50_000, ..NetParams::default() };
        let mut world = World::new(1, [EndConfig::default(), config], net, [None, None]);
        let memory = [Arena::new(SIZE), Arena::new(SIZE)];
        let mr = world.init(&memory, Access::LOCAL_WRITE);
        world.attach([params, StreamParams { initiator: false, ..params }]);
        Self { world, memory, mr }
    }

    fn usual() -> Self {
        Self::new(StreamParams { peer_is_uwarp: true, ..StreamParams::default() })
    }

    fn srq(&mut self) -> Arc<Srq> {
        self.world.end(B).srq.clone().unwrap()
    }

    fn sge(&self, side: Side, at: usize, len: u32) -> Sge {
        Sge { addr: self.memory[side.index()].addr(at), length: len, lkey: self.mr[side.index()].stag() }
    }

    fn recv(&mut self, wr_id: u64, at: usize, len: u32) {
        let sge = self.sge(B, at, len);
        self.world.post_recv(B, &RecvWr { wr_id, sges: &[sge] }).unwrap();
    }

    fn send(&mut self, at: usize, len: u32) {
        let sge = self.sge(A, at, len);
        self.world
            .post_send(A, &SendWr { wr_id: 1, op: SEND, flags: SendFlags::SIGNALED, sges: &[sge] })
            .unwrap();
    }

    fn recvs(&mut self) -> Vec<(u64, WcStatus)> {
        self.world.end(B).recvs().iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    fn events(&mut self) -> Vec<EventKind> {
        self.world.end(B).events.kinds()
    }
}

#[test]
fn a_send_that_found_none_goes_on_with_the_next_refill() {
    let mut p = Pair::usual();
    let data: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    p.memory[0].write(0, &data);
    p.send(0, 16);
    p.send(0, 100_000);
    p.world.settle();
    assert_eq!((p.recvs(), p.world.end(B).core.stalled()), (vec![], true));
    p.recv(1, 0, 100);
    p.world.settle();
    assert_eq!((p.recvs(), p.world.end(B).core.stalled()), (vec![(1, WcStatus::Success)], true));
    p.recv(2, 1000, 100_000);
    p.world.settle();
    assert_eq!((p.recvs(), p.world.end(B).core.stalled()), (vec![(2, WcStatus::Success)], false));
    assert!(p.memory[1].read(1000, 100_000) == data);
    assert_eq!(p.events(), []);
}

#[test]
fn only_the_receive_it_has_taken_is_flushed() {
    let mut p = Pair::usual();
    for id in 0..4 {
        p.recv(id, 0, 200_000);
    }
    p.send(0, 8);
    p.send(0, 200_000);
    // Enough time for its first segment.
    p.world.settle_for(50_000);
    assert_eq!(p.recvs(), [(0, WcStatus::Success)]);
    p.world.end(B).core.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() }).unwrap();
    assert_eq!(p.recvs(), [(1, WcStatus::WrFlushErr)]);
    assert_eq!(p.events(), [EventKind::QpLastWqeReached]);
    p.world.settle();
    assert_eq!((p.recvs(), p.events().len()), (vec![], 1));
    // The others wait for other queue pairs: the queue of 64 takes 62 more.
    let srq = p.srq();
    let (result, _) = srq.post_recv((0..64).map(|wr_id| RecvWr { wr_id, sges: &[] }));
    assert_eq!(result, Err((62, VerbsError::QueueFull)));
}

#[test]
fn the_limit_is_reported_once() {
    let mut p = Pair::usual();
    for id in 0..4 {
        p.recv(id, 0, 8);
    }
    p.srq().modify(None, Some(3)).unwrap();
    p.send(0, 8);
    p.world.settle();
    assert_eq!(p.events(), []);
    p.send(0, 8);
    p.send(0, 8);
    p.world.settle();
    assert_eq!((p.events(), p.srq().query().limit), (vec![EventKind::SrqLimitReached], 0));
}

#[test]
fn a_wait_that_is_too_long_ends_the_stream_and_leaves_the_line() {
    let mut p = Pair::new(StreamParams {
        peer_is_uwarp: true,
        rnr_timeout: Some(Duration::from_millis(1)),
        ..StreamParams::default()
    });
    p.send(0, 8);
    p.world.settle();
    let no_buffer = TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer);
    assert_eq!(p.world.end(B).disconnected, [Disconnect::Sent(no_buffer)]);
    assert_eq!(p.events(), [EventKind::QpLastWqeReached, EventKind::QpReqErr]);
    // No receive is reserved for it.
    let (result, woken) = p.srq().post_recv(std::iter::once(RecvWr { wr_id: 1, sges: &[] }));
    assert!(result.is_ok() && woken.is_empty());
}

#[test]
fn its_queue_pairs_take_no_receives_of_their_own() {
    let mut p = Pair::usual();
    let core = &mut p.world.end(B).core;
    assert!(matches!(core.post_recv(&RecvWr { wr_id: 1, sges: &[] }), Err(VerbsError::Invalid(_))));
    assert_eq!((core.query().caps.max_recv_wr, core.query().caps.max_recv_sge), (0, 0));
}

/// A message longer than its receive, and a receive that is not writable: the receive is used up and the
/// connection ends.
#[test]
fn a_receive_that_does_not_fit_is_used_up() {
    let mut p = Pair::usual();
    p.recv(1, 0, 8);
    p.recv(2, 0, 8);
    p.send(0, 9);
    p.world.settle();
    assert_eq!(p.recvs(), [(1, WcStatus::LocLenErr)]);
    let mut p = Pair::usual();
    let sge = Sge { lkey: p.mr[0].stag(), ..p.sge(B, 0, 8) };
    p.world.post_recv(B, &RecvWr { wr_id: 1, sges: &[sge] }).unwrap();
    p.send(0, 8);
    p.world.settle();
    assert_eq!(p.recvs(), [(1, WcStatus::LocProtErr)]);
}
