//! Chelsio: cxgb3 (T3) and cxgb4 (T4 to T6). The drivers write the frames and judge them; the adapter does
//! TCP and everything from the first FPDU.

use uwarp_conformance::attacker::encode::{CRC, ENHANCED, REJECT, REPLY, REQUEST, Setup};

use crate::adapter::{Adapter, Depths, Rtr, Terms, Verdict, reply, request, split};

/// `MPA_MAX_PRIVATE_DATA` of both drivers, whose length is then kept in eight bits.
const MOST: usize = 256;

/// A Read of no data as both drivers post it: every STag and offset is 1 (`iwch_post_zb_read` of
/// cxgb3/iwch_qp.c, `build_rtr_msg` of cxgb4/qp.c).
const READ: Rtr = Rtr::Read { source: (1, 1), sink: (1, 1) };

/// What both drivers check first (`process_mpa_request`, `process_mpa_reply`): the frame, or that it is bad.
/// `Ok(None)`: more is to come.
fn checked(key: [u8; 16], bytes: &[u8], revision: impl Fn(u8) -> bool) -> Result<Setup, Verdict> {
    // The buffer of the connection holds the fixed part and the private data.
    if bytes.len() > 20 + MOST {
        return Err(Verdict::Reset);
    }
    match split(bytes) {
        Some((frame, [])) if revision(frame.revision) && frame.key == key => Ok(frame),
        _ => Err(Verdict::Reset),
    }
}

/// A rejection makes both drivers report ECONNREFUSED and abort.
fn rejected(private_data: &[u8]) -> Verdict {
    Verdict::Rejected { program: "ECONNREFUSED", private_data: private_data.to_vec(), resets: true }
}

/// T3: revision 1 and nothing else.
pub struct Cxgb3 {
    /// The module parameter of this name; off unless it is set.
    pub peer2peer: bool,
}

impl Cxgb3 {
    fn rtr(&self) -> Rtr {
        if self.peer2peer { READ } else { Rtr::None }
    }
}

impl Adapter for Cxgb3 {
    fn request(&self, _: Depths, private_data: &[u8]) -> Setup {
        request(CRC, 1, None, private_data)
    }

    fn judge_reply(&self, _: &Setup, _: Depths, answer: &[u8]) -> Verdict {
        match checked(REPLY, answer, |revision| revision == 1) {
            Ok(frame) if frame.flags & REJECT != 0 => rejected(&frame.private_data),
            Ok(_) => Verdict::Up(self.rtr()),
            Err(verdict) => verdict,
        }
    }

    fn judge_request(&self, request: &[u8]) -> Verdict {
        match checked(REQUEST, request, |revision| revision == 1) {
            // rdma_init of iwch_qp.c tells the firmware which indication to expect.
            Ok(_) => Verdict::Up(self.rtr()),
            Err(verdict) => verdict,
        }
    }

    fn reply(&self, _: &Setup, _: Depths, private_data: &[u8]) -> Vec<u8> {
        reply(CRC, 1, None, private_data).bytes()
    }

    fn rejection(&self, _: &Setup, private_data: &[u8]) -> Option<Vec<u8>> {
        Some(reply(REJECT, 1, None, private_data).bytes())
    }
}

/// T4 to T6.
pub struct Cxgb4 {
    /// The revision of its request: 2, or 1 when a request of revision 2 was answered with a reset
    /// (`peer_abort`).
    pub revision: u8,
    /// The module parameter of this name; on unless it is switched off.
    pub peer2peer: bool,
}

/// `c4iw_max_read_depth`.
const READ_DEPTH: u16 = 32;
/// `max_ordird_qp`, which the firmware says. Any number will do here that is not below the former.
const MOST_READS: u16 = 128;

impl Adapter for Cxgb4 {
    fn request(&self, depths: Depths, private_data: &[u8]) -> Setup {
        if self.revision == 1 {
            return request(CRC, 1, None, private_data);
        }
        // c4iw_connect: an outbound depth of 0 becomes 1, for the Read.
        let terms =
            Terms { ird: depths.ird, ord: depths.ord.max(1), peer_to_peer: true, write: false, read: true };
        request(CRC | ENHANCED, 2, Some(terms.bytes()), private_data)
    }

    fn judge_reply(&self, _: &Setup, depths: Depths, answer: &[u8]) -> Verdict {
        let frame = match checked(REPLY, answer, |revision| revision <= 2) {
            Ok(frame) => frame,
            Err(verdict) => return verdict,
        };
        if frame.flags & REJECT != 0 {
            let skipped = if self.revision == 1 { 0 } else { 4 };
            return rejected(frame.private_data.get(skipped..).unwrap_or(&[]));
        }
        if !self.peer2peer {
            return Verdict::Up(Rtr::None);
        }
        if frame.revision != 2 {
            return Verdict::Up(READ);
        }
        // Without enhanced data there is no indication in common, as with the Write alone or first.
        let terms = Terms::of_enhanced(&frame);
        match terms {
            Some(t) if t.peer_to_peer && !t.write && t.read => {
                let insufficient = depths.ird < t.ord && t.ord > MOST_READS;
                if insufficient { Verdict::Terminate((2, 3, 6)) } else { Verdict::Up(READ) }
            }
            _ => Verdict::Terminate((2, 3, 7)),
        }
    }

    fn judge_request(&self, request: &[u8]) -> Verdict {
        let frame = match checked(REQUEST, request, |revision| revision <= 2) {
            Ok(frame) => frame,
            Err(verdict) => return verdict,
        };
        match Terms::of_enhanced(&frame) {
            _ if !self.peer2peer => Verdict::Up(Rtr::None),
            Some(t) if t.peer_to_peer && (t.write || t.read) => Verdict::Up(READ),
            None if frame.revision == 1 => Verdict::Up(READ),
            _ => Verdict::Up(Rtr::None),
        }
    }

    fn reply(&self, asked: &Setup, depths: Depths, private_data: &[u8]) -> Vec<u8> {
        let Some(asked) = Terms::of_enhanced(asked) else {
            return reply(CRC, asked.revision, None, private_data).bytes();
        };
        // c4iw_accept_cr: the outbound depth is lowered to what the peer serves, the inbound one raised to
        // what it wants to ask; send_mpa_reply names the Read whatever was offered.
        let named = self.peer2peer && asked.peer_to_peer && (asked.write || asked.read);
        let wanted = depths.ird.max(asked.ord.min(READ_DEPTH));
        let terms = Terms {
            ird: if named { wanted.max(1) } else { wanted },
            ord: depths.ord.min(asked.ird.min(READ_DEPTH)),
            peer_to_peer: named,
            write: false,
            read: named,
        };
        reply(CRC | ENHANCED, 2, Some(terms.bytes()), private_data).bytes()
    }

    fn rejection(&self, asked: &Setup, private_data: &[u8]) -> Option<Vec<u8>> {
        let Some(asked) = Terms::of_enhanced(asked) else {
            return Some(reply(REJECT, asked.revision, None, private_data).bytes());
        };
        // send_mpa_reject: the peer's own depths.
        let (ird, ord) = (asked.ird.min(READ_DEPTH), asked.ord.min(READ_DEPTH));
        let p2p = self.peer2peer;
        let terms = Terms { ird, ord, peer_to_peer: p2p, write: false, read: p2p };
        Some(reply(REJECT | ENHANCED, 2, Some(terms.bytes()), private_data).bytes())
    }

    fn refuses_stag_0(&self) -> bool {
        true
    }
}
