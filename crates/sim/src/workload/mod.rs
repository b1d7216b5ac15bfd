//! Lists of work requests, run over a [`World`] and compared with a model.
//!
//! A [`Plan`] is plain data, so that a property test can shrink it and a fuzzer can make it from bytes; every
//! value of every field is a legal plan. [`run`] executes it and panics when something is not as it must be:
//! - without a fault: both memories are what the model says, byte for byte; each signalled work request and
//!   each receive completes once, successfully, in order, with the right length; others not at all;
//! - with one: everything that was posted completes once, successfully or not; what completed successfully is
//!   right; nothing outside the buffers was written; nothing hangs.

mod bytes;
mod check;
mod layout;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use uwarp_proto::framing::{Framing, Mpa};
use uwarp_rnic::qp::{QpCaps, QpModify, QpState, Rtr, StreamParams};
use uwarp_rnic::{Access, RecvWr, SendFlags, SendOp, SendWr, Sge, VerbsError, Wc, mr};

use crate::end::EndConfig;
use crate::net::{Fault, NetParams};
use crate::world::Program;
use crate::{Arena, Rng, Side, Time, World};

use layout::{Built, Layout};

/// A whole run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Network, data and order of events.
    pub seed: u64,
    /// What was negotiated.
    pub stream: StreamPlan,
    /// How the network behaves.
    pub net: NetParams,
    /// What goes wrong from A to B, and from B to A.
    pub faults: [Option<Fault>; 2],
    /// What a program does in the middle.
    pub abort: Option<(Time, Abort)>,
    /// Queue sizes of both ends.
    pub caps: QpCaps,
    /// Receives come from a shared receive queue at both ends, of the size that the queue pair's own would
    /// have.
    pub shared_recv: bool,
    /// One region for all memory of an end; otherwise one for each piece, with no more rights than needed.
    pub one_region: bool,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// What is posted, in this order at each end.
    pub ops: Vec<Op>,
}

/// What was negotiated for the stream.
#[derive(Debug, Clone)]
pub struct StreamPlan {
    /// CRCs are on.
    pub crc: bool,
    /// Markers from A to B, from B to A.
    pub markers: [bool; 2],
    /// Both ends know the other as uwarp.
    pub uwarp: bool,
    /// Completions wait for placement: between uwarp ends, and toward strangers where there is a read depth
    /// to ask with.
    pub acks: bool,
    /// Segment size toward strangers.
    pub emss: u32,
    /// Ready-to-receive frame: none, Write, Read.
    pub rtr: u8,
    /// Inbound read depth of A, of B; a ready-to-receive Read needs one.
    pub ird: [u16; 2],
    /// Outbound read depth of A, of B, before it is cut to the peer's inbound one.
    pub ord: [u16; 2],
    /// Message sequence numbers start this far below their wrap; 0: at 1, as they should.
    pub msn_to_wrap: u32,
}

impl Default for StreamPlan {
    fn default() -> Self {
        Self {
            crc: true,
            markers: [false; 2],
            uwarp: true,
            acks: false,
            emss: 1460,
            rtr: 1,
            ird: [16; 2],
            ord: [16; 2],
            msn_to_wrap: 0,
        }
    }
}

impl StreamPlan {
    /// What each end is told.
    pub fn params(&self) -> [StreamParams; 2] {
        let rtr = match self.rtr % 3 {
            0 => [Rtr::None; 2],
            1 => [Rtr::SendWrite, Rtr::Expect],
            _ => [Rtr::SendRead, Rtr::Expect],
        };
        Side::BOTH.map(|side| {
            let (me, peer) = (side.index(), side.peer().index());
            StreamParams {
                initiator: side == Side::A,
                framing: Framing::Mpa(Mpa {
                    crc: self.crc,
                    send_markers: self.markers[me],
                    receive_markers: self.markers[peer],
                }),
                ird: self.ird[me],
                ord: self.ord[me].min(self.ird[peer]),
                peer_is_uwarp: self.uwarp,
                emss: self.emss,
                rtr: rtr[me],
                wait_first_frame: rtr[me] == Rtr::Expect,
                first_frame_delay: Duration::ZERO,
                nudge_after: None,
                rnr_timeout: None,
                placement_acks: self.acks && self.uwarp,
                placement_reads: self.acks,
                // The views in which completion means placement.
                infiniband: self.acks,
                ..StreamParams::default()
            }
        })
    }
}

impl Plan {
    /// A bit flips and nobody can see it.
    fn damaged_without_crc(&self) -> bool {
        !self.stream.crc && self.faults.iter().flatten().any(|f| matches!(f, Fault::Flip { .. }))
    }

    /// The same plan with what cannot be brought into range.
    fn bounded(&self) -> Self {
        let mut plan = self.clone();
        plan.net.piece = plan.net.piece.max(1);
        plan.net.capacity = plan.net.capacity.max(256);
        let caps = &mut plan.caps;
        for most in
            [&mut caps.max_send_wr, &mut caps.max_recv_wr, &mut caps.max_send_sge, &mut caps.max_recv_sge]
        {
            *most = (*most).max(1);
        }
        // The ready-to-receive Read goes out when the stream begins, with the first number there is.
        if plan.stream.msn_to_wrap > 0 && plan.stream.rtr % 3 == 2 {
            plan.stream.rtr = 1;
        }
        let params = plan.stream.params();
        for op in &mut plan.ops {
            // Refused when it is posted, which has a test of its own.
            if op.kind.wants_uwarp() && !plan.stream.uwarp {
                op.kind = if op.kind.is_send() { Kind::Send } else { Kind::Write };
            }
            // No read depth is an error of its own, with a test of its own.
            if op.kind.is_answered() && params[op.side.index()].ord == 0 {
                op.kind = Kind::Write;
            }
        }
        plan
    }
}

/// What a program does in the middle of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abort {
    /// An orderly end, before all is done perhaps.
    Disconnect(Side),
    /// The queue pair is moved to ERR.
    Error(Side),
    /// The queue pair is moved to RESET: what was posted is dropped without completions.
    Reset(Side),
    /// A region is deregistered, by its number; refused while a window is bound to it.
    Deregister(Side, u16),
    /// A memory window is deallocated, or invalidated if it is of type 2 and the number is odd.
    Unbind(Side, u16),
}

/// A work request, and the receive for it at the peer if it is a Send.
#[derive(Debug, Clone)]
pub struct Op {
    /// Who posts it.
    pub side: Side,
    /// What it is.
    pub kind: Kind,
    /// Bytes.
    pub len: u32,
    /// Where local memory is cut into pieces, in 65,536ths of the length.
    pub cuts: Vec<u16>,
    /// The same for the peer's receive.
    pub peer_cuts: Vec<u16>,
    /// Bytes by which the receive is longer than the message.
    pub slack: u16,
    /// Makes a completion.
    pub signaled: bool,
    /// Waits for earlier Reads; sends what the Read right before has brought.
    pub fence: bool,
    /// Asks for an event.
    pub solicited: bool,
    /// Posted inline if it is short enough.
    pub inline: bool,
    /// Names the peer's memory by a window that the peer binds for it. A Send with Invalidate right behind
    /// then invalidates a window of type 2.
    pub window: Option<WindowPlan>,
    /// Posted no earlier than this.
    pub at: Time,
    /// Its receive is posted no earlier than this.
    pub recv_at: Time,
}

/// A memory window for one work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowPlan {
    /// Of type 2.
    pub two: bool,
    /// Its offsets count from zero.
    pub zero_based: bool,
    /// It is bound before, under another key: type 1 bound over, type 2 invalidated in between.
    pub again: bool,
}

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Send.
    Send,
    /// Send with Invalidate.
    SendInvalidate,
    /// Send with immediate data.
    SendImmediate,
    /// RDMA Write.
    Write,
    /// RDMA Write with immediate data.
    WriteImmediate,
    /// RDMA Read.
    Read,
    /// RDMA Read that invalidates its sink's key.
    ReadInvalidate,
    /// Invalidation of a local key.
    LocalInvalidate,
    /// Atomic fetch-and-add.
    FetchAdd,
    /// Atomic compare-and-swap that finds what it expects.
    CmpSwap,
    /// Atomic compare-and-swap that does not.
    CmpSwapDiffers,
}

impl Kind {
    /// Whether it takes a receive at the peer.
    pub fn takes_receive(self) -> bool {
        self.is_send() || self == Self::WriteImmediate
    }

    /// Whether what it brings goes to a receive.
    pub fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendInvalidate | Self::SendImmediate)
    }

    /// Whether only another uwarp end takes it.
    pub fn wants_uwarp(self) -> bool {
        self.has_immediate() || self.is_atomic()
    }

    /// Whether immediate data comes with it.
    pub fn has_immediate(self) -> bool {
        matches!(self, Self::SendImmediate | Self::WriteImmediate)
    }

    /// Whether it is an atomic operation.
    pub fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd | Self::CmpSwap | Self::CmpSwapDiffers)
    }

    /// Whether the peer answers it.
    pub fn is_answered(self) -> bool {
        self.is_read() || self.is_atomic()
    }

    /// Whether it is an RDMA Read.
    pub fn is_read(self) -> bool {
        matches!(self, Self::Read | Self::ReadInvalidate)
    }
}

/// What came of a run.
pub struct Report {
    /// The world at its end.
    pub world: World,
    /// A fault happened while the programs worked.
    pub fault_hit: bool,
    /// Or when they had disconnected: what went out then (a last acknowledgement) was hit.
    pub fault_hit_late: bool,
    /// Completions of sends at A, at B.
    pub sends: [Vec<Wc>; 2],
    /// Completions of receives at A, at B.
    pub recvs: [Vec<Wc>; 2],
}

/// First `wr_id` of receives; sends count from 0.
pub const RECV_ID: u64 = 1 << 32;

/// Executes a plan and checks what came of it.
///
/// # Panics
/// When something is not as it must be; the seed is printed.
pub fn run(plan: &Plan) -> Report {
    let plan = &plan.bounded();
    let mut rng = Rng::new(plan.seed ^ 0x5EED);
    let qpns = queue_pair_numbers();
    let config = Side::BOTH.map(|side| EndConfig {
        caps: plan.caps,
        shared_recv: plan.shared_recv,
        sq_sig_all: plan.sq_sig_all,
        // A program that polls when it is throttled cannot overrun it.
        cq_depth: None,
        qpn: qpns[side.index()],
    });
    let mut world = World::new(plan.seed, config, plan.net, plan.faults);
    let pds = Side::BOTH.map(|side| world.end(side).pd.clone());
    let mut layout = Layout::new(plan, &pds, qpns, &mut rng);
    for side in Side::BOTH {
        world.end(side).init();
    }
    world.attach(plan.stream.params());
    let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    for side in Side::BOTH {
        let grant = QpModify { access: Some(all), ..QpModify::default() };
        world.end(side).core.modify(&grant).expect("rights can always be changed");
    }
    if plan.stream.msn_to_wrap > 0 {
        let msn = 0u32.wrapping_sub(plan.stream.msn_to_wrap);
        for side in Side::BOTH {
            world.end(side).core.set_msn(msn);
        }
    }
    let mut programs = Programs {
        plan,
        layout: &layout,
        next_send: [0; 2],
        next_recv: [0; 2],
        aborted: false,
        frozen: None,
        sends: Default::default(),
        recvs: Default::default(),
    };
    world.run(&mut programs);
    let (posted, received) = (programs.next_send, programs.next_recv);

    let Programs { sends, recvs, frozen, .. } = programs;
    let mut report = Report { fault_hit: false, fault_hit_late: false, sends, recvs, world };
    report.collect();
    report.fault_hit = report.any_fault_hit();
    let disturbed = report.disturbed(plan);
    if !disturbed {
        check::complete(plan, &layout, &report, posted, received);
    }
    // Every run ends with an orderly end, begun by A, by both, or by the one whose bytes were damaged: who
    // waits for the rest of an FPDU that was none then sees that no more comes.
    for side in Side::BOTH {
        let damaged = |side: Side| matches!(plan.faults[side.index()], Some(Fault::Flip { .. }));
        let begins = if plan.faults.iter().flatten().count() == 1 && Side::BOTH.into_iter().any(damaged) {
            damaged(side)
        } else {
            disturbed || side == Side::A
        };
        if begins {
            report.world.disconnect(side);
        }
    }
    report.world.settle();
    // A queue pair whose peer has gone stays as it is until its program reacts.
    for side in Side::BOTH {
        let end = report.world.end(side);
        if matches!(end.core.query().state, QpState::Rts | QpState::Sqd) {
            assert!(plan.stream.acks && end.is_closed());
            report.world.disconnect(side);
        }
    }
    report.collect();
    report.fault_hit_late = !report.fault_hit && report.any_fault_hit();
    check::ended(plan, &layout, &mut report, posted, received);
    if !plan.damaged_without_crc() {
        check::frozen(&layout, frozen);
    }
    layout.take_back();
    report
}

/// No other run of the process has these: a RESET takes away the windows of its queue pair's number.
pub(crate) fn queue_pair_numbers() -> [u32; 2] {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let first = 0x1_0000 + (LAST.fetch_add(1, Ordering::Relaxed) % 0x7F_0000) * 2;
    [first, first + 1]
}

impl Report {
    /// Whether anything was not as in a quiet run.
    fn disturbed(&self, plan: &Plan) -> bool {
        self.fault_hit || self.fault_hit_late || plan.abort.is_some()
    }

    fn any_fault_hit(&self) -> bool {
        Side::BOTH.iter().any(|side| self.world.pipe(*side).fault_hit())
    }

    fn collect(&mut self) {
        for side in Side::BOTH {
            let end = self.world.end(side);
            let (sends, recvs) = (end.sends(), end.recvs());
            self.sends[side.index()].extend(sends);
            self.recvs[side.index()].extend(recvs);
        }
    }
}

/// The programs at both ends: they post what the plan says as soon as it says and the queue has room. They
/// poll only when it has none.
struct Programs<'a> {
    plan: &'a Plan,
    layout: &'a Layout,
    /// How many of each end's work requests and receives are posted.
    next_send: [usize; 2],
    next_recv: [usize; 2],
    aborted: bool,
    /// What only a window that is gone had made writable.
    frozen: Option<layout::Frozen>,
    /// What they have polled.
    sends: [Vec<Wc>; 2],
    recvs: [Vec<Wc>; 2],
}

impl Programs<'_> {
    fn send(&self, side: Side) -> Option<&Built> {
        self.layout.sends[side.index()].get(self.next_send[side.index()])
    }

    fn recv(&self, side: Side) -> Option<&Built> {
        self.layout.recvs[side.index()].get(self.next_recv[side.index()])
    }

    fn post_send(&self, world: &mut World, side: Side) -> Result<(), VerbsError> {
        let Some(built) = self.send(side) else { return Ok(()) };
        let wr = SendWr {
            wr_id: self.next_send[side.index()] as u64,
            op: built.op,
            flags: built.flags,
            sges: &built.sges,
        };
        world.post_send(side, &wr)
    }

    fn post_recv(&self, world: &mut World, side: Side) -> Result<(), VerbsError> {
        let Some(built) = self.recv(side) else { return Ok(()) };
        let wr = RecvWr { wr_id: RECV_ID + self.next_recv[side.index()] as u64, sges: &built.sges };
        world.post_recv(side, &wr)
    }

    /// Whether its turn has come: it names no window, or the peer has bound that and said so.
    fn is_due(&self, built: &Built, now: Time) -> bool {
        let bound = |key| self.aborted || layout::is_valid(key);
        built.at <= now && built.after.is_none_or(bound)
    }

    fn abort(&mut self, world: &mut World, abort: Abort) {
        let to = |state| QpModify { state: Some(state), ..QpModify::default() };
        match abort {
            Abort::Disconnect(side) => world.disconnect(side),
            Abort::Error(side) => world.end(side).core.modify(&to(QpState::Err)).expect("always allowed"),
            Abort::Reset(side) => {
                world.end(side).core.modify(&to(QpState::Reset)).expect("always allowed");
                check::no_window_of_type_2(self.layout, side);
            }
            Abort::Deregister(side, number) => {
                let regions = &self.layout.regions[side.index()];
                if let Some(mr) = regions.get(usize::from(number) % regions.len().max(1)) {
                    let gone = mr.deregister();
                    assert_ne!(
                        gone,
                        layout::is_valid(mr.stag()),
                        "a region is gone, or has windows and stays"
                    );
                }
            }
            Abort::Unbind(side, number) => {
                let windows = &self.layout.windows[side.index()];
                let Some(window) = windows.get(usize::from(number) % windows.len().max(1)) else { return };
                let end = world.end(side);
                if window.two && number % 2 == 1 {
                    if mr::invalidate(window.key, end.pd.id(), end.core.qpn()).is_err() {
                        // Not bound yet, or not any more.
                        return;
                    }
                } else {
                    mr::remove_window(window.key);
                }
                assert!(!layout::is_valid(window.key), "the window is still there");
                self.frozen = Some(self.layout.freeze(side, window.area));
            }
        }
    }
}

impl Program for Programs<'_> {
    fn step(&mut self, world: &mut World) -> bool {
        let mut did = false;
        if let Some((at, abort)) = self.plan.abort
            && !self.aborted
            && at <= world.now()
        {
            self.aborted = true;
            self.abort(world, abort);
            did = true;
        }
        for side in Side::BOTH {
            while self.recv(side).is_some_and(|b| b.at <= world.now()) {
                match self.post_recv(world, side) {
                    Ok(()) => self.next_recv[side.index()] += 1,
                    Err(VerbsError::QueueFull) => {
                        let polled = world.end(side).recvs();
                        if polled.is_empty() {
                            break;
                        }
                        self.recvs[side.index()].extend(polled);
                    }
                    Err(e) => {
                        assert_eq!(world.end(side).core.query().state, QpState::Reset, "{e}");
                        break;
                    }
                }
                did = true;
            }
            while self.send(side).is_some_and(|b| self.is_due(b, world.now())) {
                match self.post_send(world, side) {
                    Ok(()) => self.next_send[side.index()] += 1,
                    Err(VerbsError::QueueFull) => {
                        let polled = world.end(side).sends();
                        if polled.is_empty() {
                            break;
                        }
                        self.sends[side.index()].extend(polled);
                    }
                    Err(VerbsError::NotSupported(_)) if self.plan.damaged_without_crc() => {
                        // The bit was one of the peer's introduction: it is taken for a stranger.
                        break;
                    }
                    Err(e) => {
                        assert_eq!(world.end(side).core.query().state, QpState::Reset, "{e}");
                        break;
                    }
                }
                did = true;
            }
        }
        did
    }

    fn wake(&self, now: Time) -> Option<Time> {
        let abort = self.plan.abort.filter(|_| !self.aborted).map(|(at, _)| at);
        let posts = Side::BOTH.into_iter().flat_map(|side| [self.send(side), self.recv(side)]).flatten();
        posts.map(|built| built.at).chain(abort).filter(|at| *at > now).min()
    }
}

/// Rights that fit the use of a piece of memory.
fn rights(kind: Kind, remote: bool) -> Access {
    match (kind, remote) {
        (Kind::Write | Kind::WriteImmediate, true) => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        (Kind::Read | Kind::ReadInvalidate, true) => Access::REMOTE_READ,
        (kind, true) if kind.is_atomic() => Access::LOCAL_WRITE | Access::REMOTE_ATOMIC,
        (
            Kind::Send | Kind::SendInvalidate | Kind::SendImmediate | Kind::Write | Kind::WriteImmediate,
            false,
        ) => Access::empty(),
        _ => Access::LOCAL_WRITE,
    }
}
