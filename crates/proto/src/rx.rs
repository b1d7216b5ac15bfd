//! Receiving: DDP segments checked against the stream's state (RFC 5041 section 7, RFC 5040 section 7.2).
//!
//! [`RxState::check`] checks a segment, [`RxState::commit`] advances past it. Between the two the owner
//! places the payload; if it cannot do so yet (no receive is posted), it leaves the segment and checks it
//! again later.

use uwarp_wire::ddp::{self, Header, QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, QN_TERMINATE};
use uwarp_wire::rdmap::{Control, Opcode, OpcodeInfo, QN_UWARP_ACK, RV, UWARP_REQUEST_ACK, UWARP_WITH_IMM};
use uwarp_wire::terminate::{Mpa, RemoteOperation, TaggedBuffer, TerminateError, UntaggedBuffer};

/// A segment that passed every check that needs no memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The header as received.
    pub header: Header,
    /// The RDMAP operation: its row of the opcode table.
    pub info: &'static OpcodeInfo,
    /// Bytes of DDP header; the rest of the ULPDU is payload.
    pub header_len: usize,
    /// Payload bytes.
    pub payload_len: usize,
}

impl Segment {
    /// Whether the peer requests an acknowledgement when the message is placed. Only from another uwarp end
    /// does the bit mean that.
    #[inline]
    pub fn requests_ack(&self) -> bool {
        self.header.rsvdulp() & UWARP_REQUEST_ACK != 0
    }

    /// Whether this is the last segment of its message.
    pub fn last(&self) -> bool {
        self.header.last()
    }
}

#[derive(Debug, Clone, Copy)]
struct Queue {
    /// MSN of the message in progress or expected next; starts at 1 and wraps (RFC 5041 section 5.3).
    msn: u32,
    /// Bytes of it already placed.
    mo: u32,
    /// Its operation, once its first segment has arrived.
    opcode: Option<Opcode>,
}

impl Queue {
    const START: Self = Self { msn: 1, mo: 0, opcode: None };
}

impl Segment {
    /// The immediate data of a Send with Immediate, in the order of the wire. Only from another uwarp end
    /// does the bit mean that; from strangers it is reserved and ignored (RFC 5040 section 4.1).
    pub fn send_immediate(&self) -> Option<[u8; 4]> {
        match self.header {
            Header::Untagged(h) if h.rsvdulp & UWARP_WITH_IMM != 0 => Some(h.rsvdulp32.to_be_bytes()),
            _ => None,
        }
    }
}

/// What a stream's untagged queues expect next.
#[derive(Debug)]
pub struct RxState {
    queues: [Queue; 5],
    uwarp_peer: bool,
}

impl RxState {
    /// A stream that starts now. `uwarp_peer`: the peer may use our own operations.
    pub fn new(uwarp_peer: bool) -> Self {
        Self { queues: [Queue::START; 5], uwarp_peer }
    }

    /// The peer was assumed to be a uwarp end and is none: our own operations are errors from now on.
    pub fn no_uwarp_peer(&mut self) {
        self.uwarp_peer = false;
    }

    /// Checks a segment of `ulpdu_len` bytes whose header is at the start of `ulpdu` (at least
    /// [`ddp::Untagged::LEN`] bytes of it, or all if it is shorter).
    #[inline(always)]
    pub fn check(&self, ulpdu: &[u8], ulpdu_len: usize) -> Result<Segment, TerminateError> {
        let (header, header_len) = Header::parse(ulpdu).map_err(|e| match e {
            // No DDP code exists for a ULPDU shorter than its header: the length field was wrong.
            ddp::Error::Truncated => TerminateError::Mpa(Mpa::MarkerMismatch),
            ddp::Error::BadVersion { tagged: true, .. } => {
                TerminateError::TaggedBuffer(TaggedBuffer::InvalidVersion)
            }
            ddp::Error::BadVersion { tagged: false, .. } => {
                TerminateError::UntaggedBuffer(UntaggedBuffer::InvalidVersion)
            }
        })?;
        let payload_len =
            ulpdu_len.checked_sub(header_len).ok_or(TerminateError::Mpa(Mpa::MarkerMismatch))?;
        let control = Control::parse(header.rsvdulp());
        if control.version != RV {
            return Err(TerminateError::RemoteOperation(RemoteOperation::InvalidVersion));
        }
        let unexpected = TerminateError::RemoteOperation(RemoteOperation::UnexpectedOpcode);
        let known = control.opcode.info();
        let info = match header {
            Header::Tagged(h) => {
                let info = known.filter(|info| info.tagged).ok_or(unexpected)?;
                let len = u64::try_from(payload_len).unwrap_or(u64::MAX);
                if h.to.checked_add(len).is_none() {
                    return Err(TerminateError::TaggedBuffer(TaggedBuffer::ToWrap));
                }
                info
            }
            Header::Untagged(h) => {
                let queue =
                    self.queue(h.qn).ok_or(TerminateError::UntaggedBuffer(UntaggedBuffer::InvalidQn))?;
                // (Only a uwarp peer has the queue for acknowledgements.)
                let info = known.filter(|info| info.queue == Some(h.qn)).ok_or(unexpected)?;
                if queue.opcode.is_some_and(|o| o != info.opcode) {
                    return Err(unexpected);
                }
                if h.msn != queue.msn {
                    return Err(TerminateError::UntaggedBuffer(UntaggedBuffer::MsnRange));
                }
                let len = u32::try_from(payload_len)
                    .map_err(|_| TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong))?;
                if h.mo != queue.mo || h.mo.checked_add(len).is_none() {
                    return Err(TerminateError::UntaggedBuffer(UntaggedBuffer::InvalidMo));
                }
                info
            }
        };
        Ok(Segment { header, info, header_len, payload_len })
    }

    /// Advances past a segment that [`check`](Self::check) accepted and whose payload is placed.
    pub fn commit(&mut self, segment: &Segment) {
        let Header::Untagged(h) = segment.header else { return };
        let Some(queue) = self.queue_mut(h.qn) else { return };
        if h.last {
            *queue = Queue { msn: queue.msn.wrapping_add(1), ..Queue::START };
        } else {
            let len = u32::try_from(segment.payload_len).unwrap_or(u32::MAX);
            *queue = Queue { mo: queue.mo.saturating_add(len), opcode: Some(segment.info.opcode), ..*queue };
        }
    }

    /// Whether a message that takes a receive, a Read or an atomic operation has arrived, or a part of one,
    /// but for the first `reads` Reads.
    pub fn has_begun(&self, reads: u32) -> bool {
        let [sends, requests, ..] = &self.queues;
        let is_at = |queue: &Queue, msn: u32| queue.msn == msn && queue.mo == 0 && queue.opcode.is_none();
        !is_at(sends, 1) || !(1..=1 + reads).any(|msn| is_at(requests, msn))
    }

    /// Makes the next message of every queue expect this MSN, for tests near the wrap. The Terminate queue
    /// sees one message at most, so it stays as it is.
    #[doc(hidden)]
    pub fn set_msn(&mut self, msn: u32) {
        for qn in [QN_SEND, QN_READ_REQUEST, QN_ATOMIC_RESPONSE, QN_UWARP_ACK] {
            if let Some(queue) = self.queue_mut(qn) {
                *queue = Queue { msn, ..Queue::START };
            }
        }
    }

    fn index(&self, qn: u32) -> Option<usize> {
        match qn {
            QN_SEND => Some(0),
            QN_READ_REQUEST => Some(1),
            QN_TERMINATE => Some(2),
            QN_ATOMIC_RESPONSE => Some(3),
            QN_UWARP_ACK if self.uwarp_peer => Some(4),
            _ => None,
        }
    }

    fn queue(&self, qn: u32) -> Option<&Queue> {
        self.queues.get(self.index(qn)?)
    }

    fn queue_mut(&mut self, qn: u32) -> Option<&mut Queue> {
        let index = self.index(qn)?;
        self.queues.get_mut(index)
    }
}
