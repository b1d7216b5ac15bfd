//! What drives a queue pair: the five verbs, and reports of the link.
//!
//! | verb                        | when to call                                               |
//! |-----------------------------|------------------------------------------------------------|
//! | [`RcCore::handle_input`]    | bytes arrived at the place that [`RcCore::rx_plan`] named  |
//! | [`RcCore::handle_timeout`]  | the time that `poll_timeout` returned has come             |
//! | [`RcCore::poll_transmit`]   | after any of these, after posting and after                |
//! |                             | [`RcCore::transmitted`], until it has nothing or the link  |
//! |                             | has no room                                                |
//! | [`RcCore::poll_timeout`]    | then, before the owner releases the queue pair             |
//! | [`RcCore::poll_action`]     | then too, until there is none                              |
//!
//! [`RcCore::handle_link`] takes what the link reports beside bytes.

use std::time::Instant;

use super::core::{Checks, RcCore};
use super::silence::Answers;
use super::stream::{Disconnect, DisconnectReply, Established, Stream};
use super::timers::{ACK, ALL, DRAIN, HANG_UP, LOOK_EVERY, MUTED, Now, STARVING, SentBefore, Timer};
use crate::out::OutQueue;
use crate::srq::Woken;
use uwarp_mem as mem;

/// What the lower layer reports beside bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkEvent {
    /// It had no room for all bytes to send.
    NoRoom,
    /// The owner has learned that the peer has hung up, and this end does not read because a Send waits for a
    /// receive.
    HungUp,
    /// The peer sends no more. `partial`: in the middle of a frame. `broken`: sending has failed before.
    /// `unread`: how many of the bytes that were sent the peer's system had not acknowledged; `None` if it is
    /// not known that the end came in good order.
    End {
        #[allow(missing_docs)]
        partial: bool,
        #[allow(missing_docs)]
        broken: bool,
        #[allow(missing_docs)]
        unread: Option<usize>,
    },
    /// The connection broke, or the peer does not answer.
    Lost(Disconnect),
    /// Memory that the program has posted is not mapped any more, so the next bytes cannot be sent.
    Unreadable,
    /// The places of the last [`super::direct::RxPlan::Direct`] are not mapped any more.
    Unwritable,
    /// How the peer answers, for [`Action::CheckAnswers`]; `None`: not known.
    Answers(Option<Answers>),
    /// Segments that were retransmitted during the stream.
    Resent(u64),
    /// The peer says that it has placed so many messages of this end ([`LinkCaps::counts`]).
    ///
    /// [`LinkCaps::counts`]: super::params::LinkCaps::counts
    Placed(u64),
    /// The link refers to nothing before this position of the stream any more ([`LinkCaps::refers`]).
    ///
    /// [`LinkCaps::refers`]: super::params::LinkCaps::refers
    Released(u64),
}

/// How the peer understands the end of a stream, so how it must be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Nothing follows from it.
    Plain,
    /// The unsent bytes say what the peer may count on. Without them, it must see a reset.
    Told,
    /// It would count on what this end drops: it must see a reset.
    Reset,
}

/// What the owner must do, or report.
pub enum Action {
    /// A receive of the shared receive queue is reserved for each of these queue pairs. Notify them without
    /// the lock of this one.
    Wake(Woken),
    /// Report to the program: both sides are up. For the responder, the initiator's first frame arrived.
    Established,
    /// Report to the program: the stream has ended. The queue pair does not keep it; `unsent` must still be
    /// sent before the link is closed.
    Disconnected {
        /// Why.
        why: Disconnect,
        /// Bytes that the link has not taken.
        unsent: Vec<u8>,
        /// How the peer understands the end.
        end: End,
        /// Awaited: to be reported to the program when the peer has ended its side. Owed: this side ends when
        /// the program disconnects. Both only for a limited time.
        answer: DisconnectReply,
    },
    /// Warn: posted work must wait for the peer's first message (RFC 5044 section 7.1.2).
    Muted,
    /// The stream has ended: the link must refer to no memory of this end any more, which is then reported
    /// as [`LinkEvent::Released`]. Only then is [`Action::Disconnected`] returned, and only then do work
    /// requests complete.
    Recall,
    /// Check whether the peer has hung up for good; if so, report [`LinkEvent::End`].
    CheckHangUp,
    /// Check how the peer answers, and report [`LinkEvent::Answers`].
    CheckAnswers {
        /// From now on, the link must probe a quiet peer itself.
        probe: bool,
    },
}

impl RcCore {
    /// What to pass to the link next: the bytes that wait, in order. `None`: nothing may be sent now.
    #[inline]
    pub fn poll_transmit(&mut self, now: &Now) -> Option<&OutQueue> {
        if self.unreachable() {
            self.set_retry_deadline(now);
        }
        let stream = self.stream.as_ref()?;
        if stream.closing.is_none() {
            if self.timers.is_set(Timer::FirstFrame) {
                return None;
            }
            self.build();
            if self.stream.as_ref().is_some_and(|stream| stream.out.is_empty()) {
                self.nothing_to_send(now);
            }
        }
        self.stream.as_ref().map(|stream| &stream.out).filter(|out| !out.is_empty())
    }

    /// Whether [`Self::poll_transmit`] would return nothing, and do nothing but [`Self::await_ride`]: the
    /// usual case when a message of the peer has arrived. It may return false even then.
    #[inline]
    pub fn has_nothing_to_send(&self) -> bool {
        let Some(stream) = &self.stream else { return false };
        let tx = &stream.tx;
        stream.out.is_empty()
            && stream.requests.is_empty()
            && (stream.opening.may_send() && tx.current.is_none() && !tx.ack_requests.due)
            && tx.rnr_retry.is_none()
            && (stream.closing.is_none() && !stream.draining)
            && !(stream.uses_placement_reads() || stream.ack_is_due(false))
            && !self.timers.is_set(Timer::FirstFrame)
            && !(self.shell.sq.has_unsent() || self.shell.has_overflowed())
    }

    /// Nothing can be sent: handles what waits for a deadline, or for the end of the stream.
    #[inline]
    fn nothing_to_send(&mut self, now: &Now) {
        let Some(stream) = &self.stream else { return };
        if stream.draining {
            self.drained();
        } else if !stream.opening.may_send() && stream.warn_if_muted {
            self.set_muted_deadline(now);
        }
        self.await_ride(now);
    }

    /// An acknowledgement or a request for one may wait for a message to ride on: for a limited time. What
    /// is left to do where [`Self::has_nothing_to_send`].
    #[inline]
    pub fn await_ride(&mut self, now: &Now) {
        let Some(stream) = &self.stream else { return };
        if !self.timers.is_set(Timer::Ack) && stream.ack_waits() {
            self.sent_before = SentBefore { acks: stream.tx.acks(), messages: stream.tx.messages() };
            self.timers.start(Timer::Ack, now, ACK);
        }
    }

    /// The link took `n` bytes of what [`Self::poll_transmit`] returned. Returns whether that may have more;
    /// if not, it need not be called until something else has been done.
    #[inline]
    pub fn transmitted(&mut self, now: &Now, n: usize) -> bool {
        if let Some(stream) = &mut self.stream {
            stream.out.take(n);
            if stream.params.link.answers {
                self.timers.start(Timer::Silence, now, LOOK_EVERY);
            }
        }
        self.retire();
        // Room and completions do not matter for the next message if everything was cut before.
        let all = |stream: &Stream| stream.tx.all_cut && stream.out.is_empty() && stream.closing.is_none();
        if !self.stream.as_ref().is_some_and(all) || self.shell.has_overflowed() {
            return true;
        }
        self.nothing_to_send(now);
        self.stream.as_ref().is_none_or(|stream| !stream.out.is_empty() || stream.closing.is_some())
    }

    /// The program disconnects: posted work is still sent, for a limited time, then the stream ends. If the
    /// peer is gone, the queue pair goes to the error state.
    /// `answered`: the report waits for the peer's program, if the peer knows that.
    pub fn disconnect(&mut self, now: &Now, answered: bool) {
        let Some(stream) = &mut self.stream else { return self.leave_gone_peer() };
        if !std::mem::replace(&mut stream.draining, true) {
            stream.ack_everything();
            stream.request_every_ack();
            if answered && stream.last_acks && !stream.params.by_number {
                stream.answer = DisconnectReply::Awaited;
            }
            self.timers.start(Timer::Drain, now, DRAIN);
        }
    }

    /// Closes a stream from which the program has disconnected, once all is sent.
    #[cold]
    fn drained(&mut self) {
        let draining = |stream: &&mut Stream| stream.closing.is_none() && stream.out.is_empty();
        let Some(stream) = self.stream.as_mut().filter(draining) else { return };
        if self.shell.sq.is_empty() && stream.tx.idle() {
            // Messages that were placed since.
            stream.ack_everything();
            self.build();
            if self.stream.as_ref().is_some_and(|stream| stream.out.is_empty()) {
                self.close();
            }
        } else if stream.ack_waits() || stream.has_relaxed() {
            // Of what was cut or acknowledged since the program disconnected, the last messages may not have
            // requested an acknowledgement.
            stream.request_every_ack();
            self.build();
        }
    }

    #[cold]
    fn set_muted_deadline(&mut self, now: &Now) {
        if self.muted()
            && let Some(stream) = &mut self.stream
        {
            stream.warn_if_muted = false;
            self.timers.start(Timer::Muted, now, MUTED);
        }
    }

    /// Handles a report of the link.
    pub fn handle_link(&mut self, now: &Now, event: LinkEvent) {
        match event {
            LinkEvent::NoRoom => self.shell.counters.room_stalls += 1,
            LinkEvent::HungUp if self.stalled() => self.timers.start(Timer::HangUp, now, HANG_UP),
            LinkEvent::HungUp => {}
            // The program has as much time for buffered Sends as for one that waits in the link.
            LinkEvent::End { partial: false, .. } if self.awaits_receive() && !self.stalled() => self.stall(),
            LinkEvent::End { partial, broken, unread } => {
                if let Some(unread) = unread {
                    self.read_before_end(unread);
                }
                match broken {
                    true => self.connection_lost(Disconnect::Reset),
                    false => self.peer_closed(partial),
                }
            }
            LinkEvent::Lost(why) => self.connection_lost(why),
            LinkEvent::Unreadable => self.unreadable(),
            LinkEvent::Unwritable => self.place_unmapped(),
            LinkEvent::Answers(answers) => self.answers(now, answers),
            LinkEvent::Resent(segments) => self.shell.counters.retransmits += segments,
            LinkEvent::Placed(messages) => self.peer_has_placed(messages),
            LinkEvent::Released(position) => self.released(position),
        }
        self.set_deadlines(now);
    }

    /// Whether [`Self::poll_action`] returns an action.
    #[inline]
    pub fn has_action(&self) -> bool {
        let wants = |s: &Stream| s.established == Established::Unreported || s.closing.is_some();
        !self.line.woken.is_empty()
            || self.stream.as_ref().is_some_and(wants)
            || self.checks != Checks::default()
    }

    /// The next thing to do or to report.
    #[inline]
    pub fn poll_action(&mut self) -> Option<Action> {
        if !self.line.woken.is_empty() {
            return Some(Action::Wake(std::mem::take(&mut self.line.woken)));
        }
        let stream = self.stream.as_mut()?;
        if stream.established == Established::Unreported {
            stream.established = Established::Reported;
            self.timers.clear(Timer::Joined);
            return Some(Action::Established);
        }
        if let Some(why) = stream.closing {
            if stream.out.released() < stream.out.taken() {
                return Some(Action::Recall);
            }
            return Some(self.end_of_stream(why));
        }
        if self.checks == Checks::default() {
            return None;
        }
        Some(self.next_check())
    }

    #[cold]
    fn next_check(&mut self) -> Action {
        if std::mem::take(&mut self.checks.hang_up) {
            return Action::CheckHangUp;
        }
        if std::mem::take(&mut self.checks.muted) {
            return Action::Muted;
        }
        self.checks.answers = false;
        let probed = self.stream.as_mut().map(|stream| std::mem::replace(&mut stream.silence.probed, true));
        Action::CheckAnswers { probe: probed == Some(false) }
    }

    #[cold]
    fn end_of_stream(&mut self, why: Disconnect) -> Action {
        if self.stream.as_ref().is_some_and(|stream| stream.draining) {
            // The program has disconnected already.
            self.leave_gone_peer();
        }
        let mut unsent = Vec::new();
        let (mut end, mut answer) = (End::Plain, DisconnectReply::None);
        if let Some(stream) = self.stream.take() {
            let own = !matches!(why, Disconnect::PeerClosed | Disconnect::Terminated(_));
            if own && stream.params.placement_acks {
                end = if stream.last_word_said { End::Told } else { End::Reset };
            }
            answer = match stream.answer {
                DisconnectReply::Awaited if why != Disconnect::LocalClosed || end != End::Told => {
                    DisconnectReply::None
                }
                DisconnectReply::Owed if why != Disconnect::PeerClosed || stream.draining => {
                    DisconnectReply::None
                }
                answer => answer,
            };
            let mut read = Ok(());
            stream.out.gather(usize::MAX, |seg| read = read.and_then(|()| mem::copy_out(seg, &mut unsent)));
            if read.is_err() {
                unsent.clear();
            }
        }
        self.timers.end_of_stream();
        self.checks = Checks::default();
        Action::Disconnected { why, unsent, end, answer }
    }

    /// When [`Self::handle_timeout`] must be called, if ever.
    #[inline]
    pub fn poll_timeout(&mut self) -> Option<Instant> {
        self.timers.first()
    }

    /// Handles the expired deadlines. Call [`Self::poll_transmit`] and [`Self::poll_action`] next. An early
    /// call does nothing.
    pub fn handle_timeout(&mut self, now: &Now) {
        let time = now.get();
        if self.timers.first().is_none_or(|first| time < first) {
            return;
        }
        for timer in ALL {
            if self.timers.take(timer, time) {
                self.expired(timer, now);
            }
        }
        self.set_deadlines(now);
    }

    fn expired(&mut self, timer: Timer, now: &Now) {
        match timer {
            // `poll_transmit` checks whether it is set.
            Timer::FirstFrame => {}
            Timer::Joined => self.join_failed(),
            Timer::Nudge => self.nudge(now),
            Timer::Receive if self.awaits_receive() => self.receive_missing(),
            Timer::HangUp if self.stalled() => self.checks.hang_up = true,
            Timer::Starving => self.say_starving(),
            Timer::Receive | Timer::HangUp => {}
            Timer::Drain => self.close(),
            Timer::Ack => {
                let before = self.sent_before;
                if let Some(stream) = &mut self.stream {
                    // Newer ones get their own time.
                    if stream.tx.acks() == before.acks {
                        stream.acknowledge_now();
                    }
                    stream.request_ack(stream.tx.messages() == before.messages);
                }
            }
            Timer::Muted => self.checks.muted = self.muted(),
            Timer::Silence => self.checks.answers = true,
            Timer::Retry => self.retries_exceeded(),
        }
    }

    /// Sends the peer an empty Write, unless it has answered. If nothing was sent yet, only sets the next
    /// deadline: the program may post later, and the peer cannot miss what was not sent.
    fn nudge(&mut self, now: &Now) {
        let Some(stream) = &mut self.stream else { return };
        if stream.closing.is_some() {
            return;
        }
        let Some(next) = stream.opening.nudge() else { return };
        if stream.out.taken() > 0 && stream.tx.idle() {
            stream.emit_empty_write();
        }
        self.timers.start(Timer::Nudge, now, next);
    }

    /// Sets the deadlines: input or the link may have begun a wait, or ended one.
    #[inline]
    pub(super) fn set_deadlines(&mut self, now: &Now) {
        if self.unreachable() || self.timers.is_set(Timer::Retry) {
            self.set_retry_deadline(now);
        }
        let Some(stream) = &self.stream else { return };
        if !stream.stalled && stream.buffered.is_empty() {
            self.timers.clear(Timer::Receive);
            self.timers.clear(Timer::HangUp);
        } else {
            if let Some(limit) = stream.params.rnr_timeout {
                self.timers.start(Timer::Receive, now, limit);
            }
            if !stream.silence.starving_said {
                self.timers.start(Timer::Starving, now, STARVING);
            }
        }
    }

    #[cold]
    pub(super) fn set_retry_deadline(&mut self, now: &Now) {
        match self.retry_limit() {
            Some(limit) => self.timers.start(Timer::Retry, now, limit),
            None => self.timers.clear(Timer::Retry),
        }
    }
}
