//! Sends that wait for a receive: in the stream, set aside, or in line at the shared receive queue
//! (docs/adr/004).

use uwarp_proto::rx::Segment;
use uwarp_wire::rdmap::Delivery;

use super::core::RcCore;
use super::stream::{OffendingSegment, Stream};
use super::timers::{Now, Timer};

impl Stream {
    /// Whether work requests of ours wait for what the peer still has to send.
    fn awaits_peer(&self) -> bool {
        !self.reads.is_empty() || self.tx.messages() > self.completes_to()
    }

    /// A work request of ours now waits for the peer: what it waits for may have to come past a Send that
    /// waits here.
    pub(super) fn look_past_waiting(&mut self) {
        if self.stalled && self.awaits_peer() && self.aside.has_room(self.mulpdu) {
            self.stalled = false;
        }
    }
}

impl RcCore {
    /// Whether there is a receive for the Send at hand; takes one from the shared receive queue if need be.
    /// If there is none, the queue pair gets in line there.
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
        self.stream.as_ref().is_some_and(|s| s.stalled || !s.aside.is_empty())
    }

    /// Sets aside a segment of a Send for which there is no receive, or a Read Request behind one; false when
    /// the stream has to wait with it: nothing behind it is waited for, or too much is set aside already.
    pub(super) fn set_aside(&mut self, segment: &Segment, ulpdu: &[u8]) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let first = stream.aside.is_empty();
        let written = stream.written_before();
        if !stream.awaits_peer() || !stream.aside.push(*segment, ulpdu, written) {
            return false;
        }
        if first {
            stream.waiting = Some(OffendingSegment::new(segment));
        }
        stream.rx.commit(segment);
        stream.came(segment);
        true
    }

    /// Receives may have been posted: places what was set aside as far as they reach. The owner calls
    /// [`Self::handle_input`] next, with the input that was left.
    pub fn resume(&mut self, now: &Now) {
        // The next wait has its own time.
        self.timers.clear(Timer::Receive);
        self.timers.clear(Timer::HangUp);
        if let Some(stream) = &mut self.stream {
            stream.stalled = false;
        }
        while let Some(first) = self.stream.as_ref().and_then(|s| s.aside.first()) {
            let answered = matches!(first.info.delivery, Delivery::ReadRequest | Delivery::AtomicRequest);
            if !answered && !self.find_receive() {
                break;
            }
            let Some(next) = self.stream.as_mut().and_then(|s| s.aside.pop()) else { break };
            self.place_checked(&next.segment, &next.ulpdu, next.written);
            if let Some(stream) = &mut self.stream {
                // Whether the peer asked for it was not kept.
                stream.count_placed(next.behind, true);
            }
        }
        if let Some(stream) = &mut self.stream
            && let Some(first) = stream.aside.first()
        {
            stream.waiting = Some(OffendingSegment::new(first));
        }
        self.wait_if_nothing_else_comes();
        self.set_deadlines(now);
    }

    /// With Sends set aside and nothing to wait for from the peer any more, nothing is to be received until
    /// there are receives.
    pub(super) fn wait_if_nothing_else_comes(&mut self) {
        if let Some(stream) = &mut self.stream
            && !stream.aside.is_empty()
            && !stream.awaits_peer()
        {
            stream.stalled = true;
        }
    }

    /// Nothing more comes from the peer: Sends that were set aside are all that is left to wait with.
    pub(super) fn stall(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.stalled = true;
        }
    }
}
