mod memory;
mod receive;
mod send;
mod states;
mod together;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use uwarp_proto::rd::{MessageId, Placed, Target};
use uwarp_wire::ddp::{Header, QN_SEND, Untagged};
use uwarp_wire::rdmap::{Control, Opcode};

use super::*;
use crate::ah::Ah;
use crate::cq::Cq;
use crate::event::{AsyncEvent, AsyncSink, EventKind};
use crate::mr::{Access, Mr};
use crate::pd::Pd;
use crate::qp::QpCaps;
use crate::qp::datagrams::Arrival;
use crate::srq::{Srq, SrqInit};
use crate::wr::{SendOp, SendWr, Sge};

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
/// Where they come from.
const REMOTE: SocketAddr = SocketAddr::new(ARRIVAL.from, 0x1234);
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

const PLAIN: How =
    How { init: RdInit { ordered: false, grh: false, job_key: 0, max_records: 0 }, srq: None, cq_depth: 32 };

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
        let mut end = Self { core: RdCore::new(QPN, init, how.init).unwrap(), pd, cq, memory, mr, events };
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
        self.core.post_send(&UdSendWr { wr, ah: &ah, remote_qpn: QPN, remote_qkey: QKEY, job_key: None })
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
        remote: REMOTE,
        offset,
        message_len,
        first: (offset == 0).then_some(First { qkey: QKEY, immediate: None, job_key: None }),
        ddp: send_header(Opcode::Send),
        bytes: text.into(),
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
            remote: REMOTE,
            offset,
            message_len: len,
            first: (offset == 0).then_some(first),
            ddp,
            bytes: bytes[1..].into(),
        };
        match b.place(&segment) {
            Placed::Done => {}
            other => return other,
        }
    }
    Placed::Done
}

/// A shared receive queue with memory of its own.
struct Pool {
    srq: Arc<Srq>,
    events: Arc<Events>,
    memory: Vec<u8>,
    mr: Arc<Mr>,
}

impl Pool {
    fn new() -> Self {
        let (pd, events) = (Pd::new(), Arc::new(Events::default()));
        let init = SrqInit { pd: pd.clone(), max_wr: 4, max_sge: 2, cookie: 0, async_sink: events.clone() };
        let memory = vec![0xEE; 1024];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE).unwrap();
        Self { srq: Srq::new(init), events, memory, mr }
    }

    fn end(&self) -> End {
        End::with(How { srq: Some(self.srq.clone()), ..PLAIN })
    }

    fn recv(&self, wr_id: u64, at: usize, length: u32) -> Result<(), VerbsError> {
        let sges = [Sge { addr: self.mr.range().0 + at as u64, length, lkey: self.mr.stag() }];
        let (result, woken) = self.srq.post_recv(std::iter::once(RecvWr { wr_id, sges: &sges }));
        woken.wake();
        result.map_err(|(_, error)| error)
    }
}

/// Names of messages, as a machine gives them.
fn tickets<const N: usize>() -> [Ticket; N] {
    use uwarp_proto::clock::Now;
    use uwarp_proto::rd::{Config, Rd, Route};
    let now = Now::unread();
    let route = Route { local: ([10, 0, 0, 1], 1).into(), remote: ([10, 0, 0, 2], 1).into() };
    let mut end = End::new();
    end.send(1, &[], SIGNALED).unwrap();
    let message = end.next().message;
    let mut machine = Rd::new(&now, Config::default(), &[0; 32]);
    [(); N].map(|()| machine.post(&now, route, message).unwrap())
}

/// Numbers that look random (xorshift), for tests that try many orders.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end as u64).unwrap()
    }
}
