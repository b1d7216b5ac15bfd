//! Sends that wait for a receive: in the stream, buffered, or in the line at the shared receive queue
//! (docs/adr/004).

use uwarp_proto::rx::Segment;
use uwarp_wire::rdmap::Delivery;

use super::core::RcCore;
use super::stream::{OffendingSegment, Stream};
use super::timers::{Now, STARVING, Timer};

impl Stream {
    /// Whether work requests of this end wait for something that the peer still has to send.
    pub(super) fn awaits_peer(&self) -> bool {
        !self.reads.is_empty() || self.tx.messages() > self.completes_to()
    }

    /// A work request of this end now waits for the peer. What it waits for may be behind a Send that waits
    /// here.
    pub(super) fn look_past_waiting(&mut self) {
        if self.stalled && self.awaits_peer() && self.buffered.has_room(self.mulpdu) {
            self.stalled = false;
        }
    }
}

impl RcCore {
    /// Whether there is a receive for the present Send; takes one from the shared receive queue if necessary.
    /// If there is none, the queue pair enters the line there.
    pub(super) fn find_receive(&mut self) -> bool {
        if self.shell.rq.front().is_some() {
            return true;
        }
        let Some(srq) = &self.shell.srq else { return false };
        let line = &mut self.line;
        let waiter = line.waiter.as_ref().filter(|_| !line.waiting);
        let in_line = line.waiting || waiter.is_some();
        let taken = srq.take(self.shell.qpn, &mut self.shell.rq, waiter);
        line.waiting = in_line && !taken;
        taken
    }

    /// Whether a Send waits for a receive to be posted.
    pub fn awaits_receive(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.stalled || !s.buffered.is_empty())
    }

    /// A Send waits for a receive. The programs of both ends may wait forever, and neither knows why.
    pub(super) fn say_starving(&mut self) {
        let (waits, qpn) = (self.awaits_receive(), self.shell.qpn);
        let Some(stream) = self.stream.as_mut().filter(|_| waits) else { return };
        stream.silence.starving_said = true;
        tracing::warn!(
            qpn,
            "a message of the peer has waited for {} s: this program has posted no receive for it",
            STARVING.as_secs()
        );
    }

    /// Buffers a segment of a Send without a receive, or a Read Request behind one. Returns false when the
    /// stream must stop there: this end waits for nothing behind it, or too much is buffered already.
    pub(super) fn buffer_segment(&mut self, segment: &Segment, ulpdu: &[u8]) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let first = stream.buffered.is_empty();
        let written = stream.written_before();
        if !stream.awaits_peer() || !stream.buffered.push(*segment, ulpdu, written) {
            return false;
        }
        if first {
            stream.waiting = Some(OffendingSegment::new(segment));
        }
        stream.rx.commit(segment);
        stream.note_receive(segment);
        true
    }

    /// Receives may have been posted: places buffered segments as far as there are receives. The owner then
    /// calls [`Self::handle_input`] with the input that was left.
    pub fn resume(&mut self, now: &Now) {
        // The next wait has its own time limit.
        self.timers.clear(Timer::Receive);
        self.timers.clear(Timer::HangUp);
        self.timers.clear(Timer::Starving);
        if let Some(stream) = &mut self.stream {
            stream.stalled = false;
        }
        while let Some(first) = self.stream.as_ref().and_then(|s| s.buffered.first()) {
            let answered = matches!(first.info.delivery, Delivery::ReadRequest | Delivery::AtomicRequest);
            if !answered && !self.find_receive() {
                break;
            }
            let Some(next) = self.stream.as_mut().and_then(|s| s.buffered.pop()) else { break };
            self.place_checked(&next.segment, &next.ulpdu, next.written);
            if let Some(stream) = &mut self.stream {
                // It is not known whether the peer requested an acknowledgement, so assume that it did.
                stream.count_placed(next.behind, true);
            }
        }
        if let Some(stream) = &mut self.stream
            && let Some(first) = stream.buffered.first()
        {
            stream.waiting = Some(OffendingSegment::new(first));
        }
        self.wait_if_nothing_else_comes();
        self.set_deadlines(now);
    }

    /// If Sends are buffered and this end waits for nothing from the peer, nothing is received until there
    /// are receives.
    pub(super) fn wait_if_nothing_else_comes(&mut self) {
        if let Some(stream) = &mut self.stream
            && !stream.buffered.is_empty()
            && !stream.awaits_peer()
        {
            stream.stalled = true;
        }
    }

    /// The peer sends no more: only the buffered Sends still wait.
    pub(super) fn stall(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.stalled = true;
        }
    }
}
