//! How a stream opens: which end may send first, and what (RFC 5044 section 7.1.2, RFC 6581 section 9.2).
//!
//! The initiator sends the first frame, because its responder must stay silent until that has arrived: both
//! ends find the border between set-up and stream by it. In the peer-to-peer model the initiator sends an
//! indication of no content at once, so that a responder whose program speaks first can go on.
//!
//! Two things are not in the RFCs. Some adapters lose what arrives right behind their reply, so an initiator
//! can hold its first frame for a time, and send more empty Writes while the peer says nothing. And a stream
//! by number (docs/adr/048) counts only once both ends have heard each other, so there both are silent behind
//! the indication.

use std::time::Duration;

/// What this end sends, or expects, before everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// Client-server model: the first message of a program.
    Nothing,
    /// It sends an RDMA Write of no bytes with this STag and tagged offset.
    SendWrite(u32, u64),
    /// It sends an RDMA Read Request for no bytes.
    SendRead,
    /// It expects one of the two; a message with content also counts.
    Expect,
}

/// How long this end holds back everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// Not at all.
    None,
    /// Until the peer's first frame has arrived: a responder, and both ends by number.
    UntilInput,
    /// The indication, too, for this time: the peer may not be ready when its reply arrives.
    For(Duration),
}

/// What was agreed on for the beginning of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// The first frame.
    pub first: First,
    /// What waits, and for what.
    pub hold: Hold,
    /// The peer may miss the first frames: after this time of silence, and twice as much each time after
    /// that, one more is sent.
    pub nudge: Option<Duration>,
}

/// Largest number of nudges, each after twice the time of the one before: 6 seconds in all.
const NUDGES: u32 = 6;

/// How far the beginning has come. It ends with the peer's first frame.
///
/// ```text
///   may send    heard   event                    may send   what follows
///   no          no      the peer's first frame   yes        posted work is sent; the connection is up
///   yes         no      the peer's first frame   yes        the connection is up, unless it was before
///   yes         no      a nudge is due           yes        an empty Write, if something was sent before
///   any         yes     any                      yes        nothing
/// ```
///
/// (While a [`Hold::For`] lasts, its owner sends nothing, whatever this allows.)
#[derive(Debug, Clone, Copy)]
pub struct Opening {
    terms: Terms,
    may_send: bool,
    heard: bool,
    nudges: u32,
}

impl Opening {
    /// The stream begins.
    pub fn new(terms: Terms) -> Self {
        Self { terms, may_send: terms.hold != Hold::UntilInput, heard: false, nudges: 0 }
    }

    /// What this end sends or expects first.
    pub fn first(&self) -> First {
        self.terms.first
    }

    /// Whether this end may send more than its indication.
    #[inline]
    pub fn may_send(&self) -> bool {
        self.may_send
    }

    /// Whether the peer has sent a frame.
    #[inline]
    pub fn heard(&self) -> bool {
        self.heard
    }

    /// Whether posted work may wait for long although no end has made a mistake: the program needs a warning.
    pub fn may_starve(&self) -> bool {
        !self.may_send && self.terms.first == First::Nothing
    }

    /// How many indications count as messages of the peer.
    pub fn indications(&self) -> u32 {
        u32::from(self.terms.first == First::Expect)
    }

    /// Whether a segment of `payload_len` bytes that has just arrived is the indication. A message with
    /// content is one of the program, even if an indication was agreed on.
    #[inline]
    pub fn is_indication(&self, payload_len: usize) -> bool {
        !self.heard && self.terms.first == First::Expect && payload_len == 0
    }

    /// The peer has sent a valid frame; returns whether it is the first.
    #[inline]
    pub fn hear(&mut self) -> bool {
        if self.heard {
            return false;
        }
        (self.heard, self.may_send) = (true, true);
        true
    }

    /// How long to hold the first frame, and when the first nudge is due.
    pub fn deadlines(&self) -> [Option<Duration>; 2] {
        let held = if let Hold::For(time) = self.terms.hold { Some(time) } else { None };
        [held, self.terms.nudge.map(|after| held.unwrap_or_default() + after)]
    }

    /// A nudge is due: when the next one is. `None`: there is none any more, and this one is too late, too.
    pub fn nudge(&mut self) -> Option<Duration> {
        let after = self.terms.nudge.filter(|_| !self.heard && self.nudges < NUDGES)?;
        self.nudges += 1;
        Some(after * 2u32.saturating_pow(self.nudges))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: [First; 4] = [First::Nothing, First::SendWrite(1, 0), First::SendRead, First::Expect];

    /// Every beginning, by what a peer's empty and full frame means to it.
    #[test]
    fn both_ends_open_with_the_peers_first_frame() {
        let mut table = String::new();
        for first in FIRST {
            for hold in [Hold::None, Hold::UntilInput, Hold::For(Duration::from_millis(5))] {
                let mut opening = Opening::new(Terms { first, hold, nudge: None });
                let before = (opening.may_send(), opening.may_starve());
                let means = [0, 1].map(|len| opening.is_indication(len));
                assert!(opening.hear() && !opening.hear());
                assert!(opening.may_send() && !opening.is_indication(0) && !opening.may_starve());
                table += &format!("{first:?} {hold:?}: {before:?} {means:?}\n");
            }
        }
        assert_eq!(table, TABLE);
    }

    const TABLE: &str = "\
Nothing None: (true, false) [false, false]
Nothing UntilInput: (false, true) [false, false]
Nothing For(5ms): (true, false) [false, false]
SendWrite(1, 0) None: (true, false) [false, false]
SendWrite(1, 0) UntilInput: (false, false) [false, false]
SendWrite(1, 0) For(5ms): (true, false) [false, false]
SendRead None: (true, false) [false, false]
SendRead UntilInput: (false, false) [false, false]
SendRead For(5ms): (true, false) [false, false]
Expect None: (true, false) [true, false]
Expect UntilInput: (false, false) [true, false]
Expect For(5ms): (true, false) [true, false]
";

    #[test]
    fn nudges_come_ever_later_and_end() {
        let ms = Duration::from_millis;
        let terms = Terms { first: First::SendWrite(1, 0), hold: Hold::For(ms(50)), nudge: Some(ms(100)) };
        let mut opening = Opening::new(terms);
        assert_eq!(opening.deadlines(), [Some(ms(50)), Some(ms(150))]);
        let next: Vec<_> = std::iter::from_fn(|| opening.nudge()).collect();
        assert_eq!(next, [200, 400, 800, 1600, 3200, 6400].map(ms));
        let mut heard = Opening::new(terms);
        heard.hear();
        assert_eq!(heard.nudge(), None);
        let plain = Opening::new(Terms { hold: Hold::None, nudge: None, ..terms });
        assert_eq!(plain.deadlines(), [None, None]);
    }
}
