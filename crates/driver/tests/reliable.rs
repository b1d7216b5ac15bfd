//! Queue pairs of reliable datagrams with a peer that is played by hand, and with strangers (docs/rd.md).

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_driver::{Nic, RdQp};
use uwarp_proto::rd::{
    Action, Bytes, Config, Failure, MessageId, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route, Target,
    Ticket,
};
use uwarp_rnic::qp::{Now, QpModify, QpState, RdInit, UdSendWr};
use uwarp_rnic::{Access, Ah, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcStatus};
use uwarp_wire::crc;
use uwarp_wire::rd::chunk::{Chunk, chunks};
use uwarp_wire::rd::segment::First;
use uwarp_wire::rd::{Header, Kind, Packet};

mod common;
use common::{Events, LIMIT, address, init};

const QKEY: u32 = 0x1111_1111;
const ROOM: usize = 16 << 20;
/// RDMAP version 1, Send.
const SEND: u8 = 0x43;

/// A queue pair of this process. The lower half of its memory is for what it receives.
struct End {
    nic: Arc<Nic>,
    pd: Arc<Pd>,
    qp: Arc<RdQp>,
    cq: Arc<Cq>,
    mr: Arc<Mr>,
    memory: Box<[u8]>,
}

impl End {
    fn new() -> Self {
        let (nic, pd, events) = (Nic::open().unwrap(), Pd::new(), Arc::new(Events::default()));
        let cq = Cq::new(1024, 0, None, events.clone());
        let how = RdInit { ordered: false, grh: false, job_key: 0, max_records: 0 };
        let qp = RdQp::create(&nic, init(&pd, &cq, &events), how).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let change =
                QpModify { state: Some(state), qkey: Some(QKEY), rnr_retry: Some(7), ..QpModify::default() };
            qp.modify(&change).unwrap();
        }
        let mut memory = vec![0u8; 2 * ROOM].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE).unwrap();
        Self { nic, pd, qp, cq, mr, memory }
    }

    fn sge(&self, offset: usize, length: u32) -> Sge {
        Sge { addr: self.mr.range().0 + offset as u64, length, lkey: self.mr.stag() }
    }

    fn recv(&self, length: u32) {
        let sges = [self.sge(0, length)];
        self.qp.post_recv(std::iter::once(RecvWr { wr_id: 0, sges: &sges })).unwrap();
    }

    fn send(&self, wr_id: u64, to: SocketAddr, length: u32) {
        let (sges, ah) = ([self.sge(ROOM, length)], Ah::new(&self.pd, to, None));
        let op = SendOp::Send { invalidate: None };
        let wr = SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: &sges };
        let wr = UdSendWr { wr, ah: &ah, remote_qpn: number_at(to), remote_qkey: QKEY, job_key: None };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e).unwrap();
    }

    fn poll(&self) -> Option<Wc> {
        let mut found = None;
        self.nic.poll_cq(&self.cq, 1, |wc| found = Some(wc));
        found
    }

    fn port(&self) -> u16 {
        u16::try_from(self.qp.qpn() >> 8).unwrap()
    }

    fn at(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port()).into()
    }
}

/// The number of the only queue pair that a peer by hand has.
fn number_at(peer: SocketAddr) -> u32 {
    u32::from(peer.port()) << 8 | 1
}

/// A process with one queue pair: the machine, and a socket.
struct Peer {
    socket: UdpSocket,
    at: SocketAddr,
    machine: Rd,
    packet: PacketBuf,
    sent: HashMap<Ticket, Vec<u8>>,
    begun: HashMap<MessageId, Vec<u8>>,
    received: Vec<Vec<u8>>,
    finished: Vec<Result<(), Failure>>,
    /// The last packet that it has sent.
    last: Vec<u8>,
    /// What it takes for the Q_Key.
    qkey: u32,
    /// It sends no packet with the first segment of a message.
    hides_first: bool,
}

impl Peer {
    fn new() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let at = socket.local_addr().unwrap();
        let machine = Rd::new(&Now::unread(), Config::default(), &[7; 32]);
        Self {
            socket,
            at,
            machine,
            packet: PacketBuf::new(),
            sent: HashMap::new(),
            begun: HashMap::new(),
            received: Vec::new(),
            finished: Vec::new(),
            last: Vec::new(),
            qkey: QKEY,
            hides_first: false,
        }
    }

    fn post(&mut self, to: &End, bytes: Vec<u8>) {
        let route = Route { local: self.at, remote: to.at() };
        let message = Outgoing {
            pair: QpnPair { source: number_at(self.at), destination: to.qp.qpn() },
            first: First { qkey: self.qkey, ..First::default() },
            target: Target::Untagged { qn: 0, rsvdulp: SEND, rsvdulp32: 0 },
            len: u32::try_from(bytes.len()).unwrap(),
            ordered: false,
            rnr_retry: 7,
            unrepeated: false,
        };
        let ticket = self.machine.post(&Now::unread(), route, message).unwrap();
        self.sent.insert(ticket, bytes);
    }

    /// Receives, acts and sends.
    fn turn(&mut self) {
        let (now, mut datagram, mut arrivals) = (Now::unread(), [0; 65_536], Vec::new());
        while let Ok((len, from)) = self.socket.recv_from(&mut datagram) {
            let bytes = &datagram[..len];
            self.machine.handle_input(&now, Route { local: self.at, remote: from }, bytes, &mut arrivals);
            while !arrivals.is_empty() {
                for arrival in std::mem::take(&mut arrivals) {
                    let payload = match &arrival.bytes {
                        Bytes::Datagram(range) => &bytes[range.clone()],
                        Bytes::Held(bytes) => bytes,
                        Bytes::Joined(_) => panic!("datagrams come one by one"),
                    };
                    let whole = self.begun.entry(arrival.message).or_default();
                    whole.resize(arrival.message_len as usize, 0);
                    whole[arrival.offset as usize..][..payload.len()].copy_from_slice(payload);
                    self.machine.on_placed(&now, &arrival, Placed::Done, &mut arrivals);
                }
            }
        }
        self.machine.handle_timeout(&now);
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Finished { outcome, .. } => self.finished.push(outcome),
                Action::Deliver { message, .. } => self.received.extend(self.begun.remove(&message)),
                Action::AskLength { .. } => {}
                Action::TakeBack { message, .. } => drop(self.begun.remove(&message)),
                Action::AskPort { .. } => {}
            }
        }
        while let Some(route) = self.machine.poll_transmit(&now, &mut self.packet) {
            let mut bytes = Vec::new();
            self.packet.assemble(0, &mut bytes, |payload, out| {
                let from = payload.offset as usize;
                out.extend_from_slice(&self.sent[&payload.ticket][from..from + payload.len as usize]);
            });
            if !self.hides_first || !has_first(&bytes) {
                let _ = self.socket.send_to(&bytes, route.remote);
            }
            self.last = bytes;
        }
    }
}

/// Whether a packet has the first segment of a message.
fn has_first(packet: &[u8]) -> bool {
    let packet = Packet::parse(packet).unwrap();
    let mut all = chunks(packet.body());
    all.any(|chunk| matches!(chunk, Ok(Chunk::Segment(segment)) if segment.head.first.is_some()))
}

/// Runs both until it is so.
fn until(end: &End, peer: &mut Peer, what: &str, mut is_so: impl FnMut(&mut Peer, Option<Wc>) -> bool) {
    let limit = Instant::now() + LIMIT;
    loop {
        peer.turn();
        let wc = end.poll();
        if is_so(peer, wc) {
            return;
        }
        assert!(Instant::now() < limit, "never {what}");
        std::thread::yield_now();
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251 + seed * 31) as u8).collect()
}

/// A message each way, with all its bytes.
fn there_and_back(end: &mut End, peer: &mut Peer, len: usize, seed: usize) {
    let (there, back) = (pattern(len, seed), pattern(len, seed + 1));
    end.memory[ROOM..ROOM + len].copy_from_slice(&there);
    let (had, ended) = (peer.received.len(), peer.finished.len());
    end.send(1, peer.at, u32::try_from(len).unwrap());
    end.recv(u32::try_from(len).unwrap());
    let (mut sent, mut came) = (None, None);
    until(end, peer, "a message to the peer", |peer, wc| {
        sent = sent.or(wc);
        sent.is_some() && peer.received.len() > had
    });
    assert_eq!(sent.map(|wc| (wc.status, wc.wr_id)), Some((WcStatus::Success, 1)));
    assert_eq!(peer.received.last(), Some(&there));
    peer.post(end, back.clone());
    until(end, peer, "a message of the peer", |peer, wc| {
        came = came.or(wc);
        came.is_some() && peer.finished.len() > ended
    });
    let came = came.unwrap();
    assert_eq!((came.status, came.byte_len as usize), (WcStatus::Success, len));
    assert_eq!(came.src_qp, number_at(peer.at));
    assert_eq!(peer.finished.last(), Some(&Ok(())));
    assert_eq!(end.memory[..len], back);
}

#[test]
fn messages_to_and_from_a_peer_by_hand() {
    let (mut end, mut peer) = (End::new(), Peer::new());
    for (seed, len) in [0, 1, 64, 1410, 5000, 300_000].into_iter().enumerate() {
        there_and_back(&mut end, &mut peer, len, seed);
    }
}

#[test]
fn a_destroyed_queue_pair_refuses_what_it_had_begun_and_its_peer_goes_on() {
    let (mut end, mut peer) = (End::new(), Peer::new());
    there_and_back(&mut end, &mut peer, 64, 1);
    // Whole for the queue pair only when all of it has come, which cannot be before the destruction.
    end.recv(900_000);
    peer.post(&end, pattern(900_000, 3));
    let first = Instant::now() + LIMIT;
    while peer.finished.len() < 2 && peer.last.len() < 1000 {
        peer.turn();
        assert!(Instant::now() < first);
    }
    end.qp.destroy();
    let limit = Instant::now() + LIMIT;
    while peer.finished.len() < 2 {
        peer.turn();
        assert!(Instant::now() < limit, "never told");
        std::thread::yield_now();
    }
    assert!(matches!(peer.finished[1], Err(Failure::Refused(_))), "{:?}", peer.finished[1]);
    assert_eq!(end.poll(), None, "nothing completes after the destruction");
}

/// Only the first segment of a message has the Q_Key. A host that left it out could have every receive of a
/// queue pair for a second, again and again.
#[test]
fn who_does_not_know_the_q_key_takes_no_receive() {
    let (end, mut stranger, mut peer) = (End::new(), Peer::new(), Peer::new());
    end.recv(60_000);
    stranger.qkey = QKEY + 1;
    stranger.post(&end, pattern(64, 1));
    until(&end, &mut stranger, "a refusal", |stranger, _| !stranger.finished.is_empty());
    assert!(matches!(stranger.finished[0], Err(Failure::Refused(_))), "{:?}", stranger.finished[0]);
    stranger.hides_first = true;
    (0..4).for_each(|seed| stranger.post(&end, pattern(50_000, seed)));
    for _ in 0..100 {
        stranger.turn();
        assert_eq!(end.poll(), None);
        assert_eq!(end.qp.look_at().1.receives_posted, 1, "a receive for a message without a Q_Key");
        std::thread::sleep(Duration::from_millis(1));
    }
    peer.post(&end, pattern(50_000, 9));
    let mut came = None;
    until(&end, &mut peer, "a message of who knows it", |_, wc| {
        came = wc;
        came.is_some()
    });
    assert_eq!(came.map(|wc| (wc.status, wc.byte_len)), Some((WcStatus::Success, 50_000)));
}

/// The rest of a message of this process, of which a part was copied, went into the queue pair that got the
/// number next, whatever its Q_Key.
#[test]
fn a_message_to_itself_ends_with_its_receiver() {
    let end = End::new();
    for _ in 0..50 {
        let receiver = End::new();
        receiver.recv(ROOM as u32);
        let (sges, ah) = ([end.sge(ROOM, ROOM as u32)], Ah::new(&end.pd, end.at(), None));
        let op = SendOp::Send { invalidate: None };
        let wr = SendWr { wr_id: 7, op, flags: SendFlags::SIGNALED, sges: &sges };
        let wr = UdSendWr { wr, ah: &ah, remote_qpn: receiver.qp.qpn(), remote_qkey: QKEY, job_key: None };
        end.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e).unwrap();
        receiver.qp.destroy();
        assert_eq!(receiver.poll(), None, "nothing completes after the destruction");
        let limit = Instant::now() + LIMIT;
        let done = loop {
            if let Some(wc) = end.poll() {
                break wc;
            }
            assert!(Instant::now() < limit, "never ends");
        };
        assert_eq!(done.wr_id, 7);
        // It may all have been copied before.
        if done.status == WcStatus::RemAbortErr {
            return;
        }
        assert_eq!(done.status, WcStatus::Success);
    }
    panic!("it was whole each time");
}

fn forged(header: Header, body: &[u8]) -> Vec<u8> {
    let mut bytes = header.to_bytes().to_vec();
    bytes.extend_from_slice(body);
    let sum = crc::to_wire(crc::crc32c(&bytes));
    bytes.extend_from_slice(&sum);
    bytes
}

/// Everything that somebody can say who sees no packet of the exchange and does not know its keys, from the
/// peer's port number at another address, from another port in the peer's name, and from its own.
#[test]
fn strangers_change_nothing_and_get_no_more_than_they_sent() {
    let (mut end, mut peer) = (End::new(), Peer::new());
    there_and_back(&mut end, &mut peer, 64, 1);
    let strangers = [
        UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 2), peer.at.port())).unwrap(),
        UdpSocket::bind("127.0.0.1:0").unwrap(),
    ];
    let (mut sent, mut got, mut noise) = (0, 0, 1u64);
    for round in 0..400 {
        for stranger in &strangers {
            stranger.set_nonblocking(true).unwrap();
            let own = stranger.local_addr().unwrap().port();
            for kind in 0..8 {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let header = Header {
                    version: 1,
                    kind: Kind::from_code(kind),
                    source_port: if round % 2 == 0 { own } else { peer.at.port() },
                    destination_port: end.port(),
                    key: noise,
                    number: u32::try_from(round).unwrap() + 1,
                };
                // CLOSE; an ACK of everything; PING; an Open of noise; a Hello with its padding.
                let close = [8, 0, 0, 12, 0, 0, 0, 9, 0, 0, 0, 0];
                let body: Vec<u8> = match round % 5 {
                    0 => close.to_vec(),
                    1 => [1, 0, 0, 24, 0, 0, 0, 1, 0, 0, 0, 0, 0, 16, 1, 0, 0, 0, 0, 9, 0, 0, 0, 1].to_vec(),
                    2 => vec![7, 0, 0, 4],
                    3 => (0..24).map(|at| (noise >> (at % 57)) as u8).chain(close).collect(),
                    _ => [1].into_iter().chain(std::iter::repeat_n(0, 71)).collect(),
                };
                let mut bytes = forged(header, &body);
                if round % 7 == 6 {
                    bytes.truncate(bytes.len() - 5);
                }
                sent += bytes.len();
                stranger.send_to(&bytes, end.at()).unwrap();
            }
        }
        peer.turn();
        assert_eq!(end.poll(), None);
        for stranger in &strangers {
            let mut answer = [0; 2048];
            while let Ok(len) = stranger.recv(&mut answer) {
                got += len;
            }
        }
    }
    assert!(got <= sent, "{got} bytes for {sent}");
    assert_eq!(end.qp.query().state, QpState::Rts);
    // Also what was in flight meanwhile arrives, and the exchange is the same one.
    for seed in 2..6 {
        there_and_back(&mut end, &mut peer, 20_000, seed);
    }
    assert!(peer.finished.iter().all(Result::is_ok), "{:?}", peer.finished);
}

/// What was sent once is repeated later, to the same end and back to its sender.
#[test]
fn a_packet_that_is_replayed_or_reflected_is_delivered_once() {
    let (mut end, mut peer) = (End::new(), Peer::new());
    there_and_back(&mut end, &mut peer, 64, 1);
    end.recv(64);
    peer.post(&end, pattern(64, 9));
    peer.turn();
    let message = peer.last.clone();
    let mut came = None;
    until(&end, &mut peer, "delivered", |_, wc| {
        came = came.or(wc);
        came.is_some()
    });
    end.recv(64);
    let elsewhere = UdpSocket::bind("127.0.0.1:0").unwrap();
    for _ in 0..20 {
        peer.socket.send_to(&message, end.at()).unwrap();
        elsewhere.send_to(&message, end.at()).unwrap();
        elsewhere.send_to(&message, peer.at).unwrap();
        let quiet = Instant::now() + Duration::from_millis(5);
        while Instant::now() < quiet {
            peer.turn();
            assert_eq!(end.poll(), None, "delivered again");
        }
    }
    assert_eq!(peer.received.len(), 1, "reflected to its sender");
}
