//! What must hold whatever a peer says that has the keys of its exchange: no panic, no more memory than is
//! allowed, each posted message and each stream ends once, what is placed lies inside its message, and bytes
//! of streams within what was granted. Shared by `tests/rd_exchange.rs` and the fuzz target `rd_exchange`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{
    Action, Bytes, Config, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route, StreamEvent, StreamNews, Target,
    Ticket,
};
use uwarp_wire::crc;
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::segment::First;
use uwarp_wire::rd::{Header, Kind, Packet, VERSION};

/// A stream, as the victim has it: how much it has offered and got back, and how much came and was taken.
#[derive(Default)]
struct End {
    offered: u64,
    released: u64,
    readable: u64,
    taken: u64,
    is_finished: bool,
}

struct Victim {
    streams: BTreeMap<Ticket, End>,
    rd: Rd,
    start: Instant,
    now: Duration,
    route: Route,
    open: BTreeSet<Ticket>,
    packets: Vec<Vec<u8>>,
}

impl Victim {
    fn at(&self) -> Now {
        Now::at(self.start + self.now)
    }

    fn post(&mut self, ordered: bool, len: u32, tagged: bool) {
        let target = match tagged {
            // A Read Request, which is never answered here.
            true if len.is_multiple_of(3) => Target::Untagged { qn: 1, rsvdulp: 0x41, rsvdulp32: 0 },
            true => Target::Tagged { stag: 7, to: u64::MAX - 10, rsvdulp: 0x40 },
            false => Target::Untagged { qn: 0, rsvdulp: 0x43, rsvdulp32: 0 },
        };
        let message = Outgoing {
            pair: QpnPair { source: 1, destination: 2 },
            first: First { qkey: 7, ..First::default() },
            target,
            len,
            ordered,
            rnr_retry: (len % 8) as u8,
            unrepeated: len % 8 == 5,
        };
        let ticket = self.rd.post(&self.at(), self.route, message).expect("there is room");
        self.open.insert(ticket);
    }

    /// One that this process opens.
    fn open_stream(&mut self, choices: u8) {
        let stream = self.rd.open_stream(&self.at(), self.route, 1).expect("there is room");
        let offered = u64::from(choices) * 1000;
        self.streams.insert(stream, End { offered, ..End::default() });
        self.rd.offer(&self.at(), stream, offered);
        self.settle();
    }

    fn use_stream(&mut self, choices: u8) {
        let now = self.at();
        let at = usize::from(choices >> 2) % self.streams.len().max(1);
        let Some((stream, end)) = self.streams.iter_mut().nth(at) else { return };
        match choices & 3 {
            0 => {
                end.taken = end.readable;
                self.rd.taken(&now, *stream, end.taken);
            }
            1 => self.rd.finish_stream(&now, *stream),
            2 => self.rd.leave_stream(&now, *stream),
            _ => self.rd.reset_stream(&now, *stream),
        }
        self.settle();
    }

    fn see_streams(&mut self, datagram: &[u8]) {
        while let Some(StreamEvent { stream, what }) = self.rd.poll_stream_event() {
            if let StreamNews::Opened { route, service } = what {
                assert_eq!((route, service), (self.route, 1));
                assert!(self.streams.insert(stream, End::default()).is_none(), "opened twice");
                continue;
            }
            let end = self.streams.get_mut(&stream).expect("a stream that has not ended");
            match what {
                StreamNews::Opened { .. } | StreamNews::Limit(_) => {}
                StreamNews::Bytes { position, at } => {
                    assert!(at.end + 4 <= datagram.len(), "bytes outside their datagram");
                    assert!(position >= end.readable, "bytes that were readable come again");
                    let most = (end.taken + 256 * 1024).max(64 * 1024);
                    assert!(position + at.len() as u64 <= most, "beyond what was granted");
                }
                StreamNews::Readable(to) => {
                    assert!(to > end.readable && !end.is_finished);
                    end.readable = to;
                }
                StreamNews::Finished => assert!(!std::mem::replace(&mut end.is_finished, true)),
                StreamNews::Acknowledged(to) => {
                    assert!(to > end.released && to <= end.offered);
                    end.released = to;
                }
                StreamNews::Ended(_) => _ = self.streams.remove(&stream),
            }
        }
    }

    fn hear(&mut self, datagram: &[u8], choices: u8) {
        let (now, route) = (self.at(), self.route);
        let mut arrivals = Vec::new();
        self.rd.handle_input(&now, route, datagram, &mut arrivals);
        self.see_streams(datagram);
        let mut choices = choices;
        while !arrivals.is_empty() {
            let arrival = arrivals.remove(0);
            let len = match &arrival.bytes {
                Bytes::Datagram(range) => {
                    assert!(range.end <= datagram.len() - 4, "payload outside its datagram");
                    range.len()
                }
                Bytes::Held(bytes) => bytes.len(),
                Bytes::Joined(_) => panic!("datagrams come one by one"),
            };
            let end = u64::from(arrival.offset) + len as u64;
            assert!(end <= u64::from(arrival.message_len), "payload outside its message");
            let placed = match choices & 3 {
                1 => Placed::NoReceive(choices >> 3),
                2 => Placed::Refused(Reason::Access),
                _ => Placed::Done,
            };
            choices = choices.rotate_right(2);
            self.rd.on_placed(&now, &arrival, placed, &mut arrivals);
        }
        self.settle();
    }

    fn settle(&mut self) {
        self.see_streams(&[]);
        while let Some(action) = self.rd.poll_action() {
            if let Action::Finished { ticket, .. } = action {
                assert!(self.open.remove(&ticket), "a message ends twice");
            }
        }
        assert!(self.rd.held_bytes() <= 256 * 1024, "{} bytes are held", self.rd.held_bytes());
        let (now, mut packet) = (self.at(), PacketBuf::new());
        for _ in 0..10_000 {
            if self.rd.poll_transmit(&now, &mut packet).is_none() {
                return;
            }
            let mut bytes = Vec::new();
            packet.assemble(0, &mut bytes, |payload, out| {
                if let Some(end) = self.streams.get(&payload.ticket) {
                    let from = u64::from(payload.offset);
                    assert!(from >= end.released && from + u64::from(payload.len) <= end.offered);
                }
                out.resize(out.len() + payload.len as usize, 0);
            });
            assert!(bytes.len() <= Config::default().packet_len, "{} bytes", bytes.len());
            assert!(Packet::parse(&bytes).is_ok_and(|packet| packet.is_intact()));
            self.packets.push(bytes);
        }
        panic!("it never stops sending");
    }

    fn wait(&mut self, by: Duration) {
        self.now += by;
        let now = self.at();
        if self.rd.poll_timeout().is_some_and(|at| at <= now.get()) {
            self.rd.handle_timeout(&now);
        }
        self.settle();
    }
}

fn sealed(header: Header, body: &[u8]) -> Vec<u8> {
    let mut packet = header.to_bytes().to_vec();
    packet.extend(body);
    let sum = crc::to_wire(crc::crc32c(&packet));
    packet.extend(sum);
    packet
}

/// A victim with an exchange, and a peer that has its key. Each part of `bytes` is a call, a pause, or the
/// chunks of a packet: a kind, a length, and so many bytes.
pub fn exchange(bytes: &[u8]) {
    let start = Instant::now();
    let at = |host: u8| ([10, 0, 0, host], 20_000).into();
    let (route, back) = (Route { local: at(1), remote: at(2) }, Route { local: at(2), remote: at(1) });
    let rd = |seed: u8| Rd::new(&Now::at(start), Config::default(), &[seed; 32]);
    let (open, packets) = (BTreeSet::new(), Vec::new());
    let streams = BTreeMap::new();
    let mut victim = Victim { streams, rd: rd(1), start, now: Duration::ZERO, route, open, packets };
    victim.rd.take_streams(1, true);
    victim.post(true, 10, false);
    victim.settle();
    // An honest peer brings the exchange up; from here on the liar speaks with its key.
    let (mut peer, mut packet, mut key, mut number) = (rd(2), PacketBuf::new(), 0, 0);
    for _ in 0..2 {
        for sent in std::mem::take(&mut victim.packets) {
            peer.handle_input(&victim.at(), back, &sent, &mut Vec::new());
        }
        while peer.poll_transmit(&victim.at(), &mut packet).is_some() {
            let mut sent = Vec::new();
            packet.assemble(0, &mut sent, |_, _| {});
            if let Ok(header) = Header::parse(&sent) {
                (key, number) = (header.key, header.number.max(number));
            }
            victim.hear(&sent, 0);
        }
    }
    let mut rest = bytes;
    while let [kind, len, after @ ..] = rest {
        let (body, next) = after.split_at(usize::from(*len).min(after.len()));
        rest = next;
        match kind % 11 {
            0 => victim.post(len & 1 != 0, u32::from(*len) * 40, len & 2 != 0),
            1 => victim.wait(Duration::from_micros(10) * (1 << (len % 22))),
            2 => victim.wait(Duration::from_secs(u64::from(len % 70))),
            8 => {
                let at = usize::from(*len) % victim.open.len().max(1);
                if let Some(ticket) = victim.open.iter().nth(at).copied() {
                    victim.rd.withdraw(&victim.at(), ticket);
                    victim.settle();
                    assert!(!victim.open.contains(&ticket), "it has not ended");
                }
            }
            9 => victim.open_stream(*len),
            10 => victim.use_stream(*len),
            kind => {
                number += 1;
                let kind = if kind == 7 { Kind::from_code(*len) } else { Kind::Packet };
                let header = Header {
                    version: VERSION,
                    kind,
                    source_port: 20_000,
                    destination_port: 20_000,
                    key,
                    number,
                };
                victim.hear(&sealed(header, body), *len);
            }
        }
    }
    // However it was lied to, every message ends, and a minute later nothing is kept.
    for _ in 0..400 {
        victim.wait(Duration::from_millis(500));
    }
    assert!(victim.streams.is_empty(), "{} streams have not ended", victim.streams.len());
    assert!(victim.open.is_empty(), "messages that have not ended: {:?}", victim.open);
    assert_eq!((victim.rd.peers(), victim.rd.poll_timeout()), (0, None));
}
