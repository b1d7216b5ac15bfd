//! The pump over links that fail in many ways, and over links that are watched.

mod common;

use std::sync::Arc;

use common::{CAPS, Events, LIMIT, address, all_rights, sockets};
use uwarp_driver::pump::{Pump, Surroundings};
use uwarp_llp::link::{Call, Faulty, Tracing};
use uwarp_llp::{Link, LowerLayer};
use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::{Now, QpInit, RcCore, StreamParams};
use uwarp_rnic::{Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus};

/// All that a pump needs if only the test calls it, and always calls it again.
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

struct End<L> {
    core: RcCore,
    pump: Pump,
    around: Alone<L>,
    cq: Arc<Cq>,
    mr: Arc<Mr>,
    // Last: freed after everything that may use it.
    memory: Box<[u8]>,
}

impl<L: LowerLayer> End<L> {
    fn new(lower: L, framing: Framing) -> Self {
        let (pd, events) = (Pd::new(), Arc::new(Events::default()));
        let cq = Cq::new(1024, 0, None, events.clone());
        let mut memory = vec![0; 1 << 20].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, 1 << 20, addr, all_rights()).unwrap();
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
        let params = StreamParams { peer_is_uwarp: true, framing, ..StreamParams::default() };
        core.attach(&Now::unread(), params).unwrap();
        Self { core, pump: Pump::default(), around: Alone(lower), cq, mr, memory }
    }

    fn sge(&self, offset: usize, length: usize) -> Sge {
        let addr = self.mr.range().0 + offset as u64;
        Sge { addr, length: u32::try_from(length).unwrap(), lkey: self.mr.stag() }
    }

    fn post(&mut self, wr_id: u64, op: SendOp, sge: Sge) {
        self.core.post_send(&SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: &[sge] }).unwrap();
    }

    fn run(&mut self) {
        self.pump.run(&mut self.core, &Now::unread(), &mut self.around);
        assert!(
            self.pump
                .poll_action(&mut self.core, &Now::unread(), &mut self.around)
                .is_none_or(|action| { matches!(action, uwarp_rnic::qp::Action::Established) })
        );
    }

    fn completions(&self) -> Vec<u64> {
        let mut ids = Vec::new();
        self.cq.poll(usize::MAX, |wc| {
            assert_eq!(wc.status, WcStatus::Success);
            ids.push(wc.wr_id);
        });
        ids
    }
}

fn links() -> [Link; 2] {
    let (a, b) = sockets();
    [a, b].map(|socket| {
        socket.set_nonblocking(true).unwrap();
        Link::from(socket)
    })
}

/// Sends and Writes of all sizes, with and without a CRC, so copied and by reference, staged and placed
/// directly.
#[test]
fn short_interrupted_and_refused_calls_lose_nothing() {
    const SIZES: [usize; 8] = [0, 1, 64, 1000, 9000, 20_000, 70_000, 200_000];
    for seed in 0..12 {
        for framing in [Framing::default(), Framing::PLAIN] {
            let [a, b] = links();
            let mut a = End::new(Faulty::new(a, seed * 2 + 1), framing);
            let mut b = End::new(Faulty::new(b, seed * 7 + 3), framing);
            for (i, byte) in a.memory.iter_mut().enumerate() {
                *byte = u8::try_from(i % 251).unwrap();
            }
            let mut at = 0;
            for (i, size) in (0..).zip(SIZES) {
                let sges = [b.sge(at, size)];
                b.core.post_recv(&RecvWr { wr_id: i, sges: &sges }).unwrap();
                let (stag, to) = (b.mr.stag(), sges[0].addr + 400_000);
                a.post(i, SendOp::Send { invalidate: None }, a.sge(at, size));
                a.post(i, SendOp::Write { stag, to }, a.sge(at, size));
                at += size;
            }
            let start = std::time::Instant::now();
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            while sent.len() < 2 * SIZES.len() || received.len() < SIZES.len() {
                a.run();
                b.run();
                sent.extend(a.completions());
                received.extend(b.completions());
                assert!(start.elapsed() < LIMIT, "seed {seed}: {sent:?} {received:?}");
            }
            assert_eq!(received, (0..8).collect::<Vec<u64>>());
            // A Write completes when the kernel has taken it.
            while b.memory[400_000..400_000 + at] != a.memory[..at] {
                a.run();
                b.run();
                assert!(start.elapsed() < LIMIT, "seed {seed}: Writes");
            }
            assert!(b.memory[..at] == a.memory[..at], "seed {seed}: Sends");
        }
    }
}

/// Small work requests that are posted together leave in one system call and arrive in one.
#[test]
fn a_list_of_work_requests_takes_one_call_at_each_end() {
    let [a, b] = links();
    let mut a = End::new(Tracing::new(a), Framing::default());
    let mut b = End::new(Tracing::new(b), Framing::default());
    for wr_id in 0..32 {
        let (stag, to) = (b.mr.stag(), b.mr.range().0);
        a.post(wr_id, SendOp::Write { stag, to }, a.sge(0, 64));
    }
    a.pump.send(&mut a.core, &Now::unread(), &mut a.around);
    let calls = a.around.0.take_calls();
    let [Call::Send { offered, result: Ok(taken) }] = calls[..] else { panic!("{calls:?}") };
    assert_eq!(offered, taken);
    // The bytes are there: loopback hands them over in the call.
    b.pump.receive(&mut b.core, &Now::unread(), &mut b.around);
    let calls = b.around.0.take_calls();
    let [Call::Receive { direct: 0, result: Ok(received), .. }] = calls[..] else { panic!("{calls:?}") };
    assert_eq!(received, taken);
}
