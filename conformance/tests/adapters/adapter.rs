//! What a replica is: the frames that an adapter's driver writes, and what the driver decides about a frame
//! of its peer. The decisions are written down from the drivers' sources, each with its place; nothing of
//! uwarp's own set-up is used.

use uwarp_conformance::attacker::encode::{
    Codes, ENHANCED, P2P, READ_REQUEST, REPLY, REQUEST, RTR_READ, RTR_WRITE, ReadRequest, Setup, Tagged,
    Untagged, enhanced,
};

/// Read depths of the adapter's program: inbound and outbound.
#[derive(Debug, Clone, Copy)]
pub struct Depths {
    pub ird: u16,
    pub ord: u16,
}

/// The first FPDU of the initiator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rtr {
    /// Whatever its program sends first.
    None,
    /// A Write without data.
    Write { stag: u32, to: u64 },
    /// A Read of no data.
    Read { source: (u32, u64), sink: (u32, u64) },
}

impl Rtr {
    /// As the initiator sends it; `None` when it sends nothing of its own.
    pub fn ulpdu(self) -> Option<Vec<u8>> {
        match self {
            Self::None => None,
            Self::Write { stag, to } => Some(Tagged::write(stag, to, 0).ulpdu()),
            Self::Read { source, sink } => {
                let request = ReadRequest { sink, size: 0, source };
                Some(Untagged::new(READ_REQUEST, 1, 1, request.bytes()).ulpdu())
            }
        }
    }
}

/// What an adapter does about a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The connection comes up. An initiator sends this indication; a responder waits for this kind, and
    /// [`Rtr::None`] is whatever comes.
    Up(Rtr),
    /// The peer rejects: the program hears this, and gets these bytes. Then the adapter ends the connection.
    Rejected { program: &'static str, private_data: Vec<u8>, resets: bool },
    /// A Terminate as the only FPDU, and the end.
    Terminate(Codes),
    /// It resets the connection.
    Reset,
    /// It closes the connection, in order.
    Close,
    /// The driver itself sends this answer and closes.
    Answer(Vec<u8>),
}

/// An adapter as its driver drives it.
pub trait Adapter: Sync {
    /// The request of the active side.
    fn request(&self, depths: Depths, private_data: &[u8]) -> Setup;

    /// What the active side does about the answer to `request`. `answer` is what has come, whole or not.
    fn judge_reply(&self, request: &Setup, depths: Depths, answer: &[u8]) -> Verdict;

    /// What the passive side does about a request, before its program is asked.
    fn judge_request(&self, request: &[u8]) -> Verdict;

    /// The answer of the passive side when its program accepts, with everything that comes with it.
    fn reply(&self, request: &Setup, depths: Depths, private_data: &[u8]) -> Vec<u8>;

    /// The answer when its program rejects; `None`: a reset.
    fn rejection(&self, request: &Setup, private_data: &[u8]) -> Option<Vec<u8>>;

    /// The driver takes each TCP segment for a whole frame.
    fn one_segment(&self) -> bool {
        false
    }

    /// Only for replicas that must fail: what a Read gets is not what it should be.
    fn spoils(&self) -> bool {
        false
    }

    /// A tagged message with STag 0 ends the connection, even without payload.
    fn refuses_stag_0(&self) -> bool {
        false
    }
}

/// A frame and what follows it; `None` when the frame is not whole.
pub fn split(bytes: &[u8]) -> Option<(Setup, &[u8])> {
    let (fixed, rest) = bytes.split_first_chunk::<20>()?;
    let length = usize::from(u16::from_be_bytes([fixed[18], fixed[19]]));
    let (private_data, rest) = rest.split_at_checked(length)?;
    let mut key = [0; 16];
    key.copy_from_slice(&fixed[..16]);
    let private_data = private_data.to_vec();
    Some((Setup { key, flags: fixed[16], revision: fixed[17], length: None, private_data }, rest))
}

/// The enhanced data of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    pub ird: u16,
    pub ord: u16,
    pub peer_to_peer: bool,
    pub write: bool,
    pub read: bool,
}

impl Terms {
    /// From the first four bytes of private data.
    pub fn of(frame: &Setup) -> Option<Self> {
        let [a, b, c, d] = *frame.private_data.first_chunk::<4>()?;
        let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        Some(Self {
            ird: high & 0x3FFF,
            ord: low & 0x3FFF,
            peer_to_peer: high & 0x8000 != 0,
            write: low & 0x8000 != 0,
            read: low & 0x4000 != 0,
        })
    }

    /// As the four bytes.
    pub fn bytes(self) -> [u8; 4] {
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let bits = bit(self.peer_to_peer, P2P) | bit(self.write, RTR_WRITE) | bit(self.read, RTR_READ);
        enhanced(bits, self.ird, self.ord)
    }

    /// Of an enhanced frame of revision 2.
    pub fn of_enhanced(frame: &Setup) -> Option<Self> {
        (frame.revision == 2 && frame.flags & ENHANCED != 0).then(|| Self::of(frame))?
    }
}

/// A frame with enhanced data, if there is any, before the program's.
pub fn frame(key: [u8; 16], flags: u8, revision: u8, terms: Option<[u8; 4]>, private_data: &[u8]) -> Setup {
    let private_data = [terms.as_ref().map_or(&[][..], |t| &t[..]), private_data].concat();
    Setup { key, flags, revision, length: None, private_data }
}

/// A request.
pub fn request(flags: u8, revision: u8, terms: Option<[u8; 4]>, private_data: &[u8]) -> Setup {
    frame(REQUEST, flags, revision, terms, private_data)
}

/// A reply.
pub fn reply(flags: u8, revision: u8, terms: Option<[u8; 4]>, private_data: &[u8]) -> Setup {
    frame(REPLY, flags, revision, terms, private_data)
}
