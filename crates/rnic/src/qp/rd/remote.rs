//! Memory that peers name: RDMA Writes, and requests to read or to change it (docs/rd.md section 5.4).
//!
//! There is no connection that would say who the peer is. So besides the rights of the region and its
//! protection domain, a peer needs the queue pair's job key, and may have to be at an address that the
//! program has named.

use smallvec::SmallVec;
use uwarp_mem::{self as mem, NotDone};
use uwarp_proto::rd::{Placed, Target};
use uwarp_wire::ddp::{QN_ATOMIC_RESPONSE, QN_TERMINATE, Tagged};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rdmap::{AtomicRequest, AtomicResponse, Control, Opcode, ReadRequest};

use super::RdCore;
use super::receive::{RdSegment, Takes};
use crate::error::VerbsError;
use crate::mr::{Access, AccessError, MrCache, Part};
use crate::qp::datagrams::Arrival;
use crate::qp::rights::{Refused, Source};

/// An answer to a request of a peer: a message to the queue pair that has asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdAnswer {
    /// The queue pair that has asked.
    pub destination: u32,
    /// Where it goes there.
    pub target: Target,
    /// The life of this queue pair in which it was asked for.
    life: u32,
    /// Its bytes.
    pub bytes: AnswerBytes,
}

/// The bytes of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerBytes {
    /// `len` bytes of registered memory, to be read when they are sent ([`RdCore::fill_answer`]).
    Memory {
        /// Key of the region.
        stag: u32,
        /// Where in it.
        to: u64,
        /// How many.
        len: u32,
    },
    /// These.
    Own(SmallVec<[u8; 16]>),
}

impl RdAnswer {
    /// What the program's memory could not be read for: it is not registered any more, or the queue pair has
    /// ended.
    pub fn instead(&self, reason: Reason) -> Self {
        let id = match self.target {
            Target::Tagged { stag, .. } => stag,
            Target::Untagged { .. } => 0,
        };
        let mut bytes = SmallVec::from_slice(&id.to_be_bytes());
        bytes.extend_from_slice(&[reason.code(), 0, 0, 0]);
        let rsvdulp = Control::new(Opcode::Terminate).to_byte();
        let target = Target::Untagged { qn: QN_TERMINATE, rsvdulp, rsvdulp32: 0 };
        let (destination, life) = (self.destination, self.life);
        Self { destination, target, life, bytes: AnswerBytes::Own(bytes) }
    }

    /// How many bytes it has.
    pub fn len(&self) -> u32 {
        match &self.bytes {
            AnswerBytes::Memory { len, .. } => *len,
            AnswerBytes::Own(bytes) => u32::try_from(bytes.len()).unwrap_or(u32::MAX),
        }
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What the sender is told. That a region's memory is gone is not its fault.
fn refusal(error: AccessError) -> Placed {
    Placed::Refused(match error {
        AccessError::Unmapped => Reason::Operation,
        _ => Reason::Access,
    })
}

impl RdCore {
    /// Names peers that may name memory. Once there is one, all others may not.
    pub fn allow_source(&mut self, source: Source) -> Result<(), VerbsError> {
        self.rights.allow(source)
    }

    /// Whether a segment may use memory at all.
    fn check_rights(&self, segment: &RdSegment<'_>, arrival: &Arrival, need: Access) -> Result<(), Placed> {
        let job_key = segment.first.and_then(|first| first.job_key);
        let checked = self.rights.check(job_key, arrival.from, segment.source_qpn, need);
        checked.map_err(|refused| {
            Placed::Refused(match refused {
                Refused::Never => Reason::InvalidRequest,
                Refused::Peer => Reason::Access,
            })
        })
    }

    /// Places a segment of an RDMA Write. One with an immediate takes a receive or a record before its first
    /// byte is placed.
    pub(super) fn place_write(
        &mut self,
        segment: &RdSegment<'_>,
        ddp: &Tagged,
        takes: Takes,
        arrival: &Arrival,
    ) -> Result<(), Placed> {
        self.check_rights(segment, arrival, Access::REMOTE_WRITE)?;
        let immediate = segment.first.and_then(|first| first.immediate);
        // The range of the whole message is checked, so that none is begun that cannot be finished.
        let whole = Part {
            stag: ddp.stag,
            to: ddp.to.wrapping_sub(u64::from(segment.offset)),
            len: segment.message_len as usize,
        };
        // Of an empty message, STag and offset mean nothing (RFC 5041 section 5.2).
        let is_empty = segment.message_len == 0;
        let (pd, offset) = (self.shell.pd.id(), segment.offset as usize);
        let has = |core: &Self| match takes {
            Takes::Receive => immediate.is_none() || core.receives.has(segment.message),
            Takes::Record => core.has_record(segment.message),
        };
        let is_first = !has(self);
        if is_first {
            if !is_empty {
                check(&mut self.remote, whole, pd, Access::REMOTE_WRITE)?;
            }
            match takes {
                Takes::Receive => self.bind_write(segment, arrival)?,
                Takes::Record => self.bind_record(segment, (whole.stag, whole.to), arrival)?,
            }
        }
        if !is_empty {
            let copied = self.remote.with(whole, pd, Access::REMOTE_WRITE, |place| {
                let mut pieces = segment.bytes.iter();
                pieces.try_for_each(|(at, piece)| {
                    mem::copy_in(place.part(offset + at, piece.len()), piece).map(|_| ())
                })
            });
            if let Err(error) = copied.and_then(|copied| Ok(copied?)) {
                // Refused with its first segment, the message is one that has nothing to give back.
                if is_first {
                    let woken = self.take_back(segment.message);
                    self.woken.append(woken);
                }
                return Err(refusal(error));
            }
        }
        let received = &mut self.shell.counters.received.write;
        received.bytes += segment.bytes.len() as u64;
        if offset + segment.bytes.len() >= segment.message_len as usize {
            received.messages += 1;
        }
        Ok(())
    }

    /// Takes a Read Request. Its bytes are read when the answer is sent.
    pub(super) fn place_read_request(
        &mut self,
        segment: &RdSegment<'_>,
        arrival: &Arrival,
    ) -> Result<(), Placed> {
        let request =
            is_whole(segment, ReadRequest::LEN).then(|| ReadRequest::parse(segment.bytes.first()).ok());
        let request = request.flatten().ok_or(Placed::Refused(Reason::InvalidRequest))?;
        self.check_rights(segment, arrival, Access::REMOTE_READ)?;
        let (stag, to, len) = (request.source_stag, request.source_to, request.size);
        if len > 0 {
            let part = Part { stag, to, len: len as usize };
            check(&mut self.remote, part, self.shell.pd.id(), Access::REMOTE_READ)?;
        }
        let rsvdulp = Control::new(Opcode::ReadResponse).to_byte();
        self.answer = Some(RdAnswer {
            destination: segment.source_qpn,
            target: Target::Tagged { stag: request.sink_stag, to: request.sink_to, rsvdulp },
            life: self.life,
            bytes: AnswerBytes::Memory { stag, to, len },
        });
        self.shell.counters.sent.read_response.count(len);
        Ok(())
    }

    /// Carries an atomic operation out. Its message is placed once, so it is carried out once.
    pub(super) fn place_atomic_request(
        &mut self,
        segment: &RdSegment<'_>,
        arrival: &Arrival,
    ) -> Result<(), Placed> {
        let request =
            is_whole(segment, AtomicRequest::LEN).then(|| AtomicRequest::parse(segment.bytes.first()).ok());
        let request = request.flatten().ok_or(Placed::Refused(Reason::InvalidRequest))?;
        self.check_rights(segment, arrival, Access::REMOTE_ATOMIC)?;
        let part = Part { stag: request.stag, to: request.to, len: size_of::<u64>() };
        let pd = self.shell.pd.id();
        let done = self.remote.with(part, pd, Access::REMOTE_ATOMIC, |place| mem::atomic(place, &request));
        let original = done.map_err(refusal)?.map_err(|why| match why {
            NotDone::Unaligned | NotDone::Unknown => Placed::Refused(Reason::InvalidRequest),
            NotDone::Unmapped => Placed::Refused(Reason::Operation),
        })?;
        let response = AtomicResponse { request_id: request.request_id, original };
        let rsvdulp = Control::new(Opcode::AtomicResponse).to_byte();
        self.answer = Some(RdAnswer {
            destination: segment.source_qpn,
            target: Target::Untagged { qn: QN_ATOMIC_RESPONSE, rsvdulp, rsvdulp32: 0 },
            life: self.life,
            bytes: AnswerBytes::Own(SmallVec::from_slice(&response.to_bytes())),
        });
        self.shell.counters.sent.atomic_response.count(size_of::<u64>() as u32);
        Ok(())
    }

    /// The answer to the request that was just placed. To be asked after each [`Self::place`].
    pub fn take_answer(&mut self) -> Option<RdAnswer> {
        self.answer.take()
    }

    /// Appends `len` bytes of an answer to `out`, from `offset` on, as they are in the program's memory now.
    /// If false, nothing was appended, and the peer must get [`RdAnswer::instead`].
    pub fn fill_answer(&mut self, answer: &RdAnswer, offset: u32, len: u32, out: &mut Vec<u8>) -> bool {
        let need = Access::REMOTE_READ;
        let (stag, to) = match &answer.bytes {
            AnswerBytes::Memory { stag, to, .. } => (*stag, to.wrapping_add(u64::from(offset))),
            AnswerBytes::Own(_) => return false,
        };
        let is_granted = self.rights.access.is_none_or(|access| access.contains(need));
        if answer.life != self.life || !self.shell.receives() || !is_granted {
            return false;
        }
        let (part, pd) = (Part { stag, to, len: len as usize }, self.shell.pd.id());
        matches!(self.remote.with(part, pd, need, |memory| mem::copy_out(memory, out)), Ok(Ok(())))
    }
}

fn check(remote: &mut MrCache, part: Part, pd: u32, need: Access) -> Result<(), Placed> {
    remote.with(part, pd, need, |_| ()).map_err(refusal)
}

/// A request is one segment of this length.
fn is_whole(segment: &RdSegment<'_>, len: usize) -> bool {
    let has_immediate = segment.first.is_some_and(|first| first.immediate.is_some());
    segment.offset == 0 && segment.message_len as usize == len && segment.bytes.len() == len && !has_immediate
}
