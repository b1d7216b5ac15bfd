//! What is sent, what arrives, and what becomes of it: the values that pass between the machine and its
//! owner.

use std::net::SocketAddr;
use std::ops::Range;

use uwarp_wire::ddp::{self, QN_READ_REQUEST, QN_SEND, Tagged, Untagged};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::segment::First;

pub use super::joined::Pieces;

/// The two ends of an exchange: an address and home port of this process, and one of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Route {
    /// This process.
    pub local: SocketAddr,
    /// The peer.
    pub remote: SocketAddr,
}

/// From which queue pair to which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpnPair {
    /// The sender's, 24 bits.
    pub source: u32,
    /// The receiver's, 24 bits.
    pub destination: u32,
}

/// Where a message goes at its target, as its DDP header says it (RFC 5041).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// An untagged queue. Queue 0 is that of Sends, whose messages take a receive.
    Untagged {
        /// The queue.
        qn: u32,
        /// The upper layer's byte, RDMAP's control field.
        rsvdulp: u8,
        /// The upper layer's four bytes.
        rsvdulp32: u32,
    },
    /// A region.
    Tagged {
        /// Its steering tag.
        stag: u32,
        /// Where the first byte of the message goes.
        to: u64,
        /// The upper layer's byte.
        rsvdulp: u8,
    },
}

impl Target {
    /// Whether the message is a Send, which takes a receive.
    pub fn takes_receive(&self) -> bool {
        matches!(self, Target::Untagged { qn: QN_SEND, .. })
    }

    /// Whether the receiver answers the message by one of its own: a Read Request or an Atomic Request.
    pub fn is_answered(&self) -> bool {
        matches!(self, Target::Untagged { qn: QN_READ_REQUEST, .. })
    }

    /// That of the message to which a segment with this DDP header belongs, `offset` bytes from its start.
    pub(super) fn of(ddp: &ddp::Header, offset: u32) -> Self {
        match *ddp {
            ddp::Header::Untagged(Untagged { qn, rsvdulp, rsvdulp32, .. }) => {
                Self::Untagged { qn, rsvdulp, rsvdulp32 }
            }
            ddp::Header::Tagged(Tagged { stag, to, rsvdulp, .. }) => {
                Self::Tagged { stag, to: to.wrapping_sub(u64::from(offset)), rsvdulp }
            }
        }
    }

    /// The DDP header of a segment: number of its message, place in it, whether it is the last one.
    pub fn header(&self, message: u64, offset: u32, last: bool) -> ddp::Header {
        match *self {
            Target::Untagged { qn, rsvdulp, rsvdulp32 } => {
                let msn = uwarp_wire::rd::low(message);
                ddp::Header::Untagged(Untagged { last, rsvdulp, rsvdulp32, qn, msn, mo: offset })
            }
            Target::Tagged { stag, to, rsvdulp } => {
                ddp::Header::Tagged(Tagged { last, stag, to: to.wrapping_add(u64::from(offset)), rsvdulp })
            }
        }
    }
}

/// A message to send. Its payload stays where it is, and is named by [`Payload`] when it is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outgoing {
    /// From which queue pair to which.
    pub pair: QpnPair,
    /// The Q_Key, the immediate and the job key.
    pub first: First,
    /// Where it goes.
    pub target: Target,
    /// Bytes of payload.
    pub len: u32,
    /// It is delivered after all ordered messages of this pair that were posted before.
    pub ordered: bool,
    /// How often it may find no receive before it fails; 7: without limit, as in InfiniBand.
    pub rnr_retry: u8,
    /// It is sent once, and nobody hears what became of it (flag N). It ends with `Ok` as soon as its last
    /// packet was made, in the order of the posts. Then it has no order and no retries.
    pub unrepeated: bool,
}

/// Names a posted message, or a stream, until it has ended. Never used twice in a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) u64);

/// Why a message failed. It may have been delivered, unless it was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The receiver does not take it.
    Refused(Reason),
    /// No receive was posted for it until its retries ended.
    NoReceive,
    /// The peer did not answer within the patience.
    Silent,
    /// The peer's process is another one now, or has left.
    Restarted,
    /// The peer speaks no version that this process speaks.
    Incompatible,
    /// A message before it in its flow has failed.
    Flushed,
    /// The owner has given it up.
    Withdrawn,
}

/// Names a message that arrives: an exchange of this process and the number in it. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageId {
    /// Counts the exchanges of the process.
    pub exchange: u64,
    /// The message's number.
    pub number: u64,
}

/// Something that the owner must do. It must be done before the next call of `poll_transmit`: what is sent
/// there may say that it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A posted message has ended.
    Finished {
        /// Which.
        ticket: Ticket,
        /// `Ok`: it is Done, or has left if it is not repeated. Never of a message with an answer, whose
        /// success is that answer.
        outcome: Result<(), Failure>,
    },
    /// A message has arrived whole, and it is its turn: complete its receive, if it took one.
    Deliver {
        /// Where it came from.
        route: Route,
        /// Which.
        message: MessageId,
        /// From which queue pair to which.
        pair: QpnPair,
        /// Bytes of payload.
        len: u32,
        /// The Q_Key, the immediate and the job key of its first segment.
        first: First,
        /// Whether it took a receive: a Send, or a message with an immediate.
        takes_receive: bool,
    },
    /// Say what the interface takes that leads to the peer, by [`Rd::search`](super::Rd::search). Packets of
    /// an owner that does not keep their first length.
    AskLength {
        /// To whom.
        route: Route,
    },
    /// The peer leaves something without an answer: ask its system whether a process still has the port, and
    /// say so by [`Rd::port_is`](super::Rd::port_is). It need not be known; this is repeated.
    AskPort {
        /// Whose port.
        route: Route,
        /// It is silent. (If not, the answer only shows what later ones are worth.)
        urgent: bool,
    },
    /// Put the receive of this message back to the front of its queue. Several come last message first, so
    /// that the order of the receives stays.
    TakeBack {
        /// Which.
        message: MessageId,
        /// Its queue pair is the destination.
        pair: QpnPair,
    },
}

/// Where the payload of a segment that has arrived is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bytes {
    /// In the datagram that was just handled.
    Datagram(Range<usize>),
    /// In those that were just handled together.
    Joined(Pieces),
    /// It was held until its turn came.
    Held(Vec<u8>),
}

impl Bytes {
    /// How many.
    #[allow(clippy::len_without_is_empty, reason = "an empty message has none, as any other has some")]
    pub fn len(&self) -> usize {
        match self {
            Bytes::Datagram(range) => range.len(),
            Bytes::Joined(pieces) => pieces.len(),
            Bytes::Held(bytes) => bytes.len(),
        }
    }
}

/// A segment to place. The owner answers each with a [`Placed`], in their order. The first of a Send, or of a
/// message with an immediate, takes a receive, which the owner keeps with the message's id until it is
/// delivered or taken back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Where it came from.
    pub route: Route,
    /// Its message.
    pub message: MessageId,
    /// From which queue pair to which.
    pub pair: QpnPair,
    /// The Q_Key, the immediate and the job key. Of a Send in its first segment only; of all others in each
    /// one, because each must have the right to its memory.
    pub first: Option<First>,
    /// Its DDP header.
    pub ddp: ddp::Header,
    /// Where the payload begins in the message.
    pub offset: u32,
    /// Bytes of the whole message.
    pub message_len: u32,
    /// The payload.
    pub bytes: Bytes,
    /// Its sender does not repeat it. The machine knows nothing more of its message: segments may be missing
    /// or come twice, and what the owner answers changes nothing. Numbers of such messages are a count of
    /// their own, which rises in the order of the posts.
    pub unrepeated: bool,
    /// What the owner returns without looking at it.
    pub(super) packet: u64,
    pub(super) len: u32,
}

/// What became of an [`Arrival`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placed {
    /// The payload is in its place. A message that takes a receive has one from now on.
    Done,
    /// No receive is posted; try again after this time, coded as InfiniBand's RNR NAK timer field.
    NoReceive(u8),
    /// The message is not taken, for this reason.
    Refused(Reason),
}

/// Payload that is in a packet: these bytes of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Payload {
    /// Which message, or stream.
    pub ticket: Ticket,
    /// Where it begins in the message; of a stream the low 32 bits of its position.
    pub offset: u32,
    /// Its bytes.
    pub len: u32,
    /// It goes in front of this byte of [`PacketBuf::heads`](super::PacketBuf::heads).
    pub at: usize,
    /// The segment was sent before. The memory may have changed since, so copy it before the CRC is computed.
    pub again: bool,
}
