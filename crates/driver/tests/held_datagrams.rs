//! Datagrams that wait for more go out, whatever the program does next (docs/adr/045).

#![allow(missing_docs)]

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use uwarp_driver::{Channel, Nic, UdQp};
use uwarp_rnic::qp::{QpModify, QpState, UdSendWr};
use uwarp_rnic::{Ah, Cq, Pd, SendFlags, SendOp, SendWr, Sge, WcStatus};

mod common;
use common::{Events, LIMIT, evented, init};

const QKEY: u32 = 0x1111_1111;
const MARK: &[u8] = b"the one that waited";
const PORT: &str = "UWARP_TEST_PORT";

/// Each poll of the process sends what is held.
static ALONE: Mutex<()> = Mutex::new(());

struct End {
    nic: Arc<Nic>,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    channel: Arc<Channel>,
    qp: Arc<UdQp>,
    _alone: MutexGuard<'static, ()>,
}

impl End {
    fn new() -> Self {
        Self::with(128)
    }

    /// With a send queue of this length.
    fn with(max_send_wr: u32) -> Self {
        let _alone = ALONE.lock();
        let (nic, pd, events) = (Nic::open().unwrap(), Pd::new(), Arc::new(Events::default()));
        let channel = Channel::new(nic.engine()).unwrap();
        let cq = evented(1024, 7, &channel, &events);
        let mut init = init(&pd, &cq, &events);
        init.caps.max_send_wr = max_send_wr;
        let qp = UdQp::create(&nic, init).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            qp.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
        }
        Self { nic, pd, cq, channel, qp, _alone }
    }

    fn send(&self, to: u16, inline: &[u8]) {
        self.send_with(to, inline, SendFlags::SIGNALED);
    }

    fn send_with(&self, to: u16, inline: &[u8], flags: SendFlags) {
        let ah = Ah::new(&self.pd, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), None);
        let addr = inline.as_ptr().expose_provenance() as u64;
        let sges = [Sge { addr, length: inline.len() as u32, lkey: 0 }];
        let op = SendOp::Send { invalidate: None };
        let wr = SendWr { wr_id: 7, op, flags: flags | SendFlags::INLINE, sges: &sges };
        let wr = UdSendWr { wr, ah: &ah, remote_qpn: u32::from(to) << 8, remote_qkey: QKEY, job_key: None };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e).unwrap();
    }

    fn waiting(&self) -> usize {
        self.qp.look_at().1.sends_posted
    }

    /// Polls in vain, and posts three datagrams, the last one with the mark. Returns whether that one waits.
    fn try_to_hold(&self, to: u16) -> bool {
        let own = SocketAddr::from((Ipv4Addr::LOCALHOST, (self.qp.qpn() >> 8) as u16));
        // Wakes the background thread, which sees that a thread polls, and stands back.
        UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"nonsense", own).unwrap();
        for _ in 0..2000 {
            self.nic.poll_cq(&self.cq, 64, |_| ());
        }
        (0..2).for_each(|_| self.send(to, b""));
        self.send(to, MARK);
        self.waiting() > 0
    }

    /// The datagram with the mark waits for more.
    fn hold(&self, peer: &UdpSocket) {
        let end = Instant::now() + LIMIT;
        while !self.try_to_hold(peer.local_addr().unwrap().port()) {
            assert!(Instant::now() < end, "no datagram waits for more, although a thread polls");
            arrives(peer);
        }
    }
}

/// The peer gets all three, the one with the mark at last.
fn arrives(peer: &UdpSocket) {
    peer.set_read_timeout(Some(LIMIT)).unwrap();
    let mut buffer = [0; 4096];
    for marked in [false, false, true] {
        let mut len = 0;
        // What is about memory is of another kind.
        while len == 0 || buffer[4] & 0xF != 0 {
            len = peer.recv(&mut buffer).expect("a datagram that waited for more is lost");
        }
        assert_eq!(buffer[..len].windows(MARK.len()).any(|part| part == MARK), marked);
    }
}

fn peer() -> UdpSocket {
    UdpSocket::bind("127.0.0.1:0").unwrap()
}

#[test]
fn a_program_that_never_calls_again() {
    let (end, peer) = (End::new(), peer());
    end.hold(&peer);
    arrives(&peer);
}

/// What waits is no reason to refuse a post of a program that asks for no completion and polls nothing.
#[test]
fn a_send_queue_that_is_shorter_than_what_may_wait() {
    let (end, peer) = (End::with(20), peer());
    end.hold(&peer);
    arrives(&peer);
    let (to, mut completed) = (peer.local_addr().unwrap().port(), 0);
    let limit = Instant::now() + LIMIT;
    while completed < 3 {
        assert!(Instant::now() < limit, "{completed} of 3 completed");
        end.nic.poll_cq(&end.cq, 64, |_| completed += 1);
    }
    // One that is refused panics here.
    (0..1000).for_each(|_| end.send_with(to, b"", SendFlags::empty()));
}

#[test]
fn an_empty_poll() {
    let (end, peer) = (End::new(), peer());
    end.hold(&peer);
    let (mut completed, limit) = (0, Instant::now() + LIMIT);
    while completed < 3 {
        assert!(Instant::now() < limit, "{completed} of 3 completed");
        end.nic.poll_cq(&end.cq, 64, |wc| completed += usize::from(wc.status == WcStatus::Success));
    }
    assert_eq!(end.waiting(), 0);
    arrives(&peer);
}

#[test]
fn a_program_that_will_wait_for_an_event() {
    let (end, peer) = (End::new(), peer());
    let mut sent = 0;
    for _ in 0..9 {
        end.hold(&peer);
        end.cq.arm(false);
        end.channel.armed(&Arc::downgrade(&end.cq));
        // The background thread may just be about to send it, and have it still.
        sent += i32::from(end.waiting() == 0);
        arrives(&peer);
    }
    assert!(sent >= 5, "the program sleeps while a datagram waits");
    // Until the next empty poll, nothing waits.
    let to = peer.local_addr().unwrap().port();
    (0..8).for_each(|_| end.send(to, b"at once"));
    assert_eq!(end.waiting(), 0);
}

/// It polls only when it knows of completions, as ib_send_bw does. Each of its datagrams was a call to the
/// system.
#[test]
fn c21_a_program_that_never_polls_in_vain() {
    let (end, peer) = (End::new(), peer());
    let to = peer.local_addr().unwrap().port();
    let held = (0..200).any(|_| {
        end.cq.arm(false);
        end.channel.armed(&Arc::downgrade(&end.cq));
        end.send(to, b"");
        assert_eq!(end.waiting(), 0, "the first goes out at once");
        assert_eq!(end.nic.poll_cq(&end.cq, 1, |_| ()), 1);
        (0..2).for_each(|_| end.send(to, b""));
        let held = end.waiting() > 0;
        let (mut completed, limit) = (1, Instant::now() + LIMIT);
        while completed < 3 {
            assert!(Instant::now() < limit);
            completed += end.nic.poll_cq(&end.cq, 64, |_| ());
        }
        held
    });
    assert!(held, "no datagram waits for more");
}

#[test]
fn a_thread_that_blocks_on_a_channel() {
    let (end, peer) = (End::new(), peer());
    end.hold(&peer);
    let nothing = end.channel.get_within(Some(Duration::from_millis(1)));
    assert!(nothing.is_err());
    assert_eq!(end.waiting(), 0);
    arrives(&peer);
}

#[test]
fn the_end_of_a_queue_pair() {
    let peer = peer();
    let end = End::new();
    end.hold(&peer);
    end.qp.destroy();
    arrives(&peer);
    drop(end);

    let end = End::new();
    end.hold(&peer);
    end.qp.modify(&QpModify { state: Some(QpState::Reset), ..QpModify::default() }).unwrap();
    arrives(&peer);
}

#[test]
fn many_do_not_wait() {
    let (end, peer) = (End::new(), peer());
    end.hold(&peer);
    let to = peer.local_addr().unwrap().port();
    for _ in 0..100 {
        end.send(to, b"");
        assert!(end.waiting() < 44);
    }
    arrives(&peer);
}

/// The program has gathered them itself.
#[test]
fn a_list_does_not_wait() {
    let (end, peer) = (End::new(), peer());
    end.hold(&peer);
    let ah = Ah::new(&end.pd, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), None);
    let wr = SendWr { wr_id: 7, op: SendOp::Send { invalidate: None }, flags: SendFlags::empty(), sges: &[] };
    let qpn = u32::from(peer.local_addr().unwrap().port()) << 8;
    let wr = UdSendWr { wr, ah: &ah, remote_qpn: qpn, remote_qkey: QKEY, job_key: None };
    end.qp.post_send(std::iter::repeat_n(wr, 16)).unwrap();
    assert_eq!(end.waiting(), 0);
    arrives(&peer);
}

/// Another process, which exits while a datagram waits. Its status is the number of times it tried.
#[test]
fn child() {
    let Ok(port) = std::env::var(PORT) else { return };
    let (end, port) = (End::new(), port.parse().unwrap());
    let tries = (1..200).find(|_| end.try_to_hold(port));
    std::process::exit(tries.unwrap_or(0));
}

/// Ends however the test ends.
struct Process(Child);
impl Drop for Process {
    fn drop(&mut self) {
        // Gone already where all is well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_end_of_the_process() {
    let peer = peer();
    peer.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    let port = peer.local_addr().unwrap().port().to_string();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(PORT, port).stdout(Stdio::null());
    let mut child = Process(command.spawn().unwrap());
    let end = Instant::now() + 2 * LIMIT;
    let (mut marked, mut tries, mut buffer) = (0, None, [0; 4096]);
    while tries != Some(marked) {
        assert!(Instant::now() < end, "{marked} of {tries:?} came");
        if let Ok(len) = peer.recv(&mut buffer) {
            marked += i32::from(buffer[..len].windows(MARK.len()).any(|part| part == MARK));
        } else {
            tries = child.0.try_wait().unwrap().map(|status| status.code().unwrap());
            assert_ne!(tries, Some(0), "no datagram waits for more, although a thread polls");
        }
    }
}
