//! The shell of the connection manager's machines: the real runner and its loop, over a machine that counts.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use shuttle::rand::{Rng, thread_rng};
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::qp::{Now, StreamParams};

use crate::background;
use crate::event::ConnParam;
use crate::machine::{Action, ConnKey, Input, Machine, Recipient, Space, Transmit, Want};
use crate::runner::{Environment, Runner};
use crate::runners::{Qp, connection};
use crate::sys::{self, Count, Thread, start};

/// Pieces that a run reads at most, and more.
const TURNS: usize = 150;
const SOON: Duration = Duration::from_secs(5);

/// Reports each datagram's first byte, and that so many bytes have come. Answers the program when it is told
/// that no queue pair takes a connection.
#[derive(Default)]
struct Script {
    awaited: usize,
    got: usize,
    reports: VecDeque<u8>,
    actions: VecDeque<Action<u8>>,
}

impl Machine for Script {
    type Report = u8;

    fn handle_input(&mut self, _: &Now, input: Input<'_>) {
        match input {
            Input::Datagram { bytes, .. } => self.reports.push_back(bytes[0]),
            Input::Stream { .. } => self.actions.push_back(Action::Answer(Err(Errno::CONNRESET))),
            Input::Bytes { bytes, .. } => {
                self.got += bytes.len();
                if self.got == self.awaited {
                    self.reports.push_back(0);
                }
            }
            _ => {}
        }
    }

    fn handle_timeout(&mut self, _: &Now) {}

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        None
    }

    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    fn poll_action(&mut self) -> Option<Action<u8>> {
        self.reports.pop_front().map(Action::Report).or_else(|| self.actions.pop_front())
    }

    fn want(&self, _: ConnKey) -> Want {
        Want::Bytes(1)
    }
}

/// Counts reports, and passes them on to the next runner.
struct Owner {
    next: OnceLock<Weak<Runner<Script, Owner>>>,
    reports: Count,
}

impl Environment<Script> for Owner {
    fn queue_pair(&self, _: Recipient) -> Option<Arc<Qp>> {
        None
    }

    fn stream_params(&self, _: &Qp, _: &Negotiated, _: ConnParam) -> StreamParams {
        unreachable!("there is no queue pair")
    }

    fn report(&self, left: u8) {
        self.reports.add();
        if left > 0
            && let Some(next) = self.next.get().and_then(Weak::upgrade)
        {
            let here = Ipv4Addr::LOCALHOST;
            next.datagram(SocketAddr::from((here, 1)), IpAddr::from(here), &[left - 1]);
        }
    }
}

fn at_any_moment() {
    sys::sleep(Duration::from_micros(thread_rng().gen_range(0..1500)));
}

/// A peer sends much at once, and the lower layer says so once. A run ends before it has read everything, and
/// nobody says again that something is there.
pub fn what_has_come_is_read_to_its_end() {
    let engine = background::start().unwrap();
    let reports = Count::new();
    let (set_up, peer) = connection();
    let owner = Owner { next: OnceLock::new(), reports: reports.clone() };
    let script = Script { awaited: 2 * TURNS, ..Script::default() };
    let runner = Runner::start(&engine, owner, script, [(Space::new(0).name(), set_up)]);
    let mut threads: Vec<Thread> = (0..2)
        .map(|_| {
            let peer = peer.clone();
            start(move || {
                at_any_moment();
                peer.send(TURNS);
            })
        })
        .collect();
    let caller = runner.clone();
    threads.push(start(move || {
        at_any_moment();
        caller.call(|_, _| ());
    }));
    threads.into_iter().for_each(Thread::join);
    reports.wait(1);
}

/// Three runners of a process in a ring.
fn ring(reports: &Count) -> [Arc<Runner<Script, Owner>>; 3] {
    let engine = background::start().unwrap();
    let runners = [(); 3].map(|()| {
        let owner = Owner { next: OnceLock::new(), reports: reports.clone() };
        Runner::start(&engine, owner, Script::default(), [])
    });
    for at in 0..3 {
        let _ = runners[at].env().next.set(Arc::downgrade(&runners[(at + 1) % 3]));
    }
    runners
}

const ROUNDS: u8 = 7;

/// Each call has its token pass from runner to runner. None is lost, and no thread waits for another.
pub fn what_is_posted_from_runner_to_runner_arrives() {
    let reports = Count::new();
    let runners = ring(&reports);
    let threads = runners.clone().map(|runner| {
        start(move || {
            at_any_moment();
            runner.call(|script, _| script.reports.push_back(ROUNDS));
        })
    });
    threads.into_iter().for_each(Thread::join);
    reports.wait(3 * (u64::from(ROUNDS) + 1));
}

/// A call of the program returns when what it has asked for is done, whichever thread does it.
pub fn a_call_gets_its_answer_from_any_thread() {
    let reports = Count::new();
    let engine = background::start().unwrap();
    let (set_up, _peer) = connection();
    let conn = Space::new(0).name();
    let owner = Owner { next: OnceLock::new(), reports: reports.clone() };
    let runner = Runner::start(&engine, owner, Script::default(), [(conn, set_up)]);
    let beside = runner.clone();
    let beside = start(move || {
        at_any_moment();
        (0..3).for_each(|_| beside.call(|script, _| script.reports.push_back(0)));
    });
    at_any_moment();
    let answer = runner.ask(|script, _, _| {
        let (said, param) = (Box::new(negotiated()), ConnParam::DEFAULT);
        script.actions.push_back(Action::Attach { conn, to: Recipient::Own, said, param });
        Ok(())
    });
    assert_eq!(answer, Err(Errno::CONNRESET));
    beside.join();
    reports.wait(3);
}

/// What two ends of uwarp agree on.
fn negotiated() -> Negotiated {
    use uwarp_proto::setup::{AcceptParams, Depths, Initiator, InitiatorConfig, Responder, ResponderPolicy};
    let revision = uwarp_proto::setup::Revision::Two;
    let depths = Depths::negotiated(1, 1);
    let (crc, markers, max_ird) = (true, false, 1);
    let peer = Default::default();
    let config =
        InitiatorConfig { revision, crc, markers, depths, max_ird, peer: None, peer_in_request: false };
    let request = Initiator::new(config, b"").unwrap().poll_transmit().unwrap();
    let policy =
        ResponderPolicy { max_revision: revision, crc, markers, know_peers: false, max_ird, host: None };
    let mut responder = Responder::new(policy);
    let mut rest = &request[..];
    while !rest.is_empty() {
        let (piece, more) = rest.split_at(responder.want().min(rest.len()));
        responder.handle_input(piece).unwrap();
        rest = more;
    }
    responder.accept(AcceptParams { depths, peer }, b"").unwrap()
}

/// One of them is destroyed at any moment, also while it posts and others post to it.
pub fn a_runner_that_is_destroyed_is_gone() {
    let reports = Count::new();
    let runners = ring(&reports);
    let [gone, others @ ..] = runners.clone().map(|runner| Arc::downgrade(&runner));
    let threads = runners.map(|runner| {
        start(move || {
            at_any_moment();
            runner.call(|script, _| script.reports.push_back(ROUNDS));
            runner.cancel(|script| script.reports.clear());
        })
    });
    threads.into_iter().for_each(Thread::join);
    let begin = sys::now();
    while [&gone, &others[0], &others[1]].iter().any(|runner| runner.strong_count() > 0) {
        let waited = sys::now().saturating_duration_since(begin);
        assert!(waited < SOON, "somebody keeps it");
        sys::sleep(Duration::from_millis(10));
    }
}
