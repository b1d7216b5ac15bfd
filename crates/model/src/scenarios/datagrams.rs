//! Datagram queue pairs that threads share: the real queue pair, port and engine, over simulated sockets.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use uwarp_rnic::ah::{Ah, QPN_MULTICAST};
use uwarp_rnic::cq::Feeder;
use uwarp_rnic::mr::{Access, Mr};
use uwarp_rnic::qp::{QpCaps, QpInit, QpModify, QpState, UdSendWr};
use uwarp_rnic::wr::{SendFlags, SendOp, SendWr, Sge, WcOpcode, WcStatus};
use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd, RecvWr};

use crate::background;
use crate::config::Config;
use crate::nic::Nic;
use crate::sync::Mutex;
use crate::sys::{self, Thread, start};
use crate::ud::UdQp;

const QKEY: u32 = 0x1111;
/// Receives of each queue pair; the header area is all that is written of them.
const RECEIVES: u32 = 24;
const AREA: u32 = 40;
/// No pause of the engine is nearly as long.
const SOON: Duration = Duration::from_secs(5);
const GROUP: Ipv4Addr = Ipv4Addr::new(224, 0, 1, 7);

struct Ignore;

impl AsyncSink for Ignore {
    fn async_event(&self, _: AsyncEvent) {}
}

/// A queue pair with its queues, and the numbers of the datagrams that came out.
struct End {
    qp: Arc<UdQp>,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    mr: Arc<Mr>,
    memory: Box<[u8]>,
    sent: Mutex<u32, 30>,
    came: Mutex<Vec<u32>, 30>,
}

impl End {
    fn new(nic: &Arc<Nic>) -> Arc<Self> {
        let (pd, cq) = (Pd::new(), Cq::new(128, 0, None, Arc::new(Ignore)));
        let caps = QpCaps {
            max_send_wr: 32,
            max_recv_wr: RECEIVES,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInit {
            pd: pd.clone(),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            caps,
            sq_sig_all: true,
            cookie: 0,
            async_sink: Arc::new(Ignore),
        };
        let qp = UdQp::create(nic, init).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            qp.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
        }
        let memory = vec![0; AREA as usize].into_boxed_slice();
        let addr = memory.as_ptr().expose_provenance() as u64;
        let mr = Mr::register(&pd, addr, AREA.into(), addr, Access::LOCAL_WRITE).unwrap();
        let end = Self { qp, pd, cq, mr, memory, sent: Mutex::default(), came: Mutex::default() };
        let sges = [Sge { addr, length: AREA, lkey: end.mr.stag() }];
        end.qp.post_recv((0..RECEIVES).map(|n| RecvWr { wr_id: n.into(), sges: &sges })).unwrap();
        Arc::new(end)
    }

    /// Sends a datagram with this number.
    fn post(&self, ah: &Ah, qpn: u32, number: u32) {
        let op = SendOp::SendImmediate { imm: number.to_be_bytes() };
        let wr = SendWr { wr_id: u64::from(number), op, flags: SendFlags::SIGNALED, sges: &[] };
        self.qp
            .post_send([UdSendWr { wr, ah, remote_qpn: qpn, remote_qkey: QKEY, job_key: None }].into_iter())
            .unwrap();
    }

    fn send(&self, to: &End, number: u32) {
        let ah = Ah::new(&self.pd, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), None);
        self.post(&ah, to.qp.qpn(), number);
    }

    fn send_to_group(&self, number: u32) {
        let group = SocketAddr::from((GROUP, Config::get().multicast_port));
        self.post(&Ah::group(&self.pd, group, None), QPN_MULTICAST, number);
    }

    /// Takes what completed, without looking at the socket.
    fn take(&self) {
        let (mut sent, mut came) = (0, vec![]);
        self.cq.poll(64, |wc| {
            assert_eq!(wc.status, WcStatus::Success);
            match wc.opcode {
                WcOpcode::Recv => came.push(u32::from_be_bytes(wc.imm_or_inv.to_ne_bytes())),
                _ => sent += 1,
            }
        });
        *self.sent.lock() += sent;
        self.came.lock().extend(came);
    }

    /// Polls some times, as programs do that look for something else in between.
    fn poll_a_while(&self) {
        for _ in 0..thread_rng().gen_range(0..6) {
            let _ = self.qp.make_progress(thread_rng().gen_bool(0.5));
            self.take();
        }
    }

    fn numbers(&self) -> Vec<u32> {
        self.take();
        let mut came = self.came.lock().clone();
        came.sort_unstable();
        came
    }

    fn wait(&self, until: impl Fn(&[u32]) -> bool) {
        let begin = sys::now();
        while !until(&self.numbers()) {
            let waited = sys::now().saturating_duration_since(begin);
            assert!(waited < SOON, "datagrams are lost; only {:?} came", self.numbers());
            sys::sleep(Duration::from_millis(10));
        }
    }

    /// Nobody polls any more, and these come soon, each once.
    fn get(&self, wanted: Range<u32>) {
        self.wait(|came| came.len() >= wanted.len());
        assert_eq!(self.numbers(), wanted.collect::<Vec<_>>());
    }

    /// This one comes soon, whatever else comes.
    fn get_at_last(&self, number: u32) {
        self.wait(|came| came.contains(&number));
    }
}

/// The device of a sender, and a sender and a receiver, each with a port of its own.
fn two() -> (Arc<Nic>, [Arc<End>; 2]) {
    let engine = background::start().unwrap();
    let [nic, other] = [0x1000, 0x2000].map(|port| Nic::new(&engine, port));
    let ends = [End::new(&nic), End::new(&other)];
    (nic, ends)
}

fn at_any_moment() {
    sys::sleep(Duration::from_micros(thread_rng().gen_range(0..600)));
}

/// Threads that post on one queue pair, and threads that poll its peer's, which stop at any moment: every
/// datagram comes out once, also without them.
pub fn datagrams_of_shared_queue_pairs_come_out_once() {
    let (_, [one, other]) = two();
    let post = |from: u32| {
        let (one, other) = (one.clone(), other.clone());
        start(move || (from..from + 4).for_each(|number| one.send(&other, number)))
    };
    let poll = |end: &Arc<End>| {
        let end = end.clone();
        start(move || {
            at_any_moment();
            end.poll_a_while();
        })
    };
    let threads = [post(0), post(4), poll(&other), poll(&other), poll(&one)];
    threads.into_iter().for_each(Thread::join);
    other.get(0..8);
    one.take();
    assert_eq!(*one.sent.lock(), 8);
}

/// The system has no room for datagrams, and a thread polls on and on, so that it has taken the socket from
/// the engine: when there is room, what waits is sent all the same.
pub fn room_is_noticed_beside_a_thread_that_polls() {
    // A poller that is held up has stopped polling, as far as the engine knows, and gets its socket watched.
    sys::steady();
    let (nic, [one, other]) = two();
    nic.socket.set_room(1);
    let poller = {
        let one = one.clone();
        start(move || {
            at_any_moment();
            let begin = sys::now();
            while *one.sent.lock() < 6 {
                let waited = sys::now().saturating_duration_since(begin);
                assert!(waited < Duration::from_millis(20), "the room is not noticed");
                let _ = one.qp.make_progress(true);
                one.take();
                sys::sleep(Duration::from_micros(5));
            }
        })
    };
    let room = start(move || {
        at_any_moment();
        nic.socket.set_room(2);
        at_any_moment();
        nic.socket.set_room(usize::MAX);
    });
    at_any_moment();
    (0..6).for_each(|number| one.send(&other, number));
    [poller, room].into_iter().for_each(Thread::join);
    other.get(0..6);
}

/// A thread polls, posts while the background thread stands back or stops doing so, and never calls again:
/// what it has posted goes out.
pub fn datagrams_that_wait_for_more_go_out() {
    let (nic, [one, other]) = two();
    let engine = nic.engine();
    // Wakes the background thread.
    other.send(&one, 0);
    for number in 0..6 {
        for _ in 0..thread_rng().gen_range(0..8) {
            // As an empty poll does.
            engine.held.polled_in_vain();
            engine.note_earnest(true);
            let _ = one.qp.make_progress(true);
            sys::sleep(Duration::from_micros(thread_rng().gen_range(0..100)));
        }
        one.send(&other, number);
    }
    other.get(0..6);
}

/// A queue pair is destroyed while datagrams for it come in. Afterwards nothing completes. The next one of
/// its number, on the same socket, gets what is sent to it, and an other one of the port loses nothing.
pub fn nothing_completes_after_destruction() {
    let engine = background::start().unwrap();
    let sender = End::new(&Nic::new(&engine, 0x1000));
    let nic = Nic::new(&engine, 0x2000);
    let dying = End::new(&nic);
    let stays = thread_rng().gen_bool(0.5).then(|| End::new(&nic));
    let threads = {
        let (sender, dying, stays) = (sender.clone(), dying.clone(), stays.clone());
        let poller = dying.clone();
        [
            start(move || {
                for number in 0..5 {
                    sender.send(&dying, number);
                    if let Some(stays) = &stays {
                        sender.send(stays, 100 + number);
                    }
                }
            }),
            start(move || poller.poll_a_while()),
        ]
    };
    at_any_moment();
    dying.qp.destroy();
    // What a thread has taken from the queue before counts; what lies in it is gone.
    let completed = dying.cq.poll(64, |_| ());
    assert_eq!(completed, 0, "completions of a queue pair that is destroyed");
    threads.into_iter().for_each(Thread::join);
    assert_eq!(dying.cq.poll(64, |_| ()), 0, "completions after its destruction");
    if let Some(stays) = &stays {
        stays.get(100..105);
    }
    drop(dying);
    // It has the same number, unless a thread is just leaving the old one.
    let next = End::new(&nic);
    sender.send(&next, 200);
    // One that lay in the socket when its number had a new owner may come, too.
    next.get_at_last(200);
    assert!(next.numbers().iter().all(|number| *number < 5 || *number == 200), "{:?}", next.numbers());
}

/// Queue pairs join and leave a group while datagrams are sent to it. A member gets each once; who was none
/// when it was sent gets none of them.
pub fn members_of_groups_come_and_go() {
    let engine = background::start().unwrap();
    let sender = End::new(&Nic::new(&engine, 0x1000));
    let nic = Nic::new(&engine, 0x2000);
    let [member, guest] = [End::new(&nic), End::new(&nic)];
    let group = IpAddr::from(GROUP);
    member.qp.attach(group, 1).unwrap();
    let threads = {
        let (sender, poller, guest) = (sender.clone(), member.clone(), guest.clone());
        [
            start(move || (0..5).for_each(|number| sender.send_to_group(number))),
            start(move || {
                at_any_moment();
                poller.poll_a_while();
            }),
            start(move || {
                at_any_moment();
                guest.qp.attach(group, 1).unwrap();
                guest.poll_a_while();
                guest.qp.detach(group).unwrap();
                // A thread may be delivering one that came before; this one comes afterwards.
                guest.send_to_group(5);
            }),
        ]
    };
    threads.into_iter().for_each(Thread::join);
    member.get(0..6);
    // The last member leaves, and the other one comes again.
    member.qp.detach(group).unwrap();
    sender.send_to_group(6);
    guest.qp.attach(group, 1).unwrap();
    sender.send_to_group(7);
    guest.get_at_last(7);
    let (guests, mut once) = (guest.numbers(), guest.numbers());
    once.dedup();
    assert!(guests == once && !guests.contains(&5) && !guests.contains(&6), "the guest got {guests:?}");
    member.get(0..6);
}
