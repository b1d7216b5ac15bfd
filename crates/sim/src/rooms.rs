//! Endless streams of reliable datagrams to one process whose socket has little memory (docs/rd.md section
//! 7.2).
//!
//! ```text
//!   senders ─▶ rate, random loss, delay ─▶ socket: drops what has no room ─▶ receiver, at times
//!           ◀─ delay, half of the random loss ◀─────────────────────────────
//! ```
//!
//! The socket charges a datagram as Linux does. The program looks at it now and then and takes all that is
//! there.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{Action, Config, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route, Target};
use uwarp_wire::rd::segment::First;

use crate::links::{Datagram, LinkParams, Links};
use crate::{Rng, Time, instant, time};

/// Messages that a sender has posted.
const POSTED: u32 = 400;

/// What happens.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Senders, each on a host of its own.
    pub senders: u8,
    /// Bytes in a second that the link of each takes.
    pub rate: u64,
    /// One way.
    pub delay: Time,
    /// Random loss, in thousandths.
    pub loss: u32,
    /// What the socket takes: `SO_RCVBUF`.
    pub socket: u64,
    /// What the receiver believes that it takes.
    pub believed: u64,
    /// The receiver looks at its socket so often.
    pub every: Time,
    /// Bytes of a message.
    pub message: u32,
    /// How long the run takes.
    pub duration: Time,
}

/// What came of it.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Bytes that were delivered in each tenth of the run.
    pub tenths: [u64; 10],
    /// Bytes that were delivered of each sender.
    pub of_senders: Vec<u64>,
    /// Datagrams that came to the socket.
    pub arrived: u64,
    /// And those for which it had no room.
    pub dropped: u32,
    /// The most that the socket was charged.
    pub most: u64,
}

impl Outcome {
    /// Bytes that were delivered.
    pub fn bytes(&self) -> u64 {
        self.tenths.iter().sum()
    }
}

struct Sender {
    rd: Rd,
    at: SocketAddr,
    posted: u32,
}

struct Receiver {
    rd: Rd,
    inbox: VecDeque<Datagram>,
    charged: u64,
    /// When it looks next.
    looks: Time,
    delivered: BTreeMap<u64, u64>,
}

/// `truesize` of a received UDP datagram: the packet's memory in steps of the allocator, and its `sk_buff`.
fn charge(len: usize) -> u64 {
    768 + (len as u64).div_ceil(256) * 256
}

fn receiver_at() -> SocketAddr {
    ([10, 0, 0, 1], 20_000).into()
}

/// Runs a plan. Repeatable by its seed.
///
/// # Panics
/// If a message fails.
pub fn run(seed: u64, plan: Plan) -> Outcome {
    let mut rng = Rng::new(seed ^ 0x9A2D);
    let delay = (plan.delay, plan.delay + 2_000);
    let back = LinkParams { delay, loss: plan.loss / 2, ..LinkParams::default() };
    let there = LinkParams { rate: plan.rate, queue: 10_000_000, loss: plan.loss, ..back };
    let mut links = Links::new(rng.fork(), back);
    let mut rd = || {
        let mut seed = [0; 32];
        rng.fill(&mut seed);
        Rd::new(&Now::at(instant(0)), Config::default(), &seed)
    };
    let mut receiver =
        Receiver { rd: rd(), inbox: VecDeque::new(), charged: 0, looks: 0, delivered: BTreeMap::new() };
    receiver.rd.set_room(plan.believed);
    let mut senders: Vec<Sender> = (0..plan.senders)
        .map(|host| Sender { rd: rd(), at: ([10, 0, 1, host], 20_000).into(), posted: 0 })
        .collect();
    let mut outcome = Outcome::default();
    for sender in &mut senders {
        links.set(sender.at.ip(), receiver_at().ip(), there);
        sender.go_on(0, plan.message, &mut links);
    }
    let mut now = 0;
    loop {
        let timers = senders.iter().map(|sender| &sender.rd).chain([&receiver.rd]);
        let timers = timers.filter_map(|rd| rd.poll_timeout()).map(time);
        let looks = (!receiver.inbox.is_empty()).then_some(receiver.looks);
        let next = timers.chain(links.next()).chain(looks).min();
        let Some(next) = next.filter(|next| *next < plan.duration) else { break };
        now = next.max(now);
        while let Some(datagram) = links.receive(now) {
            if datagram.to == receiver_at() {
                receiver.take(datagram, &plan, &mut outcome);
            } else if let Some(sender) = senders.iter_mut().find(|sender| sender.at == datagram.to) {
                sender.receive(now, &datagram, plan.message, &mut links);
            }
        }
        if receiver.looks <= now {
            receiver.look(now, &plan, &mut outcome, &mut links);
        }
        let at = Now::at(instant(now));
        if receiver.rd.poll_timeout().is_some_and(|due| time(due) <= now) {
            receiver.rd.handle_timeout(&at);
            transmit(&mut receiver.rd, now, &mut links);
        }
        for sender in &mut senders {
            if sender.rd.poll_timeout().is_some_and(|due| time(due) <= now) {
                sender.rd.handle_timeout(&at);
                sender.go_on(now, plan.message, &mut links);
            }
        }
    }
    outcome.of_senders = receiver.delivered.into_values().collect();
    outcome
}

impl Receiver {
    fn take(&mut self, datagram: Datagram, plan: &Plan, outcome: &mut Outcome) {
        outcome.arrived += 1;
        let cost = charge(datagram.bytes.len());
        if self.charged + cost > plan.socket {
            outcome.dropped += 1;
            return;
        }
        self.charged += cost;
        outcome.most = outcome.most.max(self.charged);
        self.inbox.push_back(datagram);
    }

    fn look(&mut self, now: Time, plan: &Plan, outcome: &mut Outcome, links: &mut Links) {
        let at = Now::at(instant(now));
        self.looks = now + plan.every;
        self.charged = 0;
        self.rd.on_drops(&at, outcome.dropped);
        for datagram in std::mem::take(&mut self.inbox) {
            let mut arrivals = Vec::new();
            let route = Route { local: datagram.to, remote: datagram.from };
            self.rd.handle_input(&at, route, &datagram.bytes, &mut arrivals);
            while let Some(arrival) = arrivals.pop() {
                self.rd.on_placed(&at, &arrival, Placed::Done, &mut arrivals);
            }
            while let Some(action) = self.rd.poll_action() {
                if let Action::Deliver { message, len, .. } = action {
                    *self.delivered.entry(message.exchange).or_insert(0) += u64::from(len);
                    let tenth = (now * 10 / plan.duration) as usize;
                    outcome.tenths[tenth.min(9)] += u64::from(len);
                }
            }
        }
        self.rd.on_socket_empty(&at);
        transmit(&mut self.rd, now, links);
    }
}

impl Sender {
    fn receive(&mut self, now: Time, datagram: &Datagram, message: u32, links: &mut Links) {
        let at = Now::at(instant(now));
        let route = Route { local: self.at, remote: receiver_at() };
        self.rd.on_socket_empty(&at);
        self.rd.handle_input(&at, route, &datagram.bytes, &mut Vec::new());
        self.go_on(now, message, links);
    }

    fn go_on(&mut self, now: Time, message: u32, links: &mut Links) {
        while let Some(action) = self.rd.poll_action() {
            if let Action::Finished { outcome, .. } = action {
                assert_eq!(outcome, Ok(()), "at {now} ns: {:?}", self.rd);
                self.posted -= 1;
            }
        }
        while self.posted < POSTED {
            self.posted += 1;
            let message = Outgoing {
                pair: QpnPair { source: 1, destination: 1 },
                first: First { qkey: 1, immediate: None, job_key: None },
                target: Target::Tagged { stag: 1, to: 0, rsvdulp: 0 },
                len: message,
                ordered: false,
                rnr_retry: 7,
                unrepeated: false,
            };
            let route = Route { local: self.at, remote: receiver_at() };
            self.rd.post(&Now::at(instant(now)), route, message).expect("there is room");
        }
        transmit(&mut self.rd, now, links);
    }
}

fn transmit(rd: &mut Rd, now: Time, links: &mut Links) {
    let mut packet = PacketBuf::new();
    while let Some(route) = rd.poll_transmit(&Now::at(instant(now)), &mut packet) {
        let mut bytes = Vec::with_capacity(packet.packet_len());
        packet.assemble(0, &mut bytes, |payload, out| out.resize(out.len() + payload.len as usize, 0));
        links.send(now, route.local.ip(), Datagram { from: route.local, to: route.remote, bytes });
    }
}
