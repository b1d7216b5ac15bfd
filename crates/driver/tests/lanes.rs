//! The pump over a lower layer in memory, which does what none of today does: it counts placed messages
//! beside the stream, refers to memory that it has taken, shows nothing before the end of a turn, and takes
//! the place of another one before the first byte. Both ends are in one thread here.

mod common;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use common::{CAPS, Events, address, all_rights};
use uwarp_driver::pump::{Pump, Surroundings};
use uwarp_llp::LowerLayer;
use uwarp_llp::link::{Answers, Caps, Counts, Ended, Faulty, Received, Stop};
use uwarp_mem::{self as mem, MemSeg};
use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::{
    Action, Disconnect, LinkCaps, Now, QpInit, QpModify, QpState, RcCore, Rtr, StreamParams,
};
use uwarp_rnic::{Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus};

/// What one direction takes until its reader has taken some of it.
const ROOM: u64 = 300 * 1024;
/// Pieces from this size on are not copied.
const REFERRED: usize = 4096;

enum Item {
    Bytes(VecDeque<u8>),
    Memory(MemSeg),
}

impl Item {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Memory(seg) => seg.len,
        }
    }

    /// Removes the first bytes.
    fn take(&mut self, n: usize) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes.drain(..n).collect(),
            Self::Memory(seg) => {
                let mut bytes = Vec::new();
                mem::copy_out(seg.part(0, n), &mut bytes).unwrap();
                *seg = seg.part(n, seg.len);
                bytes
            }
        }
    }
}

/// One direction.
#[derive(Default)]
struct Way {
    items: VecDeque<Item>,
    /// Bytes that its writer has put into it, and those of them that the reader may see.
    taken: u64,
    shown: u64,
    /// Bytes that its reader has taken, and those of them of which the writer knows.
    read: u64,
    released: u64,
    /// Messages of the other direction that its writer has placed, and for which of its own it waits.
    placed: u64,
    wanted: u64,
    over: bool,
    /// The writer is in another thread: what it shows comes between the reader's calls.
    races: bool,
    shows_next: Option<(u64, u64)>,
}

impl Way {
    fn put(&mut self, item: Item) {
        self.taken += item.len() as u64;
        self.items.push_back(item);
    }

    fn room(&self) -> usize {
        usize::try_from(ROOM - (self.taken - self.released)).unwrap()
    }

    fn recall(&mut self) {
        for item in &mut self.items {
            let bytes = item.take(item.len());
            *item = Item::Bytes(bytes.into());
        }
    }
}

/// One end.
struct Lane {
    out: Rc<RefCell<Way>>,
    input: Rc<RefCell<Way>>,
    /// It has taken copies of all up to here.
    recalled: u64,
    /// What it had counted when it was asked for bytes, each time; and what it has counted within a turn.
    counted: Vec<u64>,
}

fn lanes() -> [Lane; 2] {
    let [a, b] = [(), ()].map(|()| Rc::new(RefCell::new(Way::default())));
    let lane = |out: &Rc<RefCell<Way>>, input: &Rc<RefCell<Way>>| Lane {
        out: out.clone(),
        input: input.clone(),
        recalled: 0,
        counted: Vec::new(),
    };
    [lane(&a, &b), lane(&b, &a)]
}

impl Lane {
    fn read(&mut self, max: usize) -> Result<Vec<u8>, Stop> {
        self.counted.push(self.out.borrow().placed);
        let mut way = self.input.borrow_mut();
        if let Some((shown, placed)) = way.shows_next.take() {
            (way.shown, way.placed) = (shown, placed);
        }
        let max = max.min(usize::try_from(way.shown - way.read).unwrap());
        let mut bytes = Vec::new();
        while bytes.len() < max {
            let item = way.items.front_mut().unwrap();
            bytes.extend(item.take(item.len().min(max - bytes.len())));
            if item.len() == 0 {
                way.items.pop_front();
            }
        }
        way.read += bytes.len() as u64;
        match bytes.len() {
            0 if way.over => Err(Stop::Ended(Ended::Closed)),
            0 => Err(Stop::Later),
            _ => Ok(bytes),
        }
    }

    fn drained(&self) -> bool {
        let way = self.input.borrow();
        way.shown == way.read
    }
}

const CAPS_OF_LANES: Caps = Caps { answers: false, needs_system: false, counts: true, refers: true };

impl LowerLayer for Lane {
    fn caps(&self) -> Caps {
        CAPS_OF_LANES
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        let mut out = self.out.borrow_mut();
        let n = bytes.len().min(out.room());
        if n == 0 {
            return Err(Stop::Later);
        }
        out.put(Item::Bytes(bytes[..n].to_vec().into()));
        Ok(n)
    }

    fn send(&mut self, pieces: &[MemSeg], stays: u64) -> Result<usize, Stop> {
        let mut sent = 0;
        for (i, piece) in pieces.iter().enumerate() {
            let mut out = self.out.borrow_mut();
            let piece = piece.part(0, out.room());
            if piece.len == 0 {
                break;
            }
            if stays >> i & 1 == 1 && piece.len >= REFERRED {
                out.put(Item::Memory(piece));
            } else {
                let mut bytes = Vec::new();
                mem::copy_out(piece, &mut bytes).map_err(|_| Stop::Unmapped)?;
                out.put(Item::Bytes(bytes.into()));
            }
            sent += piece.len;
        }
        if sent == 0 { Err(Stop::Later) } else { Ok(sent) }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop> {
        let bytes = self.read(buffer.len())?;
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(Received { bytes: bytes.len(), drained: self.drained() })
    }

    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop> {
        let direct: usize = pieces.iter().map(|piece| piece.len).sum();
        let bytes = self.read(direct + buffer.len())?;
        let mut rest = &bytes[..];
        for piece in pieces {
            let n = mem::copy_in(*piece, rest).map_err(|_| Stop::Unmapped)?;
            rest = &rest[n..];
        }
        buffer[..rest.len()].copy_from_slice(rest);
        Ok(Received { bytes: bytes.len(), drained: self.drained() })
    }

    fn flush(&mut self, received: Counts, wanted: u64) -> bool {
        let mut out = self.out.borrow_mut();
        out.wanted = wanted;
        let shows = (out.taken, received.acked.max(out.placed));
        if out.races {
            out.shows_next = Some(shows);
        } else {
            (out.shown, out.placed) = shows;
        }
        let mut input = self.input.borrow_mut();
        input.released = input.read;
        false
    }

    fn count_placed(&mut self, placed: u64) {
        self.out.borrow_mut().placed = placed;
        self.counted.push(placed);
    }

    fn peer_received(&self) -> Counts {
        let placed = self.input.borrow().placed;
        Counts { acked: placed, placed }
    }

    fn released(&self) -> Option<u64> {
        Some(self.out.borrow().released.max(self.recalled))
    }

    fn recall(&mut self) {
        self.out.borrow_mut().recall();
        self.recalled = self.out.borrow().taken;
    }

    fn ended(&self) -> Option<Ended> {
        let input = self.input.borrow();
        (input.over && input.read == input.shown).then_some(Ended::Closed)
    }

    fn answers(&self) -> Option<Answers> {
        None
    }

    fn probe_when_quiet(&self) {}

    fn unsent(&self) -> usize {
        0
    }

    fn unacknowledged(&self) -> usize {
        panic!("it counts: nothing is inferred from what is taken")
    }

    fn reset_on_close(&self, _: bool) {}

    fn finish(&mut self) {
        let mut out = self.out.borrow_mut();
        (out.over, out.shown) = (true, out.taken);
    }

    fn peer(&self) -> Option<SocketAddr> {
        None
    }
}

struct Alone<L>(L);

impl<L: LowerLayer> Surroundings for Alone<L> {
    type Lower = L;
    fn lower(&mut self) -> &mut L {
        &mut self.0
    }
    fn take_room(&mut self) -> bool {
        true
    }
    fn take_kept(&mut self) -> bool {
        false
    }
    fn hung_up(&self) -> bool {
        self.0.ended().is_some()
    }
    fn set_hung_up(&mut self) {}
    fn again(&mut self) {}
    fn watch(&mut self) -> bool {
        false
    }
}

const MEMORY: usize = 2 << 20;

struct End<L> {
    core: RcCore,
    pump: Pump,
    around: Alone<L>,
    cq: Arc<Cq>,
    mr: Arc<Mr>,
    ended: Option<Disconnect>,
    // Last: freed after everything that may use it.
    memory: Box<[u8]>,
}

/// Both ends acknowledge what they place, and neither sends a frame of its own at the start.
fn params() -> StreamParams {
    StreamParams {
        peer_is_uwarp: true,
        framing: Framing::PLAIN,
        placement_acks: true,
        infiniband: true,
        rtr: Rtr::None,
        link: LinkCaps { answers: false, counts: true, refers: true },
        ..StreamParams::default()
    }
}

/// As in the iwarp view: what the lower layer has taken is complete.
fn at_once() -> StreamParams {
    StreamParams { placement_acks: false, infiniband: false, ..params() }
}

impl<L: LowerLayer> End<L> {
    fn new(lower: L, params: StreamParams) -> Self {
        let (pd, events) = (Pd::new(), Arc::new(Events::default()));
        let cq = Cq::new(1024, 0, None, events.clone());
        let mut memory = vec![0; MEMORY].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, MEMORY as u64, addr, all_rights()).unwrap();
        let (send_cq, recv_cq) = (cq.clone(), cq.clone());
        let init = QpInit {
            pd,
            send_cq,
            recv_cq,
            srq: None,
            caps: CAPS,
            sq_sig_all: true,
            cookie: 0,
            async_sink: events,
        };
        let mut core = RcCore::new(1, init, None);
        core.attach(&Now::unread(), params).unwrap();
        Self { core, pump: Pump::default(), around: Alone(lower), cq, mr, ended: None, memory }
    }

    fn sge(&self, offset: usize, length: usize) -> Sge {
        let addr = self.mr.range().0 + offset as u64;
        Sge { addr, length: u32::try_from(length).unwrap(), lkey: self.mr.stag() }
    }

    fn post(&mut self, wr_id: u64, op: SendOp, sge: Sge) {
        self.core.post_send(&SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: &[sge] }).unwrap();
    }

    fn send(&mut self, wr_id: u64, offset: usize, length: usize) {
        self.post(wr_id, SendOp::Send { invalidate: None }, self.sge(offset, length));
    }

    fn recv(&mut self, wr_id: u64, offset: usize, length: usize) {
        let sges = [self.sge(offset, length)];
        self.core.post_recv(&RecvWr { wr_id, sges: &sges }).unwrap();
    }

    fn run(&mut self) {
        let now = &Now::unread();
        if self.ended.is_some() {
            return;
        }
        self.pump.run(&mut self.core, now, &mut self.around);
        // As a thread that polls does: what could ride on an answer is held until then.
        if self.core.polled_in_vain() {
            self.pump.send(&mut self.core, now, &mut self.around);
        }
        while let Some(action) = self.pump.poll_action(&mut self.core, now, &mut self.around) {
            match action {
                Action::Disconnected { why, unsent, .. } => {
                    self.ended = Some(why);
                    if !unsent.is_empty() {
                        assert_eq!(self.around.0.send_bytes(&unsent), Ok(unsent.len()));
                    }
                    self.around.0.finish();
                }
                Action::Recall => panic!("the pump does that"),
                _ => {}
            }
        }
    }

    fn polled(&self) -> Vec<(u64, WcStatus)> {
        let mut all = Vec::new();
        self.cq.poll(usize::MAX, |wc| all.push((wc.wr_id, wc.status)));
        all
    }

    fn fill(&mut self) {
        for (i, byte) in self.memory.iter_mut().enumerate() {
            *byte = u8::try_from(i % 251).unwrap();
        }
    }
}

fn pair(params: StreamParams) -> [End<Lane>; 2] {
    lanes().map(|lane| End::new(lane, params))
}

const OK: WcStatus = WcStatus::Success;

/// All sizes, staged and referred to, with everything that a lower layer may do wrong.
#[test]
fn everything_arrives_and_nothing_but_messages_is_sent() {
    const SIZES: [usize; 8] = [0, 1, 64, 1000, 9000, 20_000, 70_000, 200_000];
    for seed in 0..12 {
        let [a, b] = lanes();
        let mut a = End::new(Faulty::new(a, seed * 2 + 1), params());
        let mut b = End::new(Faulty::new(b, seed * 7 + 3), params());
        a.fill();
        let mut at = 0;
        for (i, size) in (0..).zip(SIZES) {
            b.recv(i, at, size);
            let (stag, to) = (b.mr.stag(), b.mr.range().0 + (500_000 + at) as u64);
            a.send(i, at, size);
            a.post(100 + i, SendOp::Write { stag, to }, a.sge(at, size));
            at += size;
        }
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for _ in 0..10_000 {
            a.run();
            b.run();
            sent.extend(a.polled());
            received.extend(b.polled());
            if sent.len() == 2 * SIZES.len() {
                break;
            }
        }
        let expected: Vec<_> = (0..8).flat_map(|i| [(i, OK), (100 + i, OK)]).collect();
        assert_eq!(sent, expected, "seed {seed}");
        assert_eq!(received, (0..8).map(|i| (i, OK)).collect::<Vec<_>>());
        // A Write that is complete is in place.
        assert!(b.memory[500_000..500_000 + at] == a.memory[..at], "seed {seed}: Writes");
        assert!(b.memory[..at] == a.memory[..at], "seed {seed}: Sends");
        let answers = b.around.0.inner().out.borrow();
        assert_eq!((answers.taken, answers.placed), (0, 16), "acknowledged without a byte");
    }
}

/// In the iwarp view a work request completes when its bytes are taken, and its memory is the program's then.
#[test]
fn a_work_request_completes_when_its_memory_is_released() {
    let [mut a, mut b] = pair(at_once());
    b.recv(0, 0, 100_000);
    a.fill();
    a.send(1, 0, 100_000);
    a.run();
    a.run();
    assert!(a.around.0.out.borrow().taken > 100_000, "it is taken");
    assert_eq!(a.polled(), []);
    b.run();
    assert_eq!(b.polled(), [(0, OK)]);
    a.run();
    assert_eq!(a.polled(), [(1, OK)]);
    // What is copied completes at once.
    a.send(2, 0, 64);
    a.run();
    assert_eq!(a.polled(), []);
    b.recv(0, 0, 64);
    b.run();
    a.run();
    assert_eq!(a.polled(), [(2, OK)]);
}

/// The program gets its memory back, whatever ends the stream; what the lower layer has taken arrives as it
/// was.
#[test]
fn memory_is_recalled_before_it_is_given_back() {
    for to in [QpState::Err, QpState::Reset] {
        for of in [at_once(), params()] {
            let [mut a, mut b] = pair(of);
            b.recv(0, 0, 50_000);
            a.fill();
            let before = a.memory[..50_000].to_vec();
            a.send(1, 0, 50_000);
            a.run();
            assert_eq!(a.polled(), []);
            a.core.modify(&QpModify { state: Some(to), ..QpModify::default() }).unwrap();
            assert_eq!(a.polled(), [], "the lower layer refers to its memory");
            a.run();
            let status = if of.placement_acks { WcStatus::WrFlushErr } else { OK };
            assert_eq!(a.polled(), if to == QpState::Err { vec![(1, status)] } else { vec![] });
            assert_eq!(a.ended, Some(Disconnect::LocalClosed));
            a.memory.fill(0xEE);
            b.run();
            assert_eq!(b.polled().first(), Some(&(0, OK)));
            assert!(b.memory[..50_000] == before, "it was sent as it was");
        }
    }
}

/// The peer's Terminate is about the first message that it has not placed, so its count comes first.
#[test]
fn a_terminate_comes_behind_the_count() {
    for races in [false, true] {
        let [mut a, mut b] = pair(params());
        b.recv(0, 0, 100);
        b.recv(1, 0, 10);
        a.send(1, 0, 100);
        a.send(2, 0, 100);
        a.send(3, 0, 100);
        a.run();
        b.around.0.out.borrow_mut().races = races;
        // It does not get as far as the end of the stream.
        b.pump.run(&mut b.core, &Now::unread(), &mut b.around);
        a.run();
        let second = WcStatus::RemInvReqErr;
        assert_eq!(a.polled(), [(1, OK), (2, second), (3, WcStatus::WrFlushErr)], "the second did not fit");
    }
}

/// A peer that has ended in good order had placed what it has counted, and nothing more.
#[test]
fn the_last_count_is_exact() {
    let [mut a, mut b] = pair(StreamParams { infiniband: false, ..params() });
    b.recv(0, 0, 100);
    a.send(1, 0, 100);
    a.run();
    b.run();
    a.send(2, 0, 100);
    a.send(3, 0, 100);
    a.run();
    // Its process is killed.
    b.around.0.finish();
    a.run();
    assert_eq!(a.polled(), [(1, OK), (2, WcStatus::WrFlushErr), (3, WcStatus::WrFlushErr)]);
}

/// A process may be killed in a long turn: what it has placed in it is counted before it receives more.
#[test]
fn what_is_placed_counts_within_the_turn() {
    for length in [90_000, 100] {
        let [mut a, mut b] = pair(params());
        for i in 0..3_u16 {
            b.recv(u64::from(i), usize::from(i) * length, length);
            a.send(u64::from(i), usize::from(i) * length, length);
        }
        a.run();
        b.around.0.counted.clear();
        b.pump.receive(&mut b.core, &Now::unread(), &mut b.around);
        assert_eq!(b.polled(), [(0, OK), (1, OK), (2, OK)]);
        assert!((0..3).all(|placed| b.around.0.counted.contains(&placed)), "{:?}", b.around.0.counted);
    }
}

#[test]
fn a_peer_that_counts_what_was_not_sent_is_left() {
    let [mut a, _b] = pair(StreamParams { infiniband: false, ..params() });
    a.send(1, 0, 100);
    a.run();
    a.around.0.input.borrow_mut().placed = 2;
    a.run();
    assert_eq!(a.ended, Some(Disconnect::Reset));
    assert_eq!(a.polled(), [(1, WcStatus::WrFlushErr)]);
}

/// A responder has attached the stream as it was negotiated, and learns then that the initiator uses a lane.
/// Before the first byte the lower layer and the framing change; behind it they cannot.
#[test]
fn the_lower_layer_changes_before_the_first_byte() {
    let first = StreamParams { framing: Framing::default(), link: LinkCaps::default(), ..params() };
    let responder = StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..first };
    let [before, _] = lanes();
    let [a, b] = lanes();
    let now = &Now::unread();
    let mut a = End::new(a, StreamParams { rtr: Rtr::SendWrite, ..params() });
    let mut end = End::new(before, responder);
    a.fill();
    a.recv(5, 0, 64);
    end.recv(0, 0, 9000);
    end.send(7, 0, 64);
    end.run();
    assert_eq!(end.around.0.out.borrow().taken, 0, "a responder is silent");
    end.core.reframe(now, Framing::PLAIN, params().link).unwrap();
    // Nothing that the pump knows is true of the new lower layer.
    let mut b = End { pump: Pump::default(), around: Alone(b), ..end };
    a.send(1, 0, 9000);
    for _ in 0..20 {
        a.run();
        b.run();
    }
    assert_eq!(b.polled(), [(0, OK), (7, OK)]);
    assert_eq!(a.polled(), [(1, OK), (5, OK)], "the count comes first");
    assert!(a.memory[64..9000] == b.memory[64..9000]);
    for end in [&mut a, &mut b] {
        assert!(end.core.reframe(now, Framing::default(), LinkCaps::default()).is_err(), "it is in use");
    }
}
