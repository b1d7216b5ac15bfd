//! Two connected queue pairs, each with one region over all its memory.

use std::sync::Arc;

use uwarp_mem as mem;
use uwarp_rnic::qp::{Now, QpCaps, Rtr, StreamParams};
use uwarp_rnic::{Access, Mr, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcStatus};
use uwarp_sim::tap;
use uwarp_sim::{Arena, EndConfig, Fault, NetParams, Side, World};

pub const SIZE: usize = 1 << 20;

pub struct Duo {
    pub world: World,
    pub memory: [Arena; 2],
    pub mr: [Arc<Mr>; 2],
}

pub fn all_rights() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ
}

/// Parameters of both ends in most tests.
pub fn params() -> [StreamParams; 2] {
    let a = StreamParams { peer_is_uwarp: true, ..StreamParams::default() };
    [a, StreamParams { initiator: false, ..a }]
}

pub fn with_rtr(rtr: Rtr) -> [StreamParams; 2] {
    let [a, b] = params();
    [StreamParams { rtr, ..a }, StreamParams { rtr: Rtr::Expect, wait_first_frame: true, ..b }]
}

impl Duo {
    pub fn new(params: [StreamParams; 2]) -> Self {
        Self::with_net(params, NetParams::default())
    }

    pub fn with_net(params: [StreamParams; 2], net: NetParams) -> Self {
        Self::make(params, net, 4096, None)
    }

    /// With a fault from A to B.
    pub fn with_fault(params: [StreamParams; 2], net: NetParams, fault: Fault) -> Self {
        Self::make(params, net, 4096, Some(fault))
    }

    pub fn with_cq_depth(params: [StreamParams; 2], depth: u32) -> Self {
        Self::make(params, NetParams::default(), depth, None)
    }

    pub fn with_seed(params: [StreamParams; 2], net: NetParams, seed: u64) -> Self {
        Self::make_from(seed, params, net, 4096, None)
    }

    fn make(params: [StreamParams; 2], net: NetParams, cq_depth: u32, fault: Option<Fault>) -> Self {
        Self::make_from(1, params, net, cq_depth, fault)
    }

    fn make_from(
        seed: u64,
        params: [StreamParams; 2],
        net: NetParams,
        cq_depth: u32,
        fault: Option<Fault>,
    ) -> Self {
        let caps = QpCaps {
            max_send_wr: 64,
            max_recv_wr: 64,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let mut world = World::new(
            seed,
            [EndConfig { caps, cq_depth: Some(cq_depth), ..EndConfig::default() }; 2],
            net,
            [fault, None],
        );
        let memory = [Arena::new(SIZE), Arena::new(SIZE)];
        let mr = world.init(&memory, all_rights());
        world.attach(params);
        Self { world, memory, mr }
    }

    pub fn sge(&self, side: Side, at: usize, len: u32) -> Sge {
        Sge { addr: self.memory[side.index()].addr(at), length: len, lkey: self.mr[side.index()].stag() }
    }

    pub fn write_op(&self, side: Side, at: usize) -> SendOp {
        let peer = side.peer().index();
        SendOp::Write { stag: self.mr[peer].stag(), to: self.memory[peer].addr(at) }
    }

    pub fn read_op(&self, side: Side, at: usize) -> SendOp {
        let peer = side.peer().index();
        SendOp::Read { stag: self.mr[peer].stag(), to: self.memory[peer].addr(at), invalidate_local: false }
    }

    /// Queues without moving a byte.
    pub fn queue(&mut self, side: Side, wr_id: u64, op: SendOp, sge: Sge) {
        let wr = SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: &[sge] };
        self.world.end(side).core.post_send(&wr).unwrap();
    }

    pub fn recv(&mut self, side: Side, wr_id: u64, at: usize, len: u32) {
        let sge = self.sge(side, at, len);
        self.world.post_recv(side, &RecvWr { wr_id, sges: &[sge] }).unwrap();
    }

    /// Queues a Read and returns the bytes of its request instead of sending them.
    pub fn request_bytes(&mut self, side: Side, read: SendOp, sge: Sge) -> Vec<u8> {
        self.queue(side, 99, read, sge);
        let core = &mut self.world.end(side).core;
        let out = core.poll_transmit(&Now::unread()).unwrap();
        let mut bytes = Vec::new();
        out.gather(usize::MAX, |seg| mem::copy_out(seg, &mut bytes).unwrap());
        core.transmitted(&Now::unread(), bytes.len());
        bytes
    }

    /// What one end has sent, a line for each segment.
    pub fn sent(&self, side: Side) -> Vec<String> {
        tap::segments(self.world.pipe(side), false, false).into_iter().map(|(_, line)| line).collect()
    }

    /// Completions of sends since the last call: cookie and status.
    pub fn sends(&mut self, side: Side) -> Vec<(u64, WcStatus)> {
        short(self.world.end(side).sends())
    }

    pub fn recvs(&mut self, side: Side) -> Vec<(u64, WcStatus)> {
        short(self.world.end(side).recvs())
    }
}

fn short(list: Vec<Wc>) -> Vec<(u64, WcStatus)> {
    list.into_iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

pub const SEND: SendOp = SendOp::Send { invalidate: None };
