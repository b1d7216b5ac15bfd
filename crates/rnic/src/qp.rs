//! Queue pairs: what they have in common, and their services.
//!
//! Every service is a machine without sockets: [`RcCore`] (reliable connection), [`UdCore`] (unreliable
//! datagrams), [`RdCore`] (reliable datagrams) and [`UcCore`] (unreliable connection). What does not depend
//! on the service is in `shell`, which each core owns. The owner of a core knows its service, so the data
//! path looks nothing up.
//! `uwarp_driver::QueuePair` is a queue pair of any service.

mod attr;
pub mod counters;
mod datagrams;
mod rc;
mod rd;
mod records;
mod rights;
mod rnr;
mod shell;
mod state;
mod uc;
mod ud;

pub use attr::{QpAttr, QpCaps, QpInit, QpModify};
pub use counters::{Counters, Snapshot};
pub use datagrams::{Arrival, Dropped, Drops, UdSendWr};
pub use rc::{
    Action, Answers, Disconnect, DisconnectReply, End, LinkCaps, LinkEvent, Now, Psns, RcCore, Rtr, RxPlan,
    ShownPsns, StreamParams,
};
pub use rd::{AnswerBytes, RdAnswer, RdBytes, RdCore, RdInit, RdMessage, RdSegment};
pub use records::{MOST_RANGES, MOST_RECORDS, Record};
pub use rights::Source;
pub use rnr::rnr_limit;
pub use state::QpState;
pub use uc::{UcCore, UcMessage, UcPlaced};
pub use ud::{MAX_PAYLOAD as MAX_DATAGRAM, MOST_PAYLOAD as MOST_DATAGRAM, PeerError, Receiving, Run, UdCore};

pub use crate::queues::MAX_MESSAGE;
