//! Queue pairs of unreliable connections: with each other, with a peer that is played by hand and loses
//! packets, and with strangers (docs/rd.md section 5.5).

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_driver::{Nic, UcQp};
use uwarp_proto::rd::{
    Action, Config, Outgoing, PacketBuf, Placed, PostError, QpnPair, Rd, Route, Target, Ticket,
};
use uwarp_rnic::ah::Endpoint;
use uwarp_rnic::qp::{Drops, Now, QpModify, QpState};
use uwarp_rnic::{Access, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcStatus};
use uwarp_wire::rd::segment::First;

mod common;
use common::{Events, LIMIT, address, init};

const ROOM: usize = 8 << 20;
/// What the ends send with, and expect.
const PSN: u32 = 0x12_3456;
/// RDMAP version 1, Send and RDMA Write.
const SEND: u8 = 0x43;
const WRITE: u8 = 0x40;
const PLAIN: SendOp = SendOp::Send { invalidate: None };

/// A queue pair of this process. The lower half of its memory is for what it receives.
struct End {
    nic: Arc<Nic>,
    qp: Arc<UcQp>,
    cq: Arc<Cq>,
    mr: Arc<Mr>,
    memory: Box<[u8]>,
}

impl End {
    fn new() -> Self {
        let (nic, pd, events) = (Nic::open().unwrap(), Pd::new(), Arc::new(Events::default()));
        let cq = Cq::new(1024, 0, None, events.clone());
        let qp = UcQp::create(&nic, init(&pd, &cq, &events)).unwrap();
        let mut memory = vec![0u8; 2 * ROOM].into_boxed_slice();
        let addr = address(&mut memory);
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, rights).unwrap();
        Self { nic, qp, cq, mr, memory }
    }

    fn with_peer(self, at: SocketAddr, qpn: u32) -> Self {
        let to_init = QpModify {
            state: Some(QpState::Init),
            access: Some(Access::REMOTE_WRITE),
            ..QpModify::default()
        };
        self.qp.modify(&to_init, None).unwrap();
        let rtr = QpModify {
            state: Some(QpState::Rtr),
            dest_qp_num: Some(qpn),
            rq_psn: Some(PSN),
            ..QpModify::default()
        };
        let host = Endpoint { to: at, from: Some(Ipv4Addr::LOCALHOST.into()), marks: (0, 0) };
        self.qp.modify(&rtr, Some(host)).unwrap();
        let rts = QpModify { state: Some(QpState::Rts), sq_psn: Some(PSN), ..QpModify::default() };
        self.qp.modify(&rts, None).unwrap();
        self
    }

    /// Two that are connected to each other.
    fn pair() -> (Self, Self) {
        let (a, b) = (Self::new(), Self::new());
        let [(at_a, a_qpn), (at_b, b_qpn)] = [&a, &b].map(|end| (end.at(), end.qp.qpn()));
        (a.with_peer(at_b, b_qpn), b.with_peer(at_a, a_qpn))
    }

    fn sge(&self, offset: usize, length: usize) -> Sge {
        let length = u32::try_from(length).unwrap();
        Sge { addr: self.mr.range().0 + offset as u64, length, lkey: self.mr.stag() }
    }

    fn recv(&self, wr_id: u64, at: usize, length: usize) {
        let sges = [self.sge(at, length)];
        self.qp.post_recv(std::iter::once(RecvWr { wr_id, sges: &sges })).unwrap();
    }

    fn send(&self, wr_id: u64, op: SendOp, length: usize) {
        let sges = [self.sge(ROOM, length)];
        let wr = SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: &sges };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e).unwrap();
    }

    fn poll(&self) -> Option<Wc> {
        let mut found = None;
        self.nic.poll_cq(&self.cq, 1, |wc| found = Some(wc));
        found
    }

    fn wait(&self) -> Wc {
        let limit = Instant::now() + LIMIT;
        loop {
            if let Some(wc) = self.poll() {
                return wc;
            }
            assert!(Instant::now() < limit, "no completion");
            std::thread::yield_now();
        }
    }

    fn quiet(&self) {
        let until = Instant::now() + Duration::from_millis(50);
        while Instant::now() < until {
            assert_eq!(self.poll(), None);
        }
    }

    fn at(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, u16::try_from(self.qp.qpn() >> 8).unwrap()).into()
    }

    fn drops(&self) -> Drops {
        self.qp.look_at().3
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251 + seed * 31) as u8).collect()
}

/// They have one port, so nothing of it leaves the process.
#[test]
fn two_queue_pairs_of_one_process() {
    let (mut a, b) = End::pair();
    for (seed, len) in [0, 1, 64, 1410, 70_000, 5_000_000].into_iter().enumerate() {
        let bytes = pattern(len, seed);
        a.memory[ROOM..ROOM + len].copy_from_slice(&bytes);
        b.recv(7, 0, len);
        a.send(8, PLAIN, len);
        let (sent, came) = (a.wait(), b.wait());
        assert_eq!((sent.wr_id, sent.status), (8, WcStatus::Success));
        assert_eq!((came.wr_id, came.status, came.byte_len as usize), (7, WcStatus::Success, len));
        assert!(b.memory[..len] == bytes);
        let to = b.mr.range().0 + 1000;
        a.send(9, SendOp::WriteImmediate { stag: b.mr.stag(), to, imm: *b"imm!" }, len);
        a.wait();
        b.quiet();
        b.recv(10, 0, 0);
        a.send(11, SendOp::WriteImmediate { stag: b.mr.stag(), to, imm: *b"imm!" }, len);
        let (_, came) = (a.wait(), b.wait());
        assert_eq!((came.wr_id, came.imm_or_inv), (10, u32::from_ne_bytes(*b"imm!")));
        assert!(b.memory[1000..1000 + len] == bytes);
    }
    assert_eq!(b.drops(), Drops { no_receive: 6, ..Drops::default() });
}

#[test]
fn a_queue_pair_that_is_destroyed_in_the_middle() {
    for _ in 0..20 {
        let (a, b) = End::pair();
        b.recv(1, 0, ROOM);
        a.send(1, PLAIN, ROOM);
        b.qp.destroy();
        assert_eq!(a.wait().status, WcStatus::Success, "whoever is not there is not missed");
        assert_eq!(b.poll(), None);
        let (a, b) = End::pair();
        b.recv(1, 0, ROOM);
        a.send(1, PLAIN, ROOM);
        a.qp.destroy();
        assert_eq!(a.poll(), None);
    }
}

/// A process with one queue pair: the machine, and a socket.
struct Peer {
    socket: UdpSocket,
    at: SocketAddr,
    /// The number that it claims to have.
    qpn: u32,
    psn: u32,
    machine: Rd,
    packet: PacketBuf,
    sent: HashMap<Ticket, Vec<u8>>,
    finished: usize,
    /// Packets made, and which of them it keeps.
    count: u32,
    loses: fn(u32) -> bool,
    last: Vec<u8>,
}

impl Peer {
    fn new() -> Self {
        Self::on(Ipv4Addr::LOCALHOST, 0)
    }

    fn on(host: Ipv4Addr, port: u16) -> Self {
        let socket = UdpSocket::bind((host, port)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let at = socket.local_addr().unwrap();
        Self {
            socket,
            at,
            qpn: u32::from(at.port()) << 8 | 1,
            psn: PSN,
            machine: Rd::new(&Now::unread(), Config::default(), &[7; 32]),
            packet: PacketBuf::new(),
            sent: HashMap::new(),
            finished: 0,
            count: 0,
            loses: |_| false,
            last: Vec::new(),
        }
    }

    fn post(&mut self, to: &End, target: Target, bytes: Vec<u8>) {
        let route = Route { local: self.at, remote: to.at() };
        let message = Outgoing {
            pair: QpnPair { source: self.qpn, destination: to.qp.qpn() },
            first: First { qkey: self.psn, ..First::default() },
            target,
            len: u32::try_from(bytes.len()).unwrap(),
            ordered: false,
            rnr_retry: 0,
            unrepeated: true,
        };
        let ticket: Result<_, PostError> = self.machine.post(&Now::unread(), route, message);
        self.sent.insert(ticket.unwrap(), bytes);
    }

    fn send(&mut self, to: &End, bytes: Vec<u8>) {
        self.post(to, Target::Untagged { qn: 0, rsvdulp: SEND, rsvdulp32: 0 }, bytes);
    }

    /// Receives, acts and sends.
    fn turn(&mut self) {
        let (now, mut datagram, mut arrivals) = (Now::unread(), [0; 65_536], Vec::new());
        while let Ok((len, from)) = self.socket.recv_from(&mut datagram) {
            let route = Route { local: self.at, remote: from };
            self.machine.handle_input(&now, route, &datagram[..len], &mut arrivals);
            for arrival in std::mem::take(&mut arrivals) {
                self.machine.on_placed(&now, &arrival, Placed::Done, &mut arrivals);
            }
        }
        self.machine.handle_timeout(&now);
        while let Some(route) = self.machine.poll_transmit(&now, &mut self.packet) {
            let mut bytes = Vec::new();
            self.packet.assemble(0, &mut bytes, |payload, out| {
                let from = payload.offset as usize;
                out.extend_from_slice(&self.sent[&payload.ticket][from..from + payload.len as usize]);
            });
            self.count += 1;
            if !(self.loses)(self.count) {
                let _ = self.socket.send_to(&bytes, route.remote);
            }
            self.last = bytes;
            while let Some(action) = self.machine.poll_action() {
                if let Action::Finished { outcome, .. } = action {
                    assert_eq!(outcome, Ok(()));
                    self.finished += 1;
                }
            }
        }
    }

    /// Until so many of its messages have left, and all that was sent is there.
    fn until_left(&mut self, count: usize, end: &End, mut came: impl FnMut(Wc)) {
        let (limit, mut quiet) = (Instant::now() + LIMIT, 0);
        while self.finished < count || quiet < 50 {
            self.turn();
            match end.poll() {
                Some(wc) => came(wc),
                None if self.finished == count => {
                    quiet += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                None => std::thread::yield_now(),
            }
            assert!(Instant::now() < limit, "{} of {count} have left", self.finished);
        }
    }
}

#[test]
fn what_completes_is_whole_and_in_order_whatever_is_lost() {
    let mut peer = Peer::new();
    let end = End::new().with_peer(peer.at, peer.qpn);
    // More receives than messages on their way.
    const LEN: usize = 5000;
    const RECEIVES: usize = 16;
    peer.loses = |count| count > 20 && count.is_multiple_of(13);
    let (mut came, mut posted) = (Vec::new(), RECEIVES);
    (0..posted).for_each(|wr_id| end.recv(wr_id as u64, wr_id * LEN, LEN));
    for count in 1..=1000 {
        let mut bytes = pattern(LEN, count);
        bytes[..8].copy_from_slice(&(count as u64).to_be_bytes());
        peer.send(&end, bytes);
        if count % 10 != 0 {
            continue;
        }
        peer.until_left(count, &end, |wc| {
            assert_eq!((wc.status, wc.wr_id as usize), (WcStatus::Success, came.len()), "in their order");
            let at = (wc.wr_id as usize % RECEIVES) * LEN;
            let seed = u64::from_be_bytes(end.memory[at..at + 8].try_into().unwrap()) as usize;
            assert!(came.last().is_none_or(|last| *last < seed), "{seed} behind {came:?}");
            assert!(end.memory[at + 8..at + LEN] == pattern(LEN, seed)[8..], "message {seed} is another one");
            came.push(seed);
            end.recv(posted as u64, (posted % RECEIVES) * LEN, LEN);
            posted += 1;
        });
    }
    let lost = 1000 - came.len();
    assert!((50..900).contains(&lost), "{lost} lost");
    let drops = end.drops();
    assert!(drops.incomplete > 0 && drops.incomplete <= lost as u64, "{drops:?}, {lost} lost");
}

/// Somebody who knows both numbers and PSNs, and is not the peer: at another port, with an exchange of its
/// own; at the peer's port of another address; without an exchange.
#[test]
fn strangers_place_nothing() {
    let mut peer = Peer::new();
    let end = End::new().with_peer(peer.at, peer.qpn);
    end.recv(1, 0, 1000);
    let to = end.mr.range().0;
    let write = Target::Tagged { stag: end.mr.stag(), to, rsvdulp: WRITE };
    let mut strangers = [Peer::new(), Peer::on(Ipv4Addr::new(127, 0, 0, 2), peer.at.port())];
    for stranger in &mut strangers {
        for qpn in [peer.qpn, stranger.qpn] {
            stranger.qpn = qpn;
            let had = stranger.finished;
            stranger.send(&end, pattern(64, 1));
            stranger.post(&end, write, pattern(64, 2));
            stranger.until_left(had + 2, &end, |wc| panic!("{wc:?}"));
        }
    }
    let count = end.drops().qkey;
    assert!(count >= 6, "they have been heard: {count}");
    // Another life of the peer's queue pair.
    peer.psn = PSN + 1;
    peer.send(&end, pattern(64, 1));
    peer.post(&end, write, pattern(64, 2));
    peer.until_left(2, &end, |wc| panic!("{wc:?}"));
    assert_eq!(end.drops(), Drops { qkey: count + 2, ..Drops::default() });
    assert!(end.memory.iter().all(|byte| *byte == 0), "nothing was placed");
    // A packet of the peer's, from elsewhere, and once more from itself.
    peer.psn = PSN;
    let mut came = 0;
    peer.send(&end, pattern(64, 3));
    let limit = Instant::now() + LIMIT;
    while peer.finished < 3 {
        peer.turn();
        assert!(Instant::now() < limit);
    }
    let packet = peer.last.clone();
    end.recv(2, 0, 1000);
    peer.until_left(3, &end, |_| came += 1);
    for stranger in &strangers {
        stranger.socket.send_to(&packet, end.at()).unwrap();
    }
    for _ in 0..5 {
        peer.socket.send_to(&packet, end.at()).unwrap();
    }
    peer.until_left(3, &end, |_| came += 1);
    assert_eq!((came, &end.memory[..64]), (1, &pattern(64, 3)[..]));
}

/// Who guesses the names of memory is not told, and so could do it all the faster.
#[test]
fn who_guesses_names_of_memory_is_refused_for_a_while() {
    let mut peer = Peer::new();
    let end = End::new().with_peer(peer.at, peer.qpn);
    let to = end.mr.range().0;
    let named = |stag| Target::Tagged { stag, to, rsvdulp: WRITE };
    (1..=20).for_each(|wrong| peer.post(&end, named(end.mr.stag() ^ wrong << 8), pattern(64, 1)));
    peer.post(&end, named(end.mr.stag()), pattern(64, 1));
    peer.until_left(21, &end, |wc| panic!("{wc:?}"));
    assert_eq!(end.drops(), Drops { access: 21, ..Drops::default() });
    assert!(end.memory[..64].iter().all(|byte| *byte == 0), "the right one was behind twenty wrong ones");
    // Sends go on: they name nothing.
    end.recv(1, 0, 64);
    let mut came = 0;
    peer.send(&end, pattern(64, 2));
    peer.until_left(22, &end, |_| came += 1);
    assert_eq!((came, &end.memory[..64]), (1, &pattern(64, 2)[..]));
}

/// Whoever has taken the port of a peer that has ended can know all but the PSN.
#[test]
fn who_guesses_the_psn_is_refused_for_a_while() {
    let mut peer = Peer::new();
    let end = End::new().with_peer(peer.at, peer.qpn);
    (0..8).for_each(|at| end.recv(at, 0, 64));
    let psn = peer.psn;
    for wrong in 1..=20 {
        peer.psn = psn + wrong;
        peer.send(&end, pattern(64, 1));
    }
    peer.psn = psn;
    peer.send(&end, pattern(64, 1));
    peer.until_left(21, &end, |wc| panic!("{wc:?}"));
    assert_eq!(
        end.drops(),
        Drops { qkey: 21, ..Drops::default() },
        "the right one was behind twenty wrong ones"
    );

    // Of a peer that has said the right one before, wrong ones are what an earlier life has left.
    let mut peer = Peer::new();
    let end = End::new().with_peer(peer.at, peer.qpn);
    (0..8).for_each(|at| end.recv(at, 0, 64));
    let mut came = 0;
    peer.send(&end, pattern(64, 1));
    for wrong in 1..=20 {
        peer.psn = psn + wrong;
        peer.send(&end, pattern(64, 1));
    }
    peer.psn = psn;
    peer.send(&end, pattern(64, 2));
    peer.until_left(22, &end, |_| came += 1);
    assert_eq!((came, end.drops()), (2, Drops { qkey: 20, ..Drops::default() }));
}

#[test]
fn a_peer_that_is_not_there_ends_nothing() {
    let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let end = End::new().with_peer(nobody, u32::from(nobody.port()) << 8 | 1);
    end.recv(9, 0, 64);
    (0..3).for_each(|wr_id| end.send(wr_id, PLAIN, 64));
    // As those of adapters, they succeed, but only when their exchange is given up.
    for wr_id in 0..3 {
        let wc = end.wait();
        assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::Success));
    }
    assert_eq!(end.drops(), Drops { unsent: 3, ..Drops::default() });
    assert_eq!(end.qp.query().state, QpState::Rts);
}
