//! MPA connection set-up (RFC 5044 section 7, RFC 6581): which end sends first, and what the two ends agree
//! on.
//!
//! ```text
//!   Initiator                                         Responder
//!   Initiator::new ── poll_transmit ── Request ─────▶ handle_input ──▶ Request to the program
//!                                                     accept / reject
//!   Accepted | Rejected ◀── handle_input ── Reply ─── poll_transmit ── Negotiated
//!        │
//!        └── ready-to-receive indication (the first FPDU, sent by the owner of the stream) ──▶
//! ```
//!
//! Neither machine knows a socket or a clock. `want()` returns how many bytes of the stream the machine takes
//! next, and the caller must read no more than these: the byte after a frame belongs to the stream's first
//! FPDU, which this machine does not handle. Time limits are the caller's task (RFC 5044 section 7.1.2 rule
//! 10).
//!
//! What the RFCs leave open is decided here:
//! - An initiator always requests the peer-to-peer model with a Write or Read indication, because the plain
//!   model makes the responder wait for the first FPDU, and a server that sends first would wait for ever. It
//!   never offers a Send, which would use up one of the program's receives. If the responder does not agree
//!   to the model, the initiator still sends the Write.
//! - A responder raises its IRD to what the initiator requests, up to the limit of the device: read depth
//!   costs us nothing, and programs give small numbers without meaning them.
//! - Two uwarp ends recognize each other by reserved flag bits: see [`peer`].

mod host;
mod initiator;
pub mod peer;
mod reader;
mod responder;

pub use host::{Host, HostKey};
pub use initiator::{Initiator, InitiatorConfig, Outcome, Rejection};
pub use peer::PeerData;
pub use responder::{AcceptParams, Request, Responder, ResponderPolicy};

use thiserror::Error;
use uwarp_wire::ddp;
use uwarp_wire::mpa::{self, Enhanced, FrameKind};
use uwarp_wire::rdmap::Opcode;
use uwarp_wire::terminate::{self, Terminate, TerminateError};

use crate::framing::{Framing, Mpa};
use crate::tx::Message;

/// MPA revision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Revision {
    /// RFC 5044.
    One = 1,
    /// RFC 6581.
    Two = 2,
}

impl Revision {
    /// From the number on the wire; `None` for revisions that we do not support.
    pub const fn from_wire(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            _ => None,
        }
    }

    /// The number on the wire.
    pub const fn to_wire(self) -> u8 {
        self as u8
    }
}

/// The ready-to-receive indication of peer-to-peer connections, which the initiator sends first, as one end
/// has negotiated it (RFC 6581 section 9.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rtr {
    /// Client-server model: none.
    None,
    /// Initiator: send a zero-length RDMA Write first; also if the responder did not agree to the
    /// peer-to-peer model.
    SendWrite,
    /// Initiator: send a zero-length RDMA Read Request first.
    SendRead,
    /// Responder: expect one as the first FPDU: a zero-length Write or Read. A message with content also
    /// counts.
    Expect,
}

/// STag and tagged offset of a ready-to-receive Write without data of ours. They mean nothing, because
/// nothing is placed, but some hardware may treat STag 0 specially (siw's source says so). So siw and cxgb4
/// send STag 1, and so do we.
pub const RTR_STAG_TO: (u32, u64) = (uwarp_wire::rdmap::EMPTY_STAG, 0);

/// Read depths of one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depths {
    /// Inbound: RDMA Reads and atomics of the peer that may be outstanding.
    pub ird: u16,
    /// Outbound: RDMA Reads and atomics of this end that may be outstanding.
    pub ord: u16,
    /// `false`: this end negotiates depths by other means; frames carry 0x3FFF and the numbers are used
    /// unchanged.
    pub negotiate: bool,
}

impl Depths {
    /// Depths to negotiate.
    pub const fn negotiated(ird: u16, ord: u16) -> Self {
        Self { ird, ord, negotiate: true }
    }

    /// Depths as a frame carries them.
    fn to_wire(self) -> (u16, u16) {
        if self.negotiate { (self.ird, self.ord) } else { (mpa::NO_AUTO, mpa::NO_AUTO) }
    }
}

/// What both ends have negotiated: everything that the stream needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Negotiated {
    /// Whether we sent the request.
    pub initiator: bool,
    /// MPA revision of the frames.
    pub revision: Revision,
    /// CRCs are generated and checked, in both directions.
    pub crc: bool,
    /// The peer wants markers in what we send.
    pub send_markers: bool,
    /// The peer puts markers into what we receive, because we requested them.
    pub receive_markers: bool,
    /// Our inbound read depth.
    pub ird: u16,
    /// Our outbound read depth, at most the peer's inbound one where that is known.
    pub ord: u16,
    /// Ready-to-receive indication.
    pub rtr: Rtr,
    /// The peer's depths and model, to pass on to the program (RFC 6581 section 9.1); `None` without enhanced
    /// set-up.
    pub peer_enhanced: Option<Enhanced>,
    /// Our request set a reserved flag, and the reply does not have it. Linux siw returns the flags of a
    /// request; adapters do not.
    pub drops_reserved_flags: bool,
    /// The peer is uwarp.
    pub peer_is_uwarp: bool,
    /// The introduction of a uwarp peer. A responder gets it only with the ready-to-receive indication, see
    /// [`PeerData::from_rtr`].
    pub peer: Option<PeerData>,
    /// What the responder has said of its process: to an initiator on the same host.
    pub host: Option<Host>,
    /// STag and tagged offset of our ready-to-receive Write, see [`PeerData::to_rtr`]; [`RTR_STAG_TO`] toward
    /// strangers.
    pub rtr_stag_to: (u32, u64),
    /// The reply's private data for the program (initiator); empty at the responder, which got it in
    /// [`Request`].
    pub private_data: Vec<u8>,
}

/// Why set-up failed. Except for [`SetupError::Misuse`], the caller must close the connection after sending
/// what `poll_transmit` still returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SetupError {
    /// Invalid bytes: not an MPA frame.
    #[error("not an MPA frame: wrong key")]
    BadKey,
    /// Invalid bytes: a request where a reply was expected (both ends initiate), or the other way round.
    #[error("MPA {0:?} frame where the other kind was expected")]
    WrongKind(FrameKind),
    /// Invalid bytes: more private data than the RFC allows.
    #[error("{0} bytes of private data announced; at most 512 are legal")]
    PrivateDataTooLong(u16),
    /// Invalid bytes: enhanced set-up announced, but no room for it.
    #[error("enhanced set-up announced, but the private data is too short for it")]
    EnhancedMissing,
    /// Peer incompatible: a revision that we do not support.
    #[error("MPA revision {0} is not supported")]
    Revision(u8),
    /// Peer incompatible: it answered an enhanced request without enhanced set-up (RFC 6581 section 10
    /// forbids it). So it took our four bytes of enhanced data for the program's.
    #[error("the peer does not support enhanced set-up")]
    NotEnhanced,
    /// Peer incompatible: it wants more outstanding Reads than this end can serve.
    #[error("the peer needs an inbound read depth of {wanted}; this end supports at most {limit}")]
    InsufficientIrd {
        /// The responder's ORD.
        wanted: u16,
        /// Our limit.
        limit: u16,
    },
    /// Peer incompatible: no ready-to-receive indication that both ends support.
    #[error("no ready-to-receive indication in common")]
    NoMatchingRtr,
    /// The peer closed the connection in the middle of set-up.
    #[error("connection closed during set-up")]
    Closed {
        /// No byte of a frame had arrived.
        silent: bool,
    },
    /// The program's private data does not fit into the frame.
    #[error("{len} bytes of private data do not fit; at most {max} do")]
    PrivateDataLimit {
        /// What was given.
        len: usize,
        /// What fits.
        max: usize,
    },
    /// API misuse: a call out of order. Nothing has changed.
    #[error("call out of order")]
    Misuse,
}

impl Negotiated {
    /// The framing of the stream.
    pub fn framing(&self) -> Framing {
        let Self { crc, send_markers, receive_markers, .. } = *self;
        Framing::Mpa(Mpa { crc, send_markers, receive_markers })
    }

    /// The only FPDU of a stream that cannot begin because of an error at this end (RFC 6581 section 9.3).
    /// `None` if set-up was not enhanced: the code is RFC 6581's.
    pub fn local_error(&self) -> Option<Vec<u8>> {
        self.peer_enhanced?;
        Some(terminate_fpdu(TerminateError::Mpa(terminate::Mpa::LocalCatastrophic), self.framing()))
    }
}

impl SetupError {
    /// The Terminate that reports this error to the peer. After an error in a frame itself, the connection is
    /// closed at once (RFC 5044 section 8, code 4), because there is no stream yet whose framing both ends
    /// know.
    pub const fn terminate(self) -> Option<TerminateError> {
        match self {
            Self::InsufficientIrd { .. } => Some(TerminateError::Mpa(terminate::Mpa::InsufficientIrd)),
            Self::NoMatchingRtr => Some(TerminateError::Mpa(terminate::Mpa::NoMatchingRtr)),
            Self::BadKey
            | Self::WrongKind(_)
            | Self::PrivateDataTooLong(_)
            | Self::EnhancedMissing
            | Self::Revision(_)
            | Self::NotEnhanced
            | Self::Closed { .. }
            | Self::PrivateDataLimit { .. }
            | Self::Misuse => None,
        }
    }
}

/// Largest number of bytes of the program's private data in a frame with these properties.
pub const fn private_data_limit(enhanced: bool, peer_data: bool) -> usize {
    let mut limit = mpa::MAX_PRIVATE_DATA;
    if enhanced {
        limit -= Enhanced::LEN;
    }
    if peer_data {
        limit -= PeerData::LEN;
    }
    limit
}

/// A frame in bytes: fixed part, enhanced data, the program's data, our data. `host` is left out if the
/// program's data is too long for it.
fn frame(
    kind: FrameKind,
    mut flags: u8,
    revision: Revision,
    enhanced: Option<Enhanced>,
    private_data: &[u8],
    peer: Option<PeerData>,
    host: Option<Host>,
) -> Result<Vec<u8>, SetupError> {
    let max = private_data_limit(enhanced.is_some(), peer.is_some());
    let too_long = SetupError::PrivateDataLimit { len: private_data.len(), max };
    if private_data.len() > max {
        return Err(too_long);
    }
    let mut body = Vec::with_capacity(mpa::FRAME_LEN + mpa::MAX_PRIVATE_DATA);
    if let Some(enhanced) = enhanced {
        flags |= mpa::FLAG_S;
        body.extend_from_slice(&enhanced.to_bytes());
    }
    body.extend_from_slice(private_data);
    if let Some(peer) = peer {
        let host = host.filter(|_| body.len() + Host::LEN + PeerData::LEN <= mpa::MAX_PRIVATE_DATA);
        body.extend(host.iter().flat_map(Host::to_bytes));
        body.extend_from_slice(&peer.to_bytes_behind(host));
    }
    let private_data_len = u16::try_from(body.len()).map_err(|_| too_long)?;
    let fixed = mpa::SetupFrame { kind, flags, revision: revision.to_wire(), private_data_len };
    let mut bytes = fixed.to_bytes().to_vec();
    bytes.append(&mut body);
    Ok(bytes)
}

/// A stream whose only FPDU is a Terminate.
fn terminate_fpdu(error: TerminateError, framing: Framing) -> Vec<u8> {
    let mut bytes = [0; Terminate::MAX_LEN];
    let len = Terminate::new(error, None).emit(&mut bytes);
    let message =
        Message::Untagged { opcode: Opcode::Terminate, qn: ddp::QN_TERMINATE, msn: 1, invalidate: 0 };
    let segment = message.whole(u32::try_from(len).unwrap_or(0));
    let mut out = Vec::new();
    framing.sender().stage_bytes(&mut out, &segment, bytes.get(..len).unwrap_or(&[]));
    out
}

#[cfg(test)]
mod tests;
