//! The end that answers the request.

use uwarp_wire::mpa::{self, Enhanced, FrameKind};

use super::reader::{FrameReader, Received};
use super::{
    Depths, Host, HostKey, Negotiated, PeerData, RTR_STAG_TO, Revision, Rtr, SetupError, frame,
    private_data_limit,
};

/// Settings of a responder, from before the request arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponderPolicy {
    /// Highest revision that is answered. With revision one, a request of revision two is treated as a
    /// responder of RFC 5044's time would treat it: the connection ends.
    pub max_revision: Revision,
    /// Request CRCs; otherwise they are off unless the initiator requests them.
    pub crc: bool,
    /// Request markers in what the initiator sends.
    pub markers: bool,
    /// Recognize a uwarp initiator, and answer it as uwarp.
    pub know_peers: bool,
    /// The largest inbound read depth that this end can serve.
    pub max_ird: u16,
    /// Offer memory to an initiator on the same host.
    pub host: Option<HostKey>,
}

/// A request, for the program to accept or reject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Its revision.
    pub revision: Revision,
    /// The initiator's read depths and model; `None` without enhanced set-up.
    pub enhanced: Option<Enhanced>,
    /// The initiator announces that it is uwarp.
    pub peer_is_uwarp: bool,
    /// Its introduction, if the request has it.
    pub peer: Option<PeerData>,
    /// The initiating program's private data.
    pub private_data: Vec<u8>,
}

/// Terms on which a request is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcceptParams {
    /// Our read depths. The inbound one is raised to what the initiator requests, at most to the policy's
    /// limit, unless it is 0: then the only Read that is taken is an indication that we are ready.
    pub depths: Depths,
    /// Our introduction, for a uwarp initiator.
    pub peer: PeerData,
}

/// Waits for a request and answers it.
#[derive(Debug)]
pub struct Responder {
    policy: ResponderPolicy,
    host: Option<Host>,
    transmit: Option<Vec<u8>>,
    reader: FrameReader,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    AwaitRequest,
    AwaitDecision(RequestTerms),
    Done,
}

/// The parts of the request that the answer depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RequestTerms {
    revision: Revision,
    crc: bool,
    markers: bool,
    enhanced: Option<Enhanced>,
    uwarp: bool,
    peer: Option<PeerData>,
}

impl Responder {
    /// A machine that waits for a request.
    pub fn new(policy: ResponderPolicy) -> Self {
        Self {
            policy,
            host: None,
            transmit: None,
            reader: FrameReader::new(FrameKind::Request),
            state: State::AwaitRequest,
        }
    }

    /// The initiator is on the same host, and may ask there for memory. Before the request is accepted.
    pub fn offer(&mut self, host: Host) {
        self.host = Some(host);
    }

    /// Bytes to send, if any. Call again after each call of this machine.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.transmit.take()
    }

    /// The largest number of bytes to read next; 0 when the machine takes no more.
    pub fn want(&self) -> usize {
        if self.state == State::AwaitRequest { self.reader.want() } else { 0 }
    }

    /// Whether no byte has arrived.
    pub fn is_silent(&self) -> bool {
        self.state == State::AwaitRequest && self.reader.is_empty()
    }

    /// Takes at most `want()` bytes of the stream. `None`: more are needed. After `Some`, call
    /// [`Responder::accept`] or [`Responder::reject`]; after an error, close the connection without an answer
    /// (RFC 5044 section 7.1.2 rule 2).
    pub fn handle_input(&mut self, input: &[u8]) -> Result<Option<Request>, SetupError> {
        if self.state != State::AwaitRequest {
            return Err(SetupError::Misuse);
        }
        let received = match self.reader.push(input) {
            Ok(None) => return Ok(None),
            Ok(Some(received)) => received,
            Err(SetupError::Misuse) => return Err(SetupError::Misuse),
            Err(error) => {
                self.state = State::Done;
                return Err(error);
            }
        };
        self.state = State::Done;
        let (terms, private_data) = self.request(received)?;
        self.state = State::AwaitDecision(terms);
        Ok(Some(Request {
            revision: terms.revision,
            enhanced: terms.enhanced,
            peer_is_uwarp: terms.uwarp,
            peer: terms.peer,
            private_data,
        }))
    }

    /// Largest number of bytes of private data that an answer to this request holds.
    pub fn private_data_limit(&self) -> usize {
        let enhanced = matches!(self.state, State::AwaitDecision(terms) if terms.enhanced.is_some());
        private_data_limit(enhanced, false)
    }

    /// Accepts. In each direction, the stream begins after the reply, which waits in
    /// [`Responder::poll_transmit`].
    ///
    /// If the private data is so long that ours does not fit after it, a uwarp initiator is answered as a
    /// stranger.
    pub fn accept(&mut self, params: AcceptParams, private_data: &[u8]) -> Result<Negotiated, SetupError> {
        let State::AwaitDecision(terms) = self.state else { return Err(SetupError::Misuse) };
        let uwarp = terms.uwarp && private_data.len() <= private_data_limit(true, true);
        let host_limit = private_data_limit(true, true).saturating_sub(Host::LEN);
        let mut negotiated = Negotiated {
            initiator: false,
            revision: terms.revision,
            crc: self.policy.crc || terms.crc,
            send_markers: terms.markers,
            receive_markers: self.policy.markers,
            ird: params.depths.ird,
            ord: params.depths.ord,
            rtr: Rtr::None,
            peer_enhanced: terms.enhanced,
            drops_reserved_flags: false,
            peer_is_uwarp: uwarp,
            peer: terms.peer.filter(|_| uwarp),
            host: self.host.filter(|_| uwarp && private_data.len() <= host_limit),
            rtr_stag_to: RTR_STAG_TO,
            private_data: Vec::new(),
        };
        let reply = terms.enhanced.map(|request| self.agree(params.depths, request, uwarp, &mut negotiated));
        let mut flags = 0;
        for (set, bit) in
            [(negotiated.crc, mpa::FLAG_C), (self.policy.markers, mpa::FLAG_M), (uwarp, mpa::FLAG_UWARP_B)]
        {
            if set {
                flags |= bit;
            }
        }
        let peer = uwarp.then_some(params.peer);
        self.transmit =
            Some(frame(FrameKind::Reply, flags, terms.revision, reply, private_data, peer, negotiated.host)?);
        self.state = State::Done;
        Ok(negotiated)
    }

    /// Rejects. After the reply, which waits in [`Responder::poll_transmit`], the connection must be closed.
    pub fn reject(&mut self, private_data: &[u8]) -> Result<(), SetupError> {
        let State::AwaitDecision(terms) = self.state else { return Err(SetupError::Misuse) };
        let mut flags = mpa::FLAG_R;
        if self.policy.crc || terms.crc {
            flags |= mpa::FLAG_C;
        }
        // An enhanced request gets an enhanced answer, a rejection too (RFC 6581 section 10). We have no
        // depths to give.
        let reply = terms.enhanced.map(|request| Enhanced {
            ird: request.ord,
            ord: request.ird,
            a_p2p: request.a_p2p,
            b_send_rtr: false,
            ..indications(request)
        });
        self.transmit =
            Some(frame(FrameKind::Reply, flags, terms.revision, reply, private_data, None, None)?);
        self.state = State::Done;
        Ok(())
    }

    fn request(&self, received: Received) -> Result<(RequestTerms, Vec<u8>), SetupError> {
        let Received { frame, mut private_data } = received;
        let revision = Revision::from_wire(frame.revision)
            .filter(|revision| *revision <= self.policy.max_revision)
            .ok_or(SetupError::Revision(frame.revision))?;
        // The R bit of a request and reserved bits are not checked (RFC 5044 section 7.1.1); S is reserved in
        // revision one.
        let enhanced = if revision == Revision::Two && frame.enhanced() {
            let enhanced = Enhanced::parse(&private_data).map_err(|_| SetupError::EnhancedMissing)?;
            private_data.drain(..Enhanced::LEN);
            Some(enhanced)
        } else {
            None
        };
        // Our own requests always look like this. That excludes most peers that set a reserved bit by
        // mistake.
        let uwarp = self.policy.know_peers
            && frame.flags & mpa::FLAG_UWARP_A != 0
            && enhanced.is_some_and(|enhanced| enhanced.a_p2p && enhanced.c_write_rtr);
        let mut peer = None;
        if uwarp
            && frame.flags & mpa::FLAG_UWARP_B != 0
            && let Some((data, said, _)) = PeerData::split(&private_data)
        {
            private_data.truncate(data);
            peer = Some(said);
        }
        let terms =
            RequestTerms { revision, crc: frame.crc(), markers: frame.markers(), enhanced, uwarp, peer };
        Ok((terms, private_data))
    }

    /// Depths and indication for the reply (RFC 6581 sections 9.1 and 9.2).
    fn agree(&self, depths: Depths, request: Enhanced, uwarp: bool, negotiated: &mut Negotiated) -> Enhanced {
        let mut reply = Enhanced { a_p2p: request.a_p2p, ..Enhanced::default() };
        if request.a_p2p {
            negotiated.rtr = Rtr::Expect;
            let offered = indications(request);
            reply.c_write_rtr = offered.c_write_rtr;
            // Between uwarp ends the Write carries the initiator's introduction.
            reply.d_read_rtr = offered.d_read_rtr && !uwarp;
        }
        reply.ird = if !depths.negotiate || request.ord == mpa::NO_AUTO {
            mpa::NO_AUTO
        } else {
            let for_rtr = u16::from(reply.d_read_rtr);
            negotiated.ird = match depths.ird {
                // The program takes no Reads at all (rdma_accept(3)). Not even a depth that the peer requests
                // lets in what the program has refused.
                0 => for_rtr,
                given => given.max(request.ord.min(self.policy.max_ird)),
            };
            negotiated.ird
        };
        reply.ord = if !depths.negotiate || request.ird == mpa::NO_AUTO {
            mpa::NO_AUTO
        } else {
            negotiated.ord = depths.ord.min(request.ird);
            negotiated.ord
        };
        reply
    }
}

/// The indications that a reply names: the requested ones that we support; or, if there is none, all that we
/// support, so that the initiator can report the error (RFC 6581 section 9.2).
fn indications(request: Enhanced) -> Enhanced {
    let neither = !request.c_write_rtr && !request.d_read_rtr;
    Enhanced {
        c_write_rtr: request.a_p2p && (request.c_write_rtr || neither),
        d_read_rtr: request.a_p2p && (request.d_read_rtr || neither),
        ..Enhanced::default()
    }
}
