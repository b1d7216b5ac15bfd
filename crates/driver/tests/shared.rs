//! Queue pairs that share a receive queue.

#![allow(missing_docs, unsafe_code)]

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::{CAPS, End, Events, LIMIT, Watch, address, all_rights, attach, sockets, to, uwarp};
use parking_lot::Mutex;
use uwarp_driver::{Disconnect, Nic, Qp, Rtr, Srq, StreamParams};
use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::{QpInit, QpState};
use uwarp_rnic::{
    AsyncEvent, AsyncSink, Cq, EventKind, Mr, Pd, RecvWr, SendOp, Sge, SrqInit, VerbsError, Wc, WcStatus,
};

const SEND: SendOp = SendOp::Send { invalidate: None };
/// Bytes of each receive.
const SLOT: u64 = 128 * 1024;

#[derive(Default)]
struct Kinds(Mutex<Vec<EventKind>>);
impl AsyncSink for Kinds {
    fn async_event(&self, event: AsyncEvent) {
        self.0.lock().push(event.kind);
    }
}

/// Queue pairs on one shared receive queue, and for each a peer that sends.
struct Hub {
    nic: Arc<Nic>,
    srq: Arc<Srq>,
    cq: Arc<Cq>,
    qps: Vec<Arc<Qp>>,
    events: Arc<Kinds>,
    peers: Vec<End>,
    mr: Arc<Mr>,
    // Last: freed after everything that may use it.
    memory: Box<[u8]>,
}

impl Hub {
    fn new(peers: usize, slots: u64, params: StreamParams) -> Self {
        let nic = Nic::open().unwrap();
        let pd = Pd::new();
        let events = Arc::new(Kinds::default());
        let cq = Cq::new(4096, 7, None, events.clone());
        let init =
            SrqInit { pd: pd.clone(), max_wr: 1024, max_sge: 2, cookie: 2, async_sink: events.clone() };
        let srq = Arc::new(Srq::create(&nic, init).unwrap());
        let mut memory = vec![0u8; usize::try_from(slots * SLOT).unwrap()].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, all_rights()).unwrap();
        let mut hub = Self { nic, srq, cq, qps: vec![], events, peers: vec![], mr, memory };
        for _ in 0..peers {
            // The queue pairs are in domains of their own: that of the queue counts.
            let init = QpInit {
                pd: Pd::new(),
                send_cq: hub.cq.clone(),
                recv_cq: hub.cq.clone(),
                srq: Some(hub.srq.core().clone()),
                caps: CAPS,
                sq_sig_all: false,
                cookie: 1,
                async_sink: hub.events.clone(),
            };
            let qp = Qp::create(&hub.nic, init).unwrap();
            qp.modify(&to(QpState::Init)).unwrap();
            let peer = End::new(1 << 20);
            let (a, b) = sockets();
            attach(&peer, a, StreamParams { rtr: Rtr::SendWrite, ..params });
            b.set_nonblocking(true).unwrap();
            let params =
                StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..params };
            qp.attach(b.into(), params, Arc::new(Watch::default())).unwrap();
            hub.qps.push(qp);
            hub.peers.push(peer);
        }
        hub
    }

    fn post(&self, slots: std::ops::Range<u64>) {
        let lists: Vec<(u64, [Sge; 2])> = slots.map(|slot| (slot, self.slot(slot))).collect();
        self.srq.post_recv(lists.iter().map(|(wr_id, sges)| RecvWr { wr_id: *wr_id, sges })).unwrap();
    }

    fn slot(&self, slot: u64) -> [Sge; 2] {
        let start = self.mr.range().0 + slot * SLOT;
        let sge = |addr, length| Sge { addr, length, lkey: self.mr.stag() };
        [sge(start, 1000), sge(start + 1000, u32::try_from(SLOT - 1000).unwrap())]
    }

    fn poll_one(&self) -> Option<Wc> {
        let mut got = None;
        self.nic.poll_cq(&self.cq, 1, |wc| got = Some(wc));
        got
    }

    fn poll(&self) -> Wc {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(wc) = self.poll_one() {
                return wc;
            }
            assert!(Instant::now() < end, "no completion");
        }
    }

    /// Polls until all peers' first Sends have been found to have no receive.
    fn settle(&self) {
        let (end, mut polls) = (Instant::now() + std::time::Duration::from_millis(30), 0);
        // Not the time alone, of which others may have most.
        while Instant::now() < end || polls < 10_000 {
            assert!(self.poll_one().is_none());
            polls += 1;
        }
    }

    /// Which peer a completion is of, and the message's number.
    fn whose(&self, wc: &Wc) -> (usize, u32) {
        assert_eq!(wc.status, WcStatus::Success);
        let peer = self.qps.iter().position(|qp| qp.qpn() == wc.qp_num).unwrap();
        let start = usize::try_from(wc.wr_id * SLOT).unwrap();
        let found = &self.memory[start..start + wc.byte_len as usize];
        let number = u32::from_le_bytes(found[..4].try_into().unwrap());
        assert!(found == message(peer, number, found.len()), "message {number} of peer {peer}");
        (peer, number)
    }

    fn fill(&mut self, peer: usize, number: u32, at: usize, len: usize) {
        self.peers[peer].memory[at..at + len].copy_from_slice(&message(peer, number, len));
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.qps.iter().for_each(|qp| qp.destroy());
        self.mr.deregister();
    }
}

fn message(peer: usize, number: u32, len: usize) -> Vec<u8> {
    let mut out = number.to_le_bytes().to_vec();
    out.extend((4..len).map(|n| (n as u8) ^ (number as u8).wrapping_mul(31) ^ (peer as u8).wrapping_mul(97)));
    out
}

/// Each refill of as many receives as there are waiting gives each one; who is served stands at the end of
/// the line again.
fn woken_in_turn(params: StreamParams, size: usize, post: impl Fn(&Hub, std::ops::Range<u64>)) {
    const PEERS: usize = 5;
    const ROUNDS: u32 = 8;
    let mut hub = Hub::new(PEERS, PEERS as u64 * u64::from(ROUNDS), params);
    for peer in 0..PEERS {
        for number in 0..ROUNDS {
            let at = number as usize * size;
            hub.fill(peer, number, at, size);
            let sge = hub.peers[peer].sge(at as u64, u32::try_from(size).unwrap());
            hub.peers[peer].send(SEND, &[sge]);
        }
    }
    hub.settle();
    // Fewer at a time than queue pairs wait: the line continues where it stopped.
    let mut order = Vec::new();
    let mut next = 0;
    for batch in [2u64, 1, 3].into_iter().cycle() {
        let end = (next + batch).min(PEERS as u64 * u64::from(ROUNDS));
        if next == end {
            break;
        }
        post(&hub, next..end);
        for _ in next..end {
            order.push(hub.whose(&hub.poll()));
        }
        next = end;
        assert!(hub.poll_one().is_none(), "more completions than receives");
    }
    let mut numbers = [0; PEERS];
    for (at, (peer, number)) in order.iter().enumerate() {
        assert_eq!(*number, numbers[*peer], "the messages of peer {peer} are out of order");
        numbers[*peer] += 1;
        // Whoever waits gets one before anybody gets two. With large messages, whoever has not got all of its
        // next one does not wait yet.
        let in_turn = numbers.iter().all(|n| *n + 1 >= numbers[*peer]);
        assert!(in_turn || size > 5000, "{peer} again after {:?}", &order[..at]);
    }
    assert_eq!(*hub.events.0.lock(), []);
}

#[test]
fn those_that_wait_are_woken_in_turn() {
    woken_in_turn(uwarp(), 1500, Hub::post);
    woken_in_turn(uwarp(), 100_000, Hub::post);
    woken_in_turn(StreamParams::default(), 20_000, Hub::post);
    woken_in_turn(StreamParams { framing: Framing::PLAIN, ..uwarp() }, 70_000, Hub::post);
}

#[test]
fn another_thread_may_refill() {
    woken_in_turn(uwarp(), 1500, |hub, slots| {
        std::thread::scope(|s| {
            s.spawn(|| hub.post(slots));
        });
    });
}

/// Many Sends, a thread that polls in earnest, and another that refills, one at a time and in bursts.
#[test]
fn nothing_is_lost_or_late_under_load() {
    const PEERS: usize = 4;
    const EACH: u32 = 400;
    const SLOTS: u64 = 32;
    for size in [64usize, 30_000] {
        let mut hub = Hub::new(PEERS, SLOTS, uwarp());
        let (give_back, take_back) = std::sync::mpsc::channel::<u64>();
        let peers = std::mem::take(&mut hub.peers);
        std::thread::scope(|s| {
            let hub = &hub;
            s.spawn(move || {
                hub.post(0..SLOTS / 2);
                hub.post(SLOTS / 2..SLOTS);
                for (n, slot) in take_back.iter().enumerate() {
                    if n % 100 == 99 {
                        // Long enough for all to run dry.
                        std::thread::sleep(std::time::Duration::from_millis(3));
                    }
                    hub.post(slot..slot + 1);
                }
            });
            s.spawn(move || {
                let mut peers = peers;
                let end = Instant::now() + LIMIT;
                for number in 0..EACH {
                    for (n, peer) in peers.iter_mut().enumerate() {
                        let at = number as usize % 8 * size;
                        // In the iwarp view a Send completes when TCP has taken it; eight are out at most.
                        if number >= 8 {
                            assert_eq!(peer.poll().status, WcStatus::Success);
                        }
                        peer.memory[at..at + size].copy_from_slice(&message(n, number, size));
                        peer.send(SEND, &[peer.sge(at as u64, u32::try_from(size).unwrap())]);
                        assert!(Instant::now() < end, "the peers do not get on");
                    }
                }
                for peer in &peers {
                    for _ in 0..8 {
                        assert_eq!(peer.poll().status, WcStatus::Success);
                    }
                }
                // Not destroyed before all has arrived: what was posted goes out, but an end with work in the
                // sockets does not.
                peers.iter().for_each(|peer| peer.qp.disconnect());
                peers.iter().for_each(|peer| {
                    peer.watch.wait_end();
                });
            });
            let mut next = [0; PEERS];
            for _ in 0..PEERS as u32 * EACH {
                let wc = hub.poll();
                let (peer, number) = hub.whose(&wc);
                assert_eq!(number, next[peer]);
                next[peer] += 1;
                give_back.send(wc.wr_id).unwrap();
            }
            drop(give_back);
        });
    }
}

/// Programs that measure post the same memory many times. Queue pairs then receive into it side by side; one
/// read the other's bytes back for its CRC and ended its connection.
#[test]
fn receives_that_overlap_cost_no_connection() {
    const PEERS: usize = 4;
    const EACH: u32 = 300;
    const SIZE: u32 = 100_000;
    let mut hub = Hub::new(PEERS, 1, uwarp());
    let mut peers = std::mem::take(&mut hub.peers);
    for (n, peer) in peers.iter_mut().enumerate() {
        peer.memory.fill(u8::try_from(n).unwrap());
    }
    let refill = |n| (0..n).for_each(|_| hub.post(0..1));
    refill(64);
    std::thread::scope(|s| {
        s.spawn(|| {
            for number in 0..EACH {
                for peer in &peers {
                    if number >= 8 {
                        assert_eq!(peer.poll().status, WcStatus::Success);
                    }
                    peer.send(SEND, &[peer.sge(0, SIZE)]);
                }
            }
        });
        for _ in 0..PEERS as u32 * EACH {
            assert_eq!(hub.poll().status, WcStatus::Success);
            refill(1);
        }
    });
}

/// What was kept for one that goes is the next one's, at once.
#[test]
fn one_that_goes_holds_up_nobody() {
    let mut hub = Hub::new(3, 8, uwarp());
    for peer in 0..3 {
        hub.fill(peer, 0, 0, 64);
        let sge = hub.peers[peer].sge(0, 64);
        hub.peers[peer].send(SEND, &[sge]);
        // In this order.
        hub.settle();
    }
    hub.qps[0].destroy();
    hub.qps[1].modify(&to(QpState::Err)).unwrap();
    assert_eq!(*hub.events.0.lock(), [EventKind::QpLastWqeReached]);
    hub.post(0..1);
    assert_eq!(hub.whose(&hub.poll()), (2, 0));
    assert!(hub.poll_one().is_none());
}

/// A stall ends at the program's limit, as without sharing.
#[test]
fn a_wait_has_its_limit() {
    let params = StreamParams { rnr_timeout: Some(std::time::Duration::from_millis(20)), ..uwarp() };
    let mut hub = Hub::new(1, 8, params);
    hub.fill(0, 0, 0, 64);
    let sge = hub.peers[0].sge(0, 64);
    hub.peers[0].send(SEND, &[sge]);
    let why = hub.peers[0].watch.wait_end();
    assert!(matches!(why, Disconnect::Terminated(_)), "{why:?}");
    assert_eq!(*hub.events.0.lock(), [EventKind::QpLastWqeReached, EventKind::QpReqErr]);
}

#[test]
fn limits_of_the_device_hold() {
    let nic = Nic::open().unwrap();
    let events = Arc::new(Events::default());
    let make = |max_wr, max_sge| {
        let init = SrqInit { pd: Pd::new(), max_wr, max_sge, cookie: 0, async_sink: events.clone() };
        Srq::create(&nic, init)
    };
    let limits = nic.limits();
    assert!(make(limits.max_srq_wr, limits.max_srq_sge).is_ok());
    for (max_wr, max_sge) in [(0, 1), (limits.max_srq_wr + 1, 1), (1, limits.max_srq_sge + 1)] {
        assert!(matches!(make(max_wr, max_sge), Err(VerbsError::Invalid(_))));
    }
    let srq = make(16, 1).unwrap();
    assert!(srq.modify(Some(limits.max_srq_wr + 1), None).is_err());
    srq.modify(Some(limits.max_srq_wr), None).unwrap();
}
