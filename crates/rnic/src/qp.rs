//! Queue pairs: what they have in common, and their services.
//!
//! Every service is a machine without sockets: [`RcCore`] (reliable connection) and [`UdCore`] (unreliable
//! datagrams). What does not depend on the service is in `shell`, which each core owns. The owner of a core
//! knows its service, so the data path looks nothing up. `uwarp_driver::QueuePair` is a queue pair of any
//! service.

mod attr;
pub mod counters;
mod rc;
mod rnr;
mod shell;
mod state;
mod ud;

pub use attr::{QpAttr, QpCaps, QpInit, QpModify};
pub use counters::{Counters, Snapshot};
pub use rc::{
    Action, Answers, Disconnect, DisconnectReply, End, LinkCaps, LinkEvent, Now, Psns, RcCore, Rtr, RxPlan,
    ShownPsns, StreamParams,
};
pub use rnr::rnr_limit;
pub use state::QpState;
pub use ud::{
    Arrival, Dropped, Drops, MAX_PAYLOAD as MAX_DATAGRAM, MOST_PAYLOAD as MOST_DATAGRAM, PeerError, UdCore,
    UdSendWr,
};

pub use crate::queues::MAX_MESSAGE;
