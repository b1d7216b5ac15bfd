//! Endless streams that share one bottleneck: what the congestion response of reliable datagrams gets of a
//! path, alone, beside itself and beside others (docs/rd.md section 7.1).
//!
//! ```text
//!   senders ─▶ one queue with a rate, drops at its tail; random loss; delay ─▶ receivers
//!           ◀─ delay, half of the random loss ◀─
//! ```
//!
//! A stream of reliable datagrams is two whole machines (`uwarp_proto::rd`) with unordered Writes between
//! them. CUBIC and BBR are models, and exist here alone.

mod baselines;

use std::net::SocketAddr;

use baselines::{Baseline, Bbr, Cubic};
use uwarp_proto::clock::Now;
use uwarp_proto::rd::{
    Action, Config, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route, Target, Window, WindowChange,
};
use uwarp_wire::rd::segment::First;

use crate::links::{Datagram, LinkParams, Links};
use crate::{Rng, Time, instant, time};

/// Bytes of a full packet, as UDP payload.
pub const PACKET: u64 = 1472;
/// Bytes of a message.
const MESSAGE: u32 = 64 * 1024;
/// Messages that a stream has posted. They are more than the longest window here.
const POSTED: u32 = 48;

/// A bottleneck.
#[derive(Debug, Clone, Copy)]
pub struct Bottleneck {
    /// Its name in tables.
    pub name: &'static str,
    /// Bytes in a second.
    pub rate: u64,
    /// The round trip without a queue.
    pub round_trip: Time,
    /// Bytes of the queue.
    pub queue: u64,
    /// Random loss, in thousandths.
    pub loss: u32,
    /// How long a run takes. Its second half counts.
    pub duration: Time,
    /// Bytes in flight of a stream at most.
    pub most_in_flight: u64,
    /// From the middle of the first half on, for a tenth of the run, each packet is late by this.
    pub spike: Time,
    /// Packets in a thousand that are late.
    pub late: u32,
    /// By how much at most.
    pub lateness: Time,
    /// The alarm of a process is no finer.
    pub alarm: Time,
}

impl Bottleneck {
    /// Bytes that the path takes without a queue.
    pub fn bytes(&self) -> u64 {
        (u128::from(self.rate) * u128::from(self.round_trip) / 1_000_000_000) as u64
    }
}

/// A kind of stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reliable datagrams.
    Rd,
    /// TCP's usual response (RFC 9438), a model.
    Cubic,
    /// BBR's first version, a model.
    Bbr,
}

/// What a stream came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Bytes in a second that were delivered in the second half.
    pub goodput: f64,
    /// The window at the end, of reliable datagrams.
    pub window: Option<Window>,
    /// How often each reason changed the window, as far as it was looked at after each acknowledgement.
    pub changes: Vec<(WindowChange, u32)>,
}

struct RdStream {
    route: Route,
    sender: Rd,
    receiver: Rd,
    posted: u32,
    packet: PacketBuf,
    changes: Vec<(WindowChange, u32)>,
}

enum Engine {
    Rd(Box<RdStream>),
    Model(Baseline),
}

struct Stream {
    engine: Engine,
    from: SocketAddr,
    to: SocketAddr,
    starts: Time,
    has_started: bool,
    /// Times at which it looks at its timers are multiples of this.
    alarm: Time,
    /// Bytes delivered since the middle of the run.
    delivered: u64,
}

/// Runs streams that begin at these times. Repeatable by its seed.
///
/// # Panics
/// If a message fails.
pub fn run(seed: u64, path: Bottleneck, kinds: &[(Kind, Time)]) -> Vec<Outcome> {
    let mut rng = Rng::new(seed ^ 0x5A4E);
    let half = path.round_trip / 2;
    let there = LinkParams {
        rate: path.rate,
        queue: path.queue,
        delay: (half, half),
        loss: path.loss,
        reordering: path.late,
        reordering_by: path.lateness,
        ..LinkParams::default()
    };
    let back = LinkParams { delay: (half, half + 2_000), loss: path.loss / 2, ..LinkParams::default() };
    let mut links = Links::new(rng.fork(), back);
    let host = |host: u8, port: u16| SocketAddr::from(([10, 0, 0, host], port));
    links.set(host(1, 0).ip(), host(2, 0).ip(), there);
    let mut streams: Vec<Stream> = (20_000..)
        .zip(kinds)
        .map(|(port, (kind, starts))| {
            Stream::new(*kind, host(1, port), host(2, port), *starts, &path, &mut rng)
        })
        .collect();
    let spike = (path.duration / 4, path.duration / 4 + path.duration / 10);
    let mut is_late = false;
    let mut now = 0;
    loop {
        let wake = streams.iter().filter_map(|stream| stream.next_time()).min();
        let Some(next) = wake.into_iter().chain(links.next()).min().filter(|next| *next < path.duration)
        else {
            break;
        };
        now = next.max(now);
        if path.spike > 0 && is_late != (spike.0..spike.1).contains(&now) {
            is_late = !is_late;
            let late = if is_late { path.spike } else { 0 };
            let params = LinkParams { delay: (half + late, half + late), ..there };
            links.set(host(1, 0).ip(), host(2, 0).ip(), params);
        }
        let counts = now >= path.duration / 2;
        while let Some(datagram) = links.receive(now) {
            let at = |stream: &&mut Stream| datagram.to == stream.from || datagram.to == stream.to;
            if let Some(stream) = streams.iter_mut().find(at) {
                stream.receive(now, &datagram, counts, &mut links);
            }
        }
        for stream in &mut streams {
            if stream.next_time().is_some_and(|at| at <= now) {
                stream.on_time(now, &mut links);
            }
        }
    }
    let seconds = (path.duration - path.duration / 2) as f64 / 1e9;
    streams.into_iter().map(|stream| stream.outcome(seconds)).collect()
}

impl Stream {
    fn new(
        kind: Kind,
        from: SocketAddr,
        to: SocketAddr,
        starts: Time,
        path: &Bottleneck,
        rng: &mut Rng,
    ) -> Self {
        let most = path.most_in_flight as f64 / PACKET as f64;
        let engine = match kind {
            Kind::Rd => Engine::Rd(Box::new(RdStream::new(from, to, path.most_in_flight, rng))),
            Kind::Cubic => Engine::Model(Baseline::new(Box::new(Cubic::new()), most)),
            Kind::Bbr => Engine::Model(Baseline::new(Box::new(Bbr::new()), most)),
        };
        let alarm = path.alarm.max(1);
        Self { engine, from, to, starts, has_started: false, alarm, delivered: 0 }
    }

    fn next_time(&self) -> Option<Time> {
        if !self.has_started {
            return Some(self.starts);
        }
        match &self.engine {
            Engine::Rd(stream) => {
                let timers = [stream.sender.poll_timeout(), stream.receiver.poll_timeout()];
                timers.into_iter().flatten().min().map(|at| time(at).next_multiple_of(self.alarm))
            }
            Engine::Model(model) => model.timeout(),
        }
    }

    fn on_time(&mut self, now: Time, links: &mut Links) {
        self.has_started = true;
        match &mut self.engine {
            Engine::Rd(stream) => stream.on_time(now, links),
            Engine::Model(model) => {
                model.on_time(now);
                send_model(model, now, self.from, self.to, links);
            }
        }
    }

    fn receive(&mut self, now: Time, datagram: &Datagram, counts: bool, links: &mut Links) {
        let is_at_receiver = datagram.to == self.to;
        let delivered = match &mut self.engine {
            Engine::Rd(stream) => stream.receive(now, datagram, is_at_receiver, links),
            Engine::Model(model) => {
                let mut number = [0; 8];
                number.copy_from_slice(&datagram.bytes[..8]);
                let number = u64::from_be_bytes(number);
                if is_at_receiver {
                    model.arrived(number);
                    let bytes = number.to_be_bytes().to_vec();
                    links.send(now, self.to.ip(), Datagram { from: self.to, to: self.from, bytes });
                    PACKET
                } else {
                    model.acknowledged(now, number);
                    send_model(model, now, self.from, self.to, links);
                    0
                }
            }
        };
        if counts {
            self.delivered += delivered;
        }
    }

    fn outcome(self, seconds: f64) -> Outcome {
        let goodput = self.delivered as f64 / seconds;
        match self.engine {
            Engine::Rd(stream) => {
                Outcome { goodput, window: stream.sender.window(stream.route), changes: stream.changes }
            }
            Engine::Model(_) => Outcome { goodput, window: None, changes: Vec::new() },
        }
    }
}

fn send_model(model: &mut Baseline, now: Time, from: SocketAddr, to: SocketAddr, links: &mut Links) {
    while let Some(number) = model.transmit(now) {
        let mut bytes = number.to_be_bytes().to_vec();
        bytes.resize(PACKET as usize, 0);
        links.send(now, from.ip(), Datagram { from, to, bytes });
    }
}

impl RdStream {
    fn new(local: SocketAddr, remote: SocketAddr, most_in_flight: u64, rng: &mut Rng) -> Self {
        let config = Config { window: most_in_flight, ..Config::default() };
        let mut rd = || {
            let mut seed = [0; 32];
            rng.fill(&mut seed);
            let mut rd = Rd::new(&Now::at(instant(0)), config, &seed);
            // The bottleneck is the path.
            rd.set_room(most_in_flight * 4);
            rd
        };
        Self {
            route: Route { local, remote },
            sender: rd(),
            receiver: rd(),
            posted: 0,
            packet: PacketBuf::new(),
            changes: Vec::new(),
        }
    }

    fn on_time(&mut self, now: Time, links: &mut Links) {
        let at = Now::at(instant(now));
        for rd in [&mut self.sender, &mut self.receiver] {
            if rd.poll_timeout().is_some_and(|due| time(due) <= now) {
                rd.handle_timeout(&at);
            }
        }
        self.send(now, links);
        transmit(&mut self.receiver, &mut self.packet, now, links);
    }

    /// Returns the bytes that were delivered.
    fn receive(&mut self, now: Time, datagram: &Datagram, is_at_receiver: bool, links: &mut Links) -> u64 {
        let at = Now::at(instant(now));
        let route = Route { local: datagram.to, remote: datagram.from };
        let rd = if is_at_receiver { &mut self.receiver } else { &mut self.sender };
        let mut arrivals = Vec::new();
        rd.on_socket_empty(&at);
        rd.handle_input(&at, route, &datagram.bytes, &mut arrivals);
        while let Some(arrival) = arrivals.pop() {
            rd.on_placed(&at, &arrival, Placed::Done, &mut arrivals);
        }
        if is_at_receiver {
            let mut delivered = 0;
            while let Some(action) = self.receiver.poll_action() {
                if let Action::Deliver { len, .. } = action {
                    delivered += u64::from(len);
                }
            }
            transmit(&mut self.receiver, &mut self.packet, now, links);
            return delivered;
        }
        if let Some(window) = self.sender.window(self.route) {
            match self.changes.iter_mut().find(|(change, _)| *change == window.change) {
                Some((_, count)) => *count += 1,
                None => self.changes.push((window.change, 1)),
            }
        }
        self.send(now, links);
        0
    }

    fn send(&mut self, now: Time, links: &mut Links) {
        while let Some(action) = self.sender.poll_action() {
            if let Action::Finished { outcome, .. } = action {
                assert_eq!(outcome, Ok(()), "at {now} ns: {:?}", self.sender);
                self.posted -= 1;
            }
        }
        while self.posted < POSTED {
            self.posted += 1;
            let message = Outgoing {
                pair: QpnPair { source: 1, destination: 1 },
                first: First { qkey: 1, immediate: None, job_key: None },
                target: Target::Tagged { stag: 1, to: 0, rsvdulp: 0 },
                len: MESSAGE,
                ordered: false,
                rnr_retry: 7,
                unrepeated: false,
            };
            self.sender.post(&Now::at(instant(now)), self.route, message).expect("there is room");
        }
        transmit(&mut self.sender, &mut self.packet, now, links);
    }
}

fn transmit(rd: &mut Rd, packet: &mut PacketBuf, now: Time, links: &mut Links) {
    while let Some(route) = rd.poll_transmit(&Now::at(instant(now)), packet) {
        let mut bytes = Vec::with_capacity(packet.packet_len());
        packet.assemble(0, &mut bytes, |payload, out| out.resize(out.len() + payload.len as usize, 0));
        links.send(now, route.local.ip(), Datagram { from: route.local, to: route.remote, bytes });
    }
}
