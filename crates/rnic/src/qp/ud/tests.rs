mod records;
mod runs;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex};

use uwarp_wire::terminate::{TerminateError, UntaggedBuffer};

use super::*;
use crate::ah::Ah;
use crate::cq::Cq;
use crate::event::{AsyncEvent, AsyncSink};
use crate::mr::{Access, Mr};
use crate::pd::Pd;
use crate::qp::QpCaps;
use crate::srq::{Srq, SrqInit};
use crate::wr::{SendOp, Sge, WcFlags};

#[derive(Default)]
struct Events(Mutex<Vec<EventKind>>);

impl AsyncSink for Events {
    fn async_event(&self, event: AsyncEvent) {
        self.0.lock().unwrap().push(event.kind);
    }
}

struct End {
    core: UdCore,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    memory: Vec<u8>,
    mr: Arc<Mr>,
    events: Arc<Events>,
}

const QPN: u32 = 0x12_3456;
const QKEY: u32 = 0x1111_1111;
const CAPS: QpCaps =
    QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 64 };

impl End {
    fn new() -> Self {
        Self::with(None, 16)
    }

    fn with(srq: Option<Arc<Srq>>, cq_depth: u32) -> Self {
        Self::with_caps(srq, cq_depth, CAPS)
    }

    fn with_caps(srq: Option<Arc<Srq>>, cq_depth: u32, caps: QpCaps) -> Self {
        let pd = Pd::new();
        let events = Arc::new(Events::default());
        let cq = Cq::new(cq_depth, 0, None, events.clone());
        let init = QpInit {
            pd: pd.clone(),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq,
            caps,
            sq_sig_all: false,
            cookie: 0,
            async_sink: events.clone(),
        };
        let mut core = UdCore::new(QPN, init).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            core.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
        }
        let memory = vec![0xEE; 16 * 1024];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE).unwrap();
        Self { core, pd, cq, memory, mr, events }
    }

    fn sge(&self, at: usize, length: u32) -> Sge {
        Sge { addr: self.mr.range().0 + at as u64, length, lkey: self.mr.stag() }
    }

    fn ah(&self) -> Arc<Ah> {
        Ah::new(&self.pd, (Ipv4Addr::LOCALHOST, 0).into(), None)
    }

    fn send(&mut self, wr_id: u64, sges: &[Sge], flags: SendFlags) -> Result<(), VerbsError> {
        let wr = SendWr { wr_id, op: SendOp::SendImmediate { imm: [1, 2, 3, 4] }, flags, sges };
        let ah = self.ah();
        self.core.post_send(&UdSendWr { wr, ah: &ah, remote_qpn: QPN, remote_qkey: QKEY, job_key: None })
    }

    fn recv(&mut self, wr_id: u64, at: usize, length: u32) {
        let sges = [self.sge(at, length)];
        self.core.post_recv(&RecvWr { wr_id, sges: &sges }).unwrap();
    }

    fn polled(&self) -> Vec<(u64, WcStatus)> {
        let mut all = Vec::new();
        self.cq.poll(64, |wc| all.push((wc.wr_id, wc.status)));
        all
    }

    /// All that waits, taken by a lower layer without limits.
    fn taken(&mut self) -> Vec<Vec<u8>> {
        let all: Vec<Vec<u8>> = self.core.outgoing().map(|(_, bytes)| bytes.to_vec()).collect();
        self.core.sent(all.len());
        all
    }

    fn arrives(&mut self, datagram: &[u8]) -> Result<(), Dropped> {
        let arrival = Arrival {
            from: Ipv4Addr::new(10, 0, 0, 1).into(),
            to: Ipv4Addr::new(10, 0, 0, 2).into(),
            slid: 0,
        };
        self.core.deliver(&datagram::parse(datagram).unwrap(), &arrival)
    }

    fn modify(&mut self, state: QpState) -> Result<(), VerbsError> {
        self.core.modify(&QpModify { state: Some(state), ..QpModify::default() })
    }
}

const SIGNALED: SendFlags = SendFlags::SIGNALED;

#[test]
fn a_message_goes_from_two_elements_into_two_behind_the_routing_header() {
    let (mut a, mut b) = (End::new(), End::new());
    a.memory[..6].copy_from_slice(b"abcdef");
    let list = [a.sge(4, 2), a.sge(0, 3)];
    a.send(1, &list, SIGNALED | SendFlags::SOLICITED).unwrap();
    let sent = a.taken();
    assert_eq!(a.polled(), [(1, WcStatus::Success)]);
    let list = [b.sge(100, 43), b.sge(0, 10)];
    b.core.post_recv(&RecvWr { wr_id: 9, sges: &list }).unwrap();
    b.arrives(&sent[0]).unwrap();
    let mut all = Vec::new();
    b.cq.poll(4, |wc| all.push(wc));
    let wc = all[0];
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (9, WcStatus::Success, WcOpcode::Recv));
    assert_eq!((wc.byte_len, wc.src_qp, wc.qp_num), (45, QPN, QPN));
    // UCX 1.13 dropped what did not say that it is IPv4.
    assert_eq!(wc.sl & 7, 2);
    assert_eq!((wc.flags, wc.imm_or_inv.to_ne_bytes()), (WcFlags::GRH | WcFlags::WITH_IMM, [1, 2, 3, 4]));
    assert_eq!((&b.memory[140..143], &b.memory[..2]), (&b"efa"[..], &b"bc"[..]));
    // IPv4: nothing in the first 20 bytes, then its header with a good checksum.
    assert!(b.memory[100..120].iter().all(|byte| *byte == 0xEE));
    let header = &b.memory[120..140];
    assert_eq!((header[0], header[9]), (0x45, 17));
    assert_eq!(header[12..], [10, 0, 0, 1, 10, 0, 0, 2]);
    let sum: u32 = header.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    assert_eq!((sum & 0xFFFF) + (sum >> 16), 0xFFFF);
}

#[test]
fn ipv6_fills_the_whole_routing_header() {
    let (a, b): (Ipv6Addr, Ipv6Addr) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
    let (mut sender, mut receiver) = (End::new(), End::new());
    receiver.recv(9, 100, 200);
    let list = [sender.sge(0, 100)];
    sender.send(1, &list, SIGNALED).unwrap();
    let datagram = sender.taken().remove(0);
    let arrival = Arrival { from: a.into(), to: b.into(), slid: 0 };
    receiver.core.deliver(&datagram::parse(&datagram).unwrap(), &arrival).unwrap();
    let header = &receiver.memory[100..140];
    assert_eq!(
        (header[0], header[6], &header[8..24], &header[24..]),
        (0x60, 17, &a.octets()[..], &b.octets()[..])
    );
    assert_eq!(u16::from_be_bytes([header[4], header[5]]), 8 + 42 + 100);
    let mut all = Vec::new();
    receiver.cq.poll(4, |wc| all.push(wc.sl & 7));
    assert_eq!(all, [1]);
}

#[test]
fn what_does_not_fit_is_dropped_and_leaves_the_receive() {
    let (mut a, mut b) = (End::new(), End::new());
    let list = [a.sge(0, 100)];
    a.send(1, &list, SIGNALED).unwrap();
    let datagram = a.taken().remove(0);
    assert_eq!(b.arrives(&datagram), Err(Dropped::NoReceive));
    b.recv(5, 0, 139);
    assert_eq!(b.arrives(&datagram), Err(Dropped::TooLong));
    let list = [a.sge(0, 99)];
    a.send(1, &list, SIGNALED).unwrap();
    let datagram = a.taken().remove(0);
    b.core.modify(&QpModify { qkey: Some(QKEY + 1), ..QpModify::default() }).unwrap();
    assert_eq!(b.arrives(&datagram), Err(Dropped::Qkey));
    b.core.modify(&QpModify { qkey: Some(QKEY), ..QpModify::default() }).unwrap();
    b.arrives(&datagram).unwrap();
    assert_eq!(b.polled(), [(5, WcStatus::Success)]);
    b.modify(QpState::Err).unwrap();
    assert_eq!(b.arrives(&datagram), Err(Dropped::State));
    assert_eq!(b.core.drops(), Drops { state: 1, qkey: 1, no_receive: 1, too_long: 1, ..Drops::default() });
    assert!(b.memory[139..].iter().all(|byte| *byte == 0xEE));
}

#[test]
fn inline_data_needs_no_key_and_is_taken_at_once() {
    let mut a = End::new();
    a.memory[..3].copy_from_slice(b"abc");
    let sge = Sge { lkey: 0, ..a.sge(0, 3) };
    a.send(1, &[sge], SIGNALED | SendFlags::INLINE).unwrap();
    a.memory[..3].copy_from_slice(b"XXX");
    let sent = a.taken();
    assert_eq!(datagram::parse(&sent[0]).unwrap().payload, b"abc");
    let long = Sge { length: 65, ..sge };
    assert!(matches!(a.send(2, &[long], SendFlags::INLINE), Err(VerbsError::Invalid(_))));
}

#[test]
fn a_bad_send_stops_the_queue_until_the_program_has_reacted() {
    let mut a = End::new();
    let (good, bad) = (a.sge(0, 8), Sge { lkey: 1, ..a.sge(0, 8) });
    a.send(1, &[good], SIGNALED).unwrap();
    a.send(2, &[bad], SendFlags::empty()).unwrap();
    assert_eq!(a.core.query().state, QpState::Sqe);
    a.send(3, &[good], SIGNALED).unwrap();
    assert_eq!(a.taken().len(), 1, "what was posted before goes out");
    assert_eq!(a.polled(), [(1, WcStatus::Success), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)]);
    a.modify(QpState::Rts).unwrap();
    a.send(4, &[good], SIGNALED).unwrap();
    assert_eq!(a.taken().len(), 1);
    assert_eq!(a.polled(), [(4, WcStatus::Success)]);
    // Longer than the largest message.
    let long = [a.sge(0, 4096), a.sge(0, 1)];
    a.send(5, &long, SIGNALED).unwrap();
    assert_eq!(a.polled(), [(5, WcStatus::LocLenErr)]);
}

#[test]
fn a_full_queue_refuses_also_where_nobody_asks_for_completions() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    for _ in 0..4 {
        a.send(1, &list, SendFlags::empty()).unwrap();
    }
    assert_eq!(a.send(1, &list, SendFlags::empty()), Err(VerbsError::QueueFull));
    assert_eq!(a.taken().len(), 4);
    a.send(1, &list, SIGNALED).unwrap();
    for _ in 0..3 {
        a.send(1, &list, SIGNALED).unwrap();
    }
    a.taken();
    assert_eq!(a.send(1, &list, SIGNALED), Err(VerbsError::QueueFull), "nothing was polled");
    assert_eq!(a.polled().len(), 4);
    a.send(1, &list, SIGNALED).unwrap();
}

#[test]
fn what_the_lower_layer_refuses_is_lost_and_what_is_too_long_fails() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    a.send(1, &list, SIGNALED).unwrap();
    a.send(2, &list, SIGNALED).unwrap();
    a.core.refused(false);
    assert_eq!(a.polled(), [(1, WcStatus::Success)]);
    assert_eq!(a.core.drops().unsent, 1);
    a.core.refused(true);
    assert_eq!((a.polled(), a.core.query().state), (vec![(2, WcStatus::LocLenErr)], QpState::Sqe));
}

#[test]
fn draining_sends_what_was_posted_before_and_keeps_the_rest() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    a.send(1, &list, SIGNALED).unwrap();
    let sqd = QpModify { state: Some(QpState::Sqd), sqd_async_notify: Some(true), ..QpModify::default() };
    a.core.modify(&sqd).unwrap();
    a.send(2, &list, SIGNALED).unwrap();
    assert_eq!(a.taken().len(), 1);
    assert_eq!(*a.events.0.lock().unwrap(), [EventKind::SqDrained]);
    a.modify(QpState::Rts).unwrap();
    assert_eq!(a.taken().len(), 1);
    assert_eq!(a.polled(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn an_error_flushes_and_a_reset_forgets() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    a.recv(7, 0, 100);
    a.send(1, &list, SendFlags::empty()).unwrap();
    a.modify(QpState::Err).unwrap();
    assert_eq!(a.polled(), [(1, WcStatus::WrFlushErr), (7, WcStatus::WrFlushErr)]);
    a.send(2, &list, SendFlags::empty()).unwrap();
    a.recv(8, 0, 100);
    assert_eq!(a.polled(), [(2, WcStatus::WrFlushErr), (8, WcStatus::WrFlushErr)]);
    assert_eq!(a.taken().len(), 0);
    a.recv(9, 0, 100);
    a.modify(QpState::Reset).unwrap();
    assert_eq!(a.polled(), []);
    assert!(matches!(a.send(3, &list, SIGNALED), Err(VerbsError::Invalid(_))));
    assert_eq!(a.core.query().qkey, 0);
}

#[test]
fn receives_of_a_shared_queue_are_taken_one_by_one() {
    let events = Arc::new(Events::default());
    let pd = Pd::new();
    let srq = Srq::new(SrqInit { pd: pd.clone(), max_wr: 4, max_sge: 2, cookie: 0, async_sink: events });
    let (mut a, mut b) = (End::new(), End::with(Some(srq.clone()), 16));
    let memory = vec![0u8; 256];
    let addr = memory.as_ptr().expose_provenance() as u64;
    let mr = Mr::register(&pd, addr, 256, addr, Access::LOCAL_WRITE).unwrap();
    let sges = [Sge { addr, length: 128, lkey: mr.stag() }];
    let list = [a.sge(0, 8)];
    a.send(1, &list, SIGNALED).unwrap();
    let datagram = a.taken().remove(0);
    assert_eq!(b.arrives(&datagram), Err(Dropped::NoReceive));
    srq.post_recv(std::iter::once(RecvWr { wr_id: 6, sges: &sges })).1.wake();
    b.arrives(&datagram).unwrap();
    assert_eq!(b.polled(), [(6, WcStatus::Success)]);
    b.modify(QpState::Err).unwrap();
    assert_eq!(*b.events.0.lock().unwrap(), [EventKind::QpLastWqeReached]);
    drop(memory);
}

/// It stayed with the queue pair that could not use it.
#[test]
fn a_datagram_too_long_for_a_shared_receive_leaves_it_to_other_queue_pairs() {
    let (events, pd) = (Arc::new(Events::default()), Pd::new());
    let srq = Srq::new(SrqInit { pd: pd.clone(), max_wr: 4, max_sge: 2, cookie: 0, async_sink: events });
    let (mut a, mut b) = (End::new(), End::with(Some(srq.clone()), 16));
    let mut c = End::with(Some(srq.clone()), 16);
    let memory = vec![0u8; 256];
    let addr = memory.as_ptr().expose_provenance() as u64;
    let mr = Mr::register(&pd, addr, 256, addr, Access::LOCAL_WRITE).unwrap();
    let sges = [Sge { addr, length: 48, lkey: mr.stag() }];
    srq.post_recv(std::iter::once(RecvWr { wr_id: 6, sges: &sges })).1.wake();
    let mut datagram = |length| {
        let list = [a.sge(0, length)];
        a.send(1, &list, SIGNALED).unwrap();
        a.taken().remove(0)
    };
    assert_eq!(b.arrives(&datagram(9)), Err(Dropped::TooLong));
    c.arrives(&datagram(8)).unwrap();
    assert_eq!((b.polled(), c.polled()), (vec![], vec![(6, WcStatus::Success)]));
    assert_eq!(b.arrives(&datagram(9)), Err(Dropped::NoReceive));
    drop(memory);
}

#[test]
fn a_lost_completion_fails_the_queue_pair() {
    let mut a = End::with(None, 1);
    let list = [a.sge(0, 8)];
    a.send(1, &list, SIGNALED).unwrap();
    a.send(2, &list, SIGNALED).unwrap();
    a.taken();
    assert_eq!(a.core.query().state, QpState::Err);
    assert_eq!(*a.events.0.lock().unwrap(), [EventKind::CqErr, EventKind::QpFatal]);
}

#[test]
fn a_q_key_with_the_top_bit_set_stands_for_the_queue_pairs_own() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    let wr = SendWr { wr_id: 1, op: SendOp::Send { invalidate: None }, flags: SIGNALED, sges: &list };
    let ah = a.ah();
    a.core
        .post_send(&UdSendWr { wr, ah: &ah, remote_qpn: QPN, remote_qkey: 1 << 31 | 5, job_key: None })
        .unwrap();
    assert_eq!(datagram::parse(&a.taken()[0]).unwrap().head.qkey, QKEY);
    let read = SendOp::Read { stag: 0, to: 0, invalidate_local: false };
    let ud = UdSendWr {
        wr: SendWr { op: read, ..wr },
        ah: &ah,
        remote_qpn: QPN,
        remote_qkey: QKEY,
        job_key: None,
    };
    assert!(matches!(a.core.post_send(&ud), Err(VerbsError::Invalid(_))));
    // The handle decides the address, the number the port.
    assert_eq!(ah.endpoint(QPN).to, (Ipv4Addr::LOCALHOST, 0x1234).into());
}

/// Where [`End::send`] sends.
const PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// What the receiver of a datagram says when it has none posted.
fn complaint(datagram: &[u8]) -> ErrorMessage {
    datagram::answer(datagram, UntaggedBuffer::NoBuffer).unwrap()
}

#[test]
fn what_peers_say_of_dropped_messages_is_kept_where_the_program_asks_for_it() {
    let mut a = End::new();
    let list = [a.sge(0, 100)];
    a.send(6, &list, SendFlags::empty()).unwrap();
    let early = a.taken().remove(0);
    assert_eq!(a.core.handle_error(&complaint(&early), PEER), Ok(()));
    assert_eq!((a.core.take_error(), a.core.drops().by_peer), (None, 1), "counted only");
    a.core.keep_errors(true);
    a.send(7, &list, SendFlags::empty()).unwrap();
    a.send(8, &list, SendFlags::empty()).unwrap();
    let [first, second] = <[_; 2]>::try_from(a.taken()).unwrap();
    let (first, second) = (complaint(&first), complaint(&second));
    // One event for both: the program takes all that there are.
    a.core.handle_error(&second, PEER).unwrap();
    a.core.handle_error(&first, PEER).unwrap();
    assert_eq!(*a.events.0.lock().unwrap(), [EventKind::PeerError]);
    let error = TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer);
    let expected = |wr_id, msn| PeerError { wr_id, msn, remote_qpn: QPN, from: PEER, error };
    assert_eq!(a.core.take_error(), Some(expected(8, 3)));
    assert_eq!(a.core.take_error(), Some(expected(7, 2)));
    assert_eq!(a.core.take_error(), None);
    // A message from before the program asked, and one that was never sent.
    for msn in [1, 0, 4, u32::MAX] {
        a.core.handle_error(&ErrorMessage { msn, ..first }, PEER).unwrap();
    }
    assert_eq!((a.core.take_error(), a.core.drops().by_peer), (None, 7));
    assert_eq!(a.events.0.lock().unwrap().len(), 1);
    a.core.keep_errors(false);
    assert!(!a.core.keeps_errors());
    assert_eq!(a.core.query().state, QpState::Rts);
}

#[test]
fn an_error_message_of_another_life_is_not_believed() {
    let mut a = End::new();
    a.core.keep_errors(true);
    let list = [a.sge(0, 100)];
    a.send(7, &list, SendFlags::empty()).unwrap();
    let good = complaint(&a.taken().remove(0));
    let forged = ErrorMessage { incarnation: good.incarnation ^ 1, ..good };
    assert_eq!(a.core.handle_error(&forged, PEER), Err(None));
    assert_eq!(a.core.drops(), Drops::default());
    a.modify(QpState::Err).unwrap();
    assert_eq!(a.core.handle_error(&good, PEER), Err(Some(Dropped::State)));
    assert_eq!(a.core.drops(), Drops { state: 1, ..Drops::default() });
    assert_eq!((a.core.take_error(), a.events.0.lock().unwrap().len()), (None, 0));
}

#[test]
fn only_the_queue_pair_that_got_a_message_reports_it_and_once() {
    let mut a = End::new();
    a.core.keep_errors(true);
    let list = [a.sge(0, 100)];
    a.send(7, &list, SendFlags::empty()).unwrap();
    let good = complaint(&a.taken().remove(0));
    let elsewhere = Ipv4Addr::new(127, 0, 0, 2).into();
    assert_eq!(a.core.handle_error(&good, elsewhere), Err(None));
    let other = ErrorMessage { source_qpn: QPN ^ 1, ..good };
    assert_eq!(a.core.handle_error(&other, PEER), Err(None));
    assert_eq!((a.core.take_error(), a.core.drops().by_peer), (None, 0));
    for _ in 0..3 {
        a.core.handle_error(&good, PEER).unwrap();
        assert_eq!(a.core.drops().by_peer, 1);
    }
    assert_eq!((a.core.take_error().map(|error| error.wr_id), a.core.take_error()), (Some(7), None));
    // Also after the program took it.
    a.core.handle_error(&good, PEER).unwrap();
    assert_eq!((a.core.take_error(), a.core.drops().by_peer), (None, 1));
    assert_eq!(*a.events.0.lock().unwrap(), [EventKind::PeerError]);
}

#[test]
fn a_reset_forgets_errors_and_the_messages_they_could_be_about() {
    let mut a = End::new();
    a.core.keep_errors(true);
    let list = [a.sge(0, 100)];
    a.send(7, &list, SendFlags::empty()).unwrap();
    a.send(8, &list, SendFlags::empty()).unwrap();
    let [first, second] = <[_; 2]>::try_from(a.taken()).unwrap();
    a.core.handle_error(&complaint(&first), PEER).unwrap();
    for state in [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts] {
        a.core.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
    }
    assert!(a.core.keeps_errors());
    a.core.handle_error(&complaint(&second), PEER).unwrap();
    assert_eq!((a.core.take_error(), a.core.drops().by_peer), (None, 2));
}

#[test]
fn a_flood_of_error_messages_is_counted_and_does_not_grow_the_queue() {
    let mut a = End::new();
    a.core.keep_errors(true);
    let list = [a.sge(0, 100)];
    let mut complaints = Vec::new();
    for wr_id in 0..2000 {
        a.send(wr_id, &list, SendFlags::empty()).unwrap();
        complaints.push(complaint(&a.taken().remove(0)));
    }
    for message in &complaints {
        a.core.handle_error(message, PEER).unwrap();
    }
    assert_eq!(a.core.drops().by_peer, 2000);
    let kept: Vec<_> = std::iter::from_fn(|| a.core.take_error()).map(|error| error.wr_id).collect();
    // Those about messages that are long gone are counted only.
    let first = 2000 - errors::REMEMBERED as u64;
    assert!(kept.into_iter().eq(first..first + errors::WAITING as u64));
    assert_eq!(a.events.0.lock().unwrap().len(), 1);
    a.core.handle_error(&complaints[1999], PEER).unwrap();
    assert_eq!(a.events.0.lock().unwrap().len(), 2, "the queue was empty");
}

#[test]
fn a_program_can_ask_for_longer_messages() {
    let (mut a, mut b) = (End::new(), End::new());
    for refused in [0, MAX_PAYLOAD - 1, MOST_PAYLOAD + 1, u32::MAX] {
        assert!(matches!(a.core.set_max_message(refused), Err(VerbsError::Invalid(_))), "{refused}");
    }
    assert_eq!(a.core.max_message(), 4096);
    a.core.set_max_message(10_000).unwrap();
    let list = [a.sge(0, 4096), a.sge(4096, 5904)];
    a.memory[..10_000].fill(7);
    a.send(1, &list, SIGNALED).unwrap();
    let sent = a.taken().remove(0);
    assert_eq!(a.polled(), [(1, WcStatus::Success)]);
    // The receiver need not ask: its receive has room, or has not.
    b.recv(5, 0, 10_039);
    assert_eq!(b.arrives(&sent), Err(Dropped::TooLong));
    b.modify(QpState::Reset).unwrap();
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        b.core.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
    }
    b.recv(6, 0, 10_040);
    b.arrives(&sent).unwrap();
    assert_eq!(b.polled(), [(6, WcStatus::Success)]);
    assert!(b.memory[40..10_040].iter().all(|byte| *byte == 7));
    let list = [a.sge(0, 10_001)];
    a.send(2, &list, SIGNALED).unwrap();
    assert_eq!(a.polled(), [(2, WcStatus::LocLenErr)]);
}

/// It was refused at the post. Adapters find out when they process the request.
#[test]
fn c15_an_address_handle_of_another_domain_fails_in_the_completion() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    let wr = SendWr { wr_id: 1, op: SendOp::Send { invalidate: None }, flags: SIGNALED, sges: &list };
    let other = Ah::new(&Pd::new(), (Ipv4Addr::LOCALHOST, 0).into(), None);
    let ud = UdSendWr { wr, ah: &other, remote_qpn: QPN, remote_qkey: QKEY, job_key: None };
    a.core.post_send(&ud).unwrap();
    assert_eq!((a.taken().len(), a.polled()), (0, vec![(1, WcStatus::LocQpOpErr)]));
    assert_eq!(a.core.query().state, QpState::Sqe);
}

/// A sender whose queue was never empty kept everything that it had ever sent.
#[test]
fn b9_a_queue_that_is_never_empty_does_not_keep_what_was_sent() {
    let mut a = End::new();
    let list = [a.sge(0, 4096)];
    for n in 0..10_000_u64 {
        a.memory[..8].copy_from_slice(&n.to_ne_bytes());
        a.send(n, &list, SIGNALED).unwrap();
        if n < 3 {
            continue;
        }
        let first = a.core.outgoing().next().unwrap().1[datagram::HEAD_LEN..][..8].to_vec();
        assert_eq!(first, (n - 3).to_ne_bytes());
        a.core.sent(1);
        assert_eq!(a.polled(), [(n - 3, WcStatus::Success)]);
        assert!(a.core.staged.capacity() < 512 * 1024, "{} after {n}", a.core.staged.capacity());
    }
}
