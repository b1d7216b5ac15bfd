//! What an exchange sends.

use std::time::{Duration, Instant};

use uwarp_wire::rd::ack::MAX_RANGES;
use uwarp_wire::rd::chunk::{Chunk, Close, Ready};
use uwarp_wire::rd::{Header, Kind, low};

use super::super::Config;
use super::super::message::Payload;
use super::super::packet::PacketBuf;
use super::super::received::PACKET_RANGES;
use super::super::recovery::{Content, Contents, News};
use super::super::room::charge;
use super::{Exchange, Phase, Report, Role};

/// Between the two CLOSE of a process that leaves.
const CLOSE_PAUSE: Duration = Duration::from_millis(1);
/// READY in one packet.
const READY_MOST: usize = 16;
/// Packets whose fate is not known: so many, and as many as there is window for. A peer that acknowledges
/// nothing, and says so much that is answered, would have all answers remembered.
const MOST_REMEMBERED: usize = 2048;
/// Bytes of the window for one more of them.
const BYTES_REMEMBERED: u64 = 32;

/// Whether there may be more to send behind a packet, in the same turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rd) enum Made {
    More,
    Last,
}

impl Exchange {
    /// Makes the next packet. `None`: there is nothing to send now.
    /// `credit`: what the peer may have in flight, in units of the wire.
    pub(in crate::rd) fn poll_transmit(
        &mut self,
        now: Instant,
        config: &Config,
        credit: u16,
        out: &mut PacketBuf,
    ) -> Option<Made> {
        if self.closes > 0 {
            return self.transmit_close(now, out);
        }
        if self.phase == Phase::Opening && self.is_crossed {
            self.probes = 0;
            return None;
        }
        let ack_is_due = self.received.due().is_some_and(|due| due <= now);
        let longest = self.path.len();
        self.window = self.congestion.bytes(longest);
        let is_open = self.has_room(config, 0);
        let has_abandon = self.outgoing.next_abandon().is_some();
        let has_data = has_abandon || self.is_sendable();
        if has_data && !is_open {
            self.pacer.note_waiting();
        }
        let may_send = (is_open && has_data && !self.pacer.holds_back(now)) || self.probes > 0;
        let is_resting = self.phase == Phase::Resting;
        let may_probe = is_open && self.phase == Phase::Up && self.probes == 0;
        if let Some(len) = self.path.probe().filter(|_| may_probe) {
            return self.transmit_probe(now, credit, len, out);
        }
        let is_bare = std::mem::take(&mut self.is_bare) && self.probes > 0;
        let wants_data = may_send && has_data && !is_resting && !is_bare;
        if is_resting {
            // The peer waits no more, or asks before it does.
            self.ready.clear();
            self.streams.control.clear();
        }
        // Like all that the peer must acknowledge. Who acknowledges nothing has its next streams refused.
        let may_control = self.phase == Phase::Up && (is_open || self.probes > 0);
        let has_control = may_control && !self.streams.control.is_empty();
        if !ack_is_due && !wants_data && !has_control && self.probes == 0 && self.ready.is_empty() {
            return None;
        }
        self.begin(now, out);
        let mut contents = Contents::new();
        let mut eliciting = self.put_ack(now, credit, out, &mut contents);
        for (qpn, receives) in self.ready.drain(..self.ready.len().min(READY_MOST)) {
            out.put_chunk(&Chunk::Ready(Ready { qpn, receives }));
            contents.push(Content::Ready { qpn, receives });
            eliciting = true;
        }
        if has_control {
            self.put_control(out, &mut contents);
            eliciting = true;
        }
        if wants_data {
            eliciting |= self.put_data(longest, out, &mut contents);
        }
        if !eliciting && self.probes > 0 {
            out.put_chunk(&Chunk::Ping);
            eliciting = true;
        } else if !eliciting && contents.is_empty() {
            // There was less to send than it seemed, and the packet number is not used yet.
            return None;
        }
        let is_probe = eliciting && std::mem::take(&mut self.probes) > 0;
        let asks = eliciting.then_some(is_probe);
        Some(self.made(now, config, asks, contents, out))
    }

    /// A packet is made, which may bring others with it. `eliciting`: whether it asks for an acknowledgement
    /// at once in any case; `None`: it needs none.
    fn made(
        &mut self,
        now: Instant,
        config: &Config,
        eliciting: Option<bool>,
        contents: Contents,
        out: &mut PacketBuf,
    ) -> Made {
        let longest = self.path.len();
        if out.has_segments() {
            self.pacer.on_sent(now, &self.congestion, longest);
        }
        if out.packet_len() >= longest {
            self.path.on_full(now);
        }
        let bytes = u32::try_from(out.packet_len()).unwrap_or(u32::MAX);
        let only = contents.first().copied().filter(|_| contents.len() == 1);
        let may_wait = out.has_segments() && self.nobody_waits_for(&contents);
        self.recovery.on_sent(now, bytes, eliciting.is_some(), contents);
        if let Some(content @ (Content::Segment { .. } | Content::Stream(_))) = only {
            self.go_on(now, config, content, out);
        }
        let is_last = !self.is_sendable();
        let asks = match is_last {
            false => self.pacer.holds_back(now),
            true => !may_wait && !self.answers.are_prompt(),
        };
        if asks || eliciting == Some(true) || !self.has_room(config, 0) {
            out.ask_for_ack();
        } else if is_last && may_wait {
            self.recovery.on_late_wish();
        }
        self.forget(now);
        if out.has_segments() {
            self.last_used = now;
        }
        self.note_waiting(now);
        let has_more = self.is_sendable()
            || !self.ready.is_empty()
            || self.outgoing.next_abandon().is_some()
            || !self.streams.control.is_empty()
            || self.path.probe().is_some();
        if has_more { Made::More } else { Made::Last }
    }

    /// Whether a packet with this has only messages that have left with it, and no other one is under way:
    /// its acknowledgement is for the pace alone.
    fn nobody_waits_for(&self, contents: &Contents) -> bool {
        let is_ack = |content: &Content| matches!(content, Content::Ack { .. });
        self.outgoing.is_empty() && self.streams.is_empty() && contents.iter().all(is_ack)
    }

    /// Makes further packets with the next parts of the message or the stream of a packet, as long as they
    /// could be made one by one: what is asked for each packet has been asked for this one.
    fn go_on(&mut self, now: Instant, config: &Config, mut content: Content, out: &mut PacketBuf) {
        let (longest, bytes) = (self.path.len(), u32::try_from(out.packet_len()).unwrap_or(u32::MAX));
        // What takes turns with it goes in between.
        let is_alone = !self.has_unrepeated();
        let may_go_on = match &content {
            Content::Segment { message, start, end, .. } if is_alone && !self.has_stream_bytes() => {
                self.outgoing.most_to_go_on(*message, &(*start..*end))
            }
            Content::Stream(part) if is_alone && !self.outgoing.is_sendable() => {
                self.streams.most_to_go_on(part)
            }
            _ => 0,
        };
        if may_go_on == 0 || out.packet_len() < longest || self.phase != Phase::Up {
            return;
        }
        for _ in 0..may_go_on.min(out.may_go_on()) {
            if !self.has_room(config, 0) || self.pacer.holds_back(now) {
                break;
            }
            match &mut content {
                Content::Segment { start, end, .. } => (*start, *end) = (*end, *end + (*end - *start)),
                Content::Stream(part) => *part = part.next(),
                _ => {}
            }
            self.pacer.on_sent(now, &self.congestion, longest);
            self.recovery.on_sent(now, bytes, true, Contents::from_slice(&[content]));
            out.go_on();
        }
        match &content {
            Content::Segment { message, end, .. } => self.outgoing.on_gone_on(*message, *end),
            Content::Stream(part) => self.streams.on_gone_on(part),
            _ => {}
        }
    }

    /// Of packets that the peer does not acknowledge, the oldest count as lost.
    fn forget(&mut self, now: Instant) {
        let of_window = usize::try_from(self.window / BYTES_REMEMBERED).unwrap_or(usize::MAX);
        if self.recovery.remembered() <= MOST_REMEMBERED.saturating_add(of_window) {
            return;
        }
        let (mut news, before) = (News::default(), self.recovery.in_flight_soon());
        self.recovery.forget_half(&mut news);
        self.report(now, &news, before, Report::default());
        self.on_news(now, &news);
    }

    /// Whether a packet of full length may be in flight besides those that are, and one of `more` bytes.
    pub(super) fn has_room(&self, config: &Config, more: usize) -> bool {
        let longest = self.path.len();
        let window = self.window.min(config.window);
        let cost = charge(longest) + if more > 0 { charge(more) } else { 0 };
        // One packet always goes: its acknowledgement brings the next credit.
        let is_first = !self.recovery.is_waiting() && more == 0;
        self.recovery.in_flight() + (longest + more) as u64 <= window
            && (is_first || self.recovery.charge() + cost <= self.credit)
    }

    fn begin(&mut self, _: Instant, out: &mut PacketBuf) {
        let kind = if self.phase == Phase::Opening { Kind::Open } else { Kind::Packet };
        out.begin(&Header {
            version: self.start.version,
            kind,
            source_port: self.start.route.local.port(),
            destination_port: self.start.route.remote.port(),
            key: self.start.peer_key,
            number: low(self.recovery.next_number()),
        });
        if let (Phase::Opening, Role::Initiator(open)) = (self.phase, &self.start.role) {
            out.put(&open.to_bytes());
        }
    }

    /// An acknowledgement rides on every packet that leaves while one is owed. Returns whether it needs one
    /// itself.
    fn put_ack(&mut self, now: Instant, credit: u16, out: &mut PacketBuf, contents: &mut Contents) -> bool {
        let has_verdicts = self.incoming.has_verdicts();
        if self.received.due().is_none() && !has_verdicts {
            return false;
        }
        let Some((mut head, packets)) = self.received.ack(now) else { return false };
        let messages = self.incoming.ended_ranges(MAX_RANGES - PACKET_RANGES);
        head.floor = low(self.incoming.floor());
        head.credit = credit;
        out.put_ack(&head, &packets, &messages);
        contents.push(Content::Ack { largest: self.received.largest() });
        self.received.on_sent();
        for (verdict, message, packet) in self.incoming.verdicts() {
            out.put_chunk(&Chunk::Verdict(verdict));
            contents.push(Content::Verdict { message, packet, reason: verdict.reason });
        }
        has_verdicts
    }

    /// Fills the packet with what is to be said of failed messages, and with segments.
    fn put_data(&mut self, longest: usize, out: &mut PacketBuf, contents: &mut Contents) -> bool {
        let before = contents.len();
        if let Some((group, messages)) = self.outgoing.next_abandon() {
            // So many numbers, a whole ACK and its verdicts fit into the shortest packet length there is.
            out.put_abandon(messages);
            contents.push(Content::Abandon { group });
            self.outgoing.on_abandon_sent(group);
        }
        let packet = self.recovery.next_number();
        let mut alone = true;
        let streams_first = self.takes_turn();
        if streams_first {
            self.put_streams(longest, out, contents, &mut alone);
        }
        while let Some(room) = longest.checked_sub(out.packet_len()).filter(|room| *room > 0) {
            let Some(part) = self.next_part(packet, room, alone) else { break };
            alone = false;
            let payload = Payload {
                ticket: part.ticket,
                offset: part.segment.head.offset,
                len: part.len,
                at: 0,
                again: part.again,
            };
            out.put_segment(&part.segment, payload);
            if let Some(content) = part.content {
                contents.push(content);
            }
        }
        if !streams_first {
            self.put_streams(longest, out, contents, &mut alone);
        }
        contents.len() > before || out.has_segments()
    }

    /// A packet that only shows whether one of this length arrives.
    fn transmit_probe(&mut self, now: Instant, credit: u16, len: usize, out: &mut PacketBuf) -> Option<Made> {
        self.begin(now, out);
        let mut contents = Contents::new();
        self.put_ack(now, credit, out, &mut contents);
        out.put_chunk(&Chunk::Ping);
        out.pad_to(len);
        let bytes = u32::try_from(out.packet_len()).unwrap_or(u32::MAX);
        contents.push(Content::Length { bytes });
        self.path.on_probe_sent();
        self.recovery.on_sent(now, bytes, true, contents);
        self.note_waiting(now);
        Some(Made::More)
    }

    fn transmit_close(&mut self, now: Instant, out: &mut PacketBuf) -> Option<Made> {
        if self.close_at.is_some_and(|at| now < at) {
            return None;
        }
        self.closes -= 1;
        self.close_at = Some(now + CLOSE_PAUSE);
        self.begin(now, out);
        self.received.hurry(now);
        if let Some((mut head, packets)) = self.received.ack(now) {
            let messages = self.incoming.ended_ranges(MAX_RANGES - PACKET_RANGES);
            head.floor = low(self.incoming.floor());
            out.put_ack(&head, &packets, &messages);
        }
        out.put_chunk(&Chunk::Close(Close { floor: low(self.incoming.floor()), reason: 0 }));
        let bytes = u32::try_from(out.packet_len()).unwrap_or(u32::MAX);
        self.recovery.on_sent(now, bytes, false, Contents::new());
        Some(Made::More)
    }
}
