//! Whether the peer's programs answer what they get at once. Then the acknowledgement goes with the answer,
//! and nobody asks for one by itself: one packet each way for a request and its reply, not two.

use std::time::Instant;

use super::super::rtt::PEER_DELAY;
use super::Heard;

/// What was seen of the peer's last answers.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// When an acknowledgement came alone, and nothing behind it yet.
    alone_at: Option<Instant>,
    are_prompt: bool,
}

impl Answers {
    /// An acknowledgement that is not asked for will come with one, or a little later.
    pub(super) fn are_prompt(&self) -> bool {
        self.are_prompt
    }

    /// One acknowledgement that comes alone is enough to ask for the next one: who waits for it, waits no
    /// second time. An answer behind it that would have come within the time that the peer keeps
    /// acknowledgements back is enough not to ask.
    pub(super) fn on_packet(&mut self, now: Instant, heard: &Heard) {
        match (heard.acknowledges, heard.has_data) {
            (false, false) => {}
            (true, false) => (self.alone_at, self.are_prompt) = (Some(now), false),
            (true, true) => self.are_prompt = true,
            (false, true) => {
                let alone_at = self.alone_at.take();
                self.are_prompt |= alone_at.is_some_and(|at| now.saturating_duration_since(at) <= PEER_DELAY);
            }
        }
    }
}
