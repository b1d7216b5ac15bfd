//! Reliable datagrams (docs/rd.md): the machine of one process, without sockets, clock or randomness of its
//! own.
//!
//! Messages go to any number of peers over one UDP port. For each peer there is one exchange, made with the
//! first message and forgotten a minute after the last packet; queue pairs share it, and nothing is kept for
//! a pair of queue pairs that has nothing in flight.
//!
//! ```text
//!   post ──▶ ┌──────────────────────────── Rd ────────────────────────────┐
//!            │ contact: Hello, Challenge, Open, dead tokens               │ ◀── handle_input ── datagram
//!            │ exchange: ┌ outgoing ── numbers, repairs, failing in turn  │
//!            │           │ recovery ── packets in flight, RTT             │ ──▶ poll_transmit ─ datagram
//!            │           │ congestion ── how many of them, and when       │
//!            │ room: what peers may send, for the socket's memory         │
//!            │           │ received ── ACK ranges                         │
//!            │           ├ incoming ── once, in order, held               │ ──▶ poll_action
//!            │           └ streams ─── positions, windows, ends           │ ──▶ poll_stream_event
//!            └─────────────────▲──────────────────────┬───────────────────┘
//!                              └──── on_placed ◀──────┴─ arrivals: segments to place
//! ```
//!
//! Payload never passes through: what is sent is named by [`Payload`], and what arrives by [`Arrival`]. The
//! owner moves the bytes. Only what must wait for its turn is copied, at most 256 KiB for an exchange.
//!
//! After each call of a verb, the owner does what [`Rd::poll_action`] says, sends what
//! [`Rd::poll_transmit`] makes, and sets a timer to [`Rd::poll_timeout`].

mod congestion;
mod contact;
mod draws;
mod exchange;
mod incoming;
mod joined;
mod left;
mod message;
mod outgoing;
mod packet;
mod path;
mod peer;
mod range_set;
mod received;
mod recovery;
mod room;
mod rtt;
mod sorted;
mod stream_calls;
mod streams;
mod unrepeated;

use std::time::Duration;

pub use congestion::{Window, WindowChange};
pub use contact::{PortAnswer, PostError, Rd};
pub use message::{
    Action, Arrival, Bytes, Failure, MessageId, Outgoing, Payload, Pieces, Placed, QpnPair, Route, Target,
    Ticket,
};
pub use outgoing::rnr_delay;
pub use packet::PacketBuf;
pub use range_set::RangeSet;
pub use stream_calls::StreamAnswers;
pub use streams::{StreamEnd, StreamEvent, StreamNews};

/// What a process sets once.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Bytes of the longest packet, as UDP payload: 1,472 over IPv4 on Ethernet, 1,452 over IPv6.
    pub packet_len: usize,
    /// The same between two processes of one address, whose packets never leave the host.
    pub local_packet_len: usize,
    /// Bytes of the longest packet that this process takes from others: its peers find out what the path
    /// takes.
    pub most_taken: usize,
    /// Requests to a peer whose answers are not there, at most. A receiver should have places for twice as
    /// many answers: one that had to come again would keep its number meanwhile, and with many of them no
    /// number would be left for the answers to the peer's own.
    pub most_requests: usize,
    /// Bytes in flight of an exchange at most, whatever its path and its peer's socket take.
    pub window: u64,
    /// A peer that owes something and says nothing for this long is gone; at most 30 s.
    pub patience: Duration,
    /// Exchanges and dead tokens at most, and those of one address.
    pub most_peers: usize,
    /// Of one address.
    pub most_peers_of_one: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            packet_len: 1472,
            local_packet_len: 1472,
            most_taken: 1472,
            most_requests: 64,
            window: 1 << 20,
            patience: Duration::from_secs(10),
            most_peers: 65_536,
            most_peers_of_one: 4096,
        }
    }
}
