//! State of sending: the message that is being cut, and the numbers of each queue.

use uwarp_proto::tx::Segmenter;

use super::ack_policy::AckRequests;
use super::reads::ReadSource;

/// The message being cut, and the last MSN of each untagged queue.
#[derive(Debug)]
pub(super) struct Tx {
    pub current: Option<Current>,
    pub send_msn: u32,
    pub read_msn: u32,
    pub atomic_msn: u32,
    pub ack_msn: u32,
    /// Stream positions at which acknowledgements end that the lower layer had not taken when a later one was
    /// queued.
    pub acks_queued: Vec<u64>,
    /// Sends and Writes cut so far.
    pub messages: u64,
    pub ack_requests: AckRequests,
    /// How often our Sends are to be retried without a receive, until the peer is told.
    pub rnr_retry: Option<u8>,
    /// A work request failed locally; no later one starts.
    pub stopped: bool,
    /// A Read Response was sent last: it is the send queue's turn.
    pub sq_turn: bool,
    /// Everything that may be sent was cut at the last attempt.
    pub all_cut: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Current {
    pub segmenter: Segmenter,
    pub source: Source,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    /// The scatter/gather list of this slot of the send queue.
    Slot(u64),
    /// Memory that the peer reads.
    Region(ReadSource),
}

impl Tx {
    pub fn new() -> Self {
        Self {
            current: None,
            send_msn: 0,
            read_msn: 0,
            atomic_msn: 0,
            ack_msn: 0,
            acks_queued: Vec::new(),
            messages: 0,
            ack_requests: AckRequests::default(),
            stopped: false,
            rnr_retry: None,
            sq_turn: false,
            all_cut: false,
        }
    }

    /// The next message of every queue gets this MSN.
    pub fn set_msn(&mut self, msn: u32) {
        let last = msn.wrapping_sub(1);
        (self.send_msn, self.read_msn, self.ack_msn) = (last, last, last);
        self.atomic_msn = last;
    }

    /// Numbers the next Read Request or Atomic Request.
    pub fn next_read_msn(&mut self) -> u32 {
        self.read_msn = self.read_msn.wrapping_add(1);
        self.read_msn
    }

    /// Numbers the next Atomic Response.
    pub fn next_atomic_msn(&mut self) -> u32 {
        self.atomic_msn = self.atomic_msn.wrapping_add(1);
        self.atomic_msn
    }

    /// Acknowledgements sent so far; wraps.
    pub fn acks(&self) -> u32 {
        self.ack_msn
    }

    /// Messages sent so far whose placement the peer counts.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// A Response is half cut.
    pub fn responding(&self) -> bool {
        self.current.is_some_and(|current| matches!(current.source, Source::Region(_)))
    }

    /// No message is half cut.
    pub fn idle(&self) -> bool {
        self.current.is_none()
    }

    /// Forgets the message being cut.
    pub fn stop(&mut self) {
        self.current = None;
        self.stopped = true;
    }
}
