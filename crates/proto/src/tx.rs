//! Sending: messages cut into DDP segments (RFC 5041 section 5).

use uwarp_wire::ddp::{Header, QN_SEND, Tagged, Untagged};
use uwarp_wire::rdmap::{Control, Opcode, UWARP_WITH_IMM};

/// A message to send, without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// RDMA Write or RDMA Read Response: payload goes to `stag` from `to` on.
    Tagged {
        /// [`Opcode::Write`] or [`Opcode::ReadResponse`].
        opcode: Opcode,
        /// Data sink STag.
        stag: u32,
        /// Data sink tagged offset of the first byte.
        to: u64,
    },
    /// A message to one of the peer's queues.
    Untagged {
        /// The operation.
        opcode: Opcode,
        /// Queue number.
        qn: u32,
        /// Message sequence number.
        msn: u32,
        /// The Invalidate STag of Send with Invalidate, else zero.
        invalidate: u32,
    },
    /// Send with Immediate, between two uwarp ends only.
    SendImmediate {
        /// Message sequence number.
        msn: u32,
        /// With Solicited Event.
        solicited: bool,
        /// In the order of the wire.
        imm: [u8; 4],
    },
}

impl Message {
    /// A Send of any kind.
    pub fn send(msn: u32, solicited: bool, invalidate: Option<u32>) -> Self {
        let opcode = match (solicited, invalidate.is_some()) {
            (false, false) => Opcode::Send,
            (true, false) => Opcode::SendSe,
            (false, true) => Opcode::SendInvalidate,
            (true, true) => Opcode::SendSeInvalidate,
        };
        Self::Untagged { opcode, qn: QN_SEND, msn, invalidate: invalidate.unwrap_or(0) }
    }

    /// Length of the DDP header of its segments.
    pub fn header_len(&self) -> usize {
        match self {
            Self::Tagged { .. } => Tagged::LEN,
            Self::Untagged { .. } | Self::SendImmediate { .. } => Untagged::LEN,
        }
    }

    /// The whole message, of `len` bytes, in one segment.
    #[inline]
    pub fn whole(&self, len: u32) -> OutSegment {
        self.segment(0, len, true)
    }

    #[inline]
    fn segment(&self, offset: u32, len: u32, last: bool) -> OutSegment {
        let header = match *self {
            Message::Tagged { opcode, stag, to } => Header::Tagged(Tagged {
                last,
                stag,
                to: to.wrapping_add(u64::from(offset)),
                rsvdulp: Control::new(opcode).to_byte(),
            }),
            Message::Untagged { opcode, qn, msn, invalidate } => Header::Untagged(Untagged {
                last,
                rsvdulp: Control::new(opcode).to_byte(),
                rsvdulp32: invalidate,
                qn,
                msn,
                mo: offset,
            }),
            Message::SendImmediate { msn, solicited, imm } => {
                let opcode = if solicited { Opcode::SendSe } else { Opcode::Send };
                Header::Untagged(Untagged {
                    last,
                    rsvdulp: Control::new(opcode).to_byte() | UWARP_WITH_IMM,
                    rsvdulp32: u32::from_be_bytes(imm),
                    qn: QN_SEND,
                    msn,
                    mo: offset,
                })
            }
        };
        OutSegment { header, offset, len }
    }
}

/// Cuts one message into segments.
#[derive(Debug, Clone, Copy)]
pub struct Segmenter {
    message: Message,
    total: u32,
    done: u32,
    step: u32,
    started: bool,
}

/// One segment: its header, and which part of the message's payload follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutSegment {
    /// DDP header with the RDMAP control octet.
    pub header: Header,
    /// Offset of the payload in the message.
    pub offset: u32,
    /// Payload bytes.
    pub len: u32,
}

impl OutSegment {
    /// Bytes of the whole segment: header and payload.
    #[inline]
    pub fn ulpdu_len(&self) -> usize {
        self.header.len() + self.len as usize
    }
}

impl Segmenter {
    /// `total` bytes in segments whose ULPDU is at most `mulpdu` bytes. With `balanced`, segments have about
    /// equal size, so that a message just above the limit does not end in a tiny one (this helps where
    /// segments are received straight into place). Without it, each is as large as possible.
    pub fn new(message: Message, total: u32, mulpdu: usize, balanced: bool) -> Self {
        let max = u32::try_from(mulpdu.saturating_sub(message.header_len()).max(64)).unwrap_or(u32::MAX) & !3;
        let step = if balanced && total > max {
            let parts = total.div_ceil(max);
            total.div_ceil(parts).next_multiple_of(4).min(max)
        } else {
            max
        };
        Self { message, total, done: 0, step, started: false }
    }

    /// Bytes of the message.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Whether all segments were taken.
    pub fn finished(&self) -> bool {
        self.started && self.done == self.total
    }

    /// The next segment; a message of no bytes has one.
    pub fn next_segment(&mut self) -> Option<OutSegment> {
        if self.finished() {
            return None;
        }
        self.started = true;
        let offset = self.done;
        let len = self.step.min(self.total - self.done);
        self.done += len;
        let last = self.done == self.total;
        Some(self.message.segment(offset, len, last))
    }
}
