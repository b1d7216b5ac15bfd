//! What must hold whatever a peer says that has the keys of its exchange: no panic, no more memory than is
//! allowed, each posted message ends once, and what is placed lies inside its message. Shared by
//! `tests/rd_exchange.rs` and the fuzz target `rd_exchange`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{
    Action, Bytes, Config, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route, Target, Ticket,
};
use uwarp_wire::crc;
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::segment::First;
use uwarp_wire::rd::{Header, Kind, Packet, VERSION};

struct Victim {
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

    fn hear(&mut self, datagram: &[u8], choices: u8) {
        let (now, route) = (self.at(), self.route);
        let mut arrivals = Vec::new();
        self.rd.handle_input(&now, route, datagram, &mut arrivals);
        let mut choices = choices;
        while !arrivals.is_empty() {
            let arrival = arrivals.remove(0);
            let len = match &arrival.bytes {
                Bytes::Datagram(range) => {
                    assert!(range.end <= datagram.len() - 4, "payload outside its datagram");
                    range.len()
                }
                Bytes::Held(bytes) => bytes.len(),
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
            packet.assemble(&mut bytes, |payload, out| out.resize(out.len() + payload.len as usize, 0));
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
    let mut victim = Victim { rd: rd(1), start, now: Duration::ZERO, route, open, packets };
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
            packet.assemble(&mut sent, |_, _| {});
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
        match kind % 9 {
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
    assert!(victim.open.is_empty(), "messages that have not ended: {:?}", victim.open);
    assert_eq!((victim.rd.peers(), victim.rd.poll_timeout()), (0, None));
}
