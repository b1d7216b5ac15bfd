//! The queue pair that the scripted peer speaks to.

use std::sync::Arc;

use uwarp_rnic::qp::{Disconnect, QpModify, StreamParams};
use uwarp_rnic::{Access, EventKind, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus};
use uwarp_sim::Side::B;
use uwarp_sim::{Arena, EndConfig, NetParams, World};

/// Where things lie in the victim's memory.
pub const WRITABLE: usize = 1000;
pub const READABLE: usize = 2000;
pub const SINK: usize = 3000;
pub const RECEIVES: usize = 4000;
pub const LOCAL: usize = 5000;
/// Bytes of each region.
pub const REGION: usize = 256;
/// Bytes of each receive and of each Read.
pub const PIECE: usize = 64;
const GUARD: u8 = 0x5A;

/// A queue pair with every object that an error can be about.
pub struct Victim {
    pub world: World,
    pub memory: Arena,
    /// Rights to write, to read, none for the peer; each with offsets from 0x1000 on.
    pub writable: Arc<Mr>,
    pub readable: Arc<Mr>,
    pub local: Arc<Mr>,
    /// Rights to atomic operations.
    pub atomic: Arc<Mr>,
    /// All rights, but in another protection domain.
    pub foreign: Arc<Mr>,
    /// The key of a region that was deregistered.
    pub dead: u32,
    /// The region of receives and sinks.
    pub own: Arc<Mr>,
    /// Sink STag of the victim's outstanding Read.
    pub sink: u32,
    /// Bytes sent before the answer.
    prologue: usize,
}

/// Offset of the first byte of the regions.
pub const BASE: u64 = 0x1000;

impl Victim {
    /// Receives 100 and 101 are posted, Read 1 is outstanding, Read 2 waits for it.
    pub fn new(params: StreamParams, access: Access) -> Self {
        let mut world = World::new(1, [EndConfig::default(); 2], NetParams::default(), [None, None]);
        let memory = Arena::from_bytes(&[GUARD; 6000]);
        let pd = world.end(B).pd.clone();
        let register = |pd: &Arc<Pd>, at: usize, access| {
            Mr::register(pd, memory.addr(at), REGION as u64, BASE, access | Access::LOCAL_WRITE).unwrap()
        };
        let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let dead = register(&pd, LOCAL, all);
        dead.deregister();
        let victim_own = memory.register(&pd, 0, memory.len(), Access::LOCAL_WRITE);
        let mut victim = Self {
            writable: register(&pd, WRITABLE, Access::REMOTE_WRITE),
            readable: register(&pd, READABLE, Access::REMOTE_READ),
            local: register(&pd, LOCAL, Access::empty()),
            atomic: register(&pd, LOCAL, Access::REMOTE_ATOMIC),
            foreign: register(&Pd::new(), WRITABLE, all),
            dead: dead.stag(),
            own: victim_own,
            sink: 0,
            prologue: 0,
            world,
            memory,
        };
        let end = victim.world.end(B);
        end.init();
        end.core.modify(&QpModify { access: Some(access), ..QpModify::default() }).unwrap();
        end.attach(params).unwrap();
        for n in 0..2 {
            let sge = victim.sge(RECEIVES + n * PIECE);
            let wr = RecvWr { wr_id: 100 + n as u64, sges: &[sge] };
            victim.world.post_recv(B, &wr).unwrap();
        }
        for n in 0..2 {
            let sge = victim.sge(SINK + n * PIECE);
            let op = SendOp::Read { stag: 0x1234, to: 0, invalidate_local: false };
            let wr = SendWr { wr_id: 1 + n as u64, op, flags: SendFlags::SIGNALED, sges: &[sge] };
            victim.world.post_send(B, &wr).unwrap();
        }
        let sent = victim.sent();
        // Length, DDP header of 18 bytes, then the sink's STag.
        victim.sink = u32::from_be_bytes(sent[20..24].try_into().unwrap());
        victim.prologue = sent.len();
        victim
    }

    /// Bytes that it has sent so far do not count as an answer.
    pub fn forget_sent(&mut self) {
        self.prologue = self.sent().len();
    }

    fn sge(&self, at: usize) -> Sge {
        Sge { addr: self.memory.addr(at), length: PIECE as u32, lkey: self.own.stag() }
    }

    /// All bytes it has sent.
    pub fn sent(&self) -> Vec<u8> {
        self.world.pipe(B).tapped().iter().flat_map(|(_, bytes)| bytes.clone()).collect()
    }

    /// Bytes of its first Read Request, as an FPDU.
    pub fn request_len() -> usize {
        2 + 18 + 28 + 4
    }

    /// Ranges that differ from the guard, as offset and length.
    pub fn written(&self) -> Vec<(usize, usize)> {
        let bytes = self.memory.snapshot();
        let mut out: Vec<(usize, usize)> = Vec::new();
        for (at, byte) in bytes.iter().enumerate() {
            if *byte != GUARD {
                match out.last_mut() {
                    Some((start, len)) if *start + *len == at => *len += 1,
                    _ => out.push((at, 1)),
                }
            }
        }
        out
    }

    /// Its state after the run.
    pub fn outcome(&mut self) -> Outcome {
        let answer = self.sent().split_off(self.prologue);
        let written = self.written();
        let end = self.world.end(B);
        let short = |list: Vec<uwarp_rnic::Wc>| list.into_iter().map(|wc| (wc.wr_id, wc.status)).collect();
        Outcome {
            answer,
            written,
            events: end.events.kinds(),
            sends: short(end.sends()),
            recvs: short(end.recvs()),
            reported: end.disconnected.clone(),
        }
    }
}

/// The state of a victim after a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Bytes that it sent after its Read Request.
    pub answer: Vec<u8>,
    /// Where its memory was written: offset and length.
    pub written: Vec<(usize, usize)>,
    pub events: Vec<EventKind>,
    pub sends: Vec<(u64, WcStatus)>,
    pub recvs: Vec<(u64, WcStatus)>,
    pub reported: Vec<Disconnect>,
}
