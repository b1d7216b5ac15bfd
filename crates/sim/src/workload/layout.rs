//! Where the memory of each work request lies, and what the model says it holds in the end.

use std::sync::Arc;

use super::{Arena, Kind, Op, Plan, SendFlags, SendOp, Sge, Time, WindowPlan, rights};
use crate::{Rng, Side};
use uwarp_rnic::mr::{self, Bind, MrCache, WindowType};
use uwarp_rnic::{Access, Mr, Pd};

/// Byte that fills what nobody may write.
const GUARD: u8 = 0xA5;

/// A stretch of an end's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Area {
    pub at: usize,
    pub len: usize,
}

/// A work request, ready to be posted.
#[derive(Debug)]
pub(super) struct Built {
    /// Which of the plan's operations it belongs to.
    pub index: usize,
    /// It is that operation itself, or its receive. Otherwise it is about a window that the operation names.
    pub own: bool,
    /// Not posted before this key is good.
    pub after: Option<u32>,
    pub op: SendOp,
    pub flags: SendFlags,
    pub sges: Vec<Sge>,
    pub at: Time,
}

/// What an operation does to memory.
#[derive(Debug)]
pub(super) struct Effect {
    /// Who is written to, where, and with what in the end.
    pub side: Side,
    pub areas: Vec<Area>,
    pub data: Vec<u8>,
    /// The word of the peer's that an atomic operation has changed, and its new value.
    pub word: Option<(Area, [u8; 8])>,
    /// A key that must be invalid afterwards.
    pub invalidates: Option<u32>,
    /// The window through which it is done, if it is of type 2 and nothing has invalidated it.
    pub window: Option<u32>,
    /// What comes with it.
    pub imm: Option<[u8; 4]>,
    /// Bytes of the message.
    pub len: u32,
}

impl Effect {
    fn new(side: Side, len: u32) -> Self {
        Self {
            side,
            areas: vec![],
            data: vec![],
            word: None,
            invalidates: None,
            window: None,
            imm: None,
            len,
        }
    }
}

/// A memory window that an end binds.
pub(super) struct Window {
    pub key: u32,
    pub two: bool,
    /// What it shows.
    pub area: Area,
    /// A Send with Invalidate takes it away.
    pub invalidated: bool,
}

/// What an area held when nobody could write it any more.
pub(super) struct Frozen {
    pub side: Side,
    pub area: Area,
    pub bytes: Vec<u8>,
}

/// Both memories and everything that is to be posted.
pub(super) struct Layout {
    pub arenas: [Arena; 2],
    pub initial: [Vec<u8>; 2],
    pub sends: [Vec<Built>; 2],
    pub recvs: [Vec<Built>; 2],
    pub effects: Vec<Effect>,
    pub regions: [Vec<Arc<Mr>>; 2],
    pub windows: [Vec<Window>; 2],
    pub qpns: [u32; 2],
}

/// Whether a key names something.
pub(super) fn is_valid(key: u32) -> bool {
    MrCache::default().find(key).is_some()
}

/// The process knows all windows, and millions of simulations run in one.
impl Drop for Layout {
    fn drop(&mut self) {
        self.windows.iter().flatten().for_each(|window| mr::remove_window(window.key));
    }
}

/// Hands out areas with guard bytes between them.
#[derive(Default)]
struct Allocator {
    end: usize,
}

impl Allocator {
    /// Eight bytes where an atomic operation may work.
    fn take_word(&mut self, rng: &mut Rng) -> Area {
        self.end = (self.end + rng.size(1, 40)).next_multiple_of(8);
        let area = Area { at: self.end, len: 8 };
        self.end += area.len;
        area
    }

    fn take(&mut self, len: usize, rng: &mut Rng) -> Area {
        self.end += rng.size(1, 40);
        let area = Area { at: self.end, len };
        self.end += len;
        area
    }

    /// Pieces of `len` bytes in all, cut at `cuts`, in random places relative to each other.
    fn pieces(&mut self, len: usize, cuts: &[u16], most: usize, rng: &mut Rng) -> Vec<Area> {
        let mut at: Vec<usize> = cuts.iter().map(|c| len * usize::from(*c) / 65_536).collect();
        at.truncate(most.saturating_sub(1));
        at.sort_unstable();
        at.push(len);
        let mut start = 0;
        let mut pieces: Vec<Area> = Vec::new();
        for end in at {
            pieces.push(Area { at: 0, len: end - start });
            start = end;
        }
        // Placed back to front now and then, so that order in the list is not order in memory.
        let reverse = rng.chance(500);
        let count = pieces.len();
        for i in 0..count {
            let i = if reverse { count - 1 - i } else { i };
            pieces[i] = self.take(pieces[i].len, rng);
        }
        pieces
    }
}

/// An operation's memory before arenas exist.
struct Placed {
    local: Vec<Area>,
    remote: Option<Area>,
    recv: Vec<Area>,
    len: usize,
    /// Sends what this earlier operation has read.
    chained: Option<usize>,
}

impl Layout {
    pub fn new(plan: &Plan, pds: &[Arc<Pd>; 2], qpns: [u32; 2], rng: &mut Rng) -> Self {
        let mut allocators = [Allocator::default(), Allocator::default()];
        let (send_sge, recv_sge) = (plan.caps.max_send_sge as usize, plan.caps.max_recv_sge as usize);
        let mut placed: Vec<Placed> = Vec::new();
        for (index, op) in plan.ops.iter().enumerate() {
            placed.push(place(plan, index, op, &placed, &mut allocators, rng, send_sge, recv_sge));
        }
        let arenas = [0, 1].map(|i| Arena::new(allocators[i].end + 40));
        let mut layout = Self {
            initial: [0, 1].map(|i: usize| vec![GUARD; arenas[i].len()]),
            arenas,
            sends: [vec![], vec![]],
            recvs: [vec![], vec![]],
            effects: vec![],
            regions: [vec![], vec![]],
            windows: [vec![], vec![]],
            qpns,
        };
        if plan.one_region {
            for side in Side::BOTH {
                let all = Area { at: 0, len: layout.arenas[side.index()].len() };
                let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
                let access = Access::LOCAL_WRITE | Access::MW_BIND | remote;
                layout.register(pds, side, all, access);
            }
        }
        for (index, op) in plan.ops.iter().enumerate() {
            layout.build(plan, pds, rng, index, op, &placed);
        }
        for side in Side::BOTH {
            let i = side.index();
            layout.arenas[i].write(0, &layout.initial[i]);
            // A later one is not posted before an earlier one.
            for list in [&mut layout.sends[i], &mut layout.recvs[i]] {
                let mut at = 0;
                for built in list {
                    at = built.at.max(at);
                    built.at = at;
                }
            }
        }
        layout
    }

    fn register(&mut self, pds: &[Arc<Pd>; 2], side: Side, area: Area, access: Access) -> Arc<Mr> {
        let i = side.index();
        let mr = self.arenas[i].register(&pds[i], area.at, area.len, access);
        self.regions[i].push(mr.clone());
        mr
    }

    /// The region for an area: the one for all, or one of its own.
    fn region(&mut self, plan: &Plan, pds: &[Arc<Pd>; 2], side: Side, area: Area, access: Access) -> Arc<Mr> {
        match self.regions[side.index()].first() {
            Some(all) if plan.one_region => all.clone(),
            _ => self.register(pds, side, area, access),
        }
    }

    fn sges(
        &mut self,
        plan: &Plan,
        pds: &[Arc<Pd>; 2],
        side: Side,
        areas: &[Area],
        access: Access,
    ) -> Vec<Sge> {
        let mut sges = Vec::new();
        for area in areas {
            let lkey = self.region(plan, pds, side, *area, access).stag();
            let length = u32::try_from(area.len).expect("lengths are small");
            sges.push(Sge { addr: self.arenas[side.index()].addr(area.at), length, lkey });
        }
        sges
    }

    fn fill(&mut self, side: Side, areas: &[Area], rng: &mut Rng) -> Vec<u8> {
        let mut data = Vec::new();
        for area in areas {
            let mut bytes = vec![0; area.len];
            rng.fill(&mut bytes);
            self.initial[side.index()][area.at..area.at + area.len].copy_from_slice(&bytes);
            data.extend(bytes);
        }
        data
    }

    fn build(
        &mut self,
        plan: &Plan,
        pds: &[Arc<Pd>; 2],
        rng: &mut Rng,
        index: usize,
        op: &Op,
        all: &[Placed],
    ) {
        let (side, peer) = (op.side, op.side.peer());
        let placed = &all[index];
        let len = u32::try_from(placed.len).expect("lengths are small");
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, op.signaled);
        flags.set(SendFlags::FENCE, op.fence);
        flags.set(SendFlags::SOLICITED, op.solicited && op.kind.takes_receive());
        let inline = op.inline
            && placed.len <= plan.caps.max_inline_data as usize
            && placed.chained.is_none()
            && !op.kind.is_answered()
            && op.kind != Kind::LocalInvalidate;
        flags.set(SendFlags::INLINE, inline);
        let mut effect = Effect::new(peer, len);
        if op.kind.has_immediate() {
            let mut imm = [0; 4];
            rng.fill(&mut imm);
            effect.imm = Some(imm);
        }

        // What goes over the wire: filled in now, or read by the operation before.
        if !op.kind.is_answered() && op.kind != Kind::LocalInvalidate {
            effect.data = match placed.chained {
                Some(read) => self.effects[read].data[..placed.len].to_vec(),
                None => self.fill(side, &placed.local, rng),
            };
        }
        let mut sges = self.sges(plan, pds, side, &placed.local, rights(op.kind, false));
        if inline {
            // Inline data needs no key.
            for sge in &mut sges {
                sge.lkey = 0;
            }
        }
        let operation = self.operation(plan, pds, rng, op, placed, &mut effect);
        if matches!(operation, SendOp::Read { invalidate_local: true, .. }) {
            effect.invalidates = sges.first().map(|s| s.lkey);
        }
        if op.kind == Kind::LocalInvalidate {
            sges.clear();
        }
        if op.kind.takes_receive() {
            let recv_sges = self.sges(plan, pds, peer, &placed.recv, Access::LOCAL_WRITE);
            if op.kind.is_send() {
                effect.areas.clone_from(&placed.recv);
            }
            self.recvs[peer.index()].push(Built {
                index,
                own: true,
                after: None,
                op: operation,
                flags,
                sges: recv_sges,
                at: op.recv_at,
            });
        }
        let after = self.named_window(peer, operation);
        self.sends[side.index()].push(Built {
            index,
            own: true,
            after,
            op: operation,
            flags,
            sges,
            at: op.at,
        });
        self.effects.push(effect);
    }

    /// The operation itself; what only it does goes into `effect`.
    fn operation(
        &mut self,
        plan: &Plan,
        pds: &[Arc<Pd>; 2],
        rng: &mut Rng,
        op: &Op,
        placed: &Placed,
        effect: &mut Effect,
    ) -> SendOp {
        let (side, peer) = (op.side, op.side.peer());
        match op.kind {
            Kind::Send => SendOp::Send { invalidate: None },
            Kind::SendInvalidate => {
                let window = self.window_right_before(plan, op);
                let spare = Area { at: 0, len: 1 };
                let key =
                    window.unwrap_or_else(|| self.register(pds, peer, spare, Access::REMOTE_READ).stag());
                effect.invalidates = Some(key);
                SendOp::Send { invalidate: Some(key) }
            }
            Kind::SendImmediate => SendOp::SendImmediate { imm: effect.imm.unwrap_or_default() },
            Kind::Write | Kind::WriteImmediate => {
                let area = placed.remote.expect("a Write has a target");
                effect.areas = vec![area];
                let (stag, to) = self.target(plan, pds, rng, op, area, effect);
                match effect.imm {
                    Some(imm) => SendOp::WriteImmediate { stag, to, imm },
                    None => SendOp::Write { stag, to },
                }
            }
            Kind::Read | Kind::ReadInvalidate => {
                let area = placed.remote.expect("a Read has a source");
                effect.data = self.fill(peer, &[area], rng);
                effect.areas.clone_from(&placed.local);
                effect.side = side;
                let (stag, to) = self.target(plan, pds, rng, op, area, effect);
                let invalidate_local = op.kind == Kind::ReadInvalidate && !plan.one_region;
                SendOp::Read { stag, to, invalidate_local }
            }
            Kind::FetchAdd | Kind::CmpSwap | Kind::CmpSwapDiffers => {
                let area = placed.remote.expect("an atomic operation has a target");
                effect.data = self.fill(peer, &[area], rng);
                effect.areas.clone_from(&placed.local);
                effect.side = side;
                let (stag, to) = self.target(plan, pds, rng, op, area, effect);
                let old = u64::from_ne_bytes(effect.data[..].try_into().expect("eight bytes"));
                let operand = rng.draw();
                let compare = if op.kind == Kind::CmpSwap { old } else { !old };
                let (operation, new) = match op.kind {
                    Kind::FetchAdd => {
                        (SendOp::FetchAdd { stag, to, add: operand }, old.wrapping_add(operand))
                    }
                    kind => {
                        let new = if kind == Kind::CmpSwap { operand } else { old };
                        (SendOp::CmpSwap { stag, to, compare, swap: operand }, new)
                    }
                };
                effect.word = Some((area, new.to_ne_bytes()));
                operation
            }
            Kind::LocalInvalidate => {
                let mr = self.register(pds, side, Area { at: 0, len: 1 }, Access::LOCAL_WRITE);
                let stag = mr.stag();
                effect.side = side;
                effect.invalidates = Some(stag);
                SendOp::LocalInvalidate { stag }
            }
        }
    }

    /// By what key and offset an operation names the peer's memory: a region's, or those of a window that the
    /// peer binds for it.
    fn target(
        &mut self,
        plan: &Plan,
        pds: &[Arc<Pd>; 2],
        rng: &mut Rng,
        op: &Op,
        area: Area,
        effect: &mut Effect,
    ) -> (u32, u64) {
        let (peer, needed) = (op.side.peer(), rights(op.kind, true));
        let addr = self.arenas[peer.index()].addr(area.at);
        // A window of no bytes is none.
        let Some(window) = op.window.filter(|_| area.len > 0) else {
            return (self.region(plan, pds, peer, area, needed).stag(), addr);
        };
        let region = self.region(plan, pds, peer, area, Access::LOCAL_WRITE | Access::MW_BIND);
        let mut access = needed - Access::LOCAL_WRITE;
        access.set(Access::ZERO_BASED, window.zero_based);
        let kind = if window.two { WindowType::Two } else { WindowType::One };
        let name = mr::add_window(pds[peer.index()].id(), kind).expect("there are keys");
        let key = name & !0xFF | name.wrapping_add(1) & 0xFF;
        let bind = Bind { key, region: region.stag(), addr, len: area.len as u64, access };
        self.windows[peer.index()].push(Window { key, two: window.two, area, invalidated: false });
        self.bind(op, rng, window, Bind { key: name, ..bind }, bind);
        effect.window = window.two.then_some(key);
        (key, if window.zero_based { 0 } else { addr })
    }

    /// What the peer posts to bind a window: the last bind, and another one before it if the plan wants that.
    fn bind(&mut self, op: &Op, rng: &mut Rng, window: WindowPlan, first: Bind, last: Bind) {
        let mut list = vec![SendOp::Bind(last)];
        if window.again {
            if window.two {
                list.insert(0, SendOp::LocalInvalidate { stag: first.key });
            }
            list.insert(0, SendOp::Bind(first));
        }
        for operation in list {
            let mut flags = SendFlags::empty();
            flags.set(SendFlags::SIGNALED, rng.chance(500));
            flags.set(SendFlags::FENCE, rng.chance(200));
            // Of the operation that is built now.
            let index = self.effects.len();
            let built =
                Built { index, own: false, after: None, op: operation, flags, sges: vec![], at: op.at };
            self.sends[op.side.peer().index()].push(built);
        }
    }

    /// The key of the window of type 2 that the operation right before this one uses, which this one may
    /// invalidate: what is in front of it in the stream is done by then, except answers, which a fence waits
    /// for.
    fn window_right_before(&mut self, plan: &Plan, op: &Op) -> Option<u32> {
        let index = self.effects.len();
        let before = (0..index).rev().find(|i| plan.ops[*i].side == op.side)?;
        if plan.ops[before].kind.is_answered() && !op.fence {
            return None;
        }
        let key = self.effects[before].window.take()?;
        let windows = &mut self.windows[op.side.peer().index()];
        windows.iter_mut().filter(|window| window.key == key).for_each(|window| window.invalidated = true);
        Some(key)
    }

    /// The key of the peer's window that an operation names.
    fn named_window(&self, peer: Side, operation: SendOp) -> Option<u32> {
        let named = match operation {
            SendOp::Write { stag, .. }
            | SendOp::WriteImmediate { stag, .. }
            | SendOp::Read { stag, .. }
            | SendOp::FetchAdd { stag, .. }
            | SendOp::CmpSwap { stag, .. } => stag,
            _ => return None,
        };
        self.windows[peer.index()].iter().map(|window| window.key).find(|key| *key == named)
    }

    /// What an area holds now.
    pub fn freeze(&self, side: Side, area: Area) -> Frozen {
        Frozen { side, area, bytes: self.arenas[side.index()].read(area.at, area.len) }
    }

    /// The programs take everything back: windows, then regions, which no window holds any more.
    pub fn take_back(&mut self) {
        self.windows.iter_mut().flat_map(|list| list.drain(..)).for_each(|w| mr::remove_window(w.key));
        for region in self.regions.iter().flatten() {
            assert!(region.deregister(), "a region has windows that are gone");
        }
    }

    /// What stands in an effect's areas, as long as the message is.
    pub fn found(&self, effect: &Effect) -> Vec<u8> {
        let arena = &self.arenas[effect.side.index()];
        let mut out: Vec<u8> = effect.areas.iter().flat_map(|a| arena.read(a.at, a.len)).collect();
        out.truncate(effect.len as usize);
        out
    }

    /// An end's memory as it was, with these effects applied.
    pub fn model<'a>(&self, side: Side, effects: impl Iterator<Item = &'a Effect>) -> Vec<u8> {
        let mut memory = self.initial[side.index()].clone();
        for effect in effects {
            if let Some((area, new)) = effect.word.filter(|_| effect.side != side) {
                memory[area.at..area.at + area.len].copy_from_slice(&new);
            }
            if effect.side != side {
                continue;
            }
            let mut rest = &effect.data[..];
            for area in &effect.areas {
                let n = area.len.min(rest.len());
                memory[area.at..area.at + n].copy_from_slice(&rest[..n]);
                rest = &rest[n..];
            }
        }
        memory
    }
}

#[allow(clippy::too_many_arguments)]
fn place(
    plan: &Plan,
    index: usize,
    op: &Op,
    before: &[Placed],
    allocators: &mut [Allocator; 2],
    rng: &mut Rng,
    send_sge: usize,
    recv_sge: usize,
) -> Placed {
    let mut len = op.len as usize;
    if op.kind == Kind::LocalInvalidate {
        return Placed { local: vec![], remote: None, recv: vec![], len: 0, chained: None };
    }
    if op.kind.is_atomic() {
        len = 8;
    }
    // A fenced Send or Write right behind a Read sends what that has brought.
    let previous = (0..index).rev().find(|i| plan.ops[*i].side == op.side);
    let chained = previous.filter(|i| {
        op.fence && plan.ops[*i].kind == Kind::Read && !op.kind.is_answered() && before[*i].len > 0
    });
    let [a, b] = allocators;
    let (own, peers) = if op.side == Side::A { (a, b) } else { (b, a) };
    let local = match chained {
        Some(read) => {
            len = len.min(before[read].len);
            head(&before[read].local, len)
        }
        None => own.pieces(len, &op.cuts, send_sge, rng),
    };
    let remote = (!op.kind.is_send())
        .then(|| if op.kind.is_atomic() { peers.take_word(rng) } else { peers.take(len, rng) });
    let recv = if op.kind.takes_receive() {
        peers.pieces(len + usize::from(op.slack), &op.peer_cuts, recv_sge, rng)
    } else {
        vec![]
    };
    Placed { local, remote, recv, len, chained }
}

/// The first `len` bytes of a list of areas.
fn head(areas: &[Area], len: usize) -> Vec<Area> {
    let mut left = len;
    areas
        .iter()
        .map(|a| {
            let n = a.len.min(left);
            left -= n;
            Area { at: a.at, len: n }
        })
        .collect()
}
