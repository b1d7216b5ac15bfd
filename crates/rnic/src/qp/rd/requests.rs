//! The send work requests of a queue pair for reliable datagrams. They end in any order, so each has a slot
//! of its own. A slot keeps its buffers for the next one: in steady state, posting does not allocate.

use std::collections::VecDeque;

use smallvec::SmallVec;
use uwarp_proto::rd::{Target, Ticket};
use uwarp_wire::ddp::{QN_READ_REQUEST, QN_SEND};
use uwarp_wire::rdmap::{AtomicRequest, Control, Opcode, ReadRequest, UWARP_SOLICITED};

use crate::ah::Endpoint;
use crate::qp::datagrams::copy_inline;
use crate::wr::{SendFlags, SendOp, SendWr, Sge};

/// A send work request whose message is not done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub wr_id: u64,
    pub op: SendOp,
    pub signaled: bool,
    pub endpoint: Endpoint,
    pub remote_qpn: u32,
    pub qkey: u32,
    pub job_key: Option<u64>,
    pub solicited: bool,
    /// It begins when all answers to earlier ones are there.
    pub fence: bool,
    /// Bytes of the program's memory.
    pub len: u32,
    /// Its name in the answer.
    pub id: u32,
    /// The machine's name for its message.
    pub ticket: Option<Ticket>,
    /// Counts the requests from the start.
    pub number: u64,
}

/// The bytes of a message that asks for an answer.
pub(super) type Question = SmallVec<[u8; 64]>;

impl Request {
    /// Where its message goes at the receiver. `None`: this service has no such operation.
    pub fn target(&self) -> Option<Target> {
        let control = |opcode| Control::new(opcode).to_byte();
        let event = if self.solicited { UWARP_SOLICITED } else { 0 };
        let asks =
            |opcode| Some(Target::Untagged { qn: QN_READ_REQUEST, rsvdulp: control(opcode), rsvdulp32: 0 });
        match self.op {
            SendOp::Send { invalidate: None } | SendOp::SendImmediate { .. } => {
                let opcode = if self.solicited { Opcode::SendSe } else { Opcode::Send };
                Some(Target::Untagged { qn: QN_SEND, rsvdulp: control(opcode), rsvdulp32: 0 })
            }
            SendOp::Write { stag, to } => Some(Target::Tagged { stag, to, rsvdulp: control(Opcode::Write) }),
            SendOp::WriteImmediate { stag, to, .. } => {
                Some(Target::Tagged { stag, to, rsvdulp: control(Opcode::Write) | event })
            }
            SendOp::WriteRecord { stag, to, .. } => {
                Some(Target::Tagged { stag, to, rsvdulp: control(Opcode::WriteRecord) | event })
            }
            SendOp::Read { invalidate_local: false, .. } => asks(Opcode::ReadRequest),
            SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => asks(Opcode::AtomicRequest),
            _ => None,
        }
    }

    /// The bytes of its message, if that asks for an answer. Otherwise they are the program's.
    pub fn question(&self) -> Option<Question> {
        if let SendOp::Read { stag, to, .. } = self.op {
            let request = ReadRequest {
                sink_stag: self.id,
                sink_to: 0,
                size: self.len,
                source_stag: stag,
                source_to: to,
            };
            return Some(SmallVec::from_slice(&request.to_bytes()));
        }
        Some(SmallVec::from_slice(&self.op.atomic_request(self.id)?.to_bytes()))
    }

    /// Bytes of its message.
    pub fn message_len(&self) -> u32 {
        match self.op {
            SendOp::Read { .. } => ReadRequest::LEN as u32,
            op if op.is_atomic() => AtomicRequest::LEN as u32,
            _ => self.len,
        }
    }
}

/// Where the payload of a request is.
pub(super) enum Payload<'a> {
    /// Copied by the post.
    Inline(&'a [u8]),
    /// In the program's memory.
    Sges(&'a [Sge]),
}

#[derive(Debug, Default)]
struct Slot {
    /// Counts the requests that had this slot: the upper half of their names.
    generation: u32,
    request: Option<Request>,
    is_inline: bool,
    inline: Vec<u8>,
    sges: Vec<Sge>,
}

#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    unused: Vec<u32>,
    /// Names of those that have not gone to the exchange, oldest first. Some of them may have ended.
    unsent: VecDeque<u64>,
    posted: u64,
}

impl Requests {
    /// The number that the next request gets.
    pub fn posted(&self) -> u64 {
        self.posted
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.unused.len()
    }

    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Slots that exist, used or not.
    #[cfg(test)]
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Adds one behind all others.
    pub fn post(&mut self, mut request: Request, wr: &SendWr<'_>) {
        let index = self.unused.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        slot.generation = slot.generation.wrapping_add(1);
        request.number = self.posted;
        self.posted += 1;
        slot.is_inline = wr.flags.contains(SendFlags::INLINE);
        if slot.is_inline {
            copy_inline(wr.sges, &mut slot.inline);
        } else {
            slot.sges.extend_from_slice(wr.sges);
        }
        slot.request = Some(request);
        self.unsent.push_back(u64::from(slot.generation) << 32 | u64::from(index));
    }

    fn slot(&self, name: u64) -> Option<&Slot> {
        let (generation, index) = parts(name);
        self.slots.get(index as usize).filter(|slot| slot.generation == generation)
    }

    pub fn get(&self, name: u64) -> Option<&Request> {
        self.slot(name)?.request.as_ref()
    }

    /// The elements of its list.
    pub fn sges(&self, name: u64) -> &[Sge] {
        self.slot(name).map_or(&[], |slot| &slot.sges)
    }

    pub fn get_mut(&mut self, name: u64) -> Option<&mut Request> {
        let (generation, index) = parts(name);
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation);
        slot?.request.as_mut()
    }

    /// Bytes of the message, and where they are.
    pub fn payload(&self, name: u64) -> Option<(u32, Payload<'_>)> {
        let slot = self.slot(name)?;
        let payload = if slot.is_inline { Payload::Inline(&slot.inline) } else { Payload::Sges(&slot.sges) };
        Some((slot.request?.len, payload))
    }

    /// The oldest one that has not gone to the exchange, if its number is below `end` and it may. It has gone
    /// now.
    pub fn next_unsent(&mut self, end: u64, may_go: impl Fn(&Request) -> bool) -> Option<(u64, Request)> {
        loop {
            let name = *self.unsent.front()?;
            let request = self.slot(name).and_then(|slot| slot.request);
            if request.is_some_and(|request| request.number >= end || !may_go(&request)) {
                return None;
            }
            self.unsent.pop_front();
            if let Some(request) = request {
                return Some((name, request));
            }
        }
    }

    /// Takes one out.
    pub fn end(&mut self, name: u64) -> Option<Request> {
        let (generation, index) = parts(name);
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation)?;
        let request = slot.request.take()?;
        slot.inline.clear();
        slot.sges.clear();
        self.unused.push(index);
        Some(request)
    }

    /// Takes all out, in the order of posting.
    pub fn end_all(&mut self) -> Vec<Request> {
        self.unsent.clear();
        let mut all = Vec::with_capacity(self.len());
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some(request) = slot.request.take() {
                slot.inline.clear();
                slot.sges.clear();
                self.unused.push(u32::try_from(index).unwrap_or(u32::MAX));
                all.push(request);
            }
        }
        all.sort_unstable_by_key(|request| request.number);
        all
    }
}

fn parts(name: u64) -> (u32, u32) {
    ((name >> 32) as u32, name as u32)
}
