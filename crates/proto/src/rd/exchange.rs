//! An exchange: what two processes keep for each other once both have shown their addresses.

mod answers;
mod doubt;
mod heard;
mod transmit;

use std::time::{Duration, Instant};

use smallvec::SmallVec;
use uwarp_wire::rd::ack::{Ack, CREDIT_UNIT, TIME_UNIT_US};
use uwarp_wire::rd::chunk::{Chunk, Reason, Verdict, chunks};
use uwarp_wire::rd::contact::Open;
use uwarp_wire::rd::segment::Segment;
use uwarp_wire::rd::{Header, expand};

use super::Config;
use super::congestion::{Congestion, Pacer, Report};
use super::incoming::{IncomingMessages, Taken};
use super::joined::Joined;
use super::message::{Action, Arrival, Bytes, Failure, Outgoing, Pieces, Placed, Route, Ticket};
use super::outgoing::{Finished, OutgoingMessages};
use super::path::{self, Path};
use super::received::{self, Received};
use super::recovery::{Content, Contents, News, Recovery};
use super::rtt::Rtt;
use super::stream_calls::Services;
use super::streams::Streams;
use super::unrepeated::Unrepeated;
use answers::Answers;
use doubt::{Doubt, Refusals};
use heard::Heard;
pub(super) use transmit::Made;

/// Without a packet for this long, an exchange rests.
const REST: Duration = Duration::from_secs(30);
/// After this time a new contact begins, because the peer may forget the exchange soon.
const TOO_OLD: Duration = Duration::from_secs(32);
/// An exchange, or its token, lives at least this long (docs/rd.md section 4, rule 3).
pub(super) const LIFE: Duration = Duration::from_secs(60);
/// An Open may be repeated for this long; then its cookie is too old.
const OPENING: Duration = Duration::from_secs(15);
/// Answers "unknown" to probes that end an exchange.
const UNKNOWNS: u32 = 3;

/// How far an exchange has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The peer has not answered the Open yet.
    Opening,
    Up,
    /// Nothing was sent or received for some time, or the peer leaves.
    Resting,
}

/// What begins an exchange.
#[derive(Debug, Clone, Copy)]
pub(super) struct Start {
    pub(super) id: u64,
    pub(super) route: Route,
    /// By which this process knows it, and the peer.
    pub(super) own_key: u64,
    pub(super) peer_key: u64,
    /// The RD version of its packets.
    pub(super) version: u8,
    /// Bytes of the longest packet at first, and of the longest that the peer takes.
    pub(super) longest: usize,
    pub(super) peer_takes: usize,
    /// Requests without an answer at a time.
    pub(super) most_requests: usize,
    /// Charge that it lets this process have in flight at first.
    pub(super) credit: u64,
    /// The features that both ends use.
    pub(super) features: u32,
    /// In the initiator, what an Open says; in the responder, when the cookie was made.
    pub(super) role: Role,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    Initiator(Open),
    Responder {
        /// By the clock of the cookies.
        made: u64,
    },
}

/// Why an exchange is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    /// Messages that are under way fail for this reason. What is queued may go to a new exchange.
    Failed(Failure),
    /// It is too old.
    Forgotten,
}

/// What a packet has come to.
#[derive(Debug, Default)]
pub(super) struct Handled {
    /// The exchange is over.
    pub(super) over: Option<Over>,
    /// So many of the datagrams behind it were handled with it.
    pub(super) more: u32,
}

/// One exchange.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) start: Start,
    pub(super) phase: Phase,
    /// The peer has said that it ignored the Opens.
    pub(super) is_crossed: bool,
    born: Instant,
    last_heard: Instant,
    /// The last packet in either direction that keeps the exchange alive.
    last_used: Instant,
    /// Since when the peer owes something.
    waiting_since: Option<Instant>,
    doubt: Doubt,
    refusals: Refusals,
    recovery: Recovery,
    pub(super) congestion: Congestion,
    pacer: Pacer,
    /// CE marks that the peer has reported.
    marks: u32,
    /// Bytes that the path lets be in flight, as of the last packet.
    window: u64,
    /// Charge that the peer lets be in flight.
    credit: u64,
    pub(super) path: Path,
    received: Received,
    answers: Answers,
    pub(super) outgoing: OutgoingMessages,
    pub(super) unrepeated: Unrepeated,
    pub(super) streams: Streams,
    /// Streams go first into the next packet, if there are messages, too.
    pub(super) is_streams_turn: bool,
    incoming: IncomingMessages,
    /// Queue pairs for which the peer was refused, and receives that they have now: to say yet.
    ready: SmallVec<[(u32, u8); 1]>,
    /// Probes to send now, and whether without data.
    probes: u8,
    is_bare: bool,
    /// PINGs since the last news of a message.
    pings: u32,
    /// Answers "unknown" in a row: the first, and those to the probes after it. When the last one counted, or
    /// the probe after it was sent.
    unknowns: u32,
    unknown_at: Instant,
    has_probed: bool,
    /// When an Open came first that would end this exchange.
    open_at: Option<Instant>,
    /// CLOSE to send yet, and when.
    closes: u8,
    close_at: Option<Instant>,
}

impl Exchange {
    pub(super) fn new(now: Instant, start: Start, rtt: Rtt) -> Self {
        let phase = match start.role {
            Role::Initiator(_) => Phase::Opening,
            Role::Responder { .. } => Phase::Up,
        };
        Self {
            start,
            phase,
            is_crossed: false,
            born: now,
            last_heard: now,
            last_used: now,
            waiting_since: None,
            doubt: Doubt::new(now),
            refusals: Refusals::Untried,
            recovery: Recovery::new(rtt, u32::try_from(start.longest).unwrap_or(u32::MAX)),
            congestion: Congestion::new(),
            pacer: Pacer::default(),
            marks: 0,
            window: 0,
            credit: start.credit,
            path: Path::new(start.longest, start.peer_takes),
            received: Received::default(),
            answers: Answers::default(),
            outgoing: OutgoingMessages::new(start.most_requests),
            unrepeated: Unrepeated::default(),
            streams: Streams::default(),
            is_streams_turn: false,
            incoming: IncomingMessages::new(start.id),
            ready: SmallVec::new(),
            probes: 0,
            is_bare: false,
            pings: 0,
            unknowns: 0,
            unknown_at: now,
            has_probed: false,
            open_at: None,
            closes: 0,
            close_at: None,
        }
    }

    pub(super) fn is_responder(&self) -> bool {
        matches!(self.start.role, Role::Responder { .. })
    }

    /// Whether a new message may go into it.
    pub(super) fn takes_messages(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Opening => true,
            Phase::Up => {
                now < self.last_used + TOO_OLD || self.outgoing.has_begun() || !self.streams.is_empty()
            }
            Phase::Resting => false,
        }
    }

    /// Whether an answer to a PING would make it take messages again.
    pub(super) fn may_wake(&self, now: Instant) -> bool {
        self.phase == Phase::Resting && now < self.last_used + TOO_OLD
    }

    /// Asks the peer whether it still knows the exchange.
    pub(super) fn ping(&mut self, now: Instant) {
        if !self.recovery.is_waiting() && self.probes == 0 {
            self.probes = 1;
            self.waiting_since.get_or_insert(now);
        }
    }

    pub(super) fn post(&mut self, now: Instant, ticket: Ticket, message: Outgoing) {
        if !self.streams.is_empty() && self.has_nothing() {
            // Streams have more patience: the time of messages begins here.
            self.waiting_since = Some(now);
        }
        if message.unrepeated {
            self.post_unrepeated(now, ticket, message);
        } else {
            self.outgoing.post(ticket, message);
        }
        self.waiting_since.get_or_insert(now);
    }

    /// The owner gives a message up. `Some`: it was here, and had not ended.
    pub(super) fn withdraw(
        &mut self,
        now: Instant,
        ticket: Ticket,
        actions: &mut Vec<Action>,
    ) -> Option<Outgoing> {
        let mut finished = Finished::new();
        let message = self
            .outgoing
            .withdraw(ticket, &mut finished)
            .or_else(|| self.unrepeated.withdraw(ticket, &mut finished));
        report(finished, actions);
        self.note_waiting(now);
        message
    }

    /// The owner has the answer to a request. Returns whether it was here.
    pub(super) fn on_answered(&mut self, now: Instant, ticket: Ticket, actions: &mut Vec<Action>) -> bool {
        let mut finished = Finished::new();
        let was_here = self.outgoing.on_answered(ticket, &mut finished);
        report(finished, actions);
        self.note_waiting(now);
        was_here
    }

    /// An Open that was never sent, and has nothing to say any more.
    pub(super) fn is_idle_opening(&self) -> bool {
        self.phase == Phase::Opening && self.has_nothing() && self.recovery.next_number() == 1
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.incoming.held_bytes()
    }

    /// When the last packet of the peer came.
    pub(super) fn last_heard(&self) -> Instant {
        self.last_heard
    }

    /// An Open would end this exchange. Whether the peer owes an acknowledgement first: for the time that two
    /// probes take, from the first such Open on.
    pub(super) fn holds_open_off(&mut self, now: Instant) -> bool {
        if !self.recovery.is_waiting() || self.is_doubtful() {
            return false;
        }
        let rtt = &self.recovery.rtt;
        now < *self.open_at.get_or_insert(now) + rtt.probe_delay(0) + rtt.probe_delay(1)
    }

    /// Whether probes had no answer.
    pub(super) fn is_doubtful(&self) -> bool {
        self.recovery.probes() >= 2
    }

    /// Whether nothing is under way that the peer must answer.
    pub(super) fn nothing_is_owed(&self) -> bool {
        !self.recovery.is_waiting() && self.probes == 0
    }

    // --- Input.

    /// A packet with the right key. Its chunks are `body`, which begins at `at` in the datagram. The socket
    /// had not been found empty for the time `blind`.
    #[allow(clippy::too_many_arguments, reason = "what came, when, and where to put what follows from it")]
    pub(super) fn handle_input(
        &mut self,
        now: Instant,
        blind: Duration,
        header: &Header,
        body: &[u8],
        at: usize,
        joined: Joined<'_>,
        arrivals: &mut Vec<Arrival>,
        actions: &mut Vec<Action>,
        services: &mut Services,
    ) -> Handled {
        let mut handled = Handled::default();
        let number = expand(header.number, self.received.largest());
        if number == 0 || header.version != self.start.version {
            return handled;
        }
        // All or nothing, so that no half of a damaged or hostile packet takes effect.
        let mut all = SmallVec::<[(Chunk<'_>, usize); 3]>::new();
        let mut unread = chunks(body);
        while let Some(chunk) = unread.next() {
            let Ok(chunk) = chunk else { return handled };
            all.push((chunk, at + body.len() - unread.remaining()));
        }
        (self.last_heard, self.last_used) = (now, now);
        self.weigh_refusals();
        self.unknowns = 0;
        if self.phase == Phase::Resting {
            self.phase = Phase::Up;
        }
        if self.received.contains(number) {
            self.received.on_copy(now);
            return handled;
        }
        let mut heard = Heard { is_latest: number > self.received.largest(), ..Heard::default() };
        let may_go_on = !joined.behind.is_empty() && heard.is_latest && all.len() == 1;
        for (chunk, end) in &all {
            match chunk {
                Chunk::Ack(ack) => {
                    let Some(acknowledges) = self.on_ack(now, blind, ack, actions) else { return handled };
                    heard.acknowledges |= acknowledges;
                    if heard.is_latest {
                        self.credit = u64::from(ack.head.credit) * CREDIT_UNIT;
                    }
                }
                Chunk::Segment(segment) => {
                    let joined = may_go_on.then_some(joined);
                    handled.more = self.on_segment(now, number, segment, *end, joined, &mut heard, arrivals);
                }
                Chunk::Abandon(abandon) => {
                    (heard.eliciting, heard.is_awaited) = (true, true);
                    let (route, messages) = (self.start.route, abandon.messages());
                    let taken = self.incoming.on_abandon(now, route, messages, arrivals, actions);
                    heard.is_dropped |= taken == Taken::No;
                }
                Chunk::Stream(stream) => {
                    (heard.eliciting, heard.is_awaited, heard.has_data) = (true, true, true);
                    heard.at_once |= stream.acknowledge;
                    let bytes = end - stream.data.len()..*end;
                    if may_go_on && self.streams.goes_on(stream) {
                        handled.more = joined.take_followers(&bytes, &mut heard.at_once);
                    }
                    let pieces = |more| Pieces::new(bytes.clone(), joined.datagram.len(), more);
                    let mut is_taken = self.on_stream(stream, &pieces(handled.more), services);
                    if !is_taken && handled.more > 0 {
                        // There may be room for the first of them.
                        handled.more = 0;
                        is_taken = self.on_stream(stream, &pieces(0), services);
                    }
                    heard.is_dropped |= !is_taken;
                }
                other => self.on_other(now, other, &mut heard, actions),
            }
        }
        if heard.is_dropped {
            // The sender must hear that its peer lives, and what did arrive.
            self.received.hurry(now);
        } else {
            let numbers = number..number + u64::from(handled.more) + 1;
            self.received.on_packets(now, numbers, body.len(), heard.wish(), blind);
        }
        if std::mem::take(&mut self.incoming.has_news) {
            self.received.hurry(now);
        }
        self.answers.on_packet(now, &heard);
        self.note_waiting(now);
        handled.over = heard.over;
        handled
    }

    /// A segment whose payload ends here in its datagram. `joined`: what may be handled with it. Returns how
    /// many of those behind it were.
    #[allow(clippy::too_many_arguments, reason = "what came, when, and where to put what follows from it")]
    fn on_segment(
        &mut self,
        now: Instant,
        number: u64,
        segment: &Segment<'_>,
        end: usize,
        joined: Option<Joined<'_>>,
        heard: &mut Heard,
        arrivals: &mut Vec<Arrival>,
    ) -> u32 {
        (heard.eliciting, heard.has_data) = (true, true);
        heard.is_awaited |= !segment.head.not_repeated;
        heard.at_once |= segment.head.acknowledge;
        let (payload, mut more) = (end - segment.payload.len()..end, 0);
        let bytes = match joined {
            Some(joined) if !segment.head.not_repeated && self.incoming.goes_on(segment) => {
                more = joined.take_followers(&payload, &mut heard.at_once);
                Bytes::Joined(Pieces::new(payload, joined.datagram.len(), more))
            }
            _ => Bytes::Datagram(payload),
        };
        let (route, last) = (self.start.route, number + u64::from(more));
        let taken = self.incoming.on_segment(now, route, last, segment, bytes, arrivals);
        heard.is_dropped |= taken == Taken::No;
        more
    }

    /// Whether it acknowledges something that is news. `None`: the peer lies, and the packet is dropped.
    fn on_ack(
        &mut self,
        now: Instant,
        own_blind: Duration,
        ack: &Ack<'_>,
        actions: &mut Vec<Action>,
    ) -> Option<bool> {
        let next = self.outgoing.next_number();
        let largest = expand(ack.head.largest, self.recovery.next_number());
        let floor = Some(expand(ack.head.floor, next)).filter(|floor| *floor <= next)?;
        let ranges = received::packets(largest, ack.packets())?;
        let delay = Duration::from_micros(u64::from(ack.head.delay) * TIME_UNIT_US);
        // The sample may have waited for either program.
        let blind = Duration::from_micros(u64::from(ack.head.blind) * TIME_UNIT_US).max(own_blind);
        let mut news = News::default();
        let before = self.recovery.in_flight_soon();
        self.recovery.on_ack(now, &ranges, delay, &mut news).ok()?;
        // An older ACK that comes late counts fewer.
        let marks = ack.head.ce.map_or(0, |marks| marks.saturating_sub(self.marks));
        self.marks += marks;
        self.report(now, &news, before, Report { blind, marks, ..Report::default() });
        self.on_news(now, &news);
        let mut finished = Finished::new();
        let mut is_news = self.outgoing.on_floor(floor, &mut finished);
        let mut at = floor;
        for range in ack.messages() {
            let start = at + u64::from(range.gap);
            at = start + u64::from(range.length);
            for number in start..at.min(next) {
                is_news |= self.outgoing.on_ended(number, &mut finished);
            }
        }
        if is_news {
            self.pings = 0;
            self.outgoing.fail_in_turn(&mut finished);
        }
        self.on_groups(&news);
        report(finished, actions);
        Some(news.progress)
    }

    fn on_other(&mut self, now: Instant, chunk: &Chunk<'_>, heard: &mut Heard, actions: &mut Vec<Action>) {
        match *chunk {
            Chunk::Pad(_) | Chunk::Unknown(_) => return,
            Chunk::Verdict(Verdict { message, reason, timer, detail }) => {
                let message = expand(message, self.outgoing.next_number());
                let packet = expand16(detail, self.recovery.next_number());
                self.outgoing.on_verdict(now, message, reason, timer, packet);
                let mut finished = Finished::new();
                self.outgoing.fail_in_turn(&mut finished);
                report(finished, actions);
            }
            Chunk::Ready(ready) => self.outgoing.on_ready(ready.qpn, ready.receives),
            Chunk::Ping => heard.at_once = true,
            Chunk::Close(close) => {
                let next = self.outgoing.next_number();
                let mut finished = Finished::new();
                self.outgoing.on_floor(expand(close.floor, next).min(next), &mut finished);
                report(finished, actions);
                heard.over = Some(Over::Failed(Failure::Restarted));
            }
            Chunk::StreamCredit(credit) if self.has_streams() => self.streams.on_credit(credit),
            Chunk::StreamReset(reset) if self.has_streams() => {
                self.streams.on_reset(reset.stream, self.is_responder());
            }
            // TODO(docs/rd.md section 8): further ports come with the driver. A peer uses them only with a
            // feature bit that this version does not offer.
            _ => {}
        }
        (heard.eliciting, heard.is_awaited) = (true, true);
    }

    /// The congestion response hears of everything that an acknowledgement, or the time, has shown.
    fn report(&mut self, now: Instant, news: &News, before: u64, rest: Report) {
        let report = Report {
            sample: news.sample,
            acknowledged: news.acknowledged_packets,
            lost: news.lost_packets,
            run: news.run,
            late: news.late_packets,
            largest: self.recovery.largest_acknowledged(),
            next: self.recovery.next_number(),
            is_used: before * 2 >= self.window,
            ..rest
        };
        self.congestion.on_report(now, &report);
    }

    fn on_news(&mut self, now: Instant, news: &News) {
        let lost = news.long_lost.map(|(sent, bytes)| (sent, bytes as usize));
        let less = self.path.on_fates(now, news.longest_arrived as usize, lost);
        less.into_iter().for_each(|factor| self.congestion.rescale(factor));
        for content in &news.acknowledged {
            match *content {
                Content::Segment { message, attempt, start, end } => {
                    self.outgoing.on_acknowledged(message, attempt, start, end);
                }
                Content::Verdict { message, packet, reason } => {
                    self.incoming.on_verdict_arrived(message, packet, reason);
                }
                Content::Ack { largest } => self.received.on_ack_arrived(largest),
                Content::Length { bytes } => {
                    let more = self.path.on_arrived(bytes as usize);
                    more.into_iter().for_each(|factor| self.congestion.rescale(factor));
                }
                Content::Stream(content) => self.streams.on_acknowledged(content),
                Content::Abandon { .. } | Content::Ready { .. } | Content::Control(_) => {}
            }
        }
        for content in &news.lost {
            self.repair(content);
        }
    }

    /// What is not confirmed of a group that has arrived goes again.
    fn on_groups(&mut self, news: &News) {
        for content in &news.acknowledged {
            if let Content::Abandon { group } = content {
                self.outgoing.on_abandon_due(*group);
            }
        }
    }

    fn repair(&mut self, content: &Content) {
        match *content {
            Content::Segment { message, attempt, start, end } => {
                self.outgoing.on_lost(message, attempt, start, end);
            }
            Content::Abandon { group } => self.outgoing.on_abandon_due(group),
            Content::Ready { qpn, receives } => self.on_receives_posted(qpn, receives),
            Content::Length { bytes } => self.path.on_lost(bytes as usize),
            Content::Stream(content) => self.streams.on_lost(content),
            Content::Control(control) => self.streams.say_again(control),
            // They go with every ACK.
            Content::Verdict { .. } | Content::Ack { .. } => {}
        }
    }

    /// The peer was refused for want of a receive in this queue pair, which has so many now.
    pub(super) fn on_receives_posted(&mut self, qpn: u32, receives: u8) {
        self.ready.retain(|(other, _)| *other != qpn);
        self.ready.push((qpn, receives));
    }

    /// Receives of a queue pair that messages of the peer have taken and not completed.
    pub(super) fn bound(&self, qpn: u32) -> usize {
        self.incoming.bound(qpn)
    }

    /// The owner has placed a segment, or not.
    pub(super) fn on_placed(
        &mut self,
        now: Instant,
        arrival: &Arrival,
        placed: Placed,
        arrivals: &mut Vec<Arrival>,
        actions: &mut Vec<Action>,
    ) {
        self.incoming.on_placed(now, arrival, placed, arrivals, actions);
        if std::mem::take(&mut self.incoming.has_news) {
            self.received.hurry(now);
        }
    }

    /// A queue pair has ended.
    pub(super) fn refuse_all(&mut self, now: Instant, qpn: u32, reason: Reason, actions: &mut Vec<Action>) {
        self.incoming.refuse_all(qpn, reason, actions);
        if std::mem::take(&mut self.incoming.has_news) {
            self.received.hurry(now);
        }
    }

    /// The peer's process does not know the key. Returns whether the exchange is over.
    pub(super) fn on_unknown(&mut self, now: Instant) -> bool {
        if self.phase == Phase::Resting {
            return true;
        }
        if self.unknowns == 0 || self.has_probed {
            self.unknowns += 1;
            (self.unknown_at, self.has_probed) = (now, false);
            self.waiting_since.get_or_insert(now);
        }
        self.unknowns > UNKNOWNS
    }

    // --- Time.

    /// When [`Self::handle_timeout`] or [`Self::poll_transmit`] has something to do.
    pub(super) fn timeout(&self, config: &Config) -> Instant {
        if self.closes > 0 {
            return self.close_at.unwrap_or(self.last_used);
        }
        let patience = self.patience(config);
        let life = match self.phase {
            Phase::Opening => self.born + OPENING,
            // It does not rest while the peer owes something, or there are streams.
            Phase::Up => {
                let stays = patience.or_else(|| self.stream_ping_at());
                stays.unwrap_or_else(|| self.last_used + REST)
            }
            Phase::Resting => (self.last_used + LIFE).max(self.born + LIFE),
        };
        let others = [
            self.recovery.timeout(),
            self.received.due(),
            self.outgoing.timeout(),
            self.incoming.timeout(),
            self.ping_at(),
            patience.filter(|_| self.phase != Phase::Up),
            self.unknown_probe_at(),
            self.paced_until(config),
            self.streams.timeout(),
            self.doubt_at(),
        ];
        others.into_iter().flatten().fold(life, Instant::min)
    }

    /// The window is open, but the next packet must wait.
    fn paced_until(&self, config: &Config) -> Option<Instant> {
        let is_open = self.has_room(config, 0) && self.is_sendable();
        self.pacer.next().filter(|_| is_open && self.phase != Phase::Resting)
    }

    /// All packets are acknowledged, and a message has not ended.
    fn ping_at(&self) -> Option<Instant> {
        let is_idle = !self.recovery.is_waiting() && !self.is_sendable() && self.probes == 0;
        let is_waiting = is_idle && self.outgoing.awaits_news() && self.outgoing.next_abandon().is_none();
        let last = self.recovery.last_eliciting().filter(|_| is_waiting)?;
        Some(last + self.recovery.rtt.probe_delay(self.pings))
    }

    /// This end stood still for so long: it could not hear the peer either.
    pub(super) fn excuse(&mut self, time: Duration) {
        self.waiting_since = self.waiting_since.map(|since| since.max(self.last_heard) + time);
    }

    fn unknown_probe_at(&self) -> Option<Instant> {
        let is_due = self.unknowns > 0 && !self.has_probed;
        is_due.then(|| self.unknown_at + self.recovery.rtt.probe_delay(0))
    }

    /// Keeps `waiting_since` true.
    fn note_waiting(&mut self, now: Instant) {
        let owes = !self.has_nothing() || self.recovery.is_waiting() || self.probes > 0;
        if !owes {
            self.waiting_since = None;
        } else if self.waiting_since.is_none() {
            self.waiting_since = Some(now);
        }
    }

    /// Lists that are empty keep room for what comes next, and now nothing may come.
    fn shrink(&mut self) {
        self.outgoing.shrink();
        self.incoming.shrink();
        self.recovery.shrink();
    }

    /// Does what is due. `Some`: the exchange is over.
    pub(super) fn handle_timeout(
        &mut self,
        now: Instant,
        config: &Config,
        actions: &mut Vec<Action>,
    ) -> Option<Over> {
        if self.closes > 0 {
            return None;
        }
        if self.patience(config).is_some_and(|at| at <= now) {
            return Some(Over::Failed(Failure::Silent));
        }
        match self.phase {
            Phase::Opening if self.born + OPENING <= now => return Some(Over::Failed(Failure::Silent)),
            Phase::Up
                if self.last_used + REST <= now
                    && self.waiting_since.is_none()
                    && self.streams.is_empty() =>
            {
                self.phase = Phase::Resting;
                self.shrink();
            }
            Phase::Resting if now >= (self.last_used + LIFE).max(self.born + LIFE) => {
                return Some(Over::Forgotten);
            }
            _ => {}
        }
        let mut news = News::default();
        let before = self.recovery.in_flight_soon();
        if self.recovery.on_timeout(now, &mut news) {
            self.probes = 1;
            if self.recovery.probes() >= path::TIMEOUTS {
                let less = self.path.on_silence(now);
                less.into_iter().for_each(|factor| self.congestion.rescale(factor));
            }
            // Each second probe is a PING: it is always taken, and so its acknowledgement shows what is lost.
            self.is_bare = self.recovery.probes().is_multiple_of(2);
            if !self.is_bare {
                let oldest: Contents = self.recovery.oldest().collect();
                let repeats = |content: &&Content| !matches!(content, Content::Length { .. });
                oldest.iter().filter(repeats).for_each(|content| self.repair(content));
            }
        }
        self.report(now, &news, before, Report::default());
        self.on_news(now, &news);
        self.outgoing.on_timeout(now);
        self.incoming.on_timeout(now, actions);
        if std::mem::take(&mut self.incoming.has_news) {
            self.received.hurry(now);
        }
        self.streams.on_timeout(now);
        if self.stream_ping_at().is_some_and(|at| at <= now) {
            self.ping(now);
        }
        if self.ping_at().is_some_and(|at| at <= now) {
            self.probes = 1;
            self.pings = self.pings.saturating_add(1);
        }
        if self.unknown_probe_at().is_some_and(|at| at <= now) {
            self.probes = 1;
            (self.unknown_at, self.has_probed) = (now, true);
        }
        if let Some(urgent) = self.question(now) {
            actions.push(Action::AskPort { route: self.start.route, urgent });
        }
        // A lost PING is not repeated: then the peer owes nothing any more.
        self.note_waiting(now);
        None
    }

    /// The exchange ends. Returns what was queued and may go to another one.
    pub(super) fn end(&mut self, failure: Failure, actions: &mut Vec<Action>) -> Vec<(Ticket, Outgoing)> {
        let mut finished = Finished::new();
        let mut queued = self.outgoing.end(failure, &mut finished);
        self.unrepeated.end(failure, &mut finished, &mut queued);
        self.streams.fail(failure);
        report(finished, actions);
        self.incoming.give_everything_back(actions);
        queued
    }

    /// All messages, those in Opens too: the peer has ignored them in words.
    pub(super) fn take_all(&mut self, actions: &mut Vec<Action>) -> Vec<(Ticket, Outgoing)> {
        let mut finished = Finished::new();
        let mut messages = self.outgoing.take_all(&mut finished);
        self.unrepeated.end(Failure::Restarted, &mut finished, &mut messages);
        report(finished, actions);
        messages
    }

    /// The process leaves: says so twice.
    pub(super) fn close(&mut self) {
        if self.phase != Phase::Opening {
            (self.closes, self.close_at) = (2, None);
        }
    }

    /// Nothing more is to be said.
    pub(super) fn is_closed(&self) -> bool {
        self.closes == 0
    }
}

pub(super) fn report(finished: Finished, actions: &mut Vec<Action>) {
    for (ticket, outcome) in finished {
        actions.push(Action::Finished { ticket, outcome });
    }
}

/// The packet whose low 16 bits are these, among those that were sent.
fn expand16(low: u16, next: u64) -> u64 {
    const SPAN: u64 = 1 << 16;
    let candidate = (next & !(SPAN - 1)) | u64::from(low);
    if candidate < next { candidate } else { candidate.saturating_sub(SPAN) }
}
