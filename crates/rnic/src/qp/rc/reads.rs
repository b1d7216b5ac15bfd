//! RDMA Reads and atomic operations that are outstanding: this end's, and the peer's.

use uwarp_proto::tx::Message;
use uwarp_wire::ddp::{QN_READ_REQUEST, Untagged};
use uwarp_wire::rdmap::{Control, Opcode, ReadRequest};

use crate::queues::ATOMIC_BYTES;

/// Where the response to a Read or an atomic operation of ours goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadSink {
    /// An Atomic Response answers it, not a Read Response.
    pub atomic: bool,
    /// Slot of the send queue; none for a Read of no bytes that this end made itself.
    pub slot: Option<u64>,
    pub stag: u32,
    pub total: u32,
    pub received: u32,
    pub msn: u32,
    /// Messages that were sent before its request.
    pub behind: u64,
}

impl ReadSink {
    pub fn new(slot: u64, stag: u32, total: u32, msn: u32, behind: u64) -> Self {
        Self { atomic: false, slot: Some(slot), stag, total, received: 0, msn, behind }
    }

    /// For an atomic operation, whose request has its MSN as its identifier.
    pub fn atomic(slot: u64, msn: u32, behind: u64) -> Self {
        Self { atomic: true, ..Self::new(slot, 0, ATOMIC_BYTES, msn, behind) }
    }

    /// For a Read of no bytes: a ready-to-receive frame, or a placement Read.
    pub fn empty(msn: u32, behind: u64) -> Self {
        let stag = ReadRequest::EMPTY.sink_stag;
        Self { atomic: false, slot: None, stag, total: 0, received: 0, msn, behind }
    }
}

/// What the peer waits for.
#[derive(Debug)]
pub(super) enum Request {
    Read(ReadSource),
    /// A short Read, with the bytes as they were when it arrived: Writes behind it must not show in them.
    Copied(ReadSource, Box<[u8]>),
    Atomic(Atomic),
}

/// Longest Read that is copied if its Response has to wait. The peer decides how many there are, up to the
/// read depth.
pub(super) const MOST_COPIED: u32 = 1024;

/// What a Read of the peer requested.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadSource {
    pub msn: u32,
    pub sink_stag: u32,
    pub sink_to: u64,
    pub size: u32,
    pub stag: u32,
    pub to: u64,
}

impl ReadSource {
    pub const SEGMENT_LEN: u16 = (Untagged::LEN + ReadRequest::LEN) as u16;

    /// The message that answers it.
    pub fn response(&self) -> Message {
        Message::Tagged { opcode: Opcode::ReadResponse, stag: self.sink_stag, to: self.sink_to }
    }

    /// The request as a segment, with what is left to do from `offset` on, as a Terminate in the middle of a
    /// response quotes it (RFC 5040 section 4.8).
    pub fn rest(&self, offset: u32) -> [u8; Self::SEGMENT_LEN as usize] {
        let header = Untagged {
            last: true,
            rsvdulp: Control::new(Opcode::ReadRequest).to_byte(),
            rsvdulp32: 0,
            qn: QN_READ_REQUEST,
            msn: self.msn,
            mo: 0,
        };
        let request = ReadRequest {
            sink_stag: self.sink_stag,
            sink_to: self.sink_to.wrapping_add(u64::from(offset)),
            size: self.size.saturating_sub(offset),
            source_stag: self.stag,
            source_to: self.to.wrapping_add(u64::from(offset)),
        };
        let mut bytes = [0; Self::SEGMENT_LEN as usize];
        let (head, tail) = bytes.split_at_mut(Untagged::LEN);
        head.copy_from_slice(&header.to_bytes());
        tail.copy_from_slice(&request.to_bytes());
        bytes
    }
}

/// An atomic operation of the peer, carried out, that waits for its response.
#[derive(Debug, Clone, Copy)]
pub(super) struct Atomic {
    pub request_id: u32,
    /// Where it was carried out.
    pub addr: u64,
    /// The old value.
    pub original: u64,
}

impl Atomic {
    /// Puts the old value into `bytes`, which were read at `addr` for a Read before it.
    pub fn undo(&self, addr: u64, bytes: &mut [u8]) {
        for (n, byte) in self.original.to_ne_bytes().into_iter().enumerate() {
            let at = self.addr.wrapping_add(n as u64).wrapping_sub(addr);
            if let Some(place) = usize::try_from(at).ok().and_then(|at| bytes.get_mut(at)) {
                *place = byte;
            }
        }
    }
}
