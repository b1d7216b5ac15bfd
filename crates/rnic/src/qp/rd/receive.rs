//! The receives of messages that arrive. The first segment to come of a Send binds a receive to its message.
//! It stays bound until the message is delivered, or is given up.

use std::net::SocketAddr;

use rustc_hash::FxHashMap;
use uwarp_proto::rd::{MessageId, Placed, Ticket};
use uwarp_wire::ddp::{self, QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, QN_TERMINATE, Tagged, Untagged};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::segment::First;
use uwarp_wire::rdmap::{AtomicResponse, Control, Opcode, RV, UWARP_SOLICITED};

use super::asked::Answer;
use super::{RdBytes, RdCore};
use crate::mr::MrCache;
use crate::qp::datagrams::{Arrival, GRH_LEN, copy_in, service_level, write_grh};
use crate::qp::shell::Shell;
use crate::queues::TakenRecv;
use crate::srq::Woken;
use crate::wr::{Sge, Wc, WcFlags, WcOpcode, WcStatus};

/// A segment of a message that arrives.
#[derive(Debug, Clone, Copy)]
pub struct RdSegment<'a> {
    /// Its message.
    pub message: MessageId,
    /// The sender's queue pair, and its port.
    pub source_qpn: u32,
    /// The sender's address and port.
    pub remote: SocketAddr,
    /// Where the payload begins in the message.
    pub offset: u32,
    /// Bytes of the whole message.
    pub message_len: u32,
    /// The Q_Key, the immediate and the job key: of a Send in its first segment, of all others in each.
    pub first: Option<First>,
    /// Its DDP header.
    pub ddp: ddp::Header,
    /// The payload.
    pub bytes: RdBytes<'a>,
}

/// The receive of a message that is not complete.
struct Bound {
    recv: TakenRecv,
    /// Counts the receives that were bound.
    number: u64,
    message_len: u32,
    source_qpn: u32,
    solicited: bool,
    /// Its bytes are in memory that the sender has named.
    is_write: bool,
    immediate: Option<[u8; 4]>,
    arrival: Arrival,
}

#[derive(Default)]
pub(super) struct Receives {
    // TODO(docs/rd.md section 8): no bound on what one peer binds. It must not count whole messages that wait
    // for their turn, and only the machine knows which are whole.
    bound: FxHashMap<MessageId, Bound>,
    taken: u64,
    /// Messages that have lost their receive although the machine counts on it, and why. Each ends with its
    /// delivery or its taking back.
    lost: FxHashMap<MessageId, Reason>,
    /// A message has found no receive.
    wanted: bool,
    /// A receive has come since.
    ready: bool,
}

impl Receives {
    /// Whether no message is remembered.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.bound.is_empty() && self.lost.is_empty()
    }

    /// Whether a message has a receive.
    pub fn has(&self, message: MessageId) -> bool {
        self.bound.contains_key(&message)
    }

    /// There is one more receive.
    pub fn added(&mut self) {
        self.ready |= self.wanted;
    }

    /// A message has found none.
    pub fn want(&mut self) {
        self.wanted = true;
    }

    /// A message has lost what it had, although the machine counts on it.
    pub fn lose(&mut self, message: MessageId, reason: Reason) {
        self.lost.insert(message, reason);
    }

    pub fn forget_wanted(&mut self) {
        (self.wanted, self.ready) = (false, false);
    }

    /// Takes all bound receives from their messages, the first bound first.
    pub fn lose_all(&mut self) -> Vec<TakenRecv> {
        let mut all: Vec<_> = self.bound.drain().collect();
        all.sort_unstable_by_key(|(_, bound)| bound.number);
        self.lost.extend(all.iter().map(|(message, _)| (*message, Reason::Aborted)));
        all.into_iter().map(|(_, bound)| bound.recv).collect()
    }
}

impl RdCore {
    /// Places a segment. The first one of a message that is answered with [`Placed::Done`] binds a receive to
    /// it, and the owner ends that with [`Self::deliver`] or [`Self::take_back`], also if later segments are
    /// refused, and if the queue pair has left its state meanwhile.
    pub fn place(&mut self, segment: &RdSegment<'_>, arrival: &Arrival) -> Placed {
        let placed = self.place_checked(segment, arrival);
        self.check_overflow();
        placed.err().unwrap_or(Placed::Done)
    }

    /// Queue pairs of a shared receive queue that the owner must notify. To be asked after each
    /// [`Self::place`].
    pub fn take_woken(&mut self) -> Woken {
        std::mem::take(&mut self.woken)
    }

    fn place_checked(&mut self, segment: &RdSegment<'_>, arrival: &Arrival) -> Result<(), Placed> {
        let refuse = |reason| Err(Placed::Refused(reason));
        if !self.receives.lost.is_empty()
            && let Some(reason) = self.receives.lost.get(&segment.message)
        {
            return refuse(*reason);
        }
        let end = u64::from(segment.offset) + segment.bytes.len() as u64;
        let is_inside = end <= u64::from(segment.message_len);
        let arrives = arrives(segment);
        if let Some(Arrives::Answer(id, answer)) = &arrives {
            return if is_inside { self.place_answer(segment, *id, answer) } else { refuse(INVALID) };
        }
        if !self.shell.receives() {
            self.drops.state += 1;
            return refuse(Reason::InvalidDestination);
        }
        if segment.first.is_some_and(|first| first.qkey != self.shell.attr.qkey) {
            self.drops.qkey += 1;
            return refuse(Reason::InvalidDestination);
        }
        let is_send = matches!(arrives, Some(Arrives::Send { .. }));
        // Without this, a message without a first segment would be one without a Q_Key.
        let has_key = segment.first.is_some() || is_send && segment.offset > 0;
        if !has_key || !is_inside {
            return refuse(INVALID);
        }
        match arrives {
            Some(Arrives::Send { solicited }) => self.place_send(segment, solicited, arrival),
            Some(Arrives::Write(ddp, takes)) => self.place_write(segment, &ddp, takes, arrival),
            Some(Arrives::ReadRequest) => self.place_read_request(segment, arrival),
            Some(Arrives::AtomicRequest) => self.place_atomic_request(segment, arrival),
            Some(Arrives::Answer(..)) | None => refuse(INVALID),
        }
    }

    fn place_send(
        &mut self,
        segment: &RdSegment<'_>,
        solicited: bool,
        arrival: &Arrival,
    ) -> Result<(), Placed> {
        let refuse = |reason| Err(Placed::Refused(reason));
        let is_new = !self.receives.bound.contains_key(&segment.message);
        if is_new {
            let area = if self.how.grh { GRH_LEN } else { 0 };
            self.bind(segment, segment.message_len.saturating_add(area), solicited, arrival)?;
        }
        let Some(bound) = self.receives.bound.get_mut(&segment.message) else { return Ok(()) };
        if bound.message_len != segment.message_len {
            return refuse(Reason::InvalidRequest);
        }
        if let Some(first) = segment.first {
            bound.immediate = first.immediate;
        }
        let pd = self.shell.recv_pd();
        let Shell { local, .. } = &mut self.shell;
        let (area, sges) = (if self.how.grh { GRH_LEN } else { 0 }, bound.recv.sges.iter());
        let payload = bound.message_len as usize;
        let good = (!is_new || area == 0 || write_grh(local, pd, sges.clone(), arrival, payload))
            && copy_pieces(local, pd, sges, area + segment.offset, segment.bytes);
        if good {
            return Ok(());
        }
        // The program's own mistake.
        let Some(bound) = self.receives.bound.remove(&segment.message) else { return Ok(()) };
        let wc = Wc::new(bound.recv.wr_id, WcStatus::LocProtErr, WcOpcode::Recv, self.shell.qpn);
        self.shell.complete_recv(wc, false);
        if !is_new {
            self.receives.lost.insert(segment.message, Reason::Operation);
        }
        refuse(Reason::Operation)
    }

    /// Takes the next receive for an RDMA Write with an immediate. None of its bytes goes there.
    pub(super) fn bind_write(&mut self, segment: &RdSegment<'_>, arrival: &Arrival) -> Result<(), Placed> {
        self.bind(segment, 0, is_solicited(segment), arrival)?;
        if let Some(bound) = self.receives.bound.get_mut(&segment.message) {
            bound.is_write = true;
            bound.immediate = segment.first.and_then(|first| first.immediate);
        }
        Ok(())
    }

    /// Takes the next receive, of at least this length, for the message of this segment.
    fn bind(
        &mut self,
        segment: &RdSegment<'_>,
        length: u32,
        solicited: bool,
        arrival: &Arrival,
    ) -> Result<(), Placed> {
        let RdSegment { message_len, source_qpn, .. } = *segment;
        let rq = &mut self.shell.rq;
        let taken = match &self.shell.srq {
            Some(srq) => srq.take_for_message(self.shell.qpn, length),
            None if rq.front().is_some_and(|recv| recv.total < length) => None,
            None => Some(rq.take_front()),
        };
        let Some(taken) = taken else {
            self.drops.too_long += 1;
            return Err(Placed::Refused(Reason::InvalidRequest));
        };
        let Some(recv) = taken else {
            self.drops.no_receive += 1;
            self.receives.wanted = true;
            // (Its upper bits are not the program's.)
            return Err(Placed::NoReceive(self.shell.attr.min_rnr_timer & 0x1f));
        };
        let number = self.receives.taken;
        self.receives.taken += 1;
        let (immediate, arrival, is_write) = (None, *arrival, false);
        let bound = Bound { recv, number, message_len, source_qpn, solicited, is_write, immediate, arrival };
        self.receives.bound.insert(segment.message, bound);
        Ok(())
    }

    /// A message is complete, and it is its turn: completes its receive or its record, if it has one, or the
    /// request that it answers. `Some`: the machine's name for that request.
    pub fn deliver(&mut self, message: MessageId) -> Option<Ticket> {
        let Some(bound) = self.receives.bound.remove(&message) else {
            return match self.receives.lost.remove(&message) {
                Some(_) => None,
                None if self.deliver_record(message) => None,
                None => self.answer_is_whole(message),
            };
        };
        let opcode = if bound.is_write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        if !bound.is_write {
            self.shell.counters.received.send.count(bound.message_len);
        }
        let mut wc = Wc::new(bound.recv.wr_id, WcStatus::Success, opcode, self.shell.qpn);
        wc.byte_len = bound.message_len;
        if self.how.grh && !bound.is_write {
            wc.byte_len = bound.message_len.saturating_add(GRH_LEN);
            wc.flags = WcFlags::GRH;
        }
        wc.src_qp = bound.source_qpn;
        wc.slid = bound.arrival.slid;
        wc.sl = service_level(&bound.arrival);
        if let Some(imm) = bound.immediate {
            wc.flags |= WcFlags::WITH_IMM;
            wc.imm_or_inv = u32::from_ne_bytes(imm);
        }
        self.shell.complete_recv(wc, bound.solicited);
        self.check_overflow();
        None
    }

    /// A message is given up, or begins again: its receive is the next one of its queue again. Does nothing
    /// if it has none. Of several, the last one comes first, so that the order of the receives stays.
    ///
    /// A shared receive queue may give it to a queue pair that waits there, and the owner must notify that
    /// one.
    pub fn take_back(&mut self, message: MessageId) -> Woken {
        let Some(bound) = self.receives.bound.remove(&message) else {
            self.receives.lost.remove(&message);
            self.take_back_record(message);
            return Woken::default();
        };
        match &self.shell.srq {
            Some(srq) => srq.put_back(bound.recv),
            None => {
                self.shell.rq.put_back(bound.recv);
                self.receives.added();
                Woken::default()
            }
        }
    }

    /// Whether a receive has come since a message found none. Says so once.
    // TODO: not of a shared receive queue, where whoever is refused comes again when the timer is over. Its
    // queue pairs would have to hear of each post.
    pub fn take_ready(&mut self) -> bool {
        let ready = self.receives.ready;
        if ready {
            self.receives.forget_wanted();
        }
        ready
    }
}

/// Copies all pieces into gather elements, from `offset` on.
pub(super) fn copy_pieces<'a>(
    local: &mut MrCache,
    pd: u32,
    sges: impl Iterator<Item = &'a Sge> + Clone,
    offset: u32,
    bytes: RdBytes<'_>,
) -> bool {
    bytes.iter().all(|(at, piece)| copy_in(local, pd, sges.clone(), offset + at as u32, piece))
}

const INVALID: Reason = Reason::InvalidRequest;

/// What an RDMA Write takes, if it has an immediate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Takes {
    Receive,
    Record,
}

/// What a message is.
enum Arrives {
    Send {
        solicited: bool,
    },
    Write(Tagged, Takes),
    ReadRequest,
    AtomicRequest,
    /// To this request of ours.
    Answer(u32, Answer),
}

/// Whether the completion of an RDMA Write with an immediate is to be a solicited one.
pub(super) fn is_solicited(segment: &RdSegment<'_>) -> bool {
    matches!(segment.ddp, ddp::Header::Tagged(ddp) if ddp.rsvdulp & UWARP_SOLICITED != 0)
}

/// `None`: nothing that is taken here.
fn arrives(segment: &RdSegment<'_>) -> Option<Arrives> {
    let opcode = |rsvdulp| match Control::parse(rsvdulp) {
        Control { version: RV, opcode } => Some(opcode),
        _ => None,
    };
    match segment.ddp {
        ddp::Header::Tagged(ddp) => match opcode(ddp.rsvdulp)? {
            Opcode::Write => Some(Arrives::Write(ddp, Takes::Receive)),
            Opcode::WriteRecord => Some(Arrives::Write(ddp, Takes::Record)),
            Opcode::ReadResponse => Some(Arrives::Answer(ddp.stag, Answer::Memory)),
            _ => None,
        },
        ddp::Header::Untagged(Untagged { qn, rsvdulp, .. }) => match (qn, opcode(rsvdulp)?) {
            (QN_SEND, Opcode::Send) => Some(Arrives::Send { solicited: false }),
            (QN_SEND, Opcode::SendSe) => Some(Arrives::Send { solicited: true }),
            (QN_READ_REQUEST, Opcode::ReadRequest) => Some(Arrives::ReadRequest),
            (QN_READ_REQUEST, Opcode::AtomicRequest) => Some(Arrives::AtomicRequest),
            (QN_ATOMIC_RESPONSE, Opcode::AtomicResponse) => {
                let response = AtomicResponse::parse(segment.bytes.first()).ok()?;
                Some(Arrives::Answer(response.request_id, Answer::Value(response)))
            }
            (QN_TERMINATE, Opcode::Terminate) => {
                let bytes = segment.bytes.first();
                let (id, reason) = (bytes.first_chunk::<4>()?, bytes.get(4)?);
                Some(Arrives::Answer(u32::from_be_bytes(*id), Answer::Failure(Reason::from_code(*reason))))
            }
            _ => None,
        },
    }
}
