//! Two queue pairs of one process over a TCP connection on loopback, driven the ways programs drive them.

#![allow(missing_docs, unsafe_code)]

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use uwarp_driver::{Channel, Disconnect, Nic, Qp, Rtr, StreamObserver, StreamParams};
use uwarp_rnic::qp::{QpCaps, QpInit, QpModify, QpState};
use uwarp_rnic::{
    Access, AsyncEvent, AsyncSink, CompletionSink, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc,
    WcStatus,
};

const LIMIT: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Events(AtomicUsize);
impl AsyncSink for Events {
    fn async_event(&self, _: AsyncEvent) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct ToChannel(Arc<Channel>);
impl CompletionSink for ToChannel {
    fn completion_event(&self, cookie: u64) {
        self.0.push(cookie);
    }
}

#[derive(Default)]
struct Watch {
    state: Mutex<(bool, Option<Disconnect>)>,
    changed: Condvar,
}
impl StreamObserver for Watch {
    fn established(&self) {
        self.state.lock().unwrap().0 = true;
        self.changed.notify_all();
    }
    fn disconnected(&self, why: Disconnect) {
        assert!(self.state.lock().unwrap().1.replace(why).is_none());
        self.changed.notify_all();
    }
}
impl Watch {
    fn wait_end(&self) -> Disconnect {
        let state = self.state.lock().unwrap();
        let (state, result) = self.changed.wait_timeout_while(state, LIMIT, |s| s.1.is_none()).unwrap();
        assert!(!result.timed_out(), "no disconnect");
        state.1.unwrap()
    }
}

struct End {
    nic: Arc<Nic>,
    qp: Arc<Qp>,
    cq: Arc<Cq>,
    channel: Arc<Channel>,
    watch: Arc<Watch>,
    events: Arc<Events>,
    memory: Box<[u8]>,
    mr: Arc<Mr>,
}

impl End {
    fn new(size: usize) -> Self {
        let nic = Nic::open().unwrap();
        let pd = Pd::new();
        let channel = Channel::new(nic.engine()).unwrap();
        let events = Arc::new(Events::default());
        let cq = Cq::new(1024, 7, Some(Arc::new(ToChannel(channel.clone()))), events.clone());
        let caps = QpCaps {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let init = QpInit {
            pd: pd.clone(),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            caps,
            sq_sig_all: false,
            cookie: 1,
            async_sink: events.clone(),
        };
        let qp = Qp::create(&nic, init).unwrap();
        qp.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
        let mut memory = vec![0u8; size].into_boxed_slice();
        let addr = memory.as_mut_ptr().expose_provenance() as u64;
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = Mr::register(&pd, addr, size as u64, addr, all).unwrap();
        Self { nic, qp, cq, channel, watch: Arc::default(), events, memory, mr }
    }

    fn addr(&self) -> u64 {
        self.mr.range().0
    }

    fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.addr() + offset, length, lkey: self.mr.stag() }
    }

    fn send(&self, op: SendOp, sge: Sge, flags: SendFlags) {
        let sges = [sge];
        let wr = SendWr { wr_id: 1, op, flags: flags | SendFlags::SIGNALED, sges: &sges };
        self.qp.post_send(std::iter::once(wr)).unwrap();
    }

    fn recv(&self, sge: Sge) {
        let sges = [sge];
        self.qp.post_recv(std::iter::once(RecvWr { wr_id: 2, sges: &sges })).unwrap();
    }

    fn poll(&self) -> Wc {
        let end = Instant::now() + LIMIT;
        loop {
            let mut got = None;
            self.nic.poll_cq(&self.cq, 1, |wc| got = Some(wc));
            if let Some(wc) = got {
                return wc;
            }
            assert!(Instant::now() < end, "no completion");
        }
    }

    fn wait(&self) -> Wc {
        loop {
            let mut got = None;
            self.cq.arm(false);
            self.nic.poll_cq(&self.cq, 1, |wc| got = Some(wc));
            if let Some(wc) = got {
                return wc;
            }
            assert_eq!(self.channel.get(), Ok(7));
        }
    }
}

fn connect(params: StreamParams, size: usize) -> (End, End) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (b, _) = listener.accept().unwrap();
    let (left, right) = (End::new(size), End::new(size));
    for s in [&a, &b] {
        s.set_nonblocking(true).unwrap();
        s.set_nodelay(true).unwrap();
    }
    let rtr = if params.initiator { Rtr::SendWrite } else { Rtr::None };
    left.qp
        .attach(OwnedFd::from(a), StreamParams { initiator: true, rtr, ..params }, left.watch.clone())
        .unwrap();
    let responder = StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_fpdu: true, ..params };
    right.qp.attach(OwnedFd::from(b), responder, right.watch.clone()).unwrap();
    (left, right)
}

fn uwarp() -> StreamParams {
    StreamParams { peer_is_uwarp: true, ..StreamParams::default() }
}

fn ping_pong(a: &End, b: &End, take: fn(&End) -> Wc, rounds: usize) {
    let send = SendOp::Send { invalidate: None };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                b.recv(b.sge(0, 64));
                let mut seen = 0;
                while seen < 1 {
                    let wc = take(b);
                    assert_eq!(wc.status, WcStatus::Success);
                    seen += usize::from(wc.wr_id == 2);
                }
                b.send(send, b.sge(0, 64), SendFlags::empty());
            }
        });
        for i in 0..rounds {
            a.recv(a.sge(64, 64));
            a.send(send, a.sge(0, 64), SendFlags::empty());
            let mut seen = 0;
            while seen < 1 {
                let wc = take(a);
                assert_eq!(wc.status, WcStatus::Success, "round {i}");
                seen += usize::from(wc.wr_id == 2);
            }
        }
    });
}

#[test]
fn polling_ping_pong() {
    let (a, b) = connect(uwarp(), 4096);
    ping_pong(&a, &b, End::poll, 2000);
    assert_eq!((a.events.0.load(Ordering::Relaxed), b.events.0.load(Ordering::Relaxed)), (0, 0));
}

#[test]
fn blocking_ping_pong() {
    let (a, b) = connect(uwarp(), 4096);
    ping_pong(&a, &b, End::wait, 2000);
}

#[test]
fn both_ends_in_one_process_block_on_two_channels() {
    // Only one of two blocked threads can sleep on the sockets; the other must be woken all the same.
    let (a, b) = connect(StreamParams::default(), 4096);
    ping_pong(&a, &b, End::wait, 500);
}

#[test]
fn large_writes_and_reads_arrive_whole() {
    for params in [uwarp(), StreamParams::default(), StreamParams { crc: false, ..uwarp() }] {
        let size = 9 << 20;
        let (mut a, mut b) = connect(params, size);
        for (i, byte) in a.memory.iter_mut().enumerate() {
            *byte = (i % 251) as u8;
        }
        let len = 8u32 << 20;
        let to = b.addr() + 5;
        a.send(SendOp::Write { stag: b.mr.stag(), to }, a.sge(1, len), SendFlags::empty());
        a.send(SendOp::Send { invalidate: None }, a.sge(0, 0), SendFlags::empty());
        b.recv(b.sge(0, 0));
        assert_eq!(a.poll().status, WcStatus::Success);
        assert_eq!(a.poll().status, WcStatus::Success);
        assert_eq!(b.poll().status, WcStatus::Success);
        let n = len as usize;
        assert!(b.memory[5..5 + n] == a.memory[1..1 + n]);
        assert!(b.memory[..5].iter().all(|x| *x == 0) && b.memory[5 + n..].iter().all(|x| *x == 0));
        b.memory[..n].fill(0x5a);
        let to = b.addr();
        a.send(
            SendOp::Read { stag: b.mr.stag(), to, invalidate_local: false },
            a.sge(3, len),
            SendFlags::empty(),
        );
        let wc = a.poll();
        assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, len));
        assert!(a.memory[3..3 + n].iter().all(|x| *x == 0x5a));
    }
}

#[test]
fn the_background_thread_serves_a_program_that_never_calls() {
    let (a, b) = connect(uwarp(), 4096);
    let to = b.addr();
    for _ in 0..100 {
        a.send(
            SendOp::Read { stag: b.mr.stag(), to, invalidate_local: false },
            a.sge(0, 512),
            SendFlags::empty(),
        );
        assert_eq!(a.poll().status, WcStatus::Success);
    }
}

#[test]
fn disconnect_is_seen_by_both_and_loses_nothing() {
    let (a, b) = connect(uwarp(), 1 << 20);
    b.recv(b.sge(0, 1 << 20));
    b.recv(b.sge(0, 16));
    a.send(SendOp::Send { invalidate: None }, a.sge(0, 1 << 20), SendFlags::empty());
    a.qp.disconnect();
    assert_eq!(b.watch.wait_end(), Disconnect::PeerClosed);
    assert_eq!(a.watch.wait_end(), Disconnect::LocalClosed);
    assert_eq!(a.poll().status, WcStatus::Success);
    let wc = b.poll();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 1 << 20));
    assert_eq!(b.poll().status, WcStatus::WrFlushErr);
    assert_eq!(b.qp.query().state, QpState::Err);
}

#[test]
fn a_bad_key_terminates_and_is_told_to_both() {
    let (a, b) = connect(uwarp(), 4096);
    b.recv(b.sge(0, 16));
    let to = b.addr();
    a.send(
        SendOp::Read { stag: b.mr.stag() ^ 1, to, invalidate_local: false },
        a.sge(0, 64),
        SendFlags::empty(),
    );
    assert_eq!(a.poll().status, WcStatus::RemAccessErr);
    assert!(matches!(a.watch.wait_end(), Disconnect::Terminated(_)));
    assert!(matches!(b.watch.wait_end(), Disconnect::Sent(_)));
    assert_eq!(b.poll().status, WcStatus::WrFlushErr);
    assert_eq!((a.events.0.load(Ordering::Relaxed), b.events.0.load(Ordering::Relaxed)), (1, 1));
}

#[test]
fn a_send_waits_for_its_receive() {
    let (a, b) = connect(uwarp(), 4096);
    for _ in 0..10 {
        a.send(SendOp::Send { invalidate: None }, a.sge(0, 100), SendFlags::empty());
        assert_eq!(a.poll().status, WcStatus::Success);
    }
    std::thread::sleep(Duration::from_millis(20));
    for _ in 0..10 {
        b.recv(b.sge(0, 100));
        let wc = b.poll();
        assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 100));
    }
}
