//! Memory that peers name: RDMA Writes, and requests to read or to change it (docs/rd.md section 5.4).
//!
//! There is no connection that would say who the peer is. So besides the rights of the region and its
//! protection domain, a peer needs the queue pair's job key, and may have to be at an address that the
//! program has named.

use std::net::IpAddr;

use smallvec::SmallVec;
use uwarp_mem::{self as mem, NotDone};
use uwarp_proto::rd::{Placed, Target};
use uwarp_wire::ddp::{QN_ATOMIC_RESPONSE, QN_TERMINATE, Tagged};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rdmap::{AtomicRequest, AtomicResponse, Control, Opcode, ReadRequest};

use super::RdCore;
use super::receive::RdSegment;
use crate::error::VerbsError;
use crate::mr::{Access, AccessError, MrCache, Part};
use crate::qp::datagrams::Arrival;

/// Sources that a program may name.
const SOURCES_MOST: usize = 64;

/// Peers that may name memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// All whose address begins with the first `bits` bits of this one. An IPv4 address stands for its mapped
    /// IPv6 address.
    pub prefix: IpAddr,
    /// Up to 128.
    pub bits: u8,
    /// `None`: any queue pair.
    pub qpn: Option<u32>,
}

impl Source {
    fn covers(&self, from: IpAddr, qpn: u32) -> bool {
        let number = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
            IpAddr::V6(v6) => v6.to_bits(),
        };
        let differ = (number(self.prefix) ^ number(from)).checked_shr(128 - u32::from(self.bits.min(128)));
        differ.unwrap_or(0) == 0 && self.qpn.is_none_or(|own| own == qpn)
    }
}

/// Who may name memory, and how.
#[derive(Debug, Default)]
pub(super) struct Rights {
    /// 0: nobody may.
    pub job_key: u64,
    /// What the queue pair grants. `None`: whatever the region grants.
    pub access: Option<Access>,
    /// Empty: whoever has the job key.
    pub sources: Vec<Source>,
}

impl Rights {
    /// Why a segment must not use memory; from the reason alone, nobody learns which of these it is.
    fn check(&self, segment: &RdSegment<'_>, arrival: &Arrival, need: Access) -> Result<(), Reason> {
        if self.job_key == 0 {
            return Err(Reason::InvalidRequest);
        }
        let has_key = segment.first.is_some_and(|first| first.job_key == Some(self.job_key));
        let mut sources = self.sources.iter();
        let is_named =
            self.sources.is_empty() || sources.any(|one| one.covers(arrival.from, segment.source_qpn));
        let is_granted = self.access.is_none_or(|access| access.contains(need));
        if has_key && is_named && is_granted { Ok(()) } else { Err(Reason::Access) }
    }
}

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
        if source.bits > 128 {
            return Err(VerbsError::Invalid("a prefix has at most 128 bits"));
        }
        if self.rights.sources.len() >= SOURCES_MOST {
            return Err(VerbsError::Invalid("a queue pair has at most 64 sources"));
        }
        self.rights.sources.push(source);
        Ok(())
    }

    /// Places a segment of an RDMA Write. One with an immediate takes a receive before its first byte is
    /// placed.
    pub(super) fn place_write(
        &mut self,
        segment: &RdSegment<'_>,
        ddp: &Tagged,
        arrival: &Arrival,
    ) -> Result<(), Placed> {
        self.rights.check(segment, arrival, Access::REMOTE_WRITE).map_err(Placed::Refused)?;
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
        if immediate.is_some() && !self.receives.has(segment.message) {
            if !is_empty {
                check(&mut self.remote, whole, pd, Access::REMOTE_WRITE)?;
            }
            self.bind_write(segment, arrival)?;
        }
        if !is_empty {
            let copied = self.remote.with(whole, pd, Access::REMOTE_WRITE, |place| {
                mem::copy_in(place.part(offset, segment.bytes.len()), segment.bytes)
            });
            copied.and_then(|copied| Ok(copied?)).map_err(refusal)?;
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
        let request = is_whole(segment, ReadRequest::LEN).then(|| ReadRequest::parse(segment.bytes).ok());
        let request = request.flatten().ok_or(Placed::Refused(Reason::InvalidRequest))?;
        self.rights.check(segment, arrival, Access::REMOTE_READ).map_err(Placed::Refused)?;
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
        let request = is_whole(segment, AtomicRequest::LEN).then(|| AtomicRequest::parse(segment.bytes).ok());
        let request = request.flatten().ok_or(Placed::Refused(Reason::InvalidRequest))?;
        self.rights.check(segment, arrival, Access::REMOTE_ATOMIC).map_err(Placed::Refused)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_prefix_and_perhaps_a_number() {
        let source = |prefix: &str, bits, qpn| Source { prefix: prefix.parse().unwrap(), bits, qpn };
        let at = |address: &str| address.parse::<IpAddr>().unwrap();
        assert!(source("::", 0, None).covers(at("10.1.2.3"), 1), "all");
        assert!(source("10.1.0.0", 112, None).covers(at("10.1.2.3"), 1));
        assert!(!source("10.1.0.0", 112, None).covers(at("10.2.2.3"), 1));
        assert!(source("10.1.2.3", 128, Some(7)).covers(at("10.1.2.3"), 7));
        assert!(!source("10.1.2.3", 128, Some(7)).covers(at("10.1.2.3"), 8));
        assert!(!source("10.1.2.3", 128, None).covers(at("10.1.2.2"), 7));
        assert!(source("fd00::", 8, None).covers(at("fd12::1"), 7));
        assert!(!source("fd00::", 8, None).covers(at("fe80::1"), 7));
        assert!(!source("fd00::", 8, None).covers(at("10.0.0.1"), 7));
    }
}
