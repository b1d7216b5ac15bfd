//! What was heard in a packet.

use super::super::received::Wish;
use super::Over;

/// What the chunks of a packet come to.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// It must be acknowledged, something waits for that, and it is wanted at once.
    pub(super) eliciting: bool,
    pub(super) is_awaited: bool,
    pub(super) at_once: bool,
    /// There was no room for a part of it: it must come again.
    pub(super) is_dropped: bool,
    /// No later packet has arrived before it.
    pub(super) is_latest: bool,
    /// It acknowledges something for the first time.
    pub(super) acknowledges: bool,
    /// A part of a message or of a stream.
    pub(super) has_data: bool,
    pub(super) over: Option<Over>,
}

impl Heard {
    /// When an acknowledgement of it is wanted.
    pub(super) fn wish(&self) -> Wish {
        match (self.eliciting, self.at_once, self.is_awaited) {
            (false, _, _) => Wish::Never,
            (_, true, _) => Wish::AtOnce,
            (_, _, true) => Wish::Soon,
            (_, _, false) => Wish::Late,
        }
    }
}
