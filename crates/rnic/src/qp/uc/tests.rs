mod receive;
mod send;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use uwarp_wire::ddp::{Header, Tagged, Untagged};

use super::*;
use crate::cq::Cq;
use crate::event::{AsyncEvent, AsyncSink, EventKind};
use crate::mr::{Access, Mr};
use crate::pd::Pd;
use crate::qp::QpCaps;
use crate::qp::rd::RdSegment;
use crate::srq::{Srq, SrqInit};
use crate::wr::{Sge, WcOpcode};

#[derive(Default)]
struct Events(Mutex<Vec<EventKind>>);

impl AsyncSink for Events {
    fn async_event(&self, event: AsyncEvent) {
        self.0.lock().unwrap().push(event.kind);
    }
}

const QPN: u32 = 0x12_3456;
const PEER: u32 = 0x78_9A01;
/// What the peer has as `sq_psn`, and what it expects of us.
const RQ_PSN: u32 = 0x11_1111;
const SQ_PSN: u32 = 0x22_2222;
const CAPS: QpCaps =
    QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 64 };
const SIGNALED: SendFlags = SendFlags::SIGNALED;
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const REMOTE: SocketAddr = SocketAddr::new(HOST, 0x789A);
const SEND: SendOp = SendOp::Send { invalidate: None };

struct End {
    core: UcCore,
    cq: Arc<Cq>,
    memory: Vec<u8>,
    mr: Arc<Mr>,
    events: Arc<Events>,
}

impl End {
    fn new() -> Self {
        Self::with(None, 32)
    }

    fn with(srq: Option<Arc<Srq>>, cq_depth: u32) -> Self {
        let pd = Pd::new();
        let events = Arc::new(Events::default());
        let cq = Cq::new(cq_depth, 0, None, events.clone());
        let init = QpInit {
            pd: pd.clone(),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq,
            caps: CAPS,
            sq_sig_all: false,
            cookie: 0,
            async_sink: events.clone(),
        };
        let memory = vec![0xEE; 16 * 1024];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, rights).unwrap();
        let mut end = Self { core: UcCore::new(QPN, init), cq, memory, mr, events };
        end.start();
        end
    }

    /// From RESET to RTS.
    fn start(&mut self) {
        let init = QpModify {
            state: Some(QpState::Init),
            access: Some(Access::REMOTE_WRITE),
            ..QpModify::default()
        };
        self.core.modify(&init, None).unwrap();
        let rtr = QpModify {
            state: Some(QpState::Rtr),
            dest_qp_num: Some(PEER),
            rq_psn: Some(RQ_PSN),
            ..QpModify::default()
        };
        let host = Endpoint { to: SocketAddr::new(HOST, 0), from: None, marks: (0, 0) };
        self.core.modify(&rtr, Some(host)).unwrap();
        let rts = QpModify { state: Some(QpState::Rts), sq_psn: Some(SQ_PSN), ..QpModify::default() };
        self.core.modify(&rts, None).unwrap();
    }

    fn modify(&mut self, state: QpState) {
        self.core.modify(&QpModify { state: Some(state), ..QpModify::default() }, None).unwrap();
    }

    fn sge(&self, at: usize, length: u32) -> Sge {
        Sge { addr: self.mr.range().0 + at as u64, length, lkey: self.mr.stag() }
    }

    fn send(&mut self, wr_id: u64, op: SendOp, length: u32, flags: SendFlags) -> Result<(), VerbsError> {
        let sges = [self.sge(0, length)];
        self.core.post_send(&SendWr { wr_id, op, flags, sges: &sges })
    }

    fn recv(&mut self, wr_id: u64, at: usize, length: u32) {
        let sges = [self.sge(at, length)];
        self.core.post_recv(&RecvWr { wr_id, sges: &sges }).unwrap();
    }

    fn polled(&self) -> Vec<(u64, WcStatus)> {
        self.completions().into_iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    fn completions(&self) -> Vec<Wc> {
        let mut all = Vec::new();
        self.cq.poll(64, |wc| all.push(wc));
        all
    }

    fn text(&self, at: usize, len: usize) -> &[u8] {
        &self.memory[at..at + len]
    }
}

/// A message number of an exchange.
fn id(exchange: u64, number: u64) -> MessageId {
    MessageId { exchange, number }
}

fn send_header(opcode: Opcode) -> Header {
    let rsvdulp = Control::new(opcode).to_byte();
    Header::Untagged(Untagged { last: true, rsvdulp, rsvdulp32: 0, qn: QN_SEND, msn: 1, mo: 0 })
}

/// A segment of a Send of the peer.
fn segment(message: MessageId, offset: u32, text: &[u8], message_len: u32) -> RdSegment<'_> {
    RdSegment {
        message,
        source_qpn: PEER,
        remote: REMOTE,
        offset,
        message_len,
        first: (offset == 0).then_some(First { qkey: RQ_PSN, immediate: None, job_key: None }),
        ddp: send_header(Opcode::Send),
        bytes: text.into(),
    }
}

/// A segment of a Write of the peer, to this place in the memory of `to`.
fn write<'a>(
    to: &End,
    message: MessageId,
    at: usize,
    offset: u32,
    text: &'a [u8],
    len: u32,
) -> RdSegment<'a> {
    let (stag, to) = (to.mr.stag(), to.mr.range().0 + at as u64 + u64::from(offset));
    let rsvdulp = Control::new(Opcode::Write).to_byte();
    let ddp = Header::Tagged(Tagged { last: true, stag, to, rsvdulp });
    RdSegment { ddp, ..segment(message, offset, text, len) }
}

/// Segments with this immediate.
fn with_immediate(mut segment: RdSegment<'_>) -> RdSegment<'_> {
    segment.first.iter_mut().for_each(|first| first.immediate = Some(*b"imm!"));
    segment
}

/// A shared receive queue with memory of its own.
fn shared() -> (Arc<Srq>, Arc<Mr>, Vec<u8>) {
    let (pd, events) = (Pd::new(), Arc::new(Events::default()));
    let init = SrqInit { pd: pd.clone(), max_wr: 4, max_sge: 2, cookie: 0, async_sink: events };
    let memory = vec![0xEE; 1024];
    let addr = memory.as_ptr().expose_provenance() as u64;
    let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE).unwrap();
    (Srq::new(init), mr, memory)
}
