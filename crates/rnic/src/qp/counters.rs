//! What a queue pair has done, counted in places where its lock is held anyway.

use std::ops::AddAssign;

use serde::Serialize;

use crate::wr::SendOp;

/// Counts since the queue pair was created; successive connections on it add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Counters {
    /// Messages that this end has sent and that the lower layer has taken, or the peer has acknowledged where
    /// it does so.
    pub sent: ByOpcode,
    /// Messages that have arrived and are placed.
    pub received: ByOpcode,
    /// Sends that found no receive posted, so that this end stopped reading until there was one.
    pub receive_stalls: u64,
    /// Times that the socket had no room for bytes to send.
    pub room_stalls: u64,
    /// Segments that the lower layer retransmitted, as far as the owner has reported
    /// ([`LinkEvent::Resent`](super::LinkEvent::Resent)).
    pub retransmits: u64,
    /// Terminates sent.
    pub terminates_sent: u64,
    /// Terminates received.
    pub terminates_received: u64,
    /// Work requests that completed with an error, without the flushed ones.
    pub failed: u64,
    /// Work requests that were flushed.
    pub flushed: u64,
}

/// Messages of one direction, by what carries the payload on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ByOpcode {
    /// Sends of all kinds.
    pub send: Messages,
    /// RDMA Writes, with or without immediate data. Received Writes count their bytes as they arrive, and
    /// their number when they are complete.
    pub write: Messages,
    /// Read Responses: received ones answer Reads of this end, sent ones answer Reads of the peer (counted
    /// when they begin).
    pub read_response: Messages,
    /// Atomic Responses: received ones answer atomic operations of this end, sent ones those of the peer.
    pub atomic_response: Messages,
}

/// Number of messages, and their payload in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[allow(missing_docs)]
pub struct Messages {
    pub messages: u64,
    pub bytes: u64,
}

impl Messages {
    /// Counts one more message.
    pub(super) fn count(&mut self, bytes: u32) {
        self.messages += 1;
        self.bytes += u64::from(bytes);
    }

    /// One that was counted does not count after all.
    pub(super) fn uncount(&mut self, bytes: u32) {
        self.messages -= 1;
        self.bytes -= u64::from(bytes);
    }
}

impl Counters {
    /// A send work request has completed without an error.
    pub(super) fn completed(&mut self, op: SendOp, bytes: u32) {
        match op {
            SendOp::Send { .. } | SendOp::SendImmediate { .. } => self.sent.send.count(bytes),
            SendOp::Write { .. } | SendOp::WriteImmediate { .. } | SendOp::WriteRecord { .. } => {
                self.sent.write.count(bytes);
            }
            SendOp::Read { .. } => self.received.read_response.count(bytes),
            SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => self.received.atomic_response.count(bytes),
            SendOp::LocalInvalidate { .. } | SendOp::Bind(_) => {}
        }
    }
}

impl AddAssign for Messages {
    fn add_assign(&mut self, other: Self) {
        self.messages += other.messages;
        self.bytes += other.bytes;
    }
}

impl AddAssign for ByOpcode {
    fn add_assign(&mut self, other: Self) {
        self.send += other.send;
        self.write += other.write;
        self.read_response += other.read_response;
        self.atomic_response += other.atomic_response;
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.receive_stalls += other.receive_stalls;
        self.room_stalls += other.room_stalls;
        self.retransmits += other.retransmits;
        self.terminates_sent += other.terminates_sent;
        self.terminates_received += other.terminates_received;
        self.failed += other.failed;
        self.flushed += other.flushed;
    }
}

/// A queue pair at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Snapshot {
    /// What it has done.
    #[serde(flatten)]
    pub counters: Counters,
    /// Reads and atomics of this end that wait for their responses.
    pub reads_outstanding: usize,
    /// Reads and atomics of the peer that wait for our responses.
    pub reads_to_serve: usize,
    /// Send work requests that are not complete.
    pub sends_posted: usize,
    /// Receives that are not used.
    pub receives_posted: usize,
    /// Bytes that wait for room in the socket.
    pub waiting_bytes: usize,
    /// A Send waits for a receive.
    pub stalled: bool,
    /// Work is posted that may not be sent before the peer's first frame.
    pub muted: bool,
    /// The peer is a uwarp end.
    pub peer_is_uwarp: bool,
}
