//! The message that arrives.

use std::ops::Range;

use smallvec::SmallVec;
use uwarp_mem as mem;
use uwarp_proto::rd::MessageId;
use uwarp_wire::ddp::{self, QN_SEND, Tagged, Untagged};
use uwarp_wire::rdmap::{Control, Opcode, RV, UWARP_SOLICITED};

use super::UcCore;
use crate::mr::{Access, Part};
use crate::qp::datagrams::copy_in;
use crate::qp::rd::RdSegment;
use crate::qp::shell::Shell;
use crate::qp::state::QpState;
use crate::wr::{Wc, WcFlags, WcOpcode, WcStatus};

/// Pieces that have overtaken others and are remembered. Only a path that mixes packets makes more; then the
/// message is lost.
const AHEAD_MOST: usize = 32;

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send {
        solicited: bool,
    },
    /// To this region, from here on.
    Write {
        stag: u32,
        to: u64,
        solicited: bool,
    },
}

/// A message of which some of the bytes have come.
#[derive(Debug)]
pub(super) struct Incomplete {
    message: MessageId,
    kind: Kind,
    len: u32,
    immediate: Option<[u8; 4]>,
    /// The receive at the front of the queue is its own.
    has_receive: bool,
    arrived: Arrived,
}

/// Which bytes have come: all up to one, and pieces behind it, ascending, that neither overlap nor touch.
#[derive(Debug, Default)]
struct Arrived {
    upto: u32,
    ahead: SmallVec<[Range<u32>; 2]>,
}

impl Arrived {
    /// These have come, too. Returns false if that cannot be remembered.
    fn add(&mut self, mut new: Range<u32>) -> bool {
        if new.start <= self.upto {
            self.upto = self.upto.max(new.end);
        } else {
            self.ahead.retain(|piece| {
                let touches = piece.start <= new.end && new.start <= piece.end;
                if touches {
                    new = new.start.min(piece.start)..new.end.max(piece.end);
                }
                !touches
            });
            let at = self.ahead.partition_point(|piece| piece.start < new.start);
            self.ahead.insert(at, new);
        }
        while self.ahead.first().is_some_and(|piece| piece.start <= self.upto) {
            self.upto = self.upto.max(self.ahead.remove(0).end);
        }
        self.ahead.len() <= AHEAD_MOST
    }
}

/// What whoever has sent a segment has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UcPlaced {
    /// Nothing that another one must hear of.
    Fine,
    /// It has named memory that it may not write.
    NoRight,
    /// It speaks from the peer's address and port, in an exchange of which no good message has come, and
    /// does not know the PSN.
    NoPsn,
}

/// Why a message is dropped.
enum Dropped {
    State,
    /// It is not of the peer.
    Stranger,
    /// It is of another life of the peer, or of who has its place.
    Psn,
    NoReceive,
    TooLong,
    /// It is neither Send nor Write, or names memory that it may not write.
    Refused,
    /// A part of it has not come, or comes too late.
    Incomplete,
}

impl UcCore {
    /// Takes a segment: places it, and completes the message if that is whole now; or drops the message. The
    /// sender is not told.
    pub fn place(&mut self, segment: &RdSegment<'_>) -> UcPlaced {
        let taken = self.take(segment);
        let placed = match taken {
            Err(Dropped::Refused) => UcPlaced::NoRight,
            Err(Dropped::Psn) if !self.knows(segment.message.exchange) => UcPlaced::NoPsn,
            _ => UcPlaced::Fine,
        };
        let drops = match taken {
            Ok(()) => None,
            Err(Dropped::State) => Some(&mut self.drops.state),
            Err(Dropped::Stranger | Dropped::Psn) => Some(&mut self.drops.qkey),
            Err(Dropped::NoReceive) => Some(&mut self.drops.no_receive),
            Err(Dropped::TooLong) => Some(&mut self.drops.too_long),
            Err(Dropped::Refused) => Some(&mut self.drops.access),
            Err(Dropped::Incomplete) => Some(&mut self.drops.incomplete),
        };
        if let Some(drops) = drops {
            *drops += 1;
        }
        self.check_overflow();
        placed
    }

    /// Whether the last good message of the peer has come with this exchange.
    pub fn knows(&self, exchange: u64) -> bool {
        self.known == Some(exchange)
    }

    /// Drops a segment that names memory, whatever it names.
    pub fn refuse(&mut self) {
        self.drops.access += 1;
    }

    /// Drops a segment, whatever its PSN.
    pub fn refuse_stranger(&mut self) {
        self.drops.qkey += 1;
    }

    fn take(&mut self, segment: &RdSegment<'_>) -> Result<(), Dropped> {
        let is_of = |known: &Incomplete| known.message == segment.message;
        if !self.shell.receives() {
            return Err(Dropped::State);
        }
        // The number names the sender's port, and the exchange shows that address and port are its own.
        let is_peer = self.peer.is_some_and(|peer| {
            (peer.to.ip(), peer.to.port()) == (segment.remote.ip(), segment.remote.port())
        });
        if !is_peer || segment.source_qpn != self.shell.attr.dest_qp_num {
            return Err(Dropped::Stranger);
        }
        if !self.incomplete.as_ref().is_some_and(is_of) {
            if self.last.is_some_and(|last| segment.message <= last) {
                // A copy, a part of a message that is dropped already, or one that a later one has overtaken.
                return Ok(());
            }
            self.last = Some(segment.message);
            if self.incomplete.take().is_some() {
                self.drops.incomplete += 1;
            }
            self.begin(segment)?;
        }
        let placed = self.place_bytes(segment);
        if placed.is_err() {
            self.incomplete = None;
        }
        placed
    }

    fn begin(&mut self, segment: &RdSegment<'_>) -> Result<(), Dropped> {
        let first = segment.first.ok_or(Dropped::Incomplete)?;
        if first.qkey != self.shell.attr.rq_psn {
            return Err(Dropped::Psn);
        }
        self.known = Some(segment.message.exchange);
        let kind = kind_of(segment).ok_or(Dropped::Refused)?;
        let len = segment.message_len;
        if let Kind::Write { stag, to, .. } = kind {
            if !self.shell.attr.access.contains(Access::REMOTE_WRITE) {
                return Err(Dropped::Refused);
            }
            // Of an empty message, STag and offset mean nothing (RFC 5041 section 5.2).
            let whole = Part { stag, to, len: len as usize };
            if len > 0 && self.remote.with(whole, self.shell.pd.id(), Access::REMOTE_WRITE, |_| ()).is_err() {
                return Err(Dropped::Refused);
            }
        }
        let has_receive = matches!(kind, Kind::Send { .. }) || first.immediate.is_some();
        if has_receive {
            self.find_receive(if matches!(kind, Kind::Send { .. }) { len } else { 0 })?;
        }
        self.incomplete = Some(Incomplete {
            message: segment.message,
            kind,
            len,
            immediate: first.immediate,
            has_receive,
            arrived: Arrived::default(),
        });
        Ok(())
    }

    /// Sees to it that a receive of this length is the first one of the queue.
    fn find_receive(&mut self, length: u32) -> Result<(), Dropped> {
        let rq = &mut self.shell.rq;
        // With a shared queue: one that a message before this one has not used is still here.
        if rq.len() == 0
            && let Some(srq) = &self.shell.srq
        {
            match srq.take_for_datagram(self.shell.qpn, length, rq) {
                Some(true) => {}
                Some(false) => return Err(Dropped::NoReceive),
                None => return Err(Dropped::TooLong),
            }
        }
        match rq.front() {
            None => Err(Dropped::NoReceive),
            Some(recv) if recv.total < length => Err(Dropped::TooLong),
            Some(_) => Ok(()),
        }
    }

    fn place_bytes(&mut self, segment: &RdSegment<'_>) -> Result<(), Dropped> {
        let Some(known) = &mut self.incomplete else { return Err(Dropped::Incomplete) };
        let count = u32::try_from(segment.bytes.len()).unwrap_or(u32::MAX);
        let end = segment.offset.checked_add(count).filter(|end| *end <= known.len);
        let (Some(end), true, true) =
            (end, known.len == segment.message_len, kind_of(segment) == Some(known.kind))
        else {
            return Err(Dropped::Refused);
        };
        match known.kind {
            Kind::Send { .. } => {
                let pd = self.shell.recv_pd();
                let Shell { local, rq, .. } = &mut self.shell;
                if !copy_in(local, pd, rq.front_sges(), segment.offset, segment.bytes.first()) {
                    self.fail_receive();
                    return Ok(());
                }
            }
            Kind::Write { stag, to, .. } if count > 0 => {
                let at = to.wrapping_add(u64::from(segment.offset));
                let (part, pd) = (Part { stag, to: at, len: segment.bytes.len() }, self.shell.pd.id());
                let copy = |place| mem::copy_in(place, segment.bytes.first());
                let copied = self.remote.with(part, pd, Access::REMOTE_WRITE, copy);
                if !matches!(copied, Ok(Ok(_))) {
                    return Err(Dropped::Refused);
                }
                self.shell.counters.received.write.bytes += u64::from(count);
            }
            Kind::Write { .. } => {}
        }
        if !known.arrived.add(segment.offset..end) {
            return Err(Dropped::Incomplete);
        }
        if known.arrived.upto == known.len {
            self.complete_message();
        }
        Ok(())
    }

    /// The memory of a receive must not be used: the program's own mistake.
    fn fail_receive(&mut self) {
        self.incomplete = None;
        let Some(recv) = self.shell.rq.pop() else { return };
        let wc = Wc::new(recv.wr_id, WcStatus::LocProtErr, WcOpcode::Recv, self.shell.qpn);
        self.shell.complete_recv(wc, false);
        self.enter(QpState::Err, false);
    }

    fn complete_message(&mut self) {
        let Some(whole) = self.incomplete.take() else { return };
        let received = &mut self.shell.counters.received;
        let (opcode, solicited) = match whole.kind {
            Kind::Send { solicited } => {
                received.send.count(whole.len);
                (WcOpcode::Recv, solicited)
            }
            Kind::Write { solicited, .. } => {
                received.write.messages += 1;
                (WcOpcode::RecvRdmaWithImm, solicited)
            }
        };
        if !whole.has_receive {
            return;
        }
        let Some(recv) = self.shell.rq.pop() else { return };
        let mut wc = Wc::new(recv.wr_id, WcStatus::Success, opcode, self.shell.qpn);
        wc.byte_len = whole.len;
        if let Some(imm) = whole.immediate {
            wc.flags |= WcFlags::WITH_IMM;
            wc.imm_or_inv = u32::from_ne_bytes(imm);
        }
        self.shell.complete_recv(wc, solicited);
    }
}

/// `None`: nothing that is taken here.
fn kind_of(segment: &RdSegment<'_>) -> Option<Kind> {
    match segment.ddp {
        ddp::Header::Tagged(Tagged { stag, to, rsvdulp, .. }) => match Control::parse(rsvdulp) {
            Control { version: RV, opcode: Opcode::Write } => {
                let to = to.wrapping_sub(u64::from(segment.offset));
                Some(Kind::Write { stag, to, solicited: rsvdulp & UWARP_SOLICITED != 0 })
            }
            _ => None,
        },
        ddp::Header::Untagged(Untagged { qn: QN_SEND, rsvdulp, .. }) => match Control::parse(rsvdulp) {
            Control { version: RV, opcode: Opcode::Send } => Some(Kind::Send { solicited: false }),
            Control { version: RV, opcode: Opcode::SendSe } => Some(Kind::Send { solicited: true }),
            _ => None,
        },
        ddp::Header::Untagged(_) => None,
    }
}
