//! The end that sends the request.

use uwarp_wire::mpa::{self, Enhanced, FrameKind};

use super::reader::{FrameReader, Received};
use super::{Depths, Negotiated, PeerData, RTR_STAG_TO, Revision, Rtr, SetupError, frame, terminate_fpdu};

/// What an initiator requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitiatorConfig {
    /// Revision of the request. Revision one has neither depths nor the peer-to-peer model.
    pub revision: Revision,
    /// Request CRCs; otherwise they are off unless the responder requests them.
    pub crc: bool,
    /// Request markers in what the responder sends.
    pub markers: bool,
    /// Our read depths before negotiation.
    pub depths: Depths,
    /// The largest inbound read depth that this end can serve, for a responder that insists on more than was
    /// offered.
    pub max_ird: u16,
    /// Announce that this end is uwarp, and send this data once the peer is known to be uwarp too. `None`:
    /// use only the RFCs' bits. Needs revision two.
    pub peer: Option<PeerData>,
    /// Put `peer` into the request as well. A stranger then sees twelve bytes more than the program gave.
    pub peer_in_request: bool,
}

impl InitiatorConfig {
    /// Whether the request sets bit A.
    const fn announces_uwarp(&self) -> bool {
        self.peer.is_some() && matches!(self.revision, Revision::Two)
    }

    /// What to try next on a new TCP connection when a peer hung up on such a request: first the same without
    /// reserved bits (a peer may be stricter than RFC 5044, which says not to check them), then revision one
    /// (RFC 6581 section 10).
    fn plainer(self) -> Option<Self> {
        match self.revision {
            Revision::Two if self.announces_uwarp() => {
                Some(Self { peer: None, peer_in_request: false, ..self })
            }
            Revision::Two => Some(Self { revision: Revision::One, ..self }),
            Revision::One => None,
        }
    }
}

/// The responder's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The stream begins with the next byte in each direction.
    Accepted(Negotiated),
    /// The program at the other end rejected the connection.
    Rejected(Rejection),
}

/// A reply with the reject bit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The responder's read depths, to pass on to the program (RFC 6581 section 9.1).
    pub enhanced: Option<Enhanced>,
    /// The responding program's private data.
    pub private_data: Vec<u8>,
}

/// Sends a request and waits for the reply.
#[derive(Debug)]
pub struct Initiator {
    config: InitiatorConfig,
    transmit: Option<Vec<u8>>,
    reader: FrameReader,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    AwaitReply,
    Done,
    Failed(SetupError),
}

impl Initiator {
    /// A machine whose request waits in [`Initiator::poll_transmit`].
    pub fn new(config: InitiatorConfig, private_data: &[u8]) -> Result<Self, SetupError> {
        let announces_uwarp = config.announces_uwarp();
        let peer = config.peer.filter(|_| announces_uwarp && config.peer_in_request);
        let mut flags = 0;
        for (set, bit) in [
            (config.crc, mpa::FLAG_C),
            (config.markers, mpa::FLAG_M),
            (announces_uwarp, mpa::FLAG_UWARP_A),
            (peer.is_some(), mpa::FLAG_UWARP_B),
        ] {
            if set {
                flags |= bit;
            }
        }
        let enhanced = (config.revision == Revision::Two).then(|| {
            let (ird, ord) = config.depths.to_wire();
            Enhanced {
                ird,
                ord,
                a_p2p: true,
                b_send_rtr: false,
                c_write_rtr: true,
                // Also without an outbound read depth: it uses none of the program's, and the responder has
                // one place for it (RFC 6581 section 9.1). Chelsio's driver agrees to the Read only, unless
                // it is configured otherwise.
                d_read_rtr: true,
            }
        });
        let request = frame(FrameKind::Request, flags, config.revision, enhanced, private_data, peer, None)?;
        Ok(Self {
            config,
            transmit: Some(request),
            reader: FrameReader::new(FrameKind::Reply),
            state: State::AwaitReply,
        })
    }

    /// Bytes to send, if any. Call again after each call of this machine.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.transmit.take()
    }

    /// The largest number of bytes to read next; 0 when the machine takes no more.
    pub fn want(&self) -> usize {
        if self.state == State::AwaitReply { self.reader.want() } else { 0 }
    }

    /// Takes at most `want()` bytes of the stream. `None`: more are needed.
    pub fn handle_input(&mut self, input: &[u8]) -> Result<Option<Outcome>, SetupError> {
        if self.state != State::AwaitReply {
            return Err(SetupError::Misuse);
        }
        let result = match self.reader.push(input) {
            Ok(None) => return Ok(None),
            Ok(Some(received)) => self.reply(received),
            Err(SetupError::Misuse) => return Err(SetupError::Misuse),
            Err(error) => Err(Failure::from(error)),
        };
        self.transmit = None;
        match result {
            Ok(outcome) => {
                self.state = State::Done;
                Ok(Some(outcome))
            }
            Err(failure) => {
                self.state = State::Failed(failure.error);
                self.transmit = failure.terminate;
                Err(failure.error)
            }
        }
    }

    /// The peer closed or reset the connection before the reply was complete.
    pub fn handle_close(&mut self) -> SetupError {
        if self.state != State::AwaitReply {
            return SetupError::Misuse;
        }
        let error = SetupError::Closed { silent: self.reader.is_empty() };
        self.state = State::Failed(error);
        self.transmit = None;
        error
    }

    /// After a failure: what to try on a new TCP connection to the same peer, if the peer may not have
    /// understood the request.
    pub fn fallback(&self) -> Option<InitiatorConfig> {
        match self.state {
            State::Failed(SetupError::Closed { silent: true }) => self.config.plainer(),
            State::Failed(SetupError::NotEnhanced) => Some(InitiatorConfig {
                revision: Revision::One,
                peer: None,
                peer_in_request: false,
                ..self.config
            }),
            _ => None,
        }
    }

    fn reply(&self, received: Received) -> Result<Outcome, Failure> {
        let Received { frame, mut private_data } = received;
        let config = &self.config;
        let revision = Revision::from_wire(frame.revision)
            .filter(|revision| *revision <= config.revision)
            .ok_or(SetupError::Revision(frame.revision))?;
        // In revision one the S bit is reserved and means nothing.
        let says_enhanced = revision == Revision::Two && frame.enhanced();
        if frame.reject() {
            // Rejections are accepted with any content: siw sets S in some that carry no data.
            let enhanced = Enhanced::parse(&private_data).ok().filter(|_| says_enhanced);
            if enhanced.is_some() {
                private_data.drain(..Enhanced::LEN);
            }
            return Ok(Outcome::Rejected(Rejection { enhanced, private_data }));
        }
        let mut negotiated = Negotiated {
            initiator: true,
            revision,
            crc: config.crc || frame.crc(),
            send_markers: frame.markers(),
            receive_markers: config.markers,
            ird: config.depths.ird,
            ord: config.depths.ord,
            // Without the peer-to-peer model it was not negotiated, but it is a legal first FPDU (RFC 5044
            // section 7.1.2), and a server whose program sends first can then continue.
            rtr: Rtr::SendWrite,
            peer_enhanced: None,
            drops_reserved_flags: config.announces_uwarp() && frame.flags & mpa::FLAG_UWARP_A == 0,
            peer_is_uwarp: false,
            peer: None,
            host: None,
            rtr_stag_to: RTR_STAG_TO,
            private_data: Vec::new(),
        };
        if config.revision == Revision::Two {
            if !says_enhanced {
                return Err(SetupError::NotEnhanced.into());
            }
            let enhanced = Enhanced::parse(&private_data).map_err(|_| SetupError::EnhancedMissing)?;
            private_data.drain(..Enhanced::LEN);
            // From here on both ends know how the stream is framed, so errors are reported with a Terminate.
            agree(config, enhanced, &mut negotiated).map_err(|error| Failure {
                error,
                terminate: error.terminate().map(|reason| terminate_fpdu(reason, negotiated.framing())),
            })?;
            if let Some(ours) =
                config.peer.filter(|_| answers_uwarp(frame.flags) && negotiated.rtr == Rtr::SendWrite)
                && enhanced.a_p2p
                && let Some((data, peer, host)) = PeerData::split(&private_data)
            {
                negotiated.peer_is_uwarp = true;
                negotiated.peer = Some(peer);
                negotiated.host = host;
                negotiated.rtr_stag_to = ours.agreed_with(peer).to_rtr();
                private_data.truncate(data);
            }
        }
        negotiated.private_data = private_data;
        Ok(Outcome::Accepted(negotiated))
    }
}

/// Depths and indication from the reply's enhanced data (RFC 6581 sections 9.1 and 9.2).
fn agree(config: &InitiatorConfig, reply: Enhanced, negotiated: &mut Negotiated) -> Result<(), SetupError> {
    negotiated.peer_enhanced = Some(reply);
    if config.depths.negotiate {
        if reply.ord != mpa::NO_AUTO {
            if reply.ord > config.max_ird.max(config.depths.ird) {
                return Err(SetupError::InsufficientIrd { wanted: reply.ord, limit: config.max_ird });
            }
            negotiated.ird = config.depths.ird.max(reply.ord);
        }
        if reply.ird != mpa::NO_AUTO {
            negotiated.ord = config.depths.ord.min(reply.ird);
        }
    }
    // A responder that does not agree to the peer-to-peer model breaks a MUST, but its answer shows what it
    // will do (Chelsio's driver with `peer2peer` switched off): wait for our first FPDU, which is then the
    // Write, too.
    negotiated.rtr = if !reply.a_p2p || reply.c_write_rtr {
        Rtr::SendWrite
    } else if reply.d_read_rtr {
        Rtr::SendRead
    } else {
        return Err(SetupError::NoMatchingRtr);
    };
    Ok(())
}

/// B without A: an echo of our own flags does not count.
fn answers_uwarp(flags: u8) -> bool {
    flags & (mpa::FLAG_UWARP_A | mpa::FLAG_UWARP_B) == mpa::FLAG_UWARP_B
}

/// An error, and the Terminate that reports it to the peer.
struct Failure {
    error: SetupError,
    terminate: Option<Vec<u8>>,
}

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Self {
        Self { error, terminate: None }
    }
}
