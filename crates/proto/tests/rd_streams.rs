//! Streams of bytes (docs/rd.md section 5.6), between two machines over a path that loses, copies and delays.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use uwarp_proto::clock::Now;
use uwarp_proto::rd::{
    Action, Config, Failure, PacketBuf, Payload, PortAnswer, Rd, Route, StreamEnd, StreamEvent, StreamNews,
    Ticket,
};

use uwarp_wire::crc;
use uwarp_wire::rd::chunk::{self, Stream as Chunk, StreamCredit, StreamReset};
use uwarp_wire::rd::{Header, Kind, VERSION};

const MS: Duration = Duration::from_millis(1);
const SERVICE: u32 = 0x4E20;
/// More than either end may send before the other one's program takes something.
const LONG: usize = 600_000;

/// One end of a stream, as its owner has it.
#[derive(Default)]
struct End {
    /// All that it sends. Bytes below `released` were given back, and must not be asked for.
    sent: Vec<u8>,
    released: u64,
    /// What has come, by position; how much of it is readable, and was taken.
    came: Vec<u8>,
    readable: u64,
    taken: u64,
    finished: bool,
    ended: Option<StreamEnd>,
    /// Takes nothing for now.
    is_lazy: bool,
    is_left: bool,
}

struct Host {
    rd: Rd,
    route: Route,
    streams: BTreeMap<Ticket, End>,
    opened: Vec<Ticket>,
    /// How often it has asked for the peer's port.
    asked: usize,
}

impl Host {
    fn new(own: usize, start: Instant) -> Self {
        let at = |host: usize| ([10, 0, 0, host as u8 + 1], 20_000).into();
        Self {
            rd: Rd::new(&Now::at(start), Config::default(), &[own as u8 + 1; 32]),
            route: Route { local: at(own), remote: at(1 - own) },
            streams: BTreeMap::new(),
            opened: Vec::new(),
            asked: 0,
        }
    }

    fn port_is(&mut self, now: &Now, answer: PortAnswer) {
        self.rd.port_is(now, self.route.remote, answer);
        self.events(now, &[]);
    }

    fn events(&mut self, now: &Now, datagram: &[u8]) {
        while let Some(action) = self.rd.poll_action() {
            self.asked += usize::from(action == Action::AskPort { route: self.route });
        }
        while let Some(StreamEvent { stream, what }) = self.rd.poll_stream_event() {
            if let StreamNews::Opened { route, service } = what {
                assert_eq!((route, service), (self.route, SERVICE));
                assert!(self.streams.insert(stream, End::default()).is_none(), "opened twice");
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

    fn open(&mut self, now: &Now) -> Ticket {
        let stream = self.rd.open_stream(now, self.route, SERVICE).expect("there is room");
        self.streams.insert(stream, End::default());
        stream
    }

    fn send(&mut self, now: &Now, stream: Ticket, bytes: &[u8]) {
        let end = self.streams.get_mut(&stream).expect("a known stream");
        end.sent.extend_from_slice(bytes);
        let to = end.sent.len() as u64;
        self.rd.offer(now, stream, to);
    }

    fn fill(&self, part: &Payload, out: &mut Vec<u8>) {
        let end = &self.streams[&part.ticket];
        let from = part.offset as usize;
        assert!(from as u64 >= end.released, "asks for bytes that were released");
        out.extend_from_slice(&end.sent[from..from + part.len as usize]);
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Path {
    loss: u64,
    copies: u64,
    late: u64,
}

struct World {
    start: Instant,
    now: Duration,
    hosts: [Host; 2],
    flying: BTreeMap<(Duration, u64), (usize, Vec<u8>)>,
    draws: u64,
    path: Path,
    packets: u64,
    /// Whether packets are kept for a stranger, and those that were.
    keeps: bool,
    seen: Vec<(usize, Vec<u8>)>,
}

impl World {
    fn new(seed: u64, path: Path) -> Self {
        let start = Instant::now();
        let mut hosts = [Host::new(0, start), Host::new(1, start)];
        hosts[1].rd.take_streams(SERVICE, true);
        let (flying, now) = (BTreeMap::new(), Duration::ZERO);
        Self { start, now, hosts, flying, draws: seed | 1, path, packets: 0, keeps: false, seen: Vec::new() }
    }

    fn at(&self) -> Now {
        Now::at(self.start + self.now)
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.draws =
            self.draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.draws >> 33) % below
    }

    fn open(&mut self) -> Ticket {
        let now = self.at();
        self.hosts[0].open(&now)
    }

    fn emit(&mut self, to: usize, bytes: Vec<u8>) {
        self.packets += 1;
        if self.keeps {
            self.seen.push((to, bytes.clone()));
        }
        if self.draw(1000) < self.path.loss {
            return;
        }
        for _ in 0..=u8::from(self.draw(1000) < self.path.copies) {
            let late = if self.draw(1000) < self.path.late { self.draw(3000) } else { 0 };
            let at = self.now + MS / 5 + Duration::from_micros(late);
            let order = self.packets << 1 | u64::from(self.flying.contains_key(&(at, self.packets << 1)));
            self.flying.insert((at, order), (to, bytes.clone()));
        }
    }

    /// Until this time, or until nothing more happens.
    fn run(&mut self, until: Duration) {
        for _ in 0..2_000_000 {
            let now = self.at();
            for from in 0..2 {
                self.hosts[from].events(&now, &[]);
                let mut packet = PacketBuf::new();
                while self.hosts[from].rd.poll_transmit(&now, &mut packet).is_some() {
                    let mut bytes = Vec::new();
                    let host = &self.hosts[from];
                    packet.assemble(&mut bytes, |part, out| host.fill(part, out));
                    assert!(bytes.len() <= 1472, "{}", bytes.len());
                    self.emit(1 - from, bytes);
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
                let (to, bytes) = entry.remove();
                let host = &mut self.hosts[to];
                let mut arrivals = Vec::new();
                host.rd.handle_input(&now, host.route, &bytes, &mut arrivals);
                assert!(arrivals.is_empty());
                host.events(&now, &bytes);
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

    fn run_for(&mut self, time: Duration) {
        self.run(self.now + time);
    }

    fn end(&self, host: usize, stream: Ticket) -> &End {
        &self.hosts[host].streams[&stream]
    }

    /// A minute after its last stream, nothing is kept.
    fn check_empty(&mut self) {
        self.run_for(Duration::from_secs(62));
        assert_eq!(self.hosts.each_ref().map(|host| host.rd.peers()), [0, 0]);
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(seed | 1) >> 3) as u8).collect()
}

#[test]
fn bytes_go_both_ways_and_the_stream_ends_when_both_have_finished() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"request");
    world.run_for(10 * MS);
    let theirs = world.hosts[1].opened[0];
    assert_eq!(world.end(1, theirs).came, b"request");
    let now = world.at();
    world.hosts[1].send(&now, theirs, b"reply");
    world.hosts[1].rd.finish_stream(&now, theirs);
    world.run_for(10 * MS);
    let end = world.end(0, ours);
    assert_eq!((&end.came[..], end.finished, end.released, end.ended), (&b"reply"[..], true, 7, None));
    let now = world.at();
    world.hosts[0].send(&now, ours, b" and the last");
    world.hosts[0].rd.finish_stream(&now, ours);
    world.run_for(10 * MS);
    assert_eq!(world.end(1, theirs).came, b"request and the last");
    for (host, stream) in [(0, ours), (1, theirs)] {
        assert_eq!(world.end(host, stream).ended, Some(StreamEnd::Closed));
    }
    world.check_empty();
}

/// A known peer answers the first bytes in one round trip.
#[test]
fn a_known_peer_has_the_first_bytes_after_one_way() {
    let mut world = World::new(1, Path::default());
    let first = world.open();
    let now = world.at();
    world.hosts[0].send(&now, first, b"x");
    world.run_for(10 * MS);
    let second = world.open();
    let now = world.at();
    world.hosts[0].send(&now, second, b"request");
    world.run_for(MS / 4);
    assert_eq!(world.end(1, world.hosts[1].opened[1]).came, b"request");
}

#[test]
fn nobody_sends_more_than_the_other_program_takes() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let data = bytes(7, LONG);
    let now = world.at();
    world.hosts[0].send(&now, ours, &data);
    world.run_for(MS * 5 / 4);
    let theirs = world.hosts[1].opened[0];
    world.hosts[1].streams.get_mut(&theirs).unwrap().is_lazy = true;
    world.run_for(50 * MS);
    let stuck = world.end(1, theirs).readable;
    assert!(stuck < LONG as u64 - 200_000, "{stuck}");
    // A window that stays closed for long is no silence of the peer, and costs no more than its PINGs.
    let before = world.packets;
    world.run_for(Duration::from_secs(40));
    assert!(world.packets - before < 60, "{}", world.packets - before);
    assert_eq!((world.end(1, theirs).readable, world.end(0, ours).ended), (stuck, None));
    world.hosts[1].streams.get_mut(&theirs).unwrap().is_lazy = false;
    world.run_for(100 * MS);
    assert!(world.end(1, theirs).came == data);
}

#[test]
fn a_service_that_nobody_has_resets_the_stream() {
    let mut world = World::new(1, Path::default());
    world.hosts[1].rd.take_streams(SERVICE, false);
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"request");
    world.run_for(10 * MS);
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Reset));
    assert!(world.hosts[1].opened.is_empty());
    world.check_empty();
}

#[test]
fn a_reset_reaches_the_peer_although_it_is_lost_at_first() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"request");
    world.run_for(10 * MS);
    let theirs = world.hosts[1].opened[0];
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[1].rd.reset_stream(&now, theirs);
    world.run_for(MS);
    world.path.loss = 0;
    world.run_for(100 * MS);
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Reset));
    world.check_empty();
}

#[test]
fn a_stream_that_is_left_is_sent_to_its_end() {
    for peer_finishes in [false, true] {
        let mut world = World::new(1, Path { loss: 50, ..Path::default() });
        let ours = world.open();
        let now = world.at();
        world.hosts[0].send(&now, ours, &bytes(3, 50_000));
        world.hosts[0].streams.get_mut(&ours).unwrap().is_left = true;
        world.hosts[0].rd.leave_stream(&now, ours);
        world.run_for(300 * MS);
        let theirs = world.hosts[1].opened[0];
        assert!(world.end(1, theirs).came == bytes(3, 50_000) && world.end(1, theirs).finished);
        if peer_finishes {
            let now = world.at();
            world.hosts[1].rd.finish_stream(&now, theirs);
        }
        world.run_for(Duration::from_secs(1));
        assert!(world.end(0, ours).ended.is_some() && world.end(1, theirs).ended.is_some());
        world.check_empty();
    }
}

/// Half a minute, whatever the peer takes.
#[test]
fn a_stream_that_is_left_does_not_stay_for_ever() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    let theirs = world.hosts[1].opened[0];
    world.hosts[1].streams.get_mut(&theirs).unwrap().is_lazy = true;
    let now = world.at();
    world.hosts[0].send(&now, ours, &bytes(3, LONG));
    world.hosts[0].streams.get_mut(&ours).unwrap().is_left = true;
    world.hosts[0].rd.leave_stream(&now, ours);
    world.run_for(Duration::from_secs(31));
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Reset));
    world.run_for(10 * MS);
    assert_eq!(world.end(1, theirs).ended, Some(StreamEnd::Reset));
    world.check_empty();
}

#[test]
fn a_peer_that_is_gone_ends_streams() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    world.path.loss = 1000;
    world.run_for(Duration::from_secs(70));
    let theirs = world.hosts[1].opened[0];
    for (host, stream) in [(0, ours), (1, theirs)] {
        assert_eq!(world.end(host, stream).ended, Some(StreamEnd::Failed(Failure::Silent)));
    }
    // And one that never was there.
    let again = world.open();
    world.run_for(Duration::from_secs(20));
    assert_eq!(world.end(0, again).ended, Some(StreamEnd::Failed(Failure::Silent)));
    world.check_empty();
}

/// A world with a stream on which one byte has gone.
fn with_stream() -> (World, Ticket) {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    (world, ours)
}

#[test]
fn the_port_of_a_silent_peer_is_asked_for_and_a_refusal_ends_its_streams() {
    let (mut world, ours) = with_stream();
    let other = world.open();
    let now = world.at();
    world.hosts[0].send(&now, other, b"x");
    world.run_for(10 * MS);
    // While it answers, a refusal is a lie.
    let now = world.at();
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    world.hosts[0].send(&now, ours, b"y");
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    world.run_for(10 * MS);
    assert_eq!((world.end(0, ours).ended, world.hosts[0].asked), (None, 0));
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"z");
    world.run_for(900 * MS);
    let now = world.at();
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    assert_eq!((world.end(0, ours).ended, world.hosts[0].asked), (None, 0));
    world.run_for(200 * MS);
    assert_eq!((world.end(0, ours).ended, world.hosts[0].asked), (None, 1));
    let now = world.at();
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    for stream in [ours, other] {
        assert_eq!(world.end(0, stream).ended, Some(StreamEnd::Failed(Failure::Restarted)));
    }
}

/// The time in which nothing waited is no silence.
#[test]
fn three_seconds_of_rest_and_some_loss_are_no_doubt() {
    let (mut world, ours) = with_stream();
    world.run_for(Duration::from_secs(3));
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    for _ in 0..30 {
        world.run_for(10 * MS);
        let now = world.at();
        world.hosts[0].port_is(&now, PortAnswer::Refused);
    }
    world.path.loss = 0;
    world.run_for(Duration::from_secs(1));
    let theirs = world.hosts[1].opened[0];
    assert_eq!((world.end(0, ours).ended, world.hosts[0].asked), (None, 0));
    assert_eq!(world.end(1, theirs).came, b"xy");
}

/// It is stopped, or out of reach.
#[test]
fn streams_outlast_a_silent_peer_whose_port_is_not_refused() {
    let (mut world, ours) = with_stream();
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    for _ in 0..50 {
        world.run_for(Duration::from_secs(1));
        let now = world.at();
        world.hosts[0].port_is(&now, PortAnswer::Nothing);
    }
    assert!((5..=10).contains(&world.hosts[0].asked), "{}", world.hosts[0].asked);
    let answers = world.hosts[0].rd.stream_answers(&world.at(), ours).expect("a known stream");
    assert!(answers.doubtful, "another host may be switched off");
    world.path.loss = 0;
    world.run_for(Duration::from_secs(1));
    let theirs = world.hosts[1].opened[0];
    let now = world.at();
    world.hosts[1].send(&now, theirs, b"still here");
    world.run_for(10 * MS);
    assert_eq!(
        (&world.end(1, theirs).came[..], &world.end(0, ours).came[..]),
        (&b"xy"[..], &b"still here"[..])
    );
}

/// The own system would refuse a port that nobody has.
#[test]
fn streams_to_a_stopped_process_of_this_host_stay_for_minutes() {
    let mut world = World::new(1, Path::default());
    let at = |port| SocketAddr::new([10, 0, 0, 1].into(), port);
    world.hosts[0].route = Route { local: at(20_000), remote: at(20_001) };
    world.hosts[1].route = Route { local: at(20_001), remote: at(20_000) };
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    for _ in 0..600 {
        world.run_for(Duration::from_secs(1));
        let now = world.at();
        world.hosts.iter_mut().for_each(|host| host.port_is(&now, PortAnswer::Nothing));
    }
    let answers = world.hosts[0].rd.stream_answers(&world.at(), ours).expect("a known stream");
    assert!(!answers.doubtful, "it is stopped");
    world.path.loss = 0;
    world.run_for(Duration::from_secs(1));
    let theirs = world.hosts[1].opened[0];
    assert_eq!(world.end(1, theirs).came, b"xy");
    // And it may be killed after all.
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"z");
    world.run_for(Duration::from_secs(2));
    let now = world.at();
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Failed(Failure::Restarted)));
}

/// An exchange without streams rests after 30 s, and is forgotten after 60 s.
#[test]
fn an_idle_stream_keeps_its_exchange() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(Duration::from_secs(200));
    let theirs = world.hosts[1].opened[0];
    let now = world.at();
    world.hosts[1].send(&now, theirs, b"still here");
    world.run_for(MS);
    assert_eq!(world.end(0, ours).came, b"still here");
    assert!(world.packets < 200, "{}", world.packets);
}

#[test]
fn a_restarted_peer_ends_streams() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    world.hosts[1] = Host::new(1, world.start);
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Failed(Failure::Restarted)));
    assert!(world.hosts[1].opened.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever the path does, each byte comes once and in its order.
    #[test]
    fn every_byte_comes_once_and_in_order(
        seed: u64,
        loss in 0u64..250,
        copies in 0u64..300,
        late in 0u64..300,
        streams in 1usize..5,
        writes in prop::collection::vec((0usize..5, any::<bool>(), 1usize..40_000, 0u64..3000), 1..25),
    ) {
        let mut world = World::new(seed, Path { loss, copies, late });
        let ours: Vec<Ticket> = (0..streams).map(|_| world.open()).collect();
        let now = world.at();
        for stream in &ours {
            world.hosts[0].send(&now, *stream, &[stream_byte(*stream, &ours)]);
        }
        for (which, back, len, pause) in writes {
            let stream = ours[which % streams];
            let now = world.at();
            let first = stream_byte(stream, &ours);
            let theirs = world.hosts[1].opened.iter().copied().find(|theirs| {
                world.end(1, *theirs).readable > 0 && world.end(1, *theirs).came[0] == first
            });
            let data = bytes(seed ^ len as u64, len);
            match theirs.filter(|_| back) {
                Some(theirs) => world.hosts[1].send(&now, theirs, &data),
                None => world.hosts[0].send(&now, stream, &data),
            }
            world.run_for(Duration::from_micros(pause));
        }
        let now = world.at();
        for stream in &ours {
            world.hosts[0].rd.finish_stream(&now, *stream);
        }
        world.run_for(Duration::from_secs(9));
        world.path = Path::default();
        world.run_for(Duration::from_secs(20));
        prop_assert_eq!(world.hosts[1].opened.len(), streams);
        let now = world.at();
        for theirs in world.hosts[1].opened.clone() {
            prop_assert!(world.end(1, theirs).finished);
            let first = world.end(1, theirs).came[0];
            let ours = ours.iter().copied().find(|ours| world.end(0, *ours).sent[0] == first);
            let ours = ours.expect("a stream of ours");
            let ends = [world.end(0, ours), world.end(1, theirs)];
            for (a, b) in [(ends[0], ends[1]), (ends[1], ends[0])] {
                prop_assert!(a.sent == b.came && b.readable == a.sent.len() as u64);
                prop_assert_eq!(a.released, a.sent.len() as u64);
            }
            world.hosts[1].rd.finish_stream(&now, theirs);
        }
        world.run_for(Duration::from_secs(1));
        for host in &world.hosts {
            prop_assert!(host.streams.values().all(|end| end.ended == Some(StreamEnd::Closed)));
        }
        world.check_empty();
    }
}

/// A packet that says it comes from the peer of the victim. Without the key of the exchange, which is 64
/// random bits, it does nothing.
fn forged(from: SocketAddr, to: SocketAddr, key: u64, number: u32, body: &[u8]) -> Vec<u8> {
    let header = Header {
        version: VERSION,
        kind: Kind::Packet,
        source_port: from.port(),
        destination_port: to.port(),
        key,
        number,
    };
    let mut packet = header.to_bytes().to_vec();
    packet.extend_from_slice(body);
    let sum = crc::to_wire(crc::crc32c(&packet));
    packet.extend_from_slice(&sum);
    packet
}

/// Everything that opens, feeds, ends or stalls a stream.
fn attacks(stream: u32, position: u32) -> Vec<Vec<u8>> {
    let open = Chunk {
        stream: stream + 2,
        offset: 0,
        open: Some(SERVICE),
        fin: false,
        acknowledge: true,
        data: b"!",
    };
    let feed = Chunk { open: None, stream, offset: position, ..open };
    let bytes = |chunk: Chunk<'_>| {
        let mut out = vec![0; chunk.head_len()];
        chunk.emit_head(&mut out);
        [&out[..], chunk.data].concat()
    };
    let fixed = |chunk: chunk::Chunk<'_>| {
        let mut out = [0; 24];
        let len = chunk.emit_fixed(&mut out);
        out[..len].to_vec()
    };
    vec![
        bytes(open),
        bytes(feed),
        bytes(Chunk { fin: true, ..feed }),
        fixed(chunk::Chunk::StreamReset(StreamReset { stream, reason: 0 })),
        fixed(chunk::Chunk::StreamCredit(StreamCredit { stream, limit: u32::MAX })),
        fixed(chunk::Chunk::StreamCredit(StreamCredit { stream, limit: 0 })),
        fixed(chunk::Chunk::Close(chunk::Close { floor: 1, reason: 0 })),
    ]
}

/// Another process, which does not have the keys: whatever it sends, in whoever's name, the stream goes on.
#[test]
fn a_stranger_opens_feeds_ends_and_stalls_nothing() {
    let mut world = World::new(1, Path { loss: 20, ..Path::default() });
    world.keeps = true;
    let ours = world.open();
    let data = bytes(11, LONG);
    let now = world.at();
    world.hosts[0].send(&now, ours, &data[..1000]);
    world.run_for(10 * MS);
    let theirs = world.hosts[1].opened[0];
    let mut key = 1u64;
    for round in 0..100usize {
        let now = world.at();
        let (from, to) = (1000 + round * 4000, 5000 + round * 4000);
        world.hosts[0].send(&now, ours, &data[from..to]);
        for victim in 0..2 {
            let Route { local, remote } = world.hosts[victim].route;
            let elsewhere = SocketAddr::new([10, 9, 9, 9].into(), 20_000);
            for attack in attacks(0, world.end(1, theirs).readable as u32) {
                key = key.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(round as u64);
                for (name, key) in [(remote, key), (remote, 0), (elsewhere, key)] {
                    let packet = forged(name, local, key, round as u32 * 7 + 1, &attack);
                    let route = Route { local, remote: name };
                    let mut arrivals = Vec::new();
                    world.hosts[victim].rd.handle_input(&now, route, &packet, &mut arrivals);
                    assert!(arrivals.is_empty());
                    world.hosts[victim].events(&now, &packet);
                }
            }
            // And what it has seen, once more: it is known by its number.
            let copy = world.seen.get(world.seen.len().wrapping_sub(round + 1)).cloned();
            if let Some((to, packet)) = copy {
                let route = world.hosts[to].route;
                world.hosts[to].rd.handle_input(&now, route, &packet, &mut Vec::new());
                world.hosts[to].events(&now, &packet);
            }
        }
        world.run_for(MS);
    }
    world.path = Path::default();
    world.run_for(Duration::from_secs(2));
    assert_eq!(world.hosts[1].opened, [theirs]);
    assert!(world.end(1, theirs).came == data[..401_000]);
    assert_eq!((world.end(0, ours).ended, world.end(1, theirs).ended), (None, None));
}

/// A process with an exchange of its own has no part in another's streams, although they have the same
/// numbers.
#[test]
fn a_process_with_keys_of_its_own_ends_no_stream_of_another() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    let server = world.hosts[1].route.local;
    let other = Route { local: SocketAddr::new([10, 0, 0, 9].into(), 20_000), remote: server };
    let back = Route { local: server, remote: other.local };
    let mut stranger = Rd::new(&world.at(), Config::default(), &[77; 32]);
    let stream = stranger.open_stream(&world.at(), other, SERVICE).expect("there is room");
    stranger.offer(&world.at(), stream, 1);
    let mut opened = None;
    for step in 0..20 {
        world.now += MS;
        let now = world.at();
        if step == 10 {
            stranger.reset_stream(&now, stream);
        }
        let mut packet = PacketBuf::new();
        stranger.handle_timeout(&now);
        while stranger.poll_transmit(&now, &mut packet).is_some() {
            let mut bytes = Vec::new();
            packet.assemble(&mut bytes, |_, out| out.push(b'!'));
            world.hosts[1].rd.handle_input(&now, back, &bytes, &mut Vec::new());
            while let Some(StreamEvent { stream, what }) = world.hosts[1].rd.poll_stream_event() {
                assert!(!world.hosts[1].streams.contains_key(&stream), "{what:?} of another's stream");
                opened = opened.or(Some(stream));
            }
        }
        while let Some(to) = world.hosts[1].rd.poll_transmit(&now, &mut packet) {
            let mut bytes = Vec::new();
            packet.assemble(&mut bytes, |_, _| {});
            if to == back {
                stranger.handle_input(&now, other, &bytes, &mut Vec::new());
            }
        }
        while stranger.poll_stream_event().is_some() {}
    }
    assert!(opened.is_some());
    let theirs = world.hosts[1].opened[0];
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    world.run_for(300 * MS);
    assert_eq!((&world.end(1, theirs).came[..], world.end(1, theirs).ended), (&b"xy"[..], None));
}

fn stream_byte(stream: Ticket, all: &[Ticket]) -> u8 {
    all.iter().position(|other| *other == stream).expect("one of them") as u8
}
