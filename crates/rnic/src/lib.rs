//! The RNIC: protection domains, memory regions, queue pairs and completion queues.
//!
//! No sockets and no clock live here. A queue pair ([`qp::RcCore`]) turns work requests into bytes to
//! send ([`out::OutQueue`]) and received bytes into placements and completions; `uwarp-driver` moves the
//! bytes. Names are those of the verbs (and of RFC 5040/5041 where the verbs have none).
//!
//! Registered memory is touched in `uwarp-mem` alone.

#![forbid(unsafe_code)]

pub mod ah;
pub mod cq;
pub mod error;
pub mod event;
mod glances;
pub mod mr;
pub mod out;
pub mod pd;
pub mod qp;
mod queues;
mod random;
pub mod srq;
mod sync;
pub mod trace;
pub mod wr;

pub use ah::Ah;
pub use cq::Cq;
pub use error::VerbsError;
pub use event::{AsyncEvent, AsyncSink, CompletionSink, EventKind};
pub use mr::{Access, Mr};
pub use pd::Pd;
pub use srq::{Srq, SrqAttr, SrqInit};
pub use wr::{RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus};
