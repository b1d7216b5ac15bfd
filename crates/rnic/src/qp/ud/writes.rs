//! RDMA Write-Records that are sent (docs/datagram-iwarp.md section 15): many datagrams of one work request.
//! Some of them at a time are made of the program's memory, when it is their turn.

use smallvec::SmallVec;
use uwarp_proto::datagram;
use uwarp_wire::crc::Crc32c;
use uwarp_wire::datagram::record::Head;

use crate::ah::Endpoint;
use crate::mr::MrCache;
use crate::qp::datagrams::{copy_inline, copy_out};
use crate::wr::{SendFlags, SendWr, Sge};

/// Payload of a datagram, all of which then fits into an IPv6 packet on an Ethernet. A longer one would be
/// lost with each of its fragments.
const PIECE: u32 = 1452 - Head::OVERHEAD as u32;
/// Where datagrams stay on the host: with its headers, one fits into 16 KiB of the system's memory.
const LOCAL_PIECE: u32 = 61 * 256 - Head::OVERHEAD as u32;
/// Datagrams that are made together, and how many bytes of payload at most.
const MOST: usize = 44;
const MOST_BYTES: u32 = 64 * 1024;

/// Where the bytes of a message are.
enum Payload {
    Memory(SmallVec<[Sge; 2]>),
    Inline(Vec<u8>),
}

/// See [`Write::outgoing`].
pub(super) struct Pieces<'a> {
    staged: &'a [u8],
    lens: std::slice::Iter<'a, usize>,
    at: usize,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let len = *self.lens.next()?;
        let bytes = self.staged.get(self.at..self.at + len).unwrap_or(&[]);
        self.at += len;
        Some(bytes)
    }
}

/// A message that is on its way.
pub(super) struct Write {
    head: Head,
    payload: Payload,
    piece: u32,
    /// Datagrams that wait for the lower layer, one behind the other, and how long each is.
    staged: Vec<u8>,
    waiting: SmallVec<[usize; 2]>,
    /// Of these, so many were sent: datagrams, and their bytes.
    sent: usize,
    taken: usize,
    /// All of it was staged.
    is_staged: bool,
}

impl Write {
    /// A message with these headers.
    pub fn new(head: Head, wr: &SendWr<'_>, to: &Endpoint) -> Self {
        let payload = if wr.flags.contains(SendFlags::INLINE) {
            let mut bytes = Vec::new();
            copy_inline(wr.sges, &mut bytes);
            Payload::Inline(bytes)
        } else {
            Payload::Memory(SmallVec::from_slice(wr.sges))
        };
        let is_local = to.to.ip().is_loopback() || to.from == Some(to.to.ip());
        Self {
            head,
            payload,
            piece: if is_local { LOCAL_PIECE } else { PIECE },
            staged: Vec::new(),
            waiting: SmallVec::new(),
            sent: 0,
            taken: 0,
            is_staged: false,
        }
    }

    /// The datagrams that wait for the lower layer, oldest first.
    pub fn outgoing(&self) -> Pieces<'_> {
        Pieces {
            staged: &self.staged,
            lens: self.waiting.get(self.sent..).unwrap_or(&[]).iter(),
            at: self.taken,
        }
    }

    /// The same together: the length that all of them have, but the last, how many, and the bytes.
    pub fn waiting(&self) -> Option<(usize, usize, &[u8])> {
        let waiting = self.waiting.get(self.sent..)?;
        Some((*waiting.first()?, waiting.len(), self.staged.get(self.taken..)?))
    }

    /// The first of them has gone. Returns whether it was the last of the message.
    pub fn passed(&mut self) -> bool {
        self.taken += self.waiting.get(self.sent).copied().unwrap_or(0);
        self.sent += 1;
        self.is_staged && self.sent >= self.waiting.len()
    }

    /// Whether more of the message must be staged before anything can be sent.
    pub fn wants_more(&self) -> bool {
        !self.is_staged && self.sent >= self.waiting.len()
    }

    /// Makes the next datagrams. False: the program's memory must not be used.
    pub fn stage(&mut self, local: &mut MrCache, pd: u32) -> bool {
        self.staged.clear();
        self.waiting.clear();
        (self.sent, self.taken) = (0, 0);
        let begin = self.head.offset;
        while !self.is_staged && self.waiting.len() < MOST && self.head.offset - begin < MOST_BYTES {
            let offset = self.head.offset;
            let len = (self.head.message_len - offset).min(self.piece);
            let is_last = offset + len == self.head.message_len;
            let start = self.staged.len();
            self.staged.extend_from_slice(&self.head.to_bytes(is_last));
            let good = match &self.payload {
                Payload::Inline(bytes) => {
                    let part = bytes.get(offset as usize..(offset + len) as usize);
                    part.map(|part| self.staged.extend_from_slice(part)).is_some()
                }
                Payload::Memory(sges) => copy_out(local, pd, sges.iter(), offset, len, &mut self.staged),
            };
            if !good {
                return false;
            }
            let mut crc = Crc32c::new();
            crc.update(self.staged.get(start..).unwrap_or(&[]));
            self.staged.extend_from_slice(&datagram::trailer(crc.finish()));
            self.waiting.push(self.staged.len() - start);
            self.head.offset += len;
            self.is_staged = is_last;
        }
        true
    }
}
