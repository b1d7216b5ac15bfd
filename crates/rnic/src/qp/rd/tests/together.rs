//! Queue pairs on the machines of two processes, with a network between them that loses packets. What an
//! owner does for them is here in short.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{self, Action, Bytes, Config, PacketBuf, Rd, Route};

use super::*;

const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];

struct Process {
    machine: Rd,
    end: End,
    route: Route,
    requests: HashMap<Ticket, u64>,
    buffer: PacketBuf,
}

struct World {
    now: Instant,
    processes: [Process; 2],
    numbers: Numbers,
    /// One packet in this many is lost.
    lost: usize,
}

impl Process {
    fn new(now: Instant, me: usize, how: RdInit) -> Self {
        let address = |n: usize| (ADDRESSES[n], 0x1234).into();
        let seed = [u8::try_from(me).unwrap() + 1; 32];
        Self {
            machine: Rd::new(&Now::at(now), Config::default(), &seed),
            end: End::with(How { init: how, cq_depth: 64, ..PLAIN }),
            route: Route { local: address(me), remote: address(1 - me) },
            requests: HashMap::new(),
            buffer: PacketBuf::new(),
        }
    }

    /// Gives the queue pair's messages to the machine, and does what the machine says.
    fn turn(&mut self, now: &Now) {
        while let Some(sent) = self.end.core.next_message() {
            let ticket = self.machine.post(now, self.route, sent.message).unwrap();
            self.end.core.assign(sent.request, ticket);
            self.requests.insert(ticket, sent.request);
        }
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Finished { ticket, outcome } => {
                    self.end.core.finished(self.requests.remove(&ticket).unwrap(), outcome);
                }
                Action::Deliver { message, .. } => {
                    self.end.core.deliver(message);
                }
                Action::AskLength { .. } => {}
                Action::TakeBack { message, .. } => self.end.core.take_back(message).wake(),
                Action::AskPort { .. } => {}
            }
        }
    }

    fn packet(&mut self, now: &Now) -> Option<Vec<u8>> {
        self.machine.poll_transmit(now, &mut self.buffer)?;
        let (mut packet, core) = (Vec::new(), &mut self.end.core);
        self.buffer.assemble(0, &mut packet, |payload, out| {
            assert!(core.fill(self.requests[&payload.ticket], payload.offset, payload.len, out));
        });
        Some(packet)
    }

    fn receive(&mut self, now: &Now, packet: &[u8]) {
        let mut arrivals = Vec::new();
        self.machine.handle_input(now, self.route, packet, &mut arrivals);
        let mut next = 0;
        while let Some(arrival) = arrivals.get(next).cloned() {
            next += 1;
            let rd::Arrival { message, pair, offset, message_len, first, ddp, .. } = arrival;
            let bytes = match &arrival.bytes {
                Bytes::Datagram(range) => &packet[range.clone()],
                Bytes::Held(bytes) => bytes,
                Bytes::Joined(_) => panic!("datagrams come one by one"),
            };
            let source_qpn = pair.source;
            let remote = arrival.route.remote;
            let segment = RdSegment {
                message,
                source_qpn,
                remote,
                offset,
                message_len,
                first,
                ddp,
                bytes: bytes.into(),
            };
            let placed = self.end.place(&segment);
            self.machine.on_placed(now, &arrival, placed, &mut arrivals);
        }
    }
}

impl World {
    fn new(how: RdInit, seed: u64, lost: usize) -> Self {
        let now = Instant::now();
        let processes = [0, 1].map(|me| Process::new(now, me, how));
        Self { now, processes, numbers: Numbers(seed), lost }
    }

    /// One step: everything that can go now goes, or the clock moves on.
    fn step(&mut self) {
        let now = Now::at(self.now);
        let mut is_idle = true;
        for me in [0, 1] {
            self.processes[me].turn(&now);
            while let Some(packet) = self.processes[me].packet(&now) {
                is_idle = false;
                if self.lost == 0 || self.numbers.below(self.lost) > 0 {
                    self.processes[1 - me].receive(&now, &packet);
                }
            }
            self.processes[me].turn(&now);
        }
        self.now += Duration::from_micros(20);
        if is_idle {
            let next = self.processes.iter().filter_map(|process| process.machine.poll_timeout()).min();
            self.now = self.now.max(next.unwrap_or(self.now));
        }
        let now = Now::at(self.now);
        for process in &mut self.processes {
            process.machine.handle_timeout(&now);
        }
    }

    /// The completions of one end, as soon as there are so many.
    fn completions(&mut self, me: usize, count: usize) -> Vec<(u64, WcStatus)> {
        let mut polled = Vec::new();
        for _ in 0..100_000 {
            polled.extend(self.processes[me].end.polled());
            if polled.len() >= count {
                return polled;
            }
            self.step();
        }
        panic!("{polled:?}");
    }
}

/// Bytes of message `n`.
fn text(n: u64) -> Vec<u8> {
    (0..n * 977 % 3000).map(|at| (n * 31 + at) as u8).collect()
}

#[test]
fn messages_of_all_lengths_arrive_once_although_packets_are_lost() {
    for (seed, ordered) in [(1, false), (2, true), (3, false), (4, true)] {
        let grh = seed > 2;
        let area = if grh { 40 } else { 0 };
        let mut world = World::new(RdInit { ordered, grh, job_key: 0, max_records: 0 }, seed, 8);
        // Parts of the sender's memory that no message uses.
        let (mut posted, mut done, mut free, mut received) = (0, 0, vec![0, 1, 2, 3], Vec::new());
        let recv = |world: &mut World, slot: u64| {
            world.processes[1].end.recv(slot, 4096 * slot as usize, 3000 + area);
        };
        (0..4).for_each(|slot| recv(&mut world, slot));
        for _ in 0..200_000 {
            while posted < 60
                && let Some(slot) = free.pop()
            {
                let (end, text, at) = (&mut world.processes[0].end, text(posted), 4096 * slot as usize);
                end.memory[at..at + text.len()].copy_from_slice(&text);
                let first = text.len().min(7);
                let list = [(at, first), (at + first, text.len() - first)];
                let list = list.map(|(at, len)| end.sge(at, u32::try_from(len).unwrap()));
                let op = SendOp::SendImmediate { imm: (posted as u32).to_be_bytes() };
                end.send_op(slot, op, &list, SIGNALED).unwrap();
                posted += 1;
            }
            world.step();
            for (slot, status) in world.processes[0].end.polled() {
                assert_eq!(status, WcStatus::Success);
                free.push(slot);
                done += 1;
            }
            let mut all = Vec::new();
            world.processes[1].end.cq.poll(64, |wc| all.push(wc));
            for wc in all {
                let n = u64::from(u32::from_be(wc.imm_or_inv));
                assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, text(n).len() as u32 + area));
                let at = 4096 * wc.wr_id as usize + area as usize;
                assert!(
                    world.processes[1].end.memory[at..][..text(n).len()] == text(n),
                    "message {n}, seed {seed}"
                );
                received.push(n);
                recv(&mut world, wc.wr_id);
            }
            if done == 60 {
                break;
            }
        }
        assert_eq!(done, 60);
        if !ordered {
            received.sort_unstable();
        }
        assert!(received.into_iter().eq(0..60), "seed {seed}");
    }
}

#[test]
fn what_the_receiver_refuses_fails_with_its_status_and_the_rest_goes_on() {
    let mut world = World::new(PLAIN.init, 1, 0);
    let b = &mut world.processes[1].end;
    b.recv(1, 0, 8);
    let bad = [Sge { lkey: 1, ..b.sge(0, 8) }];
    b.core.post_recv(&RecvWr { wr_id: 2, sges: &bad }).unwrap();
    b.core.modify(&QpModify { min_rnr_timer: Some(1), ..QpModify::default() }).unwrap();
    let a = &mut world.processes[0].end;
    a.core.modify(&QpModify { rnr_retry: Some(1), ..QpModify::default() }).unwrap();
    let (long, good) = ([a.sge(0, 9)], [a.sge(0, 8)]);
    a.send(1, &long, UNSIGNALED).unwrap();
    assert_eq!(world.completions(0, 1), [(1, WcStatus::RemInvReqErr)]);
    let a = &mut world.processes[0].end;
    let wr = SendWr { wr_id: 2, op: SendOp::Send { invalidate: None }, flags: UNSIGNALED, sges: &good };
    let ah = a.ah();
    a.core
        .post_send(&UdSendWr { wr, ah: &ah, remote_qpn: QPN, remote_qkey: QKEY + 1, job_key: None })
        .unwrap();
    assert_eq!(world.completions(0, 1), [(2, WcStatus::RemInvRdReqErr)]);
    for (wr_id, status) in [(3, WcStatus::Success), (4, WcStatus::RemOpErr), (5, WcStatus::RnrRetryExcErr)] {
        world.processes[0].end.send(wr_id, &good, SIGNALED).unwrap();
        assert_eq!(world.completions(0, 1), [(wr_id, status)]);
    }
    let b = &mut world.processes[1].end;
    assert_eq!(b.polled(), [(1, WcStatus::Success), (2, WcStatus::LocProtErr)]);
    assert!(!b.core.take_ready());
    // It goes on.
    b.recv(6, 0, 8);
    assert!(b.core.take_ready());
    world.processes[0].end.send(6, &good, SIGNALED).unwrap();
    assert_eq!(world.completions(0, 1), [(6, WcStatus::Success)]);
    world.processes[1].end.modify(QpState::Err);
    world.processes[0].end.send(7, &good, SIGNALED).unwrap();
    assert_eq!(world.completions(0, 1), [(7, WcStatus::RemInvRdReqErr)]);
}

/// The receiver fails in the middle of a message.
#[test]
fn an_error_of_the_receiver_aborts_what_it_has_begun() {
    let mut world = World::new(PLAIN.init, 1, 0);
    world.processes[1].end.recv(1, 0, 8192);
    let list = [world.processes[0].end.sge(0, 8192)];
    world.processes[0].end.send(1, &list, SIGNALED).unwrap();
    let now = Now::at(world.now);
    // Contact, then the first packet alone.
    let [a, b] = &mut world.processes;
    a.turn(&now);
    let hello = a.packet(&now).unwrap();
    b.receive(&now, &hello);
    let challenge = b.packet(&now).unwrap();
    a.receive(&now, &challenge);
    let first = a.packet(&now).unwrap();
    b.receive(&now, &first);
    assert_eq!(b.end.core.snapshot().receives_posted, 0);
    b.end.modify(QpState::Err);
    assert_eq!(b.end.polled(), [(1, WcStatus::WrFlushErr)]);
    assert_eq!(world.completions(0, 1), [(1, WcStatus::RemAbortErr)]);
    for _ in 0..1000 {
        world.step();
    }
    assert_eq!(world.processes[1].end.polled(), []);
    assert!(world.processes[1].end.core.receives.is_empty(), "nothing is remembered");
}
