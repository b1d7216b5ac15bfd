//! Arbitrary bytes from the peer between arbitrary calls of the program, in any order: posts, state changes,
//! registration and its end, memory windows, invalidation, disconnect. Shared by a property test and a fuzz
//! target.
//!
//! The input is a list of steps: a byte that says which, then the step's own bytes. What must hold:
//! - no panic, and an end;
//! - memory that may not be written at a moment (no region, or one without any right to write) does not
//!   change;
//! - a work request that was posted completes once at most, once exactly if the queue pair was never reset,
//!   and not after a reset;
//! - memory that only windows show is written within them, and not when there is none.

use std::sync::Arc;

use uwarp_proto::framing::{Framing, Mpa};
use uwarp_rnic::mr::{self, Bind, MrCache, WindowType};
use uwarp_rnic::qp::{QpModify, QpState, Rtr, StreamParams};
use uwarp_rnic::{Access, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge};
use uwarp_wire::rdmap::{Control, Opcode};
use uwarp_wire::{crc, ddp};

use crate::Side::B;
use crate::net::NetParams;
use crate::workload::queue_pair_numbers;
use crate::{Arena, EndConfig, World};

const FILL: u8 = 0x5A;
/// Regions begin at multiples of this; the second half of each slot is never registered.
const SLOT: usize = 4096;
const HALF: usize = SLOT / 2;
const SLOTS: usize = 6;
/// The slot behind them: no work request names its region, only windows do.
const PANE: usize = SLOTS;
/// What windows can show of it.
const SHOWN: std::ops::Range<usize> = 256..256 + 255 * 6;
const WINDOWS: [WindowType; 3] = [WindowType::One, WindowType::Two, WindowType::Two];
/// Steps after which the rest of the input is left alone.
const MOST: usize = 300;

/// One place for a region, and what is known of it.
#[derive(Default)]
struct Slot {
    region: Option<Arc<Mr>>,
    /// Its last key, for use after its end.
    stag: u32,
    /// What stood there when nobody could write it any more.
    frozen: Option<Vec<u8>>,
}

struct Run {
    world: World,
    memory: Arena,
    stranger: Arc<Pd>,
    slots: [Slot; SLOTS],
    pane: Arc<Mr>,
    /// The last key of each window that is allocated.
    windows: [Option<u32>; WINDOWS.len()],
    /// What the pane held when the last of them went.
    shut: Option<Vec<u8>>,
    next_id: u64,
    /// Work requests not completed: id, and whether a completion is certain.
    sends: Vec<(u64, bool)>,
    recvs: Vec<u64>,
    was_reset: bool,
}

/// The input, a piece at a time.
pub(crate) struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(len.min(self.0.len()));
        self.0 = tail;
        head
    }
}

/// Carries out the steps that `bytes` name.
///
/// # Panics
/// When something is not as it must be.
pub fn check(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let mut run = Run::new(bytes.byte(), bytes.byte());
    for _ in 0..MOST {
        if bytes.is_empty() {
            break;
        }
        run.step(&mut bytes);
        run.completions();
        run.check_frozen();
    }
    run.end();
}

impl Run {
    fn new(flags: u8, more: u8) -> Self {
        let bit = |n: u8| flags >> n & 1 == 1;
        let config = EndConfig {
            sq_sig_all: more & 1 != 0,
            shared_recv: more & 2 != 0,
            qpn: queue_pair_numbers()[0],
            ..EndConfig::default()
        };
        let mut world = World::new(0, [config; 2], NetParams::default(), [None, None]);
        let memory = Arena::from_bytes(&vec![FILL; (SLOTS + 1) * SLOT]);
        let end = world.end(B);
        end.init();
        let rights = Access::LOCAL_WRITE | Access::MW_BIND;
        let pane = memory.register(&end.pd, PANE * SLOT, HALF, rights);
        let params = StreamParams {
            initiator: !bit(7),
            framing: Framing::Mpa(Mpa { crc: true, receive_markers: bit(1), send_markers: bit(5) }),
            peer_is_uwarp: bit(2),
            placement_acks: bit(4) && bit(2),
            placement_reads: bit(4),
            infiniband: bit(4),
            rtr: if bit(7) { Rtr::Expect } else { Rtr::None },
            wait_first_frame: bit(7),
            ird: 2,
            ord: u16::from(flags & 1) + 1,
            ..StreamParams::default()
        };
        end.attach(params).expect("a new queue pair");
        let mut run = Self {
            world,
            memory,
            stranger: Pd::new(),
            slots: Default::default(),
            pane,
            windows: [None; WINDOWS.len()],
            shut: None,
            next_id: 0,
            sends: Vec::new(),
            recvs: Vec::new(),
            was_reset: false,
        };
        for slot in 0..SLOTS {
            run.register(slot, 7);
        }
        run
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        let kind = bytes.byte();
        match kind % 16 {
            0 => {
                let len = usize::from(bytes.byte());
                self.world.inject(B, bytes.take(len));
                self.settle();
            }
            1..=4 => {
                let len = usize::from(bytes.byte());
                // Most are small; some are as large as those that are received in place.
                let ulpdu = bytes.take(len);
                let stretch = if kind & 0x80 != 0 { usize::from(kind & 0x70) * 256 } else { 0 };
                let framed = self.frame(ulpdu, stretch);
                self.world.inject(B, &framed);
                self.settle();
            }
            5 | 6 => self.post_recv(bytes),
            7 | 8 => self.post_send(bytes),
            9 => self.modify(bytes),
            10 => {
                let slot = usize::from(bytes.byte()) % SLOTS;
                if self.deregister(slot) {
                    self.freeze(slot);
                }
            }
            11 => {
                let (slot, access) = (usize::from(bytes.byte()) % SLOTS, bytes.byte());
                self.register(slot, access);
            }
            12 => {
                // As a work request on another queue pair of the program's would do it.
                let slot = usize::from(bytes.byte()) % SLOTS;
                if let Some(region) = &self.slots[slot].region {
                    let gone = region.invalidate() || region.enter().is_none();
                    gone.then(|| self.freeze(slot));
                }
            }
            13 => self.world.settle_for(u64::from(bytes.byte()) * 1_000_000),
            14 => {
                let access = Access::from_bits_truncate(u32::from(bytes.byte()) & 15);
                let change = QpModify { access: Some(access), ..QpModify::default() };
                let _ = self.world.end(B).core.modify(&change);
            }
            _ => match bytes.byte() % 8 {
                0 => self.world.disconnect(B),
                1 => self.world.inject_end(B),
                2 | 3 => self.bind(bytes),
                4 => self.deallocate(usize::from(bytes.byte()) % WINDOWS.len()),
                _ => self.settle(),
            },
        }
    }

    fn settle(&mut self) {
        self.world.settle_for(30_000);
    }

    fn post_recv(&mut self, bytes: &mut Bytes<'_>) {
        let sges = self.sges(bytes);
        let wr_id = self.next_id;
        self.next_id += 1;
        if self.world.post_recv(B, &RecvWr { wr_id, sges: &sges }).is_ok() {
            self.recvs.push(wr_id);
        }
    }

    fn post_send(&mut self, bytes: &mut Bytes<'_>) {
        let what = bytes.byte();
        let stag = self.key(bytes.byte());
        let to = u64::from(bytes.byte()) << ((what >> 5 & 3) * 16);
        let operand = u64::from(what) << 32 | to;
        let op = match what % 10 {
            0 => SendOp::Send { invalidate: None },
            1 => SendOp::Send { invalidate: Some(stag) },
            2 => SendOp::Write { stag, to },
            3 => SendOp::Read { stag, to, invalidate_local: false },
            4 => SendOp::Read { stag, to, invalidate_local: true },
            5 => SendOp::LocalInvalidate { stag },
            6 => SendOp::SendImmediate { imm: [what; 4] },
            7 => SendOp::FetchAdd { stag, to, add: operand },
            8 => SendOp::CmpSwap { stag, to, compare: 0, swap: operand },
            _ => SendOp::WriteImmediate { stag, to, imm: [what; 4] },
        };
        let flags = SendFlags::from_bits_truncate(u32::from(bytes.byte()) & 0xF);
        let sges = self.sges(bytes);
        // What is invalidated here is not written from then on; which moment that is the queue pair decides.
        let named = self.slots.iter().position(|slot| slot.stag == stag);
        self.post(op, flags, &sges);
        if let (SendOp::LocalInvalidate { .. }, Some(slot)) = (op, named) {
            self.slots[slot].frozen = None;
        }
    }

    fn post(&mut self, op: SendOp, flags: SendFlags, sges: &[Sge]) {
        let wr_id = self.next_id;
        self.next_id += 1;
        if self.world.post_send(B, &SendWr { wr_id, op, flags, sges }).is_ok() {
            let certain = flags.contains(SendFlags::SIGNALED) || self.world.end(B).core.query().sq_sig_all;
            self.sends.push((wr_id, certain));
        }
    }

    /// Binds a window, which is allocated if it is not, to a part of the pane mostly.
    fn bind(&mut self, bytes: &mut Bytes<'_>) {
        let (n, slot) = (usize::from(bytes.byte()) % WINDOWS.len(), usize::from(bytes.byte()));
        let (at, len, access) = (bytes.byte(), bytes.byte(), bytes.byte());
        let pd = self.world.end(B).pd.id();
        let name = *self.windows[n].get_or_insert_with(|| mr::add_window(pd, WINDOWS[n]).expect("a key"));
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::ZERO_BASED;
        let (region, start, unit) = match self.slots.get(slot) {
            Some(known) => (known.stag, slot * SLOT, 9),
            None => (self.pane.stag(), PANE * SLOT + SHOWN.start, 3),
        };
        let bind = Bind {
            key: name & !0xFF | u32::from(bytes.byte()),
            region,
            addr: self.memory.addr(start + usize::from(at) * unit),
            len: u64::from(len) * unit as u64,
            access: Access::from_bits_truncate(u32::from(access)) & rights,
        };
        self.windows[n] = Some(bind.key);
        self.shut = None;
        let flags = SendFlags::from_bits_truncate(u32::from(bytes.byte()) & 0xF);
        self.post(SendOp::Bind(bind), flags, &[]);
    }

    fn deallocate(&mut self, n: usize) {
        if let Some(key) = self.windows[n].take() {
            mr::remove_window(key);
        }
        if self.windows.iter().all(Option::is_none) {
            self.shut = Some(self.memory.read(PANE * SLOT, SLOT));
        }
    }

    /// Whether the slot has no region any more. One with windows stays.
    fn deregister(&mut self, slot: usize) -> bool {
        let place = &mut self.slots[slot].region;
        if place.as_ref().is_none_or(|region| region.deregister()) {
            *place = None;
        }
        place.is_none()
    }

    fn modify(&mut self, bytes: &mut Bytes<'_>) {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        let state = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err, Rts][usize::from(bytes.byte()) % 8];
        let change = QpModify { state: Some(state), ..QpModify::default() };
        if self.world.end(B).core.modify(&change).is_ok() && state == Reset {
            self.was_reset = true;
            self.sends.clear();
            self.recvs.clear();
        }
        self.settle();
    }

    fn sges(&self, bytes: &mut Bytes<'_>) -> Vec<Sge> {
        let count = bytes.byte() % 4;
        (0..count)
            .map(|_| {
                let (slot, at, len) = (usize::from(bytes.byte()), bytes.byte(), bytes.byte());
                let slot = slot % SLOTS;
                let lkey = self.key(slot as u8);
                // Now and then beyond the region.
                let addr = self.memory.addr(slot * SLOT + usize::from(at) * 9);
                Sge { addr, length: u32::from(len) * 9, lkey }
            })
            .collect()
    }

    /// A key by a small number: a region's or a window's, valid or not.
    fn key(&self, n: u8) -> u32 {
        let number = usize::from(n);
        let window = || number.checked_sub(SLOTS).and_then(|n| *self.windows.get(n)?);
        self.slots.get(number).map(|slot| slot.stag).or_else(window).unwrap_or(n.into())
    }

    fn register(&mut self, slot: usize, access: u8) {
        if !self.deregister(slot) {
            return;
        }
        // Zero-based ones too.
        let mut access = Access::from_bits_truncate(u32::from(access) & 0x37);
        access.set(Access::REMOTE_ATOMIC, access.contains(Access::MW_BIND));
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) {
            access |= Access::LOCAL_WRITE;
        }
        // Peers name it by offsets from zero or by its addresses; both are tried.
        let pd = if slot == SLOTS - 1 { self.stranger.clone() } else { self.world.end(B).pd.clone() };
        let region = self.memory.register(&pd, slot * SLOT, HALF, access);
        self.slots[slot].stag = region.stag();
        self.slots[slot].region = Some(region);
        let usable = access.contains(Access::LOCAL_WRITE) && slot != SLOTS - 1;
        self.slots[slot].frozen = (!usable).then(|| self.memory.read(slot * SLOT, HALF));
    }

    fn freeze(&mut self, slot: usize) {
        self.slots[slot].frozen = Some(self.memory.read(slot * SLOT, HALF));
    }

    /// A well-formed FPDU around a ULPDU, with keys put in for small numbers. `stretch`: so many bytes more
    /// of payload.
    fn frame(&self, ulpdu: &[u8], stretch: usize) -> Vec<u8> {
        let mut ulpdu = ulpdu.to_vec();
        if let Some(control) = ulpdu.first_mut() {
            // A wrong version is a matter for other targets.
            *control = *control & 0xC0 | 1;
        }
        if let Some(control) = ulpdu.get_mut(1) {
            *control = *control & 0x3F | 0x40;
        }
        let name = |field: &mut [u8]| {
            if let [0, 0, 0, n] = *field {
                field.copy_from_slice(&self.key(n).to_be_bytes());
            }
        };
        let address = |field: &mut [u8]| {
            // An offset into a slot stands for its address.
            if let [0, 0, 0, 0, 0, slot, high, low] = *field
                && usize::from(slot) <= PANE
            {
                let at = usize::from(slot) * SLOT + usize::from(u16::from_be_bytes([high, low])) % SLOT;
                field.copy_from_slice(&self.memory.addr(at).to_be_bytes());
            }
            // Offsets from zero.
            if let [0, 0, 0, 0, 1, _, high, low] = *field {
                field.copy_from_slice(&u64::from(u16::from_be_bytes([high, low])).to_be_bytes());
            }
        };
        if let Some(field) = ulpdu.get_mut(2..6) {
            name(field);
        }
        if ulpdu.first().is_some_and(|control| control & 0x80 != 0)
            && let Some(field) = ulpdu.get_mut(6..14)
        {
            address(field);
        }
        // Where requests name their source, or the word to change.
        let named = match ulpdu.get(1).map(|b| Control::parse(*b).opcode) {
            Some(Opcode::ReadRequest) => Some(ddp::Untagged::LEN + 16),
            Some(Opcode::AtomicRequest) => Some(ddp::Untagged::LEN + 8),
            _ => None,
        };
        if let Some(at) = named
            && let Some(fields) = ulpdu.get_mut(at..at + 12)
        {
            let (stag, to) = fields.split_at_mut(4);
            name(stag);
            address(to);
        }
        ulpdu.extend(std::iter::repeat_n(0xEE, stretch));
        let mut out = u16::try_from(ulpdu.len()).unwrap_or(0).to_be_bytes().to_vec();
        out.extend(ulpdu);
        while !out.len().is_multiple_of(4) {
            out.push(0);
        }
        let sum = crc::to_wire(crc::crc32c(&out));
        out.extend(sum);
        out
    }

    fn completions(&mut self) {
        let (sends, recvs) = (self.world.end(B).sends(), self.world.end(B).recvs());
        for wc in sends {
            let at = self.sends.iter().position(|(id, _)| *id == wc.wr_id);
            assert!(at.is_some(), "send {} completes, and was not waiting", wc.wr_id);
            if let Some(at) = at {
                let earlier: Vec<_> = self.sends.drain(..=at).filter(|(_, certain)| *certain).collect();
                assert!(
                    earlier.iter().all(|(id, _)| *id == wc.wr_id),
                    "{earlier:?} did not complete in order"
                );
            }
        }
        // Receives of a shared queue outlast the queue pair's reset, all but one that it had taken.
        let outlasts = self.was_reset && self.world.end(B).srq.is_some();
        for wc in recvs {
            let at = self.recvs.iter().position(|id| *id == wc.wr_id);
            assert!(at.is_some() || outlasts, "receive {} completes, and was not waiting", wc.wr_id);
            if let Some(at) = at {
                assert!(at == 0 || outlasts, "receive {} before an older one", wc.wr_id);
                self.recvs.remove(at);
            }
        }
        // A region that the peer has invalidated is not looked after by anybody else.
    }

    fn check_frozen(&self) {
        for (n, slot) in self.slots.iter().enumerate() {
            let beyond = self.memory.read(n * SLOT + HALF, HALF);
            assert!(beyond.iter().all(|b| *b == FILL), "written behind the region of slot {n}");
            if let Some(frozen) = &slot.frozen {
                assert!(*frozen == self.memory.read(n * SLOT, HALF), "slot {n} was written, and nobody may");
            }
        }
        let pane = self.memory.read(PANE * SLOT, SLOT);
        assert!(self.shut.as_ref().is_none_or(|shut| *shut == pane), "written, and there is no window");
        let beside = pane.iter().enumerate().filter(|(at, _)| !SHOWN.contains(at));
        assert!(beside.map(|(_, byte)| *byte).all(|byte| byte == FILL), "written beside every window");
    }

    fn end(mut self) {
        self.world.disconnect(B);
        self.world.settle();
        self.completions();
        let shared = self.world.end(B).srq.is_some();
        let state = QpModify { state: Some(QpState::Err), ..QpModify::default() };
        let could = self.world.end(B).core.modify(&state).is_ok();
        self.world.settle();
        self.completions();
        self.check_frozen();
        if could {
            assert!(self.sends.iter().all(|(_, certain)| !certain), "{:?} never completed", self.sends);
            // Shared receives are the other queue pairs' too.
            assert!(shared || self.recvs.is_empty(), "receives {:?} never completed", self.recvs);
        }
        self.take_back();
        let told = self.world.end(B).disconnected.len();
        assert!(told <= 1, "the end was told {told} times");
    }

    /// RESET takes away what the queue pair has bound; then everything else can go.
    fn take_back(&mut self) {
        let reset = QpModify { state: Some(QpState::Reset), ..QpModify::default() };
        self.world.end(B).core.modify(&reset).expect("always allowed");
        for (key, kind) in self.windows.iter().zip(WINDOWS) {
            let bound = key.is_some_and(|key| MrCache::default().find(key).is_some());
            assert!(!bound || kind == WindowType::One, "a window of type 2 is there after RESET");
        }
        (0..WINDOWS.len()).for_each(|n| self.deallocate(n));
        let regions = self.slots.iter().filter_map(|slot| slot.region.as_ref());
        for region in regions.chain([&self.pane]) {
            assert!(region.deregister(), "a region has windows that are gone");
        }
    }
}

/// The process knows all windows, and millions of runs are in one.
impl Drop for Run {
    fn drop(&mut self) {
        (0..WINDOWS.len()).for_each(|n| self.deallocate(n));
    }
}
