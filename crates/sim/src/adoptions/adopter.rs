//! One end: its machine, what stands for its shell (`uwarp_cm`'s `adopt.rs`, `runner.rs`), its queue pair,
//! and its program.

use std::collections::VecDeque;
use std::time::Duration;

use rustix::io::Errno;
use uwarp_cm::event::ConnParam;
use uwarp_cm::machine::adopt::{Adopt, Report, Role};
use uwarp_cm::machine::run::Deferred;
use uwarp_cm::machine::{ConnKey, Input, Machine as _, StreamEvent};
use uwarp_proto::setup::{
    AcceptParams, Depths, InitiatorConfig, Negotiated, PeerData, ResponderPolicy, Revision,
};
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{QpModify, QpState};

use crate::hosts::at;
use crate::hosts::carrier;
use crate::hosts::network::{TcpId, network};
use crate::hosts::shell::Shell;
use crate::hosts::streams::News;
use crate::ids::node::Node;
use crate::ids::program::{QueuePair, stream_params};
use crate::{Rng, Time, instant, time};

/// How an end sets up the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// It sends the request.
    pub initiates: bool,
    /// It expects what the peer's program says.
    pub expects_peer: bool,
    /// It shows its peer that it is uwarp.
    pub knows_peers: bool,
    /// For all of set-up.
    pub limit: Time,
}

/// A call of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Call {
    Cancel,
    DestroyPair,
    FailPair,
}

enum Note {
    Stream(StreamEvent),
}

/// See the head of this file.
pub struct Adopter {
    /// Does not run until then.
    pub stopped: Time,
    /// The program has ended the stream, or its queue pair.
    pub left: bool,
    /// What its program was told.
    pub reports: Vec<Report>,
    id: TcpId,
    side: usize,
    plan: Plan,
    begun: Option<Time>,
    machine: Option<Adopt>,
    shell: Shell<Report>,
    notes: VecDeque<Note>,
    pair: QueuePair,
    /// The program has destroyed it; its stream is closed in the background.
    pair_is_gone: bool,
    cancelled: bool,
    received: usize,
    rng: Rng,
    trace: bool,
}

/// What a side's program says to the other one.
fn data(side: usize) -> Vec<u8> {
    format!("peer {side}").into_bytes()
}

fn is_peer(data: &[u8]) -> bool {
    matches!(data, b"peer 0" | b"peer 1")
}

fn is_never(_: &[u8]) -> bool {
    false
}

impl Adopter {
    /// With a queue pair in INIT.
    pub fn new((id, side): (TcpId, usize), plan: Plan, rng: Rng, trace: bool) -> Self {
        let mut pair = QueuePair::new(0x100 + side as u32);
        pair.init();
        Self {
            stopped: 0,
            left: false,
            reports: Vec::new(),
            id,
            side,
            plan,
            begun: None,
            machine: None,
            shell: Shell::default(),
            notes: VecDeque::new(),
            pair,
            pair_is_gone: false,
            cancelled: false,
            received: 0,
            rng,
            trace,
        }
    }

    /// The program gives its socket to the machine.
    pub fn begin(&mut self, now: Time) {
        if self.cancelled {
            return;
        }
        let Plan { initiates, expects_peer, knows_peers, limit } = self.plan;
        let policy = ResponderPolicy {
            max_revision: Revision::Two,
            crc: true,
            markers: false,
            know_peers: knows_peers,
            max_ird: 16,
            host: None,
        };
        let depths = Depths::negotiated(16, 16);
        let peer = PeerData { qpn: self.pair.qpn, ..PeerData::new() };
        let role = if initiates {
            Role::Initiator(InitiatorConfig {
                revision: Revision::Two,
                crc: true,
                markers: false,
                depths,
                max_ird: 16,
                peer: knows_peers.then_some(peer),
                peer_in_request: false,
            })
        } else {
            Role::Responder(policy, AcceptParams { depths, peer })
        };
        let expects = if expects_peer { is_peer } else { is_never };
        let limit = Duration::from_nanos(limit);
        let machine = Adopt::new(&at(now), role, &data(self.side), expects, limit).expect("it fits");
        network(|network| network.running = self.side);
        self.shell.conns.insert(machine.conn(), carrier::connection(self.id, self.side));
        self.machine = Some(machine);
        self.begun = Some(now);
        self.run(now);
    }

    /// The program makes a call.
    pub fn call(&mut self, now: Time, call: Call) {
        network(|network| network.running = self.side);
        self.left = true;
        match call {
            Call::Cancel => {
                // What another thread has begun to report is dropped, as in the shell.
                self.shell.deferred.retain(|deferred| !matches!(deferred, Deferred::Report(_)));
                self.cancelled = true;
                match &mut self.machine {
                    Some(machine) => {
                        machine.cancel();
                    }
                    // The program closes its socket.
                    None => network(|network| network.close(self.id, self.side, false)),
                }
                self.run(now);
            }
            Call::DestroyPair => {
                self.pair.streams.forget_reports();
                self.pair_is_gone = true;
                self.modify_pair(now, QpState::Reset);
            }
            Call::FailPair => self.modify_pair(now, QpState::Err),
        }
    }

    fn modify_pair(&mut self, now: Time, to: QpState) {
        let change = QpModify { state: Some(to), ..QpModify::default() };
        // Refused where the state does not allow it.
        let _ = self.pair.streams.modify(now, &change);
        self.pump(now);
    }

    // --- The threads.

    /// Does something of what there is to do, in an order of its own. Returns whether there was anything.
    pub fn turn(&mut self, now: Time) -> bool {
        if now < self.stopped {
            return false;
        }
        network(|network| network.running = self.side);
        let before = network(|network| network.activity);
        let mut did = false;
        if let Some(machine) = &mut self.machine {
            if machine.poll_timeout().is_some_and(|at| at <= instant(now)) {
                machine.handle_timeout(&at(now));
                let next = machine.poll_timeout();
                assert!(next.is_none_or(|at| at > instant(now)), "a deadline is over after handle_timeout");
                did = true;
            }
            did |= self.shell.report_readiness(machine, &at(now));
        }
        self.run(now);
        // What threads without the lock do comes later, in between other things.
        for _ in 0..2 {
            if self.rng.chance(600) {
                did |= self.note(now);
            } else {
                did |= self.carry_out(now);
            }
            self.run(now);
        }
        did |= self.pump(now);
        self.check(now);
        did || self.is_busy() || network(|network| network.activity) != before
    }

    fn run(&mut self, now: Time) {
        if let Some(machine) = &mut self.machine {
            self.shell.run(machine, ((crate::hosts::host(1), 0).into(), false), false, &at(now));
        }
    }

    fn note(&mut self, now: Time) -> bool {
        let Some(Note::Stream(event)) = self.notes.pop_front() else { return false };
        if let Some(machine) = &mut self.machine {
            let conn = machine.conn();
            machine.handle_input(&at(now), Input::Stream { conn, event });
        }
        true
    }

    fn is_busy(&self) -> bool {
        !self.shell.deferred.is_empty() || !self.notes.is_empty()
    }

    fn carry_out(&mut self, now: Time) -> bool {
        match self.shell.deferred.pop_front() {
            None => return false,
            Some(Deferred::Attach { conn, said, param, .. }) => self.attach(now, conn, &said, param),
            Some(Deferred::Disconnect(_, answered)) => {
                if self.pair.streams.stream.is_some() && !self.pair_is_gone {
                    self.pair.streams.answer();
                    self.pair.streams.end.core.disconnect(&at(now), answered);
                    self.pump(now);
                }
            }
            Some(Deferred::Report(report)) => self.told(now, report),
            Some(Deferred::Fail | Deferred::Answer(_)) => unreachable!("adoptions do none of them"),
        }
        true
    }

    fn attach(&mut self, now: Time, conn: ConnKey, said: &Negotiated, param: ConnParam) {
        let Some(set_up) = self.shell.conns.take(conn) else { return };
        let attached = if self.pair_is_gone {
            Err((VerbsError::Invalid("the queue pair is destroyed"), set_up))
        } else {
            let timer = self.pair.streams.end.core.query().min_rnr_timer;
            self.pair.streams.attach(now, conn, set_up, stream_params(said, param, timer, true))
        };
        let event = match attached {
            Ok((id, side)) => {
                Node::check_set_up(id);
                self.pair.hooks.insert((id, side), (0, conn));
                // Its first events may come before the answer, or after it.
                if self.rng.chance(500) {
                    self.pump(now);
                    while self.rng.chance(500) && self.note(now) {
                        self.run(now);
                    }
                }
                StreamEvent::Attached
            }
            Err((why, set_up)) => {
                self.shell.conns.insert(conn, set_up);
                StreamEvent::Refused(why)
            }
        };
        if let Some(machine) = &mut self.machine {
            machine.handle_input(&at(now), Input::Stream { conn, event });
        }
    }

    fn told(&mut self, now: Time, report: Report) {
        if self.trace {
            eprintln!("{now:>12} end {} {report:?}", self.side);
        }
        assert!(!self.cancelled, "{report:?} of an adoption that was cancelled");
        let fits = match (self.reports.last(), &report) {
            (None, Report::Adopted(data)) => {
                assert_eq!(*data, self::data(1 - self.side), "what the peer's program says");
                assert!(self.plan.expects_peer, "it does not expect this peer");
                true
            }
            (None, Report::Failed(_)) => {
                assert!(self.shell.conns.is_empty(), "a connection is open that has failed");
                assert!(self.pair.streams.stream.is_none(), "a failed adoption has a stream");
                true
            }
            (Some(Report::Adopted(_)), Report::Ended(_)) => true,
            _ => false,
        };
        assert!(fits, "{report:?} after {:?}", self.reports);
        if matches!(report, Report::Adopted(_)) && !self.pair_is_gone {
            self.pair.send(self.id, self.side);
            self.pump(now);
        }
        self.reports.push(report);
    }

    fn pump(&mut self, now: Time) -> bool {
        let mut news = Vec::new();
        let mut did = self.pair.streams.pump(now, &mut news);
        for news in news {
            let event = match news {
                News::Established(..) => StreamEvent::Established,
                News::Ended(.., why) => StreamEvent::Ended(why),
            };
            if !self.pair_is_gone {
                self.notes.push_back(Note::Stream(event));
            }
        }
        did |= !self.pair.streams.end.is_empty_of_completions();
        self.pair.streams.end.sends();
        self.received += self.pair.receive();
        did
    }

    // --- The rules.

    /// After each step.
    fn check(&self, now: Time) {
        let (Some(machine), Some(begun)) = (&self.machine, self.begun) else { return };
        let deadline = machine.poll_timeout();
        let over = self.cancelled || !self.reports.is_empty();
        assert!(!over || deadline.is_none(), "a deadline of an adoption that is over");
        if !over && !self.is_busy() {
            assert!(deadline.is_some(), "nothing ends the set-up of end {}", self.side);
            let limit = (begun + self.plan.limit).max(self.stopped);
            assert!(now < limit, "end {} was told nothing within its limit", self.side);
        }
        if over && !self.is_busy() {
            assert!(self.shell.conns.is_empty(), "a connection that is over is open");
        }
    }

    /// Whether its program knows what has become of it: it runs, it has ended, or the program does not care.
    pub fn is_told(&self) -> bool {
        self.begun.is_none() || self.cancelled || !self.reports.is_empty()
    }

    /// Whether the program has a stream, as far as it knows.
    pub fn runs(&self) -> bool {
        matches!(self.reports.last(), Some(Report::Adopted(_))) && !self.pair_is_gone
    }

    /// Whether its queue pair has the stream.
    pub fn has_stream(&self) -> bool {
        self.pair.streams.stream.is_some()
    }

    /// Whether the program has given its socket.
    pub fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// Messages that its program has sent, and those that have come.
    pub fn sent(&self) -> usize {
        self.pair.sent
    }

    /// See [`Self::sent`].
    pub fn received(&self) -> usize {
        self.received
    }

    /// How it has failed.
    pub fn failed(&self) -> Option<Errno> {
        match self.reports.last() {
            Some(Report::Failed(errno)) => Some(*errno),
            _ => None,
        }
    }

    /// When something is to be done.
    pub fn next_time(&mut self, now: Time) -> Option<Time> {
        if now < self.stopped {
            return Some(self.stopped);
        }
        let machine = self.machine.as_ref().and_then(|machine| machine.poll_timeout()).map(time);
        [machine, self.pair.streams.next_time()].into_iter().flatten().min()
    }

    /// Nothing is left.
    pub fn check_end(&self) {
        let deadline = self.machine.as_ref().and_then(|machine| machine.poll_timeout());
        assert_eq!((deadline, self.shell.conns.len(), self.pair.streams.count()), (None, 0, 0));
    }
}
