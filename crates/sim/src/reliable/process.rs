//! A process: the machine, the receives of its queue pairs, and the memory that messages are placed into.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{
    Action, Arrival, Bytes, Config, Failure, MessageId, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route,
    Target, Ticket,
};
use uwarp_wire::ddp::{Header as Ddp, QN_READ_REQUEST, QN_SEND};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::contact::{Hello, Open};
use uwarp_wire::rd::segment::First;
use uwarp_wire::rd::{Header, Kind as PacketKind, VERSION};
use uwarp_wire::{crc, rdmap};

use super::model::{Kind, MessageKey, Model};
use crate::links::Datagram;
use crate::{Rng, Time, instant, time};

const QKEY: u32 = 0x0102_0304;
const WRONG_QKEY: u32 = 0x0102_0305;
/// InfiniBand's code for 0.64 ms.
const RNR_TIMER: u8 = 12;
/// Receives, in thousandths, that give datagrams joined, and of how many bytes at most.
const JOINED: u32 = 700;
const MOST_JOINED: usize = 65_000;
/// Packets that are made in one call at most.
const MOST_AT_ONCE: u64 = 44;
/// Segments, in thousandths, during whose placement another thread sends.
const EARLY: u32 = 50;
/// In thousandths: packets whose payload cannot be read any more, of a process that withdraws messages.
const UNREADABLE: u32 = 10;

/// In the job key of an answer, beside the number of the request.
const IS_ANSWER: u64 = 1 << 32;

/// What a process has seen.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Counts {
    pub held: u64,
    pub joined: u64,
    pub taken_back: u64,
    pub no_receive: u64,
    pub withdrawn: u64,
}

/// A message that is being placed.
#[derive(Debug)]
struct Incoming {
    /// The model's number of it.
    number: usize,
    /// Its queue pair.
    qpn: u32,
    /// The receive that it took.
    receive: Option<u64>,
    bytes: Vec<Option<u8>>,
}

/// A process on a host.
pub struct Process {
    /// Its home port.
    pub at: SocketAddr,
    /// Counts the processes that have had the port.
    pub life: u32,
    /// Datagrams that have arrived at its socket.
    pub inbox: VecDeque<Datagram>,
    /// What it has seen.
    pub counts: Counts,
    rd: Rd,
    /// Bytes of the longest packet that it may send.
    longest: usize,
    stopped_until: Time,
    /// When it last did something.
    last_turn: Time,
    /// The machine wants to know what the interface takes that leads there.
    asked: Vec<Route>,
    posted: BTreeMap<Ticket, usize>,
    /// Requests to answer, and answers on their way. What the peer answers is told to the machine at the end
    /// of a turn.
    to_answer: Vec<(Route, QpnPair, usize)>,
    answers: BTreeSet<Ticket>,
    answered: Vec<(Route, Ticket)>,
    /// Receives of each queue pair, in the order in which they are used.
    receives: BTreeMap<u32, VecDeque<u64>>,
    /// Receives of each queue pair that exist, used or not.
    count: BTreeMap<u32, usize>,
    next_receive: u64,
    /// When the next receive may be posted.
    refill_at: Time,
    incoming: BTreeMap<MessageId, Incoming>,
    /// Receives in the order in which they completed.
    completed: Vec<u64>,
    packet: PacketBuf,
    /// Packets that were made with the last one.
    made: VecDeque<Datagram>,
    /// For what the process does on its own.
    rng: Rng,
    withdraws: bool,
}

impl Process {
    /// With so many queue pairs and without receives.
    pub fn new(now: Time, at: SocketAddr, config: Config, queue_pairs: u32, rng: &mut Rng) -> Self {
        let mut seed = [0; 32];
        let own = rng.clone().fork();
        rng.fill(&mut seed);
        let numbers = (1..=queue_pairs).map(|slot| u32::from(at.port()) << 8 | slot);
        Self {
            at,
            life: 0,
            inbox: VecDeque::new(),
            counts: Counts::default(),
            rd: Rd::new(&Now::at(instant(now)), config, &seed),
            longest: if config.most_taken > config.packet_len { super::INTERFACE } else { config.packet_len },
            stopped_until: 0,
            last_turn: 0,
            asked: Vec::new(),
            posted: BTreeMap::new(),
            to_answer: Vec::new(),
            answers: BTreeSet::new(),
            answered: Vec::new(),
            receives: numbers.clone().map(|qpn| (qpn, VecDeque::new())).collect(),
            count: numbers.map(|qpn| (qpn, 0)).collect(),
            next_receive: 0,
            refill_at: 0,
            incoming: BTreeMap::new(),
            completed: Vec::new(),
            packet: PacketBuf::new(),
            made: VecDeque::new(),
            rng: own,
            withdraws: false,
        }
    }

    /// Does nothing until then.
    pub fn stop(&mut self, until: Time) {
        self.stopped_until = until;
    }

    /// Whether it does nothing now.
    pub fn is_stopped(&self, now: Time) -> bool {
        now < self.stopped_until
    }

    /// Bytes that the machine holds.
    pub fn held_bytes(&self) -> usize {
        self.rd.held_bytes()
    }

    /// When it has something to do.
    pub fn next_time(&self, now: Time) -> Option<Time> {
        let waits = self.count.values().any(|count| *count == 0);
        let refill = (waits && self.refill_at > now).then_some(self.refill_at);
        let timer = self.rd.poll_timeout().map(time);
        let inbox = (!self.inbox.is_empty()).then_some(now);
        let next = [refill, timer, inbox].into_iter().flatten().min();
        next.map(|next| next.max(self.stopped_until))
    }

    /// Posts receives where there are fewer than `most`, and not before the last ones are `late` old.
    pub fn refill(&mut self, now: Time, most: usize, late: Time, rng: &mut Rng) {
        if now < self.refill_at {
            return;
        }
        for (qpn, receives) in &mut self.receives {
            let Some(count) = self.count.get_mut(qpn) else { continue };
            let before = *count;
            while *count < most {
                receives.push_back(self.next_receive);
                self.next_receive += 1;
                *count += 1;
            }
            if *count > before {
                self.rd.on_receives_posted(&Now::at(instant(now)), *qpn, receives.len());
            }
        }
        self.refill_at = now + rng.below(late + 1);
    }

    /// Posts a message.
    pub fn post(&mut self, now: Time, remote: SocketAddr, number: usize, key: &MessageKey, rnr_retry: u8) {
        let control = |opcode| rdmap::Control::new(opcode).to_byte();
        let target = match key.kind {
            Kind::Send => {
                Target::Untagged { qn: QN_SEND, rsvdulp: control(rdmap::Opcode::Send), rsvdulp32: 0 }
            }
            Kind::Request => {
                let rsvdulp = control(rdmap::Opcode::ReadRequest);
                Target::Untagged { qn: QN_READ_REQUEST, rsvdulp, rsvdulp32: 0 }
            }
            Kind::Write | Kind::WriteWithImmediate => {
                Target::Tagged { stag: number as u32, to: 0, rsvdulp: control(rdmap::Opcode::Write) }
            }
        };
        // The model's number travels as the job key.
        let immediate = key.kind.takes_receive().then_some((number as u32).to_be_bytes());
        let qkey = if key.is_refused { WRONG_QKEY } else { QKEY };
        let message = Outgoing {
            pair: key.pair,
            first: First { qkey, immediate, job_key: Some(number as u64) },
            target,
            len: key.len,
            ordered: key.is_ordered,
            rnr_retry,
            unrepeated: false,
        };
        let route = Route { local: self.at, remote };
        let ticket = self.rd.post(&Now::at(instant(now)), route, message).expect("there is room");
        self.posted.insert(ticket, number);
    }

    /// Gives a message up that has not ended, or all of a queue pair.
    pub fn withdraw_some(&mut self, now: Time, host: usize, model: &mut Model) {
        self.withdraws = true;
        let Some(last) = self.posted.len().checked_sub(1) else { return };
        let at = self.rng.size(0, last);
        let Some((ticket, number)) = self.posted.iter().nth(at).map(|(ticket, number)| (*ticket, *number))
        else {
            return;
        };
        if self.rng.chance(700) {
            self.withdraw(now, ticket, host, model);
            return;
        }
        let source = model.key(number).pair.source;
        let of_it = |number: &usize| model.key(*number).pair.source == source;
        let mut tickets: Vec<Ticket> =
            self.posted.iter().filter(|(_, number)| of_it(number)).map(|(ticket, _)| *ticket).collect();
        if self.rng.chance(500) {
            tickets.reverse();
        }
        tickets.into_iter().for_each(|ticket| self.withdraw(now, ticket, host, model));
        // A queue pair that has ended may be used again at once.
    }

    fn withdraw(&mut self, now: Time, ticket: Ticket, host: usize, model: &mut Model) {
        let number = self.posted.get(&ticket).copied();
        self.rd.withdraw(&Now::at(instant(now)), ticket);
        self.act(host, model);
        if let Some(number) = number {
            self.counts.withdrawn += 1;
            assert_eq!(model.outcome(number), Some(Err(Failure::Withdrawn)), "message {number} is withdrawn");
        }
        assert!(!self.posted.contains_key(&ticket));
    }

    /// Leaves.
    pub fn close(&mut self, now: Time) {
        self.rd.close(&Now::at(instant(now)));
    }

    /// Handles what has arrived and what is due. Sometimes another thread sends before all is placed: those
    /// packets are in `early`.
    pub fn turn(
        &mut self,
        now: Time,
        host: usize,
        model: &mut Model,
        rng: &mut Rng,
        early: &mut Vec<Datagram>,
    ) {
        let at = Now::at(instant(now));
        // It has waited for this, unless it was stopped.
        if self.stopped_until <= self.last_turn {
            self.rd.on_socket_empty(&at);
        }
        self.last_turn = now;
        while let Some((from, len, datagrams)) = self.receive(rng) {
            let route = Route { local: self.at, remote: from };
            let mut rest = &datagrams[..];
            while !rest.is_empty() {
                let mut arrivals = Vec::new();
                let handled = self.rd.handle_joined(&at, route, rest, len, &mut arrivals);
                self.act(host, model);
                while let Some(arrival) = (!arrivals.is_empty()).then(|| arrivals.remove(0)) {
                    if rng.chance(EARLY) {
                        early.extend(std::iter::from_fn(|| self.transmit(now, host, model)));
                    }
                    let placed = self.place(&arrival, rest, model);
                    self.rd.on_placed(&at, &arrival, placed, &mut arrivals);
                    self.act(host, model);
                }
                rest = rest.get(handled * len..).unwrap_or(&[]);
            }
        }
        if self.rd.poll_timeout().is_some_and(|due| time(due) <= now) {
            self.rd.handle_timeout(&at);
            self.act(host, model);
        }
        for (route, ticket) in std::mem::take(&mut self.answered) {
            self.rd.answered(&at, route, ticket);
        }
        for (route, asked, number) in std::mem::take(&mut self.to_answer) {
            let message = Outgoing {
                pair: QpnPair { source: asked.destination, destination: asked.source },
                first: First { qkey: QKEY, immediate: None, job_key: Some(number as u64 | IS_ANSWER) },
                target: Target::Tagged { stag: number as u32, to: 0, rsvdulp: 0 },
                len: (number % 5000) as u32,
                ordered: false,
                rnr_retry: 7,
                unrepeated: false,
            };
            // (None, if the process is leaving.)
            self.answers.extend(self.rd.post(&at, route, message));
        }
        self.act(host, model);
    }

    /// Datagrams as a call of the system gives them: those of one sender that are as long as the first may be
    /// joined, and a shorter one ends them. Whose they are, and the length of each.
    fn receive(&mut self, rng: &mut Rng) -> Option<(SocketAddr, usize, Vec<u8>)> {
        let Datagram { from, mut bytes, .. } = self.inbox.pop_front()?;
        let len = bytes.len();
        let joins = rng.chance(JOINED);
        while joins && bytes.len().is_multiple_of(len) && bytes.len() + len <= MOST_JOINED {
            let fits = |next: &Datagram| next.from == from && (1..=len).contains(&next.bytes.len());
            let Some(next) = self.inbox.front().filter(|next| fits(next)) else { break };
            bytes.extend_from_slice(&next.bytes);
            self.inbox.pop_front();
        }
        Some((from, len, bytes))
    }

    /// Places a segment, as the owner of queue pairs and memory does.
    fn place(&mut self, arrival: &Arrival, datagram: &[u8], model: &mut Model) -> Placed {
        if arrival.first.is_some_and(|first| first.qkey != QKEY) {
            return Placed::Refused(Reason::InvalidDestination);
        }
        let joined: Vec<u8>;
        let payload = match &arrival.bytes {
            Bytes::Datagram(range) => &datagram[range.clone()],
            Bytes::Joined(pieces) => {
                self.counts.joined += 1;
                joined = pieces.ranges().flat_map(|piece| &datagram[piece]).copied().collect();
                &joined[..]
            }
            Bytes::Held(bytes) => {
                self.counts.held += 1;
                &bytes[..]
            }
        };
        let is_send = matches!(arrival.ddp, Ddp::Untagged(ddp) if ddp.qn == QN_SEND);
        assert!(is_send || arrival.first.is_some(), "each has the right to its memory");
        let key = arrival.first.and_then(|first| first.job_key);
        if key.is_some_and(|key| key & IS_ANSWER != 0) {
            return Placed::Done;
        }
        let known = self.incoming.contains_key(&arrival.message);
        if !known {
            let mut receive = None;
            if is_send || arrival.first.is_some_and(|first| first.immediate.is_some()) {
                let qpn = arrival.pair.destination;
                let is_bound = |(message, incoming): &(&MessageId, &Incoming)| {
                    message.exchange == arrival.message.exchange
                        && incoming.qpn == qpn
                        && incoming.receive.is_some()
                };
                let bound = self.incoming.iter().filter(is_bound).count();
                let may_bind = self.rd.may_bind(arrival, self.count[&qpn]);
                assert_eq!(
                    may_bind,
                    bound < (self.count[&qpn] / 4).clamp(1, 16),
                    "{bound} receives of a peer"
                );
                let queue = self.receives.get_mut(&qpn).expect("a queue pair");
                receive = may_bind.then(|| queue.pop_front()).flatten();
                if receive.is_none() {
                    self.counts.no_receive += 1;
                    if let Some(number) = key {
                        model.not_ready(number as usize);
                    }
                    return Placed::NoReceive(RNR_TIMER);
                }
            }
            let bytes = vec![None; arrival.message_len as usize];
            self.incoming.insert(
                arrival.message,
                Incoming { number: usize::MAX, qpn: arrival.pair.destination, receive, bytes },
            );
        }
        let incoming = self.incoming.get_mut(&arrival.message).expect("it is there");
        if let Some(number) = key {
            incoming.number = number as usize;
        }
        let at = arrival.offset as usize;
        if incoming.number != usize::MAX {
            let key = model.key(incoming.number);
            let is_ascending = incoming.bytes[..at].iter().all(Option::is_some);
            let may_jump = key.kind == Kind::Send || !key.is_ordered;
            assert!(may_jump || is_ascending, "byte {at} of the ordered Write {}", incoming.number);
        }
        for (place, byte) in incoming.bytes[at..at + payload.len()].iter_mut().zip(payload) {
            *place = Some(*byte);
        }
        if incoming.number != usize::MAX {
            model.placed(incoming.number);
        }
        Placed::Done
    }

    /// Says what the interface takes.
    pub fn search(&mut self, now: Time, interface: usize) {
        for route in std::mem::take(&mut self.asked) {
            self.rd.search(&Now::at(instant(now)), route, interface);
        }
    }

    /// Does what the machine says.
    pub fn act(&mut self, host: usize, model: &mut Model) {
        while let Some(action) = self.rd.poll_action() {
            match action {
                Action::Finished { ticket, .. } if self.answers.remove(&ticket) => {}
                Action::Finished { ticket, outcome } => {
                    let number = self.posted.remove(&ticket).expect("a ticket ends once");
                    model.finished(number, outcome);
                }
                Action::Deliver { route, message, pair, len, first, takes_receive } => {
                    let number = first.job_key.expect("each has one");
                    if number & IS_ANSWER != 0 {
                        self.on_answer(route, (number ^ IS_ANSWER) as usize, model);
                        continue;
                    }
                    let number = number as usize;
                    let incoming = self.incoming.remove(&message).expect("what is delivered was placed");
                    assert_eq!(incoming.number, number);
                    let key = *model.key(number);
                    let expected = (host, pair, len, takes_receive);
                    assert_eq!((key.to, key.pair, key.len, key.kind.takes_receive()), expected);
                    if key.kind == Kind::Request {
                        self.to_answer.push((route, pair, number));
                    }
                    for (offset, byte) in incoming.bytes.iter().enumerate() {
                        let sent = Model::byte(number, offset as u32);
                        assert_eq!(*byte, Some(sent), "byte {offset} of message {number}");
                    }
                    assert_eq!(incoming.receive.is_some(), takes_receive);
                    self.completed.extend(incoming.receive);
                    if takes_receive {
                        *self.count.get_mut(&pair.destination).expect("a queue pair") -= 1;
                    }
                    model.delivered(number);
                }
                Action::AskLength { route } => self.asked.push(route),
                // There are no streams here.
                Action::AskPort { .. } => {}
                Action::TakeBack { message, pair } => {
                    self.counts.taken_back += 1;
                    let incoming = self.incoming.remove(&message).expect("it has begun");
                    let receive = incoming.receive.expect("it has a receive");
                    if incoming.number != usize::MAX {
                        model.not_ready(incoming.number);
                    }
                    self.receives.get_mut(&pair.destination).expect("a queue pair").push_front(receive);
                }
            }
        }
    }

    /// The answer to a request is there, unless that has failed meanwhile.
    fn on_answer(&mut self, route: Route, number: usize, model: &mut Model) {
        let posted = self.posted.iter().find(|(_, other)| **other == number);
        let Some(ticket) = posted.map(|(ticket, _)| *ticket) else { return };
        self.posted.remove(&ticket);
        model.finished(number, Ok(()));
        self.answered.push((route, ticket));
    }

    /// The next packet to send.
    pub fn transmit(&mut self, now: Time, host: usize, model: &mut Model) -> Option<Datagram> {
        if self.is_stopped(now) {
            return None;
        }
        if let Some(made) = self.made.pop_front() {
            return Some(made);
        }
        self.packet.allow(1 + self.rng.below(MOST_AT_ONCE) as usize, MOST_JOINED);
        let mut route = self.rd.poll_transmit(&Now::at(instant(now)), &mut self.packet)?;
        // Memory that is not there any more: the packet is not sent.
        while let Some(ticket) = self.packet.payloads().last().map(|payload| payload.ticket)
            && self.withdraws
            && self.posted.contains_key(&ticket)
            && self.rng.chance(UNREADABLE)
        {
            self.withdraw(now, ticket, host, model);
            route = self.rd.poll_transmit(&Now::at(instant(now)), &mut self.packet)?;
        }
        for nth in 0..self.packet.packets() {
            let bytes = self.assembled(nth, model);
            self.made.push_back(Datagram { from: route.local, to: route.remote, bytes });
        }
        self.made.pop_front()
    }

    fn assembled(&self, nth: u32, model: &Model) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.packet.packet_len());
        self.packet.assemble(nth, &mut bytes, |payload, out| {
            if self.answers.contains(&payload.ticket) {
                out.resize(out.len() + payload.len as usize, 0);
                return;
            }
            let number = self.posted[&payload.ticket];
            assert!(payload.offset + payload.len <= model.key(number).len, "beyond the message");
            out.extend((payload.offset..payload.offset + payload.len).map(|at| Model::byte(number, at)));
        });
        assert_eq!(bytes.len(), self.packet.packet_len());
        assert!(bytes.len() <= self.longest, "{} bytes", bytes.len());
        bytes
    }

    /// One ordered flow has used them.
    pub fn check_receives_in_order(&self) {
        assert!(self.completed.is_sorted(), "receives out of order: {:?}", self.completed);
    }

    /// A minute after the last packet nothing is left.
    pub fn check_empty(&self) {
        assert_eq!((self.rd.peers(), self.rd.held_bytes()), (0, 0), "what is kept of peers at {}", self.at);
        assert_eq!(self.rd.poll_timeout(), None);
        // A Write that has begun and failed leaves its bytes, and has nothing to give back.
        let sends = self.incoming.values().filter(|incoming| incoming.receive.is_some());
        assert_eq!(sends.count(), 0, "receives that are not given back");
        for (qpn, receives) in &self.receives {
            assert_eq!(receives.len(), self.count[qpn], "receives of {qpn:#x}");
        }
    }
}

/// Where it is, and the machine.
impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process").field("at", &self.at).field("rd", &self.rd).finish_non_exhaustive()
    }
}

fn header(from: SocketAddr, to: SocketAddr, kind: PacketKind, key: u64) -> Header {
    Header { version: VERSION, kind, source_port: from.port(), destination_port: to.port(), key, number: 1 }
}

fn sealed(mut packet: Vec<u8>) -> Vec<u8> {
    let sum = crc::to_wire(crc::crc32c(&packet));
    packet.extend(sum);
    packet
}

/// Whether a packet is an Open.
pub(super) fn is_open(packet: &[u8]) -> bool {
    Header::parse(packet).is_ok_and(|header| header.kind == PacketKind::Open)
}

/// A Hello in somebody's name.
pub(super) fn forged_hello(from: SocketAddr, to: SocketAddr, token: u64) -> Vec<u8> {
    let header = header(from, to, PacketKind::Hello, token);
    Hello { highest: VERSION, features: 0 }.to_packet(&header).to_vec()
}

/// A packet with a key that nobody has.
pub(super) fn forged_packet(from: SocketAddr, to: SocketAddr, key: u64) -> Vec<u8> {
    header(from, to, PacketKind::Packet, key).to_packet().to_vec()
}

/// An Open with a cookie that nobody has made.
pub(super) fn forged_open(from: SocketAddr, to: SocketAddr, key: u64) -> Vec<u8> {
    let mut packet = header(from, to, PacketKind::Open, key).to_bytes().to_vec();
    let open = Open { token: !key, made: 7, asked_port: to.port(), version: VERSION, features: 0 };
    packet.extend(open.to_bytes());
    packet.extend([7, 0, 0, 4]);
    sealed(packet)
}
