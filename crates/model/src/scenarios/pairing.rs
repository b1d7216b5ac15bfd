//! Bring-up by number: the real pairings, early requests and listeners' doors, over a reduced queue pair.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use uwarp_proto::setup::{ResponderPolicy, Revision};
use uwarp_rnic::qp::QpState;

use crate::background;
use crate::bringup::{Nic, Qp, open_connections};
use crate::pairing::{Pairings, Path};
use crate::sys::{self, Thread, start};
use crate::timeouts::Timeouts;

/// An early request that nobody found goes after half a minute; what works takes a few of the connector's
/// pauses.
const SOON: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(60);

/// One process with two queue pairs that are to be joined; `low` listens. A third one, whose peer never
/// comes, has the port of `low` take connections from the start.
struct Process {
    pairings: Arc<Pairings>,
    low: Arc<Qp>,
    high: Arc<Qp>,
    alone: Arc<Qp>,
}

impl Process {
    fn new() -> Arc<Self> {
        let engine = background::start().unwrap();
        let nic = Nic::new(&engine);
        let policy = ResponderPolicy {
            max_revision: Revision::Two,
            crc: true,
            markers: false,
            know_peers: true,
            max_ird: 4,
        };
        let pairings = Pairings::new(&nic, Timeouts, policy);
        let [low, alone, high] = [0x10_0001, 0x10_0002, 0x20_0002].map(|qpn| Qp::new(&nic, qpn));
        let process = Self { pairings, low, high, alone };
        process.join(&process.alone, 0x30_0000);
        Arc::new(process)
    }

    /// As `bringup::modify` does it.
    fn rtr(&self, qp: &Arc<Qp>) {
        let peer = if qp.qpn() == self.low.qpn() { &self.high } else { &self.low };
        self.join(qp, peer.qpn());
    }

    fn join(&self, qp: &Arc<Qp>, peer: u32) {
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        qp.modify(QpState::Rtr);
        self.pairings.begin(qp, Path { local: here, peer: here }, peer).unwrap();
    }

    /// As `bringup::modify` does it; then to INIT.
    fn reset(&self, qp: &Arc<Qp>) {
        self.pairings.end(qp.qpn());
        qp.modify(QpState::Reset);
        qp.modify(QpState::Init);
    }

    /// As `ibv_destroy_qp` does it.
    fn destroy(&self, qp: &Arc<Qp>) {
        qp.destroy();
        self.pairings.forget(qp.qpn());
    }

    /// A thread for each end.
    fn each(self: &Arc<Self>, run: fn(&Self, &Arc<Qp>)) -> [Thread; 2] {
        [self.low.clone(), self.high.clone()].map(|qp| {
            let process = self.clone();
            start(move || run(&process, &qp))
        })
    }

    fn are_joined_soon(&self) {
        let begin = sys::now();
        while !self.low.is_joined(&self.high) {
            let waited = sys::now().saturating_duration_since(begin);
            assert!(waited < SOON, "two ends wait for each other");
            sys::sleep(Duration::from_millis(10));
        }
    }
}

fn at_any_moment() {
    sys::sleep(Duration::from_micros(thread_rng().gen_range(0..1500)));
}

/// Both ends are moved to RTR at once: each order of request, look-up and move makes a stream, without a
/// request that lies there while its queue pair waits.
pub fn two_ends_that_begin_at_once_are_joined() {
    let process = Process::new();
    let threads = process.each(|process, qp| {
        if thread_rng().gen_bool(0.5) {
            at_any_moment();
        }
        process.rtr(qp);
    });
    threads.into_iter().for_each(Thread::join);
    process.are_joined_soon();
    assert_eq!(open_connections(), 2);
}

/// Both ends are moved to RESET and begin anew while their first stream is being made, or is there.
/// Nothing of the first attempt, which may be anywhere, keeps the second from its stream.
pub fn ends_that_begin_anew_at_any_moment_are_joined_at_last() {
    let process = Process::new();
    let threads = process.each(|process, qp| {
        process.rtr(qp);
        at_any_moment();
        process.reset(qp);
    });
    threads.into_iter().for_each(Thread::join);
    let threads = process.each(|process, qp| process.rtr(qp));
    threads.into_iter().for_each(Thread::join);
    process.are_joined_soon();
}

/// One end is destroyed at any moment, or was never moved to RTR; then the other one, too. No connection
/// is left, early requests and the connector's attempts included.
pub fn an_end_that_never_comes_or_goes_leaves_nothing_behind() {
    let process = Process::new();
    let threads = process.each(|process, qp| {
        if thread_rng().gen_bool(0.7) {
            process.rtr(qp);
        }
        at_any_moment();
        process.destroy(qp);
    });
    threads.into_iter().for_each(Thread::join);
    let begin = sys::now();
    while open_connections() > 0 {
        let waited = sys::now().saturating_duration_since(begin);
        assert!(waited < LONGEST, "{} ends of connections are left", open_connections());
        sys::sleep(Duration::from_secs(1));
    }
}
