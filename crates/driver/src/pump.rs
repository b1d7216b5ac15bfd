//! The pump: moves bytes between a queue pair's core and what carries its stream, in both directions.
//!
//! The driver runs it over links, the simulator over its network. The other differences between the two are
//! in [`Surroundings`]: what is reported, and when the pump is called again. Two copies of this loop had
//! drifted apart, and the driver's was tested without seeds. Link and surroundings are type parameters, so
//! dispatch is static. The end of a stream is the same for both, too (`uwarp_llp::closing`).
//!
//! Rejected: a crate of its own, for one file and a test as the only other user; the pump in `crates/rnic`,
//! which knows nothing of lower layers.

use std::cell::Cell;

use smallvec::SmallVec;
use uwarp_llp::link::{Counts, Ended, LowerLayer, Received, Stop};
use uwarp_mem::MemSeg;
use uwarp_rnic::qp::{Action, Answers, Disconnect, LinkEvent, Now, RcCore, RxPlan};

/// Bytes moved for one queue pair before another one is served.
const TURN: usize = 512 * 1024;
/// Size of a thread's receive buffer.
const STAGE: usize = 256 * 1024;
/// How often one call sends and receives again past a Send that waits, before others are served.
const LOOKS: usize = 4;
/// Pieces passed to one sending call.
const PIECES: usize = 64;

thread_local! {
    static STAGING: Cell<Option<Box<[u8]>>> = const { Cell::new(None) };
}

/// The pump's surroundings: the lower layer, and what the owner reports and offers.
pub trait Surroundings {
    /// What carries the stream.
    type Lower: LowerLayer;

    /// What carries the stream.
    fn lower(&mut self) -> &mut Self::Lower;

    /// Consumes the report that the lower layer may have room again.
    fn take_room(&mut self) -> bool;

    /// Consumes the report that a receive of the shared receive queue is kept for this queue pair.
    fn take_kept(&mut self) -> bool;

    /// Whether the peer was reported to have closed, or the link to have broken.
    fn hung_up(&self) -> bool;

    /// The pump itself has found that.
    fn set_hung_up(&mut self);

    /// The pump has stopped so that others are served: it must be called again soon.
    fn again(&mut self);

    /// The lower layer must report readiness from now on. Returns whether it did not before; if so, it then
    /// reports everything that it is ready for.
    fn watch(&mut self) -> bool;
}

/// One stream's pump.
#[derive(Debug)]
pub struct Pump {
    /// Received and not consumed by the core yet: part of a frame, or Sends that wait for receives.
    left_over: Vec<u8>,
    /// The lower layer has room.
    writable: bool,
    /// Sending stopped although there was room, so that others are served.
    unfinished: bool,
    /// Sending has failed. The peer's bytes from before that must still be read.
    broken: bool,
    /// Because of a reset that no orderly end came before.
    reset: bool,
    /// The peer's bytes are read, all of them.
    eof: bool,
    /// A process that is killed now must end the stream with a reset: something is set aside.
    aside: bool,
    following: Following,
}

impl Default for Pump {
    fn default() -> Self {
        Self {
            left_over: Vec::new(),
            writable: true,
            unfinished: false,
            broken: false,
            reset: false,
            eof: false,
            aside: false,
            following: Following { skip: 0, pause: 1 },
        }
    }
}

/// Whether to look for what follows an acknowledgement. Where a program has many queue pairs, and answers on
/// another one than it has received from, the acknowledgement comes alone, at the end of its time.
#[derive(Debug)]
struct Following {
    /// So many acknowledgements come before the next look.
    skip: u8,
    /// The value of `skip` after the next look in vain.
    pause: u8,
}

impl Following {
    /// The most acknowledgements without a look.
    const MOST: u8 = 64;

    /// An acknowledgement has come. Returns whether to look for what follows it.
    fn is_expected(&mut self) -> bool {
        let expected = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        expected
    }

    /// Something has followed soon, or not.
    fn looked(&mut self, found: bool) {
        (self.skip, self.pause) = if found { (0, 1) } else { (self.pause, (self.pause * 2).min(Self::MOST)) };
    }
}

/// One queue pair's turn to receive.
struct Turn {
    /// Bytes received so far.
    moved: usize,
    /// It may be interrupted to acknowledge messages for which the peer waits.
    heeds_acks: bool,
    /// It was interrupted: there is more to receive.
    interrupted: bool,
}

impl Pump {
    /// Whether the lower layer has room, as far as is known.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Whether sending stopped although there was room.
    pub fn unfinished(&self) -> bool {
        self.unfinished
    }

    /// Whether no byte was received, as far as the lower layer was asked, and sending has not failed.
    pub fn is_untouched(&self) -> bool {
        self.left_over.is_empty() && !self.broken && !self.eof
    }

    /// Whether there is nothing to do until something comes, if no more has come than was received.
    pub fn has_rest(&self, core: &RcCore) -> bool {
        let received = self.left_over.is_empty() && !core.awaits_receive() && core.sets_aside() == self.aside;
        received && self.writable && !self.unfinished && !self.broken
    }

    /// Whether sending has failed.
    pub fn broken(&self) -> bool {
        self.broken
    }

    /// Whether the lower layer is set to end the stream with a reset ([`RcCore::sets_aside`]).
    pub fn resets_on_close(&self) -> bool {
        self.aside
    }

    /// Moves what can be moved, in both directions.
    pub fn run(&mut self, core: &mut RcCore, now: &Now, around: &mut impl Surroundings) {
        self.receive(core, now, around);
        self.send(core, now, around);
    }

    /// Sends what can be sent; receives, if that lets a queue pair continue that waits for a receive.
    #[inline]
    pub fn send(&mut self, core: &mut RcCore, now: &Now, around: &mut impl Surroundings) {
        if self.writable && !self.unfinished && core.has_nothing_to_send() {
            core.await_ride(now);
            debug_assert!(core.poll_transmit(now).is_none(), "the core has something to send");
            return;
        }
        for _ in 0..LOOKS {
            let stalled = core.stalled();
            self.transmit(core, now, around);
            if !stalled || core.stalled() {
                return;
            }
            // Receives past the waiting Send: the peer answers what was just sent.
            self.receive(core, now, around);
        }
        around.again();
    }

    fn transmit<S: Surroundings>(&mut self, core: &mut RcCore, now: &Now, around: &mut S) {
        self.transmit_all(core, now, around);
        flush(core, around);
    }

    #[inline]
    fn transmit_all<S: Surroundings>(&mut self, core: &mut RcCore, now: &Now, around: &mut S) {
        if around.take_room() {
            self.writable = true;
        }
        if self.broken {
            return;
        }
        self.unfinished = false;
        let mut moved = 0;
        let mut most = PIECES;
        loop {
            let out = core.poll_transmit(now);
            if !self.writable {
                // Room is reported only while the lower layer is watched.
                around.watch();
                return;
            }
            let Some(out) = out else { return };
            let (result, bytes, ours) = match out.only_staged() {
                Some(bytes) => (around.lower().send_bytes(bytes), bytes.len(), true),
                None => {
                    let (mut pieces, mut staying) = (SmallVec::<[MemSeg; PIECES]>::new(), 0u64);
                    let bytes = out.gather_marked(most, |seg, stays| {
                        staying |= u64::from(stays) << pieces.len();
                        pieces.push(seg);
                    });
                    (around.lower().send(&pieces, staying), bytes, false)
                }
            };
            match result {
                Ok(n) => {
                    // A short send has used up the room; the system reports when there is room again. But
                    // memory of the program that is gone ends a call early, too, and then nothing is
                    // reported: the next call shows which it was.
                    self.writable = n == bytes || !ours;
                    let more = core.transmitted(now, n);
                    take_reports(core, now, around);
                    if !more {
                        debug_assert!(core.poll_transmit(now).is_none(), "the core has more to send");
                        return;
                    }
                    if !self.writable {
                        core.handle_link(now, LinkEvent::NoRoom);
                    }
                    moved += n;
                    if moved >= TURN && self.writable {
                        // The next thread that learns of it continues: the system reports again that there is
                        // room, but not to a thread that polls an unwatched socket.
                        self.unfinished = true;
                        around.again();
                        return;
                    }
                }
                Err(Stop::Later) => {
                    self.writable = false;
                    core.handle_link(now, LinkEvent::NoRoom);
                }
                // The program has unmapped memory that it had posted. Send the pieces one by one: the kernel
                // does not say which piece it was, and the ones before it are good.
                Err(Stop::Unmapped) if most > 1 => most = 1,
                Err(Stop::Unmapped) => {
                    tracing::warn!(qpn = core.qpn(), "memory of a work request is not mapped any more");
                    core.handle_link(now, LinkEvent::Unreadable);
                    return;
                }
                Err(Stop::Ended(how)) => {
                    tracing::debug!(qpn = core.qpn(), "sending ends: {how:?}");
                    // The peer's last messages, and the reason for its end, may not be read yet.
                    self.broken = true;
                    self.reset = how != Ended::Closed;
                    around.set_hung_up();
                    if !around.watch() {
                        around.again();
                    }
                    return;
                }
            }
        }
    }

    /// Whether [`Self::receive`] would find nothing and do nothing: the usual case of a thread that polls
    /// memory. It may return false even then.
    #[inline]
    fn has_nothing_to_receive<S: Surroundings>(&self, core: &RcCore, around: &mut S) -> bool {
        !around.lower().has_news(core.messages_acked())
            && self.left_over.is_empty()
            && !(core.awaits_receive() || around.hung_up())
            && core.sets_aside() == self.aside
    }

    /// Receives what is there. Returns whether there was anything: bytes, an end, an error.
    #[inline]
    pub fn receive<S: Surroundings>(&mut self, core: &mut RcCore, now: &Now, around: &mut S) -> bool {
        !self.has_nothing_to_receive(core, around) && self.receive_now(core, now, around)
    }

    fn receive_now<S: Surroundings>(&mut self, core: &mut RcCore, now: &Now, around: &mut S) -> bool {
        if core.awaits_receive() && around.take_kept() {
            core.resume(now);
        }
        let (mut turn, mut some) = (Turn { moved: 0, heeds_acks: true, interrupted: false }, false);
        let acked = core.messages_acked();
        take_reports(core, now, around);
        if core.messages_acked() != acked && self.following.is_expected() {
            self.following.looked(await_what_follows(core.messages_acked(), around.lower()));
        }
        loop {
            some |= with_stage(|stage| self.receive_into(core, now, around, stage, &mut turn));
            if core.sets_aside() != self.aside {
                self.aside = !self.aside;
                around.lower().reset_on_close(self.aside);
            }
            if !std::mem::take(&mut turn.interrupted) {
                break;
            }
            self.transmit(core, now, around);
            // The core may have to wait, but the input does not.
            turn.heeds_acks = !core.ack_is_urgent();
        }
        flush(core, around);
        if !core.stalled() {
            return some;
        }
        // No thread receives now, so none would find the end.
        around.watch();
        if around.hung_up() {
            core.handle_link(now, LinkEvent::HungUp);
        }
        true
    }

    fn receive_into<S: Surroundings>(
        &mut self,
        core: &mut RcCore,
        now: &Now,
        around: &mut S,
        stage: &mut [u8],
        turn: &mut Turn,
    ) -> bool {
        // Bytes that a stalled queue pair left may be consumed now.
        let mut some = false;
        if !self.left_over.is_empty() && !core.stalled() {
            let used = core.handle_input(now, &self.left_over);
            self.left_over.drain(..used.min(self.left_over.len()));
            some = used > 0;
        }
        loop {
            let mut place = SmallVec::new();
            let plan = core.rx_plan(&self.left_over, stage.len(), &mut place);
            let lower = around.lower();
            let Some((result, direct)) = receive_as_planned(lower, &plan, &place, &self.left_over, stage)
            else {
                return true;
            };
            let is_direct = matches!(plan, RxPlan::Direct { .. });
            let left = self.left_over.len();
            let Received { bytes: n, drained } = match result {
                Ok(received) => received,
                Err(stop) => {
                    if is_direct {
                        core.direct_received(0);
                    }
                    match stop {
                        Stop::Later => return some,
                        Stop::Ended(Ended::Closed) => {
                            self.peer_closed(core, now, around, left > 0 || direct > 0);
                        }
                        stop => {
                            count_placed(core, now, around.lower());
                            receiving_failed(core, now, stop);
                        }
                    }
                    return true;
                }
            };
            some = true;
            // What the peer has reported is as new as its bytes: a Terminate is about what is not placed yet.
            take_reports(core, now, around);
            let staged = if is_direct {
                core.direct_received(n.min(direct));
                n.saturating_sub(direct)
            } else {
                left + n
            };
            let input = stage.get(..staged).unwrap_or(&[]);
            // A turn is long enough to be killed in it.
            let used = core.handle_input_counted(now, input, |placed| around.lower().count_placed(placed));
            self.keep(input.get(used..).unwrap_or(&[]));
            turn.moved += n;
            // The end of the stream may have come with the last bytes: the system does not report that again.
            if drained && !around.hung_up() {
                return true;
            }
            if turn.moved >= TURN {
                around.again();
                return true;
            }
            if turn.heeds_acks && core.ack_is_urgent() {
                turn.interrupted = true;
                return true;
            }
            around.lower().count_placed(core.messages_placed());
        }
    }

    /// All that the peer has sent is received. `partial`: a frame was not complete.
    #[cold]
    fn peer_closed<S: Surroundings>(&mut self, core: &mut RcCore, now: &Now, around: &mut S, partial: bool) {
        around.set_hung_up();
        self.eof = true;
        take_reports(core, now, around);
        count_placed(core, now, around.lower());
        let infers = !self.reset && !around.lower().caps().counts;
        let unread = infers.then(|| around.lower().unacknowledged());
        core.handle_link(now, LinkEvent::End { partial, broken: self.broken, unread });
    }

    fn keep(&mut self, rest: &[u8]) {
        self.left_over.clear();
        self.left_over.extend_from_slice(rest);
        if self.left_over.is_empty() && self.left_over.capacity() > 4096 {
            self.left_over = Vec::new();
        }
    }

    /// The next action or report of the core. What the core asks of the lower layer is answered here.
    #[inline]
    pub fn poll_action<S: Surroundings>(
        &mut self,
        core: &mut RcCore,
        now: &Now,
        around: &mut S,
    ) -> Option<Action> {
        loop {
            match core.poll_action()? {
                Action::CheckHangUp => self.check_hang_up(core, now, around.lower()),
                Action::Recall => {
                    around.lower().recall();
                    core.handle_link(now, LinkEvent::Released(u64::MAX));
                }
                Action::CheckAnswers { probe } => {
                    let lower = around.lower();
                    if probe {
                        lower.probe_when_quiet();
                    }
                    let answers = lower.answers().map(|answers| Answers {
                        pending: !answers.all,
                        doubtful: answers.doubtful,
                        last: answers.last,
                    });
                    core.handle_link(now, LinkEvent::Answers(answers));
                }
                action => return Some(action),
            }
        }
    }

    fn check_hang_up(&mut self, core: &mut RcCore, now: &Now, lower: &impl LowerLayer) {
        if let Some(how) = lower.ended() {
            self.broken |= how != Ended::Closed;
            count_placed(core, now, lower);
            // The peer's last words may lie unread behind what waits.
            let infers = self.eof && !self.broken && !lower.caps().counts;
            let unread = infers.then(|| lower.unacknowledged());
            core.handle_link(now, LinkEvent::End { partial: false, broken: self.broken, unread });
        }
    }
}

/// The end of a turn: what the peer may see of it, it sees now.
#[inline]
fn flush<S: Surroundings>(core: &RcCore, around: &mut S) {
    let received = Counts { acked: core.messages_acknowledged(), placed: core.messages_placed() };
    if around.lower().flush(received, core.messages_wanted()) {
        around.again();
    }
}

/// The peer's number of acknowledged messages is there, and perhaps its next bytes are not yet: it shows them
/// last, some instructions later. Looks for them for about the time that a line takes from one processor's
/// cache to another's, because a program whose Write has completed spins on memory for the peer's answer. If
/// it has not polled it by then, the background thread has to take over, a quarter of a millisecond later.
/// (`ib_write_lat` of 64 bytes: in one round of a hundred.) Returns whether they are there.
fn await_what_follows(acked: u64, lower: &impl LowerLayer) -> bool {
    const LOOKS: usize = 64;
    (0..LOOKS).any(|_| {
        std::hint::spin_loop();
        lower.has_news(acked)
    })
}

/// What the lower layer reports beside the bytes of the stream. (Where it reports nothing, this is no code.)
#[inline]
fn take_reports<S: Surroundings>(core: &mut RcCore, now: &Now, around: &mut S) {
    let caps = around.lower().caps();
    if caps.counts {
        let acked = around.lower().peer_received().acked;
        if acked > core.messages_acked() {
            core.handle_link(now, LinkEvent::Placed(acked));
        }
    }
    if caps.refers
        && let Some(position) = around.lower().released()
    {
        core.handle_link(now, LinkEvent::Released(position));
    }
}

/// The peer acknowledges no more. What it has placed counts, if it has said that.
#[cold]
fn count_placed(core: &mut RcCore, now: &Now, lower: &impl LowerLayer) {
    if lower.caps().counts {
        let placed = lower.peer_received().placed;
        if placed > core.messages_acked() {
            core.handle_link(now, LinkEvent::Placed(placed));
        }
    }
}

/// Lends the thread's receive buffer. It is taken: a thread that jumps out of the call loses it once, and an
/// observer of a completion that calls in again has another one. A thread that is ending keeps none.
#[inline]
fn with_stage<R>(with: impl FnOnce(&mut [u8]) -> R) -> R {
    let kept = STAGING.try_with(Cell::take).ok().flatten();
    let mut stage = kept.unwrap_or_else(new_stage);
    let result = with(&mut stage);
    let _ = STAGING.try_with(|kept| kept.set(Some(stage)));
    result
}

#[cold]
fn new_stage() -> Box<[u8]> {
    vec![0; STAGE].into_boxed_slice()
}

/// Receives into the place that the core names; returns the result and how many bytes of memory the core has
/// named. `None`: nothing can be received now.
fn receive_as_planned(
    lower: &mut impl LowerLayer,
    plan: &RxPlan,
    place: &[MemSeg],
    left_over: &[u8],
    stage: &mut [u8],
) -> Option<(Result<Received, Stop>, usize)> {
    match plan {
        RxPlan::Stop => None,
        RxPlan::Stage { max } => {
            let left = left_over.len();
            let max = (*max).max(left + 1).min(stage.len());
            let (head, tail) = stage.get_mut(..max)?.split_at_mut_checked(left)?;
            head.copy_from_slice(left_over);
            debug_assert!(!tail.is_empty(), "a frame does not fit the buffer");
            (!tail.is_empty()).then(|| (lower.receive(tail), 0))
        }
        RxPlan::Direct { tail } => {
            debug_assert!(left_over.is_empty(), "bytes are left over in front of a direct placement");
            let direct = place.iter().map(|s| s.len).sum();
            let tail = stage.get_mut(..*tail).unwrap_or_default();
            Some((lower.receive_scattered(place, tail), direct))
        }
    }
}

#[cold]
fn receiving_failed(core: &mut RcCore, now: &Now, stop: Stop) {
    if stop == Stop::Unmapped {
        tracing::warn!(qpn = core.qpn(), "a registered region is not mapped any more");
        return core.handle_link(now, LinkEvent::Unwritable);
    }
    tracing::debug!(qpn = core.qpn(), "receiving ends: {stop:?}");
    let dead = stop == Stop::Ended(Ended::Silent);
    core.handle_link(now, LinkEvent::Lost(if dead { Disconnect::Timeout } else { Disconnect::Reset }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each acknowledgement that came alone cost 64 looks at memory.
    #[test]
    fn what_follows_an_acknowledgement_is_looked_for_where_something_has_followed() {
        let mut following = Pump::default().following;
        let mut looks = |acks: usize, found: bool| {
            let look = |_: &usize| following.is_expected().then(|| following.looked(found)).is_some();
            (0..acks).filter(look).count()
        };
        assert_eq!(looks(100, true), 100);
        assert_eq!(looks(1, false), 1);
        assert_eq!(looks(100, true), 99, "once in vain is an exception");
        assert!((5..10).contains(&looks(200, false)));
        assert!((9..=11).contains(&looks(10 * (usize::from(Following::MOST) + 1), false)));
        assert!(looks(200, true) > 100, "it is tried again");
    }
}
