//! The kernel's siw, all of it in software.

use uwarp_conformance::attacker::encode::{ENHANCED, MARKERS, REJECT, REPLY, REQUEST, Setup};

use crate::adapter::{Adapter, Depths, Rtr, Terms, Verdict, frame, request, split};

/// `SIW_MAX_IRD_QP` and `SIW_MAX_ORD_QP`.
const READ_DEPTH: u16 = 128;
/// `siw_qp_mpa_rts` of siw_qp.c.
const WRITE: Rtr = Rtr::Write { stag: 1, to: 0 };
const READ: Rtr = Rtr::Read { source: (1, 0), sink: (0, 0) };

/// Its parameters are constants of the source (siw_main.c); `peer_to_peer` is off there.
pub struct Siw {
    pub peer_to_peer: bool,
}

impl Adapter for Siw {
    fn request(&self, depths: Depths, private_data: &[u8]) -> Setup {
        let p2p = self.peer_to_peer;
        let ord = if p2p { depths.ord.max(1) } else { depths.ord };
        let terms = Terms { ird: depths.ird, ord, peer_to_peer: p2p, write: p2p, read: p2p };
        request(ENHANCED, 2, Some(terms.bytes()), private_data)
    }

    fn judge_reply(&self, _: &Setup, depths: Depths, answer: &[u8]) -> Verdict {
        // siw_recv_mpa_rr: nothing may come with the frame.
        let Some((frame, [])) = split(answer) else { return Verdict::Close };
        if frame.revision > 2 {
            return Verdict::Close;
        }
        if frame.key != REPLY {
            return Verdict::Terminate((2, 0, 4));
        }
        if frame.flags & REJECT != 0 {
            let private_data = frame.private_data.get(4..).unwrap_or(&[]).to_vec();
            return Verdict::Rejected { program: "ECONNRESET", private_data, resets: false };
        }
        if frame.flags & MARKERS != 0 {
            return Verdict::Close;
        }
        let Some(terms) = Terms::of_enhanced(&frame) else { return Verdict::Close };
        if depths.ird < terms.ord && terms.ord > READ_DEPTH {
            return Verdict::Terminate((2, 0, 6));
        }
        match (self.peer_to_peer, terms.write, terms.read) {
            (false, ..) => Verdict::Up(Rtr::None),
            (true, true, _) => Verdict::Up(WRITE),
            (true, false, true) => Verdict::Up(READ),
            (true, false, false) => Verdict::Terminate((2, 0, 7)),
        }
    }

    fn judge_request(&self, asked: &[u8]) -> Verdict {
        let Some((asked, [])) = split(asked) else { return Verdict::Close };
        if asked.revision > 2 || asked.key != REQUEST {
            return Verdict::Close;
        }
        let says_enhanced = asked.revision == 2 && asked.flags & ENHANCED != 0;
        let terms = Terms::of_enhanced(&asked);
        if asked.flags & MARKERS != 0 || says_enhanced && terms.is_none() {
            // siw_proc_mpareq: the flags of the request without M, and enhanced data that nobody has filled.
            let flags = asked.flags & !MARKERS | REJECT;
            let enhanced = terms.map(|_| [0; 4]);
            return Verdict::Answer(frame(REPLY, flags, asked.revision, enhanced, &[]).bytes());
        }
        match terms {
            Some(t) if t.peer_to_peer && (t.write || !t.read) => Verdict::Up(WRITE),
            Some(t) if t.peer_to_peer => Verdict::Up(READ),
            _ => Verdict::Up(Rtr::None),
        }
    }

    fn reply(&self, asked: &Setup, depths: Depths, private_data: &[u8]) -> Vec<u8> {
        // siw_accept: the outbound depth is lowered, the inbound one raised. All flags of the request return.
        let terms = Terms::of_enhanced(asked).map(|t| Terms {
            ird: depths.ird.max(t.ord.min(READ_DEPTH)),
            ord: depths.ord.min(t.ird.min(READ_DEPTH)),
            peer_to_peer: t.peer_to_peer,
            write: t.peer_to_peer && (t.write || !t.read),
            read: t.peer_to_peer && t.read && !t.write,
        });
        frame(REPLY, asked.flags, asked.revision, terms.map(Terms::bytes), private_data).bytes()
    }

    fn rejection(&self, asked: &Setup, private_data: &[u8]) -> Option<Vec<u8>> {
        // siw_reject: the peer's depths the other way round, and the indication.
        let terms = Terms::of_enhanced(asked).map(|t| Terms {
            ird: t.ord.min(READ_DEPTH),
            ord: t.ird.min(READ_DEPTH),
            peer_to_peer: t.peer_to_peer,
            write: t.peer_to_peer && (t.write || !t.read),
            read: t.peer_to_peer && t.read && !t.write,
        });
        let flags = asked.flags | REJECT;
        (asked.revision >= 1)
            .then(|| frame(REPLY, flags, asked.revision, terms.map(Terms::bytes), private_data).bytes())
    }
}
