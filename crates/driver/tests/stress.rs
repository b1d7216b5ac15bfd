//! Many queue pairs, many threads, everything at random, in one process over loopback. Every byte is checked,
//! and every work request completes exactly once.
//!
//! `make tsan` runs it under the thread sanitizer, without a rebuilt standard library (whose own locks and
//! reference counts it then does not understand: `tests/tsan.supp`).
//!
//! `UWARP_STRESS_SEED` repeats a run as far as threads allow; `UWARP_STRESS_SECONDS` makes it longer.

#![allow(missing_docs)]

mod common;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::*;
use parking_lot::{Mutex, RwLock};
use uwarp_driver::{Channel, Nic, Qp, Rtr, StreamParams};
use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::{QpCaps, QpInit, QpState};
use uwarp_rnic::{Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, VerbsError, Wc, WcOpcode, WcStatus};

/// SplitMix64.
struct Random(u64);
impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

fn seed() -> u64 {
    let given = std::env::var("UWARP_STRESS_SEED").ok().and_then(|s| s.parse().ok());
    let seed = given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64 & 0xFFFF_FFFF
    });
    println!("UWARP_STRESS_SEED={seed}");
    seed
}

fn duration(default: Duration) -> Duration {
    let given = std::env::var("UWARP_STRESS_SECONDS").ok().and_then(|s| s.parse().ok());
    given.map_or(default, Duration::from_secs)
}

// A side's memory: what it sends, where receives go, where its peer writes, where reads of that land.
const SOURCE: u64 = 512 << 10;
const LARGEST: u64 = 200 << 10;
const RECV_SLOTS: u64 = 12;
const WRITE_SLOTS: u64 = 8;
const RECV_AREA: u64 = SOURCE;
const WRITE_AREA: u64 = RECV_AREA + RECV_SLOTS * LARGEST;
const READ_AREA: u64 = WRITE_AREA + WRITE_SLOTS * LARGEST;
const SIZE: u64 = READ_AREA + WRITE_SLOTS * LARGEST;

/// Byte `i` of what side `serial` sends from.
fn pattern(serial: u64, i: u64) -> u8 {
    ((i.wrapping_add(serial * 7919)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Where message number `n` of side `serial` lies in its source.
fn message(serial: u64, n: u64) -> (u64, u64) {
    let mut random = Random(serial << 32 ^ n);
    let len = match random.below(20) {
        0 => 0,
        1..=14 => random.below(300),
        15..=18 => random.below(20_000),
        _ => random.below(LARGEST),
    };
    (random.below(SOURCE - len), len)
}

#[derive(Debug, Clone, Copy)]
enum Work {
    Send,
    Write,
    /// Reads write slot `slot` of the peer, which should hold message `n` of ours.
    Read {
        slot: u64,
        n: u64,
    },
}

/// A completion queue with its channel, and who is on it.
struct Group {
    nic: Arc<Nic>,
    cq: Arc<Cq>,
    channel: Arc<Channel>,
    events: Arc<Events>,
    sides: RwLock<HashMap<u64, Arc<Side>>>,
    /// Completions in the order in which they came, in whichever thread.
    taken: Mutex<VecDeque<Wc>>,
    /// Held by the one who judges them.
    judge: Mutex<()>,
    /// Taken for reading while completions are taken and judged; for writing where none may be under way.
    judging: RwLock<()>,
    stop: AtomicBool,
    judged: AtomicU64,
}

const STOP: u64 = 99;

impl Group {
    fn new(nic: &Arc<Nic>, cookie: u64) -> Arc<Self> {
        let channel = Channel::new(nic.engine()).unwrap();
        let events = Arc::new(Events::default());
        let cq = evented(100_000, cookie, &channel, &events);
        Arc::new(Self {
            nic: nic.clone(),
            cq,
            channel,
            events,
            sides: RwLock::default(),
            taken: Mutex::default(),
            judge: Mutex::default(),
            judging: RwLock::default(),
            stop: AtomicBool::new(false),
            judged: AtomicU64::new(0),
        })
    }

    fn poll(&self) -> usize {
        let _judging = self.judging.read();
        let taken = self.nic.poll_cq(&self.cq, 16, |wc| self.taken.lock().push_back(wc));
        self.judge_taken();
        taken
    }

    fn judge_taken(&self) {
        let _judge = self.judge.lock();
        loop {
            let wc = self.taken.lock().pop_front();
            match wc {
                Some(wc) => self.judge(&wc),
                None => return,
            }
        }
    }

    /// Completions in the queue are judged, and none comes meanwhile to the eyes of anybody else.
    fn alone(&self, then: impl FnOnce()) {
        let _judging = self.judging.write();
        then();
        while self.cq.poll(64, |wc| self.taken.lock().push_back(wc)) > 0 {}
        self.judge_taken();
    }

    fn judge(&self, wc: &Wc) {
        self.judged.fetch_add(1, Ordering::Relaxed);
        let side = self.sides.read().get(&(wc.wr_id >> 32)).cloned();
        side.unwrap_or_else(|| panic!("{wc:?} of a queue pair that is gone")).judge(wc);
    }

    /// A thread that takes completions in all the ways there are.
    fn run(&self, seed: u64) {
        let mut random = Random(seed);
        while !self.stop.load(Ordering::SeqCst) {
            match random.below(4) {
                0 => {
                    let end = Instant::now() + Duration::from_micros(random.below(3000));
                    while Instant::now() < end {
                        self.poll();
                    }
                }
                1 => std::thread::sleep(Duration::from_micros(random.below(3000))),
                2 => {
                    for _ in 0..random.below(20) {
                        self.poll();
                    }
                }
                _ => {
                    if random.one_in(8) {
                        // Outweighed by what follows, for nobody has to send what is solicited.
                        self.cq.arm(true);
                    }
                    self.cq.arm(false);
                    if self.poll() == 0 {
                        let cookie = self.channel.get().unwrap();
                        if cookie == STOP {
                            // For the other threads.
                            self.channel.push(STOP);
                        }
                        self.poll();
                    }
                }
            }
        }
    }

    /// Its threads come to their end although no completion comes.
    fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.channel.push(STOP);
    }
}

/// One end of a connection.
struct Side {
    serial: u64,
    qp: Arc<Qp>,
    group: Arc<Group>,
    watch: Arc<Watch>,
    mr: Arc<Mr>,
    // Written by the device and the peer; looked at where nobody writes.
    addr: u64,
    _memory: Mutex<Box<[u8]>>,
    peer: Mutex<Option<Peer>>,
    book: Mutex<Book>,
    /// Receives are posted under this lock, so that their order is known.
    receives: Mutex<Receives>,
    gone: AtomicBool,
    faults: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Peer {
    serial: u64,
    stag: u32,
    addr: u64,
}

#[derive(Default)]
struct Book {
    next: u64,
    outstanding: HashMap<u64, Work>,
    /// In the order of posting, which is that of completion.
    order: VecDeque<u64>,
    messages: u64,
    free_slots: Vec<u64>,
}

#[derive(Default)]
struct Receives {
    /// Slots of posted receives, oldest first.
    posted: VecDeque<u64>,
    messages: u64,
}

const RECV: u64 = 1 << 31;

impl Side {
    fn new(group: &Arc<Group>, serial: u64) -> Arc<Self> {
        let pd = Pd::new();
        let caps = QpCaps {
            max_send_wr: 24,
            max_recv_wr: RECV_SLOTS as u32,
            max_send_sge: 3,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        let init = QpInit {
            pd: pd.clone(),
            send_cq: group.cq.clone(),
            recv_cq: group.cq.clone(),
            srq: None,
            caps,
            sq_sig_all: true,
            cookie: serial,
            async_sink: group.events.clone(),
        };
        let qp = Qp::create(&group.nic, init).unwrap();
        qp.modify(&to(QpState::Init)).unwrap();
        let mut memory = vec![0u8; SIZE as usize].into_boxed_slice();
        for (i, byte) in memory[..SOURCE as usize].iter_mut().enumerate() {
            *byte = pattern(serial, i as u64);
        }
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, SIZE, addr, all_rights()).unwrap();
        let side = Arc::new(Self {
            serial,
            qp,
            group: group.clone(),
            watch: Arc::default(),
            mr,
            addr,
            _memory: Mutex::new(memory),
            peer: Mutex::default(),
            book: Mutex::new(Book { free_slots: (0..WRITE_SLOTS).collect(), ..Book::default() }),
            receives: Mutex::default(),
            gone: AtomicBool::new(false),
            faults: AtomicUsize::new(0),
        });
        group.sides.write().insert(serial, side.clone());
        side
    }

    fn sge(&self, offset: u64, length: u64) -> Sge {
        Sge { addr: self.addr + offset, length: length as u32, lkey: self.mr.stag() }
    }

    /// Compares `len` bytes at `offset` of this side's memory with bytes `from` on of what side `serial`
    /// sends from.
    fn check(&self, offset: u64, serial: u64, from: u64, len: u64) {
        for i in 0..len {
            let byte: *const u8 = std::ptr::with_exposed_provenance((self.addr + offset + i) as usize);
            // SAFETY: within the memory that this side owns; the completion says that nobody writes it now.
            let byte = unsafe { byte.read_volatile() };
            assert_eq!(byte, pattern(serial, from + i), "byte {i} of {len} from side {serial}");
        }
    }

    fn post_receive(&self, receives: &mut Receives, slot: u64) -> Result<(), VerbsError> {
        let at = RECV_AREA + slot * LARGEST;
        // Two elements, the border in the middle of nowhere.
        let sges = [self.sge(at, 77), self.sge(at + 77, LARGEST - 77)];
        receives.posted.push_back(slot);
        let wr = RecvWr { wr_id: self.serial << 32 | RECV | slot, sges: &sges };
        self.qp.post_recv(std::iter::once(wr)).map_err(|(_, e)| {
            receives.posted.pop_back();
            e
        })
    }

    fn post_receives(&self) {
        let mut receives = self.receives.lock();
        for slot in 0..RECV_SLOTS {
            self.post_receive(&mut receives, slot).unwrap();
        }
    }

    /// Posts something. `Err`: the queue is full, or the queue pair takes nothing any more.
    fn post(&self, random: &mut Random) -> Result<(), VerbsError> {
        let peer = self.peer.lock().unwrap();
        // The book stays open over the post: completions that come at once wait for it.
        let mut book = self.book.lock();
        let n = book.messages;
        let (from, len) = message(self.serial, n);
        let cut = random.below(len + 1);
        let sges = [self.sge(from, cut), self.sge(from + cut, len - cut)];
        let slot = if random.one_in(3) { book.free_slots.pop() } else { None };
        let solicited = if random.one_in(2) { SendFlags::SOLICITED } else { SendFlags::empty() };
        let inline = if len <= 64 && random.one_in(2) { SendFlags::INLINE } else { SendFlags::empty() };
        let place = peer.addr + WRITE_AREA + slot.unwrap_or(0) * LARGEST;
        let landing = [self.sge(READ_AREA + slot.unwrap_or(0) * LARGEST, len)];
        let base = self.serial << 32 | book.next;
        let wr = |i, op, flags, sges| SendWr { wr_id: base + i, op, flags, sges };
        let write = SendOp::Write { stag: peer.stag, to: place };
        let read = SendOp::Read { stag: peer.stag, to: place, invalidate_local: false };
        let (wrs, works) = match slot {
            Some(slot) => (
                vec![wr(0, write, inline, &sges[..]), wr(1, read, SendFlags::empty(), &landing[..])],
                vec![Work::Write, Work::Read { slot, n }],
            ),
            None => (
                vec![wr(0, SendOp::Send { invalidate: None }, solicited | inline, &sges[..])],
                vec![Work::Send],
            ),
        };
        for (i, work) in works.iter().enumerate() {
            book.outstanding.insert(base + i as u64, *work);
            book.order.push_back(base + i as u64);
        }
        book.next += works.len() as u64;
        let result = self.qp.post_send(wrs.into_iter());
        let posted = match result {
            Ok(()) => works.len(),
            Err((bad, _)) => bad,
        };
        for (i, work) in works.iter().enumerate().skip(posted) {
            book.outstanding.remove(&(base + i as u64));
            book.order.retain(|id| *id != base + i as u64);
            if let Work::Read { slot, .. } = work {
                book.free_slots.push(*slot);
            }
        }
        // Messages are numbered at both ends: only a Send uses its number up.
        if posted > 0 && slot.is_none() {
            book.messages += 1;
        }
        result.map_err(|(_, e)| e)
    }

    fn judge(&self, wc: &Wc) {
        assert!(!self.gone.load(Ordering::SeqCst), "{wc:?} after its queue pair was destroyed");
        assert_eq!(wc.qp_num, self.qp.qpn());
        if wc.wr_id & RECV != 0 {
            return self.judge_receive(wc);
        }
        let mut book = self.book.lock();
        let work = book.outstanding.remove(&wc.wr_id);
        let work = work.unwrap_or_else(|| panic!("{wc:?} was not posted, or has completed before"));
        assert_eq!(book.order.pop_front(), Some(wc.wr_id), "out of order");
        match (wc.status, work) {
            (WcStatus::Success, Work::Read { slot, n }) => {
                assert_eq!(wc.opcode, WcOpcode::RdmaRead);
                let (from, len) = message(self.serial, n);
                assert_eq!(u64::from(wc.byte_len), len);
                self.check(READ_AREA + slot * LARGEST, self.serial, from, len);
                book.free_slots.push(slot);
            }
            (WcStatus::Success, _) => {}
            _ => {
                self.faults.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    fn judge_receive(&self, wc: &Wc) {
        let mut receives = self.receives.lock();
        let slot = wc.wr_id & (RECV - 1) & 0xFFFF;
        assert_eq!(receives.posted.pop_front(), Some(slot), "receives complete in order: {wc:?}");
        if wc.status != WcStatus::Success {
            self.faults.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let peer = self.peer.lock().unwrap();
        let (from, len) = message(peer.serial, receives.messages);
        receives.messages += 1;
        assert_eq!(u64::from(wc.byte_len), len);
        self.check(RECV_AREA + slot * LARGEST, peer.serial, from, len);
        // Refused once it is reset or destroyed.
        let _ = self.post_receive(&mut receives, slot);
    }

    fn is_idle(&self) -> bool {
        self.book.lock().outstanding.is_empty() && self.receives.lock().posted.is_empty()
    }

    /// Destroys the queue pair; what was outstanding never completes.
    fn destroy(&self) {
        self.group.alone(|| self.qp.destroy());
        self.gone.store(true, Ordering::SeqCst);
    }

    fn leave(&self) {
        if !self.gone.load(Ordering::SeqCst) {
            self.destroy();
        }
        self.mr.deregister();
        self.group.sides.write().remove(&self.serial);
    }
}

fn join_sides(a: &Side, b: &Side, random: &mut Random) {
    for (one, other) in [(a, b), (b, a)] {
        *one.peer.lock() = Some(Peer { serial: other.serial, stag: other.mr.stag(), addr: other.addr });
    }
    let params = StreamParams {
        peer_is_uwarp: !random.one_in(3),
        framing: if random.one_in(3) { Framing::PLAIN } else { Framing::default() },
        emss: if random.one_in(2) { 1460 } else { 0 },
        ..StreamParams::default()
    };
    let (left, right) = sockets();
    if random.one_in(3) {
        rustix::net::sockopt::set_socket_send_buffer_size(&left, 20_000).unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(&right, 20_000).unwrap();
    }
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    a.qp.attach(
        left.into(),
        StreamParams { initiator: true, rtr: Rtr::SendWrite, ..params },
        a.watch.clone(),
    )
    .unwrap();
    let params = StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..params };
    b.qp.attach(right.into(), params, b.watch.clone()).unwrap();
}

/// Posts at random until told to stop or refused.
fn poster(side: &Side, seed: u64, stop: &AtomicBool) {
    let mut random = Random(seed);
    while !stop.load(Ordering::SeqCst) {
        match side.post(&mut random) {
            Ok(()) => {}
            Err(VerbsError::QueueFull) => std::thread::sleep(Duration::from_micros(random.below(200))),
            Err(_) => return,
        }
        if random.one_in(50) {
            std::thread::sleep(Duration::from_micros(random.below(1000)));
        }
        if random.one_in(20) {
            side.qp.query();
        }
        // In error all is flushed at once, so this would fill the completion queue.
        if side.qp.query().state == QpState::Err && random.one_in(10) {
            return;
        }
    }
}

fn wait_idle(side: &Side) {
    let end = Instant::now() + LIMIT;
    while !side.is_idle() {
        assert!(
            Instant::now() < end,
            "never completed: {:?} {:?}",
            side.book.lock().order,
            side.receives.lock().posted
        );
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Posts a Write with a key that is not one. `false`: refused.
fn post_with_invalid_key(side: &Side) -> bool {
    let mut book = side.book.lock();
    let id = side.serial << 32 | book.next;
    let sges = [side.sge(0, 10)];
    let op = SendOp::Write { stag: 0, to: 0 };
    let wr = SendWr { wr_id: id, op, flags: SendFlags::empty(), sges: &sges };
    let posted = side.qp.post_send(std::iter::once(wr)).is_ok();
    if posted {
        book.next += 1;
        book.outstanding.insert(id, Work::Send);
        book.order.push_back(id);
    }
    posted
}

/// Waits until all that was posted has completed well and was read.
fn complete_and_read(a: &Side, b: &Side) {
    let end = Instant::now() + LIMIT;
    for side in [a, b] {
        while !side.book.lock().outstanding.is_empty() {
            assert!(Instant::now() < end, "never completed: {:?}", side.book.lock().order);
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    for (one, other) in [(a, b), (b, a)] {
        let sent = one.book.lock().messages;
        while other.receives.lock().messages < sent {
            assert!(Instant::now() < end, "a message was lost");
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    assert_eq!((a.faults.load(Ordering::SeqCst), b.faults.load(Ordering::SeqCst)), (0, 0));
}

/// One connection from its making to its end.
fn life(groups: &[Arc<Group>], serial: &AtomicU64, random: &mut Random) {
    let group = |random: &mut Random| &groups[random.below(groups.len() as u64) as usize];
    let number = || serial.fetch_add(1, Ordering::SeqCst);
    let (a, b) = (Side::new(group(random), number()), Side::new(group(random), number()));
    a.post_receives();
    b.post_receives();
    join_sides(&a, &b, random);
    let stop = AtomicBool::new(false);
    let (seed_a, seed_b) = (random.next(), random.next());
    let way = random.below(8);
    std::thread::scope(|scope| {
        scope.spawn(|| poster(&a, seed_a, &stop));
        scope.spawn(|| poster(&b, seed_b, &stop));
        std::thread::sleep(Duration::from_micros(random.below(60_000)));
        let ended = |side: &Side| {
            side.watch.wait_end();
        };
        match way {
            0 => {
                a.qp.disconnect();
                stop.store(true, Ordering::SeqCst);
            }
            1 => {
                scope.spawn(|| a.qp.disconnect());
                b.qp.disconnect();
                stop.store(true, Ordering::SeqCst);
            }
            2 => a.destroy(),
            3 => {
                scope.spawn(|| a.destroy());
                b.destroy();
            }
            4 => a.qp.modify(&to(QpState::Err)).unwrap(),
            5 => {
                // As if destroyed, but it can be used again.
                a.group.alone(|| a.qp.modify(&to(QpState::Reset)).unwrap());
                stop.store(true, Ordering::SeqCst);
            }
            6 => {
                if !post_with_invalid_key(&a) {
                    a.qp.disconnect();
                }
            }
            _ => {
                stop.store(true, Ordering::SeqCst);
                complete_and_read(&a, &b);
                a.qp.disconnect();
            }
        }
        let a_is_silent = matches!(way, 2 | 3);
        if !a_is_silent {
            ended(&a);
        }
        if way != 3 {
            ended(&b);
        }
        stop.store(true, Ordering::SeqCst);
    });
    if way == 5 {
        // The posters may have been refused in the middle; nothing of it completes.
        let mut book = a.book.lock();
        book.outstanding.clear();
        book.order.clear();
        a.receives.lock().posted.clear();
    } else if !matches!(way, 2 | 3) {
        wait_idle(&a);
    }
    if way != 3 {
        wait_idle(&b);
    }
    a.leave();
    b.leave();
}

fn stress(pairs: u64, groups: u64, time: Duration, seed: u64) {
    // Threads wait for each other, so one that fails has to end the test.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        hook(info);
        std::process::abort();
    }));
    let nic = Nic::open().unwrap();
    let groups: Vec<_> = (0..groups).map(|cookie| Group::new(&nic, cookie)).collect();
    let serial = AtomicU64::new(1);
    let end = Instant::now() + time;
    std::thread::scope(|scope| {
        for (i, group) in groups.iter().enumerate() {
            for thread in 0..2 {
                scope.spawn(move || group.run(seed ^ (i as u64) << 8 ^ thread));
            }
        }
        let lives: Vec<_> = (0..pairs)
            .map(|pair| {
                let (groups, serial) = (&groups, &serial);
                scope.spawn(move || {
                    let mut random = Random(seed ^ pair << 40);
                    while Instant::now() < end {
                        life(groups, serial, &mut random);
                    }
                })
            })
            .collect();
        let results: Vec<_> = lives.into_iter().map(|life| life.join()).collect();
        for group in &groups {
            group.end();
        }
        for result in results {
            result.unwrap();
        }
    });
    let judged: u64 = groups.iter().map(|g| g.judged.load(Ordering::Relaxed)).sum();
    println!("{} connections, {judged} completions", serial.load(Ordering::Relaxed) / 2);
}

#[test]
fn everything_at_once() {
    stress(6, 3, duration(Duration::from_secs(5)), seed());
}

#[test]
fn one_connection_after_the_other() {
    stress(1, 1, duration(Duration::from_secs(2)), seed());
}

#[test]
fn threads_that_poll_few_queue_pairs_each() {
    // Few on a completion queue are polled directly, and unwatched meanwhile.
    stress(2, 4, duration(Duration::from_secs(2)), seed());
}

#[test]
fn the_background_thread_takes_over_when_polling_stops() {
    let seed = seed();
    let mut random = Random(seed);
    let (a, b) = connect(uwarp(), 4096);
    let end = Instant::now() + duration(Duration::from_secs(2));
    while Instant::now() < end {
        // In earnest, for long enough that the background thread stands back.
        let until = Instant::now() + Duration::from_micros(random.below(3000));
        while Instant::now() < until {
            for end in [&a, &b] {
                assert_eq!(end.nic.poll_cq(&end.cq, 1, |_| ()), 0);
            }
        }
        // No thread polls any more.
        b.recv(&[b.sge(0, 64)]);
        a.send(SendOp::Send { invalidate: None }, &[a.sge(0, 64)]);
        a.send(SendOp::Read { stag: b.mr.stag(), to: b.addr(), invalidate_local: false }, &[a.sge(0, 64)]);
        assert_eq!(b.look_only().status, WcStatus::Success);
        assert_eq!(a.look_only().status, WcStatus::Success);
        assert_eq!(a.look_only().status, WcStatus::Success);
    }
}

#[test]
fn a_busy_queue_pair_starves_none_of_many() {
    let nic = Nic::open().unwrap();
    let seed = seed();
    let mut random = Random(seed);
    let (busy, sink) = connect(uwarp(), 4 << 20);
    let stop = AtomicBool::new(false);
    let quiet: Vec<_> = (0..40).map(|_| connect(uwarp(), 4096)).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let op = SendOp::Write { stag: sink.mr.stag(), to: sink.addr() };
            let mut posted = 0;
            while !stop.load(Ordering::SeqCst) {
                if posted < 64 && busy.try_send(1, op, &[busy.sge(0, 4 << 20)]).is_ok() {
                    posted += 1;
                }
                posted -= nic.poll_cq(&busy.cq, 16, |wc| assert_eq!(wc.status, WcStatus::Success));
            }
            while posted > 0 {
                busy.poll();
                posted -= 1;
            }
        });
        let end = Instant::now() + duration(Duration::from_secs(2));
        while Instant::now() < end {
            let (a, b) = &quiet[random.below(quiet.len() as u64) as usize];
            a.send(
                SendOp::Read { stag: b.mr.stag(), to: b.addr(), invalidate_local: false },
                &[a.sge(0, 64)],
            );
            assert_eq!(a.look_only().status, WcStatus::Success);
        }
        stop.store(true, Ordering::SeqCst);
    });
}
