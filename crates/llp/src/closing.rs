//! The end of a stream without loss (docs/contracts.md, "Wire rules"): sends what is left, shuts this side
//! down once the system has sent it, drains input for a bounded time. Then its owner closes the link.
//!
//! A machine without a clock: the driver runs it over links (`linger.rs`), the simulator over its network.
//! All times are counted from the moment at which the end begins.
//!
//! | from | on |
//! |---|---|
//! | 0 | the rest is sent as far as there is room, and input is dropped |
//! | 0 | once the system has sent all, this side is shut down, unless it is [held](Closing::new) |
//! | [`LATE`] | this side is shut down, held or not, when the rest is taken |
//! | [`LATE`] + [`STALLED`] | a peer that answers, and has acknowledged nothing since, gets a reset |
//! | [`LIMIT`] | it is over |

use std::time::{Duration, Instant};

use crate::lower::{Ended, LowerLayer, Stop};

/// The limit for the whole end of a stream.
pub const LIMIT: Duration = Duration::from_secs(2);
/// If a peer answers but takes nothing for this long at the end of the limit, uwarp stops waiting and resets
/// the connection. Such a peer does not read, because a message waits for a receive that its program may
/// never post. The end of the stream lies behind what it does not read. So its program would not learn of the
/// end while this system offers the bytes again and again, for minutes. A peer that does not answer is
/// another matter: the network may be interrupted for a moment, and this system continues to send after the
/// close.
pub const STALLED: Duration = Duration::from_millis(500);
/// Subtracted from the limit, because a process that exits waits no longer than that.
const BEFORE_EXIT: Duration = Duration::from_millis(250);
/// From then on nothing is waited for before this side is shut down.
pub const LATE: Duration = LIMIT.saturating_sub(BEFORE_EXIT).saturating_sub(STALLED);
/// The first pause before the next look at whether the system has sent everything; each is twice as long as
/// the one before. The system sends when the peer acknowledges or its own pacing allows, and reports
/// neither.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// The longest pause.
const LAST_PAUSE: Duration = Duration::from_millis(64);
/// Bytes drained before others are served.
const TURN: usize = 512 * 1024;

/// How the peer must understand the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Nothing follows from it.
    Plain,
    /// The rest says what the peer may count on. Without it, the peer must see a reset.
    WholeOrReset,
    /// The peer would count on what this end drops: it must see a reset. Closing the link is the reset.
    Reset,
}

/// What came of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There may be more input, but others must be served, too: call again soon.
    Again,
    /// Call again when the link reports something, or at [`Closing::poll_timeout`].
    Wait,
    /// The owner closes the link.
    Over(Closed),
}

/// How a stream was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// Both sides have been shut down.
    Clean,
    /// The connection is broken, or is reset on purpose.
    Broken,
    /// The time was over. `unsent`: bytes that the link has not taken, or whose receipt the peer's system
    /// has not confirmed.
    GaveUp {
        /// Bytes.
        unsent: usize,
    },
}

/// A stream that has ended and is not closed yet.
#[derive(Debug)]
pub struct Closing {
    rest: Vec<u8>,
    sent: usize,
    manner: Manner,
    held: bool,
    shut_down: bool,
    /// The peer has closed too.
    eof: bool,
    /// Nothing can be sent or received any more.
    broken: bool,
    began: Instant,
    /// When to look again at the latest.
    timer: Instant,
    /// How long the next pause is.
    pause: Duration,
    /// The bytes that the peer's system had not acknowledged when it became late.
    unacknowledged: Option<usize>,
}

impl Closing {
    /// The end begins. `rest` is what is still to be sent. `held`: the peer waits until the program has
    /// disconnected, too, which is said by shutting this side down ([`Self::release`]).
    pub fn new(rest: Vec<u8>, manner: Manner, held: bool, now: Instant, lower: &impl LowerLayer) -> Self {
        // From now on, input is dropped.
        if manner == Manner::Reset || manner == Manner::WholeOrReset && !rest.is_empty() {
            lower.reset_on_close(true);
        }
        Self {
            rest,
            sent: 0,
            manner,
            held,
            shut_down: false,
            eof: false,
            broken: manner == Manner::Reset,
            began: now,
            timer: now + LATE,
            pause: FIRST_PAUSE,
            unacknowledged: None,
        }
    }

    /// Continues as far as possible without waiting. May be called at any time.
    pub fn step(&mut self, now: Instant, lower: &mut impl LowerLayer) -> Step {
        // Before a reset, no end of the stream may be seen: the peer would count on what is dropped here.
        if !self.broken {
            self.send(now, lower);
        }
        let more = self.drain(lower);
        if self.broken {
            return Step::Over(Closed::Broken);
        }
        if self.shut_down && self.eof {
            return Step::Over(Closed::Clean);
        }
        match self.gives_up(now, lower) {
            Some(closed) => Step::Over(closed),
            None if more => Step::Again,
            None => Step::Wait,
        }
    }

    /// The program has disconnected, too. Returns whether the peer waits for that: a step follows.
    pub fn release(&mut self) -> bool {
        std::mem::take(&mut self.held)
    }

    /// When to call [`Self::step`] at the latest.
    pub fn poll_timeout(&self) -> Instant {
        self.timer
    }

    /// Whether this side is shut down.
    pub fn is_shut_down(&self) -> bool {
        self.shut_down
    }

    /// Whether the time is over; otherwise sets the timer.
    fn gives_up(&mut self, now: Instant, lower: &impl LowerLayer) -> Option<Closed> {
        let age = now.saturating_duration_since(self.began);
        let next = match self.unacknowledged {
            _ if age >= LIMIT => return Some(self.gave_up(lower)),
            None if age < LATE => LATE,
            None => {
                self.unacknowledged = Some(lower.unacknowledged());
                LATE + STALLED
            }
            Some(_) if age < LATE + STALLED => LATE + STALLED,
            Some(before) => {
                if lower.unacknowledged() == before && reads_nothing(lower) {
                    let closed = self.gave_up(lower);
                    lower.reset_on_close(true);
                    return Some(closed);
                }
                LIMIT
            }
        };
        self.timer = self.began + next;
        if !self.shut_down && self.rest.is_empty() && !self.held {
            self.timer = self.timer.min(now + self.pause);
            self.pause = LAST_PAUSE.min(self.pause * 2);
        }
        None
    }

    fn gave_up(&self, lower: &impl LowerLayer) -> Closed {
        Closed::GaveUp { unsent: self.rest.len().saturating_sub(self.sent) + lower.unacknowledged() }
    }

    fn send(&mut self, now: Instant, lower: &mut impl LowerLayer) {
        while let Some(rest) = self.rest.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match lower.send_bytes(rest) {
                Ok(n) => self.sent += n,
                Err(Stop::Later) => return,
                // No peer takes it.
                Err(_) => {
                    self.broken = true;
                    return;
                }
            }
        }
        if !self.rest.is_empty() && self.manner == Manner::WholeOrReset {
            lower.reset_on_close(false);
        }
        self.rest = Vec::new();
        self.sent = 0;
        // The end of the stream travels in a segment of its own. In one segment with the last data, siw may
        // see the end first and then drop the data (trap 13 of conformance/siw/README.md).
        let late = now.saturating_duration_since(self.began) >= LATE;
        if !self.shut_down && (late || !self.held && lower.unsent() == 0) {
            self.shut_down = true;
            lower.finish();
        }
    }

    /// Reads and drops input: unread bytes would turn the close into a reset, which costs the peer what it
    /// has not read. Returns whether there may be more.
    fn drain(&mut self, lower: &mut impl LowerLayer) -> bool {
        // Mostly there is nothing, or an acknowledgement. The rest is not on the stack: a thread that
        // destroys a queue pair may have no more than 16 KiB in all.
        let (mut first, mut rest) = ([0; 64], Vec::new());
        let mut drained = 0;
        while !self.eof && !self.broken && drained < TURN {
            let buffer = if drained == 0 {
                &mut first[..]
            } else {
                rest.resize(16 * 1024, 0);
                &mut rest[..]
            };
            match lower.receive(buffer) {
                Ok(received) => drained += received.bytes,
                Err(Stop::Later) => return false,
                Err(Stop::Ended(Ended::Closed)) => self.eof = true,
                Err(_) => self.broken = true,
            }
        }
        !self.eof && !self.broken
    }
}

/// Whether the peer answers but takes no more data.
fn reads_nothing(lower: &impl LowerLayer) -> bool {
    lower.answers().is_some_and(|answers| answers.held && !answers.doubtful)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::SocketAddr;

    use uwarp_mem::MemSeg;

    use super::*;
    use crate::lower::{Answers, Caps, Received};

    /// A link of which the test decides everything.
    struct Peer {
        /// Bytes that it still takes.
        room: usize,
        taken: usize,
        unsent: usize,
        unacknowledged: usize,
        /// What it receives, call by call; then nothing.
        input: Vec<Result<Received, Stop>>,
        answers: Option<Answers>,
        finished: bool,
        reset: Cell<bool>,
        fails: bool,
    }

    impl Peer {
        fn new() -> Self {
            Self {
                room: usize::MAX,
                taken: 0,
                unsent: 0,
                unacknowledged: 0,
                input: Vec::new(),
                answers: None,
                finished: false,
                reset: Cell::new(false),
                fails: false,
            }
        }

        fn closes(&mut self) {
            self.input.push(Err(Stop::Ended(Ended::Closed)));
        }
    }

    impl LowerLayer for Peer {
        fn caps(&self) -> Caps {
            Caps { answers: self.answers.is_some(), ..Caps::TCP }
        }

        fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
            let n = bytes.len().min(self.room - self.taken);
            self.taken += n;
            match n {
                _ if self.fails => Err(Stop::Ended(Ended::Broken)),
                0 => Err(Stop::Later),
                n => Ok(n),
            }
        }

        fn send(&mut self, _: &[MemSeg], _: u64) -> Result<usize, Stop> {
            unreachable!("the rest is a copy")
        }

        fn receive(&mut self, _: &mut [u8]) -> Result<Received, Stop> {
            if self.input.is_empty() { Err(Stop::Later) } else { self.input.remove(0) }
        }

        fn receive_scattered(&mut self, _: &[MemSeg], _: &mut [u8]) -> Result<Received, Stop> {
            unreachable!("input is dropped")
        }

        fn ended(&self) -> Option<Ended> {
            None
        }

        fn answers(&self) -> Option<Answers> {
            self.answers
        }

        fn probe_when_quiet(&self) {}

        fn unsent(&self) -> usize {
            self.unsent
        }

        fn unacknowledged(&self) -> usize {
            self.unacknowledged
        }

        fn reset_on_close(&self, reset: bool) {
            self.reset.set(reset);
        }

        fn finish(&mut self) {
            assert!(!self.finished, "twice");
            self.finished = true;
        }

        fn peer(&self) -> Option<SocketAddr> {
            None
        }
    }

    fn begin(rest: &[u8], manner: Manner, held: bool, peer: &mut Peer) -> (Closing, Instant) {
        let now = Instant::now();
        (Closing::new(rest.to_vec(), manner, held, now, peer), now)
    }

    #[test]
    fn the_end_follows_what_the_system_has_sent() {
        let mut peer = Peer { room: 3, unsent: 1, ..Peer::new() };
        let (mut closing, start) = begin(b"rest", Manner::Plain, false, &mut peer);
        assert_eq!((closing.step(start, &mut peer), peer.taken), (Step::Wait, 3));
        assert_eq!(closing.poll_timeout(), start + LATE, "room is reported");
        peer.room = 4;
        assert_eq!((closing.step(start, &mut peer), peer.taken, peer.finished), (Step::Wait, 4, false));
        let mut now = start;
        for pause in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert_eq!(closing.poll_timeout(), now + Duration::from_millis(pause));
            now = closing.poll_timeout();
            assert_eq!((closing.step(now, &mut peer), peer.finished), (Step::Wait, false));
        }
        peer.unsent = 0;
        assert_eq!((closing.step(now, &mut peer), peer.finished), (Step::Wait, true));
        assert_eq!(closing.poll_timeout(), start + LATE);
        peer.closes();
        assert_eq!(closing.step(now, &mut peer), Step::Over(Closed::Clean));
        assert!(!peer.reset.get());
    }

    #[test]
    fn input_is_dropped_a_turn_at_a_time() {
        let mut peer = Peer::new();
        let piece = Ok(Received { bytes: 16 * 1024, drained: true });
        peer.input = vec![piece; 33];
        let (mut closing, now) = begin(b"", Manner::Plain, false, &mut peer);
        assert_eq!(closing.step(now, &mut peer), Step::Again);
        peer.closes();
        assert_eq!(closing.step(now, &mut peer), Step::Over(Closed::Clean));
    }

    #[test]
    fn a_peer_that_waits_for_the_program_is_answered_by_it_or_when_it_is_late() {
        let mut peer = Peer::new();
        let (mut closing, now) = begin(b"", Manner::Plain, true, &mut peer);
        assert_eq!((closing.step(now, &mut peer), peer.finished), (Step::Wait, false));
        assert!(closing.release() && !closing.release());
        assert_eq!((closing.step(now, &mut peer), peer.finished), (Step::Wait, true));

        let mut peer = Peer { unsent: 1, ..Peer::new() };
        let (mut closing, start) = begin(b"", Manner::Plain, true, &mut peer);
        assert_eq!(closing.step(start, &mut peer), Step::Wait);
        let late = closing.poll_timeout();
        assert_eq!((late, closing.step(late, &mut peer)), (start + LATE, Step::Wait));
        assert!(peer.finished && closing.is_shut_down());
    }

    /// Until the rest has been taken, a process that is killed must end the stream with a reset.
    #[test]
    fn a_rest_that_says_something_is_sent_or_the_peer_sees_a_reset() {
        let mut peer = Peer { room: 0, ..Peer::new() };
        let (mut closing, start) = begin(b"acknowledgement", Manner::WholeOrReset, false, &mut peer);
        assert_eq!((closing.step(start, &mut peer), peer.reset.get()), (Step::Wait, true));
        let mut other = Peer { room: 0, ..Peer::new() };
        let (mut gave_up, other_start) = begin(b"rest", Manner::WholeOrReset, false, &mut other);
        assert_eq!(gave_up.step(other_start + LIMIT, &mut other), Step::Over(Closed::GaveUp { unsent: 4 }));
        assert!(other.reset.get());
        peer.room = 100;
        assert_eq!(
            (closing.step(start, &mut peer), peer.reset.get(), peer.finished),
            (Step::Wait, false, true)
        );
        // Nothing to say.
        let mut peer = Peer::new();
        begin(b"", Manner::WholeOrReset, false, &mut peer);
        assert!(!peer.reset.get());
    }

    /// The peer would take an end in good order for an acknowledgement of what is dropped here.
    #[test]
    fn before_a_reset_nothing_is_sent_and_nothing_is_shut_down() {
        let mut peer = Peer::new();
        let (mut closing, now) = begin(b"rest", Manner::Reset, false, &mut peer);
        assert_eq!(closing.step(now, &mut peer), Step::Over(Closed::Broken));
        assert_eq!((peer.taken, peer.finished, peer.reset.get()), (0, false, true));
        let mut peer = Peer { fails: true, ..Peer::new() };
        let (mut closing, now) = begin(b"rest", Manner::Plain, false, &mut peer);
        assert_eq!((closing.step(now, &mut peer), peer.finished), (Step::Over(Closed::Broken), false));
    }

    #[test]
    fn only_a_peer_that_answers_and_does_not_read_gets_a_reset() {
        let answers =
            |held, doubtful| Some(Answers { all: false, held, doubtful, last: Duration::from_millis(1) });
        // What the system says of the peer, what the peer acknowledges meanwhile, and whether it is reset.
        for (answers, takes, resets) in [
            (answers(true, false), 0, true),
            (answers(true, false), 1, false),
            (answers(true, true), 0, false),
            (answers(false, false), 0, false),
            (None, 0, false),
        ] {
            let mut peer = Peer { room: 5, unacknowledged: 5, unsent: 5, answers, ..Peer::new() };
            let (mut closing, start) = begin(b"12345678", Manner::Plain, false, &mut peer);
            assert_eq!(closing.step(start, &mut peer), Step::Wait);
            assert_eq!(closing.step(closing.poll_timeout(), &mut peer), Step::Wait);
            peer.unacknowledged -= takes;
            let now = closing.poll_timeout();
            assert_eq!(now, start + LATE + STALLED);
            let step = closing.step(now, &mut peer);
            let gave_up = Step::Over(Closed::GaveUp { unsent: 3 + peer.unacknowledged });
            assert_eq!((step == gave_up, peer.reset.get()), (resets, resets), "{answers:?}");
            if !resets {
                assert_eq!((step, closing.poll_timeout()), (Step::Wait, start + LIMIT));
                assert_eq!(closing.step(start + LIMIT, &mut peer), gave_up);
                assert!(!peer.reset.get());
            }
        }
    }
}
