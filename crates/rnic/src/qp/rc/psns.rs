//! Packet sequence numbers of queue pairs that are connected by number. Both ends show halves of them at
//! set-up (`uwarp_wire::introduction`); one that a program sets after that is compared here.

use uwarp_wire::introduction::{Half, Introduction};

use super::core::RcCore;
use super::stream::Disconnect;

/// What a program has said of its packet sequence numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Psns {
    /// The PSN that it expects.
    pub expects: Option<u32>,
    /// The PSN that it begins with.
    pub begins: Option<u32>,
}

/// What the peer has shown of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShownPsns {
    /// Which half.
    pub half: Half,
    /// That of the PSN that it expects.
    pub expects: Option<u16>,
    /// That of the PSN that it begins with.
    pub begins: Option<u16>,
}

impl ShownPsns {
    /// What an introduction shows.
    pub fn of(introduction: &Introduction, half: Half) -> Self {
        let Introduction { expects, begins, .. } = *introduction;
        Self { half, expects, begins }
    }

    /// Whether it fits what this end's program has set. `None`: nothing is known to both.
    pub fn fit(&self, own: &Psns) -> Option<bool> {
        let pairs = [(own.begins, self.expects), (own.expects, self.begins)];
        let known = pairs.into_iter().filter_map(|(own, shown)| Some(self.half.of(own?) == shown?));
        known.reduce(|a, b| a && b)
    }
}

impl RcCore {
    /// The program has set a packet sequence number, or has got a stream: ends a stream by number whose peer
    /// has other ones. Set-up turns the peer away from then on. (Over InfiniBand, nothing that this end sends
    /// would arrive.)
    pub(super) fn check_psns(&mut self) {
        let Some(stream) = self.stream.as_ref().filter(|stream| stream.closing.is_none()) else { return };
        let psns = self.psns();
        if stream.params.psns.and_then(|shown| shown.fit(&psns)) == Some(false) {
            tracing::warn!(
                qpn = %format_args!("{:#x}", self.shell.qpn),
                "the stream ends: the peer's program has set other packet sequence numbers than this end's \
                 (rq_psn {}, sq_psn {})",
                hex(psns.expects),
                hex(psns.begins),
            );
            self.connection_lost(Disconnect::LocalClosed);
        }
    }
}

fn hex(psn: Option<u32>) -> String {
    psn.map_or_else(|| "not set".into(), |psn| format!("{psn:#x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first column is what this end's program has set: expected, begun with.
    #[test]
    fn packet_sequence_numbers_fit_if_all_that_both_know_is_equal() {
        let (a, b) = (0x00AB_CDEF, 0x0012_3456);
        let shown = |half: Half, said: (Option<u32>, Option<u32>)| {
            let [expects, begins] = [said.0, said.1].map(|psn| psn.map(|psn| half.of(psn)));
            ShownPsns { half, expects, begins }
        };
        for half in [Half::Lower, Half::Upper] {
            for (own, said, fits) in [
                ((Some(a), Some(b)), (Some(b), Some(a)), Some(true)),
                ((Some(a), Some(b)), (Some(b), None), Some(true)),
                ((Some(a), None), (Some(b), Some(a)), Some(true)),
                ((Some(a), None), (Some(b), None), None),
                ((None, None), (Some(b), Some(a)), None),
                ((Some(a), Some(b)), (None, None), None),
                ((Some(a), Some(b)), (Some(a), Some(b)), Some(false)),
                ((Some(a), Some(b)), (Some(b), Some(a + 0x1001)), Some(false)),
                ((Some(a), Some(b)), (Some(b + 0x1001), Some(a)), Some(false)),
            ] {
                let own = Psns { expects: own.0, begins: own.1 };
                assert_eq!(shown(half, said).fit(&own), fits, "{own:x?} {said:x?}");
            }
        }
        // Who has seen a request only cannot answer it.
        let (own, request) =
            (Psns { expects: Some(a), begins: Some(b) }, shown(Half::Lower, (Some(b), Some(a))));
        assert_eq!(ShownPsns { half: Half::Upper, ..request }.fit(&own), Some(false));
    }
}
