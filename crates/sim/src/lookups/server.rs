//! A server's process: an id that listens, and the ids of its requests, which its program answers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use uwarp_cm::event::EventKind::ConnectRequest;
use uwarp_cm::machine::life::{Life, NewId, Reply, Report, Rules};
use uwarp_cm::machine::run::Deferred;
use uwarp_cm::machine::{Input, Machine as _};
use uwarp_cm::{State, Timeouts};
use uwarp_proto::setup::{ResponderPolicy, Revision};

use super::{client_at, server_at, stranger};
use crate::hosts::at;
use crate::hosts::network::{Datagram, network};
use crate::hosts::shell::Shell;
use crate::{Rng, Time};

/// Requests that a server remembers; half of them may come without a cookie.
const REMEMBERED: usize = 1024;

/// What it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The port space that it serves.
    pub port_space: u16,
    /// Requests that may wait for its program.
    pub backlog: usize,
    /// How long each answer may take.
    pub slow: Time,
    /// Of a thousand requests: rejected; neither answered nor destroyed; destroyed without an answer.
    pub rejects: [u32; 3],
}

/// What a program has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// Whom.
    pub to: SocketAddr,
    /// What that has asked.
    pub question: Vec<u8>,
    /// The number that it has given, or would have given.
    pub qpn: u32,
    /// `None`: it has refused.
    pub qkey: Option<u32>,
    /// Its data.
    pub data: Vec<u8>,
}

struct Request {
    life: Life,
    shell: Shell<Report>,
    question: Vec<u8>,
    /// Of the listener that it came from.
    of: u32,
}

/// See the head of this file.
pub struct Server {
    /// Datagrams that have arrived.
    pub inbox: VecDeque<Datagram>,
    /// Does not run until then.
    pub stopped: Time,
    /// What its program has answered since they were taken.
    pub answers: Vec<Answered>,
    plan: Plan,
    life: Life,
    shell: Shell<Report>,
    requests: BTreeMap<u32, Request>,
    /// Requests that the program has not answered.
    todo: Vec<(Time, u32)>,
    /// Answers on their way to the listener: to which, of which request.
    replies: VecDeque<(u32, u32, Reply)>,
    /// Addresses and questions that this listener has reported.
    reported: BTreeSet<(SocketAddr, Vec<u8>)>,
    spoofed: usize,
    listeners: u32,
    next: u32,
    /// Datagrams that it may have sent.
    due: u64,
    sent: u64,
    ended: bool,
    rng: Rng,
}

/// As the driver's, for datagrams.
pub(super) fn rules() -> Rules {
    let policy = ResponderPolicy {
        max_revision: Revision::Two,
        crc: true,
        markers: false,
        know_peers: true,
        max_ird: 16,
        host: None,
    };
    Rules { timeouts: Timeouts::default(), infiniband: true, policy }
}

fn sent() -> u64 {
    network(|network| network.sent_from.get(&server_at()).copied().unwrap_or_default())
}

impl Server {
    /// One that begins to listen: the `number`th in this world.
    pub fn new(now: Time, number: u32, plan: Plan, rng: Rng) -> Self {
        network(|network| network.ports.insert(server_at(), 1));
        let mut server = Self {
            inbox: VecDeque::new(),
            stopped: 0,
            answers: Vec::new(),
            life: Life::of_datagrams(rules(), plan.port_space),
            plan,
            shell: Shell::default(),
            requests: BTreeMap::new(),
            todo: Vec::new(),
            replies: VecDeque::new(),
            reported: BTreeSet::new(),
            spoofed: 0,
            listeners: 0,
            // So that no number is given twice in a world.
            next: number << 16,
            due: 0,
            sent: sent(),
            ended: false,
            rng,
        };
        server.listen(now);
        server
    }

    fn listen(&mut self, now: Time) {
        let mut key = [0; 16];
        self.rng.fill(&mut key);
        self.life.bind(server_at()).expect("it is new");
        self.life.serve(&at(now), &key, self.plan.backlog).expect("it is bound");
        self.shell.run(&mut self.life, (server_at(), true), false, &at(now));
        assert!(matches!(self.shell.deferred.pop_front(), Some(Deferred::Answer(Ok(())))));
    }

    /// The program destroys the listener, and listens again. Ids of requests stay.
    pub fn listen_again(&mut self, now: Time) {
        self.destroy(now);
        self.listeners += 1;
        self.life = Life::of_datagrams(rules(), self.plan.port_space);
        (self.spoofed, self.reported) = (0, BTreeSet::new());
        self.listen(now);
    }

    fn destroy(&mut self, now: Time) {
        self.life.destroy(&at(now));
        self.run(now);
        let before = sent();
        self.life.handle_input(
            &at(now),
            Input::Datagram { from: client_at(0), to: server_at().ip(), bytes: b"late" },
        );
        self.run(now);
        assert_eq!((sent(), self.life.poll_timeout()), (before, None), "a listener that has ended");
        assert_eq!(self.life.state(), State::Destroyed);
    }

    /// The program ends what it has.
    pub fn end(&mut self, now: Time) {
        (self.ended, self.stopped) = (true, 0);
        self.todo.clear();
        for request in self.requests.values_mut() {
            request.life.destroy(&at(now));
            request.shell.run(&mut request.life, (server_at(), false), false, &at(now));
            request.shell.deferred.clear();
        }
        self.destroy(now);
    }

    /// Nothing is left.
    pub fn check_end(&self) {
        for request in self.requests.values() {
            assert_eq!((request.life.state(), request.life.poll_timeout()), (State::Destroyed, None));
        }
    }

    // --- The threads.

    /// Does what there is to do, in an order of its own. Returns whether there was anything.
    pub fn turn(&mut self, now: Time) -> bool {
        if now < self.stopped {
            return false;
        }
        let mut did = false;
        while let Some(Datagram { from, to, bytes }) = self.inbox.pop_front() {
            self.due += 1;
            self.life.handle_input(&at(now), Input::Datagram { from, to: to.ip(), bytes: &bytes });
            // Several may come before the shell runs.
            if self.rng.chance(800) {
                self.run(now);
            }
            did = true;
        }
        self.run(now);
        while let Some(due) = self.todo.iter().position(|(at, _)| *at <= now) {
            let (_, request) = self.todo.remove(due);
            self.answer(now, request);
            did = true;
        }
        // Threads of the requests' ids tell the listener later.
        while self.rng.chance(600)
            && let Some((of, number, reply)) = self.replies.pop_front()
        {
            self.requests.remove(&number);
            if of == self.listeners {
                self.due += 1;
                self.life.reply(&reply);
                self.run(now);
            }
            did = true;
        }
        self.check();
        did || !self.replies.is_empty()
    }

    fn run(&mut self, now: Time) {
        self.shell.run(&mut self.life, (server_at(), true), false, &at(now));
        while let Some(deferred) = self.shell.deferred.pop_front() {
            match deferred {
                Deferred::Report(Report::Request(new)) => self.requested(now, *new),
                _ => panic!("an action that a listener of datagrams does not have"),
            }
        }
    }

    fn requested(&mut self, now: Time, new: NewId) {
        assert_eq!(self.life.state(), State::Listening, "a request of a listener that has ended");
        let NewId { life, conn, event } = new;
        assert_eq!((conn, event.kind, event.status), (None, ConnectRequest, 0));
        let (from, question) = (life.peer().expect("a client's"), event.private_data);
        assert!(question.ends_with(&self.plan.port_space.to_be_bytes()), "a Request for another port space");
        assert!(
            self.reported.insert((from, question.clone())) || self.reported.len() >= REMEMBERED,
            "a Request of {from} is reported twice"
        );
        self.spoofed += usize::from(stranger::is_spoofed(from));
        self.next += 1;
        let request = Request { life, shell: Shell::default(), question, of: self.listeners };
        self.requests.insert(self.next, request);
        let slow = [self.plan.slow, self.plan.slow / 50, 1][self.rng.size(0, 2)];
        self.todo.push((now + self.rng.below(slow + 1), self.next));
    }

    /// What the program does with a request.
    fn answer(&mut self, now: Time, number: u32) {
        let Some(Request { life, shell, question, of }) = self.requests.get_mut(&number) else { return };
        let [rejects, ignores, destroys] = self.plan.rejects;
        let data = [question.as_slice(), b"answer"].concat();
        let to = life.peer().expect("a client's");
        let mut said = Answered { to, question: question.clone(), qpn: number, qkey: None, data };
        match self.rng.below(1000) {
            n if n < u64::from(rejects) => life.reject(&at(now), &said.data).expect("it waits"),
            n if n < u64::from(rejects + ignores) => return,
            n if n < u64::from(rejects + ignores + destroys) => {
                // The peer is refused, without data.
                life.destroy(&at(now));
                said.data.clear();
            }
            _ => {
                said.qkey = Some(number ^ 0x5A5A_5A5A);
                life.answer(number, number ^ 0x5A5A_5A5A, &said.data).expect("it waits");
            }
        }
        self.answers.push(said);
        shell.run(life, (server_at(), false), false, &at(now));
        while let Some(deferred) = shell.deferred.pop_front() {
            match deferred {
                Deferred::Report(Report::Reply(reply)) => self.replies.push_back((*of, number, reply)),
                _ => panic!("an action that a request of datagrams does not have"),
            }
        }
    }

    /// After each step.
    fn check(&mut self) {
        assert_eq!(self.life.poll_timeout(), None, "a server has no deadline");
        let backlog = self.plan.backlog.min(REMEMBERED / 2);
        let replying = |number: &u32| self.replies.iter().any(|(_, of, _)| of == number);
        let of_it = self.requests.iter().filter(|(number, request)| {
            request.of == self.listeners
                && (request.life.state() == State::RequestPending || replying(number))
        });
        let (mut waiting, mut spoofed) = (0, 0);
        for (_, request) in of_it {
            waiting += 1;
            spoofed += usize::from(request.life.peer().is_some_and(stranger::is_spoofed));
        }
        assert!(waiting <= backlog, "{waiting} requests wait, with a backlog of {backlog}");
        assert!(
            spoofed <= backlog.div_ceil(2),
            "{spoofed} requests of addresses that nobody has wait, with a backlog of {backlog}"
        );
        assert!(self.spoofed <= REMEMBERED / 2, "a server remembers what nobody has asked");
        let sent = sent() - self.sent;
        assert!(sent <= self.due, "{sent} datagrams were sent where {} are due", self.due);
    }

    /// When something is to be done.
    pub fn next_time(&self) -> Option<Time> {
        let todo = self.todo.iter().map(|(at, _)| *at).min();
        let inbox = (!self.inbox.is_empty()).then_some(self.stopped);
        [todo, inbox].into_iter().flatten().min().map(|at| at.max(self.stopped))
    }
}
