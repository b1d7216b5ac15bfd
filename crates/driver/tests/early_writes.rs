//! A thread whose Writes complete early and are always answered. Alone in its process, so that no other test
//! makes its progress.

#![allow(missing_docs)]

mod common;

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::Instant;

use common::*;
use uwarp_driver::{Nic, Readiness, Source};
use uwarp_rnic::cq::{Coverage, Feeder};
use uwarp_rnic::{Cq, Wc, WcOpcode, WcStatus};

/// The perfect peer: the answer is there whenever it is asked for.
struct Answers;
impl Feeder for Answers {
    fn make_progress(&self, _: bool) -> Coverage {
        Coverage::Complete
    }
    fn receive_messages(&self) -> bool {
        true
    }
}

/// Whether the thread of the ping-pong has served a timer and a socket. On a busy machine the background
/// thread does so now and then in its place, when it is kept from polling for a moment.
struct Other {
    ping_pong: ThreadId,
    timer: AtomicBool,
    socket: AtomicBool,
}
impl Source for Other {
    fn ready(&self, _: Readiness) {
        self.socket.fetch_or(std::thread::current().id() == self.ping_pong, Ordering::SeqCst);
    }
    fn timeout(&self) {
        self.timer.fetch_or(std::thread::current().id() == self.ping_pong, Ordering::SeqCst);
    }
}

#[test]
fn a_ping_pong_of_early_writes_does_not_starve_other_sockets_and_timers() {
    let nic = Nic::open().unwrap();
    let feeder: Arc<dyn Feeder> = Arc::new(Answers);
    let cq = Cq::new(16, 0, None, Arc::new(Events::default()));
    cq.note_early_completions();
    cq.add_feeder(1, Arc::downgrade(&feeder));
    let other = Arc::new(Other {
        ping_pong: std::thread::current().id(),
        timer: AtomicBool::new(false),
        socket: AtomicBool::new(false),
    });
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let token = nic.engine().register(ours.as_raw_fd(), other.clone()).unwrap();
    let end = Instant::now() + LIMIT / 3;
    while !(other.timer.load(Ordering::SeqCst) && other.socket.load(Ordering::SeqCst)) {
        assert!(Instant::now() < end, "served: timer {:?}, socket {:?}", other.timer, other.socket);
        theirs.send(b"news").unwrap();
        nic.engine().set_timer(token, Some(Instant::now()));
        for _ in 0..10_000 {
            cq.push(Wc::new(1, WcStatus::Success, WcOpcode::RdmaWrite, 1), false);
            assert_eq!(nic.poll_cq(&cq, 1, drop), 1);
        }
        assert_eq!(ours.recv(&mut [0; 8]).unwrap(), 4);
    }
    nic.engine().deregister(token);
}
