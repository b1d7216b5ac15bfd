//! Events and connection parameters.

use std::net::SocketAddr;
use std::sync::Arc;

/// Most bytes of private data that a program gives or gets: one length octet in rdma_cm's interface.
pub const MAX_PRIVATE_DATA: usize = 255;

/// As a read depth in [`ConnParam`]: as much as the device offers.
pub const MAX_DEPTH: u8 = 0xFF;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// An address was resolved.
    AddressResolved,
    /// An address could not be resolved.
    AddressError,
    /// A route was resolved.
    RouteResolved,
    /// A listener has a request; the event's id is new.
    ConnectRequest,
    /// Connecting or accepting failed in a way that is neither of the next two.
    ConnectError,
    /// The peer cannot be reached, or does not answer in time.
    Unreachable,
    /// The peer refuses the connection: its program rejected it, no program listens, or it hung up.
    Rejected,
    /// The peer has accepted, and the program moves its queue pair itself ([`crate::Id::connect_by_number`]).
    ConnectResponse,
    /// The stream runs.
    Established,
    /// The stream ended.
    Disconnected,
    /// Some time after that: over InfiniBand the queue pair's number may be used again. In the views that
    /// pass for InfiniBand.
    TimewaitExit,
    /// The program may attach its queue pair to a group ([`crate::Id::join`]).
    MulticastJoin,
    /// Addresses were looked up by name.
    NamesResolved,
    /// The program's own, with its number.
    User(u64),
}

/// Why a peer rejects, as InfiniBand's connection manager tells programs (`enum ib_cm_rej_reason` of the
/// kernel).
pub(crate) mod reason {
    /// No program listens at the port.
    pub const INVALID_SERVICE_ID: i32 = 8;
    /// The program rejects the connection, or destroyed its request without an answer.
    pub const CONSUMER_DEFINED: i32 = 28;
}

/// Connection parameters as a program gives or gets them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnParam {
    /// Inbound read depth: Reads and atomics of the peer that may be outstanding here. [`MAX_DEPTH`]: as many
    /// as the device offers.
    pub responder_resources: u8,
    /// Outbound read depth: Reads and atomics that may be outstanding at the peer. [`MAX_DEPTH`]: as many as
    /// the device offers.
    pub initiator_depth: u8,
    /// Passed to the peer and otherwise unused, here as in every rdma_cm.
    pub flow_control: u8,
    /// Has no effect over TCP.
    pub retry_count: u8,
    /// How often the peer must retry when no receive is posted here. Times our RNR timer, this is the time
    /// that its messages may wait, also those of a peer that is not uwarp (docs/adr/004). 7: without limit.
    /// In events: what the peer gave, for messages of ours.
    pub rnr_retry_count: u8,
    /// Whether the queue pair has a shared receive queue.
    pub srq: bool,
    /// Queue pair number; in events the peer's, 0 where it is not known.
    pub qp_num: u32,
}

impl ConnParam {
    /// The parameters that rdma_cm uses when a program gives none.
    pub const DEFAULT: Self = Self {
        responder_resources: MAX_DEPTH,
        initiator_depth: MAX_DEPTH,
        flow_control: 0,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: false,
        qp_num: 0,
    };

    /// All zero, as in events that have no parameters.
    pub(crate) const NONE: Self = Self {
        responder_resources: 0,
        initiator_depth: 0,
        flow_control: 0,
        retry_count: 0,
        rnr_retry_count: 0,
        srq: false,
        qp_num: 0,
    };
}

/// The destination of datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatagramParam {
    /// The queue pair; 0 in a request.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
    /// The address of this host that they come from.
    pub local: SocketAddr,
    /// The address that they go to; it may be a group's.
    pub peer: SocketAddr,
    /// The program's own, given to [`crate::Id::join`].
    pub context: usize,
}

/// The id that events belong to. It counts its events.
pub trait Owner {
    /// Unique among the owners on one channel.
    fn key(&self) -> u64;
    /// The program has taken an event.
    fn event_reported(&self);
    /// The program has acknowledged an event.
    fn event_acknowledged(&self);
    /// The event was a [`EventKind::ConnectRequest`] to this listener.
    fn request_delivered(&self);
    /// It was the one that gives the program this id.
    fn given(&self);
}

/// An event. It is acknowledged by [`Event::acknowledge`]; an id waits for that before it is destroyed.
#[derive(Debug)]
pub struct Event<I> {
    /// The id it concerns; for [`EventKind::ConnectRequest`] the new one.
    pub id: Arc<I>,
    /// The listener of a [`EventKind::ConnectRequest`].
    pub listener: Option<Arc<I>>,
    /// What happened.
    pub kind: EventKind,
    /// 0, or a negative errno; with [`EventKind::Rejected`] in the views that pass for InfiniBand the reason,
    /// as InfiniBand's connection manager counts them.
    pub status: i32,
    /// Parameters of the peer, where there are any.
    pub param: ConnParam,
    /// For ids of datagrams: the destination.
    pub datagram: Option<Box<DatagramParam>>,
    /// The peer program's private data, at most [`MAX_PRIVATE_DATA`] bytes.
    pub private_data: Vec<u8>,
}

impl<I: Owner> Event<I> {
    /// The id that accounts for this event: the listener where there is one.
    pub fn owner(&self) -> &Arc<I> {
        self.listener.as_ref().unwrap_or(&self.id)
    }

    /// The program acknowledges the event.
    pub fn acknowledge(self) {
        self.owner().event_acknowledged();
    }
}
