//! Datagrams that strangers make, against a receiver that lives on: what is bad is counted under its reason,
//! nothing else is lost, and nothing grows.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use uwarp_driver::ud::Unclaimed;
use uwarp_driver::{Nic, UdQp};
use uwarp_llp::udp;
use uwarp_proto::datagram::{self, Head};
use uwarp_rnic::qp::{Drops, QpModify, QpState};
use uwarp_rnic::{Access, Cq, Mr, Pd, RecvWr, Sge, WcStatus};
use uwarp_wire::crc::crc32c;
use uwarp_wire::datagram::part::{Offer, PartHead};

mod common;
use common::{Events, LIMIT, address, init};

const QKEY: u32 = 0x1111_1111;
const ROOM: u32 = 200;

/// The counters are the process's: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

struct Victim {
    nic: Arc<Nic>,
    qp: Arc<UdQp>,
    cq: Arc<Cq>,
    mr: Arc<Mr>,
    /// Before anything was sent.
    unclaimed: Unclaimed,
    _memory: Box<[u8]>,
}

impl Victim {
    fn new() -> Self {
        let (nic, pd, events) = (Nic::open().unwrap(), Pd::new(), Arc::new(Events::default()));
        let cq = Cq::new(1024, 0, None, events.clone());
        let qp = UdQp::create(&nic, init(&pd, &cq, &events)).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            qp.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
        }
        let mut memory = vec![0u8; ROOM as usize].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, u64::from(ROOM), addr, Access::LOCAL_WRITE).unwrap();
        let unclaimed = nic.unclaimed();
        Self { nic, qp, cq, mr, unclaimed, _memory: memory }
    }

    fn to(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, u16::try_from(self.qp.qpn() >> 8 & 0xFFFF).unwrap()).into()
    }

    fn recv(&self) {
        let sges = [Sge { addr: self.mr.range().0, length: ROOM, lkey: self.mr.stag() }];
        self.qp.post_recv(std::iter::once(RecvWr { wr_id: 0, sges: &sges })).unwrap();
    }

    /// Datagrams that reached no queue pair since the beginning.
    fn unclaimed(&self) -> Unclaimed {
        let (now, then) = (self.nic.unclaimed(), self.unclaimed);
        Unclaimed {
            malformed: now.malformed - then.malformed,
            unknown: now.unknown - then.unknown,
            spoofed: now.spoofed - then.spoofed,
            no_room: now.no_room - then.no_room,
            incomplete: now.incomplete - then.incomplete,
        }
    }

    /// Each of these is malformed, and good messages arrive between them.
    fn finds_malformed(&self, stranger: &Stranger, datagrams: impl Iterator<Item = Vec<u8>>) {
        let mut sent = 0;
        for bytes in datagrams {
            stranger.send(&bytes, self);
            sent += 1;
            if sent % PAUSE == 0 {
                self.receives(stranger, b"good");
            }
        }
        self.receives(stranger, b"good");
        assert_eq!(
            self.unclaimed(),
            Unclaimed { malformed: sent, unknown: 0, spoofed: 0, ..Unclaimed::default() }
        );
        assert_eq!(self.qp.look_at().2, Drops::default());
    }

    /// A good message arrives behind everything that was sent before, and is all that completes.
    fn receives(&self, stranger: &Stranger, payload: &[u8]) {
        self.recv();
        stranger.send(&made(&stranger.head(self), payload), self);
        let end = Instant::now() + LIMIT;
        let mut got = None;
        while got.is_none() {
            assert!(Instant::now() < end, "nothing arrives");
            self.nic.poll_cq(&self.cq, 1, |wc| got = Some(wc));
        }
        let wc = got.unwrap();
        let length = 40 + u32::try_from(payload.len()).unwrap();
        assert_eq!((wc.status, wc.byte_len, wc.src_qp), (WcStatus::Success, length, stranger.qpn()));
    }
}

struct Stranger(UdpSocket);

impl Stranger {
    fn new() -> Self {
        Self(UdpSocket::bind("127.0.0.1:0").unwrap())
    }

    fn qpn(&self) -> u32 {
        u32::from(self.0.local_addr().unwrap().port()) << 8 | 1
    }

    fn head(&self, to: &Victim) -> Head {
        Head {
            source_qpn: self.qpn(),
            destination_qpn: to.qp.qpn(),
            qkey: QKEY,
            immediate: None,
            solicited: false,
            msn: 1,
            incarnation: 0,
        }
    }

    fn send(&self, bytes: &[u8], to: &Victim) {
        self.0.send_to(bytes, to.to()).unwrap();
    }
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = crc32c(&bytes);
    bytes.extend_from_slice(&datagram::trailer(sum));
    bytes
}

fn made(head: &Head, payload: &[u8]) -> Vec<u8> {
    sealed([&head.to_bytes()[..], payload].concat())
}

/// So many were sent without a look that the next ones might find no room in the socket.
const PAUSE: u64 = 100;

#[test]
fn every_length_and_every_flipped_bit_is_malformed() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (Victim::new(), Stranger::new());
    let good = made(&stranger.head(&victim), b"a message");
    let cut = (0..good.len()).map(|length| good[..length].to_vec());
    let flipped = (0..good.len() * 8).map(|bit| {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 0x80 >> (bit % 8);
        bytes
    });
    let longer = [vec![0; 1], vec![0; 4000], vec![0xFF; 60_000]].map(|tail| [&good[..], &tail].concat());
    victim.finds_malformed(&stranger, cut.chain(flipped).chain(longer));
}

/// With a right CRC: every value of every byte of the headers that decides.
#[test]
fn every_value_of_the_header_that_is_not_a_message_is_malformed() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (Victim::new(), Stranger::new());
    let head = stranger.head(&victim).to_bytes();
    // Version; flags and kind; DDP control; RDMAP control; queue number; message offset.
    let decide = [0, 4, 20, 21, 26, 27, 28, 29, 34, 35, 36, 37];
    // Immediate data; reserved bits of DDP and RDMAP that a receiver ignores; the other Send.
    let passes = |at: usize, value: u8| match at {
        4 => value & 0x7F == 0,
        20 => value & 0xC3 == 0x41,
        21 => value & 0xC0 == 0x40 && matches!(value & 0x0F, 3 | 5),
        _ => value == head[at],
    };
    let all = decide.iter().flat_map(|&at| (0..=u8::MAX).map(move |value| (at, value)));
    let bad = all.filter(|&(at, value)| !passes(at, value)).map(|(at, value)| {
        let mut bytes = head.to_vec();
        bytes[at] = value;
        sealed(bytes)
    });
    victim.finds_malformed(&stranger, bad);
}

/// A sender can have the system cut datagrams that it passes as one, and the receiver's system may join them
/// again.
#[test]
fn bad_datagrams_among_joined_ones_cost_only_themselves() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (Victim::new(), Stranger::new());
    let socket = udp::Socket::bind(0).unwrap();
    let to = victim.to();
    let source_qpn = u32::from(socket.port().unwrap()) << 8 | 1;
    let head = Head { source_qpn, ..stranger.head(&victim) };
    let good = made(&head, b"as long as each");
    let mut corrupt = good.clone();
    corrupt[50] ^= 1;
    let false_port = made(&Head { source_qpn: source_qpn ^ 0x100, ..head }, b"as long as each");
    let short = good[..good.len() - 1].to_vec();
    let sent = [&good, &corrupt, &good, &false_port, &corrupt, &good, &good, &short];
    let route = udp::Route { to, from: None };
    let batch = sent.map(|bytes| udp::Outgoing { route: &route, bytes });
    (0..4).for_each(|_| victim.recv());
    assert_eq!(socket.send(&batch), Ok(batch.len()));
    let (end, mut received) = (Instant::now() + LIMIT, 0);
    while received < 4 || victim.unclaimed().malformed < 3 {
        assert!(Instant::now() < end, "{received} received, {:?}", victim.unclaimed());
        victim.nic.poll_cq(&victim.cq, 1, |wc| {
            assert_eq!((wc.status, wc.byte_len, wc.src_qp), (WcStatus::Success, 40 + 15, source_qpn));
            received += 1;
        });
    }
    assert_eq!(
        victim.unclaimed(),
        Unclaimed { malformed: 3, unknown: 0, spoofed: 1, ..Unclaimed::default() }
    );
    assert_eq!(victim.qp.look_at().2, Drops::default());
}

/// Sends these to the victims' port in one call, and as one where the system can cut.
fn send_together(socket: &udp::Socket, to: SocketAddr, datagrams: &[Vec<u8>]) {
    let route = udp::Route { to, from: None };
    let batch: Vec<_> =
        datagrams.iter().map(|bytes| udp::Outgoing { route: &route, bytes: &bytes[..] }).collect();
    assert_eq!(socket.send(&batch), Ok(batch.len()));
}

/// Of joined datagrams each goes to its own queue pair, in order; what is for none is counted.
#[test]
fn joined_datagrams_of_several_queue_pairs_come_apart() {
    let _alone = ALONE.lock();
    let (one, other, stranger) = (Victim::new(), Victim::new(), Stranger::new());
    assert_eq!(one.to(), other.to());
    let socket = udp::Socket::bind(0).unwrap();
    let source_qpn = u32::from(socket.port().unwrap()) << 8 | 1;
    // 0 and 1: the two of them; 2: nobody's; 3: one with a false CRC.
    let order = [0, 0, 1, 0, 2, 1, 1, 3, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 3, 1, 0];
    let datagrams: Vec<_> = (0..)
        .zip(order)
        .map(|(number, whose)| {
            let destination_qpn = match whose {
                1 => other.qp.qpn(),
                2 => one.qp.qpn() | 0xFF,
                _ => one.qp.qpn(),
            };
            let immediate = Some(u32::to_be_bytes(number));
            let head = Head { source_qpn, destination_qpn, immediate, ..stranger.head(&one) };
            let mut bytes = made(&head, b"as long as each");
            bytes[45] ^= u8::from(whose == 3);
            bytes
        })
        .collect();
    for victim in [&one, &other] {
        order.iter().for_each(|_| victim.recv());
    }
    send_together(&socket, one.to(), &datagrams);
    for (victim, whose) in [(&one, 0), (&other, 1)] {
        let wanted: Vec<u32> = (0..).zip(order).filter(|(_, of)| *of == whose).map(|(n, _)| n).collect();
        let (end, mut got) = (Instant::now() + LIMIT, Vec::new());
        while got.len() < wanted.len() {
            assert!(Instant::now() < end, "{got:?} of {wanted:?}");
            victim.nic.poll_cq(&victim.cq, 8, |wc| {
                assert_eq!((wc.status, wc.qp_num), (WcStatus::Success, victim.qp.qpn()));
                got.push(u32::from_be_bytes(wc.imm_or_inv.to_ne_bytes()));
            });
        }
        assert_eq!(got, wanted);
    }
    assert_eq!(one.unclaimed(), Unclaimed { malformed: 2, unknown: 3, spoofed: 0, ..Unclaimed::default() });
}

/// What finds no receive in the middle of joined datagrams is dropped, and those behind it go on.
#[test]
fn too_few_receives_for_joined_datagrams_drop_the_rest_of_them() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (Victim::new(), Stranger::new());
    let socket = udp::Socket::bind(0).unwrap();
    let head = Head { source_qpn: u32::from(socket.port().unwrap()) << 8 | 1, ..stranger.head(&victim) };
    let datagrams = vec![made(&head, b"x"); 20];
    (0..7).for_each(|_| victim.recv());
    send_together(&socket, victim.to(), &datagrams);
    let (end, mut received) = (Instant::now() + LIMIT, 0);
    while victim.qp.look_at().2.no_receive < 13 {
        assert!(Instant::now() < end, "{received} received, {:?}", victim.qp.look_at().2);
        received += victim.nic.poll_cq(&victim.cq, 8, |wc| assert_eq!(wc.status, WcStatus::Success));
    }
    received += victim.nic.poll_cq(&victim.cq, 8, |_| ());
    assert_eq!(received, 7);
    victim.receives(&stranger, b"good");
    assert_eq!(victim.qp.look_at().2, Drops { no_receive: 13, ..Drops::default() });
    assert_eq!(victim.unclaimed(), Unclaimed::default());
}

/// Nothing completes behind that, and the memory of its receives is free.
#[test]
fn a_queue_pair_is_destroyed_while_joined_datagrams_come() {
    let _alone = ALONE.lock();
    // The port lives on.
    let (keeper, stranger) = (Victim::new(), Stranger::new());
    let socket = udp::Socket::bind(0).unwrap();
    let source_qpn = u32::from(socket.port().unwrap()) << 8 | 1;
    for round in 0..300 {
        let victim = Victim::new();
        (0..100).for_each(|_| victim.recv());
        let head = Head { source_qpn, ..stranger.head(&victim) };
        let datagrams = vec![made(&head, b"as long as each"); 30];
        std::thread::scope(|scope| {
            scope.spawn(|| (0..3).for_each(|_| send_together(&socket, victim.to(), &datagrams)));
            scope.spawn(|| {
                for _ in 0..20 {
                    keeper.nic.poll_cq(&keeper.cq, 8, |_| panic!("a completion"));
                }
            });
            let mut got = 0;
            for _ in 0..round % 50 {
                got += victim.nic.poll_cq(&victim.cq, 64, |wc| assert_eq!(wc.status, WcStatus::Success));
            }
            victim.qp.destroy();
            victim.mr.deregister();
            assert!(got <= 90);
            assert_eq!(victim.nic.poll_cq(&victim.cq, 64, |_| panic!("a completion")), 0);
        });
        assert_eq!(victim.nic.poll_cq(&victim.cq, 64, |_| panic!("a completion")), 0);
    }
    keeper.receives(&stranger, b"good");
}

#[test]
fn what_is_for_nobody_from_a_false_port_or_with_another_key_is_counted_so() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (Victim::new(), Stranger::new());
    let good = stranger.head(&victim);
    let send = |head: Head| stranger.send(&made(&head, b"x"), &victim);
    let qpn = victim.qp.qpn();
    for slot in 0..=0xFF {
        // Of the victim's port, which has other queue pairs only if another test left one; of another port; a
        // group; none.
        if slot != qpn & 0xFF {
            send(Head { destination_qpn: qpn & !0xFF | slot, ..good });
        }
    }
    for destination_qpn in [qpn ^ 0x100, qpn ^ 0x80_0000, 0xFF_FFFF, 0] {
        send(Head { destination_qpn, ..good });
    }
    for source_qpn in [qpn, 0, 0xFF_FFFF, good.source_qpn ^ 0x100] {
        send(Head { source_qpn, ..good });
    }
    for bit in 0..32 {
        send(Head { qkey: QKEY ^ 1 << bit, ..good });
    }
    victim.receives(&stranger, b"good");
    assert_eq!(
        victim.unclaimed(),
        Unclaimed { malformed: 0, unknown: 255 + 4, spoofed: 4, ..Unclaimed::default() }
    );
    assert_eq!(victim.qp.look_at().2, Drops { qkey: 32, ..Drops::default() });
    // Without a receive; longer than the one there is.
    let until = |what: &str, drops: fn(Drops) -> u64| {
        let end = Instant::now() + LIMIT;
        while drops(victim.qp.look_at().2) == 0 {
            assert!(Instant::now() < end, "{what}");
            victim.nic.poll_cq(&victim.cq, 1, |_| panic!("a completion"));
        }
    };
    send(good);
    until("never without a receive", |drops| drops.no_receive);
    victim.recv();
    stranger.send(&made(&good, &[0; ROOM as usize]), &victim);
    until("never too long", |drops| drops.too_long);
    victim.receives(&stranger, b"good");
    assert_eq!(victim.qp.look_at().2, Drops { qkey: 32, no_receive: 1, too_long: 1, ..Drops::default() });
    assert_eq!(victim.qp.query().state, QpState::Rts);
}

/// Resident memory in KiB.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4
}

#[test]
fn a_flood_from_many_sources_leaves_nothing_behind() {
    let _alone = ALONE.lock();
    let victim = Victim::new();
    let strangers: Vec<_> = (0..64).map(|_| Stranger::new()).collect();
    let round = |number: u32| {
        for (i, stranger) in strangers.iter().enumerate() {
            let good = stranger.head(&victim);
            let incarnation = number << 8 | i as u32;
            stranger.send(&made(&Head { incarnation, ..good }, b"without a receive"), &victim);
            stranger.send(&made(&Head { source_qpn: good.source_qpn ^ 0x100, ..good }, &[]), &victim);
            stranger.send(&[1; 60], &victim);
        }
        // Whatever came is looked at before more is sent, so that the socket has room.
        let end = Instant::now() + LIMIT;
        while victim.unclaimed().malformed < 64 * u64::from(number) {
            assert!(Instant::now() < end, "{:?}", victim.unclaimed());
            victim.nic.poll_cq(&victim.cq, 1, |_| panic!("a completion"));
        }
    };
    (1..=20).for_each(round);
    let before = resident();
    (21..=220).for_each(round);
    let after = resident();
    assert!(after < before + 1024, "{before} KiB before, {after} after");
    assert_eq!(
        victim.unclaimed(),
        Unclaimed { malformed: 64 * 220, unknown: 0, spoofed: 64 * 220, ..Unclaimed::default() }
    );
    assert_eq!(victim.qp.look_at().2, Drops { no_receive: 64 * 220, ..Drops::default() });
    strangers.iter().for_each(|stranger| victim.receives(stranger, b"good"));
}

/// A datagram in parts of so many bytes.
fn parts(datagram: &[u8], head: PartHead, each: usize) -> Vec<Vec<u8>> {
    let part = |(nth, bytes): (usize, &[u8])| {
        let head = PartHead { length: datagram.len() as u16, offset: (nth * each) as u16, ..head };
        let mut part = [&head.to_bytes()[..], bytes].concat();
        part.resize(PartHead::LEN + each, 0);
        part
    };
    datagram.chunks(each).enumerate().map(part).collect()
}

fn part_head(stranger: &Stranger, victim: &Victim, number: u32) -> PartHead {
    let (source_qpn, destination_qpn) = (stranger.qpn(), victim.qp.qpn());
    PartHead { source_qpn, destination_qpn, qkey: QKEY, number, length: 0, offset: 0 }
}

impl Victim {
    /// Looks until this has come.
    fn looks(&self, until: impl Fn(Unclaimed) -> bool) {
        let end = Instant::now() + LIMIT;
        while !until(self.unclaimed()) {
            assert!(Instant::now() < end, "{:?}", self.unclaimed());
            self.nic.poll_cq(&self.cq, 1, |_| panic!("a completion"));
        }
    }
}

#[test]
fn parts_make_a_message_in_any_order_among_those_of_others() {
    let _alone = ALONE.lock();
    let (victim, stranger, other) = (Victim::new(), Stranger::new(), Stranger::new());
    let good = made(&stranger.head(&victim), &[7; 150]);
    let mut pieces = parts(&good, part_head(&stranger, &victim, 9), 40);
    pieces.reverse();
    victim.recv();
    for (nth, piece) in (0..).zip(&pieces) {
        // Whatever the others say, in its name, too.
        other.send(&parts(&good, part_head(&stranger, &victim, 9), 40)[0], &victim);
        other.send(&parts(&good, part_head(&other, &victim, 9), 40)[0], &victim);
        stranger.send(&parts(&good, part_head(&stranger, &victim, 100 + nth % 2), 50)[0], &victim);
        stranger.send(piece, &victim);
        stranger.send(piece, &victim);
    }
    let (mut got, end) = (None, Instant::now() + LIMIT);
    while got.is_none() {
        assert!(Instant::now() < end, "{:?}", victim.unclaimed());
        victim.nic.poll_cq(&victim.cq, 1, |wc| got = Some(wc));
    }
    let wc = got.unwrap();
    assert_eq!((wc.status, wc.byte_len, wc.src_qp), (WcStatus::Success, 190, stranger.qpn()));
    victim.looks(|unclaimed| unclaimed.spoofed == 5);
    assert_eq!(victim.unclaimed(), Unclaimed { spoofed: 5, ..Unclaimed::default() });
}

/// Parts that hold parts would be unpacked without end; so would what is no message be answered.
#[test]
fn what_comes_in_parts_is_a_message_or_nothing() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (Victim::new(), Stranger::new());
    let good = made(&stranger.head(&victim), &[7; 100]);
    let head = |number| part_head(&stranger, &victim, number);
    let mut nested = good.clone();
    for number in 0..50 {
        nested = parts(&nested, head(number), nested.len()).remove(0);
    }
    let offer =
        Offer { source_qpn: stranger.qpn(), destination_qpn: victim.qp.qpn(), token: 5, answers: false };
    let mut corrupt = good.clone();
    corrupt[60] ^= 1;
    let whole = [&nested[..], &offer.to_bytes(), &corrupt].map(|bytes| parts(bytes, head(99), bytes.len()));
    for bytes in &whole {
        stranger.send(&bytes[0], &victim);
    }
    // Fields that contradict each other.
    let mut bad = Vec::new();
    for (at, value) in [(12, 0xFF), (14, 0xFF), (15, 1), (4, 0x89), (4, 0x49), (0, 2)] {
        let mut bytes = parts(&good, head(100), 40).remove(0);
        bytes[at] = value;
        bad.push(bytes);
    }
    bad.push(parts(&good, head(101), 2).remove(0));
    bad.push(head(102).to_bytes().to_vec());
    // To nobody, and with another Q_Key.
    let qpn = victim.qp.qpn();
    for other in [
        PartHead { destination_qpn: qpn ^ 0x80, ..head(103) },
        PartHead { qkey: QKEY + 1, ..head(104) },
        PartHead { destination_qpn: qpn ^ 0x8000, ..head(105) },
    ] {
        bad.push(parts(&good, other, 40).remove(0));
    }
    bad.iter().for_each(|bytes| stranger.send(bytes, &victim));
    // (One with R set is not for this service.)
    victim.looks(|unclaimed| unclaimed.malformed >= 3 + 7);
    victim.receives(&stranger, b"good");
    let found = victim.unclaimed();
    assert_eq!((found.unknown, found.spoofed, found.incomplete), (3, 0, 0), "{found:?}");
}

#[test]
fn parts_without_an_end_cost_no_memory_and_nobody_elses_messages() {
    let _alone = ALONE.lock();
    let victim = Victim::new();
    let strangers: Vec<_> = (0..100).map(|_| Stranger::new()).collect();
    let long = vec![0; 60_000];
    let round = |number: u32| {
        for stranger in &strangers {
            stranger.send(&parts(&long, part_head(stranger, &victim, number), 1400)[0], &victim);
        }
        let begun = u64::from(number) * 100;
        victim.looks(|unclaimed| unclaimed.incomplete + 1024 >= begun);
    };
    (1..=10).for_each(round);
    let before = resident();
    (11..=300).for_each(round);
    let after = resident();
    assert!(after < before + 4096, "{before} KiB before, {after} after");
    victim.receives(&strangers[0], b"good");
    // Of one that sends all of them at once, the message of another one is made meanwhile.
    let good = made(&strangers[1].head(&victim), &[7; 150]);
    victim.recv();
    for (nth, piece) in parts(&good, part_head(&strangers[1], &victim, 7777), 40).iter().enumerate() {
        for number in 0..30 {
            let number = 10_000 + number + 100 * nth as u32;
            strangers[0].send(&parts(&good, part_head(&strangers[0], &victim, number), 40)[0], &victim);
        }
        strangers[1].send(piece, &victim);
    }
    let (mut got, end) = (None, Instant::now() + LIMIT);
    while got.is_none() {
        assert!(Instant::now() < end, "{:?}", victim.unclaimed());
        victim.nic.poll_cq(&victim.cq, 1, |wc| got = Some(wc));
    }
    assert_eq!(got.map(|wc| (wc.status, wc.src_qp)), Some((WcStatus::Success, strangers[1].qpn())));
}

#[test]
fn the_question_for_parts_is_answered_to_who_asks_in_as_many_bytes() {
    let _alone = ALONE.lock();
    let (victim, stranger) = (Victim::new(), Stranger::new());
    let offer =
        Offer { source_qpn: stranger.qpn(), destination_qpn: victim.qp.qpn(), token: 5, answers: false };
    stranger.send(&Offer { source_qpn: offer.source_qpn ^ 0x100, ..offer }.to_bytes(), &victim);
    stranger.send(&Offer { destination_qpn: offer.destination_qpn ^ 0x100, ..offer }.to_bytes(), &victim);
    // Nobody has asked.
    stranger.send(&Offer { answers: true, ..offer }.to_bytes(), &victim);
    let mut flipped = offer.to_bytes();
    flipped[15] ^= 1;
    stranger.send(&flipped, &victim);
    // As long as a part.
    let mut question = [0; 1472];
    offer.emit(&mut question);
    stranger.send(&question, &victim);
    victim.looks(|unclaimed| unclaimed.malformed == 1);
    victim.receives(&stranger, b"good");
    let mut bytes = [0; 100];
    stranger.0.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(stranger.0.recv(&mut bytes).unwrap(), Offer::LEN);
    assert_eq!(bytes[..Offer::LEN], offer.answer().to_bytes());
    stranger.0.set_read_timeout(Some(std::time::Duration::from_millis(50))).unwrap();
    assert!(stranger.0.recv(&mut bytes).is_err(), "one answer");
    assert_eq!(
        victim.unclaimed(),
        Unclaimed { malformed: 1, unknown: 1, spoofed: 1, ..Unclaimed::default() }
    );
}

/// If nothing else keeps the port: creating a queue pair failed ("File exists"), or its datagrams were not
/// reported.
#[test]
fn the_last_queue_pair_of_a_port_goes_while_the_next_is_made() {
    let _alone = ALONE.lock();
    let end = |victim: &Victim| victim.qp.destroy();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..2000).for_each(|_| end(&Victim::new())));
        }
    });
    let (victim, stranger) = (Victim::new(), Stranger::new());
    victim.receives(&stranger, b"good");
}
