//! A queue pair of a program.

use std::collections::BTreeMap;
use std::sync::Arc;

use uwarp_cm::event::ConnParam;
use uwarp_cm::machine::ConnKey;
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::qp::{QpCaps, StreamParams, rnr_limit};
use uwarp_rnic::{Access, Mr, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus};

use super::super::node::Key;
use crate::end::{End, EndConfig};
use crate::hosts::network::TcpId;
use crate::hosts::streams::Streams;
use crate::{Arena, Time};

/// Bytes of a message, and messages that a program sends when it is told that a connection is there.
const MESSAGE: usize = 8;
const MESSAGES: usize = 2;

/// A queue pair and its memory.
pub(crate) struct QueuePair {
    pub streams: Streams,
    pub qpn: u32,
    /// How many streams it has had.
    pub count: u32,
    /// Nothing is received or sent until then.
    pub busy: Time,
    /// Whose stream began on which connection.
    pub hooks: BTreeMap<(TcpId, usize), (Key, ConnKey)>,
    memory: Arena,
    region: Arc<Mr>,
    pub sent: usize,
}

impl QueuePair {
    /// One in RESET.
    pub fn new(qpn: u32) -> Self {
        let caps =
            QpCaps { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let end =
            End::new(EndConfig { caps, qpn, sq_sig_all: true, cq_depth: Some(64), ..EndConfig::default() });
        let memory = Arena::new(MESSAGE * 2 * MESSAGES);
        let region = memory.register(&end.pd, 0, memory.len(), Access::LOCAL_WRITE);
        let streams = Streams::new(end);
        Self { streams, qpn, count: 0, busy: 0, hooks: BTreeMap::new(), memory, region, sent: 0 }
    }

    /// From RESET to INIT, with receives.
    pub fn init(&mut self) {
        self.streams.end.init();
        self.sent = 0;
        for n in 0..MESSAGES {
            let sge = self.sge(n);
            let wr = RecvWr { wr_id: n as u64, sges: &[sge] };
            self.streams.end.core.post_recv(&wr).expect("the queue is empty");
        }
    }

    fn sge(&self, n: usize) -> Sge {
        Sge { addr: self.memory.addr(n * MESSAGE), length: MESSAGE as u32, lkey: self.region.stag() }
    }

    pub fn send(&mut self, id: TcpId, side: usize) {
        for n in MESSAGES..2 * MESSAGES {
            let sge = self.sge(n);
            let mut message = id.to_be_bytes().to_vec();
            message.extend((side as u32).to_be_bytes());
            self.memory.write(n * MESSAGE, &message);
            let op = SendOp::Send { invalidate: None };
            let wr = SendWr { wr_id: n as u64, op, flags: SendFlags::SIGNALED, sges: &[sge] };
            // Refused if the stream has ended meanwhile.
            if self.streams.end.core.post_send(&wr).is_ok() {
                self.sent += 1;
            }
        }
    }

    /// Polls the messages that have come.
    pub fn receive(&mut self) -> usize {
        let mut count = 0;
        for wc in self.streams.end.recvs() {
            if wc.status != WcStatus::Success {
                continue;
            }
            count += 1;
            let message = self.memory.read(usize::try_from(wc.wr_id).expect("small") * MESSAGE, MESSAGE);
            let number = |n: usize| u32::from_be_bytes([0, 1, 2, 3].map(|at| message[4 * n + at]));
            let from = (number(0), 1 - number(1) as usize);
            assert!(self.hooks.is_empty() || self.hooks.contains_key(&from), "a message of {from:?}");
        }
        count
    }
}

/// As the shell's.
pub(crate) fn stream_params(
    said: &Negotiated,
    param: ConnParam,
    min_rnr_timer: u8,
    infiniband: bool,
) -> StreamParams {
    let peer_wants = said.peer.is_some_and(|peer| peer.placement_acks);
    StreamParams {
        initiator: said.initiator,
        framing: said.framing(),
        ird: said.ird,
        ord: said.ord,
        peer_is_uwarp: said.peer_is_uwarp,
        peer: said.peer,
        timeout: 18,
        retry_cnt: param.retry_count.min(7),
        rtr: said.rtr,
        rtr_stag_to: said.rtr_stag_to,
        wait_first_frame: !said.initiator,
        rnr_timeout: rnr_limit(param.rnr_retry_count, min_rnr_timer),
        placement_acks: said.peer_is_uwarp && (peer_wants || infiniband),
        infiniband,
        ..StreamParams::default()
    }
}
