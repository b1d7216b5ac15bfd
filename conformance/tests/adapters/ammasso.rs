//! Ammasso: amso1100, whose firmware writes every frame. Other drivers say that it speaks revision 0
//! (the text of `mpa_rev` in cxgb3 and cxgb4), the RDMA Consortium's. No more than that is assumed here.

use uwarp_conformance::attacker::encode::{REPLY, REQUEST, Setup};

use crate::adapter::{Adapter, Depths, Rtr, Verdict, reply, request, split};

/// With frames of revision 0 and no flags.
pub struct Ammasso {
    /// A request of another revision is answered all the same; otherwise with a reset.
    pub answers: bool,
}

impl Adapter for Ammasso {
    fn request(&self, _: Depths, private_data: &[u8]) -> Setup {
        request(0, 0, None, private_data)
    }

    fn judge_reply(&self, _: &Setup, _: Depths, answer: &[u8]) -> Verdict {
        match split(answer) {
            Some((frame, [])) if frame.key == REPLY && frame.revision == 0 => Verdict::Up(Rtr::None),
            _ => Verdict::Reset,
        }
    }

    fn judge_request(&self, asked: &[u8]) -> Verdict {
        match split(asked) {
            Some((frame, [])) if frame.key == REQUEST && (frame.revision == 0 || self.answers) => {
                Verdict::Up(Rtr::None)
            }
            _ => Verdict::Reset,
        }
    }

    fn reply(&self, _: &Setup, _: Depths, private_data: &[u8]) -> Vec<u8> {
        reply(0, 0, None, private_data).bytes()
    }

    fn rejection(&self, _: &Setup, _: &[u8]) -> Option<Vec<u8>> {
        None
    }
}
