//! Requests whose answers are awaited: RDMA Reads and atomic operations. An answer is a message of its own
//! (docs/rd.md section 5.4). It names its request, and counts only if the queue pair that was asked has sent
//! it.

use std::net::SocketAddr;

use rustc_hash::FxHashMap;
use uwarp_proto::rd::{MessageId, Placed, Ticket};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rdmap::AtomicResponse;

use super::receive::{RdSegment, copy_pieces};
use super::status::status_of_refusal;
use super::{RdBytes, RdCore};
use crate::mr::{Access, random_u32};
use crate::qp::shell::Shell;
use crate::queues::slice_sges;
use crate::wr::{SendOp, WcStatus};

#[derive(Debug)]
struct Entry {
    /// The queue pair's name for it.
    request: u64,
    /// The answer, as soon as a part of it has come.
    message: Option<MessageId>,
    /// What the answer says, if it is that there is none.
    failure: Option<Reason>,
}

#[derive(Debug)]
pub(super) struct Asked {
    by_id: FxHashMap<u32, Entry>,
    /// The same by their answers, as soon as a part of one has come.
    by_message: FxHashMap<MessageId, u32>,
    last: u32,
}

impl Asked {
    /// Names that no queue pair which had this number before has used, in this process or in one before it:
    /// its answers may still be under way.
    pub fn new() -> Self {
        Self {
            by_id: FxHashMap::default(),
            by_message: FxHashMap::default(),
            last: random_u32().unwrap_or_default(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub fn clear(&mut self) {
        self.by_id.clear();
        self.by_message.clear();
    }

    /// One more request; returns its name in the answer.
    pub fn add(&mut self, request: u64) -> u32 {
        // (None is nearly as old as four billion others.)
        self.last = self.last.wrapping_add(1);
        self.by_id.insert(self.last, Entry { request, message: None, failure: None });
        self.last
    }

    pub fn remove(&mut self, id: u32) {
        if let Some(message) = self.by_id.remove(&id).and_then(|entry| entry.message) {
            self.by_message.remove(&message);
        }
    }
}

/// What an answer brings.
pub(super) enum Answer {
    /// Bytes for the request's memory.
    Memory,
    /// The value before an atomic operation.
    Value(AtomicResponse),
    /// There is no other answer.
    Failure(Reason),
}

impl RdCore {
    /// Takes a segment of an answer.
    pub(super) fn place_answer(
        &mut self,
        segment: &RdSegment<'_>,
        id: u32,
        answer: &Answer,
    ) -> Result<(), Placed> {
        let late = Err(Placed::Refused(Reason::Aborted));
        let Some(entry) = self.asked.by_id.get_mut(&id) else { return late };
        let request = entry.request;
        let Some(work) = self.requests.get(request).copied() else { return late };
        // That there is no answer is said after a part of one, too.
        let is_last_word = matches!(answer, Answer::Failure(_));
        let is_of_it = work.remote_qpn == segment.source_qpn
            && is_same(work.endpoint.to, segment.remote)
            && (is_last_word || entry.message.is_none_or(|message| message == segment.message));
        if !is_of_it {
            return late;
        }
        if let Some(part) = entry.message.replace(segment.message) {
            self.asked.by_message.remove(&part);
        }
        self.asked.by_message.insert(segment.message, id);
        let value;
        let (at, bytes): (u32, RdBytes<'_>) = match *answer {
            Answer::Failure(reason) => {
                entry.failure = Some(reason);
                return Ok(());
            }
            Answer::Memory if matches!(work.op, SendOp::Read { .. }) && segment.message_len == work.len => {
                (segment.offset, segment.bytes)
            }
            Answer::Value(response) if work.op.is_atomic() => {
                value = response.original.to_ne_bytes();
                (0, RdBytes::from(&value[..]))
            }
            _ => {
                self.end_without_answer(request, WcStatus::BadRespErr);
                return Err(Placed::Refused(Reason::InvalidRequest));
            }
        };
        let (pd, Shell { local, .. }) = (self.shell.pd.id(), &mut self.shell);
        if copy_pieces(local, pd, self.requests.sges(request).iter(), at, bytes) {
            return Ok(());
        }
        self.end_without_answer(request, WcStatus::LocProtErr);
        Err(Placed::Refused(Reason::Operation))
    }

    /// The machine must not wait for the answer any more.
    fn end_without_answer(&mut self, request: u64, status: WcStatus) {
        self.withdrawn.extend(self.requests.get(request).and_then(|work| work.ticket));
        self.end(request, status);
    }

    /// An answer is whole: completes its request, and returns the machine's name for that. Does nothing if
    /// the message is no answer, or comes too late.
    pub(super) fn answer_is_whole(&mut self, message: MessageId) -> Option<Ticket> {
        let entry = self.asked.by_id.get(self.asked.by_message.get(&message)?)?;
        let (request, status) = (entry.request, entry.failure.map_or(WcStatus::Success, status_of_refusal));
        let ticket = self.requests.get(request)?.ticket;
        self.end(request, status);
        ticket
    }

    /// Whether the memory for an answer can be written.
    pub(super) fn has_sink(&mut self, request: u64, len: u32) -> bool {
        let (pd, Shell { local, .. }) = (self.shell.pd.id(), &mut self.shell);
        let mut parts = slice_sges(self.requests.sges(request).iter(), 0, len);
        parts.all(|part| local.with(part, pd, Access::LOCAL_WRITE, |_| ()).is_ok())
    }
}

/// The scope of a link-local address is not compared: either may lack it.
fn is_same(a: SocketAddr, b: SocketAddr) -> bool {
    (a.ip(), a.port()) == (b.ip(), b.port())
}
