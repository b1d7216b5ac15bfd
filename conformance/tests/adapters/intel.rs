//! Intel: i40iw (X722) and irdma (E810, and X722 since Linux 5.14). The driver does TCP until the connection
//! is set up, so it also sees segments; the adapter does everything after.

use uwarp_conformance::attacker::encode::{CRC, ENHANCED, REJECT, REPLY, REQUEST, Setup};

use crate::adapter::{Adapter, Depths, Rtr, Terms, Verdict, reply, request, split};

/// `IETF_MAX_PRIV_DATA_LEN`.
const MOST: usize = 512;
/// `IETF_NO_IRD_ORD`.
const NO_AUTO: u16 = 0x3FFF;

/// As `irdma_sc_send_rtt` (irdma/ctrl.c) posts them. The Write's STag is left 0.
const READ: Rtr = Rtr::Read { source: (0x1234, 0), sink: (0xABCD, 0) };
const WRITE: Rtr = Rtr::Write { stag: 0, to: 0 };

/// One driver in two editions.
pub struct Intel {
    /// The revision of its request: 2, or 1 when a request of revision 2 was answered with a reset
    /// (`irdma_handle_rst_pkt`).
    pub revision: u8,
    /// Depths that a reply gives, whatever its program says (`irdma_make_cm_node`).
    pub depths: Depths,
    /// i40iw: what was mended in irdma.
    pub i40iw: Option<I40iw>,
}

/// What i40iw does and irdma does not.
#[derive(Clone, Copy)]
pub struct I40iw {
    /// The first driver sends four zero bytes behind its reply, unless the peer's address is NetEffect's or
    /// Chelsio's.
    pub pads: bool,
}

/// E810.
pub const E810: Intel = Intel { revision: 2, depths: Depths { ird: 127, ord: 255 }, i40iw: None };
/// X722 with the driver of its time.
pub const X722: Intel =
    Intel { revision: 2, depths: Depths { ird: 32, ord: 32 }, i40iw: Some(I40iw { pads: false }) };

impl Intel {
    /// Frames as the driver builds them (`irdma_build_mpa_v1`, `irdma_build_mpa_v2`).
    fn terms(&self, terms: Terms) -> [u8; 4] {
        let mut bytes = terms.bytes();
        if self.i40iw.is_some() {
            // i40iw also offers, and names, an FPDU without length: the bit of the Send.
            bytes[0] |= 0x40;
        }
        bytes
    }

    /// i40iw adds 4 to the length in network byte order, so that a carry is lost.
    fn with_length(&self, mut frame: Setup) -> Setup {
        let length = frame.private_data.len() as u16;
        if self.i40iw.is_some() && frame.flags & ENHANCED != 0 {
            let [high, low] = (length - 4).to_be_bytes();
            frame.length = Some(u16::from_be_bytes([high, low.wrapping_add(4)]));
        }
        frame
    }

    /// `irdma_parse_mpa` and `irdma_negotiate_mpa_v2_ird_ord`. `ours`: the depths of an initiator.
    fn parse(&self, key: [u8; 16], bytes: &[u8], ours: Option<Depths>) -> Result<(Setup, Rtr), Verdict> {
        // What is behind the frame in the same segment is not looked at.
        let Some((frame, _)) = split(bytes) else { return Err(Verdict::Reset) };
        let known = frame.revision == 1 || frame.revision == 2;
        let newer = frame.revision > self.revision;
        if !known || newer || frame.key != key || frame.private_data.len() > MOST {
            return Err(Verdict::Reset);
        }
        if frame.revision == 1 {
            return Ok((frame, READ));
        }
        // S is not looked at.
        let Some(terms) = Terms::of(&frame).filter(|t| t.peer_to_peer) else { return Err(Verdict::Reset) };
        let negotiates = terms.ird != NO_AUTO && terms.ord != NO_AUTO;
        if let Some(ours) = ours.filter(|_| negotiates)
            && (terms.ird == 0 && terms.read || ours.ird < terms.ord)
        {
            return Err(Verdict::Reset);
        }
        match terms {
            Terms { read: true, .. } => Ok((frame, READ)),
            Terms { write: true, .. } => Ok((frame, WRITE)),
            _ => Err(Verdict::Reset),
        }
    }

    /// Enhanced data of a reply to this request.
    fn answer(&self, asked: &Setup) -> Option<[u8; 4]> {
        let asked = Terms::of(asked).filter(|_| asked.revision == 2)?;
        let ird = if asked.ord == 0 && asked.read { 1 } else { self.depths.ird };
        let ord = self.depths.ord.min(asked.ird);
        Some(self.terms(Terms { ird, ord, peer_to_peer: true, write: !asked.read, read: asked.read }))
    }
}

impl Adapter for Intel {
    fn request(&self, depths: Depths, private_data: &[u8]) -> Setup {
        if self.revision == 1 {
            return request(CRC, 1, None, private_data);
        }
        let (ird, ord) = (depths.ird.min(self.depths.ird), depths.ord.min(self.depths.ord).max(1));
        let terms = Terms { ird, ord, peer_to_peer: true, write: true, read: true };
        self.with_length(request(CRC | ENHANCED, 2, Some(self.terms(terms)), private_data))
    }

    fn judge_reply(&self, _: &Setup, depths: Depths, answer: &[u8]) -> Verdict {
        match self.parse(REPLY, answer, Some(depths)) {
            Ok((frame, _)) if frame.flags & REJECT != 0 => {
                let skipped = if frame.revision == 2 { 4 } else { 0 };
                // The program gets four bytes more, of what was in the buffer.
                let private_data = frame.private_data[skipped..].to_vec();
                Verdict::Rejected { program: "ECONNREFUSED", private_data, resets: false }
            }
            Ok((_, rtr)) => Verdict::Up(rtr),
            Err(verdict) => verdict,
        }
    }

    fn judge_request(&self, request: &[u8]) -> Verdict {
        match self.parse(REQUEST, request, None) {
            // Nothing in a reply of revision 1 names it, and the adapter is not told.
            Ok((frame, _)) if frame.revision == 1 => Verdict::Up(Rtr::None),
            Ok((_, rtr)) => Verdict::Up(rtr),
            Err(verdict) => verdict,
        }
    }

    fn reply(&self, asked: &Setup, _: Depths, private_data: &[u8]) -> Vec<u8> {
        let flags = if asked.revision == 2 { CRC | ENHANCED } else { CRC };
        let mut bytes =
            self.with_length(reply(flags, asked.revision, self.answer(asked), private_data)).bytes();
        if self.i40iw.is_some_and(|old| old.pads) {
            bytes.extend([0; 4]);
        }
        bytes
    }

    fn rejection(&self, asked: &Setup, private_data: &[u8]) -> Option<Vec<u8>> {
        let flags = if asked.revision == 2 { CRC | ENHANCED | REJECT } else { CRC | REJECT };
        Some(self.with_length(reply(flags, asked.revision, self.answer(asked), private_data)).bytes())
    }

    fn one_segment(&self) -> bool {
        true
    }
}
