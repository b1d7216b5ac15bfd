//! Two machines, their owners, and the path between them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{
    Action, Config, PacketBuf, Payload, PortAnswer, Rd, Route, StreamEnd, StreamEvent, StreamNews, Ticket,
};

pub const MS: Duration = Duration::from_millis(1);
pub const SERVICE: u32 = 0x4E20;
/// More than either end may send before the other one's program takes something.
pub const LONG: usize = 600_000;

/// One end of a stream, as its owner has it.
#[derive(Default)]
pub struct End {
    /// All that it sends. Bytes below `released` were given back, and must not be asked for.
    pub sent: Vec<u8>,
    pub released: u64,
    /// What has come, by position; how much of it is readable, and was taken.
    pub came: Vec<u8>,
    pub readable: u64,
    pub taken: u64,
    pub finished: bool,
    pub ended: Option<StreamEnd>,
    /// Takes nothing for now.
    pub is_lazy: bool,
    pub is_left: bool,
}

pub struct Host {
    pub rd: Rd,
    pub route: Route,
    pub streams: BTreeMap<Ticket, End>,
    pub opened: Vec<Ticket>,
    /// How often it has asked for the peer's port.
    pub asked: usize,
    /// And how often while that answered.
    pub tried: usize,
    /// It takes nothing of streams that the peer opens.
    pub is_lazy: bool,
    /// Bytes of the longest packet that its interface takes.
    pub longest: usize,
}

impl Host {
    pub fn new(own: usize, start: Instant) -> Self {
        let at = |host: usize| ([10, 0, 0, host as u8 + 1], 20_000).into();
        Self {
            rd: Rd::new(
                &Now::at(start),
                Config { most_taken: 8972, ..Config::default() },
                &[own as u8 + 1; 32],
            ),
            route: Route { local: at(own), remote: at(1 - own) },
            streams: BTreeMap::new(),
            opened: Vec::new(),
            asked: 0,
            tried: 0,
            is_lazy: false,
            longest: 1472,
        }
    }

    pub fn port_is(&mut self, now: &Now, answer: PortAnswer) {
        self.rd.port_is(now, self.route.remote, answer);
        self.events(now, &[]);
    }

    pub fn events(&mut self, now: &Now, datagram: &[u8]) {
        while let Some(action) = self.rd.poll_action() {
            match action {
                Action::AskPort { route, urgent } => {
                    assert_eq!(route, self.route);
                    *if urgent { &mut self.asked } else { &mut self.tried } += 1;
                }
                Action::AskLength { route } => self.rd.search(now, route, self.longest),
                _ => {}
            }
        }
        while let Some(StreamEvent { stream, what }) = self.rd.poll_stream_event() {
            if let StreamNews::Opened { route, service } = what {
                assert_eq!((route, service), (self.route, SERVICE));
                let end = End { is_lazy: self.is_lazy, ..End::default() };
                assert!(self.streams.insert(stream, end).is_none(), "opened twice");
                self.opened.push(stream);
                continue;
            }
            let end = self.streams.get_mut(&stream).expect("a known stream");
            assert_eq!(end.ended, None, "{what:?} behind the end");
            match what {
                StreamNews::Opened { .. } => unreachable!(),
                StreamNews::Bytes { position, at } => {
                    assert!(position >= end.taken, "bytes that were taken come again");
                    assert!(position + at.len() as u64 <= end.taken + 256 * 1024, "beyond the window");
                    let from = position as usize;
                    let to = from + at.len();
                    end.came.resize(end.came.len().max(to), 0);
                    end.came[from..to].copy_from_slice(&datagram[at]);
                }
                StreamNews::Readable(to) => {
                    assert!(to > end.readable && to <= end.came.len() as u64 && !end.finished);
                    end.readable = to;
                }
                StreamNews::Finished => end.finished = true,
                StreamNews::Acknowledged(to) => {
                    assert!(to > end.released && to <= end.sent.len() as u64);
                    end.released = to;
                }
                StreamNews::Limit(_) => {}
                StreamNews::Ended(how) => end.ended = Some(how),
            }
        }
        let mut taken = Vec::new();
        for (stream, end) in &mut self.streams {
            if end.readable > end.taken && !end.is_lazy && !end.is_left {
                end.taken = end.readable;
                taken.push((*stream, end.taken));
            }
        }
        taken.into_iter().for_each(|(stream, position)| self.rd.taken(now, stream, position));
    }

    pub fn open(&mut self, now: &Now) -> Ticket {
        let stream = self.rd.open_stream(now, self.route, SERVICE).expect("there is room");
        self.streams.insert(stream, End::default());
        stream
    }

    pub fn send(&mut self, now: &Now, stream: Ticket, bytes: &[u8]) {
        let end = self.streams.get_mut(&stream).expect("a known stream");
        end.sent.extend_from_slice(bytes);
        let to = end.sent.len() as u64;
        self.rd.offer(now, stream, to);
    }

    pub fn fill(&self, part: &Payload, out: &mut Vec<u8>) {
        let end = &self.streams[&part.ticket];
        let from = part.offset as usize;
        assert!(from as u64 >= end.released, "asks for bytes that were released");
        out.extend_from_slice(&end.sent[from..from + part.len as usize]);
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Path {
    pub loss: u64,
    pub copies: u64,
    pub late: u64,
}

pub struct World {
    pub start: Instant,
    pub now: Duration,
    pub hosts: [Host; 2],
    pub flying: BTreeMap<(Duration, u64), (usize, Vec<u8>)>,
    pub draws: u64,
    pub path: Path,
    pub packets: u64,
    /// The second host takes nothing before this time.
    pub still_until: Duration,
    /// Whether packets are kept for a stranger, and those that were.
    pub keeps: bool,
    pub seen: Vec<(usize, Vec<u8>)>,
    /// Packets that were made in one call at most, and that were handled in one.
    pub made_together: u32,
    pub handled_together: usize,
}

impl World {
    pub fn new(seed: u64, path: Path) -> Self {
        let start = Instant::now();
        let mut hosts = [Host::new(0, start), Host::new(1, start)];
        hosts[1].rd.take_streams(SERVICE, true);
        let (flying, now) = (BTreeMap::new(), Duration::ZERO);
        Self {
            start,
            now,
            hosts,
            flying,
            draws: seed | 1,
            path,
            packets: 0,
            still_until: Duration::ZERO,
            keeps: false,
            seen: Vec::new(),
            made_together: 0,
            handled_together: 0,
        }
    }

    pub fn at(&self) -> Now {
        Now::at(self.start + self.now)
    }

    pub fn draw(&mut self, below: u64) -> u64 {
        self.draws =
            self.draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.draws >> 33) % below
    }

    pub fn open(&mut self) -> Ticket {
        let now = self.at();
        self.hosts[0].open(&now)
    }

    pub fn emit(&mut self, to: usize, bytes: Vec<u8>) {
        self.packets += 1;
        if self.keeps {
            self.seen.push((to, bytes.clone()));
        }
        if self.draw(1000) < self.path.loss {
            return;
        }
        for _ in 0..=u8::from(self.draw(1000) < self.path.copies) {
            let late = if self.draw(1000) < self.path.late { self.draw(3000) } else { 0 };
            let mut at = self.now + MS / 5 + Duration::from_micros(late);
            if to == 1 {
                at = at.max(self.still_until);
            }
            let order = self.packets << 1 | u64::from(self.flying.contains_key(&(at, self.packets << 1)));
            self.flying.insert((at, order), (to, bytes.clone()));
        }
    }

    /// Until this time, or until nothing more happens.
    pub fn run(&mut self, until: Duration) {
        for _ in 0..2_000_000 {
            let now = self.at();
            for from in 0..2 {
                self.hosts[from].events(&now, &[]);
                let mut packet = PacketBuf::new();
                packet.allow(1 + self.draw(44) as usize, 65_000);
                while self.hosts[from].rd.poll_transmit(&now, &mut packet).is_some() {
                    self.made_together = self.made_together.max(packet.packets());
                    for nth in 0..packet.packets() {
                        let mut bytes = Vec::new();
                        let host = &self.hosts[from];
                        packet.assemble(nth, &mut bytes, |part, out| host.fill(part, out));
                        assert!(bytes.len() <= host.longest, "{}", bytes.len());
                        self.emit(1 - from, bytes);
                    }
                    packet.allow(1 + self.draw(44) as usize, 65_000);
                }
            }
            let timers = self.hosts.iter().filter_map(|host| host.rd.poll_timeout());
            let timers = timers.map(|at| at.saturating_duration_since(self.start));
            let next = self.flying.keys().map(|(at, _)| *at).chain(timers).min().unwrap_or(until);
            if next.max(self.now) >= until {
                self.now = until;
                return;
            }
            self.now = next.max(self.now);
            let now = self.at();
            while let Some(entry) = self.flying.first_entry().filter(|entry| entry.key().0 <= self.now) {
                let (to, mut bytes) = entry.remove();
                let len = bytes.len();
                while self.draw(4) > 0
                    && bytes.len().is_multiple_of(len)
                    && let Some(next) = self.flying.first_entry().filter(|entry| {
                        entry.key().0 <= self.now && entry.get().0 == to && entry.get().1.len() <= len
                    })
                {
                    bytes.extend(next.remove().1);
                }
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let host = &mut self.hosts[to];
                    let mut arrivals = Vec::new();
                    let handled = host.rd.handle_joined(&now, host.route, rest, len, &mut arrivals);
                    self.handled_together = self.handled_together.max(handled);
                    assert!(arrivals.is_empty());
                    host.events(&now, rest);
                    rest = rest.get(handled * len..).unwrap_or(&[]);
                }
            }
            for host in &mut self.hosts {
                if host.rd.poll_timeout().is_some_and(|at| at <= now.get()) {
                    host.rd.handle_timeout(&now);
                    host.events(&now, &[]);
                }
            }
        }
        panic!("no rest");
    }

    pub fn run_for(&mut self, time: Duration) {
        self.run(self.now + time);
    }

    pub fn end(&self, host: usize, stream: Ticket) -> &End {
        &self.hosts[host].streams[&stream]
    }

    /// A minute after its last stream, nothing is kept.
    pub fn check_empty(&mut self) {
        self.run_for(Duration::from_secs(62));
        assert_eq!(self.hosts.each_ref().map(|host| host.rd.peers()), [0, 0]);
    }
}
