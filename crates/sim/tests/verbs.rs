//! Rules of the verbs that random workloads seldom reach: states, limits, local errors, events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_proto::setup::PeerData;
use uwarp_rnic::qp::{Disconnect, Now, QpCaps, QpModify, QpState, StreamParams};
use uwarp_rnic::{
    Access, EventKind, Mr, RecvWr, SendFlags, SendOp, SendWr, Sge, VerbsError, WcOpcode, WcStatus,
};
use uwarp_sim::Side::{A, B};
use uwarp_sim::{Arena, EndConfig, NetParams, Side, World};
use uwarp_wire::terminate::TerminateError;

const SIZE: usize = 1 << 17;
const SEND: SendOp = SendOp::Send { invalidate: None };

struct Pair {
    world: World,
    memory: [Arena; 2],
    mr: [Arc<Mr>; 2],
}

impl Pair {
    fn new(depth: u32, params: StreamParams) -> Self {
        let caps = QpCaps {
            max_send_wr: depth,
            max_recv_wr: depth,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        let config = EndConfig { caps, ..EndConfig::default() };
        let mut world = World::new(1, [config; 2], NetParams::default(), [None, None]);
        let memory = [Arena::new(SIZE), Arena::new(SIZE)];
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = world.init(&memory, access);
        world.attach([params, StreamParams { initiator: false, ..params }]);
        Self { world, memory, mr }
    }

    fn usual() -> Self {
        Self::new(8, StreamParams { peer_is_uwarp: true, ..StreamParams::default() })
    }

    fn sge(&self, side: Side, at: usize, len: u32) -> Sge {
        Sge { addr: self.memory[side.index()].addr(at), length: len, lkey: self.mr[side.index()].stag() }
    }

    fn read(&self) -> SendOp {
        SendOp::Read { stag: self.mr[1].stag(), to: self.memory[1].addr(0), invalidate_local: false }
    }

    fn post(&mut self, wr_id: u64, op: SendOp, flags: SendFlags, sges: &[Sge]) -> Result<(), VerbsError> {
        self.world.post_send(A, &SendWr { wr_id, op, flags, sges })
    }

    fn recv(&mut self, side: Side, wr_id: u64, sge: Sge) -> Result<(), VerbsError> {
        self.world.post_recv(side, &RecvWr { wr_id, sges: &[sge] })
    }

    fn to(&mut self, side: Side, state: QpState) -> Result<(), VerbsError> {
        self.world.end(side).core.modify(&QpModify { state: Some(state), ..QpModify::default() })
    }

    fn sends(&mut self) -> Vec<(u64, WcStatus)> {
        self.world.end(A).sends().iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }
}

/// Inline work requests that fill the queue and wait keep their bytes, whatever the program does with its
/// own.
#[test]
fn waiting_inline_data() {
    let mut p = Pair::usual();
    for round in 0..3u8 {
        p.to(A, QpState::Sqd).unwrap();
        for n in 0..8u8 {
            let sge = p.sge(B, usize::from(n) * 16, 16);
            p.recv(B, n.into(), sge).unwrap();
            p.memory[0].write(0, &[round * 8 + n; 16]);
            // No key is needed.
            let sge = Sge { lkey: 0, ..p.sge(A, 0, 16) };
            p.post(n.into(), SEND, SendFlags::INLINE, &[sge]).unwrap();
        }
        p.memory[0].write(0, &[0xEE; 16]);
        p.to(A, QpState::Rts).unwrap();
        p.world.settle();
        let expected: Vec<u8> = (0..8).flat_map(|n| [round * 8 + n; 16]).collect();
        assert_eq!(p.memory[1].read(0, 8 * 16), expected);
        assert_eq!(p.world.end(B).recvs().len(), 8);
    }
    assert_eq!(p.sends(), []);
}

#[test]
fn posting_beyond_the_limits_is_refused_and_changes_nothing() {
    let mut p = Pair::new(2, StreamParams::default());
    let (sge, invalid) =
        (p.sge(A, 0, 8), |r: Result<(), VerbsError>| matches!(r, Err(VerbsError::Invalid(_))));
    assert!(invalid(p.post(1, SEND, SendFlags::empty(), &[sge; 3])), "elements");
    assert!(invalid(p.post(1, SEND, SendFlags::INLINE, &[Sge { length: 65, ..sge }])), "inline bytes");
    let read = p.read();
    assert!(invalid(p.post(1, read, SendFlags::INLINE, &[sge])), "an inline Read");
    let huge = Sge { length: 0x8000_0000, ..sge };
    assert!(invalid(p.post(1, SEND, SendFlags::empty(), &[huge])), "longer than max_msg_sz");
    for id in 0..2 {
        p.post(id, read, SendFlags::SIGNALED, &[sge]).unwrap();
    }
    assert_eq!(p.post(9, read, SendFlags::empty(), &[sge]), Err(VerbsError::QueueFull));
    for id in 0..2 {
        p.recv(A, id, sge).unwrap();
    }
    assert_eq!(p.recv(A, 9, sge), Err(VerbsError::QueueFull));
    p.world.settle();
    assert_eq!(p.sends(), [(0, WcStatus::Success), (1, WcStatus::Success)]);
}

/// Each state and what may be posted in it.
#[test]
fn posting_by_state() {
    let mut p = Pair::usual();
    let sge = p.sge(A, 0, 8);
    let ok = |r: Result<(), VerbsError>| r.is_ok();
    p.to(A, QpState::Sqd).unwrap();
    assert!(ok(p.post(1, SEND, SendFlags::SIGNALED, &[sge])) && ok(p.recv(A, 11, sge)));
    p.to(A, QpState::Err).unwrap();
    assert!(ok(p.post(2, SEND, SendFlags::empty(), &[sge])) && ok(p.recv(A, 12, sge)));
    // In ERR, unsignalled ones also complete, at once.
    assert_eq!(p.sends(), [(1, WcStatus::WrFlushErr), (2, WcStatus::WrFlushErr)]);
    let recvs: Vec<u64> = p.world.end(A).recvs().iter().map(|wc| wc.wr_id).collect();
    assert_eq!(recvs, [11, 12]);
    p.to(A, QpState::Reset).unwrap();
    assert!(!ok(p.post(3, SEND, SendFlags::empty(), &[sge])) && !ok(p.recv(A, 13, sge)));
    p.to(A, QpState::Init).unwrap();
    assert!(!ok(p.post(3, SEND, SendFlags::empty(), &[sge])) && ok(p.recv(A, 13, sge)));
    // RTR needs a connection.
    p.world.settle();
    assert!(p.world.end(A).is_closed());
    assert!(matches!(p.to(A, QpState::Rtr), Err(VerbsError::NotSupported(_))));
    assert_eq!(p.sends(), []);
}

/// A work request that cannot be carried out fails in its turn: earlier ones complete, later ones are
/// flushed, and the peer gets a Terminate for a local failure.
#[test]
fn local_errors_wait_their_turn() {
    type Bad = fn(&Pair) -> (SendOp, Sge);
    let cases: [(Bad, WcStatus, WcOpcode); 6] = [
        (|p| (SEND, Sge { lkey: 1, ..p.sge(A, 0, 8) }), WcStatus::LocProtErr, WcOpcode::Send),
        (|p| (SEND, p.sge(A, SIZE - 4, 8)), WcStatus::LocProtErr, WcOpcode::Send),
        (|p| (SEND, Sge { lkey: p.mr[1].stag(), ..p.sge(A, 0, 8) }), WcStatus::LocProtErr, WcOpcode::Send),
        (|p| (p.read(), Sge { lkey: 1, ..p.sge(A, 0, 8) }), WcStatus::LocProtErr, WcOpcode::RdmaRead),
        (|p| (SendOp::LocalInvalidate { stag: 1 }, p.sge(A, 0, 0)), WcStatus::MwBindErr, WcOpcode::LocalInv),
        (
            |p| (SendOp::LocalInvalidate { stag: p.mr[1].stag() }, p.sge(A, 0, 0)),
            WcStatus::MwBindErr,
            WcOpcode::LocalInv,
        ),
    ];
    for (bad, status, opcode) in cases {
        let mut p = Pair::usual();
        let (good, read) = (p.sge(A, 0, 8), p.read());
        let (op, sge) = bad(&p);
        p.post(1, read, SendFlags::SIGNALED, &[good]).unwrap();
        // Failures make a completion even if they are unsignalled.
        p.post(2, op, SendFlags::empty(), &[sge]).unwrap();
        p.post(3, read, SendFlags::empty(), &[good]).unwrap();
        p.world.settle();
        let found: Vec<_> =
            p.world.end(A).sends().iter().map(|wc| (wc.wr_id, wc.status, wc.opcode)).collect();
        let expected = [
            (1, WcStatus::Success, WcOpcode::RdmaRead),
            (2, status, opcode),
            (3, WcStatus::WrFlushErr, WcOpcode::RdmaRead),
        ];
        assert_eq!(found, expected);
        let local = TerminateError::LocalCatastrophic;
        assert_eq!(p.world.end(A).disconnected, [Disconnect::Sent(local)]);
        assert_eq!(p.world.end(B).disconnected, [Disconnect::Terminated(local)]);
        assert!(p.mr[1].enter().is_some(), "another domain's region was invalidated");
    }
}

#[test]
fn a_read_without_read_depth_fails() {
    let mut p = Pair::new(8, StreamParams { ord: 0, ..StreamParams::default() });
    let (read, sge) = (p.read(), p.sge(A, 0, 8));
    p.post(1, read, SendFlags::SIGNALED, &[sge]).unwrap();
    p.world.settle();
    assert_eq!(p.sends(), [(1, WcStatus::LocQpOpErr)]);
}

/// A receive into memory that is not writable fails, and the stream with it.
#[test]
fn a_receive_into_read_only_memory() {
    let mut p = Pair::usual();
    let pd = p.world.end(B).pd.clone();
    let read_only = p.memory[1].register(&pd, 0, 64, Access::REMOTE_READ);
    let sge = Sge { lkey: read_only.stag(), ..p.sge(B, 0, 64) };
    p.recv(B, 1, sge).unwrap();
    let sge = p.sge(A, 0, 8);
    p.post(1, SEND, SendFlags::empty(), &[sge]).unwrap();
    p.world.settle();
    let found: Vec<_> = p.world.end(B).recvs().iter().map(|wc| wc.status).collect();
    assert_eq!(found, [WcStatus::LocProtErr]);
    assert_eq!(p.world.end(B).disconnected, [Disconnect::Sent(TerminateError::DdpLocalCatastrophic)]);
}

#[test]
fn solicited_sends_make_the_event() {
    let mut p = Pair::usual();
    for id in 0..3 {
        let sge = p.sge(B, 0, 8);
        p.recv(B, id, sge).unwrap();
    }
    p.world.end(B).recv_cq.arm(true);
    let sge = p.sge(A, 0, 8);
    let mut events = Vec::new();
    for flags in [SendFlags::empty(), SendFlags::SOLICITED, SendFlags::SOLICITED] {
        p.post(1, SEND, flags, &[sge]).unwrap();
        p.world.settle();
        events.push(p.world.end(B).events.completions());
    }
    // Armed once: one event.
    assert_eq!(events, [0, 1, 1]);
}

/// Numbers of messages wrap in the middle of a workload.
#[test]
fn message_numbers_wrap() {
    let mut p = Pair::new(8, StreamParams { ord: 1, ..StreamParams::default() });
    for side in Side::BOTH {
        p.world.end(side).core.set_msn(u32::MAX - 1);
    }
    let (read, sge) = (p.read(), p.sge(A, 0, 3000));
    for id in 0..4 {
        let sink = p.sge(B, 0, 3000);
        p.recv(B, id, sink).unwrap();
        p.post(2 * id, SEND, SendFlags::SIGNALED, &[sge]).unwrap();
        p.post(2 * id + 1, read, SendFlags::SIGNALED, &[sge]).unwrap();
        p.world.settle();
    }
    assert_eq!(p.sends(), (0..8).map(|id| (id, WcStatus::Success)).collect::<Vec<_>>());
    let lines = uwarp_sim::tap::lines(&p.world, true, [false, false]);
    for msn in ["msn=4294967294", "msn=4294967295", "msn=0", "msn=1"] {
        let of = |what: &str| lines.lines().any(|l| l.contains(what) && l.contains(&format!("{msn} ")));
        assert!(of("Send") && of("ReadReq"), "{msn} in\n{lines}");
    }
}

/// Queries return what a connection sets, unless the program has set it itself. RESET removes both.
#[test]
fn attributes_of_the_connection_and_of_the_program() {
    let shown = |p: &mut Pair| {
        let attr = p.world.end(A).core.query();
        (attr.dest_qp_num, attr.rnr_retry, attr.timeout, attr.retry_cnt)
    };
    let peer = Some(PeerData { qpn: 77, rnr_retry: 3, ..PeerData::new() });
    let params = StreamParams { peer_is_uwarp: true, peer, timeout: 18, retry_cnt: 7, ..Default::default() };
    let mut p = Pair::new(8, params);
    assert_eq!(shown(&mut p), (77, 3, 18, 7));
    p.to(A, QpState::Reset).unwrap();
    assert_eq!(shown(&mut p), (0, 0, 0, 0));
    p.world.settle();
    let core = &mut p.world.end(A).core;
    core.modify(&QpModify { timeout: Some(0), retry_cnt: Some(1), ..QpModify::default() }).unwrap();
    core.attach(&Now::unread(), StreamParams { peer_is_uwarp: false, peer: None, ..params }).unwrap();
    assert_eq!(shown(&mut p), (0, 0, 0, 1));
}

/// A queue pair that was reset can get another stream, and keeps nothing of the first one.
#[test]
fn a_second_stream_after_reset() {
    let mut p = Pair::usual();
    let (read, sge) = (p.read(), p.sge(A, 0, 8));
    p.post(1, read, SendFlags::SIGNALED, &[sge]).unwrap();
    p.to(A, QpState::Reset).unwrap();
    p.world.settle();
    assert!(p.world.end(A).is_closed() && p.world.end(B).is_closed());
    assert_eq!(p.sends(), []);
    let core = &mut p.world.end(A).core;
    core.attach(&Now::unread(), StreamParams { peer_is_uwarp: true, ..StreamParams::default() }).unwrap();
    assert_eq!(core.query().state, QpState::Rts);
    core.post_send(&SendWr { wr_id: 2, op: SEND, flags: SendFlags::SIGNALED, sges: &[sge] }).unwrap();
    let waiting = core.poll_transmit(&Now::unread()).unwrap().waiting();
    core.transmitted(&Now::unread(), waiting);
    // Length, header, 8 bytes and CRC; no pad.
    assert_eq!(waiting, 2 + 18 + 8 + 4);
    assert_eq!(p.sends(), [(2, WcStatus::Success)]);
    assert_eq!(p.world.end(A).events.kinds(), [] as [EventKind; 0]);
}

/// The pump repeated all of the cutting after each message that was sent, and after each that arrived.
#[test]
fn a_core_reports_that_it_has_nothing_more_to_send() {
    let mut p =
        Pair::new(4, StreamParams { peer_is_uwarp: true, placement_acks: true, ..StreamParams::default() });
    let sge = p.sge(A, 0, 8);
    let (core, now) = (&mut p.world.end(A).core, &Now::unread());
    let send = SendWr { wr_id: 1, op: SEND, flags: SendFlags::SIGNALED, sges: &[sge] };
    core.post_send(&send).unwrap();
    assert!(!core.has_nothing_to_send(), "nothing is cut yet");
    let waiting = core.poll_transmit(now).unwrap().waiting();
    assert!(core.transmitted(now, 1), "the link has not taken the rest");
    assert!(!core.has_nothing_to_send());
    assert!(!core.transmitted(now, waiting - 1), "everything was cut");
    assert!(core.has_nothing_to_send());
    assert!(core.poll_transmit(now).is_none());
    core.post_send(&send).unwrap();
    assert!(!core.has_nothing_to_send());
}

/// After each message that arrived, all of the cutting was done for the sake of one deadline.
#[test]
fn an_acknowledgement_that_may_ride_is_nothing_to_send_until_its_time_is_over() {
    fn carry(p: &mut Pair, now: Instant, from: Side) {
        let core = &mut p.world.end(from).core;
        let bytes = core.poll_transmit(&Now::at(now)).unwrap().only_staged().unwrap().to_vec();
        core.transmitted(&Now::at(now), bytes.len());
        assert_eq!(p.world.end(from.peer()).core.handle_input(&Now::at(now), &bytes), bytes.len());
    }
    fn exchange(p: &mut Pair, now: Instant, n: u64, side: Side) {
        let (from, to) = (p.sge(side, 0, 8), p.sge(side.peer(), 0, 8));
        p.world.end(side.peer()).core.post_recv(&RecvWr { wr_id: n, sges: &[to] }).unwrap();
        let send = SendWr { wr_id: n, op: SEND, flags: SendFlags::SIGNALED, sges: &[from] };
        p.world.end(side).core.post_send(&send).unwrap();
        carry(p, now, side);
    }
    let mut p =
        Pair::new(4, StreamParams { peer_is_uwarp: true, placement_acks: true, ..StreamParams::default() });
    let now = Instant::now();
    // The second message of A comes after an answer to its first one, so B may answer again.
    [(1, A), (2, B), (3, A)].into_iter().for_each(|(n, side)| exchange(&mut p, now, n, side));
    let core = &mut p.world.end(B).core;
    let soon = now + Duration::from_millis(1);
    assert!(core.has_nothing_to_send() && core.poll_timeout().is_none_or(|at| at > soon));
    core.await_ride(&Now::at(now));
    assert!(core.has_nothing_to_send() && core.poll_transmit(&Now::at(now)).is_none());
    let at = core.poll_timeout().filter(|at| *at < soon).unwrap();
    core.handle_timeout(&Now::at(at - Duration::from_nanos(1)));
    assert!(core.has_nothing_to_send() && core.poll_timeout() == Some(at), "an early call");
    core.handle_timeout(&Now::at(at));
    assert!(!core.has_nothing_to_send() && core.poll_timeout().is_none_or(|at| at > soon));
    carry(&mut p, at, B);
    assert!(p.world.end(B).core.has_nothing_to_send());
    assert_eq!(p.sends(), [(1, WcStatus::Success), (3, WcStatus::Success)]);
    [(4, B), (5, A)].into_iter().for_each(|(n, side)| exchange(&mut p, at, n, side));
    let core = &mut p.world.end(B).core;
    core.await_ride(&Now::at(at));
    assert!(core.poll_timeout().is_some_and(|again| again > at), "the next one has its own time");
    assert!(core.poll_timeout().is_some_and(|again| again <= at + Duration::from_millis(1)));
}

/// 2,000 receives fitted into a queue of 16 without one poll, and then the completion queue was full. With
/// adapters, a place is free only when its completion was polled.
#[test]
fn a_program_that_is_throttled_by_a_full_queue_cannot_overrun_its_completion_queue() {
    let mut p =
        Pair::new(4, StreamParams { peer_is_uwarp: true, placement_acks: true, ..StreamParams::default() });
    let (from, to) = (p.sge(A, 0, 8), p.sge(B, 0, 8));
    let (mut sent, mut received) = (0..100, 0..100);
    let (mut polled_sends, mut polled_recvs) = (0, 0);
    while polled_recvs < 100 || polled_sends < 100 {
        // As many as fit, before each poll.
        for _ in 0..50 {
            if let Some(id) = received.clone().next() {
                match p.recv(B, id, to) {
                    Ok(()) => _ = received.next(),
                    Err(e) => assert_eq!(e, VerbsError::QueueFull),
                }
            }
            if let Some(id) = sent.clone().next() {
                match p.post(id, SEND, SendFlags::SIGNALED, &[from]) {
                    Ok(()) => _ = sent.next(),
                    Err(e) => assert_eq!(e, VerbsError::QueueFull),
                }
            }
            p.world.settle();
        }
        assert!(sent.start - polled_sends <= 4 && received.start - polled_recvs <= 4);
        // One at a time: there is a place for each.
        p.world
            .end(A)
            .send_cq
            .poll(1, |wc| assert_eq!((wc.wr_id, wc.status), (polled_sends, WcStatus::Success)));
        p.world
            .end(B)
            .recv_cq
            .poll(1, |wc| assert_eq!((wc.wr_id, wc.status), (polled_recvs, WcStatus::Success)));
        (polled_sends, polled_recvs) = (polled_sends + 1, polled_recvs + 1);
    }
    assert!(p.world.end(A).is_empty_of_completions() && p.world.end(B).is_empty_of_completions());
}

/// Places of work requests that make no completion are free with the next completion, or when there is
/// nothing to poll.
#[test]
fn places_of_unsignalled_work_requests() {
    let mut p = Pair::new(4, StreamParams { peer_is_uwarp: true, ..StreamParams::default() });
    let write = SendOp::Write { stag: p.mr[1].stag(), to: p.memory[1].addr(0) };
    let sge = p.sge(A, 0, 8);
    for id in 0..20 {
        p.post(id, write, SendFlags::empty(), &[sge]).unwrap();
        p.world.settle();
    }
    for (id, flags) in [SendFlags::empty(), SendFlags::SIGNALED, SendFlags::empty(), SendFlags::SIGNALED]
        .into_iter()
        .enumerate()
    {
        p.post(id as u64, write, flags, &[sge]).unwrap();
    }
    p.world.settle();
    assert_eq!(p.post(9, write, SendFlags::empty(), &[sge]), Err(VerbsError::QueueFull));
    p.world.end(A).send_cq.poll(1, |wc| assert_eq!(wc.wr_id, 1));
    for _ in 0..2 {
        p.post(9, write, SendFlags::empty(), &[sge]).unwrap();
    }
    p.world.settle();
    assert_eq!(p.post(9, write, SendFlags::empty(), &[sge]), Err(VerbsError::QueueFull));
    assert_eq!(p.sends(), [(3, WcStatus::Success)]);
    for _ in 0..4 {
        p.post(9, write, SendFlags::empty(), &[sge]).unwrap();
    }
}

/// In the error state, too: a work request that is flushed at once takes a place until it is polled.
#[test]
fn flushed_work_requests_cannot_overrun_a_completion_queue() {
    let mut p = Pair::new(4, StreamParams { peer_is_uwarp: true, ..StreamParams::default() });
    let sge = p.sge(A, 0, 8);
    p.recv(A, 0, sge).unwrap();
    p.to(A, QpState::Err).unwrap();
    for round in 0..3 {
        let expected = if round == 0 { 3 } else { 4 };
        assert_eq!((1..10).take_while(|id| p.recv(A, *id, sge).is_ok()).count(), expected);
        assert_eq!((1..10).take_while(|id| p.post(*id, SEND, SendFlags::empty(), &[sge]).is_ok()).count(), 4);
        assert_eq!((p.sends().len(), p.world.end(A).recvs().len()), (4, 4));
    }
    assert_eq!(p.world.end(A).events.kinds(), []);
}

/// Completions of a queue pair were polled after its reset; they contained addresses of freed memory.
#[test]
fn no_completion_outlasts_a_reset() {
    let mut p = Pair::usual();
    let (from, to) = (p.sge(A, 0, 8), p.sge(B, 0, 8));
    for id in 0..3 {
        p.recv(B, id, to).unwrap();
        p.recv(A, id, from).unwrap();
        p.post(id, SEND, SendFlags::SIGNALED, &[from]).unwrap();
    }
    p.world.settle();
    p.to(B, QpState::Err).unwrap();
    p.to(B, QpState::Reset).unwrap();
    p.to(A, QpState::Reset).unwrap();
    for side in Side::BOTH {
        assert!(p.world.end(side).is_empty_of_completions());
        p.world.settle();
        assert!(p.world.end(side).is_empty_of_completions());
        // All places are free.
        p.world.end(side).init();
        let sge = p.sge(side, 0, 8);
        assert_eq!((0..20).take_while(|id| p.recv(side, *id, sge).is_ok()).count(), 8);
    }
}
