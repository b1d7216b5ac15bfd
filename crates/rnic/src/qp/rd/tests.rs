use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};

use uwarp_proto::rd::{MessageId, Placed};
use uwarp_wire::ddp::{Header, Untagged};
use uwarp_wire::rd::chunk::Reason;

use super::*;
use crate::ah::Ah;
use crate::cq::Cq;
use crate::event::{AsyncEvent, AsyncSink, EventKind};
use crate::mr::{Access, Mr};
use crate::pd::Pd;
use crate::qp::QpCaps;
use crate::qp::datagrams::Arrival;
use crate::srq::Srq;
use crate::wr::{SendOp, SendWr, Sge, WcFlags};

#[derive(Default)]
struct Events(Mutex<Vec<EventKind>>);

impl AsyncSink for Events {
    fn async_event(&self, event: AsyncEvent) {
        self.0.lock().unwrap().push(event.kind);
    }
}

const QPN: u32 = 0x12_3456;
const QKEY: u32 = 0x1111_1111;
const CAPS: QpCaps =
    QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 64 };
const SIGNALED: SendFlags = SendFlags::SIGNALED;
const UNSIGNALED: SendFlags = SendFlags::empty();
/// How segments come.
const ARRIVAL: Arrival = Arrival {
    from: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
    to: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
    slid: 0,
};

struct How {
    init: RdInit,
    srq: Option<Arc<Srq>>,
    cq_depth: u32,
}

const PLAIN: How = How { init: RdInit { ordered: false, grh: false }, srq: None, cq_depth: 32 };

struct End {
    core: RdCore,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    memory: Vec<u8>,
    mr: Arc<Mr>,
    events: Arc<Events>,
}

impl End {
    fn new() -> Self {
        Self::with(PLAIN)
    }

    fn with(how: How) -> Self {
        let pd = Pd::new();
        let events = Arc::new(Events::default());
        let cq = Cq::new(how.cq_depth, 0, None, events.clone());
        let init = QpInit {
            pd: pd.clone(),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: how.srq,
            caps: CAPS,
            sq_sig_all: false,
            cookie: 0,
            async_sink: events.clone(),
        };
        let memory = vec![0xEE; 16 * 1024];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE).unwrap();
        let mut end = Self { core: RdCore::new(QPN, init, how.init), pd, cq, memory, mr, events };
        end.start();
        end
    }

    /// From RESET to RTS.
    fn start(&mut self) {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let change = QpModify {
                state: Some(state),
                qkey: Some(QKEY),
                min_rnr_timer: Some(12),
                rnr_retry: Some(5),
                ..QpModify::default()
            };
            self.core.modify(&change).unwrap();
        }
    }

    fn modify(&mut self, state: QpState) {
        self.core.modify(&QpModify { state: Some(state), ..QpModify::default() }).unwrap();
    }

    fn sge(&self, at: usize, length: u32) -> Sge {
        Sge { addr: self.mr.range().0 + at as u64, length, lkey: self.mr.stag() }
    }

    fn ah(&self) -> Arc<Ah> {
        Ah::new(&self.pd, (Ipv4Addr::LOCALHOST, 0).into(), None)
    }

    fn send(&mut self, wr_id: u64, sges: &[Sge], flags: SendFlags) -> Result<(), VerbsError> {
        self.send_op(wr_id, SendOp::Send { invalidate: None }, sges, flags)
    }

    fn send_op(&mut self, wr_id: u64, op: SendOp, sges: &[Sge], flags: SendFlags) -> Result<(), VerbsError> {
        let (wr, ah) = (SendWr { wr_id, op, flags, sges }, self.ah());
        self.core.post_send(&UdSendWr { wr, ah: &ah, remote_qpn: QPN, remote_qkey: QKEY })
    }

    fn recv(&mut self, wr_id: u64, at: usize, length: u32) {
        let sges = [self.sge(at, length)];
        self.core.post_recv(&RecvWr { wr_id, sges: &sges }).unwrap();
    }

    /// The next message for the exchange.
    fn next(&mut self) -> RdMessage {
        self.core.next_message().unwrap()
    }

    fn polled(&self) -> Vec<(u64, WcStatus)> {
        let mut all = Vec::new();
        self.cq.poll(64, |wc| all.push((wc.wr_id, wc.status)));
        all
    }

    fn events(&self) -> Vec<EventKind> {
        std::mem::take(&mut *self.events.0.lock().unwrap())
    }
}

/// A message number of an exchange.
fn id(exchange: u64, number: u64) -> MessageId {
    MessageId { exchange, number }
}

/// A segment of a message, whose bytes are `text` at its offset.
fn segment<'a>(message: MessageId, offset: u32, text: &'a [u8], message_len: u32) -> RdSegment<'a> {
    RdSegment {
        message,
        source_qpn: 0x99,
        offset,
        message_len,
        first: (offset == 0).then_some(First { qkey: QKEY, immediate: None, job_key: None }),
        ddp: send_header(Opcode::Send),
        bytes: text,
    }
}

fn send_header(opcode: Opcode) -> Header {
    let rsvdulp = Control::new(opcode).to_byte();
    Header::Untagged(Untagged { last: true, rsvdulp, rsvdulp32: 0, qn: QN_SEND, msn: 1, mo: 0 })
}

impl End {
    fn place(&mut self, segment: &RdSegment<'_>) -> Placed {
        self.core.place(segment, &ARRIVAL)
    }

    /// A whole message.
    fn arrives(&mut self, message: MessageId, text: &[u8]) -> Placed {
        let len = u32::try_from(text.len()).unwrap();
        self.place(&segment(message, 0, text, len))
    }
}

/// Moves a message in segments of `step` bytes, the last one first.
fn carry(a: &mut End, b: &mut End, sent: &RdMessage, message: MessageId, step: u32) -> Placed {
    let Outgoing { pair, first, target, len, .. } = sent.message;
    let Target::Untagged { qn, rsvdulp, rsvdulp32 } = target else { panic!("{target:?}") };
    let ddp = Header::Untagged(Untagged { last: true, rsvdulp, rsvdulp32, qn, msn: 1, mo: 0 });
    let offsets: Vec<u32> = (0..len.max(1)).step_by(step as usize).collect();
    for offset in offsets.into_iter().rev() {
        let mut bytes = vec![7];
        assert!(a.core.fill(sent.request, offset, step.min(len - offset), &mut bytes));
        let segment = RdSegment {
            message,
            source_qpn: pair.source,
            offset,
            message_len: len,
            first: (offset == 0).then_some(first),
            ddp,
            bytes: &bytes[1..],
        };
        match b.place(&segment) {
            Placed::Done => {}
            other => return other,
        }
    }
    Placed::Done
}

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
