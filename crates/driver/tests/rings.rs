//! Datagrams by memory: two ports of one process, which agree as two processes do. The process is this test
//! program again, with a link that allows it.

#![allow(missing_docs)]

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_driver::ud::Carried;
use uwarp_driver::{Channel, Nic, UdQp};
use uwarp_rnic::qp::{QpModify, QpState, UdSendWr};
use uwarp_rnic::{Access, Ah, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcStatus};
use uwarp_wire::datagram::memory::{Memory, Says};

mod common;
use common::{Events, LIMIT, address, evented, init};

const QKEY: u32 = 0x1111_1111;
const SLOT: u32 = 4096 + 40;
const SLOTS: u32 = 64;
const CHILD: &str = "UWARP_TEST_RINGS";

/// How an end gets its next completion.
type Take = fn(&End) -> Wc;

/// Runs a test of this file in a process of its own.
fn alone(test: &str, link: &str, body: impl FnOnce()) {
    if std::env::var(CHILD).is_ok() {
        return body();
    }
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", test, "--nocapture"]).env(CHILD, "1").env("UWARP_LINK", link);
    let output = program.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

struct End {
    nic: Arc<Nic>,
    pd: Arc<Pd>,
    qp: Arc<UdQp>,
    cq: Arc<Cq>,
    channel: Arc<Channel>,
    events: Arc<Events>,
    mr: Arc<Mr>,
    memory: Box<[u8]>,
}

impl End {
    fn new() -> Self {
        let (nic, pd) = (Nic::open().unwrap(), Pd::new());
        let channel = Channel::new(nic.engine()).unwrap();
        let events = Arc::new(Events::default());
        let cq = evented(1024, 7, &channel, &events);
        let qp = Self::pair(&nic, &pd, &cq, &events);
        let mut memory = vec![0u8; (SLOTS * SLOT) as usize].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE).unwrap();
        Self { nic, pd, qp, cq, channel, events, mr, memory }
    }

    fn pair(nic: &Arc<Nic>, pd: &Arc<Pd>, cq: &Arc<Cq>, events: &Arc<Events>) -> Arc<UdQp> {
        let qp = UdQp::create(nic, init(pd, cq, events)).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            qp.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
        }
        qp
    }

    fn port(&self) -> u16 {
        (self.qp.qpn() >> 8) as u16
    }

    /// Two with numbers of two ports.
    fn two() -> (Self, Self) {
        let one = Self::new();
        let (mut others, end) = (Vec::new(), Instant::now() + LIMIT);
        loop {
            assert!(Instant::now() < end, "a port has 256 numbers");
            let other = Self::pair(&one.nic, &one.pd, &one.cq, &one.events);
            if other.qpn() >> 8 != one.qp.qpn() >> 8 {
                drop(other);
                let two = Self::new();
                assert_ne!(two.port(), one.port());
                return (one, two);
            }
            others.push(other);
        }
    }

    fn sge(&self, slot: u32, length: u32) -> Sge {
        Sge { addr: self.mr.range().0 + u64::from(slot % SLOTS * SLOT), length, lkey: self.mr.stag() }
    }

    fn recv(&self, slots: std::ops::Range<u32>) {
        for slot in slots {
            let sges = [self.sge(slot, SLOT)];
            self.qp.post_recv(std::iter::once(RecvWr { wr_id: slot.into(), sges: &sges })).unwrap();
        }
    }

    fn send(&self, to: &Self, number: u32, length: u32) {
        let ip = Ipv4Addr::LOCALHOST;
        let ah = Ah::new(&self.pd, SocketAddr::new(ip.into(), 0), Some(ip.into()));
        let sges = [self.sge(0, length)];
        let op = SendOp::SendImmediate { imm: number.to_be_bytes() };
        let wr = SendWr { wr_id: 1 << 32, op, flags: SendFlags::empty(), sges: &sges };
        let wr = UdSendWr { wr, ah: &ah, remote_qpn: to.qp.qpn(), remote_qkey: QKEY, job_key: None };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e).unwrap();
    }

    fn poll(&self) -> Wc {
        let end = Instant::now() + LIMIT;
        let mut found = None;
        while found.is_none() {
            assert!(Instant::now() < end, "no datagram, {:?}", self.qp.carried());
            self.nic.poll_cq(&self.cq, 1, |wc| found = Some(wc));
        }
        found.unwrap()
    }

    fn wait(&self) -> Wc {
        loop {
            let mut found = None;
            self.cq.arm(false);
            self.nic.poll_cq(&self.cq, 1, |wc| found = Some(wc));
            if let Some(wc) = found {
                return wc;
            }
            assert_eq!(self.channel.get(), Ok(7));
        }
    }

    fn got(&self, take: Take) -> u32 {
        let wc = take(self);
        assert_eq!(wc.status, WcStatus::Success);
        self.recv(wc.wr_id as u32..wc.wr_id as u32 + 1);
        wc.imm_or_inv.to_be()
    }

    /// What carries its datagrams to the other one.
    fn carried(&self, to: &Self) -> Option<Carried> {
        self.qp.carried().into_iter().find(|carried| carried.peer.port() == to.port())
    }

    fn is_by_memory(&self, to: &Self) -> bool {
        self.carried(to).is_some_and(|carried| carried.link == "memory")
    }
}

/// Until both directions go by memory; returns how many were sent each way.
fn ping_pong(a: &End, b: &End, take: [Take; 2], rounds: u32) {
    a.recv(0..8);
    b.recv(0..8);
    let end = Instant::now() + LIMIT;
    let mut round = 0;
    while round < rounds || !a.is_by_memory(b) || !b.is_by_memory(a) {
        assert!(Instant::now() < end, "{:?} {:?}", a.carried(b), b.carried(a));
        a.send(b, round, round % 4097);
        assert_eq!(b.got(take[1]), round);
        b.send(a, round + 7, 64);
        assert_eq!(a.got(take[0]), round + 7);
        round += 1;
    }
}

#[test]
fn polling_and_blocking_ping_pongs_go_by_memory() {
    alone("polling_and_blocking_ping_pongs_go_by_memory", "auto", || {
        let (a, b) = End::two();
        let (poll, wait): (Take, Take) = (End::poll, End::wait);
        for take in [[poll, poll], [wait, wait], [poll, wait]] {
            ping_pong(&a, &b, take, 1000);
        }
        let (to_b, to_a) = (a.carried(&b).unwrap(), b.carried(&a).unwrap());
        assert!(to_b.sent >= 2000 && to_a.sent >= 2000, "{to_b:?} {to_a:?}");
        assert_eq!((to_b.sent, to_a.sent), (to_a.received, to_b.received));
        assert_eq!((to_b.no_room, to_a.no_room), (0, 0));
        assert_eq!(a.nic.unclaimed(), uwarp_driver::ud::Unclaimed::default());
    });
}

/// All along, also while the datagrams change from UDP to memory.
#[test]
fn datagrams_stay_in_order() {
    alone("datagrams_stay_in_order", "auto", || {
        for _ in 0..20 {
            let (a, mut b) = End::two();
            b.recv(0..SLOTS);
            let (mut sent, mut seen, end) = (0, 0, Instant::now() + LIMIT);
            while seen < 500 || !a.is_by_memory(&b) || seen < sent {
                assert!(Instant::now() < end, "{seen} of {sent}, {:?}", a.carried(&b));
                while sent - seen < SLOTS / 2 && (seen < 500 || !a.is_by_memory(&b)) {
                    a.send(&b, sent, 64);
                    sent += 1;
                }
                assert_eq!(b.got(End::poll), seen);
                seen += 1;
            }
            // The next datagrams are read by nobody: they are overwritten with what the next round sends.
            b.memory.fill(0);
        }
    });
}

#[test]
fn who_comes_after_one_that_has_left_is_found_again() {
    alone("who_comes_after_one_that_has_left_is_found_again", "auto", || {
        let (a, b) = End::two();
        ping_pong(&a, &b, [End::poll; 2], 10);
        let port = b.port();
        drop(b);
        let (mut others, end) = (Vec::new(), Instant::now() + LIMIT);
        let b = loop {
            assert!(Instant::now() < end, "a port that is free serves again");
            let next = End::new();
            if next.port() == port {
                break next;
            }
            others.push(next);
        };
        a.recv(8..16);
        ping_pong(&a, &b, [End::poll; 2], 10);
    });
}

#[test]
fn a_user_who_wants_udp_gets_it() {
    alone("a_user_who_wants_udp_gets_it", "tcp", || {
        let (a, b) = End::two();
        a.recv(0..8);
        b.recv(0..8);
        for round in 0..50 {
            a.send(&b, round, 64);
            assert_eq!(b.got(End::poll), round);
        }
        assert_eq!((a.qp.carried(), b.qp.carried()), (vec![], vec![]));
    });
}

/// From a port that is not the one it speaks for, or about what nobody has asked.
#[test]
fn what_a_stranger_says_about_memory_changes_nothing() {
    alone("what_a_stranger_says_about_memory_changes_nothing", "auto", || {
        let (a, b) = End::two();
        ping_pong(&a, &b, [End::poll; 2], 10);
        let before = a.nic.unclaimed();
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        stranger.set_read_timeout(Some(LIMIT)).unwrap();
        let own = u32::from(stranger.local_addr().unwrap().port()) << 8;
        let (token, name, word) = ([7; 16], [8; 16], [9; 16]);
        let all = [
            Says::Request { token },
            Says::Offer { token, name, word },
            Says::Refusal { token },
            Says::Begins { word },
        ];
        for source_qpn in [a.qp.qpn(), own] {
            for says in all {
                let bytes = Memory { source_qpn, destination_qpn: b.qp.qpn(), says }.to_bytes();
                stranger.send_to(&bytes, (Ipv4Addr::LOCALHOST, b.port())).unwrap();
            }
        }
        // Its own request is answered: it says nothing that helps to speak for others.
        let mut buffer = [0; 200];
        let end = Instant::now() + LIMIT;
        stranger.set_nonblocking(true).unwrap();
        while stranger.recv(&mut buffer).is_err() {
            assert!(Instant::now() < end, "no answer");
            b.nic.poll_cq(&b.cq, 1, |_| ());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(buffer[4], 6);
        let now = a.nic.unclaimed();
        assert_eq!((now.spoofed - before.spoofed, now.malformed), (4, before.malformed));
        ping_pong(&a, &b, [End::poll; 2], 10);
        assert!(a.is_by_memory(&b) && b.is_by_memory(&a));
    });
}
