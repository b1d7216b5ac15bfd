//! Two queue pairs of one process over memory, driven the ways programs drive them.

mod common;

use std::os::linux::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{End, LIMIT, sockets, to, uwarp};
use uwarp_driver::{Rtr, StreamParams};
use uwarp_llp::link::Counts;
use uwarp_llp::memory::board::PeerBoard;
use uwarp_llp::memory::lane::{self, Lane};
use uwarp_llp::memory::pair::{Bell, Pair};
use uwarp_llp::memory::slab::Slab;
use uwarp_llp::{Link, LowerLayer as _};
use uwarp_process::Descriptor;
use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::QpState;
use uwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr, Wc, WcStatus};

const SEND: SendOp = SendOp::Send { invalidate: None };
const OK: WcStatus = WcStatus::Success;

/// A link of this process to itself.
struct Host {
    slabs: [Arc<Slab>; 2],
}

impl Host {
    fn new(end: &End) -> Self {
        let (nic, lanes) = (&end.nic, end.nic.lanes().unwrap());
        let pair = || {
            let bell = Bell::create().unwrap();
            let rings = Bell::from_peer(bell.fd().try_clone_to_owned().unwrap()).unwrap();
            lanes.watch_bell(nic.engine(), bell).unwrap();
            let board = PeerBoard::open(lanes.board().try_clone_to_owned().unwrap()).unwrap();
            Arc::new(Pair::new(board, rings))
        };
        let (made, fd) = Slab::create(pair()).unwrap();
        let slabs = [made, Slab::open(fd, pair()).unwrap()];
        slabs.iter().for_each(|slab| lanes.add(slab.clone()));
        Self { slabs }
    }

    fn links(&self) -> [Link; 2] {
        let number = self.slabs[0].take_lane().expect("a lane is free");
        let (a, b) = sockets();
        let mut at = self.slabs.iter();
        [a, b].map(|socket| {
            socket.set_nonblocking(true).unwrap();
            let mut end = lane::End::new(at.next().unwrap().clone(), number);
            end.agreed();
            Lane::new(end, Descriptor::new(socket.into())).into()
        })
    }

    fn join(&self, left: &End, right: &End, params: StreamParams) {
        let [a, b] = self.links();
        let params = StreamParams { framing: Framing::PLAIN, placement_acks: true, ..params };
        let initiator = StreamParams { initiator: true, rtr: Rtr::SendWrite, ..params };
        left.qp.attach(a, initiator, left.watch.clone()).map_err(|(e, _)| e).unwrap();
        let responder = StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..params };
        right.qp.attach(b, responder, right.watch.clone()).map_err(|(e, _)| e).unwrap();
    }
}

fn connect(params: StreamParams, size: usize) -> (End, End) {
    let (left, right) = (End::new(size), End::new(size));
    Host::new(&left).join(&left, &right, params);
    (left, right)
}

fn ping_pong(a: &End, b: &End, take: [fn(&End) -> Wc; 2], rounds: usize) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                b.recv(&[b.sge(0, 64)]);
                while take[1](b).wr_id != 2 {}
                b.send(SEND, &[b.sge(0, 64)]);
            }
        });
        for i in 0..rounds {
            a.recv(&[a.sge(64, 64)]);
            a.send(SEND, &[a.sge(0, 64)]);
            let mut received = false;
            while !received {
                let wc = take[0](a);
                assert_eq!(wc.status, OK, "round {i}");
                received = wc.wr_id == 2;
            }
        }
    });
}

#[test]
fn polling_and_blocking_ping_pongs() {
    for (take, rounds) in [
        ([End::poll as fn(&End) -> Wc, End::poll as _], 2000),
        ([End::wait, End::wait], 1000),
        ([End::poll, End::wait], 500),
        ([End::wait, End::look_only], 200),
    ] {
        let (a, b) = connect(uwarp(), 4096);
        ping_pong(&a, &b, take, rounds);
        assert_eq!((a.events.count(), b.events.count()), (0, 0));
    }
}

/// An end that has had an answer knows of messages that the peer has not acknowledged by their number. It
/// took that for news at each glance.
#[test]
fn polls_become_glances_whatever_was_sent_before() {
    let (a, b) = connect(uwarp(), 4096);
    let glances = |end: &End| {
        (0..10_000).any(|_| {
            assert_eq!(end.nic.poll_cq(&end.cq, 1, drop), 0);
            end.cq.is_quiet()
        })
    };
    let both = |when: &str| assert_eq!([glances(&a), glances(&b)], [true; 2], "{when}");
    both("nothing was sent");
    b.recv(&[b.sge(0, 64)]);
    a.send(SEND, &[a.sge(0, 64)]);
    assert_eq!([b.poll().status, a.poll().status], [OK; 2]);
    both("a Send");
    a.send(SendOp::Read { stag: b.mr.stag(), to: b.addr(), invalidate_local: false }, &[a.sge(0, 64)]);
    assert_eq!(a.wait().status, OK);
    both("a Read");
}

/// Rings are far smaller, and one end is told of room again and again.
#[test]
fn large_writes_and_reads_arrive_whole() {
    let size = 9 << 20;
    let (mut a, mut b) = connect(uwarp(), size);
    for (i, byte) in a.memory.iter_mut().enumerate() {
        *byte = (i % 251) as u8;
    }
    let len = 8u32 << 20;
    let to = b.addr() + 5;
    a.send(SendOp::Write { stag: b.mr.stag(), to }, &[a.sge(1, len)]);
    a.send(SEND, &[a.sge(0, 0)]);
    b.recv(&[b.sge(0, 0)]);
    assert_eq!([a.poll(), a.poll(), b.poll()].map(|wc| wc.status), [OK; 3]);
    let n = len as usize;
    assert!(b.memory[5..5 + n] == a.memory[1..1 + n]);
    a.memory.fill(0);
    let read = SendOp::Read { stag: b.mr.stag(), to: b.addr() + 5, invalidate_local: false };
    a.send(read, &[a.sge(3, len)]);
    assert_eq!(a.wait().status, OK);
    assert!(a.memory[3..3 + n] == b.memory[5..5 + n]);
    // Nobody of the program looks.
    b.memory.fill(0);
    a.send(SendOp::Write { stag: b.mr.stag(), to: b.addr() }, &[a.sge(3, len)]);
    assert_eq!(a.look_only().status, OK);
    assert!(b.memory[..n] == a.memory[3..3 + n]);
}

#[test]
fn a_send_waits_for_its_receive() {
    let (a, b) = connect(uwarp(), 1 << 20);
    (0..30).for_each(|_| a.send(SEND, &[a.sge(0, 100_000)]));
    std::thread::sleep(Duration::from_millis(5));
    for _ in 0..30 {
        b.recv(&[b.sge(0, 100_000)]);
        assert_eq!(b.poll().status, OK);
    }
    (0..30).for_each(|_| assert_eq!(a.poll().status, OK));
}

/// What arrived while a Send waited for its receive was reported then, and is not reported again. The
/// receiver took what it had known of before for all that there is.
#[test]
fn what_came_while_a_send_waited_is_received() {
    const EACH: u32 = 1024;
    let (a, b) = connect(uwarp(), 1 << 20);
    let send = |messages: usize| {
        let sge = [a.sge(0, EACH)];
        let wr = SendWr { wr_id: 1, op: SEND, flags: SendFlags::SIGNALED, sges: &sge };
        a.qp.post_send(std::iter::repeat_n(wr, messages)).unwrap();
        // No thread of the program looks meanwhile.
        std::thread::sleep(Duration::from_millis(50));
    };
    b.recv(&[b.sge(0, EACH)]);
    send(40);
    assert_eq!(b.look_only().status, OK);
    send(40);
    let sge = [b.sge(0, EACH)];
    b.qp.post_recv(std::iter::repeat_n(RecvWr { wr_id: 2, sges: &sge }, 79)).unwrap();
    (0..79).for_each(|_| assert_eq!(b.look_only().status, OK));
    (0..80).for_each(|_| assert_eq!(a.look_only().status, OK));
}

#[test]
fn a_disconnect_loses_nothing() {
    let (a, b) = connect(uwarp(), 1 << 20);
    b.recv(&[b.sge(0, 1 << 20)]);
    a.send(SEND, &[a.sge(0, 1 << 20)]);
    a.qp.disconnect();
    assert_eq!(b.wait().status, OK);
    assert_eq!(a.wait().status, OK);
    b.qp.disconnect();
    a.watch.wait_end();
    b.watch.wait_end();
}

/// What the peer's process leaves behind, when it ends with open descriptors.
#[test]
fn the_end_of_the_connection_is_the_end() {
    let (a, b) = (End::new(4096), End::new(4096));
    let host = Host::new(&a);
    let [one, other] = host.links();
    let params = StreamParams { framing: Framing::PLAIN, placement_acks: true, ..uwarp() };
    a.qp.attach(one, StreamParams { rtr: Rtr::SendWrite, ..params }, a.watch.clone())
        .map_err(|(e, _)| e)
        .unwrap();
    a.send(SEND, &[a.sge(0, 100)]);
    let Link::Lane(other) = other else { panic!() };
    // Not even its flags say anything.
    drop(other.into_tcp());
    a.watch.wait_end();
    assert_ne!(a.wait().status, OK);
    drop(b);
}

/// Lanes serve one queue pair after the other, and a slab has 64.
#[test]
fn lanes_are_used_again() {
    let host = Host::new(&End::new(4096));
    for round in 0..300 {
        let (one, other) = (End::new(4096), End::new(4096));
        host.join(&one, &other, uwarp());
        other.recv(&[other.sge(0, 64)]);
        one.send(SEND, &[one.sge(0, 64)]);
        assert_eq!([one.poll().status, other.poll().status], [OK; 2], "round {round}");
        let how = if round % 2 == 0 { QpState::Err } else { QpState::Reset };
        one.qp.modify(&to(how)).unwrap();
        other.watch.wait_end();
        drop((one, other));
        let end = Instant::now() + LIMIT;
        while host.slabs.iter().any(|slab| slab.is_used()) {
            assert!(Instant::now() < end, "round {round}: a lane is not left");
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// 10,000 connections idle most of the time: a ring that is empty some seconds after its use costs nothing.
#[test]
fn an_empty_ring_gives_its_pages_back() {
    let (made, fd) = Slab::create(Arc::new(Pair::default())).unwrap();
    let (kept, pair) = (std::fs::File::from(fd.try_clone().unwrap()), Arc::new(Pair::default()));
    let opened = Slab::open(fd, pair).unwrap();
    let pages = || kept.metadata().unwrap().st_blocks() * 512 / 4096;
    let (a, b) = sockets();
    let lane = |slab: &Arc<Slab>, socket: std::net::TcpStream| {
        let mut end = lane::End::new(slab.clone(), 0);
        end.agreed();
        Lane::new(end, Descriptor::new(socket.into()))
    };
    let (mut a, mut b) = (lane(&made, a), lane(&opened, b));
    let before = pages();
    let mut buffer = vec![0; 100_000];
    for round in 0..3 {
        assert_eq!(a.send_bytes(&buffer), Ok(buffer.len()));
        a.flush(Counts::default(), 0);
        assert!(pages() >= before + 24, "{} pages", pages());
        assert!(a.answers().is_some_and(|answers| !answers.all));
        assert!(pages() >= before + 24, "what was not taken is kept, round {round}");
        let mut left = buffer.len();
        while left > 0 {
            left -= b.receive(&mut buffer[..left]).unwrap().bytes;
            b.flush(Counts::default(), 0);
        }
        assert!(a.answers().is_some_and(|answers| answers.all));
        assert_eq!(pages(), before, "round {round}");
    }
}
